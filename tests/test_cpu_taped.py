"""Calls of engine `cpu` by tapes: C++ gives to the bit what Python gives, and autograd sees one layer."""

import ctypes
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import whorl
from comparison import weighted
from engine_cases import CELLS, WRAPPED, Case, in_dtype
from tapes import both_ways, by_threads, counting, gradients_of_gradients, seen_by_hooks, trained
from thinned import thinned
from whorl import compiler
from whorl.engines import taped
from whorl.engines.cpu import memory, plain, sweep, tapes
from whorl.engines.cpu.masks import NONE
from whorl.functional import recurrent
from whorl.problem import Call

pytestmark = [
    pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}"),
    pytest.mark.xdist_group("taped"),  # one process compiles it
]
X = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Calls go by tapes from the first on, and memory is full of NaN before it is written; the calls that did."""
    made: list[int] = []
    assert taped.finish() == ""
    monkeypatch.setattr(tapes, "_SOME", 0)
    for name in ("_run", "_run_like"):
        monkeypatch.setattr(taped, name, counting(getattr(taped, name), made))
    torch.use_deterministic_algorithms(True)
    yield made
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def layer() -> torch.nn.Module:
    torch.manual_seed(2)
    return whorl.LSTM(7, 9, engine="cpu")


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "LSTM": (whorl.LSTM, {}),
    "GRU of two layers": (whorl.GRU, dict(num_layers=2)),
    "RNN without biases": (whorl.RNN, dict(bias=False, nonlinearity="relu")),
    "LSTM with layer norm": (whorl.LSTM, dict(layer_norm=True, num_layers=2, bidirectional=True)),
    "LSTM with peepholes": (whorl.LSTM, dict(peephole=True, bidirectional=True)),
    "GRU of two directions": (whorl.GRU, dict(num_layers=3, bidirectional=True, batch_first=True)),
}
SIZES = [(5, 3, 7, 9), (1, 1, 1, 1), (4, 37, 64, 33), (3, 2, 65, 64)]
"""Steps, batch, inputs and units."""


@pytest.mark.parametrize(
    "kind, sizes, dtype, initial",
    thinned(2, KINDS, SIZES, [torch.float32, torch.float64], [False, True]),
)
def test_the_same_bits(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, kind: str, sizes: tuple[int, ...], dtype: torch.dtype,
    initial: bool,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    make, options = KINDS[kind]
    time, batch, inputs, units = sizes
    layer = make(inputs, units, **options, dtype=dtype, engine="cpu")
    x = torch.randn((batch, time, inputs) if options.get("batch_first") else (time, batch, inputs), dtype=dtype)
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    states = tuple(torch.randn(rows, batch, units, dtype=dtype) for _ in range(2 if make is whorl.LSTM else 1))
    hx = (states if make is whorl.LSTM else states[0]) if initial else None
    both_ways(lambda: trained(layer, x, hx), counted, monkeypatch)

    def without_that_of_x() -> list[Tensor]:
        y, _ = layer(x, hx)
        return list(torch.autograd.grad(y.square().sum(), [*layer.parameters()]))

    def infer() -> list[Tensor]:
        with torch.no_grad():
            y, finals = layer.eval()(x, hx)
        return [y, *(finals if isinstance(finals, tuple) else (finals,))]

    both_ways(without_that_of_x, counted, monkeypatch)
    both_ways(infer, counted, monkeypatch)
    before = len(counted)
    infer(), infer()
    assert len(counted) == before + 2  # by the plan of the call before


MARKED = {
    "a mask": Case({"layers": 2, "directions": 2}, marks=("mask",)),
    "lengths and resets": Case({"directions": 2}, marks=("lengths", "reset"), initial=False),
    "lengths, resets and a mask": Case({}, 4, 37, 65, 65, marks=("lengths", "reset", "mask")),
    "given": Case({"layers": 2, "directions": 2}, given=("recurrent",)),
    "given to all gates, and a mask": Case(
        {"recurrent_dropout_mode": "shared", "directions": 2}, given=("recurrent",), marks=("mask",)
    ),
    "drawn": Case({"recurrent_dropout": 0.4, "zoneout": (0.3, 0.2), "layers": 2}),
    "drawn by step, and a mask": Case({"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step"}, marks=("mask",)),
}


@pytest.mark.parametrize(
    "cell, name, dtype",
    thinned(1, ["lstm", "gru", "layer norm"], MARKED, [torch.float32, torch.float64]),
)
def test_options(counted: list[int], monkeypatch: pytest.MonkeyPatch, cell: str, name: str, dtype: torch.dtype) -> None:
    graph, case = (CELLS | WRAPPED)[cell], MARKED[name]
    case.form["zoneout"] = case.form.get("zoneout", ())[: len(graph.states)]
    form, call = case.build(graph)
    call = in_dtype(call, dtype)
    call = call._replace(x=call.x.nan_to_num())
    constant = len(call.tensors) - len(call.noise)

    def everything(gradient: bool) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_(gradient and i < constant) for i, tensor in enumerate(call.tensors)]
        outputs = recurrent(form.to_json(), Call.of(leaves, call.layout, call.marks), "cpu")
        return [*outputs, *(torch.autograd.grad(weighted(outputs), leaves[:constant]) if gradient else ())]

    both_ways(lambda: everything(False), counted, monkeypatch)
    both_ways(lambda: everything(True), counted, monkeypatch)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, h, c: y.sum(),  # a gradient that is one number for all
        lambda y, h, c: y[-1].square().sum(),
        lambda y, h, c: h.sum(),
        lambda y, h, c: c.square().sum(),
        lambda y, h, c: y[:, :, 3:].square().sum() + y[1:].sum(),
        lambda y, h, c: y.transpose(0, 1).reshape(3, -1).square().sum(),
        lambda y, h, c: (y.permute(2, 0, 1) * torch.rand(9, 5, 3)).sum(),
    ],
)
def test_gradients_of_some_outputs(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, loss: Any
) -> None:
    def call() -> list[Tensor]:
        torch.manual_seed(8)
        return trained(layer, X, loss=loss)

    both_ways(call, counted, monkeypatch)


@pytest.mark.parametrize("within", [True, False])
def test_x_lies_as_it_likes(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, within: bool
) -> None:
    """Where the loop projects it, and where a product does before."""
    wide = torch.randn(6, 9, 14)
    monkeypatch.setattr(plain, "projects_within", lambda *given: within and sweep.projects_within(*given))
    plain.sizes.cache_clear()
    layer(wide[:5, :3, :7])
    for x in (
        wide[:5, :3, :7], wide[1:, 2:5, 7:], wide[1:, ::3, :7], wide[::2, :3, ::2], wide.transpose(0, 1)[:5, :3, :7],
        wide[:5, :1, :7].expand(5, 3, 7), wide[:1, :3, :7].expand(5, 3, 7), wide.permute(1, 2, 0)[:5, :3, :6],
    ):  # fmt: skip
        own = layer if x.shape[2] == 7 else whorl.LSTM(6, 9, engine="cpu")
        both_ways(lambda own=own, x=x: [own(x)[0]], counted, monkeypatch)
        leaf = x.detach()

        def call(own: Any = own, leaf: Tensor = leaf) -> list[Tensor]:
            return list(torch.autograd.grad(own(leaf)[0].square().sum(), [*own.parameters()]))

        both_ways(call, counted, monkeypatch)
    plain.sizes.cache_clear()


def test_weights_lie_as_those_of_keras_do(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    want = trained(layer, X)
    for names in (["weight_hh_l0"], ["weight_ih_l0", "weight_hh_l0"]):
        for name in names:
            weight = getattr(layer, name)
            setattr(layer, name, torch.nn.Parameter(weight.detach().t().contiguous().t()))
        both_ways(lambda: trained(layer, X), counted, monkeypatch)
        assert all(map(torch.allclose, trained(layer, X), want))
    assert len({*counted}) == 3  # each a plan of its own
    before = len(counted)
    spread = torch.nn.Parameter(torch.empty(36, 14)[:, ::2].copy_(layer.weight_ih_l0.detach()))
    layer.weight_ih_l0 = spread
    assert all(map(torch.allclose, trained(layer, X), want))
    assert len(counted) == before  # left to Python


def test_states_of_another_dtype(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As cells of Keras with dtypes of their own have them."""
    form = whorl.LSTM(7, 9)._form
    weights = tuple(whorl.LSTM(7, 9)._weights())
    call = Call(X, tuple(torch.randn(1, 3, 9, dtype=torch.float64) for _ in range(2)), weights)
    both_ways(lambda: list(recurrent(form, call, "cpu")), counted, monkeypatch)


