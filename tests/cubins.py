"""Machine code that several tests read, compiled and listed once for all of them and for all workers."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from whorl.engines.cuda import compile as nvrtc

FOLDER: Path | None = None
"""Where it is kept; None where each test compiles what it reads."""


def cubin(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """What `compile.cubin` gives."""
    words = chr(0).join([name, architecture, *options, source])
    return _once(words.encode(), "cubin", lambda: nvrtc.cubin(source, name, architecture, options))


def listed(code: bytes, tool: str, path: Path) -> list[str]:
    """The instructions of machine code, as nvdisasm has them, which reads it there."""

    def make() -> bytes:
        path.write_bytes(code)
        return subprocess.run([tool, "-c", "-ndf", str(path)], capture_output=True, check=True).stdout

    return _once(code, "listing", make).decode().splitlines()


def _once(words: bytes, kind: str, make: Callable[[], bytes]) -> bytes:
    """What is made of these words, by whichever worker comes first."""
    if FOLDER is None:
        return make()
    path = FOLDER / f"{hashlib.sha256(words).hexdigest()[:24]}.{kind}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as own:  # another worker may be at it
            made = Path(own) / kind
            made.write_bytes(make())
            os.replace(made, path)
    return path.read_bytes()
