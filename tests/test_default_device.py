"""Torch's default device is no matter: what whorl makes lies where the call's tensors do."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence

import whorl
from comparison import EXACT, error, flat
from test_stepper import needs_compiler

NAMES = "empty empty_strided empty_permuted zeros ones full eye arange linspace tensor as_tensor asarray scalar_tensor"
MAKERS = {*NAMES.split(), "rand", "randn", "randint", "randperm", "normal", "bernoulli"}


def unplaced(package: Path) -> Iterator[str]:
    """Each call of a maker of tensors that leaves the device to torch."""
    for path in sorted([*(package / "engines").rglob("*.py"), *package.glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or any(word.arg == "device" for word in node.keywords):
                continue
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in MAKERS and ast.unparse(called.value) == "torch":
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_each_tensor_that_is_made_is_given_its_device() -> None:
    """Of the CPU's a kernel gets the address; one of meta has none, and one of a GPU has that of other memory."""
    assert list(unplaced(Path(whorl.__file__).parent)) == []


def test_a_maker_without_a_device_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("torch.zeros(3, dtype=torch.int64)\ntorch.ones(3, device=x.device)\nx.zeros(3)\n")
    assert list(unplaced(tmp_path)) == ["one.py:1: torch.zeros(3, dtype=torch.int64)"]


def results(layer: torch.nn.Module, x: Any, **options: Any) -> list[torch.Tensor]:
    """Outputs, final states and the gradients of the weights."""
    y, hx = layer(x, **options)
    y = y.data if not isinstance(y, torch.Tensor) else y
    layer.zero_grad()
    (y.square().sum() + sum(state.sum() for state in flat(hx))).backward()
    return [y.detach(), *(state.detach() for state in flat(hx)), *(weight.grad for weight in layer.parameters())]


LAYERS = {
    "reference": lambda: whorl.GRU(4, 5, 2, engine="reference"),
    "onednn": lambda: whorl.LSTM(4, 5, engine="onednn"),
    "cpu": lambda: whorl.GRU(4, 5, 2, bidirectional=True, engine="cpu"),
    "vectors": lambda: whorl.Recurrent(whorl.cells.library.ind_rnn, 4, 5, engine="cpu"),
    "projection": lambda: whorl.LSTM(4, 5, proj_size=3, engine="cpu"),
    "noise": lambda: whorl.LSTM(4, 5, recurrent_dropout=0.3, input_dropout=0.2, zoneout=0.1, engine="cpu"),
}
X = torch.linspace(-1, 1, 7 * 3 * 4).view(7, 3, 4)
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (X, {}),
    "packed": (pack_padded_sequence(X, [3, 7, 2], enforce_sorted=False), {}),
    "lengths": (X, {"lengths": [3, 7, 0]}),
}


@needs_compiler
@pytest.mark.parametrize("kind", list(LAYERS))
def test_another_default_device_changes_nothing(kind: str) -> None:
    layer = LAYERS[kind]()
    for name, (x, options) in CALLS.items():
        if kind == "onednn" and name != "plain":
            continue
        made = []
        for device in ("meta", "cpu"):  # what is kept for later calls is made under the one that is not the tensors'
            torch.manual_seed(1)
            with torch.device(device):
                made.append(results(layer, x, **options))
        assert all(torch.equal(one, other) for one, other in zip(*made, strict=True)), name


@needs_compiler
@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_a_stepper_made_under_another_default_device(kind: str) -> None:
    layer, xs = whorl.LSTM(4, 5, engine=kind, dtype=torch.float64), X.double()
    with torch.device("meta"):
        stepper = layer.stepper(3)
        steps = [stepper(x) for x in xs]
        stepper.state = stepper.state
        after = stepper(xs[0], reset=torch.tensor([True] * 3, device="cpu"))
    assert error(torch.stack(steps), layer(xs)[0]) <= EXACT
    assert error(after, layer(xs[:1])[0][0]) <= EXACT
