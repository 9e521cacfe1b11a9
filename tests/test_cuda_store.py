"""CUDA source to machine code for every architecture, and its place on disk: races, damage, permissions.  No GPU."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier

import pytest

import whorl
from whorl import settings
from whorl.engines.cuda import compile, store
from whorl.errors import KernelError

SOURCE = 'extern "C" __global__ void twice(float* a) {\n  a[threadIdx.x] *= 2.f;\n}\n'
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_90a sm_100 sm_103 sm_120 sm_120a".split()
CALL = (SOURCE, "twice", "sm_90a", ("--ftz=true",))

needs_nvrtc = pytest.mark.skipif(compile.missing() is not None, reason=f"{compile.missing()}")
posix = pytest.mark.skipif(os.name == "nt", reason="modes of files are POSIX's")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with settings(cache=tmp_path / "cache"):
        yield tmp_path / "cache" / "cuda"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each kernel that is compiled, by a compiler that only pretends."""
    names: list[str] = []

    def pretend(source: str, name: str, architecture: str, options: tuple[str, ...]) -> bytes:
        names.append(name)
        return b"\x7fELF" + source.encode() + b"\0" * 100

    monkeypatch.setattr(store, "cubin", pretend)
    return names


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_compiles_without_a_gpu(architecture: str) -> None:
    code = compile.cubin(SOURCE, "twice", architecture)
    assert code.startswith(b"\x7fELF")
    assert b"twice" in code


@needs_nvrtc
def test_an_error_shows_the_line_as_generated() -> None:
    broken = SOURCE.replace("  a[threadIdx.x] *= 2.f;", "  const float t7 = tangent(a[0]);")
    with pytest.raises(KernelError) as raised:
        compile.cubin(broken, "twice", "sm_80")
    text = str(raised.value)
    assert text.startswith("twice does not compile for sm_80:\ntwice.cu(2): error")
    assert '"tangent" is undefined' in text
    assert text.endswith("> " + "   2 |   const float t7 = tangent(a[0]);\n     3 | }")


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know() -> None:
    with pytest.raises(KernelError, match="NVRTC cannot compile for sm_1 twice: NVRTC_ERROR_INVALID_OPTION"):
        compile.cubin(SOURCE, "twice", "sm_1")


def test_without_the_compiler_the_error_has_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_found", lambda: False)
    with pytest.raises(KernelError, match=r'type `pip install "cuda-core\[cu1\d\]"`'):
        compile.cubin(SOURCE, "twice", "sm_80")


