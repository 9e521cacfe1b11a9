"""Products of whole matrices by cuBLAS: any layout, any dtype, and the precision asked for, not torch's switch."""

import pytest
import torch
from torch import Tensor

from comparison import error
from whorl.engines.cuda.products import product

pytestmark = pytest.mark.gpu
EPS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAYOUTS = {
    "plain": lambda rows, columns: torch.randn(rows, columns),
    "turned": lambda rows, columns: torch.randn(columns, rows).t(),
    "a part of rows": lambda rows, columns: torch.randn(rows, columns + 5)[:, 3 : 3 + columns],
    "a part of columns, turned": lambda rows, columns: torch.randn(columns, rows + 3)[:, 1 : 1 + rows].t(),
    "every second": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
    "the same row": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
}


def drawn(layout: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """On the GPU as it lies on the CPU; the storage goes with it."""
    made = LAYOUTS[layout](rows, columns)
    whole = made.as_strided((made.untyped_storage().nbytes() // 4,), (1,), 0).to("cuda", dtype)
    return whole.as_strided(made.shape, made.stride(), made.storage_offset())


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("b", LAYOUTS)
@pytest.mark.parametrize("a", LAYOUTS)
def test_a_product_is_right_however_matrices_lie(a: str, b: str, dtype: torch.dtype) -> None:
    for rows, depth, columns in [(33, 20, 47), (1, 9, 5), (7, 1, 3), (4, 6, 1), (1, 1, 1)]:
        left, right = drawn(a, rows, depth, dtype), drawn(b, depth, columns, dtype)
        true = left.double() @ right.double()
        assert error(product(left, right), true) <= EPS[dtype]
        room = torch.full((rows, columns + 4), 2.0, device="cuda", dtype=dtype)
        product(left, right, room.narrow(1, 1, columns))
        assert error(room[:, 1:-3], true) <= EPS[dtype]
        product(left, right, room.narrow(1, 1, columns), add=True)
        assert error(room[:, 1:-3], 2 * true) <= 2 * EPS[dtype]
        assert (room[:, :1] == 2).all()
        assert (room[:, -3:] == 2).all()
        wide = product(left, right, wide=True)
        assert wide.dtype == torch.float32
        assert error(wide, true) <= EPS[torch.float32]


@pytest.mark.parametrize("allowed", [False, True])
def test_float32_is_as_precise_as_asked_whatever_torchs_switch_of_products_says(allowed: bool) -> None:
    a, b = torch.randn(2, 300, 300, device="cuda")
    true, before = a.double() @ b.double(), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert error(product(a, b), true) < 1e-6
    assert 1e-5 < error(product(a, b, tf32=True), true) < 1e-3
    assert error(a @ b, true) < (1e-3 if allowed else 1e-6)
    assert (error(a @ b, true) > 1e-5) == allowed
    torch.backends.cuda.matmul.allow_tf32 = before
