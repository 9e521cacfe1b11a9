"""Masks, lengths, resets and given dropout masks, each in every position, against `loops.Loop` in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from comparison import EXACT, error, twin
from option_cases import CALL, Case, mask_of

KINDS = ("LSTM", "GRU", "RNN")
BOTH = {"num_layers": 2, "bidirectional": True}
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
