"""Results as tables of text: the same rows for the terminal, the page and the report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whorl.bench.cases import CELLS, PASSES, PRECISIONS
from whorl.bench.results import Measured, Outcome, Results

NOT_AVAILABLE = "n/a"


@dataclass(frozen=True)
class Table:
    """Texts in rows under columns, and what their marks mean."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The table in plain text, columns beside each other."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        plain = []
        for first, *others in lines:
            cells = [
                first.ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
            ]
            plain.append("  ".join(cells).rstrip())
        return "\n".join([self.title, *plain, *self.notes])

    def markdown(self) -> str:
        """The table in Markdown, without its title."""
        lines = [self.columns, ("---", *["---:"] * (len(self.columns) - 1)), *self.rows]
        text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n\n".join([text, *self.notes]).replace("<", "&lt;")


def times(results: Results) -> Iterator[Table]:
    """One table for each cell and pass: a row for each case, a column for each contender, and how they compare."""
    absent = absentees(results)
    names = [name for name in results.header.settings["contenders"] if name not in absent]
    for cell in CELLS:
        measured = results.of(cell)
        for which in PASSES if measured else ():
            yield _times(results, measured, which, names)


def absentees(results: Results) -> dict[str, str]:
    """The contenders that could run nothing at all, where the others ran, each with its one reason."""
    absent = {}
    for name in results.header.settings["contenders"]:
        passes = [outcomes for entry in results.measured.values() for outcomes in entry.passes.values()]
        reasons = {outcomes[name].reason for outcomes in passes if name in outcomes}
        if len(reasons) == 1 and None not in reasons:
            absent[name] = str(reasons.pop())
    return absent


def described(results: Results) -> dict[str, str]:
    """What each contender is, and why it has no times where it has none."""
    absent = absentees(results)
    summaries = results.header.settings["contenders"]
    return {name: text + (f"; n/a: {absent[name]}" if name in absent else "") for name, text in summaries.items()}


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Which contender of whorl is compared with which rival: graphed with graphed, plain with plain."""
    rivals = {graphed: "torch-graphed" if graphed else "torch" for graphed in (False, True)}
    own = [name for name in names if is_whorl(name)]
    return [(name, rivals[name.endswith("-graphed")]) for name in own if rivals[name.endswith("-graphed")] in names]


def is_whorl(name: str) -> bool:
    """Whether a contender of this name is whorl, on some engine."""
    return name.partition("-")[0] == "whorl"


def clock(results: Results) -> str:
    """What the times of these results are: of the GPU, or of the host's clock."""
    return "wall" if results.header.machine.get("device") == "cpu" else "GPU"


def reading(results: Results) -> list[str]:
    """How to read the figures, in a few sentences."""
    gpu = clock(results) == "GPU"
    return [
        "An example is one sequence of the batch: a call of batch 32 is 32 examples. Inputs are as wide as the layer. "
        + " ".join(f"{which.capitalize()}: {text}." for which, text in PASSES.items()),
        (
            "GPU time passes between two CUDA events around a call while calls follow each other without waiting, so "
            "it holds the gaps between launches, of which a replayed graph has none; wall time passes on the host's "
            "clock from before one call alone until its results are there. "
            if gpu
            else "Times are of the host's clock. "
        )
        + "Medians of calls in turns with the other contenders; before each call the input is a fresh one, and where a "
        "backward pass may follow, every weight is changed in place.",
        "Before any time is taken, the output and every gradient of that same call are compared with float64. The "
        "error rule allows twice the error of plain torch that rounds only what enters a product, plus 4 eps.",
    ]


def number(value: float) -> str:
    """Three significant digits, without an exponent.

    >>> number(1234.5), number(12.345), number(0.0012345)
    ('1234', '12.3', '0.00123')
    """
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".") if value >= 1e-4 else f"{value:.2g}"


def _times(results: Results, measured: Sequence[Measured], which: str, names: Sequence[str]) -> Table:
    notes = _Notes()
    compared = pairs(names)
    own = [name for name in names if is_whorl(name) and not name.endswith("-graphed")]
    rows = []
    for entry in (entry for entry in measured if entry.reason is None):
        outcomes = entry.passes.get(which, {})
        row = [f"{entry.case.shape} {entry.case.precision}"]
        row += [_cell(outcomes.get(name, Outcome()), entry.case.batch, notes) for name in names]
        for mine, its in compared:
            ours, theirs = (outcomes.get(name, Outcome()).time for name in (mine, its))
            row.append(f"{theirs.median / ours.median:.2f}" if ours and theirs else NOT_AVAILABLE)
        row += [outcomes.get(name, Outcome()).engine or "" for name in own]
        rows.append(tuple(row))
    columns = ("layers x batch x time x units", *names, *(f"{its} / {mine}" for mine, its in compared))
    title = f"{measured[0].case.cell.upper()}, {which}: {clock(results)} milliseconds a call (microseconds an example)"
    return Table(
        title, (*columns, *(f"{name} ran" for name in own)), tuple(rows), (*_left_out(measured), *notes.lines())
    )


def _left_out(measured: Sequence[Measured]) -> Iterator[str]:
    """Why cases have no row, a line for each reason: the precision where it is so for all of its cases, else each."""
    reasons: dict[str, list[Measured]] = {}
    for entry in measured:
        if entry.reason is not None:
            reasons.setdefault(entry.reason, []).append(entry)
    for reason, entries in reasons.items():
        names = [f"{entry.case.shape} {entry.case.precision}" for entry in entries]
        precisions = {entry.case.precision for entry in entries}
        if len(entries) == sum(entry.case.precision in precisions for entry in measured):
            names = [precision for precision in PRECISIONS if precision in precisions]
        yield f"{', '.join(names)}: {NOT_AVAILABLE}, {reason}"


def _cell(outcome: Outcome, batch: int, notes: "_Notes") -> str:
    time = outcome.time
    if time is None:
        return f"{NOT_AVAILABLE} {notes.mark(outcome.reason or 'not measured')}"
    text = f"{number(time.median)} ({number(1e3 * time.median / batch)})"
    return text if outcome.exact else text + notes.inexact()


class _Notes:
    """Marks for reasons, a, b, c: the same mark for the same reason."""

    def __init__(self) -> None:
        self._marks: dict[str, str] = {}
        self._inexact = False

    def mark(self, reason: str) -> str:
        count = len(self._marks)
        new = chr(ord("a") + count % 26) * (1 + count // 26)
        return f"[{self._marks.setdefault(reason, new)}]"

    def inexact(self) -> str:
        self._inexact = True
        return "*"

    def lines(self) -> tuple[str, ...]:
        star = ("* its numbers are outside the error rule; the report says by how much",) if self._inexact else ()
        return (*(f"[{mark}] {reason}" for reason, mark in self._marks.items()), *star)
