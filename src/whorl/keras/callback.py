"""Torch inside XLA's program, on its buffers and its stream: a function of ours as an operation of JAX."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import lru_cache
from itertools import compress
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback
from torch import Tensor

from whorl.errors import InputError

Kind = tuple[tuple[int, ...], str]
"""Shape and dtype."""


class Job(Protocol):
    """What a callback is to do, as plain values that hash."""

    @property
    def device(self) -> str:
        """Of what kind the buffers are: "cpu" or "cuda"."""

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Which leaves have a gradient."""


def kind_of(leaf: Any) -> Kind:
    """Of an array of JAX."""
    return tuple(leaf.shape), jnp.dtype(leaf.dtype).name


def device_of(leaves: Sequence[Any]) -> str:
    """Where what JAX traces will run, "cpu" or "cuda": where its arrays are, or where JAX will put them."""
    there = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    chosen = jax.config.jax_default_device
    asked = next(iter(there[0].devices())) if there else chosen
    return "cpu" if (getattr(asked, "platform", asked) or jax.default_backend()) == "cpu" else "cuda"


@lru_cache(maxsize=1024)
def callback(function: Callable[..., Any], job: Job) -> Callable[..., Any]:
    """What XLA calls: kept, since JAX compiles anew for each new function.

    Args:
        function: of (job, tensors, tensors to fill).

    Returns:
        Of the kinds of what is filled, an operation on arrays.
    """

    def work(context: Any, *rows: Any) -> None:
        leaves, out = ([torch.from_dlpack(buffer) for buffer in row] for row in rows)
        with _stream(context, leaves[0].device):
            function(job, leaves, out)

    def run(context: Any, out: Any, *buffers: Any) -> None:
        if job.device == "cpu":
            in_worker(work, context, buffers, out)
        else:  # torch's threads compute nothing for a GPU
            work(context, buffers, out)

    @lru_cache(maxsize=256)
    def giving(kinds: tuple[Kind, ...]) -> Any:
        return buffer_callback(run, tuple(jax.ShapeDtypeStruct(*kind) for kind in kinds), vmap_method="sequential")

    return giving


def pulled_back(function: Callable[..., Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """The gradient of each leaf, None where none is wanted or no cotangent is given.

    Args:
        function: a callback, whose job is told which cotangents are `given`.
        kept: the job of forward, its leaves, and what else is handed to the callback.
    """
    job, *row = kept
    given = tuple(not isinstance(cotangent, SymbolicZero) for cotangent in cotangents)
    if not any(given) or not any(job.wanted):
        return (None,) * len(job.wanted)
    job, kinds = replace(job, given=given), tuple(kind_of(leaf) for leaf in compress(row, job.wanted))
    grads = iter(callback(function, job)(kinds)(*row, *compress(cotangents, given)))
    return tuple(next(grads) if wanted else None for wanted in job.wanted)


def check_device(device: str, job: Job) -> None:
    """
    Raises:
        InputError: JAX runs the program on another device than it was traced for.
    """
    if device != job.device:
        raise InputError(
            f"the program runs on {device} and was traced for {job.device}: trace it with jax.default_device set to "
            "the one that it runs on."
        )


_worker = ThreadPoolExecutor(1, "whorl")


def in_worker(function: Callable[..., Any], *given: Any) -> Any:
    """What the function gives, run by the one thread in which torch computes on a CPU.

    XLA calls from several, and each would get OpenMP threads of its own: with more of them than cores OpenMP puts to
    sleep those that wait (a batch of 32 through a plain LSTM of 64 units: 25 ms in place of 9, on 2 cores).
    """
    return _worker.submit(copy_context().run, function, *given).result()


def fill(out: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Copies what was found to where it is to be."""
    for buffer, made in zip(out, found, strict=True):
        buffer.copy_(made.detach())


def _stream(context: Any, device: torch.device) -> AbstractContextManager[Any]:
    """XLA's own stream as torch's current one, where the buffers are a GPU's."""
    return torch.cuda.stream(_as_torch_has(context.stream, device)) if device.type == "cuda" else nullcontext()


@lru_cache(maxsize=64)
def _as_torch_has(stream: int, device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(stream, device)
