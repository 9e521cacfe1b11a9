"""Forward of steps with means where a warp has a block's units of a sequence (sliced_forward.cu), by `emulation`."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import emulation
import whorl
from anew import with_tiles
from emulation import emulated
from engine_cases import Case, assert_agrees
from test_machine_code import disassembled, needs_tools
from test_staged import A100, H200, assert_near_in_tf32, needs_compiler
from test_whole import CELLS, LSTM, assert_mends
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, source, staging
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.staged import steps
from whorl.engines.cuda.tiling import Size, Tile

TILES = [
    ("layer norm of r and c", 2, 4, 1, 2, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("layer norm of r and c", 2, 1, 1, 1, Case(dict(bias=False), time=1, batch=1, units=64), torch.bfloat16),
    ("layer norm of r and c", 4, 3, 1, 2, Case(dict(directions=2), time=5, batch=7, units=70), torch.float16),
    ("layer norm of r and c", 2, 9, 2, 1, Case(initial=False, time=6, batch=9, units=33), torch.float16),
    ("every option of LSTM", 2, 5, 1, 2, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("every option of LSTM", 8, 3, 3, 2, Case(dict(layers=2), time=3, batch=5, units=130), torch.float16),
    ("layer_norm_lstm", 2, 6, 2, 2, Case(dict(layers=2), time=6, batch=6, units=50), torch.float16),
    ("in_turn", 2, 3, 2, 2, Case(dict(directions=2), time=5, batch=6, units=50), torch.float16),
    ("three gates", 4, 5, 1, 2, Case(dict(directions=2), time=4, batch=6, units=70), torch.bfloat16),
    ("one gate", 2, 9, 3, 2, Case(dict(layers=2), time=5, batch=9, units=45), torch.float16),
    ("five gates", 4, 9, 2, 2, Case(dict(directions=2), time=4, batch=9, units=70), torch.bfloat16),
    # blocks, and warps of others, without units
    ("layer norm of r and c", 16, 5, 1, 2, Case(time=5, batch=5, units=270), torch.bfloat16),
    ("layer norm of r and c", 16, 4, 1, 1, Case(time=3, batch=7, units=330), torch.bfloat16),
    # a block without units beside one with fewer than 32
    ("layer norm of r and c", 2, 2, 1, 2, Case(dict(directions=2), time=4, batch=5, units=20), torch.float16),
    # three sub-tiles, of one of which fewer sequences are there, or none
    ("layer norm of r and c", 2, 12, 3, 2, Case(dict(directions=2), time=4, batch=24, units=37), torch.bfloat16),
    ("layer norm of r and c", 2, 16, 3, 1, Case(dict(directions=2), time=4, batch=4, units=37), torch.float16),
    ("layer norm of r and c", 16, 10, 2, 2, Case(time=3, batch=19, units=270), torch.bfloat16),
]  # fmt: skip
SLOWED = [
    "const unsigned columns = all_columns + sub * 512;",
    "const int place = lane % 4 * 2 + e;",
    "arrive_at_barrier(1 + sub, together(sub));",
    "named_barrier(1 + sub, together(sub));",
    "const float of[4] = {sum.x, sum.y, sum.z, sum.w};",
    "float data[4 * MOST(PACKS)] = {};",
    "const unsigned to_slot = mean_peer",
    "wait(barrier_of(stage, line), t % 2);",
    "merge_at_once<BLOCKS>(stage",
    "const unsigned word = operand_pair(low",
    "row += row_step;",
]
"""Places in the kernel where a warp may sleep: before it waits, reads, writes, sends."""


def sliced(monkeypatch: pytest.MonkeyPatch, cluster: int, lines: int, tiles: int, splits: int) -> None:
    """Forward of every layer goes so."""

    def made(cell: Graph, size: Size, shared: int, kind: str) -> Tile | None:
        return staging.sliced_forward(cell, size, cluster, lines, tiles, splits, shared)

    with_tiles(monkeypatch, made, ["forward"])


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, cluster, lines, tiles, splits, case, dtype", TILES)
def test_sliced_sequences(
    name: str, cluster: int, lines: int, tiles: int, splits: int, case: Case, dtype: torch.dtype, order: int,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where threads run in any order."""
    sliced(monkeypatch, cluster, lines, tiles, splits)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", CELLS[name], case, dtype)


