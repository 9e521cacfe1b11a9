"""Where and with what a measurement is made: device, GPU, driver, CPU, versions, commit."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import whorl
from whorl.bench.cases import Case
from whorl.errors import InputError

_PACKAGE = Path(whorl.__file__).parent


def find_device(name: str) -> torch.device:
    """The device of this name; for "auto" the GPU where torch sees one, else the CPU.

    Raises:
        InputError: torch does not see it, or nothing can be timed on it.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device(name)
    if kind == "cuda" and (index or "0").isdecimal() and int(index or "0") < torch.cuda.device_count():
        return torch.device("cuda", int(index or "0"))
    raise InputError(
        f"device is {name!r}: write auto, cpu, or a CUDA device that torch sees; `whorl doctor` lists them."
    )


def missing_mode(case: Case, device: torch.device) -> str | None:
    """Why the device cannot run in the case's precision; None where it can."""
    precision = case.precision
    if device.type == "cpu":
        if precision == "tf32":
            return "TF32 is a mode of NVIDIA's GPUs, this is a CPU"
        operators = torch.ops.mkldnn
        if precision == "bf16" and not operators._is_mkldnn_bf16_supported():
            return "oneDNN takes no bfloat16 on this CPU"
        if precision == "fp16" and not operators._is_mkldnn_fp16_supported():
            return "oneDNN takes no float16 on this CPU"
        return None
    capability = torch.cuda.get_device_capability(device)
    if precision in ("tf32", "bf16") and capability < (8, 0):
        have = ".".join(map(str, capability))
        return f"{precision} needs compute capability 8.0, {torch.cuda.get_device_name(device)} has {have}"
    return None


def describe(device: torch.device) -> dict[str, str | int]:
    """What of the machine the times depend on."""
    found: dict[str, str | int] = {"device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["gpu memory, MiB"] = properties.total_memory >> 20
        found["driver"] = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).partition("\n")[
            0
        ]
    found["cpu"] = _cpu()
    found["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    found["threads"] = torch.get_num_threads()
    found["system"] = f"{platform.system()} {platform.machine()}"
    return found


def versions() -> dict[str, str]:
    """Of everything that takes part."""
    found = {"whorl": whorl.__version__, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def commit(package: Path = _PACKAGE) -> dict[str, str | bool]:
    """The commit that the package's source is at, and whether the source differs from it.

    The hash is "unknown" where the source is no part of a checkout of git.
    """
    if not _said(["git", "-C", str(package), "ls-files", "__init__.py"]):  # another repository may lie around it
        return {"hash": "unknown", "dirty": False}
    changed = _said(["git", "-C", str(package), "status", "--porcelain", "--", "."])
    return {"hash": _said(["git", "-C", str(package), "rev-parse", "HEAD"]), "dirty": bool(changed)}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        if sys.platform == "darwin":
            return _said(["sysctl", "-n", "machdep.cpu.brand_string"])
        return platform.processor() or "unknown"


def _said(command: Sequence[str]) -> str:
    """What a command prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
