"""A layer: its parameters, its options, and its call brought into the order of a Call."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from whorl.arguments import NOTHING, Axes, Extras, Masks, extra_inputs, marks
from whorl.cells.cell import Cell
from whorl.cells.wrappers import counted
from whorl.engines import taped
from whorl.errors import CellError, InputError, UnsupportedError
from whorl.functional import autocasts, complaint, dropout_masks, planned, recurrent
from whorl.options import Options, make_cell, wrapped, zoneouts
from whorl.problem import PLAIN, Call, Form, Plan, kind_of, switches
from whorl.recurrence import Recurrence, exporting, leaf
from whorl.stepper import Stepper


def _option(name: str) -> property:
    """An option of a layer as an attribute; one that decides parameters can be read only."""

    def read(layer: "Layer") -> Any:
        return getattr(layer._options, name)

    def write(layer: "Layer", value: Any) -> None:
        if name in ("layer_norm", "peephole", "coupled"):
            raise InputError(
                f"{name} decides which parameters a layer has, and this {type(layer).__name__} is built: "
                f"make a new one with {name}={value!r}."
            )
        before, built = layer._options, False
        layer._options = replace(before, **{name: value})
        try:
            layer._build()
            built = True
        finally:  # whatever a step that cannot be traced raises
            if not built:
                layer._options = before

    return property(read, write, doc=Options.__dataclass_fields__[name].metadata["meaning"])


class Layer(Recurrence, torch.nn.Module):
    """What LSTM, GRU, RNN and Recurrent share."""

    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int
    training: bool
    _options = Options()
    _vectors: dict[str, float]
    """Each vector of the cell, with its initial value."""
    _zoneouts: tuple[float, ...]
    _recurrent_gates: int
    _extra_inputs: tuple[str, ...]
    _random: bool
    """Something is drawn in training, beside torch's own dropout."""
    _counted: int | None = None
    """Units that count in means, where the others are padding whose parameters are all zero; None: all of them."""

    def _cell(self) -> Cell:
        """The cell, with those options that are its own."""
        return make_cell(self._kind, self._options, "relu" if getattr(self, "mode", "") == "RNN_RELU" else "tanh")

    @property
    def _kind(self) -> str:
        """By which name `options` knows it."""
        return self._torch.__name__ if self._torch is not None else "Recurrent"

    def _build(self) -> None:
        options = self._options
        graph, self._vectors = wrapped(self._kind, self._cell(), options)
        if self._counted is not None:
            graph = counted(graph, self._counted, self.hidden_size)
        form = Form(
            cell=graph,
            inputs=self.input_size,
            units=self.hidden_size,
            projection=self.proj_size,
            layers=self.num_layers,
            directions=2 if self.bidirectional else 1,
            bias=self.bias,
            zoneout=zoneouts(options, graph.states),
            recurrent_dropout=float(options.recurrent_dropout),
            recurrent_dropout_mode=options.recurrent_dropout_mode,
            input_dropout=float(options.input_dropout),
            memory=options.memory,
        )
        self._set_form(form)
        self._zoneouts, self._recurrent_gates, self._extra_inputs = form.zoneout, len(graph.recurrent), graph.inputs
        drops = (options.recurrent_dropout, options.input_dropout, options.weight_drop, *form.zoneout)
        self._random = any(drops)

    def pad_from(self, units: int) -> None:
        """Count the first `units` alone in means: the others are padding, and their parameters are to be zero.

        They stay zero in outputs and states, of a cell that makes zeros of zeros; gradients of the units that count
        are those of a layer without the padding.  A layer's file does not say so.

        Raises:
            InputError: there are not so many.
            CellError: the step averages something that is not zero in the padding.
        """
        if not 1 <= units <= self.hidden_size:
            raise InputError(
                f"units is {units}: write 1 to {self.hidden_size}, the units of this {type(self).__name__}."
            )
        before, self._counted = self._counted, units
        try:
            self._build()
        except CellError:  # then the layer is as it was
            self._counted = before
            raise

    def _make_parameters(self, device: Any, dtype: Any, anew: bool = True) -> None:
        """Every parameter of the form, or (not `anew`) the vectors beside those that torch made."""
        for name, shape in zip(self._names, self._shapes, strict=True):
            if anew or name.startswith("vector_"):
                setattr(self, name, torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._fill(anew)

    def reset_parameters(self) -> None:
        """New weights, drawn as torch draws them in its order; vectors as they begin."""
        self._fill(weights=True)

    def _fill(self, weights: bool) -> None:
        bound = 1 / math.sqrt(self.hidden_size) if self.hidden_size > 0 else 0.0
        begins = {name: self._vectors[_vector(name)] for name in self._names if name.startswith("vector_")}
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in begins:
                    parameter.fill_(begins[name])
                elif weights:
                    parameter.uniform_(-bound, bound)
            for name, value in begins.items():
                if is_parametrized(self, name):  # whose parameter is another, and has another name
                    setattr(self, name, torch.full_like(getattr(self, name), value))

    def flatten_parameters(self) -> None:
        """Lays the weights of a plain cell out for cuDNN, as torch does; nothing where cuDNN could not run it."""
        if self._native and self._torch is not None:
            self._torch.flatten_parameters(self)

    def forward(
        self,
        input: Any,
        hx: Any = None,
        *,
        lengths: Any = None,
        mask: Tensor | None = None,
        reset: Any = None,
        reset_to: Any = None,
        inputs: Any = None,
        dropout_masks: Any = None,
        return_states: bool = False,
    ) -> Any:
        """The output of every step and the final states; the call of the torch class, and its options.

        Args:
            input: [time, batch, inputs] ([batch, time, inputs] with batch_first, [time, inputs] unbatched), or a
                PackedSequence.
            hx: initial states [layers x directions, batch, width]; a pair (h, c) for LSTM.
            lengths: int [batch]: the steps of each sequence, on any device.
            mask: bool [time, batch]: False where a step does not count.
            reset: bool [time, batch]: True where a new sequence begins.
            reset_to: the states that a reset gives, as hx; zero without it.
            inputs: what the cell reads beside x, by name: [time, batch, units or 1] each.
            dropout_masks: masks in the place of those that would be drawn, by the option's name.
            return_states: whether to give every state of every step of the last layer too.

        Returns:
            output in the layout of input, and the final states as hx has them; with `return_states` also a dict of
            [time, batch, directions x width].

        Raises:
            ValueError, RuntimeError: what torch raises, in its words.
            InputError: an option of the call that does not fit.
            UnsupportedError: the engine named cannot run this.
            SlowError: `settings.slow` is "error", and only a loop in Python could run it.
        """
        if isinstance(input, Proxy):
            options = dict(lengths=lengths, mask=mask, reset=reset, reset_to=reset_to, inputs=inputs)
            options |= dict(dropout_masks=dropout_masks, return_states=return_states or None)
            return leaf(self, input, hx, **{name: value for name, value in options.items() if value is not None})
        _check_flag("return_states", return_states)
        extras = NOTHING
        if not (lengths is mask is reset is reset_to is inputs is dropout_masks is None):
            extras = Extras(lengths, mask, reset, reset_to, inputs, dropout_masks)
        if exporting():
            return self._traced(input, hx, extras is not NOTHING or return_states)
        seed = None
        if not return_states and not torch.compiler.is_compiling():
            before = self._before  # which another thread may change meanwhile
            outputs, seed = self._as_before(before, input, hx, extras)
            if outputs:
                return (outputs[0].transpose(0, 1) if self.batch_first else outputs[0]), self._pack(outputs[1:])
        call, unsorted, batched = self._arranged(input, hx, extras, seed=seed)
        y, *rest = self._outputs(call, return_states)
        count = len(self._widths)
        finals: list[Tensor] = rest[:count]
        sequences: list[Any] = [y, *rest[count:]]
        if call.batch_sizes is not None:
            sequences = [PackedSequence(data, call.batch_sizes, input.sorted_indices, unsorted) for data in sequences]
            finals = [final if unsorted is None else final.index_select(1, unsorted) for final in finals]
        elif not batched:
            sequences, finals = [part.squeeze(1) for part in sequences], [final.squeeze(1) for final in finals]
        elif self.batch_first:
            sequences = [part.transpose(0, 1) for part in sequences]
        output, *states = sequences
        if not return_states:
            return output, self._pack(finals)
        return output, self._pack(finals), dict(zip(self._widths, states, strict=True))

    def _outputs(self, call: Call, return_states: bool) -> tuple[Tensor, ...]:
        """What `recurrent` gives; and the plan is remembered, where C++ knows it."""
        if torch.compiler.is_compiling():
            return recurrent(self._form, call, self._engine, return_states)
        taped.latest.number = -1
        made = recurrent(self._form, call, self._engine, return_states)
        number = taped.latest.number
        self._before = None
        if number >= 0:
            marked = tuple([mark is not None for mark in call.marks[2:]])
            self._before = _Before(number, tuple(call.x.shape), self._engine, _switches(call.x), marked)
        return made

    def _as_before(
        self, before: "_Before | None", input: Any, hx: Any, extras: Extras
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """The output and the final states by the plan of the call before; nothing where it may not be this one's.

        What it read of tensors is compared in C++, the rest here: beside kernels that do nothing a forward pass of LSTM
        32x30x128 takes the host 22 us so and 33 with a plan (two cores of an AMD EPYC).

        Returns:
            Beside that the seed, where one was drawn: torch's generator has moved.
        """
        if before is None or type(input) is not Tensor or before.engine != self._engine:
            return (), None
        draws = self.training and self._random
        marked = extras.lengths is not None, extras.mask is not None, extras.reset is not None, draws
        between = bool(self.dropout) and self.num_layers > 1
        copies = self.training and (between or self._options.weight_drop > 0)
        if marked != before.marks or copies or not (extras.reset_to is extras.inputs is extras.dropout_masks is None):
            return (), None
        if before.switches != _switches(input) or torch._C._are_functorch_transforms_active() or not taped.ready():
            return (), None
        if torch.autograd.forward_ad._current_level >= 0 or autocasts(input):
            return (), None
        x, given, seed = input.transpose(0, 1) if self.batch_first and input.dim() == 3 else input, PLAIN, None
        if any(marked):
            if input.dim() != 3 or x.shape != before.shape:  # else it would be marked, and drawn for, twice
                return (), None
            given = marks(Axes(type(self).__name__, input, self.batch_first), extras, x.shape[0], x.shape[1])
            seed = self._seed(x) if draws else None
        states, tensors = self._states("hx", hx, input, hx), [mark for mark in (*given, seed) if mark is not None]
        return taped.run_like(before.number, x, states, self._weights(), tensors), seed

    def _seed(self, x: Tensor) -> Tensor:
        """From which a call's masks are drawn, by torch's generator."""
        return torch.randint(2**63 - 1, (), device=x.device)

    def plan(self, input: Any, hx: Any = None, *, return_states: bool = False, **options: Any) -> Plan:
        """The plan of this call, without running it; takes what the call takes."""
        _check_flag("return_states", return_states)
        call, _, _ = self._arranged(input, hx, Extras(**options), draw=False)
        return planned(self._form, call, self._engine, return_states)

    def stepper(self, batch: int = 1) -> Stepper:
        """One step at a time, for streams: weights are laid out once, and states are kept from call to call.

        Args:
            batch: how many streams step together.

        Raises:
            UnsupportedError: the layer is bidirectional, or the engine that it names cannot run this.
            InputError: it is in train mode and has dropout or zoneout.
            SlowError: `settings.slow` is "error", and only steps in Python could run it.
        """
        return Stepper(self, batch)

    def extra_repr(self) -> str:
        options = [f", {name}={value!r}" for name, value in self._options.given().items()]
        return super().extra_repr() + "".join(options)

    def _traced(self, input: Any, hx: Any, has_options: bool) -> Any:
        """Torch's own forward, where it is the same."""
        options = has_options or self._zoneouts or (self._random and self.training)
        if self._torch is None or not self._native or options:
            raise UnsupportedError(
                f"torch.jit.trace and ONNX export keep plain LSTM, GRU and RNN, as torch's own operator, and this "
                f"{type(self).__name__} has options or a cell of its own, whose steps they would unroll to the length "
                "of the example: use torch.export or torch.compile."
            )
        return self._torch.forward(self, input, hx)

    def _arranged(
        self, input: Any, hx: Any, extras: Extras = NOTHING, draw: bool = True, seed: Tensor | None = None
    ) -> tuple[Call, Tensor | None, bool]:
        """A call in whorl's order of axes, how to unsort its batch, and whether there is one.

        Args:
            draw: whether random numbers are drawn; a plan needs none, and must not move torch's generator.
            seed: one that was drawn already.
        """
        states = self._states("hx", hx, input, hx)
        to = self._states("reset_to", extras.reset_to)
        sizes: Tensor | None = None
        if isinstance(input, PackedSequence):
            x, sizes, order, unsorted = input
            batched = True
        elif not isinstance(input, Tensor):
            self._refuse(f"x is of type {type(input).__name__}: give a tensor or a PackedSequence.", input, hx)
        else:
            x, order, unsorted, batched = input, None, None, input.dim() != 2
            if not batched:
                x = x.unsqueeze(1)
            elif self.batch_first and input.dim() == 3:
                x = x.transpose(0, 1)
        weights = self._weights()
        who = type(self).__name__
        rows = self.num_layers * (2 if self.bidirectional else 1)
        known = (weights[0], sizes, who, self.input_size, rows, self._widths)
        reason = complaint(x, states, *known, unbatched=not batched)
        if reason is not None:
            self._refuse(reason, input, hx)
        reason = complaint(x, to, *known, title="reset_to", unbatched=not batched) if to else None
        if reason is not None:
            raise InputError(reason)
        if order is not None:
            states, to = (tuple([state.index_select(1, order) for state in part]) for part in (states, to))
        elif not batched:
            states, to = (tuple([state.unsqueeze(1) for state in part]) for part in (states, to))
        call = Call(x, states, weights)
        random = self.training and (self._random or self.dropout)
        if sizes is not None or extras is not NOTHING or random or self._extra_inputs:
            call = self._with_extras(call, Axes(who, input, self.batch_first), extras, to, sizes, draw, seed)
        return call, unsorted, batched

    def _with_extras(
        self, call: Call, axes: Axes, extras: Extras, to: tuple[Tensor, ...], sizes: Tensor | None, draw: bool,
        seed: Tensor | None,
    ) -> Call:  # fmt: skip
        """The call with its options, and with what is drawn for it."""
        x, weights = call.x, call.weights
        time, batch = (x.shape[0], x.shape[1]) if sizes is None else (len(sizes), _count_sequences(sizes))
        marked = marks(axes, extras, time, batch)
        if to and extras.reset is None:
            raise InputError("reset_to is given without reset: write where, as reset=bool [time, batch].")
        inputs = extra_inputs(axes, extras.inputs, self._extra_inputs, self.hidden_size, x.dtype, autocasts(x))
        noise, given = self._given_noise(call, axes, extras.dropout_masks, batch)
        options, training = self._options, self.training
        width = (self.proj_size or self.hidden_size) * (2 if self.bidirectional else 1)
        inner = self.num_layers - 1
        dropout: Sequence[Tensor] = ()
        if "dropout" in given:
            dropout = [mask.to(x.dtype) for mask in given.by_step("dropout", [width] * inner, inner)]
        elif self.dropout and training and inner:
            dropout = dropout_masks(x, self.dropout, width, inner) if draw else (x,) * inner
        if "weight_drop" in given:
            weights = self._dropped(weights, given.weights("weight_drop", self._shapes[1]))
        elif options.weight_drop and training and draw:
            every = len(self._names) // (self.num_layers * (2 if self.bidirectional else 1))
            ones = [torch.ones_like(weight) for weight in weights[1::every]]
            weights = self._dropped(weights, [F.dropout(one, options.weight_drop) for one in ones])
        drawn = {
            "recurrent_dropout": options.recurrent_dropout and self._recurrent_gates,
            "input_dropout": options.input_dropout,
            **{f"zoneout_{state}": chance for state, chance in zip(self._widths, self._zoneouts, strict=False)},
        }
        if training and any(chance and name not in given for name, chance in drawn.items()):
            if seed is None:
                seed = self._seed(x) if draw else x.new_zeros((), dtype=torch.int64)
            marked = marked._replace(seed=seed)
        return call._replace(
            weights=weights, dropout=tuple(dropout), reset_to=to, inputs=inputs, noise=noise, marks=marked
        )

    def _dropped(self, weights: tuple[Tensor, ...], masks: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The weights with each weight_hh multiplied by its mask."""
        every = len(self._names) // len(masks)
        row = list(weights)
        for place, mask in enumerate(masks):
            row[every * place + 1] = row[every * place + 1] * mask.to(row[1].dtype)
        return tuple(row)

    def _given_noise(self, call: Call, axes: Axes, masks: Any, batch: int | str) -> tuple[tuple[Tensor, ...], Any]:
        """`Call.noise`, and every mask that is given."""
        if masks is None:
            return (), ()
        directions = 2 if self.bidirectional else 1
        count, width, gates = self.num_layers * directions, self.proj_size or self.hidden_size, self._recurrent_gates
        zoneout = {f"zoneout_{state}": size for state, size in self._widths.items()}
        names = ["dropout", "input_dropout", *(["recurrent_dropout", "weight_drop"] if gates else []), *zoneout]
        given = Masks(axes, masks, count, call.x.dtype, names)
        absent = [call.x.new_empty(())] * count
        columns = [absent] * (2 + len(zoneout))
        if "input_dropout" in given:
            sizes = [shape[1] for name, shape in zip(self._names, self._shapes, strict=True) if "weight_ih" in name]
            rows = self._shapes[0][0] // self.hidden_size
            columns[0] = given.held("input_dropout", [((batch, size), (rows, batch, size)) for size in sizes])
        if "recurrent_dropout" in given and self._options.recurrent_dropout_mode == "step":
            columns[1] = given.by_step("recurrent_dropout", [width] * count)
        elif "recurrent_dropout" in given:
            by_gate = self._options.recurrent_dropout_mode == "gate"
            shape = (gates, batch, width) if by_gate else (batch, width)
            columns[1] = given.held("recurrent_dropout", [(shape,)] * count)
        for place, (name, size) in enumerate(zoneout.items()):
            if name in given:
                columns[2 + place] = given.by_step(name, [size] * count)
        noisy = any(column is not absent for column in columns)
        return tuple(mask for row in zip(*columns, strict=True) for mask in row) if noisy else (), given


for _item in fields(Options):
    setattr(Layer, _item.name, _option(_item.name))


class _Before(NamedTuple):
    """What decided the plan of a call, beside the layer's form and tensors."""

    number: int
    shape: tuple[int, ...]
    """Of x, in whorl's order."""
    engine: str
    switches: tuple[Any, ...]
    marks: tuple[bool, ...]
    """Whether lengths, a mask and resets were given, and whether anything was drawn in its loop."""


def _switches(x: Tensor) -> tuple[Any, ...]:
    """torch's, of recurrent layers, the kind of device, and the current GPU or the threads of the processor."""
    kind = kind_of(x)
    return kind, *switches(kind, x.dtype), torch._C._cuda_getDevice() if kind == "cuda" else torch.get_num_threads()


def _vector(name: str) -> str:
    """gamma, of the parameter vector_gamma_l0_reverse."""
    return name.removeprefix("vector_").removesuffix("_reverse").rpartition("_l")[0]


def _check_flag(name: str, value: Any) -> None:
    if value is not True and value is not False:
        raise InputError(f"{name} is of type {type(value).__name__}: write True or False.")


def _count_sequences(sizes: Tensor) -> int | str:
    """Of a PackedSequence; in a compiled graph they are data, which it does not read."""
    return "batch" if torch.compiler.is_compiling() else int(sizes[0])
