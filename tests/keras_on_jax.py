"""whorl.keras on the JAX backend, against Keras' own layers: run by test_keras_jax in a process of its own."""

import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch

import whorl
import whorl.keras
from thinned import thinned
from whorl.engines import ENGINES
from whorl.keras import calls, on_jax, xla

generator = np.random.default_rng(0)
x = generator.standard_normal((4, 5, 3)).astype("float32")
mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
whorl.settings.slow = "allow"
torch.backends.cudnn.rnn.fp32_precision = "ieee"  # as JAX is told by its environment
ENGINES_HERE = (
    ["cpu", "onednn", "reference"] if jax.default_backend() == "cpu" else ["persistent", "cudnn", "reference"]
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    keras.utils.set_random_seed(0)


@pytest.fixture(params=["", "in XLA's memory"] if jax.default_backend() == "cpu" else [""])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What backward reads lies where it does on this device; on a CPU also where on a GPU, always by a callback."""
    if request.param:
        monkeypatch.setattr(on_jax, "_lies_in_xla", lambda device: True)
        monkeypatch.setattr(xla, "takes", lambda *given, **more: False)


@pytest.fixture
def through_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No call on a GPU goes by tapes, of which Python sees nothing."""
    monkeypatch.setattr(calls, "number", lambda *given: -1)
    for cached in (calls._number, calls._room):
        cached.cache_clear()
    yield
    for cached in (calls._number, calls._room):
        cached.cache_clear()


def close(one: Any, other: Any) -> None:
    np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-5)


def value_and_gradients(layer: Any, **call: Any) -> list[Any]:
    """Outputs, and the gradient of x and of each weight, inside jit."""
    trainable = [variable.value for variable in layer.trainable_variables]
    others = [variable.value for variable in layer.non_trainable_variables]

    def loss(trainable: Any, x: Any) -> Any:
        outputs, _ = layer.stateless_call(trainable, others, x, **call)
        flat = jax.tree.leaves(outputs)
        return sum((out * (1 + place)).sum() ** 2 for place, out in enumerate(flat)), flat

    grads, outputs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(trainable, x)
    return [*outputs, *jax.tree.leaves(grads)]


OPTIONS = {
    "plain": {},
    "backwards": dict(go_backwards=True),
    "relu": dict(activation="relu", use_bias=False),
    "dropout": dict(dropout=0.2, recurrent_dropout=0.3, seed=3),
    "zero": dict(zero_output_for_mask=True),
}


@pytest.mark.parametrize("name, option, masked", thinned(2, ["LSTM", "GRU", "SimpleRNN"], OPTIONS, [False, True]))
def test_a_layer_is_keras_own(name: str, option: str, masked: bool) -> None:
    made = []
    for source in (whorl.keras, keras.layers):
        layer = getattr(source, name)(2, return_sequences=True, return_state=True, **OPTIONS[option])
        layer.build(x.shape)
        made.append(layer)
    made[0].set_weights(made[1].get_weights())
    made[
        1
    ].use_cudnn = False  # which gives the outputs of go_backwards in the order of time, as Keras does nowhere else
    call = dict(mask=mask if masked else None, training=option == "dropout")
    found = [value_and_gradients(layer, **call) for layer in made]
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_training_gives_keras_losses(kept: None) -> None:
    tokens = generator.integers(0, 10, (24, 6))
    targets = generator.standard_normal((24, 1)).astype("float32")
    found = []
    for source in (whorl.keras, keras.layers):
        keras.utils.set_random_seed(4)
        model = keras.Sequential([
            keras.layers.Embedding(10, 4, mask_zero=True),
            source.Bidirectional(source.LSTM(5, recurrent_dropout=0.2, seed=1, return_sequences=True)),
            source.RNN([keras.layers.GRUCell(4), keras.layers.LSTMCell(3)]),
            keras.layers.Dense(1),
        ])  # fmt: skip
        model.compile("adam", "mse", jit_compile=True)
        history = model.fit(tokens, targets, epochs=3, batch_size=8, verbose=0).history["loss"]
        found.append([*history, *model.predict(tokens, verbose=0).ravel()])
    close(*found)
    explained = whorl.keras.explain(whorl.keras.LSTM(2, engine="reference", name="rnn"), x, mask=mask)
    assert "5 steps, batch 4, a mask; float32 on " in str(explained)


