"""Layer norm of the input projection: it reads no state, so torch's own kernel computes it for all steps at once.

In float32: gradients of gains are sums over all steps, which cancel.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.cells.wrappers import EPS, ahead, norm_vectors
from whorl.engines.base import as_bytes, from_bytes
from whorl.problem import Problem
from whorl.weights import LayerWeights

KEPT = 3
"""Tensors that forward keeps of each layer and direction."""


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


class Norms:
    """Of x of a problem's cell, which has one.

    Args:
        gate: the dtype in which x comes to the time loop.
    """

    def __init__(self, problem: Problem, gate: torch.dtype) -> None:
        cell, units = problem.form.cell, problem.form.units
        self._units, self._shape, self._gate = units, [len(cell.gates) * units], gate
        self._gains, self._shifts = norm_vectors(cell)
        self._rest = [place for place in range(len(cell.vectors)) if place not in {*self._gains, *self._shifts}]

    def inner(self, own: LayerWeights) -> LayerWeights:
        """What is left for the time loop."""
        return own._replace(bias_ih=None, vectors=tuple([own.vectors[place] for place in self._rest]))

    def forward(self, x: Tensor, own: LayerWeights) -> tuple[Tensor, list[Tensor]]:
        """x of every gate after its norm, and what backward reads.

        Args:
            x: float32 [rows, gates x units], without its bias, which is added in place.
        """
        if own.bias_ih is not None:
            x += own.bias_ih
        gain, shift = self._scales(own)
        made, mean, scale = torch.native_layer_norm(x, self._shape, gain, shift, EPS)
        return made.to(self._gate), [as_bytes(part) for part in (x, mean, scale)]

    def backward(self, grad: Tensor, own: LayerWeights, kept: Sequence[Tensor]) -> Made:
        """From the gradient of what `forward` gave and what it kept."""
        rows, dtype = len(grad), grad.dtype
        shapes = (rows, *self._shape), (rows, 1), (rows, 1)
        x, mean, scale = (from_bytes(part, own, torch.float32) for part, own in zip(kept, shapes, strict=True))
        gain, shift = self._scales(own)
        made, of_gain, of_shift = torch.ops.aten.native_layer_norm_backward(
            grad.float(), x, self._shape, mean, scale, gain, shift, [True, True, True]
        )
        bias = None if own.bias_ih is None else made.sum(0).to(dtype)
        return Made(made.to(dtype), bias, of_gain.to(dtype), of_shift.to(dtype))

    def joined(self, made: Made, rest: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradient of every vector of the cell, from those of the time loop."""
        found = dict(zip(self._rest, rest, strict=True))
        found |= dict(zip(self._gains, made.gain.split(self._units), strict=True))
        found |= dict(zip(self._shifts, made.shift.split(self._units), strict=True))
        return tuple([found[place] for place in range(len(found))])

    def _scales(self, own: LayerWeights) -> tuple[Tensor, Tensor]:
        gain, shift = (
            torch.cat([own.vectors[place] for place in places]).float() for places in (self._gains, self._shifts)
        )
        return gain, shift
