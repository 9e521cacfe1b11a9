"""x behind masks of dropout, as Keras gives them or drawn, where addresses take the place of tensors; by `emulation`.

What `Layers` gives, whose numbers other tests compare with the reference's; and by tapes the same to the bit.
"""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from tapes import counted
from test_plain_cells import BATCH, INPUTS, TIME, UNITS, outcome
from whorl.engines import taped
from whorl.engines.cuda import aligned, layers, persistent
from whorl.engines.cuda.layers import Layers
from whorl.engines.cuda.marked import Marked

__all__ = ["counted"]  # a fixture
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.xdist_group("taped"),  # one process compiles it
]
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "both directions, two layers": dict(num_layers=2, bidirectional=True),
    "dropout, no bias": dict(num_layers=2, dropout=0.3, bias=False),
}
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 0]]).bool()


def masks(layer: Any, what: str) -> dict[str, Any]:
    """Given ones: of x for all gates or by gate, and of the recurrent product."""
    gates = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}[layer.mode]
    directions, found = 1 + layer.bidirectional, dict[str, list[Tensor]]()
    for index in range(layer.num_layers * directions):
        wide = INPUTS if index < directions else UNITS * directions
        if "x" in what:
            shape = (gates, BATCH, wide) if "gates" in what else (BATCH, wide)
            found.setdefault("input_dropout", []).append((torch.rand(shape) < 0.7) / 0.7)
        if "h" in what:
            found.setdefault("recurrent_dropout", []).append((torch.rand(gates, BATCH, UNITS) < 0.7) / 0.7)
    return found


def ways(layer: Any, counted: list[int], monkeypatch: pytest.MonkeyPatch, of_x: bool = True, **call: Any) -> None:
    """By tapes and through Python the same bits; and what `Layers` gives, which adds up gates in another order."""
    before = len(counted)
    found = outcome(layer, of_x, True, TIME, **call)
    assert len(counted) == before + 1
    with monkeypatch.context() as patch:
        patch.setattr(taped, "ready", lambda: False)
        through = outcome(layer, of_x, True, TIME, **call)
        assert {type(one) for _, one in layers._prepared.values()} == {Marked}
        patch.setattr(layers, "_prepared", {})
        patch.setattr(persistent, "is_marked", lambda problem: False)
        by_layers = outcome(layer, of_x, True, TIME, **call)
        assert {type(one) for _, one in layers._prepared.values()} == {Layers}
    assert len(counted) == before + 1
    for one, other, truth in zip(found, through, by_layers, strict=True):
        assert torch.equal(one, other)
        rounded = 4 * torch.finfo(truth.dtype).eps * float(truth.abs().max())  # a sum of as many that are rounded
        torch.testing.assert_close(one, truth, rtol=0, atol=rounded)
    layers._prepared.clear()


def made(kind: str, form: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(1)
    return getattr(whorl, kind)(INPUTS, UNITS, **FORMS[form], **options, dtype=dtype, engine="persistent")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("what", ["x", "x gates", "x h", "x gates h"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_given(
    kind: str, form: str, what: str, masked: bool, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = made(kind, form)
    call = {"dropout_masks": masks(layer, what)} | ({"mask": MASK} if masked else {})
    ways(layer, counted, monkeypatch, of_x=not masked, **call)


@pytest.mark.parametrize("more", [{}, dict(recurrent_dropout=0.3), dict(zoneout=0.2)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_drawn(kind: str, form: str, more: dict[str, Any], counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    ways(made(kind, form, input_dropout=0.4, **more), counted, monkeypatch)


@pytest.mark.parametrize("what", ["x", "x gates", "x gates h"])
def test_before_a_layer_norm_of_x(what: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made("LSTM", "both directions, two layers", layer_norm=True)
    ways(layer, counted, monkeypatch, dropout_masks=masks(layer, what), mask=MASK)


@pytest.mark.parametrize("training", [True, False])
def test_given_beside_zoneout(training: bool, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """That is drawn in training, and a share of the state else."""
    layer = made("LSTM", "one layer", zoneout=0.3).train(training)
    for what in ("x gates h", "h"):
        ways(layer, counted, monkeypatch, dropout_masks=masks(layer, what))


@pytest.mark.parametrize("what", ["x", "x gates h"])
@pytest.mark.parametrize("copies", [False, True])
def test_float32_and_copies(what: str, copies: bool, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    if copies:
        monkeypatch.setattr(aligned, "LEAST", 1)
    layer = made("LSTM", "one layer", torch.float32)
    ways(layer, counted, monkeypatch, dropout_masks=masks(layer, what))


def test_one_layer_called_with_masks_of_all_kinds_in_turns(counted: list[int]) -> None:
    """Each kind has a way of its own; none is another's."""
    layer, x = made("LSTM", "one layer"), torch.randn(TIME, BATCH, INPUTS).bfloat16()
    kinds = [masks(layer, what) for what in ("x", "x gates", "h", "x h", "x gates h")]
    found = [[layer(x, dropout_masks=given)[0] for given in kinds] for _ in range(2)]
    assert len({*counted}) == len(kinds)
    ((_, first),) = layers._prepared.values()
    assert first._features.noise == 0  # no kernels are made ready but those of the masks that a call has
    assert counted[: len(kinds)] == counted[len(kinds) :]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    for place, one in enumerate(found[0]):
        assert not any(torch.equal(one, other) for other in found[0][:place])


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("what", ["x", "x gates h"])
def test_masks_with_gradients_go_another_way(what: str, layer_norm: bool, counted: list[int]) -> None:
    """Forward by addresses, backward by `Layers`, which reads what was left: beside the reference."""
    layer = made("LSTM", "both directions, two layers", torch.float32, layer_norm=layer_norm)
    reference = whorl.LSTM(
        INPUTS, UNITS, engine="reference", layer_norm=layer_norm, **FORMS["both directions, two layers"]
    )  # fmt: skip
    reference.load_state_dict(layer.state_dict())
    x, given, found = torch.randn(TIME, BATCH, INPUTS, requires_grad=True), masks(layer, what), []
    for one in (layer, reference):
        leaves = {name: [mask.detach().requires_grad_() for mask in own] for name, own in given.items()}
        y = one(x, dropout_masks=leaves, mask=MASK)[0]
        wanted = [x, *one.parameters(), *(mask for own in leaves.values() for mask in own)]
        found.append(
            [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum(), wanted)]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not counted
    assert {type(one) for _, one in layers._prepared.values()} == {Marked}
