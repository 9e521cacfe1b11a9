"""Steps with means and products inside on engine `persistent`, run on the host by `emulation`."""

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from cells_for_tests import of_a_constant
from comparison import error
from cubins import cubin
from emulation import H200 as GPU
from emulation import emulated
from engine_cases import CELLS, DROPS, FORMS, WRAPPED, Case, assert_agrees, in_dtype, results
from test_machine_code import H200, disassembled, listed, needs_tools, time_loop
from thinned import thinned
from whorl.bench.baseline import TF32_EPS
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, var
from whorl.cells.graphs import Evaluator, at_once
from whorl.cells.lower import CUDA, stages
from whorl.engines.cuda import grid, source, spreading, staging
from whorl.engines.cuda.persistent import Persistent
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import by_rounds, spreadable, staged, steps
from whorl.engines.cuda.tiling import Chip, Size, Tile
from whorl.problem import Form, Problem

A100 = Chip((8, 0), 108)
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@whorl.cell(gates="a b", states="h")
def together(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Two products and a mean that are exchanged at once, and nothing else."""
    return dict(h=whorl.tanh(x.a + r.a(0.5 * s.h) + r.b(s.h * x.b) * whorl.mean(s.h)))


@whorl.cell(gates="a b", states="h")
def several_of_a_gate(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """One gate's weights times the state and two operands, of which one has the gradient of another gate's."""
    f = whorl.sigmoid(x.a + r.a)
    return dict(h=whorl.tanh(x.b + r.a(f * s.h) - 0.5 * r.a(s.h * s.h + 0.1) + r.b(f)))


@whorl.cell(gates="a", states="h")
def one_gradient(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Two products of a gate with the same gradient, one of a constant; none with the first state."""
    return dict(h=whorl.tanh(x.a + r.a(0.5 * s.h) + r.a(0.3)))


@whorl.cell(gates="n", states="h")
def of_a_condition(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.n + r.n(whorl.where(s.h > 0, 1.0, -1.0))))


STAGED = {name: graph for name, graph in {**CELLS, **WRAPPED}.items() if staged(graph)}
STAGED["all of LSTM's layer norm"] = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("x", "r"))[0]
STAGED["layer norm of r and c"] = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("r",))[0]
STAGED["together"] = together.graph
STAGED |= {cell.name: cell.graph for cell in (several_of_a_gate, one_gradient)}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@needs_compiler
@pytest.mark.parametrize("name", STAGED)
def test_a_step_of_several_stages(name: str, folder: Path) -> None:
    dtype = DTYPES[[*STAGED].index(name) % 3]
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], Case(dict(directions=2), time=4, batch=9, units=37), dtype)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("given, by gate", {}),
    ("given, by step, packed", {}),
    ("recurrent dropout by gate", dict(zoneout=(0.3, 0.2))),
    ("reset to", dict(recurrent_dropout=0.4, recurrent_dropout_mode="step", zoneout=(0.3, 0.0))),
    ("mask and lengths", dict(zoneout=(0.1, 0.3))),
    ("layers", {}),
]


@needs_compiler
@pytest.mark.parametrize("form, changes", OPTIONS)
def test_options_of_a_cell_with_means(form: str, changes: dict[str, Any], folder: Path) -> None:
    case = replace(FORMS[form], time=4, form=FORMS[form].form | changes)
    with emulated(folder):
        assert_agrees("persistent", STAGED["layer_norm_lstm"], case, DTYPES[len(form) % 3])


@needs_compiler
@pytest.mark.parametrize("form", ["reset to", "reset, packed", "mask and lengths", "no bias"])
def test_options_of_a_cell_with_products(form: str, folder: Path) -> None:
    case = replace(FORMS[form], time=4, form=FORMS[form].form | dict(zoneout=(0.3,)))
    with emulated(folder):
        assert_agrees("persistent", STAGED["gru_before"], case, DTYPES[len(form) % 3])


