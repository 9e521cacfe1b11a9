"""What a cell of Keras is to whorl: the plain values of its sweep, and its tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import keras
import torch
from keras.src.backend.common.stateless_scope import in_stateless_scope
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from torch.utils.weak import WeakIdKeyDictionary

from whorl.cells import cell as cells
from whorl.cells.library import make_gru, make_lstm, make_rnn
from whorl.errors import CellError, InputError, UnsupportedError
from whorl.keras.activations import pointwise
from whorl.keras.path import BACKEND, sweep
from whorl.keras.sweep import Part, Tensors, part
from whorl.options import Options, refuse_others, wrapped, zoneouts
from whorl.problem import Form
from whorl.weights import reordered

_KINDS = {keras.layers.LSTMCell: "LSTM", keras.layers.GRUCell: "GRU", keras.layers.SimpleRNNCell: "SimpleRNN"}


def part_of(cell: Any, engine: str = "auto") -> Part | str:
    """What a built cell is, or why only Keras' own loop can run it."""
    if isinstance(cell, Cell) and type(cell).call is Cell.call:
        return cell.part._replace(engine=engine)
    kind = _KINDS.get(type(cell))
    if kind is None:
        return (
            f"{type(cell).__name__} is a cell of Keras whose call is any code: write its step as @whorl.cell and use "
            "whorl.keras.Cell"
        )
    recurrent_activation = None if kind == "SimpleRNN" else cell.recurrent_activation
    reset_after = getattr(cell, "reset_after", True)
    inputs = cell.kernel.shape[0]
    return _part(kind, inputs, cell.units, cell.use_bias, cell.activation, recurrent_activation, reset_after, engine)


@torch.compiler.assume_constant_result  # a compiled graph holds what comes out, not how it is made
def _part(*what: Any) -> Part | str:
    return _made(*what)


@lru_cache(maxsize=1024)
def _made(
    kind: str,
    inputs: int,
    units: int,
    bias: bool,
    activation: Any,
    recurrent_activation: Any,
    reset_after: bool,
    engine: str,
) -> Part | str:
    try:
        graph = _make(kind, activation, recurrent_activation, reset_after).graph
    except CellError as error:
        return str(error)
    return part(kind, Form(cell=graph, inputs=inputs, units=units, bias=bias), engine)


def _make(kind: str, activation: Any, recurrent_activation: Any, reset_after: bool) -> cells.Cell:
    if kind == "SimpleRNN":
        return make_rnn(pointwise(activation))
    if kind == "GRU":
        return make_gru(pointwise(activation), pointwise(recurrent_activation), reset_after)
    return make_lstm(pointwise(activation), pointwise(recurrent_activation), False, False, False)


def tensors_of(cell: Any, x: Any, state: Any, states: tuple[Any, ...], training: Any) -> Tensors:
    """The tensors of a cell in the dtype that it computes in.

    Args:
        x: its input, or of a cell that draws masks [batch, inputs], one step of it, of which dropout reads the shape.
        state: likewise of its first state, [batch, units].
        states: before the first step; none where they are zero.
    """
    own, dtype = cell.variables_in_order if isinstance(cell, Cell) else variables(cell), cell.compute_dtype
    weights = tuple([_value(variable, x, dtype) for variable in own])
    if not training:
        return Tensors(weights, states)
    kind = _KINDS.get(type(cell))
    if kind is None:  # its class may read and change its masks
        settle(cell)
    held = [getattr(cell, name, None) for name in _MASKS]
    gets = (cell.get_dropout_mask, x), (cell.get_recurrent_dropout_mask, state)
    of_x, of_state = [
        (own.stacked(str(kind)),) if isinstance(own, _Undrawn) else _row(get(like))
        for own, (get, like) in zip(held, gets, strict=True)
    ]
    return Tensors(weights, states, of_x, of_state, cell.draw() if isinstance(cell, Cell) else None)


