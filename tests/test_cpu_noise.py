"""Masks that kernels/noise.cpp draws: to the bit what is counted, whatever part of a row each thread draws."""

from typing import Any

import numpy as np
import pytest
import torch

import whorl
from cells_for_tests import CELLS
from comparison import EXACT, error
from draws import philox
from test_cpu_engine import sweeps, threads
from whorl.engines.cpu import sweep
from whorl.noise import RECURRENT, tag, threshold

SEED = 2**62 + 12345
DTYPES = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chance", [0.0, 2.0**-32, 0.3, 1 - 2.0**-32, 1.0])
@pytest.mark.parametrize("width", [1, 6, 15, 16, 17, 31, 33, 100])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_masks_are_those_that_are_counted(count: int, width: int, chance: float, dtype: torch.dtype) -> None:
    kernel, wide = sweep.kernel(CELLS["lstm"].graph, dtype), DTYPES[dtype]
    code, rows, scale = tag(RECURRENT, 3, 1), 3, 1.25
    for ids in (None, torch.tensor([2**32 - 1, 0, 7])):
        made = torch.full((count * rows * width + 1,), torch.nan, dtype=wide)
        sizes = count, rows, width, sweep.address(ids), SEED, code, threshold(chance), scale
        kernel.draw(made.data_ptr(), *sizes)
        unit, together = np.arange(width), 4 // count
        row = np.arange(rows)[:, None] if ids is None else ids.numpy()[:, None]
        words = np.stack(philox((unit // together, 0, row, code), (SEED % 2**32, SEED >> 32)))
        for word in range(count):
            own = words[unit % together * count + word, :, unit].T.astype(np.int64)
            wanted = torch.from_numpy(np.where(own < round(chance * 2**32), 0.0, scale)).to(wide)
            assert torch.equal(made[:-1].view(count, rows, width)[word], wanted)
        assert made[-1].isnan(), "nothing is written past the end"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("units", [187, 200])
@pytest.mark.parametrize(
    "options",
    [
        {"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step"},
        {"recurrent_dropout": 0.4},
        {"zoneout": {"h": 0.3, "c": 0.6}},
        {"zoneout": {"h": 0.3, "c": 0.6}, "proj_size": 50},
    ],
)
def test_threads_that_share_a_row_draw_what_one_draws(options: dict[str, Any], units: int, dtype: torch.dtype) -> None:
    layer, x = whorl.LSTM(units, units, dtype=dtype, engine="cpu", **options), torch.randn(4, 1, units, dtype=dtype)
    found = []
    for count in (1, 2, 3):
        with threads(count):
            torch.manual_seed(3)
            found.append(sweeps(layer, x))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
    if dtype != torch.float64:
        return
    layer.engine = "reference"
    torch.manual_seed(3)
    assert error(found[0][0], layer(x)[0].detach()) <= EXACT


@whorl.cell(gates="a b c d e k", states="h")
def six_gates(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """More gates than a counter has words."""
    made = [whorl.tanh(getattr(x, gate) + getattr(r, gate)) for gate in "abcdek"]
    return dict(h=0.5 * s.h + made[0] * made[1] + made[2] * made[3] - made[4] * made[5])


@pytest.mark.parametrize("mode", ["gate", "shared"])
def test_a_plain_call_draws_what_is_counted(mode: str) -> None:
    """Masks that all steps share, for more gates than four too: outputs and gradients as `reference` has them."""
    layer = whorl.Recurrent(
        six_gates, 9, 17, 2, bidirectional=True, dtype=torch.float64, recurrent_dropout=0.4, recurrent_dropout_mode=mode
    )
    x, found = torch.randn(4, 5, 9, dtype=torch.float64), []
    for engine in ("cpu", "reference"):
        layer.engine = engine
        torch.manual_seed(3)
        found.append(sweeps(layer, x))
    assert all(error(one.detach(), other.detach()) <= EXACT for one, other in zip(*found, strict=True))
