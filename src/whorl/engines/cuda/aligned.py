"""Large products of matrices whose rows are no multiple of 16 bytes, for which cuBLAS has slow kernels alone.

On an H200, the input product and the gradients of weights and input of an LSTM with 1500 units and 700 rows in bfloat16
took 99, 84 and 83 us, and with the copies 44, 36 and 45; with 650 units 26, 27 and 26, and 16, 13 and 15.  It is the
sizes that count: a distance of 1504 from row to row changed nothing.  So operands are copied into rows of a multiple of
16 bytes with zeros behind them, and the result out of them.
"""

from collections.abc import Iterable

from torch import Tensor

from whorl.engines.cuda.launch import Kernel
from whorl.engines.cuda.prepare import row_copier
from whorl.engines.cuda.products import product
from whorl.engines.cuda.tiling import Chip

LEAST = 1 << 29
"""Multiplications of a product that is worth the copies."""


def words(element: int, sizes: Iterable[int], most: int) -> tuple[int, ...]:
    """Bytes of the words in which rows are copied, as `Products` takes sizes; none where no product is worth it."""
    needed = most >= LEAST and any(size % (16 // element) for size in sizes)
    return tuple(word for word in (2, 4, 8) if word >= element) if needed else ()


class Products:
    """Products on one device; the kernels that copy are loaded when it is made, where they may be needed.

    Args:
        sizes: of matrices, along which they lie in one piece.
        most: multiplications of the largest product.
    """

    def __init__(self, chip: Chip, index: int, element: int, sizes: Iterable[int], most: int) -> None:
        self._words = words(element, sizes, most)
        self._copiers: dict[int, Kernel] = {word: row_copier(word, chip, index) for word in self._words}

    def __call__(
        self, stream: int, a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False, tf32: bool = False,
        wide: bool = False,
    ) -> Tensor:  # fmt: skip
        """a @ b, as `products.product` takes it."""
        if add or not self._words or a.shape[0] * a.shape[1] * b.shape[1] < LEAST:
            return product(a, b, out, add, tf32, wide)
        a, b = (matrix if 1 in matrix.stride() else matrix.contiguous() for matrix in (a, b))
        if _is_aligned(a, b):
            return product(a, b, out, add, tf32, wide)
        made = product(*self._operands(stream, a, b), None, False, tf32, wide)
        return self._part(stream, made, a.shape[0], b.shape[1], out)

    def _operands(self, stream: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        (rows, depth), columns, each = a.shape, b.shape[1], 16 // a.element_size()
        across = {"columns", "rows" if a.stride(1) != 1 else "depth", "depth" if b.stride(1) != 1 else "columns"}
        rows = _rounded(rows, each) if "rows" in across else rows
        depth = _rounded(depth, each) if "depth" in across else depth
        columns = _rounded(columns, each)
        return self._laid(stream, a, rows, depth), self._laid(stream, b, depth, columns)

    def _part(self, stream: int, made: Tensor, rows: int, columns: int, out: Tensor | None = None) -> Tensor:
        """The first rows and columns of what was made, in `out` where that is given."""
        if out is None:
            if made.shape == (rows, columns):
                return made
            out = made.new_empty(rows, columns)
        self._copy(stream, made, out)
        return out

    def _laid(self, stream: int, matrix: Tensor, rows: int, columns: int) -> Tensor:
        """The matrix with so many rows and columns, laid out as it was."""
        if matrix.stride(1) != 1:
            return self._laid(stream, matrix.t(), columns, rows).t()
        if matrix.shape == (rows, columns) and matrix.stride(0) == columns:
            return matrix
        made = matrix.new_empty(rows, columns)
        self._copy(stream, matrix, made)
        return made

    def _copy(self, stream: int, source: Tensor, target: Tensor) -> None:
        """What fits of the source; zeros where the target is larger."""
        element, (rows, columns) = source.element_size(), target.shape
        width, height = min(columns, source.shape[1]), min(rows, source.shape[0])
        addresses = source.data_ptr(), target.data_ptr()
        places = [*addresses, *(element * size for size in (source.stride(0), target.stride(0), width, columns))]
        word = next(word for word in reversed(self._words) if all(place % word == 0 for place in places))
        from_step, to_step, wide, to_wide = (place // word for place in places[2:])
        self._copiers[word](stream, rows, 1, *addresses, from_step, to_step, height, wide, to_wide)


def _is_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether cuBLAS has its fast kernels for a @ b."""
    each, sizes = 16 // a.element_size(), (*_across(a), *_across(b), b.shape[1])
    return all(size % each == 0 for size in sizes)


def _across(matrix: Tensor) -> tuple[int, int]:
    """The size along which a matrix lies in one piece, and the distance to what follows."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (columns, down) if right == 1 else (rows, right)


def _rounded(size: int, each: int) -> int:
    return -(-size // each) * each
