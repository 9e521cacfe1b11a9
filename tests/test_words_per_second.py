"""The program that counts words per second: it measures what it says, and no contender whose numbers are wrong."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from whorl.bench.figures import Figures
from whorl.text.streams import Streams

PATH = Path(__file__).parents[1] / "benchmarks" / "words_per_second.py"
needs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16 for torch's LSTM"
)
SMALL = "--preset ptb-small --units 6 --vocabulary 20,30 --device cpu --contenders".split()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("words_per_second", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "words_per_second", module)  # where its dataclasses look for their own names
    spec.loader.exec_module(module)
    for name, value in {"TEXT": 2000, "TURNS": 2, "SECONDS": 1e-3, "WARM_UP": 1}.items():
        monkeypatch.setattr(module, name, value)
    return module


@needs_bfloat16
def test_it_writes_what_it_measured(program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["words", *SMALL, "torch-cells,torch,torch-graphed,whorl", "--figures", str(file)])
    program.main()
    found = Figures.load(file)
    assert len(found.tables) == 2
    for table, words in zip(found.tables, (20, 30), strict=True):
        assert f"2 x 6 units, batch 20, 20 steps, {words} words, bf16" in table.title
        assert [row[0] for row in table.rows][-1] == "whorl"
        for row in table.rows:
            speed, milliseconds = float(row[1].replace(",", "")), float(row[2])
            assert speed == pytest.approx(400 / milliseconds * 1e3, rel=0.01)
            assert row[4] == "n/a"  # of a GPU
        assert table.rows[1][3] == "1.00"


@pytest.mark.parametrize(
    "name",
    [
        "torch-cells",
        pytest.param("torch", marks=needs_bfloat16),
        "torch-graphed",
        "whorl",
        "recurrent-dropout",
        "recurrent-dropout-by-gate",
        "layer-norm",
    ],
)
def test_wrong_numbers_are_found(program: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = program.make_options("ptb-small", dict(units=6, embedding=6))
    streams = Streams(torch.arange(2000) % 20, 20)
    contender, make = program.CONTENDERS[name], program.make_model
    assert program.judge(contender, options, 20, streams) is None

    def wrong(which: object, *given: object) -> torch.nn.Module:
        model = make(which, *given)
        if which is contender and given[0].architecture.engine == "auto":
            with torch.no_grad():
                next(model.recurrent.parameters()).mul_(-1)
        return model

    monkeypatch.setattr(program, "make_model", wrong)
    found = program.judge(contender, options, 20, streams)
    assert found is not None
    assert "is off by" in found
