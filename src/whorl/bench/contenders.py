"""Who is measured: whorl on any of its engines, and its rivals, each a plug-in of one registry.

A rival is a row of `RIVALS`: what it is, why it cannot run a case, and a function that builds its layer.  How a layer
is called, checked and timed is the same for all of them and stands elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import whorl
from whorl.bench.cases import Case
from whorl.errors import InputError
from whorl.plan import check_engine

COMPILED_STEPS = 70  # layers x time; 20 steps of a GRU took 30 s to compile on two CPU cores (torch 2.13)
Weights = Mapping[str, Tensor]
"""By torch.nn's names, in torch.nn's shapes."""


@dataclass(frozen=True)
class Layer:
    """The layer of a contender, built for a case.

    Attributes:
        module: what train() and eval() switch.
        call: from x [time, batch, units] to the output of every step, of the same shape.
        parameters: every one; the gradient of each is checked.
        engine: which engine of whorl runs a call on x; None for a rival.
    """

    module: torch.nn.Module
    call: Callable[[Tensor], Tensor]
    parameters: Weights
    engine: Callable[[Tensor], str] | None = None


@dataclass(frozen=True)
class Contender:
    """One that is measured.

    Attributes:
        name: in options, tables and results.
        summary: what it is, in a few words.
        build: its layer for a case on a device; the weights of the case are then put into its parameters.
        obstacles: why it cannot run a case on a device, each a sentence; none where it can.
        graphed: whether the whole pass is captured in a CUDA graph, and what is timed is the graph's replay.
        rival: whether it is measured beside whorl, and not whorl itself.
    """

    name: str
    summary: str
    build: Callable[[Case, torch.device], Layer]
    obstacles: Callable[[Case, torch.device], list[str]] = lambda case, device: []
    graphed: bool = False
    rival: bool = True


def torch_layer(case: Case, device: torch.device) -> torch.nn.RNNBase:
    """torch.nn's layer for a case, with torch's first weights; on a GPU they are laid flat, as cuDNN wants them."""
    return getattr(torch.nn, case.cell.upper())(case.units, case.units, case.layers, device=device, dtype=case.dtype)


def _build_torch(case: Case, device: torch.device) -> Layer:
    layer = torch_layer(case, device)
    return Layer(layer, lambda x: layer(x)[0], dict(layer.named_parameters()))


def _build_compiled(case: Case, device: torch.device) -> Layer:
    layer = torch_layer(case, device)
    torch._dynamo.reset()  # after a few cases it would compile no more, and not say so
    torch._dynamo.config.allow_rnn = (
        True  # without it torch refuses to compile its own layer; whorl's layers set it too
    )
    compiled = torch.compile(layer, fullgraph=True)
    return Layer(layer, lambda x: compiled(x)[0], dict(layer.named_parameters()))


class _Cells(torch.nn.Module):
    """What users write around torch.nn's cells: a loop over time."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        cell = getattr(torch.nn, f"{case.cell.upper()}Cell")
        made = [cell(case.units, case.units, device=device, dtype=case.dtype) for _ in range(case.layers)]
        self.cells = torch.nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        steps = x.unbind(0)
        for cell in self.cells:
            state, outs = None, []
            for step in steps:
                state = cell(step, state)
                outs.append(state[0] if isinstance(state, tuple) else state)
            steps = tuple(outs)
        return torch.stack(steps)


def _build_cells(case: Case, device: torch.device) -> Layer:
    layer = _Cells(case, device)
    kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    parameters = {f"{kind}_l{i}": getattr(cell, kind) for i, cell in enumerate(layer.cells) for kind in kinds}
    return Layer(layer, layer, parameters)


def _needs_graphs(case: Case, device: torch.device) -> list[str]:
    return [] if device.type == "cuda" else [f"CUDA graphs exist on CUDA alone, this is {device.type}"]


def _needs_few_steps(case: Case, device: torch.device) -> list[str]:
    steps = case.layers * case.time
    if steps <= COMPILED_STEPS:
        return []
    return [f"torch.compile unrolls layers x time, here {steps} steps; more than {COMPILED_STEPS} take it minutes"]


RIVALS = {
    rival.name: rival
    for rival in (
        Contender("torch", "torch.nn's layer", _build_torch),
        Contender("torch-graphed", "torch.nn's layer, replayed from a CUDA graph", _build_torch, _needs_graphs, True),
        Contender("torch-cells", "a loop over time of torch.nn's cells", _build_cells),
        Contender("torch-compiled", "torch.compile of torch.nn's layer", _build_compiled, _needs_few_steps),
    )
}
USUAL_RIVALS = ("torch", "torch-graphed", "torch-cells")
"""Those that are measured unless others are named: torch.compile takes minutes."""


def ours(engine: str, graphed: bool = False) -> Contender:
    """whorl on one engine, or on the engine that it chooses, for "auto"."""
    name = "whorl" + f"-{engine}" * (engine != "auto") + "-graphed" * graphed
    where = "the engine that it chooses" if engine == "auto" else f"its engine {engine}"
    summary = f"whorl's layer on {where}" + ", replayed from a CUDA graph" * graphed
    obstacles = _needs_graphs if graphed else lambda case, device: []
    return Contender(name, summary, partial(_build_whorl, engine), obstacles, graphed, rival=False)


def _build_whorl(engine: str, case: Case, device: torch.device) -> Layer:
    make = getattr(whorl, case.cell.upper())
    layer = make(case.units, case.units, case.layers, device=device, dtype=case.dtype, engine=engine)
    return Layer(layer, lambda x: layer(x)[0], dict(layer.named_parameters()), lambda x: layer.plan(x).engine)


def contenders(engines: Sequence[str], rivals: Sequence[str]) -> list[Contender]:
    """whorl on each engine, plain and graphed, and the rivals of these names.

    Raises:
        InputError: an engine or a rival that there is not.
    """
    for rival in rivals:
        if rival not in RIVALS:
            raise InputError(f"rival is {rival!r}: write one of {', '.join(RIVALS)}.")
    own = [ours(check_engine(engine), graphed) for engine in dict.fromkeys(engines) for graphed in (False, True)]
    return own + [RIVALS[name] for name in dict.fromkeys(rivals)]
