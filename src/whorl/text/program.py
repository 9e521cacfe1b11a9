"""The program behind `whorl train`: from a text to a trained model in a run folder."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from whorl.errors import InputError
from whorl.text.checkpoint import capture, save
from whorl.text.data import read
from whorl.text.evaluation import Score, score
from whorl.text.model import LanguageModel, Shape, kernel
from whorl.text.sampling import sample
from whorl.text.streams import Streams
from whorl.text.training import Recipe, Report, Trainer

SAVE_STEPS = 500


@dataclass(frozen=True)
class Options:
    """What to train, on which text, where.

    Attributes:
        path: a file or folder of text; None: the source of Python's standard library.
        kind: the tokens, "bytes" or "characters".
        embedding, units, layers: the sizes of the model.
        recipe: how to train.
        device: a torch device, or "auto": the GPU where torch sees one, else the CPU.
        out: the run folder, new or empty; None: a new one under ./runs.
        sample: how many tokens the trained model writes.
    """

    path: Path | None = None
    kind: str = "bytes"
    embedding: int = 64
    units: int = 256
    layers: int = 1
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "auto"
    out: Path | None = None
    sample: int = 600


@dataclass(frozen=True)
class Outcome:
    """What came of a training: the score on held-out text, and text that the model wrote."""

    score: Score
    sample: str


class Program:
    """One training. The folder appears last, when everything else is known to be in order.

    Attributes:
        corpus: the text.
        trainer: the model in training.
        kernel: which kernel runs the recurrent layer in a training step, and why.
        folder: the run folder.
        checkpoint: the latest checkpoint, a folder in it, once there is one.
        saved: the steps it was taken after.
    """

    def __init__(self, options: Options) -> None:
        """Read the text, make the model, make the run folder.

        Raises:
            InputError: options that cannot be carried out.
        """
        if options.sample < 0:
            raise InputError(f"sample is {options.sample}: write a number of {options.kind} from 0 on.")
        device = _device(options.device)
        self.options, self.corpus = options, read(options.path, options.kind)
        torch.manual_seed(options.recipe.seed)
        shape = Shape(len(self.corpus.vocabulary), options.embedding, options.units, options.layers)
        model = LanguageModel(shape)
        model.start_from(self.corpus.train)
        model = model.to(device)
        streams = Streams(self.corpus.train.to(device), options.recipe.batch)
        self.trainer = Trainer(model, streams, options.recipe)
        self.kernel = kernel(model, options.recipe.time, options.recipe.batch, options.recipe.precision)
        self.checkpoint: Path | None = None
        self.saved = 0
        self.folder = _run_folder(options.out, self.corpus.name)

    def train(self, stop: Callable[[], bool]) -> Iterator[Report]:
        """Train until the recipe is carried out or `stop()` is true, with a checkpoint every 500 steps and at the end.

        Raises:
            InputError: a checkpoint cannot be written.
        """
        for report in self.trainer.run(stop):
            yield report
            if report.step >= self.saved + SAVE_STEPS:
                self.save()
        self.save()

    def save(self) -> None:
        """Write a checkpoint and take away those before it."""
        checkpoint = self.folder / f"checkpoint-{self.trainer.step}"
        if checkpoint == self.checkpoint:
            return
        save(checkpoint, capture(self.trainer, self.corpus.vocabulary))
        before, self.checkpoint, self.saved = self.checkpoint, checkpoint, self.trainer.step
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def outcome(self) -> Outcome:
        """The score on the held-out text, and a text that begins at the start of a line."""
        model, recipe, vocabulary = self.trainer.model, self.options.recipe, self.corpus.vocabulary
        lines = vocabulary.kind == "bytes" or "\n" in vocabulary.characters
        prompt = vocabulary.encode(b"\n") if lines else self.corpus.held_out[:1]
        written = vocabulary.decode(sample(model, prompt, self.options.sample, seed=recipe.seed))
        return Outcome(score(model, self.corpus.held_out.to(model.device), recipe.precision), written)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu" or (name == "mps" and torch.backends.mps.is_available()):
        return torch.device(name)
    kind, _, index = name.partition(":")
    if kind == "cuda" and (index or "0").isdecimal() and int(index or "0") < torch.cuda.device_count():
        return torch.device(name)
    raise InputError(f"device is {name!r}, which torch does not see: write auto or cpu; `whorl doctor` says why.")


def _run_folder(out: Path | None, name: str) -> Path:
    """A new or empty folder that can be written to."""
    name = re.sub(r"[^\w.-]", "-", name).strip(".") or "text"
    names = (Path("runs", name if number == 1 else f"{name}-{number}") for number in count(1))
    folder = out or next(path for path in names if not path.exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty: give a new folder with --out, so that nothing is lost.")
        if not os.access(folder, os.W_OK):
            raise InputError(f"{folder} cannot be written to: give another folder with --out.")
    except OSError as error:
        raise InputError(f"cannot make the run folder {folder}: {error.strerror}.") from error
    return folder
