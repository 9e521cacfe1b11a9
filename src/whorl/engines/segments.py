"""A cell's step as C++ in segments: the lines of its forward and of its backward, for the marked place of a kernel.

A segment is what lies between two products with the recurrent weights.  Its lines work on one row, unit by unit, in
loops over the units of a thread; `row` is where they read and write, `team` the threads that share a row.  The kernels
of a processor and of a GPU say what these are, and what `put`, `sum_of`, `means_of` and EACH_ALONE do.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from whorl.cells.cell import Graph
from whorl.cells.expr import COLLECTIVES, Expr, topological, var
from whorl.cells.graphs import merged, rewritten
from whorl.cells.lower import HOST, Collective, Stage, Target, Value, identifier, stages
from whorl.engines.factors import MEANS as _MEANS
from whorl.engines.factors import factored, numbers
from whorl.engines.loops import loops, summing

_DEAR = frozenset("exp expm1 log log1p pow erf sin cos tanh sigmoid softplus product".split()) | _MEANS
"""Operations whose result is kept for backward; what is cheaper is computed again from what is kept."""
_SLOW = _DEAR | {"div", "sqrt", "rsqrt"}
_MOST_AGAIN = 4
"""Quick operations of a value that is computed again in another segment's loop, rather than written and read."""
_BESIDE = 4
"""Means that are found beside each other: their sums are in registers."""


class Link(NamedTuple):
    """Between two segments: result = a gate's weights (or their transpose) times operand, both in scratch."""

    segment: int
    """After which it comes."""
    gate: int
    """Among the recurrent ones."""
    operand: int
    result: int
    product: int
    """Which of the step's own products it is."""


@dataclass(frozen=True)
class Pass:
    """One direction of a step."""

    text: str
    """A function for each segment, and one that calls them by number."""
    slots: int
    """Values in scratch for each unit of a row."""
    means: int
    """Values in `row.means`."""
    segments: int
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Segments:
    """The C++ of one cell, and what of it a kernel must know."""

    forward: Pass
    backward: Pass
    saved: int
    """Values kept for each unit of each step."""
    saved_means: int
    """Values kept for each step, and what fills them up."""
    reads_x: bool
    """Backward reads the input projection."""
    dr_is_dx: bool
    """Each gate's gradient is the same for its input and its recurrent projection."""
    leaves: tuple[bool, ...]
    """For each recurrent gate whether the step reads `r.gate`."""
    products: tuple[int, ...]
    """The recurrent gate of each `r.gate(a)`."""
    sums: tuple[int, ...]
    """Of each vector the one whose gradient is written for it: itself, or where `near` one with the same gradient."""


@lru_cache(maxsize=256)
def segments(graph: Graph, near: bool = False, infinity: str = HOST.infinity, nan: str = HOST.nan) -> Segments:
    """The C++ of a cell, for every dtype and size.

    Args:
        near: a row is in the first cache of who computes it: it is read twice for a mean and a variance at once, where
            it lies, what is quick to compute is computed again rather than handed from loop to loop, and a stage is in
            several loops (`loops`), of which the last sums what backward's means are of.
        infinity, nan: how the compiler spells them.
    """
    if near:
        graph = replace(graph, outputs=tuple(merged(graph.outputs)))
    functions = frozenset({"sigmoid", "softplus"} if near else {"sigmoid"})
    target = replace(HOST, functions=functions, infinity=infinity, nan=nan)
    kept = _kept(graph)
    place = {node.digest: index for index, node in enumerate(kept.units)}
    means = {node.digest: index for index, node in enumerate(kept.means)}

    def from_saved(node: Expr, made: Expr) -> Expr:
        if node.digest in place:
            return var(f"saved.{place[node.digest]}")
        return var(f"level.{means[node.digest]}") if node.digest in means else made

    named = graph.backward.named()
    backward = dict(zip(named, rewritten(list(named.values()), from_saved), strict=True))
    read = {node.args[0] for node in topological(graph.outputs) if node.op == "var"}
    leaves = tuple(f"r.{gate}" in read for gate in graph.recurrent)
    dx, dr = graph.backward.x, graph.backward.r
    same = graph.recurrent == graph.gates and all(leaves)
    same = same and all(dx[gate].digest == dr[gate].digest for gate in graph.gates)
    if same:
        backward = {name: node for name, node in backward.items() if not name.startswith("dr.")}
    written = {node.digest: index for index, node in reversed([*enumerate(graph.backward.v.values())])} if near else {}
    sums = tuple(written.get(node.digest, index) for index, node in enumerate(graph.backward.v.values()))
    unwritten = {f"dv.{name}" for index, name in enumerate(graph.vectors) if sums[index] != index}
    backward = {name: node for name, node in backward.items() if name not in unwritten}
    if near:
        backward = dict(zip(backward, factored(list(backward.values())), strict=True))
    forward = graph.named() | {f"keep.{index}": node for index, node in enumerate(kept.units)}
    return Segments(
        _Printer(graph, "forward", forward, kept.means, target, near).printed(),
        _Printer(graph, "backward", backward, (), target, near).printed(),
        len(kept.units), _filled_up(len(kept.means)) if near else len(kept.means), kept.reads_x, same, leaves,
        tuple(graph.recurrent.index(node.args[0]) for node in graph.products), sums,
    )  # fmt: skip


