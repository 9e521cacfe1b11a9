"""The kernels of engine `persistent`, run on the host by `emulation`: the numbers of `reference` in float64."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from comparison import error, flat, weighted
from emulation import emulated
from option_draws import drawn
from whorl.engines.cuda import grid, spreading
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def outcome(layer: torch.nn.Module, x: Tensor, dtype: torch.dtype, engine: str, folder: Path) -> dict[str, Tensor]:
    layer = layer.to(dtype)
    layer.engine = engine
    x = x.to(dtype).requires_grad_()
    with emulated(folder):
        outputs = flat(layer(x))
        wanted = {"x": x, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(weighted(outputs), list(wanted.values()))
    return dict(enumerate(outputs)) | dict(zip(wanted, grads, strict=True))


@pytest.mark.parametrize(
    "kind, units, batch, time, dtype, options",
    [
        ("LSTM", 20, 9, 4, torch.bfloat16, dict(num_layers=2, bidirectional=True)),
        ("GRU", 33, 5, 3, torch.float16, {}),
        ("RNN", 130, 10, 2, torch.bfloat16, dict(nonlinearity="relu")),
    ],
)
def test_plain_layers(
    kind: str, units: int, batch: int, time: int, dtype: torch.dtype, options: dict[str, Any], folder: Path
) -> None:
    torch.manual_seed(1)
    layer = getattr(whorl, kind)(6, units, **options).to(dtype)
    x = torch.randn(time, batch, 6).to(dtype)
    truth = outcome(layer, x, torch.float64, "reference", folder)
    plain, got = (outcome(layer, x, dtype, engine, folder) for engine in ("reference", "persistent"))
    bounds = {name: 2 * error(plain[name], truth[name]) + 4 * torch.finfo(dtype).eps for name in truth}
    errors = {name: (error(got[name], truth[name]), bounds[name]) for name in truth}
    assert {name: e for name, e in errors.items() if not e[0] <= e[1]} == {}


@pytest.mark.parametrize(
    "kind, units, batch, time, ahead, back, options",
    [
        ("LSTM", 37, 11, 5, (16, 1, 1, 8, 1), (16, 1, 1, 1, 8), dict(bidirectional=True)),
        ("LSTM", 37, 11, 3, (16, 2, 1, 8, 2), (16, 2, 1, 2, 8), dict(num_layers=2)),
        ("GRU", 30, 19, 3, (12, 1, 2, 8, 1), (16, 2, 1, 1, 12), dict(bias=False)),
        ("RNN", 45, 25, 36, (24, 2, 1, 8, 1), (16, 4, 3, 1, 8), dict(nonlinearity="relu")),
    ],
)
def test_layers_spread_over_blocks_that_exchange(
    kind: str, units: int, batch: int, time: int, ahead: tuple[int, ...], back: tuple[int, ...],
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As layers that no cluster holds; small ones, whose batch takes one launch or several."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str, plain: bool) -> Spread | None:
        given, make = (ahead, spreading.forward) if way == "forward" else (back, spreading.backward)
        return make(size, *given, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "parts", lambda *_: 1)
    torch.manual_seed(1)
    dtype = torch.bfloat16
    layer = getattr(whorl, kind)(6, units, **options).to(dtype)
    x = torch.randn(time, batch, 6).to(dtype)
    truth = outcome(layer, x, torch.float64, "reference", folder)
    plain, got = (outcome(layer, x, dtype, engine, folder) for engine in ("reference", "persistent"))
    bounds = {name: 2 * error(plain[name], truth[name]) + 4 * torch.finfo(dtype).eps for name in truth}
    errors = {name: (error(got[name], truth[name]), bounds[name]) for name in truth}
    assert {name: e for name, e in errors.items() if not e[0] <= e[1]} == {}


@pytest.mark.parametrize("seed", range(8))
def test_random_options(seed: int, folder: Path) -> None:
    case = drawn(seed, largest=20, batch=12)
    print(case)
    with emulated(folder):
        assert case.errors("cpu", torch.float16 if seed % 3 == 0 else torch.bfloat16) == {}
