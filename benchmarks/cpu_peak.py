"""What this processor multiplies at most in float32: no program that multiplies everything passes it.

    python benchmarks/cpu_peak.py     GFLOP/s of one thread, of two, and so on to torch's number

A loop of nothing but fused multiply-adds of what lies in registers, by as many threads as a layer may have.  The other
benchmarks run it before and after what they time, and say beside a rival's time over whorl's the same over this bound.
"""

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from whorl.engines.host import load

_STEPS = 200_000


class Peak:
    """GFLOP/s of so many threads."""

    def __init__(self, threads: int) -> None:
        self._library = load("the loop of multiply-adds", Path(__file__).with_suffix(".cpp").read_text("utf-8"), "")
        self._library.peak_run.argtypes, self._library.peak_run.restype = (ctypes.c_int64,), ctypes.c_float
        self._library.peak_step.restype = ctypes.c_int64
        self._pool, self._threads = ThreadPoolExecutor(threads), threads

    def best(self, runs: int = 4) -> float:
        """The most of some runs."""
        time.sleep(0.02)  # threads that have just multiplied spin for a while, and would take its processors
        return max(sum(self._pool.map(self._rate, range(self._threads))) for _ in range(runs))

    def _rate(self, _: int) -> float:
        begin = time.perf_counter()
        self._library.peak_run(_STEPS)
        return 2e-9 * self._library.peak_step() * _STEPS / (time.perf_counter() - begin)


def gflop(gates: int, batch: int, steps: int, inputs: int, units: int, layers: int = 1) -> float:
    """Of the products of a train step whose first states are zero: they need none."""
    total = 0
    for layer in range(layers):
        total += 6 * batch * gates * units * (steps * (units if layer else inputs) + (steps - 1) * units)
    return 1e-9 * total


if __name__ == "__main__":
    for count in range(1, torch.get_num_threads() + 1):
        print(f"{count} threads: {Peak(count).best(20):.0f} GFLOP/s")
