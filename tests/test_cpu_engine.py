"""Engine `cpu` against `reference` in float64: every cell, option and dtype; and how its kernels are built and run."""

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from cells_for_tests import USER
from comparison import EXACT, error, flat, weighted
from whorl import compiler
from whorl.cells import library, wrappers
from whorl.cells.cell import Cell, Graph
from whorl.engines.cpu import build, generate
from whorl.errors import CompileError
from whorl.functional import recurrent
from whorl.problem import Call, Form, Marks
from whorl.weights import kinds, shapes

pytestmark = pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LIBRARY = [cell for cell in vars(library).values() if isinstance(cell, Cell)]
CELLS = {cell.name: cell.graph for cell in [*LIBRARY, *USER]}


@dataclass
class Case:
    """A call to draw, for a cell."""

    form: dict[str, Any] = field(default_factory=dict)
    time: int = 7
    batch: int = 5
    inputs: int = 3
    units: int = 11
    initial: bool = True
    packed: bool = False
    sequences: bool = False
    marks: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    """Masks that are given: "input", "input by gate", "recurrent", "zoneout"."""
    seed: int = 3
    narrow: bool = False
    """Extra inputs are one number for all units."""

    def build(self, graph: Graph) -> tuple[Form, Call]:
        """The form, and a call in float64."""
        torch.manual_seed(self.seed)
        made = {"zoneout": ()} | self.form
        form = Form(graph, self.inputs, self.units, **{key: value for key, value in made.items() if key != "dropout"})
        time, batch, sizes, rows = self.time, self.batch, None, None
        outer: tuple[int, ...] = (time, batch)
        if self.packed:
            lengths = torch.tensor([time, *torch.randint(1, time + 1, (batch - 1,)).sort(descending=True).values])
            sizes = (lengths > torch.arange(time)[:, None]).sum(1)
            outer, rows = (int(sizes.sum()),), torch.randperm(batch)
        count, cells = form.layers * form.directions, form.cell

        def states() -> tuple[Tensor, ...]:
            drawn = [_normal(count, batch, form.state_width(index)) for index in range(len(cells.states))]
            # what a step divides by, as steps make it: above zero
            return tuple(d.abs() + 1 if name == "n" else d for d, name in zip(drawn, cells.states, strict=True))

        weights = [0.2 * _normal(*shape) for shape in shapes(form)]
        weights = [
            0.1 * w + 1 if "gain" in kind or "gamma" in kind else w
            for w, kind in zip(weights, list(kinds(form)) * count, strict=True)
        ]
        mask = torch.rand(outer) < 0.7 if "mask" in self.marks else None
        lengths = torch.randint(0, time + 1, (batch,)) if "lengths" in self.marks else None
        reset = torch.rand(outer) < 0.3 if "reset" in self.marks or "reset_to" in self.marks else None
        drawn = form.recurrent_dropout or form.input_dropout or (form.zoneout and "evaluated" not in self.marks)
        seed = torch.tensor(2**62 + 12345) if drawn else None
        x = _normal(*outer, self.inputs)
        for count_out in (lengths, mask):  # what does not count may be anything
            if count_out is not None:
                x[~_counted(outer, lengths, mask)] = torch.nan
        drops = self.form.get("dropout", 0.0)
        width = form.width * form.directions
        dropout = [(torch.rand(*outer, width) > drops).double() / (1 - drops) for _ in range(form.layers - 1)]
        extras = [torch.rand(*outer, 1 if self.narrow else self.units, dtype=torch.float64) for _ in cells.inputs]
        return form, Call(
            x,
            states() if self.initial else (),
            tuple(weights),
            tuple(dropout) if drops else (),
            states() if "reset_to" in self.marks else (),
            tuple(extras),
            tuple(self._noise(form, outer)) if self.given else (),
            Marks(sizes, rows, lengths, mask, reset, seed),
        )

    def _noise(self, form: Form, outer: tuple[int, ...]) -> list[Tensor]:
        found = []
        for layer in range(form.layers):
            for _ in range(form.directions):
                inputs, gates = form.layer_inputs(layer), len(form.cell.recurrent)
                shape: tuple[int, ...] = (self.batch, inputs)
                row = [torch.rand(shape) if "input" in self.given else torch.empty(())]
                if "input by gate" in self.given:
                    row = [torch.rand(len(form.cell.gates), *shape)]
                by_mode = {"gate": (gates, self.batch), "shared": (self.batch,), "step": outer}
                held = torch.rand(*by_mode[form.recurrent_dropout_mode], form.width)
                row.append(held if "recurrent" in self.given else torch.empty(()))
                for state in range(len(form.cell.states)):
                    zoneout = torch.rand(*outer, form.state_width(state))
                    row.append(zoneout if "zoneout" in self.given else torch.empty(()))
                found += [mask.double() for mask in row]
        return found


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _counted(outer: tuple[int, ...], lengths: Tensor | None, mask: Tensor | None) -> Tensor:
    found = torch.ones(outer, dtype=torch.bool) if mask is None else mask
    return found if lengths is None else found & (torch.arange(outer[0])[:, None] < lengths)


