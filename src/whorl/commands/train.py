"""`whorl train`: train a language model on text."""

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from whorl.commands.generate import printable
from whorl.errors import InputError
from whorl.settings import settings
from whorl.text import curves, devices
from whorl.text.evaluation import measure
from whorl.text.group import is_called
from whorl.text.model import LAYERS, PRECISIONS
from whorl.text.options import PRESETS, Options
from whorl.text.program import METRICS, Program
from whorl.text.recipe import OPTIMIZERS, SCHEDULES
from whorl.text.training import Report
from whorl.text.vocabulary import KINDS

LINE_SECONDS = 10  # between two lines where no terminal shows live progress
GRACE = 15  # seconds from a signal to the end of a process of several, however busy: torchrun kills after 30
SIGNALED = 128  # plus the signal's number: the exit status of what a signal ended
BESIDE_RESUME = {"path", "valid", "test", "device", "sample"}  # the rest stands in the run folder

# Group -> flag, the field of Options it sets, type or choices, help. What is not given is as the preset or the
# default has it, so no flag has a default of its own.
ARGUMENTS: dict[str, list[tuple[str, str, Any, str]]] = {
    "text": [
        ("--tokens", "kind", KINDS, "what the model reads and writes"),
        ("--vocabulary", "vocabulary", int, "words that are known, the most frequent ones (10000)"),
        ("--valid", "valid", Path, "a file or folder to hold out (a part of the text)"),
        ("--test", "test", Path, "a file or folder that is looked at once, at the end"),
    ],
    "model": [
        ("--cell", "cell", tuple(LAYERS), "of the recurrent layers"),
        ("--units", "units", int, "units of each layer"),
        ("--layers", "layers", int, "recurrent layers"),
        ("--embedding", "embedding", int, "width of a token's embedding"),
        ("--tied", "tied", bool, "the output's weight is the embedding's"),
        ("--dropout", "dropout", float, "on the embedding, between the layers and before the output"),
        ("--option", "options", "NAME=VALUE", "an option of the layers, such as bias=false; may be given again"),
        ("--engine", "engine", str, "the engine that is to run, and no other"),
        ("--init", "init", float, "draw every parameter from -INIT to INIT (as torch does)"),
    ],
    "training": [
        ("--batch", "batch", int, "rows of text that run side by side"),
        ("--time", "time", int, "tokens in a window: how far gradients reach back"),
        ("--accumulate", "accumulate", int, "parts that a batch is run in, to save memory"),
        ("--steps", "steps", int, "windows to train on"),
        ("--epochs", "epochs", float, "passes over the text"),
        ("--minutes", "minutes", float, "time to train for; the first of the three to end ends the training"),
        ("--optimizer", "optimizer", OPTIMIZERS, "which one"),
        ("--learning-rate", "learning_rate", float, "its peak"),
        ("--schedule", "schedule", SCHEDULES, "of the learning rate"),
        ("--warmup", "warmup", float, "share of the training in which the rate rises"),
        ("--hold", "hold", int, "epochs before the rate decays, for the schedule decay"),
        ("--decay", "decay", float, "factor of the rate in each later epoch, for the schedule decay"),
        ("--clip", "clip", float, "largest 2-norm of the gradients; 0: none"),
        ("--clip-rows", "clip_rows", bool, "the embedding's gradient counts by position in that norm"),
        ("--weight-decay", "weight_decay", float, "of the optimizer"),
        ("--precision", "precision", PRECISIONS, "of products"),
        ("--eager", "eager", bool, "launch a step's kernels one by one, not as one CUDA graph"),
        ("--seed", "seed", int, "of the first parameters, dropout and the sample"),
    ],
    "run": [
        ("--device", "device", str, "auto, cpu, cuda, cuda:1, mps"),
        ("--out", "out", Path, "run folder, new or empty (a new one under runs/)"),
        ("--valid-steps", "valid_steps", int, "steps between two looks at the held-out text"),
        (
            "--save-steps",
            "save_steps",
            int,
            "steps between two checkpoints (50; fewer, where they cost over 3 percent)",
        ),
        ("--sample", "sample", int, "tokens to write at the end"),
    ],
}
METAVARS = {int: "N", float: "X", str: "NAME", Path: "PATH"}


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Train a language model on a file or folder of text, and write text with it."
    parser = commands.add_parser("train", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        help="a file or folder of text; none: the source of Python's standard library",
    )
    parser.add_argument("--data", type=Path, metavar="PATH", help="the same")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="a set of options, those given beside it excepted")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="go on with the training of a run folder")
    defaults = _flat(Options())
    for title, rows in ARGUMENTS.items():
        group = parser.add_argument_group(title)
        for flag, name, kind, words in rows:
            value = defaults[name]
            if value not in (None, {}, False):
                words += f" ({value})"
            shape: dict[str, Any] = {"type": kind, "metavar": METAVARS.get(kind)}
            if kind is bool:
                shape = {"action": "store_true"}
            elif isinstance(kind, tuple):
                shape = {"choices": kind}
            elif isinstance(kind, str):
                shape = {"type": _option, "action": "append", "metavar": kind}
            group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=words, **shape)


