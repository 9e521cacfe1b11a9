"""Products of matrices whose rows are no multiple of 16 bytes: the copies around them, run on the host."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from emulation import emulated
from whorl.engines.cuda import aligned
from whorl.engines.cuda.aligned import Copied, Products
from whorl.engines.cuda.products import Product
from whorl.engines.cuda.tiling import Chip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
CHIP = Chip((9, 0), 132)


@pytest.fixture(autouse=True)
def host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every product is worth the copies, and memory is full of NaN before it is written."""
    monkeypatch.setattr(aligned, "LEAST", 0)
    torch.use_deterministic_algorithms(True)
    with emulated(folder):
        yield
    torch.use_deterministic_algorithms(False)


def ready(sizes: tuple[int, int, int], turned: tuple[int, int] = (0, 0)) -> Product | Copied:
    """A product in bfloat16 of matrices that lie without gaps."""
    rows, depth, columns = sizes
    steps = rows if turned[0] else depth, depth if turned[1] else columns, columns
    return Products(CHIP, 0, 2, [1], 10_000).ready(torch.bfloat16, sizes, turned, steps)


LAYOUTS = {
    "as they are": lambda matrix: matrix,
    "turned": lambda matrix: matrix.t().contiguous().t(),
    "part of a wider one": lambda matrix: torch.cat([matrix, matrix[:, :3]], 1)[:, : matrix.shape[1]],
    "every other column": lambda matrix: matrix.repeat_interleave(2, 1)[:, ::2],
}


@pytest.fixture
def multiplied(host: None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What was given to cuBLAS: sizes, and elements from row to row."""
    found, real = [], Product.__call__

    def multiply(own: Product, *given: int, **how: bool) -> None:
        first = [number.value for number in own._parts[0][2]]
        found.append((first[:2], first[2:5], own._of_a[1].value, own._of_b[1].value, own._last[1].value))
        real(own, *given, **how)

    monkeypatch.setattr(Product, "__call__", multiply)
    return found


@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("right", LAYOUTS)
@pytest.mark.parametrize("left", LAYOUTS)
def test_it_is_the_product(left: str, right: str, dtype: torch.dtype, wide: bool, multiplied: list) -> None:
    made, each = Products(CHIP, 0, dtype.itemsize, [1], 1), 16 // dtype.itemsize
    for rows, depth, columns in ((9, 13, 6), (8, 16, 24), (5, 7, 10), (12, 30, 3)):
        a = LAYOUTS[left](torch.randn(rows, depth).to(dtype))
        b = LAYOUTS[right](torch.randn(depth, columns).to(dtype))
        kind = torch.float32 if wide else dtype
        want, out = (a.float() @ b.float()).to(kind), torch.empty(rows, columns + 1, dtype=kind)[:, :columns]
        multiplied.clear()
        torch.testing.assert_close(made(a, b, wide=wide), want)
        assert made(a, b, out, wide=wide) is out
        torch.testing.assert_close(out, want)
        for (b_turned, a_turned), (columns_given, rows_given, depth_given), *steps in multiplied:
            along = rows_given if a_turned else depth_given, depth_given if b_turned else columns_given
            assert all(size % each == 0 for size in (*along, columns_given, *steps))
        torch.testing.assert_close(made(a, b, out, add=True), 2 * want)


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_only_what_lies_in_one_piece_has_to_be_a_multiple(turned: tuple[int, int]) -> None:
    sizes = (8 if turned[0] else 7, 16 if not turned[0] or turned[1] else 15, 8)
    assert isinstance(ready(sizes, turned), Product)
    for place in range(3):
        longer = list(sizes)
        longer[place] += 8 if sizes[place] % 8 else 1
        again = ready((longer[0], longer[1], longer[2]), turned)
        assert isinstance(again, Product if sizes[place] % 8 else Copied)


def test_a_small_product_is_not_worth_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for least, wanted in ((9 * 13 * 6, Copied), (9 * 13 * 6 + 1, Product)):
        monkeypatch.setattr(aligned, "LEAST", least)
        assert isinstance(ready((9, 13, 6)), wanted)


@pytest.mark.parametrize("sizes, most, needed", [([8, 16], 1 << 40, False), ([8, 17], 99, False), ([8, 17], 100, True)])
def test_copies_are_made_ready_where_they_may_be_needed(
    sizes: list[int], most: int, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "LEAST", 100)
    made: list[int] = []
    monkeypatch.setattr(aligned, "row_copier", lambda word, *_: made.append(word))
    Products(CHIP, 0, 2, sizes, most)
    assert bool(made) == needed
