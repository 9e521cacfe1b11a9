"""Products in float32 by the matrix unit of a processor, and all of engine `cpu` at batches that use it.

Where this processor has no such unit the same is asked of the products that are made in its place.
"""

import platform
from pathlib import Path

import pytest
import torch
from torch import Tensor

import whorl
from engine_cases import CELLS
from test_cpu_engine import threads
from whorl.engines.cpu.sweep import NO_FACTOR, Factor, Products, kernel

EPS = torch.finfo(torch.float32).eps
MANY, FEW = 16, 15
"""Sequences: from so many on the unit is used, and with so many it is not."""


def products(batch: int, count: int = 2) -> Products:
    return Products(kernel(CELLS["lstm"], torch.float32), torch.float32, count, batch)


def has_the_unit() -> bool:
    text = Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
    return "amx_bf16" in text and "avx512_bf16" in text


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).detach().norm() / wanted.detach().norm())


@pytest.mark.skipif(not has_the_unit(), reason="this processor has no unit for products of bfloat16")
def test_many_sequences_use_the_unit_and_few_do_not() -> None:
    x, weight = torch.randn(64, 128), torch.randn(96, 128)
    few, many = (products(batch).rows(x, weight)[:, :96] for batch in (FEW, MANY))
    assert torch.equal(few, products(1).rows(x, weight)[:, :96])
    assert not torch.equal(few, many)
    wanted = x.double() @ weight.double().t()
    assert error(many, wanted) < error(few, wanted)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 48, 261])
@pytest.mark.parametrize("inputs, outputs", [(20, 16), (32, 17), (64, 256), (83, 31), (257, 130), (600, 65)])
def test_rows_of_many_sequences(rows: int, inputs: int, outputs: int) -> None:
    """As exact as torch's own product, and to the bit the same by any threads, alone, and however weights lie."""
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    wanted = torch.addmm(bias.double(), x.double(), weight.double().t())
    found = products(MANY).rows(x, weight, bias)[:, :outputs]
    assert error(found, wanted) <= 2 * error(torch.addmm(bias, x, weight.t()), wanted) + 4 * EPS
    for count in (1, 3):
        assert torch.equal(products(MANY, count).rows(x, weight, bias)[:, :outputs], found)
    turned = weight.t().contiguous().t()
    assert torch.equal(products(MANY).rows(x, turned, bias)[:, :outputs], found)
    assert torch.equal(products(MANY).rows(x[-1:], weight, bias)[0, :outputs], found[-1])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rows, columns, inputs", [(256, 16, 16), (257, 512, 10), (700, 600, 64), (1000, 65, 33)])
def test_sums_over_many_rows(rows: int, columns: int, inputs: int, scaled: bool) -> None:
    """Of the gradients of weights, with and without a factor for each sequence."""
    a, b, sums = torch.randn(rows, columns), torch.randn(rows, inputs), torch.zeros(columns)
    factor = Factor(torch.rand(20, inputs), None) if scaled else NO_FACTOR
    entered = b * factor.rows.repeat(-(-rows // 20), 1)[:rows] if factor.rows is not None else b
    wanted = a.double().t() @ entered.double()
    found = products(MANY).outer(a, b, sums=sums, factor=factor)
    assert error(found, wanted) <= 2 * error(a.t() @ entered, wanted) + 4 * EPS
    assert error(sums, a.double().sum(0)) <= 2 * error(a.sum(0), a.double().sum(0)) + 4 * EPS
    for count in (1, 3, 6):
        assert torch.equal(products(MANY, count).outer(a, b, factor=factor), found)


ODD = {"infinity": torch.inf, "NaN": torch.nan, "2^127": 2.0**127, "the largest": torch.finfo(torch.float32).max}


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    torch.testing.assert_close(found.nan_to_num(), wanted.nan_to_num(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ODD)
def test_what_no_part_holds(name: str) -> None:
    """In a row, and in a weight: each sum is what IEEE 754 says, and the rows beside are as they were."""
    x, weight = torch.rand(20, 300) - 0.5, torch.rand(48, 300) - 0.5
    clean = products(MANY).rows(x, weight)[:, :48]
    for where in (3, 290):  # in the first k that are near at once, and behind them
        spoilt = x.clone()
        spoilt[7, where] = ODD[name]
        found = products(MANY).rows(spoilt, weight)[:, :48]
        assert_alike(found, spoilt @ weight.t())
        assert torch.equal(found[:7], clean[:7])
        assert torch.equal(found[8:], clean[8:])
        heavy = weight.clone()
        heavy[5, where] = ODD[name]
        assert_alike(products(MANY).rows(x, heavy)[:, :48], x @ heavy.t())
    for where in range(2):
        pair = [torch.rand(600, 64) - 0.5, torch.rand(600, 32) - 0.5]
        pair[where][37, 5] = ODD[name]
        sums = torch.zeros(64)
        assert_alike(products(MANY).outer(*pair, sums=sums), pair[0].t() @ pair[1])
        assert_alike(sums, pair[0].sum(0))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTM with dropout by gate", "LSTM with a mask"])
def test_layers_of_many_sequences(kind: str) -> None:
    """Outputs and gradients by the error rule, the same to the bit by any threads; and the stepper's."""
    name, _, more = kind.partition(" with ")
    options = dict(recurrent_dropout=0.3, recurrent_dropout_mode="gate") if "dropout" in more else {}
    layer = getattr(whorl, name)(40, 65, engine="cpu", **options)
    x, mask = torch.randn(24, 2 * MANY + 1, 40), None
    if "mask" in more:
        mask = torch.rand(24, 2 * MANY + 1) < 0.7

    def everything(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        x = x.detach().requires_grad_()
        y = layer(x, **({} if mask is None else {"mask": mask}))[0]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(everything(layer, x))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
    if not more:
        stepper = layer.eval().stepper(x.shape[1])
        y = layer(x)[0]
        for t in range(3):
            assert torch.equal(stepper(x[t]), y[t])
        layer.train()
    layer.engine = "reference"
    baseline = everything(layer, x)
    wanted = everything(layer.double(), x.double())
    for one, plain, truth in zip(found[0], baseline, wanted, strict=True):
        assert error(one, truth) <= 2 * error(plain, truth) + 4 * EPS
