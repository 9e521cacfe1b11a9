"""Memory of engine `cpu` that is used again: never by two at once, no more than is said, and a child's is its own."""

import gc
import os
import platform
import subprocess
import sys

import pytest
import torch

import whorl
from whorl import compiler
from whorl.engines.cpu import memory
from whorl.engines.cpu.memory import borrowed
from whorl.engines.cpu.rows import Rows
from whorl.problem import Call, Marks

MB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_idle() -> None:
    gc.collect()
    memory._idle.clear()


def test_what_died_is_used_again_and_what_lives_is_not() -> None:
    one = borrowed(8 * MB, dtype=torch.uint8)
    other = borrowed(2, MB, dtype=torch.float32)
    assert one.data_ptr() != other.data_ptr()
    assert other.shape == (2, MB)
    one.fill_(1)
    other.fill_(2.0)
    assert one.min() == one.max() == 1
    inner, place = one[MB:].view(torch.int32), one.data_ptr()
    del one
    assert borrowed(8 * MB, dtype=torch.uint8).data_ptr() != place, "a part of it lives"
    del inner
    found = {tensor.data_ptr() for tensor in [borrowed(8 * MB - 5, dtype=torch.uint8) for _ in range(2)]}
    assert place in found
    assert len(found) == 2


def test_no_more_lies_idle_than_is_said() -> None:
    held = [borrowed(60 * MB, dtype=torch.uint8) for _ in range(6)]
    last = held[-1].data_ptr()
    while held:
        del held[0]
    assert 0 < sum(map(len, memory._idle)) <= memory._MOST_IDLE
    assert borrowed(60 * MB, dtype=torch.uint8).data_ptr() != last or len(memory._idle) < 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_writes_into_its_own() -> None:
    shared = borrowed(8 * MB, dtype=torch.uint8)
    shared.numpy()[:] = 3
    child = os.fork()
    if not child:
        shared.numpy()[:] = 4
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert shared.min() == shared.max() == 3


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_a_training_step_takes_its_memory_from_the_one_before() -> None:
    """Most steps do: a single one may find malloc's free memory in pieces too small, and the heap grows once more."""
    script = """
import resource, torch, whorl
layer, x = whorl.GRU(128, 128, batch_first=True, engine="cpu"), torch.randn(128, 30, 128, requires_grad=True)
dy = torch.randn_like(x)
def faults():
    torch.autograd.grad(layer(x)[0], [x, *layer.parameters()], dy)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
seen = [faults() for _ in range(101)][20:]
found = sorted(after - before for before, after in zip(seen, seen[1:]))
assert found[60] < 100, f"new pages of 80 steps, each of which takes 4 MB of malloc: {found}"
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
def test_two_graphs_at_once() -> None:
    """What the first forward kept is not what the second writes, and both backwards are right."""
    layer = whorl.LSTM(16, 256, engine="cpu")
    xs = [torch.randn(70, 24, 16, requires_grad=True) for _ in range(2)]
    alone = []
    for x in xs:
        layer(x)[0].sum().backward()
        alone.append(x.grad)
        x.grad = None
    assert memory._idle, "large enough to be borrowed"
    outs = [layer(x)[0].sum() for x in xs]
    for out, x, wanted in zip(outs, xs, alone, strict=True):
        out.backward()
        assert torch.equal(x.grad, wanted)


def test_nothing_is_gathered_where_every_step_counts() -> None:
    x, weights = torch.zeros(3, 2, 4), (torch.zeros(1),)
    for marks, chosen in (
        (Marks(lengths=torch.tensor([3, 3]), mask=torch.ones(3, 2).bool()), None),
        (Marks(lengths=torch.tensor([3, 2])), [0, 1, 2, 3, 4]),
    ):
        rows = Rows(Call(x, (), weights, marks=marks))
        assert (rows.chosen if rows.chosen is None else rows.chosen.tolist()) == chosen
        assert rows.compact == (6 if chosen is None else len(chosen))
        assert (rows.lengths is None, rows.mask is None) == ((True, True) if chosen is None else (False, True))
