"""Nothing wrong is timed: the truth is the truth, and contenders with every fault that was thought of are found."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from whorl.bench import measurement
from whorl.bench.baseline import error, to_tf32
from whorl.bench.cases import PASSES, Case
from whorl.bench.checks import Truth, Verdict
from whorl.bench.contenders import RIVALS, Contender, Layer, contenders, ours, torch_layer
from whorl.bench.measurement import measure
from whorl.bench.passes import Material, Runner
from whorl.bench.timing import Effort

CPU = torch.device("cpu")
LEAST = Effort(turns=1, seconds=1e-9)
CASES = [Case(cell, layers, 3, 5, 17, "fp32") for cell in ("lstm", "gru") for layers in (1, 2)]


def verdict(contender: Contender, case: Case, which: str = "train") -> Verdict:
    material = Material.of(case, CPU)
    runner = Runner(contender, contender.build(case, CPU), which, material)
    return Truth.of(case, material).judge(runner, material)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_truth_is_what_torch_gets_in_float64(case: Case) -> None:
    material = Material.of(case, CPU)
    truth = Truth.of(case, material)
    layer = torch_layer(case, CPU).double()
    layer.load_state_dict(material.weights)
    x = material.checked.double().requires_grad_()
    y = layer(x)[0]
    (y - material.target.double()).square().sum().backward()
    found = {"y": y.detach(), "grad of x": x.grad} | {f"grad of {n}": w.grad for n, w in layer.named_parameters()}
    assert truth.tensors.keys() == found.keys() == truth.bounds.keys()
    for name, tensor in found.items():
        assert tensor is not None
        assert error(tensor, truth.tensors[name]) <= 1e-12
        assert 4 * torch.finfo(torch.float32).eps < truth.bounds[name] < 1e-5


@pytest.mark.parametrize("precision, low, high", [("fp32", 2e-8, 2e-6), ("tf32", 5e-5, 5e-3), ("bf16", 4e-4, 4e-2)])
def test_the_bound_is_that_of_the_precision(precision: str, low: float, high: float) -> None:
    """4 eps of the precision, and above that twice what rounding the operands of products costs."""
    case = replace(CASES[1], precision=precision)
    bounds = Truth.of(case, Material.of(case, CPU)).bounds
    eps = {"fp32": 2**-23, "tf32": 2**-10, "bf16": 2**-7}[precision]
    assert all(4 * eps + low < bound < 4 * eps + high for bound in bounds.values())


@pytest.mark.parametrize("which", PASSES)
def test_a_pass_begins_with_the_weights_that_were_given(which: str) -> None:
    material, rival = Material.of(CASES[0], CPU), RIVALS["torch"]
    truth, layer = Truth.of(CASES[0], material), rival.build(CASES[0], CPU)
    Runner(rival, layer, "train", material).change()
    assert truth.judge(Runner(rival, layer, which, material), material).ratio <= 1


def test_tf32_keeps_ten_bits() -> None:
    x = torch.randn(1000).double()
    rounded = to_tf32(x.float()).double()
    step = torch.exp2(torch.floor(torch.log2(x.abs())) - 10)
    assert torch.equal(rounded, torch.round(rounded / step) * step)
    assert ((rounded - x).abs() <= step / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", ["torch", "torch-cells"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_right_contenders_are_within_the_error_rule(case: Case, name: str, which: str) -> None:
    assert verdict(RIVALS[name], case, which).ratio <= 1
    assert verdict(ours("reference"), case, which).ratio <= 1


class Faulty(torch.nn.Module):
    """torch's layer with one fault."""

    def __init__(self, layer: torch.nn.RNNBase, fault: str) -> None:
        super().__init__()
        self.layer, self.fault = layer, fault
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.layer.named_parameters())
        if self.fault == "weights of the first call":
            self.kept = self.kept or {name: weight.detach().clone() for name, weight in weights.items()}
            weights = {name: self.kept[name] + 0 * weight for name, weight in weights.items()}
        if self.fault == "input of the first call":
            self.kept = self.kept or {"x": x.detach().clone()}
            x = self.kept["x"] + 0 * x
        if self.fault == "gates swapped":
            weights["weight_ih_l0"] = weights["weight_ih_l0"].roll(17, 0)
        if self.fault == "no gradient to the input":
            x = x.detach() + 0 * x
        if self.fault == "input rounded":
            x = x + (x.detach().bfloat16().float() - x.detach())
        if self.fault == "a bias left out":
            weights["bias_hh_l0"] = 0 * weights["bias_hh_l0"]
        y = torch.func.functional_call(self.layer, weights, (x,))[0]
        if self.fault == "a wrong last element":
            y = torch.cat([y.flatten()[:-1], y.flatten()[-1:] + 1e-3]).view_as(y)
        if self.fault == "nan":
            y = torch.where(torch.arange(y.numel()).view_as(y) == 3, math.nan, y)
        return y


