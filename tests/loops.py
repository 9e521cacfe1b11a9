"""Recurrent layers as their papers write them: one sequence, one step and one gate after the other, in plain torch.

The truth for the options of whorl's layers.  Nothing here is whorl's or calls it: what an option means stands here a
second time, in another way of writing, so that the two can differ.  Sequences are looked at one by one and what does
not count is never read, so there is no masking by zero; a gate's product is a product of its own.

Everything is in one order: x [time, batch, inputs], states [layers x directions, batch, width].  Random numbers are
given, never drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = {"LSTM": "i f g o", "GRU": "r z n", "RNN": "n"}
STATES = {"LSTM": "h c", "GRU": "h", "RNN": "h"}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "softplus": F.softplus,
    "hard_sigmoid": lambda v: F.relu6(v + 3) / 6,
    "linear": lambda v: v,
}
Row = dict[str, Tensor]
Step = Callable[..., Row]


@dataclass
class Loop:
    """A layer by the arguments of its constructor, without its weights.

    Args:
        kind: "LSTM", "GRU" or "RNN"; for any other cell give `step` and what comes after it.
        step: (loop, x, r, s, v, e, hold) -> states; x[gate] and r[gate] are the projections, r(gate, operand) is a
            product with something else, s[state] the states before, v[name] the vectors, e[name] the extra inputs, and
            hold(state, value) is the value that this state may have.
    """

    kind: str
    inputs: int
    units: int
    num_layers: int = 1
    bias: bool = True
    bidirectional: bool = False
    proj_size: int = 0
    nonlinearity: str = "tanh"
    recurrent_dropout_mode: str = "gate"
    zoneout: Any = 0.0
    layer_norm: Any = False
    peephole: bool = False
    coupled: bool = False
    clip: Any = None
    reset_after: bool = True
    activation: Any = None
    recurrent_activation: Any = None
    step: Step | None = None
    gates: str = ""
    states: str = ""
    x_only: str = ""
    apart: str = ""
    """Gates whose recurrent weights multiply something else than the first state."""

    def __post_init__(self) -> None:
        if self.step is None:
            self.step = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[self.kind]
            self.gates = "i g o" if self.coupled else GATES[self.kind]
            self.states = STATES[self.kind]
            self.apart = "" if self.reset_after or self.kind != "GRU" else "n"
        self.all_gates = self.gates.split()
        self.recurrent = [gate for gate in self.all_gates if gate not in self.x_only.split()]
        self.all_states = self.states.split()
        self.directions = 2 if self.bidirectional else 1
        parts = "x r c" if self.kind == "LSTM" else "x r"
        self.norms = (parts if self.layer_norm is True else self.layer_norm or "").split()
        self.act = _function(self.activation, self.nonlinearity if self.kind == "RNN" else "tanh")
        self.gate_act = _function(self.recurrent_activation, "sigmoid")

    def width(self, state: str) -> int:
        return self.proj_size if self.proj_size and state == self.all_states[0] else self.units

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        x: Tensor,
        hx: Sequence[Tensor] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        reset_to: Sequence[Tensor] | None = None,
        inputs: Mapping[str, Tensor] | None = None,
        masks: Mapping[str, Sequence[Tensor]] | None = None,
        training: bool = True,
    ) -> dict[str, Tensor]:
        """The output, each final state as "final h", and each state of each step of the last layer as "every h".

        Args:
            weights: by the names of the layer's parameters.
            masks: by the name of the option, for each layer and direction.
        """
        time, batch = x.shape[:2]
        given, finals = masks or {}, {state: [] for state in self.all_states}
        below: list[list[Tensor]] = [[x[t, b] for t in range(time)] for b in range(batch)]
        every: dict[str, list[list[list[Tensor]]]] = {}
        for layer in range(self.num_layers):
            outs: list[list[list[Tensor]]] = []
            every = {state: [] for state in self.all_states}
            for direction in range(self.directions):
                index = layer * self.directions + direction
                own = _own(weights, f"_l{layer}" + "_reverse" * direction)
                if "weight_drop" in given:
                    own["weight_hh"] = own["weight_hh"] * given["weight_drop"][index]
                by_gate = {kind: _by_gate(own, kind, self.units) for kind in ("ih", "hh")}
                rows = []
                for b in range(batch):
                    sequence = _Sequence(self, own, by_gate, index, b, given, training)
                    sequence.end = time if lengths is None else lengths[b]
                    sequence.valid = [mask is None or bool(mask[t, b]) for t in range(time)]
                    sequence.cut = [reset is not None and bool(reset[t, b]) for t in range(time)]
                    sequence.extras = [{name: e[t, b] for name, e in (inputs or {}).items()} for t in range(time)]
                    zero = {state: x.new_zeros(self.width(state)) for state in self.all_states}
                    sequence.first = zero if hx is None else _named(self.all_states, hx, index, b)
                    sequence.to = zero if reset_to is None else _named(self.all_states, reset_to, index, b)
                    rows.append(sequence.run(below[b], zero, backwards=direction == 1))
                outs.append([row[0] for row in rows])
                for state in self.all_states:
                    finals[state].append(torch.stack([row[1][state] for row in rows]))
                    every[state].append([[s[state] for s in row[2]] for row in rows])
            below = _beside(outs)
            if "dropout" in given and layer < self.num_layers - 1:
                between = given["dropout"][layer]
                below = [[between[t, b] * below[b][t] for t in range(time)] for b in range(batch)]
        found = {"output": _stacked(below)}
        found |= {f"final {state}": torch.stack(rows) for state, rows in finals.items()}
        return found | {f"every {state}": _stacked(_beside(rows)) for state, rows in every.items()}


class _Sequence:
    """One sequence of the batch in one layer and direction."""

    end: int
    """Its length."""
    valid: list[bool]
    cut: list[bool]
    extras: list[Row]
    first: Row
    to: Row

    def __init__(
        self, loop: Loop, own: Row, by_gate: Mapping, index: int, b: int, given: Mapping, training: bool
    ) -> None:
        self.loop, self.own, self.by_gate = loop, own, by_gate
        self.index, self.b, self.given, self.training = index, b, given, training

    def run(self, x: list[Tensor], zero: Row, backwards: bool) -> tuple[list[Tensor], Row, list[Row]]:
        """Output of each step, final states, and the states after each step."""
        name = self.loop.all_states[0]
        outputs, every = [zero[name]] * len(x), [zero] * len(x)
        s, held = self.first, zero[name]
        for t in reversed(range(self.end)) if backwards else range(self.end):
            # A reset at t cuts between t - 1 and t: whoever steps over that place in either direction loses its state.
            place = t + 1 if backwards else t
            if place < self.end and self.cut[place]:
                s = self.to
            if self.valid[t]:
                s = self.after(x[t], s, t)
                held = s[name]
            outputs[t], every[t] = held, s
        return outputs, s, every

    def after(self, x: Tensor, s: Row, t: int) -> Row:
        """The states after a step: the cell's, then the projection, then zoneout."""
        loop, own = self.loop, self.own
        first = loop.all_states[0]
        a = {gate: self.affine("ih", n, _masked(x, self._of_x(n))) for n, gate in enumerate(loop.all_gates)}
        if "x" in loop.norms:
            a = _normalised(a, own, "x")
        v = {name.removeprefix("vector_"): value for name, value in own.items() if name.startswith("vector_")}
        after = loop.step(loop, a, _Products(self, s[first], t), s, v, self.extras[t], self._hold)
        if loop.proj_size:
            after[first] = own["weight_hr"] @ after[first]
        return {state: self._zoned(state, s[state], after[state], t) for state in loop.all_states}

    def affine(self, kind: str, n: int, operand: Tensor) -> Tensor:
        """The rows of gate n of a weight times the operand, and its bias."""
        weight, bias = self.by_gate[kind][n]
        return weight @ operand if bias is None else torch.addmv(bias, weight, operand)

    def _hold(self, state: str, value: Tensor) -> Tensor:
        limit = self.loop.clip.get(state) if isinstance(self.loop.clip, Mapping) else self.loop.clip
        return value if limit is None else torch.clamp(value, -limit, limit)

    def _of_x(self, gate: int) -> Tensor | None:
        if "input_dropout" not in self.given:
            return None
        mask = self.given["input_dropout"][self.index]
        return mask[gate, self.b] if mask.dim() == 3 else mask[self.b]

    def of_h(self, gate: int, t: int) -> Tensor | None:
        if "recurrent_dropout" not in self.given:
            return None
        mask, mode = self.given["recurrent_dropout"][self.index], self.loop.recurrent_dropout_mode
        return mask[self.b] if mode == "shared" else mask[gate if mode == "gate" else t, self.b]

    def _zoned(self, state: str, before: Tensor, after: Tensor, t: int) -> Tensor:
        if f"zoneout_{state}" in self.given:
            keep = self.given[f"zoneout_{state}"][self.index][t, self.b]
        else:
            zoneout = self.loop.zoneout
            keep = zoneout.get(state, 0.0) if isinstance(zoneout, Mapping) else zoneout
            assert not (keep and self.training), "what zoneout draws must be given"
            if not keep:
                return after
        return keep * before + (1 - keep) * after


