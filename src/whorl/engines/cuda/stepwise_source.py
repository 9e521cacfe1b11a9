"""The source of the engine `stepwise`: a cell's step as CUDA C++, for the marked places of `kernels/stepwise.cu`."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from whorl.cells.cell import Graph
from whorl.cells.lower import identifier
from whorl.engines.segments import Link, Segments, segments

_FILE = Path(__file__).parent / "kernels" / "stepwise.cu"
_GENERATED, _SEGMENTS = "//: generated\n", "//: segments\n"
_DTYPES = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 16, torch.float16: 17}
_INFINITY, _NAN = "real(__longlong_as_double(0x7ff0000000000000ll))", "real(__longlong_as_double(0x7ff8000000000000ll))"
CHUNK = 128
"""Threads of a block of a cell without means, a unit each."""
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Source:
    """The CUDA C++ of one cell and dtype, and what of it the one who launches it must know."""

    text: str
    names: dict[str, str]
    """Of each kernel, by its part: "start", "forward_0", ..."""
    segments: Segments


@lru_cache(maxsize=256)
def source(graph: Graph, dtype: torch.dtype) -> Source:
    """The CUDA C++ of a cell, for every size."""
    made = segments(graph, infinity=_INFINITY, nan=_NAN)
    name = f"{identifier(graph.name)}_stepwise_{{}}_{str(dtype).removeprefix('torch.')}"
    passes = {"forward": made.forward, "backward": made.backward}
    counts = {
        "GATES": len(graph.gates), "RECURRENT": len(graph.recurrent), "STATES": len(graph.states),
        "VECTORS": len(graph.vectors), "EXTRAS": len(graph.inputs), "PRODUCTS": len(made.products),
        "SAVED": made.saved, "SAVED_MEANS": made.saved_means, "LEAVES": sum(made.leaves),
    }  # fmt: skip
    kernels, parts = [], ["start", "advance", "enter", "commit", "begin", "finish"]
    for way, one in passes.items():
        prefix = way.upper()
        counts |= {f"{prefix}_MEANS": one.means, f"{prefix}_SEGMENTS": one.segments}
        counts |= {f"{prefix}_LINK_COUNT": len(one.links)}
        step = "a.base + s.offset" if way == "forward" else "a.time - 1 - a.base - s.offset"
        threads = _MOST_THREADS if one.means else CHUNK
        for index in range(one.segments):
            parts.append(f"{way}_{index}")
            kernels.append(
                f'extern "C" __global__ void __launch_bounds__({threads}) NAME({way}_{index})(const Step s) {{\n'
                f"  const Arguments a = *s.a;\n  kernel::{way}_part<{index}>(a, {step});\n}}"
            )
    leaves = ", ".join(str(leaf).lower() for leaf in made.leaves) or "false"
    lines = [f"constexpr int {name} = {value};" for name, value in counts.items()]
    lines += [f"constexpr bool LEAF[] = {{{leaves}}};"]
    for way, one in passes.items():
        lines += [one.text, f"constexpr Link {way.upper()}_LINKS[] = {{{_rows(one.links)}}};"]
    text = _FILE.read_text(encoding="utf-8")
    for mark, inner in {_GENERATED: lines, _SEGMENTS: kernels}.items():
        before, found, after = text.partition(mark)
        assert found, f"stepwise.cu has the place {mark.strip()}"
        text = before + "\n".join(inner) + "\n" + after
    head = f"#define WHORL_DTYPE {_DTYPES[dtype]}\n#define NAME(part) {name.format('##part##')}\n"
    return Source(head + text, {part: name.format(part) for part in parts}, made)


def _rows(links: tuple[Link, ...]) -> str:
    return ", ".join(f"{{{', '.join(map(str, link))}}}" for link in links or (Link(-1, 0, 0, 0, 0),))


def threads(whole_rows: bool, larger: int) -> int:
    """Threads of a block: where a block has whole rows, one for each unit as far as a block can have them."""
    return min(_MOST_THREADS, -(-larger // 32) * 32) if whole_rows else CHUNK
