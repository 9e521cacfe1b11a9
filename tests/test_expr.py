"""Expressions: each operation's value, derivative and C against torch, at the kinks too; graphs drawn at random.

Numbers are compared one by one in float64, relative where they are above one, bound 1e-12; infinities and NaNs agree.
"""

import copy
import json
import math
import operator
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

import whorl
from expressions import CONDITIONS, LOGIC, VALUES, Library, evaluate, needs_compiler, worst
from whorl import CellError
from whorl.cells import expr
from whorl.cells.expr import OPS, Expr, const, from_json, lift, mean, to_json, topological, var
from whorl.cells.graphs import fingerprint, gradient

A, B, C = var("x.a"), var("x.b"), var("x.c")
INF, NAN = math.inf, math.nan

# --- one operation at a time ------------------------------------------------------------------------------------------

ORDINARY = [0.3, -1.7, 2.4, -0.6, 1.1]
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, 25.0, -25.0, 800.0, -800.0, INF, -INF, NAN]
UNARY = [(x,) for x in ORDINARY + EDGES]
PAIRS = [(x, y) for x in [*ORDINARY, *EDGES] for y in [-1.7, 0.0, 1.0, 2.0, INF, -INF, NAN]]

# For each operation: what it is on expressions, what torch computes on tensors, and arguments.
CASES: dict[str, tuple[Callable[..., Expr], Callable[..., Tensor], list[tuple]]] = {
    "add": (operator.add, torch.add, PAIRS),
    "sub": (operator.sub, torch.sub, PAIRS),
    "mul": (operator.mul, torch.mul, PAIRS),
    "div": (operator.truediv, torch.div, PAIRS),
    "neg": (operator.neg, torch.neg, UNARY),
    "minimum": (whorl.minimum, torch.minimum, PAIRS),
    "maximum": (whorl.maximum, torch.maximum, PAIRS),
    "abs": (abs, torch.abs, UNARY),
    **{f"pow {k}": (lambda x, k=k: x**k, lambda x, k=k: x**k, UNARY) for k in (3, -1, -2, 1.7)},
    **{
        f"clip {low} {high}": (
            lambda x, low=low, high=high: whorl.clip(x, low, high),
            lambda x, low=low, high=high: torch.clamp(x, low, high),
            UNARY,
        )
        for low, high in ((-1.0, 0.5), (0.0, INF), (-INF, 1.0), (0.5, 0.5))
    },
    **{
        f"where {name}": (
            lambda x, y, compare=compare: whorl.where(compare(x, y), x * y, y),
            lambda x, y, compare=compare: torch.where(compare(x, y), x * y, y),
            PAIRS,
        )
        for name, compare in {
            **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
            "and": lambda x, y: (x < y) & (y > 0.5),
            "or": lambda x, y: (x < y) | (y > 0.5),
            "not": lambda x, y: ~(x < y),
        }.items()
    },
    **{
        name: (getattr(expr, name), function, UNARY)
        for name, function in {
            "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "expm1": torch.expm1, "log": torch.log,
            "log1p": torch.log1p, "erf": torch.erf, "sin": torch.sin, "cos": torch.cos, "sigmoid": torch.sigmoid,
            "tanh": torch.tanh, "relu": F.relu, "softplus": F.softplus,
        }.items()
    },
}  # fmt: skip


def points(case: str) -> dict[str, Tensor]:
    names, columns = ("x.a", "x.b"), torch.tensor(CASES[case][2], dtype=torch.float64).T
    return dict(zip(names, columns, strict=len(columns) == 2))


def outputs_of(case: str) -> dict[str, Expr]:
    """The value of a case, and its derivative with respect to each argument."""
    build, _, arguments = CASES[case]
    leaves = [A, B][: len(arguments[0])]
    y = build(*leaves)
    grads = gradient([(y, const(1.0))], leaves)
    return {"y.0": y} | {f"d.{index}": lift(0.0 if grad is None else grad) for index, grad in enumerate(grads)}


def test_the_cases_use_every_operation() -> None:
    assert {node.op for case in CASES for node in topological([outputs_of(case)["y.0"]])} >= set(OPS)


@pytest.mark.parametrize("case", CASES)
def test_value_and_derivative_of_an_operation_are_torchs(case: str) -> None:
    values = points(case)
    inputs = [value.clone().requires_grad_() for value in values.values()]
    wanted = CASES[case][1](*inputs)
    grads = torch.autograd.grad(wanted.sum(), inputs)
    for got, right in zip(evaluate(list(outputs_of(case).values()), values), [wanted.detach(), *grads], strict=True):
        assert worst(got, right) <= 1e-12


@cache
def host(dtype: torch.dtype) -> Library:
    return Library({case.translate(NAMES): outputs_of(case) for case in CASES}, dtype)


NAMES = str.maketrans({" ": "_", ".": "p", "-": "m"})


