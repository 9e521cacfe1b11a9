"""Layers of any cell: as its step on tensors in a loop, and in every surrounding that a layer of torch has.

float64, outputs, final states and every gradient, to 1e-12.
"""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whorl
from cells_for_tests import four_states, gru_before, layer_norm_lstm
from comparison import EXACT, assert_exact, error, flat
from plain_loops import SIZES, Drawn, case_of, gradients, packed
from whorl import compiler
from whorl.cells import library


@whorl.cell(gates="n", states="h", inputs="keep late")
def one_gate(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """The least of everything, two inputs that are not gates, and activations as modules and functions."""
    return dict(h=x.keep * s.h + nn.LeakyReLU(0.2)(F.gelu(x.n + r.n) - F.silu(x.late)))


@whorl.cell(gates="a n", states="h c", vectors={"w": 0.3}, x_only="n")
def nested(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    """Products of products and of means, of a gate without a plain one; a state that is another's old value."""
    level = whorl.mean([s.h * x.n, x.a])
    inner = r.a(level * s.h + v.w)
    return dict(h=torch.tanh(r.a(torch.where(inner > level, torch.sigmoid(inner), s.c)) + x.n), c=s.h)


def make_unit(activation: Callable[[Any], Any]) -> whorl.Cell:
    @whorl.cell(gates="n", states="h")
    def unit(x: Any, r: Any, s: Any) -> dict[str, Any]:
        return dict(h=activation(x.n + r.n).tanh())

    return replace(unit, origin=(make_unit, (activation,)))


softsign_lstm = library.make_lstm(nn.Softsign(), F.hardsigmoid, layer_norm=True)
LOOPED = [one_gate, nested, four_states, gru_before, layer_norm_lstm]
"""Cells of 1 and 8 gates, 1 and 4 states, with extra inputs, vectors, gates of x alone, r.n(a), mean and modules."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cell", LOOPED, ids=lambda cell: cell.name)
def test_a_layer_is_its_cells_lines_in_a_loop(cell: whorl.Cell, size: str) -> None:
    made, options = Drawn(case_of(cell), **SIZES[size]), {}
    leaves = made.leaves()
    if made.layer.bidirectional:
        options = dict(lengths=[4, 0, 6, 1], reset=torch.rand(6, 4) < 0.3)
    assert_exact(gradients(made(**options), leaves), gradients(made.loop(**options), leaves))


# --- the built-in cells are the built-in layers -----------------------------------------------------------------------

SAME = {
    "lstm": (library.lstm, whorl.LSTM, {}),
    "lstm peephole, coupled": (
        library.make_lstm(peephole=True, coupled=True),
        whorl.LSTM,
        dict(peephole=True, coupled=True),
    ),
    "gru": (library.gru, whorl.GRU, {}),
    "gru reset before": (library.make_gru(reset_after=False), whorl.GRU, dict(reset_after=False)),
    "rnn_tanh": (library.rnn_tanh, whorl.RNN, {}),
    "rnn_relu": (library.rnn_relu, whorl.RNN, dict(nonlinearity="relu")),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAME)
def test_a_built_in_cell_is_the_built_in_layer_to_the_bit(name: str, dtype: torch.dtype) -> None:
    """The same weights from the same seed, engine, outputs and gradients."""
    cell, kind, options = SAME[name]
    sizes = dict(num_layers=2, bidirectional=True, dropout=0.3, zoneout=0.1, dtype=dtype)
    made = []
    for layer in (lambda: whorl.Recurrent(cell, 5, 7, **sizes), lambda: kind(5, 7, **sizes, **options)):
        torch.manual_seed(3)
        built = layer()
        x = torch.randn(4, 3, 5, dtype=dtype)
        outputs = flat(built(x.requires_grad_(), lengths=[4, 1, 3]))
        assert built.plan(x).engine == ("cpu" if compiler.found() else "reference")
        made.append(gradients(outputs, dict(sorted(built.named_parameters())) | {"x": x}))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0])


def test_a_built_in_cell_runs_on_the_fast_engine() -> None:
    layer, x = whorl.Recurrent(library.lstm, 5, 7, num_layers=2), torch.randn(4, 3, 5)
    plain = whorl.LSTM(5, 7, num_layers=2)
    plain.load_state_dict(layer.state_dict())
    assert layer.plan(x) == plain.plan(x)
    assert layer.plan(x).engine != "reference"
    assert all(torch.equal(a, b) for a, b in zip(flat(layer(x)), flat(plain(x)), strict=True))


# --- surroundings -----------------------------------------------------------------------------------------------------

VARIED = [one_gate, nested, layer_norm_lstm, library.slstm, library.gru_d]
varied = pytest.mark.parametrize("cell", VARIED, ids=lambda cell: cell.name)


@varied
def test_packed_sequences_are_lengths(cell: whorl.Cell) -> None:
    made = Drawn(case_of(cell), layers=2)
    lengths, leaves = [2, 5, 3], made.leaves()
    wanted = gradients(made(lengths=lengths), leaves)

    def rows(tensor: Tensor) -> Any:
        return pack_padded_sequence(tensor, lengths, enforce_sorted=False)

    inputs = {key: rows(value) for key, value in made.inputs.items()} or None
    y, finals = made.layer(rows(made.x), packed(made.hx), inputs=inputs)
    assert_exact(gradients([pad_packed_sequence(y)[0], *flat(finals)], leaves), wanted)


@varied
def test_batch_first_and_unbatched(cell: whorl.Cell) -> None:
    made = Drawn(case_of(cell))
    hx, inputs, leaves = made.hx, made.inputs, made.leaves()
    wanted = gradients(made(), leaves)
    made.layer.batch_first = True
    flipped = {key: value.transpose(0, 1) for key, value in inputs.items()} or None
    y, finals = made.layer(made.x.transpose(0, 1), packed(hx), inputs=flipped)
    assert_exact(gradients([y.transpose(0, 1), *flat(finals)], leaves), wanted)
    rows = []
    for row in range(made.x.shape[1]):
        own = {key: value[:, row] for key, value in inputs.items()} or None
        rows.append(flat(made.layer(made.x[:, row], packed([state[:, row] for state in hx]), inputs=own)))
    assert_exact(gradients([torch.stack(part, 1) for part in zip(*rows, strict=True)], leaves), wanted)


@varied
def test_autocast_is_the_layer_in_the_autocast_dtype(cell: whorl.Cell) -> None:
    made = Drawn(case_of(cell), layers=2)
    made.layer.float()
    x, inputs = made.x.float(), {key: value.bfloat16() for key, value in made.inputs.items()} or None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flat(made.layer(x, inputs=inputs))
    wanted = flat(copy.deepcopy(made.layer).bfloat16()(x.bfloat16(), inputs=inputs))
    assert {out.dtype for out in got} == {torch.bfloat16}
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(got, wanted, strict=True))


@varied
def test_a_compiled_layer_is_one_graph(cell: whorl.Cell) -> None:
    made = Drawn(case_of(cell), time=3, layers=2)
    reset, leaves = torch.rand(3, 3) < 0.3, made.leaves()
    torch._dynamo.reset()
    layer, made.layer = made.layer, torch.compile(made.layer, fullgraph=True, backend="aot_eager")
    got = gradients(made(reset=reset), leaves)
    made.layer = layer
    assert_exact(got, gradients(made(reset=reset), leaves))


@varied
def test_vmap_over_sequences_and_over_weights(cell: whorl.Cell) -> None:
    """The gradient of each sequence apart, and layers of several weights at once: as one by one."""
    made = Drawn(case_of(cell))
    weights = {key: value.detach() for key, value in made.layer.named_parameters()}

    def loss(weights: dict, x: Tensor, inputs: dict) -> Tensor:
        outputs = flat(torch.func.functional_call(made.layer, weights, (x,), {"inputs": inputs or None}))
        return torch.stack([(out + index).sin().sum() for index, out in enumerate(outputs)]).sum()

    each = torch.vmap(torch.func.grad(loss), (None, 1, 1))(weights, made.x, made.inputs)
    alone = [
        torch.func.grad(loss)(weights, made.x[:, i], {k: v[:, i] for k, v in made.inputs.items()}) for i in range(3)
    ]
    assert_exact(each, {key: torch.stack([one[key] for one in alone]) for key in weights})

    several = {key: torch.stack([value, 0.5 * value]) for key, value in weights.items()}
    both = torch.vmap(loss, (0, None, None))(several, made.x, made.inputs)
    apart = [loss({key: value[i] for key, value in several.items()}, made.x, made.inputs) for i in range(2)]
    assert error(both, torch.stack(apart)) <= EXACT


def through_a_file(layer: nn.Module) -> nn.Module:
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), through_a_file],
    ids="deepcopy pickle file".split(),
)
@pytest.mark.parametrize("cell", [*VARIED, softsign_lstm, make_unit(F.silu)], ids=lambda cell: cell.name)
def test_a_copy_computes_the_same_and_is_its_own(cell: whorl.Cell, way: Callable[[nn.Module], nn.Module]) -> None:
    made = Drawn(case_of(cell), layers=2)
    before, other = made(), copy.copy(made)
    other.layer = way(made.layer)
    assert (type(other.layer), repr(other.layer)) == (whorl.Recurrent, repr(made.layer))
    assert other.layer.cell.graph == made.layer.cell.graph
    assert all(torch.equal(a, b) for a, b in zip(other(), before, strict=True))
    with torch.no_grad():
        next(other.layer.parameters()).mul_(2)
    assert not torch.equal(other()[0], before[0])
    assert all(torch.equal(a, b) for a, b in zip(made(), before, strict=True))


def test_a_layer_of_a_lambda_says_how_to_pickle_it() -> None:
    layer = whorl.Recurrent(whorl.cell(gates="n", states="h")(lambda x, r, s: dict(h=torch.tanh(x.n + r.n))), 2, 3)
    with pytest.raises(whorl.CellError, match="cannot be pickled.*a function at the top of a module"):
        pickle.dumps(layer)
    x = torch.randn(4, 2, 2)
    again = whorl.Recurrent(layer.cell, 2, 3)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x)[0], layer(x)[0])
    assert torch.equal(copy.deepcopy(layer)(x)[0], layer(x)[0])


@pytest.mark.parametrize("clip", [{"h": 1.0, "c": 2.0}, {"h": 1.0}, {"c": 2.0}, {"h": 1.5, "c": 1.5}], ids=str)
def test_states_with_the_same_new_value_are_clipped_each_by_its_own_limit(clip: dict[str, float]) -> None:
    @whorl.cell(gates="n", states="h c")
    def alike(x: Any, r: Any, s: Any) -> dict[str, Any]:
        new = 3 * torch.tanh(x.n + r.n + s.c)
        return dict(h=new, c=new)

    layer = whorl.Recurrent(alike, 4, 6, clip=clip, engine="reference")
    states = layer(3 * torch.randn(5, 2, 4), return_states=True)[2]
    for name in ("h", "c"):
        most = float(states[name].detach().abs().max())
        assert most == pytest.approx(clip[name]) if name in clip else 2.5 < most <= 3
