"""whorl beside torch.nn on this processor: in turns, after a check of the numbers, as ratios.

    python benchmarks/cpu.py                 every case, with torch's number of threads
    python benchmarks/cpu.py --out FILE      and the results as JSON, beside those of the same commit that are there
    python benchmarks/cpu.py grid            one group of cases: grid, null, ragged, resets, options, cells, norm
    python benchmarks/cpu.py --only LSTM     the cases with this in their name

Both run in turns, each first in every other turn, and in a turn in a row of calls as in a training loop, of which the
first do not count.  A ratio is the median over the turns of the median of torch's row over that of whorl's, so that
what the machine does for a while meets both; above 1 whorl is faster.  A time is the least of all: wall time, and the
processor's time of this thread where one thread runs (what others do on the machine then matters less).  The
grid runs the engine that whorl chooses: `cpu`, or for inference of most LSTMs torch's own kernel.  All else runs `cpu`,
but `null`, which has torch's LSTM on both sides: what its ratios are from 1 is what the measuring itself is worth.

Where a case says how much it multiplies, `most` is torch's time over that of nothing but these products at the peak of
the processor, measured before and after (cpu_peak.py): no program that multiplies all of it in float32 has more.
"""

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cpu_peak import Peak, gflop
from torch import Tensor, nn

import whorl
from whorl import compiler, sigmoid, softplus, tanh
from whorl.engines import taped

GRID = [
    (1, 1, 30, 128), (1, 32, 30, 128), (1, 32, 30, 512), (1, 128, 30, 128), (1, 128, 30, 512), (1, 32, 30, 1024),
    (2, 20, 35, 650), (1, 1, 100, 512),
]  # fmt: skip
"""Layers, batch, time, units."""


ROW, SETTLING = 5, 2
"""Calls of a turn, and those before them that do not count: they find the other's numbers in the caches."""


class Case(NamedTuple):
    """The rival's call and ours, which give tensors that must agree."""

    name: str
    theirs: Callable[[], Any]
    ours: Callable[[], Any]
    gflop: float = 0.0
    """Of its products, in float32; 0: not told."""


def train(run: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor, layer: nn.Module) -> Callable[[], list[Tensor]]:
    """A forward and a backward of new x; gives the output and dx."""

    def step() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        for weight in layer.parameters():
            weight.grad = None
        y = run(leaf)
        y.backward(grad)
        assert leaf.grad is not None
        return [y.detach(), leaf.grad]

    return step


def forward(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], list[Tensor]]:
    def call() -> list[Tensor]:
        with torch.no_grad():
            return [run(x)]

    return call


def pair(
    kind: str, inputs: int, units: int, layers: int = 1, dtype: torch.dtype = torch.float32, engine: str = "cpu"
) -> Any:
    theirs = getattr(nn, kind)(inputs, units, layers, dtype=dtype)
    ours = getattr(whorl, kind)(inputs, units, layers, dtype=dtype, engine=engine)
    ours.load_state_dict(theirs.state_dict(), strict=False)
    return theirs, ours


def grid() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("LSTM", "GRU", "RNN"):
            for layers, batch, steps, units in GRID:
                theirs, ours = pair(kind, units, units, layers, dtype, engine="auto")
                x, grad = (torch.randn(steps, batch, units, dtype=dtype) for _ in range(2))
                calls = [lambda x, layer=layer: layer(x)[0] for layer in (theirs, ours)]
                name = f"{kind} {str(dtype)[6:]} {(layers, batch, steps, units)}"
                yield Case(f"{name} forward", *(forward(call, x) for call in calls))
                both = [train(call, x, grad, layer) for call, layer in zip(calls, (theirs, ours), strict=True)]
                work = gflop({"LSTM": 4, "GRU": 3, "RNN": 1}[kind], batch, steps, units, units, layers)
                yield Case(f"{name} train", *both, work * (dtype == torch.float32))


def null() -> Iterator[Case]:
    """The inference of two of torch's LSTMs of the same weights."""
    for dtype in (torch.float32, torch.bfloat16):
        for layers, batch, steps, units in GRID:
            pair = [nn.LSTM(units, units, layers, dtype=dtype) for _ in range(2)]
            pair[1].load_state_dict(pair[0].state_dict())
            x = torch.randn(steps, batch, units, dtype=dtype)
            one, other = (forward(lambda x, layer=layer: layer(x)[0], x) for layer in pair)
            yield Case(
                f"null: torch beside torch, LSTM {str(dtype)[6:]} {(layers, batch, steps, units)} forward", one, other
            )


def ragged() -> Iterator[Case]:
    lengths = torch.linspace(512, 64, 16).long()
    for kind in ("LSTM", "GRU"):
        theirs, ours = pair(kind, 64, 64)
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(512, 16, 64), lengths)
        grad = torch.randn_like(packed.data)

        def run(data: Tensor, layer: nn.Module, packed: Any = packed) -> Tensor:
            return layer(nn.utils.rnn.PackedSequence(data, *packed[1:]))[0].data

        both = [lambda x, layer=layer, run=run: run(x, layer) for layer in (theirs, ours)]
        steps = [train(call, packed.data, grad, layer) for call, layer in zip(both, (theirs, ours), strict=True)]
        yield Case(f"{kind} packed, 16 sequences of 64 to 512 steps, 64 units, train", *steps)


