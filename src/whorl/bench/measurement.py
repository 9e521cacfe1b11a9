"""One case measured: every contender built, checked against float64, and only then timed, in turns with the others."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from whorl.bench.cases import PASSES, Case
from whorl.bench.checks import Truth, Verdict
from whorl.bench.contenders import Contender, Layer
from whorl.bench.machine import missing_mode
from whorl.bench.passes import Material, Runner, switches
from whorl.bench.results import Measured, Outcome, now
from whorl.bench.timing import Effort, Timing, in_turns
from whorl.settings import settings

_FAR = 16  # cuDNN's float32 is off by 6 times what the rule allows, at batch 62, time 200, 168 units on an H200
Note = Callable[[str], None]
Made = TypeVar("Made")


def measure(
    case: Case, contenders: Sequence[Contender], device: torch.device, effort: Effort, note: Note = lambda text: None
) -> Measured:
    """The outcome of every pass of every contender.

    Args:
        note: told what is done next.
    """
    reason = missing_mode(case, device)
    if reason is not None:
        return Measured(case, now(), reason)
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with warnings.catch_warnings(), settings(slow="allow"), current, switches(tf32=case.precision == "tf32"):
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")  # torch, of bfloat16
        measured = _measure(case, contenders, device, effort, note)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


def _measure(case: Case, contenders: Sequence[Contender], device: torch.device, effort: Effort, note: Note) -> Measured:
    date = now()
    note(f"{case.name} float64")
    try:
        material = Material.of(case, device)
        truth = Truth.of(case, material)
    except torch.OutOfMemoryError as error:
        return Measured(case, date, f"no memory for its float64 check: {_line(error)}")
    layers: dict[str, Layer] = {}
    refused: dict[str, str] = {}
    for contender in contenders:
        reasons = contender.obstacles(case, device)
        if reasons:
            refused[contender.name] = "; ".join(reasons)
            continue
        made = _attempt(partial(contender.build, case, device), device)
        if isinstance(made, str):
            refused[contender.name] = made
        else:
            layers[contender.name] = made
    passes = {}
    for which in PASSES:
        note(f"{case.name} {which}")
        passes[which] = _measure_pass(which, contenders, layers, refused, material, truth, effort)
    return Measured(case, date, None, passes)


def _measure_pass(
    which: str,
    contenders: Sequence[Contender],
    layers: Mapping[str, Layer],
    refused: Mapping[str, str],
    material: Material,
    truth: Truth,
    effort: Effort,
) -> dict[str, Outcome]:
    outcomes = {name: Outcome(reason) for name, reason in refused.items()}
    device, runners, verdicts = material.x.device, {}, {}
    for contender in contenders:
        if contender.name in layers:
            made = _attempt(partial(Runner, contender, layers[contender.name], which, material), device)
            if isinstance(made, str):
                outcomes[contender.name] = Outcome(made)
            else:
                runners[contender.name], verdicts[contender.name] = made, truth.judge(made, material)
    rivals = [verdicts[contender.name] for contender in contenders if contender.rival and contender.name in verdicts]
    for contender in contenders:
        name = contender.name
        if name in verdicts and not _may_be_timed(contender, verdicts[name], rivals):
            outcomes[name] = _outcome(runners.pop(name), verdicts[name], None)
    for name, timing in in_turns(runners, device, effort).items():
        outcomes[name] = _outcome(runners[name], verdicts[name], timing)
    return {contender.name: outcomes[contender.name] for contender in contenders}


def _may_be_timed(contender: Contender, verdict: Verdict, rivals: Sequence[Verdict]) -> bool:
    """Within the error rule; or not far out of it, and a rival, or off by just what a rival is.

    torch's own kernels do not always keep to the rule, and whorl has engines that call them.
    """
    if verdict.ratio <= 1:
        return True
    same = (
        rival.tensor == verdict.tensor and math.isclose(rival.error, verdict.error, rel_tol=0.01) for rival in rivals
    )
    return verdict.ratio <= _FAR and (contender.rival or any(same))


def _outcome(runner: Runner, verdict: Verdict, timing: Timing | None) -> Outcome:
    reason = None if timing is not None else f"wrong numbers: {verdict}"
    finite = math.isfinite(verdict.error)
    return Outcome(
        reason=reason,
        engine=runner.engine,
        gpu=timing.gpu if timing else None,
        wall=timing.wall if timing else None,
        memory=runner.memory,
        error=float(f"{verdict.error:.3g}") if finite else None,
        bound=float(f"{verdict.bound:.3g}"),
        tensor=verdict.tensor,
    )


def _attempt(make: Callable[[], Made], device: torch.device) -> "Made | str":
    """What `make` gives, or what torch says against it."""
    try:
        return make()
    except RuntimeError as error:
        reason = _line(error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises where the error was of a kind after which nothing can be trusted
        torch.cuda.empty_cache()
    return reason


def _line(error: Exception) -> str:
    text = " ".join(" ".join(str(error).split()).split(" ")[:60])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
