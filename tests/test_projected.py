"""Projections on engine `persistent`: the error rule, on the host's emulation of the kernels and on an NVIDIA GPU."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from emulation import H200, emulated
from engine_cases import CELLS, Case, assert_agrees
from whorl.engines.cuda import aligned, projected
from whorl.engines.cuda.persistent import Persistent
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


def test_layers_that_save_in_two_ways(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an odd width the rows are copied for cuBLAS, so the layer above saves in one room, and this one does not."""
    monkeypatch.setattr(aligned, "LEAST", 0)
    case = Case({"projection": 8, "layers": 3}, initial=False, units=24, batch=9)
    assert_agrees("persistent", CELLS["lstm"], case, torch.bfloat16, device)


def test_a_compiled_graph(device: str) -> None:
    """Which keeps more tensors than there are, and plans backward by itself."""
    layer = whorl.LSTM(6, 24, 2, proj_size=5, device=device, dtype=torch.bfloat16, engine="persistent")
    x = torch.randn(4, 9, 6, device=device, dtype=torch.bfloat16, requires_grad=True)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y, states = layer(x)
        return y.square().sum() + states[0].sum()

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


@whorl.cell(gates="n", states="h", x_only="n")
def no_weights(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.n))


@whorl.cell(gates="a n", states="h", x_only="n")
def gated(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.a + r.a) * whorl.sigmoid(x.n))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"extras": ("reset", "reset_to")}, "these kernels take no states that resets give"),
        ({"extras": ("return_states", "lengths")}, "these kernels take no the states of every step"),
        ({"extras": ("mask",), "initial": True}, "these kernels take no initial states with a mask"),
        ({"packed": True, "initial": True}, "these kernels take no initial states with a PackedSequence"),
        ({"packed": True, "dropout": True}, "these kernels take no dropout between layers with a PackedSequence"),
        ({"form": replace(LSTM.form, zoneout=(0.1, 0.0))}, "these kernels take no zoneout"),
        ({"form": replace(LSTM.form, cell=no_weights.graph)}, "these kernels take no cell without recurrent weights"),
        (
            {"form": replace(LSTM.form, cell=gated.graph), "initial": True},
            "these kernels take no initial states where a gate of gated is not the sum of its two parts",
        ),
    ],
)
def test_what_is_not_taken_is_said(change: dict[str, Any], reason: str) -> None:
    assert f"beside a projection (32 wide) {reason}" in Persistent().obstacles(replace(LSTM, **change))


def test_what_is_taken() -> None:
    for change in ({}, {"initial": True, "dropout": True}, {"extras": ("lengths", "mask", "reset")}, {"packed": True}):
        assert not [reason for reason in Persistent().obstacles(replace(LSTM, **change)) if "projection" in reason]


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
