"""The programs of examples/ do what they say, at a small size."""

import lzma
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import whorl
from whorl.bench.figures import Figures

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Figures:
    """What a program of examples/ gives for these words; its figures are also in the file that it writes."""
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", [name, *words.split(), "--device", "cpu", "--figures", str(file)])
    figures = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert Figures.load(file) == figures
    return figures


def test_the_keras_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras was imported with another backend")
    monkeypatch.setattr(sys, "argv", ["example", "--sentences", "1500", "--epochs", "5"])
    program = runpy.run_path(str(EXAMPLES / "keras_text_classification.py"))
    assert program["main"]() > 0.9
    assert "both directions" in capsys.readouterr().out


@pytest.mark.parametrize("options", ["", "--layers 2 --bidirectional --recurrent-dropout 0.1 --layer-norm"])
def test_the_template_learns(options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"template --steps 12 --units 32 --updates 300 {options}"
    monkeypatch.setattr(sys, "argv", words.split())
    assert runpy.run_path(str(EXAMPLES / "lstm_template.py"))["main"]() > 0.8
    assert "update 300: loss" in capsys.readouterr().out


def test_the_streaming_example_finds_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "120", "--samples", "300"])
    program = runpy.run_path(str(EXAMPLES / "streaming.py"))
    found = program["main"]()
    assert 150 in found
    assert all(150 <= sample < 160 for sample in found)


def test_the_recurrent_agent_learns_to_balance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    small = "--steps 25000 --environments 16 --time 64 --units 32"
    figures = run("recurrent_ppo", small, monkeypatch, tmp_path)
    assert figures.numbers["whorl, one call, reward"] > 80  # 10 to 25 without learning


def test_the_agent_beside_a_loop_over_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The program itself compares gradients with the loop's in float64, on a rollout in which episodes end."""
    pytest.importorskip("gymnasium")
    small = "--steps 1600 --environments 4 --time 50 --units 8 --parts 2 --compare"
    figures = run("recurrent_ppo", small, monkeypatch, tmp_path)
    assert [row[0] for row in figures.tables[0].rows] == ["whorl, one call", "torch.nn, a call a step"]
    assert "Gradients of one rollout" in figures.tables[0].notes[0]
    assert set(figures.plots[0].lines) == {"whorl, one call", "torch.nn, a call a step"}


def test_gradients_of_another_agent_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    program = runpy.run_path(str(EXAMPLES / "recurrent_ppo.py"))
    monkeypatch.setitem(program["Agent"].forward.__globals__, "whorl", Careless)
    figures = "--steps 400 --environments 4 --time 50 --units 8 --parts 2 --compare --device cpu"
    monkeypatch.setattr(sys, "argv", ["recurrent_ppo", *figures.split()])
    with pytest.raises(AssertionError, match="the gradients differ by"):
        program["main"]()


class Careless:
    """whorl, but for resets, which it does not see."""

    explain = staticmethod(whorl.explain)

    class LSTM(whorl.LSTM):
        def forward(self, x, hx=None, reset=None):
            return super().forward(x, hx)


def test_forecasts_of_two_of_a_kind_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("statsmodels")
    figures = run("forecast", "--epochs 2 --units 8 --batch 256", monkeypatch, tmp_path)
    errors = {row[0]: float(row[1]) for row in figures.tables[0].rows}
    gru, packed, normed, loop, _, constant = errors.values()
    assert gru == pytest.approx(packed, rel=1e-2)
    assert normed == pytest.approx(loop, rel=1e-2)
    assert max(gru, normed) < 1.2 * constant
    assert [row[3] != "" for row in figures.tables[0].rows] == [True, False, True, False, False, False]


def test_histories_end_where_the_series_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("statsmodels")
    histories = runpy.run_path(str(EXAMPLES / "forecast.py"))["histories"]
    values = np.cumsum(np.arange(300.0))
    values[150] = np.nan
    dates = np.datetime64("1989-01-01") + 7 * np.arange(300)
    x, lengths, target, late = histories(values, dates, seed=0)
    nows = target / 13 - 7  # of now, now + 1, ...: the change over 13 weeks is 13 now + 91
    assert lengths.min() >= 4
    assert (nows - lengths).min() >= 0
    assert not ((nows - lengths <= 150) & (nows >= 150)).any()  # no history crosses the gap
    for row, length, now in zip(x[..., 0], lengths, nows, strict=True):
        assert row[:length].tolist() == list(range(int(now - length) + 1, int(now) + 1))
        assert not row[length:].any()
    assert late.tolist() == [bool(dates[int(now)] >= np.datetime64("1990-01-01")) for now in nows]


def reviews(path: Path, count: int = 1200, length: int = 20) -> None:
    """Made-up reviews, padded on the left: kind where more of words 3 to 6 than of 7 to 10 are in them."""
    random = np.random.default_rng(0)
    words = random.integers(3, 40, (2 * count, length))
    for row, start in zip(words, random.integers(0, length - 4, 2 * count), strict=True):
        row[-4:] = random.integers(3, 7, 4) + 4 * (random.random(4) < random.choice([0.0, 1.0]))
        row[:start] = 0
    kind = ((words >= 3) & (words < 7)).sum(1) > ((words >= 7) & (words < 11)).sum(1)
    x = words.astype(np.uint16)
    np.savez(path, x_train=x[:count], x_test=x[count:], y_train=kind[:count], y_test=kind[count:])


def test_reviews_are_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reviews(tmp_path / "reviews.npz")
    packed = tmp_path / "reviews.npz.xz"
    packed.write_bytes(lzma.compress((tmp_path / "reviews.npz").read_bytes()))
    figures = run("imdb", f"{packed} --length 16 --epochs 4 --batch 16 --compare", monkeypatch, tmp_path)
    assert figures.numbers["best accuracy"] > 0.9
    assert "lstm" in figures.details["whorl.explain"]
    assert len(figures.tables[1].rows) == 3
    assert "differ by" in figures.tables[1].notes[0]
