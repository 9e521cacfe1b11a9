"""The sweep of the backend that Keras runs on."""

import keras

from whorl.keras.sweep import both_ways, sweep

BACKEND: str = keras.backend.backend()

__all__ = ["BACKEND", "both_ways", "sweep"]
