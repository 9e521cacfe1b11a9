"""The error rule: how far the numbers of an engine may be from float64.

The error of a tensor is its relative 2-norm against float64.  The baseline is `PlainLoop`, plain torch that rounds
only what enters a product and keeps float32 states; the bound is twice the baseline's error plus 4 eps.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
TF32_EPS = 2.0**-10


def to_dtype(dtype: torch.dtype) -> Rounding:
    """Rounds a tensor to the values that `dtype` has, and gives it in its own dtype."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)


def to_tf32(tensor: Tensor) -> Tensor:
    """float32 rounded to the 10 bits of mantissa that TF32 has, to the nearest, ties away from zero.

    >>> to_tf32(torch.tensor([1 + 2**-11, 1 + 2**-12])).tolist() == [1 + 2**-10, 1]
    True
    """
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def error(got: Tensor, truth: Tensor) -> float:
    """The relative 2-norm of the difference; infinite where only one is zero, or where a number is not finite."""
    assert got.shape == truth.shape, f"{tuple(got.shape)} in place of {tuple(truth.shape)}"
    distance, norm = (got.double() - truth).norm().item(), truth.norm().item()
    return 0.0 if distance == 0 else distance / norm if norm and math.isfinite(distance) else math.inf


class _Product(torch.autograd.Function):
    """a @ w.T, forward and backward, of rounded operands and nothing else rounded.

    Takes a, w, w as it is rounded (once for all steps, which keep it in common), and the rounding.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, rounded: Tensor, rounding: Rounding) -> Tensor:
        a = rounding(a)
        ctx.rounding = rounding
        ctx.save_for_backward(a, rounded)
        return a @ rounded.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (a, rounded), grad = ctx.saved_tensors, ctx.rounding(grad)
        return grad @ rounded, grad.flatten(0, -2).T @ a.flatten(0, -2), None, None


class PlainLoop(torch.nn.Module):
    """The baseline of the error rule: a dense layer as a loop over time in float32 (float64 for float64)."""

    def __init__(self, layer: torch.nn.RNNBase, rounding: Rounding | None = None) -> None:
        """A copy of `layer`'s weights.

        Args:
            rounding: of what enters a product; None: to the layer's dtype.
        """
        super().__init__()
        dtype = next(layer.parameters()).dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.layer = [layer]  # in a list, so that its parameters are not this module's
        self.rounding = rounding or to_dtype(dtype)
        for name, weight in layer.named_parameters():
            self.register_parameter(name, torch.nn.Parameter(weight.detach().to(wide), weight.requires_grad))

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, list[Tensor]]:
        """The output and each final state, as a list whether the cell has one state or two."""
        form = self.layer[0]
        unbatched = x.dim() == 2
        states = [] if hx is None else [hx] if isinstance(hx, Tensor) else list(hx)
        ends: list[list[Tensor]] = []
        if unbatched:
            x, states = x.unsqueeze(1), [state.unsqueeze(1) for state in states]
        elif form.batch_first:
            x = x.transpose(0, 1)
        zeros = [x.new_zeros(x.shape[1], form.hidden_size)] * (1 + (form.mode == "LSTM"))
        for layer in range(form.num_layers):
            outs = []
            for suffix in [f"_l{layer}", f"_l{layer}_reverse"][: 1 + form.bidirectional]:
                out, end = self._sweep(x, [state[len(ends)] for state in states] or zeros, suffix)
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, -1)
            if form.dropout and layer < form.num_layers - 1:
                x = F.dropout(x, form.dropout, form.training)
        finals = [torch.stack(end) for end in zip(*ends, strict=True)]
        if unbatched:
            return x.squeeze(1), [final.squeeze(1) for final in finals]
        return x.transpose(0, 1) if form.batch_first else x, finals

    def _sweep(self, x: Tensor, state: list[Tensor], suffix: str) -> tuple[Tensor, list[Tensor]]:
        w_ih, w_hh = (getattr(self, kind + suffix) for kind in ("weight_ih", "weight_hh"))
        b_ih, b_hh = (getattr(self, kind + suffix, x.new_zeros(())) for kind in ("bias_ih", "bias_hh"))
        weights = [(w, self.rounding(w.detach()), self.rounding) for w in (w_ih, w_hh)]
        outs: list[Tensor] = []
        for step in x.flip(0) if suffix.endswith("reverse") else x:
            a = _Product.apply(step, *weights[0]) + b_ih
            b = _Product.apply(state[0], *weights[1]) + b_hh
            state = self._step(a, b, state)
            outs.append(state[0])
        return torch.stack(outs[::-1] if suffix.endswith("reverse") else outs), state

    def _step(self, a: Tensor, b: Tensor, state: list[Tensor]) -> list[Tensor]:
        mode = self.layer[0].mode
        if mode == "LSTM":
            i, f, g, o = (a + b).chunk(4, -1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            return [torch.sigmoid(o) * torch.tanh(c), c]
        if mode == "GRU":
            (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
            z, n = torch.sigmoid(az + bz), torch.tanh(an + torch.sigmoid(ar + br) * bn)
            return [(1 - z) * n + z * state[0]]
        return [torch.tanh(a + b) if mode == "RNN_TANH" else F.relu(a + b)]
