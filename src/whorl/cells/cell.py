"""A cell: its gates, states and vectors, and its step; the graph that a trace of the step gives, and its gradient.

    @cell(gates="i f g o", states="h c")
    def my_lstm(x, r, s):
        i, f, o = sigmoid(x.i + r.i), sigmoid(x.f + r.f), sigmoid(x.o + r.o)
        c = f * s.c + i * tanh(x.g + r.g)
        return dict(h=o * tanh(c), c=c)

Leaves of a graph are named by what they hold: `x.i` the input projection of gate i, `r.i` its recurrent projection,
`s.h` the state before the step, `v.gamma` a trained value for each unit, `e.d` an extra input of the step.
"""

import inspect
import json
import numbers
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from whorl.cells.expr import Expr, const, from_json, lift, product, to_json, topological, var
from whorl.cells.graphs import fingerprint, gradient
from whorl.errors import CellError

MOST_GATES, MOST_STATES = 8, 4
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Product(NamedTuple):
    """One `r.n(a)`: what a gradient needs of it."""

    gate: str
    operand: Expr
    gradient: Expr
    """With respect to the product's result; the weights' gradient is its outer product with the operand."""


@dataclass(frozen=True, eq=False)
class Backward:
    """The gradient of one step, given `d.h`, `d.c`, ...: the gradients of the states after it."""

    x: dict[str, Expr]
    """With respect to the input projection of each gate."""
    r: dict[str, Expr]
    """With respect to `r.n` of each recurrent gate: the product with the first state."""
    s: dict[str, Expr]
    """With respect to each state before the step, without what flows through `r`."""
    v: dict[str, Expr]
    e: dict[str, Expr]
    products: tuple[Product, ...]

    def named(self) -> dict[str, Expr]:
        """Every output by a name that C can hold: `dx.i`, `dr.i`, `ds.h`, `dv.gamma`, `de.d`, `dp.0`."""
        rows = {f"d{kind}.{name}": node for kind in "xrsve" for name, node in getattr(self, kind).items()}
        return rows | {f"dp.{index}": made.gradient for index, made in enumerate(self.products)}


