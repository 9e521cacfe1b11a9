"""Graphs whose values come at different times, so that little is left to compute when the last of them is there."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from whorl.cells.expr import COLLECTIVES, Expr, add, const, div, mul, topological

_MOST = 2  # terms of a sum that are multiplied one by one; a longer one is added up first


class _Sum(NamedTuple):
    """A value as a sum: of what came before all of these, and of each base times a factor that came before them."""

    terms: dict[str, tuple[Expr, Expr]]
    """A base and its factor, by the digest of the base."""
    rest: Expr | None = None

    @property
    def size(self) -> int:
        return len(self.terms) + (self.rest is not None)


def early_first(outputs: Sequence[Expr], urgent: Collection[int], late: Collection[str]) -> list[Expr]:
    """The graph, where what is known early is multiplied and added up first.

    A product g a b of what comes late and two known factors becomes g (a b), and so does what is affine in a few late
    values.  What comes late are some leaves, then the results of collectives, level by level.

    Args:
        outputs: values of a graph.
        urgent: the places of the outputs that somebody waits for; the operands of collectives are so too.
        late: names of leaves.
    """
    made = _Regrouping(late)
    nodes = topological(outputs)
    for node in nodes:
        made.take(node)
    return [made.quick(node) if place in urgent else made.plain[node.digest] for place, node in enumerate(outputs)]


class _Regrouping:
    """What is known of each node so far, by its digest."""

    def __init__(self, late: Collection[str]) -> None:
        self.plain: dict[str, Expr] = {}
        """The node, where each operand of a collective in it is regrouped, and each long sum."""
        self._late = late
        self._time: dict[str, int] = {}
        """When it is known: 0 at once, 1 with the late leaves, then a level of collectives later each."""
        self._sums: dict[str, _Sum] = {}
        self._depth: dict[str, int] = {}
        """Of what `plain` has, how many operations are between it and what comes at its time."""

    def take(self, node: Expr) -> None:
        """Add a node whose arguments are there."""
        args = [arg for arg in node.args if isinstance(arg, Expr)]
        below = max((self._time[arg.digest] for arg in args), default=0)
        if node.op in COLLECTIVES:
            time = max(below, 1) + 1
            made = Expr(node.op, *[self.quick(arg) if isinstance(arg, Expr) else arg for arg in node.args])
        else:
            time = int(node.args[0] in self._late) if node.op == "var" else below
            made = Expr(node.op, *[self.plain[arg.digest] for arg in args]) if args else node
        self._time[node.digest] = time
        row = self._sum(node, made, time)
        if node.op in ("add", "sub") and time > 0 and row.size > _MOST:
            made = self._added_up(row)
            row = _alone(made)
        elif node.op in COLLECTIVES or not args:
            self._depth[made.digest] = 0
        else:
            own = [self._depth[self.plain[arg.digest].digest] for arg in args if self._time[arg.digest] == time]
            self._depth.setdefault(made.digest, 1 + max(own, default=0))
        self.plain[node.digest], self._sums[node.digest] = made, row

    def quick(self, node: Expr) -> Expr:
        """The node with as little as can be behind what comes last."""
        return self._added_up(self._sums[node.digest]) if self._time[node.digest] > 0 else self.plain[node.digest]

    def _sum(self, node: Expr, made: Expr, time: int) -> _Sum:
        """A node, made so, as a sum of what comes at its time."""
        if time == 0:
            return _Sum({}, made)
        rows = [self._row(arg, time) for arg in node.args] if node.op in ("neg", "add", "sub", "mul", "div") else []
        if node.op == "neg":
            return _each(rows[0], _negative)
        if node.op in ("add", "sub"):
            return _together(rows[0], rows[1] if node.op == "add" else _each(rows[1], _negative))
        if node.op == "mul" and not rows[1].terms:
            return _each(rows[0], lambda value: _product(value, _known(rows[1])))
        if node.op == "mul" and not rows[0].terms:
            return _each(rows[1], lambda value: _product(value, _known(rows[0])))
        if node.op == "div" and not rows[1].terms:
            return _each(rows[0], lambda value: _quotient(value, _known(rows[1])))
        return _alone(made)

    def _row(self, arg: Expr, time: int) -> _Sum:
        return self._sums[arg.digest] if self._time[arg.digest] == time else _Sum({}, self.plain[arg.digest])

    def _added_up(self, row: _Sum) -> Expr:
        """What is known before comes first, what is known last comes last."""
        total, depth = row.rest, 0
        for base, factor in sorted(row.terms.values(), key=lambda term: self._depth[term[0].digest]):
            term = mul(base, factor)
            total, depth = term if total is None else add(total, term), max(depth, self._depth[base.digest]) + 1
        assert total is not None, "a sum has terms"
        self._depth.setdefault(total.digest, depth)
        return total


def _alone(node: Expr) -> _Sum:
    return _Sum({node.digest: (node, const(1.0))})


def _together(first: _Sum, second: _Sum) -> _Sum:
    terms = dict(first.terms)
    for key, (base, factor) in second.terms.items():
        terms[key] = (base, add(terms[key][1], factor)) if key in terms else (base, factor)
    rests = [row.rest for row in (first, second) if row.rest is not None]
    return _Sum(terms, add(*rests) if len(rests) == 2 else rests[0] if rests else None)


def _known(row: _Sum) -> Expr:
    assert row.rest is not None, "it came before"
    return row.rest


def _each(row: _Sum, change: Callable[[Expr], Expr]) -> _Sum:
    terms = {key: (base, change(factor)) for key, (base, factor) in row.terms.items()}
    return _Sum(terms, None if row.rest is None else change(row.rest))


def _negative(a: Expr) -> Expr:
    return const(-a.args[0]) if a.op == "const" else -a


def _product(a: Expr, b: Expr) -> Expr:
    return const(a.args[0] * b.args[0]) if a.op == b.op == "const" else mul(a, b)


def _quotient(a: Expr, b: Expr) -> Expr:
    return const(a.args[0] / b.args[0]) if a.op == b.op == "const" and b.args[0] else div(a, b)
