"""The C of every cell, forward and backward, is what its traced step says: on the host by number, for CUDA by compiler.

In double the bound is 1e-12; in float twice the error of plain torch in float32 plus 4 eps (DESIGN.md, section 7).
"""

import ctypes
import importlib.util
import re
import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cells_for_tests import CELLS, odd_ends
from expressions import Library, needs_compiler
from whorl import Cell
from whorl.cells.cell import Graph
from whorl.cells.expr import OPS, Expr, const, topological, var
from whorl.cells.graphs import Evaluator
from whorl.cells.lower import CUDA, HOST, SPELLINGS, Stage, host_source, identifier, stages

BATCH, UNITS = 3, 17
DIRECTIONS = ("forward", "backward")


def outputs_of(graph: Graph, direction: str) -> dict[str, Expr]:
    return graph.named() if direction == "forward" else graph.backward.named()


def leaves_of(graph: Graph) -> list[str]:
    kinds = {"x": graph.gates, "r": graph.recurrent, "s": graph.states, "v": graph.vectors, "e": graph.inputs}
    return [f"{kind}.{name}" for kind, names in (kinds | {"d": graph.states}).items() for name in names]


class Values:
    """Drawn leaves, recurrent weights and biases for a cell, in float64."""

    def __init__(self, graph: Graph) -> None:
        self.leaves = {name: torch.randn(BATCH, UNITS, dtype=torch.float64) for name in leaves_of(graph)}
        self.weights = {gate: torch.randn(UNITS, UNITS, dtype=torch.float64) / UNITS**0.5 for gate in graph.recurrent}
        self.biases = {gate: torch.randn(UNITS, dtype=torch.float64) for gate in graph.recurrent}

    def collective(self, kind: str, gate: str, operand: Tensor) -> Tensor:
        weight = self.weights[gate].to(operand.dtype)
        operand = operand.expand(BATCH, UNITS)
        return operand @ weight.T + self.biases[gate].to(operand.dtype) if kind == "product" else operand @ weight

    def evaluate(self, outputs: Mapping[str, Expr], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        evaluator = Evaluator(list(outputs.values()))
        leaves = {name: value.to(dtype) for name, value in self.leaves.items()}
        found = evaluator(leaves, evaluator.constants(torch.empty(0, dtype=dtype)), self.collective)
        return {name: value.expand(BATCH, UNITS) for name, value in zip(outputs, found, strict=True)}


def error(got: Tensor, wanted: Tensor) -> float:
    """The relative 2-norm; of what should be zero everywhere, the norm."""
    norm = wanted.norm()
    return float((got.double() - wanted).norm() / (norm if norm else 1.0))


# --- the host's C++ ---------------------------------------------------------------------------------------------------


@cache
def host(dtype: torch.dtype) -> Library:
    """Every cell in one library: one run of the compiler."""
    return Library({f"{n}_{d}": outputs_of(c.graph, d) for n, c in CELLS.items() for d in DIRECTIONS}, dtype)


def run_on_host(cell: Cell, direction: str, values: Values, dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = {identifier(name): value for name, value in values.leaves.items()}
    found = host(dtype)(f"{cell.name}_{direction}", leaves, values.collective)
    return {name: found[identifier(name)] for name in outputs_of(cell.graph, direction)}


@needs_compiler
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_c_of_a_cell_in_double_equals_its_trace(cell: Cell, direction: str) -> None:
    values = Values(cell.graph)
    wanted = values.evaluate(outputs_of(cell.graph, direction))
    got = run_on_host(cell, direction, values, torch.float64)
    for name in wanted:
        assert error(got[name], wanted[name]) <= 1e-12, name


@needs_compiler
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_c_of_a_cell_in_float_keeps_the_error_rule(cell: Cell, direction: str) -> None:
    values = Values(cell.graph)
    values.leaves = {name: value.float().double() for name, value in values.leaves.items()}
    outputs = outputs_of(cell.graph, direction)
    wanted, baseline = values.evaluate(outputs), values.evaluate(outputs, torch.float32)
    got = run_on_host(cell, direction, values, torch.float32)
    for name in wanted:
        bound = 2 * error(baseline[name], wanted[name]) + 4 * torch.finfo(torch.float32).eps
        assert error(got[name], wanted[name]) <= bound, name


@needs_compiler
def test_a_wrong_spelling_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the comparison above can fail: with one spelling broken, it does."""
    cell = CELLS["lstm"]
    monkeypatch.setitem(SPELLINGS, "tanh", ("std::sinh({0})", "sinhf({0})"))
    values = Values(cell.graph)
    leaves = {identifier(name): value for name, value in values.leaves.items()}
    got = Library({"broken": cell.graph.named()}, torch.float64)("broken", leaves)
    assert error(got["after_h"], values.evaluate(cell.graph.named())["after.h"]) > 1e-3


# --- the gradient of a cell -------------------------------------------------------------------------------------------


def loss(cell: Cell, values: Values, products: list[Tensor] | None = None) -> Tensor:
    """The states after the step, each times its `d`, summed; `products` is given what each product gave."""

    def collective(kind: str, gate: str, operand: Tensor) -> Tensor:
        result = values.collective(kind, gate, operand)
        if products is not None:
            products.append(result)
        return result

    evaluator = Evaluator(cell.graph.outputs)
    after = evaluator(values.leaves, evaluator.constants(torch.empty(0, dtype=torch.float64)), collective)
    return sum((values.leaves[f"d.{name}"] * state).sum() for name, state in zip(cell.states, after, strict=True))


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_gradient_of_a_cell_equals_torchs_autograd(cell: Cell) -> None:
    values, products = Values(cell.graph), []
    for tensor in (*values.leaves.values(), *values.weights.values(), *values.biases.values()):
        tensor.requires_grad_()
    total = loss(cell, values, products)
    backward = cell.graph.backward
    with torch.no_grad():
        got = values.evaluate(backward.named())
        operands = values.evaluate({f"{i}": product.operand for i, product in enumerate(backward.products)})
    wrt = [name for name in values.leaves if not name.startswith("d.")]
    inputs = [*(values.leaves[name] for name in wrt), *products, *values.weights.values(), *values.biases.values()]
    found = iter(torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True))

    assert set(got) == {f"d{name}" for name in wrt} | {f"dp.{index}" for index in range(len(products))}
    for name in [*wrt, *(f"p.{index}" for index in range(len(products)))]:
        assert error(got[f"d{name}"], next(found)) <= 1e-12, name
    # A product's gradient and operand give those of its weights and bias, as `Product` says.
    for wanted, total_of in ((values.weights, lambda g, a: g.T @ a), (values.biases, lambda g, a: g.sum(0))):
        for gate in wanted:
            parts = [
                total_of(got[f"dp.{index}"], operands[f"{index}"])
                for index, product in enumerate(backward.products)
                if product.gate == gate
            ]
            assert error(sum(parts, torch.zeros_like(wanted[gate])), next(found)) <= 1e-12, gate


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_the_gradient_of_a_cell_equals_finite_differences(cell: Cell) -> None:
    """Along one drawn direction; central differences of this width are right to about 1e-10, and seldom meet a kink."""
    values, width = Values(cell.graph), 1e-6
    grads = values.evaluate(cell.graph.backward.named())
    ways = {name: torch.randn_like(value) for name, value in values.leaves.items() if name[0] != "d"}
    parts = [float((grads[f"d{name}"] * way).sum()) for name, way in ways.items()]
    start, ends = values.leaves, []
    for sign in (1, -1):
        values.leaves = start | {name: start[name] + sign * width * way for name, way in ways.items()}
        ends.append(float(loss(cell, values)))
    wanted, bound = (ends[0] - ends[1]) / (2 * width), 1e-8 * sum(map(abs, parts))
    assert abs(sum(parts) - wanted) <= bound
    assert abs(sum(parts) + 1e-4 * max(map(abs, parts)) - wanted) > bound  # a ten-thousandth of one part would show


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, forward, backward",
    [
        ("lstm", [""], [""]),
        ("gru", [""], [""]),
        ("rnn_tanh", [""], [""]),
        ("rnn_relu", [""], [""]),
        ("four_states", [""], [""]),
        ("gru_before", ["product", ""], ["product", "pull", ""]),
        (
            "layer_norm_lstm",
            ["mean mean", "mean mean", "mean", "mean", ""],
            ["mean mean", "mean mean", "mean", "mean", "mean", "mean", "mean mean", "mean mean", ""],
        ),
    ],
)
def test_a_step_splits_into_as_few_stages_as_can_be(name: str, forward: list[str], backward: list[str]) -> None:
    """What follows each stage.  Layer norm of x and r asks for two means, then two variances; that of c comes after.

    Backward computes them again, and then the gradient of each in reverse.
    """
    graph = CELLS[name].graph
    for outputs, wanted in ((graph.named(), forward), (graph.backward.named(), backward)):
        assert [" ".join(c.kind for c in stage.collectives) for stage in stages(outputs, HOST)] == wanted


@pytest.mark.parametrize("target", [HOST, CUDA], ids=["host", "cuda"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_stages_hold_together(cell: Cell, direction: str, target: object) -> None:
    outputs = outputs_of(cell.graph, direction)
    made = stages(outputs, target)
    faults = list(faults_of(made, {identifier(name) for name in leaves_of(cell.graph)}, {*map(identifier, outputs)}))
    assert faults == []


def faults_of(made: list[Stage], leaves: set[str], outputs: set[str]) -> list[str]:
    """What a kernel would trip over."""
    faults, known, declared = [], set(leaves), []
    for index, stage in enumerate(made):
        local = {value.name for value in stage.reads}
        faults += [f"stage {index} reads {name}, which nothing wrote" for name in local - known]
        for line in stage.lines:
            name, text = re.fullmatch(r"const (?:real|bool) (\w+) = (.*);", line).groups()
            used = set(re.findall(r"\b(?:t\d+(?:_\d+)?|[a-z]_\w+)", text))
            faults += [f"stage {index} uses {word} unread" for word in used - local]
            local.add(name)
            declared.append(name)
        writes = [value.name for value in stage.writes]
        faults += [f"stage {index} writes {name}, which it has not" for name in set(writes) - local]
        faults += [f"stage {index} writes {name} twice" for name in writes if writes.count(name) > 1]
        known |= set(writes)
        for collective in stage.collectives:
            faults += [f"{collective.result} needs {name}" for name in set(collective.operands) - known]
            faults += [] if collective.operands else [f"{collective.result} of nothing"]
            declared.append(collective.result)
        known |= {collective.result for collective in stage.collectives}
    faults += [f"{name} declared twice" for name in {*declared} if declared.count(name) + (name in leaves) > 1]
    faults += [f"{name} is never written" for name in outputs - known]
    return faults + (["collectives after the last stage"] if made[-1].collectives else [])


def test_a_broken_stage_is_found() -> None:
    graph = odd_ends.graph
    made = stages(graph.named(), HOST)
    leaves, outputs = {identifier(name) for name in leaves_of(graph)}, {*map(identifier, graph.named())}
    assert faults_of(made, leaves, outputs) == []
    for index, stage in enumerate(made):
        for field in ("reads", "writes", "lines", "collectives"):
            for place in range(len(getattr(stage, field))):
                values = {name: list(getattr(stage, name)) for name in ("reads", "writes", "lines", "collectives")}
                del values[field][place]
                broken = [*made[:index], Stage(**{k: tuple(v) for k, v in values.items()}), *made[index + 1 :]]
                assert faults_of(broken, leaves, outputs), f"stage {index} without one of its {field}"


def test_any_name_of_a_cell_is_one_in_c() -> None:
    source, _ = host_source("<lambda> of ñ; abort()", {"after.h": -var("x.n")})
    assert 'extern "C" void _lambda__of____abort___0(long units' in source
    assert identifier("2nd order") == "_2nd_order"


def test_an_output_cannot_take_the_name_of_a_temporary() -> None:
    with pytest.raises(AssertionError, match="name"):
        stages({"t1": -var("x.a")}, HOST)


# --- the table of spellings, and CUDA ---------------------------------------------------------------------------------


def test_every_operation_has_a_spelling_for_each_target() -> None:
    assert set(SPELLINGS) == set(OPS)
    for op, spellings in SPELLINGS.items():
        for spelling in spellings:
            fields = {int(field) for _, field, _, _ in string.Formatter().parse(spelling) if field is not None}
            assert fields == set(range(OPS[op].arity)), op


NUMBERS = [0.0, -0.0, 1.0, -2.5, 0.1, 1e22, 1e-30, 3.4e38, torch.inf, -torch.inf, torch.nan]


def numbers() -> dict[str, Expr]:
    return {f"n.{index}": -const(value) for index, value in enumerate(NUMBERS)}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_printed_as_they_are(dtype: torch.dtype) -> None:
    found = Library({"numbers": numbers()}, dtype)("numbers", {"any": torch.zeros(1, 1)})
    got = torch.cat([found[f"n_{index}"].flatten() for index in range(len(NUMBERS))])
    wanted = -torch.tensor(NUMBERS, dtype=dtype)
    assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.equal(got.signbit()[:10], wanted.signbit()[:10])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_number_beyond_a_dtype_is_infinite_in_the_reference_too(dtype: torch.dtype) -> None:
    given = [*NUMBERS, 7e4, -1e300, torch.finfo(dtype).max]
    found = Evaluator([const(value) for value in given]).constants(torch.empty(0, dtype=dtype))
    wanted = torch.tensor(given, dtype=torch.float64).to(dtype)
    assert torch.allclose(torch.stack([value for _, value in found]), wanted, rtol=0, atol=0, equal_nan=True)


def nvrtc() -> ctypes.CDLL | None:
    """The NVRTC of torch or of the package nvidia-cuda-nvrtc, which needs no GPU."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(torch.__file__).parent, *map(Path, spec.submodule_search_locations or ())] if spec else []
    found = [path for root in roots for path in sorted(root.glob("**/libnvrtc*.so*")) if "builtins" not in path.name]
    return ctypes.CDLL(str(found[0])) if found else None


def compile_for_cuda(library: ctypes.CDLL, source: str) -> str:
    """What the compiler says: empty where it has neither error nor warning."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"stages.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=compute_80", b"--diag-suppress=177")  # 177: never used
    status = library.nvrtcCompileProgram(program, 2, options)
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return log.value.decode() or (f"status {status}" if status else "")


def cuda_source(graphs: Mapping[str, Mapping[str, Expr]]) -> str:
    texts = [
        "using real = float;", "__device__ real logistic(real value) { return 1.f / (1.f + expf(-value)); }",
        "__device__ real softplus(real value) { return log1pf(expf(value)); }",
    ]  # fmt: skip
    for name, outputs in graphs.items():
        for index, stage in enumerate(stages(outputs, CUDA)):
            zero = " != 0"
            loads = [
                f"const {'bool' if v.condition else 'real'} {v.name} = reads[{i}][u]{zero if v.condition else ''};"
                for i, v in enumerate(stage.reads)
            ]
            stores = [f"writes[{i}][u] = {v.name};" for i, v in enumerate(stage.writes)]
            body = "\n  ".join(["const int u = threadIdx.x;", *loads, *stage.lines, *stores])
            parameters = "const real* const* reads, real* const* writes"
            texts.append(f'extern "C" __global__ void {name}_{index}({parameters}) {{\n  {body}\n}}')
    return "\n".join(texts)


needs_nvrtc = pytest.mark.skipif(nvrtc() is None, reason="no NVRTC: pip install nvidia-cuda-nvrtc")


@needs_nvrtc
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nvrtc_takes_the_stages_of_every_cell(direction: str) -> None:
    graphs = {name: outputs_of(cell.graph, direction) for name, cell in CELLS.items()} | {"numbers": numbers()}
    assert compile_for_cuda(nvrtc(), cuda_source(graphs)) == ""


@needs_nvrtc
def test_nvrtc_refuses_a_wrong_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPELLINGS, "tanh", ("", "tangent({0})"))
    assert 'identifier "tangent" is undefined' in compile_for_cuda(
        nvrtc(), cuda_source({"lstm": CELLS["lstm"].graph.named()})
    )


def test_the_cells_together_use_every_operation() -> None:
    used = {
        node.op
        for cell in CELLS.values()
        for direction in DIRECTIONS
        for node in topological(outputs_of(cell.graph, direction).values())
    }
    assert set(OPS) <= used, "give tests/cells_for_tests.py a cell that uses it"
