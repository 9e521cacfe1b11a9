"""`explain` for models of Keras: a line for each recurrent layer, and every reason against the faster engines."""

from dataclasses import dataclass
from typing import Any

import keras
import torch

from whorl.engines import ENGINES
from whorl.errors import InputError
from whorl.explanation import gpus
from whorl.keras import loops
from whorl.problem import Plan
from whorl.settings import settings


@dataclass(frozen=True)
class Explanation:
    """What runs each recurrent layer of a model, in the order of their calls."""

    rows: tuple[tuple[str, str, Plan | str], ...]
    """Path and class of the layer; its plan, or why only Keras' own loop can run it."""

    def __str__(self) -> str:
        lines = []
        for path, kind, made in self.rows:
            if isinstance(made, str):
                lines.append(f"{path} ({kind}): {made}")
                continue
            asked = ", asked for by name" if made.asked != "auto" else ""
            lines.append(f"{path} ({kind}): {made.engine}, {ENGINES[made.engine].summary}{asked}")
            lines.append(f"  for {made.problem}")
            lines += [f"  not {refusal}" for refusal in made.refusals]
        return "\n".join(lines) or "no recurrent layer was called"


def explain(
    model: Any, x: Any = None, training: bool = True, batch: int = 32, time: int = 100, **kwargs: Any
) -> Explanation:
    """What would run each recurrent layer in `model(x)`: print it.

    The model runs once without keeping anything, and each layer is planned as it comes; random generators and states of
    stateful layers come back as they were.  A layer of Keras that whorl does not run is listed as such.

    Args:
        model: a `keras.Model`, or any layer.
        x: what it is called with; without it ones of its input shape, with `batch` and `time` where that is open.
        training: whether it is called in training mode, where dropout and a gradient count.
        kwargs: of the call, such as `mask`.

    Raises:
        InputError: no x, and a model whose input shape is not known.

    >>> import numpy, whorl.keras
    >>> layer = whorl.keras.GRU(16, engine="reference", name="rnn")
    >>> print(whorl.keras.explain(layer, numpy.zeros((3, 5, 8), "float32")))
    rnn (GRU): reference, plain torch, a loop over time in Python, asked for by name
      for gru, 8 inputs, 16 units; 5 steps, batch 3; float32 on cpu, with gradient
    """
    entering = _ones(model, batch, time) if x is None else x
    if not model.built:  # by a call of its own, whose layers are not those of the one that is planned
        with settings(slow="allow"):
            model(_shaped(entering), training=training, **{name: _shaped(given) for name, given in kwargs.items()})
    variables = [variable for variable in model.variables if not variable.trainable]
    before = [keras.ops.copy(variable) for variable in variables]
    drawing = torch.random.fork_rng(gpus([variable.value for variable in model.variables], entering, kwargs))
    try:
        with loops.recording() as found, torch.set_grad_enabled(training), drawing, settings(slow="allow"):
            model(entering, training=training, **kwargs)
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
    rows = [(layer.path, type(layer).__name__, made) for layer, made in found]
    seen = {id(layer) for layer, _ in found}
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.RNN) and id(layer) not in seen and not _inside(layer, model, seen):
            rows.append((layer.path, type(layer).__name__, "not a layer of whorl, Keras chooses what runs"))
    return Explanation(tuple(rows))


def _inside(layer: Any, model: Any, seen: set[int]) -> bool:
    """Whether a Bidirectional ran the layer as one of its directions."""
    outer = [one for one in model._flatten_layers() if isinstance(one, keras.layers.Bidirectional) and id(one) in seen]
    return any(layer is one.forward_layer or layer is one.backward_layer for one in outer)


def _shaped(given: Any) -> Any:
    """Tensors of the same shapes without numbers; what is no tensor as it is."""

    def one(value: Any) -> Any:
        return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype)) if has(value) else value

    def has(value: Any) -> bool:
        return hasattr(value, "shape") and hasattr(value, "dtype")

    return keras.tree.map_structure(one, given)


def _ones(model: Any, batch: int, time: int) -> Any:
    """Not zeros, which an Embedding with `mask_zero` would mask."""
    if not getattr(model, "inputs", None):
        raise InputError(f"{model.name} is not known to have an input shape: give x, as in explain(model, x).")

    def one(tensor: Any) -> Any:
        first, *rest = tensor.shape
        return keras.ops.ones((first or batch, *(size or time for size in rest)), dtype=tensor.dtype)

    return keras.tree.map_structure(one, model.inputs[0] if len(model.inputs) == 1 else model.input)