def test_tapes_are_written_for_what_is_called_often(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    monkeypatch.setattr(tapes, "_SOME", 3)
    plain.sizes.cache_clear()
    taken = [len(counted)]
    for _ in range(5):
        layer(X)
        taken.append(len(counted))
    assert taken == [0, 0, 0, 0, 1, 2]
    with whorl.settings(calls="python"):
        layer(X)
    assert len(counted) == 2
    asked: list[int] = []
    monkeypatch.setattr(taped, "is_there", lambda: False)
    monkeypatch.setattr(taped, "ready", lambda: asked.append(layer.calls) and False)
    layer = whorl.LSTM(7, 8, engine="cpu")
    for layer.calls in range(tapes._OFTEN + 2):
        layer(X)
    assert asked == [tapes._OFTEN, tapes._OFTEN + 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda: whorl.LSTM(7, 9, dtype=torch.bfloat16, engine="cpu")(X.bfloat16()),
        lambda: whorl.LSTM(7, 9, proj_size=4, engine="cpu")(X),
        lambda: whorl.LSTM(7, 9, engine="cpu")(X, return_states=True),
        lambda: whorl.LSTM(7, 9, engine="cpu", memory="recompute")(X),
        lambda: whorl.GRU(7, 9, engine="cpu")(X, reset=torch.ones(5, 3) > 0, reset_to=torch.ones(1, 3, 9)),
    ],
)
def test_what_goes_through_python(counted: list[int], call: Any) -> None:
    call()
    assert counted == []


