"""CPU against GPU over the batch size: a program's step with each contender, checked against float64, then timed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

import whorl
from whorl.bench.baseline import TF32_EPS, error, to_dtype, to_tf32
from whorl.bench.passes import switches
from whorl.bench.seeds import Loop, Program, Recurrent, Rounded, torchs, whorls
from whorl.bench.timing import Effort, Spread, in_turns
from whorl.settings import settings

PASSES = {
    "train": "forward, loss, backward, and a step of Adam",
    "evaluate": "forward and loss, in eval mode without gradient",
    "predict": "forward alone, in eval mode without gradient",
}
Numbers = Mapping[str, Tensor]
BATCHES = tuple(2**power for power in range(13))
_ROWS = 1024  # of a batch at once, where float64 says what is right
_FRESH = 4
_WARM = 2
_FAR = 16  # as in the grid: how far torch's own kernels may be out of the error rule and still be timed, marked
_LARGE = 512  # a batch of this size is called once a turn on a CPU, and in one turn


@dataclass(frozen=True)
class Contender:
    """One that runs the program.

    Attributes:
        name: in tables and plots.
        summary: what it is.
        recurrent: its layers.
        device: "cpu" or "cuda".
        precision: "fp32", "tf32" (products of float32 in TF32), or "bf16" (autocast).
        graphed: whether a step is replayed from a CUDA graph.
    """

    name: str
    summary: str
    recurrent: Recurrent
    device: str
    precision: str = "fp32"
    graphed: bool = False

    def obstacle(self, program: Program) -> str | None:
        """Why it cannot run the program; None where it can."""
        if self.recurrent is torchs and program.activation is not None:
            return "torch.nn.LSTM, and cuDNN under it, have tanh alone"
        if self.recurrent is Loop and self.device == "cpu" and program.activation is None:
            return "torch.nn.LSTM runs the same faster"
        return None

    def autocast(self) -> AbstractContextManager[object]:
        """The autocast under which it runs."""
        return torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.precision == "bf16")


def contenders(devices: Sequence[str], precisions: Sequence[str]) -> list[Contender]:
    """On the CPU in float32; on the GPU in each of the precisions, eager and from a CUDA graph, rivals there alone."""
    found = []
    if "cpu" in devices:
        found.append(Contender("whorl, CPU", "whorl on the CPU, float32", whorls(), "cpu"))
    if "cuda" not in devices:  # beside a GPU that would wait for them, rivals on its host's CPU are left out
        found.append(Contender("torch.nn, CPU", "torch.nn.LSTM on the CPU, float32", torchs, "cpu"))
        found.append(Contender("loop, CPU", "a loop of torch operations on the CPU, float32", Loop, "cpu"))
    for precision in precisions if "cuda" in devices else ():
        for name, recurrent in (("whorl", whorls()), ("torch.nn", torchs), ("loop", Loop)):
            what = {"whorl": "whorl", "torch.nn": "torch.nn.LSTM", "loop": "a loop of torch operations"}[name]
            for graphed in (False, True) if name != "loop" else (False,):
                label = f"{name}, {precision}" + ", graph" * graphed
                summary = f"{what} on the GPU, {precision}" + ", replayed from a CUDA graph" * graphed
                found.append(Contender(label, summary, recurrent, "cuda", precision, graphed))
    return found


@dataclass(frozen=True)
class Point:
    """One contender at one batch size.

    Attributes:
        times: milliseconds of a call by pass; empty where there are none.
        engines: by pass, which engines of whorl ran the layers, in their order; empty for a rival.
        explanation: what `whorl.explain` says of the training step; None for a rival.
        reason: why there are no times.
        exact: whether its numbers are within the error rule; torch's own kernels are timed where they are not far out.
    """

    contender: str
    batch: int
    times: dict[str, Spread] = field(default_factory=dict)
    engines: dict[str, str] = field(default_factory=dict)
    explanation: str | None = None
    reason: str | None = None
    exact: bool = True


class Step:
    """One pass of a contender, ready to be called again and again, always on fresh inputs."""

    def __init__(
        self,
        contender: Contender,
        program: Program,
        model: nn.Module,
        which: str,
        batches: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self._contender, self._program, self._model, self._which, self._batches = (
            contender, program, model, which, batches,
        )  # fmt: skip
        self.graphed, self._turn = contender.graphed, 0
        self.x, self.target = (tensor.clone() for tensor in batches[0])
        self.out = self.x
        cuda = contender.device == "cuda"
        self._adam = torch.optim.Adam(model.parameters(), 1e-3, fused=True, capturable=contender.graphed)
        model.train(which == "train")
        self._graph: torch.cuda.CUDAGraph | None = None
        if contender.graphed:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM):
                    self._call()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._call()
            self._graph = graph
        else:
            for _ in range(_WARM if cuda else 1):
                self._call()

    def change(self) -> None:
        """Put the next input and target in their place."""
        self._turn += 1
        with torch.no_grad():
            for mine, its in zip((self.x, self.target), self._batches[self._turn % len(self._batches)], strict=True):
                mine.copy_(its)

    def run(self) -> Sequence[Tensor]:
        """One call."""
        if self._graph is None:
            self._call()
        else:
            self._graph.replay()
        return (self.out,)

    def _call(self) -> None:
        with torch.set_grad_enabled(self._which == "train"), self._contender.autocast():
            out = self._model(self.x)
            loss = self._program.loss(out.float(), self.target) if self._which != "predict" else None
        if self._which == "train":
            assert loss is not None
            self._adam.zero_grad(set_to_none=True)
            loss.backward()
            self._adam.step()
        self.out = out.detach()


def measure(
    program: Program, batch: int, chosen: Sequence[Contender], effort: Effort, truth_on: torch.device
) -> Iterator[Point]:
    """Each contender at one batch size, in turns with the others of its device and precision.

    Args:
        truth_on: the device on which float64 says what is right.
    """
    torch.manual_seed(batch)
    with torch.random.fork_rng([]):
        weights = program.build(whorls("reference")).state_dict()
    batches = [program.draw(batch, torch.device("cpu")) for _ in range(_FRESH)]
    with settings(slow="allow"), switches(tf32=False):
        truth = _numbers(program, program.build(whorls("reference")).double(), weights, batches[0], truth_on)
    for kind in dict.fromkeys((contender.device, contender.precision) for contender in chosen):
        device, precision = torch.device(kind[0]), kind[1]
        alike = [contender for contender in chosen if (contender.device, contender.precision) == kind]
        with settings(slow="allow"), switches(tf32=precision == "tf32"):
            bounds = _bounds(program, weights, batches[0], truth_on, precision, truth)
            here = [(x.to(device), target.to(device)) for x, target in batches]
            yield from _measure(program, alike, weights, here, truth, bounds, effort)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measure(
    program: Program,
    alike: Sequence[Contender],
    weights: Numbers,
    batches: Sequence[tuple[Tensor, Tensor]],
    truth: Numbers,
    bounds: Mapping[str, float],
    effort: Effort,
) -> list[Point]:
    x = batches[0][0]
    points, models = {}, {}
    for contender in alike:
        reason = contender.obstacle(program)
        if reason is not None:
            points[contender.name] = Point(contender.name, len(x), reason=reason)
            continue
        model = program.build(contender.recurrent).to(x.device)
        point = _told(contender, model, x)
        ratio, said = _judge(contender, program, model, weights, batches, truth, bounds)
        torchs_own = not point.engines or bool(set(point.engines["train"].split(" + ")) & {"cudnn", "onednn"})
        if ratio <= (_FAR if torchs_own else 1):
            points[contender.name] = replace(point, exact=ratio <= 1)
            models[contender.name] = contender, model
        else:
            points[contender.name] = replace(point, exact=False, reason=f"wrong numbers: {said}")
    if x.device.type == "cpu" and len(x) >= _LARGE:
        effort = Effort(1, effort.seconds)
    for which in PASSES:
        steps = {name: Step(contender, program, model, which, batches) for name, (contender, model) in models.items()}
        for name, timing in in_turns(steps, x.device, effort).items():
            points[name].times[which] = timing.gpu or timing.wall
    return list(points.values())


def _told(contender: Contender, model: nn.Module, x: Tensor) -> Point:
    """What whorl says of the model; nothing where there is none of its layers."""
    point = Point(contender.name, len(x))
    for which in PASSES:
        with torch.set_grad_enabled(which == "train"), contender.autocast():
            explanation = whorl.explain(model.train(which == "train"), x)
        if explanation.plans:
            point.engines[which] = " + ".join(dict.fromkeys(plan.engine for plan in explanation.plans))
            if which == "train":
                point = replace(point, explanation=str(explanation))
    return point


def _judge(
    contender: Contender,
    program: Program,
    model: nn.Module,
    weights: Numbers,
    batches: Sequence[tuple[Tensor, Tensor]],
    truth: Numbers,
    bounds: Mapping[str, float],
) -> tuple[float, str]:
    """The error of a training step as a multiple of its bound, for the tensor where it is largest, and in words."""
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    probabilities = [dropout.p for dropout in dropouts]
    for dropout in dropouts:
        dropout.p = 0.0  # float64 would draw others
    step = Step(contender, program, model, "train", batches)
    model.load_state_dict(weights)
    step.x.copy_(batches[0][0]), step.target.copy_(batches[0][1])
    step.run()
    got = {"y": step.out} | {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert set(got) == set(truth)
    errors = {name: error(tensor.to(truth[name].device), truth[name]) for name, tensor in got.items()}
    for dropout, probability in zip(dropouts, probabilities, strict=True):
        dropout.p = probability
    worst = max(errors, key=lambda name: errors[name] / bounds[name])
    said = f"{worst} is off by {errors[worst]:.2g}, the error rule allows {bounds[worst]:.2g}"
    return errors[worst] / bounds[worst], said


def _bounds(
    program: Program,
    weights: Numbers,
    batch: tuple[Tensor, Tensor],
    device: torch.device,
    precision: str,
    truth: Numbers,
) -> dict[str, float]:
    """The error rule: twice the error of the program with plain loops that round what enters a product, plus 4 eps."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rounding = to_tf32 if precision == "tf32" else to_dtype(dtype)
    eps = TF32_EPS if precision == "tf32" else torch.finfo(dtype).eps
    model = program.build(Rounded(rounding))
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        baseline = _numbers(program, model, weights, batch, device)
    return {name: 2 * error(baseline[name], tensor) + 4 * eps for name, tensor in truth.items()}


def _numbers(
    program: Program, model: nn.Module, weights: Numbers, batch: tuple[Tensor, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """The output and every gradient of a training step without dropout, a part of the batch at a time."""
    model.load_state_dict(weights)
    model.to(device).eval()
    dtype = next(model.parameters()).dtype
    x, target = (tensor.to(device, dtype if tensor.is_floating_point() else None) for tensor in batch)
    outs = []
    for part, wanted in zip(x.split(_ROWS), target.split(_ROWS), strict=True):
        out = model(part)
        outs.append(out.detach())
        loss = program.loss(out.to(dtype), wanted) * (len(part) / len(x))
        loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"y": torch.cat(outs), **grads}
