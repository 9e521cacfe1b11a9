"""What a layer with options holds, what may be assigned, and what copies, files and other users of it keep."""

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import whorl
from comparison import assert_exact, results
from option_cases import LAYER, Case, names
from whorl import CellError, InputError

KINDS = ("LSTM", "GRU", "RNN")
BOTH = {"num_layers": 2, "bidirectional": True}
INPUTS, UNITS = 2, 5
X = torch.linspace(-4, 4, 4 * 3 * INPUTS).view(4, 3, INPUTS)
ROWS = [(kind, name) for kind in KINDS for name in names(kind) if name in LAYER and name != "dropout"]
"""Each layer with each of its options."""


def make(kind: str, name: str, **arguments: Any) -> torch.nn.Module:
    return getattr(whorl, kind)(INPUTS, UNITS, **LAYER[name], **arguments)


def outputs(layer: torch.nn.Module, x: Tensor = X) -> list[Tensor]:
    """Of a call with draws that are always the same."""
    torch.manual_seed(5)
    y, finals = layer(x.to(layer.weight_ih_l0.dtype))
    return [y, *(finals if isinstance(finals, tuple) else [finals])]


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs(one), outputs(other), strict=True))


def doubled(value: Any) -> Any:
    """At the top of a module, so that it pickles."""
    return whorl.tanh(2 * value)


# --- parameters -------------------------------------------------------------------------------------------------------

NAMES = {
    "peephole": {"peephole_i": 0.0, "peephole_f": 0.0, "peephole_o": 0.0},
    "layer_norm of c": {"c_gain": 1.0, "c_shift": 0.0},
    "layer_norm of x": {
        f"x_{kind}_{gate}": start for gate in "ifgo" for kind, start in (("gain", 1.0), ("shift", 0.0))
    },
}


@pytest.mark.parametrize("kind, name", ROWS)
def test_weights_are_torchs_from_the_same_seed(kind: str, name: str) -> None:
    """Names, order, shapes and values; beside them there are vectors where the option has some."""
    made = []
    for module in (torch.nn, whorl):
        torch.manual_seed(3)
        options = LAYER[name] if module is whorl else {}
        made.append(
            dict(getattr(module, kind)(INPUTS, UNITS, **BOTH, **options, dtype=torch.float64).named_parameters())
        )
    theirs, ours = made
    weights = {name: weight for name, weight in ours.items() if not name.startswith("vector_")}
    assert [*weights] == [*theirs]
    if name != "coupled":
        assert all(torch.equal(weights[key], theirs[key]) for key in theirs)
    vectors = [key for key in ours if key.startswith("vector_")]
    assert bool(vectors) == (name.startswith("layer_norm") or name == "peephole")
    assert all(ours[key].shape == (UNITS,) and ours[key].dtype == torch.float64 for key in vectors)


@pytest.mark.parametrize("name", NAMES)
def test_the_names_and_first_values_of_vectors(name: str) -> None:
    layer = make("LSTM", name)
    vectors = {key: value for key, value in layer.named_parameters() if key.startswith("vector_")}
    assert [*vectors] == [f"vector_{key}_l0" for key in NAMES[name]]
    for start, vector in zip(NAMES[name].values(), vectors.values(), strict=True):
        assert torch.equal(vector, torch.full((UNITS,), start))


def test_a_coupled_lstm_is_smaller_and_drawn_as_torch_draws() -> None:
    torch.manual_seed(3)
    layer = whorl.LSTM(INPUTS, UNITS, coupled=True)
    torch.manual_seed(3)
    draws = [torch.empty(shape).uniform_(-(UNITS**-0.5), UNITS**-0.5) for shape in ((15, 2), (15, 5), (15,), (15,))]
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), draws, strict=True))


@pytest.mark.parametrize("kind, name", ROWS)
def test_reset_parameters(kind: str, name: str) -> None:
    torch.manual_seed(3)
    fresh = make(kind, name, **BOTH)
    layer = make(kind, name, **BOTH)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.fill_(7.0)
    torch.manual_seed(3)
    layer.reset_parameters()
    pairs = zip(layer.named_parameters(), fresh.named_parameters(), strict=True)
    assert all(a == b and torch.equal(one, other) for (a, one), (b, other) in pairs)


