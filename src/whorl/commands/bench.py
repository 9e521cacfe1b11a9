"""`whorl bench`: whorl beside its rivals, checked and then timed."""

import argparse
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from whorl.bench.collection import SEEDS, gather, save_collection, save_markdown
from whorl.bench.contenders import RIVALS, USUAL_RIVALS
from whorl.bench.page import save_page
from whorl.bench.program import Options, Program
from whorl.bench.report import save_report
from whorl.bench.results import Results, merge
from whorl.bench.suite import TITLE, SuiteOptions
from whorl.bench.suite import run as run_suite
from whorl.bench.tables import described, times
from whorl.engines import ENGINES
from whorl.errors import InputError

WRONG = 1  # the exit status where numbers of whorl's were wrong


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Check whorl's layers and their rivals against float64, then time them side by side."
    parser = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run, action="measure")

    def option(name: str, **about: object) -> None:
        parser.add_argument(name, default=argparse.SUPPRESS, **about)  # type: ignore[arg-type]  # what is given is seen

    option("--suite", choices=("grid", "seeds"), help="the grid of layers, or the programs over the batch size (grid)")
    option(
        "--report", action="store_true", help="of the suite seeds: no measuring, one page of all figures in --results"
    )
    option("--results", type=Path, help=f"the folder of figures that --report shows ({SEEDS})")
    option("--programs", type=_words, metavar="LIST", help="of the suite seeds (all)")
    option("--batches", type=_numbers, metavar="LIST", help="of the suite seeds (1,2,4,...,4096)")
    option("--precisions", type=_words, metavar="LIST", help="of the suite seeds on a GPU: fp32, tf32, bf16 (bf16)")
    option("--quick", action="store_true", help="a few small cases, about a minute on two CPU cores")
    option("--cases", type=_words, metavar="LIST", help="as lstm,gru-*x512-bf16 or lstm-1x32x30x128-fp32 (all)")
    option("--engine", type=_words, metavar="LIST", help=f"of whorl: auto, {', '.join(ENGINES)} (auto)")
    rivals = f"{', '.join(RIVALS)} or none ({','.join(USUAL_RIVALS)})"
    option("--rivals", type=_words, metavar="LIST", help=rivals)
    option("--device", help="auto, cpu, cuda, cuda:1 (auto)")
    option("--seconds", type=float, help="of calls for each contender and pass, beside checks (0.05; quick 0.03)")
    option("--shard", metavar="i/n", help="measure part i of n; `merge` puts the parts together")
    option("--out", type=Path, help="the JSON file; one that this command began goes on (a new one under runs/)")
    actions = parser.add_subparsers(metavar="merge | show | page")
    _add_action(actions, "merge", "put the results of shards into one file")
    _add_action(actions, "show", "print the tables of a results file, and write its report anew")
    page = _add_action(actions, "page", "write results files as a page of Markdown")
    page.add_argument("--notes", type=Path, help="Markdown to put at the end")


def _add_action(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(action=name)
    parser.add_argument("files", nargs="+", type=Path)
    if name != "show":
        parser.add_argument("--out", dest="into", type=Path, required=True, help="the file to write")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked; 1 where whorl's own numbers were wrong."""
    given = vars(arguments)
    names = {"quick": "quick", "cases": "patterns", "engine": "engines", "rivals": "rivals", "device": "device"}
    names |= {"seconds": "seconds", "shard": "shard", "out": "out"}
    chosen = {field: given[name] for name, field in names.items() if name in given}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if given.get("suite", "grid") == "seeds":
        return _run_seeds(console, given)
    _refuse(given, ("report", "results", "programs", "batches", "precisions"), "without --suite seeds")
    if arguments.action == "measure":
        if chosen.get("rivals") == ("none",):
            chosen["rivals"] = ()
        return _measure(console, Program(Options(**chosen)))
    _refuse(given, names, f"before {arguments.action}")
    _combine(console, arguments)
    return 0


def _refuse(given: Mapping[str, object], names: Iterable[str], where: str) -> None:
    for name in names:
        if name in given:
            raise InputError(f"--{name} {where} has no effect: leave it out.")


def _run_seeds(console: Console, given: Mapping[str, Any]) -> int:
    if given["action"] != "measure":
        raise InputError(f"--suite before {given['action']} has no effect: leave it out.")
    _refuse(given, ("quick", "cases", "engine", "rivals", "shard"), "with --suite seeds")
    if "report" in given:
        _refuse(given, ("programs", "batches", "precisions", "device", "seconds"), "with --report")
        out = given.get("out", Path("runs/seeds.html"))
        save = save_markdown if out.suffix == ".md" else save_collection
        save(out, TITLE, gather(given.get("results", SEEDS)))
        console.print(f"report      {out}")
        return 0
    _refuse(given, ("results",), "without --report")
    taken = ("programs", "batches", "device", "precisions", "seconds", "out")
    options = SuiteOptions(**{name: given[name] for name in taken if name in given})
    for figures in run_suite(options, lambda text: console.print(text)):
        for table in figures.tables:
            console.print(f"\n{table.text()}")
    console.print(f"\nreport      {options.out / 'report.html'}")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: write whole numbers with commas between them") from error


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def _measure(console: Console, program: Program) -> int:
    measured = program.results.measured
    console.print(f"results     {program.out}")
    console.print(f"cases       {len(program.cases)}, of which {len(program.cases) - len(program.left)} are measured")
    columns = BarColumn(bar_width=None), TextColumn("{task.description}"), TimeRemainingColumn()
    began = time.perf_counter()
    try:
        with Progress(*columns, console=console, expand=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=sum(case.cost for case in program.left))
            for done in program.run(lambda text: progress.update(bar, description=text)):
                progress.advance(bar, done.case.cost)
                if not console.is_terminal:
                    seconds = time.perf_counter() - began
                    count = len(program.cases) - len(program.left)
                    console.print(f"{seconds:5.0f} s     {done.case.name}, {count} of {len(program.cases)}")
    except KeyboardInterrupt:
        program.save_report()
        console.print(f"the same command with --out {program.out} goes on after the {len(measured)} cases measured")
        raise
    program.save_report()
    _show(console, program.results, program.report)
    for wrong in program.wrong:
        console.print(f"wrong       numbers of {wrong}")
    return WRONG if program.wrong else 0


def _show(console: Console, results: Results, report: Path) -> None:
    console.print("\n".join(["", *(f"{name:15} {text}" for name, text in described(results).items())]))
    for table in times(results):
        console.print(f"\n{table.text()}")
    console.print(f"\nreport      {report}")


def _combine(console: Console, arguments: argparse.Namespace) -> None:
    if arguments.action == "page":
        save_page(arguments.files, arguments.notes, arguments.into)
    elif arguments.action == "merge":
        results = merge(arguments.files)
        if arguments.into.exists():
            raise InputError(f"{arguments.into} is already there: give --out a new name, so that nothing is lost.")
        results.save(arguments.into)
    else:
        for path in arguments.files:
            results, report = Results.load(path), path.with_suffix(".html")
            save_report(report, results)
            _show(console, results, report)
