"""A call that is like the one before asks for no plan; one that is not, in any of what decides, does."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import whorl
import whorl.layer as layer_file
from comparison import flat
from tapes import X, both_ways, counted, counting, layer, trained
from whorl.engines import taped

__all__ = ["counted", "layer"]  # fixtures
pytestmark = pytest.mark.xdist_group("taped")  # as test_taped, which compiles it


@pytest.fixture
def like(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls that went by the plan of the call before."""
    assert taped._run_like is not None
    made: list[int] = []
    monkeypatch.setattr(taped, "_run_like", counting(taped._run_like, made))
    return made


def test_a_call_like_the_one_before_needs_no_plan(
    like: list[int], counted: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module
) -> None:
    want = trained(layer, X)
    assert not like
    assert all(map(torch.equal, want, trained(layer, X)))
    assert len(like) == 1
    monkeypatch.setattr(layer_file, "recurrent", None)  # nobody asks for it
    assert all(map(torch.equal, want, trained(layer, X)))
    assert len(like) == 2
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)  # it holds no weight
    assert not torch.equal(want[0], trained(layer, X)[0])
    layer.weight_hh_l0 = torch.nn.Parameter(layer.weight_hh_l0.detach() / 2)
    assert all(map(torch.equal, want, trained(layer, X)))


def other_size(layer: Any) -> Any:
    return layer(X[:2])


def other_batch(layer: Any) -> Any:
    return layer(X[:, :1])


def no_gradient(layer: Any) -> Any:
    with torch.no_grad():
        return layer(X)


def gradient_of_x(layer: Any) -> Any:
    y = layer(X.clone().requires_grad_())
    assert len(y[0].grad_fn.next_functions) == 5
    return y


def states(layer: Any) -> Any:
    return layer(X, (torch.ones(1, 2, 16).bfloat16(), torch.ones(1, 2, 16).bfloat16()))


def no_batch(layer: Any) -> Any:
    return layer(X[:, 0])


def a_mask(layer: Any) -> Any:
    return layer(X, mask=torch.tensor([[True, True], [False, True], [True, False]]))


def every_state(layer: Any) -> Any:
    *made, sequences = layer(X, return_states=True)
    return [*made, *sequences.values()]


def frozen(layer: Any) -> Any:
    for weight in layer.parameters():
        weight.requires_grad_(False)
    made = layer(X)
    for weight in layer.parameters():
        weight.requires_grad_(True)
    return made


def an_option(layer: Any) -> Any:
    layer.clip = 0.1
    made = layer(X)
    layer.clip = None
    return made


def another_engine(layer: Any) -> Any:
    layer.engine = "reference"
    made = layer(X)
    layer.engine = "persistent"
    return made


def another_dtype(layer: Any) -> Any:
    made = layer.half()(X.half())
    layer.bfloat16()
    return made


def a_copy(layer: Any) -> Any:
    made = copy.deepcopy(layer)
    assert made._before is None
    return made(X)


def under_autocast(layer: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.float16):
        return layer(X)


def batched(layer: Any) -> Any:
    return torch.func.vmap(lambda x: layer(x)[0], 1)(X[:, :, None].expand(3, 2, 2, 16))


def by_python(layer: Any) -> Any:
    with whorl.settings(calls="python"):
        return layer(X)


def another_switch(layer: Any) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return layer(X)


