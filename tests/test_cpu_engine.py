"""Engine `cpu` against `reference` in float64: every cell, option and dtype; and how its kernels are built and run."""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from cells_for_tests import odd_ends
from comparison import EXACT, error, flat, weighted
from engine_cases import CELLS, FORMS, WRAPPED, Case, assert_agrees, results
from whorl import compiler
from whorl.engines import ENGINES, host
from whorl.engines.cpu import generate, plain
from whorl.engines.cpu.masks import NONE
from whorl.errors import CompileError
from whorl.functional import planned, recurrent
from whorl.problem import Call

pytestmark = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_the_reference(cell: str, case: Case) -> None:
    assert_agrees("cpu", CELLS[cell], case, torch.float64)


@pytest.mark.parametrize("marks", [(), ("evaluated",), ("mask", "lengths", "reset_to")], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_zoneout(cell: str, marks: tuple[str, ...]) -> None:
    shares = tuple(0.2 + 0.1 * index for index in range(len(CELLS[cell].states)))
    assert_agrees(
        "cpu", CELLS[cell], Case({"zoneout": shares, "directions": 2}, marks=marks, sequences=True), torch.float64
    )


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("projection", [1, 5, 20])
def test_projection(projection: int, case: Case) -> None:
    assert_agrees("cpu", CELLS["lstm"], replace(case, form=case.form | {"projection": projection}), torch.float64)


@pytest.mark.parametrize("name", ["layers", "mask and lengths", "given, by gate", "a panel and one"])
@pytest.mark.parametrize("cell", WRAPPED)
def test_options_of_cells(cell: str, name: str) -> None:
    assert_agrees("cpu", WRAPPED[cell], FORMS[name], torch.float64)


@pytest.mark.parametrize("name", [name for name in FORMS if "given" in name] + ["layers", "mask"])
def test_no_gradient_of_what_needs_none(name: str) -> None:
    """Of x and masks that are constant: the other gradients are the same to the bit, and these are not made."""
    form, call = FORMS[name].build(CELLS["lstm"])
    full = results(form, call, "cpu", False)
    constant = call.x, *call.dropout, *call.noise
    tensors = [tensor if any(tensor is one for one in constant) else tensor.requires_grad_() for tensor in call.tensors]
    text, again = form.to_json(), Call.of(tensors, call.layout, call.marks)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    grads = iter(torch.autograd.grad(weighted(recurrent(text, again, "cpu")), wanted))
    for (key, found), tensor in zip(list(full.items())[-len(tensors) :], tensors, strict=True):
        assert not tensor.requires_grad or torch.equal(next(grads), found), key
    plan = planned(text, again, "cpu")
    assert plan.problem.constants == tuple(name for name in ("x", "dropout", "noise") if len(getattr(call, name)))
    with torch.no_grad():
        y, *_ = outcome = ENGINES["cpu"].forward(plan, again)
        made = ENGINES["cpu"].backward(plan, again, y, outcome.saved, [y, *[None] * len(outcome.finals)])
    parts = Call.of(made, call.layout, call.marks)  # type: ignore[arg-type]
    zoneouts = form.layers * form.directions * 2 if call.noise and "shared" not in name else 0
    assert parts.x is None
    assert not any(grad is not None for grad in parts.dropout)
    assert sum(grad is not None for grad in parts.noise) <= zoneouts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["two layers", "reset", "mask and lengths", "recurrent dropout by gate", "a panel and one"]
)
@pytest.mark.parametrize("cell", CELLS)
def test_follows_the_error_rule(cell: str, name: str, dtype: torch.dtype) -> None:
    assert_agrees("cpu", CELLS[cell], FORMS[name], dtype)


