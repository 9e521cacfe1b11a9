"""How a call runs through the kernels of a plan: products of whole matrices before and after, one launch a layer."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from whorl.engines.base import Grads, as_bytes, from_bytes
from whorl.engines.cuda import grid, source
from whorl.engines.cuda.aligned import Products
from whorl.engines.cuda.branch import Branch, branch_of
from whorl.engines.cuda.entering import ByGate, Dropped
from whorl.engines.cuda.grid import Grid
from whorl.engines.cuda.norms import KEPT, Norms, inside, normed
from whorl.engines.cuda.options import Gradients, Options
from whorl.engines.cuda.prepare import Numbers, filler, fills, halver, halving, kernels, size_of
from whorl.engines.cuda.products import better_together, each_product, product
from whorl.engines.cuda.sides import Sides, sides
from whorl.engines.cuda.source import BY_GATE, PLAIN, Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import by_link, staged, steps
from whorl.engines.cuda.sums import Sums
from whorl.engines.cuda.tiling import Chip, Tile
from whorl.problem import Call, Outcome, Plan, Problem
from whorl.weights import LayerWeights, join, split

Made = TypeVar("Made")


class Wanted(NamedTuple):
    """A kernel to be made ready."""

    kind: str
    features: Features
    chip: Chip
    """For which its tile is chosen: the real one, or a part of it."""
    carried: bool = False
    """It computes a part of the steps."""


class Layers:
    """A plan's kernels on one device, and how a call runs through them.

    Args:
        tiles: of "forward" or "backward", in place of those that would be chosen.
    """

    def __init__(
        self, plan: Plan, device: torch.device, tiles: Mapping[str, Tile | Spread] = MappingProxyType({})
    ) -> None:
        problem = inside(plan.problem)
        form = problem.form
        self.problem, self.form, self.cell, self.device = problem, form, form.cell, device
        self.whole = plan.problem.form
        self.index = device.index if device.index is not None else torch.cuda.current_device()
        self.saving = source.kept(form.cell)
        self.steps = steps(form.cell) if staged(form.cell) else None
        self.links = None if self.steps is None else by_link(self.steps, form.cell)
        self.blocks, self.gates = blocks_of(self.saving), blocks_of(self.saving, joined=False)
        properties = torch.cuda.get_device_properties(self.index)
        self.chip = Chip((properties.major, properties.minor), properties.multi_processor_count)
        self.tf32 = problem.tf32
        self.gate = torch.float32 if source.wide_gates(form.cell) else problem.dtype
        self.norms = Norms(plan.problem, self.chip, self.index) if normed(plan.problem) else None
        self.sizes = form.units, problem.batch, problem.time, form.directions
        self.optional = bool(problem.additions or problem.packed)
        self._tiles = tiles
        self._made: dict[tuple[str, Features], Grid] = {}
        self._product = Products(self.chip, self.index, problem.dtype.itemsize, *largest(problem), exact(problem))
        self._sums = Sums(form, problem.dtype, self.chip, self.index) if problem.gradient else None
        if not self.optional:
            self._ready(PLAIN, PLAIN)

    @property
    def keeps(self) -> int:
        """How many tensors forward saves where a gradient is wanted."""
        normed = 0 if self.norms is None else KEPT * self.form.directions
        return (2 * self.form.directions + 1 + normed) * self.form.layers - 1

    def _ready(self, ahead: Features, back: Features) -> None:
        """Load what a call needs, forward and backward together: a capture of a CUDA graph can load nothing."""
        self._load([("forward", ahead), ("backward", back)][: 1 + self.problem.gradient])

    def _load(self, wanted: Sequence[tuple[str, Features]]) -> None:
        absent = [one for one in wanted if one not in self._made]
        if absent:
            made = self._grids([Wanted(kind, features, self.chip) for kind, features in absent])
            self._made |= zip(absent, made, strict=True)

    def _grids(self, wanted: Sequence[Wanted]) -> list[Grid]:
        """Those kernels, compiled side by side."""
        form, problem = self.form, self.problem
        sizes, numbers = [], []
        for kind, features, chip, carried in wanted:
            size = size_of(form.cell, form.units, problem.dtype.itemsize, features, exact(problem))
            tile = self._tiles.get(kind) or grid.choose(size, chip, problem.batch, form.directions, kind)
            assert tile is not None, "the obstacles say that it fits"
            flag = problem.gradient if kind == "forward" else form.bias
            sizes.append(size)
            tile = grid.beside(tile) if carried else tile
            numbers.append(Numbers(kind, self.cell, form.units, problem.dtype, tile, flag, features, carried))
        with torch.cuda.device(self.index):
            made = kernels(numbers, self.chip, self.index)
            halvings = [halving(own) for own in numbers]
            halvers = [own and (own, halver(own, self.chip, self.index)) for own in halvings]
            fillers = [filler(self.chip, self.index) if fills(own) else None for own in numbers]
        rows = zip(wanted, sizes, numbers, made, halvers, fillers, strict=True)
        where = problem.batch, form.directions
        return [
            Grid(kernel, own.tile, size, one.chip, *where, own.kind, halves, ones, self._sides(own.tile))
            for one, size, own, kernel, halves, ones in rows
        ]

    def _sides(self, tile: Tile | Spread) -> Sides | None:
        """By which the blocks of a tile take places."""
        return sides(self.chip, self.index) if isinstance(tile, Spread) and tile.sided else None

    def _kernel(self, kind: str, features: Features) -> Grid:
        if (kind, features) not in self._made:
            self._load([(kind, features)])
        return self._made[kind, features]

    def _options(self, call: Call, stream: int) -> Options | None:
        if not self.optional:
            return None
        return Options(self.problem, call, self.chip, self.index, stream)

    def forward(self, call: Call) -> Outcome:
        units, batch, time, directions = self.sizes
        form, cell, dtype = self.form, self.cell, self.problem.dtype
        keep, x = self.problem.gradient, call.x
        rows = call.x.shape[0] if self.problem.packed else time * batch
        starts = [plain(state.to(dtype)) for state in call.states]
        finals = [x.new_empty(form.layers * directions, batch, units) for _ in cell.states]
        saved: list[Tensor] = []
        normed: list[Tensor] = []
        sequences: list[Tensor] = []
        per_layer = [_plain_weights(own) for own in split(self.whole, call.weights)]
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        options, features = self._options(call, stream), PLAIN
        for layer in range(form.layers):
            weights = per_layer[layer * directions : (layer + 1) * directions]
            if options is not None:
                features = options.features(layer, backward=False)
                self._ready(features, options.features(layer, backward=True))
            ahead = self._kernel("forward", features)
            gates = self._gates(self._entering(x, call, layer, options), weights, layer, options)
            if self.norms is not None:
                pairs = [self.norms.forward(stream, gate, own) for gate, own in zip(gates, weights, strict=True)]
                gates, normed = [made for made, _ in pairs], [*normed, *(part for _, kept in pairs for part in kept)]
                weights = [self.norms.inner(own) for own in weights]
            y = x.new_empty(*call.x.shape[:-1], directions * units)
            spaces = [self._space(x, rows, features) for _ in weights] if keep else []
            extra: list[int | float] = []
            if options is not None:
                if features.sequences:
                    sequences = [torch.empty_like(y) for _ in cell.states]
                before = self._before(spaces, rows, features) if keep else []
                if source.has_options(cell, features):
                    extra = options.argument(layer, ahead.together, before=before, sequences=sequences)
            ahead(
                stream,
                *pair([gate.data_ptr() for gate in gates]), *_recurrent(weights), *self._vectors(weights),
                *self._places(starts, layer), *self._places(finals, layer), y.data_ptr(),
                *self._spaces(spaces, rows), *self._inside(spaces, rows), time, batch, *extra,
            )  # fmt: skip
            if keep:
                saved += [as_bytes(gate) for gate in gates] + spaces
                saved += [as_bytes(y)] if layer < form.layers - 1 else []
            x = _with_dropout(self._above(y), call, layer) if layer < form.layers - 1 else y
        return Outcome(y, tuple(finals), (*saved, *(normed if keep else ())), tuple(sequences))

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        units, batch, time, directions = self.sizes
        form, cell, dtype, constants = self.form, self.cell, self.problem.dtype, self.problem.constants
        states = len(cell.states)
        grad_y, *others = (None if grad is None else plain(grad.to(dtype)) for grad in grads)
        grad_finals, grad_sequences = others[:states], others[states:]
        starts = [plain(state.to(dtype)) for state in call.states]
        grad_starts = [torch.empty_like(state) for state in starts]
        per_layer = [_plain_weights(own) for own in split(self.whole, call.weights)]
        grad_weights: list[LayerWeights] = list(per_layer)
        grad_dropout: list[Tensor | None] = [None] * len(call.dropout)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        options, features = self._options(call, stream), PLAIN
        found = None if options is None else Gradients(call, options)
        each, width = 2 * directions + 1, (*call.x.shape[:-1], directions * units)
        summing = self._sums
        assert summing is not None, "a backward is planned with a gradient"
        rows = call.x.shape[0] if self.problem.packed else time * batch
        for layer in reversed(range(form.layers)):
            if options is not None:
                features = options.features(layer, backward=True)
            back = self._kernel("backward", features)
            weights = per_layer[layer * directions : (layer + 1) * directions]
            kept = saved[layer * each : (layer + 1) * each]
            spaces = kept[directions : 2 * directions]
            out = y if layer == form.layers - 1 else from_bytes(kept[-1], width, dtype)
            below = self._above(from_bytes(saved[layer * each - 1], width, dtype)) if layer else call.x
            x = _with_dropout(below, call, layer - 1) if layer else below
            if options is not None and (layer == 0 or call.dropout):
                x = options.cleaned(x)
            x, every = x.reshape(rows, -1), weights
            if self.norms is not None:
                weights = [self.norms.inner(own) for own in weights]
            to_gates = [x.new_empty(rows, len(cell.gates) * units) for _ in weights]
            to_apart = to_gates  # nothing is written there
            if self.saving.apart:
                to_apart = [x.new_empty(rows, len(self.saving.apart) * units) for _ in weights]
            columns = summing.columns
            sums = [x.new_empty(back.sums, columns, dtype=torch.float32) if columns else None for _ in weights]
            out = plain(out)
            entered: Sequence[Tensor | ByGate] = ()
            operands_inside = [self._operands(spaces, rows, direction) for direction in range(directions)]
            extra: list[int | float] = []
            if found is not None and options is not None:
                entered = before = self._before(spaces, rows, features)
                writes = source.writes_entered(cell, features)
                operands = [x.new_empty(rows, units) for _ in weights] if writes else []
                if operands:
                    entered = operands
                if features.noise >= BY_GATE:
                    entered = self._by_gate(layer, before, operands_inside, options)
                if source.has_options(cell, features):
                    extra = found.argument(layer, back.together, features, before, operands, grad_sequences)
            back(
                stream,
                *pair([gate.data_ptr() for gate in kept[:directions]]),
                *pair([address(own.hh) for own in weights]),
                *self._vectors(weights), *self._places(starts, layer), out.data_ptr(), *self._spaces(spaces, rows),
                0 if grad_y is None else grad_y.data_ptr(), *self._places(grad_finals, layer),
                *pair([gate.data_ptr() for gate in to_gates]), *pair([gate.data_ptr() for gate in to_apart]),
                *self._places(grad_starts, layer), *pair([0 if s is None else s.data_ptr() for s in sums]),
                *self._inside(spaces, rows)[:2], time, batch, *extra,
            )  # fmt: skip
            for one in entered:
                if isinstance(one, ByGate):
                    one.enter()
            branch = self._branch() if torch._C._cuda_isCurrentStreamCapturing() else None
            aside = branch if branch is not None and branch.fork() else None
            with _on(aside):
                summed = summing(stream if aside is None else aside.stream, sums)
            grad_x, wanted = None, layer > 0 or "x" not in constants
            for direction, own in enumerate(weights):
                index = layer * directions + direction
                to_x, summed_here = to_gates[direction], summed[direction]
                if self.norms is not None:
                    first = form.layers * each - 1 + index * KEPT
                    normed = self.norms.backward(stream, to_x, every[direction], saved[first : first + KEPT])
                    to_x, vectors = normed.x, self.norms.joined(normed, summed_here.vectors)
                    summed_here = summed_here._replace(bias_ih=normed.bias, vectors=vectors)
                if entered:
                    start, operand = None, entered[direction]
                else:
                    hidden = out if directions == 1 else out.narrow(2, direction * units, units)
                    start, operand = starts[0][index] if starts else None, hidden
                dropped = None if options is None else self._dropped(layer, direction, options)
                if dropped is None:
                    to_ih = self._product(to_x.t(), x, tf32=self.tf32)
                    if wanted:
                        grad_x = self._product(to_x, own.ih, grad_x, grad_x is not None, tf32=self.tf32)
                else:
                    to_input, to_ih, to_mask = dropped.gradients(to_x, x, own.ih, wanted)
                    grad_x = to_input if grad_x is None or to_input is None else grad_x + to_input
                    if found is not None and to_mask is not None:
                        found.of_input(index, to_mask)
                with _on(aside):
                    to_hh = self._recurrent_gradients(
                        own, operand, bool(entered), start, to_gates[direction], to_apart[direction], direction == 1,
                        operands_inside[direction],
                    )  # fmt: skip
                of_biases = summed_here.bias_ih, summed_here.bias_hh
                grad_weights[index] = LayerWeights(to_ih, to_hh, *of_biases, None, summed_here.vectors)
                if isinstance(operand, ByGate) and found is not None and found.wants_noise(index):
                    parts = [self._of_gate(to_gates[direction], to_apart[direction], block) for block in self.gates]
                    found.of_noise(index, operand.gradient(parts, _hidden(own)))
            if aside is not None:
                aside.join()
            if grad_x is not None:
                grad_x = grad_x.view(*call.x.shape[:-1], -1)
            if grad_x is not None and layer and call.dropout:
                mask = call.dropout[layer - 1]
                if "dropout" not in constants:
                    of_mask = grad_x * below
                    grad_dropout[layer - 1] = of_mask if options is None else options.cleaned(of_mask)
                grad_x = grad_x * (mask if options is None else options.cleaned(mask))
            grad_y = self._below(grad_x) if layer and grad_x is not None else grad_x
        if found is None:
            return [grad_y, *grad_starts, *join(grad_weights), *grad_dropout]
        return [grad_y, *grad_starts, *join(grad_weights), *grad_dropout, *found.results()]

    def _above(self, y: Tensor) -> Tensor:
        """What the layer above is given of a layer's output."""
        return y

    def _below(self, grad: Tensor) -> Tensor:
        """The gradient of a layer's output, from that of `_above`."""
        return grad

    def _entering(self, x: Tensor, call: Call, layer: int, options: Options | None) -> Tensor:
        """x of every row; before a norm, whose gradient reads it, with zeros in the steps that do not count."""
        if self.norms is not None and options is not None and (layer == 0 or call.dropout):
            x = options.cleaned(x)
        return x.reshape(call.x.shape[0] if self.problem.packed else -1, x.shape[-1])

    def _by_gate(
        self, layer: int, before: Sequence[Tensor], operands: Sequence[Sequence[Tensor]], options: Options
    ) -> list[ByGate]:
        scale, (_, masks) = options.noise_scale(layer), options.noise(layer)
        rows = zip(masks, before, operands, strict=True)
        return [ByGate(mask, scale, (h, *inside), self.links, options) for mask, h, inside in rows if mask is not None]

    def _of_gate(self, to_gates: Tensor, to_apart: Tensor, block: tuple[bool, int, int, int]) -> Tensor:
        """The part of the gradients of gates that a block of `blocks_of` names."""
        (apart, first, count, _), units = block, self.form.units
        matrix = to_apart if apart else to_gates
        return matrix if count * units == matrix.shape[1] else matrix.narrow(1, first * units, count * units)

    def _dropped(self, layer: int, direction: int, options: Options) -> Dropped | None:
        mask = options.input_mask(layer, direction)
        given = options.of_masks and options.given_masks(layer, direction).input is not None
        return None if mask is None else Dropped(mask, options, given, self.tf32)

    def _gates(self, x: Tensor, weights: Sequence[LayerWeights], layer: int, options: Options | None) -> list[Tensor]:
        """x of every gate at every step, without its bias."""
        made, wide = [], self.norms is not None or self.gate == torch.float32
        for direction, own in enumerate(weights):
            dropped = None if options is None else self._dropped(layer, direction, options)
            if dropped is None:
                made.append(self._product(x, own.ih.t(), tf32=self.tf32, wide=wide))
            else:
                made.append(dropped.projected(x, own.ih, wide))
        return made

    def _branch(self) -> Branch | None:
        """Of a CUDA graph, for gradients beside others; None where they gain nothing by it, or read each other."""
        if self.norms is not None or not leaves_room(self.problem, self.chip):
            return None
        return branch_of(self.index, torch._C._cuda_getCurrentRawStream(self.index))

    def _recurrent_gradients(
        self, own: LayerWeights, hidden: Tensor | ByGate, whole: bool, start: Tensor | None, to_gates: Tensor,
        to_apart: Tensor, reverse: bool, operands: Sequence[Tensor] = (),
    ) -> Tensor | None:  # fmt: skip
        """Of the recurrent weights of one layer and direction, by products over all steps and rows.

        Args:
            hidden: the output, which entered the product of the step after it; `whole`: what entered each product.
            operands: what entered each product inside the step; `hidden` has it where masks are by gate.
        """
        units, batch, time, _ = self.sizes
        rest, at = (time - 1) * batch, 0 if reverse else batch  # the rows of all steps but the first to be computed
        if whole:
            rest, at = len(to_gates), 0
        else:  # the output of the step before it, and the initial state
            assert isinstance(hidden, Tensor)
            hidden = hidden.narrow(0, int(reverse), time - 1).reshape(rest, units)
        written: set[int] = set()  # first recurrent gates

        def multiply(into: int, count: int, part: Tensor, entered: Tensor, first: bool, last: Tensor | None) -> None:
            """Of `count` gates from `into` on; `first`: `entered` is of all steps but one, which `last` entered."""
            target = hh if count * units == hh.shape[0] else hh.narrow(0, into * units, count * units)
            again, most_of = into in written, part.narrow(0, at, rest) if first else part
            written.add(into)
            if len(most_of):
                self._product(most_of.t(), entered, target, again, tf32=self.tf32)
            elif not again:
                target.zero_()
            if last is not None:
                product(part.narrow(0, 0 if at else rest, batch).t(), last, target, add=True, tf32=self.tf32)

        hh = to_gates.new_empty(0, units) if own.hh is None else torch.empty_like(own.hh)
        if self.links is not None:
            for link, ((gate, place), block) in enumerate(zip(self.links, self.gates, strict=True)):
                part = self._of_gate(to_gates, to_apart, block)
                if isinstance(hidden, ByGate):
                    multiply(gate, 1, part, hidden[link], False, None)
                elif place:
                    multiply(gate, 1, part, operands[place - 1], False, None)
                else:
                    multiply(gate, 1, part, hidden, True, start)
            for gate in {*range(len(self.cell.recurrent))} - written:  # the step does not read it
                hh.narrow(0, gate * units, units).zero_()
        else:
            by_gate, element = isinstance(hidden, ByGate), to_gates.element_size()
            at_once = by_gate and units * element % 16 == 0 and not exact(self.problem)
            at_once = at_once and better_together(len(self.gates), units, len(to_gates), element)
            for block in self.gates if by_gate and not at_once else self.blocks:
                part, (_, _, count, into) = self._of_gate(to_gates, to_apart, block), block
                if isinstance(hidden, ByGate) and at_once:  # one gate's product is too small for a whole GPU
                    gates = part.unflatten(1, (count, units)).permute(1, 2, 0)
                    target = hh.narrow(0, into * units, count * units).unflatten(0, (count, units))
                    each_product(gates, hidden[into : into + count], target, self.tf32)
                else:
                    multiply(into, count, part, hidden[into] if isinstance(hidden, ByGate) else hidden, True, start)
        return None if own.hh is None else hh

    def _space(self, like: Tensor, rows: int, features: Features) -> Tensor:
        """Room for what backward reads beside the gates: states in float32, r of gates that are not a sum, h before."""
        return like.new_empty(self._space_size(rows, features), dtype=torch.uint8)

    def _space_size(self, rows: int, features: Features) -> int:
        """Its bytes."""
        states, apart = len(self.cell.states) - 1, len(self.saving.apart)
        each = 4 * states + apart * self.gate.itemsize + features.before * self.problem.dtype.itemsize
        each += self._rounds * self.problem.dtype.itemsize
        return rows * (self.form.units * each + 4 * self._levels)

    @property
    def _levels(self) -> int:
        """Means that are saved for each step of a sequence, after the states."""
        return 0 if self.steps is None else self.steps.levels

    @property
    def _rounds(self) -> int:
        """Products inside the step, whose operands are saved after r."""
        return 0 if self.steps is None else len(self.steps.forward.rounds)

    def _inside(self, spaces: Sequence[Tensor], rows: int) -> tuple[int, ...]:
        """The addresses of the means of each direction, then of the operands of products inside the step."""
        if self.steps is None:
            return ()
        if not spaces:
            return 0, 0, 0, 0
        states = 4 * (len(self.cell.states) - 1) * rows * self.form.units
        apart = 4 * self._levels * rows + len(self.saving.apart) * self.gate.itemsize * rows * self.form.units
        levels = [space.data_ptr() + states for space in spaces]
        return *pair(levels), *pair([level + apart for level in levels])

    def _operands(self, spaces: Sequence[Tensor], rows: int, direction: int) -> list[Tensor]:
        """What entered each product inside the step, [rows, units]."""
        if not self._rounds:
            return []
        units, dtype = self.form.units, self.problem.dtype
        first = self._inside(spaces, rows)[2 + direction] - spaces[direction].data_ptr()
        size = rows * units * dtype.itemsize
        found = spaces[direction][first : first + self._rounds * size].split(size)
        return [from_bytes(data, (rows, units), dtype) for data in found]

    def _spaces(self, spaces: Sequence[Tensor], rows: int) -> tuple[int, int, int, int]:
        """The addresses of r apart, then of the states, in each direction's room; 0 where there is none."""
        if not spaces:
            return 0, 0, 0, 0
        states = 4 * ((len(self.cell.states) - 1) * self.form.units + self._levels) * rows
        return *pair([space.data_ptr() + states for space in spaces]), *pair([space.data_ptr() for space in spaces])

    def _before(self, spaces: Sequence[Tensor], rows: int, features: Features) -> list[Tensor]:
        """The first state before each step, [rows, units], at the end of each direction's room."""
        if not features.before:
            return []
        shape, dtype = (rows, self.form.units), self.problem.dtype
        size = rows * self.form.units * dtype.itemsize
        return [from_bytes(space[space.numel() - size :], shape, dtype) for space in spaces]

    def _vectors(self, weights: Sequence[LayerWeights]) -> list[int]:
        count = max(1, len(self.cell.vectors))
        given = [[vector.data_ptr() for vector in own.vectors] or [0] * count for own in weights]
        return [*given[0], *(given[1] if len(given) > 1 else [0] * count)]

    def _places(self, states: Sequence[Tensor | None], layer: int) -> list[int]:
        """The addresses of a layer's part of each state [layers x directions, batch, units]; 0 where there is none."""
        units, batch, _, directions = self.sizes
        offset = layer * directions * batch * units * self.problem.dtype.itemsize
        given = [0 if state is None else state.data_ptr() + offset for state in states]
        return given or [0] * len(self.cell.states)


