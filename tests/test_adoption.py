"""`accelerate` changes a model's recurrent layers in place and nothing else; `restore` gives back what there was."""

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import whorl
from comparison import EXACT, assert_agrees, assert_exact, draw, error, flat, results, weighted
from models_for_tests import MODELS, Nested, Shared, Symmetric, build, x_for
from whorl.recurrence import Recurrence

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)


def recurrent(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, nn.RNNBase | nn.RNNCellBase)]


def train(model: nn.Module, optimiser: torch.optim.Optimizer, *steps: int) -> None:
    """Steps of these numbers; each has an x and dropout of its own."""
    for step in steps:
        torch.manual_seed(step)
        x = x_for(model).to(next(model.parameters()).dtype)
        optimiser.zero_grad()
        weighted(flat(model(x))).backward()
        optimiser.step()


# --- what changes and what does not -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@EVERY_MODEL
def test_the_numbers_stay_and_every_layer_is_whorls(name: str, mode: bool) -> None:
    theirs, ours = build(name, mode), build(name, mode)
    before = {key: (id(weight), weight.data_ptr()) for key, weight in ours.named_parameters()}
    report = whorl.accelerate(ours)
    layers = recurrent(ours)
    assert layers
    assert all(isinstance(layer, Recurrence) for layer in layers)
    assert (len(report.changed), report.left) == (len(layers), ())
    assert {key: (id(weight), weight.data_ptr()) for key, weight in ours.named_parameters()} == before
    assert all(layer.training == mode for layer in layers)
    x = x_for(ours)
    assert_exact(results(ours, x), results(theirs, x))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for one, other in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            next(iter(one.parameters())).mul_(1.5)
        other.load_state_dict(one.state_dict(), strict=True)
        assert_exact(results(ours, x), results(theirs, x))


@EVERY_MODEL
def test_training_goes_on_to_the_same_numbers(name: str) -> None:
    theirs, ours = build(name), build(name)
    optimisers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (theirs, ours)]
    train(theirs, optimisers[0], 0, 1, 2, 3, 4)
    train(ours, optimisers[1], 0, 1, 2)
    state = {id(weight): optimisers[1].state[weight]["exp_avg"] for weight in ours.parameters()}
    assert whorl.accelerate(ours).changed
    assert all(optimisers[1].state[weight]["exp_avg"] is state[id(weight)] for weight in ours.parameters())
    train(ours, optimisers[1], 3, 4)
    pairs = zip(ours.named_parameters(), theirs.parameters(), strict=True)
    assert {key: e for (key, a), b in pairs if not (e := error(a.detach(), b.detach())) <= EXACT} == {}


