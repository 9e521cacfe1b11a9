"""From a problem to a plan: which engine runs, and every reason against those that would have come before."""

import re
import sys
import warnings
from dataclasses import replace
from functools import lru_cache

from whorl.engines import ENGINES
from whorl.errors import InputError, SlowError, SlowWarning, UnsupportedError
from whorl.problem import Facts, Plan, Problem, Refusal, problem
from whorl.settings import settings


@lru_cache(maxsize=8192)
def plan(form: str, known: Facts, engine: str = "auto") -> Plan:
    """The plan of a layer's form, as `Form.to_json` writes it, and the facts of a call: see `decide`."""
    return decide(problem(form, known), engine)


def decide(problem: Problem, engine: str = "auto") -> Plan:
    """The plan of a problem; touches no tensor.

    Args:
        engine: "auto", or the name of the engine that is to run and no other.

    Raises:
        InputError: an engine that whorl does not have.
        UnsupportedError: the engine asked for by name cannot run the problem; the message has every reason.
    """
    check_engine(engine)
    refusals: list[Refusal] = []
    for name in ENGINES if engine == "auto" else [engine]:
        reasons = tuple(ENGINES[name].obstacles(problem))
        if engine == "auto" and not reasons:
            reasons = tuple(ENGINES[name].slower(problem))
        if not reasons:
            return Plan(problem, name, engine, tuple(refusals))
        refusals.append(Refusal(name, reasons))
    who = "no engine can run" if engine == "auto" else f"the engine {engine!r} cannot run"
    raise UnsupportedError("\n".join([f"{who} {problem}:", *(f"  {refusal}" for refusal in refusals)]))


def decide_step(problem: Problem, engine: str = "auto") -> Plan:
    """The plan of a stepper: as `decide`, but an engine with a prepared step of its own comes before all others.

    Args:
        problem: of one step.
    """
    if check_engine(engine) != "auto":
        return decide(problem, engine)
    refusals: list[Refusal] = []
    for name, candidate in ENGINES.items():
        if candidate.prepares(problem):
            reasons = candidate.obstacles(problem)
            if not reasons:
                return Plan(problem, name, engine, tuple(refusals))
            refusals.append(Refusal(name, tuple(reasons)))
    made = decide(problem, engine)
    known = {refusal.engine for refusal in made.refusals}
    return replace(made, refusals=(*made.refusals, *(one for one in refusals if one.engine not in known)))


def check_engine(engine: str) -> str:
    """`engine`, where whorl has it.

    Raises:
        InputError: where it has not.
    """
    if not isinstance(engine, str) or engine not in ("auto", *ENGINES):
        raise InputError(f"engine is {engine!r}: write one of 'auto', {', '.join(map(repr, ENGINES))}.")
    return engine


_announced: set[tuple[str, ...]] = set()


def announce(made: Plan, title: str = "") -> None:
    """Warn that a call runs in a loop in Python, once for each kind of layer and reasons, or refuse it: see settings.

    Raises:
        SlowError: `settings.slow` is "error".
    """
    slow = settings.slow
    if slow == "allow":
        return
    problem = made.problem
    title = title or f"{problem.form.cell.name} runs on `reference`, a loop over {problem.time} steps in Python"
    text = "\n".join([f"{title}:", f"  {problem}", *(f"  not {refusal}" for refusal in made.refusals)])
    if slow == "error":
        raise SlowError(f"{text}\nwhorl.settings.slow is 'error'; 'warn' or 'allow' would run it.")
    kind = (title, *(str(refusal) for refusal in made.refusals))
    key = (problem.form.cell.fingerprint, str(problem.dtype), problem.device.kind, re.sub(r"\d+", "#", str(kind)))
    if key not in _announced:
        text = f"{text}\nwhorl.settings.slow = 'allow' silences this, 'error' refuses it."
        warnings.warn(text, SlowWarning, stacklevel=_level_of_the_caller())
        _announced.add(key)  # after: where warnings are errors it is raised every time


def _level_of_the_caller() -> int:
    """The stack level, seen from `announce`, of the first line that is neither whorl's nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("whorl", "torch"):
        level, frame = level + 1, frame.f_back
    return level
