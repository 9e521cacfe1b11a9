"""Words per second of `whorl train` on one GPU and on several, with as many rows of the text for each.

    python benchmarks/several_gpus.py [--preset ptb-large] [--processes 1,2,4] [--figures FILE]

Each number of processes is a training of its own, started by torchrun, on a text that is drawn here: the speed depends
on the number of words alone. A figure is the median over every 50 steps of the second half of a training; efficiency
is the speed for each process over that of one process, which exchanges nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from whorl.bench.figures import Figures
from whorl.bench.tables import Table
from whorl.text import devices
from whorl.text.options import FILES, PRESETS

WORDS, VOCABULARY = 929_589, 10_000  # as many as the Penn Treebank has


def draw(folder: Path, preset: str, words: int, vocabulary: int) -> None:
    """The files of a preset: words as frequent as Zipf's law has it, each of them at least once."""
    chances = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    draws = torch.Generator().manual_seed(2)
    for name, count in zip(FILES[preset][0], (words, 2000, 2000), strict=True):
        every = list(range(vocabulary)) if count == words else []
        drawn = every + torch.multinomial(chances, count, replacement=True, generator=draws).tolist()
        lines = (" ".join(f"w{word}" for word in drawn[at : at + 24]) for at in range(0, len(drawn), 24))
        (folder / name).write_text("\n".join(lines) + "\n")


def train(folder: Path, preset: str, count: int, steps: int, seconds: int, others: list[str]) -> float:
    """Words per second of all processes together."""
    run, batch = folder / f"run-{count}", PRESETS[preset]["batch"] * count
    way = [sys.executable, "-m"]
    if count > 1:
        way += ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        way += ["--nproc-per-node", str(count), "-m"]
    words = [*way, "whorl", "train", str(folder), "--preset", preset, "--batch", str(batch), "--steps", str(steps)]
    words += ["--out", str(run), "--sample", "0", "--valid-steps", str(10**9), "--save-steps", str(10**9), *others]
    done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = done.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        done.terminate()  # torchrun ends its workers, which are in sessions of their own
        try:
            said, _ = done.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            done.kill()
            said, _ = done.communicate()
        raise RuntimeError(f"{count} processes took more than {seconds} s:\n{said[-4000:]}") from None
    if done.returncode:
        raise RuntimeError(f"{count} processes failed:\n{said[-6000:]}")
    notes = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = {note["step"]: note["seconds"] for note in notes if note["kind"] == "train" and note["step"] % 50 == 0}
    spans = [clock[step] - clock[step - 50] for step in clock if step - 50 in clock and step > steps // 2]
    return 50 * batch * notes[0]["recipe"]["time"] / statistics.median(spans)


def figures(preset: str, rows: Sequence[tuple[str, ...]]) -> Figures:
    """What was measured so far."""
    recipe = PRESETS[preset]
    title = f"{preset} on several GPUs, {recipe['batch']} rows of {recipe['time']} words for each"
    table = Table(title, ("processes", "words per second", "efficiency"), tuple(rows))
    text = (
        "`whorl train` under torchrun: gradients are exchanged in bfloat16 while backward runs. Efficiency: the "
        "speed for each process over that of one.",
    )
    return Figures.now(devices.find("auto"), "several-gpus", "Several GPUs", text, (table,))


def main() -> None:
    """Train with each number of processes, print the table, and write it where --figures says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="ptb-large", choices=list(FILES))
    parser.add_argument("--processes", default="1,2,4")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=100, help="that one training may take")
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--figures", type=Path, help="a JSON file for whorl bench --suite seeds --report")
    asked, others = parser.parse_known_args()  # others are of whorl train
    rows: list[tuple[str, ...]] = []
    failures: list[str] = []
    alone = 0.0
    with tempfile.TemporaryDirectory() as made:
        draw(Path(made), asked.preset, asked.words, asked.vocabulary)
        for count in map(int, asked.processes.split(",")):
            try:
                speed = train(Path(made), asked.preset, count, asked.steps, asked.seconds, others)
            except RuntimeError as error:  # the others are measured all the same
                failures.append(str(error))
                continue
            alone = alone or speed / count
            rows.append((str(count), f"{speed:,.0f}", f"{speed / count / alone:.3f}"))
            print(f"{asked.preset}, {count} processes: {speed:,.0f} words/s, efficiency {rows[-1][2]}", flush=True)
            if asked.figures:
                figures(asked.preset, rows).save(asked.figures)  # at once: a later one may hang
    if failures:
        raise SystemExit("\n\n".join(failures))


if __name__ == "__main__":
    main()
