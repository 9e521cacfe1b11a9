"""The options of a call: checked, and brought into the order of a Call."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from whorl.errors import InputError
from whorl.problem import PLAIN, Marks, is_virtual

# What each takes and means, for the page of all options; where a shape begins with [time, batch] it is that of x:
# [batch, time] with batch_first, [time] unbatched, a PackedSequence for a PackedSequence.
MEANINGS = {
    "lengths": (
        "int [batch]",
        "The steps of each sequence, in any order, on any device, 0 allowed. Outputs past the end are zero, final "
        "states are those of the last step, and hx for length 0. Longer than time is an error on a CPU; on a GPU, "
        "where looking would wait for it, and under torch.compile and torch.func, it is cut to time. Not with a "
        "PackedSequence.",
    ),
    "mask": (
        "bool [time, batch]",
        "False where a step does not count: states hold, and the output is the last valid one in processing order, "
        "zero before the first. Not with a PackedSequence.",
    ),
    "reset": (
        "bool [time, batch]",
        "True where a new sequence begins: the state before step t is zero, and no gradient crosses from t - 1, in "
        "both directions. At t = 0 it overrides hx; it acts where the mask is False too, and not past `lengths`.",
    ),
    "reset_to": ("as hx", "The state that a reset gives, in the place of zero."),
    "inputs": (
        "{name: [time, batch, units or 1]}",
        "What a cell reads at each step beside x; a tensor where it reads one. All layers and directions read it.",
    ),
    "dropout_masks": (
        "{name: masks}",
        "Masks in the place of those that would be drawn, in eval too: one for each layer and direction in a list, or "
        "a tensor where there is one. `dropout` (a list for all layers but the last) in the layout of the output; "
        "`input_dropout` [batch, inputs] or [gates, batch, inputs]; `recurrent_dropout` [gates, batch, width], "
        "[batch, width] or [time, batch, width], as its mode has it; `weight_drop` as weight_hh; `zoneout_h`, "
        "`zoneout_c`, ... [time, batch, width], 1 where a unit keeps its value.",
    ),
    "return_states": (
        "True",
        "Also gives {state: [time, batch, directions x width]}: each state after each step of the last layer, in the "
        "layout of x, zero past `lengths`.",
    ),
}


class Extras(NamedTuple):
    """The options of a call, as its user gave them."""

    lengths: Any = None
    mask: Any = None
    reset: Any = None
    reset_to: Any = None
    inputs: Any = None
    dropout_masks: Any = None


NOTHING = Extras()


class Axes(NamedTuple):
    """How the tensors of one call lie, and how they come into the order of a Call."""

    who: str
    """The class that was called, for messages."""
    input: Any
    """x as it was given: a tensor, or a PackedSequence."""
    batch_first: bool

    @property
    def packed(self) -> bool:
        return isinstance(self.input, PackedSequence)

    @property
    def unbatched(self) -> bool:
        return not self.packed and self.input.dim() == 2

    @property
    def steps(self) -> str:
        """The axes of one value for each step, for messages."""
        return "time" if self.unbatched else "batch, time" if self.batch_first else "time, batch"

    def by_step(self, name: str, value: Any, axes: int) -> Tensor:
        """[time, batch, ...], or [rows, ...] of a PackedSequence, from the layout of x.

        Args:
            axes: how many there are after time and batch.
        """
        if self.packed:
            return self._packed(name, value, axes)
        lead = self.input.shape[:-1]
        if not isinstance(value, Tensor) or value.shape[: len(lead)] != lead or value.dim() != len(lead) + axes:
            rest = ", ..." if axes else ""
            raise InputError(
                f"{name} is {_shown(value)}, {self.who} takes [{self.steps}{rest}] = {[*lead]} for this x."
            )
        self.check_device(name, value)
        if self.unbatched:
            return value.unsqueeze(1)
        return value.transpose(0, 1) if self.batch_first else value

    def _packed(self, name: str, value: Any, axes: int) -> Tensor:
        if not isinstance(value, PackedSequence):
            raise InputError(f"x is a PackedSequence and {name} {_shown(value)}: pack it as x is packed.")
        if value.data.shape[0] != self.input.data.shape[0] or value.data.dim() != 1 + axes:
            raise InputError(f"{name} holds {_shown(value.data)}, x {self.input.data.shape[0]} rows: pack both alike.")
        if not torch.compiler.is_compiling() and not _packed_alike(value, self.input):
            raise InputError(f"{name} and x are packed by different lengths or in different orders: pack both alike.")
        self.check_device(name, value.data)
        return value.data

    def by_sequence(self, name: str, value: Any, shape: Sequence[int | str], axis: int) -> Tensor:
        """A tensor with a batch axis at `axis`, from one in the order of the batch; without that axis unbatched.

        Args:
            shape: of what comes out; a name where any size will do.
        """
        wanted = [size for place, size in enumerate(shape) if not (self.unbatched and place == axis)]
        fits = isinstance(value, Tensor) and value.dim() == len(wanted)
        if not fits or any(isinstance(w, int) and g != w for g, w in zip(value.shape, wanted, strict=True)):
            raise InputError(f"{name} is {_shown(value)}, {self.who} takes {_listed(wanted)} for this x.")
        self.check_device(name, value)
        if self.unbatched:
            return value.unsqueeze(axis)
        order = self.input.sorted_indices if self.packed else None
        return value if order is None else value.index_select(axis, order)

    def check_device(self, name: str, value: Tensor) -> None:
        x = self.input.data if self.packed else self.input
        if value.device != x.device:
            raise InputError(f"{name} is on {value.device} and x on {x.device}: move one with .to().")


def marks(axes: Axes, extras: Extras, time: int, batch: int | str) -> Marks:
    """Lengths, mask and reset of a call, in its order; without the seed."""
    if not axes.packed and extras.lengths is None and extras.mask is None and extras.reset is None:
        return PLAIN
    sizes, rows = (axes.input.batch_sizes, axes.input.sorted_indices) if axes.packed else (None, None)
    for name in ("lengths", "mask"):
        if axes.packed and getattr(extras, name) is not None:
            raise InputError(
                f"x is a PackedSequence, which has its lengths, and {name} is given too: leave one of them out."
            )
    lengths = _lengths(axes, extras.lengths, time, batch) if extras.lengths is not None else None
    mask = _flags(axes, "mask", extras.mask) if extras.mask is not None else None
    reset = _flags(axes, "reset", extras.reset) if extras.reset is not None else None
    return Marks(sizes, rows, lengths, mask, reset)


def _flags(axes: Axes, name: str, value: Any) -> Tensor:
    flags = axes.by_step(name, value, 0)
    if flags.dtype != torch.bool:
        raise InputError(f"{name} is {flags.dtype}, it must be bool: write {name}.bool().")
    return flags


def _lengths(axes: Axes, value: Any, time: int, batch: int | str) -> Tensor:
    device = axes.input.device
    if axes.unbatched and (isinstance(value, int) or (isinstance(value, Tensor) and value.dim() == 0)):
        value = value.reshape(1) if isinstance(value, Tensor) else [value]
    if isinstance(value, list | tuple) and all(map(_whole, value)):
        value = torch.tensor([int(one) for one in value], dtype=torch.int64, device="cpu")
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(value, Tensor) or value.dtype not in kinds or value.shape != (batch,):
        odd = [type(one).__name__ for one in value if not _whole(one)] if isinstance(value, list | tuple) else []
        given = f"{_shown(value)} with a {odd[0]}" if odd else _shown(value)
        raise InputError(
            f"lengths is {given}, {axes.who} takes {batch} integers, one for each sequence: "
            "a list of int, or torch.as_tensor of them."
        )
    unseen = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or is_virtual((value,))
    # memory of its own: kernels wait for what they count by it, which a caller's other stream may not write meanwhile
    if not value.is_cpu or not batch or unseen:
        return value.to(device, torch.int64, non_blocking=True).clamp(0, time)
    steps = value.tolist()  # one call of torch, where the least and the most of a tensor are four
    low, high = min(steps), max(steps)
    if low < 0 or high > time:
        raise InputError(f"lengths go from {low} to {high} and x has {time} steps: each must be from 0 to {time}.")
    return value.to(device, torch.int64, non_blocking=True, copy=True)


def extra_inputs(
    axes: Axes, value: Any, names: Sequence[str], units: int, dtype: torch.dtype, cast: bool
) -> tuple[Tensor, ...]:
    """The cell's extra inputs, in its order.

    Args:
        cast: autocast is on, which lets them have any dtype.
    """
    if value is None and not names:
        return ()
    given = {names[0]: value} if len(names) == 1 and isinstance(value, Tensor | PackedSequence) else value
    if not isinstance(given, Mapping) or set(given) != set(names):
        found = f"{', '.join(map(str, given)) or 'empty'}" if isinstance(given, Mapping) else _shown(value)
        found = "not given" if value is None else found
        wanted = ", ".join(f"{name!r}: ..." for name in names)
        instead = f"write inputs={{{wanted}}}." if names else "leave it out."
        raise InputError(f"inputs is {found}, and this cell reads {', '.join(names) or 'no extra inputs'}: {instead}")
    made = []
    for name in names:
        tensor = axes.by_step(f"inputs[{name!r}]", given[name], 1)
        if tensor.shape[-1] not in (1, units):
            raise InputError(
                f"inputs[{name!r}] has {tensor.shape[-1]} features in its last axis: it must be {units} or 1."
            )
        if tensor.dtype != dtype and not (cast and tensor.is_floating_point()):
            raise InputError(f"inputs[{name!r}] is {tensor.dtype} and x {dtype}: write .to({dtype}).")
        made.append(tensor)
    return tuple(made)


class Masks:
    """What a call gives in the place of draws: the lists of `dropout_masks`, each checked when it is asked for.

    Args:
        count: layers x directions.
        names: of the masks that the layer can take.
    """

    def __init__(self, axes: Axes, given: Any, count: int, dtype: torch.dtype, names: Sequence[str]) -> None:
        if not isinstance(given, Mapping):
            raise InputError(f"dropout_masks is {_shown(given)}: write {{'recurrent_dropout': mask}}.")
        unknown = [name for name in given if name not in names]
        if unknown:
            raise InputError(f"dropout_masks has {unknown[0]!r}: {axes.who} takes {', '.join(names)}.")
        self._axes, self._given, self._count, self._dtype = axes, given, count, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def each(self, name: str, count: int | None = None) -> list[tuple[str, Any]]:
        """What stands for each layer and direction, with a name for messages."""
        count = self._count if count is None else count
        value = self._given[name]
        values = list(value) if isinstance(value, list | tuple) and not isinstance(value, PackedSequence) else [value]
        if len(values) != count:
            raise InputError(f"dropout_masks[{name!r}] has {len(values)} masks, {self._axes.who} takes {count}.")
        return [(f"dropout_masks[{name!r}][{place}]", mask) for place, mask in enumerate(values)]

    def by_step(self, name: str, widths: Sequence[int], count: int | None = None) -> list[Tensor]:
        """[time, batch, width] each."""
        made = []
        for (title, value), width in zip(self.each(name, count), widths, strict=True):
            mask = self._typed(title, self._axes.by_step(title, value, 1))
            if mask.shape[-1] != width:
                raise InputError(f"{title} has {mask.shape[-1]} features in its last axis: it must have {width}.")
            made.append(mask)
        return made

    def held(self, name: str, shapes: Sequence[Sequence[Sequence[int | str]]]) -> list[Tensor]:
        """For each layer and direction a mask of one of its shapes, which have the batch before the last axis."""
        made = []
        for (title, value), choices in zip(self.each(name), shapes, strict=True):
            axes = value.dim() + self._axes.unbatched if isinstance(value, Tensor) else 0
            shape = next((shape for shape in choices if len(shape) == axes), choices[-1])
            made.append(self._typed(title, self._axes.by_sequence(title, value, shape, len(shape) - 2)))
        return made

    def weights(self, name: str, shape: Sequence[int]) -> list[Tensor]:
        made = []
        for title, value in self.each(name):
            if not isinstance(value, Tensor) or value.shape != tuple(shape):
                raise InputError(f"{title} is {_shown(value)}, {self._axes.who} takes {_listed(shape)}.")
            self._axes.check_device(title, value)
            made.append(self._typed(title, value))
        return made

    def _typed(self, title: str, mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return mask.to(self._dtype)
        if mask.dtype != self._dtype and not mask.is_floating_point():
            raise InputError(f"{title} is {mask.dtype}: give bool or {self._dtype}.")
        return mask


def _packed_alike(one: PackedSequence, other: PackedSequence) -> bool:
    if not torch.equal(one.batch_sizes, other.batch_sizes):
        return False
    a, b = one.sorted_indices, other.sorted_indices
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {_listed(value.shape)}"
    return f"of type {type(value).__name__}"


def _whole(value: Any) -> bool:
    """Whether it is an integer, of NumPy too."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _listed(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"
