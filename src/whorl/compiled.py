"""The operation as two torch operators, for torch.compile and export.

They carry the layer as text, so that compile caches and exported programs outlive the process, and make problem and
plan inside, from real sizes.  What backward reads is a fixed number of byte tensors of sizes known only at run time;
the last of them is as long as the place of the engine in `ENGINES`, which is how backward knows who saved them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

from whorl.engines import ENGINES
from whorl.errors import InputError
from whorl.plan import announce, plan
from whorl.problem import PLAIN, Call, Facts, Form, Plan, facts, misfit, problem, slots
from whorl.run import backward, forward

# Graphs that call these lie in torch's caches on disk: a schema that changes takes the next number into its name.
_library = torch.library.Library("whorl", "DEF")
_library.define(
    "recurrent_3(Tensor[] tensors, Tensor?[] marks, int[] layout, str form, str engine, bool sequences, bool gradient,"
    " str constants) -> (Tensor, Tensor[], Tensor[])"
)
_library.define(
    "recurrent_backward_3(Tensor?[] grads, Tensor[] tensors, Tensor?[] marks, int[] layout, Tensor y, Tensor[] saved,"
    " str form, bool sequences, str constants) -> Tensor[]"
)


def recurrent(call: Call, form: str, engine: str, sequences: bool) -> tuple[Tensor, ...]:
    """What `run` gives; what a compiled graph holds."""
    gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)
    parts = {"x": (call.x,), "dropout": call.dropout, "noise": call.noise}
    constant = [name for name, part in parts.items() if part and not any(tensor.requires_grad for tensor in part)]
    constants = " ".join(constant) if gradient else ""
    y, rest, _ = torch.ops.whorl.recurrent_3(
        call.tensors, list(call.marks), call.layout, form, engine, sequences, gradient, constants
    )
    return (y, *rest)


@torch._disable_dynamo
def _forward(
    tensors: list[Tensor],
    marks: list[Tensor | None],
    layout: list[int],
    form: str,
    engine: str,
    sequences: bool,
    gradient: bool,
    constants: str,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    call = Call.of(tensors, layout, marks)
    reason = None if call.batch_sizes is None else misfit(call.batch_sizes, call.x.shape[0])
    if reason is not None:  # the graph was made without looking at them
        raise InputError(reason)
    made = plan(form, facts(call, gradient, sequences, tuple(constants.split())), engine)
    if made.slow:
        announce(made)
    with torch.no_grad():  # an operator's gradient is registered below, never recorded inside
        outcome = forward(made, call)
    y, *rest = [output.contiguous() for output in outcome.outputs]
    if not gradient:
        return y, rest, []
    mark = call.x.new_empty(list(ENGINES).index(made.engine), dtype=torch.uint8)
    free = slots(made.problem.form) - len(outcome.saved)
    empty = [call.x.new_empty(0, dtype=torch.uint8) for _ in range(free)]
    return y, rest, [*outcome.saved, *empty, mark]


def _forward_fake(
    tensors: list[Tensor],
    marks: list[Tensor | None],
    layout: list[int],
    form: str,
    engine: str,
    sequences: bool,
    gradient: bool,
    constants: str,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    call, known = Call.of(tensors, layout, marks), Form.from_json(form)
    x = call.x
    rows, states = known.layers * known.directions, range(len(known.cell.states))
    shapes = torch.library.get_ctx()._shape_env
    assert shapes is not None, "sizes known only at run time need torch.compile's or torch.export's fake tensors"

    def size() -> torch.SymInt:
        # new_dynamic_size would break the graph unless fullgraph=True: a default meant for sizes that users read.
        return allocate_size(shapes)

    batch = x.shape[1] if call.batch_sizes is None else call.states[0].shape[1] if call.states else size()
    y = x.new_empty(*x.shape[:-1], known.width * known.directions)
    rest = [x.new_empty(rows, batch, known.state_width(index)) for index in states]
    if sequences:
        rest += [x.new_empty(*x.shape[:-1], known.state_width(index) * known.directions) for index in states]
    count = slots(known) + 1 if gradient else 0
    return y, rest, [x.new_empty(size(), dtype=torch.uint8) for _ in range(count)]


@torch._disable_dynamo
def _backward(
    grads: list[Tensor | None],
    tensors: list[Tensor],
    marks: list[Tensor | None],
    layout: list[int],
    y: Tensor,
    saved: list[Tensor],
    form: str,
    sequences: bool,
    constants: str,
) -> list[Tensor]:
    call, constant = Call.of(tensors, layout, marks), _constant(layout, len(tensors), constants)
    known = facts(call, True, sequences, tuple(constants.split()))
    made = _planned(form, known, list(ENGINES)[saved[-1].numel()])
    found = backward(made, call, y, saved[:-1], grads)
    return [
        tensor.new_empty(0)
        if place in constant
        else torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if grad is None
        else grad.to(tensor.dtype).contiguous()
        for place, (grad, tensor) in enumerate(zip(found, call.tensors, strict=True))
    ]


def _constant(layout: Sequence[int], count: int, constants: str) -> set[int]:
    """Which of a call's tensors have no gradient.

    Args:
        count: of all.
        constants: as `Problem.constants` names them, in one text.
    """
    places: Any = Call.of(range(count), layout, PLAIN)  # type: ignore[arg-type]
    parts = {"x": (places.x,), "dropout": places.dropout, "noise": places.noise}
    return {place for name in constants.split() for place in parts[name]}


@lru_cache(maxsize=8192)
def _planned(form: str, known: Facts, engine: str) -> Plan:
    """The plan of a backward pass, one object as long as it is kept: engines keep what they made ready for it."""
    return Plan(problem(form, known), engine)


def _backward_fake(
    grads: Any, tensors: list[Tensor], marks: Any, layout: list[int], y: Any, saved: Any, form: str, sequences: bool,
    constants: str,
) -> list[Tensor]:  # fmt: skip
    constant = _constant(layout, len(tensors), constants)
    return [tensor.new_empty(0 if place in constant else tensor.shape) for place, tensor in enumerate(tensors)]


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, marks, ctx.layout, ctx.form, _, ctx.sequences, _, ctx.constants = inputs
    y, _, saved = output
    ctx.present = [mark is not None for mark in marks]
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *(mark for mark in marks if mark is not None), y, *saved)


def _differentiate(ctx: Any, grad_y: Tensor | None, grad_rest: Sequence[Tensor | None], grad_saved: Any) -> tuple:
    row = iter(ctx.saved_tensors)
    tensors = [next(row) for _ in range(ctx.count)]
    marks = [next(row) if present else None for present in ctx.present]
    y, *saved = row
    found = torch.ops.whorl.recurrent_backward_3(
        [grad_y, *grad_rest], tensors, marks, ctx.layout, y, saved, ctx.form, ctx.sequences, ctx.constants
    )
    constant = _constant(ctx.layout, ctx.count, ctx.constants)
    grads = [None if place in constant else grad for place, grad in enumerate(found)]
    return grads, None, None, None, None, None, None, None


for _name, _function, _fake in (
    ("recurrent_3", _forward, _forward_fake),
    ("recurrent_backward_3", _backward, _backward_fake),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"whorl::{_name}", _fake, lib=_library)
torch.library.register_autograd("whorl::recurrent_3", _differentiate, setup_context=_setup, lib=_library)
