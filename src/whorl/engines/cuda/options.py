"""The options of a call as the kernels take them: which of kernels/options.cu a layer has, and its argument."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engines.base import from_bytes
from whorl.engines.cuda import beside, store
from whorl.engines.cuda.launch import Kernel, loaded
from whorl.engines.cuda.memory import empty, laid_out
from whorl.engines.cuda.source import (
    AT_RANDOM,
    BY_GATE,
    BY_MASK,
    BY_SHARE,
    DRAWN,
    GIVEN,
    GIVEN_BY_GATE,
    HELD,
    NAMES,
    Features,
)
from whorl.engines.cuda.tiling import Chip
from whorl.noise import INPUT, RECURRENT, WORDS, ZONEOUT, Given, by_gate, given, tag, threshold, together
from whorl.problem import Call, Form, Problem

# the arguments of kernels/draw.cu, draw_bits.cu, order.cu and masked.cu
_DRAW, _DRAW_BITS, _ORDER, _MASKED = "3Q6q2d", "3Q10q", "3Q3q", "6Q4qd"
_THREADS = 256
_MASKING = {True: 2, False: 8}
"""Blocks of masked.cu for a multiprocessor, with masks and without: each begins by reading its own.  With 2, 4 and 8,
masks of four gates, 100 steps, took 22, 27 and 27 us in bfloat16 with 512 units at batch 128, 40, 45 and 44 with 1,024,
5.0, 7.9 and 8.0 with 256 at 32, with TF32 products 5.3, 5.5 and 6.0, at 128 21, 20 and 20 (H200)."""
_DRAWING = 4  # blocks of draw_bits.cu that run at once on a multiprocessor, as it says itself
_FEWEST = 8


def layout(states: int, inputs: int) -> str:
    """The fields of `Options` in kernels/options.cu."""
    inputs = max(1, inputs)
    return f"{7 + 3 * inputs + 7 * states + 8}Q{1 + states}f{(1 + states) % 2 * 4}x"


def expected(problem: Problem) -> Features:
    """The most that a call of a problem can ask of the kernels."""
    form, extras, states = problem.form, problem.extras, len(problem.form.cell.states)
    given, drawn = "dropout_masks" in extras, "drawn" in extras
    noise = 0
    if form.recurrent_dropout_mode == "step":
        noise = GIVEN if given else DRAWN if drawn and form.recurrent_dropout else 0
    elif given or (drawn and form.recurrent_dropout):
        noise = (GIVEN_BY_GATE if given else BY_GATE) if is_by_gate(form) else HELD
    zoneout: tuple[int, ...] = (BY_MASK,) * states if given else ()
    if form.zoneout and not given:
        zoneout = tuple([(AT_RANDOM if drawn else BY_SHARE) if p else 0 for p in form.zoneout])
    lengths, reset = problem.packed or "lengths" in extras, "reset" in extras
    of_masks = given and "noise" not in problem.constants
    return Features(
        lengths=lengths, mask="mask" in extras, reset=reset, reset_to="reset_to" in extras,
        order=lengths and not problem.packed, packed=problem.packed, noise=noise, zoneout=zoneout,
        sequences=problem.sequences, noise_gradient=of_masks, zoneout_gradient=of_masks,
    )  # fmt: skip


def is_ordered(batch: int) -> bool:
    """Whether sequences with lengths are dealt by them: where there are more than the fewest of a cluster."""
    return batch > _FEWEST


def is_by_gate(form: Form) -> bool:
    """Whether the masks of recurrent dropout are one for each gate, of several."""
    return form.recurrent_dropout_mode == "gate" and len(form.cell.masked) > 1


Made = tuple[str, int, int]
"""What is drawn or sorted, of which layer and direction."""


class Shared(NamedTuple):
    """What forward draws and sorts for backward too, in the room that it leaves."""

    room: Tensor
    places: Mapping[Made, int]
    """Where it lies there, of all that is shared."""
    parts: int
    """Clusters that share a batch in backward, as `Grid.together` has them."""
    is_made: bool
    """Forward has made it."""


def shared_sizes(problem: Problem, features: Features, of_input: bool, of_state: bool) -> dict[Made, int]:
    """Bytes of what forward draws and sorts, and backward reads as it is: not what is drawn for each step of many.

    Args:
        of_input, of_state: masks of x, and of the recurrent product, are drawn, where there are some.
    """
    form, batch = problem.form, problem.batch
    found: dict[Made, int] = {("order", 0, 0): 8 * batch} if features.order else {}
    bits = problem.time * batch * -(-form.units // 2) * 2 * features.draws
    masks = {HELD: 1, BY_GATE: len(form.cell.masked)}.get(features.noise, 0) * of_state
    for layer in range(form.layers):
        x = of_input * (form.input_dropout > 0) * form.layer_inputs(layer)
        sizes = {"input": 4 * batch * x, "noise": 4 * batch * form.units * masks, "bits": bits * (bits <= _SHARED)}
        for direction in range(form.directions):
            found |= {(name, layer, direction): size for name, size in sizes.items() if size}
    return found


_SHARED = 16 * 2**20
"""Bytes of bits, for all steps of a layer and direction, above which backward draws them again: they are one byte of a
unit at a step, of which LSTM keeps 14 in bfloat16.  Of 100 steps of 1,024 units at batch 128, 12.5 MiB, a draw takes 20
us for zoneout and 12 for dropout by step (H200)."""


class Options:
    """What one call has beside x, states and weights, on the device.

    Sequences are sorted by their lengths where there are more than the fewest of a cluster.

    Args:
        shared: where forward makes some of it for backward too.
    """

    def __init__(
        self, problem: Problem, call: Call, chip: Chip, index: int, stream: int, shared: Shared | None = None
    ) -> None:
        form, marks, self._call = problem.form, call.marks, call
        self._problem, self.form, self._chip, self._index, self._stream = problem, form, chip, index, stream
        self.time, self.batch, self.seed = problem.time, problem.batch, marks.seed
        self.packed, self.count = problem.packed, call.x.numel() // max(1, call.x.shape[-1])
        self.ids = None if marks.rows is None else marks.rows.contiguous()
        self.mask = None if marks.mask is None else marks.mask.contiguous()
        self.reset = None if marks.reset is None else marks.reset.contiguous()
        self.lengths = None if marks.lengths is None else marks.lengths.contiguous()
        self.starts: Tensor | None = None
        if marks.batch_sizes is not None:
            sizes, device = marks.batch_sizes, call.x.device
            ends = sizes.cumsum(0)
            lengths = (sizes[:, None] > torch.arange(self.batch, device=sizes.device)).sum(0)
            both = torch.cat([ends - sizes, ends[-1:], lengths])
            both = both.to(device, non_blocking=True)
            self.starts, self.lengths = both[: len(sizes) + 1], both[len(sizes) + 1 :]
        self._is_ordered = self.lengths is not None and not self.packed and is_ordered(self.batch)
        self._orders: dict[int, Tensor] = {}
        self._shared, self._behind = shared, False
        self._given = given(form, call)
        self.of_masks = "noise" not in problem.constants
        """Those that are given have gradients."""
        self._bits: list[Tensor] = []
        self.inputs = [
            extra.to(torch.float32).expand(*extra.shape[:-1], form.units).contiguous() for extra in call.inputs
        ]
        self.reset_to = [_aligned(state.to(call.x.dtype)) for state in call.reset_to]

    def features(self, layer: int, backward: bool) -> Features:
        """What a layer's kernel has."""
        noise, _ = self.noise(layer)
        zoneout = [kind for kind, _ in self.zoneouts(layer)]
        masks, of_masks = [self._given[index] for index in self._indices(layer)], backward and self.of_masks
        return Features(
            lengths=self.lengths is not None, mask=self.mask is not None, reset=self.reset is not None,
            reset_to=bool(self.reset_to), order=self._is_ordered, packed=self.packed, noise=noise,
            zoneout=tuple(zoneout) if any(zoneout) else (),
            sequences=self._problem.sequences and layer == self.form.layers - 1,
            noise_gradient=of_masks and noise in (HELD, GIVEN) and any(mask.recurrent is not None for mask in masks),
            zoneout_gradient=of_masks and BY_MASK in zoneout,
        )  # fmt: skip

    def argument(
        self, layer: int, parts: int, *, before: Sequence[Tensor | int] = (), sequences: Sequence[Tensor | None] = (),
        entered: Sequence[Tensor | int] = (), reset_gradients: Sequence[Tensor] = (),
        input_gradients: Sequence[Sequence[Tensor]] = (), noise_gradients: Sequence[Tensor | None] = (),
        zoneout_gradients: Sequence[Sequence[Tensor | None]] = (),
    ) -> list[int | float]:  # fmt: skip
        """The fields of `Options` in kernels/options.cu; a list of two is by direction.

        Args:
            parts: as `Grid` has them together.
            before, entered: tensors, or addresses.
        """
        form, states = self.form, len(self.form.cell.states)
        inputs, probabilities = max(1, len(self.inputs)), form.zoneout or (0.0,) * states
        (_, noise), zoneouts = self.noise(layer), self.zoneouts(layer)
        by_direction = [[masks[d] for _, masks in zoneouts] for d in range(form.directions)]
        offset = layer * form.directions * self.batch * form.units * self._call.x.element_size()
        self._bits = self._drawn(layer)  # kept until the next layer's are drawn, which is after this one's launch
        return [
            *_addresses((self.lengths, self.mask, self.reset, self._order(parts), self.starts), 5),
            *_addresses(self.inputs, inputs),
            *_addresses(self.reset_to, states, offset),
            *_addresses(noise, 2),
            *_addresses(self._bits, 2),
            *_pairs(by_direction, states),
            *_addresses(before, 2),
            *_addresses(sequences, states),
            *_addresses(entered, 2),
            *_addresses(reset_gradients, states, offset),
            *_pairs(input_gradients, inputs),
            *_addresses(noise_gradients, 2),
            *_pairs(zoneout_gradients, states),
            self.noise_scale(layer), *probabilities,
        ]  # fmt: skip

    @contextmanager
    def behind(self, whether: bool) -> Iterator[None]:
        """What is put behind masks meanwhile runs beside the loop launched just before, and ends after it.

        Its memory must not be what that loop, or what was launched since, still has.
        """
        own, self._behind = self._behind, whether
        try:
            yield
        finally:
            self._behind = own

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """What is launched meanwhile goes to a stream."""
        own, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = own

    # --- masks --------------------------------------------------------------------------------------------------------

    def noise(self, layer: int) -> tuple[int, list[Tensor | None]]:
        """What the operand of each recurrent product is multiplied with: its kind, and the masks of each direction."""
        return self._noises[layer]

    def noise_scale(self, layer: int) -> float:
        """What the masks of `noise` are multiplied with."""
        drawn = all(self._given[index].recurrent is None for index in self._indices(layer))
        return _scale(self.form.recurrent_dropout) if drawn else 1.0

    def zoneouts(self, layer: int) -> list[tuple[int, list[Tensor | None]]]:
        """The same of each state's zoneout."""
        return self._zoneouts[layer]

    def input_mask(self, layer: int, direction: int) -> Tensor | None:
        """[batch, inputs] or [gates, batch, inputs], float32."""
        mask, form = self._given[layer * self.form.directions + direction].input, self.form
        if mask is not None:
            return mask.to(torch.float32)
        if not form.input_dropout or self.seed is None:
            return None
        code, width = tag(INPUT, layer, direction), form.layer_inputs(layer)
        into, is_made = self._memory("input", layer, direction, (self.batch, width), torch.float32)
        if not is_made:
            self._draw(1, 1, width, code, form.input_dropout, 0.0, _scale(form.input_dropout), into)
        return into

    def given_masks(self, layer: int, direction: int) -> Given:
        return self._given[layer * self.form.directions + direction]

    @cached_property
    def _noises(self) -> list[tuple[int, list[Tensor | None]]]:
        return [self._noise(layer) for layer in range(self.form.layers)]

    @cached_property
    def _zoneouts(self) -> list[list[tuple[int, list[Tensor | None]]]]:
        states = range(len(self.form.cell.states))
        return [[self._zoneout(layer, state) for state in states] for layer in range(self.form.layers)]

    def _noise(self, layer: int) -> tuple[int, list[Tensor | None]]:
        form, probability = self.form, self.form.recurrent_dropout
        masks = [self._given[index].recurrent for index in self._indices(layer)]
        draws, by_step = self.seed is not None and probability > 0, form.recurrent_dropout_mode == "step"
        if not form.cell.masked or (not draws and all(mask is None for mask in masks)):
            return 0, []
        if by_step and all(mask is None for mask in masks):
            return DRAWN, []
        made: list[Tensor | None] = []
        for direction, mask in enumerate(masks):
            if mask is not None:  # by gate, of a cell that has one recurrent gate
                mask = mask[0] if mask.dim() == 3 and not by_step and not is_by_gate(form) else mask
                made.append(mask.to(torch.float32).contiguous())
            elif draws and is_by_gate(form):
                drawn_alone = all(mask is None for mask in masks)
                made.append(self._draw_by_gate(layer, direction, 1.0 if drawn_alone else _scale(probability)))
            elif draws:
                code, time = tag(RECURRENT, layer, direction), self.time if by_step else 1
                into, is_made = self._memory("noise", layer, direction, (time, self.batch, form.units), torch.float32)
                if not is_made:
                    self._draw(1, time, form.units, code, probability, 0.0, _scale(probability), into)
                made.append(self._by_row(into) if by_step else into[0])
            else:
                made.append(self._seedless(1.0, by_step))
        if is_by_gate(form):
            gates, like = len(form.cell.masked), (self.batch, form.units)
            kind = BY_GATE if all(mask is None for mask in masks) else GIVEN_BY_GATE
            return kind, [None if mask is None else mask.expand(gates, *like).contiguous() for mask in made]
        return (GIVEN if by_step else HELD), made

    def _draw_by_gate(self, layer: int, direction: int, kept: float) -> Tensor:
        """float32 [gates with masks, batch, units]."""
        form, first, shape = self.form, 0, (len(self.form.cell.masked), self.batch, self.form.units)
        made, is_made = self._memory("noise", layer, direction, shape, torch.float32)
        for purpose, count in () if is_made else by_gate(len(form.cell.masked)):
            code, into = tag(purpose, layer, direction), made[first : first + count]
            self._draw(count, 1, form.units, code, form.recurrent_dropout, 0.0, kept, into)
            first += count
        return made

    def _zoneout(self, layer: int, state: int) -> tuple[int, list[Tensor | None]]:
        form, probability = self.form, self.form.zoneout[state] if self.form.zoneout else 0.0
        masks = [self._given[index].zoneout[state] for index in self._indices(layer)]
        if all(mask is None for mask in masks):
            kind = AT_RANDOM if self.seed is not None else BY_SHARE
            return (kind if probability else 0), [None] * form.directions
        made: list[Tensor | None] = []
        for direction, mask in enumerate(masks):
            if mask is not None:
                made.append(mask.to(torch.float32).contiguous())
            elif probability and self.seed is not None:
                code = tag(ZONEOUT, layer, direction)
                drawn = self._draw(len(form.cell.states), self.time, form.units, code, probability, 1.0, 0.0)[state]
                made.append(self._by_row(drawn))
            else:
                made.append(self._seedless(probability, True))
        return BY_MASK, made

    def _indices(self, layer: int) -> range:
        return range(layer * self.form.directions, (layer + 1) * self.form.directions)

    def _seedless(self, value: float, by_step: bool) -> Tensor:
        rows = self.count if by_step else self.batch
        return torch.full((rows, self.form.units), value, dtype=torch.float32, device=self._call.x.device)

    def _by_row(self, drawn: Tensor) -> Tensor:
        """Of [time, batch, units] what a PackedSequence has rows for."""
        return drawn if self.steps is None else drawn[self.steps, self.sequences].contiguous()

    # --- rows ---------------------------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> Tensor | None:
        """Of a PackedSequence the step of each row."""
        sizes = self._call.batch_sizes
        if sizes is None:
            return None
        steps = torch.arange(self.time, device=sizes.device).repeat_interleave(sizes)
        return steps.to(self._call.x.device, non_blocking=True)

    @cached_property
    def sequences(self) -> Tensor | None:
        """Of a PackedSequence the sequence of each row."""
        if self.steps is None or self.starts is None:
            return None
        return torch.arange(self.count, device=self.starts.device) - self.starts[self.steps]

    @property
    def all_count(self) -> bool:
        """Whether every step counts: there is no padding, and no mask."""
        return self.packed or (self.lengths is None and self.mask is None)

    def cleaned(self, x: Tensor) -> Tensor:
        """Zero in the steps that do not count: there may be anything, and zero times infinite is not a number."""
        return x if self.all_count else self.masked(x)

    def masked(self, x: Tensor, masks: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """x [..., width] behind masks that are held over all steps, and zero in the steps that do not count.

        Args:
            masks: float32 [batch, width], or [count, batch, width] for as many results, [count, ..., width].
            scale: what they are multiplied with.
        """
        alike = x.is_contiguous() and (masks is None or masks.is_contiguous())
        assert alike or not self._behind, "nothing waits there for a copy"
        x, width = x.contiguous(), x.shape[-1]
        masks = None if masks is None else masks.contiguous()
        count = masks.shape[:-2] if masks is not None else ()
        made = empty(*laid_out((*count, *x.shape), x.dtype))
        lengths, sequences = (None, self.sequences) if self.packed else (self.lengths, None)
        tensors = (made, x, masks, lengths, self.mask, sequences)
        vector = 16 // x.element_size()
        if width % vector or x.data_ptr() % 16 or (masks is not None and masks.data_ptr() % 16):
            vector = 1
        name = f"{'cleaned' if masks is None else 'masked'}_{NAMES[x.dtype]}_{vector}{'_behind' * self._behind}"
        write = partial(beside.masked, name, x.dtype, vector, masks is not None, self._behind)
        kernel = _small(name, write, _MASKED, self._chip, self._index)
        blocks = max(1, -(-self.batch * (width // vector) // _THREADS))
        at_once = _MASKING[masks is not None] * self._chip.multiprocessors
        parts = parts_of_steps(-(-self.count // max(1, self.batch)), blocks, at_once)
        numbers = prod(count), self.count, self.batch, width
        kernel(self._stream, blocks, parts, *_addresses(tensors, 6), *numbers, scale)
        return made

    def _drawn(self, layer: int) -> list[Tensor]:
        """What a layer draws anew at each step, for each direction [time, batch, pairs of units]; empty for nothing."""
        form, zones = self.form, [s for s, (kind, _) in enumerate(self.zoneouts(layer)) if kind == AT_RANDOM]
        noise = self.noise(layer)[0] == DRAWN
        if not zones and not noise:
            return []
        states = len(form.cell.states)
        name, write = beside.draw_bits_name(states, zones, noise), partial(beside.draw_bits, states, zones, noise)
        kernel = _small(name, write, _DRAW_BITS, self._chip, self._index)
        pairs, below, found = -(-form.units // 2), [threshold(p) for p in form.zoneout or (0.0,)], []
        blocks = max(1, -(-self.batch * -(-pairs // 2) // _THREADS))
        parts = parts_of_steps(self.time, blocks, _DRAWING * self._chip.multiprocessors)
        for direction in range(form.directions):
            made, is_made = self._memory("bits", layer, direction, (self.time, self.batch, pairs), torch.int16)
            found.append(made)
            if is_made:
                continue
            kernel(
                self._stream, blocks, parts, made.data_ptr(),
                *_addresses((self.ids, self.seed), 2), self.time, self.batch, pairs,
                tag(ZONEOUT, layer, direction), *below, *[0] * (WORDS - len(below)),
                tag(RECURRENT, layer, direction), threshold(form.recurrent_dropout),
            )  # fmt: skip
        return found

    def _order(self, parts: int) -> Tensor | None:
        """The sequence in each place of clusters that share the batch."""
        if self.lengths is None or not self._is_ordered:
            return None
        shared = self._shared
        if shared is not None and shared.is_made:
            return self._memory("order", 0, 0, (self.batch,), torch.int64)[0]
        if parts not in self._orders:
            made = empty(*laid_out((self.batch,), torch.int64))
            kernel = _small("order_by_length", beside.order, _ORDER, self._chip, self._index)
            also, its_parts = 0, 1
            if shared is not None:
                back, _ = self._memory("order", 0, 0, (self.batch,), torch.int64)
                also, its_parts = back.data_ptr(), shared.parts
            kernel(
                self._stream, -(-self.batch // 8), 1, made.data_ptr(), also, self.lengths.data_ptr(), self.batch,
                parts, its_parts,
            )  # fmt: skip
            self._orders[parts] = made
        return self._orders[parts]

    def _memory(
        self, name: str, layer: int, direction: int, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, bool]:
        """Where what is drawn or sorted lies, and whether forward has put it there."""
        at = None if self._shared is None else self._shared.places.get((name, layer, direction))
        if self._shared is None or at is None:
            return empty(*laid_out(shape, dtype)), False
        data = self._shared.room[at : at + prod(shape) * dtype.itemsize]
        return from_bytes(data, shape, dtype), self._shared.is_made

    def _draw(
        self, count: int, time: int, width: int, code: int, probability: float, event: float, other: float,
        into: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """float32 [count, time, batch, width]: `event` where a word of this purpose, of so many of a unit, is one."""
        made = empty(*laid_out((count, time, self.batch, width), torch.float32)) if into is None else into
        kernel = _small("draw_masks", beside.draw, _DRAW, self._chip, self._index)
        blocks = min(1024, -(-time * self.batch * -(-width // together(count)) // _THREADS))
        kernel(
            self._stream, blocks, 1, made.data_ptr(), *_addresses((self.ids, self.seed), 2), count, time, self.batch,
            width, code, threshold(probability), event, other,
        )  # fmt: skip
        return made


class Gradients:
    """Where the gradients of what `Options` holds go."""

    def __init__(self, call: Call, options: Options) -> None:
        self._call, self._options, self._form = call, options, options.form
        self._noise: list[Tensor | None] = [None] * len(call.noise)
        self._reset_to = [torch.empty_like(state) for state in options.reset_to]
        self._inputs: list[list[Tensor]] = []

    def argument(
        self, layer: int, parts: int, features: Features, before: Sequence[Tensor], entered: Sequence[Tensor],
        sequences: Sequence[Tensor | None],
    ) -> list[int | float]:  # fmt: skip
        """`Options.argument` of a backward kernel.

        Args:
            parts: as there.
            before: the first state before each step, in each direction.
            entered: where the first state goes as it entered its product.
            sequences: gradients of the states of each step of the last layer, or none.
        """
        options, form = self._options, self._form
        inputs: list[list[Tensor]] = []
        noise: list[Tensor | None] = []
        zoneout: list[list[Tensor | None]] = []
        for direction in range(form.directions):
            index, masks = layer * form.directions + direction, options.given_masks(layer, direction)
            inputs.append([self._room(options.count) for _ in options.inputs])
            rows = options.batch if features.noise == HELD else options.count
            noise.append(self._of_mask(index, 1, masks.recurrent, rows) if features.noise_gradient else None)
            kinds = enumerate(features.zoneout if features.zoneout_gradient else ())
            zoneout.append(
                [
                    self._of_mask(index, 2 + state, masks.zoneout[state], options.count) if kind == BY_MASK else None
                    for state, kind in kinds
                ]
            )
        self._inputs += inputs
        return options.argument(
            layer, parts, before=before, entered=entered, sequences=sequences if features.sequences else (),
            reset_gradients=self._reset_to, input_gradients=inputs, noise_gradients=noise, zoneout_gradients=zoneout,
        )  # fmt: skip

    def of_input(self, index: int, grad: Tensor) -> None:
        """The gradient of a mask of input dropout, of this layer x directions + direction."""
        self._noise[index * self._per] = grad

    def wants_noise(self, index: int) -> bool:
        """Whether masks of recurrent dropout are given, and have gradients."""
        return (
            self._options.of_masks
            and self._options.given_masks(*divmod(index, self._form.directions)).recurrent is not None
        )

    def of_noise(self, index: int, grad: Tensor) -> None:
        """The gradient of masks of recurrent dropout by gate."""
        self._noise[index * self._per + 1] = grad

    def results(self) -> list[Tensor | None]:
        """Of `Call.reset_to`, `inputs` and `noise`."""
        call = self._call
        inputs: list[Tensor | None] = []
        for place, extra in enumerate(call.inputs):
            total = torch.stack([row[place] for row in self._inputs]).sum(0)
            total = total.sum(-1) if extra.shape[-1] == 1 and self._form.units > 1 else total
            inputs.append(total.reshape(extra.shape))
        found = [*self._reset_to, *inputs, *self._noise]
        given = [*call.reset_to, *call.inputs, *call.noise]
        return [
            None if grad is None else grad.to(tensor.dtype).view(tensor.shape)
            for grad, tensor in zip(found, given, strict=True)
        ]

    @property
    def _per(self) -> int:
        """Masks of each layer and direction."""
        return 2 + len(self._form.cell.states)

    def _room(self, rows: int) -> Tensor:
        return torch.empty(rows, self._form.units, dtype=torch.float32, device=self._call.x.device)

    def _of_mask(self, index: int, place: int, mask: Tensor | None, rows: int) -> Tensor:
        made = self._room(rows)
        if mask is not None:
            self._noise[index * self._per + place] = made
        return made


def _small(name: str, write: beside.Writer, fields: str, chip: Chip, index: int) -> Kernel:
    """A kernel of one launch that depends on no layer."""

    def make() -> Kernel:
        return Kernel(
            store.kernel(write(), name, chip.architecture, ()), name, index, _THREADS, 0, 1, fields, early=chip.early
        )

    return loaded((name, index), make)


@lru_cache(maxsize=1024)
def parts_of_steps(time: int, blocks: int, at_once: int) -> int:
    """Into how many parts the steps go, each of so many blocks, where so many blocks run at once.

    What a thread begins with takes it about as long as a step.
    """
    assert blocks * _THREADS <= 2**32, "the kernels number the threads of a step by 32 bits"

    def taken(parts: int) -> int:
        return -(-blocks * parts // at_once) * (1 - (-time // parts))

    return min(range(1, max(1, min(time, 4 * at_once // blocks)) + 1), key=taken)


def _scale(probability: float) -> float:
    return 1 / (1 - probability) if probability < 1 else 0.0


def _addresses(tensors: Sequence[Tensor | int | None], count: int, offset: int = 0) -> list[int]:
    """Of tensors; what is a number is one already."""
    found = [
        tensor if isinstance(tensor, int) else 0 if tensor is None else tensor.data_ptr() + offset for tensor in tensors
    ]
    return found + [0] * (count - len(found))


def _pairs(directions: Sequence[Sequence[Tensor | None]], count: int) -> list[int]:
    rows = [_addresses(row, count) for row in directions]
    return [*(rows[0] if rows else [0] * count), *(rows[1] if len(rows) > 1 else [0] * count)]


def _aligned(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 8 == 0 else tensor.clone()