def test_a_cell_of_whorl(kept: None) -> None:
    cell = whorl.keras.Cell(whorl.cells.library.make_lstm(peephole=True), 4, zoneout=0.2, layer_norm=True, seed=1)
    ours, stock = whorl.keras.RNN(cell), keras.layers.RNN(cell)
    ours.build(x.shape)
    stock.build(x.shape)
    close(ours(x, mask=mask), stock(x, mask=mask))
    assert not np.array_equal(ours(x, training=True), ours(x, training=True))
    assert all(np.abs(gradient).sum() > 0 for gradient in value_and_gradients(ours)[1:4])


@pytest.mark.parametrize("name", ENGINES_HERE)
def test_a_gradient_does_not_run_the_forward_again(
    name: str, kept: None, through_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = ENGINES[name], []
    for kind in ("forward", "backward"):
        own = getattr(engine, kind)
        monkeypatch.setattr(engine, kind, lambda *given, kind=kind, own=own: calls.append(kind) or own(*given))
    layer = whorl.keras.RNN([keras.layers.LSTMCell(2), keras.layers.LSTMCell(2)], engine=name)
    layer.build(x.shape)
    weights, others = ([v.value for v in some] for some in (layer.trainable_variables, layer.non_trainable_variables))
    gradient = jax.jit(jax.grad(lambda weights, x: layer.stateless_call(weights, others, x)[0].sum()))
    jax.block_until_ready(gradient(weights, x))
    calls.clear()
    jax.block_until_ready(gradient(weights, x))
    by_torch = engine.recorded and not on_jax._lies_in_xla(
        jax.default_backend()
    )  # its backward, that autograd recorded
    assert calls == (["forward"] * 2 if by_torch else ["forward", "forward", "backward", "backward"])


@pytest.mark.parametrize("training", [True, False])
def test_recurrent_dropout_of_whole_numbers(training: bool, kept: None) -> None:
    found = []
    for source in (whorl.keras, keras.layers):
        keras.utils.set_random_seed(0)
        layer = source.LSTM(2, recurrent_dropout=0.3)
        found.append(layer(np.round(x).astype("int32"), training=training))
    close(*found)


def test_a_callback_gets_no_states_of_zero_and_the_masks_of_all_gates_as_one(
    kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setattr(xla, "takes", lambda *given, **more: False)
    for module, name in ((on_jax, "_operation"), (calls, "_call")):
        own = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda job, *leaves, own=own: found.append([leaf.shape for leaf in leaves]) or own(job, *leaves),
        )
    layer = whorl.keras.LSTM(2, dropout=0.2, recurrent_dropout=0.2)
    layer(x, training=True)
    layer(x, initial_state=[jnp.zeros((len(x), 2))] * 2)
    drawn, given = found
    of_state = [shape for shape in given if shape[-2:] == (len(x), 2)]
    assert [shape for shape in drawn[1:] if len(shape) == 3] == [(4, len(x), x.shape[2]), (4, len(x), 2)]
    assert len(of_state) == 2
    assert not [shape for shape in drawn if shape in of_state]


@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["", "dropout"])
def test_no_gradient_is_made_that_jax_does_not_ask_for(
    dropout: float, kept: None, through_python: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of x, and of dropout's masks; by the operation of XLA, which takes no dropout of x, and by the callback."""
    seen, engine = [], ENGINES[ENGINES_HERE[0]]
    own = engine.backward
    monkeypatch.setattr(engine, "backward", lambda plan, *given: seen.append(plan) or own(plan, *given))
    traced = recorded(monkeypatch)
    layer = whorl.keras.LSTM(2, engine=ENGINES_HERE[0], dropout=dropout, recurrent_dropout=0.2, seed=1)
    layer.build(x.shape)
    weights, others = ([v.value for v in some] for some in (layer.trainable_variables, layer.non_trainable_variables))

    def loss(weights: Any, x: Any) -> Any:
        return layer.stateless_call(weights, others, x, training=True)[0].sum()

    found = jax.jit(jax.grad(loss))(weights, x)
    both = jax.grad(loss, (0, 1))(weights, x)
    for one, other in zip(found, both[0], strict=True):
        close(one, other)
    assert np.abs(both[1]).sum() > 0
    asked = [numbers.wants_x for name, numbers in traced if name == "backward"]
    direct = not dropout and not on_jax._lies_in_xla(jax.default_backend())
    assert [plan.problem.constants for plan in seen] == ([] if direct else [("x", "noise"), ("noise",)])
    assert asked == ([0, 1] if direct else [])


def test_of_cells_upon_another_the_upper_hand_their_gradient_down(kept: None) -> None:
    """Also where JAX asks for none of the lowest one's input."""
    cells, found = [keras.layers.LSTMCell(2), keras.layers.GRUCell(3), keras.layers.LSTMCell(2)], []
    for source in (whorl.keras, keras.layers):
        layer = source.RNN(cells)
        layer.build(x.shape)
        weights, others = (
            [v.value for v in some] for some in (layer.trainable_variables, layer.non_trainable_variables)
        )

        def loss(weights: Any, layer: Any = layer, others: Any = others) -> Any:
            return layer.stateless_call(weights, others, x)[0].sum()

        found.append(jax.jit(jax.grad(loss))(weights))
    for one, other in zip(*found, strict=True):
        close(one, other)
    assert all(np.abs(gradient).sum() > 0 for gradient in found[0])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="on a GPU nothing waits on the host")
