"""Adoption without a change of the model's code: for a whole process, or for one model that is already built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from whorl.errors import InputError
from whorl.keras import layers, loops


@dataclass(frozen=True)
class Report:
    """What became of each recurrent layer of a model: its path, its class before, and what was done or why not."""

    rows: tuple[tuple[str, str, str], ...]

    @property
    def changed(self) -> int:
        """How many layers have another class now."""
        return sum(what.startswith("now ") for _, _, what in self.rows)

    def __str__(self) -> str:
        return "\n".join(f"{path} ({kind}): {what}" for path, kind, what in self.rows) or "no recurrent layers"


def accelerate(model: Any) -> Report:
    """Makes the recurrent layers of a built model whorl's, in place; inside Bidirectional and TimeDistributed too.

    Weights, optimiser slots and what `compile` was given stay as they are; a file that is saved afterwards names
    whorl's classes, and `restore` makes them Keras' again.

    Args:
        model: a `keras.Model`, or any layer.

    Raises:
        InputError: it is neither.

    >>> import keras, whorl.keras
    >>> model = keras.Sequential([keras.Input((5, 8)), keras.layers.LSTM(16, name="rnn")], name="model")
    >>> print(whorl.keras.accelerate(model))
    model/rnn (LSTM): now whorl.keras.LSTM
    """
    return _swap(model, layers.adopt, "whorl.keras")


def restore(model: Any) -> Report:
    """Makes the recurrent layers of a model Keras' own again, in place; an engine that was named is forgotten.

    A file that is saved afterwards needs no whorl.

    >>> import keras, whorl.keras
    >>> model = keras.Sequential([keras.Input((5, 8)), whorl.keras.GRU(16, name="rnn")], name="model")
    >>> print(whorl.keras.restore(model))
    model/rnn (GRU): now keras.layers.GRU
    """
    return _swap(model, layers.abandon, "keras.layers")


def _swap(model: Any, change: Callable[[Any], bool], package: str) -> Report:
    if not isinstance(model, keras.layers.Layer):
        raise InputError(f"model is of {type(model).__name__}: give a keras.Model or one layer, of several each alone.")
    rows = []
    for layer in _layers(model):
        kind: Any = type(layer)
        if change(layer):
            rows.append((layer.path or layer.name, kind.__name__, f"now {package}.{type(layer).__name__}"))
        elif issubclass(kind, tuple(layers.OURS)) and kind not in (*layers.OURS, *layers.STOCK):
            rows.append((layer.path or layer.name, kind.__name__, f"left as it is: a class of {kind.__module__}"))
    for part in [model, *_layers(model)]:
        if isinstance(part, keras.Model):  # these hold the layers as they were, where they are compiled
            part.train_function = part.test_function = part.predict_function = None
    return Report(tuple(rows))


def _layers(model: Any) -> list[Any]:
    return list(model._flatten_layers())


_HOOKS: dict[tuple[type, str], Callable[..., Any]] = {}
"""What `enable` put others in the place of."""


@dataclass(frozen=True)
class Enabled:
    """What `enable` gives: used in a `with` statement, `disable` comes at the end of the block that switched it on."""

    before: bool
    """It was on already, and stays on."""

    def __enter__(self) -> "Enabled":
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.before:
            disable()


def enable() -> Enabled:
    """Makes Keras' own recurrent layers run on whorl's engines, those that exist already too, until `disable`.

    Classes, configs and files stay Keras' own.  A function that Keras compiled before holds the layers as they were.

    >>> import keras, numpy, whorl.keras
    >>> with whorl.keras.enable():
    ...     y = keras.layers.LSTM(16, activation="relu")(numpy.zeros((3, 5, 8)))
    """
    if _HOOKS:
        return Enabled(before=True)
    for name in ("RNN", "LSTM", "GRU"):
        kind = getattr(keras.layers, name)
        _replace(kind, "inner_loop", _inner_loop(kind, kind.inner_loop))
    _replace(keras.layers.Bidirectional, "call", _call(keras.layers.Bidirectional.call))
    for name in ("_can_attempt_fused_lstm", "_can_attempt_fused_gru"):
        _replace(keras.layers.Bidirectional, name, lambda self, *args, **kwargs: False)
    return Enabled(before=False)


def disable() -> None:
    """Gives Keras' own recurrent layers their own loops back."""
    for (kind, name), function in _HOOKS.items():
        setattr(kind, name, function)
    _HOOKS.clear()


def _replace(kind: type, name: str, function: Callable[..., Any]) -> None:
    _HOOKS[kind, name] = getattr(kind, name)
    setattr(kind, name, function)


def _inner_loop(kind: type, own: Callable[..., Any]) -> Callable[..., Any]:
    @loops.of_whorl
    def inner_loop(self: Any, sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        convolves = len(sequences.shape) != 3  # a ConvLSTM, which has this loop of RNN too: whorl has none for it
        hands_on = kind is keras.layers.RNN and isinstance(self, (keras.layers.LSTM, keras.layers.GRU))
        if convolves or hands_on:  # the loop of those two ends here where their own cannot run
            return own(self, sequences, initial_state, mask=mask, training=training)
        return loops.inner_loop(self, own.__get__(self), sequences, initial_state, mask, training)

    return inner_loop


def _call(own: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, sequences: Any, initial_state: Any = None, mask: Any = None, training: Any = None) -> Any:
        return loops.bidirectional(self, own.__get__(self), sequences, initial_state, mask, training)

    return call
