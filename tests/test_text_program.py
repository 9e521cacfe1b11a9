"""The program: a small run learns, leaves its files, and goes on where it was ended, whatever ended it."""

import argparse
import gc
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import interruptions
from whorl import UnsupportedError, compiler, settings
from whorl.errors import InputError
from whorl.text import curves, metrics, program, training
from whorl.text.checkpoint import load
from whorl.text.evaluation import score
from whorl.text.options import Options
from whorl.text.program import CURVE, METRICS, Program
from whorl.text.sampling import sample

SMALL = dict(units=8, embedding=4, batch=4, time=8, steps=10, device="cpu")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(b"to be, or not to be\n" * 60)
    return tmp_path / "text"


def make(text: Path, name: str = "run", **given: object) -> Program:
    return Program(Options.of(path=text, out=text.with_name(name), **SMALL | given))


def train(made: Program, until: float = math.inf) -> Program:
    """Train, up to the step `until`."""
    for _ in made.train(lambda: made.trainer.step >= until):
        pass
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_small_run_learns_and_leaves_its_files(text: Path) -> None:
    text.write_text(inspect.getsource(argparse))
    made = make(text, embedding=16, units=48, sample=40, batch=8, time=32, steps=150, learning_rate=2e-2)
    reports = list(made.train(lambda: False))
    counts = torch.bincount(made.corpus.train, minlength=256).double()
    entropy = torch.special.entr(counts / counts.sum()).sum().item()
    outcome = made.outcome()
    assert reports[-1].nats < entropy - 0.3
    assert outcome.valid == reports[-1].valid
    assert outcome.valid.nats < entropy - 0.5
    assert outcome.valid.tokens == len(made.corpus.held_out) - 1
    assert outcome.test is None
    start = made.corpus.vocabulary.encode(b"\n")
    assert outcome.sample == bytes(sample(made.trainer.model, start, 40).tolist()).decode("utf-8", "replace")
    assert names(text.with_name("run")) == ["checkpoint-150", METRICS]
    library = "onednn" if torch.backends.mkldnn.is_available() else "reference"
    assert made.kernel.plans[0].engine == ("cpu" if compiler.found() else library)
    again = load(text.with_name("run") / "checkpoint-150").model()
    assert score(again, made.corpus.held_out) == outcome.valid


def test_the_same_seed_gives_the_same_model(text: Path) -> None:
    weights = [
        train(make(text, f"run{i}", seed=seed, dropout=0.2)).trainer.model.state_dict()
        for i, seed in enumerate((5, 5, 6))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])


