"""Checkpoints: folders of config.json, model.safetensors and training.safetensors that appear whole or not at all.

A folder is written under a temporary name beside its own, synchronised to the disk and renamed. Reading runs nothing
that the files say: they hold numbers and names; every file is compared with its SHA-256, every shape with the model's
sizes.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise

from whorl.errors import InputError
from whorl.text.model import LanguageModel, Shape
from whorl.text.training import Recipe, Trainer
from whorl.text.vocabulary import Vocabulary

FORMAT, VERSION = "whorl language model", 1
CONFIG, MODEL, TRAINING = "config.json", "model.safetensors", "training.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a training stands: steps taken, the column of the streams that comes next, seconds of training so far."""

    step: int
    column: int
    seconds: float

    def __post_init__(self) -> None:
        if type(self.step) is not int or type(self.column) is not int or min(self.step, self.column, self.seconds) < 0:
            raise InputError(f"{self} is no progress")


@dataclass(frozen=True)
class Checkpoint:
    """A model and its training at one step.

    Attributes:
        shape, vocabulary, recipe, progress: what config.json says.
        weights: the model's state_dict.
        training: the states before the next window ("states.0", "states.1") and the optimiser's tensors
            ("exp_avg.head.weight", ...).
    """

    shape: Shape
    vocabulary: Vocabulary
    recipe: Recipe
    progress: Progress
    weights: dict[str, torch.Tensor]
    training: dict[str, torch.Tensor]

    def model(self) -> LanguageModel:
        """The language model with these weights, on the CPU."""
        model = LanguageModel(self.shape)
        model.load_state_dict(self.weights)
        return model


def capture(trainer: Trainer, vocabulary: Vocabulary) -> Checkpoint:
    """The checkpoint of a trainer as it stands; its tensors are the trainer's own until they are saved."""
    training = {f"states.{i}": state for i, state in enumerate(trainer.states or ())}
    for name, parameter in trainer.model.named_parameters():
        training.update({f"{key}.{name}": value for key, value in trainer.optimizer.state[parameter].items()})
    progress = Progress(trainer.step, trainer.column, trainer.seconds)
    return Checkpoint(trainer.model.shape, vocabulary, trainer.recipe, progress, trainer.model.state_dict(), training)


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a new trainer, made with the checkpoint's model and recipe, where the checkpoint was captured."""
    device, names = trainer.model.device, [name for name, _ in trainer.model.named_parameters()]
    trainer.step, trainer.column, trainer.seconds = vars(checkpoint.progress).values()
    states = [checkpoint.training[key].to(device) for key in ("states.0", "states.1") if key in checkpoint.training]
    trainer.states = (states[0], states[1]) if states else None
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in checkpoint.training.items():
        slot, _, name = key.partition(".")
        if slot != "states":
            slots.setdefault(names.index(name), {})[slot] = value
    trainer.optimizer.load_state_dict({**trainer.optimizer.state_dict(), "state": slots})


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint as the new folder `folder`.

    Raises:
        InputError: the folder exists, or the disk refuses; then nothing is left of it.
    """
    files = {MODEL: _bytes(checkpoint.weights), TRAINING: _bytes(checkpoint.training)}
    config = {
        "format": FORMAT,
        "version": VERSION,
        **{name: asdict(getattr(checkpoint, name)) for name in ("shape", "vocabulary", "recipe", "progress")},
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    files[CONFIG] = json.dumps(config, indent=1).encode()
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir()
        try:
            for name, content in files.items():
                with open(temporary / name, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}.") from error


def load(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`, tensors on the CPU.

    Raises:
        InputError: none there, one of another version, or one that is damaged.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        contents = {name: (folder / name).read_bytes() for name in (MODEL, TRAINING)}
    except OSError as error:
        raise InputError(f"{folder} holds no checkpoint: cannot read {error.filename}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{CONFIG} is no JSON") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise InputError(f"{folder / CONFIG} is no config of a {FORMAT}.")
    if config.get("version") != VERSION:
        version = config.get("version")
        raise InputError(f"{folder} has version {version!r}, and this whorl reads version {VERSION}: train it anew.")
    try:
        return _checked(config, contents)
    except (InputError, SafetensorError, AttributeError, KeyError, TypeError) as error:
        raise _damaged(folder, str(error) or type(error).__name__) from error


def _checked(config: dict[str, Any], contents: dict[str, bytes]) -> Checkpoint:
    for name, content in contents.items():
        if config["sha256"][name] != hashlib.sha256(content).hexdigest():
            raise InputError(f"{name} is not what was saved")
    shape, vocabulary = Shape(**config["shape"]), Vocabulary(**config["vocabulary"])
    weights, training = parse(contents[MODEL]), parse(contents[TRAINING])
    if 4 * shape.layers > len(weights):
        raise InputError(f"{MODEL} and the sizes in {CONFIG} differ")
    with torch.device("meta"):  # a config of any size costs nothing here
        expected = {name: tuple(value.shape) for name, value in LanguageModel(shape).state_dict().items()}
    if expected != {name: tuple(value.shape) for name, value in weights.items()} or len(vocabulary) != shape.tokens:
        raise InputError(f"{MODEL} and the sizes in {CONFIG} differ")
    return Checkpoint(shape, vocabulary, Recipe(**config["recipe"]), Progress(**config["progress"]), weights, training)


def _damaged(folder: Path, why: str) -> InputError:
    return InputError(f"the checkpoint {folder} is damaged: {why}. Take another one, or train anew.")


def _bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return serialise({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
