"""The loop of a layer of Keras: by whorl's engines, or by Keras' own where only that can run it, which is announced."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras

from whorl.errors import SlowError, SlowWarning, UnsupportedError
from whorl.keras.cells import masks_of, part_of, weights_of
from whorl.keras.sweep import Part, Tensors, sweep
from whorl.settings import settings

BACKEND: str = keras.backend.backend()
KERAS_LOOP = keras.layers.RNN.inner_loop
"""Keras' own loop, step by step in Python, for any cell."""


def inner_loop(
    layer: Any, own: Callable[..., Any], sequences: Any, initial_state: Any, mask: Any, training: Any
) -> Any:
    """What `inner_loop` of a layer of Keras gives: the last output, all outputs [batch, time, units], the states.

    Args:
        layer: a `keras.layers.RNN`, or a subclass.
        own: the layer's own `inner_loop`, for backends that whorl has no engines for.
    """
    if keras.tree.is_nested(mask):
        mask = mask[0]
    parts, reasons = parts_of(layer, sequences)
    if reasons:
        _announce(layer, reasons)
        loop = own if BACKEND not in ("torch", "jax") else lambda *args, **kwargs: KERAS_LOOP(layer, *args, **kwargs)
        return loop(sequences, initial_state, mask=mask, training=training)
    cells, grouped = cells_of(layer), initial_state if is_stacked(layer) else [initial_state]
    tensors = []
    for cell, given in zip(cells, grouped, strict=True):
        states = tuple(keras.tree.flatten(given))
        if layer.stateful:  # these are the variables that the final states are assigned to, in place
            states = tuple([keras.ops.copy(state) for state in states])
        masks = masks_of(cell, sequences, states[0]) if training else ((), ())
        tensors.append(Tensors(weights_of(cell), states, *masks))
    x = keras.ops.cast(sequences, cells[0].compute_dtype)
    last, outputs, finals = sweep(parts, x, tensors, mask, layer.go_backwards, layer.zero_output_for_mask)
    return last, outputs, keras.tree.pack_sequence_as(initial_state, keras.tree.flatten(finals))


def is_stacked(layer: Any) -> bool:
    return isinstance(layer.cell, keras.layers.StackedRNNCells)


def cells_of(layer: Any) -> list[Any]:
    """The cells of a layer, from the one that reads x to the one that gives the output."""
    return list(layer.cell.cells) if is_stacked(layer) else [layer.cell]


def parts_of(layer: Any, sequences: Any) -> tuple[list[Part], list[str]]:
    """What each cell is to whorl, and every reason why only Keras' own loop can run the layer."""
    if BACKEND != "torch":
        return [], [
            f"Keras runs on {BACKEND} and whorl's engines on torch: set KERAS_BACKEND=torch before keras is imported"
        ]
    if len(sequences.shape) != 3:
        return [], [f"its input has {len(sequences.shape)} axes, and whorl's cells take [batch, time, features]"]
    found = [part_of(cell, getattr(layer, "engine", "auto")) for cell in cells_of(layer)]
    return [part for part in found if isinstance(part, Part)], [part for part in found if isinstance(part, str)]


_announced: set[tuple[str, ...]] = set()


def _announce(layer: Any, reasons: list[str]) -> None:
    """Warn that Keras' own loop runs, once for each kind of layer and reasons, or refuse it: see `whorl.settings`.

    Raises:
        UnsupportedError: the layer names an engine.
        SlowError: `settings.slow` is "error".
    """
    who, engine, slow = type(layer).__name__, getattr(layer, "engine", "auto"), settings.slow
    if engine != "auto":
        raise UnsupportedError(f"the engine {engine!r} cannot run {layer.name} ({who}): {'; '.join(reasons)}.")
    if slow == "allow":
        return
    text = f"{layer.name} ({who}) runs on Keras' own loop: {'; '.join(reasons)}."
    if slow == "error":
        raise SlowError(f"{text}\nwhorl.settings.slow is 'error'; 'warn' or 'allow' would run it.")
    key = (who, *reasons)
    if key not in _announced:
        text = f"{text}\nwhorl.settings.slow = 'allow' silences this, 'error' refuses it."
        warnings.warn(text, SlowWarning, stacklevel=_level_of_the_caller())
        _announced.add(key)  # after: where warnings are errors it is raised every time


def _level_of_the_caller() -> int:
    """The stack level, seen from `_announce`, of the first line that is neither whorl's nor Keras'."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("whorl", "keras", "torch"):
        level, frame = level + 1, frame.f_back
    return level
