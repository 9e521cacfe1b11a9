"""Checkpoints: folders of config.json, model.safetensors and training.safetensors that appear whole or not at all.

A folder is written under a temporary name beside its own, synchronised to the disk and renamed. Reading runs nothing
that the files say: they hold numbers and names; every file is compared with its SHA-256, every tensor with the sizes
of the model.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise

from whorl.errors import InputError
from whorl.text.data import Source
from whorl.text.model import Architecture, LanguageModel
from whorl.text.recipe import Recipe
from whorl.text.training import KEPT, Trainer
from whorl.text.vocabulary import Vocabulary

FORMAT, VERSION = "whorl language model", 2
CONFIG, MODEL, TRAINING = "config.json", "model.safetensors", "training.safetensors"
LARGEST_CONFIG = 1 << 28  # bytes; what else is read is compared with the model's sizes first
SLACK = 1 << 20  # bytes of a safetensors file beside its tensors, and as many again for each 1,000 of them
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Progress:
    """Where a training stands: steps taken, the column of the streams that comes next, seconds of training so far."""

    step: int
    column: int
    seconds: float

    def __post_init__(self) -> None:
        if (
            type(self.step) is not int
            or type(self.column) is not int
            or not all(0 <= value < 2**63 for value in vars(self).values())
        ):
            raise InputError(f"{self} is no progress")


@dataclass(frozen=True)
class Checkpoint:
    """A model and its training at one step.

    Attributes:
        architecture, vocabulary, recipe, source, text, progress: what config.json says; `text` is the digest of the
            text's tokens.
        weights: the model's parameters, by their names; a tied weight is listed once.
        training: the states before the next window ("states.0", ...), the last losses ("losses") and the optimiser's
            tensors ("exp_avg.head.weight", ...).
    """

    architecture: Architecture
    vocabulary: Vocabulary
    recipe: Recipe
    source: Source
    text: str
    progress: Progress
    weights: Tensors
    training: Tensors

    def model(self) -> LanguageModel:
        """The language model with these weights, on the CPU."""
        model = LanguageModel(self.architecture)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[name])
        return model


def capture(trainer: Trainer, vocabulary: Vocabulary, source: Source, text: str) -> Checkpoint:
    """The checkpoint of a trainer as it stands; its tensors are the trainer's own until they are saved.

    It holds the states of all rows: every process of the trainer's group takes part, and each gets the same.
    """
    parts = [states for states in trainer.states if states is not None]
    group = trainer.group
    units = trainer.model.architecture.units  # a step on a copy of the parameters may have more
    states = [group.joint(torch.cat(state, 1)[..., :units], 1) for state in zip(*parts, strict=True)]
    training = {f"states.{i}": state for i, state in enumerate(states)}
    group.average(trainer.losses)
    training["losses"] = trainer.losses
    weights: Tensors = dict(trainer.model.named_parameters())
    for name, parameter in weights.items():
        slots = trainer.optimizer.state.get(parameter, {})
        training.update({f"{key}.{name}": value for key, value in slots.items() if value is not None})
    progress = Progress(trainer.step, trainer.column, trainer.seconds)
    recipe, architecture = trainer.recipe, trainer.model.architecture
    return Checkpoint(architecture, vocabulary, recipe, source, text, progress, weights, training)


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a new trainer, made with the checkpoint's model and recipe, where the checkpoint was captured.

    Its group may have another number of processes: each takes its rows of the states.
    """
    device, names = trainer.model.device, [name for name, _ in trainer.model.named_parameters()]
    trainer.step, trainer.column, trainer.seconds = vars(checkpoint.progress).values()
    parts = trainer.recipe.accumulate
    states: list[tuple[torch.Tensor, ...]] = []
    slots: dict[int, Tensors] = {}
    for key, value in sorted(checkpoint.training.items()):
        slot, _, name = key.partition(".")
        if slot == "losses":
            trainer.losses.copy_(value)
        elif slot == "states":
            own = value.chunk(trainer.group.size, 1)[trainer.group.rank]
            states.append(own.to(device).chunk(parts, 1))
        else:
            slots.setdefault(names.index(name), {})[slot] = value
    trainer.states = list(zip(*states, strict=True)) if states else [None] * parts
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": slots})


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as the new folder `folder`.

    Raises:
        InputError: the folder exists, or the disk refuses; then nothing is left of it.
    """
    files = {MODEL: _bytes(checkpoint.weights), TRAINING: _bytes(checkpoint.training)}
    parts = ("architecture", "vocabulary", "recipe", "source", "progress")
    config = {
        "format": FORMAT,
        "version": VERSION,
        **{name: asdict(getattr(checkpoint, name)) for name in parts},
        "text": checkpoint.text,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    files[CONFIG] = json.dumps(config, indent=1, default=str).encode()  # str: of a Path
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir()
        try:
            for name, content in files.items():
                with open(temporary / name, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            _synchronise(temporary)
            temporary.rename(folder)
            _synchronise(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}.") from error


def remove(folder: Path) -> None:
    """Take a checkpoint away: it disappears whole, whenever this is interrupted."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    try:
        folder.rename(doomed)
    except OSError as error:
        raise InputError(f"cannot remove {folder}: {error.strerror}.") from error
    shutil.rmtree(doomed, ignore_errors=True)


