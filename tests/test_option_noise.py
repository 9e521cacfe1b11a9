"""What layers draw at random: the counters, the chances, and that a draw depends on nothing that it should not."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import whorl
from comparison import EXACT, error, flat, weighted
from draws import philox
from option_cases import LAYER, Case
from whorl import noise

KINDS = ("LSTM", "GRU", "RNN")
BOTH = {"num_layers": 2, "bidirectional": True}
ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES,) * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
"""Counter, key and words: the known answers of Random123."""
COUNTED = [name for name in LAYER if name.split()[0] in ("recurrent_dropout", "input_dropout", "zoneout")]
"""Rows that are drawn by counting."""
DRAWN = [*COUNTED, "weight_drop", "dropout"]
SEEN = [name for name in DRAWN if name != "zoneout of h"]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox(counter, key)) == words
    seed = torch.tensor(np.array(key[0] | key[1] << 32, np.uint64).astype(np.int64))
    unit, step, row = (torch.tensor(word) for word in counter[:3])
    assert " ".join(f"{int(word):08x}" for word in noise.words(seed, unit, step, row, counter[3])) == words


def test_words_are_those_of_numpy_at_any_counter() -> None:
    given = np.random.default_rng(0)
    for seed in (*given.integers(0, 2**63, 20).tolist(), 0, 2**63 - 1):
        unit, step, row = given.integers(0, 2**32, (3, 50))
        tag = noise.tag(*(int(given.integers(0, top)) for top in (4, 50, 2)))
        ours = noise.words(torch.tensor(seed), *(torch.from_numpy(part) for part in (unit, step, row)), tag)
        theirs = philox((unit, step, row, tag), (seed % 2**32, seed >> 32))
        assert all(np.array_equal(a.numpy(), b.astype(np.int64)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("count, units", [(1, 4), (2, 2), (3, 1), (4, 1)])
@pytest.mark.parametrize("width", [1, 4, 13])
def test_neighbouring_units_share_a_counter_but_no_word(width: int, count: int, units: int) -> None:
    step, row = torch.arange(3)[:, None, None], torch.arange(2)[:, None]
    ours = torch.stack(noise.drawn(torch.tensor(5), count, width, step, row, 7), -1)
    assert ours.shape == (3, 2, width, count)
    for unit in range(width):
        theirs = torch.from_numpy(
            np.stack(philox((unit // units, step.numpy(), row.numpy(), 7), (5, 0)), -1).astype(int)
        )
        assert torch.equal(ours[:, :, unit], theirs[..., 0, unit % units * count :][..., :count])
    assert len(ours.unique()) == ours.numel()


# --- chances ----------------------------------------------------------------------------------------------------------

UNITS, ROWS, STEPS = 40, 25, 20


def _bare(dtype: torch.dtype, **options: Any) -> torch.nn.Module:
    """An RNN without weights and activation, for the test to give it those through which a mask is seen."""
    layer = whorl.RNN(UNITS, UNITS, activation="linear", dtype=dtype, **options)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.zero_()
    torch.manual_seed(1)
    return layer


def _seen(name: str, p: float, training: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """What the mask of an option multiplied ones with, or 1 where zoneout kept."""
    eye, ones = torch.eye(UNITS, dtype=dtype), torch.ones(1, ROWS, UNITS, dtype=dtype)
    nothing = torch.zeros(STEPS, ROWS, UNITS, dtype=dtype)
    option, _, mode = name.partition(" ")
    given: dict[str, Any] = {option: p}
    if option == "recurrent_dropout":
        given |= {"recurrent_dropout_mode": mode or "gate"}
    layer = _bare(dtype, **given, num_layers=1 + (option == "dropout")).train(training)
    with torch.no_grad():
        if option == "dropout":
            layer.bias_ih_l0.fill_(1.0)
            layer.weight_ih_l1.copy_(eye)
            return layer(nothing)[0]
        if option == "input_dropout":
            layer.weight_ih_l0.copy_(eye)
            return layer(nothing + 1)[0][0]
        if option == "weight_drop":
            layer.weight_hh_l0.fill_(1.0)
            return layer(nothing[:1, :1].expand(1, UNITS, UNITS), eye[None])[0][0]
        if option == "recurrent_dropout":
            layer.weight_hh_l0.copy_(eye)
            if mode == "step":  # each step begins with ones
                resets = torch.ones(STEPS, ROWS, dtype=torch.bool)
                return layer(nothing, ones, reset=resets, reset_to=ones)[0]
            return layer(nothing[:1], ones)[0][0]
        resets = torch.ones(STEPS, ROWS, dtype=torch.bool)
        return layer(nothing, ones, reset=resets, reset_to=ones)[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.85])
@pytest.mark.parametrize("name", SEEN)
def test_chances_lie_within_five_sigma(name: str, p: float) -> None:
    seen = _seen(name, p)
    if name == "zoneout":
        assert set(seen.unique().tolist()) == {0.0, 1.0}
        events = seen
    else:
        assert seen.unique().tolist() == [0.0, 1 / (1 - p)]
        events = seen == 0
    count = events.numel()
    assert count >= 1000
    assert abs(events.sum().item() - count * p) <= 5 * (count * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("name", SEEN)
def test_a_chance_of_one_is_always_and_of_zero_never(name: str) -> None:
    always, never = _seen(name, 1.0), _seen(name, 0.0)
    assert torch.equal(always, torch.full_like(always, float(name == "zoneout")))
    assert torch.equal(never, torch.full_like(never, float(name != "zoneout")))


def test_zoneout_in_eval_is_the_expectation() -> None:
    assert torch.equal(_seen("zoneout", 0.25, training=False), torch.full((STEPS, ROWS, UNITS), 0.25).double())


@pytest.mark.parametrize("p", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAWN)
def test_a_chance_of_one_and_zero_has_right_gradients(name: str, p: float) -> None:
    option = name.split()[0]
    given = {option: {"h": p} if name == "zoneout of h" else p}
    mode = {"recurrent_dropout_mode": name.split()[1]} if option == "recurrent_dropout" and " " in name else {}
    case = Case("GRU", [], BOTH | given | mode)
    got, truth = case.of_layer(), case.of_loop()
    assert {key: e for key in truth if not (e := error(got[key], truth[key])) <= EXACT} == {}


# --- what a draw depends on -------------------------------------------------------------------------------------------


def _everything(kind: str, rows: list[str], **more: Any) -> tuple[Case, torch.nn.Module]:
    case = Case(kind, rows, BOTH, time=5, batch=6, **more)
    return case, case.layer()


def _after(seed: int, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(seed)
    return flat(layer(*args, **kwargs))


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_draw_and_another_another(kind: str, name: str) -> None:
    case, layer = _everything(kind, [name])
    x = case.tensors()["x"]
    first = _after(1, layer, x)
    assert all(torch.equal(a, b) for a, b in zip(_after(1, layer, x), first, strict=True))
    assert not torch.equal(_after(2, layer, x)[0], first[0])
    assert not torch.equal(layer(x)[0], layer(x)[0]), "each call draws anew"


@pytest.mark.parametrize("mode", ["recurrent_dropout", "recurrent_dropout shared", "recurrent_dropout step"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_draw_depends_on_no_other_row(kind: str, mode: str) -> None:
    """In a larger batch, among sequences of other lengths, padded, packed in the order given or sorted."""
    case, layer = _everything(kind, [mode, "input_dropout", "zoneout"])
    x, lengths = case.tensors()["x"], [2, 5, 1, 4, 3, 5]
    alone = _after(1, layer, x[:, :3], lengths=lengths[:3])
    for many in (x, torch.cat([x, x, x], 1)):
        among = _after(1, layer, many, lengths=(lengths * 3)[: many.shape[1]])
        assert all(error(a[:, :3], b.detach()) <= EXACT for a, b in zip(among, alone, strict=True))
    other = x.clone()
    other[:, 3:] = 0.0
    assert all(
        torch.equal(a[:, :3], b[:, :3])
        for a, b in zip(_after(1, layer, x, lengths=lengths), _after(1, layer, other, lengths=lengths), strict=True)
    )
    torch.manual_seed(1)
    y, finals = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    packed = [pad_packed_sequence(y)[0], *flat(finals)]
    padded = _after(1, layer, x, lengths=lengths)
    assert all(error(a, b.detach()) <= EXACT for a, b in zip(packed, padded, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in SEEN if name in COUNTED])
def test_every_dtype_draws_the_same(name: str, dtype: torch.dtype) -> None:
    assert torch.equal(_seen(name, 0.4, dtype=dtype) != 0, _seen(name, 0.4) != 0)


@pytest.mark.parametrize("block", [1, 40])
@pytest.mark.parametrize("layout", ["time first", "unsorted"])
def test_draws_do_not_depend_on_how_many_are_made_at_a_time(
    layout: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "_BLOCK", block)
    Case("LSTM", ["zoneout", "recurrent_dropout step"], BOTH, layout, time=7).check()


@pytest.mark.parametrize("memory", ["save", "recompute"])
@pytest.mark.parametrize("name", DRAWN)
def test_backward_knows_what_forward_drew(name: str, memory: str) -> None:
    """Though torch's generator has moved since, and twice from one graph."""
    case = Case("LSTM", [name], BOTH | {"memory": memory}, time=5)
    truth = case.of_loop()
    layer, x = case.layer(), case.tensors()["x"].requires_grad_()
    hx = tuple(case.tensors()[f"hx {state}"] for state in "hc")
    loss = weighted(_after(7, layer, x, hx))
    torch.manual_seed(99)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    assert error(first, truth["grad of x"]) <= EXACT
    torch.rand(3)
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    assert error(layer.weight_hh_l1.grad, 2 * truth["grad of weight_hh_l1"]) <= EXACT


