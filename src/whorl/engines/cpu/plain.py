"""A call of x, weights and initial states: what its problem decides is laid out once, for all calls.

It may have a mask, lengths and resets, draw its recurrent dropout and zoneout, or be given masks of recurrent dropout
that are constant; whatever else a call can have is left to the engine's general way.

Beside the products of a small layer Python takes long, and longer where a product has just driven it out of the caches
of a core: so each pass is one call into the kernel for each layer and direction, and everything else is a few tensors.
"""

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import Grads, as_bytes, from_bytes
from whorl.engines.cpu.generate import source
from whorl.engines.cpu.masks import DRAWN, NONE, describe, describe_zoneout, given_kind, kind_of
from whorl.engines.cpu.memory import borrowed, empty
from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.sweep import (
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
from whorl.noise import given
from whorl.problem import Call, Outcome, Problem


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
    kept: int
    """Bytes of what forward keeps for backward, for each layer and direction."""
    dr: int
    """Columns of the gradient of the recurrent projection, where it is not that of the input projection."""
    sums: ctypes.Array
    """Of each vector the one whose gradient it has."""
    noise: int
    """The kind of noise in the recurrent product."""
    entered: int | None
    """Where in `kept` lies what entered the recurrent product; None where that is known from y and the noise."""
    given: bool
    """The masks of the recurrent product are given."""

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
            describe_zoneout(sweep, form, drawn)
            fields.append(one)
    kept, entered = rows.outer * (made.saved * form.units + made.saved_means) * wide.itemsize, None
    if noise == DRAWN or marked:
        entered = -(-kept // 64) * 64
        kept = entered + rows.outer * form.units * problem.dtype.itemsize
    dr = 0 if made.dr_is_dx else len(cell.recurrent) * form.units
    sums = (ctypes.c_int64 * len(made.sums))(*made.sums)
    return Sizes(
        problem, compiled, wide, threads, tuple(fields), tuple(within), reads_x, kept, dr, sums, noise, entered,
        kind != NONE,
    )  # fmt: skip


def forward(made: Sizes, call: Call) -> Outcome:
    problem, form, wide, dtype = made.problem, made.problem.form, made.wide, made.problem.dtype
    count, states, rows = form.layers * form.directions, len(form.cell.states), problem.time * problem.batch
    starts = [state.to(wide).contiguous() for state in call.states]
    finals = [torch.empty(count, problem.batch, form.units, dtype=wide, device="cpu") for _ in range(states)]
    apart, weights = problem.batch * form.units * wide.itemsize, _weights(made, call)
    to, marks = [state.to(wide).contiguous() for state in call.reset_to], _marks(call)
    x, kept, read, inner = call.x, [], [], []
    for layer in range(form.layers):
        x, *apart_x = _entering(x, made.within[layer * form.directions])
        wanted = problem.outputs or problem.gradient or layer < form.layers - 1
        y = empty(problem.time if wanted else 0, problem.batch, form.units * form.directions, dtype=dtype)
        for direction in range(form.directions):
            index = layer * form.directions + direction
            one, sweep = weights[index], made.sweep(index)
            if problem.gradient:
                kept.append(borrowed(made.kept, dtype=torch.uint8))
            projected = borrowed(rows * sweep.x_stride * wide.itemsize, dtype=torch.uint8) if sweep.x_stride else None
            noise, seed = _noise(made, call, (layer, direction))
            if made.reads_x and projected is not None:
                read.append(projected)
            plain = PLAIN_FORWARD.pack(
                x.data_ptr(), *apart_x, *one.described, made.within[index], address(projected) or 0,
                y.data_ptr() + direction * form.units * dtype.itemsize if wanted else 0,
                kept[-1].data_ptr() if problem.gradient else 0, *_each(starts, index * apart),
                *_each(finals, index * apart), address(noise) or 0, seed,
                _entered(made, kept[-1]) if problem.gradient else 0, *marks, *_each(to, index * apart),
            )  # fmt: skip
            made.kernel.plain_forward(sweep, plain, made.threads)
        if problem.gradient and layer < form.layers - 1:
            inner.append(as_bytes(y))
        x = y
    ends = finals if wide == dtype else [final.to(dtype) for final in finals]
    return Outcome(y, tuple(ends), (*kept, *read, *inner))


def backward(made: Sizes, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
    problem, form, wide, dtype = made.problem, made.problem.form, made.wide, made.problem.dtype
    count, directions, units = form.layers * form.directions, form.directions, form.units
    shape, rows = (problem.time, problem.batch), problem.time * problem.batch
    inner = saved[2 * count :] if made.reads_x else saved[count:]
    dfinals = [None if grad is None else grad.to(wide).contiguous() for grad in grads[1:]]
    starts = [state.to(dtype).contiguous() for state in call.states[:1]]
    dstarts, dresets = (
        [torch.empty(count, problem.batch, units, dtype=wide, device="cpu") for _ in states]
        for states in (call.states, call.reset_to)
    )
    apart, narrow = problem.batch * units * wide.itemsize, dtype.itemsize
    weights, to_weights, marks = _weights(made, call), [], _marks(call)
    y, grad = y.contiguous(), grads[0]
    dx = borrowed(rows, len(form.cell.gates) * units, dtype=dtype)
    dr = borrowed(rows, made.dr, dtype=dtype) if made.dr else None
    vectors, each = len(form.cell.vectors), len(call.weights) // count
    for first in range(0, len(call.weights), each):
        shapes = [one.shape for one in call.weights[first : first + each - vectors]]
        to_weights += [torch.empty(shape, dtype=wide, device="cpu") for shape in shapes]
        if vectors:  # in one piece of memory: to make a tensor takes longer than to fill it; autograd sees no views
            to_weights += torch.empty(vectors * units, dtype=wide, device="cpu").unsafe_split(units)
    dv = borrowed(problem.batch, vectors, units, dtype=wide)
    for layer in reversed(range(form.layers)):
        below = call.x if layer == 0 else from_bytes(inner[layer - 1], (*shape, -1), dtype)
        (below, *apart_x), apart_y = _entering(below), [0, 0]
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
            plain = PLAIN_BACKWARD.pack(
                below.data_ptr(), *apart_x, *one.described, False,
                saved[count + index].data_ptr() if made.reads_x else 0, y.data_ptr() + begin,
                saved[index].data_ptr(), *_NONE, *_NONE, address(noise) or 0, seed, _entered(made, saved[index]),
                *marks, *_NONE, 0 if grad is None else grad.data_ptr() + begin, *apart_y,
                *_each(dfinals, index * apart), *_each(dstarts, index * apart),
                starts[0].data_ptr() + index * problem.batch * units * narrow if starts else 0,
                dx.data_ptr(), address(dr) or 0, address(found) or 0,
                *(_addresses(to[:4]) if form.bias else (*_addresses(to[:2]), 0, 0)),
                dv.data_ptr(), ctypes.addressof(made.sums), to[-vectors].data_ptr() if vectors else 0,
                *_each(dresets, index * apart),
            )  # fmt: skip
            made.kernel.plain_backward(made.sweep(index), plain, made.threads)
            if found is not None:
                part = found[..., :inputs] if columns != inputs else found
                to_x = part if to_x is None else to_x + part
        grad, y = to_x, below
    every = [grad, *dstarts, *to_weights, *dresets, *[None] * len(call.noise)]
    return every if wide == dtype else [None if one is None else one.to(dtype) for one in every]


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


def _entered(made: Sizes, kept: Tensor) -> int:
    return 0 if made.entered is None else kept.data_ptr() + made.entered


class _Weights(NamedTuple):
    """Of one layer and direction."""

    described: tuple[int, ...]
    """What a Plain says of the matrices, biases and vectors."""
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
        ih, hh, listed = laid(ih), laid(hh), array("Q", vectors)
        described = ih.data_ptr(), hh.data_ptr(), turned(ih), turned(hh), *biases, listed.buffer_info()[0]
        found.append(_Weights(described, (ih, hh, rest, listed)))
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
