"""What options cost on engine `persistent`, on one GPU; each figure after a check of the same call.

    python benchmarks/options.py costs --units 256 512 --batches 32 128 --dtypes bf16 tf32 --shard 0 4
    python benchmarks/options.py ragged
    python benchmarks/options.py resets

costs   a train step of one LSTM layer with an option, beside the plain layer
ragged  lengths uniform in 1 to 1,000, 512 units, beside torch.nn with a PackedSequence
resets  with probability 0.01 a step, beside the loop over steps of CleanRL's PPO and beside sequences that are split
        at the resets and padded

GPU time of a replayed CUDA graph, in turns, medians.  What begins with a brace is JSON, for benchmarks/results.
"""

import argparse
import datetime
import itertools
import json
import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whorl
from whorl.bench.baseline import TF32_EPS, error
from whorl.bench.machine import describe, versions

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


def problem(
    row: str, time: int, batch: int, units: int, dtype: torch.dtype
) -> tuple[nn.Module, Tensor, dict[str, Any], Tensor]:
    """The layer of a row, its input, its marks, and the gradient of its output."""
    torch.manual_seed(0)
    arguments, marks = ROWS[row]
    own = {key: value for key, value in arguments.items() if key != "cell"}
    make = getattr(whorl, arguments.get("cell", "LSTM"))
    layer = make(units, units, device="cuda", dtype=dtype, engine="persistent", **own)
    x = torch.randn(time, batch, units, device="cuda", dtype=dtype, requires_grad=True)
    options: dict[str, Any] = {}
    if "lengths" in marks:  # all are full: what is measured is not that there is less to do
        options["lengths"] = torch.full((batch,), time, device="cuda")
    if "mask" in marks:
        options["mask"] = torch.rand(time, batch, device="cuda") < 0.9
    if "reset" in marks:
        options["reset"] = torch.rand(time, batch, device="cuda") < 0.01
    if "states" in marks:
        options["return_states"] = True
    return layer, x, options, torch.randn_like(x)


def train(layer: nn.Module, x: Tensor, grad: Tensor, options: dict[str, Any] | None = None) -> Call:
    """The output and every gradient of a train step."""

    def step() -> tuple[Tensor, ...]:
        y = layer(x, **(options or {}))[0]
        return y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)

    return step


def check(row: str, batch: int, units: int, precision: str) -> float:
    """How near the kernels that are timed come to the bound of the error rule, as a part of it, on 6 steps."""
    dtype = DTYPES[precision]
    layer, x, options, grad = problem(row, 6, batch, units, dtype)
    found = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        for engine, kind in (("persistent", dtype), ("reference", dtype), ("reference", torch.float64)):
            layer.engine = engine
            torch.manual_seed(1)
            leaf = x.detach().to(kind).requires_grad_()
            found.append(train(layer.to(kind), leaf, grad.to(kind), options)())
    eps = TF32_EPS if precision == "tf32" else torch.finfo(dtype).eps
    bounds = [2 * error(plain, truth) + 4 * eps for plain, truth in zip(*found[1:], strict=True)]
    return max(error(got, truth) / bound for got, truth, bound in zip(found[0], found[2], bounds, strict=True))


def replayed(call: Call, warm: int = 2) -> Callable[[], None]:
    """A call as a CUDA graph."""
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


def costs(given: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    shard, shards = given.shard
    cases = itertools.product(given.dtypes, given.units or (256, 512), given.batches or (32, 128))
    for precision, units, batch in list(cases)[shard::shards]:
        graphs: dict[str, Callable[[], None]] = {}
        kept = []  # what the graphs read
        rows = given.rows or list(ROWS)
        for row in dict.fromkeys(["plain", *(BASES[row] for row in rows if row in BASES), *rows]):
            label = f"{precision:5}{units:5}{batch:5} {row:26}"
            try:
                near = check(row, batch, units, precision)
            except whorl.UnsupportedError as error:
                print(f"{label} {error}", flush=True)
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
            found.append(
                dict(dtype=precision, units=units, batch=batch, time=given.time, option=row,
                     microseconds=round(times[row], 1), cost=round(ratio, 3), of_bound=round(near, 3))
            )  # fmt: skip
            if row not in ("plain", *BASES.values()):
                del graphs[row], kept[-1]
    return found


def compare(label: dict[str, Any], calls: dict[str, Call], graphed: set[str], turns: int) -> list[dict[str, Any]]:
    """Rivals on one problem, whose outputs and gradients agree with those of the first."""
    results = {name: call() for name, call in calls.items()}
    first = next(iter(results))
    apart = {
        name: max(error(a, b.double()) for a, b in zip(found, results[first], strict=True) if a.shape == b.shape)
        for name, found in results.items()
    }
    assert max(apart.values()) < 0.05, apart
    del results
    made = {name: replayed(call) if name in graphed else call for name, call in calls.items()}
    rows = []
    for name, taken in in_turns(made, turns, 1).items():
        print(*label.values(), f"{name:34}{taken:12.1f} us   {apart[name]:.2g} apart", flush=True)
        rows.append(label | dict(contender=name, microseconds=round(taken, 1)))
    return rows


def ragged(given: argparse.Namespace) -> list[dict[str, Any]]:
    units, time, found = 512, 1000, []
    for batch in given.ragged:
        torch.manual_seed(0)
        theirs = nn.LSTM(units, units, device="cuda", dtype=torch.bfloat16)
        ours = whorl.LSTM(units, units, device="cuda", dtype=torch.bfloat16, engine="persistent")
        ours.load_state_dict(theirs.state_dict())
        lengths = torch.randint(1, time + 1, (batch,))
        lengths[0] = time
        x = torch.randn(time, batch, units, device="cuda", dtype=torch.bfloat16)
        x = (x * (torch.arange(time)[:, None, None] < lengths[:, None]).to(x)).requires_grad_()
        grad = torch.randn_like(x) * (x.detach() != 0)
        on_gpu, share = lengths.cuda(), float(lengths.sum()) / (time * batch)

        def packed(x: Tensor = x, lengths: Tensor = lengths, theirs: nn.Module = theirs) -> Tensor:
            y = theirs(pack_padded_sequence(x, lengths, enforce_sorted=False))[0]
            return pad_packed_sequence(y, total_length=len(x))[0]

        calls: dict[str, Callable[[], Tensor]] = {
            "whorl, lengths": lambda x=x, on_gpu=on_gpu, ours=ours: ours(x, lengths=on_gpu)[0],
            "torch, PackedSequence": packed,
        }
        for kind in ("forward", "train"):
            label = dict(suite="ragged", pass_=kind, units=units, batch=batch, time=time, share=round(share, 3))
            timed: dict[str, Call] = {}
            for name, call in calls.items():
                layer = ours if name.startswith("whorl") else theirs

                def one(call: Any = call, layer: Any = layer, x: Tensor = x, grad: Tensor = grad) -> tuple[Tensor, ...]:
                    y = call()
                    return y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)

                def ahead(call: Any = call) -> tuple[Tensor, ...]:
                    with torch.no_grad():
                        return (call(),)

                timed[name] = one if kind == "train" else ahead
            found += compare(label, timed, {"whorl, lengths"}, given.turns)
        # the kernels alone, beside a run in which every sequence is as long as the longest
        for name, marks in (("as they are", on_gpu), ("padded", torch.full_like(on_gpu, time))):
            parts = kernels(train(ours, x, grad, dict(lengths=marks)))
            own = {kernel: taken for kernel, taken in parts.items() if kernel.startswith("lstm_")}
            print(f"ragged {batch} {name}: share {share:.3f}", own)
            found.append(dict(suite="ragged", kernels=name, batch=batch, share=round(share, 3), microseconds=own))
    return found


