"""The sweep on arrays of JAX: torch inside XLA's program, on its buffers and its stream, and the host copies nothing.

`jax.experimental.buffer_callback` calls a Python function with XLA's own buffers, which torch sees through DLPack.  JAX
differentiates nothing of it, so the gradient is a second callback: it runs the sweep again with autograd and pulls the
cotangents back.  Under `jax.vmap` rows run one after the other; forward-mode derivatives are an error of JAX.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.buffer_callback import buffer_callback

from whorl.keras import sweep as on_torch
from whorl.keras.sweep import Part, Swept, Tensors
from whorl.problem import Plan


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
        made = _compute(job, _as_asked(job, leaves), notes)
        return [jnp.from_dlpack(tensor.detach().contiguous()) for tensor in made]
    return _operation(job, *leaves)


def _as_asked(job: _Job, leaves: Sequence[Any]) -> list[torch.Tensor]:
    made = [torch.from_dlpack(jnp.asarray(leaf)).clone() for leaf in leaves]
    return [tensor if exact else tensor.requires_grad_() for tensor, exact in zip(made, job.exact, strict=True)]


def _compute(job: _Job, leaves: Sequence[torch.Tensor], notes: list[Plan] | None = None) -> list[torch.Tensor]:
    x, tensors, mask = jax.tree.unflatten(job.structure, leaves)
    if job.both:
        one, other = tensors
        there, back = on_torch.both_ways(job.parts[0], x, one, other, mask, job.zero_output, notes)
        return [there.outputs, back.outputs, *there.states[0], *back.states[0]]
    swept = on_torch.sweep(job.parts, x, tensors, mask, job.go_backwards, job.zero_output, notes)
    return [swept.outputs, *(state for states in swept.states for state in states)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _operation(job: _Job, *leaves: Any) -> tuple[Any, ...]:
    return tuple(_callback(job, False)(_shapes(job, leaves), *leaves))


def _forward(job: _Job, *leaves: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return _operation(job, *leaves), leaves


def _backward(job: _Job, leaves: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    shapes = tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf, exact in zip(leaves, job.exact, strict=True) if not exact
    )
    grads = iter(_callback(job, True)(shapes, *leaves, *cotangents))
    return tuple(
        np.zeros(leaf.shape, jax.dtypes.float0) if exact else next(grads)
        for leaf, exact in zip(leaves, job.exact, strict=True)
    )


_operation.defvjp(_forward, _backward)


def _shapes(job: _Job, leaves: Sequence[Any]) -> tuple[Any, ...]:
    x, tensors, _ = jax.tree.unflatten(job.structure, leaves)
    outputs = [jax.ShapeDtypeStruct((*x.shape[:2], job.parts[-1].units), x.dtype)] * (1 + job.both)
    return (*outputs, *(jax.ShapeDtypeStruct(state.shape, x.dtype) for own in tensors for state in own.states))


@lru_cache(maxsize=1024)
def _callback(job: _Job, backward: bool) -> Callable[..., Any]:
    """What XLA calls: kept, since JAX compiles anew for each new function."""

    def run(context: Any, out: Any, *buffers: Any) -> None:
        with _stream(context, buffers):
            leaves = [torch.from_dlpack(buffer) for buffer in buffers]
            found = _pull(job, leaves) if backward else _no_grad(job, leaves)
            for buffer, made in zip(out, found, strict=True):
                torch.from_dlpack(buffer).copy_(made)

    @lru_cache(maxsize=256)
    def of_shapes(shapes: tuple[tuple[Any, Any], ...]) -> Any:
        kinds = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
        return buffer_callback(run, kinds, vmap_method="sequential")

    return lambda shapes, *leaves: of_shapes(tuple((kind.shape, kind.dtype) for kind in shapes))(*leaves)


def _no_grad(job: _Job, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    with torch.no_grad():
        return _compute(job, leaves)


def _pull(job: _Job, row: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The gradient of each tensor that has one, given the call's tensors and then the cotangents of its outputs."""
    count = len(job.exact)
    with torch.enable_grad():
        leaves = [
            tensor if exact else tensor.detach().requires_grad_()
            for tensor, exact in zip(row[:count], job.exact, strict=True)
        ]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        outputs = _compute(job, leaves)
        grads = torch.autograd.grad(outputs, wanted, list(row[count:]), allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, wanted, strict=True)]


def _stream(context: Any, buffers: Sequence[Any]) -> AbstractContextManager[Any]:
    """XLA's own stream as torch's current one, where the buffers are a GPU's."""
    if torch.from_dlpack(buffers[0]).device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(context.stream))