def a_tangent(layer: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return layer(X)


OTHERS = [
    other_size, other_batch, no_gradient, gradient_of_x, states, no_batch, a_mask, every_state, frozen, an_option,
    another_engine, another_dtype, a_copy, under_autocast, batched, by_python, another_switch, a_tangent,
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_a_call_unlike_the_one_before_is_planned(
    like: list[int], monkeypatch: pytest.MonkeyPatch, layer: torch.nn.Module, other: Callable[[Any], Any]
) -> None:
    if other is by_python:
        monkeypatch.setattr(taped, "ready", lambda: whorl.settings.calls == "compiled")
    wanted = flat(other(copy.deepcopy(layer)))
    plain = flat(layer(X))
    found = flat(other(layer))  # after a call that is remembered
    assert not like
    assert len(found) == len(wanted)
    for one, truth in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (truth.dtype, truth.shape, truth.requires_grad)
        assert torch.equal(one, truth)
    assert all(map(torch.equal, plain, flat(layer(X))))


def test_dropout_after_a_call_without_it(like: list[int]) -> None:
    layer = whorl.LSTM(16, 16, 2, dropout=0.5, dtype=torch.bfloat16, engine="persistent").eval()
    plain = layer(X)[0]
    assert not torch.equal(layer.train()(X)[0], plain)
    assert not like
    assert torch.equal(layer.eval()(X)[0], plain)


def test_what_another_layer_ran_is_not_remembered(like: list[int], layer: torch.nn.Module) -> None:
    layer(X)
    other = whorl.LSTM(16, 16, dtype=torch.bfloat16, engine="reference")
    want = other(X)[0]
    assert other._before is None
    assert torch.equal(other(X)[0], want)
    assert not like


def test_a_compiled_layer_is_compiled_once(like: list[int], layer: torch.nn.Module) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    want = compiled(X)[0]
    layer(X)  # what it remembers is nothing that a graph depends on
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(compiled(X)[0], want)


def test_what_is_wrong_is_said_after_a_call_that_is_remembered(like: list[int], layer: torch.nn.Module) -> None:
    layer(X)
    with pytest.raises(RuntimeError, match="must be equal to input_size"):
        layer(X[..., :8])
    with pytest.raises(RuntimeError, match="Expected hidden"):
        layer(X, (torch.ones(1, 3, 16).bfloat16(), torch.ones(1, 3, 16).bfloat16()))
    assert not like


LENGTHS, MASK = torch.tensor([3, 2]), torch.tensor([[True, True], [False, True], [True, False]])
MARKED = [
    (dict(), dict(lengths=LENGTHS)),
    (dict(), dict(mask=MASK)),
    (dict(batch_first=True), dict(reset=~MASK.t())),
    (dict(), dict(lengths=LENGTHS, mask=MASK, reset=~MASK)),
    (dict(zoneout=0.3), dict()),
    (dict(recurrent_dropout=0.3), dict(mask=MASK)),
    (dict(recurrent_dropout=0.3, recurrent_dropout_mode="step"), dict()),
    (dict(input_dropout=0.3, layer_norm="r c"), dict(lengths=LENGTHS)),
]


def drawn(layer: torch.nn.Module, x: torch.Tensor, **call: Any) -> list[torch.Tensor]:
    """What a step gives of one seed, and what torch's generator gives after it."""
    torch.manual_seed(4)
    return [*trained(layer, x, **call), torch.rand(1)]


@pytest.mark.parametrize("options, call", MARKED)
def test_a_call_with_options_like_the_one_before_needs_no_plan(
    like: list[int], counted: list[int], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], call: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    layer = whorl.LSTM(16, 16, **options, dtype=torch.bfloat16, engine="persistent")
    x = X.transpose(0, 1) if layer.batch_first else X
    both_ways(lambda: drawn(layer, x, **call), counted, monkeypatch)
    first = drawn(layer, x, **call)
    assert all(map(torch.equal, first, drawn(layer, x, **call)))
    assert len(like) == 1  # both ways ended with a call through Python


@pytest.mark.parametrize(
    "options, call",
    [
        (dict(), dict(lengths=LENGTHS)),
        (dict(), dict(reset=MASK)),
        (dict(), dict(mask=MASK, reset=MASK)),
        (dict(), dict(mask=MASK[:, :1], x=X[:, :1])),
        (dict(), dict(mask=MASK[:, 0], x=X[:, 0])),
        (dict(), dict(mask=MASK, reset_to=(torch.ones(1, 2, 16).bfloat16(),) * 2, reset=MASK)),
        (dict(zoneout=0.3), dict(mask=MASK)),
        (dict(zoneout=0.3), dict(x=X[:2])),
        (dict(zoneout=0.3, num_layers=2, dropout=0.3), dict()),
        (dict(weight_drop=0.3), dict()),
    ],
)
def test_a_call_with_other_options_than_the_one_before_is_planned(
    like: list[int], options: dict[str, Any], call: dict[str, Any]
) -> None:
    torch.manual_seed(2)
    layer = whorl.LSTM(16, 16, **options, dtype=torch.bfloat16, engine="persistent")
    x = call.pop("x", X)
    wanted = drawn(copy.deepcopy(layer), x, **call)
    drawn(layer, X, **({} if options else {"mask": MASK}))
    found = drawn(layer, x, **call)
    assert not like
    assert all(map(torch.equal, found, wanted))


def test_what_training_drew_is_not_drawn_in_eval(like: list[int]) -> None:
    layer = whorl.LSTM(16, 16, zoneout=0.3, dtype=torch.bfloat16, engine="persistent")
    still = copy.deepcopy(layer).eval()
    layer(X)
    assert torch.equal(layer.eval()(X)[0], still(X)[0])
    assert torch.equal(layer(X)[0], still(X)[0])
    assert len(like) == 2


def test_marks_that_do_not_fit_are_said_after_a_call_that_is_remembered(
    like: list[int], layer: torch.nn.Module
) -> None:
    layer(X, mask=MASK)
    with pytest.raises(whorl.InputError, match=r"mask is .*, LSTM takes \[time, batch\]"):
        layer(X, mask=MASK[:2])
    with pytest.raises(whorl.InputError, match="it must be bool"):
        layer(X, mask=MASK.float())
    layer(X, lengths=LENGTHS)
    with pytest.raises(whorl.InputError, match="each must be from 0 to 3"):
        layer(X, lengths=LENGTHS + 1)
    assert not like
