"""Whether a contender's numbers are right, before any time is taken of it: the error rule, on the very same call."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import whorl
from whorl.bench.baseline import TF32_EPS, PlainLoop, error, to_tf32
from whorl.bench.cases import Case
from whorl.bench.contenders import torch_layer
from whorl.bench.passes import Material, Runner, switches


@dataclass(frozen=True)
class Verdict:
    """The tensor that comes nearest to its bound, or is farthest beyond it.

    Attributes:
        tensor: its name.
        error: relative 2-norm against float64; infinite where a number is not finite.
        bound: what the error rule allows.
    """

    tensor: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """The error as a multiple of its bound: above 1 it is outside the error rule."""
        return self.error / self.bound

    def __str__(self) -> str:
        return f"{self.tensor} is off by {self.error:.2g}, the error rule allows {self.bound:.2g}"


@dataclass(frozen=True)
class Truth:
    """What the calls on a material give in float64, and how far each tensor may be from it."""

    tensors: dict[str, Tensor]
    bounds: dict[str, float]

    @staticmethod
    def of(case: Case, material: Material) -> "Truth":
        """From whorl's `reference` in float64, and the baseline of the error rule in the case's precision."""
        tf32, device = case.precision == "tf32", material.x.device
        make = getattr(whorl, case.cell.upper())
        exact = make(case.units, case.units, case.layers, device=device, dtype=torch.float64, engine="reference")
        exact.load_state_dict(material.weights)
        layer = torch_layer(case, device)
        layer.load_state_dict(material.weights)
        plain = PlainLoop(layer, to_tf32 if tf32 else None)
        with switches(tf32=False):
            tensors = _train(exact, material.checked.double(), material.target.double())
            baseline = _train(plain, material.checked.float(), material.target.float())
        eps = TF32_EPS if tf32 else torch.finfo(case.dtype).eps
        bounds = {name: 2 * error(baseline[name], tensor) + 4 * eps for name, tensor in tensors.items()}
        return Truth(tensors, bounds)

    def judge(self, runner: Runner, material: Material) -> Verdict:
        """The verdict on one call of `runner`, which has the material's weights."""
        material.refresh(material.checked)
        found = dict(zip(runner.names, runner.run(), strict=True))
        verdicts = (
            Verdict(name, error(tensor, self.tensors[name]), self.bounds[name]) for name, tensor in found.items()
        )
        return max(verdicts, key=lambda verdict: verdict.ratio)


def _train(layer: torch.nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The output and every gradient of a train step, by the names that `Runner` gives them."""
    x = x.detach().requires_grad_()
    parameters = dict(layer.named_parameters())
    y = layer(x)[0]
    loss = F.mse_loss(y, target, reduction="sum")
    x_grad, *grads = torch.autograd.grad(loss, (x, *parameters.values()))
    of_weights = {f"grad of {name}": grad for name, grad in zip(parameters, grads, strict=True)}
    return {"y": y.detach(), "grad of x": x_grad} | of_weights
