"""The model: what it is made of, what it predicts, how that is measured, and what it writes."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from whorl.bench import baseline
from whorl.errors import InputError
from whorl.text import model as module
from whorl.text.evaluation import measure, score
from whorl.text.model import LAYERS, OPTIONS, SETTLED, Architecture, LanguageModel
from whorl.text.sampling import encoded, sample
from whorl.text.vocabulary import Vocabulary

TINY = Architecture(tokens=7, embedding=3, units=5, layers=2)


def tiny(**others: object) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(replace(TINY, **others)).double()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(TINY.tokens, (count,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("cell", LAYERS)
def test_any_cell_of_the_library_reads_in_windows_as_it_reads_whole(cell: str) -> None:
    model, text = tiny(cell=cell), tokens(24).long().view(12, 2)
    whole, finals = model(text)
    first, states = model(text[:5])
    second, last = model(text[5:], states)
    torch.testing.assert_close(torch.cat([first, second]), whole, rtol=1e-12, atol=1e-12)
    for one, other in zip(last, finals, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


CELLS = {"reset_after": "gru", "activation": "rnn_tanh", "clip": "slstm"}  # those of the options that are not LSTM's
VALUES = {"bias": False, "proj_size": 3, "recurrent_dropout_mode": "step", "zoneout": {"c": 0.5}, "layer_norm": "x c",
          "peephole": True, "coupled": True, "reset_after": False, "activation": "relu",
          "recurrent_activation": "hard_sigmoid", "memory": "recompute"}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_reaches_the_layers(option: str) -> None:
    value = VALUES.get(option, 0.5)
    layers = tiny(cell=CELLS.get(option, "lstm"), options={option: value}).recurrent
    assert getattr(layers, option) == value != getattr(tiny().recurrent, option)


def test_dropout_acts_before_between_and_after_the_layers() -> None:
    model, seen = tiny(dropout=0.25, units=40, embedding=40), {}
    for name in ("recurrent", "head"):
        module = getattr(model, name)
        module.register_forward_pre_hook(lambda module, inputs, name=name: seen.update({name: inputs[0]}))
    text = tokens(2000).long().view(100, 20)
    model(text)
    sigma = math.sqrt(0.25 * 0.75 / seen["head"].numel())
    for name in ("recurrent", "head"):
        assert abs((seen[name] == 0).double().mean().item() - 0.25) < 5 * sigma
    assert model.recurrent.dropout == 0.25
    dropped = model(text)[0]
    model.eval()
    torch.testing.assert_close(model(text)[0], tiny(units=40, embedding=40)(text)[0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(model(text)[0], dropped)


def test_a_tied_head_is_the_embedding() -> None:
    model, plain = tiny(tied=True, embedding=5), tiny(embedding=5)
    assert model.head.weight is model.embedding.weight
    count, others = (sum(p.numel() for p in each.parameters()) for each in (model, plain))
    assert count == others - 7 * 5
    text = tokens(8).long().view(4, 2)
    logits, _ = model(text)
    outputs, _ = model.recurrent(model.embedding(text))
    torch.testing.assert_close(logits, outputs @ model.embedding.weight.t() + model.head.bias, rtol=1e-12, atol=1e-12)
    assert tiny(tied=True, options={"proj_size": 3}).head.weight.shape == (7, 3)
    with pytest.raises(InputError, match="embedding is 3, the output 5; write --embedding 5"):
        tiny(tied=True)


def test_an_lstm_begins_by_remembering() -> None:
    layer = tiny(units=2, layers=1).recurrent
    assert layer.bias_ih_l0.tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert layer.bias_hh_l0.tolist() == [0] * 8
    coupled = tiny(units=2, layers=1, options={"coupled": True}).recurrent
    assert coupled.bias_ih_l0.tolist() == [0] * 6


def test_a_model_starts_from_the_frequencies_of_its_text() -> None:
    model, text = tiny(), torch.tensor([0, 0, 0, 2, 2, 6], dtype=torch.uint8)
    with torch.no_grad():
        model.head.weight.zero_()
        model.start_from(text)
        logits, _ = model(torch.tensor([[3]]))
    expected = torch.tensor([4, 1, 3, 1, 1, 1, 2]) / 13  # each counted once more
    assert torch.allclose(torch.softmax(logits[0, 0], 0), expected.double(), rtol=1e-6)


def test_every_parameter_can_be_drawn_from_one_range() -> None:
    model = tiny()
    model.draw(0.04)
    for parameter in model.parameters():
        assert 0.02 < parameter.abs().max() <= 0.04


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"units": 0}, "units is 0"),
        ({"layers": 1001}, "layers is 1001"),
        ({"cell": "transformer"}, "cell is 'transformer': write one of .*lstm"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"engine": "steam"}, "engine is 'steam'"),
        ({"options": {"magic": 5}}, "magic is no option of the layers here: the options are bias"),
        ({"options": {"bias": 1}}, "bias is 1: write true or false"),
        ({"options": {"proj_size": "x"}}, "proj_size is 'x'"),
        ({"options": {"zoneout": 2}}, "zoneout is 2: write a probability"),
        ({"options": {"reset_after": False}}, "reset_after is False, which LSTM does not take: GRU takes it"),
        ({"cell": "mgu", "options": {"activation": "relu"}}, "Recurrent does not take: write it in the step"),
        *(({"options": {name: 1}}, f"{name} is no option of the layers here: {SETTLED[name]}") for name in SETTLED),
    ],
)
def test_models_that_cannot_be_made_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny(**wrong)


def test_the_score_is_the_mean_over_rows_that_start_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.text.evaluation.SHORTEST", 100)
    monkeypatch.setattr("whorl.text.evaluation.WINDOW", 33)
    model, text = tiny(dropout=0.5), tokens(350)
    model.eval()
    rows = [text[start : start + 117].long() for start in (0, 116, 232)]
    losses = [model.loss(row[:-1, None], row[1:, None], None)[0].item() for row in rows]
    model.train()
    result = score(model, text)
    assert model.training
    assert result.tokens == 348
    assert result.nats == pytest.approx(sum(losses) / 3, rel=1e-12)
    model.eval()
    whole = model.loss(text[:-1, None].long(), text[1:, None].long(), None)[0].item()
    assert score(model, text, rows=1).nats == pytest.approx(whole, rel=1e-12)
    monkeypatch.setattr("whorl.text.evaluation.LARGEST", 117)
    assert score(model, text).nats == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize(
    ("unit", "text"),
    [("word", "perplexity 4.00"), ("character", "2.000 bits per character"), ("byte", "2.000 bits per byte")],
)
def test_a_loss_is_told_as_people_compare_it(unit: str, text: str) -> None:
    assert measure(math.log(4), unit) == text


def biased() -> LanguageModel:
    """A model that draws from the same distribution always: it likes 1 best, then 3, never 4."""
    model = tiny()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor([0.0, 3.0, 0.0, 2.0, -99.0, 0.0, 0.0]))
    return model


START = torch.tensor([4])


def test_a_sample_follows_the_model_and_its_seed() -> None:
    model, count = biased(), 1000
    drawn = sample(model, START, count, temperature=1.0, seed=3)
    assert torch.equal(drawn, sample(model, START, count, temperature=1.0, seed=3))
    assert not torch.equal(drawn, sample(model, START, count, temperature=1.0, seed=4))
    chances = torch.softmax(model.head.bias.detach(), 0)
    sigmas = (chances * (1 - chances) / count).sqrt()
    assert ((torch.bincount(drawn, minlength=7) / count - chances).abs() <= 5 * sigmas).all()
    assert model.training


@pytest.mark.parametrize("temperature", [0.0, 1e-308, 0.01])
def test_a_cold_sample_takes_the_likeliest(temperature: float) -> None:
    assert sample(biased(), START, 50, temperature=temperature).tolist() == [1] * 50


@pytest.mark.parametrize(("top_k", "known"), [(1, {1}), (2, {1, 3}), (7, {0, 1, 2, 3, 5, 6}), (99, {0, 1, 2, 3, 5, 6})])
def test_top_k_keeps_the_likeliest(top_k: int, known: set[int]) -> None:
    assert set(sample(biased(), START, 300, temperature=2.0, top_k=top_k).tolist()) == known


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_sample_carries_its_states(cell: str) -> None:
    model, prompt = tiny(cell=cell), torch.tensor([1, 2, 3])
    with torch.no_grad():
        written = sample(model, prompt, 12, temperature=0.0)
        logits, _ = model(torch.cat([prompt, written])[:, None])
    assert torch.equal(logits[2:-1, 0].argmax(-1), written)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": START[:0]}, "prompt is empty"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"length": -1}, "length is -1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_samples_that_cannot_be_drawn_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sample(**{"model": biased(), "prompt": START, "length": 1} | wrong)


def test_a_model_that_diverged_is_told() -> None:
    model = biased()
    with torch.no_grad():
        model.head.bias[2] = math.nan
    with pytest.raises(InputError, match="predicts no numbers: its training diverged"):
        sample(model, START, 1)


def test_a_prompt_that_is_no_text_is_refused() -> None:
    assert encoded(Vocabulary("bytes"), b"\xff").tolist() == [255]
    with pytest.raises(InputError, match="prompt is not UTF-8 .at byte 1"):
        encoded(Vocabulary("characters", "ab"), b"a\xff")


def test_a_widened_tensor_is_the_tensor_and_zeros_and_so_is_its_gradient() -> None:
    tensor = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    wide = module._Widened.apply(tensor, 8, torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide[..., :5], tensor.float())
    assert torch.equal(wide[..., 5:], torch.zeros(3, 2, 3))
    assert torch.autograd.gradcheck(lambda x: module._Widened.apply(x, 8, torch.float64), tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 13, 16, 650])
def test_the_head_is_right_at_any_width(width: int) -> None:
    head, x = torch.nn.Linear(width, 24, device="cuda"), torch.randn(7, 3, width, device="cuda")
    weights = torch.randn(7, 3, 24, device="cuda").bfloat16()

    def results(product: Callable[..., torch.Tensor], layer: torch.nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=x.dtype == torch.float32):
            y = product(x, layer)
        return [y, *torch.autograd.grad((y * weights).sum(), (x, layer.weight, layer.bias))]

    def called(x: torch.Tensor, layer: torch.nn.Linear) -> torch.Tensor:
        return layer(x)

    truth = results(called, copy.deepcopy(head).double(), x.double())
    plain, found = results(called, head, x), results(module._product, head, x)
    assert found[0].dtype == torch.bfloat16
    for mine, other, true in zip(found, plain, truth, strict=True):
        assert mine.shape == true.shape
        bound = 2 * baseline.error(other, true) + 4 * torch.finfo(torch.bfloat16).eps
        assert baseline.error(mine, true) <= bound