def resets() -> Iterator[Case]:
    theirs, ours = pair("LSTM", 512, 128)
    x, grad = torch.randn(128, 8, 512), torch.randn(128, 8, 128)
    reset = torch.rand(128, 8) < 0.05
    keep = (~reset).float()[..., None]

    def loop(x: Tensor) -> Tensor:
        h = c = x.new_zeros(1, x.shape[1], 128)
        outs = []
        for t in range(x.shape[0]):
            out, (h, c) = theirs(x[t : t + 1], (h * keep[t], c * keep[t]))
            outs.append(out)
        return torch.cat(outs)

    ours_with = train(lambda x: ours(x, reset=reset)[0], x, grad, ours)
    yield Case("LSTM resets, 8 x 128 steps, 512 to 128 units, train", train(loop, x, grad, theirs), ours_with)


def options() -> Iterator[Case]:
    """Beside the plain cell on the same engine: no check, as the numbers differ; the ratio is plain over option."""
    x, grad = torch.randn(30, 32, 128), torch.randn(30, 32, 128)
    lengths, mask, reset = torch.full((32,), 30), torch.ones(30, 32).bool(), torch.zeros(30, 32).bool()
    made: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "lengths": ({}, {"lengths": lengths}),
        "mask": ({}, {"mask": mask}),
        "reset": ({}, {"reset": reset}),
        "recurrent dropout by gate": ({"recurrent_dropout": 0.2}, {}),
        "recurrent dropout, shared": ({"recurrent_dropout": 0.2, "recurrent_dropout_mode": "shared"}, {}),
        "recurrent dropout by step": ({"recurrent_dropout": 0.2, "recurrent_dropout_mode": "step"}, {}),
        "zoneout": ({"zoneout": 0.1}, {}),
        "peephole": ({"peephole": True}, {}),
        "clip": ({"clip": 3.0}, {}),
        "layer norm": ({"layer_norm": True}, {}),
    }
    plain = whorl.LSTM(128, 128, engine="cpu")
    for name, (built, called) in made.items():
        layer = whorl.LSTM(128, 128, engine="cpu", **built)
        with_option = train(lambda x, layer=layer, called=called: layer(x, **called)[0], x, grad, layer)
        without = train(lambda x: plain(x)[0], x, grad, plain)
        yield Case(f"option {name}, LSTM (1, 32, 30, 128), train", without, with_option)


def leaky(out: Callable[[Any], Any]) -> whorl.Cell:
    """A user's cell, with as many gates as the LSTM."""

    @whorl.cell(gates="i f g o", states="h c")
    def step(x: Any, r: Any, s: Any) -> dict[str, Any]:
        kept = sigmoid(x.f + r.f)
        c = kept * s.c + (1 - kept) * sigmoid(x.i + r.i) * tanh(x.g + r.g)
        return dict(h=sigmoid(x.o + r.o) * out(c), c=c)

    return step


def norm() -> Iterator[Case]:
    """Layer norm beside a loop in plain torch."""
    for batch, units in ((1, 64), (1, 128), (8, 32), (8, 64), (8, 128), (32, 32), (32, 64), (32, 128)):
        x, grad = torch.randn(30, batch, units), torch.randn(30, batch, units)
        normed = whorl.LSTM(units, units, layer_norm=True, engine="cpu")
        for name, weight in normed.named_parameters():
            if "vector" in name:
                nn.init.uniform_(weight, 0.5, 1.5)
        ours = train(lambda x, normed=normed: normed(x)[0], x, grad, normed)
        name = f"LSTM with layer norm, (1, {batch}, 30, {units}), beside a loop in torch, train"
        yield Case(name, train(normed_loop(normed), x, grad, normed), ours, gflop(4, batch, 30, units, units))


