"""Checkpoints: they come back exactly, appear whole or not at all, and nothing damaged or foreign is taken."""

import errno
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as serialise

from whorl.errors import InputError
from whorl.text import checkpoint as module
from whorl.text.checkpoint import CONFIG, MODEL, TRAINING, capture, load, restore, save
from whorl.text.model import LanguageModel, Shape
from whorl.text.streams import Streams
from whorl.text.training import Recipe, Trainer
from whorl.text.vocabulary import Vocabulary

RECIPE = Recipe(batch=2, time=8, steps=9)
VOCABULARY = Vocabulary("characters", "abc\u00e9\U0001f600")


def trainer(steps: int = 0) -> Trainer:
    torch.manual_seed(0)
    text = torch.randint(len(VOCABULARY), (101,), dtype=torch.uint8)
    made = Trainer(LanguageModel(Shape(len(VOCABULARY), 3, 4, 2)), Streams(text, 2), RECIPE)
    for _ in range(steps):
        made.advance()
    return made


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved", capture(trainer(3), VOCABULARY))
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
    before = capture(trainer(steps), VOCABULARY)
    save(tmp_path / "saved", before)
    after = load(tmp_path / "saved")
    for name in ("shape", "vocabulary", "recipe", "progress"):
        assert getattr(after, name) == getattr(before, name)
    for name in ("weights", "training"):
        tensors, others = getattr(before, name), getattr(after, name)
        assert tensors.keys() == others.keys()
        assert all(torch.equal(tensors[key], others[key]) for key in tensors)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [CONFIG, MODEL, TRAINING]


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, steps: int) -> None:
    unbroken = trainer(steps)
    save(tmp_path / "saved", capture(unbroken, VOCABULARY))
    taken, resumed = load(tmp_path / "saved"), trainer()
    resumed.model.load_state_dict(taken.weights)
    restore(resumed, taken)
    for _ in range(4):
        assert torch.equal(resumed.advance(), unbroken.advance())
    for one, other in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(one, other)


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
        save(saved.with_name("next"), capture(trainer(4), VOCABULARY))
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    assert load(saved).progress.step == 3


def test_the_name_appears_only_when_everything_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronise, there = module.os.fsync, []

    def look(file: int) -> None:
        synchronise(file)
        there.append((tmp_path / "saved").exists())

    monkeypatch.setattr(module.os, "fsync", look)
    save(tmp_path / "saved", capture(trainer(1), VOCABULARY))
    assert there == [False] * 3
    assert load(tmp_path / "saved").progress.step == 1


def test_a_checkpoint_is_never_overwritten(saved: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        save(saved, capture(trainer(5), VOCABULARY))
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
    with pytest.raises(InputError, match=f"holds no checkpoint: cannot read .*{name}: No such file"):
        load(saved)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"version": 2}, "has version 2, and this whorl reads version 1"),
        ({"version": None}, "has version None"),
        ({"format": "another"}, "is no config of a whorl language model"),
        ({"shape": {"tokens": 5, "embedding": 3, "units": 4, "layers": 1}}, "json differ"),
        ({"shape": {"tokens": 5, "embedding": 3, "units": 9, "layers": 2}}, "json differ"),
        ({"shape": {"tokens": 5, "embedding": 3, "units": 10**9, "layers": 2}}, "units is 1000000000"),
        ({"shape": {"tokens": 5, "embedding": 3, "units": 10**7, "layers": 10**7}}, "json differ"),
        ({"shape": {"tokens": 5}}, "json differ"),
        ({"shape": {"surprise": 5}}, "surprise"),
        ({"shape": None}, "damaged"),
        ({"vocabulary": {"kind": "bytes"}}, "json differ"),
        ({"vocabulary": {"kind": "characters", "characters": 5}}, "damaged"),
        ({"recipe": {"steps": "many"}}, "damaged"),
        ({"progress": {"step": -1, "column": 0, "seconds": 0.0}}, "no progress"),
        ({"progress": {"step": 1.5, "column": 0, "seconds": 0.0}}, "no progress"),
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


def test_tensors_of_another_model_are_refused(saved: Path) -> None:
    weights = load(saved).weights
    replace(saved, MODEL, serialise({**weights, "head.bias": torch.zeros(6)}))
    with pytest.raises(InputError, match="json differ"):
        load(saved)
    replace(saved, MODEL, serialise({**weights, "extra": torch.zeros(1)}))
    with pytest.raises(InputError, match="json differ"):
        load(saved)
