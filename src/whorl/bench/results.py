"""Results as a file: JSON that is written whole or not at all, read with suspicion, and merged only with its like."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from whorl.bench.cases import PASSES, Case, position
from whorl.bench.timing import Spread
from whorl.errors import InputError

FORMAT, VERSION = "whorl bench", 1


@dataclass(frozen=True)
class Header:
    """Where, with what and how: results are comparable where all of it is the same.

    Attributes:
        machine: device, GPU, driver, CPU.
        versions: of everything that takes part.
        commit: "hash", and whether the source was "dirty", that is, differed from it.
        settings: "contenders" (what each is, by name), "turns" and "seconds".
    """

    machine: dict[str, Any]
    versions: dict[str, Any]
    commit: dict[str, Any]
    settings: dict[str, Any]

    def difference(self, other: "Header") -> str | None:
        """The first thing that differs, in words; None where nothing does."""
        for part in fields(self):
            mine, its = getattr(self, part.name), getattr(other, part.name)
            for key in dict.fromkeys([*mine, *its]):
                if mine.get(key) != its.get(key):
                    return f"{part.name}: {key} is {mine.get(key)!r} there and {its.get(key)!r} here"
        return None


@dataclass(frozen=True)
class Outcome:
    """One pass of one contender.

    Attributes:
        reason: why there is no time; None where there is one.
        engine: which engine of whorl ran; None for a rival.
        gpu, wall: milliseconds of a call, as `timing` says; gpu is None on a CPU.
        memory: bytes held during a call beyond those before it; None on a CPU.
        error, bound, tensor: the check's verdict: of the tensor that comes nearest to its bound. None where there was
            no check.
    """

    reason: str | None = None
    engine: str | None = None
    gpu: Spread | None = None
    wall: Spread | None = None
    memory: int | None = None
    error: float | None = None
    bound: float | None = None
    tensor: str | None = None

    @property
    def time(self) -> Spread | None:
        """GPU time, on a CPU wall time."""
        return self.gpu or self.wall

    @property
    def wrong(self) -> bool:
        """Whether it was checked, and not timed because of its numbers."""
        return self.bound is not None and self.time is None

    @property
    def exact(self) -> bool:
        """Whether there was a check and the numbers were within the error rule."""
        return self.error is not None and self.bound is not None and self.error <= self.bound


@dataclass(frozen=True)
class Measured:
    """A case with all of its outcomes.

    Attributes:
        reason: why the device cannot run in this precision; None where it can.
        date: when, in UTC.
        passes: by pass and contender.
    """

    case: Case
    date: str
    reason: str | None = None
    passes: dict[str, dict[str, Outcome]] = field(default_factory=dict)


@dataclass
class Results:
    """A header and the cases measured under it, by name."""

    header: Header
    measured: dict[str, Measured] = field(default_factory=dict)

    def of(self, cell: str) -> list[Measured]:
        """The cases of a cell, in the grid's order."""
        found = (entry for entry in self.measured.values() if entry.case.cell == cell)
        return sorted(found, key=lambda entry: position(entry.case))

    def save(self, path: Path) -> None:
        """Write the file: it is there as before, or as now, whatever happens meanwhile.

        Raises:
            InputError: the disk refuses.
        """
        write(path, self.to_json())

    def to_json(self) -> str:
        """One line for each outcome."""
        head = {"format": FORMAT, "version": VERSION, **asdict(self.header)}
        text = json.dumps(head, indent=1)[:-2]
        rows = [_dump_case(measured) for measured in self.measured.values()]
        return text + ',\n "cases": [\n' + ",\n".join(rows) + "\n ]\n}\n"

    @staticmethod
    def load(path: Path) -> "Results":
        """The results in a file; nothing in it is executed.

        Raises:
            InputError: no such file, or no results of `whorl bench` in it.
        """
        try:
            data = json.loads(path.read_bytes())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} holds no results of `whorl bench`: it is no JSON.") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise InputError(f"{path} holds no results of `whorl bench`.")
        if data.get("version") != VERSION:
            raise InputError(
                f"{path} has version {data.get('version')!r}, and this whorl reads {VERSION}: measure anew."
            )
        try:
            return _parse(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} is damaged: {type(error).__name__} at {error}. Measure anew.") from error


