"""whorl's options beside other code that does the same, on one GPU; each figure after a check in the same run.

    python benchmarks/options_beside.py ragged --batches 64 512
    python benchmarks/options_beside.py resets --dtypes bf16 tf32 --rivals torch torchrl
    python benchmarks/options_beside.py norm --rivals loop step whole graphs
    python benchmarks/options_beside.py stream

ragged  lengths uniform in 1 to 1,000, 512 units, beside torch.nn with a PackedSequence
resets  with probability 0.01 a step, batch 128, time 128, beside the loop over steps of CleanRL's PPO, sequences that
        are split at the resets and padded, and TorchRL's Triton kernels (`pip install torchrl`)
norm    layer norm of x, r and c, batch 128, time 30, beside a loop in torch, torch.compile of its step and of the whole
stream  a step of two layers of 512 units at batch 1, beside torch.nn's layer called for one step

whorl's numbers are held to the error rule; a rival's are compared with them: one that sums in bfloat16 is some percent
apart, and what is further than 0.2 computes something else and is left out.  In turns, medians: microseconds of a
replayed CUDA graph where a name says so, else of calls one after the other from Python.  --out FOLDER keeps what was
found, for benchmarks/results/options.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from options import DEVICE, DTYPES, ENGINE, Call, check, common, in_turns, kernels, of_bound, record, replayed, train
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whorl
from whorl.bench.baseline import error

GRAPH = ", CUDA graph"


class Layers(NamedTuple):
    """torch's layer and whorl's, with the same weights, an input and the gradient of the output."""

    theirs: nn.LSTM
    ours: nn.Module
    x: Tensor
    grad: Tensor


def layers(time: int, batch: int, units: int, dtype: torch.dtype) -> Layers:
    torch.manual_seed(0)
    theirs = nn.LSTM(units, units, device=DEVICE, dtype=dtype)
    x = torch.randn(time, batch, units, device=DEVICE, dtype=dtype, requires_grad=True)
    return Layers(theirs, ours(theirs), x, torch.randn_like(x))


def ours(theirs: nn.LSTM) -> nn.Module:
    """whorl's layer with the weights of torch's."""
    weight = theirs.weight_hh_l0
    made = whorl.LSTM(theirs.input_size, theirs.hidden_size, device=DEVICE, dtype=weight.dtype, engine=ENGINE)
    made.load_state_dict(theirs.state_dict())
    return made


def trained(call: Callable[[], Tensor], wanted: list[Tensor], grad: Tensor) -> Call:
    """The output of a call and gradients."""

    def step() -> tuple[Tensor, ...]:
        y = call()
        return y, *torch.autograd.grad(y, wanted, grad)

    return step


def compare(label: dict[str, Any], calls: dict[str, Call], turns: int, near: float) -> Iterator[dict[str, Any]]:
    """What rivals take on one problem, and how far their outputs and gradients are from those of the first.

    Args:
        near: how near the first came to the bound of the error rule.
    """
    said = " ".join(map(str, label.values()))
    if not near <= 1:
        print(f"{said} WRONG: {near:.3g} of what the error rule allows", flush=True)
        return
    first = [tensor.detach().clone() for tensor in next(iter(calls.values()))()]
    apart: dict[str, float] = {}
    for name, call in calls.items():
        apart[name] = max(error(got, one.double()) for got, one in zip(call(), first, strict=True))
    for name in [name for name, far in apart.items() if not far <= 0.2]:
        print(f"{said} {name}: {apart[name]:.3g} apart, left out", flush=True)
    del first
    made = {
        name: replayed(calls[name]) if name.endswith(GRAPH) else calls[name] for name in calls if apart[name] <= 0.2
    }
    for name, taken in in_turns(made, turns, 3).items():
        print(f"{said} {name:34}{taken:12.1f} us   {apart[name]:.2g} apart", flush=True)
        yield label | dict(
            contender=name, microseconds=round(taken, 1), apart=float(f"{apart[name]:.2g}"), of_bound=round(near, 3)
        )


def ragged(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    time = given.time or 1000
    for precision, units, batch in itertools.product(given.dtypes, given.units or (512,), given.batches or (64, 512)):
        dtype = DTYPES[precision]
        short = min(time, 50)  # float64 takes its time
        own = layers(short, batch, units, dtype)
        near = check(
            own.ours, own.x, dict(lengths=torch.randint(1, short + 1, (batch,), device=DEVICE)), own.grad, precision
        )
        theirs, layer, x, grad = layers(time, batch, units, dtype)
        lengths = torch.randint(1, time + 1, (batch,))
        lengths[0] = time
        real = (torch.arange(time)[:, None, None] < lengths[:, None]).to(x)
        x, grad = (x.detach() * real).requires_grad_(), grad * real
        on_gpu, share = lengths.to(DEVICE), round(float(lengths.sum()) / (time * batch), 3)

        def packed(x: Tensor = x, lengths: Tensor = lengths, theirs: nn.Module = theirs) -> Tensor:
            y = theirs(pack_padded_sequence(x, lengths, enforce_sorted=False))[0]
            return pad_packed_sequence(y, total_length=len(x))[0]

        def masked(x: Tensor = x, on_gpu: Tensor = on_gpu, layer: nn.Module = layer) -> Tensor:
            return layer(x, lengths=on_gpu)[0]

        def ahead(call: Callable[[], Tensor]) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (call(),)

        for kind in ("forward", "train"):
            label = dict(pass_=kind, dtype=precision, units=units, batch=batch, time=time, share=share)
            calls: dict[str, Call] = {}
            for name, call, whose in (
                ("whorl, lengths" + GRAPH, masked, layer),
                ("whorl, lengths", masked, layer),
                ("torch, PackedSequence", packed, theirs),
            ):
                all_of = [x, *whose.parameters()]
                calls[name] = trained(call, all_of, grad) if kind == "train" else partial(ahead, call)
            yield from compare(label, calls, given.turns, near)
        # the kernels alone, beside a run in which every sequence is as long as the longest
        for name, marks in (("as they are", on_gpu), ("padded", torch.full_like(on_gpu, time))):
            parts = {} if DEVICE == "cpu" else kernels(train(layer, x, grad, dict(lengths=marks)))
            taken = {kernel: round(found, 1) for kernel, found in parts.items() if kernel.startswith("lstm_")}
            print(f"ragged {batch} {name}: share {share}", taken, flush=True)
            yield dict(
                kernels=name, dtype=precision, units=units, batch=batch, time=time, share=share, microseconds=taken
            )


def resets(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    batch, time = (given.batches or [128])[0], given.time or 128
    for precision, units in itertools.product(given.dtypes, given.units or (256, 512)):
        theirs, layer, x, grad = layers(time, batch, units, DTYPES[precision])
        reset = torch.rand(time, batch, device=DEVICE) < 0.01
        near = check(ours(theirs), x, dict(reset=reset), grad, precision)
        wanted = [x, *theirs.parameters()]
        whole = train(layer, x, grad, dict(reset=reset))
        calls: dict[str, Call] = {"whorl, reset" + GRAPH: whole, "whorl, reset": whole}
        loop = partial(cleanrl, theirs, x, reset)
        if "graphs" in given.rivals:
            calls["torch, a loop over steps" + GRAPH] = trained(loop, wanted, grad)
        if "torch" in given.rivals:
            split = partial(split_and_padded, theirs, x, *places(reset))
            calls["torch, a loop over steps"] = trained(loop, wanted, grad)
            calls["torch, split and padded"] = trained(split, wanted, grad)
        if "torchrl" in given.rivals:
            calls["TorchRL, Triton"] = torchrl(theirs, x, reset, grad, precision)
        label = dict(dtype=precision, units=units, batch=batch, time=time)
        yield from compare(label, calls, given.turns, near)


def cleanrl(layer: nn.LSTM, x: Tensor, reset: Tensor) -> Tensor:
    """The loop of CleanRL's ppo_atari_lstm.py."""
    h = c = x.new_zeros(1, *x.shape[1:])
    keep, outputs = reset.logical_not().to(x.dtype), []
    for step, kept in zip(x, keep, strict=True):
        y, (h, c) = layer(step.unsqueeze(0), (kept.view(1, -1, 1) * h, kept.view(1, -1, 1) * c))
        outputs.append(y)
    return torch.cat(outputs)


