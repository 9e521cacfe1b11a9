"""kernels/sliced_backward.cu and sliced_forward.cu where one warp sleeps, and where what is sent travels long.

What they exchange lies in shared memory once.  Why nothing is overwritten before it was read, and no barrier counts
bytes of another step, their first lines say.  Here each warp in turn waits at each place until the others have come as
far as they can without it, and what is sent arrives in any order, long after its sender has gone on.
"""

import ctypes
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import test_sliced
import test_sliced_forward
from emulation import Kernel, emulated, on_host
from engine_cases import Case, in_dtype, results
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

struct Message { unsigned address, barrier; uint4 data; int bytes; };
static host::List<Message> on_their_way;
static unsigned ended;
static void arrive(int which) {
  const Message made = on_their_way.items[which];
  on_their_way.items[which] = on_their_way.items[--on_their_way.count];
  memcpy(host::at(made.address), &made.data, made.bytes);
  host::Barrier& b = host::barrier_at(made.barrier);
  b.bytes -= made.bytes;
  host::settle(b);
}
static void travel(unsigned address, unsigned barrier, const void* data, int bytes) {
  Message made = {address, barrier, {}, bytes};
  memcpy(&made.data, data, bytes);
  on_their_way.add(made);
  if (!travelling) arrive(on_their_way.count - 1);
}
static void late_send(unsigned address, unsigned barrier, uint4 data) { travel(address, barrier, &data, 16); }
static void late_send_pair(unsigned address, unsigned barrier, uint2 data) { travel(address, barrier, &data, 8); }
static void late_send_word(unsigned address, unsigned barrier, unsigned data) { travel(address, barrier, &data, 4); }
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
    ("backward", "layer norm of r and c"): ((2, 4, 3), Case(dict(directions=2), time=4, batch=6, units=37)),
    # a warp without strips
    ("backward", "in_turn"): ((2, 3, 5), Case(time=4, batch=4, units=50)),
    ("backward", "five gates"): ((4, 5, 4), Case(time=3, batch=2, units=70)),  # a block without units
    ("backward", "layer_norm_lstm"): ((2, 9, 3), Case(time=4, batch=5, units=37)),  # two sub-tiles
    ("forward", "layer norm of r and c"): ((2, 4, 1, 2), Case(dict(directions=2), time=4, batch=6, units=37)),
    ("forward", "in_turn"): ((2, 3, 1, 1), Case(time=4, batch=4, units=50)),
    ("forward", "five gates"): ((4, 5, 1, 2), Case(time=3, batch=2, units=70)),
    ("forward", "layer_norm_lstm"): ((2, 9, 2, 1), Case(time=4, batch=5, units=37)),
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
Name = tuple[str, str]
Way = Callable[[Planted, Run, dict[str, Tensor]], Iterator[Any]]


PLACES = {"backward": test_sliced.SLOWED, "forward": test_sliced_forward.SLOWED}


def with_places(text: str, places: Sequence[str]) -> str:
    for number, place in enumerate(places):
        assert text.count(place) == 1
        text = text.replace(place, f"come_to({number});\n {place}")
    text = re.sub(r"\bsend(_pair|_word)?\((?=target|to_slot|peer)", r"late_send\1(", text)
    assert text.count(LAST) == 1
    return text.replace(LAST, f"end(rank == 0 && threadIdx.x == THREADS - 1);\n {LAST}")


@contextmanager
def planted(
    name: Name, dtype: torch.dtype, folder: Path, patch: pytest.MonkeyPatch, fault: Sequence[str] = ()
) -> Iterator[tuple[Planted, Run]]:
    """What is told to the kernel, and what gives a case's results; its source may have a fault."""
    (kind, cell), (numbers, case) = name, CASES[name]
    (test_sliced if kind == "backward" else test_sliced_forward).sliced(patch, *numbers)
    known = Planted()

    write = getattr(source, kind)

    def written(*given: Any) -> str:
        text = write(*given)
        if fault:
            assert text.count(fault[0]) == 1
            text = text.replace(*fault)
        return with_places(text, PLACES[kind])

    patch.setattr(source, kind, written)
    patch.setattr(emulation, "on_host", lambda text: PLANTED * ("come_to" in text) + on_host(text))
    patch.setattr(Kernel, "launch", lambda kernel, *given: known.launched(kernel, *given))
    form, call = case.build(CELLS[cell])
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
@pytest.mark.parametrize("name", CASES, ids="-".join)
def test_nothing_changes(
    name: Name, dtype: torch.dtype, way: Way, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with planted(name, dtype, folder, monkeypatch) as (known, run):
        wanted = run()
        assert {place for place, *_ in known.came} == set(range(len(PLACES[name[0]])))
        assert next(way(known, run, wanted), None) is None


WAIT = "wait(barriers + 8 * sub, (t - 1) % 2);"
FAULTS = {
    "one sequence waits for the sums of all": (
        ("backward", "layer norm of r and c"), WAIT, f"if (place == 0) {{ {WAIT} }}",
    ),
    "sums of one block are not waited for": (
        ("backward", "five gates"), "(unsigned)(BLOCKS *", "(unsigned)((BLOCKS - 1) *",
    ),
    "results of one warp are not waited for": (
        ("forward", "layer norm of r and c"), "32 * (MULTIPLYING + lines_of(sub))",
        "32 * (MULTIPLYING - 1 + lines_of(sub))",
    ),
}  # fmt: skip


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
