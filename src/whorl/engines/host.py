"""Code compiled by the host's compiler, kept in a private folder, and loaded.

A kernel's key is its source, the compiler's version, its arguments and flags, and the processor.  In the folder KEY.cpp
is the source and KEY.txt names the library by the digest of its bytes: a library is loaded only where its bytes have
the digest that its name says, so a damaged one is built again, and two processes that build at once do not disturb each
other.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import signal
import stat
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from whorl import compiler
from whorl.errors import CompileError
from whorl.settings import settings

# A product and the sum that it goes into are one operation wherever they stand, as GCC has it by itself: Clang's
# kernels are then as exact.  Of 40 seeds of a cell of the tests 5 break the error rule by either, else by Clang's 7.
_FLAGS = "-std=c++17 -O3 -fno-math-errno -fno-trapping-math -ffp-contract=fast -fPIC -shared -pthread"
# For this processor: vectors as wide as it has.  Without -ffast-math, which takes NaN and infinity away.
_NATIVE = {"x86_64": "-march=native -mprefer-vector-width=512", "AMD64": "-march=native -mprefer-vector-width=512"}
_SECONDS = 300
_lock = threading.Lock()
_locks: dict[str, threading.Lock] = {}
_loaded: dict[str, ctypes.CDLL] = {}
_running: set[subprocess.Popen] = set()
_given_up = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # they are the parent's


def load(name: str, source: str, defines: str, instead: str = "pass engine='reference'") -> ctypes.CDLL:
    """The library of a C++ source, compiled where it is not there yet.

    Args:
        name: what it is, for errors.
        defines: further flags.
        instead: what one can do where it cannot be compiled, for errors.

    Raises:
        CompileError: the compiler fails, the folder of kernels is another user's, or nothing can be loaded from it.
    """
    key = _key(source, defines)
    with _lock:
        own = _locks.setdefault(key, threading.Lock())
    with own:  # who wants another library does not wait for this one
        if key not in _loaded:
            _loaded[key] = _opened(key, name, source, defines, instead)
    return _loaded[key]


def _opened(key: str, name: str, source: str, defines: str, instead: str) -> ctypes.CDLL:
    folder = _folder()
    try:
        path = _kept(folder, key) or _build(folder, key, name, source, defines, instead)
    except OSError as error:  # a disk that is full
        raise CompileError(
            f"{name} cannot be compiled into {folder} ({error.strerror}): make room there, or set WHORL_CACHE "
            "to another folder."
        ) from None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:  # built, and not to be run from there: a disk mounted with noexec
        raise CompileError(
            f"{name} was compiled and cannot be loaded ({error}): set WHORL_CACHE to a folder on a disk from "
            "which programs run."
        ) from None


def give_up() -> None:
    """End what is being compiled, now and from now on: `load` raises CompileError to those who wait for it."""
    _given_up.set()
    for process in list(_running):
        _end(process)


def _end(process: subprocess.Popen) -> None:
    if os.name == "nt":
        process.kill()
    else:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)  # the compiler starts others


def flags(defines: str) -> list[str]:
    """What the compiler is given beside the files."""
    return [*_FLAGS.split(), *_NATIVE.get(platform.machine(), "-mcpu=native").split(), *shlex.split(defines)]


def _key(source: str, defines: str) -> str:
    arguments = shlex.split(compiler.found())[1:]  # of CXX
    parts = (source, _version(), *arguments, *flags(defines), _processor())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1)
def _version() -> str:
    command = compiler.found()
    said = compiler.version(command) if command else ""
    if not said:
        what = f"the C++ compiler {command} does not start" if command else "no C++ compiler is found"
        raise CompileError(f"{what}: {compiler.remedy()}, or pass engine='reference'.")
    return said


@lru_cache(maxsize=1)
def _processor() -> str:
    """What -march=native means here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU ")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(told))])


def _folder() -> Path:
    """The private folder of the host's kernels, made where it is not there; one for this process where none can be."""
    folder = settings.cache / "cpu"
    try:
        for part in (settings.cache, folder):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:  # a home that cannot be written, as in many containers: kernels last as long as the process
        return _for_this_process()
    for part in (settings.cache, folder):
        found = part.stat()
        if os.name != "nt" and (found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022):
            raise CompileError(
                f"{part} is another user's, or can be written by others, who could put code there: "
                f"type `chmod 700 {shlex.quote(str(part))}`, or set WHORL_CACHE to a folder of your own."
            )
    return folder


@lru_cache(maxsize=1)
def _for_this_process() -> Path:
    made = tempfile.TemporaryDirectory(prefix="whorl-", ignore_cleanup_errors=True)
    _temporary.append(made)
    return Path(made.name)


_temporary: list[tempfile.TemporaryDirectory] = []
"""Removed when the process ends."""


def _kept(folder: Path, key: str) -> Path | None:
    """The library of a key, where it is there and whole."""
    try:
        digest = (folder / f"{key}.txt").read_text(encoding="ascii").strip()
        path = folder / f"{digest}.so"
        return path if _digest(path.read_bytes()) == digest else None
    except (OSError, ValueError):  # not there, or no text
        return None


def _build(folder: Path, key: str, name: str, source: str, defines: str, instead: str) -> Path:
    command = shlex.split(compiler.found())
    with tempfile.TemporaryDirectory(dir=folder) as work:
        written, made = Path(work) / f"{key}.cpp", Path(work) / "library.so"
        written.write_text(source, encoding="utf-8")
        line = [*command, *flags(defines), str(written), "-o", str(made)]
        with subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace",
            start_new_session=True,
        ) as process:  # fmt: skip
            _running.add(process)
            if _given_up.is_set():
                _end(process)
            try:
                _, said = process.communicate(timeout=_SECONDS)
            except BaseException as error:  # the compiler is in a group of its own, and goes on where it is not ended
                _end(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise CompileError(f"{shlex.join(command)} took more than {_SECONDS} s over {name}.") from None
            finally:
                _running.discard(process)
        if process.returncode or not made.exists():
            raise CompileError(
                f"{shlex.join(line)} failed over {name}:\n{said[-4000:]}\nName another compiler in CXX, or {instead}."
            )
        digest = _digest(made.read_bytes())
        made.chmod(0o700)
        pointer = Path(work) / "pointer"
        pointer.write_text(digest, encoding="ascii")
        os.replace(written, folder / f"{key}.cpp")
        os.replace(made, folder / f"{digest}.so")
        os.replace(pointer, folder / f"{key}.txt")
    return folder / f"{digest}.so"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
