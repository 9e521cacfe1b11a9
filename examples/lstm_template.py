"""A template to start from: sequences in, a class out, with whorl.LSTM in the place of TensorFlow's CudnnLSTM.

    python examples/lstm_template.py
    python examples/lstm_template.py --layers 2 --bidirectional --recurrent-dropout 0.2 --layer-norm

The data is made here: sequences of noise of different lengths, whose class is the feature with the largest sum.  What
CudnnLSTM could not do, lengths, layer norm, recurrent dropout, are options of the same layer.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import whorl

CLASSES = 4


class Classifier(nn.Module):
    """The class of each sequence, from the final states of the last layer."""

    def __init__(self, features: int, units: int, layers: int, bidirectional: bool, **options: object) -> None:
        super().__init__()
        dropout = 0.2 if layers > 1 else 0.0
        self.recurrent = whorl.LSTM(features, units, layers, dropout=dropout, bidirectional=bidirectional, **options)
        self.head = nn.Linear(units * (1 + bidirectional), CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.recurrent(x, lengths=lengths)
        directions = 2 if self.recurrent.bidirectional else 1
        return self.head(torch.cat(tuple(h[-directions:]), -1))


def draw(count: int, steps: int, features: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences [time, count, features] with zeros past their ends, their lengths and their classes."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(steps // 2, steps + 1, (count,), generator=chance)
    x = torch.randn(steps, count, features, generator=chance)
    x *= (torch.arange(steps)[:, None] < lengths)[..., None]
    return x, lengths, x[..., :CLASSES].sum(0).argmax(-1)


def main() -> float:
    """Train, and give the share of sequences that the model has not seen and puts into the right class."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(steps=50, features=8, units=64, layers=1, batch=64, updates=400, seed=0).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--layer-norm", action="store_true")
    parser.add_argument("--recurrent-dropout", type=float, default=0.0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options = dict(recurrent_dropout=given.recurrent_dropout, layer_norm=given.layer_norm)
    model = Classifier(given.features, given.units, given.layers, given.bidirectional, **options).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, lengths, _ = (part.to(device) for part in draw(given.batch, given.steps, given.features, 0))
    print(whorl.explain(model.recurrent, x, lengths=lengths))
    began = time.perf_counter()
    for update in range(1, given.updates + 1):
        x, lengths, classes = (part.to(device) for part in draw(given.batch, given.steps, given.features, update))
        loss = nn.functional.cross_entropy(model(x, lengths), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % 100 == 0:
            speed = update * given.batch / (time.perf_counter() - began)
            print(f"update {update}: loss {loss.item():.3f}, {speed:,.0f} sequences per second")
    x, lengths, classes = (part.to(device) for part in draw(2000, given.steps, given.features, 0))
    model.eval()
    with torch.no_grad():
        right = (model(x, lengths).argmax(-1) == classes).double().mean().item()
    print(f"accuracy on 2,000 other sequences: {right:.3f}")
    return right


if __name__ == "__main__":
    main()
