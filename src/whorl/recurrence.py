"""What every module of whorl is: its form as text, the engine asked for, and its weights and states by name."""

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.fx import Proxy

from whorl.errors import InputError, UnsupportedError
from whorl.plan import check_engine
from whorl.problem import Form, Plan
from whorl.weights import NATIVE_MODES, names, shapes

_DERIVED = frozenset(
    "_form _names _shapes _widths _native _vectors _zoneouts _recurrent_gates _extra_inputs _random _before".split()
)
"""Attributes that `_build` makes of the others."""


def exporting() -> bool:
    """Whether a program is being written that others run: in it plain cells are torch's own operators."""
    tracing = torch._C._get_tracing_state() is not None  # what torch.jit.is_tracing asks, in 2 calls less
    return tracing or (torch.compiler.is_compiling() and torch.onnx.is_in_onnx_export())


def leaf(layer: Any, input: Proxy, *args: Any, **kwargs: Any) -> Proxy:
    """What torch.fx.symbolic_trace sees of a layer: one call of it, as of torch.nn's own."""
    tracer: Any = input.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (input, *args), kwargs)


class Recurrence:
    """What layers and cells share: the engine asked for, and their form as text.  Every one of whorl is one."""

    _torch: ClassVar[Any]
    """The class of torch.nn that it is, where there is one."""
    input_size: int
    hidden_size: int
    bias: bool
    _form: str
    _names: tuple[str, ...]
    _shapes: tuple[tuple[int, ...], ...]
    _widths: dict[str, int]
    _engine: str
    _native: bool = True
    """The step is torch's own."""
    _before: Any = None
    """What a layer knows of the plan of the call before."""

    @property
    def engine(self) -> str:
        """ "auto", or the name of the engine that is to run and no other."""
        return self._engine

    @engine.setter
    def engine(self, name: str) -> None:
        self._engine = check_engine(name)

    def _adopt(self, engine: str) -> None:
        """Make of a torch module whose `__class__` was set to this one what its own `__init__` would have made."""
        self.engine = engine
        self._build()

    def _build(self) -> None:
        """Derive what `_DERIVED` names from the module's attributes."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived: a pickle keeps the functions of a layer, never the graph that a trace made."""
        above = getattr(super(), "__getstate__", None)  # Python 3.10 gives a plain object none
        state = above() if above is not None else self.__dict__
        return {name: value for name, value in state.items() if name not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._build()

    def _set_form(self, form: Form) -> None:
        self._form, self._names, self._shapes, self._before = form.to_json(), names(form), shapes(form), None
        self._widths = {state: form.state_width(index) for index, state in enumerate(form.cell.states)}
        self._native = form.cell.fingerprint in NATIVE_MODES
        # torch compiles no subclass of its RNN classes with fullgraph=True unless this is set.
        torch._dynamo.config.allow_rnn = True

    def plan(self, input: Any, hx: Any = None) -> Plan:
        """The plan of this call, without running it."""
        raise NotImplementedError

    def _pack(self, finals: Sequence[Tensor]) -> Any:
        """Final states as hx has them."""
        return tuple(finals) if len(finals) > 1 else finals[0]

    def _weights(self) -> tuple[Tensor, ...]:
        """Each weight by its attribute, so that parametrised and replaced ones are seen."""
        own = self._parameters  # type: ignore[attr-defined]  # Module.__getattr__ finds the same in 1 us more
        weights = tuple([own[name] if name in own else getattr(self, name) for name in self._names])
        found = tuple([getattr(weight, "shape", None) for weight in weights])  # of None none
        if found != self._shapes or len({weight.dtype for weight in weights}) > 1:
            self._refuse_weights(weights)
        return weights

    def _refuse_weights(self, weights: Sequence[Tensor]) -> NoReturn:
        """Raise for weights that were replaced by others which do not fit: torch's kernels would read beside them."""
        for name, weight, shape in zip(self._names, weights, self._shapes, strict=True):
            if weight is None:
                raise InputError(f"{name} is None, this {type(self).__name__} needs a tensor of shape {shape}.")
            if weight.shape != shape:
                raise InputError(f"{name} has shape {tuple(weight.shape)}, this {type(self).__name__} needs {shape}.")
        found = ", ".join(f"{name} {weight.dtype}" for name, weight in zip(self._names, weights, strict=True))
        raise InputError(f"the weights differ in dtype: {found}: bring them to one with .to().")

    def _states(self, name: str, given: Any, *args: Any) -> tuple[Tensor, ...]:
        """Initial states (or those of a reset) as one tensor for each; none where None is given.

        Args:
            args: of the call, for torch's own error.
        """
        if given is None:
            return ()
        one = len(self._widths) == 1
        states = (given,) if one else given
        if (
            not isinstance(states, tuple | list)
            or len(states) != len(self._widths)
            or not all(isinstance(s, Tensor) for s in states)
        ):
            wanted = "a tensor" if one else f"{len(self._widths)} tensors ({', '.join(self._widths)})"
            reason = f"{name} is of type {type(given).__name__}: {type(self).__name__} takes {wanted}."
            self._refuse(reason, *args)
        return tuple(states)

    def _refuse(self, reason: str, *args: Any) -> NoReturn:
        """Raise what the installed torch raises for this call, and only where it has no objection our own reason."""
        if args and self._torch is not None and self._native:
            self._torch.forward(self, *args)
        raise InputError(reason)

    def __prepare_scriptable__(self) -> NoReturn:
        """What torch.jit.script asks of each module, whose Python it then compiles."""
        raise UnsupportedError(
            f"torch.jit.script cannot compile whorl's {type(self).__name__}: use torch.jit.trace, or script torch's "
            "own layers: whorl.restore(model) gives back those that whorl.accelerate changed."
        )

    def extra_repr(self) -> str:
        engine = f", engine={self.engine!r}" if self.engine != "auto" else ""
        return super().extra_repr() + engine  # type: ignore[misc]
