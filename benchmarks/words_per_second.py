"""Words per second of a language model's training, with one recurrent layer after another in the same program.

    python benchmarks/words_per_second.py [--preset ptb-large] [--vocabulary 10000,35000] [--engine persistent]
        [--figures FILE]

The program is `whorl train`'s: embedding, two LSTM layers, softmax, clipping, SGD; only the layers differ, and whether
a step's kernels are launched one by one (eager) or as one CUDA graph. torch's eager rows train under autocast, as
programs on torch.nn do; the others on a copy of the parameters in bfloat16, as `whorl train` does. The text is drawn,
word after word, as frequent as Zipf's law has it: the speed depends on the number of words alone. First each model's
gradients are compared with those of float64: the error of each may be twice that of whorl's `reference` in the same
precision, plus 4 eps. Then they train in turns. A figure is the median of the turns, host work included.
"""

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whorl.bench.baseline import error
from whorl.bench.figures import Figures
from whorl.bench.tables import NOT_AVAILABLE, Table
from whorl.text import devices
from whorl.text.group import ALONE
from whorl.text.model import LanguageModel, kernel, precision
from whorl.text.options import Options
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.training import Trainer
from whorl.text.working import Working, works

TEXT, TURNS, SECONDS, WARM_UP = 200_000, 5, 0.2, 6


