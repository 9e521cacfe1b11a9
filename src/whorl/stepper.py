"""A layer step by step: one call for each step of a stream, with everything that can be done once done before."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from whorl.arguments import Axes, Extras, extra_inputs, marks
from whorl.engines import ENGINES
from whorl.engines.base import Step
from whorl.errors import InputError, UnsupportedError
from whorl.functional import complaint
from whorl.plan import announce, decide_step
from whorl.problem import Call, Plan, as_written, facts, problem


class Stepper:
    """A layer that is given one step at a time, and keeps its states from call to call; `layer.stepper()` makes one.

    Each call gives what the layer in eval mode gives for that step of the whole sequence.  Weights are laid out when it
    is made, and again where a call finds that a parameter was changed in place or replaced (by an optimizer,
    load_state_dict or `.to()`).  What is written through `.data`, or to an inference tensor, cannot be seen: call
    `refresh()`.

    No gradient is recorded, and autocast does not act: x has the dtype of the layer.  It is for one stream (or batch of
    them) at a time: threads that step at once need one each.

    >>> lstm = whorl.LSTM(8, 16, num_layers=2).eval()
    >>> stepper = lstm.stepper()
    >>> x = torch.randn(5, 1, 8)
    >>> y = torch.stack([stepper(step) for step in x])
    >>> torch.allclose(y, lstm(x)[0], atol=1e-5), [tuple(state.shape) for state in stepper.state]
    (True, [(2, 1, 16), (2, 1, 16)])
    """

    plan: Plan
    """Which engine runs a step, and every reason against those that would come before."""
    _step: Step

    def __init__(self, layer: Any, batch: int) -> None:
        who = type(layer).__name__
        if type(batch) is not int or batch < 1:
            raise InputError(f"batch is {batch!r}: write how many streams step together, 1 or more.")
        if layer.bidirectional:
            raise UnsupportedError(
                f"a stepper goes forward in time, and this {who} is bidirectional: what its other direction gives at "
                f"the first step depends on the last. Make it with bidirectional=False, or call {who} on sequences."
            )
        self._layer, self._batch, self._started = layer, batch, False
        self.refresh()

    def refresh(self) -> None:
        """Take the layer's weights and options as they are now; the states go on as they are."""
        self._check_mode()
        self._lay_out()

    @torch.inference_mode(False)  # states that are made here can be set outside of a block in which that is so
    @torch.no_grad()
    def _lay_out(self) -> None:
        layer, batch = self._layer, self._batch
        seen = [
            (held, name, tensor, tensor.data_ptr(), not tensor.is_inference() and tensor._version)
            for module in layer.modules()
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        form, engine = layer._form, layer._engine
        weights = tuple(as_written([weight.detach() for weight in layer._weights()]))
        x = weights[0].new_zeros(1, batch, layer.input_size)
        if self._started:
            states = tuple([state.to(x) for state in self._step.states])
        else:
            states = tuple([x.new_zeros(layer.num_layers, batch, width) for width in layer._widths.values()])
        extras = tuple([x.new_zeros(1, batch, 1) for _ in layer._extra_inputs])
        call = Call(x, states, weights, inputs=extras)
        made = decide_step(problem(form, facts(call, False)), engine)
        if made.engine == "reference" and made.asked == "auto":
            announce(made, f"each step of {made.problem.form.cell.name} runs on `reference`, in Python")
        step = ENGINES[made.engine].step(made, call)
        # From here on nothing fails: else the next call would take what was not laid out for what was.
        self.plan, self._step, self._form, self._engine, self._seen = made, step, form, engine, seen
        self._shape, self._dtype, self._device, self._started = x.shape[1:], x.dtype, x.device, True

    def __call__(self, x: Tensor, *, reset: Tensor | None = None, inputs: Any = None) -> Tensor:
        """The output of the next step; the states move on.

        Args:
            x: [batch, inputs]; [inputs] too where batch is 1.
            reset: bool [batch]: True where a new sequence begins: the states are zero before this step.
            inputs: what the cell reads beside x, by name: [batch, units or 1] each.

        Returns:
            [batch, width], or [width] of x [inputs].

        Raises:
            InputError: an argument that does not fit, or the layer is in train mode and draws at random there.
        """
        if self._layer.training:
            self._check_mode()
        self._keep_up()
        extras: tuple[Tensor, ...] = ()
        if not isinstance(x, Tensor):
            raise InputError(f"x is of type {type(x).__name__}: give a tensor [batch, inputs].")
        if x.shape != self._shape or x.dtype != self._dtype or x.device != self._device:
            if x.dim() == 1 and self._batch == 1:
                inputs = {name: one[None] for name, one in inputs.items()} if isinstance(inputs, Mapping) else inputs
                return self(x[None], reset=reset, inputs=inputs)[0]
            self._refuse(x)
        if reset is not None or inputs is not None or self._layer._extra_inputs:
            reset, extras = self._arranged(x, reset, inputs)
        if x.is_neg() or x._is_zerotensor():
            (x,) = as_written((x,))
        return self._step(x, reset, extras)

    @property
    def state(self) -> Any:
        """The states after the last step, as the layer gives them: [layers, batch, width]; a copy.

        Assign states of that shape to go on from them, or None to begin anew.
        """
        self._keep_up()
        return self._layer._pack([state.to(self._dtype, copy=True) for state in self._step.states])

    @state.setter
    def state(self, hx: Any) -> None:
        self._keep_up()
        layer = self._layer
        states = layer._states("state", hx)
        reason = complaint(
            torch.empty(1, *self._shape, dtype=self._dtype, device=self._device), states, layer._weights()[0], None,
            type(layer).__name__, layer.input_size, layer.num_layers, layer._widths, title="the state",
        )  # fmt: skip
        if reason is not None:
            raise InputError(reason)
        with torch.no_grad():
            for place, held in enumerate(self._step.states):
                held.copy_(states[place]) if states else held.zero_()
            self._step.moved()

    def __repr__(self) -> str:
        engine = ENGINES[self.plan.engine]
        how = "prepared" if self._step.prepared else "called for each step"
        rows = [f"Stepper of {self._layer}", f"  {self.plan.engine}, {engine.summary}, {how}"]
        rows += [f"  for {self.plan.problem}", *(f"  not {refusal}" for refusal in self.plan.refusals)]
        return "\n".join(rows)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a stepper holds memory of this process and is neither copied nor pickled: "
            "copy the layer and `stepper.state`, and make another with layer.stepper()."
        )

    def _keep_up(self) -> None:
        """Begin anew with the layer where it is no longer as it was."""
        layer = self._layer
        if layer._form is not self._form or layer._engine != self._engine:
            return self._lay_out()
        for held, name, tensor, place, version in self._seen:
            counted = version is not False  # torch counts no changes of an inference tensor
            if held.get(name) is not tensor or tensor.data_ptr() != place or (counted and tensor._version != version):
                return self._lay_out()

    def _check_mode(self) -> None:
        layer = self._layer
        if layer.training and (layer._random or (layer.dropout and layer.num_layers > 1)):
            raise InputError(
                f"this {type(layer).__name__} is in train mode, where its dropout or zoneout is drawn for a whole "
                "sequence, and a stepper has none: write layer.eval() before."
            )

    def _refuse(self, x: Tensor) -> NoReturn:
        layer, who = self._layer, type(self._layer).__name__
        if x.dim() != 2 or x.shape[0] != self._batch:
            raise InputError(
                f"x has shape {[*x.shape]}, this stepper takes one step [batch, inputs] = {[*self._shape]}: "
                f"give x[t] of a sequence, or make a stepper of another batch."
            )
        weight = layer._weights()[0]
        reason = complaint(x[None], (), weight, None, who, layer.input_size, layer.num_layers, layer._widths)
        raise InputError(reason or f"x is {x.dtype} and this stepper {self._dtype}: write x.to({self._dtype}).")

    def _arranged(self, x: Tensor, reset: Any, inputs: Any) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Both checked, in the words of a layer's call for one step."""
        layer = self._layer
        who = f"the stepper of {type(layer).__name__}"
        axes = Axes(who, x[None], False)
        by_name = inputs if isinstance(inputs, Mapping) else {}
        extras_given = {"inputs": inputs} | {f"inputs[{name!r}]": one for name, one in by_name.items()}
        forms = {"reset": (reset, "[batch]", 1)}
        forms |= {name: (one, "[batch, units or 1]", 2) for name, one in extras_given.items()}
        for name, (value, wanted, count) in forms.items():  # an axis for time goes before, which nobody gave
            if isinstance(value, Tensor) and (value.dim() != count or value.shape[0] != self._batch):
                given_as = f"{name} has shape {[*value.shape]}"
                raise InputError(f"{given_as}, {who} takes that of one step, {wanted} with batch {self._batch}.")
            if value is not None and not isinstance(value, Tensor) and name != "inputs":
                given_as = f"{name} is of type {type(value).__name__}"
                raise InputError(f"{given_as}, {who} takes a tensor {wanted} with batch {self._batch}.")

        def step(value: Any) -> Any:
            return value[None] if isinstance(value, Tensor) else value

        given = {name: step(value) for name, value in inputs.items()} if isinstance(inputs, Mapping) else step(inputs)
        extras = as_written(extra_inputs(axes, given, layer._extra_inputs, layer.hidden_size, x.dtype, False))
        marked = marks(axes, Extras(reset=step(reset)), 1, self._batch)
        return None if marked.reset is None else marked.reset[0], tuple([extra[0] for extra in extras])
