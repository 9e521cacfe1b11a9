"""Zoneout and recurrent dropout whose masks are drawn, where addresses take the place of tensors; by `emulation`.

To the bit what `Layers` gives from the same seed, whose numbers other tests compare with the reference's; and by tapes
the same.
"""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from tapes import counted
from test_plain_cells import BATCH, INPUTS, TIME, UNITS, ways
from thinned import thinned
from whorl.engines.cuda import layers
from whorl.engines.cuda.marked import Marked
from whorl.engines.cuda.plain import Plain

__all__ = ["counted"]  # a fixture
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.xdist_group("taped"),  # one process compiles it
]
OPTIONS: dict[str, dict[str, Any]] = {
    "by gate": dict(recurrent_dropout=0.4),
    "shared": dict(recurrent_dropout=0.4, recurrent_dropout_mode="shared"),
    "step": dict(recurrent_dropout=0.4, recurrent_dropout_mode="step"),
    "zoneout": dict(zoneout=0.3),
    "by gate, zoneout": dict(recurrent_dropout=0.4, zoneout=0.3),
    "layer norm, zoneout": dict(recurrent_dropout=0.4, layer_norm=True, zoneout=0.3),
    "step, zoneout of one state": dict(recurrent_dropout=0.4, recurrent_dropout_mode="step", zoneout={"h": 0.3}),
}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "both directions, no bias, dropout": dict(num_layers=2, bidirectional=True, bias=False, dropout=0.2),
}
MARKS: dict[str, dict[str, Tensor]] = {
    "": {},
    "marks": {
        "mask": torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0]]).bool(),
        "reset": torch.tensor([[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]).bool(),
        "lengths": torch.tensor([4, 2, 3]),
    },
}
PAIRS = [(form, marks) for form in FORMS for marks in MARKS if marks or not FORMS[form]]


