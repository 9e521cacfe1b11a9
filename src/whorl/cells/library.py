"""The built-in cells, as torch.nn defines them (gates i f g o and r z n; GRU with the reset after the product)."""

from typing import Any

from whorl.cells.cell import cell
from whorl.cells.expr import relu, sigmoid, tanh

States = dict[str, Any]


@cell(gates="i f g o", states="h c")
def lstm(x: Any, r: Any, s: Any) -> States:
    """Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000."""
    i, f, o = sigmoid(x.i + r.i), sigmoid(x.f + r.f), sigmoid(x.o + r.o)
    c = f * s.c + i * tanh(x.g + r.g)
    return dict(h=o * tanh(c), c=c)


@cell(gates="r z n", states="h")
def gru(x: Any, r: Any, s: Any) -> States:
    """Cho et al. 2014, in the form of cuDNN: the reset gate acts on the product."""
    reset, z = sigmoid(x.r + r.r), sigmoid(x.z + r.z)
    n = tanh(x.n + reset * r.n)
    return dict(h=n + z * (s.h - n))


@cell(gates="n", states="h")
def rnn_tanh(x: Any, r: Any, s: Any) -> States:
    """Elman 1990."""
    return dict(h=tanh(x.n + r.n))


@cell(gates="n", states="h")
def rnn_relu(x: Any, r: Any, s: Any) -> States:
    """Elman's with relu (Le et al. 2015)."""
    return dict(h=relu(x.n + r.n))
