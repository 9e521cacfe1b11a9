"""Several processes that train together: the same model as one process, one folder, one display, one end."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import groups
import whorl
from groups import Task, carry_out, difference, together
from whorl.errors import InputError
from whorl.text import group as module
from whorl.text import program
from whorl.text.checkpoint import load
from whorl.text.options import Options
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.training import Trainer

if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

RECIPE = Recipe(batch=6, time=8, steps=100, learning_rate=0.05, clip=0.05, weight_decay=0.0, warmup=0.0)
PLAIN = replace(RECIPE, optimizer="sgd", learning_rate=2.0)
EXACT = 1e-12


@pytest.mark.parametrize(
    "size, task",
    [
        (2, Task(11, PLAIN)),  # 7 windows an epoch: the rows start again
        (3, Task(11, replace(RECIPE, clip=1.0), dict(tied=True, embedding=5))),
        (2, Task(4, replace(PLAIN, batch=12, accumulate=3, clip_rows=True), dict(cell="gru"), text=12 * 60 + 1)),
        (2, Task(11, PLAIN, copied=30)),
        (3, Task(4, replace(PLAIN, clip_rows=True), dict(cell="gru"), copied=0)),
    ],
    ids=["sgd, two", "adamw, three, tied", "parts", "on a copy", "on a copy, by rows, three"],
)
def test_several_processes_take_the_step_of_one(size: int, task: Task, tmp_path: Path) -> None:
    alone, others = carry_out(task), together(size, task, tmp_path)
    for outcome in others:
        assert outcome.losses == pytest.approx(alone.losses, rel=EXACT)
        assert difference(outcome.checkpoint, alone.checkpoint) <= EXACT
        assert outcome.checkpoint.weights.keys() == alone.checkpoint.weights.keys()


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_goes_on_with_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    unbroken, task = carry_out(Task(9, PLAIN)), Task(5, PLAIN)

    def run(size: int, task: Task) -> groups.Outcome:
        return together(size, task, tmp_path)[-1] if size > 1 else carry_out(task)

    start = run(before, task).checkpoint
    outcome = run(after, replace(task, steps=4, start=start))
    assert outcome.losses == pytest.approx(unbroken.losses[5:], rel=EXACT)
    assert difference(outcome.checkpoint, unbroken.checkpoint) <= EXACT
    assert outcome.checkpoint.training["states.0"].shape[1] == PLAIN.batch


def test_each_process_draws_masks_of_its_own_and_the_same_each_time() -> None:
    def losses(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = groups.LanguageModel(replace(groups.TINY, dropout=0.5, options=dict(recurrent_dropout=0.3)))
        streams = Streams(torch.zeros(61, dtype=torch.uint8), 6)  # all rows alike
        trainer = Trainer(model, streams, replace(PLAIN, learning_rate=1e-300), module.Group(rank, 2))
        return [trainer.advance().item() for _ in range(3)]

    assert losses(0) == losses(0)
    assert len({*losses(0), *losses(1)}) == 6


def test_minutes_are_refused_to_several_processes(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "is_called", lambda: True)
    monkeypatch.setattr(program, "join", lambda device: (module.Group(0, 2), "cpu"))
    with pytest.raises(InputError, match="minutes are of each process's own clock"):
        program.Program(Options.of(path=text, minutes=1.0, out=text.with_name("run")))
    assert not text.with_name("run").exists()


def test_rows_that_do_not_make_equal_parts_are_refused() -> None:
    model = groups.LanguageModel(groups.TINY)
    streams = Streams(torch.zeros(500, dtype=torch.uint8), 6)
    with pytest.raises(InputError, match="6 rows do not make 4 x 1 equal parts"):
        Trainer(model, streams, RECIPE, module.Group(0, 4))


def test_the_rows_of_all_processes_are_the_rows() -> None:
    streams = Streams(torch.arange(61, dtype=torch.int32), 6)
    whole, window = streams.window(3, 4)[0], torch.zeros(5, 2, dtype=torch.long)
    parts = [streams.part(index, 3) for index in range(3)]
    assert torch.equal(torch.cat([part.window(3, 4)[0] for part in parts], 1), whole)
    parts[1].fill(window, 3)
    assert torch.equal(window[:-1], whole[:, 2:4])
    assert torch.equal(window[1:], whole[:, 2:4] + 1)


def test_torchrun_gives_each_process_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not module.is_called()
    for name in module.VARIABLES:
        monkeypatch.setenv(name, "1")
    assert module.is_called()
    with pytest.raises(InputError, match="device is 'cuda:1', but torchrun gives each process its own"):
        module.join("cuda:1")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SMALL = "--units 16 --embedding 8 --batch 4 --time 8 --valid-steps 200 --save-steps 50 --sample 5 --device cpu".split()


def start(*words: str) -> subprocess.Popen[str]:
    source = str(Path(whorl.__file__).parents[1])
    variables = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([*TORCHRUN, *words], env=os.environ | variables, **pipes)


def workers(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return sorted(map(int, found.stdout.split()))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(b"to be, or not to be\n" * 60)
    return tmp_path / "text"


@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers by Linux's ps")
def test_a_killed_worker_ends_all_and_the_run_goes_on(text: Path) -> None:
    run = text.with_name("run")
    process = start("2", "-m", "whorl", "train", str(text), "--out", str(run), *SMALL, "--steps", "100000")
    while process.poll() is None and not any(run.glob("checkpoint-[1-9]*")):
        time.sleep(0.05)
    both = workers(process)
    assert len(both) == 2
    os.kill(both[1], signal.SIGKILL)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode != 0
    for worker in both:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)
    assert out.count("processes   2, each with 2 of 4 rows") == 1  # one display
    assert "process 0 of 2 ends, after" in err
    saved = load(next(run.glob("checkpoint-*")))
    assert saved.progress.step >= 50
    # A worker that is asked to end ends all, with a checkpoint of the step that all have come to.
    process = start("1", "-m", "whorl", "train", "--resume", str(run), "--device", "cpu")
    while process.poll() is None and len((run / "metrics.jsonl").read_text().splitlines()) < 8:
        time.sleep(0.05)
    process.terminate()
    out, err = process.communicate(timeout=60)
    (again,) = run.glob("checkpoint-*")
    assert load(again).progress.step > saved.progress.step
    assert f"resumed     {run}/checkpoint-{saved.progress.step}" in out
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == sorted(set(steps))
    assert [line["processes"] for line in lines if line["kind"] == "run"] == [2, 1]


@pytest.fixture
def script(text: Path) -> Path:
    """Does what `whorl` does, and tells of Python's own end, in which threads of gloo abort, once in a while."""
    made = text.with_name("script.py")
    made.write_text(
        "import atexit\nfrom whorl.__main__ import main\n"
        "atexit.register(print, 'the end of Python', flush=True)\nmain()\n"
    )
    return made


