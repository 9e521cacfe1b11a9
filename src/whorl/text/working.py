"""The copy of a model's parameters that a step of SGD in bfloat16 works on.

Autocast rounds every weight to bfloat16 at every step, widens every gradient and, where an axis is no multiple of 16
bytes, multiplies slowly.  Here the copy is what forward and backward read, its gradients are what they are, and one
pass moves the float32 parameter and its copy together.  The numbers are those of autocast.

The embedding has no copy: a step reads the rows of its window, and moves those alone.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.layer import Layer
from whorl.text import passes
from whorl.text.group import Group
from whorl.text.model import LAYERS, Architecture, LanguageModel, States
from whorl.text.passes import Moved, Order
from whorl.text.recipe import Recipe

_MULTIPLE = 8  # numbers of two bytes in 16, which a tensor core's products read at a time
_SMALL = 1 << 16  # numbers of a gradient that is exchanged with the last ones, though it is there before
# Of these cells, with these options, a unit whose weights are all zero stays zero, as do the gradients of its weights
# (those of layer norm, whose means do not count it, have some that nobody reads).
_PADDED = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_PADDED_OPTIONS = {
    "bias", "recurrent_dropout", "recurrent_dropout_mode", "input_dropout", "weight_drop", "zoneout", "peephole",
    "coupled", "clip", "reset_after", "memory", "layer_norm",
}  # fmt: skip


def works(model: LanguageModel, recipe: Recipe) -> bool:
    """Whether a recipe's steps are taken on a copy: those of plain SGD under autocast."""
    plain = recipe.optimizer == "sgd" and not recipe.weight_decay and recipe.precision == "bf16"
    short = recipe.batch * recipe.time <= passes.MOST_ROWS
    whole = recipe.accumulate == 1 and not model.architecture.tied
    return plain and short and whole and model.head.bias.dtype == torch.float32


