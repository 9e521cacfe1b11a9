"""What options and cells cost on engine `persistent`, on one GPU; each figure after a check of the same call.

    python benchmarks/options.py costs --units 256 512 --batches 32 128 --dtypes bf16 tf32 --shard 0 4
    python benchmarks/options.py cells

costs   a train step of one LSTM layer with an option, beside the plain layer
cells   a train step of every cell of the library and of three cells of a user, beside LSTM

GPU time of a replayed CUDA graph, in turns, medians.  --out FILE keeps what was found, for benchmarks/results/options;
what has no GPU rehearses on the CPU, and says nothing about speed.
"""

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whorl
from whorl.bench.baseline import TF32_EPS, error
from whorl.bench.machine import describe, versions
from whorl.cells import library
from whorl.engines.cuda.staged import staged, steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ENGINE = "persistent" if DEVICE == "cuda" else "cpu"
Call = Callable[[], tuple[Tensor, ...]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
STEP = {"recurrent_dropout": 0.2, "recurrent_dropout_mode": "step"}
ROWS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "lengths": ({}, ("lengths",)),
    "mask": ({}, ("mask",)),
    "reset": ({}, ("reset",)),
    "zoneout": ({"zoneout": 0.1}, ()),
    "recurrent dropout, shared": ({"recurrent_dropout": 0.2, "recurrent_dropout_mode": "shared"}, ()),
    "recurrent dropout, step": (STEP, ()),
    "recurrent dropout, gate": ({"recurrent_dropout": 0.2}, ()),
    "input dropout": ({"input_dropout": 0.2}, ()),
    "return_states": ({}, ("states",)),
    "peephole": ({"peephole": True}, ()),
    "coupled": ({"coupled": True}, ()),
    "clip": ({"clip": 1.0}, ()),
    "activation softplus": ({"activation": "softplus"}, ()),
    "layer norm of r, c": ({"layer_norm": "r c"}, ()),
    "layer norm of x, r, c": ({"layer_norm": True}, ()),
    "GRU": ({"cell": "GRU"}, ()),
    "GRU, reset before": ({"cell": "GRU", "reset_after": False}, ()),
    "all at once": ({"zoneout": 0.1, "peephole": True, "clip": 1.0, **STEP}, ("lengths", "mask", "reset")),
}
"""By name: arguments of the layer, an LSTM where they name no other cell, and what its call is given."""
BASES = {"GRU, reset before": "GRU"}
"""What a row's time is compared with, where that is not the plain LSTM."""
LIBRARY = ("gru rnn_tanh rnn_relu mgu light_gru slstm dreamer_gru augmented_lstm cfc ind_rnn gru_d").split()


