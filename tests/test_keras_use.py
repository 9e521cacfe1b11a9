"""How whorl.keras layers behave in Keras: activations, configs, files, training, precision, engines, announcements."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl  # noqa: E402
import whorl.keras  # noqa: E402
from whorl.cells.expr import var  # noqa: E402
from whorl.cells.graphs import Evaluator  # noqa: E402
from whorl.keras import loops  # noqa: E402
from whorl.keras.activations import pointwise  # noqa: E402
from whorl.keras.cells import settle  # noqa: E402
from whorl.weights import from_keras, to_keras  # noqa: E402

NAMES = ["LSTM", "GRU", "SimpleRNN"]
x = np.random.default_rng(0).standard_normal((4, 5, 3)).astype("float32")
mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)

# --- activations ------------------------------------------------------------------------------------------------------

NOT_POINTWISE = {"softmax", "log_softmax", "glu", "sparsemax", "threshold"}  # a threshold has no default
BUILT_IN = sorted({function.__name__ for function in keras.src.activations.ALL_OBJECTS})


def scaled(x: Any) -> Any:
    return 0.5 * keras.ops.tanh(x) + keras.ops.where(x > 0, keras.ops.square(x), keras.ops.exp(x) - 1)


WRITTEN = {
    "keras.ops": scaled,
    "torch": lambda x: torch.tanh(x) * 2 + torch.nn.functional.leaky_relu(x, 0.3),
    "arithmetic": lambda x: x * 0.5 - 1,
    "of an argument": lambda x: keras.activations.relu(x, negative_slope=0.3, max_value=2.0, threshold=0.5),
    "approximate": lambda x: keras.activations.gelu(x, approximate=True),
    "clip": lambda x: keras.ops.clip(x, -0.5, 0.7) + keras.ops.maximum(x, 0.1 * x),
    "ReLU": keras.layers.ReLU(negative_slope=0.05, dtype="float64"),
    "LeakyReLU": keras.layers.LeakyReLU(dtype="float64"),
    "ELU": keras.layers.ELU(0.3, dtype="float64"),
    "Activation": keras.layers.Activation("silu", dtype="float64"),
}


@pytest.mark.parametrize("activation", [*(name for name in BUILT_IN if name not in NOT_POINTWISE), *WRITTEN])
def test_an_activation_means_what_keras_says(activation: str) -> None:
    function = WRITTEN.get(activation) or keras.activations.get(activation)
    at = torch.linspace(-4, 4, 41, dtype=torch.float64).requires_grad_()
    evaluator = Evaluator((pointwise(function)(var("x")),))
    value, wanted = evaluator({"x": at}, evaluator.constants(at), lambda *_: at)[0], function(at)
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)  # Keras keeps some numbers in float32
    gradients = [torch.autograd.grad(y.sum(), at)[0] for y in (value, wanted)]
    at_ends = (at.detach() * 10 % 2).abs() < 1e-9  # there torch and Keras differ in which side they take
    torch.testing.assert_close(gradients[0][~at_ends], gradients[1][~at_ends], rtol=1e-6, atol=1e-6)


def test_a_plain_layer_is_the_plain_cell() -> None:
    """So that every engine knows it."""
    layer = whorl.keras.LSTM(4)
    layer.build(x.shape)
    part = loops.parts_of(layer, x)[0][0]
    assert whorl.problem.Form.from_json(part.form).cell == whorl.cells.library.lstm.graph


@pytest.mark.parametrize(
    "activation",
    [
        "softmax", keras.layers.PReLU(), lambda x: torch.flip(x, [-1]), lambda x: keras.ops.tanh(x) / x.shape[-1],
        lambda x: keras.ops.tanh(x) if x.shape[0] > 2 else x,
    ],
)  # fmt: skip
def test_what_is_not_pointwise_runs_on_keras_loop_and_says_so(activation: Any) -> None:
    ours, stock = (source.LSTM(4, activation=activation) for source in (whorl.keras, keras.layers))
    for layer in (ours, stock):
        layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    loops._announced.clear()
    with pytest.warns(whorl.SlowWarning, match=r"LSTM\) runs on Keras' own loop: the activation .* pointwise"):
        y = ours(x, mask=mask)
    torch.testing.assert_close(y, stock(x, mask=mask))
    with whorl.settings(slow="error"), pytest.raises(whorl.SlowError, match="slow is 'error'"):
        ours(x)
    ours.engine = "reference"
    with pytest.raises(whorl.UnsupportedError, match="'reference' cannot run lstm"):
        ours(x)


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "Bidirectional"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "SimpleRNN"])
def test_one_row_for_all_sequences_as_keras_takes_it(name: str, wrapped: bool) -> None:
    """Masks with an axis of 1 at their end too."""
    kinds = [(source, getattr(source, name)(4)) for source in (whorl.keras, keras.layers)]
    ours, stock = (source.Bidirectional(layer) if wrapped else layer for source, layer in kinds)
    for layer in (ours, stock):
        layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    for given in (mask[:, :, None], mask[1:2], mask[1:2, :, None]):
        torch.testing.assert_close(ours(x, mask=given), stock(x, mask=given))
    states = [torch.full((1, 4), 0.5 + place) for place in range((1 + wrapped) * (1 + (name == "LSTM")))]
    torch.testing.assert_close(ours(x, initial_state=states), stock(x, initial_state=states))


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_what_keras_runs_it_runs_as_fast_as_keras(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask Keras makes the input products of all steps in one, and calls no cell."""
    ours, stock = (getattr(source, name)(4, activation="softmax") for source in (whorl.keras, keras.layers))
    for layer in (ours, stock):
        layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    wanted = stock(x)
    with whorl.settings(slow="allow"):
        with monkeypatch.context() as patch:
            patch.setattr(type(stock.cell), "call", None)
            patch.setattr(loops, "_STOCK_CALLS", [None])
            assert torch.equal(ours(x), wanted)
            with whorl.keras.enable(), loops.recording() as calls:
                assert torch.equal(stock(x), wanted)
                assert len(calls) == 1
        assert ours.use_cudnn is False
        with whorl.keras.enable(), loops.recording() as calls:
            stock(x, mask=mask)
            assert len(calls) == 1


