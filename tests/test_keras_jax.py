"""The tests of keras_on_jax.py and keras_on_jax_emulated.py, in a process whose Keras runs on JAX."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("jax")


def run(platform: str, tests: str = "keras_on_jax.py") -> None:
    here = Path(__file__).parent
    folders = [str(here.parent / "src"), str(here), os.environ.get("PYTHONPATH", "")]  # Keras may lie in its own
    environment = os.environ | {
        "WHORL_TEST_KERAS": "jax",
        "JAX_PLATFORMS": platform,
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # most of the time of small programs is their compilation
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # torch needs memory too
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(here / tests)]
    done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_keras_on_jax() -> None:
    run("cpu")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_calls_by_tapes() -> None:
    run("cpu", "keras_on_jax_emulated.py")


@pytest.mark.gpu
def test_keras_on_jax_on_a_gpu() -> None:
    run("cuda")
