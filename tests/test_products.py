"""Products of whole matrices by cuBLAS: any layout, any dtype, and the precision asked for, not torch's switch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from comparison import error
from emulation import emulated
from whorl.engines.cuda import products
from whorl.engines.cuda.products import Product, better_together, each_product, handle, laid, product

gpu = pytest.mark.gpu
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


@gpu
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


@gpu
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


@gpu
def test_a_long_sum_of_float32_is_as_precise_as_a_short_one() -> None:
    a, b = torch.randn(25_600, 4096, device="cuda"), torch.randn(25_600, 1024, device="cuda")
    assert error(product(a.t(), b), a.double().t() @ b.double()) < 1.2e-6


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_a_long_sum_of_float32_is_made_of_parts(
    turned: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.randn(*shape) for shape in ((6, 2500), (2500, 7)))
    a, b = (one.t().contiguous().t() if way else one for one, way in zip((a, b), turned, strict=True))
    (a, a_turned, a_step), (b, b_turned, b_step) = laid(a), laid(b)
    assert (a_turned, b_turned) == turned
    with emulated(tmp_path):
        depths, library = [], products.cublas()
        multiply = library.cublasGemmEx
        library.cublasGemmEx = lambda *given: depths.append(given[5].value) or multiply(*given)
        for large, tf32, wanted in ((41, False, [1250, 1250]), (42, False, [2500]), (0, True, [2500])):
            monkeypatch.setattr(products, "_LARGE", large)
            depths.clear()
            made = torch.full((6, 7), 3.0)
            ready = Product(torch.float32, (6, 2500, 7), turned, (a_step, b_step, 7), tf32)
            for add in (False, True):
                ready(handle(torch.float32), a.data_ptr(), b.data_ptr(), made.data_ptr(), add)
            assert depths == wanted * 2
            assert error(made, 2 * a.double() @ b.double()) < (1e-3 if tf32 else 1e-5)  # every part, at its place


def several(count: int, rows: int, depth: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Parts of rows, turned, as gates lie beside each other; whole matrices; and room for what is made of them."""
    parts = torch.randn(depth, count * rows + 2).to(device, dtype)[:, 1:-1].unflatten(1, (count, rows)).permute(1, 2, 0)
    whole = torch.randn(count, depth, columns).to(device, dtype)
    return [parts, whole, torch.full((count, rows, columns), 3.0, device=device, dtype=dtype)]


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_several_products_in_one_launch(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b, made = several(3, 5, 6, 7, dtype, "cpu")
    with emulated(tmp_path):
        each_product(a, b, made)
    assert error(made, a.double() @ b.double()) <= EPS[dtype]


@pytest.mark.parametrize(
    "units, rows, element, together",
    [(256, 12800, 4, False), (512, 12800, 4, True), (1024, 12800, 4, True), (256, 12800, 2, True)],
)
def test_several_products_are_one_launch_where_that_was_faster(
    units: int, rows: int, element: int, together: bool
) -> None:
    assert better_together(units, rows, element) is together


@gpu
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("count, rows, depth, columns", [(1, 1, 1, 1), (3, 5, 6, 7), (4, 256, 1000, 256)])
def test_several_products_in_one_launch_on_a_gpu(
    count: int, rows: int, depth: int, columns: int, dtype: torch.dtype
) -> None:
    a, b, made = several(count, rows, depth, columns, dtype, "cuda")
    each_product(a, b, made)
    assert error(made, a.double() @ b.double()) <= EPS[dtype]