def test_threads_call_what_keras_runs_at_once() -> None:
    layer, inputs = whorl.keras.LSTM(4, activation="softmax"), torch.randn(4, 30, 3)
    with whorl.settings(slow="allow"):
        wanted = layer(inputs)
        with ThreadPoolExecutor(4) as pool:  # each with the settings of this thread
            ways = [copy_context() for _ in range(40)]
            found = list(pool.map(lambda context: context.run(layer, inputs), ways))
    assert all(torch.equal(one, wanted) for one in found)


def test_a_cell_put_into_an_lstm_runs_its_own_call() -> None:
    class Twice(keras.layers.LSTMCell):
        def call(self, inputs: Any, states: Any, training: bool = False) -> Any:
            return super().call(2 * inputs, states, training)

    layer, stock = whorl.keras.LSTM(4), keras.layers.LSTM(4)
    layer.cell = Twice(4)
    for one in (layer, stock):
        one.build(x.shape)
    layer.set_weights(stock.get_weights())
    with whorl.settings(slow="allow"):
        torch.testing.assert_close(layer(x), stock(2 * x))


@pytest.mark.parametrize("activation", [lambda x, v: x * v, lambda x, v: v * x, lambda x, v: keras.ops.relu(x) - v])
def test_a_variable_in_an_activation_is_no_constant(activation: Any) -> None:
    """Keras' own loop reads its value at each call, and takes its gradient."""
    slope = keras.Variable(0.5)
    ours, stock = (
        source.SimpleRNN(4, activation=lambda x: activation(x, slope)) for source in (whorl.keras, keras.layers)
    )
    for layer in (ours, stock):
        layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    for value in (0.5, 0.25):
        slope.assign(value)
        with whorl.settings(slow="allow"):
            found = [layer(x) for layer in (ours, stock)]
        assert torch.equal(*found)
        one, other = (torch.autograd.grad(y.sum(), slope.value)[0] for y in found)
        assert torch.equal(one, other)
        assert one != 0


