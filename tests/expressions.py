"""What the tests of the cell compiler share: operations to draw graphs from; expressions on tensors; their C++, run."""

import ctypes
import math
import operator
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from whorl.cells.expr import Expr
from whorl.cells.graphs import Evaluator
from whorl.cells.lower import host_source

_CANDIDATES = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
COMPILER = next((words for words in _CANDIDATES if words and shutil.which(words[0])), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++, or name one in CXX")

REAL = {torch.float64: "double", torch.float32: "float"}
Collective = Callable[[str, str, Tensor], Tensor]

VALUES: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: 0.5 * (a + b),
    "sub": lambda a, b: 0.5 * (a - b),
    "mul": lambda a, b: a * b / (1.0 + abs(a)),
    "div": lambda a, b: a / (1.0 + abs(b)),
    "neg": lambda a, b: -a,
    "abs": lambda a, b: abs(a),
    "pow": lambda a, b: (0.5 + whorl.sigmoid(a)) ** 1.7,
    "minimum": whorl.minimum,
    "maximum": whorl.maximum,
    "clip": lambda a, b: whorl.clip(a, -0.5, 0.75),
    "sqrt": lambda a, b: whorl.sqrt(0.5 + abs(a)),
    "rsqrt": lambda a, b: whorl.rsqrt(0.5 + abs(a)),
    "exp": lambda a, b: whorl.exp(-abs(a)),
    "expm1": lambda a, b: whorl.expm1(-abs(a)),
    "log": lambda a, b: whorl.log(0.5 + abs(a)),
    "log1p": lambda a, b: whorl.log1p(abs(a)),
    "mean": lambda a, b: whorl.mean([a, b]),
    **{name: lambda a, b, name=name: getattr(whorl, name)(a) for name in ("erf", "sin", "cos", "sigmoid", "tanh")},
    "relu": lambda a, b: whorl.relu(a),
    "softplus": lambda a, b: whorl.softplus(a),
}
"""Every operation on values, as a function of two that keeps what it gives near one; of expressions or of tensors."""

CONDITIONS = {name: getattr(operator, name) for name in ("lt", "le", "eq", "ne")}
LOGIC: dict[str, Callable[..., Any]] = {"and": operator.and_, "or": operator.or_, "not": lambda a, b: ~a}


def evaluate(outputs: list[Expr], values: Mapping[str, Tensor]) -> list[Tensor]:
    """Each output, in the shape of the leaves."""
    evaluator, like = Evaluator(outputs), next(iter(values.values()))
    return [value.expand(like.shape) for value in evaluator(dict(values), evaluator.constants(like))]


def worst(got: Tensor, wanted: Tensor) -> float:
    """The largest error of an element, relative where it is above one; infinite where one is finite and one is not."""
    finite = wanted.isfinite()
    if not torch.equal(got[~finite].nan_to_num(7.0), wanted[~finite].nan_to_num(7.0)):
        return math.inf
    apart = (got - wanted).abs()[finite] / wanted.abs()[finite].clamp(min=1.0)
    return float(apart.nan_to_num(math.inf).max())


class Library:
    """Graphs printed as C++ for one dtype, all in one shared library."""

    def __init__(self, graphs: Mapping[str, Mapping[str, Expr]], dtype: torch.dtype) -> None:
        sources, self._stages = [], {}
        for name, outputs in graphs.items():
            source, self._stages[name] = host_source(name, outputs, REAL[dtype])
            sources.append(source)
        self._dtype = dtype
        self._library = _load("\n".join(sources))

    def __call__(self, name: str, leaves: Mapping[str, Tensor], collective: Collective | None = None) -> dict:
        """Each variable that the graph of this name writes, as [batch, units].

        Args:
            leaves: a tensor [batch, units] for each leaf, by its name in C.
            collective: computes ("product" or "pull", gate, operand).
        """
        known = {leaf: value.to(self._dtype).contiguous() for leaf, value in leaves.items()}
        shape = next(iter(known.values())).shape
        for index, stage in enumerate(self._stages[name]):
            written = {value.name: torch.full(shape, torch.nan, dtype=self._dtype) for value in stage.writes}
            call = getattr(self._library, f"{name}_{index}")
            call(ctypes.c_long(shape.numel()), _pointers(stage.reads, known), _pointers(stage.writes, written))
            known |= written
            for kind, result, operands, gate in stage.collectives:
                parts = [known[operand] for operand in operands]
                value = torch.stack(parts).mean((0, -1))[:, None] if kind == "mean" else collective(kind, gate, *parts)
                known[result] = value.expand(shape).contiguous()
        return known


def _pointers(values: tuple, tensors: Mapping[str, Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * max(1, len(values)))(*(tensors[value.name].data_ptr() for value in values))


@cache
def _load(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder) / "kernel.cpp").write_text(source)
        built = path.with_suffix(".so")
        command = [*COMPILER, "-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unused-variable", "-fPIC", "-shared"]
        done = subprocess.run([*command, str(path), "-o", str(built)], capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stderr[:4000]}\n{source}"
        return ctypes.CDLL(str(built))
