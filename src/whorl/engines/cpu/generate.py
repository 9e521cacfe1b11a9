"""A cell's step as C++ for a processor: its segments at the marked place of `kernels/step.cpp`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from whorl.cells.cell import Graph
from whorl.engines.segments import Link, Pass, Segments, segments

_KERNELS = Path(__file__).with_name("kernels")
_STEP = ("types.cpp", "step.cpp")
_SHARED = ("types.cpp", "product.cpp", "parts.cpp", "memory.cpp", "threads.cpp", "noise.cpp", "places.cpp")
_LOOP = (
    "sweep.cpp", "weights.cpp", "project.cpp", "outer.cpp", "outer_parts.cpp", "group.cpp", "forward.cpp",
    "backward.cpp", "run.cpp", "plain.cpp", "stream.cpp",
)  # fmt: skip
_PLACE = "//: generated\n"


@dataclass(frozen=True)
class Source(Segments):
    """The C++ of one cell, and what of it the one who calls it must know."""

    text: str


@lru_cache(maxsize=256)
def source(graph: Graph) -> Source:
    """The C++ of a cell, for every dtype and size."""
    made = segments(graph, near=True)
    numbers = [len(names) for names in (graph.gates, graph.recurrent, graph.states, graph.vectors, graph.inputs)]
    numbers += [len(made.products), made.saved, made.saved_means]
    lines = [made.forward.text, _links("FORWARD", made.forward), made.backward.text, _links("BACKWARD", made.backward)]
    lines += [_flags("LEAF", made.leaves)]
    lines += [_flags("MULTIPLIED", [index in made.products for index in range(len(made.leaves))])]
    ways = _direction("forward", made.forward), _direction("backward", made.backward)
    fields = [*map(str, numbers), str(made.dr_is_dx).lower(), "LEAF", "MULTIPLIED", *ways]
    lines += [f"static const Cell CELL = {{{', '.join(fields)}}};"]
    text = _text(_STEP)
    before, mark, after = text.partition(_PLACE)
    assert mark, "the sources have a marked place"
    return Source(**vars(made), text=before + "\n".join(lines) + "\n" + after)


def _links(prefix: str, way: Pass) -> str:
    links = [f"{{{', '.join(map(str, link))}}}" for link in way.links or (Link(-1, 0, 0, 0, 0),)]
    return f"static const Link {prefix}_LINKS[] = {{{', '.join(links)}}};"


def _direction(name: str, way: Pass) -> str:
    counts = way.slots, way.means, way.segments, len(way.links)
    return f"{{{', '.join(map(str, counts))}, {name.upper()}_LINKS, {name}_segment}}"


def shared() -> str:
    """The C++ of what a call into that is: what stands before another library that makes one."""
    return _text((*_SHARED, "sweep.cpp"))


@lru_cache(maxsize=1)
def sweep() -> str:
    """The C++ that every cell shares."""
    return _text((*_SHARED, *_LOOP))


def _text(parts: Sequence[str]) -> str:
    return "\n".join((_KERNELS / part).read_text(encoding="utf-8") for part in parts)


def _flags(name: str, values: Iterable[bool]) -> str:
    return f"static const bool {name}[] = {{{', '.join([str(value).lower() for value in values] or ['false'])}}};"
