"""What the values of a step can be, by intervals of its formulas, whatever comes into it."""

from collections.abc import Callable
from functools import lru_cache

from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, topological


@lru_cache(maxsize=256)
def bounded(graph: Graph) -> bool:
    """Whether the first state is in [-1, 1] after a step, whatever came before: by intervals.

    An LSTM's is; a GRU's is between what it was and [-1, 1], and initial states may be anything.
    """
    low, high = _intervals(graph)[graph.outputs[0].digest]
    return -1 <= low and high <= 1


@lru_cache(maxsize=256)
def contained_inside(graph: Graph) -> bool:
    """Whether what enters each product inside the step is never larger than 1, or than the first state before the step.

    It is in [-1, 1], or that state times such numbers.
    """
    within = _intervals(graph)

    def small(node: Expr) -> bool:
        low, high = within[node.digest]
        return -1 <= low and high <= 1

    def is_in(node: Expr) -> bool:
        if small(node) or (node.op == "var" and node.args[0] == f"s.{graph.states[0]}"):
            return True
        if node.op == "neg":
            return is_in(node.args[0])
        if node.op != "mul":
            return False
        first, second = node.args
        return (small(first) and is_in(second)) or (small(second) and is_in(first))

    return all(is_in(node.args[1]) for node in graph.products)


@lru_cache(maxsize=256)
def contained(graph: Graph) -> bool:
    """Whether the first state is never larger after a step than the larger of 1 and what it was.

    It is in [-1, 1], or on the way from a number there to what it was, as a GRU's: n + z (h - n); clipped or not.
    """
    within, last = _intervals(graph), graph.outputs[0]
    if last.op == "clip" and within[last.args[1].digest][0] <= 0 <= within[last.args[2].digest][0]:
        last = last.args[0]  # which is no smaller

    def is_in(node: Expr, least: float) -> bool:
        low, high = within[node.digest]
        return least <= low and high <= 1

    def ways(node: Expr, op: str) -> list[tuple[Expr, Expr]]:
        if node.op != op or not all(isinstance(arg, Expr) for arg in node.args):
            return []
        first, second = node.args
        return [(first, second), (second, first)]

    def goes(far: Expr, n: Expr) -> bool:
        whole = far.op == "sub" and far.args[1].digest == n.digest and is_in(n, -1)
        return whole and far.args[0].op == "var" and far.args[0].args[0] == f"s.{graph.states[0]}"

    return bounded(graph) or any(
        goes(far, n) and is_in(z, 0) for n, product in ways(last, "add") for z, far in ways(product, "mul")
    )


def _intervals(graph: Graph) -> dict[str, tuple[float, float]]:
    """The least and the most that each value of a step can be, whatever comes in, by digest."""
    within: dict[str, tuple[float, float]] = {}
    for node in topological(graph.outputs):
        spans = [within[arg.digest] for arg in node.args if isinstance(arg, Expr)]
        if node.op == "const":
            within[node.digest] = node.args[0], node.args[0]
        else:
            within[node.digest] = _OF_SPANS[node.op](*spans) if node.op in _OF_SPANS else _ANY
    return within


Span = tuple[float, float]
_ANY: Span = (float("-inf"), float("inf"))


def _of_product(a: Span, b: Span) -> Span:
    ends = [x * y if x and y else 0.0 for x in a for y in b]
    return min(ends), max(ends)


def _of_least(a: Span, b: Span) -> Span:
    return min(a[0], b[0]), min(a[1], b[1])


def _of_most(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), max(a[1], b[1])


_OF_SPANS: dict[str, Callable[..., Span]] = {
    "sigmoid": lambda a: (0.0, 1.0), "tanh": lambda a: (-1.0, 1.0), "sin": lambda a: (-1.0, 1.0),
    "cos": lambda a: (-1.0, 1.0), "erf": lambda a: (-1.0, 1.0),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]), "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]), "mul": _of_product, "minimum": _of_least, "maximum": _of_most,
    "clip": lambda a, low, high: _of_least(_of_most(a, low), high),
    "where": lambda condition, a, b: (min(a[0], b[0]), max(a[1], b[1])),
}  # fmt: skip
"""Of operations, from the spans of what they take."""
