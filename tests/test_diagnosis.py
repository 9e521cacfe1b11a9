"""What `whorl doctor` says of machines that work and of machines that do not."""

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from whorl import diagnosis
from whorl.diagnosis import Cache, Driver, Finding, Gpu, Machine, diagnose, probe
from whorl.settings import settings

H100 = Gpu("NVIDIA H100", (9, 0), 80 << 30)
GOOD = Machine(
    system="Linux 6.1, x86_64",
    platform="linux",
    python=(3, 11, 7),
    packages=dict.fromkeys(diagnosis.PACKAGES, "1.0") | {"torch": "2.13.0+cu130"},
    card=True,
    driver=Driver((13, 0), (H100,)),
    cuda="13.0",
    nvrtc=(13, 0),
    cudnn=91900,
    compiler=("g++", "g++ 12.2.0"),
    onednn=True,
    bf16=True,
    cache=Cache(Path("/home/me/.cache/whorl"), exists=True, private=True, writable=True),
)
WITHOUT_GPU = replace(GOOD, card=False, driver=None, cuda=None, nvrtc=None, cudnn=None)


def found(machine: Machine, name: str) -> Finding:
    (finding,) = [finding for finding in diagnose(machine) if finding.name == name]
    return finding


@pytest.mark.parametrize("machine", [GOOD, WITHOUT_GPU], ids=["gpu", "cpu"])
def test_a_machine_in_order_needs_nothing(machine: Machine) -> None:
    assert [finding for finding in diagnose(machine) if not finding.ok] == []


def test_the_facts_are_in_the_lines() -> None:
    lines = {finding.name: finding.detail for finding in diagnose(GOOD)}
    assert lines["GPU"] == "NVIDIA H100, compute capability 9.0, 80 GiB"
    assert lines["driver"] == "runs CUDA up to 13.0"
    assert lines["torch's CUDA"] == "13.0"
    assert lines["NVRTC"] == "13.0"
    assert lines["cuDNN"] == "9.19.0"
    assert lines["Python"] == "3.11.7"
    assert lines["torch"] == "2.13.0+cu130"
    assert lines["C++ compiler"] == "g++: g++ 12.2.0"
    assert lines["oneDNN"] == "available, bfloat16 too"
    assert lines["cache"] == str(GOOD.cache.folder)


def test_without_a_gpu_nothing_is_asked_of_cuda() -> None:
    names = [finding.name for finding in diagnose(WITHOUT_GPU)]
    assert "layers run on the CPU" in found(WITHOUT_GPU, "GPU").detail
    assert not {"NVRTC", "cuda-core", "cuDNN", "driver", "torch's CUDA"} & set(names)


PACKAGES = GOOD.packages
CACHE = GOOD.cache
BROKEN = [
    ("Python", {"python": (3, 9, 18)}, "3.9.18", "install Python 3.10 or newer", True),
    ("torch", {"packages": PACKAGES | {"torch": "2.9.1"}}, "2.9.1", 'pip install --upgrade "torch>=2.10"', True),
    ("rich", {"packages": PACKAGES | {"rich": None}}, "not installed", 'pip install --upgrade "rich"', True),
    ("GPU", {"driver": None}, "driver is not found", "install the driver", False),
    ("GPU", {"driver": Driver((13, 0), (), "error 803: mismatch")}, "803", "restart the machine", False),
    ("torch's CUDA", {"cuda": None}, "built for the CPU alone", "/cu130`", False),
    ("torch's CUDA", {"cuda": None, "driver": Driver((12, 8), (H100,))}, "CPU alone", "/cu126`", False),
    ("driver", {"driver": Driver((12, 8), (H100,))}, "up to 12.8, and torch needs 13.0", "newer driver", False),
    ("NVRTC", {"nvrtc": None}, "not found", "pip install nvidia-cuda-nvrtc`", False),
    ("NVRTC", {"nvrtc": None, "cuda": "12.8"}, "not found", "pip install nvidia-cuda-nvrtc-cu12`", False),
    ("cuda-core", {"packages": PACKAGES | {"cuda-core": None}}, "not installed", '"cuda-core[cu13]"', False),
    ("cuDNN", {"cudnn": None}, "not found", "pip install --force-reinstall torch", False),
    ("C++ compiler", {"compiler": None}, "none found", "sudo apt install g++", False),
    ("C++ compiler", {"compiler": None, "platform": "darwin"}, "none found", "xcode-select --install", False),
    ("C++ compiler", {"compiler": None, "platform": "win32"}, "none found", "winget install", False),
    ("C++ compiler", {"compiler": ("g++", "")}, "g++: does not start", "sudo apt install g++", False),
    ("oneDNN", {"onednn": False}, "this torch has none", "pip install", False),
    ("cache", {"cache": CACHE._replace(private=False)}, "other users", "chmod 700 /home/me/.cache/whorl", False),
    ("cache", {"cache": CACHE._replace(writable=False)}, "cannot be written", "WHORL_CACHE", False),
]


@pytest.mark.parametrize(("name", "change", "detail", "remedy", "required"), BROKEN)
def test_what_is_broken_is_named_with_its_remedy(
    name: str, change: dict[str, object], detail: str, remedy: str, required: bool
) -> None:
    machine = replace(GOOD, **change)
    finding = found(machine, name)
    assert not finding.ok
    assert detail in finding.detail
    assert remedy in finding.remedy
    assert finding.required == required
    assert [other.name for other in diagnose(machine) if not other.ok] == [name]


def test_no_line_runs_over(capsys: pytest.CaptureFixture[str]) -> None:
    for _, change, *_ in BROKEN:
        assert all("\n" not in finding.detail + finding.remedy for finding in diagnose(replace(GOOD, **change)))


