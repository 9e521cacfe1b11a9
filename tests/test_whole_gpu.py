"""Steps with means where one block has a whole sequence (kernels/whole_forward.cu, whole_backward.cu), on an NVIDIA GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import test_persistent
import whorl
from anew import made_anew
from comparison import in_a_graph
from engine_cases import Case, assert_agrees
from test_once import ONCE
from test_whole import whole
from whorl.engines.cuda import launch, source

pytestmark = pytest.mark.gpu
SLOWED = {
    "forward": ["wait(barriers, (t - 1) % 2);", "wait(barriers + 8 * (1 + seat), t % 2);", "const unsigned target = at_rank",
                "summarise(stage, to", "const uint4 data = gathered_words"],
    "backward": ["wait(barriers, t % 2);", "wait(barriers + 8 * (1 + seat), (t - 1) % 2);", "const int couple = warp",
                 "summarise(stage, to", "const uint4 data = turned(words, lane);"],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ONCE)
def test_every_cell(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    whole(monkeypatch, 8, 1, 4)
    assert_agrees("persistent", ONCE[name], Case(dict(directions=2), time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    "cluster, tiles, warps, units, batch, time",
    [
        (2, 1, 2, 32, 1, 1),
        (4, 2, 2, 97, 33, 5),
        (16, 1, 4, 256, 32, 12),
        (16, 2, 2, 255, 67, 6),
        (16, 1, 4, 300, 8, 12),
        (16, 1, 2, 512, 16, 8),
    ],
)
def test_sizes(
    cluster: int, tiles: int, warps: int, units: int, batch: int, time: int, scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With small weights steps forget little; with large ones each is another."""
    made_anew(monkeypatch)
    whole(monkeypatch, cluster, tiles, warps)
    case = Case(time=time, batch=batch, units=units, scale=scale)
    assert_agrees("persistent", ONCE["layer norm of r and c"], case, torch.bfloat16, "cuda")


def layer_and_step(time: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any], Callable[[], list[torch.Tensor]]]:
    layer = whorl.LSTM(24, 256, device="cuda", dtype=dtype, engine="persistent", layer_norm="r c")
    x = torch.randn(time, 32, 24, device="cuda", dtype=dtype)

    def step() -> list[torch.Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))]

    return x, list(layer.parameters()), step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_new_input_and_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    whole(monkeypatch, 16, 1, 4)
    x, weights, step = layer_and_step(9, dtype)
    graph, captured = in_a_graph(step)
    for _ in range(20):
        with torch.no_grad():
            x.normal_()
            for weight in weights:
                weight.mul_(0.99)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", SLOWED)
def test_warps_that_sleep_at_random_change_nothing(
    way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_anew(monkeypatch)
    whole(monkeypatch, 16, 1, 4)
    _, _, step = layer_and_step(37, dtype)
    wanted, write = step(), getattr(source, way)

    def slowed(*given: Any) -> str:
        text = write(*given)
        assert [text.count(place) for place in SLOWED[way]] == [1] * len(SLOWED[way])
        for place in SLOWED[way]:
            text = text.replace(place, f"delay();\n {place}")
        return test_persistent.DELAY + text

    made_anew(monkeypatch, loaded=True)
    monkeypatch.setattr(source, way, slowed)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))
    assert launch._loaded, "kernels whose warps sleep"
