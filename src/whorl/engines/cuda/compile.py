"""CUDA source to a cubin by NVRTC, which every CUDA build of torch brings; no toolkit, no headers, no GPU.

NVRTC is reached through NVIDIA's own `cuda-bindings` (`pip install cuda-core[cu13]` brings it), imported only when
something is compiled: that takes 0.1 s.
"""

import importlib.util
import re
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from whorl.errors import KernelError

_PACKAGES = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")


def cubin(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The machine code of `source`.

    Args:
        name: what an error calls the source, as in `NAME.cu(12): error`.
        architecture: as in `sm_90a`; any that NVRTC knows, whatever GPU is here.
        options: further options of NVRTC.

    Raises:
        KernelError: NVRTC is not there or does not take the source; the message has its log, and the line that it
            stumbled over with the lines around it.
    """
    if (reason := missing()) is not None:
        raise KernelError(f"{reason}.")
    from cuda.bindings import nvrtc

    def check(status: "nvrtc.nvrtcResult", what: str) -> None:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"NVRTC cannot {what} {name}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}.")

    status, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, None, None)
    check(status, "take")
    try:
        words = [f"--gpu-architecture={architecture}", "--std=c++17", "--diag-suppress=177", *options]  # 177: unused
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), [word.encode() for word in words])
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
            raise KernelError(f"{name} does not compile for {architecture}:\n{_explained(_log(program), source)}")
        check(status, f"compile for {architecture}")
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        check(status, "give the machine code of")
        code = bytes(size)
        (status,) = nvrtc.nvrtcGetCUBIN(program, code)
        check(status, "give the machine code of")
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def missing() -> str | None:
    """Why nothing can be compiled here and the line that mends it, or None where it can."""
    if _found():
        return None
    major = (torch.version.cuda or "13").split(".")[0]
    return f'CUDA kernels cannot be compiled: type `pip install "cuda-core[cu{major}]"`'


@cache
def _found() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # there is not even a package `cuda`
        return False


@cache
def compiler() -> str:
    """The versions of what compiles, a part of every kernel's key; read from the packages, which imports nothing."""
    found = [f"torch's CUDA {torch.version.cuda}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def _log(program: object) -> str:
    from cuda.bindings import nvrtc

    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytes(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    return log.rstrip(b"\0").decode(errors="replace").strip()


def _explained(log: str, source: str) -> str:
    """NVRTC's log, and the line of its first error as it stands in the source, which was generated."""
    found = re.search(r"\((\d+)\): (?:catastrophic )?error", log)
    if found is None:
        return log
    at, lines = int(found[1]), source.splitlines()
    around = range(max(1, at - 2), min(len(lines), at + 2) + 1)
    shown = [f"{'>' if number == at else ' '} {number:4} | {lines[number - 1]}" for number in around]
    return "\n".join([log, "where the source reads", *shown])
