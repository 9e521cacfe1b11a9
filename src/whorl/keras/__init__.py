"""Keras 3 layers that run on whorl's engines: `from whorl.keras import LSTM` in the place of `keras.layers`."""

from whorl.keras.layers import GRU, LSTM, SimpleRNN

__all__ = ["GRU", "LSTM", "SimpleRNN"]
