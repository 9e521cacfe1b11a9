"""A step with means or products inside, for the kernels of staged_forward.cu and staged_backward.cu.

Between two stages of a step all blocks of a cluster exchange something: what means are made of, the operand of a
product, or, backward, the sums of a transposed one.  A stage's lines are functions of one unit of one sequence; what a
later stage reads of them is kept in `Values`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, NamedTuple

from whorl.cells.cell import Graph
from whorl.cells.early import early_first
from whorl.cells.expr import COLLECTIVES, Expr, topological, var
from whorl.cells.graphs import at_once, merged, rewritten
from whorl.cells.lower import CUDA, Collective, Stage, Value, identifier, stages
from whorl.engines.cuda.tiling import Size


class Reduction(NamedTuple):
    """A mean, or a mean and a variance of the same values, over the units of each sequence."""

    stage: int
    """After which it is made."""
    first: int
    """Of the values that it is made of, among those of its stage."""
    values: int
    place: int
    """Among the means of a step; a variance comes after its mean."""
    moments: bool
    known: bool = False
    """Of `Pass.early`: what it is made of needs no gradient.  Those of a stage come last."""

    @property
    def floats(self) -> int:
        """That a block sends of it for each sequence."""
        return 1 + self.moments


class Round(NamedTuple):
    """Forward a product of several gates with one operand; backward of one gate, transposed."""

    stage: int
    links: tuple[int, ...]


class Link(NamedTuple):
    """One result of the recurrent weights of a gate."""

    gate: int
    """Among the recurrent ones."""
    round: int
    """0: times the first state; else times the operand of that round, inside the step."""


@dataclass(frozen=True)
class Pass:
    """One direction of a step."""

    text: str
    """A function for each stage, what they keep, and one that calls them by number."""
    parted: str
    """Backward the same, but what of the first stage takes long and needs no gradient is a function of its own."""
    stages: int
    reductions: tuple[Reduction, ...]
    rounds: tuple[Round, ...]
    """Those inside the step."""
    kept: int
    """Values that a later stage reads, at most, between any two stages."""
    early: "Pass | None" = None
    """Backward the same, with text and means of its own: what is known early comes first (cells/early.py).

    Each stage is three functions: before what it waits for, what others wait for, the rest.  The first stage waits for
    the gradient of the first state, another for means.  One more function gives what is known of the means of the first
    stage.  None where products are inside the step.
    """

    def numbers(self, stage: int) -> int:
        """That a block sends for each sequence after a stage."""
        return sum(made.floats for made in self.reductions if made.stage == stage)

    def packs(self, stage: int) -> int:
        """16 bytes that these take."""
        return -(-self.numbers(stage) // 4)

    def whole_words(self, warps: int, before: int | None = None) -> int:
        """Words of shared memory of what means are made of, of one sequence that so many warps of a block have.

        Of all stages, or of those before one; where forward makes means in two rounds it has them twice.
        """
        return sum(4 * warps * self.packs(stage) for stage in range(self.stages if before is None else before))

    @property
    def exchanges(self) -> int:
        """Times within a step at which blocks exchange something; what is sent together counts once."""
        return len({made.stage for made in self.reductions} | {made.stage for made in self.rounds})


@dataclass(frozen=True)
class Steps:
    """What kernels know of a cell whose step has several stages."""

    forward: Pass
    backward: Pass
    links: tuple[Link, ...]
    """Those with the first state come first."""
    sums: tuple[int, ...]
    """For each gate the link that is saved with its x, as their sum; -1: none."""
    apart: tuple[int, ...]
    """The links that are saved on their own."""
    levels: int
    """Means that forward saves for each step of a sequence."""

    @property
    def leaves(self) -> int:
        """Links with the first state."""
        return sum(link.round == 0 for link in self.links)


@lru_cache(maxsize=256)
def staged(graph: Graph) -> bool:
    """Whether a cell needs these kernels: its step has several stages, or no recurrent weights."""
    return any(node.op in COLLECTIVES for node in topological(graph.outputs)) or not graph.recurrent


@lru_cache(maxsize=256)
def steps(graph: Graph) -> Steps:
    """Both directions of a cell's step."""
    graph = replace(graph, outputs=tuple(merged(graph.outputs)))
    nodes = topological(graph.outputs)
    read = {node.args[0] for node in nodes if node.op == "var"}
    # a gate that is read nowhere is multiplied too: kernels number results as gates where no product is inside the step
    inside = {node.args[0] for node in graph.products}
    leaves = [gate for gate in graph.recurrent if f"r.{gate}" in read or gate not in inside]
    own = {"after": graph.states, "x": graph.gates, "s": graph.states, "v": graph.vectors, "e": graph.inputs}
    places = {f"{kind}_{name}": f"{kind}[{i}]" for kind in "xsve" for i, name in enumerate(own[kind])}
    places |= {f"r_{gate}": f"r[{i}]" for i, gate in enumerate(leaves)}
    made = _lean(stages(graph.named(), CUDA), nodes)
    operands: dict[str, int] = {}
    links = [Link(graph.recurrent.index(gate), 0) for gate in leaves]
    products = [result for stage in made for result in stage.collectives if result.kind == "product"]
    # results are numbered as they stand in the graph, and so are its products
    for result in sorted(products, key=lambda result: int(result.result[1:])):
        places[result.result] = f"r[{len(links)}]"
        links.append(Link(graph.recurrent.index(result.gate), -1))
    rounds: list[Round] = []
    for index, stage in enumerate(made):
        operands = {}
        for result in stage.collectives:
            if result.kind == "product":
                link, (operand,) = int(places[result.result][2:-1]), result.operands
                if operand not in operands:
                    operands[operand] = len(rounds)
                    rounds.append(Round(index, ()))
                place = operands[operand]
                rounds[place] = Round(index, (*rounds[place].links, link))
                links[link] = Link(links[link].gate, place + 1)
    writes = {f"after_{state}": f"after[{i}] = {{0}};" for i, state in enumerate(graph.states)}
    ahead = _Printer(made, places, writes, "float* after", "after", 0).printed(rounds)
    names: dict[str, str] = {}  # digests to what backward reads
    for index, node in enumerate(nodes):  # `stages` names a node by its place among all
        if node.op in ("mean", "variance"):
            names[node.digest] = f"m.{places[f't{index}'][2:-1]}"
    for index, node in enumerate(graph.products):
        names[node.digest] = f"p.{index}"
    sums, apart = _saving(graph, leaves, names, tuple(links))
    levels = 2 * len(ahead.reductions)
    return Steps(ahead, _backward(graph, leaves, names, levels), tuple(links), sums, apart, levels)


