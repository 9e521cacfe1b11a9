"""Engines `cudnn` and `onednn`: torch's own kernels, for the plain cells that they can run."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from whorl.cells import library
from whorl.engines.base import Engine, Grads, as_bytes, from_bytes
from whorl.problem import Call, Form, Outcome, Plan, Problem
from whorl.weights import NATIVE_MODES, LayerWeights, join, kinds, split

_aten = torch.ops.aten
_LONGEST_CUDNN = 65_535


def _states_or_zeros(problem: Problem, call: Call) -> list[Tensor]:
    """The initial states in the layer's dtype, zero where none are given."""
    if call.states:
        return [state.to(problem.dtype).contiguous() for state in call.states]
    return [call.x.new_zeros(shape, dtype=problem.dtype) for shape in problem.form.state_shapes(problem.batch)]


def _concatenated(outs: list[Tensor]) -> Tensor:
    return outs[0] if len(outs) == 1 else torch.cat(outs, -1)


def _with_dropout(x: Tensor, call: Call, layer: int) -> Tensor:
    """The input of the layer above: the output of this one, after dropout where there is any."""
    return x * call.dropout[layer] if layer < len(call.dropout) else x


class OneDNN(Engine):
    name = "onednn"
    summary = "torch's oneDNN LSTM, one call a layer and direction"
    recorded = True

    def obstacles(self, problem: Problem) -> list[str]:
        form, device = problem.form, problem.device
        dtype = str(problem.dtype).removeprefix("torch.")
        takes = {torch.float32: True, torch.bfloat16: device.bfloat16, torch.float16: device.half}
        found = []
        if device.kind != "cpu":
            return [f"the tensors are on {device.kind}, oneDNN runs on cpu"]
        if not device.library:
            found.append("this torch has no oneDNN, or torch.backends.mkldnn is switched off")
        if form.cell.fingerprint != library.lstm.graph.fingerprint:
            found.append(f"the cell is {form.cell.name}, torch runs only the plain LSTM through oneDNN")
        if problem.dtype not in takes:
            found.append(f"the dtype is {dtype}, oneDNN takes float32, bfloat16, and float16 without gradient")
        elif not takes[problem.dtype]:
            found.append(f"oneDNN does not take {dtype} on this processor")
        elif problem.dtype == torch.float16 and problem.gradient:
            found.append("the dtype is float16 and a gradient is wanted, oneDNN has none in float16")
        if form.projection:
            found.append(f"the projection is {form.projection} wide, oneDNN takes none")
        if problem.packed:
            found.append("the input is a PackedSequence, oneDNN takes padded input")
        if problem.batch == 0:
            found.append("the batch is 0, oneDNN takes 1 or more")
        if problem.additions:
            found.append(f"oneDNN does not take {', '.join(problem.additions)}")
        return found

    def forward(self, plan: Plan, call: Call) -> Outcome:
        # The operator keeps what backward reads only where grad mode is on.  Where it was off, the gradient is whorl's
        # own to record: then torch's must not be.
        gradient, recorded = plan.problem.gradient, torch.is_grad_enabled()
        if gradient == recorded:
            return self._forward(plan.problem, call, keep=False)
        keep = gradient and not recorded
        with torch.set_grad_enabled(gradient), torch._C._AutoDispatchBelowAutograd() if keep else nullcontext():
            return self._forward(plan.problem, call, keep)

    def _forward(self, problem: Problem, call: Call, keep: bool) -> Outcome:
        form = problem.form
        starts = _starts(problem, call)
        x, ends, workspaces, inner = call.x, [], [], []
        per_layer = _four_by_four(form, call.weights)
        for layer in range(form.layers):
            x = x.contiguous()
            outs = []
            for direction in range(form.directions):
                index = layer * form.directions + direction
                (ih, hh, bias_ih, bias_hh), (h, c) = per_layer[index], starts[index]
                out, h, c, workspace = torch.mkldnn_rnn_layer(
                    x, ih, hh, bias_ih, bias_hh, h, c, direction == 1, [], 2, form.units, 1,
                    form.bias, form.directions == 2, False, problem.gradient,
                )  # fmt: skip
                outs.append(out)
                ends.append((h, c))
                # c as the operator gave it: the user gets a copy, which may be changed in place before backward.
                workspaces += [workspace, as_bytes(c)] if keep else []
            y = _concatenated(outs)
            inner += [as_bytes(out) for out in outs] if keep and not _is_output(form, layer) else []
            x = _with_dropout(y, call, layer)
        if len(ends) == 1 and not problem.gradient:
            finals = tuple([state.unsqueeze(0) for state in ends[0]])
        else:
            finals = tuple(torch.stack(state) for state in zip(*ends, strict=True))
        return Outcome(y, finals, (*workspaces, *inner))

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        problem, form = plan.problem, plan.problem.form
        count = form.layers * form.directions
        starts = _starts(problem, call)
        per_layer = _four_by_four(form, call.weights)
        kept, inner = saved[: 2 * count], saved[2 * count :]
        shape = (problem.time, problem.batch, form.units)
        grad_y, grad_h, grad_c = grads
        grads_h = grad_h.contiguous().unbind(0) if grad_h is not None else [None] * count
        grads_c = grad_c.contiguous().unbind(0) if grad_c is not None else [None] * count
        grad_starts: list[tuple[Tensor, Tensor]] = [(y, y)] * count
        grad_weights = split(form, call.weights)
        grad_dropout: list[Tensor | None] = [None] * len(call.dropout)

        def outs_of(layer: int) -> list[Tensor]:
            if _is_output(form, layer):
                return [y]
            first = layer * form.directions
            return [from_bytes(inner[first + d], shape, problem.dtype) for d in range(form.directions)]

        outs = outs_of(form.layers - 1)
        for layer in reversed(range(form.layers)):
            outs_below = outs_of(layer - 1) if layer else []
            below = _concatenated(outs_below) if layer else call.x
            x = (_with_dropout(below, call, layer - 1) if layer else below).contiguous()
            parts = [None, None] if grad_y is None else grad_y.chunk(form.directions, -1)
            grad_x: Tensor | None = None
            for direction in range(form.directions):
                index = layer * form.directions + direction
                h = outs[direction][-1 if direction == 0 else 0]
                c = from_bytes(kept[2 * index + 1], h.shape, problem.dtype)
                to_x, ih, hh, bias_ih, bias_hh, *to_starts = _aten.mkldnn_rnn_layer_backward(
                    x, *per_layer[index], *starts[index], outs[direction], h, c,
                    parts[direction], _or_zeros(grads_h[index], h), grads_c[index],
                    direction == 1, 2, form.units, 1, form.bias, True, form.directions == 2, [], False,
                    kept[2 * index],
                )  # fmt: skip
                if not form.bias:
                    bias_ih = bias_hh = None
                grad_weights[index] = LayerWeights(ih, hh, bias_ih, bias_hh, None, ())
                grad_starts[index] = tuple(to_starts)
                grad_x = to_x if grad_x is None else grad_x + to_x
            assert grad_x is not None
            if layer and call.dropout:
                grad_dropout[layer - 1] = grad_x * below
                grad_x = grad_x * call.dropout[layer - 1]
            grad_y, outs = grad_x, outs_below
        to_states = [torch.stack(state) for state in zip(*grad_starts, strict=True)] if call.states else []
        return [grad_y, *to_states, *join(grad_weights), *grad_dropout]


