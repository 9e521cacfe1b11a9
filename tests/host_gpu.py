"""The kernels of the engine `stepwise` compiled for the host: one thread a block, one block after the other."""

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from host_library import built
from whorl.cells.cell import Graph
from whorl.engines.cuda import steps, stepwise
from whorl.engines.cuda.steps import Kernels, Sizes
from whorl.engines.cuda.stepwise_source import Source, source

_SHIM = """
#include <math.h>
#include <string.h>
#define int64_t gpu_int64
#define int32_t gpu_int32
#define uint64_t gpu_uint64
#define uint32_t gpu_uint32
#define uint16_t gpu_uint16
#define uint8_t gpu_uint8
#define __forceinline__ inline
#define __global__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __syncthreads()
#define __shfl_xor_sync(members, value, away) real(0)
struct Three { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
static Three threadIdx, blockIdx, blockDim = {1, 1, 1};
inline float __uint_as_float(unsigned bits) { float made; memcpy(&made, &bits, 4); return made; }
inline unsigned __float_as_uint(float value) { unsigned made; memcpy(&made, &value, 4); return made; }
inline double __longlong_as_double(long long bits) { double made; memcpy(&made, &bits, 8); return made; }
"""
_LAUNCH = """
extern "C" void host_{part}(const {type}* argument, unsigned first, unsigned second) {{
  for (blockIdx.x = 0; blockIdx.x < first; ++blockIdx.x)
    for (blockIdx.y = 0; blockIdx.y < second; ++blockIdx.y) NAME({part})(*argument);
}}
"""


def compiled(made: Source, folder: Path, flags: tuple[str, ...] = ("-O0",)) -> ctypes.CDLL:
    """The kernels as a library of the host."""
    text = _SHIM + made.text.replace('extern "C" __global__', "__global__")
    text += "".join(_LAUNCH.format(part=p, type="Start" if p == "start" else "Step") for p in made.names)
    return ctypes.CDLL(str(built(text, folder, flags)))


class _Kernel:
    def __init__(self, function: Callable[..., None], layout: str, whole: bool) -> None:
        self._function, self._layout, self._whole = function, layout, whole

    def __call__(self, stream: int, grid: int, second: int, *values: int | float) -> None:
        packed = struct.pack(self._layout, *values)
        # a block has one thread here: as many blocks as units, where a block has not the whole row
        self._function(packed, grid, second if self._whole else second * 128)


def use(monkeypatch: object, folder: Path) -> None:
    """Let the engine `stepwise` run on the host."""

    @lru_cache
    def kernels(cell: Graph, dtype: torch.dtype, device: torch.device) -> Kernels:
        made = source(cell, dtype)
        library = compiled(made, folder)
        layout = steps._layout(cell, made)

        def get(part: str, size: int) -> _Kernel:
            means = {"forward": made.segments.forward.means, "backward": made.segments.backward.means}
            whole = part in ("start", "advance") or means.get(part.split("_")[0], 0) > 0
            return _Kernel(getattr(library, f"host_{part}"), layout + "Q" if part == "start" else "Qq", whole)

        return Kernels(made, cell, dtype, device, get)  # type: ignore[arg-type]

    def sweep(
        own: Kernels, way: str, sizes: Sizes, time: int, fields: Mapping[str, object], hh: Tensor, hr: Tensor
    ) -> None:
        steps._Workspace(own, way, sizes, hh, hr).run(0, time, fields)

    def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)

    monkeypatch.setattr(stepwise, "kernels", kernels)  # type: ignore[attr-defined]
    monkeypatch.setattr(stepwise, "sweep", sweep)  # type: ignore[attr-defined]
    for module in (stepwise, steps):
        monkeypatch.setattr(module, "matrix_product", product)  # type: ignore[attr-defined]
    monkeypatch.setattr(stepwise.Stepwise, "obstacles", lambda self, problem: [])  # type: ignore[attr-defined]
