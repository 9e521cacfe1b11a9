"""Steps with means on engine `cpu`: what their loops read and write, and rows that are taken together."""

from dataclasses import replace

import pytest
import torch

import whorl
from engine_cases import CELLS, FORMS, assert_agrees
from test_cpu_engine import sweeps, threads
from whorl.engines.cpu import generate


def test_what_is_kept_as_it_is_read_takes_no_loop_of_its_own() -> None:
    """Of layer norm: loops of sigmoids and of the rest before the mean of c, and one after it, where all is stored."""
    made = generate.source(CELLS["layer_norm_lstm"])
    assert made.forward.text.count("EACH_ALONE") == 3
    assert made.forward.text.count("[u] = keep_") == made.saved


def test_what_each_row_keeps_fills_whole_lines() -> None:
    """Of 64 bytes: a row of the next would lie across two."""
    assert generate.source(CELLS["layer_norm_lstm"]).saved_means == 16
    assert generate.source(CELLS["lstm"]).saved_means == 0


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("units", [16, 37])
def test_rows_that_are_taken_together(batch: int, units: int) -> None:
    for name in ("mask and lengths", "reset"):
        assert_agrees("cpu", CELLS["layer_norm_lstm"], replace(FORMS[name], batch=batch, units=units), torch.float32)


@pytest.mark.parametrize("batch", [2, 5])
def test_threads_that_share_rows_taken_together(batch: int) -> None:
    """To the bit as one thread; teams of two and more."""
    layer, x = whorl.LSTM(20, 260, layer_norm=True, engine="cpu"), torch.randn(5, batch, 20)
    found = []
    for count in (1, 2 * batch, 3 * batch):
        with threads(count):
            found.append(sweeps(layer, x))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
