"""How a call with marks, zoneout or recurrent dropout runs where Python's time counts: as `plain` runs.

Lengths, a mask and resets, masks that are drawn, and what Keras' layers ask for.  Of one of those a plain training step
of LSTM took the host 355 us, one with a mask 677 as `layers` runs it and 534 so, one with recurrent dropout by gate 902
and 726 (AMD EPYC, without kernels and products; medians of 3,000): 33 operations of torch, 55 and 37, 85 and 52.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import Grads, from_bytes
from whorl.engines.cuda.aligned import Made
from whorl.engines.cuda.input_products import InputProducts, MaskedInputProducts
from whorl.engines.cuda.layers import Layers, exact
from whorl.engines.cuda.options import Options, Shared, expected, is_by_gate, is_ordered, shared_sizes
from whorl.engines.cuda.places import Kept, Room
from whorl.engines.cuda.plain import Entered, Plain, is_plain_cell
from whorl.engines.cuda.products import Each, better_together
from whorl.engines.cuda.source import AT_RANDOM, BY_GATE, BY_SHARE, Features, has_options, writes_entered
from whorl.engines.tape import Tape
from whorl.problem import Call, Form, Marks, Outcome, Plan, Problem


def is_marked(problem: Problem) -> bool:
    """Lengths, a mask, resets, masks drawn, or given that all steps share; and nothing else beyond a plain call."""
    form, extras = problem.form, set(problem.extras)
    given, drawn = "dropout_masks" in extras, "drawn" in extras
    by_step = given and form.recurrent_dropout_mode == "step"
    mixed = given and drawn and (form.recurrent_dropout or form.input_dropout)
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


class Masks(NamedTuple):
    """Of each layer and direction the axes of the masks that a call gives: 0 for none, 3 for one by gate."""

    input: int
    recurrent: int


def masks_of(form: Form, call: Call) -> Masks | None:
    """Those that a call gives; None: there are none, or not such as these."""
    every, axes = 2 + len(form.cell.states), [mask.dim() for mask in call.noise]
    alike = {tuple(axes[first : first + every]) for first in range(0, len(axes), every)}
    if len(alike) != 1:
        return None
    ((of_x, of_state, *of_zoneout),) = alike
    own = _axes_of_state(form)
    of_state = own if of_state == 3 and len(form.cell.recurrent) == 1 else of_state
    return None if any(of_zoneout) or of_state not in (0, own) else Masks(of_x, of_state)


def _axes_of_state(form: Form) -> int:
    """Of a mask of the recurrent product."""
    return 3 if is_by_gate(form) else 2


class Marked(Plain):
    """A plan's kernels, for a problem that `is_marked`.

    Where masks are given, for calls with `masks`; others have one of their own (`of`), and where layers are not alike,
    zoneout has masks or a mask has a gradient, `Layers` runs, which reads what forward left here as its own.
    """

    def __init__(self, plan: Plan, device: torch.device, masks: Masks | None = None) -> None:
        problem = plan.problem
        self._plan, self._device, self._ways = plan, device, dict[Masks, Marked]()
        if masks is None and "dropout_masks" in problem.extras:
            masks = Masks(0, _axes_of_state(problem.form))  # of a call that `Layers` runs
        self._masks = masks
        super().__init__(plan, device)

    def _products_of_input(self) -> InputProducts:
        masks, drawn = self._masks, "drawn" in self.problem.extras and self.form.input_dropout > 0
        if not (masks.input if masks else drawn):
            return super()._products_of_input()
        return MaskedInputProducts(self.problem, self._product, self._projected, masks and masks.input)

    def of(self, call: Call) -> Plain:
        masks = masks_of(self.form, call)
        if masks is None or masks == self._masks:
            return self
        return self._ways.get(masks) or self._ways.setdefault(masks, Marked(self._plan, self._device, masks))

    def _its_features(self) -> Features:
        most, kind = expected(self.problem), AT_RANDOM if "drawn" in self.problem.extras else BY_SHARE
        noise, zoneout = most.noise, tuple([kind if probability else 0 for probability in self.form.zoneout])
        if self._masks is not None and not self._masks.recurrent:
            noise = 0
        order = most.order and is_ordered(self.problem.batch)
        return most._replace(
            order=order, noise=noise, zoneout=zoneout if any(zoneout) else (), noise_gradient=False,
            zoneout_gradient=False,
        )  # fmt: skip

    def by_tape(self, call: Call) -> bool:
        wanted = call.noise and self.problem.gradient and "noise" not in self.problem.constants
        return self._takes(call) and not wanted and super().by_tape(call)

    def _named(self, tape: Tape) -> Call:
        form, problem = self.form, self.problem
        _, batch, time, _ = self.sizes
        call, wide = super()._named(tape), (batch, form.units)
        absent: Any = torch.empty((), device="cpu")
        noise: list[Any] = []
        if self._masks is not None:
            gates, recurrent = (len(form.cell.gates),), (len(form.cell.recurrent),)
            for index in range(form.layers * form.directions):
                shape = batch, form.layer_inputs(index // form.directions)
                shapes = [(self._masks.input, gates + shape), (self._masks.recurrent, recurrent + wide)]
                noise += [tape.given(shape[-axes:], torch.float32) if axes else absent for axes, shape in shapes]
                noise += [absent] * len(form.cell.states)
        kinds = {"lengths": ((batch,), torch.int64)} | dict.fromkeys(("mask", "reset"), ((time, batch), torch.bool))
        marks = {name: tape.given(*kind) for name, kind in kinds.items() if name in problem.extras}
        if "drawn" in problem.extras:
            marks["seed"] = tape.given((), torch.int64)
        return call._replace(noise=tuple(noise), marks=Marks(**marks))

    def _takes(self, call: Call) -> bool:
        return not call.noise or masks_of(self.form, call) == self._masks

    def _options_in(self, room: Tensor, is_made: bool, call: Call, stream: int) -> Options:
        shared = Shared(room, self._shared, self._back.together, is_made) if self.problem.gradient else None
        return Options(self.problem, call, self.chip, self.index, stream, shared)

    def _draws_aside(self) -> bool:
        return self._divides or self._draws_once

    def forward(self, call: Call) -> Outcome:
        return super().forward(call) if self._takes(call) else Layers.forward(self, call)

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        if not self._takes(call):
            return Layers.backward(self, call, y, saved, grads)
        if call.noise and "noise" not in self.problem.constants:
            return Layers.backward(self, call, y, self._as_layers(saved[0]), grads)
        return super().backward(call, y, saved, grads)

    def _laid_out(self, one_by_one: bool = True) -> tuple[list[Kept], list[int], int]:
        made, order, size = super()._laid_out(one_by_one)
        features, drawn, room = self._features, "drawn" in self.problem.extras, Room(size)
        of_input, of_state = (drawn and not axes for axes in self._masks or (0, 0))
        sizes = shared_sizes(self.problem, features, of_input, of_state)
        self._shared = {what: room.parts(1, each)[0] for what, each in sizes.items() if self.problem.gradient}
        """What both passes read."""
        self._draws_once = not features.draws and any(name != "input" for name, *_ in sizes)
        return made, order, room.size

    def _spaces_laid_out(self, room: Room, keep: bool) -> Kept:
        """Each direction's room is one as `Layers` has it: states, means, r apart, operands, the state before."""
        units, batch, time, directions = self.sizes
        rows, element = time * batch, self.problem.dtype.itemsize
        of_states, of_apart = 4 * (len(self.cell.states) - 1), len(self.saving.apart) * self.gate.itemsize
        sizes = of_states * units, 4 * self._levels, of_apart * units, self._rounds * element * units
        spaces = room.parts(directions, keep * self._space_size(rows, self._features))
        means, apart, operands, before = [[at + rows * far for at in spaces] for far in accumulate(sizes)]
        made = Kept((), apart, spaces, 0, before)
        return made if self.steps is None else made._replace(means=means, operands=operands)

    def _as_layers(self, room: Tensor) -> list[Tensor]:
        """What forward left, as `Layers.forward` saves it."""
        units, batch, time, directions = self.sizes
        rows, found, last = time * batch, [], self.form.layers - 1
        of_gates = rows * units * len(self.cell.gates) * self.gate.itemsize
        of_space = self._space_size(rows, self._features)
        of_output = rows * directions * units * self.problem.dtype.itemsize
        for layer, kept in enumerate(self._kept):
            places = [(at, of_gates) for at in kept.gates] + [(at, of_space) for at in kept.states]
            places += [(kept.output, of_output)] if layer < last else []
            found += [room[at : at + size] for at, size in places]
        of_x = rows * units * len(self.cell.gates) * 4
        for kept in self._kept:
            for projected, moments in zip(kept.projected, kept.moments, strict=True):
                found += [room[projected : projected + of_x], *[room[at : at + 4 * rows] for at in moments]]
        return found

    def _argument(
        self, options: Options | None, layer: int, base: int, entered: Sequence[int] | None = None
    ) -> Sequence[Any]:
        assert options is not None, "the problem has some"
        if not has_options(self.cell, self._features):
            return ()
        before = [base + place for place in self._kept[layer].before] if self.problem.gradient else []
        kernel = self._ahead if entered is None else self._back
        return options.argument(layer, kernel.together, before=before, entered=entered or ())

    def _make_ready_for_backward(self, room: Room) -> None:
        super()._make_ready_for_backward(room)
        units, batch, time, directions = self.sizes
        dtype, rows, noise = self.problem.dtype, time * batch, self._features.noise
        element, self._gatewise = dtype.itemsize, noise >= BY_GATE
        writes = writes_entered(self.cell, self._features)
        self._entered = room.parts(directions, rows * units * element) if writes else []
        at_once = self._gatewise and units * element % 16 == 0 and not exact(self.problem)
        at_once = at_once and self.links is None and better_together(len(self.gates), units, rows, element)
        self._of_whole: list[OfWhole] = []
        for is_apart, first, count, into in self._of_state(joined=at_once or not self._gatewise):
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

    def _whole(self, options: Options | None, layer: int, room: Tensor, buffers: Sequence[int]) -> Entered:
        assert options is not None, "the problem has some"
        base, before = room.data_ptr(), self._kept[layer].before
        if not self._gatewise:
            state = buffers or [base + place for place in before]
            return Entered(state if self._features.before else (), self._inside_of(layer, base))
        leaves = len(self.gates) if self.links is None else len(self._of_state(joined=False))  # the first gates
        of_state, of_inner = list[Tensor](), list[list[Tensor]]()
        (_, masks), scale = options.noise(layer), options.noise_scale(layer)
        for mask, at, places in zip(masks, before, self._inside_of(layer, 0), strict=True):
            assert mask is not None, "each direction has some"
            if leaves:
                of_state.append(options.masked(self._rows_at(room, at), mask[:leaves], scale))
            both = [(self._rows_at(room, place), some.gate) for place, some in zip(places, self._of_inner, strict=True)]
            of_inner.append([options.masked(rows, mask[gate], scale) for rows, gate in both])
        alive = [*of_state, *(tensor for row in of_inner for tensor in row)]
        inside = [[tensor.data_ptr() for tensor in row] for row in of_inner]
        return Entered([tensor.data_ptr() for tensor in of_state], inside, alive)

    def _rows_at(self, room: Tensor, first: int) -> Tensor:
        """What of every step and sequence lies there, [rows, units]."""
        shape, dtype = (self._rows, self.form.units), self.problem.dtype
        return from_bytes(room[first : first + math.prod(shape) * dtype.itemsize], shape, dtype)

    def _multiply_whole(self, blas: int, to_gates: int, to_apart: int, entered: int, into: int) -> None:
        # with masks by gate what entered lies gate behind gate, as the weights do
        for some in self._of_whole:
            gradients = (to_apart if some.apart else to_gates) + some.first
            some.over(blas, gradients, entered + self._gatewise * self._apart_by(some), into + some.into)

    def _apart_by(self, some: OfWhole) -> int:
        """Bytes before what entered the product of a gate."""
        units, batch, time, _ = self.sizes
        return some.into // units * time * batch
