"""Machine code that several tests read, compiled once for all of them and for all workers."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from whorl.engines.cuda import compile as nvrtc

FOLDER: Path | None = None
"""Where it is kept; None where each test compiles what it reads."""


def cubin(source: str, name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """What `compile.cubin` gives."""
    if FOLDER is None:
        return nvrtc.cubin(source, name, architecture, options)
    words = chr(0).join([name, architecture, *options, source])
    path = FOLDER / f"{hashlib.sha256(words.encode()).hexdigest()[:24]}.cubin"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as own:  # another worker may be at it
            made = Path(own) / "cubin"
            made.write_bytes(nvrtc.cubin(source, name, architecture, options))
            os.replace(made, path)
    return path.read_bytes()
