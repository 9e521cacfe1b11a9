"""A bad call raises what the installed torch raises: the same class, the same text."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whorl
from comparison import CELLS, EXACT, error, make
from whorl import compiler
from whorl.cells import library
from whorl.engines.native import OneDNN
from whorl.problem import Form

INPUTS, UNITS, BATCH, TIME = 8, 16, 3, 5
LAYERS = [name for name in CELLS if name != "RNN relu"]


def raised(module: Any, cell: str, arguments: dict[str, Any], call: Callable[..., Any]) -> tuple[type, str]:
    """Class and text of the error that `call` of a new layer ends with."""
    torch.manual_seed(0)
    try:
        call(make(module, cell, **{"input_size": INPUTS, "hidden_size": UNITS} | arguments))
    except Exception as error:  # noqa: BLE001  any error: it is what we compare
        return type(error), str(error)
    return type(None), "no error"


def assert_raises_as_torch(cell: str, call: Callable[..., Any], **arguments: Any) -> None:
    theirs = raised(torch.nn, cell, arguments, call)
    assert theirs[0] is not type(None), "torch takes this call: it is no bad one"
    assert raised(whorl, cell, arguments, call) == theirs


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape or (TIME, BATCH, INPUTS), dtype=dtype)


def packed(*features: int, dtype: torch.dtype = torch.float32) -> PackedSequence:
    padded = x(TIME, BATCH, *features or (INPUTS,), dtype=dtype)
    return pack_padded_sequence(padded, [2, 5, 3], enforce_sorted=False)


def states(layer: torch.nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    state = torch.zeros(shape, dtype=dtype)
    return (state, state) if isinstance(layer, torch.nn.LSTM | torch.nn.LSTMCell) else state


CALLS = {
    "x without axes": lambda layer: layer(torch.tensor(0.0)),
    "x of 1 axis": lambda layer: layer(x(INPUTS)),
    "x of 4 axes": lambda layer: layer(x(2, TIME, BATCH, INPUTS)),
    "x of other features": lambda layer: layer(x(TIME, BATCH, 7)),
    "x of other features, unbatched": lambda layer: layer(x(TIME, 7)),
    "x of other features, packed": lambda layer: layer(packed(7)),
    "x of more axes, packed": lambda layer: layer(packed(INPUTS, 2)),
    "x of another dtype": lambda layer: layer(x(dtype=torch.float64)),
    "x of integers": lambda layer: layer(x(dtype=torch.int64)),
    "x of another dtype, packed": lambda layer: layer(packed(dtype=torch.float64)),
    "x on another device": lambda layer: layer(x().to("meta")),
    "x a list": lambda layer: layer([[0.0]]),
    "x None": lambda layer: layer(None),
    "no steps": lambda layer: layer(x(0, BATCH, INPUTS)),
    "no steps, unbatched": lambda layer: layer(x(0, INPUTS)),
    "no steps, no sequences": lambda layer: layer(x(0, 0, INPUTS)),
    "hx of another batch": lambda layer: layer(x(), states(layer, 1, 4, UNITS)),
    "hx of another width": lambda layer: layer(x(), states(layer, 1, BATCH, 15)),
    "hx of more layers": lambda layer: layer(x(), states(layer, 2, BATCH, UNITS)),
    "hx of 2 axes": lambda layer: layer(x(), states(layer, BATCH, UNITS)),
    "hx of 1 axis": lambda layer: layer(x(), states(layer, UNITS)),
    "hx of another dtype": lambda layer: layer(x(), states(layer, 1, BATCH, UNITS, dtype=torch.float64)),
    "hx batched, x not": lambda layer: layer(x(TIME, INPUTS), states(layer, 1, BATCH, UNITS)),
    "hx of more layers, unbatched": lambda layer: layer(x(TIME, INPUTS), states(layer, 2, UNITS)),
    "hx of another width, unbatched": lambda layer: layer(x(TIME, INPUTS), states(layer, 1, 15)),
    "hx of another batch, packed": lambda layer: layer(packed(), states(layer, 1, 2, UNITS)),
    "hx of another width, packed": lambda layer: layer(packed(), states(layer, 1, BATCH, 15)),
    "hx of 2 axes, packed": lambda layer: layer(packed(), states(layer, BATCH, UNITS)),
    "hx of 1 axis, packed": lambda layer: layer(packed(), states(layer, UNITS)),
    "hx of three states": lambda layer: layer(x(), (torch.zeros(1, BATCH, UNITS),) * 3),
    "hx of no states": lambda layer: layer(x(), ()),
    "hx of None": lambda layer: layer(x(), (None, None)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("cell", LAYERS)
def test_a_bad_call(cell: str, call: str) -> None:
    assert_raises_as_torch(cell, CALLS[call])


@pytest.mark.parametrize("cell", LAYERS)
def test_a_bad_call_of_a_layer_with_every_option(cell: str) -> None:
    """Rows, batch and width as batch_first, both directions, two layers and a projection have them."""
    options = {"num_layers": 2, "bidirectional": True, "batch_first": True}
    width = UNITS
    if cell == "LSTM":
        options["proj_size"] = width = 4
    given = x(BATCH, TIME, INPUTS)

    def hx(h: tuple[int, ...], c: tuple[int, ...]) -> Any:
        return (torch.zeros(h), torch.zeros(c)) if cell == "LSTM" else torch.zeros(h)

    right = (4, BATCH, width), (4, BATCH, UNITS)
    make(whorl, cell, INPUTS, UNITS, **options)(given, hx(*right))
    for wrong in [(4, TIME, width), (2, BATCH, width), (4, BATCH, UNITS + 1)]:
        assert_raises_as_torch(cell, lambda layer, wrong=wrong: layer(given, hx(wrong, right[1])), **options)
    if cell == "LSTM":
        for wrong in [(4, TIME, UNITS), (2, BATCH, UNITS), right[0]]:
            assert_raises_as_torch(cell, lambda layer, wrong=wrong: layer(given, hx(right[0], wrong)), **options)
    assert_raises_as_torch(cell, lambda layer: layer(x(BATCH, TIME, 7)), **options)


@pytest.mark.parametrize("call", ["hx a tuple", "hx a tuple, unbatched", "hx a tuple, packed"])
@pytest.mark.parametrize("cell", ["GRU", "RNN tanh"])
def test_a_pair_of_states_for_a_layer_of_one(cell: str, call: str) -> None:
    """What a user meets who replaces an LSTM by a GRU."""
    given = {"hx a tuple": x(), "hx a tuple, unbatched": x(TIME, INPUTS), "hx a tuple, packed": packed()}[call]
    middle = () if call == "hx a tuple, unbatched" else (BATCH,)
    assert_raises_as_torch(cell, lambda layer: layer(given, (torch.zeros(1, *middle, UNITS),) * 2))


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("sizes, what", [
    ([3, 2], "are [3, 2], of 5 rows, and its data has 10: "),
    ([3] * 9, "are [3, 3, 3, 3, 3, 3, 3, 3, ...], of 27 rows, and its data has 10: "),
    ([4, 6], "never more than at the step before: pack x with"),
    ([11, -1], "never more than at the step before"),
    (torch.tensor([], dtype=torch.int64), "are [], of 0 rows, and its data has 10: "),
    (torch.tensor([6, 4], dtype=torch.int32), "are torch.int32 with 1 axes: they must be int64 [time]."),
    (torch.tensor([[6, 4]]), "are torch.int64 with 2 axes"),
])  # fmt: skip
def test_a_packed_sequence_that_fits_no_data(sizes: Any, what: str, compiled: bool) -> None:
    """Made by hand: an engine would read and write beside the rows.  Torch takes some of these."""
    given = PackedSequence(x(10, INPUTS), sizes if isinstance(sizes, Tensor) else torch.tensor(sizes))
    layer = whorl.LSTM(INPUTS, UNITS, layer_norm=True)
    if compiled:
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with pytest.raises(whorl.InputError, match=re.escape(what)):
        layer(given)


def test_a_step_that_no_sequence_reaches() -> None:
    """Which torch takes: the states are those of the step before."""
    data, layer = torch.randn(5, INPUTS), whorl.GRU(INPUTS, UNITS, engine="cpu" if compiler.found() else "auto")
    found = layer(PackedSequence(data, torch.tensor([3, 2, 0])))
    once = layer(PackedSequence(data, torch.tensor([3, 2])))
    assert torch.equal(found[0].data, once[0].data)
    assert torch.equal(found[1], once[1])


STEPS = {
    "x without axes": lambda one: one(torch.tensor(0.0)),
    "x of 3 axes": lambda one: one(x()),
    "x of other features": lambda one: one(x(BATCH, 7)),
    "x of other features, unbatched": lambda one: one(x(7)),
    "x of another dtype": lambda one: one(x(BATCH, INPUTS, dtype=torch.float64)),
    "x of integers": lambda one: one(x(BATCH, INPUTS, dtype=torch.int64)),
    "x a list": lambda one: one([0.0]),
    "x packed": lambda one: one(packed()),
    "hx of 3 axes": lambda one: one(x(BATCH, INPUTS), states(one, 1, BATCH, UNITS)),
    "hx of 1 axis": lambda one: one(x(BATCH, INPUTS), states(one, UNITS)),
    "hx of another batch": lambda one: one(x(BATCH, INPUTS), states(one, 2, UNITS)),
    "hx of batch 1": lambda one: one(x(BATCH, INPUTS), states(one, 1, UNITS)),
    "hx of another width": lambda one: one(x(BATCH, INPUTS), states(one, BATCH, 15)),
    "hx of another dtype": lambda one: one(x(BATCH, INPUTS), states(one, BATCH, UNITS, dtype=torch.float64)),
    "hx batched, x not": lambda one: one(x(INPUTS), states(one, BATCH, UNITS)),
    "hx of another width, unbatched": lambda one: one(x(INPUTS), states(one, 15)),
    "hx of three states": lambda one: one(x(BATCH, INPUTS), (torch.zeros(BATCH, UNITS),) * 3),
    "hx of no states": lambda one: one(x(BATCH, INPUTS), ()),
    "hx of None": lambda one: one(x(BATCH, INPUTS), (None, None)),
    "hx a number": lambda one: one(x(BATCH, INPUTS), 3),
}


@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("cell", LAYERS)
def test_a_bad_step(cell: str, call: str) -> None:
    assert_raises_as_torch(f"{cell}Cell", STEPS[call])


def test_a_tensor_of_both_states_is_no_pair() -> None:
    """torch's LSTM refuses it too, as of other axes; its cell by its type."""
    assert_raises_as_torch("LSTMCell", lambda one: one(x(2, INPUTS), torch.zeros(2, 2, UNITS)))
    assert_raises_as_torch("LSTM", lambda layer: layer(x(), torch.zeros(2, BATCH, UNITS)))


