"""Writes docs/options.md from the code: python tools/options_page.py"""

import json
from dataclasses import fields
from pathlib import Path

from whorl.arguments import MEANINGS
from whorl.options import ACTIVATIONS, Options, takes

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
RECORDS = Path(__file__).parents[1] / "benchmarks" / "results" / "options"
SUITES = {
    "ragged": (
        "Ragged batches: `lengths` uniform in 1 to `time`, beside torch.nn with a PackedSequence.",
        ("pass_", "dtype", "units", "batch", "time"),
    ),
    "resets": (
        "Resets with probability 0.01 a step: train steps beside the loop over steps of CleanRL's PPO, sequences split at the resets and padded, and TorchRL's kernels.",
        ("dtype", "units", "batch", "time"),
    ),
    "norm": ("Layer norm of x, r and c: train steps beside the same in torch.", ("dtype", "units", "batch", "time")),
    "stream": (
        "A step of a stream, `layer.stepper()`, beside torch.nn's layer called for one step.",
        ("dtype", "layers", "units", "batch"),
    ),
}
LAYERS = ("LSTM", "GRU", "RNN", "Recurrent")

HEAD = """\
# Options of layers and calls

Every option works with every other, with several layers, two directions, projections, packed, padded and unbatched input, and is
differentiable. What it does stands here once more than in the code: this page is written by `python tools/options_page.py`.

## Of a layer

By keyword, after torch's own arguments: `whorl.LSTM(128, 512, num_layers=2, zoneout=0.1)`. Where a layer is not named, the option is
an error that says who has it. An option that decides no parameter can be changed on a built layer: `rnn.zoneout = 0.05`.
"""

CALLS = """
## Of a call

`rnn(x, hx, mask=mask, reset=reset)`. A tensor with one value for each step lies as x does: [time, batch], [batch, time] with `batch_first`,
[time] without a batch; with a PackedSequence it is one, packed alike.
"""

COST = """
## What they cost

A train step of one LSTM layer on engine `persistent`, as many inputs as units, time {time}: in the first row microseconds of the plain layer, below it the
multiple of that; the GRU with its reset before the product is beside the plain GRU. {how} Of what is drawn, some 5 us at the beginning of each replay are two kernels of torch, which give
a graph its generator's state.
`python benchmarks/options.py costs`, replayed from a CUDA graph, in turns with the plain layer, medians, each after a check by the error rule in the same
run. `lengths` are all full: sequences that are shorter cost less. In TF32 a layer
multiplies scaled float16, with options too ([what enters a product](persistent.md#numbers)), also where its states have no bound, as softplus leaves them ([how](persistent.md#scales-that-travel)).
"""

CELLS = """
## What cells cost

A train step beside the LSTM's of the same size, and that by a quarter of its gates (where it has more than four) and by stage: pieces of a step between
which units exchange something, as a mean or a product of its own needs. {how} `python benchmarks/options.py cells`.
"""

BESIDE = """
## Beside other code

Each with the same weights and marks; whorl's numbers held to the error rule, the others' compared with them, in the same run. {how}
`python benchmarks/options_beside.py`: microseconds, and how many times as long as whorl's replay from a CUDA graph (without "CUDA graph": called from Python).
"""

TAIL = """
## How they act together

One step, in this order: a reset replaces the state; input and recurrent products are made, of masked operands where there is dropout; layer norm
acts on them; the cell computes the new states, each clipped as it is made; the first state is projected; zoneout keeps some units as they were;
and where the step does not count (`mask`, `lengths`) all states stay as they were before it, after the reset.

- Two directions: the reverse one goes from the last step of each sequence to its first. A reset at t cuts between t - 1 and t for both.
- Layers: `mask`, `lengths`, `reset` and `inputs` hold for each; the output of one, held or zero where steps do not count, is the input of the next.
- Nothing in a step that does not count is seen: NaN in padding changes no output and no gradient.
- Random masks are drawn by counting (Philox-4x32-10) from one number of torch's generator: `torch.manual_seed` repeats them, backward sees those of
  forward, and a sequence's draws depend on its place in the batch, never on the batch's size or order. Only `dropout` and `weight_drop` are drawn
  by torch's generator directly, as torch does.
- `layer.eval()`: nothing is drawn, and torch's generator does not move. Given masks act in eval too.
- Autocast: x, weights and the output have the autocast dtype; masks, states and extra inputs are never cast.

```python
import torch
import whorl

whorl.settings.slow = "allow"
rnn = whorl.LSTM(4, 5, num_layers=2, bidirectional=True, recurrent_dropout=0.2, recurrent_dropout_mode="shared", zoneout={{"c": 0.1}})
x, reset = torch.randn(7, 3, 4), torch.rand(7, 3) < 0.2
y, (h, c), states = rnn(x, lengths=[7, 0, 4], reset=reset, return_states=True)
assert y.shape == (7, 3, 10) and states["c"].shape == (7, 3, 10)
assert y[:, 1].eq(0).all() and h[:, 1].eq(0).all()  # a sequence without steps gives hx back, here zero
```

Activations by name: {activations}. Any function of one argument that a step can use will do, such as `torch.nn.functional.silu` or `torch.nn.Mish()`.
"""


