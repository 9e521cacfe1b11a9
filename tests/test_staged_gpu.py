"""Steps with means and products inside on engine `persistent`, on an NVIDIA GPU: the error rule, in every form."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import test_spread
import whorl
from anew import made_anew
from comparison import error, in_a_graph
from engine_cases import CELLS, DROPS, FORMS, WRAPPED, Case, assert_agrees, in_dtype, moved, results
from whorl.bench.baseline import TF32_EPS
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, launch, source, spreading
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import spreadable, staged
from whorl.engines.cuda.tiling import Chip, Size

pytestmark = pytest.mark.gpu
STAGED = {name: graph for name, graph in {**CELLS, **WRAPPED}.items() if staged(graph)}
STAGED["all of LSTM's layer norm"] = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("x", "r"))[0]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def true_float32() -> Any:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STAGED)
def test_every_cell(name: str, dtype: torch.dtype) -> None:
    assert_agrees("persistent", STAGED[name], Case(time=9, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", DROPS)
@pytest.mark.parametrize("name", ["gru_before", "mgu", "layer norm and a product"])
def test_recurrent_dropout_of_a_cell_with_products(name: str, form: str, dtype: torch.dtype) -> None:
    case = replace(FORMS[form], time=9, batch=20, units=130)
    assert_agrees("persistent", STAGED[name], case, dtype, "cuda")


@pytest.mark.parametrize("name", ["all of LSTM's layer norm", "reset before"])
@pytest.mark.parametrize("units, batch, time", [(2, 1, 1), (16, 8, 3), (97, 131, 5), (512, 40, 7), (300, 200, 4)])
def test_sizes(name: str, units: int, batch: int, time: int) -> None:
    case = Case(dict(layers=1 + (units < 100)), time=time, batch=batch, units=units)
    assert_agrees("persistent", STAGED[name], case, torch.bfloat16, "cuda")


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is spread over blocks that exchange through L2."""
    monkeypatch.setattr(grid, "choose", lambda *given: spreading.choose(*given))
    made_anew(monkeypatch)


# relu's gradient jumps: over 37 steps in float16 an x that is a quarter of an ulp away gives gradients that are 1.8
# times as far away as the error rule allows
SMOOTH = STAGED | {"every option of LSTM": library.make_lstm(torch.tanh, torch.sigmoid, True, True, True).graph}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in SMOOTH if spreadable(SMOOTH[name])])
def test_every_cell_through_l2(spread: None, name: str, dtype: torch.dtype) -> None:
    """Over 20 steps: from there to 37 the error of float32 itself grows fivefold in the cell with every option.

    The step of `odd_ends` jumps where two values are equal: in 20 steps some are, to a rounding.
    """
    time = 5 if name == "odd_ends" else 20
    assert_agrees("persistent", SMOOTH[name], Case(dict(directions=2), time=time, batch=20, units=130), dtype, "cuda")


