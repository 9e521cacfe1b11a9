"""Kernels whose blocks exchange through L2, on an NVIDIA GPU: right by the error rule, and what usual tests pass.

Small layers are made to use them, so that much is tested in little time; large ones use them by themselves.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import test_persistent
from anew import made_anew
from comparison import flat, in_a_graph
from test_persistent import LOSSES, PRECISIONS, assert_right, build, parity, switches, three_states, weighted
from whorl import Recurrent
from whorl.cells import library
from whorl.engines.cuda import grid, launch, source, spreading
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.tiling import Chip, Size

pytestmark = pytest.mark.gpu
__all__ = ["switches"]  # a fixture
GRAPHS = {"LSTM": library.lstm.graph, "GRU": library.gru.graph, "RNN relu": library.rnn_relu.graph}


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is spread over blocks that exchange through L2."""
    monkeypatch.setattr(grid, "choose", lambda *given: spreading.choose(*given))
    made_anew(monkeypatch)


SIZES = [
    (1, 4, 1), (1, 3, 2), (2, 5, 3), (7, 9, 17), (16, 8, 40), (31, 24, 13), (64, 33, 9), (127, 40, 6), (128, 32, 30),
    (200, 17, 11), (256, 128, 5), (320, 7, 33), (509, 25, 7), (512, 300, 4), (512, 1, 70), (513, 30, 3),
]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN tanh", "RNN relu"])
@pytest.mark.parametrize("units, batch, time", SIZES)
def test_it_is_right(spread: None, cell: str, units: int, batch: int, time: int, precision: str) -> None:
    assert_right(build(cell, units, PRECISIONS[precision], inputs=units + 3), time, batch)


LARGE = [
    ("LSTM", 1024, 32, 20), ("LSTM", 1024, 128, 7), ("LSTM", 1500, 20, 35), ("LSTM", 2048, 64, 5), ("LSTM", 769, 1, 9),
    ("LSTM", 1999, 9, 4), ("GRU", 1025, 33, 18), ("GRU", 1500, 20, 5), ("GRU", 2048, 5, 3), ("RNN relu", 2600, 12, 6),
    ("RNN relu", 1024, 128, 40), ("RNN relu", 1500, 20, 7),
]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell, units, batch, time", LARGE)
def test_large_layers_are_right(
    cell: str, units: int, batch: int, time: int, bidirectional: bool, precision: str
) -> None:
    dtype = PRECISIONS[precision]
    if precision == "float32":
        units = min(units, {"LSTM": 1536, "GRU": 1584}.get(cell, 2272))  # the most in four bytes
    assert_right(build(cell, units, dtype, inputs=50, bidirectional=bidirectional), time, batch)


