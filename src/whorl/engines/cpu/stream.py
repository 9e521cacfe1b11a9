"""The prepared step of engine `cpu`: all layers in one call into kernels/stream.cpp, with weights packed once."""

import ctypes
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.engines.base import Step
from whorl.engines.cpu.masks import Masks
from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.sweep import Fields, Products, StepLayer, address, kernel
from whorl.noise import given
from whorl.problem import Call, Plan
from whorl.weights import LayerWeights, split

_SHARED_FROM = 1_000_000
"""Products of a step from which two threads share its units.

One step of an LSTM on an AMD EPYC (family 25, two cores), by one thread and by two in a tight loop: 128 units 10.6 and
8.5 us, 256 units 30 and 20, 384 units 58 and 38, 512 units 100 and 62.  Between the steps of a stream the second thread
goes to sleep, and to wake it takes what it would save below this.
"""


class Stream(Step):
    """A step of a stack of layers in one direction.

    Args:
        plan: of one step without gradient.
        call: its weights are copied, its states are where this begins.
        threads: at most so many share a step.
    """

    def __init__(self, plan: Plan, call: Call, threads: int) -> None:
        form, dtype = plan.problem.form, plan.problem.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        made, rows, layers = kernel(form.cell, dtype), Rows(call), split(form, call.weights)
        self._batch, self._wide = rows.batch, wide
        self.states = [state.detach().to(wide, copy=True).contiguous() for state in call.states]
        self._kept: list[object] = []
        given_masks = given(form, call)
        described = (StepLayer * form.layers)()
        for layer, weights in enumerate(layers):
            fields = Fields(made, rows, 1, form.units, form.width, False)
            products = Products(made, wide, 1, rows.batch)
            Masks(made, form, call, given_masks[layer], layer, rows, wide, products, False).set(
                fields, [None] * len(self.states), [None] * len(self.states)
            )
            fields.set_lists(states=[state[layer] for state in self.states])
            described[layer] = self._described(fields, weights, form.layer_inputs(layer))
        multiplied = rows.batch * sum(weight.numel() for weight in call.weights if weight.dim() == 2)
        shared = threads if multiplied >= _SHARED_FROM else 1
        self._step, self._y = made.stream, torch.empty(rows.batch, form.width, dtype=dtype, device="cpu")
        opened = ctypes.c_void_p()
        made.open(described, form.layers, shared, opened)
        self._handle = opened.value
        weakref.finalize(self, made.close, self._handle)

    def _described(self, fields: Fields, weights: LayerWeights, inputs: int) -> StepLayer:
        """A layer, and hold what it points to."""
        wide = [None if one is None else one.detach().to(self._wide).contiguous() for one in weights[2:4]]
        ih, hh, hr = (None if one is None else one.detach().contiguous() for one in (*weights[:2], weights.hr))
        fields.set(hh=hh, hr=hr, bias_hh=wide[1])
        fields.set_lists(vectors=[vector.detach().to(self._wide).contiguous() for vector in weights.vectors])
        self._kept += [fields, ih, wide[0]]
        return StepLayer(fields.sweep, address(ih), address(wide[0]), inputs)

    def __call__(self, x: Tensor, reset: Tensor | None, inputs: Sequence[Tensor]) -> Tensor:
        x, y = x.contiguous(), torch.empty_like(self._y)
        if reset is None and not inputs:
            self._step(self._handle, x.data_ptr(), y.data_ptr(), None, None, None)
            return y
        extras = [extra.detach().to(self._wide).contiguous() for extra in inputs]
        reset = None if reset is None else reset.contiguous()
        pointers = (ctypes.c_void_p * len(extras))(*map(address, extras))
        widths = (ctypes.c_int64 * len(extras))(*(extra.shape[-1] for extra in extras))
        self._step(self._handle, x.data_ptr(), y.data_ptr(), address(reset), pointers, widths)
        return y
