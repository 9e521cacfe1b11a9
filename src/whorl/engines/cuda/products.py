"""Products of whole matrices by the cuBLAS that torch brings, in the precision that a plan says.

`torch.mm` asks another switch (`torch.backends.cuda.matmul`) than recurrent layers do, and takes longer to launch.
cuBLAS is given torch's own handle, which has torch's stream and workspace; in a CUDA graph a workspace of its own.
"""

import ctypes
import os
import re
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from whorl.engines.cuda.memory import Laid, empty, laid_out
from whorl.engines.tape import writing
from whorl.errors import KernelError

_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}  # cudaDataType
_FLOAT32, _TF32 = 68, 77  # cublasComputeType_t
_DEFAULT_MATH, _DEFAULT_ALGORITHM = 0, -1
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
_LARGE = 1 << 20  # elements of a result, from which on cuBLAS adds one product after another to each
_LONGEST = 2048  # of them in float32: a gradient of 25,600 rows was off by 2.0e-6, of 3,840 by 1.1e-6
_HIGH, _NARROW, _SHALLOW = 2048, 32, 1024  # so many rows or more of fewer columns: it does so too, unless they are deep
_LONGEST_NARROW = 128  # 5,817 x 413 with 413 x 4 was off by 3.7e-7, in parts of 104 by less than 2e-7 (H200)


