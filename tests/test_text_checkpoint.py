"""Checkpoints: they come back exactly, appear whole or not at all, and nothing damaged or foreign is taken."""

import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as serialise

from whorl.errors import InputError
from whorl.text import checkpoint as module
from whorl.text.checkpoint import CONFIG, MODEL, TRAINING, Checkpoint, load, remove, restore, save
from whorl.text.data import Source
from whorl.text.model import Architecture, LanguageModel
from whorl.text.recipe import Recipe
from whorl.text.streams import Streams
from whorl.text.training import Trainer
from whorl.text.vocabulary import Vocabulary

RECIPE = Recipe(batch=2, time=8, steps=9)
VOCABULARY = Vocabulary("characters", "abc\u00e9\U0001f600")
SIZES = dict(embedding=3, units=4, layers=2, tokens=len(VOCABULARY))


def trainer(steps: int = 0, recipe: Recipe = RECIPE, **options: object) -> Trainer:
    torch.manual_seed(0)
    text = torch.randint(len(VOCABULARY), (101,), dtype=torch.uint8)
    model = LanguageModel(Architecture(**SIZES | options))
    made = Trainer(model, Streams(text, recipe.batch), recipe)
    for _ in range(steps):
        made.advance()
    return made


def capture(trainer: Trainer) -> Checkpoint:
    return module.capture(trainer, VOCABULARY, Source(Path("a text").absolute(), "characters"), "its digest")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved", capture(trainer(3)))
    return tmp_path / "saved"


def change(folder: Path, **values: object) -> None:
    """Rewrite the config with other values, its checksums in order."""
    config = json.loads((folder / CONFIG).read_bytes()) | values
    (folder / CONFIG).write_text(json.dumps(config))


def replace(folder: Path, name: str, content: bytes) -> None:
    """Rewrite a file, its checksum in order."""
    (folder / name).write_bytes(content)
    sums = {file: module.hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in (MODEL, TRAINING)}
    change(folder, sha256=sums)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_checkpoint_comes_back(tmp_path: Path, steps: int) -> None:
    before = capture(trainer(steps))
    save(tmp_path / "saved", before)
    after = load(tmp_path / "saved")
    for name in ("architecture", "vocabulary", "recipe", "source", "text", "progress"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("weights", "training"):
        tensors, others = getattr(before, name), getattr(after, name)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [CONFIG, MODEL, TRAINING]


TRAININGS = {
    "plain": {},
    "dropout": dict(dropout=0.4),
    "tied": dict(tied=True, embedding=4),
    "gru": dict(cell="gru", options=dict(recurrent_dropout=0.3, layer_norm="x r")),
    "noise": dict(options=dict(zoneout=dict(h=0.2, c=0.1), weight_drop=0.3, input_dropout=0.1, peephole=True)),
    "four states": dict(cell="slstm", options=dict(clip=2.0)),
    "projected": dict(options=dict(proj_size=2, bias=False)),
    "sgd": dict(recipe=Recipe(batch=2, time=8, steps=9, optimizer="sgd", schedule="decay", decay=0.5, warmup=0.0)),
    "parts": dict(recipe=Recipe(batch=4, time=8, steps=9, accumulate=2), dropout=0.2),
    "engine": dict(engine="reference"),
    "named": dict(engine="onednn" if torch.backends.mkldnn.is_available() else "reference"),
    "bf16": dict(recipe=Recipe(batch=2, time=8, steps=9, precision="bf16")),
}


@pytest.mark.parametrize("kind", TRAININGS)
@pytest.mark.parametrize("steps", [0, 3, 6])
def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, steps: int, kind: str) -> None:
    unbroken = trainer(steps, **TRAININGS[kind])
    save(tmp_path / "saved", capture(unbroken))
    taken, resumed = load(tmp_path / "saved"), trainer(**TRAININGS[kind])
    resumed.model.load_state_dict(taken.model().state_dict())
    restore(resumed, taken)
    torch.rand(9)  # what else draws random numbers in this process is of no account
    for _ in range(4):
        assert torch.equal(resumed.advance(), unbroken.advance())
    assert torch.equal(resumed.losses, unbroken.losses)
    for one, other in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [2, 9])
