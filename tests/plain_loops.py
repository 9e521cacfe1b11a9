"""Recurrent layers written out as papers have them: one sequence, one step, one product of a gate at a time.

Nothing here is whorl's but the parameters, which are read by their names, so that a wrong name, shape or order shows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import whorl
from comparison import flat, weighted

States = tuple[Tensor, ...]
Step = Callable[..., Sequence[Any]]
"""(weights, x [inputs], states before, extra inputs) to the states after."""


class Weights(SimpleNamespace):
    """Of one layer and direction, each by the name of its gate.

    W, U: of the input and of the recurrent product; bW, bU: their biases; b: the sum of those that a gate has.
    v: vectors by name.
    """

    def __init__(self, layer: torch.nn.Module, suffix: str, gates: str, recurrent: str) -> None:
        def rows(name: str, names: str, missing: float | None = None) -> SimpleNamespace:
            parts: Any = [missing] * len(names.split())
            if names and hasattr(layer, name + suffix):
                parts = getattr(layer, name + suffix).split(layer.hidden_size)
            return SimpleNamespace(**dict(zip(names.split(), parts, strict=True)))

        W, bW = rows("weight_ih", gates), rows("bias_ih", gates, 0.0)
        U, bU = rows("weight_hh", recurrent), rows("bias_hh", recurrent, 0.0)
        b = SimpleNamespace(**{gate: getattr(bW, gate) + getattr(bU, gate, 0.0) for gate in gates.split()})
        v = SimpleNamespace()
        for name, parameter in layer.named_parameters():
            if name.startswith("vector_") and name.endswith(suffix):
                setattr(v, name.removeprefix("vector_").removesuffix(suffix), parameter)
        super().__init__(W=W, U=U, bW=bW, bU=bU, b=b, v=v)


def loop(
    layer: torch.nn.Module,
    step: Step,
    gates: str,
    recurrent: str,
    x: Tensor,
    hx: Sequence[Tensor],
    lengths: Sequence[int] | None = None,
    reset: Tensor | None = None,
    inputs: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """The output [time, batch, directions x units] and each final state, of a layer that takes time first.

    Args:
        hx: each initial state [layers x directions, batch, units].
    """
    time, batch, _ = x.shape
    ends: list[list[States]] = []
    for index in range(layer.num_layers):
        outs = []
        for direction, suffix in enumerate(["", "_reverse"][: 1 + layer.bidirectional]):
            weights = Weights(layer, f"_l{index}{suffix}", gates, recurrent)
            columns, finals = [], []
            for row in range(batch):
                length = time if lengths is None else lengths[row]
                states = tuple(state[len(ends), row] for state in hx)
                extra = {name: tensor[:, row] for name, tensor in (inputs or {}).items()}
                cuts = [False] * time if reset is None else reset[:, row].tolist()
                column, states = _sweep(weights, step, x[:length, row], states, extra, cuts, direction == 1)
                columns.append(torch.cat([column, column.new_zeros(time - length, layer.hidden_size)]))
                finals.append(states)
            outs.append(torch.stack(columns, 1))
            ends.append(finals)
        x = torch.cat(outs, -1)
    return [x] + [torch.stack([torch.stack([s[i] for s in rows]) for rows in ends]) for i in range(len(hx))]


def _sweep(
    weights: Weights, step: Step, x: Tensor, states: States, extra: dict[str, Tensor], cuts: list[bool], back: bool
) -> tuple[Tensor, States]:
    """One sequence in one direction; a cut at t lies between t - 1 and t, from whichever side one comes."""
    length, outs = len(x), {}
    for t in reversed(range(length)) if back else range(length):
        edge = t + 1 if back else t
        if edge < length and cuts[edge]:
            states = tuple(torch.zeros_like(state) for state in states)
        after = step(weights, x[t], states, SimpleNamespace(**{name: value[t] for name, value in extra.items()}))
        states = tuple(torch.as_tensor(a, dtype=x.dtype).expand_as(s) for a, s in zip(after, states, strict=True))
        outs[t] = states[0]
    return torch.stack([outs[t] for t in range(length)]) if length else states[0].new_zeros(0, len(states[0])), states


class Projection(torch.Tensor):
    """`r.n` as a tensor, which can be called as in a step; what is computed from it is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(weight: Tensor, bias: Any, h: Tensor) -> "Projection":
        made = torch.nn.functional.linear(h, weight).add(bias).as_subclass(Projection)
        made.again = lambda a: torch.nn.functional.linear(a.expand_as(h), weight) + bias
        return made

    def __call__(self, a: Tensor) -> Tensor:
        return self.again(a)


