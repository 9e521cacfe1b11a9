"""Keras' own tests of recurrent layers, masking, files and export, with whorl's layers in their place.

Nothing else is changed.  The tests of ONNX's files need onnxruntime: they run where it is installed.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

keras = pytest.importorskip("keras")

TESTS = {
    "torch": ["layers/rnn", "layers/core/masking_test.py", "saving", "legacy", "export/torch_test.py"],
    "jax": ["layers/rnn", "layers/core/masking_test.py", "saving", "legacy"],
}
# Each asks which of Keras' own fused kernels Keras would take; with whorl it takes none of them.
PRIVATE = {"test_fused_lstm_eligibility", "test_fused_gru_eligibility", "test_keeps_use_cudnn"}
# Of files, and no recurrent layer is in them: they fail with Keras' own layers too, for want of TensorFlow (remote
# paths) and of the h5py that they were written for.
WITHOUT_WHORL_TOO = {
    "file_editor_test.py::SavingTest::test_basics",
    "file_editor_test.py::SavingTest::test_scalar_weight",
    "saving_lib_test.py::SavingBattleTest::test_legacy_load_skips_missing_nested_containers",
    "saving_lib_test.py::SavingBattleTest::test_remove_weights_only_saving_and_loading",
    "saving_lib_test.py::SavingDiskIOStoreTest::test_disk_io_store_remote_working_dir_is_preserved",
}
ELSEWHERE = "conv_lstm or efficientnet"
"""Layers that are no recurrent ones of whorl's, and files of a network without any: some 100 of 260 seconds on JAX."""


@pytest.mark.parametrize("backend", TESTS)
def test_keras_own_tests_pass(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    source, here = Path(keras.src.__file__).parent, Path(__file__).parent
    tests = TESTS[backend]
    if backend == "torch" and importlib.util.find_spec("onnxruntime"):
        tests = [*tests, "export/onnx_test.py"]
    folders = [str(here.parent / "src"), str(here), os.environ.get("PYTHONPATH", "")]  # Keras may lie in its own
    environment = os.environ | {
        "KERAS_BACKEND": backend,
        "JAX_PLATFORMS": "cpu",
        # most of the time of small programs is their compilation, and many are made again and again
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "keras_in_place", "-W", "ignore"]
    (settings := tmp_path / "pytest.ini").write_text("[pytest]\n")  # not ours, where Keras lies inside this repository
    command += ["-k", f"not ({ELSEWHERE})"]
    command += ["-c", str(settings), "--rootdir", str(tmp_path), "-rf", *(str(source / test) for test in tests)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    failed = set(re.findall(r"^FAILED (\S*)", done.stdout, re.MULTILINE))
    of_whorl = {test for test in failed if not test.endswith(tuple(WITHOUT_WHORL_TOO))}
    passed = re.search(r"(\d+) passed", done.stdout)
    assert {test.split("::")[-1] for test in of_whorl} == PRIVATE, done.stdout[-4000:] + done.stderr[-2000:]
    assert passed is not None
    assert int(passed[1]) >= 240
