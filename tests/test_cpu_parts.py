"""Products in float32 and bfloat16 by the matrix unit of a processor, and all of engine `cpu` at batches that use it.

Where this processor has no such unit the same is asked of the products that are made in its place.
"""

import ctypes
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import whorl
from engine_cases import CELLS, FORMS, assert_agrees
from test_cpu_engine import sweeps, threads
from whorl.engines import host
from whorl.engines.cpu import generate, sweep
from whorl.engines.cpu.plain import sizes
from whorl.engines.cpu.sweep import NO_FACTOR, Factor, Products, kernel
from whorl.plan import decide

EPS = torch.finfo(torch.float32).eps
MANY, FEW = 16, 15
"""Sequences: from so many on the unit is used in float32, and with so many it is not."""
DTYPES = [torch.float32, torch.bfloat16]


def products(batch: int, count: int = 2, dtype: torch.dtype = torch.float32) -> Products:
    return Products(kernel(CELLS["lstm"], dtype), torch.float32, count, batch)


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


@pytest.mark.skipif(not has_the_unit(), reason="this processor has no unit for products of bfloat16")
@pytest.mark.parametrize("batch", [1, MANY])
def test_products_of_bfloat16_are_summed_as_the_unit_sums(batch: int) -> None:
    """To the bit: of 32 products those with an even k and those with an odd one, both to the sum before."""
    x, weight, bias = torch.randn(3, 70).bfloat16(), torch.randn(40, 70).bfloat16(), torch.randn(40)
    made = torch.zeros(3, 40, 96)
    made[..., :70] = x.float()[:, None] * weight.float()
    wanted = bias.expand(3, 40)
    for tile in made.unflatten(-1, (3, 16, 2)).unbind(-3):
        sums = torch.zeros(3, 40, 2)
        for pair in tile.unbind(-2):
            sums = sums + pair
        wanted = wanted + (sums[..., 0] + sums[..., 1])
    assert torch.equal(products(batch, dtype=torch.bfloat16).rows(x, weight, bias)[:, :40], wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 48, 67, 261])
@pytest.mark.parametrize("inputs, outputs", [(20, 16), (32, 17), (64, 256), (83, 31), (257, 130), (600, 65)])
def test_rows_of_many_sequences(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    """As exact as torch's own product, and to the bit the same by any threads, alone, and however weights lie.

    In bfloat16 for few sequences too.
    """
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight = x.to(dtype), weight.to(dtype)
    made = products(MANY, dtype=dtype)
    wanted = torch.addmm(bias.double(), x.double(), weight.double().t())
    found = made.rows(x, weight, bias)[:, :outputs]
    assert error(found, wanted) <= 2 * error(torch.addmm(bias, x.float(), weight.float().t()), wanted) + 4 * EPS
    for count in (1, 3):
        assert torch.equal(products(MANY, count, dtype).rows(x, weight, bias)[:, :outputs], found)
    turned = weight.t().contiguous().t()
    assert torch.equal(made.rows(x, turned, bias)[:, :outputs], found)
    assert torch.equal(made.rows(x[-1:], weight, bias)[0, :outputs], found[-1])
    if dtype == torch.bfloat16:
        assert torch.equal(products(1, dtype=dtype).rows(x[-1:], weight, bias)[0, :outputs], found[-1])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="this processor has no x86-64")
