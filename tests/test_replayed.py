"""Passes that come again on the same addresses are replayed as one, on what memory holds then; others are not."""

import ctypes
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import whorl
from tapes import X, both_ways, counted, layer, on_a_gpu, trained
from whorl.engines import host, taped
from whorl.engines.cuda import asked
from whorl.engines.cuda.memory import laid_out

__all__ = ["counted", "layer", "on_a_gpu"]  # fixtures
pytestmark = pytest.mark.xdist_group("taped")  # as test_taped, which compiles it


@pytest.fixture
def memory(counted: list[int]) -> Iterator[ctypes.CDLL]:
    """Memory that comes round, as torch's does on a GPU; `refuse` has it refuse so many bytes."""
    text = Path(__file__).with_name("comes_round.cpp").read_text()
    made = host.load("memory that comes round", text, shlex.join(taped._flags()))
    made.refuse.argtypes = [ctypes.c_size_t]
    made.begin()
    yield made
    made.refuse(0)
    made.end()


@pytest.fixture
def graphs(memory: ctypes.CDLL) -> Iterator[emulation.Graphs]:
    """What is captured and replayed from here on."""
    made = emulation.graphs
    made.count()
    yield made
    assert made.captured is None
    assert not made.relaxed()
    made.count()


def by_python(call: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(taped, "ready", lambda: False)
        return call()


class Loop:
    """A program that trains: the same tensors, written anew before each step."""

    def __init__(self, module: torch.nn.Module, *size: int) -> None:
        self.module, self.x = module, torch.empty(size or X.shape, dtype=torch.bfloat16).requires_grad_()

    def step(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for one in (self.x, *self.module.parameters()):
                one.copy_(torch.randn(one.shape, generator=generator) / 4)
        y, _ = self.module(self.x)
        return [y.detach().clone(), *torch.autograd.grad(y.float().square().sum(), [self.x, *self.module.parameters()])]


@pytest.mark.parametrize("make, layers", [(whorl.LSTM, 1), (whorl.GRU, 2)])
def test_a_loop_is_replayed_with_what_memory_holds(
    counted: list[int], graphs: emulation.Graphs, monkeypatch: pytest.MonkeyPatch, make: Any, layers: int
) -> None:
    loop = Loop(make(16, 16, layers, dtype=torch.bfloat16, engine="persistent"))
    for seed in range(12):
        found, before = loop.step(seed), graphs.replays
        assert all(map(torch.equal, found, by_python(lambda seed=seed: loop.step(seed), monkeypatch)))
        assert graphs.replays == before  # of those through Python none
    assert len(counted) == 12
    assert graphs.replays > 12  # of 12 forward and 12 backward


def test_inference_is_replayed(counted: list[int], graphs: emulation.Graphs, layer: torch.nn.Module) -> None:
    with torch.inference_mode():
        found = [layer(X)[0].clone() for _ in range(6)]
    assert all(torch.equal(found[0], one) for one in found)
    assert graphs.replays >= 3


def test_addresses_that_do_not_come_again_are_launched(
    counted: list[int], graphs: emulation.Graphs, monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    held = []
    for seed in range(20):
        x = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
        held.append((x, layer(x)[0]))
    assert graphs.made == 0
    for x, y in held:
        assert torch.equal(y, by_python(lambda x=x: [layer(x)[0]], monkeypatch)[0])


def test_a_thread_keeps_what_it_was_given(graphs: emulation.Graphs, layer: torch.nn.Module) -> None:
    """Several at once, on weights that all read, each its own x."""
    wrong: list[int] = []

    def call(number: int) -> None:
        x = torch.randn(X.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
        with torch.no_grad():
            made = [layer(x)[0].clone() for _ in range(8)]
        wrong.extend([number] * (not all(torch.equal(made[0], one) for one in made)))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_layers_of_one_shape_are_all_replayed(counted: list[int], graphs: emulation.Graphs) -> None:
    """They share a tape."""
    loops = [Loop(whorl.GRU(16, 16, dtype=torch.bfloat16, engine="persistent")) for _ in range(20)]
    for seed in range(4):
        for loop in loops:
            loop.step(seed)
    assert graphs.replays >= 40


def rounds(layer: torch.nn.Module, inputs: list[Tensor], count: int) -> None:
    """Inference of each in turn, and so again."""
    with torch.no_grad():
        for _ in range(count):
            for x in inputs:
                y = layer(x)[0]
                del y


def test_the_latest_are_kept() -> None:
    """However many addresses come round; where more do than are kept, they are not captured for ever."""
    home = Path(taped.__file__).parent
    text = (home / "replayed.cpp").read_text() + Path(__file__).with_name("replayed_alone.cpp").read_text()
    flags = [*taped._flags(), "-fno-gnu-unique"]  # what it remembers is its own
    passes = host.load("what is remembered of passes", text, shlex.join(flags))
    passes.come.argtypes = [ctypes.c_int64, ctypes.c_bool]
    passes.begin()

    def come(numbers: range, refused: bool = False) -> list[int]:
        found = [passes.come(number, refused) for number in numbers]
        return [found.count(kind) for kind in (0, 1, 2)]

    assert come(range(1)) == [1, 0, 0]
    assert come(range(1), refused=True) == [0, 0, 1]
    assert come(range(1, 2)) == [1, 0, 0]
    assert [come(range(2)) for _ in range(127)] == [[2, 0, 0]] * 127  # 255 passes after it was refused
    assert come(range(2)) == [0, 0, 2]
    assert come(range(2)) == [0, 2, 0]
    assert come(range(2, 1100)) == [1098, 0, 0]
    assert come(range(2, 1100)) == [77, 0, 1021]  # until captures have cost what is paid ahead
    for _ in range(20):  # more than are kept, in turn
        _, replayed, captured = come(range(2, 1100))
        assert captured <= replayed // 8 + 1
    assert replayed > 700
    for _ in range(300):
        come(range(40))  # which pay for others
    before = passes.gone()
    assert come(range(2000, 3500)) == [1500, 0, 0]
    assert come(range(2000, 3500)) == [476, 0, 1024]
    assert 1000 < passes.gone() - before <= 1024
    assert come(range(2000, 3500))[1] == 1024
    assert come(range(20000, 40000)) == [20000, 0, 0]  # of those 8,192 are remembered
    assert come(range(20000, 40000)) == [20000, 0, 0]


def test_where_a_graph_is_refused_passes_are_launched(
    counted: list[int], graphs: emulation.Graphs, monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    """And after many of them it is tried again."""
    graphs.count(takes=False)
    loop = Loop(layer)
    for seed in range(8):
        found = loop.step(seed)
        assert all(map(torch.equal, found, by_python(lambda seed=seed: loop.step(seed), monkeypatch)))
    assert (graphs.made, graphs.replays, graphs.left()) == (1, 0, 0)
    graphs.count()
    rounds(layer, [X], 300)
    assert graphs.made == 1
    assert graphs.replays > 0


def test_where_there_is_no_room_for_products_passes_are_launched(
    counted: list[int], memory: ctypes.CDLL, graphs: emulation.Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "workspace", lambda index: laid_out((5 << 20,), torch.uint8))
    memory.refuse(5 << 20)
    layer = whorl.LSTM(16, 24, dtype=torch.bfloat16, engine="persistent")
    want = by_python(lambda: [layer(X)[0]], monkeypatch)[0]
    with torch.no_grad():
        assert all(torch.equal(layer(X)[0], want) for _ in range(6))
    assert (graphs.made, graphs.replays) == (0, 0)
    memory.refuse(0)
    rounds(layer, [X], 300)
    assert graphs.replays > 0


def test_nobody_runs_python_while_a_pass_is_captured(graphs: emulation.Graphs, layer: torch.nn.Module) -> None:
    """Another thread that waited for the whole GPU then would be refused by CUDA."""
    seen, stop = list[bool](), threading.Event()

    def look() -> None:
        while not stop.is_set():
            seen.append(graphs.captured is not None)
            time.sleep(1e-5)

    thread = threading.Thread(target=look)
    thread.start()
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1)  # the driver and cuBLAS of the emulation are Python, which would be interrupted
    try:
        rounds(layer, [X.clone() for _ in range(10)], 3)
    finally:
        sys.setswitchinterval(switch)
        stop.set()
        thread.join()
    assert graphs.made > 0
    assert seen
    assert not any(seen)


def test_what_torch_writes_within_a_pass_is_not_captured(graphs: emulation.Graphs, layer: torch.nn.Module) -> None:
    """Of one step the gradient of a recurrent weight is cleared."""
    x = torch.randn(1, 2, 16).bfloat16().requires_grad_()
    loss = layer(x)[0].float().square().sum()
    for _ in range(6):
        torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
    assert graphs.made == 0


@pytest.mark.gpu
@pytest.mark.parametrize("make, units, layers", [(whorl.LSTM, 128, 1), (whorl.GRU, 650, 2), (whorl.LSTM, 1024, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_replays_the_same_bits(
    on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch, make: Any, units: int, layers: int, dtype: torch.dtype
) -> None:
    """On torch's stream and another, beside other products on it."""
    torch.manual_seed(1)
    module = make(units, units, layers, dtype=dtype, device="cuda", engine="persistent")
    x = torch.randn(20, 33, units, dtype=dtype, device="cuda")
    beside = x @ x.transpose(1, 2)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(6):
                x.neg_()
                both_ways(lambda: trained(module, x), on_a_gpu, monkeypatch)
                assert torch.equal(x @ x.transpose(1, 2), beside)
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels_of_a_replay_as_they_were_launched() -> None:
    """By name, as a profiler has them."""
    assert taped.finish() == ""
    module = whorl.LSTM(256, 256, dtype=torch.bfloat16, device="cuda", engine="persistent")
    x = torch.randn(20, 32, 256, dtype=torch.bfloat16, device="cuda")

    def step() -> Any:
        y = module(x)[0]
        return torch.autograd.grad(y, list(module.parameters()), y.detach())

    with torch.profiler.profile() as first:
        step()
        torch.cuda.synchronize()
    for _ in range(5):
        step()
    with torch.profiler.profile() as later:
        step()
        torch.cuda.synchronize()

    def kernels(profile: torch.profiler.profile) -> list[str]:
        return sorted(e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)

    def launches(profile: torch.profiler.profile) -> int:
        return sum("LaunchKernel" in event.name for event in profile.events())

    assert kernels(first) == kernels(later)
    assert launches(first) >= 5
    assert launches(later) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("time", [20, 400])
def test_little_more_memory_is_taken(monkeypatch: pytest.MonkeyPatch, time: int) -> None:
    """What a pass needs meanwhile is taken ahead of it where that is little: 1.5 MB of a step here, in three layers."""
    assert taped.finish() == ""
    module = whorl.LSTM(512, 512, 4, dtype=torch.bfloat16, device="cuda", engine="persistent")
    x = torch.randn(time, 128, 512, dtype=torch.bfloat16, device="cuda")

    def most() -> int:
        for _ in range(4):  # the third makes a graph, whose products have 32 MiB to write to from then on
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            module(x)[0].sum().backward()
        return torch.cuda.max_memory_allocated() - before

    by_tape = most()
    with monkeypatch.context() as patch:
        patch.setattr(taped, "ready", lambda: False)
        assert by_tape <= most() + (32 << 20)