def page() -> str:
    """The whole text."""
    rows = ["", "| option | default | takes | what it does |", "|---|---|---|---|"]
    for item in fields(Options):
        having = [layer for layer in LAYERS if takes(layer, item.name)]
        who = "" if len(having) == len(LAYERS) else f" ({', '.join(having)})"
        meaning = item.metadata["meaning"]
        rows.append(f"| `{item.name}`{who} | `{item.default!r}` | {item.metadata['values']} | {meaning} |")
    calls = ["", "| option | takes | what it does |", "|---|---|---|"]
    calls += [f"| `{name}` | {takes_} | {meaning} |" for name, (takes_, meaning) in MEANINGS.items()]
    activations = ", ".join(f"`{name}`" for name in ACTIVATIONS)
    return (
        HEAD
        + "\n".join(rows)
        + "\n"
        + CALLS
        + "\n".join(calls)
        + "\n"
        + costs()
        + cells()
        + beside()
        + TAIL.format(activations=activations)
    )


def found(suite: str) -> tuple[list[dict], str]:
    """What was measured of a suite, in all its files, and where and when."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob(f"{suite}*.json"))]
    said = [
        f"{file['machine']['gpu']}, driver {file['machine']['driver']}, torch {file['facts']['torch']}, CUDA {file['facts']['cuda']}, "
        f"{file['facts']['date']}, commit {file['facts']['commit']}."
        for file in files
    ]
    return [row for file in files for row in file["results"]], " ".join(dict.fromkeys(said))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def costs() -> str:
    """A table for each dtype: options by shapes."""
    rows, how = found("costs")
    text = COST.format(time=rows[0]["time"], how=how)
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        cells: dict[str, dict[tuple[int, int], str]] = {}
        for row in rows:
            if row["dtype"] == dtype and row["option"] != "GRU":
                plain = row["option"] == "plain"
                value = f"{row['microseconds']:.0f} us" if plain else f"{row['cost']:.2f}"
                cells.setdefault(row["option"], {})[row["units"], row["batch"]] = value
        shapes = sorted({shape for row in cells.values() for shape in row})
        head = [dtype, *(f"{units} units, batch {batch}" for units, batch in shapes)]
        text += table(head, [[name, *(row.get(shape, "") for shape in shapes)] for name, row in cells.items()])
    return text


def cells() -> str:
    """A row for each cell."""
    rows, how = found("cells")
    if not rows:
        return ""
    made = []
    for row in rows:
        if "gates" in row:
            share = row["cost"] / max(1, row["gates"] / 4) / row["stages"]
            made.append(
                [
                    row["option"],
                    str(row["gates"]),
                    str(row["stages"]),
                    f"{row['microseconds']:.0f}",
                    f"{row['cost']:.2f}",
                    f"{share:.2f}",
                ]
            )
    shape = f"{rows[0]['units']} units, batch {rows[0]['batch']}, time {rows[0]['time']}, {rows[0]['dtype']}"
    return CELLS.format(how=how) + table([shape, "gates", "stages", "us", "of LSTM's", "by gates and stages"], made)


def beside() -> str:
    """Of each suite a table: a problem in each row, a contender in each column."""
    how = " ".join(dict.fromkeys(found(suite)[1] for suite in SUITES if found(suite)[1]))
    text = BESIDE.format(how=how)
    for suite, (title, keys) in SUITES.items():
        rows = [row for row in found(suite)[0] if "contender" in row]
        if not rows:
            continue
        problems: dict[tuple, dict[str, float]] = {}
        for row in rows:
            problems.setdefault(tuple(row[key] for key in keys), {})[row["contender"]] = row["microseconds"]
        names = list(dict.fromkeys(name for times in problems.values() for name in times))
        lines = []
        for problem, times in problems.items():
            own = next(taken for name, taken in times.items() if name.startswith("whorl"))
            values = [
                f"{times[name]:,.{0 if own > 100 else 1}f} ({times[name] / own:.1f})" if name in times else ""
                for name in names
            ]
            lines.append([", ".join(map(str, problem)), *values])
        text += f"\n{title}\n" + table([", ".join(keys).replace("pass_", "pass"), *names], lines)
        if suite == "ragged":
            text += ragged_kernels()
    return text


def ragged_kernels() -> str:
    """The recurrent kernels of a train step, beside those of a run in which every sequence is as long as the longest."""
    runs = {(row["units"], row["batch"], row["kernels"]): row for row in found("ragged")[0] if "kernels" in row}
    lines = []
    for (units, batch, kind), row in runs.items():
        if kind != "padded":
            for name, taken in row["microseconds"].items():
                padded = runs[units, batch, "padded"]["microseconds"][name]
                way = "forward" if "_forward_" in name else "backward"
                lines.append(
                    [
                        str(units),
                        str(batch),
                        f"{row['share']:.2f}",
                        way,
                        f"{taken:,.0f}",
                        f"{padded:,.0f}",
                        f"{taken / padded:.2f}",
                    ]
                )
    head = ["units", "batch", "share of real steps", "kernel", "ragged", "all as long as the longest", "ratio"]
    return (
        "\nTheir recurrent kernels alone. Steps of a batch that runs all at once take less time as sequences end; one that takes turns takes as long as its share of steps.\n"
        + table(head, lines)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