class Working:
    """A model's parameters in another dtype, and a step of SGD on both.

    On a GPU units and embedding are made multiples of 8 with units that are zero and stay so, where the cell and its
    options allow it. Beside other processes each layer is called apart, so that its gradients travel while those of
    the layer below are computed.

    Args:
        model: with float parameters, which are always those of the last step.
        group: of processes that take the step together.
        dtype: of the copy.
        padded: whether axes are widened.
    """

    def __init__(
        self, model: LanguageModel, group: Group, dtype: torch.dtype = torch.bfloat16, padded: bool | None = None
    ) -> None:
        self.model, self.group, self.dtype = model, group, dtype
        own = model.architecture
        padded = model.device.type == "cuda" if padded is None else padded
        wide = _widened(own) if padded and _can_widen(model) else own
        self.units, self.embedding = (own.units, wide.units), wide.embedding
        ours = isinstance(model.recurrent, Layer)
        self.recurrent: Any
        if ours and (group.joined or wide is not own):
            with torch.device("meta"):
                self.recurrent = _Apart(wide) if group.joined else wide.layer()
            for each in self.recurrent.modules():
                if isinstance(each, Layer) and wide.units > own.units:
                    each.pad_from(own.units)
            self.recurrent.to_empty(device=model.device)
        else:
            self.recurrent = copy.deepcopy(model.recurrent)
        self.recurrent.to(dtype).requires_grad_()
        self.recurrent.train(model.training)
        tokens, self.width = model.head.weight.shape
        columns = self.width + 1  # the last one holds the bias: its gradient comes with that of the weight
        columns = _up(columns) if padded else columns
        self.head = nn.Parameter(torch.empty(tokens, columns, device=model.device, dtype=dtype))
        self._one = torch.zeros(columns, device=model.device, dtype=dtype)
        self._one[self.width] = 1
        self._copies = [*self.recurrent.parameters(), self.head]
        self._moved = list(self._pairs())
        self._first = {of: each for each, of in reversed(self._moved)}  # of each copy, its first part
        for parameter in model.parameters():
            group.same(parameter.detach())
        self.refresh()
        self._beside = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._early = [*self._before_the_end()]
        self._exchanges: list[Callable[[], None]] = []  # of these gradients, that are on their way
        if group.joined:
            for made in [self._copies[place] for place in self._early]:
                if made is not self.head or self._beside is None:
                    made.register_post_accumulate_grad_hook(self._exchange)

    def _before_the_end(self) -> Iterator[int]:
        """Which of `_copies` have a gradient while backward still runs, of those that are exchanged alone."""
        for place, (name, made) in enumerate([*self.recurrent.named_parameters(), ("head", self.head)]):
            above = name == "head" or (isinstance(self.recurrent, _Apart) and not name.startswith("layers.0."))
            if above and (made.numel() > _SMALL or not self.group.joined):
                yield place

    def refresh(self) -> None:
        """Make the copies those of the parameters."""
        with torch.no_grad():
            for each in self._copies:
                each.zero_()
        for each, _ in self._moved:
            each.copy.copy_(each.own)

    def learn(
        self, inputs: Tensor, targets: Tensor, states: States | None, rate: Tensor, recipe: Recipe
    ) -> tuple[Tensor, States]:
        """Train on a window: its loss, and the states after it.

        Args:
            inputs, targets: token numbers [time, batch].
            states: those before the window, of the model or as this gave them, with widened units; None: zeros.
            rate: [], float32; it is scaled as the gradients are clipped.
            recipe: how gradients are clipped.
        """
        found, sums = self._backward(inputs, targets, states), []
        with self._aside():
            early = self._arrived()
            if recipe.clip and early:
                sums.append((self._squares(early, self._early), 1))
        self._join()
        summed = passes.sum_rows(found.to_rows, found.order, self._embedding.shape[1], self._embedding.dtype)
        if self.group.size > 1:
            summed = summed / self.group.size
        if recipe.clip:
            rows, share = (found.to_rows, self.group.size**2) if recipe.clip_rows else (summed, 1)
            sums.append((passes.squares([rows]), share))
        found.finish()
        grads = [_gradient(parameter) for parameter in self._copies]
        if recipe.clip:
            late = [of for of in range(len(grads)) if of not in self._early]
            passes.clip(rate, recipe.clip, [*sums, (self._squares([grads[of] for of in late], late), 1)])
        with torch.no_grad():
            passes.move_rows(self._embedding, found.tokens, summed, found.order, rate)
            passes.move([each for each, _ in self._moved], [each.within(grads[of]) for each, of in self._moved], rate)
        return found.loss, found.states

    def gradients(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss on a window, and the gradient of each parameter of the model by its name, which stays as it is."""
        made = self._backward(inputs, targets, None)
        self._arrived()
        self._join()
        made.finish()
        grads = [_gradient(parameter) for parameter in self._copies]
        table = torch.zeros_like(self._embedding)
        table.index_add_(0, made.tokens, made.to_rows[:, : table.shape[1]].to(table.dtype) / self.group.size)
        own = {each.own.data_ptr(): each.within(grads[of]) for each, of in self._moved}
        found = {"loss": made.loss}
        for name, parameter in self.model.named_parameters():
            found[name] = own.get(parameter.data_ptr(), table).reshape(parameter.shape)
        return found

    def _backward(self, inputs: Tensor, targets: Tensor, states: States | None) -> "_Found":
        """What a window gives; the gradients of the copies are theirs."""
        for parameter in self._copies:
            parameter.grad = None
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(inputs.device))
        with self._aside():
            tokens = self.group.joint(inputs.flatten(), 0)
            order = passes.order_rows(tokens)
        rows = passes.take(self._embedding, inputs, self.embedding, self.dtype).requires_grad_()
        loss, after = self._loss(rows, targets, states)
        loss.backward()
        assert rows.grad is not None
        to_rows, finish = self._exchange_late(rows.grad.flatten(0, 1))
        return _Found(loss.detach(), after, tokens, order, to_rows, finish)

    def _squares(self, grads: Sequence[Tensor], places: Sequence[int]) -> Tensor:
        """What `passes.squares` gives of the gradients of some of `_copies`: of padding layer norm has some too."""
        return passes.squares([self._first[of].rows_within(grad) for grad, of in zip(grads, places, strict=True)])

    def _arrived(self) -> list[Tensor]:
        """The early gradients; the current stream waits for their exchange."""
        for finish in self._exchanges:
            finish()
        self._exchanges.clear()
        return [_gradient(self._copies[place]) for place in self._early]

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Work that a step needs later, on a GPU beside what the step computes meanwhile."""
        if self._beside is None:
            yield
            return
        with torch.cuda.stream(self._beside):
            yield

    def _join(self) -> None:
        """Wait for what runs beside."""
        if self._beside is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self._beside)

    @property
    def _embedding(self) -> Tensor:
        return self.model.embedding.weight.detach()

    def _loss(self, rows: Tensor, targets: Tensor, states: States | None) -> tuple[Tensor, States]:
        own, wide = self.units
        dropout = self.model.architecture.dropout if self.model.training else 0.0
        given: Any = states
        if states is not None:
            short = wide > own and states[0].shape[-1] == own
            given = tuple((F.pad(state, (0, wide - own)) if short else state).to(self.dtype) for state in states)
            given = given[0] if len(given) == 1 else given
        outputs, finals = self.recurrent(F.dropout(rows, dropout), given)
        finals = finals if isinstance(finals, tuple) else (finals,)
        outputs = F.dropout(outputs, dropout)
        x = _WithOne.apply(outputs, self._one, self.width).flatten(0, 1)
        logits = x @ self.head.t() if self._beside is None else _Product.apply(x, self.head, self._beside, self._made)
        loss = passes.cross_entropy(logits, targets.flatten())
        return loss, tuple(state.detach() for state in finals)

    def _pairs(self) -> Iterator[tuple[Moved, int]]:
        """Each parameter beside its copy, and of which of `_copies` that is a part."""
        own, wide = self.units
        apart = isinstance(self.recurrent, _Apart)
        given = {_apart(name) if apart else name: made for name, made in self.model.recurrent.named_parameters()}
        for place, (name, made) in enumerate(self.recurrent.named_parameters()):
            parameter = given[name].detach()
            blocks = len(parameter) // own if wide > own else 1
            both = (parameter, made.detach())
            rows = [1 if tensor.dim() == 1 else len(tensor) // blocks for tensor in both]
            of, to = (tensor.view(blocks, count, -1) for tensor, count in zip(both, rows, strict=True))
            yield Moved(of, to[:, : of.shape[1], : of.shape[2]]), place
        weight, bias, head = self.model.head.weight.detach(), self.model.head.bias.detach(), self.head.detach()
        yield Moved(weight.unsqueeze(0), head[None, :, : self.width]), len(self._copies) - 1
        yield Moved(bias.view(1, -1, 1), head[None, :, self.width : self.width + 1], self.width), len(self._copies) - 1

    def _made(self) -> None:
        """The head's gradient is there, in the order of the stream beside."""
        if self.group.joined and len(self._copies) - 1 in self._early:
            self._exchange(self.head)

    def _exchange(self, parameter: Tensor) -> None:
        """Send a gradient on its way."""
        assert parameter.grad is not None
        self._exchanges.append(self.group.averaging(parameter.grad))

    def _exchange_late(self, to_rows: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The embedding's rows of all processes, and what waits for the other gradients, which travel together."""
        if not self.group.joined:
            return to_rows, lambda: None
        late = [made for place, made in enumerate(self._copies) if place not in self._early]
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(to_rows.device))
        with self._aside():
            together = torch.cat([_gradient(made).flatten() for made in late])
        to_rows = self.group.joint(to_rows, 0)  # ahead of the last exchange: there is work on it
        with self._aside():
            way = self.group.averaging(together)

        def finish() -> None:
            way()
            for made, part in zip(late, together.split([made.numel() for made in late]), strict=True):
                made.grad = part.view_as(made)

        return to_rows, finish


class _Found(NamedTuple):
    """What came of a window.

    Attributes:
        states: after it.
        tokens, order: of the embedding's rows that were read, in all processes; they are there after `_join`.
        to_rows: the gradients of these rows.
        finish: makes the late gradients of the copies those of all processes.
    """

    loss: Tensor
    states: States
    tokens: Tensor
    order: Order
    to_rows: Tensor
    finish: Callable[[], None]


class _Product(torch.autograd.Function):
    """x @ weight.T, of which the weight's gradient is computed on another stream and put in its place.

    The layers' backward leaves some multiprocessors idle. Who reads the gradient waits for the stream; `made` is called
    in its order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beside: torch.cuda.Stream, made: Callable[[], None]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.beside, ctx.weight, ctx.made = beside, weight, made
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        here = torch.cuda.current_stream(x.device)
        ctx.beside.wait_stream(here)
        with torch.cuda.stream(ctx.beside):
            ctx.weight.grad = grads[0].t() @ x
            ctx.made()
        for used in (grads[0], x):
            used.record_stream(ctx.beside)
        ctx.weight.grad.record_stream(here)
        return grads[0] @ weight, None, None, None


class _WithOne(torch.autograd.Function):
    """x with a one at a place behind its own numbers, and zeros up to a length.

    What x has beyond its own numbers is zero, and its gradient stays zero: it is made so in the gradient that comes,
    which the product behind has made for this alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, one: Tensor, place: int) -> Tensor:
        ctx.have, ctx.place = x.shape[-1], place
        return (x if ctx.have == len(one) else F.pad(x, (0, len(one) - ctx.have))) + one

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grads[0].select(-1, ctx.place).zero_()
        return grads[0][..., : ctx.have], None, None


