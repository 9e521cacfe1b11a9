"""What is done with whole graphs of expressions: their gradient, their value on tensors, their fingerprint."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from whorl.cells.expr import COLLECTIVES, OPS, Expr, add, const, mean, topological, where


def _mean_gradient(g: Expr, y: Expr, *parts: Expr) -> tuple[Expr, ...]:
    return (mean(g) / float(len(parts)) if len(parts) > 1 else mean(g),) * len(parts)


def _variance_gradient(g: Expr, y: Expr, *parts: Expr) -> tuple[Expr, ...]:
    middle, factor = mean(list(parts)), 2.0 / len(parts) * mean(g)
    return tuple([factor * (part - middle) for part in parts])


_COLLECTIVE_GRADIENTS: dict[str, Callable[..., tuple[Expr | None, ...]]] = {
    "mean": _mean_gradient,
    "variance": _variance_gradient,
    "product": lambda g, y, gate, a: (None, Expr("pull", gate, g)),
}


def gradient(outputs: Sequence[tuple[Expr, Expr]], wrt: Sequence[Expr]) -> list[Expr | None]:
    """The gradient with respect to each of `wrt`, or None where there is none, from pairs (output, its gradient)."""
    grads: dict[str, Expr] = {}

    def give(node: Expr, g: Expr) -> None:
        grads[node.digest] = grads[node.digest] + g if node.digest in grads else g

    for node, g in outputs:
        give(node, g)
    for node in reversed(topological(node for node, _ in outputs)):
        if node.digest not in grads or node.op in ("var", "const"):
            continue
        rule = _COLLECTIVE_GRADIENTS[node.op] if node.op in COLLECTIVES else OPS[node.op].gradient
        for arg, g_arg in zip(node.args, rule(grads[node.digest], node, *node.args), strict=True):
            if g_arg is not None and not (isinstance(arg, Expr) and arg.op == "const"):
                give(arg, g_arg)
    return [grads.get(node.digest) for node in wrt]


def rewritten(outputs: Sequence[Expr], change: Callable[[Expr, Expr], Expr]) -> list[Expr]:
    """The graph with `change(node, made)` in the place of each node; `made` is the node with its arguments changed."""
    done: dict[str, Expr] = {}
    for node in topological(outputs):
        args = [done[arg.digest] if isinstance(arg, Expr) else arg for arg in node.args]
        same = all(new is old for new, old in zip(args, node.args, strict=True))
        done[node.digest] = change(node, node if same else Expr(node.op, *args))
    return [done[node.digest] for node in outputs]


def merged(outputs: Sequence[Expr]) -> list[Expr]:
    """The graph with one `variance` in the place of each mean of squared distances from the mean of the same values.

    A mean and a variance of the same values can be found in one exchange, and so can what their gradients need.
    """

    def change(node: Expr, made: Expr) -> Expr:
        values = [_distance(part) for part in made.args] if made.op == "mean" else [None]
        middles = {pair[1].digest: pair[1] for pair in values if pair is not None}
        if len(middles) != 1 or None in values:
            return made
        parts, (middle,) = [pair[0] for pair in values if pair is not None], middles.values()
        same = middle.op == "mean" and [part.digest for part in parts] == [part.digest for part in middle.args]
        return Expr("variance", *parts) if same else made

    return rewritten(outputs, change)


def _distance(node: Expr) -> tuple[Expr, Expr] | None:
    """a and b where a node is (a - b)^2."""
    if node.op != "mul" or node.args[0].digest != node.args[1].digest or node.args[0].op != "sub":
        return None
    return node.args[0].args


def at_once(outputs: Sequence[Expr]) -> list[Expr]:
    """The graph with means of pointwise values alone, wherever a mean is of values that are affine in other means.

    A mean is the same for all units, so mean(a + m b) = mean(a) + m mean(b): all of these can be found in one exchange.
    Gradients of means are such values, however many means lie between them.
    """
    parts: dict[str, dict[str, Expr] | None] = {}
    for node in topological(outputs):
        parts[node.digest] = _affine(node, [parts[arg.digest] for arg in node.args if isinstance(arg, Expr)])
    means = {"": const(1.0)}

    def change(node: Expr, made: Expr) -> Expr:
        if node.op != "mean":
            return made
        rows = [own for own in (parts[arg.digest] for arg in node.args) if own is not None]
        if len(rows) == len(node.args) and any(row.keys() != {""} for row in rows):
            terms = [means[name] * mean(whole) for name, whole in reduce(_sum, rows).items()]
            made = reduce(add, terms) / float(len(rows)) if len(rows) > 1 else reduce(add, terms)
        means[node.digest] = made
        return made

    return rewritten(outputs, change)


def _affine(node: Expr, args: Sequence[dict[str, Expr] | None]) -> dict[str, Expr] | None:
    """What a node has of each mean, by its digest, and beside them, by ""; None where it is not affine in means.

    Args:
        args: the same of the node's arguments.
    """
    if node.op == "mean":
        return {node.digest: const(1.0)}
    if node.op in COLLECTIVES:
        return None
    pointwise = [own is not None and own.keys() == {""} for own in args]
    if all(pointwise):
        return {"": node}
    rows = [own for own in args if own is not None]
    if len(rows) < len(args):
        return None
    if node.op == "neg":
        return {name: -factor for name, factor in rows[0].items()}
    if node.op == "sub":
        return _sum(rows[0], {name: -factor for name, factor in rows[1].items()})
    if node.op == "add":
        return _sum(*rows)
    if node.op == "mul" and pointwise[0]:
        return {name: node.args[0] * factor for name, factor in rows[1].items()}
    if node.op == "mul" and pointwise[1]:
        return {name: factor * node.args[1] for name, factor in rows[0].items()}
    if node.op == "div" and pointwise[1]:
        return {name: factor / node.args[1] for name, factor in rows[0].items()}
    if node.op == "where" and pointwise[0]:
        names = dict.fromkeys([*rows[1], *rows[2]])
        return {name: where(node.args[0], rows[1].get(name, 0.0), rows[2].get(name, 0.0)) for name in names}
    return None


def _sum(first: dict[str, Expr], second: dict[str, Expr]) -> dict[str, Expr]:
    return first | {name: first[name] + factor if name in first else factor for name, factor in second.items()}


class Evaluator:
    """A graph made ready to be computed many times on tensors: its value, as every kernel must have it."""

    def __init__(self, outputs: Sequence[Expr]) -> None:
        self._nodes = topological(outputs)
        place = {node.digest: index for index, node in enumerate(self._nodes)}
        self._outputs = [place[node.digest] for node in outputs]
        self._steps: list[tuple[int, Callable[..., Tensor] | None, Any, list[int]]] = []
        self._leaves: list[tuple[int, str]] = []
        self._constants: list[tuple[int, float]] = []
        for index, node in enumerate(self._nodes):
            if node.op == "var":
                self._leaves.append((index, node.args[0]))
            elif node.op == "const":
                self._constants.append((index, node.args[0]))
            else:
                places = [place[arg.digest] for arg in node.args if isinstance(arg, Expr)]
                if node.op in ("product", "pull"):
                    self._steps.append((index, None, (node.op, node.args[0]), places))
                else:
                    self._steps.append((index, OPS[node.op].value if node.op in OPS else _mean, None, places))

    def constants(self, like: Tensor) -> list[tuple[int, Tensor]]:
        """The graph's numbers as tensors of no axes, of the dtype and device of `like`; made once for many calls.

        What is larger than any number of that dtype is infinite, as a kernel has it.
        """
        most = torch.finfo(like.dtype).max
        held = [math.copysign(math.inf, value) if abs(value) > most else value for _, value in self._constants]
        return [(index, like.new_full((), value)) for (index, _), value in zip(self._constants, held, strict=True)]

    def __call__(
        self,
        values: dict[str, Tensor],
        constants: list[tuple[int, Tensor]],
        collective: Callable[[str, str, Tensor], Tensor] | None = None,
    ) -> list[Tensor]:
        """The tensor of each output.

        Args:
            values: a tensor [..., units] for each leaf, by name.
            constants: what `constants` gave.
            collective: computes ("product" or "pull", gate, operand), where the graph has such nodes.
        """
        results: list[Any] = [None] * len(self._nodes)
        for index, name in self._leaves:
            results[index] = values[name]
        for index, constant in constants:
            results[index] = constant
        for index, value, kind, places in self._steps:
            if value is not None:
                results[index] = value(*[results[place] for place in places])
            else:
                assert collective is not None, "a graph with products needs `collective`"
                results[index] = collective(kind[0], kind[1], results[places[0]])
        return [results[index] for index in self._outputs]


def fingerprint(outputs: Iterable[Expr]) -> str:
    """A key of the graph alone, the same in every process: never of the Python source."""
    return hashlib.blake2b(" ".join(node.digest for node in outputs).encode(), digest_size=16).hexdigest()


def _mean(*parts: Tensor) -> Tensor:
    return mean(parts)
