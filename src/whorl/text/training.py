"""The training loop: truncated backpropagation with carried states, and nothing in it that waits for a GPU."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from whorl.errors import InputError
from whorl.text.evaluation import Score
from whorl.text.group import ALONE, Group
from whorl.text.model import LanguageModel, States, precision
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.working import Working, works

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
        captured: on a GPU the first steps are launched kernel by kernel, all others replay them as one CUDA graph.
    """

    def __init__(
        self, model: LanguageModel, streams: Streams, recipe: Recipe, group: Group = ALONE, copies: bool = True
    ) -> None:
        """Train `model`, which is on the device of `streams`, by `recipe`, alone or with the processes of `group`.

        With `copies` the steps of a recipe that `working.works` takes are taken on a copy of the parameters; else all
        are under autocast.

        Each process of a group learns an equal part of the rows; the model, its gradients and so its every step are
        those of all rows.

        Raises:
            InputError: the rows of the streams are shorter than one window, or do not make equal parts.
        """
        if streams.columns < recipe.time:
            raise InputError(
                f"the text to train on makes {streams.batch} rows of {streams.columns:,} tokens, shorter than a window "
                f"of {recipe.time}: make --batch or --time smaller, or give more text."
            )
        if streams.batch % (group.size * recipe.accumulate):
            raise InputError(
                f"{streams.batch} rows do not make {group.size} x {recipe.accumulate} equal parts, for each process "
                "and each part of its batch: change --batch or --accumulate."
            )
        self.model, self.recipe, self.group = model, recipe, group
        self.streams = streams.part(group.rank, group.size)
        self.step, self.column, self.seconds = 0, 0, 0.0
        self.per_epoch = streams.columns // recipe.time
        self.states: list[States | None] = [None] * recipe.accumulate
        device, dtype = model.device, model.head.bias.dtype
        self.losses = torch.zeros(KEPT, device=device, dtype=dtype)
        self.captured = device.type == "cuda" and not recipe.eager
        self._share = torch.full((), 1 / recipe.accumulate, device=device, dtype=dtype)
        self._window = torch.zeros(recipe.time + 1, self.streams.batch, device=device, dtype=torch.long)
        # Tensors, for a graph reads them anew; float32, as torch's fused optimisers read it there.
        self._rate = torch.zeros((), device=device, dtype=torch.float64 if device.type == "cpu" else torch.float32)
        self._told = 0.0
        self._eager_steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._loss = torch.zeros((), device=device, dtype=dtype)
        # Ahead of what runs beside it, in multiprocessors that it leaves idle.
        self._stream = torch.cuda.Stream(device, priority=-1) if self.captured else None
        self._working: Working | None = None
        with self._beside():
            if copies and works(model, recipe):
                self._working = Working(model, group)
            else:
                self._model = group.exchanging(_Loss(model), compressed=recipe.precision == "bf16")
        self._rows: list[torch.Tensor] = []  # for each part of the batch, the square of its gradients' norm by position
        if recipe.clip_rows and model.architecture.tied:
            raise InputError("clip_rows is for an embedding of its own: leave --tied or --clip-rows out.")
        if recipe.clip_rows and self._working is None:
            model.embedding.register_forward_hook(self._count_rows)
        # Plain SGD scales its gradients by the rate: clipping them is to scale the rate, which moves less memory.
        self._scales_rate = recipe.optimizer == "sgd" and not recipe.weight_decay
        self.optimizer: torch.optim.Optimizer
        if recipe.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(
                model.parameters(), lr=self._rate, weight_decay=recipe.weight_decay, fused=True
            )
        else:
            self.optimizer = torch.optim.AdamW(
                model.parameters(),
                lr=self._rate,
                betas=(recipe.beta1, recipe.beta2),
                weight_decay=recipe.weight_decay,
                fused=True,
                capturable=self.captured,
            )

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
        """The loss [] of the next window, in nats per token, after training on it; 50 steps on it is overwritten.

        At the end of the rows they start again, with states of zero. What is drawn on the way depends on the seed, the
        number of the step and that of the process alone: torch's generators are seeded anew.
        """
        if self.column + self.recipe.time > self.streams.columns:
            self._start_again()
        _seed(self.recipe.seed * 1_000_003 + self.step + self.group.rank * 2_654_435_761, self.model.device)
        self.streams.fill(self._window, self.column)
        self._told = self.rate
        self._rate.fill_(self._told)
        for each in self.optimizer.param_groups:
            each["lr"] = self._rate  # a checkpoint brings its own tensor
        with self._beside():
            if self._working is not None and self._eager_steps == 0:
                self._working.refresh()  # a checkpoint has come in between
            if self.captured and self._eager_steps >= self.group.warm_up and None not in self.states:
                self._replay()
            else:
                self._loss, self.states = self._learn()
                self._eager_steps += 1
        slot = self.step % KEPT
        self.losses[slot] = self._loss
        self.step, self.column = self.step + 1, self.column + self.recipe.time
        return self.losses[slot]

    def _learn(self) -> tuple[torch.Tensor, list[States | None]]:
        """Train on the window: its loss, and the states after it."""
        parts, recipe = self.recipe.accumulate, self.recipe
        if self._working is not None:
            window = self._window
            made, reached = self._working.learn(window[:-1], window[1:], self.states[0], self._rate, recipe)
            return made, [reached]
        self.optimizer.zero_grad()
        self._rows.clear()
        losses: list[torch.Tensor] = []
        after: list[States | None] = []
        windows = zip(self._window[:-1].chunk(parts, 1), self._window[1:].chunk(parts, 1), self.states, strict=True)
        for part, (inputs, targets, states) in enumerate(windows):
            with self.group.exchanged(self._model, part + 1 == parts):
                with precision(self.recipe.precision, self.model.device):
                    loss, states = self._model(inputs, targets, states)
                loss.backward(self._share)
            losses.append(loss.detach())
            after.append(tuple(state.detach() for state in states))
        if self.recipe.clip:
            self._clip(self.recipe.clip)
        self.optimizer.step()
        return (losses[0] if parts == 1 else torch.stack(losses).mean()), after

    def _clip(self, most: float) -> None:
        """Scale the gradients so that their 2-norm is at most `most`."""
        apart = self.model.embedding.weight if self.recipe.clip_rows else None
        counted = [parameter for parameter in self.model.parameters() if parameter is not apart]
        norm = torch.nn.utils.get_total_norm([each.grad for each in counted if each.grad is not None])
        if apart is not None:
            rows = torch.stack(self._rows).sum()
            self.group.average(rows)  # of what each process adds to a mean over as many
            norm = (norm.square() + rows / self.group.size).sqrt()
        if self._scales_rate:
            self._rate.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))  # 1e-6 as in clip_grad_norm_
        else:
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)

    def _count_rows(self, embedding: torch.nn.Module, tokens: object, rows: torch.Tensor) -> None:
        """Note the square of the norm of what will be the gradient of `rows`, the embeddings of a part's tokens."""
        if rows.requires_grad:
            rows.register_hook(lambda grad: self._rows.append(grad.square().sum()))

    def _replay(self) -> None:
        """Train on the window by replaying the graph of a step; the first time, capture it."""
        if self._graph is None:
            kept = [tuple(state.clone() for state in states or ()) for states in self.states]
            self.states = list(kept)
            self.optimizer.zero_grad()
            self._graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's own thread asks for events meanwhile.
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss, after = self._learn()
                for states, others in zip(kept, after, strict=True):
                    for state, other in zip(states, others or (), strict=True):
                        state.copy_(other)
        self._graph.replay()

    def _start_again(self) -> None:
        """Go to the start of the rows, with states of zero."""
        self.column = 0
        if self._graph is None:
            self.states = [None] * self.recipe.accumulate
            return
        for states in self.states:
            for state in states or ():
                state.zero_()

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Work on the stream that the graph is captured on, in order with the work around it."""
        if self._stream is None:
            yield
            return
        here = torch.cuda.current_stream(self.model.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def close(self) -> None:
        """Let the graph go, which has to be gone before the group's connections are."""
        self._graph = None

    def run(self, stop: Callable[[], bool], due: Callable[[int], bool] = lambda step: False) -> Iterator[Report]:
        """Train until the recipe is carried out or `stop()` is true.

        Reports about twice a second, after each step for which `due(step)` is true, and at the end. In a group of
        processes, which have to agree, only after the steps that are due and at the end; it stops there too.
        """
        began, paused = time.perf_counter() - self.seconds, 0.0
        first, before, reported = self.step, self.seconds, self.seconds
        alone = self.group.size == 1
        while self.finished < 1:
            self.advance()
            self.seconds = time.perf_counter() - began
            stopped, asked = alone and stop(), due(self.step) or self.finished >= 1
            if not (asked or stopped or (alone and self.seconds - reported >= REPORT_SECONDS)):
                continue
            if not alone:
                stopped = self.group.agree(stop())
                self.group.average(self.losses)
            nats = self._mean_loss()
            self.seconds = reported = time.perf_counter() - began
            speed = (self.step - first) * self.recipe.batch * self.recipe.time / (reported - before - paused)
            yield Report(self.step, self.epoch, nats, self._told, reported, speed, self.finished)
            self.seconds = time.perf_counter() - began
            paused += self.seconds - reported
            if stopped:
                return

    def _mean_loss(self) -> float:
        """Of the last 50 steps; waits for the device."""
        losses = self.losses.tolist()[: self.step]
        return math.fsum(losses) / len(losses)


class _Loss(torch.nn.Module):
    """The loss of a language model as a module's call, which is what torch exchanges gradients around."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, states: States | None
    ) -> tuple[torch.Tensor, States]:
        return self.model.loss(inputs, targets, states)


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that a step on `device` draws from; `torch.manual_seed`, for all there are, takes 130 us."""
    seed %= 2**32
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
