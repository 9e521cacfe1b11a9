"""benchmarks/keras_fit.py measures what it says, and the guide's tables are those of the committed results."""

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "keras_fit.py"
RESULTS = ROOT / "benchmarks" / "results" / "keras"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments, "--shape", "3", "2", "5", "4", "--sizes", "2", "--rounds", "1"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_it_checks_and_measures(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    out = tmp_path / "results.json"
    for case in ("masked", "Bidirectional, masked;GRU reset_after=False;masked"):  # the last takes the first's place
        done = run("--cases", case, "--out", str(out))
        assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    found = [(row["case"], row["do"]) for row in data["results"]]
    cases = ("masked", "Bidirectional, masked", "GRU reset_after=False")
    assert found == [(case, do) for case in cases for do in ("fit", "evaluate", "predict")]
    names = {"whorl, torch", "Keras, torch", "without the layer, torch"}
    assert all(set(row["seconds"]) == names for row in data["results"])
    for row in data["results"]:
        row["seconds"] = {"whorl, torch": 0.002, "Keras, torch": 0.03, "without the layer, torch": 0.001}
    out.write_text(json.dumps(data))
    made = runpy.run_path(str(PROGRAM))["tables"](out)
    assert "| whorl, torch | Keras, torch, times | without the layer, torch, at most |" in made
    assert "| masked | 2 | 1.0 | 15.0, 15.0 | 0.5, 30.0 |" in made


def test_slow_contenders_have_fewer_batches(tmp_path: Path) -> None:
    """A row says how many, and the tables give the time of a batch."""
    names, asked = runpy.run_path(str(PROGRAM)), []

    class Contender:
        backend = "torch"

        def __init__(self, side: str, each: float) -> None:
            self.side, self.name, self.each = side, f"{names['SIDES'][side]}, torch", each
            self.shape = names["Shape"](batches=32)

        def ask(self, do: str, case: str, units: int, batches: int = 0) -> object:
            assert units == 8
            if do == "engines":
                return ""
            asked.append((self.side, case, batches))
            return self.each * batches

    keys = [names["Key"](case, 8) for case in ("plain", "relu")]
    rounds = names["measure"]([Contender("whorl", 0.01), Contender("keras", 0.25)], keys, 2, 1.0)
    rows = [next(rounds), next(rounds)][-1]
    assert [(row["case"], row["units"], row["do"]) for row in rows] == [("plain", 8, "fit"), ("relu", 8, "fit")]
    assert [row["seconds"] for row in rows] == [{"whorl, torch": 0.32, "Keras, torch": 1.0}] * 2
    assert [row["batches"] for row in rows] == [{"Keras, torch": 4}] * 2
    assert [row["rounds"] for row in rows] == [2, 2]
    for case in ("plain", "relu"):
        assert [batches for side, name, batches in asked if (side, name) == ("whorl", case)] == [4, 4, 32, 32, 32]
        assert [batches for side, name, batches in asked if (side, name) == ("keras", case)] == [4, 4, 4, 4, 4]
    turns = [(side, case) for side, case, _ in asked[-8:]]  # case after case in each round, sides in the other order
    assert turns == [(side, case) for order in (("whorl", "keras"), ("keras", "whorl"))
                     for case in ("plain", "relu") for side in order]  # fmt: skip
    row = rows[0]
    out = tmp_path / "results.json"
    names["write"](out, {name: {} for name in row["seconds"]}, [row], names["Shape"](batches=32))
    assert "| plain | 8 | 10.0 | 250.0, 25.0 |" in names["tables"](out)


def test_what_differs_is_not_timed() -> None:
    names = runpy.run_path(str(PROGRAM))

    class Contender:
        backend, side = "torch", "keras"

        def __init__(self, name: str, predicted: float, loss: float) -> None:
            self.name, self.answers, self.asked = name, {"build": [predicted], "loss": loss}, set()

        def ask(self, do: str, **more: object) -> object:
            self.asked.add(do)
            return self.answers[do]

    nothing = Contender("four", 9.0, 9.0)
    nothing.side = "nothing"
    same, other, worse = Contender("one", 1.0, 2.0), Contender("two", 1.1, 2.0), Contender("three", 1.0, 2.1)
    key = names["Key"]("plain", 2)
    names["check"]([same, nothing, same], key)
    assert nothing.asked == {"build", "loss"}
    for wrong in (other, worse):
        with pytest.raises(SystemExit, match=f"plain: {wrong.name} "):
            names["check"]([same, wrong], key)


def test_what_differs_ends_the_program_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    names = runpy.run_path(str(PROGRAM))
    main, measured = names["main"].__globals__, []

    @contextmanager
    def started(pythons: dict[str, str], shape: object) -> Iterator[list[object]]:
        assert pythons == {"jax": "python"}
        yield []

    def check(contenders: object, key: tuple[str, int]) -> None:
        if key[0] == "plain":
            raise main["Differs"]("plain: not the same")

    def measure(contenders: object, keys: list[tuple[str, int]], rounds: int, most: object) -> list[object]:
        measured.extend(keys)
        return []

    monkeypatch.setitem(main, "started", started)
    monkeypatch.setitem(main, "check", check)
    monkeypatch.setitem(main, "measure", measure)
    arguments = ["keras_fit.py", "--torch", "none", "--jax", "python", "--cases", "plain;relu", "--sizes", "2"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="plain: not the same"):
        names["main"]()
    assert measured == [("relu", 2)]


@pytest.mark.parametrize("results", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_the_guide_has_the_results(results: Path) -> None:
    guide = (ROOT / "docs" / "from_cudnnlstm.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(PROGRAM))["tables"](results) in guide


def test_without_the_layer_weights_and_shapes_are_those_of_the_layer() -> None:
    keras = pytest.importorskip("keras")
    names = runpy.run_path(str(PROGRAM))
    shape = names["Shape"](batch=3, batches=1, steps=5, features=4)
    for case in names["CASES"]:
        ours, stock = [
            names["build"](case, 6, source, shape) for source in (names["without_the_layer"](), keras.layers)
        ]
        x, target = names["data"](case, shape)
        before = [value.copy() for value in ours.get_weights()]
        assert ours.layers[-2](x).shape == stock.layers[-2](x).shape
        assert [value.shape for value in before] == [value.shape for value in stock.get_weights()]
        ours.fit(x, target, batch_size=3, verbose=0)
        assert all((old != new).any() for old, new in zip(before, ours.get_weights(), strict=True)), case
