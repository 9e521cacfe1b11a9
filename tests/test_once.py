"""Backward of a step with means in one exchange (kernels/once_backward.cu), run on the host by `emulation`."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import emulation
import whorl
from anew import with_tiles
from emulation import emulated
from engine_cases import CELLS, WRAPPED, Case, assert_agrees
from test_staged import A100, H200, STAGED, needs_compiler
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, topological, var
from whorl.cells.graphs import Evaluator, by_means
from whorl.engines.cuda import grid, source, staging
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.staged import steps
from whorl.engines.cuda.tiling import Size, Tile


@whorl.cell(gates="a b", states="h c")
def in_turn(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Means of what other means are in, with a condition; one gate is in a mean alone."""
    a = r.a - whorl.mean(r.a * x.b)
    middle = whorl.mean([a * a, whorl.where(x.a > 0, 0.5 * r.b, s.c)])
    c = whorl.tanh(a * middle + x.b)
    return dict(h=whorl.tanh(c - whorl.mean(c) + x.a) * whorl.sigmoid(a), c=c)


LSTM = STAGED["layer norm of r and c"]
ONCE = {
    "layer norm of r and c": LSTM,
    "every option of LSTM": WRAPPED["every option of LSTM"],
    "layer_norm_lstm": CELLS["layer_norm_lstm"],
    "in_turn": in_turn.graph,
}


def test_outputs_are_sums_of_vectors_times_numbers() -> None:
    a, b = var("x.a"), var("x.b")
    first = whorl.mean(a * b)
    second = whorl.mean([b * first - a, whorl.where(a < b, first / b, 3.0 * b) + first])
    outputs = [a * second + first * 0.5, b - second, a * b]
    torch.manual_seed(2)
    values = {name: torch.rand(3, 5, dtype=torch.float64) + 0.2 for name in ("x.a", "x.b")}

    def computed(graph: list[Expr]) -> list[torch.Tensor]:
        made = Evaluator(graph)
        return made(values, made.constants(values["x.a"]))

    found = by_means(outputs)
    assert found is not None
    numbers, rows = computed(found[0]), [computed(row) for row in found[1]]
    assert all(node.op != "mean" for row in found[1] for node in topological(row))
    for place, wanted in enumerate(computed(outputs)):
        made = sum(number * row[place] for number, row in zip(numbers, rows, strict=True))
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=0)
    assert by_means([a * first * first]) is None


def test_terms_of_layer_norm() -> None:
    """LSTM: what needs a gradient, what c's two means of backward multiply, r, a constant; GRU: the first and r."""
    gru = wrappers.layer_norm(library.gru.graph, ("r",))[0]
    first, second = steps(LSTM).once, steps(gru).once
    assert first is not None
    assert second is not None
    assert (first.terms, first.constants) == (4, ((0.25,) * 4,))
    assert (second.terms, second.constants) == (2, ((1 / 3,) * 3,))
    assert first.made.exchanges == steps(LSTM).backward.exchanges == 1
    assert all(steps(graph).once is None for graph in (CELLS["gru_before"], WRAPPED["layer norm and a product"]))
    assert staging.once(gru, size_of(gru, 256, 2), 4, 1, H200.shared) is None


TILES = [
    ("layer norm of r and c", 4, 1, 4, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("layer norm of r and c", 2, 1, 4, Case(dict(bias=False), time=1, batch=1, units=32), torch.bfloat16),
    ("layer norm of r and c", 4, 2, 8, Case(dict(directions=2), time=5, batch=7, units=100), torch.bfloat16),
    ("layer norm of r and c", 2, 2, 4, Case(initial=False, time=12, batch=5, units=33), torch.float16),
    ("every option of LSTM", 4, 1, 8, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("every option of LSTM", 8, 1, 8, Case(dict(layers=2), time=3, batch=5, units=130), torch.float16),
    ("layer_norm_lstm", 2, 1, 4, Case(dict(layers=2), time=6, batch=6, units=50), torch.bfloat16),
    ("in_turn", 2, 1, 8, Case(dict(directions=2), time=5, batch=6, units=50), torch.float16),
]


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, cluster, tiles, producers, case, dtype", TILES)
def test_backward_in_one_exchange(
    name: str, cluster: int, tiles: int, producers: int, case: Case, dtype: torch.dtype, order: int, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where threads run in any order."""
    once(monkeypatch, cluster, tiles, producers)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", ONCE[name], case, dtype)


def once(monkeypatch: pytest.MonkeyPatch, cluster: int, tiles: int, producers: int) -> None:
    """Backward of every layer goes so."""

    def made(cell: Graph, size: Size, shared: int, kind: str) -> Tile | None:
        return staging.once(cell, size, cluster, tiles, shared, producers)

    with_tiles(monkeypatch, made, ["backward"])


def chosen(cell: Graph, units: int, batch: int, element: int = 2, features: Features = source.PLAIN) -> Tile:
    tile = grid.estimated(size_of(cell, units, element, features), H200, batch, 1, "backward")
    assert isinstance(tile, Tile)
    return tile


def test_backward_goes_so_where_a_cluster_has_few_sequences() -> None:
    """LSTM with layer norm of r and c, 128 units at batch 8: 4 clusters of 8 blocks with 2 sequences each."""
    tile = chosen(LSTM, 128, 8)
    assert (tile.cluster, tile.each, tile.rows, tile.warps) == (8, 4, 2, 9)
    assert [chosen(LSTM, 512, 32).each, chosen(LSTM, 256, 32).each, chosen(LSTM, 128, 8, 4).each] == [0] * 3
    assert chosen(LSTM, 256, 32, features=Features(mask=True)).each == 0
    assert staging.once(LSTM, size_of(LSTM, 31, 2), 2, 1, H200.shared) is None
    assert chosen(LSTM, 256, 128).each == 0
    on_blocks = [tile for tile in staging.fitting(LSTM, size_of(LSTM, 64, 2), A100, "backward") if tile.each]
    assert on_blocks == []  # there are no clusters
