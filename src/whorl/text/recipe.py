"""How to train: budget, optimiser, schedule and how often to look."""

import math
from dataclasses import dataclass

from whorl.errors import InputError
from whorl.text.model import PRECISIONS

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("linear", "cosine", "constant", "decay")


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        batch: rows of the text that run side by side, in all processes together.
        time: tokens in a window; gradients reach back to its start, states go on.
        accumulate: parts that a batch is run in, one after the other, to save memory; the result is the same.
        steps: windows to train on; None: as many as the other budgets allow.
        epochs: passes over the text; None likewise.
        minutes: time to train for; None likewise. The first budget to end ends the training.
        optimizer: "adamw" (with weight_decay 0 it is Adam) or "sgd".
        learning_rate: its peak.
        schedule: what the rate does after the warm-up: "linear" and "cosine" fall to 0 at the end of the training,
            "constant" stays, "decay" stays for `hold` epochs and is multiplied with `decay` at the start of each later.
        warmup: the share of the training in which the rate rises in a line from 0.
        hold, decay: of the schedule "decay".
        clip: the largest 2-norm of all gradients together; 0: gradients are not clipped.
        clip_rows: in that norm the embedding's gradient counts position by position, before those of equal tokens are
            added, as in TensorFlow's clip_by_global_norm.
        weight_decay: of the optimiser.
        beta1, beta2: of AdamW.
        init: every parameter is drawn from -init to init; None: as torch does, with an LSTM's forget biases at 1 and
            the head's bias at the frequencies of the tokens.
        seed: of the first parameters, of dropout and of the sample.
        precision: "fp32" or "bf16".
        eager: launch a step's kernels one by one; else they are one CUDA graph, on a GPU.
        valid_steps: the model is measured on the held-out text every so many steps, and at the end.
        save_steps: a checkpoint is taken every so many steps, and at the end; None: every 50, or as seldom as keeps
            saving under 3 percent of the time.
    """

    batch: int = 64
    time: int = 32
    accumulate: int = 1
    steps: int | None = 2200
    epochs: float | None = None
    minutes: float | None = None
    optimizer: str = "adamw"
    learning_rate: float = 8e-3
    schedule: str = "linear"
    warmup: float = 0.05
    hold: int = 0
    decay: float = 1.0
    clip: float = 1.0
    clip_rows: bool = False
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    init: float | None = None
    seed: int = 0
    precision: str = "fp32"
    eager: bool = False
    valid_steps: int = 1000
    save_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "time", "accumulate", "steps", "valid_steps", "save_steps"):
            value = getattr(self, name)
            most = 2**24 if name in ("batch", "time") else 2**63
            if value is not None and (type(value) is not int or not 0 < value < most):
                raise InputError(f"{name} is {value!r}: write a whole number above 0 and below {most:,}.")
        for name in ("epochs", "minutes", "learning_rate", "init"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} is {value!r}: write a number above 0.")
        for name in ("clip", "weight_decay", "hold", "seed"):
            value = getattr(self, name)
            whole = name in ("hold", "seed")
            if not 0 <= value < 2**63 or (whole and type(value) is not int):
                raise InputError(f"{name} is {value!r}: write a {'whole ' * whole}number from 0 on.")
        for name in ("warmup", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise InputError(f"{name} is {value!r}: write a number from 0 to below 1.")
        for name, known in (("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}: write one of {', '.join(known)}.")
        if self.steps is None and self.epochs is None and self.minutes is None:
            raise InputError("a recipe without steps, epochs and minutes never ends: give one of them.")
        if self.batch % self.accumulate:
            raise InputError(
                f"{self.batch} rows do not make {self.accumulate} equal parts: change accumulate or batch."
            )
        if not 0 < self.decay <= 1:
            raise InputError(f"decay is {self.decay!r}: write a number above 0, at most 1.")
        if self.schedule != "decay" and (self.hold, self.decay) != (0, 1.0):
            raise InputError(f"hold and decay are of the schedule decay, this one is {self.schedule}: leave them out.")
        if self.schedule == "decay" and self.decay == 1:
            raise InputError("the schedule decay needs a factor: write decay below 1, or the schedule constant.")
        if self.clip_rows and not self.clip:
            raise InputError("clip_rows is about how gradients are clipped, and clip is 0: leave it out.")
        if self.optimizer == "sgd" and (self.beta1, self.beta2) != (0.9, 0.99):
            raise InputError("beta1 and beta2 are of adamw: leave them out.")

    def finished(self, step: float, epoch: float, seconds: float) -> float:
        """How much of the training is over after `step` steps, `epoch` epochs and `seconds`, from 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_epochs = epoch / self.epochs if self.epochs else 0.0
        by_clock = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_epochs, by_clock))

    def rate(self, finished: float, epoch: float) -> float:
        """The learning rate when `finished` of the training is over, from 0 to 1, in this epoch, counted from 0."""
        if finished < self.warmup:
            return self.learning_rate * finished / self.warmup
        rest = (1 - finished) / (1 - self.warmup)  # from 1 to 0
        if self.schedule == "linear":
            return self.learning_rate * rest
        if self.schedule == "cosine":
            return self.learning_rate * (1 - math.cos(math.pi * rest)) / 2
        if self.schedule == "decay":
            return self.learning_rate * self.decay ** max(int(epoch) + 1 - self.hold, 0)
        return self.learning_rate
