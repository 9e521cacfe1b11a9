"""Calls that go straight into C++ give what the way of all calls gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from comparison import error, flat, weighted
from engine_cases import CELLS, FORMS, WRAPPED, Case, in_dtype, results
from test_cpu_engine import DTYPES, spread_alone, sweeps
from thinned import thinned
from whorl import compiler
from whorl.engines.cpu import plain
from whorl.engines.cpu.masks import NONE
from whorl.functional import planned, recurrent
from whorl.problem import PLAIN, Call
from whorl.weights import kinds

pytestmark = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")


PLAIN_OPTIONS: dict[str, dict[str, Any]] = {
    "dropout by gate": {"recurrent_dropout": 0.4},
    "shared dropout": {"recurrent_dropout": 0.4, "recurrent_dropout_mode": "shared"},
    "dropout by step": {"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step"},
    "zoneout": {"zoneout": 0.3, "recurrent_dropout": 0.4},
    "zoneout in eval": {"zoneout": 0.3},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("kind, time, batch, inputs, units", [
    ("LSTM", 1, 1, 1, 1), ("LSTM", 5, 7, 64, 33), ("GRU", 4, 1, 3, 65), ("RNN", 6, 2, 17, 16), ("GRU", 1, 3, 5, 7),
    ("LSTM with layer_norm", 5, 7, 64, 33), ("GRU with layer_norm", 2, 70, 3, 5), ("LSTM with layer_norm", 3, 1, 2, 65),
    ("LSTM with peephole", 4, 37, 3, 17), ("LSTM with dropout by gate", 5, 7, 6, 33),
    ("RNN with dropout by gate", 1, 3, 5, 7), ("GRU with dropout by gate", 3, 2, 4, 17),
    ("LSTM with shared dropout", 5, 7, 6, 33), ("GRU with shared dropout", 1, 3, 5, 7),
    ("LSTM with dropout by step", 5, 7, 6, 33), ("GRU with dropout by step", 1, 3, 5, 7),
    ("LSTM with zoneout", 5, 7, 6, 33), ("GRU with zoneout in eval", 4, 2, 5, 17),
    # rows of a block that all come before those that entered; more panels than one pass takes, of two operands
    ("LSTM", 2, 301, 3, 5), ("GRU with shared dropout", 3, 257, 2, 5), ("LSTM", 3, 5, 520, 65),
])  # fmt: skip
def test_a_plain_call_gives_what_the_way_of_all_calls_gives(
    kind: str, time: int, batch: int, inputs: int, units: int, initial: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    kind, _, option = kind.partition(" with ")
    options = {"engine": "cpu", "dtype": dtype, "bidirectional": True, "bias": batch != 7}
    options |= PLAIN_OPTIONS.get(option, {option: True} if option else {})
    layer = getattr(whorl, kind)(inputs, units, 2, **options)
    layer.train("eval" not in option)
    x = torch.randn(time, batch, inputs, dtype=dtype, requires_grad=True)
    states = [torch.randn(4, batch, units, dtype=dtype, requires_grad=True) for _ in range(1 + (kind == "LSTM"))]
    hx = (states[0] if len(states) == 1 else tuple(states)) if initial else None

    def everything() -> list[Tensor]:
        torch.manual_seed(5)
        y, finals = layer(x, hx)
        ends = [finals] if isinstance(finals, Tensor) else [*finals]
        wanted = [x, *layer.parameters(), *(states if initial else [])]
        generator = torch.Generator().manual_seed(3)
        weighed = [(end.double() * torch.rand(end.shape, generator=generator)).sum() for end in (y, *ends)]
        return [y, *ends, *torch.autograd.grad(sum(weighed), wanted)]

    found = everything()
    assert plain.sizes(layer.plan(x, hx).problem, torch.get_num_threads(), NONE) is not None
    monkeypatch.setattr(plain, "sizes", lambda *_: None)
    bound = 1e-13 if dtype == torch.float64 else 2**-7
    for one, other in zip(found, everything(), strict=True):
        assert (one - other).double().norm() <= bound * other.double().norm()


MASKED: dict[str, Case] = {
    "a mask": Case({"layers": 2, "directions": 2}, marks=("mask",)),
    "a mask, no states": Case({"directions": 2, "bias": False}, marks=("mask",), initial=False),
    "a mask of a panel and one": Case({"directions": 2}, 4, 37, 65, 65, marks=("mask",)),
    "a mask of one": Case({}, 1, 1, 1, 1, marks=("mask",), seed=1),
    "given": Case({"layers": 2, "directions": 2}, given=("recurrent",)),
    "given, and a mask": Case({"layers": 2, "directions": 2}, given=("recurrent",), marks=("mask",)),
    "given, of a panel and one": Case({"directions": 2}, 4, 37, 65, 65, given=("recurrent",), marks=("mask",)),
    "given to all gates": Case({"recurrent_dropout_mode": "shared", "directions": 2}, given=("recurrent",)),
    "given to all gates, and a mask": Case(
        {"recurrent_dropout_mode": "shared", "directions": 2, "layers": 2}, given=("recurrent",), marks=("mask",)
    ),
    "drawn, and a mask": Case({"recurrent_dropout": 0.4, "zoneout": (0.3, 0.2)}, marks=("mask",)),
    "drawn by step, and a mask": Case(
        {"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step", "directions": 2}, marks=("mask",)
    ),
}


@pytest.mark.parametrize(
    "which, dtype",
    [
        *(("some", dtype) for dtype in DTYPES),
        *((which, torch.float64) for which in ("all", "none", "not first or last")),
    ],
)
@pytest.mark.parametrize("cell", ["lstm", "gru", "layer norm"])
@pytest.mark.parametrize("name", MASKED)
def test_masks_give_what_they_give_in_the_way_of_all_calls(
    name: str, cell: str, dtype: torch.dtype, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, case = (CELLS | WRAPPED)[cell], MASKED[name]
    zoneout = case.form.get("zoneout", ())[: len(graph.states)]
    form, call = replace(case, form=case.form | {"zoneout": zoneout}).build(graph)
    call = in_dtype(call, dtype)
    if call.marks.mask is not None:
        mask = by_sequence(call.marks.mask[..., None])[..., 0]  # as Keras' lie
        for step in {"some": [], "not first or last": [0, -1]}.get(which, range(len(mask))):
            mask[step] = which == "all"
        call = call._replace(marks=call.marks._replace(mask=mask), x=call.x.nan_to_num())
    constant = len(call.tensors) - len(call.noise)

    def everything(gradient: bool) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_(gradient and i < constant) for i, tensor in enumerate(call.tensors)]
        outputs = recurrent(form.to_json(), Call.of(leaves, call.layout, call.marks), "cpu")
        made = torch.autograd.grad(weighted(outputs), leaves[:constant]) if gradient else ()
        return [*outputs, *made]

    problem = planned(form.to_json(), call, "cpu").problem
    assert plain.sizes_of(problem, call) is not None
    found = [*everything(False), *everything(True)]
    monkeypatch.setattr(plain, "sizes", lambda *_: None)
    bound = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    for one, other in zip(found, [*everything(False), *everything(True)], strict=True):
        assert (one - other).double().norm() <= bound * other.double().norm()


LENGTHS: dict[str, Any] = {
    "": None,
    "lengths": lambda time, batch: torch.arange(batch) * 3 % (time + 1),
    "full lengths": lambda time, batch: torch.full((batch,), time),
    "empty sequences": lambda time, batch: torch.zeros(batch, dtype=torch.int64),
    "a long one": lambda time, batch: torch.arange(batch) // (batch - 1) * time,
    "beyond time, apart": lambda time, batch: (torch.arange(2 * batch) % (2 * time))[::2],
}
LENGTHENED: dict[str, Case] = {
    "one": Case(initial=False),
    "layers": Case({"layers": 2, "directions": 2}),
    "a panel and one": Case({"directions": 2, "bias": False}, 16, 37, 65, 65),
    "drawn by step": Case({"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step", "directions": 2}),
    "drawn by gate": Case({"recurrent_dropout": 0.4, "layers": 2}),
}


@pytest.mark.parametrize(
    "cell, masked, reset, lengths, dtype",
    thinned(
        2, ["lstm", "gru", "layer norm", "spread alone"], [False, True], ["", "reset", "reset_to"], LENGTHS, DTYPES
    ),
)
def test_lengths_and_resets_give_to_the_bit_what_they_give_in_the_way_of_all_calls(
    cell: str, masked: bool, reset: str, lengths: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for gradients summed in another order: of vectors, of all weights where a batch has shares, and of the
    recurrent ones where every step counts.
    """
    graph = (CELLS | WRAPPED | {"spread alone": spread_alone.graph})[cell]
    for case in LENGTHENED.values():
        form, call = replace(case, marks=("mask",) * masked + (reset,) * bool(reset)).build(graph)
        call, (time, batch) = in_dtype(call, dtype), call.x.shape[:2]
        steps = None if lengths == "" else LENGTHS[lengths](time, batch)
        mask, cut = (None if one is None else by_sequence(one[..., None])[..., 0] for one in call.marks[3:5])
        counts = torch.ones(time, batch, dtype=torch.bool) if mask is None else mask
        counts = counts if steps is None else counts & (torch.arange(time)[:, None] < steps)
        x = torch.where(counts[..., None], call.x.nan_to_num(), torch.nan)
        call = call._replace(x=x, marks=call.marks._replace(lengths=steps, mask=mask, reset=cut))
        assert plain.sizes_of(planned(form.to_json(), call, "cpu").problem, call) is not None
        found = results(form, call, "cpu", False)
        with torch.no_grad():
            inferred = recurrent(form.to_json(), call, "cpu")
        with monkeypatch.context() as changed:
            changed.setattr(plain, "sizes", lambda *_: None)
            others = results(form, call, "cpu", False)
        parts = [kind for _ in range(form.layers * form.directions) for kind in kinds(form)]
        summed = {f"weights {index}" for index, kind in enumerate(parts) if "vector" in kind}
        if batch >= 8 and time * batch >= 240:  # shares of the sequences have sums of their own
            summed |= {f"weights {index}" for index in range(len(parts))}
        if counts.all() and not reset:  # the other way has them from outputs, and from initial states apart
            summed |= {f"weights {index}" for index, kind in enumerate(parts) if kind in ("weight_hh", "bias_hh")}
        bound = 4 * torch.finfo(dtype).eps
        for name, other in others.items():
            one = found[name]
            assert torch.equal(one, other) or (name in summed and error(one, other) <= bound), name
        for index, one in enumerate(inferred):
            assert torch.equal(one, others[f"output {index}"])


