"""The training loop: truncated backpropagation with carried states, and nothing in it that waits for a GPU."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from whorl.errors import InputError
from whorl.text.model import PRECISIONS, LanguageModel, States, bits, precision
from whorl.text.streams import Streams

REPORT_SECONDS = 0.5  # a report reads the loss, for which a GPU has to finish what it was given


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        batch: rows of the text that run side by side.
        time: tokens in a window; gradients reach back to its start, states go on.
        steps: windows to train on; None: as many as `minutes` allow.
        minutes: time to train for; None: as long as `steps` take. With both, the first to end ends the training.
        learning_rate: its peak; it rises in a line from 0 over the first `warmup` of the training, then falls to 0.
        clip: the largest 2-norm of all gradients together.
        weight_decay, beta1, beta2: of AdamW.
        seed: of the first parameters and of the sample.
        precision: "fp32" or "bf16".
    """

    batch: int = 64
    time: int = 32
    steps: int | None = 2200
    minutes: float | None = None
    learning_rate: float = 8e-3
    warmup: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    seed: int = 0
    precision: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("batch", "time", "steps", "minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value!r}: write a number above 0.")
        if self.steps is None and self.minutes is None:
            raise InputError("a recipe without steps and minutes never ends: give one of them.")
        if self.precision not in PRECISIONS:
            raise InputError(f"precision is {self.precision!r}: write one of {', '.join(PRECISIONS)}.")

    def finished(self, step: float, seconds: float) -> float:
        """How much of the training is over after `step` steps in `seconds`, from 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_clock = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_clock))

    def rate(self, finished: float) -> float:
        """The learning rate when `finished` of the training is over, from 0 to 1."""
        return self.learning_rate * min(finished / self.warmup, (1 - finished) / (1 - self.warmup))


@dataclass(frozen=True)
class Report:
    """Where the training stands.

    Attributes:
        step: steps taken.
        bits: mean loss of the steps since the last report, in bits per token.
        seconds: time in training so far.
        speed: tokens per second in this process.
        finished: how much of the training is over, from 0 to 1.
    """

    step: int
    bits: float
    seconds: float
    speed: float
    finished: float

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds / self.finished - self.seconds


class Trainer:
    """A model in training, with everything that a later process needs to go on exactly from here."""

    def __init__(self, model: LanguageModel, streams: Streams, recipe: Recipe) -> None:
        """Train `model`, which is on the device of `streams`, by `recipe`.

        Raises:
            InputError: the rows of the streams are shorter than one window.
        """
        if streams.columns < recipe.time:
            raise InputError(
                f"the text to train on makes {streams.batch} rows of {streams.columns:,} tokens, shorter than a window "
                f"of {recipe.time}: make --batch or --time smaller, or give more text."
            )
        self.model, self.streams, self.recipe = model, streams, recipe
        self.step, self.column, self.seconds = 0, 0, 0.0
        self.states: States | None = None
        self.optimizer = torch.optim.AdamW(
            model.parameters(), betas=(recipe.beta1, recipe.beta2), weight_decay=recipe.weight_decay, fused=True
        )

    @property
    def over(self) -> bool:
        """Whether the recipe is carried out."""
        return self.recipe.finished(self.step, self.seconds) >= 1

    def advance(self) -> torch.Tensor:
        """The loss [] of the next window, in nats per token, after training on it.

        At the end of the rows they start again, with states of zero.
        """
        recipe = self.recipe
        if self.column + recipe.time > self.streams.columns:
            self.column, self.states = 0, None
        inputs, targets = self.streams.window(self.column, recipe.time)
        with precision(recipe.precision, self.model.device):
            loss, states = self.model.loss(inputs, targets, self.states)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(recipe.finished(self.step + 0.5, self.seconds))
        self.optimizer.step()
        self.states = (states[0].detach(), states[1].detach())
        self.step, self.column = self.step + 1, self.column + recipe.time
        return loss.detach()

    def run(self, stop: Callable[[], bool]) -> Iterator[Report]:
        """Train until the recipe is carried out or `stop()` is true; report about twice a second and at the end."""
        started = time.perf_counter() - self.seconds
        first, reported = self.step, self.step
        before, since = self.seconds, self.seconds
        total = torch.zeros((), device=self.model.device)
        while not self.over:
            total += self.advance()
            self.seconds = time.perf_counter() - started
            stopped = stop()
            if self.seconds - since >= REPORT_SECONDS or stopped or self.over:
                mean = bits(total.item() / (self.step - reported))
                self.seconds = time.perf_counter() - started
                speed = (self.step - first) * self.streams.batch * self.recipe.time / (self.seconds - before)
                yield Report(self.step, mean, self.seconds, speed, self.recipe.finished(self.step, self.seconds))
                total.zero_()
                reported, since = self.step, self.seconds
            if stopped:
                return
