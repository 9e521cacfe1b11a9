"""A stepper against the layer that it is of, over whole sequences: every cell, dtype and option, on each engine."""

import copy
import gc
import os
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from cells_for_tests import USER
from comparison import EXACT, error
from whorl import compiler
from whorl.cells import library
from whorl.cells.cell import Cell
from whorl.engines.cpu import stream
from whorl.plan import _announced

CELLS = {cell.name: cell for cell in [*(c for c in vars(library).values() if isinstance(c, Cell)), *USER]}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
needs_compiler = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")


def make(cell: str, *sizes: int, dtype: torch.dtype = torch.float32, **options: Any) -> whorl.Recurrent:
    layer = whorl.Recurrent(CELLS[cell], *sizes, dtype=dtype, **options).eval()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape) * 0.3)
    return layer


def drawn(layer: Any, time: int, batch: int) -> tuple[Tensor, Any, dict[str, Any]]:
    """x, initial states and extra inputs."""
    dtype = next(layer.parameters()).dtype
    x = torch.randn(time, batch, layer.input_size, dtype=dtype)
    states = [torch.randn(layer.num_layers, batch, width, dtype=dtype) for width in layer._widths.values()]
    # what a step divides by, as steps make it: above zero
    hx = tuple(d.abs() + 1 if name == "n" else d for d, name in zip(states, layer._widths, strict=True))
    extras = {name: torch.rand(time, batch, layer.hidden_size, dtype=dtype) for name in layer._extra_inputs}
    return x, hx if len(hx) > 1 else hx[0], {"inputs": extras} if extras else {}


def stepped(
    layer: Any, x: Tensor, hx: Any = None, reset: Tensor | None = None, inputs: dict[str, Tensor] | None = None
) -> list[Tensor]:
    """The output of every step and the final states, from a stepper."""
    stepper = layer.stepper(x.shape[1])
    if hx is not None:
        stepper.state = hx
    outs = []
    for t in range(len(x)):
        more: dict[str, Any] = {} if inputs is None else {"inputs": {name: one[t] for name, one in inputs.items()}}
        outs.append(stepper(x[t], **more, **({} if reset is None else {"reset": reset[t]})))
    return [torch.stack(outs), *states_of(stepper.state)]


def one_of(hx: Any, row: int) -> Any:
    """The states of one sequence."""
    return tuple(one_of(state, row) for state in hx) if isinstance(hx, tuple) else hx[:, row : row + 1]


def states_of(state: Any) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


def whole(layer: Any, engine: str, x: Tensor, hx: Any = None, **options: Any) -> list[Tensor]:
    """The same from a call of the layer on the whole sequence, on an engine."""
    before, layer.engine = layer.engine, engine
    with torch.no_grad():
        y, state = layer(x, hx, **options)
    layer.engine = before
    return [y, *states_of(state)]


def assert_equals_the_layer(layer: Any, x: Tensor, hx: Any = None, **options: Any) -> None:
    """By the error rule: the baseline is `reference` on the whole sequence."""
    double = copy.deepcopy(layer).double()

    def wide(value: Any) -> Any:
        return {name: wide(one) for name, one in value.items()} if isinstance(value, dict) else (
            tuple(map(wide, value)) if isinstance(value, tuple) else value.double() if isinstance(value, Tensor)
            and value.is_floating_point() else value
        )  # fmt: skip

    truth = whole(double, "reference", wide(x), wide(hx), **wide(options))
    plain = whole(layer, "reference", x, hx, **options)
    for got, base, wanted in zip(stepped(layer, x, hx, **options), plain, truth, strict=True):
        eps = torch.finfo(x.dtype).eps
        bound = EXACT if x.dtype == torch.float64 else 2 * error(base, wanted) + 4 * eps
        assert got.dtype == base.dtype
        assert error(got, wanted) <= bound


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_equals_its_layer(cell: str, dtype: torch.dtype) -> None:
    layer = make(cell, 5, 19, 2, dtype=dtype, engine="cpu")
    x, hx, options = drawn(layer, 6, 3)
    reset = torch.rand(6, 3) < 0.3
    assert_equals_the_layer(layer, x, hx, **options)
    if "n" not in layer._widths:  # a state by which its step divides is never zero
        assert_equals_the_layer(layer, x, hx, reset=reset, **options)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LSTM", {}),
    "no bias": ("GRU", {"bias": False}),
    "projection": ("LSTM", {"proj_size": 5, "num_layers": 2}),
    "zoneout": ("LSTM", {"zoneout": 0.3}),
    "layer norm": ("LSTM", {"layer_norm": True, "num_layers": 3}),
    "peephole, coupled": ("LSTM", {"peephole": True, "coupled": True}),
    "clip": ("LSTM", {"clip": 0.2}),
    "reset before": ("GRU", {"reset_after": False}),
    "activation": ("RNN", {"activation": "softplus"}),
    "dropout, evaluated": ("GRU", {"dropout": 0.5, "num_layers": 2, "recurrent_dropout": 0.3, "weight_drop": 0.2}),
}


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, dtype: torch.dtype) -> None:
    kind, options = OPTIONS[name]
    layer = getattr(whorl, kind)(7, 33, dtype=dtype, engine="cpu", **options).eval()
    x, hx, _ = drawn(layer, 5, 2)
    assert_equals_the_layer(layer, x, hx, reset=torch.rand(5, 2) < 0.4)


