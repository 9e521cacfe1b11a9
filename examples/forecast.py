"""Forecasts from histories of any length: a GRU and a layer-norm LSTM, beside torch.nn with packing.

    pip install statsmodels
    python examples/forecast.py

The series is the weekly carbon dioxide over Mauna Loa that statsmodels brings (1958 to 2001).  A history goes back at
most two years and not past a week without a measurement; and since a forecaster has to serve series that began a few
weeks ago, each is cut to a random part of that.  What is forecast is the change 13 weeks on.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import statsmodels.datasets.co2
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import whorl
from whorl.bench.figures import Figures
from whorl.bench.tables import Table, number

AHEAD, SHORTEST, LONGEST = 13, 4, 104  # weeks


def histories(values: np.ndarray, dates: np.ndarray, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Changes from week to week [histories, time, 1] with zeros after each end, their lengths, the change to come, and
    whether the forecast is made after 1990."""
    random = np.random.default_rng(seed)
    x, lengths, target, late = [], [], [], []
    for now in range(SHORTEST, len(values) - AHEAD):
        gaps = np.flatnonzero(np.isnan(values[max(0, now - LONGEST) : now + 1]))
        longest = min(now, LONGEST) - (gaps[-1] + 1 if len(gaps) else 0)
        if longest < SHORTEST or np.isnan(values[now + AHEAD]):
            continue
        length = random.integers(SHORTEST, longest + 1)
        x.append(np.pad(np.diff(values[now - length : now + 1]), (0, LONGEST - length)))
        lengths.append(length)
        target.append(values[now + AHEAD] - values[now])
        late.append(dates[now] >= np.datetime64("1990-01-01"))
    features = torch.tensor(np.array(x), dtype=torch.float32)[..., None]
    return features, torch.tensor(lengths), torch.tensor(np.array(target), dtype=torch.float32), torch.tensor(late)


class Forecaster(nn.Module):
    """The change to come, from the last output of each history."""

    def __init__(self, layer: nn.Module, read: Callable[[nn.Module, Tensor, Tensor], Tensor], units: int) -> None:
        super().__init__()
        self.layer, self.read = layer, read
        self.head = nn.Linear(units, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.read(self.layer, x, lengths)).squeeze(-1)