@pytest.mark.parametrize("name", ["all of LSTM's layer norm", "reset before"])
@pytest.mark.parametrize("units, batch, time", [(2, 1, 1), (16, 8, 3), (97, 131, 5), (512, 300, 4), (512, 24, 40)])
def test_sizes_through_l2(spread: None, name: str, units: int, batch: int, time: int) -> None:
    case = Case(dict(layers=1 + (units < 100)), time=time, batch=batch, units=units)
    assert_agrees("persistent", STAGED[name], case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("name", ["layer_norm_lstm", "reset before", "mgu"])
@pytest.mark.parametrize(
    "units, batch, time, dtype",
    [
        (650, 20, 35, torch.bfloat16),
        (1024, 32, 9, torch.bfloat16),
        (1024, 128, 4, torch.float16),
        (1500, 20, 18, torch.bfloat16),
        (2048, 9, 3, torch.bfloat16),
        (1024, 40, 4, torch.float32),
    ],
)
def test_large_layers(units: int, batch: int, time: int, dtype: torch.dtype, name: str) -> None:
    case = Case(time=time, batch=batch, units=units)
    assert_agrees("persistent", STAGED[name], case, dtype, "cuda")


def tiles() -> list[tuple[str, str, Spread]]:
    """One for each way in which candidates differ: sub-tiles, how warps share a product or blocks are gathered.

    Of few sub-tiles: eight are the same lines, which take the compiler up to half a minute.
    """
    found: dict[tuple[Any, ...], Spread] = {}
    for name, kind in itertools.product(("layer_norm_lstm", "reset before"), ("forward", "backward")):
        every = [*spreading.candidates(size_of(STAGED[name], 200, 2), Chip((9, 0), 132), kind)]
        for tile in random.Random(1).sample(every, len(every)):
            if tile.subs <= 3 and tile.rows <= 32:
                key = name, kind, tile.subs > 1, tile.groups or min(tile.gathered, 4), tile.parts, tile.wide
                found.setdefault(key, tile)
    return [(key[0], key[1], tile) for key, tile in found.items()]


@pytest.mark.parametrize("name, kind, tile", tiles(), ids=str)
def test_every_tile_through_l2(name: str, kind: str, tile: Spread, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the estimate would choose: parts of the batch in turn, gathered blocks, several launches."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        return tile if way == kind else spreading.choose(size, chip, batch, directions, way)

    made_anew(monkeypatch)
    monkeypatch.setattr(grid, "choose", chosen)
    case = Case(dict(directions=2), time=11, batch=40, units=200)
    assert_agrees("persistent", STAGED[name], case, torch.bfloat16, "cuda")


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_means_that_one_block_makes_for_all(dtype: torch.dtype, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than the ring of states has buffers, several launches."""

    def chosen(size: Size, chip: Chip, batch: int, directions: int, way: str) -> Spread | None:
        more = dict(wide=wide, collected=True)
        if way == "forward":
            return spreading.forward(size, 8, 2, 1, 8, 4, chip.shared, **more)
        return spreading.backward(size, 8, 2, 2, 1, 8, chip.shared, **more)

    made_anew(monkeypatch)
    monkeypatch.setattr(grid, "choose", chosen)
    case = Case(dict(directions=2), time=37, batch=40, units=200)
    assert_agrees("persistent", STAGED["layer_norm_lstm"], case, dtype, "cuda")


@pytest.mark.parametrize("form", ["reset to", "given, by gate", "given, by step, packed", "recurrent dropout by step"])
def test_options_of_a_cell_with_means_through_l2(spread: None, form: str) -> None:
    assert_agrees("persistent", STAGED["layer norm"], FORMS[form], DTYPES[len(form) % 3], "cuda")


@pytest.mark.parametrize("name", ["all of LSTM's layer norm", "reset before"])
def test_tf32(name: str) -> None:
    assert_near_in_tf32(STAGED[name], Case(time=9, batch=20, units=130))


@pytest.mark.parametrize("name", ["all of LSTM's layer norm", "reset before"])
@pytest.mark.parametrize("form", ["plain", "mask and lengths", "reset to", "recurrent dropout by gate"])
@pytest.mark.parametrize("units, batch, time", [(130, 20, 9), (512, 128, 5), (1024, 40, 4)])
def test_tf32_through_l2(spread: None, units: int, batch: int, time: int, form: str, name: str) -> None:
    """Where it is multiplied as float16, scaled."""
    case = replace(FORMS[form], units=units, batch=batch, time=time)
    assert_near_in_tf32(STAGED[name], case)


def assert_near_in_tf32(cell: Graph, case: Case) -> None:
    form, call = case.build(cell)
    small = min(1.0, (130 / case.units) ** 0.5)  # else in many units, without norms, a rounding grows from step to step
    call = in_dtype(call._replace(weights=tuple(small * weight for weight in call.weights)), torch.float32)
    truth = results(form, in_dtype(call, torch.float64), "reference", False)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        got = results(form, moved(call, "cuda"), "persistent", False)
    errors = {name: error(got[name].cpu(), truth[name]) for name in truth}
    assert {name: one for name, one in errors.items() if not one <= 4 * TF32_EPS} == {}
    assert max(errors.values()) > 1e-5


TAKEN = [name for name in FORMS if name != "one of each"]


@pytest.mark.parametrize("form", TAKEN)
def test_options_of_a_cell_with_means(form: str) -> None:
    case, dtype = FORMS[form], DTYPES[TAKEN.index(form) % 3]
    case = replace(case, form={"zoneout": (0.2, 0.3)} | case.form) if "marks" in form else case
    assert_agrees("persistent", STAGED["layer norm"], case, dtype, "cuda")


@pytest.mark.parametrize("form", [name for name in TAKEN if "recurrent" not in name and not FORMS[name].given])
def test_options_of_a_cell_with_products(form: str) -> None:
    case, dtype = FORMS[form], DTYPES[TAKEN.index(form) % 3]
    case = replace(case, form={key: value for key, value in case.form.items() if key != "recurrent_dropout"})
    assert_agrees("persistent", STAGED["reset before"], case, dtype, "cuda")


@pytest.mark.parametrize("form", [name for name in FORMS if name != "one of each"])
def test_options_of_a_cell_with_products_through_l2(spread: None, form: str) -> None:
    dtype = DTYPES[[*FORMS].index(form) % 3]
    case = replace(FORMS[form], time=37, batch=20, units=130, form=dict(zoneout=(0.2,)) | FORMS[form].form)
    assert_agrees("persistent", STAGED["gru_before"], case, dtype, "cuda")


@pytest.mark.parametrize("units", [250, 1000])
@pytest.mark.parametrize("name", ["all of LSTM's layer norm", "reset before"])
def test_two_runs_give_the_same_bits(units: int, name: str) -> None:
    form, call = Case(time=30, batch=70, units=units).build(STAGED[name])
    call = moved(in_dtype(call, torch.bfloat16), "cuda")
    first, second = (results(form, call, "persistent", False) for _ in range(2))
    assert {name: None for name in first if not torch.equal(first[name], second[name])} == {}


@pytest.mark.parametrize(
    "kind, units, arguments",
    [
        ("LSTM", 130, dict(layer_norm=True)),
        ("LSTM", 800, dict(layer_norm=True)),
        ("GRU", 130, dict(reset_after=False)),
        ("GRU", 1024, dict(reset_after=False)),
    ],
)
def test_a_graph_replays_with_new_input_and_weights(kind: str, units: int, arguments: dict[str, Any]) -> None:
    made = getattr(whorl, kind)(24, units, device="cuda", dtype=torch.bfloat16, engine="persistent", **arguments)
    x = torch.randn(9, 40, 24, device="cuda", dtype=torch.bfloat16)

    def step() -> list[torch.Tensor]:
        y, _ = made(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(made.parameters()))]

    graph, captured = in_a_graph(step)
    for _ in range(20):
        with torch.no_grad():
            x.normal_()
            for weight in made.parameters():
                weight.mul_(0.99)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.parametrize(
    "units, batch, dtype", [(1024, 48, torch.bfloat16), (130, 20, torch.float16), (1024, 48, torch.float32)]
)
def test_warps_that_sleep_at_random_change_nothing(
    units: int, batch: int, dtype: torch.dtype, spread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More steps than the rings have buffers; blocks that exchange what enters products wait for the slowest."""
    layer = whorl.GRU(24, units, device="cuda", dtype=dtype, engine="persistent", reset_after=False)
    x = torch.randn(37, batch, 24, device="cuda", dtype=dtype)

    def step() -> list[torch.Tensor]:
        y, _ = layer(x)
        return [y, *torch.autograd.grad(y.float().square().sum(), list(layer.parameters()))]

    wanted = step()
    made_anew(monkeypatch, loaded=True)
    monkeypatch.setattr(source, "forward", test_spread.slowed(source.forward))
    monkeypatch.setattr(source, "backward", test_spread.slowed(source.backward))
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(step(), wanted, strict=True))
    assert launch._loaded, "kernels whose warps sleep"
