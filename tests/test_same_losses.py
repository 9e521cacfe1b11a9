"""The program that compares the losses of a training with those of engine `reference`."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from whorl.bench.figures import Figures
from whorl.text import model
from whorl.text.options import PRESETS

PATH = Path(__file__).parents[1] / "benchmarks" / "same_losses.py"
STEPS = 12


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for preset in ("ptb-small", "ptb-medium"):
        small = dict(units=9, embedding=9, batch=4, time=6, learning_rate=2.0)
        monkeypatch.setitem(PRESETS, preset, PRESETS[preset] | small)
    for name in ("train", "valid", "test"):
        (tmp_path / f"ptb.{name}.txt").write_text(" ".join(f"w{at % 7}" for at in range(600)))
    words = ["same", "--data", str(tmp_path), "--steps", str(STEPS), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    return words


def test_every_loss_is_that_of_reference(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments += ["--figures", str(file)]
    assert runpy.run_path(str(PATH))["main"]() == 0
    found = Figures.load(file)
    (table,), (plot,) = found.tables, found.plots
    assert [row[0] for row in table.rows] == ["ptb-small", "ptb-medium"]
    for row in table.rows:
        assert row[2] == str(STEPS)
        assert float(row[4]) <= float(row[6])
    assert len(plot.lines) == 4
    assert all(len(line) == STEPS for line in plot.lines.values())
    losses = [loss for _, loss in next(iter(plot.lines.values()))]
    assert losses[-1] < losses[0]  # it has trained


def test_a_loss_that_is_wrong_is_seen(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = model.LanguageModel.loss

    def wrong(self: Any, *given: Any) -> Any:
        loss, states = right(self, *given)
        return loss * (1.0 if self.architecture.engine == "reference" else 1.04), states

    monkeypatch.setattr(model.LanguageModel, "loss", wrong)
    monkeypatch.setattr("whorl.text.training.works", lambda *_: False)  # the loss of a step on a copy is another's
    assert runpy.run_path(str(PATH))["main"]() == 1
