"""How well a model predicts text that it was not trained on."""

from typing import NamedTuple

import torch

from whorl.text.model import LanguageModel, bits, precision
from whorl.text.streams import Streams

LARGEST = 1 << 20  # tokens that are looked at
ROWS, SHORTEST = 32, 4096  # at most so many rows, each at least so long: every row starts from zero states
WINDOW = 256


class Score(NamedTuple):
    """Bits per token, and how many tokens were predicted."""

    bits: float
    tokens: int


def score(model: LanguageModel, tokens: torch.Tensor, name: str = "fp32") -> Score:
    """How well `model` predicts the first 1,048,576 of `tokens`, with the states carried along each of up to 32 rows.

    Args:
        model: it runs in eval mode and comes back as it was.
        tokens: token numbers [tokens], at least two, on the model's device.
        name: the precision, "fp32" or "bf16".

    Raises:
        InputError: fewer than two tokens.
    """
    part = tokens[:LARGEST]
    streams = Streams(part, max(1, min(ROWS, len(part) // SHORTEST)))
    total, states, training = 0.0, None, model.training
    model.eval()
    with torch.no_grad(), precision(name, part.device):
        for start in range(0, streams.columns, WINDOW):
            inputs, targets = streams.window(start, WINDOW)
            loss, states = model.loss(inputs, targets, states)
            total += loss.item() * targets.numel()
    model.train(training)
    return Score(bits(total / len(streams)), len(streams))
