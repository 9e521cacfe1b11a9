"""The one differentiable operation: a plan and its call in, the output and final states out.

The engine itself where autograd records what it does, else an `autograd.Function` around it; under torch.func its
`setup_context` form.  Derivatives beyond the first, tangents and mapped weights of an engine that autograd does not
record come from `reference`, and are announced.
"""

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from whorl.engines import ENGINES
from whorl.engines.reference import evaluate, gradients, vjp
from whorl.plan import announce, decide
from whorl.problem import PLAIN, Call, Marks, Outcome, Plan, as_written, wants_gradient
from whorl.weights import kinds

Layout = tuple[int, ...]
Row = Sequence[Any]
"""Tensors, and None where there is none."""
_MARKS = len(Marks._fields)


def run(made: Plan, call: Call) -> tuple[Tensor, ...]:
    """The output, each final state, and each state of each step where they are wanted.

    Differentiable in eager torch and under torch.func.
    """
    if made.slow:
        announce(made)
    engine = ENGINES[made.engine]
    recompute = made.problem.form.memory == "recompute" and made.problem.gradient
    if made.engine != "reference" or recompute:  # `reference` is plain torch, and needs no help under any transform
        transformed = torch._C._are_functorch_transforms_active()
        forward_mode = torch.autograd.forward_ad._current_level >= 0
        if not (transformed or forward_mode or recompute):
            outputs = engine.at_once(made, call, _by_python)
            if outputs:
                return tuple(outputs)
        if transformed:
            return _Transformed.apply(made, call.layout, *call.marks, *call.tensors)[: _count_outputs(made)]
        if not engine.recorded:
            call = _readable(call)
        if forward_mode or recompute or (made.problem.gradient and not engine.recorded):
            # Kernels run by the time that torch has made the operation, which takes the host as long as some of them.
            outcome = None if forward_mode else _unrecorded(made, call)
            # What Function.apply does outside torch.func, without its 33 us of binding a signature.
            return super(torch.autograd.Function, _Eager).apply(made, call, outcome, *call.tensors)
    return engine.forward(made, call).outputs


def _readable(call: Call) -> Call:
    """The call on tensors that kernels can read."""
    tensors = call.tensors
    written = as_written(tensors)
    return call if written is tensors else Call.of(written, call.layout, call.marks)


def forward(made: Plan, call: Call) -> Outcome:
    """The engine's forward, as the layer's `memory` has it: what is computed again for backward is not saved now."""
    if made.problem.form.memory == "recompute":
        made = made.saving_nothing
    return ENGINES[made.engine].forward(made, call)


def number(made: Plan, call: Call) -> int:
    """By which C++ knows forward and backward of a call like this; -1 where they go through Python.

    It waits for the compiler that makes the functions by which C++ does it, once on a machine.
    """
    if made.problem.form.memory == "recompute" and made.problem.gradient:
        return -1
    return ENGINES[made.engine].number(made, call, _by_python, wait=True)


def backward(made: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Row) -> Row:
    """The engine's backward."""
    engine = ENGINES[made.engine]
    if not engine.recorded:
        grads = as_written(grads)
    if made.problem.form.memory == "recompute" and made.engine != "reference":  # which computes all again by itself
        saved = engine.forward(made, call).saved
    return engine.backward(made, call, y, saved, grads)


