"""What is timed and what is not, in which order, and that every call has weights and an input of its own."""

import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from whorl.bench import timing
from whorl.bench.cases import PASSES, Case
from whorl.bench.contenders import RIVALS, Contender, Layer, torch_layer
from whorl.bench.measurement import measure
from whorl.bench.passes import Material, Runner, switches
from whorl.bench.timing import Effort, Spread, in_turns

CPU = torch.device("cpu")
CASE = Case("lstm", 1, 2, 3, 5, "fp32")


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 0.0
    calls: list[str] = field(default_factory=list)


@dataclass
class Fake:
    """A runner that takes a given time, and whose change takes very long."""

    name: str
    clock: Clock
    milliseconds: list[float]
    graphed: bool = False

    def change(self) -> None:
        self.clock.now += 1000
        self.clock.calls.append(f"change {self.name}")

    def run(self) -> tuple[()]:
        count = self.clock.calls.count(self.name)
        self.clock.now += self.milliseconds[count % len(self.milliseconds)] / 1e3
        self.clock.calls.append(self.name)
        return ()


def test_contenders_take_turns_and_only_the_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", type("", (), {"perf_counter": lambda: clock.now}))
    runners = {"a": Fake("a", clock, [10.0]), "b": Fake("b", clock, [1.0, 3.0])}
    found = in_turns(runners, CPU, Effort(turns=3, seconds=0.0125))  # type: ignore[arg-type]
    assert all(before == f"change {call}" for before, call in zip(clock.calls[::2], clock.calls[1::2], strict=True))
    order = [call for call in clock.calls if not call.startswith("change")]
    assert order == [*"ab", *"a", *"bbbb", *"bbbb", *"a", *"a", *"bbbb"]
    assert found["a"].wall == Spread(10.0, 10.0, 10.0, 3)
    assert found["b"].wall == Spread(2.0, 1.0, 3.0, 12)
    assert found["a"].gpu is None


def test_a_host_that_has_to_get_warm_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing, "time", type("", (), {"perf_counter": lambda: clock.now}))
    runner = Fake("a", clock, [9.0, 5.0, 1.0, 2.0])
    assert timing._by_the_clock(runner, CPU, 2, settle=2) == pytest.approx([1.0, 2.0])
    runner = Fake("b", clock, [9.0, 8.0, 7.0, 6.0, 5.0, 1.0, 2.0])
    before = len(clock.calls)
    # the fake's changes take 1000 s each: of five calls and their changes 5000.035
    assert timing._by_the_clock(runner, CPU, 2, settle=2, warming=5000.0) == pytest.approx([1.0, 2.0])
    assert len(clock.calls) - before == 2 * (5 + 2)


@dataclass
class Queue:
    """A GPU that begins what it is given when it has done what came before; times are microseconds."""

    host: float = 0.0
    free: float = 0.0

    def give(self, takes: float, launch: float = 1.0) -> float:
        """When it will be done with something."""
        self.host += launch
        self.free = max(self.host, self.free) + takes
        return self.free


@dataclass
class Launch:
    """A call that the host takes longer to hand over than the GPU to do."""

    queue: Queue
    graphed: bool

    def change(self) -> None:
        self.queue.give(2.0)

    def run(self) -> tuple[()]:
        self.queue.host += 15
        self.queue.give(10.0)
        return ()


