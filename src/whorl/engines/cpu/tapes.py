"""The passes of a plain call as tapes, by which C++ makes them: when, and what they say."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.engines import taped
from whorl.engines.base import Continue, Grads
from whorl.engines.cpu import plain
from whorl.engines.cpu.memory import let_go
from whorl.engines.cpu.sweep import turned
from whorl.engines.tape import Tape, parts, slots, written_to
from whorl.problem import Call, Marks, Plan

_SOME, _OFTEN = 8, 64
"""Calls of a problem after which tapes are written, which stay; and after which what reads them is compiled, for 15
seconds."""


def number(plan: Plan, call: Call, by_python: Continue) -> int:
    """By which C++ knows the tapes of a plan; -1 where such a call goes through Python, or does until they are there.

    Numbers narrower than their sums are copied beside the kernels, and the states of resets come in no tape.
    """
    made = plain.sizes_of(plan.problem, call)
    if made is None or call.reset_to or made.wide != plan.problem.dtype:
        return -1
    made.known.calls += 1
    few = made.known.calls <= (_SOME if taped.is_there() else _OFTEN)
    if few or not taped.ready():
        return -1
    ways, numbers = tuple(map(turned, call.weights)), made.known.numbers
    if ways not in numbers:
        key = plan, made.threads, made.noise, made.kernel.cell, ways
        if key not in _numbers:
            where, written = taped.Where(threads=made.threads), _written(made, call, ways)
            _numbers[key] = taped.add(plan, written, where, ways, by_python, lambda device: -1, made)
            let_go()
        numbers[ways] = _numbers[key]
    return numbers[ways]


_numbers: dict[tuple[Plan, int, int, int, tuple[bool, ...]], int] = {}
"""For ever, where `Sizes` are made anew: by plan, threads, noise in the recurrent product, the compiled cell, and how
weights lie."""


def _written(made: plain.Sizes, call: Call, ways: Sequence[bool]) -> taped.Written:
    """The passes of calls like this one, written down."""
    ahead, back = Tape(), Tape()
    named, problem = _named(ahead, made, call, ways), made.problem
    with written_to(ahead):
        outcome = plain.forward(made, named)
    (room,) = slots(outcome.saved) or [-1]
    to: Grads = []
    if problem.gradient:
        again, shape = _named(back, made, call, ways), (*call.x.shape[:2], problem.form.units * problem.form.directions)
        y, kept = back.given(shape, problem.dtype), back.given((made.room,), torch.uint8)
        grads = [back.given(one, problem.dtype) for one in (shape, *problem.form.state_shapes(problem.batch))]
        with written_to(back):
            to = plain.backward(made, again, y, (kept,), grads)[: 1 + len(call.states) + len(call.weights)]
    masks = [mask.dtype if mask.dim() else None for mask in named.noise]
    return taped.Written(
        ahead, back, slots(outcome.outputs), room, parts(to), masks, sum(mark is not None for mark in call.marks)
    )


def _named(tape: Tape, made: plain.Sizes, call: Call, ways: Sequence[bool]) -> Call:
    """A call of names: the first slots of a tape."""

    def name(tensor: Tensor, way: bool = False) -> Any:
        return tape.given(tensor.shape, made.wide, way)

    x, states = name(call.x), tuple(map(name, call.states))
    weights = tuple(map(name, call.weights, ways))
    noise = tuple([name(mask) if mask.dim() else mask for mask in call.noise])
    marks = [None if mark is None else tape.given(mark.shape, mark.dtype) for mark in call.marks]
    return call._replace(x=x, states=states, weights=weights, noise=noise, marks=Marks(*marks))
