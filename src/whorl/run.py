"""The one differentiable operation: a plan and its call in, the output and final states out.

The engine itself where autograd records what it does, else an `autograd.Function` around it; under torch.func its
`setup_context` form.  Derivatives beyond the first, tangents and mapped weights of an engine that autograd does not
record come from `reference`, and are announced.
"""

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from whorl.engines import ENGINES
from whorl.engines.reference import evaluate, gradients, vjp
from whorl.plan import announce, decide
from whorl.problem import Call, Plan, wants_gradient

Layout = tuple[int, int, int]


def run(made: Plan, call: Call) -> tuple[Tensor, ...]:
    """The output and each final state, differentiable in eager torch and under torch.func."""
    if made.slow:
        announce(made)
    engine = ENGINES[made.engine]
    if made.engine != "reference":  # which is plain torch, and needs no help under any transform
        if torch._C._are_functorch_transforms_active():
            arguments = (made, call.layout, call.batch_sizes, *call.tensors)
            return _Transformed.apply(*arguments)[: _count_outputs(made)]
        if torch.autograd.forward_ad._current_level >= 0 or (made.problem.gradient and not engine.recorded):
            # What Function.apply does outside torch.func, without its 33 us of binding a signature.
            return super(torch.autograd.Function, _Eager).apply(made, call, *call.tensors)
    outcome = engine.forward(made, call)
    return (outcome.y, *outcome.finals)


