"""Engine `reference`: the cell's own lines on tensors, one step after the other, in plain torch on any device.

It is the truth that the other engines are tested against.  Two-byte dtypes round only what enters a product; states
and sums are float32.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.cells.cell import Graph
from whorl.cells.graphs import Evaluator
from whorl.engines.base import Engine, Grads
from whorl.problem import Call, Form, Outcome, Plan, Problem, autocast_is_on
from whorl.weights import LayerWeights, split


class Reference(Engine):
    name = "reference"
    summary = "plain torch, a loop over time in Python"
    recorded = True

    def obstacles(self, problem: Problem) -> list[str]:
        return [f"the cell {problem.form.cell.name} takes extra inputs"] if problem.form.cell.inputs else []

    def forward(self, plan: Plan, call: Call) -> Outcome:
        y, *finals = evaluate(plan.problem.form, call)
        return Outcome(y, tuple(finals), ())

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        return gradients(plan.problem.form, call, grads)


def evaluate(form: Form, call: Call) -> list[Tensor]:
    """The output and each final state, recorded by autograd as any torch code is; autocast changes nothing here."""
    with _without_autocast(call.x.device.type):
        return _evaluate(form, call)


def _evaluate(form: Form, call: Call) -> list[Tensor]:
    sizes = call.batch_sizes.tolist() if call.batch_sizes is not None else None
    x, ends = call.x, []
    per_layer = split(form, call.weights)
    for layer in range(form.layers):
        outs = []
        for direction in range(form.directions):
            index = layer * form.directions + direction
            start = [state[index] for state in call.states]
            y, finals = _sweep(form, x, start, per_layer[index], sizes, reverse=direction == 1)
            outs.append(y)
            ends.append(finals)
        x = outs[0] if form.directions == 1 else torch.cat(outs, -1)
        if call.dropout and layer < form.layers - 1:
            x = x * call.dropout[layer]
    return [x, *(torch.stack(state) for state in zip(*ends, strict=True))]


def gradients(form: Form, call: Call, grads: Grads) -> Sequence[Tensor]:
    """The gradient of each of `call.tensors`, given those of the output and final states; itself differentiable."""
    outputs, pull = vjp(lambda *row: evaluate(form, Call.of(row, call.layout, call.batch_sizes)), *call.tensors)
    return pull([torch.zeros_like(out) if grad is None else grad for out, grad in zip(outputs, grads, strict=True)])


def vjp(function: Callable[..., Any], *at: Tensor) -> tuple[Any, Callable[..., tuple[Tensor, ...]]]:
    """The value of a function and its pullback; works inside autograd, torch.func, operators and autocast alike."""
    kind = at[0].device.type
    with _without_autocast(kind):
        value, pullback = torch.func.vjp(function, *at)[:2]

    def pull(*grads: Any) -> tuple[Tensor, ...]:
        with _without_autocast(kind):
            return pullback(*grads)

    return value, pull


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if autocast_is_on(kind) else nullcontext()


@lru_cache(maxsize=256)
def _evaluator(cell: Graph) -> Evaluator:
    return Evaluator(cell.outputs)


def _sweep(
    form: Form,
    x: Tensor,
    start: list[Tensor],
    weights: LayerWeights,
    sizes: list[int] | None,
    reverse: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction: outputs in the layout of x, and final states [batch, width]."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype

    def operand(tensor: Tensor) -> Tensor:
        """What enters a product: rounded to the layer's dtype, computed in the wide one."""
        return tensor.to(x.dtype).to(wide)

    def widened(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(wide)

    hh, hr, bias_hh = operand(weights.hh), widened(weights.hr), widened(weights.bias_hh)
    projected = F.linear(operand(x), operand(weights.ih), widened(weights.bias_ih))
    steps: Sequence[Tensor] = projected.unbind(0) if sizes is None else projected.split(sizes)
    batch = x.shape[1] if sizes is None else sizes[0]
    widths = [form.state_width(index) for index in range(len(form.cell.states))]
    first = [s.to(wide) for s in start] if start else [projected.new_zeros(batch, width) for width in widths]

    step = _Step(form, hh, bias_hh, weights.vectors, operand, projected)
    rows = _Rows(first, sizes, reverse)
    outputs: list[Tensor] = [projected] * len(steps)
    for t in reversed(range(len(steps))) if reverse else range(len(steps)):
        after = step(steps[t], rows.states_at(t))
        if hr is not None:
            after[0] = F.linear(operand(after[0]), hr)
        rows.states = after
        outputs[t] = after[0]
    y = torch.stack(outputs) if sizes is None else torch.cat(outputs)
    return y.to(x.dtype), [state.to(x.dtype) for state in rows.finals()]


class _Step:
    """The cell's step on tensors: the input projection of one step and the states before it, to the states after."""

    def __init__(
        self,
        form: Form,
        hh: Tensor,
        bias_hh: Tensor | None,
        vectors: Sequence[Tensor],
        operand: Callable[[Tensor], Tensor],
        like: Tensor,
    ) -> None:
        cell, units = form.cell, form.units
        self._units, self._hh, self._bias_hh, self._operand = units, hh, bias_hh, operand
        self._evaluator = _evaluator(cell)
        self._constants = self._evaluator.constants(like)
        self._x, self._r = [f"x.{gate}" for gate in cell.gates], [f"r.{gate}" for gate in cell.recurrent]
        self._s = [f"s.{state}" for state in cell.states]
        named = zip(cell.vectors, vectors, strict=True)
        self._vectors = {f"v.{name}": vector.to(like.dtype) for name, vector in named}
        biases = bias_hh.split(units) if bias_hh is not None else [None] * len(cell.recurrent)
        self._by_gate = dict(zip(cell.recurrent, zip(hh.split(units), biases, strict=True), strict=True))

    def __call__(self, projected: Tensor, before: list[Tensor]) -> list[Tensor]:
        values = dict(self._vectors)
        values.update(zip(self._x, projected.split(self._units, -1), strict=True))
        values.update(zip(self._s, before, strict=True))
        if self._r:
            product = F.linear(self._operand(before[0]), self._hh, self._bias_hh)
            values.update(zip(self._r, product.split(self._units, -1), strict=True))
        after = self._evaluator(values, self._constants, self._product)
        shape = (*projected.shape[:-1], self._units)
        return [state if state.shape == shape else state.expand(shape) for state in after]

    def _product(self, kind: str, gate: str, operand: Tensor) -> Tensor:
        assert kind == "product", "only a gradient has pulls, and autograd makes its own"
        weight, bias = self._by_gate[gate]
        return F.linear(self._operand(operand.expand(*operand.shape[:-1], weight.shape[-1])), weight, bias)


class _Rows:
    """The states of the sequences that are alive: all of them where nothing is packed.

    A packed batch is sorted by length: forward, sequences end from the back; reversed, they begin there.
    """

    def __init__(self, first: list[Tensor], sizes: list[int] | None, reverse: bool) -> None:
        self._first, self._sizes = first, sizes
        self._ended: list[list[Tensor]] = []
        self.states = [s[: sizes[-1]] for s in first] if sizes is not None and reverse else first

    def states_at(self, t: int) -> list[Tensor]:
        if self._sizes is None:
            return self.states
        alive, now = self.states[0].shape[0], self._sizes[t]
        if now < alive:
            self._ended.append([s[now:] for s in self.states])
            self.states = [s[:now] for s in self.states]
        elif now > alive:
            self.states = [torch.cat([s, f[alive:now]]) for s, f in zip(self.states, self._first, strict=True)]
        return self.states

    def finals(self) -> list[Tensor]:
        if not self._ended:
            return self.states
        pieces = [self.states, *reversed(self._ended)]
        return [torch.cat(state) for state in zip(*pieces, strict=True)]
