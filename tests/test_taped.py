"""Calls by tapes: what C++ asks of the driver and of cuBLAS is what Python asks, and autograd sees one layer.

Kernels and products are the host's (`emulation`), so that all of it runs where there is no GPU.
"""

import copy
import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import emulation
import whorl
from emulation import emulated
from tapes import X, both_ways, by_threads, counted, gradients_of_gradients, layer, on_a_gpu, seen_by_hooks, trained
from thinned import thinned
from whorl.engines import host, tape, taped
from whorl.engines.cuda import asked, grid, layers, prepare, spreading, store
from whorl.engines.cuda.plain import Plain

__all__ = ["counted", "layer", "on_a_gpu"]  # fixtures
pytestmark = pytest.mark.xdist_group("taped")  # one process compiles it


CASES = [
    (whorl.LSTM, dict(), torch.bfloat16, 5, 3, 24, 16),
    (whorl.LSTM, dict(num_layers=2, bidirectional=True), torch.float16, 4, 2, 16, 16),
    (whorl.LSTM, dict(bias=False), torch.float32, 3, 2, 8, 20),
    (whorl.GRU, dict(num_layers=2), torch.float32, 3, 2, 16, 24),
    (whorl.GRU, dict(bidirectional=True, batch_first=True), torch.bfloat16, 3, 2, 10, 18),  # copies of rows
    (whorl.RNN, dict(nonlinearity="relu"), torch.float16, 3, 2, 16, 16),
    (whorl.LSTM, dict(), torch.bfloat16, 1, 2, 16, 16),  # of one step no weight gets a gradient but a cleared one
]


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("make, options, dtype, time, batch, inputs, units", CASES)
def test_the_same_bits(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, make: Any, options: dict[str, Any], dtype: torch.dtype,
    time: int, batch: int, inputs: int, units: int, initial: bool,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    layer = make(inputs, units, **options, dtype=dtype, engine="persistent")
    x = torch.randn((batch, time, inputs) if options.get("batch_first") else (time, batch, inputs), dtype=dtype)
    rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    states = tuple(torch.randn(rows, batch, units, dtype=dtype) for _ in range(2 if make is whorl.LSTM else 1))
    hx = (states if make is whorl.LSTM else states[0]) if initial else None
    both_ways(lambda: trained(layer, x, hx), counted, monkeypatch)

    def infer() -> list[Tensor]:
        with torch.no_grad():
            y, finals = layer.eval()(x, hx)
        return [y, *(finals if isinstance(finals, tuple) else (finals,))]

    both_ways(infer, counted, monkeypatch)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, h, c: y.sum(),
        lambda y, h, c: h.float().sum(),
        lambda y, h, c: c.float().square().sum(),
        lambda y, h, c: y[:, :, 3:].float().square().sum() + y[1:].float().sum(),
        lambda y, h, c: y.transpose(0, 1).reshape(2, -1).float().square().sum(),
    ],
)
def test_gradients_of_some_outputs(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, loss: Any
) -> None:
    both_ways(lambda: trained(layer, X, loss=loss), counted, monkeypatch)