def _starts(problem: Problem, call: Call) -> list[tuple[Tensor, ...]]:
    """The initial states of each layer and direction; the same zeros for all where none are given."""
    form = problem.form
    if call.states:
        states = _states_or_zeros(problem, call)
        return list(zip(*(state.unbind(0) for state in states), strict=True))
    zeros = call.x.new_zeros(problem.batch, form.units, dtype=problem.dtype)
    return [(zeros,) * len(form.cell.states)] * (form.layers * form.directions)


def _is_output(form: Form, layer: int) -> bool:
    """What the layer gives is what the call gives: kept once, where autograd sees it changed in place."""
    return layer == form.layers - 1 and form.directions == 1


def _four_by_four(form: Form, weights: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """Of each layer and direction the four tensors that the operator wants; with no biases it reads the first two."""
    if form.bias:
        return [tuple(weights[start : start + 4]) for start in range(0, len(weights), 4)]
    # Detached: torch would give it a bias's gradient.
    return [(*weights[start : start + 2], *[weights[start].detach()] * 2) for start in range(0, len(weights), 2)]


def _or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


class CuDNN(Engine):
    name = "cudnn"
    summary = "cuDNN through torch"

    def obstacles(self, problem: Problem) -> list[str]:
        form, device = problem.form, problem.device
        dtype = str(problem.dtype).removeprefix("torch.")
        if device.kind != "cuda":
            return [f"the tensors are on {device.kind}, cuDNN runs on cuda"]
        found = []
        if not device.library:
            found.append("this torch has no cuDNN, or torch.backends.cudnn is switched off")
        if form.cell.fingerprint not in NATIVE_MODES:
            found.append(f"the cell is {form.cell.name}, cuDNN runs the plain LSTM, GRU and RNN")
        if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            found.append(f"the dtype is {dtype}, cuDNN takes float16, bfloat16, float32 and float64")
        elif problem.dtype == torch.bfloat16 and not device.bfloat16:
            found.append(
                f"the dtype is bfloat16, which needs cuDNN 9.13 (this is {device.library}) and compute capability 8.0 "
                f"(this is {'.'.join(map(str, device.capability))})"
            )
        if form.projection and form.cell.fingerprint != library.lstm.graph.fingerprint:
            found.append(f"the cell {form.cell.name} has a projection, cuDNN takes one for LSTM alone")
        if problem.time > _LONGEST_CUDNN:
            found.append(f"the sequence has {problem.time} steps, cuDNN takes at most {_LONGEST_CUDNN}")
        if problem.batch == 0:
            found.append("the batch is 0, cuDNN takes 1 or more")
        if problem.additions:
            found.append(f"cuDNN does not take {', '.join(problem.additions)}")
        return found

    def forward(self, plan: Plan, call: Call) -> Outcome:
        problem, form = plan.problem, plan.problem.form
        states = _states_or_zeros(problem, call)
        x, y, saved = call.x, call.x, []
        ends: list[list[Tensor]] = []
        for first, count in _groups(problem):
            weights = _weights(call, form, first, count)
            flat = _flat(form, count, weights)
            buffer = flat if flat is not None else _packed(form, count, weights)
            y, h, c, reserve, _ = _aten._cudnn_rnn(
                x.contiguous(), weights, len(kinds(form)), buffer, *_state_pair(states, form, first, count),
                *_arguments(problem, count), _sizes(call), None,
            )  # fmt: skip
            ends.append([h, c][: len(states)])
            if problem.gradient:
                inner = y if first + count < form.layers else y.new_empty(0)
                saved += [reserve, as_bytes(buffer if flat is None else y.new_empty(0)), as_bytes(inner)]
            x = _with_dropout(y, call, first + count - 1)
        finals = tuple(torch.cat(state) if len(state) > 1 else state[0] for state in zip(*ends, strict=True))
        return Outcome(y, finals, tuple(saved))

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        problem, form = plan.problem, plan.problem.form
        states = _states_or_zeros(problem, call)
        width = (*call.x.shape[:-1], form.width * form.directions)
        grad_y, *grad_finals = grads
        grad_weights: list[Tensor] = []
        grad_states: list[list[Tensor]] = []
        grad_dropout: list[Tensor | None] = [None] * len(call.dropout)
        groups = _groups(problem)
        outs = [from_bytes(saved[3 * i + 2], width, problem.dtype) for i in range(len(groups) - 1)]
        for position in reversed(range(len(groups))):
            first, count = groups[position]
            reserve, packed = saved[3 * position : 3 * position + 2]
            weights = _weights(call, form, first, count)
            buffer = packed.view(problem.dtype) if packed.numel() else _flat(form, count, weights)
            if buffer is None:  # flat in forward, and since then kept elsewhere by a hook on what autograd saves
                buffer = _packed(form, count, weights)
            below = outs[position - 1] if position else call.x
            x = (_with_dropout(below, call, first - 1) if position else below).contiguous()
            rows = slice(first * form.directions, (first + count) * form.directions)
            given = [grad[rows].contiguous() if grad is not None else None for grad in grad_finals]
            grad_x, to_h, to_c, to_weights = _aten._cudnn_rnn_backward(
                x, weights, len(kinds(form)), buffer,
                *_state_pair(states, form, first, count), outs[position] if position < len(outs) else y,
                grad_y, *(given + [None])[:2], *_arguments(problem, count), _sizes(call), None,
                reserve.clone(),  # cuDNN writes into it, and a graph that is retained runs backward again
                [True, True, len(states) == 2, True],
            )  # fmt: skip
            grad_weights[:0] = to_weights
            grad_states.insert(0, [to_h, to_c][: len(states)])
            if position:
                grad_dropout[first - 1] = grad_x * below
                grad_x = grad_x * call.dropout[first - 1]
            grad_y = grad_x
        to_states = [torch.cat(parts) for parts in zip(*grad_states, strict=True)] if call.states else []
        return [grad_y, *to_states, *grad_weights, *grad_dropout]


def _groups(problem: Problem) -> list[tuple[int, int]]:
    """(first layer, layers) of each call: all in one, or one by one where whorl's own dropout comes between."""
    layers = problem.form.layers
    return [(layer, 1) for layer in range(layers)] if problem.dropout else [(0, layers)]


def _weights(call: Call, form: Form, first: int, count: int) -> tuple[Tensor, ...]:
    per_layer = len(kinds(form)) * form.directions
    return call.weights[first * per_layer : (first + count) * per_layer]


def _state_pair(states: list[Tensor], form: Form, first: int, count: int) -> tuple[Tensor, Tensor | None]:
    rows = slice(first * form.directions, (first + count) * form.directions)
    return states[0][rows], states[1][rows] if len(states) == 2 else None


def _sizes(call: Call) -> list[int]:
    return call.batch_sizes.tolist() if call.batch_sizes is not None else []


def _arguments(problem: Problem, layers: int) -> tuple:
    """mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional"""
    form = problem.form
    mode = NATIVE_MODES[form.cell.fingerprint]
    return mode, form.units, form.projection, layers, False, 0.0, problem.gradient, form.directions == 2


def _flat(form: Form, layers: int, weights: Sequence[Tensor]) -> Tensor | None:
    """The buffer that `flatten_parameters` laid the weights out in, where it did: cuDNN then copies nothing."""
    storage = weights[0].untyped_storage()
    shapes = tuple(tuple(weight.shape) for weight in weights)
    size, offsets = _layout(form, layers, shapes, weights[0].dtype, weights[0].device)
    places = tuple(weight.data_ptr() - storage.data_ptr() for weight in weights)
    if places != offsets or storage.nbytes() < size * weights[0].element_size():
        return None
    return weights[0].new_empty(0).set_(storage, 0, (size,), (1,))


def _packed(form: Form, layers: int, weights: Sequence[Tensor]) -> Tensor:
    """A new buffer with the weights in cuDNN's places: what torch does with weights that are not flat, and warns of."""
    shapes = tuple(tuple(weight.shape) for weight in weights)
    size, offsets = _layout(form, layers, shapes, weights[0].dtype, weights[0].device)
    buffer, bytes_each = weights[0].new_zeros(size), weights[0].element_size()
    starts = [offset // bytes_each for offset in offsets]
    places = [buffer[start : start + w.numel()].view(w.shape) for start, w in zip(starts, weights, strict=True)]
    torch._foreach_copy_(places, [weight.detach() for weight in weights])
    return buffer


@lru_cache(maxsize=256)
def _layout(
    form: Form, layers: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
) -> tuple[int, tuple[int, ...]]:
    """The size of cuDNN's buffer in elements and the place of each weight in it in bytes, asked of cuDNN itself."""
    with torch.no_grad():
        weights = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        mode = NATIVE_MODES[form.cell.fingerprint]
        buffer = _aten._cudnn_rnn_flatten_weight(
            weights, len(kinds(form)), shapes[0][1], mode, form.units, form.projection, layers, False,
            form.directions == 2,
        )  # fmt: skip
    return buffer.numel(), tuple(weight.data_ptr() - buffer.data_ptr() for weight in weights)
