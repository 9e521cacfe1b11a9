"""Keras' recurrent layers on whorl beside Keras' own: seconds of an epoch of `fit`, of `evaluate` and of `predict`.

    python benchmarks/keras_fit.py --jax PYTHON --tensorflow PYTHON --out FILE      every case and contender
    python benchmarks/keras_fit.py --cases 'plain;masked' --sizes 64               some, on torch alone
    python benchmarks/keras_fit.py --torch none --jax PYTHON                       on JAX alone

Each contender is a process of its own, with the Python that is named for its backend (this one for torch), and they
take turns, case after case in each, so that cases can be compared with each other too.  First the numbers: all hold the
same weights, `predict` must give the same, and the loss of the first epoch too (with dropout only on the same backend,
whose random masks are the same); a case that differs is not timed, and the others are.  All is float32, without TF32 on
a GPU.  Then the times, after that first epoch.
Beside them runs Keras without the layer: the same model and weights, whose recurrent layer is next to nothing.  What it
takes is what no recurrent layer can save.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """Of an epoch."""

    batch: int = 32
    batches: int = 16
    steps: int = 100
    features: int = 64


class Key(NamedTuple):
    """A model: one of `CASES`, and the units of its layer."""

    case: str
    units: int


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {},
    "recurrent_dropout": dict(recurrent_dropout=0.2, seed=1),
    "relu": dict(activation="relu"),
    "Bidirectional, masked": {},
    "GRU reset_after=False": dict(reset_after=False),
}
DOES = ("fit", "evaluate", "predict")
SIDES = {"whorl": "whorl", "keras": "Keras", "nothing": "without the layer"}
CONTENDERS = [
    *(("torch", side) for side in SIDES),
    *(("jax", side) for side in SIDES),
    ("tensorflow", "keras"),
]


# --- one contender, in its own process --------------------------------------------------------------------------------


def build(case: str, units: int, source: Any, shape: Shape) -> Any:
    """A model of one recurrent layer, of weights that are the same in every process."""
    import keras
    import numpy as np

    layer = getattr(source, case.partition(" ")[0] if case.startswith("GRU") else "LSTM")(units, **CASES[case])
    if case.startswith("Bidirectional"):
        layer = source.Bidirectional(layer)
    masking = [keras.layers.Masking()] if "masked" in case else []
    model = keras.Sequential([keras.Input((shape.steps, shape.features)), *masking, layer, keras.layers.Dense(1)])
    generator = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(0.1 * generator.standard_normal(variable.shape))
    model.compile("adam", "mse")
    return model


def without_the_layer() -> Any:
    """Keras' layers, of which LSTM and GRU do one step without gates: all weights have gradients, as in a layer."""
    import keras

    class Nothing:
        def inner_loop(self, sequences: Any, initial_state: Any, mask: Any, training: bool = False) -> Any:
            cell, units = self.cell, self.units  # type: ignore[attr-defined]
            last = keras.ops.matmul(sequences[:, -1], cell.kernel[:, :units])
            last = last + cell.recurrent_kernel[0, :units] + cell.bias[:units]
            return last, last[:, None], [last] * len(initial_state)

    register = keras.saving.register_keras_serializable("without_the_layer")  # Bidirectional makes its second from it
    made = {name: register(type(name, (Nothing, getattr(keras.layers, name)), {})) for name in ("LSTM", "GRU")}
    return SimpleNamespace(Bidirectional=keras.layers.Bidirectional, **made)


def data(case: str, shape: Shape) -> tuple[Any, Any]:
    """Sequences [samples, steps, features], padded on the right from half their length on, and a target for each."""
    import numpy as np

    generator, half = np.random.default_rng(1), shape.steps // 2
    x = generator.standard_normal((shape.batches * shape.batch, shape.steps, shape.features)).astype("float32")
    if "masked" in case:
        x *= (np.arange(shape.steps) < generator.integers(half, shape.steps + 1, (len(x), 1)))[..., None]
    return x, x[:, :half].mean((1, 2), keepdims=True)[:, 0]


