"""A recurrent layer as a function: arguments to a Call, a Problem and a Plan, and the plan run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from whorl import compiled
from whorl.plan import plan
from whorl.problem import Call, Facts, Plan, autocast_is_on, constants, facts, kind_of, misfit, wants_gradient
from whorl.run import run

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def recurrent(
    form: str, call: Call, engine: str = "auto", sequences: bool = False, outputs: bool = True
) -> tuple[Tensor, ...]:
    """The output of every step, each final state, and with `sequences` each state of every step of the last layer.

    Args:
        form: the layer, as `Form.to_json` writes it.
        call: the tensors; under autocast x and weights are cast, states, masks and extra inputs are not.
        engine: "auto", or the engine that is to run and no other.
        outputs: the output of every step is wanted.

    Returns:
        y [time, batch, directions x width], or [rows, ...] of a PackedSequence, or where it is not wanted anything;
        then for each state of the cell [layers x directions, batch, width]; then for each state [time, batch,
        directions x width].

    Raises:
        UnsupportedError: the engine named cannot run this.
        SlowError: `settings.slow` forbids what can.
    """
    if not autocasts(call.x, *call.weights):
        return _recurrent(form, call, engine, sequences, outputs)
    kind = call.x.device.type
    call = _cast(call, torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        return _recurrent(form, call, engine, sequences, outputs)


def planned(
    form: str, call: Call, engine: str = "auto", sequences: bool = False, outputs: bool = True
) -> Plan:  # fmt: skip
    """The plan that `recurrent` would run; touches no data."""
    if autocasts(call.x, *call.weights):
        call = _cast(call, torch.get_autocast_dtype(call.x.device.type))
    return plan(form, _facts(call, sequences, outputs), engine)


def _recurrent(form: str, call: Call, engine: str, sequences: bool, outputs: bool) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return compiled.recurrent(call, form, engine, sequences)
    return run(plan(form, _facts(call, sequences, outputs), engine), call)


def _facts(call: Call, sequences: bool, outputs: bool = True) -> Facts:
    gradient = wants_gradient(call.tensors)
    outputs = outputs or torch.autograd.forward_ad._current_level >= 0  # each has a tangent
    return facts(call, gradient, sequences, constants(call) if gradient else (), outputs)


def _cast(call: Call, dtype: torch.dtype) -> Call:
    weights = tuple([weight.to(dtype) for weight in call.weights])
    dropout = tuple([mask.to(dtype) for mask in call.dropout])
    return call._replace(x=call.x.to(dtype), weights=weights, dropout=dropout)


def dropout_masks(x: Tensor, probability: float, width: int, count: int) -> tuple[Tensor, ...]:
    """What dropout multiplies with, `count` times in the layout of `x`, drawn as torch's own dropout draws on a CPU."""
    shape = (*x.shape[:-1], width)
    if probability == 1:
        return tuple(x.new_zeros(shape) for _ in range(count))
    return tuple(x.new_empty(shape).bernoulli_(1 - probability).div_(1 - probability) for _ in range(count))


def complaint(
    x: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    sizes: Tensor | None,
    who: str,
    inputs: int,
    rows: int,
    widths: dict[str, int],
    title: str = "the initial state",
    unbatched: bool = False,
) -> str | None:
    """What is wrong with a call and what to write instead, or None where it can run.

    Args:
        sizes: of a PackedSequence.
        who: the class that was called, for the message.
        inputs: the features that x must have.
        rows: layers x directions.
        widths: of each state, by name.
        title: what the states are, for the message.
        unbatched: the states have no batch axis.
    """
    shape = x.shape
    if len(shape) != (3 if sizes is None else 2):
        return f"x has {len(shape)} axes, {who} takes [time, batch, inputs] or unbatched [time, inputs]: reshape x."
    if shape[-1] != inputs:
        return (
            f"x has {shape[-1]} features in its last axis, this {who} was made for {inputs}: "
            f"pass input_size={shape[-1]} or reshape x."
        )
    if shape[0] == 0:
        return f"x has no steps, {who} takes 1 or more: leave empty sequences out."
    reason = None if sizes is None else misfit(sizes, shape[0])
    if reason is not None:
        return reason
    if x.device != weight.device:
        return f"x is on {x.device} and the weights of this {who} on {weight.device}: move one with .to()."
    if x.dtype != weight.dtype and not autocasts(x, weight):
        return f"x is {x.dtype} and the weights of this {who} are {weight.dtype}: write x.to({weight.dtype})."
    if not states:
        return None
    batch = _batch(x, sizes)
    for state, (name, width) in zip(states, widths.items(), strict=True):
        wanted = (rows, width) if unbatched else (rows, batch, width)
        known = batch is not None or state.dim() != 3 or (state.shape[0], state.shape[2]) != (rows, width)
        if state.shape != wanted and known:
            return f"{title} {name} has shape {tuple(state.shape)}, {who} takes {wanted} for this x."
        if state.device != x.device:
            return f"{title} {name} is on {state.device} and x on {x.device}: move one with .to()."
        if state.dtype != x.dtype and not autocasts(state, x):
            return f"{title} {name} is {state.dtype} and x {x.dtype}: write {name}.to({x.dtype})."
    return None


def _batch(x: Tensor, sizes: Tensor | None) -> int | None:
    """The batch, where it can be known: the sizes of a PackedSequence are data, which no compiled graph reads."""
    if sizes is None:
        return x.shape[1]
    return None if torch.compiler.is_compiling() else int(sizes[0])


def autocasts(*tensors: Tensor) -> bool:
    """Whether autocast is on and casts each of these: as in torch, it leaves float64 and what is not real alone."""
    return autocast_is_on(kind_of(tensors[0])) and all(tensor.dtype in _CAST for tensor in tensors)
