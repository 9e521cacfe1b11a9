"""Engine `cpu` as an operation of XLA's programs: its loop over time called from C++, without Python.

Beside a small layer what Python does around the loop takes as long as the loop itself.  XLA's typed FFI calls a C++
function of ours with its own buffers: xla.cpp, compiled by the host's compiler as the engine's kernels are.  It takes
one layer of LSTM, GRU or SimpleRNN in float32, in one direction or both, with a mask and with masks of recurrent
dropout, where the plan says that engine `cpu` runs; everything else is a callback, see on_jax.
"""

import ctypes
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.custom_derivatives import SymbolicZero

from whorl.engines.cpu.generate import shared
from whorl.engines.cpu.masks import BY_GATE, HELD, NONE
from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.sweep import Fields, filled_up, kernel, projects_within
from whorl.engines.host import load
from whorl.keras.sweep import Part, Swept, Tensors
from whorl.plan import plan
from whorl.problem import Call, Facts, Form
from whorl.weights import reordered

_KINDS = ("LSTM", "GRU", "SimpleRNN")
PROCESS = secrets.randbits(62)
"""A program compiled here holds addresses: by this number JAX's cache on disk gives it to no other process."""


class Numbers(NamedTuple):
    """The `Numbers` of xla.cpp."""

    cell: int
    forward: int
    backward: int
    project: int
    outer: int
    order: int
    ends: int
    time: int
    batch: int
    units: int
    inputs: int
    reverse: int
    threads: int
    groups: int
    team: int
    largest: int
    within: int
    x_stride: int
    reads_x: int
    biases: int
    masked: int
    noise_kind: int
    gives_y: int
    saves: int = 0
    dy: int = 0
    dfinals: int = 0
    wants_x: int = 0
    wants_states: int = 0
    process: int = PROCESS


class _Loop(NamedTuple):
    """One direction of a layer, as plain values."""

    form: str
    time: int
    batch: int
    reverse: bool
    sequences: bool
    """The output of every step is wanted."""
    biases: int
    masked: bool
    noise_kind: int
    threads: int


def takes(part: Part, x: Any, tensors: Sequence[Tensors], mask: Any, gradient: bool) -> bool:
    """Whether a layer is run so: alike in each direction, and by engine `cpu`."""
    arrays = [x, *(array for own in tensors for array in (*own.weights, *own.states, *own.recurrent_masks))]
    if part.kind not in _KINDS or any(own.input_masks or own.seed is not None for own in tensors):
        return False
    if not all(isinstance(size, int) for size in x.shape) or not x.shape[1]:
        return False  # of an export, whose sizes are open
    if any(jnp.result_type(array) != jnp.float32 for array in arrays):
        return False
    form, noise = part.form if len(tensors) == 1 else part.two_ways, bool(tensors[0].recurrent_masks)
    extras = (*["mask"] * (mask is not None), *["dropout_masks"] * noise)
    constants = ("noise",) if gradient and noise else ()
    known = Facts(
        "cpu", None, torch._C._get_mkldnn_enabled(), torch.float32, int(x.shape[1]), int(x.shape[0]), packed=False,
        initial=True, dropout=False, extras=extras, gradient=gradient, constants=constants,
    )  # fmt: skip
    return plan(form, known, part.engine).engine == "cpu"


def sweep(part: Part, x: Any, own: Tensors, mask: Any, go_backwards: bool, zero_output: bool, sequences: bool) -> Swept:
    """What `whorl.keras.sweep.sweep` gives of one cell."""
    found = _one_way(part, x, own, mask, go_backwards, zero_output, sequences)
    return found._replace(outputs=jnp.flip(found.outputs, 1)) if go_backwards else found


def both_ways(
    part: Part, x: Any, forward: Tensors, backward: Tensors, mask: Any, zero_output: bool, sequences: bool
) -> tuple[Swept, Swept]:
    """What `whorl.keras.sweep.both_ways` gives."""
    there = _one_way(part, x, forward, mask, False, zero_output, sequences)
    return there, _one_way(part, x, backward, mask, True, zero_output, sequences)


def _one_way(part: Part, x: Any, own: Tensors, mask: Any, reverse: bool, zero_output: bool, sequences: bool) -> Swept:
    """Outputs in the order of time."""
    kernel, recurrent_kernel, *bias = own.weights
    biases = [row for given in bias for row in (given if given.ndim == 2 else given[None])]
    matrices = [_in_order(part.kind, weight) for weight in (kernel, recurrent_kernel, *biases)]
    noise = reordered(part.kind, own.recurrent_masks) if len(own.recurrent_masks) > 1 else own.recurrent_masks
    kind = (BY_GATE if len(noise) > 1 else HELD) if noise else NONE
    masks = [] if mask is None else [jnp.asarray(mask).astype(bool)]
    factors = [jax.lax.stop_gradient(jnp.stack(noise))] if noise else []  # drawn from a seed
    batch, time, _ = x.shape
    loop = _Loop(part.form, time, batch, reverse, sequences, len(biases), bool(masks), kind, torch.get_num_threads())
    made = _run(loop, jnp.asarray(x), *matrices, *map(jnp.asarray, own.states), *masks, *factors)
    states, y = made[: len(own.states)], made[len(own.states) :]
    last = states[0]
    if masks:
        counts = masks[0][:, 0 if reverse else -1] if zero_output else masks[0].any(1)
        last = jnp.where(counts[:, None], last, 0.0)
    if not sequences:
        return Swept(last, last[:, None], (states,))
    outputs = jnp.swapaxes(y[0], 0, 1)
    return Swept(last, jnp.where(masks[0][..., None], outputs, 0.0) if masks and zero_output else outputs, (states,))


