"""Steps with means and products inside on engine `persistent`, run on the host by `emulation`."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from emulation import emulated
from engine_cases import CELLS, FORMS, WRAPPED, Case, assert_agrees
from whorl.engines.cuda.staged import staged

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


@pytest.mark.parametrize("form", ["reset to", "reset, packed", "mask and lengths", "no bias"])
def test_options_of_a_cell_with_products(form: str, folder: Path) -> None:
    case = replace(FORMS[form], time=4, form=FORMS[form].form | dict(zoneout=(0.3,)))
    with emulated(folder):
        assert_agrees("persistent", STAGED["gru_before"], case, DTYPES[len(form) % 3])
