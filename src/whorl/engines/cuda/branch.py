"""Streams beside the current one: what they have runs beside what follows on it.

In a CUDA graph that is being captured a branch: the products of a small layer's backward leave most of a GPU idle, and
one after another take as long as the loop over time.  Launched one by one they come no faster than the host hands them
over, so that streams would gain nothing there and cost it time; a graph has them all at once.  And layers that run
beside each other have a stream each (`overlapped`).
"""

import ctypes
from threading import Lock

import torch

from whorl.engines.cuda.launch import check, driver
from whorl.engines.cuda.memory import empty
from whorl.engines.cuda.products import cublas, give_space, handle, workspace
from whorl.errors import KernelError

_NON_BLOCKING = 1  # CUstream_flags


class Branch:
    """A stream of one device, which no one else has.

    Args:
        index: torch's number of the device.
    """

    def __init__(self, index: int) -> None:
        made = ctypes.c_void_p()
        with torch.cuda.device(index):
            torch.cuda.current_stream()  # torch has made its context now, and it is this thread's
            check(driver().cuStreamCreate(ctypes.byref(made), _NON_BLOCKING), "make a stream")
        assert made.value, "the driver says that it made one"
        self.stream, self._index = made.value, index
        self.as_torch = torch.cuda.ExternalStream(self.stream, device=torch.device("cuda", index))
        self._of, self._lock = 0, Lock()

    def fork(self) -> bool:
        """Whether it begins here, with all that the current stream has so far; not where it is in another capture."""
        with self._lock:
            main, status = torch.cuda.current_stream(self._index), ctypes.c_int()
            check(driver().cuStreamIsCapturing(ctypes.c_void_p(self.stream), ctypes.byref(status)), "ask a stream")
            if status.value and self._of != main.cuda_stream:
                return False
            self._of = main.cuda_stream
            self.as_torch.wait_event(main.record_event())
            return True

    def meet(self) -> None:
        """Both go on when either has done what it has so far."""
        self.join()
        self.as_torch.wait_event(torch.cuda.current_stream(self._index).record_event())

    def space(self) -> torch.Tensor:
        """What cuBLAS writes to meanwhile: asked for as it forks, since what is freed later may be in use."""
        return empty(*workspace(self._index))

    def handle(self, dtype: torch.dtype, space: torch.Tensor) -> int:
        """`products.handle` for products of this branch, until it is asked for again.

        Args:
            space: lives as long.

        Raises:
            KernelError: cuBLAS refuses.
        """
        made = handle(dtype)
        if status := cublas().cublasSetStream_v2(made, self.stream):
            raise KernelError(f"cuBLAS does not take a stream of its own in a CUDA graph ({status}).")
        give_space(made, space)
        return made

    def join(self) -> None:
        """The current stream goes on when this branch is done."""
        torch.cuda.current_stream(self._index).wait_event(self.as_torch.record_event())


_branches: dict[tuple[int, int, int], Branch] = {}
_MOST = 256  # of a process, where calls come on ever new streams


def branch_of(index: int, beside: int = 0, number: int = 0) -> Branch | None:
    """One of a device; None where there are too many.

    Args:
        beside: the stream that it runs beside.  What runs beside others waits for nothing that is on one of its own,
            and cuBLAS has a workspace for each.
        number: of several.
    """
    key = index, beside, number
    if key not in _branches and len(_branches) < _MOST:
        _branches[key] = Branch(index)
    return _branches.get(key)
