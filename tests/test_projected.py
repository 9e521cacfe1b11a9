"""Projections on engine `persistent`: the error rule, on the host's emulation of the kernels and on an NVIDIA GPU."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from anew import made_anew
from comparison import error, in_a_graph
from emulation import CHIP, H200, emulated
from engine_cases import CELLS, WRAPPED, Case, assert_agrees, in_dtype, results
from test_machine_code import disassembled, needs_tools, time_loop
from test_staged import TILES, spread
from whorl.bench.baseline import TF32_EPS
from whorl.cells.cell import Graph
from whorl.engines.cuda import aligned, grid, projected, source, spreading
from whorl.engines.cuda.persistent import Persistent, most_units
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.projected_inside import projecting, with_product
from whorl.engines.cuda.source import Features
from whorl.errors import CellError
from whorl.problem import Form, Problem

CASES = {
    "plain": Case({}, initial=False),
    "given states": Case({"layers": 2, "directions": 2}),
    "no bias, dropout": Case({"layers": 3, "bias": False, "dropout": 0.4}),
    "lengths": Case({"layers": 2, "directions": 2}, initial=False, marks=("lengths",)),
    "mask and lengths": Case({"layers": 2}, initial=False, marks=("mask", "lengths")),
    "reset": Case({"layers": 2, "directions": 2}, initial=False, marks=("reset",)),
    "packed": Case({"directions": 2}, initial=False, packed=True),
    "one step": Case({"directions": 2}, time=1),
    "recomputed": Case({"memory": "recompute"}),
}
GATE, SHARED, STEP = ({"recurrent_dropout": 0.4, "recurrent_dropout_mode": mode} for mode in ("gate", "shared", "step"))
INSIDE = {  # where the projection is a product inside the step
    "dropout by gate": Case(GATE | {"directions": 2}),
    "dropout by gate, packed": Case(GATE | {"zoneout": (0.3, 0.2)}, packed=True),
    "dropout, shared": Case(SHARED, marks=("lengths",)),
    "dropout by step": Case(STEP | {"layers": 2, "directions": 2}, marks=("mask",)),
    "all dropped": Case({"recurrent_dropout": 1.0, "input_dropout": 1.0}),
    "given by gate": Case({"directions": 2}, given=("input by gate", "recurrent", "zoneout"), marks=("mask",)),
    "given, shared": Case(SHARED | {"layers": 2}, given=("input", "recurrent"), packed=True),
    "given by step": Case({"recurrent_dropout_mode": "step"}, given=("recurrent", "zoneout"), marks=("lengths",)),
    "given by gate, layers": Case({"layers": 2, "directions": 2}, given=("input by gate", "recurrent")),
    "zoneout": Case({"zoneout": (0.3, 0.2), "layers": 2, "directions": 2}, sequences=True),
    "zoneout, evaluated": Case({"zoneout": (0.3, 0.0)}, marks=("evaluated",)),
    "lengths": Case({"layers": 2, "directions": 2}, marks=("lengths",)),
    "packed": Case({"directions": 2}, packed=True, sequences=True),
    "reset to": Case({"layers": 2, "directions": 2}, marks=("reset_to", "lengths"), sequences=True),
    "states, no bias": Case({"layers": 2, "bias": False}, sequences=True, initial=False),
    "dropout between layers": Case({"layers": 3, "directions": 2, "dropout": 0.4}, marks=("mask",), initial=False),
    "input dropout": Case({"layers": 2, "directions": 2, "input_dropout": 0.4}),
    "recomputed": Case(GATE | {"memory": "recompute", "zoneout": (0.3, 0.2)}, marks=("reset",)),
    "one step": Case(STEP | {"directions": 2}, time=1, batch=1),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Where the kernels run."""
    if request.param == "host":
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        with emulated(folder):
            yield "cpu"
    else:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield "cuda"


