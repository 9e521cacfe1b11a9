"""The layers: torch.nn's own classes, with whorl's engines under them.

`whorl.LSTM` is a `torch.nn.LSTM`: arguments, parameters and their first values, state_dict, errors and the way to call
it are torch's.  A layer holds parameters and nothing else; where its work is done is `functional.recurrent`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from whorl.cells import library
from whorl.errors import InputError
from whorl.functional import complaint, noise, planned, recurrent
from whorl.plan import check_engine
from whorl.problem import Call, Form, Plan
from whorl.weights import kinds, names, shapes

_CELLS = {
    "LSTM": library.lstm.graph,
    "GRU": library.gru.graph,
    "RNN_TANH": library.rnn_tanh.graph,
    "RNN_RELU": library.rnn_relu.graph,
}
Arranged = tuple[Call, Tensor | None, bool]


class Recurrence:
    """What layers and cells share: the engine asked for, and their form as text.  Every layer of whorl is one."""

    _torch: ClassVar[type[torch.nn.Module]]
    input_size: int
    hidden_size: int
    bias: bool
    _form: str
    _names: tuple[str, ...]
    _shapes: tuple[tuple[int, ...], ...]
    _widths: dict[str, int]
    _engine: str

    @property
    def engine(self) -> str:
        """ "auto", or the name of the engine that is to run and no other."""
        return self._engine

    @engine.setter
    def engine(self, name: str) -> None:
        self._engine = check_engine(name)

    def _set_form(self, form: Form, engine: str) -> None:
        self.engine = engine
        self._form, self._names, self._shapes = form.to_json(), names(form), shapes(form)
        self._widths = {state: form.state_width(index) for index, state in enumerate(form.cell.states)}
        # torch compiles no subclass of its RNN classes with fullgraph=True unless this is set.
        torch._dynamo.config.allow_rnn = True

    def plan(self, input: Any, hx: Any = None) -> Plan:
        """The plan of this call, without running it."""
        raise NotImplementedError

    def _pack(self, finals: Sequence[Tensor]) -> Any:
        """Final states as hx has them."""
        raise NotImplementedError

    def _weights(self) -> tuple[Tensor, ...]:
        """Each weight by its attribute, so that parametrised and replaced ones are seen."""
        own = self._parameters  # type: ignore[attr-defined]  # Module.__getattr__ finds the same in 1 us more
        weights = tuple([own[name] if name in own else getattr(self, name) for name in self._names])
        if tuple([weight.shape for weight in weights]) != self._shapes or len({weight.dtype for weight in weights}) > 1:
            self._refuse_weights(weights)
        return weights

    def _refuse_weights(self, weights: Sequence[Tensor]) -> NoReturn:
        """Raise for weights that were replaced by others which do not fit: torch's kernels would read beside them."""
        for name, weight, shape in zip(self._names, weights, self._shapes, strict=True):
            if weight.shape != shape:
                raise InputError(f"{name} has shape {tuple(weight.shape)}, this {type(self).__name__} needs {shape}.")
        found = ", ".join(f"{name} {weight.dtype}" for name, weight in zip(self._names, weights, strict=True))
        raise InputError(f"the weights differ in dtype: {found}: bring them to one with .to().")

    def _states(self, input: Any, hx: Any) -> tuple[Tensor, ...]:
        """hx as one tensor for each state; none where hx is None."""
        if hx is None:
            return ()
        one = len(self._widths) == 1
        states = (hx,) if one else hx
        if (
            not isinstance(states, tuple | list)
            or len(states) != len(self._widths)
            or not all(isinstance(s, Tensor) for s in states)
        ):
            wanted = "a tensor" if one else f"{len(self._widths)} tensors ({', '.join(self._widths)})"
            self._refuse(f"hx is of type {type(hx).__name__}: {type(self).__name__} takes {wanted}.", input, hx)
        return tuple(states)

    def _refuse(self, reason: str, *args: Any) -> NoReturn:
        """Raise what the installed torch raises for this call, and only where it has no objection our own reason."""
        self._torch.forward(self, *args)
        raise InputError(reason)

    def extra_repr(self) -> str:
        engine = f", engine={self.engine!r}" if self.engine != "auto" else ""
        return super().extra_repr() + engine  # type: ignore[misc]


