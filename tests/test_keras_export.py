"""model.export(format="onnx") of whorl.keras layers: one operator for any length, or every step of a fixed one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
if keras.backend.backend() != "torch":
    pytest.skip("Keras was imported with another backend", allow_module_level=True)

from onnx.reference import ReferenceEvaluator  # noqa: E402

import whorl  # noqa: E402
import whorl.keras as keras_of_whorl  # noqa: E402

ONE_OPERATOR: dict[str, Callable[[], Any]] = {
    "LSTM": lambda: keras_of_whorl.LSTM(4, return_sequences=True, dropout=0.2),
    "GRU": lambda: keras_of_whorl.GRU(4, go_backwards=True),
    "RNN": lambda: keras_of_whorl.SimpleRNN(4, use_bias=False),
    "both": lambda: keras_of_whorl.Bidirectional(keras_of_whorl.LSTM(4)),
}
WRITTEN_OUT: dict[str, Callable[[], Any]] = {
    "relu": lambda: keras_of_whorl.LSTM(4, activation="relu"),
    "reset before": lambda: keras_of_whorl.GRU(4, reset_after=False),
    "masked": lambda: keras.Sequential([keras.layers.Masking(), keras_of_whorl.LSTM(4)]),
}


def exported(layer: Any, time: int | None, file: Path) -> tuple[Any, set[str], Any]:
    """What runs the file, its operators, and the model."""
    model = keras.Sequential([keras.Input((time, 3)), layer])
    model(np.zeros((1, time or 2, 3), "float32"))
    model.export(file, format="onnx", verbose=False)
    graph = onnx.load(file)
    runs = ReferenceEvaluator(graph)

    def run(x: np.ndarray) -> np.ndarray:
        return runs.run(None, {graph.graph.input[0].name: x})[0]

    return run, {node.op_type for node in graph.graph.node}, model


@pytest.mark.parametrize("kind", ONE_OPERATOR)
def test_a_plain_layer_is_one_operator_for_any_length(kind: str, tmp_path: Path) -> None:
    run, operators, model = exported(ONE_OPERATOR[kind](), None, tmp_path / "model.onnx")
    assert operators & {"LSTM", "GRU", "RNN"} == {"LSTM" if kind == "both" else kind}
    for time in (1, 2, 7):
        x = np.random.default_rng(time).standard_normal((3, time, 3)).astype("float32")
        np.testing.assert_allclose(run(x), model.predict(x, verbose=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_another_is_written_out_at_a_fixed_length(kind: str, tmp_path: Path) -> None:
    run, _, model = exported(WRITTEN_OUT[kind](), 4, tmp_path / "model.onnx")
    x = np.random.default_rng(0).standard_normal((3, 4, 3)).astype("float32")
    x[:, 2] = 0  # masked, where that counts
    np.testing.assert_allclose(run(x), model.predict(x, verbose=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_an_open_length_is_refused_where_it_would_be_written_out(kind: str, tmp_path: Path) -> None:
    """Keras 3.15 exports the one step of its example, without a word."""
    with pytest.raises(whorl.UnsupportedError, match="writes out every step, and the length is open"):
        exported(WRITTEN_OUT[kind](), None, tmp_path / "model.onnx")
