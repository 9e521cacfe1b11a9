"""The layers: Keras' own classes with whorl's engines under them.

A layer holds what Keras' holds, by the same names and of the same shapes, and its call is Keras' call: only the loop
over time is another.
"""

import inspect
from contextvars import ContextVar
from typing import Any

import keras
import torch
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

from whorl.errors import InputError
from whorl.keras import held, loops
from whorl.keras.cells import draw_masks, drop_undrawn, has_masks, settle
from whorl.keras.explanation import Explanation, explain
from whorl.plan import check_engine


def register(kind: Any) -> Any:
    """Registers a layer for Keras' files, and shows the arguments of Keras' class and `engine` as its own.

    Keras reads them, and `help`.
    """
    own, shown = kind.__init__, inspect.signature(getattr(keras.layers, kind.__name__).__init__)
    *named, others = shown.parameters.values()
    if issubclass(kind, Recurrent):
        named.append(inspect.Parameter("engine", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation=str))

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)

    __init__.__signature__ = shown.replace(parameters=[*named, others])  # type: ignore[attr-defined]
    kind.__init__ = __init__
    return keras.saving.register_keras_serializable(package="whorl")(kind)


class Recurrent:
    """What each layer adds to the class of Keras: the engine, and the loop."""

    engine: str = "auto"
    """ "auto" for the fastest that can run a call, or the name of the engine that is to run and no other."""
    cell: Any
    _batch: int | None = None

    def __init__(self, *args: Any, engine: str = "auto", **kwargs: Any) -> None:
        batch, *shape = kwargs.pop("batch_input_shape", (None,))  # of Keras 2; Keras 3 kept `input_shape` alone
        if shape:
            kwargs["input_shape"] = tuple(shape)
        super().__init__(*args, **kwargs)
        self._batch = batch
        if check_engine(engine) != "auto":
            if self.engine not in ("auto", engine):
                raise InputError(f"engine is {engine!r} and use_cudnn is True: leave one of them out.")
            self.engine = engine

    def build(self, sequences_shape: Any, *rest: Any) -> None:
        """Makes the weights, and where it is stateful the states, for an input [batch, time, features]."""
        batch, *shape = sequences_shape
        super().build((self._batch if batch is None else batch, *shape), *rest)  # type: ignore[misc]

    def _maybe_config_dropout_masks(self, cell: Any, input_sequence: Any, input_state: Any) -> None:
        """Keras' hook: the cell gets the masks of a call."""
        if isinstance(cell, DropoutRNNCell):
            draw_masks(cell, input_sequence, input_state[0] if isinstance(input_state, list | tuple) else input_state)
            if cell is not self.cell:  # of a stack: Keras calls it for the input of the next
                settle(cell)
        super()._maybe_config_dropout_masks(cell, input_sequence, input_state)  # type: ignore[misc]

    def _maybe_reset_dropout_masks(self, cell: Any) -> None:
        """Keras' hook: the cell lets the masks of a call go, where it has some; Keras writes None at each call."""
        if isinstance(cell, DropoutRNNCell):
            drop_undrawn(cell)
        if not isinstance(cell, DropoutRNNCell) or has_masks(cell):
            super()._maybe_reset_dropout_masks(cell)  # type: ignore[misc]

    @loops.of_whorl
    def call(self, sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = False) -> Any:
        """As Keras' own."""
        if initial_state is None and mask is None and not training:
            output = held.call(self, sequences)
            if output is not None:
                return output
        return loops.call(self, super().call, sequences, initial_state, mask, training)  # type: ignore[misc]

    @loops.of_whorl
    def inner_loop(self, sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        """Keras' hook: the last output, all outputs and the final states."""
        try:
            return loops.inner_loop(self, self._own_loop, sequences, initial_state, mask, training)
        finally:  # Keras itself lets them go after a loop that raised nothing: the next call would have this one's
            self._maybe_reset_dropout_masks(self.cell)

    def _own_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super().inner_loop(*args, **kwargs)  # type: ignore[misc]

    def explain(self, x: Any = None, **kwargs: Any) -> Explanation:
        """Which engine would run a call, and every reason against the faster ones: see `whorl.keras.explain`."""
        return explain(self, x, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Keras' config, which makes Keras' class too; with the engine where one is named."""
        config = super().get_config()  # type: ignore[misc]
        return config if self.engine == "auto" else {**config, "engine": self.engine}


class _WithCuDNN(Recurrent):
    """LSTM and GRU, which have an argument `use_cudnn`."""

    @property
    def use_cudnn(self) -> Any:
        """True: the engine `cudnn` runs, or the call raises.  "auto" and False leave the choice to whorl.

        Read, it is True where the engine is `cudnn`: Keras' Bidirectional goes round a layer that says "auto".
        """
        if loops.BACKEND == "tensorflow" or (not torch.compiler.is_compiling() and _own_loop_runs.get()):
            return self.__dict__.get("use_cudnn", "auto")
        return self.engine == "cudnn"

    @use_cudnn.setter
    def use_cudnn(self, value: Any) -> None:
        self.__dict__["use_cudnn"] = value
        if value is True:
            self.engine = "cudnn"
        elif self.engine == "cudnn":
            self.engine = "auto"

    def _own_loop(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which knows no context variables, and unrolls any loop
            return super()._own_loop(*args, **kwargs)
        token = _own_loop_runs.set(True)
        try:
            return super()._own_loop(*args, **kwargs)
        finally:
            _own_loop_runs.reset(token)


_own_loop_runs: ContextVar[bool] = ContextVar("own_loop_runs", default=False)
"""Where `use_cudnn` reads as it was given: with "auto" Keras' loop makes the input products of all steps in one."""


@register
class LSTM(_WithCuDNN, keras.layers.LSTM):
    """A `keras.layers.LSTM` that runs on whorl's engines: masks, dropout and activations included.

    Takes every argument of `keras.layers.LSTM`, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> import numpy, whorl.keras
    >>> layer = whorl.keras.LSTM(16, recurrent_dropout=0.2, return_sequences=True)
    >>> layer(numpy.zeros((3, 5, 8)), mask=numpy.ones((3, 5), bool)).shape
    torch.Size([3, 5, 16])
    """


@register
class GRU(_WithCuDNN, keras.layers.GRU):
    """A `keras.layers.GRU` that runs on whorl's engines, with `reset_after=False` too.

    Takes every argument of `keras.layers.GRU`, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> import numpy, whorl.keras
    >>> whorl.keras.GRU(16, reset_after=False)(numpy.zeros((3, 5, 8))).shape
    torch.Size([3, 16])
    """


@register
class SimpleRNN(Recurrent, keras.layers.SimpleRNN):
    """A `keras.layers.SimpleRNN` that runs on whorl's engines.

    Takes every argument of `keras.layers.SimpleRNN` (`activity_regularizer` has its effect, which Keras 3.15 forgets,
    and `seed` is kept in the config), and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> import numpy, whorl.keras
    >>> whorl.keras.SimpleRNN(16, activation="relu")(numpy.zeros((3, 5, 8))).shape
    torch.Size([3, 16])
    """

    def __init__(self, *args: Any, activity_regularizer: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, activity_regularizer=activity_regularizer, **kwargs)
        self.activity_regularizer = keras.regularizers.get(activity_regularizer)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "seed": self.cell.seed}


@register
class RNN(Recurrent, keras.layers.RNN):
    """A `keras.layers.RNN` that runs on whorl's engines: of LSTMCell, GRUCell, SimpleRNNCell and `whorl.keras.Cell`.

    Takes every argument of `keras.layers.RNN` (a list of cells, or StackedRNNCells, too), and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    A cell whose call is other code runs on Keras' own loop, and says so: see `whorl.settings.slow`.

    >>> import keras, numpy, whorl.keras
    >>> whorl.keras.RNN([keras.layers.LSTMCell(16), keras.layers.GRUCell(4)])(numpy.zeros((3, 5, 8))).shape
    torch.Size([3, 4])
    """


@register
class Bidirectional(keras.layers.Bidirectional):
    """A `keras.layers.Bidirectional` that runs both directions at once on whorl's engines where they are alike.

    Takes every argument of `keras.layers.Bidirectional`.  A layer of Keras' own inside it becomes whorl's.

    >>> import numpy, whorl.keras
    >>> wrapped = whorl.keras.Bidirectional(whorl.keras.LSTM(16, recurrent_dropout=0.2))
    >>> wrapped(numpy.zeros((3, 5, 8)), mask=numpy.ones((3, 5), bool)).shape
    torch.Size([3, 32])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for layer in (self.forward_layer, self.backward_layer):
            adopt(layer)

    def call(self, sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = None) -> Any:
        """As Keras' own."""
        return loops.bidirectional(self, super().call, sequences, initial_state, mask, training)

    def explain(self, x: Any = None, **kwargs: Any) -> Explanation:
        """Which engine would run a call, and every reason against the faster ones: see `whorl.keras.explain`."""
        return explain(self, x, **kwargs)

    def _can_attempt_fused_lstm(self, *args: Any, **kwargs: Any) -> bool:
        return False  # Keras' own kernels stay out

    _can_attempt_fused_gru = _can_attempt_fused_lstm


class _OldName(type):
    """The type of a class of Keras 2 that is only a name: called it makes a modern layer, which is its instance."""

    modern: Any
    arguments: tuple[str, ...]

    def __new__(mcs, name: str, bases: tuple[type, ...], content: dict[str, Any]) -> "_OldName":
        """
        Raises:
            InputError: the class derives from one of these, and what it adds would be no part of the layer.
        """
        for base in bases:
            if isinstance(base, _OldName):
                raise InputError(
                    f"{name} derives from {base.__name__}, which is only a name for {base.modern.__name__}: derive "
                    f"from whorl.keras.{base.modern.__name__}."
                )
        return super().__new__(mcs, name, bases, content)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(cls.arguments):
            raise InputError(f"{cls.__name__} takes {len(cls.arguments)} arguments by position, not {len(args)}.")
        if kwargs.pop("time_major", False):
            raise InputError(f"{cls.__name__} is time_major: Keras 3 takes [batch, time, features] alone.")
        return cls.modern(**dict(zip(cls.arguments, args, strict=False)), **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.modern)


_AFTER_UNITS = "kernel_initializer recurrent_initializer bias_initializer"
_THEN = (
    "kernel_regularizer recurrent_regularizer bias_regularizer activity_regularizer kernel_constraint "
    "recurrent_constraint bias_constraint return_sequences return_state go_backwards stateful"
)


class CuDNNLSTM(metaclass=_OldName):
    """The name of Keras 2, with its arguments: makes a `whorl.keras.LSTM`, which takes all that CuDNNLSTM refused.

    >>> import whorl.keras
    >>> layer = whorl.keras.CuDNNLSTM(16, return_sequences=True)
    >>> type(layer).__name__, isinstance(layer, whorl.keras.CuDNNLSTM)
    ('LSTM', True)
    """

    modern = LSTM
    arguments = tuple(f"units {_AFTER_UNITS} unit_forget_bias {_THEN}".split())


class CuDNNGRU(metaclass=_OldName):
    """The name of Keras 2, with its arguments: makes a `whorl.keras.GRU`, which takes all that CuDNNGRU refused.

    >>> import whorl.keras
    >>> type(whorl.keras.CuDNNGRU(16)).__name__
    'GRU'
    """

    modern = GRU
    arguments = tuple(f"units {_AFTER_UNITS} {_THEN}".split())


def __getattr__(name: str) -> Any:
    """Every other layer is Keras' own: `from whorl.keras.layers import LSTM, Dense`."""
    return getattr(keras.layers, name)


STOCK: dict[Any, Any] = {
    kind: getattr(keras.layers, kind.__name__) for kind in (LSTM, GRU, SimpleRNN, RNN, Bidirectional)
}
"""The class of Keras that each is."""
OURS: dict[Any, Any] = {stock: ours for ours, stock in STOCK.items()}


def adopt(layer: Any) -> bool:
    """Makes a layer of Keras' own class whorl's, in place: whether it was one."""
    if type(layer) not in OURS:
        return False
    layer.__class__ = OURS[type(layer)]
    if layer.__dict__.get("use_cudnn") is True:
        layer.engine = "cudnn"
    return True


def abandon(layer: Any) -> bool:
    """Makes a layer of whorl Keras' own again, in place, without its engine: whether it was one."""
    if type(layer) not in STOCK:
        return False
    layer.__dict__.pop("engine", None)
    layer.__class__ = STOCK[type(layer)]
    return True
