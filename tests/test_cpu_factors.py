"""Numbers of the whole row leave the means that they are in; backward's means are summed where their rows are made."""

import pytest
import torch

from engine_cases import CELLS
from expressions import evaluate
from whorl.cells.expr import Expr, mean, rsqrt, topological, var
from whorl.engines.cpu import generate
from whorl.engines.factors import factored

A, B = var("d.a"), var("d.b")
S, T = var("level.0"), rsqrt(var("level.1") + 1e-5)
DRAWN_OUT = {
    "a factor": mean(A * S),
    "factors of factors": mean(-0.5 * (A * B) * T * T * T),
    "of a sum": mean(A * T + B * T),
    "of a difference": mean(A * T - T * B),
    "signs": mean(-(A * T) - B * T),
    "signs that differ": mean(-(A * T) + B * T),
    "of both": mean([A * S, B * S]),
    "means within": mean(A * mean(B * S)),
}
LEFT = {
    "nothing to draw out": mean(A * B),
    "other factors": mean(A * S + B * T),
    "of one of two": mean([A * S, B]),
    "in a function": mean(rsqrt(A * A * S)),
}


def parts_with_numbers(outputs: list[Expr]) -> int:
    """Means of which a part has a number of the row in it."""
    found = [node for node in topological(outputs) if node.op == "mean"]
    inner = [node for made in found for node in topological(made.args) if node.op == "var"]
    return sum(node.args[0].startswith("level.") for node in inner)


@pytest.mark.parametrize("case", [*DRAWN_OUT, *LEFT])
def test_it_is_the_same_mean(case: str) -> None:
    given = (DRAWN_OUT | LEFT)[case]
    (made,) = factored([given])
    generator = torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(3, 7, generator=generator, dtype=torch.float64) for name in ("d.a", "d.b")}
    leaves |= {f"level.{i}": torch.rand(3, 1, generator=generator, dtype=torch.float64) for i in range(2)}
    one, other = evaluate([given, made], leaves)
    assert (one - other).norm() <= 1e-14 * one.norm()
    assert one.norm() > 0


@pytest.mark.parametrize("case", DRAWN_OUT)
def test_no_number_is_left_in_it(case: str) -> None:
    assert parts_with_numbers([DRAWN_OUT[case]])
    assert not parts_with_numbers(factored([DRAWN_OUT[case]]))


@pytest.mark.parametrize("case", LEFT)
def test_what_has_no_common_factor_stays(case: str) -> None:
    assert factored([LEFT[case]])[0].digest == LEFT[case].digest


def test_a_loop_sums_what_backward_takes_means_of() -> None:
    """Forward's lie there already."""
    made = generate.source(CELLS["layer_norm_lstm"])
    count = made.backward.means
    assert "means_of" not in made.backward.text
    assert made.backward.text.count("= total_of(") == made.backward.text.count("= sum_in_lanes(") == count > 0
    assert "ALONE)" not in made.forward.text
    assert "ALONE)" not in generate.source(CELLS["lstm"]).backward.text
