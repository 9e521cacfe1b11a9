"""The cells of one step: torch.nn's own classes with whorl's engines under them."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from whorl.cells import library
from whorl.functional import complaint, planned, recurrent
from whorl.problem import Call, Form, Plan
from whorl.recurrence import Recurrence, exporting, leaf
from whorl.weights import kinds

_CELLS = {
    "LSTM": library.lstm.graph,
    "GRU": library.gru.graph,
    "RNN_TANH": library.rnn_tanh.graph,
    "RNN_RELU": library.rnn_relu.graph,
}


class _OneStep(Recurrence):
    """What LSTMCell, GRUCell and RNNCell add to torch's: a layer of one step."""

    def _build(self) -> None:
        if self._mode() not in _CELLS:
            return  # torch takes a nonlinearity that it does not know, and refuses each call
        cell = _CELLS[self._mode()]
        form = Form(cell=cell, inputs=self.input_size, units=self.hidden_size, bias=self.bias)
        self._set_form(form)
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
        if isinstance(input, Proxy):
            return leaf(self, input, hx)
        if exporting():
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
        x, states = input.unsqueeze(0), tuple(state.unsqueeze(0) for state in self._states("hx", hx, input, hx))
        if not batched:
            x, states = x.unsqueeze(0), tuple(state.unsqueeze(0) for state in states)
        call = Call(x, states, self._weights())
        weight, who = call.weights[0], type(self).__name__
        reason = complaint(x, states, weight, None, who, self.input_size, 1, self._widths)
        if reason is not None:
            self._refuse(reason, input, hx)
        return call, batched


class LSTMCell(_OneStep, torch.nn.LSTMCell):
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
        self._adopt(engine)


class GRUCell(_OneStep, torch.nn.GRUCell):
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
        self._adopt(engine)


class RNNCell(_OneStep, torch.nn.RNNCell):
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
        self._adopt(engine)

    @property
    def nonlinearity(self) -> str:
        """ "tanh" or "relu"."""
        return self.__dict__["nonlinearity"]

    @nonlinearity.setter
    def nonlinearity(self, name: str) -> None:
        self.__dict__["nonlinearity"] = name
        if "_form" in self.__dict__:
            self._build()

    def _mode(self) -> str:
        return f"RNN_{self.nonlinearity.upper()}"
