"""The layers: torch.nn's own classes with whorl's engines under them, and `Recurrent` for any cell.

`whorl.LSTM` is a `torch.nn.LSTM`: arguments, parameters and their first values, state_dict, errors and the way to call
it are torch's, and its options come after.  A layer holds parameters and nothing else; where its work is done is
`functional.recurrent`.
"""

import textwrap
import warnings
from dataclasses import fields
from inspect import signature
from typing import Any

import torch

from whorl.cells.cell import Cell
from whorl.errors import InputError
from whorl.layer import Layer
from whorl.options import Options, refuse_others, takes

_OPTIONS = tuple(item.name for item in fields(Options))


class _TorchLayer(Layer):
    """What is a class of torch.nn too."""

    @property
    def mode(self) -> str:
        """Torch's name of the step; of an RNN that is built it can be the other nonlinearity's."""
        return self.__dict__["mode"]

    @mode.setter
    def mode(self, name: str) -> None:
        before, built = self.__dict__.get("mode"), "_form" in self.__dict__
        if built and name != before and not {name, before} <= {"RNN_TANH", "RNN_RELU"}:
            others = "'RNN_TANH' or 'RNN_RELU'" if self._torch is torch.nn.RNN else repr(before)
            raise InputError(f"mode is {name!r}, it can be {others} in this {type(self).__name__}.")
        self.__dict__["mode"] = name
        if built:
            self._build()

    def __init__(self, *args: Any, engine: str = "auto", **kwargs: Any) -> None:
        options = Options(**{name: kwargs.pop(name) for name in _OPTIONS if name in kwargs})
        device = None
        if options.coupled and self._torch is torch.nn.LSTM:  # weights of other shapes than torch would make and draw
            bound = signature(torch.nn.RNNBase.__init__).bind(self, "LSTM", *args, **kwargs)
            device, bound.arguments["device"] = bound.arguments.get("device"), "meta"
            args, kwargs = bound.args[2:], bound.kwargs
        super().__init__(*args, **kwargs)
        if self.proj_size and self.mode != "LSTM":  # torch lets it pass by position, and refuses every call
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        self.engine, self._options = engine, options
        self._build()
        like = self.weight_ih_l0
        self._make_parameters(device if options.coupled else like.device, like.dtype, anew=options.coupled)

    def _cell(self) -> Cell:
        if self.mode == "RNN_RELU" and self._options.activation is not None:
            raise InputError("nonlinearity is 'relu' and activation is given too: leave one of them out.")
        return super()._cell()

    def reset_parameters(self) -> None:
        """New weights, drawn as torch draws them in its order; vectors as they begin."""
        if "_form" in self.__dict__:
            super().reset_parameters()
        else:  # torch's __init__ asks, before the vectors are there
            self._torch.reset_parameters(self)


def _documented(layer: type[Layer]) -> type[Layer]:
    """The class with its options in its docstring, in the words of `options`."""
    kind = layer._torch.__name__ if layer._torch is not None else "Recurrent"
    width = 116
    rows = []
    for item in fields(Options):
        if takes(kind, item.name):
            text = f"{item.name}: ({item.metadata['values']}) {item.metadata['meaning']}"
            rows.append(textwrap.fill(text, width, initial_indent=" " * 8, subsequent_indent=" " * 12))
    assert layer.__doc__ is not None
    layer.__doc__ = layer.__doc__.replace("        OPTIONS\n", "\n".join(rows) + "\n")
    return layer


@_documented
class LSTM(_TorchLayer, torch.nn.LSTM):
    """A `torch.nn.LSTM` (Hochreiter and Schmidhuber 1997) that runs on whorl's engines.

    Takes every argument of `torch.nn.LSTM`, in its order, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.
        OPTIONS

    >>> lstm = LSTM(8, 16, num_layers=2, bidirectional=True)
    >>> y, (h, c) = lstm(torch.zeros(5, 3, 8), lengths=[5, 2, 0])
    >>> y.shape, h.shape
    (torch.Size([5, 3, 32]), torch.Size([4, 3, 16]))
    """

    _torch = torch.nn.LSTM


