"""Which engine runs: obstacles, plans, engines asked for by name, and engines that break."""

import inspect
import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

import whorl
from cells_for_tests import layer_norm_lstm, of_a_constant
from whorl import compiler
from whorl.cells import library
from whorl.cells.wrappers import layer_norm
from whorl.engines import ENGINES
from whorl.engines.cpu import engine as of_cpu
from whorl.engines.cuda import persistent, stepwise
from whorl.engines.native import OneDNN
from whorl.engines.reference import Reference
from whorl.plan import decide, decide_step
from whorl.problem import EXTRAS, VIRTUAL, Device, Form, Problem

X = torch.zeros(6, 3, 5)


@whorl.cell(gates="n", states="h", inputs="d")
def decayed(x: Any, r: Any, s: Any) -> dict[str, Any]:
    return dict(h=x.d * s.h + whorl.tanh(x.n + r.n))


@whorl.cell(gates="a b k", states="h c n", vectors={"w": 0.5}, x_only="k")
def four(x: Any, r: Any, s: Any, v: Any) -> dict[str, Any]:
    c = whorl.sigmoid(x.a + r.a) * s.c + v.w * whorl.tanh(x.b * r.b)
    return dict(h=whorl.tanh(c) * whorl.sigmoid(x.k), c=c, n=s.n + s.h)


LSTM = Form(cell=library.lstm.graph, inputs=5, units=7, layers=2)
GRU = replace(LSTM, cell=library.gru.graph)
RNN = replace(LSTM, cell=library.rnn_tanh.graph)
CPU = Device("cpu", "cpu", library=1, half=True, bfloat16=True, compiler="g++")
H200 = Device("cuda", "NVIDIA H200", (9, 0), 91900, half=True, bfloat16=True, multiprocessors=132)
T4 = replace(H200, name="Tesla T4", capability=(7, 5), bfloat16=False)
PLAIN = Problem(LSTM, CPU, torch.float32, time=6, batch=3, gradient=True)
HALF = replace(PLAIN, device=H200, dtype=torch.bfloat16)
ON = {
    "persistent": HALF,
    "cudnn": replace(PLAIN, device=H200),
    "stepwise": HALF,
    "onednn": PLAIN,
    "cpu": PLAIN,
    "reference": PLAIN,
}
MEAN = replace(LSTM, cell=layer_norm_lstm.graph)

