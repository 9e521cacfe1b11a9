"""The source of a kernel: its `.cu` file with a tile's numbers and the cell's generated step at the marked place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, topological
from whorl.cells.lower import CUDA, Stage, identifier, stages
from whorl.cells.wrappers import EPS
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import Pass, Steps, by_rounds, most, part, staged, steps
from whorl.engines.cuda.tiling import Tile

_KERNELS = Path(__file__).parent / "kernels"
_MARK = "// @generated\n"
NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "tf32"}
"""Of dtypes, in a kernel's name; an exact tile's is float32."""


HELD, GIVEN, DRAWN, BY_GATE, GIVEN_BY_GATE = 1, 2, 3, 4, 5
"""Kinds of noise in recurrent products, as kernels/options.cu numbers them."""
BY_SHARE, AT_RANDOM, BY_MASK = 1, 2, 3
"""Kinds of zoneout there."""


class Features(NamedTuple):
    """What of kernels/options.cu a kernel has."""

    lengths: bool = False
    mask: bool = False
    reset: bool = False
    reset_to: bool = False
    order: bool = False
    """Sequences are in an order of their own."""
    packed: bool = False
    noise: int = 0
    zoneout: tuple[int, ...] = ()
    """For each state; empty where none has any."""
    sequences: bool = False
    noise_gradient: bool = False
    zoneout_gradient: bool = False

    @property
    def before(self) -> bool:
        """What was before each step is saved: it is not the output of the step before."""
        return bool(self.lengths or self.mask or self.reset or self.noise)

    @property
    def of_any_size(self) -> bool:
        """What enters the recurrent product may be of another size at each step: masks that are given say so."""
        return self.noise in (GIVEN, GIVEN_BY_GATE) or self.zoneout[:1] == (BY_MASK,)


PLAIN = Features()


Writer = Callable[[], str]


def registers(graph: Graph, features: Features) -> tuple[int, int]:
    """What options take of a thread's registers for each of its items, forward and backward."""
    if not has_options(graph, features):
        return 0, 0
    states, given = len(graph.states), sum(kind == BY_MASK for kind in features.zoneout)
    draws, marked = features.noise == DRAWN or AT_RANDOM in features.zoneout, features.lengths or features.mask
    one = 2 + draws + 2 * features.order + features.reset + 2 * features.mask + marked + features.lengths
    inside = bool(graph.products)  # what enters those is multiplied with the mask of the step, not of the next
    ahead = one + 2 * (given + len(graph.inputs) + (features.noise in (HELD, GIVEN)))
    ahead += inside * (2 * (features.noise == GIVEN) + (features.noise == DRAWN))
    back = 2 * one + 4 * (given + 2 * len(graph.inputs) + features.mask + 3 * (0 < features.noise < BY_GATE))
    back += 4 * states * (features.reset_to + features.zoneout_gradient) + 2 * states * features.sequences
    return ahead, back + (6 + 4 * len(graph.products)) * features.noise_gradient


class Saving(NamedTuple):
    """How forward keeps each gate for backward."""

    sums: tuple[int, ...]
    """For each gate the place among the recurrent gates, where x and r occur only as x + r; -1 elsewhere."""
    apart: tuple[int, ...]
    """The recurrent gates whose r is kept beside x."""


@lru_cache(maxsize=256)
def saving(graph: Graph) -> Saving:
    """What a kernel of this cell saves: x + r in one where nothing else is made of the two."""
    parents: dict[str, list[Expr]] = {}
    for node in topological(graph.outputs):
        for arg in node.args:
            if isinstance(arg, Expr) and arg.op == "var":
                parents.setdefault(arg.args[0], []).append(node)
    outputs = {node.args[0] for node in graph.outputs if node.op == "var"}
    sums = []
    for gate in graph.gates:
        over = [parents.get(f"{kind}.{gate}", []) for kind in "xr"]
        whole = all(len(nodes) == 1 and nodes[0].op == "add" for nodes in over)
        whole = whole and over[0][0].digest == over[1][0].digest and not {f"x.{gate}", f"r.{gate}"} & outputs
        sums.append(graph.recurrent.index(gate) if whole else -1)
    return Saving(tuple(sums), tuple(index for index in range(len(graph.recurrent)) if index not in sums))


@lru_cache(maxsize=256)
def kept(graph: Graph) -> Saving:
    """What the kernel that a cell takes saves; of a cell with several stages, links stand for recurrent gates."""
    return Saving(steps(graph).sums, steps(graph).apart) if staged(graph) else saving(graph)


