"""The kernels of engine `cpu` under sanitizers, by other compilers, and for other instruction sets.

`cpu_driver.cpp` drives them without Python: under AddressSanitizer and ThreadSanitizer it must run clean, where memory
and threads are denied too, and a fault that is planted must be found.  What a compiler or a machine lacks is skipped,
with the reason.
"""

import errno
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from cells_for_tests import CELLS as CELLS_OF_TESTS
from engine_cases import CELLS, FORMS, assert_agrees
from whorl import compiler, plan, problem
from whorl.engines import host
from whorl.engines.cpu import build, generate, plain, sweep
from whorl.errors import CompileError

DENIED, DRIVER = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("denied.cpp", "cpu_driver.cpp")
)
X86 = platform.machine() in ("x86_64", "AMD64")
AS_BUILT = "-std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=fast -pthread"


def _gcc() -> str:
    return compiler.found()


def compiled(
    folder: Path,
    command: str,
    flags: str,
    cells: Sequence[str],
    bits: int = 32,
    planted: Mapping[str, str] | None = None,
) -> Path:
    """The driver with the kernels of some cells, as a program.

    Args:
        bits: of the dtype, as WHORL_DTYPE.
        planted: what to write in the kernels in the place of what.
    """

    def spoilt(text: str) -> str:
        for whole, broken in (planted or {}).items():
            assert whole in text, f"the kernels no longer have {whole!r}: plant the fault elsewhere"
            text = text.replace(whole, broken)
        return text

    named = [f"cell_{name}" for name in cells]
    every = " ".join(f"CELL({name})" for name in named)
    sources = {"driver": f"{DENIED}\n{spoilt(generate.sweep())}\n#define CELLS {every}\n{DRIVER}"}
    sources |= {f"cell_{name}": generate.source(CELLS_OF_TESTS[name].graph).text for name in cells}
    line = [*shlex.split(command), *AS_BUILT.split(), *flags.split(), f"-DWHORL_DTYPE={bits}"]
    made = []
    for name, text in sources.items():
        path = folder / f"{name}.cpp"
        path.write_text(text, encoding="utf-8")
        made.append(str(path.with_suffix(".o")))
        rename = [] if name == "driver" else [f"-Dwhorl_cell={name}"]
        run([*line, *rename, "-c", str(path), "-o", made[-1]])
    run([*line, *made, "-o", str(folder / "driver")])
    return folder / "driver"


def run(line: Sequence[str], seconds: int = 600) -> None:
    done = subprocess.run(line, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{shlex.join(line)}\n{(done.stdout + done.stderr)[-4000:]}"


def sanitizer(name: str, tmp_path: Path) -> str:
    """The flags of one, where programs made with it run here."""
    command = _gcc()
    if not command or compiler.is_microsofts(command):
        pytest.skip(f"no GCC or Clang: {compiler.remedy()}")
    path = tmp_path / "empty.cpp"
    path.write_text("int main() {}\n")
    line = [*shlex.split(command), f"-fsanitize={name}", str(path), "-o", str(tmp_path / "empty")]
    for step in (line, [str(tmp_path / "empty")]):
        done = subprocess.run(step, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"{command} has no -fsanitize={name} that runs here: {done.stderr[-200:].strip()}")
    # With -O0 no access is optimised away: AddressSanitizer then takes 10 s for 15 in all, ThreadSanitizer 16 for 15
    return f"-fsanitize={name} {'-O0' if name == 'address' else '-O1'} -g1 {'-march=native' if X86 else ''}"


@pytest.mark.parametrize("name, bits", [("address", 32), ("address", 16), ("thread", 32)])
def test_the_kernels_run_clean(name: str, bits: int, tmp_path: Path) -> None:
    flags = sanitizer(name, tmp_path)
    program = compiled(
        tmp_path, _gcc(), flags, ["lstm", "gru", "layer_norm_lstm", "gru_before", "four_states", "odd_ends"], bits
    )
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "clean\n", "")


