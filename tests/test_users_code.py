"""Loops that users write around recurrent layers, as their libraries document them, and the one call that is the same.

Each is written anew, at a small size.  float64, outputs, final states and every gradient, to 1e-12.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whorl
from comparison import assert_exact, error, flat
from plain_loops import gradients
from whorl.cells import library

TIME, BATCH, INPUTS, UNITS = 7, 4, 5, 6
KINDS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_same(
    ours: nn.Module, got: Sequence[Tensor], theirs: nn.Module, wanted: Sequence[Tensor], **leaves: Any
) -> None:
    """Outputs, and gradients of the parameters by name and of each of `leaves`."""
    found = gradients(flat(got), dict(ours.named_parameters()) | leaves, keep_graph=True)
    assert_exact(found, gradients(flat(wanted), dict(theirs.named_parameters()) | leaves))


def torchs(ours: nn.Module, **arguments: Any) -> nn.Module:
    """torch.nn's LSTM or GRU with the same weights."""
    kind = nn.LSTM if isinstance(ours, nn.LSTM) else nn.GRU
    made = kind(ours.input_size, ours.hidden_size, ours.num_layers, dtype=torch.float64, **arguments)
    made.load_state_dict(ours.state_dict())
    return made


# --- CleanRL, ppo_atari_lstm.py: episodes end inside a rollout, so the agent steps through it -------------------------


def get_states(lstm: nn.Module, hidden: Tensor, state: tuple[Tensor, Tensor], done: Tensor) -> tuple[Tensor, tuple]:
    """The features of every step and environment in one axis; where an episode is done, the state starts from zero."""
    batch = state[0].shape[1]
    outs = []
    for features, over in zip(hidden.reshape(-1, batch, lstm.input_size), done.reshape(-1, batch), strict=True):
        alive = (1.0 - over).view(1, -1, 1)
        out, state = lstm(features.unsqueeze(0), (alive * state[0], alive * state[1]))
        outs.append(out)
    return torch.flatten(torch.cat(outs), 0, 1), state


@pytest.mark.parametrize("layers", [1, 2])
def test_cleanrls_loop_with_done_flags_is_reset(layers: int) -> None:
    ours = whorl.LSTM(INPUTS, UNITS, layers, dtype=torch.float64)
    for name, weight in ours.named_parameters():  # as CleanRL starts them
        nn.init.constant_(weight, 0.1) if "bias" in name else nn.init.orthogonal_(weight, 1.0)
    theirs = torchs(ours)
    hidden, h, c = drawn(TIME * BATCH, INPUTS), drawn(layers, BATCH, UNITS), drawn(layers, BATCH, UNITS)
    done = torch.zeros(TIME, BATCH, dtype=torch.float64)
    done[0, 1] = done[3, 0] = done[3, 2] = done[4, 2] = done[6, 3] = 1.0

    y, state = ours(hidden.view(TIME, BATCH, INPUTS), (h, c), reset=done.bool())
    wanted = get_states(theirs, hidden, (h, c), done.flatten())
    assert_same(ours, [y.flatten(0, 1), *state], theirs, wanted, x=hidden, h=h, c=c)
    (grad,) = torch.autograd.grad(y.sum(), h)
    assert (grad[0].abs().sum(-1) == 0).tolist() == [False, True, False, False]  # nothing crosses the first reset


# --- AllenNLP, augmented_lstm.py: one dropout mask for all steps, and a highway around the cell -----------------------


