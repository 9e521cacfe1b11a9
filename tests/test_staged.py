"""Steps with means and products inside on engine `persistent`, run on the host by `emulation`."""

import shutil
from pathlib import Path

import pytest
import torch

from emulation import emulated
from engine_cases import CELLS, WRAPPED, Case, assert_agrees
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.engines.cuda.staged import staged, steps

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
STAGED = {name: graph for name, graph in {**CELLS, **WRAPPED}.items() if staged(graph)}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("name", STAGED)
def test_a_step_of_several_stages(name: str, folder: Path) -> None:
    dtype = DTYPES[[*STAGED].index(name) % 3]
    with emulated(folder):
        assert_agrees("persistent", STAGED[name], Case(dict(directions=2), time=4, batch=9, units=37), dtype)
