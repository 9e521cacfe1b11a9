"""`accelerate`: the recurrent layers of torch.nn inside a model become whorl's, in place.  `restore` undoes it.

Only the class of a layer changes and what whorl keeps beside torch's attributes is added, so every parameter, buffer
and hook stays the object it was, for optimisers, state_dicts and wrappers that hold it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from whorl.errors import InputError
from whorl.layer import Layer
from whorl.modules import GRU, LSTM, RNN
from whorl.plan import check_engine
from whorl.recurrence import Recurrence
from whorl.steps import GRUCell, LSTMCell, RNNCell

_OURS: dict[type, type[Recurrence]] = {kind._torch: kind for kind in (LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell)}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_NAMES = {kind.__name__ for kind in _OURS}
_ADDED = "_added_by_accelerate"
"""The attribute in which an accelerated layer lists those that whorl gave it."""


@dataclass(frozen=True)
class LayerReport:
    """What became of one recurrent layer."""

    names: tuple[str, ...]
    """Where it is in the model, each place of a layer that is shared; "" is the model itself."""
    before: str
    """Its type."""
    after: str | None
    """Its type now; None where it was left as it was."""
    reason: str = ""
    """Why it was left."""


@dataclass(frozen=True)
class AdoptionReport:
    """What `accelerate` or `restore` did with each recurrent layer of a model: print it."""

    layers: tuple[LayerReport, ...]
    compiled: bool = False
    """A part of the model is compiled by torch.compile, which compiles it again at its next call."""

    @property
    def changed(self) -> tuple[LayerReport, ...]:
        """Those that have another type now."""
        return tuple(layer for layer in self.layers if layer.after is not None)

    @property
    def left(self) -> tuple[LayerReport, ...]:
        """Those that stayed what they were, each with its reason."""
        return tuple(layer for layer in self.layers if layer.after is None)

    def __str__(self) -> str:
        if not self.layers:
            return "no recurrent layer in this model"
        names = [", ".join(name or "(the model itself)" for name in layer.names) for layer in self.layers]
        widths = max(map(len, names)), max(len(layer.before) for layer in self.layers)
        count = len(self.layers)
        rows = [f"{len(self.changed)} of {count} recurrent layer{'s' * (count > 1)} changed"]
        for name, layer in zip(names, self.layers, strict=True):
            outcome = f"left: {layer.reason}" if layer.after is None else f"now {layer.after}"
            rows.append(f"  {name:{widths[0]}}  {layer.before:{widths[1]}}  {outcome}")
        return "\n".join(rows + ["  compiled by torch.compile: compiles again at its next call"] * self.compiled)


def accelerate(model: torch.nn.Module, *, engine: str = "auto") -> AdoptionReport:
    """Make the recurrent layers of torch.nn inside a model whorl's, in place, and say what became of each.

    LSTM, GRU, RNN and the three cells change; parametrised ones too (weight norm, spectral norm).  Their parameters
    stay the same objects, with the state that an optimiser has for them.  Subclasses of the user, layers that are
    quantised or compiled by torch.jit, and those whose methods were replaced are left, and reported with the reason.
    A model in torch.nn.DataParallel, DistributedDataParallel or torch.compile is changed inside.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LSTM(8, 16))
    >>> print(accelerate(model))
    1 of 1 recurrent layer changed
      1  torch.nn.LSTM  now whorl.LSTM

    Args:
        model: changed in place, itself too where it is a recurrent layer.
        engine: for each layer that changes: "auto", or the name of the engine that is to run and no other.

    Returns:
        A line for each recurrent layer, those too that were left.

    Raises:
        InputError: `model` is no module, or whorl has no such engine.
    """
    check_engine(engine)

    def adopt(layer: Any) -> None:
        before = set(vars(layer))
        _change_class(layer, _OURS[parametrize.type_before_parametrizations(layer)])
        layer._adopt(engine)
        vars(layer)[_ADDED] = tuple(sorted(set(vars(layer)) - before))

    return _each(model, "accelerate", _against_adopting, adopt)


def restore(model: torch.nn.Module) -> AdoptionReport:
    """Make what `accelerate` changed torch's own again, in place, and say what became of each recurrent layer.

    A layer that was built as whorl's stays, and is reported as left.

    >>> lstm = torch.nn.LSTM(8, 16)
    >>> report = accelerate(lstm)
    >>> print(restore(lstm))
    1 of 1 recurrent layer changed
      (the model itself)  whorl.LSTM  now torch.nn.LSTM
    >>> type(lstm) is torch.nn.LSTM
    True

    Raises:
        InputError: `model` is no module.
    """

    def give_back(layer: Any) -> None:
        for name in (*vars(layer).pop(_ADDED), "_options"):
            vars(layer).pop(name, None)
        _change_class(layer, _THEIRS[parametrize.type_before_parametrizations(layer)])

    return _each(model, "restore", _against_restoring, give_back)


def _each(
    model: torch.nn.Module, who: str, against: Callable[[Any], str | None], change: Callable[[Any], None]
) -> AdoptionReport:
    """`change` each recurrent layer that nothing is `against`; all reasons are asked for before anything changes."""
    if not isinstance(model, torch.nn.Module):
        if isinstance(model, type):
            raise InputError(f"model is the class {model.__name__}: build it first, whorl.{who} takes an object.")
        raise InputError(
            f"model is of type {type(model).__name__}: whorl.{who} takes a torch.nn.Module, changes the layers in it."
        )
    places: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_recurrent(module):
            places.setdefault(module, []).append(name)
    reasons = [against(layer) for layer in places]
    befores = [_title(layer) for layer in places]
    for layer, reason in zip(places, reasons, strict=True):
        if reason is None:
            change(layer)
    rows = tuple(
        LayerReport(tuple(names), before, None if reason else _title(layer), reason or "")
        for (layer, names), before, reason in zip(places.items(), befores, reasons, strict=True)
    )
    return AdoptionReport(rows, compiled=None in reasons and any(map(_is_compiled, model.modules())))


def _is_recurrent(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.RNNBase | torch.nn.RNNCellBase | Recurrence):
        return True
    if isinstance(module, torch.jit.ScriptModule):
        return module.original_name.removeprefix("Parametrized") in _NAMES
    return type(module).__module__.startswith("torch.ao.nn.") and type(module).__name__ in _NAMES


def _is_compiled(module: torch.nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _against_adopting(layer: Any) -> str | None:
    """Why this layer cannot become whorl's; None where it can."""
    if isinstance(layer, Recurrence):
        if _ADDED in vars(layer):
            return f"accelerated already, its engine is {layer.engine!r}: assign layer.engine for another"
        return "built as a layer of whorl"
    if isinstance(layer, torch.jit.ScriptModule):
        return "compiled by torch.jit, with torch's own operators in it: accelerate and run what it was made from"
    kind = parametrize.type_before_parametrizations(layer)
    if kind.__module__.startswith("torch.ao."):
        return "a layer of torch.ao for quantised weights, and whorl computes in floating point"
    if isinstance(layer, LazyModuleMixin) and layer.cls_to_become in _OURS:
        return "its sizes are not known before its first call: accelerate the model after that"
    if kind not in _OURS:
        return _no_torch_class(kind, _OURS)
    if getattr(layer, "proj_size", 0) and layer.mode != "LSTM":
        return f"proj_size is {layer.proj_size}, with which torch refuses each call: build it without"
    return _replaced(layer)


