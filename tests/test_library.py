"""Each cell of the library against the formulas of its paper, written out anew.

float64, outputs, final states and every gradient, to 1e-12.
"""

import decimal
import inspect
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, relu, sigmoid, tanh

import whorl
from comparison import EXACT, assert_exact, error, weighted
from plain_loops import SIZES, Case, Drawn, States, Step, Weights, gradients, layer_of, loop
from whorl.cells import library
from whorl.cells.expr import _FUNCTIONS

# --- the papers -------------------------------------------------------------------------------------------------------


def normal(a: Tensor, eps: float = 1e-5) -> Tensor:
    """Ba et al. 2016, equation 4, without gain and shift."""
    return (a - a.mean()) / torch.sqrt(((a - a.mean()) ** 2).mean() + eps)


def lstm(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Hochreiter and Schmidhuber 1997, Gers et al. 2000."""
    (h, c), W, U, b = s, w.W, w.U, w.b
    i = sigmoid(W.i @ x + U.i @ h + b.i)
    f = sigmoid(W.f @ x + U.f @ h + b.f)
    g = tanh(W.g @ x + U.g @ h + b.g)
    o = sigmoid(W.o @ x + U.o @ h + b.o)
    c = f * c + i * g
    return o * tanh(c), c


def peephole_lstm(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Gers and Schmidhuber 2000, as Graves 2013 writes it: i and f see the cell state before, o the new one."""
    (h, c), W, U, b, v = s, w.W, w.U, w.b, w.v
    i = sigmoid(W.i @ x + U.i @ h + v.peephole_i * c + b.i)
    f = sigmoid(W.f @ x + U.f @ h + v.peephole_f * c + b.f)
    c = f * c + i * tanh(W.g @ x + U.g @ h + b.g)
    o = sigmoid(W.o @ x + U.o @ h + v.peephole_o * c + b.o)
    return o * tanh(c), c


def coupled_lstm(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """CIFG of Greff et al. 2015: f = 1 - i."""
    (h, c), W, U, b = s, w.W, w.U, w.b
    i = sigmoid(W.i @ x + U.i @ h + b.i)
    c = (1 - i) * c + i * tanh(W.g @ x + U.g @ h + b.g)
    o = sigmoid(W.o @ x + U.o @ h + b.o)
    return o * tanh(c), c


def layer_norm_lstm_of_ba(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Ba et al. 2016, equations 20 to 22: one norm over the input part of all gates, one over the recurrent, one of c.

    whorl's two biases are inside the norms, the gains and shifts outside.
    """
    (h, c), v = s, w.v

    def norm(product: Any, bias: Any, z: Tensor, part: str) -> Tensor:
        a = torch.cat([getattr(product, k) @ z + getattr(bias, k) for k in "ifgo"])
        gain, shift = (torch.cat([getattr(v, f"{part}_{kind}_{k}") for k in "ifgo"]) for kind in ("gain", "shift"))
        return gain * normal(a) + shift

    i, f, g, o = (norm(w.W, w.bW, x, "x") + norm(w.U, w.bU, h, "r")).chunk(4)
    c = sigmoid(f) * c + sigmoid(i) * tanh(g)
    return sigmoid(o) * tanh(v.c_gain * normal(c) + v.c_shift), c


def normal_c_lstm(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """The last of Ba's three norms alone, in an LSTM with Keras' hard sigmoid and a softsign."""
    (h, c), W, U, b = s, w.W, w.U, w.b
    i, f, o = (F.relu6(getattr(W, k) @ x + getattr(U, k) @ h + getattr(b, k) + 3) / 6 for k in "ifo")
    c = f * c + i * F.softsign(W.g @ x + U.g @ h + b.g)
    return o * F.softsign(w.v.c_gain * normal(c) + w.v.c_shift), c


def gru(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """As cuDNN and torch have it: the reset gate after the product, with the product's bias."""
    (h,), W, U, b = s, w.W, w.U, w.b
    r = sigmoid(W.r @ x + U.r @ h + b.r)
    z = sigmoid(W.z @ x + U.z @ h + b.z)
    n = tanh(W.n @ x + w.bW.n + r * (U.n @ h + w.bU.n))
    return ((1 - z) * n + z * h,)


def gru_of_cho(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Cho et al. 2014, equations 5 to 8: the reset gate on the state, before the product."""
    (h,), W, U, b = s, w.W, w.U, w.b
    r = sigmoid(W.r @ x + U.r @ h + b.r)
    z = sigmoid(W.z @ x + U.z @ h + b.z)
    return (z * h + (1 - z) * tanh(W.n @ x + U.n @ (r * h) + b.n),)


def elman(f: Callable[[Tensor], Tensor]) -> Step:
    return lambda w, x, s, e: (f(w.W.n @ x + w.U.n @ s[0] + w.b.n),)


def mgu(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Zhou et al. 2016, section 3."""
    (h,), W, U, b = s, w.W, w.U, w.b
    f = sigmoid(W.f @ x + U.f @ h + b.f)
    return ((1 - f) * h + f * tanh(W.n @ x + U.n @ (f * h) + b.n),)


def light_gru(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Ravanelli et al. 2018, equations 10 to 12, without batch norm."""
    (h,), W, U, b = s, w.W, w.U, w.b
    z = sigmoid(W.z @ x + U.z @ h + b.z)
    return (z * h + (1 - z) * relu(W.n @ x + U.n @ h + b.n),)


def slstm(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Beck et al. 2024, equations 8 to 17, with a sigmoid forget gate; where n is empty nothing is kept."""
    (h, c, n, m), W, U, b = s, w.W, w.U, w.b
    i, f = W.i @ x + U.i @ h + b.i, F.logsigmoid(W.f @ x + U.f @ h + b.f)
    z, o = tanh(W.z @ x + U.z @ h + b.z), sigmoid(W.o @ x + U.o @ h + b.o)
    new = torch.where(n == 0, i, torch.maximum(f + m, i))
    kept, let_in = torch.where(n == 0, 0.0, torch.exp(f + m - new)), torch.exp(i - new)
    c, n = kept * c + let_in * z, kept * n + let_in
    return o * (c / n), c, n, new


def dreamer_gru(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """DreamerV2's GRUCell: Dense(concat(x, h)), Keras' LayerNormalization (eps 1e-3), split, update bias -1."""
    (h,), v = s, w.v
    parts = torch.cat([getattr(w.W, k) @ x + getattr(w.U, k) @ h + getattr(w.b, k) for k in "rnz"])
    gamma, beta = (torch.cat([getattr(v, f"{kind}_{k}") for k in "rnz"]) for kind in ("gain", "shift"))
    reset, cand, update = (gamma * normal(parts, 1e-3) + beta).chunk(3)
    cand, update = tanh(sigmoid(reset) * cand), sigmoid(update - 1)
    return (update * cand + (1 - update) * h,)


def augmented_lstm(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """AllenNLP's AugmentedLSTMCell with use_highway: the way's projection has no recurrent part."""
    W, U, b = w.W, w.U, w.b
    out, c = lstm(w, x, s, e)
    highway = sigmoid(W.k @ x + U.k @ s[0] + b.k)
    return highway * out + (1 - highway) * (W.p @ x + b.p), c


def cfc(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Hasani et al. 2022 as ncps' CfCCell: mode "default", backbone_layers=0; ff1, ff2, time_a, time_b."""
    (h,), W, U, b = s, w.W, w.U, w.b
    ff1, ff2 = tanh(W.g @ x + U.g @ h + b.g), tanh(W.k @ x + U.k @ h + b.k)
    interpolation = sigmoid((W.a @ x + U.a @ h + b.a) * e.elapsed + (W.b @ x + U.b @ h + b.b))
    return (ff1 * (1 - interpolation) + interpolation * ff2,)


def ind_rnn(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Li et al. 2018, equation 2."""
    return (relu(w.W.n @ x + w.v.u * s[0] + w.b.n),)


def gru_d(w: Weights, x: Tensor, s: States, e: Any) -> States:
    """Che et al. 2018, equations 4 and 6 to 9: the state decays, then Cho's GRU with z as the share of the new."""
    W, U, b = w.W, w.U, w.b
    h = torch.exp(-torch.clamp(e.gap, min=0)) * s[0]
    z = sigmoid(W.z @ x + U.z @ h + b.z)
    r = sigmoid(W.r @ x + U.r @ h + b.r)
    return ((1 - z) * h + z * tanh(W.n @ x + U.n @ (r * h) + b.n),)


def lstm_with(**options: Any) -> Callable[..., nn.Module]:
    return lambda *args, **kwargs: whorl.LSTM(*args, **kwargs, **options)


PEEPHOLES = "peephole_i peephole_f peephole_o"
NORMS = " ".join(f"{part}_{kind}_{k}" for part in "xr" for k in "ifgo" for kind in ("gain", "shift"))
CASES = {
    "lstm": Case(layer_of(library.lstm), lstm, "i f g o", "h c"),
    "lstm peephole": Case(lstm_with(peephole=True), peephole_lstm, "i f g o", "h c", vectors=PEEPHOLES),
    "lstm coupled": Case(lstm_with(coupled=True), coupled_lstm, "i g o", "h c"),
    "lstm layer norm": Case(
        lstm_with(layer_norm=True), layer_norm_lstm_of_ba, "i f g o", "h c", vectors=f"c_gain c_shift {NORMS}"
    ),
    "lstm norm of c, activations": Case(
        layer_of(library.make_lstm(nn.Softsign(), F.hardsigmoid, layer_norm=True)),
        normal_c_lstm,
        "i f g o",
        "h c",
        vectors="c_gain c_shift",
    ),
    "gru": Case(layer_of(library.gru), gru, "r z n"),
    "gru reset before": Case(layer_of(library.make_gru(reset_after=False)), gru_of_cho, "r z n"),
    "rnn_tanh": Case(layer_of(library.rnn_tanh), elman(tanh), "n"),
    "rnn_relu": Case(layer_of(library.rnn_relu), elman(relu), "n"),
    "rnn of a module": Case(layer_of(library.make_rnn(nn.Mish())), elman(F.mish), "n"),
    "mgu": Case(layer_of(library.mgu), mgu, "f n"),
    "light_gru": Case(layer_of(library.light_gru), light_gru, "z n"),
    "slstm": Case(layer_of(library.slstm), slstm, "i f z o", "h c n m"),
    "dreamer_gru": Case(
        layer_of(library.dreamer_gru), dreamer_gru, "r n z", vectors="gain_r gain_n gain_z shift_r shift_n shift_z"
    ),
    "augmented_lstm": Case(
        layer_of(library.augmented_lstm), augmented_lstm, "i f g o k p", "h c", recurrent="i f g o k"
    ),
    "cfc": Case(layer_of(library.cfc), cfc, "g k a b", inputs="elapsed"),
    "ind_rnn": Case(layer_of(library.ind_rnn), ind_rnn, "n", recurrent="", vectors="u"),
    "gru_d": Case(layer_of(library.gru_d), gru_d, "r z n", inputs="gap"),
}  # fmt: skip


def test_every_cell_of_the_library_has_its_paper_here() -> None:
    cells = {cell.graph.fingerprint: name for name, cell in vars(library).items() if isinstance(cell, whorl.Cell)}
    tested = {case.make(2, 3).cell.graph.fingerprint for name, case in CASES.items() if name in cells.values()}
    assert tested == set(cells)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_cell_is_its_paper(name: str, size: str) -> None:
    made, options = Drawn(CASES[name], **SIZES[size]), {}
    leaves = made.leaves()
    if made.layer.bidirectional:
        options = dict(lengths=[4, 0, 6, 1], reset=torch.rand(6, 4) < 0.3)
    assert_exact(gradients(made(**options), leaves), gradients(made.loop(**options), leaves))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CASES)
def test_parameters_are_named_shaped_and_drawn_as_torchs(name: str, bias: bool) -> None:
    """Those of torch in its order, then vectors, which draw nothing; layer by layer, direction by direction."""
    case, units = CASES[name], 7
    torch.manual_seed(5)
    layer = case.make(5, units, num_layers=2, bidirectional=True, bias=bias)
    gates, recurrent = len(case.gates.split()), len(case.recurrent_gates.split())
    wanted: dict[str, tuple[int, ...]] = {}
    for index, inputs in enumerate((5, 2 * units)):
        for suffix in (f"_l{index}", f"_l{index}_reverse"):
            wanted[f"weight_ih{suffix}"] = (gates * units, inputs)
            wanted |= {f"weight_hh{suffix}": (recurrent * units, units)} if recurrent else {}
            wanted |= {f"bias_ih{suffix}": (gates * units,)} if bias else {}
            wanted |= {f"bias_hh{suffix}": (recurrent * units,)} if bias and recurrent else {}
            wanted |= {f"vector_{vector}{suffix}": (units,) for vector in case.vectors.split()}
    found = dict(layer.named_parameters())
    assert {key: tuple(value.shape) for key, value in found.items()} == wanted
    if isinstance(layer, whorl.Recurrent):  # torch's classes make their own first, and vectors come after
        assert list(found) == list(wanted)
    torch.manual_seed(5)
    for key in wanted:
        if key.startswith("vector_"):
            assert len(set(found[key].tolist())) == 1
        else:
            assert torch.equal(found[key], torch.empty(wanted[key]).uniform_(-(units**-0.5), units**-0.5)), key


def test_vectors_begin_as_declared() -> None:
    layer = whorl.Recurrent(library.dreamer_gru, 2, 3, bidirectional=True)
    assert layer.vector_gain_z_l0_reverse.tolist() == [1.0] * 3
    assert layer.vector_shift_r_l0.tolist() == [0.0] * 3
    with torch.no_grad():
        layer.vector_gain_z_l0.fill_(5.0)
    layer.reset_parameters()
    assert layer.vector_gain_z_l0.tolist() == [1.0] * 3


# --- sLSTM where numbers are large ------------------------------------------------------------------------------------


class Gates:
    """An sLSTM whose input x [time, batch, gates x units] is its gates: each drawn, `mean` and `scale` as given."""

    def __init__(self, dtype: torch.dtype, units: int = 3, **gates: tuple[float, float]) -> None:
        self.layer = whorl.Recurrent(library.slstm, 4 * units, units, bias=False, dtype=dtype)
        nn.init.eye_(self.layer.weight_ih_l0)
        nn.init.zeros_(self.layer.weight_hh_l0)
        torch.manual_seed(2)
        drawn = [mean + scale * torch.randn(9, 2, units) for mean, scale in gates.values()]
        self.x = torch.cat(drawn, -1).to(dtype).requires_grad_()
        self.hx = tuple(torch.zeros(1, 2, units, dtype=dtype, requires_grad=True) for _ in "hcnm")


@pytest.mark.parametrize("forget", [(0.0, 20.0), (-22.0, 1.0)], ids=str)
def test_slstm_is_the_formula_without_a_stabiliser(forget: tuple[float, float]) -> None:
    """Beck et al. 2024, equations 8 to 14, in numbers that float64 holds; the gradient of an empty state too."""
    made = Gates(torch.float64, i=(0.0, 20.0), f=forget, z=(0.0, 1.0), o=(0.0, 1.0))
    y, (_, c, n, m) = made.layer(made.x, made.hx)
    i, f, z, o = made.x.chunk(4, -1)
    state, norm, outs = made.hx[1][0], made.hx[2][0], []
    for t in range(9):
        state = sigmoid(f[t]) * state + torch.exp(i[t]) * tanh(z[t])
        norm = sigmoid(f[t]) * norm + torch.exp(i[t])
        outs.append(sigmoid(o[t]) * state / norm)
    leaves = {"x": made.x, "c": made.hx[1], "n": made.hx[2]}
    assert_exact(gradients([y], leaves), gradients([torch.stack(outs)], leaves))
    for ours, theirs in ((c, state), (n, norm)):
        assert error((ours[0].abs().log() + m[0]).detach(), theirs.abs().log().detach()) <= EXACT


@pytest.mark.parametrize("mean", [-1000.0, 0.0, 1000.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_slstm_is_right_where_exp_is_not(dtype: torch.dtype, mean: float) -> None:
    """Input gates of exp(1000) and exp(-1000), forget gates of exp(-900), against 40 digits."""
    made = Gates(dtype, i=(mean, 300.0), f=(-200.0, 300.0), z=(0.0, 1.0), o=(0.0, 1.0))
    y, finals = made.layer(made.x, made.hx)
    (grad,) = torch.autograd.grad(weighted([y]), made.x)
    assert all(tensor.isfinite().all() for tensor in (y, grad, *finals))
    rows = made.x.unflatten(-1, (4, -1)).transpose(2, 3).permute(1, 2, 3, 0).flatten(0, 1).tolist()
    with decimal.localcontext() as context:
        context.prec = 40
        truth = torch.tensor([exact_slstm(*row) for row in rows], dtype=torch.float64).T
    plain = loop(made.layer, slstm, "i f z o", "i f z o", made.x, made.hx)[0]
    assert error(y.detach().flatten(1), truth) <= bound(plain.detach().flatten(1), truth)


def exact_slstm(i: list[float], f: list[float], z: list[float], o: list[float]) -> list[float]:
    """The outputs of one unit, without a stabiliser, in decimal numbers of any size."""
    c, n, outs = Decimal(0), Decimal(0), []
    for gate_i, gate_f, gate_z, gate_o in zip(i, f, z, o, strict=True):
        kept, let_in = 1 / (1 + Decimal(-gate_f).exp()), Decimal(gate_i).exp()
        c, n = kept * c + let_in * Decimal(math.tanh(gate_z)), kept * n + let_in
        outs.append(float(c / n) / (1 + math.exp(-gate_o)))
    return outs


def bound(plain: Tensor, truth: Tensor) -> float:
    """The error rule of DESIGN.md, section 7: by what plain torch in the same dtype is off."""
    return EXACT if plain.dtype == torch.float64 else 2 * error(plain, truth) + 4 * torch.finfo(plain.dtype).eps


# --- the guide --------------------------------------------------------------------------------------------------------


def test_the_guide_has_every_cell_of_the_library() -> None:
    """In the order of the file, in the words of the docstrings."""
    rows = ["| `library.` | gates | states | also | what it is |", "|---|---|---|---|---|"]
    for name, value in vars(library).items():
        if name.startswith("make_"):
            cell, text = value(), value.__doc__
            name = f"{name}({', '.join(inspect.signature(value).parameters)})"
        elif isinstance(value, whorl.Cell) and value.origin is None:
            cell, text = value, value.step.__doc__
        else:  # what a make_ makes, and what is not a cell
            continue
        also = {"vectors": cell.vectors, "inputs": cell.inputs, "x_only": cell.x_only}
        words = ", ".join(f"{kind} {' '.join(names)}" for kind, names in also.items() if names)
        summary = " ".join(text.split("\n\n")[0].split())
        rows.append(f"| `{name}` | {' '.join(cell.gates)} | {' '.join(cell.states)} | {words} | {summary} |")
    guide = (Path(__file__).parents[1] / "docs" / "write_a_cell.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in guide, "write this table anew:\n" + "\n".join(rows)
    assert [name for name in _FUNCTIONS if f"`{name}`" not in guide] == []
