"""Engine `cudnn` on an NVIDIA GPU: right, chosen and refused as the plan says, and seen by a profiler.

In float64 it must agree with `reference` to 1e-12.  In the other dtypes the numbers are cuDNN's own, which do not keep
to the error rule (float32 with 17 units was off by 5e-6 on an H100, TF32 off), so they must be what torch.nn gets.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whorl
from comparison import twin

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
CELLS = {
    "LSTM": lambda **kw: whorl.LSTM(13, 17, **kw),
    "GRU": lambda **kw: whorl.GRU(13, 17, **kw),
    "tanh": lambda **kw: whorl.RNN(13, 17, **kw),
    "relu": lambda **kw: whorl.RNN(13, 17, nonlinearity="relu", **kw),
}
FORMS = {
    "plain": {},
    "no bias": dict(bias=False),
    "both directions, 2 layers": dict(bidirectional=True, num_layers=2),
    "3 layers, dropout": dict(num_layers=3, dropout=0.4),
    "batch first": dict(batch_first=True),
}


@pytest.fixture(autouse=True)
def true_float32() -> Any:
    """float32 means float32 here, in cuDNN and in the products of the reference."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def parts(result: Any) -> list[Tensor]:
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in parts(part)]


def results(layer: torch.nn.Module, x: Any, hx: Any) -> list[Tensor]:
    """Outputs, final states, and the gradient of x, of initial states and of each parameter."""
    layer.zero_grad()
    dtype = next(layer.parameters()).dtype
    data = (x.data if isinstance(x, PackedSequence) else x).to(dtype).detach().requires_grad_()
    states = [state.to(dtype).detach().requires_grad_() for state in parts(hx)] if hx is not None else []
    given = PackedSequence(data, *x[1:]) if isinstance(x, PackedSequence) else data
    torch.manual_seed(3)
    outputs = parts(layer(given, None if hx is None else tuple(states) if isinstance(hx, tuple) else states[0]))
    torch.manual_seed(4)
    sum(
        (out * torch.randn(out.shape, device="cuda", dtype=torch.float64).to(dtype)).sum() for out in outputs
    ).backward()
    leaves = [data, *states, *layer.parameters()]
    return [tensor.detach().double() for tensor in (*outputs, *(leaf.grad for leaf in leaves))]


def agree(layer: torch.nn.Module, x: Any, hx: Any = None) -> None:
    """With `reference` in float64, with torch.nn in any other dtype."""
    got = results(layer, x, hx)
    dtype = next(layer.parameters()).dtype
    if dtype == torch.float64:
        layer.engine, bound = "reference", 1e-12
        truth = results(layer, x, hx)
    else:
        bound = torch.finfo(dtype).eps
        truth = results(twin(layer).to("cuda"), x, hx)
    for mine, true in zip(got, truth, strict=True):
        assert true.norm() > 0
        assert (mine - true).norm() <= bound * true.norm()


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cuda", dtype).double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("initial", [False, True], ids=["zero states", "given states"])
def test_cudnn_is_right(cell: str, form: str, dtype: torch.dtype, initial: bool) -> None:
    if "dropout" in FORMS[form] and dtype != torch.float64:
        pytest.skip("torch.nn draws cuDNN's own masks; float64 is compared with the reference, which draws the same")
    layer = CELLS[cell](**FORMS[form], device="cuda", dtype=dtype, engine="cudnn")
    x = rounded(torch.randn(7, 5, 13), dtype)
    if layer.batch_first:
        x = x.transpose(0, 1)
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    states = tuple(rounded(torch.randn(rows, 5, 17), dtype) for _ in range(2))
    agree(layer, x, (states if cell == "LSTM" else states[0]) if initial else None)


@pytest.mark.parametrize("cell", CELLS)
def test_cudnn_takes_packed_sequences(cell: str) -> None:
    layer = CELLS[cell](bidirectional=True, num_layers=2, device="cuda", dtype=torch.float64, engine="cudnn")
    x = pack_padded_sequence(torch.randn(7, 4, 13), [3, 7, 1, 5], enforce_sorted=False).to("cuda", torch.float64)
    agree(layer, x)


def test_cudnn_takes_a_projection() -> None:
    layer = whorl.LSTM(13, 17, proj_size=5, num_layers=2, device="cuda", dtype=torch.float64, engine="cudnn")
    agree(layer, torch.randn(7, 5, 13, device="cuda", dtype=torch.float64))


def test_flat_weights_are_used_where_they_lie() -> None:
    """After flatten_parameters cuDNN reads the parameters themselves, so nothing is saved for them."""
    layer = whorl.LSTM(64, 128, num_layers=2, device="cuda", engine="cudnn")
    x = torch.randn(9, 8, 64, device="cuda")
    y, _ = layer(x)
    saved = [tensor for tensor in y.grad_fn.saved_tensors if getattr(tensor, "dtype", None) == torch.uint8]
    assert saved[1].numel() == 0
    scattered = {name: torch.nn.Parameter(weight.clone()) for name, weight in layer.named_parameters()}
    other, _ = torch.func.functional_call(layer, scattered, (x,))
    saved = [tensor for tensor in other.grad_fn.saved_tensors if getattr(tensor, "dtype", None) == torch.uint8]
    assert saved[1].numel() > 0
    torch.testing.assert_close(other, y)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_what_is_saved_may_be_kept_elsewhere(dropout: float) -> None:
    """Under save_on_cpu backward is given copies, which no longer lie as flatten_parameters laid them."""
    layer = whorl.LSTM(13, 17, num_layers=2, dropout=dropout, device="cuda", dtype=torch.float64, engine="cudnn")
    x = torch.randn(7, 5, 13, device="cuda", dtype=torch.float64)
    plain = results(layer, x, None)
    with torch.autograd.graph.save_on_cpu():
        moved = results(layer, x, None)
    for mine, true in zip(moved, plain, strict=True):
        assert (mine - true).norm() <= 1e-12 * true.norm()