def _value(variable: Any, x: Any, dtype: str) -> Any:
    """What a variable holds, in a dtype of Keras and where x is."""
    if BACKEND == "torch":
        value = variable.value
        if value.device == x.device and value.dtype == getattr(torch, dtype):
            return value  # as Keras would find out, which takes longer
    return keras.ops.convert_to_tensor(variable, dtype)


@dataclass(frozen=True)
class _Undrawn:
    """Masks of a call before anybody reads them: in evaluation nobody does, and what Keras' seed gave is taken."""

    like: torch.Tensor
    """Each is of its shape, dtype and device."""
    rate: float
    seeds: range
    alone: bool
    """One mask, and no list of one for each gate."""

    def draw(self) -> Any:
        """As Keras has them."""
        masks = list(self._drawn(range(len(self.seeds))).unbind())
        return masks[0] if self.alone else masks

    def stacked(self, kind: str) -> torch.Tensor:
        """[batch, width] of one that is alone, else [gates, batch, width] in the order of the cell.

        Args:
            kind: the class of Keras whose order theirs is.
        """
        gates = range(len(self.seeds))
        return self._drawn(gates)[0] if self.alone else self._drawn(reordered(kind, gates))

    def _drawn(self, order: Sequence[int]) -> torch.Tensor:
        keep = torch.full(self.like.shape, 1.0 - self.rate, device=self.like.device)
        drawn, generator = keep.new_empty((len(order), *keep.shape)), torch.Generator(self.like.device)
        for place, to in zip(order, drawn.unbind(), strict=True):
            generator.manual_seed(self.seeds[place] & 0xFFFFFFFF)
            torch.bernoulli(keep, generator=generator, out=to)
        return drawn.to(self.like.dtype).div_(1.0 - self.rate)


def draw_masks(cell: DropoutRNNCell, x: Any, state: Any) -> None:
    """Puts the masks of one call into a cell, of the numbers that Keras draws for its seed, to be drawn by `settle`.

    Keras reads and writes its seed for each mask, for which a GPU waits.  Where it has no seed, and on other backends
    than torch, its own methods draw.

    Args:
        x: [batch, inputs]: one step of its input.
        state: [batch, units].
    """
    rates, likes = (cell.dropout, cell.recurrent_dropout), (x, state)
    drawn = [0.0 < rate < 1.0 for rate in rates]
    if BACKEND != "torch" or cell.seed_generator._initial_seed is None or not any(drawn):
        return
    if x.is_meta or torch.compiler.is_compiling() or has_masks(cell):
        return
    count, seed = getattr(cell, "dropout_mask_count", None), cell.seed_generator.state
    value = seed.value
    each = 1 if count is None else count
    first, number = _numbers(value)
    taken = each * sum(drawn)
    step = _taken(taken, value.dtype, value.device)
    if in_stateless_scope():
        seed.assign(value + step)
    else:
        value.add_(step)
        if not value.is_inference():  # which has no version
            _written[value] = value._version, (first, number + taken)
    number += first
    for name, rate, like, some in zip(_MASKS, rates, likes, drawn, strict=True):
        if some:
            _hold(cell, name, _Undrawn(like, rate, range(number, number + each), count is None))
            number += each


