"""Large tensors in large pages, used again.

Memory of more than 32 MB is new at every call, and the system hands it out page by page at its first use: 64 MB take
31 ms in pages of 4 KB and 8 ms in pages of 2 MB (Linux 6.1 as a guest, AMD EPYC of family 25).  What lives from the
beginning of a call to the end of its backward pass at most therefore stays here when its tensor dies, for the next.
"""

import ctypes
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from whorl.engines.tape import writing

_PAGE = 1 << 21
_LARGE = 2 * _PAGE
_MOST_IDLE = 1 << 28
"""Bytes that are kept for later calls.  A step of (128, 30, 512) takes 80 MB."""


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """torch.empty for what the caller gets, in large pages where the system has them for who asks."""
    if writing.tape is not None:
        return writing.tape.empty(shape, None, dtype)
    made = torch.empty(shape, dtype=dtype, device="cpu")
    size = prod(shape) * dtype.itemsize
    if size >= _LARGE:
        _advise(made.data_ptr(), size)
    return made


def borrowed(*shape: int, dtype: torch.dtype) -> Tensor:
    """torch.empty for what no caller sees: large ones in memory that was used before, where there is some."""
    if writing.tape is not None:
        return writing.tape.empty(shape, None, dtype, borrowed=True)
    size = prod(shape) * dtype.itemsize
    if size < _LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(_lease(size), dtype=dtype, count=prod(shape)).view(shape)


def let_go() -> None:
    """Give what lies idle back to the system: whoever borrowed it does so no more."""
    _idle.clear()


def no_memory(size: int, purpose: str) -> MemoryError:
    """What is raised where the system gives no memory of so many bytes."""
    return MemoryError(
        f"engine 'cpu' asked for {size:,} bytes of memory for {purpose} and the system gave none: pass fewer sequences "
        "or steps at once, or free memory."
    )


@lru_cache(maxsize=1)
def keep_freed() -> None:
    """Let malloc keep what is freed, for the next call.

    glibc takes what is larger than a bound from the system each time, as new pages; the bound rises to what a program
    frees, to 32 MB at most.  A train step of a GRU (128, 30, 128) took 500 new pages before, 2.6 of its 32 ms.
    """
    torch.empty((32 << 20) - _PAGE, dtype=torch.uint8, device="cpu")


_idle: deque[mmap.mmap] = deque()
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""A child that was forked has what it writes for itself."""


def _lease(size: int) -> ctypes.Array:
    """Bytes whose memory comes back when they die."""
    region = next((one for one in tuple(_idle) if size <= len(one) <= size + size // 4 + 2 * _PAGE), None)
    try:
        _idle.remove(region)  # type: ignore[arg-type]
    except ValueError:  # there was none, or another thread took it
        whole = -(-size // _PAGE) * _PAGE + _PAGE
        try:
            region = mmap.mmap(-1, whole, **_PRIVATE)
        except OSError:
            raise no_memory(whole, "what a pass holds") from None
        _advise(ctypes.addressof(ctypes.c_char.from_buffer(region)), len(region))
    assert region is not None
    lease = (ctypes.c_char * len(region)).from_buffer(region)
    weakref.finalize(lease, _back, region).atexit = False
    return lease


def _back(region: mmap.mmap) -> None:
    """Those that have lain idle longest go, where there are too many."""
    _idle.append(region)
    for one in tuple(_idle):
        if sum(map(len, tuple(_idle))) > _MOST_IDLE and one in _idle:
            _idle.remove(one)


def _advise(begin: int, size: int) -> None:
    """Ask for large pages in the inner of new memory; it is a wish, and what comes of it makes no other difference."""
    call = _madvise()
    if call is not None:
        first, last = -(-begin // _PAGE) * _PAGE, (begin + size) // _PAGE * _PAGE
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
        self.buffer = borrowed(end, dtype=torch.uint8) if buffer is None else buffer

    def address(self, name: str) -> int | None:
        """Of a region; None where it is not there."""
        return self.buffer.data_ptr() + self._places[name][0] if name in self._places else None

    def get(self, name: str) -> Tensor | None:
        return self[name] if name in self._places else None

    def __getitem__(self, name: str) -> Tensor:
        begin, size, dtype, shape = self._places[name]
        return self.buffer[begin : begin + size].view(dtype).view(shape)