def test_importing_whorl_imports_nothing_of_cuda() -> None:
    code = (
        "import sys, whorl.engines.cuda.store, whorl.engines.cuda.launch; print('cuda.bindings.nvrtc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False\n", done.stderr


@needs_nvrtc
def test_a_kernel_is_compiled_once_and_its_source_lies_beside_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = store.kernel(*CALL)
    assert code == compile.cubin(*CALL)
    monkeypatch.setattr(store, "cubin", lambda *_: pytest.fail("compiled twice"))
    assert store.kernel(*CALL) == code
    (binary,), (source,) = folder.glob("*.cubin"), folder.glob("*.cu")
    assert binary.stem == source.stem
    assert source.read_text() == SOURCE
    assert binary.read_bytes().startswith(code)


def test_several_kernels_are_compiled_side_by_side(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Barrier(2, timeout=20)

    def pretend(source: str, name: str, architecture: str, options: tuple[str, ...]) -> bytes:
        meeting.wait()
        return name.encode()

    monkeypatch.setattr(store, "cubin", pretend)
    wanted = [(SOURCE, name, "sm_90a", ()) for name in ("first", "second")]
    assert store.kernels(wanted) == [b"first", b"second"]
    monkeypatch.setattr(store, "cubin", lambda *_: b"third")
    third = (SOURCE, "third", "sm_90a", ())
    assert store.kernels([wanted[1], third, wanted[0]]) == [b"second", b"third", b"first"]
    assert len([*folder.glob("*.cubin")]) == len([*folder.glob("*.cu")]) == 3


def test_an_error_of_one_of_several_is_raised(counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.cubin

    def broken(source: str, name: str, *rest: object) -> bytes:
        if name == "second":
            raise KernelError("second does not compile")
        return real(source, name, *rest)

    monkeypatch.setattr(store, "cubin", broken)
    with pytest.raises(KernelError, match="second does not compile"):
        store.kernels([(SOURCE, name, "sm_90a", ()) for name in ("first", "second")])


@pytest.mark.parametrize("place", range(5))
def test_the_key_holds_everything_that_decides(place: int, counted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    changed = [SOURCE + "\n", "thrice", "sm_90", ("--ftz=false",), "nvidia-cuda-nvrtc 99"]
    store.kernel(*CALL)
    store.kernel(*CALL)
    assert len(counted) == 1
    if place == 4:
        monkeypatch.setattr(store, "compiler", lambda: changed[4])
    store.kernel(*(changed[i] if i == place else CALL[i] for i in range(4)))
    assert len(counted) == 2


def damage(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    return {
        "empty": b"",
        "cut short": content[:-1],
        "cut to its seal": content[-32:],
        "a bit flipped": bytes(flipped),
        "longer": content + b"\0",
        "foreign": b"\x7fELF" + b"\1" * 400,
    }


@pytest.mark.parametrize("how", damage(b"0" * 64))
def test_what_is_damaged_or_foreign_is_compiled_again_and_replaced(how: str, folder: Path, counted: list[str]) -> None:
    code = store.kernel(*CALL)
    (path,) = folder.glob("*.cubin")
    whole = path.read_bytes()
    path.write_bytes(damage(whole)[how])
    assert store.kernel(*CALL) == code
    assert len(counted) == 2
    assert path.read_bytes() == whole


def test_an_entry_under_the_key_of_another_is_foreign(folder: Path, counted: list[str]) -> None:
    other = (SOURCE.replace("2.f", "3.f"), *CALL[1:])
    code = store.kernel(*CALL)
    (path,) = folder.glob("*.cubin")
    store.kernel(*other)
    (second,) = set(folder.glob("*.cubin")) - {path}
    path.write_bytes(second.read_bytes())
    assert store.kernel(*CALL) == code
    assert len(counted) == 3


def test_a_failed_compile_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise KernelError("no")

    monkeypatch.setattr(store, "cubin", fail)
    with pytest.raises(KernelError, match="no"):
        store.kernel(*CALL)
    assert list(folder.iterdir()) == []


@posix
def test_folder_and_files_are_the_owners_alone(folder: Path, counted: list[str]) -> None:
    before = os.umask(0)
    try:
        store.kernel(*CALL)
    finally:
        os.umask(before)
    modes = {path.name.split(".")[-1]: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"cu": 0o600, "cubin": 0o600}
    assert [stat.S_IMODE(place.stat().st_mode) for place in (folder, folder.parent)] == [0o700, 0o700]


@posix
@pytest.mark.parametrize("which", ["cuda", ".."])
def test_a_folder_that_others_can_write_is_refused(which: str, folder: Path, counted: list[str]) -> None:
    store.kernel(*CALL)
    place = folder if which == "cuda" else folder.parent
    place.chmod(0o770)
    with pytest.raises(KernelError, match=f"can be written by other users.*chmod 700 {place}$"):
        store.kernel(*CALL)


@posix
def test_a_folder_of_somebody_else_is_refused(
    folder: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.kernel(*CALL)
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(KernelError, match="belongs to another user: set WHORL_CACHE"):
        store.kernel(*CALL)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_setting(folder: Path, counted: list[str]) -> None:
    folder.parent.write_text("a file")
    with pytest.raises(KernelError, match="cannot be written .*: set WHORL_CACHE to a folder of your own"):
        store.kernel(*CALL)


def test_a_disk_that_is_full_leaves_no_half_file(
    folder: Path, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(KernelError, match="No space left on device"):
        store.kernel(*CALL)
    assert list(folder.iterdir()) == []


RACER = """
import sys, pathlib
from whorl import settings
from whorl.engines.cuda import store
settings.cache = sys.argv[1]
def slow(source, name, architecture, options):
    return b"\\x7fELF" + source.encode() * 20_000  # large, so that a write takes its time
store.cubin = slow
for number in range(40):
    source = f"// {number % 4}"
    if number % 3 == 0:  # a third process that damages
        for path in pathlib.Path(sys.argv[1], "cuda").glob("*.cubin"):
            path.write_bytes(b"half a file")
    assert store.kernel(source, "racer", "sm_90a") == slow(source, "", "", "")
print("all whole")
"""


def test_processes_may_race(tmp_path: Path) -> None:
    place = [sys.executable, "-c", RACER, str(tmp_path / "raced")]
    racers = [subprocess.Popen(place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for racer in racers:
        out, err = racer.communicate(timeout=120)
        assert out == "all whole\n", err
    assert not [path for path in (tmp_path / "raced" / "cuda").iterdir() if path.name.startswith(".")]


def test_the_error_is_whorls_own() -> None:
    assert whorl.KernelError is KernelError
