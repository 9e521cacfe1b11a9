"""Figures for the page of the suite `seeds` from what other commands wrote: the grid, and runs of `whorl train`.

    python benchmarks/seeds_figures.py grid benchmarks/results/h200-persistent.json benchmarks/results/h200.json
    python benchmarks/seeds_figures.py ptb benchmarks/results/ptb/*.jsonl --commit HASH --date DAY --driver 580.1

The metrics of `whorl train` do not say commit, date and driver, so they are given.  --out is the folder of figures.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from whorl.bench.collection import SEEDS
from whorl.bench.figures import Figures, Plot
from whorl.bench.history import history
from whorl.bench.results import Results
from whorl.bench.tables import Table

PRESETS = ("small", "medium", "large")


def of_grid(paths: list[Path]) -> Figures:
    """The sizes of 2017, then and now; machine, versions and commit are those of the first file, which goes first."""
    found = [Results.load(path) for path in paths]
    header, table = found[0].header, history(found)
    assert table is not None, "none of the files has a size that was published"
    date = max(entry.date for entry in found[0].measured.values())
    text = (
        "One layer or three, as wide as its input: rnn-benchmarks and cudnn_rnn_theano_benchmarks of 2016 and 2017. "
        "docs/results.md has the whole grid.",
        *(f"Columns that it lacks are of commit {later.header.commit['hash'][:12]}." for later in found[1:]),
    )
    return Figures(
        "grid", "The benchmark grid, 2017 and now", text, "whorl bench", date, header.machine, header.versions,
        header.commit, (table,),
    )  # fmt: skip


def of_training(paths: list[Path], commit: str, date: str, driver: str) -> Figures:
    """The tables of README.md beside the files, and the perplexities in the files: metrics of runs, PRESET.jsonl."""
    lines, run = {}, {}
    for path in sorted(paths, key=lambda path: PRESETS.index(path.stem)):
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        run = next(record for record in records if record["kind"] == "run")
        valid = [(record["epoch"], math.exp(record["nats"])) for record in records if record["kind"] == "valid"]
        lines[f"ptb-{path.stem}"] = tuple(valid)
    record = paths[0].parent / "README.md"
    text = (
        "The models of Zaremba et al. (2014), trained by whorl train --preset, and the speed of their training with "
        "other layers; benchmarks/results/ptb says how, docs/train.md has the details of the models.",
    )
    machine = {"device": "cuda", "gpu": run["device"], "driver": driver}
    versions = {name: run[name] for name in ("whorl", "torch")}
    plot = Plot("Validation perplexity", "epoch", "perplexity", lines)
    return Figures(
        "penn_treebank", "Penn Treebank language models", text, "whorl train --preset ptb-small --data FOLDER", date,
        machine, versions, {"hash": commit, "dirty": False}, tuple(tables_of(record.read_text(encoding="utf-8"))),
        (plot,),
    )  # fmt: skip


def tables_of(markdown: str) -> Iterator[Table]:
    """The tables of a page, each under the last heading or bold words before it."""
    title, rows = "", []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            cells = [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", cell).strip() for cell in line.strip("|").split("|")]
            rows.append(tuple(cells))
            continue
        if rows:
            yield Table(title, rows[0], tuple(rows[2:]))
            rows = []
        bold = re.match(r"#+ (.*)|\*\*(.*?)\*\*", line)
        if bold:
            title = (bold[1] or bold[2]).rstrip(".")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("kind", choices=("grid", "ptb"))
    arguments.add_argument("files", nargs="+", type=Path)
    arguments.add_argument("--commit", default="unknown")
    arguments.add_argument("--date", default="unknown")
    arguments.add_argument("--driver", default="unknown")
    arguments.add_argument("--out", type=Path, default=SEEDS)
    given = arguments.parse_args()
    if given.kind == "grid":
        of_grid(given.files).save(given.out / "grid.json")
    else:
        of_training(given.files, given.commit, given.date, given.driver).save(given.out / "penn_treebank.json")


if __name__ == "__main__":
    main()
