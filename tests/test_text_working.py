"""Steps on a copy of the parameters: those of autocast, whatever is widened, captured or taken by several processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from comparison import error
from whorl.text import working as working_module
from whorl.text.checkpoint import capture, restore
from whorl.text.data import Source
from whorl.text.group import ALONE, Group
from whorl.text.model import Architecture, LanguageModel
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.training import Trainer
from whorl.text.vocabulary import Vocabulary
from whorl.text.working import Working, works

TINY = Architecture(tokens=11, embedding=6, units=10, layers=2)
RECIPE = Recipe(
    batch=3, time=7, steps=40, optimizer="sgd", learning_rate=0.5, schedule="constant", warmup=0.0, weight_decay=0.0,
    precision="bf16", clip=0.05,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gru": dict(cell="gru"),
    "options": dict(options=dict(peephole=True, zoneout=dict(c=0.2), coupled=True, bias=False)),
    "layer norm": dict(options=dict(layer_norm=True)),
    "projection": dict(options=dict(proj_size=4)),
    "relu": dict(cell="rnn_relu", layers=1),
}


def model(device: str = "cpu", **others: Any) -> LanguageModel:
    torch.manual_seed(0)
    made = LanguageModel(replace(TINY, **others))
    made.draw(0.5)
    return made.to(device)


def text(count: int = 999, device: str = "cpu") -> torch.Tensor:
    return torch.randint(TINY.tokens, (count,), generator=torch.Generator().manual_seed(1)).to(device)


def window(time: int = 7, batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return Streams(text(), batch).window(0, time)


def differences(one: LanguageModel, other: LanguageModel) -> dict[str, float]:
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    return {name: error(mine, its) for (name, mine), its in pairs}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_a_step_in_float64_is_that_of_plain_torch(kind: str, padded: bool, rows: bool) -> None:
    made, plain = model(**MODELS[kind]).double(), model(**MODELS[kind]).double()
    recipe = replace(RECIPE, clip_rows=rows)
    working, states = Working(made, ALONE, torch.float64, padded), None
    other = Trainer(plain, Streams(text(), 3), replace(recipe, precision="fp32"))
    assert other._working is None
    for step in range(4):
        torch.manual_seed(recipe.seed * 1_000_003 + step)
        inputs, targets = Streams(text(), 3).window(7 * step, 7)
        loss, states = working.learn(inputs, targets, states, torch.tensor(0.5, dtype=torch.double), recipe)
        assert loss.item() == pytest.approx(other.advance().item(), rel=1e-12)
        for mine, its in zip(states, other.states[0] or (), strict=True):
            assert error(mine[..., : its.shape[-1]], its) <= 1e-12
    found = differences(made, plain)
    assert max(found.values()) <= 1e-12, found


@pytest.mark.parametrize("kind", ["plain", "gru", "options", "layer norm"])
def test_what_is_widened_stays_zero(kind: str) -> None:
    made = model(**MODELS[kind])
    working = Working(made, ALONE, padded=True)
    assert working.units == (10, 16)
    assert sum(copy.numel() for copy in working._copies) > sum(pair.own.numel() for pair, _ in working._moved)
    for _ in range(3):
        working.learn(*window(), None, torch.tensor(0.5), RECIPE)
    outside = [copy.detach().clone() for copy in working._copies]
    for pair, of in working._moved:
        assert torch.equal(pair.copy, pair.own.to(torch.bfloat16))
        pair.within(outside[of]).zero_()
    assert not any(copy.any() for copy in outside)
    outside = [copy.grad.clone() for copy in working._copies if copy.grad is not None]
    for pair, of in working._moved:
        pair.within(outside[of]).zero_()
    inside = [working._first[of].rows_within(grad) for of, grad in enumerate(outside)]
    assert not any(grad.any() for grad in inside)
    assert any(grad.any() for grad in outside) == (kind == "layer norm")  # of rows of padding, which nobody reads


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_in_bfloat16_are_as_good_as_those_of_autocast(kind: str) -> None:
    made, exact = model(**MODELS[kind]), model(**MODELS[kind]).double()
    inputs, targets = window()
    torch.manual_seed(3)
    got = Working(made, ALONE, padded=True).gradients(inputs, targets)
    torch.manual_seed(3)
    truth = Working(exact, ALONE, torch.float64, padded=False).gradients(inputs, targets)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = made.loss(inputs, targets, None)
    usual = dict(zip(dict(made.named_parameters()), torch.autograd.grad(loss, list(made.parameters())), strict=True))
    usual["loss"] = loss.detach()
    assert got.keys() == truth.keys() == usual.keys()
    for name, true in truth.items():
        bound = 2 * error(usual[name], true) + 4 * torch.finfo(torch.bfloat16).eps
        assert error(got[name], true) <= bound, name


@pytest.mark.parametrize(
    "recipe, others, taken",
    [
        ({}, {}, True),
        (dict(precision="fp32"), {}, False),
        (dict(weight_decay=0.1), {}, False),
        (dict(optimizer="adamw"), {}, False),
        (dict(accumulate=3), {}, False),
        ({}, dict(tied=True, embedding=10), False),
    ],
)
def test_which_steps_are_taken_on_a_copy(recipe: dict[str, Any], others: dict[str, Any], taken: bool) -> None:
    chosen = replace(RECIPE, **recipe)
    made = model(**others)
    assert works(made, chosen) == taken
    assert (Trainer(made, Streams(text(), 3), chosen)._working is not None) == taken
    assert Trainer(made, Streams(text(), 3), chosen, copies=False)._working is None


def test_what_is_loaded_into_the_model_is_what_the_first_step_reads() -> None:
    trainer, other = (Trainer(model(), Streams(text(), 3), RECIPE) for _ in range(2))
    before = other.advance().item()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(4)
        scaled = trainer.model.loss(*trainer.streams.window(0, 7), None)[0].item()
    assert trainer.advance().item() == pytest.approx(scaled, rel=2e-2)
    assert before != pytest.approx(scaled, rel=0.1)


@pytest.mark.parametrize("kind", ["plain", "gru", "projection"])
def test_a_checkpoint_has_no_more_units_than_the_model(kind: str) -> None:
    def made() -> Trainer:
        trainer = Trainer(model(**MODELS[kind]), Streams(text(), 3), RECIPE)
        trainer._working = Working(trainer.model, ALONE, padded=True)
        return trainer

    trainer, other = made(), made()
    for _ in range(3):
        trainer.advance()
    found = capture(
        trainer, Vocabulary("characters", "abcdefghijk"), Source(Path("a text"), "characters"), "its digest"
    )
    assert found.training["states.0"].shape[-1] == trainer.model.head.weight.shape[1]
    other.model.load_state_dict(found.weights)
    restore(other, found)
    for _ in range(3):
        assert other.advance().item() == trainer.advance().item()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_a_captured_step_on_a_copy_is_the_eager_one(kind: str) -> None:
    trainers = []
    for eager in (False, True):
        made = model("cuda", dropout=0.3, **MODELS[kind])
        recipe = replace(RECIPE, eager=eager, clip_rows=True)
        trainers.append(Trainer(made, Streams(text(200, "cuda"), 3), recipe))
        assert trainers[-1]._working is not None
    for _ in range(25):
        one, other = (trainer.advance().item() for trainer in trainers)
        assert one == other  # bit for bit: nothing depends on the order in which threads come
    assert trainers[0]._graph is not None
    assert differences(trainers[0].model, trainers[1].model) == dict.fromkeys(
        dict(trainers[0].model.named_parameters()), 0.0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("small", [4, 1 << 16])
def test_a_step_that_exchanges_is_captured(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_module, "_SMALL", small)  # above it gradients travel alone
    own = torch.device("cuda", torch.cuda.current_device())
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1, device_id=own)
    trainers = []
    for eager in (False, True):
        recipe = replace(RECIPE, eager=eager, clip_rows=True)
        trainers.append(Trainer(model("cuda", dropout=0.3), Streams(text(200, "cuda"), 3), recipe, Group(joined=True)))
    try:
        for _ in range(25):
            one, other = (trainer.advance().item() for trainer in trainers)
            assert one == other
        assert trainers[0]._graph is not None
        assert differences(trainers[0].model, trainers[1].model) == dict.fromkeys(
            dict(trainers[0].model.named_parameters()), 0.0
        )
    finally:
        trainers[0].close()
        distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "gru", "options"])
def test_on_a_gpu_gradients_are_as_good_as_those_of_autocast(kind: str) -> None:
    made, exact = model("cuda", **MODELS[kind]), model("cuda", engine="reference", **MODELS[kind]).double()
    inputs, targets = (part.cuda() for part in window())
    found = []
    for each in (Working(made, ALONE), Working(exact, ALONE, torch.float64)):
        torch.manual_seed(3)
        found.append(each.gradients(inputs, targets))
    torch.manual_seed(3)
    with torch.autocast("cuda", torch.bfloat16):
        loss, _ = made.loss(inputs, targets, None)
    usual = dict(zip(dict(made.named_parameters()), torch.autograd.grad(loss, list(made.parameters())), strict=True))
    usual["loss"] = loss.detach()
    for name, true in found[1].items():
        bound = 2 * error(usual[name], true) + 4 * torch.finfo(torch.bfloat16).eps
        assert error(found[0][name], true) <= bound, name
