"""Streams: a text laid out as rows that run side by side, read in windows that join without a gap."""

from copy import copy

import torch

from whorl.errors import InputError


class Streams:
    """A text cut into `batch` contiguous rows, to be read window after window while the states are carried.

    Row b begins at token b * columns, and its last target is the first token of the next row. The last
    (tokens - 1) % batch tokens are left out.
    """

    def __init__(self, tokens: torch.Tensor, batch: int) -> None:
        """Lay out token numbers [tokens], of any integer dtype, on their device; nothing is copied.

        Raises:
            InputError: fewer than batch + 1 tokens.
        """
        self.batch, self.columns = batch, (len(tokens) - 1) // batch
        if self.columns < 1:
            raise InputError(
                f"{len(tokens):,} tokens do not make {batch} rows: make --batch smaller or give more text."
            )
        self._rows = tokens.unfold(0, self.columns + 1, self.columns)[:batch]  # [batch, columns + 1], a view

    def part(self, index: int, parts: int) -> "Streams":
        """Part `index` of the rows, cut into so many equal parts: row b of it is row index * batch / parts + b here."""
        part = copy(self)
        part.batch = self.batch // parts
        part._rows = self._rows[index * part.batch : (index + 1) * part.batch]
        return part

    def __len__(self) -> int:
        """How many tokens have a target."""
        return self.batch * self.columns

    def fill(self, window: torch.Tensor, start: int) -> None:
        """Put the tokens from column `start` on into `window`, int64 [time + 1, batch]; targets are one row on."""
        window.copy_(self._rows[:, start : start + len(window)].t())

    def window(self, start: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [time, batch], from column `start` on; shorter at the end of the text."""
        part = self._rows[:, start : min(start + time, self.columns) + 1].t()
        part = part.to(torch.long, memory_format=torch.contiguous_format)  # in one kernel
        return part[:-1], part[1:]
