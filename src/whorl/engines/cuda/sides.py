"""Which multiprocessors lie at which half of a GPU's L2, found by measuring, and which groups of blocks go there.

A large GPU's L2 has two halves, each with half of the multiprocessors.  On an H200 a word from one to another and back
takes 730 to 920 cycles where both are of one side, and 1,090 to 1,260 where they are not; which multiprocessors those
are differs from card to card, and no driver tells.
"""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch

from whorl.engines.cuda import store
from whorl.engines.cuda.kernel_text import kernel
from whorl.engines.cuda.launch import Kernel, loaded
from whorl.engines.cuda.tiling import Chip

PLACES = 12
"""Numbers in the argument of a kernel, as sides.cu has them."""
_MOST, _WORD, _BYTES = 256, 32, 8 * 1024
"""Multiprocessors that have a bit, bits of a word, and bytes of what passes between two multiprocessors in trips.cu."""
_LEAST, _APART = 16, 1.1
"""Multiprocessors of a side, and how much longer a word takes to the nearest of the other than to its own farthest."""


class Sides(NamedTuple):
    """The multiprocessors of a GPU."""

    second: frozenset[int]
    """Those of the second side."""
    all: int
    """How many there are."""

    def deal(self, groups: int, blocks: int) -> tuple[int, int]:
        """How many of so many groups of blocks each side has for itself; what is left over lies on both."""
        room = (self.all - len(self.second)) // blocks, len(self.second) // blocks
        first = min(room[0], max(-(-groups // 2), groups - room[1]))
        return first, min(room[1], groups - first)

    @property
    def words(self) -> tuple[int, ...]:
        """A bit for each multiprocessor."""
        bits = sum(1 << number for number in self.second)
        return tuple(bits >> first & 0xFFFFFFFF for first in range(0, _MOST, _WORD))


NOWHERE = (0,) * (_MOST // _WORD)
"""The bits where nothing is known."""
_found: dict[tuple[Chip, int], Sides | None] = {}
_finding = Lock()


def sides(chip: Chip, index: int) -> Sides | None:
    """Those of a GPU, measured at the first call, which takes some 4 ms; None where it has none that could be told.

    Args:
        index: torch's number of the GPU.
    """
    with _finding:
        if (chip, index) not in _found:
            if chip.multiprocessors > _MOST or torch.cuda.is_current_stream_capturing():  # which nothing can wait for
                return None
            _found[chip, index] = told(*_round_trips(chip, index))
        return _found[chip, index]


def told(times: Sequence[int], numbers: Sequence[int]) -> Sides | None:
    """The sides.

    Args:
        times: of a word from the first of some multiprocessors, which has 0, to each and back.
        numbers: of these multiprocessors.
    """
    if sorted(numbers) != list(range(len(numbers))):  # not all are ours
        return None
    ordered = sorted(zip(times, numbers, strict=True))
    ways = range(_LEAST, len(ordered) - _LEAST + 1)
    if not ways:
        return None
    first = max(ways, key=lambda at: ordered[at][0] - ordered[at - 1][0])  # of the other side
    if ordered[first][0] < _APART * ordered[first - 1][0]:
        return None
    return Sides(frozenset(number for _, number in ordered[first:]), len(numbers))


def code(chip: Chip) -> tuple[str, bytes]:
    """Name and machine code of what measures, from the store or compiled; needs no GPU."""
    name = "round_trips"
    return name, store.kernel(kernel("trips.cu", [f"#define KERNEL {name}"]), name, chip.architecture)


def _round_trips(chip: Chip, index: int) -> tuple[list[int], list[int]]:
    """Cycles of a word from the multiprocessor of a first block to that of each and back, and their numbers."""
    name, machine_code = code(chip)

    def make() -> Kernel:
        return Kernel(machine_code, name, index, 32, chip.shared // 2 + 1, 1, "3Q", together=True)  # one on each

    count, device = chip.multiprocessors, torch.device("cuda", index)
    with torch.cuda.device(index):
        words = torch.zeros(count * _BYTES, dtype=torch.uint8, device=device)
        found = torch.zeros(2, count, dtype=torch.int32, device=device)
        run = loaded((name, index), make)
        run(torch.cuda.current_stream().cuda_stream, count, 1, words.data_ptr(), *(row.data_ptr() for row in found))
        times, numbers = found.tolist()
    return times, numbers
