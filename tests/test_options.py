"""Every option of layers and calls, alone and in pairs, against `loops.Loop` in float64: outputs and all gradients.

What is drawn at random is drawn a second time by `draws`, so a test with dropout compares numbers too.
"""

from collections.abc import Callable
from dataclasses import fields
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

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
"""Pairs that are an error by name: see test_option_errors."""


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
    # torch has projections for LSTM alone; lengths beside a PackedSequence are refused, see test_option_errors
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


# --- masks, lengths and resets ----------------------------------------------------------------------------------------

MASKS = ("left", "right", "holes", "rows")
LENGTHS = (3, 4, 0, 1)


@pytest.mark.parametrize("reset", [None, "reset", "reset_to"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["", "lengths"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask(kind: str, mask: str, lengths: tuple[int, ...] | None, reset: str | None) -> None:
    marks = {"mask": mask_of(mask, 4, 4)} | ({} if lengths is None else {"lengths": lengths})
    Case(kind, ["return_states", *([reset] if reset else [])], BOTH, time=4, batch=4, marks=marks).check()


def _at(*places: tuple[Any, Any]) -> Tensor:
    """bool [4, 4], true at these."""
    made = torch.zeros(4, 4, dtype=torch.bool)
    for place in places:
        made[place] = True
    return made


ALL = slice(None)
RESETS: dict[str, dict[str, Any]] = {
    "at the first step": {"reset": _at((0, ALL))},
    "at the last step": {"reset": _at((3, ALL))},
    "at every step": {"reset": _at((ALL, ALL))},
    "in some rows": {"reset": _at((1, 0), (2, 0), (3, 2))},
    "at masked steps": {"reset": ~mask_of("holes", 4, 4), "mask": mask_of("holes", 4, 4)},
    "before, at and behind masked steps": {"reset": _at((ALL, ALL)), "mask": mask_of("holes", 4, 4)},
    "where no step counts": {"reset": _at((2, ALL)), "mask": mask_of("rows", 4, 4)},
    "before the first step that counts": {"reset": _at((1, ALL)), "mask": _at((slice(2, None), ALL))},
    "behind the last step that counts": {"reset": _at((3, ALL)), "mask": _at((slice(0, 2), ALL))},
    "at the end of sequences": {"reset": _at((2, 0), (3, 1), (0, 3)), "lengths": [3, 4, 0, 1]},
    "right behind the end": {"reset": _at((3, 0), (0, 2), (1, 3)), "lengths": [3, 4, 0, 1]},
    "with lengths and a mask": {"reset": _at((ALL, 0), (2, ALL)), "lengths": LENGTHS, "mask": mask_of("left", 4, 4)},
}


@pytest.mark.parametrize("row", ["reset", "reset_to"])
@pytest.mark.parametrize("where", RESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reset(kind: str, where: str, row: str) -> None:
    Case(kind, [row, "return_states"], {"bidirectional": True}, time=4, batch=4, marks=RESETS[where]).check(zeros=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_past_the_lengths_is_ignored(kind: str) -> None:
    marks = {"lengths": [3, 4, 0, 1]}
    beyond = {"reset": torch.arange(4)[:, None] >= torch.tensor(marks["lengths"])}
    got = Case(kind, ["reset_to"], BOTH, time=4, batch=4, marks=marks | beyond).check(zeros=True)
    plain = Case(kind, [], BOTH, time=4, batch=4, marks=marks).check()
    # Not to the bit: with resets a gradient is added up in another order.
    assert {name: e for name in plain if not (e := error(got[name], plain[name])) <= EXACT} == {}
    assert not any(got[name].any() for name in got if name.startswith("grad of reset_to"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_is_two_sequences_of_torchs(kind: str) -> None:
    """By hand from torch.nn: each direction begins at its end with hx, and behind the cut with zero."""
    case = Case(kind, arguments={"bidirectional": True}, time=5)
    layer, tensors, cut = case.layer(), case.tensors(), 2
    reset = torch.zeros(5, 3, dtype=torch.bool)
    reset[cut] = True
    got = case.outcome_of_layer(layer, tensors, {"reset": reset})

    def part(steps: slice, direction: int) -> dict[str, Tensor]:
        """torch's layer on some of the steps, with hx for one direction."""
        enters = (torch.arange(2) == direction)[:, None, None]
        some = {name: tensor * enters if "hx" in name else tensor[steps] for name, tensor in tensors.items()}
        return case.outcome_of_layer(twin(layer), some, {})

    before, after = part(slice(None, cut), 0), part(slice(cut, None), 1)
    assert error(got["output"], torch.cat([before["output"], after["output"]]).detach()) <= EXACT
    for state in case.loop.all_states:
        ends = torch.stack([after[f"final {state}"][0], before[f"final {state}"][1]])
        assert error(got[f"final {state}"], ends.detach()) <= EXACT


# --- given masks ------------------------------------------------------------------------------------------------------

GIVEN = [name for name in CALL if name.startswith("given ")]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("mode", ["gate", "shared", "step"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_given_masks_together(kind: str, mode: str, training: bool) -> None:
    """They are used in eval too, and in the place of what the layer's options would draw."""
    drawing = ["input_dropout", "weight_drop", "zoneout", "dropout", "recurrent_dropout"]
    rows = [name for name in GIVEN if name != "given input_dropout"]
    for beside in ([], drawing):
        arguments = BOTH | {"recurrent_dropout_mode": mode}
        case = Case(kind, beside + rows, arguments, training=training)
        case.check()
        layer, begin = case.layer(), torch.get_rng_state()
        case.outcome_of_layer(layer, case.tensors(), {})
        assert torch.equal(torch.get_rng_state(), begin), "nothing was left to draw"


def test_some_masks_are_given_and_others_drawn() -> None:
    rows = ["zoneout", "recurrent_dropout", "input_dropout", "weight_drop", "dropout"]
    for given in GIVEN:
        Case("LSTM", [*rows, given], BOTH).check()


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_bool_is_one_of_zeros_and_ones(kind: str, name: str) -> None:
    case = Case(kind, [name], BOTH)
    layer, tensors = case.layer(), case.tensors()
    bools = {key: tensor > 0 if key.rpartition(" ")[2].isdigit() else tensor for key, tensor in tensors.items()}
    assert any(tensor.dtype == torch.bool for tensor in bools.values())
    got = case.outcome_of_layer(layer, bools, {})
    truth = case.outcome_of_layer(layer, {key: tensor.double() for key, tensor in bools.items()}, {})
    assert all(torch.equal(got[key], truth[key]) for key in truth)


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


def _of_wide() -> list[tuple[str, str]]:
    rows = [name for name in (*LAYER, *CALL) if name not in ONLY and name != "activation"]
    forms = ["two layers, both directions, no bias, batch first", "two layers, both directions, unsorted"]
    return [(name, form) for name in rows for form in forms if (name, FORMS[form][1]) not in REFUSED]


@pytest.mark.parametrize("name, form", _of_wide())
def test_alone_on_a_cell_of_a_users(name: str, form: str) -> None:
    arguments, layout = FORMS[form]
    if name in ("dropout", "given dropout"):
        arguments = arguments | {"num_layers": 2}
    Case("Recurrent", [*{name, "inputs"}], arguments, layout, cell=WIDE).check()


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
