"""The sweep on arrays of JAX: torch inside XLA's program, on its buffers and its stream, and the host copies nothing.

One layer on a CPU mostly needs neither torch nor Python: see xla.  For all else, and on GPUs,
`jax.experimental.buffer_callback` calls a Python function with XLA's own buffers, which torch sees through DLPack.  JAX
differentiates nothing of it, so the gradient is a second callback.  On a CPU what backward needs stays with torch, and
XLA's program carries its number.  On a GPU, where the host runs ahead and reads nothing, what an engine saves for its
backward is an output of the first callback: XLA's own memory, which lives as long as the gradient needs it.  Under
`jax.vmap` rows run one after the other; forward-mode derivatives are an error of JAX.

Where the plan with a gradient differs from that without, what JAX differentiates is run by the first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, compress, count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback
from torch import Tensor

from whorl.errors import InputError
from whorl.functional import recurrent
from whorl.keras import sweep as on_torch
from whorl.keras import xla
from whorl.keras.sweep import Part, Swept, Tensors
from whorl.plan import announce, plan
from whorl.problem import Call, Outcome, Plan, constants, facts
from whorl.run import backward, forward
from whorl.weights import reordered

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype."""


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Job:
    """What a callback is to do, as plain values."""

    parts: tuple[Part, ...]
    both: bool
    go_backwards: bool
    zero_output: bool
    sequences: bool
    structure: Any
    """Of (x, the tensors of each cell, mask), as JAX flattens them."""
    device: str
    """Of what kind the buffers are: "cpu" or "cuda"."""
    wanted: tuple[bool, ...] = ()
    """Which of them have a gradient; none where no gradient is taken."""
    rooms: tuple["_Room", ...] = ()
    """Of each call of an engine, where in XLA's memory it keeps what its backward reads; none: it stays with torch."""
    given: tuple[bool, ...] = ()
    """Of a backward pass: which of the outputs have a cotangent, the others' is zero."""


def sweep(
    parts: Sequence[Part],
    x: Any,
    tensors: Sequence[Tensors],
    mask: Any = None,
    go_backwards: bool = False,
    zero_output: bool = False,
    sequences: bool = True,
    notes: list[Plan] | None = None,
) -> Swept:
    """`whorl.keras.sweep.sweep` on arrays of JAX."""
    for place, (part, own) in enumerate(zip(parts, tensors, strict=True)):
        on_torch.check(part, x, own, mask, first=place == 0)

    def direct(x: Any, own: Tensors) -> Swept:
        return xla.sweep(parts[0], x, _with_states(parts[0], x, own), mask, go_backwards, zero_output, sequences)

    def called_back(x: Any, *tensors: Tensors) -> Swept:
        outputs, *states = _run(parts, x, tensors, mask, False, go_backwards, zero_output, sequences, notes)
        ends = iter(states)
        return Swept(outputs[:, -1], outputs, tuple(tuple(next(ends) for _ in range(cell.states)) for cell in parts))

    alone = len(parts) == 1 and notes is None
    return _planned(direct, called_back, alone, parts[0], x, tensors, mask)


def both_ways(
    cell: Part,
    x: Any,
    forward: Tensors,
    backward: Tensors,
    mask: Any = None,
    zero_output: bool = False,
    sequences: bool = True,
    notes: list[Plan] | None = None,
) -> tuple[Swept, Swept]:
    """`whorl.keras.sweep.both_ways` on arrays of JAX."""
    for own in (forward, backward):
        on_torch.check(cell, x, own, mask)

    def direct(x: Any, *tensors: Tensors) -> tuple[Swept, Swept]:
        there, back = [_with_states(cell, x, own) for own in tensors]
        return xla.both_ways(cell, x, there, back, mask, zero_output, sequences)

    def called_back(x: Any, *tensors: Tensors) -> tuple[Swept, Swept]:
        there, back, *states = _run([cell], x, tensors, mask, True, False, zero_output, sequences, notes)
        count = len(states) // 2
        return Swept(there[:, -1], there, (tuple(states[:count]),)), Swept(back[:, 0], back, (tuple(states[count:]),))

    return _planned(direct, called_back, notes is None, cell, x, (forward, backward), mask)


