"""`whorl train`: train a language model on text."""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from whorl.text.model import PRECISIONS
from whorl.text.program import Options, Program
from whorl.text.training import Recipe, Report
from whorl.text.vocabulary import KINDS

LINE_SECONDS = 10  # between two lines where no terminal shows live progress
INTERRUPTED = 128 + signal.SIGINT
TAB, UNPRINTABLE = "\t", "\ufffd"
OPTIONS, RECIPE = Options(), Recipe()


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Train a byte or character language model on a file or folder of text, and write text with it."
    parser = commands.add_parser("train", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument(
        "path", nargs="?", type=Path, help="a file or folder of text; none: the source of Python's standard library"
    )
    parser.add_argument(
        "--tokens", choices=KINDS, default=OPTIONS.kind, help="what the model reads and writes (%(default)s)"
    )
    parser.add_argument("--units", type=int, default=OPTIONS.units, help="units of each LSTM layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=OPTIONS.layers, help="LSTM layers (%(default)s)")
    parser.add_argument(
        "--embedding", type=int, default=OPTIONS.embedding, help="width of a token's embedding (%(default)s)"
    )
    parser.add_argument(
        "--batch", type=int, default=RECIPE.batch, help="rows of text that run side by side (%(default)s)"
    )
    parser.add_argument("--time", type=int, default=RECIPE.time, help="tokens in a window (%(default)s)")
    parser.add_argument(
        "--steps", type=int, help=f"windows to train on ({RECIPE.steps}, or as many as --minutes allow)"
    )
    parser.add_argument(
        "--minutes", type=float, help="time to train for; with --steps, the first to end ends the training"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=RECIPE.learning_rate, help="its peak, for AdamW (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=RECIPE.seed, help="of the first parameters and the sample (%(default)s)"
    )
    parser.add_argument("--device", default=OPTIONS.device, help="auto, cpu, cuda, cuda:1, mps (%(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default=RECIPE.precision, help="of products (%(default)s)")
    parser.add_argument("--out", type=Path, help="run folder, new or empty (a new one under runs/)")
    parser.add_argument("--sample", type=int, default=OPTIONS.sample, help="tokens to write at the end (%(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Train, and print what happens and what came of it."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    program = Program(_options(arguments))
    with _interruption() as signals:
        _print_start(console, program)
        reports = program.train(lambda: bool(signals))
        (_print_live if console.is_terminal else _print_lines)(console, program, reports)
    if signals:
        console.print(f"stopped after {program.trainer.step:,} steps; the model is saved in {program.checkpoint}")
        return INTERRUPTED
    _print_end(console, program)
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    steps = arguments.steps if arguments.steps is not None or arguments.minutes is not None else RECIPE.steps
    recipe = Recipe(
        batch=arguments.batch,
        time=arguments.time,
        steps=steps,
        minutes=arguments.minutes,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        precision=arguments.precision,
    )
    return Options(
        path=arguments.path,
        kind=arguments.tokens,
        embedding=arguments.embedding,
        units=arguments.units,
        layers=arguments.layers,
        recipe=recipe,
        device=arguments.device,
        out=arguments.out,
        sample=arguments.sample,
    )


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """A list that is no longer empty after Ctrl-C; the second Ctrl-C ends the process as always."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)


def _print_start(console: Console, program: Program) -> None:
    corpus, model, kind = program.corpus, program.trainer.model, program.options.kind
    held_out = f"in {corpus.files_held_out} other files" if corpus.files_held_out else "at the end of each"
    trained = corpus.files - corpus.files_held_out
    console.print(
        f"text        {corpus.source}: {len(corpus.train):,} {kind} in {trained:,} file{'s' * (trained != 1)} "
        f"to train on, {len(corpus.held_out):,} {held_out} held out"
        + (f"; {corpus.skipped:,} files are no text and left out" if corpus.skipped else "")
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"model       LSTM, {model.shape.layers} x {model.shape.units} units, {parameters:,} parameters, "
        f"{program.options.recipe.precision} on {_device(model.device)}"
    )
    console.print(f"kernel      {program.kernel.plans[0].engine}")


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device} with {torch.get_num_threads()} threads"


def _print_live(console: Console, program: Program, reports: Iterator[Report]) -> None:
    columns = BarColumn(bar_width=None), TextColumn("{task.description}")
    with Progress(*columns, console=console, expand=True) as progress:
        bar = progress.add_task("starting", total=1.0)
        for report in reports:
            progress.update(bar, completed=report.finished, description=_line(program, report))


def _print_lines(console: Console, program: Program, reports: Iterator[Report]) -> None:
    printed = 0.0
    for report in reports:
        if report.seconds >= printed + LINE_SECONDS or report.finished >= 1:
            console.print(_line(program, report))
            printed = report.seconds


def _line(program: Program, report: Report) -> str:
    unit = program.corpus.unit
    return (
        f"step {report.step:,}  {report.bits:.3f} bits per {unit}  {report.speed:,.0f} {program.options.kind}/s  "
        f"{timedelta(seconds=round(report.left))} left  {program.kernel.plans[0].engine}"
    )


def _print_end(console: Console, program: Program) -> None:
    console.print(f"time        {program.trainer.seconds:.0f} s for {program.trainer.step:,} steps")
    console.print(f"checkpoint  {program.checkpoint}")
    outcome, corpus = program.outcome(), program.corpus
    console.print("sample")
    for line in outcome.sample.split("\n"):
        console.print(f"  | {''.join(c if c.isprintable() or c == TAB else UNPRINTABLE for c in line)}")
    counted = " (each byte counts as one)" if program.options.kind == "bytes" and corpus.unit == "character" else ""
    console.print(
        f"validation  {outcome.score.bits:.3f} bits per {corpus.unit}{counted}, over {outcome.score.tokens:,} of the "
        f"{len(corpus.held_out):,} held-out {corpus.unit}s"
    )
    console.print(f"kernel      {program.kernel}")
