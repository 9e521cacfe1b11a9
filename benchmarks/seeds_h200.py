"""Every program of the suite `seeds` on one GPU, in one process: figures for `benchmarks/results/seeds`.

    python benchmarks/seeds_h200.py --out FOLDER --data reviews.npz [--parts imdb,ppo,forecast] [--seconds 200]

A part that raises is told, and the others go on; none begins after --seconds.
"""

import argparse
import runpy
import sys
import time
import traceback
from pathlib import Path

import whorl
from whorl.bench.suite import SuiteOptions, run

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str, words: str, out: Path, as_: str = "") -> None:
    """One program of examples/, its figures in `out`."""
    sys.argv = [f"examples/{name}.py", *words.split(), "--figures", str(out / f"{as_ or name}-h200.json")]
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()


def crossover(program: str, batches: str, out: Path) -> None:
    """One program over the batch size."""
    sys.argv = ["whorl", "bench", "--suite", "seeds"]
    chosen = tuple(map(int, batches.split(",")))
    for figures in run(SuiteOptions((program,), chosen, "cuda", ("bf16",), 0.02, out), lambda text: tell(text)):
        for table in figures.tables:
            print(table.text(), flush=True)


def tell(text: str) -> None:
    print(f"{time.perf_counter() - BEGAN:6.1f} s  {text}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--parts", default="imdb,imdb200,ppo,forecast,autoencoder,classifier")
    arguments.add_argument("--batches", default="1,2,4,8,16,32,64,128,256,512,1024,2048,4096")
    arguments.add_argument("--seconds", type=float, default=200)
    given = arguments.parse_args()
    whorl.settings.slow = "allow"  # explain's text is in the figures
    given.out.mkdir(parents=True, exist_ok=True)
    parts = {
        "imdb": lambda: example("imdb", f"{given.data} --bf16 --graph --compare", given.out),
        "imdb200": lambda: example("imdb", f"{given.data} --bf16 --graph --length 200", given.out, "imdb-200-words"),
        "ppo": lambda: example("recurrent_ppo", "--bf16 --steps 150000 --compare --loop-steps 12288", given.out),
        "forecast": lambda: example("forecast", "--bf16 --epochs 4", given.out),
        "autoencoder": lambda: crossover("autoencoder", given.batches, given.out),
        "classifier": lambda: crossover("classifier", given.batches, given.out),
    }
    for name in given.parts.split(","):
        if time.perf_counter() - BEGAN > given.seconds:
            tell(f"{name}: no time left")
            continue
        tell(name)
        try:
            parts[name]()
        except (RuntimeError, AssertionError, KeyError, TypeError, AttributeError):
            traceback.print_exc()
    tell("end")


BEGAN = time.perf_counter()

if __name__ == "__main__":
    main()