def normed_loop(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """The same LSTM with layer norm in torch's own operations, one step after the other."""

    def loop(x: Tensor) -> Tensor:
        held = dict(layer.named_parameters())
        vectors = {name[7:-3]: weight for name, weight in held.items() if name.startswith("vector")}
        gain_x, shift_x, gain_r, shift_r = (
            torch.cat([vectors[f"{kind}_{gate}"] for gate in "ifgo"])
            for kind in ("x_gain", "x_shift", "r_gain", "r_shift")
        )
        shape, units = gain_x.shape, x.shape[2]
        projected = nn.functional.linear(x, held["weight_ih_l0"], held["bias_ih_l0"])
        projected = nn.functional.layer_norm(projected, shape, gain_x, shift_x)
        h = c = x.new_zeros(x.shape[1], units)
        outs = []
        for now in projected.unbind(0):
            part = nn.functional.linear(h, held["weight_hh_l0"], held["bias_hh_l0"])
            i, f, g, o = (now + nn.functional.layer_norm(part, shape, gain_r, shift_r)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * nn.functional.layer_norm(c, (units,), vectors["c_gain"], vectors["c_shift"]).tanh()
            outs.append(h)
        return torch.stack(outs)

    return loop


def cells() -> Iterator[Case]:
    """A user's cell beside the LSTM, with no check, as `options`."""
    x, grad = torch.randn(30, 32, 128), torch.randn(30, 32, 128)
    plain = whorl.LSTM(128, 128, engine="cpu")
    for name, out in (("tanh", tanh), ("softplus", softplus)):
        user = whorl.Recurrent(leaky(out), 128, 128, engine="cpu")
        both = train(lambda x: plain(x)[0], x, grad, plain), train(lambda x, user=user: user(x)[0], x, grad, user)
        yield Case(f"option: a user's cell of four gates with {name}, LSTM (1, 32, 30, 128), train", *both)


GROUPS = {
    "grid": grid,
    "null": null,
    "ragged": ragged,
    "resets": resets,
    "options": options,
    "cells": cells,
    "norm": norm,
}


def measure(case: Case, clock: Callable[[], float], seconds: float, peak: Peak) -> dict[str, Any] | None:
    """Microseconds of both, in turns, after a check; None where the results differ, which is said."""
    name, theirs, ours, work = case
    bound = 2e-2 if "bfloat16" in name else 1e-4
    for one, other in zip(theirs(), ours(), strict=True):
        apart = ((one - other).norm() / one.norm()).item()
        if not (apart < bound or name.startswith("option")):
            print(f"{name}: not timed, the results are {apart:.2g} apart", flush=True)
            return None
    rate = peak.best() if work else 0.0
    begin = clock()
    theirs()
    turns = max(6, min(1000, int(seconds / max(1e-6, clock() - begin))))
    times: tuple[list[float], list[float]] = ([], [])
    least = [math.inf, math.inf]
    for turn in range(max(4, -(-turns // ROW))):
        for which, call in (((0, theirs), (1, ours)), ((1, ours), (0, theirs)))[turn % 2]:
            taken = []
            for _ in range(SETTLING + ROW):
                begin = clock()
                call()
                taken.append(1e6 * (clock() - begin))
            times[which].append(statistics.median(taken[SETTLING:]))
            least[which] = min(least[which], *taken)
    rival, own = least
    ratio = statistics.median([one / other for one, other in zip(*times, strict=True)])
    row = {"case": name, "rival_us": round(rival, 1), "whorl_us": round(own, 1), "ratio": round(ratio, 3)}
    if work:
        rate = max(rate, peak.best())
        bound = 1e6 * work / rate
        row |= {"gflop": round(work, 3), "peak_gflops": round(rate, 1), "peak_us": round(bound, 1)}
        row["most"] = round(statistics.median(times[0]) / bound, 2)
    return row


def main() -> None:
    """Print one line for each case, and geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", default=[*GROUPS])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case and side")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    taped.finish()  # until it is there calls go through Python
    clock = time.thread_time if given.threads == 1 else time.perf_counter
    peak, rows = Peak(given.threads), []
    with whorl.settings(slow="allow"):
        for group in given.groups:
            for case in GROUPS[group]():
                if given.only not in case[0]:
                    continue
                row = measure(case, clock, given.seconds, peak)
                if row is None:
                    continue
                rows.append(row)
                most = f", at most {row['most']}" if "most" in row else ""
                print(
                    f"{row['case']}: {row['rival_us']} us, whorl {row['whorl_us']} us, {row['ratio']}{most}", flush=True
                )
    nulls = [row["ratio"] for row in rows if row["case"].startswith("null")]
    if nulls:
        print(f"torch beside torch: from {min(nulls):.2f} to {max(nulls):.2f}")
    for kind in ("LSTM", "GRU", "RNN"):
        for dtype in ("float32", "bfloat16"):
            for what in ("forward", "train"):
                chosen = [r for r in rows if r["case"].startswith(f"{kind} {dtype}") and r["case"].endswith(what)]
                found = [row["ratio"] for row in chosen]
                if found:
                    mean = math.exp(sum(map(math.log, found)) / len(found))
                    print(f"{kind} {dtype} {what}: geometric mean {mean:.2f}, least {min(found):.2f}")
    if given.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        facts = {
            "processor": _processor(),
            "threads": given.threads,
            "clock": clock.__name__,
            "load": os.getloadavg(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": compiler.version(compiler.found()).partition("\n")[0],
            "date": datetime.date.today().isoformat(),
            "commit": commit,
        }
        given.out.write_text(
            json.dumps(facts | {"results": _beside(given.out, commit, rows)}, indent=1) + "\n", "utf-8"
        )


def _beside(path: Path, commit: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and before them the others that were measured on the same commit."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {"commit": "", "results": []}
    names = {row["case"] for row in rows}
    return [row for row in kept["results"] if row["case"] not in names] * (kept["commit"] == commit) + rows


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
