"""A layer holds what torch's holds, from the same seed, under the same names; and survives what users do to it."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

import whorl
from comparison import CELLS, EXACT, assert_exact, draw, error, flat, make, results, twin, weighted

FORMS = [
    ("LSTM", {}), ("GRU", {}), ("RNN tanh", {}), ("RNN relu", {}), ("LSTMCell", {}), ("GRUCell", {}),
    ("RNN reluCell", {}), ("LSTMCell", {"bias": False}), ("LSTM", {"proj_size": 3, "bidirectional": True}),
    ("LSTM", {"bias": False, "proj_size": 3, "num_layers": 2}), ("GRU", {"num_layers": 3, "bidirectional": True}),
    ("RNN tanh", {"num_layers": 2, "bias": False, "batch_first": True}),
]  # fmt: skip
EVERY_FORM = pytest.mark.parametrize("cell, options", FORMS, ids=str)


def call(layer: torch.nn.Module) -> list[torch.Tensor]:
    """Its outputs for one x that is always the same."""
    one_step = isinstance(layer, torch.nn.RNNCellBase)
    weight = layer.weight_ih if one_step else layer.weight_ih_l0
    x = torch.linspace(-1, 1, 4 * 5, dtype=weight.dtype)
    return flat(layer(x.view(4, 5) if one_step else x.view(2, 2, 5)))


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(call(one), call(other), strict=True))


@EVERY_FORM
def test_the_same_seed_gives_torchs_parameters(cell: str, options: dict) -> None:
    made = []
    for module in (torch.nn, whorl):
        torch.manual_seed(3)
        made.append(list(make(module, cell, 5, 7, **options, dtype=torch.float64).named_parameters()))
    assert [name for name, _ in made[1]] == [name for name, _ in made[0]]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(*made, strict=True))
    assert made[1][0][1].std() > 0.1


@EVERY_FORM
def test_a_state_dict_loads_both_ways(cell: str, options: dict) -> None:
    ours, theirs = (make(module, cell, 5, 7, **options, dtype=torch.float64) for module in (whorl, torch.nn))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert all(error(a, b) <= EXACT for a, b in zip(call(ours), call(theirs), strict=True))
    fresh = make(torch.nn, cell, 5, 7, **options, dtype=torch.float64)
    fresh.load_state_dict(ours.state_dict(), strict=True)
    assert equal(fresh, theirs)


def _through_a_file(layer: torch.nn.Module) -> torch.nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": _through_a_file,
}


@pytest.mark.parametrize("way", COPIES)
@EVERY_FORM
def test_a_copy_computes_the_same_and_is_its_own(cell: str, options: dict, way: str) -> None:
    layer = make(whorl, cell, 5, 7, **options, engine="reference")
    copied = COPIES[way](layer)
    assert type(copied) is type(layer)
    assert (copied.engine, repr(copied)) == ("reference", repr(layer))
    assert equal(copied, layer)
    before = call(layer)
    with torch.no_grad():
        next(copied.parameters()).mul_(2)
    copied.engine = "auto"
    assert not equal(copied, layer)
    assert layer.engine == "reference"
    assert all(torch.equal(a, b) for a, b in zip(call(layer), before, strict=True))


def _moved_and_flattened(layer: torch.nn.Module) -> None:
    layer.to(torch.float32).double()
    layer.flatten_parameters()


def _assigned(layer: torch.nn.Module) -> None:
    layer.weight_hh_l0 = torch.nn.Parameter(layer.weight_hh_l0.detach() * 2)


def _loaded_by_assignment(layer: torch.nn.Module) -> None:
    layer.load_state_dict({name: weight * 2 for name, weight in layer.state_dict().items()}, assign=True)


def _replaced_data(layer: torch.nn.Module) -> None:
    layer.weight_ih_l0.data = layer.weight_ih_l0.data.t().contiguous().t()


def _pruned(layer: torch.nn.Module) -> None:
    prune.l1_unstructured(layer, "weight_hh_l0", 0.5)


def _weight_norm(layer: torch.nn.Module) -> None:
    torch.nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0")


def _spectral_norm(layer: torch.nn.Module) -> None:
    torch.nn.utils.parametrizations.spectral_norm(layer.eval(), "weight_ih_l0")


def _old_weight_norm(layer: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(layer, "weight_hh_l0")


CHANGES: list[Callable[[Any], None]] = [
    _moved_and_flattened, _assigned, _loaded_by_assignment, _replaced_data, _pruned, _weight_norm, _spectral_norm,
    _old_weight_norm,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("cell", CELLS)
def test_a_changed_weight_is_the_one_that_runs(cell: str, change: Callable[[Any], None]) -> None:
    """The same change to torch's layer gives the same numbers and the same gradient of every parameter there now is."""
    ours = make(whorl, cell, 5, 7, 2, dtype=torch.float64)
    theirs = twin(ours)
    x, hx = draw(cell, "time first", 4, 3, 5, True, ours)
    before = results(ours, x, hx)
    torch.manual_seed(1)
    change(ours)
    torch.manual_seed(1)
    change(theirs)
    after = results(ours, x, hx)
    assert_exact(after, results(theirs, x, hx))
    if change not in (_moved_and_flattened, _replaced_data, _weight_norm, _old_weight_norm):
        assert error(after["output 0"], before["output 0"]) > 1e-3
    assert isinstance(ours, getattr(whorl, CELLS[cell][0]))
    copied = None if change is _pruned or change is _old_weight_norm else copy.deepcopy(ours)
    assert copied is None or equal(copied, ours)


