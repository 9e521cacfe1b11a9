"""GPUs on which no cluster is used (8.0 to 8.9, 12.0): one block holds a layer, or blocks exchange through L2.

Their limits are forced on the GPU at hand, or on the host: the shared memory of a block, the multiprocessors, and no
cluster.  The machine code is for the GPU that is there.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import test_persistent
import whorl
from anew import made_anew
from cells_for_tests import CELLS
from comparison import error
from cubins import cubin
from emulation import H200
from test_emulated import outcome
from test_machine_code import needs_tools
from test_persistent import assert_right, build
from whorl import problem
from whorl.cells import library
from whorl.engines.cuda import grid, products, source, spreading, tiling
from whorl.engines.cuda.persistent import Persistent
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip
from whorl.plan import decide, plan
from whorl.problem import Form, Problem

OLDER = {"A100": Chip((8, 0), 108), "RTX 3090": Chip((8, 6), 82), "RTX 4090": Chip((8, 9), 128)}
WITHOUT = OLDER | {"RTX 5090": Chip((12, 0), 170)}
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=OLDER)
def chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chip]:
    """The GPU at hand with the limits of an older one."""
    chip, real = OLDER[request.param], problem._device
    own = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    name, (major, minor) = torch.cuda.get_device_name(), chip.capability
    seen = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=chip.multiprocessors)

    def device(*known: object) -> problem.Device:
        return replace(real(*known), capability=chip.capability, multiprocessors=chip.multiprocessors)

    monkeypatch.setattr(problem, "_device", device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: seen)
    monkeypatch.setattr(Chip, "architecture", own)
    made_anew(monkeypatch)
    has_read = plan, real, products.workspace  # those properties
    for known in has_read:
        known.cache_clear()
    yield chip
    for known in has_read:
        known.cache_clear()


SIZES = [(1, 4, 3), (31, 24, 13), (96, 9, 8), (128, 32, 30), (300, 33, 5), (509, 25, 7), (768, 20, 6)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN relu"])
@pytest.mark.parametrize("units, batch, time", SIZES)
def test_it_is_right(chip: Chip, cell: str, units: int, batch: int, time: int, dtype: torch.dtype) -> None:
    assert_right(build(cell, units, dtype, inputs=units + 3, bidirectional=units == 300), time, batch)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "float32"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_one_block_in_four_bytes(chip: Chip, cell: str, precision: str) -> None:
    assert_right(build(cell, 40, test_persistent.PRECISIONS[precision], inputs=9), 12, 21)


def test_the_tiles_have_no_cluster() -> None:
    for chip in WITHOUT.values():
        for units in (16, 128, 512, 1024):
            size = size_of(library.lstm.graph, units, 2)
            for kind in ("forward", "backward"):
                tile = grid.choose(size, chip, 32, 1, kind)
                assert tile is not None
                assert tile.cluster == 1
                assert tile.shared <= chip.shared
                assert isinstance(tile, Spread) or tiling.fits(size, chip, kind)
                assert tile.blocks <= chip.multiprocessors if isinstance(tile, Spread) else True


def test_layers_are_left_to_other_engines_until_such_a_gpu_ran_them() -> None:
    older = replace(H200, name="RTX 3090", capability=(8, 6), multiprocessors=82)
    plain = Problem(Form(library.lstm.graph, 24, 128), older, torch.bfloat16, 5, 32, gradient=True)
    assert Persistent().obstacles(plain) == []
    assert decide(plain).engine == "cudnn"
    assert "persistent: it never ran on a GPU of compute capability 8.6" in map(str, decide(plain).refusals)
    assert decide(replace(plain, extras=("mask",))).engine == "stepwise"
    assert decide(plain, "persistent").engine == "persistent"


def test_layers_are_left_to_other_engines_on_gpus_that_the_kernels_are_not_made_for() -> None:
    newer = replace(H200, name="RTX 5090", capability=(12, 0), multiprocessors=170)
    plain = Problem(Form(library.lstm.graph, 24, 128), newer, torch.bfloat16, 5, 32, gradient=True)
    reason = "the GPU has compute capability 12.0, these kernels are made for 8.0 to 9.0"
    assert Persistent().obstacles(plain) == [reason]
    assert decide(plain).engine == "cudnn"
    assert f"persistent: {reason}" in map(str, decide(plain).refusals)
    assert decide(replace(plain, extras=("mask",))).engine == "stepwise"


@needs_tools
@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_layers_spread_over_blocks_compile(name: str, kind: str) -> None:
    """One block is compiled for all architectures in test_tiling.py."""
    chip, write = WITHOUT[name], source.forward if kind == "forward" else source.backward
    for cell, units, features in (("lstm", 512, Features()), ("gru", 301, Features(noise=source.BY_GATE))):
        graph = CELLS[cell].graph
        tile = spreading.choose(size_of(graph, units, 2, features), chip, 32, 1, kind)
        assert tile is not None
        text = write(graph, units, torch.bfloat16, tile, True, features)
        cubin(text, "kernel", chip.architecture, flags(tile))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("units", [20, 130])
def test_it_is_right_on_the_host(units: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = OLDER["RTX 3090"]
    older = replace(H200, capability=chip.capability, multiprocessors=chip.multiprocessors)
    monkeypatch.setattr("emulation.H200", older)
    monkeypatch.setattr("emulation.CHIP", chip)
    torch.manual_seed(1)
    dtype, layer, x = torch.bfloat16, whorl.GRU(6, units), torch.randn(3, 9, 6)
    truth = outcome(layer, x, torch.float64, "reference", tmp_path)
    baseline, got = (outcome(layer, x, dtype, engine, tmp_path) for engine in ("reference", "persistent"))
    bounds = {name: 2 * error(baseline[name], truth[name]) + 4 * torch.finfo(dtype).eps for name in truth}
    assert {name: error(got[name], truth[name]) for name in truth if error(got[name], truth[name]) > bounds[name]} == {}
