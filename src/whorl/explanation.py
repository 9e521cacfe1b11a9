"""`explain`: which engine runs a module's recurrent layers, and every reason against the faster ones."""

from dataclasses import dataclass
from typing import Any

import torch

from whorl.engines import ENGINES
from whorl.modules import Recurrence
from whorl.problem import Plan


@dataclass(frozen=True)
class Explanation:
    """The plan of each recurrent layer that a module would run, in the order of their calls."""

    plans: tuple[Plan, ...]
    names: tuple[str, ...]
    """Of each layer inside the module; empty for the module itself."""
    training: bool
    autocast: bool
    others: tuple[str, ...] = ()
    """Layers of torch.nn inside the module, which whorl does not run."""

    def __str__(self) -> str:
        mode = f"{'train' if self.training else 'eval'} mode, autocast {'on' if self.autocast else 'off'}"
        rows = []
        for name, plan in zip(self.names, self.plans, strict=True):
            title = f"{name}: " if name else ""
            rows.append(f"{title}{plan.engine}, {ENGINES[plan.engine].summary}{_asked(plan)}")
            rows.append(f"  for {plan.problem}; {mode}")
            rows += [f"  not {refusal}" for refusal in plan.refusals]
        rows += [f"{name}: not a layer of whorl, torch chooses what runs" for name in self.others]
        return "\n".join(rows) or f"no recurrent layer was called; {mode}"


def _asked(plan: Plan) -> str:
    return ", asked for by name" if plan.asked != "auto" else ""


def explain(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """What would run in `module(*args, **kwargs)`: print it.

    A recurrent layer is planned without running.  Any other module runs once without gradient, and each call of a
    recurrent layer inside it is planned as it comes, as if gradients were wanted wherever they are now.

    >>> import whorl
    >>> print(whorl.explain(whorl.LSTM(8, 16, engine="reference"), torch.zeros(5, 3, 8)))
    reference, plain torch, a loop over time in Python, asked for by name
      for lstm, 8 inputs, 16 units; 5 steps, batch 3; float32 on cpu, with gradient; train mode, autocast off

    Raises:
        UnsupportedError: an engine named by a layer cannot run its call.
    """
    plans: list[Plan] = []
    names: list[str] = []
    if isinstance(module, Recurrence):
        plans.append(module.plan(*args, **kwargs))
        names.append("")
    else:
        _run_once(module, args, kwargs, plans, names)
    kind = plans[0].problem.device.kind if plans else "cpu"
    others = tuple(
        f"{name} ({type(inner).__name__})"
        for name, inner in module.named_modules()
        if isinstance(inner, torch.nn.RNNBase | torch.nn.RNNCellBase) and not isinstance(inner, Recurrence)
    )
    return Explanation(tuple(plans), tuple(names), module.training, torch.is_autocast_enabled(kind), others)


def _run_once(module: torch.nn.Module, args: tuple, kwargs: dict, plans: list[Plan], names: list[str]) -> None:
    gradient = torch.is_grad_enabled()
    hooks = []
    for name, inner in module.named_modules():
        if isinstance(inner, Recurrence):

            def note(layer: Any, layer_args: tuple, layer_kwargs: dict, name: str = name) -> None:
                with torch.set_grad_enabled(gradient):
                    plans.append(layer.plan(*layer_args, **layer_kwargs))
                names.append(name)

            hooks.append(module.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
