"""Layer norm of the input projection, which `persistent` computes before the time loop."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from cells_for_tests import layer_norm_lstm
from comparison import error
from cubins import cubin
from emulation import H200, emulated
from test_emulated import assert_right, with_gradients
from test_machine_code import listed, needs_tools
from whorl.cells import library
from whorl.cells.expr import var
from whorl.cells.wrappers import EPS, ahead, clipped, layer_norm, norm_vectors
from whorl.cells.wrappers import counted as padded
from whorl.engines.cuda.beside import Norm, norming
from whorl.engines.cuda.norms import Norms, _aligned, inside, norm_of, normed
from whorl.engines.cuda.persistent import Persistent
from whorl.engines.cuda.tiling import Chip
from whorl.problem import Form, Problem, slots
from whorl.weights import split


def test_what_is_left_is_the_step_without_the_norm() -> None:
    left = ahead(layer_norm(library.gru.graph, ["x"])[0])
    assert left is not None
    assert left.fingerprint == library.gru.graph.fingerprint
    both = layer_norm(library.make_lstm(layer_norm=True).graph, ["x", "r"])[0]
    left = ahead(clipped(both, {"c": 2.0}))
    wanted = clipped(layer_norm(library.make_lstm(layer_norm=True).graph, ["r"])[0], {"c": 2.0})
    assert left is not None
    assert left.fingerprint == wanted.fingerprint


def test_a_step_that_reads_x_beside_its_norm_stays_whole() -> None:
    normed = layer_norm(library.lstm.graph, ["x"])[0]
    h, c = normed.outputs
    for beside in (var("x.i"), var("v.x_gain_f")):
        assert ahead(replace(normed, outputs=(h * beside, c))) is None
    assert ahead(library.lstm.graph) is None
    assert ahead(layer_norm(library.lstm.graph, ["r"])[0]) is None
    assert ahead(layer_norm_lstm.graph) is None  # of one gate at a time


def test_a_compiled_graph_has_room_for_what_is_kept() -> None:
    plain = Form(library.lstm.graph, 4, 8, layers=2, directions=2)
    assert slots(replace(plain, cell=layer_norm(plain.cell, ["x"])[0])) == slots(plain) + 3 * 4


def test_the_plan_says_where_it_is_computed() -> None:
    form = Form(layer_norm(library.lstm.graph, ["x"])[0], 4, 512)
    problem = Problem(form, H200, torch.bfloat16, 30, 32, gradient=True)
    said = whorl.engines.cuda.persistent.Persistent().numbers(problem)
    assert said[0] == "the layer norm of x: by a kernel of its own, for all steps before the first"
    assert said[1:] == whorl.engines.cuda.persistent.Persistent().numbers(inside(problem))


def test_an_equal_problem_without_a_norm_has_none() -> None:
    problems = [Problem(Form(library.lstm.graph, 4, 512), H200, torch.bfloat16, 30, 32) for _ in range(2)]
    for problem in problems:
        assert inside(problem) == problem
        assert not normed(problem)
        assert "norm" not in whorl.engines.cuda.persistent.Persistent().numbers(problem)[0]


FORMS: dict[str, Any] = {
    "LSTM": ("LSTM", dict(layer_norm="x"), torch.bfloat16),
    "every norm, layers, directions": ("LSTM", dict(layer_norm=True, num_layers=2, bidirectional=True), torch.float32),
    "no bias": ("GRU", dict(layer_norm="x", bias=False, num_layers=2), torch.float16),
    "words of two": ("GRU", dict(layer_norm="x", hidden_size=22), torch.bfloat16),
    "words of one": ("GRU", dict(layer_norm="x", hidden_size=21), torch.float16),
    "a gate's end inside a word": ("LSTM", dict(layer_norm="x", hidden_size=21), torch.bfloat16),
    "x in float32": ("RNN", dict(layer_norm="x", nonlinearity="relu"), torch.bfloat16),
    "a projection": ("LSTM", dict(layer_norm="x", proj_size=7), torch.bfloat16),
    "dropout of the input by gate": ("LSTM", dict(layer_norm="x", input_dropout=0.3, zoneout=0.1), torch.bfloat16),
}


def built(kind: str, options: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    layer = getattr(whorl, kind)(6, **{"hidden_size": 20, **options})
    for name, parameter in layer.named_parameters():
        if "gain" in name or "shift" in name:
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    return layer.to(dtype)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("form", [name for name in FORMS if "dropout" not in name])
def test_it_is_right(form: str, folder: Path) -> None:
    kind, options, dtype = FORMS[form]
    assert_right(built(kind, options, dtype), torch.randn(4, 5, 6).to(dtype), dtype, folder)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("form", ["LSTM", "dropout of the input by gate"])
def test_what_is_not_a_number_past_the_end_stays_there(form: str, folder: Path) -> None:
    kind, options, dtype = FORMS[form]
    layer, x = built(kind, options, dtype), torch.randn(4, 5, 6).to(dtype)
    lengths = torch.tensor([4, 2, 0, 3, 1])
    layer.engine = "persistent"
    found = []
    for there in (0.0, float("nan")):
        given = x.clone()
        for row, length in enumerate(lengths):
            given[length:, row] = there
        torch.manual_seed(7)
        with emulated(folder):
            found.append(with_gradients(layer, given.requires_grad_(), lengths=lengths))
    zeros, nans = found
    for name, wanted in zeros.items():
        torch.testing.assert_close(nans[name], wanted, rtol=0, atol=0)


KERNELS = {
    "no whole word at a gate's end": ("LSTM", 31, 21, 1),
    "several warps, several rows in a block": ("LSTM", 130, 21, 1),
    "no next row in registers": ("LSTM", 1500, 5, 1),
    "words of two": ("GRU", 130, 21, 1),
    "words of one": ("GRU", 31, 21, 1),
    "a word": ("LSTM", 1, 21, 1),
    "few columns": ("RNN", 7, 3, 1),
    "sums of many blocks": ("GRU", 6, 300, 132),
    "no rows": ("LSTM", 5, 0, 132),
}
"""Kind, units, rows, multiprocessors."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", KERNELS)
def test_its_kernels(size: str, bias: bool, folder: Path) -> None:
    """Rows of one warp and of several, blocks of several rows: as torch's layer norm of x and its bias."""
    kind, units, rows, multiprocessors = KERNELS[size]
    assert_as_torch(kind, units, units, rows, multiprocessors, bias, folder)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "kind, units, counted",
    [("LSTM", 34, 30), ("LSTM", 1504, 1500), ("LSTM", 8, 4), ("GRU", 131, 127), ("RNN", 130, 9), ("GRU", 8, 7)],
)
def test_its_kernels_leave_padding_out(kind: str, units: int, counted: int, folder: Path) -> None:
    """Whole words of padding, parts of words, whole warps: as torch's layer norm of what is left without it."""
    assert_as_torch(kind, units, counted, 7, 1, True, folder)


