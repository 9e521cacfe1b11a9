"""The input product of all steps of a layer and direction behind a mask of input dropout, and its gradients."""

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.engines.cuda.options import Options
from whorl.engines.cuda.products import product


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x of every gate at every step with its bias, [rows, gates x units], of two bytes; in `dtype`."""
    if dtype == x.dtype:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.T, out_dtype=dtype)
    return torch.addmm(bias.to(dtype), x, weight.T, out_dtype=dtype)


class Dropped:
    """What the mask leaves of an input.

    Args:
        mask: float32 [batch, inputs], or [gates, batch, inputs] where each gate has one.
        tf32: float32 is multiplied in TF32.
    """

    def __init__(self, mask: Tensor, options: Options, tf32: bool) -> None:
        self._mask, self._options, self._tf32 = mask, options, tf32

    def projected(self, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        """x of every gate at every step, [rows, gates x units], in float32 where `wide`."""
        entered = self._entered(x)
        if entered.dim() == x.dim():
            return product(entered, weight.t(), tf32=self._tf32, wide=wide)
        gates = zip(entered, weight.split(self._options.form.units), strict=True)
        return torch.cat([product(part, w.t(), tf32=self._tf32, wide=wide) for part, w in gates], -1)

    def gradients(self, to_gates: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x [rows, inputs], of the weight, and of the mask."""
        entered, units = self._entered(x), self._options.form.units
        if entered.dim() == x.dim():
            to_entered = product(to_gates, weight, tf32=self._tf32)
            to_weight = product(to_gates.t(), entered, tf32=self._tf32)
        else:
            gates = to_gates.split(units, 1)
            pairs = zip(gates, weight.split(units), strict=True)
            to_entered = torch.stack([product(part, w, tf32=self._tf32) for part, w in pairs])
            pairs = zip(gates, entered, strict=True)
            to_weight = torch.cat([product(part.t(), each, tf32=self._tf32) for part, each in pairs])
        to_x, to_mask = to_entered * self._by_row(x), to_entered.float() * x
        if to_x.dim() > x.dim():
            to_x = to_x.sum(0)
        return to_x.reshape(x.shape).to(x.dtype), to_weight, self._by_sequence(to_mask)

    def _entered(self, x: Tensor) -> Tensor:
        return (x * self._by_row(x)).to(x.dtype)

    def _by_row(self, x: Tensor) -> Tensor:
        """The mask for each row of x."""
        mask, options = self._mask, self._options
        if options.sequences is not None:
            return mask[..., options.sequences, :]
        each = mask.unsqueeze(-3).expand(*mask.shape[:-2], options.time, *mask.shape[-2:])
        return each.reshape(*mask.shape[:-2], *x.shape)

    def _by_sequence(self, rows: Tensor) -> Tensor:
        """The sum over the steps, [..., batch, inputs]."""
        options = self._options
        if options.sequences is None:
            return rows.unflatten(-2, (options.time, options.batch)).sum(-3)
        made = rows.new_zeros(*rows.shape[:-2], options.batch, rows.shape[-1])
        return made.index_add_(-2, options.sequences, rows)
