"""How the tests of the cell compiler compute: expressions on tensors, and their C++ compiled and run on the host."""

import ctypes
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from whorl.cells.expr import Expr
from whorl.cells.graphs import Evaluator
from whorl.cells.lower import host_source

_CANDIDATES = [shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]]
COMPILER = next((words for words in _CANDIDATES if words and shutil.which(words[0])), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++, or name one in CXX")

REAL = {torch.float64: "double", torch.float32: "float"}
Collective = Callable[[str, str, Tensor], Tensor]


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
