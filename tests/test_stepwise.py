"""Engine `stepwise` against `reference` in float64: its kernels compiled for the host here, and run on a GPU."""

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import host_gpu
import whorl
from comparison import error, flat, weighted
from engine_cases import CELLS, FORMS, WRAPPED, Case, assert_agrees
from thinned import thinned
from whorl import compiler
from whorl.cells.cell import Graph
from whorl.engines.cuda import steps, stepwise_source
from whorl.engines.cuda.compile import cubin, missing
from whorl.problem import switches

ON_THE_HOST = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
PLACES = [pytest.param("cpu", marks=ON_THE_HOST), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The device; on the host the kernels are compiled for it."""
    if request.param == "cpu":
        host_gpu.use(monkeypatch, folder)
    return request.param


def check(place: str, graph: Graph, case: Case, dtype: torch.dtype = torch.float64) -> None:
    assert_agrees("stepwise", graph, case, dtype, place)


class Depths(TorchDispatchMode):
    """Notes how many numbers each product adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.found.append(args[-1].shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, depths", [(torch.float32, [512, 512, 512, 512, 512, 440]), (torch.bfloat16, [3000])])
def test_sums_over_rows_in_float32_are_cut(dtype: torch.dtype, depths: list[int]) -> None:
    """What cuBLAS adds up one after another loses with its length: tests/test_random_shapes.py, 31 and 111."""
    a, b = torch.randn(3000, 5).to(dtype), torch.randn(3000, 7).to(dtype)
    with Depths() as depth:
        made = steps.sum_of_rows(a, b)
    assert depth.found == depths
    assert error(made, a.double().t() @ b.double()) < 10 * torch.finfo(dtype).eps
    assert torch.equal(steps.sum_of_rows(a[:0], b[:0]), torch.zeros(5, 7, dtype=dtype))


def test_sums_of_a_large_result_are_cut_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum reads and writes all of it."""
    monkeypatch.setattr(steps, "_LARGE", 35)
    with Depths() as depth:
        steps.sum_of_rows(torch.randn(3000, 5), torch.randn(3000, 7))
        steps.sum_of_rows(torch.randn(3000, 5), torch.randn(3000, 6))
    assert depth.found == [2048, 952, 512, 512, 512, 512, 512, 440]


@pytest.fixture
def matmul_precision() -> Any:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_a_graph_of_other_products_is_another(monkeypatch: pytest.MonkeyPatch, matmul_precision: None) -> None:
    """The switch of torch's products of float32 is captured with them."""
    found = OrderedDict()
    monkeypatch.setattr(steps, "_workspaces", found)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(steps._Workspace, "run", lambda self, *given, **kinds: None)
    for dtype, counts in ((torch.float32, (1, 2, 2)), (torch.bfloat16, (3, 3, 3))):
        made = stepwise_source.source(CELLS["lstm"], dtype)
        own = steps.Kernels(made, CELLS["lstm"], dtype, torch.device("cpu"), lambda part, size: None)
        weight = torch.zeros(32, 8, dtype=dtype)
        for precision, count in zip(("highest", "high", "highest"), counts, strict=True):
            torch.set_float32_matmul_precision(precision)
            assert switches("cuda", dtype)[2] is (dtype == torch.float32 and precision == "high")
            steps.sweep(own, "forward", steps.Sizes(3, 8, 8, False, False), 4, {}, weight, None)
            assert len(found) == count


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("cell, form", thinned(2, CELLS, FORMS))
def test_equals_the_reference(place: str, cell: str, form: str) -> None:
    check(place, CELLS[cell], FORMS[form])


@pytest.mark.gpu
@pytest.mark.parametrize("cell, form", sorted({*thinned(1, CELLS, FORMS)} - {*thinned(2, CELLS, FORMS)}))
def test_equals_the_reference_on_a_gpu_in_every_form(cell: str, form: str) -> None:
    check("cuda", CELLS[cell], FORMS[form])


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("marks", [(), ("evaluated",), ("mask", "lengths", "reset_to")], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_zoneout(place: str, cell: str, marks: tuple[str, ...]) -> None:
    shares = tuple(0.2 + 0.1 * index for index in range(len(CELLS[cell].states)))
    check(place, CELLS[cell], Case({"zoneout": shares, "directions": 2}, marks=marks, sequences=True))


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("projection", [1, 5, 20])
def test_projection(place: str, projection: int, case: Case) -> None:
    check(place, CELLS["lstm"], replace(case, form=case.form | {"projection": projection}))


@pytest.mark.parametrize("place", PLACES, indirect=True)
@pytest.mark.parametrize("name", ["layers", "mask and lengths", "given, by gate", "a panel and one"])
@pytest.mark.parametrize("cell", WRAPPED)
def test_options_of_cells(place: str, cell: str, name: str) -> None:
    check(place, WRAPPED[cell], FORMS[name])


RULED = ["two layers", "reset", "mask and lengths", "recurrent dropout by gate", "a panel and one"]


@pytest.mark.parametrize("place", PLACES[:1], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("cell", ["lstm", "gru_before", "slstm"])
def test_follows_the_error_rule_on_the_host(place: str, cell: str, name: str, dtype: torch.dtype) -> None:
    check(place, CELLS[cell], FORMS[name], dtype)


@pytest.mark.parametrize("place", PLACES[1:], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULED)
@pytest.mark.parametrize("cell", CELLS)
def test_follows_the_error_rule(place: str, cell: str, name: str, dtype: torch.dtype) -> None:
    check(place, CELLS[cell], FORMS[name], dtype)


ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_every_gpu_without_one(architecture: str) -> None:
    made = stepwise_source.source(CELLS["lstm"], torch.bfloat16)
    assert made.names["forward_0"].encode() in cubin(made.text, "lstm", architecture, steps.OPTIONS)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("cell", ["layer norm and a product", "every option of LSTM"])
def test_means_and_products_compile(cell: str, dtype: torch.dtype) -> None:
    cubin(stepwise_source.source(WRAPPED[cell], dtype).text, "cell", "sm_75", steps.OPTIONS)


# --- graphs, streams, threads -----------------------------------------------------------------------------------------


def results(layer: torch.nn.Module, x: torch.Tensor, **options: object) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    outputs = flat(layer(x, **options))
    grads = torch.autograd.grad(weighted(outputs), [x, *layer.parameters()])
    return [tensor.detach().clone() for tensor in (*outputs, *grads)]


def made(**options: object) -> torch.nn.Module:
    torch.manual_seed(1)
    return whorl.LSTM(40, 70, num_layers=2, bidirectional=True, device="cuda", engine="stepwise", **options)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_give_what_launches_give(dtype: torch.dtype) -> None:
    """The first call of a size launches each step, later ones replay graphs, of every length."""
    layer = made(dtype=dtype)
    for time in (21, 8, 37):
        x = torch.randn(time, 6, 40, device="cuda", dtype=dtype)
        lengths = torch.randint(0, time + 1, (6,), device="cuda")
        steps._workspaces.clear()
        first = results(layer, x, lengths=lengths)
        again = [results(layer, x, lengths=lengths) for _ in range(3)]
        assert all(same(first, other) for other in again)
        assert any(workspace._graphs for workspace in steps._workspaces.values())


@pytest.mark.gpu
def test_two_streams_and_two_threads() -> None:
    layer = made()
    xs = [torch.randn(24, 5, 40, device="cuda") for _ in range(4)]
    wanted = [results(layer, x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    found: dict[int, list[list[torch.Tensor]]] = {}

    def work(index: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            found[index] = [results(layer, xs[index]) for _ in range(5)]
            stream.synchronize()

    torch.cuda.synchronize()
    for shared in (False, True):  # a stream for each thread, then one for all
        threads = [
            threading.Thread(target=work, args=(index, streams[0 if shared else index])) for index in range(len(xs))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(same(wanted[index], one) for index in found for one in found[index])


@pytest.mark.gpu
def test_a_call_is_captured_and_replayed_with_new_numbers() -> None:
    layer, x = made(), torch.randn(12, 5, 40, device="cuda", requires_grad=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            results(layer, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = flat(layer(x))
        grads = torch.autograd.grad(outputs, [x, *layer.parameters()], [out.detach().cos() for out in outputs])
    for _ in range(5):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            for weight in layer.parameters():
                weight.add_(0.01 * torch.randn_like(weight))
        results(layer, torch.randn_like(x))  # poisons what calls outside of the graph use
        graph.replay()
        got = [tensor.clone() for tensor in (*outputs, *grads)]
        plain = flat(layer(x))
        wanted = torch.autograd.grad(plain, [x, *layer.parameters()], [out.detach().cos() for out in plain])
        assert same(got, [*plain, *wanted])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_units(kind: str, dtype: torch.dtype) -> None:
    graph = CELLS[{"LSTM": "lstm", "GRU": "gru"}[kind]]
    check("cuda", graph, Case(time=9, batch=3, inputs=70, units=2816), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_large_products_of_true_float32_are_made_in_parts(kind: str) -> None:
    graph = CELLS[{"LSTM": "lstm", "GRU": "gru"}[kind]]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        check("cuda", graph, Case(time=40, batch=64, inputs=1536, units=2048), torch.float32)