def largest(problem: Problem) -> tuple[tuple[int, ...], int]:
    """The sizes along which the matrices of products lie, and the multiplications of the largest product."""
    form = problem.form
    sizes = form.inputs, form.layer_inputs(1), form.units, len(form.cell.gates) * form.units
    return sizes, problem.time * problem.batch * max(sizes[:3]) * sizes[3]


def leaves_room(problem: Problem, chip: Chip) -> bool:
    """Whether two products of backward may run beside each other in a graph, and gain by it: measured on 9.0."""
    if chip.capability != (9, 0) or "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        return False  # on other chips nothing was measured, and with another workspace than the usual none ran
    return largest(problem)[1] < _BESIDE


_BESIDE = 2_000_000_000
"""Multiplications of the largest product of backward, below which two of them run beside each other in a graph.

A train step took, one after the other and beside each other (H200, 2026-11-23, two runs an hour apart in which
torch.nn's took the same to 2 percent): GRU 1x32x30x128 107 and 96 us with
TF32, 139 and 128 in float32, 1x62x200x168 556 and 554, LSTM in bfloat16 1x32x30x128 86 and 80, 1x32x30x512 118 and 117
(TF32 188 and 183, float32 443 and 420), 1x128x200x128 408 and 406; a product of 4 billion takes 14 us by itself,
which is 580 TFLOP/s."""


