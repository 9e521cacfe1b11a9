"""One call into a kernel: the `Sweep` of kernels/sweep.cpp, filled from tensors."""

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_int64, c_uint64, c_void_p
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.cells.cell import Graph
from whorl.engines.cpu.build import by_unit, openmp
from whorl.engines.cpu.generate import Source, source, sweep
from whorl.engines.cpu.memory import empty, keep_freed, no_memory
from whorl.engines.cpu.rows import Rows
from whorl.engines.host import load

_BITS = {torch.float32: 32, torch.float64: 64, torch.bfloat16: 16}


class _Zoneout(Structure):
    _fields_ = (("kind", c_int64), ("share", c_double), ("below", c_uint64)) + tuple(
        (name, c_void_p) for name in ("given", "apart", "dgiven")
    )


_NUMBERS = "time batch units width reverse threads groups team largest"
_FIELDS: dict[str, type] = {"cell": c_void_p} | dict.fromkeys(_NUMBERS.split(), c_int64)
for _row in (
    ("starts lengths place mask reset ids order ends x", c_void_p),
    ("x_stride", c_int64),
    ("input", c_void_p),
    ("inputs input_step input_row", c_int64),
    ("ih bias_ih", c_void_p),
    ("hh bias_hh hr vectors extras extra_widths states reset_to", c_void_p),
    ("noise_kind keep_plain", c_int64),
    ("noise", c_void_p),
    ("noise_below", c_uint64),
    ("noise_scale", c_double),
    ("seed", c_uint64),
    ("noise_tag zoneout_tag", c_int64),
    ("zoneout", _Zoneout * 4),
    ("y", c_void_p),
    ("y_stride", c_int64),
    ("sequences sequence_strides entered unprojected saved operands dy", c_void_p),
    ("dy_stride dy_step dy_row", c_int64),
    ("dsequences dsequence_strides dstates dreset dheld dx dr dp dv de dprojected", c_void_p),
    ("ih_turned hh_turned unread", c_int64),
):
    _FIELDS |= dict.fromkeys(_row[0].split(), _row[1])


class Sweep(Structure):
    """The `Sweep` of kernels/sweep.cpp."""

    _fields_ = tuple(_FIELDS.items())


class StepLayer(Structure):
    """The `StepLayer` of kernels/stream.cpp: one layer of a prepared step."""

    _fields_ = (("sweep", Sweep), ("ih", c_void_p), ("bias_ih", c_void_p), ("inputs", c_int64))


OF_BOTH = (
    "input input_step input_row ih hh ih_turned hh_turned bias_ih bias_hh vectors within x y saved starts:4 finals:4 "
    "noise seed entered mask mask_step mask_row lengths lengths_row reset reset_step reset_row reset_to:4"
)
OF_BACKWARD = (
    "dy dy_step dy_row dfinals:4 dstarts:4 begin dx dr to_input to_ih to_hh to_bias_ih to_bias_hh dv sums to_vectors "
    "dreset:4"
)


def _words(names: str) -> int:
    """How many numbers of 8 bytes they are."""
    return sum(int(name.partition(":")[2] or 1) for name in names.split())


# The `Plain` of kernels/plain.cpp, the tensors of a call without what its sizes decide, as the bytes of numbers in its
# order: a Structure of ctypes takes longer, most of all beside products, which drive its fields out of the caches.
PLAIN_FORWARD = Struct(f"{_words(OF_BOTH)}Q{8 * _words(OF_BACKWARD)}x")
PLAIN_BACKWARD = Struct(f"{_words(OF_BOTH) + _words(OF_BACKWARD)}Q")
INPUT, GRADIENT = 0, _words(OF_BOTH)
"""The words of `input` and `dy`, which stand before how far their steps and sequences are apart."""


PARTS = {torch.bfloat16: 1, torch.float32: 3}
"""Of bfloat16, in which a processor's matrix unit takes a number of a dtype, as kernels/types.cpp has it."""


