"""Backward of steps with means where a warp has a block's units of a sequence (sliced_backward.cu), by `emulation`."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import emulation
from anew import with_tiles
from emulation import emulated
from engine_cases import Case, assert_agrees
from test_machine_code import disassembled, needs_tools
from test_staged import A100, H200, assert_near_in_tf32, needs_compiler
from test_whole import CELLS, LSTM, SHORT
from whorl.cells import library
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, source, staging
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.staged import steps
from whorl.engines.cuda.tiling import Size, Tile

TILES = [
    ("layer norm of r and c", 2, 4, 4, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("layer norm of r and c", 2, 1, 2, Case(dict(bias=False), time=1, batch=1, units=64), torch.bfloat16),
    ("layer norm of r and c", 4, 3, 8, Case(dict(directions=2), time=5, batch=7, units=70), torch.float16),
    ("layer norm of r and c", 2, 9, 4, Case(initial=False, time=6, batch=9, units=33), torch.float16),
    ("every option of LSTM", 2, 5, 4, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("every option of LSTM", 8, 3, 3, Case(dict(layers=2), time=3, batch=5, units=130), torch.float16),
    ("layer_norm_lstm", 2, 6, 2, Case(dict(layers=2), time=6, batch=6, units=50), torch.float16),
    ("in_turn", 2, 3, 4, Case(dict(directions=2), time=5, batch=6, units=50), torch.float16),
    ("three gates", 4, 5, 4, Case(dict(directions=2), time=4, batch=6, units=70), torch.bfloat16),
    ("one gate", 2, 9, 4, Case(dict(layers=2), time=5, batch=9, units=45), torch.float16),
    ("five gates", 4, 9, 4, Case(dict(directions=2), time=4, batch=9, units=70), torch.bfloat16),
    # blocks, and warps of others, without units
    ("layer norm of r and c", 16, 5, 8, Case(time=5, batch=5, units=270), torch.bfloat16),
    ("layer norm of r and c", 16, 4, 8, Case(time=3, batch=7, units=330), torch.bfloat16),
    # a block without units beside one with fewer than 32
    ("layer norm of r and c", 2, 2, 4, Case(dict(directions=2), time=4, batch=5, units=20), torch.float16),
    # six warps for seven strips
    ("layer norm of r and c", 4, 5, 6, Case(dict(directions=2), time=4, batch=9, units=100), torch.bfloat16),
    # two sub-tiles, of one of which no sequence is there, or of which a warp has a last strip without a second
    ("layer norm of r and c", 2, 9, 4, Case(dict(directions=2), time=4, batch=1, units=37), torch.bfloat16),
    ("layer norm of r and c", 16, 10, 5, Case(time=3, batch=10, units=270), torch.bfloat16),
    ("every option of LSTM", 4, 12, 4, Case(dict(layers=2), time=5, batch=35, units=100), torch.float16),
    ("of the second", 2, 4, 4, Case(dict(directions=2), time=5, batch=7, units=62), torch.bfloat16),
]  # fmt: skip
SLOWED = [
    "named_barrier(1 + sub, together(sub));",
    "const unsigned target = at_rank(base, strip / 2);",
    "wait(barriers + 8 * sub, (t - 1) % 2);",
    "if (!goes_on) break;",
    "const float2 sums = sums_of_rows(rows[stage][e]);",
    "wait(barrier_of(stage, line), t % 2);",
    "float2 all[EIGHTS];",
    "float scale = 1.f;",
    "arrive_at_barrier(1 + sub, together(sub));",
]
"""Places in the kernel where a warp may sleep: before it waits, reads, writes, sends."""


def sliced(monkeypatch: pytest.MonkeyPatch, cluster: int, lines: int, producers: int) -> None:
    """Backward of every layer goes so."""

    def made(cell: Graph, size: Size, shared: int, kind: str) -> Tile | None:
        return staging.sliced(cell, size, cluster, lines, producers, shared)

    with_tiles(monkeypatch, made, ["backward"])


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, cluster, lines, producers, case, dtype", TILES)
def test_sliced_sequences(
    name: str, cluster: int, lines: int, producers: int, case: Case, dtype: torch.dtype, order: int, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where threads run in any order."""
    sliced(monkeypatch, cluster, lines, producers)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", SHORT[name], case, dtype)


