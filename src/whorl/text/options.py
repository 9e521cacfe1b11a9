"""What to train, on which text, where: the options of a training, and the presets that name sets of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from whorl.errors import InputError
from whorl.text.data import Source
from whorl.text.model import Architecture
from whorl.text.recipe import Recipe

# What a preset is made for, where that is one text: the files to train on, to hold out and to test on, in the folder
# given as path, and where they come from.
_TREEBANK = (
    ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    "the Penn Treebank as Mikolov prepared it: data/ in http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
)
FILES = {"ptb-small": _TREEBANK, "ptb-medium": _TREEBANK, "ptb-large": _TREEBANK}
_PTB: dict[str, Any] = dict(
    kind="words", layers=2, batch=20, precision="bf16",
    optimizer="sgd", clip_rows=True, weight_decay=0.0, schedule="decay", warmup=0.0,
)  # fmt: skip
# An entry names fields of Source, Architecture and Recipe; what it does not name is as it is without a preset.
PRESETS: dict[str, dict[str, Any]] = {
    # Tiny Shakespeare (github.com/karpathy/char-rnn, 1.1 million characters) on one GPU.
    "shakespeare": dict(
        kind="characters", embedding=128, units=512, layers=2, dropout=0.5, time=128, epochs=40,
        learning_rate=3e-3, schedule="cosine", warmup=0.02, weight_decay=0.05,
        valid_steps=250,
    ),
    # Zaremba, Sutskever and Vinyals (2014), arXiv 1409.2329, as TensorFlow's tutorial has them. Their loss is the sum
    # over a window's steps, whorl's is the mean: so rate and clip are theirs times and over `time`. 1 / 1.15 is the
    # tutorial's decay. A look at the held-out text ends each epoch of 929,589 words.
    "ptb-small": dict(
        **_PTB, embedding=200, units=200, init=0.1, time=20, learning_rate=1.0 * 20, clip=5 / 20,
        epochs=13, hold=4, decay=0.5, valid_steps=2323,
    ),
    "ptb-medium": dict(
        **_PTB, embedding=650, units=650, dropout=0.5, init=0.05, time=35, learning_rate=1.0 * 35, clip=5 / 35,
        epochs=39, hold=6, decay=0.8, valid_steps=1327,
    ),
    "ptb-large": dict(
        **_PTB, embedding=1500, units=1500, dropout=0.65, init=0.04, time=35, learning_rate=1.0 * 35, clip=10 / 35,
        epochs=55, hold=14, decay=1 / 1.15, valid_steps=1327,
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
            InputError: an unknown preset, a text without the preset's files, or a value that cannot be carried out.
        """
        if preset is not None and preset not in PRESETS:
            raise InputError(f"preset is {preset!r}: write one of {', '.join(PRESETS)}.")
        if preset in FILES:
            given = _with_files(preset, given)
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


def _with_files(preset: str, given: dict[str, Any]) -> dict[str, Any]:
    """`given` with the preset's own files to learn from, where `path` is the folder that holds them.

    A path that is no folder is a text to train on like any other; what is held out and tested on is then given too, or
    a part of it.
    """
    names, origin = FILES[preset]
    path: Path | None = given.get("path")
    if path is not None and not path.is_dir():
        return given
    what = "no text is given"
    if path is not None:
        missing = [name for name in names if not (path / name).is_file()]
        if not missing:
            others = {name: value for name, value in given.items() if name != "path"}
            return dict(zip(("path", "valid", "test"), map(path.joinpath, names), strict=True)) | others
        what = f"{path} has no {missing[0]}"
    raise InputError(
        f"{what}: {preset} learns from a folder with {', '.join(names)} ({origin}); give its path, or a text's."
    )


PARTS: dict[str, Any] = {"source": Source, "architecture": Architecture, "recipe": Recipe}


def _names(part: Any) -> list[str]:
    return [each.name for each in fields(part)]


def _of(part: Any, chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: chosen[name] for name in _names(part) if name in chosen}