def assert_as_torch(
    kind: str, units: int, counted: int, rows: int, multiprocessors: int, bias: bool, folder: Path
) -> None:
    """Of rows without padding, as torch; padding is put through the same formula, and its gradients are zeros."""
    torch.manual_seed(2)
    layer = built(kind, dict(layer_norm="x", bias=bias, hidden_size=units), torch.float32)
    form = Form.from_json(layer._form)
    form = replace(form, cell=padded(form.cell, counted, units)) if counted < units else form
    gates = len(form.cell.gates)
    own = split(form, [one.detach() for one in layer._weights()])[0]
    x, grad = torch.randn(rows, gates * units) + 3, torch.randn(rows, gates * units)
    padding = (torch.arange(units) >= counted).repeat(gates)
    x[:, padding] += 1000
    grad[:, padding] = float("nan")
    with emulated(folder):
        problem = Problem(form, H200, torch.float32, 7, 3, gradient=True)
        norms = Norms(problem, Chip((9, 0), multiprocessors), 0)
        y, kept = norms.forward(0, x, own)
        made = norms.backward(0, grad, own, kept)
    gain, shift = (torch.cat([own.vectors[place] for place in places]) for places in norm_vectors(form.cell))
    given = [one.double() for one in (x if own.bias_ih is None else x + own.bias_ih, gain, shift)]
    left = [one[..., ~padding].requires_grad_() for one in given]
    true = torch.nn.functional.layer_norm(left[0], [gates * counted], left[1], left[2])
    wanted = torch.autograd.grad(true, left, grad[:, ~padding].double())
    assert error(y[:, ~padding], true) < 1e-6
    mean = left[0].mean(1, keepdim=True)
    variance = (left[0] - mean).square().mean(1, keepdim=True)
    same = (given[0] - mean) * (variance + EPS).rsqrt() * given[1] + given[2]
    assert error(y[:, padding], same[:, padding]) < 1e-6
    of_bias = [] if made.bias is None else [(made.bias, wanted[0].sum(0))]
    assert (made.bias is not None) == bias
    for found, exact in [*zip((made.x, made.gain, made.shift), wanted, strict=True), *of_bias]:
        assert error(found[..., ~padding], exact) < 1e-6
        assert not found[..., padding].any()


