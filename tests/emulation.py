"""whorl's CUDA kernels on the host, through `emulation.cpp`: what they compute, tested where there is no GPU.

    with emulated():
        layer(x)  # engine `persistent`, on tensors of the CPU

The kernels are the real sources with the real tiles; only the functions of `ptx.cu` that are PTX are others.
"""

import ctypes
import mmap
import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from host_library import built
from whorl import problem
from whorl.bench.baseline import to_tf32
from whorl.engines import taped
from whorl.engines.cuda import (
    aligned,
    asked,
    entering,
    launch,
    layers,
    memory,
    options,
    overlapped,
    persistent,
    plain,
    prepare,
    products,
    projected,
    store,
)
from whorl.engines.cuda.tiling import Chip
from whorl.engines.tape import writing
from whorl.plan import plan

H200 = problem.Device("cuda", "NVIDIA H200", (9, 0), 91900, half=True, bfloat16=True, multiprocessors=132)
CHIP = Chip((9, 0), 132)
# With -O1 kernels take 1.3 times as long to compile; with -O0 0.8 of it, and half as long again to run.
FLAGS = ("-Og", "-fno-strict-aliasing", "-fno-exceptions", "-fno-asynchronous-unwind-tables")
LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc")  # without the library of C++ the linker takes 0.6 of the time
ORDER = 0
"""From which the order is drawn in which threads run; 0: one after the other."""
_HOST = Path(__file__).with_suffix(".cpp")
_BRACE = re.compile("[{}]")


def on_host(source: str) -> str:
    """C++ of a kernel's source."""
    found, at = [], 0
    for match in re.finditer(r"__device__ __forceinline__ [\w ]+?(\w+)\(((?:[^()]|\([^()]*\))*)\) \{", source):
        depth, end = 1, match.end()
        while depth:
            brace = _BRACE.search(source, end)
            assert brace is not None
            depth, end = depth + (1 if brace[0] == "{" else -1), brace.end()
        if "asm" not in source[match.end() : end]:
            continue
        parameters = [
            re.sub(r"\(&(\w+)\)", r"\1", part).split("[")[0].split()[-1] for part in match[2].split(",") if part
        ]
        call = f"return emulated_{match[1]}({', '.join(name.strip('*&') for name in parameters)});"
        found += [source[at : match.end()], call, "}"]
        at = end
    text = "".join([*found, source[at:]])
    memory = "unsigned* const memory = (unsigned*)host::now->block->shared;"
    return re.sub(r"extern __shared__ [^;]*?unsigned memory\[\];", memory, text)


class Kernel:
    """What `launch.Kernel` is, on the host."""

    def __init__(
        self, code: bytes, name: str, device: int, block: int, shared: int, cluster: int, layout: str,
        together: bool = False, early: bool = False,
    ) -> None:  # fmt: skip
        assert shared <= 232448
        self.name, self.layout, self.together = name, struct.Struct(layout), together
        self.block, self.cluster, self.shared, self.early = block, cluster, shared, early
        self._library = ctypes.CDLL(code.decode())
        self.function = id(self)  # kept below, so that no other has it
        _kernels[self.function] = self

    attributes = launch.Kernel.attributes

    def alone(self, shared: int) -> "Kernel":
        return self

    def __call__(self, stream: int, grid: int, second: int, *values: Any) -> None:
        if writing.tape is not None:
            writing.tape.launch(self, grid, second, values)
        else:
            self.launch(grid, second, self.layout.pack(*values))

    def launch(self, grid: int, second: int, packed: bytes) -> None:
        cluster = grid if self.together else self.cluster
        status = run(self._library, grid, second, self.block, cluster, self.shared, packed)
        assert status != 1, f"the threads of {self.name} wait for each other"
        assert status == 0, f"{self.name} writes to more shared memory than the {self.shared} bytes of its launch"


def run(library: ctypes.CDLL, grid: int, second: int, block: int, cluster: int, shared: int, packed: bytes) -> int:
    """Launch the kernel of a library; what it gives is said in emulation.cpp."""
    with _running:
        ctypes.c_uint64.in_dll(library, "order_of_threads").value = ORDER
        stacks = _stacks(block * cluster * ctypes.c_uint64.in_dll(library, "bytes_of_stack").value)
        room = ctypes.byref(ctypes.c_char.from_buffer(stacks))
        return library.launch(grid, second, block, cluster, shared, packed, room)


def _stacks(size: int) -> mmap.mmap:
    """Memory for the stacks of a launch's threads, most of whose pages the launch before has touched."""
    global _kept
    if len(_kept) >= size:
        return _kept
    made = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size <= 1 << 30:  # of some 4,000 threads, which touch a few pages each
        _kept = made
    return made


