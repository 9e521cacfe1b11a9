"""`whorl tune`: what is measured to be the fastest is kept, and runs from then on; the times here are made up."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from emulation import H200, Kernel, emulated
from whorl import settings
from whorl.cells import library
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, prepare, spreading, tiling, tuned, tuning
from whorl.engines.cuda.grid import described
from whorl.engines.cuda.layers import Layers
from whorl.engines.cuda.prepare import shared_bytes, size_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Tile
from whorl.engines.cuda.tuning import Choice, tune
from whorl.plan import decide
from whorl.problem import Call, Form, Problem

CHIP = Chip((9, 0), 132)
SIZE = size_of(library.lstm.graph, 512, 2)
WHERE = (SIZE, CHIP, 32, 1, "forward")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def _described(tile: Tile | Spread, cell: Graph = library.lstm.graph) -> str:
    return described(tile, shared_bytes("forward", cell, tile, CHIP.architecture), 1)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    settings.cache = tmp_path / "cache"
    return tmp_path / "cache" / "cuda"


def test_what_is_kept_is_chosen_for_its_own_shape_alone() -> None:
    first, *_, last = grid.likely(*WHERE)
    assert grid.choose(*WHERE) == grid.estimated(*WHERE)
    for tile in (first, last):
        tuned.keep(tile, *WHERE)
        assert grid.choose(*WHERE) == tile
    for other in (
        (SIZE, CHIP, 33, 1, "forward"), (SIZE, CHIP, 32, 2, "forward"), (SIZE, CHIP, 32, 1, "backward"),
        (SIZE, Chip((9, 0), 114), 32, 1, "forward"), (SIZE._replace(units=511), CHIP, 32, 1, "forward"),
    ):  # fmt: skip
        assert grid.choose(*other) == grid.estimated(*other)


def test_a_tile_of_the_table_is_kept_and_found() -> None:
    """It is no candidate of the estimates: measured.py has it."""
    where = (SIZE._replace(units=128), *WHERE[1:])
    known = grid.estimated(*where)
    assert known is not None
    assert known not in spreading.likely(*where)
    assert known not in tiling.likely(*where)
    tuned.keep(known, *where)
    assert tuned.found(grid.likely, *where) == known


def test_a_tile_of_the_other_regime_is_kept_too() -> None:
    own = type(grid.estimated(*WHERE))
    other = next(tile for tile in grid.likely(*WHERE) if type(tile) is not own)
    tuned.keep(other, *WHERE)
    assert grid.choose(*WHERE) == other


def test_tiles_of_steps_of_several_stages_are_kept_by_their_cell() -> None:
    mgu, gru_d = ((size_of(made.graph, 256, 2), CHIP, 32, 1, "backward") for made in (library.mgu, library.gru_d))
    kept = grid.likely(*mgu)[1]
    tuned.keep(kept, *mgu)
    assert grid.choose(*mgu) == kept != grid.estimated(*mgu)
    assert grid.choose(*gru_d) == grid.estimated(*gru_d)


def test_other_kernels_forget_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep(grid.likely(*WHERE)[2], *WHERE)
    monkeypatch.setattr(tuned, "texts", lambda: ["another kernel"])
    tuned._sources.cache_clear()
    assert grid.choose(*WHERE) == grid.estimated(*WHERE)
    tuned._sources.cache_clear()


def test_where_nothing_was_kept_no_source_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "_sources", lambda: pytest.fail("the kernels' sources were read"))
    assert grid.choose(*WHERE) == grid.estimated(*WHERE)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"a": 1}'])
def test_a_damaged_file_is_as_none_and_is_replaced(text: str, folder: Path) -> None:
    tile = grid.likely(*WHERE)[1]
    path = tuned.keep(tile, *WHERE)
    path.write_text(text)
    assert grid.choose(*WHERE) == grid.estimated(*WHERE)
    tuned.keep(tile, *WHERE)
    assert grid.choose(*WHERE) == tile


def test_numbers_of_no_tile_that_fits_are_as_none() -> None:
    path = tuned.keep(grid.likely(*WHERE)[1], *WHERE)
    path.write_text(path.read_text().replace('"shared": ', '"shared": 1'))
    assert grid.choose(*WHERE) == grid.estimated(*WHERE)


def test_the_estimate_stays_where_another_gains_nothing_to_speak_of() -> None:
    first, second = grid.likely(*WHERE)[:2]
    assert Choice("forward", {first: 100.0, second: 99.5}).best == first
    assert Choice("forward", {first: 100.0, second: 98.0}).best == second


@needs_compiler
def test_every_candidate_is_timed_and_the_fastest_is_kept_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Layers]] = []

    def work(made: Layers, call: Call, kind: str) -> tuning.Work:
        assert call.x.shape == (5, 32, 24)
        seen.append((kind, made))
        return lambda: None

    def timer(work: tuning.Work) -> float:
        work()
        return 90.0 if len(seen) in (4, 11) else 100.0

    monkeypatch.setattr(tuning, "_work", work)
    problem = Problem(Form(library.lstm.graph, 24, 512), H200, torch.bfloat16, 5, 32, gradient=True)
    with emulated(tmp_path) as patch:
        patch.setattr(Layers, "_ready", lambda *_: None)
        plan = decide(problem, "persistent")
        ahead, back = tune(plan, torch.device("cpu"), timer)
        text = "\n".join(whorl.engines.ENGINES["persistent"].numbers(problem))
    assert [ahead.kind, back.kind] == ["forward", "backward"]
    assert list(ahead.times) == [made._tiles["forward"] for kind, made in seen if kind == "forward"]
    assert grid.choose(*WHERE) == ahead.best == list(ahead.times)[3] != grid.estimated(*WHERE)
    assert f"forward: {_described(ahead.best)}, as `whorl tune` measured" in text


@needs_compiler
def test_the_tile_that_was_kept_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer, x = whorl.RNN(3, 20, engine="persistent").bfloat16(), torch.randn(2, 3, 3).bfloat16()
    size = size_of(library.rnn_tanh.graph, 20, 2)
    cell = library.rnn_tanh.graph
    tile = next(tile for tile in grid.likely(size, CHIP, 3, 1, "forward") if "2 blocks that" in _described(tile, cell))
    tuned.keep(tile, size, CHIP, 3, 1, "forward")
    with emulated(tmp_path), torch.no_grad():
        told, (y, _) = str(whorl.explain(layer, x)), layer(x)
    assert _described(tile, cell) in told
    assert len(list(tmp_path.glob("*.so"))) == 2  # and what fills the words of the exchange
    layer.engine = "reference"
    torch.testing.assert_close(y, layer(x)[0], atol=0.02, rtol=0)


@needs_compiler
@pytest.mark.parametrize("dtype, halved", [(torch.bfloat16, 0), (torch.float32, 2)])
def test_what_is_told_of_a_kernel_is_what_its_launch_asks_for(dtype: torch.dtype, halved: int, tmp_path: Path) -> None:
    asked: dict[str, int] = {}

    class Noted(Kernel):
        def __init__(
            self, code: bytes, name: str, device: int, block: int, shared: int, *rest: Any, early: bool
        ) -> None:
            super().__init__(code, name, device, block, shared, *rest, early=early)
            asked[name] = shared

    layer, x = whorl.GRU(3, 40, engine="persistent").to(dtype), torch.randn(2, 3, 3, dtype=dtype)
    with emulated(tmp_path) as patch:
        patch.setattr(prepare, "Kernel", Noted)
        told = str(whorl.explain(layer, x)).splitlines()
        layer(x)
    assert sum(name.startswith("halve_") for name in asked) == halved
    for kind in ("forward", "backward"):
        (line,) = (line for line in told if line.strip().startswith(f"{kind}: "))
        (shared,) = (size for name, size in asked.items() if name.startswith(f"gru_{kind}_"))
        assert f", {shared / 1024:.0f} KiB of shared memory)" in line
        assert ("become float16 in a kernel of its own" in line) == bool(halved)
