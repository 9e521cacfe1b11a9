"""The prepared step of the engine `stepwise`: one launch a layer, over states and weights that stay where they are."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from whorl.engines.base import Step
from whorl.engines.cuda import store
from whorl.engines.cuda.launch import Kernel, loaded
from whorl.engines.cuda.steps import OPTIONS
from whorl.engines.cuda.stepwise_source import Source, stream
from whorl.engines.cuda.tiling import Chip
from whorl.problem import Call, Plan, Problem
from whorl.weights import LayerWeights, split

MOST_STREAMS = 16
"""Streams of one step; from there on products of whole matrices are the better way."""
_WARPS = 4


def obstacles(problem: Problem) -> list[str]:
    """Every reason why there is no prepared step of a problem, each a sentence."""
    form, found = problem.form, []
    way = stream(form.cell, problem.dtype).segments.forward
    if way.means or way.segments > 1:
        found.append(f"the step of {form.cell.name} has a mean or a product inside")
    if form.projection:
        found.append(f"the projection is {form.projection} wide")
    if problem.batch > MOST_STREAMS:
        found.append(f"{problem.batch} streams step together, at most {MOST_STREAMS} do in one launch")
    return found


class Stream(Step):
    """A step of a stack of layers in one direction, on torch's current stream; it can be captured in a CUDA graph.

    Args:
        plan: of one step without gradient.
        call: its weights are read where they are, its states are where this begins.
    """

    def __init__(self, plan: Plan, call: Call) -> None:
        form, dtype = plan.problem.form, plan.problem.dtype
        device, batch = call.x.device, plan.problem.batch
        made = stream(form.cell, dtype)
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.states = [state.detach().to(self._wide, copy=True).contiguous() for state in call.states]
        # what enters a product, twice: read at one step and written for the next
        self._operands = torch.empty(form.layers, 2, batch, form.units, dtype=dtype, device=device)
        self.moved()
        self._turns = torch.zeros(form.layers, form.units, dtype=torch.int32, device=device)
        self._between = torch.empty(form.layers - 1, batch, form.units, dtype=dtype, device=device)
        self._y = torch.empty(batch, form.units, dtype=dtype, device=device)
        self._weights = [_aligned(own) for own in split(form, call.weights)]
        self._index = device.index
        self._widths = [form.layer_inputs(layer) for layer in range(form.layers)]
        self._sizes, self._grid = (form.units, batch), -(-form.units // _WARPS)
        zoneout = form.zoneout or (0.0,) * len(form.cell.states)
        self._shares = [float(share) for share in zoneout]
        self._counts = max(1, len(form.cell.vectors)), max(1, len(form.cell.inputs))
        self._kernel = loaded(
            ("stream", form.cell, dtype, self._index), partial(_load, made, self._layout(), self._index)
        )
        self._fixed = [self._written(layer) for layer in range(form.layers)]

    def _layout(self) -> str:
        """The fields of `Arguments` in stream.cu."""
        vectors, extras = self._counts
        states = len(self.states)
        return f"6Q{vectors}Q{2 * extras}Q{states}Q{states}d7Q"

    def _written(self, layer: int) -> tuple[list[int | float], list[int | float]]:
        """What of a layer's arguments is the same at each step: before the extra inputs, and after them."""
        own = self._weights[layer]
        before: list[int | float] = [0 if one is None else one.data_ptr() for one in own[:4]]
        before += _filled([vector.data_ptr() for vector in own.vectors], self._counts[0])
        after = [*(state[layer].data_ptr() for state in self.states), *self._shares]
        return before, after

    def moved(self) -> None:
        self._operands.copy_(self.states[0].unsqueeze(1).expand_as(self._operands))

    def __call__(self, x: Tensor, reset: Tensor | None, inputs: Sequence[Tensor]) -> Tensor:
        with torch.cuda.device(self._index):
            return self._run(x.contiguous(), reset, inputs)

    def _run(self, x: Tensor, reset: Tensor | None, inputs: Sequence[Tensor]) -> Tensor:
        held = [extra.detach().to(self._wide).contiguous() for extra in inputs]
        reset = None if reset is None else reset.contiguous()
        extras = _filled([extra.data_ptr() for extra in held], self._counts[1])
        extras += _filled([extra.shape[-1] for extra in held], self._counts[1])
        y, at_reset = torch.empty_like(self._y), 0 if reset is None else reset.data_ptr()
        stream, last = torch._C._cuda_getCurrentRawStream(self._index), len(self._fixed) - 1
        entering = x.data_ptr()
        for layer, (before, after) in enumerate(self._fixed):
            leaving = y.data_ptr() if layer == last else self._between[layer].data_ptr()
            self._kernel(
                stream, self._grid, 1, entering, leaving, *before, *extras, *after, at_reset,
                self._operands[layer].data_ptr(), self._turns[layer].data_ptr(), self._widths[layer], *self._sizes,
                int(layer > 0),
            )  # fmt: skip
            entering = leaving
        return y


def _aligned(own: LayerWeights) -> LayerWeights:
    """In one piece each, matrices from a multiple of 16 bytes on."""

    def placed(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()
        return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()

    vectors = tuple(vector.detach().contiguous() for vector in own.vectors)
    return LayerWeights(*map(placed, own[:5]), vectors)  # type: ignore[call-arg, arg-type]


def _filled(values: list[int], count: int) -> list[int]:
    return values + [0] * (count - len(values))


def _load(made: Source, layout: str, index: int) -> Kernel:
    name = made.names["stream"]
    capability = torch.cuda.get_device_capability(index)
    code = store.kernel(made.text, name, Chip(capability, 1).architecture, OPTIONS)
    return Kernel(code, name, index, 32 * _WARPS, 0, 1, layout, early=capability >= (9, 0))
