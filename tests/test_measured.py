"""Tiles that were found by measuring: each fits, spills nothing that counts, and stands only where it was measured."""

import re
from pathlib import Path

import pytest
import torch

import whorl
from cells_for_tests import CELLS
from test_machine_code import disassembled, needs_tools, time_loop
from whorl.cells.library import make_lstm
from whorl.engines.cuda import grid, measured, source
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.source import PLAIN, Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile
from whorl.problem import Form

H200 = Chip((9, 0), 132)
ALL = Features(
    lengths=True, order=True, mask=True, reset=True, noise=source.DRAWN, zoneout=(source.AT_RANDOM, source.AT_RANDOM)
)
"""Most options at once."""
BY_GATE = Features(noise=source.BY_GATE)
ZONEOUT = Features(zoneout=(source.AT_RANDOM, source.AT_RANDOM))
PRECISIONS = {"rounded": (torch.bfloat16, False), "scaled": (torch.float32, False), "exact": (torch.float32, True)}
NAMES = {4: "lstm", 3: "gru"}
_FEWEST = measured._UNITS[0] // 2
EACH = [
    (precision, gates, units, batch)
    for precision, gates in measured._TILES
    for row, units in enumerate(measured._UNITS)
    for column, batch in enumerate(measured._BATCH)
    if measured._TILES[precision, gates].split("\n")[1 + row].split()[column] != "-"
]


def sized(precision: str, gates: int, units: int, features: Features = PLAIN) -> Size:
    dtype, exact = PRECISIONS[precision]
    return size_of(CELLS[NAMES[gates]].graph, units, dtype.itemsize, features, exact)


