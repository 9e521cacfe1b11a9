"""What the C++ of tapes asks of CUDA: functions of the driver, of cuBLAS and of torch, by their addresses."""

import ctypes
import sys
from functools import cache
from pathlib import Path

import torch

from whorl.engines.cuda.launch import check, driver
from whorl.engines.cuda.products import cublas, workspace
from whorl.engines.taped import Where
from whorl.errors import CompileError, KernelError

_BLAS_HANDLE = ("_ZN2at4cuda24getCurrentCUDABlasHandleEb", "_ZN2at4cuda24getCurrentCUDABlasHandleEv")
"""at::cuda::getCurrentCUDABlasHandle of a truth value, and of nothing up to torch 2.12: called with one, which that
does not look at."""
_CURRENT_STREAM = "aoti_torch_get_current_cuda_stream"


def gpu(device: int, where: int) -> Where:
    """A GPU, as C++ asks things of it.

    Args:
        device: torch's number of it, which is the current one.
        where: the number of the device that tensors say: the same, or -1 where the GPU is emulated.
    """
    return Where(functions(), _context(), device, where, workspace(device)[0][0])


def fault() -> str:
    """Why torch does not have what is asked, in a sentence; "" where it does."""
    try:
        functions()
    except CompileError as error:
        return " ".join(str(error).split())
    return ""


def functions() -> tuple[int, ...]:
    """The addresses of the functions that C++ calls, in its order.

    Raises:
        CompileError: torch does not have one, or the driver or cuBLAS cannot be loaded.
    """
    found = _found()
    if isinstance(found, str):
        raise CompileError(found)
    return found


@cache
def _found() -> tuple[int, ...] | str:
    """They, or why there are none."""
    try:
        return _asked_of_libraries()
    except (CompileError, KernelError) as error:
        return str(error)


def _asked_of_libraries() -> tuple[int, ...]:
    path = Path(torch.__file__).parent / "lib" / ("torch_cuda.dll" if sys.platform == "win32" else "libtorch_cuda.so")
    try:
        torchs = ctypes.CDLL(str(path))
        of_blas = next(name for name in _BLAS_HANDLE if hasattr(torchs, name) or name == _BLAS_HANDLE[-1])
        of_torch = [getattr(torchs, of_blas), getattr(torchs, _CURRENT_STREAM)]
    except (OSError, AttributeError) as error:
        raise CompileError(f"this torch does not have what compiled calls ask of it ({error}).") from None
    drivers, blas = driver(), cublas()
    every = [
        drivers.cuLaunchKernelEx, drivers.cuCtxGetCurrent, drivers.cuCtxSetCurrent,
        blas.cublasGemmEx, blas.cublasGemmStridedBatchedEx,
        blas.cublasSetMathMode, *of_torch, drivers.cuStreamIsCapturing,
        drivers.cuThreadExchangeStreamCaptureMode, drivers.cuStreamGetPriority, drivers.cuStreamCreateWithPriority,
        drivers.cuStreamBeginCapture_v2, drivers.cuStreamEndCapture, drivers.cuGraphInstantiateWithFlags,
        drivers.cuGraphDestroy, drivers.cuGraphLaunch, drivers.cuGraphExecDestroy,
        blas.cublasSetStream_v2, blas.cublasSetWorkspace_v2,
        ctypes.pythonapi.PyGILState_Ensure, ctypes.pythonapi.PyGILState_Release,
    ]  # fmt: skip
    return tuple(ctypes.cast(one, ctypes.c_void_p).value or 0 for one in every)


def _context() -> int:
    """Of the driver, on this thread; torch's where it has none yet."""
    found = ctypes.c_void_p()
    check(driver().cuCtxGetCurrent(ctypes.byref(found)), "tell its context")
    if not found.value:
        check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(found), torch._C._cuda_getDevice()), "make its context")
    return found.value or 0
