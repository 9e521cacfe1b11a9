"""The training loop: truncated backpropagation with carried states, and nothing in it that waits for a GPU."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from whorl.errors import InputError
from whorl.text.evaluation import Score
from whorl.text.model import LanguageModel, States, precision
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams

REPORT_SECONDS = 0.5  # a report reads losses, for which a GPU has to finish what it was given
KEPT = 50  # the steps whose losses are kept, on the device: a report holds their mean


@dataclass(frozen=True)
class Report:
    """Where the training stands.

    Attributes:
        step: steps taken.
        epoch: passes over the text.
        nats: mean loss of the last 50 steps, in nats per token.
        rate: the learning rate of the last step.
        seconds: time in training so far.
        speed: tokens per second in this process, what came between the steps left out.
        finished: how much of the training is over, from 0 to 1.
        valid: the score on held-out text, where it was taken after this step.
    """

    step: int
    epoch: float
    nats: float
    rate: float
    seconds: float
    speed: float
    finished: float
    valid: Score | None = None

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds / self.finished - self.seconds


class Trainer:
    """A model in training, with everything that a later process needs to go on exactly from here.

    Attributes:
        step: steps taken.
        column: of the streams, that comes next.
        seconds: time in training so far.
        per_epoch: steps of one pass over the text.
        states: before the next window, for each part of the batch; None: zeros.
        losses: of the last 50 steps, that of step s at s % 50, in nats per token, on the device.
    """

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
        self.per_epoch = streams.columns // recipe.time
        self.states: list[States | None] = [None] * recipe.accumulate
        self.losses = torch.zeros(KEPT, device=model.device, dtype=model.head.bias.dtype)
        self._share = torch.full((), 1 / recipe.accumulate, device=model.device, dtype=model.head.bias.dtype)
        self.optimizer: torch.optim.Optimizer
        if recipe.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=True
            )
        else:
            betas = (recipe.beta1, recipe.beta2)
            decay = recipe.weight_decay
            self.optimizer = torch.optim.AdamW(model.parameters(), betas=betas, weight_decay=decay, fused=True)

    @property
    def epoch(self) -> float:
        """Passes over the text so far."""
        return self.step / self.per_epoch

    @property
    def finished(self) -> float:
        """How much of the training is over, from 0 to 1."""
        return self.recipe.finished(self.step, self.epoch, self.seconds)

    @property
    def rate(self) -> float:
        """The learning rate of the next step, that of its middle."""
        middle = self.step + 0.5
        return self.recipe.rate(self.recipe.finished(middle, middle / self.per_epoch, self.seconds), self.epoch)

    def advance(self) -> torch.Tensor:
        """The loss [] of the next window, in nats per token, after training on it.

        At the end of the rows they start again, with states of zero. What is drawn on the way depends on the seed and
        the number of the step alone: torch's generators are seeded anew.
        """
        recipe, parts = self.recipe, self.recipe.accumulate
        if self.column + recipe.time > self.streams.columns:
            self.column, self.states = 0, [None] * parts
        _seed((recipe.seed * 1_000_003 + self.step) % 2**32, self.model.device)
        inputs, targets = self.streams.window(self.column, recipe.time)
        self.optimizer.zero_grad()
        losses = []
        for part, (some, wanted) in enumerate(zip(inputs.chunk(parts, 1), targets.chunk(parts, 1), strict=True)):
            with precision(recipe.precision, self.model.device):
                loss, states = self.model.loss(some, wanted, self.states[part])
            loss.backward(self._share)
            losses.append(loss.detach())
            self.states[part] = tuple(state.detach() for state in states)
        if recipe.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.step()
        loss = losses[0] if parts == 1 else torch.stack(losses).mean()
        self.losses[self.step % KEPT] = loss
        self.step, self.column = self.step + 1, self.column + recipe.time
        return loss

    def run(self, stop: Callable[[], bool], due: Callable[[int], bool] = lambda step: False) -> Iterator[Report]:
        """Train until the recipe is carried out or `stop()` is true.

        Reports about twice a second, after each step for which `due(step)` is true, and at the end.
        """
        began, paused = time.perf_counter() - self.seconds, 0.0
        first, before, reported = self.step, self.seconds, self.seconds
        while self.finished < 1:
            self.advance()
            self.seconds = time.perf_counter() - began
            stopped = stop()
            if self.seconds - reported < REPORT_SECONDS and not (due(self.step) or stopped or self.finished >= 1):
                continue
            nats = self._mean_loss()
            self.seconds = reported = time.perf_counter() - began
            speed = (self.step - first) * self.streams.batch * self.recipe.time / (reported - before - paused)
            rate = self.optimizer.param_groups[0]["lr"]
            yield Report(self.step, self.epoch, nats, rate, reported, speed, self.finished)
            self.seconds = time.perf_counter() - began
            paused += self.seconds - reported
            if stopped:
                return

    def _mean_loss(self) -> float:
        """Of the last 50 steps; waits for the device."""
        losses = self.losses.tolist()[: self.step]
        return math.fsum(losses) / len(losses)


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that a step on `device` draws from; `torch.manual_seed`, for all there are, takes 130 us."""
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
