"""Writes docs/options.md from the code: python tools/options_page.py"""

import json
from dataclasses import fields
from pathlib import Path

from whorl.arguments import MEANINGS
from whorl.options import ACTIVATIONS, Options, takes

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
COSTS = Path(__file__).parents[1] / "benchmarks" / "results" / "options" / "h200.json"
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

A train step of one LSTM layer, as many inputs as units, on engine `persistent`: microseconds, and the multiple of the plain layer's.
{gpu}, driver {driver}, torch {torch}, CUDA {cuda}, {date}, commit {commit}; `python benchmarks/options.py costs`, replayed from a CUDA graph, in
turns with the plain layer, medians, each after a check by the error rule in the same run. `lengths` are all full: sequences that are shorter cost less.

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
        HEAD + "\n".join(rows) + "\n" + CALLS + "\n".join(calls) + "\n" + costs() + TAIL.format(activations=activations)
    )


def costs() -> str:
    """The table of what was measured."""
    found = json.loads(COSTS.read_text(encoding="utf-8"))
    cells: dict[str, dict[str, str]] = {}
    for row in found["results"]:
        shape = f"{row['units']} units, batch {row['batch']}, time {row['time']}, {row['dtype']}"
        cells.setdefault(row["option"], {})[shape] = f"{row['microseconds']:.0f}, {row['cost']:.2f}"
    shapes = list(dict.fromkeys(shape for row in cells.values() for shape in row))
    lines = ["| option | " + " | ".join(shapes) + " |", "|---|" + "---|" * len(shapes)]
    lines += [f"| {name} | " + " | ".join(row.get(shape, "") for shape in shapes) + " |" for name, row in cells.items()]
    machine, facts = found["machine"], found["facts"]
    said = {name: facts[name] for name in ("torch", "cuda", "date", "commit")}
    return COST.format(gpu=machine["gpu"], driver=machine["driver"], **said) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
