"""A stage in several loops does what it does in one, and has those loops that are meant."""

import math
import re

import pytest

from cells_for_tests import CELLS
from whorl.engines.loops import loops
from whorl.engines.segments import segments

LOADS = {name: f"const real {name} = p_{name}[u];" for name in ("a", "b", "c", "s")}
LSTM = {
    "t0": "a + s", "t1": "sigmoid(t0)", "t2": "b + s", "t3": "sigmoid(t2)", "t4": "c * s", "t5": "std::tanh(t4)",
    "t6": "t1 * s", "t7": "t3 * t5", "t8": "t6 + t7", "t9": "std::tanh(t8)", "after_h": "t3 * t9", "after_c": "t8",
    "keep_0": "t1", "keep_1": "t9", "keep_2": "t3", "keep_3": "t5", "keep_4": "s",
}  # fmt: skip
KEPT = {"keep_0": "t1", "keep_1": "t2"}
SHARED = {"t0": "a + b", "t1": "sigmoid(t0)", "t2": "std::tanh(t0)", "after_h": "t1 * t2"} | KEPT
COSTLY = SHARED | {"t0": "a / b"}
OF_ROW = {"t8": "1 / 3", "t9": "a + t8"} | SHARED | {"t0": "t9 * t8"}
NOT_KEPT = {"t1": "sigmoid(a)", "t2": "std::tanh(b)", "after_h": "t1 * t2"}


def made(values: dict[str, str]) -> list[list[str]]:
    stores = {name: f"w_{name}[u] = {name};" for name in values if name.startswith(("after_", "keep_"))}
    return loops(LOADS, [f"const real {name} = {right};" for name, right in values.items()], stores)


def run(bodies: list[list[str]], units: int = 5) -> dict[str, list[float]]:
    """What the loops write, one after the other; what is written twice or read before it is written is an error."""
    memory = {f"p_{name}": [math.sin(u + 2.7 * place) for u in range(units)] for place, name in enumerate(LOADS)}
    for body in bodies:
        rows: dict[str, list[float]] = {}
        for u in range(units):
            known = {name: row[u] for name, row in memory.items()}
            functions = {"sigmoid": lambda x: 1 / (1 + math.exp(-x)), "tanh": math.tanh}
            for line in body:
                left, right = line.removeprefix("const real ").rstrip(";").split(" = ")
                known[left.removesuffix("[u]")] = eval(right.replace("[u]", "").replace("std::", ""), functions, known)
                if left.startswith("w_"):
                    rows.setdefault(left.removesuffix("[u]"), []).append(known[left.removesuffix("[u]")])
        assert rows.keys().isdisjoint(memory)
        memory |= rows
    return {name: row for name, row in memory.items() if name.startswith("w_")}


@pytest.mark.parametrize("values, count", [(LSTM, 3), (SHARED, 2), (COSTLY, 1), (OF_ROW, 2), (NOT_KEPT, 1)])
def test_several_loops_do_what_one_does(values: dict[str, str], count: int) -> None:
    bodies = made(values)
    assert len(bodies) == count
    stores = [f"w_{name}[u] = {name};" for name in values if name.startswith(("after_", "keep_"))]
    one = [*LOADS.values(), *(f"const real {name} = {right};" for name, right in values.items()), *stores]
    found = run(bodies)
    assert len(found) == len(stores)
    assert found == run([one])


def test_kinds_of_functions_have_loops() -> None:
    """The gates' sigmoids, the candidate's tanh, and all else with the tanh that waits for these."""
    found = [[name for line in body for name in re.findall(r"(\w+)\(", line)] for body in made(LSTM)]
    assert found == [["sigmoid", "sigmoid"], ["tanh"], ["tanh"]]
    first, second, last = ([line for line in body if "= p_" in line] for body in made(LSTM))
    assert first == [LOADS["a"], LOADS["b"], LOADS["s"]]
    assert second == [LOADS["c"], LOADS["s"]]
    assert last == [LOADS["s"]]


@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
def test_each_function_of_a_cell_is_computed_once(cell: object) -> None:
    """And each value is kept once, however many loops a step has."""
    made = segments(cell.graph, near=True)
    text = made.forward.text
    assert all(text.count(f"w_keep_{index}[u] =") == 1 for index in range(made.saved))
    called = re.findall(r"= ((?:std::)?(?:sigmoid|tanh)\(\w+\));", text)
    assert len(called) == len({*called})


def test_the_steps_of_lstm_and_gru_have_their_loops() -> None:
    for name, count in (("lstm", 3), ("gru", 2), ("rnn_tanh", 1)):
        assert segments(CELLS[name].graph, near=True).forward.text.count("for (int64_t u") == count
        assert segments(CELLS[name].graph).forward.text.count("for (int64_t u") == 1
