"""Sides of L2: how they are told, which groups of blocks go where, and that each place is taken once."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import whorl
from anew import made_anew
from emulation import emulated
from test_machine_code import needs_tools
from whorl.cells import library
from whorl.engines.cuda import grid, layers, sides, spreading
from whorl.engines.cuda.kernel_text import text_of
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.sides import Sides, told
from whorl.engines.cuda.source import AT_RANDOM, DRAWN, PLAIN, Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size

SMALL = Chip((9, 0), 12)
H200 = Chip((9, 0), 132)


def measured(near: float, far: float, count: int = 132, second: int = 66) -> tuple[list[int], list[int]]:
    """Cycles of a word from a first multiprocessor to each, some of them far from it; their numbers in any order."""
    draw = random.Random(1)
    times = [0] + [round(draw.gauss(near if i < count - second else far, 25)) for i in range(1, count)]
    numbers = draw.sample(range(count), count)
    return times, numbers


def test_sides_are_told_by_how_long_a_word_takes() -> None:
    times, numbers = measured(990, 1340)
    found = told(times, numbers)
    assert found is not None
    assert (found.all, len(found.second)) == (132, 66)
    assert found.second == set(numbers[66:])
    uneven = told(*measured(990, 1340, second=52))
    assert uneven is not None
    assert len(uneven.second) == 52


@pytest.mark.parametrize(
    "near, far, count, second",
    [(990, 990, 132, 66), (990, 1050, 132, 66), (990, 1340, 132, 4), (990, 1340, 20, 10)],
)
def test_where_no_two_sides_lie_apart_there_are_none(near: int, far: int, count: int, second: int) -> None:
    assert told(*measured(near, far, count, second)) is None


def test_where_not_all_multiprocessors_are_ours_there_are_no_sides() -> None:
    times, numbers = measured(990, 1340)
    assert told(times, [number + 4 for number in numbers]) is None
    left_out = numbers.index(5)
    times.pop(left_out), numbers.pop(left_out)
    assert told(times, numbers) is None


@pytest.mark.parametrize(
    "groups, blocks, dealt",
    [
        (2, 64, (1, 1)), (1, 64, (1, 0)), (4, 32, (2, 2)), (3, 32, (2, 1)), (3, 44, (1, 1)), (1, 94, (0, 0)),
        (8, 16, (4, 4)), (5, 16, (3, 2)), (1, 66, (1, 0)), (1, 67, (0, 0)),
    ],
)  # fmt: skip
def test_groups_are_dealt_evenly_as_far_as_sides_hold_them(groups: int, blocks: int, dealt: tuple[int, int]) -> None:
    assert Sides(frozenset(range(66)), 132).deal(groups, blocks) == dealt


def test_more_go_where_there_is_more_room() -> None:
    assert Sides(frozenset(range(100)), 132).deal(4, 32) == (1, 3)


def test_bits_say_the_side_of_each_multiprocessor() -> None:
    given = Sides(frozenset([0, 31, 32, 130]), 132)
    assert given.words == (1 | 1 << 31, 1, 0, 0, 1 << 2, 0, 0, 0)
    assert len(sides.NOWHERE) + 4 == sides.PLACES
    assert all(f"{name};" in text_of("sides.cu") for name in ("near[2]", "sides[8]"))


@needs_tools
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_measures_compiles_for_every_architecture(capability: tuple[int, int]) -> None:
    name, code = sides.code(Chip(capability, 108))
    assert name.encode() in code


def test_chips_without_bits_and_captures_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "_round_trips", lambda *_: pytest.fail("it is measured"))
    monkeypatch.setattr(sides, "_found", {})
    assert sides.sides(Chip((10, 0), 300), 0) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert sides.sides(H200, 0) is None
    assert sides._found == {}


def test_what_was_measured_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(sides, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sides, "_round_trips", lambda chip, index: asked.append(index) or measured(990, 1340))
    first = sides.sides(H200, 1)
    assert first is not None
    assert sides.sides(H200, 1) is first
    assert asked == [1]


def test_one_direction_has_sides_forward_without_options() -> None:
    """With options registers would be spilled forward, and blocks of two directions are told by their numbers."""
    lstm, zoneout = library.lstm.graph, Features(zoneout=(AT_RANDOM, AT_RANDOM))
    for kind, features in product(
        ("forward", "backward"), (PLAIN, zoneout, Features(noise=DRAWN), Features(mask=True))
    ):
        tile = spreading.choose(size_of(lstm, 1024, 2, features), H200, 32, 1, kind)
        assert tile is not None
        assert tile.sided is (kind == "backward" or features is PLAIN)
    tile = spreading.choose(size_of(lstm, 1024, 2), H200, 32, 1, "forward")
    assert tile is not None
    given = Sides(frozenset(range(66)), 132)
    alone = grid._launch(tile, H200, 2, 1, (0, 0, 1), given)
    assert (alone.blocks, alone.directions, alone.by_side) == (132, 1, True)
    assert alone.places == (128, 64, 64, *given.words)
    both = grid._launch(tile, H200, 1, 2, (0, 0, 2), given)
    assert (both.blocks, both.directions, both.by_side) == (64, 2, False)
    unknown = grid._launch(tile, H200, 2, 1, (0, 0, 1), None)
    assert (unknown.blocks, unknown.by_side, unknown.places) == (128, False, (128, 0, 0, *sides.NOWHERE))
    other = grid._launch(grid.beside(tile), H200, 2, 1, (0, 0, 1), given)  # layers beside each other have none
    assert (other.blocks, other.places) == (128, ())


# --- places are taken -------------------------------------------------------------------------------------------------


def on_twelve(
    given: Sides | None, order: int, folder: Path, patch: pytest.MonkeyPatch, own: Mapping[str, Any] = {}
) -> list[Tensor]:
    """Output and gradients of an LSTM of five blocks, two groups of them forward, on twelve multiprocessors.

    Args:
        own: options of the layer; with some, its sequences have lengths and resets too.
    """
    patch.setattr(emulation, "CHIP", SMALL)
    patch.setattr(emulation, "H200", replace(emulation.H200, multiprocessors=12))
    patch.setattr(emulation, "ORDER", order)

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "forward":
            made = spreading.forward(size, 8, 1, 1, 8, 1, chip.shared)
        else:
            made = spreading.backward(size, 16, 2, 1, 1, 8, chip.shared)
        return made and replace(made, sided=True)

    patch.setattr(grid, "choose", chosen)
    torch.manual_seed(0)
    layer = whorl.LSTM(6, 40, dtype=torch.float16, engine="persistent", **own)
    x = torch.randn(9, 13, 6, dtype=torch.float16, requires_grad=True)
    marks = dict(lengths=torch.arange(13) % 9 + 1, reset=torch.rand(9, 13) < 0.2) if own else {}
    with emulated(folder) as inner:
        inner.setattr(layers, "sides", lambda *_: given)
        y = layer(x, **marks)[0]
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]


def of(second: Iterable[int], count: int = 12) -> Sides:
    return Sides(frozenset(second), count)


WAYS = {
    "even": of(range(6, 12)),
    "by turns": of(range(1, 12, 2)),
    "one short": of(range(5, 12)),
    "a group on both": of((0, 3, 5)),
    "both groups on the first": of((4, 11)),
    "both groups on the second": of(range(10)),
    "nobody of the second comes": of(range(12, 24), 24),
    "nobody of the first comes": of(range(12), 24),
}
"""Which multiprocessors lie on the second side; in the last two not those that are thought to be there run blocks."""


@pytest.mark.parametrize("way", WAYS)
def test_each_place_is_taken_once_whatever_lies_where(way: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By who is near, and by others where too few are; blocks that find none end."""
    plain = on_twelve(None, 0, folder, monkeypatch)
    for order in (0, 1, 2):
        got = on_twelve(WAYS[way], order, folder, monkeypatch)
        assert [torch.equal(a, b) for a, b in zip(got, plain, strict=True)] == [True] * len(plain)