@pytest.mark.parametrize(("graphed", "taken"), [(True, 10.0), (False, 15.0)])
def test_a_replay_holds_nothing_of_the_host(graphed: bool, taken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            self.at = queue.give(0.0, launch=0.0)

        def elapsed_time(self, end: "Event") -> float:
            return (end.at - self.at) / 1e3

    monkeypatch.setattr(timing, "time", type("", (), {"perf_counter": lambda: queue.host / 1e6}))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.give(cycles / 2e3), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = timing._between_events(Launch(queue, graphed), 3)
    assert [1e3 * one for one in found] == pytest.approx([taken] * 3)


def test_the_spread_is_of_the_middle_half() -> None:
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, 1)
    assert Spread.of([1, 2, 3, 4, 1000]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([1.23456789] * 2) == Spread(1.235, 1.235, 1.235, 2)


class Spy(torch.nn.Module):
    """Notes the weights and the input of every call."""

    def __init__(self, layer: torch.nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.seen: list[tuple[Tensor, Tensor, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([weight.detach().flatten() for weight in self.layer.parameters()])
        self.seen.append((x.detach().clone(), weights, self.training, torch.is_grad_enabled()))
        return self.layer(x)[0]


def build_spy(spies: list[Spy], case: Case, device: torch.device) -> Layer:
    layer = torch_layer(case, device)
    spies.append(Spy(layer))
    return Layer(spies[-1], spies[-1], dict(layer.named_parameters()))


@pytest.mark.parametrize("which", PASSES)
def test_every_call_has_a_fresh_input_and_where_it_trains_other_weights(which: str) -> None:
    spies: list[Spy] = []
    material = Material.of(CASE, CPU)
    contender = Contender("spy", "", partial(build_spy, spies))
    runner = Runner(contender, contender.build(CASE, CPU), which, material)
    places = [weight.data_ptr() for weight in spies[0].layer.parameters()]
    warm = len(spies[0].seen)
    in_turns({"spy": runner}, CPU, Effort(turns=2, seconds=2e-9))
    assert places == [weight.data_ptr() for weight in spies[0].layer.parameters()]
    seen = spies[0].seen
    assert len(seen) == warm + 3
    given = torch.cat([weight.flatten() for weight in material.weights.values()])
    assert all(torch.equal(weights, -given) for _, weights, _, _ in seen[:warm])
    signs = [1, 1, 1] if which == "inference" else [-1, 1, -1]
    assert all(torch.equal(weights, sign * given) for sign, (_, weights, _, _) in zip(signs, seen[warm:], strict=True))
    assert all(not torch.equal(before[0], after[0]) for before, after in pairwise(seen))
    assert {(training, gradient) for _, _, training, gradient in seen} == {(which != "inference",) * 2}


def test_what_a_pass_gives() -> None:
    material = Material.of(CASE, CPU)
    for which in PASSES:
        runner = Runner(RIVALS["torch"], RIVALS["torch"].build(CASE, CPU), which, material)
        results = dict(zip(runner.names, runner.run(), strict=True))
        assert results["y"].requires_grad == (which == "forward")
        weights = {f"grad of {name}" for name in material.weights}
        assert results.keys() == {"y"} | ({"grad of x"} | weights if which == "train" else set())
        assert runner.memory is None


def test_material_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = Material.of(CASE, CPU), Material.of(CASE, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.checked, second.checked)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    drawn = [first.checked, first.target, *first.others]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_switches_hold_inside_and_come_back() -> None:
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    for tf32 in (True, False):
        with switches(tf32):
            assert (products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == (tf32, tf32, True)
    assert (products.allow_tf32, cudnn.allow_tf32, cudnn.benchmark) == before


@pytest.mark.gpu
def test_graphs_and_events_on_a_gpu() -> None:
    device = torch.device("cuda")
    case = Case("lstm", 2, 8, 7, 64, "fp16")
    material = Material.of(case, device)
    runners = {}
    for name in ("torch", "torch-graphed"):
        for which in PASSES:
            layer = RIVALS[name].build(case, device)
            runners[f"{name} {which}"] = Runner(RIVALS[name], layer, which, material)
    began = time.perf_counter()
    found = in_turns(runners, device, Effort(2, 0.02))
    passed = 1e3 * (time.perf_counter() - began)
    for name, result in found.items():
        assert result.gpu is not None
        assert 0.005 < result.gpu.median < result.wall.median * 1.5 + 0.05 < passed, name
        assert (runners[name].memory or 0) > 1000, name


@pytest.mark.gpu
def test_what_cannot_be_captured_is_said_and_harms_nobody() -> None:
    def build(case: Case, device: torch.device) -> Layer:
        layer = torch_layer(case, device)
        return Layer(layer, lambda x: layer(x)[0] * float(x.detach().sum() > -1e30), dict(layer.named_parameters()))

    waits = Contender("waits", "", build, graphed=True)
    measured = measure(CASE, [waits, RIVALS["torch-graphed"], RIVALS["torch"]], torch.device("cuda"), Effort(2, 0.01))
    for outcomes in measured.passes.values():
        assert "captur" in str(outcomes["waits"].reason)
        assert outcomes["torch-graphed"].gpu is not None
        assert outcomes["torch"].gpu is not None
