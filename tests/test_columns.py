"""How the weights of backward come to the warps of a block (`kernels/weights.cu`), run on the host by `emulation`."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulation import Kernel, compiled
from whorl.engines.cuda import prepare
from whorl.engines.cuda.kernel_text import text_of
from whorl.engines.cuda.tiling import SHARED, Chip

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

_KERNEL = """
#define ELEMENT_BYTES {element}
#define BFLOAT16 1
#define HALVES 0
#define EXACT 0
#define CLUSTER 1
#define FORWARD 0
#define STAGED 0
#define OPTIONS 0
#define SPREAD 0
#define BOUNDED 0
#define WIDE_GATES 0
#define WARPGROUPS 0
#define MOST(count) ((count) > 0 ? (count) : 1)
constexpr int UNITS = {units}, RECURRENT = {gates}, SLICE = {slice}, SHARED = {shared};
constexpr int STRIPS = {strips}, SHARE = {share}, DEPTHS = {depths}, RESIDENT = {resident}, WARPS = {warps};
constexpr int STREAMED = SHARE * DEPTHS - RESIDENT, TAKEN = STREAMED * WARPS * 512;
{files}
struct Arguments {{ const Weight* weights; uint4* out; int* places; }};
static void KERNEL(const Arguments& a) {{
  extern __shared__ __align__(128) unsigned memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x;
  const int first_column = ((int)gridDim.x - 1 - rank) * STRIPS * 16;  // others than those of its rows
  uint4* const streamed = (uint4*)memory;
  uint4* const out = a.out + ((long long)rank * WARPS + warp) * SHARE * DEPTHS * 32 + lane;
  bring_columns<First<RESIDENT>, STRIPS, SHARE, DEPTHS, STREAMED, WARPS, TAKEN, SLICE>(
      memory, warp, lane, UNITS - first_column, [](int s, int d) {{ return s * DEPTHS + d; }},
      [&](int depth) {{
        const int own = rank * SLICE + depth % SLICE;
        return WeightRow{{a.weights + (depth / SLICE * UNITS + own) * WEIGHT_PITCH + first_column, UNITS - own}};
      }},
      [&](int i, uint4 words) {{ out[i * 32] = words; }},
      [&](int i, uint4 words) {{ streamed[(warp * STREAMED + i) * 32 + lane] = words; }});
  for (int i = 0; i < STREAMED; ++i) out[(RESIDENT + i) * 32] = streamed[(warp * STREAMED + i) * 32 + lane];
  if (rank == 0 && warp == 0 && lane < DEPTH_ROWS)
    for (int strip = 0; strip < 8; ++strip)
      for (int n = 0; n < WEIGHT_BYTES; ++n)
        a.places[(strip * DEPTH_ROWS + lane) * WEIGHT_BYTES + n] = column_at(strip, lane, n);
}}
"""


def _run(
    folder: Path, dtype: torch.dtype, units: int, gates: int, slice_: int, strips: int, warps: int, resident: int,
    shared: int, blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weights [gates x units, units], what arrives [block, warp, strip, depth, lane, element], places of 16 bytes."""
    share, depths = -(-strips // warps), gates * slice_ * dtype.itemsize // 32
    files = "\n".join(text_of(name) for name in ("ptx.cu", "weights.cu"))
    taken = (share * depths - resident) * warps * 512
    text = _KERNEL.format(
        element=dtype.itemsize, units=units, gates=gates, slice=slice_, shared=taken + shared, strips=strips,
        share=share, depths=depths, resident=resident, warps=warps, files=files,
    )  # fmt: skip
    kept = max(resident * warps, prepare._LEAST_OPERANDS) * 512
    room = max(taken + shared, min(prepare._LEAST_SHARED, taken + shared + kept))
    kernel = Kernel(compiled(text, "columns", "", folder=folder), "columns", 0, 32 * warps, room, 1, "3P")
    weights = torch.randint(-128, 128, (gates * units, units), generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.full((blocks, warps, share, depths, 32, 16 // dtype.itemsize), torch.nan, dtype=dtype)
    places = torch.full((8, 32 // dtype.itemsize, dtype.itemsize), -1, dtype=torch.int32)
    kernel(0, blocks, 1, weights.data_ptr(), out.data_ptr(), places.data_ptr())
    return weights, out, places


def _expected(weights: Tensor, out: Tensor, gates: int, slice_: int, strips: int) -> Tensor:
    """Lane l of a strip has units l / 4 * 2 and the next by turns, of rows l % 4 of depth and of those half behind."""
    blocks, warps, share, depths, _, count = out.shape
    units, each = weights.shape[1], count // 4
    padded = weights.new_zeros(gates, blocks * slice_ + units, blocks * strips * 16 + units)
    padded[:, :units, :units] = weights.view(gates, units, units)
    lane, word, part = torch.arange(32)[:, None, None], torch.arange(4)[:, None], torch.arange(each)
    row, unit = word // 2 * 4 * each + lane % 4 * each + part, (lane // 4 * 2 + word % 2).expand(32, 4, each)
    made = torch.empty_like(out)
    for block in range(blocks):
        own = padded[:, block * slice_ : (block + 1) * slice_, (blocks - 1 - block) * strips * 16 :].flatten(0, 1)
        for warp in range(warps):
            for s in range(share):
                strip = min(warp * share + s, strips - 1)
                for d in range(depths):
                    made[block, warp, s, d] = own[d * 8 * each + row, strip * 16 + unit].flatten(1)
    return made


@pytest.mark.parametrize(
    "units, gates, slice_, strips, warps, resident, shared, blocks",
    [
        (64, 4, 16, 4, 4, 4, 768, 4),  # 128 bytes of 4 rows at a time; rows come at once
        (250, 3, 16, 16, 8, 3, 4096, 2),  # rows of pieces of 4 bytes, or of 8
        (37, 4, 16, 3, 12, 1, 768, 3),  # rows of an odd number of elements; warps without strips of their own
        (100, 2, 48, 7, 8, 0, 4096, 3),  # nothing stays in registers
        (333, 4, 16, 21, 8, 5, 96 << 10, 1),  # more than 32 pieces of a row, of which the last are not all there
        (1040, 2, 16, 65, 8, 2, 768, 1),  # strips come in turns, since not one depth of all has room
        (200, 1, 32, 13, 5, 0, 2 * 512, 2),  # and two of them at a time; a number of warps that is odd
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_lane_gets_its_own(
    units: int, gates: int, slice_: int, strips: int, warps: int, resident: int, shared: int, blocks: int,
    dtype: torch.dtype, folder: Path,
) -> None:  # fmt: skip
    weights, out, _ = _run(folder, dtype, units, gates, slice_, strips, warps, resident, shared, blocks)
    torch.testing.assert_close(out, _expected(weights, out, gates, slice_, strips), rtol=0, atol=0)


@pytest.mark.parametrize("slice_", [4, 12])
def test_a_depth_of_several_gates(slice_: int, folder: Path) -> None:
    """Of four bytes: 8 rows, some of one gate and some of the next."""
    weights, out, _ = _run(folder, torch.float32, 90, 4, slice_, 6, 8, 1, 1024, 3)
    torch.testing.assert_close(out, _expected(weights, out, 4, slice_, 6), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nobody_meets_others_in_a_bank(dtype: torch.dtype, folder: Path) -> None:
    """Of 32 banks of 4 bytes: 8 lanes write 16 bytes each at once; 32 lanes read a word, or 16 lanes two."""
    *_, places = _run(folder, dtype, 64, 4, 16, 4, 4, 4, 768, 1)
    element = dtype.itemsize
    assert sorted(places[3].flatten().tolist()) == list(range(0, 128, 4))
    together = 8 // element  # strips of whose row 8 lanes write
    for row in range(32 // element):
        for strip in range(0, 8, together):
            assert len({int(at) // 4 % 8 for at in places[strip : strip + together, row].flatten()}) == 8
    for strip in range(8):
        if element == 2:
            for odd in (0, 1):
                banks = [int(places[strip, i % 4 * 2 + odd, i // 16]) + i // 4 % 4 for i in range(32)]
                assert len({bank % 32 for bank in banks}) == 32
        else:
            for first in (0, 16):
                banks = [int(places[strip, i % 4, i // 8]) + i // 4 % 2 * 2 for i in range(first, first + 16)]
                assert len({bank % 32 // 2 for bank in banks}) == 16


_ARCHITECTURES = {Chip(capability, 1).architecture for capability in SHARED}


def test_the_launch_has_the_room_that_kernels_count_on() -> None:
    text = text_of("weights.cu")
    found = [int(size) << 10 for size in re.findall(r"(?:LEAST|MOST)_SHARED = (\d+) << 10", text)]
    assert found == [prepare._LEAST_SHARED, prepare._MOST_SHARED]
    assert f"LEAST_OPERANDS = {prepare._LEAST_OPERANDS};" in text
    (low, high) = re.findall(r"__CUDA_ARCH__ (?:>=|<) (\d+)", text)
    roomy = {name for name in _ARCHITECTURES if int(low) <= 10 * int(name.strip("sm_a")) < int(high)}
    assert roomy == prepare._ROOMY