@dataclass(frozen=True, eq=False)
class Graph:
    """What a step means, without the Python that wrote it: the part of a cell that kernels, caches and exports see."""

    name: str
    gates: tuple[str, ...]
    states: tuple[str, ...]
    vectors: tuple[str, ...]
    inputs: tuple[str, ...]
    x_only: tuple[str, ...]
    outputs: tuple[Expr, ...]
    """The state after the step, for each state in order."""
    projection: str = ""
    """The gate, the last, whose recurrent weights give the first state of what the cell makes of it; "" for none."""

    def __post_init__(self) -> None:
        _check_names(self.name, self.gates, self.states, self.vectors, self.inputs, self.x_only)
        for state, node in zip(self.states, self.outputs, strict=True):
            if node.is_condition:
                raise CellError(f"{self.name} gives the condition {node} as {state}: write whorl.where(it, 1.0, 0.0).")
        if self.projection and self.recurrent[-1:] != (self.projection,):
            raise CellError(f"{self.name} projects by {self.projection!r}, which is not its last recurrent gate.")
        known = {f"{kind}.{name}" for kind, names in self._leaves.items() for name in names}
        for node in topological(self.outputs):
            name = f"r.{node.args[0]}" if node.op == "product" else node.args[0] if node.op == "var" else None
            if node.op == "pull" or (name is not None and name not in known):
                raise CellError(f"the step of {self.name} reads {node}, which is none of {', '.join(sorted(known))}.")

    @property
    def _leaves(self) -> dict[str, tuple[str, ...]]:
        return {"x": self.gates, "r": self.recurrent, "s": self.states, "v": self.vectors, "e": self.inputs}

    @cached_property
    def recurrent(self) -> tuple[str, ...]:
        """The gates that have recurrent weights, in order."""
        return tuple(gate for gate in self.gates if gate not in self.x_only)

    @cached_property
    def masked(self) -> tuple[str, ...]:
        """The recurrent gates whose operand recurrent dropout multiplies: a projection's it does not."""
        return tuple(gate for gate in self.recurrent if gate != self.projection)

    def named(self) -> dict[str, Expr]:
        """Every output by a name that C can hold: `after.h`, `after.c`."""
        return {f"after.{state}": node for state, node in zip(self.states, self.outputs, strict=True)}

    @cached_property
    def fingerprint(self) -> str:
        """A key of the step's meaning: equal for two cells that compute the same, whatever their names or Python."""
        projection = [self.projection] if self.projection else []
        names = json.dumps([self.gates, self.states, self.vectors, self.inputs, self.x_only, *projection])
        return fingerprint([var(names), *self.outputs])

    @cached_property
    def products(self) -> tuple[Expr, ...]:
        """Each `r.n(a)` of the step, in the order of the graph."""
        return tuple(node for node in topological(self.outputs) if node.op == "product")

    @cached_property
    def backward(self) -> Backward:
        """The gradient of the step, derived from its graph."""
        wrt = [var(f"{kind}.{name}") for kind, names in self._leaves.items() for name in names]
        after = [(node, var(f"d.{state}")) for state, node in zip(self.states, self.outputs, strict=True)]
        grads = iter([node if node is not None else const(0.0) for node in gradient(after, [*wrt, *self.products])])
        by_kind = {kind: {name: next(grads) for name in names} for kind, names in self._leaves.items()}
        products = tuple(Product(node.args[0], node.args[1], next(grads)) for node in self.products)
        return Backward(**by_kind, products=products)

    def to_json(self) -> str:
        """The graph as one line of text, for compile caches and exports that outlive the process."""
        names = {key: getattr(self, key) for key in ("name", "gates", "states", "vectors", "inputs", "x_only")}
        names |= {"projection": self.projection} if self.projection else {}
        return json.dumps(names | {"graph": to_json(self.outputs)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Graph":
        """The graph that `to_json` wrote; nothing in the text is executed.

        Raises:
            CellError: text that is no such graph.
        """
        try:
            data = json.loads(text)
            names = {key: tuple(data[key]) for key in ("gates", "states", "vectors", "inputs", "x_only")}
            outputs, projection = tuple(from_json(data["graph"])), str(data.get("projection", ""))
            return Graph(name=str(data["name"]), outputs=outputs, projection=projection, **names)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise CellError(f"this is no cell as whorl writes it: {error!r}.") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and (self.fingerprint, self.name) == (other.fingerprint, other.name)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple:
        return Graph.from_json, (self.to_json(),)


@dataclass(frozen=True, eq=False, repr=False)
class Cell:
    """A step and the names of what it works on.  Made by `@whorl.cell`; called, it runs its step."""

    step: Callable[..., Mapping[str, Any]]
    gates: tuple[str, ...]
    states: tuple[str, ...]
    vectors: Mapping[str, float] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    x_only: tuple[str, ...] = ()
    origin: tuple[Callable[..., "Cell"], tuple] | None = None
    """The function that made it, and with what: how a cell with options is pickled."""

    def __post_init__(self) -> None:
        _check_names(self.name, self.gates, self.states, tuple(self.vectors), self.inputs, self.x_only)
        for name, initial in self.vectors.items():
            if not isinstance(initial, numbers.Real):
                raise CellError(f"the vector {name} begins as {initial!r}: give one number, for every unit.")

    @property
    def name(self) -> str:
        return getattr(self.step, "__name__", type(self.step).__name__)

    @cached_property
    def graph(self) -> Graph:
        """The step, traced once.

        Raises:
            CellError: a step that cannot be traced; the message says what to write instead.
        """
        x_only = tuple(gate for gate in self.gates if gate in self.x_only)
        recurrent = [gate for gate in self.gates if gate not in x_only]
        arguments = [
            _Names(f"x of {self.name}", {**_leaves("x", self.gates), **_leaves("e", self.inputs)}),
            _Names(f"r of {self.name}", {gate: _Recurrent(gate, self.states[0]) for gate in recurrent}),
            _Names(f"s of {self.name}", _leaves("s", self.states)),
        ]
        if self.vectors:
            arguments.append(_Names(f"v of {self.name}", _leaves("v", self.vectors)))
        try:
            inspect.signature(self.step).bind(*arguments)
        except TypeError as error:
            taken = "x, r, s, v: it has vectors" if self.vectors else "x, r, s, and v only with vectors={...}"
            raise CellError(f"{error}: the step of {self.name} takes {taken}.") from None
        after = self.step(*arguments)
        if not isinstance(after, Mapping) or set(after) != set(self.states):
            given = f"the states {', '.join(map(str, after))}" if isinstance(after, Mapping) else type(after).__name__
            wanted = ", ".join(f"{state}=..." for state in self.states)
            raise CellError(f"the step of {self.name} returned {given}: return dict({wanted}).")
        outputs = tuple(lift(after[state]) for state in self.states)
        return Graph(self.name, self.gates, self.states, tuple(self.vectors), self.inputs, x_only, outputs)

    def __call__(self, *args: Any) -> Mapping[str, Any]:
        return self.step(*args)

    def __repr__(self) -> str:
        return f"<cell {self.name}: gates {' '.join(self.gates)}, states {' '.join(self.states)}>"

    def __copy__(self) -> "Cell":
        return self

    def __deepcopy__(self, memo: dict) -> "Cell":
        return self

    def __reduce__(self) -> str | tuple:
        if self.origin is not None:
            return self.origin
        module, name = self.step.__module__, getattr(self.step, "__qualname__", self.name)
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:  # `@cell` put the cell where the function's name says
            return _find_cell, (module, name)
        if found is self.step:
            return Cell, (self.step, self.gates, self.states, dict(self.vectors), self.inputs, self.x_only)
        raise CellError(
            f"the cell {self.name} cannot be pickled: its step is {module}.{name}, which cannot be found again by that "
            "name; write it as a function at the top of a module, not as a lambda or inside another function."
        )


def cell(
    gates: str | Iterable[str],
    states: str | Iterable[str],
    *,
    vectors: Mapping[str, float] | None = None,
    inputs: str | Iterable[str] = (),
    x_only: str | Iterable[str] = (),
) -> Callable[[Callable[..., Mapping[str, Any]]], Cell]:
    """A decorator that makes a `Cell` of a step.

    Args:
        gates: names of 1 to 8 gates, in the order of the rows of the weights; "i f g o" or a list.
        states: names of 1 to 4 states; the first is the output, and what the recurrent weights multiply.
        vectors: name and initial value of trained values, one for each unit.
        inputs: names of extra inputs of each step, read as `x.name`, one value for each unit.
        x_only: gates without recurrent weights.

    The step takes `x, r, s` (and `v` where there are vectors), each read by name, and returns a dict of all states.
    `r.n` is the recurrent weights of gate n times the first state, plus the recurrent bias; `r.n(a)` the same
    weights times `a`.

    Raises:
        CellError: names that are missing, doubled or no names.

    >>> @whorl.cell(gates="n", states="h")
    ... def leaky(x, r, s):
    ...     return dict(h=0.9 * s.h + 0.1 * whorl.tanh(x.n + r.n))
    >>> leaky.graph.outputs[0]
    add(mul(0.9, s.h), mul(0.1, tanh(add(x.n, r.n))))
    """

    def make(step: Callable[..., Mapping[str, Any]]) -> Cell:
        return Cell(step, _split(gates), _split(states), dict(vectors or {}), _split(inputs), _split(x_only))

    if not isinstance(vectors, Mapping | None):
        raise CellError(f"vectors={vectors!r}: write names and initial values, vectors={{'gamma': 1.0}}.")
    return make


def _check_names(
    cell: str,
    gates: tuple[str, ...],
    states: tuple[str, ...],
    vectors: tuple[str, ...],
    inputs: tuple[str, ...],
    x_only: tuple[str, ...],
) -> None:
    """Names go into the source of kernels, and the numbers of gates and states into their size."""
    for kind, group in {"gates": gates, "states": states, "vectors": vectors, "inputs": inputs}.items():
        for name in group:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise CellError(f"{kind} has the name {name!r}: names are letters, digits and _, a letter first.")
        if len(set(group)) < len(group):
            raise CellError(f"{kind} names one thing twice: {' '.join(group)}.")
    if not 1 <= len(gates) <= MOST_GATES or not 1 <= len(states) <= MOST_STATES:
        raise CellError(
            f"{cell} has {len(gates)} gates and {len(states)} states: "
            f"a cell has 1 to {MOST_GATES} gates and 1 to {MOST_STATES} states."
        )
    for name in x_only:
        if name not in gates:
            raise CellError(f"x_only names {name!r}, which is none of the gates {' '.join(gates)}.")
    if set(inputs) & set(gates):
        raise CellError("a gate and an extra input share a name, and both are read from x: rename one.")


def _split(names: str | Iterable[str]) -> tuple[str, ...]:
    return tuple(names.split() if isinstance(names, str) else names)


def _leaves(kind: str, names: Iterable[str]) -> dict[str, Expr]:
    return {name: var(f"{kind}.{name}") for name in names}


def _find_cell(module: str, name: str) -> Cell:
    __import__(module)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _Recurrent(Expr):
    """`r.n`, which is a value, and can be called for the product with something other than the first state."""

    __slots__ = ("_gate", "_state")

    def __init__(self, gate: str, state: str) -> None:
        super().__init__("var", f"r.{gate}")
        self._gate, self._state = gate, state

    def __call__(self, *operands: Any) -> Expr:
        if len(operands) != 1:
            raise CellError(
                f"r.{self._gate} was given {len(operands)} values: write r.{self._gate}(a) for the recurrent weights "
                f"times a, and r.{self._gate} where they multiply the first state."
            )
        made = product(self._gate, operands[0])
        return self if made.args[1].digest == var(f"s.{self._state}").digest else made


class _Names:
    """`x`, `r`, `s` and `v` of a step: values by name."""

    def __init__(self, what: str, values: dict[str, Expr]) -> None:
        self._what, self._values = what, values

    def __getattr__(self, name: str) -> Expr:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise CellError(f"{self._what} has no {name!r}: it has {', '.join(self._values) or 'nothing'}.") from None

    def __getitem__(self, key: Any) -> NoReturn:
        kind, names = self._what[0], [*self._values]
        name = key if key in names else (names or ["name"])[0]
        raise CellError(f"{self._what} is read by names: write {kind}.{name}, not {kind}[{key!r}].")
