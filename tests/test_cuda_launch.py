"""What a launch hands to the driver, seen by a driver that only listens; on a GPU, by what the kernel computes."""

import ctypes
import struct
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from whorl.engines.cuda import compile, launch
from whorl.engines.cuda.kernel_text import text_of
from whorl.engines.cuda.tiling import Chip
from whorl.errors import KernelError


class Listener:
    """A driver that notes each launch: grid, block, shared bytes, stream, attributes and the bytes of the argument."""

    def __init__(self, size: int) -> None:
        self.size, self.launches, self.attributes, self.status = size, [], {}, 0
        self.cuLaunchKernelEx, self.contexts = self._launch, []

    def cuModuleLoadData(self, module: Any, code: bytes) -> int:
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:
        return 0 if name == b"twice" else 500

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts.append(context.value)
        self.status = 0
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        self.attributes[attribute] = value
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = {500: b"named symbol not found", 701: b"too many resources requested"}[status]
        return 0

    def _launch(self, config: Any, function: Any, arguments: Any, extra: Any) -> int:
        seen = config._obj
        rows = [(seen.attributes[i].id, *seen.attributes[i].value[:3]) for i in range(seen.count)]
        data = ctypes.string_at(arguments[0], self.size)
        self.launches.append((*seen.grid, *seen.block, seen.shared, seen.stream, rows, data))
        return self.status


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    made = Listener(struct.calcsize("QQif"))
    monkeypatch.setattr(launch, "driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return made


def make(shared: int = 50_000, cluster: int = 4, name: str = "twice") -> launch.Kernel:
    return launch.Kernel(b"code", name, 0, block=256, shared=shared, cluster=cluster, layout="QQif")


def test_a_launch_hands_over_every_number(listener: Listener) -> None:
    kernel = make()
    kernel(0x7000, 12, 2, 1 << 40, 3, -5, 0.5)
    kernel(0, 8, 1, 0, 0, 0, 1.0)
    assert listener.launches == [
        (12, 2, 1, 256, 1, 1, 50_000, 0x7000, [(4, 4, 1, 1)], struct.pack("QQif", 1 << 40, 3, -5, 0.5)),
        (8, 1, 1, 256, 1, 1, 50_000, None, [(4, 4, 1, 1)], struct.pack("QQif", 0, 0, 0, 1.0)),
    ]


def test_without_clusters_there_is_no_attribute(listener: Listener) -> None:
    make(shared=0, cluster=1)(0, 1, 1, 0, 0, 0, 0.0)
    assert listener.launches[0][8] == []
    assert listener.attributes == {}


@pytest.mark.parametrize(("cluster", "together", "expected"), [
    (1, False, [(6, 1, 1, 1)]),
    (8, False, [(4, 8, 1, 1), (6, 1, 1, 1)]),
    (1, True, [(2, 1, 1, 1), (6, 1, 1, 1)]),
])  # fmt: skip
def test_a_launch_that_may_begin_early_says_so_beside_the_rest(
    cluster: int, together: bool, expected: list[tuple[int, ...]], listener: Listener
) -> None:
    kernel = launch.Kernel(b"code", "twice", 0, 256, 0, cluster, "QQif", together, early=True)
    kernel(0, 8, 1, 0, 0, 0, 1.0)
    assert listener.launches[0][8] == expected


def test_large_blocks_and_clusters_are_allowed_beforehand(listener: Listener) -> None:
    make()
    assert listener.attributes == {8: 50_000}
    make(cluster=16)
    assert listener.attributes == {8: 50_000, 14: 1}


def test_blocks_that_are_to_be_alone_ask_for_more_shared_memory(listener: Listener) -> None:
    """And the kernel itself asks for what it did: another batch may have more blocks than there are multiprocessors."""
    kernel = make()
    alone = kernel.alone(120_000)
    assert listener.attributes == {8: 120_000}
    for one in (kernel, alone, kernel):
        one(0x7000, 12, 2, 1 << 40, 3, -5, 0.5)
    assert [launched[6] for launched in listener.launches] == [50_000, 120_000, 50_000]
    assert [launched[8] for launched in listener.launches] == [[(4, 4, 1, 1)]] * 3
    assert kernel.alone(10).shared == 50_000


def test_a_refused_launch_says_what_and_why(listener: Listener) -> None:
    kernel = make()
    listener.status = 701
    with pytest.raises(KernelError, match=r"cannot launch twice: too many resources requested \(701\)"):
        kernel(0, 1, 1, 0, 0, 0, 0.0)
    with pytest.raises(KernelError, match=r"cannot find thrice: named symbol not found \(500\)"):
        make(name="thrice")


def test_a_missing_field_is_our_own_mistake(listener: Listener) -> None:
    with pytest.raises(struct.error):
        make()(0, 1, 1, 0, 0)


def test_nothing_is_loaded_during_a_capture(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="run the layer once on input of these shapes first"):
        make()


def test_a_thread_that_asked_cuda_for_nothing_takes_the_context(listener: Listener) -> None:
    kernel = make()
    listener.status = 201
    kernel(0, 1, 1, 0, 0, 0, 0.0)
    assert listener.contexts == [77]
    assert len(listener.launches[1:]) == 1


def test_a_launch_within_a_launch_has_its_own_argument(listener: Listener) -> None:
    """As a finalizer may, that the driver's call lets run: each launch must still hand over its own numbers."""
    kernel, plain = make(), listener.cuLaunchKernelEx
    kernel(0, 1, 1, 0, 0, 0, 0.0)  # leaves a frame that the next launches take
    listener.launches.clear()
    depth: list[int] = []

    def within(*arguments: Any) -> int:
        depth.append(1)
        if len(depth) == 1:
            kernel(1, 1, 1, 111, 0, 0, 0.0)
        return plain(*arguments)

    kernel._launch = within
    kernel(2, 2, 2, 222, 0, 0, 0.0)
    assert [struct.unpack("QQif", row[-1])[0] for row in listener.launches] == [111, 222]
    assert [row[0] for row in listener.launches] == [1, 2]


def test_a_kernel_is_made_once_by_many_threads() -> None:
    made: list[int] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        launch.loaded("key of this test", make)

    def make() -> str:
        made.append(1)
        time.sleep(0.05)  # long enough for every thread to ask
        return "kernel"

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(KernelError, match="NVIDIA's driver is not here"):
        launch.driver.__wrapped__()


SOURCE = """
struct Arguments { float* out; long long offset; int add; float times; };
extern "C" __global__ void twice(const __grid_constant__ Arguments a) {
  a.out[a.offset + blockIdx.x * blockDim.x + threadIdx.x + blockIdx.y * gridDim.x * blockDim.x] =
      a.times * threadIdx.x + a.add;
}
"""


@pytest.mark.gpu
@pytest.mark.skipif(compile.missing() is not None, reason=f"{compile.missing()}")
def test_launches_on_streams_in_threads_and_graphs() -> None:
    major, minor = torch.cuda.get_device_capability()
    code = compile.cubin(SOURCE, "twice", f"sm_{major}{minor}")
    kernel = launch.Kernel(code, "twice", torch.cuda.current_device(), 32, 0, 1, "Qqif")
    wanted = 2.0 * torch.arange(32.0, device="cuda").repeat(6) + 7
    outs = [torch.full((192,), torch.nan, device="cuda") for _ in range(8)]

    def fill(out: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                kernel(torch.cuda.current_stream().cuda_stream, 3, 2, out.data_ptr(), 0, 7, 2.0)
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=fill, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, wanted) for out in outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(torch.cuda.current_stream().cuda_stream, 3, 2, outs[0].data_ptr(), 0, 9, 2.0)
    graph.replay()
    assert torch.equal(outs[0], wanted + 2)
    assert kernel.resources()["local"] == 0
    stream, blank = torch.cuda.current_stream().cuda_stream, torch.full((192,), torch.nan, device="cuda")
    first = threading.Thread(target=kernel, args=(stream, 3, 2, blank.data_ptr(), 0, 7, 2.0))
    first.start()  # this thread has asked CUDA for nothing before, as autograd's own may not have
    first.join()
    assert torch.equal(blank, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(compile.missing() is not None, reason=f"{compile.missing()}")
def test_a_launch_that_begins_early_reads_what_the_one_before_wrote() -> None:
    chip = Chip(torch.cuda.get_device_capability(), 1)
    text = (
        text_of("after.cu")
        + """
struct Arguments { const float* from; float* to; long long turns; };
extern "C" __global__ void add_one(const __grid_constant__ Arguments a) {
  wait_for_the_launch_before();
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  float value = a.from[i ^ 4095u];
  for (long long turn = 0; turn < a.turns * (blockIdx.x % 7); ++turn) value = value * 0.5f + value * 0.5f;
  a.to[i] = value + 1.f;
}
"""
    )
    code = compile.cubin(text, "add_one", chip.architecture)
    kernel = launch.Kernel(code, "add_one", torch.cuda.current_device(), 256, 0, 1, "3Q", early=chip.early)
    two = torch.zeros(2, 1 << 18, device="cuda")

    def chain() -> None:
        for turn in range(300):
            here, there = two[turn % 2].data_ptr(), two[1 - turn % 2].data_ptr()
            kernel(torch.cuda.current_stream().cuda_stream, 1 << 10, 1, here, there, 100)

    chain()
    assert torch.equal(two[0], torch.full_like(two[0], 300.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    assert torch.equal(two[0], torch.full_like(two[0], 600.0))
