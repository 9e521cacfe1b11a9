"""Layers and calls of engine `persistent` with options drawn at random, and how they compare with `reference`."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

import whorl
from comparison import broken, error, flat
from whorl.bench.baseline import TF32_EPS, to_tf32
from whorl.engines.cuda.persistent import fits, most_units
from whorl.problem import Device

States = dict[str, Any]


@whorl.cell(gates="i f g o", states="h c", inputs="dt")
def timed_lstm(x: Any, r: Any, s: Any) -> States:
    """An LSTM whose cell decays with the time since the step before."""
    i, f, o = whorl.sigmoid(x.i + r.i), whorl.sigmoid(x.f + r.f), whorl.sigmoid(x.o + r.o)
    c = f * s.c * whorl.exp(-0.1 * x.dt * x.dt) + i * whorl.tanh(x.g + r.g)
    return dict(h=o * whorl.tanh(c), c=c)


@whorl.cell(gates="a b k", states="h c n", vectors={"w": 0.5}, inputs="d q", x_only="k")
def three_states(x: Any, r: Any, s: Any, v: Any) -> States:
    """One gate as a sum, one whose x and r are apart, one without r; a vector, two extra inputs, three states."""
    c = whorl.sigmoid(x.a + r.a) * s.c + v.w * whorl.tanh(x.b * r.b + x.d)
    n = 0.9 * s.n + 0.1 * s.h * whorl.sigmoid(x.k + x.q)
    return dict(h=whorl.tanh(c) * whorl.sigmoid(x.k) + 0.2 * whorl.tanh(n), c=c, n=n)


CELLS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "timed_lstm": (timed_lstm, ("dt",)),
    "three_states": (three_states, ("d", "q")),
}
STATES = {"LSTM": "hc", "GRU": "h", "RNN": "h", "timed_lstm": "hc", "three_states": "hcn"}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1, "timed_lstm": 4, "three_states": 2}
OPTIONS = (
    "lengths", "mask", "reset", "reset_to", "packed", "gate", "shared", "step", "zoneout", "input_dropout", "given",
    "states", "dropout", "eval", "initial", "recompute", "cell",
)  # fmt: skip


@dataclass
class Drawn:
    """A layer and a call.

    Args:
        on: which of OPTIONS it has.
    """

    kind: str
    on: frozenset[str]
    units: int
    batch: int
    time: int
    layers: int = 1
    directions: int = 1
    inputs: int = 5
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = f"{self.layers}x{self.directions} layers, {self.units} units, batch {self.batch}, time {self.time}"
        words = [*sorted(self.on), *(f"{name}={value}" for name, value in self.arguments.items())]
        return f"{self.kind} seed {self.seed}: {sizes}, {', '.join(words) or 'plain'}"

    def layer(self, device: str, dtype: torch.dtype) -> torch.nn.Module:
        torch.manual_seed(self.seed)
        draw = random.Random(self.seed)
        made: dict[str, Any] = dict(num_layers=self.layers, bidirectional=self.directions == 2)
        for mode in ("gate", "shared", "step"):
            if mode in self.on:
                made |= dict(recurrent_dropout=0.4, recurrent_dropout_mode=mode)
        if "zoneout" in self.on:
            made["zoneout"] = draw.choice([0.3, {"h": 0.4}])
        if "input_dropout" in self.on:
            made["input_dropout"] = 0.3
        if "dropout" in self.on and self.layers > 1:
            made["dropout"] = 0.25
        if "recompute" in self.on:
            made["memory"] = "recompute"
        if "cell" in self.on:
            made |= _cell_options(self.kind, draw)
        made |= self.arguments
        cell = (CELLS[self.kind][0],) if self.kind in CELLS else ()
        layer = getattr(whorl, "Recurrent" if cell else self.kind)(*cell, self.inputs, self.units, **made)
        with torch.no_grad():
            for name, weight in layer.named_parameters():
                scale = 0.6 / max(1.0, self.units / 24) ** 0.5
                if name.startswith("weight_hr"):  # with which the recurrent weights amplify as they do alone
                    scale = self.units**-0.5
                weight.copy_((torch.randn(weight.shape) * scale).to(dtype))
        return layer.train("eval" not in self.on).to(device)

    def call(self, device: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What gradients flow to, and marks; values that `dtype` can hold."""
        draw = torch.Generator().manual_seed(self.seed)
        time, batch, units, count = self.time, self.batch, self.units, self.layers * self.directions
        width = self.arguments.get("proj_size", units)  # of h

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(dtype).double().to(device)

        tensors = {"x": normal(time, batch, self.inputs)}
        for name in ("initial", "reset_to"):
            if name in self.on:
                widths = {state: width if state == "h" else units for state in STATES[self.kind]}
                tensors |= {f"{name} {state}": normal(count, batch, wide) for state, wide in widths.items()}
        if self.kind in CELLS:
            widths = {name: units if place == 0 else 1 for place, name in enumerate(CELLS[self.kind][1])}
            tensors |= {f"inputs {name}": normal(time, batch, width) for name, width in widths.items()}
        if "given" in self.on:
            lead = [time] if "step" in self.on else [GATES[self.kind] - self._coupled()] if "gate" in self.on else []
            for index in range(count):
                below = self.inputs if index < self.directions else width * self.directions
                if {"gate", "shared", "step"} & self.on:
                    tensors[f"recurrent_dropout {index}"] = normal(*lead, batch, width)
                if "input_dropout" in self.on:
                    by_gate = [len(self._gates())] if self.seed % 2 else []
                    tensors[f"input_dropout {index}"] = normal(*by_gate, batch, below)
                if "zoneout" in self.on:
                    tensors[f"zoneout_h {index}"] = normal(time, batch, width).sigmoid().to(dtype).double()
        marks: dict[str, Any] = {}
        lengths = torch.randint(0 if "packed" not in self.on else 1, time + 1, (batch,), generator=draw)
        if "packed" in self.on:
            lengths[batch // 2] = time
            marks["packed"] = lengths.tolist()
        elif "lengths" in self.on:
            marks["lengths"] = lengths.to(device)
        if "mask" in self.on and "packed" not in self.on:
            marks["mask"] = (torch.rand(time, batch, generator=draw) < 0.7).to(device)
        if "reset" in self.on or "reset_to" in self.on:
            marks["reset"] = (torch.rand(time, batch, generator=draw) < 0.3).to(device)
        ignored = torch.zeros(time, batch, 1, dtype=torch.bool, device=device)
        if "lengths" in marks:
            ignored |= (torch.arange(time, device=device)[:, None] >= marks["lengths"]).unsqueeze(-1)
        if "mask" in marks:
            ignored |= ~marks["mask"].unsqueeze(-1)
        for name, tensor in tensors.items():  # nothing of a step that does not count may be seen
            if self._by_step(name):
                tensors[name] = tensor.masked_fill(ignored, torch.nan)
        return tensors, marks

    def _by_step(self, name: str) -> bool:
        """Whether a tensor has a value for each step."""
        kind = name.split()[0]
        return kind in ("x", "inputs", "zoneout_h") or (kind == "recurrent_dropout" and "step" in self.on)

    def _coupled(self) -> bool:
        """Whether it is an LSTM without a forget gate."""
        with torch.random.fork_rng([]):
            return self.kind == "LSTM" and self.layer("cpu", torch.float32).coupled

    def _gates(self) -> str:
        return {
            "LSTM": "igo" if self._coupled() else "ifgo",
            "GRU": "rzn",
            "RNN": "n",
            "timed_lstm": "ifgo",
            "three_states": "abk",
        }[self.kind]

    def as_called(
        self, tensors: Mapping[str, Tensor], marks: Mapping[str, Any]
    ) -> tuple[tuple[Any, Any], dict[str, Any]]:
        """How the layer is called with such tensors: by place, and by name."""

        def named(prefix: str) -> list[Tensor]:
            return [leaf for name, leaf in tensors.items() if name.split()[0] == prefix]

        def packed(value: Tensor) -> Any:
            if "packed" not in marks:
                return value
            return pack_padded_sequence(value, marks["packed"], enforce_sorted=False)

        def states(prefix: str) -> Any:
            found = named(prefix)
            return None if not found else tuple(found) if len(found) > 1 else found[0]

        options: dict[str, Any] = {key: marks[key] for key in ("lengths", "mask") if key in marks}
        if "reset" in marks:
            options["reset"] = packed(marks["reset"])
        if "reset_to" in self.on:
            options["reset_to"] = states("reset_to")
        if self.kind in CELLS:
            options["inputs"] = {name: packed(tensors[f"inputs {name}"]) for name in CELLS[self.kind][1]}
        masks = {name: named(name) for name in ("recurrent_dropout", "input_dropout", "zoneout_h") if named(name)}
        if "packed" in marks:
            masks = {
                name: [packed(mask) if self._by_step(name) else mask for mask in row] for name, row in masks.items()
            }
        if masks:
            options["dropout_masks"] = masks
        if "states" in self.on:
            options["return_states"] = True
        return (packed(tensors["x"]), states("initial")), options

    def within(self, device: Device, dtype: torch.dtype) -> "Drawn":
        """The same with no more units than engine `persistent` holds on a device."""
        layer = self.layer("cpu", dtype)
        layer.engine = "reference"
        tensors, marks = self.call("cpu", dtype)
        args, options = self.as_called({name: tensor.to(dtype) for name, tensor in tensors.items()}, marks)
        problem = replace(layer.to(dtype).plan(*args, **options).problem, device=device)
        return self if fits(problem) else replace(self, units=most_units(problem))

    def results(
        self, layer: torch.nn.Module, tensors: dict[str, Tensor], marks: dict[str, Any], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Outputs, states and every gradient."""
        layer = layer.to(dtype)
        leaves = {name: tensor.to(dtype).detach().requires_grad_() for name, tensor in tensors.items()}
        args, options = self.as_called(leaves, marks)
        torch.manual_seed(self.seed + 1)
        found = layer(*args, **options)
        outputs = flat([*found[:2], *(list(found[2].values()) if len(found) > 2 else [])])
        wanted = leaves | dict(layer.named_parameters())
        grads = torch.autograd.grad(_weighted(outputs), list(wanted.values()), allow_unused=True)
        named_grads = zip(wanted, grads, strict=True)
        result = {f"output {place}": out.detach() for place, out in enumerate(outputs)}
        return result | {f"grad of {name}": grad for name, grad in named_grads if grad is not None}

    def errors(self, device: str, dtype: torch.dtype, tf32: bool = False) -> dict[str, tuple[float, float]]:
        """What breaks the error rule: its error and its bound.

        Args:
            tf32: the engine has TF32 products, and so has the baseline.

        At a kink, or where steps amplify, a draw of roundings says little: a value that falls on the other side of a
        clip changed gradients by 22 eps in one draw of sixteen or in another, in the engine as in plain torch.  What
        breaks the rule is held to it at the points beside it too, by root mean squares of both.
        """
        layer = self.layer(device, dtype)
        tensors, marks = self.call(device, dtype)
        rows, eps = [self._measured(layer, tensors, marks, dtype, tf32)], TF32_EPS if tf32 else torch.finfo(dtype).eps
        if found := broken(rows, eps):
            near = torch.Generator().manual_seed(self.seed)
            rows += [self._measured(layer, _beside(tensors, dtype, near), marks, dtype, tf32) for _ in range(_NEAR)]
            found = broken(rows, eps)
        return found

    def _measured(
        self, layer: torch.nn.Module, tensors: dict[str, Tensor], marks: dict[str, Any], dtype: torch.dtype,
        tf32: bool = False,
    ) -> dict[str, tuple[float, float]]:  # fmt: skip
        """The engine's error and the baseline's."""
        found = {}
        for engine, kind in (("reference", torch.float64), ("reference", dtype), ("persistent", dtype)):
            layer.engine = engine
            with _ProductsOfTF32() if tf32 and (engine, kind) == ("reference", dtype) else nullcontext():
                found[engine, kind] = self.results(layer, tensors, marks, kind)
        truth, plain, got = found.values()
        assert got.keys() == truth.keys()
        return {name: (error(got[name], truth[name]), error(plain[name], truth[name])) for name in truth}


class _ProductsOfTF32(TorchDispatchMode):
    """Products of matrices, those of gradients too, of operands rounded to TF32."""

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        names = {torch.ops.aten.mm.default: 0, torch.ops.aten.bmm.default: 0, torch.ops.aten.addmm.default: 1}
        first = names.get(function)
        if first is not None:
            args = [to_tf32(arg) if index >= first else arg for index, arg in enumerate(args)]
        return function(*args, **(kwargs or {}))


_NEAR = 31


def _beside(tensors: dict[str, Tensor], dtype: torch.dtype, draw: torch.Generator) -> dict[str, Tensor]:
    """Each value larger or smaller by up to an eps of itself, as `dtype` can hold it; zeros stay."""

    def moved(tensor: Tensor) -> Tensor:
        shares = 2 * torch.rand(tensor.shape, generator=draw, dtype=torch.float64).to(tensor.device) - 1
        return (tensor * (1 + torch.finfo(dtype).eps * shares)).to(dtype).double()

    return {name: moved(tensor) for name, tensor in tensors.items()}


def drawn(seed: int, largest: int = 40, batch: int = 20, time: int = 5, options: tuple[str, ...] = OPTIONS) -> Drawn:
    """A layer and call of this seed."""
    draw = random.Random(seed)
    kind = draw.choice(["LSTM", "LSTM", "GRU", "RNN", "timed_lstm", "three_states"])
    on = {name for name in options if draw.random() < 0.45}
    if "packed" in on:
        on -= {"lengths", "mask"}
    if "gate" in on:
        on -= {"shared", "step"}
    elif "shared" in on:
        on.discard("step")
    times = [1, *range(2, time + 1), time]
    return Drawn(
        kind, frozenset(on), draw.randint(1, largest), draw.randint(2, batch), draw.choice(times),
        draw.choice([1, 1, 2]), draw.choice([1, 2]), draw.randint(1, 9), seed,
    )  # fmt: skip


def _cell_options(kind: str, draw: random.Random) -> dict[str, Any]:
    clip = dict(clip=draw.choice([0.5, {"h": 0.4}]))
    own = {
        "LSTM": [dict(peephole=True), dict(coupled=True), dict(activation="softplus"), clip, dict(bias=False)],
        "GRU": [dict(recurrent_activation="hard_sigmoid"), clip, dict(bias=False)],
        "RNN": [dict(activation="silu"), clip, dict(bias=False)],
    }
    return draw.choice(own.get(kind, [dict(bias=False), clip]))


def _weighted(outputs: list[Tensor]) -> Tensor:
    """Each element of each output with a gradient of its own, the same in every dtype."""
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=draw).to(out.device).to(torch.bfloat16) for out in outputs]
    return sum((out * grad.to(out.dtype)).sum().double() for out, grad in zip(outputs, grads, strict=True))
