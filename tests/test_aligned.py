"""Products of matrices whose rows are no multiple of 16 bytes: the copies around them, run on the host."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulation import emulated
from whorl.engines.cuda import aligned
from whorl.engines.cuda.aligned import Products
from whorl.engines.cuda.tiling import Chip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CHIP = Chip((9, 0), 132)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every product is worth the copies, and memory is full of NaN before it is written."""
    monkeypatch.setattr(aligned, "LEAST", 0)
    torch.use_deterministic_algorithms(True)
    with emulated(folder):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def seen(host: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    found, real = [], aligned.product

    def product(a: Tensor, b: Tensor, *rest: object) -> Tensor:
        found.append((a, b))
        return real(a, b, *rest)

    monkeypatch.setattr(aligned, "product", product)
    return found


LAYOUTS = {
    "as they are": lambda matrix: matrix,
    "turned": lambda matrix: matrix.t().contiguous().t(),
    "part of a wider one": lambda matrix: torch.cat([matrix, matrix[:, :3]], 1)[:, : matrix.shape[1]],
    "every other column": lambda matrix: matrix.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_it_is_the_product(left: str, right: str, dtype: torch.dtype, seen: list[tuple[Tensor, Tensor]]) -> None:
    for sizes in ((9, 13, 6), (8, 16, 24), (5, 7, 10), (12, 30, 3)):
        check(*sizes, left, right, dtype, seen)


def check(
    rows: int, depth: int, columns: int, left: str, right: str, dtype: torch.dtype, seen: list[tuple[Tensor, Tensor]]
) -> None:
    a = LAYOUTS[left](torch.randn(rows, depth).to(dtype))
    b = LAYOUTS[right](torch.randn(depth, columns).to(dtype))
    made, out = Products(CHIP, 0, dtype.itemsize, [1], 1), torch.empty(rows, columns, dtype=dtype)
    want = (a.float() @ b.float()).to(dtype)
    torch.testing.assert_close(made(0, a, b), want)
    assert made(0, a, b, out) is out
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(made(0, a, b, out, add=True), 2 * want)
    for matrix in seen[-3]:
        across = matrix.shape[1] if matrix.stride(1) == 1 else matrix.shape[0]
        assert across * dtype.itemsize % 16 == 0
        assert max(matrix.stride()) * dtype.itemsize % 16 == 0


def test_what_is_aligned_is_not_copied(seen: list[tuple[Tensor, Tensor]]) -> None:
    a, b = torch.randn(7, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    Products(CHIP, 0, 2, [1], 10_000)(0, a, b)
    assert seen[0][0] is a
    assert seen[0][1] is b


def test_a_small_product_is_not_worth_the_copies(
    seen: list[tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "LEAST", 9 * 13 * 6 + 1)
    a, b = torch.randn(9, 13).bfloat16(), torch.randn(13, 6).bfloat16()
    Products(CHIP, 0, 2, [1], 10_000)(0, a, b)
    assert seen[0][0] is a


@pytest.mark.parametrize("sizes, most, needed", [([8, 16], 1 << 40, False), ([8, 17], 99, False), ([8, 17], 100, True)])
def test_copies_are_made_ready_where_they_may_be_needed(
    sizes: list[int], most: int, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "LEAST", 100)
    made: list[int] = []
    monkeypatch.setattr(aligned, "row_copier", lambda word, *_: made.append(word))
    Products(CHIP, 0, 2, sizes, most)
    assert bool(made) == needed
