"""What every test shares: a seed, whorl's default settings, one thread for each worker, and the tests marked `gpu`."""

import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

import cubins
import emulation
from emulation import emulated
from whorl import compiler, plan, problem, settings
from whorl.engines import taped

pytest.register_assert_rewrite("comparison", "plain_loops", "loops", "option_cases")  # so that failures show values

os.environ.pop("WHORL_SLOW", None)  # tests begin with whorl's own defaults
# Read when Keras is imported: tests of another backend have a process of their own.
os.environ["KERAS_BACKEND"] = os.environ.get("WHORL_TEST_KERAS", "torch")
torch.set_num_threads(1)  # small tensors, and workers that share the cores

hypothesis.settings.register_profile("whorl", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("whorl")


def pytest_configure(config: pytest.Config) -> None:
    # Most tests run the reference, which is slow and says so. Tests of the warning itself use pytest.warns.
    config.addinivalue_line("filterwarnings", "ignore::whorl.errors.SlowWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _run_once(config, items)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))  # one worker, so one process on the GPU
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU"))


def _run_once(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what test_emulated_orders.py runs too, with all that is asserted there and more."""

    def known(item: pytest.Item) -> tuple[object, str]:
        return getattr(item, "function", None), item.name

    there = [item.path.stem == "test_emulated_orders" for item in items]
    of_orders = {known(item) for item, own in zip(items, there, strict=True) if own}
    twice = {item for item, own in zip(items, there, strict=True) if not own and known(item) in of_orders}
    config.hook.pytest_deselected(items=[*twice])
    items[:] = [item for item in items if item not in twice]


@pytest.fixture(scope="session", autouse=True)
def compiled_calls() -> None:
    """On a GPU calls go by tapes from the first test on, not from whenever they are compiled."""
    if torch.cuda.is_available():
        taped.finish()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test begins with the same seed, and leaves settings and what kernels run on as it found them."""
    torch.manual_seed(0)
    before = dict(settings._assigned)
    yield
    settings._assigned.clear()
    settings._assigned.update(before)
    assert not emulation.left_behind()


def _shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder of all tests and all workers."""
    own = factory.getbasetemp()
    made = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    made.mkdir(exist_ok=True)
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels that are compiled for the host lie, which tests share."""
    return _shared(tmp_path_factory, "kernels_of_the_host")


@pytest.fixture(scope="session", autouse=True)
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests read of it is compiled once."""
    cubins.FOLDER = _shared(tmp_path_factory, "machine_code")


@pytest.fixture
def host(folder: Path) -> Iterator[None]:
    """Kernels run on the host, and memory is full of NaN before it is written."""
    torch.use_deterministic_algorithms(True)
    with emulated(folder):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C++ compiler: what only engine `cpu` could run fast is slow."""
    monkeypatch.setattr(compiler, "found", lambda: "")
    for cached in (problem._device, plan.plan):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (problem._device, plan.plan):
        cached.cache_clear()
