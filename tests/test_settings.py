"""Settings, and what is said of slow layers or refused."""

import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import whorl
from whorl import settings
from whorl.engines.native import OneDNN

X = torch.zeros(6, 3, 5)


def test_settings_are_read_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (settings.slow, settings.cache) == ("warn", Path("~/.cache/whorl").expanduser())
    monkeypatch.setenv("WHORL_SLOW", "allow")
    monkeypatch.setenv("WHORL_CACHE", "/tmp/kernels")
    assert (settings.slow, settings.cache) == ("allow", Path("/tmp/kernels"))
    settings.slow = "error"
    assert settings.slow == "error"
    with settings(slow="warn"):
        assert settings.slow == "warn"
        with settings(cache="~/here"):
            assert (settings.slow, settings.cache) == ("warn", Path("~/here").expanduser())
            with settings(slow="allow"):
                assert settings.slow == "allow"
        assert (settings.slow, settings.cache) == ("warn", Path("/tmp/kernels"))
    assert settings.slow == "error"
    del settings.slow
    for name in ("WHORL_SLOW", "WHORL_CACHE"):
        monkeypatch.setenv(name, "")
    assert (settings.slow, settings.cache) == ("warn", Path("~/.cache/whorl").expanduser())
    with pytest.raises(whorl.InputError, match="settings.cache is '': write the path of a folder"):
        settings.cache = ""


def test_a_block_of_settings_ends_with_its_error() -> None:
    with pytest.raises(ZeroDivisionError), settings(slow="error"):
        raise ZeroDivisionError
    assert settings.slow == "warn"


@pytest.mark.usefixtures("no_compiler")
def test_a_bad_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("loud", None, True, 1):
        with pytest.raises(whorl.InputError, match=re.escape(f"settings.slow is {wrong!r}: write one of 'warn', 'err")):
            settings.slow = wrong
        with pytest.raises(whorl.InputError, match=r"settings.slow is "), settings(slow=wrong):
            pytest.fail("the block ran")
    monkeypatch.setenv("WHORL_SLOW", "Error")
    with pytest.raises(whorl.InputError, match="WHORL_SLOW is 'Error': write one of"):
        whorl.GRU(5, 7)(X)


def test_an_unknown_setting_is_an_error() -> None:
    unknown = pytest.raises(
        whorl.SettingError, match="whorl has no setting 'slwo': the settings are slow, calls, cache"
    )
    with unknown:
        settings.slwo = "warn"
    with unknown:
        _ = settings.slwo
    with unknown, settings(slwo="warn"):
        pytest.fail("the block ran")
    assert not hasattr(settings, "slwo")
    assert set(dir(settings)) == {"slow", "calls", "cache"}
    assert all(f"{name}={getattr(settings, name)!r}" in repr(settings) for name in dir(settings))


def test_a_block_of_settings_is_for_its_thread_and_an_assignment_for_all() -> None:
    seen = {}

    def look(name: str) -> None:
        seen[name] = settings.slow
        with settings(slow="warn"):
            barrier.wait()
            seen[f"{name} within"] = settings.slow
            barrier.wait()

    barrier = threading.Barrier(2)
    settings.slow = "allow"
    with settings(slow="error"):
        other = threading.Thread(target=look, args=["other"])
        other.start()
        barrier.wait()
        seen["here"] = settings.slow
        barrier.wait()
        other.join()
    assert seen == {"other": "allow", "other within": "warn", "here": "error"}


