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
