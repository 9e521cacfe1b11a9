"""Cells: what a declaration refuses, what a trace gives, and that its meaning survives threads, processes and text."""

import copy
import functools
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cells_for_tests
import whorl
from cells_for_tests import CELLS, four_states, gru_before, layer_norm_lstm, odd_ends
from whorl import Cell, CellError
from whorl.cells import library
from whorl.cells.cell import Graph
from whorl.cells.expr import const, to_json, var


def step(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=torch.tanh(x.n + r.n))


def vector_step(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    return dict(h=torch.tanh(x.n + r.n) * v.gamma)


def cell_of(step: Callable, gates: Any = "n", states: Any = "h", **options: Any) -> Cell:
    return whorl.cell(gates, states, **options)(step)


# --- declarations and steps that are wrong ----------------------------------------------------------------------------

MANY = "a b c d e f g k l"
DECLARATIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: cell_of(step, gates="n-1"), "gates has the name 'n-1': names are letters, digits and _, a letter first"),
    (lambda: cell_of(step, gates="_n"), "gates has the name '_n'"),
    (lambda: cell_of(step, gates="ñ"), "gates has the name 'ñ'"),
    (lambda: cell_of(step, gates=["n\n"]), "gates has the name"),
    (lambda: cell_of(step, gates=[1]), "gates has the name 1"),
    (lambda: cell_of(step, states="h 2c"), "states has the name '2c'"),
    (lambda: cell_of(step, inputs="d.t"), "inputs has the name 'd.t'"),
    (lambda: cell_of(step, vectors={"a b": 1.0}), "vectors has the name 'a b'"),
    (lambda: cell_of(step, vectors={"gamma": torch.ones(3)}), "the vector gamma begins as tensor.*give one number"),
    (lambda: cell_of(step, vectors="gamma"), "vectors='gamma': write names and initial values, vectors={'gamma': 1.0}"),
    (lambda: cell_of(step, gates="n n"), "gates names one thing twice: n n"),
    (lambda: cell_of(step, states="h h"), "states names one thing twice: h h"),
    (lambda: cell_of(step, gates=MANY), "9 gates and 1 states: a cell has 1 to 8 gates and 1 to 4 states"),
    (lambda: cell_of(step, states="a b c d e"), "1 gates and 5 states"),
    (lambda: cell_of(step, gates=""), "0 gates"),
    (lambda: cell_of(step, states=[]), "0 states"),
    (lambda: cell_of(step, x_only="z"), "x_only names 'z', which is none of the gates n"),
    (lambda: cell_of(step, inputs="n"), "a gate and an extra input share a name"),
]
STEPS: list[tuple[Callable, dict[str, Any], str]] = [
    (lambda x, r, s: dict(h=x.q), {}, "x of <lambda> has no 'q': it has n"),
    (lambda x, r, s: dict(h=r.q), {}, "r of <lambda> has no 'q': it has n"),
    (lambda x, r, s: dict(h=s.c), {}, "s of <lambda> has no 'c': it has h"),
    (lambda x, r, s: dict(h=r.n), {"x_only": "n"}, "r of <lambda> has no 'n': it has nothing"),
    (lambda x, r, s: dict(h=r.d), {"inputs": "d"}, "r of <lambda> has no 'd'"),
    (lambda x, r, s, v: dict(h=v.beta), {"vectors": {"gamma": 1.0}}, "v of <lambda> has no 'beta': it has gamma"),
    (lambda x, r, s: dict(h=x["n"]), {}, r"x of <lambda> is read by names: write x.n, not x\['n'\]"),
    (lambda x, r, s: dict(h=s[0]), {}, r"write s.h, not s\[0\]"),
    (lambda x, r, s: dict(h=x.n(s.h)), {}, r"x.n is a value, .* are r.n\(a\)"),
    (lambda x, r, s: dict(h=r.n()), {}, r"r.n was given 0 values: write r.n\(a\)"),
    (lambda x, r, s: dict(c=x.n), {}, r"returned the states c: return dict\(h=...\)"),
    (lambda x, r, s: dict(h=x.n, c=x.n), {}, r"returned the states h, c: return dict\(h=...\)"),
    (lambda x, r, s: dict(h=x.n), {"states": "h c"}, r"returned the states h: return dict\(h=..., c=...\)"),
    (lambda x, r, s: {1: x.n}, {}, "returned the states 1"),
    (lambda x, r, s: x.n, {}, "returned Expr: return dict"),
    (lambda x, r, s: None, {}, "returned NoneType: return dict"),
    (lambda x, r, s: dict(h=None), {}, "of type NoneType"),
    (lambda x, r, s: dict(h=torch.zeros(3)), {}, "a tensor of shape"),
    (
        lambda x, r, s: dict(h=x.n > 0),
        {},
        r"gives the condition lt\(0.0, x.n\) as h: write whorl.where",
    ),
    (lambda x, r, s: dict(h=r.n(x.n > 0)), {}, "r.n takes values, but was given the condition"),
    (lambda x, r, s: dict(h=r.n(torch.ones(2))), {}, "a tensor of shape"),
    (lambda x, r, s: dict(h=s.h if s.h > 0 else x.n), {}, "cannot branch on"),
    (lambda x, r, s: dict(h=var("s.other")), {}, "reads s.other, which is none of r.n, s.h, x.n"),
    (lambda x, r, s, v: dict(h=x.n), {}, r"missing a required argument: 'v'.*takes x, r, s, and v only with vectors="),
    (vector_step, {}, "takes x, r, s, and v only with vectors="),
    (step, {"vectors": {"gamma": 1.0}}, "too many positional arguments.*takes x, r, s, v: it has vectors"),
]


