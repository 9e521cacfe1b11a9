"""Engine `stepwise`: any cell, option and size on any GPU from compute capability 7.5 on.

A step is cuBLAS's products and, between them, one launch of the cell's own lines: see `kernels/stepwise.cu`.  Steps are
captured in CUDA graphs that serve every call of the same sizes, so launches cost nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cached_property
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from whorl.engines.base import Engine, Grads, Step, as_bytes, from_bytes
from whorl.engines.cuda import split, stream
from whorl.engines.cuda.aligned import Products
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.layers import exact, largest
from whorl.engines.cuda.source import saving
from whorl.engines.cuda.steps import Kernels, Sizes, kernels, matrix_product, sum_of_rows, sweep
from whorl.engines.cuda.tiling import Chip
from whorl.noise import RECURRENT, ZONEOUT, Given, Noise, given, tag, threshold
from whorl.problem import VIRTUAL, Call, Outcome, Plan, Problem, autocast_is_on
from whorl.weights import LayerWeights, join
from whorl.weights import split as per_layer

NONE, HELD, BY_GATE, BY_STEP, DRAWN = range(5)
"""Kinds of noise in the recurrent product, as stepwise.cu numbers them."""
_SHARE, _DRAWN, _GIVEN = 1, 2, 3  # kinds of zoneout
_MOST_PRODUCTS = 2**24  # of a gate, in a prepared step
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Stepwise(Engine):
    name = "stepwise"
    summary = "cuBLAS's products and whorl's CUDA kernel for the rest, step by step in CUDA graphs"

    def obstacles(self, problem: Problem) -> list[str]:
        device, dtype = problem.device, str(problem.dtype).removeprefix("torch.")
        if device.kind != "cuda":
            return [f"the tensors are on {device.kind}, whorl's CUDA kernels run on cuda"]
        found = []
        if device.capability < (7, 5):
            dotted = "{}.{}".format(*device.capability)
            found.append(f"the GPU has compute capability {dotted}, the compiler takes 7.5 and later")
        found += [reason] if (reason := missing()) is not None else []
        if problem.dtype not in _DTYPES:
            found.append(f"the dtype is {dtype}, the kernels take float16, bfloat16, float32 and float64")
        if problem.batch == 0:
            found.append("the batch is 0, the kernels take 1 or more")
        if problem.virtual:
            found.append(VIRTUAL)
        return found

    def prepares(self, problem: Problem) -> bool:
        """Of few products: on an H200 a step of an LSTM from Python took 13 to 62 us in place of 91 to 187 with 128 and
        512 units at batch 1 to 16, and 24 to 40 in place of 102 to 122 with 2,048 at batch 1; at batch 16 of these it
        took twice as long as a call.
        """
        few = problem.batch * problem.form.units**2 <= _MOST_PRODUCTS
        return few and not self.obstacles(problem) and not stream.obstacles(problem)

    def step(self, plan: Plan, call: Call) -> Step:
        return super().step(plan, call) if stream.obstacles(plan.problem) else stream.Stream(plan, call)

    def forward(self, plan: Plan, call: Call) -> Outcome:
        with torch.autocast("cuda", enabled=False) if autocast_is_on("cuda") else nullcontext():
            return _Pass(plan.problem, call).forward()

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        with torch.autocast("cuda", enabled=False) if autocast_is_on("cuda") else nullcontext():
            return _Pass(plan.problem, call).backward(y, saved, grads)


def _multiplier(problem: Problem, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What multiplies x with its weights, as `matrix_product` does: where that is worth it in parts (split.py)."""
    chip, (sizes, most) = Chip(problem.device.capability, problem.device.multiprocessors), largest(problem)
    if device.type != "cuda" or not split.needed(exact(problem), most, chip):
        return matrix_product
    return Products(chip, device.index, problem.dtype.itemsize, sizes, most, exact=True)


