"""The products of an x that goes behind masks held over all steps, by addresses: forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.cuda.aligned import Made, Products
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.options import Options
from whorl.problem import Problem


class OfLayer(NamedTuple):
    """Of all gates, or of one of as many as have masks of their own."""

    ahead: Made
    to_ih: Made
    to_masked: Made


class MaskedInput:
    """Of a problem, the products of each layer.

    Args:
        projected: the dtype of x of each gate.
        axes: of the masks where they are given: 2, or 3 for one by gate; None where they are drawn.
    """

    def __init__(self, problem: Problem, product: Products, projected: torch.dtype, axes: int | None) -> None:
        self._form, self._projected, self._gates = problem.form, projected, len(problem.form.cell.gates)
        self._rows = self._form.units * (1 if axes == 3 else self._gates)
        """Of the weights in one product."""
        self._dtype = torch.float32 if axes == 3 else problem.dtype
        """Of the gradient of what a mask leaves: of several masks it is summed."""
        self._of_layers = [self._products(problem, product, layer) for layer in range(self._form.layers)]

    def _products(self, problem: Problem, product: Products, layer: int) -> OfLayer:
        rows, inputs, wide = problem.time * problem.batch, self._form.layer_inputs(layer), self._rows
        dtype, tf32, step = problem.dtype, problem.tf32, self._gates * self._form.units
        return OfLayer(
            product.ready(dtype, (rows, inputs, wide), (0, 1), (inputs, inputs, step), tf32, self._projected),
            product.ready(dtype, (wide, rows, inputs), (1, 0), (step, inputs, inputs), tf32),
            product.ready(dtype, (rows, wide, inputs), (0, 0), (step, inputs, inputs), tf32, self._dtype),
        )

    def ahead(
        self, options: Options, layer: int, direction: int, blas: int, entered: Tensor, ih: int, out: int
    ) -> None:
        """As `Plain._multiply_ahead`."""
        each = self._rows * self._form.layer_inputs(layer) * entered.element_size()
        for part, (_, masked) in enumerate(self._masked(options, layer, direction, entered)):
            into = out + part * self._rows * self._projected.itemsize
            self._of_layers[layer].ahead(blas, masked.data_ptr(), ih + part * each, into)

    def back(
        self, options: Options, layer: int, direction: int, blas: int, to_gates: int, entered: Tensor, ih: int,
        to_entered: Tensor | None, to_ih: int,
    ) -> None:  # fmt: skip
        """As `Plain._multiply_input`."""
        own, element, total = self._of_layers[layer], entered.element_size(), list[Tensor]()
        each = self._rows * self._form.layer_inputs(layer) * element
        for part, (mask, masked) in enumerate(self._masked(options, layer, direction, entered)):
            grads = to_gates + part * self._rows * element
            own.to_ih(blas, grads, masked.data_ptr(), to_ih + part * each)
            if to_entered is None:
                continue
            made = empty(*laid_out(entered.shape, self._dtype))
            own.to_masked(blas, grads, ih + part * each, made.data_ptr())
            made = options.masked(made, mask)
            if total:
                total[0] += made
            else:
                total.append(made)
        if to_entered is None:
            return
        if direction:
            rounded = empty(*laid_out(entered.shape, entered.dtype))
            rounded.copy_(total[0])
            to_entered += rounded
        else:
            to_entered.copy_(total[0])

    def _masked(self, options: Options, layer: int, direction: int, entered: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each mask, and what it leaves of what entered a layer."""
        mask = options.input_mask(layer, direction)
        assert mask is not None, "x goes behind one"
        made = options.masked(entered, mask)
        return [(mask, made)] if mask.dim() == 2 else [(mask[gate], made[gate]) for gate in range(self._gates)]
