"""Cells of several stages, and with vectors, where addresses take the place of tensors; on the host by `emulation`.

To the bit what `Layers` gives, whose numbers other tests compare with the reference's; and by tapes the same.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from cells_for_tests import gru_before, layer_norm_lstm, odd_ends
from emulation import emulated
from engine_cases import Case, assert_agrees
from tapes import counted
from thinned import thinned
from whorl import mean, sigmoid, tanh
from whorl.cells import library
from whorl.engines import taped
from whorl.engines.cuda import aligned, layers, persistent
from whorl.engines.cuda.layers import Layers
from whorl.engines.cuda.marked import Marked
from whorl.engines.cuda.norms import Norms
from whorl.engines.cuda.plain import Plain, is_plain_cell

__all__ = ["counted"]  # a fixture
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.xdist_group("taped"),  # one process compiles it
]
TIME, BATCH, INPUTS, UNITS = 4, 3, 6, 10


@whorl.cell(gates="a b", states="h c", vectors={"w": 0.5, "v": -0.5, "u": 1.0})
def three_vectors(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    """Vectors, a mean, and the weights of one gate of two times something inside the step."""
    c = sigmoid(x.a + r.a + v.w * s.c) * s.c + v.v * tanh(x.b)
    return dict(h=tanh(v.u * c - mean(c) + r.b(c * s.h)), c=c)


@whorl.cell(gates="a n", states="h")
def no_product(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A mean, and gates with recurrent weights that the step does not read."""
    return dict(h=sigmoid(x.a) * s.h + tanh(x.n - mean(x.n)))


CELLS = {
    "peephole": library.make_lstm(peephole=True),
    "reset before": library.make_gru(reset_after=False),
    "layer norm in the step": layer_norm_lstm,
    "three vectors": three_vectors,
    "layer norm": library.lstm,
    "layer norm of x": library.gru,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "layer norm": dict(layer_norm=True),
    "layer norm of x": dict(layer_norm="x"),
}
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "both directions, no bias": dict(num_layers=2, bidirectional=True, bias=False),
    "dropout": dict(num_layers=2, dropout=0.4),
}


def outcome(layer: Any, of_x: bool, initial: bool, time: int, **call: Any) -> list[Tensor]:
    """Outputs, and the gradients of everything that has one."""
    torch.manual_seed(2)
    dtype, rows = layer.weight_ih_l0.dtype, layer.num_layers * (1 + layer.bidirectional)
    x = torch.randn(time, BATCH, INPUTS).to(dtype).requires_grad_(of_x)
    states = [torch.randn(rows, BATCH, UNITS).to(dtype).requires_grad_() for _ in layer._widths] if initial else []
    y, finals = layer(x, (tuple(states) if len(states) > 1 else states[0]) if states else None, **call)
    outputs = [y, *(finals if isinstance(finals, tuple) else (finals,))]
    loss = sum((place + 1) * (out.float() ** 2).sum() for place, out in enumerate(outputs))
    wanted = [one for one in (x, *states, *layer.parameters()) if one.requires_grad]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(loss, wanted)]


def ways(layer: Any, made: type, counted: list[int], monkeypatch: pytest.MonkeyPatch, *how: Any, **call: Any) -> None:
    """By tapes, through Python, and as `Layers` runs it: the same bits."""
    before = len(counted)
    found = [outcome(layer, *how, **call)]
    assert len(counted) == before + 1
    assert {type(one) for _, one in layers._prepared.values()} == {made}
    with monkeypatch.context() as patch:
        patch.setattr(taped, "ready", lambda: False)
        found.append(outcome(layer, *how, **call))
        patch.setattr(layers, "_prepared", {})
        patch.setattr(persistent, "is_plain", lambda problem: False)
        patch.setattr(persistent, "is_marked", lambda problem: False)
        found.append(outcome(layer, *how, **call))
        assert {type(one) for _, one in layers._prepared.values()} == {Layers}
    assert len(counted) == before + 1
    for first, *others in zip(*found, strict=True):
        assert not first.isnan().any()
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)
    layers._prepared.clear()


