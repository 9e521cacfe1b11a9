"""The numbers of a kernel for every architecture, without a GPU: they fit, they are complete, and the kernel agrees."""

from typing import Any

import pytest
import torch

import whorl
from cells_for_tests import CELLS
from cubins import cubin
from whorl.cells import library
from whorl.engines.cuda import grid, source, tiling
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.layers import blocks_of
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import LARGEST_CLUSTER, SHARED, Chip, Size, Tile
from whorl.problem import Form

H200 = Chip((9, 0), 132)
CHIPS = [Chip(capability, multiprocessors) for capability in SHARED for multiprocessors in (1, 20, 132, 170)]
KINDS = ("forward", "backward")
LSTM = size_of(library.lstm.graph, 512, 2)
WIDTHS = [(2, False), (4, False), (4, True)]
"""Bytes of an element, and whether its products are exact."""
SIZES = [
    size_of(CELLS[name].graph, units, element, exact=exact)
    for name in ("lstm", "gru", "rnn_tanh") for units in (1, 16, 100, 509, 640) for element, exact in WIDTHS
]  # fmt: skip

needs_nvrtc = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", CHIPS, ids=str)
def test_every_tile_fits_the_chip_and_covers_the_layer(chip: Chip, kind: str) -> None:
    for size in SIZES:
        for tile in tiling.candidates(size, chip, kind):
            assert tile.shared <= chip.shared
            assert tile.cluster == 1 or chip.capability >= (9, 0)
            assert tile.cluster <= LARGEST_CLUSTER
            assert tile.cluster * tile.slice >= size.units
            assert tile.slice % 16 == 0
            assert 1 <= tile.warps <= 16
            assert tile.tiles % tile.subs == 0
            if kind == "forward":
                elements = 2 if tile.halves else 4 // size.element
                assert tile.splits * tile.depths * 8 * elements >= tile.cluster * tile.slice
                assert tile.warps == tile.slice // 16 * (tile.splits + tile.pointwise)


@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_pure_and_one_of_the_candidates(kind: str) -> None:
    for size in SIZES:
        for batch in (1, 7, 64, 300) if tiling.fits(size, H200, kind) else ():
            made = tiling.choose(size, H200, batch, 1, kind)
            assert made == tiling.choose(size, H200, batch, 1, kind)
            assert made in list(tiling.candidates(size, H200, kind))


def test_what_does_not_fit_has_no_tile() -> None:
    assert tiling.choose(LSTM._replace(units=1024), H200, 32, 1, "forward") is None
    assert tiling.choose(LSTM, Chip((7, 0), 80), 32, 1, "forward") is None
    assert not tiling.fits(LSTM, Chip((8, 0), 108), "backward")
    assert tiling.fits(LSTM._replace(units=64), Chip((8, 0), 108), "backward")


def test_clusters_resident_at_once_as_an_h200_says() -> None:
    assert [H200.resident(cluster) for cluster in (1, 2, 4, 8, 16)] == [132, 66, 30, 15, 7]


@pytest.mark.parametrize("units, batch, cluster", [(512, 32, 16), (128, 128, 4), (256, 512, 2), (32, 32, 1)])
def test_clusters_as_measured(units: int, batch: int, cluster: int) -> None:
    """The fastest of ten on an H200 or an H100, or within a tenth of it."""
    tile = tiling.choose(LSTM._replace(units=units), H200, batch, 1, "forward")
    assert tile is not None
    assert tile.cluster == cluster


PLAIN, MASK, BY_STEP = source.PLAIN, source.Features(mask=True), source.Features(noise=source.DRAWN)
ZONEOUT = source.Features(zoneout=(source.AT_RANDOM, source.AT_RANDOM))
MANY = ZONEOUT._replace(lengths=True, mask=True, reset=True, order=True, noise=source.DRAWN)
MEASURED = [  # kind, cell, features, element, units, batch: cluster, units of a block and warps that were the fastest
    ("forward", "lstm", PLAIN, 2, 128, 128, (4, 32, 12)), ("forward", "lstm", PLAIN, 2, 128, 512, (2, 64, 4)),
    ("forward", "lstm", PLAIN, 2, 256, 64, (8, 32, 12)), ("forward", "gru", PLAIN, 2, 384, 64, (8, 48, 12)),
    ("forward", "lstm", MANY, 2, 256, 128, (4, 64, 8)), ("forward", "lstm", MANY, 4, 256, 128, (8, 32, 12)),
    ("forward", "lstm", MANY, 2, 128, 128, (4, 32, 4)), ("forward", "lstm", MASK, 2, 512, 128, (16, 32, 12)),
    ("backward", "lstm", ZONEOUT, 2, 256, 128, (8, 32, 8)), ("backward", "lstm", MANY, 2, 256, 32, (16, 16, 4)),
    ("backward", "lstm", BY_STEP, 2, 256, 32, (16, 16, 8)), ("backward", "lstm", ZONEOUT, 2, 256, 32, (16, 16, 4)),
    ("backward", "lstm", ZONEOUT, 4, 256, 32, (16, 16, 8)), ("backward", "lstm", MASK, 4, 256, 32, (16, 16, 8)),
    ("backward", "lstm", source.Features(noise=source.BY_GATE), 4, 256, 128, (8, 32, 8)),
]  # fmt: skip


