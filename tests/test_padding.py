"""A layer whose last units are padding: what counts in means is as it would be without them."""

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from comparison import error
from test_emulated import assert_near, outcome
from whorl import mean
from whorl.cells.wrappers import ahead, share_of_x
from whorl.engines.cuda.staged import staged, steps
from whorl.problem import Form

OWN, ALL = 13, 16
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "every norm": ("LSTM", dict(layer_norm=True, num_layers=2)),
    "of r and c": ("LSTM", dict(layer_norm="r c", bidirectional=True, bias=False)),
    "coupled, clipped": ("LSTM", dict(layer_norm=True, coupled=True, peephole=True, clip=0.7)),
    "GRU": ("GRU", dict(layer_norm=True)),
    "GRU, reset before": ("GRU", dict(layer_norm="r", reset_after=False)),
    "relu": ("RNN", dict(layer_norm=True, nonlinearity="relu")),
}


def pair(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A layer, and the same one with padding."""
    kind, options = LAYERS[name]
    torch.manual_seed(4)
    own, wide = (getattr(whorl, kind)(7, units, dtype=dtype, **options) for units in (OWN, ALL))
    wide.pad_from(OWN)
    with torch.no_grad():
        for one, other in zip(own.parameters(), wide.parameters(), strict=True):
            within(other.zero_(), one.uniform_(-1, 1)).copy_(as_units(one))
    return own, wide


def as_units(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter as [gates, units, columns]."""
    return tensor.view(len(tensor) // OWN, OWN, -1)


def within(wide: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The same of the layer with padding, without it."""
    gates, _, columns = as_units(own).shape
    return wide.view(gates, ALL, -1)[:, :OWN, :columns]


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_is_the_layer_without_padding(name: str, engine: str) -> None:
    own, wide = pair(name, torch.float64)
    own.engine, wide.engine = "reference", engine
    x, directions = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True), 1 + own.bidirectional
    y, z = own(x)[0].unflatten(-1, (directions, OWN)), wide(x)[0].unflatten(-1, (directions, ALL))
    assert error(z[..., :OWN], y) <= 1e-12
    assert not z[..., OWN:].any()
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(y, [x, *own.parameters()], grad)
    found = torch.autograd.grad(z[..., :OWN], [x, *wide.parameters()], grad)
    assert error(found[0], wanted[0]) <= 1e-12
    for (which, _), one, other in zip(own.named_parameters(), wanted[1:], found[1:], strict=True):
        assert error(within(other, one), as_units(one)) <= 1e-12, which


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), torch.nn.Module.double],
    ids=["copy", "deepcopy", "pickle", "dtype"],
)
def test_copies_count_so_too(again: Callable[[Any], Any]) -> None:
    """And options that are changed afterwards leave it as it is."""
    _, wide = pair("every norm", torch.float64)
    other = again(wide)
    assert other._form == wide._form
    wide.clip = other.clip = 0.5
    assert other._form == wide._form
    assert share_of_x(Form.from_json(other._form).cell) == pytest.approx(OWN / ALL)


@pytest.mark.parametrize("units", [0, ALL + 1])
def test_it_has_units_that_count(units: int) -> None:
    with pytest.raises(whorl.InputError, match=f"units is {units}: write 1 to {ALL}, the units of this LSTM"):
        whorl.LSTM(7, ALL, layer_norm=True).pad_from(units)


STEPS: dict[str, Callable[..., Any]] = {
    r"sigmoid\(x.n\)": lambda x, r, s: dict(h=whorl.tanh(x.n + r.n) * mean(whorl.sigmoid(x.n)), c=s.h),
    "s.c": lambda x, r, s: dict(h=whorl.tanh(x.n - mean(s.c)), c=whorl.sigmoid(r.n)),
    "e.d": lambda x, r, s: dict(h=whorl.tanh(x.n + r.n - mean(x.d)), c=s.h),
    "1.0": lambda x, r, s: dict(h=whorl.tanh(x.n + r.n - mean([x.n, 1.0])), c=s.h),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_mean_of_what_is_not_zero_in_padding_is_refused(what: str) -> None:
    layer = whorl.Recurrent(whorl.cell(gates="n", states="h c", inputs="d")(STEPS[what]), 7, ALL)
    form = layer._form
    with pytest.raises(whorl.CellError, match=f"averages {what}, which is not 0 in .* make a layer of 13 units"):
        layer.pad_from(OWN)
    assert layer._form == form
    layer.pad_from(ALL)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_count_so_too(name: str, dtype: torch.dtype, folder: Path) -> None:
    own, wide = pair(name, dtype)
    x, parameters = torch.randn(4, 5, 7).to(dtype), dict(own.named_parameters())

    def found(kind: torch.dtype, engine: str) -> dict[Any, torch.Tensor]:
        """The gradients of padding are left out: they are not zero everywhere, and nobody reads them."""
        made = outcome(wide, x, kind, engine, folder)
        return {
            which: within(value, parameters[which]) if which in parameters else value for which, value in made.items()
        }

    got = found(dtype, "persistent")
    assert_near(got, found(dtype, "reference"), found(torch.float64, "reference"), torch.finfo(dtype).eps)
    assert not got[0].unflatten(-1, (1 + own.bidirectional, ALL))[..., OWN:].any()


@pytest.mark.parametrize("name", LAYERS)
def test_a_step_exchanges_no_more_for_it(name: str) -> None:
    own, wide = (Form.from_json(layer._form).cell for layer in pair(name, torch.float32))
    normed = "x" in LAYERS[name][1]["layer_norm"] if isinstance(LAYERS[name][1]["layer_norm"], str) else True
    assert share_of_x(own) == 1
    assert share_of_x(wide) == (pytest.approx(OWN / ALL) if normed else 1)
    one, other = ahead(own) or own, ahead(wide) or wide
    assert (ahead(own) is None) == (ahead(wide) is None)
    assert staged(one) == staged(other)
    if staged(one):
        for kind in ("forward", "backward"):
            first, second = getattr(steps(one), kind), getattr(steps(other), kind)
            assert (first.stages, first.reductions, first.rounds) == (second.stages, second.reductions, second.rounds)
