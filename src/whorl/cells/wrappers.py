"""What is done to any step: layer norm of its projections, and states held between limits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, clip, mean, rsqrt, topological, var
from whorl.cells.graphs import rewritten


def normal(values: Sequence[Any], eps: float = 1e-5) -> list[Any]:
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
        gain, shift = f"{part}_gain_{gate}", f"{part}_shift_{gate}"
        vectors.update({gain: 1.0, shift: 0.0})
        return var(f"v.{gain}") * value + var(f"v.{shift}")

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


def clipped(graph: Graph, limits: Mapping[str, float]) -> Graph:
    """The step with new states held between -limit and limit, also where it reads them to compute another state."""
    ends = {
        node.digest: limits[state]
        for state, node in zip(graph.states, graph.outputs, strict=True)
        if state in limits and node.op not in ("var", "const")
    }

    def change(node: Expr, made: Expr) -> Expr:
        return clip(made, -ends[node.digest], ends[node.digest]) if node.digest in ends else made

    outputs = [
        clip(made, -limits[state], limits[state]) if state in limits and node.op in ("var", "const") else made
        for state, node, made in zip(graph.states, graph.outputs, rewritten(graph.outputs, change), strict=True)
    ]
    return replace(graph, name=f"clipped_{graph.name}", outputs=tuple(outputs))