@pytest.mark.parametrize("name", DRAWN)
def test_a_checkpoint_draws_again_what_it_drew(name: str) -> None:
    case, layer = _everything("GRU", [name])
    x = case.tensors()["x"].requires_grad_()
    grads = []
    for run in (lambda: layer(x)[0], lambda: checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)):
        torch.manual_seed(3)
        grads.append(torch.autograd.grad(run().square().sum(), [x, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# --- what moves torch's generator -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_eval_draws_nothing(name: str) -> None:
    case, layer = _everything("LSTM", [name])
    layer.eval()
    x, begin = case.tensors()["x"], torch.get_rng_state()
    first, again = layer(x)[0], layer(x)[0]
    assert torch.equal(torch.get_rng_state(), begin)
    assert torch.equal(first, again)
    if not name.startswith("zoneout"):
        assert torch.equal(first, Case("LSTM", [], BOTH, time=5, batch=6).layer()(x)[0])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", DRAWN)
def test_a_plan_and_an_explanation_draw_nothing(name: str) -> None:
    case, layer = _everything("LSTM", [name])
    x, begin = case.tensors()["x"], torch.get_rng_state()
    layer.plan(x)
    assert whorl.explain(layer, x).plans[0].engine == "reference"
    assert torch.equal(torch.get_rng_state(), begin)


@pytest.mark.parametrize("rows", [[name] for name in COUNTED] + [["recurrent_dropout", "input_dropout", "zoneout"]])
def test_all_that_is_counted_takes_one_number(rows: list[str]) -> None:
    """So that what else a program draws does not depend on sizes."""
    case, layer = _everything("LSTM", rows)
    x = case.tensors()["x"]
    _after(1, layer, x)
    after = torch.rand(3)
    torch.manual_seed(1)
    torch.randint(2**63 - 1, ())
    assert torch.equal(torch.rand(3), after)


def test_layers_without_chances_draw_nothing_in_training() -> None:
    x, begin = torch.randn(3, 2, 4), torch.get_rng_state()
    layer = whorl.LSTM(4, 5, zoneout={"h": 0.0}, clip=1.0, layer_norm=True)
    begin = torch.get_rng_state()
    layer(x)
    assert torch.equal(torch.get_rng_state(), begin)
