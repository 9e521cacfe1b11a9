"""What to train, on which text, where: the options of a training, and the presets that name sets of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from whorl.errors import InputError
from whorl.text.data import Source
from whorl.text.model import Architecture
from whorl.text.recipe import Recipe

# An entry names fields of Source, Architecture and Recipe; what it does not name is as it is without a preset.
PRESETS: dict[str, dict[str, Any]] = {
    # Tiny Shakespeare (github.com/karpathy/char-rnn, 1.1 million characters) on one GPU.
    "shakespeare": dict(
        kind="characters", embedding=128, units=512, layers=2, dropout=0.5, time=128, epochs=40,
        learning_rate=3e-3, schedule="cosine", warmup=0.02, weight_decay=0.05,
        valid_steps=250,
    ),
}  # fmt: skip
BUDGETS = ("steps", "epochs", "minutes")


@dataclass(frozen=True)
class Options:
    """What to train, on which text, where.

    Attributes:
        source: the text.
        architecture: the model; how many tokens it knows is the text's affair.
        recipe: how to train.
        device: a torch device, or "auto": the GPU where torch sees one, else the CPU.
        out: the run folder, new or empty; None: a new one under ./runs.
        sample: how many tokens the trained model writes.
    """

    source: Source = field(default_factory=Source)
    architecture: Architecture = field(default_factory=Architecture)
    recipe: Recipe = field(default_factory=Recipe)
    device: str = "auto"
    out: Path | None = None
    sample: int = 600

    def __post_init__(self) -> None:
        if self.sample < 0:
            raise InputError(f"sample is {self.sample}: write a number of {self.source.kind} from 0 on.")

    @classmethod
    def of(cls, preset: str | None = None, **given: Any) -> "Options":
        """The options of a preset, with those in `given`, by the names of their fields, in place of its own.

        A budget that is given takes the place of all budgets of the preset and of the default.

        Raises:
            InputError: an unknown preset, or a value that cannot be carried out.
        """
        if preset is not None and preset not in PRESETS:
            raise InputError(f"preset is {preset!r}: write one of {', '.join(PRESETS)}.")
        chosen: dict[str, Any] = {}
        for layer in (PRESETS[preset] if preset else {}, given):
            if any(layer.get(name) is not None for name in BUDGETS):
                chosen |= dict.fromkeys(BUDGETS)
            chosen |= layer
        parts = {name: part(**_of(part, chosen)) for name, part in PARTS.items()}
        unknown = chosen.keys() - {name for part in PARTS.values() for name in _names(part)} - set(_names(cls))
        if unknown:
            raise InputError(f"there is no option {', '.join(sorted(unknown))}.")
        return cls(**parts, **_of(cls, chosen))


PARTS: dict[str, Any] = {"source": Source, "architecture": Architecture, "recipe": Recipe}


def _names(part: Any) -> list[str]:
    return [each.name for each in fields(part)]


def _of(part: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: chosen[name] for name in _names(part) if name in chosen}
