"""What enters the products of whole matrices by cuBLAS: the input product of all steps, and gradients of weights."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whorl.engines.cuda.options import Options
from whorl.engines.cuda.products import product
from whorl.engines.cuda.staged import Link


class Dropped:
    """What the mask leaves of an input.

    Args:
        mask: float32 [batch, inputs], or [gates, batch, inputs] where each gate has one.
        given: it was not drawn, and has a gradient.
        tf32: float32 is multiplied in TF32.
    """

    def __init__(self, mask: Tensor, options: Options, given: bool, tf32: bool) -> None:
        self._mask, self._options, self._given, self._tf32 = mask, options, given, tf32

    def projected(self, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        """x of every gate at every step, [rows, gates x units], in float32 where `wide`."""
        entered = self._entered(x)
        if entered.dim() == x.dim():
            return product(entered, weight.t(), tf32=self._tf32, wide=wide)
        gates = zip(entered, weight.split(self._options.form.units), strict=True)
        return torch.cat([product(part, w.t(), tf32=self._tf32, wide=wide) for part, w in gates], -1)

    def gradients(
        self, to_gates: Tensor, x: Tensor, weight: Tensor, wanted: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Of x [rows, inputs] where it is `wanted`, of the weight, and of the mask where it has one."""
        entered, gates = self._entered(x), to_gates.split(self._options.form.units, 1)
        by_gate = entered.dim() > x.dim()
        if by_gate:
            pairs = zip(gates, entered, strict=True)
            to_weight = torch.cat([product(part.t(), each, tf32=self._tf32) for part, each in pairs])
        else:
            to_weight = product(to_gates.t(), entered, tf32=self._tf32)
        if not (wanted or self._given):
            return None, to_weight, None
        if by_gate:
            pairs = zip(gates, weight.split(self._options.form.units), strict=True)
            to_entered = torch.stack([self._product(part, w) for part, w in pairs])
        else:
            to_entered = self._product(to_gates, weight)
        if not self._given and to_entered.dim() == x.dim():
            return self._options.masked(to_entered, self._mask), to_weight, None
        to_x = to_entered * self._by_row(x)
        to_x = to_x.sum(0) if to_x.dim() > x.dim() else to_x
        to_mask = _by_sequence(to_entered * x, self._options) if self._given else None
        return to_x.to(x.dtype), to_weight, to_mask

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """In float32 for the gradient of a mask: a sum over the steps, which may cancel."""
        return product(a, b, tf32=self._tf32, wide=self._given)

    def _entered(self, x: Tensor) -> Tensor:
        return self._options.masked(x, self._mask)

    def _by_row(self, x: Tensor) -> Tensor:
        """The mask for each row of x."""
        mask, options = self._mask, self._options
        if options.sequences is not None:
            return mask[..., options.sequences, :]
        each = mask.unsqueeze(-3).expand(*mask.shape[:-2], options.time, *mask.shape[-2:])
        return each.reshape(*mask.shape[:-2], *x.shape)


class ByGate:
    """What entered the recurrent products of each gate, behind a mask of its own that is held over all steps.

    Args:
        mask: float32 [gates, batch, units] of the first recurrent gates, which is multiplied with `scale`; what enters
            the product of another has none.
        rows: the first state before each step, [rows, units], then what entered each round of products inside the step.
        links: the results of products; None: one of each gate with the first state.
    """

    def __init__(
        self, mask: Tensor, scale: float, rows: Sequence[Tensor], links: Sequence[Link] | None, options: Options
    ) -> None:
        self._mask, self._scale, self._rows, self._options = mask, scale, rows, options
        self._at_once = links is None
        self._links = [Link(gate, 0) for gate in range(len(mask))] if links is None else links

    def __getitem__(self, link: int | slice) -> Any:
        """[rows, units] in the layer's dtype; of several, where each gate has one, [gates, rows, units]."""
        return self._entered[link]

    @cached_property
    def _entered(self) -> Tensor | list[Tensor]:
        """The same of all."""
        if self._at_once:
            return self._options.masked(self._rows[0], self._mask, self._scale)
        rows = [self._rows[link.round] for link in self._links]
        for place, link in enumerate(self._links):
            if link.gate < len(self._mask):
                rows[place] = self._options.masked(rows[place], self._mask[link.gate], self._scale)
        return rows

    def enter(self) -> None:
        """Make that on the current stream, for products on others."""
        _ = self._entered

    def gradient(self, parts: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Of the mask.

        Args:
            parts: gradients of the result of each link, [rows, units].
            weight: [recurrent gates x units, units].
        """
        found, each = torch.zeros_like(self._mask), weight.split(self._options.form.units)
        for link, part in zip(self._links, parts, strict=True):
            if link.gate >= len(self._mask):
                continue
            to_operand = product(part, each[link.gate], wide=True)
            found[link.gate] += _by_sequence(to_operand * self._rows[link.round], self._options)
        return found


def _by_sequence(rows: Tensor, options: Options) -> Tensor:
    """The sum over the steps, [..., batch, features]."""
    if options.sequences is None:
        return rows.unflatten(-2, (options.time, options.batch)).sum(-3)
    made = rows.new_zeros(*rows.shape[:-2], options.batch, rows.shape[-1])
    return made.index_add_(-2, options.sequences, rows)