def work(side: str, shape: Shape) -> None:
    """Answers each line of standard input, a request as JSON, by a line of standard output."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import keras

    source, facts = keras.layers, {"keras": keras.__version__, keras.backend.backend(): _version()}
    if keras.backend.backend() == "torch" or side == "whorl":
        import torch

        torch.backends.cudnn.allow_tf32 = False
    if side == "whorl":
        import whorl.keras
        from whorl.engines import taped

        taped.finish()  # until it is there calls go through Python
        source, facts["whorl"] = whorl.keras, whorl.__version__
    elif side == "nothing":
        source = without_the_layer()
    models: dict[Key, Any] = {}
    batch = shape.batch
    for line in sys.stdin:
        asked, found = json.loads(line), None
        what, some = asked["do"], slice(asked.get("batches", shape.batches) * batch)
        key = Key(asked.get("case", ""), asked.get("units", 0))
        if what == "build":
            models[key] = build(*key, source, shape), *data(key.case, shape)
        model, x, target = models.get(key, (None, None, None))
        if what == "facts":
            found = facts
        elif what == "build":
            found = model.predict(x[:batch], verbose=0).ravel().tolist()
        elif what == "loss":
            found = model.fit(x[some], target[some], batch_size=batch, shuffle=False, verbose=0).history["loss"][0]
        elif what == "engines":
            found = str(whorl.keras.explain(model, x[:batch])) if side == "whorl" else ""
        else:
            start = time.perf_counter()
            if what == "fit":
                model.fit(x[some], target[some], batch_size=batch, shuffle=False, verbose=0)
            elif what == "evaluate":
                model.evaluate(x[some], target[some], batch_size=batch, verbose=0)
            else:
                model.predict(x[some], batch_size=batch, verbose=0)
            found = time.perf_counter() - start
        print(json.dumps(found), file=answers, flush=True)


def _version() -> str:
    import keras

    module = {"torch": "torch", "jax": "jax", "tensorflow": "tensorflow"}[keras.backend.backend()]
    return sys.modules[module].__version__


# --- all of them ------------------------------------------------------------------------------------------------------


class Contender:
    """A process that does what it is asked."""

    def __init__(self, backend: str, side: str, python: str, shape: Shape) -> None:
        self.backend, self.side, self.name, self.shape = backend, side, f"{SIDES[side]}, {backend}", shape
        environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "WHORL_SLOW": "allow"}
        environment |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [python, "-W", "ignore", __file__, "--worker", side, "--shape", *map(str, shape)]
        self._process = subprocess.Popen(command, env=environment, text=True, stdin=-1, stdout=-1)

    def ask(self, do: str, **more: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"do": do} | more), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}: what it said is above.")
        return json.loads(line)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Differs(SystemExit):
    """Two contenders whose numbers are not the same."""


@contextmanager
def started(pythons: dict[str, str], shape: Shape) -> Iterator[list[Contender]]:
    """All contenders whose backend has a Python."""
    made = [Contender(backend, side, pythons[backend], shape) for backend, side in CONTENDERS if backend in pythons]
    try:
        yield made
    finally:
        for one in made:
            one.end()


def check(contenders: list[Contender], key: Key, **epoch: int) -> None:
    """Builds the model in each, and compares what they predict and the loss of an epoch, but for those without a layer.

    Args:
        epoch: how many `batches` it has; all of the shape's without.

    Raises:
        Differs: two whose numbers are not the same.
    """
    case, which = key.case, key._asdict()
    for one in contenders:
        if one.side == "nothing":
            for do in ("build", "loss"):
                one.ask(do, **which, **epoch)
    contenders = [one for one in contenders if one.side != "nothing"]
    predicted = [one.ask("build", **which) for one in contenders]
    for one, values in zip(contenders, predicted, strict=True):
        apart = max(abs(a - b) for a, b in zip(values, predicted[0], strict=True))
        if not apart < 1e-5:
            raise Differs(f"{case}: {one.name} predicts {apart} apart from {contenders[0].name}")
    losses = [one.ask("loss", **which, **epoch) for one in contenders]
    for one, loss in zip(contenders, losses, strict=True):
        alike = [other for other in contenders if other.backend == one.backend] if "dropout" in case else contenders
        wanted = losses[contenders.index(alike[0])]
        if not abs(loss - wanted) < 1e-4 * abs(wanted):
            raise Differs(f"{case}: {one.name} has loss {loss} after an epoch, {alike[0].name} {wanted}")


def measure(
    contenders: list[Contender], keys: list[Key], rounds: int, most: float | None = None
) -> Iterator[list[dict[str, Any]]]:
    """The median seconds of each contender and model, all of them in turns: what is known after each round.

    Args:
        keys: the models, which are built.
        most: seconds of an epoch; one of a contender that would take longer has fewer batches, which its row says.
    """
    engines = {
        key: {one.name: engine for one in contenders if (engine := one.ask("engines", **key._asdict()))} for key in keys
    }
    for do in DOES:
        batches = {key: {one.name: _batches(one, do, key, most) for one in contenders} for key in keys}
        for key in keys:
            for one in contenders:
                one.ask(do, **key._asdict(), batches=batches[key][one.name])  # compiles what it compiles
        times: dict[Key, dict[str, list[float]]] = {key: {one.name: [] for one in contenders} for key in keys}
        for turn in range(rounds):
            for key in keys:
                for one in contenders[:: (-1) ** turn]:
                    taken = one.ask(do, **key._asdict(), batches=batches[key][one.name])
                    times[key][one.name].append(taken)
            rows = []
            for key in keys:
                seconds = {name: round(statistics.median(found), 4) for name, found in times[key].items()}
                row: dict[str, Any] = {**key._asdict(), "do": do, "rounds": turn + 1, "seconds": seconds}
                some = batches[key]
                if fewer := {one.name: some[one.name] for one in contenders if some[one.name] < one.shape.batches}:
                    row["batches"] = fewer
                rows.append(row | ({"engines": engines[key]} if do == "fit" else {}))
            yield rows
        for key, row in zip(keys, rows, strict=True):
            each = [f"{name} {1e3 * took / batches[key][name]:.2f} ms a batch" for name, took in row["seconds"].items()]
            print(f"{key.case}, {key.units} units, {do}: {', '.join(each)}", flush=True)


def _batches(one: Contender, do: str, key: Key, most: float | None) -> int:
    """How many batches an epoch of a contender has."""
    if most is None:
        return one.shape.batches
    one.ask(do, **key._asdict(), **FEW)  # compiles what it compiles
    return min(one.shape.batches, max(2, int(most * FEW["batches"] / one.ask(do, **key._asdict(), **FEW))))


FEW = {"batches": 4}
"""Where epochs are to be short: of one whose numbers are compared, or whose time says how many another has."""


def main() -> None:
    """Measures, prints, and writes what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="'none' leaves torch out")
    parser.add_argument("--jax", metavar="PYTHON", help="one that has Keras, torch and JAX")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="one that has Keras and TensorFlow")
    parser.add_argument("--cases", default=";".join(CASES), help="with semicolons between them")
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128], help="units of the layer")
    parser.add_argument(
        "--shape", type=int, nargs=4, default=Shape(), metavar="N", help="batch, batches, steps, features"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=float, metavar="SECONDS", help="of an epoch: of slow contenders it is shorter")
    parser.add_argument("--out", type=Path, help="a file of results, to which these are added")
    parser.add_argument("--tables", type=Path, help="only prints a file of results as Markdown")
    given = parser.parse_args()
    if given.tables:
        return print(tables(given.tables), end="")
    if given.worker:
        return work(given.worker, Shape(*given.shape))
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}: write 1 or more")
    pythons = {
        backend: python
        for backend in ("torch", "jax", "tensorflow")
        if (python := getattr(given, backend)) not in (None, "none")
    }
    different: list[str] = []
    with started(pythons, Shape(*given.shape)) as contenders:
        facts = {one.name: one.ask("facts") for one in contenders}
        keys = [Key(case, units) for units in given.sizes for case in given.cases.split(";")]
        for key in [*keys]:
            try:
                check(contenders, key, **({} if given.most is None else FEW))
            except Differs as found:
                different.append(str(found))
                keys.remove(key)
        for rows in measure(contenders, keys, given.rounds, given.most):
            if given.out:
                write(given.out, facts, rows, Shape(*given.shape))
    if different:
        raise SystemExit("\n".join(different))
    return None


