"""Calls without options, in which addresses take the place of tensors, on the host by `emulation`."""

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from comparison import assert_agrees, draw, make
from whorl import run
from whorl.engines.cuda import aligned, layers, prepare
from whorl.engines.cuda.memory import laid_out
from whorl.engines.cuda.plain import Plain
from whorl.engines.cuda.products import Product

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("host"),
]
FORMS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "batch first": dict(batch_first=True),
    "two layers": dict(num_layers=2),
    "both directions, no bias": dict(num_layers=3, bidirectional=True, bias=False),
    "dropout, both directions": dict(num_layers=3, bidirectional=True, dropout=0.4),
}


def ran() -> list[type]:
    return [type(made) for _, made in layers._prepared.values()]


@pytest.mark.parametrize("time, initial, of_x", [(4, False, True), (4, True, False), (1, True, True), (1, False, True)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_it_is_right(cell: str, form: str, time: int, initial: bool, of_x: bool) -> None:
    torch.manual_seed(1)
    layer = make(whorl, cell, 6, 10, dtype=torch.bfloat16, engine="persistent", **FORMS[form])
    layout = "batch first" if layer.batch_first else "time first"
    assert_agrees(layer, *draw(cell, layout, time, 5, 6, initial, layer), of_x=of_x)
    assert ran() == [Plain]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("cell", ["GRU", "RNN tanh"])
def test_dtypes(cell: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = make(whorl, cell, 6, 10, 2, dtype=dtype, engine="persistent")
    assert_agrees(layer, *draw(cell, "time first", 4, 5, 6, True, layer))
    assert ran() == [Plain]


def elsewhere(weight: Tensor) -> Tensor:
    """The same numbers, beginning at no multiple of 16 bytes."""
    return weight.new_empty(weight.numel() + 1)[1:].view(weight.shape).copy_(weight)


@pytest.mark.parametrize("lay", [elsewhere, lambda weight: weight.t().contiguous().t()], ids=["shifted", "turned"])
def test_weights_lie_anywhere(lay: Any) -> None:
    torch.manual_seed(1)
    layer = make(whorl, "LSTM", 6, 10, 2, dtype=torch.bfloat16, engine="persistent")
    for weight in layer.parameters():
        weight.data = lay(weight.data) if weight.dim() == 2 else elsewhere(weight.data)
    assert_agrees(layer, *draw("LSTM", "time first", 4, 5, 6, True, layer))
    assert ran() == [Plain]


def test_only_the_last_outputs_have_gradients_or_only_the_states() -> None:
    for which in range(3):
        torch.manual_seed(1)
        layer = make(whorl, "LSTM", 6, 10, 2, dtype=torch.bfloat16, engine="persistent")
        x, states = draw("LSTM", "time first", 4, 5, 6, True, layer)
        assert_agrees(layer, x, states, loss=lambda outputs, which=which: outputs[which].square().sum())


def test_inference_keeps_nothing_and_gives_the_same() -> None:
    """Four layers: those that are not next to each other share their places."""
    layer = make(whorl, "LSTM", 6, 10, 4, dtype=torch.bfloat16, engine="persistent")
    x = torch.randn(4, 5, 6, dtype=torch.bfloat16)
    wanted, states = layer(x)
    with torch.no_grad():
        y, finals = layer(x)
    for got, truth in zip((y, *finals), (wanted, *states), strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=0)
    (_, training), (_, inference) = layers._prepared.values()
    assert inference._room.shape[0] < training._room.shape[0] / 2
    assert (len(training._input_products.of_backward()), inference._input_products.of_backward()) == (8, [])


@pytest.mark.parametrize("shape", [(7,), (4, 5, 6), (1, 3, 1)])
def test_memory_that_is_laid_out_lies_in_one_piece(shape: tuple[int, ...]) -> None:
    made = torch._C._dynamo.guards._empty_strided_cpu(*laid_out(shape, torch.bfloat16))  # the sibling of `memory.empty`
    wanted = torch.empty(shape, dtype=torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize("recording", [True, False])
def test_kernels_run_before_torch_makes_the_operation(recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def noted(name: str, function: Any) -> Any:
        return lambda *given: seen.append((name, torch.is_grad_enabled())) or function(*given)

    monkeypatch.setattr(Plain, "forward", noted("kernels", Plain.forward))
    monkeypatch.setattr(run._Eager, "forward", staticmethod(noted("operation", run._Eager.forward)))
    layer = make(whorl, "LSTM", 6, 10, dtype=torch.bfloat16, engine="persistent")
    with torch.set_grad_enabled(recording):
        y, _ = layer(torch.randn(4, 5, 6, dtype=torch.bfloat16).transpose(0, 1).contiguous().transpose(0, 1))
        assert torch.is_grad_enabled() == y.requires_grad == recording
    assert seen == [("kernels", False), ("operation", False)][: 1 + recording]


def test_grad_mode_is_as_before_where_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "forward", lambda *given: pytest.fail("no memory", pytrace=False))
    layer = make(whorl, "LSTM", 6, 10, dtype=torch.bfloat16, engine="persistent")
    with pytest.raises(pytest.fail.Exception, match="no memory"):
        layer(torch.randn(4, 5, 6, dtype=torch.bfloat16))
    assert torch.is_grad_enabled()


def test_backward_may_run_again() -> None:
    layer = make(whorl, "GRU", 6, 10, 2, dtype=torch.bfloat16, engine="persistent")
    x = torch.randn(4, 5, 6, dtype=torch.bfloat16, requires_grad=True)
    loss = layer(x)[0].sum()
    first, second = (torch.autograd.grad(loss, (x, *layer.parameters()), retain_graph=True) for _ in range(2))
    for got, truth in zip(second, first, strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=0)


def test_a_compiled_graph_hands_backward_more_than_what_was_kept() -> None:
    layer = make(whorl, "LSTM", 6, 10, 2, dtype=torch.bfloat16, engine="persistent")
    x = torch.randn(4, 5, 6, dtype=torch.bfloat16, requires_grad=True)

    def loss(x: Tensor) -> Tensor:
        return layer(x)[0].square().sum()

    torch._dynamo.reset()
    found = (torch.compile(loss, backend="aot_eager")(x), loss(x))
    first, second = (torch.autograd.grad(value, (x, *layer.parameters())) for value in found)
    for got, truth in zip(first, second, strict=True):
        torch.testing.assert_close(got, truth, rtol=0, atol=0)
    assert {*ran()} == {Plain}


def test_no_product_for_an_x_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, multiply = [], Product.__call__
    monkeypatch.setattr(
        Product, "__call__", lambda own, *given, **how: counts.append(own) or multiply(own, *given, **how)
    )
    layer = make(whorl, "LSTM", 6, 10, dtype=torch.bfloat16, engine="persistent")
    for of_x, wanted in ((True, 3), (False, 2)):
        y, _ = layer(torch.randn(4, 5, 6, dtype=torch.bfloat16, requires_grad=of_x))
        counts.clear()
        y.sum().backward()
        assert len(counts) == wanted


def test_the_text_of_a_kernel_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    codes = prepare.codes

    def seen(wanted: Any, chip: Any) -> Any:
        found = codes(wanted, chip)
        names.extend(name for name, _ in found)
        return found

    monkeypatch.setattr(prepare, "codes", seen)
    layer = make(whorl, "LSTM", 6, 10, 2, dtype=torch.bfloat16, engine="persistent")
    x, lengths = torch.randn(4, 5, 6, dtype=torch.bfloat16), torch.tensor([4, 3, 2, 1, 4])
    layer(x)[0].sum().backward()
    layer(x, lengths=lengths)[0].sum().backward()
    assert len(names) == len({*names}) + 2 == 4  # a kernel with options has the name of the plain one
    monkeypatch.setattr(layers, "kernels", lambda *given: pytest.fail("what is there is made ready again"))
    layer(x, lengths=lengths)[0].sum().backward()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cell, dtype", [("LSTM", torch.bfloat16), ("GRU", torch.float32)])
def test_products_of_copies(cell: str, dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "LEAST", 1)
    torch.manual_seed(1)
    layer = make(whorl, cell, 5, 11, dtype=dtype, engine="persistent", **FORMS[form])
    layout = "batch first" if layer.batch_first else "time first"
    assert_agrees(layer, *draw(cell, layout, 3, 5, 5, True, layer))
    assert ran() == [Plain]


def test_what_has_options_goes_another_way() -> None:
    x = torch.randn(4, 5, 6, dtype=torch.bfloat16)
    layer = make(whorl, "LSTM", 6, 10, dtype=torch.bfloat16, engine="persistent")
    layer(x, lengths=torch.tensor([4, 3, 2, 1, 4]))
    make(whorl, "LSTM", 6, 10, dtype=torch.bfloat16, engine="persistent")(x, return_states=True)
    assert Plain not in ran()
