"""Engine `cpu`: whorl's own loop over time in C++, compiled for the processor that it runs on.

What a plain call has, a mask, lengths, resets and most dropout too, is `plain`'s.  Of every other the loop over time is
one call for each layer and direction: the input product, a few steps ahead, products with the recurrent weights, the
cell's step, masks, noise, lengths and resets.  The gradients of x and of the weights are products after it, of these
kernels too.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from whorl import compiler
from whorl.engines import taped
from whorl.engines.base import Continue, Engine, Grads, Step, as_bytes, from_bytes
from whorl.engines.cpu import plain, tapes
from whorl.engines.cpu.build import by_unit, fault
from whorl.engines.cpu.masks import BY_GATE, NONE, Masks
from whorl.engines.cpu.memory import Regions, borrowed, empty
from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.stream import Stream
from whorl.engines.cpu.sweep import PARTS, Fields, Products, filled_up, kernel, laid, projects_within, turned
from whorl.engines.native import OneDNN
from whorl.noise import given
from whorl.problem import VIRTUAL, Call, Outcome, Plan, Problem, autocast_is_on
from whorl.weights import LayerWeights, join, split


class CPU(Engine):
    name = "cpu"
    summary = "whorl's loop over time in C++, compiled for this processor"

    def obstacles(self, problem: Problem) -> list[str]:
        device, dtype = problem.device, str(problem.dtype).removeprefix("torch.")
        if device.kind != "cpu":
            return [f"the tensors are on {device.kind}, this engine runs on cpu"]
        found = []
        if not device.compiler:
            found.append(f"no C++ compiler is found: {compiler.remedy()}")
        elif compiler.is_microsofts(device.compiler):
            found.append(f"the C++ compiler is {device.compiler}, the kernels take GCC or Clang: name one in CXX")
        else:
            found += _faults(device.compiler)
        if problem.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            found.append(f"the dtype is {dtype}, the kernels take float32, float64 and bfloat16")
        if problem.batch == 0:
            found.append("the batch is 0, the kernels take 1 or more")
        if problem.virtual:
            found.append(VIRTUAL)
        return found

    def slower(self, problem: Problem) -> list[str]:
        """Where oneDNN has the LSTM too: inference of more than 256 units, and of few at large batches.

        torch's time over ours on an AMD EPYC of family 25: training in float32 by two threads 1.01 to 1.34, in bfloat16
        1.05 to 2.4, with 128 units at batch 128 0.94 to 1.15 (by one thread 1.0 to 1.7, but with 128 units at batch 32
        and 128 0.96 to 0.98, in bfloat16 0.87 to 0.96).  Inference, of 1 to 300 steps at batches of 2 to 256 by one
        thread and two: in float32 with 32 to 256 units 1.0 to 6.6 (of 256, in one of two runs, from 0.75 on), by one
        thread 0.95 to 4.1 (with instructions of AVX2 alone 1.0 to 5.6), with fewer 1.03 to 12 at batches to 32 or of up
        to 2,000 rows in all, and 0.64 to 1.6 beyond; with 320 to 2,048 units 0.71 to 1.24; in bfloat16 the same but
        0.75 to 1.4 beyond.  At batch 1 1.15 to 1.5.

        By an Intel Xeon's matrix unit, which in float32 whorl alone uses, inference with 1,024 units at batch 32 is
        1.1.  In bfloat16, where both do, it is 1.08 to 2.3 at batch 2 to 8 (32 to 1,024 units, one thread and two),
        0.97 to 1.34 at batch 16, 0.76 to 1.66 at 32 and more.
        """
        units, batch, narrow = problem.form.units, problem.batch, problem.dtype == torch.bfloat16
        if narrow and _by_unit(problem):
            faster = batch <= 8
        elif units <= 256:
            faster = units >= 32 or batch <= 32 or batch * problem.time <= 2000
        else:
            faster = units >= 1024 and _by_unit(problem)
        if faster or problem.gradient or batch == 1 or OneDNN().obstacles(problem):
            return []
        what = f"{units} units at batch {batch} in {str(problem.dtype).removeprefix('torch.')}"
        return [f"inference of {what} is faster on oneDNN"]

    def numbers(self, problem: Problem) -> list[str]:
        parts = "" if problem.dtype == torch.bfloat16 else ", each float32 in three parts of bfloat16"
        lines = [f"recurrent products by the processor's matrix unit (AMX){parts}"] if _by_unit(problem) else []
        fault = "" if problem.dtype == torch.bfloat16 or problem.device.kind != "cpu" else taped.fault()
        return [*lines, f"calls go through Python: {fault}"] if fault else lines

    def prepares(self, problem: Problem) -> bool:
        return problem.device.kind == "cpu"

    def step(self, plan: Plan, call: Call) -> Step:
        return Stream(plan, call, torch.get_num_threads())

    def at_once(self, plan: Plan, call: Call, by_python: Continue) -> Sequence[Tensor]:
        number = tapes.number(plan, call, by_python)
        return () if number < 0 else taped.run(number, call)

    def forward(self, plan: Plan, call: Call) -> Outcome:
        made = plain.sizes_of(plan.problem, call)
        return plain.forward(made, call) if made else _Pass(plan.problem, call).forward()

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        made = plain.sizes_of(plan.problem, call)
        if made:
            return plain.backward(made, call, y, saved, grads)
        with torch.autocast("cpu", enabled=False) if autocast_is_on("cpu") else nullcontext():
            return _Pass(plan.problem, call).backward(y, saved, grads)


def _faults(command: str) -> list[str]:
    """That the compiler of this machine fails, where it does; of another nothing is known."""
    why = fault() if command == compiler.found() else ""
    return [f"the C++ compiler makes no kernels here: {why}"] if why else []


def _by_unit(problem: Problem) -> bool:
    """Whether the processor's matrix unit makes the recurrent products; of another machine's nothing is known."""
    form, parts = problem.form, PARTS.get(problem.dtype, 0)
    here = bool(parts) and problem.device.compiler == compiler.found()
    return here and by_unit(parts, len(form.cell.recurrent) * form.units, form.width, problem.batch)


class _Pass:
    """One call, forward or backward: what is the same for each layer and direction, and their order."""

    def __init__(self, problem: Problem, call: Call) -> None:
        form = problem.form
        self.problem, self.call, self.form, self.rows = problem, call, form, Rows(call)
        self.kernel = kernel(form.cell, problem.dtype)
        self.threads, self.dtype = torch.get_num_threads(), problem.dtype
        self.wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
        self.products = Products(self.kernel, self.wide, self.threads, self.rows.batch)
        self.widths = [form.state_width(index) for index in range(len(form.cell.states))]
        self.weights, self.given = split(form, call.weights), given(form, call)
        self.extras = [self.widened(extra).reshape(-1, extra.shape[-1]) for extra in call.inputs]
        self.to = [self.widened(state) for state in call.reset_to]

    def widened(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.wide).contiguous()

    def forward(self) -> Outcome:
        form, call, rows, gradient = self.form, self.call, self.rows, self.problem.gradient
        count = form.layers * form.directions
        if call.states:
            ends = [torch.empty(state.shape, dtype=self.wide, device="cpu").copy_(state) for state in call.states]
        else:
            ends = [torch.zeros(count, rows.batch, width, dtype=self.wide, device="cpu") for width in self.widths]
        x = call.x.reshape(rows.outer, -1)
        saved: list[Tensor] = []
        sequences: list[Tensor] = []
        for layer in range(form.layers):
            if layer and call.dropout:
                x = x * call.dropout[layer - 1].reshape(x.shape)
            last = layer == form.layers - 1
            whole = empty(*call.x.shape[:-1], form.width * form.directions, dtype=self.dtype)
            y = whole.view(rows.outer, -1)
            if last and self.problem.sequences:
                sequences = [
                    empty(*whole.shape[:-1], width * form.directions, dtype=self.dtype) for width in self.widths
                ]
            for direction in range(form.directions):
                index = layer * form.directions + direction
                one = _One(self, index)
                flat = [part.view(rows.outer, -1) for part in sequences]
                kept = one.forward(x, y, [end[index] for end in ends], flat)
                if gradient:
                    inner = y if direction == 0 and not last else y.new_empty(0)
                    saved += map(as_bytes, (*kept, inner))
            x = y
        return Outcome(whole, tuple(end.to(self.dtype) for end in ends), tuple(saved), tuple(sequences))

    def backward(self, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        form, call, rows, states = self.form, self.call, self.rows, len(self.widths)
        constants = self.problem.constants
        width = form.width * form.directions
        to_y, to_finals, to_sequences = grads[0], grads[1 : 1 + states], grads[1 + states :]
        shapes = [(len(self.weights), rows.batch, width) for width in self.widths]
        to_states = [torch.zeros(shape, dtype=self.wide, device="cpu") for shape in shapes]
        for to_state, to_final in zip(to_states, to_finals, strict=True):
            if to_final is not None:
                to_state.copy_(to_final)
        flat = [self._flat(grad) for grad in to_sequences]
        to_dropout: list[Tensor | None] = [None] * len(call.dropout)
        to_weights: list[LayerWeights] = list(self.weights)
        to_noise: list[Tensor | None] = [None] * len(call.noise)
        to_reset = [torch.zeros_like(state) for state in self.to]
        to_extras = [torch.zeros(rows.outer, form.units, dtype=self.wide, device="cpu") for _ in call.inputs]
        grad = self._flat(to_y)
        y = y.reshape(rows.outer, width)
        for layer in reversed(range(form.layers)):
            first = layer * form.directions
            below = call.x.reshape(rows.outer, -1).contiguous()
            if layer:
                below = from_bytes(saved[3 * (first - form.directions) + 2], (rows.outer, width), self.dtype)
            x = below * call.dropout[layer - 1].reshape(below.shape) if layer and call.dropout else below
            chosen, to_x = rows.choose(x), None
            for direction in range(form.directions):
                index = first + direction
                one = _One(self, index)
                found, to_weights[index], masks = one.backward(
                    chosen, y, grad, flat if layer == form.layers - 1 else [], saved[3 * index : 3 * index + 2],
                    [state[index] for state in to_states], [state[index] for state in to_reset], to_extras,
                )  # fmt: skip
                to_x = found if to_x is None or found is None else to_x + found
                if to_noise:
                    to_noise[index * len(masks) : (index + 1) * len(masks)] = masks
            if layer and call.dropout:  # of the steps that count alone: a mask may hold anything elsewhere
                assert to_x is not None
                mask = call.dropout[layer - 1]
                factor = rows.choose(mask.reshape(below.shape))
                if "dropout" not in constants:
                    to_dropout[layer - 1] = rows.spread(to_x * rows.choose(below)).view(mask.shape)
                to_x = to_x * factor
            grad, y = None if to_x is None else self._flat(rows.spread(to_x)), below
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
        self._source, self._direction = made.kernel.source, index % made.form.directions
        weights = made.weights[index]
        self._weights = weights._replace(
            ih=laid(weights.ih.detach()),
            hh=None if weights.hh is None else laid(weights.hh.detach()),
            hr=None if weights.hr is None else weights.hr.detach().contiguous(),
            vectors=tuple(made.widened(vector) for vector in weights.vectors),
        )
        self._masks = Masks(
            made.kernel, made.form, made.call, made.given[index], index, made.rows, made.wide, made.products,
            "noise" not in made.problem.constants,
        )  # fmt: skip
        # What entered the product is the output of the step before, where nothing comes between them.
        self._shifted = made.rows.every and made.rows.reset is None and self._masks.kind == NONE

    def _regions(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """What forward keeps for backward: name, dtype and shape."""
        source, form, rows, made = self._source, self._form, self._rows.compact, self._pass
        yield "saved", made.wide, (rows, source.saved * form.units + source.saved_means)
        for state, is_given in enumerate(self._masks.given_zoneouts):
            if is_given:
                yield f"apart {state}", made.wide, (rows, form.state_width(state))
        if any(source.leaves) and not self._shifted:
            yield "entered", made.dtype, (rows, form.width)
        if form.projection:
            yield "unprojected", made.dtype, (rows, form.units)
        for product in range(len(source.products)):
            yield f"operand {product}", made.dtype, (rows, form.width)

    def _fields(self) -> Fields:
        made, form = self._pass, self._form
        fields = Fields(made.kernel, self._rows, made.threads, form.units, form.width, self._direction == 1)
        weights = self._weights
        bias = None if weights.bias_hh is None else made.widened(weights.bias_hh)
        fields.set(hh=weights.hh, hr=weights.hr, bias_hh=bias)
        fields.sweep.hh_turned = weights.hh is not None and turned(weights.hh)
        fields.set_lists(vectors=weights.vectors, extras=made.extras)
        fields.set_numbers("extra_widths", [extra.shape[-1] for extra in made.extras])
        return fields

    def _point_to(self, kept: Regions, fields: Fields, *names: str) -> None:
        for name in names:
            setattr(fields.sweep, name, kept.address(name))
        fields.keep(kept.buffer)

    def _sides(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """This direction's half of [outer rows, directions x width] tensors, and their strides."""
        count = self._form.directions
        parts = [
            tensor if tensor is None or count == 1 else tensor.chunk(count, 1)[self._direction] for tensor in tensors
        ]
        return parts, [0 if tensor is None else tensor.shape[1] for tensor in tensors]

    def forward(self, x: Tensor, y: Tensor, ends: list[Tensor], sequences: Sequence[Tensor]) -> Sequence[Tensor]:
        """Writes y, the final states over the initial ones, and the sequences.

        Returns:
            What backward reads: what forward keeps, and the input projection, empty where it is not wanted.  Nothing
            without a gradient.
        """
        made, fields = self._pass, self._fields()
        gradient = made.problem.gradient
        projected = self._project(fields, x)
        apart: list[Tensor | None] = [None] * len(ends)
        if gradient:
            kept = Regions(self._regions())
            self._point_to(kept, fields, "saved", "entered", "unprojected")
            apart = [kept.get(f"apart {state}") for state in range(len(ends))]
            fields.set_lists(operands=[kept[f"operand {product}"] for product in range(len(self._source.products))])
        self._masks.set(fields, apart, [None] * len(ends))
        (side,), (stride,) = self._sides([y])
        fields.set(x=projected, y=side)
        fields.sweep.y_stride, fields.sweep.x_stride = stride, 0 if projected is None else projected.shape[1]
        if sequences:
            parts, strides = self._sides(sequences)
            fields.set_lists(sequences=parts)
            fields.set_numbers("sequence_strides", strides)
        fields.set_lists(states=ends, reset_to=[state[self._index] for state in made.to])
        made.kernel.forward(fields.sweep)
        if not gradient:
            return ()
        return kept.buffer, projected if self._source.reads_x and projected is not None else kept.buffer.new_empty(0)

    def _project(self, fields: Fields, x: Tensor) -> Tensor | None:
        """The input projection: made here, or its place where the loop makes it; None where nobody else reads it."""
        made, form, rows, sweep = self._pass, self._form, self._rows, fields.sweep
        sweep.inputs = x.shape[1]
        if self._masks.input is not None or not projects_within(sweep, made.threads, made.dtype):
            return self._masks.project(rows.choose(x), self._weights)
        bias = None if self._weights.bias_ih is None else made.widened(self._weights.bias_ih)
        fields.set(input=x.contiguous(), ih=self._weights.ih, bias_ih=bias)
        sweep.ih_turned = turned(self._weights.ih)
        if not (made.problem.gradient and self._source.reads_x):
            return None
        return borrowed(rows.compact, filled_up(len(form.cell.gates) * form.units), dtype=made.wide)

    def backward(
        self, x: Tensor, y: Tensor, to_y: Tensor | None, to_sequences: Sequence[Tensor | None], saved: Sequence[Tensor],
        to_states: list[Tensor], to_reset: list[Tensor], to_extras: list[Tensor],
    ) -> tuple[Tensor | None, LayerWeights, list[Tensor | None]]:  # fmt: skip
        """The gradients of x, of the weights and of given masks; None of what is constant.

        Args:
            to_states: gradients of the final states, which become those of the initial ones.
            to_reset, to_extras: added to.
        """
        made, form, rows, source = self._pass, self._form, self._rows, self._source
        cell, units, fields = form.cell, form.units, self._fields()
        kept = Regions(self._regions(), saved[0])
        dx = borrowed(rows.compact, len(cell.gates) * units, dtype=made.dtype)
        dr = dx if source.dr_is_dx else borrowed(rows.compact, len(cell.recurrent) * units, dtype=made.dtype)
        dp = [borrowed(rows.compact, units, dtype=made.dtype) for _ in source.products]
        dv = torch.empty(rows.batch, len(cell.vectors), units, dtype=made.wide, device="cpu")
        dprojected = borrowed(rows.compact, form.width, dtype=made.dtype) if form.projection else None
        dheld = torch.zeros(rows.batch, form.width, dtype=made.wide, device="cpu") if rows.mask is not None else None
        zoneouts = [torch.zeros_like(mask) if mask is not None else None for _, _, mask in self._masks.zoneouts]
        self._masks.set(fields, [kept.get(f"apart {state}") for state in range(len(zoneouts))], zoneouts)
        parts, strides = self._sides([to_y])
        self._point_to(kept, fields, "saved")
        fields.set(dy=parts[0], dx=dx, dr=dr, dv=dv, dprojected=dprojected, dheld=dheld)
        if source.reads_x:
            fields.sweep.x_stride = saved[1].numel() // (made.wide.itemsize * max(1, rows.compact))
            fields.set(x=saved[1].view(made.wide))
        fields.sweep.dy_stride = strides[0]
        if to_sequences:
            parts, strides = self._sides(to_sequences)
            fields.set_lists(dsequences=parts)
            fields.set_numbers("dsequence_strides", strides)
        fields.set_lists(dstates=to_states, dreset=to_reset, dp=dp, de=to_extras)
        made.kernel.backward(fields.sweep)

        to_bias = to_bias_hh = None
        if self._weights.bias_ih is not None:
            to_bias = to_bias_hh = torch.zeros(len(cell.gates) * units, dtype=made.wide, device="cpu")
            if not source.dr_is_dx:
                to_bias_hh = torch.zeros(dr.shape[1], dtype=made.wide, device="cpu")
        wanted = self._index >= form.directions or "x" not in made.problem.constants
        to_x, to_ih, to_input = self._masks.project_backward(dx, x, self._weights, to_bias, wanted)
        to_hh, to_recurrent = self._recurrent(dr, dp, kept, y, None if source.dr_is_dx else to_bias_hh)
        if not cell.recurrent:
            to_bias_hh = None
        elif to_bias_hh is not None and to_bias_hh is to_bias:
            to_bias_hh = to_bias.clone()  # autograd makes each .grad of what it is given, and adds into it
        to_hr = None
        if dprojected is not None:
            to_hr = made.products.outer(dprojected, kept["unprojected"])
        sums = dv.sum(0)
        vectors = tuple(sums[index].clone() for index in source.sums)
        return (
            to_x,
            LayerWeights(to_ih, to_hh, to_bias, to_bias_hh, to_hr, vectors),
            [to_input, to_recurrent, *zoneouts],
        )

    def _rows_of(self, tensor: Tensor, first: int, count: int = 1) -> Tensor:
        return tensor[first * self._form.units : (first + count) * self._form.units]

    def _recurrent(
        self, dr: Tensor, dp: Sequence[Tensor], kept: Regions, y: Tensor, sums: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of the recurrent weights, and of the mask in their product where it is given.

        Args:
            sums: the gradient of the recurrent bias is added to it.
        """
        hh, masks, products, units = self._weights.hh, self._masks, self._pass.products, self._form.units
        if hh is None:
            return None, None
        to_mask = masks.given_gradient()
        to_hh = empty(*hh.shape, dtype=self._pass.wide)
        for gate, read in enumerate(self._source.leaves):
            if not read:
                self._rows_of(to_hh, gate).zero_()
        for first, count in self._runs():
            part, to = dr[:, first * units : (first + count) * units], self._rows_of(to_hh, first, count)
            part_of_sums = None if sums is None else self._rows_of(sums, first, count)
            if self._shifted:
                self._shifted_product(part, y, to, part_of_sums)
                continue
            products.outer(part, kept["entered"], to, part_of_sums, add=False, factor=masks.entering(first))
            if to_mask is not None:
                masks.add_gradient(to_mask, kept["entered"], first, part @ self._rows_of(hh, first, count))
        for index, (gate, grad) in enumerate(zip(self._source.products, dp, strict=True)):
            operand, part_of_sums = kept[f"operand {index}"], None if sums is None else self._rows_of(sums, gate)
            to = self._rows_of(to_hh, gate)
            products.outer(grad, operand, to, part_of_sums, factor=masks.entering(gate))
            if to_mask is not None:
                masks.add_gradient(to_mask, operand, gate, grad @ self._rows_of(hh, gate))
        return to_hh, to_mask

    def _runs(self) -> list[tuple[int, int]]:
        """(first gate, gates) of what is one product: neighbours whose operand is the same."""
        leaves = [gate for gate, read in enumerate(self._source.leaves) if read]
        runs: list[tuple[int, int]] = []
        for gate in leaves:
            if runs and sum(runs[-1]) == gate and self._masks.kind != BY_GATE:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((gate, 1))
        return runs

    def _shifted_product(self, dr: Tensor, y: Tensor, to: Tensor, sums: Tensor | None) -> None:
        """The transpose of dr times the states before each step, which are the initial ones and then y."""
        rows, call, products = self._rows, self._pass.call, self._pass.products
        (side,), _ = self._sides([y])
        assert side is not None
        begin, inner = slice(0, rows.batch), slice(rows.batch, rows.outer)
        before = slice(0, rows.outer - rows.batch)
        if self._direction == 1:
            inner, before = before, inner
            begin = slice(rows.outer - rows.batch, rows.outer)
        products.outer(dr[inner], side[before], to, sums, add=False)
        if call.states:
            initial = call.states[0][self._index].to(dr.dtype).contiguous()
            products.outer(dr[begin], initial, to, sums)
        elif sums is not None:
            sums += dr[begin].sum(0, dtype=sums.dtype)
