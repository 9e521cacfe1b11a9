"""The two programs whose CPU and GPU times are compared over the batch size, exactly as they are measured."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whorl
from whorl.bench.baseline import PlainLoop, Rounding

Recurrent = Callable[[int, int, "nn.Module | None"], nn.Module]
"""From inputs, units and the activation (None: tanh) to a layer: x [batch, time, inputs] gives (y, states)."""


@dataclass(frozen=True)
class Program:
    """A model with its data and loss.

    Attributes:
        name: of figures and options.
        title: for readers.
        time, features: of an input; `features` is the number of classes where inputs are tokens.
        activation: of the first layer, in the place of tanh; None: tanh.
        build: the model with recurrent layers of a kind; its `forward` takes a batch of inputs.
        text: what it is, and where it comes from.
    """

    name: str
    title: str
    time: int
    features: int
    activation: nn.Module | None
    build: Callable[[Recurrent], nn.Module]
    text: tuple[str, ...]
    tokens: bool = False

    def draw(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        if self.tokens:
            return (
                torch.randint(self.features, (batch, self.time), device=device),
                torch.randint(self.features, (batch,), device=device),
            )
        size = (batch, self.time, self.features)
        return torch.randn(size, device=device), torch.randn(batch, self.features, device=device)

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        """Averaged over the batch."""
        return F.cross_entropy(out, target) if self.tokens else F.mse_loss(out, target)


class _Autoencoder(nn.Module):
    def __init__(self, recurrent: Recurrent) -> None:
        super().__init__()
        self.first = recurrent(AUTOENCODER.features, 64, AUTOENCODER.activation)
        self.second = recurrent(64, 32, None)
        self.dropout = nn.Dropout(0.2)
        self.dense = nn.Linear(32, AUTOENCODER.features)

    def forward(self, x: Tensor) -> Tensor:
        every = self.second(self.dropout(self.first(x)[0]))[0]
        return self.dense(self.dropout(every[:, -1]))


class _Classifier(nn.Module):
    def __init__(self, recurrent: Recurrent) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSIFIER.features, 64)
        self.lstm = recurrent(64, 256, None)
        self.dense = nn.Linear(256, CLASSIFIER.features)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dense(self.lstm(self.embedding(tokens))[0][:, -1])


AUTOENCODER = Program(
    "autoencoder",
    "CPU or GPU: a sequence autoencoder with a LeakyReLU LSTM",
    64,
    64,
    nn.LeakyReLU(0.05),
    _Autoencoder,
    (
        "LSTM(64) with LeakyReLU(0.05) in the place of tanh, dropout 0.2, LSTM(32), dropout 0.2, dense layer of 64; "
        "64 steps of 64 features, squared error, Adam. The program of a blog post of 2023 that found its GPU slower "
        "than its CPU at small batches: Keras leaves cuDNN where an activation is not tanh.",
    ),
)
CLASSIFIER = Program(
    "classifier",
    "CPU or GPU: a classifier of 612,235 windows",
    100,
    64,
    None,
    _Classifier,
    (
        "Embedding(64), LSTM(256), dense layer of 64 classes on the last output; windows of 100 tokens, cross entropy, "
        "Adam. It stands in for the program of the question 'What is the difference between CuDNNLSTM and LSTM in "
        "Keras?', whose answer has an epoch's time of 612,235 samples on several machines but not the model: this size "
        "fits its times on a CPU, on GPUs without cuDNN, and with it.",
    ),
    tokens=True,
)
PROGRAMS = {program.name: program for program in (AUTOENCODER, CLASSIFIER)}
WINDOWS = 612_235
PUBLISHED = (
    ("keras.layers.LSTM, Intel i5-4690", 3755),
    ("keras.layers.LSTM, GTX 950", 1417),
    ("keras.layers.LSTM, GTX 970", 1322),
    ("keras.layers.LSTM, RTX 2070", 1012),
    ("keras.layers.CuDNNLSTM, RTX 2070", 69),
)
"""Seconds for an epoch of WINDOWS samples, as that answer has them."""


def whorls(engine: str = "auto") -> Recurrent:
    """whorl's layers."""

    def build(inputs: int, units: int, activation: nn.Module | None) -> nn.Module:
        return whorl.LSTM(inputs, units, batch_first=True, activation=activation, engine=engine)

    return build


def torchs(inputs: int, units: int, activation: nn.Module | None) -> nn.Module:
    """torch.nn's layers, which have tanh alone."""
    assert activation is None, "torch.nn.LSTM has no activation to choose"
    return nn.LSTM(inputs, units, batch_first=True)


class Loop(nn.LSTM):
    """A loop over time of torch operations, the input product before it: what is left where cuDNN has no such layer."""

    def __init__(self, inputs: int, units: int, activation: nn.Module | None) -> None:
        super().__init__(inputs, units, batch_first=True)
        self._activation: Callable[[Tensor], Tensor] = activation or torch.tanh

    def forward(self, x: Tensor, hx: None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # type: ignore[override]
        """The output of every step, and the last states."""
        act, weights = self._activation, dict(self.named_parameters())
        projected = F.linear(x, weights["weight_ih_l0"], weights["bias_ih_l0"] + weights["bias_hh_l0"])
        h = c = x.new_zeros(x.shape[0], self.hidden_size)
        outs = []
        for step in projected.unbind(1):
            i, f, g, o = (step + F.linear(h, weights["weight_hh_l0"])).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * act(g)
            h = torch.sigmoid(o) * act(c)
            outs.append(h)
        return torch.stack(outs, 1), (h, c)


@dataclass(frozen=True)
class Rounded:
    """Layers of the error rule's baseline: what enters a product is rounded, and nothing else."""

    rounding: Rounding

    def __call__(self, inputs: int, units: int, activation: nn.Module | None) -> nn.Module:
        return _RoundedLoop(nn.LSTM(inputs, units, batch_first=True), self.rounding, activation or nn.Tanh())


class _RoundedLoop(PlainLoop):
    def __init__(self, layer: nn.RNNBase, rounding: Rounding, activation: nn.Module) -> None:
        super().__init__(layer, rounding)
        self._activation: Callable[[Tensor], Tensor] = activation

    def forward(self, x: Tensor, hx: None = None) -> tuple[Tensor, list[Tensor]]:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float(), hx)

    def _step(self, a: Tensor, b: Tensor, state: list[Tensor]) -> list[Tensor]:
        act = self._activation
        i, f, g, o = (a + b).chunk(4, -1)
        c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * act(g)
        return [torch.sigmoid(o) * act(c), c]
