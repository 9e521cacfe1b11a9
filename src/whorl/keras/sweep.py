"""A sweep over a sequence as Keras means it, by whorl's engines: torch tensors in, torch tensors out.

Plain values say what is to be done, and tensors lie as Keras lays them out: so the same sweep serves the torch backend
directly and other backends through a callback.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.errors import InputError, UnsupportedError
from whorl.functional import planned, recurrent
from whorl.problem import Call, Form, Plan
from whorl.weights import NATIVE_MODES, from_keras, reordered


class Part(NamedTuple):
    """One cell of a sweep, as plain values."""

    kind: str
    """The class of Keras whose weights it has: "LSTM", "GRU", "SimpleRNN", or "Cell" for whorl's own."""
    form: str
    """As `Form.to_json` writes it, of one direction."""
    two_ways: str
    """The same of both."""
    engine: str
    inputs: int
    units: int
    states: int


class Tensors(NamedTuple):
    """The tensors of one cell."""

    weights: tuple[Tensor, ...]
    """kernel, recurrent_kernel, bias; what of them it has.  Of a "Cell" also its recurrent bias and its vectors."""
    states: tuple[Tensor, ...]
    """Initial states, [batch, units] each; or none where they are zero."""
    input_masks: tuple[Tensor, ...] = ()
    """[batch, inputs]: none, one, or one for each gate in Keras' order; what dropout multiplies its input with.

    On torch also one tensor [gates, batch, inputs] in the cell's order.
    """
    recurrent_masks: tuple[Tensor, ...] = ()
    """[batch, units], likewise; of what enters the recurrent product."""
    seed: Tensor | None = None
    """An integer: what zoneout is drawn from; None where nothing is drawn."""


def part(kind: str, form: Form, engine: str) -> Part:
    """The plain values of a cell, as a layer of one direction."""
    both = replace(form, directions=2)
    return Part(kind, form.to_json(), both.to_json(), engine, form.inputs, form.units, len(form.cell.states))


class Swept(NamedTuple):
    last: Tensor
    """[batch, units]: the output of the step that was processed last."""
    outputs: Tensor
    """[batch, time, units], in the order of processing; where those of all steps are not wanted [batch, 1, units]."""
    states: tuple[tuple[Tensor, ...], ...]
    """Of each cell after the last step, [batch, units] each."""


def sweep(
    parts: Sequence[Part],
    x: Tensor,
    tensors: Sequence[Tensors],
    mask: Tensor | None = None,
    go_backwards: bool = False,
    zero_output: bool = False,
    sequences: bool = True,
    notes: list[Plan] | None = None,
) -> Swept:
    """Cells one upon the other over a whole sequence.

    Args:
        x: [batch, time, inputs].
        mask: [batch, time], true where a step counts: elsewhere states hold, and the output is the last one before.
        go_backwards: from the last step to the first; outputs stay in that order.
        zero_output: where a step does not count the output is zero instead.
        sequences: the outputs of all steps are wanted.
        notes: gets the plan of each cell, where it is given.
    """
    for place, (cell, own) in enumerate(zip(parts, tensors, strict=True)):
        check(cell, x, own, mask, first=place == 0)
    if x.is_meta:
        return _shapes(parts, x, sequences)
    y, valid = _by_time(x), None
    if mask is not None:
        valid = mask.to(torch.bool).t()
    if go_backwards:
        y, valid = y.flip(0), None if valid is None else valid.flip(0)
    states = []
    for above, (cell, own) in enumerate(zip(parts, tensors, strict=True), 1):
        y = y.to(own.weights[0].dtype)  # cells may compute in different ones
        y, finals = _run(cell, cell.form, y, [own], valid, notes, sequences or above < len(parts))
        states.append(tuple([final.squeeze(0) for final in finals]))  # whose gradient is one more look, not a copy
    initial = bool(tensors[-1].states)
    return swept(y, tuple(states), valid, -1, zero_output, sequences, initial, torch.where)