def test_a_hidden_gpu_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    finding = found(replace(GOOD, driver=Driver((13, 0), ())), "GPU")
    assert finding.ok
    assert "CUDA_VISIBLE_DEVICES is '-1'" in finding.detail


def test_probe_tells_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    initialised = torch.cuda.is_initialized()
    with settings(cache=tmp_path / "cache"):
        machine = probe()
    assert machine.python == sys.version_info[:3]
    assert torch.__version__.startswith(machine.packages["torch"])  # torch adds its build where pip's record may not
    assert machine.onednn == torch.backends.mkldnn.is_available()
    assert machine.cache == Cache(tmp_path / "cache", exists=False, private=True, writable=True)
    assert torch.cuda.is_initialized() == initialised  # by another test, where it is: looking starts no GPU


class FakeDriver:
    """libcuda with one GPU, or with the given status of cuInit."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuDriverGetVersion(self, version: object) -> None:
        version._obj.value = 12080

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuGetErrorString(self, status: int, text: object) -> None:
        text._obj.value = b"system has unsupported display driver"

    def cuDeviceGetCount(self, count: object) -> None:
        count._obj.value = 1

    def cuDeviceGet(self, device: object, index: int) -> None:
        device._obj.value = 7

    def cuDeviceGetName(self, name: ctypes.Array, length: int, device: ctypes.c_int) -> None:
        name.value = f"GPU {device.value}".encode()

    def cuDeviceTotalMem_v2(self, memory: object, device: ctypes.c_int) -> None:
        memory._obj.value = 16 << 30

    def cuDeviceGetAttribute(self, value: object, attribute: int, device: ctypes.c_int) -> None:
        value._obj.value = {75: 8, 76: 6}[attribute]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, Driver((12, 8), (Gpu("GPU 7", (8, 6), 16 << 30),))),
        (100, Driver((12, 8), ())),
        (803, Driver((12, 8), (), "error 803: system has unsupported display driver")),
    ],
)
def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, status: int, expected: Driver) -> None:
    monkeypatch.setattr(diagnosis, "_library", lambda names: FakeDriver(status))
    assert diagnosis._driver() == expected


def test_without_its_library_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(diagnosis.ctypes, "CDLL", absent)
    assert diagnosis._driver() is None
    assert diagnosis._nvrtc() is None


def test_nvrtc_is_found_beside_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    class Library:
        def nvrtcVersion(self, major: object, minor: object) -> None:
            major._obj.value, minor._obj.value = 13, 1

    def library(names: list[str]) -> Library:
        asked.extend(names)
        return Library()

    lib = tmp_path / "nvidia" / "cu13" / "lib"
    lib.mkdir(parents=True)
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc.alt.so.13"):
        (lib / name).touch()
    monkeypatch.setattr(diagnosis, "_library", library)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(diagnosis.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(diagnosis, "find_library", lambda name: None)
    assert diagnosis._nvrtc() == (13, 1)
    assert str(lib / "libnvrtc.so.13") in asked
    assert not [name for name in asked if "builtins" in name or "alt" in name]


@pytest.mark.parametrize(
    ("name", "is_nvrtc"),
    [
        ("libnvrtc.so", True),
        ("libnvrtc.so.12", True),
        ("libnvrtc-672ee683.so.11.2", True),
        ("nvrtc64_120_0.dll", True),
        ("libnvrtc-builtins.so.12.8", False),
        ("nvrtc64_120_0.alt.dll", False),
        ("nvrtc-builtins64_128.dll", False),
        ("libnvrtc_static.a", False),
    ],
)
def test_names_of_nvrtc(name: str, is_nvrtc: bool) -> None:
    assert diagnosis._is_nvrtc(name) == is_nvrtc


@pytest.mark.parametrize(
    ("maker", "kind", "card"),
    [("0x10de", "0x030200", True), ("0x10de", "0x020000", False), ("0x1002", "0x030000", False)],
)
def test_a_card_is_seen_on_the_bus(tmp_path: Path, maker: str, kind: str, card: bool) -> None:
    (tmp_path / "0000:00:01.0").mkdir()  # a device that says nothing
    device = tmp_path / "0000:00:02.0"
    device.mkdir()
    (device / "vendor").write_text(maker + "\n")
    (device / "class").write_text(kind + "\n")
    assert diagnosis._card(tmp_path) == card
    assert not diagnosis._card(tmp_path / "missing")


def program(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(os.name == "nt", reason="the compilers here are shell scripts")
def test_the_compiler_is_cxx_or_the_first_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert diagnosis._compiler() is None
    program(tmp_path, "clang++", 'echo "clang $1"; echo more')
    assert diagnosis._compiler() == ("clang++", "clang --version")
    program(tmp_path, "g++", 'echo "gcc $1"')
    assert diagnosis._compiler() == ("g++", "gcc --version")
    program(tmp_path, "ccache", 'echo "cached $*"')
    monkeypatch.setenv("CXX", "ccache g++")
    assert diagnosis._compiler() == ("ccache g++", "cached g++ --version")
    program(tmp_path, "g++", "echo broken >&2; exit 1")
    monkeypatch.delenv("CXX")
    assert diagnosis._compiler() == ("g++", "")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_the_cache_is_looked_at_and_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "whorl"
    assert diagnosis._cache(folder) == Cache(folder, exists=False, private=True, writable=True)
    assert not folder.parent.exists()
    folder.mkdir(parents=True, mode=0o700)
    assert diagnosis._cache(folder) == Cache(folder, exists=True, private=True, writable=True)
    folder.chmod(0o750)
    assert not diagnosis._cache(folder).private
    (tmp_path / "file").touch()
    assert not diagnosis._cache(tmp_path / "file").writable
    assert not diagnosis._cache(tmp_path / "file" / "whorl").writable
