"""All steps of one layer and direction through the kernels of `stepwise.cu`, and the CUDA graphs of these steps.

A graph holds the launches of a few steps over a workspace of its own.  Everything that differs from call to call lies
in the kernels' arguments, which a call writes into the workspace before it replays the graph as often as it has steps.
A graph is kept for each stream, so calls on one stream follow each other in it and calls on two never meet.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.cells.cell import Graph
from whorl.engines.cuda import store
from whorl.engines.cuda.launch import Kernel, loaded
from whorl.engines.cuda.stepwise_source import CHUNK, Source, source, threads
from whorl.engines.cuda.tiling import Chip
from whorl.problem import switches

OPTIONS = ("--device-as-default-execution-space",)
STEPS = 8
"""Of a graph: enough to hide the launch of the next."""
_MOST_WORKSPACES = 64


class Sizes(NamedTuple):
    """What decides a workspace and the launches of a step."""

    batch: int
    units: int
    width: int
    projected: bool
    by_gate: bool
    """Each gate's product has an operand of its own."""

    @property
    def larger(self) -> int:
        return max(self.units, self.width)


class Kernels(NamedTuple):
    """The kernels of a cell and dtype on a device."""

    source: Source
    cell: Graph
    dtype: torch.dtype
    device: torch.device
    get: Callable[[str, int], Kernel]
    """A kernel by its part and the threads of its blocks."""


@lru_cache(maxsize=256)
def kernels(cell: Graph, dtype: torch.dtype, device: torch.device) -> Kernels:
    """The kernels of a cell, compiled at their first use on this machine."""
    made, index = source(cell, dtype), device.index
    capability = torch.cuda.get_device_capability(device)

    def get(part: str, size: int) -> Kernel:
        def make() -> Kernel:
            code = compiled(made, capability)
            layout = f"{_layout(cell, made)}Q" if part == "start" else "Qq"
            return Kernel(code, made.names[part], index, size, 0, 1, layout)

        return loaded(("stepwise", cell, dtype, part, size, index), make)

    return Kernels(made, cell, dtype, device, get)


def compiled(made: Source, capability: tuple[int, int]) -> bytes:
    """The machine code, from the store or compiled; needs no GPU."""
    architecture = Chip(capability, 1).architecture
    return store.kernel(made.text, made.names["start"], architecture, OPTIONS)


def matrix_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a b into `out`, whose dtype is that of sums."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    return torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


_LONGEST, _LONGEST_LARGE, _LARGE = 512, 2048, 1 << 23
"""Rows of one sum in float32; more of a result of so many elements, which is read and written again for each such sum:
a train step with two of 6,400 rows and 8,192 x 2,048 took 30.2 ms with sums of 512, and 29.1 of 2,048 (H200)."""


def sum_of_rows(a: Tensor, b: Tensor) -> Tensor:
    """a' b; in float32 as a sum of sums of some rows each.

    cuBLAS adds one row after another where the result is large.  Over 4,370 rows, 190 steps of 23 sequences, that
    lost 1.1e-6 of a gradient, where a loop that adds up steps loses 0.2e-6.
    """
    if a.dtype != torch.float32:
        return torch.mm(a.t(), b)
    longest = _LONGEST_LARGE if a.shape[1] * b.shape[1] >= _LARGE else _LONGEST
    parts = zip(a.split(longest), b.split(longest), strict=True)
    first, other = next(parts)
    total = torch.mm(first.t(), other)
    for first, other in parts:
        total.addmm_(first.t(), other)
    return total


# --- arguments --------------------------------------------------------------------------------------------------------

_NUMBERS = "base time batch units width reverse projected by_gate keeps"
_CALL = "starts lengths mask reset ids seed noise_kind keep_plain noise noise_below noise_scale noise_tag zoneout_tag"
_WORKSPACE = "entering r scratch made given second narrow held means to_r through"


@lru_cache(maxsize=256)
def _fields(cell: Graph, products: int) -> tuple[tuple[str, int], ...]:
    """Name and count of every field of `Arguments`, in order; zoneout's are six for each state."""
    states, one = len(cell.states), 1
    vectors, extras, dp = max(1, len(cell.vectors)), max(1, len(cell.inputs)), max(1, products)
    rest = [
        ("zoneout", 6 * states), ("x", one), ("bias_hh", one), ("vectors", vectors), ("extras", extras),
        ("states", states), ("reset_to", states), ("y", one), ("y_stride", one), ("sequences", states),
        ("sequence_strides", states), ("entered", one), ("unprojected", one), ("saved", one), ("operands", dp),
        ("dy", one), ("dy_stride", one), ("dsequences", states), ("dsequence_strides", states), ("dstates", states),
        ("dreset", states), ("dx", one), ("dr", one), ("dp", dp), ("dv", vectors), ("de", extras),
        ("dprojected", one),
    ]  # fmt: skip
    single = [(name, one) for name in (*_NUMBERS.split(), *_CALL.split())]
    return (*single, *rest, *((name, one) for name in _WORKSPACE.split()))