class AugmentedLstm(nn.Module):
    """One layer and direction.

    Args:
        mask_output: the mask is multiplied with each output, which is the next state too (their first versions); else
            with the state as it enters the product (their later ones).
    """

    def __init__(self, inputs: int, units: int, mask_output: bool) -> None:
        super().__init__()
        self.units, self.mask_output = units, mask_output
        self.input_linearity = nn.Linear(inputs, 6 * units, dtype=torch.float64)
        self.state_linearity = nn.Linear(units, 5 * units, dtype=torch.float64)

    def forward(self, x: Tensor, lengths: list[int], mask: Tensor, back: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        outs, ends = [], []
        for row, length in enumerate(lengths):
            h = c = x.new_zeros(self.units)
            column = [x.new_zeros(self.units)] * x.shape[0]
            for t in reversed(range(length)) if back else range(length):
                projected = self.input_linearity(x[t, row])
                fused = projected[: 5 * self.units] + self.state_linearity(h if self.mask_output else h * mask[row])
                i, f, memory, o, highway = fused.chunk(5)
                c = torch.sigmoid(i) * torch.tanh(memory) + torch.sigmoid(f) * c
                highway = torch.sigmoid(highway)
                out = highway * torch.sigmoid(o) * torch.tanh(c) + (1 - highway) * projected[5 * self.units :]
                column[t] = h = out * mask[row] if self.mask_output else out
            outs.append(torch.stack(column))
            ends.append((h, c))
        finals = [torch.stack(state).unsqueeze(0) for state in zip(*ends, strict=True)]
        return torch.stack(outs, 1), finals[0], finals[1]


def augmented(bidirectional: bool, **options: Any) -> tuple[nn.Module, list[AugmentedLstm], dict[str, Tensor]]:
    """whorl's layers, AllenNLP's for each of their layers and directions, and the parameters of these by our names."""
    layers = 1 + bidirectional
    ours = whorl.Recurrent(
        library.augmented_lstm, INPUTS, UNITS, layers, bidirectional=bidirectional, dtype=torch.float64, **options
    )
    theirs, named = [], {}
    for layer in range(layers):
        for suffix in [f"_l{layer}", f"_l{layer}_reverse"][:layers]:
            cell = AugmentedLstm(2 * UNITS if layer else INPUTS, UNITS, mask_output=not bidirectional)
            for part, linear in {"ih": cell.input_linearity, "hh": cell.state_linearity}.items():
                for kind in ("weight", "bias"):
                    name = f"{kind}_{part}{suffix}"
                    named[name] = getattr(linear, kind)
                    named[name].data.copy_(getattr(ours, name))
            theirs.append(cell)
    return ours, theirs, named


def held_masks(count: int, probability: float = 0.4) -> list[Tensor]:
    """As AllenNLP's get_dropout_mask: one for each sequence, whatever the step."""
    return [F.dropout(torch.ones(BATCH, UNITS, dtype=torch.float64), probability) for _ in range(count)]


OPTIONS = dict(recurrent_dropout=0.4, recurrent_dropout_mode="shared")


def test_allennlps_variational_lstm_is_recurrent_dropout() -> None:
    """BiAugmentedLstm with two layers: each has a mask for all steps, on the state as it enters the product."""
    ours, theirs, named = augmented(bidirectional=True, **OPTIONS)
    x, lengths, masks = drawn(TIME, BATCH, INPUTS), [3, 7, 1, 5], held_masks(4)
    y, finals = ours(x, lengths=lengths, dropout_masks={"recurrent_dropout": masks})

    below, ends = x, []
    for layer in (0, 2):
        both = [theirs[layer + back](below, lengths, masks[layer + back], back=bool(back)) for back in (0, 1)]
        below = torch.cat([both[0][0], both[1][0]], -1)
        ends += [found[1:] for found in both]
    wanted = gradients([below, *(torch.cat(state) for state in zip(*ends, strict=True))], named | {"x": x})
    assert_exact(gradients([y, *finals], dict(ours.named_parameters()) | {"x": x}), wanted)


def test_allennlps_masked_output_is_ours_times_the_mask() -> None:
    """In their first versions the mask was on the output h, which was the next state too.

    The step reads h in its product alone.  So the product is the same in both ways, and h too but for its mask: their
    output is ours times the mask, at every step and at the end.
    """
    ours, (theirs,), named = augmented(bidirectional=False, **OPTIONS)
    x, lengths, (mask,) = drawn(TIME, BATCH, INPUTS), [3, 7, 1, 5], held_masks(1)
    y, (h, c) = ours(x, lengths=lengths, dropout_masks={"recurrent_dropout": mask})
    wanted = gradients(theirs(x, lengths, mask), named | {"x": x})
    assert_exact(gradients([y * mask, h * mask, c], dict(ours.named_parameters()) | {"x": x}), wanted)


# --- Merity et al. 2017, AWD-LSTM: DropConnect on the recurrent weights, locked dropout between layers ----------------


class WeightDrop(nn.Module):
    """An LSTM whose recurrent weights go through dropout at each call; `variational` drops whole rows."""

    def __init__(self, lstm: nn.Module, probability: float, variational: bool = False) -> None:
        super().__init__()
        self.lstm, self.probability, self.variational = lstm, probability, variational

    def mask(self, weight: Tensor) -> Tensor:
        ones = torch.ones_like(weight[:, :1] if self.variational else weight)
        return F.dropout(ones, self.probability, self.training).expand_as(weight)

    def forward(self, x: Tensor, hx: Any = None) -> Any:
        raw = self.lstm.weight_hh_l0
        dropped = self.mask(raw) * raw if self.variational else F.dropout(raw, self.probability, self.training)
        return torch.func.functional_call(self.lstm, {"weight_hh_l0": dropped}, (x, hx))


def test_awd_lstms_weight_drop_draws_what_ours_draws() -> None:
    ours = whorl.LSTM(INPUTS, UNITS, weight_drop=0.5, dtype=torch.float64)
    theirs = WeightDrop(torchs(ours), 0.5)
    x, h, c = drawn(TIME, BATCH, INPUTS), drawn(1, BATCH, UNITS), drawn(1, BATCH, UNITS)
    found = []
    for module in (ours, theirs):
        torch.manual_seed(11)
        found.append(flat(module(x, (h, c))))
    assert_same(ours, found[0], theirs.lstm, found[1], x=x, h=h, c=c)
    assert_same(ours.eval(), ours(x), theirs.lstm, theirs.eval()(x), x=x)
    assert error(found[0][0].detach(), ours(x, (h, c))[0].detach()) > 0.01


def test_awd_lstms_variational_weight_drop_is_a_given_mask() -> None:
    ours = whorl.LSTM(INPUTS, UNITS, weight_drop=0.5, dtype=torch.float64)
    theirs = WeightDrop(torchs(ours), 0.5, variational=True)
    x = drawn(TIME, BATCH, INPUTS)
    torch.manual_seed(11)
    mask = theirs.mask(ours.weight_hh_l0)
    torch.manual_seed(11)
    assert_same(ours, ours(x, dropout_masks={"weight_drop": mask}), theirs.lstm, theirs(x), x=x)


def test_an_awd_lstm_of_two_layers_is_one_call() -> None:
    """Locked dropout is one mask [1, batch, features] for all steps: on x and between layers, it is input dropout."""
    ours = whorl.LSTM(INPUTS, UNITS, 2, weight_drop=0.5, input_dropout=0.3, dtype=torch.float64)
    x, named = drawn(TIME, BATCH, INPUTS), {}
    locked = [F.dropout(torch.ones(1, BATCH, width, dtype=torch.float64), 0.3) for width in (INPUTS, UNITS)]
    below, finals, masks = x, [], []
    for layer, width in enumerate((INPUTS, UNITS)):
        lstm = nn.LSTM(width, UNITS, dtype=torch.float64)
        lstm.load_state_dict({f"{kind}_l0": getattr(ours, f"{kind}_l{layer}") for kind in KINDS})
        named |= {f"{kind}_l{layer}": getattr(lstm, f"{kind}_l0") for kind in KINDS}
        dropped = WeightDrop(lstm, 0.5)
        torch.manual_seed(layer)
        masks.append(dropped.mask(lstm.weight_hh_l0))
        torch.manual_seed(layer)
        below, state = dropped(below * locked[layer])
        finals.append(state)
    given = {"weight_drop": masks, "input_dropout": [mask.squeeze(0) for mask in locked]}
    y, (h, c) = ours(x, dropout_masks=given)
    wanted = gradients([below, *(torch.cat(state) for state in zip(*finals, strict=True))], named | {"x": x})
    assert_exact(gradients([y, h, c], dict(ours.named_parameters()) | {"x": x}), wanted)


# --- pytorch-forecasting, nn/rnn.py: sequences of length 0 ------------------------------------------------------------


def of_any_length(rnn: nn.Module, x: Tensor, hx: Any, lengths: Tensor) -> tuple[Tensor, Any]:
    """Lengths of 0 are packed as 1; then what they gave is replaced by the states that they began with.

    Outputs are as long as the longest sequence, and those of a sequence of length 0 are what its first step gave:
    whorl has zeros there.
    """
    packed = pack_padded_sequence(x, lengths.clamp(min=1), batch_first=rnn.batch_first, enforce_sorted=False)
    y, finals = rnn(packed, hx)
    empty = (lengths == 0)[None, :, None]
    if isinstance(finals, tuple):
        finals = tuple(torch.where(empty, first, last) for first, last in zip(hx, finals, strict=True))
    else:
        finals = torch.where(empty, hx, finals)
    return pad_packed_sequence(y, batch_first=rnn.batch_first)[0], finals


@pytest.mark.parametrize("lengths", [[3, 0, 5, 1], [0, 0, 7, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("kind", [whorl.LSTM, whorl.GRU])
def test_pytorch_forecastings_lengths_of_zero_are_lengths(kind: type[nn.Module], lengths: list[int]) -> None:
    ours = kind(INPUTS, UNITS, 2, batch_first=True, dtype=torch.float64)
    theirs, x = torchs(ours, batch_first=True), drawn(BATCH, TIME, INPUTS)
    states = [drawn(2, BATCH, UNITS) for _ in range(1 + (kind is whorl.LSTM))]
    hx = tuple(states) if len(states) > 1 else states[0]
    given = torch.tensor(lengths)

    y, finals = ours(x, hx, lengths=given)
    out, ends = of_any_length(theirs, x, hx, given)
    known = (given > 0)[:, None, None]
    longest = out.shape[1]
    assert y[:, longest:].abs().sum() == 0
    leaves = {"x": x} | {f"state {index}": state for index, state in enumerate(states)}
    assert_same(ours, [y[:, :longest], *flat(finals)], theirs, [torch.where(known, out, 0.0), *flat(ends)], **leaves)


# --- Opacus: the gradient of each sample, for training with differential privacy --------------------------------------


class DPLSTM(nn.Module):
    """An LSTM of two linear layers; hooks keep what enters each and the gradient of what leaves it, at every step."""

    def __init__(self, lstm: nn.Module) -> None:
        super().__init__()
        self.ih, self.hh = nn.Linear(INPUTS, 4 * UNITS), nn.Linear(UNITS, 4 * UNITS)
        self.double()
        self.seen: dict[str, list[tuple[Tensor, Tensor]]] = {"ih": [], "hh": []}
        for part, linear in {"ih": self.ih, "hh": self.hh}.items():
            for kind in ("weight", "bias"):
                getattr(linear, kind).data.copy_(getattr(lstm, f"{kind}_{part}_l0"))

    def linear(self, part: str, entering: Tensor) -> Tensor:
        leaving = getattr(self, part)(entering)
        leaving.register_hook(lambda grad: self.seen[part].append((entering.detach(), grad)))
        return leaving

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], UNITS)
        outs = []
        for step in x:
            i, f, g, o = (self.linear("ih", step) + self.linear("hh", h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outs.append(h)
        return torch.stack(outs)

    def grad_samples(self) -> dict[str, Tensor]:
        """After a backward of the sum of all samples' losses: [batch, ...] for each parameter, by torch's name."""
        found = {}
        for part, seen in self.seen.items():
            found[f"weight_{part}_l0"] = sum(torch.einsum("bo,bi->boi", grad, entering) for entering, grad in seen)
            found[f"bias_{part}_l0"] = sum(grad for _, grad in seen)
        return found


def test_opacus_gradient_of_each_sample_is_vmap_of_grad() -> None:
    ours = whorl.LSTM(INPUTS, UNITS, dtype=torch.float64)
    x, labels = torch.randn(TIME, BATCH, INPUTS, dtype=torch.float64), torch.tensor([0, 5, 2, 2])
    theirs = DPLSTM(ours)
    F.cross_entropy(theirs(x)[-1], labels, reduction="sum").backward()

    def loss(weights: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
        y, _ = torch.func.functional_call(ours, weights, (x,))
        return F.cross_entropy(y[-1], label)

    weights = {name: weight.detach() for name, weight in ours.named_parameters()}
    each = torch.vmap(torch.func.grad(loss), (None, 1, 0))(weights, x, labels)
    assert_exact(each, theirs.grad_samples())


# --- Keras: Embedding(mask_zero=True) and Bidirectional(LSTM(return_sequences=True)) ----------------------------------


def keras_lstm(
    x: Tensor,
    mask: Tensor,
    initial_state: Sequence[Tensor],
    kernel: Tensor,
    recurrent_kernel: Tensor,
    bias: Tensor,
    go_backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [batch, time, inputs]; where the mask is false, states and output stay as they were, the first output zero."""
    (h, c), held = initial_state, x.new_zeros(x.shape[0], UNITS)
    outs = []
    for t in reversed(range(x.shape[1])) if go_backwards else range(x.shape[1]):
        z = x[:, t] @ kernel + h @ recurrent_kernel + bias
        i, f, candidate, o = z.chunk(4, -1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(candidate)
        new_h = torch.sigmoid(o) * torch.tanh(new_c)
        valid = mask[:, t, None]
        held = torch.where(valid, new_h, held)
        h, c = torch.where(valid, new_h, h), torch.where(valid, new_c, c)
        outs.append(held)
    return torch.stack(outs[::-1] if go_backwards else outs, 1), h, c  # Bidirectional turns the second around again


def test_keras_mask_of_zeros_is_mask() -> None:
    """Zeros before, within and after, and a row of zeros alone."""
    tokens = torch.tensor([[3, 1, 4, 0, 0, 0, 0], [0, 0, 5, 9, 2, 6, 5], [3, 0, 0, 5, 0, 8, 9], [0] * TIME])
    table = drawn(10, INPUTS)
    embedded, mask = F.embedding(tokens, table), tokens != 0
    ours = whorl.LSTM(INPUTS, UNITS, batch_first=True, bidirectional=True, dtype=torch.float64)
    hx = drawn(2, BATCH, UNITS), drawn(2, BATCH, UNITS)
    y, (h, c) = ours(embedded, hx, mask=mask)

    sides = []
    for side, suffix in enumerate(("_l0", "_l0_reverse")):
        weights = {kind: getattr(ours, kind + suffix) for kind in KINDS}
        kernels = weights["weight_ih"].T, weights["weight_hh"].T, weights["bias_ih"] + weights["bias_hh"]
        sides.append(keras_lstm(embedded, mask, [state[side] for state in hx], *kernels, go_backwards=bool(side)))
    outs, hs, cs = zip(*sides, strict=True)
    wanted = [torch.cat(outs, -1), torch.stack(hs), torch.stack(cs)]
    assert_same(ours, [y, h, c], ours, wanted, table=table, h=hx[0], c=hx[1])
    assert y[3].abs().sum() == 0  # zero before the first valid step, and there is none
    assert torch.equal(y[0, 3, :UNITS], y[0, 2, :UNITS])
