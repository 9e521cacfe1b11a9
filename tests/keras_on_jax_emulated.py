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
from thinned import thinned
from whorl.engines import taped
from whorl.errors import CompileError
from whorl.keras import calls, on_jax, tapes

generator = np.random.default_rng(0)
x = generator.standard_normal((4, 5, 3)).astype("float32")
mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
Made = list[tuple[int, bool]]


@pytest.fixture
def made(folder: Path) -> Iterator[Made]:
    """As on a GPU; what becomes an operation of XLA from here on: of each the plan, and whether it is backward."""
    found: Made = []
    keras.utils.set_random_seed(0)
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


def by_tapes_as_through_python(layer: Any, made: Made, monkeypatch: pytest.MonkeyPatch, **call: Any) -> list[Any]:
    """A step by tapes, which has the bits of one by the callback."""
    found = step(layer, x, **call)
    assert [back for _, back in made] == [False, True]
    with monkeypatch.context() as patch:
        patch.setattr(calls, "number", lambda *given: -1)
        calls._room.cache_clear()
        through = step(layer, x, **call)
    assert len(made) == 2
    for one, other in zip(found, through, strict=True):
        np.testing.assert_array_equal(one, other)
    return found


def close(one: Any, truth: Any) -> None:
    """To 3e-5 of the whole: what is small beside the rest is a sum of numbers that are not."""
    assert np.linalg.norm(one - truth) < 3e-5 * np.linalg.norm(truth)


LAYERS = {
    "LSTM": lambda source, **how: source.LSTM(6, **how),
    "GRU": lambda source, **how: source.GRU(6, **how),
    "SimpleRNN": lambda source, **how: source.SimpleRNN(6, **how),
    "reset before": lambda source, **how: source.GRU(6, reset_after=False, **how),
    "no bias": lambda source, **how: source.LSTM(6, activation="relu", use_bias=False, **how),
    "both": lambda source, **how: source.Bidirectional(source.LSTM(6, **how)),
}


OPTIONS = ["", "masked", "dropout", "masked, dropout", "dropout, both", "masked, dropout, both"]


