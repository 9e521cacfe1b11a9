"""A sweep over a sequence as Keras means it, by whorl's engines: torch tensors in, torch tensors out.

Plain values say what is to be done, and tensors lie as Keras lays them out: so the same sweep serves the torch backend
directly and other backends through a callback.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.errors import InputError
from whorl.functional import planned, recurrent
from whorl.problem import Call, Form, Plan
from whorl.weights import from_keras, reordered


class Part(NamedTuple):
    """One cell of a sweep, as plain values."""

    kind: str
    """The class of Keras whose weights it has: "LSTM", "GRU", "SimpleRNN", or "Cell" for whorl's own."""
    form: str
    """As `Form.to_json` writes it."""
    engine: str = "auto"


class Tensors(NamedTuple):
    """The tensors of one cell."""

    weights: tuple[Tensor, ...]
    """kernel, recurrent_kernel, bias; what of them it has."""
    states: tuple[Tensor, ...]
    """Initial states, [batch, units] each."""
    input_masks: tuple[Tensor, ...] = ()
    """[batch, inputs]: none, one, or one for each gate in Keras' order; what dropout multiplies its input with."""
    recurrent_masks: tuple[Tensor, ...] = ()
    """[batch, units], likewise; of what enters the recurrent product."""


class Swept(NamedTuple):
    last: Tensor
    """[batch, units]: the output of the step that was processed last."""
    outputs: Tensor
    """[batch, time, units], in the order of processing."""
    states: tuple[tuple[Tensor, ...], ...]
    """Of each cell after the last step, [batch, units] each."""


noted: ContextVar[list[Plan] | None] = ContextVar("noted", default=None)
"""Where it holds a list, each call adds its plan to it."""


def sweep(
    parts: Sequence[Part],
    x: Tensor,
    tensors: Sequence[Tensors],
    mask: Tensor | None = None,
    go_backwards: bool = False,
    zero_output: bool = False,
) -> Swept:
    """Cells one upon the other over a whole sequence.

    Args:
        x: [batch, time, inputs].
        mask: [batch, time], true where a step counts: elsewhere states hold, and the output is the last one before.
        go_backwards: from the last step to the first; outputs stay in that order.
        zero_output: where a step does not count the output is zero instead.
    """
    _check(parts[0], x, tensors[0], mask)
    if x.is_meta:
        return _shapes(parts, x)
    y, valid = x.transpose(0, 1), None
    if mask is not None:
        valid = mask.to(torch.bool).t()
    if go_backwards:
        y, valid = y.flip(0), None if valid is None else valid.flip(0)
    states = []
    for part, own in zip(parts, tensors, strict=True):
        call = _call(part, y, own, valid)
        notes = noted.get()
        if notes is not None:
            notes.append(planned(part.form, call, part.engine))
        y, *finals = recurrent(part.form, call, part.engine)
        states.append(tuple([final[0] for final in finals]))
    if zero_output and valid is not None:
        y = torch.where(valid.unsqueeze(-1), y, 0.0)
    return Swept(y[-1], y.transpose(0, 1), tuple(states))


def _check(part: Part, x: Tensor, own: Tensors, mask: Tensor | None) -> None:
    """
    Raises:
        InputError: what does not fit the cell; an engine would read beside it.
    """
    batch, time, inputs = x.shape
    form = Form.from_json(part.form)
    if inputs != form.inputs:
        raise InputError(
            f"x has {inputs} features in its last axis, this {part.kind} was built for {form.inputs}: build another."
        )
    for place, state in enumerate(own.states):
        if state.shape != (batch, form.units):
            wanted = (batch, form.units)
            raise InputError(f"initial state {place} has shape {tuple(state.shape)}, this {part.kind} takes {wanted}.")
    if mask is not None and mask.shape != (batch, time):
        raise InputError(f"the mask has shape {tuple(mask.shape)}, this {part.kind} takes {(batch, time)} for this x.")


def _call(part: Part, x: Tensor, own: Tensors, valid: Tensor | None) -> Call:
    call = Call(x, tuple([state.unsqueeze(0) for state in own.states]), _weights(part.kind, own.weights))
    if valid is not None:
        call = call._replace(marks=call.marks._replace(mask=valid))
    if own.input_masks or own.recurrent_masks:
        absent = x.new_empty(())
        masks = [_by_gate(part.kind, masks, absent) for masks in (own.input_masks, own.recurrent_masks)]
        call = call._replace(noise=(*masks, *[absent] * len(own.states)))
    return call


def _weights(kind: str, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return from_keras(kind, *given)


def _by_gate(kind: str, masks: tuple[Tensor, ...], absent: Tensor) -> Tensor:
    if not masks:
        return absent
    return masks[0] if len(masks) == 1 else torch.stack(reordered(kind, masks))


def _shapes(parts: Sequence[Part], x: Tensor) -> Swept:
    """Tensors without data, of the shapes that come out: what Keras asks for where a model is put together."""
    units = [Form.from_json(part.form).units for part in parts]
    outputs = x.new_empty((*x.shape[:2], units[-1]))
    counts = [len(Form.from_json(part.form).cell.states) for part in parts]
    states = [tuple([x.new_empty((x.shape[0], width))] * count) for width, count in zip(units, counts, strict=True)]
    return Swept(outputs[:, -1], outputs, tuple(states))
