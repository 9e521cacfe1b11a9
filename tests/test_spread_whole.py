"""Steps with means where blocks that exchange through L2 have whole sequences (spread_whole_*.cu), by `emulation`."""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import emulation
from anew import with_tiles
from emulation import Kernel, emulated, on_host
from engine_cases import Case, assert_agrees, in_dtype, results
from test_machine_code import disassembled, needs_tools
from test_sliced_sleeps import PLANTED, Planted, others
from test_staged import A100, H200, needs_compiler
from test_whole import CELLS, LSTM, SHORT, assert_mends
from whorl.cells import library
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, source, spreading
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import steps
from whorl.engines.cuda.tiling import Size

TILES = [
    ("layer norm of r and c", 8, 1, None, Case(dict(directions=2), time=4, batch=9, units=70), torch.bfloat16),
    ("layer norm of r and c", 16, 1, 3, Case(dict(bias=False), time=5, batch=8, units=128), torch.bfloat16),
    ("layer norm of r and c", 8, 2, None, Case(dict(layers=2), time=3, batch=19, units=125), torch.float16),
    ("layer norm of r and c", 16, 1, None, Case(initial=False, time=36, batch=3, units=128), torch.float16),
    ("every option of LSTM", 8, 1, None, Case(dict(directions=2), time=4, batch=9, units=61), torch.float16),
    ("layer_norm_lstm", 8, 1, None, Case(dict(layers=2), time=4, batch=6, units=64), torch.bfloat16),
    ("in_turn", 32, 1, None, Case(dict(directions=2), time=4, batch=9, units=230), torch.bfloat16),
    ("three gates", 32, 1, 5, Case(time=4, batch=9, units=240), torch.bfloat16),
    ("one gate", 8, 1, 0, Case(dict(directions=2), time=5, batch=5, units=58), torch.float16),
    ("five gates", 8, 1, None, Case(dict(layers=2), time=4, batch=9, units=62), torch.bfloat16),
    ("layer norm of r and c", 32, 2, None, Case(time=3, batch=19, units=512), torch.bfloat16),
]


def spread(monkeypatch: pytest.MonkeyPatch, units: int, tiles: int, resident: int | None = None) -> None:
    """Forward of every layer goes so."""

    def made(cell: Graph, size: Size, shared: int, kind: str) -> Spread | None:
        return spreading.whole(size, units, tiles, shared, resident)

    with_tiles(monkeypatch, made, ["forward"])


BACK = [
    ("layer norm of r and c", 8, 2, 1, None, Case(dict(directions=2), time=4, batch=9, units=70), torch.bfloat16),
    ("layer norm of r and c", 16, 4, 1, 3, Case(dict(bias=False), time=5, batch=8, units=128), torch.bfloat16),
    ("layer norm of r and c", 8, 4, 2, None, Case(dict(layers=2), time=3, batch=19, units=125), torch.float16),
    ("layer norm of r and c", 16, 2, 1, None, Case(initial=False, time=36, batch=3, units=128), torch.float16),
    ("every option of LSTM", 8, 2, 1, None, Case(dict(directions=2), time=4, batch=9, units=61), torch.float16),
    ("layer_norm_lstm", 8, 8, 1, None, Case(dict(layers=2), time=4, batch=6, units=64), torch.bfloat16),
    ("in_turn", 32, 1, 1, None, Case(dict(directions=2), time=4, batch=9, units=230), torch.bfloat16),
    ("three gates", 32, 2, 1, 5, Case(time=4, batch=9, units=240), torch.bfloat16),
    ("one gate", 8, 4, 1, 0, Case(dict(directions=2), time=5, batch=5, units=58), torch.float16),
    ("five gates", 8, 2, 1, None, Case(dict(layers=2), time=4, batch=9, units=62), torch.bfloat16),
    ("layer norm of r and c", 32, 4, 2, None, Case(time=3, batch=19, units=512), torch.bfloat16),
    ("of the second", 8, 2, 1, None, Case(dict(directions=2), time=5, batch=7, units=62), torch.bfloat16),
]