@whorl.cell(gates="n", states="h")
def leaky(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A user's cell of one gate."""
    return dict(h=0.9 * s.h + 0.1 * torch.nn.functional.silu(x.n + r.n))


@whorl.cell(gates="z n", states="h", vectors={"gain": 1.0, "shift": 0.0})
def normal_unit(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    """A user's cell with a mean: two stages."""
    z, n = x.z + r.z, x.n + r.n
    middle = whorl.mean([z, n])
    scale = whorl.rsqrt(whorl.mean([(z - middle) * (z - middle), (n - middle) * (n - middle)]) + 1e-5)
    z = whorl.sigmoid(v.gain * (z - middle) * scale + v.shift)
    return dict(h=z * s.h + (1 - z) * whorl.tanh((n - middle) * scale))


@whorl.cell(gates="i f g o j k l m", states="h a b c")
def four_states(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A user's cell with as many gates and states as there may be."""
    i, f, o, j, k, m = (whorl.sigmoid(getattr(x, gate) + getattr(r, gate)) for gate in "ifojkm")
    a = f * s.a + i * whorl.tanh(x.g + r.g)
    b = k * s.b + j * whorl.tanh(x.l + r.l)
    c = m * s.c + (1 - m) * whorl.tanh(a + b)
    return dict(h=o * whorl.tanh(c), a=a, b=b, c=c)


CELLS = {name: getattr(library, name) for name in LIBRARY}
CELLS |= {f"{cell.name}, of a user": cell for cell in (leaky, normal_unit, four_states)}


def stages(cell: whorl.Cell) -> int:
    """Pieces of a cell's step between which its units exchange something."""
    return steps(cell.graph).forward.stages if staged(cell.graph) else 1


def problem(
    row: str, time: int, batch: int, units: int, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, dict[str, Any], Tensor]:
    """The layer of a row, its input, its marks, and the gradient of its output."""
    torch.manual_seed(0)
    own, marks = (dict(cell=CELLS[row]), ()) if row in CELLS else ROWS[row]
    own = dict(device=DEVICE, dtype=dtype, engine=ENGINE) | own
    cell = own.pop("cell", "LSTM")
    made = (
        getattr(whorl, cell)(units, units, **own)
        if isinstance(cell, str)
        else whorl.Recurrent(cell, units, units, **own)
    )
    x = torch.randn(time, batch, units, device=DEVICE, dtype=dtype, requires_grad=True)
    options: dict[str, Any] = {}
    if "lengths" in marks:  # all are full: what is measured is not that there is less to do
        options["lengths"] = torch.full((batch,), time, device=DEVICE)
    if "mask" in marks:
        options["mask"] = torch.rand(time, batch, device=DEVICE) < 0.9
    if "reset" in marks:
        options["reset"] = torch.rand(time, batch, device=DEVICE) < 0.01
    if "states" in marks:
        options["return_states"] = True
    if not isinstance(cell, str) and cell.inputs:
        options["inputs"] = {name: torch.rand(time, batch, 1, device=DEVICE, dtype=dtype) for name in cell.inputs}
    return made, x, options, torch.randn_like(x)


def train(layer: nn.Module, x: Tensor, grad: Tensor, options: dict[str, Any] | None = None) -> Call:
    """The output and every gradient of a train step."""

    def step() -> tuple[Tensor, ...]:
        y = layer(x, **(options or {}))[0]
        return y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)

    return step


def check(layer: nn.Module, x: Tensor, options: dict[str, Any], grad: Tensor, precision: str) -> float:
    """How near a train step comes to the bound of the error rule, as a part of it; the layer is in float64 then.

    The rule's baseline rounds what enters a product: to the dtype, or to TF32.
    """
    found, own = [], layer.engine
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        for engine, kind in ((own, x.dtype), ("reference", x.dtype), ("reference", torch.float64)):
            layer.engine = engine
            torch.manual_seed(1)
            given = dict(options)
            if "inputs" in options:
                given["inputs"] = {name: extra.to(kind) for name, extra in options["inputs"].items()}
            leaf = x.detach().to(kind).requires_grad_()
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32" and layer.engine == "reference"
            found.append(train(layer.to(kind), leaf, grad.to(kind), given)())
            torch.backends.cuda.matmul.allow_tf32 = False
    return of_bound(*found, precision)


def of_bound(got: Sequence[Tensor], plain: Sequence[Tensor], truth: Sequence[Tensor], precision: str) -> float:
    """The greatest error of a sequence of tensors, as a part of what the error rule allows."""
    eps = TF32_EPS if precision == "tf32" else torch.finfo(DTYPES[precision]).eps
    return max(
        error(one, exact) / (2 * error(beside, exact) + 4 * eps)
        for one, beside, exact in zip(got, plain, truth, strict=True)
    )


def replayed(call: Call, warm: int = 2) -> Callable[[], None]:
    """A call as a CUDA graph."""
    if DEVICE == "cpu":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def in_turns(calls: dict[str, Callable[[], Any]], turns: int, count: int) -> dict[str, float]:
    """Microseconds of GPU time of each call, the median of the turns, while the queue is full."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name in reversed(list(calls)) if turn % 2 else calls:
            if DEVICE == "cpu":
                started = time.perf_counter()
                calls[name]()
                times[name] += [1e6 * (time.perf_counter() - started)] * bool(turn)
                continue
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            calls[name]()
            begin.record()
            for _ in range(count):
                calls[name]()
            end.record()
            torch.cuda.synchronize()
            times[name] += [1000 * begin.elapsed_time(end) / count] * bool(turn)
    return {name: statistics.median(found) for name, found in times.items()}


def kernels(call: Call, steps: int = 3) -> dict[str, float]:
    """Microseconds of each kernel of a call."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            call()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name] = found.get(event.name, 0.0) + event.device_time_total / steps
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def costs(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shard, shards = given.shard
    rows = given.rows or list(ROWS)
    rows = list(dict.fromkeys(["plain", *(BASES[row] for row in rows if row in BASES), *rows]))
    cases = itertools.product(given.dtypes, given.units or (256, 512), given.batches or (32, 128))
    for case in list(cases)[shard::shards]:
        yield from beside_base(given, rows, *case)


def cells(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in itertools.product(given.dtypes, given.units or (512,), given.batches or (128,)):
        for row in beside_base(given, ["plain", *CELLS], *case):
            if row["option"] in CELLS:
                cell = CELLS[row["option"]]
                row |= dict(gates=len(cell.gates), stages=stages(cell))
            yield row


def beside_base(
    given: argparse.Namespace, rows: Sequence[str], precision: str, units: int, batch: int
) -> Iterator[dict[str, Any]]:
    """What each row of one shape takes, in turns with what it is compared with."""
    graphs: dict[str, Callable[[], None]] = {}
    kept = []  # what the graphs read
    for row in rows:
        label = f"{precision:5}{units:5}{batch:5} {row:26}"
        try:
            near = check(*problem(row, 6, batch, units, DTYPES[precision]), precision)
        except whorl.UnsupportedError as refusal:
            print(f"{label} {refusal}", flush=True)
            continue
        if not near <= 1:
            print(f"{label} WRONG: {near:.3g} of what the error rule allows", flush=True)
            continue
        layer, x, options, grad = problem(row, given.time, batch, units, DTYPES[precision])
        call = train(layer, x, grad, options)
        base, graphs[row] = BASES.get(row, "plain"), replayed(call)
        kept.append((layer, x, options, grad))
        times = in_turns({name: graphs[name] for name in dict.fromkeys([base, row])}, given.turns, 4)
        ratio = times[row] / times[base]
        print(f"{label}{times[row]:9.1f} us {ratio:6.3f}", flush=True)
        if given.kernels:
            parts = kernels(call)
            line = ", ".join(f"{name[:44]} {taken:.1f}" for name, taken in parts.items() if taken >= 1.5)
            print(f"      {sum(parts.values()):.1f}: {line}", flush=True)
        yield dict(dtype=precision, units=units, batch=batch, time=given.time, option=row,
                   microseconds=round(times[row], 1), cost=round(ratio, 3), of_bound=round(near, 3))  # fmt: skip
        if row not in ("plain", *BASES.values()):
            del graphs[row], kept[-1]


def common(parser: argparse.ArgumentParser) -> None:
    """The arguments of every suite."""
    parser.add_argument("--units", type=int, nargs="+")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--commit", help="where this is no checkout of its own")
    parser.add_argument("--out", type=Path, help="a folder: a file for each suite, written as each figure comes")


def record(given: argparse.Namespace, suite: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print what a suite found, or keep it in a file, with the machine and the versions."""
    commit = given.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = dict(date=datetime.date.today().isoformat(), commit=commit, **versions())
    found = dict(suite=suite, machine=describe(torch.device(DEVICE)), facts=facts, results=(results := []))
    for row in rows:
        results.append(row)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"{suite}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if not given.out:
        print(json.dumps(found))


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=("costs", "cells"))
    common(parser)
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--shard", type=int, nargs=2, default=[0, 1], metavar=("WHICH", "OF"), help="of the shapes")
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--time", type=int, default=100)
    parser.add_argument("--kernels", action="store_true", help="what each kernel takes, too")
    given = parser.parse_args()
    for suite in given.suites:
        record(given, suite, {"costs": costs, "cells": cells}[suite](given))


if __name__ == "__main__":
    main()
