"""The text to learn: which files are read, which part of them is held out, and the tokens of both.

A folder of 20 files or more is cut by whole files. A file's place is the SHA-256 of its path inside the folder; those
in the lowest 5 percent of all places are held out, so a file falls on the same side on every machine and in every
version of the folder. Training reads the rest in the order of the places, which shuffles the folder. Of a single file,
and of each file of a smaller folder, the last 5 percent are held out. Where another text is given to be held out,
nothing is cut.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from whorl.errors import InputError
from whorl.text.vocabulary import Count, Vocabulary, check_kind

HELD_OUT = 0.05
FEWEST_FILES = 20  # fewer files are not cut whole: the share held out would be a matter of luck
LARGEST = 1 << 30  # bytes: the text is held in memory
WORDS = 10_000  # of the vocabulary, where nothing else is asked for
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "encodings", "idlelib", "lib2to3",
              "pydoc_data"}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Which text, in which tokens.

    Attributes:
        path: a file or folder to train on; None: the source of Python's standard library.
        kind: "bytes", "characters" or "words".
        valid: a file or folder to hold out; None: a part of `path`.
        test: a file or folder that is looked at once, when the training is over; None: none.
        vocabulary: how many words are known at most, the most frequent ones of the text to train on; None: 10,000.
    """

    path: Path | None = None
    kind: str = "bytes"
    valid: Path | None = None
    test: Path | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind)
        if self.vocabulary is None:
            return
        if self.kind != "words":
            raise InputError(
                f"vocabulary is {self.vocabulary}, but tokens are {self.kind}: leave it out, or take words."
            )
        if type(self.vocabulary) is not int or self.vocabulary < 2:
            raise InputError(f"vocabulary is {self.vocabulary!r}: write a whole number from 2 on.")

    def absolute(self) -> "Source":
        """The same text, by paths that any later process finds."""
        path, valid, test = (path.absolute() if path else None for path in (self.path, self.valid, self.test))
        return Source(path, self.kind, valid, test, self.vocabulary)


@dataclass(frozen=True)
class Corpus:
    """A text in parts that share nothing.

    Attributes:
        train, held_out: token numbers [tokens].
        test: token numbers [tokens], or None where there is none.
        vocabulary: what the numbers mean.
        source: what was read, in words.
        name: the same as a name for a folder.
        files: how many files of it are text.
        files_held_out: how many of them are held out whole; 0 where the end of each file is; None where none is.
        skipped: how many files of the folder are no text.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    test: torch.Tensor | None
    vocabulary: Vocabulary
    source: str
    name: str
    files: int
    files_held_out: int | None
    skipped: int

    @cached_property
    def unit(self) -> str:
        """What a token counts as: a "word", a "character", or a "byte".

        A byte counts as a character where at most 1 byte in 1,000 continues one.
        """
        if self.vocabulary.kind != "bytes":
            return self.vocabulary.kind.removesuffix("s")
        return "character" if ((self.held_out & 0xC0) == 0x80).double().mean() < 1e-3 else "byte"

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all tokens: equal for two corpora that are the same text, wherever it lies."""
        found = hashlib.sha256(self.vocabulary.text.encode())
        for part in (self.train, self.held_out, self.test):
            if part is not None:
                found.update(len(part).to_bytes(8, "little"))
                found.update(part.numpy().data)
        return found.hexdigest()

    @property
    def unknown(self) -> float:
        """The share of the held-out tokens that are words outside the vocabulary."""
        number = self.vocabulary.unknown
        return 0.0 if number is None else (self.held_out == number).double().mean().item()


class _Read(NamedTuple):
    """What is text under one path, by the path inside it, and how it is called."""

    texts: dict[str, bytes]
    skipped: int
    source: str
    name: str