LIMITS: list[tuple[str, dict[str, Any], str]] = [
    *((engine, {"virtual": True}, VIRTUAL) for engine in ("persistent", "stepwise", "cpu")),
    ("persistent", {"device": CPU}, "the tensors are on cpu, whorl's CUDA kernels run on cuda"),
    ("persistent", {"device": T4}, "the GPU has compute capability 7.5, these kernels are made for 8.0 to 9.0"),
    ("persistent", {"dtype": torch.float64}, "the dtype is float64, these kernels take float16, bfloat16 and float32"),
    (
        "persistent",
        {"form": replace(MEAN, units=1)},
        "the step of layer_norm_lstm has means over 1 unit, these kernels take 2 units or more there",
    ),
    (
        "persistent",
        {
            "form": replace(LSTM, cell=of_a_constant.graph, recurrent_dropout_mode="shared"),
            "extras": ("dropout_masks",),
            "gradient": True,
        },
        "what enters a product inside the step of of_a_constant has no gradient, these kernels then make none of masks "
        "of recurrent dropout",
    ),
    ("persistent", {"batch": 0}, "the batch is 0, these kernels take 1 or more"),
    (
        "persistent",
        {"form": replace(LSTM, cell=layer_norm(library.lstm.graph, ["x"])[0]), "time": 1 << 20, "batch": 1 << 10},
        "x has 1073741824 rows, the kernel of its layer norm takes 1073741823 or fewer",
    ),
    (
        "persistent",
        {"form": replace(LSTM, units=2300), "extras": ("mask",)},
        "2300 units of lstm in bfloat16, with options, do not fit the 132 multiprocessors, at most 2112 do",
    ),
    ("stepwise", {"device": CPU}, "the tensors are on cpu, whorl's CUDA kernels run on cuda"),
    (
        "stepwise",
        {"device": replace(H200, capability=(7, 0))},
        "the GPU has compute capability 7.0, the compiler takes 7.5 and later",
    ),
    (
        "stepwise",
        {"dtype": torch.float8_e5m2},
        "the dtype is float8_e5m2, the kernels take float16, bfloat16, float32 and float64",
    ),
    ("stepwise", {"batch": 0}, "the batch is 0, the kernels take 1 or more"),
    ("cudnn", {"device": CPU}, "the tensors are on cpu, cuDNN runs on cuda"),
    ("cudnn", {"device": replace(H200, library=0)}, "this torch has no cuDNN, or torch.backends.cudnn is switched off"),
    (
        "cudnn",
        {"form": replace(LSTM, cell=decayed.graph)},
        "the cell is decayed, cuDNN runs the plain LSTM, GRU and RNN",
    ),
    (
        "cudnn",
        {"dtype": torch.complex64},
        "the dtype is complex64, cuDNN takes float16, bfloat16, float32 and float64",
    ),
    (
        "cudnn",
        {"dtype": torch.bfloat16, "device": T4},
        "the dtype is bfloat16, which needs cuDNN 9.13 (this is 91900) and compute capability 8.0 (this is 7.5)",
    ),
    (
        "cudnn",
        {"form": replace(RNN, projection=3)},
        "the cell rnn_tanh has a projection, cuDNN takes one for LSTM alone",
    ),
    ("cudnn", {"time": 65_536}, "the sequence has 65536 steps, cuDNN takes at most 65535"),
    ("cudnn", {"batch": 0}, "the batch is 0, cuDNN takes 1 or more"),
    ("onednn", {"device": H200}, "the tensors are on cuda, oneDNN runs on cpu"),
    (
        "onednn",
        {"device": replace(CPU, library=0)},
        "this torch has no oneDNN, or torch.backends.mkldnn is switched off",
    ),
    ("onednn", {"form": GRU}, "the cell is gru, torch runs only the plain LSTM through oneDNN"),
    (
        "onednn",
        {"dtype": torch.float64},
        "the dtype is float64, oneDNN takes float32, bfloat16, and float16 without gradient",
    ),
    (
        "onednn",
        {"dtype": torch.bfloat16, "device": replace(CPU, bfloat16=False), "gradient": False},
        "oneDNN does not take bfloat16 on this processor",
    ),
    (
        "onednn",
        {"dtype": torch.float16},
        "the dtype is float16 and a gradient is wanted, oneDNN has none in float16",
    ),
    ("onednn", {"form": replace(LSTM, projection=3)}, "the projection is 3 wide, oneDNN takes none"),
    ("onednn", {"packed": True}, "the input is a PackedSequence, oneDNN takes padded input"),
    ("onednn", {"batch": 0}, "the batch is 0, oneDNN takes 1 or more"),
    (
        "cudnn",
        {"form": replace(LSTM, zoneout=(0.0, 0.1), input_dropout=0.2), "extras": ("mask", "drawn")},
        "cuDNN does not take input dropout, zoneout, a mask",
    ),
    ("onednn", {"extras": ("lengths", "return_states")}, "oneDNN does not take lengths, the states of every step"),
    ("cpu", {"device": H200}, "the tensors are on cuda, this engine runs on cpu"),
    ("cpu", {"device": replace(CPU, compiler="")}, f"no C++ compiler is found: {compiler.remedy()}"),
    (
        "cpu",
        {"device": replace(CPU, compiler="/bin/cl.exe")},
        "the C++ compiler is /bin/cl.exe, the kernels take GCC or Clang: name one in CXX",
    ),
    ("cpu", {"dtype": torch.float16}, "the dtype is float16, the kernels take float32, float64 and bfloat16"),
    ("cpu", {"batch": 0}, "the batch is 0, the kernels take 1 or more"),
]
WITHIN: list[tuple[str, dict[str, Any]]] = [
    ("persistent", {"time": 100_000, "batch": 1, "initial": True, "dropout": True}),
    ("persistent", {"form": replace(GRU, units=509, directions=2), "dtype": torch.float16}),
    ("persistent", {"form": replace(RNN, units=1024, memory="recompute")}),
    ("persistent", {"form": replace(LSTM, cell=four.graph)}),
    ("persistent", {"form": replace(MEAN, units=512, recurrent_dropout=0.1), "extras": ("mask", "drawn")}),
    ("persistent", {"form": replace(GRU, cell=library.mgu.graph, units=768)}),
    ("persistent", {"packed": True, "extras": ("reset", "return_states")}),
    ("persistent", {"form": replace(LSTM, projection=3, layers=2), "initial": True, "dropout": True}),
    ("persistent", {"form": replace(LSTM, projection=300), "extras": ("lengths", "mask", "reset")}),
    ("persistent", {"form": replace(LSTM, units=2048, zoneout=(0.1, 0.1)), "extras": tuple(EXTRAS)}),
    ("persistent", {"form": replace(LSTM, recurrent_dropout=0.1), "extras": ("drawn", "dropout_masks")}),
    (
        "persistent",
        {
            "form": replace(LSTM, zoneout=(0.1, 0.2), recurrent_dropout=0.1, recurrent_dropout_mode="step"),
            "extras": ("lengths", "mask", "reset", "drawn"),
        },
    ),
    ("cudnn", {"time": 65_535, "batch": 1}),
    ("cudnn", {"packed": True, "initial": True, "dropout": True}),
    ("cudnn", {"form": GRU, "dtype": torch.float64, "device": T4}),
    ("cudnn", {"form": replace(LSTM, projection=3), "dtype": torch.bfloat16}),
    ("cudnn", {"dtype": torch.float16, "device": T4}),
    ("onednn", {"time": 100_000, "batch": 1, "initial": True, "dropout": True}),
    ("onednn", {"dtype": torch.bfloat16}),
    ("onednn", {"dtype": torch.float16, "gradient": False}),
    ("onednn", {"form": replace(LSTM, recurrent_dropout=0.3, input_dropout=0.3, memory="recompute")}),
    ("cpu", {"form": replace(RNN, projection=3), "packed": True, "dtype": torch.float64}),
    ("cpu", {"form": replace(LSTM, zoneout=(0.1, 0.1), memory="recompute"), "extras": tuple(EXTRAS)}),
    ("reference", {"form": replace(LSTM, zoneout=(0.1, 0.1)), "extras": tuple(EXTRAS)}),
    ("reference", {"form": replace(RNN, projection=3), "packed": True, "batch": 0, "dtype": torch.complex64}),
]


