"""Options of layers and calls on an NVIDIA GPU: the numbers of the CPU, and no wait of the host for the device."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import whorl
from comparison import flat
from whorl.cells import library

pytestmark = pytest.mark.gpu
TIME, BATCH, INPUTS, UNITS = 6, 4, 5, 7
LAYERS = {
    "LSTM": lambda: whorl.LSTM(INPUTS, UNITS, 2, bidirectional=True, dtype=torch.float64),
    "LSTM with options": lambda: whorl.LSTM(
        INPUTS, UNITS, 2, bidirectional=True, proj_size=3, dtype=torch.float64, recurrent_dropout=0.3, zoneout=0.2,
        input_dropout=0.2, layer_norm=True, peephole=True, clip={"c": 0.5},
    ),
    "GRU, dropout anew at each step": lambda: whorl.GRU(
        INPUTS, UNITS, dtype=torch.float64, recurrent_dropout=0.3, recurrent_dropout_mode="step", reset_after=False
    ),
    "sLSTM": lambda: whorl.Recurrent(library.slstm, INPUTS, UNITS, 2, dtype=torch.float64, recurrent_dropout=0.2),
    "recomputed": lambda: whorl.LSTM(INPUTS, UNITS, 2, dtype=torch.float64, memory="recompute"),
}  # fmt: skip
CALLS = {
    "plain": {},
    "lengths": dict(lengths=torch.tensor([6, 0, 3, 1])),
    "mask and resets": dict(mask=torch.arange(24).reshape(6, 4) % 3 > 0, reset=torch.arange(24).reshape(6, 4) % 4 == 0),
    "states": dict(return_states=True, lengths=torch.tensor([6, 0, 3, 1])),
}


def results(layer: torch.nn.Module, x: Any, options: dict[str, Any], seed: Tensor, where: str) -> list[Tensor]:
    """Outputs and gradients of a call in which `seed` is what torch's generator gives."""
    layer = layer.to(where).requires_grad_()
    layer.zero_grad()
    x = x.to(where).requires_grad_() if isinstance(x, Tensor) else x.to(where)
    given = {name: value.to(where) if isinstance(value, Tensor) else value for name, value in options.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", lambda *_, device, **__: seed.to(device))
        outputs = flat([*(out if not isinstance(out, dict) else list(out.values()) for out in layer(x, **given))])
    sum((out * torch.linspace(-1, 1, out.numel(), device=where).view_as(out)).sum() for out in outputs).backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    return [tensor.detach().cpu().clone() for tensor in (*outputs, *grads)]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layer", LAYERS)
def test_the_gpu_gives_what_the_cpu_gives_and_draws_what_it_draws(layer: str, call: str) -> None:
    made, x, seed = LAYERS[layer](), torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64), torch.tensor(2**62 + 12345)
    truth = results(made, x.clone(), CALLS[call], seed, "cpu")
    got = results(made, x.clone(), CALLS[call], seed, "cuda")
    for mine, true in zip(got, truth, strict=True):
        assert (mine - true).norm() <= 1e-12 * true.norm()


def test_packed_resets_on_the_gpu() -> None:
    made, lengths = LAYERS["LSTM"](), [2, 6, 1, 4]
    x = pack_padded_sequence(torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64), lengths, enforce_sorted=False)
    reset = pack_padded_sequence(CALLS["mask and resets"]["reset"], lengths, enforce_sorted=False)
    truth = flat(made(x, reset=reset))
    got = flat(made.cuda()(x.to("cuda"), reset=reset.to("cuda")))
    for mine, true in zip(got, truth, strict=True):
        assert (mine.cpu() - true).norm() <= 1e-12 * true.norm()


@pytest.mark.parametrize("layer", LAYERS)
def test_the_host_does_not_wait(layer: str) -> None:
    made = LAYERS[layer]().cuda()
    x = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64, device="cuda", requires_grad=True)
    given = {name: value.cuda() for name, value in (CALLS["mask and resets"] | CALLS["lengths"]).items()}
    made(x, **given)  # first calls allocate
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = flat([*made(x, **given)])
        torch.stack([out.sum() for out in outputs]).sum().backward()
        made(x, lengths=[6, 0, 3, 1])  # from the host
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_longer_than_time_are_cut() -> None:
    made, x = LAYERS["LSTM"]().cuda(), torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64, device="cuda")
    cut, whole = made(x, lengths=torch.tensor([99, 6, -3, 2], device="cuda")), made(x, lengths=[6, 6, 0, 2])
    assert all(torch.equal(a, b) for a, b in zip(flat(cut), flat(whole), strict=True))


def test_cudnn_runs_where_an_option_is_not_active() -> None:
    made = whorl.LSTM(5, 7, recurrent_dropout=0.5, engine="cudnn", device="cuda")
    x = torch.randn(3, 2, 5, device="cuda")
    with pytest.raises(whorl.UnsupportedError, match="recurrent dropout"):
        made.plan(x)
    assert made.eval().plan(x).engine == "cudnn"