def _backward(graph: Graph, leaves: Sequence[str], names: dict[str, str], levels: int) -> Pass:
    named = graph.backward.named()
    unread = [gate for gate in graph.recurrent if gate not in leaves]
    named = {name: node for name, node in named.items() if name not in {f"dr.{gate}" for gate in unread}}
    named |= graph.named()  # gradients of what zoneout keeps read it

    def from_saved(node: Expr, made: Expr) -> Expr:
        return var(names[node.digest]) if node.digest in names else made

    named |= {f"a.{index}": node.args[1] for index, node in enumerate(graph.products)}
    named = dict(zip(named, rewritten(list(named.values()), from_saved), strict=True))
    named = dict(zip(named, at_once(list(named.values())), strict=True))
    entering = _entering(named, graph.products)
    named = {name: node for name, node in named.items() if not name.startswith("a.")} | entering
    nodes = topological(named.values())
    made = _lean(stages(named, CUDA), nodes)
    pulls = {f"t{place}": node for place, node in enumerate(nodes) if node.op == "pull"}
    kinds = {"x": graph.gates, "s": graph.states, "v": graph.vectors, "e": graph.inputs, "d": graph.states}
    places = {f"{kind}_{name}": f"{kind}[{i}]" for kind, row in kinds.items() for i, name in enumerate(row)}
    places |= {f"r_{gate}": f"r[{i}]" for i, gate in enumerate(leaves)}
    places |= {f"p_{index}": f"r[{len(leaves) + index}]" for index in range(len(graph.products))}
    places |= {identifier(name): f"m[{name[2:]}]" for name in names.values() if name.startswith("m.")}
    writes = {f"d{kind}_{name}": f"d{kind}[{i}] = {{0}};" for kind in "xse" for i, name in enumerate(kinds[kind])}
    writes |= {f"after_{state}": f"after[{i}] = {{0}};" for i, state in enumerate(graph.states)}
    writes |= {f"dv_{name}": f"dv[{i}] += there ? {{0}} : 0.f;" for i, name in enumerate(graph.vectors)}
    writes |= {f"dr_{gate}": f"dr[{i}] = {{0}};" for i, gate in enumerate(leaves)}
    writes |= {f"dp_{i}": f"dr[{len(leaves) + i}] = {{0}};" for i in range(len(graph.products))}
    rounds: list[Round] = []
    entered: list[str] = []
    for index, stage in enumerate(made):
        for result in stage.collectives:
            if result.kind == "pull":
                places[result.result] = f"q[{len(rounds)}]"
                entered.append(identifier(f"o.{pulls[result.result].digest}"))
                rounds.append(Round(index, (graph.recurrent.index(result.gate),)))
    arguments = "const float* d, const float* q, bool there, float* dx, float* dr, float* ds, float* dv, float* de, "
    arguments += "float* after"
    given = "d, q, there, dx, dr, ds, dv, de, after"
    gradients = {identifier(f"d.{state}") for state in graph.states}
    ahead, first = _ahead(made[0], gradients)
    more = writes, arguments, given, levels, entered
    early = None
    if not graph.products:
        waited, late = {place for place, name in enumerate(named) if name.startswith("dr.")}, f"d.{graph.states[0]}"
        regrouped = dict(zip(named, early_first([*named.values()], waited, {late}), strict=True))
        befores, between, rests = zip(*_in_three(stages(regrouped, CUDA), {identifier(late)}), strict=True)
        early = _Printer(between, dict(places), *more, gradients).printed(rounds, befores, rests)  # with its own means
    parted = _Printer([first, *made[1:]], places, *more).printed(rounds, [ahead]).text
    return replace(_Printer(made, places, *more).printed(rounds), parted=parted, early=early)


