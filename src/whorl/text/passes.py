"""What a training step does beside its products and its layers, each in one pass over memory.

On a GPU kernels of `text/kernels`, elsewhere plain torch, which says what they mean.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.engines.cuda import store
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.launch import Kernel, loaded
from whorl.engines.cuda.tiling import Chip

_KERNELS = Path(__file__).parent / "kernels"
_THREADS = {"loss": 512, "loss_backward": 512, "clip": 512}
_LAYOUTS = {
    "loss": "4Qq", "loss_backward": "5Q2q", "take": "3Q2q", "order_rows": "4Qq", "sum_rows": "5Q2q", "move_rows": "5Qq",
    "move": "320QQ", "squares": "160QQ", "clip": "4Q8qQd",
}  # fmt: skip
_AT_ONCE = 40  # parameters of one launch of move.cu
_BLOCKS = 528  # of each of them: four on each multiprocessor of an H200
_FEW_NUMBERS, _FEW_BLOCKS = 1 << 14, 8  # and of those that are no longer, in a launch of their own
_MOST_NUMBERS = (1 << 32) - _BLOCKS * 256  # of a tensor of squares.cu, whose threads go so far past its end
_SUMS = 4  # of squares that clip.cu adds
MOST_ROWS = 1 << 15  # of `order_rows`, whose blocks read all of them


def runs_kernels(device: torch.device) -> bool:
    """Whether the kernels run on a device: it is a GPU, and they can be compiled."""
    return device.type == "cuda" and missing() is None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all rows in nats, [] in float32 or wider.

    Args:
        logits: [rows, tokens].
        targets: int64 [rows].
    """
    if logits.dtype == torch.bfloat16 and runs_kernels(logits.device):
        return _CrossEntropy.apply(logits.contiguous(), targets.contiguous())
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


class _CrossEntropy(torch.autograd.Function):
    """Reads bfloat16 twice, and writes its gradient: torch widens, writes, reads and narrows it again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        rows, tokens = logits.shape
        nats, logs = logits.new_empty(2, rows, dtype=torch.float32)
        _run("loss", logits, rows, 1, 2048, logits, targets, nats, logs, tokens)
        ctx.save_for_backward(logits, targets, logs)
        return nats.mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, targets, logs = ctx.saved_tensors
        rows, tokens = logits.shape
        made = torch.empty_like(logits)
        _run("loss_backward", logits, rows, 1, 0, logits, targets, logs, grads[0].contiguous(), made, tokens, rows)
        return made, None


def take(table: Tensor, tokens: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The rows of `table` [all, its width] that `tokens` [...] name, [..., width] in `dtype`; zeros past their end."""
    if table.dtype == torch.float32 and dtype == torch.bfloat16 and runs_kernels(table.device):
        made = table.new_empty(*tokens.shape, width, dtype=dtype)
        tokens = tokens.contiguous()
        _run("take", table, tokens.numel(), 1, 0, table, tokens, made, table.shape[1], width)
        return made
    return F.pad(F.embedding(tokens, table).to(dtype), (0, width - table.shape[1]))


class Order(NamedTuple):
    """Rows [rows] in the order of their numbers, those of one number in their own order: int32 [rows] each.

    Attributes:
        order: the rows.
        starts: where in it those of a row's number begin.
        counts: how many they are, at the first of them; at the others 0.
    """

    order: Tensor
    starts: Tensor
    counts: Tensor


def order_rows(tokens: Tensor) -> Order:
    """The order of rows by their numbers, int64 [rows]."""
    rows = len(tokens)
    if runs_kernels(tokens.device):
        made = Order(*(tokens.new_empty(rows, dtype=torch.int32) for _ in Order._fields))
        _run("order_rows", tokens, rows, 1, 1024, tokens.contiguous(), *made, rows)
        return made
    order = tokens.argsort(stable=True)
    starts, ends = (torch.searchsorted(tokens[order], tokens, right=right) for right in (False, True))
    first = order[starts] == torch.arange(rows, device=tokens.device)
    return Order(*(each.to(torch.int32) for each in (order, starts, torch.where(first, ends - starts, 0))))


