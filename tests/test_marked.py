"""Calls with a mask or with given masks of recurrent dropout, in which addresses take the place of tensors.

On the host by `emulation`: to the bit what `Layers` gives, whose numbers other tests compare with the reference's.
"""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from comparison import flat, make, weighted
from thinned import thinned
from whorl.engines.cuda import aligned, layers, persistent
from whorl.engines.cuda.marked import Marked

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("host"),
]
TIME, BATCH, INPUTS, UNITS = 4, 5, 6, 10
CELLS = {"LSTM": 4, "GRU": 3, "RNN tanh": 1}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers": dict(num_layers=2),
    "both directions, no bias": dict(num_layers=2, bidirectional=True, bias=False),
}


def ran() -> list[type]:
    return [type(made) for _, made in layers._prepared.values()]


def given(cell: str, what: str, layer: Any, time: int = TIME) -> dict[str, Any]:
    """Of a call: `what` names a mask, and masks by gate or shared by the gates, or with gradients."""
    rows, found = layer.num_layers * (1 + layer.bidirectional), {}
    dtype = next(layer.parameters()).dtype
    if "mask" in what:
        found["mask"] = torch.arange(time)[:, None] != torch.tensor([9, 3, 1, 0, 9])
    if "lengths" in what:
        found["lengths"] = torch.tensor([time, 0, 2, 1, time]).clamp(max=time)
    if "reset" in what:
        found["reset"] = (torch.arange(time)[:, None] + torch.arange(BATCH)) % 3 == 0
    shape = (CELLS[cell], BATCH, UNITS) if "gate" in what else (BATCH, UNITS)
    masks = {}
    if "gate" in what or "shared" in what:
        masks["recurrent_dropout"] = [torch.rand(shape).to(dtype) for _ in range(rows)]
    if masks:
        found["dropout_masks"] = masks
        for mask in masks.get("recurrent_dropout", []) if "gradient" in what else []:
            mask.requires_grad_()
    return found


def outcome(layer: Any, of_x: bool, initial: bool, call: dict[str, Any], time: int = TIME) -> list[Tensor]:
    """Outputs, and the gradients of everything that has one."""
    torch.manual_seed(2)
    dtype, rows = next(layer.parameters()).dtype, layer.num_layers * (1 + layer.bidirectional)
    x = torch.randn(time, BATCH, INPUTS).to(dtype)
    if "mask" in call:
        x[~call["mask"]] = float("nan")  # which is read by nobody
    if "lengths" in call:
        x[torch.arange(time)[:, None] >= call["lengths"]] = float("nan")
    x.requires_grad_(of_x)
    states = [torch.randn(rows, BATCH, UNITS).to(dtype).requires_grad_() for _ in layer._widths] if initial else []
    hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
    outputs = flat(layer(x, hx, **call))
    masks = [mask for own in call.get("dropout_masks", {}).values() for mask in own]
    wanted = [one for one in (x, *states, *masks, *layer.parameters()) if one.requires_grad]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(weighted(outputs), wanted)]


def both(layer: Any, monkeypatch: pytest.MonkeyPatch, *how: Any) -> tuple[list[Tensor], list[Tensor]]:
    """By `Marked`, then by `Layers`."""
    ours = outcome(layer, *how)
    assert ran() == [Marked]
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_prepared", {})
        patch.setattr(persistent, "is_marked", lambda problem: False)
        theirs = outcome(layer, *how)
        assert Marked not in ran()
    return ours, theirs


