"""Recurrent layers at the speed of the hardware, with every option on, that say which kernel runs and why."""

from whorl.adoption import AdoptionReport, LayerReport, accelerate, restore
from whorl.cells.cell import Cell, cell
from whorl.cells.expr import (
    clip,
    cos,
    erf,
    exp,
    expm1,
    log,
    log1p,
    maximum,
    mean,
    minimum,
    relu,
    rsqrt,
    sigmoid,
    sin,
    softplus,
    sqrt,
    tanh,
    where,
)
from whorl.errors import (
    CellError,
    InputError,
    KernelError,
    SettingError,
    SlowError,
    SlowWarning,
    UnsupportedError,
)
from whorl.explanation import Explanation, explain
from whorl.modules import GRU, LSTM, RNN, Recurrent
from whorl.problem import Plan
from whorl.settings import settings
from whorl.stepper import Stepper
from whorl.steps import GRUCell, LSTMCell, RNNCell

__version__ = "0.1.0.dev0"
__all__ = [
    "GRU", "LSTM", "RNN", "AdoptionReport", "Cell", "CellError", "Explanation", "GRUCell", "InputError", "KernelError",
    "LSTMCell", "LayerReport", "Plan", "RNNCell", "Recurrent", "SettingError", "SlowError", "SlowWarning",
    "Stepper", "UnsupportedError", "accelerate", "cell", "clip", "cos", "erf", "exp", "explain", "expm1", "log",
    "log1p", "maximum", "mean", "minimum", "relu", "restore", "rsqrt", "settings", "sigmoid", "sin", "softplus", "sqrt",
    "tanh", "where",
]  # fmt: skip
