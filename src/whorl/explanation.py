"""`explain`: which engine runs a module's recurrent layers, and every reason against the faster ones."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from whorl.engines import ENGINES
from whorl.errors import InputError
from whorl.problem import Plan, autocast_is_on
from whorl.recurrence import Recurrence
from whorl.settings import settings


@dataclass(frozen=True)
class Explanation:
    """The plan of each recurrent layer that a module would run, in the order of their calls."""

    plans: tuple[Plan, ...]
    names: tuple[str, ...]
    """Of each layer inside the module; empty for the module itself."""
    modes: tuple[str, ...]
    """In which each was called: train or eval, autocast on or off."""
    others: tuple[str, ...] = ()
    """Layers of torch.nn inside the module, which whorl does not run."""
    unseen: tuple[str, ...] = ()
    """Layers of whorl inside the module that were not called as modules are."""

    def __str__(self) -> str:
        rows = []
        for name, plan, mode in zip(self.names, self.plans, self.modes, strict=True):
            title = f"{name}: " if name else ""
            rows.append(f"{title}{plan.engine}, {ENGINES[plan.engine].summary}{_asked(plan)}")
            rows.append(f"  for {plan.problem}; {mode}")
            rows += [f"  {line}" for line in ENGINES[plan.engine].numbers(plan.problem)]
            rows += [f"  not {refusal}" for refusal in plan.refusals]
        rows += [f"{name}: not a layer of whorl, but of torch; whorl.accelerate makes it one" for name in self.others]
        rows += [f"{name}: not called, or only its forward() or a stepper, which are not seen" for name in self.unseen]
        return "\n".join(rows) or "no recurrent layer is in it"


def _asked(plan: Plan) -> str:
    return ", asked for by name" if plan.asked != "auto" else ""


def explain(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """What would run in `module(*args, **kwargs)`: print it.

    A recurrent layer is planned without running.  Any other module runs once (in train mode that moves what it counts,
    such as the statistics of a BatchNorm; torch's generators come back as they were), and each call of a recurrent
    layer inside it is planned as it comes, with a gradient where grad mode is on.  It is seen where the layer is called
    as modules are; its `forward()` and its steppers are not.

    >>> import whorl
    >>> print(whorl.explain(whorl.LSTM(8, 16, engine="reference"), torch.zeros(5, 3, 8)))
    reference, plain torch, a loop over time in Python, asked for by name
      for lstm, 8 inputs, 16 units; 5 steps, batch 3; float32 on cpu, with gradient; train mode, autocast off

    Raises:
        InputError: `module` is no module.
        UnsupportedError: an engine named by a layer cannot run its call.
    """
    if not isinstance(module, torch.nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"of type {type(module).__name__}"
        raise InputError(f"module is {what}: whorl.explain takes a torch.nn.Module, and then what it is called with.")
    noted = [_note("", module, args, kwargs)] if isinstance(module, Recurrence) else _run_once(module, args, kwargs)
    names, plans, modes = zip(*noted, strict=True) if noted else ((), (), ())
    others = tuple(
        f"{name} ({type(inner).__name__})".lstrip()
        for name, inner in module.named_modules()
        if isinstance(inner, torch.nn.RNNBase | torch.nn.RNNCellBase) and not isinstance(inner, Recurrence)
    )
    inside = [name for name, inner in module.named_modules() if isinstance(inner, Recurrence)]
    return Explanation(plans, names, modes, others, tuple(name for name in inside if name not in names))


def gpus(*given: Any) -> list[int]:
    """Those that the tensors in it are on, and so may draw: another's generator read would alone be a context there."""
    tensors = [value for value in tree_leaves(given) if isinstance(value, torch.Tensor)]
    return sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})


@torch._disable_dynamo  # which traces the hooks of a compiled module too
def _note(name: str, layer: Any, args: tuple, kwargs: dict) -> tuple[str, Plan, str]:
    """Name, plan and mode of one call."""
    plan = layer.plan(*args, **kwargs)
    autocast = autocast_is_on(plan.problem.device.kind)
    return name, plan, f"{'train' if layer.training else 'eval'} mode, autocast {'on' if autocast else 'off'}"


def _run_once(module: torch.nn.Module, args: tuple, kwargs: dict) -> list[tuple[str, Plan, str]]:
    hooks, noted = [], []
    for name, inner in module.named_modules():
        if isinstance(inner, Recurrence):

            def note(layer: Any, layer_args: tuple, layer_kwargs: dict, name: str = name) -> None:
                noted.append(_note(name, layer, layer_args, layer_kwargs))

            hooks.append(module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
    try:
        # What is slow is shown, not refused.
        held = [*module.parameters(), *module.buffers()]
        with torch.random.fork_rng(gpus(held, args, kwargs)), settings(slow="allow"):
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return noted
