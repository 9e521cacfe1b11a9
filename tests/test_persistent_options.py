"""Options on engine `persistent`, on an NVIDIA GPU: random combinations, and what the numbers alone do not show."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import whorl
from anew import made_anew
from comparison import in_a_graph
from option_draws import Drawn, drawn
from whorl.engines.cuda import grid, spreading

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def true_float32() -> Any:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("seed", range(300))
def test_random_options(seed: int) -> None:
    case = drawn(seed, largest=300 if seed % 4 == 0 else 60, batch=70 if seed % 4 == 0 else 20, time=12)
    check(case, DTYPES[seed % 3])


def check(case: Drawn, dtype: torch.dtype, tf32: bool = False) -> None:
    """That a case, with no more units than the device holds, has the numbers of float64."""
    case = case.within(whorl.RNN(1, 1, device="cuda").plan(torch.zeros(1, 1, 1, device="cuda")).problem.device, dtype)
    print(case)
    assert case.errors("cuda", dtype, tf32) == {}


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_random_options_with_tf32_products(seed: int, spread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are of float16, scaled."""
    if spread:
        monkeypatch.setattr(grid, "choose", spreading.choose)
        made_anew(monkeypatch)
    case = drawn(2000 + seed, largest=600 if seed % 4 == 0 else 80, batch=70 if seed % 4 == 0 else 20, time=12)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        check(case, torch.float32, tf32=True)


@pytest.mark.parametrize("seed", range(100))
def test_random_options_where_blocks_exchange(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size as one that no cluster holds."""
    monkeypatch.setattr(grid, "choose", spreading.choose)
    made_anew(monkeypatch)
    large = seed % 4 == 0
    check(drawn(1000 + seed, largest=1500 if large else 200, batch=70, time=6 if large else 12), DTYPES[seed % 3])


@pytest.mark.parametrize("seed", range(60))
def test_random_options_of_a_step_with_a_product_inside(seed: int) -> None:
    case = replace(drawn(4000 + seed, largest=150, batch=70), kind="GRU", arguments=dict(reset_after=False))
    check(case, DTYPES[seed % 3])


@pytest.mark.parametrize("how", ["", "spread", "tf32"])
@pytest.mark.parametrize("seed", range(40))
def test_random_options_of_a_layer_with_a_projection(seed: int, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "spread":
        monkeypatch.setattr(grid, "choose", spreading.choose)
        made_anew(monkeypatch)
    case = replace(drawn(5000 + seed, largest=300 if seed % 4 == 0 else 60, batch=70), kind="LSTM")
    case = replace(case, units=case.units + 1, arguments=dict(proj_size=1 + seed * 7 % case.units))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=how == "tf32"):
        check(case, torch.float32 if how == "tf32" else DTYPES[seed % 3], tf32=how == "tf32")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("more", ["step", "gate", "packed"])
def test_many_steps_where_blocks_exchange(more: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers come round."""
    monkeypatch.setattr(grid, "choose", spreading.choose)
    made_anew(monkeypatch)
    on = frozenset({"reset", "zoneout", "initial", more, *(() if more == "packed" else ("lengths", "mask"))})
    case = Drawn("LSTM", on, 170, 50, 90, directions=2, seed=7)
    assert case.errors("cuda", dtype) == {}


def test_a_graph_replays_with_new_marks_and_a_new_seed() -> None:
    layer = whorl.LSTM(
        24, 48, 2, bidirectional=True, zoneout=0.2, recurrent_dropout=0.3, recurrent_dropout_mode="step",
        input_dropout=0.2, device="cuda", dtype=torch.bfloat16, engine="persistent",
    )  # fmt: skip
    x = torch.randn(9, 20, 24, device="cuda", dtype=torch.bfloat16)
    marks = dict(
        lengths=torch.randint(0, 10, (20,), device="cuda"), mask=torch.rand(9, 20, device="cuda") < 0.7,
        reset=torch.rand(9, 20, device="cuda") < 0.2,
    )  # fmt: skip
    seed = torch.tensor(5, device="cuda")

    def step() -> list[torch.Tensor]:
        y, _ = layer(x, **marks)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, **__: seed)
        graph, captured = in_a_graph(step)
        for number in range(20):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
                seed.fill_(number * 2**33 + number)
                marks["lengths"].copy_(torch.arange(20, device="cuda") * (number + 3) % 10)
                for name in ("mask", "reset"):
                    marks[name].copy_(torch.rand(9, 20, device="cuda") < 0.5)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_a_backward_of_its_own_plan() -> None:
    """As torch.compile and JAX call it: nothing that the forward made ready is there."""
    layer = whorl.LSTM(16, 64, device="cuda", dtype=torch.bfloat16, engine="persistent")
    x = torch.randn(5, 4, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.tensor([5, 2, 0, 3], device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return layer(x, lengths=lengths)[0].square().sum()

    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(loss(x), leaves)
    found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), leaves)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [dict(), dict(memory="recompute")])
def test_the_host_does_not_wait(options: dict[str, Any]) -> None:
    layer = whorl.GRU(
        12, 40, zoneout=0.1, recurrent_dropout=0.2, recurrent_dropout_mode="shared", device="cuda",
        dtype=torch.bfloat16, engine="persistent", **options,
    )  # fmt: skip
    x = torch.randn(6, 20, 12, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    marks = dict(lengths=torch.arange(20, device="cuda") % 7, reset=torch.rand(6, 20, device="cuda") < 0.2)
    layer(x, **marks)[0].float().sum().backward()  # first calls load
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, **marks)[0].float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_sequence_gives_the_same_in_any_batch() -> None:
    """Its draws are counted by its place, and its order among the others changes nothing."""
    layer = whorl.LSTM(
        12, 40, zoneout=0.3, recurrent_dropout=0.4, recurrent_dropout_mode="step", device="cuda",
        dtype=torch.bfloat16, engine="persistent",
    )  # fmt: skip
    x, lengths = torch.randn(6, 128, 12, device="cuda", dtype=torch.bfloat16), torch.arange(128, device="cuda") % 7
    found = []
    for batch in (3, 128):
        torch.manual_seed(3)
        found.append(layer(x[:, :batch], lengths=lengths[:batch])[0][:, :3])
    assert torch.equal(*found)


def test_an_order_changes_no_bit() -> None:
    layer = whorl.LSTM(12, 40, device="cuda", dtype=torch.bfloat16, engine="persistent")
    x, lengths = torch.randn(9, 64, 12, device="cuda", dtype=torch.bfloat16), torch.arange(64, device="cuda") * 7 % 10
    place = torch.randperm(64, device="cuda")
    y, (h, c) = layer(x, lengths=lengths)
    moved, (moved_h, moved_c) = layer(x[:, place], lengths=lengths[place])
    assert torch.equal(y[:, place], moved)
    assert torch.equal(h[:, place], moved_h)
    assert torch.equal(c[:, place], moved_c)