def made(cell: str, form: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(1)
    options = FORMS[form] | OPTIONS.get(cell, {})
    layer = whorl.Recurrent(CELLS[cell], INPUTS, UNITS, **options, dtype=dtype, engine="persistent")
    with torch.no_grad():
        for weight in layer.parameters():
            weight += 0.1 * torch.randn(weight.shape).to(dtype)  # vectors begin alike
    return layer


@pytest.mark.parametrize(
    "cell, form, how", thinned(3, CELLS, FORMS, [(True, True, TIME), (False, False, TIME), (True, True, 1)])
)
def test_it_is_what_layers_gives(
    cell: str, form: str, how: tuple[bool, bool, int], counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(made(cell, form), Plain, counted, monkeypatch, *how)


@pytest.mark.parametrize(
    "cell, form, what",
    thinned(2, CELLS, ["one layer", "both directions, no bias"], ["mask", "lengths mask reset"]),
)
def test_with_marks(cell: str, form: str, what: str, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    mask, reset = torch.rand(TIME, BATCH) < 0.7, torch.rand(TIME, BATCH) < 0.3
    every = {"mask": mask, "reset": reset, "lengths": torch.tensor([4, 0, 2])}
    call = {name: every[name] for name in what.split()}
    ways(made(cell, form), Marked, counted, monkeypatch, True, True, TIME, **call)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_float32_and_copies(cell: str, copies: bool, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operands are copied for cuBLAS, too."""
    if copies:
        monkeypatch.setattr(aligned, "LEAST", 1)
    ways(made(cell, "one layer", torch.float32), Plain, counted, monkeypatch, True, True, TIME)


def test_inference_gives_the_same(counted: list[int]) -> None:
    for cell in CELLS:
        layer, x = made(cell, "both directions, no bias"), torch.randn(TIME, BATCH, INPUTS).bfloat16()
        wanted = layer(x)[0]
        with torch.no_grad():
            assert torch.equal(layer(x)[0], wanted)


def test_cells_that_are_no_such() -> None:
    """Several products with the weights of one gate, and no recurrent weights."""
    assert is_plain_cell(gru_before.graph)
    assert not is_plain_cell(odd_ends.graph)
    assert not is_plain_cell(library.ind_rnn.graph)


def test_recurrent_weights_that_nothing_reads(folder: Path) -> None:
    """Their gradients, and those of their biases, are zero."""
    with emulated(folder):
        assert_agrees("persistent", no_product.graph, Case(dict(directions=2), time=TIME, batch=BATCH), torch.float32)


def test_gradients_of_vectors_are_no_views_of_each_other(counted: list[int]) -> None:
    """As autograd's engine asks: one may be changed in place, and another freed."""
    layer = made("peephole", "one layer")
    layer(torch.randn(TIME, BATCH, INPUTS).bfloat16())[0].sum().backward()
    vectors = [weight.grad for name, weight in layer.named_parameters() if name.startswith("vector")]
    assert len(vectors) == 3
    assert not any(vector._is_view() for vector in vectors)
    before = [vector.clone() for vector in vectors[1:]]
    vectors[0].zero_()
    for vector, kept in zip(vectors[1:], before, strict=True):
        assert torch.equal(vector, kept)


def test_a_room_that_a_hook_gives_back_lies_as_kernels_read_it(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through Python, too: the norm's kernel reads words of 16 bytes."""
    monkeypatch.setattr(taped, "ready", lambda: False)
    layer, x, seen, own = made("layer norm", "one layer"), torch.randn(TIME, BATCH, INPUTS).bfloat16(), [], Norms.back

    def back(norms: Norms, stream: int, rows: int, projected: int, *rest: Any) -> None:
        seen.append(projected % 16)
        own(norms, stream, rows, projected, *rest)

    monkeypatch.setattr(Norms, "back", back)
    wanted = torch.autograd.grad(layer(x)[0].sum(), [*layer.parameters()])

    def moved(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_empty(8), tensor])[8:] if tensor.dtype == torch.uint8 else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, moved):
        y = layer(x)[0]
    for got, truth in zip(torch.autograd.grad(y.sum(), [*layer.parameters()]), wanted, strict=True):
        assert torch.equal(got, truth)
    assert seen == [0, 0]
