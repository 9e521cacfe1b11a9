"""Tiles forward that were found by measuring: of LSTM and GRU, where a cluster holds their weights.

Some warps of each 16 units multiply and others compute the cell, and each sub-tile is 8 sequences.  Estimates do not
tell well how many of each are best (tiling.py); these took less time than what is estimated to be the fastest: of some
900 kernels on one H200 (2026-11-27, 100 steps with all products), and of 200 that were measured anew, other sizes too.
In true float32 GRU takes 0.62 to 0.96 of the time, LSTM 0.75 to 0.98 (1.02 with 200 units at batch 100); with TF32
products LSTM of 64 units 0.69, others 0.79 to 0.99; in two bytes 0.79 (GRU, 384 units at batch 128) to 0.99.
"""

from bisect import bisect_left
from dataclasses import replace

from whorl.engines.cuda import spreading, tiling
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile

_UNITS, _BATCH = (64, 128, 256, 384, 512), (16, 32, 64, 128, 256)
"""Up to which a row and a column stand: units, and sequences of both directions."""
_TILES = {
    ("rounded", 4): """
        -         -         4.1.2.2   4.1.2.4   2.1.2.2
        8.1.2.4   8.1.2.4   8.1.2.2   4.1.2.4   -
        -         -         8.1.2.4   8.2.2.4   8.3.2.2
        -         -         -         8.2.2.2   8.3.2.2
        -         -         -         -         -
    """,
    ("rounded", 3): """
        -         -         4.1.2.2   4.1.2.4   2.1.2.2
        8.1.2.2   8.1.2.4   8.1.2.4   4.1.2.2   4.2.2.4
        -         -         8.1.2.4   4.1.2.2   -
        -         -         8.1.2.2   8.2.2.2   8.3.2.2
        -         -         -         16.3.2.2  -
    """,
    ("scaled", 4): """
        4.1.2.2   4.1.2.2   4.1.2.2   4.1.2.2   2.1.2.2
        8.1.2.4   8.1.2.2   8.1.2.2   4.1.2.2   8.3.2.4
        -         -         8.1.2.2   8.2.2.4   8.3.2.4
        -         -         -         8.2.2.2   8.3.2.2
        -         -         -         16.3.4.2  -
    """,
    ("scaled", 3): """
        4.1.2.2   4.1.2.2   4.1.2.2   4.1.2.2   2.1.2.2
        8.1.2.2   8.1.2.4   8.1.2.2   4.1.2.2   4.2.2.4
        -         -         8.1.2.2   8.2.2.4   8.3.2.4
        -         -         8.1.2.2   8.2.2.2   8.3.2.2
        -         -         -         16.3.2.2  -
    """,
    ("exact", 4): """
        2.1.2.2   2.1.2.2   4.1.2.4   4.1.2.4   2.1.2.2
        8.1.2.2   8.1.2.4   8.1.4.2   8.2.2.4   4.2.2.2
        16.1.4.2  16.1.4.2  -         8.2.4.2   8.3.4.2
        -         -         -         -         -
        -         -         -         -         -
    """,
    ("exact", 3): """
        2.1.2.2   2.1.2.2   2.1.2.2   2.1.2.2   2.1.2.2
        8.1.2.2   8.1.2.2   8.1.2.2   4.1.2.2   4.2.2.4
        16.1.4.2  16.1.4.2  8.1.4.2   8.2.4.2   8.3.4.2
        -         -         -         8.2.2.2   -
        -         -         16.2.4.2  -         -
    """,
}
"""Blocks of the cluster, sub-tiles, and of each 16 units the warps that multiply and those that compute the cell, by
what is multiplied and the gates, without options; a line for each of `_UNITS`."""
_BY_STEP = {(4, 256, 128): "8.3.2.4", (4, 512, 32): "16.3.4.2", (3, 512, 32): "16.3.4.2"}
"""The same where states may be of any size: LSTM with softplus 100 steps 113 us and 119, 106 and 114, GRU with relu 88
and 95 (5ab927c, one H200). Others have those of `_TILES`, with which an earlier text took 0.72 to 0.99 of what is
estimated to be the fastest, but GRU with up to 128 units 0.81 to 1.08."""
_FULL = 0.875  # of a column from 128 on: with fewer sequences, of which smaller clusters have 8, others take less time


def forward(size: Size, chip: Chip, batch: int, directions: int) -> Tile | None:
    """The tile that was measured for a size and a chip; None where none was, or what is estimated is as fast."""
    place = _place(size, chip, batch * directions)
    found = "-" if place is None else _found(size, *place)
    if found == "-":
        return None
    cluster, subs, splits, pointwise = map(int, found.split("."))
    return tiling.forward(size, cluster, subs, splits, chip.shared, subs=subs, pointwise=pointwise)


def backward(size: Size, chip: Chip, batch: int, directions: int) -> Tile | None:
    """The same backward, of LSTM with options."""
    place = _place(size, chip, batch * directions)
    if place is None or not size.optional or size.states != 2:
        return None
    where = _UNITS[place[0]], _BATCH[place[1]]
    if size.bits and size.drawn and size.element == 4 and where in _BY_GATE:
        cluster, tiles, warps = _BY_GATE[where]
        return tiling.backward(size._replace(halves=False), cluster, tiles, warps, chip.shared, splits=2)
    if size.many and size.element == 2 and where == (256, 32):  # all options at once 94 us and 101
        return tiling.backward(size, 16, 1, 4, chip.shared, splits=2)
    return None


