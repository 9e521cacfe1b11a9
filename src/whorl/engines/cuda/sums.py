"""Gradients of biases and vectors from the sums over the batch that a layer's backward kernel leaves: one launch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.cuda.beside import ADDED
from whorl.engines.cuda.prepare import adding
from whorl.engines.cuda.source import kept as kept_by
from whorl.engines.cuda.staged import by_link, staged, steps
from whorl.engines.cuda.tiling import Chip
from whorl.problem import Form


class Gradients(NamedTuple):
    """Of one layer and direction, in the layer's dtype."""

    bias_ih: Tensor | None
    bias_hh: Tensor | None
    vectors: tuple[Tensor, ...]


class Sums:
    """What is summed in the layers of a form, and the kernel that ends it."""

    def __init__(self, form: Form, dtype: torch.dtype, chip: Chip, index: int) -> None:
        cell, kept = form.cell, kept_by(form.cell)
        self._links = by_link(steps(cell), cell) if staged(cell) else None
        self._own = len(cell.recurrent)
        results = self._own if self._links is None else len(self._links)
        self._units, self._dtype, self._vectors = form.units, dtype, len(cell.vectors)
        counts = (len(cell.gates), results, len(kept.apart)) if form.bias else (0, 0, 0)
        self._gates, self._recurrent, self._apart = counts
        self.columns = (self._gates + self._apart + self._vectors) * form.units
        """Sums of one block."""
        apart = {gate: len(cell.gates) + place for place, gate in enumerate(kept.apart)}
        places = [apart[gate] if gate in apart else kept.sums.index(gate) for gate in range(results)]
        self._places = bytes(places if form.bias else ())
        self._kernel = adding(dtype, chip, index) if self.columns else None

    def __call__(self, stream: int, sums: Sequence[Tensor | None]) -> list[Gradients]:
        """The gradients of each direction.

        Args:
            sums: float32 [rows, `columns`] of each; None where nothing is summed.
        """
        if self._kernel is None:
            return [Gradients(None, None, ()) for _ in sums]
        given = [one for one in sums if one is not None]
        size = (self._gates, self._recurrent, self._vectors)
        made = [[one.new_empty(count * self._units, dtype=self._dtype) for count in size] for one in given]
        rows = [given, *zip(*made, strict=True)]
        addresses = [tensor.data_ptr() for row in rows for tensor in (row[0], row[-1])]
        self.launch(stream, len(given), len(given[0]), *addresses)
        return [
            Gradients(
                of_x if self._gates else None, self._of_gates(of_r) if self._gates and self._own else None,
                vectors.unsafe_split(self._units) if self._vectors else (),  # no views of each other for autograd
            )
            for of_x, of_r, vectors in made
        ]  # fmt: skip

    def launch(self, stream: int, directions: int, rows: int, *addresses: int) -> None:
        """Add up.

        Args:
            rows: of the sums.
            addresses: of each direction's sums, then of the gradients of x's bias, of r's and of the vectors.
        """
        assert self._kernel is not None, "there is something to sum"
        columns = (self._gates + self._recurrent + self._vectors) * self._units
        self._kernel(
            stream, -(-columns // ADDED), directions, *addresses,
            rows, self._units, self._gates, self._recurrent, self._apart, self._vectors, self._places,
        )  # fmt: skip

    def _of_gates(self, of_r: Tensor) -> Tensor:
        """Of each recurrent gate, from those of all products with its weights."""
        if self._links is None:
            return of_r
        made = of_r.new_zeros(self._own, self._units)
        for link, part in zip(self._links, of_r.view(-1, self._units), strict=True):
            made[link.gate] += part
        return made.view(-1)
