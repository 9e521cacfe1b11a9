"""Compiled kernels on disk: for each key the source and, beside it, the machine code.

The key is the content: source, architecture, options and compiler.  A file is written under a temporary name and
renamed, so processes may race and none reads half a file; what is damaged or was not written by whorl is compiled
again and replaced.  The folder is its owner's alone, since what lies in it is executed.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from whorl.engines.cuda.compile import compiler, cubin
from whorl.errors import KernelError
from whorl.settings import settings

_SEAL = 32  # bytes after the machine code: the digest of key and code


def kernel(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """The machine code of `source`, from the store or compiled and put there; arguments as `compile.cubin` takes.

    Raises:
        KernelError: the source does not compile, or the folder is not private or cannot be written.
    """
    return kernels([(source, name, architecture, options)])[0]


def kernels(wanted: Sequence[tuple[str, str, str, Sequence[str]]]) -> list[bytes]:
    """The machine code of each; what is not in the store is compiled side by side, which NVRTC does in threads.

    Forward and backward of LSTM with 1,024 units take it 0.9 s so, and 1.5 s one after the other, on two cores.

    Args:
        wanted: the arguments of `kernel`.

    Raises:
        KernelError: as `kernel`.
    """
    folder, keys = private_folder(), [digest(*one) for one in wanted]
    stems = [folder / f"{one[1]}-{key[:32]}" for one, key in zip(wanted, keys, strict=True)]
    codes = [_read(stem.with_suffix(".cubin"), key) for stem, key in zip(stems, keys, strict=True)]
    absent = [place for place, code in enumerate(codes) if code is None]
    if absent:
        with ThreadPoolExecutor(len(absent)) as pool:
            made = list(pool.map(lambda place: cubin(*wanted[place]), absent))
        for place, code in zip(absent, made, strict=True):
            write(stems[place].with_suffix(".cu"), wanted[place][0].encode())
            write(stems[place].with_suffix(".cubin"), code + _seal(keys[place], code))
            codes[place] = code
    return [code for code in codes if code is not None]


def digest(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> str:
    """The key of a kernel: everything that decides its machine code."""
    content = "\0".join([name, architecture, *options, compiler(), source])
    return blake2b(content.encode(), digest_size=32).hexdigest()


def private_folder() -> Path:
    """The folder of compiled kernels, made where it is not there.

    Raises:
        KernelError: it cannot be made, or somebody else could put code into it.
    """
    folder = settings.cache / "cuda"
    try:
        settings.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = [place.stat() for place in (settings.cache, folder)]
    except OSError as error:
        raise KernelError(f"{_cannot(folder, error)}: set WHORL_CACHE to a folder of your own.") from error
    if os.name == "nt":
        return folder  # a user's folders are private there, and modes say nothing
    for place, seen in zip((settings.cache, folder), found, strict=True):
        if stat.S_IMODE(seen.st_mode) & 0o022:
            raise KernelError(f"{place} can be written by other users, and its kernels are run: chmod 700 {place}")
        if seen.st_uid not in (0, os.geteuid()):
            raise KernelError(f"{place} belongs to another user: set WHORL_CACHE to a folder of your own.")
    return folder


def _cannot(path: Path, error: OSError) -> str:
    return f"{path} cannot be written ({error.strerror})"


def _seal(key: str, code: bytes) -> bytes:
    return blake2b(key.encode() + code, digest_size=_SEAL).digest()


def _read(path: Path, key: str) -> bytes | None:
    """The machine code that was stored under a key; None where there is none, or not as it was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KernelError(f"{path} cannot be read ({error.strerror}): delete it.") from error
    code, seal = content[:-_SEAL], content[-_SEAL:]
    return code if seal == _seal(key, code) else None


def write(path: Path, content: bytes) -> None:
    """Put `content` into a file of the private folder, all of it or nothing.

    Raises:
        KernelError: it cannot be written.
    """
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise KernelError(f"{_cannot(path, error)}: set WHORL_CACHE to a folder of your own.") from error
