"""The kernels of engine `persistent`, run on the host by `emulation`: the numbers of `reference` in float64."""

import itertools
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import whorl
from changing_sizes import (
    assert_right_at_each_step,
    assert_right_beside_larger_ones,
    assert_what_is_no_number_stays_one,
)
from comparison import broken, error, flat, weighted
from emulation import CHIP, Kernel, compiled, emulated, left_behind
from option_draws import Drawn
from thinned import thinned
from whorl.bench.baseline import TF32_EPS, PlainLoop, to_tf32
from whorl.engines.cuda import beside, grid, options, prepare, spreading, store, tiling
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile

BY_GATE = dict(recurrent_dropout=0.3, recurrent_dropout_mode="gate")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def outcome(
    layer: torch.nn.Module, x: Tensor, dtype: torch.dtype, engine: str, folder: Path, tf32: bool = False,
    gradients: bool = True,
) -> dict[str, Tensor]:  # fmt: skip
    layer = layer.to(dtype)
    layer.engine = engine
    x = x.to(dtype).detach().requires_grad_(gradients)
    with emulated(folder, tf32), torch.set_grad_enabled(gradients):
        return with_gradients(layer, x) if gradients else dict(enumerate(flat(layer(x))))


def assert_right(layer: torch.nn.Module, x: Tensor, dtype: torch.dtype, folder: Path) -> None:
    """Outputs and gradients follow the error rule; the baseline is `reference` in the same dtype."""
    truth = outcome(layer, x, torch.float64, "reference", folder)
    plain, got = (outcome(layer, x, dtype, engine, folder) for engine in ("reference", "persistent"))
    assert_near(got, plain, truth, torch.finfo(dtype).eps)


def assert_near(got: dict[str, Tensor], plain: dict[str, Tensor], truth: dict[str, Tensor], eps: float) -> None:
    bounds = {name: 2 * error(plain[name], truth[name]) + 4 * eps for name in truth}
    errors = {name: (error(got[name], truth[name]), bounds[name]) for name in truth}
    assert {name: e for name, e in errors.items() if not e[0] <= e[1]} == {}


def with_gradients(layer: torch.nn.Module, x: Tensor, **given: Tensor) -> dict[str, Tensor]:
    outputs = flat(layer(x, **given))
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
    assert_right(layer, x, dtype, folder)


def test_a_layer_on_a_gpu_that_is_not_the_current_one_runs_there(folder: Path) -> None:
    layer, x = whorl.GRU(3, 4, engine="persistent"), torch.randn(2, 1, 3)
    entered: list[int] = []
    with emulated(folder) as patch:
        layer(x)
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        patch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
        layer(x)[0].sum().backward()
    assert entered == [0, 0]


WAITS = {
    "for one that does not come": "if (threadIdx.x) __syncthreads();",
    "for a word that nobody writes": "while (emulated_look(a.words).x != 1) {}",
    "for bytes that nobody sends": "start_and_expect(); emulated_wait(0, 0);",
    "for nothing": "start_and_expect(); emulated_send(0, 0, uint4{}); emulated_wait(0, 0); __syncthreads();",
}


@pytest.mark.parametrize("what", WAITS)
def test_threads_that_wait_for_each_other_are_found(what: str, folder: Path) -> None:
    begin = "if (threadIdx.x == 0) emulated_start_barrier(0, 1), emulated_expect(0, 32 * 16); __syncthreads();"
    text = "struct Arguments { unsigned* words; };\n"
    text += f"static void start_and_expect() {{ {begin} }}\n"
    text += f"static void KERNEL(const Arguments& a) {{ {WAITS[what]} }}\n"
    kernel, words = Kernel(compiled(text, "kernel", "", folder=folder), "kernel", 0, 32, 16, 1, "P"), torch.zeros(4)
    finds = nullcontext() if what == "for nothing" else pytest.raises(AssertionError, match="wait for each other")
    with finds:
        kernel(0, 1, 1, words.data_ptr())


@pytest.mark.parametrize("words, enough", [(4, True), (3, False)])
def test_who_writes_to_more_shared_memory_than_the_launch_asks_for_is_found(
    words: int, enough: bool, folder: Path
) -> None:
    text = "struct Arguments { long long none; };\nstatic void KERNEL(const Arguments& a) {\n"
    text += "  extern __shared__ unsigned memory[];\n  if (threadIdx.x < 4) memory[threadIdx.x] = 0;\n}\n"
    kernel = Kernel(compiled(text, "kernel", "", folder=folder), "kernel", 0, 32, 4 * words, 1, "q")
    with nullcontext() if enough else pytest.raises(AssertionError, match="more shared memory than the 12 bytes"):
        kernel(0, 1, 1, 0)


