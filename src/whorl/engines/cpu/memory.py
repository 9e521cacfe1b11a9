"""Large tensors in large pages.

A tensor of more than 32 MB is new memory at every call, which the system hands out page by page at its first use: 64 MB
take 31 ms in pages of 4 KB and 8 ms in pages of 2 MB (Linux 6.1 as a guest, AMD EPYC of family 25).
"""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

_PAGE = 1 << 21
_LARGE = 2 * _PAGE


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """torch.empty, in large pages where the system has them for who asks."""
    made = torch.empty(shape, dtype=dtype)
    if prod(shape) * dtype.itemsize >= _LARGE:
        advise(made)
    return made


def advise(made: Tensor) -> None:
    """Ask for large pages in the inner of new memory; it is a wish, and what comes of it makes no other difference."""
    call = _madvise()
    if call is not None:
        begin = made.data_ptr()
        first, last = -(-begin // _PAGE) * _PAGE, (begin + made.numel() * made.element_size()) // _PAGE * _PAGE
        if last > first:
            call(first, last - first, mmap.MADV_HUGEPAGE)


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call


class Regions:
    """Tensors that lie one after the other in one buffer, a new one where none is given.

    Args:
        regions: name, dtype and shape of each.
    """

    def __init__(
        self, regions: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], buffer: Tensor | None = None
    ) -> None:
        end, self._places = 0, {}
        for name, dtype, shape in regions:
            size = prod(shape) * dtype.itemsize
            self._places[name] = (end, size, dtype, shape)
            end += -(-size // 64) * 64
        self.buffer = empty(end, dtype=torch.uint8) if buffer is None else buffer

    def address(self, name: str) -> int | None:
        """Of a region; None where it is not there."""
        return self.buffer.data_ptr() + self._places[name][0] if name in self._places else None

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self._places else None

    def __getitem__(self, name: str) -> Tensor:
        begin, size, dtype, shape = self._places[name]
        return self.buffer[begin : begin + size].view(dtype).view(shape)
