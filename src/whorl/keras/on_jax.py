"""The sweep on arrays of JAX: torch inside XLA's program, on its buffers and its stream, and the host copies nothing.

`jax.experimental.buffer_callback` calls a Python function with XLA's own buffers, which torch sees through DLPack.  JAX
differentiates nothing of it, so the gradient is a second callback.  What an engine saves for its backward is an output
of the first one: XLA's own memory, which lives as long as the gradient needs it.  Under `jax.vmap` rows run one after
the other; forward-mode derivatives are an error of JAX.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.buffer_callback import buffer_callback
from torch import Tensor

from whorl.engines import ENGINES
from whorl.errors import InputError
from whorl.functional import recurrent
from whorl.keras import sweep as on_torch
from whorl.keras.sweep import Part, Swept, Tensors
from whorl.plan import plan
from whorl.problem import Call, Plan, facts

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype."""


@dataclass(frozen=True)
class _Job:
    """What a callback is to do, as plain values."""

    parts: tuple[Part, ...]
    both: bool
    go_backwards: bool
    zero_output: bool
    structure: Any
    """Of (x, the tensors of each cell, mask), as JAX flattens them."""
    exact: tuple[bool, ...]
    """Which of them have no gradient: masks of steps and seeds."""


def sweep(
    parts: Sequence[Part],
    x: Any,
    tensors: Sequence[Tensors],
    mask: Any = None,
    go_backwards: bool = False,
    zero_output: bool = False,
    notes: list[Plan] | None = None,
) -> Swept:
    """`whorl.keras.sweep.sweep` on arrays of JAX."""
    for place, (part, own) in enumerate(zip(parts, tensors, strict=True)):
        on_torch.check(part, x, own, mask, first=place == 0)
    outputs, *states = _run(parts, x, tensors, mask, False, go_backwards, zero_output, notes)
    ends = iter(states)
    return Swept(outputs[:, -1], outputs, tuple(tuple(next(ends) for _ in own.states) for own in tensors))


def both_ways(
    cell: Part,
    x: Any,
    forward: Tensors,
    backward: Tensors,
    mask: Any = None,
    zero_output: bool = False,
    notes: list[Plan] | None = None,
) -> tuple[Swept, Swept]:
    """`whorl.keras.sweep.both_ways` on arrays of JAX."""
    for own in (forward, backward):
        on_torch.check(cell, x, own, mask)
    there, back, *states = _run([cell], x, (forward, backward), mask, True, False, zero_output, notes)
    count = len(states) // 2
    return Swept(there[:, -1], there, (tuple(states[:count]),)), Swept(back[:, 0], back, (tuple(states[count:]),))


