"""Kernels whose warps sleep at random, which run on a GPU alone, compile: they are found to be broken without one."""

from collections.abc import Callable

import pytest
import torch

import test_persistent
import test_spread
from cubins import cubin
from engine_cases import CELLS
from test_machine_code import needs_tools
from whorl.engines.cuda import source, spreading, tiling
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.tiling import Chip

CHIP = Chip((9, 0), 132)
REGIMES = {"a cluster": (tiling.choose, test_persistent.slowed), "through L2": (spreading.choose, test_spread.slowed)}


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(
    "regime, cell, dtype",
    [(regime, *own) for regime in REGIMES for own in (("lstm", torch.bfloat16), ("gru", torch.float32))]
    + [("through L2", "gru_before", torch.bfloat16)],
)
def test_they_compile(regime: str, kind: str, cell: str, dtype: torch.dtype) -> None:
    choose, slowed = REGIMES[regime]
    graph, features = CELLS[cell], Features()
    write: Callable[..., str] = source.forward if kind == "forward" else source.backward
    tile = choose(size_of(graph, 320, dtype.itemsize, features), CHIP, 48, 1, kind)
    text = slowed(write)(graph, 320, dtype, tile, True, features)
    assert "delay()" in text
    cubin(text, "kernel", CHIP.architecture, flags(tile))
