"""Programs of Keras 2 as articles print them run with one import changed (torch backend): see listings/README.md."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl.keras  # noqa: E402

LISTINGS = Path(__file__).parent / "listings"


def names_after(listing: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a listing leaves behind, its line `from tensorflow import keras` changed and nothing else.

    Of TensorFlow it asks which GPUs there are: `gpus`.
    """
    text = (LISTINGS / f"{listing}.txt").read_text(encoding="utf-8")
    assert text.count("from tensorflow import keras") == 1
    config = types.SimpleNamespace(list_physical_devices=lambda kind: gpus)
    monkeypatch.setitem(sys.modules, "tensorflow", types.SimpleNamespace(config=config))
    names: dict[str, Any] = {}
    exec(text.replace("from tensorflow import keras", "from whorl import keras"), names)
    return names


def test_the_standard_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = names_after("standard_lstm", [], monkeypatch)
    assert type(names["model"].layers[0]) is whorl.keras.LSTM
    assert names["model"].optimizer.iterations == 1
    assert "TensorFlow LSTM layer setup complete." in capsys.readouterr().out


def test_the_layer_of_cudnn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = names_after("cudnn_lstm", ["GPU:0"], monkeypatch)
    assert isinstance(names["model"].layers[0], names["keras"].layers.CuDNNLSTM)
    assert names["model"].optimizer.iterations == 1
    assert "CuDNNLSTM layer setup complete." in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]], ids=["no GPU", "GPU"])
def test_the_layer_that_the_machine_allows(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = names_after("whichever_is_there", gpus, monkeypatch)
    assert type(names["model"].layers[0]) is whorl.keras.LSTM
    assert names["model"].optimizer.iterations == 1
    # It looks at layers[1], which is the Dense layer: Keras does not count an Input among the layers of a Sequential.
    assert "not correctly instantiated." in capsys.readouterr().out


@pytest.mark.parametrize("stateful", [False, True], ids=["", "stateful"])
def test_a_model_of_keras_2(stateful: bool) -> None:
    """An LSTM with a leaky activation, told the shape of its batch: in Keras 3 neither is what the article writes.

    The article leaves its imports out; what it calls ReLU has an `alpha`, so it is LeakyReLU.  And Keras 3 wants its
    metrics in a list.
    """
    text = (LISTINGS / "seq2seq.txt").read_text(encoding="utf-8")
    text = text.replace("metrics='acc'", "metrics=['acc']").replace("stateful=False", f"stateful={stateful}")
    imports = """
from keras.models import Sequential
from keras.optimizers import Adam
from whorl.keras.layers import LSTM, Dense, Dropout, LeakyReLU as ReLU
"""
    batches = [(np.ones((1, 5, 3), "float32"), np.ones((1, 3), "float32"))]

    class Generator(keras.utils.PyDataset):
        def __len__(self) -> int:
            return len(batches)

        def __getitem__(self, index: int) -> Any:
            return batches[index]

    names: dict[str, Any] = dict(timesteps=5, n_features=3, epochs=2, generator=Generator())
    exec(imports + text, names)
    model = names["model"]
    first, second = (layer for layer in model.layers if isinstance(layer, keras.layers.RNN))
    assert [type(layer) for layer in (first, second)] == [whorl.keras.LSTM] * 2
    assert first.cell.activation.negative_slope == 0.05
    assert model.optimizer.iterations == 2
    assert not stateful or np.abs(np.asarray(first.states[0])).sum() > 0
