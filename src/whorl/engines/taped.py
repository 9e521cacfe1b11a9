"""Calls by tapes: what a plan asks of kernels is asked from C++, with the operation of autograd around it.

Of a small layer Python takes the host longer than the kernels take for all steps.  So where the host has a C++
compiler, taped.cpp is compiled once for the torch that is installed, in some 15 seconds, by a thread of its own: calls
go through Python until it is there.  Both ways ask for the same, and give the same bits; on a GPU launches and products
of a pass whose addresses come again are one launch, of a CUDA graph (replayed.cpp).
"""

import atexit
import ctypes
import hashlib
import shlex
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl import compiler
from whorl.engines import host
from whorl.engines.base import Continue
from whorl.engines.tape import Part, Tape, scalar
from whorl.errors import CompileError
from whorl.problem import Call, Plan
from whorl.settings import settings
from whorl.weights import kinds

_TEXTS = [Path(__file__).with_name(name) for name in ("replayed.cpp", "lent.cpp", "taped.cpp")]
_WHAT = "the calls of kernels"
_OF_CUDA = 22
"""Functions that C++ calls to run on a GPU."""


class Where(NamedTuple):
    """On what a tape runs.

    Attributes:
        functions, context: of CUDA, by their addresses.
        number: torch's number of the GPU.
        where: the number of the device that tensors say, -1 of the host.
        space: bytes that products on the GPU write to meanwhile.
        threads: of this processor, where the tape has calls of its functions; 0 where it has none.
    """

    functions: tuple[int, ...] = (0,) * _OF_CUDA
    context: int = 0
    number: int = 0
    where: int = -1
    space: int = 0
    threads: int = 0


class Written(NamedTuple):
    """A plan as tapes.

    Attributes:
        forward, backward: the tapes; backward is empty where no gradient is wanted.
        outputs: slots of the output and of the final states.
        room: the slot of what forward keeps; -1 for nothing.
        gradients: of those of x, of the initial states and of the weights, which part of which slot each is.
        others: of each mask that a call brings the dtype, as kernels read it; None of what stands for none.
        marks: how many of lengths, mask, resets and seed a call brings behind those.
    """

    forward: Tape
    backward: Tape
    outputs: list[int]
    room: int
    gradients: list[Part]
    others: list[torch.dtype | None]
    marks: int

    def digest(self) -> bytes:
        """Of all of it."""
        text = repr((self.forward.written(), self.backward.written(), *self[2:]))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


class _Known(NamedTuple):
    """What Python knows of a plan that C++ has."""

    plan: Plan
    written: Written
    by_python: Continue
    on: Callable[[int], int]
    held: object
    """To what its tapes have addresses."""


_lock = threading.Lock()
_thread: threading.Thread | None = None
_run: Callable[..., list[Tensor]] | None = None
_run_like: Callable[..., list[Tensor]] | None = None
_fault = ""
_plans: dict[int, "_Known"] = {}
_numbers: dict[tuple[Plan, int, tuple[bool, ...], bytes], int] = {}
"""By plan, GPU, how weights lie and what its tapes say: other tiles make others.

For ever, as C++ has them: autograd's nodes know a plan by its number.  One layer's takes some 20 KB.
"""
_library: Any = None
_loaded: ctypes.CDLL | None = None


def ready() -> bool:
    """Whether calls can go by tapes now; begins to compile where nobody has."""
    if _run is None and _thread is None:
        begin()
    return _run is not None and settings.calls == "compiled"


def is_there() -> bool:
    """Whether it is compiled and loaded."""
    return _run is not None


def begin() -> None:
    """Compile and load in a thread, where the setting `calls` has it so and nobody has begun."""
    global _thread
    with _lock:
        if _thread is None and settings.calls == "compiled":
            within = copy_context().run  # with the folder of a block
            _thread = threading.Thread(target=within, args=(_make,), name="whorl compiles its calls", daemon=True)
            _thread.start()
            atexit.register(_end, _thread)


def finish() -> str:
    """Wait until it is compiled and loaded, or not: why not, in a sentence; "" where calls go by tapes."""
    begin()
    if _thread is not None:
        _thread.join()
    return fault() or ("" if _run is not None else "the thread that compiles them has ended, or was another process's")


def fault() -> str:
    """Why calls go through Python; "" where they do not, or it is not known yet."""
    return _fault if settings.calls == "compiled" else "settings.calls is 'python'"


def _end(thread: threading.Thread) -> None:
    """The process ends: what is being compiled is given up."""
    host.give_up()
    thread.join(5)


def _make() -> None:
    global _fault, _run
    try:
        _run = loaded()
    except CompileError as error:
        words = " ".join(str(error).split())
        _fault = words if len(words) < 600 else f"{words[:150]} ... {words[-400:]}"