def _unrecorded(made: Plan, call: Call) -> Outcome:
    """What forward gives, nothing of which autograd records; `torch.no_grad` does the same in 2 us more."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return forward(made, call)
    finally:
        torch._C._set_grad_enabled(before)


class _Eager(torch.autograd.Function):
    """The operation outside transforms; of what has tangents the outcome is computed inside, where they do not flow."""

    @staticmethod
    def forward(ctx: Any, made: Plan, call: Call, outcome: Outcome | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        outcome = outcome or forward(made, call)
        ctx.structure, ctx.context = (made, call.layout), copy_context()
        ctx.set_materialize_grads(False)
        # Not the final states: users change them in place before backward, as torch lets them.
        ctx.save_for_backward(*call.marks, *tensors, outcome.y, *outcome.saved)
        if torch.autograd.forward_ad._current_level >= 0:
            ctx.save_for_forward(*call.marks, *tensors)
        return outcome.outputs

    @staticmethod
    @torch._disable_dynamo  # which on a CPU would trace what runs inside a compiled function's `backward()`
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, None, *_backward(ctx, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        marks, tensors = ctx.saved_tensors[:_MARKS], ctx.saved_tensors[_MARKS:]
        made, layout = ctx.structure
        return _push(_outputs(made, layout, marks), tensors, tangents[3:])


class _Transformed(torch.autograd.Function):
    """The operation under torch.func: what is saved is an output too, as its transforms ask.

    Takes the plan, the call's layout, and in one row its marks and tensors.
    """

    @staticmethod
    def forward(made: Plan, layout: Layout, *row: Any) -> tuple[Tensor, ...]:
        outcome = forward(made, _readable(_call(layout, row)))
        return (*outcome.outputs, *outcome.saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        made, layout, *row = inputs
        saved = outputs[_count_outputs(made) :]
        ctx.structure, ctx.context, ctx.count_saved = (made, layout), copy_context(), len(saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*row, outputs[0], *saved)
        ctx.save_for_forward(*row)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = grads[: _count_outputs(ctx.structure[0])]
        return (None,) * (2 + _MARKS) + tuple(_backward(ctx, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        marks, tensors = ctx.saved_tensors[:_MARKS], ctx.saved_tensors[_MARKS:]
        made, layout = ctx.structure
        pushed = _push(_outputs(made, layout, marks), tensors, tangents[2 + _MARKS :])
        return pushed + (None,) * ctx.count_saved

    @staticmethod
    def vmap(info: Any, in_dims: tuple, made: Plan, layout: Layout, *row: Tensor | None) -> tuple:
        dims = in_dims[2:]
        call, where = _call(layout, row), _call(layout, dims)
        plain = not made.problem.extras and call.batch_sizes is None
        if plain and all(dim is None for dim in where.weights):
            return _folded(info.batch_size, where, made, call)
        if made.engine != "reference":
            announce(made, f"{made.problem.form.cell.name} runs on `reference` under torch.vmap, a loop in Python")
        present = [index for index, tensor in enumerate(row) if tensor is not None]

        def evaluated(*some: Any) -> tuple[Tensor, ...]:
            whole: list[Any] = list(row)
            for index, tensor in zip(present, some, strict=True):
                whole[index] = tensor
            return _outputs(made, layout, whole[:_MARKS])(*whole[_MARKS:])

        some = [row[index] for index in present]
        outputs = torch.vmap(evaluated, tuple(dims[index] for index in present), randomness="different")(*some)
        return outputs, (0,) * len(outputs)


class _Backward(torch.autograd.Function):
    """The backward pass as an operation of its own, for gradients of gradients.

    Takes the plan, the call's layout, the context of settings in which the call was made (autograd's threads have
    another), the number of gradients given, and then in one row the call's marks, those gradients, the call's tensors,
    the output and what was saved.
    """

    @staticmethod
    def forward(made: Plan, layout: Layout, context: Context, count: int, *row: Tensor) -> tuple[Tensor, ...]:
        marks, given, kept = row[:_MARKS], row[_MARKS : _MARKS + count], row[_MARKS + count :]
        call, y, saved = _kept(layout, (*marks, *kept))
        grads = backward(made, _readable(call), y, saved, given)
        pairs = zip(grads, call.tensors, strict=True)
        return tuple(torch.zeros_like(tensor) if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        made, layout, ctx.context, count, *row = inputs
        # the output and what was saved follow from the call: constants here
        kept = row[: _MARKS + count + len(outputs)]
        ctx.structure, ctx.count, ctx.count_rest = (made, layout), count, len(row) - len(kept)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    @torch._disable_dynamo
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made, layout = ctx.structure
        name, row = made.problem.form.cell.name, ctx.saved_tensors
        if made.engine != "reference":
            ctx.context.run(announce, made, f"{name} runs on `reference` for a double backward, a loop in Python")
        _, pull = vjp(_gradients(made, layout, row[:_MARKS], ctx.count), *row[_MARKS:])
        return (None,) * (4 + _MARKS) + pull(grads) + (None,) * ctx.count_rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        marks, row = ctx.saved_tensors[:_MARKS], ctx.saved_tensors[_MARKS:]
        first = 4 + _MARKS
        made, layout = ctx.structure
        return _push(_gradients(made, layout, marks, ctx.count), row, tangents[first : first + len(row)])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, made: Plan, layout: Layout, context: Context, count: int, *row: Tensor | None
    ) -> tuple:
        name = made.problem.form.cell.name
        if made.engine != "reference":
            title = f"the backward of {name} runs on `reference` under torch.vmap, a loop in Python"
            context.run(announce, made, title)
        kept, dims = _MARKS + count + 1 + sum(layout), in_dims[4:]
        present = [index for index in range(kept) if row[index] is not None]

        def evaluated(*some: Any) -> tuple[Tensor, ...]:
            whole: list[Any] = list(row[:kept])
            for index, tensor in zip(present, some, strict=True):
                whole[index] = tensor
            return _gradients(made, layout, whole[:_MARKS], count)(*whole[_MARKS:])

        some = [row[index] for index in present]
        outputs = torch.vmap(evaluated, tuple(dims[index] for index in present))(*some)
        return outputs, (0,) * len(outputs)


def _count_outputs(made: Plan) -> int:
    return 1 + len(made.problem.form.cell.states) * (1 + made.problem.sequences)


def _call(layout: Layout, row: Sequence[Any]) -> Call:
    """The call of a row that begins with its marks and its tensors."""
    return Call.of(row[_MARKS:], layout, row[:_MARKS])


def _kept(layout: Layout, row: Row) -> tuple[Call, Tensor, Sequence[Tensor]]:
    """The call, its output and what else forward saved, from the row in which all are kept for backward."""
    first = _MARKS + 1 + sum(layout)
    return _call(layout, row), row[first], row[first + 1 :]


def _backward(ctx: Any, grads: Row) -> Row:
    """The gradient of each of the call's tensors; differentiable where grad mode is on, as create_graph has it."""
    (made, layout), row = ctx.structure, ctx.saved_tensors
    call, y, saved = _kept(layout, row)
    batched = [torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads if grad is not None]
    if not batched:
        return [None] * len(call.tensors)
    if True in batched:
        # torch.autograd.grad(is_grads_batched=True): many gradients in one tensor, which has no memory to read.
        title = f"the backward of {made.problem.form.cell.name} runs on `reference` for batched gradients"
        ctx.context.run(announce, made, title)
        return gradients(made.problem.form, call, grads, made.problem.sequences)
    if not torch.is_grad_enabled():
        return backward(made, call, y, saved, grads)
    form, states = made.problem.form, len(made.problem.form.cell.states)
    sequences = [(*y.shape[:-1], form.state_width(index) * form.directions) for index in range(states)]
    shapes = [y.shape, *form.state_shapes(made.problem.batch), *sequences]
    given = [
        y.new_zeros(shape) if grad is None else grad for grad, shape in zip(grads, shapes[: len(grads)], strict=True)
    ]
    return _Backward.apply(made, layout, ctx.context, len(given), *row[:_MARKS], *given, *row[_MARKS:])