def write(path: Path, text: str) -> None:
    """Write a file: it is there as before, or as now, whatever happens meanwhile.

    Raises:
        InputError: the disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise InputError(f"cannot write {path}: {place}{error.strerror}.") from error


def refuse_others(path: Path, mark: str) -> None:
    """Raise where a file is in the way that does not begin with `mark`.

    Raises:
        InputError: for such a file, or one that cannot be read.
    """
    try:
        if path.exists() and not path.read_bytes().startswith(mark.encode()):
            raise InputError(f"{path} was not written by `whorl bench`: give another name, so that nothing is lost.")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def merge(paths: Sequence[Path]) -> Results:
    """The cases of all these files as one, in the order of the files.

    Raises:
        InputError: files that were not measured in the same way, or that have a case in common.
    """
    first, *others = [(path, Results.load(path)) for path in paths]
    merged = Results(first[1].header, dict(first[1].measured))
    for path, results in others:
        difference = results.header.difference(merged.header)
        if difference is not None:
            raise InputError(f"{path} and {first[0]} differ in {difference}: only results of one kind make one table.")
        common = [name for name in results.measured if name in merged.measured]
        if common:
            raise InputError(f"{path} has {common[0]}, as a file before it has: leave one of them out.")
        merged.measured.update(results.measured)
    return merged


def _dump_case(measured: Measured) -> str:
    head = {"case": measured.case.name, "date": measured.date}
    if measured.reason is not None:
        return "  " + json.dumps(head | {"reason": measured.reason})
    passes = []
    for which, outcomes in measured.passes.items():
        rows = [f"    {json.dumps(name)}: {json.dumps(_without_none(outcome))}" for name, outcome in outcomes.items()]
        passes.append(f"   {json.dumps(which)}: {{\n" + ",\n".join(rows) + "\n   }")
    return "  " + json.dumps(head)[:-1] + ', "passes": {\n' + ",\n".join(passes) + "\n  }}"


def _without_none(outcome: Outcome) -> dict[str, Any]:
    return {key: value for key, value in asdict(outcome).items() if value is not None}


def _parse(data: dict[str, Any]) -> Results:
    parts = [data[part.name] for part in fields(Header)]
    if not all(isinstance(part, dict) and _printable(part) for part in parts):
        raise ValueError("the header")
    for name, summary in parts[3]["contenders"].items():
        _text(name), _text(summary or 0)
    results = Results(Header(*parts))
    for row in data["cases"]:
        case = Case.of(row["case"])
        if case is None:
            raise ValueError(f"case {row['case']!r}")
        passes = {
            which: {_text(name) or "": _outcome(**values) for name, values in row["passes"][which].items()}
            for which in PASSES
            if which in row.get("passes", {})
        }
        results.measured[case.name] = Measured(case, _text(row["date"]) or "", _text(row.get("reason")), passes)
    return results


def _outcome(
    gpu: dict | None = None,
    wall: dict | None = None,
    error: Any = None,
    bound: Any = None,
    memory: Any = None,
    **rest: Any,
) -> Outcome:
    texts = {key: _text(value) for key, value in rest.items()}
    numbers = [None if value is None else _number(value) for value in (error, bound, memory)]
    memory = None if numbers[2] is None else int(numbers[2])
    return Outcome(gpu=_spread(gpu), wall=_spread(wall), error=numbers[0], bound=numbers[1], memory=memory, **texts)


def _spread(values: dict | None) -> Spread | None:
    if values is None:
        return None
    spread = Spread(**values)
    numbers: Iterable[Any] = vars(spread).values()
    if not all(_number(number) > 0 for number in numbers):
        raise ValueError(f"{values}")
    return spread


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r}")
    return value


def _text(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and value.isprintable()):
        raise ValueError(f"{value!r}")
    return value


def _printable(value: Any) -> bool:
    """Whether every text in it can be shown on a terminal as it is."""
    if isinstance(value, dict):
        return all(_printable(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return all(map(_printable, value))
    return not isinstance(value, str) or value.isprintable()
