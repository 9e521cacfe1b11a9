"""The curves of a run as a picture."""

import math
from pathlib import Path

from whorl.errors import InputError
from whorl.text.metrics import Line
from whorl.text.model import bits

MISSING = 'not drawn: pip install "whorl[plots]" brings matplotlib, which draws it'


def draw(path: Path, lines: list[Line], unit: str, title: str) -> bool:
    """Write a PNG of the losses of `lines` by their steps; False where matplotlib, which draws it, is not installed.

    Args:
        path: the picture; one that is there is replaced when the new one is whole.
        unit: what a token counts as: the losses of words are drawn as perplexity, others in bits.

    Raises:
        InputError: the disk refuses.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    shown = math.exp if unit == "word" else bits
    for kind, label, style in (("train", "training, mean of 50 steps", "-"), ("valid", "validation", "o-")):
        points = [(line["step"], shown(line["nats"])) for line in lines if line["kind"] == kind]
        axes.plot(*zip(*points, strict=True) if points else ([], []), style, label=label, markersize=3, linewidth=1)
    axes.set(xlabel="step", ylabel="perplexity" if unit == "word" else f"bits per {unit}", title=title)
    if unit == "word":
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f".{path.name}")
    try:
        figure.savefig(temporary, format="png", dpi=110)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}.") from error
    return True