class _Apart(nn.Module):
    """The recurrent layers of an architecture, a module for each."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        single = [replace(architecture, layers=1)] * architecture.layers
        width = architecture.options.get("proj_size") or architecture.units
        single[1:] = [replace(each, embedding=width) for each in single[1:]]
        self.layers = nn.ModuleList(each.layer() for each in single)
        self.dropout = architecture.dropout

    def forward(self, x: Tensor, states: Any) -> tuple[Tensor, Any]:
        finals = []
        for place, layer in enumerate(self.layers):
            x = F.dropout(x, self.dropout, self.training) if place else x
            given = states
            if isinstance(states, tuple):
                given = tuple(state[place : place + 1] for state in states)
            elif states is not None:
                given = states[place : place + 1]
            x, final = layer(x, given)
            finals.append(final)
        if isinstance(finals[0], tuple):
            return x, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))
        return x, torch.cat(finals)


def _apart(name: str) -> str:
    """The name of a layer's parameter among those of `_Apart`: layers.2.bias_hh_l0 for bias_hh_l2."""
    which, layer = name.rsplit("_l", 1)
    return f"layers.{layer}.{which}_l0"


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.contiguous()


def _up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE


def _widened(own: Architecture) -> Architecture:
    return replace(own, units=_up(own.units), embedding=_up(own.embedding))


def _can_widen(model: LanguageModel) -> bool:
    own = model.architecture
    ours = isinstance(model.recurrent, Layer) and own.cell in LAYERS
    return ours and own.cell in _PADDED and set(own.options) <= _PADDED_OPTIONS