OPTIONS: dict[str, dict[str, Any]] = {
    "zoneout": dict(zoneout=0.2),
    "step": dict(recurrent_dropout=0.2, recurrent_dropout_mode="step"),
    "gate": dict(recurrent_dropout=0.2, recurrent_dropout_mode="gate"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_places_are_taken_with_options_too(option: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = on_twelve(None, 0, folder, monkeypatch, OPTIONS[option])
    for way in ("by turns", "a group on both", "nobody of the first comes"):
        got = on_twelve(WAYS[way], 1, folder, monkeypatch, OPTIONS[option])
        assert [torch.equal(a, b) for a, b in zip(got, plain, strict=True)] == [True] * len(plain)


FAULTS = {
    "who comes too late does not wait for the others": ("while (of_first + of_second < gridDim.x);", "while (false);"),
    "two take the first place that is left": ("return of_first + late;", "return of_first;"),
    "a place near the other side is taken for one of the first": (
        "return first + of_second + late - left;", "return of_second + late - left;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (right, wrong), on_host, changed = FAULTS[fault], emulation.on_host, []
    plain = on_twelve(None, 0, folder, monkeypatch)

    def faulty(source: str) -> str:
        changed.append(right in source)
        return on_host(source.replace(right, wrong))

    monkeypatch.setattr(emulation, "on_host", faulty)

    def is_found(given: Sides, order: int) -> bool:
        try:
            got = on_twelve(given, order, folder, monkeypatch)
        except AssertionError:  # they wait for each other
            return True
        return not all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))

    assert any(is_found(given, order) for given in WAYS.values() for order in (0, 1))
    assert any(changed)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_with_two_sides_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = torch.cuda.get_device_properties(0)
    chip = Chip((properties.major, properties.minor), properties.multi_processor_count)
    found = sides.sides(chip, 0)
    assert found is None or 16 <= len(found.second) <= chip.multiprocessors - 16
    if chip == H200:  # an H100 or an H200: what is measured there is no chance
        assert found is not None
        assert told(*sides._round_trips(chip, 0)) in (found, Sides(frozenset(range(132)) - found.second, 132))

    def outcome(
        given: Sides | None, cell: str, units: int, batch: int, dtype: torch.dtype, option: str
    ) -> list[Tensor]:
        made_anew(monkeypatch)
        monkeypatch.setattr(layers, "sides", lambda *_: given)
        torch.manual_seed(0)
        own = dict(device="cuda", dtype=dtype, engine="persistent", **OPTIONS.get(option, {}))
        layer = getattr(whorl, cell)(units, units, **own)
        x = torch.randn(70, batch, units, device="cuda", dtype=dtype, requires_grad=True)
        marks = {} if option in ("", *OPTIONS) else dict(lengths=torch.arange(batch, device="cuda") * 3 % 70 + 1)
        y = layer(x, **marks)[0]
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])]

    wanted = [("LSTM", 1024, 32), ("LSTM", 768, 16), ("GRU", 1024, 20), ("LSTM", 1500, 20), ("LSTM", 1024, 64)]
    wide = [(*one, torch.bfloat16, "") for one in wanted]
    wide += [
        (*wanted[0], dtype, option) for dtype in (torch.bfloat16, torch.float32) for option in (*OPTIONS, "lengths")
    ]
    for one in [*wide, (*wanted[2], torch.bfloat16, "lengths"), (*wanted[4], torch.bfloat16, "step")]:
        plain = outcome(None, *one)
        for given in [found] * 3 + [Sides(frozenset(range(0, chip.multiprocessors, 3)), chip.multiprocessors)]:
            assert all(map(torch.equal, outcome(given, *one), plain)), one
