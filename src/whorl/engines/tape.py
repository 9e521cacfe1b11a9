"""What a pass asks of kernels, of cuBLAS and of torch's memory, written down once.

The passes of a plan differ in addresses alone.  So a pass is run on names in the place of tensors, and what it asks for
is written down: what is allocated and given back, each launch or call with its argument, each product.  Whoever has
the tensors of a call puts their addresses into it (`taped`), and needs no Python.
"""

import math
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch

ALLOCATE, FREE, CLEAR, LAUNCH, MULTIPLY, TIMES, MULTIPLY_EACH, ADD, COPY, BORROW, CALL = range(11)
"""What an entry of a tape begins with, as taped.cpp knows it."""
_NAME, _ITEM, _FAR = 1 << 62, 1 << 61, 44
"""The bit that makes a number the address of a name, that which makes it the number that lies there, and how many bits
there are for what lies behind its beginning."""


class Launched(Protocol):
    """A kernel of a GPU."""

    name: str
    function: int
    block: int
    shared: int
    layout: struct.Struct

    @property
    def attributes(self) -> Sequence[tuple[int, int]]: ...


class Slot:
    """What holds the memory of names: given back when none of them is left.

    Args:
        number: of the slot.
        size: bytes.
        given: a call brings it.
    """

    def __init__(self, tape: "Tape", number: int, size: int, given: bool) -> None:
        self.tape, self.number, self.size, self.given = tape, number, size, given

    def __del__(self) -> None:
        if not self.given and self.tape.open:
            self.tape.entries.append([FREE, self.number])


