"""The least time of a train step on this processor, and so the most that any layer on torch can be ahead of a rival.

    python benchmarks/cpu_least.py norm                          an LSTM with layer norm, beside a loop of torch
    python benchmarks/cpu_least.py keras --tensorflow PYTHON     LSTM and GRU, beside Keras on TensorFlow
    python benchmarks/cpu_least.py fit --torch PYTHON            fit and evaluate of Keras, beside Keras on torch
    python benchmarks/cpu_least.py norm --out FILE               and the results as JSON

The least time is that of the products of the step, of the sigmoids and tanhs of its gates and states, and of a layer
that computes nothing: an operation of autograd with the same parameters, whose gradients are memory that nobody wrote;
of `fit` and `evaluate` an epoch of the model without its recurrent layer (keras_fit.py).  Each product is timed in the
shape in which it can be made, those of the steps one after the other, by each of several ways: torch.mm, MKL and oneDNN
with weights that they have packed before, and whorl's own loops.  All products together are also timed as whorl makes
them, in a layer whose cell does nothing but add its gates.  The functions are those of a loop with nothing else, right
to two units in the last place, whose numbers come from the first cache and go there; each thread has its share of them.
Of each the least of some counts, of all ways the fastest, and of the layer that computes nothing the least too: so the
least time is one that no step here takes.  The rival's and whorl's are medians of some, after a check of the numbers.
`at most` is the rival's time over the least of the same turn, and as the other ratios the median of all turns: what the
machine does for a while meets all.
"""

import argparse
import ctypes
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import cpu
import cpu_keras
import keras_fit
import torch
from cpu_peak import Peak, gflop
from torch import Tensor, nn

import whorl
from whorl import compiler
from whorl.engines import host, taped
from whorl.engines.cpu import generate, plain
from whorl.engines.cpu.masks import NONE
from whorl.engines.cpu.sweep import Products
from whorl.problem import Call

NORM = [(1, 64), (1, 128), (8, 32), (8, 64), (8, 128), (32, 32), (32, 64), (32, 128), (32, 512), (128, 128)]
"""Batch and units."""
STEPS = 30
SOME, SETTLING = 10, 3
"""Steps of each in a turn, of which the first do not count: they find threads asleep and the others' caches."""
FIT = [
    ("plain", 64, "evaluate", 3.0), ("plain", 128, "evaluate", 3.0), ("masked", 128, "fit", 10.0),
    ("recurrent_dropout", 128, "fit", 10.0), ("Bidirectional, masked", 128, "fit", 10.0),
    ("relu", 128, "evaluate", 3.0), ("relu", 128, "predict", 3.0),
]  # fmt: skip
"""Case of keras_fit.py, units, what is timed, and how many times as fast it is asked to be."""
INFERENCE = "evaluate", "predict"
GATES = {"LSTM": 4, "GRU": 3}
FUNCTIONS = {4: ("sigmoid",) * 3 + ("std::tanh",) * 2, 3: ("sigmoid",) * 2 + ("std::tanh",)}
"""Of a unit at a step, by the gates of LSTM and GRU."""


class Sizes(NamedTuple):
    """Of the products."""

    gates: int
    batch: int
    units: int
    inputs: int
    steps: int = STEPS
    wanted: str = "train"
    """ "train": a step with the gradient of x, "fit": without, "evaluate" and "predict": forward alone."""
    directions: int = 1
    tanh: bool = True
    """False where the cell has another function in its place, which takes next to nothing."""

    @property
    def columns(self) -> int:
        """Of one direction."""
        return self.gates * self.units


# --- the products -----------------------------------------------------------------------------------------------------

Ways = dict[str, dict[str, Callable[[], object]]]
"""Of each product the ways to make it."""