def loaded() -> Callable[..., list[Tensor]]:
    """The operation that runs a plan's forward pass, compiled and loaded by this thread.

    Raises:
        CompileError: there is no compiler, it does not take the source, or torch lacks what it calls.
    """
    global _library, _loaded, _run_like
    if not compiler.found() or compiler.is_microsofts(compiler.found()):
        raise CompileError(f"no compiler that takes GCC's arguments is found: {compiler.remedy()}.")
    text = "".join(part.read_text(encoding="utf-8") for part in _TEXTS)
    _loaded = host.load(_WHAT, text, shlex.join(_flags()), "set WHORL_CALLS to python")
    _library = torch.library.Library("whorl_taped", "IMPL")
    for key in ("CompositeImplicitAutograd", "Batched"):  # of gradients that are many in one tensor
        _library.impl("backward", _backward, key)
    _library.impl("on", lambda number, device: _plans[number].on(device), "CompositeImplicitAutograd")
    _run_like = torch.ops.whorl_taped.run_like.default
    return torch.ops.whorl_taped.run.default


def _flags() -> list[str]:
    """Of the compiler: where torch's headers and libraries are, which it has loaded, and which torch it is."""
    home = Path(torch.__file__).parent
    include = home / "include"
    places = [word for place in (include, include / "torch/csrc/api/include") for word in ("-isystem", str(place))]
    libraries = [f"-L{home / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    which = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-DTORCH={torch.__version__}"]
    return ["-std=c++20", "-O1", "-w", *places, *libraries, *which]


def add(
    plan: Plan, written: Written, where: Where, turned: Sequence[bool], by_python: Continue, on: Callable[[int], int],
    held: object = None,
) -> int:  # fmt: skip
    """The number by which C++ knows a plan.

    Args:
        turned: of each weight, whether it lies the other way round.
        by_python: its backward pass where the tape is not enough.
        on: gives the number of the plan on another GPU, which is made ready there.
        held: to what the tapes have addresses.
    """
    problem, key = plan.problem, (plan, where.number, tuple(turned), written.digest())
    if key in _numbers:
        return _numbers[key]
    numbers = [
        where.number, scalar(problem.dtype), int(problem.gradient), int(problem.dtype is torch.float32),
        len(problem.form.cell.states) * problem.initial, len(kinds(problem.form)), written.room,
        int("x" in problem.constants), problem.time, problem.batch, problem.form.inputs,
        *problem.form.state_shapes(problem.batch)[0], where.where, written.marks, where.space, where.threads,
    ]  # fmt: skip
    tapes = written.forward, written.backward
    number = torch.ops.whorl_taped.add(
        [*where.functions, where.context], numbers, *[tape.written() for tape in tapes], written.outputs,
        [number for part in written.gradients for number in part],
        [-1 if dtype is None else scalar(dtype) for dtype in written.others], [int(way) for way in turned],
        *[tape.names for tape in tapes],
    )  # fmt: skip
    _plans[number], _numbers[key] = _Known(plan, written, by_python, on, held), number
    return number


def written(number: int) -> Written:
    """A plan as tapes, by its number."""
    return _plans[number].written


def address_of_pass() -> int:
    """Of `whorl_taped_pass`, which runs a tape on memory that others own; there once calls go by tapes."""
    assert _loaded is not None, "somebody has a number"
    return ctypes.cast(_loaded.whorl_taped_pass, ctypes.c_void_p).value or 0


def run(number: int, call: Call) -> Sequence[Tensor]:
    """The output and the final states, differentiable; nothing where this call is left to Python."""
    assert _run is not None, "it is ready"
    marks = [mark for mark in call.marks if mark is not None]
    row = call.x, call.states, call.weights, (*call.dropout, *call.noise), marks
    with torch._C.DisableTorchFunctionSubclass():
        made = _run(number, settings.of_block("slow") or "", *row)
    latest.number = number if made else -1
    return made


class _Latest(threading.local):
    number = -1


latest = _Latest()
"""The plan of this thread's last call that went by tapes; -1 where nobody has asked since it was set so."""


def run_like(
    number: int, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], marks: Sequence[Tensor]
) -> Sequence[Tensor]:
    """What `run` gives, where all that a plan reads of tensors is what this one was made for; nothing where not."""
    assert _run_like is not None, "a plan has this number"
    with torch._C.DisableTorchFunctionSubclass():
        return _run_like(number, settings.of_block("slow") or "", x, states, weights, marks)


def _backward(number: int, slow: str, grads: Sequence[Tensor | None], row: Sequence[Tensor]) -> list[Tensor]:
    """What C++ asks for; in the place of no gradient a truth value.

    Args:
        slow: the setting of the block in which the call was made, which autograd's threads do not see.
    """
    known = _plans[number]
    with settings(slow=slow or settings.of_process("slow")):
        made = known.by_python(known.plan, grads, row)
    return [torch.zeros((), dtype=torch.bool, device=row[0].device) if grad is None else grad for grad in made]
