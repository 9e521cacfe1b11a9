"""What is done with whole graphs of expressions: their gradient, their value on tensors, their fingerprint."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from whorl.cells.expr import COLLECTIVES, OPS, Expr, mean, topological


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
        """The graph's numbers as tensors of no axes, of the dtype and device of `like`; made once for many calls."""
        return [(index, like.new_full((), value)) for index, value in self._constants]

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
