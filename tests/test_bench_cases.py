"""The grid, how its cases are named and chosen, and how they are dealt into shards."""

from itertools import product

import pytest
import torch

from whorl.bench.cases import CELLS, GRID, QUICK, Case, position, select, shard
from whorl.errors import InputError

SHAPES = """
1x32x30x128 1x32x30x512 1x32x30x1024 1x128x30x128 1x128x30x512 1x128x30x1024 1x128x200x128 1x128x200x512 1x128x200x1024
3x128x30x512 3x128x30x1024 3x128x200x512 3x128x200x1024 2x20x35x650 2x20x35x1500 1x1x100x512 1x512x50x256 1x64x100x2048
1x62x200x168 1x16x1024x768
""".split()
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def test_the_grid_has_every_cell_size_and_precision_once() -> None:
    names = [f"{cell}-{shape}-{precision}" for cell, shape, precision in product(CELLS, SHAPES, PRECISIONS)]
    assert [case.name for case in GRID] == names
    assert {case.precision: case.dtype for case in GRID} == PRECISIONS
    assert set(QUICK) < set(GRID)


def test_a_name_is_the_case() -> None:
    assert Case.of("gru-3x128x200x1024-bf16") == Case("gru", 3, 128, 200, 1024, "bf16")
    assert all(Case.of(case.name) == case for case in GRID)
    for name in ("rnn-1x1x1x1-fp32", "lstm-1x1x1-fp32", "lstm-0x1x1x1-fp32", "lstm-1x1x1x1-fp64", "lstm-1x1x1x1", ""):
        assert Case.of(name) is None
    assert Case.of("lstm-1x1x1x٣-fp32") is None
    assert Case.of("lstm-1x1x1x12345678-fp32") is None


@pytest.mark.parametrize(
    "patterns, count",
    [
        ([], 160),
        (["lstm"], 80),
        (["fp32"], 40),
        (["gru-bf16"], 20),
        (["gru-bf16", "bf16-gru"], 20),
        (["1x32x*"], 24),
        (["*x512-tf32-lstm"], 6),
        (["lstm-1x32x30x128-fp32"], 1),
        (["lstm", "gru-fp16", "gru-1x1x1x1-fp16"], 101),
    ],
)
def test_patterns_choose_by_parts_of_the_name(patterns: list[str], count: int) -> None:
    chosen = select(patterns)
    assert len(chosen) == count
    assert chosen == sorted(chosen, key=position)
    if count < 100:
        assert [case for case in GRID if case in chosen] == chosen


def test_the_quick_grid_is_chosen_from_alone() -> None:
    assert select([], quick=True) == QUICK
    assert {case.cell for case in select(["lstm"], quick=True)} == {"lstm"}
    with pytest.raises(InputError, match="none of the 24 quick cases"):
        select(["3x128x200x1024"], quick=True)


@pytest.mark.parametrize("pattern", ["lst", "fp64", "", "lstm--fp32", "lstm-1x1x1x1", "lstm-gru", "1X32X30X128"])
def test_a_pattern_that_describes_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(InputError, match="none of the 160 cases: write parts of a name such as lstm-1x32x30x128-fp32"):
        select(["lstm", pattern])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 200])
def test_shards_are_disjoint_are_all_and_take_the_same_time(count: int) -> None:
    shards = [shard(GRID, f"{index}/{count}") for index in range(1, count + 1)]
    assert sorted((case for part in shards for case in part), key=position) == GRID
    costs = [sum(case.cost for case in part) for part in shards]
    assert max(costs) - min(costs) <= max(case.cost for case in GRID)
    assert all(part == [case for case in GRID if case in part] for part in shards)


@pytest.mark.parametrize("which", ["4/3", "0/3", "3", "1/0", "a/b", "1/2/3", "-1/2", "", "1/1000000000", "1 /2", "١/٢"])
def test_a_shard_that_is_none_is_an_error(which: str) -> None:
    with pytest.raises(InputError, match="write i/n with i from 1 to n"):
        shard(GRID, which)
