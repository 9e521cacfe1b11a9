"""Keras 3 with recurrent layers that run on whorl's engines.

`from whorl.keras import LSTM` in the place of `from keras.layers import LSTM`; or `from whorl import keras` in the
place of `import keras`, since every name that is not here is Keras' own.
"""

from typing import Any

import keras as _keras

from whorl.keras import layers
from whorl.keras.adoption import Report, accelerate, disable, enable, restore
from whorl.keras.cells import Cell
from whorl.keras.explanation import Explanation, explain
from whorl.keras.files import load_model
from whorl.keras.layers import GRU, LSTM, RNN, Bidirectional, CuDNNGRU, CuDNNLSTM, SimpleRNN

__all__ = [
    "GRU", "LSTM", "RNN", "Bidirectional", "Cell", "CuDNNGRU", "CuDNNLSTM", "Explanation", "Report", "SimpleRNN",
    "accelerate", "disable", "enable", "explain", "layers", "load_model", "restore",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Every other name is Keras' own."""
    return getattr(_keras, name)
