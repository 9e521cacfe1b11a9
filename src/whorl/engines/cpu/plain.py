"""A call of x, weights and initial states: what its problem decides is laid out once, for all calls.

It may have a mask, lengths and resets, draw its recurrent dropout and zoneout, or be given masks of recurrent dropout
that are constant; whatever else a call can have is left to the engine's general way.

Beside the products of a small layer Python takes long, and longer where a product has just driven it out of the caches
of a core: so each pass is one call into the kernel for each layer and direction, and everything else is a few tensors.
"""

import ctypes
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import Grads, from_bytes
from whorl.engines.cpu.generate import source
from whorl.engines.cpu.masks import BY_GATE, DRAWN, HELD, NONE, describe, describe_zoneout, given_kind, kind_of
from whorl.engines.cpu.memory import borrowed, empty
from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.sweep import (
    GRADIENT,
    INPUT,
    PLAIN_BACKWARD,
    PLAIN_FORWARD,
    Fields,
    Kernel,
    Sweep,
    address,
    filled_up,
    kernel,
    laid,
    projects_within,
    turned,
)
from whorl.engines.tape import writing
from whorl.noise import given
from whorl.problem import Call, Outcome, Problem


class Known:
    """What is known of a problem's tapes."""

    def __init__(self) -> None:
        self.calls, self.numbers = 0, dict[tuple[bool, ...], int]()
        """Their numbers by how weights lie."""


class Sizes(NamedTuple):
    """What a plain problem decides."""

    problem: Problem
    kernel: Kernel
    wide: torch.dtype
    threads: int
    fields: tuple[Fields, ...]
    """For each layer and direction its sweep, of which calls read what is no tensor."""
    within: tuple[bool, ...]
    """For each whether its loop makes the input projection."""
    reads_x: bool
    """Backward reads the input projection."""
    room: int
    """Bytes of what forward keeps for backward, of all layers in one piece."""
    kept: tuple[int, ...]
    """Where in it begins what each layer and direction keeps,"""
    read: tuple[int, ...]
    """its input projection where backward reads it,"""
    inner: tuple[int, ...]
    """and the output of each layer but the last."""
    dr: int
    """Columns of the gradient of the recurrent projection, where it is not that of the input projection."""
    sums: ctypes.Array
    """Of each vector the one whose gradient it has."""
    noise: int
    """The kind of noise in the recurrent product."""
    entered: int | None
    """How far behind `kept` lies what entered the recurrent product; None where that is known from y and the noise."""
    given: bool
    """The masks of the recurrent product are given."""
    known: "Known"

    def sweep(self, index: int) -> Sweep:
        return self.fields[index].sweep


def sizes_of(problem: Problem, call: Call) -> Sizes | None:
    """How a call runs here; None where it has more than this way takes."""
    kind = given_kind(problem.form, call)
    return None if kind is None else sizes(problem, torch.get_num_threads(), kind)