_KINKS = {"abs", "clip", "eq", "le", "lt", "maximum", "minimum", "ne", "relu", "where"}


@lru_cache(maxsize=256)
def wide_gates(graph: Graph) -> bool:
    """Whether a kernel of this cell is given x, and keeps x and r, in float32.

    At a kink the gradient depends on the sign of a sum.  With sums in two bytes the gradients of rnn_relu broke the
    error rule at 6 of 16 sizes on an H200 (up to 2.2e-2 where 2.0e-2 was allowed).
    """
    return any(node.op in _KINKS for node in topological(graph.outputs))


@lru_cache(maxsize=256)
def bounded(graph: Graph) -> bool:
    """Whether the first state is in [-1, 1] after a step, whatever came before: by intervals.

    An LSTM's is; a GRU's is between what it was and [-1, 1], and initial states may be anything.
    """
    low, high = _intervals(graph)[graph.outputs[0].digest]
    return -1 <= low and high <= 1


@lru_cache(maxsize=256)
def contained_inside(graph: Graph) -> bool:
    """Whether what enters each product inside the step is never larger than 1, or than the first state before the step.

    It is in [-1, 1], or that state times such numbers.
    """
    within = _intervals(graph)

    def small(node: Expr) -> bool:
        low, high = within[node.digest]
        return -1 <= low and high <= 1

    def is_in(node: Expr) -> bool:
        if small(node) or (node.op == "var" and node.args[0] == f"s.{graph.states[0]}"):
            return True
        if node.op == "neg":
            return is_in(node.args[0])
        if node.op != "mul":
            return False
        first, second = node.args
        return (small(first) and is_in(second)) or (small(second) and is_in(first))

    return all(is_in(node.args[1]) for node in graph.products)


@lru_cache(maxsize=256)
def contained(graph: Graph) -> bool:
    """Whether the first state is never larger after a step than the larger of 1 and what it was.

    It is in [-1, 1], or on the way from a number there to what it was, as a GRU's: n + z (h - n); clipped or not.
    """
    within, last = _intervals(graph), graph.outputs[0]
    if last.op == "clip" and within[last.args[1].digest][0] <= 0 <= within[last.args[2].digest][0]:
        last = last.args[0]  # which is no smaller

    def is_in(node: Expr, least: float) -> bool:
        low, high = within[node.digest]
        return least <= low and high <= 1

    def ways(node: Expr, op: str) -> list[tuple[Expr, Expr]]:
        if node.op != op or not all(isinstance(arg, Expr) for arg in node.args):
            return []
        first, second = node.args
        return [(first, second), (second, first)]

    def goes(far: Expr, n: Expr) -> bool:
        whole = far.op == "sub" and far.args[1].digest == n.digest and is_in(n, -1)
        return whole and far.args[0].op == "var" and far.args[0].args[0] == f"s.{graph.states[0]}"

    return bounded(graph) or any(
        goes(far, n) and is_in(z, 0) for n, product in ways(last, "add") for z, far in ways(product, "mul")
    )


def _intervals(graph: Graph) -> dict[str, tuple[float, float]]:
    """The least and the most that each value of a step can be, whatever comes in, by digest."""
    within: dict[str, tuple[float, float]] = {}
    for node in topological(graph.outputs):
        spans = [within[arg.digest] for arg in node.args if isinstance(arg, Expr)]
        if node.op == "const":
            within[node.digest] = node.args[0], node.args[0]
        else:
            within[node.digest] = _OF_SPANS[node.op](*spans) if node.op in _OF_SPANS else _ANY
    return within


Span = tuple[float, float]
_ANY: Span = (float("-inf"), float("inf"))


def _of_product(a: Span, b: Span) -> Span:
    ends = [x * y if x and y else 0.0 for x in a for y in b]
    return min(ends), max(ends)


def _of_least(a: Span, b: Span) -> Span:
    return min(a[0], b[0]), min(a[1], b[1])


def _of_most(a: Span, b: Span) -> Span:
    return max(a[0], b[0]), max(a[1], b[1])


