"""What is done to any step: layer norm of its projections, and states held between limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, clip, const, mean, rsqrt, topological, var
from whorl.cells.graphs import Evaluator, merged, rewritten
from whorl.errors import CellError

EPS = 1e-5


def normal(values: Sequence[Any], eps: float = EPS) -> list[Any]:
    """Each of `values` less their joint mean over all units, divided by their joint standard deviation.

    Layer norm without its gain and shift: biased variance, `eps` added to it (Ba et al. 2016, "Layer normalization").
    """
    middle = mean(list(values))
    apart = [value - middle for value in values]
    scale = rsqrt(mean([value * value for value in apart]) + eps)
    return [value * scale for value in apart]


def layer_norm(graph: Graph, parts: Sequence[str]) -> tuple[Graph, dict[str, float]]:
    """The step with its input projection ("x") or its recurrent one ("r") normalised over all gates and units.

    A gate's `r.n(a)` is normalised on its own: it is known only after the others.  Each gate of each part gets a
    trained gain and shift for each unit, `x_gain_i` and `x_shift_i`.

    Returns:
        The graph, and the new vectors with their initial values.
    """
    read = {node.args[0] for node in topological(graph.outputs) if node.op == "var"}
    vectors: dict[str, float] = {}
    leaves: dict[str, Expr] = {}

    def scaled(part: str, gate: str, value: Expr) -> Expr:
        vectors.update(zip(_scales(part, gate), (1.0, 0.0), strict=True))
        return _scaled(part, gate, value)

    for part in parts:
        gates = [gate for gate in graph.gates if part == "x" or f"r.{gate}" in read]
        values = [var(f"{part}.{gate}") for gate in gates]
        for gate, value, made in zip(gates, values, normal(values) if values else [], strict=True):
            leaves[value.digest] = scaled(part, gate, made)

    def change(node: Expr, made: Expr) -> Expr:
        if node.op == "product" and "r" in parts:
            return scaled("r", node.args[0], normal([made])[0])
        return leaves.get(node.digest, made)

    outputs = tuple(rewritten(graph.outputs, change))
    name = graph.name if graph.name.startswith("layer_norm_") else f"layer_norm_{graph.name}"
    return replace(graph, name=name, vectors=graph.vectors + tuple(vectors), outputs=outputs), vectors


@lru_cache(maxsize=256)
def ahead(graph: Graph) -> Graph | None:
    """The step that is given x after its layer norm; None where it has none, or also reads x beside it.

    `layer_norm(step, ["x"])` undone: that norm reads no state, so it can be computed for all steps at once.
    """
    values = [var(f"x.{gate}") for gate in graph.gates]
    share = share_of_x(graph)
    made = normal(values) if share == 1 else _counted(normal(values), share)
    normed = [_scaled("x", gate, value) for gate, value in zip(graph.gates, made, strict=True)]
    own = {node.digest: var(f"n.{gate}") for gate, node in zip(graph.gates, normed, strict=True)}
    outputs = rewritten(graph.outputs, lambda node, made: own.get(node.digest, made))
    taken = {name for gate in graph.gates for name in _scales("x", gate)}
    read = {node.args[0] for node in topological(outputs) if node.op == "var"}
    if not {f"n.{gate}" for gate in graph.gates} <= read or read & {f"x.{gate}" for gate in graph.gates}:
        return None
    if read & {f"v.{name}" for name in taken}:
        return None
    given = {var(f"n.{gate}").digest: value for gate, value in zip(graph.gates, values, strict=True)}
    outputs = rewritten(outputs, lambda node, made: given.get(node.digest, made))
    vectors = tuple(name for name in graph.vectors if name not in taken)
    return replace(graph, vectors=vectors, outputs=tuple(outputs))


def counted(graph: Graph, units: int, of: int) -> Graph:
    """The step whose means count the first `units` of its `of` units alone.

    The others are padding, of which everything that is averaged is zero: weights, biases, gains and shifts there are.
    Gradients of the units that count are right; those of the padding's parameters are not zero.

    Raises:
        CellError: something else is averaged there.
    """
    if units < of and (node := _beside_zero(graph)) is not None:
        raise CellError(
            f"the step of {graph.name} averages {node}, which is not 0 in units whose inputs, weights, vectors and "
            f"states are 0, so padding would count in it: make a layer of {units} units, without pad_from."
        )
    return replace(graph, outputs=tuple(_counted(graph.outputs, units / of)))


def _beside_zero(graph: Graph) -> Expr | None:
    """What a step averages that is not zero in padding, where `counted` would be wrong."""
    averaged: list[tuple[Expr, Expr]] = []

    def change(node: Expr, made: Expr) -> Expr:
        if node.op == "product":  # with rows and a bias of zeros
            return const(0.0)
        if node.op not in ("mean", "variance"):
            return made
        averaged.extend(zip(node.args, made.args, strict=True))
        return var(f"m.{len(averaged)}")

    outputs = rewritten(merged(graph.outputs), change) + [made for _, made in averaged]
    evaluator, zero = Evaluator(outputs), torch.zeros(1, dtype=torch.float64, device="cpu")
    names = [node.args[0] for node in topological(outputs) if node.op == "var"]
    other = {name for name in names if name.startswith(("m.", "e."))}  # one number for all units, given for each unit
    while True:  # states that do not stay zero are read at the next step
        values = {name: zero + 1 / (2 + place) if name in other else zero for place, name in enumerate(names)}
        found = [bool((value != 0).any()) for value in evaluator(values, evaluator.constants(zero))]
        left = {f"s.{state}" for state, away in zip(graph.states, found, strict=False) if away}
        if left <= other:
            break
        other |= left
    wrong = zip(averaged, found[len(graph.states) :], strict=True)
    return next((node for (node, _), away in wrong if away), None)


def _counted(outputs: Sequence[Expr], share: float) -> list[Expr]:
    more = 1 / share

    def change(node: Expr, made: Expr) -> Expr:
        if node.op == "mean":
            return more * made
        if node.op != "variance":
            return made
        middle = mean(list(made.args))
        around = mean([(value - middle) * (value - middle) for value in made.args])
        return more * around - more * (more - 1) * (middle * middle)

    return rewritten(merged(outputs), change)


@lru_cache(maxsize=256)
def share_of_x(graph: Graph) -> float:
    """Of all units those that count in the means of the input projection, as `counted` has left it."""
    middle = mean([var(f"x.{gate}") for gate in graph.gates]).digest
    for node in topological(graph.outputs):
        if node.op == "mul" and middle in [arg.digest for arg in node.args]:
            factors = [arg.args[0] for arg in node.args if arg.op == "const"]
            if factors:
                return 1 / float(factors[0])
    return 1.0


def norm_vectors(graph: Graph) -> tuple[list[int], list[int]]:
    """Where among the step's vectors the gains of x's layer norm are, and its shifts, gate by gate."""
    names = zip(*(_scales("x", gate) for gate in graph.gates), strict=True)
    gains, shifts = ([graph.vectors.index(name) for name in row] for row in names)
    return gains, shifts


def _scales(part: str, gate: str) -> tuple[str, str]:
    return f"{part}_gain_{gate}", f"{part}_shift_{gate}"


def _scaled(part: str, gate: str, value: Expr) -> Expr:
    gain, shift = (var(f"v.{name}") for name in _scales(part, gate))
    return gain * value + shift


def clipped(graph: Graph, limits: Mapping[str, float]) -> Graph:
    """The step with new states held between -limit and limit, also where it reads them to compute another state."""
    known: dict[str, set[float | None]] = {}  # of states whose new values are one expression
    for state, node in zip(graph.states, graph.outputs, strict=True):
        if node.op not in ("var", "const"):
            known.setdefault(node.digest, set()).add(limits.get(state))
    ends = {digest: limit for digest, (limit, *others) in known.items() if limit is not None and not others}

    def change(node: Expr, made: Expr) -> Expr:
        return clip(made, -ends[node.digest], ends[node.digest]) if node.digest in ends else made

    outputs = [
        clip(made, -limits[state], limits[state]) if state in limits and node.digest not in ends else made
        for state, node, made in zip(graph.states, graph.outputs, rewritten(graph.outputs, change), strict=True)
    ]
    return replace(graph, name=f"clipped_{graph.name}", outputs=tuple(outputs))
