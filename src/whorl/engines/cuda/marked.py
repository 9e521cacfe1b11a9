"""How a call with marks, zoneout or recurrent dropout runs where Python's time counts: as `plain` runs.

Lengths, a mask and resets, masks that are drawn, and what Keras' layers ask for.  Of one of those a plain training step
of LSTM took the host 355 us, one with a mask 677 as `layers` runs it and 534 so, one with recurrent dropout by gate 902
and 726 (AMD EPYC, without kernels and products; medians of 3,000): 33 operations of torch, 55 and 37, 85 and 52.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import Grads, from_bytes
from whorl.engines.cuda.aligned import Made
from whorl.engines.cuda.layers import Layers, exact
from whorl.engines.cuda.options import Options, expected, is_by_gate, is_ordered
from whorl.engines.cuda.plain import Kept, Plain, Room, is_plain_cell
from whorl.engines.cuda.products import Each, better_together
from whorl.engines.cuda.source import BY_GATE, Features
from whorl.engines.cuda.tape import Tape
from whorl.problem import Call, Marks, Outcome, Problem


def is_marked(problem: Problem) -> bool:
    """Lengths, a mask, resets, masks drawn, or given that all steps share; and nothing else beyond a plain call."""
    form, extras = problem.form, set(problem.extras)
    given, drawn = "dropout_masks" in extras, "drawn" in extras
    by_step = given and form.recurrent_dropout_mode == "step"
    mixed = (given and (drawn or form.zoneout)) or (drawn and form.input_dropout)
    if problem.packed or by_step or mixed or not extras <= {*_MARKS, "dropout_masks", "drawn"}:
        return False
    return bool(extras or form.zoneout) and is_plain_cell(form.cell)


_MARKS = ("lengths", "mask", "reset")


class OfWhole(NamedTuple):
    """How the gradient of the recurrent weights of some gates is made, of what entered all steps; places are bytes."""

    apart: bool
    """The gradients of these gates are among those that are apart."""
    first: int
    """Where the first of the gates begins in a row of gradients."""
    into: int
    """Where its weights begin."""
    over: Made | Each


class Marked(Plain):
    """A plan's kernels, for a problem that `is_marked`.

    Of given masks it takes those of the recurrent product alone, and without a gradient; else `Layers` runs, which
    reads what forward left here as its own.
    """

    def _features(self) -> Features:
        most = expected(self.problem)
        zoneout = () if "dropout_masks" in self.problem.extras or not any(most.zoneout) else most.zoneout
        order = most.order and is_ordered(self.problem.batch)
        return most._replace(order=order, zoneout=zoneout, noise_gradient=False, zoneout_gradient=False)

    def by_tape(self, call: Call) -> bool:
        wanted = call.noise and self.problem.gradient and "noise" not in self.problem.constants
        return self._takes(call) and not wanted and super().by_tape(call)

    def _named(self, tape: Tape) -> Call:
        form, problem = self.form, self.problem
        _, batch, time, _ = self.sizes
        call, wide = super()._named(tape), (batch, form.units)
        shape = (len(form.cell.recurrent), *wide) if is_by_gate(form) else wide
        absent: Any = torch.empty(())
        noise: list[Any] = []
        for _ in range(form.layers * form.directions * ("dropout_masks" in problem.extras)):
            noise += [absent, tape.given(shape, torch.float32), *[absent] * len(form.cell.states)]
        kinds = {"lengths": ((batch,), torch.int64)} | dict.fromkeys(("mask", "reset"), ((time, batch), torch.bool))
        marks = {name: tape.given(*kind) for name, kind in kinds.items() if name in problem.extras}
        if "drawn" in problem.extras:
            marks["seed"] = tape.given((), torch.int64)
        return call._replace(noise=tuple(noise), marks=Marks(**marks))

    def _takes(self, call: Call) -> bool:
        every = 2 + len(self.cell.states)
        return all((mask.dim() > 0) == (place % every == 1) for place, mask in enumerate(call.noise))

    def forward(self, call: Call) -> Outcome:
        return super().forward(call) if self._takes(call) else Layers.forward(self, call)

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        if not self._takes(call):
            return Layers.backward(self, call, y, saved, grads)
        if call.noise and "noise" not in self.problem.constants:
            return Layers.backward(self, call, y, self._as_layers(saved[0]), grads)
        return super().backward(call, y, saved, grads)

    def _spaces_laid_out(self, room: Room, keep: bool) -> Kept:
        """Each direction's room is one as `Layers` has it: states, means, r apart, operands, the state before."""
        units, batch, time, directions = self.sizes
        rows, element = time * batch, self.problem.dtype.itemsize
        of_states, of_apart = 4 * (len(self.cell.states) - 1), len(self.saving.apart) * self.gate.itemsize
        sizes = of_states * units, 4 * self._levels, of_apart * units, self._rounds * element * units
        spaces = room.parts(directions, keep * self._space_size(rows, self._features()))
        means, apart, operands, before = [[at + rows * far for at in spaces] for far in accumulate(sizes)]
        made = Kept((), apart, spaces, 0, before)
        return made if self.steps is None else made._replace(means=means, operands=operands)

    def _as_layers(self, room: Tensor) -> list[Tensor]:
        """What forward left, as `Layers.forward` saves it."""
        units, batch, time, directions = self.sizes
        rows, found, last = time * batch, [], self.form.layers - 1
        of_gates = rows * units * len(self.cell.gates) * self.gate.itemsize
        of_space = self._space_size(rows, self._features())
        of_output = rows * directions * units * self.problem.dtype.itemsize
        for layer, kept in enumerate(self._kept):
            places = [(at, of_gates) for at in kept.gates] + [(at, of_space) for at in kept.states]
            places += [(kept.output, of_output)] if layer < last else []
            found += [room[at : at + size] for at, size in places]
        return found

    def _argument(
        self, options: Options | None, layer: int, base: int, entered: Sequence[int] | None = None
    ) -> Sequence[Any]:
        assert options is not None, "the problem has some"
        before = [base + place for place in self._kept[layer].before] if self.problem.gradient else []
        kernel = self._ahead if entered is None else self._back
        return options.argument(layer, kernel.together, before=before, entered=entered or ())

    def _make_ready_for_backward(self, room: Room) -> None:
        super()._make_ready_for_backward(room)
        units, batch, time, directions = self.sizes
        dtype, rows, noise = self.problem.dtype, time * batch, self._features().noise
        element, self._gatewise = dtype.itemsize, noise >= BY_GATE
        self._entered = room.parts(directions, rows * units * element) if 0 < noise < BY_GATE else []
        at_once = self._gatewise and units * element % 16 == 0 and not exact(self.problem)
        at_once = at_once and better_together(units, rows, element)
        self._of_whole: list[OfWhole] = []
        for is_apart, first, count, into in self.gates if self._gatewise and not at_once else self._of_state():
            wide, step = count * units, units * len(self.saving.apart if is_apart else self.cell.gates)
            if at_once:  # one gate's product is too small for a whole GPU
                apart = units, rows * units, units * units
                sizes, steps = (units, rows, units), (step, units, units)
                over: Made | Each = Each(dtype, count, sizes, (1, 0), steps, apart, self.tf32)
            else:
                over = self._product.ready(dtype, (wide, rows, units), (1, 0), (step, units, units), self.tf32)
            places = first * units * element, into * units * units * element
            self._of_whole.append(OfWhole(is_apart, *places, over))

    def _products_back(self) -> list[Made | Each]:
        return [*super()._products_back(), *(some.over for some in self._of_whole)]

    def _whole(
        self, options: Options | None, layer: int, room: Tensor, buffers: Sequence[int]
    ) -> tuple[list[Tensor], Sequence[int]]:
        assert options is not None, "the problem has some"
        before = self._kept[layer].before
        if not self._features().before:
            return [], ()
        if not self._gatewise:
            return [], buffers or [room.data_ptr() + place for place in before]
        units, batch, time, _ = self.sizes
        shape, dtype = (time * batch, units), self.problem.dtype
        size = time * batch * units * dtype.itemsize
        rows = [from_bytes(room[place : place + size], shape, dtype) for place in before]
        masked = [options.masked(row, mask) for row, mask in zip(rows, options.scaled_by_gate(layer), strict=True)]
        return masked, [tensor.data_ptr() for tensor in masked]

    def _multiply_whole(self, blas: int, to_gates: int, to_apart: int, entered: int, into: int) -> None:
        # with masks by gate what entered lies gate behind gate, as the weights do
        for some in self._of_whole:
            gradients = (to_apart if some.apart else to_gates) + some.first
            some.over(blas, gradients, entered + self._gatewise * self._apart_by(some), into + some.into)

    def _apart_by(self, some: OfWhole) -> int:
        """Bytes before what entered the product of a gate."""
        units, batch, time, _ = self.sizes
        return some.into // units * time * batch
