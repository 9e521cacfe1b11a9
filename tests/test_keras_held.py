"""Calls of whorl.keras without gradient, which hold what the last one found out: whatever changes, it is seen."""

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl  # noqa: E402
import whorl.keras  # noqa: E402
from whorl.keras import held, loops  # noqa: E402

BATCH, TIME, INPUTS, UNITS = 4, 5, 3, 7


def made(kind: str = "LSTM", **arguments: Any) -> tuple[Any, Any]:
    """Keras' layer and ours, of the same weights; ours holds what a call found out."""
    own, ours = (
        getattr(source, kind)(UNITS, bias_initializer="random_normal", **arguments)
        for source in (keras.layers, whorl.keras)
    )
    for layer in (own, ours):
        layer.build((BATCH, TIME, INPUTS))
    ours.set_weights(own.get_weights())
    with torch.no_grad():
        ours(torch.randn(BATCH, TIME, INPUTS))
    return own, ours


def is_held(layer: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> bool:
    """Whether a call goes by what is held, and by nothing else."""
    called: list[bool] = []
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(loops, "parts_of", lambda *_: called.append(True) or ([], ["nothing is to be found out"]))
        patched.setattr(whorl.settings, "slow", "allow")
        layer(x, **arguments)
    return not called


def same(own: Any, ours: Any, x: Tensor, **arguments: Any) -> None:
    """Both give the same in two calls without gradient."""
    with torch.no_grad():
        for _ in range(2):
            wanted, found = own(x, **arguments), ours(x, **arguments)
            for one, other in zip(*(row if isinstance(row, tuple) else (row,) for row in (wanted, found)), strict=True):
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
                assert other.dtype == one.dtype


@pytest.mark.parametrize("kind", ["LSTM", "SimpleRNN"])
@pytest.mark.parametrize("arguments", [{}, {"return_sequences": True}, {"return_state": True}, {"use_bias": False}])
def test_a_call_like_the_last_goes_by_what_that_found(
    kind: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ours = made(kind, **arguments)
    x = torch.randn(BATCH, TIME, INPUTS)
    assert is_held(ours, x, monkeypatch)
    assert is_held(ours, torch.randn(TIME, BATCH, INPUTS).transpose(0, 1), monkeypatch)
    same(own, ours, x)
    same(own, ours, torch.randn(TIME, BATCH, INPUTS).transpose(0, 1))


def test_evaluate_and_predict_go_by_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model = keras.Sequential([keras.Input((TIME, INPUTS)), whorl.keras.LSTM(UNITS), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x, target = torch.randn(4 * BATCH, TIME, INPUTS).numpy(), torch.randn(4 * BATCH, 1).numpy()
    model.evaluate(x, target, batch_size=BATCH, verbose=0)
    monkeypatch.setattr(loops, "call", lambda *_: pytest.fail("it found out anew what is held"))
    before = model.evaluate(x, target, batch_size=BATCH, verbose=0)
    predicted = model.predict(x, batch_size=BATCH, verbose=0)
    assert before == pytest.approx(float(((predicted - target) ** 2).mean()), rel=1e-5)


def assigned(layer: Any) -> None:
    layer.set_weights([0.5 * weight for weight in layer.get_weights()])


def moved(layer: Any) -> None:
    for variable in layer.trainable_variables:
        variable.value.data = -variable.value.data


def replaced(layer: Any) -> None:
    for variable in layer.trainable_variables:
        variable._value = torch.nn.Parameter(2 * variable.value.detach())


CHANGES: dict[str, Callable[[Any], None]] = {
    "weights": assigned,
    "memory of weights": moved,
    "other tensors": replaced,
    "activation": lambda layer: setattr(layer.cell, "activation", keras.activations.relu),
    "recurrent_activation": lambda layer: setattr(layer.cell, "recurrent_activation", keras.activations.hard_sigmoid),
    "return_sequences": lambda layer: setattr(layer, "return_sequences", True),
    "return_state": lambda layer: setattr(layer, "return_state", True),
    "go_backwards": lambda layer: setattr(layer, "go_backwards", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_a_call_is_seen_by_the_next(change: str) -> None:
    own, ours = made()
    x = torch.randn(BATCH, TIME, INPUTS)
    same(own, ours, x)
    for layer in (own, ours):
        CHANGES[change](layer)
    if change in ("activation", "recurrent_activation", "go_backwards"):  # where Keras' own would go by oneDNN
        own.use_cudnn = False
    same(own, ours, x)


def test_another_batch_length_mask_or_state_is_seen() -> None:
    own, ours = made()
    x = torch.randn(BATCH, TIME, INPUTS)
    mask = torch.arange(TIME) < torch.tensor([5, 3, 1, 4])[:, None]
    states = [torch.randn(BATCH, UNITS), torch.randn(BATCH, UNITS)]
    for other, arguments in [
        (x, {}), (x[:1], {}), (x[:, :2], {}), (x, {"mask": mask}), (x, {"initial_state": states}), (x, {}),
    ]:  # fmt: skip
        same(own, ours, other, **arguments)
    with pytest.raises(whorl.errors.InputError, match="x has 9 features"), torch.no_grad():
        ours(torch.randn(BATCH, TIME, 9))
    same(own, ours, x)


@pytest.mark.parametrize("rate", ["dropout", "recurrent_dropout"])
def test_dropout_that_is_set_later_takes_the_numbers_of_its_seed(rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras takes them in evaluation too, where nobody reads the masks."""
    _, ours = made(seed=1)
    x = torch.randn(BATCH, TIME, INPUTS)
    assert is_held(ours, x, monkeypatch)
    setattr(ours.cell, rate, 0.5)
    before = ours.cell.seed_generator.state.numpy().copy()
    with torch.no_grad():
        ours(x)
    assert (ours.cell.seed_generator.state.numpy() != before).any()


@pytest.mark.parametrize("how", ["gradient", "tangents", "vmap", "autocast", "explained", "fake", "training"])
def test_what_follows_a_call_finds_nothing_held(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, ours = made()
    x = torch.randn(BATCH, TIME, INPUTS)
    with torch.no_grad():
        wanted = own(x)
    monkeypatch.setattr(held, "run", lambda *_: pytest.fail("it went by what is held"))
    within: dict[str, AbstractContextManager[Any]] = {"autocast": torch.autocast("cpu", torch.bfloat16)}
    with within.get(how, nullcontext()), torch.set_grad_enabled(how == "gradient"):
        if how == "gradient":
            ours(x.requires_grad_()).sum().backward()
            assert x.grad is not None
            assert x.grad.abs().sum() > 0
        elif how == "tangents":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                assert torch.autograd.forward_ad.unpack_dual(ours.call(dual)).tangent.abs().sum() > 0
        elif how == "vmap":
            torch.testing.assert_close(torch.vmap(ours.call)(x[None])[0], wanted, rtol=1e-5, atol=1e-6)
        elif how == "autocast":
            assert ours.call(x).dtype == torch.float32  # as the layer's policy says
        elif how == "explained":
            with loops.recording() as found:
                ours(x)
            assert [layer for layer, _ in found] == [ours]
        elif how == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert isinstance(ours.call(x), FakeTensor)
        else:
            torch.testing.assert_close(ours(x, training=True), wanted, rtol=1e-5, atol=1e-6)


def test_a_layer_that_goes_takes_what_is_held_along() -> None:
    _, ours = made()
    place = held._calls[ours].places[0]
    del ours
    gc.collect()
    assert place not in [one.places[0] for one in held._calls.values()]