def results(form: Form, call: Call, engine: str, sequences: bool) -> dict[str, Tensor]:
    """Outputs, and the gradient of every tensor of the call, by name."""
    leaves = [tensor.detach().requires_grad_() for tensor in call.tensors]
    outputs = recurrent(form.to_json(), Call.of(leaves, call.layout, call.marks), engine, sequences)
    grads = torch.autograd.grad(weighted(outputs), leaves, allow_unused=True)
    names = ["x 0", *(f"{part} {i}" for part in Call._fields[1:7] for i in range(len(getattr(call, part))))]
    zeros = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | dict(zip(names, zeros, strict=True))


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """x, weights and states rounded; masks and extra inputs as they are."""
    wide = torch.float32 if dtype == torch.bfloat16 else dtype

    def rounded(tensors: Sequence[Tensor], to: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(tensor.to(to) for tensor in tensors)

    kinds = {"x": dtype, "states": dtype, "weights": dtype, "dropout": dtype, "reset_to": dtype}
    kinds |= {"inputs": wide, "noise": wide}
    changed: dict[str, Any] = {name: rounded(getattr(call, name), to) for name, to in kinds.items() if name != "x"}
    return call._replace(x=call.x.to(dtype), **changed)


def assert_agrees(graph: Graph, case: Case, dtype: torch.dtype) -> None:
    """Outputs and gradients follow the error rule; the baseline is `reference` in the same dtype."""
    form, call = case.build(graph)
    rounded = in_dtype(call, dtype)
    truth = results(form, in_dtype(rounded, torch.float64), "reference", case.sequences)
    plain = results(form, rounded, "reference", case.sequences)
    got = results(form, rounded, "cpu", case.sequences)
    assert {name: tensor.dtype for name, tensor in got.items()} == {name: one.dtype for name, one in plain.items()}
    wrong = {}
    for name, wanted in truth.items():
        eps = torch.finfo(dtype).eps
        bound = EXACT if dtype == torch.float64 else 2 * error(plain[name], wanted) + 4 * eps
        if not error(got[name], wanted) <= bound:
            wrong[name] = (error(got[name], wanted), bound)
    assert wrong == {}


FORMS = {
    "plain": Case(),
    "no initial states": Case(initial=False),
    "no bias": Case({"bias": False}),
    "layers": Case({"layers": 3, "directions": 2, "dropout": 0.4}),
    "two layers": Case({"layers": 2, "directions": 2}, seed=5),
    "sequences": Case({"directions": 2}, sequences=True),
    "packed": Case({"layers": 2, "directions": 2}, packed=True, sequences=True),
    "lengths": Case({"layers": 2, "directions": 2}, marks=("lengths",), sequences=True),
    "mask": Case({"layers": 2, "directions": 2}, marks=("mask",), sequences=True),
    "mask and lengths": Case({"directions": 2}, marks=("mask", "lengths"), sequences=True),
    "reset": Case({"layers": 2, "directions": 2}, marks=("reset",), sequences=True),
    "reset to": Case({"directions": 2}, marks=("reset_to", "mask", "lengths")),
    "reset, packed": Case({"directions": 2}, marks=("reset_to",), packed=True),
    "one of each": Case(time=1, batch=1, inputs=1, units=1),
    "a vector and one": Case(time=3, batch=13, units=17),
    "a panel and one": Case(time=3, batch=7, units=65),
    "extra inputs of one number": Case({"directions": 2}, narrow=True),
    "recurrent dropout by gate": Case({"directions": 2, "recurrent_dropout": 0.4}),
    "recurrent dropout, shared": Case({"recurrent_dropout": 0.4, "recurrent_dropout_mode": "shared"}, packed=True),
    "recurrent dropout by step": Case({"recurrent_dropout": 0.4, "recurrent_dropout_mode": "step"}, marks=("lengths",)),
    "all dropped": Case({"recurrent_dropout": 1.0, "input_dropout": 1.0}),
    "input dropout": Case({"layers": 2, "directions": 2, "input_dropout": 0.4}, marks=("mask",)),
    "input dropout, packed": Case({"input_dropout": 0.4}, packed=True),
    "given, by gate": Case(given=("input by gate", "recurrent", "zoneout"), marks=("mask",)),
    "given, shared": Case(
        {"recurrent_dropout_mode": "shared", "directions": 2}, given=("input", "recurrent"), packed=True
    ),
    "given, by step": Case({"recurrent_dropout_mode": "step"}, given=("recurrent", "zoneout"), marks=("lengths",)),
    "given, by step, packed": Case({"recurrent_dropout_mode": "step"}, given=("recurrent", "zoneout"), packed=True),
}


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_the_reference(cell: str, case: Case) -> None:
    assert_agrees(CELLS[cell], case, torch.float64)


@pytest.mark.parametrize("marks", [(), ("evaluated",), ("mask", "lengths", "reset_to")], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_zoneout(cell: str, marks: tuple[str, ...]) -> None:
    shares = tuple(0.2 + 0.1 * index for index in range(len(CELLS[cell].states)))
    assert_agrees(CELLS[cell], Case({"zoneout": shares, "directions": 2}, marks=marks, sequences=True), torch.float64)


@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("projection", [1, 5, 20])
def test_projection(projection: int, case: Case) -> None:
    assert_agrees(CELLS["lstm"], replace(case, form=case.form | {"projection": projection}), torch.float64)


WRAPPED = {
    "layer norm": wrappers.layer_norm(library.lstm.graph, ("x", "r"))[0],
    "layer norm and a product": wrappers.layer_norm(CELLS["gru_before"], ("x", "r"))[0],
    "clipped": wrappers.clipped(library.lstm.graph, {"h": 0.3, "c": 0.5}),
    "every option of LSTM": library.make_lstm(torch.relu, torch.sigmoid, True, True, True).graph,
    "reset before": library.make_gru(torch.tanh, torch.sigmoid, False).graph,
}


@pytest.mark.parametrize("name", ["layers", "mask and lengths", "given, by gate", "a panel and one"])
@pytest.mark.parametrize("cell", WRAPPED)
def test_options_of_cells(cell: str, name: str) -> None:
    assert_agrees(WRAPPED[cell], FORMS[name], torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["two layers", "reset", "mask and lengths", "recurrent dropout by gate", "a panel and one"]
)
@pytest.mark.parametrize("cell", CELLS)
def test_follows_the_error_rule(cell: str, name: str, dtype: torch.dtype) -> None:
    assert_agrees(CELLS[cell], FORMS[name], dtype)


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
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_number_of_threads_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    """Nor does what lies beside a sequence in its batch."""
    layer = getattr(whorl, kind)(40, 65, bidirectional=True, zoneout=0.1, dtype=dtype, engine="cpu")
    x, lengths = torch.randn(9, 13, 40, dtype=dtype), torch.randint(0, 10, (13,))
    found = []
    for count in (1, 2, 3):
        with threads(count):
            torch.manual_seed(0)
            found.append(sweeps(layer, x, lengths=lengths))
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))
    layer.eval()
    alone = layer(x[:, 4:5], lengths=lengths[4:5])[0]
    assert torch.equal(alone, layer(x, lengths=lengths)[0][:, 4:5])


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
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_float32_are_right_to_two_units_in_the_last_place(name: str) -> None:
    """Every exponent and sign, each with 4,096 values of the rest, and the values around zero, infinity and NaN."""
    library = build.load("functions", generate.source(CELLS["lstm"]).text, "-DWHORL_DTYPE=32 -DWHORL_TESTED")
    bits = (torch.arange(512)[:, None] << 23) + (torch.arange(4096) << 11) + torch.randint(0, 2048, (512, 4096))
    bits[:, 0] = torch.arange(512) << 23
    x = bits.flatten().to(torch.int32).view(torch.float32)
    y = torch.full_like(x, 7.0)
    place = list(FUNCTIONS).index(name)
    library.whorl_maths(*map(ctypes.c_int64, (place, len(x))), *map(ctypes.c_void_p, (x.data_ptr(), y.data_ptr())))
    wanted = FUNCTIONS[name](x.double())
    assert torch.equal(y.isnan(), wanted.isnan())
    close = wanted.float()
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    steps = 2.0 ** (wanted.abs().clamp(tiny, largest).log2().floor() - 23)  # a unit in the last place
    apart = (y.double() - wanted).abs() / steps
    same = (y == close) | wanted.isnan()
    assert apart[~same].max() <= 2.0
    assert torch.equal(y.isinf(), close.isinf() & ~y.isnan())


