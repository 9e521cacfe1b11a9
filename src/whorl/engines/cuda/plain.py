"""How a call runs where Python's time counts: addresses in place of tensors, one room for all layers.

A small layer takes the GPU less time than Python takes for tensors that look at others' memory.  So what is kept for
backward lies in one room, as does what a pass needs meanwhile (`places`), and products are made ready when the plan is:
a call fills in addresses.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.cells.cell import Graph
from whorl.cells.wrappers import ahead
from whorl.engines.base import Grads, from_bytes
from whorl.engines.cuda.aligned import Made
from whorl.engines.cuda.branch import Branch, branch_of
from whorl.engines.cuda.input_products import InputProducts
from whorl.engines.cuda.layers import address, leaves_room, neighbours, pair, plain
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.options import Options
from whorl.engines.cuda.places import Places, Room
from whorl.engines.cuda.products import Each, Product, handle
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import by_link, staged, steps
from whorl.engines.tape import Tape, parts, slots, written_to
from whorl.engines.taped import Written
from whorl.problem import Call, Outcome, Plan, Problem


class OfSome(NamedTuple):
    """How the gradient of the recurrent weights of neighbouring gates is made; places and steps are bytes."""

    apart: bool
    """The gradients of these gates are among those that are apart."""
    first: int
    """Where the first of the gates begins in a row of gradients."""
    step: int
    """From one row of gradients to the next."""
    into: int
    """Where its weights begin."""
    over: Made
    """Over all steps that follow another."""
    start: Made
    """With the initial states."""


class OfInner(NamedTuple):
    """How the gradient of the recurrent weights of a gate is made that are multiplied inside the step; see `OfSome`."""

    apart: bool
    first: int
    gate: int
    """Among the recurrent ones."""
    into: int
    operand: int
    """Where among the operands of its direction that begins which entered the product."""
    over: Made


class Entered(NamedTuple):
    """Where that lies, of every step, which entered the recurrent products of a layer: for each direction."""

    state: Sequence[int]
    """Of those with the first state; nothing where it is the output of the step before."""
    inside: Sequence[Sequence[int]]
    """Of each of `Plain._of_inner`."""
    alive: Sequence[Tensor] = ()
    """What holds it, beside what forward left."""


def is_plain(problem: Problem) -> bool:
    """No options, and of the cell what `is_plain_cell` says."""
    return not (problem.additions or problem.packed) and is_plain_cell(problem.form.cell)


@lru_cache(maxsize=256)
def is_plain_cell(cell: Graph) -> bool:
    """One product of each recurrent gate."""
    if not cell.recurrent:
        return False
    cell = ahead(cell) or cell
    found = by_link(steps(cell), cell) if staged(cell) else None
    return found is None or [link.gate for link in found] == [*range(len(cell.recurrent))]


class Plain(Places):
    """A plan's kernels, for a problem that `is_plain`."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(plan, device)
        self._projected = self.gate if self.norms is None else torch.float32
        self._ready(self._features, self._features)
        self._ahead = self._kernel("forward", self._features)
        self._input_products = self._products_of_input()
        self._divides = False
        """In a graph products of backward run beside each other."""
        if self.problem.gradient:
            room = Room()
            self._make_ready_for_backward(room)
            self._divides = self._leaves_room()
            self._meanwhile = laid_out((room.size,), torch.uint8)
        self._make_ready_to_launch()
        beside = self._divides or (self.optional and self.chip.capability == (9, 0))  # on others nothing was measured
        self._aside = branch_of(self.index) if beside else None
        self.number = -1
        """By which C++ knows its tapes, once it does."""

    def of(self, call: Call) -> "Plain":
        """What runs a call of its plan, of which there may be several ways."""
        return self

    def written(self) -> Written:
        """Its passes, written down."""
        ahead, back = Tape(), Tape()
        named = self._named(ahead)
        with written_to(ahead):
            outcome = self.forward(named)
        dtypes = [one.dtype if one.dim() else None for one in (*named.dropout, *named.noise)]
        (room,) = slots(outcome.saved) or [-1]
        made: Grads = []
        if self.problem.gradient:
            call, y, kept = self._named(back), back.given(*self._output[::2]), back.given(*self._room[::2])
            grads = [back.given(*laid[::2]) for laid in (self._output, *[self._state] * len(self.cell.states))]
            with written_to(back):
                made = self.backward(call, y, (kept,), grads)[: 1 + len(call.states) + len(call.weights)]
        marks = sum(mark is not None for mark in named.marks)
        return Written(ahead, back, slots(outcome.outputs), room, parts(made), dtypes, marks)

    def by_tape(self, call: Call) -> bool:
        """Whether what an eager call asks for depends on addresses alone: not where masks have gradients."""
        return not (call.dropout and self.problem.gradient and "dropout" not in self.problem.constants)

    def _named(self, tape: Tape) -> Call:
        """A call of names: the first slots of a tape."""
        x, initial = tape.given(*self._input[::2]), len(self.cell.states) * self.problem.initial
        states = tuple([tape.given(*self._state[::2]) for _ in range(initial)])
        weights = tuple([tape.given(*laid[::2]) for laid in self._weights_laid])
        count = (self.form.layers - 1) * self.problem.dropout
        return Call(x, states, weights, tuple([tape.given(*self._output[::2]) for _ in range(count)]))

    def _products_of_input(self) -> InputProducts:
        """Those of what enters each layer with its input weights."""
        return InputProducts(self.problem, self._product, self._projected)

    def _make_ready_for_backward(self, room: Room) -> None:
        """
        Args:
            room: gets places for what is there meanwhile.
        """
        units, batch, time, directions = self.sizes
        self._entered: list[int] = []
        form, dtype, element, tf32 = self.form, self.problem.dtype, self.problem.dtype.itemsize, self.tf32
        gates, apart, rows = len(self.cell.gates) * units, len(self.saving.apart) * units, time * batch
        assert self._sums is not None, "it is made ready with the kernels"
        self._back, self._adding = self._kernel("backward", self._features), self._sums
        self._to_gates = room.parts(directions, rows * gates * element)
        self._to_apart = room.parts(directions, rows * apart * element) if apart else self._to_gates
        self._summed = room.parts(directions, self._back.sums * self._sums.columns * 4)
        (self._to_below,) = room.parts(1, (form.layers > 1) * rows * directions * units * element)
        self._vectors_laid = laid_out((len(self._read_vectors) * units,), self.problem.dtype)
        if self.norms is not None:
            self._norm_laid = laid_out((3 * gates,), self.problem.dtype)
            self._normed = room.parts(directions, rows * gates * element)
            self._unread = room.parts(directions, gates * element)
            (self._sums_of_norm,) = room.parts(1, self.norms.sums(rows))
        self._of_hh: list[OfSome] = []
        ready = self._product.ready
        for is_apart, first, count, into in self._of_state():
            wide, step = count * units, apart if is_apart else gates
            over = ready(dtype, (wide, rows - batch, units), (1, 0), (step, directions * units, units), tf32)
            start = ready(dtype, (wide, batch, units), (1, 0), (step, units, units), tf32)
            places = first * units * element, step * element, into * units * units * element
            self._of_hh.append(OfSome(is_apart, *places, over, start))
        self._of_inner = self._products_inside()

    def _of_state(self, joined: bool = True) -> list[tuple[bool, int, int, int]]:
        """Those of `blocks_of` whose product is with the first state, before the step."""
        if self.links is None:
            return self.blocks if joined else self.gates
        found = [block for link, block in zip(self.links, self.gates, strict=True) if not link.round]
        return neighbours(found) if joined else found

    def _products_inside(self) -> list[OfInner]:
        """The gradients of the weights whose product is inside the step."""
        units, batch, time, _ = self.sizes
        dtype, rows, made = self.problem.dtype, time * batch, []
        for link, (is_apart, first, _, into) in zip(self.links or (), self.gates, strict=False):
            if link.round:
                step = units * len(self.saving.apart if is_apart else self.cell.gates)
                over = self._product.ready(dtype, (units, rows, units), (1, 0), (step, units, units), self.tf32)
                at, element = (link.round - 1) * rows * units, dtype.itemsize
                places = first * units * element, into, into * units**2 * element, at * element
                made.append(OfInner(is_apart, *places, over))
        return made

    def _leaves_room(self) -> bool:
        """Whether two products of backward run beside each other in a graph."""
        # what copies or splits its matrices does so on torch's stream, which also clears a gradient of a single step
        alone = (
            self.norms is None
            and self.problem.time > 1
            and all(isinstance(one, Product | Each) for one in self._products_back())
        )
        return alone and leaves_room(self.problem, self.chip)

    def _products_back(self) -> Sequence[Made | Each]:
        """Those of backward."""
        of_hh = [
            *(one for some in self._of_hh for one in (some.over, some.start)),
            *(one.over for one in self._of_inner),
        ]
        return [*self._input_products.of_backward(), *of_hh]

    def _weights(self, call: Call) -> tuple[Sequence[Tensor], list[int]]:
        """The weights as kernels read them, mostly themselves; and their addresses, behind which stands 0."""
        weights: Sequence[Tensor] = call.weights
        at, every = [weight.data_ptr() for weight in weights], self._every
        whole = False not in [weight.is_contiguous() for weight in weights]
        if not whole or any(place % 16 for place in at[1::every]):
            weights = [plain(weight, 16 if place % every == 1 else 1) for place, weight in enumerate(weights)]
            at = [weight.data_ptr() for weight in weights]
        return weights, [*at, 0]

    def _output_in(self, room: Tensor, layer: int) -> Tensor:
        """What a layer that is not the last gave."""
        return self._output_at(room, self._kept[layer].output)

    def _output_at(self, room: Tensor, first: int) -> Tensor:
        """A layer's output, or its gradient, whose bytes begin there."""
        shape, dtype = self._output.shape, self.problem.dtype
        return from_bytes(room[first : first + math.prod(shape) * dtype.itemsize], shape, dtype)

    def forward(self, call: Call) -> Outcome:
        _, batch, time, _ = self.sizes
        dtype, last = self.problem.dtype, self.form.layers - 1
        entered, (_alive, at) = call.x.contiguous(), self._weights(call)
        room = empty(*self._room)
        base, stream, blas = room.data_ptr(), torch._C._cuda_getCurrentRawStream(self.index), handle(dtype)
        options = self._options_in(room, False, call, stream)
        aside = self._forked() if options is not None and self._draws_aside() else None
        listed, prepared = None, None
        # beside the product draws, orders, and what the kernel finds made ready: in memory that is taken before it
        if aside is not None and options is not None:
            listed = self._listed(call, at, base, self._in_room)
            with options.on(aside.stream):
                extra = self._argument(options, 0, base)
            prepared = self._ahead.prepared(aside.stream, *self._takes_ahead[0](listed[2]), time, batch, *extra)
        self._project(options, 0, stream, blas, entered, at, base)  # the GPU multiplies while outputs are allocated
        y, finals, places, _also = listed or self._listed(call, at, base, self._in_room)
        for layer in range(last + 1):
            if layer:
                self._project(options, layer, stream, blas, entered, at, base)
            if aside is not None and layer == 0:
                aside.join()
            if prepared is None:
                extra = self._argument(options, layer, base)
                prepared = self._ahead.prepared(stream, *self._takes_ahead[layer](places), time, batch, *extra)
            self._ahead.launch(stream, prepared)
            prepared = None  # its space goes back
            if layer < last:
                entered = self._output_in(room, layer)
                if call.dropout:
                    entered = entered * call.dropout[layer]
        return Outcome(y, tuple(finals), (room,) if self.problem.gradient else ())

    def _options_in(self, room: Tensor, is_made: bool, call: Call, stream: int) -> Options | None:
        """Those of a call, of which some is in what forward leaves.

        Args:
            is_made: forward has put it there.
        """
        return None

    def _draws_aside(self) -> bool:
        """Whether what options draw and sort before the loop is beside the product with x, in a graph."""
        return self._divides

    def _listed(
        self, call: Call, at: Sequence[int], base: int, in_room: Sequence[int]
    ) -> tuple[Tensor, list[Tensor], list[int], list[Tensor]]:
        """The output, final states, the addresses of all that a forward pass has; and what is to live as long."""
        starts = [as_read(state, self.problem.dtype) for state in call.states]
        y, finals = empty(*self._output), [empty(*self._state) for _ in self.cell.states]
        places = [
            *at, *[base + place for place in in_room], y.data_ptr(),
            *[state.data_ptr() + far for state in (*finals, *starts) for far in self._far],
        ]  # fmt: skip
        return y, finals, places, starts

    def _argument(
        self, options: Options | None, layer: int, base: int, entered: Sequence[int] | None = None
    ) -> Sequence[Any]:
        """What options add to the argument of a kernel.

        Args:
            base: of what forward left.
            entered: where backward puts what entered the recurrent product; None: it is forward's.
        """
        return ()

    def _project(
        self, options: Options | None, layer: int, stream: int, blas: int, entered: Tensor, at: Sequence[int], base: int
    ) -> None:
        """What enters a layer times its weights, for every gate at every step; behind its layer norm where it has one.

        Before that is zero what does not count, as the gradient of the norm reads all of it.
        """
        kept = self._kept[layer]
        if self.norms is not None and options is not None:
            entered = options.cleaned(entered)
        for direction, gates in enumerate(kept.gates):
            own = (layer * self.form.directions + direction) * self._every
            into = base + (gates if self.norms is None else kept.projected[direction])
            self._input_products.ahead(options, layer, direction, blas, entered, at[own], into)
            if self.norms is not None:
                vectors = self._of_norm(at, own, [*self.norms.gains, *self.norms.shifts])
                moments = [base + place for place in kept.moments[direction]]
                self.norms.ahead(stream, self._rows, into, vectors, base + gates, moments)

    @property
    def _rows(self) -> int:
        _, batch, time, _ = self.sizes
        return time * batch

    def _of_norm(self, at: Sequence[int], own: int, places: Sequence[int]) -> list[int]:
        """Of a direction whose weights begin at `own`: x's bias, and some of the cell's vectors."""
        bias = at[own + 2] if self.form.bias else 0
        return [bias, *(at[own + self._to_vectors + place] for place in places)]

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        (units, batch, time, directions), dtype, constants = self.sizes, self.problem.dtype, self.problem.constants
        grad_y, *grad_finals = [None if grad is None else as_read(grad, dtype) for grad in grads]
        room, x, y, (weights, at) = plain(saved[0], 16), call.x.contiguous(), plain(y), self._weights(call)
        stream, blas = torch._C._cuda_getCurrentRawStream(self.index), handle(dtype)
        options = self._options_in(room, True, call, stream)
        cleaned: Callable[[Tensor], Tensor] = as_it_is if options is None else options.cleaned
        starts = [as_read(state, dtype) for state in call.states]
        grad_starts = [empty(*self._state) for _ in starts]
        grad_x: Tensor | None = None
        made, into = list(weights), [0] * len(at)  # gradients, and their addresses, are put in their places
        grad_dropout: list[Tensor | None] = [None] * len(call.dropout)
        meanwhile = empty(*self._meanwhile)
        base, here = room.data_ptr(), meanwhile.data_ptr()
        to_gates, to_apart = [here + place for place in self._to_gates], [here + place for place in self._to_apart]
        sums = pair([here + place for place in self._summed])
        output, buffers, far = y.data_ptr(), [here + place for place in self._entered], self._far
        places = [
            *at, *[base + place for place in self._in_room], *[here + place for place in self._in_meanwhile],
            output, address(grad_y), *[state.data_ptr() + away for state in (*starts, *grad_starts) for away in far],
            *[0 if grad is None else grad.data_ptr() + away for grad in grad_finals for away in far],
        ]  # fmt: skip
        last = self.form.layers - 1
        for layer in reversed(range(last + 1)):
            reads, first = self._reads[layer], layer * directions * self._every
            extra = self._argument(options, layer, base, buffers)
            prepared = self._back.prepared(stream, *self._takes_back[layer](places), time, batch, *extra)
            # blocks that exchange through L2 begin when all of them can, and let what is behind them begin then
            is_spread, whole = isinstance(self._back.tile, Spread), None
            aside = self._forked() if self._divides or not is_spread else None
            self._back.launch(stream, prepared)
            if options is not None:  # behind the kernel, or a graph begins with what fills the GPU
                near = None if is_spread else aside
                with options.on(stream if near is None else near.stream), options.behind(is_spread and self.chip.early):
                    x = options.cleaned(x) if layer == last else x
                    if near is not None or is_spread:  # else what it writes is read at once, from the cache
                        whole = self._whole(options, layer, room, buffers)
            del prepared  # what is beside the kernel has other memory
            of_vectors = [0, 0]
            for direction in range(directions):  # while the kernel runs
                own = first + direction * self._every
                for place in range(own, own + self._to_vectors):
                    made[place] = empty(*self._weights_laid[place])
                    into[place] = made[place].data_ptr()
                if self._read_vectors:
                    block = empty(*self._vectors_laid)
                    of_vectors[direction] = block.data_ptr()
                    for place, part in zip(self._read_vectors, block.unsafe_split(units), strict=True):
                        made[own + self._to_vectors + place] = part
            entered, to_entered = x, grad_x
            if layer:
                entered, to_entered = self._output_in(room, layer - 1), self._output_at(meanwhile, self._to_below)
                if call.dropout:
                    entered = cleaned(entered * call.dropout[layer - 1])
            elif "x" not in constants:
                grad_x = to_entered = empty(*self._input)
            _space = None  # the last layer's goes back before this one's is taken
            beside = stream  # where products with recurrent weights are
            if aside is not None and self._divides:
                aside.meet()
                _space, beside = aside.space(), aside.stream
            elif aside is not None:
                aside.join()
            whole = whole or self._whole(options, layer, room, buffers)
            if self._adding.columns:
                of_x = [into[place] for place in reads[4:]]
                if self.norms is not None:  # whose kernel gives it
                    of_x = [*pair([here + place for place in self._unread])]
                self._adding.launch(
                    beside, directions, self._back.sums, *sums,
                    *of_x, *[into[place] for place in reads[2:4]], *of_vectors,
                )  # fmt: skip
            for direction in range(directions):
                own, of_gates = first + direction * self._every, to_gates[direction]
                if self.norms is not None:
                    of_gates = self._norm_back(layer, direction, stream, at, base, here, of_gates, made)
                self._input_products.back(
                    options, layer, direction, blas, of_gates, entered, at[own], to_entered, into[own]
                )  # fmt: skip
            if aside is not None and _space is not None:
                blas = aside.handle(dtype, _space)
            for direction in range(directions):
                recurrent = first + direction * self._every + 1
                both = to_gates[direction], to_apart[direction]
                if whole.state:
                    self._multiply_whole(blas, *both, whole.state[direction], into[recurrent])
                else:
                    start = starts[0].data_ptr() + far[layer] if starts else 0
                    self._multiply_recurrent(blas, direction, *both, output, start, made[recurrent])
                for some, operand in zip(self._of_inner, whole.inside[direction], strict=True):
                    gradients = (to_apart if some.apart else to_gates)[direction] + some.first
                    some.over(blas, gradients, operand, into[recurrent] + some.into)
            if aside is not None and _space is not None:
                aside.join()
                blas = handle(dtype)
            if call.dropout and layer:
                assert to_entered is not None, "a layer below it has a gradient"
                if "dropout" not in constants:
                    grad_dropout[layer - 1] = cleaned(to_entered * self._output_in(room, layer - 1))
                to_entered *= cleaned(call.dropout[layer - 1])
            if layer:
                output = base + self._kept[layer - 1].output
        return [grad_x, *grad_starts, *made, *grad_dropout, *[None] * len(call.noise)]

    def _norm_back(
        self, layer: int, direction: int, stream: int, at: Sequence[int], base: int, here: int, to_gates: int,
        made: list[Tensor],
    ) -> int:  # fmt: skip
        """Where the gradient of the projection lies; puts those of x's bias and of the norm's vectors into `made`.

        Args:
            base, here: of what forward left, and of what is there meanwhile.
        """
        assert self.norms is not None, "x has a norm"
        kept, own = self._kept[layer], (layer * self.form.directions + direction) * self._every
        found, to_projected = empty(*self._norm_laid), here + self._normed[direction]
        self.norms.back(
            stream, self._rows, base + kept.projected[direction], self._of_norm(at, own, self.norms.gains),
            [base + place for place in kept.moments[direction]], to_gates, to_projected, here + self._sums_of_norm,
            found.data_ptr(),
        )  # fmt: skip
        units, vectors = self.form.units, own + self._to_vectors
        bias, gain, shift = found.unsafe_split(len(self.cell.gates) * units)  # no views of each other for autograd
        if self.form.bias:
            made[own + 2] = bias
        for places, parts_of in ((self.norms.gains, gain), (self.norms.shifts, shift)):
            for place, part in zip(places, parts_of.unsafe_split(units), strict=True):
                made[vectors + place] = part
        return to_projected

    def _forked(self) -> Branch | None:
        """The branch of a CUDA graph that is being captured, which begins here."""
        branch = self._aside if torch._C._cuda_isCurrentStreamCapturing() else None
        return branch if branch is not None and branch.fork() else None

    def _whole(self, options: Options | None, layer: int, room: Tensor, buffers: Sequence[int]) -> Entered:
        """What entered the recurrent products."""
        return Entered((), self._inside_of(layer, room.data_ptr()))

    def _inside_of(self, layer: int, base: int) -> list[list[int]]:
        """Where what entered each product inside the step lies as the kernel left it, for each direction."""
        first = self._kept[layer].operands or [0] * self.form.directions
        return [[base + at + some.operand for some in self._of_inner] for at in first]

    def _multiply_whole(self, blas: int, to_gates: int, to_apart: int, entered: int, into: int) -> None:
        """The gradient of the recurrent weights of one direction, of what entered the product at every step."""
        raise NotImplementedError

    def _multiply_recurrent(
        self, blas: int, direction: int, to_gates: int, to_apart: int, output: int, start: int, into: Tensor
    ) -> None:
        """The gradient of the recurrent weights of one direction: of what entered each step with that of its gates."""
        units, batch, time, directions = self.sizes
        element, made = self.problem.dtype.itemsize, into.data_ptr()
        after, of_start = (0, (time - 1) * batch) if direction else (batch, 0)  # first rows of those steps
        entered = output + direction * (batch * directions + 1) * units * element  # in reverse that of the step behind
        start += bool(start) * direction * batch * units * element
        if time == 1:
            into.zero_()
        for some in self._of_hh:
            gradients = (to_apart if some.apart else to_gates) + some.first
            if time > 1:
                some.over(blas, gradients + after * some.step, entered, made + some.into)
            if start:
                some.start(blas, gradients + of_start * some.step, start, made + some.into, add=True)


def as_it_is(tensor: Tensor) -> Tensor:
    """Of a call without options, where every step counts."""
    return tensor


def as_read(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As kernels read it; what has the dtype is not asked to take it, which would be 0.8 us."""
    return plain(tensor if tensor.dtype is dtype else tensor.to(dtype))
