"""The kernels of engine `persistent`, run on the host by `emulation`: the numbers of `reference` in float64."""

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import option_draws
import whorl
from comparison import broken, error, flat, weighted
from emulation import H200, emulated
from option_draws import Drawn, drawn
from whorl.bench.baseline import TF32_EPS, PlainLoop, to_tf32
from whorl.engines.cuda import grid, spreading, store, tiling
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def outcome(
    layer: torch.nn.Module, x: Tensor, dtype: torch.dtype, engine: str, folder: Path, tf32: bool = False
) -> dict[str, Tensor]:
    layer = layer.to(dtype)
    layer.engine = engine
    x = x.to(dtype).detach().requires_grad_()
    with emulated(folder, tf32):
        return with_gradients(layer, x)


def with_gradients(layer: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
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
        ("LSTM", 20, 9, 4, torch.float16, dict(activation="softplus")),
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


def test_a_layer_on_a_gpu_that_is_not_the_current_one_runs_there(folder: Path) -> None:
    layer, x = whorl.GRU(3, 4, engine="persistent"), torch.randn(2, 1, 3)
    entered: list[int] = []
    with emulated(folder), pytest.MonkeyPatch.context() as patch:
        layer(x)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        patch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
        layer(x)[0].sum().backward()
    assert entered == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_softplus_is_good_to_an_eps_of_each_value(dtype: torch.dtype, folder: Path) -> None:
    x = torch.tensor([-80.0, -20, -9, -3, -2.75, -1, -(2**-10), 0, 2**-10, 1, 3, 19.5, 20.5, 1e4, torch.inf, torch.nan])
    layer = whorl.RNN(1, 1, activation="softplus", bias=False)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.fill_(1.0)
    truth = x.to(dtype).double()
    got = outcome(layer, x[None, :, None], dtype, "persistent", folder, tf32=True)[0].detach().double().flatten()
    eps = TF32_EPS if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(got, F.softplus(truth), rtol=eps, atol=0, equal_nan=True)


def test_forward_and_backward_are_compiled_side_by_side_and_once(folder: Path) -> None:
    layer, asked = whorl.GRU(3, 4, engine="persistent"), []
    with emulated(folder), pytest.MonkeyPatch.context() as patch:
        real = store.kernels

        def kernels(wanted: Any) -> list[bytes]:
            asked.append([name for _, name, *_ in wanted if name.startswith("gru")])
            return real(wanted)

        patch.setattr(store, "kernels", kernels)
        layer(torch.randn(2, 1, 3))[0].sum().backward()
        together = next(names for names in asked if names)
        assert [name.split("_")[1] for name in together] == ["forward", "backward"]
        asked.clear()
        layer(torch.randn(7, 1, 3))[0].sum().backward()
        assert [names for names in asked if names] == []


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(
    "kind, units, options", [("LSTM", 20, dict(num_layers=2)), ("GRU", 33, dict(bidirectional=True))]
)
def test_float32(kind: str, units: int, tf32: bool, options: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(1)
    layer, x = getattr(whorl, kind)(6, units, **options), torch.randn(4, 9, 6)
    truth = outcome(layer, x, torch.float64, "reference", folder)
    plain = outcome(layer, x, torch.float32, "reference", folder)
    got = outcome(layer, x, torch.float32, "persistent", folder, tf32)
    errors = {name: error(got[name], truth[name]) for name in truth}
    allowed = 4 * TF32_EPS if tf32 else 2 * max(error(plain[name], truth[name]) for name in truth) + 4 * 2.0**-23
    assert max(errors.values()) <= allowed
    assert (max(errors.values()) > 1e-5) == tf32


@pytest.mark.parametrize(
    "kind, units, batch, time, ahead, back, options",
    [
        ("LSTM", 37, 11, 5, (16, 1, 1, 8, 1), (16, 1, 1, 1, 8), dict(bidirectional=True)),
        ("LSTM", 37, 11, 3, (16, 2, 1, 8, 2), (16, 2, 1, 2, 8), dict(num_layers=2)),
        ("GRU", 30, 19, 3, (12, 1, 2, 8, 1), (16, 2, 1, 1, 12), dict(bias=False)),
        ("RNN", 45, 25, 36, (24, 2, 1, 8, 1), (16, 4, 3, 1, 8), dict(nonlinearity="relu")),
    ],
)
@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
def test_layers_spread_over_blocks_that_exchange(
    kind: str, units: int, batch: int, time: int, ahead: tuple[int, ...], back: tuple[int, ...],
    options: dict[str, Any], precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As layers that no cluster holds; small ones, whose batch takes one launch or several."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        given, make = (ahead, spreading.forward) if way == "forward" else (back, spreading.backward)
        return make(size, *given, chip.shared, parts=1 + (kind == "LSTM"))

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    torch.manual_seed(1)
    tf32, dtype = precision == "tf32", torch.bfloat16 if precision == "bfloat16" else torch.float32
    layer = getattr(whorl, kind)(6, units, **options).to(dtype)
    x = torch.randn(time, batch, 6).to(dtype)
    truth = outcome(layer, x, torch.float64, "reference", folder)
    got = outcome(layer, x, dtype, "persistent", folder, tf32)
    rounding = to_tf32 if tf32 else None
    plain = with_gradients(PlainLoop(layer, rounding), x.float().detach().requires_grad_())
    eps = TF32_EPS if tf32 else torch.finfo(dtype).eps
    bounds = {name: 2 * error(plain[name], truth[name]) + 4 * eps for name in truth}
    errors = {name: (error(got[name], truth[name]), bounds[name]) for name in truth}
    assert {name: e for name, e in errors.items() if not e[0] <= e[1]} == {}


@pytest.mark.parametrize("kind, units", [("LSTM", 37), ("GRU", 30)])
def test_each_way_may_be_of_another_regime(
    kind: str, units: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Tile | Spread | None:
        regime = spreading if (way == "forward") == (kind == "LSTM") else tiling
        return regime.choose(size, chip, batch, directions, way)

    monkeypatch.setattr(grid, "choose", chosen)
    torch.manual_seed(1)
    layer, x = getattr(whorl, kind)(6, units).bfloat16(), torch.randn(5, 9, 6).bfloat16()
    truth = outcome(layer, x, torch.float64, "reference", folder)
    plain, got = (outcome(layer, x, torch.bfloat16, engine, folder) for engine in ("reference", "persistent"))
    bounds = {name: 2 * error(plain[name], truth[name]) + 4 * torch.finfo(torch.bfloat16).eps for name in truth}
    errors = {name: (error(got[name], truth[name]), bounds[name]) for name in truth}
    assert {name: e for name, e in errors.items() if not e[0] <= e[1]} == {}


@pytest.mark.parametrize("seed", range(8))
def test_random_options(seed: int, folder: Path) -> None:
    case = drawn(seed, largest=20, batch=12)
    print(case)
    with emulated(folder):
        assert case.errors("cpu", (torch.float16, torch.bfloat16, torch.float32)[seed % 3]) == {}


@pytest.mark.parametrize(
    "kind, units, batch, on, dtype",
    [
        ("LSTM", 16, 3, "step", torch.bfloat16),
        ("LSTM", 40, 20, "zoneout step", torch.bfloat16),
        ("GRU", 37, 9, "zoneout", torch.float32),
        ("RNN", 24, 9, "zoneout step reset mask", torch.float16),
        ("LSTM", 13, 6, "zoneout step packed", torch.bfloat16),  # sequences are counted in another order
    ],
)
def test_what_is_drawn_anew_at_each_step(
    kind: str, units: int, batch: int, on: str, dtype: torch.dtype, folder: Path
) -> None:
    case = Drawn(kind, frozenset(on.split()), units, batch, 4, directions=2, seed=2)
    with emulated(folder):
        assert case.errors("cpu", dtype) == {}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inputs, units", [(8, 16), (4, 24), (3, 12)])
def test_whole_tensors_behind_masks(inputs: int, units: int, packed: bool, folder: Path) -> None:
    """16 bytes at a time, where a row has so many, and element by element."""
    on = frozenset({"gate", "input_dropout", *(["packed"] if packed else ["lengths", "mask"])})
    case = Drawn("LSTM", on, units, 9, 3, 2, inputs=inputs, seed=1)
    with emulated(folder):
        for dtype in (torch.bfloat16, torch.float32):
            assert case.errors("cpu", dtype) == {}


@pytest.mark.parametrize("seed", range(12))
def test_random_options_where_blocks_exchange(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers that no cluster holds: small ones, in one part or two of a block, in several launches."""
    tiles, subs = ((1, 1), (2, 1), (1, 2))[seed % 3]

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "forward":
            return spreading.forward(size, 16, tiles, subs, 8, 1 + seed % 2, chip.shared)
        return spreading.backward(size, 16, 1 + seed % 2, tiles, subs, 8, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "parts", lambda *_: 1)
    case = drawn(seed, largest=40, batch=20)
    print(case)
    with emulated(folder):
        assert case.errors("cpu", (torch.float16, torch.bfloat16, torch.float32, torch.bfloat16)[seed % 4]) == {}


@pytest.mark.parametrize(
    "kind, units, ahead, back, dtype, given",
    [
        ("LSTM", 70, (32, 2, 1, 8, 2), (32, 2, 1, 2, 8), torch.bfloat16, False),  # a warp has gates of its own
        ("LSTM", 37, (16, 1, 2, 8, 4), (16, 2, 2, 1, 8), torch.bfloat16, True),
        ("GRU", 70, (32, 1, 1, 8, 2), (32, 1, 1, 2, 8), torch.float16, False),  # two warps share a gate
        ("GRU", 37, (16, 1, 1, 8, 2), (16, 1, 1, 3, 8), torch.float32, True),  # a strip past the last gate
        ("GRU", 37, (24, 1, 1, 8, 1), (24, 1, 1, 1, 8), torch.float32, False),  # strips with rows of two gates
        ("LSTM", 37, (8, 2, 1, 8, 1), (8, 1, 1, 4, 8), torch.float32, True),
    ],
)
def test_masks_by_gate_where_blocks_exchange(
    kind: str, units: int, ahead: tuple[int, ...], back: tuple[int, ...], dtype: torch.dtype, given: bool,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        own, make = (ahead, spreading.forward) if way == "forward" else (back, spreading.backward)
        return make(size, *own, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)
    case = Drawn(kind, frozenset({"gate", *(["given"] if given else [])}), units, 19, 3, seed=1)
    with emulated(folder):
        assert case.errors("cpu", dtype) == {}


def test_values_beside_a_kink_are_held_to_the_rule_over_several_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this call some new states are 0.5, where they are clipped, to less than an eps."""
    case = drawn(97, largest=60, time=12)
    with emulated(folder):
        layer, (tensors, marks) = case.layer("cpu", torch.float16), case.call("cpu", torch.float16)
        assert broken([case._measured(layer, tensors, marks, torch.float16)], torch.finfo(torch.float16).eps)
        assert case.errors("cpu", torch.float16) == {}
        real = case.results
        wrong = {"persistent": 1.05}

        def with_a_fault(layer: torch.nn.Module, *rest: Any) -> dict[str, Tensor]:
            return {name: wrong.get(layer.engine, 1.0) * value for name, value in real(layer, *rest).items()}

        monkeypatch.setattr(case, "results", with_a_fault)
        monkeypatch.setattr(option_draws, "_NEAR", 3)
        assert "output 0" in case.errors("cpu", torch.float16)


@pytest.mark.parametrize("seed, dtype", [(8, torch.float32), (140, torch.float32), (141, torch.bfloat16)])
def test_random_options_are_drawn_up_to_what_the_engine_holds(seed: int, dtype: torch.dtype) -> None:
    case = drawn(seed, largest=300)
    largest = replace(case, units=5_000).within(H200, dtype)
    assert 256 <= largest.units < 5_000
    assert largest.within(H200, dtype).units == largest.units
    assert replace(case, units=5).within(H200, dtype).units == 5