def _entering(named: dict[str, Expr], products: Sequence[Expr]) -> dict[str, Expr]:
    """For each product with transposed weights what entered the product that it is the gradient of, as an output.

    Args:
        named: a pass backward, with what enters product i as "a.i", and the gradient of its result as "dp.i".
    """
    found: dict[str, Expr] = {}
    for pull, its in _pulls(named, products):
        found[f"o.{pull.digest}"] = reduce(Expr.__add__, [named[f"a.{i}"] for i in its])
    return found


def _pulls(named: dict[str, Expr], products: Sequence[Expr]) -> list[tuple[Expr, list[int]]]:
    """The products with transposed weights of a pass backward, and of each the products that it is the gradient of."""
    found: dict[tuple[str, str], list[int]] = {}  # by gate and the digest of the gradient
    for i, node in enumerate(products):
        found.setdefault((node.args[0], named[f"dp.{i}"].digest), []).append(i)
    pulls = [node for node in topological(named.values()) if node.op == "pull"]
    return [(pull, found[pull.args[0], pull.args[1].digest]) for pull in pulls]


@lru_cache(maxsize=256)
def have_gradients(graph: Graph) -> bool:
    """Whether whatever enters a product inside the step has a gradient, as a constant has not."""
    reached = {i for _, its in _pulls(graph.backward.named(), graph.products) for i in its}
    return len(reached) == len(graph.products)


def _ahead(first: Stage, gradients: set[str]) -> tuple[Stage, Stage]:
    """The first stage in two: what takes long and needs no gradient, which is computed before one comes; the rest."""
    before, known, after = part(first, gradients)
    writes = tuple(Value(name, kind == "bool") for name, kind in known.items())
    return replace(before, writes=writes, collectives=()), replace(after, reads=(*after.reads, *writes))


