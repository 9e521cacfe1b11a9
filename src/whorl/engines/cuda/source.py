"""The source of a kernel: its `.cu` file with a tile's numbers and the cell's generated step at the marked place."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from whorl.cells.cell import Graph
from whorl.cells.expr import Expr, topological
from whorl.cells.intervals import bounded
from whorl.cells.lower import CUDA, Stage, identifier, stages
from whorl.engines.cuda.kernel_text import kernel, table, text_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import Pass, Steps, by_rounds, most, part, pass_of, staged, steps
from whorl.engines.cuda.tiling import Tile

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

    @property
    def draws(self) -> bool:
        """Whether anything is drawn anew at each step."""
        return self.noise == DRAWN or AT_RANDOM in self.zoneout


PLAIN = Features()


@lru_cache(maxsize=4096)
def saves_entered(graph: Graph, features: Features) -> bool:
    """Whether what forward saves of the first state before each step is what entered the product, behind its mask.

    Where backward reads that alone: the step does not read the first state, and no mask has a gradient.  Else backward
    reads the state and writes what entered: so 100 steps of LSTM with every option, 256 units at batch 32, took 129 us
    with TF32, and take 116, in bfloat16 102 and 100 (one H100, 2026-11-26, the kernel alone).
    """
    if features.noise != DRAWN or BY_MASK in features.zoneout or staged(graph):
        return False
    first = f"s.{graph.states[0]}"
    return all(node.op != "var" or node.args[0] != first for node in topological(graph.outputs))


def writes_entered(graph: Graph, features: Features) -> bool:
    """Whether backward writes what entered the product: one mask is for all gates, and forward does not save it."""
    return 0 < features.noise < BY_GATE and not saves_entered(graph, features)


def registers(graph: Graph, features: Features) -> tuple[int, int]:
    """What options take of a thread's registers for each of its items, forward and backward."""
    if not has_options(graph, features):
        return 0, 0
    states, given = len(graph.states), sum(kind == BY_MASK for kind in features.zoneout)
    draws, marked = features.draws, features.lengths or features.mask
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
    elif tile.whole:
        own |= {"SPLITS": tile.splits, "WHOLE": tile.whole}
    elif tile.lines:
        own |= {"SPLITS": tile.splits, "LINES": tile.lines, "WARPS": tile.warps}
    elif staged(graph):
        own |= {"SPLITS": tile.splits, "GROUPS": tile.slice // 16}
    else:
        own |= {"SPLITS": tile.splits, "SUBS": tile.subs, "POINTWISE": tile.pointwise, "ARRIVALS": tile.arrivals}
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
    elif tile.whole:
        own |= {"WHOLE": tile.whole}
    elif tile.lines:
        own |= {"LINES": tile.lines}
    elif staged(graph):
        own |= {"SPLITS": tile.splits, "GROUPS": tile.slice // 16}
    else:
        own |= {"SUBS": tile.subs, "SPLITS": tile.splits}
    if staged(graph):
        made = pass_of(steps(graph), "backward", tile.early)
        # in a cluster what is computed ahead brought nothing: registers that keep it are those of weights
        ahead = (isinstance(tile, Spread) or tile.of_sequences) and not tile.early
        step = made.parted if ahead else made.text
        return _source("backward", graph, units, dtype, tile, own, step, features, carried)
    lines = [_step(graph)] * features.zoneout_gradient + [_step_backward(graph)]
    return _source("backward", graph, units, dtype, tile, own, "\n".join(lines), features, carried)


def has_options(graph: Graph, features: Features) -> bool:
    """Whether a kernel has the argument of kernels/options.cu."""
    return features != PLAIN or bool(graph.inputs)


def _spread(tile: Spread) -> dict[str, int]:
    numbers = {
        "WARPS": tile.warps, "SUBS": tile.subs, "PARTS": tile.parts, "ASIDE": int(tile.aside), "LULL": tile.lull,
    }  # fmt: skip
    numbers |= {"WHOLE": tile.warps} if tile.whole else {}
    return numbers | ({} if tile.chunk else {"BLOCKS": tile.blocks, "BESIDE": int(tile.beside)})


def _source(
    kind: str, graph: Graph, units: int, dtype: torch.dtype, tile: Tile | Spread, own: Mapping[str, int], step: str,
    features: Features, carried: bool,
) -> str:  # fmt: skip
    saves = kept(graph)
    numbers = {
        "UNITS": units, "SLICE": tile.slice, "TILES": tile.tiles, "SHARED": tile.shared, "GATES": len(graph.gates),
        "RECURRENT": len(graph.recurrent), "MASKED": len(graph.masked), "STATES": len(graph.states),
        "VECTORS": len(graph.vectors), "APART": len(saves.apart), "INPUTS": len(graph.inputs), **own,
    }  # fmt: skip
    inside = _stages(kind, graph, units, tile) if staged(graph) else []
    wide = isinstance(tile, Spread) and tile.wide
    means = ["means.cu"]
    if tile.whole:
        means += ["whole_means.cu"] * (kind == "forward")
    elif isinstance(tile, Spread) or not tile.lines:
        means += ["spread_means.cu" if isinstance(tile, Spread) else "cluster_means.cu"]
    if kind == "backward" and tile.early:
        means += ["known_means.cu"]
    flags = ("lengths", "mask", "reset", "reset_to", "order", "packed", "noise", "sequences", "noise_gradient")
    numbers |= {name.upper(): int(getattr(features, name)) for name in flags}
    numbers["ENTERED"] = int(saves_entered(graph, features))
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
        f"#define SHUFFLED {int(isinstance(tile, Spread) and not tile.whole)}",
        f"#define SIDED {int(isinstance(tile, Spread) and tile.sided)}",
        f"#define INSIDE {_inside(kind, graph, tile)}",
        f"#define BOUNDED {int(bounded(graph))}",
        f"#define BY_STEP {int(tile.by_step)}",
        f"#define OPTIONS {int(has_options(graph, features))}",
        f"#define CARRIED {int(carried)}",
        f"#define WARPGROUPS {int(wide)}",
        f"#define ZONEOUT_GRADIENT {int(features.zoneout_gradient)}",
        "#define MOST(count) ((count) > 0 ? (count) : 1)",
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        table("sum_of", saves.sums, "the recurrent gate that is saved with a gate's x, as their sum; -1: none"),
        table("apart", saves.apart, "the recurrent gates that are saved on their own"),
        table("zoneout", features.zoneout, "how much of each state stays as it was"),
        *inside,
        text_of("ptx.cu"),
        text_of("weights.cu"),
        *([text_of("warpgroup.cu")] if wide else []),
        *([text_of("columns.cu")] if kind == "forward" and isinstance(tile, Tile) else []),
        *map(text_of, ("carried.cu", "options.cu") + ("exchange.cu",) * isinstance(tile, Spread)),
        *([text_of("sides.cu")] if isinstance(tile, Spread) and tile.sided else []),
        *([text_of("levels.cu")] if isinstance(tile, Spread) and tile.by_step else []),
        *([text_of("scales.cu")] if kind == "forward" and _way(graph, tile) == "" and tile.halves else []),
        *(map(text_of, means) if inside else []),
        *([text_of(f"arguments_{kind}.cu")] if _way(graph, tile) in _WITHOUT_OPTIONS else []),
        *([text_of("one_unit.cu")] if isinstance(tile, Tile) and tile.lines else []),
        *([text_of("spread_whole.cu")] if isinstance(tile, Spread) and tile.whole else []),
        *([text_of("two_units.cu")] if tile.whole else []),
        *([text_of("initial.cu")] if kind == "forward" and isinstance(tile, Tile) and tile.of_sequences else []),
        *([text_of("spread_inside.cu")] if _inside(kind, graph, tile) else []),
        "typedef float real;",
        step,
    ]
    return kernel(f"{_way(graph, tile)}{kind}.cu", words)


_WITHOUT_OPTIONS = "whole_", "sliced_", "spread_whole_"  # what such kernels are given is the same


def _way(graph: Graph, tile: Tile | Spread) -> str:
    """Whose kernel a tile is of: the beginning of its file's name."""
    if isinstance(tile, Spread):
        return "spread_whole_" if tile.whole else "spread_"
    if tile.whole:
        return "whole_"
    if tile.lines:
        return "sliced_"
    return "staged_" if staged(graph) else ""


def _inside(kind: str, graph: Graph, tile: Tile | Spread) -> int:
    """Products inside the step, of a kernel whose blocks exchange what enters them through L2."""
    if not isinstance(tile, Spread) or not staged(graph):
        return 0
    return len(getattr(steps(graph), kind).rounds)


def _stages(kind: str, graph: Graph, units: int, tile: Tile | Spread) -> list[str]:
    """What a kernel is told of a step with several stages."""
    made = steps(graph)
    own = pass_of(made, kind, tile.early)
    reductions, numbers = own.reductions, {"STAGES": own.stages, "LINKS": len(made.links), "LEAVES": made.leaves}
    values = [sum(it.values for it in reductions if it.stage == stage) for stage in range(own.stages)]
    numbers |= {
        "ROUNDS": len(own.rounds), "EXCHANGES": bool(made.leaves) + own.exchanges, "REDUCTIONS": len(reductions),
        "VALUES": most(values), "PACKS": most(map(own.packs, range(own.stages))), "LEVELS": made.levels,
        "MEANS": 2 * len(reductions) + made.levels * (kind == "backward"),
    }  # fmt: skip
    offsets: list[int] = []
    if tile.whole:
        warps = tile.warps if isinstance(tile, Spread) else tile.whole
        numbers |= {"LANES": 32, "AWAY": 1, "PART": 64, "MEAN_WORDS": own.whole_words(warps)}
        offsets = [own.whole_words(warps, stage) for stage in range(own.stages)]
    elif isinstance(tile, Spread):
        numbers |= {"LANES": tile.slice // 2, "AWAY": 1, "PART": tile.slice, "COLLECTED": tile.collected}
    elif tile.lines:
        numbers |= {"LANES": 32, "AWAY": 1, "PART": 32, "MEAN_WORDS": sliced_words(own, units, tile)}
        offsets = [sliced_words(own, units, tile, stage) for stage in range(own.stages)]
    else:
        numbers |= {"LANES": 8, "AWAY": 4, "PART": 16}
        where = own, tile.slice, tile.cluster, 8 * tile.tiles
        numbers["MEAN_WORDS"] = mean_words(*where)
        offsets = [mean_words(*where, stage) for stage in range(own.stages)]
    lines = [f"constexpr int {name} = {int(value)};" for name, value in numbers.items()]
    lines += [
        table("reduction_stage", (it.stage for it in reductions), "after which a mean is made"),
        table("reduction_first", (it.first for it in reductions), "of the values that it is made of"),
        table("reduction_count", (it.values for it in reductions), "how many they are"),
        table("reduction_place", (it.place for it in reductions), "among the means of a step"),
        table("reduction_moments", (it.moments for it in reductions), "whether a variance comes after it"),
        table("reduction_known", (it.known for it in reductions), "whether what it is made of needs no gradient"),
        table("numbers", map(own.numbers, range(own.stages)), "that are sent of a sequence after a stage"),
        table("packs", map(own.packs, range(own.stages)), "16 bytes that a warp sends of a sequence after a stage"),
        table("mean_offset", offsets, "words before a stage's slots"),
        table("round_stage", (-1, *(it.stage for it in own.rounds)), "after which its operand is known"),
    ]
    if kind == "forward":
        rounds = rounds_of(made)
        wide = len(made.links)
        lines += [
            f"constexpr int WIDEST = {most(map(len, rounds))};",
            table("width_of", map(len, rounds), "results of a round"),
            table("link_at", (link for row in rounds for link in (*row, *[-1] * (wide - len(row)))), "which they are"),
            table("link_gate", (link.gate for link in made.links), "the recurrent gate of a result"),
            table("link_round", (link.round for link in made.links), "of which product it is"),
        ]
        if _inside(kind, graph, tile):
            lines += _kinds(made, len(graph.recurrent), tile)
    else:
        lines.append(table("pull_gate", (it.links[0] for it in own.rounds), "the gate of a transposed product"))
        leaves = [link.gate for link in made.links if link.round == 0]
        lines.append(table("leaf_gate", leaves, "the recurrent gate of a product with the first state"))
        gates = range(len(graph.recurrent))
        of = (leaves.index(gate) if gate in leaves else -1 for gate in gates)
        lines.append(table("leaf_of", of, "which of these a recurrent gate has; -1: none"))
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
        table("strips_of", strips, "of 16 rows that a warp has of a kind's gates"),
        table("first_strip", (sum(strips[:kind]) for kind in range(len(strips))), "of a kind, among a warp's"),
        table("kind_of_strip", (kind for kind, count in enumerate(strips) for _ in range(count)), "of a warp's strip"),
        table("gates_of", map(len, kinds.values()), "recurrent gates of a kind"),
        table("gate_of_kind", padded, "which they are"),
        table("kind_of", (where.get(gate, absent)[0] for gate in range(recurrent)), "of a recurrent gate"),
        table("place_in_kind", (where.get(gate, absent)[1] for gate in range(recurrent)), "of a recurrent gate"),
        table("kind_enters", entered, "whether a round multiplies a kind's gates"),
    ]


def rounds_of(made: Steps) -> list[tuple[int, ...]]:
    """The links of each product forward: with the first state, then of each round inside the step."""
    return [tuple(range(made.leaves)), *(it.links for it in made.forward.rounds)]


def mean_words(own: Pass, part: int, cluster: int, rows: int, before: int | None = None) -> int:
    """Words of shared memory of what means are made of: of all stages, or of those before one."""
    sources = cluster * part // 16
    packs = [own.packs(stage) for stage in range(own.stages if before is None else before)]
    return sum(4 * (rows + 4) * sources * count for count in packs)


def sliced_words(own: Pass, units: int, tile: Tile, before: int | None = None) -> int:
    """The same in kernels/sliced_forward.cu and sliced_backward.cu."""
    packs = sum(own.packs(stage) for stage in range(own.stages if before is None else before))
    return 4 * -(-units // 32) * (tile.lines | 1) * packs


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
