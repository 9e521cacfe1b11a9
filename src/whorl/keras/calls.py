"""The sweep of a GPU on arrays of JAX: each call of an engine is an operation, and XLA does what is around it.

There the host runs ahead and reads nothing, and each launch by torch takes it as long as a small kernel runs: so what
an engine saves for its backward is an array of XLA's, which lives as long as the gradient needs it, and x, weights and
masks come as engines read them, time first and gates in rows, which XLA does with what it computes anyway.  What C++
knows by tapes XLA calls without Python (tapes); the rest is a callback.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from torch import Tensor

from whorl.functional import planned, recurrent
from whorl.keras import tapes
from whorl.keras.callback import Kind, callback, check_device, device_of, fill, in_worker, kind_of, pulled_back
from whorl.keras.sweep import Part, Swept, Tensors, swept
from whorl.plan import announce, plan
from whorl.problem import Call, Form, Marks, Plan, constants, facts, switches
from whorl.run import backward, forward, number
from whorl.settings import settings
from whorl.weights import reordered


def sweep(
    parts: Sequence[Part], x: Any, tensors: Sequence[Tensors], mask: Any, go_backwards: bool, zero_output: bool,
    sequences: bool,
) -> Swept:  # fmt: skip
    """What `whorl.keras.sweep.sweep` gives."""
    y, valid = _by_time(x, mask)
    if go_backwards:
        y, valid = jnp.flip(y, 0), None if valid is None else jnp.flip(valid, 0)
    states = []
    for above, (cell, own) in enumerate(zip(parts, tensors, strict=True), 1):
        y, finals = _run(cell, cell.form, y, [own], valid, sequences or above < len(parts))
        states.append(tuple(final[0] for final in finals))
    initial = bool(tensors[-1].states)
    return swept(y, tuple(states), valid, -1, zero_output, sequences, initial, jnp.where)


def both_ways(
    cell: Part, x: Any, forward: Tensors, backward: Tensors, mask: Any, zero_output: bool, sequences: bool
) -> tuple[Swept, Swept]:
    """What `whorl.keras.sweep.both_ways` gives."""
    x, valid = _by_time(x, mask)
    y, finals = _run(cell, cell.two_ways, x, [forward, backward], valid, sequences)
    there, back = (y[..., : cell.units], y[..., cell.units :]) if sequences else (y, y)
    ends = [(tuple(final[direction] for final in finals),) for direction in (0, 1)]
    rest = zero_output, sequences, bool(forward.states or backward.states), jnp.where
    return swept(there, ends[0], valid, -1, *rest), swept(back, ends[1], valid, 0, *rest)


def _by_time(x: Any, mask: Any) -> tuple[Any, Any]:
    """[time, batch, inputs] and [time, batch]."""
    return jnp.swapaxes(jnp.asarray(x), 0, 1), None if mask is None else jnp.asarray(mask).astype(bool).T


def _run(
    cell: Part, form: str, x: Any, directions: Sequence[Tensors], valid: Any, outputs: bool
) -> tuple[Any, Sequence[Any]]:
    """Outputs [time, batch, directions x units], where they are wanted, and states [directions, batch, units]."""
    weights = [weight for own in directions for weight in _weights(cell.kind, own.weights)]
    states = [jnp.stack(state) for state in zip(*(own.states for own in directions), strict=True)]
    masks = [one for own in directions for one in (own.input_masks, own.recurrent_masks, *[()] * cell.states)]
    noise, seed = [_by_gate(cell.kind, one) for one in masks if one], directions[0].seed
    x = x.astype(weights[0].dtype)
    leaves = [x, *states, *weights, *noise, *([] if valid is None else [valid]), *([] if seed is None else [seed])]
    given = tuple(bool(one) for one in masks) if noise else ()
    counts = len(states), len(weights), given, valid is not None, seed is not None
    job = _Job(form, cell.engine, device_of(leaves), outputs, *counts)
    made = _call(job, *map(jnp.asarray, leaves))
    return (made[0], made[1:]) if outputs else (x, made)


def _weights(kind: str, given: Sequence[Any]) -> list[Any]:
    """What `whorl.weights.kinds` lists, from the weights of a layer of Keras."""
    if kind == "Cell":
        return [weight.T if weight.ndim == 2 else weight for weight in given]
    kernel, recurrent_kernel, *bias = map(jnp.asarray, given)
    rows = [row for one in bias for row in (one if one.ndim == 2 else (one, jnp.zeros_like(one)))]
    parts = [kernel.T, recurrent_kernel.T, *rows]
    return [jnp.concatenate(reordered(kind, jnp.split(part, 3))) for part in parts] if kind == "GRU" else parts


def _by_gate(kind: str, masks: Sequence[Any]) -> Any:
    return masks[0] if len(masks) == 1 else jnp.stack(reordered(kind, masks))


# --- the operation ----------------------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Job:
    """A call of an engine as plain values."""

    form: str
    engine: str
    device: str
    outputs: bool
    """Of all steps are wanted."""
    states: int
    weights: int
    noise: tuple[bool, ...]
    """Of `Call.noise`, which there are."""
    mask: bool
    seed: bool
    wanted: tuple[bool, ...] = ()
    """Which of the arrays have a gradient; none where no gradient is taken."""
    room: "_Room | None" = None
    given: tuple[bool, ...] = ()
    """Of a backward pass: which of the outputs have a cotangent, the others' is zero."""

    @property
    def floats(self) -> int:
        """How many arrays are x, initial states and weights."""
        return 1 + self.states + self.weights

    def call(self, leaves: Sequence[Tensor]) -> Call:
        """Of x, initial states, weights, masks of dropout, mask and seed."""
        x, states = leaves[0], 1 + self.states
        weights, rest = self.floats, iter(leaves[self.floats :])
        absent = x.new_empty(()) if self.noise else x
        noise = tuple([next(rest) if there else absent for there in self.noise])
        mask = next(rest) if self.mask else None
        seed = next(rest).to(torch.int64) if self.seed else None
        marks = Marks(mask=mask, seed=seed)
        call = Call(x, tuple(leaves[1:states]), tuple(leaves[states:weights]), noise=noise)
        return call._replace(marks=marks) if self.mask or self.seed else call

    def of_leaves(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient of each array, from those of `Call.tensors`."""
        return [*grads[: self.floats], *compress(grads[self.floats :], self.noise), *[None] * (self.mask + self.seed)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _call(job: _Job, *leaves: Any) -> tuple[Any, ...]:
    """The output of every step, where it is wanted, and each final state."""
    kinds = tuple(map(kind_of, leaves))
    by_tape = _number(job, kinds, _switches(job, kinds))
    if by_tape < 0:
        return tuple(callback(_forward, job)(_outputs(job, leaves))(*leaves))
    y, *finals = tapes.forward(by_tape, leaves, _outputs(replace(job, outputs=True), leaves))
    return (*[y] * job.outputs, *finals)


def _call_forward(job: _Job, *given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves = [one.value for one in given]
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    job = replace(job, wanted=tuple(one.perturbed and real for one, real in zip(given, floating, strict=True)))
    kinds, outputs = tuple(map(kind_of, leaves)), _outputs(job, leaves)
    job = replace(job, room=_room(job, kinds, _switches(job, kinds)))
    assert job.room is not None
    if job.room.number < 0:
        made = callback(_forward_saving, job)((*outputs, *job.room.kinds))(*leaves)
        return tuple(made[: len(outputs)]), (job, *leaves, *made[len(outputs) :])
    output, kept = job.room.kinds
    y, *finals, room = tapes.forward(job.room.number, leaves, [output, *outputs[job.outputs :], kept])
    return (*[y] * job.outputs, *finals), (job, *leaves, y, room)


def _call_backward(_: _Job, kept: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    job, *row = kept
    if job.room.number < 0:
        return pulled_back(_backward, kept, cotangents)
    grads = [None if isinstance(one, SymbolicZero) else one for one in [*[None] * (not job.outputs), *cotangents]]
    if all(grad is None for grad in grads) or not any(job.wanted):
        return (None,) * len(job.wanted)
    count = len(job.wanted)
    made = tapes.backward(job.room.number, row[:count], row[count:], grads)
    own = [grad if wanted else None for grad, wanted in zip(made, job.wanted, strict=False)]
    return (*own, *[None] * (count - len(own)))


_call.defvjp(_call_forward, _call_backward, symbolic_zeros=True)


def _outputs(job: _Job, leaves: Sequence[Any]) -> tuple[Kind, ...]:
    form, ((time, batch, _), name) = Form.from_json(job.form), kind_of(leaves[0])
    y = ((time, batch, form.directions * form.units), name)
    return (*[y] * job.outputs, *(((form.directions, batch, form.units), name) for _ in form.cell.states))


def _forward(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    with torch.no_grad():
        y, *finals = recurrent(job.form, job.call(leaves), job.engine, outputs=job.outputs)
        fill(out, [*[y] * job.outputs, *finals])


def _forward_saving(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The outputs, and what backward reads.

    Raises:
        InputError: JAX runs the program on another device than it was traced for.
    """
    check_device(leaves[0].device.type, job)
    assert job.room is not None
    if job.room.plan.slow:
        announce(job.room.plan)
    *outputs, kept, room = out
    with torch.no_grad():
        made = forward(job.room.plan, job.call(leaves))
        fill(outputs, [*[made.y] * job.outputs, *made.finals])
        kept.copy_(made.y)
        job.room.fill(room, made.saved)


def _backward(job: _Job, row: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The gradient of each array that has one, given the call's, what was kept, and cotangents of its outputs."""
    count = len(job.wanted)
    leaves, (y, room, *cotangents) = row[:count], row[count:]
    assert job.room is not None
    there = iter(cotangents)
    grads = [next(there) if given else None for given in job.given]
    call = job.call(leaves)
    with torch.no_grad():
        made = backward(job.room.plan, call, y, job.room.saved(room), [*[None] * (not job.outputs), *grads])
        for buffer, grad in zip(out, compress(job.of_leaves(made), job.wanted), strict=True):
            if grad is None:
                buffer.zero_()
            else:
                buffer.copy_(grad)


def _switches(job: _Job, kinds: tuple[Kind, ...]) -> tuple[Any, ...]:
    """What decides beside the arguments of a call when it is traced."""
    return *switches(job.device, getattr(torch, kinds[0][1])), settings.calls


@lru_cache(maxsize=1024)
def _number(job: _Job, kinds: tuple[Kind, ...], switched: tuple[Any, ...]) -> int:
    """By which C++ knows the plan of a call without a gradient; -1 where it goes through Python."""
    return in_worker(_number_of_ones, job, kinds)


def _number_of_ones(job: _Job, kinds: tuple[Kind, ...]) -> int:
    call = job.call(_ones(job, kinds))
    with torch.no_grad():
        return _by_tape(job, kinds, planned(job.form, call, job.engine, outputs=job.outputs), call)


def _by_tape(job: _Job, kinds: tuple[Kind, ...], made: Plan, call: Call) -> int:
    dtypes = {name for _, name in kinds[: job.floats]}
    own = number(made, call) if len(dtypes) == 1 else -1
    return own if own >= 0 and tapes.are_taken() else -1


class _Room(NamedTuple):
    """Where a call keeps what its backward reads: its output, and one array of bytes."""

    plan: Plan
    number: int
    """By which C++ knows the plan; -1 where the call goes through Python."""
    output: Kind
    sizes: tuple[int, ...]

    @property
    def places(self) -> list[int]:
        """Where each saved tensor begins, and the end."""
        return list(accumulate((-(-size // 64) * 64 for size in self.sizes), initial=0))

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Of the arrays."""
        return self.output, ((self.places[-1],), "uint8")

    def fill(self, whole: Tensor, saved: Sequence[Tensor]) -> None:
        """Keeps what an engine saved in the second array."""
        assert tuple([tensor.numel() for tensor in saved]) == self.sizes, "they follow from the shapes"
        for start, tensor in zip(self.places, saved, strict=False):
            whole[start : start + tensor.numel()] = tensor

    def saved(self, whole: Tensor) -> list[Tensor]:
        """What was saved, from the second array."""
        return [whole[start : start + size] for start, size in zip(self.places, self.sizes, strict=False)]


@lru_cache(maxsize=1024)
def _room(job: _Job, kinds: tuple[Kind, ...], switched: tuple[Any, ...]) -> _Room:
    """The plan of a call with a gradient, and what its engine saves: it runs once, on ones of these shapes."""
    return in_worker(_of_ones, job, kinds)


def _of_ones(job: _Job, kinds: tuple[Kind, ...]) -> _Room:
    ones = _ones(job, kinds)
    for one in compress(ones, job.wanted):  # which of them have a gradient decides the plan
        one.requires_grad_()
    call = job.call(ones)
    made = plan(job.form, facts(call, True, constants=constants(call)), job.engine)
    with torch.no_grad():
        outcome = forward(made, call)
    output = tuple(outcome.y.shape), str(outcome.y.dtype).removeprefix("torch.")
    return _Room(made, _by_tape(job, kinds, made, call), output, tuple([part.numel() for part in outcome.saved]))


def _ones(job: _Job, kinds: tuple[Kind, ...]) -> list[Tensor]:
    return [torch.ones(shape, dtype=getattr(torch, name), device=job.device) for shape, name in kinds]
