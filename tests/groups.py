"""Small trainings by several processes of this machine, each in a process of its own, for tests."""

import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from interruptions import _server
from whorl.text import working
from whorl.text.checkpoint import Checkpoint, capture, restore
from whorl.text.data import Source
from whorl.text.group import ALONE, Group, join
from whorl.text.model import Architecture, LanguageModel
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.training import Trainer
from whorl.text.vocabulary import Vocabulary

VOCABULARY = Vocabulary("characters", "abcdefg")
TINY = Architecture(tokens=7, embedding=3, units=5, layers=2)


@dataclass(frozen=True)
class Task:
    """What a group does: train a tiny model in float64 for so many steps, from the start or from a checkpoint."""

    steps: int
    recipe: Recipe
    options: dict[str, Any] = field(default_factory=dict)
    text: int = 6 * 60 + 1
    start: Checkpoint | None = None
    copied: int | None = None
    """Steps are taken on a copy of the parameters, in float64 too, and gradients above so many numbers travel alone."""


@dataclass(frozen=True)
class Outcome:
    """What came of it: the losses of the steps, over all processes, and what a checkpoint then holds."""

    losses: list[float]
    checkpoint: Checkpoint


def carry_out(task: Task, group: Group = ALONE) -> Outcome:
    """The outcome, which every process of a group gets."""
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, **task.options)).double()
    chance = torch.Generator().manual_seed(1)
    text = torch.randint(TINY.tokens, (task.text,), generator=chance, dtype=torch.uint8)
    trainer = Trainer(model, Streams(text, task.recipe.batch), task.recipe, group)
    if task.copied is not None:
        working._SMALL = task.copied
        trainer._working = working.Working(model, group, torch.float64, padded=True)
    if task.start is not None:
        model.load_state_dict(task.start.weights, strict=False)
        restore(trainer, task.start)
    losses = []
    for _ in range(task.steps):
        loss = trainer.advance().clone()
        group.average(loss)
        losses.append(loss.item())
    return Outcome(losses, capture(trainer, VOCABULARY, Source(Path("a text"), "characters"), "its digest"))


def together(size: int, task: Task, folder: Path) -> list[Outcome]:
    """The outcome in each of `size` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = _server()
    processes = [context.Process(target=_process, args=(rank, size, port, task, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"outcome-{rank}", weights_only=False) for rank in range(size)]


def _process(rank: int, size: int, port: int, task: Task, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group, device = join("cpu")
    assert device == "cpu"
    torch.save(carry_out(task, group), folder / f"outcome-{rank}")
    group.leave()


def difference(one: Checkpoint, other: Checkpoint) -> float:
    """The largest relative 2-norm of the difference of two parameters, states or averages."""
    found = [0.0]
    for tensors, others in ((one.weights, other.weights), (one.training, other.training)):
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            norm = others[name].double().norm().item()
            found.append((tensor.double() - others[name].double()).norm().item() / (norm or 1.0))
    return max(found)