@EVERY_FORM
def test_a_replica_of_data_parallel_trains_the_original(cell: str, options: dict) -> None:
    """What torch.nn.parallel.replicate does with each module, on one device."""
    layer = make(whorl, cell, 5, 7, **options, dtype=torch.float64)
    replica = layer._replicate_for_data_parallel()
    for name, weight in layer.named_parameters():
        setattr(replica, name, weight * 1)
    assert equal(replica, layer)
    weighted(call(replica)).backward()
    through_the_replica = [weight.grad.clone() for weight in layer.parameters()]
    layer.zero_grad()
    weighted(call(layer)).backward()
    pairs = zip(through_the_replica, layer.parameters(), strict=True)
    assert all(torch.equal(grad, weight.grad) for grad, weight in pairs)


@EVERY_FORM
def test_a_layer_on_the_meta_device_comes_to_life(cell: str, options: dict) -> None:
    """Large models are built on meta, called there for their shapes, and given memory later."""
    made = []
    for module in (torch.nn, whorl):
        layer = make(module, cell, 5, 7, **options, device="meta", dtype=torch.float64)
        x = torch.empty(2, 3, 5, device="meta", dtype=torch.float64)
        shapes = [out.shape for out in flat(layer(x[0] if cell.endswith("Cell") else x))]
        layer = layer.to_empty(device="cpu")
        torch.manual_seed(3)
        layer.reset_parameters()
        made.append((shapes, layer))
    assert made[0][0] == made[1][0]
    assert all(error(a, b) <= EXACT for a, b in zip(call(made[1][1]), call(made[0][1]), strict=True))


def test_a_cell_can_skip_its_first_values() -> None:
    """torch.nn.utils.skip_init looks for `device` in the signature of the class; torch's layers have none there."""
    for module in (torch.nn, whorl):
        torch.manual_seed(3)
        begin = torch.get_rng_state()
        one = torch.nn.utils.skip_init(module.GRUCell, 5, 7)
        assert torch.equal(torch.get_rng_state(), begin)
        assert one.weight_ih.device.type == "cpu"


def test_a_layer_is_torchs_to_who_asks() -> None:
    for cell, options in FORMS:
        ours, theirs = (make(module, cell, 5, 7, **options) for module in (whorl, torch.nn))
        assert isinstance(ours, type(theirs))
        assert repr(ours) == repr(theirs)
        if isinstance(theirs, torch.nn.RNNBase):
            assert ours.mode == theirs.mode
            assert [[w.shape for w in ws] for ws in ours.all_weights] == [
                [w.shape for w in ws] for ws in theirs.all_weights
            ]
