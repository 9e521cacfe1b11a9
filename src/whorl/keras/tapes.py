"""A call of an engine as an operation of XLA's programs on a GPU: by its tapes, without Python.

A callback takes the host longer than a small layer takes the GPU.  Where C++ knows a plan (engines/taped.py),
XLA's typed FFI calls tapes.cpp with its own buffers and its stream, compiled by the host's compiler.
"""

import ctypes
import shlex
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whorl.engines import taped
from whorl.engines.host import load
from whorl.errors import CompileError
from whorl.keras.callback import Kind, kind_of
from whorl.keras.xla import PROCESS


def forward(number: int, given: Sequence[Any], kinds: Sequence[Kind]) -> Sequence[Any]:
    """The output, each final state, and where the plan has a gradient what backward reads.

    Args:
        number: of the plan.
        given: x, initial states, weights, masks of dropout, mask, seed.
        kinds: of what it gives.
    """
    return _pass(number, False, _as_read(number, given), kinds)


def backward(number: int, given: Sequence[Any], kept: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
    """The gradient of x, of each initial state and of each weight; None where the plan has none.

    Args:
        given: as forward had it.
        kept: the output, and what else backward reads.
        cotangents: of the output and of each final state; None where there is none.
    """
    parts, sizes = taped.written(number).gradients, dict[int, tuple[int, ...]]()
    for (slot, first, count, _), array in zip(parts, given, strict=False):  # kernels of a GPU write whole rows
        if slot >= 0:
            sizes[slot] = max(sizes.get(slot, (0,)), (first + count,)) if count else array.shape
    kinds = [(shape, kind_of(given[0])[1]) for shape in sizes.values()]
    made = dict(zip(sizes, _pass(number, True, [*_as_read(number, given), *kept, *cotangents], kinds), strict=True))
    return [
        None if slot < 0 else made[slot][first : first + count] if count else made[slot]
        for slot, first, count, _ in parts
    ]


def _as_read(number: int, given: Sequence[Any]) -> list[Any]:
    """The same with masks of dropout in the dtypes in which kernels read them, and a seed of 64 bits."""
    plan = taped.written(number)
    names = [str(dtype).removeprefix("torch.") for dtype in plan.others if dtype is not None]
    first = len(given) - plan.marks - len(names)
    masks = [mask.astype(name) for mask, name in zip(given[first:], names, strict=False)]
    marks = [mark if mark.ndim else jnp.stack([mark, jnp.zeros_like(mark)]) for mark in given[first + len(names) :]]
    return [*given[:first], *masks, *marks]  # of a seed, which is not negative, the lower half comes first


def _pass(number: int, back: bool, given: Sequence[Any], kinds: Sequence[Kind]) -> Sequence[Any]:
    there = [array for array in given if array is not None]
    numbers = taped.address_of_pass(), number, int(back), PROCESS, *[int(array is not None) for array in given]
    shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
    operation = jax.ffi.ffi_call("whorl_tapes_pass", shapes, vmap_method="sequential")
    return operation(*there, numbers=np.array(numbers, np.int64))


@lru_cache(maxsize=1)
def are_taken() -> bool:
    """Whether XLA knows of what tapes.cpp has, which is compiled first; it warns where it cannot be."""
    text = Path(__file__).with_name("tapes.cpp").read_text(encoding="utf-8")
    flags = f"-O1 -DWHORL_JAX={jax.__version__} -isystem {shlex.quote(jax.ffi.include_dir())}"
    try:
        library = load("the calls of CUDA kernels as XLA makes them", text, flags, "set WHORL_CALLS to python")
    except CompileError as error:
        warnings.warn(f"calls of engines on JAX go through Python: {error}", stacklevel=2)
        return False
    ctypes.c_int64.in_dll(library, "whorl_tapes_process").value = PROCESS
    for platform in ("CUDA", "cpu"):  # on the host kernels are emulated
        jax.ffi.register_ffi_target("whorl_tapes_pass", jax.ffi.pycapsule(library.whorl_tapes_pass), platform=platform)
    return True
