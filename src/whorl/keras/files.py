"""Files: whatever Keras 3 reads, and what Keras 2 wrote, CuDNNLSTM and CuDNNGRU included."""

import json
import shutil
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import keras
from keras.src.utils.naming import to_snake_case

from whorl.errors import InputError
from whorl.keras.adoption import accelerate
from whorl.weights import from_cudnn_keras

_RECURRENT = ("LSTM", "GRU", "SimpleRNN", "RNN")
_CUDNN = {"CuDNNLSTM": "LSTM", "CuDNNGRU": "GRU"}
_STEPPING = (*_RECURRENT, *_CUDNN, "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D")
_WRAPPED = ("layer", "backward_layer", "cell")
_GONE = ("time_major", "implementation", "input_length", "ragged", "optional")
"""Arguments of Keras 2 that are without effect, or have none in Keras 3."""


@keras.saving.register_keras_serializable(package="whorl")
def hard_sigmoid_of_keras_2(x: Any) -> Any:
    """0.2 x + 0.5 between 0 and 1: `hard_sigmoid` until Keras 3, where it is relu6(x + 3) / 6."""
    return keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)


def load_model(path: Any, custom_objects: Any = None, compile: bool = True, safe_mode: bool = True) -> Any:
    """The model of a `.keras` or `.h5` file, with whorl's layers in the place of Keras' own recurrent ones.

    Files of Keras 2 are read too: CuDNNLSTM and CuDNNGRU become LSTM and GRU with their weights converted, arguments
    that Keras 3 has no more are left out, and `hard_sigmoid` means what it meant.  Such a model is not compiled: what
    Keras 2 wrote of its optimizer has no meaning in Keras 3.

    Args:
        path: of the file.
        custom_objects, compile, safe_mode: as in `keras.models.load_model`.

    Raises:
        InputError: a Keras 2 file with a layer that Keras 3 cannot be, or an `.h5` file of weights alone.

    >>> import keras, tempfile, whorl.keras
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keras.Sequential([keras.Input((5, 8)), keras.layers.LSTM(4)]).save(f"{folder}/model.keras")
    ...     type(whorl.keras.load_model(f"{folder}/model.keras").layers[0])
    <class 'whorl.keras.layers.LSTM'>
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} is no file: give the path of a .keras or .h5 file.")
    convert = _h5_of_keras_2 if h5py.is_hdf5(path) else _archive_of_keras_2 if zipfile.is_zipfile(path) else None
    with tempfile.TemporaryDirectory() as folder:
        converted = convert(path, Path(folder)) if convert is not None else None
        model = keras.models.load_model(
            converted or path, custom_objects, compile=compile and converted is None, safe_mode=safe_mode
        )
    accelerate(model)
    return model


def _h5_of_keras_2(path: Path, folder: Path) -> Path | None:
    """The file as Keras 3 reads it, or None where Keras 3 wrote it."""
    with h5py.File(path) as file:
        if "model_config" not in file.attrs:
            raise InputError(f"{path} has weights and no config of a model: build the model, then model.load_weights.")
        if not _is_old(_text(file.attrs.get("keras_version", b""))):
            return None
    made = folder / "model.h5"
    shutil.copyfile(path, made)
    with h5py.File(made, "r+") as file:
        config = modern(json.loads(_text(file.attrs["model_config"])))
        file.attrs["model_config"] = json.dumps(config)
        for name in ("training_config", "optimizer_weights"):
            file.attrs.pop(name, None)
        for layer in file["model_weights"].values():
            names = [_text(name) for name in layer.attrs.get("weight_names", [])]
            _convert_cudnn(layer, [name for name in names if name.endswith("kernel:0")])
    return made


def _archive_of_keras_2(path: Path, folder: Path) -> Path | None:
    """The same for a `.keras` file."""
    with zipfile.ZipFile(path) as old:
        if not _is_old(json.loads(old.read("metadata.json")).get("keras_version", "")):
            return None
        made = folder / "model.keras"
        config = json.loads(old.read("config.json"))
        weights = Path(old.extract("model.weights.h5", folder))
        with h5py.File(weights, "r+") as file:
            _convert_part(file, config)
        changed = {"config.json": json.dumps(modern(config)).encode(), weights.name: weights.read_bytes()}
        with zipfile.ZipFile(made, "w") as new:
            for name in old.namelist():
                new.writestr(name, changed.get(name) or old.read(name))
    return made


def _is_old(version: str) -> bool:
    return version.split(".")[0] in ("1", "2")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def modern(config: Any) -> Any:
    """A config of Keras 2, of a model or any part of it, as Keras 3 means it.

    Raises:
        InputError: a layer that is `time_major`.
    """
    if isinstance(config, list):
        return [modern(part) for part in config]
    if not isinstance(config, dict):
        return config
    config = {name: modern(part) for name, part in _in_full(config).items()}
    if str(config.get("module", "")).startswith(("tf_keras.", "keras.engine", "keras.src.engine")):
        config["module"] = "keras.src.models.functional"
    config.pop("compile_config", None)
    kind, inner = config.get("class_name"), config.get("config")
    if isinstance(inner, dict):
        _mend_arguments(kind, inner)
        if "output_layers" in inner:
            _renumber(inner)
            _name_states(inner)
    if kind in (*_STEPPING, "Bidirectional") and isinstance(config.get("build_config"), dict):
        _keep_first_shape(config["build_config"])
    if kind in _CUDNN:
        config["class_name"] = _CUDNN[kind]
    return config


def _in_full(config: dict[str, Any]) -> dict[str, Any]:
    """The config with what Keras 2 left unsaid: a Sequential's input, and where the class of a wrapped layer is."""
    kind, inner = config.get("class_name"), config.get("config")
    if kind == "Sequential" and inner is not None:
        if isinstance(inner, list):  # in Keras 2.2.2 and before
            inner = {"name": config.get("name"), "layers": inner}
        return {**config, "config": {**inner, "layers": _with_input(inner["layers"])}}
    if not isinstance(inner, dict):
        return config
    wrapped = {name: _located(inner[name]) for name in _WRAPPED if name in inner}
    if kind == "StackedRNNCells":
        wrapped["cells"] = [_located(cell) for cell in inner["cells"]]
    return {**config, "config": {**inner, **wrapped}}


