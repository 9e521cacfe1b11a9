"""Options under torch.compile, torch.func, autocast and in double backward, against the loop."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whorl
from comparison import EXACT, error, flat, weighted
from option_cases import Case, mask_of

BOTH = {"num_layers": 2, "bidirectional": True}
EVERY_DRAW = {"recurrent_dropout": 0.4, "input_dropout": 0.3, "zoneout": 0.2, "weight_drop": 0.3, "dropout": 0.4}
EVERY_CELL = {
    "layer_norm": True, "peephole": True, "coupled": True, "clip": 0.7, "activation": "softplus", "proj_size": 2,
    "recurrent_activation": "hard_sigmoid",
}  # fmt: skip


def differences(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """Those that are further apart than float64 rounds."""
    assert got.keys() == truth.keys()
    return {name: e for name in truth if not (e := error(got[name].detach(), truth[name].detach())) <= EXACT}


# --- torch.compile ----------------------------------------------------------------------------------------------------

COMPILED: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "marks": ("GRU", ["lengths", "mask", "reset_to", "return_states"], BOTH),
    "options of the cell": ("LSTM", ["return_states"], BOTH | EVERY_CELL),
    "all that is drawn": ("LSTM", ["mask"], BOTH | EVERY_DRAW),
    "recomputed": ("RNN", ["recurrent_dropout", "reset"], BOTH | {"memory": "recompute"}),
    "given masks": ("LSTM", ["given recurrent_dropout", "given zoneout", "given weight_drop", "given dropout"], BOTH),
}


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_call_is_the_eager_one(name: str) -> None:
    """In one graph, with the same draws from the same seed, and all gradients."""
    torch._dynamo.reset()
    kind, rows, arguments = COMPILED[name]
    case = Case(kind, rows, arguments)
    layer, marks = case.layer(), case.call_marks()
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = {key: tensor.requires_grad_() for key, tensor in case.tensors().items()}
        layer.zero_grad()
        torch.manual_seed(7)
        outputs = case.outcome_of_layer(call, leaves, marks)
        weighted([*outputs.values()]).backward()
        grads = {f"grad of {key}": leaf.grad for key, leaf in (leaves | dict(layer.named_parameters())).items()}
        found.append({key: out.detach() for key, out in outputs.items()} | grads)
    eager, compiled = found
    assert [key for key in eager if eager[key] is None or not torch.equal(compiled[key], eager[key])] == []
    assert differences(compiled, case.of_loop()) == {}


def test_lengths_compile_once_for_many_shapes() -> None:
    torch._dynamo.reset()
    layer, counter = whorl.LSTM(2, 3, **BOTH), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for time, batch in [(3, 2), (4, 2), (5, 3), (6, 4), (3, 4)]:
        x, lengths = torch.randn(time, batch, 2), torch.randint(0, time + 1, (batch,))
        assert torch.equal(compiled(x, lengths=lengths)[0], layer(x, lengths=lengths)[0])
    assert counter.frame_count <= 3


def test_lengths_that_are_too_long_are_cut_where_they_cannot_be_looked_at() -> None:
    torch._dynamo.reset()
    layer, x = whorl.GRU(2, 3, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    lengths, cut = torch.tensor([9, 2, -1]), torch.tensor([4, 2, 0])
    truth = layer(x, lengths=cut)
    with pytest.raises(whorl.InputError, match="lengths go from -1 to 9 and x has 4 steps"):
        layer(x, lengths=lengths)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, lengths=lengths)
    mapped = vmap(lambda lengths: layer(x, lengths=lengths))(lengths.unsqueeze(0))
    assert all(torch.equal(a, b) for a, b in zip(compiled, truth, strict=True))
    assert all(error(a[0].detach(), b.detach()) <= EXACT for a, b in zip(mapped, truth, strict=True))


def test_a_packed_call_with_resets_compiles() -> None:
    torch._dynamo.reset()
    layer, lengths = whorl.GRU(2, 3, **BOTH), [2, 4, 3]
    packed = pack_padded_sequence(torch.randn(4, 3, 2), lengths, enforce_sorted=False)
    reset = pack_padded_sequence(torch.rand(4, 3) > 0.5, lengths, enforce_sorted=False)
    hx, to = torch.randn(2, 4, 3, 3)

    def run(data: Tensor, flags: Tensor, *order: Tensor) -> list[Tensor]:
        y, h = layer(PackedSequence(data, *order), hx, reset=PackedSequence(flags, *order), reset_to=to)
        return [y.data, h]

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(packed.data, reset.data, *packed[1:]), run(packed.data, reset.data, *packed[1:]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_each_compiled_call_draws_anew_and_backward_knows(backend: str) -> None:
    """Inductor has draws of its own.  The layer is linear in x, so a difference is what the gradient says it is."""
    torch._dynamo.reset()
    layer = whorl.RNN(2, 3, activation="linear", recurrent_dropout=0.5, zoneout=0.3, dtype=torch.float64)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = torch.randn(4, 3, 2, dtype=torch.float64)
    assert not torch.equal(compiled(x)[0], compiled(x)[0])

    def loss(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return weighted([compiled(x)[0]])

    leaf, step = x.clone().requires_grad_(), torch.randn_like(x)
    loss(leaf).backward()
    assert error((loss(x + step) - loss(x)).detach(), (leaf.grad * step).sum()) <= EXACT


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_export_with_options_and_dynamic_time_and_batch(training: bool) -> None:
    """Which a trace of torch.jit refuses."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = whorl.LSTM(2, 3, **BOTH, layer_norm=True, recurrent_dropout=0.3, weight_drop=0.2)

        def forward(self, x: Tensor, lengths: Tensor, mask: Tensor, reset: Tensor) -> Any:
            return self.layer(x, lengths=lengths, mask=mask, reset=reset, return_states=True)

    def arguments(time: int, batch: int) -> tuple[Tensor, ...]:
        flags = torch.rand(2, time, batch) > 0.4
        return torch.randn(time, batch, 2), torch.randint(0, time + 1, (batch,)), flags[0], flags[1]

    steps, rows = {0: torch.export.Dim("time", min=2), 1: torch.export.Dim("batch", min=2)}, {}
    rows[0] = steps[1]
    model = Model().train(training)
    program = torch.export.export(model, arguments(5, 3), dynamic_shapes=(steps, rows, steps, steps))
    given = arguments(7, 4)
    found = []
    for call in (program.module(), model):
        torch.manual_seed(1)
        found.append(layer_outputs(call(*given)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- torch.func and double backward -----------------------------------------------------------------------------------

DIFFERENTIATED: dict[str, tuple[str, list[str], dict[str, Any], bool]] = {
    "marks": ("LSTM", ["lengths", "mask", "reset_to", "return_states"], {"bidirectional": True}, True),
    "cell": ("LSTM", ["mask"], {"bidirectional": True, "layer_norm": True, "peephole": True, "clip": 0.7}, True),
    "draws": ("GRU", ["recurrent_dropout", "input_dropout", "zoneout", "reset"], {"reset_after": False}, True),
    "eval": ("GRU", ["zoneout", "layer_norm", "lengths"], {"bidirectional": True}, False),
    "recomputed": ("RNN", ["recurrent_dropout step", "zoneout", "mask"], {"memory": "recompute"}, True),
    "given": ("RNN", ["given recurrent_dropout", "given zoneout", "given input_dropout"], {"num_layers": 2}, True),
}
EVERY = pytest.mark.parametrize("name", DIFFERENTIATED)
Function = Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Tensor]]