@needs_compiler
@pytest.mark.parametrize("name, units, tiles, form", [
    ("layer norm of r and c", 37, 1, dict(directions=2)), ("layer norm of r and c", 50, 2, dict(bias=False)),
    ("layer_norm_lstm", 64, 3, dict(layers=2)),
])  # fmt: skip
def test_tf32_is_multiplied_as_float16(
    name: str, units: int, tiles: int, form: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced(monkeypatch, 2, 5, tiles, 2)
    assert_near_in_tf32(CELLS[name], Case(form, time=4, batch=9, units=units), folder)


@needs_compiler
@pytest.mark.parametrize("numbers, dtype", [((4, 9, 2, 1), torch.bfloat16), ((4, 5, 1, 2), torch.float16)])
def test_what_is_not_a_number_stays_in_its_step(
    numbers: tuple[int, int, int, int], dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in its sequence, whose means are added up apart from others'; in inference, where nothing is saved."""
    sliced(monkeypatch, *numbers)
    assert_mends(dtype, folder)


@whorl.cell(gates="a b c d e", states="h")
def many_means(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Ten numbers of a sequence after one stage."""
    return dict(h=whorl.tanh(sum(wrappers.normal([one])[0] for one in (r.a, r.b, r.c, r.d, r.e)) + x.a))


def test_a_stage_has_no_more_numbers_than_a_product_has_columns() -> None:
    graph, size = many_means.graph, size_of(many_means.graph, 64, 2)
    assert max(map(steps(graph).forward.numbers, range(steps(graph).forward.stages))) == 10
    assert staging.sliced_forward(graph, size, 2, 4, 1, 1, H200.shared) is None
    assert not any(tile.lines for tile in staging.fitting(graph, size, H200, "forward"))


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("batch, sequences", [(8, 2), (32, 5), (64, 10)])
def test_no_warp_is_for_a_sequence_that_is_not_there(kind: str, batch: int, sequences: int) -> None:
    """Among the tiles that `whorl tune` times: others would be the same, with idle warps."""
    found = staging.likely(LSTM, size_of(LSTM, 512, 2), H200, batch, 1, kind)
    assert max(tile.lines for tile in found) == sequences


def test_where_a_warp_has_the_units_of_a_block() -> None:
    """LSTM with layer norm of r and c, as measured."""

    def numbers(units: int, batch: int, element: int, features: Features = source.PLAIN) -> tuple[int, ...]:
        tile = grid.estimated(size_of(LSTM, units, element, features), H200, batch, 1, "forward")
        assert tile is not None
        return (tile.cluster, tile.lines, tile.tiles, tile.splits) if isinstance(tile, Tile) else (0, 0, 0, 0)

    assert numbers(512, 32, 2) == numbers(384, 32, 2) == numbers(448, 32, 2) == (16, 5, 1, 1)
    assert numbers(512, 32, 4) == numbers(384, 32, 4) == (16, 5, 1, 2)
    assert (numbers(512, 8, 2), numbers(512, 8, 4)) == ((16, 2, 1, 1), (16, 2, 1, 2))
    assert numbers(512, 64, 2) == numbers(512, 64, 4) == numbers(384, 64, 2) == (16, 10, 2, 1)
    assert numbers(256, 128, 2) == numbers(256, 128, 4) == (8, 9, 2, 1)
    assert numbers(256, 32, 2) == numbers(256, 32, 4) == (8, 3, 1, 1)
    assert numbers(256, 64, 2) == (8, 5, 1, 1)
    others = (256, 1, 2), (256, 64, 4), (128, 32, 2), (128, 128, 4), (512, 96, 2), (512, 128, 2)
    assert [numbers(*size)[1] for size in others] == [0] * 6
    assert numbers(512, 32, 2, Features(mask=True))[1] == 0
    assert all(not tile.lines for tile in staging.fitting(LSTM, size_of(LSTM, 64, 2), A100, "forward"))
    assert staging.sliced_forward(LSTM, size_of(LSTM, 64, 4, exact=True), 2, 4, 1, 1, H200.shared) is None
    before = library.make_gru(reset_after=False).graph
    assert staging.sliced_forward(before, size_of(before, 64, 2), 2, 4, 1, 1, H200.shared) is None


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "tf32"])
@pytest.mark.parametrize(
    "units, numbers",
    [
        (512, (16, 1, 1, 1)), (512, (16, 2, 1, 2)), (512, (16, 5, 1, 2)), (512, (16, 5, 1, 1)),
        (512, (16, 7, 1, 1)), (512, (16, 8, 1, 2)), (512, (16, 10, 2, 1)),
        (512, (16, 12, 2, 1)), (384, (16, 5, 1, 2)), (320, (16, 5, 1, 1)),
        (256, (8, 9, 2, 1)), (256, (8, 3, 1, 1)), (256, (8, 5, 1, 1)),
    ],
)  # fmt: skip
def test_nothing_is_spilled(units: int, numbers: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    cluster, lines, tiles, splits = numbers
    tile = staging.sliced_forward(
        LSTM, size_of(LSTM, units, dtype.itemsize), cluster, lines, tiles, splits, H200.shared
    )
    assert tile is not None
    listed = disassembled(source.forward(LSTM, units, dtype, tile, True), tile, tmp_path / "cubin")
    assert [line for line in listed if re.search(r"\b(STL|LDL)\b", line)] == []
    assert sum("HMMA" in line for line in listed) >= 16
