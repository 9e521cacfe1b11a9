"""Kill `whorl train` again and again, also while it saves, resume it each time, and compare with an unbroken run.

    python tests/interruptions.py [KILLS]

prints a line for each kill and ends with status 0 where the two runs came to the same, bit for bit.
"""

import contextlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

import whorl
from whorl.commands import main
from whorl.text.checkpoint import MODEL, TRAINING
from whorl.text.training import Trainer

SAVE_STEPS, STEPS = 50, 400
WORDS = f"--tokens characters --units 24 --embedding 8 --layers 2 --dropout 0.3 --batch 8 --accumulate 2 --time 12 \
--steps {STEPS} --save-steps {SAVE_STEPS} --valid-steps 100 --sample 10 --device cpu".split()

whorl.LSTM(1, 1)  # the first layer imports a second's worth of torch: here, once for all processes


@dataclass(frozen=True)
class Kill:
    """What one SIGKILL cost: the last step before it, the step that the run went on from, whether it cut a save."""

    step: int
    resumed: int
    saving: bool

    @property
    def repeated(self) -> int:
        return self.step - self.resumed


def train(words: list[str], log: Path) -> None:
    """`whorl train`, in a process of its own, that notes each step in `log`."""
    torch.set_num_threads(1)
    advance, notes = Trainer.advance, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def noted(trainer: Trainer) -> torch.Tensor:
        loss = advance(trainer)
        os.write(notes, b"%d\n" % trainer.step)
        return loss

    Trainer.advance = noted
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        sys.exit(main(["train", *words]))


def steps(log: Path) -> list[int]:
    """The steps that the process of `log` has noted so far."""
    content = log.read_bytes() if log.exists() else b""
    return [int(line) for line in content.split(b"\n")[:-1]]


def interrupt(folder: Path, kills: int, seed: int = 0) -> list[Kill]:
    """Train in folder/unbroken, and in folder/broken with so many kills; every second one falls into a save."""
    chance, context = random.Random(seed), _server()
    text, log = folder / "text", folder / "log"
    text.write_text("".join(chance.choice(["to be ", "or not ", "that is\n", "the question "]) for _ in range(3000)))

    def start(*words: str) -> BaseProcess:
        log.unlink(missing_ok=True)
        process = context.Process(target=train, args=([*words], log))
        process.start()
        return process

    def finish(process: BaseProcess) -> None:
        process.join(300)
        assert process.exitcode == 0, f"whorl train ended with {process.exitcode}"

    finish(start(str(text), "--out", str(folder / "unbroken"), *WORDS))
    broken, found, at = folder / "broken", [], 0
    process = start(str(text), "--out", str(broken), *WORDS)
    for kill in range(kills):
        target = at + chance.randint(1, max(1, 2 * (STEPS - SAVE_STEPS - at) // (kills - kill + 1)))
        saving = kill % 2 == 1
        while process.is_alive() and (steps(log) or [0])[-1] < target:
            time.sleep(0.001)
        while process.is_alive() and saving and not any(broken.glob(".checkpoint-*")):
            pass
        time.sleep(chance.random() * 0.003)
        process.kill()
        process.join()
        left, last = any(broken.glob(".checkpoint-*")), steps(log)[-1]
        process = start("--resume", str(broken))
        while process.is_alive() and not steps(log):
            time.sleep(0.001)
        at = steps(log)[0] - 1
        found.append(Kill(last, at, left))
    finish(process)
    return found


def _server() -> ForkServerContext:
    """Processes from a server that has imported everything; until Python 3.13 it has to find modules by itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["interruptions"])
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    forkserver.ensure_running()
    os.environ.clear()
    os.environ |= before
    return context


def outcome(run: Path) -> dict[str, object]:
    """What two runs have to agree in: every loss of the metrics, the files and what their checkpoint holds."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (checkpoint,) = (path for path in run.iterdir() if path.is_dir())
    return {
        "losses": [(line["kind"], line["step"], line["nats"]) for line in lines if line["kind"] != "run"],
        "checkpoint": checkpoint.name,
        MODEL: (checkpoint / MODEL).read_bytes(),
        TRAINING: (checkpoint / TRAINING).read_bytes(),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for kill in interrupt(Path(temporary), int(sys.argv[1]) if sys.argv[1:] else 10, time.time_ns()):
            where = "during a save" if kill.saving else "between saves"
            print(f"killed {where} at step {kill.step}, resumed from {kill.resumed}: {kill.repeated} steps repeated")
        unbroken, broken = outcome(Path(temporary, "unbroken")), outcome(Path(temporary, "broken"))
        same = unbroken == broken
        kind, step, nats = unbroken["losses"][-1]
        print(f"{kind} after {step} steps: {nats!r} unbroken, {broken['losses'][-1][2]!r} broken")
        print("all losses, parameters and averages are the same, bit for bit" if same else "the runs differ")
        sys.exit(not same)
