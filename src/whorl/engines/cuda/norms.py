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
from whorl.engines.cuda.beside import ADDED, Norm
from whorl.engines.cuda.source import wide_gates
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
        self._norm, self._units, self._dtype = norm_of(problem.form, problem.dtype), units, problem.dtype
        self._wide = self._norm.gates * units
        self._most = {kind: self._norm.block(kind).resident * chip.multiprocessors for kind in ("forward", "backward")}
        self._gate = torch.float32 if self._norm.wide else problem.dtype
        self.gains, self.shifts = norm_vectors(cell)
        """Where among the cell's vectors those of x's norm are, gate by gate."""
        self.rest = [place for place in range(len(cell.vectors)) if place not in {*self.gains, *self.shifts}]
        """And those that are left for the time loop."""
        self._forward = prepare.norming("forward", self._norm, chip, index)
        if problem.gradient:
            self._backward = prepare.norming("backward", self._norm, chip, index)
            self._add = prepare.adding(problem.dtype, chip, index)

    def inner(self, own: LayerWeights) -> LayerWeights:
        """What is left for the time loop."""
        return own._replace(bias_ih=None, vectors=tuple([own.vectors[place] for place in self.rest]))

    def forward(self, stream: int, x: Tensor, own: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        """x of every gate after its norm, and what backward reads.

        Args:
            x: float32 [rows, gates x units], in one piece from a multiple of 16 bytes on, without its bias.
        """
        made, (means, scales) = x.new_empty(x.shape, dtype=self._gate), x.new_empty(2, len(x))
        vectors = self._vectors(own, [*self.gains, *self.shifts])
        self.ahead(stream, len(x), x.data_ptr(), vectors, made.data_ptr(), (means.data_ptr(), scales.data_ptr()))
        return made, [as_bytes(part) for part in (x, means, scales)]

    def backward(self, stream: int, grad: Tensor, own: LayerWeights, kept: Sequence[Tensor]) -> Made:
        """From the gradient of what `forward` gave, which lies as its x does, and what it kept."""
        x, (means, scales) = _aligned(kept[0]), (part.data_ptr() for part in kept[1:])
        made, sums = torch.empty_like(grad), grad.new_empty(self.sums(len(grad)), dtype=torch.uint8)
        found = grad.new_empty(3 * self._wide)
        bias, gain, shift = found.unsafe_split(self._wide)  # no views of each other for autograd
        self.back(
            stream, len(grad), x.data_ptr(), self._vectors(own, self.gains), (means, scales), grad.data_ptr(),
            made.data_ptr(), sums.data_ptr(), found.data_ptr(),
        )  # fmt: skip
        return Made(made, bias if self._norm.biased else None, gain, shift)

    def ahead(
        self, stream: int, rows: int, x: int, vectors: Sequence[int], made: int, moments: Sequence[int]
    ) -> None:  # fmt: skip
        """`forward`, of addresses: of x's bias (0 for none), the gains and the shifts; of the means and the scales."""
        assert rows <= MOST_ROWS, "the obstacles say that there are not so many"
        self._forward(stream, self._blocks(rows, "forward"), 1, x, *vectors, made, *moments, rows)

    def back(
        self, stream: int, rows: int, x: int, vectors: Sequence[int], moments: Sequence[int], grad: int, made: int,
        sums: int, found: int,
    ) -> None:  # fmt: skip
        """`backward`, of addresses: of x's bias and the gains.

        Args:
            made: of the gradient of x.
            sums: of `sums` bytes.
            found: of the gradients of the bias, the gains and the shifts, one behind the other; of no bias nothing.
        """
        gates, blocks = self._norm.gates, self._blocks(rows, "backward")
        self._backward(stream, blocks, 1, x, *vectors, *moments, grad, made, sums, rows)
        gains = found + self._wide * self._dtype.itemsize
        self._add(
            stream, -(-3 * self._wide // ADDED), 1, sums, sums, found, found, 0, 0, gains, gains,
            blocks, self._units, gates * self._norm.biased, 0, 0, 2 * gates, b"",
        )  # fmt: skip

    def sums(self, rows: int) -> int:
        """Bytes that `back` has meanwhile."""
        return 4 * self._blocks(rows, "backward") * (2 + self._norm.biased) * self._wide

    def joined(self, made: Made, rest: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradient of every vector of the cell, from those of the time loop."""
        found = dict(zip(self.rest, rest, strict=True))
        found |= dict(zip(self.gains, made.gain.unsafe_split(self._units), strict=True))
        found |= dict(zip(self.shifts, made.shift.unsafe_split(self._units), strict=True))
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