def both_ways(
    cell: Part,
    x: Tensor,
    forward: Tensors,
    backward: Tensors,
    mask: Tensor | None = None,
    zero_output: bool = False,
    sequences: bool = True,
    notes: list[Plan] | None = None,
) -> tuple[Swept, Swept]:
    """A cell over a sequence in both directions at once, which an engine may run side by side.

    Returns:
        What `sweep` gives forwards, and backwards; here the outputs of both are in the order of time.
    """
    for own in (forward, backward):
        check(cell, x, own, mask)
    if x.is_meta:
        return _shapes([cell], x, sequences), _shapes([cell], x, sequences)
    valid = None if mask is None else mask.to(torch.bool).t()
    x = _by_time(x)
    y, finals = _run(cell, cell.two_ways, x, [forward, backward], valid, notes, sequences)
    there, back = y.chunk(2, -1)
    ends = [(tuple([final[direction] for final in finals]),) for direction in (0, 1)]
    rest = zero_output, sequences, bool(forward.states or backward.states), torch.where
    return swept(there, ends[0], valid, -1, *rest), swept(back, ends[1], valid, 0, *rest)


def _by_time(x: Tensor) -> Tensor:
    """[time, batch, inputs] of [batch, time, inputs].

    On a GPU with gradients it is copied here once, else in forward and backward; engine `cpu` reads it as it lies.
    """
    x = x.transpose(0, 1)
    return x.contiguous() if torch.is_grad_enabled() and not x.is_cpu else x


def swept(
    y: Any, states: tuple[tuple[Any, ...], ...], valid: Any, at: int, zero_output: bool, sequences: bool,
    initial: bool, where: Callable[..., Any],
) -> Swept:  # fmt: skip
    """What a sweep gives, of the outputs [time, batch, units], of which that of step `at` was processed last.

    That one is the first state, or zero: its gradient goes there, where from the outputs it would come with zeros for
    all other steps.  Where no step counts that state is the initial one, which is zero where none is given.

    Args:
        where: of the library whose arrays these are.
    """
    last = states[-1][0]
    if valid is not None and (zero_output or initial):
        counts = valid[at] if zero_output else valid.any(0)
        last = where(counts[:, None], last, 0.0)
    if not sequences:
        return Swept(last, last[:, None], states)
    if zero_output and valid is not None:
        y = where(valid[..., None], y, 0.0)
    return Swept(last, y.swapaxes(0, 1), states)


