"""What usual tests pass, with options on, on engine `persistent` of an NVIDIA GPU: in clusters and through L2.

Layers are small, so that much is seen in little time; that their numbers are right other tests show.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import test_persistent
import test_spread
import whorl
from anew import made_anew
from comparison import error, flat, in_a_graph
from option_draws import OPTIONS, Drawn
from test_persistent import PRECISIONS, eps_of, switches
from whorl.engines.cuda import grid, launch, source, spreading

pytestmark = pytest.mark.gpu
__all__ = ["switches"]  # a fixture
TIME, BATCH, INPUTS, UNITS = 9, 20, 24, 48
REGIMES: dict[str, Callable[..., Any]] = {
    "a cluster": lambda *where: next(iter(grid._near(*where)), None),
    "through L2": lambda *where: spreading.choose(*where),
}
LAYERS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "marks and draws by step": (
        "LSTM",
        dict(zoneout=0.2, recurrent_dropout=0.3, recurrent_dropout_mode="step", peephole=True, clip=4.0),
        ("lengths", "mask", "reset"),
    ),
    "masks by gate": ("GRU", dict(recurrent_dropout=0.3, input_dropout=0.2, zoneout=0.1), ("mask", "reset")),
    "layer norm": (
        "LSTM",
        dict(layer_norm=True, zoneout=0.1, recurrent_dropout=0.3, recurrent_dropout_mode="shared"),
        ("lengths", "reset"),
    ),
}
"""Layer, its options, and the marks of its calls."""
precisions = pytest.mark.parametrize("precision", ["bfloat16", "tf32", "float32"])


@pytest.fixture(autouse=True, params=REGIMES)
def regime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every layer runs so."""
    monkeypatch.setattr(grid, "choose", REGIMES[request.param])
    made_anew(monkeypatch)
    return request.param


@pytest.fixture(params=LAYERS)
def made(request: pytest.FixtureRequest) -> "Made":
    return Made(request.param)


