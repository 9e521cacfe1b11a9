"""torch.compile and torch.export: one graph, right gradients, few recompilations, and the same refusals as in eager."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whorl
from whorl import compiled as compiled_operation

LAYERS = {
    "LSTM on onednn": lambda: whorl.LSTM(4, 5, num_layers=2, bidirectional=True, engine="onednn"),
    "LSTM on reference": lambda: whorl.LSTM(4, 5, proj_size=3),
    "GRU on reference": lambda: whorl.GRU(4, 5, bidirectional=True),
    "RNN on reference": lambda: whorl.RNN(4, 5, num_layers=2, bias=False),
}
SHAPES = [(2 + i, 3 + 7 * i % 5) for i in range(15)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def loss(layer: torch.nn.Module, x: Tensor) -> Tensor:
    y, h = layer(2 * x)
    finals = h if isinstance(h, tuple) else (h,)
    return y.pow(2).sum() + sum(final.sin().sum() for final in finals)


def gradients(layer: torch.nn.Module, x: Tensor, function: object) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    value = function(layer, x)
    value.backward()
    return [value.detach(), x.grad, *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_one_graph_right_gradients_and_few_recompilations(make: object) -> None:
    layer, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, fullgraph=True, backend=counter)
    for time, batch in SHAPES:
        x = torch.randn(time, batch, 4)
        for ours, eager in zip(gradients(layer, x, compiled), gradients(layer, x, loss), strict=True):
            assert eager.norm() > 0
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5 * eager.abs().max().item())
    assert counter.frame_count <= 3


def test_inductor_and_no_grad() -> None:
    layer = whorl.LSTM(4, 5, engine="onednn")
    compiled = torch.compile(loss, fullgraph=True)
    x = torch.randn(3, 2, 4)
    for ours, eager in zip(gradients(layer, x, compiled), gradients(layer, x, loss), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(layer, x), loss(layer, x), rtol=1e-5, atol=1e-6)


def test_initial_states_and_dropout() -> None:
    layer = whorl.LSTM(4, 5, num_layers=2, dropout=0.4)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, states = torch.randn(3, 2, 4), (torch.randn(2, 2, 5), torch.randn(2, 2, 5))
    torch.manual_seed(7)
    ours = compiled(x, states)[0]
    torch.manual_seed(7)
    assert torch.equal(ours, layer(x, states)[0])
    assert not torch.equal(ours, compiled(x, states)[0])


def test_packed_sequences() -> None:
    layer, counter = whorl.LSTM(4, 5), CompileCounterWithBackend("aot_eager")

    def run(data: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = layer(PackedSequence(data, sizes))
        return y.data, h

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for lengths in ([3, 2], [5, 4, 1], [6, 6, 2, 2]):
        packed = pack_padded_sequence(torch.randn(max(lengths), len(lengths), 4), lengths)
        y, (h, _) = layer(packed)
        ours = compiled(packed.data, packed.batch_sizes)
        assert torch.equal(ours[0], y.data)
        assert torch.equal(ours[1], h)
    assert counter.frame_count <= 3


def test_autocast_gives_the_autocast_dtype() -> None:
    layer = whorl.LSTM(4, 5, batch_first=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, (h, c) = compiled(x)
        eager, _ = layer(x)
    assert {ours.dtype, h.dtype, c.dtype} == {torch.bfloat16}
    assert torch.equal(ours, eager)


@pytest.mark.usefixtures("no_compiler")
def test_a_compiled_call_is_refused_as_an_eager_one_is() -> None:
    with whorl.settings(slow="error"), pytest.raises(whorl.SlowError, match="onednn: the cell is gru"):
        torch.compile(whorl.GRU(4, 5), backend="aot_eager")(torch.randn(3, 2, 4))
    with pytest.raises(RuntimeError, match=r"Expected 4, got 7"):
        torch.compile(whorl.GRU(4, 5), backend="aot_eager")(torch.randn(3, 2, 7))


def test_backward_runs_on_the_engine_that_ran_forward() -> None:
    """What forward saved says who saved it, so that a switch thrown between the two changes nothing."""
    layer = whorl.LSTM(4, 5)
    x = torch.randn(3, 2, 4)
    truth = gradients(layer, x, loss)
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    value = torch.compile(loss, backend="aot_eager")(layer, leaf)
    with torch.backends.mkldnn.flags(enabled=False):
        value.backward()
    torch.testing.assert_close(leaf.grad, truth[1])


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_time_and_batch(strict: bool) -> None:
    layer = whorl.GRU(4, 5, bidirectional=True).eval()
    dims = {0: torch.export.Dim("time", min=2), 1: torch.export.Dim("batch", min=2)}
    program = torch.export.export(layer, (torch.randn(5, 3, 4),), dynamic_shapes=({**dims},), strict=strict)
    x = torch.randn(9, 7, 4)
    ours, h = program.module()(x)
    y, final = layer(x)
    assert torch.equal(ours, y)
    assert torch.equal(h, final)


def test_jit_trace_gives_torchs_own_operator() -> None:
    layer = whorl.LSTM(4, 5).eval()
    traced = torch.jit.trace(layer, (torch.randn(5, 3, 4),))
    assert "aten::lstm" in str(traced.inlined_graph)
    x = torch.randn(9, 7, 4)
    torch.testing.assert_close(traced(x)[0], layer(x)[0])


def test_the_plan_of_a_compiled_backward_is_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines keep what they made ready for a plan: a new one at each call would be made ready at each call."""
    layer, x = whorl.GRU(3, 4, engine="reference"), torch.randn(5, 2, 3)
    seen: list[Any] = []
    real = compiled_operation.backward
    monkeypatch.setattr(compiled_operation, "backward", lambda made, *rest: seen.append(made) or real(made, *rest))
    run = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        run(x)[0].sum().backward()
    assert len(seen) == 2
    assert seen[0] is seen[1]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("wanted", [False, True])
def test_no_gradient_is_made_that_nobody_asks_for(wanted: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x and of masks, as in eager."""
    options: dict[str, Any] = dict(dropout=0.5, recurrent_dropout=0.5, recurrent_dropout_mode="shared")
    layer, x = whorl.LSTM(3, 4, 2, engine="reference", **options), torch.randn(5, 2, 3)
    masks = {"dropout": [torch.rand(5, 2, 4)], "recurrent_dropout": [torch.rand(2, 4)] * 2}
    for tensor in (x, *masks["dropout"], *masks["recurrent_dropout"]):
        tensor.requires_grad_(wanted)
    seen: list[Any] = []
    real = compiled_operation.backward
    monkeypatch.setattr(compiled_operation, "backward", lambda made, *rest: seen.append(made) or real(made, *rest))
    leaves, found = (
        [*layer.parameters(), *([x, masks["dropout"][0], masks["recurrent_dropout"][1]] if wanted else [])],
        [],
    )
    for run in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        found.append(torch.autograd.grad(run(x, dropout_masks=masks)[0].pow(2).sum(), leaves))
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager)
    assert [made.problem.constants for made in seen] == [() if wanted else ("x", "dropout", "noise")]
