"""Which tile is fastest, by measuring: what `whorl tune` does for one problem."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from whorl.engines.cuda import grid, tuned
from whorl.engines.cuda.layers import Layers, exact
from whorl.engines.cuda.norms import inside
from whorl.engines.cuda.options import expected
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Tile
from whorl.problem import Call, Plan
from whorl.weights import shapes

Work = Callable[[], object]
_EACH = 8  # candidates of each regime that are measured: the fastest by estimate
_WARM, _REPLAYS = 3, 15


class Choice(NamedTuple):
    """What was measured of one kind of kernel."""

    kind: str
    times: Mapping[Tile | Spread, float]
    """Microseconds of a whole pass, with the products of whole matrices, by tile; the estimated one first."""

    @property
    def best(self) -> Tile | Spread:
        """The fastest, but the estimated one where another gains less than a hundredth."""
        estimated, fastest = next(iter(self.times)), min(self.times, key=self.times.__getitem__)
        return fastest if self.times[fastest] < 0.99 * self.times[estimated] else estimated


def tune(plan: Plan, device: torch.device, timer: Callable[[Work], float] | None = None) -> Iterator[Choice]:
    """Measure the candidates of each kernel that a plan of engine `persistent` runs, and keep the fastest.

    Args:
        timer: microseconds that work takes; None: its replay from a CUDA graph, the median.
    """
    problem = inside(plan.problem)
    form, features = problem.form, expected(problem)
    size = size_of(form.cell, form.units, problem.dtype.itemsize, features, exact(problem))
    call = _call(plan, device)
    timer = timer or _replayed
    for kind in ("forward", "backward")[: 1 + problem.gradient]:
        chip = Layers(plan, device).chip
        order = (size, chip, problem.batch, form.directions, kind)
        times = {}
        for tile in dict.fromkeys([grid.estimated(*order), *grid.likely(*order, _EACH)]):
            assert tile is not None, "the obstacles say that it fits"
            times[tile] = timer(_work(Layers(plan, device, {kind: tile}), call, kind))
        made = Choice(kind, times)
        tuned.keep(made.best, *order)
        yield made


def _work(made: Layers, call: Call, kind: str) -> Work:
    if kind == "forward":
        return lambda: made.forward(call)
    outcome = made.forward(call)
    grads: Sequence[torch.Tensor | None] = (torch.ones_like(outcome.y), *(None for _ in outcome.finals))
    return lambda: made.backward(call, outcome.y, outcome.saved, grads)


def _call(plan: Plan, device: torch.device) -> Call:
    problem, form = plan.problem, plan.problem.form
    x = torch.randn(problem.time, problem.batch, form.inputs, device=device).to(problem.dtype)
    bound = form.units**-0.5
    weights = [torch.empty(shape, device=device).uniform_(-bound, bound).to(problem.dtype) for shape in shapes(form)]
    return Call(x, (), tuple(weights))


def _replayed(work: Work) -> float:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    pairs = []
    for _ in range(_WARM + _REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs[_WARM:])
