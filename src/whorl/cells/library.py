"""The cells that whorl brings: torch.nn's with their options, and further ones, each with its source.

Every one can be given to `whorl.Recurrent`.  Gates stand in the order of the rows of the weights.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch.nn.functional import logsigmoid

from whorl.cells.cell import Cell, cell
from whorl.cells.expr import exp, maximum, minimum, relu, sigmoid, tanh, where
from whorl.cells.wrappers import normal

States = dict[str, Any]
Function = Callable[[Any], Any]


@lru_cache(maxsize=256)
def make_lstm(
    activation: Function = tanh,
    recurrent_activation: Function = sigmoid,
    peephole: bool = False,
    coupled: bool = False,
    layer_norm: bool = False,
) -> Cell:
    """LSTM (Hochreiter and Schmidhuber 1997) with the forget gate of Gers et al. 2000; gates i f g o.

    Args:
        activation: of the candidate and of the cell state on its way out.
        recurrent_activation: of the gates.
        peephole: the gates see the cell state, through a trained weight for each unit (Gers and Schmidhuber 2000).
        coupled: no forget gate, what is forgotten is what is not let in: f = 1 - i (Greff et al. 2015); gates i g o.
        layer_norm: the cell state is normalised over the units on its way out (Ba et al. 2016).
    """
    gates = ["i", "g", "o"] if coupled else ["i", "f", "g", "o"]
    vectors = {f"peephole_{gate}": 0.0 for gate in gates if gate != "g"} if peephole else {}
    vectors |= {"c_gain": 1.0, "c_shift": 0.0} if layer_norm else {}

    def lstm(x: Any, r: Any, s: Any, v: Any = None) -> States:
        def gate(name: str, c: Any) -> Any:
            seen = getattr(x, name) + getattr(r, name)
            return recurrent_activation(seen + getattr(v, f"peephole_{name}") * c if peephole else seen)

        i = gate("i", s.c)
        f = 1 - i if coupled else gate("f", s.c)
        c = f * s.c + i * activation(x.g + r.g)
        out = v.c_gain * normal([c])[0] + v.c_shift if layer_norm else c
        return dict(h=gate("o", c) * activation(out), c=c)

    named = {"layer_norm": layer_norm, "peephole": peephole, "coupled": coupled}
    lstm.__name__ = _name("lstm", activation, recurrent_activation, **named)
    origin = (make_lstm, (activation, recurrent_activation, peephole, coupled, layer_norm))
    return Cell(lstm, tuple(gates), ("h", "c"), vectors, origin=origin)


@lru_cache(maxsize=256)
def make_gru(activation: Function = tanh, recurrent_activation: Function = sigmoid, reset_after: bool = True) -> Cell:
    """GRU (Cho et al. 2014); gates r z n.

    Args:
        activation: of the candidate.
        recurrent_activation: of the gates.
        reset_after: the reset gate acts on the recurrent product, as in cuDNN and torch; else on the state before it,
            as in the paper.
    """

    def gru(x: Any, r: Any, s: Any) -> States:
        reset, z = recurrent_activation(x.r + r.r), recurrent_activation(x.z + r.z)
        n = activation(x.n + (reset * r.n if reset_after else r.n(reset * s.h)))
        return dict(h=n + z * (s.h - n))

    gru.__name__ = _name("gru", activation, recurrent_activation, reset_before=not reset_after)
    return Cell(gru, ("r", "z", "n"), ("h",), origin=(make_gru, (activation, recurrent_activation, reset_after)))


@lru_cache(maxsize=256)
def make_rnn(activation: Function = tanh) -> Cell:
    """Elman 1990, with any activation; gate n."""

    def rnn(x: Any, r: Any, s: Any) -> States:
        return dict(h=activation(x.n + r.n))

    rnn.__name__ = f"rnn_{_title(activation)}"
    return Cell(rnn, ("n",), ("h",), origin=(make_rnn, (activation,)))


def _name(cell: str, activation: Function, recurrent: Function, **options: bool) -> str:
    """Of a cell, for plans and profilers: its options, then what it is."""
    functions = [_title(activation)] if activation is not tanh else []
    functions += [_title(recurrent)] if recurrent is not sigmoid else []
    return "_".join([name for name, on in options.items() if on] + functions + [cell])


def _title(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__).strip("<>").lower()


lstm = make_lstm(tanh, sigmoid, False, False, False)
gru = make_gru(tanh, sigmoid, True)
rnn_tanh, rnn_relu = make_rnn(tanh), make_rnn(relu)


@cell(gates="f n", states="h")
def mgu(x: Any, r: Any, s: Any) -> States:
    """Minimal gated unit (Zhou et al. 2016): one gate that both resets and updates."""
    f = sigmoid(x.f + r.f)
    n = tanh(x.n + r.n(f * s.h))
    return dict(h=(1 - f) * s.h + f * n)


@cell(gates="z n", states="h")
def light_gru(x: Any, r: Any, s: Any) -> States:
    """Light GRU (Ravanelli et al. 2018): no reset gate, relu; layer_norm="x" for its batch norm of x."""
    z = sigmoid(x.z + r.z)
    return dict(h=z * s.h + (1 - z) * relu(x.n + r.n))


@cell(gates="i f z o", states="h c n m")
def slstm(x: Any, r: Any, s: Any) -> States:
    """sLSTM (Beck et al. 2024, xLSTM): exponential input gate, normaliser n, and the stabiliser m of its log."""
    i, log_f = x.i + r.i, logsigmoid(x.f + r.f)
    m = where(s.n == 0.0, i, maximum(log_f + s.m, i))  # at the start there is nothing to forget, however small i is
    # The exponents are at most 0, but the first at the start: there it multiplies 0, and must not be infinite.
    kept, let_in = exp(minimum(log_f + s.m - m, 60.0)), exp(i - m)
    c = kept * s.c + let_in * tanh(x.z + r.z)
    n = kept * s.n + let_in
    return dict(h=sigmoid(x.o + r.o) * c / n, c=c, n=n, m=m)


@cell(
    gates="r n z",
    states="h",
    vectors={f"{kind}_{gate}": start for kind, start in (("gain", 1.0), ("shift", 0.0)) for gate in "rnz"},
)
def dreamer_gru(x: Any, r: Any, s: Any, v: Any) -> States:
    """The layer-norm GRU of Dreamer (Hafner et al. 2021, 2023): one norm over all gates, eps 1e-3, update bias -1."""
    parts = normal([x.r + r.r, x.n + r.n, x.z + r.z], eps=1e-3)
    reset, n, z = (getattr(v, f"gain_{g}") * p + getattr(v, f"shift_{g}") for g, p in zip("rnz", parts, strict=True))
    z = sigmoid(z - 1)
    return dict(h=z * tanh(sigmoid(reset) * n) + (1 - z) * s.h)


@cell(gates="i f g o k p", states="h c", x_only="p")
def augmented_lstm(x: Any, r: Any, s: Any) -> States:
    """LSTM with a highway around it (He et al. 2017), as AllenNLP has it: k lets the output through, p is the way."""
    i, f, o = sigmoid(x.i + r.i), sigmoid(x.f + r.f), sigmoid(x.o + r.o)
    c = i * tanh(x.g + r.g) + f * s.c
    k = sigmoid(x.k + r.k)
    return dict(h=k * o * tanh(c) + (1 - k) * x.p, c=c)


@cell(gates="g k a b", states="h", inputs="elapsed")
def cfc(x: Any, r: Any, s: Any) -> States:
    """Closed-form continuous-time cell (Hasani et al. 2022), ncps' without a backbone; `elapsed`: a step's time."""
    late = sigmoid((x.a + r.a) * x.elapsed + (x.b + r.b))
    return dict(h=tanh(x.g + r.g) * (1 - late) + late * tanh(x.k + r.k))


@cell(gates="n", states="h", vectors={"u": 1.0}, x_only="n")
def ind_rnn(x: Any, r: Any, s: Any, v: Any) -> States:
    """IndRNN (Li et al. 2018): each unit sees its own past alone, through a trained weight."""
    return dict(h=relu(x.n + v.u * s.h))


@cell(gates="r z n", states="h", inputs="gap")
def gru_d(x: Any, r: Any, s: Any) -> States:
    """GRU whose state decays over gaps (GRU-D, Che et al. 2018); `gap`: W d + b of the time d since each was seen."""
    h = exp(-relu(x.gap)) * s.h
    reset, z = sigmoid(x.r + r.r(h)), sigmoid(x.z + r.z(h))
    n = tanh(x.n + r.n(reset * h))
    return dict(h=(1 - z) * h + z * n)
