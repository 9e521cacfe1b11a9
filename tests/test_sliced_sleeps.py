"""kernels/sliced_backward.cu where one warp sleeps, and where what is sent travels long.

What it exchanges lies in shared memory once.  Why nothing is overwritten before it was read, and no barrier counts
bytes of another step, its first lines say.  Here each warp in turn waits at each place until the others have come as
far as they can without it, and what is sent arrives in any order, long after its sender has gone on.
"""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
from emulation import Kernel, emulated, on_host
from engine_cases import Case, in_dtype, results
from test_sliced import SLOWED, sliced
from test_staged import needs_compiler
from test_whole import CELLS
from whorl.engines.cuda import source

PLANTED = """
extern "C" {
int slow_place = -1, slow_rank, slow_warp, slow_lane;
unsigned came_to[32][16];  // warps, one bit each, by place and rank
uint64_t travelling;  // from which is drawn when what was sent arrives; 0: at once
}
static void come_to(int place) {
  const int rank = host::now->block->rank, warp = threadIdx.x / 32;
  came_to[place][rank] |= 1u << warp;
  if (place != slow_place || rank != slow_rank || warp != slow_warp) return;
  for (int i = 0; i < 1000 && (slow_lane < 0 || host::lane() == slow_lane); ++i) host::yield();
}

struct Message { unsigned address, barrier; uint4 data; };
static host::List<Message> on_their_way;
static unsigned ended;
static void arrive(int which) {
  const Message made = on_their_way.items[which];
  on_their_way.items[which] = on_their_way.items[--on_their_way.count];
  memcpy(host::at(made.address), &made.data, 16);
  host::Barrier& b = host::barrier_at(made.barrier);
  b.bytes -= 16;
  host::settle(b);
}
static void late_send(unsigned address, unsigned barrier, uint4 data) {
  on_their_way.add({address, barrier, data});
  if (!travelling) arrive(on_their_way.count - 1);
}
static void end(bool brings) {  // one thread that has no sequence brings what is on its way
  if (!travelling) return;
  ++ended;
  while (brings && (ended < host::threads * host::in_cluster || on_their_way.count)) {
    host::yield();
    for (int i = on_their_way.count - 1; i >= 0; --i) {
      travelling = travelling * 6364136223846793005u + 1442695040888963407u;
      if (travelling >> 58 == 0) arrive(i);
    }
  }
  if (brings) ended = 0;
}
"""
LAST = "cluster_barrier();  // a block that has ended"
CASES = {
    "layer norm of r and c": ((2, 4, 3), Case(dict(directions=2), time=4, batch=6, units=37)),
    # a warp without strips
    "in_turn": ((2, 3, 5), Case(time=4, batch=4, units=50)),
    "five gates": ((4, 5, 4), Case(time=3, batch=2, units=70)),  # a block without units
    "layer_norm_lstm": ((2, 9, 3), Case(time=4, batch=5, units=37)),  # two sub-tiles
}
"""In each fewer sequences than a cluster has warps for: one thread is left that brings what was sent."""


class Planted:
    """What all kernels on the host are told before they run, and say after it."""

    def __init__(self) -> None:
        self.slow = -1, 0, 0, 0
        self.travelling = 0
        self.came: set[tuple[int, int, int]] = set()  # places of a rank's warps

    def launched(self, kernel: Kernel, *given: object) -> None:
        library = kernel._library
        if not hasattr(library, "slow_place"):
            return launch(kernel, *given)
        for name, value in zip(("place", "rank", "warp", "lane"), self.slow, strict=True):
            ctypes.c_int.in_dll(library, f"slow_{name}").value = value
        ctypes.c_uint64.in_dll(library, "travelling").value = self.travelling
        launch(kernel, *given)
        came = (ctypes.c_uint * 16 * 32).in_dll(library, "came_to")
        self.came |= {
            (place, rank, warp) for place, ranks in enumerate(came) for rank, bits in enumerate(ranks)
            for warp in range(16) if bits >> warp & 1
        }  # fmt: skip