@needs_compiler
@pytest.mark.parametrize("name, units, form", [
    ("layer norm of r and c", 37, dict(directions=2)), ("layer norm of r and c", 50, dict(bias=False)),
    ("layer_norm_lstm", 64, dict(layers=2)),
])  # fmt: skip
def test_tf32_is_multiplied_as_float16(
    name: str, units: int, form: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced(monkeypatch, 2, 5, 4)
    assert_near_in_tf32(CELLS[name], Case(form, time=4, batch=9, units=units), folder)


def test_where_a_warp_has_the_units_of_a_block() -> None:
    """LSTM with layer norm of r and c, as measured: where whole sequences are not faster."""

    def numbers(units: int, batch: int, element: int, features: Features = source.PLAIN) -> tuple[int, int, int]:
        tile = grid.estimated(size_of(LSTM, units, element, features), H200, batch, 1, "backward")
        assert isinstance(tile, Tile)
        return tile.cluster, tile.lines, tile.warps - tile.lines

    assert numbers(512, 32, 2) == numbers(512, 32, 4) == (16, 5, 8)
    assert numbers(256, 128, 2) == numbers(256, 128, 4) == (8, 9, 4)
    assert numbers(256, 32, 2) == numbers(256, 32, 4) == (8, 3, 4)
    assert numbers(512, 8, 2) == numbers(512, 8, 4) == (16, 2, 8)
    assert numbers(256, 1, 2) == (8, 1, 4)
    assert numbers(20, 32, 4) == (2, 1, 4)  # one of the two blocks has no units
    assert numbers(384, 32, 2) == (16, 5, 6)
    assert numbers(512, 64, 2) == numbers(512, 64, 4) == (16, 10, 6)
    assert numbers(128, 8, 2) == (4, 1, 4)  # with 128 units at batch 16 92 us, by whole sequences 94 (H200)
    others = (256, 64, 2), (256, 96, 2), (64, 128, 2), (96, 8, 2)
    assert [numbers(*size)[1] for size in others] == [0] * 4
    assert numbers(512, 32, 2, Features(mask=True))[1] == 0
    assert all(not tile.lines for tile in staging.fitting(LSTM, size_of(LSTM, 64, 2), A100, "backward"))
    assert staging.sliced(LSTM, size_of(LSTM, 64, 4, exact=True), 2, 4, 4, H200.shared) is None
    before = library.make_gru(reset_after=False).graph
    assert staging.sliced(before, size_of(before, 64, 2), 2, 4, 4, H200.shared) is None


def test_it_is_told_in_words() -> None:
    """Of 13 warps four are in one of a multiprocessor's four parts, and have 128 registers a thread."""
    tile = staging.sliced(LSTM, size_of(LSTM, 512, 2), 16, 5, 8, H200.shared)
    assert tile is not None
    words = grid.described(tile, tile.shared, 1)
    assert words.startswith(
        "a cluster of 16 blocks, with a warp for each sequence, for up to 5 sequences, 32 units a block"
    )
    assert "13 warps, up to 128 registers a thread" in words


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "tf32"])
@pytest.mark.parametrize(
    "units, numbers",
    [(512, (16, 5, 8)), (512, (16, 10, 6)), (384, (16, 5, 6)), (384, (16, 10, 6)), (256, (8, 9, 6)), (256, (8, 3, 4))],
)
def test_nothing_is_spilled(units: int, numbers: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    tile = staging.sliced(LSTM, size_of(LSTM, units, dtype.itemsize), *numbers, H200.shared)
    assert tile is not None
    lines = disassembled(source.backward(LSTM, units, dtype, tile, True), tile, tmp_path / "cubin")
    assert [line for line in lines if re.search(r"\b(STL|LDL)\b", line)] == []
    assert sum("HMMA" in line for line in lines) >= 16


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "tf32"])
def test_what_needs_no_gradient_is_added_up_before_one_comes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Four of eight numbers: two products before the wait for what is multiplied, two and the last one after it."""
    early = steps(LSTM).backward.early
    assert early is not None
    known = [made.known for made in early.reductions]
    assert known == [False] * 4 + [True] * 4
    tile = staging.sliced(LSTM, size_of(LSTM, 512, dtype.itemsize), 16, 5, 8, H200.shared)
    assert tile is not None
    lines = disassembled(source.backward(LSTM, 512, dtype, tile, True), tile, tmp_path / "cubin")
    waits = next(place for place, line in enumerate(lines) if "SYNCS.PHASECHK" in line)
    begins = max(place for place, line in enumerate(lines[:waits]) if "MUFU.RSQ" in line)
    sends = next(place for place, line in enumerate(lines) if place > waits and "STAS.64" in line)
    assert sum("HMMA" in line for line in lines[begins:waits]) == 2
    assert sum("HMMA" in line for line in lines[waits:sends]) == 3


def test_what_is_known_is_what_the_first_stage_makes() -> None:
    """By the same lines, in the same places: also where three numbers need a gradient, six do, all do."""
    for name in ("layer norm of r and c", "in_turn", "layer_norm_lstm", "five gates", "of the second"):
        made = steps(SHORT[name]).backward.early
        assert made is not None
        known, later = (part.split("\n}", 1)[0] for part in re.split(r"void (?:run_known|stage_0)\(", made.text)[1:])
        places = {place for it in made.reductions if it.known for place in range(it.first, it.first + it.values)}
        written = dict(re.findall(r"to\[(\d+)\] = (\w+);", known))
        assert {*map(int, written)} == places
        assert written.items() <= dict(re.findall(r"to\[(\d+)\] = (\w+);", later)).items()
        assert not re.search(r"\bd\[", known)
        lines = set(re.findall(r"const .*;", known))
        assert lines <= set(re.findall(r"const .*;", later))


@needs_tools
@pytest.mark.parametrize(
    "units, numbers, most", [(512, (16, 5, 8), (95, 85)), (256, (8, 3, 4), (75, 70))], ids=["512", "256"]
)
def test_little_is_behind_a_wait(
    units: int, numbers: tuple[int, int, int], most: tuple[int, int], tmp_path: Path
) -> None:
    """From the wait for sums of other blocks to what is sent, and from that for means to the product's start.

    And what is read of all blocks is asked for at once: where registers are few, one such word waits for another.
    """
    tile = staging.sliced(LSTM, size_of(LSTM, units, 2), *numbers, H200.shared)
    assert tile is not None
    lines = disassembled(source.backward(LSTM, units, torch.bfloat16, tile, True), tile, tmp_path / "cubin")
    lines = [line for line in lines if re.search(r"/\*[0-9a-f]{4,}\*/", line) and "@!UPT UIADD3 URZ" not in line]
    first, second = [place for place, line in enumerate(lines) if "SYNCS.PHASECHK" in line][:2]
    sends = next(place for place, line in enumerate(lines) if "STAS.64" in line)
    arrives = next(place for place, line in enumerate(lines) if "BAR.ARV" in line)
    assert sends - first <= most[0]
    assert arrives - second <= most[1]
    words = [re.search(r"LDS (R\d+)", line) for line in lines[first:sends]]
    assert len({word[1] for word in words if word}) == units // 32