def resets(given: argparse.Namespace) -> list[dict[str, Any]]:
    batch, time, found = 128, 128, []
    for units in given.units or (256, 512):
        torch.manual_seed(0)
        theirs = nn.LSTM(units, units, device="cuda", dtype=torch.bfloat16)
        ours = whorl.LSTM(units, units, device="cuda", dtype=torch.bfloat16, engine="persistent")
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(time, batch, units, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad, reset = torch.randn_like(x), torch.rand(time, batch, device="cuda") < 0.01
        keep = reset.logical_not().to(x.dtype)

        def loop(x: Tensor = x, keep: Tensor = keep, theirs: nn.Module = theirs) -> tuple[Tensor]:
            h = c = x.new_zeros(1, *x.shape[1:])
            outputs = []
            for step, kept in zip(x, keep, strict=True):  # as CleanRL's ppo_atari_lstm.py has it
                y, (h, c) = theirs(step.unsqueeze(0), (kept.view(1, -1, 1) * h, kept.view(1, -1, 1) * c))
                outputs.append(y)
            return (torch.cat(outputs),)

        begins = reset.clone()
        begins[0] = True
        number = begins.t().flatten().cumsum(0).view(batch, time).t() - 1  # of each step its part
        place = torch.arange(time, device="cuda")[:, None].expand_as(number)
        place = place - torch.where(begins, place, 0).cummax(0).values

        def split(
            x: Tensor = x, number: Tensor = number, place: Tensor = place, theirs: nn.Module = theirs
        ) -> tuple[Tensor]:
            parts, longest = int(number.max()) + 1, int(place.max()) + 1  # read on the host, as they decide a shape
            padded = x.new_zeros(longest, parts, x.shape[-1]).index_put((place, number), x)
            return (theirs(padded)[0][place, number],)

        calls = {
            "whorl, reset": train(ours, x, grad, dict(reset=reset)),
            "torch, a loop over steps": train_of(loop, theirs, x, grad),
            "torch, split and padded": train_of(split, theirs, x, grad),
        }
        label = dict(suite="resets", units=units, batch=batch, time=time)
        found += compare(label, calls, {"whorl, reset", "torch, a loop over steps"}, given.turns)
    return found


def train_of(call: Callable[[], tuple[Tensor]], layer: nn.Module, x: Tensor, grad: Tensor) -> Call:
    def step() -> tuple[Tensor, ...]:
        (y,) = call()
        return y, *torch.autograd.grad(y, [x, *layer.parameters()], grad)

    return step


def main() -> None:
    """Print a line for each figure, then all of them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=("costs", "ragged", "resets"))
    parser.add_argument("--units", type=int, nargs="+")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument(
        "--shard", type=int, nargs=2, default=[0, 1], metavar=("WHICH", "OF"), help="of the shapes of costs"
    )
    parser.add_argument("--ragged", type=int, nargs="+", default=[64, 512], help="batches of this suite")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--time", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--commit", help="where this is no checkout of its own")
    parser.add_argument("--kernels", action="store_true", help="what each kernel takes, too")
    given = parser.parse_args()
    commit = given.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = dict(date=datetime.date.today().isoformat(), commit=commit, **versions())
    for suite in given.suites:
        results = {"costs": costs, "ragged": ragged, "resets": resets}[suite](given)
        print(json.dumps(dict(suite=suite, machine=describe(torch.device("cuda")), facts=facts, results=results)))


if __name__ == "__main__":
    main()
