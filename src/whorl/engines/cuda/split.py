"""Large products of true float32, made of three products of TF32 on the tensor cores.

A float32 is the sum of two numbers of TF32 to 2^-23 of itself, high and low; of their four products that of the two low
ones is left out.  kernels/split.cu lays parts out in such a way that the other three are one product of cuBLAS, three
times as deep, in which the small ones come first.  Tensor cores cut off what they add, so that sums of many products
drift to zero: a sum is made there of so many at most, and float32's own addition adds it to the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from whorl.engines.cuda.launch import Kernel
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.products import Product
from whorl.engines.cuda.tiling import Chip

LEAST = 1_200_000_000
"""Multiplications of a product that is worth it, where some launches more are little beside it: forward of a GRU took
307 and 275 us with 25,600 x 128 x 384, and 328 and 329 with 12,400 x 168 x 504 (one H200, 2026-11-23)."""

TALL = 2048
"""Rows of its result, at least, and ..."""

WIDER = 3
"""... columns for each of its depth: an input projection of many steps.  Microseconds on one H200 (2026-11-22) of rows
x depth x columns, float32 and split with sums of 128 and of 256: 3,840 x 1,024 x 4,096 698, 503, 376; 3,840 x 512 x
2,048 182, 143, 106; 25,600 x 256 x 1,024 357, 193, 156; 25,600 x 128 x 512 100, 60, 60.  For each group of the depth
the whole result is read and written, so what is deep takes longer: 3,840 x 4,096 x 1,024 689, 832, 776; 4,096 x 3,840 x
1,024 628, 812, 668; 6,000 x 700 x 1,500 315, 392, 309; so does what has few rows: 700 x 1,500 x 6,000 257, 347, 315."""

DEEPEST = 128
"""Products of which a sum is made on tensor cores, of each of the three.  At 1,024 deep a sum was off by 3.5e-7 so (one
H200), 6.4e-7 in groups of 256, 1.2e-6 of 512 and 2.4e-6 in one, float32's own by 5.7e-7; with 256 the gradients of
three layers of 512 units were 1.4 times as far off as the error rule allows."""

ROOM = 64 << 20
"""Bytes for parts of both matrices, about: a larger product goes in pieces of its depth, then of its rows."""

_FAST = {(8, 0), (9, 0), (10, 0), (10, 3)}
"""Chips, by compute capability, that multiply TF32 more than three times as fast as float32: others do both alike."""


def needed(exact: bool, most: int, chip: Chip) -> bool:
    """Whether there may be such products.

    Args:
        exact: products of float32 are to be float32.
        most: multiplications of the largest product.
    """
    return exact and most >= LEAST and chip.capability in _FAST


def worth(rows: int, depth: int, columns: int) -> bool:
    """Whether a product is worth it."""
    return rows * depth * columns >= LEAST and rows >= TALL and columns >= WIDER * depth


class _Splitting(NamedTuple):
    """How a piece of one of the two matrices is split."""

    at: int
    """Bytes from the beginning of the matrix."""
    blocks: int
    numbers: tuple[int, ...]
    """The rest of the kernel's argument."""


class _Piece(NamedTuple):
    """A piece of a's rows, over a piece of the depth."""

    of_a: _Splitting
    out: int
    """Bytes from the beginning of the result."""
    product: Product
    add: bool