@pytest.fixture(autouse=True)
def with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are the same whether or not NVRTC's bindings are installed here."""
    monkeypatch.setattr(persistent, "missing", lambda: None)


def test_without_nvrtc_the_reason_has_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent, "missing", lambda: "type this")
    made = decide(ON["persistent"])
    assert made.engine == "cudnn"
    assert [(refusal.engine, refusal.reasons) for refusal in made.refusals] == [("persistent", ("type this",))]


@pytest.mark.parametrize("engine, changes, sentence", LIMITS, ids=[f"{row[0]}: {row[2]}" for row in LIMITS])
def test_a_limit_of_an_engine_bites(engine: str, changes: dict[str, Any], sentence: str) -> None:
    assert ENGINES[engine].obstacles(ON[engine]) == []
    assert ENGINES[engine].obstacles(replace(ON[engine], **changes)) == [sentence]


def test_own_kernels_are_chosen_in_float32_with_options_and_spread_over_clusters() -> None:
    for asked in (
        replace(HALF, dtype=torch.float32),
        replace(HALF, form=replace(LSTM, units=1024)),
        replace(HALF, form=replace(LSTM, recurrent_dropout=0.5), extras=("drawn", "mask")),
    ):
        assert decide(asked).engine == "persistent"


@pytest.mark.parametrize("tf32", [True, False])
def test_float32_runs_on_own_kernels_as_torchs_switch_says(tf32: bool) -> None:
    device = replace(H200, tf32=tf32)
    assert decide(replace(HALF, dtype=torch.float32, device=device)).engine == "persistent"
    wide = replace(HALF, dtype=torch.float32, device=device, form=replace(LSTM, units=2500))
    words, most = ("float32 with TF32 products", 2112) if tf32 else ("float32", 1536)
    refusal = f"persistent: 2500 units of lstm in {words} do not fit the 132 multiprocessors, at most {most} do"
    assert str(decide(wide).refusals[0]) == refusal


