"""The vocabulary: what one token is, and the way between text and token numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from whorl.errors import InputError

KINDS = ("bytes", "characters")


@dataclass(frozen=True)
class Vocabulary:
    """Every token a model knows: the 256 bytes, or the characters of a text in the order of their code points."""

    kind: str
    characters: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"tokens are {self.kind!r}: write one of {', '.join(KINDS)}.")
        if self.characters != "".join(sorted(set(self.characters))) or (self.kind == "bytes" and self.characters):
            raise InputError("a vocabulary of characters lists each of them once, in order; one of bytes lists none.")

    @classmethod
    def of(cls, kind: str, contents: Iterable[bytes]) -> "Vocabulary":
        """The vocabulary in which every one of `contents` can be written; for characters they are UTF-8."""
        if kind != "characters":
            return cls(kind)
        return cls(kind, "".join(sorted(set().union(*(content.decode() for content in contents)))))

    def __len__(self) -> int:
        return 256 if self.kind == "bytes" else len(self.characters)

    def encode(self, content: bytes) -> torch.Tensor:
        """Token numbers [tokens] of `content`, UTF-8 for characters: uint8 for up to 256 tokens, else int32.

        Raises:
            InputError: a character that is not in the vocabulary.
        """
        if self.kind == "bytes":
            return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        codes, known = _code_points(content.decode()), _code_points(self.characters)
        numbers = np.searchsorted(known, codes)
        strange = codes[np.append(known, 0)[numbers] != codes]
        if len(strange):
            raise InputError(f"{chr(strange[0])!r} is not among the {len(self)} characters of the vocabulary.")
        return torch.from_numpy(numbers.astype(np.uint8 if len(self) <= 256 else np.int32))

    def decode(self, tokens: torch.Tensor) -> str:
        """The text of token numbers [tokens]; bytes that are no UTF-8 come out as U+FFFD."""
        if self.kind == "bytes":
            return bytes(tokens.tolist()).decode(errors="replace")
        return "".join(self.characters[number] for number in tokens.tolist())


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
