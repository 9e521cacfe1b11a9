"""A stream is watched sample by sample: a small GRU says what comes next, and what it did not expect is reported.

    python examples/streaming.py
    python examples/streaming.py --steps 300 --samples 5000

The network learns from a recording without faults, on whole sequences.  Then it steps through a live stream, one sample
at a time, through `layer.stepper()`: its states are kept, its weights are laid out once.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

import whorl


class Forecast(nn.Module):
    """What comes next, from all samples so far."""

    def __init__(self, units: int = 32) -> None:
        super().__init__()
        self.memory = whorl.GRU(1, units)
        self.read = nn.Linear(units, 1)

    def forward(self, samples: Tensor) -> Tensor:
        return self.read(self.memory(samples)[0])


def recording(time_steps: int, batch: int) -> Tensor:
    """Two waves and a little noise, [time, batch, 1], each sequence from a moment of its own."""
    moment = torch.arange(time_steps)[:, None] + 1000 * torch.rand(batch)
    return (torch.sin(0.2 * moment) + 0.5 * torch.sin(0.57 * moment) + 0.02 * torch.randn(time_steps, batch))[..., None]


def train(model: Forecast, steps: int) -> float:
    """Learn to say each next sample; gives the mean error of the last steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    errors = []
    for _ in range(steps):
        samples = recording(60, 16)
        loss = (model(samples[:-1]) - samples[1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    return statistics.mean(errors[-10:]) ** 0.5


def main() -> list[int]:
    """The samples that were reported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--samples", type=int, default=2000, help="of the live stream")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Forecast()
    usual = train(model, given.steps)
    print(f"a sample is forecast to {usual:.3f}, after {given.steps} steps of training")

    live = recording(given.samples, 1)
    fault = given.samples // 2
    live[fault] += 1.0
    model.eval()
    stepper = model.memory.stepper()
    print(stepper)
    found, times = [], []
    with torch.no_grad():
        forecast = model.read(stepper(live[0]))
        for t in range(1, given.samples):
            if t > 20 and abs(float(live[t] - forecast)) > 8 * usual:
                found.append(t)
                print(f"sample {t} is {float(live[t]):.2f}, {float(forecast):.2f} was expected")
            begin = time.perf_counter()
            output = stepper(live[t])
            times.append(time.perf_counter() - begin)
            forecast = model.read(output)
    print(f"a step of the GRU takes {1e6 * statistics.median(times):.1f} us")
    return found


if __name__ == "__main__":
    main()
