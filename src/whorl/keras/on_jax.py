"""The sweep on arrays of JAX: torch inside XLA's program, on its buffers and its stream, and the host copies nothing.

One layer on a CPU mostly needs neither torch nor Python: see xla; nor do most calls on GPUs: see calls.  For all else
`jax.experimental.buffer_callback` calls a Python function with XLA's own buffers, which torch sees through DLPack.  JAX
differentiates nothing of it, so the gradient is a second callback; on a CPU what backward needs stays with torch, and
XLA's program carries its number.  Under `jax.vmap` rows run one after the other; forward-mode derivatives are an error
of JAX.

Where the plan with a gradient differs from that without, what JAX differentiates is run by the first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from torch import Tensor

from whorl.keras import calls, xla
from whorl.keras import sweep as on_torch
from whorl.keras.callback import Kind, callback, check_device, device_of, fill, in_worker, kind_of, pulled_back
from whorl.keras.sweep import Part, Swept, Tensors
from whorl.problem import Plan
from whorl.weights import reordered


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
    if notes is None and _lies_in_xla(device_of(jax.tree.leaves((x, tensors)))):
        return calls.sweep(parts, x, tensors, mask, go_backwards, zero_output, sequences)

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
    if notes is None and _lies_in_xla(device_of(jax.tree.leaves((x, forward, backward)))):
        return calls.both_ways(cell, x, forward, backward, mask, zero_output, sequences)

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
    if not alone or not takes(gradient=True):
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
    job = _Job(tuple(parts), both, go_backwards, zero_output, sequences, structure, device_of(leaves))
    if notes is not None:  # somebody asks what would run: now, with arrays that are there
        return in_worker(_as_asked, job, leaves, notes, torch.is_grad_enabled())
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


def _compute(job: _Job, leaves: Sequence[Tensor], notes: list[Plan] | None = None) -> list[Tensor]:
    x, tensors, mask = jax.tree.unflatten(job.structure, leaves)
    how = job.zero_output, job.sequences, notes
    if job.both:
        one, other = tensors
        there, back = on_torch.both_ways(job.parts[0], x, one, other, mask, *how)
        return [there.outputs, back.outputs, *there.states[0], *back.states[0]]
    swept = on_torch.sweep(job.parts, x, tensors, mask, job.go_backwards, *how)
    return [swept.outputs, *(state for states in swept.states for state in states)]


# --- the operation, as JAX sees it ------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operation(job: _Job, *leaves: Any) -> tuple[Any, ...]:
    return tuple(callback(_forward, job)(_outputs(job, leaves))(*leaves))


def _operation_forward(job: _Job, *given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves = [one.value for one in given]
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    wanted = tuple(one.perturbed and real for one, real in zip(given, floating, strict=True))
    job = replace(job, wanted=wanted)
    *outputs, number = callback(_forward_saving, job)((*_outputs(job, leaves), _NUMBER))(*leaves)
    return tuple(outputs), (job, *leaves, number)


def _operation_backward(_: _Job, kept: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    return pulled_back(_backward, kept, cotangents)


_operation.defvjp(_operation_forward, _operation_backward, symbolic_zeros=True)


def _outputs(job: _Job, leaves: Sequence[Any]) -> tuple[Kind, ...]:
    x, *_ = jax.tree.unflatten(job.structure, leaves)
    (batch, time, _), name = kind_of(x)
    outputs = [((batch, time if job.sequences else 1, job.parts[-1].units), name)] * (1 + job.both)
    cells = job.parts * (1 + job.both)  # of both directions there is one
    return (*outputs, *(((batch, cell.units), name) for cell in cells for _ in range(cell.states)))


# --- what the callbacks do, with tensors of torch ---------------------------------------------------------------------


def _forward(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    with torch.no_grad():
        fill(out, _compute(job, leaves))


def _forward_saving(job: _Job, leaves: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The outputs, and the number of what stays for backward.

    Raises:
        InputError: JAX runs the program on another device than it was traced for.
    """
    check_device(leaves[0].device.type, job)
    kept = _Kept.of(job, leaves)
    fill(out[:-1], kept.outputs)
    out[-1].fill_(_keep(kept))


def _backward(job: _Job, row: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The gradient of each tensor that has one, given the call's, the number of what stayed, and cotangents."""
    leaves, (number, *cotangents) = row[: len(job.wanted)], row[len(job.wanted) :]
    made = _taken(int(number), job, leaves)
    outputs = list(compress(made.outputs, job.given))
    grads = torch.autograd.grad(outputs, made.wanted, cotangents, retain_graph=True, allow_unused=True)
    fill(out, [out.new_zeros(()) if grad is None else grad for grad, out in zip(grads, out, strict=True)])


class _Kept(NamedTuple):
    """One call as torch's autograd holds it."""

    outputs: list[Tensor]
    wanted: list[Tensor]
    """What has a gradient."""
    size: int
    """About as many bytes as it holds."""

    @staticmethod
    def of(job: _Job, leaves: Sequence[Tensor]) -> "_Kept":
        """Of what stays with torch a copy: XLA's buffers are its own again when the callback returns."""
        x = leaves[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)  # as an engine reads it
        made = [x.transpose(0, 1), *(leaf.clone() for leaf in leaves[1:])]
        wanted = [leaf.requires_grad_() for leaf in compress(made, job.wanted)]
        with torch.enable_grad():
            outputs = _compute(job, made)
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


def _lies_in_xla(device: str) -> bool:
    """Whether what an engine saves for its backward is an array of XLA's; else it stays with torch."""
    return device != "cpu"