@lru_cache(maxsize=256)
def sizes(problem: Problem, threads: int, kind: int) -> Sizes | None:
    """The same of a problem, and of the kind of noise that masks are given for."""
    form, extras = problem.form, set(problem.extras)
    cell, made = form.cell, source(form.cell)
    drawn, marked = "drawn" in extras, extras & {"lengths", "mask", "reset"}
    more = problem.packed or problem.dropout or extras - marked - {"reset_to", "drawn", "dropout_masks"}
    if more or form.projection or not form.inputs or cell.inputs or made.products:
        return None
    if drawn and (form.input_dropout or kind != NONE):
        return None
    if kind != NONE and problem.gradient and "noise" not in problem.constants:
        return None
    if not cell.recurrent or not all(made.leaves):
        return None
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    compiled = kernel(cell, problem.dtype)
    rows = Rows(Call(torch.empty(problem.time, problem.batch, 0, device="cpu"), (), ()))
    reads_x, noise = made.reads_x and problem.gradient, kind or kind_of(form, drawn)
    fields, within = [], []
    for layer in range(form.layers):
        for direction in range(form.directions):
            one = Fields(compiled, rows, threads, form.units, form.units, direction == 1)
            sweep = one.sweep
            sweep.inputs = form.layer_inputs(layer)
            sweep.y_stride = sweep.dy_stride = form.units * form.directions
            within.append(projects_within(sweep, threads, problem.dtype))
            if reads_x or not within[-1]:
                sweep.x_stride = filled_up(len(cell.gates) * form.units)
            describe(sweep, form, (layer, direction), noise)
            sweep.keep_plain = noise == BY_GATE  # masks, whose gradients read what they multiply, have none here
            describe_zoneout(sweep, form, drawn)
            fields.append(one)
    kept, entered = rows.outer * (made.saved * form.units + made.saved_means) * wide.itemsize, None
    if noise in (HELD, DRAWN) or marked:
        entered = _up(kept)
        kept = entered + rows.outer * form.units * problem.dtype.itemsize
    count, read = len(fields), reads_x * rows.outer * filled_up(len(cell.gates) * form.units) * wide.itemsize
    inner = rows.outer * form.units * form.directions * problem.dtype.itemsize
    sizes = [kept] * count + [read] * count + [inner] * (form.layers - 1)
    places = [sum(map(_up, sizes[:place])) for place in range(len(sizes) + 1)]
    dr = 0 if made.dr_is_dx else len(cell.recurrent) * form.units
    sums = (ctypes.c_int64 * len(made.sums))(*made.sums)
    return Sizes(
        problem, compiled, wide, threads, tuple(fields), tuple(within), reads_x, places[-1], tuple(places[:count]),
        tuple(places[count : 2 * count]), tuple(places[2 * count : -1]), dr, sums, noise, entered, kind != NONE,
        Known(),
    )  # fmt: skip


