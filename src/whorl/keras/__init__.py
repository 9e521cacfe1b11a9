"""Keras 3 layers that run on whorl's engines: `from whorl.keras import LSTM` in the place of `keras.layers`."""

from whorl.keras.adoption import Report, accelerate, disable, enable, restore
from whorl.keras.cells import Cell
from whorl.keras.explanation import Explanation, explain
from whorl.keras.layers import GRU, LSTM, RNN, Bidirectional, SimpleRNN

__all__ = [
    "GRU", "LSTM", "RNN", "Bidirectional", "Cell", "Explanation", "Report", "SimpleRNN", "accelerate", "disable",
    "enable", "explain", "restore",
]  # fmt: skip