class _Rows:
    """The steps of sequences: which count, and where each lies in x and y ("outer" rows)."""

    def __init__(self, call: Call) -> None:
        marks, x = call.marks, call.x
        self.sizes: list[int] | None = None
        self.starts: Tensor | None = None
        self.lengths: Tensor | None = None
        self.valid: Tensor | None = None
        if marks.batch_sizes is not None:
            counts = marks.batch_sizes
            self.sizes = counts.tolist()
            self.time, self.batch, self.outer = len(counts), int(counts[0]), x.shape[0]
            self.starts = (counts.cumsum(0) - counts).to(x.device)
            self.lengths = (counts[:, None] > torch.arange(self.batch, device=counts.device)).sum(0).to(x.device)
        else:
            self.time, self.batch = x.shape[0], x.shape[1]
            self.outer = self.time * self.batch
            if marks.lengths is not None:
                self.lengths = marks.lengths.clamp(max=self.time).contiguous()
                self.valid = torch.arange(self.time, device=x.device)[:, None] < self.lengths
            if marks.mask is not None:
                self.valid = marks.mask if self.valid is None else self.valid & marks.mask
        self.mask, self.reset, self.ids = (
            None if mark is None else mark.contiguous() for mark in (marks.mask, marks.reset, marks.rows)
        )

    @cached_property
    def sequence(self) -> Tensor:
        """Of each row of a packed batch the sequence that it is of."""
        assert self.starts is not None
        device = self.starts.device
        return torch.cat([torch.arange(size, device=device) for size in self.sizes or ()])

    def counted(self, rows: Tensor) -> Tensor:
        """[outer rows, features] with zero in the rows that do not count, whatever lies there."""
        return rows if self.valid is None else torch.where(self.valid.reshape(-1, 1), rows, 0.0)

    def by_row(self, mask: Tensor) -> Tensor:
        """[outer rows, features] of [batch, features]."""
        if self.sizes is not None:
            return mask[self.sequence]
        return mask.expand(self.time, *mask.shape).reshape(self.outer, -1)

    def by_sequence(self, rows: Tensor) -> Tensor:
        """[batch, features]: the sums over the steps of each sequence."""
        if self.sizes is None:
            return rows.view(self.time, self.batch, -1).sum(0)
        return rows.new_zeros(self.batch, rows.shape[1]).index_add_(0, self.sequence, rows)


