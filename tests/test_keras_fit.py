"""benchmarks/keras_fit.py measures what it says, and the guide's tables are those of the committed results."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "keras_fit.py"
RESULTS = ROOT / "benchmarks" / "results" / "keras" / "cpu.json"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments, "--shape", "3", "2", "5", "4", "--sizes", "2", "--rounds", "1"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_checks_and_measures(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    out = tmp_path / "results.json"
    for case in ("masked", "Bidirectional, masked;GRU reset_after=False", "masked"):  # the last takes the first's place
        done = run("--cases", case, "--out", str(out))
        assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    found = [(row["case"], row["do"]) for row in data["results"]]
    cases = ("Bidirectional, masked", "GRU reset_after=False", "masked")
    assert found == [(case, do) for case in cases for do in ("fit", "evaluate", "predict")]
    assert all(set(row["seconds"]) == {"whorl, torch", "Keras, torch"} for row in data["results"])
    assert "masked" in runpy.run_path(str(PROGRAM))["tables"](out)


def test_what_differs_is_not_timed() -> None:
    names = runpy.run_path(str(PROGRAM))

    class Contender:
        backend = "torch"

        def __init__(self, name: str, predicted: float, loss: float) -> None:
            self.name, self.answers = name, {"build": [predicted], "loss": loss}

        def ask(self, do: str, **more: object) -> object:
            return self.answers[do]

    same, other, worse = Contender("one", 1.0, 2.0), Contender("two", 1.1, 2.0), Contender("three", 1.0, 2.1)
    names["check"]([same, same], "plain", 2)
    for wrong in (other, worse):
        with pytest.raises(SystemExit, match=f"plain: {wrong.name} "):
            names["check"]([same, wrong], "plain", 2)


def test_the_guide_has_the_results() -> None:
    guide = (ROOT / "docs" / "from_cudnnlstm.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(PROGRAM))["tables"](RESULTS) in guide