class _Eager(torch.autograd.Function):
    """The operation outside transforms."""

    @staticmethod
    def forward(ctx: Any, made: Plan, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        outcome = ENGINES[made.engine].forward(made, call)
        outputs = (outcome.y, *outcome.finals)
        ctx.structure, ctx.context = (made, call.layout, call.batch_sizes), copy_context()
        ctx.set_materialize_grads(False)
        # Not the final states: users change them in place before backward, as torch lets them.
        ctx.save_for_backward(*tensors, outcome.y, *outcome.saved)
        if torch.autograd.forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *_backward(ctx, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        return _push(_outputs(*ctx.structure), ctx.saved_tensors, tangents[2:])


class _Transformed(torch.autograd.Function):
    """The operation under torch.func: what is saved is an output too, as its transforms ask."""

    @staticmethod
    def forward(made: Plan, layout: Layout, sizes: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        outcome = ENGINES[made.engine].forward(made, Call.of(tensors, layout, sizes))
        return (outcome.y, *outcome.finals, *outcome.saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        made, layout, sizes, *tensors = inputs
        saved = outputs[_count_outputs(made) :]
        ctx.structure, ctx.context, ctx.count_saved = (made, layout, sizes), copy_context(), len(saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, outputs[0], *saved)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grads = grads[: _count_outputs(ctx.structure[0])]
        return (None, None, None, *_backward(ctx, grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return _push(_outputs(*ctx.structure), ctx.saved_tensors, tangents[3:]) + (None,) * ctx.count_saved

    @staticmethod
    def vmap(info: Any, in_dims: tuple, made: Plan, layout: Layout, sizes: Tensor | None, *tensors: Tensor) -> tuple:
        dims = in_dims[3:]
        weights = dims[1 + layout[0] : 1 + layout[0] + layout[1]]
        if sizes is None and all(dim is None for dim in weights):
            return _folded(info.batch_size, dims, made, layout, tensors)
        announce(made, f"{made.problem.form.cell.name} runs on `reference` under torch.vmap, a loop in Python")
        outputs = torch.vmap(_outputs(made, layout, sizes), dims, randomness="different")(*tensors)
        return outputs, (0,) * len(outputs)


class _Backward(torch.autograd.Function):
    """The backward pass as an operation of its own, for gradients of gradients.

    Takes the plan, the call's layout and batch sizes, the context of settings in which the call was made (autograd's
    threads have another), the number of gradients given, and then in one row those gradients, the call's tensors, the
    output and what was saved.
    """

    @staticmethod
    def forward(
        made: Plan, layout: Layout, sizes: Tensor | None, context: Context, count: int, *row: Tensor
    ) -> tuple[Tensor, ...]:
        call, y, saved = _kept(layout, sizes, row[count:])
        grads = ENGINES[made.engine].backward(made, call, y, saved, row[:count])
        pairs = zip(grads, call.tensors, strict=True)
        return tuple(torch.zeros_like(tensor) if grad is None else grad.to(tensor.dtype) for grad, tensor in pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        made, layout, sizes, ctx.context, count, *row = inputs
        kept = row[: count + len(outputs)]  # the output and what was saved follow from the call: constants here
        ctx.structure, ctx.count_rest = (made, layout, sizes, count), len(row) - len(kept)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = ctx.structure[0]
        name = made.problem.form.cell.name
        ctx.context.run(announce, made, f"{name} runs on `reference` for a double backward, a loop in Python")
        _, pull = vjp(_gradients(*ctx.structure), *ctx.saved_tensors)
        return (None,) * 5 + pull(grads) + (None,) * ctx.count_rest

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        row = ctx.saved_tensors
        return _push(_gradients(*ctx.structure), row, tangents[5 : 5 + len(row)])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, made: Plan, layout: Layout, sizes: Tensor | None, context: Context, count: int,
        *row: Tensor,
    ) -> tuple:  # fmt: skip
        name = made.problem.form.cell.name
        context.run(announce, made, f"the backward of {name} runs on `reference` under torch.vmap, a loop in Python")
        kept = count + 1 + sum(layout)
        outputs = torch.vmap(_gradients(made, layout, sizes, count), in_dims[5 : 5 + kept])(*row[:kept])
        return outputs, (0,) * len(outputs)


def _count_outputs(made: Plan) -> int:
    return 1 + len(made.problem.form.cell.states)


def _kept(layout: Layout, sizes: Tensor | None, row: Sequence[Tensor]) -> tuple[Call, Tensor, Sequence[Tensor]]:
    """The call, its output and what else forward saved, from the row in which all are kept for backward."""
    first = 1 + sum(layout)
    return Call.of(row[:first], layout, sizes), row[first], row[first + 1 :]


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """The gradient of each of the call's tensors; differentiable where grad mode is on, as create_graph has it."""
    (made, layout, sizes), row = ctx.structure, ctx.saved_tensors
    call, y, saved = _kept(layout, sizes, row)
    if all(grad is None for grad in grads):
        return [None] * len(call.tensors)
    if not torch.is_grad_enabled():
        return ENGINES[made.engine].backward(made, call, y, saved, grads)
    form, (grad_y, *grad_finals) = made.problem.form, grads
    rows = (form.layers * form.directions, made.problem.batch)
    given = [torch.zeros_like(y) if grad_y is None else grad_y]
    for index, grad in enumerate(grad_finals):
        given.append(call.x.new_zeros(*rows, form.state_width(index)) if grad is None else grad)
    return _Backward.apply(made, layout, sizes, ctx.context, len(given), *given, *row)


def _folded(many: int, dims: Sequence[int | None], made: Plan, layout: Layout, tensors: Sequence[Tensor]) -> tuple:
    """The mapped axis folded into the batch: the same weights run all of it in one call."""

    def fold(tensor: Tensor, dim: int | None) -> Tensor:
        mapped = tensor.movedim(dim, 1) if dim is not None else tensor.unsqueeze(1).expand(-1, many, -1, -1)
        return mapped.flatten(1, 2)

    call = Call.of(tensors, layout, None)
    where = Call.of(dims, layout, None)  # type: ignore[arg-type]
    folded = call._replace(
        x=fold(call.x, where.x),  # type: ignore[arg-type]
        states=tuple(map(fold, call.states, where.states)),  # type: ignore[arg-type]
        dropout=tuple(map(fold, call.dropout, where.dropout)),  # type: ignore[arg-type]
    )
    problem = replace(made.problem, batch=many * made.problem.batch, gradient=wants_gradient(folded.tensors))
    outputs = run(decide(problem, made.asked), folded)
    return tuple(out.unflatten(1, (many, made.problem.batch)) for out in outputs), (1,) * len(outputs)


def _outputs(made: Plan, layout: Layout, sizes: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
    """The operation as a function of the call's tensors, in plain torch."""
    return lambda *tensors: tuple(evaluate(made.problem.form, Call.of(tensors, layout, sizes)))


def _gradients(made: Plan, layout: Layout, sizes: Tensor | None, count: int) -> Callable[..., tuple[Tensor, ...]]:
    """Its backward as a function of the gradients given and the call's tensors, in plain torch."""
    form = made.problem.form
    return lambda *row: tuple(gradients(form, Call.of(row[count:], layout, sizes), row[:count]))


def _push(
    function: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The tangent of `function`, as the gradient of its gradient, which is linear in what it is given."""
    outputs, pull = vjp(function, *at)
    _, push = vjp(lambda *given: pull(given), *(torch.zeros_like(out) for out in outputs))
    return push(
        tuple(torch.zeros_like(a) if tangent is None else tangent for a, tangent in zip(at, tangents, strict=True))
    )