@pytest.mark.parametrize("lengths", [name for name in LENGTHS if name])
@pytest.mark.parametrize("cell", ["lstm", "layer norm"])
def test_threads_that_are_dealt_sequences_change_no_bit(cell: str, lengths: str) -> None:
    """A mask leaves some sequences so many steps more than others that threads do not take them as they lie."""
    form, call = LENGTHENED["a panel and one"].build((CELLS | WRAPPED)[cell])
    mask = torch.arange(len(call.x))[:, None] < LENGTHS[lengths](*call.x.shape[:2])
    call, found, before = call._replace(marks=call.marks._replace(mask=mask)), [], torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            found.append(results(form, call, "cpu", False))
        finally:
            torch.set_num_threads(before)
    for name, one in found[0].items():
        assert all(torch.equal(one, other[name]) for other in found[1:]), name


def test_lengths_may_be_written_over_before_backward() -> None:
    layer, x, lengths = whorl.LSTM(3, 5, engine="cpu"), torch.randn(7, 4, 3), torch.tensor([3, 7, 0, 1])
    wanted = sweeps(layer, x, lengths=lengths.tolist())
    leaf = x.detach().requires_grad_()
    outputs = flat(layer(leaf, lengths=lengths))
    lengths.fill_(7)
    weighted(outputs).backward()
    assert torch.equal(leaf.grad, wanted[3])


