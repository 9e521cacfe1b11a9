"""Layer norm of the input projection, which `persistent` computes before the time loop."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from cells_for_tests import layer_norm_lstm
from comparison import error
from emulation import H200, emulated
from test_emulated import assert_right, with_gradients
from test_machine_code import needs_tools, nvdisasm
from whorl.cells import library
from whorl.cells.expr import var
from whorl.cells.wrappers import ahead, clipped, layer_norm, norm_vectors
from whorl.engines.cuda.compile import cubin
from whorl.engines.cuda.norms import Norms, inside, normed
from whorl.engines.cuda.source import Norm, norming
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
    "x in float32": ("RNN", dict(layer_norm="x", nonlinearity="relu"), torch.bfloat16),
    "a projection": ("LSTM", dict(layer_norm="x", proj_size=7), torch.bfloat16),
    "dropout of the input by gate": ("LSTM", dict(layer_norm="x", input_dropout=0.3, zoneout=0.1), torch.bfloat16),
}


def built(kind: str, options: dict[str, Any], dtype: torch.dtype, units: int = 20) -> torch.nn.Module:
    torch.manual_seed(3)
    layer = getattr(whorl, kind)(6, units, **options)
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("units", [130, 31])
def test_its_kernels(units: int, bias: bool, folder: Path) -> None:
    """Rows of several warps, blocks of several rows: as torch's layer norm of x and its bias."""
    torch.manual_seed(2)
    layer, rows = built("LSTM", dict(layer_norm="x", bias=bias), torch.float32, units), 21
    form = Form.from_json(layer._form)
    own = split(form, [one.detach() for one in layer._weights()])[0]
    x, grad = torch.randn(2, rows, 4 * units) + 3
    with emulated(folder):
        norms = Norms(Problem(form, H200, torch.float32, 7, 3, gradient=True), Chip((9, 0), 1), 0)
        y, kept = norms.forward(0, x, own)
        made = norms.backward(0, grad, own, kept)
    gain, shift = (torch.cat([own.vectors[place] for place in places]) for places in norm_vectors(form.cell))
    given = [one.double().requires_grad_() for one in (x if own.bias_ih is None else x + own.bias_ih, gain, shift)]
    true = torch.nn.functional.layer_norm(given[0], [4 * units], given[1], given[2])
    wanted = torch.autograd.grad(true, given, grad.double())
    assert error(y, true) < 1e-6
    for found, exact in zip((made.x, made.gain, made.shift), wanted, strict=True):
        assert error(found, exact) < 1e-6
    assert (made.bias is not None) == bias
    if made.bias is not None:
        assert error(made.bias, wanted[0].sum(0)) < 1e-6


@needs_tools
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_its_kernels_compile_without_a_gpu(kind: str, architecture: str, tmp_path: Path) -> None:
    """And at the size of the large language model nothing is spilled but a word that sm_120a keeps over the rows."""
    norm = Norm(4, 1500, torch.bfloat16, False, True)
    path, tool = tmp_path / "kernel.cubin", nvdisasm()
    assert tool is not None
    path.write_bytes(cubin(norming(kind, norm), norm.name(kind), architecture))
    lines = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    assert "SHFL" in lines
    spills = len(re.findall(r"\b(LDL|STL)\b", lines))
    assert spills <= 2 * (kind == "backward" and architecture == "sm_120a")