WITH_PRODUCTS = ["gru_before", "mgu", "together", "layer norm and a product", "several_of_a_gate", "one_gradient"]
SPREADABLE = [name for name in STAGED if spreadable(STAGED[name])]
TILES = [  # forward and backward, as `spreading` takes them: one or two groups of rows, parts in turn, rows by rows
    ((16, 1, 1, 8, 1), (16, 1, 1, 1, 8)),
    ((8, 2, 1, 8, 2), (16, 2, 1, 2, 8)),
    ((32, 3, 1, 8, 1), (16, 3, 3, 1, 12)),
    ((16, 1, 2, 8, 4), (64, 1, 2, 2, 8)),
]


def spread(monkeypatch: pytest.MonkeyPatch, ahead: tuple[int, ...], back: tuple[int, ...], **more: bool) -> None:
    """Every layer is spread over blocks that exchange through L2, as layers that no cluster holds."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread:
        given, make = (ahead, spreading.forward) if way == "forward" else (back, spreading.backward)
        made = make(size, *given, chip.shared, **more)
        assert made is not None
        assert made.collected == more.get("collected", False)
        return made

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)  # several launches


def test_steps_with_recurrent_weights_are_spread() -> None:
    assert {*STAGED} - {*SPREADABLE} == {"ind_rnn"}


@needs_compiler
@pytest.mark.parametrize("place, name", [*enumerate(SPREADABLE)])
def test_a_step_of_several_stages_where_blocks_exchange_through_l2(
    place: int, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(monkeypatch, *TILES[place % 4])
    case = Case(dict(directions=2), time=5, batch=27, units=(37, 45, 70)[place % 3])
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], case, DTYPES[place % 3])


def normal(value: Any) -> Any:
    away = value - whorl.mean(value)
    return away * whorl.rsqrt(whorl.mean(away * away) + 1e-5)


@whorl.cell(gates="a n", states="h")
def of_an_unread_gate(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Nothing reads r.a, which comes before what is read."""
    z = whorl.sigmoid(x.a)
    return dict(h=z * s.h + (1 - z) * whorl.tanh(normal(x.n + r.n)))