def test_a_slower_engine_is_left_for_a_later_one_unless_it_is_named() -> None:
    """As measured on an H200, in a CUDA graph: see `Persistent.slower`."""
    large = replace(HALF, form=replace(LSTM, units=2048, layers=1), batch=128, gradient=False)
    made = decide(large)
    assert made.engine == "cudnn"
    (refusal,) = made.refusals
    words = r"inference of 2048 units at batch 128 is estimated at \d+ us a step, and cuDNN, with all products, at \d+"
    words += ": without those of whole matrices, 70% of that is the limit"
    assert re.fullmatch(f"persistent: {words}", str(refusal))
    assert decide(large, "persistent").engine == "persistent"
    for batch, cell, dtype in product((96, 128), (library.lstm, library.gru), (torch.bfloat16, torch.float16)):
        slower = replace(large, batch=batch, form=replace(large.form, cell=cell.graph), dtype=dtype)
        assert decide(slower).engine == decide(replace(slower, gradient=True)).engine == "cudnn"
    for faster in (
        replace(large, batch=16),
        replace(large, batch=64, gradient=True),
        replace(large, batch=64, form=replace(large.form, cell=library.gru.graph)),
        replace(large, batch=64, dtype=torch.float32, device=replace(H200, tf32=True)),
        replace(large, batch=64),  # 1,643 us with cuDNN, 1,431 in float16 with these kernels
        replace(large, form=replace(large.form, units=256), batch=1024),
        replace(large, form=replace(large.form, units=1500)),  # of which cuDNN takes longer than of 2048
        replace(large, form=replace(large.form, units=1024)),
        replace(large, form=replace(large.form, cell=four.graph, units=700), batch=4096),  # cuDNN has no such cell
        replace(large, form=replace(large.form, units=640), dtype=torch.float16),
        replace(large, device=replace(H200, library=0)),
    ):
        assert decide(faster).engine == "persistent"


@pytest.mark.parametrize("tf32", [True, False])
def test_rows_of_many_rounds_stay_in_float32(tf32: bool) -> None:
    form = replace(LSTM, units=512, layers=1)
    for batch in (128, 256, 1024):
        asked = replace(HALF, form=form, dtype=torch.float32, batch=batch, device=replace(H200, tf32=tf32))
        assert decide(asked).engine == decide(replace(asked, gradient=False)).engine == "persistent"


@pytest.mark.parametrize(
    "units, batch, own", [(1024, 128, True), (1024, 512, True), (1500, 20, True), (1500, 512, False)]
)
def test_true_float32_is_left_to_cudnn_past_what_few_launches_hold(units: int, batch: int, own: bool) -> None:
    """As an H200 says at 1,024 units and batch 128 and 1,500 and 20; 0.62 and 0.29 of its time, training 0.78, 0.51."""
    form = replace(LSTM, units=units, layers=1)
    asked = replace(HALF, form=form, dtype=torch.float32, batch=batch, device=replace(H200, tf32=False))
    for gradient in (False, True):
        assert decide(replace(asked, gradient=gradient)).engine == ("persistent" if own else "cudnn")


