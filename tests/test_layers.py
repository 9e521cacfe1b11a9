"""LSTM, GRU and RNN give torch.nn's outputs, final states and gradients, whichever engine runs."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import whorl
from comparison import (
    CELLS,
    EXACT,
    PlainLoop,
    assert_agrees,
    assert_exact,
    draw,
    error,
    flat,
    make,
    results,
    twin,
    weighted,
)
from whorl.engines.native import OneDNN

LAYOUTS = ["time first", "batch first", "sorted", "unsorted", "unbatched"]
DENSE = [layout for layout in LAYOUTS if "sorted" not in layout]
SIZES = [(1, 1, 1, 1), (1, 3, 5, 7), (13, 2, 1, 1), (2, 5, 1, 13), (3, 1, 17, 2), (4, 3, 9, 33)]
"""Time, batch, inputs, units."""
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16 for oneDNN"
    ),
)
EXACT_AND_FAST = [("reference", torch.float64), ("onednn", torch.float32)]


@pytest.mark.parametrize("engine", ["reference", "auto"])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch(
    cell: str, layers: int, bidirectional: bool, bias: bool, layout: str, initial: bool, engine: str
) -> None:
    options = dict(num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=layout == "batch first")
    layer = make(whorl, cell, 5, 11, **options, dtype=torch.float64, engine=engine)
    assert_agrees(layer, *draw(cell, layout, 7, 3, 5, initial, layer))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch_at_any_size(cell: str, sizes: tuple[int, int, int, int], layout: str) -> None:
    time, batch, inputs, units = sizes
    options = dict(num_layers=2, bidirectional=True, batch_first=layout == "batch first", dtype=torch.float64)
    layer = make(whorl, cell, inputs, units, **options)
    assert_agrees(layer, *draw(cell, layout, time, batch, inputs, True, layer))


@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("layout", ["time first", "batch first"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch_with_no_sequences(cell: str, dtype: torch.dtype, layout: str, initial: bool) -> None:
    """Batch 0: nothing to compute, and every gradient of a weight is zero, not missing."""
    layer = make(whorl, cell, 5, 7, 2, bidirectional=True, batch_first=layout == "batch first", dtype=dtype)
    x, hx = draw(cell, layout, 4, 0, 5, initial, layer)
    truth = results(twin(layer), x, hx)
    assert_exact(results(layer, x, hx), {name: tensor.double() for name, tensor in truth.items()})


@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("projection", [1, 3, 10])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_projection_equals_torch(
    layers: int, bidirectional: bool, projection: int, bias: bool, layout: str, initial: bool
) -> None:
    options = dict(num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=layout == "batch first")
    layer = whorl.LSTM(5, 11, proj_size=projection, dtype=torch.float64, **options)
    assert_agrees(layer, *draw("LSTM", layout, 7, 3, 5, initial, layer))


@pytest.mark.parametrize("cell", CELLS)
def test_the_baseline_of_the_error_rule_is_torch_in_float64(cell: str) -> None:
    layer = make(torch.nn, cell, 5, 11, 2, bidirectional=True, dtype=torch.float64, dropout=0.4)
    x, hx = draw(cell, "time first", 7, 3, 5, True, layer)
    assert_exact(results(PlainLoop(layer), x, hx), results(layer, x, hx))


@pytest.mark.parametrize("recorded", [True, False], ids=["autograd's backward", "whorl's backward"])
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_onednn_follows_the_error_rule(
    dtype: torch.dtype,
    layers: int,
    bidirectional: bool,
    bias: bool,
    layout: str,
    initial: bool,
    recorded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneDNN, "recorded", recorded)
    options = dict(num_layers=layers, bidirectional=bidirectional, bias=bias, batch_first=layout == "batch first")
    layer = whorl.LSTM(5, 11, **options, dtype=dtype, engine="onednn")
    assert_agrees(layer, *draw("LSTM", layout, 7, 3, 5, initial, layer))


@pytest.mark.parametrize("sizes", [*SIZES, (100, 2, 17, 129)], ids=str)
def test_onednn_follows_the_error_rule_at_any_size(sizes: tuple[int, int, int, int]) -> None:
    time, batch, inputs, units = sizes
    layer = whorl.LSTM(inputs, units, 2, bidirectional=True, engine="onednn")
    assert_agrees(layer, *draw("LSTM", "time first", time, batch, inputs, True, layer))


@pytest.mark.parametrize("sizes", [*SIZES, (100, 2, 17, 129)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_onednn_gives_torchs_numbers_to_the_bit(dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> None:
    """Also where oneDNN's bfloat16 leaves the error rule, as it does on some processors for a single unit."""
    time, batch, inputs, units = sizes
    layer = whorl.LSTM(inputs, units, 2, bidirectional=True, dtype=dtype, engine="onednn")
    x, hx = draw("LSTM", "time first", time, batch, inputs, True, layer)
    got, torchs = results(layer, x, hx), results(twin(layer), x, hx)
    assert got.keys() == torchs.keys()
    assert [name for name in got if not torch.equal(got[name], torchs[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cell", CELLS)
def test_the_reference_follows_the_error_rule(cell: str, dtype: torch.dtype) -> None:
    layer = make(whorl, cell, 17, 33, 2, bidirectional=True, dtype=dtype, engine="reference")
    assert_agrees(layer, *draw(cell, "time first", 30, 5, 17, True, layer))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"num_layers": 3}, {"dropout": 1.0}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_dropout_drops_what_torch_drops(cell: str, options: dict, layout: str) -> None:
    """`results` seeds each call alike: the numbers drawn, their order and their use are torch's own on a CPU."""
    arguments = {"num_layers": 2, "dropout": 0.4, "batch_first": layout == "batch first"} | options
    layer = make(whorl, cell, 5, 11, **arguments, dtype=torch.float64)
    x, hx = draw(cell, layout, 7, 3, 5, True, layer)
    assert_agrees(layer, x, hx)
    dropped = results(layer, x, hx)
    assert error(dropped["output 0"], results(layer.eval(), x, hx)["output 0"]) > 0.01
    assert_agrees(layer, x, hx)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_dropout_through_onednn(dtype: torch.dtype) -> None:
    layer = whorl.LSTM(5, 11, 3, bidirectional=True, dropout=0.4, dtype=dtype, engine="onednn")
    assert_agrees(layer, *draw("LSTM", "time first", 7, 3, 5, True, layer))


def test_dropout_follows_the_generator() -> None:
    layer, x = whorl.LSTM(5, 11, 2, dropout=0.4), torch.randn(7, 3, 5)
    begin = torch.get_rng_state()
    first, second = layer(x)[0], layer(x)[0]
    torch.set_rng_state(begin)
    assert torch.equal(layer(x)[0], first)
    assert error(second, first.double()) > 0.01


LOSSES = {
    "sum of y (strides 0)": lambda outputs: outputs[0].sum(),
    "h_n alone": lambda outputs: weighted(outputs[1:2]),
    "c_n alone": lambda outputs: weighted(outputs[2:]),
    "one step": lambda outputs: weighted([outputs[0][-2]]),
    "one sequence": lambda outputs: weighted([out[:, 1] for out in outputs]),
    "y transposed": lambda outputs: weighted([outputs[0].permute(2, 0, 1)]),
    "y twice": lambda outputs: weighted([outputs[0], outputs[0] * outputs[0]]),
}


@pytest.mark.parametrize("bidirectional", [False, True], ids=["forward", "both"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("engine, dtype", EXACT_AND_FAST)
def test_gradients_of_a_part(engine: str, dtype: torch.dtype, loss: str, bidirectional: bool) -> None:
    layer = whorl.LSTM(5, 11, 2, bidirectional=bidirectional, dtype=dtype, engine=engine)
    assert_agrees(layer, *draw("LSTM", "time first", 7, 3, 5, True, layer), loss=LOSSES[loss])


@pytest.mark.parametrize("engine, dtype", EXACT_AND_FAST)
def test_gradients_of_what_is_not_frozen(engine: str, dtype: torch.dtype) -> None:
    """Each parameter frozen alone, each trained alone, all frozen; with x a constant and not."""
    layer = whorl.LSTM(5, 7, 2, bidirectional=True, dtype=dtype, engine=engine)
    x, hx = draw("LSTM", "time first", 4, 3, 5, True, layer)
    names = [name for name, _ in layer.named_parameters()]
    for trained in [*({name} for name in names), *(set(names) - {name} for name in names), set()]:
        for name, weight in layer.named_parameters():
            weight.requires_grad_(name in trained)
        for of_x in (True, False):
            assert_agrees(layer, x, hx, of_x=of_x)


@pytest.mark.parametrize("engine, dtype", EXACT_AND_FAST)
@pytest.mark.parametrize("strided", ["transposed", "every other", "expanded"])
def test_x_and_states_of_any_strides(strided: str, engine: str, dtype: torch.dtype) -> None:
    layer = whorl.LSTM(5, 7, 2, dtype=dtype, engine=engine)

    def given(*shape: int) -> Tensor:
        if strided == "transposed":
            return torch.randn(*shape[::-1], dtype=dtype).permute(2, 1, 0)
        if strided == "every other":
            return torch.randn(*(2 * n for n in shape), dtype=dtype)[::2, ::2, ::2]
        return torch.randn(shape[0], 1, shape[2], dtype=dtype).expand(shape)

    x, h, c = given(6, 3, 5), given(2, 3, 7), given(2, 3, 7)
    assert not any(tensor.is_contiguous() for tensor in (x, h, c))
    found = []
    for way in (torch.Tensor.contiguous, torch.Tensor.detach):
        leaves = [way(tensor).detach().requires_grad_() for tensor in (x, h, c)]
        outputs = flat(layer(leaves[0], tuple(leaves[1:])))
        found.append([*outputs, *torch.autograd.grad(weighted(outputs), leaves)])
    bound = EXACT if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
    assert all(error(strange, plain.double()) <= bound for plain, strange in zip(*found, strict=True))


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_numbers_that_are_not_in_memory(engine: str) -> None:
    """Torch negates some by a mark alone, and gives no memory to zeros that it makes for derivatives."""
    layer = whorl.GRU(5, 7, 2, dtype=torch.float64, engine=engine)
    shapes = (6, 3, 5), (2, 3, 7), (6, 3, 7)
    as_it_is: list[Tensor] = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    negated = [torch._neg_view(-tensor) for tensor in as_it_is]
    zeros = [torch._efficientzerotensor(shape, dtype=torch.float64) for shape in shapes]
    for odd, same in ((negated, as_it_is), (zeros, [torch.zeros(shape, dtype=torch.float64) for shape in shapes])):
        found = []
        for x, hx, grad in (odd, same):
            (after,) = torch.func.vjp(lambda x, hx=hx: layer(x, hx)[0], x)[1](grad)
            y, final = layer(x.requires_grad_(), hx)
            slopes = torch.autograd.grad((y, final), [x, *layer.parameters()], (grad, hx), retain_graph=True)
            (again,) = torch.autograd.grad(y, x, grad, create_graph=True)
            stepper = layer.stepper(3)
            found.append([y, final, *slopes, again, after, stepper(x[0]), stepper.state])
        assert all(error(one, other) <= EXACT for one, other in zip(*found, strict=True) if other.any())


def _gradients(layer: torch.nn.Module, loss: Tensor, keep: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(layer.parameters()), retain_graph=keep))


def _equal(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("engine, dtype", EXACT_AND_FAST)
def test_backward_runs_twice_and_in_any_order(engine: str, dtype: torch.dtype) -> None:
    layer = whorl.LSTM(5, 7, 2, bidirectional=True, dropout=0.3, dtype=dtype, engine=engine)
    first, second = torch.randn(6, 3, 5, dtype=dtype), torch.randn(4, 2, 5, dtype=dtype)
    begin = torch.get_rng_state()
    alone = [_gradients(layer, weighted(flat(layer(x)))) for x in (first, second)]
    torch.set_rng_state(begin)
    losses = [weighted(flat(layer(x))) for x in (first, second)]
    assert _equal(_gradients(layer, losses[1], keep=True), alone[1])
    assert _equal(_gradients(layer, losses[0]), alone[0])
    assert _equal(_gradients(layer, losses[1]), alone[1])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        _gradients(layer, losses[0])


@pytest.mark.parametrize("changed", ["x", "y", "h", "c", "h0", "c0", "weight"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}, {"dtype": torch.float64}], ids=str)
def test_changes_in_place_before_backward_do_what_they_do_in_torch(options: dict, changed: str) -> None:
    """The gradient is right, or autograd refuses; a user who resets h_n in place may go on doing so."""
    ours = whorl.LSTM(5, 7, **options)
    dtype = ours.weight_ih_l0.dtype
    x, hx = draw("LSTM", "time first", 6, 3, 5, True, ours)

    def gradients(layer: torch.nn.Module) -> list[Tensor] | None:
        given = {"x": x.to(dtype).requires_grad_() * 1}
        given |= {name: state.to(dtype).requires_grad_() * 1 for name, state in zip(("h0", "c0"), hx, strict=True)}
        y, (h, c) = layer(given["x"], (given["h0"], given["c0"]))
        with torch.no_grad() if changed == "weight" else torch.enable_grad():
            (given | {"y": y, "h": h, "c": c, "weight": layer.weight_hh_l0})[changed].mul_(2)
        try:
            return _gradients(layer, weighted([y, h, c]))
        except RuntimeError as refused:
            if "inplace" not in str(refused):
                raise
            return None

    theirs, found = gradients(twin(ours)), gradients(ours)
    if found is None:
        # torch's two directions are joined by a copy, so there even y may change; whorl refuses, as for one.
        assert theirs is None or changed == "y", "torch takes this gradient"
    elif theirs is None:
        assert dtype == torch.float64, "the gradient would be of other numbers than went in"
    else:
        bound = EXACT if dtype == torch.float64 else 4 * torch.finfo(dtype).eps
        assert all(error(a, b.double()) <= bound for a, b in zip(found, theirs, strict=True))


class Traffic(TorchDispatchMode):
    """Counts the elements that every operation of torch reads and writes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            tensors = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.elements += sum(tensor.numel() for tensor in tensors if isinstance(tensor, Tensor))
        return result


def _packed_traffic(layer: torch.nn.Module, time: int) -> tuple[int, int]:
    lengths = [time, time // 2, time // 4, 1]
    x = pack_padded_sequence(torch.randn(time, 4, 8), lengths)
    data = x.data.requires_grad_()
    with Traffic() as forward:
        loss = layer(PackedSequence(data, *x[1:]))[0].data.square().sum()
    with Traffic() as backward:
        loss.backward()
    return forward.elements, backward.elements


@pytest.mark.parametrize("cell", CELLS)
def test_a_packed_sequence_costs_time_linear_in_its_length(cell: str) -> None:
    layer = make(whorl, cell, 8, 8, bidirectional=True)
    short, long = _packed_traffic(layer, 64), _packed_traffic(layer, 128)
    ratios = [b / a for a, b in zip(short, long, strict=True)]
    assert max(ratios) < 2.2, f"forward and backward move {ratios} times as much for twice the steps"


@pytest.mark.parametrize("engine", ["reference", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("cell", CELLS)
def test_gradients_add_up_over_two_backwards(cell: str, dtype: torch.dtype, engine: str) -> None:
    """autograd keeps what it is given as .grad and adds into it: no two gradients may share their memory."""
    layer, once = make(whorl, cell, 5, 7, 2, dtype=dtype, engine=engine), []
    for part in torch.randn(2, 4, 3, 5, dtype=dtype):
        once.append(torch.autograd.grad(layer(part)[0].square().sum(), [*layer.parameters()]))
        layer(part)[0].square().sum().backward()
    for weight, first, second in zip(layer.parameters(), *once, strict=True):
        assert torch.equal(weight.grad, first + second)