FAULTS = {
    "a barrier at which nobody waits": ("thread", {"if (size == 1) return;": "return;"}, "data race"),
    "memory of a team that is too small": (
        "address", {"{up(reals * int64_t(sizeof(real)) + 4096, 4096)": "{4096"}, "heap-buffer-overflow",
    ),
    "memory that was denied": ("address", {"if (!made) throw NoMemory{bytes};": ""}, "SEGV on unknown address"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    name, planted, found = FAULTS[fault]
    program = compiled(tmp_path, _gcc(), sanitizer(name, tmp_path), ["lstm"], planted=planted)
    first = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}  # or it goes on, and writes of each race
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=600, env=first)
    assert done.returncode != 0
    assert found in done.stderr


# --- compilers and instruction sets -----------------------------------------------------------------------------------


@pytest.fixture
def compiled_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], None]]:
    """Engine `cpu` by a compiler, with flags for an instruction set in the place of those for this processor."""
    caches = (host._version, sweep.kernel, sweep._loop, plain.sizes)

    def use(command: str, flags: str) -> None:
        monkeypatch.setenv("CXX", command)
        if flags:
            monkeypatch.setattr(host, "_NATIVE", {platform.machine(): flags})
        for cached in caches:
            cached.cache_clear()

    yield use
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.skipif(not X86 or not shutil.which("g++"), reason="of GCC's, for x86-64")
@pytest.mark.parametrize("flags", ["-march=x86-64-v3", "-march=x86-64-v4"])
def test_a_tile_reads_each_weight_once(flags: str, tmp_path: Path) -> None:
    """Products of 2 to 6 rows have no weight as an operand from memory, which GCC would read once a row."""
    text, path = generate.sweep(), tmp_path / "sweep.s"
    (tmp_path / "sweep.cpp").write_text(text, encoding="utf-8")
    line = ["g++", *AS_BUILT.split(), "-O3", flags, "-DWHORL_DTYPE=32", "-w", "-S", "-o", str(path)]
    run([*line, str(tmp_path / "sweep.cpp")])
    # of kernel::tile<ROWS, VECTORS>, from its label to its end
    tiles = re.findall(r"^_ZN6kernelL4tileILi([2-6])ELi[2-4]E.*?:$(.*?)\.cfi_endproc", path.read_text(), re.M | re.S)
    assert {int(rows) for rows, _ in tiles} == {2, 3, 4, 5, 6}
    for rows, lines in tiles:
        products = re.findall(r"vfmadd\d+ps.*", lines)
        assert products
        assert not [each for each in products if "(" in each and "{1to" not in each], f"{rows} rows"


def _first(*commands: str) -> str:
    return next((command for command in commands if shutil.which(command)), "")


PIPS = f"{shlex.quote(sys.executable)} -m ziglang c++"
SETS = {
    "GCC, x86-64": ("g++", "-march=x86-64", (torch.float32, torch.bfloat16)),
    "GCC, AVX2": ("g++", "-march=x86-64-v3", (torch.float32, torch.bfloat16)),
    "Clang, AVX2": ("clang++", "-march=x86-64-v3", (torch.float32,)),
    "Clang of pip": (PIPS, "", (torch.float32,)),
    "Clang, this processor": ("clang++", "", (torch.float64, torch.float32, torch.bfloat16)),
}
"""A compiler, the flags of an instruction set ("" for those that `build` gives), and dtypes."""


@pytest.mark.parametrize(
    "name, dtype", [(name, dtype) for name, (_, _, dtypes) in SETS.items() for dtype in dtypes], ids=str
)
def test_every_compiler_and_instruction_set_gives_the_same(
    name: str, dtype: torch.dtype, compiled_by: Callable[[str, str], None]
) -> None:
    command, flags, _ = SETS[name]
    if flags and not X86:
        pytest.skip(f"{flags} is of x86-64, this is {platform.machine()}")
    if "v3" in flags and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
    if command == PIPS and not importlib.util.find_spec("ziglang"):
        pytest.skip("the package ziglang is not installed: type `pip install ziglang`")
    if command != PIPS and not shutil.which(command):
        pytest.skip(f"no {command} on the PATH")
    compiled_by(command, flags)
    if flags:
        assert flags in " ".join(host.flags(""))
    for cell in ("lstm", "gru", "layer_norm_lstm", "four_states", "odd_ends"):
        for form in ("two layers", "reset", "mask and lengths", "recurrent dropout by gate", "a panel and one"):
            assert_agrees("cpu", CELLS[cell], FORMS[form], dtype)


