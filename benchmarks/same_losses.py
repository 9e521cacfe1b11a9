"""The losses of a language model's training, each beside that of engine `reference` from the same parameters.

    python benchmarks/same_losses.py --data FOLDER [--preset ptb-small,ptb-medium] [--steps 200] [--figures FILE]

A model of a preset is trained on its text for a part of an epoch, as `whorl train` does but without dropout, which
draws as it likes. Before each step the loss of its window is computed from the same parameters and states with
`reference`, in the same precision and in float64. A loss may be off by twice as much as that of `reference` is, the
most of all steps, plus 4 eps. Only what one step adds is seen: two trainings that round otherwise soon are two
trainings.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from whorl.bench.figures import Figures, Plot
from whorl.bench.tables import Table
from whorl.text import devices
from whorl.text.data import read
from whorl.text.model import LanguageModel, States, kernel, precision
from whorl.text.options import Options
from whorl.text.streams import Streams
from whorl.text.training import Trainer

COLUMNS = ("preset", "engine", "steps", "last loss, nats", "off by", "reference is off by", "allowed")
Losses = tuple[float, float, float]
"""Of one step: the training's, that of `reference` in the same precision and in float64."""


def losses(options: Options, steps: int, device: torch.device) -> tuple[str, list[Losses]]:
    """The engine that ran, and what each step gave."""
    corpus, recipe = read(options.source), options.recipe
    torch.manual_seed(recipe.seed)
    shape = replace(options.architecture, tokens=len(corpus.vocabulary), dropout=0.0)
    model = LanguageModel(shape)
    model.draw(recipe.init or 0.1)
    others = [LanguageModel(replace(shape, engine="reference")).to(device) for _ in range(2)]
    trainer = Trainer(model.to(device), Streams(corpus.train.to(device), recipe.batch), recipe)
    found = []
    for _ in range(min(steps, trainer.per_epoch)):
        inputs, targets = trainer.streams.window(trainer.column, recipe.time)
        expected = [
            loss_of(other, model, inputs, targets, trainer.states[0], name)
            for other, name in zip(others, (recipe.precision, None), strict=True)
        ]
        found.append((trainer.advance().item(), *expected))
    engine = kernel(model, recipe.time, recipe.batch, recipe.precision).plans[0].engine
    return engine, found


def loss_of(
    other: LanguageModel, model: LanguageModel, inputs: Tensor, targets: Tensor, states: States | None, name: str | None
) -> float:
    """The loss of a window from the parameters of `model` in the precision `name`; None: float64."""
    dtype = torch.float64 if name is None else torch.float32
    other.to(dtype).load_state_dict(model.state_dict())
    given = None if states is None else tuple(state[..., : other.architecture.units].to(dtype) for state in states)
    with torch.no_grad(), precision(name or "fp32", inputs.device):
        return other.loss(inputs, targets, given)[0].item()


def judged(preset: str, engine: str, found: Sequence[Losses], name: str) -> tuple[tuple[str, ...], bool]:
    """A row of the table, and whether every loss is as good as allowed; differences are relative."""
    eps = torch.finfo(torch.bfloat16 if name == "bf16" else torch.float32).eps
    off = max(abs(ours - exact) / exact for ours, _, exact in found)
    its = max(abs(other - exact) / exact for _, other, exact in found)
    allowed = 2 * its + 4 * eps
    row = (preset, engine, str(len(found)), f"{found[-1][0]:.4f}", f"{off:.1e}", f"{its:.1e}", f"{allowed:.1e}")
    return row, off <= allowed


def main() -> int:
    """Train, print the table, and write it where --figures says; 1 where a loss is off by more than is allowed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the Penn Treebank's text")
    parser.add_argument("--preset", default="ptb-small,ptb-medium", help="one or more, with commas between them")
    parser.add_argument("--steps", type=int, default=200, help="fewer where an epoch has fewer")
    parser.add_argument("--engine", default="auto", help="of the training")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--figures", type=Path, help="a JSON file for whorl bench --suite seeds --report")
    asked = parser.parse_args()
    device, rows, lines, right = devices.find(asked.device), [], {}, True
    for preset in asked.preset.split(","):
        options = Options.of(preset, path=asked.data, engine=asked.engine)
        engine, found = losses(options, asked.steps, device)
        row, good = judged(preset, engine, found, options.recipe.precision)
        rows.append(row)
        right = right and good
        for place, which in enumerate((engine, "reference")):
            lines[f"{preset}, {which}"] = tuple((step + 1.0, each[place]) for step, each in enumerate(found))
        print(", ".join(f"{title}: {cell}" for title, cell in zip(COLUMNS, row, strict=True)), flush=True)
    note = "Off by: the largest relative difference from float64. Allowed: twice that of reference, plus 4 eps."
    table = Table("Losses of the first steps", COLUMNS, tuple(rows), (note,))
    if asked.figures:
        text = (
            "The first steps of whorl train on the Penn Treebank, in bfloat16 and without dropout. Before each step "
            "the loss of its window is computed from the same parameters and states with engine reference, in the same "
            "precision and in float64.",
        )
        plot = Plot("Losses of the first steps", "step", "nats", lines)
        Figures.now(device, "same-losses", "The same losses as engine reference", text, [table], [plot]).save(
            asked.figures
        )
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