def part(stage: Stage, gradients: set[str]) -> tuple[Stage, dict[str, str], Stage]:
    """The lines that `known` needs, what it hands on and of which type, and the lines that make gradients of it."""
    text, kinds, uses = _taken_apart(stage)
    late = _late(stage, gradients)
    slow = {name for name, line in text.items() if name not in late and re.search(r"[(/?]", line)}
    outputs = [value.name for value in stage.writes] + [name for made in stage.collectives for name in made.operands]
    after = _needed(uses, outputs, slow)
    known = {name: kinds[name] for name in kinds if name in slow & after}
    return _lines_of(stage, _needed(uses, known)), known, _lines_of(stage, after, known)


def _in_three(made: Sequence[Stage], gradients: set[str]) -> list[tuple[Stage, Stage, Stage]]:
    """Each stage of a pass backward in three: what needs nothing that it waits for, what others wait for, the rest.

    Over a wait is kept what takes long, what the second part needs, and what a gradient is in that the rest needs: all
    else is computed again.

    Args:
        gradients: the names of those that the first stage waits for; another waits for the collectives before it.
    """
    text: dict[str, str] = {}
    uses: dict[str, list[str]] = {}
    values = {value.name: value for stage in made for value in (*stage.reads, *stage.writes)}
    time = dict.fromkeys(gradients, 1)  # of a name, after which wait it is known
    for after, stage in enumerate(made, 2):
        lines, kinds, names = _taken_apart(stage)
        text, uses = text | lines, uses | names
        values |= {name: Value(name, kind == "bool") for name, kind in kinds.items()}
        for name, used in names.items():
            time[name] = max(time.get(one, 0) for one in [name, *used])
        time |= {result.result: after for result in stage.collectives}
    slow = {name for name, line in text.items() if time[name] == 0 and re.search(r"\w\(|[/?]", line)}

    def of(names: set[str], reads: set[str], writes: Iterable[str], collectives: tuple[Collective, ...] = ()) -> Stage:
        """A stage with the lines of these names."""
        reads = (reads | {used for name in names for used in uses[name]}) - names
        return Stage(
            tuple(value for name, value in values.items() if name in reads), tuple(values[name] for name in writes),
            tuple(line for name, line in text.items() if name in names), collectives,
        )  # fmt: skip

    parts: list[tuple[Stage, Stage, Stage]] = []
    kept: set[str] = set()  # what later stages read
    for index, stage in reversed([*enumerate(made)]):
        outputs = [value.name for value in stage.writes if not re.fullmatch(r"t\d+", value.name)]
        urgent = [name for name in outputs if name.startswith("dr_")]
        waited = {*urgent, *(name for result in stage.collectives for name in result.operands)}
        over = slow if index else set()  # kept over each wait
        held = over | {name for name in text if 0 < time[name] <= index}  # what waits before this one have left
        behind = {name for name in _needed(uses, waited) & {*text} if time[name] == index + 1}  # others wait for it
        # what these are made of and the wait does not bring: made before it
        ready = ({used for name in behind for used in uses[name]} | waited) & {*text} - behind - over
        wanted = [name for name in outputs if name not in urgent]
        wanted += [name for name in text if name in kept and time[name] == index + 1]
        if index == 0:
            ready |= slow & (kept | _needed(uses, wanted))
        there = held | ready | behind
        before, late = _needed(uses, ready, over) & {*text}, _needed(uses, wanted, there) & {*text}
        mine = [name for name in text if name in behind & (kept | late)]
        parts.append((
            of(before - over, set(), [name for name in text if name in ready]),
            of(behind, waited - behind, [*urgent, *mine], stage.collectives),
            of(late - there, {*wanted} & there, [name for name in wanted if name not in mine]),
        ))  # fmt: skip
        kept |= (before & over) | (late & (held - ready))
    return parts[::-1]


