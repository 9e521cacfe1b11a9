"""Streams: a text laid out as rows that run side by side, read in windows that join without a gap."""

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

    def __len__(self) -> int:
        """How many tokens have a target."""
        return self.batch * self.columns

    def window(self, start: int, time: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, int64 [time, batch], from column `start` on; shorter at the end of the text."""
        part = self._rows[:, start : min(start + time, self.columns) + 1].t()
        part = part.to(torch.long, memory_format=torch.contiguous_format)  # in one kernel
        return part[:-1], part[1:]
