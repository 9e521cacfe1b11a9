"""Layers with a projection where the loop is not one over m: h = P m is a product inside each step.

The cell has one more gate, whose recurrent weights are P: they multiply m, what the cell makes of its first state, and
no mask does.  The kernels are those of steps with products inside (staged.py), of as many units as the layer has:
what is as wide as the projection has zeros behind it there, up to the units.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from whorl.cells.cell import MOST_GATES, Graph
from whorl.cells.expr import product, var
from whorl.engines.base import Grads
from whorl.engines.cuda.layers import Layers
from whorl.engines.cuda.projected import beyond
from whorl.problem import Call, Outcome, Plan, Problem
from whorl.weights import LayerWeights, join, split

_Change = Callable[[Tensor], Tensor]


def reason(problem: Problem) -> str:
    """Why a problem's projection is to become a product inside each step, in words; empty where it is not."""
    form = problem.form
    return ", ".join(beyond(problem)) if form.projection and not form.cell.projection else ""


def obstacles(problem: Problem) -> list[str]:
    """Why a projection that is to be a product inside each step is not, each a sentence."""
    form, taken, found = problem.form, reason(problem), []
    width, units, gates = form.projection, form.units, len(form.cell.gates)
    if taken and width > units:
        found.append(f"beside a projection ({width} wide) of fewer units ({units}) these kernels take no {taken}")
    if taken and gates == MOST_GATES:
        found.append(f"beside a projection, of a cell of {gates} gates, these kernels take no {taken}")
    return found


@lru_cache(maxsize=8192)
def with_product(problem: Problem) -> Problem:
    """The problem that the kernels run: of a cell that projects, where the projection is a product inside the step."""
    if not reason(problem) or obstacles(problem):
        return problem
    return replace(problem, form=replace(problem.form, cell=projecting(problem.form.cell)))


def projecting(cell: Graph) -> Graph:
    """The cell with one more gate, whose product gives the first state of what the cell makes of it."""
    gate = "p"
    while gate in (*cell.gates, *cell.inputs):
        gate += "p"
    m, *others = cell.outputs
    h = var(f"x.{gate}") + product(gate, m)  # x and the biases of that gate are zero
    name, gates = f"projected_{cell.name}", (*cell.gates, gate)
    return replace(cell, name=name, gates=gates, outputs=(h, *others), projection=gate)


class ProjectedInside(Layers):
    """A plan's kernels on one device, for a problem that `with_product` changes."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(replace(plan, problem=with_product(plan.problem)), device)
        self.whole = replace(self.form, projection=0)  # of P's weights, which are among the recurrent ones
        self._given = plan.problem.form
        self._behind = self.form.units - self.form.projection
        """Zeros behind what is as wide as the projection."""

    def forward(self, call: Call) -> Outcome:
        made = super().forward(self._padded(call))
        finals, sequences = _first(self._cut, made.finals), _first(self._above, made.sequences)
        return made._replace(y=self._above(made.y), finals=tuple(finals), sequences=tuple(sequences))

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        states, inner = 1 + len(self.cell.states), self._padded(call)
        to_y, to_finals, to_sequences = _first(self._below, grads[:1]), grads[1:states], grads[states:]
        given = [*to_y, *_first(self._filled, to_finals), *_first(self._below, to_sequences)]
        found: Any = iter(super().backward(inner, self._below(y), saved, given))
        to_x, to_states = next(found), [next(found) for _ in call.states]
        to_weights = map(self._cut_weights, split(self.whole, [next(found) for _ in inner.weights]))
        to_dropout, to_reset = [next(found) for _ in call.dropout], [next(found) for _ in call.reset_to]
        to_inputs, to_noise = [next(found) for _ in call.inputs], [next(found) for _ in call.noise]
        return [
            to_x, *_first(self._cut, to_states), *join([*to_weights]), *to_dropout, *_first(self._cut, to_reset),
            *to_inputs, *self._of_noise(self._cut, lambda masks: masks[:-1], to_noise),
        ]  # fmt: skip

    def _padded(self, call: Call) -> Call:
        """The call as the kernels take it."""
        return call._replace(
            states=tuple(_first(self._filled, call.states)),
            weights=tuple(join([*map(self._filled_weights, split(self._given, call.weights))])),
            reset_to=tuple(_first(self._filled, call.reset_to)),
            noise=tuple(self._of_noise(self._filled, lambda masks: pad(masks, (0, 0, 0, 0, 0, 1)), call.noise)),
        )

    def _filled_weights(self, own: LayerWeights) -> LayerWeights:
        """With a gate more, which has P."""
        units, ih, hr = self.form.units, own.ih, own.hr
        assert hr is not None, "the form has a projection"
        hh = hr.new_empty(0, len(hr)) if own.hh is None else own.hh
        of_r = hr.new_empty(0) if own.hh is None and self.form.bias else own.bias_hh
        most = max(units, self._behind * len(hh) // units, ih.shape[1])
        nothing = hr.new_zeros(most * units)  # all that is needed, in one launch

        def zeros(rows: int, columns: int) -> Tensor:
            return nothing[: rows * columns].view(rows, columns)

        def longer(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else torch.cat([bias, nothing[:units]])

        wide = torch.cat([hh, zeros(len(hh), self._behind)], 1)
        return LayerWeights(
            torch.cat([ih, zeros(units, ih.shape[1])]), torch.cat([wide, hr, zeros(self._behind, units)]),
            longer(own.bias_ih), longer(of_r), None, own.vectors,
        )  # fmt: skip

    def _cut_weights(self, grads: LayerWeights) -> LayerWeights:
        """The gradients of the layer's own weights, from those of `_filled_weights`."""
        (ih, hh, of_x, of_r, *_), width = grads, self.form.projection
        assert hh is not None, "P is there"
        rows, recurrent = len(ih) - self.form.units, len(hh) - self.form.units
        return LayerWeights(
            ih[:rows], self._cut(hh[:recurrent]) if recurrent else None, None if of_x is None else of_x[:rows],
            None if of_r is None or not recurrent else of_r[:recurrent], hh[recurrent : recurrent + width],
            grads.vectors,
        )  # fmt: skip

    def _filled(self, narrow: Tensor) -> Tensor:
        """[..., projection] with zeros behind it, [..., units]."""
        return pad(narrow, (0, self._behind))

    def _cut(self, wide: Tensor) -> Tensor:
        """[..., units] without what is behind the projection."""
        return wide[..., : self.form.projection].contiguous()

    def _above(self, y: Tensor) -> Tensor:
        directions = self.form.directions
        return self._cut(y.unflatten(-1, (directions, -1))).flatten(-2)

    def _below(self, grad: Tensor) -> Tensor:
        return self._filled(grad.unflatten(-1, (self.form.directions, -1))).flatten(-2)

    def _of_noise(self, of_h: _Change, by_gate: _Change, masks: Sequence[Any]) -> list[Any]:
        """`Call.noise`, or its gradients, with masks of h and those of x by gate changed."""
        made, every = [*masks], 2 + len(self.cell.states)
        for place, mask in enumerate(masks):
            if mask is None or not mask.dim():
                continue
            if place % every in (1, 2):  # of what enters the recurrent products, and of the zoneout of the first state
                made[place] = of_h(mask)
            elif place % every == 0 and mask.dim() == 3:
                made[place] = by_gate(mask)
        return made


def _first(change: _Change, tensors: Sequence[Any]) -> list[Any]:
    """Tensors of each state, or of y alone, with that of h changed where it is there."""
    return [change(one) if place == 0 and one is not None else one for place, one in enumerate(tensors)]
