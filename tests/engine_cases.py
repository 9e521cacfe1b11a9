"""Calls of every cell and option for engines that run them all, and their comparison with `reference` in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cells_for_tests import USER
from comparison import EXACT, broken, error, weighted
from whorl.cells import library, wrappers
from whorl.cells.cell import Cell, Graph
from whorl.functional import recurrent
from whorl.problem import Call, Form, Marks
from whorl.weights import kinds, shapes

LIBRARY = [cell for cell in vars(library).values() if isinstance(cell, Cell)]
CELLS = {cell.name: cell.graph for cell in [*LIBRARY, *USER]}


@dataclass
class Case:
    """A call to draw, for a cell."""

    form: dict[str, Any] = field(default_factory=dict)
    time: int = 7
    batch: int = 5
    inputs: int = 3
    units: int = 11
    initial: bool = True
    packed: bool = False
    sequences: bool = False
    marks: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    """Masks that are given: "input", "input by gate", "recurrent", "zoneout"."""
    seed: int = 3
    narrow: bool = False
    """Extra inputs are one number for all units."""
    beside: int = 0
    """The number of a point beside the one that `seed` draws; 0: that one."""
    scale: float = 0.2
    """Of the weights: with many units such large ones lose every digit in a few steps."""

    def build(self, graph: Graph) -> tuple[Form, Call]:
        """The form, and a call in float64."""
        torch.manual_seed(self.seed)
        made = {"zoneout": ()} | self.form
        form = Form(graph, self.inputs, self.units, **{key: value for key, value in made.items() if key != "dropout"})
        time, batch, sizes, rows = self.time, self.batch, None, None
        outer: tuple[int, ...] = (time, batch)
        if self.packed:
            lengths = torch.tensor([time, *torch.randint(1, time + 1, (batch - 1,)).sort(descending=True).values])
            sizes = (lengths > torch.arange(time)[:, None]).sum(1)
            outer, rows = (int(sizes.sum()),), torch.randperm(batch)
        count, cells = form.layers * form.directions, form.cell

        def states() -> tuple[Tensor, ...]:
            drawn = [_normal(count, batch, form.state_width(index)) for index in range(len(cells.states))]
            # what a step divides by, as steps make it: above zero
            return tuple(d.abs() + 1 if name == "n" else d for d, name in zip(drawn, cells.states, strict=True))

        weights = [self.scale * _normal(*shape) for shape in shapes(form)]
        weights = [
            0.1 * w + 1 if "gain" in kind or "gamma" in kind else w
            for w, kind in zip(weights, list(kinds(form)) * count, strict=True)
        ]
        mask = torch.rand(outer) < 0.7 if "mask" in self.marks else None
        lengths = torch.randint(0, time + 1, (batch,)) if "lengths" in self.marks else None
        reset = torch.rand(outer) < 0.3 if "reset" in self.marks or "reset_to" in self.marks else None
        drawn = form.recurrent_dropout or form.input_dropout or (form.zoneout and "evaluated" not in self.marks)
        seed = torch.tensor(2**62 + 12345) if drawn else None
        x = _normal(*outer, self.inputs)
        if self.beside:
            x *= 1 + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(self.beside), dtype=x.dtype)
        for count_out in (lengths, mask):  # what does not count may be anything
            if count_out is not None:
                x[~_counted(outer, lengths, mask)] = torch.nan
        drops = self.form.get("dropout", 0.0)
        width = form.width * form.directions
        dropout = [(torch.rand(*outer, width) > drops).double() / (1 - drops) for _ in range(form.layers - 1)]
        extras = [torch.rand(*outer, 1 if self.narrow else self.units, dtype=torch.float64) for _ in cells.inputs]
        return form, Call(
            x,
            states() if self.initial else (),
            tuple(weights),
            tuple(dropout) if drops else (),
            states() if "reset_to" in self.marks else (),
            tuple(extras),
            tuple(self._noise(form, outer)) if self.given else (),
            Marks(sizes, rows, lengths, mask, reset, seed),
        )

    def _noise(self, form: Form, outer: tuple[int, ...]) -> list[Tensor]:
        found = []
        for layer in range(form.layers):
            for _ in range(form.directions):
                inputs, gates = form.layer_inputs(layer), len(form.cell.recurrent)
                shape: tuple[int, ...] = (self.batch, inputs)
                row = [torch.rand(shape) if "input" in self.given else torch.empty(())]
                if "input by gate" in self.given:
                    row = [torch.rand(len(form.cell.gates), *shape)]
                by_mode = {"gate": (gates, self.batch), "shared": (self.batch,), "step": outer}
                held = torch.rand(*by_mode[form.recurrent_dropout_mode], form.width)
                row.append(held if "recurrent" in self.given else torch.empty(()))
                for state in range(len(form.cell.states)):
                    zoneout = torch.rand(*outer, form.state_width(state))
                    row.append(zoneout if "zoneout" in self.given else torch.empty(()))
                found += [mask.double() for mask in row]
        return found


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _counted(outer: tuple[int, ...], lengths: Tensor | None, mask: Tensor | None) -> Tensor:
    found = torch.ones(outer, dtype=torch.bool) if mask is None else mask
    return found if lengths is None else found & (torch.arange(outer[0])[:, None] < lengths)


def results(form: Form, call: Call, engine: str, sequences: bool) -> dict[str, Tensor]:
    """Outputs, and the gradient of every tensor of the call, by name."""
    leaves = [tensor.detach().requires_grad_() for tensor in call.tensors]
    outputs = recurrent(form.to_json(), Call.of(leaves, call.layout, call.marks), engine, sequences)
    grads = torch.autograd.grad(weighted(outputs), leaves, allow_unused=True)
    names = ["x 0", *(f"{part} {i}" for part in Call._fields[1:7] for i in range(len(getattr(call, part))))]
    zeros = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | dict(zip(names, zeros, strict=True))


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """x, weights and states rounded; masks and extra inputs as they are."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def rounded(tensors: Sequence[Tensor], to: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(tensor.to(to) for tensor in tensors)

    kinds = {"x": dtype, "states": dtype, "weights": dtype, "dropout": dtype, "reset_to": dtype}
    kinds |= {"inputs": wide, "noise": wide}
    changed: dict[str, Any] = {name: rounded(getattr(call, name), to) for name, to in kinds.items() if name != "x"}
    return call._replace(x=call.x.to(dtype), **changed)


