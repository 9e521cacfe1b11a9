"""Steps with means where a block has whole sequences (kernels/whole_forward.cu, whole_backward.cu), by `emulation`."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import emulation
import whorl
from anew import with_tiles
from comparison import broken, error
from emulation import emulated
from engine_cases import CELLS as OF_ENGINES
from engine_cases import WRAPPED, Case, assert_agrees, in_dtype
from test_machine_code import disassembled, needs_tools
from test_staged import A100, H200, STAGED, assert_near_in_tf32, needs_compiler
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, source, staging
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Size, Tile
from whorl.functional import recurrent


@whorl.cell(gates="a b", states="h c")
def in_turn(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """Means of what other means are in, with a condition; one gate is in a mean alone."""
    a = r.a - whorl.mean(r.a * x.b)
    middle = whorl.mean([a * a, whorl.where(x.a > 0, 0.5 * r.b, s.c)])
    c = whorl.tanh(a * middle + x.b)
    return dict(h=whorl.tanh(c - whorl.mean(c) + x.a) * whorl.sigmoid(a), c=c)


@whorl.cell(gates="a b", states="h c")
def of_the_second(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A mean of which one gradient is that of the second state alone, which backward knows before the first one's."""
    m = whorl.mean(x.b * r.a)
    h = whorl.tanh(m * s.c) + whorl.sigmoid(x.a + r.a + x.b) * r.a
    return dict(h=h, c=whorl.mean(m * m) + 0.1 * r.a * r.b)


