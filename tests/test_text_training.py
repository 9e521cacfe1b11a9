"""Training: a step is what plain torch does, states carry over exactly, and reports say what happened."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from whorl.errors import InputError
from whorl.text import training
from whorl.text.model import Architecture, LanguageModel
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.training import KEPT, Trainer

TINY = Architecture(tokens=7, embedding=3, units=5, layers=2)
RECIPE = Recipe(batch=2, time=8, steps=5)


def tiny(**others: object) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(replace(TINY, **others)).double()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(TINY.tokens, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def tiny_trainer(recipe: Recipe = RECIPE, text: int = 999, **others: object) -> Trainer:
    return Trainer(tiny(**others), Streams(tokens(text), recipe.batch), recipe)


def error(model: LanguageModel, other: LanguageModel) -> float:
    """The largest relative 2-norm of the difference of two parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(((one - two).norm() / two.norm()).item() for one, two in pairs)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("optimizer, decay", [("adamw", 0.1), ("sgd", 0.1), ("sgd", 0.0)])
def test_a_step_is_what_plain_torch_does(optimizer: str, decay: float, clip: float) -> None:
    recipe = replace(RECIPE, optimizer=optimizer, clip=clip, weight_decay=decay, warmup=0.0, learning_rate=0.1)
    trainer, model, states = tiny_trainer(recipe), tiny(), None
    if optimizer == "sgd":
        plain: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), weight_decay=decay)
    else:
        plain = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=decay)
    for step in range(5):
        trainer.advance()
        loss, states = model.loss(*trainer.streams.window(8 * step, 8), states)
        states = tuple(state.detach() for state in states)
        plain.zero_grad()
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, clip / (norm.item() + 1e-6)) if clip else 1.0  # torch's 1e-6
        plain.param_groups[0]["lr"] = 0.1 * (1 - (step + 0.5) / 5)
        plain.step()
        assert trainer.losses[step].item() == pytest.approx(loss.item(), rel=1e-12)
        assert not clip or clip < norm
    assert error(trainer.model, model) < 1e-12


@pytest.mark.parametrize("parts, others", [(2, {}), (3, {}), (6, dict(clip=0.05, clip_rows=True))])
def test_a_batch_in_parts_gives_what_it_gives_whole(parts: int, others: dict[str, object]) -> None:
    recipe = replace(RECIPE, batch=6, steps=30, **others)
    whole, split = tiny_trainer(recipe, 300), tiny_trainer(replace(recipe, accumulate=parts), 300)
    for _ in range(12):  # more than one epoch
        assert split.advance().item() == pytest.approx(whole.advance().item(), rel=1e-12)
    assert error(split.model, whole.model) < 1e-12


@pytest.mark.parametrize("time", [1, 7, 13, 40])
def test_a_stream_in_windows_loses_what_it_loses_whole(time: int) -> None:
    model, streams, states, total = tiny(), Streams(tokens(3 * 40 + 1), 3), None, 0.0
    whole = model.loss(*streams.window(0, 40), None)[0].item()
    for start in range(0, 40, time):
        inputs, targets = streams.window(start, time)
        loss, states = model.loss(inputs, targets, states)
        total += loss.item() * targets.numel()
    assert total / len(streams) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("cell", ["lstm", "gru", "slstm"])
def test_training_carries_the_states_and_starts_the_rows_again_at_zero(cell: str) -> None:
    recipe = replace(RECIPE, steps=3, learning_rate=1e-300, weight_decay=0.0)
    trainer = tiny_trainer(recipe, 2 * 20 + 1, cell=cell)
    model, streams = trainer.model, trainer.streams
    losses = [trainer.advance().item() for _ in range(3)]
    both, _ = model.loss(*streams.window(0, 16), None)
    assert (losses[0] + losses[1]) / 2 == pytest.approx(both.item(), rel=1e-12)
    assert losses[1] != pytest.approx(model.loss(*streams.window(8, 8), None)[0].item(), rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)  # 20 columns hold two windows of 8
    assert trainer.epoch == 1.5


def test_no_gradient_crosses_a_window() -> None:
    trainer = tiny_trainer(Recipe(batch=4, time=8, steps=3, accumulate=2))
    trainer.advance()
    assert len(trainer.states) == 2
    assert not any(state.requires_grad for states in trainer.states for state in states)


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone() -> None:
    def losses(seed: int, disturbed: bool = False) -> list[float]:
        trainer = tiny_trainer(replace(RECIPE, seed=seed, learning_rate=1e-300, weight_decay=0.0), dropout=0.5)
        found = []
        for _ in range(3):
            trainer.column, trainer.states = 0, [None]  # the same window each time
            found.append(trainer.advance().item())
            torch.rand(int(disturbed))
        return found

    assert losses(5) == losses(5, disturbed=True)
    assert len({*losses(5), *losses(6)}) == 6


