"""What passes between deciding and doing: Form, Problem and Plan are plain frozen values, Call holds tensors."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _get_fp32_precision_getter as _get_fp32_precision

from whorl import compiler
from whorl.cells.cell import Graph
from whorl.cells.expr import topological
from whorl.cells.wrappers import ahead
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
    zoneout: tuple[float, ...] = ()
    """The probability that a unit keeps its value, for each state; empty where none does."""
    recurrent_dropout: float = 0.0
    recurrent_dropout_mode: str = "gate"
    """A mask of its own for each gate, "shared" by the gates, or a new one for each "step"."""
    input_dropout: float = 0.0
    memory: str = "save"
    """ "save" what backward reads, or "recompute" it."""

    def __post_init__(self) -> None:
        read = {node.args[0] for node in topological(self.cell.outputs) if node.op == "var"}
        by_unit = self.cell.products or f"s.{self.cell.states[0]}" in read
        if self.projection and by_unit and not self.cell.projection:
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

    def state_shapes(self, batch: int) -> list[tuple[int, int, int]]:
        """Of each state of all layers and directions, before the first step or after the last."""
        widths = map(self.state_width, range(len(self.cell.states)))
        return [(self.layers * self.directions, batch, width) for width in widths]

    def layer_inputs(self, layer: int) -> int:
        return self.inputs if layer == 0 else self.width * self.directions

    def to_json(self) -> str:
        """The form as one line of text: how a layer keeps it, and how a compiled graph carries it."""
        names = [item.name for item in fields(self) if item.name != "cell"]
        return json.dumps({"cell": self.cell.to_json()} | {name: getattr(self, name) for name in names})

    @staticmethod
    @lru_cache(maxsize=1024)
    def from_json(text: str) -> "Form":
        """The form that `to_json` wrote; nothing in the text is executed."""
        data = json.loads(text)
        return Form(**data | {"cell": Graph.from_json(data["cell"]), "zoneout": tuple(data["zoneout"])})

    def __str__(self) -> str:
        parts = [f"{self.cell.name}, {self.inputs} inputs, {self.units} units"]
        parts += [f"projection {self.projection}"] if self.projection else []
        parts += [f"{self.layers} layers"] if self.layers > 1 else []
        parts += ["both directions"] if self.directions == 2 else []
        parts += [] if self.bias else ["no bias"]
        mode = {"gate": "by gate", "shared": "shared by the gates", "step": "anew at each step"}
        how = mode[self.recurrent_dropout_mode]
        parts += [f"recurrent dropout {self.recurrent_dropout} {how}"] if self.recurrent_dropout else []
        parts += [f"input dropout {self.input_dropout}"] if self.input_dropout else []
        parts += [f"zoneout {' and '.join(map(str, self.zoneout))}"] if self.zoneout else []
        return ", ".join(parts + (["recomputed for backward"] if self.memory == "recompute" else []))


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
    compiler: str = ""
    """The command of the host's C++ compiler, where the device is the host."""
    tf32: bool = False
    """On CUDA: torch's switches let recurrent layers in float32 multiply in TF32; read for float32 alone."""
    multiprocessors: int = 0
    """Of a CUDA device; 0 elsewhere."""
    tf32_products: bool = False
    """On CUDA: torch's switches let products of matrices in float32 be of TF32; read for float32 alone."""


# What a call may have beside x, initial states and dropout between layers, and how a reason names it.
EXTRAS = {
    "lengths": "lengths",
    "mask": "a mask",
    "reset": "resets",
    "reset_to": "states that resets give",
    "inputs": "extra inputs of the cell",
    "drawn": "masks drawn at random",
    "dropout_masks": "given masks of dropout or zoneout",
    "return_states": "the states of every step",
}


