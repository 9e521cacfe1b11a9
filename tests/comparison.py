"""How the tests of the layers compare: a call with all of its gradients, against torch.nn in float64.

float64 must agree to 1e-12.  Other dtypes follow the error rule of DESIGN.md, section 7: the relative 2-norm of each
tensor is at most twice that of `PlainLoop`, which rounds only what enters a product, plus 4 eps of the dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

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
    grads = [torch.randn(out.shape, generator=given, dtype=torch.float64).to(out.dtype) for out in outputs]
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
    assert got.shape == truth.shape, f"{tuple(got.shape)} in place of {tuple(truth.shape)}"
    distance, norm = (got.double() - truth).norm().item(), truth.norm().item()
    return 0.0 if distance == 0 else distance / norm if norm else float("inf")


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
    baseline = results(PlainLoop(layer), x, hx, loss, of_x)
    eps = torch.finfo(dtype).eps
    assert all(tensor is None or tensor.dtype == dtype for tensor in got.values())
    bounds = {name: 2 * error(baseline[name], truth[name]) + 4 * eps for name in truth}
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


class _Product(torch.autograd.Function):
    """a @ w.T, forward and backward, of operands rounded to a dtype and nothing else rounded."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        a, w = a.to(dtype).to(a.dtype), w.to(dtype).to(w.dtype)
        ctx.dtype = dtype
        ctx.save_for_backward(a, w)
        return a @ w.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, w), grad = ctx.saved_tensors, grad.to(ctx.dtype).to(grad.dtype)
        return grad @ w, grad.flatten(0, -2).T @ a.flatten(0, -2), None


class PlainLoop(torch.nn.Module):
    """The baseline of the error rule: a dense layer as a loop over time in float32 (float64 for float64)."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = [layer]  # in a list, so that its parameters are not this module's
        self.rounded = next(layer.parameters()).dtype
        self.wide = torch.float64 if self.rounded == torch.float64 else torch.float32
        for name, weight in layer.named_parameters():
            wide = torch.nn.Parameter(weight.detach().to(self.wide), weight.requires_grad)
            self.register_parameter(name, wide)

    def forward(self, x: Tensor, hx: Any = None) -> tuple:
        form = self.layer[0]
        unbatched, ends = x.dim() == 2, []
        states = [] if hx is None else flat(hx)
        if unbatched:
            x, states = x.unsqueeze(1), [state.unsqueeze(1) for state in states]
        elif form.batch_first:
            x = x.transpose(0, 1)
        zeros = [x.new_zeros(x.shape[1], form.hidden_size)] * (1 + (form.mode == "LSTM"))
        for layer in range(form.num_layers):
            outs = []
            for suffix in [f"_l{layer}", f"_l{layer}_reverse"][: 1 + form.bidirectional]:
                out, end = self._sweep(x, [state[len(ends)] for state in states] or zeros, suffix)
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, -1)
            if form.dropout and layer < form.num_layers - 1:
                x = F.dropout(x, form.dropout, form.training)
        finals = [torch.stack(end) for end in zip(*ends, strict=True)]
        if unbatched:
            return x.squeeze(1), [final.squeeze(1) for final in finals]
        return x.transpose(0, 1) if form.batch_first else x, finals

    def _sweep(self, x: Tensor, state: list[Tensor], suffix: str) -> tuple[Tensor, list[Tensor]]:
        weights = {kind: getattr(self, kind + suffix) for kind in ("weight_ih", "weight_hh")}
        b_ih, b_hh = (getattr(self, kind + suffix, x.new_zeros(())) for kind in ("bias_ih", "bias_hh"))
        outs: list[Tensor] = []
        for step in x.flip(0) if suffix.endswith("reverse") else x:
            a = _Product.apply(step, weights["weight_ih"], self.rounded) + b_ih
            b = _Product.apply(state[0], weights["weight_hh"], self.rounded) + b_hh
            state = self._step(a, b, state)
            outs.append(state[0])
        return torch.stack(outs[::-1] if suffix.endswith("reverse") else outs), state

    def _step(self, a: Tensor, b: Tensor, state: list[Tensor]) -> list[Tensor]:
        mode = self.layer[0].mode
        if mode == "LSTM":
            i, f, g, o = (a + b).chunk(4, -1)
            c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
            return [torch.sigmoid(o) * torch.tanh(c), c]
        if mode == "GRU":
            (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
            z, n = torch.sigmoid(az + bz), torch.tanh(an + torch.sigmoid(ar + br) * bn)
            return [(1 - z) * n + z * state[0]]
        return [torch.tanh(a + b) if mode == "RNN_TANH" else F.relu(a + b)]