@pytest.mark.parametrize("declare, message", DECLARATIONS, ids=range(len(DECLARATIONS)))
def test_a_wrong_declaration_is_an_error_that_teaches(declare: Callable[[], Any], message: str) -> None:
    with pytest.raises(CellError, match=message):
        declare()


@pytest.mark.parametrize("step, options, message", STEPS, ids=range(len(STEPS)))
def test_a_wrong_step_is_an_error_that_teaches(step: Callable, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CellError, match=message):
        cell_of(step, **options).graph  # noqa: B018


def test_the_largest_cell_is_taken() -> None:
    gates, states = MANY.split()[:8], "h c n m"
    graph = cell_of(lambda x, r, s: dict(h=x.k + r.k, c=s.c, n=s.n, m=s.m), gates=gates, states=states).graph
    assert (len(graph.gates), len(graph.states)) == (8, 4)


# --- what a trace gives -----------------------------------------------------------------------------------------------


def test_a_step_runs_on_tensors_as_it_is_traced() -> None:
    """A cell is its step too: `whorl.lstm`'s lines on tensors are torch's LSTMCell."""
    torch_cell = nn.LSTMCell(3, 5).double()
    x, h, c = torch.randn(2, 3).double(), torch.randn(2, 5).double(), torch.randn(2, 5).double()

    class Names:
        def __init__(self, names: tuple[str, ...], values: Any) -> None:
            self.__dict__.update(zip(names, values, strict=True))

    order = ("i", "f", "g", "o")
    projected = (x @ torch_cell.weight_ih.T + torch_cell.bias_ih).chunk(4, -1)
    recurrent = (h @ torch_cell.weight_hh.T + torch_cell.bias_hh).chunk(4, -1)
    after = library.lstm(Names(order, projected), Names(order, recurrent), Names(("h", "c"), (h, c)))
    for got, wanted in zip((after["h"], after["c"]), torch_cell(x, (h, c)), strict=True):
        assert (got - wanted).norm() <= 1e-12 * wanted.norm()


def test_what_is_closed_over_is_a_constant() -> None:
    slope = 0.25
    closed = cell_of(lambda x, r, s: dict(h=slope * x.n))
    assert closed.graph.outputs[0].digest == (const(0.25) * var("x.n")).digest