CONSTRUCTORS = [
    {"dropout": 1.5}, {"dropout": -0.1}, {"dropout": True}, {"dropout": "a"}, {"bias": 1}, {"bias": None},
    {"batch_first": 1}, {"input_size": 1.5}, {"input_size": 0}, {"hidden_size": "3"}, {"hidden_size": -1},
    {"num_layers": 0}, {"num_layers": 1.5}, {"proj_size": -1}, {"proj_size": UNITS}, {"unknown": 1},
]  # fmt: skip


@pytest.mark.parametrize("arguments", CONSTRUCTORS, ids=str)
@pytest.mark.parametrize("cell", LAYERS)
def test_a_bad_layer(cell: str, arguments: dict[str, Any]) -> None:
    assert_raises_as_torch(cell, lambda layer: None, **arguments)


@pytest.mark.parametrize("arguments", [{"input_size": -1}, {"input_size": 1.5}, {"unknown": 1}], ids=str)
@pytest.mark.parametrize("cell", LAYERS)
def test_a_bad_cell(cell: str, arguments: dict[str, Any]) -> None:
    assert_raises_as_torch(f"{cell}Cell", lambda one: None, **arguments)


def test_a_bad_nonlinearity() -> None:
    for module in (torch.nn, whorl):
        with pytest.raises(ValueError, match="Unknown nonlinearity 'sigmoid'. Select from 'tanh' or 'relu'."):
            module.RNN(INPUTS, UNITS, nonlinearity="sigmoid")
        one = module.RNNCell(INPUTS, UNITS, nonlinearity="sigmoid")  # torch refuses the first call, not the cell
        with pytest.raises(RuntimeError, match="^Unknown nonlinearity: sigmoid$"):
            one(x(BATCH, INPUTS))