VIRTUAL = "the tensors are fake, traced (make_fx) or of a class with a dispatch of its own, these kernels read memory"
"""The reason of an engine that is no code of torch's against a `Problem.virtual`."""


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
    extras: tuple[str, ...] = ()
    """What else the call has, by the names of `EXTRAS`."""
    gradient: bool = False
    """A backward pass may follow."""
    constants: tuple[str, ...] = ()
    """What of the call needs no gradient where others do, by the names of its fields: x, dropout, noise."""
    virtual: bool = False
    """Python stands between the tensors and memory: see `is_virtual`."""
    outputs: bool = True
    """The output of every step is wanted; where it is not, an engine that keeps it for no backward may leave it out."""

    @property
    def sequences(self) -> bool:
        """Every state of every step is wanted."""
        return "return_states" in self.extras

    @property
    def tf32(self) -> bool:
        """Products are in TF32: what is multiplied has 10 bits of mantissa, what is added and kept is float32."""
        return self.dtype == torch.float32 and self.device.tf32

    @property
    def precision(self) -> str:
        """The dtype, and what is less precise in it, in the words of a reason."""
        return str(self.dtype).removeprefix("torch.") + " with TF32 products" * self.tf32

    @property
    def additions(self) -> list[str]:
        """What it has beyond a plain cell and call, in the words of a reason."""
        form, drawn = self.form, "drawn" in self.extras
        noisy = {"recurrent dropout": form.recurrent_dropout, "input dropout": form.input_dropout}
        options = [name for name, probability in noisy.items() if drawn and probability]
        options += ["zoneout"] if form.zoneout else []
        return options + [words for name, words in EXTRAS.items() if name in self.extras and name != "drawn"]

    def __str__(self) -> str:
        rows = f"{self.time} step{'s' * (self.time != 1)}, batch {self.batch}" + (", packed" if self.packed else "")
        rows += "".join(f", {EXTRAS[name]}" for name in self.extras)
        after = "with gradient" if self.gradient else "without gradient"
        return f"{self.form}; {rows}; {self.precision} on {self.device.name}, {after}"


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

    @cached_property
    def saving_nothing(self) -> "Plan":
        """The plan of the same forward pass with no backward to come; one object, for which engines make ready once."""
        return replace(self, problem=replace(self.problem, gradient=False, outputs=True))


class Marks(NamedTuple):
    """What says of each step and sequence how it is to be treated; no gradient flows to it."""

    batch_sizes: Tensor | None = None
    """Of a PackedSequence: int64 on the CPU, the number of sequences at each step."""
    rows: Tensor | None = None
    """Of a PackedSequence: int64 [batch], the place each sequence had before it was sorted; None where it stayed."""
    lengths: Tensor | None = None
    """int64 [batch], from 0 to time."""
    mask: Tensor | None = None
    """bool [time, batch]: the step counts."""
    reset: Tensor | None = None
    """bool [time, batch], or [rows] of a PackedSequence: no state passes from the step before to this one."""
    seed: Tensor | None = None
    """int64 of no axes: what `noise` draws from; None where nothing is drawn."""


PLAIN = Marks()


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
    reset_to: tuple[Tensor, ...] = ()
    """The states that a reset gives, as `states`; zero where there are none."""
    inputs: tuple[Tensor, ...] = ()
    """The cell's extra inputs, [time, batch, units or 1] (or [rows, ...]) each, read by every layer and direction."""
    noise: tuple[Tensor, ...] = ()
    """Masks that are given instead of drawn, for each layer and direction as `noise.Given` orders them; or none."""
    marks: Marks = PLAIN

    @property
    def batch_sizes(self) -> Tensor | None:
        return self.marks.batch_sizes

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that a gradient can flow to, in the order that `of` takes."""
        return (
            self.x, *self.states, *self.weights, *self.dropout, *self.reset_to, *self.inputs, *self.noise,
        )  # fmt: skip

    @property
    def layout(self) -> tuple[int, ...]:
        """How many of `tensors` belong to each field after x."""
        return tuple([len(part) for part in self[1:7]])

    @staticmethod
    def of(tensors: Sequence[Tensor], layout: Sequence[int], marks: Sequence[Tensor | None]) -> "Call":
        """The call whose `tensors`, `layout` and `marks` these are."""
        parts, first = [], 1
        for count in layout:
            parts.append(tuple(tensors[first : first + count]) if count else ())
            first += count
        return Call(tensors[0], *parts, marks=Marks(*marks))  # type: ignore[misc, arg-type]


class Outcome(NamedTuple):
    """What an engine's forward gives."""

    y: Tensor
    """[time, batch, directions x width], or [rows, directions x width]; of no steps where it is left out."""
    finals: tuple[Tensor, ...]
    """[layers x directions, batch, width] for each state of the cell."""
    saved: tuple[Tensor, ...] = ()
    """What its backward reads, as flat byte tensors, at most `slots` of them; none where no gradient is wanted."""
    sequences: tuple[Tensor, ...] = ()
    """Where they are wanted, for each state [time, batch, directions x width] (or [rows, ...]) of the last layer."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What the one who called gets."""
        return (self.y, *self.finals, *self.sequences)


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
    extras: tuple[str, ...]
    gradient: bool
    tf32: bool = False
    """torch's switch of TF32 in recurrent layers, where the dtype is float32 on CUDA."""
    constants: tuple[str, ...] = ()
    virtual: bool = False
    outputs: bool = True
    tf32_products: bool = False
    """torch's switch of TF32 in products of matrices, where the dtype is float32 on CUDA."""


