"""Tiles that `whorl tune` measured and found faster than the estimated ones, kept beside the compiled kernels.

An entry holds for one chip, one state of the kernels' sources, one size of layer, batch, directions and kind of
kernel; one that is for something else, damaged, or no tile that fits is as if it were not there.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from pathlib import Path

from whorl.engines.cuda import store
from whorl.engines.cuda.kernel_text import texts
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile
from whorl.settings import settings

_NAME = "tiles.json"


def found(
    candidates: Callable[..., list[Tile | Spread]], size: Size, chip: Chip, batch: int, directions: int, kind: str
) -> Tile | Spread | None:
    """The tile that was kept, where it is one of those that fit.

    Args:
        candidates: all of them, of what follows.
    """
    known = _read(settings.cache / "cuda" / _NAME)
    numbers = known and known.get(_key(size, chip, batch, directions, kind))  # a key asks for the kernels' sources
    if not numbers:
        return None
    fitting = candidates(size, chip, batch, directions, kind)
    return next((tile for tile in fitting if _numbers(tile) == numbers), None)


def keep(tile: Tile | Spread, size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Path:
    """Keep a tile from now on; the file where it is kept.

    Raises:
        KernelError: the folder is not private or cannot be written.
    """
    path = store.private_folder() / _NAME
    known = _read(path) | {_key(size, chip, batch, directions, kind): _numbers(tile)}
    store.write(path, json.dumps(known, indent=1).encode())
    return path


def _key(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> str:
    return json.dumps([kind, chip, size, batch, directions, _sources()], default=lambda cell: cell.fingerprint)


def _numbers(tile: Tile | Spread) -> dict[str, int | str]:
    return {"regime": type(tile).__name__.lower(), **asdict(tile)}


@cache
def _sources() -> str:
    return blake2b("\0".join(texts()).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> dict:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
