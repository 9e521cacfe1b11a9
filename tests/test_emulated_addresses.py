"""What compute-sanitizer's memcheck finds on a GPU, where there is none: kernels that read or write beside a tensor.

The emulator finds what lies past the end of shared memory itself.
"""

import os
import subprocess
import sys
from pathlib import Path

from test_cpu_compilers import sanitizer

HERE = Path(__file__).parent
TESTS = {
    "clusters": [
        "test_emulated.py::test_plain_layers",
        "test_emulated.py::test_float32[GRU-33-options1-False]",
        "test_emulated.py::test_float32[GRU-33-options1-True]",
        "test_emulated.py::test_sub_tiles_that_travel_while_others_are_computed[LSTM-33-7-1-dtype5-ahead5-back5-options5]",
        "test_emulated_options.py::test_random_options[1]",
    ],
    "blocks exchange": [
        "test_emulated.py::test_layers_spread_over_blocks_that_exchange[bfloat16-LSTM-37-11-3-ahead1-back1-options1]",
        "test_emulated.py::test_layers_spread_over_blocks_that_exchange[tf32-GRU-37-70-3-ahead3-back3-options3]",
        "test_emulated.py::test_layers_spread_over_blocks_that_exchange[float32-RNN-45-25-36-ahead4-back4-options4]",
        "test_emulated_options.py::test_random_options_where_blocks_exchange[1]",
        "test_no_clusters.py::test_it_is_right_on_the_host[20]",
    ],
    "four warps": [
        "test_emulated.py::test_products_of_four_warps[float16-LSTM-37-37-36-ahead1-None-options1]",
        "test_emulated.py::test_products_of_four_warps[tf32-LSTM-70-33-3-ahead3-3-options3]",
        "test_emulated.py::test_products_of_what_has_come_while_the_rest_is_on_its_way[bfloat16-tanh-520-4-ahead3]",
        "test_emulated.py::test_products_of_four_warps_backward[dtype0-LSTM-150-33-3-back3-3-options3]",
        "test_emulated.py::test_products_of_four_warps_backward[dtype1-GRU-45-43-4-back2-0-options2]",
    ],
    "scales at each step": [
        "test_emulated.py::test_layers_spread_over_blocks_that_exchange[tf32-LSTM-37-21-36-ahead6-back6-options6]",
        "test_emulated.py::test_products_of_what_has_come_while_the_rest_is_on_its_way[tf32-relu-780-3-ahead2]",
    ],
    "means": [
        "test_staged.py::test_means_that_a_cluster_exchanges[layer norm of r and c-dtype0]",
        "test_whole.py::test_whole_sequences[layer norm of r and c-4-1-2-case0-dtype0-0]",
        "test_whole.py::test_whole_sequences[layer norm of r and c-8-2-2-case11-dtype11-0]",
        "test_whole.py::test_tf32_is_multiplied_as_float16[layer norm of r and c-37-form0]",
        "test_sliced.py::test_sliced_sequences[layer norm of r and c-2-4-4-case0-dtype0-0]",
        "test_sliced.py::test_sliced_sequences[in_turn-2-3-4-case7-dtype7-0]",
        "test_sliced.py::test_sliced_sequences[layer norm of r and c-16-5-8-case11-dtype11-0]",
        "test_sliced.py::test_tf32_is_multiplied_as_float16[layer norm of r and c-37-form0]",
        "test_sliced_forward.py::test_sliced_sequences[in_turn-2-3-2-2-case7-dtype7-0]",
        "test_sliced_forward.py::test_sliced_sequences[layer norm of r and c-16-5-1-2-case11-dtype11-0]",
        "test_sliced_forward.py::test_sliced_sequences[layer norm of r and c-2-12-3-2-case14-dtype14-0]",
        "test_sliced_forward.py::test_tf32_is_multiplied_as_float16[layer norm of r and c-37-1-form0]",
        "test_spread_whole.py::test_whole_sequences[layer norm of r and c-8-2-None-case2-dtype2-0]",
        "test_spread_whole.py::test_whole_sequences[in_turn-32-1-None-case6-dtype6-0]",
        "test_spread_whole.py::test_whole_sequences_backward[layer norm of r and c-8-4-2-None-case2-dtype2-0]",
        "test_spread_whole.py::test_whole_sequences_backward[in_turn-32-1-1-None-case6-dtype6-0]",
        "test_staged.py::test_a_step_of_several_stages[layer norm and a product]",
        "test_staged.py::test_a_step_of_several_stages_where_blocks_exchange_through_l2[3-layer_norm_lstm]",
        "test_staged.py::test_a_step_of_several_stages_where_blocks_exchange_through_l2[4-gru_before]",
        "test_norm_of_x.py::test_its_kernels[no whole word at a gate's end-True]",
        "test_norm_of_x.py::test_its_kernels[several warps, several rows in a block-False]",
        "test_norm_of_x.py::test_its_kernels[sums of many blocks-True]",
    ],
}


def run(tests: list[str], tmp_path: Path, planted: str = "") -> tuple[int, str]:
    """What pytest gives, and what the sanitizer says."""
    sanitizer("address", tmp_path)  # or the test is skipped
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return=0:use_sigaltstack=0:log_path={tmp_path}/said",
        "WHORL_TEST_PLANTED": planted,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), str(HERE)]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "addresses", *tests]
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=600)
    said = "\n".join(path.read_text() for path in tmp_path.glob("said*"))
    assert done.returncode or " passed" in done.stdout, done.stdout
    return done.returncode, said + done.stdout[-2000:]


def test_kernels_read_and_write_tensors_alone(tmp_path: Path) -> None:
    """In one process: each would import torch under the sanitizer."""
    code, said = run([test for tests in TESTS.values() for test in tests], tmp_path)
    assert "ERROR: AddressSanitizer" not in said
    assert code == 0, said


def test_a_planted_fault_is_found(tmp_path: Path) -> None:
    """A bias is read eight places further."""
    tests = [test for test in TESTS["four warps"] if "_on_its_way" in test][:1]
    code, said = run(tests, tmp_path, planted="wide(at[1]) -> wide(at[9])")
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in said
    assert code != 0
