"""The program behind `whorl train`: from a text to a trained model in a run folder."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from whorl import __version__
from whorl.errors import InputError
from whorl.plan import announce
from whorl.text import devices, metrics
from whorl.text.checkpoint import Checkpoint, capture, load, restore, save
from whorl.text.curves import draw
from whorl.text.data import Source, read
from whorl.text.evaluation import Score, score
from whorl.text.folder import Folder, newest
from whorl.text.group import ALONE, is_called, join
from whorl.text.model import LanguageModel, kernel
from whorl.text.options import Options
from whorl.text.sampling import sample
from whorl.text.streams import Streams
from whorl.text.training import KEPT, Report, Trainer

SAVE_STEPS, SAVE_SHARE = 50, 0.03
METRICS, CURVE = "metrics.jsonl", "curve.png"


@dataclass(frozen=True)
class Outcome:
    """What came of a training: the score on held-out text and on test text, and text that the model wrote."""

    valid: Score
    test: Score | None
    sample: str


class Program:
    """One training. The folder appears last, when everything else is known to be in order.

    Attributes:
        options: what is trained.
        corpus: the text.
        trainer: the model in training.
        kernel: which kernel runs the recurrent layers in a training step, and why.
        folder: the run folder.
        checkpoint: the latest checkpoint, a folder in it, once there is one.
        valid: the latest score on held-out text, once there is one.
        speed: tokens per second in this process's training so far, of all processes together, once there is a report.
        group: the processes that train together; the first of them prints, measures and saves.
    """

    def __init__(self, options: Options, resumed: tuple[Path, Checkpoint] | None = None) -> None:
        """Read the text, make the model, make the run folder or take up that of a checkpoint.

        Args:
            options: what to train; for a checkpoint, its own options.
            resumed: a checkpoint in its run folder, to go on from.

        Raises:
            InputError: options that cannot be carried out, or a text that is not the checkpoint's.
            UnsupportedError: the engine named cannot run the model, or `settings.slow` forbids what can.
        """
        self.group, name = join(options.device) if is_called() else (ALONE, options.device)
        device = devices.find(name)
        self.corpus = corpus = read(options.source)
        if self.group.told(corpus.digest) != corpus.digest:
            raise InputError(f"process {self.group.rank} reads another text than process 0: give all the same.")
        if len(corpus.held_out) < 2 or (corpus.test is not None and len(corpus.test) < 2):
            raise InputError(
                "a text to hold out has fewer than 2 tokens, which leaves none to predict: give more text."
            )
        architecture = replace(options.architecture, tokens=len(corpus.vocabulary))
        self.options, recipe = replace(options, architecture=architecture), options.recipe
        if recipe.minutes and self.group.size > 1:
            raise InputError("minutes are of each process's own clock: give --steps or --epochs to several processes.")
        devices.check_memory(architecture, device)
        torch.manual_seed(recipe.seed)
        if resumed:
            _check_text(resumed[1], corpus.digest)
            model = resumed[1].model()
        else:
            model = LanguageModel(architecture)
            if recipe.init:
                model.draw(recipe.init)
            else:
                model.start_from(corpus.train)
        streams = Streams(corpus.train.to(device), recipe.batch)
        self.trainer = Trainer(model.to(device), streams, recipe, self.group)
        rows = self.trainer.streams.batch // recipe.accumulate
        self.kernel = kernel(model, recipe.time, rows, recipe.precision)
        for plan in self.kernel.plans:
            if plan.slow:
                announce(plan)
        self._held_out = corpus.held_out.to(device)
        self.checkpoint: Path | None = None
        self.valid: Score | None = None
        self.speed: float | None = None
        self._measured = -1  # after which step
        self._saved, self._saving = 0.0, 0.0  # when, and for how long, in seconds
        if resumed:
            restore(self.trainer, resumed[1])
            self.checkpoint = resumed[0]
            self.folder = self._agreed(lambda: Folder(resumed[0].parent))
            if self.first:
                metrics.rewind(self.folder.path / METRICS, self.trainer.step)
                self.folder.tidy(self.checkpoint)
        else:
            self.folder = self._agreed(lambda: Folder.new(options.out, corpus.name))

    @property
    def first(self) -> bool:
        """Whether this is the first of the processes, or the only one."""
        return self.group.rank == 0

    @classmethod
    def resume(
        cls,
        run: Path,
        path: Path | None = None,
        valid: Path | None = None,
        test: Path | None = None,
        device: str = "auto",
        sample: int = 600,
    ) -> "Program":
        """The program of a run folder, where its checkpoint stands.

        Args:
            run: the run folder.
            path, valid, test: where the text lies now; None: where it lay.
            device, sample: as in Options.

        Raises:
            InputError: no checkpoint, a damaged one, another text, or a run that another process trains.
            UnsupportedError: the engine of the run cannot run the model on this device.
        """
        checkpoint = newest(run)
        if checkpoint == run:  # going on from it would take the later ones away
            raise InputError(f"{run} is a checkpoint: give the run folder, {run.parent}.")
        found = load(checkpoint)
        before = found.source
        source = Source(path or before.path, before.kind, valid or before.valid, test or before.test, before.vocabulary)
        options = Options(source, found.architecture, found.recipe, device, sample=sample)
        return cls(options, (checkpoint, found))

    def train(self, stop: Callable[[], bool]) -> Iterator[Report]:
        """Train until the recipe is carried out or `stop()` is true; metrics, checkpoints and scores come on the way.

        Raises:
            InputError: the disk refuses a file, or the loss is no number any more.
        """
        if self.trainer.finished >= 1:
            return
        self._note("run", **_facts(self))
        if self.checkpoint is None:
            self.save()
        for report in self.trainer.run(stop, self._is_due):
            self._check(report.nats)
            self.speed, over = report.speed, report.finished >= 1
            if report.step % KEPT == 0 or over:
                self._note("train", nats=report.nats, rate=report.rate, speed=round(report.speed, 1))
            if report.step % self.options.recipe.valid_steps == 0 or over:
                report = replace(report, valid=self._measure() if self.first else None)
            if self._saves(report.step):
                self.save()
            yield report
        over = self.trainer.finished >= 1
        if self.first and over and self._measured < self.trainer.step:  # a save used up the last minutes
            self._measure()
        self.save()

    def save(self) -> None:
        """Write a checkpoint and take away those before it; every process of a group takes part."""
        checkpoint = self.folder.checkpoint(self.trainer.step)
        if checkpoint == self.checkpoint:
            return
        began = time.perf_counter()
        source = self.options.source.absolute()
        captured = capture(self.trainer, self.corpus.vocabulary, source, self.corpus.digest)
        if self.first:
            save(checkpoint, captured)
        self.checkpoint = checkpoint
        if self.first:
            self.folder.tidy(checkpoint)
        self._saved = time.perf_counter()
        self._saving = self._saved - began

    def outcome(self) -> Outcome:
        """The scores, and a text that begins at the start of a line."""
        model, recipe, vocabulary = self.trainer.model, self.options.recipe, self.corpus.vocabulary
        valid = self.valid or score(model, self._held_out, recipe.precision)
        test = None
        if self.corpus.test is not None:
            test = score(model, self.corpus.test.to(model.device), recipe.precision, rows=1)
            noted = [line["kind"] for line in metrics.lines(self.folder.path / METRICS)]
            if "test" not in noted:  # a run that is over tells its outcome again
                self._note("test", nats=test.nats, tokens=test.tokens)
        written = sample(model, vocabulary.start, self.options.sample, seed=recipe.seed)
        return Outcome(valid, test, vocabulary.decode(written))

    def curve(self) -> Path | None:
        """The picture of the losses so far, a file in the run folder; None where nothing draws it."""
        path = self.folder.path / CURVE
        lines = metrics.lines(self.folder.path / METRICS)
        return path if draw(path, lines, self.corpus.unit, self.folder.path.name) else None

    def close(self) -> None:
        """End the work with the other processes, when this one's is over."""
        self.trainer.close()
        self.group.leave()

    def _agreed(self, make: Callable[[], Folder]) -> Folder:
        """The folder that the first process makes and holds; what is wrong with it is wrong for all."""
        made: Folder | None = None
        said: Path | InputError | None = None
        if self.first:
            try:
                made = make()
                said = made.path
            except InputError as error:
                said = error
        said = self.group.told(said)
        if isinstance(said, InputError):
            raise said
        return made or Folder(Path(str(said)), held=False)

    def _measure(self) -> Score:
        self.valid = score(self.trainer.model, self._held_out, self.options.recipe.precision)
        self._measured = self.trainer.step
        self._check(self.valid.nats)
        self._note("valid", nats=self.valid.nats, tokens=self.valid.tokens)
        return self.valid

    def _check(self, nats: float) -> None:
        if not math.isfinite(nats):
            raise InputError(
                f"after {self.trainer.step:,} steps the loss is no number: the training diverged; make --learning-rate "
                f"smaller. The last checkpoint is {self.checkpoint}."
            )

    def _is_due(self, step: int) -> bool:
        recipe = self.options.recipe
        return step % KEPT == 0 or step % recipe.valid_steps == 0 or step % (recipe.save_steps or SAVE_STEPS) == 0

    def _saves(self, step: int) -> bool:
        if self.options.recipe.save_steps:
            return step % self.options.recipe.save_steps == 0
        if step % SAVE_STEPS:
            return False
        return self.group.agree(self.first and time.perf_counter() - self._saved >= self._saving / SAVE_SHARE)

    def _note(self, kind: str, **values: object) -> None:
        if not self.first:
            return
        trainer = self.trainer
        where = dict(step=trainer.step, epoch=round(trainer.epoch, 4), seconds=round(trainer.seconds, 3))
        metrics.add(self.folder.path / METRICS, kind=kind, **where, **values)


def _facts(program: Program) -> dict[str, object]:
    """What a reader of the metrics has to know."""
    model, corpus, options = program.trainer.model, program.corpus, program.options
    return dict(
        whorl=__version__,
        torch=torch.__version__,
        device=devices.describe(model.device),
        processes=program.group.size,
        captured=program.trainer.captured,
        engine=program.kernel.plans[0].engine,
        text=dict(source=corpus.source, sha256=corpus.digest, train=len(corpus.train), held_out=len(corpus.held_out)),
        unit=corpus.unit,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        architecture=asdict(options.architecture),
        recipe=asdict(options.recipe),
    )


def _check_text(checkpoint: Checkpoint, digest: str) -> None:
    if checkpoint.text != digest:
        where = checkpoint.source.path or "the source of Python's standard library"
        raise InputError(
            f"the text is not the one that this run was trained on, {where} as it was then: give that text's path "
            "beside --resume, or train anew."
        )