def places(reset: Tensor) -> tuple[Tensor, Tensor]:
    """Of each step: the number of its part, and its place there."""
    time, batch = reset.shape
    begins = reset.clone()
    begins[0] = True
    number = begins.t().flatten().cumsum(0).view(batch, time).t() - 1
    place = torch.arange(time, device=reset.device)[:, None].expand_as(number)
    return number, place - torch.where(begins, place, 0).cummax(0).values


def split_and_padded(layer: nn.LSTM, x: Tensor, number: Tensor, place: Tensor) -> Tensor:
    """Parts between resets, as sequences of their own."""
    parts, longest = int(number.max()) + 1, int(place.max()) + 1  # read on the host, as they decide a shape
    padded = x.new_zeros(longest, parts, x.shape[-1]).index_put((place, number), x)
    return layer(padded)[0][place, number]


def torchrl(theirs: nn.LSTM, x: Tensor, reset: Tensor, grad: Tensor, precision: str) -> Call:
    """TorchRL's kernels as its LSTMModule calls them: float32 around products of bfloat16, or TF32."""
    from torchrl.modules.tensordict_module._rnn_triton import lstm_triton

    leaf = x.detach().transpose(0, 1).float().contiguous().requires_grad_()
    weights = [parameter.detach().float().requires_grad_() for parameter in theirs.parameters()]
    zero, begins = torch.zeros_like(leaf), reset.t().contiguous()
    wanted, outer = [leaf, *weights], grad.transpose(0, 1).float().contiguous()
    how = dict(compute_dtype=torch.bfloat16 if precision == "bf16" else torch.float32, input_precision="tf32")

    def step() -> tuple[Tensor, ...]:
        y = lstm_triton(leaf, zero, zero, *weights, begins, **how)[0]
        of_x, *rest = torch.autograd.grad(y, wanted, outer)
        return y.transpose(0, 1), of_x.transpose(0, 1), *rest

    return step