@contextmanager
def _on(branch: Branch | None) -> Iterator[None]:
    """What is launched goes to a branch; to the current stream where None."""
    if branch is None:
        yield
        return
    with torch.cuda.stream(branch.as_torch):
        yield


def exact(problem: Problem) -> bool:
    """Whether float32 is to be float32 in the products too."""
    return problem.dtype == torch.float32 and not problem.tf32


def blocks_of(saving: source.Saving, joined: bool = True) -> list[tuple[bool, int, int, int]]:
    """Where the gradients of the recurrent gates lie; with `joined` neighbours as one.

    Each is: whether among those that are apart, the first gate there, how many, and the first recurrent gate.
    """
    found: list[tuple[bool, int, int, int]] = []
    for recurrent in range(len(saving.apart) + sum(place >= 0 for place in saving.sums)):
        apart = recurrent in saving.apart
        found.append((apart, (saving.apart if apart else saving.sums).index(recurrent), 1, recurrent))
    return neighbours(found) if joined else found


def neighbours(blocks: Sequence[tuple[bool, int, int, int]]) -> list[tuple[bool, int, int, int]]:
    """Those of `blocks_of` that lie one behind the other as one, there and among the recurrent gates."""
    found: list[tuple[bool, int, int, int]] = []
    for apart, place, count, recurrent in blocks:
        last = found[-1] if found else (not apart, 0, 0, 0)
        if (last[0], last[1] + last[2], last[3] + last[2]) == (apart, place, recurrent):
            found[-1] = (apart, last[1], last[2] + count, last[3])
        else:
            found.append((apart, place, count, recurrent))
    return found


