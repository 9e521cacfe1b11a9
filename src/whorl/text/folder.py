"""The run folder: made new or taken up again, held by one process, with one checkpoint in it."""

import os
import re
import shutil
import weakref
from itertools import count
from pathlib import Path

from whorl.errors import InputError
from whorl.text.checkpoint import CONFIG, remove

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

CHECKPOINT = re.compile(r"checkpoint-(\d+)")
LEFT = re.compile(r"\.checkpoint-\d+\.\w+")  # what a killed process leaves of a checkpoint


class Folder:
    """A run folder that no other process trains in while this object lives.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path, held: bool = True) -> None:
        """Hold the folder at `path`.

        Args:
            held: False: another process of this training holds it.

        Raises:
            InputError: another process holds it, or it cannot be written to.
        """
        self.path = path
        if not held:
            return
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise InputError(f"{path} cannot be written to: give another folder with --out.")
        if fcntl is None:
            return
        handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, handle)  # which lets it go, as the end of the process does
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process trains in {path}: wait for it, or end it.") from error
        except OSError:
            return  # a file system that has no locks

    @classmethod
    def new(cls, out: Path | None, name: str) -> "Folder":
        """A new or empty folder: `out`, or runs/NAME with a number where that is taken.

        Raises:
            InputError: it holds something, or cannot be made.
        """
        name = re.sub(r"[^\w.-]", "-", name).strip(".") or "text"
        names = (Path("runs", name if number == 1 else f"{name}-{number}") for number in count(1))
        path = out or next(path for path in names if not path.exists())
        try:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()):
                raise InputError(f"{path} is not empty: give a new folder with --out, or go on with --resume {path}.")
        except OSError as error:
            raise InputError(f"cannot make the run folder {path}: {error.strerror}.") from error
        return cls(path)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` steps belongs."""
        return self.path / f"checkpoint-{step}"

    def tidy(self, keep: Path) -> None:
        """Take away all checkpoints but `keep`, and what killed processes left."""
        for path in list(self.path.iterdir()):
            if CHECKPOINT.fullmatch(path.name) and path != keep:
                remove(path)
            elif LEFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def newest(path: Path) -> Path:
    """The checkpoint at `path`, or the newest one in the run folder `path`.

    Raises:
        InputError: there is none.
    """
    if (path / CONFIG).exists():
        return path
    try:
        found = {int(match[1]): entry for entry in path.iterdir() if (match := CHECKPOINT.fullmatch(entry.name))}
    except OSError as error:
        raise InputError(f"cannot read the run folder {path}: {error.strerror}.") from error
    if not found:
        raise InputError(f"{path} holds no checkpoint: give the folder of a run that has begun.")
    return found[max(found)]