@whorl.cell(gates="c d", states="h")
def beside_a_constant(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A product inside the step forward, and none backward."""
    return dict(h=whorl.tanh(x.d + r.d(0.5) + x.c + r.c))


@whorl.cell(gates="c d", states="h")
def of_both(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """The same, of a gate that is multiplied with the state, too."""
    return dict(h=whorl.tanh(x.c + r.c + r.d(0.5) + x.d + r.d))


@needs_compiler
@pytest.mark.parametrize("place, cell", [*enumerate([of_an_unread_gate, beside_a_constant, of_both])])
def test_results_of_a_step_are_those_of_their_gates(
    place: int, cell: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(monkeypatch, *TILES[place])
    with emulated(folder):
        assert_agrees("persistent", cell.graph, Case(time=3, batch=5, units=18), DTYPES[place])


@needs_compiler
@pytest.mark.parametrize("name, place", thinned(2, ["layer_norm_lstm", "gru_before", "several_of_a_gate"], range(4)))
def test_words_come_round_in_their_places(place: int, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than the rings of states, and of what enters each product, have buffers."""
    spread(monkeypatch, *TILES[place])
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], Case(time=35, batch=9, units=67), torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("seed", range(10))
def test_random_steps_with_products_where_blocks_exchange_through_l2(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size, in tiles of any kind: several rounds, launches, parts in turn, threads of several sequences."""
    draw = random.Random(seed)
    name, dtype = draw.choice(WITH_PRODUCTS), draw.choice(DTYPES)
    form = dict(directions=draw.choice((1, 2)), layers=draw.choice((1, 1, 2)), bias=draw.random() < 0.8)
    sizes = dict(time=draw.randint(1, 6), batch=draw.randint(1, 40), units=draw.randint(2, 90))
    case = Case(form, initial=draw.random() < 0.6, **sizes)

    def chosen(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Spread:
        fitting = [tile for tile in spreading.candidates(size, chip, kind) if tile.rows <= 32]
        tile = random.Random(f"{seed} {kind}").choice(fitting)
        print(name, dtype, case, kind, tile)
        return tile

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], case, dtype)


def test_one_block_collects_where_all_would_read_much() -> None:
    cell = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("r",))[0]
    sizes = {
        (1500, 20): (True, True),
        (1024, 128): (False, True),
        (1024, 32): (False, False),
        (512, 128): (False, False),
    }
    for (units, batch), wanted in sizes.items():
        tiles = [grid.estimated(size_of(cell, units, 2), H200, batch, 1, kind) for kind in ("forward", "backward")]
        assert [isinstance(tile, Spread) and tile.collected for tile in tiles] == [*wanted]
        assert [isinstance(tile, Spread) and spreading.launches(H200, batch, 1, tile) for tile in tiles] == [1, 1]


@needs_compiler
@pytest.mark.parametrize(
    "name, ahead, back, more, units, batch",
    [
        ("layer_norm_lstm", (8, 1, 1, 8, 1), (8, 2, 1, 1, 8), dict(collected=True), 67, 9),
        ("all of LSTM's layer norm", (16, 1, 1, 8, 4), (16, 2, 1, 1, 8), dict(wide=True), 67, 9),  # of four warps
        ("layer_norm_lstm", (16, 2, 2, 8, 4), (16, 2, 2, 2, 8), dict(wide=True), 67, 9),
        ("all of LSTM's layer norm", (8, 1, 1, 8, 4), (8, 2, 1, 1, 8), dict(wide=True, collected=True), 67, 9),
        # backward the threads of a sequence share eight sums out
        ("layer norm of r and c", (16, 1, 1, 8, 4), (16, 2, 1, 1, 8), dict(aside=True, collected=True), 133, 9),
        ("layer norm of r and c", (16, 1, 1, 8, 4), (16, 2, 1, 1, 8), dict(collected=True), 130, 5),
        ("layer norm of r and c", (32, 1, 1, 8, 1), (32, 1, 1, 1, 8), {}, 67, 9),
        # 14 sums of 8 blocks: fewer blocks than sums
        ("layer_norm_lstm", (32, 1, 1, 8, 4), (32, 2, 1, 1, 8), dict(collected=True), 233, 5),
        # and what no step changes stays in shared memory
        ("layer norm of r and c", (16, 1, 2, 8, 4), (16, 1, 3, 1, 8), dict(aside=True), 67, 27),
        ("all of LSTM's layer norm", (16, 1, 1, 8, 4), (16, 2, 1, 1, 8), dict(aside=True, wide=True), 67, 9),
        ("layer_norm_lstm", (16, 1, 1, 8, 4), (32, 1, 1, 1, 8), dict(aside=True), 45, 9),
    ],
)
def test_ways_to_exchange_means(
    name: str, ahead: tuple[int, ...], back: tuple[int, ...], more: dict[str, bool], units: int, batch: int,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spread(monkeypatch, ahead, back, **more)
    case = Case(time=4, batch=batch, units=units)
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], case, torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("form, changes", OPTIONS)
def test_options_of_a_cell_with_means_where_blocks_exchange_through_l2(
    form: str, changes: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(monkeypatch, *TILES[0])
    case = replace(FORMS[form], time=4, form=FORMS[form].form | changes)
    with emulated(folder):
        assert_agrees("persistent", STAGED["layer_norm_lstm"], case, DTYPES[len(form) % 3])


def _tile_for(form: str, place: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """One of the tiles; behind masks by gate, which are the default, blocks have 16 units or more."""
    by_gate = form in DROPS and "recurrent_dropout_mode" not in FORMS[form].form
    return TILES[place % 4 - (by_gate and place % 4 == 1)]


@needs_compiler
@pytest.mark.parametrize("place, form", [*enumerate(name for name in FORMS if name != "one of each")])
def test_options_of_a_cell_with_products_where_blocks_exchange_through_l2(
    place: int, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(monkeypatch, *_tile_for(form, place))
    case = replace(FORMS[form], time=4, batch=19, units=37, form=dict(zoneout=(0.3,)) | FORMS[form].form)
    with emulated(folder):
        assert_agrees("persistent", STAGED["gru_before"], case, DTYPES[place % 3])


@needs_compiler
@pytest.mark.parametrize("name, form", thinned(
    2, ["mgu", "together", "layer norm and a product", "several_of_a_gate", "one_gradient"],
    ["given, by gate", "given, by step", "given, shared", "recurrent dropout by gate"],
))  # fmt: skip
def test_masks_of_products_where_blocks_exchange_through_l2(
    name: str, form: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = len(name) + len(form)
    spread(monkeypatch, *_tile_for(form, place))
    with emulated(folder):
        case = replace(FORMS[form], time=4, batch=9, units=37)
        assert_agrees("persistent", STAGED[name], case, DTYPES[place % 3])


def assert_near_in_tf32(cell: Graph, case: Case, folder: Path) -> None:
    """Outputs and gradients of the kernels on the host with TF32 products, which are not those of float32."""
    made, call = case.build(cell)
    call = in_dtype(call, torch.float32)
    truth = results(made, in_dtype(call, torch.float64), "reference", False)
    with emulated(folder, tf32=True):
        got = results(made, call, "persistent", False)
    errors = {name: error(got[name], truth[name]) for name in truth}
    assert {name: one for name, one in errors.items() if not one <= 4 * TF32_EPS} == {}
    assert max(errors.values()) > 1e-5


@needs_compiler
@pytest.mark.parametrize(
    "name, form, changes, place",
    [
        ("all of LSTM's layer norm", "layers", {}, 0),
        ("layer_norm_lstm", "mask and lengths", dict(zoneout=(0.1, 0.3)), 3),
        ("layer_norm_lstm", "recurrent dropout by gate", {}, 2),
        ("reset before", "layers", {}, 0),
        ("reset before", "mask and lengths", dict(zoneout=(0.3,)), 3),
        ("reset before", "recurrent dropout by gate", {}, 2),
        ("reset before", "recurrent dropout, shared", {}, 1),
        ("reset before", "recurrent dropout by step", {}, 3),
        ("reset before", "reset to", {}, 2),
    ],
)
def test_steps_where_tf32_is_multiplied_as_float16(
    name: str, form: str, changes: dict[str, Any], place: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread(monkeypatch, *TILES[place])
    case = replace(FORMS[form], time=4, batch=9, units=37, form=FORMS[form].form | changes)
    assert_near_in_tf32(STAGED[name], case, folder)
    for way in ("forward", "backward"):
        tile = grid.choose(size_of(STAGED[name], 37, 4), H200, 9, 1, way)
        assert isinstance(tile, Spread)
        assert tile.halves


def in_stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tile]:
    """Every layer exchanges its means within clusters; the tiles, as they are chosen."""
    chosen: dict[str, Tile] = {}

    def choose(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Tile:
        assert size.staged is not None
        every = staging.likely(size.staged, size, chip, batch, directions, kind)
        chosen[kind] = next(tile for tile in every if not tile.of_sequences and tile.cluster > 1)
        return chosen[kind]

    monkeypatch.setattr(grid, "choose", choose)
    return chosen


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["layer norm of r and c", "every option of LSTM", "layer_norm_lstm"])
def test_means_that_a_cluster_exchanges(
    name: str, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = in_stages(monkeypatch)
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], Case(dict(directions=2), time=4, batch=9, units=37), dtype)
    assert {*chosen} == {"forward", "backward"}


@needs_compiler
@pytest.mark.parametrize(
    "name, form, changes, units",
    [
        ("all of LSTM's layer norm", "layers", {}, 37),
        ("layer_norm_lstm", "mask and lengths", dict(zoneout=(0.1, 0.3)), 130),
        ("layer_norm_lstm", "recurrent dropout by gate", {}, 37),
        ("layer_norm_lstm", "reset to", {}, 37),
        ("reset before", "layers", {}, 130),
        ("reset before", "mask and lengths", dict(zoneout=(0.3,)), 37),
        ("reset before", "recurrent dropout by gate", {}, 130),
        ("reset before", "recurrent dropout, shared", {}, 37),
        ("reset before", "recurrent dropout by step", {}, 37),
        ("reset before", "reset to", {}, 37),
    ],
)
def test_steps_in_a_cluster_where_tf32_is_multiplied_as_float16(
    name: str, form: str, changes: dict[str, Any], units: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for backward with products inside, which multiplies TF32 itself."""
    chosen = in_stages(monkeypatch)
    case = replace(FORMS[form], time=4, batch=9, units=units, form=FORMS[form].form | changes)
    assert_near_in_tf32(STAGED[name], case, folder)
    assert {kind: tile.halves for kind, tile in chosen.items()} == {"forward": True, "backward": name != "reset before"}


def test_a_mean_and_its_variance_take_one_exchange_and_so_do_their_gradients() -> None:
    made = steps(STAGED["all of LSTM's layer norm"])
    assert (made.forward.exchanges, made.backward.exchanges) == (2, 1)
    assert [it.moments for it in made.forward.reductions] == [True] * 3


def test_backward_computes_ahead_what_takes_long_and_needs_no_gradient() -> None:
    ahead, stages_after = steps(STAGED["all of LSTM's layer norm"]).backward.parted.split("void stage_0(")
    slow = re.compile(r"\b(logistic|hyperbolic|tanhf?|rsqrtf?|expf?)\(")
    assert len(slow.findall(ahead)) >= 7  # three sigmoids, two tangents, two roots
    assert slow.findall(stages_after) == []


@pytest.mark.parametrize(
    "element, expected",
    [(2, {("forward", 128), ("backward", 128)}), (4, {("forward", 128), ("backward", 128)})],
    ids=["bfloat16", "tf32"],
)
def test_layer_norm_is_spread_where_that_is_faster(element: int, expected: set[tuple[str, int]]) -> None:
    """In two bytes as measured; with TF32 products, which alone are of float16 there, by its estimate."""
    cell = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("r",))[0]
    size = size_of(cell, 512, element)
    chosen = {(kind, batch): grid.estimated(size, H200, batch, 1, kind)
              for kind in ("forward", "backward") for batch in (32, 128)}  # fmt: skip
    spread = {where for where, tile in chosen.items() if isinstance(tile, Spread)}
    assert spread == expected
    slices = {where[0]: tile.slice for where, tile in chosen.items() if tile is not None and where in spread}
    assert slices == dict(forward=32 if element == 2 else 64, backward=32 if element == 2 else 64)
    assert all(tile is not None and tile.halves == (element == 4) for where, tile in chosen.items() if where in spread)