@pytest.mark.parametrize("precision, gates, units, batch", EACH)
def test_each_fits_and_all_its_clusters_run_at_once(precision: str, gates: int, units: int, batch: int) -> None:
    fewest = max([_FEWEST, *(other for other in measured._UNITS if other < units)]) + 1
    for own in (units, fewest, units - 1):
        tile = measured.forward(sized(precision, gates, own), H200, batch, 1)
        assert tile is not None
        assert tile.pointwise
        assert -(-batch // tile.rows) <= H200.resident(tile.cluster)
        spread = measured.spread(sized(precision, gates, own), H200, batch, 1)
        assert grid.estimated(sized(precision, gates, own), H200, batch, 1, "forward") == (spread or tile)


@needs_tools
@pytest.mark.parametrize("precision, gates, units, batch", EACH[::5])
def test_nothing_is_spilled(precision: str, gates: int, units: int, batch: int, tmp_path: Path) -> None:
    tile = measured.forward(sized(precision, gates, units), H200, batch, 1)
    assert tile is not None
    dtype, _ = PRECISIONS[precision]
    text = source.forward(CELLS[NAMES[gates]].graph, units, dtype, tile, True)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []


@pytest.mark.parametrize(
    "precision, gates, units, batch, directions, features, wanted",
    [
        ("rounded", 4, 128, 32, 1, PLAIN, (8, 1, 2, 4)),
        ("rounded", 4, 128, 16, 2, PLAIN, (8, 1, 2, 4)),  # as many sequences in two directions
        ("scaled", 4, 64, 1, 1, PLAIN, (4, 1, 2, 2)),
        ("exact", 3, 128, 100, 1, PLAIN, (4, 1, 2, 2)),
        ("rounded", 4, 256, 128, 1, Features(noise=source.BY_GATE), (8, 2, 2, 4)),
        ("scaled", 4, 256, 128, 1, Features(noise=source.BY_GATE), (8, 2, 2, 2)),
        ("rounded", 4, 256, 32, 1, ALL, (16, 1, 2, 2)),
        ("rounded", 4, 256, 16, 1, ALL, None),
        ("scaled", 4, 256, 32, 1, BY_GATE, (16, 1, 4, 4)),
        ("scaled", 4, 256, 32, 1, ALL, None),
        ("rounded", 4, 256, 32, 1, Features(noise=source.DRAWN), None),
        ("scaled", 4, 256, 128, 1, ALL, (8, 2, 2, 4)),
        ("scaled", 4, 512, 32, 1, Features(lengths=True, order=True), (16, 1, 2, 2)),
        ("scaled", 4, 256, 96, 1, PLAIN, None),  # 1.02 to 1.05 of the time
        ("rounded", 4, 32, 32, 1, PLAIN, None),
        ("rounded", 4, 513, 32, 1, PLAIN, None),
        ("rounded", 4, 128, 257, 1, PLAIN, None),
        ("rounded", 4, 128, 32, 1, Features(mask=True), None),
        ("rounded", 4, 256, 128, 1, Features(lengths=True, order=True), None),
        ("scaled", 4, 256, 128, 1, Features(mask=True), None),
        ("exact", 4, 256, 128, 1, Features(mask=True), None),
    ],
)
def test_they_stand_where_they_were_measured(
    precision: str, gates: int, units: int, batch: int, directions: int, features: Features,
    wanted: tuple[int, ...] | None,
) -> None:  # fmt: skip
    tile = measured.forward(sized(precision, gates, units, features), H200, batch, directions)
    assert (tile and (tile.cluster, tile.subs, tile.splits, tile.pointwise)) == wanted


def test_states_of_any_size_have_the_tiles_of_others_or_their_own() -> None:
    softplus = make_lstm(activation=whorl.softplus).graph
    relu = Form.from_json(whorl.GRU(4, 4, activation="relu")._form).cell
    for cell, gates, units, batch, own in (
        (softplus, 4, 256, 128, (8, 3, 2, 4)), (softplus, 4, 512, 32, (16, 3, 4, 2)), (relu, 3, 512, 32, (16, 3, 4, 2)),
        (softplus, 4, 256, 64, None), (softplus, 4, 128, 32, None), (relu, 3, 256, 128, None),
    ):  # fmt: skip
        tile = measured.forward(size_of(cell, units, 4), H200, batch, 1)
        other = measured.forward(sized("scaled", gates, units), H200, batch, 1)
        assert tile is not None
        assert tile.by_step
        found = tile.cluster, tile.subs, tile.splits, tile.pointwise
        assert found == (own or (other and (other.cluster, other.subs, other.splits, other.pointwise)))
    assert measured.spread(size_of(softplus, 512, 4), H200, 128, 1) is None
    assert measured.forward(size_of(softplus, 256, 4, Features(mask=True)), H200, 128, 1) is None  # nor with options
    # in two bytes nothing is scaled
    assert measured.forward(size_of(softplus, 256, 2), H200, 128, 1) == measured.forward(
        sized("rounded", 4, 256), H200, 128, 1
    )


@pytest.mark.parametrize(
    "precision, units, batch, directions, features, wanted",
    [
        ("scaled", 256, 32, 1, BY_GATE, ("Tile", 16, 4)),
        ("scaled", 256, 16, 2, BY_GATE, ("Tile", 16, 4)),
        ("scaled", 256, 128, 1, BY_GATE, ("Tile", 32, 8)),
        ("scaled", 256, 64, 2, BY_GATE, ("Tile", 32, 8)),
        ("rounded", 256, 32, 1, ALL, ("Tile", 16, 4)),
        ("scaled", 256, 64, 1, BY_GATE, None),
        ("scaled", 512, 32, 1, BY_GATE, None),
        ("scaled", 256, 32, 1, PLAIN, None),
        ("scaled", 256, 32, 1, ALL, None),
        ("rounded", 256, 32, 1, BY_GATE, None),
        ("rounded", 256, 32, 1, Features(mask=True), None),
        ("exact", 256, 32, 1, BY_GATE, None),
    ],
)
def test_some_kernels_backward_were_measured(
    precision: str, units: int, batch: int, directions: int, features: Features, wanted: tuple[str, int, int] | None
) -> None:
    size = sized(precision, 4, units, features)
    tile = measured.backward(size, H200, batch, directions)
    got = tile and (type(tile).__name__, tile.slice, tile.warps)
    assert got == wanted
    if tile is not None:
        assert grid.estimated(size, H200, batch, directions, "backward") == tile
        assert grid.likely(size, H200, batch, directions, "backward", 1)[-1] == tile
    assert measured.backward(size, Chip((9, 0), 114), batch, directions) is None


OWN_TILES = [
    (256, 32, "float32", BY_GATE, "forward"), (256, 32, "float32", BY_GATE, "backward"),
    (256, 128, "float32", BY_GATE, "forward"), (256, 128, "float32", BY_GATE, "backward"),
    (256, 32, "bfloat16", ALL, "forward"), (256, 32, "bfloat16", ALL, "backward"),
    (512, 128, "bfloat16", BY_GATE, "forward"), (512, 128, "bfloat16", ZONEOUT, "forward"),
]  # fmt: skip


@needs_tools
@pytest.mark.parametrize("units, batch, dtype, features, kind", OWN_TILES)
def test_with_options_nothing_is_spilled(
    units: int, batch: int, dtype: str, features: Features, kind: str, tmp_path: Path
) -> None:
    cell, of = CELLS["lstm"].graph, getattr(torch, dtype)
    tile = grid.estimated(size_of(cell, units, of.itemsize, features), H200, batch, 1, kind)
    assert tile is not None
    write = source.forward if kind == "forward" else source.backward
    loop = time_loop(disassembled(write(cell, units, of, tile, True, features), tile, tmp_path / "kernel.cubin"))
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []


@pytest.mark.parametrize(
    "precision, gates, units, batch, directions, features, parts",
    [
        ("rounded", 4, 512, 128, 1, PLAIN, 2),
        ("rounded", 4, 480, 113, 1, PLAIN, 2),
        ("scaled", 4, 512, 128, 1, PLAIN, 1),
        ("rounded", 4, 512, 64, 2, PLAIN, None),  # as many sequences in two directions, not timed
        ("rounded", 4, 512, 112, 1, PLAIN, None),  # of whose clusters seven have 16 sequences each
        ("rounded", 4, 512, 129, 1, PLAIN, None),
        ("rounded", 4, 448, 128, 1, PLAIN, None),
        ("rounded", 3, 512, 128, 1, PLAIN, None),
        ("exact", 4, 512, 128, 1, PLAIN, None),
        ("rounded", 4, 512, 128, 1, ZONEOUT, 2),
        ("scaled", 4, 512, 128, 1, ZONEOUT, None),
        ("rounded", 4, 512, 128, 1, ZONEOUT._replace(noise=source.DRAWN), None),
        ("rounded", 4, 512, 128, 1, ZONEOUT._replace(reset=True), None),
        ("rounded", 4, 512, 128, 1, Features(noise=source.DRAWN), None),
        ("rounded", 4, 512, 128, 1, Features(noise=source.HELD), None),
        ("rounded", 4, 512, 128, 1, Features(mask=True), None),
        ("scaled", 4, 512, 128, 1, BY_GATE, None),
        ("rounded", 4, 512, 112, 1, BY_GATE, None),
    ],
)
def test_more_sequences_than_clusters_have_are_spread(
    precision: str, gates: int, units: int, batch: int, directions: int, features: Features, parts: int | None
) -> None:
    size = sized(precision, gates, units, features)
    tile = measured.spread(size, H200, batch, directions)
    assert (tile and (tile.slice, tile.tiles, tile.wide, tile.parts)) == (parts and (32, 2, True, parts))
    if tile is not None:
        assert (tile.beside, tile.sided, tile.lull > 0) == (True, True, True)
        assert -(-batch // tile.rows) * directions <= tile.at_once(H200)
        assert grid.estimated(size, H200, batch, directions, "forward") == tile
    assert measured.spread(size, Chip((9, 0), 114), batch, directions) is None


def test_masks_by_gate_are_spread_too() -> None:
    size = sized("rounded", 4, 512, BY_GATE)
    tile = grid.estimated(size, H200, 128, 1, "forward")
    assert tile == measured.spread(size, H200, 128, 1)
    assert isinstance(tile, Spread)
    assert (tile.slice, tile.tiles, tile.groups, tile.wide, tile.parts) == (32, 2, 4, False, 1)


@pytest.mark.parametrize("name", ["rnn_tanh", "rnn_relu"])
def test_other_cells_and_chips_have_what_is_estimated(name: str) -> None:
    size = size_of(CELLS[name].graph, 128, 2)
    assert measured.forward(size, H200, 32, 1) is None
    for chip in (Chip((9, 0), 114), Chip((10, 0), 148), Chip((8, 0), 108)):
        tile = grid.estimated(sized("rounded", 4, 128), chip, 32, 1, "forward")
        assert measured.forward(sized("rounded", 4, 128), chip, 32, 1) is None
        assert not isinstance(tile, Tile) or (tile.splits, tile.pointwise) not in ((2, 2), (2, 4))


@pytest.mark.parametrize("units, share", [(64, 0.7), (128, 1.0)])
def test_their_steps_are_told_from_what_is_estimated(units: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides whether layers run beside each other, in tiles that are estimated to be the fastest."""
    size = sized("scaled", 4, units)
    known, unknown = (grid.step_time(size, H200, batch, 1, "forward") for batch in (32, 257))
    monkeypatch.setattr(measured, "forward", lambda *given: None)
    estimated = [grid.step_time(size, H200, batch, 1, "forward") for batch in (32, 257)]
    assert [known, unknown] == [share * estimated[0], estimated[1]]
