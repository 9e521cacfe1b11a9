"""How weights lie on their way to the warps of a kernel (kernels/weights.cu): nobody meets others in a bank."""

import ctypes
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from cells_for_tests import CELLS
from host_library import built
from whorl.engines.cuda import grid, source, spreading
from whorl.engines.cuda.compile import cubin, missing
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.source import AT_RANDOM, Features
from whorl.engines.cuda.tiling import Chip

KERNELS = Path(source.__file__).parent / "kernels"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("each, most", [(4, 1), (2, 2), (1, 4)])
def test_a_square_holds_each_16_bytes_once_and_is_written_and_read_without_conflicts(
    each: int, most: int, tmp_path: Path
) -> None:
    """Of 32 banks of 4 bytes: a warp's 512 bytes are written in four turns at least, 32 words are read in one."""
    kernel = (KERNELS / "weights.cu").read_text()
    found = re.search(r"__device__ __forceinline__ (int square_at.*?\n}\n)", kernel, re.S)
    assert found
    text = f'constexpr int EACH = {each};\nextern "C" {found[1]}'
    place = ctypes.CDLL(str(built(text, tmp_path, ()))).square_at
    pieces = {(m, n): place(m, n) for m, n in product(range(16), range(2 * each))}
    assert sorted(pieces.values()) == [4 * i for i in range(32 * each)]
    down = 16 // each
    for first in range(0, 16, down):
        banks = [pieces[first + lane // (2 * each), lane % (2 * each)] // 4 % 8 for lane in range(32)]
        assert max(map(banks.count, banks)) <= 4 * most
    for odd, n in product(range(2), range(2 * each)):
        banks = [(pieces[lane // 4 * 2 + odd, n] + lane % 4) % 32 for lane in range(32)]
        assert max(map(banks.count, banks)) <= most


@pytest.mark.skipif(missing() is not None, reason="pip install cuda-bindings nvidia-cuda-nvrtc")
def test_weights_have_room_on_their_way_where_shared_memory_is_shortest() -> None:
    """Of all layers and chips tried this leaves the least beside its weights: 1,025 bytes a warp; 512 are needed."""
    cell, features = CELLS["rnn_relu"].graph, Features(zoneout=(AT_RANDOM,))
    tile = grid.choose(size_of(cell, 200, 4, features), Chip((8, 6), 82), 128, 1, "forward")
    assert tile is not None
    text = source.forward(cell, 200, torch.float32, tile, True, features)
    assert cubin(text, "kernel", "sm_86", flags(tile))


@pytest.mark.skipif(missing() is not None, reason="pip install cuda-bindings nvidia-cuda-nvrtc")
def test_weights_have_room_where_none_stay_in_registers_and_a_step_takes_little() -> None:
    """Of a layer of few units, where blocks exchange: one whose room beside its weights is no operand of each warp."""
    cell, chip, features = CELLS["lstm"].graph, Chip((8, 0), 108), Features(lengths=True)
    candidates = spreading.candidates(size_of(cell, 2, 4, features, exact=True), chip, "forward")
    tile = min(candidates, key=lambda one: (one.resident, one.shared - 512 * one.warps * one.depths, -one.groups))
    text = source.forward(cell, 2, torch.float32, tile, True, features)
    assert cubin(text, "kernel", chip.architecture, flags(tile))