_BY_GATE = {(256, 32): (16, 1, 4), (256, 128): (8, 2, 8)}
"""Blocks of the cluster, tiles and warps that multiply TF32 itself: 94 us for 100 steps and 98, and 194 and 197, and no
weights become float16 before them.  Spread the latter took 178, but what a graph has beside a cluster's then comes
behind it: a train step 538 us and not 519."""


def spread(size: Size, chip: Chip, batch: int, directions: int) -> Spread | None:
    """The tile of blocks that exchange through L2 where it took less time than a cluster's; None elsewhere.

    LSTM with 512 units at batch 128, of whose clusters seven run at once and so have 24 sequences each: in bfloat16
    1.39 us a step and saved 1.49, in clusters 1.50 and 1.58, with TF32 products 1.75 and 1.90, 1.86 and 1.99; with 480
    units 1.47 and 1.54, 1.54 and 1.61; at batch 112, where clusters have 16, 1.44 and 1.10 (H200, 2026-11-28).  Two
    directions, whose blocks take no places by their side, were not timed.
    """
    if chip != Chip((9, 0), 132) or not (448 < size.units <= _UNITS[-1] and 112 < batch <= 128 and directions == 1):
        return None
    if not _alike(size) or size.recurrent < 4 or _scaled_anew(size):
        return None
    if size.bits and size.drawn and size.element == 2:  # masks by gate: 100 steps 208 us, in clusters 238
        return spreading.forward(size, 32, 2, 1, 8, 4, chip.shared)
    zoneout = size.drawn and size.element == 2 and size.back < _OF_ZONEOUT
    if not (size.bare or zoneout):
        return None
    parts = 2 if size.element == 2 else 1
    tile = spreading.forward(size, 32, 2, 1, 8, 8, chip.shared, parts=parts, wide=True)
    return replace(tile, beside=True, sided=True, lull=110) if tile is not None and zoneout else tile


_OF_ZONEOUT = 8
"""Registers backward that options take where zoneout is all there is: 1.64 us a step and saved 1.58 to 1.62, in
clusters 1.66 and 1.75.  So spread dropout by step took 1.71 and 1.75 to 1.79, in clusters 1.63 and 1.79, a mask 1.58
and 2.14, 1.68 and 1.82, resets 1.93 and 1.96, 1.66 and 1.78 (H200s)."""


def _place(size: Size, chip: Chip, many: int) -> tuple[int, int] | None:
    """The line and the column of `_TILES` for so many sequences of both directions; None where none stands."""
    row, column = bisect_left(_UNITS, size.units), bisect_left(_BATCH, many)
    if chip != Chip((9, 0), 132) or row == len(_UNITS) or column == len(_BATCH) or 2 * size.units <= _UNITS[0]:
        return None
    if not size.exact and many <= _FULL * _BATCH[column] and _BATCH[column] >= 128:
        return None
    return row, column


def worth(size: Size) -> float:
    """What steps of these tiles count for, of those that are estimated to be the fastest.

    Layers beside each other have not these tiles, and gain more than most of these: two of LSTM with 128 units at batch
    32 took 0.82 of the time (bfloat16).  Not more than those of LSTM with few units and TF32 products.
    """
    return 0.7 if size.element == 4 and size.recurrent > 3 and size.units <= _UNITS[0] and not size.exact else 1.0


def _alike(size: Size) -> bool:
    """Whether a cell is as LSTM and GRU: float32 as float16, exact or not."""
    halves = size.element == 2 or size.halves
    return halves and size.gate == size.element and size.states == size.recurrent - 2


def _scaled_anew(size: Size) -> bool:
    """Whether such a cell's states, which are no exact products' either, have scales anew at each step."""
    return size.element == 4 and size.by_step and not size.exact


def _found(size: Size, row: int, column: int) -> str:
    """What `_TILES` has, and with options what was measured with them; "-" for nothing."""
    kind = "rounded" if size.element == 2 else "exact" if size.exact else "scaled"
    where = _UNITS[row], _BATCH[column]
    if kind == "rounded" and where == (256, 32) and size.many and size.optional:  # all options at once 65 us and 71
        return "16.1.2.2"
    if not _alike(size):
        return "-"
    own = (size.recurrent, *where)
    if _scaled_anew(size) and (not size.plain or own in _BY_STEP):  # with options none was measured
        return _BY_STEP[own] if size.plain else "-"
    if size.plain:
        lines = _TILES.get((kind, size.recurrent))
        return lines.split("\n")[1 + row].split()[column] if lines else "-"
    if size.recurrent < 4 or size.staged or size.masks or size.exact:
        return "-"
    if where == (256, 128) and kind == "rounded":
        # 100 steps that save for backward 0.93 to 0.98 of the time in two bytes, but 0.99 with lengths, whose inference
        # takes 1.03
        return "8.2.2.4" if not size.ragged else "-"
    if where == (256, 128):
        # by gate with TF32 products 0.94, with four warps of the cell 0.97; all options at once 0.88 with those; others
        # 0.94 to 1.02, lengths 1.05
        return "8.2.2.2" if size.bits and size.drawn else "8.2.2.4" if size.bits or size.many else "-"
    if kind == "scaled" and where == (256, 32):  # by gate 69 us and 70
        return "16.1.4.4" if size.bits and size.drawn else "-"
    # where no sub-tile without sequences leaves registers to those that multiply: lengths 0.92, by gate 0.95, peephole
    # 0.95, all options at once 0.97
    if kind == "scaled" and where == (512, 32) and (size.ragged or size.bits or size.many or size.vectors):
        return "16.1.2.2"
    return "-"
