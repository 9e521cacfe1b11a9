"""What one layer in one direction multiplies and keeps at random: drawn as `whorl.noise` counts, or given."""

import torch
from torch import Tensor

from whorl.engines.cpu.rows import Rows
from whorl.engines.cpu.sweep import NO_FACTOR, Factor, Fields, Kernel, Products, Sweep, address
from whorl.noise import INPUT, RECURRENT, WORDS, ZONEOUT, Given, by_gate, given, tag, threshold
from whorl.problem import Call, Form
from whorl.weights import LayerWeights

NONE, HELD, BY_GATE, BY_STEP, DRAWN = range(5)
"""Kinds of noise in the recurrent product, as kernels/sweep.cpp numbers them."""
_SHARE, _DRAWN, _GIVEN = 1, 2, 3  # kinds of zoneout


def kind_of(form: Form, drawn: bool) -> int:
    """The kind of noise in the recurrent product where none is given."""
    if not (drawn and form.recurrent_dropout and form.cell.recurrent):
        return NONE
    return {"gate": BY_GATE, "shared": HELD, "step": DRAWN}[form.recurrent_dropout_mode]


def given_kind(form: Form, call: Call) -> int | None:
    """The kind of noise in the recurrent product that masks are given for, alike in each layer and direction.

    Returns:
        NONE where no masks are given.  None where they differ, change from step to step or are of anything else too.
    """
    if not call.noise:
        return NONE
    kinds = set()
    for one in given(form, call):
        others = one.input is not None or any(mask is not None for mask in one.zoneout)
        if others or form.recurrent_dropout_mode == "step" or not form.cell.recurrent:
            return None
        kinds.add(NONE if one.recurrent is None else HELD if one.recurrent.dim() == 2 else BY_GATE)
    return kinds.pop() if len(kinds) == 1 else None


def _draw(
    kernel: Kernel, to: Tensor, purpose: int, place: tuple[int, int], chance: float, seed: int, ids: Tensor | None
) -> None:
    """Masks for each word, [words, batch, width]."""
    code, below = tag(purpose, *place), threshold(chance)
    kernel.draw(to.data_ptr(), *to.shape, address(ids), seed, code, below, _scale(chance))


def _scale(chance: float) -> float:
    return 1 / (1 - chance) if chance < 1 else 0.0


def describe(sweep: Sweep, form: Form, place: tuple[int, int], kind: int) -> None:
    """Tell a sweep of the noise in its recurrent product what its form decides."""
    sweep.noise_kind, sweep.keep_plain = kind, kind in (HELD, BY_GATE, BY_STEP)
    sweep.noise_tag, sweep.noise_below = tag(RECURRENT, *place), threshold(form.recurrent_dropout)
    sweep.noise_scale, sweep.zoneout_tag = _scale(form.recurrent_dropout), tag(ZONEOUT, *place)


def describe_zoneout(sweep: Sweep, form: Form, drawn: bool) -> None:
    """The same of zoneout where none is given: drawn, or a share of each state stays."""
    for zoneout, chance in zip(sweep.zoneout, form.zoneout, strict=False):
        zoneout.kind = NONE if not chance else _DRAWN if drawn else _SHARE
        zoneout.share, zoneout.below = chance, threshold(chance)


