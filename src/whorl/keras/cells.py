"""What a cell of Keras is to whorl: the plain values of its sweep, and its tensors."""

from functools import lru_cache
from typing import Any

import keras

from whorl.cells.cell import Cell
from whorl.cells.library import make_gru, make_lstm, make_rnn
from whorl.errors import CellError
from whorl.keras.activations import pointwise
from whorl.keras.sweep import Part
from whorl.problem import Form

_KINDS = {keras.layers.LSTMCell: "LSTM", keras.layers.GRUCell: "GRU", keras.layers.SimpleRNNCell: "SimpleRNN"}


def part_of(cell: Any, engine: str = "auto") -> Part | str:
    """What a built cell is, or why only Keras' own loop can run it."""
    kind = _KINDS.get(type(cell))
    if kind is None:
        return (
            f"{type(cell).__name__} is a cell of Keras whose call is any code: write its step as @whorl.cell and use "
            "whorl.keras.Cell"
        )
    recurrent_activation = None if kind == "SimpleRNN" else cell.recurrent_activation
    reset_after = getattr(cell, "reset_after", True)
    inputs = cell.kernel.shape[0]
    return _part(kind, inputs, cell.units, cell.use_bias, cell.activation, recurrent_activation, reset_after, engine)


@lru_cache(maxsize=1024)
def _part(
    kind: str,
    inputs: int,
    units: int,
    bias: bool,
    activation: Any,
    recurrent_activation: Any,
    reset_after: bool,
    engine: str,
) -> Part | str:
    try:
        made = _make(kind, activation, recurrent_activation, reset_after)
    except CellError as error:
        return str(error)
    return Part(kind, Form(cell=made.graph, inputs=inputs, units=units, bias=bias).to_json(), engine)


def _make(kind: str, activation: Any, recurrent_activation: Any, reset_after: bool) -> Cell:
    if kind == "SimpleRNN":
        return make_rnn(pointwise(activation))
    if kind == "GRU":
        return make_gru(pointwise(activation), pointwise(recurrent_activation), reset_after)
    return make_lstm(pointwise(activation), pointwise(recurrent_activation), False, False, False)


def weights_of(cell: Any) -> tuple[Any, ...]:
    """kernel, recurrent_kernel and bias, as the backend's tensors in the dtype that the cell computes in."""
    variables = [cell.kernel, cell.recurrent_kernel, *([cell.bias] if cell.use_bias else [])]
    return tuple([keras.ops.convert_to_tensor(variable, cell.compute_dtype) for variable in variables])


def masks_of(cell: Any, sequences: Any, state: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What dropout multiplies the input and the recurrent operand with: what Keras has drawn for this call."""
    return tuple_of(cell.get_dropout_mask(sequences[:, 0, :])), tuple_of(cell.get_recurrent_dropout_mask(state))


def tuple_of(value: Any) -> tuple[Any, ...]:
    """None, one or several, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