def test_the_test_text_is_scored_in_one_row(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.text.evaluation.SHORTEST", 10)
    text.with_name("test").write_bytes(b"not to be, that is the question" * 5)
    made = train(make(text, test=text.with_name("test")))
    assert made.corpus.test is not None
    expected = score(made.trainer.model, made.corpus.test, rows=1)
    assert made.outcome().test == made.outcome().test == expected
    assert expected != score(made.trainer.model, made.corpus.test)
    noted = [line for line in metrics.lines(made.folder.path / METRICS) if line["kind"] == "test"]
    assert [(line["step"], line["nats"], line["tokens"]) for line in noted] == [(made.trainer.step, *expected)]


def test_an_initial_range_replaces_every_draw(text: Path) -> None:
    for parameter in make(text, init=0.05).trainer.model.parameters():
        assert 0 < parameter.abs().max() <= 0.05


def test_run_folders_never_meet(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text.rename(text.with_name("my text.txt"))
    monkeypatch.chdir(text.parent)
    made = [Program(Options.of(path=text, **SMALL)).folder.path for _ in range(2)]
    assert made == [Path("runs/my-text"), Path("runs/my-text-2")]
    assert all(path.is_dir() for path in made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": 900, "time": 5}, "makes 900 rows of 1 tokens, shorter than a window of 5"),
        ({"batch": 2000}, "do not make 2000 rows"),
        ({"units": 10**7}, r"takes? [\d.]+ GiB to train, and cpu has"),
        ({"tied": True}, "embedding is 4, the output 8"),
    ],
)
def test_nothing_is_made_for_a_run_that_cannot_start(text: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(text, **given)
    assert names(text.parent) == ["text"]


def test_a_text_too_short_to_measure_is_refused_before_it_is_learnt(text: Path) -> None:
    text.write_bytes(b"short text, twenty..")
    with pytest.raises(InputError, match="fewer than 2 tokens"):
        make(text, batch=1, time=4)
    assert names(text.parent) == ["text"]


@pytest.mark.usefixtures("no_compiler")
def test_an_engine_that_cannot_run_is_refused_before_anything_is_made(text: Path) -> None:
    with pytest.raises(UnsupportedError, match="cudnn"):
        make(text, engine="cudnn")
    with settings(slow="error"), pytest.raises(UnsupportedError, match=r"settings\.slow is 'error'"):
        make(text, cell="gru", engine="auto", time=9)
    assert names(text.parent) == ["text"]


def test_checkpoints_and_scores_come_when_they_are_due(text: Path) -> None:
    kept = [
        (report.step, names(text.with_name("run"))[:-1], report.valid is not None)
        for report in make(text, save_steps=4, valid_steps=3).train(lambda: False)
    ]
    assert kept == [
        (3, ["checkpoint-0"], True),
        (4, ["checkpoint-4"], False),
        (6, ["checkpoint-4"], True),
        (8, ["checkpoint-8"], False),
        (9, ["checkpoint-8"], True),
        (10, ["checkpoint-8"], True),
    ]
    assert names(text.with_name("run")) == ["checkpoint-10", METRICS]


def test_saving_stays_a_small_part_of_the_time(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SAVE_STEPS", 1)
    made, clock, saved = make(text, steps=60), [0.0], []
    monkeypatch.setattr(program.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(training.time, "perf_counter", lambda: clock[0])
    advance = made.trainer.advance

    def second() -> torch.Tensor:
        clock[0] += 1
        return advance()

    def slow_save(folder: Path, checkpoint: object) -> None:
        saved.append(made.trainer.step)
        folder.mkdir()
        clock[0] += 0.59  # nearly 3 percent of 20 steps

    made.trainer.advance = second
    monkeypatch.setattr(program, "save", slow_save)
    train(made)
    assert saved == [0, 20, 40, 60]


def test_a_score_that_is_no_number_ends_the_training(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(text, valid_steps=4)
    monkeypatch.setattr(program, "score", lambda *given: program.Score(math.nan, 5))
    with pytest.raises(InputError, match="after 4 steps the loss is no number"):
        train(made)
    assert [line["kind"] for line in metrics.lines(made.folder.path / METRICS)] == ["run"]


def test_a_training_that_ends_while_it_saves_is_measured(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(text, steps=None, minutes=1.0, save_steps=3)

    def slow_save() -> None:
        if made.trainer.step == 3:
            made.trainer.recipe = replace(made.trainer.recipe, minutes=1e-9)

    monkeypatch.setattr(made, "save", slow_save)
    reports = list(made.train(lambda: False))
    assert reports[-1].step == made.trainer.step == 3
    assert reports[-1].valid is None
    assert made.outcome().valid == score(made.trainer.model, made.corpus.held_out)
    assert metrics.lines(made.folder.path / METRICS)[-1]["kind"] == "valid"


def test_metrics_say_what_was_trained_and_how_it_went(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "KEPT", 4)
    made = make(text, valid_steps=5)
    reports = {report.step: report for report in made.train(lambda: False)}
    lines = metrics.lines(made.folder.path / METRICS)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("run", 0), ("train", 4), ("valid", 5), ("train", 8), ("train", 10), ("valid", 10),
    ]  # fmt: skip
    assert lines[0]["architecture"]["units"] == 8
    assert lines[0]["recipe"]["steps"] == 10
    assert lines[0]["text"]["sha256"] == made.corpus.digest
    assert lines[0]["engine"] == made.kernel.plans[0].engine
    for line in lines[1:]:
        report = reports[line["step"]]
        score = report.valid if line["kind"] == "valid" else report
        assert line["nats"] == score.nats
        assert line["epoch"] == round(report.epoch, 4)


@pytest.mark.parametrize(
    "given",
    [
        {"dropout": 0.3, "layers": 2, "accumulate": 2},
        {"kind": "words", "tied": True, "embedding": 8},
        {"kind": "characters", "cell": "gru", "options": {"zoneout": 0.2}, "epochs": 0.3},
    ],
)
def test_a_run_goes_on_to_what_it_would_have_come_to(
    text: Path, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "KEPT", 4)
    given = given | {"valid_steps": 3, "steps": 13}
    train(make(text, "unbroken", **given))
    for stop in (5, 8, 8.5):
        made = make(text, "broken", **given) if stop == 5 else Program.resume(text.with_name("broken"), device="cpu")
        del train(made, stop).folder, made
        gc.collect()
    train(Program.resume(text.with_name("broken"), device="cpu"))
    assert interruptions.outcome(text.with_name("broken")) == interruptions.outcome(text.with_name("unbroken"))


def test_a_run_that_is_over_only_tells_its_outcome(text: Path) -> None:
    made = train(make(text))
    outcome = made.outcome()
    before = (made.folder.path / METRICS).read_text()
    del made.folder
    again = Program.resume(text.with_name("run"), device="cpu")
    assert list(again.train(lambda: False)) == []
    assert again.outcome() == outcome
    assert (text.with_name("run") / METRICS).read_text() == before


def test_a_run_knows_its_text_wherever_it_lies(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(text.parent)
    del train(make(Path("text"), "run"), 5).folder
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    text.rename("moved")
    with pytest.raises(InputError, match=f"{text} does not exist"):
        Program.resume(Path("run"))
    Path("other").write_bytes(b"to be, or not to bE\n" * 60)
    with pytest.raises(InputError, match=f"not the one that this run was trained on, {text} as it was then"):
        Program.resume(Path("run"), path=Path("other"))
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    assert Program.resume(Path("run"), path=Path("moved")).trainer.step == 5


def test_two_processes_do_not_train_in_one_folder(text: Path) -> None:
    pytest.importorskip("fcntl")
    made = train(make(text), 5)
    with pytest.raises(InputError, match="another process trains in"):
        Program.resume(text.with_name("run"))
    del made.folder
    assert Program.resume(text.with_name("run")).trainer.step == 5


def test_what_killed_processes_leave_is_taken_away(text: Path) -> None:
    del train(make(text), 5).folder
    run = text.with_name("run")
    for left in (".checkpoint-8.123", ".checkpoint-3.old", "checkpoint-3"):
        (run / left).mkdir()
        (run / left / "config.json").touch()
    (run / "notes").touch()
    (run / "checkpoint-best").mkdir()
    with open(run / METRICS, "a") as file:
        file.write('{"kind": "train", "step": 5}\n{"kind": "train", "step": 6}\n{"kind": "tr')
    resumed = Program.resume(run)
    assert names(run) == ["checkpoint-5", "checkpoint-best", METRICS, "notes"]
    assert [line["step"] for line in metrics.lines(run / METRICS)] == [0, 5]
    assert resumed.checkpoint == run / "checkpoint-5"


@pytest.mark.parametrize("content", [b"not json\n", b"[]\n", b'{"step": "5"}\n', b"[" * 100_000 + b"\n", b"\xff\n"])
def test_metrics_of_another_kind_are_kept(text: Path, content: bytes) -> None:
    del train(make(text), 5).folder
    (text.with_name("run") / METRICS).write_bytes(content)
    with pytest.raises(InputError, match="move it away"):
        Program.resume(text.with_name("run"))
    assert (text.with_name("run") / METRICS).read_bytes() == content


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """A disk on which no file grows beyond `size` bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 1000, 5000])
def test_a_full_disk_ends_the_run_and_leaves_what_was_there(text: Path, size: int) -> None:
    made = train(make(text, steps=100), 5)
    run = text.with_name("run")
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with small_disk(size), pytest.raises(InputError, match="cannot write .*: File too large"):
        train(made)
    left = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert left.keys() == files.keys()
    assert all(left[path].startswith(files[path]) for path in files)  # of the metrics a line may have been begun
    made.folder = None
    unbroken, again = train(make(text, "other", steps=100)), train(Program.resume(run))
    assert again.outcome() == unbroken.outcome()


def test_a_training_that_diverges_says_so_and_keeps_its_last_checkpoint(text: Path) -> None:
    made = make(text, save_steps=2, steps=200)
    advance = made.trainer.advance

    def diverging() -> torch.Tensor:
        loss = advance()
        if made.trainer.step == 7:
            made.trainer.losses[6] = math.nan
        return loss

    made.trainer.advance = diverging
    with pytest.raises(InputError, match="after 8 steps the loss is no number.*/checkpoint-6"):
        train(made)
    assert names(made.folder.path) == ["checkpoint-6", METRICS]


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_the_curve_is_a_picture(text: Path, kind: str) -> None:
    pytest.importorskip("matplotlib")
    made = train(make(text, kind=kind, valid_steps=2))
    path = made.curve()
    assert path == text.with_name("run") / CURVE
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert names(text.with_name("run")) == ["checkpoint-10", CURVE, METRICS]
    with small_disk(100), pytest.raises(InputError, match="cannot write .*curve.png"):
        made.curve()
    assert path.read_bytes() == content


def test_the_curve_shows_the_losses(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[tuple[list[float], list[float]]] = []
    plot = figure.Figure.savefig

    def note(made: object, *where: object, **how: object) -> None:
        drawn.extend((list(line.get_xdata()), list(line.get_ydata())) for line in made.axes[0].lines)
        plot(made, *where, **how)

    monkeypatch.setattr(figure.Figure, "savefig", note)
    rows = [("train", 50, 2.0), ("valid", 60, 1.5), ("run", 60, 9.0), ("train", 100, 1.0)]
    lines = [{"kind": kind, "step": step, "nats": nats} for kind, step, nats in rows]
    assert curves.draw(text.with_name("a.png"), lines, "word", "title")
    assert drawn == [([50, 100], [math.exp(2), math.e]), ([60], [math.exp(1.5)])]
    assert curves.draw(text.with_name("a.png"), [], "byte", "title")


def test_without_matplotlib_there_is_no_picture(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    made = train(make(text))
    assert made.curve() is None
    assert names(text.with_name("run")) == ["checkpoint-10", METRICS]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_run_that_is_killed_comes_to_the_same(tmp_path: Path) -> None:
    kills = interruptions.interrupt(tmp_path, 4)
    assert len(kills) == 4
    assert all(0 <= kill.repeated <= interruptions.SAVE_STEPS for kill in kills)
    unbroken = interruptions.outcome(tmp_path / "unbroken")
    assert interruptions.outcome(tmp_path / "broken") == unbroken
    assert len(unbroken["losses"]) == interruptions.STEPS // 50 + 4
    assert json.dumps(unbroken["losses"]) != "[]"