def read(source: Source) -> Corpus:
    """The corpus of files, folders, or the source of Python's standard library.

    In a folder, names that start with a dot are left out, and so is what is no text: a file with a zero byte or, but
    for bytes, one that is not UTF-8. A single file is read as it is; but for bytes it has to be text.

    Raises:
        InputError: nothing there, nothing readable, no text, or more than 1 GiB of it.
    """
    main = _read(source.path, source.kind)
    valid = _read(source.valid, source.kind) if source.valid else None
    test = _read(source.test, source.kind) if source.test else None
    others = [other.texts for other in (valid, test) if other]
    count = Count()
    if source.kind == "words":
        encode = count.number
    else:
        contents = (content for texts in [main.texts, *others] for content in texts.values())
        vocabulary = Vocabulary.of(source.kind, contents)
        encode = vocabulary.encode
    tokens = {file: encode(content) for file, content in main.texts.items()}
    whole: int | None = None
    if valid:
        train, held_out = _joined(tokens), _joined({file: encode(content) for file, content in valid.texts.items()})
    else:
        train, held_out, whole = cut(tokens)
    tested = _joined({file: encode(content) for file, content in test.texts.items()}) if test else None
    if source.kind == "words":
        vocabulary, table = count.vocabulary(train, source.vocabulary or WORDS)
        train, held_out = table[train], table[held_out]
        tested = None if tested is None else table[tested]
    said = "".join(f", {what} {other.source}" for what, other in (("validation", valid), ("test", test)) if other)
    return Corpus(train, held_out, tested, vocabulary, main.source + said, main.name, len(tokens), whole, main.skipped)


def cut(tokens: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(tokens to train on, tokens held out, files held out whole) of files: path in the folder -> tokens [tokens]."""
    if len(tokens) < FEWEST_FILES:
        ends = [max(1, round(HELD_OUT * len(file))) for file in tokens.values()]
        parts = [(file[:-end], file[-end:]) for file, end in zip(tokens.values(), ends, strict=True)]
        return torch.cat([head for head, _ in parts]), torch.cat([tail for _, tail in parts]), 0
    ordered = sorted(tokens, key=place)
    whole = max(1, sum(place(name) < HELD_OUT for name in ordered))
    held_out, train = ordered[:whole], ordered[whole:]
    return torch.cat([tokens[name] for name in train]), torch.cat([tokens[name] for name in held_out]), whole


def place(name: str) -> float:
    """Where a file stands among all, from 0 to 1: the SHA-256 of its path inside the folder, written with /."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def _joined(tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """All files, those of a large folder in the order of their places."""
    names = tokens if len(tokens) < FEWEST_FILES else sorted(tokens, key=place)
    return torch.cat([tokens[name] for name in names])


def _read(path: Path | None, kind: str) -> _Read:
    if path is None:
        root, name = Path(sysconfig.get_path("stdlib")), "stdlib"
        source = "the source of Python {}.{}'s standard library".format(*sys.version_info)
        names = [file for file in _walk(root) if file.suffix == ".py" and not NOT_SOURCE & set(file.parts[:-1])]
    else:
        root, name, source = path, path.resolve().stem, str(path)
        names = list(_walk(root)) if root.is_dir() else [Path()]
    contents = _contents(root, names)
    alone = not root.is_dir()
    flaws = {file: flaw for file, content in contents.items() if (flaw := _flaw(content, kind, alone))}
    if flaws and alone:
        raise InputError(f"{source} {flaws[Path()]}: give a text file, or write --tokens bytes.")
    texts = {file.as_posix(): content for file, content in contents.items() if content and file not in flaws}
    if not texts:
        what = "is empty" if alone else f"has no text among its {len(contents)} files"
        raise InputError(f"{source} {what}: give a file or a folder of text.")
    return _Read(texts, len(flaws), source, name)


def _walk(root: Path) -> Iterator[Path]:
    """The regular files under `root`, as paths inside it, in order; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot list {error.filename}: {error.strerror}.") from error

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(files) if not name.startswith("."))
        yield from (path.relative_to(root) for path in paths if path.is_file())


def _contents(root: Path, names: list[Path]) -> dict[Path, bytes]:
    try:
        if not root.exists():
            raise InputError(f"{root} does not exist: give a file or a folder of text.")
        if not root.is_dir() and not root.is_file():
            raise InputError(f"{root} is neither a file nor a folder: give a file or a folder of text.")
        size = sum((root / name).stat().st_size for name in names)
        if size > LARGEST:
            raise InputError(
                f"{root} has {size / 2**30:.1f} GiB, more than the {LARGEST >> 30} that fit: give a part of it."
            )
        return {name: (root / name).read_bytes() for name in names}
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}.") from error


def _flaw(content: bytes, kind: str, alone: bool) -> str | None:
    """Why `content` is no text of this kind, as the end of a sentence."""
    if kind == "bytes" and alone:
        return None
    if (zero := content.find(b"\0")) >= 0:
        return f"is not text (a zero byte at {zero:,})"
    if kind != "bytes":
        try:
            content.decode()
        except UnicodeDecodeError as error:
            return f"is not UTF-8 (at byte {error.start:,})"
    return None
