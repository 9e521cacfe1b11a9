"""Engine `reference`: the cell's own lines on tensors, one step after the other, in plain torch on any device.

It is the truth that the other engines are tested against.  Two-byte dtypes round only what enters a product; states
and sums are float32.

Where steps do not count (`mask`, `lengths`) nothing of them may be seen, NaN in padding included.  So each value that
enters such a step is replaced by zero before and its gradient by zero after: a `where` around the result alone would
multiply a zero gradient with an infinite derivative.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.cells.cell import Graph
from whorl.cells.graphs import Evaluator
from whorl.engines.base import Engine, Grads
from whorl.noise import Given, Noise, given
from whorl.problem import Call, Form, Outcome, Plan, Problem, autocast_is_on
from whorl.weights import LayerWeights, split


class Reference(Engine):
    name = "reference"
    summary = "plain torch, a loop over time in Python"
    recorded = True

    def obstacles(self, problem: Problem) -> list[str]:
        return []

    def forward(self, plan: Plan, call: Call) -> Outcome:
        form, sequences = plan.problem.form, plan.problem.sequences
        y, *rest = evaluate(form, call, sequences)
        count = len(form.cell.states)
        return Outcome(y, tuple(rest[:count]), (), tuple(rest[count:]))

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        return gradients(plan.problem.form, call, grads, plan.problem.sequences)


def evaluate(form: Form, call: Call, sequences: bool = False) -> list[Tensor]:
    """The output, each final state, and with `sequences` each state of each step of the last layer.

    Recorded by autograd as any torch code is; autocast changes nothing here.
    """
    with _without_autocast(call.x.device.type):
        return _evaluate(form, call, sequences)


def _evaluate(form: Form, call: Call, sequences: bool) -> list[Tensor]:
    marks = call.marks
    sizes = marks.batch_sizes.tolist() if marks.batch_sizes is not None else None
    within = None
    if marks.lengths is not None:
        within = (torch.arange(call.x.shape[0], device=call.x.device)[:, None] < marks.lengths).unsqueeze(-1)
    valid = within
    if marks.mask is not None:
        valid = marks.mask.unsqueeze(-1) if within is None else within & marks.mask.unsqueeze(-1)
    x, ends = call.x, []
    every: list[list[Tensor]] = []
    per_layer, masks = split(form, call.weights), given(form, call)
    for layer in range(form.layers):
        outs, every = [], []
        for direction in range(form.directions):
            index = layer * form.directions + direction
            sweep = _Sweep(form, call, per_layer[index], masks[index], index, sizes, within, valid)
            y, finals, states = sweep(x, sequences and layer == form.layers - 1)
            outs.append(y)
            ends.append(finals)
            every.append(states)
        x = _beside(outs)
        if call.dropout and layer < form.layers - 1:
            x = x * _where(valid, call.dropout[layer])
    finals = [torch.stack(state) for state in zip(*ends, strict=True)]
    return [x, *finals, *(_beside(states) for states in zip(*every, strict=True))]


def _beside(directions: Sequence[Tensor]) -> Tensor:
    return directions[0] if len(directions) == 1 else torch.cat(list(directions), -1)


def gradients(form: Form, call: Call, grads: Grads, sequences: bool = False) -> Sequence[Tensor]:
    """The gradient of each of `call.tensors`, given those of what `evaluate` gives; itself differentiable."""
    layout, marks = call.layout, call.marks
    outputs, pull = vjp(lambda *row: evaluate(form, Call.of(row, layout, marks), sequences), *call.tensors)
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


class _Sweep:
    """One layer in one direction.

    Args:
        index: layer x directions + direction.
        sizes: of a PackedSequence, the sequences at each step.
        within: bool [time, batch, 1], false past the end of a sequence; None where all are as long.
        valid: the same, and false where the mask has it so.
    """

    def __init__(
        self,
        form: Form,
        call: Call,
        weights: LayerWeights,
        masks: Given,
        index: int,
        sizes: list[int] | None,
        within: Tensor | None,
        valid: Tensor | None,
    ) -> None:
        self._form, self._call, self._weights, self._index = form, call, weights, index
        self._sizes, self._within, self._valid = sizes, within, valid
        layer, direction = divmod(index, form.directions)
        self._reverse, self._dtype = direction == 1, call.x.dtype
        self._wide = torch.float32 if self._dtype in (torch.float16, torch.bfloat16) else self._dtype
        like = call.x.new_empty((), dtype=self._wide)
        self._noise = Noise(form, call, masks, layer, direction, sizes, like, valid)

    def __call__(self, x: Tensor, sequences: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs in the layout of x, final states [batch, width], and each state of each step where wanted."""
        form, call, valid, noise = self._form, self._call, self._valid, self._noise
        projected = self._project(x if valid is None else torch.where(valid, x, 0.0))
        steps = self._steps(projected)
        order = reversed(range(len(steps))) if self._reverse else range(len(steps))
        extras = [self._steps(self._widened(extra)) for extra in call.inputs]
        cuts, valids = self._cuts(), None if valid is None else valid.unbind(0)
        step = _Step(form, self._weights, self._operand, projected)
        hr = None if self._weights.hr is None else self._operand(self._weights.hr)
        first, to = self._starts(call.states, projected), self._starts(call.reset_to, projected)
        rows = _Rows(first, self._sizes, self._reverse)
        held = torch.zeros_like(first[0])
        outputs: list[Tensor] = [projected] * len(steps)
        seen: list[list[Tensor]] = [[projected] * len(steps) for _ in first] if sequences else []
        for t in order:
            before = rows.states_at(t)
            if cuts is not None:
                before = [torch.where(cuts[t], r[: len(s)], s) for r, s in zip(to, before, strict=True)]
            now = valids[t] if valids is not None else None
            after = step(steps[t], before, [extra[t] for extra in extras], noise.recurrent(t), now)
            if hr is not None:
                after[0] = F.linear(self._operand(_where(now, after[0])), hr)
            after = [noise.keep(state, t, b, a) for state, (b, a) in enumerate(zip(before, after, strict=True))]
            if now is not None:
                after = [torch.where(now, a, b) for a, b in zip(after, before, strict=True)]
                held = torch.where(now, after[0], held)
            rows.states = after
            outputs[t] = after[0] if now is None else held
            for states, state in zip(seen, after, strict=False):
                states[t] = state
        ends = [state.to(self._dtype) for state in rows.finals()]
        return self._joined(outputs), ends, [self._joined(states) for states in seen]

    def _project(self, x: Tensor) -> Tensor:
        """The input product of all steps."""
        weight, bias = self._operand(self._weights.ih), self._widened(self._weights.bias_ih)
        mask = self._noise.input(x.shape[-1])
        if mask is None:
            return F.linear(self._operand(x), weight, bias)
        if self._sizes is not None:
            mask = mask[..., torch.cat([torch.arange(size, device=x.device) for size in self._sizes]), :]
        x = x.to(self._wide)
        if mask.dim() == x.dim() - (self._sizes is None):
            return F.linear(self._operand(x * mask), weight, bias)
        units = self._form.units
        biases = bias.split(units) if bias is not None else [None] * len(mask)
        gates = zip(mask, weight.split(units), biases, strict=True)
        return torch.cat([F.linear(self._operand(x * m), w, b) for m, w, b in gates], -1)

    def _cuts(self) -> Sequence[Tensor] | None:
        """For each step whether no state comes into it from the step that is processed before, [rows, 1] each."""
        reset = self._call.marks.reset
        if reset is None:
            return None
        cuts = list(self._steps(reset.unsqueeze(-1)))
        if self._within is not None:
            cuts = [cut & inside for cut, inside in zip(cuts, self._within, strict=True)]
        if not self._reverse:
            return cuts
        # The cut lies between step t and the one before; backwards it is step t - 1 that the state does not enter.
        later = [*cuts[1:], torch.zeros_like(cuts[0][:0])]
        return [F.pad(cut, (0, 0, 0, len(now) - len(cut))) for cut, now in zip(later, cuts, strict=True)]

    def _starts(self, states: Iterable[Tensor], like: Tensor) -> list[Tensor]:
        """Initial states of this layer and direction; zero where none are given."""
        given = [state[self._index].to(self._wide) for state in states]
        batch = self._call.x.shape[1] if self._sizes is None else self._sizes[0]
        widths = [self._form.state_width(index) for index in range(len(self._form.cell.states))]
        return given or [like.new_zeros(batch, width) for width in widths]

    def _steps(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.unbind(0) if self._sizes is None else tensor.split(self._sizes)

    def _joined(self, steps: list[Tensor]) -> Tensor:
        made = torch.stack(steps) if self._sizes is None else torch.cat(steps)
        return (made if self._within is None else torch.where(self._within, made, 0.0)).to(self._dtype)

    def _operand(self, tensor: Tensor) -> Tensor:
        """What enters a product: rounded to the layer's dtype, computed in the wide one."""
        return tensor.to(self._dtype).to(self._wide)

    def _widened(self, tensor: Any) -> Any:
        return None if tensor is None else tensor.to(self._wide)


def _where(valid: Tensor | None, tensor: Tensor) -> Tensor:
    """`tensor`, with zero in its rows that do not count; in its gradient too."""
    return tensor if valid is None else torch.where(valid, tensor, 0.0)


class _Step:
    """The cell's step on tensors: the input projection of one step and the states before it, to the states after."""

    def __init__(self, form: Form, weights: LayerWeights, operand: Callable[[Tensor], Tensor], like: Tensor) -> None:
        cell, units = form.cell, form.units
        self._units, self._operand = units, operand
        self._hh = operand(weights.hh) if weights.hh is not None else like.new_empty(0, 0)
        self._bias_hh = None if weights.bias_hh is None else weights.bias_hh.to(like.dtype)
        self._evaluator = _evaluator(cell)
        self._constants = self._evaluator.constants(like)
        self._x, self._r = [f"x.{gate}" for gate in cell.gates], [f"r.{gate}" for gate in cell.recurrent]
        self._s, self._e = [f"s.{state}" for state in cell.states], [f"e.{name}" for name in cell.inputs]
        named = zip(cell.vectors, weights.vectors, strict=True)
        self._vectors = {f"v.{name}": vector.to(like.dtype) for name, vector in named}
        self._place = {gate: index for index, gate in enumerate(cell.recurrent)}
        biases = self._bias_hh.split(units) if self._bias_hh is not None else [None] * len(self._place)
        weight = self._hh.split(units) if self._place else ()
        self._by_gate = dict(zip(self._place, zip(weight, biases, strict=True), strict=True))

    def __call__(
        self, projected: Tensor, before: list[Tensor], extras: list[Tensor], noise: Tensor | None, valid: Tensor | None
    ) -> list[Tensor]:
        """The states after the step, before a projection.

        Args:
            projected: [batch, gates x units].
            noise: multiplies what enters the recurrent product, [batch, width] or [recurrent gates, batch, width].
            valid: bool [batch, 1], the rows that count; None where all do.
        """
        values = {name: _where(valid, vector) for name, vector in self._vectors.items()}
        values.update(zip(self._x, _where(valid, projected).split(self._units, -1), strict=True))
        before = [_where(valid, state) for state in before]
        values.update(zip(self._s, before, strict=True))
        values.update(zip(self._e, [_where(valid, extra) for extra in extras], strict=True))
        if self._r:
            values.update(zip(self._r, self._recurrent(before[0], noise, valid), strict=True))

        def product(kind: str, gate: str, operand: Tensor) -> Tensor:
            assert kind == "product", "only a gradient has pulls, and autograd makes its own"
            # a number is the same for every sequence, but what it is multiplied with is not
            operand = operand.expand(*projected.shape[:-1], operand.shape[-1] if operand.dim() else 1)
            return self._product(gate, operand, noise, valid)

        after = self._evaluator(values, self._constants, product)
        shape = (*projected.shape[:-1], self._units)
        return [state if state.shape == shape else state.expand(shape) for state in after]

    def _recurrent(self, h: Tensor, noise: Tensor | None, valid: Tensor | None) -> Sequence[Tensor]:
        """`r.i` of each recurrent gate i."""
        if noise is None or noise.dim() == h.dim():
            entering = self._operand(h if noise is None else h * noise)
            return _where(valid, F.linear(entering, self._hh, self._bias_hh)).split(self._units, -1)
        return [self._product(gate, h, noise, valid) for gate in self._by_gate]

    def _product(self, gate: str, operand: Tensor, noise: Tensor | None, valid: Tensor | None) -> Tensor:
        weight, bias = self._by_gate[gate]
        operand = _where(valid, operand.expand(*operand.shape[:-1], weight.shape[-1]))
        if noise is not None:
            operand = operand * (noise if noise.dim() == operand.dim() else noise[self._place[gate]])
        return _where(valid, F.linear(self._operand(operand), weight, bias))


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
