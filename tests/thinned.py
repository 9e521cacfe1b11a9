"""Fewer combinations of parameters, where each costs much: a kernel is compiled for it, or a program by XLA."""

from collections.abc import Iterable
from itertools import product
from typing import Any


def thinned(share: int, *values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Of all combinations each `share`-th, so that each value comes as often as the others of its kind.

    Of three kinds or more any two values come together, where each kind has `share` of them or more.

    >>> thinned(2, "ab", "xyz")
    [('a', 'x'), ('a', 'z'), ('b', 'y')]
    """
    places = product(*(enumerate(one) for one in values))
    return [tuple(value for _, value in row) for row in places if sum(place for place, _ in row) % share == 0]