@pytest.mark.parametrize("bits", [32, 16, 64])
def test_the_kernels_compile_for_arm(bits: int, tmp_path: Path) -> None:
    """With NEON; and where there is QEMU, they run."""
    command = _first("aarch64-linux-gnu-g++")
    if not command:
        pytest.skip("no aarch64-linux-gnu-g++ on the PATH: type `sudo apt install g++-aarch64-linux-gnu`")
    cells = ["lstm", "layer_norm_lstm", "gru_before"]
    program = compiled(tmp_path, command, "-O2 -static -march=armv8-a", cells, bits)
    emulator = _first("qemu-aarch64-static", "qemu-aarch64")
    if emulator:
        done = subprocess.run([emulator, str(program)], capture_output=True, text=True, timeout=600)
        assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr


# --- a compiler that is there and fails -------------------------------------------------------------------------------

BROKEN = {
    "does not start": ("exit 3", "does not start"),
    "has no linker": (
        '[ "$1" = --version ] && echo fake 1.0 && exit; echo "ld: not found" >&2; exit 1',
        "ld: not found",
    ),
    "makes what cannot be loaded": (
        '[ "$1" = --version ] && echo fake 1.1 && exit; while [ "$1" != -o ]; do shift; done; echo no library > "$2"',
        "cannot be loaded",
    ),
}


@pytest.fixture
def broken(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """CXX names a compiler that fails; gives its command, and what it says."""
    script, says = BROKEN[request.param]
    command = tmp_path / "broken-c++"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o700)
    caches = (problem._device, plan.plan, host._version, build.fault, sweep.kernel, sweep._loop, plain.sizes)
    monkeypatch.setenv("CXX", str(command))
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_SECONDS", 20)
    for cached in caches:
        cached.cache_clear()
    whorl.settings.cache = tmp_path / "cache"
    yield str(command), says
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("named", ["/no/such/g++", "no-such-compiler -O3", 'g++ "'])
def test_a_compiler_that_cxx_names_is_never_another(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    assert shlex.split(compiler.found()) == ([named] if '"' in named else named.split())
    assert compiler.version(compiler.found()) == ""
    assert compiler.remedy() == "name another in CXX, or unset it"


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
def test_a_compiler_may_lie_where_a_path_has_blanks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    (command,) = shlex.split(compiler.found())
    (tmp_path / "my tools").mkdir()
    (tmp_path / "my tools" / "c++").symlink_to(str(shutil.which(command)))
    said = compiler.version(command)
    monkeypatch.setenv("CXX", str(tmp_path / "my tools" / "c++"))
    assert compiler.version(compiler.found()) == said != ""


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
def test_what_cxx_says_beside_the_compiler_is_in_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept ones made without it are not taken in their place."""
    command, source = compiler.found(), 'extern "C" int answer() { return ANSWER; }'
    with whorl.settings(cache=tmp_path):
        for number in (1, 2):
            monkeypatch.setenv("CXX", f"{command} -DANSWER={number}")
            assert host.load("a number", source, "").answer() == number


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(host, "_loaded", {})
    with whorl.settings(cache=tmp_path), pytest.raises(CompileError, match="No space left on device.*WHORL_CACHE"):
        host.load("a kernel", "int a;", "")


@pytest.mark.skipif(sys.platform == "win32", reason="the compilers of this test are shell scripts")
@pytest.mark.parametrize("broken", BROKEN, indirect=True)
def test_a_compiler_that_fails_is_a_reason_and_what_runs_instead_is_said(broken: tuple[str, str]) -> None:
    command, says = broken
    layer, x = whorl.GRU(5, 7), torch.randn(6, 3, 5)
    plan._announced.clear()
    made = layer.plan(x)
    assert made.engine == "reference"
    (reason,) = next(refusal.reasons for refusal in made.refusals if refusal.engine == "cpu")
    assert reason.startswith("the C++ compiler makes no kernels here: ")
    assert says in reason
    with pytest.warns(whorl.SlowWarning, match="the C\\+\\+ compiler makes no kernels here"):
        layer(x)
    assert says in repr(layer.stepper(3))
    layer.engine = "cpu"
    with pytest.raises(whorl.UnsupportedError, match="makes no kernels here"):
        layer(x)
    assert command in problem._device("cpu", None, *problem.switches("cpu", x.dtype)).compiler
