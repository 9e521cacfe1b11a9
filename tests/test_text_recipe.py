"""Recipes and presets: schedules do what they say, budgets end, and what cannot be carried out is refused."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest

from whorl.errors import InputError
from whorl.text.options import PRESETS, Options
from whorl.text.recipe import Recipe


def rates(*finished: float, **recipe: object) -> list[float]:
    made = Recipe(learning_rate=0.2, **recipe)
    return [made.rate(where, 0) for where in finished]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.0, 0.1, 0.2, 0.15, 0.1, 0.0]),
        ("cosine", [0.0, 0.1, 0.2, 0.1 + 0.1 * math.cos(math.pi / 4), 0.1, 0.0]),
        ("constant", [0.0, 0.1, 0.2, 0.2, 0.2, 0.2]),
    ],
)
def test_the_rate_rises_in_a_line_and_then_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    found = rates(0.0, 0.125, 0.25, 0.4375, 0.625, 1.0, warmup=0.25, schedule=schedule)
    assert found == pytest.approx(expected, abs=1e-15)


def test_the_rate_decays_by_epochs_as_zaremba_et_al_have_it() -> None:
    recipe = Recipe(learning_rate=20.0, warmup=0.0, schedule="decay", hold=4, decay=0.5, epochs=13, steps=None)
    found = [recipe.rate(recipe.finished(0, epoch, 0), epoch) for epoch in range(13)]
    assert found == [20 * 0.5 ** max(epoch + 1 - 4, 0) for epoch in range(13)]
    assert recipe.rate(0.3, 4.99) == recipe.rate(0.3, 4.0) == 10.0


def test_a_training_without_warmup_begins_at_its_peak() -> None:
    assert rates(0.0, warmup=0.0) == [0.2]


def test_a_training_ends_with_the_first_of_its_budgets() -> None:
    assert Recipe(steps=10).finished(5, 1e9, 1e9) == 0.5
    assert Recipe(steps=None, minutes=2).finished(10**9, 1e9, 30) == 0.25
    assert Recipe(steps=None, epochs=4).finished(10**9, 1, 1e9) == 0.25
    assert Recipe(steps=10, epochs=5, minutes=2).finished(5, 3, 84) == 0.7
    assert Recipe(steps=10, epochs=5, minutes=2).finished(5, 4, 84) == 0.8
    assert Recipe(steps=10, epochs=5, minutes=2).finished(10, 0, 0) == 1


WRONG = [
    ({"batch": 0}, "batch is 0"),
    ({"batch": 2.0}, "batch is 2.0"),
    ({"time": -1}, "time is -1"),
    ({"steps": 0}, "steps is 0"),
    ({"save_steps": 0}, "save_steps is 0"),
    ({"minutes": math.nan}, "minutes is nan"),
    ({"epochs": 0.0}, "epochs is 0.0"),
    ({"learning_rate": math.inf}, "learning_rate is inf"),
    ({"init": 0.0}, "init is 0.0"),
    ({"clip": -1.0}, "clip is -1.0"),
    ({"clip": math.nan}, "clip is nan"),
    ({"seed": 0.5}, "seed is 0.5"),
    ({"warmup": 1.0}, "warmup is 1.0"),
    ({"steps": None}, "never ends"),
    ({"precision": "fp8"}, "fp32, bf16"),
    ({"optimizer": "lion"}, "adamw, sgd"),
    ({"schedule": "stairs"}, "linear, cosine, constant, decay"),
    ({"accumulate": 3}, "64 rows do not make 3 equal parts"),
    ({"hold": 3}, "this one is linear"),
    ({"schedule": "decay"}, "needs a factor"),
    ({"schedule": "decay", "decay": 0.0}, "decay is 0.0"),
    ({"clip": 0.0, "clip_rows": True}, "clip is 0"),
    ({"optimizer": "sgd", "beta1": 0.5}, "are of adamw"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[" ".join(wrong) for wrong, _ in WRONG])
def test_recipes_that_cannot_be_carried_out_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Recipe(**wrong)


def test_what_is_given_takes_the_place_of_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "small", dict(kind="words", units=99, epochs=3, clip=5.0, batch=20))
    options = Options.of("small", units=7, sample=3)
    assert (options.source.kind, options.architecture.units, options.sample) == ("words", 7, 3)
    assert (options.recipe.batch, options.recipe.clip) == (20, 5.0)
    assert (options.recipe.steps, options.recipe.epochs, options.recipe.minutes) == (None, 3, None)
    assert Options.of() == Options()


@pytest.mark.parametrize(
    ("given", "budgets"),
    [
        ({}, (None, 3, None)),
        ({"steps": 5}, (5, None, None)),
        ({"minutes": 2.0}, (None, None, 2.0)),
        ({"steps": 5, "minutes": 2.0}, (5, None, 2.0)),
    ],
)
def test_a_budget_that_is_given_is_the_only_one(
    given: dict[str, object], budgets: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "small", dict(epochs=3))
    recipe = Options.of("small", **given).recipe
    assert (recipe.steps, recipe.epochs, recipe.minutes) == budgets
    assert Options.of(minutes=1.0).recipe.steps is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_only_what_differs(name: str) -> None:
    made, usual = Options.of(name, path=Path("text")), Options()
    for part in ("source", "architecture", "recipe"):
        values, others = asdict(getattr(made, part)), asdict(getattr(usual, part))
        for field in PRESETS[name].keys() & values.keys():
            assert values[field] == PRESETS[name][field]
            assert values[field] != others[field], f"{field} of the preset {name} is the default"


@pytest.mark.parametrize(
    ("preset", "given", "message"),
    [("imaginary", {}, "preset is 'imaginary'"), (None, {"unit": 5}, "no option unit"), (None, {"sample": -1}, "-1")],
)
def test_options_that_there_are_not_are_refused(preset: str | None, given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options.of(preset, **given)
