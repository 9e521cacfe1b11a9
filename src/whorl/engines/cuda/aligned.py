"""Large products of matrices whose rows are no multiple of 16 bytes, for which cuBLAS has slow kernels alone.

On an H200, the input product and the gradients of weights and input of an LSTM with 1500 units and 700 rows in bfloat16
took 99, 84 and 83 us, and with the copies 44, 36 and 45; with 650 units 26, 27 and 26, and 16, 13 and 15.  It is the
sizes that count: a distance of 1504 from row to row changed nothing.  So operands are copied into rows of a multiple of
16 bytes with zeros behind them, and the result out of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.cuda import split
from whorl.engines.cuda.launch import Kernel
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.prepare import row_copier, splitter
from whorl.engines.cuda.products import Product, handle, laid, product
from whorl.engines.cuda.split import Split
from whorl.engines.cuda.tiling import Chip

LEAST = 1 << 29
"""Multiplications of a product that is worth the copies."""


def words(element: int, sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """Bytes of the words in which rows are copied, as `Products` takes sizes; none where no product is worth it."""
    needed = most >= LEAST and any(size % (16 // element) for size in sizes)
    return tuple(word for word in (8, 4, 2) if word >= element) if needed else ()


class Products:
    """Products on one device; the kernels that copy or split are loaded when it is made, where they may be needed.

    Args:
        index: torch's number of the device.
        sizes: of matrices, along which they lie in one piece.
        most: multiplications of the largest product.
        exact: products of float32 are to be float32.
    """

    def __init__(
        self, chip: Chip, index: int, element: int, sizes: Iterable[int], most: int,
        exact: bool = False,
    ) -> None:  # fmt: skip
        self._splitter = splitter(chip, index) if split.needed(exact, most, chip) else None
        self._copiers = {word: row_copier(word, chip, index) for word in words(element, sizes, most)}
        self._index = index

    def ready(
        self, dtype: torch.dtype, sizes: tuple[int, int, int], turned: tuple[int, int], steps: tuple[int, int, int],
        tf32: bool = False, out: torch.dtype | None = None,
    ) -> "Made":  # fmt: skip
        """A product of fixed sizes, as `products.Product` takes them: with copies, or split, where that is worth it."""
        bare, (rows, depth, columns) = Product(dtype, sizes, turned, steps, tf32, out), sizes
        if self._splitter is not None and not tf32 and split.worth(*sizes):
            return self._of_parts(self._splitter, bare, sizes, turned, steps)
        if not self._copiers or rows * depth * columns < LEAST:
            return bare
        each = 16 // dtype.itemsize
        along = {0 if turned[0] else 1, 1 if turned[1] else 2, 2}  # the sizes that lie in one piece
        tall, deep, wide = (_rounded(size, each) if place in along else size for place, size in enumerate(sizes))
        pairs = [
            (_lies(rows, depth, turned[0], steps[0]), _lies(tall, deep, turned[0])),
            (_lies(depth, columns, turned[1], steps[1]), _lies(deep, wide, turned[1])),
            (_lies(rows, columns, 0, steps[2]), _lies(tall, wide, 0)),
        ]
        copied = [given[:2] != made[:2] or given.step % each > 0 for given, made in pairs]
        if not any(copied):
            return bare
        copies: list[_Copy | None] = [None] * 3
        for place, (given, made) in enumerate(pairs):
            if copied[place]:
                element = dtype.itemsize if place < 2 else (out or dtype).itemsize
                copies[place] = _Copy(self._copiers, element, *((given, made) if place < 2 else (made, given)))
        own = [made.step if copy else given.step for (given, made), copy in zip(pairs, copied, strict=True)]
        aligned = Product(dtype, (tall, deep, wide), turned, (own[0], own[1], own[2]), tf32, out)
        return Copied(bare, aligned, copies, tall * wide * (out or dtype).itemsize, self._index)

    def _of_parts(
        self, splitter: Kernel, bare: Product, sizes: tuple[int, int, int], turned: tuple[int, int],
        steps: tuple[int, int, int],
    ) -> "Split | Copied":  # fmt: skip
        """The product as three of TF32, whose result is copied where its rows are no multiple of 16 bytes."""
        rows, _, columns = sizes
        tall, wide = _rounded(rows, 4) if turned[0] else rows, _rounded(columns, 4)
        if (tall, wide) == (rows, columns) or not self._copiers:
            return Split(sizes, turned, steps, (rows, columns), splitter, self._index)
        own = Split(sizes, turned, (*steps[:2], wide), (tall, wide), splitter, self._index)
        copy = _Copy(self._copiers, 4, _lies(tall, wide, 0), _lies(rows, columns, 0, steps[2]))
        return Copied(bare, own, [None, None, copy], 4 * tall * wide, self._index)

    def __call__(
        self, a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False, tf32: bool = False, wide: bool = False
    ) -> Tensor:
        """a @ b, as `products.product` takes it."""
        if not self._copiers and self._splitter is None:
            return product(a, b, out, add, tf32, wide)
        (rows, depth), columns = a.shape, b.shape[1]
        if out is None:
            out = torch.empty(rows, columns, dtype=torch.float32 if wide else a.dtype, device=a.device)
        a, a_turned, a_step = laid(a)
        b, b_turned, b_step = laid(b)
        steps = a_step, b_step, max(columns, out.stride(0))
        made = self.ready(a.dtype, (rows, depth, columns), (a_turned, b_turned), steps, tf32, out.dtype)
        made(handle(a.dtype), a.data_ptr(), b.data_ptr(), out.data_ptr(), add)
        return out


class Copied:
    """A product that is made of copies: called as `Product` is.

    Args:
        bare: the product without copies, for what is added to something.
        aligned: the product of copies, or of parts.
        copies: of a and b into its operands, and of its result; None where there is no need.
        made: bytes of its result.
    """

    def __init__(
        self, bare: Product, aligned: Product | Split, copies: Sequence["_Copy | None"], made: int, index: int
    ) -> None:
        self._bare, self._aligned, self._index = bare, aligned, index
        self._of_a, self._of_b, self._of_result = copies
        self._places, whole = [], 0
        for size in (*(0 if copy is None else copy.size for copy in copies[:2]), made if copies[2] else 0):
            self._places.append(whole)
            whole += _rounded(size, _ALIGNED)
        self._room = laid_out((whole,), torch.uint8)

    def __call__(self, handle: int, a: int, b: int, out: int, add: bool = False) -> None:
        """Multiply what lies at two addresses, into a third or (`add`) to what is there.

        Raises:
            KernelError: cuBLAS or the driver refuses.
        """
        if add:
            self._bare(handle, a, b, out, add)
            return
        room = empty(*self._room)
        base, stream, result = room.data_ptr(), torch._C._cuda_getCurrentRawStream(self._index), out
        at_a, at_b, at_result = (base + place for place in self._places)
        if self._of_a is not None:
            self._of_a(stream, a, at_a)
            a = at_a
        if self._of_b is not None:
            self._of_b(stream, b, at_b)
            b = at_b
        if self._of_result is not None:
            result = at_result
        self._aligned(handle, a, b, result)
        if self._of_result is not None:
            self._of_result(stream, result, out)


Made = Product | Copied | Split
"""What multiplies matrices of fixed sizes, called with cuBLAS' handle and addresses."""

