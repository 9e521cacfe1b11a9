"""What a train step of `whorl.LSTM` costs beside `torch.nn.LSTM`, on this CPU, in turns, after a check of the numbers.

python benchmarks/train_step.py [layers batch time units]
"""

import platform
import statistics
import sys
import time

import torch

import whorl


def step(layer: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
    """The output and each gradient, after a forward, a mean-squared error and a backward."""
    for weight in layer.parameters():
        weight.grad = None
    y, _ = layer(x)
    torch.nn.functional.mse_loss(y, target).backward()
    return [y, *(weight.grad for weight in layer.parameters())]


def main(layers: int = 1, batch: int = 32, steps: int = 30, units: int = 128, turns: int = 300) -> None:
    """Print medians in microseconds and their ratio, for one thread and for all."""
    theirs, ours = torch.nn.LSTM(units, units, layers), whorl.LSTM(units, units, layers)
    ours.load_state_dict(theirs.state_dict())
    x, target = torch.randn(steps, batch, units), torch.randn(steps, batch, units)
    for mine, torchs in zip(step(ours, x, target), step(theirs, x, target), strict=True):
        torch.testing.assert_close(mine, torchs)
    print(whorl.explain(ours, x))
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        times: dict[torch.nn.Module, list[float]] = {theirs: [], ours: []}
        for turn in range(turns):
            for layer in (theirs, ours) if turn % 2 else (ours, theirs):
                start = time.perf_counter()
                step(layer, x, target)
                times[layer].append(1e6 * (time.perf_counter() - start))
        torchs, whorls = (statistics.median(seconds[10:]) for seconds in times.values())
        print(f"{threads} threads: torch.nn {torchs:.0f} us, whorl {whorls:.0f} us, ratio {whorls / torchs:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