@pytest.mark.parametrize("activation", ["tanh", "softmax"], ids=["whorl's loop", "Keras' loop"])
@pytest.mark.parametrize("name", ["LSTM", "GRU", "SimpleRNN"])
def test_evaluation_takes_the_numbers_of_the_seed_and_draws_no_masks(
    name: str, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = dict(dropout=0.3, recurrent_dropout=0.4, seed=7, activation=activation)
    layers = [getattr(source, name)(4, **how) for source in (whorl.keras, keras.layers)]
    if name != "SimpleRNN":  # Keras' own forgets its seed in a Bidirectional
        layers += [source.Bidirectional(getattr(source, name)(4, **how)) for source in (whorl.keras, keras.layers)]
    for ours, stock in zip(layers[::2], layers[1::2], strict=True):
        for layer in (ours, stock):
            layer.build(x.shape)
        ours.set_weights(stock.get_weights())
        with whorl.settings(slow="allow"):
            for training in (False, True, False, True):
                wanted = stock(x, training=training)
                with monkeypatch.context() as patch:
                    if not training and activation == "tanh":
                        patch.setattr(torch, "bernoulli", None)
                    found = ours(x, training=training)
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


# --- configs and files ------------------------------------------------------------------------------------------------

EVERY_ARGUMENT = dict(
    units=4, activation="relu", use_bias=True, kernel_initializer="he_normal", recurrent_initializer="glorot_uniform",
    bias_initializer="ones", kernel_regularizer="l2", recurrent_regularizer="l1", bias_regularizer="l2",
    activity_regularizer="l2", kernel_constraint="max_norm", recurrent_constraint="non_neg",
    bias_constraint="unit_norm", dropout=0.1, recurrent_dropout=0.2, seed=3, return_sequences=True, return_state=True,
    go_backwards=True, stateful=True, unroll=True, name="mine", zero_output_for_mask=True, dtype="float64",
    trainable=False,
)  # fmt: skip
MORE = {
    "LSTM": dict(recurrent_activation="hard_sigmoid", unit_forget_bias=False, use_cudnn=False),
    "GRU": dict(recurrent_activation="hard_sigmoid", reset_after=False, use_cudnn=False),
    "SimpleRNN": {},
}


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_taken_and_kept(name: str) -> None:
    arguments = EVERY_ARGUMENT | MORE[name]
    ours, stock = (getattr(source, name)(**arguments) for source in (whorl.keras, keras.layers))
    config = ours.get_config()
    added = {"activity_regularizer", "seed"} if name == "SimpleRNN" else set()  # which Keras 3.15 loses
    assert {key: value for key, value in config.items() if key not in added} == {
        key: value for key, value in stock.get_config().items() if key not in added
    }
    assert type(ours).from_config(config).get_config() == config
    assert ours.activity_regularizer is not None
    assert config["seed"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_one_makes_the_other_from_its_config(name: str) -> None:
    ours, stock = (getattr(source, name)(4) for source in (whorl.keras, keras.layers))
    assert type(getattr(whorl.keras, name).from_config(stock.get_config())) is type(ours)
    assert type(getattr(keras.layers, name).from_config(ours.get_config())) is type(stock)


def test_a_named_engine_is_kept() -> None:
    layer = whorl.keras.GRU(4, engine="reference")
    assert whorl.keras.GRU.from_config(layer.get_config()).engine == "reference"
    with pytest.raises(whorl.InputError, match="engine is 'fast'"):
        whorl.keras.GRU(4, engine="fast")


def model_of(source: Any, name: str) -> Any:
    keras.utils.set_random_seed(0)
    layers = [getattr(source, name)(4, return_sequences=True), getattr(source, name)(3, activation="relu")]
    return keras.Sequential([keras.Input((None, 3)), *layers, keras.layers.Dense(2)])


@pytest.mark.parametrize("name", NAMES)
def test_files_go_both_ways(name: str, tmp_path: Path) -> None:
    ours, stock = model_of(whorl.keras, name), model_of(keras.layers, name)
    wanted = stock(x)
    keras.utils.set_random_seed(1)
    for model in (ours, stock):
        model.save_weights(tmp_path / f"{model is ours}.weights.h5")
    ours.load_weights(tmp_path / "False.weights.h5")
    torch.testing.assert_close(ours(x), wanted, rtol=1e-5, atol=1e-5)
    other = model_of(keras.layers, name)
    other.load_weights(tmp_path / "True.weights.h5")
    for kind in ("keras", "h5"):
        ours.save(tmp_path / f"ours.{kind}")
        loaded = keras.models.load_model(tmp_path / f"ours.{kind}")
        assert type(loaded.layers[0]) is getattr(whorl.keras, name)
        torch.testing.assert_close(loaded(x), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, ours", [("LSTM", whorl.LSTM), ("GRU", whorl.GRU), ("SimpleRNN", whorl.RNN)])
def test_weights_of_torch_become_keras_and_back(name: str, ours: Any) -> None:
    rnn = ours(3, 4)
    layer = getattr(whorl.keras, name)(4)
    layer.build(x.shape)
    layer.set_weights([weight.detach() for weight in to_keras(name, list(rnn.parameters()))])
    at = torch.tensor(x).transpose(0, 1)
    torch.testing.assert_close(layer(x), rnn(at)[0][-1], rtol=1e-5, atol=1e-6)
    back = from_keras(name, *(variable.value for variable in layer.trainable_variables))
    assert [part.shape for part in back] == [weight.shape for weight in rnn.parameters()]
    again = ours(3, 4)
    with torch.no_grad():
        for weight, part in zip(again.parameters(), back, strict=True):
            weight.copy_(part)
    torch.testing.assert_close(again(at)[0], rnn(at)[0], rtol=1e-5, atol=1e-6)


# --- in models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_training_gives_keras_losses(name: str) -> None:
    """A masked embedding, dropout by seed, regularisers, constraints and two layers; three epochs, then predict."""
    tokens = np.random.default_rng(1).integers(0, 10, (24, 6))
    targets = np.random.default_rng(2).standard_normal((24, 1)).astype("float32")
    found = []
    for source in (whorl.keras, keras.layers):
        keras.utils.set_random_seed(4)
        layer = getattr(source, name)
        model = keras.Sequential([
            keras.layers.Embedding(10, 4, mask_zero=True),
            layer(5, dropout=0.2, recurrent_dropout=0.2, seed=1, return_sequences=True, kernel_regularizer="l2"),
            layer(4, activation="softsign", recurrent_constraint="max_norm", bias_regularizer="l1"),
            keras.layers.Dense(1),
        ])  # fmt: skip
        model.compile("adam", "mse")
        history = model.fit(tokens, targets, epochs=3, batch_size=8, verbose=0).history["loss"]
        found.append([*history, *model.predict(tokens, verbose=0).ravel()])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)


ONE_GRAPH = {
    "masked": lambda: whorl.keras.LSTM(5),
    "relu": lambda: whorl.keras.LSTM(5, activation="relu", return_sequences=True),
    "both ways, masked": lambda: whorl.keras.Bidirectional(whorl.keras.GRU(5, reset_after=False)),
    "cells, masked": lambda: whorl.keras.RNN([keras.layers.GRUCell(4), keras.layers.LSTMCell(3)]),
    "a cell of whorl": lambda: whorl.keras.RNN(whorl.keras.Cell(whorl.cells.library.make_lstm(peephole=True), 5)),
}


@pytest.mark.parametrize("kind", ONE_GRAPH)
def test_a_model_is_one_compiled_graph(kind: str) -> None:
    masking = [keras.layers.Masking()] if "masked" in kind else []
    model = keras.Sequential([keras.Input((5, 3)), *masking, ONE_GRAPH[kind]()])
    given = torch.tensor(x * mask[..., None])
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: model(x, training=True), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given), model(given))


