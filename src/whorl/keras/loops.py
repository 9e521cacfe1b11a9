"""The loop of a layer of Keras: by whorl's engines, or by Keras' own where only that can run it, which is announced."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import keras
import torch

from whorl.errors import InputError, SlowError, SlowWarning, UnsupportedError
from whorl.keras.cells import Cell, part_of, settle, tensors_of
from whorl.keras.path import BACKEND, both_ways, sweep
from whorl.keras.sweep import Part, Tensors, check_states, check_steps
from whorl.problem import Plan
from whorl.settings import settings

KERAS_LOOP = keras.layers.RNN.inner_loop
"""Keras' own loop, step by step in Python, for any cell."""


def inner_loop(
    layer: Any, own: Callable[..., Any], sequences: Any, initial_state: Any, mask: Any, training: Any
) -> Any:
    """What `inner_loop` of a layer of Keras gives: the last output, all outputs [batch, time, units], the states.

    Args:
        layer: a `keras.layers.RNN`, or a subclass.
        own: the layer's own `inner_loop`, for what whorl has no engine for.
    """
    parts, reasons = parts_of(layer, sequences)
    if reasons:
        _announce(layer, reasons)
        for cell in cells_of(layer):
            settle(cell)
        return _keras_loop(layer, own)(sequences, initial_state, mask=_first(mask), training=training)
    mask = _whole_mask(mask, sequences)
    stacked = is_stacked(layer)
    cells, grouped = cells_of(layer), initial_state if stacked else [initial_state]
    entering, tensors = sequences[:, 0, :], []
    for cell, given in zip(cells, grouped, strict=True):
        states = tuple(given) if isinstance(given, list | tuple) else (given,)
        states = tuple([_of_whole_batch(state, sequences) for state in states])
        if layer.stateful:  # these are the variables that the final states are assigned to, in place
            states = tuple([keras.ops.copy(state) for state in states])
        tensors.append(tensors_of(cell, entering, states[0], states, training))
        entering = states[0]  # of the shape of what the next cell reads
    x = keras.ops.cast(sequences, cells[0].compute_dtype)
    notes = notes_of_a_call()
    how = layer.go_backwards, layer.zero_output_for_mask, layer.return_sequences
    swept = sweep(parts, x, tensors, mask, *how, notes)
    note(layer, notes)
    if not stacked:
        return swept.last, swept.outputs, list(swept.states[0])
    finals = [
        type(given)(ends) if isinstance(given, list | tuple) else ends[0]
        for given, ends in zip(grouped, swept.states, strict=True)
    ]
    return swept.last, swept.outputs, type(initial_state)(finals)


