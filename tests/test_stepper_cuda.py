"""A stepper's CUDA kernel against the layer: on the host by `emulation`, and on a GPU, also from a CUDA graph."""

import ctypes
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import whorl
from emulation import FLAGS, emulated, run
from host_library import built
from test_machine_code import listed, needs_tools
from test_stepper import CELLS, OPTIONS, assert_equals_the_layer, drawn, make, stepped
from whorl.engines.cuda import launch, steps, stepwise, stepwise_source, stream
from whorl.engines.cuda.compile import cubin, missing
from whorl.engines.cuda.stream import MOST_STREAMS, Stream

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def on_gpu(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: on_gpu(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(on_gpu, value))
    return value.cuda() if isinstance(value, torch.Tensor) else value


def is_prepared(layer: Any, batch: int) -> bool:
    return isinstance(layer.stepper(batch)._step, Stream)


class HostKernel:
    """What `launch.Kernel` is, for stream.cu among the fibers of emulation.cpp."""

    def __init__(self, code: bytes, name: str, device: int, block: int, *rest: Any, **more: Any) -> None:
        self._block, self._shared, self._layout = block, rest[0], struct.Struct(rest[2])
        self._library = ctypes.CDLL(code.decode())

    def __call__(self, stream: int, grid: int, second: int, *values: Any) -> None:
        packed = self._layout.pack(*values)
        assert run(self._library, grid, second, self._block, 1, self._shared, packed) == 0


def on_host(source: str, folder: Path) -> bytes:
    """Where the shared library of the kernel lies."""
    kernel = source.replace("__global__ void __launch_bounds__(128) NAME(stream)", "void KERNEL")
    kernel = kernel.replace('extern "C" void', "void")
    names = "".join(f"#define {kind}_t gpu_{kind}\n" for kind in "int64 int32 uint64 uint32 uint16 uint8".split())
    given = "#define KERNEL stream_kernel\n#define __shared__ static\n#define blockDim host_block\n"
    given += "static dim host_block = {128, 1, 1};\n"
    given += "int atomicAdd(int* at, int value) { return (*at += value) - value; }\n"
    text = "#include <cmath>\n" + (Path(__file__).parent / "emulation.cpp").read_text()
    text = text.replace("//: kernel", names + given + kernel + "using kernel::Arguments;\n")
    return str(built(text, folder, FLAGS, "g++")).encode()


@pytest.fixture
def on_fibers(folder: Path) -> Iterator[None]:
    """The engine takes tensors of the CPU, and its kernel runs on the host."""
    with emulated(folder) as patch:
        patch.setattr(stream, "Kernel", HostKernel)
        patch.setattr(stream, "store", SimpleNamespace(kernel=lambda s, *rest: on_host(s, folder)))
        patch.setattr(launch, "_loaded", {})
        patch.setattr(stepwise, "missing", lambda: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
        yield


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.usefixtures("on_fibers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes, layers, batch", [((16, 24), 2, 3), ((5, 13), 1, 1), ((8, 8), 3, 9)], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "four_states", "slstm"])
def test_the_kernel_on_the_host(cell: str, sizes: tuple[int, int], layers: int, batch: int, dtype: torch.dtype) -> None:
    layer = make(cell, *sizes, layers, dtype=dtype, engine="stepwise", zoneout=0.2)
    assert is_prepared(layer, batch)
    x, hx, options = drawn(layer, 5, batch)
    assert_equals_the_layer(layer, x, hx, **options)
    if "n" not in layer._widths:
        assert_equals_the_layer(layer, x, hx, reset=torch.rand(5, batch) < 0.3, **options)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("dtype, architecture", [
    (torch.float64, "sm_90a"), (torch.float16, "sm_90a"), (torch.bfloat16, "sm_75"), (torch.float32, "sm_80"),
    (torch.float64, "sm_120a"),
])  # fmt: skip
def test_it_compiles_without_a_gpu(dtype: torch.dtype, architecture: str) -> None:
    cubin(stepwise_source.stream(CELLS["four_states"].graph, dtype).text, "stream", architecture, steps.OPTIONS)


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_lanes_of_a_warp_stay_together(dtype: torch.dtype, tmp_path: Path) -> None:
    """Where the compiler takes them to be apart each shuffle gathers them anew: 44 us a step and not 7 (96 units,
    8 streams)."""
    code = cubin(stepwise_source.stream(CELLS["lstm"].graph, dtype).text, "stream", "sm_90a", steps.OPTIONS)
    lines = listed(code, tmp_path / "stream.cubin")
    assert any("SHFL" in line for line in lines)
    assert not any("WARPSYNC" in line for line in lines)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_equals_its_layer(cell: str, dtype: torch.dtype) -> None:
    layer = make(cell, 8, 24, 2, dtype=dtype, engine="stepwise").cuda()
    way = stepwise_source.stream(CELLS[cell].graph, dtype).segments.forward
    assert is_prepared(layer, 3) == (way.segments == 1 and not way.means)
    x, hx, options = map(on_gpu, drawn(layer.cpu(), 6, 3))
    layer.cuda()
    assert_equals_the_layer(layer, x, hx, **options)
    if "n" not in layer._widths:  # a state by which its step divides is never zero
        assert_equals_the_layer(layer, x, hx, reset=torch.rand(6, 3, device="cuda") < 0.3, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIONS[name]
    layer = getattr(whorl, kind)(7, 33, dtype=dtype, engine="stepwise", **options).eval()
    x, hx, _ = map(on_gpu, drawn(layer, 5, 2))
    assert_equals_the_layer(layer.cuda(), x, hx, reset=torch.rand(5, 2, device="cuda") < 0.4)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 9, MOST_STREAMS, MOST_STREAMS + 1])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 17), (64, 65), (40, 128), (1000, 1500)], ids=str)
