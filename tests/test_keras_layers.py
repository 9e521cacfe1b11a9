"""whorl.keras against Keras' own layers: numbers and gradients, over the product of what they take (torch backend).

A part of the product, the same each time; all of it with WHORL_TEST_ALL=1 in the environment (4 minutes).
"""

import itertools
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl  # noqa: E402
import whorl.keras  # noqa: E402

BATCH, TIME, INPUTS, UNITS = 4, 5, 3, 2
NO_YES = (False, True)
# The last row has no step that counts, in every kind.
MASKS = {
    "none": None,
    "right": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]],
    "holes": [[0, 1, 0, 1, 0], [1, 0, 0, 0, 1], [1, 1, 0, 1, 1], [0, 0, 0, 0, 0]],
    "all": [[1, 1, 1, 1, 1]] * 4,
}


def pair(name: str, dtype: str, **arguments: Any) -> tuple[Any, Any]:
    """Keras' layer and ours, of the same weights and the same seed."""
    keras.utils.set_random_seed(1)
    made = []
    if name == "GRU before":
        name, arguments["reset_after"] = "GRU", False
    for source in (keras.layers, whorl.keras):
        # biases that are not zero, so that one left out shows
        layer = getattr(source, name)(UNITS, dtype=dtype, bias_initializer="random_normal", **arguments)
        layer.build((BATCH, TIME, INPUTS))
        made.append(layer)
    made[1].set_weights(made[0].get_weights())
    return made[0], made[1]


def results(
    call: Callable[..., Any], x: Tensor, weights: Sequence[Tensor], initial: Any, calls: int = 1
) -> list[Tensor]:
    """Output, states and the gradient of everything they depend on, of the last of some calls."""
    x = x.clone().requires_grad_()
    states = [state.clone().requires_grad_() for state in initial] if initial is not None else None
    for _ in range(calls):
        outputs = call(x, states)
    generator = torch.Generator().manual_seed(5)
    loss = sum((o * torch.randn(o.shape, generator=generator, dtype=o.dtype)).sum() for o in outputs)
    leaves = [x, *(states or []), *weights]
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outputs, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True))]


def assert_equal(ours: list[Tensor], other: list[Tensor], tolerance: float, title: str) -> None:
    assert len(ours) == len(other)
    for a, b in zip(ours, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda text: f"{title}: {text}")


def values(layer: Any) -> list[Tensor]:
    return [variable.value for variable in layer.trainable_variables]


FLAGS = ("go_backwards", "return_sequences", "zero_output_for_mask", "initial_state")
FOR_EACH_LAYER = [
    pytest.mark.parametrize("recurrent_dropout", [0.0, 0.4]),
    pytest.mark.parametrize("dropout", [0.0, 0.3]),
    pytest.mark.parametrize("use_bias", NO_YES, ids=["no bias", "bias"]),
    pytest.mark.parametrize("activation", ["tanh", "relu", "softsign"]),
    pytest.mark.parametrize("name", ["LSTM", "GRU", "GRU before", "SimpleRNN"]),
]


def for_each_layer(test: Callable[..., None]) -> Callable[..., None]:
    for mark in FOR_EACH_LAYER:
        test = mark(test)
    return test


def calls_of(stateful: bool, *layer: Any) -> Iterator[tuple[Any, dict[str, bool], str]]:
    """The ways to call one layer: a mask, the flags, and a title.  A ninth of them, another for each layer."""
    every = list(itertools.product(MASKS, *[NO_YES] * len(FLAGS)))
    share = 1 if "WHORL_TEST_ALL" in os.environ else 9
    for mask, *chosen in every[zlib.crc32(repr((stateful, layer)).encode()) % share :: share]:
        given = dict(zip(FLAGS, chosen, strict=True))
        without = given["zero_output_for_mask"] and mask == "none"
        if not without and not (stateful and given["initial_state"]):  # which the states take the place of
            yield None if MASKS[mask] is None else torch.tensor(MASKS[mask]).bool(), given, f"mask {mask}, {given}"


def inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(3)
    states = 2 if name == "LSTM" else 1
    return torch.randn(BATCH, TIME, INPUTS, dtype=dtype), [torch.randn(BATCH, UNITS, dtype=dtype)] * states


@pytest.mark.parametrize("stateful", NO_YES, ids=["", "stateful"])
@for_each_layer
def test_a_layer_is_keras_own(
    name: str, activation: str, use_bias: bool, dropout: float, recurrent_dropout: float, stateful: bool
) -> None:
    x, states = inputs(name, torch.float32)
    training = bool(dropout or recurrent_dropout)
    stock, ours = pair(
        name, "float32", activation=activation, use_bias=use_bias, dropout=dropout, recurrent_dropout=recurrent_dropout,
        seed=7, stateful=stateful, return_state=True,
    )  # fmt: skip
    stock.use_cudnn = False if stateful else "auto"  # with "auto" Keras changes in place what its backward reads
    for valid, given, title in calls_of(stateful, name, activation, use_bias, dropout, recurrent_dropout):
        initial = states if given.pop("initial_state") else None
        found = []
        for layer in (ours, stock):
            for flag, value in given.items():
                setattr(layer, flag, value)
            if stateful:
                layer.reset_state()
            call = partial(layer, mask=valid, training=training)
            found.append(
                results(lambda x, s, call=call: call(x, initial_state=s), x, values(layer), initial, 1 + stateful)
            )
        assert_equal(*found, 1e-5, title)


