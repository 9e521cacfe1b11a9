"""Training: states carry over exactly, the schedule does what it says, and a small run learns."""

import argparse
import inspect
import itertools
import math
from pathlib import Path

import pytest
import torch

from whorl.errors import InputError
from whorl.text import training
from whorl.text.checkpoint import load
from whorl.text.evaluation import score
from whorl.text.model import LanguageModel, Shape, bits
from whorl.text.program import Options, Program
from whorl.text.sampling import sample
from whorl.text.streams import Streams
from whorl.text.training import Recipe, Trainer

TINY = Shape(tokens=7, embedding=3, units=5, layers=2)


def tiny(seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(TINY).double()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(TINY.tokens, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("time", [1, 7, 13, 40])
def test_a_stream_in_windows_loses_what_it_loses_whole(time: int) -> None:
    model, streams, states, total = tiny(), Streams(tokens(3 * 40 + 1), 3), None, 0.0
    whole = model.loss(*streams.window(0, 40), None)[0].item()
    for start in range(0, 40, time):
        inputs, targets = streams.window(start, time)
        loss, states = model.loss(inputs, targets, states)
        total += loss.item() * targets.numel()
    assert total / len(streams) == pytest.approx(whole, rel=1e-12)


def test_training_carries_the_states_and_starts_the_rows_again_at_zero() -> None:
    model, streams = tiny(), Streams(tokens(2 * 20 + 1), 2)
    trainer = Trainer(model, streams, Recipe(batch=2, time=8, steps=3, learning_rate=1e-300, weight_decay=0.0))
    losses = [trainer.advance().item() for _ in range(3)]
    both, _ = model.loss(*streams.window(0, 16), None)
    assert (losses[0] + losses[1]) / 2 == pytest.approx(both.item(), rel=1e-12)
    assert losses[1] != pytest.approx(model.loss(*streams.window(8, 8), None)[0].item(), rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)  # 20 columns hold two windows of 8


def test_a_model_starts_from_the_frequencies_of_its_text() -> None:
    model, text = tiny(), torch.tensor([0, 0, 0, 2, 2, 6], dtype=torch.uint8)
    with torch.no_grad():
        model.head.weight.zero_()
        model.start_from(text)
        logits, _ = model(torch.tensor([[3]]))
    expected = torch.tensor([4, 1, 3, 1, 1, 1, 2]) / 13  # each counted once more
    assert torch.allclose(torch.softmax(logits[0, 0], 0), expected.double(), rtol=1e-6)


def test_no_gradient_crosses_a_window() -> None:
    trainer = Trainer(tiny(), Streams(tokens(99), 2), Recipe(batch=2, time=8, steps=3))
    trainer.advance()
    assert trainer.states is not None
    assert not any(state.requires_grad for state in trainer.states)


def test_the_score_is_the_mean_over_rows_that_start_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.text.evaluation.SHORTEST", 100)
    monkeypatch.setattr("whorl.text.evaluation.WINDOW", 33)
    model, text = tiny(), tokens(350)
    rows = [text[start : start + 117].long() for start in (0, 116, 232)]
    losses = [model.loss(row[:-1, None], row[1:, None], None)[0].item() for row in rows]
    result = score(model, text)
    assert result.tokens == 348
    assert result.bits == pytest.approx(bits(sum(losses) / 3), rel=1e-12)
    monkeypatch.setattr("whorl.text.evaluation.LARGEST", 117)
    assert score(model, text).bits == pytest.approx(bits(losses[0]), rel=1e-12)


def test_the_rate_rises_in_a_line_and_falls_in_one_to_zero() -> None:
    recipe = Recipe(learning_rate=0.2, warmup=0.25)
    assert [recipe.rate(f) for f in (0.0, 0.125, 0.25, 0.625, 1.0)] == pytest.approx([0.0, 0.1, 0.2, 0.1, 0.0])


def test_a_training_ends_with_the_first_of_steps_and_minutes() -> None:
    assert Recipe(steps=10, minutes=None).finished(5, 1e9) == 0.5
    assert Recipe(steps=None, minutes=2).finished(10**9, 30) == 0.25
    assert Recipe(steps=10, minutes=2).finished(5, 90) == 0.75
    assert Recipe(steps=10, minutes=2).finished(10, 0) == 1


def test_minutes_end_the_training_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(ticks) / 8)  # each look at the clock takes 1/8 s
    recipe = Recipe(batch=2, time=8, steps=None, minutes=0.1)
    trainer = Trainer(tiny(), Streams(tokens(999), 2), recipe)
    reports = list(trainer.run(lambda: False))
    assert reports[-1].finished == 1
    assert reports[-1].step == trainer.step > 1
    assert 6 <= trainer.seconds <= 6.25


def test_reports_hold_the_mean_loss_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(training, "REPORT_SECONDS", 2)
    recipe = Recipe(batch=2, time=8, steps=5)
    trainer = Trainer(tiny(), Streams(tokens(999), 2), recipe)
    losses = [bits(trainer.advance().item()) for _ in range(5)]
    reports = list(Trainer(tiny(), Streams(tokens(999), 2), recipe).run(lambda: False))
    firsts = [0] + [report.step for report in reports]
    assert len(reports) > 2
    assert firsts[-1] == 5
    for report, first in zip(reports, firsts, strict=False):
        assert report.bits == pytest.approx(sum(losses[first : report.step]) / (report.step - first), rel=1e-5)
        assert report.finished == report.step / 5
        assert report.left == pytest.approx(report.seconds / report.step * (5 - report.step))
        assert report.speed == pytest.approx(report.step * 16 / report.seconds)


def test_a_stop_ends_the_training_after_the_step_with_a_report() -> None:
    asked = itertools.count(1)
    trainer = Trainer(tiny(), Streams(tokens(999), 2), Recipe(batch=2, time=8, steps=10**9))
    *_, report = trainer.run(lambda: next(asked) == 3)
    assert report.step == trainer.step == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"time": -1}, "time is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"minutes": math.nan}, "minutes is nan"),
        ({"learning_rate": math.inf}, "learning_rate is inf"),
        ({"steps": None}, "never ends"),
        ({"precision": "fp8"}, "fp32, bf16"),
    ],
)
def test_recipes_that_cannot_be_carried_out_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe(**wrong)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InputError, match="makes 2 rows of 20 tokens, shorter than a window of 21"):
        Trainer(tiny(), Streams(tokens(41), 2), Recipe(batch=2, time=21))


