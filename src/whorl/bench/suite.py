"""The suite `seeds`: its two programs over the batch size, each as figures for the report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from whorl.bench.collection import save_collection
from whorl.bench.crossover import BATCHES, PASSES, Contender, Point, contenders, measure
from whorl.bench.figures import Figures, Plot
from whorl.bench.machine import find_device
from whorl.bench.seeds import PROGRAMS, PUBLISHED, WINDOWS, Program
from whorl.bench.tables import NOT_AVAILABLE, Table, number
from whorl.bench.timing import Effort
from whorl.errors import InputError

TITLE = "whorl: the programs that recurrent layers are judged by"
EPOCH_BATCH = 64
Note = Callable[[str], None]
Points = Mapping[tuple[str, int], Point]
"""By contender and batch."""


@dataclass(frozen=True)
class SuiteOptions:
    """What to measure, and where to.

    Attributes:
        programs: by name.
        batches: sizes, ascending.
        device: "auto", "cpu", "cuda"; on a GPU the CPU beside it is measured too.
        precisions: of the GPU: "fp32", "tf32", "bf16".
        seconds: of calls in all turns of a contender.
        out: the folder for figures and report.
    """

    programs: Sequence[str] = tuple(PROGRAMS)
    batches: Sequence[int] = BATCHES
    device: str = "auto"
    precisions: Sequence[str] = ("bf16",)
    seconds: float = 0.03
    out: Path = Path("runs/seeds")


def run(options: SuiteOptions, note: Note = lambda text: None) -> Iterator[Figures]:
    """Measure the programs, one after the other; the figures are on the disk after each batch size.

    Raises:
        InputError: options that cannot be carried out, or a disk that refuses.
    """
    for name in options.programs:
        if name not in PROGRAMS:
            raise InputError(f"program is {name!r}: write one of {', '.join(PROGRAMS)}.")
    for precision in options.precisions:
        if precision not in ("fp32", "tf32", "bf16"):
            raise InputError(f"precision is {precision!r}: write fp32, tf32 or bf16.")
    if not options.batches or min(options.batches) < 1:
        raise InputError(f"batches are {list(options.batches)}: write numbers from 1 on.")
    device = find_device(options.device)
    devices = ["cpu"] if device.type == "cpu" else ["cpu", device.type]
    chosen, effort = contenders(devices, options.precisions), Effort(3, options.seconds)
    collected = []
    for program in (PROGRAMS[name] for name in options.programs):
        points: dict[tuple[str, int], Point] = {}
        for batch in sorted(set(options.batches)):
            note(f"{program.name}, batch {batch}")
            points |= {(point.contender, batch): point for point in measure(program, batch, chosen, effort, device)}
            figures = figures_of(program, chosen, points, device)
            figures.save(options.out / f"{program.name}.json")
        collected.append(figures)
        save_collection(options.out / "report.html", TITLE, collected)
        yield figures


def figures_of(program: Program, chosen: Sequence[Contender], points: Points, device: torch.device) -> Figures:
    """Plots and tables of one program, from its points."""
    names = [one.name for one in chosen if any(points[key].times for key in points if key[0] == one.name)]
    batches = sorted({batch for _, batch in points})
    plots = [_plot(program, which, names, batches, points) for which in PASSES]
    tables = [_times(which, names, batches, points) for which in PASSES]
    tables += [_crossovers(names, batches, points)] if device.type != "cpu" else []
    tables.append(_engines(names, batches, points))
    numbers = {f"crossover, {name}": float(at) for name, at in crossovers(names, batches, points).items() if at}
    if program.tokens and EPOCH_BATCH in batches:
        tables.append(_epochs(names, points))
    absent = {one.name: points[one.name, batches[0]].reason for one in chosen if one.name not in names}
    text = (
        *program.text,
        " ".join(f"{which.capitalize()}: {what}." for which, what in PASSES.items())
        + " Times on the GPU pass between two events around a call while calls follow each other without waiting; on "
        "the CPU on the host's clock. Medians of calls in turns, always on fresh inputs. Before any time is taken, the "
        "output and every gradient of a training step of each contender, at each batch size, are compared with float64 "
        "by the error rule; * marks torch's own kernels where they are outside of it.",
        *(f"{name}: {NOT_AVAILABLE}, {reason}." for name, reason in absent.items()),
    )
    details = _explanations(names, batches, points)
    return Figures.now(device, program.name, program.title, text, tables, plots, details, numbers)


def crossovers(names: Sequence[str], batches: Sequence[int], points: Points) -> dict[str, int | None]:
    """For each contender on the GPU, the smallest batch from which on its training step is faster than whorl's on the
    CPU; None where there is none."""
    found: dict[str, int | None] = {}
    for name in (name for name in names if not name.endswith("CPU")):
        ahead = [_median(points, name, batch) < _median(points, "whorl, CPU", batch) for batch in batches]
        behind = max((index for index, faster in enumerate(ahead) if not faster), default=-1)
        found[name] = batches[behind + 1] if behind + 1 < len(batches) else None
    return found


def _median(points: Points, name: str, batch: int, which: str = "train") -> float:
    point = points.get((name, batch))
    return point.times[which].median if point and which in point.times else float("inf")


def _plot(program: Program, which: str, names: Sequence[str], batches: Sequence[int], points: Points) -> Plot:
    lines = {}
    for name in names:
        medians = [(batch, _median(points, name, batch, which)) for batch in batches]
        lines[name] = tuple((float(batch), 1e3 * ms / batch) for batch, ms in medians if ms < float("inf"))
    return Plot(f"{program.name}, {which}", "batch", "microseconds an example", lines, logarithmic=True)


def _times(which: str, names: Sequence[str], batches: Sequence[int], points: Points) -> Table:
    rows: list[tuple[str, ...]] = []
    notes: dict[str, None] = {}
    for batch in batches:
        row = [str(batch)]
        for name in names:
            point = points[name, batch]
            if which in point.times:
                row.append(number(point.times[which].median) + "*" * (not point.exact))
            else:
                notes[f"{name}, batch {batch}: {NOT_AVAILABLE}, {point.reason}"] = None
                row.append(NOT_AVAILABLE)
        rows.append(tuple(row))
    return Table(f"{which.capitalize()}: milliseconds a batch", ("batch", *names), tuple(rows), tuple(notes))


def _crossovers(names: Sequence[str], batches: Sequence[int], points: Points) -> Table:
    rows = []
    for name, at in crossovers(names, batches, points).items():
        ratios = []
        for batch in (batches[0], batches[-1]):
            cpu, gpu = (_median(points, one, batch) for one in ("whorl, CPU", name))
            ratios.append(f"{cpu / gpu:.2f}" if cpu < float("inf") and gpu < float("inf") else NOT_AVAILABLE)
        rows.append((name, str(at) if at else "never", *ratios))
    title = "Crossover: the batch from which on a training step is faster than whorl's own on this machine's CPU"
    columns = ("on the GPU", "from batch", *(f"times faster at batch {batch}" for batch in (batches[0], batches[-1])))
    return Table(title, columns, tuple(rows))


def _engines(names: Sequence[str], batches: Sequence[int], points: Points) -> Table:
    own = [name for name in names if any(points[name, batch].engines for batch in batches)]
    rows = []
    for batch in batches:
        cells = [points[name, batch].engines for name in own]
        rows.append((str(batch), *("; ".join(dict.fromkeys(engines.values())) for engines in cells)))
    title = "The engines that whorl.explain names at each point, of the layers in their order"
    return Table(title, ("batch", *own), tuple(rows), ("Where training and eval mode differ, both are named.",))


def _epochs(names: Sequence[str], points: Points) -> Table:
    rows: list[tuple[str, ...]] = [(name, "1 epoch, as published", str(seconds), "", "") for name, seconds in PUBLISHED]
    steps = -(-WINDOWS // EPOCH_BATCH)
    for name in names:
        medians = [_median(points, name, EPOCH_BATCH, which) for which in PASSES]
        times = [number(steps * ms / 1e3) if ms < float("inf") else NOT_AVAILABLE for ms in medians]
        rows.append((name, f"{steps:,} steps of this table's times", *times))
    title = f"{WINDOWS:,} windows, batch {EPOCH_BATCH}: seconds"
    note = "Published times are of keras.layers on the machines named, with batch sizes that are not published."
    return Table(title, ("", "", *PASSES), tuple(rows), (note,))


def _explanations(names: Sequence[str], batches: Sequence[int], points: Points) -> dict[str, str]:
    """What whorl.explain says of the training step, once for all batches that differ in nothing but their size."""
    details = {}
    for name in names:
        said: dict[str, list[int]] = {}
        first: dict[str, str] = {}
        for batch in batches:
            text = points[name, batch].explanation
            if text is not None:
                same = text.replace(f"batch {batch};", "batch;")
                said.setdefault(same, []).append(batch)
                first.setdefault(same, text)
        for same, those in said.items():
            details[f"whorl.explain, {name}, batch {', '.join(map(str, those))}"] = first[same]
    return details
