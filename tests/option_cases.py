"""Every option of layers and calls as a row of a table, and the comparison of a layer that has some with `loops.Loop`.

Tensors are drawn in one order, time and batch first; `Case` brings them into the layout that the layer is called with,
and what comes out back, so that a gradient has the same shape in every layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import whorl
from comparison import EXACT, error, weighted
from draws import by_torch, counted
from loops import Loop

LAYER: dict[str, dict[str, Any]] = {
    "recurrent_dropout": {"recurrent_dropout": 0.4},
    "recurrent_dropout shared": {"recurrent_dropout": 0.3, "recurrent_dropout_mode": "shared"},
    "recurrent_dropout step": {"recurrent_dropout": 0.5, "recurrent_dropout_mode": "step"},
    "input_dropout": {"input_dropout": 0.3},
    "weight_drop": {"weight_drop": 0.4},
    "zoneout": {"zoneout": 0.3},
    "zoneout of h": {"zoneout": {"h": 0.4}},
    "layer_norm": {"layer_norm": True},
    "layer_norm of x": {"layer_norm": "x"},
    "layer_norm of r": {"layer_norm": "r"},
    "layer_norm of c": {"layer_norm": "c"},
    "peephole": {"peephole": True},
    "coupled": {"coupled": True},
    "clip": {"clip": 0.6},
    "clip of h": {"clip": {"h": 0.8}},
    "reset_after": {"reset_after": False},
    "activation": {"activation": "softplus"},
    "recurrent_activation": {"recurrent_activation": "hard_sigmoid"},
    "memory": {"memory": "recompute"},
    "dropout": {"dropout": 0.4},
}
"""Arguments of the constructor by the name of a row, which begins with the option's."""
CALL = (
    "lengths", "mask", "reset", "reset_to", "inputs", "return_states", "given dropout", "given input_dropout",
    "given input_dropout by gate", "given recurrent_dropout", "given weight_drop", "given zoneout",
)  # fmt: skip
ONLY = {
    "layer_norm of c": ("LSTM",), "peephole": ("LSTM",), "coupled": ("LSTM",), "reset_after": ("GRU",),
    "recurrent_activation": ("LSTM", "GRU"),
}  # fmt: skip
"""Rows that not every layer has."""
LAYOUTS = ("time first", "batch first", "unbatched", "sorted", "unsorted")
WEIGHTS = 0.7


def names(kind: str) -> list[str]:
    """The rows of both tables that LSTM, GRU or RNN have."""
    return [name for name in (*LAYER, *CALL) if name != "inputs" and kind in ONLY.get(name, kind)]


