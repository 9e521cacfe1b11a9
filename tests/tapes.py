"""Calls by tapes in an emulation: counted, and compared to the bit with calls through Python."""

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
