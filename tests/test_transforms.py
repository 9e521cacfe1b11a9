"""torch.func, forward mode and gradients of gradients, through an engine with its own backward and through `reference`.

The truth is torch.nn's layer in float64, which is plain torch there.
"""

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

import whorl
from whorl.engines.native import OneDNN

ENGINES = {"onednn": (torch.float32, 2e-5), "reference": (torch.float64, 1e-12)}
SIZES = dict(input_size=4, hidden_size=5, num_layers=2, bidirectional=True)
TIME, BATCH = 3, 2

pytestmark = pytest.mark.filterwarnings("ignore::whorl.errors.SlowWarning")


class Pair:
    """A layer of whorl and torch's in float64 with the same weights, each as a function of weights and input."""

    def __init__(self, engine: str) -> None:
        self.dtype, self.tolerance = ENGINES[engine]
        self.whorl = whorl.LSTM(**SIZES, dtype=self.dtype, engine=engine)
        self.torch = torch.nn.LSTM(**SIZES, dtype=torch.float64)
        self.torch.load_state_dict(self.whorl.state_dict())
        self.weights = {name: weight.detach() for name, weight in self.whorl.named_parameters()}
        self.x = torch.randn(TIME, BATCH, SIZES["input_size"], dtype=self.dtype)

    def ours(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.whorl, weights, (x,))[0]

    def theirs(self, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.torch, weights, (x,))[0]

    def check(self, ours: object, theirs: object) -> None:
        """Equal, and not because both are zero."""
        pairs = list(zip(torch.utils._pytree.tree_leaves(ours), torch.utils._pytree.tree_leaves(theirs), strict=True))
        assert pairs
        for mine, truth in pairs:
            assert truth.norm() > 0
            assert (mine.double() - truth).norm() <= self.tolerance * truth.norm()


@pytest.fixture(params=[*ENGINES, "onednn with whorl's backward"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Each engine; the last as the engines are whose backward autograd does not record."""
    if request.param not in ENGINES:
        monkeypatch.setattr(OneDNN, "recorded", False)
    return Pair(request.param.split()[0])


def double(tree: object) -> object:
    return torch.utils._pytree.tree_map(lambda tensor: tensor.double(), tree)


def squared(function: Callable[[dict, Tensor], Tensor]) -> Callable[[dict, Tensor], Tensor]:
    return lambda weights, x: function(weights, x).pow(2).sum()


def test_jvp_in_x_and_in_the_weights(pair: Pair) -> None:
    tangents = {name: torch.randn_like(weight) for name, weight in pair.weights.items()}, torch.randn_like(pair.x)
    ours = jvp(pair.ours, (pair.weights, pair.x), tangents)
    theirs = jvp(pair.theirs, (double(pair.weights), double(pair.x)), double(tangents))
    pair.check(ours, theirs)


def test_forward_mode_outside_torch_func(pair: Pair) -> None:
    tangent = torch.randn_like(pair.x)
    with forward_ad.dual_level():
        ours = forward_ad.unpack_dual(pair.whorl(forward_ad.make_dual(pair.x, tangent))[0]).tangent
    theirs = jvp(lambda x: pair.theirs(double(pair.weights), x), (double(pair.x),), (double(tangent),))[1]
    pair.check(ours, theirs)


def test_gradients_for_each_sample(pair: Pair) -> None:
    def of_one(weights: dict, row: Tensor) -> Tensor:
        return squared(pair.ours)(weights, row.unsqueeze(1))

    ours = vmap(grad(of_one), in_dims=(None, 1))(pair.weights, pair.x)
    rows = [grad(squared(pair.theirs))(double(pair.weights), row.unsqueeze(1)) for row in double(pair.x).unbind(1)]
    pair.check(ours, {name: torch.stack([row[name] for row in rows]) for name in ours})


def test_gradient_of_a_vmap_in_torch_func_and_in_eager(pair: Pair) -> None:
    def mapped(weights: dict) -> Tensor:
        return vmap(lambda row: squared(pair.ours)(weights, row.unsqueeze(1)), in_dims=1)(pair.x).sum()

    theirs = grad(squared(pair.theirs))(double(pair.weights), double(pair.x))
    pair.check(grad(mapped)(pair.weights), theirs)
    mapped(dict(pair.whorl.named_parameters())).backward()
    pair.check({name: weight.grad for name, weight in pair.whorl.named_parameters()}, theirs)


def test_vmap_over_x_alone_stays_on_the_engine(pair: Pair) -> None:
    rows = torch.randn(6, *pair.x.shape, dtype=pair.dtype)
    with whorl.settings(slow="error"):
        ours = vmap(lambda x: pair.ours(pair.weights, x))(rows)
    pair.check(ours, torch.stack([pair.theirs(double(pair.weights), x) for x in double(rows)]))


def test_vmap_over_weights_runs_an_ensemble(pair: Pair) -> None:
    stacked = {name: torch.stack([weight, 0.5 * weight, -weight]) for name, weight in pair.weights.items()}
    ours = vmap(pair.ours, in_dims=(0, None))(stacked, pair.x)
    members = [{name: weight[member] for name, weight in stacked.items()} for member in range(3)]
    pair.check(ours, torch.stack([pair.theirs(double(weights), double(pair.x)) for weights in members]))


def test_vmap_over_weights_is_said_and_can_be_refused() -> None:
    pair = Pair("onednn")
    stacked = {name: torch.stack([weight, weight]) for name, weight in pair.weights.items()}
    with whorl.settings(slow="error"), pytest.raises(whorl.SlowError, match=r"torch\.vmap"):
        vmap(pair.ours, in_dims=(0, None))(stacked, pair.x)


def test_double_backward(pair: Pair) -> None:
    def penalty(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(layer(x)[0].pow(2).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
        return [slope.detach(), x.grad, *(weight.grad for weight in layer.parameters())]

    pair.check(penalty(pair.whorl, pair.x), penalty(pair.torch, pair.x.double()))


def test_double_backward_is_said_and_can_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneDNN, "recorded", False)  # as the engines are whose backward is whorl's
    pair = Pair("onednn")
    x = pair.x.requires_grad_()
    with whorl.settings(slow="error"):  # holds for the call's gradients too, wherever autograd computes them
        y, _ = pair.whorl(x)
    (slope,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(whorl.SlowError, match="double backward"):
        slope.sum().backward()


@pytest.mark.parametrize("outer", [jacfwd, jacrev])
def test_hessian(pair: Pair, outer: Callable) -> None:
    ours = outer(jacrev(lambda x: squared(pair.ours)(pair.weights, x)))(pair.x)
    theirs = jacrev(jacrev(lambda x: squared(pair.theirs)(double(pair.weights), x)))(double(pair.x))
    pair.check(ours, theirs)


@pytest.mark.parametrize("kind", [whorl.LSTM, whorl.GRU, whorl.RNN])
def test_gradgradcheck(kind: type[torch.nn.Module]) -> None:
    layer = kind(2, 3, dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)

    def outputs(x: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        y, h = functional_call(layer, dict(zip(dict(layer.named_parameters()), weights, strict=True)), (x,))
        return y, h[1] if isinstance(h, tuple) else h

    assert torch.autograd.gradgradcheck(outputs, (x, *layer.parameters()))
