"""whorl.keras on a GPU (torch backend): dropout's masks and all numbers are Keras' own, and no call waits."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl.keras  # noqa: E402
from whorl.keras.cells import settle  # noqa: E402

BATCH, TIME, INPUTS, UNITS = 4, 5, 3, 6
LAYERS = ("LSTM", "GRU", "GRU before", "SimpleRNN")
RATES = ((0.0, 0.4), (0.3, 0.4), (0.3, 0.0))
CASES = [
    (name, wrap, rates)
    for name in LAYERS
    for wrap in (False, True)
    for rates in ((0.0, 0.0), *RATES)
    if not (wrap and name == "SimpleRNN" and any(rates))  # in a Bidirectional Keras' own forgets its seed
]
"""Layer, whether in a Bidirectional, and the rates of dropout and recurrent dropout."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore"),  # Keras' own layers run a loop
]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Neither multiplies in TF32."""
    switches = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, value in zip(switches, before, strict=True):
        switch.allow_tf32 = value


def pair(name: str, width: int = UNITS, wrap: bool = False, **arguments: Any) -> Iterator[Any]:
    """Keras' layer and ours, of the same weights and the same seed."""
    keras.utils.set_random_seed(1)
    kind, more = name.split()[0], {"reset_after": False} if name == "GRU before" else {}
    weights = None
    for source in (keras.layers, whorl.keras):
        layer = getattr(source, kind)(width, bias_initializer="random_normal", **more, **arguments)
        layer = source.Bidirectional(layer) if wrap else layer
        layer.build((BATCH, TIME, INPUTS))
        weights = layer.get_weights() if weights is None else weights
        layer.set_weights(weights)
        yield layer


def given(masked: bool) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(BATCH, TIME, INPUTS, device="cuda")
    counts = torch.arange(TIME, device="cuda") < torch.tensor([5, 3, 1, 4], device="cuda")[:, None]
    return x, counts if masked else None


def outcome(layer: Any, x: Tensor, mask: Tensor | None, training: bool = True) -> list[Tensor]:
    """The output, and the gradients of x and of the weights."""
    x = x.clone().requires_grad_()
    y = layer(x, mask=mask, training=training)
    weight = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)
    weights = [variable.value for variable in layer.trainable_variables]
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), [x, *weights])]


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("policy, batch, width", [("float32", 32, 128), ("float32", 33, 130), ("mixed_float16", 5, 7)])
def test_masks_are_keras_own(name: str, rates: tuple[float, float], policy: str, batch: int, width: int) -> None:
    """To the bit, call after call."""
    stock, ours = pair(name, width, dropout=rates[0], recurrent_dropout=rates[1], seed=7, dtype=policy)
    kind = torch.float16 if "16" in policy else torch.float32
    x, state = (torch.randn(batch, size, device="cuda", dtype=kind) for size in (INPUTS, width))
    for _ in range(3):
        found = []
        for layer in (stock, ours):
            layer._maybe_config_dropout_masks(layer.cell, x, [state])
            settle(layer.cell)
            masks = [layer.cell._dropout_mask, layer.cell._recurrent_dropout_mask]
            found.append([one for row in masks for one in (row if isinstance(row, list) else [row]) if one is not None])
            layer._maybe_reset_dropout_masks(layer.cell)
        assert len(found[0]) == len(found[1])
        assert all(theirs.dtype == kind and theirs.equal(own) for theirs, own in zip(*found, strict=True))
    assert stock.cell.seed_generator.state.value.equal(ours.cell.seed_generator.state.value)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name, wrap, rates", CASES)
def test_training_and_evaluation_are_keras_own(name: str, wrap: bool, rates: tuple[float, float], masked: bool) -> None:
    x, mask = given(masked)
    stock, ours = pair(name, wrap=wrap, dropout=rates[0], recurrent_dropout=rates[1], seed=7)
    for training in (True, False, True):
        theirs, own = outcome(stock, x, mask, training), outcome(ours, x, mask, training)
        for a, b in zip(own, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def waits() -> Iterator[Callable[[str], None]]:
    """Sets what torch does where the host waits for the GPU."""
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rates", [(0.0, 0.0), *RATES])
@pytest.mark.parametrize("name", LAYERS)
def test_a_call_does_not_wait_for_the_gpu(
    name: str, rates: tuple[float, float], masked: bool, waits: Callable[[str], None]
) -> None:
    """But for the first of a shape, which prepares, and reads the seed."""
    x, mask = given(masked)
    _, ours = pair(name, dropout=rates[0], recurrent_dropout=rates[1], seed=7)
    for training in (True, False):
        outcome(ours, x, mask, training)
    waits("error")
    for training in (True, False, True):
        outcome(ours, x, mask, training)
