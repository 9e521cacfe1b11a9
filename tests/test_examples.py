"""The programs of examples/ do what they say, at a small size."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_keras_example_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras was imported with another backend")
    monkeypatch.setattr(sys, "argv", ["example", "--sentences", "1500", "--epochs", "5"])
    program = runpy.run_path(str(EXAMPLES / "keras_text_classification.py"))
    assert program["main"]() > 0.9
    assert "both directions" in capsys.readouterr().out


def test_the_streaming_example_finds_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example", "--steps", "120", "--samples", "300"])
    program = runpy.run_path(str(EXAMPLES / "streaming.py"))
    found = program["main"]()
    assert 150 in found
    assert all(150 <= sample < 160 for sample in found)
