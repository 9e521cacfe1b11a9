"""What this processor and its compiler make of the kernels of engine `cpu`."""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from whorl import compiler
from whorl.engines.host import load
from whorl.errors import CompileError

_KERNELS, _PROBE = Path(__file__).with_name("kernels"), ("types.cpp", "probe.cpp")


@lru_cache(maxsize=1)
def fault() -> str:
    """Why the compiler that is found makes no kernels on this machine, in one line; "" where it does.

    Compiles a few lines at the first call, whose library is kept like any other.
    """
    try:
        _probe()
    except CompileError as error:
        words = " ".join(str(error).split())
        return words if len(words) < 600 else f"{words[:500]} ...: name another in CXX, or {compiler.remedy()}"
    return ""


def _probe() -> ctypes.CDLL:
    text = "\n".join((_KERNELS / name).read_text(encoding="utf-8") for name in _PROBE)
    return load("a first few lines", text, "-DWHORL_DTYPE=32")


@lru_cache(maxsize=256)
def by_unit(parts: int, columns: int, reduced: int, batch: int) -> bool:
    """Whether kernels have a product of a matrix of weights made by the processor's matrix unit (AMX).

    Args:
        parts: of bfloat16, whose sum a number is.
        columns: of the product.
        reduced: what each of its sums runs over.
        batch: sequences.
    """
    if fault():
        return False
    function = _probe().whorl_unit
    function.argtypes, function.restype = (ctypes.c_int64,) * 4, ctypes.c_bool
    return function(parts, columns, reduced, batch)


def openmp() -> tuple[int | None, int | None, int | None]:
    """The addresses of torch's OpenMP: run in parallel, the thread, the threads; None where it has others."""
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    for file in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        path = Path(torch.__file__).parent / "lib" / file
        if path.exists():
            library = ctypes.CDLL(str(path))  # loaded already: this finds it again
            if all(hasattr(library, name) for name in names):
                run, thread, threads = (ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names)
                return run, thread, threads
    return None, None, None