def _taken_apart(stage: Stage) -> tuple[dict[str, str], dict[str, str], dict[str, list[str]]]:
    """Of each name that a stage's lines define, in their order: its line, its type, the names that it is made of."""
    text, kinds, uses = {}, {}, {}
    for line in stage.lines:
        kind, name, value = re.fullmatch(r"const (\w+) (\w+) = (.*);", line).groups()  # type: ignore[union-attr]
        text[name], kinds[name], uses[name] = line, kind, re.findall(r"[A-Za-z_]\w*", value)
    return text, kinds, uses


def _late(stage: Stage, gradients: set[str]) -> set[str]:
    """The names that need gradients."""
    late = set(gradients)
    for name, used in _taken_apart(stage)[2].items():
        if not late.isdisjoint(used):
            late.add(name)
    return late


def _needed(uses: dict[str, list[str]], roots: Iterable[str], ends: Iterable[str] = ()) -> set[str]:
    """The names that these are made of, and they themselves; what `ends` are made of is not looked at."""
    found: set[str] = set()
    left = [*roots]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += uses.get(name, []) if name not in ends else []
    return found


def _lines_of(stage: Stage, names: set[str], without: Iterable[str] = ()) -> Stage:
    """A stage with the lines of these names alone, and what they read."""
    lines = tuple(line for name, line in _taken_apart(stage)[0].items() if name in names and name not in without)
    return replace(stage, reads=tuple(value for value in stage.reads if value.name in names), lines=lines)