def test_what_waits_too_long_for_its_backward_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], ENGINES["cpu"].forward
    monkeypatch.setattr(ENGINES["cpu"], "forward", lambda *given: calls.append("forward") or own(*given))
    layer = whorl.keras.RNN([keras.layers.GRUCell(2), keras.layers.GRUCell(2)], engine="cpu")
    layer.build(x.shape)
    inputs = [scale * x for scale in (1, 2, 3)]
    wanted = [jax.vjp(layer, one)[1](jnp.ones((4, 2)))[0] for one in inputs]
    assert not on_jax._waiting
    monkeypatch.setattr(on_jax, "_MOST_WAITING", 1)
    calls.clear()
    pulls = [jax.vjp(layer, one)[1] for one in inputs]
    assert len(on_jax._waiting) == 1
    close([pull(jnp.ones((4, 2)))[0] for pull in pulls], wanted)
    assert len(calls) == 2 * (3 + 2)


def test_what_is_saved_lives_as_long_as_the_gradient_needs_it(kept: None) -> None:
    """Two forwards before both backwards, each of which runs twice; masks that leave less to save."""
    layer = whorl.keras.RNN([keras.layers.LSTMCell(3), keras.layers.GRUCell(2)])
    layer.build(x.shape)
    masks = [jnp.asarray(mask), jnp.asarray(mask[::-1])]
    pulls = [jax.vjp(lambda x, given=given: layer(x, mask=given), x)[1] for given in masks]
    ones = jnp.ones((4, 2))
    found = [pull(ones)[0] for pull in (*pulls, *pulls)]
    close(found[:2], found[2:])
    wanted = [jax.grad(lambda x, given=given: layer(x, mask=given).sum())(x) for given in masks]
    close(found[:2], wanted)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What becomes an operation of XLA from here on: (name, numbers) of each."""
    made, own = [], xla._call
    monkeypatch.setattr(xla, "_call", lambda name, *given: made.append((name, given[1])) or own(name, *given))
    return made


LAYERS = {
    "LSTM": lambda units, **how: whorl.keras.LSTM(units, **how),
    "GRU": lambda units, **how: whorl.keras.GRU(units, **how),
    "reset before": lambda units, **how: whorl.keras.GRU(units, reset_after=False, **how),
    "no bias": lambda units, **how: whorl.keras.LSTM(units, activation="relu", use_bias=False, **how),
    "backwards": lambda units, **how: whorl.keras.SimpleRNN(units, go_backwards=True, **how),
    "dropout": lambda units, **how: whorl.keras.GRU(units, reset_after=False, recurrent_dropout=0.3, seed=1, **how),
    "both": lambda units, **how: whorl.keras.Bidirectional(
        whorl.keras.LSTM(units, recurrent_dropout=0.3, seed=1, **how)
    ),
}
SIZES = {"small": (1, 1, 1, 1), "odd": (5, 19, 18, 7), "past a tile": (3, 4, 65, 65)}
"""Batch, time, inputs, units: two threads share none of these batches evenly."""
MASKS = {
    "": lambda batch, time: None,
    "ends": lambda batch, time: np.arange(time) < np.arange(batch)[::-1, None] * time // batch,
    "holes": lambda batch, time: (np.arange(time) + np.arange(batch)[:, None]) % 3 > 0,
    "nothing": lambda batch, time: np.zeros((batch, time), bool),
}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an operation of XLA on CPUs")
@pytest.mark.parametrize(
    ("name", "masked", "size"),
    [(name, "holes", "odd") for name in LAYERS]
    + [
        (name, ["", "ends", "nothing"][place % 3], ["past a tile", "small"][place % 2])
        for place, name in enumerate(LAYERS)
    ],
)
def test_an_operation_of_xla_gives_what_the_callback_gives(
    name: str, masked: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, final states, and gradients of x, initial states and weights; by the callback of a GPU too.

    That one by `reference`: engine `cpu` saves less where steps do not count, which on a GPU none does.
    """
    batch, time, inputs, units = SIZES[size]
    x, given = generator.standard_normal((batch, time, inputs)).astype("float32"), MASKS[masked](batch, time)
    how = dict(return_sequences=masked != "ends", return_state=True, zero_output_for_mask=masked == "holes")
    layer, of_gpu = [LAYERS[name](units, engine=engine, **how) for engine in ("cpu", "reference")]
    layer.build(x.shape)
    of_gpu.build(x.shape)
    count = len(getattr(layer, "forward_layer", layer).state_size) * (1 + (name == "both"))
    states = list(generator.standard_normal((count, batch, units)).astype("float32"))
    weights, others = ([v.value for v in some] for some in (layer.trainable_variables, layer.non_trainable_variables))

    def loss(weights: Any, x: Any, states: Any, layer: Any = layer) -> Any:
        outputs, _ = layer.stateless_call(weights, others, x, initial_state=states, mask=given, training=True)
        return sum((jnp.cos(place + jnp.arange(out.size)).reshape(out.shape) * out).sum() ** 2
                   for place, out in enumerate(outputs)), outputs  # fmt: skip

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        traced = recorded(monkeypatch)
        own = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(weights, x, states)
        ways = 1 + (name == "both")
        assert [kind for kind, _ in traced] == ["forward"] * ways + ["backward"] * ways
        alone = loss(weights, x, states)[1]
        monkeypatch.setattr(xla, "takes", lambda *given, **how: False)
        other = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(weights, x, states)
        monkeypatch.setattr(on_jax, "_lies_in_xla", lambda device: True)
        other_loss = partial(loss, layer=of_gpu)
        third = jax.jit(jax.grad(other_loss, argnums=(0, 1, 2), has_aux=True))(weights, x, states)
    finally:
        torch.set_num_threads(threads)
    found_by_each, wanted_of_each = jax.tree.leaves((own, alone, third)), jax.tree.leaves((other, other[1], other))
    for found, wanted in zip(found_by_each, wanted_of_each, strict=True):
        scale = max(1.0, float(np.abs(wanted).max()))
        close(found / scale, wanted / scale)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an operation of XLA on CPUs")