@pytest.mark.parametrize("cell", ["lstm", "gru", "layer norm"])
@pytest.mark.parametrize("name", MASKED)
def test_outputs_that_nobody_wants_are_left_out_and_the_rest_is_the_same(name: str, cell: str) -> None:
    graph, case = (CELLS | WRAPPED)[cell], MASKED[name]
    zoneout = case.form.get("zoneout", ())[: len(graph.states)]
    form, call = replace(case, form=case.form | {"zoneout": zoneout}).build(graph)
    whole, ends = (recurrent(form.to_json(), call, "cpu", outputs=wanted) for wanted in (True, False))
    assert len(whole[0]) == len(call.x)
    assert len(ends[0]) == 0
    for one, other in zip(ends[1:], whole[1:], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_outputs_that_nobody_wants_stay_for_who_differentiates(memory: str) -> None:
    form, call = Case({"layers": 2, "memory": memory}).build(CELLS["lstm"])
    leaves = [tensor.detach().requires_grad_() for tensor in call.tensors]
    call = Call.of(leaves, call.layout, call.marks)
    grads = [
        torch.autograd.grad(weighted(recurrent(form.to_json(), call, "cpu", outputs=wanted)[1:]), leaves)
        for wanted in (True, False)
    ]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(call.x, torch.ones_like(call.x))
        tangents = [
            [
                torch.autograd.forward_ad.unpack_dual(end).tangent
                for end in recurrent(form.to_json(), made, "cpu", outputs=wanted)
            ]
            for made in [call._replace(x=x)]
            for wanted in (True, False)
        ]
    for one, other in zip(*tangents, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name, problem", [
    ("given", {}), ("given", {"gradient": True}), ("given, and a mask", {"gradient": True, "constants": ("x",)}),
])  # fmt: skip
def test_masks_of_dropout_with_a_gradient_go_the_way_of_all_calls(name: str, problem: dict[str, Any]) -> None:
    form, call = MASKED[name].build(CELLS["lstm"])
    made = replace(planned(form.to_json(), call, "cpu").problem, **problem)
    assert (plain.sizes_of(made, call) is None) == made.gradient
    assert plain.sizes_of(replace(made, constants=("noise",)), call) is not None


