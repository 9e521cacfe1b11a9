"""Steps with means on engine `cpu`: what their loops read and write, and rows that are taken together."""

from dataclasses import replace

import pytest
import torch

import whorl
from comparison import broken
from engine_cases import CELLS, FORMS, errors
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
    """What breaks the error rule is held to it by root mean squares at the points beside it too.

    With 3 rows of 16 units steps amplify what is rounded, of one draw up to 9 times what the rule gives: at 24 points
    beside each other the root mean square is 0.45 to 0.53 of it, with two sigmoids and two ways to a variance alike.
    """
    for name in ("mask and lengths", "reset"):
        case, eps = replace(FORMS[name], batch=batch, units=units), torch.finfo(torch.float32).eps
        rows = [errors("cpu", CELLS["layer_norm_lstm"], case, torch.float32)]
        if broken(rows, eps):
            beside = [replace(case, beside=place) for place in range(1, 24)]
            rows += [errors("cpu", CELLS["layer_norm_lstm"], one, torch.float32) for one in beside]
        assert broken(rows, eps) == {}


@pytest.mark.parametrize("batch", [2, 5])
def test_threads_that_share_rows_taken_together(batch: int) -> None:
    """To the bit as one thread; teams of two and more."""
    layer, x = whorl.LSTM(20, 260, layer_norm=True, engine="cpu"), torch.randn(5, batch, 20)
    found = []
    for count in (1, 2 * batch, 3 * batch):
        with threads(count):
            found.append(sweeps(layer, x))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("units", [20, 128, 129])
@pytest.mark.parametrize("batch", [2, 5])
def test_the_gradient_of_a_row_does_not_depend_on_the_rows_beside_it(batch: int, units: int) -> None:
    """To the bit, in another order of rows; backward four are taken together, of many units two."""
    layer, x, grad = whorl.LSTM(7, units, layer_norm=True, engine="cpu"), torch.randn(4, batch, 7), torch.ones(4, 1, 1)
    order = torch.arange(batch).roll(1)
    found = []
    for rows in (x, x[:, order]):
        leaf = rows.clone().requires_grad_()
        layer(leaf)[0].backward(grad.expand(4, batch, units))
        found.append(leaf.grad)
    assert torch.equal(found[0][:, order], found[1])
    assert found[0].any(dim=-1).all()
