"""Machine code to the GPU: loaded once for each device, launched through the driver, with nothing of CUDA imported.

A kernel takes one argument, a struct, whose fields are given as plain numbers; addresses are numbers too.  A launch is
one call of the driver: it goes to torch's current stream, under capture of a CUDA graph and from any thread.
"""

import ctypes
import struct
import sys
from copy import copy
from functools import cache
from threading import Lock
from typing import Any

import torch

from whorl.engines.tape import writing
from whorl.errors import KernelError

_CLUSTER_DIMENSION, _COOPERATIVE, _PROGRAMMATIC = 4, 2, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_REGISTERS, _LOCAL = 4, 3
_INVALID_CONTEXT = 201


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_uint), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


class _Frame:
    """What one launch hands to the driver, made ready so that a launch only fills in numbers."""

    __slots__ = ("_kept", "arguments", "config", "grid", "reference", "values")

    def __init__(self, kernel: "Kernel") -> None:
        self.values = ctypes.create_string_buffer(kernel.layout.size)
        self.arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.values))
        self.config = _Config(grid=(1, 1, 1), block=(kernel.block, 1, 1), shared=kernel.shared)
        self.grid = self.config.grid
        kept = [_Attribute(attribute, 0, (size, 1, 1)) for attribute, size in kernel.attributes]
        self._kept = (_Attribute * len(kept))(*kept)
        self.config.attributes, self.config.count = ctypes.cast(self._kept, ctypes.POINTER(_Attribute)), len(kept)
        self.reference = ctypes.byref(self.config)


class Kernel:
    """A kernel on one device.

    Args:
        code: its cubin.
        name: of the function in it.
        device: torch's number of the GPU.
        block: threads of a block.
        shared: bytes of dynamic shared memory of a block.
        cluster: blocks of a cluster; 1 launches without clusters.
        layout: the fields of its argument, as `struct` writes them; the padding is C's.
        together: whether all blocks of a launch must run at once, or the launch fail.
        early: whether it may begin before what was launched ahead of it has ended, and itself waits for that; on
            compute capability 9.0 and later.

    Raises:
        KernelError: the driver does not take it, or a CUDA graph is being captured, when nothing can be loaded.
    """

    def __init__(
        self, code: bytes, name: str, device: int, block: int, shared: int, cluster: int, layout: str,
        together: bool = False, early: bool = False,
    ) -> None:  # fmt: skip
        self.early = early
        self.name, self.block, self.shared, self.cluster, self.together = name, block, shared, cluster, together
        self.layout = struct.Struct(layout)
        if torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"{name} was not loaded before the capture of a CUDA graph, and cannot be while it lasts: run the "
                "layer once on input of these shapes first, forward and backward (`whorl warm` compiles ahead of time)."
            )
        library, module, function, context = driver(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # torch has made its context now, and it is this thread's
            check(library.cuCtxGetCurrent(ctypes.byref(context)), "tell its context")
            check(library.cuModuleLoadData(ctypes.byref(module), code), f"load {name}")
            check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find {name}")
            for attribute, value in {_MAX_DYNAMIC_SHARED: shared, _NON_PORTABLE_CLUSTER: int(cluster > 8)}.items():
                if value:
                    check(library.cuFuncSetAttribute(function, attribute, value), f"prepare {name}")
        self._function, self._launch, self._context, self.function = (
            function, library.cuLaunchKernelEx, context, function.value or 0,
        )  # fmt: skip
        self._frames: list[_Frame] = []

    @property
    def attributes(self) -> list[tuple[int, int]]:
        """Of a launch: the driver's number of each, and its value."""
        values = {_CLUSTER_DIMENSION: self.cluster if self.cluster > 1 else 0}
        values |= {_COOPERATIVE: int(self.together), _PROGRAMMATIC: int(self.early)}
        return [(attribute, value) for attribute, value in values.items() if value]

    def __call__(self, stream: int, grid: int, second: int, *values: int | float | bytes) -> None:
        """Launch `grid` x `second` blocks on a stream with the fields of the argument.

        Raises:
            KernelError: the driver refuses; a kernel that fails while it runs is seen by torch's next call.
        """
        if writing.tape is not None:
            return writing.tape.launch(self, grid, second, values)
        try:
            frame = self._frames.pop()  # each launch has one of its own: threads, and finalizers, may be within another
        except IndexError:
            frame = _Frame(self)
        self.layout.pack_into(frame.values, 0, *values)
        frame.grid[0], frame.grid[1], frame.config.stream = grid, second, stream
        status = self._launch(frame.reference, self._function, frame.arguments, None)
        if status == _INVALID_CONTEXT:
            # for the first that a thread asks of CUDA, as autograd's own thread may
            check(driver().cuCtxSetCurrent(self._context), "take its context")
            status = self._launch(frame.reference, self._function, frame.arguments, None)
        self._frames.append(frame)
        if status:
            check(status, f"launch {self.name}")
        return None

    def alone(self, shared: int) -> "Kernel":
        """The same kernel, whose blocks ask for so much shared memory at least, so that no two are on a multiprocessor.

        Raises:
            KernelError: the driver refuses.
        """
        made = copy(self)
        made.shared, made._frames = max(shared, self.shared), []
        check(driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, made.shared), f"prepare {self.name}")
        return made

    def resources(self) -> dict[str, int]:
        """Registers and bytes of local memory of a thread (what was spilled), and clusters resident at once."""
        library, number, found = driver(), ctypes.c_int(), {}
        for name, attribute in {"registers": _REGISTERS, "local": _LOCAL}.items():
            check(library.cuFuncGetAttribute(ctypes.byref(number), attribute, self._function), f"ask {self.name}")
            found[name] = number.value
        if self.cluster > 1:
            frame = _Frame(self)
            frame.grid[0] = self.cluster
            asked = library.cuOccupancyMaxActiveClusters(ctypes.byref(number), self._function, frame.reference)
            check(asked, f"ask {self.name}")
            found["clusters"] = number.value
        return found


_loading = Lock()
_loaded: dict[Any, Kernel] = {}


def loaded(key: Any, make: Any) -> Kernel:
    """The kernel of a key, made by `make()` where it is asked for the first time; one thread makes it."""
    found = _loaded.get(key)
    if found is None:
        with _loading:
            found = _loaded.get(key) or make()
            _loaded[key] = found
    return found


def is_loaded(key: Any) -> bool:
    """Whether the kernel of a key has been made."""
    return key in _loaded


def check(status: int, what: str) -> None:
    """Nothing where the driver's `status` is 0.

    Raises:
        KernelError: its own name of the error, and what it was asked.
    """
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        raise KernelError(f"NVIDIA's driver cannot {what}: {(text.value or b'unknown error').decode()} ({status}).")


@cache
def driver() -> ctypes.CDLL:
    """NVIDIA's driver.

    Raises:
        KernelError: there is none.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise KernelError(f"NVIDIA's driver is not here ({name}): `whorl doctor` says what to do.") from error
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library
