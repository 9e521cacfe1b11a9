"""`explain` says what a profiler sees, for layers and for modules around them."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

import whorl
from whorl import settings
from whorl.engines import ENGINES


def _ran_onednn(profile: torch.profiler.profile) -> bool:
    return "aten::mkldnn_rnn_layer" in {event.key for event in profile.key_averages()}


def _switched_off(call: Callable[[], Any]) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return call()


def _autocast(call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call()


X = torch.zeros(6, 3, 5)
AGREED: dict[str, tuple[Callable[[], torch.nn.Module], Sequence[Any], Callable[..., Any]]] = {
    "LSTM": (lambda: whorl.LSTM(5, 7), [X], lambda call: call()),
    "LSTM in eval mode": (lambda: whorl.LSTM(5, 7, 2, dropout=0.5).eval(), [X], lambda call: call()),
    "LSTM, unbatched": (lambda: whorl.LSTM(5, 7, 2, bidirectional=True), [X[0]], lambda call: call()),
    "LSTM, bfloat16": (lambda: whorl.LSTM(5, 7).bfloat16(), [X.bfloat16()], lambda call: call()),
    "LSTM, autocast": (lambda: whorl.LSTM(5, 7), [X], _autocast),
    "LSTM without grad": (lambda: whorl.LSTM(5, 7), [X], torch.no_grad()(lambda call: call())),
    "LSTM, float16 without grad": (lambda: whorl.LSTM(5, 7).half(), [X.half()], torch.no_grad()(lambda call: call())),
    "LSTM, float64": (lambda: whorl.LSTM(5, 7).double(), [X.double()], lambda call: call()),
    "LSTM, packed": (lambda: whorl.LSTM(5, 7), [pack_sequence([X[0], X[1, :2]])], lambda call: call()),
    "LSTM, batch 0": (lambda: whorl.LSTM(5, 7), [X[:, :0]], lambda call: call()),
    "LSTM, projection": (lambda: whorl.LSTM(5, 7, proj_size=3), [X], lambda call: call()),
    "LSTM, oneDNN off": (lambda: whorl.LSTM(5, 7), [X], _switched_off),
    "LSTM on reference": (lambda: whorl.LSTM(5, 7, engine="reference"), [X], lambda call: call()),
    "GRU": (lambda: whorl.GRU(5, 7), [X], lambda call: call()),
    "RNN": (lambda: whorl.RNN(5, 7), [X], lambda call: call()),
    "LSTMCell": (lambda: whorl.LSTMCell(5, 7), [X[0]], lambda call: call()),
    "GRUCell": (lambda: whorl.GRUCell(5, 7), [X[0]], lambda call: call()),
}


@pytest.mark.parametrize("name", AGREED)
def test_explain_says_what_a_profiler_sees(name: str) -> None:
    make, arguments, within = AGREED[name]
    layer = make()
    told = within(lambda: whorl.explain(layer, *arguments))
    with torch.profiler.profile() as seen:
        within(lambda: layer(*arguments))
    (plan,) = told.plans
    assert _ran_onednn(seen) == (plan.engine == "onednn")
    lines = str(told).splitlines()
    assert lines[0].startswith(f"{plan.engine}, {ENGINES[plan.engine].summary}")
    assert str(plan.problem) in lines[1]
    assert lines[2:] == [f"  not {refusal}" for refusal in plan.refusals]
    if plan.asked == "auto":
        before = list(ENGINES)[: list(ENGINES).index(plan.engine)]
        assert [refusal.engine for refusal in plan.refusals] == before


class Model(torch.nn.Module):
    """Layers of whorl and of torch, at several depths, one of them called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleDict({"rnn": whorl.LSTM(5, 7, 2, dropout=0.5)})
        self.decoder = whorl.GRU(7, 7)
        self.torchs = torch.nn.GRU(7, 7)
        self.unused = whorl.RNN(7, 7)
        self.step = whorl.LSTMCell(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.torchs(self.decoder(self.encoder["rnn"](x)[0])[0])
        h, c = self.step(y[-1])
        return self.step(y[0], (h, c))[0]


@pytest.mark.usefixtures("no_compiler")
def test_explain_of_a_module_has_a_plan_for_each_call_inside() -> None:
    model = Model()
    told = whorl.explain(model, X)
    assert told.names == ("encoder.rnn", "decoder", "step", "step")
    assert [plan.engine for plan in told.plans] == ["onednn", "reference", "onednn", "onednn"]
    assert told.others == ("torchs (GRU)",)
    text = str(told)
    assert "torchs: " not in text
    assert "torchs (GRU): not a layer of whorl, but of torch; whorl.accelerate makes it one" in text
    assert text.index("encoder.rnn: onednn") < text.index("decoder: reference") < text.index("step: onednn")
    assert [plan.problem.dropout for plan in told.plans] == [True, False, False, False]
    assert [plan.problem.gradient for plan in told.plans] == [True] * 4
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_explain_says_in_which_mode_each_layer_is() -> None:
    model = Model()
    assert str(whorl.explain(model, X)).count("train mode, autocast off") == 4
    model.encoder.eval()
    told = str(whorl.explain(model, X)).splitlines()
    assert [line.endswith("eval mode, autocast off") for line in told if line.startswith("  for ")] == [
        True, False, False, False,
    ]  # fmt: skip
    assert "eval mode" in str(whorl.explain(model.encoder["rnn"], X))


def test_explain_under_autocast() -> None:
    told = _autocast(lambda: whorl.explain(Model(), X))

    assert {plan.problem.dtype for plan in told.plans} == {torch.bfloat16}
    assert "eval mode, autocast on" in _autocast(lambda: str(whorl.explain(whorl.LSTM(5, 7).eval(), X)))

    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = whorl.LSTM(5, 7)

        def forward(self, x: Tensor) -> Any:
            return _autocast(lambda: self.rnn(x))

    assert "bfloat16 on cpu, with gradient; train mode, autocast on" in str(whorl.explain(Inside(), X))


def test_explain_draws_no_numbers_for_a_layer_and_runs_nothing() -> None:
    layer, begin = whorl.LSTM(5, 7, 2, dropout=0.5), torch.get_rng_state()
    with torch.profiler.profile() as seen:
        whorl.explain(layer, X)
    assert torch.equal(torch.get_rng_state(), begin)
    assert not _ran_onednn(seen)
    assert str(whorl.explain(torch.nn.Linear(5, 5), X)).startswith("no recurrent layer is in it")


def test_explain_of_a_layer_that_is_not_called_as_a_module_says_so() -> None:
    class Past(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.spare = whorl.LSTM(5, 7), whorl.GRUCell(5, 7)

        def forward(self, x: Tensor) -> Any:
            return self.rnn.forward(x), self.rnn.stepper(x.shape[1])(x[0])

    told = whorl.explain(Past(), X)
    assert (told.names, told.unseen) == ((), ("rnn", "spare"))
    assert "rnn: not called, or only its forward() or a stepper, which are not seen" in str(told)
    assert whorl.explain(whorl.LSTM(5, 7), X).unseen == ()


def test_explain_of_a_compiled_model_is_not_traced() -> None:
    model = torch.compile(torch.nn.Sequential(whorl.LSTM(5, 7)), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whorl.explain(model, X).names == ("_orig_mod.0",)


def test_explain_of_a_model_on_the_cpu_touches_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several, each generator asked for would cost a context, and torch would warn."""

    def touched(*_: Any) -> None:
        raise AssertionError("a GPU's generator was read")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    model, begin = torch.nn.Sequential(torch.nn.Dropout(0.5), whorl.LSTM(5, 7)), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert whorl.explain(model, X).names == ("1",)
    assert torch.equal(torch.get_rng_state(), begin)


@pytest.mark.parametrize(
    "module, what", [(whorl.LSTM, "the class LSTM"), ([whorl.LSTM(5, 7)], "of type list")], ids=["class", "list"]
)
def test_explain_of_no_module_says_what_it_takes(module: Any, what: str) -> None:
    with pytest.raises(whorl.InputError, match=f"module is {what}: whorl.explain takes a torch.nn.Module"):
        whorl.explain(module, X)


@pytest.mark.usefixtures("no_compiler")
def test_explain_shows_what_settings_would_refuse() -> None:
    """To see why a layer is slow is most wanted where being slow is an error."""
    with settings(slow="error"):
        assert whorl.explain(whorl.GRU(5, 7), X).plans[0].slow
        assert whorl.explain(torch.nn.Sequential(whorl.GRU(5, 7)), X).plans[0].slow