@pytest.mark.parametrize("units, batch", [(1500, 20), (650, 20), (1024, 32)])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_registers_of_layer_norm_hold_weights(units: int, batch: int, kind: str) -> None:
    """What no step changes stays in shared memory: 25 operands of weights in a warp's registers, not 18, at 1,500."""
    size = size_of(STAGED["layer norm of r and c"], units, 2)
    tile = spreading.choose(size, H200, batch, 1, kind)
    assert tile is not None
    assert tile.aside
    assert tile.resident >= (25 if kind == "forward" else 23)


def test_a_thread_of_two_sequences_keeps_what_no_step_changes_in_registers() -> None:
    """LSTM, 1,024 units at batch 128: else 7.4 us a step forward in place of 7.2."""
    tile = spreading.choose(size_of(STAGED["layer norm of r and c"], 1024, 2), H200, 128, 1, "forward")
    assert tile is not None
    assert not tile.aside
    assert 8 * tile.tiles * tile.slice // 2 == 2 * 32 * tile.warps


def test_means_of_what_is_affine_in_means_are_found_at_once() -> None:
    a, b = var("x.a"), var("x.b")
    first = whorl.mean(a * b)
    second = whorl.mean([b * first - a, whorl.where(a < b, first / b, 3.0 * b) + first])
    third = whorl.mean((second * a - b * first) * b + second)
    squared = whorl.mean(first * third * a)  # not affine: left as it is
    outputs = [a * second, third - b, squared]
    torch.manual_seed(2)
    values = {name: torch.rand(3, 5, dtype=torch.float64) + 0.2 for name in ("x.a", "x.b")}

    def computed(graph: Sequence[Expr]) -> list[torch.Tensor]:
        made = Evaluator(graph)
        return made(values, made.constants(values["x.a"]))

    for one, other in zip(computed(outputs), computed(at_once(outputs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)

    def exchanges(graph: Sequence[Expr]) -> int:
        return len(stages({str(place): node for place, node in enumerate(graph)}, CUDA)) - 1

    assert (exchanges(outputs[:2]), exchanges(at_once(outputs[:2]))) == (3, 1)
    assert (exchanges(outputs), exchanges(at_once(outputs))) == (4, 2)


SOURCES = """
import hashlib
import torch
from engine_cases import CELLS
from test_staged import STAGED
from whorl.engines.cpu import generate
from whorl.engines.cuda import grid, source, stepwise_source
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.tiling import Chip

for name, cell in (CELLS | STAGED).items():
    beside = [make(cell, torch.float32) for make in (stepwise_source.source, stepwise_source.stream)]
    others = generate.source(cell), *beside
    print(name, hashlib.sha256(repr(others).encode()).hexdigest())
    for kind in ("forward", "backward"):
        tile = grid.choose(size_of(cell, 64, 2), Chip((9, 0), 132), 32, 1, kind)
        text = getattr(source, kind)(cell, 64, torch.bfloat16, tile, True)
        print(name, kind, hashlib.sha256(text.encode()).hexdigest())
"""


def test_each_process_makes_the_same_source() -> None:
    """The store finds a kernel by its source, so no order of a set may be in it."""
    words = [sys.executable, "-c", SOURCES]
    given = [os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)} for seed in "12"]
    made = [subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout for env in given]
    first, *others = (text.splitlines() for text in made)
    assert len(first) == 3 * len(CELLS | STAGED)
    assert all(other == first for other in others)