def spread_back(
    monkeypatch: pytest.MonkeyPatch, units: int, gathered: int, tiles: int, resident: int | None = None
) -> None:  # fmt: skip
    """Backward of every layer goes so."""

    def made(cell: Graph, size: Size, shared: int, kind: str) -> Spread | None:
        return spreading.whole_back(size, units, gathered, tiles, shared, resident)

    with_tiles(monkeypatch, made, ["backward"])


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, units, gathered, tiles, resident, case, dtype", BACK)
def test_whole_sequences_backward(
    name: str, units: int, gathered: int, tiles: int, resident: int | None, case: Case, dtype: torch.dtype, order: int,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spread_back(monkeypatch, units, gathered, tiles, resident)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", SHORT[name], case, dtype)


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, units, tiles, resident, case, dtype", TILES)
def test_whole_sequences(
    name: str, units: int, tiles: int, resident: int | None, case: Case, dtype: torch.dtype, order: int,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where threads run in any order."""
    spread(monkeypatch, units, tiles, resident)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", CELLS[name], case, dtype)


@needs_compiler
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_what_is_not_a_number_stays_in_its_step(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in its sequence; in inference, where nothing is saved."""
    if kind == "forward":
        spread(monkeypatch, 8, 1)
    else:
        spread_back(monkeypatch, 8, 2, 1)
    assert_mends(torch.bfloat16, folder)


PLACES = {
    "forward": [
        "if (t > 0) arrival.settle(states",
        "float sums[CHAINS][SHARE]",
        "const unsigned phase = t / 2 % 2;",
        "pause(ticks(), LULL);",
        "const int gate = link_gate(l);",
        "if (packs(stage) > 0) find_means",
        "if (t + 1 < time && first) give",
        "seen = first_seen + sent_at;",
    ],
    "backward": [
        "if (t > 0) ask(t - 1);",
        "add_pairs(stage, false",
        "means_of_sums<WARPS>(stage",
        "float to[MOST(VALUES)], operand[1];",
        "pause(ticks(), LULL);",
        "if (comes_round && t % PERIOD == 0) fence();",
        "float sums[CHAINS][SHARE]",
        "put_sums<SOURCES * SUM_PITCH>",
    ],
}
"""Where a warp may sleep: before it looks, reads, writes, puts."""
SLEEPERS = {
    "forward": ((8, 1), Case(dict(directions=2), time=5, batch=6, units=70)),
    "backward": ((8, 2, 1), Case(dict(directions=2), time=5, batch=6, units=70)),
}


def with_places(text: str, places: Sequence[str]) -> str:
    for number, place in enumerate(places):
        assert text.count(place) == 1
        text = text.replace(place, f"come_to({number});\n {place}")
    return text


def asleep(
    kind: str, folder: Path, patch: pytest.MonkeyPatch, fault: tuple[str, str] | None = None
) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """What another result there is where a warp sleeps at a place: of a block with a sequence, and of one without."""
    numbers, case = SLEEPERS[kind]
    (spread if kind == "forward" else spread_back)(patch, *numbers)
    known, write = Planted(), getattr(source, kind)

    def written(*given: Any) -> str:
        text = write(*given)
        assert fault is None or text.count(fault[0]) == 1
        return with_places(text if fault is None else text.replace(*fault), PLACES[kind])

    patch.setattr(source, kind, written)
    patch.setattr(emulation, "on_host", lambda text: PLANTED * ("come_to" in text) + on_host(text))
    patch.setattr(Kernel, "launch", lambda kernel, *given: known.launched(kernel, *given))
    form, call = case.build(LSTM)
    call = in_dtype(call, torch.bfloat16)
    with emulated(folder):
        wanted = results(form, call, "persistent", False)
        assert {place for place, *_ in known.came} == set(range(len(PLACES[kind])))
        for slow in sorted(came for came in known.came if came[1] in (1, 7)):
            known.slow = *slow, -1
            changed = others(results(form, call, "persistent", False), wanted)
            if changed:
                yield slow, changed


@needs_compiler
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_warp_that_sleeps_changes_nothing(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(asleep(kind, folder, monkeypatch), None) is None


@needs_compiler
@pytest.mark.parametrize("kind, fault", [
    ("forward", ("if (missing(taken[i])) taken", "if (warp > 0 && missing(taken[i])) taken")),
    ("backward", ("if (((words[p].x ^ phase)", "if (warp > 0 && ((words[p].x ^ phase)")),
])  # fmt: skip
def test_a_planted_fault_is_found(
    kind: str, fault: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warp takes what has come, and does not wait for the rest."""
    assert next(asleep(kind, folder, monkeypatch, fault), None) is not None


def test_where_a_block_has_a_whole_sequence() -> None:
    """LSTM with layer norm of r and c, as measured."""

    def numbers(
        kind: str, units: int, batch: int, element: int = 2, features: Features = source.PLAIN, chip: Any = H200
    ) -> tuple[int, ...]:
        tile = grid.estimated(size_of(LSTM, units, element, features), chip, batch, 1, kind)
        if not isinstance(tile, Spread) or not tile.whole:
            return ()
        assert tile.sided
        return tile.slice, tile.sources, tile.gathered, tile.tiles

    assert numbers("forward", 512, 128) == (32, 16, 1, 2)
    assert numbers("backward", 512, 128) == numbers("backward", 512, 96) == (32, 4, 4, 2)
    assert numbers("forward", 384, 128) == (24, 16, 1, 2)
    assert numbers("backward", 384, 128) == (24, 4, 4, 2)
    assert numbers("backward", 320, 128) == (40, 2, 4, 1)
    others = (512, 96), (512, 64), (384, 96), (320, 128), (256, 128), (512, 256), (1024, 128)
    assert [numbers("forward", *size) for size in others] == [()] * 7
    others = (512, 64), (384, 96), (256, 128), (512, 256), (1024, 128)
    assert [numbers("backward", *size) for size in others] == [()] * 5
    for kind in ("forward", "backward"):
        assert numbers(kind, 512, 128, 4) == numbers(kind, 512, 128, 2, Features(mask=True)) == ()
        assert numbers(kind, 512, 128, chip=A100) == ()
    before = size_of(library.make_gru(reset_after=False).graph, 512, 2)
    assert spreading.whole(before, 32, 2, H200.shared) is spreading.whole_back(before, 32, 4, 2, H200.shared) is None


@needs_tools
@pytest.mark.parametrize("name", ["layer norm of r and c", "layer_norm_lstm", "three gates", "in_turn"])
@pytest.mark.parametrize("units, own, tiles", [(512, 32, 2), (482, 32, 2), (481, 32, 2), (384, 24, 2), (320, 40, 1)])
def test_nothing_is_spilled(name: str, units: int, own: int, tiles: int, tmp_path: Path) -> None:
    size = size_of(CELLS[name], units, 2)
    for kind in ("forward", "backward"):
        if kind == "forward":
            tile = spreading.whole(size, own, tiles, H200.shared)
        else:
            tile = spreading.whole_back(size, own, 4, tiles, H200.shared)
        assert tile is not None
        text = getattr(source, kind)(CELLS[name], units, torch.bfloat16, tile, True)
        listed = disassembled(text, tile, tmp_path / kind)
        assert [line for line in listed if re.search(r"\b(STL|LDL)\b", line)] == []
        assert sum("HGMMA" in line for line in listed) >= 8


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_biases_and_vectors_need_not_begin_at_four_bytes(kind: str, tmp_path: Path) -> None:
    """They are read one by one: of LSTM with layer norm of r and c 4 biases of r, 4 of x, 10 vectors of two units."""
    size = size_of(LSTM, 512, 2)
    if kind == "forward":
        tile, count = (
            spreading.whole(size, 32, 2, H200.shared),
            2 * (len(steps(LSTM).links) + size.gates + size.vectors),
        )
    else:
        tile, count = spreading.whole_back(size, 32, 4, 2, H200.shared), 2 * size.vectors
    assert tile is not None
    listed = disassembled(getattr(source, kind)(LSTM, 512, torch.bfloat16, tile, True), tile, tmp_path / "cubin")
    assert sum("LDG.E.U16" in line for line in listed) >= count


def test_it_is_told() -> None:
    size = size_of(LSTM, 512, 2)
    for kind in ("forward", "backward"):
        tile = grid.estimated(size, H200, 128, 1, kind)
        assert tile is not None
        assert "each with the cell of a whole sequence, for up to 16 sequences" in grid.described(tile, tile.shared, 1)