_ALIGNED = 256
"""Bytes: where operands and results begin in the room of a product."""


class _Rows(NamedTuple):
    """How a matrix lies."""

    height: int
    width: int
    """Elements in one piece."""
    step: int
    """From one such piece to the next."""


def _lies(rows: int, columns: int, turned: int, step: int | None = None) -> _Rows:
    """A matrix in which rows lie in one piece, or (`turned`) columns; one behind the other without a `step`."""
    height, width = (columns, rows) if turned else (rows, columns)
    return _Rows(height, width, width if step is None else step)


class _Copy:
    """What fits of one matrix in another's rows; zeros where the target is larger."""

    def __init__(self, copiers: Mapping[int, Kernel], element: int, source: _Rows, target: _Rows) -> None:
        self.size = target.height * target.step * element
        self._rows = target.height
        height, width = min(source.height, target.height), min(source.width, target.width)
        numbers = [element * size for size in (source.step, target.step, width, target.width)]
        self._ways: list[tuple[int, Kernel, tuple[int, ...]]] = []
        """Words of so many bytes, from the largest on, the kernel that copies them, and all sizes in words."""
        for word, kernel in copiers.items():
            if not any(number % word for number in numbers):
                from_step, to_step, wide, to_wide = (number // word for number in numbers)
                self._ways.append((word, kernel, (from_step, to_step, height, wide, to_wide)))

    def __call__(self, stream: int, source: int, target: int) -> None:
        both = source | target
        _, kernel, sizes = next(way for way in self._ways if both % way[0] == 0)
        kernel(stream, self._rows, 1, source, target, *sizes)


def _rounded(size: int, each: int) -> int:
    return -(-size // each) * each