def _layout(cell: Graph, made: Source) -> str:
    """The fields as `struct` writes them: eight bytes each."""
    codes = ""
    for name, count in _fields(cell, len(made.segments.products)):
        if name == "noise_scale":
            codes += "d"
        else:
            codes += "qdQQQQ" * (count // 6) if name == "zoneout" else "Q" * count
    return codes


def _packed(cell: Graph, made: Source, fields: Mapping[str, object]) -> list[int | float]:
    """A value for each field; zero for what is not given."""
    values: list[int | float] = []
    for name, count in _fields(cell, len(made.segments.products)):
        given = fields.get(name, ())
        row = list(given) if isinstance(given, Sequence) else [given]
        assert len(row) <= count, f"{name} has {len(row)} values, the kernels take {count}"
        values += [_number(value) for value in row] + [0] * (count - len(row))
    return values


def _number(value: object) -> int | float:
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return value.data_ptr()
    assert isinstance(value, int | float)
    return value if isinstance(value, float) else int(value)


# --- a workspace ------------------------------------------------------------------------------------------------------


class _Workspace:
    """One step of all rows, and how it is launched.

    Args:
        way: "forward" or "backward".
        hh, hr: the recurrent weights and those of the projection, read at each launch.
    """

    def __init__(self, own: Kernels, way: str, sizes: Sizes, hh: Tensor | None, hr: Tensor | None) -> None:
        self.lock = Lock()
        self._own, self._way, self._sizes, self.hh, self.hr = own, way, sizes, hh, hr
        segments = own.source.segments
        self._pass = segments.forward if way == "forward" else segments.backward
        self._leaves = [gate for gate, leaf in enumerate(segments.leaves) if leaf]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm = False  # cuBLAS has loaded what it needs, which it cannot within a capture
        self._stream = 0
        batch, units, width, larger = sizes.batch, sizes.units, sizes.width, sizes.larger
        gates, states = len(own.cell.recurrent), len(own.cell.states)
        wide = torch.float64 if own.dtype == torch.float64 else torch.float32
        copies = gates if sizes.by_gate else 1
        links = max(1, len(self._pass.links))

        def room(*shape: int, dtype: torch.dtype = wide) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=own.device)

        self._rooms = {
            "entering": room(copies, batch, width, dtype=own.dtype), "r": room(batch * gates * units),
            "scratch": room(self._pass.slots, batch, units), "made": room(states, batch, larger),
            "given": room(states, batch, larger), "second": room(links, batch * larger, dtype=own.dtype),
            "narrow": room(batch * larger), "held": room(batch, width), "means": room(batch, max(1, self._pass.means)),
            "to_r": room(batch * gates * units, dtype=own.dtype), "through": room(copies, batch, width),
        }  # fmt: skip
        self._arguments = room(len(_packed(own.cell, own.source, {})), dtype=torch.int64)
        self._parts: dict[str, Kernel] = {}

    def run(self, stream: int, time: int, fields: Mapping[str, object], graphs: bool = False) -> None:
        """All steps of a call.

        Args:
            stream: torch's current one.
            graphs: replay graphs, where there are steps enough for one.
        """
        own, sizes = self._own, self._sizes
        numbers = {name: getattr(sizes, name) for name in ("batch", "units", "width", "projected", "by_gate")}
        self._rooms["held"].zero_()
        self._stream = stream
        values = _packed(own.cell, own.source, {**fields, **numbers, **self._rooms})
        self._kernel("start", 256)(self._stream, 1, 1, *values, self._arguments.data_ptr())
        if self._way == "forward":
            self._launch("enter")
        if graphs and self._warm and time >= STEPS:
            for steps in [STEPS] * (time // STEPS) + [1] * (time % STEPS):
                self._graph(steps).replay()
        else:
            for offset in range(time):
                self._step(offset)
            self._warm = self._warm or time > 0
        if self._way == "backward":
            self._launch("finish")

    def _graph(self, steps: int) -> torch.cuda.CUDAGraph:
        """The graph of some steps and of their counting, captured at its first use."""
        found = self._graphs.get(steps)
        if found is None:
            for part in ("advance", *self._pieces()):
                self._kernel(part, self._threads(part))
            found = torch.cuda.CUDAGraph()
            stream, before = torch.cuda.Stream(self._own.device), self._stream
            with torch.cuda.stream(stream):
                found.capture_begin(capture_error_mode="thread_local")
                try:
                    self._stream = stream.cuda_stream
                    for offset in range(steps):
                        self._step(offset)
                    self._kernel("advance", 1)(self._stream, 1, 1, self._arguments.data_ptr(), steps)
                finally:
                    self._stream = before
                    found.capture_end()
            self._graphs[steps] = found
        return found

    def _pieces(self) -> list[str]:
        ends = {"forward": "commit", "backward": "begin"}
        names = [f"{self._way}_{index}" for index in range(self._pass.segments)]
        return names + [ends[self._way]] * self._sizes.projected

    def _step(self, offset: int) -> None:
        if self._way == "forward":
            self._forward(offset)
        else:
            self._backward(offset)

    def _forward(self, offset: int) -> None:
        rooms, sizes = self._rooms, self._sizes
        if self._leaves:
            assert self.hh is not None
            if sizes.by_gate:
                parts = self._by_gate(rooms["r"], sizes.units)
                for gate in self._leaves:
                    matrix_product(rooms["entering"][gate], self._gate(gate).t(), parts[gate])
            else:
                matrix_product(rooms["entering"][0], self.hh.t(), rooms["r"].view(sizes.batch, -1))
        for segment in range(self._pass.segments):
            self._launch(f"forward_{segment}", offset)
            self._link(segment, transposed=True)
        if self.hr is not None:
            operand = rooms["second"][0][: sizes.batch * sizes.units].view(sizes.batch, -1)
            matrix_product(operand, self.hr.t(), rooms["narrow"][: sizes.batch * sizes.width].view(sizes.batch, -1))
            self._launch("commit", offset)

    def _backward(self, offset: int) -> None:
        rooms, sizes = self._rooms, self._sizes
        if self.hr is not None:
            self._launch("begin", offset)
            operand = rooms["second"][0][: sizes.batch * sizes.width].view(sizes.batch, -1)
            matrix_product(operand, self.hr, rooms["narrow"][: sizes.batch * sizes.units].view(sizes.batch, -1))
        for segment in range(self._pass.segments):
            self._launch(f"backward_{segment}", offset)
            self._link(segment, transposed=False)
        if self._leaves:
            assert self.hh is not None
            if sizes.by_gate:
                parts = self._by_gate(rooms["to_r"], sizes.units)
                for gate in self._leaves:
                    matrix_product(parts[gate], self._gate(gate), rooms["through"][gate])
            else:
                matrix_product(rooms["to_r"].view(sizes.batch, -1), self.hh, rooms["through"][0])

    def _link(self, segment: int, transposed: bool) -> None:
        """The products of the cell's own step after a segment."""
        rooms, sizes = self._rooms, self._sizes
        links = [link for link in self._pass.links if link.segment == segment]
        for place, link in enumerate(links):
            # operands lie one after the other, [batch, units] each, as the kernels write them
            first = place * sizes.batch * sizes.units
            operand = rooms["second"].view(-1)[first : first + sizes.batch * sizes.units].view(sizes.batch, -1)
            weight = self._gate(link.gate)
            matrix_product(operand, weight.t() if transposed else weight, rooms["scratch"][link.result])

    def _gate(self, gate: int) -> Tensor:
        assert self.hh is not None
        return self.hh[gate * self._sizes.units : (gate + 1) * self._sizes.units]

    def _by_gate(self, tensor: Tensor, width: int) -> Tensor:
        return tensor.view(-1, self._sizes.batch, width)

    def _threads(self, part: str) -> int:
        if part == "advance":
            return 1
        return threads(part.startswith(self._way) and self._pass.means > 0, self._sizes.larger)

    def _kernel(self, part: str, size: int) -> Kernel:
        if part not in self._parts:
            self._parts[part] = self._own.get(part, size)
        return self._parts[part]

    def _launch(self, part: str, offset: int = 0) -> None:
        size = self._threads(part)
        whole = part.startswith(self._way) and self._pass.means > 0
        chunks = 1 if whole else -(-self._sizes.larger // CHUNK)
        self._kernel(part, size)(self._stream, self._sizes.batch, chunks, self._arguments.data_ptr(), offset)


_workspaces: OrderedDict[object, _Workspace] = OrderedDict()
_choosing = Lock()


def sweep(
    own: Kernels, way: str, sizes: Sizes, time: int, fields: Mapping[str, object], hh: Tensor | None, hr: Tensor | None
) -> None:
    """All steps of one layer and direction.

    Args:
        way: "forward" or "backward".
        fields: the kernels' arguments by name; tensors stand for their addresses.
    """
    stream = torch._C._cuda_getCurrentRawStream(own.device.index)
    if torch.cuda.is_current_stream_capturing():  # the graph that is being captured is not to share memory with others
        _Workspace(own, way, sizes, hh, hr).run(stream, time, fields)
        return
    # what torch's switches say is captured with the products
    key = (own.cell, own.dtype, own.device, way, sizes, stream, switches("cuda", own.dtype))
    with _choosing:
        found = _workspaces.get(key)
        if found is None:
            own_hh, own_hr = (None if weight is None else torch.empty_like(weight) for weight in (hh, hr))
            found = _workspaces[key] = _Workspace(own, way, sizes, own_hh, own_hr)
        _workspaces.move_to_end(key)
        if len(_workspaces) > _MOST_WORKSPACES:
            _workspaces.popitem(last=False)
    with found.lock:
        for to, weight in ((found.hh, hh), (found.hr, hr)):
            if to is not None and weight is not None:
                to.copy_(weight)
        found.run(stream, time, fields, graphs=True)