def _against_restoring(layer: Any) -> str | None:
    """Why this layer cannot become torch's again; None where it can."""
    if _ADDED not in vars(layer):
        return "built as a layer of whorl" if isinstance(layer, Recurrence) else "not a layer of whorl"
    kind = parametrize.type_before_parametrizations(layer)
    if kind not in _THEIRS:
        return _no_torch_class(kind, _THEIRS)
    given = layer._options.given() if isinstance(layer, Layer) else {}
    if given:
        listed = " and ".join(f"{name}={value!r}" for name, value in given.items())
        return f"it was given {listed}, which torch does not have: assign the default again first"
    return _replaced(layer)


def _no_torch_class(kind: type, known: dict) -> str:
    """Why a class that is not one of `known` is left."""
    if kind.__module__.startswith("torch."):
        return f"{kind.__name__} is not torch's plain layer: where fully_shard made it, call whorl before fully_shard"
    base = next((base.__name__ for base in kind.__mro__ if base in known), "LSTM")
    return f"a class of its own, whose methods may differ from those of {base}: let it extend whorl.{base}"


def _replaced(layer: torch.nn.Module) -> str | None:
    """Why a layer is left that has methods of its own, which its class would not reach; None where it has none.

    Its own flatten_parameters, which users put there to silence torch's, is in nobody's way.
    """
    for name in vars(layer):
        if callable(getattr(type(layer), name, None)) and name != "flatten_parameters":
            return f"this object has its own {name} in place of the class's: del layer.{name} frees it"
    return None


def _change_class(layer: torch.nn.Module, kind: type) -> None:
    """Give a layer the class `kind`, under the properties by which parametrisations reach its weights."""
    if parametrize.is_parametrized(layer):  # torch makes a class for each such layer, which its copies share
        own = {name: value for name, value in vars(type(layer)).items() if name not in ("__dict__", "__weakref__")}
        kind = type(type(layer).__name__, (kind,), own)
    layer.__class__ = kind


def _title(layer: Any) -> str:
    """The type of a layer, as one writes it; of a user's class its name."""
    if isinstance(layer, torch.jit.ScriptModule):
        return f"torch.jit.{type(layer).__name__} of {layer.original_name}"
    kind = parametrize.type_before_parametrizations(layer)
    room = kind.__module__.split(".")[0]
    prefix = {"torch": kind.__module__.split(".modules")[0] + ".", "whorl": "whorl."}.get(room, "")
    name = prefix + kind.__name__
    return f"{name}, parametrized" if parametrize.is_parametrized(layer) else name
