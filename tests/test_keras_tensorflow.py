"""whorl.keras on TensorFlow, where it is installed, in a process of its own: Keras' path runs, and it says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("tensorflow")

PROGRAM = """
import sys, warnings
import keras, numpy as np
import whorl, whorl.keras

x = np.random.default_rng(0).standard_normal((3, 5, 4)).astype("float32")
for name in ("LSTM", "GRU", "SimpleRNN"):
    ours, stock = (getattr(source, name)(3, recurrent_dropout=0.2, seed=1) for source in (whorl.keras, keras.layers))
    for layer in (ours, stock):
        layer.build(x.shape)
    ours.set_weights(stock.get_weights())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ours(x, training=True)
    assert "set KERAS_BACKEND=torch before keras is imported" in str(said[0].message)
    np.testing.assert_array_equal(found, stock(x, training=True))
wanted = np.load(f"{sys.argv[1]}/outputs.npz")
for name, given in (("plain", "tokens"), ("cudnn", "x"), ("mixed", "x4")):
    for kind in ("h5", "keras"):
        model = whorl.keras.load_model(f"{sys.argv[1]}/{name}.{kind}")
        np.testing.assert_allclose(model.predict(wanted[given], verbose=0), wanted[name], rtol=1e-5, atol=1e-6)
model = keras.Sequential([keras.Input((5, 4)), whorl.keras.Bidirectional(whorl.keras.LSTM(3)), keras.layers.Dense(1)])
model.compile("adam", "mse", jit_compile=True)
model.fit(x, np.ones((3, 1)), verbose=0)
assert "Keras runs on tensorflow" in str(whorl.keras.explain(model, x))
"""


def test_on_tensorflow_keras_own_path_runs() -> None:
    here = Path(__file__).parent
    folders = [str(here.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"KERAS_BACKEND": "tensorflow", "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    command = [sys.executable, "-c", PROGRAM, str(here / "keras2")]
    done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