def _keras_loop(layer: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """The layer's own, as fast as Keras is, or the loop of any cell.

    On torch and JAX the own loop of LSTM and GRU reads its cell's weights alone, whatever the cell does with them.
    """
    known = BACKEND not in ("torch", "jax") or type(layer.cell).call in _STOCK_CALLS
    return own if known else partial(KERAS_LOOP, layer)


_STOCK_CALLS = [keras.layers.LSTMCell.call, keras.layers.GRUCell.call]


def call(layer: Any, own: Callable[..., Any], sequences: Any, initial_state: Any, mask: Any, training: Any) -> Any:
    """What the call of a layer of Keras gives, without what Keras makes for any loop and no engine needs.

    That is states of zero, and casts to the dtype that is there.

    Args:
        own: the layer's own `call`, which goes to its `inner_loop`.

    Raises:
        InputError: the input has no steps, or there are other initial states than the layer has.
    """
    who = type(layer).__name__
    if len(sequences.shape) == 3:
        check_steps(who, sequences)
    if initial_state is not None:
        check_states(who, len(keras.tree.flatten(layer.state_size)), keras.tree.flatten(initial_state))
        if is_stacked(layer):
            _check_nesting(who, cells_of(layer), initial_state)
    straight = initial_state is None and not layer.stateful and keras.ops.is_tensor(sequences)
    if not straight or not start_at_zero(layer) or not hasattr(type(layer).inner_loop, "of_whorl"):
        return own(sequences, initial_state=initial_state, mask=mask, training=training)
    parts, reasons = parts_of(layer, sequences)
    if reasons:
        return own(sequences, mask=mask, training=training)
    mask = _whole_mask(mask, sequences)
    notes, dtype = notes_of_a_call(), layer.compute_dtype
    tensors = _tensors_of_call(layer, sequences, (), training)
    how = layer.go_backwards, layer.zero_output_for_mask, layer.return_sequences
    swept = sweep(parts, _as(sequences, layer.cell.compute_dtype), [tensors], mask, *how, notes)
    note(layer, notes)
    output = _as(swept.outputs if layer.return_sequences else swept.last, dtype)
    return (output, *[_as(state, dtype) for state in swept.states[0]]) if layer.return_state else output


def _check_nesting(who: str, cells: list[Any], initial_state: Any) -> None:
    """
    Raises:
        InputError: the initial states of several cells are not a list for each.
    """
    found = [len(keras.tree.flatten(states)) for states in initial_state]
    wanted = [len(keras.tree.flatten(cell.state_size)) for cell in cells]
    if found != wanted:
        raise InputError(
            f"initial_state has lists of {found} tensors, this {who} takes {wanted}, one list of states for each cell: "
            "[[h, c], [h]] for an LSTMCell and a GRUCell."
        )


def _first(mask: Any) -> Any:
    """The mask of x, where those of initial states come after it."""
    return mask[0] if isinstance(mask, list | tuple) else mask


def _whole_mask(mask: Any, sequences: Any) -> Any:
    """[batch, time] of what Keras takes too: an axis of 1 at its end, one row for all sequences."""
    mask = _first(mask)
    if mask is None:
        return None
    if len(mask.shape) == 3 and mask.shape[-1] == 1:
        mask = mask[..., 0]
    return _of_whole_batch(mask, sequences)


def _of_whole_batch(rows: Any, sequences: Any) -> Any:
    """One row for all sequences, as one for each of them."""
    batch = sequences.shape[0]
    return keras.ops.broadcast_to(rows, (batch, *rows.shape[1:])) if rows.shape[0] == 1 != batch else rows


def _as(tensor: Any, dtype: str) -> Any:
    """In a dtype of Keras: on torch its own cast takes longer than this where nothing is to be done."""
    return tensor.to(getattr(torch, dtype)) if BACKEND == "torch" else keras.ops.cast(tensor, dtype)


def start_at_zero(*layers: Any) -> bool:
    """Whether the initial states that layers make are zero and an engine can do without: none is handed on then."""
    if BACKEND not in ("torch", "jax") or torch.jit.is_tracing() or torch.compiler.is_exporting():
        return False
    makers = [one for layer in layers for one in (layer, layer.cell)]
    return {getattr(type(one), "get_initial_state", None) for one in makers} <= _ZEROS


_ZEROS = {
    kind.get_initial_state
    for kind in (keras.layers.RNN, keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell, Cell)
}


def _tensors_of_call(layer: Any, x: Any, states: tuple[Any, ...], training: Any) -> Tensors:
    """The tensors of one call of a layer of one cell, with masks drawn as its own call would, in evaluation too.

    Args:
        x: [batch, time, inputs].
        states: the initial ones; none where they are zero.
    """
    cell = layer.cell
    if not (cell.dropout or cell.recurrent_dropout):
        return tensors_of(cell, x, None, states, training)
    entering = x[:, 0, :]
    size = x.shape[0], cell.units
    if states:
        state = states[0]
    else:  # only its shape, dtype and device are read
        dtype = cell.compute_dtype
        on_torch = BACKEND == "torch"
        state = entering.new_empty(size, dtype=getattr(torch, dtype)) if on_torch else keras.ops.empty(size, dtype)
    layer._maybe_config_dropout_masks(cell, entering, [state])
    try:
        return tensors_of(cell, entering, state, states, training)
    finally:
        layer._maybe_reset_dropout_masks(cell)


def is_stacked(layer: Any) -> bool:
    """Whether its cell is several, one upon the other as Keras runs them; a subclass may do anything else with them."""
    kind, stack = type(layer.cell), keras.layers.StackedRNNCells
    if not issubclass(kind, stack):
        return False
    return kind.call is stack.call and kind.get_initial_state is stack.get_initial_state


def cells_of(layer: Any) -> list[Any]:
    """The cells of a layer, from the one that reads x to the one that gives the output."""
    return list(layer.cell.cells) if is_stacked(layer) else [layer.cell]


def engine_of(layer: Any) -> str:
    """The engine that a layer asks for; of Keras' own layers what `use_cudnn=True` asks for."""
    return getattr(layer, "engine", None) or ("cudnn" if getattr(layer, "use_cudnn", False) is True else "auto")


def of_whorl(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks an `inner_loop` or a `call` as whorl's."""
    function.of_whorl = True  # type: ignore[attr-defined]
    return function


def parts_of(layer: Any, sequences: Any) -> tuple[list[Part], list[str]]:
    """What each cell is to whorl, and every reason why only Keras' own loop can run the layer."""
    if BACKEND not in ("torch", "jax"):
        return [], [
            f"Keras runs on {BACKEND} and whorl's engines on torch and jax: set KERAS_BACKEND=torch before keras is "
            "imported"
        ]
    if len(sequences.shape) != 3:
        return [], [f"its input has {len(sequences.shape)} axes, and whorl's cells take [batch, time, features]"]
    found = [part_of(cell, engine_of(layer)) for cell in cells_of(layer)]
    return [part for part in found if isinstance(part, Part)], [part for part in found if isinstance(part, str)]


_noted: ContextVar[list[tuple[Any, Plan | str]] | None] = ContextVar("noted", default=None)
"""Where it holds a list, each call of a layer adds its plan to it, or why Keras' own loop runs."""


@contextmanager
def recording() -> Iterator[list[tuple[Any, Plan | str]]]:
    """The calls of layers inside the block: each layer with its plan, or with why Keras' own loop runs."""
    found: list[tuple[Any, Plan | str]] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def notes_of_a_call() -> list[Plan] | None:
    """A list for the plans of one call; None where nobody asks."""
    return None if torch.compiler.is_compiling() or _noted.get() is None else []


def note(layer: Any, plans: list[Plan] | None) -> None:
    """Keeps the plans of a call of a layer, where somebody asks."""
    notes = _noted.get() if plans is not None else None
    if notes is not None:
        notes += [(layer, made) for made in plans or ()]


_announced: set[tuple[str, ...]] = set()


def _announce(layer: Any, reasons: list[str]) -> None:
    """Warn that Keras' own loop runs, once for each kind of layer and reasons, or refuse it: see `whorl.settings`.

    Raises:
        UnsupportedError: the layer names an engine.
        SlowError: `settings.slow` is "error".
    """
    who, engine, slow = type(layer).__name__, engine_of(layer), settings.slow
    notes = _noted.get()
    if notes is not None:
        notes.append((layer, f"Keras' own loop: {'; '.join(reasons)}"))
    enforced = BACKEND == "tensorflow" and getattr(layer, "use_cudnn", False) is True  # by Keras itself
    if engine != "auto" and not enforced:
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


def bidirectional(
    layer: Any, own: Callable[..., Any], sequences: Any, initial_state: Any, mask: Any, training: Any
) -> Any:
    """What the call of a `keras.layers.Bidirectional` gives; both directions at once where they are alike.

    Args:
        own: the layer's own `call`, which calls its two layers one after the other.
    """
    there, back = layer.forward_layer, layer.backward_layer
    part = _joint(layer, sequences)
    if part is None or (initial_state is not None and len(initial_state) != 2 * len(there.state_size)):
        return own(sequences, initial_state=initial_state, mask=mask, training=training)
    mask = _whole_mask(mask, sequences)
    count, tensors, zero = len(there.state_size), [], start_at_zero(there, back)
    for place, one in enumerate((there, back)):
        if initial_state is not None:
            given = initial_state[place * count : (place + 1) * count]
        else:
            given = () if zero else one.get_initial_state(keras.ops.shape(sequences)[0])
        starts = tuple([keras.ops.convert_to_tensor(state, one.cell.compute_dtype) for state in given])
        starts = tuple([_of_whole_batch(state, sequences) for state in starts])
        tensors.append(_tensors_of_call(one, sequences, starts, training))
    notes, x = notes_of_a_call(), keras.ops.cast(sequences, there.cell.compute_dtype)
    how = there.zero_output_for_mask, there.return_sequences
    found = both_ways(part, x, tensors[0], tensors[1], mask, *how, notes)
    note(layer, notes)
    outputs = [
        keras.ops.cast(one.outputs if there.return_sequences else one.last, layer.compute_dtype) for one in found
    ]
    merged = _MERGES[layer.merge_mode](*outputs)
    if not layer.return_state:
        return merged
    states = tuple([keras.ops.cast(state, there.compute_dtype) for one in found for state in one.states[0]])
    return (*merged, *states) if layer.merge_mode is None else (merged, *states)


_MERGES: dict[str | None, Callable[[Any, Any], Any]] = {
    "concat": lambda y, z: keras.ops.concatenate([y, z], axis=-1),
    "sum": lambda y, z: y + z,
    "ave": lambda y, z: (y + z) / 2,
    "mul": lambda y, z: y * z,
    None: lambda y, z: (y, z),
}


_CALLS = [getattr(keras.layers, name).call for name in ("RNN", "LSTM", "GRU", "SimpleRNN")]


def _joint(layer: Any, sequences: Any) -> Part | None:
    """What both directions of a Bidirectional are, where one sweep can be both."""
    both = layer.forward_layer, layer.backward_layer
    calls = all(type(one).call in _CALLS or hasattr(type(one).call, "of_whorl") for one in both)
    if not calls or not all(hasattr(type(one).inner_loop, "of_whorl") for one in both):
        return None  # not recurrent, or of a class that adds to its call
    if not all(one.built and not is_stacked(one) for one in both):
        return None
    if [one.go_backwards for one in both] != [False, True]:
        return None
    if any(one.stateful or one.activity_regularizer is not None for one in both):
        return None
    if len({(one.compute_dtype, one.cell.compute_dtype, one.zero_output_for_mask) for one in both}) > 1:
        return None
    if both[0].compute_dtype != layer.compute_dtype:
        return None
    found = [parts_of(one, sequences) for one in both]
    if any(reasons for _, reasons in found) or found[0] != found[1]:
        return None
    return found[0][0][0]
