"""What passes between deciding and doing: Form, Problem and Plan are plain frozen values, Call holds tensors."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.cells.cell import Graph
from whorl.cells.expr import topological
from whorl.errors import InputError


@dataclass(frozen=True)
class Form:
    """A recurrent layer as it was built, whatever it is given."""

    cell: Graph
    inputs: int
    units: int
    projection: int = 0
    """Width of the first state after its projection; 0 where there is none."""
    layers: int = 1
    directions: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        read = {node.args[0] for node in topological(self.cell.outputs) if node.op == "var"}
        if self.projection and (self.cell.products or f"s.{self.cell.states[0]}" in read):
            raise InputError(
                f"projection is {self.projection}, but {self.cell.name} reads its state {self.cell.states[0]} unit by "
                "unit, and a projected state has no units: leave the projection out."
            )

    @property
    def width(self) -> int:
        """Of the output of one direction."""
        return self.projection or self.units

    def state_width(self, index: int) -> int:
        """Of the state of this index; the first is projected."""
        return self.width if index == 0 else self.units

    def layer_inputs(self, layer: int) -> int:
        return self.inputs if layer == 0 else self.width * self.directions

    def to_json(self) -> str:
        """The form as one line of text: how a layer keeps it, and how a compiled graph carries it."""
        names = ("inputs", "units", "projection", "layers", "directions", "bias")
        return json.dumps({"cell": self.cell.to_json()} | {name: getattr(self, name) for name in names})

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> "Form":
        """The form that `to_json` wrote; nothing in the text is executed."""
        data = json.loads(text)
        return Form(**data | {"cell": Graph.from_json(data["cell"])})

    def __str__(self) -> str:
        parts = [f"{self.cell.name}, {self.inputs} inputs, {self.units} units"]
        parts += [f"projection {self.projection}"] if self.projection else []
        parts += [f"{self.layers} layers"] if self.layers > 1 else []
        parts += ["both directions"] if self.directions == 2 else []
        return ", ".join(parts + ([] if self.bias else ["no bias"]))


@dataclass(frozen=True)
class Device:
    """What of the device and of torch's switches decides which engine can run, read when a call is made."""

    kind: str
    name: str
    capability: tuple[int, int] = (0, 0)
    """Of a CUDA device; (0, 0) elsewhere."""
    library: int = 0
    """Version of cuDNN on CUDA; 1 on a CPU with oneDNN; 0 where torch has none or it is switched off."""
    half: bool = False
    """oneDNN takes float16 here."""
    bfloat16: bool = False
    """oneDNN or cuDNN takes bfloat16 here."""


@dataclass(frozen=True)
class Problem:
    """Everything that decides which engine runs, and with which numbers; no tensors."""

    form: Form
    device: Device
    dtype: torch.dtype
    time: int
    batch: int
    packed: bool = False
    """Rows of all sequences in one axis, as a PackedSequence holds them."""
    initial: bool = False
    """Initial states are given."""
    dropout: bool = False
    """Layers but the last are followed by dropout."""
    gradient: bool = False
    """A backward pass may follow."""

    def __str__(self) -> str:
        rows = f"{self.time} step{'s' * (self.time != 1)}, batch {self.batch}" + (", packed" if self.packed else "")
        after = "with gradient" if self.gradient else "without gradient"
        return f"{self.form}; {rows}; {str(self.dtype).removeprefix('torch.')} on {self.device.name}, {after}"


@dataclass(frozen=True)
class Refusal:
    """Why one engine does not run a problem."""

    engine: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.engine}: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Plan:
    """Which engine runs a problem, and why none that is faster does."""

    problem: Problem
    engine: str
    asked: str = "auto"
    refusals: tuple[Refusal, ...] = ()
    """One for each engine that would have come before."""

    @cached_property
    def slow(self) -> bool:
        """Chosen by whorl, and a loop over time in Python that has something to do."""
        worth_saying = self.problem.time > 1 and self.problem.batch > 0
        return self.engine == "reference" and self.asked == "auto" and worth_saying