def ways(sizes: Sizes, threads: int) -> Ways:
    """Every product of a train step; those of the steps, of which the first has none, as often as they are made."""
    rows, columns, both = sizes.steps * sizes.batch, sizes.columns, sizes.directions
    times = both * (sizes.steps - 1)
    weight_ih, weight_hh = torch.randn(both * columns, sizes.inputs), torch.randn(columns, sizes.units)
    x, h, dx = torch.randn(rows, sizes.inputs), torch.randn(rows, sizes.units), torch.randn(rows, both * columns)
    own = Products(own_layer(sizes, threads)[0].kernel, torch.float32, threads, sizes.batch)
    back_ih, back_hh = weight_ih.t().contiguous(), weight_hh.t().contiguous()
    made = {
        "input": {"whorl": lambda: own.rows(x, weight_ih), **multiplied(x, weight_ih, 1)},
        "forward": multiplied(h[: sizes.batch], weight_hh, times),
    }
    if sizes.wanted not in INFERENCE:
        dr = dx[:, :columns].contiguous()
        made["backward"] = multiplied(dr[: sizes.batch], back_hh, times)
        for name, a, b, count in (("weight_ih", dx, x, 1), ("weight_hh", dr[sizes.batch :], h[sizes.batch :], both)):
            out = torch.empty(a.shape[1], b.shape[1])
            made[f"gradient of {name}"] = {
                "whorl": repeated(lambda a=a, b=b, out=out: own.outer(a, b, out, add=False), count),
                "mm": repeated(lambda a=a, b=b, out=out: torch.mm(a.t(), b, out=out), count),
            }
    if sizes.wanted == "train":
        made["gradient of x"] = {"whorl": lambda: own.rows(dx, back_ih), **multiplied(dx, back_ih, 1)}
    return made


def multiplied(x: Tensor, weight: Tensor, times: int) -> dict[str, Callable[[], object]]:
    """x weight' so many times, by each library that there is; what it packs is packed before."""
    out, count = torch.empty(x.shape[0], weight.shape[0]), x.shape[0]
    turned = weight.t()
    found: dict[str, Callable[[], object]] = {"mm": lambda: torch.mm(x, turned, out=out)}
    if torch.backends.mkl.is_available():
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, count)
        found["MKL, packed"] = lambda: torch.ops.mkl._mkl_linear(x, packed, weight, None, count)
    if torch.backends.mkldnn.is_available():
        laid = torch.ops.mkldnn._reorder_linear_weight(weight, count)
        found["oneDNN, packed"] = lambda: torch.ops.mkldnn._linear_pointwise(x, laid, None, "none", [], "")
    for name, call in found.items():
        made = call()
        assert torch.allclose(out if name == "mm" else made, x @ turned, atol=1e-3), f"{name} multiplies something else"  # type: ignore[arg-type]
    return {name: repeated(call, times) for name, call in found.items()}


def repeated(call: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [call() for _ in range(times)]


def own_layer(sizes: Sizes, threads: int) -> tuple[plain.Sizes, Call]:
    """A layer of whorl that adds its gates, as engine `cpu` runs it."""

    def step(x: Any, r: Any, s: Any) -> dict[str, Any]:
        return dict(h=0.1 * sum(getattr(x, gate) + getattr(r, gate) for gate in "ifgo"[: sizes.gates]))

    cell = whorl.cell(gates=" ".join("ifgo"[: sizes.gates]), states="h")(step)
    layer = whorl.Recurrent(cell, sizes.inputs, sizes.units, engine="cpu")
    x = torch.randn(sizes.steps, sizes.batch, sizes.inputs, requires_grad=sizes.wanted == "train")
    with torch.set_grad_enabled(sizes.wanted not in INFERENCE):
        made = plain.sizes(layer.plan(x).problem, threads, NONE)
    assert made is not None
    return made, Call(x.detach(), (), tuple(weight.detach() for weight in layer.parameters()))


def own_products(sizes: Sizes, threads: int) -> Callable[[], float]:
    """Seconds of all products in whorl's kernels, forward and backward, without Python; of each direction by itself."""
    made, call = own_layer(sizes, threads)
    taken = [0.0]

    def timed(function: Callable[..., int]) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            begin = time.perf_counter()
            missing = function(*arguments)
            taken[0] += time.perf_counter() - begin
            return missing

        return run

    kernel = made.kernel
    kernel = kernel._replace(plain_forward=timed(kernel.plain_forward), plain_backward=timed(kernel.plain_backward))
    made, grad = made._replace(kernel=kernel), torch.randn(sizes.steps, sizes.batch, sizes.units)

    def run() -> float:
        taken[0] = 0.0
        outcome = plain.forward(made, call)
        if sizes.wanted not in INFERENCE:
            plain.backward(made, call, outcome.y, outcome.saved, [grad, *[None] * len(outcome.finals)])
        return sizes.directions * taken[0]

    return run


def share_of_functions(sizes: Sizes, threads: int) -> Callable[[], float]:
    """Seconds of a thread's share of the sigmoids and tanhs: from two lengths, as a call and its loop begin too."""
    names = [name for name in FUNCTIONS[sizes.gates] if sizes.tanh or name != "std::tanh"]
    of_unit = " + ".join(f"kernel::{name}(x[{place} * n + u])" for place, name in enumerate(names))
    loop = f"EACH_ALONE\n  for (int64_t u = 0; u < n; ++u) y[u] = {of_unit};"
    loop = f'extern "C" void functions(int64_t n, const float* x, float* y) {{\n  {loop}\n}}\n'
    cell = whorl.LSTM(1, 1).plan(torch.zeros(1, 1, 1)).problem.form.cell
    made = host.load("a loop of functions", f"{generate.source(cell).text}\n{loop}", "-DWHORL_DTYPE=32")
    short, long = 256, 768
    x, y = torch.randn(len(names), long), torch.empty(long)

    def least(count: int) -> float:
        given = ctypes.c_int64(count), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
        return min(seconds(lambda: made.functions(*given)) for _ in range(200))

    made.functions(ctypes.c_int64(long), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()))
    wanted = sum(getattr(row, name.removeprefix("std::"))() for name, row in zip(names, x, strict=True))
    assert torch.allclose(y, wanted, atol=1e-5), "the loop computes something else"
    units = sizes.steps * sizes.batch * sizes.units * sizes.directions
    return lambda: (least(long) - least(short)) / (long - short) * units / threads


