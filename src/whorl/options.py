"""The options of a layer: what each takes, what it means, and the form and cell that they make."""

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch.nn.functional as F

from whorl.cells import expr
from whorl.cells.cell import Cell, Graph
from whorl.cells.library import make_gru, make_lstm, make_rnn
from whorl.cells.wrappers import clipped, layer_norm
from whorl.errors import CellError, InputError

ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": expr.tanh,
    "sigmoid": expr.sigmoid,
    "relu": expr.relu,
    "softplus": expr.softplus,
    "linear": operator.pos,
    "hard_sigmoid": F.hardsigmoid,
    **{name: getattr(F, name) for name in "elu selu celu gelu silu mish leaky_relu relu6 hardtanh softsign".split()},
}
"""Activations by name; hard_sigmoid is relu6(x + 3) / 6, as in Keras 3."""
MODES = ("gate", "shared", "step")


def _is(values: str, meaning: str) -> dict[str, str]:
    """What an option takes besides its default, and what it means."""
    return {"values": values, "meaning": meaning}


@dataclass(frozen=True)
class Options:
    """What a layer takes beside torch's arguments, as its user wrote it."""

    recurrent_dropout: float = field(
        default=0.0,
        metadata=_is(
            "0 to 1",
            "In training, what enters the recurrent product is multiplied with a mask: 0 with this probability, else "
            "1 / (1 - it); a in a product r.n(a) too. The state itself and the output are not (Gal and Ghahramani "
            "2016).",
        ),
    )
    recurrent_dropout_mode: str = field(
        default="gate",
        metadata=_is(
            '"gate", "shared", "step"',
            "A mask for each gate held over all steps, as in Keras; one for all gates held over all steps; or one for "
            "all gates drawn anew at each step.",
        ),
    )
    input_dropout: float = field(
        default=0.0,
        metadata=_is(
            "0 to 1", "In training, the input of each layer is multiplied with a mask that is held over all steps."
        ),
    )
    weight_drop: float = field(
        default=0.0,
        metadata=_is(
            "0 to 1",
            "In training, each recurrent weight is 0 with this probability, else divided by 1 - it, one draw a call "
            "(Wan et al. 2013, Merity et al. 2017).",
        ),
    )
    zoneout: Any = field(
        default=0.0,
        metadata=_is(
            "0 to 1, or {state: 0 to 1}",
            "In training, each unit of a state keeps its value of the step before with this probability; in eval it is "
            "the mean of the two so weighted (Krueger et al. 2016).",
        ),
    )
    layer_norm: Any = field(
        default=False,
        metadata=_is(
            'True, or of "x r c"',
            "The input product (x) and the recurrent one (r), biases included, are normalised over all gates and units "
            "jointly, and LSTM's c over the units on its way out; eps 1e-5, a trained gain (1) and shift (0) for each "
            "unit (Ba et al. 2016). True is all that the cell has. A product r.n(a) is normalised on its own.",
        ),
    )
    peephole: bool = field(
        default=False,
        metadata=_is(
            "True",
            "LSTM's gates see c through a trained weight for each unit, 0 at first; o sees the new one (Gers and "
            "Schmidhuber 2000).",
        ),
    )
    coupled: bool = field(
        default=False,
        metadata=_is(
            "True", "LSTM without a forget gate: f = 1 - i; the weights have the gates i g o (Greff et al. 2015)."
        ),
    )
    clip: Any = field(
        default=None,
        metadata=_is(
            "above 0, or {state: above 0}",
            "New states are held between -clip and clip, before anything reads them; a projection comes after.",
        ),
    )
    reset_after: bool = field(
        default=True,
        metadata=_is(
            "False",
            "GRU's reset gate acts on the recurrent product, as in cuDNN and torch; with False on the state before "
            "it, as in Cho et al. 2014.",
        ),
    )
    activation: Any = field(
        default=None,
        metadata=_is(
            "a function, or a name", "In the place of tanh: of the candidate, and of LSTM's c on its way out."
        ),
    )
    recurrent_activation: Any = field(
        default=None, metadata=_is("a function, or a name", "In the place of sigmoid: of the gates.")
    )
    memory: str = field(
        default="save",
        metadata=_is(
            '"save", "recompute"',
            "Backward reads what forward saved, or runs forward again: less memory, more time, the same numbers (of "
            "engine `onednn` without AVX-512 outputs are those of inference, a rounding away).",
        ),
    )

    def __post_init__(self) -> None:
        for name in ("recurrent_dropout", "input_dropout", "weight_drop"):
            _probability(name, getattr(self, name))
        for name, allowed in (("recurrent_dropout_mode", MODES), ("memory", ("save", "recompute"))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}: write one of {', '.join(map(repr, allowed))}.")
        for name in ("peephole", "coupled", "reset_after"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} is {getattr(self, name)!r}: write True or False.")

    def __deepcopy__(self, memo: dict) -> "Options":
        return self

    def __reduce__(self) -> tuple:
        for name in ("activation", "recurrent_activation"):
            where = getattr(getattr(self, name), "__qualname__", "")
            if "<" in where:
                raise CellError(
                    f"{name} is {where}, which cannot be pickled: write it as a function at the top of a module, not "
                    "as a lambda or inside another function."
                )
        return Options, tuple(getattr(self, item.name) for item in fields(self))

    def given(self) -> dict[str, Any]:
        """Those that are not at their default, by name."""
        found = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {name: value for name, (value, default) in found.items() if value is not default and value != default}


