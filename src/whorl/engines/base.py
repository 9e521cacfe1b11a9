"""What an engine is: it states its limits, and does what a plan says."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.problem import Call, Outcome, Plan, Problem

Grads = Sequence[Tensor | None]


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