def by_sequence(tensor: Tensor) -> Tensor:
    """The same, as it lies in memory with batch_first."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("marked", [False, True], ids=["", "mask"])
@pytest.mark.parametrize("kind, time, batch, inputs, units", [
    ("LSTM", 1, 1, 1, 1), ("LSTM", 5, 7, 64, 33), ("LSTM", 3, 8, 6, 48), ("GRU", 4, 2, 4, 65), ("GRU", 6, 1, 5, 7),
])  # fmt: skip
def test_how_weights_and_x_lie_changes_no_bit(
    kind: str, time: int, batch: int, inputs: int, units: int, marked: bool, dtype: torch.dtype
) -> None:
    layer = getattr(whorl, kind)(inputs, units, 2, bidirectional=True, engine="cpu", dtype=dtype)
    x = torch.randn(time, batch, inputs, dtype=dtype)
    marks = PLAIN._replace(mask=torch.rand(time, batch) < 0.8) if marked else PLAIN

    def everything(x: Tensor, dy: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
        row = [one.detach().requires_grad_(dy is not None) for one in (x, *weights)]
        y, *ends = recurrent(layer._form, Call(row[0], (), tuple(row[1:]), marks=marks), "cpu")
        return [y, *ends, *(torch.autograd.grad(y, row, dy) if dy is not None else [])]

    weights = list(layer.parameters())
    others = [weight.detach().t().contiguous().t() if weight.dim() == 2 else weight for weight in weights]
    assert (inputs == 1) == others[0].is_contiguous()
    dy = torch.randn(time, batch, 2 * units, dtype=dtype)
    same = dy[:1].expand(dy.shape)
    for grad, as_it_lies in ((None, None), (dy, by_sequence(dy)), (same.contiguous(), same)):
        found = everything(x, grad, weights)
        for one, other in zip(found, everything(by_sequence(x), as_it_lies, others), strict=True):
            assert torch.equal(one, other)
    once = x[:1].expand(x.shape)  # a step that lies where the one before does
    for one, other in zip(everything(once.contiguous(), dy, weights), everything(once, dy, weights), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_features_that_lie_apart_change_no_bit(cell: str, name: str) -> None:
    form, call = FORMS[name].build(CELLS[cell])
    apart = torch.stack([call.x, torch.zeros_like(call.x)], -1)[..., 0]
    assert apart.stride(-1) == 2
    found, same = (results(form, call._replace(x=x), "cpu", False) for x in (call.x, apart))
    assert all(torch.equal(same[key], tensor) for key, tensor in found.items())