def _up(size: int) -> int:
    return -(-size // 64) * 64


def forward(made: Sizes, call: Call) -> Outcome:
    problem, form, wide, dtype = made.problem, made.problem.form, made.wide, made.problem.dtype
    count, states, rows = form.layers * form.directions, len(form.cell.states), problem.time * problem.batch
    starts = [state.to(wide).contiguous() for state in call.states]
    finals = [empty(count, problem.batch, form.units, dtype=wide) for _ in range(states)]
    apart, weights = problem.batch * form.units * wide.itemsize, _weights(made, call)
    to, marks = [state.to(wide).contiguous() for state in call.reset_to], _marks(call)
    room = borrowed(made.room, dtype=torch.uint8) if problem.gradient else None
    x, base = call.x, address(room) or 0
    for layer in range(form.layers):
        entering, (x, *apart_x) = x, _entering(x, made.within[layer * form.directions])
        last = layer == form.layers - 1
        wanted = problem.outputs or (problem.gradient and made.entered is None) or not last
        if room is not None and not last:
            y = _inner(made, room, layer)
        else:
            y = empty(problem.time if wanted else 0, problem.batch, form.units * form.directions, dtype=dtype)
        for direction in range(form.directions):
            index = layer * form.directions + direction
            one, width, projected = weights[index], made.sweep(index).x_stride, None
            if width and not made.reads_x:
                projected = borrowed(rows * width, dtype=wide)
            noise, seed = _noise(made, call, (layer, direction))
            kept = base + made.kept[index] if problem.gradient else 0
            plain = PLAIN_FORWARD.pack(
                x.data_ptr(), *apart_x, *one.described, made.within[index],
                base + made.read[index] if made.reads_x else address(projected) or 0,
                y.data_ptr() + direction * form.units * dtype.itemsize if wanted else 0,
                kept, *_each(starts, index * apart), *_each(finals, index * apart), address(noise) or 0, seed,
                _entered(made, kept) if kept else 0, *marks, *_each(to, index * apart),
            )  # fmt: skip
            _run("plain_forward", made, index, plain + one.vectors, [(INPUT, entering)] if made.within[index] else [])
        x = y
    ends = finals if wide == dtype else [final.to(dtype) for final in finals]
    return Outcome(y, tuple(ends), () if room is None else (room,))


def backward(made: Sizes, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
    problem, form, wide, dtype = made.problem, made.problem.form, made.wide, made.problem.dtype
    count, directions, units = form.layers * form.directions, form.directions, form.units
    shape, rows = (problem.time, problem.batch), problem.time * problem.batch
    room, base = saved[0], saved[0].data_ptr()
    dfinals = [None if grad is None else grad.to(wide).contiguous() for grad in grads[1:]]
    starts = [state.to(dtype).contiguous() for state in call.states[:1]]
    dstarts, dresets = (
        [empty(count, problem.batch, units, dtype=wide) for _ in states] for states in (call.states, call.reset_to)
    )
    apart, narrow = problem.batch * units * wide.itemsize, dtype.itemsize
    weights, to_weights, marks = _weights(made, call), [], _marks(call)
    y, grad = y.contiguous(), grads[0]
    dx = borrowed(rows, len(form.cell.gates) * units, dtype=dtype)
    dr = borrowed(rows, made.dr, dtype=dtype) if made.dr else None
    vectors, each = len(form.cell.vectors), len(call.weights) // count
    for first in range(0, len(call.weights), each):
        shapes = [one.shape for one in call.weights[first : first + each - vectors]]
        to_weights += [empty(*shape, dtype=wide) for shape in shapes]
        if vectors:  # in one piece of memory: to make a tensor takes longer than to fill it; autograd sees no views
            to_weights += empty(vectors * units, dtype=wide).unsafe_split(units)
    dv = borrowed(problem.batch, vectors, units, dtype=wide)
    for layer in reversed(range(form.layers)):
        entering, leaving = call.x if layer == 0 else _inner(made, room, layer - 1), grad
        (below, *apart_x), apart_y = _entering(entering), [0, 0]
        if grad is not None:
            grad, *apart_y = _entering(grad if grad.dtype == dtype else grad.to(dtype))
        inputs, to_x, found = form.layer_inputs(layer), None, None
        columns, wanted = filled_up(inputs), layer > 0 or "x" not in problem.constants
        for direction in range(directions):
            index, begin = layer * directions + direction, direction * units * narrow
            one, to = weights[index], to_weights[index * each : (index + 1) * each]
            noise, seed = _noise(made, call, (layer, direction))
            if wanted:
                found = (empty if columns == inputs and dtype == wide else borrowed)(*shape, columns, dtype=wide)
            kept = base + made.kept[index]
            plain = PLAIN_BACKWARD.pack(
                below.data_ptr(), *apart_x, *one.described, False,
                base + made.read[index] if made.reads_x else 0, y.data_ptr() + begin,
                kept, *_NONE, *_NONE, address(noise) or 0, seed, _entered(made, kept),
                *marks, *_NONE, 0 if grad is None else grad.data_ptr() + begin, *apart_y,
                *_each(dfinals, index * apart), *_each(dstarts, index * apart),
                starts[0].data_ptr() + index * problem.batch * units * narrow if starts else 0,
                dx.data_ptr(), address(dr) or 0, address(found) or 0,
                *(_addresses(to[:4]) if form.bias else (*_addresses(to[:2]), 0, 0)),
                dv.data_ptr(), ctypes.addressof(made.sums), to[-vectors].data_ptr() if vectors else 0,
                *_each(dresets, index * apart),
            )  # fmt: skip
            _run("plain_backward", made, index, plain + one.vectors, [(INPUT, entering), (GRADIENT, leaving)])
            if to_x is None:
                to_x = found
            elif found is not None:
                to_x += found
        grad, y = to_x if to_x is None or columns == inputs else to_x.narrow(-1, 0, inputs), below
    every = [grad, *dstarts, *to_weights, *dresets, *[None] * len(call.noise)]
    return every if wide == dtype else [None if one is None else one.to(dtype) for one in every]


def _run(name: str, made: Sizes, index: int, plain: bytes, apart: Sequence[tuple[int, Tensor | None]]) -> None:
    """Call a pass of a layer and direction, or write it down.

    Args:
        apart: as `Tape.call` has it.
    """
    function, sweep = getattr(made.kernel, name), made.sweep(index)
    if writing.tape is None:
        function(sweep, plain, made.threads)
    else:
        where = ctypes.cast(function, ctypes.c_void_p).value or 0
        writing.tape.call(where, ctypes.addressof(sweep), plain, made.threads, apart)


def _inner(made: Sizes, room: Tensor, layer: int) -> Tensor:
    """The output of a layer that is not the last."""
    problem, first = made.problem, made.inner[layer]
    shape = problem.time, problem.batch, problem.form.units * problem.form.directions
    size = shape[0] * shape[1] * shape[2] * problem.dtype.itemsize
    return from_bytes(room[first : first + size], shape, problem.dtype)


def _noise(made: Sizes, call: Call, place: tuple[int, int]) -> tuple[Tensor | None, int]:
    """The given mask of the recurrent product, of a layer and direction; and what is drawn from where none is given."""
    if made.given:
        form, (layer, direction) = made.problem.form, place
        mask = given(form, call)[layer * form.directions + direction].recurrent
        assert mask is not None, "as `given_kind` found"
        return mask.to(made.wide).contiguous(), 0
    return None, 0 if call.marks.seed is None else int(call.marks.seed) % 2**64


def _marks(call: Call) -> tuple[int, ...]:
    """Which steps count and where states are reset, as a Plain is told."""
    mask, lengths, reset = call.marks.mask, call.marks.lengths, call.marks.reset
    if mask is lengths is reset is None:
        return _NO_MARKS
    return (
        *((0, 0, 0) if mask is None else (mask.data_ptr(), *mask.stride())),
        *((0, 0) if lengths is None else (lengths.data_ptr(), *lengths.stride())),
        *((0, 0, 0) if reset is None else (reset.data_ptr(), *reset.stride())),
    )


_NO_MARKS = (0,) * 8
_NONE = (0,) * 4


def _entered(made: Sizes, kept: int) -> int:
    return 0 if made.entered is None else kept + made.entered


class _Weights(NamedTuple):
    """Of one layer and direction."""

    described: tuple[int, ...]
    """What a Plain says of the matrices and biases, and of vectors that they stand behind it."""
    vectors: bytes
    held: tuple[object, ...]
    """What it points to."""


def _weights(made: Sizes, call: Call) -> list[_Weights]:
    form, found = made.problem.form, []
    each = len(call.weights) // (form.layers * form.directions)
    for start in range(0, len(call.weights), each):
        ih, hh, *rest = call.weights[start : start + each]
        if made.wide != made.problem.dtype:
            rest = [tensor.to(made.wide) for tensor in rest]
        rows = [tensor.data_ptr() for tensor in rest if tensor.is_contiguous()]
        if len(rows) < len(rest):
            rest = [tensor.contiguous() for tensor in rest]
            rows = _addresses(rest)
        biases, vectors = (rows[:2], rows[2:]) if form.bias else ([0, 0], rows)
        ih, hh = laid(ih), laid(hh)
        described = ih.data_ptr(), hh.data_ptr(), turned(ih), turned(hh), *biases, 0
        found.append(_Weights(described, struct.pack(f"{len(vectors)}Q", *vectors), (ih, hh, rest)))
    return found


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _entering(x: Tensor, free: bool = True) -> tuple[Tensor, int, int]:
    """What a layer reads as its kernel takes it, and how far its steps and sequences are apart; 0: as if contiguous.

    Args:
        free: they may lie as they like.
    """
    if x.is_contiguous() or not free or x.stride(2) != 1 or not x.stride(0):
        return x.contiguous(), 0, 0
    return x, x.stride(0), x.stride(1)


def _each(tensors: Sequence[Tensor | None], offset: int) -> tuple[int, ...]:
    """The address so many bytes into each, as a Plain has those of the states."""
    if not tensors:
        return _NONE
    found = [0 if tensor is None else tensor.data_ptr() + offset for tensor in tensors]
    return (*found, *_NONE[len(found) :])
