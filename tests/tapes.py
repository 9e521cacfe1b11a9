"""Calls by tapes in an emulation: counted, and compared to the bit with calls through Python."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from emulation import emulated
from whorl.engines import taped

X = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.fixture
def counted(folder: Path) -> Iterator[list[int]]:
    """An emulation in which calls go by tapes, and memory is full of NaN before it is written; the calls that did."""
    made: list[int] = []
    torch.use_deterministic_algorithms(True)
    with emulated(folder) as patch:
        if taped._run is None:
            taped._run = taped.loaded()
        patch.setattr(taped, "ready", lambda: True)
        for name in ("_run", "_run_like"):
            patch.setattr(taped, name, counting(getattr(taped, name), made))
        yield made
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls go by tapes on a GPU; those that did."""
    assert taped.finish() == ""
    made: list[int] = []
    for name in ("_run", "_run_like"):
        monkeypatch.setattr(taped, name, counting(getattr(taped, name), made))
    return made


@pytest.fixture
def layer() -> torch.nn.Module:
    torch.manual_seed(2)
    return whorl.LSTM(16, 16, dtype=torch.bfloat16, engine="persistent")


def counting(real: Callable[..., list[Tensor]], made: list[int]) -> Callable[..., list[Tensor]]:
    """The same, which adds to `made` the plan of each call that it takes."""

    def run(number: int, *given: Any) -> list[Tensor]:
        found = real(number, *given)
        made.extend([number] * bool(found))
        return found

    return run


def both_ways(call: Callable[[], list[Tensor]], counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits by tapes and through Python."""
    before = len(counted)
    by_tape = call()
    assert len(counted) > before
    with monkeypatch.context() as patch:
        patch.setattr(taped, "ready", lambda: False)
        by_python = call()
    assert len(by_tape) == len(by_python)
    for one, other in zip(by_tape, by_python, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


def gradients_of_gradients(
    layer: torch.nn.Module, like: Tensor, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of Python, and announced."""

    def twice() -> list[Tensor]:
        x = like.clone().requires_grad_()
        (to_x,) = torch.autograd.grad(layer(x)[0].float().square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(to_x.float().square().sum(), [x, *layer.parameters()]))

    with pytest.raises(whorl.SlowError, match="double backward"), whorl.settings(slow="error"):
        twice()
    with whorl.settings(slow="allow"):  # of a block, which is known in backward
        both_ways(twice, counted, monkeypatch)


def seen_by_hooks(layer: torch.nn.Module, x: Tensor, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of saved tensors see what forward keeps, by both ways."""
    seen: list[Tensor] = []

    def call() -> list[Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
            return trained(layer, x)

    both_ways(call, counted, monkeypatch)
    assert sum(tensor.dtype == torch.uint8 for tensor in seen) == 2


def by_threads(layer: torch.nn.Module, x: Tensor) -> None:
    """Threads that call at once get the same."""
    want, found = trained(layer, x), list[list[Tensor]]()
    threads = [threading.Thread(target=lambda: found.append(trained(layer, x))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, want, strict=True))


def trained(
    layer: torch.nn.Module, x: Tensor, hx: Any = None, loss: Callable[..., Tensor] | None = None, **more: Any
) -> list[Tensor]:
    """Output, final states, and the gradient of everything."""
    leaf = x.detach().requires_grad_()
    states = () if hx is None else hx if isinstance(hx, tuple) else (hx,)
    starts = [state.detach().requires_grad_() for state in states]
    given = None if hx is None else tuple(starts) if isinstance(hx, tuple) else starts[0]
    y, finals = layer(leaf, given, **more)
    finals = finals if isinstance(finals, tuple) else (finals,)
    total = sum((out.float() ** 2).sum() for out in (y, *finals)) if loss is None else loss(y, *finals)
    grads = torch.autograd.grad(total, [leaf, *starts, *layer.parameters()])
    return [y.detach(), *(final.detach() for final in finals), *grads]
