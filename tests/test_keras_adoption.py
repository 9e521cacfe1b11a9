"""whorl.keras around cells and layers: Bidirectional, RNN, Cell, accelerate, enable, explain (torch backend)."""

import warnings
from collections.abc import Iterator
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
from whorl.cells import library  # noqa: E402
from whorl.keras import loops  # noqa: E402

x = np.random.default_rng(0).standard_normal((4, 5, 3)).astype("float32")
mask = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)
NO_YES = (False, True)
OPTIONS = {
    "plain": {},
    "relu": dict(activation="relu", use_bias=False),
    "dropout": dict(dropout=0.2, recurrent_dropout=0.3, seed=3),
    "states": dict(return_state=True),
    "holds": dict(zero_output_for_mask=True),
}


@pytest.fixture(autouse=True)
def stock_again() -> Iterator[None]:
    keras.utils.set_random_seed(0)  # else weights are others each time, and once in some runs a gradient cancels
    yield
    whorl.keras.disable()


def same(ours: Any, stock: Any, **call: Any) -> list[Any]:
    """Asserts that both give the same output and the same gradients; gives what whorl noted of its call."""
    for layer in (ours, stock):
        if not layer.built:
            layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    found = []
    for layer in (ours, stock):
        at = torch.tensor(x, requires_grad=True)
        with loops.recording() as notes:
            outputs = keras.tree.flatten(layer(at, **call))
        loss = sum((out * (1 + place)).square().sum() for place, out in enumerate(outputs))
        leaves = [at, *(variable.value for variable in layer.trainable_variables)]
        grads = torch.autograd.grad(loss, leaves)
        found.append((notes, [*outputs, *grads]))
    assert len(found[0][1]) == len(found[1][1])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return found[0][0]


# --- Bidirectional ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", NO_YES, ids=["", "masked"])
@pytest.mark.parametrize("sequences", NO_YES, ids=["last", "sequences"])
@pytest.mark.parametrize(
    "option, merge",
    [*((option, "concat") for option in OPTIONS), *(("states", m) for m in ("sum", "ave", "mul", None))],
)
@pytest.mark.parametrize("name", ["LSTM", "GRU", "SimpleRNN"])
def test_bidirectional(name: str, option: str, merge: str | None, sequences: bool, masked: bool) -> None:
    made = []
    for source in (whorl.keras, keras.layers):
        layers = []
        for backwards in NO_YES:  # both given: Keras loses the seed of a SimpleRNN that it makes from a config
            layer = getattr(source, name)(2, return_sequences=sequences, go_backwards=backwards, **OPTIONS[option])
            layers.append(layer)
        made.append(source.Bidirectional(layers[0], merge, backward_layer=layers[1]))
        made[-1].forward_layer.cell.seed_generator = keras.random.SeedGenerator(5)
    notes = same(*made, mask=mask if masked else None, training=option == "dropout")
    assert [plan.problem.form.directions for _, plan in notes] == [2]


def test_bidirectional_with_initial_states() -> None:
    states = [torch.randn(4, 2) for _ in range(4)]
    made = [source.Bidirectional(source.LSTM(2, return_state=True)) for source in (whorl.keras, keras.layers)]
    notes = same(*made, initial_state=states, mask=mask)
    assert [plan.problem.form.directions for _, plan in notes] == [2]