# --- a layer that computes nothing ------------------------------------------------------------------------------------


class Nothing(torch.autograd.Function):
    """Of the output and every gradient it has the memory, and nothing in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.shapes = x.shape, [weight.shape for weight in weights]
        return torch.empty(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weights = ctx.shapes
        vectors = [shape for shape in weights[4:] if len(shape) == 1]
        apart = [torch.empty(shape) for shape in weights[: len(weights) - len(vectors)]]
        together = torch.empty(len(vectors), *vectors[0]).unbind() if vectors else ()
        return torch.empty(x), *apart, *together


def nothing(layer: nn.Module) -> Callable[[Tensor], tuple[Tensor]]:
    weights = [*layer.parameters()]
    return lambda x: (Nothing.apply(x, *weights),)


# --- cases ------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Seconds of some steps of each."""

    name: str
    sizes: Sizes
    asked: float
    whorl: Callable[[], list[float]]
    nothing: Callable[[], list[float]]
    rivals: dict[str, Callable[[], list[float]]]
    """Of each way of a rival."""


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def some(call: Callable[[], Any]) -> Callable[[], list[float]]:
    return lambda: [seconds(call) for _ in range(SOME)][SETTLING:]


def norm() -> Iterator[Case]:
    for batch, units in NORM:
        x, grad = torch.randn(STEPS, batch, units), torch.randn(STEPS, batch, units)
        layer = whorl.LSTM(units, units, layer_norm=True, engine="cpu")
        empty = nothing(layer)
        steps = [
            cpu.train(call, x, grad, layer)
            for call in (lambda x, layer=layer: layer(x)[0], lambda x, empty=empty: empty(x)[0], cpu.normed_loop(layer))
        ]
        for one, other in zip(steps[0](), steps[2](), strict=True):
            assert (one - other).norm() < 1e-4 * other.norm(), "whorl and the loop differ"
        name, sizes = f"LSTM with layer norm, {(batch, STEPS, units)}", Sizes(4, batch, units, units)
        yield Case(name, sizes, 5.0, some(steps[0]), some(steps[1]), {"torch": some(steps[2])})


def keras(python: str, threads: int, folder: Path) -> Iterator[Case]:
    rival = cpu_keras.Rival(python, "tensorflow", threads)
    for kind in GATES:
        for sizes in cpu_keras.CASES:
            batch, steps, units = sizes
            assert steps == STEPS
            layer, inputs, dy, told, _ = cpu_keras.prepared(kind, sizes, [rival], folder)
            weights, empty = list(layer.parameters()), nothing(layer)
            ours, least = (
                lambda call=call: cpu_keras.step(call, weights, inputs[0], dy)  # noqa: B023
                for call in (layer, empty)
            )
            rivals = {
                way: lambda way=way: [1e-6 * one for one in rival.ask(do="time", way=way, steps=SOME)][SETTLING:]
                for way in told["tensorflow"]["ways"]
            }
            yield Case(f"{kind} {sizes}", Sizes(GATES[kind], batch, units, units), 2.3, some(ours), some(least), rivals)
    rival.close()


def fit(python: str) -> Iterator[Case]:
    """Epochs of which each batch counts; with masks whorl computes no more than the steps that they leave."""
    shape = keras_fit.Shape()
    with keras_fit.started({"torch": python}, shape) as contenders:
        for case, units, do, asked in FIT:
            key = keras_fit.Key(case, units)
            keras_fit.check(contenders, key)
            which = key._asdict()
            asking = {
                one.side: lambda one=one, do=do, which=which: [one.ask(do, **which) / shape.batches for _ in range(2)]
                for one in contenders
            }
            for epochs in asking.values():
                epochs()  # compiles what it compiles
            steps = 3 * shape.steps // 4 if "masked" in case else shape.steps
            directions = 2 if case.startswith("Bidirectional") else 1
            sizes = Sizes(4, shape.batch, units, shape.features, steps, do, directions, case != "relu")
            rivals = {"torch": asking["keras"]}
            yield Case(f"{do} {case}, {units} units", sizes, asked, asking["whorl"], asking["nothing"], rivals)


