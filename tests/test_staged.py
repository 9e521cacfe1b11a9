"""Steps with means and products inside on engine `persistent`, run on the host by `emulation`."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whorl
from emulation import emulated
from engine_cases import CELLS, FORMS, WRAPPED, Case, assert_agrees
from test_machine_code import H200, needs_tools, nvdisasm, time_loop
from whorl.cells import library, wrappers
from whorl.engines.cuda import grid, source
from whorl.engines.cuda.compile import cubin
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.staged import staged, steps

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@whorl.cell(gates="a b", states="h")
def together(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Two products and a mean that are exchanged at once, and nothing else."""
    return dict(h=whorl.tanh(x.a + r.a(0.5 * s.h) + r.b(s.h * x.b) * whorl.mean(s.h)))


STAGED = {name: graph for name, graph in {**CELLS, **WRAPPED}.items() if staged(graph)}
STAGED["all of LSTM's layer norm"] = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("x", "r"))[0]
STAGED["together"] = together.graph
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@needs_compiler
@pytest.mark.parametrize("name", STAGED)
def test_a_step_of_several_stages(name: str, folder: Path) -> None:
    dtype = DTYPES[[*STAGED].index(name) % 3]
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], Case(dict(directions=2), time=4, batch=9, units=37), dtype)


@needs_compiler
@pytest.mark.parametrize(
    "form, changes",
    [
        ("given, by gate", {}),
        ("given, by step, packed", {}),
        ("recurrent dropout by gate", dict(zoneout=(0.3, 0.2))),
        ("reset to", dict(recurrent_dropout=0.4, recurrent_dropout_mode="step", zoneout=(0.3, 0.0))),
        ("layers", {}),
    ],
)
def test_options_of_a_cell_with_means(form: str, changes: dict[str, Any], folder: Path) -> None:
    case = replace(FORMS[form], time=4, form=FORMS[form].form | changes)
    with emulated(folder):
        assert_agrees("persistent", STAGED["layer_norm_lstm"], case, DTYPES[len(form) % 3])


@needs_compiler
@pytest.mark.parametrize("form", ["reset to", "reset, packed", "mask and lengths", "no bias"])
def test_options_of_a_cell_with_products(form: str, folder: Path) -> None:
    case = replace(FORMS[form], time=4, form=FORMS[form].form | dict(zoneout=(0.3,)))
    with emulated(folder):
        assert_agrees("persistent", STAGED["gru_before"], case, DTYPES[len(form) % 3])


def test_a_mean_and_its_variance_take_one_exchange_and_so_do_their_gradients() -> None:
    made = steps(STAGED["all of LSTM's layer norm"])
    assert (made.forward.exchanges, made.backward.exchanges) == (2, 2)
    assert [it.moments for it in made.forward.reductions] == [True] * 3


SOURCES = """
import hashlib
import torch
from engine_cases import CELLS
from test_staged import STAGED
from whorl.engines.cpu import generate
from whorl.engines.cuda import grid, source, stepwise_source
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.tiling import Chip

for name, cell in (CELLS | STAGED).items():
    beside = [make(cell, torch.float32) for make in (stepwise_source.source, stepwise_source.stream)]
    others = generate.source(cell), *beside
    print(name, hashlib.sha256(repr(others).encode()).hexdigest())
    for kind in ("forward", "backward"):
        tile = grid.choose(size_of(cell, 64, 2), Chip((9, 0), 132), 32, 1, kind)
        text = getattr(source, kind)(cell, 64, torch.bfloat16, tile, True)
        print(name, kind, hashlib.sha256(text.encode()).hexdigest())
"""


def test_each_process_makes_the_same_source() -> None:
    """The store finds a kernel by its source, so no order of a set may be in it."""
    words = [sys.executable, "-c", SOURCES]
    given = [os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)} for seed in "012"]
    made = [subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout for env in given]
    first, *others = (text.splitlines() for text in made)
    assert len(first) == 3 * len(CELLS | STAGED)
    assert all(other == first for other in others)


def test_what_is_exchanged_together_counts_once() -> None:
    made = steps(together.graph)
    assert (made.leaves, len(made.forward.rounds), made.forward.exchanges) == (0, 2, 1)


def test_what_one_cluster_does_not_hold_has_no_tile() -> None:
    size = size_of(STAGED["all of LSTM's layer norm"], 512, 2)
    assert grid.fits(size, H200, "backward")
    assert not grid.fits(size._replace(units=1024), H200, "backward")


def test_a_mean_of_other_squares_is_no_variance() -> None:
    @whorl.cell(gates="n", states="h")
    def odd(x: Any, r: Any, s: Any) -> dict[str, Any]:
        apart = r.n - whorl.mean(x.n)
        return dict(h=whorl.tanh(apart * whorl.mean(apart * apart)))

    assert not any(it.moments for it in steps(odd.graph).forward.reductions)


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize(
    "name, units, batch",
    [("layer norm of r and c", 512, 128), ("layer norm of r and c", 256, 32), ("reset before", 512, 128)],
)
def test_nothing_is_spilled_or_fenced_in_the_time_loop(
    name: str, units: int, batch: int, kind: str, tmp_path: Path
) -> None:
    of_c = library.make_lstm(layer_norm=True).graph
    more = {"layer norm of r and c": wrappers.layer_norm(of_c, ("r",))[0]}
    cell, dtype = (STAGED | more)[name], torch.bfloat16
    tile = grid.choose(size_of(cell, units, 2), H200, batch, 1, kind)
    assert tile is not None
    text = (source.forward if kind == "forward" else source.backward)(cell, units, dtype, tile, True)
    path, tool = tmp_path / "kernel.cubin", nvdisasm()
    path.write_bytes(cubin(text, "kernel", "sm_90a", flags(tile)))
    assert tool is not None
    lines = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    loop = time_loop(lines)
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []
    assert [line for line in loop if re.search(r"\b(MEMBAR|ERRBAR|CCTL\.IVALL)\b", line)] == []
