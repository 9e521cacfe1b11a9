"""Backward of a step with means in one exchange (kernels/once_backward.cu), on an NVIDIA GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import test_persistent
import whorl
from anew import made_anew
from comparison import in_a_graph
from engine_cases import Case, assert_agrees
from test_once import ONCE, once
from whorl.engines.cuda import launch, source

pytestmark = pytest.mark.gpu
SLOWED = [
    "named_barrier(1, THREADS);",
    "wait_for(n - 1);",
    "put(copy, w, true);",
    "b[n0] = d + 1 < DEPTHS",
    "send_sums(n, added(to));",
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ONCE)
def test_every_cell(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    once(monkeypatch, 4, 1, 8)
    assert_agrees("persistent", ONCE[name], Case(dict(directions=2), time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    "cluster, tiles, producers, units, batch, time",
    [
        (2, 1, 4, 32, 1, 1),
        (2, 2, 4, 97, 33, 5),
        (4, 1, 8, 256, 32, 12),
        (8, 2, 8, 255, 67, 6),
        (16, 1, 8, 256, 8, 12),
        (8, 1, 8, 512, 16, 8),
    ],
)
def test_sizes(
    cluster: int, tiles: int, producers: int, units: int, batch: int, time: int, scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With small weights steps forget little; with large ones each is another."""
    made_anew(monkeypatch)
    once(monkeypatch, cluster, tiles, producers)
    case = Case(time=time, batch=batch, units=units, scale=scale)
    assert_agrees("persistent", ONCE["layer norm of r and c"], case, torch.bfloat16, "cuda")


def layer_and_step(time: int) -> tuple[torch.Tensor, list[Any], Callable[[], list[torch.Tensor]]]:
    layer = whorl.LSTM(24, 256, device="cuda", dtype=torch.bfloat16, engine="persistent", layer_norm="r c")
    x = torch.randn(time, 32, 24, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))]

    return x, list(layer.parameters()), step


def test_a_graph_replays_with_new_input_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    once(monkeypatch, 4, 1, 8)
    x, weights, step = layer_and_step(9)
    graph, captured = in_a_graph(step)
    for _ in range(20):
        with torch.no_grad():
            x.normal_()
            for weight in weights:
                weight.mul_(0.99)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_warps_that_sleep_at_random_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    once(monkeypatch, 4, 1, 8)
    _, _, step = layer_and_step(37)
    wanted, write = step(), source.backward

    def slowed(*given: Any) -> str:
        text = write(*given)
        assert [text.count(place) for place in SLOWED] == [1] * len(SLOWED)
        for place in SLOWED:
            text = text.replace(place, f"delay();\n {place}")
        return test_persistent.DELAY + text

    made_anew(monkeypatch, loaded=True)
    monkeypatch.setattr(source, "backward", slowed)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))
    assert launch._loaded, "kernels whose warps sleep"