def measure(case: Case, turns: int, threads: int, peak: Peak) -> dict[str, Any]:
    """Microseconds of each."""
    sizes, tried, own = case.sizes, ways(case.sizes, threads), own_products(case.sizes, threads)
    functions = share_of_functions(case.sizes, threads)
    for call in (case.whorl, case.nothing, *case.rivals.values(), own):
        call()
    rows, fastest, rate = [], [], 0.0
    for turn in range(turns):
        rate = max(rate, peak.best(1))
        taken = {
            name: {way: min(seconds(call) for _ in range(3)) for way, call in some.items()}
            for name, some in tried.items()
        }
        fastest.append({name: min(some, key=some.__getitem__) for name, some in taken.items()})
        apart = sum(taken[name][way] for name, way in fastest[-1].items())
        times: dict[str, list[float]] = {}
        order = [*case.rivals, "whorl", "nothing"]
        for name in order if turn % 2 else reversed(order):
            time.sleep(0.02)  # the threads of the one before spin for a while, and would take its processors
            times[name] = (case.rivals[name] if name in case.rivals else getattr(case, name))()
        rival = min(statistics.median(times[name]) for name in case.rivals)
        products = min(apart, *(own() for _ in range(3)))
        rows.append((rival, statistics.median(times["whorl"]), products, functions(), min(times["nothing"])))
    work = sizes.directions * gflop(sizes.gates, sizes.batch, sizes.steps, sizes.inputs, sizes.units)
    work *= {"train": 1, "fit": (work - of_x(sizes)) / work}.get(sizes.wanted, 1 / 3)
    names = "rival", "whorl", "products", "functions", "nothing"
    us = dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))
    return {
        "case": case.name,
        "us": {name: round(1e6 * taken, 1) for name, taken in us.items()},
        "gflop": round(work, 3),
        "gflops": {"products": round(work / us["products"], 1), "peak": round(rate, 1)},
        "ways": {name: statistics.mode(one[name] for one in fastest) for name in tried},
        "rival / whorl": round(statistics.median(rival / ours for rival, ours, *_ in rows), 2),
        "at most": round(statistics.median(rival / sum(least) for rival, _, *least in rows), 2),
        "asked": case.asked,
    }


def of_x(sizes: Sizes) -> float:
    """GFLOP of the gradient of x."""
    return 2e-9 * sizes.batch * sizes.steps * sizes.inputs * sizes.columns * sizes.directions


@contextmanager
def cases(given: argparse.Namespace) -> Iterator[Iterator[Case]]:
    if given.group == "norm":
        yield norm()
        return
    if given.group == "fit":
        yield fit(given.torch)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield keras(given.tensorflow, given.threads, Path(folder))


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=("norm", "keras", "fit"))
    parser.add_argument("--tensorflow", metavar="PYTHON", help="of an environment with keras and tensorflow")
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="of one with keras, torch and whorl")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", default="", metavar="TEXT", help="the cases with this in their name")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.group == "keras" and not given.tensorflow:
        parser.error("keras needs --tensorflow PYTHON, of an environment with keras and tensorflow")
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    taped.finish()  # until it is there calls go through Python
    peak, rows = Peak(given.threads), []
    with cases(given) as every:
        for case in every:
            if given.only not in case.name:
                continue
            rows.append(row := measure(case, given.turns, given.threads, peak))
            us = ", ".join(f"{name} {taken:.0f}" for name, taken in row["us"].items())
            print(f"{row['case']}: {us} us; {row['rival / whorl']}, at most {row['at most']}", flush=True)
    for name in ("rival / whorl", "at most") if rows else ():
        print(f"{name}: geometric mean {math.exp(statistics.mean(math.log(row[name]) for row in rows)):.2f}")
    if given.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        facts = {
            "processor": cpu._processor(), "threads": given.threads, "load": os.getloadavg(),
            "torch": torch.__version__, "python": platform.python_version(),
            "compiler": compiler.version(compiler.found()).partition("\n")[0],
            "date": datetime.date.today().isoformat(), "commit": commit,
        }  # fmt: skip
        given.out.write_text(json.dumps(facts | {"results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
