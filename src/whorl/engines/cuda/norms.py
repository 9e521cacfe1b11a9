"""Layer norm of the input projection: it reads no state, so a kernel of its own computes it for all steps at once.

In float32: gradients of gains are sums over all steps, which cancel.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.cells.wrappers import ahead, norm_vectors, share_of_x
from whorl.engines.base import as_bytes
from whorl.engines.cuda import prepare
from whorl.engines.cuda.source import ADDED, Norm, wide_gates
from whorl.engines.cuda.tiling import Chip
from whorl.problem import Form, Problem
from whorl.weights import LayerWeights

KEPT = 3
"""Tensors that forward keeps of each layer and direction."""
MOST_ROWS = 2**30 - 1
"""Of all steps and sequences together: backward numbers them by 32 bits."""


@lru_cache(maxsize=8192)
def inside(problem: Problem) -> Problem:
    """The problem that is left for the time loop: of a cell that is given x after its layer norm, where it has one."""
    cell = ahead(problem.form.cell)
    return problem if cell is None else replace(problem, form=replace(problem.form, cell=cell))


def normed(problem: Problem) -> bool:
    """Whether `inside` leaves another problem."""
    return ahead(problem.form.cell) is not None


class Made(NamedTuple):
    """Gradients of one layer and direction."""

    x: Tensor
    """[rows, gates x units], of the input projection without its bias."""
    bias: Tensor | None
    gain: Tensor
    shift: Tensor


def norm_of(form: Form, dtype: torch.dtype) -> Norm:
    """What the kernels are written for."""
    counted = round(share_of_x(form.cell) * form.units)
    padded = counted < form.units
    return Norm(len(form.cell.gates), form.units, dtype, wide_gates(form.cell), form.bias, counted if padded else None)


class Norms:
    """Of x of a problem's cell, which has one."""

    def __init__(self, problem: Problem, chip: Chip, index: int) -> None:
        cell, units = problem.form.cell, problem.form.units
        self._norm, self._units = norm_of(problem.form, problem.dtype), units
        self._most = {kind: self._norm.block(kind).resident * chip.multiprocessors for kind in ("forward", "backward")}
        self._gate = torch.float32 if self._norm.wide else problem.dtype
        self._gains, self._shifts = norm_vectors(cell)
        self._rest = [place for place in range(len(cell.vectors)) if place not in {*self._gains, *self._shifts}]
        self._forward = prepare.norming("forward", self._norm, chip, index)
        if problem.gradient:
            self._backward = prepare.norming("backward", self._norm, chip, index)
            self._add = prepare.adding(problem.dtype, chip, index)

    def inner(self, own: LayerWeights) -> LayerWeights:
        """What is left for the time loop."""
        return own._replace(bias_ih=None, vectors=tuple([own.vectors[place] for place in self._rest]))

    def forward(self, stream: int, x: Tensor, own: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        """x of every gate after its norm, and what backward reads.

        Args:
            x: float32 [rows, gates x units], in one piece from a multiple of 16 bytes on, without its bias.
        """
        rows = len(x)
        assert rows <= MOST_ROWS, "the obstacles say that there are not so many"
        made, (means, scales) = x.new_empty(x.shape, dtype=self._gate), x.new_empty(2, rows)
        self._forward(
            stream, self._blocks(rows, "forward"), 1, x.data_ptr(), *self._vectors(own, [*self._gains, *self._shifts]),
            made.data_ptr(), means.data_ptr(), scales.data_ptr(), rows,
        )  # fmt: skip
        return made, [as_bytes(part) for part in (x, means, scales)]

    def backward(self, stream: int, grad: Tensor, own: LayerWeights, kept: Sequence[Tensor]) -> Made:
        """From the gradient of what `forward` gave, which lies as its x does, and what it kept."""
        rows, gates, biased = len(grad), self._norm.gates, self._norm.biased
        x = _aligned(kept[0])
        means, scales = (part.data_ptr() for part in kept[1:])
        blocks, made = self._blocks(rows, "backward"), torch.empty_like(grad)
        sums = grad.new_empty(blocks, (2 + biased) * gates * self._units, dtype=torch.float32)
        self._backward(
            stream, blocks, 1, x.data_ptr(), *self._vectors(own, self._gains), means, scales, grad.data_ptr(),
            made.data_ptr(), sums.data_ptr(), rows,
        )  # fmt: skip
        found = grad.new_empty(3 * gates * self._units)
        bias, gain, shift = found.unsafe_split(gates * self._units)  # no views of each other for autograd
        self._add(
            stream, -(-found.numel() // ADDED), 1, *[sums.data_ptr()] * 2, *[bias.data_ptr()] * 2, 0, 0,
            *[gain.data_ptr()] * 2, blocks, self._units, gates * biased, 0, 0, 2 * gates, b"",
        )  # fmt: skip
        return Made(made, bias if biased else None, gain, shift)

    def joined(self, made: Made, rest: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradient of every vector of the cell, from those of the time loop."""
        found = dict(zip(self._rest, rest, strict=True))
        found |= dict(zip(self._gains, made.gain.unsafe_split(self._units), strict=True))
        found |= dict(zip(self._shifts, made.shift.unsafe_split(self._units), strict=True))
        return tuple([found[place] for place in range(len(found))])

    def _vectors(self, own: LayerWeights, places: Sequence[int]) -> list[int]:
        """Where x's bias lies, and some of the cell's vectors."""
        bias = 0 if own.bias_ih is None else own.bias_ih.data_ptr()
        return [bias, *(own.vectors[place].data_ptr() for place in places)]

    def _blocks(self, rows: int, kind: str) -> int:
        """As many as run at once; a row goes to the block that has the fewest."""
        return max(1, min(rows, self._most[kind]))


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or where hooks of saved tensors gave another, a copy: words of 16 bytes are read from it."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