def by_lengths(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """whorl: padded batch and lengths go in as they are."""
    state = layer(x, lengths=lengths)[1]
    return (state[0] if isinstance(state, tuple) else state)[-1]


def by_packing(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """torch.nn: the batch is packed, for which the lengths must be on the CPU."""
    return layer(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))[1][-1]


def by_packing_of_lstm(layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """The same of torch.nn.LSTM, which has two states."""
    return by_packing(lambda packed: (None, layer(packed)[1][0]), x, lengths)


class NormLoop(nn.Module):
    """A layer-norm LSTM as one writes it with torch, which has none: a loop over time; histories that ended hold still.

    Its parameters are those of whorl.LSTM, by name and by their first values.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units
        for name, weight in whorl.LSTM(1, units, layer_norm=True).named_parameters():
            self.register_parameter(name, weight)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        w = dict(self.named_parameters())
        over = {kind: [w[f"vector_c_{kind}_l0"]] for kind in ("gain", "shift")}
        for part in "xr":
            for kind in ("gain", "shift"):
                over[part + kind] = torch.cat([w[f"vector_{part}_{kind}_{gate}_l0"] for gate in "ifgo"])
        wide, units = (4 * self.units,), (self.units,)
        projected = F.linear(x, w["weight_ih_l0"], w["bias_ih_l0"])
        projected = F.layer_norm(projected, wide, over["xgain"], over["xshift"])
        h = c = x.new_zeros(len(x), self.units)
        for t, step in enumerate(projected.unbind(1)):
            r = F.linear(h, w["weight_hh_l0"], w["bias_hh_l0"])
            i, f, g, o = (step + F.layer_norm(r, wide, over["rgain"], over["rshift"])).chunk(4, -1)
            new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            out = torch.sigmoid(o) * torch.tanh(F.layer_norm(new, units, *over["gain"], *over["shift"]))
            live = (t < lengths)[:, None]
            h, c = torch.where(live, out, h), torch.where(live, new, c)
        return h


def train(
    make: Callable, read: Callable, learnt: list[Tensor], unseen: list[Tensor], given: argparse.Namespace
) -> tuple[float, float, str]:
    """The error on what was not learnt from, the seconds of an epoch, and which engine of whorl ran."""
    torch.manual_seed(given.seed)
    model = Forecaster(make(given.units), read, given.units).to(given.device)
    adam = torch.optim.Adam(model.parameters(), fused=True)
    x, lengths, target = learnt
    seconds = []
    for epoch in range(given.epochs):
        adam.param_groups[0]["lr"] = 2e-3 * (1 - epoch / given.epochs)
        start = time.perf_counter()
        for part in torch.randperm(len(x)).to(given.device).split(given.batch):
            with torch.autocast(given.device.type, torch.bfloat16, enabled=given.bf16):
                forecast = model(x[part], lengths[part])
            loss = F.mse_loss(forecast.float(), target[part])
            adam.zero_grad()
            loss.backward()
            adam.step()
        if given.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    model.eval()
    with torch.no_grad(), torch.autocast(given.device.type, torch.bfloat16, enabled=given.bf16):
        error = (model(*unseen[:2]).float() - unseen[2]).square().mean().sqrt().item()
    with torch.autocast(given.device.type, torch.bfloat16, enabled=given.bf16):
        plans = whorl.explain(model, x[: given.batch], lengths[: given.batch]).plans
    return error, statistics.median(seconds), ", ".join(plan.engine for plan in plans)


def difference(ours: str, its: str, learnt: list[Tensor], given: argparse.Namespace) -> float:
    """By how much the gradients of two forecasters of a kind differ on one batch: the relative 2-norm, float64."""
    x, lengths, target = (tensor[: given.batch] for tensor in learnt)
    grads = []
    for make, read in (FORECASTERS[ours], FORECASTERS[its]):
        torch.manual_seed(given.seed)
        model = Forecaster(make(given.units), read, given.units).to(given.device).double()
        F.mse_loss(model(x.double(), lengths), target.double()).backward()
        parts = {name: weight.grad.flatten() for name, weight in model.named_parameters()}
        grads.append(torch.cat([parts[name] for name in sorted(parts)]))
    return ((grads[0] - grads[1]).norm() / grads[1].norm()).item()


FORECASTERS = {
    "GRU, whorl, lengths=": (lambda units: whorl.GRU(1, units, batch_first=True), by_lengths),
    "GRU, torch.nn, packed": (lambda units: nn.GRU(1, units, batch_first=True), by_packing),
    "layer-norm LSTM, whorl, lengths=": (
        lambda units: whorl.LSTM(1, units, batch_first=True, layer_norm=True),
        by_lengths,
    ),
    "layer-norm LSTM, torch, a loop": (
        NormLoop,
        lambda layer, x, lengths: layer(x, lengths),
    ),
    "LSTM without norm, torch.nn, packed": (lambda units: nn.LSTM(1, units, batch_first=True), by_packing_of_lstm),
}


def main() -> Figures:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--units", type=int, default=64)
    arguments.add_argument("--batch", type=int, default=64)
    arguments.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    arguments.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--figures", type=Path, help="a JSON file for whorl bench --suite seeds --report")
    given = arguments.parse_args()
    series = statsmodels.datasets.co2.load_pandas().data
    *data, late = histories(series["co2"].to_numpy(), series.index.to_numpy(), given.seed)
    learnt = [tensor[~late].to(given.device) for tensor in data]
    unseen = [tensor[late].to(given.device) for tensor in data]
    rows, numbers = [], {}
    names = list(FORECASTERS)
    wrong = max(difference(ours, its, learnt, given) for ours, its in (names[0:2], names[2:4]))
    assert wrong < 1e-9, f"gradients of the same batch differ by {wrong}"
    for name, (make, read) in FORECASTERS.items():
        error, seconds, engine = train(make, read, learnt, unseen, given)
        rows.append((name, f"{error:.4f}", number(1e3 * seconds), engine))
        numbers |= {f"{name}, error": error, f"{name}, milliseconds an epoch": 1e3 * seconds}
    constant = (unseen[2] - learnt[2].mean()).square().mean().sqrt().item()
    rows.append(("always the mean of the years before", f"{constant:.4f}", "", ""))
    columns = ("forecaster", "error, ppm", "milliseconds an epoch", "ran")
    notes = (
        "Error: root mean square over the forecasts after 1990, which no training saw.",
        f"Before training, gradients of one batch in float64 differ by {wrong:.1e} at most between two of a kind.",
    )
    text = (
        f"Weekly carbon dioxide over Mauna Loa, {len(learnt[1]):,} histories of {SHORTEST} to {LONGEST} weeks to "
        f"learn from and {len(unseen[1]):,} after 1990; the change {AHEAD} weeks on is forecast. {given.units} units, "
        f"batch {given.batch}, Adam, {given.epochs} epochs"
        + (", bfloat16 autocast" if given.bf16 else ", float32")
        + ". "
        "Those of a kind begin with the same parameters and see the same batches. torch.nn packs each batch; it has no "
        "layer norm, so that rival is a loop of torch operations over time.",
    )
    table = Table("Forecasts from ragged histories", columns, tuple(rows), notes)
    print(table.text())
    figures = Figures.now(
        given.device, "forecast", "Time series with ragged histories", text, [table], (), None, numbers
    )
    if given.figures:
        figures.save(given.figures)
    return figures


if __name__ == "__main__":
    main()