def test_a_call_of_r_is_a_product_and_of_the_first_state_is_r_itself() -> None:
    graph = cell_of(lambda x, r, s: dict(h=r.n(s.h) + r.n(0.5 * s.h), c=s.h), states="h c").graph
    assert graph.outputs[0].args[0].digest == var("r.n").digest
    assert [(p.op, p.args[0], p.args[1].digest) for p in graph.products] == [
        ("product", "n", (0.5 * var("s.h")).digest)
    ]


def test_gates_without_recurrent_part_leave_the_others_in_order() -> None:
    assert four_states.graph.recurrent == tuple("abcdefg")
    assert odd_ends.graph.recurrent == ("a",)
    for x_only in ("a c", "c a"):  # the order in which they are named means nothing
        graph = cell_of(lambda x, r, s: dict(h=x.a + x.b + r.b + x.c), gates="a b c", x_only=x_only).graph
        assert graph.recurrent == ("b",)
        assert graph.x_only == ("a", "c")


# --- its gradient -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_gradient_has_a_part_for_each_leaf_and_product(cell: Cell) -> None:
    graph, backward = cell.graph, cell.graph.backward
    parts = [tuple(part) for part in (backward.x, backward.r, backward.s, backward.v, backward.e)]
    assert parts == [graph.gates, graph.recurrent, graph.states, graph.vectors, graph.inputs]
    assert [product.gate for product in backward.products] == [node.args[0] for node in graph.products]
    assert [product.operand.digest for product in backward.products] == [node.args[1].digest for node in graph.products]
    assert len(backward.named()) == sum(map(len, parts)) + len(graph.products)


@pytest.mark.parametrize(
    "name, same, different",
    [("lstm", "i f g o", ""), ("gru", "r z", "n"), ("rnn_tanh", "n", ""), ("layer_norm_lstm", "", "i f g o")],
)
def test_gates_that_occur_only_as_a_sum_have_one_gradient(name: str, same: str, different: str) -> None:
    """Then kernels save and write it once."""
    backward = CELLS[name].graph.backward
    for gates, wanted in ((same.split(), True), (different.split(), False)):
        assert [backward.x[gate].digest == backward.r[gate].digest for gate in gates] == [wanted] * len(gates)


def test_a_gradient_by_hand() -> None:
    x, r, d = var("x.n"), var("r.n"), var("d.h")
    backward = library.rnn_relu.graph.backward
    assert backward.x["n"].digest == whorl.where(x + r <= 0.0, 0.0, d).digest
    assert backward.s["h"].digest == const(0.0).digest
    backward = gru_before.graph.backward
    (product,) = backward.products
    assert product.operand.digest == (whorl.sigmoid(var("x.r") + var("r.r")) * var("s.h")).digest
    assert product.gradient.digest == backward.x["n"].digest  # it occurs as x.n + r.n(...)
    assert backward.r["n"].digest == const(0.0).digest  # r.n itself does not occur


# --- its fingerprint --------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_maths_alone() -> None:
    @whorl.cell(gates=["i", "f", "g", "o"], states=("h", "c"))
    def another(inputs: Any, recurrent: Any, before: Any) -> dict[str, Any]:
        forget = torch.sigmoid(inputs.f + recurrent.f)
        kept = forget * before.c
        new = torch.sigmoid(inputs.i + recurrent.i) * whorl.tanh(inputs.g + recurrent.g)
        cell = kept + new
        out = nn.Sigmoid()(inputs.o + recurrent.o) * nn.Tanh()(cell)
        return {"c": cell, "h": out}

    assert another.graph.fingerprint == library.lstm.graph.fingerprint
    assert another.graph != library.lstm.graph  # a graph is named, as its kernel is
    assert replace(another.graph, name="lstm") == library.lstm.graph
    assert hash(another.graph) == hash(library.lstm.graph)