def _in_order(kind: str, weight: Any) -> Any:
    """[..., gates x units] in the cell's order from Keras'."""
    return jnp.concatenate(reordered(kind, jnp.split(weight, 3, -1)), -1) if kind == "GRU" else weight


# --- the operation ----------------------------------------------------------------------------------------------------


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """What has a gradient beside the weights."""

    x: bool
    states: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(loop: _Loop, *leaves: Any) -> tuple[Any, ...]:
    """The final states, and where they are wanted the outputs [time, batch, units].

    Of x, kernels, biases, initial states, mask and masks of dropout.
    """
    return tuple(_call("forward", _outputs(loop), _numbers(loop), leaves))


def _run_forward(loop: _Loop, *given: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, states = [one.value for one in given], 3 + loop.biases
    outputs = _outputs(loop)
    count = len(outputs) - loop.sequences
    wanted = _Wanted(given[0].perturbed, any(one.perturbed for one in given[states : states + count]))
    made = _call("forward", (*outputs, *_kept(loop)), _numbers(loop)._replace(saves=1), leaves)
    return tuple(made[: len(outputs)]), (wanted, leaves, made[len(outputs) :])


def _run_backward(loop: _Loop, row: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    wanted, leaves, kept = row
    first, count = 3 + loop.biases, len(cotangents) - loop.sequences
    there = [not isinstance(cotangent, SymbolicZero) for cotangent in cotangents]
    if not any(there):
        return (None,) * len(leaves)
    numbers = _numbers(loop)._replace(
        dy=any(there[count:]), dfinals=sum(one << place for place, one in enumerate(there[:count])),
        wants_x=wanted.x, wants_states=wanted.states,
    )  # fmt: skip
    x, *weights = leaves[:first]
    states, rest = leaves[first : first + count], leaves[first + count :]
    turned = [weight.shape[::-1] for weight in weights]  # a bias is as it was
    shapes = [*turned, *[state.shape for state in states] * wanted.states, *[x.shape] * wanted.x]
    given = [cotangent for cotangent, one in zip(cotangents, there, strict=True) if one]
    made = iter(_call("backward", shapes, numbers, [x, *weights[:2], *rest, *kept, *given]))
    to_weights = [next(made).T for _ in weights]
    to_states = [next(made) if wanted.states else None for _ in states]
    return (next(made) if wanted.x else None, *to_weights, *to_states, *[None] * len(rest))


_run.defvjp(_run_forward, _run_backward, symbolic_zeros=True)


def _outputs(loop: _Loop) -> list[tuple[int, ...]]:
    form = Form.from_json(loop.form)
    states = [(loop.batch, form.units)] * len(form.cell.states)
    return states + [(loop.time, loop.batch, form.units)] * loop.sequences


def _kept(loop: _Loop) -> list[tuple[int, ...]]:
    """What forward leaves for backward."""
    form, numbers = Form.from_json(loop.form), _numbers(loop)
    made, rows = kernel(form.cell, torch.float32).source, loop.time * loop.batch
    widths = [made.saved * form.units + made.saved_means, *[form.units] * (1 + len(made.products))]
    return [(rows, width) for width in widths + [numbers.x_stride] * numbers.reads_x]


def _call(name: str, shapes: Sequence[tuple[int, ...]], numbers: Numbers, given: Sequence[Any]) -> Sequence[Any]:
    _register()
    kinds = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    operation = jax.ffi.ffi_call(f"whorl_xla_{name}", kinds, vmap_method="sequential")
    return operation(*given, numbers=np.array(numbers, np.int64))


@lru_cache(maxsize=1)
def _register() -> None:
    """Compiles xla.cpp, and tells XLA of what it has."""
    text = Path(__file__).with_name("xla.cpp").read_text(encoding="utf-8")
    flags = f"-DWHORL_DTYPE=32 -DWHORL_JAX={jax.__version__} -I {shlex.quote(jax.ffi.include_dir())}"
    library = load("the loop over time as XLA calls it", f"{shared()}\n{text}", flags)
    for name in ("whorl_xla_forward", "whorl_xla_backward"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")


@cache
def _numbers(loop: _Loop) -> Numbers:
    """Kept for ever with what they point to: compiled programs hold them."""
    form = Form.from_json(loop.form)
    compiled = kernel(form.cell, torch.float32)
    rows = Rows(Call(torch.empty(loop.time, loop.batch, 0, device="cpu"), (), ()))
    fields = Fields(compiled, rows, loop.threads, form.units, form.units, loop.reverse)
    _alive.append(fields)
    k = fields.sweep
    k.inputs = form.inputs
    within, wide = projects_within(k, loop.threads, torch.float32), filled_up(len(form.cell.gates) * form.units)
    return Numbers(
        cell=k.cell, forward=_address(compiled.forward), backward=_address(compiled.backward),
        project=_address(compiled.project), outer=_address(compiled.outer), order=k.order, ends=k.ends,
        time=loop.time, batch=loop.batch, units=form.units, inputs=form.inputs, reverse=loop.reverse,
        threads=k.threads, groups=k.groups, team=k.team, largest=k.largest, within=within, x_stride=wide,
        reads_x=compiled.source.reads_x, biases=loop.biases, masked=loop.masked, noise_kind=loop.noise_kind,
        gives_y=loop.sequences,
    )  # fmt: skip


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address, "it is one of a library that is loaded"
    return address


_alive: list[Fields] = []