@whorl.cell(gates="a b c d e", states="h c")
def five_gates(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """More than one piece of 16 bytes holds the results, and the gradients, of a unit."""
    a = x.a + r.a - whorl.mean([r.b, r.c])
    c = whorl.sigmoid(a) * s.c + whorl.tanh(x.b + r.b) * whorl.sigmoid(x.e + r.e)
    return dict(h=whorl.tanh(c + r.d * x.d) * whorl.sigmoid(r.c), c=c)


@whorl.cell(gates="a b", states="h")
def jumping(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A mean that is 3,000 at one step and -3,000 at another, of values that are near it, and one of equal values."""
    level = whorl.mean(x.b)
    (a,) = wrappers.normal([x.a + r.a + whorl.where(level > 0, 3000.0, -3000.0)])
    (equal,) = wrappers.normal([level])
    return dict(h=whorl.tanh(a + equal + r.b))


@whorl.cell(gates="a b", states="h")
def mending(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """What is not a number is 0 in the next step."""
    (a,) = wrappers.normal([x.a + r.a])
    h = whorl.tanh(a + r.b + x.b)
    return dict(h=whorl.where(h > -2, h, 0.0))


LSTM = STAGED["layer norm of r and c"]
CELLS = {
    "layer norm of r and c": LSTM,
    "every option of LSTM": WRAPPED["every option of LSTM"],
    "layer_norm_lstm": OF_ENGINES["layer_norm_lstm"],
    "in_turn": in_turn.graph,
    "five gates": five_gates.graph,
    "three gates": wrappers.layer_norm(library.gru.graph, ("r",))[0],
    "one gate": wrappers.layer_norm(library.rnn_tanh.graph, ("r",))[0],
}
SHORT = CELLS | {"of the second": of_the_second.graph}
"""And one whose gradients grow so fast that after nine steps `reference` in bfloat16 is half of them off."""
TILES = [
    ("layer norm of r and c", 4, 1, 2, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("layer norm of r and c", 2, 1, 1, Case(dict(bias=False), time=1, batch=1, units=32), torch.bfloat16),
    ("layer norm of r and c", 4, 2, 2, Case(dict(directions=2), time=5, batch=7, units=60), torch.float16),
    ("layer norm of r and c", 2, 1, 2, Case(initial=False, time=6, batch=5, units=33), torch.float16),
    ("every option of LSTM", 4, 1, 1, Case(dict(directions=2), time=4, batch=9, units=37), torch.bfloat16),
    ("every option of LSTM", 8, 1, 4, Case(dict(layers=2), time=3, batch=5, units=130), torch.float16),
    ("layer_norm_lstm", 2, 1, 2, Case(dict(layers=2), time=6, batch=6, units=50), torch.float16),
    ("in_turn", 2, 1, 2, Case(dict(directions=2), time=5, batch=6, units=50), torch.float16),
    ("three gates", 4, 1, 2, Case(dict(directions=2), time=4, batch=6, units=70), torch.bfloat16),
    ("one gate", 4, 1, 2, Case(dict(layers=2), time=5, batch=9, units=45), torch.float16),
    ("five gates", 4, 1, 2, Case(dict(directions=2), time=4, batch=9, units=70), torch.bfloat16),
    # two sequences of a block, of some one
    ("layer norm of r and c", 8, 2, 2, Case(time=4, batch=13, units=60), torch.bfloat16),
    # blocks, and warps of others, without units
    ("layer norm of r and c", 16, 1, 4, Case(time=5, batch=5, units=70), torch.bfloat16),
    # sub-tiles whose sequences do not fill the blocks, or are of several seats of one
    ("layer norm of r and c", 4, 2, 2, Case(dict(directions=2), time=4, batch=11, units=16), torch.bfloat16),
    ("layer norm of r and c", 8, 3, 1, Case(time=4, batch=23, units=60), torch.float16),
]


BOTH = "forward", "backward"


def whole(
    monkeypatch: pytest.MonkeyPatch, cluster: int, tiles: int, splits: int, kinds: Sequence[str] = BOTH
) -> None:  # fmt: skip
    """Every layer goes so."""

    def made(cell: Graph, size: Size, shared: int, kind: str) -> Tile | None:
        make = staging.whole if kind == "forward" else staging.whole_back
        return make(cell, size, cluster, tiles, splits, shared)

    with_tiles(monkeypatch, made, kinds)


@needs_compiler
@pytest.mark.parametrize("order", [0, 11])
@pytest.mark.parametrize("name, cluster, tiles, splits, case, dtype", TILES)
def test_whole_sequences(
    name: str, cluster: int, tiles: int, splits: int, case: Case, dtype: torch.dtype, order: int, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also where threads run in any order."""
    whole(monkeypatch, cluster, tiles, splits)
    monkeypatch.setattr(emulation, "ORDER", order and random.Random(order).getrandbits(60))
    with emulated(folder):
        assert_agrees("persistent", CELLS[name], case, dtype)


@needs_compiler
@pytest.mark.parametrize("units, dtype", [(37, torch.float16), (130, torch.bfloat16), (130, torch.float32)], ids=str)
def test_a_mean_that_jumps(units: int, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By thousands of deviations, of one sequence and not of another: the sums are made in a second round."""
    whole(monkeypatch, 8, 1, 4)
    monkeypatch.setattr(emulation, "ORDER", random.Random(units).getrandbits(60))
    case = Case(time=4, batch=9, units=units)
    if dtype == torch.float32:
        assert_near_in_tf32(jumping.graph, case, folder)
    else:
        with emulated(folder):
            assert_agrees("persistent", jumping.graph, case, dtype)


def assert_mends(dtype: torch.dtype, folder: Path) -> None:
    """Of a cell that makes numbers of what is none, by the tiles that are set."""
    form, call = Case(time=5, batch=6, units=70).build(mending.graph)
    call.x[1, 2], call.x[2, 3] = torch.nan, torch.inf
    call = in_dtype(call, dtype)
    truth, plain = (
        recurrent(form.to_json(), one, "reference")[0] for one in (in_dtype(call, torch.float64), call)
    )  # fmt: skip
    with emulated(folder):
        got = recurrent(form.to_json(), call, "persistent")[0]
    assert truth[1, 2].abs().max() == truth[2, 3].abs().max() == 0
    assert broken([{"y": (error(got, truth), error(plain, truth))}], torch.finfo(dtype).eps) == {}


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_a_number_stays_in_its_step(
    dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Of its sequence alone, where the cell makes a number of it: no later mean starts from it."""
    whole(monkeypatch, 4, 1, 2)
    assert_mends(dtype, folder)


@needs_compiler
@pytest.mark.parametrize("name, units, form", [
    ("layer norm of r and c", 37, dict(directions=2)), ("layer norm of r and c", 130, dict(bias=False)),
    ("layer_norm_lstm", 50, dict(layers=2)),
])  # fmt: skip
def test_tf32_is_multiplied_as_float16(
    name: str, units: int, form: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(monkeypatch, 8, 1, 4)
    assert_near_in_tf32(CELLS[name], Case(form, time=4, batch=9, units=units), folder)


def test_where_a_block_has_whole_sequences() -> None:
    """LSTM with layer norm of r and c, as measured: up to 256 units, where no other kernel is faster."""

    def chosen(units: int, batch: int, element: int, kind: str, features: Features = source.PLAIN) -> Tile | Spread:
        made = grid.estimated(size_of(LSTM, units, element, features), H200, batch, 1, kind)
        assert made is not None
        return made

    def numbers(*given: Any) -> tuple[int, ...]:
        made = chosen(*given)
        assert isinstance(made, Tile)
        assert made.whole
        return made.cluster, made.slice, made.tiles, made.warps

    assert numbers(256, 8, 2, "forward") == numbers(256, 64, 4, "forward") == (8, 32, 1, 8)
    assert numbers(128, 32, 2, "forward") == numbers(128, 32, 4, "forward") == (8, 16, 1, 4)
    assert numbers(64, 128, 2, "forward") == (4, 16, 1, 4)
    assert numbers(256, 256, 2, "forward") == (8, 32, 3, 16)
    assert numbers(256, 64, 2, "backward") == numbers(256, 96, 2, "backward") == (8, 32, 1, 8)
    assert numbers(64, 128, 2, "backward") == (4, 16, 1, 4)
    others = (512, 32, 2, "forward"), (512, 32, 4, "forward"), (256, 32, 2, "backward")
    for given in (*others, (512, 32, 2, "backward"), (256, 32, 2, "forward", Features(mask=True))):
        tile = chosen(*given)
        assert isinstance(tile, Tile)
        assert not tile.whole
    assert all(not tile.whole for tile in staging.fitting(LSTM, size_of(LSTM, 64, 2), A100, "forward"))
    assert staging.whole(LSTM, size_of(LSTM, 64, 4, exact=True), 4, 1, 1, H200.shared) is None
    before = library.make_gru(reset_after=False).graph
    assert staging.whole(before, size_of(before, 64, 2), 4, 1, 1, H200.shared) is None


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "tf32"])
@pytest.mark.parametrize(
    "kind, numbers",
    [("forward", (8, 1, 1)), ("forward", (16, 1, 2)), ("backward", (8, 1, 4)), ("backward", (8, 1, 8))],
)
def test_nothing_is_spilled(kind: str, numbers: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """Of 12 warps backward those that compute the cell have more registers than others leave without saying so."""
    make = staging.whole if kind == "forward" else staging.whole_back
    tile = make(LSTM, size_of(LSTM, 256, dtype.itemsize), *numbers, H200.shared)
    assert tile is not None
    text = getattr(source, kind)(LSTM, 256, dtype, tile, True)
    lines = disassembled(text, tile, tmp_path / "cubin")
    assert [line for line in lines if re.search(r"\b(STL|LDL)\b", line)] == []
    assert sum("HMMA" in line for line in lines) >= 16


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "tf32"])
@pytest.mark.parametrize("numbers", [(8, 1, 1), (8, 2, 1), (4, 1, 1)])
def test_the_new_state_is_sent_before_the_next_input_is_asked_for(
    numbers: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """And warps that do different things are known to be whole: nothing brings their threads together."""
    tile = staging.whole(LSTM, size_of(LSTM, 256, dtype.itemsize), *numbers, H200.shared)
    assert tile is not None
    lines = disassembled(source.forward(LSTM, 256, dtype, tile, True), tile, tmp_path / "cubin")
    assert not any("WARPSYNC" in line for line in lines)
    cell = lines[max(at for at, line in enumerate(lines) if "MUFU" in line) :]  # from the last tangent on
    sent, asked = (min(at for at, line in enumerate(cell) if word in line) for word in ("STAS ", "LDG"))
    assert sent < asked