class Call(NamedTuple):
    """The tensors of one call, in one order: time, batch, features."""

    x: Tensor
    """[time, batch, inputs], or [rows, inputs] where `batch_sizes` is given."""
    states: tuple[Tensor, ...]
    """Initial states [layers x directions, batch, width], one for each state of the cell; or none."""
    weights: tuple[Tensor, ...]
    """For each layer and direction what `weights.kinds` lists, in its order."""
    dropout: tuple[Tensor, ...] = ()
    """For each layer but the last what its output is multiplied with; or none."""
    batch_sizes: Tensor | None = None
    """Of a PackedSequence: int64 on the CPU, the number of sequences at each step."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that a gradient can flow to, in the order that `of` takes."""
        return (self.x, *self.states, *self.weights, *self.dropout)

    @property
    def layout(self) -> tuple[int, int, int]:
        """How many of `tensors` are states, weights and dropout, after x."""
        return len(self.states), len(self.weights), len(self.dropout)

    @staticmethod
    def of(tensors: Sequence[Tensor], layout: Sequence[int], batch_sizes: Tensor | None) -> "Call":
        """The call whose `tensors`, `layout` and `batch_sizes` these are."""
        x, *rest = tensors
        states, weights = rest[: layout[0]], rest[layout[0] : layout[0] + layout[1]]
        return Call(x, tuple(states), tuple(weights), tuple(rest[layout[0] + layout[1] :]), batch_sizes)


class Outcome(NamedTuple):
    """What an engine's forward gives."""

    y: Tensor
    """[time, batch, directions x width], or [rows, directions x width]."""
    finals: tuple[Tensor, ...]
    """[layers x directions, batch, width] for each state of the cell."""
    saved: tuple[Tensor, ...] = ()
    """What its backward reads, as flat byte tensors, at most `slots` of them; none where no gradient is wanted."""


class Facts(NamedTuple):
    """What of a call decides, as plain values that hash fast: with the form, a problem before it is spelled out."""

    device: str
    ordinal: int | None
    enabled: bool
    """torch's switch of the device's native library."""
    dtype: torch.dtype
    time: int
    batch: int
    packed: bool
    initial: bool
    dropout: bool
    gradient: bool


def facts(call: Call, gradient: bool) -> Facts:
    """Reads torch's switches, and of the tensors only what they are."""
    x, states, _, dropout, sizes = call
    where, shape = x.device, x.shape
    kind = where.type
    enabled = torch.backends.cudnn.enabled if kind == "cuda" else torch._C._get_mkldnn_enabled()
    time, batch = (shape[0], shape[1]) if sizes is None else (len(sizes), int(sizes[0]))
    packed, initial, drops = sizes is not None, bool(states), bool(dropout)
    return Facts(kind, where.index, enabled, x.dtype, time, batch, packed, initial, drops, gradient)


def problem(form: str, known: Facts) -> Problem:
    """The problem that a layer (as `Form.to_json` writes it) and the facts of a call make."""
    return Problem(
        form=Form.from_json(form),
        device=_device(known.device, known.ordinal, known.enabled),
        dtype=known.dtype,
        time=known.time,
        batch=known.batch,
        packed=known.packed,
        initial=known.initial,
        dropout=known.dropout,
        gradient=known.gradient,
    )


def wants_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether a backward pass may follow a call on these."""
    if not torch.is_grad_enabled():
        return False
    return torch._C._are_functorch_transforms_active() or any(tensor.requires_grad for tensor in tensors)


def autocast_is_on(kind: str) -> bool:
    """Whether autocast is on for a kind of device; torch has none for meta, and raises where it is asked."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


@lru_cache
def _device(kind: str, index: int | None, enabled: bool) -> Device:
    if kind == "cpu":
        if not (enabled and torch.backends.mkldnn.is_available()):
            return Device("cpu", "cpu")
        ops = torch.ops.mkldnn
        return Device("cpu", "cpu", (0, 0), 1, ops._is_mkldnn_fp16_supported(), ops._is_mkldnn_bf16_supported())
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(index)
        version = (torch.backends.cudnn.version() or 0) if enabled and torch.backends.cudnn.is_available() else 0
        bfloat16 = version >= 91300 and capability >= (8, 0)
        return Device("cuda", torch.cuda.get_device_name(index), capability, version, bfloat16=bfloat16)
    return Device(kind, kind)


def slots(form: Form) -> int:
    """The most byte tensors that an engine saves: a number of the form alone, since a compiled graph fixes it."""
    return 3 * form.layers * form.directions
