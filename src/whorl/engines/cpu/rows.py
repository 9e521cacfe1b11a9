"""Which steps of which sequences count, where each lies, and which thread takes which sequence."""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from whorl.problem import Call

_MOST_ROWS = 48
"""Of one group: its products stay in the second cache of a core."""


class Rows:
    """The rows of a call.

    A step of a sequence has a place in x and y ("outer"), and one among those that count ("compact"), which is where
    everything lies that backward reads.
    """

    def __init__(self, call: Call) -> None:
        marks, x = call.marks, call.x
        self.packed = marks.batch_sizes is not None
        self.starts: Tensor | None = None
        self.lengths: Tensor | None = None
        if marks.batch_sizes is not None:
            sizes = marks.batch_sizes
            self.time, self.batch, self.outer = len(sizes), int(sizes[0]), x.shape[0]
            self.starts = sizes.cumsum(0) - sizes
            self.lengths = (sizes[:, None] > torch.arange(self.batch, device="cpu")).sum(0)
        else:
            self.time, self.batch = x.shape[0], x.shape[1]
            self.outer = self.time * self.batch
            if marks.lengths is not None:
                self.lengths = marks.lengths.clamp(max=self.time).contiguous()
        self.mask = None if marks.mask is None else marks.mask.contiguous()
        self.reset = None if marks.reset is None else marks.reset.contiguous()
        self.ids = None if marks.rows is None else marks.rows.contiguous()
        self.chosen, self.place = self._choose()
        self.compact = self.outer if self.chosen is None else len(self.chosen)
        self.every = not self.packed and self.chosen is None
        """Each step of each sequence counts and lies in its place."""
        if self.every:  # then lengths and a mask say nothing
            self.lengths = self.mask = None

    def _choose(self) -> tuple[Tensor | None, Tensor | None]:
        """The outer rows that count, and the compact row of each; None where all do."""
        if self.packed or (self.lengths is None and self.mask is None):
            return None, None
        valid = None if self.lengths is None else torch.arange(self.time, device="cpu")[:, None] < self.lengths
        if self.mask is not None:
            valid = self.mask if valid is None else valid & self.mask
        assert valid is not None
        flat = valid.flatten()
        if flat.all():
            return None, None
        return flat.nonzero().squeeze(1), flat.cumsum(0) - 1

    def choose(self, outer: Tensor) -> Tensor:
        """[compact rows, features] of [outer rows, features]."""
        return outer if self.chosen is None else outer.index_select(0, self.chosen)

    def spread(self, compact: Tensor) -> Tensor:
        """Back, with zero in the rows that do not count."""
        if self.chosen is None:
            return compact
        return compact.new_zeros(self.outer, compact.shape[1]).index_copy_(0, self.chosen, compact)

    @cached_property
    def sequence(self) -> Tensor:
        """Of each compact row the sequence that it is of."""
        if self.starts is not None:
            sizes = torch.diff(self.starts, append=torch.tensor([self.outer], device="cpu"))
            return torch.arange(self.outer, device="cpu") - self.starts.repeat_interleave(sizes)
        every = torch.arange(self.batch, device="cpu").repeat(self.time)
        return every if self.chosen is None else every[self.chosen]

    def groups(self, threads: int) -> tuple[Tensor, Tensor, int]:
        """Sequences, group by group; where each group begins; how many the largest has."""
        if self.lengths is None:
            return _even(self.batch, threads)
        count = _count(self.batch, threads)
        longest = self.lengths.argsort(descending=True, stable=True)
        dealt = [longest[group::count] for group in range(count)]
        return torch.cat(dealt), _ends([len(group) for group in dealt]), max(map(len, dealt))


def _count(batch: int, threads: int) -> int:
    return max(1, min(batch, threads * -(-batch // (threads * _MOST_ROWS))))


def _ends(sizes: Sequence[int]) -> Tensor:
    return torch.tensor([0, *sizes], device="cpu").cumsum(0)


@lru_cache(maxsize=64)
def _even(batch: int, threads: int) -> tuple[Tensor, Tensor, int]:
    count = _count(batch, threads)
    sizes = [len(range(group, batch, count)) for group in range(count)]
    return torch.arange(batch, device="cpu"), _ends(sizes), max(sizes)