class Kernel(NamedTuple):
    """The compiled loop of a dtype with the compiled step of a cell."""

    source: Source
    cell: int
    """Where its `Cell` lies."""
    parts: int
    """Of its dtype; 0: a matrix unit takes none."""
    forward: Callable[..., int]
    backward: Callable[..., int]
    project: Callable[..., int]
    outer: Callable[..., int]
    draw: Callable[..., None]
    open: Callable[..., int]
    stream: Callable[..., int]
    close: Callable[..., None]
    plain_forward: Callable[..., int]
    plain_backward: Callable[..., int]


_TAKE_MEMORY = {
    "forward": "a forward pass", "plain_forward": "a forward pass",
    "backward": "a backward pass", "plain_backward": "a backward pass",
    "project": "a product of all steps", "outer": "the gradient of a weight",
    "open": "the prepared step of a stepper", "stream": "a step of a stepper",
}  # fmt: skip
"""The functions of a kernel that take memory, and what each asks for some for."""


@lru_cache(maxsize=256)
def kernel(graph: Graph, dtype: torch.dtype) -> Kernel:
    """The kernel of a cell, compiled at its first use on this machine.

    Raises:
        CompileError: it cannot be compiled here.
    """
    made, loop, defines = source(graph), _loop(dtype), f"-DWHORL_DTYPE={_BITS[dtype]}"
    step = load(f"the step of {graph.name}", made.text, defines)
    step.whorl_cell.restype = c_void_p
    return Kernel(
        made, step.whorl_cell(), PARTS.get(dtype, 0), *(getattr(loop, f"whorl_{name}") for name in Kernel._fields[3:])
    )


@lru_cache(maxsize=8)
def _loop(dtype: torch.dtype) -> ctypes.CDLL:
    keep_freed()
    library = load("the loop over time", sweep(), f"-DWHORL_DTYPE={_BITS[dtype]}")
    library.whorl_start.argtypes, library.whorl_start.restype = (c_void_p,) * 3, c_bool
    if not library.whorl_start(*openmp()):
        raise MemoryError("engine 'cpu' cannot start: this machine has no memory for what a fork calls, free some.")
    library.whorl_size.restype = c_int64
    assert library.whorl_size() == ctypes.sizeof(Sweep), "sweep.py and kernels/sweep.cpp name the same fields"
    library.whorl_step_layer_size.restype = c_int64
    assert library.whorl_step_layer_size() == ctypes.sizeof(StepLayer), "sweep.py and kernels/stream.cpp agree"
    library.whorl_open.argtypes = POINTER(StepLayer), c_int64, c_int64, POINTER(c_void_p)
    library.whorl_stream.argtypes = (c_void_p,) * 6
    library.whorl_close.argtypes, library.whorl_close.restype = (c_void_p,), None
    library.whorl_plain_size.restype = c_int64
    assert library.whorl_plain_size() == PLAIN_BACKWARD.size, "sweep.py and kernels/plain.cpp name the same fields"
    for name in ("whorl_plain_forward", "whorl_plain_backward"):
        getattr(library, name).argtypes = POINTER(Sweep), c_char_p, c_int64
    for name in ("whorl_forward", "whorl_backward"):
        getattr(library, name).argtypes = (POINTER(Sweep),)
    library.whorl_draw.argtypes = (c_void_p, *(c_int64,) * 3, c_void_p, c_uint64, c_int64, c_uint64, c_double)
    library.whorl_draw.restype = None
    library.whorl_project.argtypes = (*(c_void_p,) * 4, *(c_int64,) * 7)
    library.whorl_outer.argtypes = (*(c_void_p,) * 4, *(c_int64,) * 6, *(c_void_p,) * 2, *(c_int64,) * 2)
    for name in _TAKE_MEMORY:
        function = getattr(library, f"whorl_{name}")
        function.restype, function.errcheck = c_int64, _done
    return library