def test_minutes_end_the_training_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(ticks) / 8)  # each look at the clock takes 1/8 s
    trainer = tiny_trainer(replace(RECIPE, steps=None, minutes=0.1))
    reports = list(trainer.run(lambda: False))
    assert reports[-1].finished == 1
    assert reports[-1].step == trainer.step > 1
    assert 6 <= trainer.seconds <= 6.25


def test_a_report_holds_the_mean_of_the_last_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_SECONDS", math.inf)
    recipe = replace(RECIPE, steps=KEPT + 20)
    trainer = tiny_trainer(recipe)
    losses = [trainer.advance().item() for _ in range(KEPT + 20)]
    reports = list(tiny_trainer(recipe).run(lambda: False, due=lambda step: step in (1, 3, KEPT)))
    assert [report.step for report in reports] == [1, 3, KEPT, KEPT + 20]
    for report in reports:
        last = losses[max(0, report.step - KEPT) : report.step]
        assert report.nats == pytest.approx(math.fsum(last) / len(last), rel=1e-12)
        assert report.finished == report.step / (KEPT + 20)
        assert report.epoch == report.step / (998 // 2 // 8)
        assert report.rate == pytest.approx(recipe.rate((report.step - 0.5) / (KEPT + 20), 0))


def test_speed_leaves_out_what_comes_between_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(training.time, "perf_counter", lambda: next(clock))  # a second passes with each look
    for report in tiny_trainer().run(lambda: False):  # one look after a step, one for the report, one after it
        for _ in range(1000):
            next(clock)
        assert report.seconds == report.step * 2 + (report.step - 1) * 1001
        assert report.speed == 16 / 2
        assert report.left == pytest.approx(report.seconds / report.step * (5 - report.step))


def test_a_stop_ends_the_training_after_the_step_with_a_report() -> None:
    asked = itertools.count(1)
    trainer = tiny_trainer(replace(RECIPE, steps=10**9))
    *_, report = trainer.run(lambda: next(asked) == 3)
    assert report.step == trainer.step == 3


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InputError, match="makes 2 rows of 20 tokens, shorter than a window of 21"):
        tiny_trainer(replace(RECIPE, time=21), 41)


def cuda_trainer(recipe: Recipe, text: int = 999, **options: object) -> Trainer:
    """In float64, where the order of sums is of no account."""
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, **options)).double().cuda()
    return Trainer(model, Streams(tokens(text).cuda(), recipe.batch), recipe)


CAPTURED = {
    "plain": {},
    "dropout": dict(dropout=0.3, tied=True, embedding=5),
    "options": dict(cell="gru", options=dict(recurrent_dropout=0.3, zoneout=0.1, weight_drop=0.2)),
    "parts": dict(recipe=dict(accumulate=2)),
    "sgd": dict(recipe=dict(optimizer="sgd", clip=0.05)),
    "sgd by rows": dict(recipe=dict(optimizer="sgd", clip=0.05, clip_rows=True, accumulate=2)),
    "sgd with decay": dict(recipe=dict(optimizer="sgd", clip=0.05, weight_decay=0.1)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CAPTURED)
def test_a_captured_step_is_the_eager_one(kind: str) -> None:
    options = dict(CAPTURED[kind])
    usual = dict(steps=30, learning_rate=0.1, weight_decay=0.0)
    recipe = replace(RECIPE, **usual | options.pop("recipe", {}))
    captured = cuda_trainer(recipe, 2 * 100, **options)  # 12 steps an epoch: the rows start again before and after
    eager = cuda_trainer(replace(recipe, eager=True), 2 * 100, **options)
    assert captured.captured
    assert not eager.captured
    for _ in range(28):
        assert captured.advance().item() == pytest.approx(eager.advance().item(), rel=1e-12)
    assert captured._graph is not None
    assert captured.losses.tolist() == pytest.approx(eager.losses.tolist(), rel=1e-12)
    assert error(captured.model, eager.model) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3, "tied": True, "embedding": 5}])
@pytest.mark.parametrize("eager", [False, True])
def test_no_step_waits_for_the_gpu(options: dict[str, object], eager: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, **options)).cuda()
    trainer = Trainer(model, Streams(tokens(9999).cuda(), 2), replace(RECIPE, steps=100, eager=eager))
    for _ in range(5):
        trainer.advance()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            trainer.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