class _Layer(Recurrence):
    """What LSTM, GRU and RNN add to torch's."""

    mode: str
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    training: bool

    def __init__(self, *args: Any, engine: str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size and self.mode != "LSTM":  # torch lets it pass by position, and refuses every call
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        self._set_form(
            Form(
                cell=_CELLS[self.mode],
                inputs=self.input_size,
                units=self.hidden_size,
                projection=self.proj_size,
                layers=self.num_layers,
                directions=2 if self.bidirectional else 1,
                bias=self.bias,
            ),
            engine,
        )

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The output of every step and the final states; the call of the torch class.

        Args:
            input: [time, batch, inputs] ([batch, time, inputs] with batch_first, [time, inputs] unbatched), or a
                PackedSequence.
            hx: initial states [layers x directions, batch, width]; a pair (h, c) for LSTM.

        Returns:
            output in the layout of input, and the final states as hx has them.

        Raises:
            ValueError, RuntimeError: what torch raises, in its words.
            UnsupportedError: the engine named cannot run this.
            SlowError: `settings.slow` is "error", and only a loop in Python could run it.
        """
        if torch.jit.is_tracing():  # and so torch.onnx.export: plain cells go out as torch's own operator
            return self._torch.forward(self, input, hx)
        call, unsorted, batched = self._arranged(input, hx)
        y, *finals = recurrent(self._form, call, self._engine)
        if call.batch_sizes is not None:
            output = PackedSequence(y, call.batch_sizes, input.sorted_indices, unsorted)
            return output, self._pack(
                [final if unsorted is None else final.index_select(1, unsorted) for final in finals]
            )
        if not batched:
            return y.squeeze(1), self._pack([final.squeeze(1) for final in finals])
        return y.transpose(0, 1) if self.batch_first else y, self._pack(finals)

    def plan(self, input: Any, hx: Any = None) -> Plan:
        """The plan of this call, without running it."""
        call, _, _ = self._arranged(input, hx, draw=False)
        return planned(self._form, call, self._engine)

    def _arranged(self, input: Any, hx: Any, draw: bool = True) -> Arranged:
        """A call in whorl's order of axes, how to unsort its batch, and whether there is one."""
        states = self._states(input, hx)
        if isinstance(input, PackedSequence):
            x, sizes, order, unsorted = input
            batched = True
            states = states if order is None else tuple(state.index_select(1, order) for state in states)
        elif not isinstance(input, Tensor):
            self._refuse(f"x is of type {type(input).__name__}: give a tensor or a PackedSequence.", input, hx)
        else:
            x, sizes, unsorted, batched = input, None, None, input.dim() != 2
            if not batched:
                x, states = x.unsqueeze(1), tuple(state.unsqueeze(1) for state in states)
            elif self.batch_first and input.dim() == 3:
                x = x.transpose(0, 1)
        weights = self._weights()
        call = Call(x, states, weights, (), sizes)
        rows = self.num_layers * (2 if self.bidirectional else 1)
        reason = complaint(call, type(self).__name__, self.input_size, rows, self._widths)
        if reason is not None:
            self._refuse(reason, input, hx)
        if self.dropout and self.training and self.num_layers > 1:
            width = (self.proj_size or self.hidden_size) * (2 if self.bidirectional else 1)
            masks = noise(x, self.dropout, width, self.num_layers - 1) if draw else (x,) * (self.num_layers - 1)
            call = Call(x, states, weights, masks, sizes)
        return call, unsorted, batched


class _OneState:
    """Final states as the cells with one state give them."""

    def _pack(self, finals: Sequence[Tensor]) -> Tensor:
        return finals[0]


class _TwoStates:
    """Final states as LSTM gives them."""

    def _pack(self, finals: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(finals)


class LSTM(_TwoStates, _Layer, torch.nn.LSTM):
    """A `torch.nn.LSTM` (Hochreiter and Schmidhuber 1997) that runs on whorl's engines.

    Takes every argument of `torch.nn.LSTM`, in its order, and:

    Args:
        engine: "auto" for the fastest that can run a call, or the name of the engine that is to run and no other.

    >>> lstm = LSTM(8, 16, num_layers=2, bidirectional=True)
    >>> y, (h, c) = lstm(torch.zeros(5, 3, 8))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 32]), torch.Size([4, 3, 16]))
    """

    _torch = torch.nn.LSTM


class GRU(_OneState, _Layer, torch.nn.GRU):
    """A `torch.nn.GRU` (Cho et al. 2014, the reset gate after the product) that runs on whorl's engines.

    Takes every argument of `torch.nn.GRU`, in its order, and `engine` as `LSTM` does.

    >>> y, h = GRU(8, 16)(torch.zeros(5, 3, 8))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 16]), torch.Size([1, 3, 16]))
    """

    _torch = torch.nn.GRU


class RNN(_OneState, _Layer, torch.nn.RNN):
    """A `torch.nn.RNN` (Elman 1990) with tanh or relu that runs on whorl's engines.

    Takes every argument of `torch.nn.RNN`, in its order, and `engine` as `LSTM` does.

    >>> y, h = RNN(8, 16, nonlinearity="relu")(torch.zeros(5, 3, 8))
    >>> y.shape, h.shape
    (torch.Size([5, 3, 16]), torch.Size([1, 3, 16]))
    """

    _torch = torch.nn.RNN


class _OneStep(Recurrence):
    """What LSTMCell, GRUCell and RNNCell add to torch's: a layer of one step."""

    def _made(self, engine: str) -> None:
        """The end of each __init__."""
        self.engine = engine
        if self._mode() not in _CELLS:
            return  # torch takes a nonlinearity that it does not know, and refuses each call
        cell = _CELLS[self._mode()]
        form = Form(cell=cell, inputs=self.input_size, units=self.hidden_size, bias=self.bias)
        self._set_form(form, engine)
        self._names = kinds(form)

    def _mode(self) -> str:
        return type(self)._torch.__name__.removesuffix("Cell")

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The states after one step; the call of the torch class.

        Args:
            input: [batch, inputs], or [inputs] unbatched.
            hx: the states before, [batch, units] or [units]; a pair (h, c) for LSTMCell.

        Returns:
            The states after, as hx has them.

        Raises:
            ValueError, RuntimeError: what torch raises, in its words.
        """
        if torch.jit.is_tracing():
            return self._torch.forward(self, input, hx)
        call, batched = self._arranged(input, hx)
        finals = recurrent(self._form, call, self._engine)[1:]
        return self._pack([final[0] if batched else final[0, 0] for final in finals])

    def plan(self, input: Tensor, hx: Any = None) -> Plan:
        """The plan of this call, without running it."""
        return planned(self._form, self._arranged(input, hx)[0], self._engine)

    def _arranged(self, input: Tensor, hx: Any) -> tuple[Call, bool]:
        if self._mode() not in _CELLS:
            self._refuse(f"nonlinearity is {self._mode()}: write 'tanh' or 'relu'.", input, hx)
        batched = input.dim() != 1
        x, states = input.unsqueeze(0), tuple(state.unsqueeze(0) for state in self._states(input, hx))
        if not batched:
            x, states = x.unsqueeze(0), tuple(state.unsqueeze(0) for state in states)
        call = Call(x, states, self._weights())
        reason = complaint(call, type(self).__name__, self.input_size, 1, self._widths)
        if reason is not None:
            self._refuse(reason, input, hx)
        return call, batched


class LSTMCell(_TwoStates, _OneStep, torch.nn.LSTMCell):
    """A `torch.nn.LSTMCell` that runs on whorl's engines.

    >>> h, c = LSTMCell(8, 16)(torch.zeros(3, 8))
    >>> h.shape, c.shape
    (torch.Size([3, 16]), torch.Size([3, 16]))
    """

    _torch = torch.nn.LSTMCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device=device, dtype=dtype)
        self._made(engine)


class GRUCell(_OneState, _OneStep, torch.nn.GRUCell):
    """A `torch.nn.GRUCell` that runs on whorl's engines.

    >>> GRUCell(8, 16)(torch.zeros(3, 8)).shape
    torch.Size([3, 16])
    """

    _torch = torch.nn.GRUCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device=device, dtype=dtype)
        self._made(engine)


class RNNCell(_OneState, _OneStep, torch.nn.RNNCell):
    """A `torch.nn.RNNCell` that runs on whorl's engines.

    >>> RNNCell(8, 16, nonlinearity="relu")(torch.zeros(3, 8)).shape
    torch.Size([3, 16])
    """

    _torch = torch.nn.RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Any = None,
        dtype: Any = None,
        *,
        engine: str = "auto",
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity, device=device, dtype=dtype)
        self._made(engine)

    def _mode(self) -> str:
        return f"RNN_{self.nonlinearity.upper()}"
