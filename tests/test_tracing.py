"""What a user writes in a step: torch's functions are torch's, plain numbers are constants, and mistakes teach."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import whorl
from expressions import evaluate, worst
from whorl import CellError
from whorl.cells.expr import const, mean, var
from whorl.cells.graphs import gradient

A, B, C = var("x.a"), var("x.b"), var("x.c")

# --- torch's own functions, on expressions ----------------------------------------------------------------------------

KINKS = [0.0, -0.0, 1.0, -1.0, 0.3, 0.5, 3.0, -3.0, 6.0, -0.6, 2.4]
ORDINARY = [1.7, -2.2, 1e-9, -1e-9, 19.5, 20.5, -19.5, -20.5, 50.0, -50.0]
MODULES = [
    nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.LeakyReLU(), nn.LeakyReLU(0.3), nn.ELU(), nn.ELU(0.7), nn.SiLU(), nn.GELU(),
    nn.GELU("tanh"), nn.Hardtanh(), nn.Hardtanh(-0.6, 2.4), nn.ReLU6(), nn.Hardsigmoid(), nn.Softplus(), nn.Softplus(2),
    nn.Softsign(), nn.LogSigmoid(), nn.Hardswish(), nn.Mish(), nn.SELU(), nn.CELU(), nn.CELU(0.5), nn.Identity(),
]  # fmt: skip
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(torch, name)
        for name in "tanh sigmoid relu exp expm1 log log1p sqrt rsqrt erf sin cos abs neg square reciprocal".split()
    },
    "clamp from": lambda x: torch.clamp(x, min=0.3),
    "clamp to": lambda x: torch.clamp(x, max=0.3),
    "clamp": lambda x: torch.clamp(x, -1.0, 0.5),
    "methods": lambda x: x.tanh() * x.clamp(min=0.3).square().sigmoid().pow(3) - x.abs(),
    "where": lambda x: torch.where(torch.logical_and(x > 0, torch.logical_not(x >= 3)), torch.mul(x, 3), x / 2),
    "arithmetic": lambda x: torch.add(torch.sub(x, 2.0), torch.div(x, torch.pow(x, 2) + 1.0)),
    "extremes": lambda x: torch.minimum(x, x * x) + torch.maximum(x, -x),
    "by name": lambda x: torch.where(condition=x > 1, input=torch.sigmoid(input=x), other=torch.mul(x, other=3.0)),
    "comparisons": lambda x: torch.where(torch.logical_or(torch.lt(x, -1), torch.eq(x, 0.3)) | (x != x), x, 2 * x),
}


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), *MODULES], ids=[*FUNCTIONS, *map(str, MODULES)])
def test_torchs_functions_on_expressions_are_torchs_on_tensors(function: Callable[[Any], Any]) -> None:
    """Value and derivative, at the kinks too."""
    y = function(A)
    (slope,) = gradient([(y, const(1.0))], [A])
    x = torch.tensor(KINKS + ORDINARY, dtype=torch.float64, requires_grad=True)
    # In float64 torch multiplies the derivative of hardsigmoid with 1/6 in float32, so here the same as relu6.
    wanted = F.relu6(x + 3) / 6 if isinstance(function, nn.Hardsigmoid) else function(x)
    (grad,) = torch.autograd.grad(wanted.sum(), [x])
    value, slope = evaluate([y, slope], {"x.a": x.detach()})
    assert worst(value, wanted.detach()) <= 1e-12
    assert worst(slope, grad) <= 1e-12


@pytest.mark.parametrize("function", [whorl.minimum, whorl.maximum])
def test_functions_of_two_take_tensors_and_numbers(function: Callable) -> None:
    x = torch.tensor([-1.0, 0.5, torch.nan], dtype=torch.float64)
    wanted = getattr(torch, function.__name__)(x, torch.zeros_like(x))
    for got in (function(x, 0.0), function(0.0, x), function(x, torch.zeros_like(x))):
        assert worst(got, wanted) == 0


def test_the_other_functions_take_tensors() -> None:
    x = torch.tensor([-1.0, 0.5], dtype=torch.float64)
    assert torch.equal(whorl.where(x > 0, x, 0.0), F.relu(x))
    assert torch.equal(whorl.clip(x, -0.5, 0.2), x.clamp(-0.5, 0.2))
    assert torch.equal(whorl.mean([x, x + 1.0]), torch.tensor([0.25], dtype=torch.float64))
    assert torch.equal(whorl.softplus(x), F.softplus(x))


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.float64(2), np.int64(2), np.array(2.0)], ids=repr)
def test_plain_numbers_of_any_kind_are_constants(number: Any) -> None:
    assert (A * number).digest == (A * 2.0).digest
    assert (number - A).digest == (2.0 - A).digest
    assert (A**number).digest == (A * A).digest
    assert (number < A).digest == (2.0 < A).digest
    assert whorl.maximum(number, A).digest == whorl.maximum(2.0, A).digest
    assert (A * whorl.tanh(number)).digest == (A * whorl.tanh(const(2.0))).digest


# --- errors that teach ------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (lambda: 1 if A > 0 else 0, r"cannot branch on lt\(0.0, x.a\).*write whorl.where"),
    (lambda: max(A, B), "cannot branch on"),
    (lambda: A > 0 and B > 0, "write whorl.where"),
    (lambda: 0 < A < 1, "cannot branch on"),
    (lambda: math.tanh(A), "x.a has no number while a step is traced: use whorl's or torch's"),
    (lambda: float(A), "no number"),
    (lambda: int(A), "no number"),
    (lambda: A[0], "has no length, and cannot be indexed"),
    (lambda: [*A], "has no length"),
    (lambda: A * torch.ones(3), r"a tensor of shape \(3,\) from outside.*vectors={'name'"),
    (lambda: torch.ones(3) * A, r"a tensor of shape \(3,\) from outside"),
    (lambda: torch.ones(3) < A, r"a tensor of shape \(3,\) from outside"),
    (lambda: A + torch.tensor(2.0), r"a plain number is float\(t\)"),
    (lambda: A * np.ones(3), "of type ndarray: it can use expressions and plain numbers"),
    (lambda: np.ones(3) * A, "of type ndarray"),
    (lambda: A // 2, r"no //, %, @, \^, << or >>, divmod or round of x.a.*write it with sigmoid, tanh"),
    (lambda: 2 % A, "no //"),
    (lambda: A @ B, "no //"),
    (lambda: (A > 0) ^ (B > 0), r"write \(a \| b\) & ~\(a & b\) of two conditions"),
    (lambda: A ^ B, "`&`, `|`, `~` between conditions"),
    (lambda: np.tanh(A), "cannot use numpy's tanh: write whorl.tanh"),
    (lambda: np.maximum(A, 0.0), "cannot use numpy's maximum: write whorl.maximum"),
    (lambda: np.where(A > 0, A, B), "cannot use numpy's where: write whorl.where"),
    (lambda: np.abs(A), r"cannot use numpy's absolute: write abs\(a\)"),
    (lambda: np.arctan(A), "cannot use numpy's arctan: write it with sigmoid, tanh"),
    (lambda: np.add.reduce(A), "cannot use numpy's add"),
    (lambda: np.mean(A), r"cannot use numpy's mean: write whorl.mean\(a\)"),
    (lambda: A(B), r"x.a is a value, which cannot be called: .* are r.n\(a\)"),
    (lambda: mean(A, B), r"one list: write whorl.mean\(\[a, b\]\)"),
    (lambda: (A > 0).float(), r"cannot use torch's float: .* write whorl.where\(condition, 1.0, 0.0\)"),
    (lambda: A.double(), "cannot use torch's double: a kernel decides the dtype: leave it out"),
    (lambda: whorl.tanh("1"), "of type str"),
    (lambda: round(A), "divmod or round of x.a"),
    (lambda: A + "1", "of type str"),
    (lambda: A + None, "of type NoneType"),
    (lambda: A + 1j, "of type complex"),
    (lambda: A * True, "uses True as a value: write a number, or a condition"),
    (lambda: A * np.bool_(True), "uses True as a value"),
    (lambda: (A > 0) + 1.0, r"add takes values, but was given the condition lt\(0.0, x.a\): write whorl.where"),
    (lambda: (A > 0) * 1.0, "mul takes values, but was given the condition"),
    (lambda: (A > 0) ** 1, "pow takes values, but was given the condition"),
    (lambda: -(A > 0), "neg takes values"),
    (lambda: whorl.tanh(A > 0), "tanh takes values"),
    (lambda: mean([A, A > 0]), "mean takes values"),
    (lambda: whorl.where(A, B, C), "where takes a condition such as a > b, but was given the value x.a"),
    (lambda: A & (B > 0), "and takes a condition"),
    (lambda: ~A, "not takes a condition"),
    (lambda: A**B, r"\(x.a\) \*\* \(x.b\): the exponent must be a plain number; write exp\(b \* log\(a\)\)"),
    (lambda: 2.0**A, "the exponent must be a plain number"),
    (lambda: torch.pow(A, B), "the exponent must be a plain number"),
    (lambda: A ** torch.ones(2), "from outside"),
    (lambda: whorl.clip(A, B, 1.0), "the ends must be plain numbers; write minimum and maximum"),
    (lambda: whorl.clip(A, 1.0, 0.0), "the first end must not be above the second"),
    (lambda: whorl.clip(A, math.nan, 0.0), "the first end"),
    (lambda: mean([]), "give it at least one value"),
    (lambda: torch.cumsum(A, 0), "cannot use torch's cumsum: write it with sigmoid, tanh"),
    (lambda: torch.mean(A), r"cannot use torch's mean: write whorl.mean\(a\)"),
    (lambda: A.mean(), r"or whorl.mean\(\[a, b\]\), over those of several gates"),
    (lambda: torch.arctan(A), "softplus, exp, expm1, log"),
    (lambda: F.layer_norm(A, (3,)), "cannot use torch's layer_norm"),
    (lambda: nn.PReLU()(A), "cannot use torch's prelu"),
    (lambda: A.softmax(-1), "cannot use torch's softmax: write it with sigmoid, tanh"),
    (lambda: A.size(), "cannot use torch's size"),
    (lambda: torch.add(A, B, alpha=2), r"torch's add with alpha: write a \+ 2 \* b"),
    (lambda: torch.sub(A, other=B, alpha=C), r"torch's sub with alpha: write a - x.c \* b"),
    (lambda: torch.div(A, B, rounding_mode="floor"), "unexpected keyword argument 'rounding_mode'"),
    (lambda: torch.tanh_(A), r"cannot be changed in place: write y = tanh\(x\)"),
    (lambda: F.relu_(A), "cannot be changed in place"),
    (lambda: A.tanh_(), r"cannot be changed in place: write y = tanh\(x\)"),
    (lambda: nn.ReLU(inplace=True)(A), "without inplace=True"),
    (lambda: nn.Softplus(threshold=5.0)(A), "a step takes torch's default, 20"),
    (lambda: exec("t += a", {"t": torch.ones(3), "a": A}), "cannot be changed in place"),
]


@pytest.mark.parametrize("write, message", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_a_step_is_an_error_that_teaches(write: Callable[[], Any], message: str) -> None:
    with pytest.raises(CellError, match=f"(?s){message}"):
        write()


@pytest.mark.parametrize("name", ["shape", "dtype", "data", "anything", "__array__", "_cdata"])
def test_an_expression_has_a_tensors_methods_and_no_other_attribute(name: str) -> None:
    assert not hasattr(A, name)
    with pytest.raises(AttributeError, match=f"one value for each unit, and has no '{name}'"):
        getattr(A, name)


def test_an_expression_is_no_key() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(A)
