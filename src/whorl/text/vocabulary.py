"""The vocabulary: what one token is, and the way between text and token numbers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from whorl.errors import InputError

KINDS = ("bytes", "characters", "words")
END, UNKNOWN = "<eos>", "<unk>"  # the end of a line, and every word that the vocabulary does not have
BYTES = 256


@dataclass(frozen=True)
class Vocabulary:
    """Every token a model knows.

    Attributes:
        kind: "bytes", "characters" or "words".
        text: nothing for bytes; the characters in the order of their code points; the words, one a line.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        check_kind(self.kind)
        if self.kind == "words":
            if sorted(set(self.entries)) != sorted(self.text.split()) or UNKNOWN not in self.entries:
                raise InputError(f"a vocabulary of words lists each of them once, one a line, {UNKNOWN} among them.")
        elif self.text != ("" if self.kind == "bytes" else "".join(sorted(set(self.text)))):
            raise InputError("a vocabulary of characters lists each of them once, in order; one of bytes lists none.")

    @classmethod
    def of(cls, kind: str, contents: Iterable[bytes]) -> "Vocabulary":
        """The vocabulary of bytes, or that of all the characters of `contents`, which are UTF-8."""
        if kind != "characters":
            return cls(kind)
        return cls(kind, "".join(sorted(set().union(*(content.decode() for content in contents)))))

    @cached_property
    def entries(self) -> Sequence[str]:
        """The characters or words, by their numbers."""
        return self.text.split("\n") if self.kind == "words" else self.text

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {entry: number for number, entry in enumerate(self.entries)}

    def __len__(self) -> int:
        return BYTES if self.kind == "bytes" else len(self.entries)

    @property
    def unknown(self) -> int | None:
        """The number of the word that stands for all others; None where every token has its own."""
        return self._numbers[UNKNOWN] if self.kind == "words" else None

    @property
    def start(self) -> torch.Tensor:
        """One token, [1], from which a text can begin: the end of a line; else a space; else the first of all."""
        candidates = (END,) if self.kind == "words" else ("\n", " ")
        known = (self.encode(entry.encode()) for entry in candidates if self.kind == "bytes" or entry in self._numbers)
        return next(known, torch.zeros(1, dtype=torch.uint8))

    def encode(self, content: bytes) -> torch.Tensor:
        """Token numbers [tokens] of `content`, UTF-8 but for bytes: uint8 for up to 256 tokens, else int32.

        A word that is not in the vocabulary becomes `<unk>`.

        Raises:
            InputError: a character that is not in the vocabulary.
        """
        if self.kind == "bytes":
            return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        if self.kind == "words":
            places, unknown = self._numbers, self.unknown
            found = (places.get(word, unknown) for word in words(content.decode()))
            return narrow(torch.from_numpy(np.fromiter(found, np.int32)), len(self))
        codes, known = _code_points(content.decode()), _code_points(self.text)
        numbers = np.searchsorted(known, codes)
        strange = codes[np.append(known, 0)[numbers] != codes]
        if len(strange):
            raise InputError(f"{chr(strange[0])!r} is not among the {len(self)} characters of the vocabulary.")
        return narrow(torch.from_numpy(numbers), len(self))

    def decode(self, tokens: torch.Tensor) -> str:
        """The text of token numbers [tokens]; bytes that are no UTF-8 come out as U+FFFD."""
        if self.kind == "bytes":
            return bytes(tokens.tolist()).decode(errors="replace")
        entries = [self.entries[number] for number in tokens.tolist()]
        if self.kind == "characters":
            return "".join(entries)
        lines = " ".join("\n" if entry == END else entry for entry in entries)
        return lines.replace(" \n", "\n").replace("\n ", "\n")


class Count:
    """Words numbered as they come, until all are read and it is known which of them are the most frequent."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, content: bytes) -> torch.Tensor:
        """For each word of `content`, UTF-8, its place among all the words so far: int32 [words]."""
        known = self._numbers
        found = (known.setdefault(word, len(known)) for word in words(content.decode()))
        return torch.from_numpy(np.fromiter(found, np.int32))

    def vocabulary(self, train: torch.Tensor, most: int) -> tuple[Vocabulary, torch.Tensor]:
        """The vocabulary of a text to train on, and for each number that `number` gave the one it has there.

        The words stand in the order of their falling frequency, equally frequent ones in that of the alphabet;
        `<unk>` is the last.

        Args:
            train: numbers that `number` gave.
            most: how many words the vocabulary has at most, `<unk>` included.
        """
        counts = torch.bincount(train, minlength=len(self._numbers)).tolist()
        seen = [(-counts[number], word) for word, number in self._numbers.items() if counts[number] and word != UNKNOWN]
        kept = [word for _, word in sorted(seen)[: most - 1]] + [UNKNOWN]
        table = torch.full((len(self._numbers),), len(kept) - 1)
        table[torch.tensor([self._numbers[word] for word in kept[:-1]], dtype=torch.long)] = torch.arange(len(kept) - 1)
        return Vocabulary("words", "\n".join(kept)), narrow(table, len(kept))


def check_kind(kind: str) -> None:
    """Raise an InputError for a kind of tokens that there is not."""
    if kind not in KINDS:
        raise InputError(f"tokens are {kind!r}: write one of {', '.join(KINDS)}.")


def words(text: str) -> Iterator[str]:
    """The words of a text, cut at white space, with `<eos>` for the end of each line."""
    for number, line in enumerate(text.split("\n")):
        if number:
            yield END
        yield from line.split()


def narrow(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Token numbers in the smallest dtype that holds `count` of them: uint8 or int32."""
    return numbers.to(torch.uint8 if count <= BYTES else torch.int32)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
