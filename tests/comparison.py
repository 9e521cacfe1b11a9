"""How the tests of the layers compare: a call with all of its gradients, against torch.nn in float64.

float64 must agree to 1e-12.  Other dtypes follow the error rule of DESIGN.md, section 7: the relative 2-norm of each
tensor is at most twice that of `PlainLoop`, which rounds only what enters a product, plus 4 eps of the dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from whorl.bench import baseline
from whorl.bench.baseline import PlainLoop

EXACT = 1e-12
CELLS = {
    "LSTM": ("LSTM", {}),
    "GRU": ("GRU", {}),
    "RNN tanh": ("RNN", {"nonlinearity": "tanh"}),
    "RNN relu": ("RNN", {"nonlinearity": "relu"}),
}
"""Class and arguments, by a name for the test's id."""
Loss = Callable[[Sequence[Tensor]], Tensor]


def make(module: Any, cell: str, *sizes: int, **arguments: Any) -> torch.nn.Module:
    """The layer of `module` (torch.nn or whorl) for a key of CELLS; suffix "Cell" for the cells of one step."""
    name, own = CELLS[cell.removesuffix("Cell")]
    return getattr(module, name + "Cell" * cell.endswith("Cell"))(*sizes, **own, **arguments)


def draw(cell: str, layout: str, time: int, batch: int, inputs: int, initial: bool, form: torch.nn.Module) -> tuple:
    """x and hx in float64 for a layer built as `form`; hx is None unless `initial`.

    Args:
        layout: "time first", "batch first", "sorted" or "unsorted" (packed), "unbatched".
    """
    first = (batch, time) if layout == "batch first" else (time,) if layout == "unbatched" else (time, batch)
    x = torch.randn(*first, inputs, dtype=torch.float64)
    if layout in ("sorted", "unsorted"):
        lengths = [time] + torch.randint(1, time + 1, (batch - 1,)).tolist()
        lengths = sorted(lengths, reverse=True) if layout == "sorted" else lengths[::-1]
        x = pack_padded_sequence(x, lengths, enforce_sorted=layout == "sorted")
    if not initial:
        return x, None
    rows = form.num_layers * (2 if form.bidirectional else 1)
    widths = [form.proj_size or form.hidden_size] + [form.hidden_size] * (cell == "LSTM")
    middle = () if layout == "unbatched" else (batch,)
    states = tuple(torch.randn(rows, *middle, width, dtype=torch.float64) for width in widths)
    return x, states if cell == "LSTM" else states[0]


def weighted(outputs: Sequence[Tensor]) -> Tensor:
    """A loss that gives each element of each output a gradient of its own."""
    given = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=given, dtype=torch.float64).to(out) for out in outputs]
    return torch.stack([(out * grad).sum().double() for out, grad in zip(outputs, grads, strict=True)]).sum()


def flat(result: Any) -> list[Tensor]:
    """Every tensor of what a layer gives: the output, h, and c where there is one."""
    if isinstance(result, PackedSequence):
        return [result.data]
    return [result] if isinstance(result, Tensor) else [tensor for part in result for tensor in flat(part)]


def results(
    layer: torch.nn.Module, x: Any, hx: Any = None, loss: Loss = weighted, of_x: bool = True
) -> dict[str, Tensor | None]:
    """Outputs, final states and the gradient of x, of each initial state and each parameter, by name."""
    dtype = next(layer.parameters()).dtype

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype).requires_grad_()

    layer.zero_grad()
    packed = isinstance(x, PackedSequence)
    data = leaf(x.data if packed else x).requires_grad_(of_x)
    states = [] if hx is None else [leaf(state) for state in flat(hx)]
    given = (PackedSequence(data, *x[1:]) if packed else data,)
    given += () if hx is None else (tuple(states),) if isinstance(hx, tuple) else (states[0],)
    torch.manual_seed(7)  # dropout draws the same numbers in every dtype
    outputs = flat(layer(*given))
    loss(outputs).backward()
    found = {f"output {index}": out.detach() for index, out in enumerate(outputs)} | {"grad of x": data.grad}
    found |= {f"grad of state {index}": state.grad for index, state in enumerate(states)}
    return found | {f"grad of {name}": weight.grad for name, weight in layer.named_parameters()}


def error(got: Tensor | None, truth: Tensor | None) -> float:
    """The relative 2-norm of the difference; what is zero, or has no gradient, must be so in both."""
    assert (got is None) == (truth is None), "one has a gradient and the other has none"
    if got is None or truth is None:
        return 0.0
    return baseline.error(got, truth)


def broken(rows: Sequence[dict[str, tuple[float, float]]], eps: float) -> dict[str, tuple[float, float]]:
    """What breaks the error rule, its error and its bound: of one draw, or of the root mean squares over several.

    Args:
        rows: for each draw and name the error of the engine and of the baseline.
    """

    def mean(name: str, which: int) -> float:
        return (sum(row[name][which] ** 2 for row in rows) / len(rows)) ** 0.5

    found = {name: (mean(name, 0), 2 * mean(name, 1) + 4 * eps) for name in rows[0]}
    return {name: pair for name, pair in found.items() if not pair[0] <= pair[1]}


def assert_exact(got: dict[str, Tensor | None], truth: dict[str, Tensor | None]) -> None:
    assert got.keys() == truth.keys()
    errors = {name: error(got[name], truth[name]) for name in truth}
    assert {name: e for name, e in errors.items() if not e <= EXACT} == {}


def assert_agrees(layer: torch.nn.Module, x: Any, hx: Any = None, loss: Loss = weighted, of_x: bool = True) -> None:
    """A layer of whorl in its own dtype, against torch's in float64 with the same weights and (rounded) input."""
    dtype = next(layer.parameters()).dtype
    x, hx = _rounded(x, dtype), _rounded(hx, dtype)
    truth, got = results(twin(layer).double(), x, hx, loss, of_x), results(layer, x, hx, loss, of_x)
    if dtype == torch.float64:
        return assert_exact(got, truth)
    plain = results(PlainLoop(layer), x, hx, loss, of_x)
    eps = torch.finfo(dtype).eps
    assert all(tensor is None or tensor.dtype == dtype for tensor in got.values())
    bounds = {name: 2 * error(plain[name], truth[name]) + 4 * eps for name in truth}
    assert got.keys() == truth.keys()
    errors = {name: (error(got[name], truth[name]), bound) for name, bound in bounds.items()}
    assert {name: e for name, e in errors.items() if not e[0] <= e[1]} == {}


def twin(layer: torch.nn.Module) -> torch.nn.Module:
    """torch's own layer with a copy of the weights."""
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
    names = tuple(name for name in names if hasattr(layer, name) and (name != "proj_size" or layer.proj_size))
    names += ("nonlinearity",) * hasattr(layer, "nonlinearity")
    kind = next(kind for kind in type(layer).__mro__ if kind.__module__ == "torch.nn.modules.rnn")
    dtype = next(layer.parameters()).dtype
    made = kind(**{name: getattr(layer, name) for name in names}, dtype=dtype).train(layer.training)
    made.load_state_dict(layer.state_dict())
    for name, weight in made.named_parameters():
        weight.requires_grad_(layer.get_parameter(name).requires_grad)
    return made


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if value is None or isinstance(value, Tensor):
        return value if value is None else value.to(dtype).double()
    if isinstance(value, PackedSequence):
        return PackedSequence(_rounded(value.data, dtype), *value[1:])
    return tuple(_rounded(part, dtype) for part in value)


def in_a_graph(step: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A CUDA graph of a step that ran once before, and the tensors that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured
