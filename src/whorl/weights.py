"""Names and orders of weights: the only file that knows how torch, cuDNN and Keras order what a layer holds."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from whorl.cells import library
from whorl.problem import Form

OfGate = TypeVar("OfGate")

# The numbers by which torch's native operators call the cells, by what the cell computes.
NATIVE_MODES = {
    library.rnn_relu.graph.fingerprint: 0,
    library.rnn_tanh.graph.fingerprint: 1,
    library.lstm.graph.fingerprint: 2,
    library.gru.graph.fingerprint: 3,
}


class LayerWeights(NamedTuple):
    """The weights of one layer and direction; None for what it has not."""

    ih: Tensor
    """[gates x units, inputs], gates in declared order."""
    hh: Tensor | None
    """[recurrent gates x units, width]; None where no gate is recurrent."""
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    hr: Tensor | None
    """[projection, units]."""
    vectors: tuple[Tensor, ...]


@lru_cache(maxsize=1024)
def kinds(form: Form) -> tuple[str, ...]:
    """What one layer and direction holds, in torch's order: `weight_ih`, `weight_hh`, ..."""
    recurrent = ("ih", "hh") if form.cell.recurrent else ("ih",)
    biases = [f"bias_{kind}" for kind in recurrent] if form.bias else []
    projection = ["weight_hr"] if form.projection else []
    vectors = [f"vector_{name}" for name in form.cell.vectors]
    return (*(f"weight_{kind}" for kind in recurrent), *biases, *projection, *vectors)


@lru_cache(maxsize=1024)
def names(form: Form) -> tuple[str, ...]:
    """The parameter names of a layer, in torch's order: `weight_ih_l0`, ..., `weight_ih_l0_reverse`, ..."""
    suffixes = ("", "_reverse")[: form.directions]
    return tuple(
        f"{kind}_l{layer}{suffix}" for layer in range(form.layers) for suffix in suffixes for kind in kinds(form)
    )


@lru_cache(maxsize=1024)
def shapes(form: Form) -> tuple[tuple[int, ...], ...]:
    """The shape of each weight, in the order of `names`."""
    rows, recurrent = len(form.cell.gates) * form.units, len(form.cell.recurrent) * form.units
    found: list[tuple[int, ...]] = []
    for layer in range(form.layers):
        shape = {
            "weight_ih": (rows, form.layer_inputs(layer)),
            "weight_hh": (recurrent, form.width),
            "bias_ih": (rows,),
            "bias_hh": (recurrent,),
            "weight_hr": (form.projection, form.units),
        }
        found += [shape.get(kind, (form.units,)) for kind in kinds(form)] * form.directions
    return tuple(found)


def split(form: Form, weights: Sequence[Tensor]) -> list[LayerWeights]:
    """The weights of each layer and direction, from the flat order of `names`."""
    count = len(kinds(form))
    made = []
    for start in range(0, len(weights), count):
        rest, recurrent = iter(weights[start : start + count]), bool(form.cell.recurrent)
        ih, hh = next(rest), next(rest) if recurrent else None
        bias_ih = next(rest) if form.bias else None
        bias_hh = next(rest) if form.bias and recurrent else None
        made.append(LayerWeights(ih, hh, bias_ih, bias_hh, next(rest) if form.projection else None, tuple(rest)))
    return made


def join(parts: Sequence[LayerWeights]) -> list[Tensor]:
    """The flat order of `names`, from the weights of each layer and direction."""
    return [tensor for part in parts for tensor in (*part[:5], *part.vectors) if tensor is not None]


_KERAS_GATES = {"GRU": (1, 0, 2)}
"""The place in Keras' order of each gate here, where they differ: its z r h are r z n.  Back again it is the same."""


def reordered(layer: str, gates: Sequence[OfGate]) -> list[OfGate]:
    """What there is of each gate, from Keras' order to the cell's, or back.

    Args:
        layer: the class of Keras whose order it is: "LSTM", "GRU", "SimpleRNN", or another that has the cell's own.
    """
    return [gates[place] for place in _KERAS_GATES[layer]] if layer in _KERAS_GATES else list(gates)


def from_keras(layer: str, kernel: Tensor, recurrent_kernel: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    """What `kinds` lists of a layer and direction, from the weights of a layer of Keras; differentiable.

    Args:
        layer: the class of Keras: "LSTM", "GRU" or "SimpleRNN".
        kernel: [inputs, gates x units].
        recurrent_kernel: [units, gates x units].
        bias: [gates x units], or [2, gates x units] of a GRU with `reset_after`; None where there is none.

    >>> [tuple(part.shape) for part in from_keras("LSTM", torch.zeros(3, 8), torch.zeros(2, 8), torch.zeros(8))]
    [(8, 3), (8, 2), (8,), (8,)]
    """
    parts = [kernel.t(), recurrent_kernel.t()]
    if bias is not None:
        parts += bias.unbind(0) if bias.dim() == 2 else (bias, torch.zeros_like(bias))
    return tuple([_other_order(layer, part) for part in parts])


def to_keras(layer: str, weights: Sequence[Tensor], reset_after: bool = True) -> list[Tensor]:
    """The weights of a layer of Keras in its own order, from `weight_ih`, `weight_hh` and, where it has them, biases.

    Args:
        layer: "LSTM", "GRU" or "SimpleRNN".
        reset_after: of a GRU: whether it has a bias for each product; the others have the sum of both.

    >>> lstm = whorl.LSTM(3, 2)
    >>> [tuple(part.shape) for part in to_keras("LSTM", list(lstm.parameters()))]
    [(3, 8), (2, 8), (8,)]
    """
    ih, hh, *biases = [_other_order(layer, part) for part in weights]
    bias = [torch.stack(biases) if layer == "GRU" and reset_after else biases[0] + biases[1]] if biases else []
    return [ih.t(), hh.t(), *bias]


def _other_order(layer: str, rows: Tensor) -> Tensor:
    """[gates x units, ...] in the cell's order from Keras', or back."""
    if layer not in _KERAS_GATES:
        return rows
    return torch.cat(reordered(layer, rows.chunk(len(_KERAS_GATES[layer]))))


def from_cudnn_keras(kernel: Any, recurrent_kernel: Any, bias: Any) -> tuple[Any, Any, Any]:
    """The weights of a Keras LSTM, or of a GRU with `reset_after`, from those of CuDNNLSTM or CuDNNGRU.

    Theirs are cuDNN's own buffers: each gate of the kernels is a matrix the other way round, and there are two biases.
    The formulas are those by which Keras 2 itself loads such a file into LSTM and GRU.

    Args:
        kernel: numpy [inputs, gates x units]; 4 gates of an LSTM, 3 of a GRU.
        recurrent_kernel: numpy [units, gates x units].
        bias: numpy [2 x gates x units].

    >>> import numpy
    >>> [part.shape for part in from_cudnn_keras(*map(numpy.zeros, ((3, 8), (2, 8), (16,))))]
    [(3, 8), (2, 8), (8,)]
    >>> from_cudnn_keras(*map(numpy.zeros, ((3, 6), (2, 6), (12,))))[2].shape
    (2, 6)
    """
    gates = recurrent_kernel.shape[1] // recurrent_kernel.shape[0]
    turned = [gate.T.reshape(gate.shape, order="F") for gate in np.split(kernel, gates, 1)]
    recurrent = [gate.T for gate in np.split(recurrent_kernel, gates, 1)]
    biases = bias.reshape(2, -1)
    return np.concatenate(turned, 1), np.concatenate(recurrent, 1), biases.sum(0) if gates == 4 else biases