def test_what_is_exchanged_together_counts_once() -> None:
    made = steps(together.graph)
    assert (made.leaves, len(made.forward.rounds), made.forward.exchanges) == (0, 2, 1)


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name", ["all of LSTM's layer norm", "reset before"])
def test_what_one_cluster_does_not_hold_is_spread(name: str, kind: str) -> None:
    assert isinstance(grid.choose(size_of(STAGED[name], 1024, 2), H200, 32, 1, kind), Spread)


@pytest.mark.parametrize(
    "units, batch, element, expected",
    [
        (256, 128, 2, (Tile, Tile)),
        (512, 32, 2, (Tile, Tile)),
        (512, 128, 2, (Tile, Tile)),
        (768, 32, 2, (Tile, Tile)),
        (768, 128, 2, (Spread, Tile)),
        (256, 128, 4, (Tile, Tile)),
        (512, 32, 4, (Tile, Tile)),
        (512, 128, 4, (Spread, Spread)),
    ],
)
def test_products_inside_a_step_are_spread_where_that_is_faster(
    units: int, batch: int, element: int, expected: tuple[type, type]
) -> None:
    """As measured: grid.py has the figures."""
    size = size_of(STAGED["reset before"], units, element)
    assert tuple(type(grid.estimated(size, H200, batch, 1, kind)) for kind in ("forward", "backward")) == expected


