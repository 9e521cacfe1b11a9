"""Options on the kernels of engine `persistent`, run on the host by `emulation`: numbers of `reference` in float64."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import option_draws
import whorl
from comparison import broken, error, flat, weighted
from emulation import CHIP, H200, emulated
from option_draws import Drawn, drawn
from test_emulated import spread_thinly
from thinned import thinned
from whorl.bench.baseline import TF32_EPS
from whorl.engines.cuda import aligned, entering, grid, spreading, tiling
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Size, Tile

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.mark.parametrize("seed", range(8))
def test_random_options(seed: int, folder: Path) -> None:
    case = drawn(seed, largest=20, batch=12)
    print(case)
    with emulated(folder):
        assert case.errors("cpu", (torch.float16, torch.bfloat16, torch.float32)[seed % 3]) == {}


@pytest.mark.parametrize("seed", range(8))
def test_random_options_of_a_step_with_a_product_inside(seed: int, folder: Path) -> None:
    case = replace(drawn(40 + seed, largest=40, batch=20), kind="GRU", arguments=dict(reset_after=False))
    print(case)
    with emulated(folder):
        assert case.errors("cpu", (torch.float16, torch.bfloat16, torch.float32)[seed % 3]) == {}


@pytest.mark.parametrize("seed", range(10))
def test_random_options_of_a_layer_with_a_projection(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster, or where blocks exchange through L2; there with TF32 products too, backward of float16."""
    if seed >= 8:
        spread_thinly(monkeypatch, 1 + seed % 2)
    case, tf32 = replace(drawn(80 + seed, largest=40, batch=20), kind="LSTM"), seed >= 12
    case = replace(case, units=case.units + 1, arguments=dict(proj_size=1 + seed * 7 % case.units))
    print(case)
    dtype = torch.float32 if tf32 else (torch.float16, torch.bfloat16, torch.float32)[seed % 3]
    with emulated(folder, tf32=tf32):
        assert case.errors("cpu", dtype, tf32) == {}


@pytest.mark.parametrize(
    "kind, units, batch, on, dtype",
    [
        ("LSTM", 16, 3, "step", torch.bfloat16),
        ("LSTM", 40, 20, "zoneout step", torch.bfloat16),
        ("GRU", 37, 9, "zoneout", torch.float32),
        ("RNN", 24, 9, "zoneout step reset mask", torch.float16),
        ("LSTM", 13, 6, "zoneout step packed", torch.bfloat16),  # sequences are counted in another order
    ],
)
def test_what_is_drawn_anew_at_each_step(
    kind: str, units: int, batch: int, on: str, dtype: torch.dtype, folder: Path
) -> None:
    case = Drawn(kind, frozenset(on.split()), units, batch, 4, directions=2, seed=2)
    with emulated(folder):
        assert case.errors("cpu", dtype) == {}


@pytest.mark.parametrize("mode", ["gate", "shared", "step"])
def test_what_needs_no_gradient_is_not_computed_and_changes_no_other(mode: str, folder: Path) -> None:
    torch.manual_seed(1)
    layer = whorl.LSTM(8, 16, 2, recurrent_dropout_mode=mode, engine="persistent")
    by_mode = {"gate": (4, 3, 16), "shared": (3, 16), "step": (5, 3, 16)}
    shapes = {
        "recurrent_dropout": [by_mode[mode]] * 2, "input_dropout": [(3, 8), (3, 16)], "zoneout_h": [(5, 3, 16)] * 2,
        "dropout": [(5, 3, 16)],
    }  # fmt: skip
    masks = {name: [torch.rand(shape) for shape in own] for name, own in shapes.items()}
    x, counts, found = torch.randn(5, 3, 8), [], []
    with emulated(folder) as patch:
        for module in (aligned, entering):
            real = module.product
            patch.setattr(module, "product", lambda *args, real=real, **how: counts.append(1) or real(*args, **how))
        for wanted in (True, False):
            for tensor in (x, *(mask for own in masks.values() for mask in own)):
                tensor.requires_grad_(wanted)
            loss = weighted(flat(layer(x, dropout_masks=masks)))
            counts.clear()
            found.append((torch.autograd.grad(loss, list(layer.parameters())), len(counts)))
    (first, most), (second, least) = found
    for got, truth in zip(second, first, strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=0)
    assert least < most


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inputs, units", [(8, 16), (4, 24), (3, 12)])
def test_whole_tensors_behind_masks(inputs: int, units: int, packed: bool, folder: Path) -> None:
    """16 bytes at a time, where a row has so many, and element by element."""
    on = frozenset({"gate", "input_dropout", *(["packed"] if packed else ["lengths", "mask"])})
    case = Drawn("LSTM", on, units, 9, 3, 2, inputs=inputs, seed=1)
    with emulated(folder):
        for dtype in (torch.bfloat16, torch.float32):
            assert case.errors("cpu", dtype) == {}