def test_a_sample_follows_the_model_and_its_seed() -> None:
    model = tiny()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 3.0, 0.0, 2.0, -99.0, 0.0, 0.0]))
    start = torch.tensor([4])
    drawn = sample(model, start, 2000, temperature=1.0, seed=3)
    assert torch.equal(drawn, sample(model, start, 2000, temperature=1.0, seed=3))
    assert not torch.equal(drawn, sample(model, start, 2000, temperature=1.0, seed=4))
    chances = torch.softmax(model.head.bias.detach(), 0)
    assert torch.allclose(torch.bincount(drawn, minlength=7) / 2000, chances.float(), atol=0.04)
    assert set(sample(model, start, 50, temperature=0.01).tolist()) == {1}


def test_a_sample_carries_its_states() -> None:
    model, prompt = tiny(), torch.tensor([1, 2, 3])
    with torch.no_grad():
        model.head.weight *= 100  # sure of itself: the likeliest token is drawn
        written = sample(model, prompt, 12, temperature=0.01)
        logits, _ = model(torch.cat([prompt, written])[:, None])
    assert torch.equal(logits[2:-1, 0].argmax(-1), written)


def test_a_small_run_learns_and_leaves_its_files(tmp_path: Path) -> None:
    text = inspect.getsource(argparse).encode()
    (tmp_path / "text").write_bytes(text)
    recipe = Recipe(batch=8, time=32, steps=150, learning_rate=2e-2)
    sizes = dict(embedding=16, units=48, sample=40)
    program = Program(Options(tmp_path / "text", recipe=recipe, device="cpu", out=tmp_path / "run", **sizes))
    reports = list(program.train(lambda: False))
    counts = torch.bincount(program.corpus.train, minlength=256).double()
    entropy = torch.special.entr(counts / counts.sum()).sum().item() / math.log(2)
    outcome = program.outcome()
    assert reports[-1].bits < entropy
    assert outcome.score.bits < entropy - 0.8
    assert outcome.score.tokens == len(program.corpus.held_out) - 1
    start = program.corpus.vocabulary.encode(b"\n")
    assert outcome.sample == sample(program.trainer.model, start, 40).numpy().astype("uint8").tobytes().decode(
        "utf-8", "replace"
    )
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-150"]
    assert program.kernel.plans[0].engine == ("onednn" if torch.backends.mkldnn.is_available() else "reference")
    again = load(tmp_path / "run/checkpoint-150").model()
    assert score(again, program.corpus.held_out) == outcome.score


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"abcdefgh" * 99)
    weights = []
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        recipe = Recipe(batch=4, time=8, steps=5, seed=seed)
        program = Program(Options(tmp_path / "text", units=8, recipe=recipe, out=tmp_path / name))
        list(program.train(lambda: False))
        weights.append(program.trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["head.weight"], weights[2]["head.weight"])


def test_run_folders_never_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my text.txt").write_bytes(b"abcdefgh" * 99)
    monkeypatch.chdir(tmp_path)
    recipe = Recipe(batch=4, time=8, steps=1)
    folders = [Program(Options(tmp_path / "my text.txt", recipe=recipe)).folder for _ in range(2)]
    assert folders == [Path("runs/my-text"), Path("runs/my-text-2")]
    assert all((tmp_path / folder).is_dir() for folder in folders)


def test_nothing_is_made_for_a_run_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"short")
    with pytest.raises(InputError, match="do not make 64 rows"):
        Program(Options(tmp_path / "text", out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_is_kept_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr("whorl.text.program.SAVE_STEPS", 4)
    (tmp_path / "text").write_bytes(b"abcdefgh" * 99)
    options = Options(tmp_path / "text", recipe=Recipe(batch=4, time=8, steps=10), out=tmp_path / "run")
    kept = [[path.name for path in (tmp_path / "run").iterdir()] for _ in Program(options).train(lambda: False)]
    assert kept == [[]] * 4 + [["checkpoint-4"]] * 4 + [["checkpoint-8"]] * 2
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-10"]
