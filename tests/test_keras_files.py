"""Files of Keras 2 and of CuDNN layers, and the names of Keras 2 (torch backend); keras2/make.py made the files."""

import json
import shutil
from pathlib import Path
from typing import Any

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


def _written(path: Path, config: dict[str, Any], weights: dict[str, list[tuple[str, Any]]]) -> Path:
    """An h5 file as Keras 2 wrote it."""
    with h5py.File(path, "w") as file:
        file.attrs["keras_version"], file.attrs["backend"] = "2.2.4", "tensorflow"
        file.attrs["model_config"] = json.dumps(config)
        group = file.create_group("model_weights")
        group.attrs["layer_names"] = np.array(list(weights), "S")
        for layer, its in weights.items():
            group.create_group(layer).attrs["weight_names"] = np.array([name for name, _ in its], "S")
            for name, value in its:
                group[layer][name] = value
    return path


def _drawn(*prefixes: str, bias: int = 8, inputs: int = 3) -> list[tuple[str, Any]]:
    """Weights of an LSTM of 2 units, by their names."""
    shapes = {"kernel:0": (inputs, 8), "recurrent_kernel:0": (2, 8), "bias:0": (bias,)}
    generator = np.random.default_rng(0)
    return [(f"{p}/{name}", generator.standard_normal(shape)) for p in prefixes for name, shape in shapes.items()]


def _old(kind: str = "LSTM", **options: Any) -> dict[str, Any]:
    start = {"class_name": "GlorotUniform", "config": {"seed": None, "dtype": "float32"}}  # TF 1 wrote the dtype
    own = {"recurrent_activation": "hard_sigmoid"} if kind == "LSTM" else {}
    return {"class_name": kind, "config": {"name": "rnn", "units": 2, "kernel_initializer": start, **own, **options}}


@pytest.mark.parametrize("as_list", [False, True], ids=["dictionary", "list"])
@pytest.mark.parametrize("wrap", [False, True], ids=["alone", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "CuDNNLSTM"])
def test_a_sequential_whose_first_layer_carries_the_shape(kind: str, wrap: bool, as_list: bool, tmp_path: Path) -> None:
    names = ("both/forward_rnn", "both/backward_rnn") if wrap else ("rnn",)
    drawn = _drawn(*names, bias=8 if kind == "LSTM" else 16)
    layer: dict[str, Any] = _old(kind)
    if wrap:
        layer = {"class_name": "Bidirectional", "config": {"name": "both", "layer": layer, "merge_mode": "concat"}}
    layer["config"] |= {"batch_input_shape": [None, 5, 3], "dtype": "float32"}
    config: Any = [layer] if as_list else {"name": "old", "layers": [layer]}
    path = _written(
        tmp_path / "old.h5", {"class_name": "Sequential", "config": config}, {layer["config"]["name"]: drawn}
    )

    new = keras.layers.LSTM(2, recurrent_activation=hard_sigmoid_of_keras_2 if kind == "LSTM" else "sigmoid")
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.Bidirectional(new) if wrap else new])
    values = [value for _, value in drawn]
    if kind == "CuDNNLSTM":
        values = [one for at in range(0, len(values), 3) for one in from_cudnn_keras(*values[at : at + 3])]
    model.set_weights(values)
    wanted = model.predict(OUTPUTS["x"], verbose=0)
    found = whorl.keras.load_model(path).predict(OUTPUTS["x"], verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "CuDNNLSTM"])
def test_an_encoder_and_its_decoder(kind: str, tmp_path: Path) -> None:
    entering = {"class_name": "InputLayer", "config": {"batch_input_shape": [None, 5, 3], "name": "x"}}
    encoder, decoder = _old(kind, name="encoder", return_state=True), _old(kind, name="decoder")
    layers = [
        {**entering, "name": "x", "inbound_nodes": []},
        {**encoder, "name": "encoder", "inbound_nodes": [[["x", 0, 0, {}]]]},
        {
            **decoder,
            "name": "decoder",
            "inbound_nodes": [[["x", 0, 0, {}], ["encoder", 0, 1, {}], ["encoder", 0, 2, {}]]],
        },
    ]
    config = {"name": "old", "layers": layers, "input_layers": [["x", 0, 0]], "output_layers": [["decoder", 0, 0]]}
    drawn = {name: _drawn(name, bias=8 if kind == "LSTM" else 16) for name in ("encoder", "decoder")}
    path = _written(tmp_path / "old.h5", {"class_name": "Model", "config": config}, drawn)

    activation = hard_sigmoid_of_keras_2 if kind == "LSTM" else "sigmoid"
    x = keras.Input((5, 3))
    _, h, c = keras.layers.LSTM(2, recurrent_activation=activation, return_state=True)(x)
    model = keras.Model(x, keras.layers.LSTM(2, recurrent_activation=activation)(x, initial_state=[h, c]))
    values = [value for _, value in drawn["encoder"]]
    model.set_weights(2 * list(values if kind == "LSTM" else from_cudnn_keras(*values)))
    wanted = model.predict(OUTPUTS["x"], verbose=0)
    found = whorl.keras.load_model(path).predict(OUTPUTS["x"], verbose=0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_arguments_as_keras_2_wrote_them() -> None:
    assert modern({"class_name": "GRU", "config": {"name": "rnn"}})["config"]["reset_after"] is False
    assert modern({"class_name": "CuDNNGRU", "config": {"name": "rnn"}})["config"]["reset_after"] is True
    assert modern({"class_name": "BatchNormalization", "config": {"axis": [2]}})["config"]["axis"] == 2
    assert "time_major" not in modern({"class_name": "ConvLSTM2D", "config": {"time_major": False}})["config"]
    shapes = {"input_shape": [[None, 5, 3], [None, 4], [None, 4]]}
    built = modern({"class_name": "LSTM", "config": {"name": "rnn"}, "build_config": shapes})
    assert built["build_config"] == {"input_shape": [None, 5, 3]}


def test_weights_alone_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "weights.h5", "w") as file:
        file.attrs["keras_version"] = "2.2.4"
    with pytest.raises(whorl.InputError, match="build the model, then model.load_weights"):
        whorl.keras.load_model(tmp_path / "weights.h5")


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
