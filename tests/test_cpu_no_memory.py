"""Engine `cpu` where memory is denied: an exception says how much was asked for, and the next call is right.

Before the kernels stands `denied.cpp`, which denies one piece of memory: each in turn, so that nothing takes memory and
does not look whether it got it.
"""

import ctypes
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from comparison import weighted
from engine_cases import CELLS, FORMS, Case, in_dtype
from thinned import thinned
from whorl import compiler
from whorl.engines.cpu import memory, plain, stream, sweep
from whorl.functional import recurrent
from whorl.problem import Call

pytestmark = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")

DENIED = Path(__file__).with_name("denied.cpp").read_text(encoding="utf-8")

AFTER_A_FORK = 'extern "C" void denied_openmp(bool denied) { kernel::forked = denied; }'
CACHES = sweep.kernel, sweep._loop, plain.sizes


@pytest.fixture(autouse=True)
def through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ asks again through Python, which then has the memory."""
    monkeypatch.setenv("WHORL_CALLS", "python")


class Denying:
    """The engine's kernels of a dtype, of which a piece of memory can be denied.

    Args:
        own_threads: as after a fork, where torch's OpenMP has none.
    """

    def __init__(self, dtype: torch.dtype, own_threads: bool) -> None:
        self._library, self.own_threads = sweep._loop(dtype), own_threads
        self._library.denied_openmp(ctypes.c_bool(own_threads))
        self._library.denied_bytes.restype = self._library.denied_held.restype = ctypes.c_int64

    def each(self, call: Callable[[], Any]) -> tuple[Any, int]:
        """What a call gives after each piece of memory that it takes was denied, and how many those were."""
        for count in range(1, 1000):
            held, said, made = self._library.denied_held(), "", None
            self._library.denied_next(ctypes.c_int64(count))
            try:
                made = call()
            except MemoryError as error:
                said = str(error)
            denied = self._library.denied_bytes()
            self._library.denied_next(ctypes.c_int64(0))
            if not denied and not said:
                return made, count - 1
            assert said.startswith(f"engine 'cpu' asked for {denied:,} bytes of memory for ")
            assert self._library.denied_held() == held, "what was taken before is still held"
        raise AssertionError("a call takes memory without end")


THREADS_OF = ["OpenMP", "threads of its own"]


@pytest.fixture(params=THREADS_OF)
def denying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Denying]]:
    text = f"{DENIED}\n{sweep.sweep()}\n{AFTER_A_FORK}"
    monkeypatch.setattr(sweep, "sweep", lambda: text)
    for cached in CACHES:
        cached.cache_clear()
    yield partial(Denying, own_threads=request.param != "OpenMP")
    monkeypatch.undo()
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def alike(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


CASES: dict[str, tuple[str, Case, torch.dtype]] = {
    "plain": ("lstm", Case({"layers": 2, "directions": 2}), torch.float32),
    "plain, float64": ("gru", Case(initial=False), torch.float64),
    "plain, bfloat16": ("lstm", Case(inputs=5, units=37), torch.bfloat16),
    "large": ("gru", Case(time=9, batch=8, inputs=70, units=130), torch.float32),
    "a mask": ("gru", FORMS["a mask alone"], torch.float32),
    "a mask, bfloat16": ("lstm", FORMS["a mask alone"], torch.bfloat16),
    "recurrent dropout": ("lstm", FORMS["recurrent dropout by gate"], torch.float32),
    "every mark": ("lstm", Case({"directions": 2}, marks=("mask", "lengths", "reset_to")), torch.float32),
    "lengths and every state": ("lstm", Case(marks=("lengths",), sequences=True), torch.float32),
    "dropout": ("lstm", FORMS["layers"], torch.float32),
    "given masks": ("gru", FORMS["given, by gate"], torch.float32),
    "given masks, bfloat16": ("gru", FORMS["given, by step"], torch.bfloat16),
    "packed": ("lstm", FORMS["packed"], torch.float32),
    "projection": ("lstm", Case({"projection": 5}), torch.float32),
    "products": ("gru_before", FORMS["lengths"], torch.float32),
}


@pytest.mark.parametrize(
    "name, denying, threads", thinned(2, CASES, THREADS_OF, [1, 2]), indirect=["denying", "threads"]
)
def test_a_pass_says_what_it_asked_for_and_the_next_is_right(
    name: str, denying: Callable[..., Denying], threads: int
) -> None:
    cell, case, dtype = CASES[name]
    form, call = case.build(CELLS[cell])
    call = in_dtype(call, dtype)
    leaves = [tensor.detach().requires_grad_() for tensor in call.tensors]

    def forward() -> tuple[Tensor, ...]:
        return recurrent(form.to_json(), Call.of(leaves, call.layout, call.marks), "cpu", case.sequences)

    wanted = forward()
    to_wanted = torch.autograd.grad(weighted(wanted), leaves, allow_unused=True, retain_graph=True)
    library = denying(dtype)
    found, denied = library.each(forward)
    assert denied >= 4, "weights, a team's memory and a member's, barriers"
    assert alike(found, wanted)
    loss = weighted(found)
    to_found, denied = library.each(lambda: torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True))
    assert denied >= 7, "three more of the products after the loop"
    there = [grad is not None for grad in to_wanted]
    assert [grad is not None for grad in to_found] == there
    assert alike([grad for grad in to_found if grad is not None], [grad for grad in to_wanted if grad is not None])
    with torch.no_grad():
        found, _ = library.each(forward)
    assert alike(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stepper_goes_on(
    dtype: torch.dtype, denying: Callable[..., Denying], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made, called with a reset, and laid out anew after its weights changed."""
    monkeypatch.setattr(stream, "_SHARED_FROM", 0)  # by all threads
    layer = whorl.LSTM(5, 37, 2, dtype=dtype, engine="cpu").eval()
    xs, reset = torch.randn(6, 3, 5, dtype=dtype), torch.tensor([False, True, False])
    after = [weight * 1.5 for weight in layer.state_dict().values()]
    before = [weight.clone() for weight in layer.state_dict().values()]

    def change(weights: Any) -> None:
        with torch.no_grad():
            for weight, value in zip(layer.parameters(), weights, strict=True):
                weight.copy_(value)

    def steps(each: Callable[[Callable[[], Any]], tuple[Any, int]]) -> tuple[list[Tensor], list[int]]:
        change(before)
        stepper, opened = each(lambda: layer.stepper(3))
        found, denied = [], [opened]
        for place, x in enumerate(xs):
            if place == 4:
                change(after)
            made, count = each(lambda x=x, place=place: stepper(x, reset=reset if place == 2 else None))
            found.append(made)
            denied.append(count)
        return [*found, *stepper.state], denied

    wanted, _ = steps(lambda call: (call(), 0))
    library = denying(dtype)
    found, denied = steps(library.each)
    assert alike(found, wanted)
    own = int(library.own_threads and threads > 1)
    assert denied[1:5] == [own] * 4, "a step takes none but for threads of its own"
    assert denied[5] - own == denied[0] >= 15, "of a layer seven and more"