def _run(
    parts: Sequence[Part], x: Any, tensors: Sequence[Tensors], mask: Any, both: bool, go_backwards: bool,
    zero_output: bool, notes: list[Plan] | None,
) -> Sequence[Any]:  # fmt: skip
    """Outputs (of each direction), then the final states of each cell (or direction)."""
    leaves, structure = jax.tree.flatten((x, tuple(tensors), mask))
    exact = tuple(not jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    job = _Job(tuple(parts), both, go_backwards, zero_output, structure, exact)
    if notes is not None:  # somebody asks what would run: now, with arrays that are there
        return _in_worker(_as_asked, job, leaves, notes, torch.is_grad_enabled())
    return _operation(job, *leaves)


def _as_asked(job: _Job, leaves: Sequence[Any], notes: list[Plan], gradient: bool) -> list[Any]:
    made = [torch.from_dlpack(jnp.asarray(leaf)).clone() for leaf in leaves]
    wanted = [tensor if exact else tensor.requires_grad_() for tensor, exact in zip(made, job.exact, strict=True)]
    with torch.set_grad_enabled(gradient):
        outputs = _compute(job, wanted, notes)
    notes[:] = map(_chosen, notes)
    return [jnp.from_dlpack(tensor.detach().contiguous()) for tensor in outputs]


def _compute(
    job: _Job, leaves: Sequence[Tensor], notes: list[Plan] | None = None, run: on_torch.Run = recurrent
) -> list[Tensor]:
    x, tensors, mask = jax.tree.unflatten(job.structure, leaves)
    if job.both:
        one, other = tensors
        there, back = on_torch.both_ways(job.parts[0], x, one, other, mask, job.zero_output, notes, run)
        return [there.outputs, back.outputs, *there.states[0], *back.states[0]]
    swept = on_torch.sweep(job.parts, x, tensors, mask, job.go_backwards, job.zero_output, notes, run)
    return [swept.outputs, *(state for states in swept.states for state in states)]


# --- the operation, as JAX sees it ------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operation(job: _Job, *leaves: Any) -> tuple[Any, ...]:
    return tuple(_callback(_forward, job)(_outputs(job, leaves))(*leaves))


def _operation_forward(job: _Job, *leaves: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    outputs, rooms = _outputs(job, leaves), _rooms(job, tuple(map(_kind, leaves)), _device(leaves))
    kept = [kind for room in rooms for kind in room.kinds]
    made = _callback(_forward_saving, job, rooms)((*outputs, *kept))(*leaves)
    return tuple(made[: len(outputs)]), (*leaves, *made[len(outputs) :])


def _operation_backward(job: _Job, row: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    leaves = row[: len(job.exact)]
    rooms = _rooms(job, tuple(map(_kind, leaves)), _device(leaves))
    wanted = tuple(_kind(leaf) for leaf, exact in zip(leaves, job.exact, strict=True) if not exact)
    grads = iter(_callback(_backward, job, rooms)(wanted)(*row, *cotangents))
    return tuple(
        np.zeros(leaf.shape, jax.dtypes.float0) if exact else next(grads)
        for leaf, exact in zip(leaves, job.exact, strict=True)
    )


_operation.defvjp(_operation_forward, _operation_backward)


def _kind(leaf: Any) -> Kind:
    return tuple(leaf.shape), jnp.dtype(leaf.dtype).name


def _outputs(job: _Job, leaves: Sequence[Any]) -> tuple[Kind, ...]:
    x, tensors, _ = jax.tree.unflatten(job.structure, leaves)
    name = _kind(x)[1]
    outputs = [((*x.shape[:2], job.parts[-1].units), name)] * (1 + job.both)
    return (*outputs, *((tuple(state.shape), name) for own in tensors for state in own.states))


@lru_cache(maxsize=1024)
def _callback(function: Callable[..., Any], *static: Any) -> Callable[..., Any]:
    """What XLA calls: kept, since JAX compiles anew for each new function."""

    def work(context: Any, *rows: Any) -> None:
        with _stream(context, rows[0]):
            function(*static, *([torch.from_dlpack(buffer) for buffer in row] for row in rows))

    def run(context: Any, out: Any, *buffers: Any) -> None:
        _in_worker(work, context, buffers, out)

    @lru_cache(maxsize=256)
    def giving(kinds: tuple[Kind, ...]) -> Any:
        return buffer_callback(run, tuple(jax.ShapeDtypeStruct(*kind) for kind in kinds), vmap_method="sequential")

    return giving


_worker = ThreadPoolExecutor(1, "whorl")


def _in_worker(function: Callable[..., Any], *given: Any) -> Any:
    """What the function gives, run by the one thread in which torch computes.

    XLA calls from several, and each would get OpenMP threads of its own: with more of them than cores OpenMP puts to
    sleep those that wait (a batch of 32 through a plain LSTM of 64 units: 25 ms in place of 9, on 2 cores).
    """
    return _worker.submit(copy_context().run, function, *given).result()


def _stream(context: Any, buffers: Sequence[Any]) -> AbstractContextManager[Any]:
    """XLA's own stream as torch's current one, where the buffers are a GPU's."""
    device = torch.from_dlpack(buffers[0]).device
    return (
        torch.cuda.stream(torch.cuda.ExternalStream(context.stream, device)) if device.type == "cuda" else nullcontext()
    )


# --- what the callbacks do, with tensors of torch ---------------------------------------------------------------------


def _forward(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    with torch.no_grad():
        _fill(out, _compute(job, leaves))


def _forward_saving(job: _Job, rooms: tuple["_Room", ...], leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The outputs, and for each call of an engine what its backward reads."""
    saving = _Saving()
    with torch.no_grad():
        outputs = _compute(job, leaves, run=saving)
    _fill(out[: len(outputs)], outputs)
    free = iter(out[len(outputs) :])
    for room, (y, saved) in zip(rooms, saving.made, strict=True):
        next(free).copy_(y)
        room.fill(next(free), saved)


def _backward(job: _Job, rooms: tuple["_Room", ...], row: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The gradient of each tensor that has one, given the call's, what was saved, and the cotangents of its outputs."""
    count = len(job.exact)
    given, kept, cotangents = row[:count], iter(row[count : count + 2 * len(rooms)]), row[count + 2 * len(rooms) :]
    with torch.enable_grad():
        leaves = [
            tensor if exact else tensor.detach().requires_grad_()
            for tensor, exact in zip(given, job.exact, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        made = iter([(next(kept), room.saved(next(kept))) for room in rooms])
        outputs = _compute(job, leaves, run=lambda form, call, engine: _again(form, call, *next(made)))
        grads = torch.autograd.grad(outputs, wanted, list(cotangents), allow_unused=True)
    _fill(out, [out.new_zeros(()) if grad is None else grad for grad, out in zip(grads, out, strict=True)])


def _fill(out: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for buffer, made in zip(out, found, strict=True):
        buffer.copy_(made)


def _chosen(made: Plan) -> Plan:
    """The plan on JAX: with a gradient `cpu` comes before `onednn`, which keeps more for backward to be copied.

    A step of `fit` with an LSTM of 64 and 128 units, batch 32, 100 steps of 64 features, on two cores of an AMD EPYC:
    9.7 and 19.5 ms, with `onednn` 11.5 and 38.5.
    """
    if made.asked != "auto" or made.engine != "onednn" or not made.problem.gradient:
        return made
    if ENGINES["cpu"].obstacles(made.problem):
        return made
    return replace(made, engine="cpu", refusals=tuple([one for one in made.refusals if one.engine != "cpu"]))


class _Saving:
    """Runs calls of engines, and keeps what their backward reads: the output, and what they saved."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, list[Tensor]]] = []

    def __call__(self, form: str, call: Call, engine: str) -> tuple[Tensor, ...]:
        made = plan(form, facts(call, gradient=True), engine)
        if (chosen := _chosen(made)) is not made:
            engine = chosen.engine
        y, rest, saved = torch.ops.whorl.recurrent_2(
            list(call.tensors), list(call.marks), call.layout, form, engine, False, True
        )
        self.made.append((y, saved))
        return (y, *rest)


def _again(form: str, call: Call, y: Tensor, saved: list[Tensor]) -> tuple[Tensor, ...]:
    """A call that was run before, for autograd: of its final states only the shapes, which is all that is read."""
    finals = [call.x.new_empty(state.shape) for state in call.states]
    return _Again.apply((form, call.layout, call.marks, y, saved), finals, *call.tensors)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Any, finals: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.made, ctx.tensors = made, tensors
        ctx.set_materialize_grads(False)
        return (made[3].view_as(made[3]), *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        form, layout, marks, y, saved = ctx.made
        found = torch.ops.whorl.recurrent_backward_2(
            list(grads), list(ctx.tensors), list(marks), layout, y, saved, form, False
        )
        return (None, None, *found)


class _Room(NamedTuple):
    """Where one call of an engine keeps what its backward reads: its output, and one array of bytes.

    On a CPU steps that do not count are left out of what is saved, so the array begins with the true sizes, and `sizes`
    are those where every step counts.  On a GPU nothing is read back: sizes are what they were.
    """

    output: Kind
    sizes: tuple[int, ...]

    @property
    def places(self) -> list[int]:
        """Where each saved tensor begins, and the end."""
        return list(
            accumulate((-(-size // 64) * 64 for size in self.sizes), initial=-(-8 * len(self.sizes) // 64) * 64)
        )

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Of the arrays."""
        return self.output, ((self.places[-1],), "uint8")

    def fill(self, whole: Tensor, saved: list[Tensor]) -> None:
        """Keeps what an engine saved in the second array.

        Raises:
            InputError: JAX runs the program on another device than it was traced for.
        """
        sizes, on_cpu = tuple([tensor.numel() for tensor in saved]), whole.device.type == "cpu"
        fits = all(map(int.__le__, sizes, self.sizes)) if on_cpu else sizes == self.sizes
        if not fits:
            raise InputError(
                f"the engine saves {sizes} bytes on {whole.device.type} where {self.sizes} were expected: the program "
                "was traced for another device, so trace it with jax.default_device set to the one that it runs on."
            )
        if on_cpu:
            whole[: 8 * len(sizes)] = torch.tensor(sizes).view(torch.uint8)
        for start, tensor in zip(self.places, saved, strict=False):
            whole[start : start + tensor.numel()] = tensor

    def saved(self, whole: Tensor) -> list[Tensor]:
        """What was saved, from the second array."""
        on_cpu = whole.device.type == "cpu"
        sizes = whole[: 8 * len(self.sizes)].view(torch.int64).tolist() if on_cpu else self.sizes
        return [whole[start : start + size] for start, size in zip(self.places, sizes, strict=False)]


@lru_cache(maxsize=1024)
def _rooms(job: _Job, kinds: tuple[Kind, ...], device: str) -> tuple[_Room, ...]:
    """What the engines of a job save: they run once on ones of these shapes."""
    saving = _Saving()
    _in_worker(_run_on_ones, job, kinds, device, saving)
    return tuple(
        _Room((tuple(y.shape), str(y.dtype).removeprefix("torch.")), tuple([part.numel() for part in saved]))
        for y, saved in saving.made
    )


def _run_on_ones(job: _Job, kinds: tuple[Kind, ...], device: str, run: on_torch.Run) -> None:
    with torch.no_grad():
        _compute(job, [torch.ones(shape, dtype=getattr(torch, name), device=device) for shape, name in kinds], run=run)


def _device(leaves: Sequence[Any]) -> str:
    """Where what JAX traces will run: where its arrays are, or where JAX will put them."""
    there = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    chosen = jax.config.jax_default_device
    asked = next(iter(there[0].devices())) if there else chosen
    return "cpu" if (getattr(asked, "platform", asked) or jax.default_backend()) == "cpu" else "cuda"
