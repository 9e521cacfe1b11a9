"""The metrics of a run: one JSON object a line, each with its kind and the step after which it was written."""

import json
import math
from pathlib import Path
from typing import Any

from whorl.errors import InputError

Line = dict[str, Any]


def add(path: Path, **values: Any) -> None:
    """Append a line.

    Raises:
        InputError: the disk refuses.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values, allow_nan=False) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}.") from error


def lines(path: Path) -> list[Line]:
    """All whole lines; one that the end of a process cut is left out.

    Raises:
        InputError: the file cannot be read, or has something else in it.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
        found = [json.loads(line) for line in content.split(b"\n")[:-1]]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged: move it away, and the run goes on without it.") from error
    if not all(isinstance(line, dict) and _is_number(line.get("step")) for line in found):
        raise InputError(f"{path} holds lines without a step: move it away, and the run goes on without it.")
    return found


def rewind(path: Path, step: int) -> None:
    """Drop what was written after `step` steps, so that a resumed run writes it again.

    Raises:
        InputError: as `lines`, and where the disk refuses.
    """
    kept = [line for line in lines(path) if line["step"] <= step]
    temporary = path.with_name(f".{path.name}")
    try:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}.") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