def test_backward_in_eval_mode_and_twice() -> None:
    layer = whorl.LSTM(13, 17, device="cuda", engine="cudnn").eval()
    y, _ = layer(torch.randn(7, 5, 13, device="cuda"))
    y.sum().backward(retain_graph=True)
    once = [weight.grad.clone() for weight in layer.parameters()]
    layer.zero_grad()
    y.sum().backward()
    for first, weight in zip(once, layer.parameters(), strict=True):
        assert torch.equal(first, weight.grad)


def test_longer_than_cudnn_takes_is_said() -> None:
    layer = whorl.GRU(2, 2, device="cuda", dtype=torch.float64)  # which engine `persistent` does not take
    plan = whorl.explain(layer, torch.zeros(65_536, 1, 2, device="cuda", dtype=torch.float64)).plans[0]
    assert plan.engine == "stepwise"
    assert any("65536 steps, cuDNN takes at most 65535" in str(refusal) for refusal in plan.refusals)
    shorter = torch.zeros(65_535, 1, 2, device="cuda", dtype=torch.float64)
    assert whorl.explain(layer, shorter).plans[0].engine == "cudnn"


def test_switched_off_cudnn_is_said() -> None:
    layer = whorl.LSTM(13, 17, device="cuda", dtype=torch.float64)
    x = torch.randn(7, 5, 13, device="cuda", dtype=torch.float64)
    with torch.backends.cudnn.flags(enabled=False), whorl.settings(slow="error"):
        plan = whorl.explain(layer, x).plans[0]
        assert plan.engine == "stepwise"
        assert any("switched off" in str(refusal) for refusal in plan.refusals)
        layer(x)
    assert whorl.explain(layer, x).plans[0].engine == "cudnn"


@pytest.mark.parametrize("engine", ["cudnn", "reference"])
def test_a_profiler_sees_the_plan(engine: str) -> None:
    layer = whorl.LSTM(64, 128, device="cuda", engine=engine)
    x = torch.randn(9, 8, 64, device="cuda")
    layer(x)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        layer(x)
    seen = any("_cudnn_rnn" in event.key for event in profile.key_averages())
    assert seen == (engine == "cudnn")


@pytest.mark.filterwarnings("error:.*custom operator")
def test_compiled_on_cuda() -> None:
    torch._dynamo.reset()
    layer = whorl.LSTM(13, 17, num_layers=2, device="cuda")
    compiled = torch.compile(lambda x: layer(2 * x)[0].pow(2).sum(), fullgraph=True, backend="aot_eager")
    for time, batch in [(4, 3), (5, 4), (6, 2), (9, 7)]:
        x = torch.randn(time, batch, 13, device="cuda", requires_grad=True)
        value = compiled(x)
        (ours,) = torch.autograd.grad(value, x)
        (eager,) = torch.autograd.grad(layer(2 * x)[0].pow(2).sum(), x)
        torch.testing.assert_close(ours, eager)


def test_torch_func_on_cuda() -> None:
    layer = whorl.LSTM(13, 17, device="cuda", dtype=torch.float64, engine="cudnn")
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    x, tangent = torch.randn(2, 7, 5, 13, device="cuda", dtype=torch.float64)

    def of(x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, weights, (x,))[0]

    _, ours = torch.func.jvp(of, (x,), (tangent,))
    step = 1e-6
    slope = (of(x + step * tangent) - of(x - step * tangent)) / (2 * step)
    assert slope.norm() > 0
    assert (ours - slope).norm() <= 1e-7 * slope.norm()
    rows = torch.randn(3, *x.shape, device="cuda", dtype=torch.float64)
    with whorl.settings(slow="error"):
        mapped = torch.vmap(of)(rows)
    torch.testing.assert_close(mapped, torch.stack([of(row) for row in rows]))


def test_autocast_gives_the_autocast_dtype_and_gradients_in_the_weights() -> None:
    layer = whorl.LSTM(13, 17, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, (h, c) = layer(torch.randn(7, 5, 13, device="cuda"))
    assert {y.dtype, h.dtype, c.dtype} == {torch.bfloat16}
    y.float().sum().backward()
    assert all(weight.grad.dtype == torch.float32 and weight.grad.norm() > 0 for weight in layer.parameters())


def test_a_captured_graph_replays() -> None:
    layer = whorl.LSTM(64, 128, device="cuda", dtype=torch.float16, engine="cudnn")
    x = torch.randn(9, 8, 64, device="cuda", dtype=torch.float16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        layer(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y, _ = layer(x)
    for _ in range(3):
        x.copy_(torch.randn(9, 8, 64))
        graph.replay()
        with torch.no_grad():
            torch.testing.assert_close(y, layer(x)[0])
