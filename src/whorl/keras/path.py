"""The sweep of the backend that Keras runs on."""

import keras

BACKEND: str = keras.backend.backend()

if BACKEND == "jax":
    from whorl.keras.on_jax import both_ways, sweep
else:
    from whorl.keras.sweep import both_ways, sweep

__all__ = ["BACKEND", "both_ways", "sweep"]
