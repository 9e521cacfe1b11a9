"""The benchmark of several GPUs, on two processes of this CPU: what it reads off a training, and what it writes."""

import runpy
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from whorl.bench.figures import Figures

PATH = Path(__file__).parents[1] / "benchmarks" / "several_gpus.py"
SMALL = "--preset ptb-small --steps 100 --words 3000 --vocabulary 20 --units 5 --embedding 3 --device cpu".split()

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)


def test_it_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "figures.json"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["several", "--processes", "1,2", *SMALL, "--figures", str(file)])
    runpy.run_path(str(PATH))["main"]()
    (table,) = Figures.load(file).tables
    assert [row[0] for row in table.rows] == ["1", "2"]
    speeds = [float(row[1].replace(",", "")) for row in table.rows]
    assert table.rows[0][2] == "1.000"
    assert float(table.rows[1][2]) == pytest.approx(speeds[1] / speeds[0] / 2, abs=1e-3)


def test_a_training_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["several", "--processes", "1", *SMALL, "--engine", "persistent"])
    with pytest.raises(SystemExit, match=r"1 processes failed:\n[^$]*the tensors are on cpu"):
        runpy.run_path(str(PATH))["main"]()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are looked up in /proc")
def test_no_worker_is_left_of_a_training_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def running() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        return [line for line in found if str(tmp_path) in line]

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    words = [*SMALL, "--steps", "100000000", "--seconds", "10"]
    monkeypatch.setattr(sys, "argv", ["several", "--processes", "2", *words])
    with pytest.raises(SystemExit, match="2 processes took more than 10 s"):
        runpy.run_path(str(PATH))["main"]()
    assert running() == []