class _Products:
    """r[gate], and r(gate, operand)."""

    def __init__(self, sequence: _Sequence, h: Tensor, t: int) -> None:
        self._sequence, self._t = sequence, t
        loop = sequence.loop
        joint = [gate for gate in loop.recurrent if gate not in loop.apart.split()]
        self._values = {gate: self._product(gate, h) for gate in joint}
        if "r" in loop.norms and joint:
            self._values = _normalised(self._values, sequence.own, "r")

    def __getitem__(self, gate: str) -> Tensor:
        return self._values[gate]

    def __call__(self, gate: str, operand: Tensor) -> Tensor:
        made = {gate: self._product(gate, operand)}
        return (_normalised(made, self._sequence.own, "r") if "r" in self._sequence.loop.norms else made)[gate]

    def _product(self, gate: str, operand: Tensor) -> Tensor:
        sequence = self._sequence
        n = sequence.loop.recurrent.index(gate)
        return sequence.affine("hh", n, _masked(operand, sequence.of_h(n, self._t)))


def _lstm(loop: Loop, x: Row, r: _Products, s: Row, v: Row, e: Row, hold: Callable) -> Row:
    """Hochreiter and Schmidhuber 1997; peepholes of Gers and Schmidhuber 2000; coupled gates of Greff et al. 2015."""

    def gate(name: str, c: Tensor) -> Tensor:
        seen = x[name] + r[name]
        return loop.gate_act(seen + v[f"peephole_{name}"] * c if loop.peephole else seen)

    i = gate("i", s["c"])
    f = 1 - i if loop.coupled else gate("f", s["c"])
    c = hold("c", f * s["c"] + i * loop.act(x["g"] + r["g"]))
    out = v["c_gain"] * _centred(c) + v["c_shift"] if "c" in loop.norms else c
    return {"h": hold("h", gate("o", c) * loop.act(out)), "c": c}