@pytest.mark.parametrize("name", CASES)
def test_it_is_right(name: str, device: str) -> None:
    case = CASES[name]
    case = replace(case, form={"projection": 5} | case.form, units=24, batch=9)
    assert_agrees("persistent", CELLS["lstm"], case, torch.bfloat16, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("projection", [1, 24, 40])
def test_widths(projection: int, dtype: torch.dtype, device: str) -> None:
    """Of one, of as many as units and of more."""
    if device == "cpu" and (projection == 1) != (dtype != torch.bfloat16):
        pytest.skip("left to a GPU")
    case = Case({"projection": projection, "layers": 2}, units=24, batch=9)
    assert_agrees("persistent", CELLS["lstm"], case, dtype, device)


@pytest.mark.parametrize("name", INSIDE)
def test_it_is_right_inside_a_step(name: str, device: str) -> None:
    case, place = INSIDE[name], [*INSIDE].index(name)
    case = replace(case, form={"projection": (5, 8, 17)[place % 3]} | case.form, units=24, batch=case.batch + 4)
    assert_agrees("persistent", CELLS["lstm"], case, DTYPES[place % 3], device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("units, projection", [(24, 1), (37, 36), (16, 16), (1, 1), (67, 33)])
def test_widths_inside_a_step(units: int, projection: int, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype != DTYPES[units % 3]:
        pytest.skip("left to a GPU")
    case = Case(GATE | {"projection": projection, "layers": 2, "directions": 2}, units=units, batch=11, sequences=True)
    assert_agrees("persistent", CELLS["lstm"], case, dtype, device)


@whorl.cell(gates="n", states="h", x_only="n")
def no_weights(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.n))


@whorl.cell(gates="p n", states="h", inputs="pp", x_only="n")
def gated(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.p + x.pp * r.p) * whorl.sigmoid(x.n))


@whorl.cell(gates="a b c d e f g n", states="h")
def eight_gates(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.a + r.a + x.b + r.b + x.c + r.c + x.d + r.d + x.e + r.e + x.f + r.f + x.g + r.g + x.n))