@pytest.mark.parametrize(
    "change, engine",
    [
        ({}, "stepwise"),
        ({"gradient": False}, "stepwise"),
        ({"units": 3072, "batch": 128}, "stepwise"),
        ({"units": 1600, "batch": 32}, "stepwise"),
        ({"cell": library.gru.graph}, "stepwise"),
        ({"layers": 2}, "stepwise"),
        ({"batch": 256}, "cudnn"),
        ({"batch": 1}, "cudnn"),
        ({"units": 4096}, "cudnn"),
        ({"directions": 2}, "cudnn"),
        ({"inputs": 3000}, "cudnn"),  # more than a third of the columns
        ({"inputs": 64}, "cudnn"),
        ({"time": 20}, "cudnn"),  # rows too few for parts
        ({"packed": True}, "cudnn"),
        ({"device": replace(H200, tf32=False, capability=(10, 0))}, "cudnn"),
        ({"device": replace(H200, tf32=False, tf32_products=True)}, "cudnn"),  # its products would be of TF32
        ({"cell": library.rnn_tanh.graph, "units": 2560}, "cudnn"),
    ],
)
def test_true_float32_of_many_units_goes_step_by_step(change: dict[str, Any], engine: str) -> None:
    """Where an H200 took less time so than with cuDNN."""
    of_form = {name: change[name] for name in ("units", "cell", "layers", "directions", "inputs") if name in change}
    inputs = of_form.get("inputs", of_form.get("units", 2048))
    form = replace(LSTM, **(dict(units=2048, layers=1, directions=1) | of_form | dict(inputs=inputs)))
    asked = replace(HALF, form=form, dtype=torch.float32, batch=64, time=100, device=replace(H200, tf32=False))
    asked = replace(asked, **{name: value for name, value in change.items() if name not in of_form})
    made = decide(asked)
    assert made.engine == engine
    assert decide(replace(asked, device=replace(asked.device, tf32=True))).engine != "stepwise"
    assert decide(asked, "cudnn").engine == "cudnn"
    if engine == "stepwise":
        assert "takes less time step by step, with products of x on tensor cores" in str(made.refusals[1])


@pytest.mark.parametrize("cell, most", [("lstm", 1536), ("gru", 1584), ("rnn_tanh", 2368)])
def test_the_most_units_of_true_float32(cell: str, most: int) -> None:
    form = replace(LSTM, units=2500, cell=getattr(library, cell).graph)
    asked = replace(HALF, form=form, dtype=torch.float32, device=replace(H200, tf32=False))
    assert str(decide(asked).refusals[0]).endswith(f"in float32 do not fit the 132 multiprocessors, at most {most} do")


def test_a_step_of_few_streams_on_a_gpu_is_the_one_that_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepwise, "missing", lambda: None)
    one = replace(HALF, time=1, batch=16, gradient=False)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        made = decide_step(replace(one, dtype=dtype))
        assert (made.engine, made.refusals) == ("stepwise", ())
    assert decide_step(replace(one, device=T4, dtype=torch.float32)).engine == "stepwise"
    assert decide_step(replace(one, batch=17)).engine == "persistent"
    large = replace(one, form=replace(LSTM, units=2048))
    assert decide_step(large).engine == "persistent"
    assert decide_step(replace(large, batch=1)).engine == "stepwise"
    assert decide_step(replace(one, dtype=torch.float32, form=replace(LSTM, projection=3))).engine == "persistent"
    assert decide_step(one, "persistent").engine == "persistent"


@pytest.mark.parametrize("engine, changes", WITHIN, ids=str)
def test_a_problem_within_the_limits_has_no_obstacle(engine: str, changes: dict[str, Any]) -> None:
    assert ENGINES[engine].obstacles(replace(ON[engine], **changes)) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_every_limit_stands_in_the_table_above(engine: str) -> None:
    source = inspect.getsource(type(ENGINES[engine]).obstacles)
    stated = len(re.findall(r"found\.append\(|return \[f", source))
    assert stated == sum(row[0] == engine for row in LIMITS)