def assert_same(found: tuple[list[Tensor], list[Tensor]]) -> None:
    for ours, theirs in zip(*found, strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


GIVEN = [
    "mask", "gate", "mask gate", "shared", "mask shared", "gate gradient", "mask shared gradient", "lengths", "reset",
    "lengths mask reset", "reset gate", "lengths shared",
]  # fmt: skip


@pytest.mark.parametrize("cell, form, what", thinned(3, CELLS, FORMS, GIVEN))
def test_it_is_what_layers_gives(cell: str, form: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    mode = "shared" if "shared" in what else "gate"
    layer = make(
        whorl,
        cell,
        INPUTS,
        UNITS,
        dtype=torch.bfloat16,
        engine="persistent",
        recurrent_dropout_mode=mode,
        **FORMS[form],
    )
    call = given(cell, what, layer)
    for of_x, initial in ((True, True), (False, False)):
        assert_same(both(layer, monkeypatch, of_x, initial, call))
        layers._prepared.clear()


@pytest.mark.parametrize("units", [10, 200])
def test_sequences_that_are_dealt_by_their_lengths(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the fewest of a cluster; in a block, and in several whose clusters share the batch."""
    torch.manual_seed(1)
    layer, batch = whorl.LSTM(INPUTS, units, dtype=torch.bfloat16, engine="persistent"), 19
    x = torch.randn(3, batch, INPUTS).bfloat16()
    call = dict(lengths=torch.arange(batch) % 4, reset=torch.rand(3, batch) < 0.3)

    def run() -> list[Tensor]:
        outputs = flat(layer(x, **call))
        return [*(y.detach() for y in outputs), *torch.autograd.grad(weighted(outputs), layer.parameters())]

    ours = run()
    assert ran() == [Marked]
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_prepared", {})
        patch.setattr(persistent, "is_marked", lambda problem: False)
        theirs = run()
        assert Marked not in ran()
    assert_same((ours, theirs))


@pytest.mark.parametrize("time", [1, 3])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_float32_and_copies(cell: str, copies: bool, time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one step, too; and where operands are copied for cuBLAS."""
    if copies:
        monkeypatch.setattr(aligned, "LEAST", 1)
    torch.manual_seed(1)
    layer = make(whorl, cell, INPUTS, UNITS, engine="persistent", recurrent_dropout_mode="gate")
    call = given(cell, "mask gate", layer, time)
    assert_same(both(layer, monkeypatch, True, True, call, time))


def test_inference_keeps_nothing_and_gives_the_same() -> None:
    layer = make(
        whorl, "LSTM", INPUTS, UNITS, 4, dtype=torch.bfloat16, engine="persistent", recurrent_dropout_mode="gate"
    )
    x, call = torch.randn(TIME, BATCH, INPUTS).bfloat16(), given("LSTM", "mask gate", layer)
    wanted = flat(layer(x, **call))
    with torch.no_grad():
        found = flat(layer(x, **call))
    for got, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=0)
    (_, training), (_, inference) = layers._prepared.values()
    assert inference._room.shape[0] < training._room.shape[0] / 2


def test_a_backward_that_is_planned_anew_reads_what_forward_left() -> None:
    """In a compiled graph it is, and takes every gradient to be wanted."""
    layer = make(
        whorl, "LSTM", INPUTS, UNITS, 2, dtype=torch.bfloat16, engine="persistent", recurrent_dropout_mode="gate"
    )
    x, call = torch.randn(TIME, BATCH, INPUTS).bfloat16().requires_grad_(), given("LSTM", "mask gate", layer)

    def loss(x: Tensor) -> Tensor:
        return layer(x, **call)[0].square().sum()

    torch._dynamo.reset()
    found = (torch.compile(loss, backend="aot_eager")(x), loss(x))
    first, second = (torch.autograd.grad(value, (x, *layer.parameters())) for value in found)
    for got, truth in zip(first, second, strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=0)
    assert {*ran()} == {Marked}


def test_what_has_other_options_goes_another_way() -> None:
    layer = make(whorl, "LSTM", INPUTS, UNITS, dtype=torch.bfloat16, engine="persistent")
    mask, x = torch.ones(TIME, BATCH, dtype=torch.bool), torch.randn(TIME, BATCH, INPUTS).bfloat16()
    layer(x, mask=mask, return_states=True)
    state = torch.randn(1, BATCH, UNITS).bfloat16()
    layer(x, reset=mask, reset_to=(state, state))
    assert Marked not in ran()


@pytest.mark.parametrize("what", ["mask", "mask gate", "shared", "gate gradient"])
def test_backward_runs_again_on_what_was_kept(what: str) -> None:
    """The graph is kept, or hooks of saved tensors put what forward left aside and give back a copy."""
    layer = make(
        whorl, "LSTM", INPUTS, UNITS, 2, engine="persistent", bidirectional=True,
        recurrent_dropout_mode="shared" if "shared" in what else "gate",
    )  # fmt: skip
    x, call = torch.randn(TIME, BATCH, INPUTS, requires_grad=True), given("LSTM", what, layer)
    masks = [mask for own in call.get("dropout_masks", {}).values() for mask in own if mask.requires_grad]
    wanted = [x, *masks, *layer.parameters()]
    loss = layer(x, **call)[0].square().sum()
    first, again = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, torch.Tensor.clone):
        loss = layer(x, **call)[0].square().sum()
    third = torch.autograd.grad(loss, wanted)
    assert ran() == [Marked]
    for one, *others in zip(first, again, third, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_masks_lie_as_they_like() -> None:
    """Batch first, and every other element of something larger."""
    layer = make(
        whorl, "GRU", INPUTS, UNITS, engine="persistent", batch_first=True, recurrent_dropout_mode="gate",
    )  # fmt: skip
    x, call = torch.randn(BATCH, TIME, INPUTS), given("GRU", "mask gate", layer)
    (noise,) = call["dropout_masks"]["recurrent_dropout"]
    apart = torch.rand(*noise.shape[:-1], 2 * UNITS)
    apart[..., ::2] = noise
    mask = call["mask"].t()
    assert not mask.is_contiguous()
    found = flat(layer(x, mask=mask, dropout_masks={"recurrent_dropout": [apart[..., ::2]]}))
    wanted = flat(layer(x, mask=mask.contiguous(), dropout_masks=call["dropout_masks"]))
    assert ran() == [Marked]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