def slow_calls(*calls: Callable[[], Any]) -> list[str]:
    """The texts of the SlowWarnings that calls give, each whenever it is given."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", whorl.SlowWarning)
        for call in calls:
            call()
    return [str(warning.message) for warning in seen if issubclass(warning.category, whorl.SlowWarning)]


@pytest.fixture
def nothing_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whorl.plan._announced", set())


@pytest.mark.usefixtures("nothing_announced", "no_compiler")
def test_a_slow_layer_is_announced_once_for_its_kind_and_reasons() -> None:
    gru, double = whorl.GRU(5, 7), whorl.LSTM(5, 7).double()
    (text,) = slow_calls(lambda: gru(X), lambda: gru(X), lambda: gru(X[:2]), lambda: whorl.GRU(5, 9)(X[:, :1]))
    for reason in ("the tensors are on cpu, cuDNN runs on cuda", "the cell is gru, torch runs only the plain LSTM"):
        assert reason in text
    assert "6 steps, batch 3" in text
    assert "settings.slow = 'allow'" in text
    assert len(slow_calls(lambda: double(X.double()), lambda: double(X[1:].double()))) == 1
    assert len(slow_calls(lambda: whorl.GRU(5, 7).bfloat16()(X.bfloat16()))) == 1, "it was said of float32 alone"
    assert len(slow_calls(*[lambda n=n: whorl.LSTM(5, 7, proj_size=n)(X) for n in (1, 2, 3)])) == 1
    packed = [pack_sequence([X[0, :n]]) for n in (2, 3)]
    assert len(slow_calls(*[lambda p=p: whorl.LSTM(5, 7)(p) for p in packed])) == 1


@pytest.mark.usefixtures("nothing_announced", "no_compiler")
def test_what_is_fast_or_asked_for_is_not_announced() -> None:
    layers = [whorl.LSTM(5, 7), whorl.GRU(5, 7, engine="reference")]
    with settings(slow="error"):
        assert slow_calls(*[lambda layer=layer: layer(X) for layer in layers], lambda: whorl.GRU(5, 7)(X[:1])) == []
    with settings(slow="allow"):
        assert slow_calls(lambda: whorl.GRU(5, 7)(X)) == []
    assert len(slow_calls(lambda: whorl.GRU(5, 7)(X))) == 1, "what was allowed was not yet said"


@pytest.mark.usefixtures("nothing_announced", "no_compiler")
def test_a_warning_names_the_line_of_the_user() -> None:
    with pytest.warns(whorl.SlowWarning) as seen:
        whorl.GRU(5, 7)(X)
    assert seen[0].filename == __file__


@pytest.mark.usefixtures("nothing_announced", "no_compiler")
def test_a_warning_made_an_error_is_one_each_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", whorl.SlowWarning)
        for _ in range(2):
            with pytest.raises(whorl.SlowWarning):
                whorl.GRU(5, 7)(X)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "layer, given, reasons",
    [
        (whorl.GRU(5, 7), X, {"the cell is gru, torch runs only the plain LSTM through oneDNN"}),
        (whorl.RNN(5, 7, nonlinearity="relu"), X, {"the cell is rnn_relu, torch runs only the plain LSTM through"}),
        (
            whorl.LSTM(5, 7, proj_size=3).double(),
            pack_sequence([X[0].double()]),
            {"the dtype is float64", "the projection is 3 wide", "the input is a PackedSequence"},
        ),
    ],
    ids=["GRU", "RNN", "LSTM with three reasons"],
)
def test_slow_may_be_refused_with_every_reason(layer: torch.nn.Module, given: Any, reasons: set[str]) -> None:
    with settings(slow="error"):
        for _ in range(2):
            with pytest.raises(whorl.SlowError) as raised:
                layer(given)
            text = str(raised.value)
            assert all(reason in text for reason in {*reasons, "not cudnn: the tensors are on cpu", "not onednn: "})
            assert "settings.slow is 'error'" in text
            assert str(layer.plan(given).problem) in text
        assert isinstance(raised.value, whorl.UnsupportedError)
    layer(given)


def test_settings_hold_where_a_call_was_made_not_where_autograd_runs_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CUDA autograd runs backward in threads of its own, which see no block of settings."""
    monkeypatch.setattr(OneDNN, "recorded", False)  # as the engines are whose backward is whorl's
    x, caught = X.clone().requires_grad_(), []
    with settings(slow="error"):
        (grad,) = torch.autograd.grad(whorl.LSTM(5, 7)(x)[0].square().sum(), x, create_graph=True)

        def differentiate_again() -> None:
            try:
                grad.sum().backward()
            except whorl.SlowError as error:
                caught.append(error)

        thread = threading.Thread(target=differentiate_again)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_an_assignment_can_be_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.slow = "allow"
    monkeypatch.setenv("WHORL_SLOW", "error")
    del settings.slow
    assert settings.slow == "error"


@pytest.mark.usefixtures("nothing_announced")
def test_an_empty_batch_is_not_slow() -> None:
    with settings(slow="error"):
        y, h = whorl.GRU(5, 7)(X[:, :0])
    assert (y.shape, h.shape) == ((6, 0, 7), (1, 0, 7))
