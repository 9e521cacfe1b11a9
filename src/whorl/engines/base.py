"""What an engine is: it states its limits, and does what a plan says."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whorl.problem import Call, Outcome, Plan, Problem

Grads = Sequence[Tensor | None]
Continue = Callable[[Plan, Grads, Sequence[Tensor]], Grads]
"""A backward pass: of a plan, the gradients given and what forward kept, the gradient of each tensor of the call."""


class Step(ABC):
    """One step of a layer, made ready for many calls; no gradient is recorded."""

    prepared: bool = True
    """Everything that can be done once was done."""
    states: Sequence[Tensor]
    """Of each state of the cell [layers, batch, width]: each call moves them on, in place."""

    def moved(self) -> None:  # noqa: B027
        """Told where somebody else has written the states."""

    @abstractmethod
    def __call__(self, x: Tensor, reset: Tensor | None, inputs: Sequence[Tensor]) -> Tensor:
        """The output [batch, width] of one step.

        Args:
            x: [batch, inputs].
            reset: bool [batch]: True where the states are zero before the step; None for nowhere.
            inputs: what the cell reads beside x, [batch, units or 1] each.
        """


class StepByCall(Step):
    """A step that is a call of an engine's forward with one step."""

    prepared = False

    def __init__(self, engine: "Engine", plan: Plan, call: Call) -> None:
        self._engine, self._plan, self._weights, self.states = engine, plan, call.weights, list(call.states)

    def __call__(self, x: Tensor, reset: Tensor | None, inputs: Sequence[Tensor]) -> Tensor:
        states = tuple(self.states)
        if reset is not None:
            states = tuple([state.masked_fill(reset[:, None], 0) for state in states])
        call = Call(x[None], states, self._weights, inputs=tuple([extra[None] for extra in inputs]))
        with torch.no_grad():
            outcome = self._engine.forward(self._plan, call)
            for state, final in zip(self.states, outcome.finals, strict=True):
                state.copy_(final)
        return outcome.y[0]


class Engine(ABC):
    """One way to run a recurrent layer over all of its steps."""

    name: str
    summary: str
    """What runs, in a few words, for `explain`."""
    recorded: bool = False
    """Its forward is made of torch's own differentiable operators: called in grad mode, autograd records it."""

    @abstractmethod
    def obstacles(self, problem: Problem) -> list[str]:
        """Every reason why this engine cannot run the problem, each a sentence; empty where it can.  Pure."""

    def slower(self, problem: Problem) -> list[str]:
        """Reasons to leave a problem that it can run to an engine that comes later, unless it is asked for by name."""
        return []

    def numbers(self, problem: Problem) -> list[str]:
        """How it runs a problem, in lines for `explain`: what decides the speed of its kernels."""
        return []

    def prepares(self, problem: Problem) -> bool:
        """Whether it has a step of its own, with everything laid out once: the first choice for a stepper."""
        return False

    def step(self, plan: Plan, call: Call) -> Step:
        """The prepared step of a plan of one step.

        Args:
            call: weights, and the states to begin with; x is any of the right shape.
        """
        return StepByCall(self, plan, call)

    def at_once(self, plan: Plan, call: Call, by_python: Continue) -> Sequence[Tensor]:
        """The outputs, differentiable, where the engine has a way past Python for such a call; nothing where not.

        Args:
            by_python: its backward pass where that way does not go on, for gradients of gradients.
        """
        return ()

    def number(self, plan: Plan, call: Call, by_python: Continue, wait: bool = False) -> int:
        """By which C++ knows what it does for such a call, forward and backward; -1 where it does not.

        Args:
            by_python: as `at_once` has it.
            wait: until what C++ is to do has been compiled; else -1 until then.
        """
        return -1

    @abstractmethod
    def forward(self, plan: Plan, call: Call) -> Outcome:
        """The outputs, the final states, and what backward reads."""

    @abstractmethod
    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        """The gradient of each of `call.tensors`.

        Args:
            y: the output that forward gave.
            saved: what else it kept.  Its final states are not here: users may change them in place before backward.
            grads: of the output and of each final state; None where there is none.
        """


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as the flat bytes that `Outcome.saved` holds; no copy."""
    return tensor.view(-1).view(torch.uint8)


def from_bytes(data: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `as_bytes` was given."""
    return data.view(dtype).view(shape)
