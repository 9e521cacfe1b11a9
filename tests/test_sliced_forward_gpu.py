"""Forward of steps with means where a warp has a block's units of a sequence (sliced_forward.cu), on a GPU."""

from typing import Any

import pytest
import torch

from anew import made_anew
from engine_cases import Case, assert_agrees
from test_sliced_forward import SLOWED, sliced
from test_staged_gpu import assert_near_in_tf32
from test_whole import CELLS
from test_whole_gpu import assert_a_graph_replays, assert_sleep_changes_nothing

pytestmark = pytest.mark.gpu
LSTM = CELLS["layer norm of r and c"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_every_cell(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the eight blocks have no units."""
    made_anew(monkeypatch)
    sliced(monkeypatch, 8, 5, 1, 2)
    assert_agrees("persistent", CELLS[name], Case(dict(directions=2), time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("form", [dict(directions=2), dict(layers=2), dict(bias=False)], ids=str)
@pytest.mark.parametrize(
    "cluster, lines, splits, units, batch",
    [
        (8, 5, 2, 130, 20),
        (8, 8, 1, 256, 32),
        (2, 8, 1, 60, 70),
        (8, 3, 1, 255, 40),
        (16, 5, 2, 512, 32),
        (8, 9, 1, 256, 128),
    ],
)
def test_tf32(
    cluster: int, lines: int, splits: int, units: int, batch: int, form: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made_anew(monkeypatch)
    sliced(monkeypatch, cluster, lines, -(-lines // 8), splits)
    assert_near_in_tf32(LSTM, Case(form, time=4, batch=batch, units=units, scale=0.1))


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    "cluster, lines, splits, units, batch, time",
    [
        (16, 5, 2, 512, 32, 12), (16, 5, 2, 450, 35, 12), (8, 3, 1, 255, 40, 6), (4, 5, 1, 97, 33, 5),
        (2, 8, 1, 33, 70, 4), (2, 1, 1, 64, 1, 1), (16, 5, 2, 320, 32, 6), (16, 5, 2, 384, 30, 6),
        (16, 8, 2, 448, 50, 6), (2, 2, 1, 20, 33, 6), (16, 1, 2, 512, 1, 9),
        (16, 5, 1, 512, 32, 12), (16, 10, 1, 512, 64, 12), (16, 12, 1, 512, 80, 6), (8, 9, 1, 256, 128, 6),
        (8, 10, 1, 250, 150, 6), (8, 5, 1, 256, 64, 6), (8, 3, 1, 256, 32, 12),
    ],
)  # fmt: skip
def test_sizes(
    cluster: int, lines: int, splits: int, units: int, batch: int, time: int, scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With small weights steps forget little; with large ones each is another."""
    made_anew(monkeypatch)
    sliced(monkeypatch, cluster, lines, -(-lines // 8), splits)
    case = Case(time=time, batch=batch, units=units, scale=scale)
    assert_agrees("persistent", LSTM, case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_new_input_and_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(monkeypatch, 8, 5, 1, 2)
    assert_a_graph_replays(dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("numbers", [(8, 5, 1, 2), (8, 9, 2, 1)])
def test_warps_that_sleep_at_random_change_nothing(
    numbers: tuple[int, int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced(monkeypatch, *numbers)
    assert_sleep_changes_nothing("forward", SLOWED, dtype, monkeypatch)
