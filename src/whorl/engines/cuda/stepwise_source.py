"""The sources of the engine `stepwise`: a cell's step as CUDA C++, at the marked places of files in `kernels`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from whorl.cells.cell import Graph
from whorl.cells.lower import identifier
from whorl.engines.cuda.kernel_text import text_of
from whorl.engines.segments import Link, Segments, segments

_UNITS, _GENERATED, _SEGMENTS, _AFTER = "//: units\n", "//: generated\n", "//: segments\n", "//: after\n"
_DTYPES = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 16, torch.float16: 17}
_INFINITY, _NAN = "real(__longlong_as_double(0x7ff0000000000000ll))", "real(__longlong_as_double(0x7ff8000000000000ll))"
CHUNK, _TOGETHER = 128, 8
"""Threads of a block of a cell without means, a unit each, and such blocks of a multiprocessor: a launch of LSTM with
2,048 units at batch 64 in float32 took 7.1 us forward, and where registers were as many as it takes 9.7 (H200)."""
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Source:
    """The CUDA C++ of one cell and dtype, and what of it the one who launches it must know."""

    text: str
    names: dict[str, str]
    """Of each kernel, by its part: "start", "forward_0", ..., or "stream"."""
    segments: Segments


@lru_cache(maxsize=256)
def source(graph: Graph, dtype: torch.dtype) -> Source:
    """The kernels of all steps, for every size."""
    made, kernels = _segments(graph), []
    parts = ["start", "advance", "enter", "commit", "begin", "finish"]
    for way, one in {"forward": made.forward, "backward": made.backward}.items():
        step = "a.base + s.offset" if way == "forward" else "a.time - 1 - a.base - s.offset"
        most = str(_MOST_THREADS) if one.means else f"{CHUNK}, {_TOGETHER}"
        for index in range(one.segments):
            parts.append(f"{way}_{index}")
            kernels.append(
                f'extern "C" __global__ void __launch_bounds__({most}) NAME({way}_{index})(const Step s) {{\n'
                f"  __shared__ Arguments a;\n  kernel::bring(s.a, a);\n  kernel::{way}_part<{index}>(a, {step});\n}}"
            )
    text = _filled(text_of("stepwise.cu"), {_UNITS: [_units(graph, dtype)], _SEGMENTS: kernels})
    return Source(text, _names(graph, dtype, parts), made)


@lru_cache(maxsize=256)
def stream(graph: Graph, dtype: torch.dtype) -> Source:
    """The kernel of one step of one layer, for every size, of a cell without means and products inside."""
    text = _filled(text_of("stream.cu"), {_UNITS: [_units(graph, dtype)], _AFTER: [text_of("after.cu")]})
    return Source(text, _names(graph, dtype, ["stream"]), _segments(graph))


def _segments(graph: Graph) -> Segments:
    return segments(graph, infinity=_INFINITY, nan=_NAN)


def _units(graph: Graph, dtype: torch.dtype) -> str:
    """What both begin with: numbers, rows, and the cell's lines."""
    made = _segments(graph)
    counts = {
        "GATES": len(graph.gates), "RECURRENT": len(graph.recurrent), "STATES": len(graph.states),
        "VECTORS": len(graph.vectors), "EXTRAS": len(graph.inputs), "PRODUCTS": len(made.products),
        "SAVED": made.saved, "SAVED_MEANS": made.saved_means, "LEAVES": sum(made.leaves),
    }  # fmt: skip
    lines = []
    for way, one in {"FORWARD": made.forward, "BACKWARD": made.backward}.items():
        counts |= {f"{way}_MEANS": one.means, f"{way}_SEGMENTS": one.segments, f"{way}_LINK_COUNT": len(one.links)}
        lines += [one.text, f"constexpr Link {way}_LINKS[] = {{{_rows(one.links)}}};"]
    leaves = ", ".join(str(leaf).lower() for leaf in made.leaves) or "false"
    numbers = [f"constexpr int {name} = {value};" for name, value in counts.items()]
    text = _filled(text_of("units.cu"), {_GENERATED: [*numbers, f"constexpr bool LEAF[] = {{{leaves}}};", *lines]})
    name = _name(graph, dtype).format("##part##")
    return f"#define WHORL_DTYPE {_DTYPES[dtype]}\n#define NAME(part) {name}\n{text}"


def _name(graph: Graph, dtype: torch.dtype) -> str:
    """What a profiler shows, with a place for the part."""
    return f"{identifier(graph.name)}_stepwise_{{}}_{str(dtype).removeprefix('torch.')}"


def _names(graph: Graph, dtype: torch.dtype, parts: Iterable[str]) -> dict[str, str]:
    return {part: _name(graph, dtype).format(part) for part in parts}


def _filled(text: str, places: Mapping[str, list[str]]) -> str:
    for mark, inner in places.items():
        before, found, after = text.partition(mark)
        assert found, f"the file has the place {mark.strip()}"
        text = before + "\n".join(inner) + "\n" + after
    return text


def _rows(links: tuple[Link, ...]) -> str:
    return ", ".join(f"{{{', '.join(map(str, link))}}}" for link in links or (Link(-1, 0, 0, 0, 0),))


def threads(whole_rows: bool, larger: int) -> int:
    """Threads of a block: where a block has whole rows, one for each unit as far as a block can have them."""
    return min(_MOST_THREADS, -(-larger // 32) * 32) if whole_rows else CHUNK
