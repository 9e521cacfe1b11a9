"""The tokens per second of `whorl train`'s loop, beside those of its bare step, in turns.

    python benchmarks/train_loop.py [WORDS OF whorl train]

The bare step is forward, loss, backward, clipping and the optimiser on windows that lie on the device, launched kernel
by kernel. The loop is all of `whorl train` but validation: the text's windows, the schedule, seeds, losses, reports,
metrics and checkpoints; on a GPU its step is one CUDA graph, unless --eager is among the words.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from whorl.commands import parse
from whorl.commands.train import make_program
from whorl.text.devices import describe
from whorl.text.model import precision
from whorl.text.program import Program
from whorl.text.training import Trainer

BARE, LOOP, TURNS = 50, 250, 5  # steps; few bare ones between, for the loop saves by the clock
FOREVER = ["--steps", str(10**9), "--valid-steps", str(10**9)]


def bare(trainer: Trainer, steps: int) -> float:
    """Seconds for so many bare steps."""
    recipe, model, states = trainer.recipe, trainer.model, None
    starts = range(0, trainer.streams.columns - recipe.time, recipe.time)
    windows = [trainer.streams.window(start, recipe.time) for start in starts[:steps]]
    for group in trainer.optimizer.param_groups:
        group["lr"].fill_(recipe.learning_rate)
    wait(model.device)
    began = time.perf_counter()
    for step in range(steps):
        inputs, targets = windows[step % len(windows)]
        trainer.optimizer.zero_grad()
        with precision(recipe.precision, model.device):
            loss, states = model.loss(inputs, targets, states)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        trainer.optimizer.step()
        states = tuple(state.detach() for state in states)
    wait(model.device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(words: list[str]) -> None:
    """Print a line as people read it, and one of JSON."""
    with tempfile.TemporaryDirectory() as folder:

        def make(name: str) -> Program:
            return make_program(parse(["train", *words, *FOREVER, "--out", str(Path(folder, name))]))

        alone, program = make("bare").trainer, make("loop")
        reports = program.train(lambda: False)
        seconds: dict[str, list[float]] = {"bare": [], "loop": []}
        for turn in range(1, TURNS + 2):
            seconds["bare"].append(bare(alone, BARE))
            began = time.perf_counter()
            while next(reports).step < turn * LOOP:
                pass
            seconds["loop"].append(time.perf_counter() - began)
        recipe, device = program.options.recipe, program.trainer.model.device
        tokens = {"bare": BARE * recipe.batch * recipe.time, "loop": LOOP * recipe.batch * recipe.time}
        # Sums, not medians, so that every save counts; the first turn warms up.
        speeds = {name: TURNS * tokens[name] / sum(times[1:]) for name, times in seconds.items()}
        kind, ratio = program.options.source.kind, speeds["loop"] / speeds["bare"]
        engine = program.kernel.plans[0].engine
        print(
            f"{describe(device)}, torch {torch.__version__}, {engine}: the loop {speeds['loop']:,.0f} {kind} per "
            f"second, the bare step {speeds['bare']:,.0f}, ratio {ratio:.3f}"
        )
        print(json.dumps({**speeds, "ratio": ratio, "engine": engine, "device": describe(device), "words": words}))


if __name__ == "__main__":
    main(sys.argv[1:])