_OF_SPANS: dict[str, Callable[..., Span]] = {
    "sigmoid": lambda a: (0.0, 1.0), "tanh": lambda a: (-1.0, 1.0), "sin": lambda a: (-1.0, 1.0),
    "cos": lambda a: (-1.0, 1.0), "erf": lambda a: (-1.0, 1.0),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]), "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "neg": lambda a: (-a[1], -a[0]), "mul": _of_product, "minimum": _of_least, "maximum": _of_most,
    "clip": lambda a, low, high: _of_least(_of_most(a, low), high),
    "where": lambda condition, a, b: (min(a[0], b[0]), max(a[1], b[1])),
}  # fmt: skip
"""Of operations, from the spans of what they take."""


def kernel_name(kind: str, graph: Graph, units: int, dtype: torch.dtype, tile: Tile | Spread) -> str:
    """What a profiler shows: cell, direction of the pass, units, dtype and tile."""
    name = "float32" if tile.exact else NAMES[dtype]
    blocks = f"spread{tile.blocks}" if isinstance(tile, Spread) else f"{tile.cluster}"
    return f"{identifier(graph.name)}_{kind}_{units}_{name}_{blocks}x{tile.rows}"


def forward(
    graph: Graph, units: int, dtype: torch.dtype, tile: Tile | Spread, saved: bool, features: Features = PLAIN,
    carried: bool = False,
) -> str:  # fmt: skip
    """The source of the forward kernel.

    Args:
        carried: it may begin with what an earlier launch left, and leave something for a later one.
    """
    own = {"DEPTHS": tile.depths, "RESIDENT": tile.resident, "SAVED": int(saved)}
    if isinstance(tile, Spread):
        own |= _spread(tile) | {"GROUPS": tile.groups}
    elif staged(graph):
        own |= {"SPLITS": tile.splits, "GROUPS": tile.slice // 16}
    else:
        own |= {"SPLITS": tile.splits, "SUBS": tile.subs, "POINTWISE": tile.pointwise}
    step = steps(graph).forward.text if staged(graph) else _step(graph)
    return _source("forward", graph, units, dtype, tile, own, step, features, carried)


def backward(
    graph: Graph, units: int, dtype: torch.dtype, tile: Tile | Spread, bias: bool, features: Features = PLAIN,
    carried: bool = False,
) -> str:  # fmt: skip
    """The source of the backward kernel; `carried` as forward."""
    own = {"WARPS": tile.warps, "CHUNK": tile.chunk, "RESIDENT": tile.resident, "BIAS": int(bias)}
    if isinstance(tile, Spread):
        own |= _spread(tile) | {"SOURCES": tile.sources, "GATHERED": tile.gathered}
    elif staged(graph):
        own |= {"SPLITS": tile.splits, "GROUPS": tile.slice // 16}
    else:
        own |= {"SUBS": tile.subs, "SPLITS": tile.splits}
    if staged(graph):
        made = steps(graph).backward
        # in a cluster what is computed ahead brought nothing: registers that keep it are those of weights
        step = made.parted if isinstance(tile, Spread) else made.text
        return _source("backward", graph, units, dtype, tile, own, step, features, carried)
    lines = [_step(graph)] * features.zoneout_gradient + [_step_backward(graph)]
    return _source("backward", graph, units, dtype, tile, own, "\n".join(lines), features, carried)


def draw() -> str:
    """The source of the kernel that draws whole masks."""
    return _kernel("draw.cu", ["#define KERNEL draw_masks", _text("noise.cu")])


def draw_bits(states: int, zones: Sequence[int], noise: bool) -> str:
    """The source of the kernel that draws what is new at each step.

    Args:
        states: of the cell.
        zones: the states whose zoneout is drawn.
        noise: whether what enters the recurrent product is.
    """
    words = [
        f"#define KERNEL {draw_bits_name(states, zones, noise)}",
        f"constexpr int STATES = {states}, ZONES = {len(zones)}, NOISE = {int(noise)};",
        _table("zoned", (state in zones for state in range(4)), "whether a state's zoneout is drawn"),
        _text("noise.cu"),
    ]
    return _kernel("draw_bits.cu", words)


def draw_bits_name(states: int, zones: Sequence[int], noise: bool) -> str:
    """Its name in a profiler."""
    zoneout = f"zoneout{''.join(map(str, zones))}_of_{states}"
    return "_".join(["draw_bits", *[zoneout] * bool(zones), *["step"] * noise])


def order() -> str:
    """The source of the kernel that sorts sequences by their lengths."""
    return _kernel("order.cu", ["#define KERNEL order_by_length"])


def masked(name: str, dtype: torch.dtype, vector: int, by_masks: bool) -> str:
    """The source of the kernel that puts whole tensors behind masks, so many elements in a thread.

    Args:
        by_masks: whether there are such; without, what does not count becomes zero.
    """
    numbers = f"constexpr int UNITS = 1, VECTOR = {vector}, MASKED = {int(by_masks)};"
    words = [*_of_elements(name, dtype), numbers, _text("ptx.cu")]
    return _kernel("masked.cu", words)


def _of_elements(
    name: str, dtype: torch.dtype, forward: bool = False, wide: bool = False, halves: bool = False, exact: bool = False
) -> list[str]:
    """What kernels/ptx.cu has to know in a kernel that multiplies no matrices."""
    return [
        f"#define KERNEL {name}",
        f"#define ELEMENT_BYTES {dtype.itemsize}",
        f"#define BFLOAT16 {int(dtype == torch.bfloat16)}",
        f"#define FORWARD {int(forward)}",
        f"#define WIDE_GATES {int(wide)}",
        f"#define EXACT {int(exact)}",
        f"#define HALVES {int(halves)}",
        "#define CLUSTER 1",
    ]


class Norm(NamedTuple):
    """The layer norm of a layer's input projection, in a kernel of its own."""

    gates: int
    units: int
    dtype: torch.dtype
    wide: bool
    """What comes to the time loop is float32."""
    biased: bool
    counted: int | None = None
    """The first units of each gate, which mean and variance are over, the others being padding; None: all."""

    @property
    def word(self) -> int:
        """Neighbouring columns that a thread reads at once."""
        return next(word for word in (4, 2, 1) if self.gates * self.units % word == 0)

    def block(self, kind: str) -> "Block":
        """How the threads of the "forward" or "backward" kernel are laid out."""
        each = range(8 if kind == "backward" or self._whole else 12, 33, 4)
        made = [self._block(kind, columns) for columns in each if self._threads(columns) <= 1024]
        found = [*(one for one in made if one.ahead), *(one for one in made if one.spare >= 0)]
        return found[0] if found else max(made, key=lambda one: one.spare)

    def name(self, kind: str) -> str:
        """In a profiler."""
        of = "" if self.counted is None else f"_of_{self.counted}"
        return f"norm_{kind}_{self.gates}x{self.units}{of}_{str(self.dtype).removeprefix('torch.')}"

    @property
    def _whole(self) -> bool:
        """Whether an element takes a register, not half of one."""
        return self.dtype.itemsize == 4 or self.word == 1

    def _threads(self, columns: int) -> int:
        """Of a row, where one has so many columns."""
        return 32 * -(-self.gates * self.units // (columns * 32))

    def _block(self, kind: str, columns: int) -> "Block":
        """Where a thread has so many columns of a row."""
        threads, element = self._threads(columns), 1.0 if self._whole else 0.5
        # registers: beside columns; of a column what is computed, its part of the vectors, its part of the next row
        beside, own, vectors, row = 22, 1, 3 * element, 1.0
        if kind == "backward":
            beside, own, vectors, row = 28, 5, 2 * element, 1 + element
        groups, resident = 1, max(1, min(16, 1024 // threads))
        if kind == "backward":
            needed, resident = beside + columns * (own + vectors + row), 1
            groups = max([1, *(count for count in range(2, 16) if _registers(count * threads) >= needed)])
        spare = int(_registers(threads * groups * resident) - beside - columns * (own + vectors))
        ahead = columns <= 16 and columns * row <= spare
        shared = 4 * groups * (threads // 4 + (groups > 1) * (2 + self.biased) * self.gates * self.units)
        return Block(threads, groups, resident, spare, ahead, shared)


def _registers(threads: int) -> int:
    """Of a thread where so many share a multiprocessor, each quarter of which has as many warps as the others."""
    return min(255, 65536 // (128 * -(-threads // 128)) // 8 * 8)


class Block(NamedTuple):
    """Of a kernel of kernels/norms.cu."""

    threads: int
    """Of a row."""
    groups: int
    """Rows that a block takes at once: backward as many as a multiprocessor can, for each block leaves sums; at most as
    many as there are barriers beside that of all threads."""
    resident: int
    """Blocks that a multiprocessor can hold."""
    spare: int
    """Registers of a thread beside those of one row; fewer than none are spilled."""
    ahead: bool
    """The next row is in such registers."""
    shared: int
    """Bytes of shared memory: two numbers of each warp, four times, and the sums of several rows."""


def norming(kind: str, norm: Norm) -> str:
    """The source of a kernel that normalises the input projection ("forward"), or of its gradient ("backward")."""
    block = norm.block(kind)
    numbers = {
        "UNITS": norm.units, "GATES": norm.gates, "COUNTED": norm.units if norm.counted is None else norm.counted,
        "WORD": norm.word, "THREADS": block.threads, "GROUPS": block.groups, "RESIDENT": block.resident,
        "BIASED": int(norm.biased), "AHEAD": int(block.ahead),
    }  # fmt: skip
    words = [
        *_of_elements(norm.name(kind), norm.dtype, kind == "forward", norm.wide),
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        f"constexpr float EPS = {EPS}f;",
        _text("ptx.cu"),
    ]
    return _kernel("norms.cu", words)


ADDED, ADDERS = 32, 8
"""Sums that a block of the kernel below makes, and threads that make one of them together."""


def adding(dtype: torch.dtype) -> str:
    """The source of the kernel that adds up the gradients of biases and vectors."""
    words = ["#define KERNEL " + adding_name(dtype), f"#define ELEMENT_BYTES {dtype.itemsize}"]
    words.append(f"#define BFLOAT16 {int(dtype == torch.bfloat16)}")
    words.append(f"constexpr int COLUMNS = {ADDED}, PARTS = {ADDERS};")
    return _kernel("sums.cu", words)


def adding_name(dtype: torch.dtype) -> str:
    """Its name in a profiler."""
    return f"add_up_{str(dtype).removeprefix('torch.')}"


_WORDS = {2: "short", 4: "int", 8: "long long"}


def row_copier(word: int) -> str:
    """The source of the kernel that copies rows in words of so many bytes."""
    words = [f"#define KERNEL copy_rows_{word}", f"typedef unsigned {_WORDS[word]} Word;"]
    return _kernel("rows.cu", words)


def splitter() -> str:
    """The source of the kernel that makes of float32 what three products of TF32 take."""
    return _kernel("split.cu", ["#define KERNEL split_float32"])


def filler() -> str:
    """The source of the kernel that fills the words through which blocks exchange."""
    return _kernel("fill.cu", ["#define KERNEL fill_with_ones"])


class Halving(NamedTuple):
    """How a kernel of its own makes float16 of a layer's recurrent weights in float32."""

    recurrent: int
    """Gates."""
    units: int
    exact: bool
    """In two planes."""
    apart: bool
    """The second has a power of two of its own, as where blocks exchange through L2."""
    range: int
    """Backward, of how many units the gates' rows have a scale together, in each column; 0: each row has one."""

    @property
    def name(self) -> str:
        """In a profiler."""
        planes = "_in_two" * self.exact + "_spread" * self.apart
        return f"halve_{self.recurrent}x{self.units}{planes}{f'_by_{self.range}' if self.range else ''}"

    @property
    def threads(self) -> int:
        """Of a block."""
        return 256 if self.range else 128

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the largest of 16 columns that each warp found."""
        return 64 * self.threads // 32 if self.range else 0

    @property
    def blocks(self) -> int:
        """For each direction."""
        if self.range:
            return -(-self.units // 16) * -(-self.units // self.range)
        return -(-self.recurrent * self.units // (self.threads // 32))

    @property
    def size(self) -> int:
        """Bytes of what is made for each direction, up to whole 16."""
        rows, pitch = self.recurrent * self.units, -(-self.units // 8) * 16
        scales = -(-self.units // self.range) * self.units if self.range else rows
        return rows * pitch * (1 + self.exact) + -(-scales // 4) * 16


def halving(kind: str, recurrent: int, units: int, tile: Tile | Spread) -> Halving | None:
    """For a kernel of so many recurrent gates and units with a tile; None where it takes the weights themselves."""
    if not tile.halves or not recurrent:
        return None
    together = tile.gathered * tile.slice if isinstance(tile, Spread) else tile.slice
    apart = tile.exact and isinstance(tile, Spread)
    return Halving(recurrent, units, tile.exact, apart, together if kind == "backward" else 0)


def halver(made: Halving) -> str:
    """The source of that kernel."""
    words = [
        *_of_elements(made.name, torch.float32, not made.range, halves=True, exact=made.exact),
        f"#define SPREAD {int(made.apart)}",
        f"constexpr int UNITS = {made.units}, RECURRENT = {made.recurrent}, RANGE = {made.range or made.units};",
        f"constexpr int THREADS = {made.threads};",
        _text("ptx.cu"),
    ]
    return _kernel("halve.cu", words)


def has_options(graph: Graph, features: Features) -> bool:
    """Whether a kernel has the argument of kernels/options.cu."""
    return features != PLAIN or bool(graph.inputs)


def _spread(tile: Spread) -> dict[str, int]:
    numbers = {"WARPS": tile.warps, "SUBS": tile.subs, "PARTS": tile.parts, "ASIDE": int(tile.aside)}
    return numbers | ({} if tile.chunk else {"BLOCKS": tile.blocks, "BESIDE": int(tile.beside)})


def _source(
    kind: str, graph: Graph, units: int, dtype: torch.dtype, tile: Tile | Spread, own: Mapping[str, int], step: str,
    features: Features, carried: bool,
) -> str:  # fmt: skip
    saves = kept(graph)
    numbers = {
        "UNITS": units, "SLICE": tile.slice, "TILES": tile.tiles, "SHARED": tile.shared, "GATES": len(graph.gates),
        "RECURRENT": len(graph.recurrent), "STATES": len(graph.states), "VECTORS": len(graph.vectors),
        "APART": len(saves.apart), "INPUTS": len(graph.inputs), **own,
    }  # fmt: skip
    inside = _stages(kind, graph, tile) if staged(graph) else []
    wide = isinstance(tile, Spread) and tile.wide
    beside = "spread" if isinstance(tile, Spread) else "cluster"
    flags = ("lengths", "mask", "reset", "reset_to", "order", "packed", "noise", "sequences", "noise_gradient")
    numbers |= {name.upper(): int(getattr(features, name)) for name in flags}
    words = [
        f"#define KERNEL {kernel_name(kind, graph, units, dtype, tile)}",
        f"#define CLUSTER {tile.cluster}",
        f"#define ELEMENT_BYTES {dtype.itemsize}",
        f"#define WIDE_GATES {int(wide_gates(graph))}",
        f"#define FORWARD {int(kind == 'forward')}",
        f"#define BFLOAT16 {int(dtype == torch.bfloat16)}",
        f"#define EXACT {int(tile.exact)}",
        f"#define STAGED {int(staged(graph))}",
        f"#define HALVES {int(tile.halves)}",
        f"#define SPREAD {int(isinstance(tile, Spread))}",
        f"#define INSIDE {_inside(kind, graph, tile)}",
        f"#define BOUNDED {int(bounded(graph))}",
        f"#define OPTIONS {int(has_options(graph, features))}",
        f"#define CARRIED {int(carried)}",
        f"#define WARPGROUPS {int(wide)}",
        f"#define ZONEOUT_GRADIENT {int(features.zoneout_gradient)}",
        "#define MOST(count) ((count) > 0 ? (count) : 1)",
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        _table("sum_of", saves.sums, "the recurrent gate that is saved with a gate's x, as their sum; -1: none"),
        _table("apart", saves.apart, "the recurrent gates that are saved on their own"),
        _table("zoneout", features.zoneout, "how much of each state stays as it was"),
        *inside,
        _text("ptx.cu"),
        _text("weights.cu"),
        *([_text("warpgroup.cu")] if wide else []),
        *([_text("columns.cu")] if kind == "forward" and isinstance(tile, Tile) else []),
        *map(_text, ("carried.cu", "options.cu") + ("exchange.cu",) * isinstance(tile, Spread)),
        *(map(_text, ("means.cu", f"{beside}_means.cu")) if inside else []),
        *([_text("spread_inside.cu")] if _inside(kind, graph, tile) else []),
        "typedef float real;",
        step,
    ]
    way = "spread_" if isinstance(tile, Spread) else "staged_" if inside else ""
    return _kernel(f"{way}{kind}.cu", words)


def _inside(kind: str, graph: Graph, tile: Tile | Spread) -> int:
    """Products inside the step, of a kernel whose blocks exchange what enters them through L2."""
    if not isinstance(tile, Spread) or not staged(graph):
        return 0
    return len(getattr(steps(graph), kind).rounds)


def _stages(kind: str, graph: Graph, tile: Tile | Spread) -> list[str]:
    """What a kernel is told of a step with several stages."""
    made = steps(graph)
    own = made.forward if kind == "forward" else made.backward
    reductions, numbers = own.reductions, {"STAGES": own.stages, "LINKS": len(made.links), "LEAVES": made.leaves}
    values = [sum(it.values for it in reductions if it.stage == stage) for stage in range(own.stages)]
    numbers |= {
        "ROUNDS": len(own.rounds), "EXCHANGES": bool(made.leaves) + own.exchanges, "REDUCTIONS": len(reductions),
        "VALUES": most(values), "PACKS": most(map(own.packs, range(own.stages))), "LEVELS": made.levels,
        "MEANS": 2 * len(reductions) + made.levels * (kind == "backward"),
    }  # fmt: skip
    offsets: list[int] = []
    if isinstance(tile, Spread):
        numbers |= {"LANES": tile.slice // 2, "AWAY": 1, "PART": tile.slice, "COLLECTED": tile.collected}
    else:
        numbers |= {"LANES": 8, "AWAY": 4, "PART": 16}
        numbers["MEAN_WORDS"] = mean_words(own, tile.slice, tile.cluster, tile.rows)
        offsets = [mean_words(own, tile.slice, tile.cluster, tile.rows, stage) for stage in range(own.stages)]
    lines = [f"constexpr int {name} = {int(value)};" for name, value in numbers.items()]
    lines += [
        _table("reduction_stage", (it.stage for it in reductions), "after which a mean is made"),
        _table("reduction_first", (it.first for it in reductions), "of the values that it is made of"),
        _table("reduction_count", (it.values for it in reductions), "how many they are"),
        _table("reduction_place", (it.place for it in reductions), "among the means of a step"),
        _table("reduction_moments", (it.moments for it in reductions), "whether a variance comes after it"),
        _table("numbers", map(own.numbers, range(own.stages)), "that are sent of a sequence after a stage"),
        _table("packs", map(own.packs, range(own.stages)), "16 bytes that a warp sends of a sequence after a stage"),
        _table("mean_offset", offsets, "words before a stage's slots"),
        _table("round_stage", (-1, *(it.stage for it in own.rounds)), "after which its operand is known"),
    ]
    if kind == "forward":
        table = rounds_of(made)
        wide = len(made.links)
        lines += [
            f"constexpr int WIDEST = {most(map(len, table))};",
            _table("width_of", map(len, table), "results of a round"),
            _table("link_at", (link for row in table for link in (*row, *[-1] * (wide - len(row)))), "which they are"),
            _table("link_gate", (link.gate for link in made.links), "the recurrent gate of a result"),
            _table("link_round", (link.round for link in made.links), "of which product it is"),
        ]
        if _inside(kind, graph, tile):
            lines += _kinds(made, len(graph.recurrent), tile)
    else:
        lines.append(_table("pull_gate", (it.links[0] for it in own.rounds), "the gate of a transposed product"))
        leaves = [link.gate for link in made.links if link.round == 0]
        lines.append(_table("leaf_gate", leaves, "the recurrent gate of a product with the first state"))
        gates = range(len(graph.recurrent))
        of = (leaves.index(gate) if gate in leaves else -1 for gate in gates)
        lines.append(_table("leaf_of", of, "which of these a recurrent gate has; -1: none"))
    return lines


def _kinds(made: Steps, recurrent: int, tile: Tile | Spread) -> list[str]:
    """What spread_inside.cu is told of the gates of each product."""
    kinds = by_rounds(made)
    where = {gate: (kind, place) for kind, gates in enumerate(kinds.values()) for place, gate in enumerate(gates)}
    absent = -1, -1
    entered = (int(round in rounds) for round in range(1 + len(made.forward.rounds)) for rounds in kinds)
    assert isinstance(tile, Spread), "in a cluster each warp has all gates of its units"
    strips = [-(-len(gates) * tile.slice // (16 * tile.groups)) for gates in kinds.values()]
    padded = (gate for gates in kinds.values() for gate in (*gates, *[-1] * (recurrent - len(gates))))
    return [
        f"constexpr int KINDS = {len(kinds)}, STRIPS_OF_WARP = {sum(strips)};",
        _table("strips_of", strips, "of 16 rows that a warp has of a kind's gates"),
        _table("first_strip", (sum(strips[:kind]) for kind in range(len(strips))), "of a kind, among a warp's"),
        _table("kind_of_strip", (kind for kind, count in enumerate(strips) for _ in range(count)), "of a warp's strip"),
        _table("gates_of", map(len, kinds.values()), "recurrent gates of a kind"),
        _table("gate_of_kind", padded, "which they are"),
        _table("kind_of", (where.get(gate, absent)[0] for gate in range(recurrent)), "of a recurrent gate"),
        _table("place_in_kind", (where.get(gate, absent)[1] for gate in range(recurrent)), "of a recurrent gate"),
        _table("kind_enters", entered, "whether a round multiplies a kind's gates"),
    ]


def rounds_of(made: Steps) -> list[tuple[int, ...]]:
    """The links of each product forward: with the first state, then of each round inside the step."""
    return [tuple(range(made.leaves)), *(it.links for it in made.forward.rounds)]


def mean_words(own: Pass, part: int, cluster: int, rows: int, before: int | None = None) -> int:
    """Words of shared memory of what means are made of: of all stages, or of those before one."""
    sources = cluster * part // 16
    packs = [own.packs(stage) for stage in range(own.stages if before is None else before)]
    return sum(4 * (rows + 4) * sources * count for count in packs)


def texts() -> list[str]:
    """Every file that sources of kernels are made of."""
    return [_text(path.name) for path in sorted(_KERNELS.glob("*.cu"))]


def _kernel(name: str, words: Sequence[str]) -> str:
    """The source of a kernel, with words before it."""
    return _text(name).replace(_MARK, "\n".join([*words, _text("after.cu")]) + "\n", 1)


@cache
def _text(name: str) -> str:
    return (_KERNELS / name).read_text(encoding="utf-8")


def _table(name: str, values: Iterable[int], meaning: str) -> str:
    text = "".join(f"index == {index} ? {int(value)} : " for index, value in enumerate(values))
    return f"__device__ constexpr int {name}(int index) {{ return {text}-1; }}  // {meaning}"


def _step(graph: Graph) -> str:
    reads = _leaves(graph)
    writes = {f"after.{state}": f"after[{index}]" for index, state in enumerate(graph.states)}
    parameters = "const float* x, const float* r, const float* s, const float* v, const float* e, float* after"
    return _function("step", parameters, reads, writes, _only(stages(graph.named(), CUDA)))


def _step_backward(graph: Graph) -> str:
    """Two functions: what of a step takes long and needs no gradient, which is computed before one comes; the rest."""
    kinds = _leaves(graph)
    reads = kinds | {"d": graph.states}
    writes = {f"d{kind}.{name}": f"d{kind}[{i}]" for kind, names in kinds.items() for i, name in enumerate(names)}
    own = "const float* x, const float* r, const float* s, const float* v, const float* e"
    parameters = own + ", const float* d, float* dx, float* dr, float* ds, float* dv, float* de"
    gradients = {identifier(f"d.{state}") for state in graph.states}
    before, known, after = part(_only(stages(graph.backward.named(), CUDA)), gradients)
    members = "".join(f" {kind} {name};" for name, kind in known.items())
    values = ", ".join(known)
    ready = "".join(f" ready(known.{name});" for name, kind in known.items() if kind == "real")
    made = _function("known", own, reads, {}, before, f"Known known = {{{values}}};{ready}\n  return known;", "Known")
    taken = [f"const {kind} {name} = known.{name};" for name, kind in known.items()]
    after = replace(after, lines=(*taken, *after.lines))
    return f"struct Known {{{members} }};\n{made}\n" + _function(
        "step_backward", f"const Known& known, {parameters}", reads, writes, after
    )


def _leaves(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {"x": graph.gates, "r": graph.recurrent, "s": graph.states, "v": graph.vectors, "e": graph.inputs}


def _function(
    name: str, parameters: str, reads: Mapping[str, tuple[str, ...]], writes: Mapping[str, str], stage: Stage,
    end: str = "", returns: str = "void",
) -> str:  # fmt: skip
    leaves = [(kind, i, leaf) for kind, names in reads.items() for i, leaf in enumerate(names)]
    places = {identifier(f"{kind}.{leaf}"): f"{kind}[{i}]" for kind, i, leaf in leaves}
    lines = [
        *(f"const real {value.name} = {places[value.name]};" for value in stage.reads),
        *stage.lines,
        *(f"{place} = {identifier(value)};" for value, place in writes.items()),
        *([end] if end else []),
    ]
    body = "\n  ".join(lines)
    return f"__device__ __forceinline__ {returns} {name}({parameters}) {{\n  {body}\n}}"


def _only(made: list[Stage]) -> Stage:
    assert len(made) == 1, "a cell with means or products in its step has no kernel yet, as the obstacles say"
    return made[0]
