"""What each option costs on engine `persistent`: a train step of one LSTM layer beside the plain layer, on one GPU.

python benchmarks/options.py [time]

In turns, medians, a full queue; GPU time.  Each layer is checked against `reference` in the same run, at a small size.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import whorl

SHAPES = [(units, batch) for units in (256, 512) for batch in (32, 128)]
STEP = {"recurrent_dropout": 0.2, "recurrent_dropout_mode": "step"}
MARKS = ("lengths", "mask", "reset")
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "lengths, all full": ({}, ("lengths",)),
    "lengths, uniform": ({}, ("ragged",)),
    "mask": ({}, ("mask",)),
    "reset": ({}, ("reset",)),
    "zoneout": ({"zoneout": 0.1}, ()),
    "recurrent dropout, shared": ({"recurrent_dropout": 0.2, "recurrent_dropout_mode": "shared"}, ()),
    "recurrent dropout, step": (STEP, ()),
    "recurrent dropout, gate": ({"recurrent_dropout": 0.2}, ()),
    "input dropout": ({"input_dropout": 0.2}, ()),
    "states": ({}, ("states",)),
    "peephole": ({"peephole": True}, ()),
    "coupled": ({"coupled": True}, ()),
    "clip": ({"clip": 1.0}, ()),
    "relu": ({"activation": "relu"}, ()),
    "all": ({"zoneout": 0.1, "peephole": True, "clip": 1.0, **STEP}, MARKS),
}


def build(
    arguments: dict[str, Any], marks: tuple[str, ...], time: int, batch: int, units: int
) -> tuple[torch.nn.Module, Callable[[], tuple[Tensor, ...]]]:
    """A layer and its train step: the output and every gradient."""
    torch.manual_seed(0)
    layer = whorl.LSTM(units, units, device="cuda", dtype=torch.bfloat16, engine="persistent", **arguments)
    x = torch.randn(time, batch, units, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    options: dict[str, Any] = {}
    if "lengths" in marks:
        options["lengths"] = torch.full((batch,), time, device="cuda")
    if "ragged" in marks:
        options["lengths"] = torch.randint(1, time + 1, (batch,), device="cuda")
    if "mask" in marks:
        options["mask"] = torch.rand(time, batch, device="cuda") < 0.9
    if "reset" in marks:
        options["reset"] = torch.rand(time, batch, device="cuda") < 0.01
    if "states" in marks:
        options["return_states"] = True

    def step() -> tuple[Tensor, ...]:
        y = layer(x, **options)[0]
        return (y, *torch.autograd.grad(y, [x, *layer.parameters()], grad))

    return layer, step


def check(arguments: dict[str, Any], marks: tuple[str, ...]) -> float:
    """The largest relative error of an output or gradient, beside `reference` in the same dtype."""
    layer, step = build(arguments, marks, 7, 20, 64)
    found = []
    for engine in ("persistent", "reference"):
        layer.engine = engine
        torch.manual_seed(1)
        found.append(step())
    return max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(*found, strict=True))


def elapsed(step: Callable[[], object], count: int = 10) -> float:
    """Microseconds of GPU time of a step, with a full queue."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(30_000_000)
    begin.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return 1000 * begin.elapsed_time(end) / count


def main(time: int = 100, turns: int = 9) -> None:
    """Print a line for each shape and option."""
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, time {time}")
    for name, row in ROWS.items():
        error = check(*row)
        assert error < 0.05, f"{name}: {error}"
    for units, batch in SHAPES:
        steps = {name: build(*row, time, batch, units)[1] for name, row in ROWS.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(turns + 2):
            for name, step in steps.items():
                taken = elapsed(step)
                times[name] += [taken] if turn > 1 else []
        plain = statistics.median(times["plain"])
        for name, found in times.items():
            median = statistics.median(found)
            print(f"units {units}, batch {batch}, {name:26} {median:8.1f} us {median / plain:6.3f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
