"""Every option of layers and calls, alone and in pairs, against `loops.Loop` in float64: outputs and all gradients.

What is drawn at random is drawn a second time by `draws`, so a test with dropout compares numbers too.
"""

import re
from collections.abc import Callable
from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import whorl
from comparison import EXACT, error, twin
from loops import Loop, Row
from option_cases import CALL, LAYER, LAYOUTS, ONLY, Case, mask_of, names
from whorl import exp, relu, sigmoid, tanh
from whorl.arguments import MEANINGS
from whorl.options import Options

KINDS = ("LSTM", "GRU", "RNN")
BOTH = {"num_layers": 2, "bidirectional": True}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "one layer": ({}, "time first"),
    "two layers, both directions, no bias, batch first": (BOTH | {"bias": False}, "batch first"),
    "both directions, unbatched": ({"bidirectional": True}, "unbatched"),
    "no bias, sorted": ({"bias": False}, "sorted"),
    "two layers, both directions, unsorted": (BOTH, "unsorted"),
    "projection, two layers, both directions": (BOTH | {"proj_size": 2}, "time first"),
    "projection, no bias, unsorted": ({"proj_size": 2, "bias": False}, "unsorted"),
}


REFUSED = {(name, layout) for name in ("lengths", "mask") for layout in ("sorted", "unsorted")}
"""Pairs that are an error by name."""


@pytest.mark.parametrize("name, layout", sorted(REFUSED))
def test_a_refused_pair(name: str, layout: str) -> None:
    marks = Case("LSTM", [name]).call_marks()
    packed = pack_padded_sequence(torch.zeros(3, 3, 2), [3, 2, 1], enforce_sorted=layout == "sorted")
    text = f"x is a PackedSequence, which has its lengths, and {name} is given too: leave one of them out."
    with pytest.raises(whorl.InputError, match=re.escape(text)):
        whorl.LSTM(2, 3)(packed, **{name: marks[name]})


def test_every_option_has_a_row() -> None:
    """A new option without a row fails here; with one it is covered by all that follows."""
    assert {name for row in LAYER.values() for name in row} == {item.name for item in fields(Options)} | {"dropout"}
    assert {"dropout_masks" if name.startswith("given ") else name for name in CALL} == {*MEANINGS}
    assert {*ONLY} < {*LAYER}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_is_torchs(kind: str, layout: str) -> None:
    """Before it judges: a plain layer, packed or not, of torch.nn."""
    case = Case(kind, arguments=BOTH, layout=layout)
    layer, tensors, marks = case.layer(), case.tensors(), case.call_marks()
    theirs = case.outcome_of_layer(twin(layer), tensors, marks)
    ours = case.outcome_of_loop(dict(layer.named_parameters()), tensors, marks, {})
    assert {name: e for name in ours if not (e := error(ours[name], theirs[name])) <= EXACT} == {}


def _alone() -> list[tuple[str, str, str]]:
    found = [(kind, name, form) for kind in KINDS for name in names(kind) for form in FORMS]
    # torch has projections for LSTM alone
    found = [row for row in found if row[0] == "LSTM" or "projection" not in row[2]]
    return [row for row in found if (row[1], FORMS[row[2]][1]) not in REFUSED]


@pytest.mark.parametrize("kind, name, form", _alone())
def test_alone(kind: str, name: str, form: str) -> None:
    arguments, layout = FORMS[form]
    if name in ("dropout", "given dropout"):
        arguments = arguments | {"num_layers": 2}
    Case(kind, [name], arguments, layout).check()


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in KINDS for name in names(kind) if name in LAYER])
def test_alone_in_eval(kind: str, name: str) -> None:
    """Nothing is drawn, and zoneout is its expectation."""
    Case(kind, [name], BOTH, training=False).check()


ARRANGED: dict[str, dict[str, Any]] = {
    "projection": {"arguments": {"proj_size": 2}},
    "no bias": {"arguments": {"bias": False}},
    "batch first": {"layout": "batch first"},
    "unsorted": {"layout": "unsorted"},
    "eval": {"training": False},
}
VARIANTS = {"zoneout of h", "layer_norm of x", "layer_norm of r", "layer_norm of c", "clip of h", "reset"}
"""Rows that a pair has in another form already."""


