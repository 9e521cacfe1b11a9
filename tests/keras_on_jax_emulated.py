"""whorl.keras on JAX where engine `persistent` runs, its kernels on the host by `emulation`: run by test_keras_jax."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import whorl
import whorl.keras
from emulation import emulated
from whorl.engines.cuda import taped
from whorl.keras import calls, on_jax, tapes

generator = np.random.default_rng(0)
x = generator.standard_normal((4, 5, 3)).astype("float32")
mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
Made = list[tuple[int, bool]]


@pytest.fixture
def made(folder: Path) -> Iterator[Made]:
    """As on a GPU; what becomes an operation of XLA from here on: of each the plan, and whether it is backward."""
    found: Made = []
    with emulated(folder) as patch:
        if taped._run is None:
            taped._run = taped.loaded()
        own = tapes._pass
        patch.setattr(on_jax, "_lies_in_xla", lambda device: True)
        patch.setattr(taped, "ready", lambda: True)
        patch.setattr(
            tapes, "_pass", lambda number, back, *rest: found.append((number, back)) or own(number, back, *rest)
        )
        calls._number.cache_clear()
        calls._room.cache_clear()
        yield found
    calls._number.cache_clear()
    calls._room.cache_clear()


def step(layer: Any, given: Any, training: bool = True, **call: Any) -> list[Any]:
    """Outputs, and the gradient of x and of each weight, inside jit."""
    trainable = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]

    def loss(trainable: Any, x: Any) -> Any:
        outputs, _ = layer.stateless_call(trainable, others, x, training=training, **call)
        flat = jax.tree.leaves(outputs)
        return sum((out * (1 + place)).sum() ** 2 for place, out in enumerate(flat)), flat

    grads, outputs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(trainable, given)
    return [np.asarray(one) for one in (*outputs, *jax.tree.leaves(grads))]


LAYERS = {
    "LSTM": lambda source, **how: source.LSTM(6, **how),
    "GRU": lambda source, **how: source.GRU(6, **how),
    "SimpleRNN": lambda source, **how: source.SimpleRNN(6, **how),
    "no bias": lambda source, **how: source.LSTM(6, activation="relu", use_bias=False, **how),
    "both": lambda source, **how: source.Bidirectional(source.LSTM(6, **how)),
}


@pytest.mark.parametrize("option", ["", "masked", "dropout", "masked, dropout"])
@pytest.mark.parametrize("name", LAYERS)
def test_by_tapes_a_step_is_what_it_is_through_python(
    name: str, option: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = dict(return_sequences=option != "masked", return_state=True)
    if "dropout" in option:
        how |= dict(recurrent_dropout=0.3, seed=3)
    layer, stock = [LAYERS[name](source, **how) for source in (whorl.keras, keras.layers)]
    for one in (layer, stock):
        one.build(x.shape)
    stock.set_weights(layer.get_weights())
    call = dict(mask=mask) if "masked" in option else {}
    found = step(layer, x, **call)
    assert [back for _, back in made] == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(calls, "number", lambda *given: -1)
        calls._room.cache_clear()
        through = step(layer, x, **call)
    assert len(made) == 2
    for one, other, truth in zip(found, through, step(stock, x, **call), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, truth, rtol=1e-5, atol=1e-5)
