"""Layers with a projection: the loop is that of the layer without one, and products of whole matrices do the rest.

A layer that gives h = P m, where m is what its cell makes, has the gates W x + R P m.  So its loop is a plain one over
m with the recurrent weights R P, made once a call with sums in float32, and its outputs are one product after it.  An
initial h is no P m: it enters the first step as columns of x that are zero elsewhere, beside which W has those of R.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from whorl.engines.base import Grads, as_bytes, from_bytes
from whorl.engines.cuda import source
from whorl.engines.cuda.layers import Layers, plain
from whorl.engines.cuda.products import product
from whorl.problem import EXTRAS, Call, Outcome, Plan, Problem
from whorl.weights import LayerWeights, join, split

_OVER_M = tuple(EXTRAS[name] for name in ("lengths", "mask", "reset"))
"""Options that do to m what they do to h."""


def beyond(problem: Problem) -> list[str]:
    """What of a problem with a projection a loop over m does not take, in the words of a reason."""
    form = problem.form
    marked = [*problem.additions, *["a PackedSequence"] * problem.packed]
    found = [words for words in problem.additions if words not in _OVER_M]
    if not form.cell.recurrent:
        found.append("a cell without recurrent weights")
    if problem.initial and marked:
        found.append(f"initial states with {', '.join(marked)}")
    kept = source.kept(form.cell)
    if problem.initial and (kept.apart or min(kept.sums) < 0):
        found.append(f"initial states where a gate of {form.cell.name} is not the sum of its two parts")
    if problem.dropout and marked:
        found.append(f"dropout between layers with {', '.join(marked)}")
    return found


class Projected:
    """A plan's kernels on one device, for a form with a projection.

    Args:
        make: the kernels of a plan without one.
    """

    def __init__(self, plan: Plan, device: torch.device, make: Callable[[Plan, torch.device], Layers]) -> None:
        self.problem, self.form = plan.problem, plan.problem.form
        made: dict[Problem, Layers] = {}
        self._loops = []
        for layer in range(self.form.layers):
            problem = self._loop(layer)
            if problem not in made:
                made[problem] = make(replace(plan, problem=problem), device)
            self._loops.append(made[problem])
        self.index = self._loops[0].index
        self._firsts = [*accumulate((loop.keeps + 3 for loop in self._loops), initial=0)]
        """Where among all that is saved that of each layer begins."""

    def _loop(self, layer: int) -> Problem:
        """The problem of one layer over m."""
        form, initial = self.form, self.problem.initial
        inputs = form.layer_inputs(layer) + initial * form.directions * form.projection
        constants = () if layer or initial else self.problem.constants
        alone = replace(form, inputs=inputs, projection=0, layers=1)
        return replace(self.problem, form=alone, dropout=False, constants=constants)

    def forward(self, call: Call) -> Outcome:
        x, saved = call.x, []
        finals: list[tuple[Tensor, ...]] = []
        for layer, loop in enumerate(self._loops):
            weights = self._weights(call, layer)
            m, ends, kept, _ = loop.forward(self._call(call, layer, x, weights))
            turned = [_recurrent(own)[1].t() for own in weights]
            y = self._times(m, turned)
            finals.append((self._each_times(ends[0], turned), *ends[1:]))
            if self.problem.gradient:
                saved += [*kept, as_bytes(m), as_bytes(ends[0])]
                saved += [as_bytes(y)] if layer < self.form.layers - 1 else []
            x = y * call.dropout[layer] if layer < len(call.dropout) else y
        return Outcome(y, tuple(torch.cat(of_state) for of_state in zip(*finals, strict=True)), tuple(saved))

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        form, dtype = self.form, self.problem.dtype
        directions, units, batch = form.directions, form.units, self.problem.batch
        to_y, *to_finals = (None if grad is None else plain(grad.to(dtype)) for grad in grads)
        to_starts: list[list[Tensor]] = [[] for _ in call.states]
        to_weights: list[LayerWeights] = []
        to_dropout: list[Tensor | None] = [None] * len(call.dropout)
        outer = call.x.shape[:-1]
        for layer in reversed(range(form.layers)):
            *kept, m, end = saved[self._firsts[layer] : self._firsts[layer + 1] - 1]
            m = from_bytes(m, (*outer, directions * units), dtype)
            end = from_bytes(end, (directions, batch, units), dtype)
            below, weights = call.x, self._weights(call, layer)
            if layer:
                below = from_bytes(saved[self._firsts[layer] - 1], (*outer, directions * form.projection), dtype)
            x = below * call.dropout[layer - 1] if layer and call.dropout else below
            to_h, *to_others = (
                None if to is None else to.narrow(0, layer * directions, directions) for to in to_finals
            )
            projections = [_recurrent(own)[1] for own in weights]
            to_m = None if to_y is None else self._times(to_y, projections)
            to_end = None if to_h is None else self._each_times(to_h, projections)
            inner = self._call(call, layer, x, weights)
            found: list[Any] = [*self._loops[layer].backward(inner, m, kept, [to_m, to_end, *to_others])]
            to_x, starts, rest = found[0], found[1 : 1 + len(call.states)], found[1 + len(call.states) :]
            of_inner = split(self._loops[layer].whole, rest[: len(inner.weights)])
            to_weights = [
                self._weight_gradients(direction, own, weights[direction], to_y, to_h, m, end)
                for direction, own in enumerate(of_inner)
            ] + to_weights
            inputs = form.layer_inputs(layer)
            if starts:
                to_starts[0] = [*self._to_h(to_x, inputs), *to_starts[0]]
                for place, start in enumerate(starts[1:], 1):
                    to_starts[place] = [*start, *to_starts[place]]
            to_y = None if to_x is None else to_x.narrow(-1, 0, inputs).contiguous()
            if layer and call.dropout:
                assert to_y is not None, "the input of a layer above another has a gradient"
                to_dropout[layer - 1] = to_y * below
                to_y = to_y * call.dropout[layer - 1]
        return [to_y, *(torch.stack(to) for to in to_starts), *join(to_weights), *to_dropout]

    def _weights(self, call: Call, layer: int) -> list[LayerWeights]:
        """Of both directions of a layer, as they are given."""
        first = layer * self.form.directions
        return split(self.form, call.weights)[first : first + self.form.directions]

    def _call(self, call: Call, layer: int, x: Tensor, weights: Sequence[LayerWeights]) -> Call:
        """What the loop of a layer is given."""
        form, directions = self.form, self.form.directions
        inner, states = [], tuple(state.narrow(0, layer * directions, directions) for state in call.states)
        if states:
            h, *others = (state.to(x.dtype) for state in states)
            x = torch.cat([x, *self._first_steps(h, x)], -1)
            states = (h.new_zeros(directions, h.shape[1], form.units), *others)
        for direction, own in enumerate(weights):
            hh, hr = _recurrent(own)
            columns = [hh if place == direction else torch.zeros_like(hh) for place in range(directions)]
            ih = torch.cat([own.ih, *columns], 1) if states else own.ih
            inner.append(own._replace(ih=ih, hh=product(hh, hr), hr=None))
        return Call(x, states, tuple(join(inner)), marks=call.marks)

    def _first_steps(self, h: Tensor, x: Tensor) -> list[Tensor]:
        """Of each direction the initial h at the step that it computes first, as columns of x."""
        made = [x.new_zeros(*x.shape[:-1], self.form.projection) for _ in h]
        for direction, columns in enumerate(made):
            columns[-direction] = h[direction]
        return made

    def _to_h(self, to_x: Tensor | None, inputs: int) -> list[Tensor]:
        """The gradient of the initial h of each direction, from that of `_first_steps`."""
        assert to_x is not None, "x has columns for them"
        width = self.form.projection
        columns = [to_x.narrow(-1, inputs + place * width, width) for place in range(self.form.directions)]
        return [column[-direction] for direction, column in enumerate(columns)]

    def _times(self, rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Of directions side by side the part of each times its own matrix, side by side again."""
        before, after = factors[0].shape
        made = rows.new_empty(*rows.shape[:-1], len(factors) * after)
        given, into = rows.reshape(-1, rows.shape[-1]), made.view(-1, made.shape[-1])
        for direction, factor in enumerate(factors):
            columns = given.narrow(1, direction * before, before), factor, into.narrow(1, direction * after, after)
            product(*columns, tf32=self.problem.tf32)
        return made

    def _each_times(self, states: Tensor, factors: Sequence[Tensor]) -> Tensor:
        """Of [directions, batch, ...] each times its own matrix."""
        pairs = zip(states, factors, strict=True)
        return torch.stack([product(state, factor, tf32=self.problem.tf32) for state, factor in pairs])

    def _weight_gradients(
        self, direction: int, inner: LayerWeights, own: LayerWeights, to_y: Tensor | None, to_h: Tensor | None,
        m: Tensor, end: Tensor,
    ) -> LayerWeights:  # fmt: skip
        """Of one direction of a layer, from those of its loop: R P gives R and P theirs, and so do the outputs P."""
        width, units, tf32 = self.form.projection, self.form.units, self.problem.tf32
        (hh, hr), to_both, dtype = _recurrent(own), inner.hh, self.problem.dtype
        assert to_both is not None, "the loop has the weights R P"
        to_hh = product(to_both, hr.t(), tf32=tf32, wide=True)
        to_hr = product(hh.t(), to_both, tf32=tf32, wide=True)
        if to_y is not None:
            rows = to_y.reshape(-1, to_y.shape[-1]).narrow(1, direction * width, width)
            product(rows.t(), m.view(-1, m.shape[-1]).narrow(1, direction * units, units), to_hr, True, tf32)
        if to_h is not None:
            product(to_h[direction].t(), end[direction], to_hr, True, tf32)
        inputs = own.ih.shape[1]
        if inner.ih.shape[1] > inputs:
            to_hh += inner.ih.narrow(1, inputs + direction * width, width)
        of_ih = inner.ih.narrow(1, 0, inputs)
        return inner._replace(ih=of_ih, hh=to_hh.to(dtype), hr=to_hr.to(dtype))


def _recurrent(own: LayerWeights) -> tuple[Tensor, Tensor]:
    """R and P."""
    hh, hr = own.hh, own.hr
    assert hh is not None, "the cell reads its state through the recurrent product"
    assert hr is not None, "the form has a projection"
    return hh, hr
