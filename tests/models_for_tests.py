"""Models that hold torch's recurrent layers in every way that users write."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune


class Nested(nn.Module):
    """All six kinds, at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"rnn": nn.LSTM(5, 7, 2, bidirectional=True, dropout=0.5)})
        self.middle = nn.Sequential(nn.Linear(14, 6), nn.RNN(6, 6, nonlinearity="relu", bias=False))
        self.decoder = nn.GRU(6, 6, batch_first=True)
        self.steps = nn.ModuleList([nn.LSTMCell(6, 5), nn.GRUCell(5, 5), nn.RNNCell(5, 5, nonlinearity="relu")])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, h = self.decoder(self.middle(self.encoder["rnn"](x)[0])[0])
        first, c = self.steps[0](y[-1])
        return y, h, c, self.steps[2](self.steps[1](first))


class Shared(nn.Module):
    """One layer under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(5, 5)
        self.second = nn.Sequential(self.first)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)[0])


class Tied(nn.Module):
    """Two layers that hold the same parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(5, 5), nn.GRU(5, 5)
        self.second.weight_hh_l0 = self.first.weight_hh_l0

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)[0])


class WeightDropped(nn.Module):
    """DropConnect as AWD-LSTM (Merity et al. 2017) writes it: a plain attribute takes the parameter's place."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 7)
        self.raw = self.rnn.weight_hh_l0
        del self.rnn._parameters["weight_hh_l0"]
        self.rnn.flatten_parameters = lambda: None

    def forward(self, x: Tensor) -> Any:
        self.rnn.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        return self.rnn(x)


class Cached(nn.Module):
    """Computes each parametrised weight once a call; torch's layers ask for it several times."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return self.layer(x)


class Symmetric(nn.Module):
    """A parametrisation of a user."""

    def forward(self, weight: Tensor) -> Tensor:
        square = weight[: weight.shape[1]]
        return torch.cat([square.triu() + square.triu(1).T, weight[weight.shape[1] :]])


def with_old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = nn.utils.weight_norm(nn.LSTM(5, 7), "weight_hh_l0")
        return nn.utils.weight_norm(layer, "weight_ih_l0")


def parametrized_twice() -> nn.Module:
    layer = parametrizations.weight_norm(nn.GRU(5, 7, 2), "weight_hh_l1")
    return parametrize.register_parametrization(layer, "weight_hh_l0", Symmetric())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "LSTM with projection": lambda: nn.LSTM(5, 7, proj_size=3, bias=False),
    "GRU": lambda: nn.GRU(5, 7, batch_first=True),
    "RNN": lambda: nn.RNN(5, 7),
    "LSTMCell": lambda: nn.LSTMCell(5, 7),
    "nested": Nested,
    "shared": Shared,
    "tied": Tied,
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.LSTM(5, 7), "weight_hh_l0")),
    "weight norm, old": with_old_weight_norm,
    "spectral norm": lambda: Cached(parametrizations.spectral_norm(nn.LSTM(5, 7), "weight_hh_l0")),
    "parametrised twice": parametrized_twice,
    "parametrised cell": lambda: parametrizations.weight_norm(nn.GRUCell(5, 7), "weight_ih"),
    "pruned": lambda: prune.l1_unstructured(nn.LSTM(5, 7), "weight_hh_l0", 0.5),
    "weight dropped": WeightDropped,
    "DataParallel": lambda: nn.DataParallel(Nested()),
}


def build(name: str, mode: bool = True) -> nn.Module:
    """The same model at each call, in float64."""
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    try:
        return MODELS[name]().train(mode)
    finally:
        torch.set_default_dtype(torch.float32)


def x_for(model: nn.Module) -> Tensor:
    return torch.randn(*(() if isinstance(model, nn.RNNCellBase) else (4,)), 3, 5, dtype=torch.float64)