def step_of(cell: whorl.Cell) -> Step:
    """A cell's own lines as such a step: they take tensors too."""

    def step(w: Weights, x: Tensor, states: States, extra: SimpleNamespace) -> list[Any]:
        recurrent = [gate for gate in cell.gates if gate not in cell.x_only]
        projected = {gate: getattr(w.W, gate) @ x + getattr(w.bW, gate) for gate in cell.gates}
        r = {gate: Projection.of(getattr(w.U, gate), getattr(w.bU, gate), states[0]) for gate in recurrent}
        names = SimpleNamespace(**projected, **vars(extra)), SimpleNamespace(**r)
        s = SimpleNamespace(**dict(zip(cell.states, states, strict=True)))
        after = cell(*names, s, w.v) if cell.vectors else cell(*names, s)
        return [after[name] for name in cell.states]

    return step


def gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Tensor], keep_graph: bool = False) -> dict[str, Tensor]:
    """Each output, and the gradient of each leaf for a loss that gives every element of each output its own."""
    loss, inputs = weighted(outputs), list(leaves.values())
    grads = torch.autograd.grad(loss, inputs, retain_graph=keep_graph, allow_unused=True, materialize_grads=True)
    found = {f"output {index}": out.detach() for index, out in enumerate(outputs)}
    return found | {f"grad of {name}": grad for name, grad in zip(leaves, grads, strict=True)}


@dataclass(frozen=True)
class Case:
    """How to make a layer, its step as its paper writes it, and the names that it works on."""

    make: Callable[..., nn.Module]
    step: Step
    gates: str
    states: str = "h"
    recurrent: str | None = None
    """Gates that have recurrent weights, where not all have."""
    vectors: str = ""
    inputs: str = ""

    @property
    def recurrent_gates(self) -> str:
        return self.gates if self.recurrent is None else self.recurrent


def layer_of(cell: whorl.Cell, engine: str = "auto") -> Callable[..., nn.Module]:
    return lambda *args, **kwargs: whorl.Recurrent(cell, *args, engine=engine, **kwargs)


def case_of(cell: whorl.Cell, engine: str = "auto") -> Case:
    """A cell whose own lines are the paper: they run on tensors."""
    recurrent = [gate for gate in cell.gates if gate not in cell.x_only]
    names = (" ".join(part) for part in (cell.gates, cell.states, recurrent, cell.vectors, cell.inputs))
    return Case(layer_of(cell, engine), step_of(cell), *names)


SIZES = {
    "both directions, 2 layers, lengths, resets": dict(time=6, batch=4, inputs=5, units=7, layers=2),
    "one of each": dict(time=1, batch=1, inputs=1, units=1),
    "no bias, inputs of width 1": dict(time=3, batch=2, inputs=3, units=33, bias=False, width=1),
}


class Drawn:
    """A layer with drawn weights (vectors too, which begin alike) and what it is called with, in float64.

    Args:
        width: of the extra inputs; the units for 0.
    """

    def __init__(
        self,
        case: Case,
        time: int = 5,
        batch: int = 3,
        inputs: int = 4,
        units: int = 6,
        layers: int = 1,
        bias: bool = True,
        width: int = 0,
    ) -> None:
        torch.manual_seed(1)
        self.case = case
        sizes = dict(num_layers=layers, bidirectional=layers == 2, bias=bias)
        self.layer = case.make(inputs, units, **sizes, dtype=torch.float64)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=units**-0.5)
        self.x = torch.randn(time, batch, inputs, dtype=torch.float64)
        self.inputs = {
            name: torch.randn(time, batch, width or units, dtype=torch.float64) for name in case.inputs.split()
        }
        rows = layers * (1 + (layers == 2))
        self.hx = [torch.randn(rows, batch, units, dtype=torch.float64) for _ in case.states.split()]
        if "n" in case.states:  # what others are divided by
            place = case.states.split().index("n")
            self.hx[place] = self.hx[place].abs()

    def leaves(self) -> dict[str, Tensor]:
        """Everything that a gradient flows to, by name."""
        states = {f"state {index}": state for index, state in enumerate(self.hx)}
        found = dict(self.layer.named_parameters()) | {"x": self.x} | states | self.inputs
        return {name: tensor.requires_grad_() for name, tensor in found.items()}

    def __call__(self, **options: Any) -> list[Tensor]:
        """What the layer gives: the output and each final state."""
        return flat(self.layer(self.x, packed(self.hx), inputs=self.inputs or None, **options))

    def loop(self, **options: Any) -> list[Tensor]:
        """What the paper gives."""
        case = self.case
        return loop(
            self.layer, case.step, case.gates, case.recurrent_gates, self.x, self.hx, inputs=self.inputs, **options
        )


def packed(states: Sequence[Tensor]) -> Any:
    """States as hx has them: one alone, several in a tuple."""
    return tuple(states) if len(states) > 1 else states[0]