@needs_compiler
@pytest.mark.parametrize("batch", [1, 2, 50])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 17), (64, 65), (40, 128)], ids=str)
def test_sizes(sizes: tuple[int, int], batch: int) -> None:
    layer = whorl.GRU(*sizes, num_layers=2, engine="cpu").eval()
    x, hx, _ = drawn(layer, 4, batch)
    assert_equals_the_layer(layer, x, hx)
    assert_equals_the_layer(layer.to(torch.bfloat16), x.bfloat16(), hx.bfloat16())


@needs_compiler
@pytest.mark.parametrize("engine", ["auto", "cpu", "onednn", "reference"])
def test_every_engine_steps(engine: str) -> None:
    layer = whorl.LSTM(3, 8, 2, engine=engine).eval()
    x, hx, _ = drawn(layer, 5, 2)
    assert_equals_the_layer(layer, x, hx, reset=torch.rand(5, 2) < 0.4)
    assert layer.stepper(2).plan.engine == ("cpu" if engine == "auto" else engine)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", ["lstm", "layer_norm_lstm", "gru_before", "odd_ends"])
def test_the_number_of_threads_changes_no_bit(cell: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one sequence alone, whose units are shared; nor does what steps beside it."""
    monkeypatch.setattr(stream, "_SHARED_FROM", 0)
    layer = make(cell, 9, 161, 2, dtype=dtype, engine="cpu")
    x, hx, _ = drawn(layer, 4, 3)
    found, before = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            found.append(stepped(layer, x, hx))
            alone = stepped(layer, x[:, 1:2], one_of(hx, 1))
            assert torch.equal(alone[0], found[0][0][:, 1:2])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


# --- the layer changes ------------------------------------------------------------------------------------------------


def replace_parameter(layer: Any) -> None:
    layer.weight_hh_l0 = torch.nn.Parameter(torch.randn_like(layer.weight_hh_l0))


def load(layer: Any) -> None:
    layer.load_state_dict({name: torch.randn_like(one) for name, one in layer.state_dict().items()})


def optimise(layer: Any) -> None:
    layer(torch.randn(3, 1, 4))[0].sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


def assign_data(layer: Any) -> None:
    layer.bias_ih_l0.data = torch.randn_like(layer.bias_ih_l0)


def change_option(layer: Any) -> None:
    layer.activation = "relu"


def change_engine(layer: Any) -> None:
    layer.engine = "reference"


def normalise(layer: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original0.mul_(3.0)


CHANGES = [replace_parameter, load, optimise, assign_data, change_option, change_engine, normalise]


@pytest.mark.parametrize("engine", ["reference", pytest.param("cpu", marks=needs_compiler)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_layer_is_seen(change: Any, engine: str) -> None:
    layer = whorl.GRU(4, 6, engine=engine).eval()
    stepper, x = layer.stepper(), torch.randn(2, 1, 4)
    first = stepper(x[0])
    change(layer)
    with torch.no_grad():
        wanted = layer(x[1:], first[None])[0][0]
    assert error(stepper(x[1]), wanted) < 1e-6
    assert error(wanted, first) > 1e-3
    assert stepper.plan.engine == layer.engine


@needs_compiler
def test_a_parametrised_weight_that_is_trained_on_is_seen() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(whorl.GRU(4, 6, engine="cpu"), "weight_hh_l0").eval()
    stepper, x = layer.stepper(), torch.randn(2, 1, 4)
    first = stepper(x[0])
    with torch.no_grad():
        layer.parametrizations.weight_hh_l0.original1.mul_(torch.rand(18, 1) + 1).add_(0.5)
        assert error(stepper(x[1]), layer(x[1:], first[None])[0][0]) < 1e-6


@needs_compiler
def test_a_layer_that_moves_to_another_dtype_takes_its_stepper_along() -> None:
    layer = whorl.LSTM(4, 6, engine="cpu").eval()
    stepper, x = layer.stepper(), torch.randn(2, 1, 4)
    stepper(x[0])
    state = stepper.state
    layer.double()
    y = stepper(x[1].double())
    wanted = layer(x[1:].double(), tuple(one.double() for one in state))[0][0]
    assert error(y, wanted.detach()) <= EXACT
    with pytest.raises(whorl.InputError, match=r"x is torch.float32 and the weights of this LSTM are torch.float64"):
        stepper(x[1])
    layer.float()
    assert {one.dtype for one in stepper.state} == {torch.float32}
    layer.double()
    stepper.state = [one.double() for one in state]
    assert error(stepper(x[1].double()), wanted.detach()) <= EXACT


@needs_compiler
def test_what_cannot_be_seen_takes_a_refresh() -> None:
    """As documented: a write through `.data`, and one to an inference tensor, are not counted."""
    layer = whorl.GRU(4, 6, engine="cpu").eval()
    stepper, x = layer.stepper(), torch.randn(1, 4)
    layer.weight_ih_l0.data.mul_(2)
    stepper.refresh()
    with torch.no_grad():
        assert error(stepper(x), layer(x[None])[0][0]) < 1e-6
    with torch.inference_mode():
        frozen = whorl.GRU(4, 6, engine="cpu").eval()
        stepper = frozen.stepper()
        assert error(stepper(x), frozen(x[None])[0][0]) < 1e-6
        frozen.weight_ih_l0.mul_(2)
        stepper.refresh()
        stepper.state = None
        assert error(stepper(x), frozen(x[None])[0][0]) < 1e-6


# --- states -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["reference", pytest.param("cpu", marks=needs_compiler)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states_are_given_taken_and_begun_anew(kind: str, engine: str) -> None:
    layer = getattr(whorl, kind)(4, 6, 2, engine=engine).eval()
    stepper, x = layer.stepper(), torch.randn(3, 1, 4)
    first = stepper(x[0])
    state = stepper.state
    kept = [one.clone() for one in states_of(state)]
    second = stepper(x[1])
    assert all(torch.equal(one, other) for one, other in zip(states_of(state), kept, strict=True)), "a copy"
    stepper.state = state
    assert torch.equal(stepper(x[1]), second)
    stepper.state = None
    assert torch.equal(stepper(x[0]), first)
    assert torch.equal(stepper(x[1], reset=torch.tensor([True])), layer.stepper()(x[1]))
    with torch.inference_mode():
        made = layer.stepper()
    assert torch.equal(made(x[0]), first)
    made.state = None
    assert torch.equal(made(x[0]), first)


@needs_compiler
def test_an_output_is_not_written_again() -> None:
    stepper, x = whorl.GRU(4, 6).eval().stepper(), torch.randn(2, 1, 4)
    first = stepper(x[0])
    kept = first.clone()
    assert not first.requires_grad
    stepper(x[1])
    assert torch.equal(first, kept)


@needs_compiler
def test_one_stream_may_leave_its_batch_axis_out() -> None:
    layer = whorl.Recurrent(library.cfc, 4, 6, engine="cpu").eval()
    x, elapsed = torch.randn(2, 4), torch.rand(2, 6)
    one, other = layer.stepper(), layer.stepper()
    for t in range(2):
        y = one(x[t], inputs={"elapsed": elapsed[t]})
        assert y.shape == (6,)
        assert torch.equal(y, other(x[t : t + 1], inputs=elapsed[t : t + 1])[0])


@needs_compiler
def test_x_may_lie_anyhow() -> None:
    layer = whorl.GRU(4, 6, engine="cpu").eval()
    x = torch.randn(4, 3)
    assert torch.equal(layer.stepper(3)(x.t()), layer.stepper(3)(x.t().contiguous()))


# --- without, against, after ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_says_what_runs() -> None:
    layer, x = whorl.GRU(5, 7).eval(), torch.randn(4, 2, 5)
    _announced.clear()
    with pytest.warns(
        whorl.SlowWarning, match="(?s)each step of gru runs on `reference`.*no C\\+\\+ compiler is found"
    ):
        stepper = layer.stepper(2)
    assert f"no C++ compiler is found: {compiler.remedy()}" in repr(stepper)
    assert "reference, plain torch, a loop over time in Python, called for each step" in repr(stepper)
    assert_equals_the_layer(layer, x)
    with whorl.settings(slow="error"), pytest.raises(whorl.SlowError, match="each step of gru"):
        layer.stepper()
    with whorl.settings(slow="allow"), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.stepper()
    plan = whorl.LSTM(5, 7).stepper().plan
    assert plan.engine == ("onednn" if torch.backends.mkldnn.is_available() else "reference")
    assert any("no C++ compiler" in str(refusal) for refusal in plan.refusals)
    layer.engine = "cpu"
    with pytest.raises(whorl.UnsupportedError, match="no C"):
        layer.stepper()


WRONG: dict[str, tuple[Any, str]] = {
    "a list": (lambda s: s([[0.0] * 4] * 2), r"x is of type list: give a tensor \[batch, inputs\]"),
    "an array": (lambda s: s(torch.zeros(2, 4).numpy()), "x is of type ndarray"),
    "axes": (lambda s: s(torch.zeros(3, 1, 4)), r"x has shape \[3, 1, 4\], this stepper takes one step .* = \[2, 4\]"),
    "batch": (lambda s: s(torch.zeros(3, 4)), "make a stepper of another batch"),
    "features": (lambda s: s(torch.zeros(2, 5)), "x has 5 features in its last axis, this GRU was made for 4"),
    "dtype": (lambda s: s(torch.zeros(2, 4).double()), "x is torch.float64 and the weights of this GRU"),
    "reset": (lambda s: s(torch.zeros(2, 4), reset=torch.zeros(2)), r"write reset.bool\(\)"),
    "reset's shape": (
        lambda s: s(torch.zeros(2, 4), reset=torch.zeros(1, 2).bool()),
        r"reset has shape \[1, 2\], the stepper of GRU takes that of one step, \[batch\] with batch 2",
    ),
    "reset's type": (
        lambda s: s(torch.zeros(2, 4), reset=True),
        r"reset is of type bool, the stepper of GRU takes a tensor \[batch\] with batch 2",
    ),
    "inputs' shape": (
        lambda s: s(torch.zeros(2, 4), inputs={"dt": torch.zeros(2)}),
        r"inputs\['dt'\] has shape \[2\], the stepper of GRU takes that of one step, \[batch, units or 1\] with",
    ),
    "inputs": (lambda s: s(torch.zeros(2, 4), inputs=torch.zeros(2, 1)), "this cell reads no extra inputs"),
    "inputs without a name": (
        lambda s: s(torch.zeros(2, 4), inputs=torch.zeros(1, 2, 1)),
        r"inputs has shape \[1, 2, 1\], the stepper of GRU takes that of one step, \[batch, units or 1\] with batch 2",
    ),
    "state": (lambda s: setattr(s, "state", torch.zeros(1, 3, 6)), r"the state h has shape \(1, 3, 6\)"),
}


@pytest.mark.parametrize("engine", ["reference", pytest.param("cpu", marks=needs_compiler)])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_told(name: str, engine: str) -> None:
    call, message = WRONG[name]
    stepper = whorl.GRU(4, 6, engine=engine).stepper(2)
    with pytest.raises(whorl.InputError, match=message):
        call(stepper)


def test_what_cannot_be_stepped_is_told() -> None:
    with pytest.raises(whorl.UnsupportedError, match="bidirectional=False"):
        whorl.LSTM(4, 6, bidirectional=True).stepper()
    for batch in (0, 1.0, True):
        with pytest.raises(whorl.InputError, match="1 or more"):
            whorl.LSTM(4, 6).stepper(batch)
    layer = whorl.GRU(4, 6, zoneout=0.1, engine="reference")
    with pytest.raises(whorl.InputError, match=r"write layer.eval\(\)"):
        layer.stepper()
    stepper = layer.eval().stepper()
    layer.train()
    with pytest.raises(whorl.InputError, match=r"write layer.eval\(\)"):
        stepper(torch.zeros(1, 4))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(whorl.UnsupportedError, match="copy the layer and `stepper.state`"):
            copied(stepper)


@needs_compiler
def test_its_memory_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    made = stream.kernel
    monkeypatch.setattr(stream, "kernel", lambda *args: made(*args)._replace(close=closed.append))
    stepper = whorl.GRU(4, 6, engine="cpu").stepper()
    handle = stepper._step._handle
    del stepper
    gc.collect()
    assert closed == [handle]


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_was_forked_can_go_on() -> None:
    """With threads that share a step: OpenMP's are gone there."""
    script = """
import os, torch, whorl
from whorl.engines.cpu import stream
stream._SHARED_FROM = 0
torch.set_num_threads(2)
layer, x = whorl.GRU(32, 64, 2, engine="cpu").eval(), torch.randn(20, 3, 32)
stepper = layer.stepper(3)
before = torch.stack([stepper(step) for step in x[:10]])
state = stepper.state
after = torch.stack([stepper(step) for step in x[10:]])
stepper.state = state
child = os.fork()
if not child:
    os._exit(0 if torch.equal(after, torch.stack([stepper(step) for step in x[10:]])) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