@pytest.mark.parametrize(
    "units, batch, element, ahead, back",
    [  # units of a block, sequences at a time and their parts; backward blocks that are gathered
        (1024, 32, 2, (32, 1, 1), (32, 1, 1, 8)),
        (1024, 128, 2, (32, 4, 1), (32, 4, 1, 8)),
        (1024, 32, 4, (32, 1, 1), (32, 1, 1, 8)),
        (1024, 128, 4, (32, 4, 1), (32, 4, 1, 8)),
        (1536, 32, 2, (24, 2, 1), (32, 2, 1, 12)),
        (2048, 64, 2, (16, 2, 4), (16, 2, 4, 16)),
    ],
)
def test_products_inside_a_step_have_the_tiles_that_took_the_least_time(
    units: int, batch: int, element: int, ahead: tuple[int, ...], back: tuple[int, ...]
) -> None:
    """On an H100, of 4 to 19: 3.3 and 5.3 us a step, 6.7 and 11.0, with TF32 products 3.5 and 6.7, 7.3 and 12.9; then
    5.3 and 8.1, 20.2 and 19.2."""
    size = size_of(STAGED["reset before"], units, element)
    tile, other = (spreading.choose(size, H200, batch, 1, kind) for kind in ("forward", "backward"))
    assert tile is not None
    assert other is not None
    assert (tile.slice, tile.tiles, tile.subs) == ahead
    assert (other.slice, other.tiles, other.subs, other.gathered) == back


