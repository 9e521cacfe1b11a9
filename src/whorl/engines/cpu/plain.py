"""A call of x, weights and initial states alone: what its problem decides is laid out once, for all calls.

Beside the products of a small layer Python takes long, and longer where a product has just driven it out of the caches
of a core: so each pass is one call into the kernel for each layer and direction, and everything else is a few tensors.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import Grads, as_bytes, from_bytes
from whorl.engines.cpu.generate import source
from whorl.engines.cpu.memory import borrowed, empty
from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.sweep import Fields, Kernel, Plain, Sweep, address, addresses, filled_up, kernel, projects_within
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

    def sweep(self, index: int) -> Sweep:
        return self.fields[index].sweep


@lru_cache(maxsize=256)
def sizes(problem: Problem, threads: int) -> Sizes | None:
    """How a problem runs here; None where it has more than x, weights and initial states."""
    form = problem.form
    cell, made = form.cell, source(form.cell)
    more = problem.packed or problem.dropout or problem.extras or form.projection or form.zoneout or not form.inputs
    if more or cell.inputs or made.products:
        return None
    if not cell.recurrent or not all(made.leaves):
        return None
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    compiled = kernel(cell, problem.dtype)
    rows = Rows(Call(torch.empty(problem.time, problem.batch, 0), (), ()))
    reads_x = made.reads_x and problem.gradient
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
            fields.append(one)
    kept = rows.outer * (made.saved * form.units + made.saved_means) * wide.itemsize
    dr = 0 if made.dr_is_dx else len(cell.recurrent) * form.units
    sums = (ctypes.c_int64 * len(made.sums))(*made.sums)
    return Sizes(problem, compiled, wide, threads, tuple(fields), tuple(within), reads_x, kept, dr, sums)


def forward(made: Sizes, call: Call) -> Outcome:
    problem, form, wide, dtype = made.problem, made.problem.form, made.wide, made.problem.dtype
    count, states, rows = form.layers * form.directions, len(form.cell.states), problem.time * problem.batch
    starts = [state.to(wide).contiguous() for state in call.states]
    finals = [torch.empty(count, problem.batch, form.units, dtype=wide) for _ in range(states)]
    apart, weights = problem.batch * form.units * wide.itemsize, _weights(made, call)
    x, kept, read, inner = call.x.contiguous(), [], [], []
    for layer in range(form.layers):
        y = empty(problem.time, problem.batch, form.units * form.directions, dtype=dtype)
        for direction in range(form.directions):
            index = layer * form.directions + direction
            one, sweep = weights[index], made.sweep(index)
            if problem.gradient:
                kept.append(borrowed(made.kept, dtype=torch.uint8))
            projected = borrowed(rows, sweep.x_stride, dtype=wide) if sweep.x_stride else None
            if made.reads_x and projected is not None:
                read.append(as_bytes(projected))
            plain = Plain(
                x.data_ptr(), *map(address, one.matrices), ctypes.addressof(one.addresses), made.within[index],
                address(projected), y.data_ptr() + direction * form.units * dtype.itemsize,
                kept[-1].data_ptr() if problem.gradient else None, _each(starts, index * apart),
                _each(finals, index * apart),
            )  # fmt: skip
            made.kernel.plain_forward(sweep, plain, made.threads)
        if problem.gradient and layer < form.layers - 1:
            inner.append(as_bytes(y))
        x = y
    return Outcome(y, tuple([final.to(dtype) for final in finals]), (*kept, *read, *inner))


def backward(made: Sizes, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
    problem, form, wide, dtype = made.problem, made.problem.form, made.wide, made.problem.dtype
    count, directions, units = form.layers * form.directions, form.directions, form.units
    shape, rows = (problem.time, problem.batch), problem.time * problem.batch
    inner = saved[2 * count :] if made.reads_x else saved[count:]
    dfinals = [None if grad is None else grad.to(wide).contiguous() for grad in grads[1:]]
    starts = [state.contiguous() for state in call.states[:1]]
    dstarts = [torch.empty(count, problem.batch, units, dtype=wide) for _ in call.states]
    apart, narrow = problem.batch * units * wide.itemsize, dtype.itemsize
    weights, to_weights = _weights(made, call), [torch.empty(weight.shape, dtype=wide) for weight in call.weights]
    each = len(to_weights) // count
    y, grad = y.contiguous(), grads[0]
    dx = borrowed(rows, len(form.cell.gates) * units, dtype=dtype)
    dr = borrowed(rows, made.dr, dtype=dtype) if made.dr else None
    room = borrowed(len(form.cell.vectors), problem.batch, units, dtype=wide)
    dv = addresses(room.unbind())
    for layer in reversed(range(form.layers)):
        below = call.x.contiguous() if layer == 0 else from_bytes(inner[layer - 1], (*shape, -1), dtype)
        grad = None if grad is None else grad.to(dtype).contiguous()
        inputs, to_x, found = form.layer_inputs(layer), None, None
        columns, wanted = filled_up(inputs), layer > 0 or "x" not in problem.constants
        for direction in range(directions):
            index, begin = layer * directions + direction, direction * units * narrow
            one, to = weights[index], to_weights[index * each : (index + 1) * each]
            to_vectors = addresses(to[each - len(room) :])
            if wanted:
                found = (empty if columns == inputs and dtype == wide else borrowed)(rows, columns, dtype=wide)
            plain = Plain(
                below.data_ptr(), *map(address, one.matrices), ctypes.addressof(one.addresses), False,
                saved[count + index].data_ptr() if made.reads_x else None, y.data_ptr() + begin,
                saved[index].data_ptr(), (), (),
                None if grad is None else grad.data_ptr() + begin, _each(dfinals, index * apart),
                _each(dstarts, index * apart), *_each(starts, index * problem.batch * units * narrow) or (None,),
                dx.data_ptr(), address(dr), address(found), *map(address, to[: each - len(room)]),
                dv=ctypes.addressof(dv), sums=ctypes.addressof(made.sums), to_vectors=ctypes.addressof(to_vectors),
            )  # fmt: skip
            made.kernel.plain_backward(made.sweep(index), plain, made.threads)
            if found is not None:
                part = found[:, :inputs] if columns != inputs else found
                to_x = part if to_x is None else to_x + part
        grad, y = to_x, below
    every = [None if grad is None else grad.reshape(call.x.shape), *dstarts, *to_weights]
    return [None if one is None else one.to(dtype) for one in every]


class _Weights(NamedTuple):
    """Of one layer and direction."""

    matrices: tuple[Tensor | None, ...]
    """Those of the input and of the state, and in the dtype of sums the biases."""
    vectors: tuple[Tensor, ...]
    """In the dtype of sums."""
    addresses: ctypes.Array
    """Of the vectors."""


def _weights(made: Sizes, call: Call) -> list[_Weights]:
    form, found = made.problem.form, []
    each = len(call.weights) // (form.layers * form.directions)
    for start in range(0, len(call.weights), each):
        ih, hh, *rest = call.weights[start : start + each]
        wide = [tensor.to(made.wide).contiguous() for tensor in rest]
        biases, vectors = (wide[:2], wide[2:]) if form.bias else ([None, None], wide)
        found.append(_Weights((ih.contiguous(), hh.contiguous(), *biases), tuple(vectors), addresses(vectors)))
    return found


def _each(tensors: Sequence[Tensor | None], offset: int) -> tuple[int | None, ...]:
    """The address so many bytes into each."""
    return tuple([None if tensor is None else tensor.data_ptr() + offset for tensor in tensors])