def load(folder: Path, training: bool = True) -> Checkpoint:
    """The checkpoint in `folder`, tensors on the CPU.

    Args:
        training: False: for its model alone, without the tensors that only go on with the training.

    Raises:
        InputError: none there, one of another version, or one that is damaged.
    """
    missing = [name for name in (CONFIG, MODEL, TRAINING) if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder} holds no checkpoint: {missing[0]} is missing.")
    try:
        config = json.loads(_content(folder / CONFIG, LARGEST_CONFIG))
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{CONFIG} is no JSON") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise InputError(f"{folder / CONFIG} is no config of a {FORMAT}.")
    if config.get("version") != VERSION:
        version = config.get("version")
        raise InputError(f"{folder} has version {version!r}, and this whorl reads version {VERSION}: train it anew.")
    try:
        return _checked(folder, config, training)
    except (InputError, SafetensorError, AttributeError, KeyError, TypeError, OverflowError) as error:
        raise _damaged(folder, str(error) or type(error).__name__) from error


def _checked(folder: Path, config: dict[str, Any], training: bool) -> Checkpoint:
    made = Checkpoint(
        Architecture(**config["architecture"]),
        Vocabulary(**config["vocabulary"]),
        Recipe(**config["recipe"]),
        _source(**config["source"]),
        str(config["text"]),
        Progress(**config["progress"]),
        {},
        {},
    )
    if len(made.vocabulary) != made.architecture.tokens:
        raise InputError("the vocabulary and the architecture differ in their tokens")
    weights, others = _expected(made)
    read = _tensors(folder, MODEL, config, weights)
    return replace(made, weights=read, training=_tensors(folder, TRAINING, config, others) if training else {})


def _source(path: str | None, kind: str, valid: str | None, test: str | None, vocabulary: int | None) -> Source:
    where = [None if name is None else Path(name) for name in (path, valid, test)]
    return Source(where[0], kind, where[1], where[2], vocabulary)


def _expected(checkpoint: Checkpoint) -> tuple[Tensors, Tensors]:
    """What the two files have to hold, on the device meta: a config of any size costs nothing here."""
    recipe, sgd = checkpoint.recipe, checkpoint.recipe.optimizer == "sgd"
    with torch.device("meta"), torch.no_grad():
        model = LanguageModel(replace(checkpoint.architecture, engine="auto"))  # no other runs there
        weights: Tensors = dict(model.named_parameters())
        training = {"losses": torch.zeros(KEPT)}
        if checkpoint.progress.step:
            _, states = model(torch.zeros(1, recipe.batch, dtype=torch.long))
            training |= {f"states.{i}": state for i, state in enumerate(states)}
        if checkpoint.progress.step and not sgd:
            training |= {f"step.{name}": torch.zeros(()) for name in weights}
            training |= {f"{slot}.{name}": w for name, w in weights.items() for slot in ("exp_avg", "exp_avg_sq")}
    return weights, training


def _tensors(folder: Path, name: str, config: dict[str, Any], expected: Tensors) -> Tensors:
    most = sum(tensor.nbytes for tensor in expected.values()) + SLACK * (1 + len(expected) // 1000)
    content = _content(folder / name, most)
    if config["sha256"][name] != hashlib.sha256(content).hexdigest():
        raise InputError(f"{name} is not what was saved")
    found = parse(content)
    if _sizes(found) != _sizes(expected):
        raise InputError(f"{name} and the sizes in {CONFIG} differ")
    return found


def _sizes(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype | None]]:
    """The shape and dtype of each tensor; states may have that of autocast."""
    states = {torch.bfloat16: torch.float32}
    return {
        name: (tensor.shape, states.get(tensor.dtype, tensor.dtype) if name.startswith("states.") else tensor.dtype)
        for name, tensor in tensors.items()
    }


def _content(path: Path, most: int) -> bytes:
    """The file at `path`, of at most `most` bytes."""
    try:
        size = path.stat().st_size
        if size > most:
            raise InputError(f"{path.name} has {size:,} bytes, this one has at most {most:,}")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from error


def _damaged(folder: Path, why: str) -> InputError:
    return InputError(f"the checkpoint {folder} is damaged: {why.rstrip('.')}. Take another one, or train anew.")


def _bytes(tensors: Tensors) -> bytes:
    return serialise({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})


def _synchronise(folder: Path) -> None:
    """Bring the names in a folder to the disk, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