@pytest.mark.parametrize("seed", range(12))
def test_random_options_where_blocks_exchange(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As layers that no cluster holds: small ones, in one part or two of a block, in several launches."""
    tiles, subs = ((1, 1), (2, 1), (1, 2))[seed % 3]

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        if way == "forward":
            return spreading.forward(size, 16, tiles, subs, 8, 1 + seed % 2, chip.shared)
        return spreading.backward(size, 16, 1 + seed % 2, tiles, subs, 8, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)
    monkeypatch.setattr(Spread, "parts", lambda *_: 1)
    case = drawn(seed, largest=40, batch=20)
    print(case)
    with emulated(folder):
        assert case.errors("cpu", (torch.float16, torch.bfloat16, torch.float32, torch.bfloat16)[seed % 4]) == {}


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("on", ["mask", "zoneout", "reset_to", "masks"])
def test_states_of_any_size_that_options_keep_or_make_are_as_good_as_others(
    on: str, spread: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TF32 products they are scaled by one number for each sequence and all its steps."""
    if spread:
        spread_thinly(monkeypatch, 1)
    else:
        monkeypatch.setattr(grid, "choose", lambda size, *_: tiling.forward(size, 2, 1, 2, CHIP.shared))
    torch.manual_seed(1)
    layer = whorl.LSTM(6, 40, bias=False, zoneout={"h": 0.5} if on == "zoneout" else 0.0)
    with torch.no_grad():
        layer.weight_hh_l0 *= 2.0**-15
    each = 2.0 ** torch.arange(0, 21, 4)[:, None]
    x, large, c = torch.randn(5, 6, 6), each * torch.randn(1, 6, 40), torch.randn(1, 6, 40)
    mask, reset = torch.ones(2, 5, 6, dtype=torch.bool)
    mask[:2], reset[:3], reset[4:] = False, False, False

    def output(dtype: torch.dtype, engine: str) -> Tensor:
        own = layer.to(dtype)
        own.engine = engine
        given: dict[str, Any] = {"hx": (large.to(dtype), c.to(dtype))}
        if on == "mask":
            given["mask"] = mask
        if on == "reset_to":
            given = {"reset": reset, "reset_to": given["hx"]}
        if on == "masks":  # a state of at most 1 that is multiplied
            given = {"dropout_masks": {"recurrent_dropout": [large[0].to(dtype)]}}
        torch.manual_seed(2)
        with emulated(folder, tf32=True), torch.no_grad():
            return own(x.to(dtype), **given)[0].double()

    layer.recurrent_dropout_mode = "shared"
    got, truth = output(torch.float32, "persistent"), output(torch.float64, "reference")
    assert max(error(got[:, b], truth[:, b]) for b in range(6)) <= 4 * TF32_EPS


@pytest.mark.parametrize("what, way", thinned(
    2,
    [  # what keeps a state that was given, multiplies what enters the product, or says what of it counts
        ("LSTM", "lengths mask initial", {}),
        ("LSTM", "packed reset_to initial states", {}),
        ("LSTM", "lengths step zoneout initial", {}),
        ("LSTM", "gate mask reset", {}),
        ("LSTM", "shared given initial", {}),
        ("LSTM", "step given zoneout reset_to", {}),  # of any size
        ("LSTM", "gate given", {}),  # products are of TF32 itself
        ("GRU", "shared lengths zoneout", dict(clip=3.0)),
        ("GRU", "gate reset reset_to initial", {}),
        ("timed_lstm", "lengths reset initial", dict(clip={"h": 0.7})),
        ("LSTM", "lengths mask reset_to initial", dict(activation="softplus")),  # states of any size
        ("LSTM", "gate packed", dict(activation="relu")),
        ("RNN", "step reset", dict(nonlinearity="relu")),
    ],
    [(False, 1, 1), (False, 2, 2), (True, 0, 0)],
))  # fmt: skip
def test_options_where_tf32_is_multiplied_as_float16(
    what: tuple[str, str, dict[str, Any]], way: tuple[bool, int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kind, on, arguments), (spread, splits, subs) = what, way
    made: dict[str, bool] = {}
    wide = "lengths" in on and not arguments.keys() & {"activation", "nonlinearity"}  # four warps multiply together

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Tile | Spread | None:
        tile: Tile | Spread | None
        if not spread:
            if way == "forward":
                tile = tiling.forward(size, 2, 2, 2, chip.shared, subs=subs, pointwise=2 * (subs > 1))
            else:
                tile = tiling.backward(size, 2, 2, 4 * splits, chip.shared, splits=splits)
        elif way == "forward":
            tile = spreading.forward(size, 16, 1, 2, 8, 4 if wide else 2, chip.shared, wide=wide)
        else:
            tile = spreading.backward(size, 16, 2, 2, 1, 8, chip.shared, wide=wide)
        assert tile is not None
        made[way] = tile.halves
        return tile

    monkeypatch.setattr(grid, "choose", chosen)
    case = Drawn(kind, frozenset(on.split()), 40, 19, 5, seed=1, arguments=arguments)
    with emulated(folder, tf32=True):
        assert case.errors("cpu", torch.float32, tf32=True) == {}
    assert made == dict.fromkeys(("forward", "backward"), not ("given" in on and "gate" in on))


@pytest.mark.parametrize(
    "kind, units, ahead, back, dtype, given",
    [
        ("LSTM", 70, (32, 2, 1, 8, 2), (32, 2, 1, 2, 8), torch.bfloat16, False),  # a warp has gates of its own
        ("LSTM", 37, (16, 1, 2, 8, 4), (16, 2, 2, 1, 8), torch.bfloat16, True),
        ("GRU", 70, (32, 1, 1, 8, 2), (32, 1, 1, 2, 8), torch.float16, False),  # two warps share a gate
        ("GRU", 37, (16, 1, 1, 8, 2), (16, 1, 1, 3, 8), torch.float32, True),  # a strip past the last gate
        ("GRU", 37, (24, 1, 1, 8, 1), (24, 1, 1, 1, 8), torch.float32, False),  # strips with rows of two gates
        ("LSTM", 37, (8, 2, 1, 8, 1), (8, 1, 1, 4, 8), torch.float32, True),
    ],
)
def test_masks_by_gate_where_blocks_exchange(
    kind: str, units: int, ahead: tuple[int, ...], back: tuple[int, ...], dtype: torch.dtype, given: bool,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        own, make = (ahead, spreading.forward) if way == "forward" else (back, spreading.backward)
        return make(size, *own, chip.shared)

    monkeypatch.setattr(grid, "choose", chosen)
    case = Drawn(kind, frozenset({"gate", *(["given"] if given else [])}), units, 19, 3, seed=1)
    with emulated(folder):
        assert case.errors("cpu", dtype) == {}


def test_values_beside_a_kink_are_held_to_the_rule_over_several_draws(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this call some new states are 0.5, where they are clipped, to less than an eps."""
    case = drawn(97, largest=60, time=12)
    with emulated(folder):
        layer, (tensors, marks) = case.layer("cpu", torch.float16), case.call("cpu", torch.float16)
        assert broken([case._measured(layer, tensors, marks, torch.float16)], torch.finfo(torch.float16).eps)
        assert case.errors("cpu", torch.float16) == {}
        real = case.results
        wrong = {"persistent": 1.05}

        def with_a_fault(layer: torch.nn.Module, *rest: Any) -> dict[str, Tensor]:
            return {name: wrong.get(layer.engine, 1.0) * value for name, value in real(layer, *rest).items()}

        monkeypatch.setattr(case, "results", with_a_fault)
        monkeypatch.setattr(option_draws, "_NEAR", 3)
        assert "output 0" in case.errors("cpu", torch.float16)


@pytest.mark.parametrize("seed, dtype", [(8, torch.float32), (140, torch.float32), (144, torch.bfloat16)])
def test_random_options_are_drawn_up_to_what_the_engine_holds(seed: int, dtype: torch.dtype) -> None:
    case = drawn(seed, largest=300)
    largest = replace(case, units=5_000).within(H200, dtype)
    assert 256 <= largest.units < 5_000
    assert largest.within(H200, dtype).units == largest.units
    assert replace(case, units=5).within(H200, dtype).units == 5