_kept = mmap.mmap(-1, 1)
_kernels: dict[int, Kernel] = {}
_running = threading.Lock()  # one kernel at a time: its threads are fibers of the thread that launches it


class Streams:
    """What `overlapped.Streams` is, where all runs in the order in which it is launched."""

    def __init__(self, index: int, count: int) -> None:
        self._made = [Stream(number) for number in range(count)]

    @contextmanager
    def begin(self) -> Iterator[list["Stream"]]:
        yield self._made


class Stream:
    """One of these."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number

    def record_event(self) -> object:
        return self

    def wait_event(self, event: object) -> None:
        pass


class Graphs:
    """CUDA graphs of launches and products, captured by one thread at a time and replayed on what memory holds then.

    What is launched, and the handle of cuBLAS, are on the stream that is captured while one is, and else on torch's;
    what makes and destroys graphs asks the driver to let other threads be.
    """

    def __init__(self) -> None:
        self.captured: list[Callable[[], int]] | None = None
        self.kept: dict[int, list[Callable[[], int]]] = {}
        self._number = 0
        self._threads: dict[int, SimpleNamespace] = {}
        self.count()

    @property
    def _own(self) -> SimpleNamespace:
        """Of this thread: one that is not Python's has nothing of `threading` from one callback to the next."""
        return self._threads.setdefault(threading.get_native_id(), SimpleNamespace(stream=0, space=0, mode=0))

    @property
    def stream(self) -> int:
        """On which this thread works now."""
        return CAPTURING if self.captured is not None else 0

    def take_handle(self, setup: bool) -> int:
        self._own.stream, self._own.space = 0, 0
        return 1

    def set_stream(self, handle: int, stream: int) -> int:
        self._own.stream, self._own.space = stream, 0
        return 0

    def set_space(self, handle: int, at: int, size: int) -> int:
        assert at
        assert size >= 1 << 20
        self._own.space = at
        return 0

    def check_handle(self) -> None:
        assert self._own.stream == self.stream
        assert bool(self._own.space) == bool(self.stream)

    def exchange_mode(self, mode: Any) -> int:
        self._own.mode, mode[0] = mode[0], self._own.mode
        return 0

    def relaxed(self) -> bool:
        return self._own.mode == 2

    def count(self, takes: bool = True) -> None:
        """From here on; `takes` is whether the driver makes something of what is captured."""
        self.made, self.replays, self.takes, self._others = 0, 0, takes, set(self.kept)

    def left(self) -> int:
        """Those that were made since, and are still there."""
        return len(self.kept.keys() - self._others)

    def do(self, what: Callable[[], int]) -> int:
        """Now, or at each replay."""
        if self.captured is None:
            return what()
        self.captured.append(what)
        return 0

    def begin(self, stream: int, mode: int) -> int:
        assert (stream, mode, self.captured) == (CAPTURING, 2, None)
        assert self.relaxed()
        self.captured = []
        return 0

    def end(self, stream: int, graph: Any) -> int:
        assert self.captured is not None
        self.made += 1
        self._number += 1
        graph[0], self.kept[self._number], self.captured = self._number, self.captured, None
        return 0

    def instantiate(self, instance: Any, graph: int, flags: int) -> int:
        if not self.takes:
            return 801
        instance[0], self.kept[-graph % 2**64] = -graph, self.kept[graph]
        return 0

    def destroy(self, which: int) -> int:
        assert self.relaxed()
        del self.kept[which]
        return 0

    def replay(self, instance: int, stream: int) -> int:
        self.replays += 1
        return max(what() for what in self.kept[instance])


graphs = Graphs()
CAPTURING = 77
"""The stream on which they are captured."""


def compiled(source: str, name: str, architecture: str, options: Any = (), *, folder: Path) -> bytes:
    """Where the shared library of a kernel lies."""
    host = _HOST.read_text()
    text = host.replace("//: kernel", on_host(source))
    defines = re.findall(r"^#define (ELEMENT_BYTES|BFLOAT16|HALVES) (\d)$", source, re.M)
    if found := re.match(r"sm_(\d+)", architecture):
        defines.append(("__CUDA_ARCH__", f"{found[1]}0"))
    text = "".join(f"#define {key} {value}\n" for key, value in defines) + text
    elements = [f"-D{key}={value}" for key, value in defines if key != "__CUDA_ARCH__"]
    launches = built(host, folder, (*FLAGS, "-O3", "-DOF_LAUNCH", *elements, "-c"), "g++")
    return str(built(text, folder, (*FLAGS, "-DOF_KERNEL"), "g++", [launches, *LIBRARIES])).encode()


