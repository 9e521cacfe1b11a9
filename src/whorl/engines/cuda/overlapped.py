"""Layers beside each other: while one computes a chunk of steps, the one below computes the next chunk.

A kernel whose recurrent weights lie on a part of the multiprocessors leaves the others idle, and its steps wait for
each other.  So layers take less time beside each other than one by one: each has a stream of its own, on which its
chunks follow each other, and a chunk waits for that of the layer below, backward for that of the layer above.  What a
chunk leaves to the next, states or their gradients, is float32.  No kernel waits for another: streams order them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import Grads
from whorl.engines.cuda import grid, tiling
from whorl.engines.cuda.aligned import Made
from whorl.engines.cuda.branch import Branch, branch_of
from whorl.engines.cuda.grid import Grid
from whorl.engines.cuda.layers import Wanted, address, exact, plain
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.places import Room
from whorl.engines.cuda.plain import Plain, as_read, is_plain
from whorl.engines.cuda.prepare import shared_bytes, size_of
from whorl.engines.cuda.products import handle
from whorl.engines.cuda.source import PLAIN, Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import staged
from whorl.engines.cuda.tiling import LARGEST_CLUSTER, Chip, Size, Tile
from whorl.problem import Call, Outcome, Plan, Problem


class Chunk(NamedTuple):
    """Steps that a launch computes."""

    first: int
    steps: int

    def of(self, tensor: Tensor) -> Tensor:
        """What of [time, ...] these are."""
        return tensor.narrow(0, self.first, self.steps)


def part_of(chip: Chip, layers: int) -> Chip:
    """What of a chip each of so many layers has for itself."""
    return chip._replace(multiprocessors=chip.multiprocessors // layers)


def chunks(problem: Problem, chip: Chip, kind: str, eager: bool) -> list[Chunk]:
    """In which parts layers compute the steps of a problem, where they gain by it; else one of all steps.

    Args:
        kind: "forward" or "backward".
        eager: the host launches each part, and is not to be slower than the GPU; else a CUDA graph does.
    """
    form, time = problem.form, problem.time
    whole = [Chunk(0, time)]
    if not _can(problem) or chip.capability < (9, 0):
        return whole
    size = size_of(form.cell, form.units, problem.dtype.itemsize, PLAIN, exact(problem))
    most = _chunks(size, chip, problem.batch, form.layers, time, kind, eager)
    each = -(-time // most)
    return [Chunk(first, min(each, time - first)) for first in range(0, time, each)]


def _can(problem: Problem) -> bool:
    """Some plain layers in one direction; a third state would lie behind all steps of the second."""
    form, cell = problem.form, problem.form.cell
    simple = is_plain(problem) and not (form.projection or cell.vectors or staged(cell))
    return simple and form.directions == 1 and len(cell.states) <= 2 and 1 < form.layers <= _LAYERS


def overlaps(problem: Problem, chip: Chip, kind: str) -> bool:
    """Whether layers run beside each other in a pass, from a CUDA graph or launched by the host."""
    return any(len(chunks(problem, chip, kind, eager)) > 1 for eager in (False, True))


def described(problem: Problem, chip: Chip, kind: str) -> str:
    """The same in words; empty where they do not."""
    if not overlaps(problem, chip, kind):
        return ""
    form, part = problem.form, part_of(chip, problem.form.layers)
    size = size_of(form.cell, form.units, problem.dtype.itemsize, PLAIN, exact(problem))
    tile = grid.choose(size, part, problem.batch, 1, kind)
    assert tile is not None, "they would not run beside each other"
    launched, captured = (chunks(problem, chip, kind, eager)[0].steps for eager in (True, False))
    where = f"chunks of {captured} steps" if launched == captured else f"chunks of {captured} steps in a CUDA graph"
    if launched != captured:
        where += ", one by one without" if launched == problem.time else f", of {launched} without"
    tile = grid.beside(tile)
    shared = shared_bytes(kind, form.cell, tile, chip.architecture)
    return f"layers beside each other, in {where}; then {grid.described(tile, shared, 1)}"


@lru_cache(maxsize=1024)
def _chunks(size: Size, chip: Chip, batch: int, layers: int, time: int, kind: str, eager: bool) -> int:
    """The number of chunks with which all layers are estimated to end first; 1 where that is little gain.

    Fitted to 20 stacks of LSTM and GRU, 128 to 1,500 units, 2 to 4 layers, 30 to 1,024 steps, from CUDA graphs on an
    H200 (2026-11-24): where they are estimated to gain enough they took 0.61 to 0.96 of the time.
    In true float32, where products take most of the time, they gained nothing.  Two kernels whose blocks exchange
    through L2 took 1.3 times as long beside each other (LSTM, 768 units), clusters of 16 blocks 1.15 times (512).
    """
    part, most = part_of(chip, layers), min(time // _FEWEST, _MOST)
    tile = grid.estimated(size, part, batch, 1, kind)
    if most < 2 or tile is None or size.exact or (isinstance(tile, Tile) and not _fit(tile, chip, batch, layers, kind)):
        return 1
    back, far = kind == "backward", isinstance(tile, Spread)
    alone, beside = (grid.step_time(size, its, batch, 1, kind) for its in (chip, part))
    if far and beside > 1.25 * alone:
        return 1
    large = far or tile.cluster == LARGEST_CLUSTER
    beside *= 1.3 if far else 1.15 if large else 1.0  # they share L2 and what leads to it
    each = batch * size.units**2 * size.gates / (250e6 if size.element == 2 else 125e6)  # a product, for each step
    begins = 14.0 if size.units * size.element % 16 else 4.0  # a product of rows that are copied, and of others
    after = 2 * (begins + time * each) * back  # gradients of weights
    one_by_one = layers * (time * (alone + each) + _LAUNCH + begins * back + after)

    def taken(count: int) -> float:
        longest = -(-time // count)
        one = longest * (beside + each) + (_LAUNCH_FAR if far or large else _LAUNCH) + 4.0 * back
        return (-(-time // longest) + layers - 1) * (max(one, layers * _HOST) if eager else one) + after

    best = min(range(2, most + 1), key=taken)
    return best if taken(best) * (_WORTH_BACK if back and not eager else _WORTH) < one_by_one else 1


def _fit(tile: Tile, chip: Chip, batch: int, layers: int, kind: str) -> bool:
    """Whether the clusters of all layers run at once."""
    part = part_of(chip, layers)
    count = tiling.parts(part, batch, 1, tile, kind)
    return tile.cluster * count <= part.multiprocessors and layers * count <= chip.resident(tile.cluster)


_LAUNCH, _LAUNCH_FAR, _HOST = 9.0, 22.0, 60.0
"""Microseconds of a chunk beside its steps: on the GPU to launch it, until weights come and other streams go on; where
there are many blocks; and of the host, which launches it in an eager call."""
_WORTH, _WORTH_BACK = 1.15, 1.08
"""By how much more one by one is to be estimated: forward of GRU 2x32x100x256 (TF32) was at 1.13 and gained nothing."""
_MOST, _FEWEST, _LAYERS = 64, 8, 4  # chunks, steps of one but the last, layers: what was measured


class Streams:
    """One for each layer: for one the current stream, for each other a `Branch` beside it.

    Args:
        index: torch's number of the device.
        count: of layers.
    """

    def __init__(self, index: int, count: int) -> None:
        self._index, self._count = index, count

    @contextmanager
    def begin(self) -> Iterator[Sequence[torch.cuda.Stream] | None]:
        """The streams, which begin here and end where this does; None where one is not to be had."""
        main, forked = torch.cuda.current_stream(self._index), list[Branch]()
        try:
            for number in range(1, self._count):
                branch = branch_of(self._index, main.cuda_stream, number)
                if branch is None or not branch.fork():
                    break
                forked.append(branch)
            whole = len(forked) == self._count - 1
            yield [main, *(branch.as_torch for branch in forked)] if whole else None
        finally:
            torch.cuda.set_stream(main)
            for branch in forked:
                branch.join()


class Overlapped(Plain):
    """A plan's kernels, for a problem whose layers `overlaps`."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._beside: dict[str, Grid] = {}
        super().__init__(plan, device)
        ways = [(kind, eager) for kind in self._kinds for eager in (False, True)]
        self._parts = {(kind, eager): chunks(self.problem, self.chip, kind, eager) for kind, eager in ways}
        self._streams = Streams(self.index, self.form.layers)
        self._kept_beside, self._in_room_beside, size = self._laid_out(one_by_one=False)
        self._room_beside = laid_out((size,), torch.uint8)
        units, batch, _, _ = self.sizes
        self._carried = laid_out((2, len(self.cell.states), self.form.layers, batch, units), torch.float32)
        counts = {chunk.steps for parts in self._parts.values() for chunk in parts}
        self._between = {count: self._products_between(count) for count in counts}
        if "backward" in self._beside:
            self._make_ready_beside()
        self._moved = {
            key: self._further(key[0], parts) for key, parts in self._parts.items() if key[0] in self._beside
        }

    @property
    def _kinds(self) -> tuple[str, ...]:
        return ("forward", "backward")[: 1 + self.problem.gradient]

    def by_tape(self, call: Call) -> bool:
        in_chunks = any(len(self._parts[kind, True]) > 1 for kind in self._kinds)  # whose streams wait for events
        return not in_chunks and super().by_tape(call)

    def _ready(self, ahead: Features, back: Features) -> None:
        """Those of all steps and those of a part together, as they are compiled side by side."""
        if self._beside:
            return
        many = [kind for kind in self._kinds if overlaps(self.problem, self.chip, kind)]
        whole, part = [*zip(self._kinds, (ahead, back), strict=False)], part_of(self.chip, self.form.layers)
        wanted = [Wanted(kind, features, self.chip) for kind, features in whole]
        made = self._grids([*wanted, *(Wanted(kind, PLAIN, part, carried=True) for kind in many)])
        self._made |= zip(whole, made[: len(whole)], strict=True)
        self._beside |= zip(many, made[len(whole) :], strict=True)

    def _products_between(self, steps: int) -> tuple[Made, Made]:
        """Forward and backward, between a layer and the one below it, of so many steps."""
        units, batch, _, _ = self.sizes
        gates, rows, dtype, tf32 = len(self.cell.gates) * units, steps * batch, self.problem.dtype, self.tf32
        ahead = self._product.ready(dtype, (rows, units, gates), (0, 1), (units, units, gates), tf32, self.gate)
        return ahead, self._product.ready(dtype, (rows, gates, units), (0, 0), (gates, units, units), tf32)

    def _make_ready_beside(self) -> None:
        """Room for what backward has meanwhile, of which each layer has its own, and what kernels take of all."""
        units, batch, time, _ = self.sizes
        layers, room, element, rows = range(self.form.layers), Room(), self.problem.dtype.itemsize, time * batch
        gates, apart = len(self.cell.gates) * units, len(self.saving.apart) * units
        assert self._sums is not None, "it is made ready with the kernels"
        most = max(len(self._parts["backward", eager]) for eager in (False, True))
        self._sums_of_part = self._beside["backward"].sums * self._sums.columns * 4
        self._gates_beside = room.parts(len(layers), rows * gates * element)
        self._apart_beside = room.parts(len(layers), rows * apart * element) if apart else self._gates_beside
        self._sums_beside = room.parts(len(layers), most * self._sums_of_part)
        self._outputs_beside = room.parts(len(layers) - 1, rows * units * element)
        self._meanwhile_beside = laid_out((room.size,), torch.uint8)
        own = {"to_gates": layers, "to_apart": layers, "sums": layers, "to_output": layers[:-1]}
        known = [f"{what} {layer}{' 0' * (what != 'to_output')}" for what, its in own.items() for layer in its]
        initial = [*self._of_states("start", layers), *self._of_states("to_start", layers)] * self.problem.initial
        self._names_back = [*self._names_of_room, *known, "y", "to_y", *initial, *self._of_states("to_final", layers)]
        self._takes_beside = [self._taking_back(layer, layer, self._names_back) for layer in layers]

    def _further(self, kind: str, parts: Sequence[Chunk]) -> list[list[int]]:
        """For each chunk, how many bytes further on what a pass lists lies for it."""
        units, batch, _, _ = self.sizes
        element, gate = self.problem.dtype.itemsize, self.gate.itemsize
        gates, apart = len(self.cell.gates), len(self.saving.apart)
        each = {
            "gates": gates * gate, "apart": apart * gate, "states": 4, "output": element, "y": element, "to_y": element,
            "to_gates": gates * element, "to_apart": apart * element, "to_output": element,
        }  # fmt: skip
        whats = [name.split()[0] for name in (self._names_ahead if kind == "forward" else self._names_back)]
        rows = [chunk.first * batch * units for chunk in parts]
        return [
            [number * self._sums_of_part if what == "sums" else row * each.get(what, 0) for what in whats]
            for number, row in enumerate(rows)
        ]

    def _carries(self, base: int, layer: int, came: int | None, left: int | None) -> list[int]:
        """Addresses of what chunks with these numbers left, of each state; 0 for none."""
        units, batch, _, _ = self.sizes
        states, layers = len(self.cell.states), self.form.layers
        places: list[int] = []
        for number in (came, left):
            if number is None:
                places += [0] * states
            else:
                at = [(number % 2 * states + state) * layers + layer for state in range(states)]
                places += [base + 4 * units * batch * place for place in at]
        return places

    def _way(self, kind: str) -> tuple[list[Chunk], list[list[int]]]:
        """The chunks of a pass that begins now, and how far on things lie for each."""
        key = kind, not torch._C._cuda_isCurrentStreamCapturing()
        return (self._parts[key], self._moved[key]) if len(self._parts[key]) > 1 else ([], [])

    def forward(self, call: Call) -> Outcome:
        parts, moved = self._way("forward")
        if parts:
            with self._streams.begin() as streams:
                if streams is not None:
                    made, _alive = self._forward(call, parts, moved, streams)
                    return made
        return super().forward(call)

    def _forward(
        self, call: Call, parts: Sequence[Chunk], moved: Sequence[Sequence[int]], streams: Sequence[torch.cuda.Stream]
    ) -> tuple[Outcome, list[Any]]:
        """What `forward` gives, and what is to live until all streams are joined."""
        (units, batch, _, _), dtype, last = self.sizes, self.problem.dtype, len(parts) - 1
        x, (weights, at) = call.x.contiguous(), self._weights(call)
        room, carried, kept = empty(*self._room_beside), empty(*self._carried), self._kept_beside
        base, kernel = room.data_ptr(), self._beside["forward"]
        self._input_products.ahead(None, 0, 0, handle(dtype), x, at[0], base + kept[0].gates[0])
        y, finals, places, starts = self._listed(call, at, base, self._in_room_beside)
        step, gates = batch * units * dtype.itemsize, len(self.cell.gates) * batch * units * self.gate.itemsize
        for number, part in enumerate(parts):
            here = [place and place + further for place, further in zip(places, moved[number], strict=True)]
            came, left = number - 1 if number else None, number if number < last else None
            below: torch.cuda.Event | None = None
            for layer, stream in enumerate(streams):
                torch.cuda.set_stream(stream)
                if below is not None:
                    stream.wait_event(below)
                    entered = base + kept[layer - 1].output + part.first * step
                    if call.dropout:
                        output = self._output_at(room, kept[layer - 1].output)
                        dropped = part.of(output) * part.of(call.dropout[layer - 1])
                        entered = dropped.data_ptr()
                    into = base + kept[layer].gates[0] + part.first * gates
                    self._between[part.steps][0](handle(dtype), entered, at[layer * self._every], into)
                carries = self._carries(carried.data_ptr(), layer, came, left)
                kernel(stream.cuda_stream, *self._takes_ahead[layer](here), part.steps, batch, *carries)
                below = stream.record_event() if layer < self.form.layers - 1 else None
        made = Outcome(y, tuple(finals), (room,) if self.problem.gradient else ())
        return made, [x, weights, room, carried, starts]

    def backward(self, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        parts, moved = self._way("backward")
        if parts:
            with self._streams.begin() as streams:
                if streams is not None:
                    made, _alive = self._backward(call, y, saved[0], grads, parts, moved, streams)
                    return made
        return super().backward(call, y, saved, grads)

    def _backward(
        self, call: Call, y: Tensor, room: Tensor, grads: Grads, parts: Sequence[Chunk],
        moved: Sequence[Sequence[int]], streams: Sequence[torch.cuda.Stream],
    ) -> tuple[Grads, list[Any]]:  # fmt: skip
        """What `backward` gives, and what is to live until all streams are joined."""
        (units, batch, _, _), dtype, last = self.sizes, self.problem.dtype, self.form.layers - 1
        grad_y, *grad_finals = [None if grad is None else as_read(grad, dtype) for grad in grads]
        x, y, (weights, at) = call.x.contiguous(), plain(y), self._weights(call)
        starts = [as_read(state, dtype) for state in call.states]
        grad_starts = [empty(*self._state) for _ in starts]
        grad_x = None if "x" in self.problem.constants else empty(*self._input)
        made = [empty(*laid) for laid in self._weights_laid]
        of_dropout = [None if "dropout" in self.problem.constants else torch.empty_like(one) for one in call.dropout]
        meanwhile, carried = empty(*self._meanwhile_beside), empty(*self._carried)
        base, kernel, far = room.data_ptr(), self._beside["backward"], self._far
        to_gates, to_apart, sums, to_outputs = (
            [meanwhile.data_ptr() + place for place in its]
            for its in (self._gates_beside, self._apart_beside, self._sums_beside, self._outputs_beside)
        )
        places = [
            *at, *[base + place for place in self._in_room], *to_gates, *to_apart, *sums, *to_outputs,
            y.data_ptr(), address(grad_y), *[one.data_ptr() + away for one in (*starts, *grad_starts) for away in far],
            *[0 if grad is None else grad.data_ptr() + away for grad in grad_finals for away in far],
        ]  # fmt: skip
        step = batch * units * dtype.itemsize
        of_layers = list(zip(range(last, -1, -1), streams, strict=True))  # the last layer begins
        for number in range(len(parts) - 1, -1, -1):
            part = parts[number]
            here = [place and place + further for place, further in zip(places, moved[number], strict=True)]
            came, left = number + 1 if number < len(parts) - 1 else None, number or None
            above: torch.cuda.Event | None = None
            for layer, stream in of_layers:
                torch.cuda.set_stream(stream)
                if above is not None:
                    stream.wait_event(above)
                carries = self._carries(carried.data_ptr(), layer, came, left)
                kernel(stream.cuda_stream, *self._takes_beside[layer](here), part.steps, batch, *carries)
                if not layer:
                    continue
                given = to_gates[layer] + part.first * step * len(self.cell.gates)
                into = to_outputs[layer - 1] + part.first * step
                self._between[part.steps][1](handle(dtype), given, at[layer * self._every], into)
                if call.dropout:
                    to_dropped = part.of(self._output_at(meanwhile, self._outputs_beside[layer - 1]))
                    to_mask = of_dropout[layer - 1]
                    if to_mask is not None:
                        torch.mul(to_dropped, part.of(self._output_in(room, layer - 1)), out=part.of(to_mask))
                    to_dropped *= part.of(call.dropout[layer - 1])
                above = stream.record_event()
        for layer, stream in of_layers:
            torch.cuda.set_stream(stream)
            blas, own = handle(dtype), made[layer * self._every : (layer + 1) * self._every]
            into_weights = [one.data_ptr() for one in own]
            entered = self._output_in(room, layer - 1) if layer else x
            if layer and call.dropout:
                entered = entered * call.dropout[layer - 1]
            if self.form.bias:
                _, _, of_x, of_r = into_weights
                rows = len(parts) * kernel.sums
                self._adding.launch(stream.cuda_stream, 1, rows, sums[layer], 0, of_x, 0, of_r, 0, 0, 0)
            to_x = None if layer else grad_x  # of the others it is there, chunk by chunk
            self._input_products.back(None, layer, 0, blas, to_gates[layer], entered, at[0], to_x, into_weights[0])
            output = y.data_ptr() if layer == last else base + self._kept[layer].output
            start = starts[0].data_ptr() + far[layer] if starts else 0
            self._multiply_recurrent(blas, 0, to_gates[layer], to_apart[layer], output, start, own[1])
        given_back = [grad_x, *grad_starts, *made, *of_dropout, *[None] * len(call.noise)]
        return given_back, [grad_y, grad_finals, x, y, weights, starts, meanwhile, carried]