@pytest.mark.parametrize("sequences", [False, True], ids=["last", "sequences"])
@pytest.mark.parametrize("wrapped", [lambda layer: layer, whorl.keras.Bidirectional], ids=["", "both"])
def test_what_onednn_infers_an_operation_of_xla_differentiates(
    wrapped: Any, sequences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plans say: onednn is faster at these sizes, engine `cpu` with a gradient."""
    layer = wrapped(whorl.keras.LSTM(257, return_sequences=sequences))
    layer.build(x.shape)
    assert "onednn" in str(layer.explain(x, training=False))
    weights, others = ([v.value for v in some] for some in (layer.trainable_variables, layer.non_trainable_variables))

    def loss(weights: Any, x: Any) -> Any:
        y = layer.stateless_call(weights, others, x)[0]
        return (jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y).sum() ** 2

    traced = recorded(monkeypatch)
    value, ways = jax.jit(loss)(weights, x), 1 + (wrapped is whorl.keras.Bidirectional)
    assert not traced
    alone = jax.jit(jax.grad(loss))(weights, x)
    assert [(kind, numbers.wants_x) for kind, numbers in traced] == [("forward", 0)] * ways + [("backward", 0)] * ways
    found = value, alone, jax.value_and_grad(loss, (0, 1))(weights, x)
    assert traced[-1][1].wants_x
    monkeypatch.setattr(xla, "takes", lambda *given, **how: False)
    again = jax.value_and_grad(loss, (0, 1))(weights, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves((again[0], again[1][0], again)), strict=True):
        close(one, other)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an operation of XLA on CPUs")
def test_an_operation_of_xla_says_what_memory_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece that the loop and its products take is denied in turn; the call after that is right."""
    from whorl.engines.cpu import plain, sweep

    text = Path(__file__).with_name("denied.cpp").read_text(encoding="utf-8") + sweep.sweep()
    caches = sweep.kernel, sweep._loop, plain.sizes
    monkeypatch.setattr(sweep, "sweep", lambda: text)
    for cached in caches:
        cached.cache_clear()
    try:
        layer = whorl.keras.LSTM(7, engine="cpu")  # of other sizes than the other tests, whose programs have their loop
        layer.build((11, 13, 6))
        given = generator.standard_normal((11, 13, 6)).astype("float32")
        weights, others = (
            [v.value for v in some] for some in (layer.trainable_variables, layer.non_trainable_variables)
        )

        def loss(weights: Any, x: Any) -> Any:
            return (layer.stateless_call(weights, others, x)[0] ** 2).sum()

        traced = recorded(monkeypatch)
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        wanted = jax.tree.leaves(step(weights, given))
        assert [kind for kind, _ in traced] == ["forward", "backward"]
        library = sweep._loop(torch.float32)
        library.denied_bytes.restype = library.denied_held.restype = ctypes.c_int64
        for count in range(1, 100):
            held, said, found = library.denied_held(), "", []
            library.denied_next(ctypes.c_int64(count))
            try:
                found = jax.tree.leaves(jax.block_until_ready(step(weights, given)))
            except (ValueError, RuntimeError) as error:  # versions of JAX differ
                said = str(error)
            denied = library.denied_bytes()
            library.denied_next(ctypes.c_int64(0))
            if not denied:
                break
            assert f"RESOURCE_EXHAUSTED: engine 'cpu' asked for {denied} bytes of memory" in said
            assert library.denied_held() == held
        assert count > 10
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        for cached in caches:
            cached.cache_clear()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an operation of XLA on CPUs")
def test_what_is_no_operation_of_xla_is_a_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another engine, dropout of x, another dtype, a cell of whorl's own, and a call that somebody asks about."""
    traced, ones = recorded(monkeypatch), jnp.ones((4, 9, 3))
    cell = whorl.keras.Cell(whorl.cells.library.make_lstm(peephole=True), 4)
    whorl.keras.LSTM(4, engine="onednn")(ones)
    whorl.keras.LSTM(4, dropout=0.2)(ones, training=True)
    whorl.keras.LSTM(4, dtype="mixed_bfloat16")(ones)
    whorl.keras.RNN(cell)(ones)
    layer = whorl.keras.LSTM(4, engine="cpu")
    layer.explain(ones)
    assert not traced
    layer(ones)
    assert [name for name, _ in traced] == ["forward"]
    with pytest.raises(whorl.UnsupportedError, match="onednn"):
        whorl.keras.LSTM(4, engine="onednn", activation="relu")(ones)


def test_vmap_runs_rows_one_after_the_other() -> None:
    layer = whorl.keras.GRU(2)
    layer.build(x.shape)
    rows = np.stack([x, 2 * x])
    close(jax.vmap(layer)(rows), [layer(row) for row in rows])


def test_what_does_not_fit_is_refused() -> None:
    layer = whorl.keras.LSTM(2)
    layer.build(x.shape)
    with pytest.raises(whorl.InputError, match="has 2 features"):
        layer(x[..., :2])
    with pytest.raises(whorl.InputError, match="x has no steps, this LSTM takes 1 or more"):
        layer(x[:, :0])
    for given in (1, 3):
        with pytest.raises(whorl.InputError, match=f"initial_state has {given} tensor.* this LSTM takes 2"):
            layer(x, initial_state=[jnp.zeros((4, 2))] * given)