@whorl.cell(gates="a b", states="h")
def spread_alone(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A variance whose mean nothing else asks for, of one gate, and then of what is made of it and another."""
    value = x.a + r.a
    for _ in range(2):
        apart = value - whorl.mean(value)
        value = whorl.tanh(value * whorl.rsqrt(whorl.mean(apart * apart) + 0.1) + x.b + r.b)
    return dict(h=value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_variance_without_its_mean(dtype: torch.dtype) -> None:
    assert_agrees("cpu", spread_alone.graph, Case(time=4, batch=3, units=33), dtype)


@whorl.cell(gates="c d", states="h")
def inhibition(x: Any, r: Any, s: Any) -> dict[str, Any]:
    """A mean and a product that are added: backward one value enters a mean and a product with transposed weights."""
    return dict(h=torch.tanh(x.c + r.d(torch.sigmoid(x.d) * s.h) - whorl.mean(s.h)))


def test_a_mean_and_a_product_with_one_gradient() -> None:
    assert_agrees("cpu", inhibition.graph, Case(time=4, batch=3, units=33), torch.float64)


def test_gradients_of_vectors_are_tensors_of_their_own() -> None:
    """They lie in one piece of memory, which nobody can tell from what they do."""
    layer, x = whorl.LSTM(5, 7, 2, layer_norm=True, engine="cpu"), torch.randn(6, 3, 5)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x)[0].square().sum().backward()
    before = [weight.grad.clone() for weight in layer.parameters()]
    layer.vector_x_gain_f_l0.grad.mul_(2.0)
    for (name, weight), was in zip(layer.named_parameters(), before, strict=True):
        assert torch.equal(weight.grad, 2.0 * was if name == "vector_x_gain_f_l0" else was), name
        assert not weight.grad._is_view(), name
    for grad in torch.autograd.grad(layer(x)[0].sum(), tuple(layer.parameters())):
        grad.mul_(torch.ones_like(grad, requires_grad=True))  # a view of several would refuse
    layer.zero_grad()
    with pytest.warns(UserWarning, match="create_graph"):
        layer(x)[0].square().sum().backward(create_graph=True)
    optimizer.zero_grad(set_to_none=False)
    assert not any(weight.grad.any() for weight in layer.parameters())


# --- threads and processes --------------------------------------------------------------------------------------------


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sweeps(layer: torch.nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """What the engine's own kernels make: outputs, final states, and the gradients that the loops hand to products."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    outputs = flat(layer(x, **options))
    weighted(outputs).backward()
    return [*outputs, x.grad, *(weight.grad for weight in layer.parameters())]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "marks", ["lengths", "lengths by the way of all calls", "lengths and resets", "lengths, resets and a mask"]
)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTM with layer norm"])
def test_the_number_of_threads_changes_no_bit(
    kind: str, marks: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what lies beside a sequence in its batch."""
    if "way" in marks:
        monkeypatch.setattr(plain, "sizes", lambda *_: None)
    name, _, normed = kind.partition(" with ")
    options = {"layer_norm": True} if normed else {"zoneout": 0.1}
    layer = getattr(whorl, name)(40, 65, bidirectional=True, **options, dtype=dtype, engine="cpu")
    x, given = torch.randn(9, 13, 40, dtype=dtype), {"lengths": torch.randint(0, 10, (13,))}
    given |= {"reset": torch.rand(9, 13) < 0.3} if "resets" in marks else {}
    given |= {"mask": torch.rand(9, 13) < 0.7} if "mask" in marks else {}
    found = []
    for count in (1, 2, 3):
        with threads(count):
            torch.manual_seed(0)
            found.append(sweeps(layer, x, **given))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
    layer.eval()
    alone = layer(x[:, 4:5], **{name: mark[..., 4:5] for name, mark in given.items()})[0]
    assert torch.equal(alone, layer(x, **given)[0][:, 4:5])


def test_threads_share_a_row_where_that_is_faster() -> None:
    def team(units: int, batch: int = 1, **options: Any) -> int:
        plan = whorl.LSTM(units, units, engine="cpu", **options).plan(torch.randn(30, batch, units))
        made = plain.sizes(plan.problem, 2, NONE)
        assert made is not None
        return made.sweep(0).team

    assert [team(units) for units in (32, 64, 96, 128, 512)] == [1, 1, 2, 2, 2]
    assert [team(units, layer_norm=True) for units in (64, 128, 192, 256)] == [1, 1, 2, 2]
    assert team(512, batch=2) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_one_sequence_stays_there(dtype: torch.dtype) -> None:
    layer = whorl.GRU(5, 33, engine="cpu", dtype=dtype)
    x = torch.randn(6, 4, 5, dtype=dtype)
    clean = layer(x)[0]
    x[2, 1] = torch.nan
    x[4, 2] = torch.inf
    spoilt = layer(x)[0]
    assert torch.equal(clean[:, [0, 3]], spoilt[:, [0, 3]])
    assert torch.equal(clean[:2, 1], spoilt[:2, 1])
    assert spoilt[2:, 1].isnan().all()
    assert torch.equal(spoilt.isnan(), whorl_reference(layer, x).isnan())


def whorl_reference(layer: torch.nn.Module, x: Tensor) -> Tensor:
    layer.engine = "reference"
    try:
        return layer(x)[0]
    finally:
        layer.engine = "cpu"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_was_forked_can_go_on() -> None:
    """As the workers of a DataLoader do: OpenMP's threads are gone there."""
    script = """
import os, torch, whorl
torch.set_num_threads(2)
layer, x = whorl.GRU(32, 64, engine="cpu"), torch.randn(20, 16, 32)
with torch.no_grad():
    before = layer(x)[0]
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(before, layer(x)[0]) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_engines_draw_the_same_masks() -> None:
    """Drawn by counting: dropout and zoneout by `reference` and here, from the same seed."""
    options = dict(recurrent_dropout=0.4, input_dropout=0.2, zoneout=0.3, dtype=torch.float64)
    layer, x = whorl.LSTM(5, 7, 2, bidirectional=True, **options), torch.randn(6, 3, 5, dtype=torch.float64)
    found = []
    for engine in ("reference", "cpu"):
        layer.engine = engine
        torch.manual_seed(5)
        found.append(layer(x)[0])
    assert error(found[1], found[0]) <= EXACT


def test_double_backward_tangents_and_mapped_calls() -> None:
    layer, x = whorl.GRU(3, 4, dtype=torch.float64, engine="cpu"), torch.randn(5, 2, 3, dtype=torch.float64)
    torch.autograd.gradcheck(lambda x: layer(x)[0], x.requires_grad_(), check_forward_ad=True, check_batched_grad=True)
    with pytest.warns(whorl.SlowWarning, match="double backward"):
        torch.autograd.gradgradcheck(lambda x: layer(x)[0].sum(0), x)


def test_it_compiles_into_one_graph() -> None:
    layer, x = whorl.GRU(3, 4, 2, bidirectional=True, engine="cpu"), torch.randn(5, 2, 3)
    eager = sweeps(layer, x)
    compiled = sweeps(torch.compile(layer, backend="aot_eager", fullgraph=True), x)
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))


@pytest.mark.parametrize("options", [{}, dict(return_states=True)], ids=["plain", "every step"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_initial_states_of_another_dtype(dtype: torch.dtype, kind: str, options: dict[str, bool]) -> None:
    """Under autocast, float32 beside bfloat16 weights: gradients of recurrent weights were of other memory."""
    made = []
    for engine in ("reference", "cpu"):
        torch.manual_seed(1)
        layer = getattr(whorl, kind)(4, 5, 2, bidirectional=True, engine=engine)
        states = [torch.randn(4, 3, 5).to(dtype).requires_grad_() for _ in layer._widths]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(torch.randn(6, 3, 4), tuple(states) if kind == "LSTM" else states[0], **options)[0]
        made.append([y, *torch.autograd.grad(y.float().square().sum(), [*states, *layer.parameters()])])
    for one, other in zip(*made, strict=True):
        assert one.dtype == other.dtype
        assert (one.double() - other.double()).norm() <= 2e-2 * other.double().norm()


@pytest.mark.parametrize("options", [{}, dict(input_dropout=0.3), dict(proj_size=3)], ids=str)
def test_backward_inside_a_compiled_function(options: dict[str, float]) -> None:
    """torch's compiler would trace the engine there: what calls it is in the same thread."""

    def train(loss: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        loss.backward()
        return loss.detach()

    x, grads = torch.randn(5, 3, 4), []
    for run in (train, torch.compile(train, backend="eager")):
        torch.manual_seed(2)
        layer = whorl.LSTM(4, 5, engine="cpu", **options)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run(layer(x)[0].square().mean())
        grads.append([weight.grad for weight in layer.parameters()])
    assert all(map(torch.equal, *grads))
    assert torch._dynamo.utils.counters["frames"]["total"] <= 4  # of `train` alone


def test_recomputed_is_the_same() -> None:
    layer, x = whorl.GRU(3, 4, 2, zoneout=0.2, engine="cpu"), torch.randn(5, 2, 3)
    found = []
    for memory in ("save", "recompute"):
        layer.memory = memory
        torch.manual_seed(0)
        found.append(sweeps(layer, x))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# --- functions --------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "log": torch.log,
    "log1p": torch.log1p,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: torch.nn.functional.softplus(x, threshold=100),
}


SETS = ["", "-march=x86-64", "-march=x86-64-v3"] if platform.machine() in ("x86_64", "AMD64") else [""]
"""Flags for what this processor has, and for it without and with fused multiply-adds."""


def made(name: str, x: Tensor, flags: str) -> Tensor:
    """A function of the kernels of float32."""
    defines = f"-DWHORL_DTYPE=32 -DWHORL_TESTED {flags}"
    library = host.load("functions", generate.source(CELLS["lstm"]).text, defines)
    y, place = torch.full_like(x, 7.0), list(FUNCTIONS).index(name)
    library.whorl_maths(*map(ctypes.c_int64, (place, len(x))), *map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr())))
    return y