def _pairs() -> list[tuple[str, str]]:
    rows = [name for name in names("LSTM") if name not in VARIANTS] + [*ARRANGED]

    def apart(one: str, other: str) -> bool:
        """Not two forms of one option, and not two layouts."""
        if one in ARRANGED or other in ARRANGED:
            return {one, other} != {"batch first", "unsorted"}
        return one.removeprefix("given ").split()[0] != other.removeprefix("given ").split()[0] or (
            one.startswith("given ") != other.startswith("given ")
        )

    return [pair for pair in combinations(rows, 2) if apart(*pair) and pair not in REFUSED]


@pytest.mark.parametrize("pair", _pairs(), ids=" and ".join)
def test_every_pair(pair: tuple[str, str]) -> None:
    case: dict[str, Any] = {}
    arguments = dict(BOTH)
    for name in pair:
        row = ARRANGED.get(name, {})
        arguments |= row.get("arguments", {})
        case |= row
    Case("LSTM", [name for name in pair if name not in ARRANGED], **case | {"arguments": arguments}).check()


# --- sizes, and what is left out --------------------------------------------------------------------------------------

RICH = ["recurrent_dropout", "input_dropout", "zoneout", "layer_norm", "mask", "reset_to", "return_states"]
SIZES = [(1, 1, 1, 1), (1, 3, 2, 5), (6, 1, 1, 4), (5, 4, 5, 1)]
"""Time, batch, inputs, units."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_any_size(kind: str, sizes: tuple[int, int, int, int]) -> None:
    time, batch, inputs, units = sizes
    marks = {"reset": mask_of("holes", time, batch)} if time == 1 else {}
    rows = [name for name in RICH if units > 1 or name != "layer_norm"]  # one unit's norm is zero and rounding
    Case(kind, rows, BOTH, time=time, batch=batch, inputs=inputs, units=units, marks=marks).check(zeros=True)


@pytest.mark.parametrize("kind, name", [(kind, name) for kind in KINDS for name in names(kind)])
def test_no_sequences(kind: str, name: str) -> None:
    """Batch 0: every gradient of a weight is zero, not missing."""
    got = Case(kind, [name], BOTH, "batch first", batch=0).of_layer()
    assert got["output"].shape == (3, 0, 6)
    assert not any(tensor.any() for tensor in got.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_without_initial_states_they_are_zero(kind: str, layout: str) -> None:
    rows = ["reset_to", "zoneout", "recurrent_dropout", "return_states"]
    for more in ([], ["lengths", "mask"]) if "sorted" not in layout else ([],):
        case = Case(kind, rows + more, BOTH, layout)
        layer, tensors, marks = case.layer(), case.tensors(), case.call_marks()
        zeros = {name: tensor * 0 if name.startswith("hx") else tensor for name, tensor in tensors.items()}
        none = {name: tensor for name, tensor in tensors.items() if not name.startswith("hx")}
        found = []
        for given in (zeros, none):
            torch.manual_seed(1)
            found.append(case.outcome_of_layer(layer, given, marks))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_lengths_of_any_kind() -> None:
    layer, x = whorl.GRU(2, 3), torch.randn(4, 3, 2)
    truth = layer(x, lengths=[2, 0, 4])[0]
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    for lengths in ((2, 0, 4), *(torch.tensor([2, 0, 4], dtype=kind) for kind in kinds)):
        assert torch.equal(layer(x, lengths=lengths)[0], truth)
    truth = layer(x[:, 0], lengths=2)[0]
    for lengths in ([2], (2,), torch.tensor(2), torch.tensor([2])):
        assert torch.equal(layer(x[:, 0], lengths=lengths)[0], truth)
    assert not truth[2:].any()


# --- a cell of a user's -----------------------------------------------------------------------------------------------


@whorl.cell(gates="i j f o m l k", states="h c n", vectors={"w": 0.5, "u": 1.0}, inputs="d q", x_only="k")
def wide(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    """Six recurrent gates, one of them of something else than h, and two extra inputs."""
    c = sigmoid(x.f + r.f + x.q) * exp(-relu(x.d)) * s.c + sigmoid(x.i + r.i) * tanh(x.j + r.j)
    n = v.w * s.n + tanh(x.k + x.l + r.l(v.u * c))
    return dict(h=sigmoid(x.o + r.o) * tanh(c + n) + tanh(x.m + r.m), c=c, n=n)


def _wide(loop: Loop, x: Row, r: Any, s: Row, v: Row, e: Row, hold: Callable) -> Row:
    kept = torch.sigmoid(x["f"] + r["f"] + e["q"]) * torch.exp(-torch.relu(e["d"])) * s["c"]
    c = hold("c", kept + torch.sigmoid(x["i"] + r["i"]) * torch.tanh(x["j"] + r["j"]))
    n = hold("n", v["w"] * s["n"] + torch.tanh(x["k"] + x["l"] + r("l", v["u"] * c)))
    h = torch.sigmoid(x["o"] + r["o"]) * torch.tanh(c + n) + torch.tanh(x["m"] + r["m"])
    return {"h": hold("h", h), "c": c, "n": n}


WIDE = (wide, {"step": _wide, "gates": "i j f o m l k", "states": "h c n", "x_only": "k", "apart": "l"})


OF_WIDE = [name for name in (*LAYER, *CALL) if name not in ONLY and name != "activation"]


@pytest.mark.parametrize("name", OF_WIDE)
def test_alone_on_a_cell_of_a_users(name: str) -> None:
    rows, two = [name, "inputs"], {"num_layers": 2}
    Case("Recurrent", rows, two | {"bidirectional": "dropout" in name}, cell=WIDE).check()
    if (name, "unsorted") not in REFUSED:
        Case(
            "Recurrent",
            rows,
            {"bidirectional": True, "bias": False} | (two if "dropout" in name else {}),
            "unsorted",
            cell=WIDE,
        ).check()


# --- each has an effect -----------------------------------------------------------------------------------------------


def _effects() -> list[tuple[str, str]]:
    quiet = {"memory": "changes what is saved, not a number: below", "return_states": "gives more, not other numbers"}
    return [(kind, name) for kind in KINDS for name in names(kind) if name not in quiet]


@pytest.mark.parametrize("kind, name", _effects())
def test_each_changes_an_output_or_a_gradient(kind: str, name: str) -> None:
    without = ["reset"] if name == "reset_to" else []
    got, plain = Case(kind, [name], BOTH).of_layer(), Case(kind, without, BOTH).of_layer()
    shared = [key for key in plain if plain[key].shape == got[key].shape]
    assert max(error(got[key], plain[key]) for key in shared if plain[key].norm() > 0) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_memory_recompute_saves_less_and_gives_the_same_bits(kind: str) -> None:
    saved: dict[str, int] = {}
    grads = {}
    for memory in ("save", "recompute"):
        case = Case(kind, ["recurrent_dropout", "zoneout", "mask"], BOTH | {"memory": memory}, time=6)
        layer, tensors, marks = case.layer(), case.tensors(), case.call_marks()
        torch.manual_seed(7)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            found = case.outcome_of_layer(layer, tensors, marks)
        torch.stack([out.square().sum() for out in found.values()]).sum().backward()
        saved[memory] = sum(sizes)
        grads[memory] = [weight.grad for weight in layer.parameters()]
    assert saved["recompute"] < saved["save"] / 2
    assert all(error(a, b) <= EXACT for a, b in zip(*grads.values(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_return_states_are_differentiable_and_of_the_last_layer(kind: str) -> None:
    """Their last steps are the final states, and what only they reach has a gradient."""
    case = Case(kind, ["return_states"], BOTH)
    layer, tensors = case.layer(), case.tensors()
    found = case.outcome_of_layer(layer, tensors, {})
    units = case.units
    for state in case.loop.all_states:
        every, final = found[f"every {state}"], found[f"final {state}"]
        assert torch.equal(every[-1, :, :units], final[2])
        assert torch.equal(every[0, :, units:], final[3])
    assert torch.equal(found["every h"], found["output"])
    found[f"every {case.loop.all_states[-1]}"][1].sum().backward()
    assert all(weight.grad.norm() > 0 for weight in layer.parameters())