OTHERS = {
    "one gate": (CELLS["rnn_tanh"], INSIDE["dropout by gate"]),
    "one gate, given": (CELLS["rnn_tanh"], Case(given=("recurrent",), marks=("mask",))),
    "no recurrent weights": (no_weights.graph, Case({"directions": 2, "recurrent_dropout": 0.5}, sequences=True)),
    "no recurrent weights, plain": (no_weights.graph, Case({"layers": 2}, initial=False)),
    "x and r apart": (gated.graph, Case({"directions": 2})),
    "layer norm": (WRAPPED["layer norm"], Case(GATE, marks=("lengths",))),
    "every option": (WRAPPED["every option of LSTM"], Case({"zoneout": (0.3, 0.2)}, marks=("reset",))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_cells_inside_a_step(name: str, device: str) -> None:
    graph, case = OTHERS[name]
    zoneout = case.form.get("zoneout", ())[: len(graph.states)]
    case = replace(case, form=case.form | {"projection": 7, "zoneout": zoneout}, units=19, batch=9)
    assert_agrees("persistent", graph, case, DTYPES[len(name) % 3], device)


def spread_out(device: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer as one that no cluster holds."""
    if device == "cpu":
        spread(monkeypatch, *TILES[place])
    else:
        monkeypatch.setattr(grid, "choose", spreading.choose)
        made_anew(monkeypatch)


@pytest.mark.parametrize(
    "name, place",
    [
        ("dropout by gate", 2), ("given by gate", 3), ("given, shared", 1), ("given by step", 0),
        ("dropout by step", 3), ("zoneout", 1), ("reset to", 0), ("recomputed", 2),
    ],
)  # fmt: skip
def test_where_blocks_exchange_through_l2(name: str, place: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spread_out(device, place, monkeypatch)
    case = replace(INSIDE[name], form=INSIDE[name].form | {"projection": 18}, time=5, batch=21, units=37)
    assert_agrees("persistent", CELLS["lstm"], case, DTYPES[len(name) % 3], device)


@pytest.mark.parametrize("name, place", [("dropout by gate", 2), ("dropout by step", 3), ("reset to", 0)])
def test_with_tf32_products(name: str, place: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of float16 where h and its gradients are scaled, each at every step."""
    spread(monkeypatch, *TILES[place])
    case = replace(INSIDE[name], form=INSIDE[name].form | {"projection": 18, "layers": 1}, time=4, batch=9, units=37)
    made, call = case.build(CELLS["lstm"])
    call = in_dtype(call, torch.float32)
    truth = results(made, in_dtype(call, torch.float64), "reference", case.sequences)
    with emulated(folder, tf32=True):
        got = results(made, call, "persistent", case.sequences)
    errors = {name: error(got[name], truth[name]) for name in truth}
    assert {name: one for name, one in errors.items() if not one <= 4 * TF32_EPS} == {}
    assert max(errors.values()) > 1e-5


def test_layers_that_save_in_two_ways(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an odd width the rows are copied for cuBLAS, so the layer above saves in one room, and this one does not."""
    monkeypatch.setattr(aligned, "LEAST", 0)
    case = Case({"projection": 8, "layers": 3}, initial=False, units=24, batch=9)
    assert_agrees("persistent", CELLS["lstm"], case, torch.bfloat16, device)


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_graph(inside: bool, device: str) -> None:
    """Which keeps more tensors than there are, and plans backward by itself."""
    layer = whorl.LSTM(6, 24, 2, proj_size=5, device=device, dtype=torch.bfloat16, engine="persistent")
    x = torch.randn(4, 9, 6, device=device, dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.tensor([4, 0, 3, 1, 2, 4, 4, 1, 2], device=device)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y, states, *every = layer(x, lengths=lengths, return_states=True) if inside else layer(x)
        return y.square().sum() + states[0].sum() + sum(made["c"].sum() for made in every)

    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(loss(x), leaves)
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "units, projection, batch, time, form",
    [
        (512, 128, 32, 30, {}), (300, 77, 40, 11, {"layers": 2, "directions": 2}), (1024, 512, 32, 9, {"layers": 2}),
        (1500, 500, 20, 5, {}), (130, 64, 131, 70, {"directions": 2}),
    ],
)  # fmt: skip
def test_sizes(units: int, projection: int, batch: int, time: int, form: dict[str, Any], dtype: torch.dtype) -> None:
    case = Case(form | {"projection": projection}, time=time, batch=batch, inputs=33, units=units)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_agrees("persistent", CELLS["lstm"], case, dtype, "cuda")


LSTM = Problem(Form(CELLS["lstm"], 24, 128, projection=32), H200, torch.bfloat16, 5, 32, gradient=True)


@pytest.mark.parametrize(
    "change, why",
    [
        ({"extras": ("reset", "reset_to")}, "states that resets give"),
        ({"extras": ("return_states", "lengths")}, "the states of every step"),
        ({"extras": ("mask",), "initial": True}, "initial states with a mask"),
        ({"packed": True, "initial": True}, "initial states with a PackedSequence"),
        ({"packed": True, "dropout": True}, "dropout between layers with a PackedSequence"),
        ({"form": replace(LSTM.form, zoneout=(0.1, 0.0))}, "zoneout"),
        (
            {"form": replace(LSTM.form, recurrent_dropout=0.5, input_dropout=0.1), "extras": ("drawn",)},
            "recurrent dropout, input dropout",
        ),
        ({"form": replace(LSTM.form, cell=no_weights.graph)}, "a cell without recurrent weights"),
        (
            {"form": replace(LSTM.form, cell=gated.graph), "initial": True},
            "initial states where a gate of gated is not the sum of its two parts",
        ),
    ],
)
def test_why_it_is_inside_a_step_is_said(change: dict[str, Any], why: str) -> None:
    problem = replace(LSTM, **change)
    assert Persistent().obstacles(problem) == []
    assert f"the projection: a product inside each step, because of {why}" in Persistent().numbers(problem)
    wide = replace(problem, form=replace(problem.form, projection=129))
    assert f"beside a projection (129 wide) of fewer units (128) these kernels take no {why}" in Persistent().obstacles(
        wide
    )


def test_explain_says_which_way_a_projection_goes(device: str) -> None:
    layer = whorl.LSTM(6, 24, proj_size=5, zoneout=0.1, device=device, engine="persistent")
    told = str(whorl.explain(layer, torch.zeros(4, 3, 6, device=device)))
    assert "the projection: a product inside each step, because of zoneout" in told


def test_a_cell_with_as_many_gates_as_there_may_be_has_none_for_a_projection() -> None:
    problem = replace(LSTM, form=replace(LSTM.form, cell=eight_gates.graph))
    assert Persistent().obstacles(problem) == []
    reason = "beside a projection, of a cell of 8 gates, these kernels take no zoneout"
    assert reason in Persistent().obstacles(replace(problem, form=replace(problem.form, zoneout=(0.1,))))


def test_what_a_loop_over_m_takes_is_left_to_it() -> None:
    for change in ({}, {"initial": True, "dropout": True}, {"extras": ("lengths", "mask", "reset")}, {"packed": True}):
        problem = replace(LSTM, **change)
        assert Persistent().obstacles(problem) == []
        assert not [line for line in Persistent().numbers(problem) if "inside each step" in line]


def test_as_many_units_fit_as_the_reason_says() -> None:
    """Of a cell that projects once."""
    form = replace(LSTM.form, recurrent_dropout=0.5)
    problem = replace(LSTM, form=form, extras=("drawn",), dtype=torch.float32)
    assert with_product(with_product(problem)) == with_product(problem)
    most = most_units(problem)
    assert Persistent().obstacles(replace(problem, form=replace(form, units=most))) == []
    (reason,) = Persistent().obstacles(replace(problem, form=replace(form, units=most + 16)))
    assert reason.startswith(f"{most + 16} units of projected_lstm in float32, with options, do not fit")
    assert reason.endswith(f"at most {most} do")


def test_a_cell_that_projects_is_written_and_read() -> None:
    made = projecting(gated.graph)
    assert (made.gates, made.recurrent, made.masked, made.projection) == (
        ("p", "n", "ppp"),
        ("p", "ppp"),
        ("p",),
        "ppp",
    )
    assert Graph.from_json(made.to_json()) == made != replace(made, projection="")
    with pytest.raises(CellError, match="projects by 'n', which is not its last recurrent gate"):
        replace(made, projection="n")


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("features", [Features(noise=source.BY_GATE), Features(zoneout=(source.AT_RANDOM,) * 2)])
def test_nothing_is_spilled_in_the_time_loop(features: Features, kind: str, tmp_path: Path) -> None:
    cell, dtype = projecting(CELLS["lstm"]), torch.bfloat16
    tile = grid.estimated(size_of(cell, 512, 2, features), CHIP, 32, 1, kind)
    assert tile is not None
    make = source.forward if kind == "forward" else source.backward
    loop = time_loop(disassembled(make(cell, 512, dtype, tile, True, features), tile, tmp_path / "kernel"))
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_wrong_gradient_is_found(tmp_path: Path) -> None:
    """That of P without what comes through the recurrent weights."""
    with emulated(tmp_path) as patch:
        real = projected.product
        patch.setattr(
            projected,
            "product",
            lambda a, b, *rest, wide=False, **more: (
                real(a, b, *rest, wide=wide, **more) * (0 if wide and a.shape[0] == 5 else 1)
            ),
        )
        case = Case({"projection": 5}, units=24, batch=9, initial=False)
        with pytest.raises(AssertionError):
            assert_agrees("persistent", CELLS["lstm"], case, torch.bfloat16)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_mask_of_what_enters_the_projection_is_found(tmp_path: Path) -> None:
    with emulated(tmp_path) as patch:
        patch.setattr(Graph, "masked", property(lambda graph: graph.recurrent))
        case = Case(SHARED | {"projection": 5}, units=24, batch=9)
        with pytest.raises(AssertionError):
            assert_agrees("persistent", CELLS["lstm"], case, torch.bfloat16)


@pytest.mark.gpu
def test_a_graph_replays_with_new_marks_and_a_new_seed() -> None:
    layer = whorl.LSTM(
        24, 48, 2, bidirectional=True, proj_size=20, zoneout=0.2, recurrent_dropout=0.3, input_dropout=0.2,
        device="cuda", dtype=torch.bfloat16, engine="persistent",
    )  # fmt: skip
    x, seed = torch.randn(9, 20, 24, device="cuda", dtype=torch.bfloat16), torch.tensor(5, device="cuda")
    mask = torch.rand(9, 20, device="cuda") < 0.7

    def step() -> list[torch.Tensor]:
        y, _ = layer(x, mask=mask)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, **__: seed)
        graph, captured = in_a_graph(step)
        for number in range(5):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                seed.fill_(number * 2**33 + number)
                mask.copy_(torch.rand(9, 20, device="cuda") < 0.5)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["dropout by gate", "given by gate", "dropout by step", "reset to"])
@pytest.mark.parametrize("units, projection, batch", [(512, 128, 32), (300, 77, 40), (960, 512, 32), (130, 64, 131)])
def test_sizes_inside_a_step(name: str, units: int, projection: int, batch: int, dtype: torch.dtype) -> None:
    form = INSIDE[name].form | {"projection": projection}
    case = replace(INSIDE[name], form=form, time=9, batch=batch, inputs=33, units=units, scale=units**-0.5)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_agrees("persistent", CELLS["lstm"], case, dtype, "cuda")
