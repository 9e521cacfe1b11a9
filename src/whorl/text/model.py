"""The language model: an embedding, recurrent layers and a linear head, and its loss."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from whorl.cells import library
from whorl.cells.cell import Cell
from whorl.errors import InputError
from whorl.explanation import Explanation, explain
from whorl.modules import GRU, LSTM, RNN, Recurrent
from whorl.options import Options
from whorl.text.passes import cross_entropy

States = tuple[torch.Tensor, ...]
PRECISIONS = ("fp32", "bf16")
LAYERS: dict[str, Callable[..., Any]] = {  # every cell of the library that needs nothing beside the text
    **{name: partial(Recurrent, c) for name, c in vars(library).items() if isinstance(c, Cell) and not c.inputs},
    "lstm": LSTM,
    "gru": GRU,
    "rnn_tanh": partial(RNN, nonlinearity="tanh"),
    "rnn_relu": partial(RNN, nonlinearity="relu"),
}
OPTIONS = ("bias", "proj_size", *(each.name for each in fields(Options)))
SETTLED = {  # arguments of the layers that a language model settles itself, and where
    "input_size": "write --embedding",
    "hidden_size": "write --units",
    "num_layers": "write --layers",
    "dropout": "write --dropout",
    "engine": "write --engine",
    "nonlinearity": "write --cell rnn_tanh or --cell rnn_relu",
    "device": "write --device",
    "dtype": "write --precision",
    "batch_first": "time stands first here",
    "bidirectional": "a language model reads forward only",
}
TIED_RANGE = 0.1  # a tied embedding is drawn as the head's weight has to be: torch's own draw makes logits too large


@dataclass(frozen=True)
class Architecture:
    """What a model is made of.

    Attributes:
        embedding: width of a token's embedding.
        units, layers: of the recurrent layers.
        cell: a name of `whorl.cells.library`: "lstm", "gru", ...
        options: of the layers, by their names: bias, proj_size and those of `whorl.options.Options`.
        tied: the head's weight is the embedding's.
        dropout: the share of zeros in the embeddings, between the layers and before the head, in training.
        engine: "auto", or the engine that is to run the layers and no other.
        tokens: how many tokens the model knows.
    """

    embedding: int = 64
    units: int = 256
    layers: int = 1
    cell: str = "lstm"
    options: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    dropout: float = 0.0
    engine: str = "auto"
    tokens: int = 256

    def __post_init__(self) -> None:
        for name, most in (("embedding", 2**24), ("units", 2**24), ("layers", 1000), ("tokens", 2**31)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < most:
                raise InputError(f"{name} is {value!r}: write a whole number from 1 to {most - 1:,}.")
        if self.cell not in LAYERS:
            raise InputError(f"cell is {self.cell!r}: write one of {', '.join(LAYERS)}.")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout!r}: write a number from 0 to below 1.")
        for name in self.options:
            if name not in OPTIONS:
                instead = SETTLED.get(name, f"the options are {', '.join(OPTIONS)}")
                raise InputError(f"{name} is no option of the layers here: {instead}.")
        for name, usual, values in (("bias", True, "true or false"), ("proj_size", 0, "a whole number from 0 on")):
            value = self.options.get(name, usual)
            if type(value) is not type(usual) or value < 0:
                raise InputError(f"{name} is {value!r}: write {values}.")

    def layer(self) -> Any:
        """The recurrent layers, with torch's draws.

        Raises:
            InputError: options that the layers do not take, in the layers' words.
        """
        try:
            return LAYERS[self.cell](
                self.embedding,
                self.units,
                num_layers=self.layers,
                dropout=self.dropout if self.layers > 1 else 0.0,
                engine=self.engine,
                **self.options,
            )
        except (TypeError, ValueError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
            with_them = f" with the options {given}" if given else ""
            raise InputError(f"{self.cell} cannot be made{with_them}: {str(error).rstrip('.')}.") from error


class LanguageModel(nn.Module):
    """Predicts the next token of each of many streams."""

    def __init__(self, architecture: Architecture) -> None:
        """Draw the parameters as torch does, then set an LSTM's biases: 1 for a forget gate, 0 for the others."""
        super().__init__()
        self.architecture = architecture
        self.embedding = nn.Embedding(architecture.tokens, architecture.embedding)
        self.recurrent = architecture.layer()
        width = self.recurrent.proj_size or architecture.units
        self.head = nn.Linear(width, architecture.tokens)
        self.dropout = nn.Dropout(architecture.dropout)
        if architecture.tied:
            if width != architecture.embedding:
                raise InputError(
                    f"a tied head needs an embedding as wide as the layers' output: embedding is "
                    f"{architecture.embedding}, the output {width}; write --embedding {width}."
                )
            self.head.weight = self.embedding.weight
            nn.init.uniform_(self.embedding.weight, -TIED_RANGE, TIED_RANGE)
        if architecture.cell == "lstm" and self.recurrent.bias:
            with torch.no_grad():
                for layer in range(architecture.layers):
                    getattr(self.recurrent, f"bias_hh_l{layer}").zero_()
                    bias = getattr(self.recurrent, f"bias_ih_l{layer}").zero_()
                    if not self.recurrent.coupled:
                        bias.view(-1, architecture.units)[library.lstm.gates.index("f")] = 1.0

    def start_from(self, tokens: torch.Tensor) -> None:
        """Set the head's bias so that the first predictions are the frequencies of `tokens`, token numbers [tokens].

        On two CPU cores in two minutes this takes 0.2 bits per byte off the result (docs/train.md).
        """
        known = self.architecture.tokens
        counts = torch.bincount(tokens.int(), minlength=known)
        with torch.no_grad():
            self.head.bias.copy_(torch.log((counts + 1) / (len(tokens) + known)))

    def draw(self, scale: float) -> None:
        """Draw every parameter, biases too, from -scale to scale (Zaremba, Sutskever and Vinyals 2014)."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -scale, scale)

    def forward(self, tokens: torch.Tensor, states: States | None = None) -> tuple[torch.Tensor, States]:
        """Logits [time, batch, tokens] and the final states.

        Args:
            tokens: token numbers [time, batch].
            states: those before the first token; None: zeros.
        """
        given = states[0] if states is not None and len(states) == 1 else states
        outputs, finals = self.recurrent(self.dropout(self.embedding(tokens)), given)
        return _product(self.dropout(outputs), self.head), finals if isinstance(finals, tuple) else (finals,)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, states: States | None) -> tuple[torch.Tensor, States]:
        """The mean cross entropy in nats, [] in float32 or wider, and the final states.

        Args:
            inputs, targets: token numbers [time, batch] and those that follow them.
            states: those before the first token; None: zeros.
        """
        logits, states = self(inputs, states)
        return cross_entropy(logits.flatten(0, 1), targets.flatten()), states

    @property
    def device(self) -> torch.device:
        return self.head.bias.device


def _product(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """`layer` of x; under autocast on a GPU the summed axis is made a multiple of 16 bytes with zeros.

    The matrix units' fast kernels read 16 bytes at a time. On an H200 (bfloat16, 700 rows, 10,000
    words) the three products of a head 650 wide take 180 us, 656 wide 64; 1,500 wide 355, 1,504 wide 117.
    """
    kind, width = x.device.type, x.shape[-1]
    if kind != "cuda" or not torch.is_autocast_enabled(kind):
        return layer(x)
    dtype = torch.get_autocast_dtype(kind)
    whole = -(-width * dtype.itemsize // 16) * 16 // dtype.itemsize
    if whole == width:
        return layer(x)
    wide, weight = (_Widened.apply(tensor, whole, dtype) for tensor in (x, layer.weight))
    return nn.functional.linear(wide, weight, layer.bias)


class _Widened(torch.autograd.Function):
    """A tensor in another dtype, its last axis `width` long, zero past its own end; in one pass each way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        ctx.own, ctx.dtype = tensor.shape[-1], tensor.dtype
        made = tensor.new_empty(*tensor.shape[:-1], width, dtype=dtype)
        made.narrow(-1, ctx.own, width - ctx.own).zero_()
        made.narrow(-1, 0, ctx.own).copy_(tensor)
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad.narrow(-1, 0, ctx.own).to(ctx.dtype), None, None


def precision(name: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model runs with "fp32" or, through autocast, with "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16")


def kernel(model: LanguageModel, time: int, batch: int, name: str) -> Explanation:
    """Which kernel runs the recurrent layers of `model` on windows [time, batch], and why; nothing runs.

    Raises:
        UnsupportedError: the engine that the architecture names cannot run them.
    """
    example = torch.zeros(time, batch, model.architecture.embedding, device=model.device, requires_grad=True)
    with precision(name, model.device):
        return explain(model.recurrent, example)


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / math.log(2)
