"""Steps with means where a block has whole sequences (kernels/whole_forward.cu, whole_backward.cu), on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import test_persistent
import whorl
from anew import made_anew
from comparison import in_a_graph
from engine_cases import Case, assert_agrees
from test_staged_gpu import assert_near_in_tf32
from test_whole import CELLS, LSTM, whole
from whorl.engines.cuda import launch, source

pytestmark = pytest.mark.gpu
SLOWED = {
    "forward": [
        "wait(barriers + 8 * sub, (t - 1) % 2);",
        "wait(its_results, t % 2);",
        "const unsigned target = TILES > 1",
        "sums_of_units(stage, to",
        "float4 sum = at[pack * WHOLE];",
        "const unsigned own = operand_pair(",
    ],
    "backward": [
        "wait(barriers, t % 2);",
        "wait(barriers + 8 * (1 + seat), (t - 1) % 2);",
        "const int couple = warp",
        "float4 all[MOST(PACKS)]",
        "const uint4 data = turned(words, lane);",
    ],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    whole(monkeypatch, 8, 1, 4)
    assert_agrees("persistent", CELLS[name], Case(dict(directions=2), time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("form", [dict(directions=2), dict(layers=2), dict(bias=False)], ids=str)
@pytest.mark.parametrize("units, batch", [(130, 20), (256, 32), (60, 70)])
def test_tf32(units: int, batch: int, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    whole(monkeypatch, 8, 1, 2)
    assert_near_in_tf32(LSTM, Case(form, time=4, batch=batch, units=units, scale=0.1))


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    "cluster, tiles, warps, units, batch, time, kinds",
    [
        (2, 1, 2, 32, 1, 1, ("forward", "backward")),
        (4, 1, 2, 97, 33, 5, ("forward", "backward")),
        (4, 2, 2, 97, 33, 5, ("forward",)),
        (16, 1, 4, 256, 32, 12, ("forward", "backward")),
        (8, 1, 8, 256, 64, 6, ("backward",)),
        (16, 2, 2, 255, 67, 6, ("forward", "backward")),
        (8, 2, 2, 40, 70, 4, ("forward", "backward")),
        (8, 2, 1, 256, 128, 8, ("forward",)),
        (8, 2, 2, 200, 150, 6, ("forward",)),
        (16, 1, 2, 384, 8, 12, ("forward", "backward")),
        (16, 1, 2, 512, 16, 8, ("forward",)),
    ],
)
def test_sizes(
    cluster: int, tiles: int, warps: int, units: int, batch: int, time: int, kinds: Sequence[str], scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With small weights steps forget little; with large ones each is another."""
    made_anew(monkeypatch)
    whole(monkeypatch, cluster, tiles, warps, kinds)
    case = Case(time=time, batch=batch, units=units, scale=scale)
    assert_agrees("persistent", LSTM, case, torch.bfloat16, "cuda")


def layer_and_step(time: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any], Callable[[], list[torch.Tensor]]]:
    layer = whorl.LSTM(24, 256, device="cuda", dtype=dtype, engine="persistent", layer_norm="r c")
    x = torch.randn(time, 32, 24, device="cuda", dtype=dtype)

    def step() -> list[torch.Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))]

    return x, list(layer.parameters()), step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_new_input_and_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch, 16, 1, 4)
    assert_a_graph_replays(dtype, monkeypatch)


def assert_a_graph_replays(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
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
@pytest.mark.parametrize("way, cluster, tiles, warps", [
    ("forward", 16, 1, 4), ("forward", 8, 2, 2), ("backward", 16, 1, 4),
])  # fmt: skip
def test_warps_that_sleep_at_random_change_nothing(
    way: str, cluster: int, tiles: int, warps: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(monkeypatch, cluster, tiles, warps, [way])
    assert_sleep_changes_nothing(way, SLOWED[way], dtype, monkeypatch)


def assert_sleep_changes_nothing(
    way: str, places: Sequence[str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside kernels that ask whether to sleep and never do: a question may change what the compiler contracts."""
    write = getattr(source, way)
    sleeping = test_persistent.DELAY
    waking = sleeping.replace("(draw >> 24) % 8 == 0", "draw == 0x9e3779b9u")
    assert waking != sleeping

    def slowed(delay: str) -> Callable[[], list[torch.Tensor]]:
        def written(*given: Any) -> str:
            text = write(*given)
            assert [text.count(place) for place in places] == [1] * len(places)
            for place in places:
                text = text.replace(place, f"delay();\n {place}")
            return delay + text

        made_anew(monkeypatch, loaded=True)
        monkeypatch.setattr(source, way, written)
        torch.manual_seed(1)
        return layer_and_step(37, dtype)[2]

    wanted = slowed(waking)()
    step = slowed(sleeping)
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))
    assert launch._loaded, "kernels whose warps sleep"
