"""How long calls take: contenders in turns, on a GPU with a full queue between two events, and by the host's clock.

GPU time is what passes on the GPU between an event before a call and one after it, while calls follow each other
without waiting: where the host is slower than the GPU it holds the gaps between launches, as it does in a training
loop; a replay of a CUDA graph is one launch, ahead of which the GPU is kept busy until it is there, and holds none.
Wall time is what passes on the host's clock from before a call until its results are there, with nothing else
under way; on a GPU, where it is mostly the host's, in a row of calls, as in a training loop: one that comes after other
work finds the host's caches and autograd's thread cold.  On the host of an H200 a train step of one product by torch
took 0.18 ms in a row and 0.68 ms after other work, whorl's LSTM 0.79 and 1.16, torch.nn's in bfloat16 2.32 and 2.42.
So a row begins with 20 ms of calls that do not count.  What changes weights and inputs between calls stands outside of
both, but not of the host's caches: in rows of 60 calls without it a forward pass of LSTM 1x32x30x128 in bfloat16
took whorl 0.09 ms and torch.nn 0.64, in these rows 0.17 and 1.21.
"""

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

_SETTLE = 2  # calls of a turn on a GPU that are not counted: the queue fills, the host's caches do
_WARMING = 0.02  # seconds of calls that are not counted before the host's clock is read, where the host launches each
_WAITED = 5  # the most calls of a turn that are timed by the host's clock, where events time the others
_MOST = 200  # calls in a turn
_CYCLES = 2e9  # of a GPU, a second: about as many as it has
_LONGEST = 5e-4  # seconds that the GPU is kept busy ahead of a call


class Runner(Protocol):
    """What is timed."""

    graphed: bool
    """Whether a call is the replay of a CUDA graph."""

    def change(self) -> None:
        """Bring other inputs, perhaps other weights: not timed."""

    def run(self) -> Sequence[torch.Tensor]:
        """One call, which is timed."""


@dataclass(frozen=True)
class Effort:
    """How much is measured: turns that every contender gets, and about how many seconds of calls in all of them."""

    turns: int = 5
    seconds: float = 0.05


@dataclass(frozen=True)
class Spread:
    """Milliseconds of a call: the median, the quartiles around it, and how many calls they are of."""

    median: float
    low: float
    high: float
    calls: int

    @staticmethod
    def of(milliseconds: Sequence[float]) -> "Spread":
        """To four significant digits.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.5, high=2.5, calls=3)
        """
        values = milliseconds if len(milliseconds) > 1 else [*milliseconds, *milliseconds]
        low, middle, high = (float(f"{value:.4g}") for value in statistics.quantiles(values, method="inclusive"))
        return Spread(middle, low, high, len(milliseconds))


@dataclass(frozen=True)
class Timing:
    """GPU time (None on a CPU) and wall time of a call."""

    gpu: Spread | None
    wall: Spread


def in_turns(runners: Mapping[str, Runner], device: torch.device, effort: Effort) -> dict[str, Timing]:
    """The timing of each runner; each comes once in every turn, in the other order every other turn."""
    calls = {name: _calls(runner, device, effort) for name, runner in runners.items()}
    gpu: dict[str, list[float]] = {name: [] for name in runners}
    wall: dict[str, list[float]] = {name: [] for name in runners}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(effort.turns):
            for name in reversed(list(runners)) if turn % 2 else runners:
                runner, count = runners[name], calls[name]
                if device.type == "cuda":
                    gpu[name] += _between_events(runner, count)
                    count = min(count, _WAITED)
                on_gpu = device.type == "cuda"
                settling = (_SETTLE, 0.0 if runner.graphed else _WARMING) if on_gpu else (0, 0.0)
                wall[name] += _by_the_clock(runner, device, count, *settling)
    finally:
        if enabled:
            gc.enable()
    return {name: Timing(Spread.of(gpu[name]) if gpu[name] else None, Spread.of(wall[name])) for name in runners}


def _calls(runner: Runner, device: torch.device, effort: Effort) -> int:
    """How many calls of a turn use up its part of the seconds."""
    once = _by_the_clock(runner, device, 1)[0] / 1e3
    return max(1, min(_MOST, math.floor(effort.seconds / effort.turns / once)))


def _between_events(runner: Runner, count: int) -> list[float]:
    pairs, host = [], 0.0
    settle = _SETTLE if count > 1 else 0
    for _ in range(settle + count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        runner.change()
        if runner.graphed:  # for twice as long as the host took last: passes of 24 us seemed to take 25 to 27 (H200)
            torch.cuda._sleep(int(2 * min(host, _LONGEST / 2) * _CYCLES))
        began = time.perf_counter()
        start.record()
        runner.run()
        end.record()
        host = time.perf_counter() - began
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs[settle:]]


def _by_the_clock(
    runner: Runner, device: torch.device, count: int, settle: int = 0, warming: float = 0.0
) -> list[float]:
    """Milliseconds of so many calls.

    Args:
        settle, warming: calls, and seconds, that pass before at least.
    """
    milliseconds: list[float] = []
    began = time.perf_counter()
    while len(milliseconds) < settle + count:
        if len(milliseconds) == settle and time.perf_counter() - began < warming:
            milliseconds.pop()
        runner.change()
        _finish(device)
        start = time.perf_counter()
        results = runner.run()
        _finish(device)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        del results
    return milliseconds[settle:]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