def sum_rows(grads: Tensor, order: Order, width: int, dtype: torch.dtype) -> Tensor:
    """The gradients of rows [rows, width] in `dtype`, those of equal numbers added: at the first the sum, then zeros.

    Args:
        grads: [rows, width or more].
        order: of the rows.
    """
    rows = len(grads)
    if grads.dtype == torch.bfloat16 and runs_kernels(grads.device):
        made, wide = grads.new_empty(rows, width, dtype=torch.float32), grads.shape[1]
        _run("sum_rows", grads, rows, -(-width // 256), 0, grads.contiguous(), *order, made, width, wide)
        return made
    sums = grads.new_zeros(rows, width, dtype=dtype)
    sums.index_add_(0, order.starts.long(), grads[:, :width].to(dtype))
    return torch.where(order.counts.unsqueeze(1) > 0, sums[order.starts.long()], 0)


def move_rows(table: Tensor, tokens: Tensor, grads: Tensor, order: Order, rate: Tensor) -> None:
    """table[token] -= rate * grad, with the gradients that `sum_rows` gave and the order of the tokens."""
    if table.dtype == torch.float32 and runs_kernels(table.device):
        _run(
            "move_rows", table, len(tokens), 1, 0, table, tokens.contiguous(), grads, order.counts, rate, table.shape[1]
        )
        return
    table.index_add_(0, tokens, -rate * grads)


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all numbers of all tensors together, in parts that are yet to be added, [parts].

    Args:
        tensors: each in one piece, or rows [rows, numbers] of which each is.
    """
    like = tensors[0]
    if not (runs_kernels(like.device) and all(tensor.dtype == torch.bfloat16 for tensor in tensors)):
        wide = torch.promote_types(like.dtype, torch.float32)
        return torch.stack([tensor.to(wide).square().sum() for tensor in tensors])
    assert all(tensor.numel() <= _MOST_NUMBERS for tensor in tensors), "the kernel numbers them by 32 bits"
    launches = list(_launches(tensors))
    sums = like.new_empty(sum(len(places) * blocks for places, blocks in launches), dtype=torch.float32)
    at = 0
    for places, blocks in launches:
        values: list[Any] = []
        for tensor in (tensors[place] for place in places):
            if tensor.is_contiguous():
                values += [tensor, 1, tensor.numel(), 0]
            else:
                values += [tensor, *tensor.shape, tensor.stride(0)]
        values += [0] * (4 * _AT_ONCE - len(values))
        _run("squares", like, blocks, len(places), 1024, *values, sums[at:])
        at += len(places) * blocks
    return sums


def _launches(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], int]]:
    """Which tensors one launch takes, and how many blocks of each; short ones apart from long ones."""
    short = [tensor.numel() <= _FEW_NUMBERS for tensor in tensors]
    for few in (False, True):
        places = [place for place, which in enumerate(short) if which == few]
        for at in range(0, len(places), _AT_ONCE):
            yield places[at : at + _AT_ONCE], _FEW_BLOCKS if few else _BLOCKS


def clip(rate: Tensor, most: float, sums: Sequence[tuple[Tensor, int]]) -> None:
    """Make `rate` [] smaller by as much as the norm of gradients is larger than `most`.

    Args:
        sums: at most four: what `squares` gave of some of them, and what it is divided by.
    """
    if runs_kernels(rate.device) and {rate.dtype, *(part.dtype for part, _ in sums)} == {torch.float32}:
        rest = [0] * (_SUMS - len(sums))
        parts, shares = zip(*sums, strict=True)
        counts, ones = [part.numel() for part in parts], [1] * len(rest)
        _run("clip", rate, 1, 1, 2048, *parts, *rest, *counts, *rest, *shares, *ones, rate, most)
        return
    norm = torch.stack([part.sum() / share for part, share in sums]).sum().sqrt()
    rate.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))  # 1e-6 as in clip_grad_norm_


class Moved(NamedTuple):
    """A parameter as blocks of rows [blocks, rows, columns], and its copy, likewise, at a place of something larger."""

    own: Tensor
    copy: Tensor
    place: int = 0

    def within(self, like: Tensor) -> Tensor:
        """The parameter's part of what lies as that larger thing does."""
        return like.as_strided(self.copy.shape, self.copy.stride(), like.storage_offset() + self.place)

    def rows_within(self, like: Tensor) -> Tensor:
        """That with what lies between its rows, which is zero: [blocks, numbers], or [numbers] in one piece."""
        (blocks, rows, columns), (from_block, from_row, _) = self.copy.shape, self.copy.stride()
        numbers = rows * from_row if rows > 1 else columns
        if blocks == 1 or numbers == from_block:
            return like.as_strided((blocks * numbers,), (1,), like.storage_offset() + self.place)
        return like.as_strided((blocks, numbers), (from_block, 1), like.storage_offset() + self.place)


def move(parameters: Sequence[Moved], grads: Sequence[Tensor], rate: Tensor) -> None:
    """own -= rate * grad, copy = own, for each parameter; gradients lie as the copies do."""
    pairs = list(zip(parameters, grads, strict=True))
    first = parameters[0]
    kernels = (first.own.dtype, first.copy.dtype) == (torch.float32, torch.bfloat16) and runs_kernels(first.own.device)
    if not kernels:
        for each, grad in pairs:
            each.own.sub_(rate * grad.to(each.own.dtype))
            each.copy.copy_(each.own)
        return
    for places, blocks in _launches([each.own for each in parameters]):
        values: list[Any] = []
        for each, grad in (pairs[place] for place in places):
            values += [each.own, grad, each.copy, *each.own.shape, *each.copy.stride()[:2]]
        values += [0] * (8 * _AT_ONCE - len(values))
        _run("move", rate, blocks, len(places), 0, *values, rate)


def _run(kind: str, like: Tensor, blocks: int, second: int, shared: int, *values: Tensor | float) -> None:
    """Launch a kernel on the current stream of the device of `like`."""
    device = like.device
    index = torch.cuda.current_device() if device.index is None else device.index
    kernel = loaded(("text", kind, shared, index), partial(_load, kind, shared, index))
    given = [value.data_ptr() if isinstance(value, Tensor) else value for value in values]
    with torch.cuda.device(index):
        kernel(torch._C._cuda_getCurrentRawStream(index), blocks, second, *given)


def _load(kind: str, shared: int, index: int) -> Kernel:
    chip = Chip(torch.cuda.get_device_capability(index), 1)
    code = store.kernel(source(kind), kind, chip.architecture)
    return Kernel(code, kind, index, _THREADS.get(kind, 256), shared, 1, _LAYOUTS[kind])


@cache
def source(kind: str) -> str:
    """The source of a kernel."""
    text, numbers = ((_KERNELS / f"{name}.cu").read_text(encoding="utf-8") for name in (kind, "numbers"))
    return f"#define KERNEL {kind}\n" + text.replace("// @numbers\n", numbers, 1)