def run_on_host(case: str, dtype: torch.dtype) -> list[Tensor]:
    leaves = {name.replace(".", "_"): value[None] for name, value in points(case).items()}
    found = host(dtype)(case.translate(NAMES), leaves)
    return [found[name.replace(".", "_")][0] for name in outputs_of(case)]


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_the_c_of_an_operation_in_double_is_its_value(case: str) -> None:
    wanted = evaluate(list(outputs_of(case).values()), points(case))
    for got, right in zip(run_on_host(case, torch.float64), wanted, strict=True):
        assert worst(got, right) <= 1e-12


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_the_c_of_an_operation_in_float_keeps_the_error_rule(case: str) -> None:
    values = {name: value.float() for name, value in points(case).items()}
    outputs = list(outputs_of(case).values())
    wanted = evaluate(outputs, {name: value.double() for name, value in values.items()})
    baseline = evaluate(outputs, values)
    for got, right, plain in zip(run_on_host(case, torch.float32), wanted, baseline, strict=True):
        assert worst(got.double(), right) <= 2 * worst(plain.double(), right) + 4 * torch.finfo(torch.float32).eps


WRONG_KINKS = {
    "minimum": lambda g, y, a, b: (whorl.where(a < b, g, 0.0), whorl.where(a < b, 0.0, g)),
    "relu": lambda g, y, x: (whorl.where(0.0 <= x, g, 0.0),),
    "clip 0.5 0.5": lambda g, y, x, low, high: (whorl.where((low < x) & (x < high), g, 0.0), None, None),
    "abs": lambda g, y, x: (whorl.where(x < 0.0, -g, g),),
}


@pytest.mark.parametrize("case", WRONG_KINKS)
def test_a_wrong_kink_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail, on a derivative that differs from torch's only at a kink."""
    monkeypatch.setitem(OPS, case.split()[0], OPS[case.split()[0]]._replace(gradient=WRONG_KINKS[case]))
    with pytest.raises(AssertionError):
        test_value_and_derivative_of_an_operation_are_torchs(case)


# --- graphs drawn at random -------------------------------------------------------------------------------------------

place = st.integers(0, 99)
line = st.tuples(st.sampled_from([*VALUES, *CONDITIONS, *LOGIC, "where"]), place, place, place)
programs = st.lists(line, min_size=1, max_size=14)


def grow(program: list[tuple[str, int, int, int]]) -> Expr:
    """The last value of a program: each line takes what lines before it gave."""
    values, conditions = [A, B, C, const(0.7)], [A < B]
    for op, *places in program:
        pick = conditions if op in LOGIC else values
        a, b = (pick[index % len(pick)] for index in places[:2])
        if op in VALUES:
            values.append(VALUES[op](a, b))
        elif op == "where":
            values.append(whorl.where(conditions[places[2] % len(conditions)], a, b))
        else:
            conditions.append((CONDITIONS | LOGIC)[op](a, b))
    return values[-1]


def drawn(ties: bool) -> dict[str, Tensor]:
    a, b, c = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    if ties:
        b[0], c[1], a[2] = a[0], 0.0, c[2]
    return {"x.a": a, "x.b": b, "x.c": c}


def gradients_of(y: Expr) -> list[Expr]:
    return [const(0.0) if grad is None else grad for grad in gradient([(y, var("d.y"))], [A, B, C])]


@given(programs)
@settings(max_examples=150)
def test_the_gradient_of_any_graph_is_torchs(program: list) -> None:
    y, values = grow(program), drawn(ties=True)
    weight = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    inputs = {name: value.clone().requires_grad_() for name, value in values.items()}
    total = (evaluate([y], inputs)[0] * weight).sum() + sum(0.0 * value.sum() for value in inputs.values())
    wanted = torch.autograd.grad(total, list(inputs.values()), allow_unused=True, materialize_grads=True)
    for got, right in zip(evaluate(gradients_of(y), values | {"d.y": weight}), wanted, strict=True):
        assert worst(got, right) <= 1e-12


@given(st.lists(programs, min_size=1, max_size=3))
@settings(max_examples=50)
def test_any_graph_comes_back_from_json_and_pickle(several: list) -> None:
    outputs = [grow(program) for program in several]
    outputs += gradients_of(outputs[0])
    again = from_json(to_json(outputs))
    assert [node.digest for node in again] == [node.digest for node in outputs]
    assert fingerprint(again) == fingerprint(outputs)
    assert pickle.loads(pickle.dumps(outputs[0])).digest == copy.deepcopy(outputs[0]).digest == outputs[0].digest


@needs_compiler
@given(st.lists(programs, min_size=15, max_size=15))
@settings(max_examples=3)
def test_the_c_of_any_graph_is_its_value(several: list) -> None:
    graphs = {}
    for index, program in enumerate(several):
        y = grow(program)
        graphs[f"graph{index}"] = dict(zip(("y.0", "d.a", "d.b", "d.c"), [y, *gradients_of(y)], strict=True))
    values = drawn(ties=False) | {"d.y": torch.ones(4, 6, dtype=torch.float64)}
    compiled = Library(graphs, torch.float64)
    leaves = {name.replace(".", "_"): value for name, value in values.items()}
    for name, outputs in graphs.items():
        found = compiled(name, leaves)
        for output, wanted in zip(outputs, evaluate(list(outputs.values()), values), strict=True):
            assert worst(found[output.replace(".", "_")], wanted) <= 1e-12