def _filled_up(means: int) -> int:
    """So that what each row keeps begins with a line of the cache, of units that fill whole lines."""
    return -(-means // 16) * 16


@dataclass
class _Kept:
    """What forward keeps for backward."""

    units: list[Expr] = field(default_factory=list)
    means: list[Expr] = field(default_factory=list)
    reads_x: bool = False


def _kept(graph: Graph) -> _Kept:
    """The values of the step that its gradient reads, cut where a value is dear to compute again."""
    known = {node.digest for node in topological(graph.outputs)}
    kept, seen, pending = _Kept(), set(), list(graph.backward.named().values())
    while pending:
        node = pending.pop()
        if node.digest in seen:
            continue
        seen.add(node.digest)
        kind = node.args[0].partition(".")[0] if node.op == "var" else ""
        if kind == "x":
            kept.reads_x = True
        elif kind in ("r", "s") or (node.digest in known and node.op in _DEAR - _MEANS) or _is_seen(node):
            kept.units.append(node)
        elif node.op in _MEANS and node.digest in known:
            kept.means.append(node)
        else:
            pending.extend(arg for arg in reversed(node.args) if isinstance(arg, Expr))
    return kept


def _is_seen(node: Expr) -> bool:
    """x.n + r.n: one value to keep in the place of two."""
    kinds = [arg.args[0][:2] for arg in node.args if isinstance(arg, Expr) and arg.op == "var"]
    return node.op == "add" and sorted(kinds) == ["r.", "x."]


class _Printer:
    """One direction of a step as C++.

    Args:
        outputs: an expression by the name of its place: after.h, keep.0, dx.i, ...
        levels: means whose results are kept too.
        near: as `segments` has it.
    """

    def __init__(
        self, graph: Graph, name: str, outputs: Mapping[str, Expr], levels: Sequence[Expr], target: Target, near: bool
    ) -> None:
        self._name, self._recurrent, self._near = name, graph.recurrent, near
        together = dict(outputs) | {f"level.{index}": node for index, node in enumerate(levels)}
        self._stages = stages(together, target, _quick(together) if near else frozenset())
        if near:
            self._stages = _copied_late(self._stages)
        self._reads, self._writes = _leaves(graph), _places(graph)
        made = [collective for stage in self._stages for collective in stage.collectives]
        # results are numbered as they stand in the graph, and so are the graph's products
        products = sorted((m.result for m in made if m.kind == "product"), key=lambda result: int(result[1:]))
        self._products = {result: index for index, result in enumerate(products)}
        self._slots: dict[str, int] = {}
        self._means: dict[str, int] = {}
        self._links: list[Link] = []
        self._fused = [self._summed(index) for index in range(len(self._stages))]

    def printed(self) -> Pass:
        """The functions, and the links between their segments."""
        segments: list[list[str]] = [[]]
        for stage, fused in zip(self._stages, self._fused, strict=True):
            segments[-1] += self._stage(stage, fused)
            multiplied = [made for made in stage.collectives if made.kind not in _MEANS]
            for made in multiplied:
                self._link(len(segments) - 1, made)
            if multiplied:
                segments.append([])
        name, given = self._name, "rows, count, team" if self._near else "row, team"
        arguments = f"const Row{'* rows, int64_t count' if self._near else '& row'}, const Team& team"
        row = "rows->" if self._near else "row."
        lines, template, call = [], "", "{0}"
        if any(self._fused):
            template, call = "template <bool ALONE> ", "team.members > 1 ? {0}<false>{1} : {0}<true>"
        for index, body in enumerate(segments):
            lines += [f"{template}static void {name}_{index}({arguments}) {{"]
            lines += [f"  const int64_t units = {row}units, first = {row}first, last = {row}last;"]
            lines += ["  (void)team, (void)units, (void)first, (void)last;"]
            lines += [f"  {line}" for line in body] + ["}"]
        calls = [call.format(f"{name}_{i}", f"({given})") for i in range(len(segments))]
        cases = [f"    case {i}: return {made}({given});" for i, made in enumerate(calls)]
        lines += [
            f"static void {name}_segment(int segment, {arguments}) {{",
            "  switch (segment) {",
            *cases,
            "  }",
            "}",
        ]
        return Pass("\n".join(lines), len(self._slots), len(self._means), len(segments), tuple(self._links))

    def _summed(self, index: int) -> dict[str, Collective]:
        """Means that a stage's last loop sums where nobody shares the row, by what they are of; others are read again.

        Backward's alone: what it sums is computed for nothing else, where forward's rows lie there already.
        """
        stage, found = self._stages[index], {}
        for made in stage.collectives if self._near and self._name == "backward" else ():
            (operand, *others), computed = made.operands, f"const real {made.operands[0]} = "
            if made.kind == "mean" and not others and any(line.startswith(computed) for line in stage.lines):
                found[operand] = made
        return found

    def _stage(self, stage: Stage, fused: Mapping[str, Collective]) -> list[str]:
        """One loop over the units, and the means after it."""
        reads, writes = list(stage.reads), [value for value in stage.writes if not _is_level(value.name)]
        for collective in stage.collectives:  # an operand that is no temporary gets a place like one
            for operand in collective.operands:
                if self._at(collective, operand) is None and all(operand != value.name for value in writes):
                    writes.append(Value(operand))
                    reads += [] if any(operand == value.name for value in reads) else [Value(operand)]
        before: list[str] = []
        lines: list[str] = []
        loads: dict[str, str] = {}
        stores: dict[str, str] = {}
        for value in reads:
            scalar = self._scalar(value.name)
            if scalar is not None:
                before.append(f"const real {value.name} = {scalar};")
                continue
            pointer, load = self._reads.get(value.name) or (self._slot(value.name), "{0}[u]")
            load = load.format(f"p_{value.name}") + (" != real(0)" if value.condition else "")
            before.append(f"const auto* const p_{value.name} = {pointer};")
            loads[value.name] = f"const {'bool' if value.condition else 'real'} {value.name} = {load};"
        for value in writes:
            pointer, store = self._writes.get(value.name) or (self._slot(value.name), "{0}[u] = {1};")
            before.append(f"auto* const w_{value.name} = {pointer};")
            stores[value.name] = store.format(f"w_{value.name}", value.name)
            if value.name in fused:
                stores[value.name] = self._sum(fused[value.name], stores[value.name])
        levels = [line for line in stage.lines if _is_level(line.removeprefix("const real "))]
        body = [line for line in stage.lines if line not in levels]
        if stores:
            lines = ["{", *(f"  {line}" for line in before)]
            together = [[*loads.values(), *body, *stores.values()]]
            bodies = loops(loads, body, stores) if self._near else together
            for index, loop in enumerate(bodies):
                if fused and index == len(bodies) - 1:
                    to = {operand: self._mean(mean) for operand, mean in fused.items()}
                    lines += [f"  {line}" for line in summing(loop, to)]
                    continue
                lines += ["  EACH_ALONE", "  for (int64_t u = first; u < last; ++u) {"]
                lines += [*(f"    {line}" for line in loop), "  }"]
            lines.append("}")
        for line in levels:  # const real level_0 = t5;
            level, result = line.removeprefix("const real level_").rstrip(";").split(" = ")
            lines.append(f"if (team.member == 0) row.saved[row.means_at + {level}] = {self._scalar(result)};")
        means = [collective for collective in stage.collectives if collective.kind in _MEANS]
        if not self._near:
            return lines + (["team.wait();"] if means else []) + self._sums(means)
        apart = [mean for mean in means if mean not in fused.values()]
        after = self._near_means(apart) + [
            f"if constexpr (!ALONE) {self._mean(mean)} = sum_in_lanes({self._slot(operand)}, units) / real(units);"
            for operand, mean in fused.items()
        ]
        return _of_each_row(lines) + (["team.wait();", *_of_each_row(after)] if means else [])

    def _sum(self, mean: Collective, store: str) -> str:
        """What a loop does with a value that a mean is of: a team's member stores it, since units are others' too."""
        (operand,) = mean.operands
        read = any(operand == value.name for stage in self._stages for value in stage.reads)
        made = [other for stage in self._stages for other in stage.collectives if other != mean]
        read = read or any(operand in other.operands for other in made)  # a product or another mean, from memory
        added = f"sum_{operand}[lane] += rounded({operand}, nothing);"
        return f"{store} if constexpr (ALONE) {added}" if read else f"if constexpr (ALONE) {added} else {store}"

    def _sums(self, means: Sequence[Collective]) -> list[str]:
        lines = []
        for mean in means:
            sums = " + ".join(f"sum_of({self._slot(operand)}, units)" for operand in mean.operands)
            lines.append(f"{self._mean(mean)} = ({sums}) / real({len(mean.operands)} * units);")
        return lines

    def _near_means(self, means: Sequence[Collective]) -> list[str]:
        """Means and variances, those of the same rows at once; those of as many rows are found beside each other."""
        wanted: dict[Sequence[str], dict[str, Collective]] = {}
        for made in means:
            wanted.setdefault(made.operands, {})[made.kind] = made
        alike: dict[tuple[int, bool], list[tuple[str, str, str]]] = {}
        for operands, kinds in wanted.items():
            some = next(iter(kinds.values()))
            rows = ", ".join(self._at(some, operand) or self._slot(operand) for operand in operands)
            to, apart = (f"&{self._mean(kinds[kind])}" if kind in kinds else "nullptr" for kind in ("mean", "variance"))
            alike.setdefault((len(operands), "variance" in kinds), []).append((f"{{{rows}}}", to, apart))
        lines = []
        for (_, squares), groups in alike.items():
            for first in range(0, len(groups), _BESIDE):
                rows, to, apart = (", ".join(part) for part in zip(*groups[first : first + _BESIDE], strict=True))
                lines.append(f"means_of<{str(squares).lower()}>({{{rows}}}, units, {{{to}}}, {{{apart}}});")
        return lines

    def _mean(self, made: Collective) -> str:
        return f"row.means[{self._means.setdefault(made.result, len(self._means))}]"

    def _at(self, made: Collective, operand: str) -> str | None:
        """Where an operand lies already, for all units of the row."""
        if operand in self._slots:
            return self._slot(operand)
        lies = self._near and made.kind in _MEANS and operand.startswith(("x_", "r_", "saved_"))
        return self._reads[operand][0] if lies else None

    def _link(self, segment: int, made: Collective) -> None:
        gate, (operand,) = self._recurrent.index(made.gate), made.operands
        for name in (operand, made.result):
            self._slots.setdefault(name, len(self._slots))
        places = self._slots[operand], self._slots[made.result]
        self._links.append(Link(segment, gate, *places, self._products.get(made.result, 0)))

    def _slot(self, name: str) -> str:
        return f"row.scratch + {self._slots.setdefault(name, len(self._slots))} * row.padded"

    def _scalar(self, name: str) -> str | None:
        """The value of a name that is one for the whole row."""
        if name in self._means:
            return f"row.means[{self._means[name]}]"
        return f"row.saved[row.means_at + {name.removeprefix('level_')}]" if _is_level(name) else None


def _copied_late(made: Sequence[Stage]) -> list[Stage]:
    """Leaves that are kept as they are: stored by the next stage that reads them too, which saves a loop over them."""
    later = list(made)
    for index, stage in enumerate(made):
        for value in [one for one in stage.writes if one.name.startswith("keep_")]:
            line = next(line for line in stage.lines if line.startswith(f"const real {value.name} = "))
            leaf = Value(line.removesuffix(";").rpartition(" ")[2])
            place = next((at for at in range(index + 1, len(made)) if leaf in later[at].reads), None)
            if leaf not in stage.reads or place is None:
                continue
            own = later[index]
            lines = tuple(one for one in own.lines if one != line)
            reads = tuple(one for one in own.reads if one != leaf or any(_names(leaf.name, text) for text in lines))
            writes = tuple(one for one in own.writes if one != value)
            later[index] = replace(own, reads=reads, writes=writes, lines=lines)
            to = later[place]
            later[place] = replace(to, writes=(*to.writes, value), lines=(*to.lines, line))
    return later


def _names(name: str, line: str) -> bool:
    return re.search(rf"\b{name}\b", line) is not None


def _of_each_row(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["for (const Row& row : Rows{rows, count}) {", *(f"  {line}" for line in lines), "}"]


def _quick(outputs: Mapping[str, Expr]) -> frozenset[str]:
    """What takes a few quick operations from what lies in memory, or is one number for the whole row."""
    cost: dict[str, int] = {}
    order = topological(outputs.values())
    of_row, quick = numbers(order), set()
    for node in order:
        args = [arg.digest for arg in node.args if isinstance(arg, Expr)]
        cost[node.digest] = 0
        if node.op not in ("var", "const", *COLLECTIVES):
            taken = 0 if node.digest in of_row else 1 + sum(cost[arg] for arg in args)
            if node.digest in of_row or (node.op not in _SLOW and taken <= _MOST_AGAIN):
                cost[node.digest] = taken
                quick.add(node.digest)
    return frozenset(quick)


def _is_level(name: str) -> bool:
    return name.startswith("level_")


def _leaves(graph: Graph) -> dict[str, tuple[str, str]]:
    """Where each leaf of the step is read, and how."""
    rows = {
        "x": (graph.gates, "row.x + {} * units", "{0}[u]"),
        "r": (graph.recurrent, "row.r + row.r_offset[{}]", "{0}[u]"),
        "s": (graph.states, "row.before[{}]", "{0}[u]"),
        "v": (graph.vectors, "row.v[{}]", "{0}[u]"),
        "e": (graph.inputs, "row.e[{}]", "{0}[u]"),
        "d": (graph.states, "row.d[{}]", "{0}[u]"),
        "saved": (tuple(map(str, range(_MOST))), "row.saved + {} * units", "{0}[u]"),
    }
    return _named(rows)


def _places(graph: Graph) -> dict[str, tuple[str, str]]:
    """Where each output of a step is written, and how."""
    rows = {
        "after": (graph.states, "row.after[{}]", "{0}[u] = {1};"),
        "keep": (tuple(map(str, range(_MOST))), "row.saved + {} * units", "{0}[u] = {1};"),
        "dx": (graph.gates, "row.dx + {} * units", "put({0} + u, {1});"),
        "dr": (graph.recurrent, "row.dr + {} * units", "put({0} + u, {1});"),
        "ds": (graph.states, "row.ds[{}]", "{0}[u] = {1};"),
        "dv": (graph.vectors, "row.dv[{}]", "{0}[u] += {1};"),
        "de": (graph.inputs, "row.de[{}]", "{0}[u] += {1};"),
        "dp": (tuple(map(str, range(len(graph.products)))), "row.dp[{}]", "put({0} + u, {1});"),
    }
    return _named(rows)


_MOST = 1000
"""Values kept for a unit; a cell has far fewer."""


def _named(rows: Mapping[str, tuple[Sequence[str], str, str]]) -> dict[str, tuple[str, str]]:
    return {
        identifier(f"{kind}.{name}"): (pointer.format(index), way)
        for kind, (names, pointer, way) in rows.items()
        for index, name in enumerate(names)
    }
