"""Cells as a user would write them, at the top of a module, for every test that needs more than the built-in ones."""

from typing import Any

import torch

import whorl
from whorl import clip, erf, exp, log, log1p, maximum, mean, minimum, relu, rsqrt, sigmoid, sin, softplus, sqrt, where
from whorl.cells import library

States = dict[str, Any]


def normal(values: list[Any]) -> list[Any]:
    """Layer norm over all units and all of `values`: biased variance, eps 1e-5 (Ba et al. 2016)."""
    middle = mean(values)
    apart = [value - middle for value in values]
    scale = rsqrt(mean([value * value for value in apart]) + 1e-5)
    return [value * scale for value in apart]


@whorl.cell(gates="i f g o", states="h c", vectors={"gamma": 1.0, "beta": 0.0})
def layer_norm_lstm(x: Any, r: Any, s: Any, v: Any) -> States:
    x_i, x_f, x_g, x_o = normal([x.i, x.f, x.g, x.o])
    r_i, r_f, r_g, r_o = normal([r.i, r.f, r.g, r.o])
    c = sigmoid(x_f + r_f) * s.c + sigmoid(x_i + r_i) * torch.tanh(x_g + r_g)
    (scaled,) = normal([c])
    return dict(h=sigmoid(x_o + r_o) * torch.tanh(v.gamma * scaled + v.beta), c=c)


@whorl.cell(gates="r z n", states="h")
def gru_before(x: Any, r: Any, s: Any) -> States:
    """Cho et al. 2014 as first written: the reset gate acts before the product."""
    reset, z = sigmoid(x.r + r.r), sigmoid(x.z + r.z)
    n = torch.tanh(x.n + r.n(reset * s.h))
    return dict(h=z * s.h + (1 - z) * n)


@whorl.cell(gates="a b c d e f g k", states="h c n m", vectors={"w": 0.5}, inputs="dt", x_only="k")
def four_states(x: Any, r: Any, s: Any, v: Any) -> States:
    """The stabilised exponential gates of sLSTM (Beck et al. 2024), and every operation that no other cell has."""
    i, f = x.a + r.a, -softplus(-(x.b + r.b))
    m = maximum(f + s.m, i)
    i, f = exp(i - m), exp(f + s.m - m)
    late = (x.dt > 0.5) & ~(s.c < -2.0) | (x.k == 0.0) | (x.k != x.k)
    c = where(late, f * s.c + i * erf(x.c + r.c), clip(s.c, -1.5, 1.5) - log1p(abs(x.k)))
    n = f * abs(s.n) + i + sqrt(abs(x.d + r.d) + 0.1)
    wave = sin(x.e + r.e) * torch.cos(v.w * x.dt) + torch.expm1(-relu(x.f + r.f))
    h = minimum(x.g + r.g, 2.0) * c / (0.1 + n) + wave / (1.0 + n**3) - 0.1 * log(n) * n**0.5
    return dict(h=h, c=c, n=n, m=m)


@whorl.cell(gates="a n", states="h c d e", x_only="n")
def odd_ends(x: Any, r: Any, s: Any) -> States:
    """Products and means of each other, of numbers and of states; states that are a leaf, a number or a collective."""
    level = mean(s.h * mean(x.n))
    inner = r.a(level * s.h)
    late = inner > level
    outer = r.a(where(late, sigmoid(inner), s.d)) + r.a(0.25) + r.a(s.h)
    return dict(h=torch.tanh(outer) + where(late, s.c, 0.0), c=s.h, d=mean([x.a, mean(2.0)]), e=1.5)


BUILT_IN = [library.lstm, library.gru, library.rnn_tanh, library.rnn_relu]
USER = [layer_norm_lstm, gru_before, four_states, odd_ends]
CELLS = {cell.name: cell for cell in BUILT_IN + USER}


@whorl.cell(gates="a b", states="h")
def of_a_constant(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=whorl.tanh(x.a + r.a + 0.5 * r.b(0.7)))
