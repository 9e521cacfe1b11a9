"""What of this machine whorl can use, and what to do about the rest: the facts behind `whorl doctor`.

`probe` looks at the machine and gives a Machine, plain values; `diagnose` judges them and touches nothing. Looking
creates no context on a GPU, imports nothing of CUDA and leaves torch's own state alone: where the driver's library is
there, it is asked directly.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import NamedTuple

import torch

from whorl import compiler
from whorl.settings import settings

PYTHON, TORCH = (3, 10), (2, 10)  # the oldest that whorl works with
PACKAGES = ("whorl", "torch", "numpy", "rich", "safetensors", "cuda-core")
DRIVER_PAGE = "https://www.nvidia.com/drivers"
REINSTALL = "pip install --force-reinstall torch"
WHEELS = "https://download.pytorch.org/whl"


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        name: what was looked at.
        ok: whether nothing has to be done.
        detail: what was found.
        remedy: where not ok, what to do, with the command to type.
        required: whether whorl cannot work without it.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = False


class Gpu(NamedTuple):
    """A GPU as the driver describes it: its name, compute capability and bytes of memory."""

    name: str
    capability: tuple[int, int]
    memory: int


class Driver(NamedTuple):
    """NVIDIA's driver: the newest CUDA that it runs, its GPUs, and why it does not start ("" where it does)."""

    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]
    error: str = ""


class Cache(NamedTuple):
    """The folder of compiled kernels: whether it is there, is its owner's alone, and can be written (or made)."""

    folder: Path
    exists: bool
    private: bool
    writable: bool


@dataclass(frozen=True)
class Machine:
    """Everything that the diagnosis rests on; None where a thing is not there."""

    system: str
    platform: str
    python: tuple[int, int, int]
    packages: dict[str, str | None]
    card: bool  # an NVIDIA card is on the bus, driver or not
    driver: Driver | None
    cuda: str | None  # the CUDA that torch was built with
    nvrtc: tuple[int, int] | None
    cudnn: int | None
    compiler: tuple[str, str] | None  # command, first line about its version ("" where it does not start)
    onednn: bool
    bf16: bool
    cache: Cache


def probe() -> Machine:
    """The machine that this process runs on."""
    onednn = torch.backends.mkldnn.is_available()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        platform=sys.platform,
        python=sys.version_info[:3],
        packages={name: package_version(name) for name in PACKAGES},
        card=_card(Path("/sys/bus/pci/devices")),
        driver=_driver(),
        cuda=torch.version.cuda,
        nvrtc=_nvrtc() if torch.version.cuda else None,
        cudnn=torch.backends.cudnn.version() if torch.version.cuda else None,
        compiler=_compiler(),
        onednn=onednn,
        bf16=onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        cache=_cache(settings.cache),
    )


def diagnose(machine: Machine) -> list[Finding]:
    """The findings about `machine`, in the order in which to read them."""
    return [
        *_versions(machine),
        *_cuda(machine),
        _compiler_finding(machine),
        _onednn_finding(machine),
        _cache_finding(machine.cache),
    ]


def package_version(name: str) -> str | None:
    """The version of an installed package, None where it is not installed; nothing of it is imported."""
    try:
        return installed(name)
    except PackageNotFoundError:
        return None


def _versions(machine: Machine) -> Iterator[Finding]:
    whorl = machine.packages["whorl"]
    yield Finding("whorl", True, whorl or "used from its source, not installed")
    yield Finding("system", True, machine.system)
    yield Finding(
        "Python",
        machine.python >= PYTHON,
        ".".join(map(str, machine.python)),
        f"install Python {PYTHON[0]}.{PYTHON[1]} or newer from https://www.python.org/downloads",
        required=True,
    )
    for name in ("torch", "numpy", "rich", "safetensors"):
        version = machine.packages[name]
        ok = version is not None and (name != "torch" or _numbers(version) >= TORCH)
        needed = f"{name}>={TORCH[0]}.{TORCH[1]}" if name == "torch" else name
        yield Finding(name, ok, version or "not installed", f'type `pip install --upgrade "{needed}"`', required=True)


def _cuda(machine: Machine) -> Iterator[Finding]:
    driver, built = machine.driver, machine.cuda
    if driver is None or driver.error or not driver.gpus:
        yield _no_gpu(machine)
        return
    for gpu in driver.gpus:
        capability = ".".join(map(str, gpu.capability))
        yield Finding("GPU", True, f"{gpu.name}, compute capability {capability}, {gpu.memory / 2**30:.0f} GiB")
    newest = ".".join(map(str, driver.cuda))
    if built is None:
        index = "cu130" if driver.cuda >= (13, 0) else "cu126"
        remedy = f"type `{REINSTALL} --index-url {WHEELS}/{index}`"
        yield Finding("driver", True, f"runs CUDA up to {newest}")
        yield Finding("torch's CUDA", False, "this torch was built for the CPU alone and cannot use the GPU", remedy)
        return
    old = driver.cuda[0] < int(built.split(".")[0])
    remedy = f"install a newer driver from {DRIVER_PAGE}, or type `{REINSTALL} --index-url {WHEELS}/cu126`"
    yield Finding("driver", not old, f"runs CUDA up to {newest}" + f", and torch needs {built}" * old, remedy)
    yield Finding("torch's CUDA", True, built)
    major = built.split(".")[0]
    yield Finding(
        "NVRTC",
        machine.nvrtc is not None,
        ".".join(map(str, machine.nvrtc or ())) or "not found: CUDA kernels cannot be compiled",
        f"type `pip install nvidia-cuda-nvrtc{'-cu12' if major == '12' else ''}`",
    )
    core = machine.packages["cuda-core"]
    detail = core or "not installed: CUDA kernels cannot be compiled"
    yield Finding("cuda-core", core is not None, detail, f'type `pip install "cuda-core[cu{major}]"`')
    cudnn = machine.cudnn
    detail = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "not found"
    yield Finding("cuDNN", cudnn is not None, detail, f"type `{REINSTALL}`")


