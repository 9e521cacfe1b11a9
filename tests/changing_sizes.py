"""A layer whose states change their size from step to step, which scales of theirs have to follow."""

import torch
from torch import Tensor

import whorl
from whorl.bench.baseline import TF32_EPS


def outputs(
    layer: torch.nn.Module, dtype: torch.dtype, engine: str, device: str, x: Tensor, hx: Tensor, lengths: Tensor | None
) -> dict[str, Tensor]:
    """Of one engine, in float64 on the processor."""
    layer.to(device, dtype).engine = engine
    its = lengths if lengths is None else lengths.to(device)
    with torch.no_grad():
        return {"y": layer(x.to(device, dtype), hx.to(device, dtype), lengths=its)[0].double().cpu()}


def assert_right_at_each_step(units: int, batch: int, ragged: bool, device: str) -> None:
    """Of each step and sequence, with TF32 products: off by no more than some roundings of its largest state.

    Recurrent weights are so small that steps without input go down by 2^14; some sequences have no large unit.
    """
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    layer = whorl.RNN(6, units, nonlinearity="relu", bias=False)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2.0**-14)
        layer.weight_ih_l0[16:32] = 0  # what 16 units have is of the step before
        layer.weight_hh_l0[16:32] *= torch.rand(16, 1, generator=generator) < 0.5
    sizes = torch.tensor([0.0, 0, 2**-40, 2**-9, 1, 2**12, 2**30])

    def of_sizes(values: Tensor) -> Tensor:
        drawn = torch.randint(len(sizes), (*values.shape[:2], 1), generator=generator)
        return values * sizes[drawn]

    x = of_sizes(torch.randn(9, batch, 6, generator=generator))
    hx = of_sizes(torch.rand(1, batch, units, generator=generator))
    lengths = torch.randint(1, 10, (batch,), generator=generator) if ragged else None

    truth = outputs(layer, torch.float64, "reference", "cpu", x, hx, lengths)["y"]
    got = outputs(layer, torch.float32, "persistent", device, x, hx, lengths)["y"]
    apart, most = (got - truth).abs().amax(2), truth.abs().amax(2)
    assert (most > 0).sum() > 2 * batch
    assert (apart <= 4 * TF32_EPS * most).all()


def assert_right_beside_larger_ones(units: int, device: str) -> None:
    """Of 16 units each, of many sizes in one sequence, of which others are made: off by 2^-39 of the largest."""
    generator = torch.Generator().manual_seed(4)
    layer = whorl.RNN(6, units, nonlinearity="relu", bias=False)
    groups = torch.arange(units) // 16
    with torch.no_grad():
        layer.weight_hh_l0.copy_(torch.rand(units, units, generator=generator) * (groups[:, None] == groups))
    sizes = torch.tensor([1.0, 2**18, 2**20, 1000, 2**-12, 2**10, 0, 2**5])
    drawn = torch.stack([sizes[torch.randperm(len(sizes), generator=generator)] for _ in range(11)])
    hx = torch.rand(1, 11, units, generator=generator) * drawn[:, groups % len(sizes)]
    truth = outputs(layer, torch.float64, "reference", "cpu", torch.zeros(1, 11, 6), hx, None)["y"]
    got = outputs(layer, torch.float32, "persistent", device, torch.zeros(1, 11, 6), hx, None)["y"]
    beside = 2.0**-39 * hx.double().amax(2, keepdim=True) * layer.weight_hh_l0.double().cpu().sum(1)
    assert ((got - truth).abs() <= 4 * TF32_EPS * truth + beside).all()


def assert_what_is_no_number_stays_one(units: int, device: str) -> None:
    """And what is infinite, or 2^115, is none then, in its sequence alone."""
    generator = torch.Generator().manual_seed(5)
    layer = whorl.RNN(6, units, nonlinearity="relu", bias=False)
    with torch.no_grad():
        layer.weight_hh_l0.copy_(torch.rand(units, units, generator=generator) / units)
    hx, x = torch.rand(1, 11, units, generator=generator), torch.zeros(2, 11, 6)
    before = outputs(layer, torch.float32, "persistent", device, x, hx, None)["y"]
    for sequence, unit, value in ((0, 3, torch.nan), (2, units - 1, torch.inf), (5, 17, 2.0**116)):
        hx[0, sequence, unit] = value
    got = outputs(layer, torch.float32, "persistent", device, x, hx, None)["y"]
    lost = torch.zeros(11, dtype=torch.bool)
    lost[[0, 2, 5]] = True
    assert not got[:, lost].isfinite().any()
    assert torch.equal(got[:, ~lost], before[:, ~lost])
