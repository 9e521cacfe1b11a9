"""Products whose columns lie in panels of one to some vectors, read where they lie or packed."""

import pytest
import torch
from torch import Tensor

import whorl
from comparison import error
from whorl import compiler
from whorl.engines.cpu.sweep import Factor, Products, kernel

pytestmark = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")

COLUMNS = [1, 15, 16, 17, 32, 48, 63, 64, 65, 80, 95, 96, 112, 144, 160, 176, 272]
DTYPES = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2e-6}


def products(dtype: torch.dtype, threads: int) -> Products:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    cell = whorl.RNN(1, 1).plan(torch.zeros(1, 1, 1)).problem.form.cell
    return Products(kernel(cell, dtype), wide, threads, 4)


def same_with_threads(columns: int, dtype: torch.dtype, call: str, *arguments: object, **named: object) -> Tensor:
    one, two = (getattr(products(dtype, threads), call)(*arguments, **named)[:, :columns] for threads in (1, 2))
    assert torch.equal(one, two)
    return one


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_product_of_rows(columns: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(7, 37).to(dtype), torch.randn(columns, 37).to(dtype)
    bias = torch.randn(columns, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    made = same_with_threads(columns, dtype, "rows", x, weight, bias)
    assert error(made, x.double() @ weight.double().t() + bias) <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_product_over_rows(columns: int, rows: int, dtype: torch.dtype) -> None:
    """Of rows that lie one after the other, of rows that lie apart, and of those times a factor."""
    a, wider = torch.randn(rows, 50).to(dtype), torch.randn(rows, columns + 32).to(dtype)
    factor = torch.randn(4, columns, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for b in (wider[:, :columns].contiguous(), wider[:, 16 : 16 + columns]):
        wanted, more = a.double().t() @ b.double(), torch.randn(50, columns, dtype=factor.dtype)
        made = same_with_threads(columns, dtype, "outer", a, b)
        assert error(made, wanted) <= DTYPES[dtype]
        added = products(dtype, 2).outer(a, b, more.clone())
        assert error(added, wanted + more) <= DTYPES[dtype]
        made = same_with_threads(columns, dtype, "outer", a, b, factor=Factor(factor, None))
        times = (b.double() * factor.double()[torch.arange(rows) % 4]).to(dtype).double()
        assert error(made, a.double().t() @ times) <= DTYPES[dtype]


@pytest.mark.parametrize("units", [144, 160, 176])
def test_a_team_and_one_thread_give_the_same(units: int) -> None:
    """Of two threads with the units of one row, whose panels they share."""
    layer = whorl.LSTM(16, units, engine="cpu")
    x = torch.randn(5, 1, 16, requires_grad=True)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y = layer(x)[0]
            found.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("marks", ["", "mask", "lengths", "hardly any"])
@pytest.mark.parametrize("batch", [8, 37])
def test_shares_of_a_batch_are_the_same_for_any_number_of_threads(batch: int, marks: str, layer_norm: bool) -> None:
    """Each has sums of its own, of which some may be of no rows; all together are those of float64."""
    time, threads = 30, torch.get_num_threads()
    layer = whorl.LSTM(5, 17, engine="cpu", layer_norm=layer_norm)
    exact = whorl.LSTM(5, 17, engine="reference", layer_norm=layer_norm, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(time, batch, 5)
    masks = {"mask": torch.rand(time, batch) < 0.6, "hardly any": torch.arange(batch) == torch.full((time, 1), 3)}
    given = {"mask": masks[marks]} if marks in masks else {}
    given |= {"lengths": torch.arange(batch) % time} if marks == "lengths" else {}

    def gradients(layer: whorl.LSTM, x: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        return [*torch.autograd.grad(layer(leaf, **given)[0].square().sum(), [leaf, *layer.parameters()])]

    found = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(gradients(layer, x))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    for one, truth in zip(found[0], gradients(exact, x.double()), strict=True):
        assert error(one, truth) <= 2e-5