def write(path: Path, versions: dict[str, Any], rows: list[dict[str, Any]], shape: Shape) -> None:
    """Adds the rows to a file, in the place of those of the same case; in the order of `CASES` and of units."""
    from whorl.bench import machine
    from whorl.bench.results import now

    before = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else []
    new = {(row["case"], row["units"], row["do"]) for row in rows}
    kept = [row for row in before if (row["case"], row["units"], row["do"]) not in new]
    import torch

    when = {"date": now(), "commit": machine.commit()}
    header = {
        "machine": machine.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions,
        "shape": shape._asdict() | {"dtype": "float32"},
    }  # fmt: skip
    every = sorted(
        kept + [row | when for row in rows],
        key=lambda row: ([*CASES].index(row["case"]), row["units"], DOES.index(row["do"])),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header | {"results": every}, indent=1) + "\n", encoding="utf-8")


def tables(path: Path) -> str:
    """The results as Markdown: milliseconds a batch, and how many times as long Keras takes on the same backend.

    Beside a model without the layer: how many times as long Keras takes as that, the most that a layer could gain.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    batches, made = data["shape"]["batches"], []
    names = [name for name in data["versions"] if any(name in row["seconds"] for row in data["results"])]
    heads = [_head(name, names) for name in names]
    for do in DOES:
        lines = [f"| `{do}` | units | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(names)}"]
        for row in data["results"]:
            if row["do"] == do:
                counts = row.get("batches", {})
                each = {name: took / counts.get(name, batches) for name, took in row["seconds"].items()}
                cells = [_cell(each, name) for name in names]
                lines.append(f"| {row['case']} | {row['units']} | {' | '.join(cells)} |")
        made.append("\n".join(lines))
    return "\n\n".join(made) + "\n"


def _pair(name: str) -> tuple[str, str, str] | None:
    """Of a column: whose seconds are divided by whose, and what its head calls that."""
    side, _, backend = name.partition(", ")
    keras = f"Keras, {backend}"
    pairs = {"Keras": (keras, f"whorl, {backend}", ", times"), SIDES["nothing"]: (keras, name, ", at most")}
    return pairs.get(side)


def _head(name: str, names: list[str]) -> str:
    pair = _pair(name)
    return name + (pair[2] if pair and {*pair[:2]} <= {*names} else "")


def _cell(seconds: dict[str, float], name: str) -> str:
    """Of the seconds of a batch."""
    if name not in seconds:
        return ""
    text, pair = f"{1e3 * seconds[name]:.1f}", _pair(name)
    return f"{text}, {seconds[pair[0]] / seconds[pair[1]]:.1f}" if pair and {*pair[:2]} <= {*seconds} else text


if __name__ == "__main__":
    main()