VARIANTS: dict[str, Cell] = {
    "as it is": cell_of(step),
    "another gate name": cell_of(lambda x, r, s: dict(h=torch.tanh(x.a + r.a)), gates="a"),
    "another state name": cell_of(lambda x, r, s: dict(c=torch.tanh(x.n + r.n)), states="c"),
    "another function": cell_of(lambda x, r, s: dict(h=torch.sin(x.n + r.n))),
    "the other order": cell_of(lambda x, r, s: dict(h=torch.tanh(r.n + x.n))),
    "a number": cell_of(lambda x, r, s: dict(h=torch.tanh(x.n + r.n) * 0.5)),
    "another number": cell_of(lambda x, r, s: dict(h=torch.tanh(x.n + r.n) * 0.5000000000000001)),
    "zero": cell_of(lambda x, r, s: dict(h=torch.tanh(x.n + r.n) * 0.0)),
    "negative zero": cell_of(lambda x, r, s: dict(h=torch.tanh(x.n + r.n) * -0.0)),
    "a gate more": cell_of(step, gates="n z"),
    "a gate before": cell_of(step, gates="z n"),
    "a gate without recurrent part": cell_of(step, gates="n z", x_only="z"),
    "a vector": cell_of(lambda x, r, s, v: step(x, r, s), vectors={"gamma": 1.0}),
    "an input": cell_of(step, inputs="d"),
    "a state more": cell_of(lambda x, r, s: dict(h=torch.tanh(x.n + r.n), c=s.c), states="h c"),
    "states exchanged": cell_of(lambda x, r, s: dict(h=torch.tanh(x.n + r.n), c=s.c), states="c h"),
    **{cell.name: cell for cell in CELLS.values() if cell is not library.rnn_tanh},
}


def test_fingerprints_differ_where_the_maths_does() -> None:
    assert VARIANTS["as it is"].graph.fingerprint == library.rnn_tanh.graph.fingerprint
    assert len({cell.graph.fingerprint for cell in VARIANTS.values()}) == len(VARIANTS)


def test_the_initial_value_of_a_vector_is_no_part_of_the_fingerprint() -> None:
    first, second = (cell_of(vector_step, vectors={"gamma": value}) for value in (1.0, 0.5))
    assert first.graph == second.graph


def test_fingerprints_are_the_same_in_every_process() -> None:
    code = "import json, cells_for_tests as c; print(json.dumps({n: x.graph.fingerprint for n, x in c.CELLS.items()}))"
    path = [str(Path(cells_for_tests.__file__).parent), str(Path(whorl.__file__).parents[1])]
    start = f"import sys; sys.path[:0] = {path!r}; {code}"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: cell.graph.fingerprint for name, cell in CELLS.items()}


def test_cells_trace_in_many_threads_at_once() -> None:
    """The same cell and others, each traced for the first time, with its gradient."""
    fresh = [replace(cell) for cell in CELLS.values()]
    shared = replace(layer_norm_lstm)
    wanted = {cell.name: (cell.graph.fingerprint, digests(cell.graph)) for cell in CELLS.values()}

    def trace(turn: int) -> list[tuple[str, tuple[str, list[str]]]]:
        own = [replace(cell) for cell in CELLS.values()]
        work = [shared, *own[turn % len(own) :], *fresh, *own[: turn % len(own)]]
        return [(cell.name, (cell.graph.fingerprint, digests(cell.graph))) for cell in work]

    with ThreadPoolExecutor(8) as pool:
        found = [row for rows in pool.map(trace, range(16)) for row in rows]
    assert len(found) == 16 * (1 + 2 * len(CELLS))
    assert all(row == wanted[name] for name, row in found)


def digests(graph: Graph) -> list[str]:
    return [node.digest for node in graph.backward.named().values()]