@_documented
class GRU(_TorchLayer, torch.nn.GRU):
    """A `torch.nn.GRU` (Cho et al. 2014) that runs on whorl's engines.

    Takes every argument of `torch.nn.GRU`, in its order, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.
        OPTIONS

    >>> y, h = GRU(8, 16, zoneout=0.1)(torch.zeros(5, 3, 8))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 16]), torch.Size([1, 3, 16]))
    """

    _torch = torch.nn.GRU


@_documented
class RNN(_TorchLayer, torch.nn.RNN):
    """A `torch.nn.RNN` (Elman 1990) that runs on whorl's engines.

    Takes every argument of `torch.nn.RNN`, in its order, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.
        OPTIONS

    >>> y, h = RNN(8, 16, activation="softplus")(torch.zeros(5, 3, 8))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 16]), torch.Size([1, 3, 16]))
    """

    _torch = torch.nn.RNN


@_documented
class Recurrent(Layer, torch.nn.Module):
    """A layer of any cell, with the arguments, the options and the way to call of `LSTM`.

    Its parameters are named and shaped as torch's: `weight_ih_l0` [gates x units, inputs] with gates in the cell's
    order, `weight_hh_l0` [recurrent gates x units, width], `bias_ih_l0`, `bias_hh_l0`, and `vector_NAME_l0` [units] for
    each vector.  Weights are drawn as torch draws them.

    Args:
        cell: what `@whorl.cell` makes, or one of `whorl.cells.library`.
        input_size: features of x.
        hidden_size: units.
        num_layers: layers, each on the output of the one before.
        bias: whether both products have a bias.
        batch_first: x and the output are [batch, time, features].
        dropout: the probability of dropout on the output of each layer but the last.
        bidirectional: a second direction, from the end to the beginning.
        proj_size: the width of the first state after a projection; 0 for none.
        device, dtype: of the parameters.
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.
        OPTIONS

    Raises:
        CellError: a step that cannot be traced.
        InputError: a size or an option that does not fit.

    >>> @whorl.cell(gates="n", states="h", vectors={"keep": 0.9})
    ... def leaky(x, r, s, v):
    ...     return dict(h=v.keep * s.h + (1 - v.keep) * whorl.tanh(x.n + r.n))
    >>> layer = Recurrent(leaky, 8, 16, bidirectional=True)
    >>> y, h = layer(torch.zeros(5, 3, 8), lengths=[5, 2, 0])
    >>> y.shape, h.shape, layer.vector_keep_l0_reverse.shape
    (torch.Size([5, 3, 32]), torch.Size([2, 3, 16]), torch.Size([16]))
    """

    _torch = None

    def __init__(
        self,
        cell: Cell,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        *,
        engine: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(cell, Cell):
            raise InputError(
                f"the cell is {cell!r}: give what @whorl.cell makes of a step, or one of whorl.cells.library."
            )
        for name, value, least in (
            ("input_size", input_size, 0), ("hidden_size", hidden_size, 1),
            ("num_layers", num_layers, 1), ("proj_size", proj_size, 0),
        ):  # fmt: skip
            if type(value) is not int or value < least:
                raise InputError(f"{name} is {value!r}: write a whole number of {least} or more.")
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise InputError(f"dropout is {dropout!r}: write a probability from 0 to 1.")
        if dropout and num_layers == 1:
            warnings.warn(
                f"dropout={dropout} comes after each layer but the last, and there is one layer: it has no effect.",
                stacklevel=2,
            )
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise InputError(f"Recurrent has no option {unknown[0]!r}: it has {', '.join(_OPTIONS)}.")
        self.cell, self.engine = cell, engine
        self.input_size, self.hidden_size, self.num_layers, self.proj_size = (
            input_size, hidden_size, num_layers, proj_size,
        )  # fmt: skip
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional
        self._options = Options(**options)
        refuse_others("Recurrent", self._options)
        self._build()
        self._make_parameters(device, dtype)

    def _cell(self) -> Cell:
        return self.cell

    def extra_repr(self) -> str:
        named = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
            "proj_size": 0,
        }
        parts = [self.cell.name, str(self.input_size), str(self.hidden_size)]
        parts += [f"{name}={getattr(self, name)!r}" for name, usual in named.items() if getattr(self, name) != usual]
        return ", ".join(parts) + super().extra_repr()
