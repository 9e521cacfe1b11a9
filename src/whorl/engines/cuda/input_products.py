"""The products of what enters a layer with its input weights, by addresses: forward and backward."""

from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.cuda.aligned import Made, Products
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.options import Options
from whorl.problem import Problem


class Back(NamedTuple):
    """Of a layer, with all gates, or with one of as many as have masks of their own."""

    to_entered: Made
    to_ih: Made


class InputProducts:
    """Of a problem, those of each layer with all gates.

    Args:
        projected: the dtype of x of each gate.
    """

    def __init__(self, problem: Problem, product: Products, projected: torch.dtype) -> None:
        gates = len(problem.form.cell.gates) * problem.form.units
        self._make_ready(problem, product, gates, projected, problem.dtype)

    def _make_ready(
        self, problem: Problem, product: Products, wide: int, projected: torch.dtype, back: torch.dtype
    ) -> None:
        """
        Args:
            wide: rows of the weights in one product.
            back: the dtype of the gradient of what entered.
        """
        form, dtype, tf32, rows = problem.form, problem.dtype, problem.tf32, problem.time * problem.batch
        inputs, step = [form.layer_inputs(layer) for layer in range(form.layers)], len(form.cell.gates) * form.units
        ready = product.ready
        self._ahead = [ready(dtype, (rows, n, wide), (0, 1), (n, n, step), tf32, projected) for n in inputs]
        self._back: list[Back] = []
        for n in inputs if problem.gradient else ():
            to_entered = ready(dtype, (rows, wide, n), (0, 0), (step, n, n), tf32, back)
            self._back.append(Back(to_entered, ready(dtype, (wide, rows, n), (1, 0), (step, n, n), tf32)))

    def ahead(
        self, options: Options | None, layer: int, direction: int, blas: int, entered: Tensor, ih: int, out: int
    ) -> None:
        """What enters a layer times the weights of every gate."""
        self._ahead[layer](blas, entered.data_ptr(), ih, out)

    def back(
        self, options: Options | None, layer: int, direction: int, blas: int, to_gates: int, entered: Tensor, ih: int,
        to_entered: Tensor | None, to_ih: int,
    ) -> None:  # fmt: skip
        """The gradients of what entered a layer, to which a second direction adds, and of the input weights."""
        own = self._back[layer]
        if to_entered is not None:
            own.to_entered(blas, to_gates, ih, to_entered.data_ptr(), direction > 0)
        own.to_ih(blas, to_gates, entered.data_ptr(), to_ih)

    def of_backward(self) -> list[Made]:
        """All that `back` multiplies with."""
        return [one for own in self._back for one in own]


class MaskedInputProducts(InputProducts):
    """Of an x that goes behind masks held over all steps.

    Args:
        axes: of the masks where they are given: 2, or 3 for one by gate; None where they are drawn.
    """

    def __init__(self, problem: Problem, product: Products, projected: torch.dtype, axes: int | None) -> None:
        self._form, self._projected, self._gates = problem.form, projected, len(problem.form.cell.gates)
        self._rows = self._form.units * (1 if axes == 3 else self._gates)
        """Of the weights in one product."""
        self._dtype = torch.float32 if axes == 3 else problem.dtype
        """Of the gradient of what a mask leaves: of several masks it is summed."""
        self._make_ready(problem, product, self._rows, projected, self._dtype)

    def ahead(
        self, options: Options | None, layer: int, direction: int, blas: int, entered: Tensor, ih: int, out: int
    ) -> None:
        each = self._rows * self._form.layer_inputs(layer) * entered.element_size()
        for part, (_, masked) in enumerate(self._masked(options, layer, direction, entered)):
            into = out + part * self._rows * self._projected.itemsize
            self._ahead[layer](blas, masked.data_ptr(), ih + part * each, into)

    def back(
        self, options: Options | None, layer: int, direction: int, blas: int, to_gates: int, entered: Tensor, ih: int,
        to_entered: Tensor | None, to_ih: int,
    ) -> None:  # fmt: skip
        assert options is not None, "x goes behind masks"
        own, element, total = self._back[layer], entered.element_size(), list[Tensor]()
        each = self._rows * self._form.layer_inputs(layer) * element
        for part, (mask, masked) in enumerate(self._masked(options, layer, direction, entered)):
            grads = to_gates + part * self._rows * element
            own.to_ih(blas, grads, masked.data_ptr(), to_ih + part * each)
            if to_entered is None:
                continue
            made = empty(*laid_out(entered.shape, self._dtype))
            own.to_entered(blas, grads, ih + part * each, made.data_ptr())
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

    def _masked(
        self, options: Options | None, layer: int, direction: int, entered: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Each mask, and what it leaves of what entered a layer."""
        assert options is not None, "x goes behind masks"
        mask = options.input_mask(layer, direction)
        assert mask is not None, "x goes behind one"
        made = options.masked(entered, mask)
        return [(mask, made)] if mask.dim() == 2 else [(mask[gate], made[gate]) for gate in range(self._gates)]
