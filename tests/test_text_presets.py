"""The presets of the Penn Treebank: Zaremba, Sutskever and Vinyals (2014), as TensorFlow's tutorial has them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from whorl.commands import main
from whorl.errors import InputError
from whorl.text.data import read
from whorl.text.model import LanguageModel
from whorl.text.options import FILES, Options
from whorl.text.streams import Streams
from whorl.text.training import Trainer

NAMES = ("train", "valid", "test")
# As ptb_word_lm.py has them: scale of the first parameters, rate, largest norm, steps, units, epochs before the rate
# decays, epochs, share that is kept, decay.
TUTORIAL = {
    "ptb-small": (0.1, 1.0, 5, 20, 200, 4, 13, 1.0, 0.5),
    "ptb-medium": (0.05, 1.0, 5, 35, 650, 6, 39, 0.5, 0.8),
    "ptb-large": (0.04, 1.0, 10, 35, 1500, 14, 55, 0.35, 1 / 1.15),
}


@pytest.fixture
def treebank(tmp_path: Path) -> Path:
    """A folder as the Penn Treebank's: 2,000 words and some to train on, of 60 and `<unk>`."""
    folder, chance = tmp_path / "data", torch.Generator().manual_seed(0)
    folder.mkdir()
    for name, lines in zip(NAMES, (300, 30, 30), strict=True):
        numbers = torch.randint(60, (lines, 7), generator=chance).pow(2).div(60).int().tolist()
        text = "".join(
            " ".join(["", *(f"w{number}" if number else "<unk>" for number in row), "\n"]) for row in numbers
        )
        (folder / f"ptb.{name}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("preset", TUTORIAL)
def test_a_preset_is_the_tutorials(preset: str, treebank: Path) -> None:
    scale, rate, norm, steps, units, hold, epochs, kept, decay = TUTORIAL[preset]
    made = Options.of(preset, path=treebank)
    shape, recipe = made.architecture, made.recipe
    assert (shape.embedding, shape.units, shape.layers, shape.tied) == (units, units, 2, False)
    assert shape.dropout == pytest.approx(1 - kept)
    assert (recipe.init, recipe.batch, recipe.time, recipe.optimizer) == (scale, 20, steps, "sgd")
    assert recipe.learning_rate == rate * steps  # the tutorial's loss is the sum over the steps, this one the mean
    assert recipe.clip == pytest.approx(norm / steps)
    assert (recipe.hold, recipe.epochs, recipe.steps, recipe.decay) == (hold, epochs, None, decay)
    assert recipe.weight_decay == recipe.warmup == 0
    assert recipe.clip_rows
    rates = [recipe.rate(recipe.finished(0, epoch, 0), epoch) / steps for epoch in range(epochs)]
    assert rates == pytest.approx([rate * decay ** max(epoch + 1 - hold, 0) for epoch in range(epochs)])


def test_a_training_is_what_the_tutorials_own_rules_give(treebank: Path) -> None:
    """Three epochs in float64 beside the tutorial written out: sums over steps, clipped at 5, a rate that decays.

    Its rows begin where whorl's do, but where the batch divides the words, which 20 does not those of the treebank.
    """
    options = Options.of("ptb-small", path=treebank, units=6, embedding=6, batch=7, epochs=3, hold=1, precision="fp32")
    corpus, recipe = read(options.source), options.recipe
    torch.manual_seed(0)
    model = LanguageModel(replace(options.architecture, tokens=len(corpus.vocabulary))).double()
    model.draw(0.7)  # more than the preset's, so that some gradients are clipped
    embedding, head = nn.Embedding(len(corpus.vocabulary), 6).double(), nn.Linear(6, len(corpus.vocabulary)).double()
    layers = nn.LSTM(6, 6, 2).double()
    for mine, other in ((embedding, model.embedding), (layers, model.recurrent), (head, model.head)):
        mine.load_state_dict(other.state_dict())
    trainer = Trainer(model, Streams(corpus.train, 7), recipe)
    length = len(corpus.train) // 7
    rows = corpus.train[: 7 * length].view(7, length).long()
    parameters = [*embedding.parameters(), *layers.parameters(), *head.parameters()]
    clipped = 0
    for epoch in range(3):
        rate, state = 0.5 ** max(epoch + 1 - 1, 0), None
        for start in range((length - 1) // 20):
            window = rows[:, 20 * start : 20 * start + 21].t()
            embedded = embedding(window[:-1])
            embedded.retain_grad()
            outputs, state = layers(embedded, state)
            state = tuple(part.detach() for part in state)
            losses = nn.functional.cross_entropy(head(outputs).flatten(0, 1), window[1:].flatten(), reduction="none")
            loss = losses.sum() / 7
            for parameter in parameters:
                parameter.grad = None
            loss.backward()
            slices = [embedded.grad, *(parameter.grad for parameter in parameters[1:])]  # TensorFlow's IndexedSlices
            norm = torch.cat([part.flatten() for part in slices]).norm().item()
            clipped += norm > 5
            for parameter in parameters:
                parameter.data -= rate * min(1.0, 5 / (norm + 1e-6 * 20)) * parameter.grad
            assert trainer.finished < 1
            assert trainer.advance().item() == pytest.approx(loss.item() / 20, rel=1e-10)
    assert trainer.finished == 1
    assert 0 < clipped < 51
    for mine, other in ((embedding, model.embedding), (layers, model.recurrent), (head, model.head)):
        for one, two in zip(mine.parameters(), other.parameters(), strict=True):
            assert ((one - two).norm() / two.norm()).item() < 1e-10


def test_words_are_numbered_and_lines_end_as_the_treebank_has_it(treebank: Path) -> None:
    corpus = read(Options.of("ptb-small", path=treebank).source)
    assert len(corpus.train) == 300 * 8
    assert corpus.test is not None
    assert (len(corpus.held_out), len(corpus.test)) == (30 * 8, 30 * 8)
    assert {"<eos>", "<unk>", "w1"} <= set(corpus.vocabulary.entries)
    assert corpus.train[7] == corpus.vocabulary.entries.index("<eos>")


def test_a_preset_takes_its_files_from_a_folder(treebank: Path) -> None:
    source = Options.of("ptb-medium", path=treebank).source
    assert [source.path, source.valid, source.test] == [treebank / f"ptb.{name}.txt" for name in NAMES]
    other = treebank / "ptb.test.txt"
    assert Options.of("ptb-medium", path=treebank, valid=other).source.valid == other
    alone = Options.of("ptb-medium", path=other).source
    assert (alone.path, alone.valid, alone.test) == (other, None, None)


@pytest.mark.parametrize("preset", FILES)
def test_a_preset_says_where_its_text_is_from(preset: str, treebank: Path) -> None:
    with pytest.raises(InputError, match=f"no text is given: {preset} learns from a folder with ptb.train.txt, .*http"):
        Options.of(preset)
    (treebank / "ptb.valid.txt").unlink()
    with pytest.raises(InputError, match=r"data has no ptb.valid.txt: .* simple-examples.tgz|simple-examples.tgz"):
        Options.of(preset, path=treebank)


def test_the_command_trains_a_preset_to_its_test_perplexity(
    treebank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        "--units 8 --embedding 8 --batch 4 --time 5 --epochs 2 --precision fp32 --sample 5 --valid-steps 120".split()
    )
    run = ["--data", str(treebank), "--preset", "ptb-small", "--out", str(tmp_path / "run"), *given]
    assert main(["train", *run]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "2,400 words in 1 file to train on, 240 held out" in lines["text"]
    assert lines["time"].endswith(" words/s")
    assert "for 238 steps" in lines["time"]
    assert "test        perplexity " in lines["test"]
    assert "over 239 of 240 words" in lines["test"]
    assert main(["train", str(treebank), *run]) == 2
    assert "the text is given twice" in capsys.readouterr().err
