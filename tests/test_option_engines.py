"""Which engine runs an option and why others do not: each is named where it is active, and costs nothing where not."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import whorl
from comparison import flat, weighted
from whorl import UnsupportedError
from whorl.plan import decide
from whorl.problem import Device

BOTH = {"num_layers": 2, "bidirectional": True}
X = torch.randn(4, 3, 2)
FLAGS = torch.ones(4, 3, dtype=torch.bool)
A100 = Device("cuda", "NVIDIA A100", (8, 0), 91900, half=True, bfloat16=True)
TITLES = {"cudnn": "cuDNN", "onednn": "oneDNN"}
AFTER = {"cudnn": "stepwise", "onednn": "reference"}
"""What runs in the place of these, where there is no C++ compiler."""
ADDITIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recurrent dropout": ({"recurrent_dropout": 0.3}, {}),
    "input dropout": ({"input_dropout": 0.3}, {}),
    "zoneout": ({"zoneout": 0.3}, {}),
    "lengths": ({}, {"lengths": [1, 2, 4]}),
    "a mask": ({}, {"mask": FLAGS}),
    "resets, states that resets give": ({}, {"reset": FLAGS, "reset_to": (torch.ones(1, 3, 5), torch.ones(1, 3, 5))}),
    "given masks of dropout or zoneout": ({}, {"dropout_masks": {"zoneout_h": torch.ones(4, 3, 5)}}),
    "the states of every step": ({}, {"return_states": True}),
}
CELLS: dict[str, dict[str, Any]] = {
    "layer_norm_lstm": {"layer_norm": "x"}, "peephole_lstm": {"peephole": True}, "coupled_lstm": {"coupled": True},
    "clipped_lstm": {"clip": 1.0}, "relu_lstm": {"activation": "relu"}, "tanh_lstm": {"recurrent_activation": "tanh"},
}  # fmt: skip


def engines(layer: torch.nn.Module, **options: Any) -> dict[str, Any]:
    """The plan on this processor and on a GPU, by the engine that a plain layer would have there."""
    made = layer.plan(X, **options)
    return {"onednn": made, "cudnn": decide(replace(made.problem, device=A100))}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("engine", TITLES)
@pytest.mark.parametrize("words", ADDITIONS)
def test_each_addition_is_a_reason_by_its_name(words: str, engine: str) -> None:
    arguments, options = ADDITIONS[words]
    layer = whorl.LSTM(2, 5, **arguments)
    plan = engines(layer, **options)[engine]
    reason = f"{TITLES[engine]} does not take {words}"
    assert plan.engine == AFTER[engine]
    assert {refusal.engine: refusal.reasons for refusal in plan.refusals}[engine] == (reason,)
    if engine == "onednn":
        assert f"not onednn: {reason}" in str(whorl.explain(layer, X, **options))
        layer.engine = "onednn"
        with pytest.raises(UnsupportedError, match=re.escape(reason)):
            layer(X, **options)


@pytest.mark.usefixtures("no_compiler")
def test_all_additions_are_named_together() -> None:
    arguments = {key: value for row, _ in ADDITIONS.values() for key, value in row.items()}
    options = {key: value for _, row in ADDITIONS.values() for key, value in row.items()}
    for name, plan in engines(whorl.LSTM(2, 5, **arguments), **options).items():
        (reason,) = {refusal.engine: refusal.reasons for refusal in plan.refusals}[name]
        assert reason == f"{TITLES[name]} does not take {', '.join(ADDITIONS)}"


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("cell", CELLS)
def test_an_option_of_the_cell_is_named_as_the_cell(cell: str) -> None:
    for name, plan in engines(whorl.LSTM(2, 5, **CELLS[cell])).items():
        assert plan.engine == AFTER[name]
        assert any(f"the cell is {cell}, " in str(refusal) for refusal in plan.refusals if refusal.engine == name)


INACTIVE: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "recurrent dropout in eval": ({"recurrent_dropout": 0.3}, False, {}),
    "input dropout in eval": ({"input_dropout": 0.3}, False, {}),
    "weight drop in eval": ({"weight_drop": 0.3}, False, {}),
    "weight drop in training": ({"weight_drop": 0.3}, True, {}),
    "dropout in training": ({"dropout": 0.3, "num_layers": 2}, True, {}),
    "a chance of zero": ({"recurrent_dropout": 0.0, "zoneout": {"h": 0.0}, "recurrent_dropout_mode": "step"}, True, {}),
    "torch's own functions": ({"activation": "tanh", "recurrent_activation": torch.sigmoid}, True, {}),
    "nothing asked": ({}, True, {"return_states": False, "lengths": None, "mask": None, "reset": None}),
}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", INACTIVE)
def test_what_is_not_active_costs_no_engine(name: str) -> None:
    arguments, training, options = INACTIVE[name]
    layer = whorl.LSTM(2, 5, **arguments).train(training)
    assert {engine: plan.engine for engine, plan in engines(layer, **options).items()} == {e: e for e in TITLES}
    with whorl.settings(slow="error"):
        y = layer(X, **options)[0]
    if not any(word in name for word in ("drop in training", "dropout in training")):
        plain = whorl.LSTM(2, 5)
        plain.load_state_dict(layer.state_dict())
        assert torch.equal(y, plain(X)[0])


@pytest.mark.usefixtures("no_compiler")
def test_zoneout_is_active_in_eval() -> None:
    plans = engines(whorl.LSTM(2, 5, zoneout=0.1).eval())
    assert {name: plan.engine for name, plan in plans.items()} == AFTER


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_memory_recompute_saves_less_and_gives_the_same_bits_on_onednn(dropout: float) -> None:
    """Outputs are those of inference, for which oneDNN has kernels of its own where there is no AVX-512."""
    outputs, grads, saved = [], [], []
    for memory in ("save", "recompute"):
        torch.manual_seed(2)
        layer = whorl.LSTM(2, 5, **BOTH, dropout=dropout, memory=memory, engine="onednn")
        x, sizes = torch.randn(9, 3, 2).requires_grad_(), []
        count = torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t
        )
        for gradient in (True, False):
            torch.manual_seed(3)
            with torch.set_grad_enabled(gradient), count:
                outputs.append(flat(layer(x)))
        weighted(outputs[-2]).backward()
        grads.append([x.grad, *(weight.grad for weight in layer.parameters())])
        saved.append(sum(sizes))
    training, inference, again, evaluated = outputs
    assert all(torch.equal(a, b) for a, b in zip(again, inference, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(evaluated, inference, strict=True))
    for a, b in zip(training, again, strict=True):
        apart = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2e-7
        torch.testing.assert_close(a, b, rtol=0, atol=apart)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert saved[1] < saved[0] / 2


def test_a_dropped_weight_is_one_on_every_engine() -> None:
    """Drawn or given, oneDNN runs it: as a layer whose weights were multiplied by hand, and with its gradient."""
    layer, mask = whorl.LSTM(2, 5, engine="onednn"), (torch.rand(20, 5) > 0.4) / 0.6
    plain = whorl.LSTM(2, 5, engine="onednn")
    plain.load_state_dict(layer.state_dict())
    with torch.no_grad():
        plain.weight_hh_l0.mul_(mask)
    y, truth = layer(X, dropout_masks={"weight_drop": mask})[0], plain(X)[0]
    assert torch.equal(y, truth)
    weighted([y]).backward()
    weighted([truth]).backward()
    assert torch.equal(layer.weight_hh_l0.grad, plain.weight_hh_l0.grad * mask)
