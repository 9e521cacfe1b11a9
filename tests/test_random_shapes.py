"""Plain layers of odd shapes on an NVIDIA GPU, drawn at random: what whorl's own kernels do with any size."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from comparison import broken
from test_persistent import PRECISIONS, build, eps_of, measured

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in one piece": lambda x: x,
    "batch first in memory": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second column": lambda x: torch.stack([x, x], -1)[..., 0],
    "columns of wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}
CELLS = ["LSTM", "GRU", "RNN tanh", "RNN relu"]
COUNT = 240
_MOST_STEPS, _MOST_ELEMENTS = 4000, 2**24
"""Of all layers and directions: each step of the baseline is a dozen calls of torch, each element is kept 20 times."""


@dataclass
class Drawn:
    """A layer and what it is given."""

    seed: int
    cell: str
    precision: str
    units: int
    inputs: int
    layers: int
    directions: int
    bias: bool
    batch: int
    time: int
    initial: bool
    layout: str

    def build(self) -> torch.nn.Module:
        """On `persistent`, or with more units than it holds on `stepwise`."""
        form: dict[str, Any] = dict(num_layers=self.layers, bidirectional=self.directions == 2, bias=self.bias)
        layer = build(self.cell, self.units, PRECISIONS[self.precision], self.inputs, **form)
        layer.engine = "auto"
        x = torch.empty(self.time, self.batch, self.inputs, device="cuda", dtype=PRECISIONS[self.precision])
        made = layer.plan(x)
        too_wide = any(one.engine == "persistent" and "do not fit" in str(one) for one in made.refusals)
        layer.engine = "stepwise" if too_wide else "persistent"
        return layer


def drawn(seed: int) -> Drawn:
    """The layer of this seed: half of all sizes are drawn evenly, the others so that small ones are as many."""
    draw = random.Random(seed)

    def size(least: int, most: int) -> int:
        if draw.random() < 0.5:
            return draw.randint(least, most)
        return min(most, int(least * (most + 1 - least) ** draw.random()))

    layers, directions, units, batch = draw.randint(1, 4), draw.randint(1, 2), size(1, 2816), size(1, 300)
    if units < 4:
        batch = max(batch, 4)  # single numbers that cancel have no norm to measure by
    passes = layers * directions
    most = min(2000, _MOST_STEPS // passes, max(1, _MOST_ELEMENTS // (units * batch * passes)))
    return Drawn(
        seed, draw.choice(CELLS), [*PRECISIONS][seed % 4], units, size(1, 700),
        layers, directions, draw.random() < 0.8, batch, size(1, most), draw.random() < 0.5, draw.choice([*LAYOUTS]),
    )  # fmt: skip


@pytest.fixture
def room() -> Iterator[None]:
    """Memory is given back, so that others beside may have it."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(COUNT))
def test_any_shape_is_right(room: None, seed: int) -> None:
    """What breaks the error rule is held to it by root mean squares over eight inputs.

    At a kink, and where few numbers are measured, one draw says little.  On an H200 8 of 240 broke the rule: relu's
    gradients in float32 up to 1,500 times, by single values on the other side of zero, others at most 1.8 times.
    """
    case = drawn(seed)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=case.precision == "tf32"):
        layer = case.build()
        print(case, layer.engine)

        def row() -> dict[str, tuple[float, float]]:
            return measured(layer, case.time, case.batch, case.initial, lay=LAYOUTS[case.layout])

        rows, eps = [row()], eps_of(PRECISIONS[case.precision])
        if broken(rows, eps):
            rows += [row() for _ in range(7)]
        assert broken(rows, eps) == {}


def test_the_draws_reach_every_end() -> None:
    cases = [drawn(seed) for seed in range(COUNT)]
    for name, least, most in [("units", 1, 2816), ("batch", 1, 300), ("time", 1, 2000), ("inputs", 1, 700)]:
        found = sorted(getattr(case, name) for case in cases)
        assert least <= found[0] < 1.02 * least + 1
        assert 0.9 * most < found[-1] <= most
    assert {case.layers for case in cases} == {1, 2, 3, 4}
    assert {(case.cell, case.precision) for case in cases} == {(c, p) for c in CELLS for p in PRECISIONS}
    assert {case.layout for case in cases} == {*LAYOUTS}