def test_dropout_behind_the_last_layer_warns_as_torch_does() -> None:
    texts = []
    for module in (torch.nn, whorl):
        with pytest.warns(UserWarning, match="dropout option adds dropout after all but last recurrent layer") as seen:
            module.LSTM(INPUTS, UNITS, dropout=0.5)
        texts.append(str(seen[0].message))
    assert texts[0] == texts[1]


def test_weights_that_do_not_fit_are_named_before_a_kernel_reads_beside_them() -> None:
    layer, x = whorl.LSTM(3, 4), torch.randn(5, 2, 3)
    layer.weight_hh_l0 = torch.nn.Parameter(torch.randn(12, 4))
    with pytest.raises(whorl.InputError, match=r"weight_hh_l0 has shape \(12, 4\), this LSTM needs \(16, 4\)"):
        layer(x)
    layer.weight_hh_l0 = torch.nn.Parameter(torch.randn(16, 4, dtype=torch.float64))
    with pytest.raises(whorl.InputError, match=r"differ in dtype: .*weight_hh_l0 torch.float64"):
        layer(x)
    layer.weight_hh_l0 = None
    with pytest.raises(whorl.InputError, match=r"weight_hh_l0 is None, this LSTM needs a tensor of shape \(16, 4\)"):
        layer(x)


