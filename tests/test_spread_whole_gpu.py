"""Steps with means where blocks that exchange through L2 have whole sequences (spread_whole_*.cu), on a GPU."""

import pytest
import torch

from anew import made_anew
from engine_cases import Case, assert_agrees
from test_spread_whole import PLACES, spread, spread_back
from test_whole import CELLS
from test_whole_gpu import assert_a_graph_replays, assert_sleep_changes_nothing

pytestmark = pytest.mark.gpu
LSTM = CELLS["layer norm of r and c"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    made_anew(monkeypatch)
    spread(monkeypatch, 16, 1)
    spread_back(monkeypatch, 16, 3, 1)
    assert_agrees("persistent", CELLS[name], Case(dict(directions=2), time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    "numbers, back, units, batch, time",
    [
        ((32, 2), (32, 4, 2), 512, 128, 12), ((32, 2), (32, 4, 2), 512, 100, 6), ((32, 2), (32, 4, 2), 500, 130, 6),
        ((24, 2), (24, 4, 2), 384, 128, 12), ((40, 1), (40, 4, 1), 320, 128, 6), ((32, 1), (32, 4, 1), 449, 70, 6),
        ((24, 2), (24, 8, 2), 370, 17, 5), ((16, 2), (16, 8, 2), 255, 40, 5), ((8, 1), (8, 2, 1), 70, 9, 40),
        ((32, 2), (32, 4, 2), 512, 1, 12), ((40, 1), (40, 2, 1), 333, 300, 4),
    ],
)  # fmt: skip
def test_sizes(
    numbers: tuple[int, int], back: tuple[int, int, int], units: int, batch: int, time: int, scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With small weights steps forget little; with large ones each is another.  Rings come round after 32 steps.

    (After 70 steps of 512 units `reference` in bfloat16 itself is wholly another.)
    """
    made_anew(monkeypatch)
    spread(monkeypatch, *numbers)
    spread_back(monkeypatch, *back)
    case = Case(time=time, batch=batch, units=units, scale=scale)
    assert_agrees("persistent", LSTM, case, torch.bfloat16, "cuda")


def test_a_graph_replays_with_new_input_and_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    spread(monkeypatch, 16, 1)
    spread_back(monkeypatch, 16, 3, 1)
    assert_a_graph_replays(torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_warps_that_sleep_at_random_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spread(monkeypatch, 16, 1)
    spread_back(monkeypatch, 16, 3, 1)
    assert_sleep_changes_nothing(kind, PLACES[kind], torch.bfloat16, monkeypatch)
