"""Files of Keras 2 and of CuDNN layers, and the names of Keras 2 (torch backend); keras2/make.py made the files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
h5py = pytest.importorskip("h5py")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

import whorl.keras  # noqa: E402
from whorl.keras.files import hard_sigmoid_of_keras_2, modern  # noqa: E402
from whorl.weights import from_cudnn_keras  # noqa: E402

FILES = Path(__file__).parent / "keras2"
OUTPUTS = np.load(FILES / "outputs.npz")


@pytest.mark.parametrize(
    "name, given, layers",
    [("plain", "tokens", 6), ("cudnn", "x", 5), ("mixed", "x4", 3)],
    ids=["plain", "cudnn", "mixed"],
)
@pytest.mark.parametrize("kind", ["h5", "keras"])
def test_a_model_of_keras_2_predicts_what_it_did(name: str, given: str, layers: int, kind: str, tmp_path: Path) -> None:
    model = whorl.keras.load_model(FILES / f"{name}.{kind}")
    wanted = OUTPUTS[name]
    np.testing.assert_allclose(model.predict(OUTPUTS[given], verbose=0), wanted, rtol=1e-5, atol=1e-6)
    recurrent = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN)]
    assert len(recurrent) == layers
    assert all(type(layer).__module__.startswith("whorl") for layer in recurrent)
    model.save(tmp_path / "new.keras")  # which Keras 3 reads, hard_sigmoid of Keras 2 included
    again = keras.models.load_model(tmp_path / "new.keras")
    np.testing.assert_allclose(again.predict(OUTPUTS[given], verbose=0), wanted, rtol=1e-5, atol=1e-6)


def test_keras_cannot_read_them() -> None:
    """If it can, there is less to do here."""
    for file in ("plain.h5", "cudnn.h5", "plain.keras", "cudnn.keras"):
        with pytest.raises((TypeError, ValueError)):
            keras.models.load_model(FILES / file)


@pytest.mark.parametrize("kind", ["keras", "h5"])
def test_a_file_of_keras_3_is_read_as_keras_reads_it(kind: str, tmp_path: Path) -> None:
    model = keras.Sequential(
        [keras.Input((5, 3)), keras.layers.Bidirectional(keras.layers.GRU(2)), keras.layers.Dense(1)]
    )
    model.compile("adam", keras.losses.MeanSquaredError())  # Keras cannot read "mse" back from an h5 file
    model.fit(OUTPUTS["x"], np.zeros((3, 1)), verbose=0)
    model.save(tmp_path / f"model.{kind}")
    loaded = whorl.keras.load_model(tmp_path / f"model.{kind}")
    assert type(loaded.layers[0]) is whorl.keras.Bidirectional
    assert type(loaded.layers[0].forward_layer) is whorl.keras.GRU
    assert int(loaded.optimizer.iterations) == 1
    torch.testing.assert_close(loaded(OUTPUTS["x"]), model(OUTPUTS["x"]), rtol=1e-5, atol=1e-6)


def test_what_keras_3_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(whorl.InputError, match="rnn is time_major"):
        modern({"class_name": "LSTM", "config": {"name": "rnn", "time_major": True}})
    with pytest.raises(whorl.InputError, match="is no file"):
        whorl.keras.load_model(tmp_path / "nothing.h5")


@pytest.mark.parametrize("name", ["cudnn.h5", "cudnn.keras"])
def test_the_file_itself_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    copy = tmp_path / name
    shutil.copyfile(FILES / name, copy)
    whorl.keras.load_model(copy)
    assert copy.read_bytes() == (FILES / name).read_bytes()


def test_hard_sigmoid_of_keras_2() -> None:
    at = torch.tensor([-3.0, -2.5, 0.0, 1.0, 2.5, 3.0])
    torch.testing.assert_close(hard_sigmoid_of_keras_2(at), torch.tensor([0.0, 0.0, 0.5, 0.7, 1.0, 1.0]))


def test_weights_of_cudnn_are_buffers() -> None:
    """A gate of CuDNNLSTM's kernel [inputs, units] is cuDNN's matrix [units, inputs], in its order of memory."""
    kernel = np.arange(6.0 * 4).reshape(3, 8)  # 4 gates of 2 units on 3 inputs
    made, _, bias = from_cudnn_keras(kernel, np.zeros((2, 8)), np.arange(16.0))
    buffers = [kernel[:, 2 * gate : 2 * gate + 2].T.ravel(order="F").reshape(2, 3, order="C") for gate in range(4)]
    np.testing.assert_array_equal(made, np.concatenate([buffer.T for buffer in buffers], 1))
    np.testing.assert_array_equal(bias, np.arange(8.0) + np.arange(8.0, 16.0))


def test_names_of_keras_2() -> None:
    layer = whorl.keras.CuDNNLSTM(4, "he_normal", "glorot_uniform", "ones", False, return_sequences=True)
    config = layer.get_config()
    assert type(layer) is whorl.keras.LSTM
    assert isinstance(layer, whorl.keras.CuDNNLSTM)
    assert not isinstance(whorl.keras.GRU(4), whorl.keras.CuDNNLSTM)
    assert config["kernel_initializer"]["class_name"] == "HeNormal"
    assert config["unit_forget_bias"] is False
    assert type(whorl.keras.CuDNNGRU(4, stateful=True)) is whorl.keras.GRU
    with pytest.raises(whorl.InputError, match="time_major"):
        whorl.keras.CuDNNGRU(4, time_major=True)