def _with_states(cell: Part, x: Any, own: Tensors) -> Tensors:
    """The same with initial states, zero where there are none."""
    zeros = (jnp.zeros((x.shape[0], cell.units), x.dtype),) * cell.states
    return own if own.states else own._replace(states=zeros)


def _planned(
    direct: Callable[..., Any], called_back: Callable[..., Any], alone: bool, part: Part, x: Any,
    tensors: Sequence[Tensors], mask: Any,
) -> Any:  # fmt: skip
    """What the way gives that the plans name: with a gradient, which JAX says when it differentiates, and without."""
    takes = partial(xla.takes, part, x, tensors, mask)
    if not alone or _device([x]) != "cpu" or not takes(gradient=True):
        return called_back(x, *tensors)
    return (direct if takes(gradient=False) else _differentiated(direct, called_back))(x, *tensors)


def _differentiated(function: Callable[..., Any], alone: Callable[..., Any]) -> Callable[..., Any]:
    """`alone`, in whose place `function` runs where it is differentiated: of the same arrays, with the same results."""
    run = jax.custom_vjp(alone)

    def forward(*given: Any) -> tuple[Any, Any]:
        def of(*values: Any) -> Any:  # what has no gradient costs none
            held = jax.tree.map(lambda one, to: to if one.perturbed else jax.lax.stop_gradient(to), given, values)
            return function(*held)

        return jax.vjp(of, *jax.tree.map(lambda one: one.value, given))

    def backward(pull: Any, cotangents: Any) -> Any:
        return pull(jax.tree.map(_whole, cotangents))

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _whole(cotangent: Any) -> Any:
    return jnp.zeros(cotangent.shape, cotangent.dtype) if isinstance(cotangent, SymbolicZero) else cotangent


def _run(
    parts: Sequence[Part], x: Any, tensors: Sequence[Tensors], mask: Any, both: bool, go_backwards: bool,
    zero_output: bool, sequences: bool, notes: list[Plan] | None,
) -> Sequence[Any]:  # fmt: skip
    """Outputs (of each direction), then the final states of each cell (or direction)."""
    cells = [*parts] * (1 + both)
    together = tuple([_stacked(cell.kind, own) for cell, own in zip(cells, tensors, strict=True)])
    leaves, structure = jax.tree.flatten((x, together, mask))
    job = _Job(tuple(parts), both, go_backwards, zero_output, sequences, structure, _device(leaves))
    if notes is not None:  # somebody asks what would run: now, with arrays that are there
        return _in_worker(_as_asked, job, leaves, notes, torch.is_grad_enabled())
    return _operation(job, *leaves)


def _stacked(kind: str, own: Tensors) -> Tensors:
    """The same with the masks of all gates as one array, as an engine reads them: each array costs the host time."""
    of_x, of_state = [
        (jnp.stack(reordered(kind, masks)),) if len(masks) > 1 else masks
        for masks in (own.input_masks, own.recurrent_masks)
    ]
    return own._replace(input_masks=of_x, recurrent_masks=of_state)


def _as_asked(job: _Job, leaves: Sequence[Any], notes: list[Plan], gradient: bool) -> list[Any]:
    """As a model's first layer: what JAX does not trace does not say whether its input has a gradient."""
    x, *rest = [torch.from_dlpack(jnp.asarray(leaf)).clone() for leaf in leaves]
    made = [x, *(one.requires_grad_() if one.is_floating_point() else one for one in rest)]
    with torch.set_grad_enabled(gradient):
        outputs = _compute(job, made, notes)
    return [jnp.from_dlpack(tensor.detach().contiguous()) for tensor in outputs]


