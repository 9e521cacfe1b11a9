"""benchmarks/cpu.py times what agrees with its rival, and says what does not."""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return runpy.run_path(str(BENCHMARKS / "cpu.py"))


def test_what_differs_is_said_and_not_timed(program: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    one, other = [torch.ones(3)], [torch.full((3,), 1.5)]
    clock, peak = time.perf_counter, program["Peak"](1)
    row = program["measure"](program["Case"]("GRU float32", lambda: one, lambda: one), clock, 0.001, peak)
    assert row["ratio"] > 0
    assert program["measure"](program["Case"]("GRU float32", lambda: one, lambda: other), clock, 0.001, peak) is None
    assert "GRU float32: not timed, the results are 0.5 apart" in capsys.readouterr().out