@dataclass
class Made:
    """A layer with options and what it is given."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    batch: int = BATCH
    layer: Any = field(init=False)

    def __post_init__(self) -> None:
        kind, options, marks = LAYERS[self.name]
        self.layer = getattr(whorl, kind)(
            INPUTS, UNITS, bidirectional=True, device="cuda", dtype=self.dtype, engine="persistent", **options
        )
        batch, rows = self.batch, torch.arange(self.batch, device="cuda")
        self.x = torch.randn(TIME, batch, INPUTS, device="cuda", dtype=self.dtype, requires_grad=True)
        self.states = tuple(
            torch.randn(2, batch, UNITS, device="cuda", dtype=self.dtype, requires_grad=True)
            for _ in range(1 + (kind == "LSTM"))
        )
        every = {
            "lengths": rows * 7 % (TIME + 1),
            "mask": torch.rand(TIME, batch, device="cuda") < 0.7,
            "reset": torch.rand(TIME, batch, device="cuda") < 0.2,
        }
        self.marks = {mark: every[mark] for mark in marks}

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.states, *self.layer.parameters()]

    def outputs(self, seed: int = 5) -> list[Tensor]:
        torch.manual_seed(seed)
        states = self.states if len(self.states) > 1 else self.states[0]
        return flat(self.layer(self.x, states, **self.marks))

    def step(self) -> list[Tensor]:
        """Outputs and every gradient."""
        outputs = self.outputs()
        return [*outputs, *torch.autograd.grad([out.square() for out in outputs], self.leaves, _like(outputs))]


def _like(outputs: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
    """A gradient for each element, of few bits: times a power of two it is exact."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randint(-7, 8, out.shape, generator=draw) * scale).to(out) for out in outputs]


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_graph_replays_with_everything_new(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.tensor(5, device="cuda")
    monkeypatch.setattr(torch, "randint", lambda *_, **__: seed)
    monkeypatch.setattr(torch, "manual_seed", lambda _: None)
    like = [torch.randn_like(out) for out in made.outputs()]

    def step() -> list[Tensor]:
        outputs = made.outputs()
        return [*outputs, *torch.autograd.grad(outputs, made.leaves, like)]

    graph, captured = in_a_graph(step)
    for number in range(100):
        with torch.no_grad():
            for leaf in made.leaves:
                leaf.copy_(torch.randn_like(leaf) * (0.2 if leaf.dim() < 3 else 1.0))
            seed.fill_(number * 2**33 + number)
            for name, mark in made.marks.items():
                mark.copy_(mark.roll(1 + number, -1) if name == "lengths" else torch.rand(mark.shape) < 0.5)
        graph.replay()
        assert _same(captured, step())


@precisions
def test_warps_that_sleep_at_random_change_nothing(
    made: Made, regime: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(made.name, PRECISIONS[precision])
    wanted = made.step()
    slowed = test_spread.slowed if regime == "through L2" else test_persistent.slowed
    made_anew(monkeypatch, loaded=True)
    monkeypatch.setattr(source, "forward", slowed(source.forward))
    monkeypatch.setattr(source, "backward", slowed(source.backward))
    for _ in range(100):
        assert _same(made.step(), wanted)
    assert launch._loaded, "kernels whose warps sleep"


@pytest.mark.parametrize("blocks", [1, 100, 131, 400])
def test_two_streams_on_a_gpu_that_is_busy_with_something_else(made: Made, blocks: int) -> None:
    wanted, found = made.step(), []
    test_persistent.hold(blocks)
    for stream in [torch.cuda.Stream() for _ in range(2)]:
        with torch.cuda.stream(stream):
            found.append(made.step())
    torch.cuda.synchronize()
    assert all(_same(got, wanted) for got in found)


@pytest.mark.parametrize("exponent", [-24, 12])
@precisions
def test_gradients_of_any_size(made: Made, precision: str, exponent: int) -> None:
    """A power of two changes no bit but the exponent's, unless a float32 is multiplied as several smaller numbers."""
    made = Made(made.name, PRECISIONS[precision])
    outputs, scale = made.outputs(), 2.0**exponent
    once = torch.autograd.grad(outputs, made.leaves, _like(outputs), retain_graph=True)
    scaled = torch.autograd.grad(outputs, made.leaves, _like(outputs, scale))
    bound = 0 if precision == "bfloat16" else 4 * eps_of(made.dtype)
    assert all(error(got, grad.double() * scale) <= bound for got, grad in zip(scaled, once, strict=True))


@pytest.mark.parametrize("which", [0, 1, -1], ids=["only y", "only h", "only the last state"])
def test_whatever_the_loss_takes(made: Made, which: int) -> None:
    """And twice, and two calls in another order."""
    first, second = made.outputs(5), made.outputs(6)

    def alone(outputs: list[Tensor], grad: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(outputs[which], made.leaves, grad, retain_graph=True)

    def among_zeros(outputs: list[Tensor], grad: Tensor) -> Sequence[Tensor]:
        grads = [torch.zeros_like(out) for out in outputs]
        grads[which] = grad
        return torch.autograd.grad(outputs, made.leaves, grads, retain_graph=True)

    one = torch.ones((), device="cuda", dtype=made.dtype).expand(first[which].shape)  # strides of 0
    wanted = [among_zeros(outputs, one.contiguous()) for outputs in (first, second)]
    assert not _same(wanted[0], wanted[1])
    for index in (1, 0, 1):
        assert _same(alone((first, second)[index], one), wanted[index])


@pytest.mark.parametrize("time", [1, 2, 5])
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_of_weights_of_every_option_with_initial_states(option: str, time: int) -> None:
    dtype = [torch.bfloat16, torch.float16, torch.float32][(OPTIONS.index(option) + time) % 3]
    kind = ["LSTM", "GRU", "timed_lstm"][OPTIONS.index(option) % 3]
    more = {"packed": {"states"}, "given": {"step"}}.get(option, set())
    case = Drawn(kind, frozenset({option, "initial", *more}), 33, 7, time, layers=2, directions=2, seed=time)
    assert case.errors("cuda", dtype) == {}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@precisions
def test_what_is_not_a_number_stays_in_its_sequence(made: Made, precision: str, bad: float) -> None:
    made = Made(made.name, PRECISIONS[precision])
    counts = torch.ones(TIME, BATCH, dtype=torch.bool, device="cuda")
    if "mask" in made.marks:
        counts &= made.marks["mask"]
    if "lengths" in made.marks:
        counts &= torch.arange(TIME, device="cuda")[:, None] < made.marks["lengths"]
    wanted = made.step()
    with torch.no_grad():
        made.x.masked_fill_(~counts.unsqueeze(-1), bad)
    assert _same(made.step(), wanted)  # nothing of a step that does not count is seen
    (row,) = counts.sum(0).argmax(0, keepdim=True).tolist()
    with torch.no_grad():
        made.x[counts[:, row], row] = bad
    others = [other for other in range(BATCH) if other != row]
    by_sequence = 2 + 2 * len(made.states)  # outputs, and the gradients of x and initial states
    for got, true in zip(made.step()[:by_sequence], wanted[:by_sequence], strict=True):
        assert torch.equal(got[:, others], true[:, others])


@precisions
def test_a_sequence_gives_the_same_in_any_batch(made: Made, precision: str) -> None:
    """Draws are counted by its place, however many others there are; products of other sizes may round otherwise."""
    large = Made(made.name, PRECISIONS[precision], batch=128)
    with torch.no_grad():
        wanted = [out[:, :3] for out in large.outputs()]
        large.x, large.states = large.x[:, :3], tuple(state[:, :3] for state in large.states)
        large.marks = {name: mark[..., :3] for name, mark in large.marks.items()}
        pairs = zip(large.outputs(), wanted, strict=True)
        assert all(error(got, true.double()) <= 4 * eps_of(large.dtype) for got, true in pairs)