def moved(call: Call, device: str) -> Call:
    """On a device; what stays on the host is the sizes of a PackedSequence."""
    marks = Marks(call.marks.batch_sizes, *(None if mark is None else mark.to(device) for mark in call.marks[1:]))
    return Call.of([tensor.to(device) for tensor in call.tensors], call.layout, marks)


def errors(
    engine: str, graph: Graph, case: Case, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, tuple[float, float]]:
    """Of each output and gradient the engine's error, and that of `reference` in the same dtype."""
    form, call = case.build(graph)
    rounded = in_dtype(call, dtype)
    truth = results(form, in_dtype(rounded, torch.float64), "reference", case.sequences)
    plain = results(form, rounded, "reference", case.sequences)
    got = {name: tensor.cpu() for name, tensor in results(form, moved(rounded, device), engine, case.sequences).items()}
    assert {name: tensor.dtype for name, tensor in got.items()} == {name: one.dtype for name, one in plain.items()}
    return {name: (error(got[name], wanted), error(plain[name], wanted)) for name, wanted in truth.items()}


def assert_agrees(engine: str, graph: Graph, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    """Outputs and gradients follow the error rule; the baseline is `reference` in the same dtype."""
    found = errors(engine, graph, case, dtype, device)
    if dtype == torch.float64:
        assert {name: one for name, (one, _) in found.items() if not one <= EXACT} == {}
    else:
        assert broken([found], torch.finfo(dtype).eps) == {}


FORMS = {
    "plain": Case(),
    "no initial states": Case(initial=False),
    "no bias": Case({"bias": False}),
    "layers": Case({"layers": 3, "directions": 2, "dropout": 0.4}),
    "two layers": Case({"layers": 2, "directions": 2}, seed=5),
    "sequences": Case({"directions": 2}, sequences=True),
    "packed": Case({"layers": 2, "directions": 2}, packed=True, sequences=True),
    "lengths": Case({"layers": 2, "directions": 2}, marks=("lengths",), sequences=True),
    "mask": Case({"layers": 2, "directions": 2}, marks=("mask",), sequences=True),
    "a mask alone": Case({"layers": 2, "directions": 2}, marks=("mask",)),
    "mask and lengths": Case({"directions": 2}, marks=("mask", "lengths"), sequences=True),
    "reset": Case({"layers": 2, "directions": 2}, marks=("reset",), sequences=True),
    "reset to": Case({"directions": 2}, marks=("reset_to", "mask", "lengths")),
    "reset, packed": Case({"directions": 2}, marks=("reset_to",), packed=True),
    "one of each": Case(time=1, batch=1, inputs=1, units=1),
    "a vector and one": Case(time=3, batch=13, units=17),
    "a panel and one": Case(time=3, batch=7, units=65),
    "extra inputs of one number": Case({"directions": 2}, narrow=True),
    "recurrent dropout by gate": Case({"directions": 2, "recurrent_dropout": 0.4}),
    "recurrent dropout, shared": Case({"recurrent_dropout": 0.4, "recurrent_dropout_mode": "shared"}, packed=True),
    "recurrent dropout by step": Case({"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step"}, marks=("lengths",)),
    "all dropped": Case({"recurrent_dropout": 1.0, "input_dropout": 1.0}),
    "input dropout": Case({"layers": 2, "directions": 2, "input_dropout": 0.4}, marks=("mask",)),
    "input dropout, packed": Case({"input_dropout": 0.4}, packed=True),
    "given, by gate": Case(given=("input by gate", "recurrent", "zoneout"), marks=("mask",)),
    "given, no marks": Case({"directions": 2}, given=("input by gate", "recurrent", "zoneout")),
    "given, shared": Case(
        {"recurrent_dropout_mode": "shared", "directions": 2}, given=("input", "recurrent"), packed=True
    ),
    "given, by step": Case({"recurrent_dropout_mode": "step"}, given=("recurrent", "zoneout"), marks=("lengths",)),
    "given, by step, packed": Case({"recurrent_dropout_mode": "step"}, given=("recurrent", "zoneout"), packed=True),
}

DROPS = [form for form in FORMS if "recurrent" in form or form.startswith("given") or form == "all dropped"]
"""Those with masks of recurrent dropout."""

WRAPPED = {
    "layer norm": wrappers.layer_norm(library.lstm.graph, ("x", "r"))[0],
    "layer norm and a product": wrappers.layer_norm(CELLS["gru_before"], ("x", "r"))[0],
    "clipped": wrappers.clipped(library.lstm.graph, {"h": 0.3, "c": 0.5}),
    "every option of LSTM": library.make_lstm(torch.relu, torch.sigmoid, True, True, True).graph,
    "reset before": library.make_gru(torch.tanh, torch.sigmoid, False).graph,
}