def test_a_padded_norm_has_a_name_of_its_own() -> None:
    """And one that counts all of its units is the plain one."""
    form = Form(layer_norm(library.lstm.graph, ["x"])[0], 4, 8)
    plain, short, whole = (
        norm_of(replace(form, cell=cell), torch.bfloat16)
        for cell in (form.cell, padded(form.cell, 6, 8), padded(form.cell, 8, 8))
    )
    assert whole == plain
    assert plain.name("forward") == "norm_forward_4x8_bfloat16"
    assert short.name("forward") == "norm_forward_4x8_of_6_bfloat16"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_what_a_hook_of_saved_tensors_gives_back_lies_as_it_is_read(folder: Path) -> None:
    layer = built("LSTM", dict(layer_norm="x"), torch.float32)
    form = Form.from_json(layer._form)
    own = split(form, [one.detach() for one in layer._weights()])[0]
    x, grad = torch.randn(2, 21, 4 * 20)
    with emulated(folder):
        norms = Norms(Problem(form, H200, torch.float32, 7, 3, gradient=True), Chip((9, 0), 1), 0)
        _, (given, *rest) = norms.forward(0, x, own)
        moved = torch.cat([given.new_empty(4), given])[4:]
        assert _aligned(given) is given
        assert _aligned(moved).data_ptr() % 16 == 0
        for found, wanted in zip(
            norms.backward(0, grad, own, [moved, *rest]), norms.backward(0, grad, own, [given, *rest]), strict=True
        ):
            assert torch.equal(found, wanted)


def test_it_has_as_many_rows_as_its_kernels_number() -> None:
    form = Form.from_json(built("LSTM", dict(layer_norm="x"), torch.bfloat16)._form)
    wanted = "x has 1073741824 rows, the kernel of its layer norm takes 1073741823 or fewer"
    for cell, batch, refused in ((form.cell, 1024, True), (form.cell, 1023, False), (library.lstm.graph, 1024, False)):
        problem = Problem(replace(form, cell=cell), H200, torch.bfloat16, 1 << 20, batch, gradient=True)
        assert (wanted in Persistent().obstacles(problem)) == refused


TAKEN, LATER = ["sm_80", "sm_86", "sm_89", "sm_90a"], ["sm_100a", "sm_120a"]


@needs_tools
@pytest.mark.parametrize(
    "units, counted, architecture",
    [(1500, None, one) for one in TAKEN + LATER] + [(1504, 1500, TAKEN[-1]), (512, None, TAKEN[-1])],
)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_its_kernels_compile_without_a_gpu(
    kind: str, units: int, counted: int | None, architecture: str, tmp_path: Path
) -> None:
    """And read words of 16 bytes, with nothing spilled, at the size of the large language model and two others."""
    norm = Norm(4, units, torch.bfloat16, False, True, counted)
    code = cubin(norming(kind, norm), norm.name(kind), architecture)
    lines = "\n".join(listed(code, tmp_path / "kernel.cubin"))
    assert "SHFL" in lines
    assert "LDG.E.128" in lines
    assert re.findall(r"\b(LDL|STL)\b", lines) == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("more", [dict(layer_norm=True), dict(layer_norm="x"), dict(peephole=True)], ids=str)
def test_gradients_of_vectors_are_no_views_of_each_other(more: dict[str, Any], folder: Path) -> None:
    """They lie in one piece of memory, which nobody can tell from what they do."""
    layer, x = whorl.LSTM(5, 8, engine="persistent", **more), torch.randn(3, 4, 5)
    with emulated(folder):
        grads = torch.autograd.grad(layer(x)[0].sum(), tuple(layer.parameters()))
    for (name, _), grad in zip(layer.named_parameters(), grads, strict=True):
        if "weight" not in name:
            assert not grad._is_view(), name
            grad.mul_(torch.ones_like(grad, requires_grad=True))  # a view of several would refuse