def faulty(fault: str, case: Case, device: torch.device) -> Layer:
    layer = torch_layer(case, device)
    module = Faulty(layer, fault)
    return Layer(module, module, dict(layer.named_parameters()))


FAULTS = "weights of the first call/input of the first call/gates swapped/no gradient to the input/input rounded".split(
    "/"
)
FAULTS += ["a bias left out", "a wrong last element", "nan"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_not_timed(fault: str) -> None:
    rival = Contender("faulty", "", partial(faulty, fault))
    assert verdict(rival, CASES[0]).ratio > 16
    measured = measure(CASES[0], [rival, RIVALS["torch"]], CPU, LEAST)
    outcome = measured.passes["train"]["faulty"]
    assert (outcome.time, outcome.wrong) == (None, True)
    assert "wrong numbers: " in str(outcome.reason)
    assert ("inf" in str(outcome.reason)) == (fault == "nan") == (outcome.error is None)
    good = measured.passes["train"]["torch"]
    assert good.reason is None
    assert good.exact
    assert good.wall is not None


def test_who_is_a_little_outside_is_timed_if_it_is_a_rival_or_has_the_numbers_of_one() -> None:
    def may(own: float, *rivals: float, tensor: str = "y") -> bool:
        others = [Verdict("y", ratio, 1.0) for ratio in rivals]
        return measurement._may_be_timed(ours("auto"), Verdict(tensor, own, 1.0), others)

    assert may(1.0)
    assert not may(1.01)
    assert may(5.0, 5.0)
    assert may(5.0, 0.5, 5.01)
    assert not may(5.0, 0.5, 6.0), "another kernel"
    assert not may(5.0, 5.0, tensor="grad of x"), "another kernel"
    assert not may(20.0, 20.0)
    assert not may(math.inf, math.inf)
    rival = RIVALS["torch"]
    assert [measurement._may_be_timed(rival, Verdict("y", ratio, 1.0), []) for ratio in (1, 16, 17)] == [
        True,
        True,
        False,
    ]


def test_whorl_outside_the_rule_is_not_timed_where_rivals_are_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of whorl's that rounds its input to bfloat16 where float32 was asked for."""
    wrong = replace(ours("auto"), build=partial(faulty, "input rounded"))
    measured = measure(CASES[0], [wrong, RIVALS["torch"]], CPU, LEAST)
    assert [outcomes["whorl"].wrong for outcomes in measured.passes.values()] == [True, True, True]
    assert [outcomes["torch"].wrong for outcomes in measured.passes.values()] == [False, False, False]


def _raise(text: str, *_: object) -> Layer:
    raise RuntimeError(text)


class Breaks(torch.nn.Module):
    """Cannot be trained."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError("no kernel\n  for training")
        return x


@pytest.mark.parametrize(
    "build, reasons",
    [
        (partial(_raise, "out of\nmemory"), dict.fromkeys(PASSES, "RuntimeError: out of memory")),
        (lambda *_: Layer(Breaks(), Breaks(), {}), {"train": "RuntimeError: no kernel for training"}),
    ],
)
def test_who_cannot_run_says_why(build: Callable[..., Layer], reasons: dict[str, str]) -> None:
    measured = measure(CASES[0], [Contender("rival", "", build), RIVALS["torch"]], CPU, LEAST)
    for which, reason in reasons.items():
        outcome = measured.passes[which]["rival"]
        assert (outcome.reason, outcome.wrong, outcome.time) == (reason, False, None)
    assert all(outcomes["torch"].wall is not None for outcomes in measured.passes.values())


def test_a_precision_that_the_device_lacks_is_said() -> None:
    measured = measure(replace(CASES[0], precision="tf32"), contenders(["auto"], []), CPU, LEAST)
    assert (measured.passes, measured.reason) == ({}, "TF32 is a mode of NVIDIA's GPUs, this is a CPU")


def test_obstacles_and_engines_that_cannot_run_are_said() -> None:
    entrants = contenders(["auto", "cudnn"], ["torch-graphed", "torch-compiled"])
    names = ["whorl", "whorl-graphed", "whorl-cudnn", "whorl-cudnn-graphed", "torch-graphed", "torch-compiled"]
    assert [contender.name for contender in entrants] == names
    outcomes = measure(Case("lstm", 1, 2, 71, 3, "fp32"), entrants, CPU, LEAST).passes["train"]
    reasons = {name: outcome.reason for name, outcome in outcomes.items()}
    assert reasons["whorl"] is None
    assert outcomes["whorl"].engine in ("cpu", "onednn", "reference")
    assert reasons["whorl-graphed"] == reasons["torch-graphed"] == "CUDA graphs exist on CUDA alone, this is cpu"
    assert "UnsupportedError: the engine 'cudnn' cannot run" in str(reasons["whorl-cudnn"])
    assert "71 steps" in str(reasons["torch-compiled"])
