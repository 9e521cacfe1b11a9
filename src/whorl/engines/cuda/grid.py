"""A kernel of a plan with its tile: how it is launched for a whole batch, in either regime."""

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from whorl.engines.cuda import measured, spreading, staging, tiling, tuned
from whorl.engines.cuda.beside import Halving
from whorl.engines.cuda.launch import Kernel
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.sides import NOWHERE, Sides
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile


@lru_cache(maxsize=1024)
def fits(size: Size, chip: Chip, kind: str) -> bool:
    """Whether any tile of a kind ("forward" or "backward") fits, as `choose` would choose it."""
    near = tiling.fits(size, chip, kind) if size.staged is None else bool(_near(size, chip, 1, 1, kind))
    return near or spreading.fits(size, chip, kind)


def _near(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> list[Tile]:
    """Tiles of a cluster or a block, the one that is estimated to be the fastest first."""
    if size.staged is None:
        return tiling.likely(size, chip, batch, directions, kind)
    return staging.likely(size.staged, size, chip, batch, directions, kind)


def choose(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Tile | Spread | None:
    """The tile of a kind: the one that `whorl tune` measured to be the fastest, else the one estimated to be."""
    kept = tuned.found(likely, size, chip, batch, directions, kind)
    return estimated(size, chip, batch, directions, kind) if kept is None else kept


def estimated(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Tile | Spread | None:
    """The tile that is known (measured.py), else estimated, to be the fastest."""
    known = _known(size, chip, batch, directions, kind)
    return _estimated(size, chip, batch, directions, kind) if known is None else known


def _known(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Tile | Spread | None:
    where = size, chip, batch, directions
    return measured.backward(*where) if kind == "backward" else measured.spread(*where) or measured.forward(*where)


def _estimated(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Tile | Spread | None:
    """The tile that is estimated to be the fastest: of a cluster where one holds the weights, else spread.

    In two bytes, and in float32 forward or, with TF32 products, of a step of several stages, a layer that a cluster
    holds is spread too where its steps are estimated to take less time so.
    Not, where a cluster holds them, layers whose masks by gate are given: where blocks exchange through L2, they are
    read from there at each step.
    """
    where = (size, chip, batch, directions, kind)
    tile = tiling.choose(*where) if size.staged is None else next(iter(_near(*where)), None)
    if tile is None:
        return spreading.choose(*where)
    much = _much(size, kind, tile)
    if much is None:
        return tile
    # of a ragged batch what all of it takes: what of one is spread was not measured
    taken = tiling.full_time(*where, tile) if size.staged is None else staging.step_time(size.staged, *where, tile)
    if _measured(size) and size.element == 2 and kind == "backward" and tile.splits < 2:
        taken += _READ * tiling.streamed(size, tile, kind) - _NOT_READ
    worth = taken / much
    if size.masks or worth <= spreading.LEAST[kind]:
        return tile  # without a look at what is spread, of which there are hundreds of candidates
    spread = spreading.choose(*where)
    return tile if spread is None or worth <= spreading.step_time(*where) else spread


def _much(size: Size, kind: str, tile: Tile) -> float | None:
    """By how much longer a cluster has to take than what is spread, as estimated; None where it never does."""
    optional = bool(size.ahead or size.back) and size.recurrent > 3  # what was measured with options is LSTM
    if size.element == 2 and size.staged is None:
        if kind == "forward":
            return _MUCH_FEW if size.bare and size.recurrent < 4 else 1.0
        if _measured(size):
            return _MUCH_BACK_FEW if size.recurrent < 4 and size.units >= 576 else 1.0
        return _MUCH_BACK_OPTIONS if optional else _MUCH_BACK[size.recurrent > 3]
    if size.staged is not None and size.staged.products:
        return _MUCH_PRODUCTS[size.element, kind] if size.element == 2 or spreading.scaled(size, kind) else None
    if size.element == 2:
        return _MUCH_STAGED_STREAMED if kind == "backward" and tile.shared > 180 << 10 else 1.0
    if not spreading.scaled(size, kind):
        return None
    if size.exact:
        return _MUCH_EXACT[tile.subs > 1]
    if size.staged is not None:
        return _MUCH_STAGED_TF32[kind]
    if tile.by_step and not size.plain:
        return _MUCH_TF32_ANEW
    if optional:
        few = size.bits and kind == "backward" and tile.tiles < 3
        return _MUCH_TF32_BY_GATE if few else _MUCH_TF32_OPTIONS[kind]
    if kind == "backward":
        return _MUCH_TF32_BACK if _measured(size) else None
    return (_MUCH_TF32 if _measured(size) else 1.0) if tile.halves else _MUCH_TF32_ITSELF


def _measured(size: Size) -> bool:
    """LSTM and GRU without options, with so many units that both ways were measured."""
    return size.bare and size.recurrent > 2 and size.units >= 256


_MUCH_FEW = 1.05
"""By how much, forward in two bytes, of cells with fewer than four gates: GRU with 384 units at batch 128 1.44 and 1.70
us in a cluster and spread, 1.50 and 1.44 estimated (an H100)."""
_MUCH_BACK = {True: 1.0, False: 1.6}
"""By how much, backward in two bytes, of a cell with more than three gates and of one with fewer.  This and what
follows is fitted to both ways on an H200, 60 steps of LSTM and GRU, 128 to 768 units at batch 1 to 512, and of LSTM
with options, 256 and 512 units at batch 32 and 128: of 140 cases 7 take the way that took more than a twentieth
longer, an eighth at most.  LSTM in bfloat16, a step in a cluster and spread: 1.34 and 1.16 us with 128 units at
batch 128, 2.87 and 2.60 with 768 at 16, 3.13 and 3.13 with 512 at 128, 1.94 and 2.45 at 32; GRU 1.03 and 1.11, 2.13
and 2.30, 2.54 and 2.56, 1.23 and 2.04."""
_MUCH_BACK_OPTIONS = 0.98
"""LSTM with zoneout, recurrent dropout by step, by gate, and all options: 2.13 and 1.82, 1.85 and 1.70, 1.65 and
1.74, 2.43 and 1.83 us with 256 units at batch 128, 3.30 and 3.36, 3.46 and 3.01, 3.75 and 3.20, 3.99 and 3.23 with
512."""
_READ, _NOT_READ = 0.02, 0.3
"""Microseconds by which, backward in two bytes without options, a step in a cluster whose warps share no item takes
longer than estimated for each operand of a warp that is read from shared memory, and by which it takes less: LSTM
and GRU, 256 to 1,024 units at batch 16 to 512, both ways on an H200 (40 steps, 2026-11-22). In a cluster and spread
LSTM took 2.89 and 2.75 us with 650 units at batch 20, 2.53 and 2.31 with 512 at 64, 2.57 and 2.97 at 96, 3.18 and
2.86 at 128, 1.55 and 1.72 with 256 at 128; GRU 2.81 and 2.37 with 512 at 128, 2.43 and 2.02 with 384 at 128, 1.26
and 1.64 with 256 at 128."""
_MUCH_BACK_FEW = 1.28
"""The same for cells with fewer than four gates from 576 units on, whose clusters are estimated too high: GRU with
650 units 2.86 and 3.51 us at batch 64 (6 percent less estimated), 6.48 and 5.03 at 128 (40), with 576 2.89 and 3.44
at 96 (2), 5.75 and 4.26 at 128 (31), with 768 15.8 and 17.3 at 512 (26), 6.36 and 5.43 at 128 (43)."""
_MUCH_TF32_BACK = 0.975
"""With TF32 products, of the same sizes: LSTM 3.47 and 3.12 us with 512 at 128, 7.32 and 5.74 at 256, 2.61 and 3.12
at 96, 2.04 and 1.82 with 256 at 128; GRU 3.06 and 2.79 with 512 at 128, 8.34 and 5.34 at 256, 4.32 and 3.52 with 640
at 64, 4.38 and 4.53 with 768 at 64."""
_MUCH_TF32, _MUCH_TF32_ITSELF = 1.06, 1.5
"""With TF32 products forward, where a cluster multiplies scaled float16 too, and TF32 itself: LSTM 2.87 and 2.48 us
with 512 units at batch 128, 1.60 and 1.64 at 32, 3.42 and 2.89 with 256 at 512; GRU 3.09 and 2.20, 1.48 and 1.55,
3.35 and 2.37; LSTM with 256 at 512, whose cluster has ten depths of its weights in registers since, 2.47 and 2.97."""
_MUCH_TF32_ANEW = 1.3
"""Forward where both scale states anew at each step, with options: LSTM with softplus, 512 units at batch 128, without
any, 100 steps, 2.66 us in a cluster and 2.84 spread, 2.76 and 2.35 estimated (an H100). With scales in the states' own
words a cluster takes less, and without options no such factor is needed; with them that was not measured."""
_MUCH_TF32_OPTIONS = {"forward": 1.0, "backward": 0.85}
"""LSTM with options: zoneout 1.05 and 1.47 us forward, 2.13 and 1.90 backward with 256 units at batch 128, 3.67 and
2.72, 3.99 and 3.92 with 512, 1.62 and 1.67, 2.31 and 3.08 at 32; recurrent dropout by gate 1.34 and 1.72, 2.50 and
1.89, 3.68 and 3.13, 5.37 and 4.17."""
_MUCH_TF32_BY_GATE = 0.95
"""Backward with masks by gate: a cluster of up to 16 sequences leaves multiprocessors on which forward's states go
behind them meanwhile. 1.91 and 1.92 us with 256 units at batch 128, a train step 1.24 and 1.31 of the plain layer's in
runs of their own (H100s)."""
_MUCH_EXACT = {True: 1.2, False: 1.5}
"""In true float32 forward, where a cluster takes its rows in sub-tiles and where not: with 512 units at batch 128 LSTM
took 9.25 us in a cluster (three rounds, 7.30 estimated) and 3.58 spread, GRU 5.23 (three sub-tiles, 4.24 estimated) and
3.15.  Other sizes were not measured: they are spread where the estimates say that it takes two thirds of the time, and
with sub-tiles five sixths, as such a cluster takes a quarter longer than estimated."""

_MUCH_STAGED_STREAMED = 0.7
"""Of a step with means whose cluster has most of its weights in shared memory: it takes 1.4 to 1.7 times what is
estimated.  On an H200, LSTM with layer norm in bfloat16, such a step of backward took 6.9 us in a cluster and 4.6
spread with 512 units at batch 128, 6.2 and 4.7 with 650 at 20, and a train step of 100 802 and 728 with 512 at 64.
Else the estimates are good enough: 2.8 and 3.9 with 512 at 32, 2.9 and 2.9 with 256 at 128; forward 5.0 and 3.9 with
512 at 128, 2.6 and 3.6 at 32, 2.1 and 3.2 with 256 at 128."""

_MUCH_PRODUCTS = {(2, "forward"): 1.5, (2, "backward"): 1.15, (4, "forward"): 1.3, (4, "backward"): 0.85}
"""Of a step with products inside, by bytes of an element.  GRU with the reset before the product, 40 steps on an H100,
in a cluster and spread: 512 units at batch 128 forward 3.0 and 2.8 us in bfloat16, 9.1 and 3.6 with TF32 products,
backward 4.2 and 4.5, 6.0 and 5.0; 768 at 128 in bfloat16 9.1 and 5.2, 9.9 and 10.6; 768 at 32 2.4 and 3.0 forward; 512
at 32 1.6 and 2.6, 2.0 and 4.6, with TF32 products 2.4 and 2.6, 2.2 and 5.0; 256 at 128 1.2 and 1.9, 1.6 and 2.8, with
TF32 products 1.9 and 2.1, 2.2 and 3.3.  Since a cluster multiplies scaled float16 forward, a train step of 100 on an
H200 took, forward in a cluster and spread, 514 and 631 us with 512 units at batch 32, 1,403 and 1,401 at 128, 501 and
582 with 256 at 128."""

_MUCH_STAGED_TF32 = {"forward": 1.0, "backward": 0.88}
"""And with TF32 products, fitted to kernels that exchange means in the warps that multiply. On an H200 a train step of
100 of LSTM with layer norm of r and c took, forward in a cluster and spread, 686 and 793 us with 512 units at batch
32, 978 and 1,018 at 64, 1,475 and 1,342 at 128, 683 and 746 with 256 at 128; backward 701 and 807, 1,095 and 980,
1,724 and 1,348, 741 and 679."""


def step_time(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> float:
    """Microseconds that a step of the tile takes that `estimated` gives, of a cell of one stage; the whole batch.

    Of one that is known: what is estimated of the tile that would run else, times what `measured.worth` says.
    """
    where = (size, chip, batch, directions, kind)
    tile = _estimated(*where)
    time = tiling.step_time(*where, tile) if isinstance(tile, Tile) else spreading.step_time(*where)
    return time * measured.worth(size) if estimated(*where) != tile else time


def likely(
    size: Size, chip: Chip, batch: int, directions: int, kind: str, each: int | None = None
) -> list[Tile | Spread]:
    """The candidates, those of each regime that are estimated to be the fastest first; last one that is known.

    Args:
        each: how many of each regime; None: all.
    """
    where = (size, chip, batch, directions, kind)
    known = _known(*where)
    found: list[Tile | Spread] = [*_near(*where)[:each]]
    return list(dict.fromkeys([*found, *spreading.likely(*where)[:each], *([known] if known is not None else [])]))


def beside(tile: Tile | Spread) -> Tile | Spread:
    """A tile for kernels of several layers that run beside each other: none has all multiprocessors of a side."""
    return replace(tile, sided=False) if isinstance(tile, Spread) else tile


def described(tile: Tile | Spread, shared: int, directions: int) -> str:
    """A tile in words: who holds the weights for which sequences, and what of a multiprocessor a block takes.

    Args:
        shared: bytes of shared memory of a block, with those through which weights come to registers.
    """
    room = f"{tile.warps} warps, up to {tiling.given_registers(tile.warps)} registers a thread, {shared / 1024:.0f} KiB"
    if isinstance(tile, Spread):
        who, ways = f"{tile.blocks} blocks that exchange through L2", []
        if tile.sided and directions == 1:
            ways.append("on one side of it where that is known and has room")
        if tile.lull:
            ways.append(f"each looks for what the others give after a lull of {tile.lull} cycles")
        who += f" ({'; '.join(ways)})" * bool(ways) + ", each with the cell of a whole sequence," * tile.whole
    else:
        who = f"a cluster of {tile.cluster} blocks" if tile.cluster > 1 else "one block"
        who += ", each with the cell of whole sequences," * (tile.whole > 0)
        who += ", with a warp for each sequence," * (tile.lines > 0)
    return f"{who} for up to {tile.rows} sequences, {tile.slice} units a block ({room} of shared memory)"


def closer(tile: Tile | Spread, size: Size, chip: Chip, kind: str) -> str:
    """Why no regime runs that has its weights closer together; empty where there is none."""
    if size.staged is not None or (isinstance(tile, Tile) and tile.cluster == 1):
        return ""
    fitting = tiling.likely(size, chip, 1, 1, kind)
    one_block = any(other.cluster == 1 for other in fitting)
    if isinstance(tile, Spread):
        return "a cluster holds it, and takes longer" if fitting else "no cluster holds its weights"
    return "one block holds it, and is estimated to take longer" if one_block else "no single block holds its weights"


class Prepared(NamedTuple):
    """What a kernel is launched with."""

    values: tuple[int | float, ...]
    space: torch.Tensor | None
    """What some of them are addresses in, which lives until the launch."""


class Launch(NamedTuple):
    """One of those that a batch takes."""

    blocks: int
    directions: int
    where: tuple[int, ...] = ()
    """Of blocks that exchange through L2 the first row and direction, and all directions."""
    places: tuple[int, ...] = ()
    """What sides.cu takes, but for the address of what counts those that are taken."""

    @property
    def by_side(self) -> bool:
        """Whether there are places for blocks of either side of L2; else a block's place is its number."""
        return any(self.places[1:3])


def _launch(
    tile: Spread, chip: Chip, groups: int, directions: int, where: tuple[int, ...], sides: Sides | None
) -> Launch:
    """The launch of some groups of blocks, in each of some directions."""
    count = groups * tile.blocks
    if not tile.sided:
        return Launch(count, directions, where)
    first, second = (0, 0) if sides is None or directions > 1 else sides.deal(groups, tile.blocks)
    places = count, first * tile.blocks, second * tile.blocks, *(NOWHERE if sides is None else sides.words)
    return Launch(chip.multiprocessors if first + second else count, directions, where, places)


class Grid:
    """Launches of one kernel for a batch.

    Args:
        size, kind: as the tile was chosen for.
        halver: where `kernel` takes weights as float16, how and by which kernel they are made so before it.
        filler: where its blocks exchange through L2, and nothing halves: what fills the words of that.
        sides: of L2, by which blocks take places where `tile` says so; None: by their numbers.
    """

    def __init__(
        self, kernel: Kernel, tile: Tile | Spread, size: Size, chip: Chip, batch: int, directions: int, kind: str,
        halver: tuple[Halving, Kernel] | None = None, filler: Kernel | None = None, sides: Sides | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.tile, self.batch, self.directions = kernel, tile, batch, directions
        self.chip, self.staged = chip, size.staged is not None
        self.parts, self.words, self._counts = -(-batch // tile.rows), 0, 0
        if isinstance(tile, Tile) and (size.staged is None or kind == "forward" or tile.of_sequences):
            self.parts = tiling.parts(chip, batch, directions, tile, kind)
        if chip.early and isinstance(tile, Tile) and self.parts * tile.cluster * directions <= chip.multiprocessors:
            # What begins while another kernel ends finds few multiprocessors free, and would put two blocks on one:
            # forward of GRU 128x200x128 with TF32 products then took 215 us where it takes 150.
            self.kernel = kernel.alone(chip.shared // 2 + 1)
        self._launches = [Launch(self.parts * tile.cluster, directions)]
        if isinstance(tile, Spread):
            at_once = tile.at_once(chip)
            beside = min(directions, at_once)  # directions in one launch
            each = at_once // beside  # groups of rows in one launch
            firsts = product(range(0, directions, beside), range(0, self.parts, each))
            self._launches = [
                _launch(tile, chip, min(each, self.parts - part), beside, (part * tile.rows, first, directions), sides)
                for first, part in firsts
            ]
            self.words = -(-spreading.words(size, tile, batch, directions, kind) // 4) * 4
            self._counts, self.words = self.words, self.words + 4 * len(self._launches)
        self.halver, self._filler, self._quads = halver, filler, self.words // 4
        room = 16 * self._quads
        if halver is not None:  # behind the words through which blocks exchange lies what is made for each direction
            room += directions * halver[0].size
        self._room = laid_out((room,), torch.uint8)

    @property
    def together(self) -> int:
        """Clusters that share a batch all at once, and are dealt sequences of all lengths; 1 where they come in turns.

        In turns those of the longest sequences begin, and each leaves when its own have ended.
        """
        if not isinstance(self.tile, Tile) or self.staged:
            return 1
        return self.parts if self.parts * self.directions <= self.chip.resident(self.tile.cluster) else 1

    @property
    def sums(self) -> int:
        """Rows of the sums over the batch that backward leaves."""
        if self.tile.of_sequences:
            return self.batch
        return self.parts if isinstance(self.tile, Spread) else self.parts * self.tile.adding

    def __call__(self, stream: int, *values: int | float) -> None:
        """Launch on the current device with the fields of the kernel's argument that do not depend on the launch.

        Args:
            values: of which the third and the fourth are the addresses of each direction's weights.
        """
        self.launch(stream, self.prepared(stream, *values))

    def prepared(self, stream: int, *values: int | float) -> Prepared:
        """What `launch` launches: weights are float16 where it takes them so, and blocks have words to exchange by."""
        space, ring = None, 0
        if self.halver is not None:
            halving, make = self.halver
            space = empty(*self._room)
            ring = space.data_ptr()
            first = ring + 16 * self._quads
            made = first, first + (self.directions - 1) * halving.size
            make(stream, halving.blocks, self.directions, *values[2:4], *made, ring, self._quads)
            values = *values[:2], *made, *values[4:]
        elif self.words:
            space = empty(*self._room)
            ring = space.data_ptr()
            assert self._filler is not None, "blocks exchange through these words"
            self._filler(stream, min(self.chip.multiprocessors, -(-self._quads // 256)), 1, ring, self._quads)
        return Prepared((*values, ring) if isinstance(self.tile, Spread) else values, space)

    def launch(self, stream: int, prepared: Prepared) -> None:
        """The kernel alone."""
        for number, launch in enumerate(self._launches):
            values = *prepared.values, *launch.where
            if launch.places:
                counts = prepared.values[-1] + 4 * (self._counts + 4 * number) if launch.by_side else 0
                values = *values, counts, *launch.places
            self.kernel(stream, launch.blocks, launch.directions, *values)
