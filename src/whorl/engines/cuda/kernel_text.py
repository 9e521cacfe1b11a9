"""The files that sources of kernels are made of, and how words are put into them."""

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

_KERNELS = Path(__file__).parent / "kernels"
_MARK = "// @generated\n"


def texts() -> list[str]:
    """Every file that sources of kernels are made of."""
    return [text_of(path.name) for path in sorted(_KERNELS.glob("*.cu"))]


def kernel(name: str, words: Sequence[str]) -> str:
    """The source of a kernel, with words before it."""
    return text_of(name).replace(_MARK, "\n".join([*words, text_of("after.cu")]) + "\n", 1)


@cache
def text_of(name: str) -> str:
    """Of one of these files."""
    return (_KERNELS / name).read_text(encoding="utf-8")


def table(name: str, values: Iterable[int], meaning: str) -> str:
    """A function of an index that is folded by the compiler; -1 past its values."""
    found = "".join(f"index == {index} ? {int(value)} : " for index, value in enumerate(values))
    return f"__device__ constexpr int {name}(int index) {{ return {found}-1; }}  // {meaning}"