def units_apart(y: Tensor, wanted: Tensor) -> Tensor:
    """In units of float32's last place."""
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    return (y.double() - wanted).abs() / 2.0 ** (wanted.abs().clamp(tiny, largest).log2().floor() - 23)


@pytest.mark.parametrize("flags", SETS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_float32_are_right_to_two_units_in_the_last_place(name: str, flags: str) -> None:
    """Every exponent and sign, each with 4,096 values of the rest, and the values around zero, infinity and NaN."""
    bits = (torch.arange(512)[:, None] << 23) + (torch.arange(4096) << 11) + torch.randint(0, 2048, (512, 4096))
    bits[:, 0] = torch.arange(512) << 23
    x = bits.flatten().to(torch.int32).view(torch.float32)
    y, wanted = made(name, x, flags), FUNCTIONS[name](x.double())
    assert torch.equal(y.isnan(), wanted.isnan())
    close = wanted.float()
    same = (y == close) | wanted.isnan()
    assert units_apart(y, wanted)[~same].max() <= 2.0
    assert torch.equal(y.isinf(), close.isinf() & ~y.isnan())
    if name in ("tanh", "sigmoid"):  # beyond 1 by a rounding, a step's sqrt(1 - gate) would be NaN
        assert y.nan_to_num().abs().max() == 1.0


@pytest.mark.parametrize("flags", SETS)
@pytest.mark.parametrize("name, most", [("sigmoid", 1.68), ("tanh", 1.44)])
def test_sigmoid_and_tanh_are_as_exact_on_every_processor(name: str, most: float, flags: str) -> None:
    """Where they are furthest from what is right: those of fused multiply-adds reach 1.98 and 1.48 without them."""
    x = torch.arange(0x3F000000, 0x40000000, 2, dtype=torch.int32).view(torch.float32)  # from 1/2 to 2
    x = -x if name == "sigmoid" else x
    assert units_apart(made(name, x, flags), FUNCTIONS[name](x.double())).max() <= most


@pytest.mark.parametrize("count", [1, 2, 7, 15, 16, 17, 31, 64, 83, 1024])
@pytest.mark.parametrize("first", [0.0, 100.0])
@pytest.mark.parametrize(("far", "spread"), [(0.0, 1.0), (3000.1, 1.0), (3000.1, 0.0)])
def test_means_and_variances_are_right_far_from_zero(far: float, spread: float, first: float, count: int) -> None:
    """Of two rows, beside two of NaN, of which nothing enters the first: the mean to half a unit in the last place.

    Args:
        first: how far the first 16 numbers are from the others.
    """
    library = host.load("functions", generate.source(CELLS["lstm"]).text, "-DWHORL_DTYPE=32 -DWHORL_TESTED")
    rows, found = torch.full((4, count + 16), torch.nan), torch.full((4,), 7.0)
    rows[:2, :count] = spread * torch.randn(2, count) + far
    rows[0, :16] += first
    sizes = map(ctypes.c_int64, (count, count + 16))
    library.whorl_means(ctypes.c_void_p(rows.data_ptr()), *sizes, ctypes.c_void_p(found.data_ptr()))
    values, eps = rows[:2, :count].double(), torch.finfo(torch.float32).eps
    mean, variance = values.mean(), values.var(correction=0)
    last = 2.0 ** (mean.abs().log2().floor() - 23)
    assert (found[0] - mean).abs() <= 0.51 * last + 4 * eps * variance.sqrt()
    assert (found[1] - variance).abs() <= 8 * eps * (variance + last**2)
    assert found[1] >= 0
    assert found[2:].isnan().all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
@pytest.mark.parametrize("units", [5, 40])
def test_a_mean_of_an_infinity_is_infinite(units: int, value: float) -> None:
    """In a row's last units, which fill no vector, or its first."""
    layer, x = whorl.Recurrent(odd_ends, 1, units, bias=False), torch.ones(1, 1, 1)
    layer.weight_ih_l0.data[units // 2 % 17] = value  # of gate a, of which state d is the mean
    for engine in ("reference", "cpu"):
        layer.engine = engine
        assert layer(x)[1][2].eq(value).all()


@pytest.mark.parametrize("count", [16, 37, 128])
def test_a_mean_does_not_depend_on_the_rows_beside_it(count: int) -> None:
    """Of those one is read again, because what is taken from its numbers is far from their mean."""
    library = host.load("functions", generate.source(CELLS["lstm"]).text, "-DWHORL_DTYPE=32 -DWHORL_TESTED")
    near, far = torch.randn(2, count), 1e-3 * torch.randn(2, count)
    far[0, :16] += 50

    def means(*rows: Tensor) -> Tensor:
        these, found = torch.cat(rows), torch.empty(2, 2)
        library.whorl_means(
            ctypes.c_void_p(these.data_ptr()), *map(ctypes.c_int64, (count, count)), ctypes.c_void_p(found.data_ptr())
        )
        return found

    assert torch.equal(means(near, far)[0], means(near, near)[0])
    assert torch.equal(means(far, near), means(near, far).flip(0))


# --- building ---------------------------------------------------------------------------------------------------------

TINY = 'extern "C" int number() { return NUMBER; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kernels, and nothing loaded."""
    monkeypatch.setattr(host, "_loaded", {})
    whorl.settings.cache = tmp_path / "kernels"
    return tmp_path / "kernels" / "cpu"


def forget() -> None:
    host._loaded.clear()


def test_a_kernel_is_compiled_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.load("tiny", TINY, "-DNUMBER=3").number() == 3
    assert {path.suffix for path in cache.iterdir()} == {".cpp", ".so", ".txt"}
    assert all(not path.stat().st_mode & 0o077 for path in (cache, cache.parent))
    forget()
    monkeypatch.setattr(host, "_build", lambda *_: pytest.fail("it was built already"))
    assert host.load("tiny", TINY, "-DNUMBER=3").number() == 3


def test_another_source_flag_compiler_or_processor_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {host._key(TINY, "-DNUMBER=3"), host._key(TINY + " ", "-DNUMBER=3"), host._key(TINY, "-DNUMBER=4")}
    for name in ("_version", "_processor"):
        monkeypatch.setattr(host, name, lambda: "another")
        keys.add(host._key(TINY, "-DNUMBER=3"))
    assert len(keys) == 5


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "no digest"])
def test_a_damaged_kernel_is_built_again(cache: Path, damage: str) -> None:
    host.load("tiny", TINY, "-DNUMBER=5")
    (made,), (pointer,) = cache.glob("*.so"), cache.glob("*.txt")
    whole = made.read_bytes()
    made.unlink()  # it is mapped: written over, it would change under the process
    if damage == "cut":
        made.write_bytes(whole[: len(whole) // 2])
    elif damage == "changed":
        made.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "no digest":
        pointer.write_bytes(b"\xff")
    forget()
    assert host.load("tiny", TINY, "-DNUMBER=5").number() == 5
    digest = pointer.read_text()  # not always the one before: some compilers write where they ran into what they make
    assert hashlib.blake2b((cache / f"{digest}.so").read_bytes(), digest_size=16).hexdigest() == digest


def test_processes_may_build_at_once(cache: Path) -> None:
    script = (
        "import whorl; from pathlib import Path; from whorl.engines import host; "
        f"whorl.settings.cache = Path({str(cache.parent)!r}); "
        f"assert host.load('tiny', {TINY!r}, '-DNUMBER=7').number() == 7"
    )
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert len(list(cache.glob("*.txt"))) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_folder_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(CompileError, match="type `chmod 700"):
        host.load("tiny", TINY, "-DNUMBER=8")


def test_a_home_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").touch()
    whorl.settings.cache = tmp_path / "file"
    assert host.load("tiny", TINY, "-DNUMBER=9").number() == 9


def test_what_the_compiler_says_is_told(cache: Path) -> None:
    with pytest.raises(CompileError, match="NUMBER") as raised:
        host.load("tiny", TINY, "")
    assert "engine='reference'" in str(raised.value)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_plan_says_so_and_what_runs_instead() -> None:
    layer, x = whorl.GRU(5, 7), torch.randn(6, 3, 5)
    made = layer.plan(x)
    assert made.engine == "reference"
    (reasons,) = [refusal.reasons for refusal in made.refusals if refusal.engine == "cpu"]
    assert f"no C++ compiler is found: {compiler.remedy()}" in reasons
    layer.engine = "cpu"
    with pytest.raises(whorl.UnsupportedError, match="no C"):
        layer(x)