launch = Kernel.launch
Run = Callable[[], dict[str, Tensor]]
Way = Callable[[Planted, Run, dict[str, Tensor]], Iterator[Any]]


def with_places(text: str) -> str:
    for number, place in enumerate(SLOWED):
        assert text.count(place) == 1
        text = text.replace(place, f"come_to({number});\n {place}")
    text = text.replace("send(target", "late_send(target")
    assert text.count(LAST) == 1
    return text.replace(LAST, f"end(rank == 0 && threadIdx.x == THREADS - 1);\n {LAST}")


@contextmanager
def planted(
    name: str, dtype: torch.dtype, folder: Path, patch: pytest.MonkeyPatch, fault: Sequence[str] = ()
) -> Iterator[tuple[Planted, Run]]:
    """What is told to the kernel, and what gives a case's results; its source may have a fault."""
    numbers, case = CASES[name]
    sliced(patch, *numbers)
    known = Planted()

    write = source.backward

    def written(*given: Any) -> str:
        text = write(*given)
        if fault:
            assert text.count(fault[0]) == 1
            text = text.replace(*fault)
        return with_places(text)

    patch.setattr(source, "backward", written)
    patch.setattr(emulation, "on_host", lambda text: PLANTED * ("come_to" in text) + on_host(text))
    patch.setattr(Kernel, "launch", lambda kernel, *given: known.launched(kernel, *given))
    form, call = case.build(CELLS[name])
    call = in_dtype(call, dtype)
    with emulated(folder, tf32=dtype == torch.float32):
        yield known, lambda: results(form, call, "persistent", False)


def others(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def asleep(known: Planted, run: Run, wanted: dict[str, Tensor]) -> Iterator[Any]:
    """What a sleep changes, and whose: of a whole warp, of one of its threads."""
    for number, (place, rank, warp) in enumerate(sorted(known.came)):
        for lane in (-1, number * 7 % 32):
            known.slow = place, rank, warp, lane
            yield from ((*known.slow, name) for name in others(run(), wanted))


def delayed(known: Planted, run: Run, wanted: dict[str, Tensor]) -> Iterator[Any]:
    """What is another where what is sent arrives in some other order, and threads run so."""
    for seed in range(1, 31):
        drawn = random.Random(seed)
        known.travelling = drawn.getrandbits(60)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(emulation, "ORDER", drawn.getrandbits(60) * (seed % 2))
            yield from ((seed, name) for name in others(run(), wanted))


@needs_compiler
@pytest.mark.parametrize("way", [asleep, delayed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "tf32"])
@pytest.mark.parametrize("name", CASES)
def test_nothing_changes(
    name: str, dtype: torch.dtype, way: Way, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with planted(name, dtype, folder, monkeypatch) as (known, run):
        wanted = run()
        assert {place for place, *_ in known.came} == set(range(len(SLOWED)))
        assert next(way(known, run, wanted), None) is None


WAIT = "wait(barriers + 8 * sub, (t - 1) % 2);"
FAULTS = {
    "one sequence waits for the sums of all": ("layer norm of r and c", WAIT, f"if (place == 0) {{ {WAIT} }}"),
    "sums of one block are not waited for": ("five gates", "(unsigned)(BLOCKS *", "(unsigned)((BLOCKS - 1) *"),
}


@needs_compiler
@pytest.mark.parametrize("way", [asleep, delayed])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, way: Way, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong where threads run one after the other, and what is sent is there at once."""
    name, *changed = FAULTS[fault]
    with planted(name, torch.bfloat16, folder, monkeypatch, changed) as (known, run):
        wanted = run()
        assert others(run(), wanted) == []
        with pytest.raises(AssertionError, match="wait for each other|is another"):
            raise AssertionError(f"{next(way(known, run, wanted))} is another")