def test_an_lstm_on_onednn_trains_to_the_same_bits() -> None:
    theirs, ours = build("nested").encoder["rnn"].float(), build("nested").encoder["rnn"].float()
    whorl.accelerate(ours, engine="onednn")
    for model in (theirs, ours):
        train(model, torch.optim.Adam(model.parameters()), 0, 1, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gru_keeps_the_error_rule_of_its_dtype(dtype: torch.dtype) -> None:
    layer = nn.GRU(5, 7, 2, dtype=dtype)
    whorl.accelerate(layer)
    assert_agrees(layer, *draw("GRU", "time first", 6, 3, 5, True, layer))


def test_hooks_stay_and_see_the_same() -> None:
    def watch(model: nn.Module) -> list[Tensor]:
        """What each kind of hook is given, in the order of their calls."""
        seen: list[Tensor] = []
        for layer in (model.encoder["rnn"], model.steps[1]):
            layer.register_forward_pre_hook(lambda _, args: seen.extend(args))
            layer.register_forward_hook(lambda _, args, out: seen.extend(flat(out)))
            layer.register_full_backward_hook(lambda _, *grads: seen.extend(filter(torch.is_tensor, sum(grads, ()))))
            next(layer.parameters()).register_hook(lambda grad: seen.append(grad) or grad * 2)
            layer.register_state_dict_post_hook(lambda *_: seen.append(torch.ones(1)))
        model.steps[2].register_forward_hook(lambda _, args, out: out * 3)
        return seen

    theirs, ours = build("nested"), build("nested")
    seen = [watch(model) for model in (theirs, ours)]
    whorl.accelerate(ours)
    x = x_for(ours)
    assert_exact(results(ours, x), results(theirs, x))
    ours.state_dict(), theirs.state_dict()
    assert len(seen[1]) == len(seen[0]) == 14
    assert all(error(a.detach(), b.detach()) <= EXACT for a, b in zip(*reversed(seen), strict=True))


# --- and back ---------------------------------------------------------------------------------------------------------


def inside(model: nn.Module) -> list[tuple]:
    """Everything that `accelerate` could touch: the class of each module (of a parametrised one, what stands in it)."""
    return [
        (
            name,
            parametrize.type_before_parametrizations(module),
            sorted(vars(type(module))) if parametrize.is_parametrized(module) else type(module),
            list(vars(module)),
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@EVERY_MODEL
def test_restore_gives_the_original_types_and_numbers(name: str, mode: bool) -> None:
    model, untouched = build(name, mode), build(name, mode)
    x = x_for(model)
    before = inside(model)
    count = len(whorl.accelerate(model, engine="reference").changed)
    assert inside(model) != before
    report = whorl.restore(model)
    assert (len(report.changed), report.left) == (count, ())
    assert inside(model) == before
    after, wanted = results(model, x), results(untouched, x)
    assert all(torch.equal(after[key], wanted[key]) for key in wanted if wanted[key] is not None)
    assert len(whorl.accelerate(model).changed) == count  # and once more


def test_parametrisations_come_and_go_in_between() -> None:
    layer = parametrizations.weight_norm(nn.LSTM(5, 7), "weight_hh_l0")
    whorl.accelerate(layer)
    parametrize.remove_parametrizations(layer, "weight_hh_l0")
    assert type(layer) is whorl.LSTM
    parametrize.register_parametrization(layer, "weight_ih_l0", Symmetric())
    assert whorl.restore(layer).changed[0].after == "torch.nn.LSTM, parametrized"
    assert type(layer).__mro__[1] is nn.LSTM
    parametrize.remove_parametrizations(layer, "weight_ih_l0")
    assert type(layer) is nn.LSTM


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("name", ["nested", "shared", "parametrised twice"])
def test_a_copy_is_accelerated_and_restores_alone(name: str, way: Callable) -> None:
    model = build(name)
    whorl.accelerate(model, engine="reference")
    if name.startswith("parametrised") and way is not copy.deepcopy:
        with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):  # as torch has it
            way(model)
        return
    copied = way(model)
    assert all(isinstance(layer, Recurrence) and layer.engine == "reference" for layer in recurrent(copied))
    x = x_for(model)
    assert_exact(results(copied, x), results(model, x))
    assert whorl.restore(copied).left == ()
    assert not any(isinstance(layer, Recurrence) for layer in recurrent(copied))
    assert all(isinstance(layer, Recurrence) for layer in recurrent(model))
    assert_exact(results(copied, x), results(model, x))


def test_a_model_on_the_meta_device_is_accelerated_before_it_has_memory() -> None:
    with torch.device("meta"):
        model = Nested()
    whorl.accelerate(model)
    model.load_state_dict(build("nested").state_dict(), assign=True)
    assert_exact(results(model, x := x_for(model)), results(build("nested"), x))


# --- what is left, and why --------------------------------------------------------------------------------------------


class MyLSTM(nn.LSTM):
    """A user's subclass."""


class Lazy(nn.modules.lazy.LazyModuleMixin, nn.LSTM):
    cls_to_become = nn.LSTM

    def __init__(self) -> None:
        super().__init__(1, 7)
        self.weight_ih_l0 = nn.UninitializedParameter()

    def initialize_parameters(self, x: Tensor) -> None:
        self.input_size = x.shape[-1]
        self.weight_ih_l0.materialize((28, self.input_size))
        self.reset_parameters()


def with_its_own_forward() -> nn.Module:
    layer = nn.RNN(5, 7)
    layer.forward = layer.forward  # as wrappers do which call the old one inside a new one
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "subclass": (lambda: MyLSTM(5, 7), "a class of its own, whose methods .* those of LSTM: let it extend whorl.LSTM"),
    "parametrised subclass": (lambda: parametrizations.weight_norm(MyLSTM(5, 7), "weight_hh_l0"), "a class of its own"),
    "lazy": (Lazy, "its sizes are not known before its first call"),
    "scripted": (lambda: torch.jit.script(nn.LSTM(5, 7)), "compiled by torch.jit"),
    "traced": (lambda: torch.jit.trace(nn.GRU(5, 7), torch.zeros(2, 3, 5)), "compiled by torch.jit"),
    "quantised": (lambda: torch.ao.nn.quantized.dynamic.LSTM(5, 7), "torch.ao for quantised weights"),
    "quantised as floats": (lambda: torch.ao.nn.quantized.reference.LSTMCell(5, 7), "torch.ao for quantised weights"),
    "replaced forward": (with_its_own_forward, "this object has its own forward .* del layer.forward"),
    "no plain layer": (lambda: nn.RNNBase("LSTM", 5, 7), "RNNBase is not torch's plain layer"),
    "refused by torch": (lambda: nn.GRU(5, 7, 1, True, False, 0.0, False, 3), "proj_size is 3"),
    "whorl's own": (lambda: whorl.LSTM(5, 7, engine="reference", peephole=True), "built as a layer of whorl"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_change_is_left_with_its_reason(name: str) -> None:
    make, reason = LEFT[name]
    layer = make()
    kind, before = type(layer), list(vars(layer))
    model = nn.ModuleDict({"kept": layer, "plain": nn.GRU(5, 7)})
    report = whorl.accelerate(model, engine="cudnn")
    (left,), (changed,) = report.left, report.changed
    assert (left.names, left.after, changed.names, changed.after) == (("kept",), None, ("plain",), "whorl.GRU")
    assert re.search(reason, left.reason)
    back = whorl.restore(model)
    assert [row.names for row in back.changed] == [("plain",)]
    assert back.left[0].reason == ("built as a layer of whorl" if name == "whorl's own" else "not a layer of whorl")
    assert (type(layer), list(vars(layer))) == (kind, before)
    assert not isinstance(layer, Recurrence) or layer.engine == "reference"


def test_a_lazy_layer_changes_once_it_was_called() -> None:
    layer = Lazy()
    x = torch.randn(4, 3, 5)
    before, _ = layer(x)
    assert whorl.accelerate(layer, engine="onednn").changed[0].after == "whorl.LSTM"
    assert torch.equal(layer(x)[0], before)


def test_a_second_call_changes_nothing_and_says_so() -> None:
    model = build("nested")
    whorl.accelerate(model, engine="reference")
    before = inside(model)
    again = whorl.accelerate(model)
    assert inside(model) == before
    assert again.changed == ()
    assert {row.reason for row in again.left} == {
        "accelerated already, its engine is 'reference': assign layer.engine for another"
    }


def test_restore_leaves_what_was_changed_since() -> None:
    layer = nn.LSTM(5, 7)
    whorl.accelerate(layer)
    layer.forward = layer.forward
    assert whorl.restore(layer).left[0].reason.startswith("this object has its own forward")
    assert type(layer) is whorl.LSTM
    del layer.forward
    layer.zoneout, layer.clip = {"c": 0.5}, 3.0
    assert whorl.restore(layer).left[0].reason.startswith("it was given zoneout={'c': 0.5} and clip=3.0, which torch")
    layer.zoneout, layer.clip = 0.0, None
    layer.__class__ = type("Mine", (whorl.LSTM,), {})
    assert "a class of its own" in whorl.restore(layer).left[0].reason
    layer.__class__ = whorl.LSTM
    assert whorl.restore(layer).left == ()
    assert inside(layer) == inside(nn.LSTM(5, 7))


def test_an_accelerated_layer_takes_whorls_options() -> None:
    theirs, ours = nn.LSTM(5, 7, dtype=torch.float64), whorl.LSTM(5, 7, dtype=torch.float64, clip=0.1)
    ours.load_state_dict(theirs.state_dict())
    whorl.accelerate(theirs)
    theirs.clip = 0.1
    x, mask = torch.randn(4, 3, 5, dtype=torch.float64), torch.rand(4, 3) > 0.3
    got, wanted = flat(theirs(x, mask=mask)), flat(ours(x, mask=mask))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert got[2].abs().max() == 0.1


def test_the_report_is_a_table() -> None:
    normed = parametrizations.weight_norm(nn.GRUCell(5, 7), "weight_hh")
    model = nn.Sequential(Shared(), nn.Tanh(), normed, MyLSTM(5, 7))
    assert str(whorl.accelerate(model)).splitlines() == [
        "2 of 3 recurrent layers changed",
        "  0.first, 0.second.0  torch.nn.LSTM                   now whorl.LSTM",
        "  2                    torch.nn.GRUCell, parametrized  now whorl.GRUCell, parametrized",
        "  3                    MyLSTM                          left: a class of its own, whose methods may differ "
        "from those of LSTM: let it extend whorl.LSTM",
    ]
    assert str(whorl.accelerate(nn.RNN(5, 7))).splitlines() == [
        "1 of 1 recurrent layer changed", "  (the model itself)  torch.nn.RNN  now whorl.RNN",
    ]  # fmt: skip
    assert str(whorl.accelerate(nn.Linear(5, 7))) == "no recurrent layer in this model"


# --- wrappers, explain, errors ----------------------------------------------------------------------------------------


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0].relu()


@pytest.mark.parametrize("how", ["wrapped", "in place", "wrapped layer"])
def test_a_compiled_model_runs_whorls_layers_and_torchs_again(how: str) -> None:
    torch._dynamo.reset()
    model = nn.LSTM(5, 7) if how == "wrapped layer" else Rows()
    called = torch.compile(model, backend="eager") if how != "in place" else model
    if how == "in place":
        model.compile(backend="eager")
    x = torch.randn(4, 3, 5)

    def call() -> tuple[Tensor, bool]:
        with torch.profiler.profile() as seen:
            y = called(x)
        return flat(y)[0].detach(), any(event.key.startswith("whorl::") for event in seen.key_averages())

    before, ran = call()
    assert not ran
    for change, ours in ((partial(whorl.accelerate, engine="onednn"), True), (whorl.restore, False)):
        report = change(called)
        assert report.compiled
        assert str(report).endswith("\n  compiled by torch.compile: compiles again at its next call")
        after, ran = call()
        assert ran == ours
        assert torch.equal(after, before)
    assert not whorl.restore(called).compiled  # nothing changed


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_model_in_distributed_data_parallel_trains_on(alone: None) -> None:
    theirs, ours = (nn.parallel.DistributedDataParallel(build("nested")) for _ in range(2))
    optimisers = [torch.optim.Adam(model.parameters()) for model in (theirs, ours)]
    train(theirs, optimisers[0], 0, 1, 2, 3)
    train(ours, optimisers[1], 0, 1)
    assert whorl.accelerate(ours).changed[0].names == ("module.encoder.rnn",)
    train(ours, optimisers[1], 2, 3)
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(error(a.detach(), b.detach()) <= EXACT for a, b in pairs)


def test_a_class_made_by_fully_shard_is_left(alone: None) -> None:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer, change in ((nn.LSTM(5, 7), whorl.accelerate), (nn.LSTM(5, 7), whorl.restore)):
        if change is whorl.restore:
            whorl.accelerate(layer)
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
        assert "where fully_shard made it, call whorl before" in change(layer).left[0].reason


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["nested", "weight norm", "weight norm, old", "parametrised twice", "weight dropped"])
def test_an_accelerated_model_is_traced_as_torchs_own_operators(name: str) -> None:
    theirs, ours = build(name, mode=False), build(name, mode=False)
    whorl.accelerate(ours)
    traced = torch.jit.trace(ours, (x_for(ours),))
    assert "whorl::" not in str(traced.inlined_graph)
    x = torch.randn(9, 2, 5, dtype=torch.float64)
    assert all(error(a, b) <= EXACT for a, b in zip(flat(traced(x)), flat(theirs(x)), strict=True))


def test_explain_of_an_accelerated_model() -> None:
    model, x = build("nested"), torch.randn(4, 3, 5, dtype=torch.float64)
    assert len(whorl.explain(model, x).others) == 6
    whorl.accelerate(model, engine="reference")
    told = whorl.explain(model, x)
    assert told.names == ("encoder.rnn", "middle.1", "decoder", "steps.0", "steps.1", "steps.2")
    assert {(plan.engine, plan.asked) for plan in told.plans} == {("reference", "reference")}
    assert told.others == ()
    layer = parametrizations.weight_norm(nn.LSTM(5, 7), "weight_hh_l0")
    whorl.accelerate(layer)
    assert whorl.explain(layer, x.float()).plans[0].problem.form.units == 7


def test_an_engine_that_cannot_run_a_layer_says_so_when_it_is_called() -> None:
    layer = nn.GRU(5, 7)
    whorl.accelerate(layer, engine="onednn")
    with pytest.raises(whorl.UnsupportedError, match="torch runs only the plain LSTM through oneDNN"):
        layer(torch.zeros(4, 3, 5))


@pytest.mark.parametrize("change", [whorl.accelerate, whorl.restore])
def test_what_is_no_model_is_refused(change: Callable) -> None:
    name = change.__name__
    with pytest.raises(whorl.InputError, match=f"model is of type OrderedDict: whorl.{name} takes a torch.nn.Module"):
        change(nn.LSTM(5, 7).state_dict())
    with pytest.raises(whorl.InputError, match=f"model is the class LSTM: build it first, whorl.{name} takes"):
        change(nn.LSTM)


def test_an_unknown_engine_is_refused_before_anything_changes() -> None:
    layer = nn.LSTM(5, 7)
    with pytest.raises(whorl.InputError, match="engine is 'cuda': write one of 'auto'"):
        whorl.accelerate(layer, engine="cuda")
    assert type(layer) is nn.LSTM
