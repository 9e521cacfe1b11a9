"""What an activation of Keras means on expressions: a name, a layer, or any function that is pointwise.

A function is traced once: with an expression, as torch's functions and arithmetic take it, else as Keras traces its own
functional models, whose graph of operations is then read through a table.  What is not pointwise (softmax) or has
weights (PReLU) has no such meaning, and says so.
"""

import operator
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import keras
import torch.nn.functional as F

from whorl.cells import expr
from whorl.cells.expr import Expr
from whorl.errors import CellError

Function = Callable[[Any], Any]

_NAMED: dict[str, Function] = {
    **{name: getattr(expr, name) for name in "tanh sigmoid relu softplus".split()},
    **{name: getattr(F, name) for name in "relu6 elu selu celu gelu silu mish softsign".split()},
    "linear": operator.pos,
    "exponential": expr.exp,
    "hard_sigmoid": F.hardsigmoid,
    "hard_silu": F.hardswish,
    "hard_tanh": F.hardtanh,
    "log_sigmoid": F.logsigmoid,
}
"""Those of `keras.activations` that one function here is, by name, at their defaults."""


def _relu(op: Any, x: Any) -> Any:
    """Keras' relu of four numbers: max_value above, x between it and the threshold, below it a line."""
    slope, least = float(op.negative_slope or 0.0), float(op.threshold or 0.0)
    kept = expr.relu(x) if slope == least == 0.0 else expr.where(least < x, x, slope * (x - least))
    return kept if op.max_value is None else F.hardtanh(kept, float("-inf"), float(op.max_value))


def _soft_shrink(op: Any, x: Any) -> Any:
    shrunk = expr.where(0.0 < x, x - op.threshold, x + op.threshold)
    return expr.where(abs(x) <= op.threshold, 0.0, shrunk)


def _apply(activation: Any, x: Any) -> Any:
    return pointwise(activation)(x)


def _between(x: Any, inside: Any, above: Any) -> Any:
    """0 up to -1, `above` from 1 on."""
    return expr.where(x <= -1.0, 0.0, expr.where(1.0 <= x, above, inside))


_WITH_NUMBERS: dict[str, Callable[..., Any]] = {
    "ReLU": _relu,
    "LeakyReLU": lambda op, x: F.leaky_relu(x, op.negative_slope),
    "LeakyRelu": lambda op, x: F.leaky_relu(x, op.negative_slope),
    "ELU": lambda op, x: F.elu(x, op.alpha),
    "Elu": lambda op, x: F.elu(x, op.alpha),
    "Celu": lambda op, x: F.celu(x, op.alpha),
    "Gelu": lambda op, x: F.gelu(x, approximate="tanh" if op.approximate else "none"),
    "SoftShrink": _soft_shrink,
    "HardShrink": lambda op, x: expr.where(abs(x) <= op.threshold, 0.0, x),
    "Threshold": lambda op, x: expr.where(op.threshold < x, x, op.default_value),
    "Squareplus": lambda op, x: (x + expr.sqrt(x * x + op.b)) / 2,
    "Activation": lambda op, x: _apply(op.activation, x),
    "Clip": lambda op, x: expr.clip(x, float(op.x_min), float(op.x_max)),
}
"""Keras' operations and activation layers that hold numbers: (operation, its arguments) to an expression."""

_PLAIN: dict[str, Callable[..., Any]] = {
    **{name.replace("_", ""): function for name, function in _NAMED.items()},
    **{name: getattr(expr, name) for name in "exp expm1 log log1p sqrt rsqrt erf sin cos".split()},
    **{name: getattr(expr, name) for name in "where maximum minimum".split()},
    "negative": operator.neg,
    "absolute": abs,
    "abs": abs,
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "truedivide": operator.truediv,
    "power": operator.pow,
    "square": lambda x: x * x,
    "less": operator.lt,
    "lessequal": operator.le,
    "greater": operator.gt,
    "greaterequal": operator.ge,
    "tanhshrink": lambda x: x - expr.tanh(x),
    "sparseplus": lambda x: _between(x, 0.25 * (x + 1.0) * (x + 1.0), x),
    "sparsesigmoid": lambda x: _between(x, 0.5 * (x + 1.0), 1.0),
}
"""Keras' other operations, by the name of their class in small letters."""


def _meaning(op: Any) -> Callable[..., Any] | None:
    """What an operation of Keras does to expressions, or None where it is not known."""
    name = type(op).__name__ if type(op).__module__.startswith("keras.") else ""
    held = _WITH_NUMBERS.get(name)
    return partial(held, op) if held is not None else _PLAIN.get(name.lower())


@lru_cache(maxsize=256)
def pointwise(activation: Any) -> Function:
    """The function of expressions that an activation is, as `keras.activations.get` gives it.

    Raises:
        CellError: one that is not pointwise, or that whorl cannot read; the message says why.

    >>> import keras
    >>> from whorl.cells.expr import var
    >>> pointwise(keras.activations.tanh)(var("x"))
    tanh(x)
    >>> pointwise(lambda x: 0.5 * keras.ops.tanh(x))(var("x"))
    mul(0.5, tanh(x))
    """
    name = getattr(activation, "__name__", "")
    if name in _NAMED and activation is getattr(keras.activations, name, None):
        return _NAMED[name]
    if isinstance(activation, keras.Operation):  # called, a layer with weights would build them for what it is given
        meaning = _meaning(activation)
        if meaning is None:
            raise CellError(_unknown(_title(activation), activation))
        return meaning
    direct = _as_torch_code(activation)
    return direct if not isinstance(direct, str) else _as_keras_graph(activation, direct)


# What a function of someone else raises where it is given an expression or a symbolic tensor that it cannot take.
_REFUSALS = (CellError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError)


def _as_torch_code(activation: Function) -> Function | str:
    """The function itself where it takes an expression, or why not."""
    try:
        made = activation(expr.var("x"))
    except _REFUSALS as error:
        return str(error)
    return activation if isinstance(made, Expr) else f"it gave {type(made).__name__}"


def _as_keras_graph(activation: Function, why: str) -> Function:
    """The graph that Keras records of the function, read through `_meaning`."""
    one, other = [_graph(activation, why, shape) for shape in ((2, 3), (5, 7))]
    if one(expr.var("x")).digest != other(expr.var("x")).digest:
        raise CellError(f"the activation {_title(activation)} is not pointwise: it reads the shape of its input")
    return one


def _graph(activation: Function, why: str, shape: tuple[int, ...]) -> Function:
    """The graph of an input of one shape.

    Args:
        why: torch's way cannot read the function.
    """
    entering, title = keras.KerasTensor(shape), _title(activation)
    try:
        graph = keras.Function(entering, activation(entering))
    except _REFUSALS as error:
        raise CellError(f"the activation {title} cannot be read as pointwise: {why}; {error}") from None
    unknown = [op for op in graph.operations if _meaning(op) is None]
    if unknown:
        raise CellError(_unknown(title, unknown[0]))

    def function(x: Any) -> Any:
        return graph._run_through_graph([x], operation_fn=_meaning)

    function.__name__ = title
    return function


def _unknown(title: str, op: Any) -> str:
    return f"the activation {title} is not pointwise, or uses what whorl does not know: {type(op).__name__}"


def _title(activation: Any) -> str:
    return getattr(activation, "__name__", type(activation).__name__).strip("<>").lower()
