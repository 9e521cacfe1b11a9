"""whorl.keras on engine `persistent` (torch backend), whose kernels run on the host by `emulation`."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl.keras  # noqa: E402
from emulation import emulated  # noqa: E402
from thinned import thinned  # noqa: E402
from whorl.engines.cuda import aligned, entering, layers, products  # noqa: E402
from whorl.engines.cuda.marked import Marked  # noqa: E402
from whorl.engines.cuda.plain import Plain  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
RATES = {"plain": (0.0, 0.0), "recurrent": (0.0, 0.4), "both": (0.3, 0.4)}


def pair(name: str, rates: str, **arguments: Any) -> list[Any]:
    """Keras' layer and ours, of the same weights and the same seed."""
    keras.utils.set_random_seed(1)
    dropout, recurrent_dropout = RATES[rates]
    given = dict(dropout=dropout, recurrent_dropout=recurrent_dropout, seed=7, bias_initializer="random_normal")
    made = [getattr(source, name)(6, **given, **arguments) for source in (keras.layers, whorl.keras)]
    for layer in made:
        layer.build(x.shape)
    made[1].set_weights(made[0].get_weights())
    return made


def step(layer: Any, masked: bool) -> list[torch.Tensor]:
    """Of training: the output, and the gradients of the weights."""
    y = layer(x, mask=mask if masked else None, training=True)
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), [own.value for own in layer.trainable_variables])]


@pytest.mark.parametrize(
    "name, rates, masked, sequences", thinned(2, ["LSTM", "GRU", "SimpleRNN"], RATES, [False, True], [False, True])
)
def test_training_is_keras_own(name: str, rates: str, masked: bool, sequences: bool, folder: Path) -> None:
    """Masks of dropout lie in the cell's order, where Keras' GRU has another."""
    stock, ours = pair(name, rates, return_sequences=sequences)
    marked = masked or rates != "plain"
    for _ in range(2):
        wanted = step(stock, masked)
        with emulated(folder):
            found = step(ours, masked)
            assert [type(made) for _, made in layers._prepared.values()] == [Marked if marked else Plain]
        for got, truth in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5)


class Counted(TorchDispatchMode):
    """How many operations of torch run."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_a_mask_and_dropout_cost_the_host_few_operations(folder: Path) -> None:
    """Beside a plain step; products are handed to cuBLAS, which is none of torch's operations."""
    own, counts = products.product, {}
    with emulated(folder) as patch:
        library = SimpleNamespace(cublasGemmEx=lambda *given: 0, cublasSetMathMode=lambda *given: 0)
        patch.setattr(products, "cublas", lambda: library)
        for module in (layers, aligned, entering):
            patch.setattr(module, "product", own)
        for rates, masked in (("plain", False), ("plain", True), ("recurrent", False)):
            ours = pair("LSTM", rates)[1]
            step(ours, masked)
            with Counted() as counted:
                step(ours, masked)
            counts[rates, masked] = counted.count
    plain = counts["plain", False]
    assert counts["plain", True] <= plain + 4
    assert counts["recurrent", False] <= plain + 19