class _Kept(NamedTuple):
    """What `_backward` reads of a context, of a call that autograd keeps elsewhere."""

    structure: tuple[Plan, Layout]
    saved_tensors: Row
    context: Context


@torch._disable_dynamo
def _by_python(made: Plan, grads: Row, row: Row) -> Row:
    """`_backward` of a plain call that an engine ran at once.

    Args:
        row: the call's marks, its tensors, the output and what else forward saved.
    """
    problem, form = made.problem, made.problem.form
    loops, names = form.layers * form.directions, {"drawn": "seed"}
    named = {names.get(name, name) for name in problem.extras}
    there = [name for name in PLAIN._fields if name in named]
    states, weights = len(form.cell.states) * problem.initial, loops * len(kinds(form))
    dropout, noise = (form.layers - 1) * problem.dropout, loops * (2 + len(form.cell.states))
    layout = (states, weights, dropout, 0, 0, noise * ("dropout_masks" in problem.extras))
    marks = PLAIN._replace(**dict(zip(there, row, strict=False)))
    kept = (*marks, *row[len(there) :])
    return _backward(_Kept((made, layout), kept, copy_context()), grads)[: 1 + states + weights]


def _folded(many: int, where: Call, made: Plan, call: Call) -> tuple:
    """The mapped axis folded into the batch: the same weights run all of it in one call.

    Args:
        where: the call with the mapped axis of each tensor in its place.
    """

    def fold(tensor: Tensor, dim: Any) -> Tensor:
        mapped = tensor.movedim(dim, 1) if dim is not None else tensor.unsqueeze(1).expand(-1, many, -1, -1)
        return mapped.flatten(1, 2)

    folded = call._replace(
        x=fold(call.x, where.x),
        states=tuple(map(fold, call.states, where.states)),
        dropout=tuple(map(fold, call.dropout, where.dropout)),
    )
    problem = replace(made.problem, batch=many * made.problem.batch, gradient=wants_gradient(folded.tensors))
    outputs = run(decide(problem, made.asked), folded)
    return tuple(out.unflatten(1, (many, made.problem.batch)) for out in outputs), (1,) * len(outputs)


def _outputs(made: Plan, layout: Layout, marks: Row) -> Callable[..., tuple[Tensor, ...]]:
    """The operation as a function of the call's tensors, in plain torch."""
    form, sequences = made.problem.form, made.problem.sequences
    return lambda *tensors: tuple(evaluate(form, Call.of(tensors, layout, marks), sequences))


def _gradients(made: Plan, layout: Layout, marks: Row, count: int) -> Callable[..., tuple[Tensor, ...]]:
    """Its backward as a function of the gradients given and the call's tensors, in plain torch."""
    form, sequences = made.problem.form, made.problem.sequences
    return lambda *row: tuple(gradients(form, Call.of(row[count:], layout, marks), row[:count], sequences))


def _push(
    function: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The tangent of `function`, as the gradient of its gradient, which is linear in what it is given."""
    outputs, pull = vjp(function, *at)
    _, push = vjp(lambda *given: pull(given), *(torch.zeros_like(out) for out in outputs))
    return push(
        tuple(torch.zeros_like(a) if tangent is None else tangent for a, tangent in zip(at, tangents, strict=True))
    )