def test_vectors_are_reset_where_another_parameter_makes_them_or_has_such_a_name() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return 2 * value

        def right_inverse(self, value: torch.Tensor) -> torch.Tensor:
            return value / 2

    layer = whorl.LSTM(INPUTS, UNITS, layer_norm="r")
    layer.vector_bias = torch.nn.Parameter(torch.full((UNITS,), 7.0))
    torch.nn.utils.parametrize.register_parametrization(layer, "vector_r_gain_i_l0", Doubled())
    with torch.no_grad():
        layer.vector_r_gain_i_l0 = torch.full((UNITS,), 3.0)
    layer.reset_parameters()
    assert torch.equal(layer.vector_r_gain_i_l0, torch.ones(UNITS))
    assert layer.vector_bias.abs().max() < 1  # drawn, as torch draws what is none of its own


@pytest.mark.parametrize("kind, name", ROWS)
def test_a_layer_on_meta_comes_to_life(kind: str, name: str) -> None:
    layer = make(kind, name, device="meta")
    assert {weight.device.type for weight in layer.parameters()} == {"meta"}
    assert layer(X.to("meta"))[0].shape == (4, 3, UNITS)
    layer = layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    assert equal(layer, make(kind, name))


# --- files and copies -------------------------------------------------------------------------------------------------


