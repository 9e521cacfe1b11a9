"""What one program measured, as a file: tables, plots and texts, beside them machine, versions, date and commit."""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from whorl.bench.machine import commit, describe, versions
from whorl.bench.results import now, write
from whorl.bench.tables import Table
from whorl.errors import InputError

FORMAT, VERSION = "whorl figures", 1


@dataclass(frozen=True)
class Plot:
    """Lines over one axis.

    Attributes:
        title: what is shown.
        x, y: what the axes are, with their units.
        lines: by name, each as points of x and y.
        logarithmic: both axes; then every number is above 0.
    """

    title: str
    x: str
    y: str
    lines: dict[str, tuple[tuple[float, float], ...]]
    logarithmic: bool = False


@dataclass(frozen=True)
class Figures:
    """What one program measured on one machine.

    Attributes:
        program: by which figures of several machines stand together.
        title: of the section.
        text: paragraphs: what was measured, and how to read it.
        command: that repeats it.
        date: when, in UTC.
        machine, versions, commit: as in the results of the grid.
        tables, plots: in the order in which they are shown.
        details: longer texts, by their summary.
        numbers: single figures by name, for programs that read the file.
    """

    program: str
    title: str
    text: tuple[str, ...]
    command: str
    date: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: dict[str, Any]
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    details: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def now(
        device: torch.device,
        program: str,
        title: str,
        text: Sequence[str] = (),
        tables: Sequence[Table] = (),
        plots: Sequence[Plot] = (),
        details: Mapping[str, str] | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> "Figures":
        """What this process measured on `device`: machine, versions, commit, date and command are its own."""
        return Figures(
            program, title, tuple(text), _command(sys.argv), now(), describe(device), versions(), commit(),
            tuple(tables), tuple(plots), dict(details or {}), dict(numbers or {}),
        )  # fmt: skip

    def where(self) -> str:
        """Machine, versions, date and commit in one line."""
        machine = self.machine.get("gpu") or f"{self.machine.get('cpu')}, {self.machine.get('threads')} threads"
        driver = f", driver {self.machine['driver']}" if self.machine.get("driver") else ""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        dirty = " with changes that are in no commit" if self.commit.get("dirty") else ""
        commit = str(self.commit.get("hash"))
        short = commit[:12] if len(commit) == 40 else commit
        return f"{machine}{driver}; {versions}; {self.date}; commit {short}{dirty}"

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all.

        Raises:
            InputError: the disk refuses.
        """
        write(path, json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> "Figures":
        """The figures in a file; nothing in it is executed.

        Raises:
            InputError: no such file, or no figures in it.
        """
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} holds no figures: it is no JSON.") from error
        if not isinstance(data, dict) or (data.pop("format", None), data.pop("version", None)) != (FORMAT, VERSION):
            raise InputError(f"{path} holds no figures of version {VERSION}.")
        try:
            return _read(data)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InputError(f"{path} holds no figures that can be read: {error}.") from error


def _command(words: Sequence[str]) -> str:
    """The command that a process was called with, less where its figures went and where the files it names lie."""
    program, *others = words
    parts = Path(program).parts
    known = ["python", "/".join(parts[-2:])] if program.endswith(".py") and parts[-2:-1] != ("whorl",) else ["whorl"]
    for name in ("--figures", "--out"):
        if name in others:
            at = others.index(name)
            del others[at : at + 2]
    return shlex.join([*known, *(_told(word) for word in others)])


def _told(word: str) -> str:
    """A word of a command: of a path from the root the last folder and the file, which say no machine's name."""
    return "/".join(Path(word).parts[-2:]) if Path(word).is_absolute() else word


def _read(data: dict[str, Any]) -> Figures:
    tables = tuple(
        Table(
            str(table["title"]),
            _texts(table["columns"]),
            tuple(_texts(row, len(table["columns"])) for row in table["rows"]),
            _texts(table["notes"]),
        )
        for table in data.pop("tables")
    )
    plots = tuple(
        Plot(
            **{
                **plot,
                "lines": {
                    name: tuple((float(x), float(y)) for x, y in points) for name, points in plot["lines"].items()
                },
            }
        )
        for plot in data.pop("plots")
    )
    return Figures(**{**data, "text": _texts(data["text"])}, tables=tables, plots=plots)


def _texts(row: Sequence[Any], length: int | None = None) -> tuple[str, ...]:
    if length not in (None, len(row)):
        raise ValueError(f"a row has {len(row)} cells under {length} columns")
    return tuple(map(str, row))
