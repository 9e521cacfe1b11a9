"""From the size of a layer and a chip to the numbers of a kernel: pure functions, measured reasons beside them.

The regime of this page: one cluster of blocks, or one block, owns some rows of the batch and holds all recurrent
weights of a layer and direction in its registers and shared memory.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from whorl.cells.cell import Graph

SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227,
          (11, 0): 227, (12, 0): 99, (12, 1): 99}  # fmt: skip
"""KiB of shared memory that one block may use, by compute capability (CUDA C++ Programming Guide, table of limits)."""
REGISTERS = 65_536  # of a multiprocessor, on every chip named here
MOST_REGISTERS = 255  # of a thread
LARGEST_CLUSTER = 16


class Chip(NamedTuple):
    """What of a GPU decides the numbers."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that one block may use."""
        return SHARED.get(self.capability, 0) * 1024

    @property
    def architecture(self) -> str:
        """What NVRTC compiles for."""
        return "sm_{}{}{}".format(*self.capability, "a" * (self.capability >= (9, 0)))

    @property
    def early(self) -> bool:
        """Whether a kernel can begin while the launch ahead of it ends."""
        return self.capability >= (9, 0)

    @property
    def clusters(self) -> tuple[int, ...]:
        """Sizes of clusters: a block alone where blocks reach no shared memory but their own, or few at a time."""
        return (1, 2, 4, 8, 16) if self.capability[0] >= 9 and self.capability[0] != 12 else (1,)

    def resident(self, cluster: int) -> int:
        """Clusters of this size that run at once, with a whole multiprocessor for each block.

        Asked of an H200 (132 multiprocessors): 132, 66, 30, 15 and 7 of 1, 2, 4, 8 and 16; 18 and 9 multiprocessors
        make a processing cluster there, so some are left over.
        """
        lost = {1: 0, 2: 0, 4: 0.09, 8: 0.09, 16: 0.15}[cluster]
        return max(1, int(self.multiprocessors * (1 - lost)) // cluster)


class Size(NamedTuple):
    """What of a layer decides the numbers."""

    units: int
    gates: int
    recurrent: int
    states: int
    vectors: int
    apart: int
    element: int
    """Bytes of an element."""
    gate: int
    """Bytes of a gate's value as it is kept."""
    ahead: int = 0
    """Registers that options take of a thread for each of its items, forward."""
    back: int = 0
    """The same backward."""
    masks: int = 0
    """Masks of the recurrent product's operand in shared memory, one for each gate."""
    bits: bool = False
    """Such masks as bits."""
    exact: bool = False
    """Products of float32 are as good as float32: each is three of less."""
    staged: Graph | None = None
    """The cell, where its step has several stages: staging.py chooses its tiles."""
    halves: bool = False
    """float32 may be multiplied as float16, scaled, or (where products are exact) as two float16."""
    bounded: bool = False
    """The first state is in [-1, 1] after a step."""
    contained: bool = False
    """float32 may be multiplied as float16 where each sequence's states have a scale for all steps."""
    ragged: bool = False
    """Sequences have lengths of their own."""
    drawn: bool = False
    """Of options the layer has dropout and zoneout alone, nothing of which is given."""

    @property
    def plain(self) -> bool:
        """Neither options nor vectors nor means."""
        return not (self.ahead or self.back or self.vectors or self.masks or self.bits or self.staged)

    @property
    def bare(self) -> bool:
        """Nor exact products: measured with more weights in registers."""
        return self.plain and not self.exact

    @property
    def optional(self) -> bool:
        """LSTM, or another cell of four gates, with options, none of them given masks by gate: measured with each."""
        return bool(self.ahead or self.back) and self.recurrent > 3 and not (self.masks or self.staged or self.exact)

    @property
    def many(self) -> bool:
        """Most options at once, by what they take of a thread's registers."""
        return self.back >= 24

    @property
    def by_step(self) -> bool:
        """In a cluster states that are multiplied as float16 have a scale of 16 units anew at each step."""
        return self.exact or not (self.bounded or self.contained)


@dataclass(frozen=True)
class Tile:
    """The numbers of one kernel; the `.cu` file says what each means."""

    cluster: int
    slice: int
    """Units of a block."""
    tiles: int
    """Groups of 8 sequences of a cluster."""
    resident: int
    """Depths of the product (forward), or strips times depths (backward, and where a warp or a block has a sequence),
    whose weights stay in registers."""
    shared: int
    warps: int
    splits: int = 0
    """Forward: warps that share the depth of the product of 16 units, of 8 where a warp or a block has a sequence.

    Backward: warps that share 16 units of 8 sequences.
    """
    depths: int = 0
    """Forward: steps of 8 words of depth of one warp."""
    chunk: int = 0
    """Backward: strips of 16 units whose sums a warp holds at once."""
    exact: bool = False
    """As in `Size`."""
    halves: bool = False
    """As in `Size`."""
    by_step: bool = False
    """Forward, where float32 is multiplied as float16: as in `Size`."""
    subs: int = 1
    """Sub-tiles that the rows are taken in, one after the other: the states of one travel while another is computed."""
    pointwise: int = 0
    """Forward: warps of each 16 units that compute the cell alone, while others multiply; 0: those do both."""
    arrivals: int = 1
    """Forward: the groups of 16 units of a block whose states come by a barrier of their own, or 1: all by one."""
    whole: int = 0
    """Warps of one block that compute the cell of a whole sequence (kernels/whole_forward.cu); 0: in the other kernels
    every block does so for its own units."""
    lines: int = 0
    """The most sequences of a cluster where a warp has one of them, for its block's units (kernels/sliced_forward.cu,
    sliced_backward.cu); 0: in the other kernels."""

    @property
    def of_sequences(self) -> bool:
        """Whether a warp has one sequence: that has sums of its own, and clusters share a batch evenly."""
        return self.whole + self.lines > 0

    @property
    def early(self) -> bool:
        """Whether what is known early comes first, backward (`staged.Pass.early`)."""
        return self.lines > 0

    @property
    def rows(self) -> int:
        """The most sequences of a cluster."""
        return self.lines or 8 * self.tiles

    @property
    def adding(self) -> int:
        """Backward: warps that have sums over the batch of the same units."""
        return self.tiles * max(1, self.splits)

    @property
    def planes(self) -> int:
        """Of what enters a product."""
        return 2 if self.halves and self.exact else 1


def forward(
    size: Size, cluster: int, tiles: int, splits: int, limit: int, resident: int | None = None, subs: int = 1,
    pointwise: int = 0,
) -> Tile | None:  # fmt: skip
    """The forward kernel's numbers for a cluster, a number of row tiles and a split of the depth, if they fit.

    Args:
        limit: bytes of shared memory of a block.
        resident: depths in registers; None takes as many as registers allow.
        subs: sub-tiles of the rows; each has its items in whole rounds of the warps of a split, or they in it.
        pointwise: warps of each 16 units that compute the cell alone.
    """
    part, items, halves = tiles // subs, 2 * tiles // subs, size.halves
    planes, by_step = 1 + (halves and size.exact), halves and size.by_step
    takers = pointwise or splits
    if subs > 1 and (tiles % subs or cluster == 1 or (items % takers and takers % items)):
        return None
    if pointwise and (splits == 1 or cluster == 1):
        return None
    words = _words(size, halves)
    units = slice_of(size.units, cluster)
    groups, depths = units // 16, -(-cluster * units // (8 * words * splits))
    warps = groups * (splits + pointwise)
    if not 4 <= warps <= 16:  # fewer would leave one of the four schedulers without work
        return None
    used = size.recurrent * part * 4 + 4 * part * planes + 10 * part * (size.bits or bool(size.masks))
    if not pointwise:  # the warps that multiply compute the cell too
        used += -(-2 * tiles // splits) * (size.gates * size.gate // 2 + 2 * size.states + size.ahead)
        used += 2 * size.recurrent * (1 + halves * size.exact) + 2 * size.vectors + 8 * bool(size.ahead)
    used += extra(size, _POINTWISE_EXTRA if pointwise else _FORWARD_EXTRA, part, halves)
    if size.bare and halves and groups == 8 and size.recurrent > 3:
        used -= _TOO_MANY
    if size.bare and pointwise and size.element == 4 and not halves:
        used -= _TOO_MANY_APART
    traded = pointwise > 0 and subs > 1 and warps == 12 and groups * splits == 8
    most = _TRADED if traded else registers(warps)
    room = _room(size, most, used, halves)
    if room is None:
        return None
    resident = min(depths, room // (4 * planes * size.recurrent)) if resident is None else resident
    states = planes * 8 * tiles * splits * depths * 8
    scales = 2 * splits * depths * 8 * tiles if by_step and size.exact else 8 * tiles * (halves and not by_step)
    scales += groups * splits * size.recurrent * 16 * halves
    partial = groups * 2 * tiles * splits * size.recurrent * 64 if splits > 1 else 0
    masks = size.masks * states + size.bits * splits * depths * tiles * 32
    streamed = groups * splits * (depths - resident) * size.recurrent * planes * 128
    # two warps of a scheduler have 64 products; with 48 GRU took 0.72 us a step so and 0.66 else (512 units, batch 32)
    apart = traded and groups == 2 and resident * size.recurrent >= 32 and depths % 4 == 0
    # where states have scales anew at each step, with options it was not measured
    apart = apart and not (size.exact or size.bits or size.masks or (by_step and not size.plain))
    arrivals = groups if apart else 1
    shared = 4 * (streamed + 2 * states + partial + masks + scales) + 16 * subs * arrivals
    if shared > limit or groups * subs > 15:
        return None
    if subs > 1 and resident < depths and not halves and not pointwise:
        return None  # then sub-tiles save nearly nothing
    made = (cluster, units, tiles, resident, shared, warps, splits, depths)
    return Tile(
        *made, exact=size.exact, halves=halves, by_step=by_step, subs=subs, pointwise=pointwise, arrivals=arrivals
    )


def backward(
    size: Size, cluster: int, tiles: int, warps: int, limit: int, resident: int | None = None, subs: int = 1,
    splits: int = 1,
) -> Tile | None:  # fmt: skip
    """The backward kernel's numbers for a cluster, a number of row tiles and of warps, where they fit.

    Args:
        splits: warps that share 16 units of 8 sequences, 1 or 2.
    """
    part, halves = tiles // subs, size.halves
    planes = 1 + (halves and size.exact)
    if subs > 1 and (tiles % subs or cluster == 1):
        return None
    words = _words(size, halves)
    units = slice_of(size.units, cluster)
    groups = units // 16
    cells, strips, depths = groups * tiles, cluster * groups, size.recurrent * units // (8 * words)
    own, share = -(-cells * splits // warps), -(-strips // warps)
    chunk = min(1 if size.bits and halves and part > 1 else 2, share)  # a gate's sums are kept apart
    summed = size.gates + size.apart + size.vectors
    item = (size.gates + size.apart) * size.gate + 2 * size.element + 4 * (size.states - 1)
    chains = 2 if chunk * part < 4 and not halves else 1  # as the kernel counts them
    used = own * ((item + 4 * size.states) // splits + 2 * summed + 2 * size.vectors)
    used += (4 * chunk * chains + 4) * part
    used += (2 * share + 4 * chunk * part * planes) * halves  # scales, and sums of one group
    used += 4 * chunk * part * (size.bits or bool(size.masks))
    if size.drawn and tiles == own == 1 and size.element == 2 and groups <= 2:
        used += size.back // 2  # and the time loop compiles without spills, where memory has few weights or none
    else:
        used += own * size.back // splits + 8 * bool(size.back)
    used += 4 * chunk * part * (size.recurrent - 1) * (size.bits and halves and chunk * part <= 3)
    used += 4 * (tiles == 1 and size.element == 2)  # computed ahead; in four bytes nothing was spilled without
    if size.bare and tiles == 1 and groups == 8:
        used -= _TOO_MANY
    room = _room(size, registers(warps), used + extra(size, _BACKWARD_EXTRA, part, halves), halves)
    if room is None:
        return None
    resident = min(share * depths, room // (4 * planes)) if resident is None else resident
    padding = 12 if halves and groups > 4 else 4
    gradients, sums = planes * 8 * tiles * (depths * 8 + padding), cells * cluster * 128
    masks = size.masks * strips * tiles * 128 // words + size.bits * strips * tiles * 32
    shared = 4 * (warps * (share * depths - resident) * planes * 128 + 2 * sums + 2 * gradients + masks)
    shared += 32 * subs if subs > 1 else 16
    if shared > limit or (halves and groups > 12):
        return None
    made = (cluster, units, tiles, resident, shared, warps, splits)
    return Tile(*made, chunk=chunk, exact=size.exact, halves=halves, subs=subs)


_FORWARD_EXTRA, _BACKWARD_EXTRA = 56, 68  # registers of addresses and of the cell itself: what compiles without spills
_POINTWISE_EXTRA = 32  # of addresses alone; with fewer the compiler adds up one chain of products after another
_TOO_MANY, _TOO_MANY_APART = 32, 12
"""What the estimates above are too many by where a block has 128 units, of a layer without options, vectors and
means; some words are spilled, up to 15 with TF32. With 256 units at batch 512 a step of GRU backward took 2.23 us and
takes 2.10, with TF32 products LSTM 3.75 and 3.67, GRU 3.09 and 3.08, forward of LSTM 2.63 and 2.47 (H200). And where
warps compute the cell alone and TF32 itself is multiplied: GRU with 512 units 1.23 and 1.18 at batch 1, 1.45 and 1.42
at 32, with 256 at 128 1.55 and 1.50."""
_TRADED = 192
"""Registers of a thread of 8 warps that multiply where 4 compute the cell alone, with 120: 1.81 us a step on an H200,
2.00 with 168 each and weights in shared memory (LSTM, bfloat16, 512 units, batch 128); without sub-tiles as many."""


def extra(size: Size, base: int, tiles: int, halves: bool = False) -> int:
    """Of four bytes more, and where each operand is split into two."""
    if halves:
        return base + 4 + 16 * size.exact
    return base + (8 + 2 * tiles) * (size.element == 4) + (36 + 2 * tiles + 6 * size.apart) * size.exact


def _words(size: Size, halves: bool) -> int:
    """Elements of a word of what enters a product."""
    return 2 if halves else 4 // size.element


def registers(warps: int) -> int:
    """That a thread may have where a block of so many warps has a multiprocessor to itself."""
    return min(MOST_REGISTERS, REGISTERS // (32 * warps) // 8 * 8)


def given_registers(warps: int) -> int:
    """What the compiler gives it: each of a multiprocessor's four parts has a fourth of them, and of the warps.

    For 9 to 11 and 13 to 15 warps fewer than `registers` says, by which other kernels' tiles were measured.
    """
    return registers(-(-warps // 4) * 4)


def _room(size: Size, most: int, used: int, halves: bool) -> int | None:
    """Of `most` registers of a thread those for weights; None where a kernel in four bytes has too few for the rest.

    Of weights in four bytes, more than 160 were spilled all the same.
    """
    room = most - used
    if size.element == 2 or size.ahead or size.back:  # with options a few are spilled
        return min(max(0, room), 160 if size.element == 4 and not halves else MOST_REGISTERS)
    return min(room, MOST_REGISTERS if halves else 160) if room >= 0 else None


def slice_of(units: int, cluster: int) -> int:
    """Units of a block."""
    each = -(-units // cluster)
    return -(-each // 16) * 16


def candidates(size: Size, chip: Chip, kind: str) -> Iterator[Tile]:
    """Every tile of a kind ("forward" or "backward") that fits the chip."""
    # with TF32 products either may be the faster: LSTM backward at batch 32 took 1.18 us a step on an H200 as TF32 and
    # 1.53 as float16 with 128 units, 2.16 and 1.91 with 512
    ways = (size, size._replace(halves=False)) if size.halves and not size.exact else (size,)
    for way, cluster in itertools.product(ways, chip.clusters):
        for tiles, subs in ((tiles, subs) for tiles in range(1, 9) for subs in (1, 2, 3, 4) if tiles % subs == 0):
            if kind == "backward":
                each = [(warps, _sharers(way, cluster, tiles, warps, subs)) for warps in (4, 8, 12, 16)]
                made = [backward(way, cluster, tiles, n, chip.shared, subs=subs, splits=splits) for n, splits in each]
            else:
                shapes = [(1, 0), (2, 0), (4, 0), (8, 0)] + [(4, 2)] * (not size.exact)  # as measured
                made = [
                    forward(way, cluster, tiles, splits, chip.shared, subs=subs, pointwise=pointwise)
                    for splits, pointwise in shapes
                ]
            yield from (tile for tile in made if tile is not None)


def _sharers(size: Size, cluster: int, tiles: int, warps: int, subs: int) -> int:
    """Warps that share 16 units of 8 sequences backward: two where 8, or all, are enough for one such half each.

    Everyone waits for who computes the cell.  Of 222 tiles measured both ways (one H200, 2026-11-23) all where warps
    are enough were the faster so but two of RNN: LSTM and GRU with 128 units at batch 32 by 0.3 to 0.5 us a step.
    (Four warps, one unit of one sequence a thread, were 2 to 4 percent faster where a block has 16 units, and slower
    elsewhere.)  With more sequences or sub-tiles it gained too, but others that have fewer take less.
    """
    few = tiles == 1 or (tiles == 2 and subs == 1)
    return 2 if few and 2 * slice_of(size.units, cluster) // 16 * tiles <= min(warps, 8) else 1


def fits(size: Size, chip: Chip, kind: str) -> bool:
    """Whether any tile of a kind fits."""
    return bool(_fitting(size, chip, kind))


def choose(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Tile | None:
    """The tile of a kind that takes the least time by the estimate below; None where none fits."""
    found = _fitting(size, chip, kind)
    return min(found, key=lambda tile: step_time(size, chip, batch, directions, kind, tile), default=None)


def likely(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> list[Tile]:
    """Every tile of a kind that fits, the one that is estimated to be the fastest first."""
    return sorted(_fitting(size, chip, kind), key=lambda tile: step_time(size, chip, batch, directions, kind, tile))


def rounds(chip: Chip, batch: int, directions: int, tile: Tile) -> int:
    """How many times the clusters of a batch fill the chip."""
    least = -(-batch // tile.rows)
    return -(-least * directions // chip.resident(tile.cluster))


def parts(chip: Chip, batch: int, directions: int, tile: Tile, kind: str) -> int:
    """Clusters that share the batch: as many as run at once, so that each has the fewest sequences to exchange.

    On an H200 5 sequences of 8 took 0.82 us a step and 8 of 8 0.99 (LSTM, bfloat16, 512 units), but 2, 5 and 8 of 8
    0.57, 0.59 and 0.54 (128 units); backward, where sums of all 8 are sent (but where warps have sequences of their
    own), 5 took 2.05 and 8 2.02, 19 of 24 3.02 and 22 3.12.
    """
    least = -(-batch // tile.rows)
    if tile.cluster * tile.slice <= _SMALL or (kind == "backward" and tile.tiles == 1 and not tile.of_sequences):
        return least
    share = -(-batch // max(least, chip.resident(tile.cluster) // directions))
    return -(-batch // share)


_SMALL = 128  # units, whose states take no longer to exchange for 8 sequences than for fewer


@lru_cache(maxsize=1024)
def _fitting(size: Size, chip: Chip, kind: str) -> tuple[Tile, ...]:
    found = tuple(candidates(size, chip, kind))
    # Where a cluster is too small for TF32 itself, blocks that exchange through L2 take less with it: LSTM with
    # softplus and 768 units at batch 16 210 us, in a cluster with scales at each step 258 (GRU with relu 186, 181).
    if not size.exact and all(tile.by_step for tile in found):
        return ()
    return found


def step_time(size: Size, chip: Chip, batch: int, directions: int, kind: str, tile: Tile) -> float:
    """Microseconds of a step of the whole batch, estimated.

    Of a ragged batch the mean of one whose lengths are spread evenly and of one without a short sequence.
    """
    full = full_time(size, chip, batch, directions, kind, tile)
    return (full + _ragged_time(size, chip, batch, directions, kind, tile)) / 2 if size.ragged else full


def _ragged_time(size: Size, chip: Chip, batch: int, directions: int, kind: str, tile: Tile) -> float:
    """The same for each step of the longest sequence, of lengths from none to the longest, spread evenly."""
    taken, count = rounds(chip, batch, directions, tile), parts(chip, batch, directions, tile, kind)
    if taken > 1:  # where a cluster has left, that of the next longest sequences begins
        ends = [0.0] * max(1, chip.resident(tile.cluster) // directions)
        for part in range(count):
            heapq.heapreplace(ends, ends[0] + 1 - part / count)
        return full_time(size, chip, batch, directions, kind, tile) * max(ends) / taken
    share, lines, time = -(-batch // count), tile.rows // tile.subs, 0.0
    used = -(-share // lines)
    for subs in range(used, 0, -1):  # as long as so many sub-tiles last
        left = replace(tile, tiles=tile.tiles // tile.subs * subs, subs=subs) if used == tile.subs else tile
        last = min(1.0, 1 - (subs - 1) * lines / share)
        first = max(0.0, 1 - subs * lines / share)
        time += (last - first) * full_time(size, chip, min(batch, count * left.rows), directions, kind, left)
    return time


def full_time(size: Size, chip: Chip, batch: int, directions: int, kind: str, tile: Tile) -> float:
    """Microseconds of a step, estimated, times the number of times that the clusters fill the chip.

    Fitted to LSTM on an H200, 128 to 512 units, batch 1 to 512: backward 49 tiles in bfloat16, forward 47 with operands
    of two bytes, to 5 percent in the mean; the worst is 0.51 us a step (128 units, batch 32, estimated 0.62).  In two
    bytes those whose warps all compute the cell are fitted anew: `_EARLY`.  Of tiles with warps for the cell alone that
    of 512 units took 0.815 us a step at batch 32, 0.988 without such warps.  Two operands are taken to cost as three
    products.  Backward by two warps an item was measured where all clusters run at once: where they take turns it is
    estimated as by one.
    """
    taken = rounds(chip, batch, directions, tile)
    share = -(-batch // parts(chip, batch, directions, tile, kind))
    reached = -(-share // (tile.rows // tile.subs))
    if reached < tile.subs and _spare(size, kind, tile):
        left = replace(tile, tiles=tile.tiles // tile.subs * reached, subs=reached)
        return _SPARE * full_time(size, chip, batch, directions, kind, left)
    begin = 0.3 * (taken - 1)  # each round loads its weights anew: 20 us as this was fitted, over 60 steps
    groups, words, planes = tile.slice // 16, _words(size, tile.halves), tile.planes
    products = size.recurrent * groups * (tile.cluster * tile.slice / (8 * words)) * tile.tiles / 4
    arriving = 0.0 if tile.cluster == 1 else size.units * tile.rows / 1024
    read = tile.warps * streamed(size, tile, kind) * planes / 2
    if kind == "backward" and tile.splits == 2 and taken == 1:
        return _time_by_two(size, tile, read)
    if size.element == 4 and not tile.halves:
        items = groups * tile.tiles / (2 if kind == "forward" else 4)
        counts = (1, tile.cluster, tile.warps, items, products, products / tile.tiles, 4 * arriving, read)
        costs = _FOUR_BYTES[kind, size.exact]
        # GRU with warps for the cell alone, 128 units at batch 32 and 128, 512 at 32: 0.58, 0.67 and 1.48 us
        apart = 0.7 if tile.pointwise and tile.subs == 1 and not size.bounded else 1.0
        step = sum(cost * count for cost, count in zip(costs, counts, strict=True))
        return begin + taken * (apart * step + _beside(size, kind, tile))
    if kind == "forward":
        takers, multiplying = tile.pointwise or tile.splits, groups * tile.splits
        uneven = 1 if tile.pointwise else -(-tile.warps // 4) * 4 / tile.warps  # warps of a scheduler
        items, round_of = groups * tile.tiles / 2 * (size.recurrent / 4) ** 0.5, -(-2 * tile.tiles // takers)
        arriving *= share / tile.rows
        if size.element == 2 and _all_compute(tile):
            of_all = tile.cluster, tile.splits, uneven * items, round_of, arriving, products
            step = sum(cost * count for cost, count in zip(_EARLY, of_all, strict=True))
            step *= 1.1 if tile.warps == 4 or tile.cluster == 1 else 1.0
            step += 0.0031 * read * multiplying / tile.warps
            return begin + taken * (step + _beside(size, kind, tile))
        step = 0.014 * tile.cluster + 0.057 * tile.splits + 0.317 * uneven * items
        step += 0.037 * round_of + 0.0985 * planes * arriving
        if tile.pointwise:
            step *= (0.77 if tile.cluster == LARGEST_CLUSTER else 0.84) * (0.97 if tile.subs > 1 else 1.0)
        if tile.pointwise and size.ragged:  # they fall behind: 0.05, 0.3 and 1.25 us more with 1, 2 and 3 sub-tiles
            step += 0.025 * size.ahead * (tile.subs - 1) ** 2
        if tile.subs > 1 and not tile.pointwise and size.ahead and tile.cluster == LARGEST_CLUSTER:
            step *= 0.88  # 2.12 us with 512 units at batch 128
        step *= 1.15 if size.element == 4 else 1.0
        step *= {1: 0.75, 2: 0.9}.get(tile.cluster, 1.0)  # none or one to exchange with
        if size.element == 2 and tile.pointwise:  # with 16 to 64 units LSTM 0.48 to 0.52 us, GRU 0.42 to 0.46
            step = max(step, 0.48 * (size.recurrent / 4) ** 0.3)
        if tile.warps == 4 and tile.cluster > 1 and not tile.pointwise:
            step *= 1.1  # 0.75 us where 12 warps took 0.65, and GRU 0.69 and 0.58, with 128 units at batch 128
        step += 0.0025 * read * multiplying / tile.warps * tile.subs
        if tile.by_step and not size.exact and tile.pointwise and tile.subs < tile.tiles:
            # LSTM with softplus, 512 units at batch 128, an earlier text: as one tile 3.12 us, as three sub-tiles 2.34
            step *= 1.15
        return begin + taken * (step + _beside(size, kind, tile))
    products *= 2 * planes - 1
    again = 0.003 * read * tile.subs * tile.halves
    items = groups * tile.tiles / 4
    step = 1.0 + 0.016 * tile.cluster + 0.02 * abs(tile.warps - 8) + 0.45 * items + 0.0045 * products
    step = step + 0.04 * arriving + again
    # of full lengths, 512 units: 2.24 us with 16 sequences and 3.47 with 32; with 24 in three sub-tiles 3.28 and, with
    # every option, 5.18, where as one tile they take 3.04 and 3.97
    if size.ragged and tile.cluster == LARGEST_CLUSTER and tile.subs > 1:
        step *= (0.87 if tile.subs == 2 else 1.0) * max(1.0, 1 + 0.024 * (size.back - 12))
    elif tile.subs > 1:
        step *= 1.07  # 1.05 to 1.19 times what one tile of as many sequences takes, 512 units at batch 128
    return begin + taken * (step + _beside(size, kind, tile))


def _spare(size: Size, kind: str, tile: Tile) -> bool:
    """Whether sub-tiles that no sequence reaches were measured to cost nothing: LSTM and GRU, some options of LSTM."""
    optional = size.optional and not (size.bits or size.many)
    if size.ragged or size.recurrent < 3 or tile.cluster < LARGEST_CLUSTER or not (size.bare or optional):
        return False
    if kind == "backward" or not tile.pointwise or tile.warps != 12:
        return False
    two = tile.subs == tile.tiles == 2 and (size.element == 2 or tile.halves)
    # of LSTM in two bytes not with 448 units, which were 1.6 percent slower at batch 1 to 32
    return two and (tile.halves or size.recurrent == 3 or size.units > LARGEST_CLUSTER * 28)


_SPARE = 0.97
"""Of what the others take, with such a sub-tile. Forward, where it leaves more registers to those that multiply: LSTM
1.10 and 1.19 us with 512 units at batch 32 and TF32 products, with a mask 1.02 and 1.13, in bfloat16 0.99 and 1.00, GRU
0.86 and 0.89. (With four sub-tiles for three at batch 128 LSTM took 1.92 and 1.98, but with a clip 2.39 and 2.07.) One
H200, 30 steps, with all that a launch takes, 2026-11-23."""


def _beside(size: Size, kind: str, tile: Tile) -> float:
    """What tiles take beside their estimates, microseconds of a step."""
    if size.optional:
        return _beside_options(size, kind, tile)
    wide, blocks = size.element == 4, (tile.cluster, tile.slice)
    lstm, itself = size.recurrent > 3, wide and not tile.halves
    if size.exact and size.plain and size.recurrent == 3 and 96 < size.units <= 128 and kind == "forward":
        return {(4, 32): 0.06, (16, 16): 0.15}.get(blocks, 0.0)  # at batch 32 1.22 and 1.20 us, in clusters of 8 1.03
    if not size.bare or size.recurrent < 3:
        return 0.0
    if kind == "forward":
        if not lstm and not wide and blocks == (16, 48) and tile.splits == 4 and tile.tiles == 1:
            return 0.1  # 650 units at batch 20 1.70, with half as many splits 1.61
        if not lstm and itself and blocks == (16, 32) and tile.pointwise:
            return 0.5  # GRU with TF32 products and 512 units at batch 32 1.46, where all warps compute the cell 1.39
        if not lstm and tile.halves and tile.slice == 48 and tile.splits == 4 and not tile.pointwise:
            return 0.2  # GRU with 768 units at batch 16 1.9, with half as many splits 1.6
        if lstm and tile.halves and blocks == (4, 32) and tile.pointwise and size.units > 96:
            return 0.1  # 128 units at batch 128 0.85, where all warps compute the cell 0.78
        return 0.0
    if lstm and tile.halves and blocks == (2, 128):
        return 0.6  # 256 units at batch 512: 3.83, spread 3.62
    return 0.0


def _beside_options(size: Size, kind: str, tile: Tile) -> float:
    """The same of LSTM with options: one H200, steps of 50, 2026-11-23, and one H100, steps of 60, 2026-11-26."""
    if kind == "forward":
        # all options at once: 512 units at batch 128 4.54 us, spread 2.67 (but 256 at 512, spread too, 3.30 and 3.43)
        much = size.many and (tile.slice > (64 if _all_compute(tile) else 48) or tile.tiles > 1)
        # lengths: 512 units at batch 128 2.78 us, spread 2.15, but a mask 2.05 and 2.22
        marked = not size.drawn and (size.ragged or size.ahead > _AHEAD_OF_A_MASK or size.element == 4)
        return 0.4 * much + 0.25 * (tile.subs > 2 and tile.pointwise > 0 and marked)
    # as one warp for each item took with 512 and 256 units at batch 32: 2.67 us, spread 2.30; 1.90 and 1.84
    if size.many and size.element == 2:
        return 0.3 + 0.02 * streamed(size, tile, kind)
    return 0.0


def _all_compute(tile: Tile) -> bool:
    """Forward, whether all warps of a block compute the cell, of all its sequences at once."""
    return tile.subs == 1 and not tile.pointwise


def _time_by_two(size: Size, tile: Tile, read: float) -> float:
    """Microseconds of a step backward where two warps share what of the cell they compute, of clusters that all run.

    Args:
        read: operands of weights that a block reads from shared memory.
    """
    beyond, few, each = max(0, tile.warps - 8), tile.warps == 4, tile.slice // 16 * tile.tiles
    counts = (1, tile.cluster, beyond, -few, each, read, tile.tiles - 1)
    costs = _BY_TWO[size.element, tile.halves or size.exact, size.exact]
    time = sum(cost * count for cost, count in zip(costs, counts, strict=True))
    # LSTM with 256 units at batch 128, a step with all products: most options at once 2.36 us, in clusters of 8 2.24;
    # with scaled products a mask and most options 3.00 and 3.28, spread 3.16 and 3.41; dropout by gate, with forward,
    # 5.44 and 5.32
    time += 0.1 * (size.optional and size.many and tile.slice > 32)
    if size.optional and size.element == 2:
        # with 256 units: zoneout 1.41 us in clusters of 4 and 1.32 of 8 at batch 128; at 32 most options at once 1.13
        # in clusters of 16 and 1.09 of 8, dropout by step 0.87 by 4 warps and 0.84 by 8 (an H100, as what follows)
        widest = tile.cluster == LARGEST_CLUSTER and tile.slice == 16
        time += 0.1 * (size.drawn and not size.bits and tile.slice > 32) + 0.1 * (size.many and widest)
        # those of zoneout alone, which takes 6 registers, 0.81 by 4 warps and 0.82 by 8
        time -= 0.08 * (size.drawn and size.back > 6 and widest and not few)
    elif size.optional and not size.ragged:
        time += 0.1 * few  # zoneout 0.96 us and 0.90 by 8 warps with 256 units at batch 32; lengths 0.95 and 0.98
    apart = 0.15 * (size.optional and tile.halves and tile.tiles == 2)
    return time + apart if size.bits else time - apart


_BY_TWO = {
    (2, False, False): (0.43, 0.0205, 0.0134, 0.071, 0.175, 0.0049, 0.0),
    (4, False, False): (0.65, 0.0171, 0.0231, 0.090, 0.193, 0.0053, 0.15),
    (4, True, False): (0.84, 0.0148, 0.0, 0.138, 0.183, 0.0077, 0.0),
    (4, True, True): (1.05, 0.0192, 0.0136, 0.126, 0.268, 0.0075, 0.25),
}
"""By the bytes of an element, whether products are of scaled float16 and whether they are exact, for: the step, each
block of the cluster, each warp above 8, 4 warps (less), each 16 units of 8 sequences of a block, each operand that is
read, and a second 8 sequences.  Fitted to LSTM and GRU on an H200, 128 to 512 units, batch 1 to 128, 349 tiles,
2026-11-23; RNN, and what it was not fitted to, chose within 5 percent of the best of 4 to 10 that were measured.
Exact products that are not of two float16, which options have, were not measured and are taken for the same."""
_EARLY = 0.0021, 0.0934, 0.198, 0.0116, 0.0878, 0.0031
"""Forward in two bytes, where all warps compute the cell and ask for a step's input before they wait for its states,
microseconds of a step for: each block of the cluster, each warp of a split, each item of a scheduler's warps, each
round of items, each KB that arrives and each product. Fitted to LSTM and GRU on an H100, 128 to 650 units, batch 20 to
512, 112 tiles, 2026-11-26, to 7 percent of their times in the mean."""
_AHEAD_OF_A_MASK = 5  # registers that a mask takes of a thread, forward: `Size.ahead`
_FOUR_BYTES = {
    ("forward", False): (0.0, 0.0211, 0.0261, 0.351, 0.0008, 0.0, 0.0572, 0.0030),
    ("backward", False): (0.844, 0.0, 0.0206, 0.363, 0.0, 0.0, 0.0424, 0.0018),
    ("forward", True): (0.835, 0.0458, 0.0106, 0.0, 0.0241, 0.0100, 0.0, 0.0037),
    ("backward", True): (2.479, 0.0, 0.0, 0.0, 0.0294, 0.0091, 0.0, 0.0068),
}
"""Of a float32 kernel with TF32 products or (True) exact ones, microseconds of a step for: the step, each block of the
cluster, each warp, each item of a warp, each product, each operand of weights, each KB that arrives and each KB of
weights read from shared memory.  Fitted to LSTM and GRU on an H200, 128 to 512 units, batch 32 to 512, 112 tiles that
do not spill, to 5 percent of their times in the mean (exact backward 9); it chose one within a tenth of the fastest."""


def streamed(size: Size, tile: Tile, kind: str) -> int:
    """Pieces of 512 bytes of the weights that one warp reads from shared memory at every step."""
    if kind == "forward":
        return (tile.depths - tile.resident) * size.recurrent
    groups, words = tile.slice // 16, _words(size, tile.halves)
    share = -(-tile.cluster * groups // tile.warps)
    return share * (size.recurrent * tile.slice // (8 * words)) - tile.resident