@pytest.mark.parametrize("units, batch", [(40, 8), (72, 20)])
def test_states_of_any_size_are_as_good_whether_their_scale_is_usual_or_found(
    units: int, batch: int, folder: Path
) -> None:
    """Of a layer whose output is as large as its input is: sequences that are powers of two of each other."""
    torch.manual_seed(2)
    layer = whorl.RNN(6, units, nonlinearity="relu", bias=False)
    sizes = torch.tensor([2.0**power for power in (-30, -6, 0, 3, 9, 30)]).repeat(4)[:batch, None]
    x = torch.randn(6, 1, 6) * sizes
    truth = outcome(layer, x, torch.float64, "reference", folder, gradients=False)[0]
    got = outcome(layer, x, torch.float32, "persistent", folder, True, gradients=False)[0]
    apart = (got.double() - truth).abs().amax((0, 2)) / truth.abs().amax((0, 2))
    assert apart.max() <= 4 * TF32_EPS


@pytest.mark.parametrize(
    "units, batch, ahead",
    [
        (40, 9, (1, 2, 2, 1)),  # a block alone
        (40, 19, (2, 3, 2, 3)),
        (70, 21, (4, 3, 4, 3, 2)),  # other warps compute the cell
        (120, 21, (4, 3, 2, 3, 2, 2)),  # and each group's states have a barrier of their own
    ],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_states_that_change_their_size_from_step_to_step(
    units: int, batch: int, ahead: tuple[int, ...], ragged: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "choose", in_sub_tiles(ahead, (2, 1, 8, 1)))
    monkeypatch.setattr(Chip, "resident", lambda *_: 1)
    with emulated(folder, True):
        assert_right_at_each_step(units, batch, ragged, "cpu")


@pytest.mark.parametrize("check", [assert_right_beside_larger_ones, assert_what_is_no_number_stays_one])
@pytest.mark.parametrize(
    "units, ahead", [(70, (1, 2, 2, 1)), (70, (2, 2, 2, 2)), (120, (4, 3, 4, 3, 2)), (120, (4, 2, 2, 2, 2, 2))]
)
def test_units_of_all_sizes_in_one_sequence(
    units: int, ahead: tuple[int, ...], check: Callable[[int, str], None], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "choose", in_sub_tiles(ahead, (2, 1, 8, 1)))
    monkeypatch.setattr(Chip, "resident", lambda *_: 1)
    with emulated(folder, True):
        check(units, "cpu")


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
    with emulated(folder) as patch:
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


def test_a_pass_loads_nothing_and_makes_float16_of_weights_just_before_it_multiplies_them(folder: Path) -> None:
    """All is loaded with a plan, backward too: a capture of a CUDA graph can load nothing."""
    layer, x, done = whorl.GRU(3, 20, bidirectional=True, engine="persistent"), torch.randn(2, 9, 3), []

    class Noted(Kernel):
        def __init__(self, code: bytes, name: str, *rest: Any, early: bool) -> None:
            super().__init__(code, name, *rest, early=early)
            done.append(f"load {name}")

        def __call__(self, *given: Any) -> None:
            done.append(self.name)
            super().__call__(*given)

    with emulated(folder) as patch:
        patch.setattr(prepare, "Kernel", Noted)
        layer(x)[0].sum().backward()
    launched = next(at for at, what in enumerate(done) if not what.startswith("load"))
    assert not any(what.startswith("load") for what in done[launched:])
    halves, back, *rest = done[launched:]
    assert (halves, back.split("_")[1]) == ("halve_3x20_in_two", "forward")
    assert (rest[0], rest[1].split("_")[1]) == ("halve_3x20_in_two_by_16", "backward")


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("units", [33, 40])
def test_both_directions_of_float32_where_blocks_exchange(
    units: int, tf32: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has float16 weights of its own, which all launches of a pass read."""
    spread_thinly(monkeypatch, 2)
    torch.manual_seed(1)
    layer, x = whorl.LSTM(6, units, bidirectional=True), torch.randn(3, 17, 6)
    truth = outcome(layer, x, torch.float64, "reference", folder)
    rival = torch.nn.LSTM(6, units, bidirectional=True)
    rival.load_state_dict(layer.float().state_dict())
    plain = with_gradients(PlainLoop(rival, to_tf32 if tf32 else None), x.clone().requires_grad_())
    got = outcome(layer, x, torch.float32, "persistent", folder, tf32)
    assert_near(got, plain, truth, TF32_EPS if tf32 else 2.0**-23)


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


def in_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are in clusters of two blocks, and float32 is multiplied as float16."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Tile | None:
        if way == "forward":
            return tiling.forward(size, 2, 1, 2 if size.units > 32 else 4, chip.shared)
        return tiling.backward(size, 2, 1, 4, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)


def spread_thinly(monkeypatch: pytest.MonkeyPatch, gathered: int) -> None:
    """Layers are as those that no cluster holds: blocks of 16 units, some of which gather gradients of gates.

    Where some do four warps multiply together forward, if products are of float16.
    """

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "forward" and gathered > 1 and spreading.scaled(size, way):
            return spreading.forward(size, 16, 1, 1, 8, 4, chip.shared, wide=True)
        if way == "forward":
            return spreading.forward(size, 16, 1, 1, 8, 1, chip.shared)
        return spreading.backward(size, 16, gathered, 1, 1, 8, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)


@pytest.mark.parametrize("gathered", [0, 1, 2])
@pytest.mark.parametrize("tf32", [False, True])
def test_initial_states_and_weights_of_any_size_are_as_good_as_others(
    tf32: bool, gathered: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 they enter products as float16, each sequence and unit with a scale of its own."""
    if gathered:
        spread_thinly(monkeypatch, gathered)
    else:
        in_a_pair(monkeypatch)
    torch.manual_seed(1)
    layer, x = whorl.RNN(6, 40, bias=False), torch.zeros(1, 9, 6)
    states = torch.randn(1, 9, 40) * 2.0 ** torch.arange(-13, 23, 4)[:, None]
    with torch.no_grad():
        layer.weight_hh_l0 *= 2.0 ** -(torch.arange(40) % 20 + 22)[:, None]

    def output(dtype: torch.dtype, engine: str) -> Tensor:
        own = layer.to(dtype)
        own.engine = engine
        with emulated(folder, tf32):
            return own(x.to(dtype), states.to(dtype))[0][0].double()

    terms = states[0].double().abs() @ layer.weight_hh_l0.detach().double().abs().t()
    got, truth = output(torch.float32, "persistent"), output(torch.float64, "reference")
    assert ((got - truth).abs() / terms).max() <= (2.0**-10 if tf32 else 2.0**-20)  # each of two is rounded


@pytest.mark.parametrize("of, tf32, gathered", thinned(2, [
    # float16 holds none of these sizes
    ("LSTM", 1.0, 10.0, 1e3, 2.0**100), ("LSTM", 1e-7, 1.0, 0.0, 2.0**-100), ("RNN", 1.0, 1e-4, 1e30, 1e-8),
    ("GRU", 1.0, 1.0, 1e3, 1e30), ("RELU", 1e20, 1e-4, 1e-30, 1e-30),
], [False, True], [0, 1, 2]))  # fmt: skip
def test_float32_of_any_size(
    of: tuple[str, float, float, float, float], tf32: bool, gathered: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As well as a plain loop, each sequence taken for itself, which has another size than its neighbours."""
    if gathered:
        spread_thinly(monkeypatch, gathered)
    else:
        in_a_pair(monkeypatch)
    torch.manual_seed(1)
    kind, of_x, of_weights, of_states, of_loss = of
    relu = dict(nonlinearity="relu") if kind == "RELU" else {}
    layer = getattr(whorl, kind.replace("RELU", "RNN"))(6, 40, bias=False, **relu)
    with torch.no_grad():
        for weight in layer.parameters():
            weight *= of_weights
    each = 2.0 ** torch.arange(-6, 7, 3)[:, None]
    x, h = of_x * torch.randn(4, 5, 6), of_states * each * torch.randn(1, 5, 40)
    to_y = of_loss * each * torch.randn(4, 5, 40)

    def outcome(own: torch.nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        given, start = x.to(dtype).requires_grad_(), h.to(dtype).requires_grad_()
        y = flat(own(given, (start, start) if kind == "LSTM" else start))[0]
        weights = list(own.parameters())
        to_x, to_h, *to_weights = torch.autograd.grad((y * to_y.to(dtype)).sum(), [given, start, *weights])
        return dict(y=y.detach(), x=to_x, h=to_h, ih=to_weights[0], hh=to_weights[1])

    layer.engine = "reference"
    truth = outcome(layer.double(), torch.float64)
    plain = outcome(PlainLoop(layer.float(), to_tf32 if tf32 else None), torch.float32)
    layer.engine = "persistent"
    with emulated(folder, tf32):
        got = outcome(layer, torch.float32)

    def errors(name: str, b: int) -> tuple[float, float]:
        its = slice(None) if name in ("ih", "hh") else (slice(None), b)
        return error(got[name][its], truth[name][its]), error(plain[name][its], truth[name][its])

    rows = [{name: errors(name, b) for name in truth} for b in range(5)]
    assert broken(rows, TF32_EPS if tf32 else 2.0**-23) == {}


@pytest.mark.parametrize("of, tf32, gathered", thinned(
    2, [("LSTM", {}), ("GRU", {}), ("LSTM", dict(activation="softplus"))], [False, True], [0, 1, 2]
))  # fmt: skip
def test_what_is_not_a_number_stays_in_its_sequence(
    of: tuple[str, dict[str, Any]], tf32: bool, gathered: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the input of one, in the gradients of another; also where float32 enters products as float16, scaled."""
    if gathered:
        spread_thinly(monkeypatch, gathered)
    else:
        in_a_pair(monkeypatch)
    torch.manual_seed(1)
    kind, options = of
    layer = getattr(whorl, kind)(3, 33, engine="persistent", **options)
    x, to_y = torch.randn(3, 5, 3), torch.randn(3, 5, 33)

    def outcome(x: Tensor, to_y: Tensor) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        with emulated(folder, tf32):
            y = layer(given)[0]
            return y.detach(), torch.autograd.grad(y, given, to_y)[0]

    y, to_x = outcome(x, to_y)
    x[1, 2, 0], to_y[2, 3, 7] = float("nan"), float("nan")
    wrong, to_wrong = outcome(x, to_y)
    assert wrong[1:, 2].isnan().all()
    assert to_wrong[:, 3].isnan().all()
    fine = torch.tensor([0, 1, 4])
    assert wrong[:, fine].equal(y[:, fine])
    assert wrong[:, 3].equal(y[:, 3])
    assert to_wrong[:, fine].equal(to_x[:, fine])


@pytest.mark.parametrize("kind, gathered, tf32", thinned(2, ["LSTM", "GRU", "RNN"], [0, 1, 2], [False, True]))
def test_large_initial_states_stay_right_in_float32(
    kind: str, gathered: int, tf32: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GRU keeps what is beyond float16's range, were it scaled as what is in [-1, 1]."""
    if gathered:
        spread_thinly(monkeypatch, gathered)
    else:
        in_a_pair(monkeypatch)
    torch.manual_seed(1)
    layer, x, h = getattr(whorl, kind)(3, 20), torch.randn(3, 5, 3), 10 * torch.randn(1, 5, 20)

    def output(dtype: torch.dtype, engine: str) -> Tensor:
        own = layer.to(dtype)
        own.engine = engine
        given = h.to(dtype)
        with emulated(folder, tf32):
            return own(x.to(dtype), (given, given) if kind == "LSTM" else given)[0].double()

    eps = TF32_EPS if tf32 else 2.0**-23
    assert error(output(torch.float32, "persistent"), output(torch.float64, "reference")) <= 8 * eps


@pytest.mark.parametrize(
    "kind, units, batch, time, ahead, back, options",
    [
        ("LSTM", 37, 11, 5, (16, 1, 1, 8, 1), (16, 1, 1, 1, 8), dict(bidirectional=True)),
        ("LSTM", 37, 11, 3, (16, 2, 1, 8, 2), (16, 2, 1, 2, 8), dict(num_layers=2)),
        ("GRU", 30, 19, 36, (12, 1, 2, 8, 1), (16, 2, 1, 1, 12), dict(bias=False)),
        ("GRU", 37, 70, 3, (16, 2, 1, 8, 2), (16, 2, 2, 4, 8), {}),  # threads compute two parts of a block at once
        ("RNN", 45, 25, 36, (24, 2, 1, 8, 1), (16, 4, 3, 1, 8), dict(nonlinearity="relu")),
        # states of any size, whose scales travel behind them: of blocks of 8, 16 and 64 units, in parts in turn, too
        ("RNN", 45, 25, 36, (8, 2, 1, 8, 1), (16, 4, 3, 1, 8), dict(nonlinearity="relu")),
        ("LSTM", 37, 21, 36, (16, 1, 2, 8, 2), (16, 2, 1, 2, 8), dict(activation="softplus", bidirectional=True)),
        ("GRU", 70, 30, 4, (64, 3, 1, 8, 4), (16, 4, 3, 1, 8), dict(activation="relu")),
    ],
)
@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
def test_layers_spread_over_blocks_that_exchange(
    kind: str, units: int, batch: int, time: int, ahead: tuple[int, ...], back: tuple[int, ...],
    options: dict[str, Any], precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As layers that no cluster holds; small ones, whose batch takes one launch or several."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        parts = 1 + (kind == "LSTM")
        if way == "backward":
            return spreading.backward(size, *back, chip.shared, parts=parts)
        tile = spreading.forward(size, *ahead, chip.shared, parts=parts)
        return tile or spreading.forward(size._replace(halves=False), *ahead, chip.shared, parts=parts)

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
    assert_near(got, plain, truth, TF32_EPS if tf32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "kind, units, batch, time, ahead, resident, options",
    [
        ("LSTM", 70, 11, 5, (32, 1, 1, 8, 8), 2, dict(bidirectional=True)),
        ("LSTM", 37, 37, 36, (16, 2, 2, 8, 4), None, {}),  # four warps share the depth with the other four
        ("GRU", 45, 19, 4, (16, 3, 1, 8, 4), 0, dict(num_layers=2)),  # nothing stays in registers
        ("LSTM", 70, 33, 3, (64, 4, 1, 8, 8), 3, {}),  # two strips of a warp
        ("LSTM", 37, 37, 36, (16, 2, 2, 8, 4), None, dict(activation="softplus")),
        ("RNN", 150, 27, 36, (8, 3, 1, 8, 4), None, dict(nonlinearity="relu")),  # scales of 19 blocks
    ],
)
@pytest.mark.parametrize("precision", ["bfloat16", "float16", "tf32", "float32"])
def test_products_of_four_warps(
    kind: str, units: int, batch: int, time: int, ahead: tuple[int, ...], resident: int | None,
    options: dict[str, Any], precision: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if precision != "tf32" and options.keys() & {"activation", "nonlinearity"}:
        pytest.skip("states of any size have scales with TF32 products alone")

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "backward":
            return spreading.backward(size, 16, 1, 1, 1, 8, chip.shared)
        return spreading.forward(size, *ahead, chip.shared, resident, wide=True)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    torch.manual_seed(1)
    tf32, dtype = precision == "tf32", getattr(torch, precision.replace("tf32", "float32"))
    layer = getattr(whorl, kind)(6, units, **options).to(dtype)
    x = torch.randn(time, batch, 6).to(dtype)
    truth = outcome(layer, x, torch.float64, "reference", folder)
    got = outcome(layer, x, dtype, "persistent", folder, tf32)
    plain = with_gradients(PlainLoop(layer, to_tf32 if tf32 else None), x.float().detach().requires_grad_())
    assert_near(got, plain, truth, TF32_EPS if tf32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "units, time, ahead",
    [
        # three pieces of 32 times 16 bytes in a row, two of them in the first part; words come round
        (520, 36, (64, 1, 1, 8, 8, 2)),
        (520, 3, (64, 1, 2, 8, 4, 2)),  # four warps share the depth with the other four, two parts of the batch in turn
        (780, 3, (64, 2, 1, 8, 8, 4)),  # a part for each piece
        (520, 4, (64, 3, 1, 8, 8, 3)),  # 24 sequences, whose outputs of four bytes go before the lull
    ],
)
@pytest.mark.parametrize("precision, nonlinearity", [("bfloat16", "tanh"), ("tf32", "tanh"), ("tf32", "relu")])
def test_products_of_what_has_come_while_the_rest_is_on_its_way(
    units: int, time: int, ahead: tuple[int, ...], precision: str, nonlinearity: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        *tile, parts = ahead
        return spreading.forward(size, *tile, chip.shared, 9, parts=parts, wide=True)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    torch.manual_seed(1)
    tf32, dtype = precision == "tf32", torch.float32 if precision == "tf32" else torch.bfloat16
    layer, x = whorl.RNN(6, units, nonlinearity=nonlinearity).to(dtype), torch.randn(time, 10, 6).to(dtype)
    truth = outcome(layer, x, torch.float64, "reference", folder, gradients=False)
    got = outcome(layer, x, dtype, "persistent", folder, tf32, gradients=False)
    with torch.no_grad():
        plain = dict(enumerate(flat(PlainLoop(layer, to_tf32 if tf32 else None)(x.float()))))
    assert_near(got, plain, truth, TF32_EPS if tf32 else torch.finfo(dtype).eps)


def test_with_options_products_run_beside_what_comes_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as where all parts come first."""
    found = []
    for both in (False, True):

        def chosen(size: Size, chip: Chip, *_: Any, both: bool = both) -> Spread | None:
            made = spreading.forward(size, 32, 1, 1, 8, 8, chip.shared, 9, parts=2, wide=True)
            return made and replace(made, beside=both, sided=both, lull=110)

        monkeypatch.setattr(grid, "choose", chosen)
        torch.manual_seed(1)
        layer = whorl.LSTM(6, 520, zoneout=0.2, engine="persistent").to(torch.bfloat16)
        with emulated(folder), torch.no_grad():
            found.append(layer(torch.randn(20, 10, 6).to(torch.bfloat16))[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("seed", range(12))
def test_exact_products_where_blocks_exchange(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random sizes, each in any tile that fits, with initial states that are larger than what the cell makes."""
    given = random.Random(seed)
    kind, units = given.choice(("LSTM", "GRU", "RNN")), given.randint(1, 70)
    batch, time = given.randint(1, 40), given.choice((1, 2, 5, 36))

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "backward":
            return spreading.backward(size, 16, 1, 1, 1, 8, chip.shared)
        tile = given.choice(list(spreading.candidates(size, chip, way)))
        assert tile.planes == 2
        return tile

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    torch.manual_seed(seed)
    layer, x = getattr(whorl, kind)(6, units, bidirectional=seed % 2 == 0), torch.randn(time, batch, 6)
    h = 2 ** torch.randn(1 + (seed % 2 == 0), batch, 1) * torch.randn(1 + (seed % 2 == 0), batch, units)
    found = {}
    for engine, dtype in (("reference", torch.float64), ("persistent", torch.float32), ("plain", torch.float32)):
        own: torch.nn.Module = layer.to(dtype)
        layer.engine = "reference" if engine == "plain" else engine
        if engine == "plain":
            own = PlainLoop(layer)
        start, entering = h.to(dtype).requires_grad_(), x.to(dtype).requires_grad_()
        with emulated(folder):
            outputs = flat(own(entering, (start, start) if kind == "LSTM" else start))
            wanted = {"x": entering, "h": start, **dict(own.named_parameters())}
            grads = torch.autograd.grad(weighted(outputs), list(wanted.values()))
        found[engine] = dict(enumerate(outputs)) | dict(zip(wanted, grads, strict=True))
    assert_near(found["persistent"], found["plain"], found["reference"], 2.0**-23)


@pytest.mark.parametrize(
    "kind, units, batch, time, back, resident, options",
    [
        ("LSTM", 70, 11, 5, (16, 2, 1, 1, 8), 2, dict(bidirectional=True)),
        ("LSTM", 37, 37, 36, (16, 1, 2, 2, 8), None, {}),  # of eight warps five have units
        ("GRU", 45, 43, 4, (16, 2, 3, 2, 8), 0, dict(num_layers=2)),  # nothing stays in registers
        ("LSTM", 150, 33, 3, (16, 1, 4, 1, 8), 3, {}),  # two strips of a warp
        ("RNN", 70, 9, 3, (32, 2, 1, 1, 12), 1, {}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # which is multiplied as float16
def test_products_of_four_warps_backward(
    kind: str, units: int, batch: int, time: int, back: tuple[int, ...], resident: int | None, options: dict[str, Any],
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "forward":
            return spreading.forward(size, 16, 1, 1, 8, 1, chip.shared)
        return spreading.backward(size, *back, chip.shared, resident, parts=2, wide=True)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    torch.manual_seed(1)
    layer = getattr(whorl, kind)(6, units, **options).to(dtype)
    x = torch.randn(time, batch, 6).to(dtype)
    tf32 = dtype == torch.float32
    truth = outcome(layer, x, torch.float64, "reference", folder)
    got = outcome(layer, x, dtype, "persistent", folder, tf32)
    plain = with_gradients(PlainLoop(layer, to_tf32 if tf32 else None), x.float().detach().requires_grad_())
    assert_near(got, plain, truth, TF32_EPS if tf32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "kind, units, batch, on, back, resident",
    [
        ("LSTM", 40, 19, "gate mask reset", (16, 2, 2, 1, 8), None),
        ("GRU", 70, 35, "gate initial", (32, 1, 2, 2, 8), 3),
        ("LSTM", 150, 9, "gate lengths", (16, 1, 4, 1, 8), 0),  # two strips of a warp; nothing stays in registers
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # which is multiplied as float16
def test_products_of_four_warps_behind_masks_by_gate(
    kind: str, units: int, batch: int, on: str, back: tuple[int, ...], resident: int | None, dtype: torch.dtype,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        assert size.bits
        if way == "forward":
            return spreading.forward(size, 16, 1, 1, 8, 1, chip.shared)
        return spreading.backward(size, *back, chip.shared, resident, wide=True)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "at_once", lambda *_: 1)
    case, tf32 = Drawn(kind, frozenset(on.split()), units, batch, 4, seed=1), dtype == torch.float32
    with emulated(folder, tf32=tf32):
        assert case.errors("cpu", dtype, tf32=tf32) == {}


def in_sub_tiles(ahead: tuple[int, ...], back: tuple[int, ...]) -> Callable[..., Tile | None]:
    """A choice of tiles: cluster, row tiles, splits or warps, and sub-tiles; forward also warps for the cell alone.

    And into how many their states come apart; backward also how many warps share an item.
    """

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Tile | None:
        if way == "backward":
            tile = tiling.backward(size, *back[:3], chip.shared, subs=back[3], splits=sum(back[4:]) or 1)
        else:
            tile = tiling.forward(size, *ahead[:3], chip.shared, subs=ahead[3], pointwise=sum(ahead[4:5]))
            apart = sum(ahead[5:]) or 1
            tile = tile and replace(tile, arrivals=apart, shared=tile.shared + 16 * tile.subs * (apart - tile.arrivals))
        assert tile is not None, (ahead, back)
        return tile

    return chosen


@pytest.mark.parametrize(
    "kind, units, batch, clusters, dtype, ahead, back, options",
    [  # a warp has items of one sub-tile, of several, of none; sub-tiles with one sequence, with none
        ("LSTM", 40, 19, 1, torch.bfloat16, (2, 3, 4, 3), (2, 3, 8, 3), dict(bidirectional=True)),
        ("GRU", 33, 14, 1, torch.float32, (2, 2, 2, 2), (2, 2, 4, 2), dict(num_layers=2)),
        ("GRU", 33, 14, 2, torch.float32, (2, 2, 2, 2), (2, 2, 4, 2), {}),
        # other warps compute the cell
        ("LSTM", 40, 19, 1, torch.float16, (2, 3, 4, 3, 2), (2, 3, 8, 3), dict(bidirectional=True)),
        ("GRU", 33, 14, 1, torch.float32, (2, 2, 2, 2, 1), (2, 2, 4, 2), {}),
        ("LSTM", 33, 7, 1, torch.bfloat16, (2, 1, 2, 1, 2), (2, 1, 4, 1), dict(zoneout=0.2)),
        ("LSTM", 40, 19, 1, torch.float32, (2, 3, 2, 3, 4), (2, 3, 8, 3), {}),
        ("GRU", 70, 13, 1, torch.float32, (4, 2, 4, 2, 2), (4, 2, 4, 2), dict(bidirectional=True)),
        ("GRU", 33, 21, 1, torch.float16, (2, 3, 2, 3, 4), (2, 3, 8, 3), dict(bidirectional=True)),
        ("LSTM", 60, 7, 1, torch.bfloat16, (4, 1, 2, 1, 4), (4, 1, 8, 1), {}),
        ("RNN", 130, 29, 1, torch.float16, (2, 4, 1, 2), (2, 4, 8, 2), dict(nonlinearity="relu")),
        ("LSTM", 70, 33, 1, torch.bfloat16, (4, 4, 4, 2), (4, 6, 4, 3), BY_GATE),
        ("LSTM", 340, 7, 1, torch.bfloat16, (8, 1, 4, 1), (8, 1, 4, 1), {}),  # a warp has all of two blocks
        # two warps share an item
        ("LSTM", 40, 19, 1, torch.bfloat16, (2, 1, 4, 1), (2, 1, 8, 1, 2), dict(bidirectional=True)),
        ("GRU", 33, 14, 1, torch.float32, (2, 2, 2, 1), (2, 2, 4, 1, 2), dict(num_layers=2)),
        ("GRU", 30, 7, 1, torch.float16, (1, 1, 2, 1), (1, 1, 4, 1, 2), {}),
        ("LSTM", 70, 21, 1, torch.bfloat16, (4, 1, 4, 1), (4, 3, 8, 1, 2), BY_GATE),
        ("RNN", 130, 13, 1, torch.float16, (2, 2, 1, 1), (2, 1, 16, 1, 2), dict(nonlinearity="relu", zoneout=0.2)),
        ("LSTM", 33, 7, 1, torch.bfloat16, (2, 1, 2, 1), (2, 1, 4, 1, 2), dict(peephole=True, clip=0.5)),
        ("GRU", 40, 30, 1, torch.bfloat16, (2, 2, 2, 2), (2, 4, 8, 2, 2), dict(zoneout=0.2)),
        ("LSTM", 40, 19, 1, torch.float32, (2, 3, 4, 3), (2, 3, 4, 3, 2), {}),
        # states of the second group are multiplied before those of the first have come
        ("LSTM", 500, 19, 1, torch.bfloat16, (16, 3, 4, 3, 2, 2), (16, 3, 8, 3), {}),
        ("GRU", 120, 5, 1, torch.bfloat16, (4, 2, 2, 2, 2, 2), (4, 1, 8, 1), dict(bidirectional=True)),
        ("LSTM", 120, 7, 1, torch.float16, (4, 1, 2, 1, 2, 2), (4, 1, 8, 1), {}),
        # no cluster: barriers of the block alone
        ("LSTM", 20, 19, 1, torch.bfloat16, (1, 2, 4, 1), (1, 2, 4, 1), {}),
        ("GRU", 33, 14, 1, torch.float16, (1, 2, 2, 1), (1, 2, 8, 1), dict(bidirectional=True, zoneout=0.2)),
    ],
)
def test_sub_tiles_that_travel_while_others_are_computed(
    kind: str, units: int, batch: int, clusters: int, dtype: torch.dtype, ahead: tuple[int, ...],
    back: tuple[int, ...], options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(grid, "choose", in_sub_tiles(ahead, back))
    monkeypatch.setattr(Chip, "resident", lambda *_: clusters)
    torch.manual_seed(1)
    layer, x = getattr(whorl, kind)(6, units, **options).to(dtype), torch.randn(4, batch, 6).to(dtype)
    assert_right(layer, x, dtype, folder)


@pytest.mark.parametrize(
    "kind, units, batch, clusters, dtype, ahead, back, on, directions",
    [  # sequences are dealt out to clusters that run at once, or come in turns; sub-tiles end, or begin, one by one
        ("LSTM", 40, 38, 4, torch.bfloat16, (2, 2, 2, 2), (2, 2, 4, 2), "lengths initial", 2),
        ("LSTM", 40, 38, 4, torch.bfloat16, (2, 2, 4, 2, 2), (2, 2, 4, 2), "lengths step zoneout initial", 2),
        ("LSTM", 40, 45, 2, torch.float16, (2, 3, 4, 3, 2), (2, 3, 8, 3), "lengths mask reset states", 1),
        ("GRU", 33, 27, 1, torch.float32, (2, 2, 2, 2), (2, 2, 4, 2), "lengths reset reset_to initial", 2),
        ("RNN", 33, 26, 2, torch.bfloat16, (2, 2, 4, 2, 2), (2, 2, 4, 2), "lengths given step zoneout initial", 2),
        ("LSTM", 70, 33, 2, torch.bfloat16, (4, 4, 4, 2), (4, 6, 4, 3), "lengths gate", 2),
        ("LSTM", 20, 21, 3, torch.bfloat16, (2, 1, 4, 1, 2), (2, 1, 4, 1), "lengths", 2),
        ("LSTM", 120, 21, 1, torch.bfloat16, (4, 3, 2, 3, 2, 2), (4, 3, 8, 3), "lengths initial", 2),
        ("LSTM", 120, 7, 1, torch.bfloat16, (4, 1, 2, 1, 2, 2), (4, 1, 8, 1), "lengths mask reset", 1),
        ("LSTM", 33, 21, 2, torch.bfloat16, (2, 2, 4, 1), (2, 2, 8, 1, 2), "lengths mask reset reset_to initial", 2),
        ("GRU", 40, 19, 2, torch.float16, (2, 1, 4, 1), (4, 1, 4, 1, 2), "packed reset given step zoneout states", 1),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_sequences_of_many_lengths_in_sub_tiles(
    kind: str, units: int, batch: int, clusters: int, dtype: torch.dtype, ahead: tuple[int, ...],
    back: tuple[int, ...], on: str, directions: int, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(grid, "choose", in_sub_tiles(ahead, back))
    monkeypatch.setattr(Chip, "resident", lambda *_: clusters)
    case = Drawn(kind, frozenset(on.split()), units, batch, 7, directions=directions, seed=seed)
    with emulated(folder):
        assert case.errors("cpu", dtype) == {}


@pytest.mark.parametrize("batch, parts", [(38, 4), (9, 1), (13, 5), (64, 7)])
def test_each_cluster_is_dealt_the_longest_sequence_that_is_left(batch: int, parts: int, folder: Path) -> None:
    lengths, made, of_others = torch.randint(0, 9, (batch,)), torch.full((batch,), -1), torch.full((batch,), -1)
    with emulated(folder):
        kernel = options._small("order_by_length", beside.order, options._ORDER, CHIP, 0)
        kernel(
            0, -(-batch // 8), 1, made.data_ptr(), of_others.data_ptr(), lengths.data_ptr(), batch, parts, 1 + parts % 2
        )
        also = torch.full((batch,), -1)
        kernel(0, -(-batch // 8), 1, also.data_ptr(), 0, lengths.data_ptr(), batch, 1 + parts % 2, 1)
    assert torch.equal(of_others, also)
    assert sorted(made.tolist()) == list(range(batch))
    clusters = [lengths[places].tolist() for places in made.split(-(-batch // parts))]
    assert len(clusters) == parts
    rounds = [[own[line] for own in clusters if line < len(own)] for line in range(len(clusters[0]))]
    assert all(min(one) >= max(after) for one, after in itertools.pairwise(rounds))


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
    assert_right(layer, x, torch.bfloat16, folder)


def test_what_ends_after_it_is_found(folder: Path) -> None:
    with emulated(folder), pytest.MonkeyPatch.context() as outside:
        own = store.kernels
    outside.setattr(store, "kernels", own)
    found = left_behind()
    outside.undo()
    assert found == ["kernels"]
    assert left_behind() == []
