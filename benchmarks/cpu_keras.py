"""A train step of whorl's layers beside Keras 3 on TensorFlow and on JAX, on this processor: checked, then in turns.

    python benchmarks/cpu_keras.py --tensorflow TF/bin/python --jax JAX/bin/python --out FILE

Each rival runs in a process of its own, with the Python that is given (one environment may have both); without one it
is left out, and that is said.  All take the same x [batch, time, units] and weights.  A step is a forward pass, a
backward pass with the gradients of x and of every weight, and a plain gradient step that changes the weights; x changes
from step to step.  Outputs and gradients are checked against whorl's `reference` in float64 first, whorl's and the
rival's alike.  TensorFlow runs as a graph and through XLA; the faster of the two counts.  `at most` is a rival's time
over that of nothing but the products at the peak of the processor in the same turns (cpu_peak.py).
"""

import argparse
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_peak import Peak, gflop
from torch import Tensor

import whorl
from whorl import compiler
from whorl.engines import taped
from whorl.weights import to_keras

CASES = [(32, 30, 128), (32, 30, 512), (128, 30, 128)]
"""Batch, time, units."""
WARM = 10
"""Steps before any is timed: the first ten of a small layer in torch take up to 1.7 times as long as the next."""
ROW, SETTLING = 10, 3
"""Steps of a turn, of which the first do not count: they find threads asleep and another's numbers in the caches."""
RATE = 1e-6
BOUND = 1e-5
"""The most that a result may be from float64, as a relative 2-norm."""


