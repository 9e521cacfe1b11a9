"""The random masks of a layer, drawn a second time: Philox-4x32-10 in numpy, and the counters that whorl.noise names.

A word below round(p * 2**32) is an event of probability p.  Its counter is (unit, step, row of the batch, tag) with
tag = purpose | direction << 8 | layer << 16, its key the seed.  Four units of one word each, or two of two, share a
counter, which is numbered by them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loops import Loop

INPUT, RECURRENT, RECURRENT_FROM_GATE_4, ZONEOUT = range(4)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Iterable[Any], key: tuple[int, int]) -> list[np.ndarray]:
    """Four words of 32 bits for each counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        counter: four numbers, or arrays that broadcast.
    """
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in np.broadcast_arrays(*counter))
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def words(
    seed: int, purpose: int, count: int, index: int, loop: Loop, steps: Iterable[int], rows: Iterable[int], width: int
) -> Any:
    """[count, steps, rows, width] words for one layer and direction, so many of a unit."""
    layer, direction = divmod(index, loop.directions)
    unit, step, row = np.arange(width), np.array([*steps])[:, None, None], np.array([*rows])[:, None]
    tag, together = purpose | direction << 8 | layer << 16, {1: 4, 2: 2, 3: 1, 4: 1}[count]
    drawn = np.stack(philox((unit // together, step, row, tag), (seed % 2**32, seed >> 32)))
    return np.stack([drawn[unit % together * count + word, ..., unit].transpose(1, 2, 0) for word in range(count)])


def scaled(drawn: np.ndarray, probability: float) -> Tensor:
    """What dropout multiplies with."""
    kept = torch.from_numpy(drawn >= round(probability * 2**32)).double()
    return kept / (1 - probability) if probability < 1 else kept


def counted(seed: int, loop: Loop, options: Mapping[str, Any], time: int, rows: Iterable[int]) -> dict[str, Any]:
    """The masks that whorl draws by counting, for each layer and direction, in the shapes of `dropout_masks`.

    Args:
        options: of the layer.
        rows: the place of each sequence in the user's batch.
    """
    rows, count, steps = [*rows], loop.num_layers * loop.directions, range(time)
    width, found = loop.width(loop.all_states[0]), {}
    if p := options.get("input_dropout", 0):
        below = [loop.inputs if index < loop.directions else width * loop.directions for index in range(count)]
        found["input_dropout"] = [
            scaled(words(seed, INPUT, 1, index, loop, [0], rows, below[index])[0, 0], p) for index in range(count)
        ]
    if p := options.get("recurrent_dropout", 0):
        masks = []
        for index in range(count):
            if loop.recurrent_dropout_mode == "gate":
                gates = len(loop.recurrent)
                drawn = words(seed, RECURRENT, min(gates, 4), index, loop, [0], rows, width)[:, 0]
                if gates > 4:
                    more = words(seed, RECURRENT_FROM_GATE_4, gates - 4, index, loop, [0], rows, width)[:, 0]
                    drawn = np.concatenate([drawn, more])
            elif loop.recurrent_dropout_mode == "shared":
                drawn = words(seed, RECURRENT, 1, index, loop, [0], rows, width)[0, 0]
            else:
                drawn = words(seed, RECURRENT, 1, index, loop, steps, rows, width)[0]
            masks.append(scaled(drawn, p))
        found["recurrent_dropout"] = masks
    for place, state in enumerate(loop.all_states):
        chances = loop.zoneout
        if p := chances.get(state, 0.0) if isinstance(chances, Mapping) else chances:
            found[f"zoneout_{state}"] = [
                torch.from_numpy(
                    words(seed, ZONEOUT, len(loop.all_states), index, loop, steps, rows, loop.width(state))[place]
                    < round(p * 2**32)
                ).double()
                for index in range(count)
            ]
    return found


def by_torch(loop: Loop, options: Mapping[str, Any], between: tuple[int, ...]) -> tuple[dict[str, list[Tensor]], int]:
    """What torch's generator gives, and in which order: dropout between layers, dropped weights, the seed of the rest.

    Args:
        between: shape of the output of a layer, without its width.
    """
    found, width = {}, loop.width(loop.all_states[0])
    if p := options.get("dropout", 0):
        ones = torch.ones(*between, width * loop.directions, dtype=torch.float64)
        found["dropout"] = [F.dropout(ones, p) for _ in range(loop.num_layers - 1)]
    if p := options.get("weight_drop", 0):
        ones = torch.ones(len(loop.recurrent) * loop.units, width, dtype=torch.float64)
        found["weight_drop"] = [F.dropout(ones, p) for _ in range(loop.num_layers * loop.directions)]
    return found, int(torch.randint(2**63 - 1, ()))
