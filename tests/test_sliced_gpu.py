"""Backward of steps with means where a warp has a block's units of a sequence (sliced_backward.cu), on a GPU."""

from typing import Any

import pytest
import torch

from anew import made_anew
from engine_cases import Case, assert_agrees
from test_sliced import SLOWED, sliced
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
    sliced(monkeypatch, 8, 5, 8)
    assert_agrees("persistent", CELLS[name], Case(dict(directions=2), time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("form", [dict(directions=2), dict(layers=2), dict(bias=False)], ids=str)
@pytest.mark.parametrize(
    "cluster, lines, producers, units, batch",
    [(8, 5, 8, 130, 20), (8, 9, 4, 256, 32), (2, 9, 4, 60, 70), (8, 3, 8, 255, 40), (16, 5, 8, 512, 32)],
)
def test_tf32(
    cluster: int, lines: int, producers: int, units: int, batch: int, form: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made_anew(monkeypatch)
    sliced(monkeypatch, cluster, lines, producers)
    assert_near_in_tf32(LSTM, Case(form, time=4, batch=batch, units=units, scale=0.1))


@pytest.mark.parametrize("scale", [0.02, 0.2])
@pytest.mark.parametrize(
    "cluster, lines, producers, units, batch, time",
    [
        (16, 5, 8, 512, 32, 12),
        (16, 5, 8, 450, 35, 12),
        (8, 9, 4, 256, 128, 6),
        (8, 3, 8, 255, 40, 6),
        (4, 5, 4, 97, 33, 5),
        (2, 9, 4, 33, 70, 4),
        (2, 1, 4, 64, 1, 1),
        (16, 5, 5, 320, 32, 6),
        (16, 5, 6, 384, 30, 6),
        (16, 5, 7, 448, 32, 6),
        (2, 2, 4, 20, 33, 6),
        (8, 9, 6, 256, 128, 6),
        (8, 10, 4, 250, 150, 6),
        (16, 10, 6, 512, 64, 6),
    ],
)
def test_sizes(
    cluster: int, lines: int, producers: int, units: int, batch: int, time: int, scale: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With small weights steps forget little; with large ones each is another."""
    made_anew(monkeypatch)
    sliced(monkeypatch, cluster, lines, producers)
    case = Case(time=time, batch=batch, units=units, scale=scale)
    assert_agrees("persistent", LSTM, case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_graph_replays_with_new_input_and_weights(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sliced(monkeypatch, 8, 5, 8)
    assert_a_graph_replays(dtype, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lines, producers", [(5, 8), (9, 4)])
def test_warps_that_sleep_at_random_change_nothing(
    lines: int, producers: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced(monkeypatch, 8, lines, producers)
    assert_sleep_changes_nothing("backward", SLOWED, dtype, monkeypatch)
