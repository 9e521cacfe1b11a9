"""The tiles of kernels for steps with several stages: as tiling.py, with what is exchanged inside a step."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from whorl.cells.cell import Graph
from whorl.engines.cuda import tiling
from whorl.engines.cuda.source import mean_words, rounds_of, sliced_words
from whorl.engines.cuda.staged import Steps, means_alone, most, pass_of, steps
from whorl.engines.cuda.tiling import MOST_REGISTERS, Chip, Size, Tile

_LEFT = 120  # registers of a thread that multiplies in 12 warps of kernels/whole_backward.cu, which says the same
_FORWARD_EXTRA, _BACKWARD_EXTRA = 64, {1: 84, 2: 32}  # registers of addresses and of the cell itself


def forward(
    graph: Graph, size: Size, cluster: int, tiles: int, splits: int, limit: int, resident: int | None = None
) -> Tile | None:
    """The forward kernel's numbers, if they fit; arguments as in `tiling.forward`."""
    made, halves = steps(graph), size.halves and not size.by_step
    words = 2 if halves else 4 // size.element
    own, links, widest = made.forward, len(made.links), most(map(len, rounds_of(made)))
    part = tiling.slice_of(size.units, cluster)
    groups, depths = part // 16, -(-cluster * part // (8 * words * splits))
    warps = groups * splits
    if not 4 <= warps <= 16:
        return None
    each = -(-2 * tiles // splits)
    item = size.gates * size.gate // 2 + 2 * size.states + size.ahead
    item += 2 * (links + own.kept + size.states + len(own.rounds)) + 2 * len(own.reductions)
    used = max(widest * tiles * 4 + 4 * tiles, 0) + each * item + 2 * links + 8 * bool(size.ahead)
    used += 10 * tiles * (size.bits or bool(size.masks)) + tiling.extra(size, _FORWARD_EXTRA, tiles, halves)
    resident = _resident(size, warps, used, 4 * max(1, size.recurrent), depths, resident, halves)
    states, copies = 8 * tiles * splits * depths * 8, _copies(made, "forward")
    partial = groups * 2 * tiles * splits * widest * 64 if splits > 1 else 0
    operands = copies * ((made.leaves > 0) + len(own.rounds)) * states
    masks = size.masks * states + size.bits * splits * depths * tiles * 32
    means, barriers = copies * mean_words(own, part, cluster, 8 * tiles), copies * (1 + own.stages + len(own.rounds))
    scales = halves * (8 * tiles + 16 * warps * size.recurrent)
    rest = operands + partial + masks + means + size.vectors * part + scales
    shared = 4 * (warps * (depths - resident) * size.recurrent * 128 + rest) + 8 * barriers
    if shared > limit:
        return None
    return Tile(cluster, part, tiles, resident, shared, warps, splits, depths, exact=size.exact, halves=halves)


def backward(
    graph: Graph, size: Size, cluster: int, tiles: int, warps: int, splits: int, limit: int,
    resident: int | None = None,
) -> Tile | None:  # fmt: skip
    """The backward kernel's numbers, if they fit; arguments as in `tiling.backward`.

    Args:
        splits: warps that share 16 units of 8 sequences, 1 or 2.
    """
    made, part = steps(graph), tiling.slice_of(size.units, cluster)
    own, halves = made.backward, _halves(graph, size)
    words = 2 if halves else 4 // size.element
    groups = part // 16
    if halves and groups > 12:
        return None
    cells, strips, depths = groups * tiles, cluster * groups, size.recurrent * part // (8 * words)
    share = -(-strips // warps)
    chunk = min(2, share)
    used = _backward_registers(graph, size, cluster, tiles, warps, splits)
    resident = _resident(size, warps, used, 4, share * depths, resident, halves)
    padding = 12 if halves and groups > 4 else 4
    gradients, sums, copies = 8 * tiles * (depths * 8 + padding), cells * cluster * 128, _copies(made, "backward")
    masks = size.masks * strips * tiles * 128 // words + size.bits * strips * tiles * 32
    means, barriers = copies * mean_words(own, part, cluster, 8 * tiles), copies * (1 + own.stages + len(own.rounds))
    arriving = copies * ((made.leaves > 0) + len(own.rounds)) * sums
    rest = arriving + 2 * gradients + masks + means + size.vectors * part
    shared = 4 * (warps * (share * depths - resident) * 128 + rest) + 8 * barriers
    if shared > limit:
        return None
    return Tile(cluster, part, tiles, resident, shared, warps, splits, chunk=chunk, exact=size.exact, halves=halves)


def whole(
    graph: Graph, size: Size, cluster: int, tiles: int, splits: int, limit: int, resident: int | None = None
) -> Tile | None:
    """The numbers of kernels/whole_forward.cu, if the step can go so and they fit; arguments as in `forward`.

    Without options and products inside the step; float32 with TF32 products of states in [-1, 1] alone.

    Args:
        resident: operands of a warp in registers.
    """
    own, halves = steps(graph).forward, size.halves
    if cluster == 1 or not means_alone(size, "forward"):
        return None
    part = -(-size.units // (8 * cluster)) * 8
    octets, depths, strips = part // 8, -(-size.units // (16 * splits)), -(-size.recurrent // 2)
    seats, each = -(-8 * tiles // cluster), -(-size.units // 64)
    warps = octets * splits + seats * each
    if warps > 16:
        return None
    chains = 2 if strips < 4 and depths > 1 else 1
    used = 48 + 4 * chains * strips + size.recurrent * halves
    if resident is None:
        resident = min(strips * depths, max(0, tiling.registers(warps) - used) // 4)
    states, results = 8 * tiles * splits * depths * 8, splits * 2 * -(-size.units // 2) * -(-size.recurrent // 4) * 4
    means = 2 * own.whole_words(each)
    streamed = octets * splits * (strips * depths - resident) * 128
    shared = 4 * (streamed + states + seats * (results + means) + 8 * tiles * halves) + 8 * (tiles + seats)
    if shared > limit:
        return None
    return Tile(cluster, part, tiles, resident, shared, warps, splits, depths, halves=halves, whole=each)


def whole_back(
    graph: Graph, size: Size, cluster: int, tiles: int, producers: int, limit: int, resident: int | None = None
) -> Tile | None:
    """The numbers of kernels/whole_backward.cu, if the step can go so and they fit; arguments as in `backward`.

    Args:
        producers: warps that multiply.
        resident: operands of a warp in registers.
    """
    own, part, halves = steps(graph).backward, tiling.slice_of(size.units, cluster), size.halves
    if cluster == 1 or not means_alone(size, "backward") or (halves and part not in (16, 32, 64)):
        return None
    if any(one.moments for one in own.reductions) or most(map(own.packs, range(own.stages))) > 8:
        return None
    couples, depths = -(-size.units // 32), size.recurrent * part // 16
    share, seats, each = 2 * -(-couples // producers), -(-8 * tiles // cluster), -(-size.units // 64)
    warps = producers + seats * each
    # The cell takes some 210 registers of a thread: with 10 warps a train step took 338 us where it took 283 with 6
    # (LSTM with layer norm, 128 units at batch 32, H200), with 9 600 and with 7 445 (320 at 32).  Of 12 warps the 8
    # that multiply leave them to the others.
    if warps > 8 and (producers, warps) != (8, 12):
        return None
    used = 36 + 20 * tiles + share * 2 * halves
    if resident is None:
        room = _LEFT if warps == 12 else tiling.registers(warps)
        resident = min(share * depths, max(0, room - used) // 4)
    gradients, sums = 8 * tiles * (depths * 8 + 4), -(-size.units // part) * couples * 32
    means, streamed = own.whole_words(each), producers * (share * depths - resident) * 128
    shared = 4 * (streamed + gradients + seats * (sums + means) + 16 * tiles * halves) + 8 * (1 + seats)
    if shared > limit:
        return None
    return Tile(cluster, part, tiles, resident, shared, warps, halves=halves, whole=each)


def sliced(
    graph: Graph, size: Size, cluster: int, lines: int, producers: int, limit: int, resident: int | None = None
) -> Tile | None:
    """The numbers of kernels/sliced_backward.cu, if the step can go so and they fit; arguments as in `whole_back`.

    Args:
        lines: the most sequences of a cluster.
    """
    halves = size.halves
    strips, blocks, depths, tiles = -(-size.units // 16), -(-size.units // 32), 2 * size.recurrent, -(-lines // 8)
    if cluster != max(2, 1 << (blocks - 1).bit_length()) or not means_alone(size, "backward"):
        return None
    own = pass_of(steps(graph), "backward", True)
    if any(one.moments for one in own.reductions) or most(map(own.packs, range(own.stages))) > 8:
        return None
    share, warps = -(-strips // producers), producers + lines
    if warps > 16:
        return None
    chunk = min(share, 4)
    used = 36 + 4 * chunk * (2 if chunk < 4 else 1) + 2 * (share + 1) * halves
    if resident is None:
        resident = min(share * depths, max(0, tiling.given_registers(warps) - used) // 4)
    made = Tile(cluster, 32, tiles, resident, 0, warps, chunk=chunk, halves=halves, lines=lines)
    pairs = -(-lines // (2 * tiles))  # of sequences of a sub-tile
    gradients, sums = 8 * (depths * 8 + 4), blocks * pairs * 64
    rest = tiles * (gradients + sums + 8 * halves) + sliced_words(own, size.units, made) + size.vectors * 32
    shared = 4 * (producers * (share * depths - resident) * 128 + rest) + 8 * (tiles + own.stages * lines)
    return replace(made, shared=shared) if shared <= limit else None


def sliced_forward(
    graph: Graph, size: Size, cluster: int, lines: int, tiles: int, splits: int, limit: int, resident: int | None = None
) -> Tile | None:
    """The numbers of kernels/sliced_forward.cu, if the step can go so and they fit; arguments as in `whole`.

    Args:
        lines: the most sequences of a cluster.
    """
    made, halves, blocks = steps(graph), size.halves, -(-size.units // 32)
    own, seats, multiplying, strips = made.forward, -(-lines // tiles), 4 * splits, -(-size.recurrent // 2)
    if cluster != max(2, 1 << (blocks - 1).bit_length()) or seats > 8 or not means_alone(size, "forward"):
        return None
    if most(map(own.numbers, range(own.stages))) > 8:  # which one product of a tensor core adds up
        return None
    depths, warps = 2 * -(-blocks // splits), multiplying + lines
    if warps > 8:  # whole groups of four leave registers to those that multiply, as the kernel says
        warps = -(-warps // 4) * 4
    if warps > 20:
        return None
    used = 48 + 4 * (2 if strips < 4 else 1) * strips + size.recurrent * halves
    if resident is None:
        room = tiling.given_registers(warps)
        if warps > 8:
            left = {12: 104, 16: 88 if splits > 1 else 96, 20: 80}[warps]
            room = min(240, (room * warps - left * (warps - multiplying)) // multiplying // 8 * 8)
        resident = min(strips * depths, max(0, room - used) // 4)
    tile = Tile(cluster, 32, tiles, resident, 0, warps, splits, depths, halves=halves, lines=lines)
    results = tiles * splits * -(-size.recurrent // 4) * seats * 33 * 4
    constants = 32 * (len(made.links) + size.gates + size.vectors)
    streamed = multiplying * (strips * depths - resident) * 128
    rest = splits * depths * tiles * 64 + results + sliced_words(own, size.units, tile) + constants + 8 * tiles * halves
    shared = 4 * (streamed + rest) + 8 * (tiles + own.stages * lines)
    return replace(tile, shared=shared) if shared <= limit else None


def _producers(units: int, lines: int) -> int:
    """Warps that multiply in kernels/sliced_backward.cu: 4 and more, as many as need no more than 16 with the others.

    Each has four strips of 16 units, and no warp more than need as many: with TF32 products 512 units at batch 8 took
    1.53 times the plain layer with 8 warps and 1.59 with 6; in bfloat16 384 at 32 422 us with 6 and 426 with 8, 256 at
    32 260 with 4, 265 with 5, 262 with 8.  In two sub-tiles 256 at 128 took 403 us with 4, 409 with 6, 411 with 7, and
    512 at 64 617 with 6, 672 with 4 (H200).
    """
    strips = -(-units // 16)
    many = max(4, min(16 - lines, -(-strips // 4)))
    return max(4, -(-strips // -(-strips // many)))


def _backward_registers(graph: Graph, size: Size, cluster: int, tiles: int, warps: int, splits: int) -> int:
    """What a thread needs beside weights: more than it has is spilled."""
    made, part = steps(graph), tiling.slice_of(size.units, cluster)
    own, links, groups = made.backward, len(made.links), part // 16
    each, chunk = -(-groups * tiles * splits // warps), min(2, -(-cluster * groups // warps))
    summed, held = size.gates + size.apart + size.vectors, 2 // splits
    item = (size.gates + size.apart) * size.gate // 2 + size.element + 2 * (size.states - 1)
    item += 2 * (2 * size.states + own.kept + len(own.rounds) + links) + made.levels + 3 * len(own.reductions) // 2
    used = each * (held * item + 2 * summed + size.back // splits) + (4 * chunk + 4) * tiles + 8 * bool(size.back)
    used += 6 * chunk * tiles * (size.bits or bool(size.masks))
    ahead = each * held == 1 and groups * tiles * splits <= 4 and size.element == 2 and own.reductions
    used += 32 * bool(ahead)  # what is read ahead
    share = -(-cluster * groups // warps)
    used += (2 * share + (4 * chunk + 2) * tiles) * _halves(graph, size)
    return used + tiling.extra(size, _BACKWARD_EXTRA[splits], tiles, _halves(graph, size))


def _halves(graph: Graph, size: Size) -> bool:
    """Whether backward multiplies float32 as float16 in a cluster.

    Not with products inside the step, whose gradients have a scale of their own: a train step of 100 steps of GRU with
    the reset before the product took 342 us so and 327 as TF32 itself with 256 units at batch 32, 505 and 479 at 128,
    530 and 519 with 512 at 32 (H200); LSTM with layer norm of r and c 464 and 461, 701 and 757 with 512 at 32.
    """
    return size.halves and not steps(graph).backward.rounds


def _copies(made: Steps, kind: str) -> int:
    """Of what is exchanged: two where nothing comes between an exchange and its next."""
    own = made.forward if kind == "forward" else made.backward
    return 1 if (made.leaves > 0) + own.exchanges > 1 else 2


def _resident(
    size: Size, warps: int, used: int, each: int, all_of: int, given: int | None, halves: bool
) -> int:  # fmt: skip
    """Depths of weights in registers, of `each` registers."""
    if given is not None:
        return given
    room = max(0, tiling.registers(warps) - used)
    return min(all_of, min(room, 160 if size.element == 4 and not halves else MOST_REGISTERS) // each)


@lru_cache(maxsize=1024)
def fitting(graph: Graph, size: Size, chip: Chip, kind: str) -> tuple[Tile, ...]:
    """Every tile of a kind ("forward" or "backward") that fits the chip."""

    def candidates() -> Iterator[Tile | None]:
        for cluster in chip.clusters:
            for tiles in range(1, 5):
                if kind == "forward":
                    yield from (whole(graph, size, cluster, tiles, splits, chip.shared) for splits in (1, 2, 4))
                else:
                    yield from (whole_back(graph, size, cluster, tiles, warps, chip.shared) for warps in (2, 4, 8))
            for tiles in range(1, 9):
                if kind == "forward":
                    yield from (forward(graph, size, cluster, tiles, splits, chip.shared) for splits in (1, 2, 4, 8))
                else:
                    # GRU with the reset before, 256 and 512 units at batch 128: two warps an item 222 and 582 us in
                    # bfloat16, one 217 and 534; with TF32 products, whose weights then lie in registers, 339 and 942,
                    # one 353 and 1,091
                    numbers = itertools.product((4, 8, 12, 16), (1, 2))
                    yield from (backward(graph, size, cluster, tiles, *number, chip.shared) for number in numbers)
            if kind == "forward":
                # to as many sequences as gain: 14 took 268 us, 264 as before; 19 411, 341 through L2 (512 units)
                ways = ((lines, -(-lines // 8), splits) for lines in range(1, 13) for splits in (1, 2))
                yield from (sliced_forward(graph, size, cluster, *number, chip.shared) for number in ways)
            else:
                # to as many sequences as were timed
                several = ((lines, _producers(size.units, lines)) for lines in range(1, 11))
                yield from (sliced(graph, size, cluster, *number, chip.shared) for number in several)

    return tuple(tile for tile in candidates() if tile is not None)


def likely(graph: Graph, size: Size, chip: Chip, batch: int, directions: int, kind: str) -> list[Tile]:
    """Every tile of a kind that fits, the one that is estimated to be the fastest first.

    Of those in which a warp has one sequence, that with as many warps as a cluster then has sequences: others would
    have warps that do nothing.
    """
    where = chip, batch, directions
    found = (tile for tile in fitting(graph, size, chip, kind) if tile.lines <= _share(*where, kind, tile))
    return sorted(found, key=lambda tile: step_time(graph, size, *where, kind, tile))


def _share(chip: Chip, batch: int, directions: int, kind: str, tile: Tile) -> int:
    """Sequences of a cluster."""
    return -(-batch // tiling.parts(chip, batch, directions, tile, kind))


def step_time(graph: Graph, size: Size, chip: Chip, batch: int, directions: int, kind: str, tile: Tile) -> float:
    """Microseconds of a step, estimated: that of a plain cell, and of each exchange inside the step.

    Of LSTM with layer norm of r and c, and of GRU with the reset before the product, bfloat16 on an H200, 256 and 512
    units at batch 32 and 128, it chose what was the fastest of two to four tiles, or within a tenth of it.  Since x is
    asked for early, forward, 20 tiles of that LSTM took 0.80 to 1.07 of what it says on an H100, with 256 units 0.90
    and more, and 5 of that GRU with 256 units at batch 32 0.63 to 0.76; it chose the fastest, or within 2 percent.
    Since a mean's numbers travel in 8 bytes, forward, 9 tiles of that LSTM took 0.78 to 0.96 on an H200, and the chosen
    ones were the fastest of two or three, or within 3 percent.
    """
    if tile.of_sequences:
        share = _share(chip, batch, directions, kind, tile)
        turns = tiling.rounds(chip, batch, directions, tile)
        if tile.whole:
            return turns * _whole_time(size, share, kind, tile)
        if kind == "backward":
            return turns * _sliced_time(size, share, tile)
        return turns * _sliced_forward_time(size, share, tile) * (2 if turns > 1 else 1)  # which were not timed
    made = steps(graph)
    own = made.forward if kind == "forward" else made.backward
    outside = tile if kind == "forward" else replace(tile, splits=1)  # what two warps save is estimated below
    plain = tiling.step_time(size, chip, batch, directions, kind, outside)
    inside = own.exchanges * (0.3 + (0.005 if own.reductions else 0.02) * tile.cluster)
    if kind == "forward":  # items of a warp
        inside += 0.35 * -(-2 * tile.tiles // tile.splits)
    elif own.reductions:
        cells = tile.slice // 16 * tile.tiles
        inside += 1.2 / tile.splits**0.5 * -(-cells * tile.splits // tile.warps)
        used = _backward_registers(graph, size, tile.cluster, tile.tiles, tile.warps, tile.splits)
        inside += 0.05 * max(0, used - tiling.registers(tile.warps) - 20)  # spilled
        # 384 units at batch 32, a train step of 100: 681 us, 499 where a block has whole sequences; with TF32 products
        # at 64 873, 794 through L2
        inside += 0.5 * (tile.slice == 48)
        # with TF32 products 256 units at batch 32 took 2.55 us, with 8 warps 2.29; fewer are faster so
        inside += 0.06 * (size.element == 4 and tile.warps == 4 and size.units > 192)
    elif tile.splits == 2 and tile.slice // 16 * tile.tiles <= 2:
        inside -= 0.1  # GRU with 256 and 512 units at batch 32 1.70 and 2.51 us with all products, else 1.77 and 2.57
        # with TF32 products 256 units at batch 32 took 2.24 us so, 2.11 with 8 warps, 2.06 where a block has 16 units
        inside += 0.1 * (size.element == 4 and tile.warps == 4 and tile.slice > 16)
    # LSTM with layer norm, 512 units at batch 32, a train step of 100: with TF32 products 686 us with 4 warps and 707
    # with 8; since means are added up by tensor cores in bfloat16 454 and 467 (H100), but 384 units at batch 48 456 and
    # in clusters of 8 430
    fewer = kind == "forward" and tile.warps == 4 and (tile.halves or len(own.reductions) > 0)
    inside -= 0.2 * (fewer and size.units > (256 if tile.halves else 384))
    time = plain + tiling.rounds(chip, batch, directions, tile) * inside
    return 1.2 * time if kind == "forward" and size.units > 256 else time


def _whole_time(size: Size, share: int, kind: str, tile: Tile) -> float:
    """Microseconds of a step of kernels/whole_forward.cu or whole_backward.cu, as those of others are estimated above.

    Fitted to tiles of LSTM with layer norm of r and c on one H200, train steps of 100 steps, then changed where it
    chose wrong: in the mean 6 percent from 58 tiles forward, of 64 to 384 units in bfloat16 and with TF32 products, and
    11 from 25 backward, of 64 to 256 units in bfloat16.  Less by what tensor cores save since they add up means, by 20
    train steps on an H100: of those measured it chooses the fastest tile, or within 3 percent of it.

    Args:
        share: sequences of a cluster.
    """
    seats, units = -(-8 * tile.tiles // tile.cluster), size.units
    multiplying, busy = tile.warps - seats * tile.whole, -(-share // tile.cluster)
    if kind == "forward":
        operands = tile.depths * -(-size.recurrent // 2)
        sent = busy * tile.cluster * units * 2 / 1024  # KB of a block's states
    else:
        couples = -(-units // 32)
        operands = 2 * -(-couples // multiplying) * (size.recurrent * tile.slice // 16)
        sent = busy * -(-units // tile.slice) * units * 4 / 1024  # KB of sums that come to a block
    products = -(-multiplying // 4) * operands * tile.tiles  # of a scheduler
    streamed = multiplying * (operands - tile.resident) * tile.tiles
    wide = size.element == 4
    if kind == "forward":
        # 384 units at batch 48 500 us, with an exchange for each mean 433; at 96 611 and 587, with TF32 928 and 910
        time = 0.74 + 0.2 * (units > 256) + 0.27 * wide
        time += 0.009 * products + 0.062 * sent + 0.1 * (tile.splits - 1) + 0.0011 * streamed
        # 128 units at batch 32 264 us with 8 warps in a block, in clusters of 8 with 4 254; with 384 and more no gain
        time += 0.2 * max(0, tile.whole - 4) + 0.015 * max(0, tile.warps - 4) - 0.046 * (tile.tiles - 1)
        # since tiles are sub-tiles: 256 units at batch 128 155 us, in clusters of 4 with one 167 (H100); not 128 units,
        # whose clusters are filled (133 us, with one 106), nor clusters of 16, which were not timed
        return 0.8 * time if share > 8 and tile.cluster <= 8 and units > 128 else time
    return 0.91 + 0.075 * tile.whole + 0.007 * products + 0.025 * sent + 0.001 * streamed + 0.1 * wide


def _sliced_time(size: Size, share: int, tile: Tile) -> float:
    """Microseconds of a step of kernels/sliced_backward.cu, as those of other kernels are estimated above.

    Fitted by hand to 49 train steps of LSTM with layer norm of r and c, of 40 to 512 units, beside what is estimated of
    the kernel that was chosen before, each tile as it was timed, of 4 to 8 warps that multiply: it chooses the faster
    kernel, but where that takes up to 3 percent less.  Less by 0.18 since tensor cores add up means: steps of 8
    layers took 0.1 to 0.25 less (H100).

    Args:
        share: sequences of a cluster.
    """
    producers, depths = tile.warps - tile.lines, 2 * size.recurrent
    operands = -(-size.units // (16 * producers)) * depths
    products = -(-producers // 4) * operands * tile.tiles  # of a scheduler
    streamed = producers * (operands - tile.resident) * tile.tiles
    sent = size.units * -(-share // 2) * 8 / 1024  # KB of sums that come to a block, of two sequences at a time
    time = 1.1 + 0.0012 * products + 0.0013 * streamed + 0.082 * sent
    # with TF32 products 256 units at batch 96 441 us, by kernels/whole_backward.cu 469
    time += 0.02 * ((tile.lines - 1) // 4) - 0.15 * (size.element == 4)
    # since two tiles are sub-tiles: 256 units at batch 128 174 us, and 208 before, with TF32 products 189 and 237, 512
    # at 64 282 and 352 (H200); of fewer units, whose batch clusters of one tile can share, none were timed
    return 0.82 * time if share > 8 and size.units > 128 else time


def _sliced_forward_time(size: Size, share: int, tile: Tile) -> float:
    """Microseconds of a step of kernels/sliced_forward.cu, as those of other kernels are estimated above.

    Fitted by hand to LSTM with layer norm of r and c on H200s, of 256 to 512 units, 1 to 14 sequences of a cluster;
    then more, by as much as the others' estimates are too high since tensor cores add up means.

    Args:
        share: sequences of a cluster.
    """
    blocks, wide = -(-size.units // 32), size.element == 4
    time = {16: 0.34 + 0.07 * wide, 8: 0.43 + 0.24 * wide}.get(tile.cluster, 1.25)
    time += 0.0141 * tile.depths * tile.splits * -(-size.recurrent // 2) + 0.0046 * share * blocks
    # with TF32 products 192 units at batch 32 279 us, by whole sequences 273, 256 at 1 229 and 226, at 32 287 and 292
    time += 0.2 * (tile.cluster == 8 and (size.units <= 192 or share < 3))
    # 512 units at batch 32 391 us with eight warps that multiply, 385 with four, with TF32 products 528 and 536; at 64
    # 641 and 580
    time += 0.03 * (not wide) + 0.5 * (tile.warps > 16) if tile.splits > 1 else 0.08 * (wide and size.units > 256)
    return 0.98 * time + 0.15 if share > 8 else 1.25 * time + 0.3 * (tile.tiles - 1)
