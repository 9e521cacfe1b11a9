"""The operation as two torch operators, for torch.compile and export.

They carry the layer as text, so that compile caches and exported programs outlive the process, and make problem and
plan inside, from real sizes.  What backward reads is a fixed number of byte tensors of sizes known only at run time;
the last of them is as long as the place of the engine in `ENGINES`, which is how backward knows who saved them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.fake_impl import allocate_size

from whorl.engines import ENGINES
from whorl.plan import announce, plan
from whorl.problem import Call, Form, Plan, facts, problem, slots

# Graphs that call these lie in torch's caches on disk: a schema that changes takes the next number into its name.
_library = torch.library.Library("whorl", "DEF")
_library.define(
    "recurrent_1(Tensor[] tensors, int[] layout, Tensor? batch_sizes, str form, str engine, bool gradient)"
    " -> (Tensor, Tensor[], Tensor[])"
)
_library.define(
    "recurrent_backward_1(Tensor?[] grads, Tensor[] tensors, int[] layout, Tensor? batch_sizes, Tensor y,"
    " Tensor[] saved, str form) -> Tensor[]"
)


def recurrent(call: Call, form: str, engine: str, gradient: bool) -> tuple[Tensor, ...]:
    """The output and each final state; what a compiled graph holds."""
    y, finals, _ = torch.ops.whorl.recurrent_1(call.tensors, call.layout, call.batch_sizes, form, engine, gradient)
    return (y, *finals)


@torch._disable_dynamo
def _forward(
    tensors: list[Tensor], layout: list[int], sizes: Tensor | None, form: str, engine: str, gradient: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    call = Call.of(tensors, layout, sizes)
    made = plan(form, facts(call, gradient), engine)
    if made.slow:
        announce(made)
    with torch.no_grad():  # an operator's gradient is registered below, never recorded inside
        outcome = ENGINES[made.engine].forward(made, call)
    y, finals = outcome.y.contiguous(), [final.contiguous() for final in outcome.finals]
    if not gradient:
        return y, finals, []
    mark = call.x.new_empty(list(ENGINES).index(made.engine), dtype=torch.uint8)
    free = slots(made.problem.form) - len(outcome.saved)
    empty = [call.x.new_empty(0, dtype=torch.uint8) for _ in range(free)]
    return y, finals, [*outcome.saved, *empty, mark]


def _forward_fake(
    tensors: list[Tensor], layout: list[int], sizes: Tensor | None, form: str, engine: str, gradient: bool
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    call, known = Call.of(tensors, layout, sizes), Form.from_json(form)
    x = call.x
    rows = known.layers * known.directions
    shapes = torch.library.get_ctx()._shape_env
    assert shapes is not None, "sizes known only at run time need torch.compile's or torch.export's fake tensors"

    def size() -> torch.SymInt:
        # new_dynamic_size would break the graph unless fullgraph=True: a default meant for sizes that users read.
        return allocate_size(shapes)

    batch = x.shape[1] if sizes is None else call.states[0].shape[1] if call.states else size()
    y = x.new_empty(*x.shape[:-1], known.width * known.directions)
    finals = [x.new_empty(rows, batch, known.state_width(index)) for index in range(len(known.cell.states))]
    count = slots(known) + 1 if gradient else 0
    return y, finals, [x.new_empty(size(), dtype=torch.uint8) for _ in range(count)]


@torch._disable_dynamo
def _backward(
    grads: list[Tensor | None],
    tensors: list[Tensor],
    layout: list[int],
    sizes: Tensor | None,
    y: Tensor,
    saved: list[Tensor],
    form: str,
) -> list[Tensor]:
    call = Call.of(tensors, layout, sizes)
    made = Plan(problem(form, facts(call, gradient=True)), list(ENGINES)[saved[-1].numel()])
    found = ENGINES[made.engine].backward(made, call, y, saved[:-1], grads)
    return [
        torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        if grad is None
        else grad.to(tensor.dtype).contiguous()
        for grad, tensor in zip(found, call.tensors, strict=True)
    ]


def _backward_fake(grads: Any, tensors: list[Tensor], *rest: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def _setup(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, layout, sizes, form, _, _ = inputs
    y, _, saved = output
    ctx.layout, ctx.sizes, ctx.form, ctx.count = layout, sizes, form, len(tensors)
    ctx.save_for_backward(*tensors, y, *saved)


def _differentiate(ctx: Any, grad_y: Tensor | None, grad_finals: Sequence[Tensor | None], grad_saved: Any) -> tuple:
    row, count = list(ctx.saved_tensors), ctx.count
    grads = torch.ops.whorl.recurrent_backward_1(
        [grad_y, *grad_finals], row[:count], ctx.layout, ctx.sizes, row[count], row[count + 1 :], ctx.form
    )
    return grads, None, None, None, None, None


for _name, _function, _fake in (
    ("recurrent_1", _forward, _forward_fake),
    ("recurrent_backward_1", _backward, _backward_fake),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"whorl::{_name}", _fake, lib=_library)
torch.library.register_autograd("whorl::recurrent_1", _differentiate, setup_context=_setup, lib=_library)
