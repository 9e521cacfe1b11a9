"""Keras' own tests of recurrent layers and masking, with whorl's layers in their place and nothing else changed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

keras = pytest.importorskip("keras")

TESTS = ["layers/rnn", "layers/core/masking_test.py"]
# Each asks which of Keras' own fused kernels Keras would take; with whorl it takes none of them.
PRIVATE = {"test_fused_lstm_eligibility", "test_fused_gru_eligibility", "test_keeps_use_cudnn"}


def test_keras_own_tests_pass(tmp_path: Path) -> None:
    source, here = Path(keras.src.__file__).parent, Path(__file__).parent
    environment = os.environ | {
        "KERAS_BACKEND": "torch",
        "PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "keras_in_place", "-W", "ignore"]
    (settings := tmp_path / "pytest.ini").write_text("[pytest]\n")  # not ours, where Keras lies inside this repository
    command += ["-c", str(settings), "--rootdir", str(tmp_path), "-rf", *(str(source / test) for test in TESTS)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    failed = set(re.findall(r"^FAILED \S*::(\w+)", done.stdout, re.MULTILINE))
    passed = re.search(r"(\d+) passed", done.stdout)
    assert failed == PRIVATE, done.stdout[-4000:] + done.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) >= 75