class Split:
    """A product of fixed sizes, called as `Product` is.

    Args:
        sizes, turned, steps: as of `Product`.
        made: rows and columns of the result, from those of `sizes` on: zeros are added to a and b.
        splitter: the kernel of kernels/split.cu.
        index: torch's number of the device.
    """

    def __init__(
        self, sizes: tuple[int, int, int], turned: tuple[int, int], steps: tuple[int, int, int],
        made: tuple[int, int], splitter: Kernel, index: int,
    ) -> None:  # fmt: skip
        (rows, depth, columns), (tall, wide) = sizes, made
        self._split, self._index = splitter, index
        groups = -(-depth // min(DEEPEST, max(_SHALLOWEST, ROOM // (_BYTES * (wide + _FEWEST)))))
        each = _rounded(-(-depth // groups), 4)
        groups = -(-depth // each)
        most = max(_FEWEST, ROOM // (_BYTES * each) - wide)
        high = _rounded(-(-tall // -(-tall // most)), 4)
        together = max(1, ROOM // (_BYTES * each * (high + wide)))
        together = -(-groups // -(-groups // together))
        self._pieces: list[tuple[_Splitting, Sequence[_Piece]]] = []
        """Of the depth: how b is split, and the pieces of rows."""
        for first in range(0, groups, together):
            count, begin = min(together, groups - first), first * each
            deep, pieces = min(count * each, depth - begin), []
            to_b = begin * (1 if turned[1] else steps[1])
            given = (columns, deep) if turned[1] else (deep, columns)
            wanted = (wide, count * each) if turned[1] else (count * each, wide)
            of_b = _splitting(to_b, steps[1], given, wanted, each, not turned[1], 1)
            for row in range(0, tall, high):
                own = min(high, tall - row)
                there = max(0, min(own, rows - row))
                to_a = row * (1 if turned[0] else steps[0]) + begin * (steps[0] if turned[0] else 1)
                given = (deep, there) if turned[0] else (there, deep)
                wanted = (count * each, own) if turned[0] else (own, count * each)
                of_a = _splitting(to_a, steps[0], given, wanted, each, bool(turned[0]), 0)
                a_step = _rounded(own, 4) if turned[0] else 3 * count * each
                b_step = 3 * count * each if turned[1] else _rounded(wide, 4)
                laid = (a_step, b_step, steps[2])
                product = Product(
                    torch.float32, (own, 3 * count * each, wide), turned, laid, True, longest=3 * each
                )  # fmt: skip
                pieces.append(_Piece(of_a, 4 * row * steps[2], product, first > 0))
            self._pieces.append((of_b, pieces))
        self._for_a = _rounded(_BYTES * together * each * _rounded(high, 4), 256)
        self._room = laid_out((self._for_a + _BYTES * together * each * _rounded(wide, 4),), torch.uint8)

    def __call__(self, handle: int, a: int, b: int, out: int, add: bool = False) -> None:
        """Multiply what lies at two addresses, into a third or (`add`) to what is there.

        Raises:
            KernelError: cuBLAS or the driver refuses.
        """
        room = empty(*self._room)
        stream, for_a = torch._C._cuda_getCurrentRawStream(self._index), room.data_ptr()
        for_b = for_a + self._for_a
        for of_b, pieces in self._pieces:
            self._split(stream, of_b.blocks, 1, b + of_b.at, for_b, *of_b.numbers)
            for of_a, place, product, again in pieces:
                self._split(stream, of_a.blocks, 1, a + of_a.at, for_a, *of_a.numbers)
                product(handle, for_a, for_b, out + place, add or again)


_BYTES, _FEWEST, _SHALLOWEST = 12, 256, 32
"""What is written for a number, rows of a piece, and the depth of a group of very wide matrices."""


def _splitting(
    first: int, step: int, given: tuple[int, int], wanted: tuple[int, int], each: int, across: bool, low: int
) -> _Splitting:
    """
    Args:
        first: number of the matrix that the piece begins with.
        step: from a row in one piece to the next.
        given, wanted: rows and their width of what is there, and of what is written (three times), zeros included.
        each: depth of a group.
        across: the depth goes from row to row.
        low: where the low part comes.
    """
    rows, quads = wanted[0], -(-wanted[1] // 4)
    return _Splitting(4 * first, -(-rows * quads // 256), (step, *given, rows, quads, each, int(across), low))


def _rounded(size: int, each: int) -> int:
    return -(-size // each) * each
