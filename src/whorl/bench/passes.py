"""What is done in one call of a contender, and what it is done with: the same for every contender of a case."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.bench.cases import Case
from whorl.bench.contenders import Contender, Layer, Weights, torch_layer

_WARM = {"cpu": 1, "cuda": 3}  # calls, in which libraries choose and allocate what they keep
_FRESH = 4


@contextmanager
def switches(tf32: bool) -> Iterator[None]:
    """torch's switches as every contender gets them: cuDNN looks for its fastest, and TF32 for products or not."""
    products = torch.backends.cuda.matmul
    before = products.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=tf32):
        products.allow_tf32 = tf32
        try:
            yield
        finally:
            products.allow_tf32 = before


@dataclass(frozen=True)
class Material:
    """Weights and inputs of a case, drawn from torch's standard normal and its layer's own first weights.

    Attributes:
        weights: by torch.nn's names.
        x: [time, batch, units], where every contender reads its input.
        checked: the input of the check.
        target: [time, batch, units], what the squared error compares the output with.
        others: inputs that are put into x one after the other.
    """

    weights: Weights
    x: Tensor
    checked: Tensor
    target: Tensor
    others: tuple[Tensor, ...]
    _turn: list[int] = field(default_factory=lambda: [0])

    @staticmethod
    def of(case: Case, device: torch.device, seed: int = 0) -> "Material":
        """The same for the same seed, device and sizes."""
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            weights = {name: weight.clone() for name, weight in torch_layer(case, device).state_dict().items()}
            size = (case.time, case.batch, case.units)
            checked, target, *others = (torch.randn(size, device=device).to(case.dtype) for _ in range(2 + _FRESH))
        return Material(weights, checked.clone().requires_grad_(), checked, target, tuple(others))

    @torch.no_grad()
    def refresh(self, x: Tensor | None = None) -> None:
        """Put `x` into the input that contenders read; without it the next of `others`."""
        self._turn[0] += 1
        self.x.copy_(self.others[self._turn[0] % len(self.others)] if x is None else x)


class Runner:
    """One pass of one contender, ready to be called again and again.

    Attributes:
        engine: which engine of whorl runs it; None for a rival.
        memory: bytes that torch's allocator held during a call beyond what it held before; None on a CPU, whose
            allocator does not count.
        graphed: whether a call is the replay of a CUDA graph.
        names: of what `run` gives: "y", and where a backward pass follows "grad of x" and "grad of NAME" of weights.
    """

    def __init__(self, contender: Contender, layer: Layer, which: str, material: Material) -> None:
        """Warm up, with other weights than the material's and other inputs, and capture where that is asked.

        Raises:
            RuntimeError: what torch raises where this cannot run, or cannot be captured.
        """
        self.which, self._layer, self._material = which, layer, material
        self.graphed = contender.graphed
        self.names = ("y", *(["grad of x", *(f"grad of {name}" for name in layer.parameters)] * (which == "train")))
        layer.module.train(which != "inference")
        device = material.x.device
        with torch.no_grad():
            for name, weight in layer.parameters.items():
                weight.copy_(material.weights[name])
        self.change(weights=True)
        with torch.set_grad_enabled(which != "inference"):
            self.engine = layer.engine(material.x) if layer.engine is not None else None
        self._graph: torch.cuda.CUDAGraph | None = None
        if contender.graphed:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM["cuda"]):
                    self._call()
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            before = _start_counting(device)
            with torch.cuda.graph(graph):
                self._captured = self._call()
            self._graph = graph
        else:
            for _ in range(_WARM[device.type]):
                before = _start_counting(device)
                self._call()
        self.memory = None if before is None else torch.cuda.max_memory_allocated(device) - before
        self.change(weights=True)

    def change(self, weights: bool | None = None) -> None:
        """Put a fresh input in place and, where a backward pass may follow, change the sign of every weight in place.

        Nothing that is derived from them can then be kept from call to call.

        Args:
            weights: whether to change them; None: where a backward pass may follow.
        """
        self._material.refresh()
        if weights or (weights is None and self.which != "inference"):
            with torch.no_grad():
                for weight in self._layer.parameters.values():
                    weight.neg_()

    def run(self) -> Sequence[Tensor]:
        """One call: what `names` lists."""
        if self._graph is None:
            return self._call()
        self._graph.replay()
        return self._captured

    def _call(self) -> Sequence[Tensor]:
        x = self._material.x
        if self.which == "inference":
            with torch.inference_mode():
                return (self._layer.call(x),)
        y = self._layer.call(x)
        if self.which == "forward":
            return (y,)
        # The sum in place of the mean: a loss scale, without which the gradients of large cases vanish in float16.
        loss = F.mse_loss(y, self._material.target, reduction="sum")
        return (y.detach(), *torch.autograd.grad(loss, (x, *self._layer.parameters.values())))


def _start_counting(device: torch.device) -> int | None:
    """The bytes that torch's allocator holds now; the peak is counted from here on."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