class _Pass:
    """One call, forward or backward: what is the same for each layer and direction, and their order."""

    def __init__(self, problem: Problem, call: Call) -> None:
        form = problem.form
        self.problem, self.call, self.form, self.rows = problem, call, form, _Rows(call)
        self.dtype, self.device = problem.dtype, call.x.device
        self.wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
        self.kernels = kernels(form.cell, problem.dtype, self.device)
        self.product = _multiplier(problem, self.device)
        self.widths = [form.state_width(index) for index in range(len(form.cell.states))]
        self.weights, self.given = per_layer(form, call.weights), given(form, call)
        rows = self.rows
        self.extras = [
            self.widened(extra.reshape(rows.outer, -1).expand(rows.outer, form.units)) for extra in call.inputs
        ]
        self.to = [self.widened(state) for state in call.reset_to]

    def widened(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.wide).contiguous()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.wide, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(*shape, dtype=dtype or self.wide, device=self.device)

    def forward(self) -> Outcome:
        form, call, rows, gradient = self.form, self.call, self.rows, self.problem.gradient
        count = form.layers * form.directions
        ends = [self.zeros(count, rows.batch, width) for width in self.widths]
        for end, state in zip(ends, call.states, strict=False):
            end.copy_(state)
        x = rows.counted(call.x.reshape(rows.outer, -1))
        saved: list[Tensor] = []
        sequences: list[Tensor] = []
        for layer in range(form.layers):
            x = self._dropped(x, layer)
            last = layer == form.layers - 1
            whole = x.new_empty(*call.x.shape[:-1], form.width * form.directions)
            y = whole.view(rows.outer, -1)
            if last and self.problem.sequences:
                sequences = [x.new_empty(*whole.shape[:-1], width * form.directions) for width in self.widths]
            flat = [part.view(rows.outer, -1) for part in sequences]
            for direction in range(form.directions):
                index = layer * form.directions + direction
                kept = _One(self, index).forward(x, y, [end[index] for end in ends], flat)
                inner = y if direction == 0 and not last else y.new_empty(0)
                saved += map(as_bytes, (*kept, inner)) if gradient else ()
            x = y
        return Outcome(whole, tuple(end.to(self.dtype) for end in ends), tuple(saved), tuple(sequences))

    def _dropped(self, x: Tensor, layer: int) -> Tensor:
        """The input of a layer: what comes from below, after dropout where there is any."""
        return x * self._factor(layer) if layer and self.call.dropout else x

    def _factor(self, layer: int) -> Tensor:
        mask = self.call.dropout[layer - 1]
        return self.rows.counted(mask.reshape(self.rows.outer, -1))

    def backward(self, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        form, call, rows, states = self.form, self.call, self.rows, len(self.widths)
        width = form.width * form.directions
        to_y, to_finals, to_sequences = grads[0], grads[1 : 1 + states], grads[1 + states :]
        to_states = [self.zeros(len(self.weights), rows.batch, width) for width in self.widths]
        for to_state, to_final in zip(to_states, to_finals, strict=True):
            if to_final is not None:
                to_state.copy_(to_final)
        flat = [self._flat(grad) for grad in to_sequences]
        to_dropout: list[Tensor | None] = [None] * len(call.dropout)
        to_weights: list[LayerWeights] = list(self.weights)
        to_noise: list[Tensor | None] = [None] * len(call.noise)
        to_reset = [torch.zeros_like(state) for state in self.to]
        to_extras = [self.zeros(rows.outer, form.units) for _ in call.inputs]
        grad = self._flat(to_y)
        for layer in reversed(range(form.layers)):
            first = layer * form.directions
            below = rows.counted(call.x.reshape(rows.outer, -1))
            if layer:
                below = from_bytes(saved[3 * (first - form.directions) + 2], (rows.outer, width), self.dtype)
            x, to_x = self._dropped(below, layer), None
            for direction in range(form.directions):
                index = first + direction
                found, to_weights[index], masks = _One(self, index).backward(
                    x, grad, flat if layer == form.layers - 1 else [], saved[3 * index : 3 * index + 2],
                    [state[index] for state in to_states], [state[index] for state in to_reset], to_extras,
                )  # fmt: skip
                to_x = found if to_x is None else to_x + found
                if to_noise:
                    to_noise[index * len(masks) : (index + 1) * len(masks)] = masks
            assert to_x is not None
            if layer and call.dropout:
                to_dropout[layer - 1] = (to_x * below).view(call.dropout[layer - 1].shape)
                to_x = to_x * self._factor(layer)
            grad = self._flat(to_x)
        to_inputs = [
            (to_extra.sum(-1) if extra.shape[-1] == 1 else to_extra).reshape(extra.shape)
            for to_extra, extra in zip(to_extras, call.inputs, strict=True)
        ]
        given_states = to_states if call.states else []
        every = [grad, *given_states, *join(to_weights), *to_dropout, *to_reset, *to_inputs, *to_noise]
        return [
            None if one is None else one.to(tensor.dtype).view(tensor.shape)
            for one, tensor in zip(every, call.tensors, strict=True)
        ]

    def _flat(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(self.dtype).reshape(self.rows.outer, -1).contiguous()


class _One:
    """One layer in one direction."""

    def __init__(self, made: _Pass, index: int) -> None:
        self._pass, self._form, self._rows, self._index = made, made.form, made.rows, index
        self._kernels: Kernels = made.kernels
        self._segments = made.kernels.source.segments
        layer, self._direction = divmod(index, made.form.directions)
        weights = made.weights[index]
        matrices = {
            name: matrix.detach().contiguous()
            for name in ("ih", "hh", "hr")
            if (matrix := getattr(weights, name)) is not None
        }
        self._weights = weights._replace(**matrices)
        self._vectors = [made.widened(vector) for vector in weights.vectors]
        self._bias = None if weights.bias_hh is None else made.widened(weights.bias_hh)
        joined = self._bias is not None and min(saving(made.form.cell).sums) >= 0
        self._bias_in_x = self._bias if joined else None  # x + r alone is read: one addition for all steps
        self._given: Given = made.given[index]
        like = made.empty(0)
        valid = None if made.rows.valid is None else made.rows.valid.unsqueeze(-1)
        self._noise = Noise(made.form, made.call, self._given, layer, self._direction, made.rows.sizes, like, valid)
        self._input = self._noise.input(made.form.layer_inputs(layer))
        self._place = layer, self._direction
        self._kind, self._mask = self._recurrent_noise()
        self._zoneouts = [self._zoneout(state) for state in range(len(made.widths))]

    # --- noise --------------------------------------------------------------------------------------------------------

    def _recurrent_noise(self) -> tuple[int, Tensor | None]:
        form, mask = self._form, self._given.recurrent
        if not form.cell.recurrent:
            return NONE, None
        if form.recurrent_dropout_mode == "step":
            if mask is not None:
                return BY_STEP, self._rows.counted(self._pass.widened(mask).view(-1, form.width))
            drawn = form.recurrent_dropout and self._pass.call.marks.seed is not None
            return (DRAWN if drawn else NONE), None
        held = self._noise.held
        if held is None:
            return NONE, None
        return (HELD if held.dim() == 2 else BY_GATE), held.contiguous()

    def _zoneout(self, state: int) -> tuple[int, float, Tensor | None]:
        mask, form = self._given.zoneout[state], self._form
        if mask is not None:
            return _GIVEN, 0.0, self._pass.widened(mask).view(-1, form.state_width(state))
        probability = form.zoneout[state] if form.zoneout else 0.0
        if not probability:
            return NONE, 0.0, None
        return (_SHARE if self._pass.call.marks.seed is None else _DRAWN), probability, None

    def _entered(self, kept: Tensor, gate: int) -> Tensor:
        """What entered the recurrent product of a gate, from what was kept of it."""
        factor = self._factor(gate)
        return kept if factor is None else (kept * factor).to(kept.dtype)

    def _factor(self, gate: int) -> Tensor | None:
        if self._mask is None or self._kind == BY_STEP:
            return self._mask
        return self._rows.by_row(self._mask if self._kind == HELD else self._mask[gate])

    # --- the input product --------------------------------------------------------------------------------------------

    def _project(self, x: Tensor) -> Tensor:
        """The input product of all steps, [outer rows, gates x units], in the dtype of sums."""
        ih, bias = self._weights.ih, self._weights.bias_ih
        made = self._pass.empty(self._rows.outer, ih.shape[0])
        if self._input is None or self._input.dim() == 2:
            self._pass.product(self._with_input_mask(x, self._input), ih.t(), made)
        else:
            units = self._form.units
            for gate, mask in enumerate(self._input):
                part = slice(gate * units, (gate + 1) * units)
                made[:, part] = F.linear(self._with_input_mask(x, mask).to(self._pass.wide), ih[part].to(made.dtype))
        if bias is None:
            return made
        return made.add_(bias if self._bias_in_x is None else bias + self._bias_in_x)

    def _with_input_mask(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else (x * self._rows.by_row(mask)).to(x.dtype)

    def _project_backward(self, dx: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of x, of the weights, and of the mask where it is given."""
        ih, rows, mask = self._weights.ih, self._rows, self._input
        if mask is None:
            to_x = matrix_product(dx, ih, self._pass.empty(rows.outer, ih.shape[1]))
            return to_x, sum_of_rows(dx, x), None
        gates = dx.split(self._form.units, 1) if mask.dim() == 3 else [dx]
        weights = ih.split(self._form.units) if mask.dim() == 3 else [ih]
        masks = list(mask) if mask.dim() == 3 else [mask]
        to_x, to_ih, to_mask = self._pass.zeros(rows.outer, ih.shape[1]), [], []
        for gate, weight, one in zip(gates, weights, masks, strict=True):
            entered = matrix_product(gate, weight, self._pass.empty(rows.outer, ih.shape[1]))
            to_x += entered * rows.by_row(one)
            to_ih.append(sum_of_rows(gate, self._with_input_mask(x, one)))
            to_mask.append(rows.by_sequence(entered * x))
        given = self._given.input is not None
        return to_x, torch.cat(to_ih), torch.stack(to_mask).view(mask.shape) if given else None

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _regions(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """What forward keeps for backward: name, dtype and shape."""
        made, form, rows, segments = self._pass, self._form, self._rows.outer, self._segments
        yield "saved", made.wide, (rows, segments.saved * form.units + segments.saved_means)
        for state, (kind, _, _) in enumerate(self._zoneouts):
            if kind == _GIVEN:
                yield f"apart {state}", made.wide, (rows, form.state_width(state))
        if any(segments.leaves):
            yield "entered", made.dtype, (rows, form.width)
        if form.projection:
            yield "unprojected", made.dtype, (rows, form.units)
        for product in range(len(segments.products)):
            yield f"operand {product}", made.dtype, (rows, form.width)

    def _views(self, buffer: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """All regions in one buffer, a new one where none is given, and each by name."""
        regions, end, places = list(self._regions()), 0, {}
        for name, dtype, shape in regions:
            size = prod(shape) * dtype.itemsize
            places[name] = (end, size)
            end += -(-size // 256) * 256
        if buffer is None:
            buffer = self._pass.empty(end, dtype=torch.uint8)
        return buffer, {
            name: buffer[places[name][0] : sum(places[name])].view(dtype).view(shape) for name, dtype, shape in regions
        }

    def _sizes(self) -> Sizes:
        form = self._form
        by_gate = self._kind == BY_GATE or not all(self._segments.leaves)
        return Sizes(self._rows.batch, form.units, form.width, bool(form.projection), by_gate)

    def _fields(self) -> dict[str, object]:
        """Of the kernels' arguments those that forward and backward share."""
        made, form, rows, call = self._pass, self._form, self._rows, self._pass.call
        probability = form.recurrent_dropout
        return {
            "time": rows.time, "reverse": self._direction, "starts": rows.starts, "lengths": rows.lengths,
            "mask": rows.mask, "reset": rows.reset, "ids": rows.ids, "seed": call.marks.seed,
            "noise_kind": self._kind, "keep_plain": self._mask is not None, "noise": self._mask,
            "noise_below": threshold(probability), "noise_scale": 1 / (1 - probability) if probability < 1 else 0.0,
            "noise_tag": tag(RECURRENT, *self._place), "zoneout_tag": tag(ZONEOUT, *self._place),
            "bias_hh": None if self._bias_in_x is not None else self._bias, "vectors": self._vectors,
            "extras": made.extras,
        }  # fmt: skip

    def _zoneout_fields(self, apart: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[object]:
        made: list[object] = []
        for (kind, share, mask), kept, to in zip(self._zoneouts, apart, gradients, strict=True):
            made += [kind, share, threshold(share), mask, kept, to]
        return made

    def _sides(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """This direction's half of [outer rows, directions x width] tensors, and their strides."""
        parts = [
            None if tensor is None else tensor.chunk(self._form.directions, 1)[self._direction] for tensor in tensors
        ]
        return parts, [0 if tensor is None else tensor.shape[1] for tensor in tensors]

    def forward(self, x: Tensor, y: Tensor, ends: list[Tensor], sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Writes y, the final states over the initial ones, and the sequences.

        Returns:
            What backward reads: what forward keeps, and the input projection; empty where it is not wanted.
        """
        made, segments, rows = self._pass, self._segments, self._rows
        projected, buffer = self._project(x), x.new_empty(0)
        kept: dict[str, Tensor] = {}
        if made.problem.gradient:
            buffer, kept = self._views()
        saved = kept.get("saved", None)
        if saved is None:
            saved = made.empty(rows.batch, segments.saved * self._form.units + segments.saved_means)
        (side,), (stride,) = self._sides([y])
        parts, strides = self._sides(sequences)
        apart = [kept.get(f"apart {state}") for state in range(len(ends))]
        fields = self._fields() | {
            "keeps": "saved" in kept, "saved": saved, "x": projected, "states": ends,
            "reset_to": [state[self._index] for state in made.to], "y": side, "y_stride": stride, "sequences": parts,
            "sequence_strides": strides, "entered": kept.get("entered"), "unprojected": kept.get("unprojected"),
            "operands": [kept[name] for name in kept if name.startswith("operand")],
            "zoneout": self._zoneout_fields(apart, [None] * len(ends)),
        }  # fmt: skip
        sweep(self._kernels, "forward", self._sizes(), rows.time, fields, self._weights.hh, self._weights.hr)
        return buffer, projected if segments.reads_x and made.problem.gradient else buffer.new_empty(0)

    def backward(
        self, x: Tensor, to_y: Tensor | None, to_sequences: Sequence[Tensor | None], saved: Sequence[Tensor],
        to_states: list[Tensor], to_reset: list[Tensor], to_extras: list[Tensor],
    ) -> tuple[Tensor, LayerWeights, list[Tensor | None]]:  # fmt: skip
        """The gradients of x, of the weights and of given masks.

        Args:
            to_states: gradients of the final states, which become those of the initial ones.
            to_reset, to_extras: added to.
        """
        made, form, rows, segments = self._pass, self._form, self._rows, self._segments
        cell, units, weights = form.cell, form.units, self._weights
        _, kept = self._views(saved[0])
        dx = made.empty(rows.outer, len(cell.gates) * units, dtype=made.dtype)
        dr = dx if segments.dr_is_dx else made.empty(rows.outer, len(cell.recurrent) * units, dtype=made.dtype)
        dp = [made.empty(rows.outer, units, dtype=made.dtype) for _ in segments.products]
        dv = [made.zeros(rows.batch, units) for _ in cell.vectors]
        dprojected = made.empty(rows.outer, form.width, dtype=made.dtype) if form.projection else None
        zoneouts = [None if mask is None else torch.zeros_like(mask) for _, _, mask in self._zoneouts]
        apart = [kept.get(f"apart {state}") for state in range(len(zoneouts))]
        (side,), (stride,) = self._sides([to_y])
        parts, strides = self._sides(to_sequences)
        fields = self._fields() | {
            "keeps": True, "saved": kept["saved"], "dy": side, "dy_stride": stride, "dsequences": parts,
            "dsequence_strides": strides, "dstates": to_states, "dreset": to_reset, "dx": dx, "dr": dr, "dp": dp,
            "dv": dv, "de": to_extras, "dprojected": dprojected, "zoneout": self._zoneout_fields(apart, zoneouts),
            "x": saved[1].view(made.wide) if segments.reads_x else None,
        }  # fmt: skip
        sweep(self._kernels, "backward", self._sizes(), rows.time, fields, weights.hh, weights.hr)
        to_x, to_ih, to_input = self._project_backward(dx, x)
        to_hh, to_bias_hh, to_recurrent = self._recurrent_backward(dr, dp, kept)
        to_bias = None if weights.bias_ih is None else dx.sum(0, dtype=made.wide)
        to_hr = None if dprojected is None else sum_of_rows(dprojected, kept["unprojected"])
        vectors = tuple(vector.sum(0) for vector in dv)
        found = LayerWeights(to_ih, to_hh, to_bias, to_bias_hh, to_hr, vectors)
        return to_x, found, [to_input, to_recurrent, *zoneouts]

    def _recurrent_backward(
        self, dr: Tensor, dp: Sequence[Tensor], kept: dict[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of the recurrent weights, of their bias, and of the mask in their product where it is given."""
        hh, units, segments = self._weights.hh, self._form.units, self._segments
        if hh is None:
            return None, None, None
        to_hh, to_mask = torch.zeros_like(hh), None
        to_bias = None if self._bias is None else dr.sum(0, dtype=self._pass.wide)
        if self._given.recurrent is not None and self._mask is not None:
            to_mask = torch.zeros_like(self._mask)

        def add(gates: slice, grad: Tensor, operand: Tensor) -> None:
            first, part = gates.start, slice(gates.start * units, gates.stop * units)
            to_hh[part] += sum_of_rows(grad, self._entered(operand, first))
            if to_mask is not None:
                self._add_to_mask(
                    to_mask, first, matrix_product(grad, hh[part], self._pass.empty(*operand.shape)), operand
                )

        if all(segments.leaves) and self._kind != BY_GATE:
            add(slice(0, len(segments.leaves)), dr, kept["entered"])
        else:
            for gate, leaf in enumerate(segments.leaves):
                if leaf:
                    add(slice(gate, gate + 1), dr[:, gate * units : (gate + 1) * units], kept["entered"])
        for index, (gate, grad) in enumerate(zip(segments.products, dp, strict=True)):
            add(slice(gate, gate + 1), grad, kept[f"operand {index}"])
            if to_bias is not None:
                to_bias[gate * units : (gate + 1) * units] += grad.sum(0, dtype=to_bias.dtype)
        return to_hh, to_bias, to_mask

    def _add_to_mask(self, to: Tensor, gate: int, to_entered: Tensor, operand: Tensor) -> None:
        """Add to a given mask's gradient what one gate's product gives."""
        found = to_entered * operand
        if self._kind == BY_STEP:
            to += found
        else:
            (to if self._kind == HELD else to[gate]).add_(self._rows.by_sequence(found))