# --- building ---------------------------------------------------------------------------------------------------------

TINY = 'extern "C" int number() { return NUMBER; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kernels, and nothing loaded."""
    monkeypatch.setattr(build, "_loaded", {})
    whorl.settings.cache = tmp_path / "kernels"
    return tmp_path / "kernels" / "cpu"


def forget() -> None:
    build._loaded.clear()


def test_a_kernel_is_compiled_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.load("tiny", TINY, "-DNUMBER=3").number() == 3
    assert {path.suffix for path in cache.iterdir()} == {".cpp", ".so", ".txt"}
    assert all(not path.stat().st_mode & 0o077 for path in (cache, cache.parent))
    forget()
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("it was built already"))
    assert build.load("tiny", TINY, "-DNUMBER=3").number() == 3


def test_another_source_flag_compiler_or_processor_is_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build._key(TINY, "-DNUMBER=3"), build._key(TINY + " ", "-DNUMBER=3"), build._key(TINY, "-DNUMBER=4")}
    for name in ("_version", "_processor"):
        monkeypatch.setattr(build, name, lambda: "another")
        keys.add(build._key(TINY, "-DNUMBER=3"))
    assert len(keys) == 5


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "no digest"])
def test_a_damaged_kernel_is_built_again(cache: Path, damage: str) -> None:
    build.load("tiny", TINY, "-DNUMBER=5")
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
    assert build.load("tiny", TINY, "-DNUMBER=5").number() == 5
    assert hashlib.blake2b(made.read_bytes(), digest_size=16).hexdigest() == made.stem