def _done(missing: int, function: Any, given: object) -> int:
    """Raises where a kernel could not have the memory that it asked for: then its outputs hold anything."""
    if missing:
        raise no_memory(missing, _TAKE_MEMORY[function.__name__.removeprefix("whorl_")])
    return missing


def address(tensor: Tensor | None) -> int | None:
    """Of its first element; None of none."""
    return None if tensor is None else tensor.data_ptr()


def turned(weight: Tensor) -> bool:
    """Whether a matrix lies in memory the other way round, as those of Keras do: kernels read it so too."""
    return not weight.is_contiguous() and weight.stride() == (1, weight.shape[0])


def laid(weight: Tensor) -> Tensor:
    """A matrix as kernels take it, either way round."""
    return weight if turned(weight) else weight.contiguous()


class Factor(NamedTuple):
    """What each row of a matrix is multiplied with."""

    rows: Tensor | None
    """[count, columns] in the dtype of sums; None: nothing."""
    place: Tensor | None
    """Of each row of the matrix the one that it takes; None: one after the other, again and again."""


NO_FACTOR = Factor(None, None)


class Products:
    """Products of many rows at once, to the bit the same with any number of threads.

    Args:
        batch: the sequences whose rows they are.
    """

    def __init__(self, made: Kernel, wide: torch.dtype, threads: int, batch: int) -> None:
        self._kernel, self._wide, self._threads, self._batch = made, wide, threads, batch

    def rows(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, across: bool = True) -> Tensor:
        """x weight' + bias (x weight where not `across`) in the dtype of sums, [rows, columns filled up to 64]."""
        columns = weight.shape[0 if across else 1]
        if turned(weight):
            weight, across = weight.t(), not across
        x, weight = x.contiguous(), weight.contiguous()
        rows, inputs = x.shape
        made = empty(rows, filled_up(columns), dtype=self._wide)
        sizes = rows, inputs, columns, made.shape[1], self._batch, across, self._threads
        self._kernel.project(*map(address, (made, x, weight, bias)), *sizes)
        return made

    def outer(
        self, a: Tensor, b: Tensor, to: Tensor | None = None, sums: Tensor | None = None, add: bool = True,
        factor: Factor = NO_FACTOR,
    ) -> Tensor:  # fmt: skip
        """a' b in the dtype of sums, [columns of a, columns of b].

        Args:
            to: where the product is written; with `add` it is added to what is there.
            sums: the columns of a are added to it.
            factor: what b is multiplied with.
        """
        if to is None:
            to, add = empty(a.shape[1], b.shape[1], dtype=self._wide), False
        (rows, columns), inputs = a.shape, b.shape[1]
        assert a.stride(1) == b.stride(1) == 1 or 1 in (columns, inputs)
        sizes = rows, columns, inputs, a.stride(0), b.stride(0), add
        times = address(factor.rows), address(factor.place), 0 if factor.rows is None else factor.rows.shape[0]
        self._kernel.outer(*map(address, (to, sums, a, b)), *sizes, *times, self._threads)
        return to


