"""The layers: Keras' own classes with whorl's engines under them.

A layer holds what Keras' holds, by the same names and of the same shapes, and its call is Keras' call: only the loop
over time is another.
"""

from typing import Any

import keras

from whorl.errors import InputError
from whorl.keras import loops
from whorl.plan import check_engine

register = keras.saving.register_keras_serializable(package="whorl")


class Recurrent:
    """What each layer adds to the class of Keras: the engine, and the loop."""

    engine: str = "auto"
    """ "auto" for the fastest that can run a call, or the name of the engine that is to run and no other."""

    def __init__(self, *args: Any, engine: str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if check_engine(engine) != "auto":
            if self.engine not in ("auto", engine):
                raise InputError(f"engine is {engine!r} and use_cudnn is True: leave one of them out.")
            self.engine = engine

    def inner_loop(self, sequences: Any, initial_state: Any, mask: Any, training: Any = False) -> Any:
        """Keras' hook: the last output, all outputs and the final states."""
        return loops.inner_loop(self, super().inner_loop, sequences, initial_state, mask, training)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Keras' config, which makes Keras' class too; with the engine where one is named."""
        config = super().get_config()  # type: ignore[misc]
        return config if self.engine == "auto" else {**config, "engine": self.engine}


class _WithCuDNN(Recurrent):
    """LSTM and GRU, which have an argument `use_cudnn`."""

    @property
    def use_cudnn(self) -> Any:
        """True: the engine `cudnn` runs, or the call raises.  "auto" and False leave the choice to whorl.

        Read, it is True where the engine is `cudnn`: Keras' Bidirectional goes round a layer that says "auto".
        """
        if loops.BACKEND == "tensorflow":
            return self.__dict__.get("use_cudnn", "auto")
        return self.engine == "cudnn"

    @use_cudnn.setter
    def use_cudnn(self, value: Any) -> None:
        self.__dict__["use_cudnn"] = value
        if value is True:
            self.engine = "cudnn"
        elif self.engine == "cudnn":
            self.engine = "auto"


@register
class LSTM(_WithCuDNN, keras.layers.LSTM):
    """A `keras.layers.LSTM` that runs on whorl's engines: masks, dropout and activations included.

    Takes every argument of `keras.layers.LSTM`, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> import numpy, whorl.keras
    >>> layer = whorl.keras.LSTM(16, recurrent_dropout=0.2, return_sequences=True)
    >>> layer(numpy.zeros((3, 5, 8)), mask=numpy.ones((3, 5), bool)).shape
    torch.Size([3, 5, 16])
    """


@register
class GRU(_WithCuDNN, keras.layers.GRU):
    """A `keras.layers.GRU` that runs on whorl's engines, with `reset_after=False` too.

    Takes every argument of `keras.layers.GRU`, and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> import numpy, whorl.keras
    >>> whorl.keras.GRU(16, reset_after=False)(numpy.zeros((3, 5, 8))).shape
    torch.Size([3, 16])
    """


@register
class SimpleRNN(Recurrent, keras.layers.SimpleRNN):
    """A `keras.layers.SimpleRNN` that runs on whorl's engines.

    Takes every argument of `keras.layers.SimpleRNN` (`activity_regularizer` has its effect, which Keras 3.15 forgets,
    and `seed` is kept in the config), and by keyword:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> import numpy, whorl.keras
    >>> whorl.keras.SimpleRNN(16, activation="relu")(numpy.zeros((3, 5, 8))).shape
    torch.Size([3, 16])
    """

    def __init__(self, *args: Any, activity_regularizer: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, activity_regularizer=activity_regularizer, **kwargs)
        self.activity_regularizer = keras.regularizers.get(activity_regularizer)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "seed": self.cell.seed}