# --- graphs that are large --------------------------------------------------------------------------------------------


def test_a_graph_that_shares_is_not_written_out() -> None:
    """2**200 paths: order, text, gradient and printing must each go through it once."""
    node = A
    for _ in range(200):
        node = whorl.sin(node + node)
    assert len(topological([node])) == 401
    assert len(repr(node)) < 2000
    assert from_json(to_json([node]))[0].digest == node.digest
    (grad,) = gradient([(node, const(1.0))], [A])
    assert len(topological([grad])) < 2000


def test_a_deep_graph_is_no_recursion() -> None:
    node = A
    for _ in range(5000):
        node = B - node
    assert pickle.loads(pickle.dumps(node)).digest == node.digest == copy.deepcopy(node).digest
    outputs = [node, *gradient([(node, var("d.y"))], [A, B])]
    values = {"x.a": torch.tensor([3.0]), "x.b": torch.tensor([2.0]), "d.y": torch.tensor([5.0])}
    assert [float(value) for value in evaluate(outputs, values)] == [3.0, 5.0, 0.0]


# --- text from elsewhere ----------------------------------------------------------------------------------------------


def text_of(nodes: Any, outputs: Any = (0,)) -> str:
    return json.dumps({"nodes": nodes, "outputs": list(outputs)})


LEAF = ["var", "x.a"]
HOSTILE = {
    "no json": "{",
    "empty": "",
    "a list": "[]",
    "null": "null",
    "deep": "[" * 100_000,
    "no outputs": json.dumps({"nodes": [LEAF]}),
    "outputs of text": json.dumps({"nodes": [LEAF], "outputs": "0"}),
    "output beyond": text_of([LEAF], [1]),
    "negative output": text_of([LEAF], [-1]),
    "bool output": text_of([LEAF, LEAF], [True]),
    "unknown operation": text_of([LEAF, ["system", 0]], [1]),
    "dunder": text_of([LEAF, ["__reduce__", 0]], [1]),
    "operation of a list": text_of([[["add"], 0, 0]]),
    "node of text": text_of(["var"]),
    "node of nothing": text_of([[]]),
    "forward index": text_of([["neg", 1], LEAF]),
    "its own index": text_of([["neg", 0]]),
    "negative index": text_of([LEAF, ["neg", -1]], [1]),
    "float index": text_of([LEAF, ["neg", 0.0]], [1]),
    "bool index": text_of([LEAF, LEAF, ["neg", True]], [2]),
    "huge index": text_of([LEAF, ["neg", 10**30]], [1]),
    "text index": text_of([LEAF, ["neg", "0"]], [1]),
    "too few": text_of([LEAF, ["add", 0]], [1]),
    "too many": text_of([LEAF, ["neg", 0, 0]], [1]),
    "mean of nothing": text_of([["mean"]]),
    "condition as a value": text_of([LEAF, ["lt", 0, 0], ["neg", 1]], [2]),
    "value as a condition": text_of([LEAF, ["not", 0]], [1]),
    "power of a value": text_of([LEAF, ["pow", 0, 0]], [1]),
    "clip between values": text_of([LEAF, ["clip", 0, 0, 0]], [1]),
    "number of code": text_of([["const", "__import__('os').abort()"]]),
    "number as a number": text_of([["const", 1.0]]),
    "number too large": text_of([["const", "0x1p99999"]]),
    "two numbers": text_of([["const", "0x1p0", "0x1p0"]]),
    "name of code": text_of([["var", "x_a; abort(); real y"]]),
    "name with a newline": text_of([["var", "x.a\n"]]),
    "name of letters that C has not": text_of([["var", "x.ä"]]),
    "no name": text_of([["var"]]),
    "name of a number": text_of([["var", 1]]),
    "gate of code": text_of([LEAF, ["product", "n); abort(", 0]], [1]),
    "product of no gate": text_of([LEAF, ["product", 0]], [1]),
    "product of a condition": text_of([LEAF, ["lt", 0, 0], ["product", "n", 1]], [2]),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_text_that_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(CellError, match="this is no graph of a cell as whorl writes it"):
        from_json(text)


def test_numbers_come_back_from_text_to_the_bit() -> None:
    outputs = [const(value) for value in (0.0, -0.0, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, INF, -INF, NAN)]
    assert [str(node) for node in from_json(to_json(outputs))] == [str(node) for node in outputs]


def test_text_of_a_graph_is_read() -> None:
    """That what `HOSTILE` is a change of is right."""
    nodes = [LEAF, ["const", "0x1p-1"], ["lt", 0, 1], ["product", "n", 0], ["mean", 0, 3], ["where", 2, 4, 1]]
    wanted = whorl.where(A < 0.5, mean([A, expr.product("n", A)]), 0.5)
    assert from_json(text_of(nodes, [5]))[0].digest == wanted.digest
