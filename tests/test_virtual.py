"""Tensors that Python stands before: fake ones, traced ones, those of a class that dispatches for itself.

What a kernel reads and writes by its address is lost there: each call runs in torch's own operators.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import whorl
from whorl.problem import kind_of

TIME, BATCH, INPUTS, UNITS = 3, 3, 4, 5
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "lstm": lambda: whorl.LSTM(INPUTS, UNITS, num_layers=2, dtype=torch.float64),
    "gru": lambda: whorl.GRU(INPUTS, UNITS, bidirectional=True, dtype=torch.float64),
    "options": lambda: whorl.LSTM(
        INPUTS, UNITS, zoneout=0.2, recurrent_dropout=0.2, layer_norm=True, dtype=torch.float64
    ),
    "cell": lambda: whorl.Recurrent(whorl.cells.library.mgu, INPUTS, UNITS, dtype=torch.float64),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)

pytestmark = pytest.mark.filterwarnings("ignore::whorl.errors.SlowWarning")


def drawn() -> Tensor:
    return torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert wanted.norm() > 0
    assert (found - wanted).norm() <= 1e-12 * wanted.norm()


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu", "meta"])
def test_the_kind_of_a_device_is_read_of_fake_tensors_too(kind: str) -> None:
    with FakeTensorMode():
        assert kind_of(torch.empty(1, device=kind)) == kind


@layers
def test_a_graph_of_make_fx_computes_what_the_layer_does(make: Callable[[], torch.nn.Module]) -> None:
    """On another x and other lengths than those that it was traced with, its gradients too."""
    layer = make().eval()
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, lengths: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,), {"lengths": lengths})[0].pow(2).sum()

    traced = make_fx(torch.func.grad(loss, argnums=(0, 1)))(weights, drawn(), torch.tensor([2, 0, 1]))
    call = weights, drawn(), torch.tensor([3, 1, 2])
    (of_weights, of_x), (slopes, slope) = traced(*call), torch.func.grad(loss, argnums=(0, 1))(*call)
    assert_same(of_x, slope)
    for name in weights:
        assert_same(of_weights[name], slopes[name])


@layers
@pytest.mark.parametrize("traced", ["fake", "symbolic"])
def test_make_fx_on_fake_tensors(make: Callable[[], torch.nn.Module], traced: str) -> None:
    layer = make().eval()
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def output(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,))[0]

    graph, x = make_fx(output, tracing_mode=traced)(weights, drawn()), drawn()
    assert_same(graph(weights, x), output(weights, x))


@layers
def test_fake_tensors_have_shapes_and_gradients(make: Callable[[], torch.nn.Module]) -> None:
    with FakeTensorMode():
        layer, x = make(), drawn().requires_grad_()
        y, _ = layer(x, lengths=torch.zeros(BATCH, dtype=torch.int64))
        y.sum().backward()
    real = make()(drawn())[0]
    assert isinstance(y, FakeTensor)
    assert (y.shape, y.stride()) == (real.shape, real.stride())
    assert all(leaf.grad.shape == leaf.shape for leaf in (x, *layer.parameters()))


@layers
def test_a_class_of_tensors_with_a_dispatch_of_its_own_is_asked(make: Callable[[], torch.nn.Module]) -> None:
    layer, a, b = make().eval(), drawn().requires_grad_(), drawn().requires_grad_()
    both = TwoTensor(a.detach().clone(), b.detach().clone()).requires_grad_()
    y, _ = layer(both)
    outputs = [layer(x)[0] for x in (a, b)]
    for output in (y, *outputs):
        output.pow(2).sum().backward()
    for mine, x, output in zip((0, 1), (a, b), outputs, strict=True):
        assert_same((y.a, y.b)[mine].detach(), output.detach())
        assert_same((both.grad.a, both.grad.b)[mine], x.grad)


def test_a_plan_of_fake_tensors_says_why() -> None:
    layer = whorl.GRU(INPUTS, UNITS, dtype=torch.float64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = layer.plan(drawn())
        with pytest.raises(whorl.UnsupportedError, match="fake, traced"):
            whorl.GRU(INPUTS, UNITS, dtype=torch.float64, engine="cpu")(drawn())
    assert made.engine == "reference"
    assert "the tensors are fake, traced" in str(next(one for one in made.refusals if one.engine == "cpu"))
    assert not layer.plan(drawn()).problem.virtual


def test_an_ordinary_subclass_of_tensor_is_no_obstacle() -> None:
    class Named(Tensor):
        pass

    layer = whorl.GRU(INPUTS, UNITS, dtype=torch.float64)
    made = layer.plan(drawn().as_subclass(Named))
    assert made.engine == layer.plan(drawn()).engine
    assert not made.problem.virtual
