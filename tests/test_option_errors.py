"""What an option does not support it refuses by name, and says what to write instead; nothing is taken and ignored."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whorl
from whorl import CellError, InputError, UnsupportedError
from whorl.arguments import MEANINGS
from whorl.cells import library

TIME, BATCH, INPUTS, UNITS = 4, 3, 2, 5
X = torch.zeros(TIME, BATCH, INPUTS)
FLAGS = torch.ones(TIME, BATCH, dtype=torch.bool)
STATES = (torch.zeros(1, BATCH, UNITS),) * 2
LENGTHS = [2, 4, 1]


def pack(tensor: Tensor, lengths: list[int] = LENGTHS) -> PackedSequence:
    return pack_padded_sequence(tensor, lengths, enforce_sorted=False)


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


# --- options of a layer -----------------------------------------------------------------------------------------------

PROBABILITY = "write a probability from 0 to 1."
CHANCES = ("recurrent_dropout", "input_dropout", "weight_drop", "zoneout")
LAYERS: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {name: value}, f"{name} is {value!r}: {PROBABILITY}")
      for kind in ("LSTM", "GRU", "RNN") for name in CHANCES
      for value in (-0.1, 1.5, "0.5", None, True, float("nan"), [0.1, 0.2])),
    ("LSTM", {"recurrent_dropout_mode": "gates"},
     "recurrent_dropout_mode is 'gates': write one of 'gate', 'shared', 'step'."),
    ("LSTM", {"memory": "none"}, "memory is 'none': write one of 'save', 'recompute'."),
    ("LSTM", {"zoneout": {"m": 0.1}}, "zoneout names the state 'm': this layer has h, c."),
    ("GRU", {"zoneout": {"c": 0.1}}, "zoneout names the state 'c': this layer has h."),
    ("LSTM", {"zoneout": {"c": 1.1}}, f"zoneout is 1.1: {PROBABILITY}"),
    *(("LSTM", {"layer_norm": value}, f"layer_norm is {value!r}: LSTM takes True, or some of 'x r c'.")
      for value in ("z", "xr", "", "x x", 1, None, ["x", "r"])),
    *((kind, {"layer_norm": "c"}, f"layer_norm is 'c': {kind} takes True, or some of 'x r' (c is normalised by LSTM "
       "alone: in a cell of your own write it in the step).") for kind in ("GRU", "RNN")),
    *(("LSTM", {"clip": value}, f"clip is {value!r} for the state h: write a finite number above 0.")
      for value in (0, -1.0, True, "1", (-1, 1), float("nan"), float("inf"))),
    *(("LSTM", {name: {}}, f"{name} is an empty dict: name one of the states h, c, or leave it out.")
      for name in ("zoneout", "clip")),
    ("LSTM", {"clip": {"h": None}}, "clip is None for the state h: write a finite number above 0."),
    ("RNN", {"clip": {"c": 1.0}}, "clip names the state 'c': this layer has h."),
    *(("LSTM", {name: value}, f"{name} is {value!r}: write True or False.")
      for name in ("peephole", "coupled", "reset_after") for value in (1, None, "yes")),
    *((kind, {name: True}, f"{name} is True, which {kind} does not take: LSTM takes it.")
      for kind in ("GRU", "RNN") for name in ("peephole", "coupled")),
    *((kind, {"reset_after": False}, f"reset_after is False, which {kind} does not take: GRU takes it.")
      for kind in ("LSTM", "RNN")),
    ("RNN", {"recurrent_activation": "tanh"},
     "recurrent_activation is 'tanh', which RNN does not take: LSTM and GRU take it."),
    *((kind, {name: value}, f"{name} is {value!r}: give a function of one argument, or one of tanh, sigmoid, relu,")
      for kind in ("LSTM", "GRU") for name in ("activation", "recurrent_activation") for value in ("tanhh", 3)),
    ("RNN", {"activation": "TANH"}, "activation is 'TANH': give a function of one argument"),
    ("RNN", {"nonlinearity": "relu", "activation": "tanh"},
     "nonlinearity is 'relu' and activation is given too: leave one of them out."),
    ("LSTM", {"engine": "fast"}, "engine is 'fast': write one of 'auto',"),
]  # fmt: skip


@pytest.mark.parametrize("kind, options, text", LAYERS, ids=[f"{row[0]}, {row[2]}" for row in LAYERS])
def test_an_option_that_a_layer_does_not_take(kind: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}"):
        getattr(whorl, kind)(INPUTS, UNITS, **options)


OF_CELL = [
    *((library.lstm, {name: value}, f"{name} is {value!r}, which Recurrent does not take: write it in the step.")
      for name, value in {"activation": "relu", "recurrent_activation": "tanh", "peephole": True, "coupled": True,
                          "reset_after": False}.items()),
    (library.lstm, {"layer_norm": "c"}, "layer_norm is 'c': Recurrent takes True, or some of 'x r' (c is normalised"),
    (library.slstm, {"zoneout": {"g": 0.1}}, "zoneout names the state 'g': this layer has h, c, n, m."),
    (library.gru, {"proj_size": 2}, "projection is 2, but gru reads its state h unit by unit"),
    (library.ind_rnn, {"weight_drop": 0.5}, "weight_drop is 0.5, and no gate of ind_rnn has recurrent weights."),
    (library.ind_rnn, {"recurrent_dropout": 0.5}, "recurrent_dropout is 0.5, and no gate of ind_rnn has recurrent"),
    (library.ind_rnn, {"layer_norm": True}, "layer_norm acts on r, and no gate of ind_rnn has recurrent weights"),
    (library.gru, {"zone": 0.1}, "Recurrent has no option 'zone': it has recurrent_dropout,"),
    (library.gru, {"dropout": 1.5}, f"dropout is 1.5: {PROBABILITY}"),
    (library.gru, {"num_layers": 0}, "num_layers is 0: write a whole number of 1 or more."),
    (library.gru, {"proj_size": -1}, "proj_size is -1: write a whole number of 0 or more."),
    (lambda x, r, s: s, {}, "the cell is <function <lambda>"),
    ("lstm", {}, "the cell is 'lstm': give what @whorl.cell makes of a step, or one of whorl.cells.library."),
]  # fmt: skip


@pytest.mark.parametrize("cell, options, text", OF_CELL, ids=[row[2] for row in OF_CELL])
def test_an_option_that_recurrent_does_not_take(cell: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}"):
        whorl.Recurrent(cell, INPUTS, UNITS, **options)


@pytest.mark.parametrize("function, text", [
    (lambda v: v if v > 0 else 0 * v, "a step is traced once, so it cannot branch on"),
    (lambda v: torch.cumsum(v, 0), "a step cannot use torch's cumsum: write it with"),
    (lambda v: v > 0, "mul takes values, but was given the condition"),
    (lambda v: None, "a step uses None, of type NoneType"),
    (torch.nn.Softmax(-1), "a step cannot use torch's softmax"),
    (torch.nn.PReLU(), "a step cannot use torch's prelu"),
])  # fmt: skip
def test_an_activation_that_cannot_be_traced(function: Callable, text: str) -> None:
    with pytest.raises(CellError, match=re.escape(text)):
        whorl.LSTM(INPUTS, UNITS, activation=function)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_an_unknown_option_is_torchs_own_error(kind: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'zone'"):
        getattr(whorl, kind)(INPUTS, UNITS, zone=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'length'"):
        getattr(whorl, kind)(INPUTS, UNITS)(X, length=LENGTHS)


# --- options of a call ------------------------------------------------------------------------------------------------

THREE = "LSTM takes 3 integers, one for each sequence: a list of int, or torch.as_tensor of them."
ONE = THREE.replace("3", "1")
STEPS = "LSTM takes [time, batch] = [4, 3] for this x."
CALLS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "lengths": [
        ({"lengths": torch.tensor([1.0, 2.0, 3.0])}, f"lengths is torch.float32 of shape [3], {THREE}"),
        ({"lengths": torch.ones(3, dtype=torch.bool)}, f"lengths is torch.bool of shape [3], {THREE}"),
        ({"lengths": torch.ones(3, 1, dtype=torch.int64)}, f"lengths is torch.int64 of shape [3, 1], {THREE}"),
        ({"lengths": [1, 2]}, f"lengths is torch.int64 of shape [2], {THREE}"),
        ({"lengths": []}, f"lengths is torch.int64 of shape [0], {THREE}"),
        ({"lengths": [1.0, 2, 3]}, f"lengths is of type list with a float, {THREE}"),
        ({"lengths": [True, False, True]}, f"lengths is of type list with a bool, {THREE}"),
        ({"lengths": np.array([1, 2, 3])}, f"lengths is of type ndarray, {THREE}"),
        ({"lengths": 3}, f"lengths is of type int, {THREE}"),
        ({"lengths": [1, 2, 5]}, "lengths go from 1 to 5 and x has 4 steps: each must be from 0 to 4."),
        ({"lengths": torch.tensor([-1, 2, 3])}, "lengths go from -1 to 3 and x has 4 steps: each must be from 0 to 4."),
    ],
    "mask": [
        ({"mask": FLAGS.float()}, "mask is torch.float32, it must be bool: write mask.bool()."),
        ({"mask": FLAGS.byte()}, "mask is torch.uint8, it must be bool: write mask.bool()."),
        ({"mask": FLAGS.T}, f"mask is torch.bool of shape [3, 4], {STEPS}"),
        ({"mask": FLAGS[0]}, f"mask is torch.bool of shape [3], {STEPS}"),
        ({"mask": FLAGS.unsqueeze(-1)}, f"mask is torch.bool of shape [4, 3, 1], {STEPS}"),
        ({"mask": FLAGS.tolist()}, f"mask is of type list, {STEPS}"),
        ({"mask": FLAGS.to("meta")}, "mask is on meta and x on cpu: move one with .to()."),
    ],
    "reset": [
        ({"reset": FLAGS.int()}, "reset is torch.int32, it must be bool: write reset.bool()."),
        ({"reset": FLAGS.T}, f"reset is torch.bool of shape [3, 4], {STEPS}"),
        ({"reset": True}, f"reset is of type bool, {STEPS}"),
        ({"reset": pack(FLAGS)}, f"reset is of type PackedSequence, {STEPS}"),
        ({"reset": FLAGS.to("meta")}, "reset is on meta and x on cpu: move one with .to()."),
    ],
    "reset_to": [
        ({"reset_to": STATES}, "reset_to is given without reset: write where, as reset=bool [time, batch]."),
        ({"reset": FLAGS, "reset_to": STATES[0]}, "reset_to is of type Tensor: LSTM takes 2 tensors (h, c)."),
        ({"reset": FLAGS, "reset_to": 0}, "reset_to is of type int: LSTM takes 2 tensors (h, c)."),
        ({"reset": FLAGS, "reset_to": (STATES[0], ones(1, 1, UNITS))},
         "reset_to c has shape (1, 1, 5), LSTM takes (1, 3, 5) for this x."),
        ({"reset": FLAGS, "reset_to": (ones(BATCH, UNITS),) * 2},
         "reset_to h has shape (3, 5), LSTM takes (1, 3, 5) for this x."),
        ({"reset": FLAGS, "reset_to": (ones(1, BATCH, UNITS, dtype=torch.float64),) * 2},
         "reset_to h is torch.float64 and x torch.float32: write h.to(torch.float32)."),
        ({"reset": FLAGS, "reset_to": (ones(1, BATCH, UNITS, device="meta"),) * 2},
         "reset_to h is on meta and x on cpu: move one with .to()."),
    ],
    "inputs": [
        ({"inputs": X}, "inputs is torch.float32 of shape [4, 3, 2], and this cell reads no extra inputs: leave it"),
        ({"inputs": {"gap": X}}, "inputs is gap, and this cell reads no extra inputs: leave it out."),
        ({"inputs": [X]}, "inputs is of type list, and this cell reads no extra inputs: leave it out."),
    ],
    "dropout_masks": [
        ({"dropout_masks": [X]}, "dropout_masks is of type list: write {'recurrent_dropout': mask}."),
        ({"dropout_masks": {"zoneout": X}}, "dropout_masks has 'zoneout': LSTM takes dropout, input_dropout,"),
        ({"dropout_masks": {"zoneout_m": X}}, "dropout_masks has 'zoneout_m': LSTM takes dropout, input_dropout,"),
        ({"dropout_masks": {"dropout": ones(4, 3, 5)}}, "dropout_masks['dropout'] has 1 masks, LSTM takes 0."),
        ({"dropout_masks": {"recurrent_dropout": [ones(4, 3, 5)] * 2}},
         "dropout_masks['recurrent_dropout'] has 2 masks, LSTM takes 1."),
        ({"dropout_masks": {"recurrent_dropout": ones(3, 3, 5)}},
         "dropout_masks['recurrent_dropout'][0] is torch.float32 of shape [3, 3, 5], LSTM takes [4, 3, 5] for this x."),
        ({"dropout_masks": {"recurrent_dropout": ones(3, 5)}},
         "dropout_masks['recurrent_dropout'][0] is torch.float32 of shape [3, 5], LSTM takes [4, 3, 5] for this x."),
        ({"dropout_masks": {"recurrent_dropout": ones(4, 3, 5, dtype=torch.int64)}},
         "dropout_masks['recurrent_dropout'][0] is torch.int64: give bool or torch.float32."),
        ({"dropout_masks": {"recurrent_dropout": ones(4, 3, 5, dtype=torch.complex64)}},
         "dropout_masks['recurrent_dropout'][0] is torch.complex64: give bool or torch.float32."),
        ({"dropout_masks": {"recurrent_dropout": ones(4, 3, 5, device="meta")}},
         "dropout_masks['recurrent_dropout'][0] is on meta and x on cpu: move one with .to()."),
        ({"dropout_masks": {"recurrent_dropout": None}}, "dropout_masks['recurrent_dropout'][0] is of type NoneType"),
        ({"dropout_masks": {"recurrent_dropout": 0.5}}, "dropout_masks['recurrent_dropout'][0] is of type float"),
        ({"dropout_masks": {"input_dropout": ones(3, 5)}},
         "dropout_masks['input_dropout'][0] is torch.float32 of shape [3, 5], LSTM takes [3, 2] for this x."),
        ({"dropout_masks": {"input_dropout": ones(3, 3, 2)}},
         "dropout_masks['input_dropout'][0] is torch.float32 of shape [3, 3, 2], LSTM takes [4, 3, 2] for this x."),
        ({"dropout_masks": {"weight_drop": ones(5, 20)}},
         "dropout_masks['weight_drop'][0] is torch.float32 of shape [5, 20], LSTM takes [20, 5]."),
        ({"dropout_masks": {"weight_drop": ones(20, 5, device="meta")}},
         "dropout_masks['weight_drop'][0] is on meta and x on cpu: move one with .to()."),
        ({"dropout_masks": {"zoneout_h": ones(4, 3, 4)}},
         "dropout_masks['zoneout_h'][0] has 4 features in its last axis: it must have 5."),
        ({"dropout_masks": {"zoneout_c": ones(3, 4, 5)}},
         "dropout_masks['zoneout_c'][0] is torch.float32 of shape [3, 4, 5], LSTM takes [time, batch, ...] = [4, 3]"),
    ],
    "return_states": [
        ({"return_states": "yes"}, "return_states is of type str: write True or False."),
        ({"return_states": None}, "return_states is of type NoneType: write True or False."),
        ({"return_states": torch.ones(2)}, "return_states is of type Tensor: write True or False."),
    ],
}  # fmt: skip


def test_every_option_of_a_call_has_its_mistakes() -> None:
    assert {*CALLS} == {*MEANINGS}


MISTAKES = [row for rows in CALLS.values() for row in rows]


@pytest.mark.parametrize("options, text", MISTAKES, ids=[row[1] for row in MISTAKES])
def test_a_mistaken_call(options: dict[str, Any], text: str) -> None:
    """Of a layer with and without options of its own; and `plan`, which takes what a call takes, says the same."""
    for layer in (whorl.LSTM(INPUTS, UNITS), whorl.LSTM(INPUTS, UNITS, peephole=True, zoneout=0.1)):
        for call in (layer, layer.plan):
            with pytest.raises(InputError, match=f"^{re.escape(text)}"):
                call(X, **options)


Y = "x is a PackedSequence, which has its lengths, and {} is given too: leave one of them out."
PACKED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": LENGTHS}, Y.format("lengths")),
    ({"mask": FLAGS}, Y.format("mask")),
    ({"mask": pack(FLAGS)}, Y.format("mask")),
    ({"reset": FLAGS}, "x is a PackedSequence and reset torch.bool of shape [4, 3]: pack it as x is packed."),
    ({"reset": pack(FLAGS, [2, 4, 2])}, "reset holds torch.bool of shape [8], x 7 rows: pack both alike."),
    ({"reset": pack(FLAGS, [3, 2, 2])}, "reset and x are packed by different lengths or in different orders"),
    ({"reset": pack(FLAGS, [4, 2, 1])}, "reset and x are packed by different lengths or in different orders"),
    ({"reset": pack(FLAGS.float())}, "reset is torch.float32, it must be bool: write reset.bool()."),
    ({"reset": pack(FLAGS), "reset_to": (ones(1, 2, UNITS),) * 2},
     "reset_to h has shape (1, 2, 5), LSTM takes (1, 3, 5) for this x."),
    ({"reset": pack(FLAGS), "reset_to": (ones(1, 5, UNITS),) * 2},
     "reset_to h has shape (1, 5, 5), LSTM takes (1, 3, 5) for this x."),
    ({"reset": pack(FLAGS), "reset_to": (ones(UNITS),) * 2},
     "reset_to h has shape (5,), LSTM takes (1, 3, 5) for this x."),
    ({"hx": (ones(1, 5, UNITS),) * 2}, "the initial state h has shape (1, 5, 5), LSTM takes (1, 3, 5) for this x."),
    ({"dropout_masks": {"zoneout_h": ones(4, 3, 5)}},
     "x is a PackedSequence and dropout_masks['zoneout_h'][0] torch.float32 of shape [4, 3, 5]: pack it as x is"),
    ({"dropout_masks": {"recurrent_dropout": ones(4, 7, 5)}},
     "dropout_masks['recurrent_dropout'][0] is torch.float32 of shape [4, 7, 5], LSTM takes [4, 3, 5] for this x."),
]  # fmt: skip


@pytest.mark.parametrize("options, text", PACKED, ids=[row[1] for row in PACKED])
def test_a_mistaken_call_with_a_packed_sequence(options: dict[str, Any], text: str) -> None:
    for layer in (whorl.LSTM(INPUTS, UNITS), whorl.LSTM(INPUTS, UNITS, peephole=True)):
        with pytest.raises(InputError, match=f"^{re.escape(text)}"):
            layer(pack(X), **options)


UNBATCHED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": [3, 2]}, f"lengths is torch.int64 of shape [2], {ONE}"),
    ({"lengths": 9}, "lengths go from 9 to 9 and x has 4 steps: each must be from 0 to 4."),
    ({"mask": FLAGS}, "mask is torch.bool of shape [4, 3], LSTM takes [time] = [4] for this x."),
    ({"reset": FLAGS[:3, 0]}, "reset is torch.bool of shape [3], LSTM takes [time] = [4] for this x."),
    ({"reset": FLAGS[:, 0], "reset_to": (ones(1, 1, UNITS),) * 2},
     "reset_to h has shape (1, 1, 5), LSTM takes (1, 5) for this x."),
    ({"reset": FLAGS[:, 0], "reset_to": (torch.tensor(0.0),) * 2},
     "reset_to h has shape (), LSTM takes (1, 5) for this x."),
    ({"dropout_masks": {"input_dropout": ones(1, 2)}},
     "dropout_masks['input_dropout'][0] is torch.float32 of shape [1, 2], LSTM takes [4, 2] for this x."),
    ({"dropout_masks": {"zoneout_h": ones(4, 1, 5)}},
     "dropout_masks['zoneout_h'][0] is torch.float32 of shape [4, 1, 5], LSTM takes [time, ...] = [4] for this x."),
]  # fmt: skip


@pytest.mark.parametrize("options, text", UNBATCHED, ids=[row[1] for row in UNBATCHED])
def test_a_mistaken_call_without_a_batch(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}"):
        whorl.LSTM(INPUTS, UNITS)(X[:, 0], **options)


def test_states_of_a_batch_for_a_cell_of_whorls_own_without_one() -> None:
    """Where torch has no word to say."""
    for hx, shape in ((STATES, "(1, 3, 5)"), ((torch.tensor(0.0),) * 2, "()")):
        text = f"the initial state h has shape {shape}, LSTM takes (1, 5) for this x."
        with pytest.raises(InputError, match=re.escape(text)):
            whorl.LSTM(INPUTS, UNITS, peephole=True)(X[:, 0], hx)


@pytest.mark.parametrize("name", ["mask", "reset"])
def test_batch_first_holds_for_the_options_too(name: str) -> None:
    layer = whorl.GRU(INPUTS, UNITS, batch_first=True)
    with pytest.raises(InputError, match=re.escape(f"{name} is torch.bool of shape [4, 3], GRU takes [batch, time] =")):
        layer(X.transpose(0, 1), **{name: FLAGS})


GAP = "this cell reads gap: write inputs={'gap': ...}."
INPUTS_OF_GRU_D: list[tuple[dict[str, Any], str]] = [
    ({}, f"inputs is not given, and {GAP}"),
    ({"inputs": {}}, f"inputs is empty, and {GAP}"),
    ({"inputs": {"d": ones(4, 3, 5)}}, f"inputs is d, and {GAP}"),
    ({"inputs": [ones(4, 3, 5)]}, f"inputs is of type list, and {GAP}"),
    ({"inputs": ones(4, 3, 2)}, "inputs['gap'] has 2 features in its last axis: it must be 5 or 1."),
    (
        {"inputs": ones(4, 3)},
        "inputs['gap'] is torch.float32 of shape [4, 3], Recurrent takes [time, batch, ...] = [4,",
    ),
    ({"inputs": ones(4, 3, 5, dtype=torch.float64)}, "inputs['gap'] is torch.float64 and x torch.float32: write .to("),
    ({"inputs": ones(4, 3, 1, dtype=torch.int64)}, "inputs['gap'] is torch.int64 and x torch.float32: write .to("),
    ({"inputs": ones(4, 3, 5, device="meta")}, "inputs['gap'] is on meta and x on cpu: move one with .to()."),
    ({"inputs": pack(ones(4, 3, 5))}, "inputs['gap'] is of type PackedSequence, Recurrent takes [time, batch, ...]"),
]


@pytest.mark.parametrize("options, text", INPUTS_OF_GRU_D, ids=[row[1] for row in INPUTS_OF_GRU_D])
def test_extra_inputs_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(text)}"):
        whorl.Recurrent(library.gru_d, INPUTS, UNITS)(X, **options)


@pytest.mark.parametrize("name", ["recurrent_dropout", "weight_drop"])
@pytest.mark.parametrize("mode", ["gate", "shared", "step"])
def test_masks_for_recurrent_weights_that_are_not_there(name: str, mode: str) -> None:
    layer = whorl.Recurrent(library.ind_rnn, INPUTS, UNITS, recurrent_dropout_mode=mode)
    for mask in (ones(4, 3, 5), ones(3, 5), ones(5), ones(0, 3, 5)):
        with pytest.raises(
            InputError, match=f"dropout_masks has '{name}': Recurrent takes dropout, input_dropout, zon"
        ):
            layer(X, dropout_masks={name: mask})


# --- what other ways to call refuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"zoneout": 0.1}, {"clip": 1.0}, {"layer_norm": True}, {"recurrent_dropout": 0.1}, {"input_dropout": 0.1},
    {"weight_drop": 0.1}, {"peephole": True}, {"coupled": True}, {"activation": "relu"},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_a_trace_refuses_what_it_would_lose(options: dict[str, Any]) -> None:
    layer = whorl.LSTM(INPUTS, UNITS, **options)
    with pytest.raises(UnsupportedError, match="this LSTM has options or a cell of its own"):
        torch.jit.trace(layer, (X,), check_trace=False)
    if {*options} <= {"recurrent_dropout", "input_dropout", "weight_drop"}:
        traced = torch.jit.trace(layer.eval(), (X,))(X)[0]
        layer.engine = "onednn"  # torch's own operator too
        assert torch.equal(traced, layer(X)[0])


@pytest.mark.parametrize("options", [
    {"lengths": torch.tensor(LENGTHS)}, {"mask": FLAGS}, {"reset": FLAGS}, {"return_states": True},
    {"dropout_masks": {"zoneout_h": ones(4, 3, 5)}},
], ids=lambda options: next(iter(options)))  # fmt: skip
def test_a_trace_refuses_options_of_a_call(options: dict[str, Any]) -> None:
    layer = whorl.LSTM(INPUTS, UNITS)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer(x, **options)[0]

    with pytest.raises(UnsupportedError, match="this LSTM has options or a cell of its own"):
        torch.jit.trace(Model(), (X,), check_trace=False)