@pytest.mark.parametrize("kind, cell, features, element, units, batch, wanted", MEASURED)
def test_tiles_as_measured(
    kind: str, cell: str, features: source.Features, element: int, units: int, batch: int, wanted: tuple[int, int, int]
) -> None:
    """The fastest of three to nine on an H100 or H200, many options with a clip and peepholes; by 1 to 50 percent, or
    as fast as one that is spread."""
    tile = grid.estimated(size_of(CELLS[cell].graph, units, element, features), H200, batch, 1, kind)
    assert isinstance(tile, Tile)
    assert (tile.cluster, tile.slice, tile.warps) == wanted


def test_softplus_is_multiplied_as_scaled_float16_where_that_is_faster() -> None:
    """With TF32 products: 92 us and 96 (100 steps, an H200, an earlier text) with 256 units at batch 64."""
    cell = Form.from_json(whorl.LSTM(4, 256, activation="softplus")._form).cell
    for units, batch, halves in ((128, 32, False), (256, 64, True), (256, 128, True)):
        tile = tiling.choose(size_of(cell, units, 4), H200, batch, 1, "forward")
        assert tile is not None
        assert tile.halves == halves


@pytest.mark.parametrize(
    "batch, units, warps, subs",
    [(32, 512, 12, (2, 2)), (128, 512, 12, (3, 3)), (1, 512, 12, (2, 2)), (32, 128, 6, (1, 1))],
)
def test_warps_for_the_cell_as_measured(batch: int, units: int, warps: int, subs: tuple[int, int]) -> None:
    """They took the least time on an H200: 0.815 us a step beside 0.988, 1.85 beside 2.11, 0.47 beside 0.51.

    In bfloat16 and with TF32 products; with a sub-tile that no sequence reaches 0.94 beside 0.96, 1.06 and 1.16.  512
    units at batch 128 are spread (measured.py).
    """
    for element, count in zip((2, 4), subs, strict=True):
        tile = tiling.choose(size_of(library.lstm.graph, units, element), H200, batch, 1, "forward")
        assert tile is not None
        assert (tile.warps, tile.subs, tile.pointwise) == (warps, count, 2)
    found = grid.estimated(LSTM._replace(units=units), H200, batch, 1, "forward")
    assert isinstance(found, Spread if (batch, units) == (128, 512) else Tile)


