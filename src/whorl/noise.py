"""The masks of dropout and zoneout inside a layer: drawn by counting, so that every engine draws the same.

Philox-4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a seed and a counter into four
words of 32 bits.  The counter says for what they are: (unit, step, row of the batch, purpose of a layer and
direction).  Where a unit takes one word or two, four or two neighbouring units share a counter, which is numbered by
them.  So a draw depends on nothing else: not on the batch it lies in, its order, the tile, the device, or on whether it
is forward or backward that asks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.problem import Call, Form

INPUT, RECURRENT, RECURRENT_FROM_GATE_4, ZONEOUT = range(4)
"""Purposes.  A unit's words are those of gates, or of states; of one mask for all it is one."""
WORDS = 4
"""Of a counter."""
_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_BLOCK = 2**20  # elements drawn at a time: a few of them lie in a processor's cache, all steps at once would not


def words(seed: Tensor, unit: Tensor, step: Tensor, row: Tensor, tag: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words from 0 to 2**32 - 1, as int64, for each counter.

    Args:
        seed: int64 of no axes.
        unit, step, row: int64, of shapes that broadcast.
        tag: purpose, direction and layer, as `tag` puts them together.
    """
    a, b, c = torch.broadcast_tensors(unit, step, row)
    d = torch.full_like(a, tag)
    key, other = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        # int64 wraps, and the bits of what wraps are those of the unsigned product
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((second >> 32) & _WORD) ^ b ^ key, second & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ other, first & _WORD
        key, other = (key + _WEYL[0]) & _WORD, (other + _WEYL[1]) & _WORD
    return a, b, c, d


def drawn(seed: Tensor, count: int, width: int, step: Tensor, row: Tensor, tag: int) -> tuple[Tensor, ...]:
    """So many words of each unit, [..., width]; `step` and `row` are as in `words`, their last axis 1."""
    units = together(count)
    counter = torch.arange(-(-width // units), device=row.device)
    own = torch.stack(words(seed, counter, step, row, tag), -1)[..., : units * count]
    return own.unflatten(-1, (units, count)).flatten(-3, -2)[..., :width, :].unbind(-1)


def together(count: int) -> int:
    """How many neighbouring units share a counter, where each takes so many of its words, one after another."""
    return WORDS // count


def tag(purpose: int, layer: int, direction: int) -> int:
    """The last word of a counter."""
    return purpose | direction << 8 | layer << 16


def by_gate(gates: int) -> list[tuple[int, int]]:
    """The purposes of masks of so many gates, and how many gates each is for."""
    parts = (RECURRENT, min(gates, WORDS)), (RECURRENT_FROM_GATE_4, gates - WORDS)
    return [(purpose, count) for purpose, count in parts if count > 0]


def threshold(probability: float) -> int:
    """A word below this is an event of this probability."""
    return round(probability * 2**32)


class Given(NamedTuple):
    """Masks given for one layer and direction; None for what is not."""

    input: Tensor | None
    """[batch, inputs], or [gates, batch, inputs]: multiplies what enters the input product."""
    recurrent: Tensor | None
    """[recurrent gates, batch, width], [batch, width] or [time, batch, width], as the mode has it."""
    zoneout: tuple[Tensor | None, ...]
    """[time, batch, width] for each state: how much of it stays as it was, 1 or 0 or between."""


def given(form: Form, call: Call) -> list[Given]:
    """For each layer and direction.  In `Call.noise` a mask that is not given is a tensor without axes."""
    count = 2 + len(form.cell.states)
    if not call.noise:
        return [Given(None, None, (None,) * (count - 2))] * (form.layers * form.directions)
    found = []
    rows = [call.noise[start : start + count] for start in range(0, len(call.noise), count)]
    for row in rows:
        entering, recurrent, *zoneout = [mask if mask.dim() else None for mask in row]
        found.append(Given(entering, recurrent, tuple(zoneout)))
    return found


class Noise:
    """What one layer in one direction multiplies and keeps at random.

    Args:
        sizes: of a PackedSequence, the sequences at each step.
        like: its dtype and device are those of the masks.
        valid: bool [time, batch, 1], the steps that count; None where all do.
    """

    def __init__(
        self,
        form: Form,
        call: Call,
        given: Given,
        layer: int,
        direction: int,
        sizes: list[int] | None,
        like: Tensor,
        valid: Tensor | None,
    ) -> None:
        self._form, self._given, self._layer, self._direction = form, given, layer, direction
        self._sizes, self._like, self._seed, self._valid = sizes, like, call.marks.seed, valid
        self._time, self._batch = (call.x.shape[0], call.x.shape[1]) if sizes is None else (len(sizes), sizes[0])
        rows = call.marks.rows
        self._rows = rows if rows is not None else torch.arange(self._batch, device=like.device)
        self._steps: dict[str, Sequence[Tensor]] = {}
        self._blocks: dict[int, tuple[int, tuple[Tensor, ...]]] = {}
        self.held = self._hold()
        """The mask of the recurrent product that all steps share, [batch, width] or [recurrent gates, batch, width]."""

    def input(self, width: int) -> Tensor | None:
        """[batch, inputs] or [gates, batch, inputs], for all steps."""
        if self._given.input is not None:
            return self._given.input.to(self._like.dtype)
        probability = self._form.input_dropout
        return self._scales(self._words(INPUT, 1, width, None)[0], probability) if self._draws(probability) else None

    def recurrent(self, t: int) -> Tensor | None:
        """What the operand of the recurrent product is multiplied with, [batch, width] or [recurrent gates, ...]."""
        if self._form.recurrent_dropout_mode != "step":
            return None if self.held is None else self.held[..., : self._alive(t), :]
        if self._given.recurrent is not None:
            return self._step("recurrent", self._given.recurrent, t)
        probability = self._form.recurrent_dropout
        if not self._draws(probability):
            return None
        return self._scales(self._words(RECURRENT, 1, self._form.width, t)[0], probability)

    def keep(self, state: int, t: int, before: Tensor, after: Tensor) -> Tensor:
        """The state after a step, where zoneout keeps some of what it was (Krueger et al. 2016)."""
        mask = self._given.zoneout[state]
        if mask is not None:
            return after + self._step(f"zoneout {state}", mask, t) * (before - after)
        probability = self._form.zoneout[state] if self._form.zoneout else 0.0
        if not probability:
            return after
        if self._seed is None:
            return probability * before + (1 - probability) * after
        form = self._form
        own = self._words(ZONEOUT, len(form.cell.states), max(form.units, form.width), t)[state]
        return torch.where(own[..., : after.shape[-1]] < threshold(probability), before, after)

    def _hold(self) -> Tensor | None:
        """The mask of the recurrent product that all steps share."""
        form = self._form
        if form.recurrent_dropout_mode == "step":
            return None
        if self._given.recurrent is not None:
            return self._given.recurrent.to(self._like.dtype)
        if not self._draws(form.recurrent_dropout) or not form.cell.recurrent:
            return None
        if form.recurrent_dropout_mode == "shared":
            return self._scales(self._words(RECURRENT, 1, form.width, None)[0], form.recurrent_dropout)
        parts = by_gate(len(form.cell.recurrent))
        own = [word for purpose, count in parts for word in self._words(purpose, count, form.width, None)]
        return self._scales(torch.stack(own), form.recurrent_dropout)

    def _draws(self, probability: float) -> bool:
        return self._seed is not None and probability > 0

    def _scales(self, drawn: Tensor, probability: float) -> Tensor:
        scale = 1 / (1 - probability) if probability < 1 else 0.0
        return (drawn >= threshold(probability)).to(self._like.dtype) * scale

    def _alive(self, t: int) -> int:
        return self._batch if self._sizes is None else self._sizes[t]

    def _step(self, name: str, mask: Tensor, t: int) -> Tensor:
        if name not in self._steps:
            mask = mask.to(self._like.dtype)
            mask = mask if self._valid is None else torch.where(self._valid, mask, 0.0)
            self._steps[name] = mask.unbind(0) if self._sizes is None else mask.split(self._sizes)
        return self._steps[name][t]

    def _words(self, purpose: int, count: int, width: int, t: int | None) -> tuple[Tensor, ...]:
        """So many words for each row and unit, of step t; of step 0 for all rows where t is None."""
        assert self._seed is not None
        code, device = tag(purpose, self._layer, self._direction), self._like.device
        row = self._rows.unsqueeze(-1)
        if t is None:
            return drawn(self._seed, count, width, row.new_zeros(()), row, code)
        length = max(1, _BLOCK // max(1, self._batch * width))
        if self._blocks.get(purpose, (-1,))[0] != t // length:
            first = t // length * length
            step = torch.arange(first, min(first + length, self._time), device=device)
            self._blocks[purpose] = (t // length, drawn(self._seed, count, width, step[:, None, None], row, code))
        return tuple(word[t % length, : self._alive(t)] for word in self._blocks[purpose][1])