def _state_dict(layer: torch.nn.Module, fresh: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return fresh


def _file(layer: torch.nn.Module, fresh: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[..., torch.nn.Module]] = {
    "deepcopy": lambda layer, fresh: copy.deepcopy(layer),
    "pickle": lambda layer, fresh: pickle.loads(pickle.dumps(layer)),
    "torch.save": _file,
    "state_dict": _state_dict,
}


@pytest.mark.parametrize("kind, name", ROWS)
def test_a_copy_computes_the_same_and_is_its_own(kind: str, name: str) -> None:
    case = Case(kind, [name], {"bidirectional": True}, inputs=INPUTS, units=UNITS)
    layer = case.layer(engine="reference")
    before = outputs(layer)
    for way, function in COPIES.items():
        copied = function(layer, make(kind, name, bidirectional=True, dtype=torch.float64, engine="reference"))
        assert (type(copied), repr(copied)) == (type(layer), repr(layer)), way
        assert equal(copied, layer), way
        with torch.no_grad():
            next(copied.parameters()).mul_(2)
        copied.input_dropout = 0.9
        assert not equal(copied, layer), way
        assert all(torch.equal(a, b) for a, b in zip(outputs(layer), before, strict=True)), way


FUNCTIONS = {
    "torch.tanh": torch.tanh,
    "functional": F.elu,
    "whorl's": whorl.softplus,
    "a module": torch.nn.ELU(0.5),
    "the user's": doubled,
    "partial": partial(F.elu, alpha=0.5),
    "a name": "gelu",
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("way", COPIES)
def test_an_activation_comes_along(way: str, name: str) -> None:
    function = FUNCTIONS[name]
    layer = whorl.GRU(INPUTS, UNITS, activation=function, recurrent_activation=function)
    copied = COPIES[way](layer, whorl.GRU(INPUTS, UNITS, activation=function, recurrent_activation=function))
    assert equal(copied, layer)
    if function is not torch.tanh:
        plain = whorl.GRU(INPUTS, UNITS)
        plain.load_state_dict(layer.state_dict())
        assert not equal(layer, plain)


@pytest.mark.parametrize("name", ["activation", "recurrent_activation"])
def test_a_lambda_runs_and_copies_but_its_pickle_teaches(name: str) -> None:
    def inner(value: Any) -> Any:
        return whorl.tanh(value)

    for function, title in ((lambda value: whorl.tanh(value), "<lambda>"), (inner, "<locals>.inner")):
        layer = whorl.GRU(INPUTS, UNITS, **{name: function})
        assert equal(copy.deepcopy(layer), layer)
        text = "which cannot be pickled: write it as a function at the top of a module, not as a lambda or inside"
        for way in (pickle.dumps, lambda layer: torch.save(layer, io.BytesIO())):
            with pytest.raises(CellError, match=f"{name} is .*{re.escape(title)}, {text}"):
                way(layer)


@pytest.mark.parametrize("name", ["peephole", "layer_norm"])
def test_a_state_dict_without_vectors_is_refused_by_their_names(name: str) -> None:
    with pytest.raises(RuntimeError, match="Missing key.*vector_"):
        make("LSTM", name).load_state_dict(torch.nn.LSTM(INPUTS, UNITS).state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key.*vector_"):
        whorl.LSTM(INPUTS, UNITS).load_state_dict(make("LSTM", name).state_dict())


@pytest.mark.parametrize("kind, name", ROWS)
def test_a_replica_of_data_parallel_trains_the_original(kind: str, name: str) -> None:
    case = Case(kind, [name], BOTH)
    layer, tensors = case.layer(), case.tensors()
    torch.manual_seed(7)
    case.outcome_of_layer(layer, tensors, {})["output"].square().sum().backward()
    direct = [weight.grad.clone() for weight in layer.parameters()]
    layer.zero_grad()
    replica = layer._replicate_for_data_parallel()
    for key, weight in layer.named_parameters():
        setattr(replica, key, weight * 1)
    torch.manual_seed(7)
    case.outcome_of_layer(replica, tensors, {})["output"].square().sum().backward()
    assert all(torch.equal(a, weight.grad) for a, weight in zip(direct, layer.parameters(), strict=True))


@pytest.mark.parametrize("kind, name", ROWS)
def test_a_layer_says_its_options(kind: str, name: str) -> None:
    text = repr(make(kind, name))
    assert all(f"{key}={value!r}" in text for key, value in LAYER[name].items())
    assert all(getattr(make(kind, name), key) == value for key, value in LAYER[name].items())
    assert "=" not in repr(getattr(whorl, kind)(INPUTS, UNITS))


# --- assigned options -------------------------------------------------------------------------------------------------


FREE = [(kind, name) for kind, name in ROWS if not {*LAYER[name]} & {"layer_norm", "peephole", "coupled"}]


@pytest.mark.parametrize("kind, name", FREE)
def test_an_assigned_option_takes_effect(kind: str, name: str) -> None:
    """As if it had been there from the beginning, and away again."""
    case, layer = Case(kind, [name], {"bidirectional": True}), Case(kind, [], {"bidirectional": True}).layer()
    begin = results(layer, X)
    for key, value in LAYER[name].items():
        setattr(layer, key, value)
    assert_exact(results(layer, X), results(case.layer(), X))
    if name != "memory":
        assert not torch.equal(results(layer, X)["output 0"], begin["output 0"])
    fresh = getattr(whorl, kind)(INPUTS, UNITS)
    for key in LAYER[name]:
        setattr(layer, key, getattr(fresh, key))
    assert_exact(results(layer, X), begin)


def test_an_assigned_dropout_between_layers_takes_effect() -> None:
    layer = whorl.GRU(INPUTS, UNITS, 2)
    begin = outputs(layer)[0]
    layer.dropout = 0.5
    assert not torch.equal(outputs(layer)[0], begin)


def test_reset_after_is_assigned_beside_layer_norm() -> None:
    """Which then normalises the candidate's product on its own."""
    case = Case("GRU", ["layer_norm", "reset_after"])
    layer = Case("GRU", ["layer_norm"]).layer()
    layer.reset_after = False
    assert_exact(results(layer, X), results(case.layer(), X))


@pytest.mark.parametrize("name, value", [("layer_norm", "x"), ("peephole", True), ("coupled", True)])
def test_an_option_that_decides_parameters_is_fixed(name: str, value: Any) -> None:
    layer = whorl.LSTM(INPUTS, UNITS)
    text = f"{name} decides which parameters a layer has, and this LSTM is built: make a new one with {name}={value!r}."
    with pytest.raises(InputError, match=re.escape(text)):
        setattr(layer, name, value)
    assert getattr(layer, name) is False


@pytest.mark.parametrize("name, value, error", [
    ("recurrent_dropout", 1.5, InputError), ("recurrent_dropout_mode", "x", InputError), ("clip", -1, InputError),
    ("zoneout", {"z": 1}, InputError), ("reset_after", False, InputError), ("memory", "x", InputError),
    ("activation", "nope", InputError), ("activation", lambda v: v if v > 0 else -v, CellError),
    ("recurrent_activation", lambda v, w: v, TypeError), ("engine", "x", InputError),
])  # fmt: skip
def test_a_refused_assignment_leaves_the_layer_as_it_was(name: str, value: Any, error: type[Exception]) -> None:
    layer = whorl.LSTM(INPUTS, UNITS, zoneout=0.1).eval()
    before, y = repr(layer), layer(X)[0]
    with pytest.raises(error):
        setattr(layer, name, value)
    assert repr(layer) == before
    layer.zoneout = 0.1  # builds again
    assert torch.equal(layer(X)[0], y)


def test_an_rnn_with_relu_keeps_it() -> None:
    layer = whorl.RNN(INPUTS, UNITS, nonlinearity="relu")
    with pytest.raises(InputError, match="nonlinearity is 'relu' and activation is given too"):
        layer.activation = "tanh"