class Cells(torch.nn.Module):
    """The counterpart of TensorFlow's BasicLSTMCell: a loop over time of torch.nn.LSTMCell, dropout between layers."""

    def __init__(self, inputs: int, units: int, layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [inputs] + [units] * (layers - 1)
        self.cells = torch.nn.ModuleList(torch.nn.LSTMCell(size, units) for size in sizes)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor, states: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        outputs, finals = list(x.unbind(0)), []
        for layer, cell in enumerate(self.cells):
            state = None if states is None else tuple(part[layer] for part in states)
            for step, each in enumerate(outputs):
                state = cell(each, state)
                outputs[step] = state[0]
            finals.append(state)
            if layer + 1 < len(self.cells):
                outputs = [self.dropout(output) for output in outputs]
        return torch.stack(outputs), tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def take(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of torch.nn.LSTM."""
        for layer, cell in enumerate(self.cells):
            cell.load_state_dict({name: weights[f"{name}_l{layer}"] for name, _ in cell.named_parameters()})


class Apart(torch.nn.Module):
    """torch.nn.LSTM, a module for each layer: cuDNN's dropout between layers of one cannot be captured."""

    def __init__(self, inputs: int, units: int, layers: int, dropout: float) -> None:
        super().__init__()
        sizes = [inputs] + [units] * (layers - 1)
        self.layers = torch.nn.ModuleList(torch.nn.LSTM(size, units) for size in sizes)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: Tensor, states: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        finals = []
        for index, layer in enumerate(self.layers):
            given = None if states is None else tuple(part[index : index + 1] for part in states)
            x, final = layer(self.dropout(x) if index else x, given)
            finals.append(final)
        return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))

    def take(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of torch.nn.LSTM."""
        for index, layer in enumerate(self.layers):
            names = [name.removesuffix("0") for name, _ in layer.named_parameters()]
            layer.load_state_dict({f"{name}0": weights[f"{name}{index}"] for name in names})


@dataclass(frozen=True)
class Contender:
    """A row of the table: whose layers, with which options of whorl's, launched how."""

    summary: str
    layers: str = "whorl"
    options: dict[str, Any] = field(default_factory=dict)
    eager: bool = False
    copies: bool = True


CONTENDERS = {
    "torch-cells": Contender("torch.nn.LSTMCell in a loop, eager", "cells", eager=True, copies=False),
    "torch": Contender("torch.nn.LSTM (cuDNN), eager", "torch", eager=True, copies=False),
    "torch-graphed": Contender("torch.nn.LSTM (cuDNN), in whorl's captured step", "apart"),
    "whorl-eager": Contender("whorl, eager", eager=True),
    "whorl": Contender("whorl"),
    "recurrent-dropout": Contender(
        "whorl, recurrent dropout 0.3, a mask for all gates",
        options=dict(recurrent_dropout=0.3, recurrent_dropout_mode="shared"),
    ),
    "recurrent-dropout-by-gate": Contender(
        "whorl, recurrent dropout 0.3, a mask for each gate", options=dict(recurrent_dropout=0.3)
    ),
    "layer-norm": Contender("whorl, layer norm of x, r and c", options=dict(layer_norm=True)),
    "zoneout": Contender("whorl, zoneout h 0.05, c 0.2", options=dict(zoneout=dict(h=0.05, c=0.2))),
    "peephole": Contender("whorl, peepholes", options=dict(peephole=True)),
}


def make_model(contender: Contender, options: Options, tokens: int, device: torch.device) -> LanguageModel:
    """The model with the contender's layers; all of one preset and vocabulary have the same weights."""
    torch.manual_seed(0)
    shape = replace(options.architecture, tokens=tokens)
    plain = LanguageModel(shape)
    plain.draw(options.recipe.init or 0.1)
    if contender.layers == "whorl":
        model = LanguageModel(replace(shape, options=contender.options))
        model.load_state_dict(plain.state_dict(), strict=False)
        return model.to(device)
    sizes = (shape.embedding, shape.units, shape.layers)
    weights = plain.recurrent.state_dict()
    if contender.layers == "torch":
        plain.recurrent = torch.nn.LSTM(*sizes, dropout=shape.dropout)
        plain.recurrent.load_state_dict(weights)
    else:
        plain.recurrent = (Cells if contender.layers == "cells" else Apart)(*sizes, shape.dropout)
        plain.recurrent.take(weights)
    return plain.to(device)


def gradients(model: LanguageModel, window: Tensor, name: str, copies: bool = False) -> dict[str, Tensor]:
    """The loss on a window [time + 1, batch] and the gradient of each parameter, noise drawn from the same seed."""
    working = Working(model, ALONE) if copies else None
    torch.manual_seed(1)
    if working is not None:
        return working.gradients(window[:-1], window[1:])
    with precision(name, window.device):
        loss, _ = model.loss(window[:-1], window[1:], None)
    found = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    return {"loss": loss.detach(), **dict(zip(names, found, strict=True))}


def judge(contender: Contender, options: Options, tokens: int, streams: Streams) -> str | None:
    """What is wrong with the contender's numbers; None where nothing is.

    torch's dropout draws as it likes, so the models are compared without it.
    """
    plain = replace(options, architecture=replace(options.architecture, dropout=0.0))
    inputs, targets = streams.window(0, options.recipe.time)
    window = torch.cat([inputs, targets[-1:]])
    model = make_model(contender, plain, tokens, window.device)
    reference = replace(plain, architecture=replace(plain.architecture, engine="reference"))
    ours = contender if contender.layers == "whorl" else Contender("")
    exact, rounded = (make_model(ours, reference, tokens, window.device) for _ in range(2))
    name = options.recipe.precision
    got = gradients(model, window, name, contender.copies and works(model, options.recipe))
    truth = gradients(exact.double(), window, "fp32")
    baseline = gradients(rounded, window, name)
    eps = torch.finfo(torch.bfloat16 if name == "bf16" else torch.float32).eps
    for which, true, other in zip(got, truth.values(), baseline.values(), strict=True):
        off, bound = error(got[which], true), 2 * error(other, true) + 4 * eps
        if not off <= bound:
            return f"the gradient of {which} is off by {off:.2g}, allowed are {bound:.2g}"
    return None


@dataclass(frozen=True)
class Row:
    """What was measured of a contender; `wrong`: why nothing was."""

    summary: str
    wrong: str | None
    speed: float = 0.0
    milliseconds: float = 0.0
    peak: int = 0
    engine: str = ""


class Runner:
    """A contender in training."""

    def __init__(self, contender: Contender, options: Options, tokens: int, streams: Streams) -> None:
        device = streams.window(0, 1)[0].device
        self.recipe: Recipe = replace(options.recipe, eager=contender.eager, steps=10**9, epochs=None)
        self.peak = 0
        before = 0
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        model = make_model(contender, options, tokens, device)
        self.trainer = Trainer(model, streams, self.recipe, copies=contender.copies)
        for _ in range(WARM_UP):
            self.trainer.advance()
        self.device = device
        self.wait()
        if device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated() - before
        self.engine = "torch"
        if contender.layers == "whorl":
            self.engine = kernel(model, self.recipe.time, self.recipe.batch, self.recipe.precision).plans[0].engine
        self.steps = 1
        self.steps = max(3, round(SECONDS / self.seconds()))

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self) -> float:
        """Of one step, the mean of many."""
        self.wait()
        began = time.perf_counter()
        for _ in range(self.steps):
            self.trainer.advance()
        self.wait()
        return (time.perf_counter() - began) / self.steps