def product(
    a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False, tf32: bool = False, wide: bool = False
) -> Tensor:
    """a @ b of matrices in one dtype, on the current device and torch's current stream; sums are float32.

    Args:
        out: where it goes, rows of any distance; a new matrix where None.
        add: to what `out` has.
        tf32: matrices of float32 are rounded to TF32; else float32 is float32, whatever torch's switches say.
        wide: the new matrix is float32.

    Raises:
        KernelError: cuBLAS refuses.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    if out is None:
        out = torch.empty(rows, columns, dtype=torch.float32 if wide else a.dtype, device=a.device)
    a, a_turned, a_step = laid(a)
    b, b_turned, b_step = laid(b)
    sizes, turned, steps = (rows, depth, columns), (a_turned, b_turned), (a_step, b_step, max(columns, out.stride(0)))
    Product(a.dtype, sizes, turned, steps, tf32, out.dtype)(
        handle(a.dtype), a.data_ptr(), b.data_ptr(), out.data_ptr(), add
    )
    return out


class Product:
    """a @ b of matrices of fixed sizes, given as addresses: what does not change from call to call is here.

    Long sums of float32 are made of parts where the result is large, or high and narrow; another cuBLAS itself makes of
    parts.

    Args:
        dtype: of a and b.
        sizes: rows of a, its columns, columns of b.
        turned: of a and b, whether columns lie in one piece, not rows.
        steps: elements from a row of a, b and the result to the next; of what is turned from a column to the next.
        tf32: as of `product`.
        out: the dtype of the result; None: that of a and b.
        longest: of how many products a sum is made before it is added to the others; None: as said above.
    """

    def __init__(
        self, dtype: torch.dtype, sizes: tuple[int, int, int], turned: tuple[int, int], steps: tuple[int, int, int],
        tf32: bool = False, out: torch.dtype | None = None, longest: int | None = None,
    ) -> None:  # fmt: skip
        (rows, depth, columns), kind, (a_step, b_step, step) = sizes, _TYPES[dtype], steps
        self._text = f"{rows} x {depth} with {depth} x {columns} of {dtype}"
        self._multiply = cublas().cublasGemmEx
        # cuBLAS goes by columns, so that what it knows as b.T @ a.T is our a @ b.  Numbers are C's already: 1 us less.
        longest = longest or (_longest(*sizes) if dtype is torch.float32 and not tf32 else None) or max(1, depth)
        parts = max(1, -(-depth // longest))
        each = -(-depth // parts)
        to_a, to_b = (each * dtype.itemsize * way for way in (a_step if turned[0] else 1, 1 if turned[1] else b_step))
        self._parts = [
            (place * to_a, place * to_b, (*_numbers(turned[1], turned[0], columns, rows, deep), _ONE_AT))
            for place in range(parts)
            for deep in [min(each, depth - place * each)]
        ]
        self._of_b, self._of_a = _numbers(kind, b_step), _numbers(kind, a_step)
        self._last = _numbers(_TYPES[out or dtype], step, _TF32 if tf32 else _FLOAT32, _DEFAULT_ALGORITHM)

    def __call__(self, handle: int, a: int, b: int, out: int, add: bool = False) -> None:
        """Multiply what lies at two addresses, into a third or (`add`) to what is there.

        Raises:
            KernelError: cuBLAS refuses.
        """
        for to_a, to_b, first in self._parts:
            given = (
                *first, b + to_b, *self._of_b, a + to_a, *self._of_a, _ONE_AT if add else _ZERO_AT, out, *self._last,
            )  # fmt: skip
            if writing.tape is not None:
                writing.tape.multiply(given)
            elif status := self._multiply(handle, *given):
                raise KernelError(f"cuBLAS cannot multiply {self._text} ({status}).")
            add = True


def _longest(rows: int, depth: int, columns: int) -> int | None:
    """Of how many products of float32 a sum is made before it is added to the others; None: as cuBLAS does it."""
    if rows * columns > _LARGE:
        return _LONGEST
    return _LONGEST_NARROW if rows >= _HIGH and depth <= _SHALLOW and columns < _NARROW else None


def handle(dtype: torch.dtype) -> int:
    """torch's own handle of cuBLAS for products of a dtype on the current device and torch's current stream.

    In a capture it is so until it is asked for again.

    Raises:
        KernelError: cuBLAS refuses.
    """
    made = torch._C._cuda_getCurrentBlasHandle()
    if dtype is torch.float32:  # torch's switch has set it; torch sets it anew whenever it takes the handle
        cublas().cublasSetMathMode(made, _DEFAULT_MATH)
    if torch._C._cuda_isCurrentStreamCapturing():
        _spaces.pop(made, None)  # before the next is taken, which is then the same in the same graph
        _spaces[made] = empty(*workspace(torch._C._cuda_getDevice()))
        give_space(made, _spaces[made])
    return made


_spaces: dict[int, Tensor] = {}
"""What the products of a graph write to meanwhile, by the handle.  torch's is that of the stream it is captured on:
replayed on another while that stream goes on, both would write to it (a graph of GRU in float32 and calls on the stream
of its capture, at once: 16 to 20 of 120 calls had a wrong gradient, in chunks 39 to 47)."""


def give_space(handle: int, space: Tensor) -> None:
    """Have a handle write to a tensor meanwhile.

    Args:
        space: lives until the handle is asked for again.

    Raises:
        KernelError: cuBLAS refuses.
    """
    if status := cublas().cublasSetWorkspace_v2(handle, space.data_ptr(), space.numel()):
        raise KernelError(f"cuBLAS does not take a workspace of its own in a CUDA graph ({status}).")


@cache
def workspace(index: int) -> Laid:
    """As much as torch gives cuBLAS on a device's own streams, so that it chooses alike."""
    usual = ":4096:8" if torch.cuda.get_device_properties(index).major >= 9 else ":4096:2:16:8"
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", usual))  # KiB, and how many of them
    return laid_out((sum(int(size) * int(count) for size, count in pairs) << 10,), torch.uint8)


def each_product(a: Tensor, b: Tensor, out: Tensor, tf32: bool = False) -> None:
    """Each matrix of a @ that of b, as `product` has it, in one launch.

    Args:
        a, b: [count, rows, depth] and [count, depth, columns], whose rows or columns lie in one piece.
        out: where they go, [count, rows, columns].

    Raises:
        KernelError: cuBLAS refuses.
    """
    (count, rows, depth), columns = a.shape, b.shape[2]
    (_, a_turned, a_step), (_, b_turned, b_step) = laid(a[0]), laid(b[0])
    steps, apart = (a_step, b_step, out.stride(1)), (a.stride(0), b.stride(0), out.stride(0))
    made = Each(a.dtype, count, (rows, depth, columns), (a_turned, b_turned), steps, apart, tf32)
    made(handle(a.dtype), a.data_ptr(), b.data_ptr(), out.data_ptr())