def test_torchrun_trains_to_the_end_with_one_display_and_waits_for_no_other_end(text: Path, script: Path) -> None:
    run = text.with_name("run")
    process = start("2", str(script), "train", str(text), "--out", str(run), *SMALL, "--steps", "60")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert sum(line.startswith("step 60 ") for line in out.splitlines()) == 1
    assert out.count("validation  ") == 1
    assert load(run / "checkpoint-60").progress.step == 60
    assert "the end of Python" not in out


def test_a_worker_that_is_refused_does_not_wait_for_pythons_own_end(text: Path, script: Path) -> None:
    process = start("1", str(script), "train", str(text), "--units", "none")
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "--units" in err
    assert "exitcode  : 2" in err
    assert "the end of Python" not in out


def test_a_worker_that_ends_says_why_though_torchrun_ends_it_too(text: Path) -> None:
    script = text.with_name("script.py")
    script.write_text(
        "import os, signal, sys\nfrom whorl.__main__ import main\n"
        "class Late:\n"
        "    def __getattr__(self, name):\n"
        "        return getattr(sys.__stderr__, name)\n"
        "    def write(self, words):\n"
        "        if words.startswith('whorl train: '):\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return sys.__stderr__.write(words)\n"
        "sys.stderr = Late()\nmain()\n"
    )
    process = start("1", str(script), "train", str(text), "--out", str(text.with_name("run")), "--device", "cuda:9")
    _, err = process.communicate(timeout=120)
    assert "device is 'cuda:9', but torchrun gives each process its own" in err, err
    assert "exitcode  : 2" in err