# Which options change the step itself: arguments of the built-in cells, by the layer that has them.
_OF_CELL = {
    "LSTM": ("activation", "recurrent_activation", "peephole", "coupled"),
    "GRU": ("activation", "recurrent_activation", "reset_after"),
    "RNN": ("activation",),
    "Recurrent": (),
}
_CELL_ONLY = ("activation", "recurrent_activation", "peephole", "coupled", "reset_after")


def takes(layer: str, option: str) -> bool:
    """Whether the layers of this name have the option."""
    return option not in _CELL_ONLY or option in _OF_CELL[layer]


def make_cell(layer: str, options: Options, activation: str = "tanh") -> Cell:
    """The cell of an LSTM, GRU or RNN with its options.

    Args:
        activation: what torch's arguments ask for, where no option does.

    Raises:
        InputError: an option that this layer does not have.
    """
    refuse_others(layer, options)
    function = _activation("activation", options.activation, activation)
    gates = _activation("recurrent_activation", options.recurrent_activation, "sigmoid")
    if layer == "LSTM":
        return make_lstm(function, gates, options.peephole, options.coupled, "c" in normed(options, "x r c", layer))
    if layer == "GRU":
        return make_gru(function, gates, options.reset_after)
    return make_rnn(function)


def refuse_others(layer: str, options: Options) -> None:
    """
    Raises:
        InputError: an option that is given and that the layers of this name do not have.
    """
    for name, value in options.given().items():
        if not takes(layer, name):
            having = [other for other in _OF_CELL if takes(other, name)]
            others = f"{' and '.join(having)} take{'s' * (len(having) == 1)} it"
            instead = "write it in the step" if layer == "Recurrent" else others
            raise InputError(f"{name} is {value!r}, which {layer} does not take: {instead}.")


def wrapped(layer: str, cell: Cell, options: Options) -> tuple[Graph, dict[str, float]]:
    """The graph of a cell with the options that wrap any step, and every vector with its initial value."""
    graph, vectors = cell.graph, dict(cell.vectors)
    for name in ("recurrent_dropout", "weight_drop"):
        if getattr(options, name) and not graph.recurrent:
            raise InputError(f"{name} is {getattr(options, name)}, and no gate of {graph.name} has recurrent weights.")
    parts = [part for part in normed(options, "x r c" if layer == "LSTM" else "x r", layer) if part != "c"]
    if parts:
        if "r" in parts and not graph.recurrent:
            raise InputError(f"layer_norm acts on r, and no gate of {graph.name} has recurrent weights: write 'x'.")
        graph, more = layer_norm(graph, parts)
        vectors |= more
    limits = by_state("clip", options.clip, graph.states) if options.clip is not None else {}
    for state, limit in limits.items():
        if not _is_number(limit) or not 0 < limit < float("inf"):
            raise InputError(f"clip is {limit!r} for the state {state}: write a finite number above 0.")
    return clipped(graph, limits) if limits else graph, vectors


def zoneouts(options: Options, states: tuple[str, ...]) -> tuple[float, ...]:
    """The probability of each state; none where all are zero."""
    found = by_state("zoneout", options.zoneout, states)
    chances = tuple(_probability("zoneout", found.get(state, 0.0)) for state in states)
    return chances if any(chances) else ()


def normed(options: Options, has: str, layer: str) -> list[str]:
    """The parts that layer norm acts on."""
    asked = options.layer_norm
    if isinstance(asked, bool):
        return has.split() if asked else []
    parts = asked.split() if isinstance(asked, str) else None
    if not parts or set(parts) - set(has.split()) or len(set(parts)) < len(parts):
        also = " (c is normalised by LSTM alone: in a cell of your own write it in the step)" if layer != "LSTM" else ""
        raise InputError(f"layer_norm is {asked!r}: {layer} takes True, or some of {has!r}{also}.")
    return parts


def by_state(name: str, value: Any, states: Iterable[str]) -> dict[str, Any]:
    """A number for each state, or those of a mapping by name."""
    states = tuple(states)
    if not isinstance(value, Mapping):
        return dict.fromkeys(states, value)
    unknown = [state for state in value if state not in states]
    if not value:
        raise InputError(f"{name} is an empty dict: name one of the states {', '.join(states)}, or leave it out.")
    if unknown:
        raise InputError(f"{name} names the state {unknown[0]!r}: this layer has {', '.join(states)}.")
    return dict(value)


def _activation(name: str, asked: Any, default: str) -> Callable[[Any], Any]:
    if asked is None:
        return ACTIVATIONS[default]
    if isinstance(asked, str) and asked in ACTIVATIONS:
        return ACTIVATIONS[asked]
    if callable(asked):
        return asked
    raise InputError(f"{name} is {asked!r}: give a function of one argument, or one of {', '.join(ACTIVATIONS)}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _probability(name: str, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= 1:
        raise InputError(f"{name} is {value!r}: write a probability from 0 to 1.")
    return float(value)