class Rival:
    """A process that runs `cpu_keras_rival.py`."""

    def __init__(self, python: str, backend: str, threads: int) -> None:
        self.backend = backend
        program = str(Path(__file__).with_name("cpu_keras_rival.py"))
        self._process = subprocess.Popen(
            [python, program, backend, str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip

    def ask(self, **order: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.backend} ended: run cpu_keras_rival.py by hand to see why")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def results(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, and the gradients of both kernels as Keras has them."""
    leaf, weights = x.detach().requires_grad_(), list(layer.parameters())
    y = layer(leaf)[0]
    dx, *grads = torch.autograd.grad((y * dy).sum(), [leaf, *weights])
    return [y.detach(), dx, *to_keras(type(layer).__name__, grads)[:2]]


def apart(one: Any, truth: Tensor) -> float:
    found = torch.as_tensor(np.asarray(one)).double()
    return float((found - truth).norm() / truth.norm())


def step(layer: Any, weights: list[Tensor], x: Tensor, dy: Tensor) -> None:
    """Weights are gathered once, as the rivals do."""
    leaf = x.detach().requires_grad_()
    grads = torch.autograd.grad(layer(leaf)[0], [leaf, *weights], dy)[1:]
    with torch.no_grad():
        torch._foreach_add_(weights, grads, alpha=-RATE)


def prepared(
    kind: str, sizes: tuple[int, int, int], rivals: list[Rival], folder: Path
) -> tuple[Any, list[Tensor], Tensor, dict[str, Any], dict[str, float]]:
    """whorl's layer and its inputs, what each rival says of the same, and how far each is from float64: little."""
    batch, steps, units = sizes
    layer = getattr(whorl, kind)(units, units, batch_first=True)
    inputs = [torch.randn(batch, steps, units) for _ in range(4)]
    dy = torch.randn(batch, steps, units) / math.sqrt(batch * steps * units)
    weights = [weight.detach().numpy() for weight in to_keras(kind, list(layer.parameters()))]
    np.savez(folder / "in.npz", dy=dy.numpy(), **{f"x{i}": x.numpy() for i, x in enumerate(inputs)},
             **{f"weight{i}": weight for i, weight in enumerate(weights)})  # fmt: skip
    exact = getattr(whorl, kind)(units, units, batch_first=True, dtype=torch.float64, engine="reference")
    exact.load_state_dict(layer.state_dict())
    truth = results(exact, inputs[0].double(), dy.double())
    errors, told = {"whorl": max(map(apart, results(layer, inputs[0], dy), truth))}, {}
    for rival in rivals:
        told[rival.backend] = rival.ask(
            do="build", layer=kind, units=units, file=str(folder / "in.npz"), out=str(folder / "out.npz")
        )
        with np.load(folder / "out.npz") as made:
            errors[rival.backend] = max(map(apart, [made[n] for n in ("y", "grad0", "grad1", "grad2")], truth))
    assert max(errors.values()) < BOUND, f"{kind} {sizes}: from float64 {errors}"
    return layer, inputs, dy, told, errors


def measure(
    kind: str,
    sizes: tuple[int, int, int],
    rivals: list[Rival],
    folder: Path,
    turns: int,
    versions: dict[str, Any],
    peak: Peak,
) -> dict[str, Any]:
    """Microseconds of a step of each, medians of turns."""
    batch, steps, units = sizes
    layer, inputs, dy, told, errors = prepared(kind, sizes, rivals, folder)
    ways = []
    for rival in rivals:
        versions |= {name: value for name, value in told[rival.backend].items() if name != "ways"}
        ways += [(rival, way) for way in told[rival.backend]["ways"]]
    times: dict[str, list[float]] = {"whorl": []}
    for rival, way in ways:
        times[f"{rival.backend} {way}"] = []
        rival.ask(do="time", way=way, steps=WARM)
    parameters = list(layer.parameters())
    for _ in range(WARM):
        step(layer, parameters, inputs[0], dy)
    rates = []
    for turn in range(turns):
        rates.append(peak.best(1))
        order: list[Any] = [None, *ways]
        for who in order if turn % 2 else reversed(order):
            time.sleep(0.05)  # the threads of the one before spin for a while, and would take its processors
            if who is not None:
                found = who[0].ask(do="time", way=who[1], steps=ROW)
                times[f"{who[0].backend} {who[1]}"] += found[SETTLING:]
                continue
            for place in range(ROW):
                begin = time.perf_counter()
                step(layer, parameters, inputs[place % len(inputs)], dy)
                if place >= SETTLING:
                    times["whorl"].append(1e6 * (time.perf_counter() - begin))
    micros = {name: statistics.median(found) for name, found in times.items()}
    row: dict[str, Any] = {"layer": kind, "batch, time, units": sizes, "engine": layer.plan(inputs[0]).engine}
    row |= {"us": {name: round(value, 1) for name, value in micros.items()}, "errors": errors}
    work = gflop({"LSTM": 4, "GRU": 3}[kind], batch, steps, units, units)
    row |= {"gflop": round(work, 3), "peak_gflops": round(max(rates), 1), "peak_us": round(1e6 * work / max(rates), 1)}
    for rival in rivals:
        best = min(value for name, value in micros.items() if name.startswith(rival.backend))
        row[f"{rival.backend} / whorl"] = round(best / micros["whorl"], 3)
        row[f"{rival.backend} / whorl, at most"] = round(best / row["peak_us"], 3)
    return row


def main() -> None:
    """Print one line for each case, and geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflow", metavar="PYTHON", help="of an environment with keras and tensorflow")
    parser.add_argument("--jax", metavar="PYTHON", help="of an environment with keras and jax")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layers", default="LSTM,GRU")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    taped.finish()  # until it is there calls go through Python
    peak, rivals, versions, rows = Peak(given.threads), [], {}, []
    for backend in ("tensorflow", "jax"):
        python = getattr(given, backend)
        asked = [python, "-c", f"import keras, {backend}"]
        if (
            python
            and subprocess.run(asked, capture_output=True, env=os.environ | {"KERAS_BACKEND": backend}).returncode
        ):
            print(f"{backend}: left out, {python} cannot import it and keras", file=sys.stderr)
        elif python:
            rivals.append(Rival(python, backend, given.threads))
        else:
            print(f"{backend}: left out, no --{backend} PYTHON is given", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for kind in given.layers.split(","):
            for sizes in CASES:
                rows.append(row := measure(kind, sizes, rivals, Path(folder), given.turns, versions, peak))
                print(json.dumps(row), flush=True)
    means = {}
    for rival in rivals:
        found = [row[f"{rival.backend} / whorl"] for row in rows]
        means[rival.backend] = round(math.exp(sum(map(math.log, found)) / len(found)), 3)
        bound = math.exp(statistics.mean(math.log(row[f"{rival.backend} / whorl, at most"]) for row in rows))
        means[f"{rival.backend}, at most"] = round(bound, 3)
        print(
            f"{rival.backend} / whorl: geometric mean {means[rival.backend]}, least {min(found)}, at most {bound:.2f}"
        )
        rival.close()
    if given.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
        facts = {
            "processor": next(
                (x.partition(": ")[2] for x in lines if x.startswith("model name")), platform.processor()
            ),
            "threads": given.threads,
            "load": os.getloadavg(),
            "versions": {"torch": torch.__version__, "python": platform.python_version()} | versions,
            "compiler": compiler.version(compiler.found()).partition("\n")[0],
            "date": datetime.date.today().isoformat(),
            "commit": commit,
            "geometric means": means,
        }
        given.out.write_text(json.dumps(facts | {"results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