def facts(
    call: Call, gradient: bool, sequences: bool = False, constants: tuple[str, ...] = (), outputs: bool = True
) -> Facts:
    """Reads torch's switches, and of the tensors only what they are."""
    x, marks = call.x, call.marks
    kind, where, shape, sizes = kind_of(x), x.device, x.shape, marks.batch_sizes
    time, batch = (shape[0], shape[1]) if sizes is None else (len(sizes), int(sizes[0]))
    plain = marks is PLAIN and not (call.inputs or call.noise or sequences)
    extras = () if plain else _extras(call, sequences)
    packed, initial, drops = sizes is not None, bool(call.states), bool(call.dropout)
    dtype = x.dtype
    enabled, tf32, tf32_products = switches(kind, dtype)
    virtual = is_virtual(call.tensors)
    if virtual:  # make_fx may follow sizes, which a plan takes as they are
        time, batch = int(time), int(batch)
    return Facts(
        kind, where.index, enabled, dtype, time, batch, packed, initial, drops, extras, gradient, tf32, constants,
        virtual, outputs, tf32_products,
    )  # fmt: skip


def switches(kind: str, dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """torch's own, of a kind of device: whether its native library is on, and TF32 in recurrent layers of a dtype and
    in products of matrices.
    """
    enabled = torch._C._get_cudnn_enabled() if kind == "cuda" else torch._C._get_mkldnn_enabled()
    # What torch's own recurrent layers ask: torch.backends.cudnn.allow_tf32 sets it, cudnn.rnn.fp32_precision is it.
    if dtype is not torch.float32 or kind != "cuda":
        return enabled, False, False
    return enabled, _get_fp32_precision("cuda", "rnn") == "tf32", _get_fp32_precision("cuda", "matmul") == "tf32"


def _extras(call: Call, sequences: bool) -> tuple[str, ...]:
    marks = call.marks
    has = {
        "lengths": marks.lengths is not None,
        "mask": marks.mask is not None,
        "reset": marks.reset is not None,
        "reset_to": bool(call.reset_to),
        "inputs": bool(call.inputs),
        "drawn": marks.seed is not None,
        "dropout_masks": bool(call.noise),
        "return_states": sequences,
    }
    return tuple(name for name in EXTRAS if has[name])


def problem(form: str, known: Facts) -> Problem:
    """The problem that a layer (as `Form.to_json` writes it) and the facts of a call make."""
    return Problem(
        form=Form.from_json(form),
        device=_device(known.device, known.ordinal, known.enabled, known.tf32, known.tf32_products),
        dtype=known.dtype,
        time=known.time,
        batch=known.batch,
        packed=known.packed,
        initial=known.initial,
        dropout=known.dropout,
        extras=known.extras,
        gradient=known.gradient,
        constants=known.constants,
        virtual=known.virtual,
        outputs=known.outputs,
    )


def misfit(sizes: Tensor, rows: int) -> str | None:
    """What is wrong with the batch sizes of a PackedSequence of so many rows: kernels would read and write beside them.

    None where nothing is, or where they cannot be read: in a graph that is traced.
    """
    if torch.compiler.is_compiling() or is_virtual((sizes,)):
        return None
    if sizes.dtype != torch.int64 or sizes.dim() != 1:
        return f"the batch sizes of x are {sizes.dtype} with {sizes.dim()} axes: they must be int64 [time]."
    steps = sizes.tolist()
    if min(steps, default=0) < 0 or sum(steps) != rows or steps != sorted(steps, reverse=True):
        return (
            f"the batch sizes of x are {_some(steps)}, of {sum(steps)} rows, and its data has {rows}: they must be the "
            "sequences at each step, never more than at the step before: pack x with torch.nn.utils.rnn.pack_sequence."
        )
    return None


def _some(numbers: list[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', ...' * (len(numbers) > 8)}]"


def wants_gradient(tensors: Iterable[Tensor]) -> bool:
    """Whether a backward pass may follow a call on these."""
    if not torch.is_grad_enabled():
        return False
    return torch._C._are_functorch_transforms_active() or _any_wants(tensors)


def constants(call: Call) -> tuple[str, ...]:
    """What of a call needs no gradient, as `Problem.constants` names it; under torch.func that cannot be read."""
    if torch._C._are_functorch_transforms_active():
        return ()
    x: tuple[str, ...] = () if call.x.requires_grad else ("x",)
    if not (call.dropout or call.noise):
        return x
    parts = {"dropout": call.dropout, "noise": call.noise}
    return (*x, *(name for name, part in parts.items() if part and not _any_wants(part)))


def is_virtual(tensors: Iterable[Tensor]) -> bool:
    """Whether Python stands between these and memory, so that what a kernel reads and writes there is lost.

    Tensors are fake or traced (FakeTensorMode, make_fx), or of a class that dispatches for itself, such as DTensor.
    """
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(key) for key in _TRACING):
        return True
    kinds: set[Any] = set(map(type, tensors))
    if kinds <= _ORDINARY:
        return False
    return any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in kinds)