@pytest.mark.parametrize("gradient", [True, False])
@pytest.mark.parametrize("half", [True, False])
def test_float16_is_for_inference_on_processors_that_have_it(half: bool, gradient: bool) -> None:
    asked = replace(PLAIN, dtype=torch.float16, device=replace(CPU, half=half), gradient=gradient)
    (made,) = [decide(asked)]
    assert made.engine == ("onednn" if half and not gradient else "reference")
    reasons = {refusal.engine: refusal.reasons for refusal in made.refusals}
    if half and gradient:
        assert "a gradient is wanted" in reasons["onednn"][0]
    elif not half:
        assert "on this processor" in reasons["onednn"][0]


def test_a_plan_has_every_reason_against_each_faster_engine() -> None:
    made = decide(replace(PLAIN, form=GRU, dtype=torch.float16, packed=True, batch=0))
    assert (made.engine, made.asked) == ("reference", "auto")
    assert [(refusal.engine, len(refusal.reasons)) for refusal in made.refusals] == [
        ("persistent", 1),
        ("cudnn", 1),
        ("stepwise", 1),
        ("cpu", 2),
        ("onednn", 4),
    ]
    inference = decide(replace(PLAIN, form=replace(LSTM, units=257), gradient=False))
    assert [refusal.engine for refusal in inference.refusals] == ["persistent", "cudnn", "stepwise", "cpu"]
    assert decide(ON["persistent"]).refusals == ()
    assert decide(ON["cudnn"], "reference").refusals == ()


@pytest.mark.parametrize("dtype, time, batch, units, inferred", [
    (torch.float32, 30, 32, 257, "onednn"), (torch.float32, 30, 2, 1023, "onednn"), (torch.float32, 30, 1, 1, "cpu"),
    (torch.float32, 30, 32, 1024, "onednn"), (torch.float32, 30, 1, 512, "cpu"), (torch.float32, 1, 300, 256, "cpu"),
    (torch.float32, 999, 300, 32, "cpu"), (torch.float32, 999, 32, 31, "cpu"), (torch.float32, 20, 100, 31, "cpu"),
    (torch.float32, 21, 100, 31, "onednn"), (torch.bfloat16, 30, 1, 128, "cpu"), (torch.bfloat16, 30, 32, 128, "cpu"),
    (torch.bfloat16, 30, 32, 257, "onednn"), (torch.bfloat16, 30, 32, 1024, "onednn"),
])  # fmt: skip
def test_the_lstm_of_a_cpu_runs_on_the_engine_that_was_measured_to_be_faster(
    dtype: torch.dtype, time: int, batch: int, units: int, inferred: str
) -> None:
    device = replace(CPU, bfloat16=True, compiler="another c++")  # of another machine, without a matrix unit
    form = replace(LSTM, units=units)
    asked = replace(PLAIN, form=form, dtype=dtype, time=time, batch=batch, device=device, gradient=True)
    for gradient, engine in ((True, "cpu"), (False, inferred)):
        made = decide(replace(asked, gradient=gradient))
        assert made.engine == engine
        assert engine == "cpu" or "inference of" in str(made.refusals[-1])
    assert decide(asked, "cpu").engine == "cpu"
    assert decide(replace(asked, packed=True)).engine == "cpu"
    assert decide(replace(asked, device=replace(device, compiler=""))).engine == "onednn"


@pytest.mark.parametrize("dtype, batch, units, inferred", [
    (torch.bfloat16, 8, 1024, "cpu"), (torch.bfloat16, 9, 128, "onednn"), (torch.float32, 32, 1024, "cpu"),
    (torch.float32, 32, 1023, "onednn"),
])  # fmt: skip
def test_the_same_where_a_matrix_unit_multiplies(
    dtype: torch.dtype, batch: int, units: int, inferred: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_cpu, "_by_unit", lambda problem: True)
    device = replace(CPU, bfloat16=True, compiler="another c++")
    form = replace(LSTM, units=units)
    asked = replace(PLAIN, form=form, dtype=dtype, time=30, batch=batch, device=device)
    assert decide(replace(asked, gradient=False)).engine == inferred
    assert decide(replace(asked, gradient=True)).engine == "cpu"