def _with_input(layers: list[Any]) -> list[Any]:
    """The layers of a Sequential; before them an InputLayer, where the first of them carries the shape."""
    given = _input_of(layers[0]) if layers and layers[0]["class_name"] != "InputLayer" else None
    return layers if given is None else [{"class_name": "InputLayer", "config": given}, *layers]


def _input_of(layer: dict[str, Any]) -> dict[str, Any] | None:
    """The config of an InputLayer for what this layer says that it takes; a model says it in its own first layer."""
    inner = layer["config"]
    inside = inner if isinstance(inner, list) else inner.get("layers")
    if inside is not None:
        return _input_of(inside[0]) if inside else None
    if inner.get("batch_input_shape") is None:
        return None
    dtype = inner.get("dtype")
    return {
        "batch_input_shape": inner["batch_input_shape"],
        "dtype": dtype if isinstance(dtype, str) else "float32",
        "name": f"{inner['name']}_input",
    }


def _located(part: Any) -> Any:
    """A wrapped layer or a cell, with the module of its class; a class that Keras has not is found by its name."""
    if not isinstance(part, dict) or "module" in part:
        return part
    kind = part["class_name"]
    if kind in ("Model", "Functional"):
        return {**part, "class_name": "Functional", "module": "keras.src.models.functional", "registered_name": None}
    if kind in _CUDNN or hasattr(keras.layers, kind):
        return {**part, "module": "keras.layers", "registered_name": None}
    return {**part, "module": "keras", "registered_name": None} if kind == "Sequential" else part


def _mend_arguments(kind: Any, inner: dict[str, Any]) -> None:
    """The arguments of a layer, an initializer or the like, in place."""
    if inner.get("time_major"):
        raise InputError(f"{inner.get('name')} is time_major: Keras 3 takes [batch, time, features] alone.")
    for name in _GONE:
        if kind in (*_STEPPING, "Embedding", "InputLayer"):
            inner.pop(name, None)
    if hasattr(keras.initializers, str(kind)) and "name" not in inner:  # Identity is a layer, too, and has a name
        inner.pop("dtype", None)
    shape = inner.pop("batch_input_shape", None)
    if kind == "InputLayer" and shape is not None:
        inner["batch_shape"] = shape
    for name in ("activation", "recurrent_activation"):
        if inner.get(name) == "hard_sigmoid":
            inner[name] = keras.saving.serialize_keras_object(hard_sigmoid_of_keras_2)
    axis = inner.get("axis")
    if kind == "BatchNormalization" and isinstance(axis, list) and len(axis) == 1:
        inner["axis"] = axis[0]
    if kind in ("GRU", "GRUCell"):
        inner.setdefault("reset_after", False)  # the only kind there was before the argument
    if kind in _CUDNN:
        inner.update(modern_arguments(kind))


