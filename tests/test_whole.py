"""Steps with means where one block has a whole sequence (kernels/whole_forward.cu), run on the host by `emulation`."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import emulation
from emulation import emulated
from engine_cases import Case, assert_agrees
from test_once import ONCE
from test_staged import needs_compiler
from whorl.engines.cuda import grid, staging
from whorl.engines.cuda.tiling import Chip, Size

TILES = [
    ("layer norm of r and c", 4, 1, 2, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("layer norm of r and c", 2, 1, 1, Case(dict(bias=False), time=1, batch=1, units=32), torch.bfloat16),
    ("layer norm of r and c", 4, 2, 2, Case(dict(directions=2), time=5, batch=7, units=60), torch.float16),
    ("layer norm of r and c", 2, 1, 2, Case(initial=False, time=6, batch=5, units=33), torch.float16),
    ("every option of LSTM", 4, 1, 1, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("every option of LSTM", 8, 1, 4, Case(dict(layers=2), time=3, batch=5, units=130), torch.float16),
    ("layer_norm_lstm", 2, 1, 2, Case(dict(layers=2), time=6, batch=6, units=50), torch.float16),
    ("in_turn", 2, 1, 2, Case(dict(directions=2), time=5, batch=6, units=50), torch.float16),
]


def whole(
    monkeypatch: pytest.MonkeyPatch, cluster: int, tiles: int, splits: int, kinds: Sequence[str] = ("forward", "backward")
) -> None:
    """Every layer goes so."""
    choose = grid.choose

    def chosen(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Any:
        if kind not in kinds:
            return choose(size, chip, batch, directions, kind)
        assert size.staged is not None
        make = staging.whole if kind == "forward" else staging.whole_back
        made = make(size.staged, size, cluster, tiles, splits, chip.shared)
        assert made is not None, f"no such tile {kind}"
        return made

    monkeypatch.setattr(grid, "choose", chosen)


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, cluster, tiles, splits, case, dtype", TILES)
def test_forward_of_whole_sequences(
    name: str, cluster: int, tiles: int, splits: int, case: Case, dtype: torch.dtype, order: int, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where threads run in any order."""
    whole(monkeypatch, cluster, tiles, splits)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", ONCE[name], case, dtype)