UNLIKE = {
    "units": dict(units=3), "activation": dict(activation="relu"), "stateful": dict(stateful=True),
    "activity": dict(activity_regularizer="l2"), "dtype": dict(dtype="float64"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNLIKE)
def test_directions_that_differ_run_one_after_the_other(what: str) -> None:
    arguments = dict(units=2, stateful=what == "stateful")
    made = []
    for source in (whorl.keras, keras.layers):
        other = source.GRU(go_backwards=True, **(arguments | UNLIKE[what]))
        made.append(source.Bidirectional(source.GRU(**arguments), backward_layer=other, merge_mode=None))
        made[-1].build(x.shape)
    if what == "stateful":
        made[1].forward_layer.use_cudnn = made[1].backward_layer.use_cudnn = False
    notes = same(*made, mask=mask)
    assert [plan.problem.form.directions for _, plan in notes] == [1, 1]


def test_a_layer_with_a_call_of_its_own_is_called() -> None:
    class Doubled(whorl.keras.LSTM):
        def call(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().call(*args, **kwargs)

    wrapped = whorl.keras.Bidirectional(whorl.keras.LSTM(2), backward_layer=Doubled(2, go_backwards=True))
    plain = whorl.keras.Bidirectional(whorl.keras.LSTM(2))
    for layer in (wrapped, plain):
        layer.build(x.shape)
    wrapped.set_weights(plain.get_weights())
    torch.testing.assert_close(wrapped(x), plain(x) * torch.tensor([1.0, 1.0, 2.0, 2.0]))


# --- RNN and cells ----------------------------------------------------------------------------------------------------


def cells(kind: str) -> Any:
    if kind == "stacked":
        return [keras.layers.LSTMCell(4, dropout=0.1, recurrent_dropout=0.2, seed=1), keras.layers.GRUCell(3),
                keras.layers.SimpleRNNCell(2, dropout=0.2, seed=2)]  # fmt: skip
    if kind == "one":
        return keras.layers.StackedRNNCells([keras.layers.LSTMCell(4)])
    return getattr(keras.layers, kind)(4, recurrent_dropout=0.2, seed=1)


@pytest.mark.parametrize("backwards", NO_YES, ids=["", "backwards"])
@pytest.mark.parametrize("masked", NO_YES, ids=["", "masked"])
@pytest.mark.parametrize("sequences", NO_YES, ids=["last", "sequences"])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "SimpleRNNCell", "stacked", "one"])
def test_rnn_of_cells(kind: str, sequences: bool, masked: bool, backwards: bool) -> None:
    masked = masked and kind != "one"  # where Keras itself fails
    arguments = dict(return_sequences=sequences, go_backwards=backwards)
    ours, stock = (source.RNN(cells(kind), **arguments) for source in (whorl.keras, keras.layers))
    for training in NO_YES:
        notes = same(ours, stock, mask=mask if masked else None, training=training)
        assert len(notes) == (3 if kind == "stacked" else 1)


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "stacked"])
def test_states_of_cells_come_out_as_keras_gives_them(kind: str) -> None:
    ours, stock = (source.RNN(cells(kind), return_state=True) for source in (whorl.keras, keras.layers))
    same(ours, stock, mask=mask)
    keras.tree.assert_same_structure(ours(x), stock(x))


def test_cells_may_compute_in_different_dtypes() -> None:
    dtypes = ("float32", "float64", "mixed_bfloat16")
    layer = whorl.keras.RNN([keras.layers.GRUCell(4, dtype=dtype) for dtype in dtypes])
    exact = whorl.keras.RNN([keras.layers.GRUCell(4, dtype="float32") for _ in dtypes])
    layer.build(x.shape)
    exact.build(x.shape)
    exact.set_weights(layer.get_weights())
    torch.testing.assert_close(layer(x, mask=mask), exact(x, mask=mask), rtol=0.03, atol=0.03)  # 4 eps of bfloat16


class Own(keras.layers.Layer):
    """A cell whose call is any code."""

    state_size, output_size = 3, 3

    def call(self, inputs: Any, states: Any) -> Any:
        return inputs + states[0], [inputs + states[0]]


def test_another_cell_runs_on_keras_loop_and_says_so() -> None:
    loops._announced.clear()
    with pytest.warns(whorl.SlowWarning, match=r"Own is a cell of Keras .* write its step as @whorl.cell"):
        y = whorl.keras.RNN(Own())(x, mask=mask)
    torch.testing.assert_close(y, keras.layers.RNN(Own())(x, mask=mask))


class Doubling(keras.layers.StackedRNNCells):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        y, states = super().call(*args, **kwargs)
        return 2 * y, states


class Starting(keras.layers.StackedRNNCells):
    def get_initial_state(self, batch_size: Any = None) -> Any:
        return keras.tree.map_structure(keras.ops.ones_like, super().get_initial_state(batch_size))


class DoublingCell(whorl.keras.Cell):
    def call(self, *args: Any, **kwargs: Any) -> Any:
        y, states = super().call(*args, **kwargs)
        return 2 * y, states


