"""Tiles forward that were found by measuring: of LSTM and GRU, where a cluster holds their weights.

Some warps of each 16 units multiply and others compute the cell, and each sub-tile is 8 sequences.  Estimates do not
tell well how many of each are best (tiling.py); these took less time than what is estimated to be the fastest: of some
900 kernels on one H200 (2026-11-27, 100 steps with all products), and of 200 that were measured anew, other sizes too.
In true float32 GRU takes 0.62 to 0.96 of the time, LSTM 0.75 to 0.98 (1.02 with 200 units at batch 100); with TF32
products LSTM of 64 units 0.69, others 0.79 to 0.99; in two bytes 0.79 (GRU, 384 units at batch 128) to 0.99.
"""

from bisect import bisect_left

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
_FULL = 0.875  # of a column from 128 on: with fewer sequences, of which smaller clusters have 8, others take less time


def forward(size: Size, chip: Chip, batch: int, directions: int) -> Tile | None:
    """The tile that was measured for a size and a chip; None where none was, or what is estimated is as fast."""
    many = batch * directions
    row, column = bisect_left(_UNITS, size.units), bisect_left(_BATCH, many)
    if chip != Chip((9, 0), 132) or row == len(_UNITS) or column == len(_BATCH) or 2 * size.units <= _UNITS[0]:
        return None
    if not size.exact and many <= _FULL * _BATCH[column] and _BATCH[column] >= 128:
        return None
    found = _found(size, row, column)
    if found == "-":
        return None
    cluster, subs, splits, pointwise = map(int, found.split("."))
    return tiling.forward(size, cluster, subs, splits, chip.shared, subs=subs, pointwise=pointwise)


def spread(size: Size, chip: Chip, batch: int, directions: int) -> Spread | None:
    """The tile of blocks that exchange through L2 where it took less time than a cluster's; None elsewhere.

    LSTM with 512 units at batch 128, of whose clusters seven run at once and so have 24 sequences each: in bfloat16
    1.39 us a step and saved 1.49, in clusters 1.50 and 1.58, with TF32 products 1.75 and 1.90, 1.86 and 1.99; with 480
    units 1.47 and 1.54, 1.54 and 1.61; at batch 112, where clusters have 16, 1.44 and 1.10 (H200, 2026-11-28).  Two
    directions, whose blocks take no places by their side, were not timed.
    """
    if chip != Chip((9, 0), 132) or not (448 < size.units <= _UNITS[-1] and 112 < batch <= 128 and directions == 1):
        return None
    if not size.bare or not _alike(size) or size.recurrent < 4:
        return None
    parts = 2 if size.element == 2 else 1
    return spreading.forward(size, 32, 2, 1, 8, 8, chip.shared, parts=parts, wide=True)


def worth(size: Size) -> float:
    """What steps of these tiles count for, of those that are estimated to be the fastest.

    Layers beside each other have not these tiles, and gain more than most of these: two of LSTM with 128 units at batch
    32 took 0.82 of the time (bfloat16).  Not more than those of LSTM with few units and TF32 products.
    """
    return 0.7 if size.element == 4 and size.recurrent > 3 and size.units <= _UNITS[0] and not size.exact else 1.0


def _alike(size: Size) -> bool:
    """Whether a cell is as LSTM and GRU: float32 as float16, with scales for all steps where it is not exact."""
    halves = size.element == 2 or (size.halves and (size.exact or not size.by_step))
    return halves and size.gate == size.element and size.states == size.recurrent - 2


def _found(size: Size, row: int, column: int) -> str:
    """What `_TILES` has, and with options what was measured with them; "-" for nothing."""
    kind = "rounded" if size.element == 2 else "exact" if size.exact else "scaled"
    if not _alike(size):
        return "-"
    if size.plain:
        lines = _TILES.get((kind, size.recurrent))
        return lines.split("\n")[1 + row].split()[column] if lines else "-"
    if size.recurrent < 4 or size.staged or size.masks or size.exact:
        return "-"
    where = _UNITS[row], _BATCH[column]
    if where == (256, 128):
        # 100 steps that save for backward 0.93 to 0.98 of the time in two bytes, but 0.99 with lengths, whose inference
        # takes 1.03; by gate with TF32 products 0.97, all options at once 0.88, others 0.94 to 1.02, lengths 1.05
        return "8.2.2.4" if (not size.ragged if kind == "rounded" else size.bits or size.many) else "-"
    # where no sub-tile without sequences leaves registers to those that multiply: lengths 0.92, by gate 0.95, peephole
    # 0.95, all options at once 0.97
    if kind == "scaled" and where == (512, 32) and (size.ragged or size.bits or size.many or size.vectors):
        return "16.1.2.2"
    return "-"