@pytest.mark.parametrize(
    "name, units, element, features, apart",
    [("lstm", 512, 2, {}, True), ("lstm", 500, 4, {}, True), ("lstm", 512, 2, dict(mask=True), True),
     ("gru", 512, 2, {}, False), ("lstm", 256, 2, {}, False),
     ("lstm", 512, 2, dict(noise=source.BY_GATE), False), ("lstm", 512, 4, dict(noise=source.GIVEN), False)],
)  # fmt: skip
@pytest.mark.parametrize("batch", [1, 32, 64, 128])
def test_states_of_each_group_come_apart_where_that_was_measured_to_be_faster(
    name: str, units: int, element: int, features: dict[str, Any], apart: bool, batch: int
) -> None:
    """LSTM with 512 units, 0.90 us a step beside 1.00 with TF32 products at batch 32, but GRU 0.72 and 0.66 (H200)."""
    size = size_of(CELLS[name].graph, units, element, source.Features(**features))
    tile = tiling.choose(size, H200, batch, 1, "forward")
    assert tile is not None
    assert tile.arrivals == (tile.slice // 16 if apart else 1)


@pytest.mark.parametrize(
    "cluster, tiles, batch, directions, wanted",
    [(16, 1, 32, 1, (7, 4)), (16, 3, 128, 1, (7, 7)), (16, 1, 32, 2, (4, 4)), (16, 1, 1, 1, (1, 1)),
     (16, 1, 3, 1, (3, 1)), (16, 1, 8, 1, (4, 1)), (8, 1, 32, 1, (11, 4)), (4, 1, 32, 1, (4, 4)), (1, 1, 32, 1, (4, 4)),
     (16, 1, 128, 1, (16, 16))],
)  # fmt: skip
def test_clusters_share_a_batch_evenly(
    cluster: int, tiles: int, batch: int, directions: int, wanted: tuple[int, int]
) -> None:
    tile = Tile(cluster, 32, tiles, 1, 1, 8)
    assert tuple(tiling.parts(H200, batch, directions, tile, kind) for kind in KINDS) == wanted


def test_ragged_batches_get_sub_tiles_that_end_and_clusters_that_take_turns() -> None:
    ragged = LSTM._replace(units=512, ragged=True)
    for kind in KINDS:
        tile = tiling.choose(ragged, H200, 128, 1, kind)
        assert tile is not None
        assert (tile.subs, tile.rows) == (3, 24)
        one, whole = (
            tiling.step_time(size, H200, 128, 1, kind, tile) for size in (ragged, ragged._replace(ragged=False))
        )
        assert 0.7 * whole < one < 0.95 * whole
    turns = Tile(16, 32, 1, 8, 0, 8, splits=4, depths=8)  # 64 clusters of which 7 run at once
    one, whole = (
        tiling.step_time(size, H200, 512, 1, "forward", turns) for size in (ragged, ragged._replace(ragged=False))
    )
    assert 0.7 * whole < one < 0.8 * whole  # half of it, and the mean with the whole
    single = tiling.choose(ragged, H200, 8, 1, "forward")
    assert single is not None
    assert single.subs == 1  # a sub-tile without a sequence brings nothing


def test_no_cluster_has_more_sequences_than_its_tile_or_none() -> None:
    for cluster, tiles in ((2, 3), (8, 1), (16, 1), (16, 3)):
        tile = Tile(cluster, 32, tiles, 1, 1, 8)
        for batch in range(1, 400):
            parts = tiling.parts(H200, batch, 1, tile, "forward")
            share = -(-batch // parts)  # as the kernels compute it
            assert share <= tile.rows
            assert (parts - 1) * share < batch <= parts * share
            least = -(-batch // tile.rows)
            assert tiling.rounds(H200, batch, 1, tile) == -(-least // H200.resident(cluster))


@pytest.mark.parametrize(
    "name, exact, by_step",
    [("lstm", False, False), ("lstm", True, True), ("rnn_tanh", False, False), ("gru", False, False),
     ("gru", True, True), ("rnn_relu", False, True), ("rnn_relu", True, True)],
)  # fmt: skip
def test_what_float32_is_multiplied_as_float16(name: str, exact: bool, by_step: bool) -> None:
    """All but exact products with options; states have a scale at each step where they are exact or of any size."""
    cell, masked = CELLS[name].graph, source.Features(noise=source.GIVEN)
    size = size_of(cell, 512, 4, exact=exact)
    assert (size.halves, size.by_step) == (True, by_step)
    for kind in KINDS:
        tile = tiling.choose(size, H200, 32, 1, kind)
        assert tile is not None
        itself = not exact and name.startswith("rnn") and kind == "backward"  # 149 us of 155 (H200)
        assert (tile.halves, tile.by_step) == (not itself, not itself and by_step and kind == "forward")
    for features in (masked, source.Features(reset=True, reset_to=True)):
        optional = size_of(cell, 512, 4, features, exact)
        assert (optional.halves, optional.by_step) == (not exact, exact or by_step or features == masked)


@pytest.mark.parametrize(
    "units, batch, spread", [(512, 32, False), (512, 128, False), (640, 32, True), (768, 32, True), (1024, 128, True)]
)
def test_states_of_any_size_have_a_scale_at_each_step_in_a_cluster_and_spread(
    units: int, batch: int, spread: bool
) -> None:
    """A step of 512 units at batch 128 took 2.66 us in a cluster and 2.84 spread (an H100)."""
    form = Form.from_json(whorl.LSTM(4, units, activation="softplus")._form)
    tile = grid.choose(size_of(form.cell, units, 4), H200, batch, 1, "forward")
    assert isinstance(tile, Spread) == spread
    assert tile is not None
    assert tile.by_step


def test_small_layers_keep_their_gradients_as_tf32() -> None:
    for batch, units, halves in ((32, 128, False), (128, 128, False), (32, 512, True), (128, 512, True)):
        tile = tiling.choose(size_of(library.lstm.graph, units, 4), H200, batch, 1, "backward")
        assert tile is not None
        assert tile.halves == halves


FIXED = [
    ("lstm", 512, torch.bfloat16, 128), ("lstm", 127, torch.float16, 32), ("gru", 300, torch.bfloat16, 64),
    ("rnn_tanh", 640, torch.float16, 8), ("rnn_relu", 1, torch.bfloat16, 1), ("lstm", 16, torch.bfloat16, 300),
    ("lstm", 512, torch.float32, 128), ("gru", 1, torch.float32, 9),
]  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name, units, dtype, batch", FIXED, ids=str)
def test_kernels_compile_without_a_gpu(name: str, units: int, dtype: torch.dtype, batch: int, kind: str) -> None:
    """A static assertion in the kernel compares the tile's shared memory with the kernel's own."""
    cell = CELLS[name].graph
    write = source.forward if kind == "forward" else source.backward
    for exact in {False, dtype == torch.float32}:
        tile = tiling.choose(size_of(cell, units, dtype.itemsize, exact=exact), H200, batch, 1, kind)
        assert tile is not None
        code = cubin(write(cell, units, dtype, tile, True), "kernel", "sm_90a", flags(tile))
        assert source.kernel_name(kind, cell, units, dtype, tile).encode() in code


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100a", "sm_103a", "sm_120a"])
def test_other_architectures_compile_as_far_as_they_have_clusters(architecture: str, kind: str) -> None:
    """Kernels run on 9.0 alone so far; what is here keeps them from needing more than they must."""
    cell, name = library.lstm.graph, architecture.removeprefix("sm_").removesuffix("a")
    chip = Chip((int(name[:-1]), int(name[-1])), 100)
    tile = tiling.choose(size_of(cell, 40, 2), chip, 8, 1, kind)
    assert tile is not None
    assert tile.cluster == 1 or chip.capability >= (9, 0)
    write = source.forward if kind == "forward" else source.backward
    cubin(write(cell, 40, torch.bfloat16, tile, True), "kernel", architecture, flags(tile))
    for exact in (False, True):
        tile = tiling.choose(size_of(cell, 40, 4, exact=exact), chip, 8, 1, kind)
        assert tile is not None
        cubin(write(cell, 40, torch.float32, tile, True), "kernel", architecture, flags(tile))


@needs_nvrtc
def test_a_tile_that_disagrees_with_its_kernel_does_not_compile() -> None:
    tile = tiling.choose(LSTM, H200, 8, 1, "forward")
    wrong = Tile(**{**vars(tile), "shared": tile.shared + 16})
    with pytest.raises(Exception, match="tiling and kernel disagree"):
        cubin(source.forward(library.lstm.graph, 512, torch.bfloat16, wrong, True), "kernel", "sm_90a", flags(wrong))


def test_the_most_units_of_a_cluster_depend_on_bytes() -> None:
    for name, *mosts in [("lstm", 768, 768, 512), ("gru", 768, 768, 512), ("rnn_tanh", 1280, 1280, 1024)]:
        for (element, exact), most in zip(WIDTHS, mosts, strict=True):
            fitting = [
                units
                for units in range(16, 2048, 16)
                if all(
                    tiling.fits(size_of(CELLS[name].graph, units, element, exact=exact), H200, kind) for kind in KINDS
                )
            ]
            assert fitting[-1] == most, (name, element, exact)


def test_what_is_saved_of_each_gate() -> None:
    assert source.saving(library.lstm.graph) == ((0, 1, 2, 3), ())
    assert source.saving(library.gru.graph) == ((0, 1, -1), (2,))
    assert source.saving(library.rnn_tanh.graph) == ((0,), ())
    assert source.saving(CELLS["four_states"].graph).apart == ()


def test_the_size_of_a_cell() -> None:
    assert size_of(library.gru.graph, 5, 2) == Size(
        5, gates=3, recurrent=3, states=1, vectors=0, apart=1, element=2, gate=2
    )
    assert size_of(library.rnn_relu.graph, 5, 2).gate == 4


def test_where_the_gradients_of_recurrent_gates_lie() -> None:
    assert blocks_of(source.saving(library.lstm.graph)) == [(False, 0, 4, 0)]
    assert blocks_of(source.saving(library.gru.graph)) == [(False, 0, 2, 0), (True, 0, 1, 2)]
    mixed = source.Saving(sums=(-1, 0, -1, 2, 3), apart=(1,))
    assert blocks_of(mixed) == [(False, 1, 1, 0), (True, 0, 1, 1), (False, 3, 2, 2)]


class Asked:
    """A kernel that notes what it is asked for."""

    shared = 0

    def alone(self, shared: int) -> "Asked":
        self.shared = shared
        return self


@pytest.mark.parametrize("capability, batch, alone", [((9, 0), 128, True), ((9, 0), 512, False), ((8, 0), 8, False)])
def test_blocks_that_have_a_multiprocessor_each_ask_for_it(
    capability: tuple[int, int], batch: int, alone: bool
) -> None:
    """16 clusters of 4 blocks do, 64 do not; where nothing begins early none asks."""
    chip, kernel, tile = Chip(capability, 132), Asked(), Tile(4, 32, 1, 2, 20_000, 12, splits=4, depths=2, pointwise=2)
    grid.Grid(kernel, tile, LSTM._replace(units=128), chip, batch, 1, "forward")  # type: ignore[arg-type]
    assert (2 * (kernel.shared + 1024) > chip.shared + 1024) == alone