@pytest.mark.parametrize("kind", [Doubling, Starting, DoublingCell])
@pytest.mark.parametrize("training", NO_YES)
def test_a_call_of_a_subclass_of_a_cell_is_called(kind: type, training: bool) -> None:
    if kind is DoublingCell:
        cell, plain = (made(library.gru, 3, recurrent_dropout=0.2, seed=1) for made in (kind, whorl.keras.Cell))
    else:
        cell, plain = (made(cells("stacked")) for made in (kind, keras.layers.StackedRNNCells))
    ours, stock, without = whorl.keras.RNN(cell), keras.layers.RNN(cell), whorl.keras.RNN(plain)
    for layer in (ours, stock, without):
        layer.build(x.shape)
    without.set_weights(ours.get_weights())
    seeds = [variable for variable in cell.variables if not variable.trainable]
    before = [keras.ops.copy(variable) for variable in seeds]
    loops._announced.clear()
    with pytest.warns(whorl.SlowWarning, match=rf"{kind.__name__} is a cell of Keras whose call is any code"):
        y = ours(x, mask=mask, training=training)
    for variable, value in zip(seeds, before, strict=True):
        variable.assign(value)
    torch.testing.assert_close(y, stock(x, mask=mask, training=training))
    assert not torch.allclose(y, without(x, mask=mask, training=training))


CELLS = {
    "peephole": lambda: whorl.keras.Cell(library.make_lstm(peephole=True), 4, layer_norm=True, zoneout={"c": 0.2}),
    "clipped": lambda: whorl.keras.Cell(library.gru, 4, clip=0.5, use_bias=False),
    "no recurrent weights": lambda: whorl.keras.Cell(library.ind_rnn, 4),
    "four states": lambda: whorl.keras.Cell(library.slstm, 4, dropout=0.1, recurrent_dropout=0.2, seed=1),
}


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_of_whorl_gives_the_same_in_one_sweep_and_step_by_step(kind: str) -> None:
    cell = CELLS[kind]()
    ours, stock = whorl.keras.RNN(cell, return_sequences=True), keras.layers.RNN(cell, return_sequences=True)
    ours.build(x.shape)
    stock.build(x.shape)
    generator = np.random.default_rng(1)
    weights = [generator.standard_normal(weight.shape) * 0.3 for weight in cell.trainable_variables]
    for variable, weight in zip(cell.trainable_variables, weights, strict=True):
        variable.assign(weight)
    for given in (None, mask):
        torch.testing.assert_close(ours(x, mask=given), stock(x, mask=given), rtol=1e-5, atol=1e-5)
    y = ours(x, training=True)
    y.sum().backward()
    assert all(variable.value.grad is not None for variable in cell.trainable_variables)


def test_a_cell_of_whorl_is_the_layer_of_whorl() -> None:
    """Its weights mean what those of `whorl.Recurrent` mean."""
    rnn = whorl.Recurrent(library.make_lstm(peephole=True), 3, 4)
    cell = whorl.keras.Cell(library.make_lstm(peephole=True), 4)
    layer = whorl.keras.RNN(cell, return_sequences=True)
    layer.build(x.shape)
    for variable, weight in zip(cell.variables_in_order, rnn.parameters(), strict=True):
        variable.assign(weight.detach().t() if weight.dim() == 2 else weight.detach())
    y, _ = rnn(torch.tensor(x).transpose(0, 1))
    torch.testing.assert_close(layer(x), y.transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", CELLS)
def test_files_hold_cells_of_whorl(kind: str, tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((5, 3)), whorl.keras.RNN([CELLS[kind](), keras.layers.GRUCell(2)])])
    model.save(tmp_path / "model.keras")
    torch.testing.assert_close(keras.models.load_model(tmp_path / "model.keras")(x), model(x))


def test_zoneout_is_repeated_by_its_seed() -> None:
    def made(seed: int) -> Any:
        keras.utils.set_random_seed(0)
        return whorl.keras.RNN(whorl.keras.Cell(library.gru, 8, zoneout=0.5, seed=seed))

    one, again, other = (layer(x, training=True) for layer in map(made, (1, 1, 2)))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    layer = made(1)
    assert not torch.equal(layer(x, training=True), layer(x, training=True))


def test_what_a_cell_cannot_take_is_refused() -> None:
    with pytest.raises(whorl.InputError, match="gru_d reads gap beside x"):
        whorl.keras.Cell(library.gru_d, 4)
    with pytest.raises(whorl.InputError, match="the cell is 'lstm'"):
        whorl.keras.Cell("lstm", 4)
    with pytest.raises(whorl.InputError, match="units is 0"):
        whorl.keras.Cell(library.gru, 0)
    with pytest.raises(whorl.InputError, match="dropout is 2"):
        whorl.keras.Cell(library.gru, 4, dropout=2)