def _renumber(model: dict[str, Any]) -> None:
    """Calls of a model inside a model, in place: Keras 2 counts its making as call 0, Keras 3 does not."""
    inside = [layer["name"] for layer in model["layers"] if "layers" in layer["config"]]

    def change(part: Any) -> None:
        if not isinstance(part, list):
            return
        if len(part) >= 3 and part[0] in inside and type(part[1]) is int:
            part[1] = max(part[1] - 1, 0)
        for one in part:
            change(one)

    change([layer.get("inbound_nodes") for layer in model["layers"]])
    change([model["input_layers"], model["output_layers"]])


def _name_states(model: dict[str, Any]) -> None:
    """Calls of recurrent layers on [x, states], in place: Keras 3 takes the states as `initial_state`."""
    for layer in model["layers"]:
        if layer["class_name"] in (*_STEPPING, "Bidirectional"):
            layer["inbound_nodes"] = [_with_states(call) if len(call) > 1 else call for call in layer["inbound_nodes"]]


def _with_states(call: list[Any]) -> dict[str, Any]:
    """One such call, as Keras 3 writes it; each tensor is [layer, call, place among its outputs, other arguments]."""

    def tensor(part: list[Any]) -> Any:
        if not isinstance(part[0], str):  # the states of one of the stacked cells
            return [tensor(one) for one in part]
        config = {"shape": [None], "dtype": "float32", "keras_history": part[:3]}  # Keras 3 looks at the history alone
        return {"class_name": "__keras_tensor__", "config": config}

    x, *states = call
    others = x[3] if len(x) > 3 else {}
    return {"args": [tensor(x)], "kwargs": {**others, "initial_state": tensor(states)}}


def _keep_first_shape(build: dict[str, Any]) -> None:
    """The shapes that a recurrent layer was built with, in place: of x, without those of its states."""
    shape = build.get("input_shape")
    if shape and isinstance(shape[0], list):
        build["input_shape"] = shape[0]


def modern_arguments(kind: str) -> dict[str, Any]:
    """What CuDNNLSTM and CuDNNGRU are, in the arguments of LSTM and GRU."""
    fixed = {"activation": "tanh", "recurrent_activation": "sigmoid", "use_bias": True}
    return fixed if kind == "CuDNNLSTM" else {**fixed, "reset_after": True}


def _convert_cudnn(group: Any, kernels: list[str]) -> None:
    """Weights of CuDNN layers inside a group of an h5 file, in place; known by their long bias."""
    for name in kernels:
        folder = name.removesuffix("kernel:0")
        names = [f"{folder}{kind}:0" for kind in ("kernel", "recurrent_kernel", "bias")]
        if folder.endswith("recurrent_") or not all(part in group for part in names):
            continue
        weights = [group[part][()] for part in names]
        if weights[2].ndim != 1 or len(weights[2]) != 2 * weights[1].shape[1]:
            continue
        for part, value in zip(names, from_cudnn_keras(*weights), strict=True):
            del group[part]
            group[part] = value


def _convert_part(group: Any, config: dict[str, Any]) -> None:
    """The weights of a model, or of a layer, in a `.keras` file, in place.

    A layer lies under its class, with the number of those before it; a modern recurrent layer has them in its cell.
    """
    inner = config["config"]
    if config["class_name"] in _CUDNN and len(group["vars"]):  # none in the layer that Bidirectional was made from
        weights = from_cudnn_keras(*(group["vars"][str(place)][()] for place in range(3)))
        del group["vars"]
        for place, value in enumerate(weights):
            group[f"cell/vars/{place}"] = value
    for name in ("layer", "forward_layer", "backward_layer"):  # a wrapper's
        if name in group:
            _convert_part(group[name], inner.get(name) or inner["layer"])
    if "layers" not in inner or "layers" not in group:
        return
    old, before, after = group["layers"], Counter[str](), Counter[str]()
    new = group.create_group("modern")
    for layer in inner["layers"]:
        kind = layer["class_name"]
        name, its = _numbered(kind, before), _numbered(_CUDNN.get(kind, kind), after)
        if name in old:
            _convert_part(old[name], layer)
            new.move(f"/{old[name].name.lstrip('/')}", its)
    del group["layers"]
    group.move("modern", "layers")


def _numbered(kind: str, seen: Counter[str]) -> str:
    """The name that Keras gives the next part of this class."""
    name = to_snake_case(kind)
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}_{seen[name] - 1}"