_prepared: dict[tuple[int, torch.device], tuple[Plan, Any]] = {}


def layers(plan: Plan, device: torch.device, make: Callable[[Plan, torch.device], Made]) -> Made:
    """A plan made ready on a device, once: a plan is the same object as long as `plan.plan` keeps it."""
    key = (id(plan), device)
    found = _prepared.get(key)
    if found is None or found[0] is not plan:
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        found = _prepared[key] = (plan, make(plan, device))
    return found[1]


_MOST_PREPARED = 8192  # as many as `plan.plan` keeps


def _recurrent(weights: Sequence[LayerWeights]) -> tuple[int, ...]:
    """The addresses of the weights, then of r's bias, then of x's."""
    of_r = [0 if own.bias_hh is None else own.bias_hh.data_ptr() for own in weights]
    of_x = [0 if own.bias_ih is None else own.bias_ih.data_ptr() for own in weights]
    return *pair([address(own.hh) for own in weights]), *pair(of_r), *pair(of_x)


def pair(values: Sequence[int]) -> tuple[int, int]:
    """For each direction; 0 for one that is not there."""
    return (values[0], values[1]) if len(values) == 2 else (values[0], 0)


def plain(tensor: Tensor, at_once: int = 8) -> Tensor:
    """The tensor as kernels read it, in one piece and so many bytes at a time: mostly the tensor itself."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % at_once == 0 else tensor.clone()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _hidden(own: LayerWeights) -> Tensor:
    assert own.hh is not None, "the obstacles say that there are recurrent weights"
    return own.hh


def _plain_weights(own: LayerWeights) -> LayerWeights:
    if own.hh is None:
        return own._replace(vectors=tuple(vector.contiguous() for vector in own.vectors))
    whole = all(part is None or part.is_contiguous() for part in (*own[1:4], *own.vectors))
    if whole and own.hh.data_ptr() % 16 == 0:
        return own
    of_x, of_r = (None if bias is None else bias.contiguous() for bias in (own.bias_ih, own.bias_hh))
    vectors = tuple(vector.contiguous() for vector in own.vectors)
    return own._replace(hh=plain(_hidden(own), 16), bias_ih=of_x, bias_hh=of_r, vectors=vectors)


def _with_dropout(x: Tensor, call: Call, layer: int) -> Tensor:
    """The input of the layer above: the output of this one, after dropout where there is any."""
    return x * call.dropout[layer] if layer < len(call.dropout) else x