def _matrix(place: int, kind: int, rows: int, columns: int, step: int) -> Tensor:
    """A matrix that lies at an address: an element outside of it is none of it."""
    (dtype,) = [one for one, number in products._TYPES.items() if number == kind]
    count = (rows - 1) * step + columns
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(place)
    return torch.frombuffer(memory, dtype=dtype, count=count).as_strided((rows, columns), (step, 1))


@contextmanager
def emulated(folder: Path, tf32: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """Engine `persistent` takes tensors of the CPU for those of an H200; `tf32` is torch's switch.

    What a test puts into the place of something inside, it puts there through what this gives, which ends with it.
    A patch that ended after it would put back what stands here, for all tests that follow.
    """

    def product(
        a: Tensor, b: Tensor, out: Tensor | None = None, add: bool = False, tf32: bool = False, wide: bool = False
    ) -> Tensor:
        made = real_mm(*(to_tf32(t) if tf32 else t.float() for t in (a, b)))
        made = made if out is None or not add else made + out
        return made.to(torch.float32 if wide else a.dtype) if out is None else out.copy_(made)

    def multiply(handle: int, *given: Any) -> int:
        """cublasGemmEx, which goes by columns: what it has as b.T @ a.T is a @ b."""
        numbers = [getattr(one, "value", one) for one in given]
        b_turned, a_turned, columns, rows, depth, _, b, kind, b_step, a, _, a_step, add, out, its, step, how, _ = (
            numbers
        )
        if min(rows, columns) == 0 or b_step < max(1, depth if b_turned else columns) or step < columns:
            return 7
        left = _matrix(a, kind, *((depth, rows) if a_turned else (rows, depth)), a_step)
        right = _matrix(b, kind, *((columns, depth) if b_turned else (depth, columns)), b_step)
        into = _matrix(out, its, rows, columns, step)
        adds = ctypes.c_float.from_address(add).value == 1
        product(left.t() if a_turned else left, right.t() if b_turned else right, into, adds, how == products._TF32)
        return 0

    def multiply_each(handle: int, *given: Any) -> int:
        """cublasGemmStridedBatchedEx: one after another, each so many elements behind the last."""
        numbers = [getattr(one, "value", one) for one in given]
        *sizes, b, kind, b_step, b_far, a, _, a_step, a_far, add, out, its, step, far, count = numbers[:-2]
        (element,) = [dtype.itemsize for dtype, number in products._TYPES.items() if number == kind]
        places = [(b + i * b_far * element, a + i * a_far * element, out + i * far * element) for i in range(count)]
        return max(
            multiply(handle, *sizes, b, kind, b_step, a, kind, a_step, add, out, its, step, *given[-2:])
            for b, a, out in places
        )

    def put(owner: Any, name: str, value: Any) -> None:
        _places[id(owner), name] = owner
        patch.setattr(owner, name, value, raising=False)

    major, minor = CHIP.capability
    chip = SimpleNamespace(major=major, minor=minor, multi_processor_count=CHIP.multiprocessors)
    real_mm, real_addmm = torch.mm, torch.addmm

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        return real_mm(*(t if out_dtype is None else t.to(out_dtype) for t in (a, b)), out=out)

    def addmm(c: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return real_addmm(c, *(t if out_dtype is None else t.to(out_dtype) for t in (a, b)))

    plan.cache_clear()  # what is asked of this processor is another problem inside
    with pytest.MonkeyPatch.context() as patch:
        put(problem, "_device", lambda *_: replace(H200, tf32=tf32))
        put(persistent, "missing", lambda: None)
        put(torch.cuda, "get_device_properties", lambda _: chip)
        put(torch.cuda, "current_device", lambda: 0)
        put(torch._C, "_cuda_getDevice", lambda: 0)
        put(torch.cuda, "device", lambda _: nullcontext())
        put(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
        put(torch._C, "_cuda_getCurrentBlasHandle", lambda: 0)
        put(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
        for module in (layers, plain):
            put(module, "branch_of", lambda *where: None)
        put(layers, "sides", lambda chip, index: None)
        put(overlapped, "Streams", Streams)
        put(torch.cuda, "set_stream", lambda stream: None)
        library = SimpleNamespace(
            cublasGemmEx=multiply, cublasGemmStridedBatchedEx=multiply_each, cublasSetMathMode=lambda handle, mode: 0,
            cublasSetWorkspace_v2=lambda handle, at, size: 0,
        )  # fmt: skip
        put(products, "cublas", lambda: library)
        put(torch, "mm", mm)
        put(torch, "addmm", addmm)
        put(memory, "_empty", lambda *laid: torch.empty_strided(*laid[:2], dtype=laid[2]))
        put(taped, "ready", lambda: False)
        put(asked, "functions", lambda: addresses(library))
        put(asked, "_context", lambda: 0)
        put(taped, "_numbers", {})
        put(layers, "product", product)
        put(aligned, "product", product)
        put(entering, "product", product)
        put(projected, "product", product)
        put(layers, "_prepared", {})
        put(launch, "_loaded", {})
        put(prepare, "Kernel", Kernel)
        put(options, "Kernel", Kernel)
        put(store, "kernels", lambda wanted: [compiled(*one, folder=folder) for one in wanted])
        yield patch
    plan.cache_clear()


def addresses(library: Any) -> tuple[int, ...]:
    """What `asked.functions` gives, of functions that call these kernels and this cuBLAS."""
    number, pointer, refer = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER

    def run(config: Any, function: int, arguments: Any, extra: Any) -> int:
        kernel, given = _kernels[function], config.contents
        assert (given.block[0], given.shared) == (kernel.block, kernel.shared)
        assert [(one.id, one.value[0]) for one in given.attributes[: given.count]] == kernel.attributes
        assert (given.stream or 0) == graphs.stream
        grid, packed = (given.grid[0], given.grid[1]), ctypes.string_at(arguments[0], kernel.layout.size)
        return graphs.do(lambda: kernel.launch(*grid, packed) or 0)

    def create_stream(stream: Any, flags: int, priority: int) -> int:
        stream[0] = CAPTURING
        return 0

    def captured(multiply: Any) -> Any:
        def multiplied(*given: Any) -> int:
            graphs.check_handle()
            return graphs.do(lambda: multiply(*given))

        return multiplied

    def get_context(context: Any) -> int:
        context[0] = 5
        return 0

    def tell(device: int, stream: Any) -> int:
        stream[0] = 0
        return 0

    def is_capturing(stream: int, status: Any) -> int:
        status[0] = 0
        return 0

    matrix, far = [pointer, number, number], ctypes.c_longlong
    one = (pointer, *[number] * 5, pointer, *matrix, *matrix, pointer, *matrix, number, number)
    each = (pointer, *[number] * 5, pointer, *matrix, far, *matrix, far, pointer, *matrix, far, *[number] * 3)
    kinds = [
        (run, (refer(launch._Config), pointer, refer(pointer), pointer), number),
        (get_context, (refer(pointer),), number),
        (lambda context: 0, (pointer,), number),
        (captured(library.cublasGemmEx), one, number),
        (captured(library.cublasGemmStridedBatchedEx), each, number),
        (library.cublasSetMathMode, (pointer, number), number),
        (graphs.take_handle, (ctypes.c_bool,), pointer),
        (tell, (number, refer(pointer)), number),
        (is_capturing, (pointer, refer(number)), number),
        (graphs.exchange_mode, (refer(number),), number),
        (lambda stream, priority: 0, (pointer, refer(number)), number),
        (create_stream, (refer(pointer), ctypes.c_uint, number), number),
        (graphs.begin, (pointer, number), number),
        (graphs.end, (pointer, refer(pointer)), number),
        (graphs.instantiate, (refer(pointer), pointer, ctypes.c_ulonglong), number),
        (graphs.destroy, (pointer,), number),
        (graphs.replay, (pointer, pointer), number),
        (graphs.destroy, (pointer,), number),
        (graphs.set_stream, (pointer, pointer), number),
        (graphs.set_space, (pointer, pointer, ctypes.c_size_t), number),
    ]
    _callbacks.extend(ctypes.CFUNCTYPE(gives, *takes)(function) for function, takes, gives in kinds)
    own = [*_callbacks[-len(kinds) :], ctypes.pythonapi.PyGILState_Ensure, ctypes.pythonapi.PyGILState_Release]
    return tuple(ctypes.cast(one, pointer).value or 0 for one in own)


_callbacks: list[Any] = []
"""What C++ holds addresses of."""
_places: dict[tuple[int, str], Any] = {}
"""Whose attributes `emulated` has replaced."""


def left_behind() -> list[str]:
    """What stands where `emulated` put it, and should not once it has ended."""
    found = {name: getattr(owner, name, None) for (_, name), owner in _places.items()}
    return [name for name, value in found.items() if getattr(value, "__module__", None) == __name__]