def test_a_named_engine_runs_or_raises_with_every_reason() -> None:
    assert decide(ON["cudnn"], "reference").engine == "reference"
    asked = replace(PLAIN, form=GRU, dtype=torch.float64)
    with pytest.raises(whorl.UnsupportedError) as raised:
        decide(asked, "onednn")
    text = str(raised.value)
    assert text.startswith(f"the engine 'onednn' cannot run {asked}")
    assert all(reason in text for reason in ENGINES["onednn"].obstacles(asked))
    assert "cudnn" not in text
    assert not isinstance(raised.value, whorl.SlowError)


def test_a_problem_that_no_engine_can_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "obstacles", lambda *_: ["it is Sunday"])
    with pytest.raises(whorl.UnsupportedError, match="^no engine can run decayed") as raised:
        decide(replace(PLAIN, form=replace(LSTM, cell=decayed.graph), dtype=torch.float16))
    assert all(f"\n  {engine}: " in str(raised.value) for engine in ENGINES)


@pytest.mark.parametrize("name", ["cuda", "", "AUTO", None, 3])
def test_an_engine_that_does_not_exist(name: Any) -> None:
    wrong = pytest.raises(whorl.InputError, match=f"engine is {name!r}: write one of 'auto', 'persistent', 'cudnn'")
    layer = whorl.LSTM(5, 7)
    with wrong:
        layer.engine = name
    assert layer.engine == "auto"
    for build in (whorl.LSTM, whorl.GRUCell):
        with wrong:
            build(5, 7, engine=name)
    with wrong:
        decide(PLAIN, name)


def test_the_engine_of_a_layer_decides() -> None:
    layer, x = whorl.LSTM(5, 7, engine="onednn"), torch.randn(6, 3, 5)
    with torch.profiler.profile() as fast:
        layer(x)
    layer.engine = "reference"
    with torch.profiler.profile() as slow:
        layer(x)
    layer.engine = "cudnn"
    with pytest.raises(whorl.UnsupportedError, match="the tensors are on cpu, cuDNN runs on cuda"):
        layer(x)
    assert [_ran_onednn(seen) for seen in (fast, slow)] == [True, False]
    assert "engine='cudnn'" in repr(layer)


def _ran_onednn(profile: torch.profiler.profile) -> bool:
    return "aten::mkldnn_rnn_layer" in {event.key for event in profile.key_averages()}


class Broken(Exception):
    """What a broken engine ends with."""


@pytest.mark.parametrize("engine", ["auto", "onednn"])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_broken_engine_is_an_error_and_no_other_engine(
    part: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise Broken

    def never(*_: Any, **__: Any) -> None:
        pytest.fail("another engine ran in place of the broken one")

    layer = whorl.LSTM(5, 7, engine=engine)
    assert layer.plan(X).engine != "reference"
    for fast in (OneDNN, type(ENGINES["cpu"])):
        monkeypatch.setattr(fast, part, fail)
        monkeypatch.setattr(fast, "recorded", False)  # as the engines are whose backward is whorl's
    for place in ("run.evaluate", "run.gradients", "engines.reference.evaluate", "engines.reference.gradients"):
        monkeypatch.setattr(f"whorl.{place}", never)
    if part == "backward":
        y = layer(X)[0]
        with pytest.raises(Broken):
            y.sum().backward()
    else:
        for module in (layer, whorl.LSTMCell(5, 7, engine=engine)):
            with pytest.raises(Broken):
                module(X if module is layer else X[0])
            with torch.no_grad(), pytest.raises(Broken):
                module(X if module is layer else X[0])