@for_each_layer
def test_a_layer_in_float64_is_what_keras_says(
    name: str, activation: str, use_bias: bool, dropout: float, recurrent_dropout: float
) -> None:
    """Against the formulas, since Keras multiplies its float64 in float32."""
    x, states = inputs(name, torch.float64)
    stock, ours = pair(
        name, "float64", activation=activation, use_bias=use_bias, dropout=dropout, recurrent_dropout=recurrent_dropout,
        seed=7, return_state=True,
    )  # fmt: skip
    for valid, given, title in calls_of(False, name, activation, use_bias, dropout, recurrent_dropout):
        initial = states if given.pop("initial_state") else None
        for flag, value in given.items():
            setattr(ours, flag, value)
        masks = (stock.cell.get_dropout_mask(x[:, 0]), stock.cell.get_recurrent_dropout_mask(states[0]))
        stock.cell.reset_dropout_mask()
        stock.cell.reset_recurrent_dropout_mask()
        plain = partial(plain_loop, ours, masks=masks, mask=valid)
        call = partial(ours, mask=valid, training=True)
        found = results(lambda x, s, call=call: call(x, initial_state=s), x, values(ours), initial)
        assert_equal(found, results(plain, x, values(ours), initial), 1e-10, title)


def plain_loop(layer: Any, x: Tensor, states: Any, masks: tuple[Any, Any], mask: Tensor | None) -> list[Tensor]:
    """The layer as Keras documents it, in the dtype of its weights."""
    act, gate = getattr(torch.nn.functional, layer.activation.__name__), torch.sigmoid
    kernel, recurrent, *bias = values(layer)
    kind, u = type(layer).__name__, UNITS
    count = kernel.shape[1] // u
    after = kind == "GRU" and layer.cell.reset_after
    b, rb = (bias[0] if after else (bias[0], torch.zeros_like(bias[0]))) if bias else [kernel.new_zeros(count * u)] * 2
    m, rm = (given if isinstance(given, list) else [1.0 if given is None else given] * count for given in masks)
    state = list(states) if states is not None else [x.new_zeros(len(x), u)] * (1 + (kind == "LSTM"))
    out, outs = torch.zeros_like(state[0]), []

    def split(value: Tensor) -> Sequence[Tensor]:
        return value.split(u, -1)

    for t in reversed(range(TIME)) if layer.go_backwards else range(TIME):
        xs = [(x[:, t] * d) @ w + c for d, w, c in zip(m, split(kernel), split(b), strict=True)]
        ws, rbs = split(recurrent), split(rb)
        rs = [(state[0] * d) @ w + c for d, w, c in zip(rm, ws, rbs, strict=True)]
        if kind == "LSTM":
            i, f, g, o = (p + q for p, q in zip(xs, rs, strict=True))
            c = gate(f) * state[1] + gate(i) * act(g)
            new = [gate(o) * act(c), c]
        elif kind == "GRU":
            z, r = gate(xs[0] + rs[0]), gate(xs[1] + rs[1])
            h = act(xs[2] + (r * rs[2] if after else (r * state[0] * rm[2]) @ ws[2]))
            new = [z * state[0] + (1 - z) * h]
        else:
            new = [act(xs[0] + rs[0])]
        valid = torch.ones(len(x), 1, dtype=torch.bool) if mask is None else mask[:, t, None]
        out = torch.where(valid, new[0], torch.zeros_like(out) if layer.zero_output_for_mask else out)
        state = [torch.where(valid, n, s) for n, s in zip(new, state, strict=True)]
        outs.append(out)
    return [torch.stack(outs, 1) if layer.return_sequences else out, *state]


@pytest.mark.parametrize("initial", NO_YES)
@pytest.mark.parametrize("name", ["LSTM", "SimpleRNN"])
def test_masks_of_a_call_that_raised_are_not_those_of_the_next(name: str, initial: bool) -> None:
    """The next has a batch of another size, and its masks are those that its layer draws next."""
    stock, ours = pair(name, "float32", dropout=0.3, recurrent_dropout=0.4, seed=7)

    def call(layer: Any, batch: int) -> Any:
        states = (
            [torch.zeros(batch, UNITS) for _ in layer.cell.state_size] if name == "LSTM" else torch.zeros(batch, UNITS)
        )
        return layer(torch.ones(batch, TIME, INPUTS), initial_state=states if initial else None, training=True)

    ours.engine = "cudnn"
    with pytest.raises(whorl.UnsupportedError):
        call(ours, BATCH)
    call(stock, BATCH)
    ours.engine = "cpu"
    for _ in range(2):
        torch.testing.assert_close(call(ours, BATCH + 1), call(stock, BATCH + 1), rtol=1e-5, atol=1e-5)


def test_masks_that_could_not_be_drawn_are_not_those_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a GPU had no memory for them."""
    _, ours = pair("GRU", "float32", dropout=0.3, recurrent_dropout=0.4, seed=7)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "bernoulli", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ours(torch.ones(BATCH, TIME, INPUTS), training=True)
    assert ours(torch.ones(BATCH + 1, TIME, INPUTS), training=True).shape == (BATCH + 1, UNITS)
