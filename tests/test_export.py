"""What users export today with torch.nn's layers they export with whorl's: the same program, with dynamic time."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whorl
from comparison import CELLS, EXACT, error, flat, make

OTHER_SIZES = [(4, 3), (1, 1), (7, 3), (11, 2)]
"""Time and batch; the first is the one with which a program is made."""
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:Exporting a model to ONNX"
)


class Model(torch.nn.Module):
    """A layer in a model, which gives all of its outputs in a row."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat(self.layer(x)))


class Packing(Model):
    """The model of a tagger: padded in, padded out."""

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        y, h = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return (pad_packed_sequence(y, batch_first=True)[0], *flat(h))


def pair(cell: str, model: type[Model] = Model, **options: Any) -> list[torch.nn.Module]:
    """torch's and whorl's, from the same seed, in float64."""
    made = []
    for module in (torch.nn, whorl):
        torch.manual_seed(3)
        made.append(model(make(module, cell, 5, 6, **options, dtype=torch.float64)).eval())
    return made


def x_of(time: int, batch: int, one_step: bool = False) -> Tensor:
    return torch.randn(*(() if one_step else (time,)), batch, 5, dtype=torch.float64)


def assert_same(got: Any, wanted: Any) -> None:
    assert len(got) == len(wanted)
    errors = [error(torch.as_tensor(a), b) for a, b in zip(got, wanted, strict=True)]
    assert max(errors) <= EXACT, errors


@pytest.mark.parametrize("cell", [*CELLS, *(f"{cell}Cell" for cell in CELLS)])
def test_a_traced_layer_takes_other_lengths_and_needs_no_whorl(cell: str) -> None:
    one_step = cell.endswith("Cell")
    theirs, ours = pair(cell, **({} if one_step else {"num_layers": 2, "bidirectional": True}))
    traced = torch.jit.trace(ours, (x_of(*OTHER_SIZES[0], one_step),))
    assert "whorl::" not in str(traced.inlined_graph)
    for time, batch in OTHER_SIZES:
        x = x_of(time, batch, one_step)
        assert_same(traced(x), theirs(x))


def test_a_traced_model_that_packs_takes_other_lengths() -> None:
    theirs, ours = pair("LSTM", Packing, batch_first=True, bidirectional=True)
    traced = torch.jit.trace(ours, (torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor([2, 4, 1])))
    for lengths in (torch.tensor([4, 1, 3]), torch.tensor([1, 9])):
        x = torch.randn(len(lengths), int(lengths.max()), 5, dtype=torch.float64)
        assert_same(traced(x, lengths), theirs(x, lengths))


def onnx_program(model: torch.nn.Module, one_step: bool) -> bytes:
    """As torch.onnx.export writes it by way of torch.jit.trace."""
    file = io.BytesIO()
    axes = {0: "batch"} if one_step else {0: "time", 1: "batch"}
    x = x_of(*OTHER_SIZES[0], one_step)
    torch.onnx.export(model, (x,), file, dynamo=False, input_names=["x"], dynamic_axes={"x": axes})
    return file.getvalue()


@pytest.mark.parametrize("cell", [*CELLS, *(f"{cell}Cell" for cell in CELLS)])
def test_an_onnx_program_is_torchs_to_the_byte_and_takes_other_lengths(cell: str) -> None:
    reference = pytest.importorskip("onnx.reference", reason="the package onnx is not installed")
    onnx = pytest.importorskip("onnx")
    one_step = cell.endswith("Cell")
    theirs, ours = pair(cell, **({} if one_step else {"num_layers": 2}))
    program = onnx_program(ours, one_step)
    assert program == onnx_program(theirs, one_step)
    if cell == "RNN relu":
        return  # onnx's own evaluator has no relu in this operator; that the program is torch's is all that is asked
    run = reference.ReferenceEvaluator(onnx.load_from_string(program)).run
    for time, batch in OTHER_SIZES:
        x = x_of(time, batch, one_step)
        assert_same(run(None, {"x": x.numpy()}), theirs(x))


@pytest.mark.parametrize("cell", ["LSTM", "RNN tanhCell"])
def test_the_onnx_program_of_torch_export_computes_what_torch_does(cell: str) -> None:
    """For other batches; not for other lengths, which the program of torch's own layer does not take either."""
    pytest.importorskip("onnxscript", reason="the package onnxscript is not installed")
    reference = pytest.importorskip("onnx.reference", reason="the package onnx is not installed")
    one_step = cell.endswith("Cell")
    theirs, ours = pair(cell)
    (time, batch), shapes = OTHER_SIZES[0], ({0 if one_step else 1: torch.export.Dim.DYNAMIC},)
    made = torch.onnx.export(ours, (x_of(time, batch, one_step),), dynamo=True, dynamic_shapes=shapes, verbose=False)
    run = reference.ReferenceEvaluator(made.model_proto).run
    for batch in (3, 1, 7):
        x = x_of(time, batch, one_step)
        assert_same(run(None, {"x": x.numpy()}), theirs(x))
        assert_same(ours(x), theirs(x))  # the export has left the layer as it was


def test_steps_that_torch_does_not_have_are_refused() -> None:
    own = whorl.Recurrent(whorl.cell(gates="n", states="h")(lambda x, r, s: {"h": whorl.tanh(x.n + r.n)}), 5, 6)
    for layer in (whorl.LSTM(5, 6, clip=1.0), whorl.GRU(5, 6, recurrent_dropout=0.5), own):
        with pytest.raises(whorl.UnsupportedError, match="as torch's own operator, and this .* use torch.export"):
            torch.jit.trace(layer, (torch.zeros(4, 3, 5),))


@pytest.mark.parametrize("make_model", [torch.nn.Sequential, lambda layer: layer], ids=["inside", "itself"])
def test_torch_jit_script_is_refused_with_what_to_write(make_model: Callable) -> None:
    with pytest.raises(whorl.UnsupportedError, match=r"cannot compile whorl's GRU: use torch.jit.trace.*whorl.restore"):
        torch.jit.script(make_model(whorl.GRU(5, 6)))


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "LSTMCell"])
def test_fx_sees_one_call_of_a_layer(cell: str) -> None:
    layer = make(whorl, cell, 3, 4, dtype=torch.float64)
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(layer))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
    x = torch.randn(5, 3, dtype=torch.float64)
    for got, wanted in zip(flat(graph(x)), flat(layer(x)), strict=True):
        assert torch.equal(got, wanted)


def test_fx_keeps_the_options_of_a_call() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = whorl.GRU(3, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            return self.layer(x, lengths=lengths, return_states=True)[2]["h"]

    model, x = Masked(), torch.randn(5, 2, 3)
    graph = torch.fx.symbolic_trace(model)
    for lengths in (torch.tensor([5, 2]), torch.tensor([0, 4])):
        assert torch.equal(graph(x, lengths), model(x, lengths))
