"""Pointwise expressions: what a cell's maths becomes when its step is traced.

A node is an operation and its arguments.  Its digest is that of the whole graph below it, so equal graphs have equal
digests in every process, and no table of nodes is needed to find what two expressions share.  An operation is one row
of `OPS`: its value on tensors and its derivative.  How C spells it stands in `lower`.
"""

import hashlib
import inspect
import json
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.errors import CellError


class Expr:
    """One node.  Build nodes with arithmetic, comparisons and the functions below, never by hand."""

    __slots__ = ("args", "digest", "op")
    __hash__ = None  # type: ignore[assignment]  # `==` builds a node, so a node is no key: its digest is

    def __init__(self, op: str, *args: Any) -> None:
        self.op, self.args = op, args
        content = (op, *(arg.digest if isinstance(arg, Expr) else arg for arg in args))
        self.digest: str = hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()

    @property
    def is_condition(self) -> bool:
        return self.op in _CONDITIONS

    def __repr__(self) -> str:
        return _text(self, 6)

    def __bool__(self) -> NoReturn:
        raise CellError(
            f"a step is traced once, so it cannot branch on {self}, which is known only when a kernel runs: "
            "write whorl.where(condition, a, b) instead of `if`, `and`, `or`, `min` or `max` "
            "(and `&`, `|`, `~` between conditions)."
        )

    def __float__(self) -> NoReturn:
        raise CellError(
            f"{self} has no number while a step is traced: use whorl's or torch's functions (whorl.tanh, torch.tanh), "
            "not those of math or numpy."
        )

    def __len__(self, *index: Any) -> NoReturn:
        raise CellError(f"{self} is one value for each unit: it has no length, and cannot be indexed or unpacked.")

    def __floordiv__(self, *other: Any) -> NoReturn:
        raise CellError(
            f"a step has no //, %, @, ^, << or >>, divmod or round of {self}: write it with {', '.join(_FUNCTIONS)}, "
            "arithmetic and comparisons (and `&`, `|`, `~` between conditions)."
        )

    def __xor__(self, other: Any) -> NoReturn:
        if self.is_condition:
            raise CellError(f"a step has no ^ of {self}: write (a | b) & ~(a & b) of two conditions.")
        self.__floordiv__(other)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise CellError(
            f"{self} is a value, which cannot be called: the recurrent weights of a gate n times a are r.n(a)."
        )

    def __getattr__(self, name: str) -> Callable[..., "Expr"]:
        """A tensor's method: `x.n.tanh()` is `torch.tanh(x.n)`."""
        method = None if name.startswith("_") else getattr(Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"an expression is one value for each unit, and has no {name!r}.")
        return lambda *args, **kwargs: self.__torch_function__(method, (), (self, *args), kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> "Expr":
        """Arithmetic and comparisons with numpy's numbers are ours; `lift` refuses an array."""
        own = _OF_NUMPY.get(ufunc.__name__)
        if own is None or method != "__call__" or kwargs:
            self.__array_function__(ufunc, (), (), {})
        return own(lift(inputs[0]), inputs[1])

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> NoReturn:
        name = getattr(function, "__name__", str(function))
        raise CellError(f"a step cannot use numpy's {name}: {_instead(name)}.")

    __int__ = __index__ = __float__
    __iter__ = __getitem__ = __len__
    __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __matmul__ = __rmatmul__ = __floordiv__
    __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __round__ = __floordiv__

    def __add__(self, other: Any) -> "Expr": return add(self, other)
    def __radd__(self, other: Any) -> "Expr": return add(other, self)
    def __sub__(self, other: Any) -> "Expr": return sub(self, other)
    def __rsub__(self, other: Any) -> "Expr": return sub(other, self)
    def __mul__(self, other: Any) -> "Expr": return mul(self, other)
    def __rmul__(self, other: Any) -> "Expr": return mul(other, self)
    def __truediv__(self, other: Any) -> "Expr": return div(self, other)
    def __rtruediv__(self, other: Any) -> "Expr": return div(other, self)
    def __pow__(self, exponent: Any) -> "Expr": return power(self, exponent)
    def __rpow__(self, base: Any) -> "Expr": return power(base, self)
    def __neg__(self) -> "Expr": return _apply("neg", self)
    def __pos__(self) -> "Expr": return self
    def __abs__(self) -> "Expr": return _apply("abs", self)
    def __lt__(self, other: Any) -> "Expr": return _apply("lt", self, other)
    def __gt__(self, other: Any) -> "Expr": return _apply("lt", other, self)
    def __le__(self, other: Any) -> "Expr": return _apply("le", self, other)
    def __ge__(self, other: Any) -> "Expr": return _apply("le", other, self)
    def __eq__(self, other: Any) -> "Expr": return _apply("eq", self, other)  # type: ignore[override]
    def __ne__(self, other: Any) -> "Expr": return _apply("ne", self, other)  # type: ignore[override]
    def __and__(self, other: Any) -> "Expr": return _apply("and", self, other)
    def __or__(self, other: Any) -> "Expr": return _apply("or", self, other)
    def __invert__(self) -> "Expr": return _apply("not", self)

    def __reduce__(self) -> tuple:
        return _one_from_json, (to_json([self]),)

    def __copy__(self) -> "Expr": return self
    def __deepcopy__(self, memo: dict) -> "Expr": return self

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> "Expr":
        name, kwargs = getattr(func, "__name__", str(func)), dict(kwargs or {})
        if kwargs.pop("inplace", False) or (name.endswith("_") and not name.endswith("__")):
            name = name.removesuffix("_")
            raise CellError(f"an expression cannot be changed in place: write y = {name}(x), without inplace=True.")
        meaning = TORCH.get(func)
        if meaning is None:
            of_condition = bool(args) and isinstance(args[0], Expr) and args[0].is_condition
            raise CellError(f"a step cannot use torch's {name}: {_instead(name, of_condition)}.")
        args = (*args, *(kwargs.pop(key) for key in ("condition", "input", "other", "exponent") if key in kwargs))
        if "alpha" in kwargs and name in ("add", "sub", "subtract"):
            sign = "+" if name == "add" else "-"
            raise CellError(f"a step cannot use torch's {name} with alpha: write a {sign} {kwargs['alpha']} * b.")
        try:
            inspect.signature(meaning).bind(*args, **kwargs)
        except TypeError as error:
            raise CellError(f"a step cannot use torch's {name} with these arguments: {error}.") from None
        return meaning(*args, **kwargs)


TORCH: dict[Callable, Callable[..., Expr]] = {}
"""What torch's own functions mean on expressions; `torch_functions` fills it."""


_OF_NUMPY: dict[str, Callable[[Any, Any], Expr]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "true_divide": operator.truediv, "power": operator.pow, "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne,
}  # fmt: skip
"""Functions by which numpy's numbers do arithmetic."""
_TO_DTYPE = frozenset("float double half bfloat16 int long bool to type type_as".split())


def _instead(name: str, of_condition: bool = False) -> str:
    """What to write in the place of a function that steps have not."""
    if name in ("mean", "average"):
        return "write whorl.mean(a), over the units of the layer, or whorl.mean([a, b]), over those of several gates"
    if name in _TO_DTYPE:
        made = "write whorl.where(condition, 1.0, 0.0)" if of_condition else "leave it out"
        return f"a kernel decides the dtype: {made}"
    if name in ("abs", "absolute"):
        return "write abs(a)"
    if name in _FUNCTIONS:
        return f"write whorl.{name}"
    return f"write it with {', '.join(_FUNCTIONS)}, arithmetic and comparisons"


class Op(NamedTuple):
    value: Callable[..., Tensor]
    """Tensors to a tensor."""
    gradient: Callable[..., tuple["Expr | None", ...]]
    """(gradient of the result, the result, *arguments) to the gradient of each argument; None where there is none."""

    @property
    def arity(self) -> int:
        return len(inspect.signature(self.gradient).parameters) - 2


# --- building ---------------------------------------------------------------------------------------------------------


def var(name: str) -> Expr:
    """A value that the step is given, such as `x.i` or `s.h`."""
    return Expr("var", name)


def const(value: float) -> Expr:
    """The same number for each unit and step."""
    return Expr("const", float(value))


def lift(value: Any) -> Expr:
    """`value` as an expression.

    Raises:
        CellError: something that is neither an expression nor a plain number.
    """
    if isinstance(value, Expr):
        return value
    if isinstance(value, Tensor):
        raise CellError(
            f"a step uses a tensor of shape {tuple(value.shape)} from outside: declare what is trained, a value for "
            "each unit, as @whorl.cell(vectors={'name': initial value}) and read v.name; a plain number is float(t)."
        )
    if isinstance(value, bool | np.bool_):
        raise CellError(f"a step uses {value} as a value: write a number, or a condition such as x.i > 0.")
    if hasattr(value, "assign"):  # a variable of Keras is a number here, which would stay what it is now
        raise CellError(
            f"a step uses {value!r}, which can be assigned another value: a number that stays is float(v), and what is "
            "trained is declared for each unit, as @whorl.cell(vectors={'name': initial value}), and read as v.name."
        )
    if isinstance(value, numbers.Real) or (hasattr(value, "__float__") and getattr(value, "ndim", 1) == 0):
        return const(float(value))
    raise CellError(f"a step uses {value!r}, of type {type(value).__name__}: it can use expressions and plain numbers.")


def _text(node: Any, depth: int) -> str:
    """A node as a person reads it, cut below `depth`: written out, a graph that shares can be exponentially long."""
    if not isinstance(node, Expr) or node.op in ("var", "const"):
        return str(node.args[0] if isinstance(node, Expr) else node)
    return f"{node.op}({', '.join(_text(arg, depth - 1) for arg in node.args) if depth else '...'})"


def _number(node: Expr) -> float | None:
    return node.args[0] if node.op == "const" else None


def _argument(op: str, value: Any, wants_condition: bool = False) -> Expr:
    node = lift(value)
    if node.is_condition != wants_condition:
        raise CellError(
            f"{op} takes a condition such as a > b, but was given the value {node}."
            if wants_condition
            else f"{op} takes values, but was given the condition {node}: write whorl.where({node}, 1.0, 0.0)."
        )
    return node


def _apply(op: str, *args: Any) -> Expr:
    if op in ("and", "or", "not"):
        return Expr(op, *(_argument(op, arg, wants_condition=True) for arg in args))
    return Expr(op, *(_argument(op, arg, op == "where" and index == 0) for index, arg in enumerate(args)))


def product(gate: str, operand: Any) -> Expr:
    """The recurrent weights of a gate times `operand`, plus the gate's recurrent bias."""
    return Expr("product", gate, _argument(f"r.{gate}", operand))


def add(a: Any, b: Any) -> Expr:
    return _apply("add", a, b)


def sub(a: Any, b: Any) -> Expr:
    return _apply("sub", a, b)


def mul(a: Any, b: Any) -> Expr:
    a, b = _argument("mul", a), _argument("mul", b)
    if _number(a) == 1:
        return b
    return a if _number(b) == 1 else Expr("mul", a, b)


def div(a: Any, b: Any) -> Expr:
    return _apply("div", a, b)


def power(base: Any, exponent: Any) -> Expr:
    """`base ** exponent`; the exponent is a plain number."""
    base, number = _argument("pow", base), _number(lift(exponent))
    if number is None:
        raise CellError(f"({base}) ** ({exponent}): the exponent must be a plain number; write exp(b * log(a)).")
    if number == 1:
        return base
    return mul(base, base) if number == 2 else _apply("pow", base, number)


# --- the functions that steps use; given tensors, they compute --------------------------------------------------------


def _pointwise(name: str, text: str) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        if isinstance(x, Tensor) or (hasattr(x, "__torch_function__") and not isinstance(x, Expr)):  # a Proxy of fx too
            return OPS[name].value(x)
        return _apply(name, x)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{text}\n\nTakes an expression or a number inside a step, or a tensor of any shape."
    return function


sigmoid = _pointwise("sigmoid", "1 / (1 + exp(-x)).")
tanh = _pointwise("tanh", "The hyperbolic tangent of x.")
relu = _pointwise("relu", "x where x > 0, else 0; its derivative at 0 is 0.")
softplus = _pointwise("softplus", "log(1 + exp(x)), and x above 20, as torch has it.")
exp = _pointwise("exp", "e to the power of x.")
expm1 = _pointwise("expm1", "exp(x) - 1, right for small x.")
log = _pointwise("log", "The natural logarithm of x.")
log1p = _pointwise("log1p", "log(1 + x), right for small x.")
sqrt = _pointwise("sqrt", "The square root of x.")
rsqrt = _pointwise("rsqrt", "1 / sqrt(x).")
erf = _pointwise("erf", "The error function of x.")
sin = _pointwise("sin", "The sine of x, in radians.")
cos = _pointwise("cos", "The cosine of x, in radians.")


def _computes(*args: Any) -> bool:
    """Whether a function of several arguments is given tensors, and plain numbers beside them."""
    return any(isinstance(arg, Tensor) for arg in args) and not any(isinstance(arg, Expr) for arg in args)


def _tensors(a: Any, b: Any) -> tuple[Tensor, ...]:
    like = a if isinstance(a, Tensor) else b
    return tuple(arg if isinstance(arg, Tensor) else like.new_tensor(arg) for arg in (a, b))


def where(condition: Any, a: Any, b: Any) -> Any:
    """`a` where `condition` holds, else `b`; of expressions, or of tensors."""
    return torch.where(condition, a, b) if _computes(condition, a, b) else _apply("where", condition, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of `a` and `b`, of expressions or tensors; a NaN wins."""
    return torch.minimum(*_tensors(a, b)) if _computes(a, b) else _apply("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of `a` and `b`, of expressions or tensors; a NaN wins."""
    return torch.maximum(*_tensors(a, b)) if _computes(a, b) else _apply("maximum", a, b)


def clip(x: Any, low: float, high: float) -> Any:
    """`x` held between the plain numbers `low` and `high`; the gradient passes inside and at both ends."""
    ends = _number(lift(low)), _number(lift(high))
    if None in ends:
        raise CellError(f"clip({x}, {low}, {high}): the ends must be plain numbers; write minimum and maximum.")
    if not ends[0] <= ends[1]:  # type: ignore[operator]
        raise CellError(f"clip({x}, {low}, {high}): the first end must not be above the second.")
    return torch.clamp(x, *ends) if isinstance(x, Tensor) else _apply("clip", x, *ends)


def mean(values: Any, *others: Any) -> Any:
    """The mean over the units of the layer, and over all of `values` where they are a list of gates.

    Takes an expression or a list of expressions inside a step, and gives one value for each sequence; of a tensor
    [..., units] or a list of them it gives [..., 1].
    """
    if others:
        raise CellError("mean takes one value or one list: write whorl.mean([a, b]).")
    parts = list(values) if isinstance(values, list | tuple) else [values]
    if not parts:
        raise CellError("mean([]): give it at least one value.")
    if all(isinstance(part, Tensor) for part in parts):
        return _mean_of_tensors(*parts)
    return _apply("mean", *parts)


def _mean_of_tensors(*parts: Tensor) -> Tensor:
    means = [part.mean(-1, keepdim=True) for part in parts]
    return reduce(torch.add, means) / len(means) if len(means) > 1 else means[0]


_FUNCTIONS = (
    "sigmoid tanh relu softplus exp expm1 log log1p sqrt rsqrt abs erf sin cos where minimum maximum clip mean".split()
)


# --- what an operation means ------------------------------------------------------------------------------------------


def _clip_value(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return torch.clamp(x, low, high)


def _tied(g: Expr, a: Expr, b: Expr) -> tuple[Expr, Expr]:
    """The gradients of maximum(a, b); as in torch, two that are equal get half each, two with a NaN get all each."""
    to_a = where(a == b, 0.5 * g, where(a < b, 0.0, g))
    return to_a, where(a == b, 0.5 * g, where(b < a, 0.0, g))


_NONE = (None, None)
_TWO_OVER_SQRT_PI = 1.1283791670955126

OPS: dict[str, Op] = {
    "add": Op(torch.add, lambda g, y, a, b: (g, g)),
    "sub": Op(torch.sub, lambda g, y, a, b: (g, -g)),
    "mul": Op(torch.mul, lambda g, y, a, b: (g * b, g * a)),
    "div": Op(torch.div, lambda g, y, a, b: (g / b, -(g * y / b))),
    "neg": Op(torch.neg, lambda g, y, x: (-g,)),
    "pow": Op(torch.pow, lambda g, y, x, k: (g * k * power(x, k.args[0] - 1) if k.args[0] else None, None)),
    "lt": Op(torch.lt, lambda g, y, a, b: _NONE),
    "le": Op(torch.le, lambda g, y, a, b: _NONE),
    "eq": Op(torch.eq, lambda g, y, a, b: _NONE),
    "ne": Op(torch.ne, lambda g, y, a, b: _NONE),
    "and": Op(torch.logical_and, lambda g, y, a, b: _NONE),
    "or": Op(torch.logical_or, lambda g, y, a, b: _NONE),
    "not": Op(torch.logical_not, lambda g, y, a: (None,)),
    "where": Op(torch.where, lambda g, y, c, a, b: (None, where(c, g, 0.0), where(c, 0.0, g))),
    "minimum": Op(torch.minimum, lambda g, y, a, b: _tied(g, a, b)[::-1]),
    "maximum": Op(torch.maximum, lambda g, y, a, b: _tied(g, a, b)),
    "clip": Op(_clip_value, lambda g, y, x, low, high: (where((low <= x) & (x <= high), g, 0.0), None, None)),
    "abs": Op(torch.abs, lambda g, y, x: (where(x < 0.0, -g, where(0.0 < x, g, 0.0)),)),
    "sqrt": Op(torch.sqrt, lambda g, y, x: (g / (2.0 * y),)),
    "rsqrt": Op(torch.rsqrt, lambda g, y, x: (-0.5 * g * y * y * y,)),
    "exp": Op(torch.exp, lambda g, y, x: (g * y,)),
    "expm1": Op(torch.expm1, lambda g, y, x: (g * exp(x),)),
    "log": Op(torch.log, lambda g, y, x: (g / x,)),
    "log1p": Op(torch.log1p, lambda g, y, x: (g / (x + 1.0),)),
    "erf": Op(torch.erf, lambda g, y, x: (g * _TWO_OVER_SQRT_PI * exp(-(x * x)),)),
    "sin": Op(torch.sin, lambda g, y, x: (g * cos(x),)),
    "cos": Op(torch.cos, lambda g, y, x: (-(g * sin(x)),)),
    "sigmoid": Op(torch.sigmoid, lambda g, y, x: (g * y * (1.0 - y),)),
    "tanh": Op(torch.tanh, lambda g, y, x: (g * (1.0 - y * y),)),
    "relu": Op(torch.relu, lambda g, y, x: (where(x <= 0.0, 0.0, g),)),
    "softplus": Op(F.softplus, lambda g, y, x: (where(20.0 < x, g, g * sigmoid(x)),)),
}
_CONDITIONS = frozenset({"lt", "le", "eq", "ne", "and", "or", "not"})

# The operations that look across units; everything else is pointwise.  A step splits into stages at each of them.
#   mean(a, b, ...)      the mean over the units of the layer, and over a, b, ...
#   product(gate, a)     recurrent weights of the gate times a, plus the gate's recurrent bias
#   pull(gate, g)        the transposed recurrent weights of the gate times g: the gradient of product with respect to a
#   variance(a, b, ...)  of what `mean` takes, biased; no step is traced to it: `graphs.merged` finds it
COLLECTIVES = frozenset({"mean", "variance", "product", "pull"})


# --- graphs: order and text -------------------------------------------------------------------------------------------


def topological(outputs: Iterable[Expr]) -> list[Expr]:
    """Every node that `outputs` need, once, each after its arguments."""
    order: dict[str, Expr] = {}
    pending = [(node, False) for node in reversed(list(outputs))]
    while pending:
        node, ready = pending.pop()
        if node.digest in order:
            continue
        if ready:
            order[node.digest] = node
        else:
            pending.append((node, True))
            pending.extend((arg, False) for arg in reversed(node.args) if isinstance(arg, Expr))
    return list(order.values())


def to_json(outputs: Sequence[Expr]) -> str:
    """The graph as text that `from_json` reads back to the same digests."""
    nodes = topological(outputs)
    place = {node.digest: index for index, node in enumerate(nodes)}
    rows: list[list[Any]] = []
    for node in nodes:
        if node.op == "const":
            rows.append(["const", node.args[0].hex()])
        else:
            rows.append([node.op, *(place[arg.digest] if isinstance(arg, Expr) else arg for arg in node.args)])
    return json.dumps({"nodes": rows, "outputs": [place[node.digest] for node in outputs]}, separators=(",", ":"))


def from_json(text: str) -> list[Expr]:
    """The outputs of a graph that `to_json` wrote; nothing in the text is executed.

    Raises:
        CellError: text that is no such graph.
    """
    try:
        data = json.loads(text)
        nodes: list[Expr] = []
        for op, *args in data["nodes"]:
            nodes.append(_read(op, args, nodes))
        return [_earlier(nodes, index) for index in data["outputs"]]
    except (KeyError, TypeError, IndexError, ValueError, OverflowError, RecursionError) as error:
        raise CellError(f"this is no graph of a cell as whorl writes it: {error!r}.") from error


def _read(op: str, args: list[Any], nodes: list[Expr]) -> Expr:
    """One node of the text; a name in it goes into the source of kernels, so it must be one."""
    if op in ("var", "product", "pull") and not (isinstance(args[0], str) and _LEAF.fullmatch(args[0])):
        raise ValueError(f"{args[0]!r} is no name")
    if op in ("var", "const"):
        (value,) = args
        return var(value) if op == "var" else const(float.fromhex(value))
    if op in ("product", "pull"):
        gate, operand = args
        return Expr(op, gate, _argument(op, _earlier(nodes, operand)))
    if len(args) != OPS[op].arity if op != "mean" else not args:
        raise ValueError(f"{op} of {len(args)} arguments")
    parts = [_earlier(nodes, index) for index in args]
    if op in ("pow", "clip") and not all(part.op == "const" for part in parts[1:]):
        raise ValueError(f"{op} of what is no plain number")
    return _apply(op, *parts)


def _earlier(nodes: list[Expr], index: Any) -> Expr:
    if type(index) is not int or not 0 <= index < len(nodes):
        raise ValueError(f"{index!r} is no place of an earlier node")
    return nodes[index]


_LEAF = re.compile(r"[A-Za-z]\w*(\.\w+)?", re.ASCII)


def _one_from_json(text: str) -> Expr:
    return from_json(text)[0]