# --- accelerate, restore, enable --------------------------------------------------------------------------------------


def built(source: Any = keras.layers) -> Any:
    keras.utils.set_random_seed(0)
    entering = keras.Input((6,))
    y = keras.layers.Embedding(10, 4, mask_zero=True)(entering)
    y = source.Bidirectional(source.LSTM(5, recurrent_dropout=0.2, seed=1, return_sequences=True))(y)
    y = keras.Sequential([source.GRU(4, activation="relu", return_sequences=True)], name="inside")(y)
    y = source.RNN([keras.layers.GRUCell(3), keras.layers.LSTMCell(2)], return_sequences=True)(y)
    y = keras.layers.TimeDistributed(keras.layers.Dense(2))(y)
    y = source.SimpleRNN(3)(y)
    model = keras.Model(entering, keras.layers.Dense(1)(y))
    model.compile("adam", "mse")
    return model


TOKENS = np.random.default_rng(1).integers(0, 10, (8, 6))
TARGETS = np.random.default_rng(2).standard_normal((8, 1)).astype("float32")


def fitted(model: Any, epochs: int = 1) -> list[float]:
    return model.fit(TOKENS, TARGETS, epochs=epochs, batch_size=4, shuffle=False, verbose=0).history["loss"]


def test_accelerate_keeps_all_that_a_model_has() -> None:
    stock, model = built(), built()
    before = fitted(stock) + fitted(stock, 2)
    first, weights = fitted(model), model.get_weights()
    slots = [np.asarray(slot) for slot in model.optimizer.variables]
    report = whorl.keras.accelerate(model)
    assert report.changed == 6
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(slots, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))
    np.testing.assert_allclose(first + fitted(model, 2), before, rtol=1e-5)
    kinds = {type(layer).__module__ for layer in model._flatten_layers() if "rnn" in type(layer).__module__}
    assert kinds == {"keras.src.layers.rnn.gru", "keras.src.layers.rnn.lstm", "keras.src.layers.rnn.stacked_rnn_cells",
                     "keras.src.layers.rnn.time_distributed", "keras.src.layers.rnn.simple_rnn"}  # fmt: skip
    assert whorl.keras.accelerate(model).changed == 0


def test_restore_gives_files_that_need_no_whorl(tmp_path: Path) -> None:
    model = built(whorl.keras)
    wanted = model(TOKENS)
    assert whorl.keras.restore(model).changed == 6
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not any(type(layer).__module__.startswith("whorl") for layer in loaded._flatten_layers())
    torch.testing.assert_close(loaded(TOKENS), wanted, rtol=1e-5, atol=1e-5)


def test_accelerate_leaves_subclasses_and_says_so() -> None:
    class Mine(keras.layers.LSTM):
        pass

    model = keras.Sequential([keras.Input((5, 3)), Mine(2, name="mine"), keras.layers.Dense(1)], name="model")
    assert str(whorl.keras.accelerate(model)) == f"model/mine (Mine): left as it is: a class of {__name__}"
    assert type(model.layers[0]) is Mine
    assert str(whorl.keras.accelerate(keras.layers.Dense(1))) == "no recurrent layers"


def test_accelerate_names_layers_that_are_not_built_and_refuses_what_is_none() -> None:
    layer = keras.layers.LSTM(2, name="rnn")
    assert str(whorl.keras.accelerate(layer)) == "rnn (LSTM): now whorl.keras.LSTM"
    for change in (whorl.keras.accelerate, whorl.keras.restore):
        with pytest.raises(whorl.InputError, match=r"model is of list: give a keras.Model or one layer"):
            change([layer])
        with pytest.raises(whorl.InputError, match="model is of NoneType"):
            change(None)


def test_accelerate_takes_use_cudnn_at_its_word() -> None:
    layer = keras.layers.LSTM(2, use_cudnn=True)
    layer.build(x.shape)
    whorl.keras.accelerate(layer)
    with pytest.raises(whorl.UnsupportedError, match="cuDNN runs on cuda"):
        layer(x)
    whorl.keras.restore(layer)
    assert layer.use_cudnn is True


def test_enable_makes_stock_layers_run_on_whorl() -> None:
    before = fitted(built())
    with whorl.keras.enable():
        whorl.keras.enable()  # twice is once
        model = built()
        with loops.recording() as notes:
            model(TOKENS)
        assert len(notes) == 5
        np.testing.assert_allclose(fitted(built()), before, rtol=1e-5)
    with loops.recording() as notes:
        model(TOKENS)
    assert notes == []
    assert keras.layers.RNN.inner_loop is loops.KERAS_LOOP