def test_weights_of_gates_in_the_same_products_lie_beside_each_other() -> None:
    assert by_rounds(steps(STAGED["reset before"])) == {(0,): (0, 1), (1,): (2,)}
    assert by_rounds(steps(several_of_a_gate.graph)) == {(0, 1, 2): (0,), (3,): (1,)}
    assert by_rounds(steps(STAGED["gru_d"])) == {(1,): (0, 1), (2,): (2,)}


def test_a_mean_of_other_squares_is_no_variance() -> None:
    @whorl.cell(gates="n", states="h")
    def odd(x: Any, r: Any, s: Any) -> dict[str, Any]:
        apart = r.n - whorl.mean(x.n)
        return dict(h=whorl.tanh(apart * whorl.mean(apart * apart)))

    assert not any(it.moments for it in steps(odd.graph).forward.reductions)


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(
    "name, units, batch",
    [
        ("layer norm of r and c", 512, 128),
        ("layer norm of r and c", 256, 32),
        ("layer norm of r and c", 1024, 32),
        ("layer norm of r and c", 1500, 20),
        ("layer norm of r and c", 650, 20),
        ("reset before", 512, 128),
        ("reset before", 1024, 32),
        ("reset before", 1024, 128),
        ("reset before", 1536, 32),
        ("mgu", 1024, 32),
    ],
)
def test_nothing_is_spilled_or_fenced_in_the_time_loop(
    name: str, units: int, batch: int, kind: str, tmp_path: Path
) -> None:
    cell, dtype = STAGED[name], torch.bfloat16
    tile = grid.choose(size_of(cell, units, 2), H200, batch, 1, kind)
    assert tile is not None
    text = (source.forward if kind == "forward" else source.backward)(cell, units, dtype, tile, True)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []
    # through L2 a warp waits for means together: threads apart take hundreds of cycles for each shuffle after
    # (VOTEU is no such wait: before instructions that a warp computes once, it asks whether any thread wants them)
    # and, where much arrives for a product, for the first of it
    if not (isinstance(tile, Spread) and cell.products):
        assert any(re.search(r"\bVOTE\b", line) for line in loop) == isinstance(tile, Spread)
    # where blocks exchange through L2 all threads fence once in a while (exchange.cu), at one place
    rings = isinstance(tile, Spread) and (kind == "forward" or tile.gathered > 1)
    # (MEMBAR.ALL.CTA is of the block: what four warps multiply is shown to the tensor cores)
    assert sum("MEMBAR" in line and "MEMBAR.ALL.CTA" not in line for line in loop) == rings


