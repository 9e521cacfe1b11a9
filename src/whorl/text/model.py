"""The language model: an embedding, an LSTM and a linear head, and its loss."""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from whorl.cells.library import lstm
from whorl.errors import InputError
from whorl.explanation import Explanation, explain
from whorl.modules import LSTM

States = tuple[torch.Tensor, torch.Tensor]
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: how many tokens it knows, how wide the embedding and the layers are, how many layers."""

    tokens: int
    embedding: int = 64
    units: int = 256
    layers: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or not 1 <= value < 2**24:
                raise InputError(f"{name} is {value!r}: write a whole number from 1 to {2**24 - 1:,}.")


class LanguageModel(nn.Module):
    """Predicts the next token of each of many streams."""

    def __init__(self, shape: Shape) -> None:
        """Draw the parameters as torch does, then set the LSTM's biases: 1 for the forget gate, 0 for the others."""
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.tokens, shape.embedding)
        self.recurrent = LSTM(shape.embedding, shape.units, num_layers=shape.layers)
        self.head = nn.Linear(shape.units, shape.tokens)
        with torch.no_grad():
            for layer in range(shape.layers):
                getattr(self.recurrent, f"bias_hh_l{layer}").zero_()
                bias = getattr(self.recurrent, f"bias_ih_l{layer}").zero_()
                bias.view(-1, shape.units)[lstm.gates.index("f")] = 1.0

    def start_from(self, tokens: torch.Tensor) -> None:
        """Set the head's bias so that the first predictions are the frequencies of `tokens`, token numbers [tokens].

        On two CPU cores in two minutes this takes 0.2 bits per byte off the result (docs/train.md).
        """
        counts = torch.bincount(tokens.int(), minlength=self.shape.tokens)
        with torch.no_grad():
            self.head.bias.copy_(torch.log((counts + 1) / (len(tokens) + self.shape.tokens)))

    def forward(self, tokens: torch.Tensor, states: States | None = None) -> tuple[torch.Tensor, States]:
        """Logits [time, batch, tokens] and the final states.

        Args:
            tokens: token numbers [time, batch].
            states: those before the first token; None: zeros.
        """
        outputs, states = self.recurrent(self.embedding(tokens), states)
        return self.head(outputs), states

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, states: States | None) -> tuple[torch.Tensor, States]:
        """The mean cross entropy in nats, [] in float32 or wider, and the final states.

        Args:
            inputs, targets: token numbers [time, batch] and those that follow them.
            states: those before the first token; None: zeros.
        """
        logits, states = self(inputs, states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), states

    @property
    def device(self) -> torch.device:
        return self.head.weight.device


def precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model runs with "fp32" or, through autocast, with "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16")


def kernel(model: LanguageModel, time: int, batch: int, name: str) -> Explanation:
    """Which kernel runs the recurrent layers of `model` on windows [time, batch], and why; nothing runs."""
    example = torch.zeros(time, batch, model.shape.embedding, device=model.device)
    with precision(name, model.device):
        return explain(model.recurrent, example)


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / math.log(2)
