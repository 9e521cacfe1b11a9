"""How well a model predicts text that it was not trained on."""

import math
from typing import NamedTuple

import torch

from whorl.text.model import LanguageModel, bits, precision
from whorl.text.streams import Streams

LARGEST = 1 << 20  # tokens that are looked at
ROWS, SHORTEST = 32, 4096  # at most so many rows, each at least so long: every row starts from zero states
WINDOW = 256


class Score(NamedTuple):
    """The mean loss in nats per token, and how many tokens were predicted."""

    nats: float
    tokens: int


def score(model: LanguageModel, tokens: torch.Tensor, name: str = "fp32", rows: int = ROWS) -> Score:
    """How well `model` predicts the first 1,048,576 of `tokens`, with the states carried along each row.

    Args:
        model: it runs in eval mode and comes back as it was.
        tokens: token numbers [tokens], at least two, on the model's device.
        name: the precision, "fp32" or "bf16".
        rows: at most so many rows, each of 4,096 tokens or more; with 1 every token has all those before it.

    Raises:
        InputError: fewer than two tokens.
    """
    part = tokens[:LARGEST]
    streams = Streams(part, max(1, min(rows, len(part) // SHORTEST)))
    losses, counts, states, training = [], [], None, model.training
    model.eval()
    with torch.no_grad(), precision(name, part.device):
        for start in range(0, streams.columns, WINDOW):
            inputs, targets = streams.window(start, WINDOW)
            loss, states = model.loss(inputs, targets, states)
            losses.append(loss)
            counts.append(targets.numel())
    model.train(training)
    found = torch.stack(losses).tolist()
    return Score(
        math.fsum(loss * count for loss, count in zip(found, counts, strict=True)) / len(streams), len(streams)
    )


def measure(nats: float, unit: str) -> str:
    """A loss in nats per token as people compare it: perplexity of words, else bits per character or byte."""
    if unit == "word":
        return f"perplexity {math.exp(min(nats, 700)):.2f}"
    return f"{bits(nats):.3f} bits per {unit}"