# --- copies, pickles and text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_cell_of_a_module_is_pickled_by_its_name(cell: Cell) -> None:
    assert pickle.loads(pickle.dumps(cell)) is cell
    assert copy.deepcopy(cell) is cell is copy.copy(cell)
    assert copy.deepcopy([cell, cell])[0] is cell


def test_a_cell_of_a_function_of_a_module_is_pickled_by_its_parts() -> None:
    cell = cell_of(vector_step, vectors={"gamma": 0.5}, inputs="d")
    again = pickle.loads(pickle.dumps(cell))
    assert again.step is vector_step
    assert (again.graph, again.vectors, again.inputs) == (cell.graph, {"gamma": 0.5}, ("d",))


@pytest.mark.parametrize("kind", ["lambda", "local", "partial"])
def test_a_step_that_cannot_be_found_again_says_what_to_do(kind: str) -> None:
    def local(x: Any, r: Any, s: Any) -> dict[str, Any]:
        return dict(h=x.n)

    steps = {"lambda": lambda x, r, s: dict(h=x.n), "local": local, "partial": functools.partial(local)}
    cell = cell_of(steps[kind])
    with pytest.raises(CellError, match="cannot be pickled.*a function at the top of a module, not as a lambda"):
        pickle.dumps(cell)
    assert copy.deepcopy(cell) is cell
    assert pickle.loads(pickle.dumps(cell.graph)) == cell.graph  # the graph needs no step


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_a_graph_comes_back_from_text_and_pickle(cell: Cell) -> None:
    graph = cell.graph
    for again in (Graph.from_json(graph.to_json()), pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph)):
        assert (again, again.name, again.recurrent) == (graph, graph.name, graph.recurrent)
        assert digests(again) == digests(graph)
        assert again.to_json() == graph.to_json()


CHANGES: dict[str, Callable[[dict], Any]] = {
    "a list": lambda data: [data],
    "nothing": lambda data: {},
    "no graph": lambda data: {key: value for key, value in data.items() if key != "graph"},
    "no gates": lambda data: data | {"gates": []},
    "gates of numbers": lambda data: data | {"gates": [1]},
    "a gate of code": lambda data: data | {"gates": ["n; abort()"]},
    "a vector of code": lambda data: data | {"vectors": ["v; abort()"]},
    "an input of code": lambda data: data | {"inputs": ["d\n"]},
    "a gate twice": lambda data: data | {"gates": ["n", "n"]},
    "too many gates": lambda data: data | {"gates": [*"nabcdefgk"]},
    "x_only of no gate": lambda data: data | {"x_only": ["z"]},
    "gates of nothing": lambda data: data | {"gates": None},
    "a state more": lambda data: data | {"states": ["h", "c"]},
    "too many states": lambda data: data | {"states": [*"hcdef"]},
    "a leaf that is not declared": lambda data: data | {"gates": ["z"]},
    "a recurrent gate without": lambda data: data | {"x_only": ["n"]},
    "a pull": lambda data: data | {"graph": json.dumps({"nodes": [["var", "s.h"], ["pull", "n", 0]], "outputs": [1]})},
    "a product of no gate": lambda data: data | {"graph": to_json([gru_before.graph.products[0]])},
    "a condition": lambda data: data | {"graph": to_json([var("s.h") > 0.0])},
    "no output": lambda data: data | {"graph": to_json([])},
    "a graph of no text": lambda data: data | {"graph": {"nodes": [], "outputs": []}},
    "a graph of code": lambda data: data | {"graph": "__import__('os').abort()"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_text_that_is_no_cell_is_refused(change: Callable[[dict], Any]) -> None:
    data = json.loads(library.rnn_tanh.graph.to_json())
    with pytest.raises(CellError, match="this is no cell as whorl writes it"):
        Graph.from_json(json.dumps(change(data)))
    assert Graph.from_json(json.dumps(data)) == library.rnn_tanh.graph


@pytest.mark.parametrize("text", ["", "{", "null", "[" * 100_000])
def test_text_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(CellError, match="this is no cell"):
        Graph.from_json(text)
