"""The program behind `whorl bench`: which cases are left, measured one by one, each on the disk before the next."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from whorl.bench.cases import Case, select, shard
from whorl.bench.contenders import USUAL_RIVALS, contenders
from whorl.bench.machine import commit, describe, find_device, versions
from whorl.bench.measurement import Note, measure
from whorl.bench.report import MARK, save_report
from whorl.bench.results import Header, Measured, Results, refuse_others
from whorl.bench.timing import Effort
from whorl.engines import taped
from whorl.errors import InputError

QUICK = Effort(turns=3, seconds=0.03)


@dataclass(frozen=True)
class Options:
    """What to measure, and where to.

    Attributes:
        patterns: which cases; none: all.
        quick: the quick grid, and less effort.
        engines: of whorl; "auto" for the one it chooses.
        rivals: by name.
        device: "auto", "cpu", "cuda", "cuda:1".
        shard: "i/n", the part of the cases that is measured.
        seconds: of calls in all turns of a contender; None: the effort's own.
        out: the JSON file, new or of the same measurement; None: a new one under ./runs.
    """

    patterns: Sequence[str] = ()
    quick: bool = False
    engines: Sequence[str] = ("auto",)
    rivals: Sequence[str] = field(default=USUAL_RIVALS)
    device: str = "auto"
    shard: str = "1/1"
    seconds: float | None = None
    out: Path | None = None


class Program:
    """One measurement, perhaps begun by a process before.

    Attributes:
        contenders: who is measured.
        results: what is measured, as it is on the disk.
        left: the cases still to measure.
        out: the JSON file.
        report: the HTML file beside it.
    """

    def __init__(self, options: Options) -> None:
        """Choose, look at the machine, and read or make the results file.

        Raises:
            InputError: options that cannot be carried out.
        """
        effort = QUICK if options.quick else Effort()
        if options.seconds is not None:
            if not 0 < options.seconds < 3600:
                raise InputError(f"seconds is {options.seconds}: write a number above 0 and below 3600.")
            effort = Effort(effort.turns, options.seconds)
        cases = shard(select(options.patterns, options.quick), options.shard)
        self.contenders = contenders(options.engines, options.rivals)
        self.device, self.effort = find_device(options.device), effort
        settings = {"contenders": {one.name: one.summary for one in self.contenders}, **vars(effort)}
        header = Header(describe(self.device), versions(), commit(), settings)
        self.out = options.out or _new_file(options.shard)
        if self.out.suffix != ".json":
            raise InputError(f"out is {self.out}: give a name that ends in .json; the report goes beside it as .html.")
        self.report = self.out.with_suffix(".html")
        self.results = Results(header)
        if self.out.exists():
            self.results = Results.load(self.out)
            difference = self.results.header.difference(header)
            if difference is not None:
                raise InputError(f"{self.out} is of another measurement ({difference}): give another file with --out.")
        refuse_others(self.report, MARK)
        self.results.save(self.out)
        self.save_report()
        self.left: list[Case] = [case for case in cases if case.name not in self.results.measured]
        self.cases = cases

    def run(self, note: Note = lambda text: None) -> Iterator[Measured]:
        """Measure the cases that are left; each is in the file when it is given.

        Args:
            note: told what is done next.

        Raises:
            InputError: the file cannot be written.
        """
        if self.left and self.device.type == "cuda":
            note("C++ of the calls")
            taped.finish()  # until it is there calls go through Python
        while self.left:
            case = self.left[0]
            measured = measure(case, self.contenders, self.device, self.effort, note)
            self.results.measured[case.name] = measured
            self.results.save(self.out)
            del self.left[0]
            yield measured

    @property
    def wrong(self) -> list[str]:
        """The cases and contenders of whorl whose numbers were wrong, as `lstm-1x32x30x128-fp32 whorl`."""
        own = {contender.name for contender in self.contenders if not contender.rival}
        return [
            f"{name} {contender}"
            for name, entry in self.results.measured.items()
            for contender in dict.fromkeys(key for outcomes in entry.passes.values() for key in outcomes)
            if contender in own and any(outcomes[contender].wrong for outcomes in entry.passes.values())
        ]

    def save_report(self) -> None:
        """Write the HTML file anew.

        Raises:
            InputError: the file cannot be written.
        """
        save_report(self.report, self.results)


def _new_file(which: str) -> Path:
    part = "" if which == "1/1" else f"-{which.replace('/', '-of-')}"
    names = (Path("runs", f"bench{part}{'' if number == 1 else f'-{number}'}.json") for number in count(1))
    return next(path for path in names if not path.exists())