def test_processes_may_build_at_once(cache: Path) -> None:
    script = (
        "import whorl; from pathlib import Path; from whorl.engines.cpu import build; "
        f"whorl.settings.cache = Path({str(cache.parent)!r}); "
        f"assert build.load('tiny', {TINY!r}, '-DNUMBER=7').number() == 7"
    )
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]
    assert len(list(cache.glob("*.txt"))) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_folder_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(CompileError, match="type `chmod 700"):
        build.load("tiny", TINY, "-DNUMBER=8")


def test_a_home_that_cannot_be_written_is_done_without(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file").touch()
    whorl.settings.cache = tmp_path / "file"
    assert build.load("tiny", TINY, "-DNUMBER=9").number() == 9


def test_what_the_compiler_says_is_told(cache: Path) -> None:
    with pytest.raises(CompileError, match="NUMBER") as raised:
        build.load("tiny", TINY, "")
    assert "engine='reference'" in str(raised.value)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_plan_says_so_and_what_runs_instead() -> None:
    layer, x = whorl.GRU(5, 7), torch.randn(6, 3, 5)
    made = layer.plan(x)
    assert made.engine == "reference"
    assert f"no C++ compiler is found: {compiler.remedy()}" in made.refusals[-1].reasons
    layer.engine = "cpu"
    with pytest.raises(whorl.UnsupportedError, match="no C"):
        layer(x)
