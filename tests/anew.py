"""What a test changes of layers: their tiles, and that those that have run already run as if they had not."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from whorl.cells.cell import Graph
from whorl.engines import taped
from whorl.engines.cuda import grid, launch, layers
from whorl.engines.cuda.tiling import Chip, Size, Tile


def with_tiles(
    patch: pytest.MonkeyPatch, make: Callable[[Graph, Size, int, str], Tile | None],
    kinds: Sequence[str] = ("forward", "backward"),
) -> None:  # fmt: skip
    """Every layer has the tiles that are made for its cell, size, shared memory and kind; other kinds those chosen."""
    choose = grid.choose

    def chosen(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Any:
        if kind not in kinds:
            return choose(size, chip, batch, directions, kind)
        assert size.staged is not None
        made = make(size.staged, size, chip.shared, kind)
        assert made is not None, f"no such tile {kind}"
        return made

    patch.setattr(grid, "choose", chosen)


def made_anew(patch: pytest.MonkeyPatch, loaded: bool = False) -> None:
    """Every plan is made ready anew, those too that layers remember.

    Args:
        loaded: its kernels are loaded anew as well: their source is another.
    """
    patch.setattr(layers, "_prepared", {})
    patch.setattr(taped, "run_like", lambda *given: ())
    if loaded:
        patch.setattr(launch, "_loaded", {})