def _compute(
    job: _Job, leaves: Sequence[Tensor], notes: list[Plan] | None = None, run: on_torch.Run = recurrent
) -> list[Tensor]:
    x, tensors, mask = jax.tree.unflatten(job.structure, leaves)
    how = job.zero_output, job.sequences, notes, run
    if job.both:
        one, other = tensors
        there, back = on_torch.both_ways(job.parts[0], x, one, other, mask, *how)
        return [there.outputs, back.outputs, *there.states[0], *back.states[0]]
    swept = on_torch.sweep(job.parts, x, tensors, mask, job.go_backwards, *how)
    return [swept.outputs, *(state for states in swept.states for state in states)]


def _device(leaves: Sequence[Any]) -> str:
    """Where what JAX traces will run: where its arrays are, or where JAX will put them."""
    there = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    chosen = jax.config.jax_default_device
    asked = next(iter(there[0].devices())) if there else chosen
    return "cpu" if (getattr(asked, "platform", asked) or jax.default_backend()) == "cpu" else "cuda"


# --- the operation, as JAX sees it ------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operation(job: _Job, *leaves: Any) -> tuple[Any, ...]:
    return tuple(_callback(_forward, job)(_outputs(job, leaves))(*leaves))


def _operation_forward(job: _Job, *given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves = [one.value for one in given]
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    wanted = tuple(one.perturbed and real for one, real in zip(given, floating, strict=True))
    job = replace(job, wanted=wanted)
    rooms = _rooms(job, tuple(map(_kind, leaves))) if _lies_in_xla(job.device) else ()
    outputs, kept = _outputs(job, leaves), [kind for room in rooms for kind in room.kinds] or [_NUMBER]
    job = replace(job, rooms=rooms)
    made = _callback(_forward_saving, job)((*outputs, *kept))(*leaves)
    return tuple(made[: len(outputs)]), (job, *leaves, *made[len(outputs) :])


def _operation_backward(_: _Job, kept: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    job, *row = kept
    given = tuple(not isinstance(cotangent, SymbolicZero) for cotangent in cotangents)
    if not any(given) or not any(job.wanted):
        return (None,) * len(job.wanted)
    job, kinds = replace(job, given=given), tuple(_kind(leaf) for leaf in compress(row, job.wanted))
    grads = iter(_callback(_backward, job)(kinds)(*row, *compress(cotangents, given)))
    return tuple(next(grads) if wanted else None for wanted in job.wanted)


_operation.defvjp(_operation_forward, _operation_backward, symbolic_zeros=True)


def _kind(leaf: Any) -> Kind:
    return tuple(leaf.shape), jnp.dtype(leaf.dtype).name


def _outputs(job: _Job, leaves: Sequence[Any]) -> tuple[Kind, ...]:
    x, *_ = jax.tree.unflatten(job.structure, leaves)
    (batch, time, _), name = _kind(x)
    outputs = [((batch, time if job.sequences else 1, job.parts[-1].units), name)] * (1 + job.both)
    cells = job.parts * (1 + job.both)  # of both directions there is one
    return (*outputs, *(((batch, cell.units), name) for cell in cells for _ in range(cell.states)))


@lru_cache(maxsize=1024)
def _callback(function: Callable[..., Any], job: _Job) -> Callable[..., Any]:
    """What XLA calls: kept, since JAX compiles anew for each new function."""

    def work(context: Any, *rows: Any) -> None:
        leaves, out = ([torch.from_dlpack(buffer) for buffer in row] for row in rows)
        with _stream(context, leaves[0].device):
            function(job, leaves, out)

    def run(context: Any, out: Any, *buffers: Any) -> None:
        if job.device == "cpu":
            _in_worker(work, context, buffers, out)
        else:  # torch's threads compute nothing for a GPU
            work(context, buffers, out)

    @lru_cache(maxsize=256)
    def giving(kinds: tuple[Kind, ...]) -> Any:
        return buffer_callback(run, tuple(jax.ShapeDtypeStruct(*kind) for kind in kinds), vmap_method="sequential")

    return giving


_worker = ThreadPoolExecutor(1, "whorl")


def _in_worker(function: Callable[..., Any], *given: Any) -> Any:
    """What the function gives, run by the one thread in which torch computes on a CPU.

    XLA calls from several, and each would get OpenMP threads of its own: with more of them than cores OpenMP puts to
    sleep those that wait (a batch of 32 through a plain LSTM of 64 units: 25 ms in place of 9, on 2 cores).
    """
    return _worker.submit(copy_context().run, function, *given).result()


def _stream(context: Any, device: torch.device) -> AbstractContextManager[Any]:
    """XLA's own stream as torch's current one, where the buffers are a GPU's."""
    return torch.cuda.stream(_as_torch_has(context.stream, device)) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=64)
def _as_torch_has(stream: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(stream, device)


# --- what the callbacks do, with tensors of torch ---------------------------------------------------------------------


def _forward(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    with torch.no_grad():
        _fill(out, _compute(job, leaves))


def _forward_saving(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The outputs; and the number of what stays for backward, or that itself.

    Raises:
        InputError: JAX runs the program on another device than it was traced for.
    """
    if leaves[0].device.type != job.device:
        raise InputError(
            f"the program runs on {leaves[0].device.type} and was traced for {job.device}: trace it with "
            "jax.default_device set to the one that it runs on."
        )
    if not job.rooms:
        kept = _Kept.of(job, leaves)
        _fill(out[:-1], kept.outputs)
        out[-1].fill_(_keep(kept))
        return
    saving = _Saving(room.plan for room in job.rooms)
    with torch.no_grad():
        outputs = _compute(job, leaves, run=saving)
    _fill(out[: len(outputs)], outputs)
    free = iter(out[len(outputs) :])
    for room, (_, made) in zip(job.rooms, saving.made, strict=True):
        next(free).copy_(made.y)
        room.fill(next(free), made.saved)


def _backward(job: _Job, row: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The gradient of each tensor that has one, given the call's, what was kept, and cotangents of its outputs."""
    leaves, rest = row[: len(job.wanted)], row[len(job.wanted) :]
    if not job.rooms:
        cotangents, made = rest[1:], _taken(int(rest[0]), job, leaves)
    else:
        cotangents, kept = rest[2 * len(job.rooms) :], iter(rest)
        saved = iter([(room.plan, next(kept), room.saved(next(kept))) for room in job.rooms])
        made = _Kept.of(job, leaves, lambda form, call, engine, outputs=True: _again(call, *next(saved)))
    outputs = list(compress(made.outputs, job.given))
    with torch.autograd.set_multithreading_enabled(False):  # to a GPU's own thread and back takes as long as the rest
        grads = torch.autograd.grad(outputs, made.wanted, list(cotangents), retain_graph=True, allow_unused=True)
    _fill(out, [out.new_zeros(()) if grad is None else grad for grad, out in zip(grads, out, strict=True)])


def _fill(out: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    for buffer, made in zip(out, found, strict=True):
        buffer.copy_(made.detach())


class _Kept(NamedTuple):
    """One call as torch's autograd holds it."""

    outputs: list[Tensor]
    wanted: list[Tensor]
    """What has a gradient."""
    size: int
    """About as many bytes as it holds."""

    @staticmethod
    def of(job: _Job, leaves: Sequence[Tensor], run: on_torch.Run = recurrent) -> "_Kept":
        """Of what stays with torch a copy: XLA's buffers are its own again when the callback returns."""
        made = [leaf.detach() for leaf in leaves]
        if not job.rooms:
            x = made[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)  # as an engine reads it
            made = [x.transpose(0, 1), *(leaf.clone() for leaf in made[1:])]
        wanted = [leaf.requires_grad_() for leaf in compress(made, job.wanted)]
        with torch.enable_grad():
            outputs = _compute(job, made, run=run)
        steps, width = made[0].shape[:2].numel(), sum(part.units for part in job.parts) * (1 + job.both)
        return _Kept(outputs, wanted, steps * made[0].element_size() * (made[0].shape[2] + 8 * width))


# --- on a CPU: what waits for its backward ----------------------------------------------------------------------------

_NUMBER: Kind = (), "int32"
_MOST_WAITING = 1 << 33
"""Bytes of forwards whose backward has not come: it may never, and then they go, oldest first."""
_numbers = count()
_waiting: OrderedDict[int, _Kept] = OrderedDict()
_last: tuple[int, _Kept] | None = None
"""The one whose backward ran last: it may run again, for another cotangent."""


def _keep(made: _Kept) -> int:
    number = next(_numbers) % 2**31
    _waiting[number] = made
    while sum(one.size for one in _waiting.values()) > _MOST_WAITING and len(_waiting) > 1:
        _waiting.popitem(last=False)
    return number


def _taken(number: int, job: _Job, leaves: Sequence[Tensor]) -> _Kept:
    """What was kept under a number; computed again where it has gone."""
    global _last
    if _last is None or _last[0] != number:
        _last = None  # before another is made
        _last = number, _waiting.pop(number, None) or _Kept.of(job, leaves)
    return _last[1]


# --- on a GPU: what lies in XLA's memory ------------------------------------------------------------------------------


def _lies_in_xla(device: str) -> bool:
    """Whether what an engine saves for its backward is an array of XLA's; else it stays with torch."""
    return device != "cpu"


class _Saving:
    """Runs calls of engines, and keeps what their backward reads.

    Args:
        plans: of each call in turn; what they do not name is planned.
    """

    def __init__(self, plans: Iterable[Plan] = ()) -> None:
        self._plans = iter(plans)
        self.made: list[tuple[Plan, Outcome]] = []

    def __call__(self, form: str, call: Call, engine: str, outputs: bool = True) -> tuple[Tensor, ...]:
        made = next(self._plans, None) or plan(form, facts(call, True, constants=constants(call)), engine)
        if made.slow:
            announce(made)
        with torch.no_grad():
            outcome = forward(made, call)
        self.made.append((made, outcome))
        y, *finals = outcome.outputs
        return (y.detach().requires_grad_(any(tensor.requires_grad for tensor in call.tensors)), *finals)


def _again(call: Call, made: Plan, y: Tensor, saved: list[Tensor]) -> tuple[Tensor, ...]:
    """A call that was run before, for autograd: of its final states only the shapes, which is all that is read."""
    finals = [call.x.new_empty(shape) for shape in made.problem.form.state_shapes(made.problem.batch)]
    return _Again.apply((made, call.layout, call.marks, y, saved), finals, *call.tensors)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, made: Any, finals: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.made, ctx.tensors = made, tensors
        ctx.set_materialize_grads(False)
        return (made[3].view_as(made[3]), *finals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        made, layout, marks, y, saved = ctx.made
        return (None, None, *backward(made, Call.of(ctx.tensors, layout, marks), y, saved, grads))


class _Room(NamedTuple):
    """Where one call of an engine keeps what its backward reads: its output, and one array of bytes."""

    plan: Plan
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
def _rooms(job: _Job, kinds: tuple[Kind, ...]) -> tuple[_Room, ...]:
    """What the engines of a job save: they run once on ones of these shapes."""
    saving = _Saving()
    _in_worker(_run_on_ones, job, kinds, saving)
    return tuple(
        _Room(made, _kind_of(outcome.y), tuple([part.numel() for part in outcome.saved]))
        for made, outcome in saving.made
    )


def _kind_of(tensor: Tensor) -> Kind:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _run_on_ones(job: _Job, kinds: tuple[Kind, ...], run: on_torch.Run) -> None:
    """Which of them have a gradient decides the plans."""
    ones = [torch.ones(shape, dtype=getattr(torch, name), device=job.device) for shape, name in kinds]
    for one in compress(ones, job.wanted):
        one.requires_grad_()
    with torch.enable_grad():
        _compute(job, ones, run=run)