def test_jit_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras' own program, as Keras compiles it, but for the code for a processor, which takes a minute.

    Recurrent dropout, whose masks Keras draws between graphs, takes another: with WHORL_TEST_ALL=1 in the environment.
    """
    options = dict(recurrent_dropout=0.2, seed=1) if "WHORL_TEST_ALL" in os.environ else {}
    own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: own(function, backend="eager"))
    targets, found = np.random.default_rng(2).standard_normal((4, 1)).astype("float32"), []
    for jit in (False, True):
        keras.utils.set_random_seed(4)
        layer = whorl.keras.LSTM(3, **options)
        model = keras.Sequential([keras.Input((5, 3)), keras.layers.Masking(), layer, keras.layers.Dense(1)])
        model.compile("adam", "mse", jit_compile=jit)
        losses = model.fit(x * mask[..., None], targets, epochs=2, verbose=0).history["loss"]
        found.append([*losses, *model.predict(x * mask[..., None], verbose=0).ravel()])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_policies(name: str, policy: str) -> None:
    """Outputs and states in the compute dtype, weights in the variable dtype, numbers near those of float32."""
    keras.utils.set_random_seed(0)
    layer = getattr(whorl.keras, name)(4, dtype=policy, return_state=True, recurrent_initializer="glorot_uniform")
    y, *states = layer(x, mask=mask)
    kind = keras.DTypePolicy(policy)
    assert {keras.backend.standardize_dtype(part.dtype) for part in (y, *states)} == {kind.compute_dtype}
    assert {variable.dtype for variable in layer.variables if "seed" not in variable.path} == {kind.variable_dtype}
    exact = getattr(whorl.keras, name)(4, dtype="float32")
    exact.build(x.shape)
    exact.set_weights([np.asarray(weight).astype("float32") for weight in layer.get_weights()])
    eps = torch.finfo(getattr(torch, kind.compute_dtype)).eps
    torch.testing.assert_close(y.float(), exact(x, mask=mask), rtol=4 * eps, atol=4 * eps)
    y.sum().backward()
    assert all(variable.value.grad is not None for variable in layer.trainable_variables)


def test_shapes_are_known_before_there_is_data() -> None:
    entering = keras.Input((None, 3))
    y, h, c = whorl.keras.LSTM(4, return_sequences=True, return_state=True)(entering)
    assert (y.shape, h.shape, c.shape) == ((None, None, 4), (None, 4), (None, 4))

    class Inside(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = whorl.keras.GRU(4, return_sequences=True, return_state=True)

        def call(self, x: Any) -> Any:
            y, h = self.rnn(x)
            return keras.ops.concatenate([y[:, -1], h], -1)

    assert Inside()(entering).shape == (None, 8)  # Keras calls the layer without data here


def test_what_does_not_fit_is_refused() -> None:
    layer = whorl.keras.LSTM(4)
    layer.build((None, None, 3))
    with pytest.raises(whorl.InputError, match=r"has 2 features in its last axis, this LSTM was built for 3"):
        layer(x[..., :2])
    with pytest.raises(whorl.InputError, match=r"initial state 1 has shape \(4, 5\), this LSTM takes \(4, 4\)"):
        layer(x, initial_state=[torch.zeros(4, 4), torch.zeros(4, 5)])
    with pytest.raises(whorl.InputError, match=r"the mask has shape \(4, 4\), this LSTM takes \(4, 5\)"):
        layer(x, mask=mask[:, :4])
    for empty in (layer, whorl.keras.Bidirectional(layer)):
        empty.build((None, None, 3))
        with pytest.raises(whorl.InputError, match="x has no steps, this LSTM takes 1 or more"):
            empty(x[:, :0])
    with pytest.raises(whorl.InputError, match="x has no steps, this GRU takes 1 or more"):
        whorl.keras.GRU(4, dropout=0.2, stateful=True)(x[:, :0])


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_initial_states_of_another_number_are_refused(name: str, gradient: bool) -> None:
    """An h without its c among them: what is missing would have been zero."""
    layer, state, count = getattr(whorl.keras, name)(4), torch.zeros(4, 4), 2 if name == "LSTM" else 1
    for both in (False, True):
        called = whorl.keras.Bidirectional(layer) if both else layer
        called.build(x.shape)
        for given in {0, 1, 3, 5} - {count * (1 + both)}:
            many = r"initial_state has \d tensors?" if both else f"initial_state has {given} tensor"
            with (
                torch.set_grad_enabled(gradient),
                pytest.raises(whorl.InputError, match=f"{many}.* this {name} takes {count}"),
            ):
                called(x, initial_state=[state] * given)
    if name == "LSTM":
        with (
            torch.set_grad_enabled(gradient),
            pytest.raises(whorl.InputError, match="initial_state has 1 tensor, this"),
        ):
            layer(x, initial_state=state)


@pytest.mark.parametrize("base", [whorl.keras.CuDNNLSTM, whorl.keras.CuDNNGRU])
def test_nothing_derives_from_an_old_name(base: type) -> None:
    with pytest.raises(whorl.InputError, match=rf"Mine derives from {base.__name__}.*: derive from whorl.keras."):

        class Mine(base):  # type: ignore[misc, valid-type]
            pass


def test_initial_states_of_cells_are_lists_of_each() -> None:
    layer = whorl.keras.RNN([keras.layers.LSTMCell(4), keras.layers.GRUCell(4)])
    h, c, other = torch.randn(3, 4, 4)
    assert layer(x, initial_state=[[h, c], [other]]).shape == (4, 4)
    for given in ([h, c, other], [[h], [c, other]], [[h, c, other]]):
        with pytest.raises(whorl.InputError, match=r"this RNN takes \[2, 1\], one list of states for each cell"):
            layer(x, initial_state=given)


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_dropout_by_gate_without_recurrent_dropout(name: str) -> None:
    """Keras 3.15 crashes here: a mask for each gate, as with `recurrent_dropout`."""
    arguments = dict(dropout=0.3, seed=5, implementation=1)
    layer, other = getattr(whorl.keras, name)(4, **arguments), getattr(whorl.keras, name)(4, **arguments)
    for one in (layer, other):
        one.build(x.shape)
    other.set_weights(layer.get_weights())
    masks = other.cell.get_dropout_mask(torch.tensor(x[:, 0]))
    gates = torch.cat(list(masks), -1).reshape(4, -1, 3)  # [batch, gates, inputs]
    one_hot = torch.eye(3)[None].expand(4, 3, 3)  # each step reads one input, so each product shows one mask
    kernel = layer.cell.kernel.value.detach().reshape(3, -1, 4)  # [inputs, gates, units]
    projected = torch.einsum("bti,iGu,bGi->btGu", one_hot, kernel, gates)
    first = layer(one_hot, training=True, mask=torch.tensor([[True, False, False]] * 4))
    i, _, g, o = projected[:, 0].unbind(1) if name == "LSTM" else (projected[:, 0, 0],) * 4
    z, n = projected[:, 0, 0], projected[:, 0, 2]
    lstm = torch.sigmoid(o) * torch.tanh(torch.sigmoid(i) * torch.tanh(g))
    torch.testing.assert_close(first, lstm if name == "LSTM" else (1 - torch.sigmoid(z)) * torch.tanh(n))


@pytest.mark.parametrize("rates", [(0.3, 0.0), (0.0, 0.4), (0.3, 0.4), (1.0, 0.4)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_masks_are_those_that_keras_draws(name: str, rates: tuple[float, float]) -> None:
    """To the bit, call after call, and the seed goes on from where Keras would: past 32 bits, too."""
    given = torch.tensor(x[:, 0]), [torch.zeros(4, 6)] * 2
    for policy, seed in (("float32", 7), ("mixed_float16", 2**31 - 3)):
        stock, ours = (
            getattr(source, name)(6, dropout=rates[0], recurrent_dropout=rates[1], seed=seed, dtype=policy)
            for source in (keras.layers, whorl.keras)
        )
        for _ in range(3):
            found = []
            for layer in (stock, ours):
                layer._maybe_config_dropout_masks(
                    layer.cell, given[0].to(getattr(torch, layer.compute_dtype)), given[1]
                )
                cell = layer.cell
                settle(cell)
                found.append(
                    (cell._dropout_mask, cell._recurrent_dropout_mask, cell.seed_generator.state.value.clone())
                )
                layer._maybe_reset_dropout_masks(cell)
            torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_recurrent_dropout_of_whole_numbers(name: str, training: bool) -> None:
    """Masks are in the dtype in which the layer computes, not in that of its input."""
    whole, found = np.arange(24).reshape(2, 3, 4) % 3, []
    for source in (whorl.keras, keras.layers):
        keras.utils.set_random_seed(0)
        layer = getattr(source, name)(4, recurrent_dropout=0.3)
        found.append(layer(keras.ops.convert_to_tensor(whole, "int32"), training=training).detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", NAMES)
def test_unroll_and_dropout_of_everything(name: str) -> None:
    layer, rolled = getattr(whorl.keras, name)(4, unroll=True, go_backwards=True), getattr(whorl.keras, name)(4)
    layer.build(x.shape)
    rolled.build(x.shape)
    rolled.set_weights(layer.get_weights())
    torch.testing.assert_close(layer(x, mask=mask), rolled(x[:, ::-1].copy(), mask=mask[:, ::-1].copy()))
    dropped = getattr(whorl.keras, name)(4, dropout=1.0, bias_initializer="ones", kernel_initializer="ones")
    torch.testing.assert_close(dropped(x, training=True, mask=mask[:1].repeat(4, 0)), dropped(0 * x))


# --- engines ----------------------------------------------------------------------------------------------------------


def test_use_cudnn_means_it() -> None:
    for layer in (whorl.keras.LSTM(4, use_cudnn=True), whorl.keras.GRU(4, engine="cudnn")):
        assert layer.use_cudnn is True
        with pytest.raises(whorl.UnsupportedError, match="the tensors are on cpu, cuDNN runs on cuda"):
            layer(x)
        layer.use_cudnn = "auto"
        assert layer.engine == "auto"
        layer(x)
    with pytest.raises(whorl.InputError, match="use_cudnn is True"):
        whorl.keras.LSTM(4, use_cudnn=True, engine="reference")
    with pytest.raises(ValueError, match="use_cudnn"):
        whorl.keras.LSTM(4, use_cudnn="never")


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_keras_own_bidirectional_does_not_go_round_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Keras ran its own kernel")

    monkeypatch.setattr(keras.src.backend, f"bidirectional_{name.lower()}", fused)
    monkeypatch.setattr(keras.src.backend, name.lower(), fused)
    wrapped = keras.layers.Bidirectional(getattr(whorl.keras, name)(4))
    wrapped.build(x.shape)
    assert wrapped(x).shape == (4, 8)


# --- the call ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True], ids=["", "Bidirectional"])
@pytest.mark.parametrize("name", NAMES)
def test_states_of_zero_are_not_made(name: str, both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, stock = (getattr(source, name)(4) for source in (whorl.keras, keras.layers))
    if both:
        ours, stock = whorl.keras.Bidirectional(ours), keras.layers.Bidirectional(stock)
    for layer in (ours, stock):
        layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    wanted = stock(x, mask=mask)
    monkeypatch.setattr(torch, "zeros", None)
    torch.testing.assert_close(ours(x, mask=mask), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_is_read_where_somebody_else_wrote_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [getattr(source, name)(4, recurrent_dropout=0.4, seed=3) for source in (whorl.keras, keras.layers)]
    for layer in layers:
        layer.build(x.shape)
    ours, stock = layers
    ours.set_weights(stock.get_weights())
    for call in range(4):
        if call == 2:
            for layer in layers:
                layer.cell.seed_generator.state.assign([8, 1])
        wanted = stock(x, training=True)
        with monkeypatch.context() as patch:
            if call % 2:  # a GPU would have to finish its work for it
                patch.setattr(torch.Tensor, "tolist", None)
            found = ours(x, training=True)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert ours.cell.seed_generator.state.value.tolist() == stock.cell.seed_generator.state.value.tolist()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("sequences", [False, True])
def test_a_stack_of_cells_that_are_alike(sequences: bool, training: bool) -> None:
    """The outputs of all steps of the last are not wanted, those of the others are."""
    layers = [
        source.RNN([keras.layers.LSTMCell(3) for _ in range(3)], return_sequences=sequences)
        for source in (whorl.keras, keras.layers)
    ]
    for layer in layers:
        layer.build(x.shape)
    layers[0].set_weights(layers[1].get_weights())
    with torch.set_grad_enabled(training):
        ours, stock = (layer(x, mask=mask, training=training) for layer in layers)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def test_one_direction_may_start_elsewhere() -> None:
    made = []
    for source in (whorl.keras, keras.layers):
        kind = type("LSTM", (_StartsAtOne, source.LSTM), {})
        layer = source.Bidirectional(source.LSTM(4), backward_layer=kind(4, go_backwards=True))
        layer.build(x.shape)
        made.append(layer)
    made[0].set_weights(made[1].get_weights())
    ours, stock = (layer(x, mask=mask) for layer in made)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


class _StartsAtOne:
    def get_initial_state(self, batch_size: Any) -> Any:
        return [keras.ops.ones((batch_size, 4)) for _ in self.state_size]  # type: ignore[attr-defined]


class _Doubles:
    def inner_loop(self, *args: Any, **kwargs: Any) -> Any:
        last, outputs, states = super().inner_loop(*args, **kwargs)  # type: ignore[misc]
        return 2 * last, 2 * outputs, states


@pytest.mark.parametrize("adds", [_StartsAtOne, _Doubles])
@pytest.mark.parametrize("name", NAMES)
def test_a_hook_of_a_subclass_is_called(name: str, adds: type) -> None:
    layers = [
        type(name, (adds, getattr(source, name)), {})(4, return_sequences=True)
        for source in (whorl.keras, keras.layers)
    ]
    for layer in layers:
        layer.build(x.shape)
    layers[0].set_weights(layers[1].get_weights())
    ours, stock = (layer(x) for layer in layers)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("two_ways", [False, True])
def test_an_engine_of_the_processor_reads_x_as_it_lies(two_ways: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = sys.modules["whorl.keras.sweep"], list[torch.Tensor]()
    real = module.recurrent

    def recurrent(form: str, call: Any, *rest: Any, **how: Any) -> Any:
        seen.append(call.x)
        return real(form, call, *rest, **how)

    monkeypatch.setattr(module, "recurrent", recurrent)
    layer = whorl.keras.LSTM(2, engine="cpu")
    given = torch.from_numpy(x)
    (whorl.keras.Bidirectional(layer) if two_ways else layer)(given, training=True).sum().backward()
    assert seen
    assert {one.data_ptr() for one in seen} == {given.data_ptr()}