class Named:
    """What stands for a tensor in one piece while a pass is written down: of a slot, from so many bytes on."""

    _turned = False
    """A matrix that lies the other way round."""

    def __init__(self, slot: Slot, at: int, shape: Sequence[int], dtype: torch.dtype, columns: int = 0) -> None:
        self._slot, self._at, self.shape, self.dtype = slot, at, tuple(shape), dtype
        self._columns = columns or self.shape[-1] if self.shape else 0
        """Of which its own are the first, from one of its rows to the next."""

    @property
    def number(self) -> int:
        return self._slot.number

    @property
    def part(self) -> "Part":
        if not self.is_contiguous():
            return self.number, 0, 0, self.shape[-1]
        whole = self._slot.size == self.numel() * self.element_size()
        return (self.number, 0, 0, 0) if whole else (self.number, self._at // self.element_size(), self.numel(), 0)

    def data_ptr(self) -> int:
        return (_NAME | self.number << _FAR) + self._at

    def __int__(self) -> int:
        """What stands for the number that it is."""
        return self.data_ptr() | _ITEM

    def is_given(self) -> bool:
        """A whole tensor that a call brings, which may lie otherwise than its name does."""
        return self._slot.given and not self._at

    def element_size(self) -> int:
        return self.dtype.itemsize

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> "Named":
        assert self.is_contiguous(), "nothing copies it"
        return self

    def is_contiguous(self) -> bool:
        return not self._turned and (not self.shape or self._columns == self.shape[-1])

    def stride(self, axis: int | None = None) -> Any:
        if self._turned:
            return 1, self.shape[0]
        found = [1, self._columns][: self.dim()]
        for size in self.shape[-2:0:-1]:
            found.append(found[-1] * size)
        return tuple(reversed(found)) if axis is None else found[-1 - axis]

    def to(self, dtype: torch.dtype) -> "Named":
        assert dtype is self.dtype, "who brings it has made it so"
        return self

    def expand(self, *shape: int) -> "Named":
        assert shape == self.shape, "who brings it has made it so"
        return self

    def view(self, how: "torch.dtype | Sequence[int]") -> "Named":
        """The same bytes in another dtype, or in another shape."""
        if isinstance(how, torch.dtype):
            return Named(self._slot, self._at, (self.numel() * self.element_size() // how.itemsize,), how)
        return Named(self._slot, self._at, how, self.dtype)

    def narrow(self, axis: int, first: int, count: int) -> "Named":
        """The first columns."""
        assert (axis, first) == (-1, 0), "nothing else is asked for"
        return Named(self._slot, self._at, (*self.shape[:-1], count), self.dtype, self._columns)

    def __getitem__(self, rows: "int | slice") -> "Named":
        assert self.is_contiguous(), "rows lie one after another"
        first, count = (rows, None) if isinstance(rows, int) else (rows.start or 0, rows.stop - (rows.start or 0))
        each = math.prod(self.shape[1:]) * self.element_size()
        shape = self.shape[1:] if count is None else (count, *self.shape[1:])
        return Named(self._slot, self._at + first * each, shape, self.dtype)

    def unsafe_split(self, size: int) -> "list[Named]":
        return [self[first : first + size] for first in range(0, self.shape[0], size)]

    def zero_(self) -> None:
        self._slot.tape.entries.append([CLEAR, self.number])

    def __mul__(self, other: "Named") -> "Named":
        made = self._slot.tape.empty(self.shape, None, self.dtype)
        self._slot.tape.times(self, other, made)
        return made

    def __iadd__(self, other: "Named") -> "Named":
        self._slot.tape.change(ADD, self, other)
        return self

    def copy_(self, other: "Named") -> None:
        self._slot.tape.change(COPY, self, other)

    def __imul__(self, other: "Named") -> "Named":
        self._slot.tape.times(self, other, self)
        return self


def slots(tensors: Sequence[Any]) -> list[int]:
    """Of names; -1 for None."""
    return [-1 if one is None else one.number for one in tensors]


Part = tuple[int, int, int, int]
"""Of a slot: its number, the first element and how many, 0 of all, or its first columns; slot -1 of nothing."""


def parts(tensors: Sequence[Any]) -> list[Part]:
    """What names stand for; several may be parts of one slot."""
    return [(-1, 0, 0, 0) if one is None else one.part for one in tensors]


class Tape:
    """A pass written down: `entries`, each a row of whole numbers, about so many slots."""

    def __init__(self) -> None:
        self.entries: list[list[int]] = []
        self.slots, self.open = 0, False
        self.names: list[str] = []
        """Of the kernels that are launched, for errors."""

    def given(self, shape: Sequence[int], dtype: torch.dtype, turned: bool = False) -> Any:
        """A name for a tensor that a call brings."""
        made = Named(self._slot(shape, dtype, given=True), 0, shape, dtype)
        made._turned = turned
        return made

    def empty(
        self, shape: Sequence[int], steps: Sequence[int] | None, dtype: torch.dtype, borrowed: bool = False
    ) -> Any:  # fmt: skip
        """A name for new memory.

        Args:
            steps: as `torch.empty_strided` has them; None in one piece.
            borrowed: of the host, and no caller sees it.
        """
        slot = self._slot(shape, dtype, given=False)
        if steps is None:
            steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self.entries.append([BORROW if borrowed else ALLOCATE, slot.number, scalar(dtype), len(shape), *shape, *steps])
        return Named(slot, 0, shape, dtype)

    def _slot(self, shape: Sequence[int], dtype: torch.dtype, given: bool) -> Slot:
        self.slots += 1
        return Slot(self, self.slots - 1, math.prod(shape) * dtype.itemsize, given)

    def times(self, one: Named, other: Named, into: Named) -> None:
        """One by one, of as many elements."""
        places = [number for each in (one, other, into) for number in _place(each.data_ptr())]
        self.entries.append([TIMES, scalar(one.dtype), one.numel(), *places])

    def change(self, kind: int, one: Named, other: Named) -> None:
        """Add to one as many elements of another, or copy them into it."""
        sides = [number for each in (one, other) for number in (scalar(each.dtype), *_place(each.data_ptr()))]
        self.entries.append([kind, one.numel(), *sides])

    def launch(self, kernel: Launched, grid: int, second: int, values: Sequence[Any]) -> None:
        packed = kernel.layout.pack(*values)
        packed += bytes(-len(packed) % 8)
        words = struct.unpack(f"{len(packed) // 8}q", packed)
        places = zip(offsets(kernel.layout.format), values, strict=True)
        pointers = [(at, *_place(value)) for at, value in places if isinstance(value, int) and value & _NAME]
        attributes = [number for pair in kernel.attributes for number in pair]
        self.names.append(kernel.name)
        self.entries.append([
            LAUNCH, len(self.names) - 1, kernel.function, grid, second, kernel.block, kernel.shared,
            len(kernel.attributes), *attributes,
            len(words), *words, len(pointers), *(number for pointer in pointers for number in pointer),
        ])  # fmt: skip

    def call(
        self, function: int, first: int, argument: bytes, threads: int, apart: Sequence[tuple[int, Any]] = ()
    ) -> None:  # fmt: skip
        """A call of a function of C, which gives 0 or how many bytes it lacks.

        Args:
            function: its address.
            first: its first argument; the last are `argument`, by its address, and `threads`.
            argument: words of 8 bytes.
            apart: words whose two next say how far the steps and sequences of a tensor are apart, and the tensor.
        """
        words = struct.unpack(f"{len(argument) // 8}q", argument)
        items = [(at, *_place(word ^ _ITEM)[:1]) for at, word in enumerate(words) if word & _NAME and word & _ITEM]
        pointers = [(at, *_place(word)) for at, word in enumerate(words) if word & _NAME and not word & _ITEM]
        steps = [(at, one.number) for at, one in apart if one is not None and one.is_given()]
        row = [CALL, function, first, threads]
        for numbers in (words, *([n for group in groups for n in group] for groups in (pointers, steps, items))):
            row += [len(numbers), *numbers]
        self.entries.append(row)

    def multiply(self, given: Sequence[Any]) -> None:
        """A product, of which this is all that cublasGemmEx takes but its handle."""
        self.entries.append([MULTIPLY, *_row(given, _MATRICES)])

    def multiply_each(self, given: Sequence[Any]) -> None:
        """Products in one launch, of which this is all that cublasGemmStridedBatchedEx takes but its handle."""
        self.entries.append([MULTIPLY_EACH, *_row(given, _MATRICES_OF_EACH)])

    def written(self) -> list[int]:
        """All of it in one row: how many slots, then of each entry how long it is, and the entry."""
        return [self.slots, *(number for entry in self.entries for number in (len(entry), *entry))]


_MATRICES, _MATRICES_OF_EACH = (6, 9, 13), (6, 10, 15)  # among what cuBLAS takes, its handle left out


def _row(given: Sequence[Any], matrices: Sequence[int]) -> list[int]:
    """What a function of C takes, in whole numbers: of addresses in these places slot and offset."""
    numbers = [getattr(one, "value", one) for one in given]
    places = [_place(number) if at in matrices else (number,) for at, number in enumerate(numbers)]
    return [number for place in places for number in place]


def _place(address: int) -> tuple[int, int]:
    """Slot and offset; slot -1 for no address."""
    return (address ^ _NAME) >> _FAR if address & _NAME else -1, address & (1 << _FAR) - 1


@lru_cache(maxsize=64)
def offsets(layout: str) -> tuple[int, ...]:
    """Where the values that `struct` writes by a layout begin."""
    found: list[int] = []
    before = ""
    for count, kind in re.findall(r"(\d*)([a-zA-Z?])", layout):
        for each in [f"{count}s"] if kind == "s" else [kind] * int(count or 1):
            before += each
            if kind != "x":  # of padding there is no value
                found.append(struct.calcsize(before) - struct.calcsize(each))
    return tuple(found)


@lru_cache(maxsize=16)
def scalar(dtype: torch.dtype) -> int:
    """torch's number of a dtype in C++."""
    others = {torch.uint8: 0, torch.int16: 2, torch.int64: 4, torch.float64: 7, torch.bool: 11}
    return (others | {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15})[dtype]


class _Writing(threading.local):
    tape: Tape | None = None


writing = _Writing()
"""Of this thread: the tape to which launches, products and allocations go, in the place of being made."""


@contextmanager
def written_to(tape: Tape) -> Iterator[None]:
    """What this thread asks for in the block goes to a tape."""
    before, writing.tape, tape.open = writing.tape, tape, True
    try:
        yield
    finally:
        writing.tape, tape.open = before, False
