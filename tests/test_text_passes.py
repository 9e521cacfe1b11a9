"""What a step does beside products and layers: the kernels, on the host and on a GPU, give what plain torch gives."""

import math
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import emulation
from comparison import error
from whorl.engines.cuda import launch
from whorl.engines.cuda.compile import cubin, missing
from whorl.text import passes
from whorl.text.passes import Moved

BFLOAT16 = torch.finfo(torch.bfloat16).eps


@pytest.fixture(params=["plain torch", "on the host", pytest.param("on a GPU", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "on the host":
        if shutil.which("g++") is None:
            pytest.skip("needs g++")
        build = partial(emulation.compiled, architecture="", options=(), folder=folder)
        kept = {"Kernel": emulation.Kernel, "runs_kernels": lambda device: True, "_BLOCKS": 3}
        for name, value in kept.items():
            monkeypatch.setattr(passes, name, value)
        monkeypatch.setattr(passes.store, "kernel", lambda source, name, architecture: build(source, name))
        monkeypatch.setattr(launch, "_loaded", {})
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    return "cuda" if request.param == "on a GPU" else "cpu"


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("rows, tokens", [(1, 1), (3, 7), (5, 8), (2, 5003), (4, 10_000)])
def test_cross_entropy_is_that_of_torch_in_float64(device: str, rows: int, tokens: int) -> None:
    logits = drawn(rows, tokens, scale=5.0).to(device, torch.bfloat16).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    targets = torch.arange(rows, device=device) * 7 % tokens
    loss, truth = passes.cross_entropy(logits, targets), F.cross_entropy(exact, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(truth.item(), rel=1e-6, abs=1e-6)
    (loss * 3).backward()
    (truth * 3).backward()
    assert logits.grad is not None
    assert exact.grad is not None
    assert error(logits.grad, exact.grad) <= BFLOAT16


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tokens", [7, 16])
def test_a_logit_that_is_no_number_is_seen_in_the_loss(device: str, wrong: float, tokens: int) -> None:
    logits = drawn(2, tokens).to(device, torch.bfloat16)
    logits[1, 3] = wrong
    loss = passes.cross_entropy(logits, torch.zeros(2, dtype=torch.long, device=device))
    assert loss.isfinite() if wrong == -math.inf else loss.isnan()


@pytest.mark.parametrize("width, wide", [(1, 1), (5, 8), (300, 304)])
def test_rows_of_a_table(device: str, width: int, wide: int) -> None:
    table = drawn(11, width).to(device)
    tokens = torch.tensor([[3, 0], [10, 3]], device=device)
    got = passes.take(table, tokens, wide, torch.bfloat16)
    assert torch.equal(got[..., :width], table[tokens].to(torch.bfloat16))
    assert not got[..., width:].any()


@pytest.mark.parametrize("rows, width, wide", [(1, 1, 1), (13, 5, 8), (70, 300, 304), (523, 256, 256)])
def test_equal_rows_are_added_and_move_the_table_once(device: str, rows: int, width: int, wide: int) -> None:
    table = drawn(9, width).to(device)
    tokens = (torch.arange(rows, device=device) ** 2) % 9
    grads = drawn(rows, wide, seed=1).to(device, torch.bfloat16)
    truth = torch.zeros(9, width, dtype=torch.double).index_add_(0, tokens.cpu(), grads[:, :width].double().cpu())
    order = passes.order_rows(tokens)
    assert order.order.tolist() == tokens.argsort(stable=True).tolist()
    first = order.counts > 0
    sums = passes.sum_rows(grads, order, width, torch.float32)
    places = {int(token): place for place, token in reversed(list(enumerate(tokens.tolist())))}
    assert {place for place in range(rows) if first[place]} == set(places.values())
    for place in range(rows):
        expected = truth[tokens[place]] if first[place] else torch.zeros(width)
        assert torch.allclose(sums[place].double().cpu(), expected.double(), rtol=1e-5, atol=1e-5)
    moved = table.double().cpu() - 0.5 * truth
    passes.move_rows(table, tokens, sums, order, torch.tensor(0.5, device=device))
    assert error(table.cpu(), moved) <= 4 * torch.finfo(torch.float32).eps


SHAPES = [((1, 3, 5), (1, 3, 8)), ((4, 6, 8), (4, 8, 16)), ((1, 1, 7), (1, 1, 7)), ((4, 650, 12), (4, 656, 12))]


@pytest.mark.parametrize("count", [1, 4, 17])
def test_parameters_move_and_copies_follow(device: str, count: int) -> None:
    pairs, grads, truth, wholes = [], [], [], []
    for index in range(count):
        own, wide = SHAPES[index % len(SHAPES)]
        wholes.append(torch.full((5, *wide), 7.0, device=device, dtype=torch.bfloat16)[index % 3])  # not at the start
        inside = wholes[-1][:, : own[1], : own[2]]
        pairs.append(Moved(drawn(*own, seed=index).to(device), inside))
        grad = torch.full_like(wholes[-1], 9.0)
        grads.append(pairs[-1].within(grad))
        grads[-1].copy_(drawn(*own, seed=100 + index))
        truth.append(pairs[-1].own.double() - 0.25 * grads[-1].double())
    passes.move(pairs, grads, torch.tensor(0.25, device=device))
    for pair, moved, whole in zip(pairs, truth, wholes, strict=True):
        assert error(pair.own, moved) <= 2 * torch.finfo(torch.float32).eps
        assert torch.equal(pair.copy, pair.own.to(torch.bfloat16))
        assert (whole == 7).sum() >= whole.numel() - pair.own.numel()  # what is outside stays as it was
        pair.copy.fill_(7)
        assert (whole == 7).all()


@pytest.mark.parametrize("counts", [(1,), (7, 8, 100_003), (64, 20_000) * 45])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_squares(device: str, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [drawn(count, seed=count).to(device, dtype) for count in counts]
    tensors[-1] = drawn(counts[-1] + 1).to(device, dtype)[1:]  # at an odd place
    truth = sum(tensor.double().square().sum().item() for tensor in tensors)
    got = passes.squares(tensors)
    assert got.dtype == torch.float32
    assert got.sum().item() == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("rows, numbers, from_row, place", [(4, 120, 160, 0), (3, 1501, 1504, 8), (5, 64, 72, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_squares_of_rows(
    device: str, rows: int, numbers: int, from_row: int, place: int, dtype: torch.dtype
) -> None:
    whole = drawn(place + rows * from_row).to(device, dtype)
    part = whole.as_strided((rows, numbers), (from_row, 1), place)
    got = passes.squares([whole[:9], part])
    assert got.sum().item() == pytest.approx(
        (whole[:9].double().square().sum() + part.double().square().sum()).item(), rel=1e-5
    )


def test_a_tensor_of_squares_is_not_longer_than_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "runs_kernels", lambda device: True)
    with pytest.raises(AssertionError, match="by 32 bits"):
        passes.squares([torch.empty(1 << 17, 1 << 15, dtype=torch.bfloat16, device="meta")])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("most", [1e9, 2.5, math.nan])
def test_the_rate_falls_as_the_norm_is_too_large(device: str, count: int, most: float) -> None:
    parts = [(drawn(700 * index + 3, seed=index).abs().to(device), 1 + 3 * index) for index in range(count)]
    if math.isnan(most):  # a gradient that is no number is seen in the parameters
        parts[0][0][1], most = math.nan, 2.5
    norm = math.sqrt(sum(part.double().sum().item() / share for part, share in parts))
    rate = torch.tensor(0.75, device=device)
    passes.clip(rate, most, parts)
    if math.isnan(norm):
        assert rate.isnan()
    else:
        assert rate.item() == pytest.approx(0.75 * min(1.0, most / (norm + 1e-6)), rel=1e-6)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("kind", passes._LAYOUTS)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_kernels_compile_without_a_gpu(kind: str, architecture: str) -> None:
    assert cubin(passes.source(kind), kind, architecture).startswith(b"\x7fELF")