class Each:
    """Several products of fixed sizes in one launch, given as addresses of the first matrices.

    Args:
        count: of them.
        dtype, sizes, turned, steps, tf32: as of `Product`.
        apart: elements from a matrix of a, b and the result to the next.
    """

    def __init__(
        self, dtype: torch.dtype, count: int, sizes: tuple[int, int, int], turned: tuple[int, int],
        steps: tuple[int, int, int], apart: tuple[int, int, int], tf32: bool = False,
    ) -> None:  # fmt: skip
        (rows, depth, columns), kind = sizes, _TYPES[dtype]
        self._text = f"{count} times {rows} x {depth} with {depth} x {columns} of {dtype}"
        self._multiply = cublas().cublasGemmStridedBatchedEx
        self._first = (*_numbers(turned[1], turned[0], columns, rows, depth), _ONE_AT)
        self._of_a, self._of_b, self._of_out = (
            (*_numbers(kind, step), ctypes.c_longlong(far)) for step, far in zip(steps, apart, strict=True)
        )
        self._last = _numbers(count, _TF32 if tf32 else _FLOAT32, _DEFAULT_ALGORITHM)

    def __call__(self, handle: int, a: int, b: int, out: int) -> None:
        """Multiply what lies from two addresses on, into what lies from a third on.

        Raises:
            KernelError: cuBLAS refuses.
        """
        given = (*self._first, b, *self._of_b, a, *self._of_a, _ZERO_AT, out, *self._of_out, *self._last)
        if writing.tape is not None:
            writing.tape.multiply_each(given)
        elif status := self._multiply(handle, *given):
            raise KernelError(f"cuBLAS cannot multiply {self._text} ({status}).")


def better_together(count: int, rows: int, depth: int, element: int) -> bool:
    """Whether so many products of so many rows, each too small for a whole GPU, take less time in one launch.

    Of one product with a long sum cuBLAS cuts the sum into parts, of several in one launch it does not.  Weights'
    gradients of the four gates of LSTM in TF32, of 3,200 and 12,800 rows, took 28 and 47 us one by one with 128 units,
    38 and 77 with 256, 73 and 179 with 512, 191 and 523 with 1,024; in one launch 33 and 133, 33 and 119, 50 and 175,
    116 and 426.  Of three gates 22 and 33, 29 and 58, 54 and 134, 145 and 393; 33 and 133, 32 and 119, 49 and 174, 114
    and 421 (H100, 2026-11-25).  In bfloat16 one launch was faster with each (H200).
    """
    return element == 2 or depth < (25 if count > 3 else 12) * rows


_ONE_AT, _ZERO_AT = ctypes.c_void_p(ctypes.addressof(_ONE)), ctypes.c_void_p(ctypes.addressof(_ZERO))


def _numbers(*values: int) -> tuple[ctypes.c_int, ...]:
    return tuple(map(ctypes.c_int, values))


def laid(matrix: Tensor) -> tuple[Tensor, int, int]:
    """The matrix, or a copy where neither rows nor columns lie in one piece; whether columns do; their distance."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if right == 1 and (down >= columns or rows == 1):
        return matrix, 0, max(down, columns)
    if down == 1 and (right >= rows or columns == 1):
        return matrix, 1, max(right, rows)
    return matrix.contiguous(), 0, columns


@cache
def cublas() -> Any:
    """The cuBLAS that torch has loaded.

    Raises:
        KernelError: there is none of its version.
    """
    major = (torch.version.cuda or "").split(".")[0]
    name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise KernelError(f"torch's cuBLAS is not here ({name}): `whorl doctor` says what to do.") from error
    pointer: Any = ctypes.c_void_p
    number: Any = ctypes.c_int
    library.cublasSetMathMode.argtypes = [pointer, number]
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    matrix = [pointer, number, number]
    library.cublasGemmEx.argtypes = [
        pointer, *[number] * 5, pointer, *matrix, *matrix, pointer, *matrix, number, number,
    ]  # fmt: skip
    far: Any = ctypes.c_longlong  # from a matrix to the next
    library.cublasGemmStridedBatchedEx.argtypes = [
        pointer, *[number] * 5, pointer, *matrix, far, *matrix, far, pointer, *matrix, far, *[number] * 3,
    ]  # fmt: skip
    return library