@pytest.mark.parametrize("kind", ["dropout", "sgd"])
def test_a_captured_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, steps: int, kind: str) -> None:
    def made(count: int) -> Trainer:
        torch.manual_seed(0)
        text, options = torch.randint(len(VOCABULARY), (201,), dtype=torch.uint8), dict(TRAININGS[kind])
        recipe = options.pop("recipe", RECIPE)
        model = LanguageModel(Architecture(**SIZES | options)).cuda()
        trainer = Trainer(model, Streams(text.cuda(), recipe.batch), recipe)
        for _ in range(count):
            trainer.advance()
        return trainer

    unbroken = made(steps)
    save(tmp_path / "saved", capture(unbroken))
    taken, resumed = load(tmp_path / "saved"), made(0)
    resumed.model.load_state_dict(taken.model().state_dict())
    restore(resumed, taken)
    for _ in range(8):  # eager, captured, and over the end of the rows
        torch.testing.assert_close(resumed.advance(), unbroken.advance())
    torch.testing.assert_close(resumed.losses, unbroken.losses)


def test_a_checkpoint_holds_what_it_held_when_saved(saved: Path) -> None:
    made = trainer(3)
    weights = load(saved).weights
    made.advance()
    assert not torch.equal(made.model.head.weight, weights["head.weight"])
    assert torch.equal(trainer(3).model.head.weight, weights["head.weight"])


@pytest.mark.parametrize("failing", range(3))
def test_a_full_disk_leaves_what_was_there(saved: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronise, calls = module.os.fsync, iter(range(9))

    def full(file: int) -> None:
        if next(calls) == failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        synchronise(file)

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot write .*next: No space left on device"):
        save(saved.with_name("next"), capture(trainer(4)))
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    assert load(saved).progress.step == 3


def test_the_name_appears_only_when_everything_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronise, there = module.os.fsync, []

    def look(file: int) -> None:
        synchronise(file)
        there.append((tmp_path / "saved").exists())

    monkeypatch.setattr(module.os, "fsync", look)
    save(tmp_path / "saved", capture(trainer(1)))
    assert there == [False] * 3 + [False, True] * (os.name != "nt")  # the files; then the names in both folders
    assert load(tmp_path / "saved").progress.step == 1


def test_a_checkpoint_that_is_removed_is_never_there_in_part(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*where: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove(saved)
    assert load(saved).progress.step == 3
    calls = iter([lambda *where, **how: None, killed])
    monkeypatch.setattr(module.shutil, "rmtree", lambda *where, **how: next(calls)(*where, **how))
    with pytest.raises(KeyboardInterrupt):
        remove(saved)
    assert not saved.exists()


def test_a_model_alone_can_be_read(saved: Path) -> None:
    assert load(saved, training=False).training == {}
    (saved / TRAINING).write_bytes(b"damaged")
    found = load(saved, training=False)
    assert torch.equal(found.model().head.weight, trainer(3).model.head.weight)


def test_a_checkpoint_is_never_overwritten(saved: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        save(saved, capture(trainer(5)))
    assert load(saved).progress.step == 3


@pytest.mark.parametrize("name", [MODEL, TRAINING])
def test_one_changed_byte_is_seen(saved: Path, name: str) -> None:
    content = bytearray((saved / name).read_bytes())
    content[-1] ^= 1
    (saved / name).write_bytes(content)
    with pytest.raises(InputError, match=f"damaged: {name} is not what was saved"):
        load(saved)


@pytest.mark.parametrize("name", [CONFIG, MODEL, TRAINING])
@pytest.mark.parametrize("length", [0, 40])
def test_a_cut_file_is_seen(saved: Path, name: str, length: int) -> None:
    (saved / name).write_bytes((saved / name).read_bytes()[:length])
    with pytest.raises(InputError, match="is damaged"):
        load(saved)


@pytest.mark.parametrize("name", [CONFIG, MODEL, TRAINING])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(InputError, match=f"holds no checkpoint: {name} is missing"):
        load(saved)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 1}, "has version 1, and this whorl reads version 2"),
        ({"version": None}, "has version None"),
        ({"format": "another"}, "is no config of a whorl language model"),
        ({"architecture": SIZES | {"layers": 1}}, "json differ"),
        ({"architecture": SIZES | {"units": 9}}, "json differ"),
        ({"architecture": SIZES | {"units": 10**9}}, "units is 1000000000"),
        ({"architecture": SIZES | {"units": 10**7}}, "json differ"),
        ({"architecture": SIZES | {"layers": 10**7}}, "layers is 10000000"),
        ({"architecture": SIZES | {"tokens": 6}}, "differ in their tokens"),
        ({"architecture": SIZES | {"cell": "__class__"}}, "cell is '__class__'"),
        ({"architecture": SIZES | {"cell": ["lstm"]}}, "damaged"),
        ({"architecture": SIZES | {"options": {"activation": "print"}}}, "activation is 'print'"),
        ({"architecture": SIZES | {"options": {"device": "cuda"}}}, "device is no option"),
        ({"architecture": SIZES | {"options": 5}}, "damaged"),
        ({"architecture": SIZES | {"cell": "gru"}}, "json differ"),
        ({"architecture": {"surprise": 5}}, "surprise"),
        ({"architecture": None}, "damaged"),
        ({"vocabulary": {"kind": "bytes"}}, "differ in their tokens"),
        ({"vocabulary": {"kind": "characters", "text": 5}}, "damaged"),
        ({"recipe": {"steps": "many"}}, "damaged"),
        ({"recipe": {"batch": 2**62}}, "batch is 4611686018427387904"),
        ({"recipe": {"batch": 3}}, "json differ"),
        ({"recipe": {"batch": 2, "optimizer": "sgd"}}, "json differ"),
        ({"source": {"path": 5}}, "damaged"),
        ({"progress": {"step": -1, "column": 0, "seconds": 0.0}}, "no progress"),
        ({"progress": {"step": 1.5, "column": 0, "seconds": 0.0}}, "no progress"),
        ({"progress": {"step": 0, "column": 0, "seconds": 0.0}}, "json differ"),
        ({"progress": {"step": 3, "column": 0, "seconds": float("nan")}}, "no progress"),
        ({"sha256": {}}, "damaged"),
    ],
)
def test_other_configs_are_refused(saved: Path, values: dict[str, object], message: str) -> None:
    change(saved, **values)
    with pytest.raises(InputError, match=message):
        load(saved)