def _saving(
    graph: Graph, leaves: Sequence[str], names: dict[str, str], links: tuple[Link, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`Steps.sums` and `Steps.apart`."""

    def change(node: Expr, made: Expr) -> Expr:
        return var(names[node.digest]) if node.op == "product" else made

    roots = rewritten([*graph.outputs, *(node.args[1] for node in graph.products)], change)
    parents: dict[str, list[Expr]] = {}
    for node in topological(roots):
        for arg in node.args:
            if isinstance(arg, Expr) and arg.op == "var":
                parents.setdefault(arg.args[0], []).append(node)
    whole = {node.args[0] for node in roots if node.op == "var"}
    names_of = [f"r.{gate}" for gate in leaves] + [f"p.{index}" for index in range(len(graph.products))]
    sums = []
    for gate in graph.gates:
        over, found = parents.get(f"x.{gate}", []), -1
        for place, link in enumerate(links):
            own = parents.get(names_of[place], [])
            if graph.recurrent[link.gate] != gate or len(over) != 1 or len(own) != 1:
                continue
            if own[0].op == "add" and own[0].digest == over[0].digest and not {f"x.{gate}", names_of[place]} & whole:
                found = place
        sums.append(found)
    return tuple(sums), tuple(place for place in range(len(links)) if place not in sums)


_CHEAP = {"add", "sub", "mul", "neg", "rsqrt"}


def _lean(made: Sequence[Stage], nodes: Sequence[Expr]) -> list[Stage]:
    """The stages, where what is cheap is computed again rather than kept, if fewer values are kept so.

    Args:
        nodes: in the order in which `stages` numbered them.
    """
    names = {node.digest: f"t{place}" for place, node in enumerate(nodes)}
    by_name = {name: node for name, node in zip(names.values(), nodes, strict=True) if node.op not in ("var", "const")}
    found = {found[1]: (line, index) for index, stage in enumerate(made) for line in stage.lines
             if (found := re.match(r"const \w+ (t\d+) =", line))}  # fmt: skip

    def arguments(name: str) -> set[str]:
        """The temporaries among them."""
        return {names[arg.digest] for arg in by_name[name].args if names.get(arg.digest) in found}

    lean, wanted = [*made], [{value.name: value for value in stage.writes} for stage in made]
    for index, stage in enumerate(made):
        reads = {value.name: value for value in stage.reads}
        needed = {name for name in _read(stage) if name in found and found[name][1] < index}
        again: set[str] = set()
        while True:
            groups: dict[str, list[str]] = {}
            for name in sorted(needed):
                missing = arguments(name) - needed
                if by_name[name].op in _CHEAP and len(missing) <= 1:
                    groups.setdefault(min(missing, default=""), []).append(name)
            best = [(arg, group) for arg, group in groups.items() if not arg or len(group) > 1]
            if not best:
                break
            arg, group = best[0]
            needed = needed - set(group) | ({arg} if arg else set())
            again |= set(group)
        if not again:
            continue
        for name in sorted(again):  # not as a set has them: a kernel's source is its key, the same in each process
            reads.pop(name, None)
            for arg in by_name[name].args:
                own = _name_of(arg, names)
                if own is not None and own not in again:
                    reads.setdefault(own, Value(own, arg.is_condition))
        for name in sorted(needed):
            reads.setdefault(name, Value(name, by_name[name].is_condition))
            wanted[found[name][1]].setdefault(name, Value(name, by_name[name].is_condition))
        lines = [found[name][0] for name in sorted(again, key=lambda name: int(name[1:]))]
        lean[index] = replace(stage, reads=tuple(reads.values()), lines=(*lines, *stage.lines))
    return [replace(stage, writes=tuple(own.values())) for stage, own in zip(lean, wanted, strict=True)]


def _name_of(node: Any, names: dict[str, str]) -> str | None:
    """How a stage reads a value; None for a number."""
    if not isinstance(node, Expr) or node.op == "const":
        return None
    return identifier(node.args[0]) if node.op == "var" else names[node.digest]


def by_link(made: Steps, cell: Graph) -> list[Link] | None:
    """Links, where they are other than one product of each recurrent gate with the first state; None where they are."""
    plain = [(gate, 0) for gate in range(len(cell.recurrent))]
    return None if [*made.links] == plain else [*made.links]


def by_rounds(made: Steps) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The recurrent gates that are in the same products, by these: 0 is that with the first state."""
    rounds: dict[int, set[int]] = {}
    for link in made.links:
        rounds.setdefault(link.gate, set()).add(link.round)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for gate in sorted(rounds, key=lambda gate: (min(rounds[gate]), gate)):
        key = tuple(sorted(rounds[gate]))
        found[key] = (*found.get(key, ()), gate)
    return found


def means_alone(size: Size, kind: str) -> bool:
    """Whether a pass ("forward" or "backward") has means but no products inside the step and no options.

    Then a warp, or a block, may compute the cell of whole sequences.
    """
    if size.staged is None:
        return False
    made = steps(size.staged)
    own = made.forward if kind == "forward" else made.backward
    scaled = size.element == 2 or (size.halves and size.bounded)
    plain = not (size.ahead or size.back or size.exact or size.masks or size.bits or size.staged.inputs)
    plain = plain and not size.staged.products
    return bool(plain and scaled and own.reductions and not own.rounds and made.leaves == size.recurrent)


def pass_of(made: Steps, kind: str, early: bool) -> Pass:
    """That of a kind ("forward" or "backward"), of a kernel that takes what is known early first or of another."""
    if kind == "forward":
        return made.forward
    if not early:
        return made.backward
    assert made.backward.early is not None, "such a step has means alone"
    return made.backward.early


@lru_cache(maxsize=256)
def spreadable(cell: Graph) -> bool:
    """Whether blocks that exchange through L2 can run the step: it has recurrent weights for them to hold."""
    return bool(cell.recurrent) and bool(steps(cell).links)


class _Printer:
    """A pass as CUDA C++.

    Args:
        places: where a leaf, or the result of a product, is read; means are given their places here.
        writes: how an output is written, by its name.
        arguments: of a stage's function, after those that both passes have; `given`: their names.
        first: the place of the first mean.
        entered: backward, for each round inside the step the output that entered the product that it belongs to.
        gradients: of `Pass.early`, the names of those that a step begins with.
    """

    _COMMON = "const float* x, const float* r, const float* s, const float* v, const float* e, const float* m, "
    _GIVEN = "x, r, s, v, e, m, k, to, operand, "
    _AHEAD, _AHEAD_GIVEN = f"{_COMMON}Values& k, const float* d, const float* q", "x, r, s, v, e, m, k, d, q"

    def __init__(
        self, made: Sequence[Stage], places: dict[str, str], writes: dict[str, str], arguments: str, given: str,
        first: int, entered: Sequence[str] | None = None, gradients: set[str] | None = None,
    ) -> None:  # fmt: skip
        self._gradients = gradients
        self._first = first
        self._entered = None if entered is None else [f"entered_{place}" for place in range(len(entered))]
        keeps = zip(entered or (), self._entered or (), strict=True)
        writes = writes | {output: f"k.{name} = {{0}};" for output, name in keeps}
        self._made, self._places, self._writes = made, places, writes
        self._arguments, self._given = f"{self._COMMON}Values& k, float* to, float* operand, {arguments}", given

    def printed(self, rounds: Sequence[Round], ahead: Sequence[Stage] = (), rests: Sequence[Stage] = ()) -> Pass:
        """
        Args:
            ahead: what is computed before the first stages, in functions of their own.
            rests: what is computed after each, in others.
        """
        reductions: list[Reduction] = []
        means: dict[tuple[str, ...], int] = {}
        needs = [_read(stage) for stage in self._made]
        for i, stage in enumerate(rests):
            needs[i] |= _read(ahead[i]) | _read(stage)
        late = None if self._gradients is None else _late(self._made[0], self._gradients)
        kinds: dict[str, str] = {}
        kept = 0
        functions: list[str] = []
        for index, stage in enumerate(self._made):
            if index < len(ahead):
                known = {value.name: "bool" if value.condition else "real" for value in ahead[index].writes}
                kinds |= known
                functions.append(self._ahead(ahead[index], known, index if rests else None))
            computed = {value.name: value for value in stage.writes}
            later = {name for names in needs[index + 1 :] for name in names}
            later |= _read(rests[index]) if rests else set()
            meaned: list[str] = []
            by_operands: dict[tuple[str, ...], int] = {}
            asked: list[str] = []
            for made in stage.collectives:
                if made.kind in ("mean", "variance"):
                    key = made.operands
                    if key not in by_operands:
                        by_operands[key] = len(reductions)
                        place = means.setdefault(key, self._first + 2 * len(means))
                        early = index == 0 and late is not None and late.isdisjoint(key)
                        reductions.append(Reduction(index, len(meaned), len(key), place, False, early))
                        meaned += key
                    which = by_operands[key]
                    found = reductions[which]
                    moments = found.moments or made.kind == "variance"
                    reductions[which] = found._replace(moments=moments, known=found.known and not moments)
                    self._places[made.result] = f"m[{found.place + (made.kind == 'variance')}]"
                elif made.kind == "pull" or made.operands[0] not in asked:
                    asked.append(made.operands[0])
            loads = {value.name: value.condition for value in stage.reads}
            defined = _defined(stage)
            loads |= {name: False for name in (*meaned, *asked) if name not in {*computed, *loads, *defined}}
            lines = [*self._loaded(loads), *stage.lines]
            for name, value in computed.items():
                if name in self._writes:
                    lines.append(self._writes[name].format(name))
                elif name in later:
                    lines.append(f"k.{name} = {name};")
                    kinds[name] = "bool" if value.condition else "real"
            lines += [f"to[{place}] = {name};" for place, name in enumerate(meaned)]
            lines += [f"operand[{place}] = {name};" for place, name in enumerate(asked)]
            if index == 0 and rests:
                functions.append(self._known([it for it in reductions if it.known], stage, meaned))
            body = "\n  ".join(lines)
            functions.append(f"__device__ __forceinline__ void stage_{index}({self._arguments}) {{\n  {body}\n}}")
            if rests:
                functions.append(self._rest(index, rests[index]))
                kinds |= {value.name: "bool" if value.condition else "real" for value in rests[index].writes}
            live = {name for names in needs[index + 1 :] for name in names if name in kinds}
            kept = max(kept, len(live))
        kinds |= dict.fromkeys(self._entered or (), "real")
        members = " ".join(f"{kind} {name};" for name, kind in kinds.items()) or "real none;"
        calls = " else ".join(
            f"if (index == {index}) stage_{index}({self._GIVEN}{self._given});" for index in range(len(self._made))
        )
        text = "\n".join([
            f"struct Values {{ {members} }};", *functions,
            f"__device__ __forceinline__ void run_stage(int index, {self._arguments}) {{\n  {calls}\n}}",
            *self._entered_in(),
        ])  # fmt: skip
        if rests:
            text += self._by_number("run_before", "ahead", self._AHEAD, self._AHEAD_GIVEN)
            text += self._by_number("run_rest", "rest", self._arguments, f"{self._GIVEN}{self._given}")
        reductions.sort(key=lambda made: (made.stage, made.known))
        return Pass(text, "", len(self._made), tuple(reductions), tuple(rounds), kept)

    def _ahead(self, stage: Stage, known: dict[str, str], index: int | None) -> str:
        """A function that computes these values ahead of the first stage, or of the one of that index."""
        lines = [*self._loaded({value.name: value.condition for value in stage.reads}), *stage.lines]
        lines += [f"k.{name} = {name};" for name in known]
        lines += [f"ready(k.{name});" for name, kind in known.items() if kind == "real" and name not in self._writes]
        body = "\n  ".join(lines)
        head = f"run_ahead({self._COMMON}Values& k)" if index is None else f"ahead_{index}({self._AHEAD})"
        return f"__device__ __forceinline__ void {head} {{\n  {body}\n}}"

    def _rest(self, index: int, stage: Stage) -> str:
        """A function that computes what of a stage nobody waits for."""
        lines = [*self._loaded({value.name: value.condition for value in stage.reads}), *stage.lines]
        lines += [self._writes.get(value.name, f"k.{value.name} = {{0}};").format(value.name) for value in stage.writes]
        body = "\n  ".join(lines)
        return f"__device__ __forceinline__ void rest_{index}({self._arguments}) {{\n  {body}\n}}"

    def _by_number(self, name: str, its: str, arguments: str, given: str) -> str:
        """A function that calls those of all stages."""
        calls = " else ".join(f"if (index == {index}) {its}_{index}({given});" for index in range(len(self._made)))
        return f"\n__device__ __forceinline__ void {name}(int index, {arguments}) {{\n  {calls}\n}}"

    def _known(self, known: Sequence[Reduction], stage: Stage, meaned: Sequence[str]) -> str:
        """A function that makes of what is computed ahead what these means of the first stage are made of."""
        places = [place for made in known for place in range(made.first, made.first + made.values)]
        roots = [meaned[place] for place in places]
        own = _lines_of(stage, _needed(_taken_apart(stage)[2], roots))
        loads = {value.name: value.condition for value in own.reads}
        loads |= {name: False for name in roots if name not in {*loads, *_defined(own)}}
        lines = [*self._loaded(loads), *own.lines, *(f"to[{place}] = {meaned[place]};" for place in places)]
        body = "\n  ".join(lines)
        return f"__device__ __forceinline__ void run_known({self._COMMON}const Values& k, float* to) {{\n  {body}\n}}"

    def _entered_in(self) -> list[str]:
        """Backward a function that gives what entered the product that a round inside the step belongs to."""
        if self._entered is None:
            return []
        values = "".join(f"round == {place} ? k.{name} : " for place, name in enumerate(self._entered))
        return [f"__device__ __forceinline__ real entered_in(const Values& k, int round) {{ return {values}0.f; }}"]

    def _loaded(self, names: dict[str, bool]) -> list[str]:
        """Lines that read values, or conditions."""
        return [
            f"const {'bool' if condition else 'real'} {name} = {self._places.get(name, f'k.{name}')};"
            for name, condition in names.items()
        ]


def _read(stage: Stage) -> set[str]:
    operands = {name for made in stage.collectives for name in made.operands}
    defined = _defined(stage)
    return {value.name for value in stage.reads} | (operands - {value.name for value in stage.writes} - defined)


def most(values: Iterable[int]) -> int:
    """The largest, or 0."""
    return max(values, default=0)


def _defined(stage: Stage) -> set[str]:
    """The names of a stage's lines."""
    return {found[1] for line in stage.lines if (found := re.match(r"const \w+ (\w+) =", line))}