@needs_tools
@pytest.mark.parametrize(
    "kind, problem",
    thinned(
        2,
        ["forward", "backward"],
        [
            (H200, "mgu", 1024, 128, "bf16"),
            (H200, "mgu", 1536, 32, "bf16"),
            (H200, "reset before", 1024, 32, "tf32"),
            (H200, "reset before", 1024, 128, "tf32"),
            (H200, "reset before", 1024, 32, "fp32"),
            (A100, "reset before", 1024, 32, "bf16"),
            (A100, "reset before", 1536, 32, "bf16"),
            (A100, "reset before", 1024, 32, "tf32"),
            (A100, "mgu", 1536, 32, "bf16"),
        ],
    ),
)
def test_few_words_are_spilled_of_products_through_l2(
    kind: str, problem: tuple[Chip, str, int, int, str], tmp_path: Path
) -> None:
    chip, name, units, batch, precision = problem
    cell, dtype = STAGED[name], torch.bfloat16 if precision == "bf16" else torch.float32
    tile = grid.estimated(size_of(cell, units, dtype.itemsize, exact=precision == "fp32"), chip, batch, 1, kind)
    assert isinstance(tile, Spread)
    text = (source.forward if kind == "forward" else source.backward)(cell, units, dtype, tile, True)
    lines = listed(cubin(text, "kernel", chip.architecture, flags(tile)), tmp_path / "kernel.cubin")
    assert len([line for line in time_loop(lines) if re.search(r"\b(LDL|STL)\b", line)]) <= 16


@needs_tools
def test_a_mean_and_a_variance_travel_in_8_bytes_forward(tmp_path: Path) -> None:
    """Those of r and of c to 8 blocks at a time, and the state to each in words of 4; four numbers take 16."""
    for name, packs in (("layer norm of r and c", ["64", "64"]), ("all of LSTM's layer norm", ["128", "64"])):
        cell = STAGED[name]
        tile = staging.forward(cell, size_of(cell, 256, 2), 8, 1, 2, H200.shared)
        assert tile is not None
        text = source.forward(cell, 256, torch.bfloat16, tile, True)
        loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
        assert re.findall(r"\bSTAS(?:\.(\d+))? ", "\n".join(loop)) == [*packs, *[""] * 8]


def test_where_there_are_no_clusters_no_tile_has_any() -> None:
    for cell in (STAGED["reset before"], STAGED["layer norm"]):
        for kind in ("forward", "backward"):
            fitting = staging.fitting(cell, size_of(cell, 128, 2), A100, kind)
            assert {tile.cluster for tile in fitting} == {1}


@needs_compiler
@pytest.mark.parametrize("name, form", thinned(3, WITH_PRODUCTS, DROPS))
def test_recurrent_dropout_of_a_cell_with_products(name: str, form: str, folder: Path) -> None:
    """A mask, or that of its gate, multiplies what enters each product, those inside the step too."""
    case = replace(FORMS[form], time=4, batch=9, units=37)
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], case, DTYPES[(len(form) + len(name)) % 3])


@pytest.mark.parametrize("cell", [of_a_condition, of_a_constant])
def test_masks_of_a_product_of_what_has_no_gradient(cell: Any) -> None:
    """The kernels make a mask's gradient of a product's operand where they make that of the operand."""
    held = Form(cell.graph, 5, 11, recurrent_dropout_mode="shared")
    given = Problem(held, GPU, torch.bfloat16, 4, 9, gradient=True, extras=("dropout_masks",))
    (reason,) = Persistent().obstacles(given)
    assert f"inside the step of {cell.name} has no gradient" in reason
    for other in (
        replace(given, constants=("noise",)), replace(given, extras=()),
        replace(given, form=replace(held, cell=several_of_a_gate.graph)),
        replace(given, form=replace(held, cell=one_gradient.graph)),
    ):  # fmt: skip
        assert Persistent().obstacles(other) == []
