"""One step of a stream, from Python: `layer.stepper()` beside torch.nn's layer called for one step.

    python benchmarks/stream.py                 on one thread
    python benchmarks/stream.py --threads 2 --out FILE

Batch 1, one layer with as many inputs as units.  The outputs of a few steps are checked against torch.nn in float64
first; then the two are timed in turns, wall time, median and least of the turns.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whorl
from whorl import compiler

UNITS = (64, 128, 256, 512)
STEPS = 50
"""Calls in a turn."""


def check(theirs: nn.Module, stepper: Any, x: Tensor) -> float:
    """How far the outputs of a stepper are from torch.nn's in float64, as a relative 2-norm."""
    with torch.no_grad():
        wanted = theirs.double()(x.double())[0]
    theirs.to(x.dtype)
    stepper.state = None
    return float((torch.stack([stepper(step) for step in x]).double() - wanted).norm() / wanted.norm())


def calls(theirs: nn.Module, stepper: Any, x: Tensor) -> dict[str, Callable[[], Any]]:
    step = x[0].clone()
    held: list[Any] = [theirs(x[:1])[1]]

    def rival() -> None:
        held[0] = theirs(x[:1], held[0])[1]

    return {"torch": rival, "stepper": lambda: stepper(step)}


def measure(kind: str, units: int, dtype: torch.dtype, turns: int) -> dict[str, Any]:
    """Microseconds a step of both."""
    theirs = getattr(nn, kind)(units, units, dtype=dtype)
    ours = getattr(whorl, kind)(units, units, dtype=dtype, engine="cpu").eval()
    ours.load_state_dict(theirs.state_dict())
    stepper, x = ours.stepper(), torch.randn(8, 1, units, dtype=dtype)
    apart = check(theirs, stepper, x)
    assert apart < (1e-2 if dtype == torch.bfloat16 else 1e-5), f"{kind} {units} {dtype}: {apart} from float64"
    times: dict[str, list[float]] = {"torch": [], "stepper": []}
    with torch.no_grad():
        both = calls(theirs, stepper, x)
        for turn in range(turns):
            for name in sorted(both, reverse=turn % 2 == 0):
                begin = time.perf_counter()
                for _ in range(STEPS):
                    both[name]()
                times[name].append(1e6 * (time.perf_counter() - begin) / STEPS)
    row: dict[str, Any] = {"layer": kind, "units": units, "dtype": str(dtype).removeprefix("torch."), "error": apart}
    for name, found in times.items():
        row |= {f"{name}_us": round(statistics.median(found), 2), f"{name}_least_us": round(min(found), 2)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for kind in ("LSTM", "GRU", "RNN"):
        for dtype in (torch.float32, torch.bfloat16):
            for units in UNITS:
                rows.append(row := measure(kind, units, dtype, given.turns))
                print(" ".join(f"{name} {value:.3g}" if isinstance(value, float) else str(value)
                               for name, value in row.items()), flush=True)  # fmt: skip
    if given.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        facts = {
            "processor": next(
                (x.partition(": ")[2] for x in lines if x.startswith("model name")), platform.processor()
            ),
            "threads": given.threads,
            "load": os.getloadavg(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": compiler.version(compiler.found()).partition("\n")[0],
            "date": datetime.date.today().isoformat(),
            "commit": commit,
        }
        given.out.write_text(json.dumps(facts | {"results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