def made(kind: str, option: str, form: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(1)
    options = FORMS[form] | OPTIONS[option]
    return getattr(whorl, kind)(INPUTS, UNITS, **options, dtype=dtype, engine="persistent")


@pytest.mark.parametrize("kind, option, pair", thinned(3, ["LSTM", "GRU", "RNN"], OPTIONS, PAIRS))
def test_it_is_what_layers_gives(
    kind: str, option: str, pair: tuple[str, str], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    form, marks = pair
    initial = marks == "marks"
    layer = made(kind, option, form)
    ways(layer, Marked, counted, monkeypatch, True, initial, TIME, **MARKS[marks])
    if not FORMS[form]:  # of several layers dropout's masks would be other ones
        ways(layer.eval(), *evaluated(option, marks), counted, monkeypatch, True, initial, TIME, **MARKS[marks])


def evaluated(option: str, marks: str) -> tuple[type]:
    return (Marked if marks or "zoneout" in option else Plain,)


@pytest.mark.parametrize("option", OPTIONS)
def test_float32_and_one_step(option: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made("LSTM", option, "one layer", torch.float32)
    for time in (1, 2):
        ways(layer, Marked, counted, monkeypatch, True, True, time)


@pytest.mark.parametrize("kind, entered", [("LSTM", True), ("RNN", True), ("GRU", False)])
@pytest.mark.parametrize("inside", [False, True])
def test_what_entered_is_saved_where_backward_reads_nothing_else(
    kind: str, entered: bool, inside: bool, counted: list[int]
) -> None:
    """Then backward has no memory to write it to; of a step that reads its first state, or of stages, it has."""
    torch.manual_seed(1)
    options: dict[str, Any] = OPTIONS["step"] | (dict(layer_norm="r") if inside else {})
    layer = getattr(whorl, kind)(INPUTS, UNITS, **options, dtype=torch.bfloat16, engine="persistent")
    layer(torch.randn(TIME, BATCH, INPUTS).bfloat16())[0].float().sum().backward()
    ((_, made),) = layers._prepared.values()
    assert isinstance(made, Marked)
    assert (not made._entered) == (entered and not inside)


def test_each_call_draws_its_own(counted: list[int]) -> None:
    layer, x = made("LSTM", "by gate, zoneout", "one layer"), torch.randn(TIME, BATCH, INPUTS).bfloat16()
    one, other = layer(x)[0], layer(x)[0]
    assert len(counted) == 2
    assert not torch.equal(one, other)
    evaluated = layer.eval()(x)[0]
    assert torch.equal(layer(x)[0], evaluated)
    assert not torch.equal(evaluated, layer.train()(x)[0])


def test_many_gates_have_masks_of_two_words(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    @whorl.cell(gates="a b c d e f", states="h")
    def six(x: Any, r: Any, s: Any) -> dict[str, Any]:
        both = [getattr(x, gate) + getattr(r, gate) for gate in "abcdef"]
        return dict(h=whorl.tanh(both[0] + both[1] * both[2] + both[3] * both[4] - both[5]))

    torch.manual_seed(1)
    layer = whorl.Recurrent(six, INPUTS, UNITS, recurrent_dropout=0.4, dtype=torch.bfloat16, engine="persistent")
    ways(layer, Marked, counted, monkeypatch, True, False, TIME)


@pytest.mark.parametrize("form, marks", PAIRS)
@pytest.mark.parametrize("option", [option for option in OPTIONS if "layer norm" not in option])
def test_masks_of_products_inside_the_step(
    option: str, form: str, marks: str, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GRU with its reset before the product."""
    torch.manual_seed(1)
    options = {name: 0.3 if name == "zoneout" else value for name, value in OPTIONS[option].items()}
    more = FORMS[form] | options | dict(reset_after=False, dtype=torch.bfloat16, engine="persistent")
    layer = whorl.GRU(INPUTS, UNITS, **more)
    ways(layer, Marked, counted, monkeypatch, True, False, TIME, **MARKS[marks])


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("mode, shape", [("gate", (3, BATCH, UNITS)), ("shared", (BATCH, UNITS))])
def test_given_masks_of_products_inside_the_step(
    mode: str, shape: tuple[int, ...], marks: str, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    more: dict[str, Any] = dict(dtype=torch.bfloat16, engine="persistent", recurrent_dropout_mode=mode)
    layer = whorl.GRU(INPUTS, UNITS, bidirectional=True, reset_after=False, **more)
    masks = {"recurrent_dropout": [torch.rand(shape) for _ in range(2)]}
    ways(layer, Marked, counted, monkeypatch, True, False, TIME, dropout_masks=masks, **MARKS[marks])


@pytest.mark.parametrize("mode", ["gate", "shared"])
def test_products_inside_the_step_alone(mode: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    @whorl.cell(gates="a b", states="h")
    def inside(x: Any, r: Any, s: Any) -> dict[str, Any]:
        return dict(h=whorl.tanh(x.a + r.a(0.5 * s.h) + r.b(s.h * x.b)))

    torch.manual_seed(1)
    more: dict[str, Any] = dict(dtype=torch.bfloat16, engine="persistent", recurrent_dropout=0.4)
    layer = whorl.Recurrent(inside, INPUTS, UNITS, recurrent_dropout_mode=mode, **more)
    for time in (1, TIME):
        ways(layer, Marked, counted, monkeypatch, True, False, time)


@pytest.mark.parametrize("option", ["by gate, zoneout", "step"])
def test_gradients_of_gradients_draw_the_same(option: str, counted: list[int]) -> None:
    layer, x = made("LSTM", option, "one layer", torch.float32), torch.randn(TIME, BATCH, INPUTS, requires_grad=True)
    reference = whorl.LSTM(INPUTS, UNITS, engine="reference", **OPTIONS[option])
    reference.load_state_dict(layer.state_dict())
    found = []
    for one in (layer, reference):
        torch.manual_seed(4)
        (first,) = torch.autograd.grad(one(x)[0].square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        found.append((first.detach(), second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(counted) == 1
