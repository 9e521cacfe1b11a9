"""The input product of all steps of a layer and direction, and its gradients: products of whole matrices by cuBLAS."""

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.engines.cuda.options import Options


def projected(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x of every gate at every step, [rows, gates x units], as a kernel reads it."""
    if dtype == x.dtype:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.T, out_dtype=dtype)
    return torch.addmm(bias.to(dtype), x, weight.T, out_dtype=dtype)


class Dropped:
    """The same behind a mask of input dropout.

    Args:
        mask: float32 [batch, inputs], or [gates, batch, inputs] where each gate has one.
    """

    def __init__(self, mask: Tensor, options: Options) -> None:
        self._mask, self._options = mask, options

    def projected(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """As `projected`."""
        entered = self._entered(x)
        if entered.dim() == x.dim():
            return projected(entered, weight, bias, dtype)
        units = self._options.form.units
        biases = bias.split(units) if bias is not None else [None] * len(entered)
        gates = zip(entered, weight.split(units), biases, strict=True)
        return torch.cat([projected(part, w, b, dtype) for part, w, b in gates], -1)

    def gradients(self, to_gates: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of x [rows, inputs], of the weight, and of the mask."""
        entered, units = self._entered(x), self._options.form.units
        if entered.dim() == x.dim():
            to_entered = torch.mm(to_gates, weight)
            to_weight = torch.mm(to_gates.t(), entered)
        else:
            gates = [part.contiguous() for part in to_gates.split(units, 1)]
            weights = weight.split(units)
            to_entered = torch.stack([torch.mm(part, w) for part, w in zip(gates, weights, strict=True)])
            to_weight = torch.cat([torch.mm(part.t(), each) for part, each in zip(gates, entered, strict=True)])
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