def test_configs_that_are_no_object_are_refused(saved: Path) -> None:
    for text in ("[]", "5", "[" * 100_000, "\xff"):
        (saved / CONFIG).write_text(text, encoding="latin-1")
        with pytest.raises(InputError):
            load(saved)


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("sprung"),)


def test_a_pickle_in_disguise_is_not_run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    replace(saved, MODEL, pickle.dumps(Trap()))
    with pytest.raises(InputError, match="is damaged"):
        load(saved)
    assert not Path("sprung").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"head.bias": torch.zeros(6)},
        {"head.bias": torch.zeros(5, dtype=torch.float64)},
        {"extra": torch.zeros(1)},
    ],
)
def test_tensors_of_another_model_are_refused(saved: Path, change: dict[str, torch.Tensor]) -> None:
    replace(saved, MODEL, serialise({**load(saved).weights, **change}))
    with pytest.raises(InputError, match="json differ"):
        load(saved)


@pytest.mark.parametrize(
    "change",
    [
        {"states.0": torch.zeros(2, 3, 4)},
        {"states.2": torch.zeros(2, 2, 4)},
        {"states.0": torch.zeros(2, 2, 4, dtype=torch.int32)},
        {"losses": torch.zeros(49)},
        {"exp_avg.head.bias": torch.zeros(6)},
        {"exp_avg.nothing": torch.zeros(5)},
        {"momentum_buffer.head.bias": torch.zeros(5)},
        {"step.head.bias": torch.zeros(1)},
    ],
)
def test_a_training_that_does_not_fit_is_refused(saved: Path, change: dict[str, torch.Tensor]) -> None:
    replace(saved, TRAINING, serialise({**load(saved).training, **change}))
    with pytest.raises(InputError, match="json differ"):
        load(saved)


def test_a_file_of_any_size_is_not_read(saved: Path) -> None:
    for name in (CONFIG, MODEL, TRAINING):
        content = (saved / name).read_bytes()
        with open(saved / name, "ab") as file:
            file.truncate(40 << 30)
        with pytest.raises(InputError, match=f"{name} has 42,949,672,960 bytes"):
            load(saved)
        (saved / name).write_bytes(content)
