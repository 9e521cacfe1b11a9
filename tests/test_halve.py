"""The kernel that makes float16 of recurrent weights, run on the host by `emulation`: every bit of what it writes."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cubins import cubin
from emulation import Kernel, compiled
from test_machine_code import listed, nvdisasm
from whorl.engines.cuda import beside
from whorl.engines.cuda.beside import Halving
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.tiling import Chip

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def made(halving: Halving, weights: list[Tensor], ring: int, folder: Path) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """The ring, and of each direction the planes and what scales are the inverse of; nothing else is written."""
    name, room = halving.name, 16 * ring + len(weights) * halving.size
    code = compiled(beside.halver(halving), name, "", folder=folder)
    kernel = Kernel(code, name, 0, halving.threads, halving.shared, 1, "6Q")
    space = torch.full((room + 64,), 0x5A, dtype=torch.uint8)
    first = space.data_ptr() + 16 * ring
    assert first % 16 == 0
    to = [first + i * halving.size for i in range(len(weights))]
    places = [weight.data_ptr() for weight in weights]
    kernel(0, halving.blocks, len(weights), *(places * 2)[:2], *(to * 2)[:2], space.data_ptr(), ring)
    assert (space[room:] == 0x5A).all()
    rows, pitch, planes = halving.recurrent * halving.units, -(-halving.units // 8) * 8, 1 + halving.exact
    found, scales = [], []
    for i in range(len(weights)):
        own = space[16 * ring + i * halving.size :][: halving.size]
        matrices, rest = own[: planes * rows * pitch * 2], own[planes * rows * pitch * 2 :]
        found.append(matrices.view(torch.float16).view(planes, rows, pitch))
        ranges = -(-halving.units // halving.range) if halving.range else 0
        of_rows = rest.view(torch.float32)[: ranges * halving.units or rows]
        scales.append(of_rows.view(ranges, halving.units) if ranges else of_rows)
    return space[: 16 * ring], found, scales


def with_all_sizes(rows: int, units: int, at_a_time: int) -> Tensor:
    """Weights of which neighbouring rows and columns have other sizes, some zero, infinite or not a number."""
    weights = torch.randn(rows, units)
    weights *= 2.0 ** ((torch.arange(rows) // at_a_time * 37) % 100 - 60)[:, None]
    weights *= 2.0 ** (torch.arange(units) % 7 * 6.0)
    weights[rows // 2, :: max(1, units // 3)] = float("nan")
    weights[rows // 3, units // 2] = -float("inf")
    weights[:, units // 3] = 0
    weights[rows // 4] = 0
    weights[0, :5] = torch.tensor([1e-45, -1e-40, 2.0**-126, 0.0, -0.0])[:units]
    return weights


def scale_for(most: Tensor) -> Tensor:
    """The power of two that brings the largest to 2^14 or more, below 2^15, and zeros and the least no further."""
    exponent = torch.where(most.isinf(), 128, most.double().frexp().exponent - 1)
    exponent = torch.where(most == 0, -112, exponent).clamp(min=-112)
    return 2.0 ** (14 - exponent.double())


def expected(values: Tensor, scale: Tensor, halving: Halving) -> list[Tensor]:
    scaled = (values.double() * scale).float()
    high = scaled.half()
    low = 2048.0 if halving.apart else 1.0
    return [high, ((scaled - high.float()) * low).half()][: 1 + halving.exact]


def largest(values: Tensor, dim: int) -> Tensor:
    return values.abs().nan_to_num(0.0, torch.inf).amax(dim)


PRODUCTS = [(False, False), (True, False), (True, True)]


@needs_compiler
@pytest.mark.parametrize("exact, apart", PRODUCTS)
@pytest.mark.parametrize("recurrent, units", [(4, 1), (3, 5), (4, 33), (1, 66), (4, 40), (1, 2103), (1, 2184)])
def test_each_row_has_a_scale(recurrent: int, units: int, exact: bool, apart: bool, folder: Path) -> None:
    torch.manual_seed(1)
    halving, rows = Halving(recurrent, units, exact, apart, 0), min(recurrent * units, 40)
    weights = [torch.zeros(recurrent * units, units) for _ in range(2)]
    for weight in weights:
        weight[:rows] = with_all_sizes(rows, units, 1)
    ring, found, scales = made(halving, weights, 9, folder)
    assert (ring == 0xFF).all()
    for weight, planes, unscale in zip(weights, found, scales, strict=True):
        scale = scale_for(largest(weight, 1))
        assert (unscale.double() * scale == 1).all()
        for plane, wanted in zip(planes, expected(weight, scale[:, None], halving), strict=True):
            torch.testing.assert_close(plane[:, :units], wanted, rtol=0, atol=0, equal_nan=True)
            assert (plane[:, units:] == 0).all()


@needs_compiler
@pytest.mark.parametrize("exact, apart", PRODUCTS)
@pytest.mark.parametrize(
    "recurrent, units, together",
    [(4, 1, 16), (3, 5, 16), (4, 33, 16), (1, 66, 32), (4, 40, 48), (3, 70, 64), (4, 300, 288)],
)
def test_each_column_has_a_scale_for_the_rows_of_some_units(
    recurrent: int, units: int, together: int, exact: bool, apart: bool, folder: Path
) -> None:
    torch.manual_seed(1)
    halving, rows = Halving(recurrent, units, exact, apart, together), recurrent * units
    weights = [with_all_sizes(rows, units, together) for _ in range(2)]
    ring, found, scales = made(halving, weights, 1000, folder)
    assert (ring == 0xFF).all()
    for weight, planes, unscale in zip(weights, found, scales, strict=True):
        scale = torch.empty(rows, units, dtype=torch.float64)
        for range_, first in enumerate(range(0, units, together)):
            gates = weight.view(recurrent, units, units)[:, first : first + together]
            own = scale_for(largest(gates.flatten(0, 1), 0))
            assert (unscale[range_].double() * own == 1).all()
            scale.view(recurrent, units, units)[:, first : first + together] = own
        for plane, wanted in zip(planes, expected(weight, scale, halving), strict=True):
            torch.testing.assert_close(plane[:, :units], wanted, rtol=0, atol=0, equal_nan=True)
            assert (plane[:, units:] == 0).all()


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)])
@pytest.mark.parametrize(
    "halving, reads",
    [
        (Halving(4, 512, False, False, 0), 4),
        (Halving(4, 1500, True, True, 0), 12),
        (Halving(4, 512, True, False, 32), 2),
        (Halving(3, 1024, False, False, 128), 6),
    ],
)
def test_all_of_a_row_or_column_is_asked_for_at_once(
    halving: Halving, reads: int, capability: tuple[int, int], tmp_path: Path
) -> None:
    """16 bytes at a time, and nothing is spilled."""
    code = cubin(beside.halver(halving), halving.name, Chip(capability, 132).architecture)
    assert halving.name.encode() in code
    if nvdisasm():
        lines = listed(code, tmp_path / "halve.cubin")
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in lines)
        loads = [at for at, line in enumerate(lines) if re.search(r"\bLDG\b", line)]
        assert len(loads) == sum("LDG.E.128" in line for line in lines) == reads
        assert not any(re.search(r"\bFMNMX\b", line) for line in lines[: loads[-1]])  # none waits for another