@pytest.mark.parametrize(("name", "option"), thinned(4, LAYERS, OPTIONS))
def test_by_tapes_a_step_is_what_it_is_through_python(
    name: str, option: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = dict(return_sequences=option != "masked", return_state=True)
    if "dropout" in option:
        how |= dict(dropout=0.2 * ("both" in option), recurrent_dropout=0.3, seed=3)
    layer, stock = [LAYERS[name](source, **how) for source in (whorl.keras, keras.layers)]
    for one in (layer, stock):
        one.build(x.shape)
    stock.set_weights(layer.get_weights())
    call = dict(mask=mask) if "masked" in option else {}
    found = by_tapes_as_through_python(layer, made, monkeypatch, **call)
    for one, truth in zip(found, step(stock, x, **call), strict=True):
        close(one, truth)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_cells_of_whorl_with_vectors(layer_norm: bool, made: Made) -> None:
    """Whose gradients are parts of one array."""
    cell = whorl.keras.Cell(whorl.cells.library.make_lstm(peephole=True), 6, layer_norm=layer_norm)
    ours, stock = whorl.keras.RNN(cell, return_sequences=True), keras.layers.RNN(cell, return_sequences=True)
    for one in (ours, stock):
        one.build(x.shape)
    found = step(ours, x, mask=mask)
    assert [back for _, back in made] == [False, True]
    for got, truth in zip(found, step(stock, x, mask=mask), strict=True):
        close(got, truth)


def test_masks_are_drawn_from_the_same_seed_either_way(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = whorl.keras.Cell(whorl.cells.library.lstm, 6, zoneout=0.2, recurrent_dropout=0.3, dropout=0.2, seed=1)
    layer = whorl.keras.RNN(cell, return_sequences=True)
    layer.build(x.shape)
    by_tapes_as_through_python(layer, made, monkeypatch, mask=mask)


def test_a_model_trains_and_predicts_as_keras_own(made: Made) -> None:
    """Of several layers; no gradient of the embedded tokens' layer below is asked for where it is frozen."""
    tokens, targets = generator.integers(0, 10, (8, 6)), generator.standard_normal((8, 1)).astype("float32")
    found = []
    for source in (whorl.keras, keras.layers):
        keras.utils.set_random_seed(4)
        model = keras.Sequential([
            keras.layers.Embedding(10, 4, mask_zero=True, trainable=False),
            source.Bidirectional(source.LSTM(5, recurrent_dropout=0.2, seed=1, return_sequences=True)),
            source.GRU(4),
            keras.layers.Dense(1),
        ])  # fmt: skip
        model.compile("adam", "mse")
        history = model.fit(tokens, targets, epochs=2, batch_size=4, verbose=0).history["loss"]
        found.append([*history, *model.predict(tokens, verbose=0).ravel(), model.evaluate(tokens, targets, verbose=0)])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
    plans = {number for number, _ in made}
    backward = {number for number, back in made if back}
    assert len(backward) == 2
    assert plans > backward  # inference has plans of its own
    of_x = sorted(taped.written(number).gradients[0][0] >= 0 for number in backward)
    assert of_x == [False, True]


def test_weights_that_are_frozen_get_none(made: Made) -> None:
    layer = whorl.keras.LSTM(6)
    layer.build(x.shape)
    kernel, *rest = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]

    def loss(*weights: Any) -> Any:
        return layer.stateless_call(weights, others, x)[0].sum()

    every = jax.grad(loss, (0, 1, 2))(kernel, *rest)
    (alone,) = jax.grad(loss, (1,))(kernel, *rest)
    np.testing.assert_array_equal(alone, every[1])
    assert [back for _, back in made] == [False, True] * 2


def test_final_states_and_nothing_of_the_outputs(made: Made) -> None:
    """Cotangents that are not there, and an initial state that has one."""
    layer, stock = whorl.keras.LSTM(6, return_state=True), keras.layers.LSTM(6, return_state=True)
    for one in (layer, stock):
        one.build(x.shape)
    stock.set_weights(layer.get_weights())
    start = generator.standard_normal((2, 4, 6)).astype("float32")

    def loss(one: Any, start: Any) -> Any:
        return one(x, initial_state=[start[0], start[1]])[2].sum()

    found = [jax.grad(lambda start, one=one: loss(one, start))(start) for one in (layer, stock)]
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
    assert [back for _, back in made] == [False, True]
    assert not np.any(jax.grad(lambda start: 0.0 * start.sum() + jax.lax.stop_gradient(loss(layer, start)))(start))


def test_mixed_precision(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the callback, which other tests compare with Keras' own."""
    layer = whorl.keras.LSTM(6, dtype="mixed_bfloat16", recurrent_dropout=0.2, seed=3)
    layer.build(x.shape)
    assert by_tapes_as_through_python(layer, made, monkeypatch, mask=mask)[0].dtype == "bfloat16"


def test_what_tapes_cannot_say_is_a_callback(made: Made) -> None:
    """Cells without recurrent weights, and another engine."""
    whorl.keras.RNN(whorl.keras.Cell(whorl.cells.library.ind_rnn, 6))(x)
    whorl.keras.LSTM(6, engine="reference")(x)
    assert not made
    layer = whorl.keras.LSTM(6)
    layer(x)
    assert len(made) == 1


def test_a_new_trace_sees_the_settings_of_its_time(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = whorl.keras.LSTM(6)
    layer.build(x.shape)
    found = []
    for calls_go in ("python", "compiled"):
        monkeypatch.setattr(taped, "ready", lambda calls_go=calls_go: calls_go == "compiled")
        monkeypatch.setitem(whorl.settings._assigned, "calls", calls_go)
        found.append(step(layer, x))
        assert len(made) == (0 if calls_go == "python" else 2)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_goes_wrong_in_a_pass_is_said(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = whorl.keras.LSTM(6)
    layer(x)
    (number, _), *_ = made
    written = taped.written(number)
    kinds = [((5, 4, 6), "float32"), ((1, 4, 6), "float32")]  # a state is missing
    given = [
        np.zeros((5, 4, 3), "float32"),
        *[np.zeros(shape, "float32") for shape in ((24, 3), (24, 6), (24,), (24,))],
    ]
    assert len(written.outputs) == 3
    with pytest.raises(Exception, match="a pass makes 3 arrays, 2 are there"):  # versions of JAX differ in the class
        jax.block_until_ready(tapes.forward(number, given, kinds))


def test_a_program_of_another_process_is_refused(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds addresses of that one's."""
    assert tapes.are_taken()
    monkeypatch.setattr(tapes, "PROCESS", 1)
    with pytest.raises(Exception, match="another process compiled this program: trace it in this one"):
        jax.block_until_ready(whorl.keras.LSTM(9)(x))


def test_without_a_compiler_calls_are_callbacks_and_it_is_said(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any) -> Any:
        raise CompileError("there is none.")

    monkeypatch.setattr(tapes, "load", refused)
    tapes.are_taken.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"calls of engines on JAX go through Python: there is none\."):
            whorl.keras.LSTM(7)(x)
    finally:
        tapes.are_taken.cache_clear()
    assert not made