def test_a_graph_that_is_kept_gives_the_same_twice(counted: list[int], layer: torch.nn.Module) -> None:
    x = X.clone().requires_grad_()
    y = layer(x)[0].square().sum()
    leaves = [x, *layer.parameters()]
    once = torch.autograd.grad(y, leaves, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(y, leaves)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves)
    assert len(counted) == 1


def test_gradients_of_gradients_are_those_of_python(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    gradients_of_gradients(layer, X, counted, monkeypatch)


def test_checkpoints_and_hooks_of_saved_tensors(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    def checkpointed() -> list[Tensor]:
        x = X.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
        return list(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]))

    both_ways(checkpointed, counted, monkeypatch)
    seen_by_hooks(layer, X, counted, monkeypatch)


def test_another_number_of_threads_is_another_plan(counted: list[int], layer: torch.nn.Module) -> None:
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            found.append(trained(layer, X))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(each, found[0], strict=True))
    assert len({*counted}) == 2
    assert len(counted) == 3


def test_large_memory_is_used_again(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What no caller sees: it comes back when the graph dies, or the gradients of x that lie in it."""
    layer = whorl.LSTM(130, 256, engine="cpu")
    x = torch.randn(60, 70, 130)  # of which 16 MB are gates
    torch.use_deterministic_algorithms(False)
    want = trained(layer, x)

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(3):
        assert all(map(torch.equal, trained(layer, x), want))
    if os.path.exists("/proc/self/statm"):
        before = resident()
        for _ in range(10):
            trained(layer, x)
        assert resident() - before < 2 * memory._MOST_IDLE // 8
    both_ways(lambda: trained(layer, x), counted, monkeypatch)


@pytest.mark.parametrize("lacking", ["plain_forward", "plain_backward"])
def test_without_memory_python_says_so(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, lacking: str
) -> None:
    """A pass that lacks memory is asked for again through Python, whose error it is; the next is right."""
    want = trained(layer, X)
    made = plain.sizes(layer.plan(X).problem, torch.get_num_threads(), NONE)
    assert made is not None
    # a function of C that gives how many bytes it lacks, in the place of the one that tapes call
    lacks = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 3)(lambda *given: 64)
    without = made._replace(kernel=made.kernel._replace(**{lacking: lacks}), known=plain.Known())
    asked: list[str] = []

    def run(name: str, *given: Any) -> None:
        if plain.writing.tape is None:
            asked.append(name)
            raise MemoryError("engine 'cpu' asked for 64 bytes of memory")
        real(name, *given)

    real = plain._run
    with monkeypatch.context() as patch:
        patch.setattr(plain, "sizes", lambda *given: without)
        patch.setattr(taped, "_numbers", {})
        patch.setattr(tapes, "_numbers", {})
        patch.setattr(plain, "_run", run)
        with pytest.raises(MemoryError, match="asked for 64 bytes"):
            recurrent(layer._form, Call(X, (), layer._weights()), "cpu")[0].sum().backward()
    assert asked == [lacking]
    assert all(map(torch.equal, trained(layer, X), want))


def test_a_layer_that_moves_to_meta_gives_shapes(counted: list[int], layer: torch.nn.Module) -> None:
    for engine in ("cpu", "auto"):
        layer.engine = engine
        layer(X), layer(X)
        assert layer._before is not None
        moved = layer.to("meta")
        moved.engine = "auto"
        before = len(counted)
        y, (h, c) = moved(X.to("meta"))
        assert (y.shape, h.shape, c.shape) == ((5, 3, 9), (1, 3, 9), (1, 3, 9))
        assert y.is_meta
        assert len(counted) == before
        layer = whorl.LSTM(7, 9)


def test_a_plan_that_is_made_anew_has_its_number(counted: list[int], layer: torch.nn.Module) -> None:
    """Else what stays for ever would grow where more problems come in turns than are remembered."""
    for _ in range(3):
        plain.sizes.cache_clear()
        layer._before = None
        trained(layer, X)
    assert len(counted) == 3
    assert len({*counted}) == 1


def test_threads_call_at_once(counted: list[int], layer: torch.nn.Module) -> None:
    by_threads(layer, X)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_calls_too(counted: list[int], layer: torch.nn.Module) -> None:
    want = trained(layer, X)
    child = os.fork()
    if child == 0:
        os._exit(0 if all(map(torch.equal, trained(layer, X), want)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