def test_a_row_alone_where_the_compiler_spares_fused_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on AMD EPYC without AVX-512: where one sum waits for itself GCC would multiply and add, and round twice."""
    monkeypatch.setattr(host, "_NATIVE", {platform.machine(): "-march=x86-64-v3 -mtune=znver3"})
    monkeypatch.setattr(sweep, "_loop", sweep._loop.__wrapped__)
    made = Products(kernel.__wrapped__(CELLS["lstm"], torch.float32), torch.float32, 1, FEW)
    x, weight = torch.randn(17, 83), torch.randn(5, 83)
    found = made.rows(x, weight)[:, :5]
    assert torch.equal(torch.cat([made.rows(row, weight)[:, :5] for row in x.split(1)]), found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "rows, columns, inputs",
    [(16, 20, 17), (256, 16, 16), (257, 512, 10), (700, 600, 64), (1000, 65, 33), (1030, 40, 48)],
)
def test_sums_over_many_rows(rows: int, columns: int, inputs: int, scaled: bool, dtype: torch.dtype) -> None:
    """Of the gradients of weights, with and without a factor for each sequence."""
    a, b, sums = torch.randn(rows, columns).to(dtype), torch.randn(rows, inputs).to(dtype), torch.zeros(columns)
    factor = Factor(torch.rand(20, inputs), None) if scaled else NO_FACTOR
    entered = b.float()
    if factor.rows is not None:
        entered = (entered * factor.rows.repeat(-(-rows // 20), 1)[:rows]).to(dtype).float()
    wanted = a.double().t() @ entered.double()
    found = products(MANY, dtype=dtype).outer(a, b, sums=sums, factor=factor)
    assert error(found, wanted) <= 2 * error(a.float().t() @ entered, wanted) + 4 * EPS
    assert error(sums, a.double().sum(0)) <= 2 * error(a.float().sum(0), a.double().sum(0)) + 4 * EPS
    for count in (1, 3, 6):
        assert torch.equal(products(MANY, count, dtype).outer(a, b, factor=factor), found)


ODD = {"infinity": torch.inf, "NaN": torch.nan, "2^127": 2.0**127, "the largest": torch.finfo(torch.float32).max}


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    torch.testing.assert_close(found.nan_to_num(), wanted.nan_to_num(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ODD)
def test_what_no_part_holds(name: str, dtype: torch.dtype) -> None:
    """In a row, and in a weight: each sum is what IEEE 754 says, and the rows beside are as they were."""

    def drawn(*shape: int) -> Tensor:
        return (torch.rand(shape) - 0.5).to(dtype)

    made, odd = products(MANY, dtype=dtype), torch.finfo(dtype).max if name == "the largest" else ODD[name]
    x, weight = drawn(20, 300), drawn(48, 300)
    clean = made.rows(x, weight)[:, :48]
    for where in (3, 290):  # in the first k that are near at once, and behind them
        spoilt = x.clone()
        spoilt[7, where] = odd
        found = made.rows(spoilt, weight)[:, :48]
        assert_alike(found, spoilt.float() @ weight.float().t())
        assert torch.equal(found[:7], clean[:7])
        assert torch.equal(found[8:], clean[8:])
        heavy = weight.clone()
        heavy[5, where] = odd
        assert_alike(made.rows(x, heavy)[:, :48], x.float() @ heavy.float().t())
    for where in range(2):
        pair = [drawn(600, 64), drawn(600, 32)]
        pair[where][37, 5] = odd
        sums = torch.zeros(64)
        assert_alike(made.outer(*pair, sums=sums), pair[0].float().t() @ pair[1].float())
        assert_alike(sums, pair[0].float().sum(0))


@pytest.mark.skipif(not has_the_unit(), reason="this processor has no unit for products of bfloat16")
def test_the_unit_is_told_the_shape_of_its_registers() -> None:
    """All of it, also where the compiler knows it: else the processor ends the program."""
    asked = 'extern "C" bool whorl_told() { kernel::configure(16), _tile_release(); return true; }'
    begin = 'extern "C" bool whorl_given() { return kernel::unit_is_given(); }'
    library = host.load("a shape", "\n".join((generate.shared(), begin, asked)), "-DWHORL_DTYPE=32")
    path = library._name
    told = f"import ctypes; it = ctypes.CDLL({path!r}); assert it.whorl_given() and it.whorl_told()"
    subprocess.run([sys.executable, "-c", told], check=True)


@pytest.mark.skipif(not has_the_unit(), reason="this processor has no unit for products of bfloat16")
def test_below_the_normal_numbers() -> None:
    """They count as zero; the smallest normal number counts."""
    tiny = torch.finfo(torch.bfloat16).tiny
    x, made = torch.tensor([[tiny], [tiny / 2]]).repeat(1, 32).bfloat16(), products(1, dtype=torch.bfloat16)
    found = made.rows(x, torch.ones(16, 32).bfloat16())[:, :16]
    assert torch.equal(found, torch.tensor([[32 * tiny], [0.0]]).expand(2, 16))


@pytest.mark.skipif(not has_the_unit(), reason="this processor has no unit for products of bfloat16")
def test_sigmoid_and_tanh_for_bfloat16() -> None:
    """Beside what a bfloat16 rounds away, 2^-9, nothing: and 0 and 1 where they are, of infinities too."""
    library = host.load("functions", generate.source(CELLS["lstm"]).text, "-DWHORL_DTYPE=16 -DWHORL_TESTED")
    x = torch.cat([torch.randn(100_000) * scale for scale in (1e-6, 0.1, 1, 10, 30)])
    x = torch.cat([x, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 1e38, -1e38])])
    for place, function in ((2, torch.tanh), (5, torch.sigmoid)):
        y, wanted = torch.full_like(x, 7.0), function(x.double())
        library.whorl_maths(*map(ctypes.c_int64, (place, len(x))), *map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr())))
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y[-6:].nan_to_num(), wanted[-6:].float().nan_to_num())
        normal = wanted.abs() >= torch.finfo(torch.float32).tiny
        assert ((y.double() - wanted).abs() / wanted.abs())[normal].max() < 2.0**-17


@pytest.mark.parametrize("dtype, batch", [(torch.float32, MANY), (torch.float32, FEW), (torch.bfloat16, 1)], ids=str)
def test_explain_says_that_products_go_by_the_unit(dtype: torch.dtype, batch: int) -> None:
    layer = whorl.LSTM(64, 64, dtype=dtype, engine="cpu")
    told = str(whorl.explain(layer, torch.zeros(5, batch, 64, dtype=dtype)))
    wanted = has_the_unit() and batch != FEW
    assert ("recurrent products by the processor's matrix unit (AMX)" in told) == wanted
    assert ("three parts of bfloat16" in told) == (wanted and dtype == torch.float32)
    small = whorl.LSTM(4, 3, dtype=dtype, engine="cpu")
    assert "matrix unit" not in str(whorl.explain(small, torch.zeros(5, batch, 4, dtype=dtype)))


@pytest.mark.skipif(not has_the_unit(), reason="this processor has no unit for products of bfloat16")
def test_inference_of_an_lstm_in_bfloat16_takes_the_faster_engine() -> None:
    layer = whorl.LSTM(64, 64, dtype=torch.bfloat16)
    for batch, engine in ((1, "cpu"), (8, "cpu"), (9, "onednn")):
        with torch.no_grad():
            made = layer.plan(torch.zeros(5, batch, 64, dtype=torch.bfloat16))
        if not made.problem.device.bfloat16:
            pytest.skip("oneDNN does not take bfloat16 here")
        assert made.engine == engine
        assert decide(made.problem, "cpu").engine == "cpu"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kind", ["LSTM", "GRU", "LSTM with dropout by gate", "GRU with dropout by gate", "LSTM with a mask"]
)
def test_layers_of_many_sequences(kind: str, dtype: torch.dtype) -> None:
    """Outputs and gradients by the error rule, the same to the bit by any threads; and the stepper's."""
    name, _, more = kind.partition(" with ")
    options = dict(recurrent_dropout=0.3, recurrent_dropout_mode="gate") if "dropout" in more else {}
    layer = getattr(whorl, name)(40, 65, engine="cpu", dtype=dtype, **options)
    x, mask = torch.randn(24, 2 * MANY + 1, 40, dtype=dtype), None
    if "mask" in more:
        mask = torch.rand(24, 2 * MANY + 1) < 0.7

    def everything(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
        torch.manual_seed(3)
        x = x.detach().requires_grad_()
        y = layer(x, **({} if mask is None else {"mask": mask}))[0]
        return [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]

    found = []
    for count in (1, 2, 3, 6):
        with threads(count):
            found.append(everything(layer, x))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
    if not more:
        stepper = layer.eval().stepper(x.shape[1])
        y = layer(x)[0]
        for t in range(3):
            assert torch.equal(stepper(x[t]), y[t])
        if dtype == torch.bfloat16:  # as 16 sequences and more, so one alone
            assert torch.equal(layer(x[:, 4:5])[0], y[:, 4:5])
        layer.train()
    layer.engine = "reference"
    baseline = everything(layer, x)
    wanted = everything(layer.double(), x.double())
    for one, plain, truth in zip(found[0], baseline, wanted, strict=True):
        assert error(one, truth) <= 2 * error(plain, truth) + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_cells_and_options_in_bfloat16(cell: str, name: str) -> None:
    """The error rule, of sizes that the unit takes."""
    assert_agrees("cpu", CELLS[cell], replace(FORMS[name], inputs=24, units=37), torch.bfloat16)


@pytest.mark.parametrize("units", [64, 80, 128])
@pytest.mark.parametrize("kind", [whorl.LSTM, whorl.GRU])
def test_pairs_of_threads_that_share_rows_change_no_bit(
    kind: type[whorl.LSTM], units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 64 and 128 units each of a pair multiplies the columns of its own; with 80 not all would be whole tiles."""
    monkeypatch.setattr(sweep, "_FAR", 0)
    layer, x = kind(40, units, engine="cpu"), torch.randn(5, 33, 40)
    asked = {"none": {}, "lengths": {"lengths": torch.arange(33) % 6}, "reset": {"reset": torch.rand(5, 33) < 0.3}}
    for options in asked.values():
        found = []
        for count in (1, 2, 4):
            sizes.cache_clear()
            with threads(count):
                found.append(sweeps(layer, x, **options))
        for others in found[1:]:
            assert all(map(torch.equal, found[0], others))
    sizes.cache_clear()


def test_threads_share_rows_in_pairs_where_weights_are_far() -> None:
    lstm_512, pair = 4 * 512 * 512, sweep._in_pairs
    assert pair(3, 32, 2, lstm_512) == pair(3, 96, 4, lstm_512) == has_the_unit()
    others = [
        (3, 32, 2, 3 * 512 * 512),
        (3, 32, 2, 4 * 256 * 256),
        (1, 32, 2, lstm_512),
        (3, 64, 2, lstm_512),
        (3, 15, 2, lstm_512),
        (3, 48, 3, lstm_512),
    ]
    assert not any(pair(*other) for other in others)