@dataclass
class Case:
    """A layer, a call and a layout.

    Args:
        rows: names of `LAYER` and `CALL`.
        arguments: more of the constructor.
        cell: of `Recurrent`, and the arguments with which `Loop` has it.
    """

    kind: str
    rows: Sequence[str] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "time first"
    training: bool = True
    time: int = 3
    batch: int = 3
    inputs: int = 2
    units: int = 3
    cell: tuple[Any, dict[str, Any]] | None = None
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Lengths, mask or reset in the place of those that a row gives."""

    def __post_init__(self) -> None:
        self.batch = 1 if self.layout == "unbatched" else self.batch
        self.options = dict(self.arguments)
        for name in self.rows:
            self.options |= LAYER.get(name, {})
        self.packed = self.layout in ("sorted", "unsorted")
        own = {item.name for item in fields(Loop)}
        known = {name: value for name, value in self.options.items() if name in own}
        step = {} if self.cell is None else self.cell[1]
        self.loop = Loop(self.kind, self.inputs, self.units, **known, **step)
        self.count = self.loop.num_layers * self.loop.directions

    def layer(self, **more: Any) -> torch.nn.Module:
        """In float64, with weights that leave nothing at zero or one."""
        options = self.options | {"batch_first": self.layout == "batch first", "dtype": torch.float64} | more
        cells = () if self.cell is None else (self.cell[0],)
        made = getattr(whorl, self.kind)(*cells, self.inputs, self.units, **options).train(self.training)
        with torch.no_grad():
            for name, weight in made.named_parameters():
                weight.copy_(torch.randn(weight.shape, generator=_numbers(name), dtype=torch.float64) * WEIGHTS)
                weight.add_("gain" in name)
        return made

    def call_marks(self) -> dict[str, Any]:
        """Lengths, mask and reset."""
        time, batch = self.time, self.batch
        lengths = [[time - 2, time, 0, 1][b % 4] for b in range(batch)]
        if self.layout == "unbatched":
            lengths = [time - 1]
        mask, reset = mask_of("left", time, batch), torch.zeros(time, batch, dtype=torch.bool)
        mask[:, 1:2], mask[:, 2:3] = mask_of("holes", time, 1), False
        reset[0, :1], reset[time - 2, :], reset[time - 1, 2:] = True, True, True
        found = {"lengths": lengths} if "lengths" in self.rows else {}
        found |= {"mask": mask} if "mask" in self.rows else {}
        found |= {"reset": reset} if {"reset", "reset_to"} & {*self.rows} else {}
        found |= self.marks
        if self.packed:
            assert "lengths" not in found
            found["lengths"] = sorted([[2, time, 1, 1][b % 4] for b in range(batch)], reverse=self.layout == "sorted")
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Everything that a gradient flows to, but for the weights, by name."""
        loop, time, batch, count = self.loop, self.time, self.batch, self.count
        rows, first = set(self.rows), loop.width(loop.all_states[0])
        shapes: dict[str, tuple[int, ...]] = {"x": (time, batch, self.inputs)}
        for title in ["hx", "reset_to"] if "reset_to" in rows else ["hx"]:
            shapes |= {f"{title} {state}": (count, batch, loop.width(state)) for state in loop.all_states}
        if "inputs" in rows:
            shapes |= {"inputs d": (time, batch, self.units), "inputs q": (time, batch, 1)}
        by_mode = {"gate": (len(loop.recurrent), batch), "shared": (batch,), "step": (time, batch)}
        for index in range(count):
            below = self.inputs if index < loop.directions else first * loop.directions
            if "given input_dropout" in rows:
                shapes[f"input_dropout {index}"] = (batch, below)
            if "given input_dropout by gate" in rows:
                shapes[f"input_dropout {index}"] = (len(loop.all_gates), batch, below)
            if "given recurrent_dropout" in rows:
                shapes[f"recurrent_dropout {index}"] = (*by_mode[loop.recurrent_dropout_mode], first)
            if "given weight_drop" in rows:
                shapes[f"weight_drop {index}"] = (len(loop.recurrent) * self.units, first)
            if "given zoneout" in rows:
                shapes |= {f"zoneout_{s} {index}": (time, batch, loop.width(s)) for s in loop.all_states}
        if "given dropout" in rows:
            shapes |= {f"dropout {n}": (time, batch, first * loop.directions) for n in range(loop.num_layers - 1)}
        return {
            name: torch.randn(shape, generator=_numbers(name), dtype=torch.float64) for name, shape in shapes.items()
        }

    def outcome_of_layer(
        self, layer: torch.nn.Module, tensors: Mapping[str, Tensor], marks: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """What the layer gives, as `Loop` names and orders it."""
        one = len(self.loop.all_states) == 1
        lengths = marks.get("lengths")

        def by_step(tensor: Tensor) -> Any:
            if self.packed:
                return pack_padded_sequence(tensor, lengths, enforce_sorted=self.layout == "sorted")
            if self.layout == "unbatched":
                return tensor[:, 0]
            return tensor.transpose(0, 1) if self.layout == "batch first" else tensor

        def by_batch(tensor: Tensor) -> Tensor:
            return tensor.select(-2, 0) if self.layout == "unbatched" else tensor

        def states(title: str) -> Any:
            found = tuple(by_batch(tensor) for name, tensor in tensors.items() if name.startswith(f"{title} "))
            return found[0] if one and found else found or None

        masks: dict[str, list] = {}
        for name, tensor in tensors.items():
            kind, _, place = name.rpartition(" ")
            if kind.startswith(("dropout", "zoneout")) or (
                kind == "recurrent_dropout" and self.loop.recurrent_dropout_mode == "step"
            ):
                masks.setdefault(kind, []).append(by_step(tensor))
            elif place.isdigit():
                masks.setdefault(kind, []).append(tensor if kind == "weight_drop" else by_batch(tensor))
        extras = {name.split()[1]: by_step(tensor) for name, tensor in tensors.items() if name.startswith("inputs ")}
        given = {name: by_step(marks[name]) for name in ("mask", "reset") if name in marks}
        given |= (
            {"lengths": torch.tensor(lengths, dtype=torch.int64)} if lengths is not None and not self.packed else {}
        )
        given |= {"dropout_masks": masks} if masks else {}
        given |= {"inputs": extras} if extras else {}
        given |= {"reset_to": states("reset_to")} if "reset_to" in self.rows else {}
        given |= {"return_states": True} if "return_states" in self.rows else {}
        y, finals, *every = layer(by_step(tensors["x"]), states("hx"), **given)

        def back(part: Any) -> Tensor:
            if isinstance(part, PackedSequence):
                return pad_packed_sequence(part, total_length=self.time)[0]
            if self.layout == "unbatched":
                return part.unsqueeze(1)
            return part.transpose(0, 1) if self.layout == "batch first" else part

        finals = [finals] if one else finals
        ends = [final.unsqueeze(1) if self.layout == "unbatched" else final for final in finals]
        found = {"output": back(y)}
        found |= {f"final {name}": end for name, end in zip(self.loop.all_states, ends, strict=True)}
        return found | {f"every {name}": back(part) for row in every for name, part in row.items()}

    def outcome_of_loop(
        self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], marks: Mapping[str, Any], masks: Mapping
    ) -> dict[str, Tensor]:
        """What `Loop` gives; `masks` are those that the layer draws."""

        def row(title: str) -> list[Tensor]:
            return [tensor for name, tensor in tensors.items() if name.rpartition(" ")[0] == title]

        kinds = dict.fromkeys(name.rpartition(" ")[0] for name in tensors if name.rpartition(" ")[2].isdigit())
        extras = {name.split()[1]: tensor for name, tensor in tensors.items() if name.startswith("inputs ")}
        found = self.loop(
            weights,
            tensors["x"],
            row("hx"),
            reset_to=row("reset_to") or None,
            inputs={name: extra.expand(*extra.shape[:2], self.units) for name, extra in extras.items()},
            masks=dict(masks) | {kind: row(kind) for kind in kinds},
            training=self.training,
            **marks,
        )
        return found if "return_states" in self.rows else {k: v for k, v in found.items() if not k.startswith("every")}

    def drawn(self, marks: Mapping[str, Any], seed: int) -> dict[str, list[Tensor]]:
        """The masks that the layer draws after `torch.manual_seed(seed)`, in training."""
        if not self.training:
            return {}
        shape = (self.time, self.batch)
        if self.packed:
            lead = pack_padded_sequence(torch.zeros(*shape, 1), marks["lengths"], enforce_sorted=False)
            shape = (len(lead.data),)
        torch.manual_seed(seed)
        given = {row.removeprefix("given ") for row in self.rows if row.startswith("given ")}
        options = {name: value for name, value in self.options.items() if name not in given}
        masks, number = by_torch(self.loop, options, shape)
        if self.packed and "dropout" in masks:
            padded = [
                pad_packed_sequence(lead._replace(data=mask), total_length=self.time)[0] for mask in masks["dropout"]
            ]
            masks["dropout"] = padded
        return masks | counted(number, self.loop, self.options, self.time, range(self.batch))

    def of_layer(self, seed: int = 7) -> dict[str, Tensor]:
        """Outputs, states and all gradients of the layer."""
        layer, marks = self.layer(), self.call_marks()
        torch.manual_seed(seed)
        return _with_gradients(
            dict(layer.named_parameters()),
            self.tensors(),
            lambda _, tensors: self.outcome_of_layer(layer, tensors, marks),
        )

    def of_loop(self, seed: int = 7) -> dict[str, Tensor]:
        """The same of the loop, with what the layer draws after this seed."""
        weights, marks = dict(self.layer().named_parameters()), self.call_marks()
        drawn = self.drawn(marks, seed)
        return _with_gradients(
            weights, self.tensors(), lambda weights, tensors: self.outcome_of_loop(weights, tensors, marks, drawn)
        )

    def check(self, seed: int = 7, zeros: bool = False) -> dict[str, Tensor]:
        """The layer gives what the loop gives; what it gives.

        Args:
            zeros: whether an output or a gradient may be all zero, and so show nothing.
        """
        got, truth = self.of_layer(seed), self.of_loop(seed)
        assert got.keys() == truth.keys()
        errors = {name: error(got[name], truth[name]) for name in truth}
        assert {name: e for name, e in errors.items() if not e <= EXACT} == {}
        assert zeros or [name for name in truth if not truth[name].any()] == []
        return got


def mask_of(kind: str, time: int, batch: int) -> Tensor:
    """bool [time, batch]: steps that do not count are on the "left", on the "right", "holes", or whole "rows"."""
    t, b = torch.arange(time)[:, None], torch.arange(batch)
    return {
        "left": t >= 1 + b % 2,
        "right": t < time - 1 - b % 2,
        "holes": (t + b) % 3 != 1,
        "rows": (b % 2 == 1).expand(time, batch).clone(),
    }[kind]


def _with_gradients(
    weights: dict[str, Tensor], tensors: dict[str, Tensor], function: Callable[..., dict[str, Tensor]]
) -> dict[str, Tensor]:
    """What `function` gives, and the gradient of each weight and tensor, zero where there is none."""
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    found = function(weights, leaves)
    weighted([*found.values()]).backward()
    grads = {
        f"grad of {name}": torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in (leaves | weights).items()
    }
    return {name: out.detach() for name, out in found.items()} | grads


def _numbers(name: str) -> torch.Generator:
    """Each tensor has numbers of its own, whatever is drawn before it."""
    return torch.Generator().manual_seed(sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31)
