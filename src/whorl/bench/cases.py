"""What is measured: the grid of cells, sizes and precisions, the three passes, and how to choose among them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

import torch

from whorl.errors import InputError

CELLS = ("lstm", "gru")
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = {
    "train": "forward, squared error of all outputs, backward to the input and every weight",
    "forward": "forward alone, in train mode, keeping what a backward pass needs",
    "inference": "forward alone, without gradient, in eval mode",
}
_SHAPES = [
    *((1, 32, 30, units) for units in (128, 512, 1024)),
    *((1, 128, 30, units) for units in (128, 512, 1024)),
    *((1, 128, 200, units) for units in (128, 512, 1024)),
    *((3, 128, 30, units) for units in (512, 1024)),
    *((3, 128, 200, units) for units in (512, 1024)),
    *((2, 20, 35, units) for units in (650, 1500)),
    (1, 1, 100, 512),
    (1, 512, 50, 256),
    (1, 64, 100, 2048),
    (1, 62, 200, 168),
    (1, 16, 1024, 768),
]
_QUICK = [(1, 32, 30, 128), (1, 32, 30, 512), (1, 1, 100, 512)]


@dataclass(frozen=True)
class Case:
    """One layer on one size of input; inputs are as wide as the layer."""

    cell: str
    layers: int
    batch: int
    time: int
    units: int
    precision: str

    @property
    def shape(self) -> str:
        """As `1x32x30x128`: layers, batch, time, units."""
        return f"{self.layers}x{self.batch}x{self.time}x{self.units}"

    @property
    def name(self) -> str:
        """As `lstm-1x32x30x128-bf16`."""
        return f"{self.cell}-{self.shape}-{self.precision}"

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def cost(self) -> float:
        """About how many seconds the case takes to measure on an H200: what is so each time, launches, products."""
        work = self.batch * self.units**2 * (1 if self.precision == "fp32" else 0.3)
        return 1.3 + self.layers * self.time * (0.01 + 1.2e-10 * work)

    @staticmethod
    def of(name: str) -> "Case | None":
        """The case of this name, in the grid or not; None where this is no name of a case."""
        found = re.fullmatch(r"(\w+)-([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})-(\w+)", name, re.ASCII)
        if found is None or found[1] not in CELLS or found[6] not in PRECISIONS:
            return None
        layers, batch, time, units = map(int, found.groups()[1:5])
        return Case(found[1], layers, batch, time, units, found[6])


def _grid(shapes: Iterable[tuple[int, int, int, int]]) -> list[Case]:
    return [Case(cell, *shape, precision) for cell, shape, precision in product(CELLS, shapes, PRECISIONS)]


GRID = _grid(_SHAPES)
QUICK = _grid(_QUICK)
_POSITIONS = {case: position for position, case in enumerate(GRID)}


def select(patterns: Sequence[str], quick: bool = False) -> list[Case]:
    """The cases of the grid that one of the patterns describes, in the grid's order; without patterns all of them.

    A pattern describes a case if each of its parts, between dashes, is a part of the case's name; `*` stands for
    anything.  The whole name of a case that is not in the grid adds it.

    >>> [case.name for case in select(["lstm-*x30x128-fp32", "gru-1x2x3x4-bf16"])]
    ['lstm-1x32x30x128-fp32', 'lstm-1x128x30x128-fp32', 'gru-1x2x3x4-bf16']

    Args:
        quick: the few cases of the quick grid, in place of the whole one.

    Raises:
        InputError: a pattern that describes no case.
    """
    grid = QUICK if quick else GRID
    chosen = set() if patterns else set(grid)
    for pattern in patterns:
        named = Case.of(pattern)
        found = {case for case in grid if _describes(pattern, case)} or ({named} if named else set())
        if not found:
            raise InputError(
                f"case {pattern!r} is none of the {len(grid)}{' quick' * quick} cases: write parts of a name such as "
                f"{grid[0].name}, or the whole name of a case of your own."
            )
        chosen |= found
    return sorted(chosen, key=position)


def position(case: Case) -> tuple[int, str]:
    """By which cases are sorted: as they stand in the grid, others after it by their names."""
    return _POSITIONS.get(case, len(_POSITIONS)), case.name


def _describes(pattern: str, case: Case) -> bool:
    parts = case.name.split("-")
    return all(any(fnmatchcase(part, wanted) for part in parts) for wanted in pattern.split("-"))


def shard(cases: Sequence[Case], which: str) -> list[Case]:
    """Part i of n of the cases, for `which` = "i/n"; the parts take about the same time, and together they are all.

    >>> len(shard(GRID, "1/2")) + len(shard(GRID, "2/2")) == len(GRID)
    True

    Raises:
        InputError: no such part.
    """
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", which, re.ASCII)
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count:
        raise InputError(f"shard is {which!r}: write i/n with i from 1 to n, for example 1/4.")
    loads = [0.0] * count
    mine = set()
    for case in sorted(cases, key=lambda case: -case.cost):
        lightest = loads.index(min(loads))
        loads[lightest] += case.cost
        if lightest == index - 1:
            mine.add(case)
    return [case for case in cases if case in mine]