def filled_up(columns: int) -> int:
    """The columns that a product of so many takes in memory."""
    return -(-columns // 64) * 64


def _team(batch: int, threads: int, weights: int, means: bool = False) -> int:
    """How many threads share the units of a row: rows of their own are better where there are enough of them.

    Two threads at batch 1 are 1.6 times as fast as one with 512 units, 1.03 to 1.1 times with 128; at batch 4 as
    fast as with a row each, at batch 32 0.85 times (2 cores of an AMD EPYC of family 25).  On 2 cores of an Intel
    Xeon they are 1.2 times as fast with 128 units and 0.65 times with 64.

    Args:
        weights: of the recurrent product.
        means: the step takes means over the units.
    """
    return max(1, min(threads // batch, weights // (_WEIGHTS_WITH_MEANS if means else _WEIGHTS)))


def _in_pairs(parts: int, batch: int, threads: int, weights: int) -> bool:
    """Whether two threads share the rows of both, each with half of the units, where a matrix unit multiplies.

    It waits for weights that come from the third cache; so each thread brings half of them, and multiplies twice the
    rows.  A train step of (20, 35, 650) is 1.09 times as fast for the LSTM and 1.19 times for the GRU, of (32, 30, 512)
    1.05 times for the LSTM and 0.90 times for the GRU, with 256 units 0.84 times, on 2 cores of an Intel Xeon.

    Args:
        parts: of bfloat16, in which it takes a number.
        weights: of the recurrent product.
    """
    far = parts == 3 and weights >= _FAR
    return far and threads % 2 == 0 and 8 * threads <= batch <= 24 * threads and by_unit(parts, 64, 64, batch)


_FAR = 1048576
"""Weights of the recurrent product that take, in three parts, three times the second cache of a core."""
_WEIGHTS = 16384
"""Of the recurrent product for each member of a team: fewer take less time than waiting for one another."""
_WEIGHTS_WITH_MEANS = 65536
"""The same where they wait at each mean too: of an LSTM with layer norm and 64 units the passes of two threads take 2.4
times as long as those of one, with 128 units 1.16 times, with 256 0.94 times (2 cores of an Intel Xeon)."""


@lru_cache(maxsize=64)
def _pointers(count: int) -> type[ctypes.Array]:
    """The type of so many addresses: ctypes makes it anew once Python has collected it."""
    return c_void_p * count


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Of each, where a kernel can read them."""
    return _pointers(len(tensors))(*map(address, tensors))


def projects_within(sweep: Sweep, threads: int, dtype: torch.dtype) -> bool:
    """Whether the loop makes the input projection itself, a few steps ahead, while it is near.

    Where each thread has as many rows as the others.
    """
    even = sweep.threads == threads and 8 * sweep.groups * sweep.largest <= 9 * sweep.batch
    return even and sweep.inputs > 0 and (dtype != torch.bfloat16 or sweep.inputs % 2 == 0)


class Fields:
    """The `Sweep` of one call, and what it points to."""

    def __init__(self, made: Kernel, rows: Rows, threads: int, units: int, width: int, reverse: bool) -> None:
        means = made.source.forward.means > 0
        weights = len(made.source.leaves) * units * width
        team = _team(rows.batch, threads, weights, means)
        if not means and _in_pairs(made.parts, rows.batch, threads, weights):
            team = 2
        order, ends, largest = rows.groups(threads // team)
        groups = len(ends) - 1
        self._kept: list[object] = [order, ends]
        self.sweep = Sweep(
            cell=made.cell, time=rows.time, batch=rows.batch, units=units, width=width, reverse=reverse,
            threads=min(threads, groups * team), groups=groups, team=team, largest=largest,
            starts=address(rows.starts), lengths=address(rows.lengths), place=address(rows.place),
            mask=address(rows.mask), reset=address(rows.reset), ids=address(rows.ids),
            order=order.data_ptr(), ends=ends.data_ptr(),
        )  # fmt: skip

    def set(self, **tensors: Tensor | None) -> None:
        """Fields that point to a tensor."""
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self.sweep, name, tensor.data_ptr())
                self._kept.append(tensor)

    def set_lists(self, **lists: Sequence[Tensor | None]) -> None:
        """Fields that point to a list of tensors; none where it is empty."""
        for name, tensors in lists.items():
            if tensors:
                pointers = addresses(tensors)
                setattr(self.sweep, name, ctypes.addressof(pointers))
                self._kept += [pointers, *tensors]

    def set_numbers(self, name: str, numbers: Sequence[int]) -> None:
        """A field that points to a list of numbers."""
        if numbers:
            held = (c_int64 * len(numbers))(*numbers)
            setattr(self.sweep, name, ctypes.addressof(held))
            self._kept.append(held)

    def keep(self, *tensors: Tensor | None) -> None:
        """Hold tensors that the sweep points to."""
        self._kept += tensors