def _run(
    cell: Part, form: str, x: Tensor, directions: Sequence[Tensors], valid: Tensor | None, notes: list[Plan] | None,
    outputs: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Outputs [time, batch, directions x units] where they are wanted, and final states [directions, batch, units]."""
    states = tuple([_joined(state) for state in zip(*(own.states for own in directions), strict=True)])
    weights = tuple([weight for own in directions for weight in _weights(cell.kind, own.weights)])
    call = Call(x, states, weights)
    seed = directions[0].seed
    if valid is not None or seed is not None:
        seed = None if seed is None else seed.to(torch.int64)
        call = call._replace(marks=call.marks._replace(mask=valid, seed=seed))
    if any(own.input_masks or own.recurrent_masks for own in directions):
        absent = x.new_empty(())
        masks = [(own.input_masks, own.recurrent_masks) for own in directions]
        rows = [[_by_gate(cell.kind, one, absent) for one in row] + [absent] * cell.states for row in masks]
        call = call._replace(noise=tuple([mask for row in rows for mask in row]))
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return _exported(form, call)
    if notes is not None:
        notes.append(planned(form, call, cell.engine))
    y, *finals = recurrent(form, call, cell.engine, outputs=outputs)
    return y, finals


def _joined(state: Sequence[Tensor]) -> Tensor:
    """[directions, batch, units] of one state; of a single direction it is only looked at in another way."""
    return state[0].unsqueeze(0) if len(state) == 1 else torch.stack(list(state))


_OPERATORS: dict[int, Any] = {0: torch._VF.rnn_relu, 1: torch._VF.rnn_tanh, 2: torch._VF.lstm, 3: torch._VF.gru}
"""Torch's own operators by the numbers of `NATIVE_MODES`: what an export keeps as one node, for any length."""


def _exported(form: str, call: Call) -> tuple[Tensor, list[Tensor]]:
    """What a trace or an export records of a sweep: torch's own operator, else every step of the example.

    Raises:
        UnsupportedError: steps that would be those of an example of one step, which is how Keras shows an open length.
    """
    made = Form.from_json(form)
    mode = NATIVE_MODES.get(made.cell.fingerprint)
    if mode is None or call.marks.mask is not None or call.marks.seed is not None or call.noise:
        if int(call.x.shape[0]) == 1:
            raise UnsupportedError(
                f"an export of {made.cell.name} with this call writes out every step, and the length is open: give the "
                "model a fixed one, keras.Input((time, features)). Plain LSTM, GRU and SimpleRNN without a mask stay "
                "one operator, of any length."
            )
        y, *finals = recurrent(form, call, "reference")
        return y, finals
    states = call.states if len(call.states) > 1 else call.states[0]
    weights = list(call.weights)
    y, *finals = _OPERATORS[mode](call.x, states, weights, made.bias, 1, 0.0, False, made.directions == 2, False)
    return y, finals


def check(cell: Part, x: Tensor, own: Tensors, mask: Tensor | None, first: bool = True) -> None:
    """
    Args:
        first: this cell is the one that reads x.

    Raises:
        InputError: what does not fit the cell; an engine would read beside it.
    """
    batch, time, inputs = x.shape
    if first and inputs != cell.inputs:
        raise InputError(
            f"x has {inputs} features in its last axis, this {cell.kind} was built for {cell.inputs}: build another."
        )
    check_steps(cell.kind, x)
    if own.states:
        check_states(cell.kind, cell.states, own.states)
    for place, state in enumerate(own.states):
        if state.shape != (batch, cell.units):
            wanted = (batch, cell.units)
            raise InputError(f"initial state {place} has shape {tuple(state.shape)}, this {cell.kind} takes {wanted}.")
    if mask is not None and mask.shape != (batch, time):
        raise InputError(f"the mask has shape {tuple(mask.shape)}, this {cell.kind} takes {(batch, time)} for this x.")


def check_steps(kind: str, x: Any) -> None:
    """
    Args:
        x: [batch, time, inputs]; in an export time may be open.

    Raises:
        InputError: there are none.
    """
    if isinstance(x.shape[1], int) and x.shape[1] == 0:
        raise InputError(f"x has no steps, this {kind} takes 1 or more: leave empty sequences out.")


def check_states(kind: str, count: int, states: Sequence[Any]) -> None:
    """
    Raises:
        InputError: there are not as many; an engine would take others for zero, or read beside them.
    """
    if len(states) != count:
        many = f"{len(states)} tensor{'s' * (len(states) != 1)}"
        raise InputError(f"initial_state has {many}, this {kind} takes {count} (both directions twice as many).")


def _weights(kind: str, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if kind == "Cell":
        return tuple([weight.t() if weight.dim() == 2 else weight for weight in given])
    return from_keras(kind, *given)


def _by_gate(kind: str, masks: tuple[Tensor, ...], absent: Tensor) -> Tensor:
    if not masks:
        return absent
    return masks[0] if len(masks) == 1 else torch.stack(reordered(kind, masks))


def _shapes(parts: Sequence[Part], x: Tensor, sequences: bool) -> Swept:
    """Tensors without data, of the shapes that come out: what Keras asks for where a model is put together."""
    outputs = x.new_empty((x.shape[0], x.shape[1] if sequences else 1, parts[-1].units))
    states = [tuple([x.new_empty((x.shape[0], cell.units))] * cell.states) for cell in parts]
    return Swept(outputs[:, -1], outputs, tuple(states))
