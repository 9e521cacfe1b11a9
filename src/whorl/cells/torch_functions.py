"""What torch's own functions mean on expressions, so that `torch.tanh`, `F.silu` and activation modules work in steps.

Values and derivatives are torch's, at the kinks too: `clamp` passes the gradient at its ends, `hardtanh` does not.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from whorl.cells import expr
from whorl.cells.expr import TORCH, Expr, clip, erf, exp, expm1, lift, log1p, minimum, sigmoid, softplus, tanh, where
from whorl.errors import CellError


def _clamp(x: Any, min: Any = None, max: Any = None) -> Expr:
    return clip(x, float("-inf") if min is None else min, float("inf") if max is None else max)


def _softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Expr:
    if threshold != 20:
        raise CellError(f"softplus with threshold={threshold}: a step takes torch's default, 20.")
    return softplus(x) if beta == 1 else softplus(beta * x) / beta


def _gelu(x: Any, approximate: str = "none") -> Expr:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1.0 + erf(x * 0.7071067811865476))


def _elu(x: Any, alpha: float = 1.0) -> Expr:
    return where(0.0 < x, x, alpha * _expm1_below_zero(x))


def _celu(x: Any, alpha: float = 1.0) -> Expr:
    return where(0.0 < x, x, alpha * _expm1_below_zero(x / alpha))


def _selu(x: Any) -> Expr:
    return 1.0507009873554805 * _elu(x, 1.6732632423543772)


def _expm1_below_zero(x: Any) -> Expr:
    return expm1(where(0.0 < x, 0.0, x))  # above, exp overflows and its gradient would be 0 times infinity


def _hardtanh(x: Any, min_val: float = -1.0, max_val: float = 1.0) -> Expr:
    return where(x <= min_val, min_val, where(max_val <= x, max_val, x))


def _hardsigmoid(x: Any) -> Expr:
    return _hardtanh(x + 3.0, 0.0, 6.0) / 6.0


def _compare(name: str) -> Callable[[Any, Any], Expr]:
    return lambda a, b: getattr(operator, name)(lift(a), b)


_MEANINGS: dict[str, Callable[..., Any]] = {
    **{name: getattr(expr, name) for name in "sigmoid tanh relu exp expm1 log log1p sqrt rsqrt erf sin cos".split()},
    **{name: getattr(expr, name) for name in "where minimum maximum".split()},
    **{name: _compare(name) for name in "lt le gt ge eq ne".split()},
    "abs absolute": lambda x: abs(x),
    "neg negative": lambda x: -x,
    "add": lambda a, b: expr.add(a, b),
    "sub subtract": lambda a, b: expr.sub(a, b),
    "mul multiply": lambda a, b: expr.mul(a, b),
    "div divide true_divide": lambda a, b: expr.div(a, b),
    "pow": lambda a, b: expr.power(a, b),
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1.0 / x,
    "logical_and": lambda a, b: a & b,
    "logical_or": lambda a, b: a | b,
    "logical_not": lambda a: ~a,
    "clamp clip": _clamp,
    "softplus": _softplus,
    "gelu": _gelu,
    "elu": _elu,
    "celu": _celu,
    "selu": _selu,
    "silu": lambda x: x * sigmoid(x),
    "mish": lambda x: x * tanh(softplus(x)),
    "leaky_relu": lambda x, negative_slope=0.01: where(0.0 < x, x, negative_slope * x),
    "hardtanh": _hardtanh,
    "relu6": lambda x: _hardtanh(x, 0.0, 6.0),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "softsign": lambda x: x / (1.0 + abs(x)),
    "logsigmoid": lambda x: minimum(x, 0.0) - log1p(exp(-abs(x))),
}
for _names, _meaning in _MEANINGS.items():
    for _name in _names.split():
        for _place in (torch, F, torch.Tensor):
            if hasattr(_place, _name):
                TORCH[getattr(_place, _name)] = _meaning
