"""What is known early is multiplied and added up first, and values stay as they are."""

import pytest
import torch

from test_whole import CELLS
from whorl.cells.early import early_first
from whorl.cells.expr import OPS, Expr, mean, topological, var, where
from whorl.cells.graphs import Evaluator, at_once


def values_of(outputs: list[Expr]) -> list[torch.Tensor]:
    """In float64, of leaves drawn by their names."""
    evaluate = Evaluator(outputs)
    names = sorted({node.args[0] for node in topological(outputs) if node.op == "var"})
    leaves = {
        name: torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(names)
    }
    return evaluate(leaves, evaluate.constants(torch.zeros((), dtype=torch.float64)))


def behind(node: Expr, late: str) -> int:
    """How many operations are between a node and a leaf, where a product and a sum are one."""
    depth: dict[str, int] = {}
    for own in topological([node]):
        below = [depth[arg.digest] for arg in own.args if isinstance(arg, Expr) and arg.digest in depth]
        if below or (own.op == "var" and own.args[0] == late):
            fused = own.op == "mul" and len(below) == 1 and below[0] == 0
            depth[own.digest] = 0 if own.op == "var" or fused else 1 + max(below)
    return depth[node.digest]


@pytest.mark.parametrize("name", CELLS)
def test_values_stay(name: str) -> None:
    graph = CELLS[name]
    named = graph.backward.named()
    outputs = at_once([*named.values()])
    made = early_first(outputs, range(len(outputs)), {f"d.{graph.states[0]}"})
    assert [node.digest for node in made] != [node.digest for node in outputs]
    for new, old in zip(values_of(made), values_of(outputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-9, atol=1e-9)


def test_one_product_is_left_behind() -> None:
    g, y, a, b = map(var, "gyab")
    (made,) = early_first([OPS["rsqrt"].gradient(g, y, a)[0] * a / b], {0}, {"g"})
    assert (made.op, made.args[0].digest) == ("mul", g.digest)
    assert behind(made, "g") == 0
    (made,) = early_first([(g * a - b) * y + y * (a * g) * b], {0}, {"g"})
    assert behind(made, "g") == 1


def test_what_means_are_made_of_is_so_too_and_a_long_sum_is_added_up_once() -> None:
    g, h, a, b, c = map(var, "ghabc")
    middle = mean(g * a * b * c)
    total = c + middle * a + mean(h)
    made = early_first([total * a * b, total * b * c], {0, 1}, {"g", "h"})
    first, second = (next(arg for arg in node.args if arg.op == "add") for node in made)
    assert first.digest == second.digest
    means = [node for node in topological(made) if node.op == "mean"]
    assert any(node.args[0].op == "mul" and node.args[0].args[0].digest == g.digest for node in means)


def test_a_condition_stands_between() -> None:
    """Where it does not hold, what is multiplied may be no number."""
    g, a, b = map(var, "gab")
    (made,) = early_first([where(a > 0, g, 0.0) * a * b], {0}, {"g"})
    assert made.args[0].op == "where"
