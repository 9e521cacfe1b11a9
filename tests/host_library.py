"""C++ compiled for the host: once for all tests, modules and workers that hand in the same folder."""

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from whorl import compiler


def built(text: str, folder: Path, flags: Sequence[str], command: str = "", objects: Sequence[Path | str] = ()) -> Path:
    """The shared library of a source in a folder, or with the flag -c the object, compiled where it is not there yet.

    Args:
        objects: what it is linked with; flags of the linker may be among them.
    """
    line = [*shlex.split(command or compiler.found()), "-std=c++17", "-w", "-shared", "-fPIC", *flags]
    key = hashlib.sha256(chr(0).join([*line, *map(str, objects), text]).encode()).hexdigest()[:24]
    path = folder / f"{key}.{'o' if '-c' in flags else 'so'}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another worker may be at it
            made = Path(own) / "library.so"
            words = [*line, "-x", "c++", "-", "-x", "none", *map(str, objects), "-o", str(made)]
            done = subprocess.run(words, input=text, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr[:4000]
            os.replace(made, path)
    return path