def both(name: str, seed: int | None = 7) -> tuple[Case, dict[str, Tensor], Function, Function]:
    """A case, its weights, and layer and loop as functions of weights and tensors.

    Args:
        seed: what the layer's function gives torch's generator; None inside a vmap, where it cannot.
    """
    kind, rows, arguments, training = DIFFERENTIATED[name]
    case = Case(kind, rows, arguments, training=training)
    layer, marks = case.layer(), case.call_marks()
    drawn = case.drawn(marks, 7)

    def of_layer(weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        return case.outcome_of_layer(
            lambda *args, **given: functional_call(layer, weights, args, given), tensors, marks
        )

    def of_loop(weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return case.outcome_of_loop(weights, tensors, marks, drawn)

    return case, {key: weight.detach() for key, weight in layer.named_parameters()}, of_layer, of_loop


@EVERY
def test_jvp(name: str) -> None:
    case, weights, *functions = both(name)
    tangents = ({key: torch.randn_like(w) for key, w in weights.items()}, case.tensors())
    ours, theirs = (jvp(function, (weights, case.tensors()), tangents)[1] for function in functions)
    assert all(tangent.norm() > 0 for tangent in theirs.values())
    assert differences(ours, theirs) == {}


@EVERY
def test_double_backward(name: str) -> None:
    case, weights, *functions = both(name)
    found = []
    for function in functions:
        leaves = case.tensors() | {key: weight.clone() for key, weight in weights.items()}
        leaves = {key: leaf.requires_grad_() for key, leaf in leaves.items()}
        outputs = function({key: leaves[key] for key in weights}, {key: leaves[key] for key in case.tensors()})
        first = torch.autograd.grad(
            weighted([*outputs.values()]), [*leaves.values()], create_graph=True, materialize_grads=True
        )
        second = torch.autograd.grad(weighted(first), [*leaves.values()], materialize_grads=True)
        found.append(dict(zip(leaves, second, strict=True)))
    assert found[1]["x"].norm() > 0
    assert found[1]["weight_hh_l0"].norm() > 0
    assert differences(*found) == {}


@EVERY
def test_gradients_for_each_sample(name: str) -> None:
    """vmap of grad, each sample with its own tensors and the same draw."""
    case, weights, of_layer, of_loop = both(name, seed=None)
    samples = {key: torch.stack([tensor, -tensor, 0.5 * tensor]) for key, tensor in case.tensors().items()}

    def loss(function: Function) -> Callable[..., Tensor]:
        return lambda weights, tensors: weighted([*function(weights, tensors).values()])

    torch.manual_seed(7)
    ours = vmap(grad(loss(of_layer)), in_dims=(None, 0), randomness="same")(weights, samples)
    rows = [grad(loss(of_loop))(weights, {key: tensor[n] for key, tensor in samples.items()}) for n in range(3)]
    assert differences(ours, {key: torch.stack([row[key] for row in rows]) for key in weights}) == {}


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("mapped", ["mask", "reset", "lengths"])
def test_vmap_over_x_and_marks_of_its_own(mapped: str, memory: str) -> None:
    layer = whorl.LSTM(2, 3, **BOTH, memory=memory, layer_norm=True, dtype=torch.float64)
    xs = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    marks = {"lengths": torch.tensor([[4, 1], [0, 3], [2, 2]])}.get(mapped)
    marks = torch.rand(3, 4, 2) > 0.4 if marks is None else marks

    def run(x: Tensor, mark: Tensor) -> dict[str, Tensor]:
        y, (h, c), every = layer(x, **{mapped: mark}, return_states=True)
        return {"y": y, "h": h, "c": c, "every c": every["c"]}

    truth = [run(x, mark) for x, mark in zip(xs, marks, strict=True)]
    assert differences(vmap(run)(xs, marks), {key: torch.stack([row[key] for row in truth]) for key in truth[0]}) == {}
    alone = vmap(lambda mark: run(xs[0], mark)["y"])(marks)
    assert error(alone.detach(), torch.stack([run(xs[0], mark)["y"] for mark in marks]).detach()) <= EXACT


def test_vmap_says_how_draws_are_to_be_made() -> None:
    layer, xs = whorl.GRU(2, 3, zoneout=0.5), torch.randn(1, 4, 2, 2).expand(3, -1, -1, -1)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(layer)(xs)
    same, different = (vmap(layer, randomness=how)(xs)[0] for how in ("same", "different"))
    torch.testing.assert_close(same[0], same[1])
    assert not torch.allclose(different[0], different[1])


# --- autocast ---------------------------------------------------------------------------------------------------------

AUTOCAST: dict[str, dict[str, Any]] = {
    "cell": {"layer_norm": True, "peephole": True, "clip": 0.7, "proj_size": 2},
    "draws": {"recurrent_dropout": 0.4, "zoneout": 0.2, "input_dropout": 0.3, "weight_drop": 0.3},
    "recomputed": {"memory": "recompute", "zoneout": 0.3},
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_a_layer_that_was_cast_by_hand(name: str) -> None:
    """Bit for bit, masks and states uncast."""
    layer = whorl.LSTM(2, 3, **BOTH, **AUTOCAST[name])
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())
    cast = whorl.LSTM(2, 3, **BOTH, **AUTOCAST[name], dtype=torch.bfloat16)
    cast.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, 2).bfloat16()
    marks = {"lengths": [2, 4, 0], "mask": mask_of("holes", 4, 3), "reset": ~mask_of("holes", 4, 3)}
    torch.manual_seed(1)
    by_hand = layer_outputs(cast(x, **marks, return_states=True))
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer_outputs(layer(x.float(), **marks, return_states=True))
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    if name != "draws":  # weight_drop's scale is rounded before or after
        assert all(torch.equal(a, b) for a, b in zip(found, by_hand, strict=True))
    weighted(found).backward()
    assert all(weight.grad.dtype == torch.float32 and weight.grad.norm() > 0 for weight in layer.parameters())


def layer_outputs(result: tuple) -> list[Tensor]:
    y, finals, every = result
    return [*flat((y, finals)), *every.values()]


def test_states_under_autocast_keep_their_dtype() -> None:
    """A float32 state that a reset gives is not rounded on its way in: seen in a state that nothing changes."""
    layer = whorl.LSTM(2, 3)
    to = (torch.zeros(1, 2, 3), torch.full((1, 2, 3), 1 / 3))
    reset, mask = torch.ones(4, 2, dtype=torch.bool), torch.zeros(4, 2, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16):
        _, (_, c) = layer(torch.randn(4, 2, 2), reset=reset, reset_to=to, mask=mask)
        _, (_, same) = layer(torch.randn(4, 2, 2).bfloat16(), to, mask=mask)
    assert torch.equal(c, to[1].bfloat16())
    assert torch.equal(same, c)