def test_a_library_that_cannot_start_is_asked_again(
    denying: Callable[..., Denying], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = sweep.load

    def denied(*given: Any) -> ctypes.CDLL:
        library = load(*given)
        library.denied_next(ctypes.c_int64(1))
        return library

    layer, x = whorl.GRU(3, 4, engine="cpu"), torch.randn(5, 2, 3)
    wanted = layer(x)
    for cached in CACHES:
        cached.cache_clear()
    with monkeypatch.context() as changed:
        changed.setattr(sweep, "load", denied)
        with pytest.raises(MemoryError, match="engine 'cpu' cannot start"):
            layer(x)
    assert alike(layer(x), wanted)


def test_no_memory_for_what_a_pass_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    gc.collect()
    memory._idle.clear()
    layer, x = whorl.LSTM(16, 256, engine="cpu"), torch.randn(70, 24, 16)
    with monkeypatch.context() as changed:
        changed.setattr(memory.mmap, "mmap", none)
        with pytest.raises(MemoryError, match=r"asked for [\d,]{9,} bytes of memory for what a pass holds"):
            layer(x)
    layer(x)[0].sum().backward()


SCRIPT = """
import resource, torch, whorl
torch.set_num_threads(1)
layer, x = whorl.GRU(2500, 2500, engine="cpu").eval(), torch.randn(1, 2500)
wanted = layer(x[None])[0]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limits = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
for _ in range(3):  # two matrices of 75 MB, too large for what malloc keeps
    try:
        layer.stepper()
    except MemoryError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, limits)
assert torch.equal(layer.stepper()(x), wanted[0])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's limit of memory")
def test_a_limit_of_the_system() -> None:
    """By nothing of ours: as where memory is at an end."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all("bytes of memory for the prepared step of a stepper" in line for line in lines)