def test_sizes(sizes: tuple[int, int], batch: int) -> None:
    layer = whorl.GRU(*sizes, num_layers=2, engine="stepwise").eval()
    x, hx, _ = map(on_gpu, drawn(layer, 4, batch))
    layer.cuda()
    assert is_prepared(layer, batch) == (batch <= MOST_STREAMS)
    assert_equals_the_layer(layer, x, hx)
    assert_equals_the_layer(layer.to(torch.bfloat16), x.bfloat16(), hx.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_captured_loop_goes_on_and_can_be_set(layers: int) -> None:
    layer = whorl.LSTM(32, 64, layers, device="cuda", dtype=torch.bfloat16, engine="stepwise").eval()
    x, hx, _ = map(on_gpu, drawn(layer.cpu(), 12, 1))
    layer.cuda()
    wanted, *finals = stepped(layer, x, hx)
    stepper = layer.stepper()
    step = x[0].clone()
    stepper(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = stepper(step)
    for _ in range(3):
        stepper.state = hx
        found = []
        for row in x:
            step.copy_(row)
            graph.replay()
            found.append(y.clone())
        assert torch.equal(torch.stack(found), wanted)
        assert all(torch.equal(got, final) for got, final in zip(stepper.state, finals, strict=True))


def assert_an_odd_place_changes_no_bit(layer: Any, device: str) -> None:
    held = torch.randn(5, 1, 33, device=device)
    views = held[:, :, 1:]
    assert any(view.data_ptr() % 16 for view in views)
    assert torch.equal(stepped(layer, views)[0], stepped(layer, views.contiguous())[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.usefixtures("on_fibers")
def test_a_view_at_an_odd_place_changes_no_bit_on_the_host() -> None:
    assert_an_odd_place_changes_no_bit(whorl.LSTM(32, 24, engine="stepwise").eval(), "cpu")


@pytest.mark.gpu
def test_a_view_at_an_odd_place_changes_no_bit() -> None:
    assert_an_odd_place_changes_no_bit(whorl.LSTM(32, 64, device="cuda", engine="stepwise").eval(), "cuda")
