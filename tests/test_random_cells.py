"""Whole cells drawn at random: their traced gradient against torch's autograd, and layers of them against a loop.

A cell is drawn as a program of lines, each an operation on values of the lines before it.  The program runs on
expressions, where it is traced, and on tensors, where torch differentiates it.  Numbers are compared one by one in
float64, relative where they are above one, bound 1e-12.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from torch import Tensor

import whorl
from comparison import weighted
from expressions import CONDITIONS, LOGIC, VALUES, worst
from plain_loops import Drawn, Projection, case_of, gradients
from whorl.cells import graphs
from whorl.cells.cell import MOST_GATES, MOST_STATES
from whorl.cells.expr import COLLECTIVES, OPS, topological
from whorl.cells.graphs import Evaluator

BOUND = 1e-12
BATCH, UNITS = 3, 5
MORE = ("where", "mean of three", "product")


class Line(NamedTuple):
    op: str
    places: tuple[int, int, int]
    """Which of the values, conditions or gates it takes, counted around."""


class Program(NamedTuple):
    x_only: tuple[bool, ...]
    """One for each gate: it has no recurrent weights."""
    states: int
    vectors: int
    inputs: int
    lines: tuple[Line, ...]

    def cell(self) -> whorl.Cell:
        gates = [f"g{index}" for index in range(len(self.x_only))]
        alone = [gate for gate, no_weights in zip(gates, self.x_only, strict=True) if no_weights]
        vectors = {f"v{index}": 1.0 for index in range(self.vectors)}
        inputs = [f"e{index}" for index in range(self.inputs)]
        states = [f"s{index}" for index in range(self.states)]
        return whorl.cell(gates, states, vectors=vectors, inputs=inputs, x_only=alone)(self.step)

    def step(self, x: Any, r: Any, s: Any, v: Any = None) -> dict[str, Any]:
        gates = range(len(self.x_only))
        recurrent = [getattr(r, f"g{gate}") for gate in gates if not self.x_only[gate]]
        values = [getattr(s, f"s{index}") for index in range(self.states)] + recurrent
        values += [getattr(x, f"g{gate}") for gate in gates] + [getattr(x, f"e{index}") for index in range(self.inputs)]
        values += [getattr(v, f"v{index}") for index in range(self.vectors)]
        conditions = [values[0] < values[-1]]
        for op, places in self.lines:
            pool = conditions if op in LOGIC else values
            a, b, c = (pool[place % len(pool)] for place in places)
            if op in VALUES:
                values.append(VALUES[op](a, b))
            elif op in CONDITIONS or op in LOGIC:
                conditions.append((CONDITIONS | LOGIC)[op](a, b))
            elif op == "where":
                values.append(whorl.where(conditions[places[2] % len(conditions)], a, b))
            elif op == "mean of three":
                values.append(whorl.mean([a, b, c]))
            elif recurrent:
                values.append(recurrent[places[2] % len(recurrent)](a))
        return {f"s{index}": values[-1 - index] for index in range(self.states)}


place = st.integers(0, 99)
lines = st.builds(Line, st.sampled_from([*VALUES, *CONDITIONS, *LOGIC, *MORE]), st.tuples(place, place, place))
programs = st.builds(
    Program,
    x_only=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=MOST_GATES).map(tuple),
    states=st.integers(1, MOST_STATES),
    vectors=st.integers(0, 2),
    inputs=st.integers(0, 2),
    lines=st.lists(lines, min_size=1, max_size=20).map(tuple),
)


def names_of(program: Program, kind: str) -> list[str]:
    count = {"x": len(program.x_only), "s": program.states, "v": program.vectors, "e": program.inputs}[kind]
    return [f"{'g' if kind == 'x' else kind}{index}" for index in range(count)]


class Step:
    """A drawn cell on drawn tensors: once as torch runs and differentiates its lines, once as its graphs say."""

    def __init__(self, program: Program) -> None:
        self.cell = program.cell()
        torch.manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, requires_grad=True)

        shapes = {"x": (BATCH, UNITS), "s": (BATCH, UNITS), "v": (UNITS,), "e": (BATCH, UNITS)}
        self.leaves = {f"{k}.{name}": drawn(*shape) for k, shape in shapes.items() for name in names_of(program, k)}
        self.weights = {gate: drawn(UNITS, UNITS) for gate in self.cell.graph.recurrent}
        self.biases = {gate: drawn(UNITS) for gate in self.weights}

    def torchs(self) -> dict[str, Tensor]:
        """The states after the step, and the gradient of each leaf, weight and bias."""
        first = self.leaves["s.s0"]
        made = {gate: Projection.of(weight, self.biases[gate], first) for gate, weight in self.weights.items()}
        x, s, v, e = (
            {name[2:]: value for name, value in self.leaves.items() if name[0] == kind} for kind in ("x", "s", "v", "e")
        )
        arguments = [SimpleNamespace(**names) for names in (x | e, made, s, v)]
        after = self.cell(*arguments) if v else self.cell(*arguments[:3])
        outputs = [after[state].expand(BATCH, UNITS) for state in self.cell.states]
        leaves = dict(self.leaves)
        for kind, tensors in {"W": self.weights, "b": self.biases}.items():
            leaves |= {f"{kind}.{gate}": tensor for gate, tensor in tensors.items()}
        return gradients(outputs, leaves)

    @torch.no_grad()
    def traced(self) -> dict[str, Tensor]:
        """The same, from the cell's graph and the gradient that was derived from it."""
        graph, backward = self.cell.graph, self.cell.graph.backward
        first = self.leaves["s.s0"]
        known = {name: value.detach().expand(BATCH, UNITS) for name, value in self.leaves.items()}
        known |= {f"r.{gate}": self.collective("product", gate, first) for gate in self.weights}
        outputs = self.evaluate(graph.named(), known)
        with torch.enable_grad():  # the gradients that `gradients` gives the outputs
            ends = [output.detach().requires_grad_() for output in outputs.values()]
            grads = torch.autograd.grad(weighted(ends), ends)
        known |= {f"d.{state}": grad for state, grad in zip(graph.states, grads, strict=True)}
        wanted = backward.named() | {f"a.{i}": product.operand for i, product in enumerate(backward.products)}
        given = self.evaluate(wanted, known)

        found = {f"output {index}": end.detach() for index, end in enumerate(ends)}
        for name, leaf in self.leaves.items():
            found[f"grad of {name}"] = given[f"d{name}"] if leaf.dim() == 2 else given[f"d{name}"].sum(0)
        products = [(gate, given[f"dr.{gate}"], first) for gate in self.weights]
        for gate, grad, _ in products:
            found["grad of s.s0"] = found["grad of s.s0"] + grad @ self.weights[gate]
        products += [(made.gate, given[f"dp.{i}"], given[f"a.{i}"]) for i, made in enumerate(backward.products)]
        for gate in self.weights:
            own = [(grad, operand) for other, grad, operand in products if other == gate]
            found[f"grad of W.{gate}"] = torch.stack([grad.T @ operand for grad, operand in own]).sum(0)
            found[f"grad of b.{gate}"] = torch.stack([grad.sum(0) for grad, _ in own]).sum(0)
        return found

    def evaluate(self, outputs: Mapping[str, Any], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        evaluator = Evaluator(list(outputs.values()))
        found = evaluator(dict(values), evaluator.constants(self.leaves["s.s0"].detach()), self.collective)
        return {name: value.expand(BATCH, UNITS) for name, value in zip(outputs, found, strict=True)}

    def collective(self, kind: str, gate: str, operand: Tensor) -> Tensor:
        operand, weight = operand.expand(BATCH, UNITS), self.weights[gate]
        return operand @ weight if kind == "pull" else torch.nn.functional.linear(operand, weight) + self.biases[gate]


def apart(got: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """By how much each tensor is off that is off."""
    assert got.keys() == truth.keys()
    errors = {name: worst(got[name], truth[name]) for name in truth}
    return {name: error for name, error in errors.items() if not error <= BOUND}


def of_step(program: Program) -> dict[str, float]:
    step = Step(program)
    return apart(step.traced(), step.torchs())


def of_layer(program: Program) -> dict[str, float]:
    """Three steps, forward or in both directions, with lengths and resets."""
    made = Drawn(
        case_of(program.cell(), "reference"), time=3, batch=3, inputs=2, units=4, layers=1 + program.states % 2
    )
    reset = torch.tensor([[False, False, True], [True, False, False], [False, False, True]])
    options, leaves = dict(lengths=[3, 1, 2], reset=reset), made.leaves()
    return apart(gradients(made(**options), leaves), gradients(made.loop(**options), leaves))


@given(programs)
@settings(max_examples=400)
def test_the_gradient_of_any_cell_is_torchs(program: Program) -> None:
    assert of_step(program) == {}


@given(programs)
@settings(max_examples=100)
def test_a_layer_of_any_cell_is_its_lines_in_a_loop(program: Program) -> None:
    assert of_layer(program) == {}


def test_every_operation_can_be_drawn() -> None:
    conditions = tuple(Line(op, (0, 1, 0)) for op in [*CONDITIONS, *LOGIC])
    programs = [(Line(op, (1, 2, 0)),) for op in [*VALUES, *MORE]]
    programs += [(*conditions, Line("where", (0, 1, index))) for index in range(1 + len(conditions))]
    outputs = [node for lines in programs for node in Program((False,) * 2, 1, 0, 0, lines).cell().graph.outputs]
    assert {node.op for node in topological(outputs)} >= set(OPS) | COLLECTIVES - {"pull", "variance"}


# --- that these tests can fail ----------------------------------------------------------------------------------------

QUICK = settings(max_examples=400, phases=[Phase.generate], database=None)


@pytest.mark.parametrize("op", ["tanh", "div", "where", "maximum", "softplus", "clip"])
def test_a_wrong_derivative_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part in a billion of one derivative."""
    right = OPS[op].gradient

    def wrong(g: Any, *rest: Any) -> Sequence[Any]:
        return [None if part is None else part * (1 + 1e-9) for part in right(g, *rest)]

    monkeypatch.setitem(OPS, op, OPS[op]._replace(gradient=wrong))
    hypothesis.find(programs, lambda program: of_step(program) != {}, settings=QUICK)


@pytest.mark.parametrize("op", ["mean", "product"])
def test_a_wrong_derivative_of_a_collective_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = graphs._COLLECTIVE_GRADIENTS[op]
    wrong = {
        "mean": lambda g, y, *parts: [part * float(len(parts)) for part in right(g, y, *parts)],
        "product": lambda g, y, gate, a: (None, g),
    }
    monkeypatch.setitem(graphs._COLLECTIVE_GRADIENTS, op, wrong[op])
    hypothesis.find(programs, lambda program: of_step(program) != {}, settings=QUICK)


def test_a_wrong_loop_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.cells.graphs._mean", lambda *parts: whorl.mean(parts) * (1 + 1e-9))
    hypothesis.find(programs, lambda program: of_layer(program) != {}, settings=QUICK)