def _gru(loop: Loop, x: Row, r: _Products, s: Row, v: Row, e: Row, hold: Callable) -> Row:
    """Cho et al. 2014, as torch.nn.GRU writes it and as the paper does."""
    reset, update = loop.gate_act(x["r"] + r["r"]), loop.gate_act(x["z"] + r["z"])
    n = loop.act(x["n"] + (reset * r["n"] if loop.reset_after else r("n", reset * s["h"])))
    return {"h": hold("h", (1 - update) * n + update * s["h"])}


def _rnn(loop: Loop, x: Row, r: _Products, s: Row, v: Row, e: Row, hold: Callable) -> Row:
    """Elman 1990."""
    return {"h": hold("h", loop.act(x["n"] + r["n"]))}


def _masked(value: Tensor, mask: Tensor | None) -> Tensor:
    return value if mask is None else value * mask


def _function(asked: Any, default: str) -> Callable[[Tensor], Tensor]:
    return asked if callable(asked) else FUNCTIONS[asked or default]


def _by_gate(own: Row, kind: str, units: int) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each gate."""
    weights = own[f"weight_{kind}"].split(units)
    biases = own[f"bias_{kind}"].split(units) if f"bias_{kind}" in own else [None] * len(weights)
    return [*zip(weights, biases, strict=True)]


def _normalised(values: Row, own: Row, part: str) -> Row:
    """Ba et al. 2016, over all gates and units together; a gain and a shift for each."""
    joint = _centred(torch.cat(list(values.values()))).split([len(value) for value in values.values()])
    named = zip(values, joint, strict=True)
    return {g: own[f"vector_{part}_gain_{g}"] * value + own[f"vector_{part}_shift_{g}"] for g, value in named}


def _centred(value: Tensor) -> Tensor:
    return (value - value.mean()) / torch.sqrt(value.var(unbiased=False) + 1e-5)


def _own(weights: Mapping[str, Tensor], suffix: str) -> Row:
    """The weights of one layer and direction, without its suffix."""
    return {name.removesuffix(suffix): weight for name, weight in weights.items() if name.endswith(suffix)}


def _named(states: Sequence[str], values: Sequence[Tensor], index: int, b: int) -> Row:
    return {state: value[index, b] for state, value in zip(states, values, strict=True)}


def _beside(directions: list[list[list[Tensor]]]) -> list[list[Tensor]]:
    """For each sequence and step, what the directions give side by side."""
    return [[torch.cat(parts) for parts in zip(*rows, strict=True)] for rows in zip(*directions, strict=True)]


def _stacked(rows: list[list[Tensor]]) -> Tensor:
    """[time, batch, width]"""
    return torch.stack([torch.stack(row) for row in rows], 1)