@pytest.mark.parametrize("precision", ["tf32"])
@pytest.mark.parametrize("activation", ["softplus", "relu"])
@pytest.mark.parametrize(
    "units, batch, time", [(3, 5, 40), (200, 300, 5), (1024, 32, 40), (1024, 128, 5), (1500, 20, 5), (2048, 64, 3)]
)
def test_states_of_any_size_are_right(
    spread: None, units: int, batch: int, time: int, activation: str, precision: str
) -> None:
    """Which have a scale anew at each step."""
    layer = build("LSTM", units, PRECISIONS[precision], inputs=50, activation=activation, bidirectional=units < 1000)
    parity(layer, time, batch, 2)


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("cell", GRAPHS)
def test_every_tile_is_right(cell: str, kind: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the estimate would choose: parts of the batch in turn, gathered blocks, several launches."""
    dtype = PRECISIONS[precision]
    layer = build(cell, 200, dtype, inputs=9, bidirectional=True)
    size = size_of(GRAPHS[cell], 200, dtype.itemsize, exact=precision == "float32")
    tried = list(spreading.candidates(size, Chip((9, 0), 132), kind))
    for tile in random.Random(1).sample(tried, 12):
        made_anew(monkeypatch)

        def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str, tile: Any = tile) -> Any:
            return tile if way == kind else spreading.choose(size, chip, batch, directions, way)

        monkeypatch.setattr(grid, "choose", chosen)
        assert_right(layer, 5, 75)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "tf32"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN relu"])
@pytest.mark.parametrize("tile", [(32, 1, 1, 8, 8), (16, 2, 2, 8, 4), (32, 4, 1, 8, 8), (16, 3, 1, 8, 4)])
def test_products_of_four_warps(
    tile: tuple[int, ...], cell: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_four_warps_are_right("forward", tile, cell, precision, monkeypatch)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "tf32"])
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
@pytest.mark.parametrize("tile", [(32, 4, 1, 1, 8), (16, 2, 2, 2, 8), (32, 1, 4, 1, 8), (16, 8, 4, 2, 8)])
def test_products_of_four_warps_backward(
    tile: tuple[int, ...], cell: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_four_warps_are_right("backward", tile, cell, precision, monkeypatch)


def assert_four_warps_are_right(
    kind: str, tile: tuple[int, ...], cell: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few weights in registers; the other pass as it is."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Any:
        if way != kind:
            return spreading.choose(size, chip, batch, directions, way)
        make: Any = spreading.forward if kind == "forward" else spreading.backward
        return make(size, *tile, chip.shared, 2, wide=True)

    made_anew(monkeypatch)
    monkeypatch.setattr(grid, "choose", chosen)
    assert_right(build(cell, 250, PRECISIONS[precision], inputs=9, bidirectional=True), 70, 75)


@pytest.mark.parametrize("precision", ["two bytes", "tf32", "float32"])
@pytest.mark.parametrize("seed", range(24))
def test_it_is_right_at_random_sizes(spread: None, seed: int, precision: str) -> None:
    draw = random.Random(seed)
    cell = draw.choice(["LSTM", "GRU", "RNN tanh", "RNN relu"])
    dtype = PRECISIONS.get(precision) or draw.choice([torch.bfloat16, torch.float16])
    layer = build(
        cell, draw.randint(1, 700), dtype, inputs=draw.randint(1, 300), num_layers=draw.randint(1, 3),
        bidirectional=draw.random() < 0.5, bias=draw.random() < 0.8,
    )  # fmt: skip
    assert_right(layer, draw.randint(1, 40), draw.randint(2, 140), initial=draw.random() < 0.5)


@pytest.mark.parametrize("units, batch, time", [(5, 3, 4), (48, 17, 21), (301, 40, 5)])
def test_a_users_cell_is_right(spread: None, units: int, batch: int, time: int) -> None:
    layer = Recurrent(
        three_states, 11, units, num_layers=2, bidirectional=True, device="cuda", dtype=torch.bfloat16,
        engine="persistent",
    )  # fmt: skip
    parity(layer, time, batch, 3)


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_the_loss_takes(spread: None, loss: str, precision: str) -> None:
    assert_right(build("LSTM", 48, PRECISIONS[precision], bidirectional=True), 6, 10, loss=LOSSES[loss])


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("exponent", [-24, -12, 12])
def test_gradients_of_any_size(spread: None, exponent: int, precision: str) -> None:
    layer = build("LSTM", 100, PRECISIONS[precision])
    assert_right(layer, 8, 20, loss=lambda outputs: 2.0**exponent * weighted(outputs))


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("time", [1, 2, 5])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN tanh"])
def test_gradients_of_weights_with_initial_states(spread: None, cell: str, time: int, precision: str) -> None:
    assert_right(build(cell, 33, PRECISIONS[precision], bidirectional=True), time, 5)


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.nan])
@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_a_sequence_that_is_not_a_number_spoils_no_other(
    spread: None, activation: str, bad: float, precision: str
) -> None:
    """And hangs nobody: the words of the exchange have a not-a-number of their own."""
    dtype = PRECISIONS[precision]
    layer = build("LSTM", 40, dtype, activation=activation)
    x = torch.randn(24, 19, 40, device="cuda", dtype=dtype)
    wanted, _ = layer(x)
    x[2, 5] = bad
    got, _ = layer(x)
    others = [row for row in range(19) if row != 5]
    assert torch.equal(got[:, others], wanted[:, others])
    assert got[2:, 5].isnan().any()
    got.backward(torch.full_like(got, bad))
    word = torch.int16 if dtype == torch.bfloat16 else torch.int32
    initial = torch.full((1, 19, 40), -1, device="cuda", dtype=word).view(dtype)  # the word itself
    assert layer(x, (initial, initial))[0].isnan().all()


@pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])
@pytest.mark.parametrize("cell, units", [("LSTM", 200), ("GRU", 200), ("LSTM", 1024), ("RNN relu", 200)])
def test_a_graph_replays_with_new_input_states_and_weights(spread: None, cell: str, units: int, precision: str) -> None:
    """With more steps than the ring has buffers; what lies in the ring from the replay before must not be read."""
    dtype = PRECISIONS[precision]
    layer = build(cell, units, dtype, num_layers=2)
    x = torch.randn(41, 20, units, device="cuda", dtype=dtype, requires_grad=True)
    states = [torch.randn(2, 20, units, device="cuda", dtype=dtype) for _ in range(1 + (cell == "LSTM"))]
    tensors = [x, *layer.parameters()]

    def step() -> list[Tensor]:
        outputs = flat(layer(x, tuple(states) if cell == "LSTM" else states[0]))
        loss = sum(((out.float() + 0.5) ** 2).sum() for out in outputs)
        return [*outputs, *torch.autograd.grad(loss, tensors)]

    graph, captured = in_a_graph(step)
    for _ in range(100 if units < 1000 else 20):
        with torch.no_grad():
            for tensor in (*tensors, *states):
                tensor.copy_(torch.randn_like(tensor) * (1.0 if tensor.dim() == 3 else units**-0.5))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


def test_streams_and_threads(spread: None) -> None:
    """Kernels that each need most of the GPU at once, from four streams: they come one after another."""
    layer = build("LSTM", 1024, torch.bfloat16)
    x = torch.randn(30, 64, 1024, device="cuda", dtype=torch.bfloat16)
    parameters = list(layer.parameters())

    def step() -> list[Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), parameters)]

    wanted = step()
    torch.cuda.synchronize()
    found: list[list[Tensor]] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            mine = [step() for _ in range(5)]
            stream.synchronize()
        found.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    assert all(torch.equal(a, b) for got in found for a, b in zip(got, wanted, strict=True))


def test_branches_of_one_graph(spread: None) -> None:
    """Two cooperative launches that a graph may start at the same time."""
    layer = build("GRU", 1024, torch.bfloat16)
    xs = torch.randn(2, 20, 64, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = [layer(x)[0] for x in xs]
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            first = layer(xs[0])[0]
            with torch.cuda.stream(side):
                second = layer(xs[1])[0]
            torch.cuda.current_stream().wait_stream(side)
        for _ in range(20):
            graph.replay()
            assert torch.equal(first, wanted[0])
            assert torch.equal(second, wanted[1])


@pytest.mark.parametrize("blocks", [1, 40, 131, 400])
def test_a_gpu_that_is_busy_with_something_else(blocks: int, spread: None) -> None:
    test_persistent.test_a_gpu_that_is_busy_with_something_else(blocks)


SLOWED = [
    ("for (int t = 0; t < time; ++t) {", "for (int t = 0; t < time; ++t) {\n    delay();"),
    ("      __syncthreads();\n", "      delay();\n      __syncthreads();\n"),
    ("      product(t, sub, round);", "      delay();\n      product(t, sub, round);"),
    (
        "          if (t + 1 < time && FIRST && is_there(sub, j))",
        "          delay();\n          if (t + 1 < time && FIRST && is_there(sub, j))",
    ),
    ("      compute(t, turn, ahead);", "      delay();\n      compute(t, turn, ahead);"),
    ("          States inside;", "          delay();\n          States inside;"),
    ("          float sums[OWN][2];", "          delay();\n          float sums[OWN][2];"),
]


def slowed(write: Callable) -> Callable:
    """A kernel whose warps sleep at random for up to 2 us at random places."""

    def written(*args: Any) -> str:
        text = write(*args)
        changed = test_persistent.DELAY + text  # functions before the kernel wait too
        for place, instead in SLOWED:
            changed = changed.replace(place, instead)
        assert changed.count("delay();") >= 4
        return changed

    return written


@pytest.mark.parametrize(
    "cell, units, batch, precision",
    [("LSTM", 1024, 48, "bfloat16"), ("GRU", 128, 20, "bfloat16"), ("LSTM", 40, 9, "bfloat16"),
     ("GRU", 1500, 20, "bfloat16"), ("LSTM", 1024, 48, "tf32"), ("GRU", 128, 20, "tf32"), ("GRU", 200, 9, "float32"),
     ("RNN relu", 1024, 48, "tf32"), ("RNN relu", 40, 9, "tf32")],
)  # fmt: skip
def test_warps_that_sleep_at_random_change_nothing(
    cell: str, units: int, batch: int, precision: str, spread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = build(cell, units, PRECISIONS[precision])
    x = torch.randn(37, batch, units, device="cuda", dtype=PRECISIONS[precision])
    parameters = list(layer.parameters())

    def step() -> list[Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), parameters)]

    wanted = step()
    made_anew(monkeypatch, loaded=True)
    monkeypatch.setattr(source, "forward", slowed(source.forward))
    monkeypatch.setattr(source, "backward", slowed(source.backward))
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))
    assert launch._loaded, "kernels whose warps sleep"
