"""What kernels/draw_bits.cu and kernels/draw.cu draw, run on the host: bit for bit what `whorl.noise` counts."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cubins import cubin
from emulation import Kernel, compiled
from test_machine_code import listed, needs_tools
from whorl.engines.cuda import beside, options
from whorl.noise import RECURRENT, ZONEOUT, drawn, tag, threshold

SEED = torch.tensor(-(2**62) + 12345)


def truth(
    units: int, time: int, rows: Tensor, states: int, zones: dict[int, int], noise: int | None, place: tuple[int, int]
) -> Tensor:
    """[time, batch, pairs]: what is read of each pair's two bytes, by `whorl.noise`."""
    pairs = -(-units // 2)
    unit, step, row = torch.arange(2 * pairs), torch.arange(time)[:, None, None], rows[:, None]

    def words(purpose: int, count: int) -> tuple[Tensor, ...]:
        return drawn(SEED, count, 2 * pairs, step, row, tag(purpose, *place))

    bits = torch.zeros(time, len(rows), 2 * pairs, dtype=torch.int64)
    kept = words(ZONEOUT, states)
    for state, below in zones.items():
        bits += (kept[state] < below).long() << state
    bits <<= 4 * (unit % 2)
    if noise is not None:
        enters = words(RECURRENT, 1)[0] >= noise
        bits += enters.long() << (8 + unit % 2)
    return bits.view(time, len(rows), pairs, 2).sum(-1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("units, time, batch, parts", [(1, 1, 1, 1), (7, 5, 3, 2), (40, 4, 20, 4), (514, 3, 2, 1)])
@pytest.mark.parametrize(
    "states, zones, noise",
    [
        (2, {0: threshold(0.1), 1: threshold(0.1)}, None),
        (2, {1: threshold(0.9)}, threshold(0.2)),
        (1, {0: threshold(0.3)}, threshold(0.6)),
        (3, {0: threshold(0.3), 2: threshold(0.7)}, None),
        (1, {}, threshold(0.5)),
        (4, {0: 2**32, 2: 0, 3: 1 << 31}, 2**32),  # always and never
        (4, {3: 2**32 - 1}, 0),
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_bits_are_those_that_are_counted(
    states: int, zones: dict[int, int], noise: int | None, units: int, time: int, batch: int, parts: int, counted: bool,
    folder: Path,
) -> None:  # fmt: skip
    name, layer, direction = beside.draw_bits_name(states, [*zones], noise is not None), 3, 1
    code = compiled(beside.draw_bits(states, [*zones], noise is not None), name, "sm_90a", folder=folder)
    kernel = Kernel(code, name, 0, options._THREADS, 0, 1, options._DRAW_BITS)
    ids = torch.arange(batch).flip(0) * 5 + 2**31 if counted else None
    made = torch.full((time, batch, -(-units // 2)), -1, dtype=torch.int16)
    blocks = -(-batch * -(-made.shape[-1] // 2) // options._THREADS)
    kernel(
        0, blocks, parts, made.data_ptr(), 0 if ids is None else ids.data_ptr(), SEED.data_ptr(), *made.shape,
        tag(ZONEOUT, layer, direction), *(zones.get(state, 0) for state in range(4)),
        tag(RECURRENT, layer, direction), noise or 0,
    )  # fmt: skip
    rows = torch.arange(batch) if ids is None else ids
    assert (made.long() & 0xFFFF).equal(truth(units, time, rows, states, zones, noise, (layer, direction)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("width, time, batch, blocks", [(1, 1, 1, 1), (7, 5, 3, 1), (40, 1, 20, 2), (513, 3, 2, 1)])
@pytest.mark.parametrize("counted", [False, True])
def test_masks_are_those_that_are_counted(
    count: int, width: int, time: int, batch: int, blocks: int, counted: bool, folder: Path
) -> None:
    code = compiled(beside.draw(), "draw_masks", "sm_90a", folder=folder)
    kernel = Kernel(code, "draw_masks", 0, options._THREADS, 0, 1, options._DRAW)
    ids = torch.arange(batch).flip(0) * 5 + 2**31 if counted else None
    made, below, own = torch.full((count, time, batch, width), torch.nan), threshold(0.3), tag(RECURRENT, 3, 1)
    kernel(
        0, blocks, 1, made.data_ptr(), 0 if ids is None else ids.data_ptr(), SEED.data_ptr(), *made.shape, own, below,
        0.5, 1.25,
    )  # fmt: skip
    rows = torch.arange(batch) if ids is None else ids
    words = drawn(SEED, count, width, torch.arange(time)[:, None, None], rows[:, None], own)
    assert made.equal(torch.where(torch.stack(words) < below, 0.5, 1.25))


@pytest.mark.parametrize(
    "time, blocks, parts",
    [(100, 64, 8), (100, 32, 15), (100, 8, 50), (1, 1, 1), (0, 1, 1), (100, 5000, 1), (3, 1, 3), (10_000, 64, 33)],
)
def test_blocks_fill_the_chip_with_as_many_steps_each(time: int, blocks: int, parts: int) -> None:
    assert options.parts_of_steps(time, blocks, 4 * 132) == parts


def test_threads_are_not_more_than_their_numbers() -> None:
    assert options.parts_of_steps(1, 2**24, 4 * 132) == 1
    with pytest.raises(AssertionError, match="by 32 bits"):
        options.parts_of_steps(1, 2**24 + 1, 4 * 132)


@needs_tools
@pytest.mark.parametrize(
    "states, zones, noise, draws, most",
    [(2, (0, 1), False, 2, 102), (2, (0,), False, 2, 92), (1, (0,), False, 1, 60), (2, (), True, 1, 61)],
)
def test_a_draw_takes_few_instructions(
    states: int, zones: tuple[int, ...], noise: bool, draws: int, most: int, tmp_path: Path
) -> None:
    """Of four units: 16 products and as many xors for each draw that they share, and what compares and keeps them."""
    lines = listed(cubin(beside.draw_bits(states, zones, noise), "draw_bits", "sm_90a"), tmp_path / "kernel.cubin")
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\.(L_x_\d+):", line.strip()))}
    ends = [(at, re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)) for at, line in enumerate(lines)]
    begin, end = max(
        ((labels[f[1]], at) for at, f in ends if f and labels[f[1]] < at), key=lambda loop: loop[1] - loop[0]
    )
    loop = [line for line in lines[begin:end] if re.match(r"\s*/\*", line)]
    assert len(loop) <= most
    assert sum("IMAD.WIDE.U32" in line for line in loop) <= 16 * draws + 2
    assert not any(re.search(r"\b(LDL|STL)\b", line) for line in lines)


@needs_tools
def test_masks_are_drawn_without_a_division_for_each_word(tmp_path: Path) -> None:
    """One of 64 bits is a call, and eight of them took longer than the draw: three number the row, step and unit."""
    lines = listed(cubin(beside.draw(), "draw_masks", "sm_90a"), tmp_path / "kernel.cubin")
    assert sum("CALL" in line for line in lines) <= 3
