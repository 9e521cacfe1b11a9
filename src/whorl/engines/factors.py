"""Numbers that are one for the whole row, drawn out of the means over its units.

mean(s v) is s mean(v), where s is one number for all units: the gradient of a layer norm has four such factors in each
of its means, which a loop over the units would multiply unit by unit.
"""

from collections.abc import Iterable, Sequence

from whorl.cells.expr import COLLECTIVES, Expr, topological
from whorl.cells.graphs import rewritten

MEANS = frozenset({"mean", "variance"})


def numbers(order: Iterable[Expr]) -> set[str]:
    """The digests of the nodes that are one number for the whole row.

    Args:
        order: each node after its arguments.
    """
    found: set[str] = set()
    for node in order:
        args = [arg.digest for arg in node.args if isinstance(arg, Expr)]
        if node.op == "var":
            is_one = node.args[0].startswith("level.")
        else:
            is_one = node.op in MEANS or (node.op not in COLLECTIVES and found.issuperset(args))
        found |= {node.digest} if is_one else set()
    return found


def factored(outputs: Sequence[Expr]) -> list[Expr]:
    """The graph with such numbers multiplied with each mean, and not with what it is the mean of."""

    def change(node: Expr, made: Expr) -> Expr:
        if made.op != "mean":
            return made
        known = numbers(topological([made]))
        parts = [_split(part, known) for part in made.args]
        sign, factors, _ = parts[0]
        if not (factors or sign < 0) or any(_key(part) != _key(parts[0]) for part in parts):
            return made
        mean = Expr("mean", *(rest for _, _, rest in parts))
        for factor in factors:
            mean = Expr("mul", mean, factor)
        return mean if sign > 0 else Expr("neg", mean)

    return rewritten(outputs, change)


_Split = tuple[int, tuple[Expr, ...], Expr]
"""A sign, numbers of the row, and what they are multiplied with."""


def _key(part: _Split) -> tuple[int, list[str]]:
    return part[0], sorted(factor.digest for factor in part[1])


def _split(node: Expr, known: set[str]) -> _Split:
    if node.digest in known:
        return 1, (), node
    if node.op == "neg":
        sign, factors, rest = _split(node.args[0], known)
        return -sign, factors, rest
    if node.op == "mul":
        numbers_of_row = tuple(arg for arg in node.args if arg.digest in known)
        others = [_split(arg, known) for arg in node.args if arg.digest not in known]
        sign, factors, rest = others[0]
        for other in others[1:]:
            sign, factors, rest = sign * other[0], factors + other[1], Expr("mul", rest, other[2])
        return sign, factors + numbers_of_row, rest
    if node.op in ("add", "sub"):
        (sign, factors, rest), other = (_split(arg, known) for arg in node.args)
        if factors and _key((1, factors, rest)) == _key((1, *other[1:])):
            alike = (sign == other[0]) == (node.op == "add")
            return sign, factors, Expr("add" if alike else "sub", rest, other[2])
    return 1, (), node