def measure(options: Options, tokens: int, names: list[str], device: torch.device) -> dict[str, Row]:
    """The rows of one preset and one vocabulary."""
    draws = torch.Generator().manual_seed(2)
    chances = 1 / torch.arange(1, tokens + 1, dtype=torch.float64)
    text = torch.multinomial(chances, TEXT, replacement=True, generator=draws).int().to(device)
    streams = Streams(text, options.recipe.batch)
    words, rows, runners = options.recipe.batch * options.recipe.time, {}, {}
    for name in names:
        wrong = judge(CONTENDERS[name], options, tokens, streams)
        rows[name] = Row(CONTENDERS[name].summary, wrong)
        if wrong is None:
            runners[name] = Runner(CONTENDERS[name], options, tokens, streams)
    turns: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(TURNS):
        for name, runner in runners.items():
            turns[name].append(runner.seconds())
    for name, runner in runners.items():
        middle = statistics.median(turns[name])
        rows[name] = Row(rows[name].summary, None, words / middle, 1e3 * middle, runner.peak, runner.engine)
    return rows


def make_options(preset: str, given: dict[str, Any]) -> Options:
    """The options of a preset, whose text is drawn here."""
    return Options.of(preset, path=Path(__file__), **given)


def table(preset: str, options: Options, tokens: int, rows: dict[str, Row]) -> Table:
    """The rows as a table, each beside torch.nn.LSTM in eager mode."""
    shape, recipe = options.architecture, options.recipe
    base, lines, notes = rows.get("torch"), [], []
    for row in rows.values():
        if row.wrong is not None:
            lines.append((row.summary, *[NOT_AVAILABLE] * 5))
            notes.append(f"{row.summary}: {NOT_AVAILABLE}, {row.wrong}.")
            continue
        ratio = f"{row.speed / base.speed:.2f}" if base is not None and base.speed else NOT_AVAILABLE
        memory = f"{row.peak / 2**20:,.0f}" if row.peak else NOT_AVAILABLE
        lines.append((row.summary, f"{row.speed:,.0f}", f"{row.milliseconds:.3f}", ratio, memory, row.engine))
    return Table(
        f"{preset}: {shape.layers} x {shape.units} units, batch {recipe.batch}, {recipe.time} steps, {tokens:,} words, "
        f"{recipe.precision}",
        ("", "words per second", "ms a batch", "times torch.nn.LSTM", "peak memory, MiB", "engine"),
        tuple(lines),
        tuple(notes),
    )


def profile(preset: str, options: Options, tokens: int, name: str, device: torch.device) -> str:
    """Where a step of a contender spends the GPU's time, kernel by kernel."""
    text = torch.randint(tokens, (TEXT,), dtype=torch.int32, device=device)
    runner = Runner(CONTENDERS[name], options, tokens, Streams(text, options.recipe.batch))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(10):
            runner.trainer.advance()
        runner.wait()
    rows = sorted(found.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in rows) / 10
    lines = [f"{event.device_time_total / 10:8.1f} us {event.count / 10:6.1f} x {event.key[:110]}" for event in rows]
    return "\n".join([f"{preset}, {name}: {total:.0f} us of kernels a step", *lines[:32]])


def figures(device: torch.device, tables: list[Table]) -> Figures:
    """What was measured so far."""
    text = (
        "The language models of Zaremba et al. (2014) on a text that is drawn, trained by whorl's program: only "
        "the recurrent layers differ, and whether a step's kernels are launched one by one (eager) or as one CUDA "
        "graph; torch's eager rows train under autocast, the others on a copy of the parameters in bfloat16. "
        "Before any time is taken, the gradients of every parameter are compared with float64. Medians of "
        f"{TURNS} turns, host work included.",
    )
    return Figures.now(device, "words-per-second", "Words per second of a language model's training", text, tables)


def main() -> None:
    """Measure, print the tables, and write them where --figures says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="ptb-large", help="one or more, with commas between them")
    parser.add_argument("--vocabulary", default="10000", help="words, likewise")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=", ".join(CONTENDERS))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--units", type=int, help="other ones than the preset's")
    parser.add_argument("--engine", default="auto", help="of whorl's layers")
    parser.add_argument("--profile", action="store_true", help="print each contender's kernels instead")
    parser.add_argument("--figures", type=Path, help="a JSON file for whorl bench --suite seeds --report")
    asked = parser.parse_args()
    device = devices.find(asked.device)
    given: dict[str, Any] = dict(engine=asked.engine)
    given |= {} if asked.units is None else dict(units=asked.units, embedding=asked.units)
    names, tables = asked.contenders.split(","), []
    for preset in asked.preset.split(","):
        options = make_options(preset, given)
        for tokens in map(int, asked.vocabulary.split(",")):
            if asked.profile:
                print("\n\n".join(profile(preset, options, tokens, name, device) for name in names), flush=True)
                continue
            tables.append(table(preset, options, tokens, measure(options, tokens, names, device)))
            print(tables[-1].text() + "\n", flush=True)
            if asked.figures:
                figures(device, tables).save(asked.figures)  # at once: a later one may not fit


if __name__ == "__main__":
    main()