def norm(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    batch, time = (given.batches or [128])[0], given.time or 30
    for precision, units in itertools.product(given.dtypes, given.units or (512,)):
        torch.manual_seed(0)
        make = partial(whorl.LSTM, units, units, device=DEVICE, dtype=DTYPES[precision], layer_norm=True, engine=ENGINE)
        layer, again = make(), make()
        again.load_state_dict(layer.state_dict())
        x = torch.randn(time, batch, units, device=DEVICE, dtype=DTYPES[precision], requires_grad=True)
        grad = torch.randn_like(x)
        near = check(again, x, {}, grad, precision)
        own = dict(layer.named_parameters())
        wanted = [x, *own.values()]
        whole = train(layer, x, grad)
        calls: dict[str, Call] = {"whorl" + GRAPH: whole, "whorl": whole}
        if "loop" in given.rivals:
            calls["torch, a loop over steps"] = trained(partial(normed, normed_step, own, x), wanted, grad)
        if "graphs" in given.rivals:
            calls["torch, a loop over steps" + GRAPH] = trained(partial(normed, normed_step, own, x), wanted, grad)
        if "step" in given.rivals:
            compiled = torch.compile(normed_step)
            calls["torch.compile of a step"] = trained(partial(normed, compiled, own, x), wanted, grad)
        if "whole" in given.rivals:
            compiled = torch.compile(normed)
            calls["torch.compile of the loop"] = trained(partial(compiled, normed_step, own, x), wanted, grad)
        label = dict(dtype=precision, units=units, batch=batch, time=time)
        yield from compare(label, calls, given.turns, near)


def normed(step: Callable[..., tuple[Tensor, Tensor]], own: dict[str, Tensor], x: Tensor) -> Tensor:
    """The loop over time of an LSTM with layer norm, as it is written in torch."""
    h = c = x.new_zeros(x.shape[1:])
    vectors = [
        torch.cat([own[f"vector_{part}_{kind}_{gate}_l0"] for gate in "ifgo"])
        for part in "xr"
        for kind in ("gain", "shift")
    ]
    ends = [own[f"vector_c_{kind}_l0"] for kind in ("gain", "shift")]
    weights = [own[f"{name}_l0"] for name in ("weight_ih", "bias_ih", "weight_hh", "bias_hh")]
    outputs = []
    for entering in x.unbind(0):
        h, c = step(entering, h, c, *weights, *vectors, *ends)
        outputs.append(h)
    return torch.stack(outputs)


def normed_step(
    x: Tensor, h: Tensor, c: Tensor, weight_ih: Tensor, bias_ih: Tensor, weight_hh: Tensor, bias_hh: Tensor,
    x_gain: Tensor, x_shift: Tensor, r_gain: Tensor, r_shift: Tensor, c_gain: Tensor, c_shift: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_x = layer_norm(torch.addmm(bias_ih, x, weight_ih.t()), x_gain.shape, x_gain, x_shift)
    of_r = layer_norm(torch.addmm(bias_hh, h, weight_hh.t()), r_gain.shape, r_gain, r_shift)
    i, f, g, o = (of_x + of_r).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * layer_norm(c, c_gain.shape, c_gain, c_shift).tanh(), c


def stream(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps = 50
    for precision, units in itertools.product(given.dtypes, given.units or (512,)):
        torch.manual_seed(0)
        dtype = DTYPES[precision]
        theirs = nn.LSTM(units, units, 2, device=DEVICE, dtype=dtype)
        ours = whorl.LSTM(units, units, 2, device=DEVICE, dtype=dtype).eval()
        ours.load_state_dict(theirs.state_dict())
        x = torch.randn(8, 1, units, device=DEVICE, dtype=dtype)
        stepper = ours.stepper()
        with torch.no_grad():
            got = [torch.stack([stepper(step) for step in x])]
            ours.engine = "reference"
            plain, truth = [ours(x)[0]], [ours.double()(x.double())[0]]
            ours.to(dtype).engine = "auto"
            # torch's own switch for products does not act on a step: its sums are of float32
            near = of_bound(got, plain, truth, precision)
            label = dict(dtype=precision, units=units, batch=1, layers=2)
            if not near <= 1:
                print(label, f"WRONG: {near:.3g} of what the error rule allows", flush=True)
                continue
            stepper, one = ours.stepper(), x[:1].clone()

            def many(stepper: Any = stepper, step: Tensor = one[0]) -> tuple[()]:
                for _ in range(steps):
                    stepper(step)
                return ()

            def rival(theirs: nn.Module = theirs, one: Tensor = one) -> tuple[()]:
                state = None
                for _ in range(steps):
                    state = theirs(one, state)[1]
                return ()

            calls = {"whorl" + GRAPH: replayed(many), "whorl": many, "torch" + GRAPH: replayed(rival), "torch": rival}
            for name, taken in in_turns(calls, 4 * given.turns, 4).items():
                print(*label.values(), f"{name:34}{taken / steps:12.2f} us a step", flush=True)
                yield label | dict(contender=name, microseconds=round(taken / steps, 2), of_bound=round(near, 3))


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = {"ragged": ragged, "resets": resets, "norm": norm, "stream": stream}
    parser.add_argument("suites", nargs="+", choices=suites)
    common(parser)
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--time", type=int, help="in the place of what a suite is about")
    rivals = ("torch", "torchrl", "loop", "step", "whole", "graphs")
    parser.add_argument("--rivals", nargs="+", choices=rivals, default=["torch", "loop", "step"])
    given = parser.parse_args()
    for suite in given.suites:
        record(given, suite, suites[suite](given))


if __name__ == "__main__":
    main()