def as_written(tensors: Sequence[Any]) -> Sequence[Any]:
    """These, and None where there is none, each with its numbers in its memory.

    Torch negates some by a mark alone, such as the imaginary part of a conjugate, and to zeros that it makes for
    derivatives it gives no memory: what a kernel reads there would be of the wrong sign, or at address 0.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    if not any(map(_IS_NEGATED, there)) and not any(map(_IS_ZERO, there)):
        return tensors
    return [None if tensor is None else _written(tensor) for tensor in tensors]


def _written(tensor: Tensor) -> Tensor:
    return (tensor.clone() if tensor._is_zerotensor() else tensor).resolve_neg()


_IS_NEGATED, _IS_ZERO = Tensor.is_neg, Tensor._is_zerotensor
_KEYS = torch._C._TorchDispatchModeKey
_TRACING = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)
_ORDINARY = {Tensor, torch.nn.Parameter}


def _any_wants(tensors: Iterable[Tensor]) -> bool:
    return any(map(_REQUIRES, tensors))  # most often the first or the second does; a generator takes longer


_REQUIRES = attrgetter("requires_grad")


def kind_of(tensor: Tensor) -> str:
    """Of its device: "cuda", "cpu", ...; torch writes the text of `device.type` anew, 5 us with cold caches."""
    if tensor.is_cuda:
        return "cuda"
    return "cpu" if tensor.is_cpu else tensor.device.type


def autocast_is_on(kind: str) -> bool:
    """Whether autocast is on for a kind of device; torch has none for meta, and raises where it is asked."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


@lru_cache
def _device(kind: str, index: int | None, enabled: bool, tf32: bool, tf32_products: bool) -> Device:
    if kind == "cpu":
        if not (enabled and torch.backends.mkldnn.is_available()):
            return Device("cpu", "cpu", compiler=compiler.found())
        ops = torch.ops.mkldnn
        half, bfloat16 = ops._is_mkldnn_fp16_supported(), ops._is_mkldnn_bf16_supported()
        return Device("cpu", "cpu", (0, 0), 1, half, bfloat16, compiler.found())
    if kind == "cuda":
        capability = torch.cuda.get_device_capability(index)
        version = (torch.backends.cudnn.version() or 0) if enabled and torch.backends.cudnn.is_available() else 0
        bfloat16 = version >= 91300 and capability >= (8, 0)
        count = torch.cuda.get_device_properties(index).multi_processor_count
        name = torch.cuda.get_device_name(index)
        return Device(
            "cuda", name, capability, version, bfloat16=bfloat16, tf32=tf32, multiprocessors=count,
            tf32_products=tf32_products,
        )  # fmt: skip
    return Device(kind, kind)


def slots(form: Form) -> int:
    """The most byte tensors that an engine saves: a number of the form alone, since a compiled graph fixes it."""
    normed = 3 * form.directions * (ahead(form.cell) is not None)
    return form.layers * (3 * (form.directions + bool(form.projection)) + normed)