def _no_gpu(machine: Machine) -> Finding:
    driver = machine.driver
    if driver is not None and driver.error:
        remedy = "restart the machine; if that does not help, install the driver anew from " + DRIVER_PAGE
        return Finding("GPU", False, f"NVIDIA's driver does not start ({driver.error})", remedy)
    if driver is not None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f", and CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else ""
        return Finding("GPU", True, f"NVIDIA's driver shows none{why}: layers run on the CPU")
    if machine.card:
        remedy = f"install the driver from {DRIVER_PAGE}; inside a container, start it with `--gpus all`"
        return Finding("GPU", False, "an NVIDIA card, but its driver is not found: layers run on the CPU", remedy)
    return Finding("GPU", True, "no NVIDIA GPU: layers run on the CPU")


def _compiler_finding(machine: Machine) -> Finding:
    remedy = compiler.remedy(machine.platform)
    if machine.compiler is None:
        detail = "none found: whorl's own kernels for the CPU and the calls of its CUDA kernels cannot be compiled"
        return Finding("C++ compiler", False, detail, remedy)
    command, line = machine.compiler
    return Finding("C++ compiler", bool(line), f"{command}: {line or 'does not start'}", remedy)


def _onednn_finding(machine: Machine) -> Finding:
    detail = f"available, bfloat16 {'too' if machine.bf16 else 'not on this CPU'}"
    if not machine.onednn:
        detail = "this torch has none: LSTMs run slowly on the CPU"
    remedy = f"type `{REINSTALL}` for a build with oneDNN"
    return Finding("oneDNN", machine.onednn, detail, remedy)


def _cache_finding(cache: Cache) -> Finding:
    folder = shlex.quote(str(cache.folder))
    if not cache.writable:
        return Finding("cache", False, f"{cache.folder} cannot be written", "set WHORL_CACHE to a folder of your own")
    if not cache.private:
        return Finding("cache", False, f"{cache.folder} can be opened by other users", f"type `chmod 700 {folder}`")
    return Finding("cache", True, str(cache.folder) + ("" if cache.exists else ", made at the first use"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _card(devices: Path) -> bool:
    """Whether the PCI bus (Linux) has a display controller of NVIDIA's."""
    for device in devices.glob("*"):
        try:
            maker, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if maker == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def _library(names: Iterable[str]) -> ctypes.CDLL | None:
    """The first of these libraries that can be loaded."""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _driver() -> Driver | None:
    library = _library(["nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"])
    if library is None:
        return None
    number, text = ctypes.c_int(), ctypes.c_char_p()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = (number.value // 1000, number.value % 1000 // 10)
    status = library.cuInit(0)
    if status == 100:  # CUDA_ERROR_NO_DEVICE
        return Driver(cuda, ())
    if status:
        library.cuGetErrorString(status, ctypes.byref(text))
        return Driver(cuda, (), f"error {status}: {(text.value or b'unknown').decode()}")
    library.cuDeviceGetCount(ctypes.byref(number))
    return Driver(cuda, tuple(_gpu(library, index) for index in range(number.value)))


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    library.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # compute capability, major
    library.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # and minor
    return Gpu(name.value.decode(), (major.value, minor.value), memory.value)


def _nvrtc() -> tuple[int, int] | None:
    """The version of the NVRTC that came with torch, or of the system's."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(torch.__file__).parent, *(Path(place) for place in (spec and spec.submodule_search_locations) or ())]
    files = [str(file) for root in roots for file in sorted(root.glob("**/*nvrtc*")) if _is_nvrtc(file.name)]
    library = _library([*files, *filter(None, [find_library("nvrtc")])])
    if library is None:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _is_nvrtc(name: str) -> bool:
    return re.fullmatch(r"libnvrtc(-[0-9a-f]+)?\.so[.\d]*|nvrtc64_\d+_0\.dll", name) is not None


def _compiler() -> tuple[str, str] | None:
    """The command of the host's C++ compiler, and the first line of what it says about its version."""
    command = compiler.found()
    return (command, compiler.version(command).partition("\n")[0].strip()) if command else None


def _cache(folder: Path) -> Cache:
    exists = folder.is_dir()
    private = not exists or os.name == "nt" or not stat.S_IMODE(folder.stat().st_mode) & 0o077
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return Cache(folder, exists, private, nearest.is_dir() and os.access(nearest, os.W_OK))
