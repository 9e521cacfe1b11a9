"""Where everything of a call by addresses lies: what a layer leaves in one room, and what of a pass each kernel takes.

A pass lists the addresses of all that it has once, and from there each kernel takes its own.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import torch

from whorl.engines.cuda.layers import Layers
from whorl.engines.cuda.memory import laid_out
from whorl.engines.cuda.source import PLAIN, Features
from whorl.problem import Plan
from whorl.weights import kinds, shapes

_ALIGNED = 256
"""Bytes: where parts of a room begin."""


class Room:
    """Places in memory that is not there yet, behind so many bytes."""

    def __init__(self, size: int = 0) -> None:
        self.size = size

    def parts(self, count: int, size: int) -> list[int]:
        """Where so many parts of so many bytes begin."""
        first, each = self.size, -(-size // _ALIGNED) * _ALIGNED
        self.size += count * each
        return [first + index * each for index in range(count)]


class Kept(NamedTuple):
    """Where in the room lies what a layer leaves, for each direction."""

    gates: Sequence[int]
    apart: Sequence[int]
    states: Sequence[int]
    output: int
    """Of both; of the last layer nothing lies there."""
    before: Sequence[int] = ()
    """The first state before each step, where it is not the output of the step before."""
    means: Sequence[int] = ()
    """Of a step of several stages."""
    operands: Sequence[int] = ()
    """What entered each product inside the step, one after the other."""
    projected: Sequence[int] = ()
    """Before a layer norm of x: its projection, in float32."""
    moments: Sequence[tuple[int, int]] = ()
    """And of each of its rows the mean and the scale."""


class Places(Layers):
    """A plan's kernels, with places for all that a call has, and makes."""

    _to_gates: list[int]
    _to_apart: list[int]
    _summed: list[int]
    _to_below: int
    """Where in its memory lies what a backward pass has meanwhile: made ready with its kernel."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        super().__init__(plan, device)
        form, (units, batch, time, directions) = self.form, self.sizes
        self._features = self._its_features()
        self._output = laid_out((time, batch, directions * units), self.problem.dtype)
        self._state = laid_out((form.layers * directions, batch, units), self.problem.dtype)
        self._input = laid_out((time, batch, form.inputs), self.problem.dtype)
        self._weights_laid = [laid_out(shape, self.problem.dtype) for shape in shapes(self.whole)]
        self._every = len(kinds(self.whole))
        self._to_vectors = self._every - len(self.whole.cell.vectors)
        self._read_vectors = [*range(len(self.whole.cell.vectors))] if self.norms is None else self.norms.rest
        """Where among the vectors of the cell those are that the time loop reads."""
        self._reads = [self._places_of_weights(layer) for layer in range(form.layers)]
        self._kept, self._in_room, size = self._laid_out()
        self._room = laid_out((size,), torch.uint8)

    def _its_features(self) -> Features:
        """Of its kernels."""
        return PLAIN

    @property
    def keeps(self) -> int:
        return 1

    def _places_of_weights(self, layer: int) -> list[int]:
        """Among all weights: recurrent ones, then biases of r and of x, each of two directions; -1 for what is not."""
        directions = self.form.directions
        firsts, made = [(layer * directions + direction) * self._every for direction in range(directions)], []
        for kind in (1, 3, 2):
            there = kind == 1 or (self.form.bias and (kind == 3 or self.norms is None))
            made += [first + kind if there else -1 for first in firsts] + [-1] * (2 - directions)
        return made

    def _laid_out(self, one_by_one: bool = True) -> tuple[list[Kept], list[int], int]:
        """Where each layer leaves what, the same in the order in which a pass lists it, and the bytes of all.

        Args:
            one_by_one: a layer has all of its steps behind it before the next begins.
        """
        (units, batch, time, directions), keep = self.sizes, self.problem.gradient
        each, wide, room = time * batch * units, self.gate.itemsize, Room()
        made: list[Kept] = []
        for layer in range(self.form.layers):
            if not keep and layer > 1 and one_by_one:  # the layer before the last is done with
                made.append(made[layer - 2])
                continue
            inner = layer < self.form.layers - 1
            gates = room.parts(directions, each * len(self.cell.gates) * wide)
            kept = self._spaces_laid_out(room, keep)._replace(gates=gates)
            if self.norms is not None:
                projected = room.parts(directions, each * len(self.cell.gates) * 4)
                moments = [(*room.parts(2, time * batch * 4),) for _ in range(directions)]
                kept = kept._replace(projected=projected, moments=moments)  # type: ignore[arg-type]
            (output,) = room.parts(1, inner * each * directions * self.problem.dtype.itemsize)
            made.append(kept._replace(output=output))
        order = [
            place
            for kept in made
            for place in (*kept.gates, *kept.apart, *kept.states, *kept.means, *kept.operands, kept.output)
        ]
        return made, order, room.size

    def _spaces_laid_out(self, room: Room, keep: bool) -> Kept:
        """Where each direction leaves all but gates and the output."""
        units, batch, time, directions = self.sizes
        rows = keep * time * batch
        apart = room.parts(directions, rows * units * len(self.saving.apart) * self.gate.itemsize)
        states = room.parts(directions, rows * units * (len(self.cell.states) - 1) * 4)
        if self.steps is None:
            return Kept((), apart, states, 0)
        operands = room.parts(directions, rows * units * self._rounds * self.problem.dtype.itemsize)
        return Kept((), apart, states, 0, means=room.parts(directions, rows * self._levels * 4), operands=operands)

    def _make_ready_to_launch(self) -> None:
        """Names what a pass lists, in the order of `forward` and `backward`, and what of it each kernel takes."""
        units, batch, _, directions = self.sizes
        layers, initial, last = range(self.form.layers), self.problem.initial, self.form.layers - 1
        self._far = [layer * directions * batch * units * self.problem.dtype.itemsize for layer in layers]
        known = self._names_of_room = [*(f"weight {place}" for place in range(len(self._weights_laid))), "nothing"]
        for layer in layers:
            whats = ("gates", "apart", "states", *("means", "operands")[: 2 * (self.steps is not None)])
            known += [name for what in whats for name in _both(what, layer)[:directions]]
            known.append(f"output {layer}")
        starts, finals = self._of_states("start", layers) * initial, self._of_states("final", layers)
        ahead, self._takes_ahead = [*known, "y", *finals, *starts], []
        self._names_ahead: Sequence[str] = ahead
        for layer, reads in enumerate(self._reads):
            output = "y" if layer == last else f"output {layer}"
            taken = [*_both("gates", layer), *[f"weight {place}" for place in reads], *self._vectors_of(layer)]
            taken += [*self._of_states("start", [layer]), *self._of_states("final", [layer]), output]
            taken += [*_both("apart", layer), *_both("states", layer)]
            taken += [*_both("means", layer), *_both("operands", layer)] * (self.steps is not None)
            self._takes_ahead.append(_taking(taken, ahead))
        if not self.problem.gradient:
            return
        self._in_meanwhile = [*self._to_gates, *self._to_apart, *self._summed, self._to_below]
        known = [*known, *(name for what in ("to_gates", "to_apart", "sums") for name in _both(what, 0)[:directions])]
        known += ["to_output 0", "y", "to_y", *starts, *self._of_states("to_start", layers) * initial]
        back = [*known, *self._of_states("to_final", layers)]
        self._takes_back = [self._taking_back(layer, 0, back) for layer in layers]

    def _taking_back(self, layer: int, own: int, known: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """What the backward kernel of a layer takes of what is `known`.

        Args:
            own: the number by which that goes which is there meanwhile.
        """
        reads, last = self._reads[layer], layer == self.form.layers - 1
        output, ending = ("y", "to_y") if last else (f"output {layer}", f"to_output {own}")
        taken = [*_both("gates", layer), *[f"weight {place}" for place in reads[:2]], *self._vectors_of(layer)]
        taken += [*self._of_states("start", [layer]), output, *_both("apart", layer), *_both("states", layer)]
        taken += [ending, *self._of_states("to_final", [layer]), *_both("to_gates", own), *_both("to_apart", own)]
        taken += [*self._of_states("to_start", [layer]), *_both("sums", own)]
        return _taking(taken + _both("means", layer) * (self.steps is not None), known)

    def _vectors_of(self, layer: int) -> list[str]:
        """Names of the vectors of one direction, then of the other."""
        found, directions = [], self.form.directions
        for direction in range(2):
            first = (layer * directions + direction) * self._every + self._to_vectors
            there = self._read_vectors if direction < directions else ()
            found += [f"weight {first + place}" for place in there] or ["nothing"] * max(1, len(self._read_vectors))
        return found

    def _of_states(self, what: str, layers: Sequence[int]) -> list[str]:
        return [f"{what} {state} {layer}" for state in self.cell.states for layer in layers]


def _both(what: str, layer: int) -> list[str]:
    """Its names in each direction, whether or not there are two."""
    return [f"{what} {layer} {direction}" for direction in range(2)]


def _taking(wanted: Sequence[str], known: Sequence[str]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """What takes from a list of addresses what is `wanted`; in the place of what is not `known`, that of nothing."""
    places = {name: place for place, name in enumerate(known)}
    return itemgetter(*[places.get(name, places["nothing"]) for name in wanted])