def test_dropout_between_layers(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = whorl.LSTM(16, 16, 3, dropout=0.5, bidirectional=True, dtype=torch.bfloat16, engine="persistent")

    def call() -> list[Tensor]:
        torch.manual_seed(5)
        return trained(layer, X)

    both_ways(call, counted, monkeypatch)
    assert not torch.equal(call()[0], layer.eval()(X)[0])


@pytest.mark.parametrize(
    "kind, noise, mask",
    thinned(2, [(whorl.LSTM, 1), (whorl.GRU, 2), (whorl.RNN, 1)], ["", "gate", "shared"], [False, True]),
)
def test_masks(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, kind: tuple[Any, int], noise: str, mask: bool
) -> None:
    make, layers = kind
    torch.manual_seed(6)
    options = {"recurrent_dropout_mode": noise} if noise else {}
    layer = make(16, 18, layers, bidirectional=layers > 1, dtype=torch.bfloat16, engine="persistent", **options)
    gates, rows = layer.weight_hh_l0.shape[0] // 18, layers * (1 + layer.bidirectional)
    shape = (gates, 2, 18) if noise == "gate" else (2, 18)
    more: dict[str, Any] = {"mask": torch.tensor([[True, True], [False, True], [True, mask]])}
    if noise:
        more["dropout_masks"] = {"recurrent_dropout": [torch.rand(shape).bfloat16() for _ in range(rows)]}
    if noise and not mask:
        del more["mask"]
    elif mask:
        more |= {"lengths": torch.tensor([3, 2]), "reset": torch.tensor([[True, False], [False, True], [True, True]])}
    both_ways(lambda: trained(layer, X, **more), counted, monkeypatch)
    layer.eval()
    with torch.no_grad():
        both_ways(lambda: [layer(X, **more)[0]], counted, monkeypatch)


def test_gradients_of_gradients_with_masks(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = whorl.GRU(16, 16, 2, dropout=0.5, dtype=torch.bfloat16, engine="persistent")
    marked = whorl.GRU(16, 16, dtype=torch.bfloat16, engine="persistent")
    mask = torch.tensor([[True, True], [False, True], [True, False]])
    masks = {"recurrent_dropout": torch.rand(3, 2, 16).bfloat16()}

    def twice(module: torch.nn.Module, **more: Any) -> list[Tensor]:
        torch.manual_seed(7)
        x = X.clone().requires_grad_()
        (to_x,) = torch.autograd.grad(module(x, **more)[0].float().square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(to_x.float().square().sum(), [x, *module.parameters()]))

    with whorl.settings(slow="allow"):
        both_ways(lambda: twice(layer), counted, monkeypatch)
        both_ways(lambda: twice(marked, mask=mask), counted, monkeypatch)
        both_ways(lambda: twice(marked, mask=mask, dropout_masks=masks), counted, monkeypatch)


def test_a_graph_that_is_kept_gives_the_same_twice(counted: list[int], layer: torch.nn.Module) -> None:
    x = X.clone().requires_grad_()
    first, second = layer(x)[0], layer(2 * x)[0]
    leaves = [x, *layer.parameters()]
    late = torch.autograd.grad(second.sum(), leaves)  # in the other order
    once = torch.autograd.grad(first.sum(), leaves, retain_graph=True)
    twice = torch.autograd.grad(first.sum(), leaves)
    assert len(counted) == 2
    assert all(map(torch.equal, once, twice))
    assert not torch.equal(late[0], once[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(first.sum(), leaves)


def test_weights_that_change_before_backward_are_an_error(counted: list[int], layer: torch.nn.Module) -> None:
    y = layer(X)[0]
    with torch.no_grad():
        layer.weight_hh_l0.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_final_states_may_change_before_backward(counted: list[int], layer: torch.nn.Module) -> None:
    _, (h, c) = layer(X)
    total = h.float().sum() + c.float().sum()
    with torch.no_grad():
        h.zero_(), c.zero_()
    grads = torch.autograd.grad(total, layer.parameters())
    assert all(bool(grad.float().norm() > 0) for grad in grads)


@pytest.mark.parametrize("make", [whorl.LSTM, whorl.GRU])
def test_gradients_of_gradients_are_those_of_python(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, make: Any
) -> None:
    torch.manual_seed(4)
    layer = make(16, 16, dtype=torch.bfloat16, engine="persistent")

    gradients_of_gradients(layer, X, counted, monkeypatch)


def test_many_gradients_in_one_tensor_are_those_of_python(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    monkeypatch.setenv("WHORL_SLOW", "allow")

    def many() -> list[Tensor]:
        x = X.clone().requires_grad_()
        y, given = layer(x)[0], torch.stack([torch.ones_like(X), 2 * torch.ones_like(X)])
        return list(torch.autograd.grad(y, [x, *layer.parameters()], given, is_grads_batched=True))

    both_ways(many, counted, monkeypatch)


def test_hooks_of_saved_tensors_see_what_forward_keeps(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    seen_by_hooks(layer, X, counted, monkeypatch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_forward_again(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, reentrant: bool
) -> None:
    def call() -> list[Tensor]:
        x = X.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant)
        y.float().square().sum().backward()
        found = [x.grad, *(weight.grad for weight in layer.parameters())]
        layer.zero_grad()
        return [grad for grad in found if grad is not None]

    both_ways(call, counted, monkeypatch)
    plain = trained(layer, X, loss=lambda y, h, c: y.float().square().sum())
    assert all(map(torch.equal, call(), plain[3:]))


def test_anomaly_mode_names_the_layer(counted: list[int], layer: torch.nn.Module) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        y = layer(torch.full_like(X, torch.nan))[0]
        error = pytest.raises(RuntimeError, match="Recurrent.*returned nan")
        with error, pytest.warns(UserWarning, match="Error detected in .*Recurrent"):
            y.float().sum().backward()


def test_a_refused_launch_says_which(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    def refuse(config: Any, function: int, arguments: Any, extra: Any) -> int:
        return 701

    real, kind = asked.functions(), ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    made = kind(refuse)
    monkeypatch.setattr(asked, "functions", lambda: (ctypes.cast(made, ctypes.c_void_p).value, *real[1:]))
    with pytest.raises(RuntimeError, match=r"cannot launch lstm_forward_16_bfloat16\S* \(701\)"):
        layer(X)


def test_threads_call_at_once(counted: list[int], layer: torch.nn.Module) -> None:
    by_threads(layer, X)


@pytest.mark.parametrize("later", ["hook", "data"])
def test_weights_that_lie_otherwise_in_backward(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, later: str
) -> None:
    def turned(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if tensor.shape == (64, 16) else tensor

    want = trained(layer, X)
    leaves = [X.clone().requires_grad_(), *layer.parameters()]
    if later == "hook":
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, turned):
            y, (h, c) = layer(leaves[0])
    else:
        y, (h, c) = layer(leaves[0])
        layer.weight_hh_l0.data = turned(layer.weight_hh_l0.data)
    assert counted
    grads = torch.autograd.grad(sum((out.float() ** 2).sum() for out in (y, h, c)), leaves)
    assert all(map(torch.equal, grads, want[3:]))


def test_compiled_autograd(counted: list[int], layer: torch.nn.Module) -> None:
    def backward() -> list[Tensor]:
        layer(X)[0].float().square().sum().backward()
        made = [weight.grad for weight in layer.parameters()]
        layer.zero_grad()
        return made

    want = backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        found = backward()
    assert len(counted) == 2
    assert all(map(torch.equal, found, want))


@pytest.mark.parametrize("what", ["plain", "marks", "masks"])
@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_may_go_one_way_and_the_other(
    counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: Any, what: str, first: bool
) -> None:
    """As where the compiler ends between the two passes."""
    marks = {"mask": torch.tensor([[True, True], [False, True], [True, False]]), "lengths": torch.tensor([3, 2])}
    masks = {"dropout_masks": {"recurrent_dropout": torch.rand(4, 2, 16).bfloat16()}}
    more = {"plain": {}, "marks": marks, "masks": masks}[what]
    want = trained(layer, X, loss=lambda y, h, c: y.float().sum(), **more)[3:]
    monkeypatch.setattr(taped, "ready", lambda: first)
    leaf = X.clone().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda x: layer(x, **more)[0], leaf, use_reentrant=False)
    monkeypatch.setattr(taped, "ready", lambda: not first)
    assert all(map(torch.equal, torch.autograd.grad(y.float().sum(), [leaf, *layer.parameters()]), want))


def test_gradients_of_some_leaves(counted: list[int], layer: torch.nn.Module) -> None:
    layer.weight_ih_l0.requires_grad_(False)
    y = layer(X)[0]
    y.float().sum().backward()
    assert counted
    assert layer.weight_ih_l0.grad is None
    assert layer.weight_hh_l0.grad is not None
    assert not layer(X)[1][0].isnan().any()


def test_what_python_is_left_with(counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module) -> None:
    want = trained(layer, X)
    assert len(counted) == 1
    layer.weight_hh_l0 = torch.nn.Parameter(layer.weight_hh_l0.detach().t().contiguous().t())
    turned = trained(layer, X)  # copied first
    assert all(map(torch.equal, want, turned))
    assert len(counted) == 1
    room = torch.empty(X.numel() + 1, dtype=torch.bfloat16)
    shifted = room[1:].view_as(X).copy_(X)
    assert all(map(torch.equal, want, trained(layer, shifted)))
    assert len(counted) == 1

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), more: Any = None) -> Any:
            return function(*given, **(more or {}))

    layer.weight_hh_l0 = torch.nn.Parameter(layer.weight_hh_l0.detach().contiguous())
    with Seen():
        layer(X)
    assert len(counted) == 1
    layer(X)
    assert len(counted) == 2
    want = trained(layer, -X)
    assert len(counted) == 3
    assert all(map(torch.equal, want, trained(layer, torch._neg_view(X))))
    assert len(counted) == 3
    y, _ = layer(X)
    slopes = [torch.autograd.grad(y, layer.weight_hh_l0, grad, True) for grad in (X, torch._neg_view(-X))]
    assert torch.equal(*(slope for (slope,) in slopes))
    assert len(counted) == 4
    twice = whorl.LSTM(16, 16, 2, dropout=0.5, dtype=torch.bfloat16, engine="persistent")
    masks = torch.rand(3, 2, 16).bfloat16().requires_grad_()  # which have a gradient
    twice(X, dropout_masks={"dropout": masks})[0].sum().backward()
    assert masks.grad is not None
    assert len(counted) == 4


def test_autocast_and_batches_first(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = whorl.GRU(16, 16, batch_first=True, engine="persistent")
    x, h = torch.randn(2, 3, 16), torch.randn(1, 2, 16)

    def call() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return trained(layer, x, h)

    both_ways(call, counted, monkeypatch)


def test_other_tiles_make_other_tapes(
    counted: list[int], layer: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same plan: what is made ready again, by other rules, is not what C++ has of before."""
    own, wanted = grid.choose, layer(X)[0]
    other = copy.deepcopy(layer)  # which knows of no call before
    with monkeypatch.context() as patch:
        patch.setattr(layers, "_prepared", {})
        patch.setattr(grid, "choose", lambda *where: spreading.choose(*where) or own(*where))
        torch.testing.assert_close(other(X)[0], wanted, rtol=2e-2, atol=2e-2)
    assert len({*counted}) == 2
    copy.deepcopy(layer)(X)
    assert counted[2] == counted[0]


def test_where_the_thread_ended_otherwise_calls_are_not_said_to_go_by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taped, "_run", None)
    monkeypatch.setattr(taped, "_fault", "")
    monkeypatch.setattr(taped, "_thread", threading.Thread(target=lambda: None))
    taped._thread.start()
    assert taped.finish() == "the thread that compiles them has ended, or was another process's"


@pytest.mark.parametrize("gates", [0, 4])
def test_a_plan_has_a_number_on_each_gpu(gates: int, counted: list[int], layer: torch.nn.Module) -> None:
    """As C++ asks for it where a program of XLA runs on another one: made ready there once, the same way."""
    masks = {"dropout_masks": {"input_dropout": [torch.rand(gates, 2, 16)]}} if gates else {}
    layer(X, **masks)
    (number,) = counted
    there = torch.ops.whorl_taped.on(number, 1)
    assert there != number
    assert torch.ops.whorl_taped.on(number, 1) == there
    own, other = (taped.written(one) for one in (number, there))
    assert own.others == other.others
    assert [entry[0] for entry in own.backward.entries] == [entry[0] for entry in other.backward.entries]
    assert own.digest() != other.digest()  # kernels are loaded for a device


def test_memory_goes_back_within_a_pass(folder: Path) -> None:
    """What a pass needs meanwhile is freed within it, and outputs are not."""

    class Kernel(emulation.Kernel):
        """One that is never run."""

        def __init__(self, code: bytes, *given: Any, **more: Any) -> None:
            super().__init__(b"libc.so.6", *given, **more)

    with emulated(folder) as patch:
        patch.setattr(prepare, "Kernel", Kernel)
        patch.setattr(store, "kernels", lambda wanted: [b"" for _ in wanted])
        layer = whorl.LSTM(1030, 1030, dtype=torch.bfloat16, engine="persistent")  # of rows that are copied, spread
        plan = layer.plan(torch.empty(200, 32, 1030, dtype=torch.bfloat16, requires_grad=True))
        written = Plain(plan, torch.device("cpu", 0)).written()
        passes = (
            (written.forward, {*written.outputs, written.room}),
            (written.backward, {slot for slot, *_ in written.gradients}),
        )
        for one, outputs in passes:
            taken, freed = entries(one.written())
            assert outputs - {-1} <= taken
            assert freed == taken - outputs
            assert freed


def entries(row: list[int]) -> tuple[set[int], set[int]]:
    """Slots that a tape allocates, and those that it frees."""
    at, found = 1, {tape.ALLOCATE: set[int](), tape.FREE: set[int]()}
    while at < len(row):
        length, kind, slot = row[at : at + 3]
        if kind in found:
            found[kind].add(slot)
        at += 1 + length
    return found[tape.ALLOCATE], found[tape.FREE]


def test_an_argument_is_laid_out_as_struct_does() -> None:
    assert tape.offsets("2Q4Q") == (0, 8, 16, 24, 32, 40)
    assert tape.offsets("QfQ3s") == (0, 8, 16, 24)
    assert tape.offsets("Q3f4xQ") == (0, 8, 12, 16, 24)
    assert tape.offsets("14Q64s")[-1] == 112


@pytest.mark.gpu
@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("make, units, layers", [(whorl.LSTM, 128, 1), (whorl.LSTM, 1024, 1), (whorl.GRU, 650, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_gives_the_same_bits(
    on_a_gpu: list[int],
    monkeypatch: pytest.MonkeyPatch,
    make: Any,
    units: int,
    layers: int,
    dtype: torch.dtype,
    marks: bool,
) -> None:
    """All other tests on a GPU go by tapes; this one both ways."""
    torch.manual_seed(1)
    layer = make(units, units, layers, dtype=dtype, device="cuda", engine="persistent")
    x = torch.randn(20, 33, units, dtype=dtype, device="cuda")
    reset, lengths = torch.rand(20, 33, device="cuda") < 0.1, torch.arange(33, device="cuda") % 21
    more = {"lengths": lengths, "reset": reset} if marks else {}
    both_ways(lambda: trained(layer, x, **more), on_a_gpu, monkeypatch)
    with torch.no_grad():
        both_ways(lambda: [layer(x, **more)[0]], on_a_gpu, monkeypatch)


SLOW = """
import sys, time
sys.path.insert(0, {source!r})
from whorl.engines import taped
taped.begin()
time.sleep({seconds})
"""


@pytest.mark.skipif(os.name == "nt", reason="a compiler that is a script of a shell")
@pytest.mark.parametrize("seconds", [0, 3])
def test_the_end_of_a_process_ends_its_compiler(tmp_path: Path, seconds: int) -> None:
    """Whether or not the compiler has begun."""
    compiler, told = tmp_path / "slow", tmp_path / "told"
    compiler.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo slow 1;; *) echo $$ >> {told}; exec sleep 60;; esac\n'
    )
    compiler.chmod(0o700)
    source = str(Path(whorl.__file__).parents[1])
    environment = os.environ | {"CXX": str(compiler), "WHORL_CACHE": str(tmp_path / "cache")}
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", SLOW.format(source=source, seconds=seconds)], env=environment, check=True)
    assert time.monotonic() - began < 45
    for process in told.read_text().split() if told.exists() else []:
        with pytest.raises(ProcessLookupError):
            os.kill(int(process), 0)


def test_reasons_against_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taped, "_run", None)
    monkeypatch.setattr(taped, "_thread", None)
    monkeypatch.setattr(taped, "_fault", "")
    with whorl.settings(calls="python"):
        assert not taped.ready()
        assert taped.finish() == "settings.calls is 'python'"
    monkeypatch.setenv("WHORL_CALLS", "python")
    monkeypatch.setattr(taped, "_run", list)
    assert not taped.ready()
    monkeypatch.setattr(taped, "_run", None)
    monkeypatch.delenv("WHORL_CALLS")
    monkeypatch.setattr(taped, "_thread", None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    host._version.cache_clear()
    try:
        assert "no-such-compiler" in taped.finish()
    finally:
        host._version.cache_clear()
    assert not taped.ready()
