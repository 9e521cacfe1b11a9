"""What lies where no step counts is never seen: NaN and infinities there change no bit of anything, in any cell.

A naive `where` around the result alone gives 0 x inf in the gradient.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whorl
from comparison import weighted
from option_cases import mask_of
from whorl import log, mean, rsqrt, sigmoid, sqrt, tanh
from whorl.cells import library

TIME, BATCH, INPUTS, UNITS = 4, 4, 3, 5
LENGTHS = torch.tensor([3, 4, 0, 1])
WITHIN = torch.arange(TIME)[:, None] < LENGTHS


@whorl.cell(gates="i n", states="h c", vectors={"v": 0.5}, inputs="d")
def singular(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    """Every derivative that is infinite at zero, which is what is read where a step does not count."""
    c = sqrt(abs(s.c)) + rsqrt(v.v * v.v) + log((x.i + r.i) * (x.i + r.i)) / x.d + tanh(r.n(1 / v.v))
    return dict(h=sigmoid(c) * abs(x.n) ** 0.5 / mean(c * c), c=c)


@whorl.cell(gates="i n", states="h c")
def infinite(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """No number at zero, and then a projection of it."""
    c = sqrt(abs(s.c)) + tanh(r.n)
    return dict(h=log(x.i * x.i) + c / x.n, c=c)


CELLS = {name: made for name, made in {**vars(library), "singular": singular}.items() if isinstance(made, whorl.Cell)}
LAYERS = {
    **{name: ("Recurrent", (cell,), {}) for name, cell in CELLS.items()},
    "infinite, projected": ("Recurrent", (infinite,), {"proj_size": 3}),
    "LSTM with layer norm": ("LSTM", (), {"layer_norm": True}),
    "GRU with layer norm": ("GRU", (), {"layer_norm": True, "reset_after": False}),
    "mgu with layer norm": ("Recurrent", (library.mgu,), {"layer_norm": True}),
    "LSTM with all": (
        "LSTM", (), {
            "peephole": True, "coupled": True, "clip": 1.0, "proj_size": 3, "activation": "softsign", "zoneout": 0.3,
            "recurrent_dropout": 0.3, "input_dropout": 0.3, "weight_drop": 0.3, "dropout": 0.3, "layer_norm": True,
        },
    ),
    "GRU with masks by step": ("GRU", (), {"recurrent_dropout": 0.3, "recurrent_dropout_mode": "step", "zoneout": 0.3}),
    "RNN, recomputed": ("RNN", (), {"memory": "recompute", "zoneout": 0.2}),
}  # fmt: skip
MARKS: dict[str, dict[str, Any]] = {
    "lengths": {"lengths": LENGTHS},
    **{f"mask {kind}": {"mask": mask_of(kind, TIME, BATCH)} for kind in ("left", "right", "holes", "rows")},
    "lengths, mask and reset": {
        "lengths": LENGTHS, "mask": mask_of("holes", TIME, BATCH), "reset": torch.ones(TIME, BATCH, dtype=torch.bool),
    },
}  # fmt: skip
POISONS = (torch.nan, torch.inf, -torch.inf)


def test_every_cell_of_the_library_is_here() -> None:
    assert {"lstm", "gru", "rnn_tanh", "rnn_relu", "mgu", "slstm", "dreamer_gru", "gru_d", "cfc"} < {*CELLS}


def make(name: str, dtype: torch.dtype) -> torch.nn.Module:
    kind, cells, options = LAYERS[name]
    return getattr(whorl, kind)(*cells, INPUTS, UNITS, 2, bidirectional=True, dtype=dtype, **options)


def given(layer: torch.nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """x, hx and the extra inputs of this layer."""
    numbers = torch.Generator().manual_seed(5)
    shapes = {"x": (TIME, BATCH, INPUTS)}
    shapes |= {f"hx {state}": (4, BATCH, width) for state, width in layer._widths.items()}
    shapes |= {f"inputs {name}": (TIME, BATCH, UNITS) for name in layer._extra_inputs}
    return {key: torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype) for key, shape in shapes.items()}


def results(layer: torch.nn.Module, tensors: dict[str, Tensor], **marks: Any) -> dict[str, Tensor]:
    """All that the layer gives, and all gradients."""
    layer.zero_grad()
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    hx = [leaf for name, leaf in leaves.items() if name.startswith("hx")]
    extras = {name.split()[1]: leaf for name, leaf in leaves.items() if name.startswith("inputs")}
    torch.manual_seed(3)
    y, finals, every = layer(
        leaves["x"], hx[0] if len(hx) == 1 else tuple(hx), inputs=extras or None, return_states=True, **marks
    )
    found = {"y": y} | {f"final {n}": final for n, final in enumerate([finals] if len(hx) == 1 else finals)} | every
    weighted([*found.values()]).backward()
    grads = {name: leaf.grad for name, leaf in (leaves | dict(layer.named_parameters())).items()}
    return {name: out.detach() for name, out in found.items()} | {f"grad of {name}": g for name, g in grads.items()}


def counts(marks: dict[str, Any]) -> Tensor:
    """bool [time, batch, 1]: the step counts."""
    valid = WITHIN if "lengths" in marks else torch.ones(TIME, BATCH, dtype=torch.bool)
    return (valid & marks["mask"] if "mask" in marks else valid).unsqueeze(-1)


@pytest.mark.parametrize("where", MARKS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_does_not_count_changes_no_bit(name: str, where: str) -> None:
    """In float64 and in float32, by turns."""
    dtype = torch.float32 if [*MARKS].index(where) % 2 else torch.float64
    layer, marks = make(name, dtype), MARKS[where]
    tensors, valid = given(layer, dtype), counts(marks)
    assert not valid.all()
    by_step = [key for key in tensors if not key.startswith("hx")]

    def filled(value: float) -> dict[str, Tensor]:
        return {key: torch.where(valid, t, value) if key in by_step else t for key, t in tensors.items()}

    truth = results(layer, filled(0.0), **marks)
    assert all(tensor.isfinite().all() for tensor in truth.values())
    assert truth["grad of weight_ih_l0"].norm() > 0
    poison = POISONS[len(name + where) % 3]  # each meets each
    got = results(layer, filled(poison), **marks)
    assert [key for key in truth if not torch.equal(got[key], truth[key])] == []
    assert not any((got[f"grad of {key}"] * ~valid).any() for key in by_step)


@pytest.mark.parametrize("name", LAYERS)
def test_initial_states_of_a_sequence_without_steps_reach_nothing(name: str) -> None:
    layer = make(name, torch.float64)
    tensors = given(layer, torch.float64)
    for marks in ({"lengths": LENGTHS}, {"mask": WITHIN}):
        truth = results(layer, tensors, **marks)
        poisoned = dict(tensors)
        for key in tensors:
            if key.startswith("hx"):
                poisoned[key] = tensors[key].clone()
                poisoned[key][:, 2] = torch.nan
        got = results(layer, poisoned, **marks)
        others = [0, 1, 3]
        for key in truth:
            rows = others if "weight" not in key and "bias" not in key and "vector" not in key else None
            a, b = (part if rows is None else part[:, rows] for part in (got[key], truth[key]))
            assert torch.equal(a, b), key
        assert got["final 0"][:, 2].isnan().all(), "length 0 gives hx back"


@pytest.mark.parametrize("where", MARKS)
@pytest.mark.parametrize("name", ["zoneout_h", "zoneout_c", "recurrent_dropout", "dropout"])
def test_given_masks_are_not_read_where_no_step_counts(name: str, where: str) -> None:
    options = {"num_layers": 2, "recurrent_dropout_mode": "step", "dtype": torch.float64}
    layer, marks = whorl.LSTM(INPUTS, UNITS, **options), MARKS[where]
    x, valid = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64), counts(marks)
    masks = torch.rand(2 - (name == "dropout"), TIME, BATCH, UNITS, dtype=torch.float64)
    found = []
    for poison in (0.0, *POISONS):
        layer.zero_grad()
        given = torch.where(valid, masks, poison).requires_grad_()
        y, finals = layer(x, dropout_masks={name: [*given]}, **marks)
        weighted([y, *finals]).backward()
        found.append([y.detach(), given.grad, *(weight.grad for weight in layer.parameters())])
    for row in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(row, found[0], strict=True))


def test_states_that_a_reset_does_not_use_and_those_that_it_overrides() -> None:
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64)
    found = []
    for poison in (0.0, torch.nan):
        torch.manual_seed(1)
        layer = whorl.GRU(INPUTS, UNITS, dtype=torch.float64)
        hx, to = torch.randn(2, 1, BATCH, UNITS, dtype=torch.float64)
        reset = torch.zeros(TIME, BATCH, dtype=torch.bool)
        reset[0, :2], reset[2, 1] = True, True
        hx[:, :2], to[:, 2:] = poison, poison
        y, h = layer(x, hx.requires_grad_(), reset=reset, reset_to=to.requires_grad_())
        weighted([y, h]).backward()
        found.append([y.detach(), h.detach(), hx.grad, to.grad, *(weight.grad for weight in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "poison, dtype, packed",
    [
        (torch.nan, torch.float32, False),
        (torch.inf, torch.float32, False),
        (-torch.inf, torch.float64, True),
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_a_bad_row_leaves_the_others_as_they_are(name: str, poison: float, dtype: torch.dtype, packed: bool) -> None:
    """Also where nothing is padded: outputs, states, and the gradients of what belongs to the other rows."""
    layer = make(name, dtype)
    tensors = given(layer, dtype)
    lengths = [2, 4, 3, 4]

    def run(x: Tensor) -> dict[str, Tensor]:
        if not packed:
            return results(layer, tensors | {"x": x})
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()

        def pack(tensor: Tensor) -> PackedSequence:
            return pack_padded_sequence(tensor, lengths, enforce_sorted=False)

        extras = {key.split()[1]: pack(tensor) for key, tensor in tensors.items() if key.startswith("inputs")}
        y, finals = layer(pack(leaf), inputs=extras or None)
        found = {f"final {n}": f for n, f in enumerate(finals if isinstance(finals, tuple) else [finals])}
        y, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
        weighted([y, *found.values()]).backward()
        return {"y": y, **found, "grad of x": leaf.grad}

    truth = run(tensors["x"])
    bad = tensors["x"].clone()
    bad[1, 1, 0] = poison
    got, others = run(bad), [0, 2, 3]
    for key in truth:
        if "weight" not in key and "bias" not in key and "vector" not in key:
            assert torch.equal(got[key][:, others], truth[key][:, others]), key
    assert not torch.equal(got["y"][:, 1], truth["y"][:, 1])