@lru_cache(maxsize=64)
def _taken(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What so many numbers add to the state of a seed; kept, as a copy to a GPU waits for it."""
    return torch.tensor([0, count], dtype=dtype, device=device)


def _numbers(state: torch.Tensor) -> tuple[int, int]:
    """What the state of a seed holds; read where somebody else wrote it, for which a GPU has to finish its work."""
    version, numbers = _written.get(state, (None, None))
    if numbers is None or version != state._version:
        numbers = tuple(state.tolist())
    return numbers


_written = WeakIdKeyDictionary()
"""Of the state of a seed its version after the last call, and what it holds."""


def settle(cell: Any) -> None:
    """Draws the masks that a cell holds, for one who reads them."""
    for name in _MASKS:
        masks = getattr(cell, name, None)
        if isinstance(masks, _Undrawn):
            _hold(cell, name, masks.draw())


def drop_undrawn(cell: DropoutRNNCell) -> None:
    """Lets the masks of a call go that nobody has drawn into the cell."""
    for name in _MASKS:
        if isinstance(getattr(cell, name, None), _Undrawn):
            _hold(cell, name, None)


def _hold(cell: DropoutRNNCell, name: str, masks: Any) -> None:
    """Past Keras' own assignment, which looks for variables in what it is given: 20 us for a list."""
    cell.__dict__[name] = masks


def has_masks(cell: DropoutRNNCell) -> bool:
    """Whether a cell holds masks of a call."""
    return any(getattr(cell, name, None) is not None for name in _MASKS)


_MASKS = ("_dropout_mask", "_recurrent_dropout_mask")
"""Where a cell of Keras holds those of the input and of the state during a call."""


def variables(cell: Any) -> list[Any]:
    return [cell.kernel, cell.recurrent_kernel, *([cell.bias] if cell.use_bias else [])]


def _row(value: Any) -> tuple[Any, ...]:
    """None, one or several, as a tuple."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


@keras.saving.register_keras_serializable(package="whorl")
class Cell(keras.layers.Layer, DropoutRNNCell):
    """Any cell of whorl as a cell of Keras, for `whorl.keras.RNN`: what `@whorl.cell` makes, or one of the library.

    Its weights: kernel [inputs, gates x units] and recurrent_kernel [units, recurrent gates x units] with gates in
    the cell's order, bias and recurrent_bias, and `vector_NAME` [units] for each vector.

    Args:
        cell: what `@whorl.cell` makes of a step, or one of `whorl.cells.library`.
        units: of each state.
        use_bias: whether both products have a bias.
        kernel_initializer, recurrent_initializer, bias_initializer: as in `keras.layers.LSTM`.
        kernel_regularizer, recurrent_regularizer, bias_regularizer: likewise.
        kernel_constraint, recurrent_constraint, bias_constraint: likewise.
        dropout: of the input, one mask a call, held over all steps and shared by the gates.
        recurrent_dropout: of what enters the recurrent product, likewise.
        seed: of dropout and zoneout.
        zoneout, layer_norm, clip: options of `whorl.Recurrent`.

    Raises:
        CellError: a step that cannot be traced.
        InputError: an option that does not fit, or a cell with extra inputs, which Keras' layers do not pass.

    >>> import keras, numpy, whorl.keras
    >>> cell = whorl.keras.Cell(whorl.cells.library.make_lstm(peephole=True), 16, zoneout=0.1, layer_norm=True)
    >>> whorl.keras.RNN(cell, return_sequences=True)(numpy.zeros((3, 5, 8))).shape
    torch.Size([3, 5, 16])
    """

    def __init__(
        self,
        cell: Any,
        units: int,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        seed: int | None = None,
        zoneout: Any = 0.0,
        layer_norm: Any = False,
        clip: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(cell, dict):  # from a config
            graph, vectors = cells.Graph.from_json(cell["graph"]), dict(cell["vectors"])
        elif isinstance(cell, cells.Cell):
            graph, vectors = cell.graph, dict(cell.vectors)
        else:
            raise InputError(f"the cell is {cell!r}: give what @whorl.cell makes, or one of whorl.cells.library.")
        if graph.inputs:
            raise InputError(f"{graph.name} reads {', '.join(graph.inputs)} beside x, which Keras' layers do not pass.")
        if type(units) is not int or units < 1:
            raise InputError(f"units is {units!r}: write a whole number of 1 or more.")
        options = Options(
            zoneout=zoneout, layer_norm=layer_norm, clip=clip,
            recurrent_dropout=recurrent_dropout, input_dropout=dropout,
        )  # fmt: skip
        refuse_others("Recurrent", options)
        self._cell = {"graph": graph.to_json(), "vectors": vectors}
        made: Any = SimpleNamespace(graph=graph, vectors=vectors)
        self._graph, self._vectors = wrapped("Recurrent", made, options)
        self._zoneouts = zoneouts(options, graph.states)
        self.units, self.use_bias, self.seed = units, use_bias, seed
        self.zoneout, self.layer_norm, self.clip = zoneout, layer_norm, clip
        self.dropout, self.recurrent_dropout = options.input_dropout, options.recurrent_dropout
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.recurrent_initializer = keras.initializers.get(recurrent_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.recurrent_regularizer = keras.regularizers.get(recurrent_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.recurrent_constraint = keras.constraints.get(recurrent_constraint)
        self.bias_constraint = keras.constraints.get(bias_constraint)
        self.seed_generator = keras.random.SeedGenerator(seed)
        self.state_size, self.output_size = [units] * len(graph.states), units
        self.part: Any = None
        """Its plain values, once it is built."""

    def build(self, input_shape: Any) -> None:
        """Makes the weights for an input of this shape, [batch, inputs]."""
        inputs, graph, units = input_shape[-1], self._graph, self.units
        gates, recurrent = len(graph.gates) * units, len(graph.recurrent) * units
        self.kernel = self._add((inputs, gates), "kernel")
        names = ["kernel"]
        if recurrent:
            self.recurrent_kernel = self._add((units, recurrent), "recurrent_kernel", "recurrent")
            names += ["recurrent_kernel"]
        if self.use_bias:
            self.bias = self._add((gates,), "bias", "bias")
            names += ["bias"]
        if self.use_bias and recurrent:
            self.recurrent_bias = self._add((recurrent,), "recurrent_bias", "bias")
            names += ["recurrent_bias"]
        for vector, start in self._vectors.items():
            name = f"vector_{vector}"
            setattr(
                self, name, self.add_weight(shape=(units,), name=name, initializer=keras.initializers.Constant(start))
            )
            names += [name]
        self._names = tuple(names)
        form = Form(
            cell=graph, inputs=inputs, units=units, bias=self.use_bias, zoneout=self._zoneouts,
            recurrent_dropout_mode="shared",
        )  # fmt: skip
        self.part = part("Cell", form, "auto")

    def _add(self, shape: tuple[int, ...], name: str, kind: str = "kernel") -> Any:
        named = {option: getattr(self, f"{kind}_{option}") for option in ("initializer", "regularizer", "constraint")}
        return self.add_weight(shape=shape, name=name, **named)

    @property
    def variables_in_order(self) -> list[Any]:
        """As `Tensors.weights` has them."""
        return [getattr(self, name) for name in self._names]

    def draw(self) -> Any:
        """What zoneout is drawn from in one call; None where there is no zoneout."""
        if not self._zoneouts:
            return None
        return keras.random.randint((), 0, 2**31 - 1, dtype="int32", seed=self.seed_generator)

    def call(self, inputs: Any, states: Any, training: Any = False) -> tuple[Any, list[Any]]:
        """One step: the output and the states after it.

        Raises:
            UnsupportedError: on a backend that whorl has no engines for.
        """
        if BACKEND not in ("torch", "jax"):
            raise UnsupportedError(f"Keras runs on {BACKEND} and whorl's cells on torch and jax: set KERAS_BACKEND.")
        tensors = tensors_of(self, inputs, states[0], tuple(states), training)
        swept = sweep([self.part], keras.ops.expand_dims(inputs, 1), [tensors])
        return swept.last, list(swept.states[0])

    def get_initial_state(self, batch_size: Any = None) -> list[Any]:
        return [keras.ops.zeros((batch_size, size), dtype=self.compute_dtype) for size in self.state_size]

    def get_config(self) -> dict[str, Any]:
        """The cell goes as its graph: nothing of it is Python that a file would have to bring."""
        own = {"cell": {"graph": self._cell["graph"], "vectors": dict(self._cell["vectors"])}}
        for name in ("units", "use_bias", "dropout", "recurrent_dropout", "seed", "zoneout", "layer_norm", "clip"):
            own[name] = getattr(self, name)
        for option, module in _SERIALISED.items():
            for kind in ("kernel", "recurrent", "bias"):
                own[f"{kind}_{option}"] = module.serialize(getattr(self, f"{kind}_{option}"))
        return {**super().get_config(), **own}


_SERIALISED = {
    "initializer": keras.initializers,
    "regularizer": keras.regularizers,
    "constraint": keras.constraints,
}