def _flat(options: Options) -> dict[str, Any]:
    """Every option by the name of its field."""
    return {**vars(options), **vars(options.source), **vars(options.architecture), **vars(options.recipe)}


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON has it (0.1, true, [0.1, 0.2]) or else as a word."""
    name, sign, value = text.partition("=")
    if not name or not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    if value in ("True", "False"):
        value = value.lower()
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(arguments: argparse.Namespace) -> int:
    """Train, and print what happens and what came of it."""
    # The kernel line says what runs: a warning beside it would say it twice.
    with settings(slow="allow" if settings.slow == "warn" else settings.slow), _interruption() as signals:
        program = make_program(arguments)
        try:
            status = _train(program, signals)
        except RuntimeError as error:
            if program.group.size == 1:
                raise
            # Of this process or of one that is gone: the others hear of it as a connection that breaks.
            message = str(error).strip().split("\n")[0]
            raise InputError(
                f"process {program.group.rank} of {program.group.size} ends, after {program.trainer.step:,} steps: "
                f"{message}. Go on with: whorl train --resume {program.folder.path}"
            ) from error
        program.close()
    return status


def _train(program: Program, signals: list[int]) -> int:
    """Train; the first process of several prints for all."""
    console = Console(highlight=False, markup=False, soft_wrap=True, quiet=not program.first)
    _print_start(console, program)
    reports = program.train(lambda: bool(signals))
    (_print_live if console.is_terminal else _print_lines)(console, program, reports)
    if program.trainer.finished < 1:
        folder, step = program.folder.path, program.trainer.step
        console.print(f"stopped after {step:,} steps; the model is saved in {program.checkpoint}")
        console.print(f"go on with: whorl train --resume {folder}")
        return SIGNALED + (signals or [signal.SIGTERM])[0]  # which another process of several had
    if program.first:
        _print_end(console, program)
    return 0


def make_program(arguments: argparse.Namespace) -> Program:
    """The program that the arguments ask for.

    Raises:
        InputError, UnsupportedError: as Program does, and for options beside --resume.
    """
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "run")}
    preset, resume, data = given.pop("preset"), given.pop("resume"), given.pop("data")
    if data is not None and given["path"] is not None:
        raise InputError(f"the text is given twice, as {given['path']} and as --data {data}: give one of them.")
    given["path"] = given["path"] or data
    if given["path"] is None:
        del given["path"]
    if "options" in given:
        given["options"] = dict(given["options"])
    if resume is None:
        return Program(Options.of(preset, **given))
    surplus = sorted(given.keys() - BESIDE_RESUME) + ["preset"] * (preset is not None)
    if surplus:
        raise InputError(f"--resume takes its options from the run folder: leave {', '.join(surplus)} out.")
    return Program.resume(resume, **given)


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """The signals of Ctrl-C and SIGTERM, as they come; the second ends the process as always.

    Under torchrun they are noted to the process's end, which is near: its SIGTERM to those that a broken connection
    ends would else cut off what they have to say.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    if is_called():
        _end_after_signals()
    try:
        yield received
    finally:
        if not is_called():
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_after_signals() -> None:
    """End this process GRACE seconds after a signal, also where it waits for a process that is gone.

    A handler in Python does not run while torch waits; the number of a signal is written to a pipe all the same.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def end() -> None:
        number = os.read(read, 1)[0]
        time.sleep(GRACE)
        os._exit(SIGNALED + number)

    threading.Thread(target=end, daemon=True).start()


def _print_start(console: Console, program: Program) -> None:
    corpus, model, options = program.corpus, program.trainer.model, program.options
    kind, shape = options.source.kind, model.architecture
    where = {None: "", 0: "at the end of each "}.get(corpus.files_held_out, f"in {corpus.files_held_out} other files ")
    trained = corpus.files - (corpus.files_held_out or 0)
    files = f"{trained:,} file{'s' * (trained != 1)}"
    console.print(
        f"text        {printable(corpus.source)}: {len(corpus.train):,} {kind} in {files} to train on, "
        f"{len(corpus.held_out):,} {where}held out"
        + (f"; {corpus.skipped:,} files are no text and left out" if corpus.skipped else "")
    )
    if kind == "words":
        known, unknown = len(corpus.vocabulary), corpus.unknown
        console.print(f"vocabulary  {known:,} words; {unknown:.2%} of the held-out ones are <unk>")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"model       {shape.cell.upper()}, {shape.layers} x {shape.units} units, {parameters:,} parameters, "
        f"{options.recipe.precision} on {devices.describe(model.device)}"
    )
    if program.group.joined:
        rows = program.trainer.streams.batch
        console.print(f"processes   {program.group.size}, each with {rows} of {options.recipe.batch} rows")
    if program.trainer.captured:
        console.print("step        one CUDA graph")
    if program.trainer.step:
        console.print(f"resumed     {program.checkpoint}, after {program.trainer.step:,} steps")
    for plan in program.kernel.plans:
        reasons = "; ".join(f"not {refusal}" for refusal in plan.refusals)
        console.print(f"kernel      {plan.engine}" + (f", a loop over time in Python: {reasons}" if plan.slow else ""))


def _print_live(console: Console, program: Program, reports: Iterator[Report]) -> None:
    columns = BarColumn(bar_width=None), TextColumn("{task.description}")
    with Progress(*columns, console=console, expand=True) as progress:
        bar = progress.add_task("starting", total=1.0)
        for report in reports:
            if report.valid:
                console.print(_line(program, report))
            progress.update(bar, completed=report.finished, description=_line(program, replace(report, valid=None)))


def _print_lines(console: Console, program: Program, reports: Iterator[Report]) -> None:
    printed = 0.0
    for report in reports:
        if report.valid or report.seconds >= printed + LINE_SECONDS:
            console.print(_line(program, report))
            printed = report.seconds


def _line(program: Program, report: Report) -> str:
    unit = program.corpus.unit
    valid = f"validation {measure(report.valid.nats, unit)}  " if report.valid else ""
    speed = f"{report.speed:,.0f} {program.options.source.kind}/s"
    return (
        f"step {report.step:,}  {measure(report.nats, unit)}  {valid}{speed}  "
        f"{timedelta(seconds=round(report.left))} left  {program.kernel.plans[0].engine}"
    )


def _print_end(console: Console, program: Program) -> None:
    speed = f", {program.speed:,.0f} {program.options.source.kind}/s" if program.speed else ""
    console.print(f"time        {program.trainer.seconds:.0f} s for {program.trainer.step:,} steps{speed}")
    console.print(f"checkpoint  {program.checkpoint}")
    console.print(f"metrics     {program.folder.path / METRICS}")
    console.print(f"curve       {program.curve() or curves.MISSING}")
    outcome, corpus = program.outcome(), program.corpus
    console.print("sample")
    for line in printable(outcome.sample).split("\n"):
        console.print(f"  | {line}")
    unit, kind = corpus.unit, program.options.source.kind
    counted = " (each byte counts as one)" if kind == "bytes" and unit == "character" else ""
    console.print(
        f"validation  {measure(outcome.valid.nats, unit)}{counted}, over {outcome.valid.tokens:,} of the "
        f"{len(corpus.held_out):,} held-out {unit}s ({outcome.valid.nats:.3f} nats each)"
    )
    if outcome.test and corpus.test is not None:
        console.print(
            f"test        {measure(outcome.test.nats, unit)}{counted}, over {outcome.test.tokens:,} of "
            f"{len(corpus.test):,} {unit}s ({outcome.test.nats:.3f} nats each)"
        )
    console.print(f"kernel      {program.kernel}")