def test_an_inner_enable_leaves_the_outer_one_on() -> None:
    own = keras.layers.RNN.inner_loop
    with whorl.keras.enable():
        with whorl.keras.enable():
            pass
        assert keras.layers.RNN.inner_loop is not own
    assert keras.layers.RNN.inner_loop is own
    whorl.keras.enable()
    with whorl.keras.enable():
        pass
    assert keras.layers.RNN.inner_loop is not own


def test_enable_leaves_other_cells_to_keras() -> None:
    images = np.zeros((2, 3, 6, 6, 1), "float32")
    layer = keras.layers.ConvLSTM2D(2, 3)
    wanted = layer(images + 1)
    with whorl.keras.enable(), whorl.settings(slow="error"):
        assert torch.equal(layer(images + 1), wanted)
        with pytest.raises(whorl.SlowError, match="Own is a cell of Keras"):
            keras.layers.RNN(Own())(x)


# --- explain ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_explain_lists_every_layer() -> None:
    model = built(whorl.keras)
    seeds = [np.asarray(variable) for variable in model.non_trainable_variables]
    found = whorl.keras.explain(model)
    for one, other in zip(seeds, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))
    assert [kind for _, kind, _ in found.rows] == ["Bidirectional", "GRU", "RNN", "RNN", "SimpleRNN"]
    first = found.rows[0][2]
    assert (first.problem.time, first.problem.batch, first.problem.gradient) == (6, 32, True)
    assert first.problem.extras == ("mask", "dropout_masks")
    assert not whorl.keras.explain(model, TOKENS, training=False).rows[0][2].problem.gradient
    text = str(found)
    assert "(GRU): reference, plain torch, a loop over time in Python" in text
    assert "not onednn: the cell is relu_gru" in text


class Subclassed(keras.Model):
    """Whose layers are built by its first call; where it is told to it raises after their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = whorl.keras.LSTM(4, return_sequences=True, recurrent_dropout=0.2, seed=3)
        self.norm = keras.layers.BatchNormalization()
        self.last = whorl.keras.GRU(4, dropout=0.1, seed=4)

    def call(self, x: Any, training: bool = False, mask: Any = None, fails: bool = False) -> Any:
        y = self.last(self.norm(self.first(x, training=training, mask=mask), training=training), training=training)
        if fails:
            raise RuntimeError("asked for")
        return y


def test_explain_of_a_model_that_is_not_built_lists_its_layers_once() -> None:
    model = Subclassed()
    found = whorl.keras.explain(model, x, mask=np.ones(x.shape[:2], bool))
    assert [kind for _, kind, _ in found.rows] == ["LSTM", "GRU"]
    assert found.rows[0][2].problem.extras == ("mask", "dropout_masks")
    states = [np.asarray(variable) for variable in model.non_trainable_variables]
    np.testing.assert_array_equal(states[0], [3, 0])  # nothing was drawn
    np.testing.assert_array_equal(states[1], np.zeros(4))
    with pytest.raises(RuntimeError, match="asked for"):
        whorl.keras.explain(model, x, fails=True)
    for one, other in zip(states, model.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other))


def test_explain_on_the_cpu_touches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several, each generator asked for would cost a context, and torch would warn."""

    def touched(*_: Any) -> None:
        raise AssertionError("a GPU's generator was read")

    layer = whorl.keras.LSTM(4)
    layer(x)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(whorl.keras.explain(layer, x).rows) == 1


def test_explain_says_what_whorl_does_not_run() -> None:
    model = keras.Sequential([
        keras.Input((None, 3)), keras.layers.LSTM(3, name="stock", return_sequences=True),
        whorl.keras.RNN(Own(), name="own"),
    ], name="model")  # fmt: skip
    lines = str(whorl.keras.explain(model)).splitlines()
    assert lines[0].startswith("model/own (RNN): Keras' own loop: Own is a cell of Keras")
    assert lines[1] == "model/stock (LSTM): not a layer of whorl, Keras chooses what runs"
    layer = whorl.keras.LSTM(4)
    with pytest.raises(whorl.InputError, match="give x"):
        layer.explain()
    assert "for lstm, 3 inputs, 4 units; 5 steps, batch 4" in str(layer.explain(x))