class Masks:
    """The masks of one sweep, and what they do outside of its loop.

    Args:
        index: layer x directions + direction.
        wide: the dtype of masks.
        differentiable: those that are given have a gradient.
    """

    def __init__(
        self, kernel: Kernel, form: Form, call: Call, given: Given, index: int, rows: Rows, wide: torch.dtype,
        products: Products, differentiable: bool,
    ) -> None:  # fmt: skip
        self._products, self._differentiable = products, differentiable
        self._kernel, self._form, self._rows, self._wide = kernel, form, rows, wide
        self._place, self._given = divmod(index, form.directions), given
        seed = call.marks.seed
        self._seed = None if seed is None else int(seed) % 2**64
        self.input = self._input(form.layer_inputs(self._place[0]))
        self.kind, self.recurrent = self._recurrent()
        self.zoneouts = [self._zoneout(state) for state in range(len(form.cell.states))]

    def _input(self, width: int) -> Tensor | None:
        """[batch, inputs], or [gates, batch, inputs]."""
        if self._given.input is not None:
            return self._given.input.to(self._wide)
        probability = self._form.input_dropout
        if not probability or self._seed is None:
            return None
        made = torch.empty(1, self._rows.batch, width, dtype=self._wide, device="cpu")
        _draw(self._kernel, made, INPUT, self._place, probability, self._seed, self._rows.ids)
        return made[0]

    def _recurrent(self) -> tuple[int, Tensor | None]:
        form, given, gates = self._form, self._given.recurrent, len(self._form.cell.recurrent)
        if gates and given is not None:
            mask = given.to(self._wide).contiguous()
            if form.recurrent_dropout_mode == "step":
                return BY_STEP, mask.view(-1, form.width)
            return HELD if mask.dim() == 2 else BY_GATE, mask
        kind = kind_of(form, self._seed is not None)
        if self._seed is None or kind in (NONE, DRAWN):
            return kind, None
        return (kind, self._held(1)[0]) if kind == HELD else (kind, self._held(gates))

    def _held(self, gates: int) -> Tensor:
        """Masks that all steps share, drawn: [gates, batch, width]."""
        form, rows, seed = self._form, self._rows, self._seed
        assert seed is not None
        made = torch.empty(gates, rows.batch, form.width, dtype=self._wide, device="cpu")
        for part, (purpose, _) in zip(made.split(WORDS), by_gate(gates), strict=True):
            _draw(self._kernel, part, purpose, self._place, form.recurrent_dropout, seed, rows.ids)
        return made

    def _zoneout(self, state: int) -> tuple[int, float, Tensor | None]:
        given, probability = self._given.zoneout[state], self._form.zoneout[state] if self._form.zoneout else 0.0
        if given is not None:
            return _GIVEN, 0.0, given.to(self._wide).reshape(-1, self._form.state_width(state)).contiguous()
        if not probability:
            return NONE, 0.0, None
        return _SHARE if self._seed is None else _DRAWN, probability, None

    def set(self, fields: Fields, apart: list[Tensor | None], gradients: list[Tensor | None]) -> None:
        """Tell a sweep.

        Args:
            apart: for each state with given zoneout, the state before less what the step made.
            gradients: for the same, where the gradient of its mask goes.
        """
        sweep = fields.sweep
        describe(sweep, self._form, self._place, self.kind)
        fields.set(noise=self.recurrent)
        sweep.seed = self._seed or 0
        for state, (kind, share, mask) in enumerate(self.zoneouts):
            if kind == NONE:
                continue
            zoneout = sweep.zoneout[state]
            zoneout.kind, zoneout.share, zoneout.below = kind, share, threshold(share)
            zoneout.given, zoneout.apart, zoneout.dgiven = map(address, (mask, apart[state], gradients[state]))
            fields.keep(mask, apart[state], gradients[state])

    @property
    def given_zoneouts(self) -> list[bool]:
        return [mask is not None for _, _, mask in self.zoneouts]

    # --- around the loop ----------------------------------------------------------------------------------------------

    def project(self, x: Tensor, weights: LayerWeights) -> Tensor:
        """The input product of all steps, [compact rows, gates x units and more], in the dtype of sums."""
        bias = None if weights.bias_ih is None else weights.bias_ih.to(self._wide)
        if self.input is None:
            return self._products.rows(x, weights.ih, bias)
        entered = self._entered(x)
        if entered.dim() == 2:
            return self._products.rows(entered, weights.ih, bias)
        units, count = self._form.units, len(entered)
        biases = bias.split(units) if bias is not None else [None] * count
        gates = zip(entered, weights.ih.split(units), biases, strict=True)
        return torch.cat([self._products.rows(*gate)[:, :units] for gate in gates], -1)

    def project_backward(
        self, dx: Tensor, x: Tensor, weights: LayerWeights, sums: Tensor | None, wanted: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The gradients of x, of the weights and of the mask, where it is given, from that of the product.

        Args:
            sums: the columns of dx are added to it.
            wanted: that of x is.
        """
        products, inputs, units = self._products, x.shape[1], self._form.units
        to_mask = self._differentiable and self._given.input is not None
        entered = x if self.input is None else self._entered(x)
        if entered.dim() == 2:
            to_ih = products.outer(dx, entered, sums=sums)
        else:
            to_ih = torch.cat([products.outer(d, part) for d, part in zip(dx.split(units, 1), entered, strict=True)])
            if sums is not None:
                sums += dx.sum(0)
        if not (wanted or to_mask):
            return None, to_ih, None
        if entered.dim() == 2:
            to_entered = products.rows(dx, weights.ih, across=False)[:, :inputs]
        else:
            gates = zip(dx.split(units, 1), weights.ih.split(units), strict=True)
            to_entered = torch.stack([products.rows(d, weight, across=False)[:, :inputs] for d, weight in gates])
        found = self._by_sequence(to_entered * x) if to_mask else None
        if not wanted or self.input is None:
            return to_entered if wanted else None, to_ih, found
        to_x = self._times(to_entered, self.input)
        return to_x if to_x.dim() == 2 else to_x.sum(0), to_ih, found

    def entering(self, gate: int) -> Factor:
        """What is multiplied with what was kept, and then entered the recurrent product of a gate."""
        rows, mask = self._rows, self.recurrent
        if mask is None:
            return NO_FACTOR
        if self.kind == BY_STEP:
            return Factor(mask, rows.chosen)
        return Factor(mask if self.kind == HELD else mask[gate], None if rows.every else rows.sequence)

    def given_gradient(self) -> Tensor | None:
        """Zeros for the gradient of the given mask of the recurrent product; None where it has none."""
        if self._given.recurrent is None or self.recurrent is None or not self._differentiable:
            return None
        return torch.zeros_like(self.recurrent)

    def add_gradient(self, to: Tensor, h: Tensor, gate: int, to_entered: Tensor) -> None:
        """Add to the given mask's gradient what one gate's product gives."""
        found = to_entered.to(self._wide) * h
        if self.kind == BY_STEP:
            to += self._rows.spread(found)
        else:
            (to if self.kind == HELD else to[gate]).add_(self._by_sequence(found))

    def _entered(self, x: Tensor) -> Tensor:
        assert self.input is not None
        return self._times(x, self.input).to(x.dtype)

    def _times(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Rows [..., compact rows, features] times the mask [..., batch, features] of the sequence of each."""
        if self._rows.every:
            steps = rows.unflatten(-2, (self._rows.time, self._rows.batch))
            return (steps * mask.unsqueeze(-3)).flatten(-3, -2)
        return rows * mask.index_select(-2, self._rows.sequence)

    def _by_sequence(self, found: Tensor) -> Tensor:
        made = found.new_zeros(*found.shape[:-2], self._rows.batch, found.shape[-1])
        return made.index_add_(-2, self._rows.sequence, found)