def test_the_mode_of_a_layer_that_is_built() -> None:
    layer, x = whorl.RNN(3, 4), torch.randn(5, 2, 3)
    layer.mode = "RNN_RELU"
    other = whorl.RNN(3, 4, nonlinearity="relu")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x)[0], other(x)[0])
    assert torch.equal(copy.deepcopy(layer)(x)[0], other(x)[0])
    for one in (layer, whorl.GRU(3, 4)):
        with pytest.raises(whorl.InputError, match="mode is 'LSTM', it can be "):
            one.mode = "LSTM"
    cell = whorl.RNNCell(3, 4, dtype=torch.float64)
    cell.nonlinearity = "relu"
    theirs = torch.nn.RNNCell(3, 4, nonlinearity="relu", dtype=torch.float64)
    theirs.load_state_dict(cell.state_dict())
    assert error(cell(x[0].double()), theirs(x[0].double())) <= EXACT


def test_a_coupled_lstm_takes_its_device_by_position() -> None:
    layer = whorl.LSTM(3, 4, 1, True, False, 0.0, False, 0, "cpu", torch.float64, coupled=True)
    assert {(weight.device.type, weight.dtype) for weight in layer.parameters()} == {("cpu", torch.float64)}


@pytest.mark.parametrize("kind", [whorl.GRU, whorl.RNN])
def test_a_projection_is_refused_also_where_it_comes_by_position(kind: type[torch.nn.Module]) -> None:
    with pytest.raises(ValueError, match="proj_size argument is only supported for LSTM, not RNN or GRU"):
        kind(8, 16, 1, *(["tanh"] if kind is whorl.RNN else []), True, False, 0.0, False, 4)


def test_a_cell_that_reads_its_state_by_unit_takes_no_projection() -> None:
    with pytest.raises(whorl.InputError, match="gru reads its state h unit by unit"):
        Form(cell=library.gru.graph, inputs=3, units=4, projection=1)


def test_autocast_leaves_float64_alone_as_torch_does() -> None:
    layer, x = whorl.LSTM(3, 4, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x)
    assert y.dtype == torch.float64
    assert torch.equal(y, layer(x)[0])


def test_a_double_backward_under_autocast_is_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneDNN, "recorded", False)  # as the engines are whose backward is whorl's
    layer, x = whorl.LSTM(3, 4, engine="onednn"), torch.randn(5, 2, 3, requires_grad=True)

    def twice() -> torch.Tensor:
        (slope,) = torch.autograd.grad(layer(x)[0].square().sum(), x, create_graph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(slope.square().sum(), x)[0]

    autocast = False
    plain = twice()
    autocast = True
    torch.testing.assert_close(twice(), plain)
