"""A kernel made ready: its machine code from the store or the compiler, and loaded on a device."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from whorl.cells.cell import Graph
from whorl.cells.intervals import bounded, contained, contained_inside
from whorl.engines.cuda import beside, options, source, store
from whorl.engines.cuda.launch import Kernel, is_loaded, loaded
from whorl.engines.cuda.sides import PLACES
from whorl.engines.cuda.source import PLAIN, Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import staged
from whorl.engines.cuda.tiling import SHARED, Chip, Size, Tile


def flags(tile: Tile | Spread) -> tuple[str, ...]:
    """Of NVRTC.  Division good to two units in the last place, as tanh is, and not by a function that is called.

    But in true float32, the least numbers and the last bits of a root are far below what a product keeps.
    """
    return ("--prec-div=false",) if tile.exact else ("--ftz=true", "--prec-div=false", "--prec-sqrt=false")


_LEAST_SHARED, _MOST_SHARED, _LEAST_OPERANDS = 96 << 10, 227 << 10, 16
"""Bytes of a block's shared memory through which weights come, with room for all that stay in registers where these are
enough, as kernels/weights.cu has it: forward, and backward where no machine code is for more.  And for how many
operands there is room where fewer stay: one of each warp."""
_ROOMY = {Chip(capability, 1).architecture for capability, most in SHARED.items() if most << 10 >= _MOST_SHARED}


@lru_cache(maxsize=256)
def size_of(cell: Graph, units: int, element: int, features: Features = PLAIN, exact: bool = False) -> Size:
    """What of a layer decides its tiles."""
    apart, gate = len(source.kept(cell).apart), 4 if source.wide_gates(cell) else element
    counts = len(cell.gates), len(cell.recurrent), len(cell.states), len(cell.vectors)
    own = cell if staged(cell) else None
    masks = len(cell.masked) * (features.noise == source.GIVEN_BY_GATE), features.noise == source.BY_GATE
    halves = element == 4 and features.noise != source.GIVEN_BY_GATE
    halves = halves and not (exact and (own is not None or source.has_options(cell, features)))
    known = halves and not features.of_any_size and contained_inside(cell)
    scales = halves, known and bounded(cell), known and contained(cell)
    ahead = source.registers(cell, features)
    given = features.noise in (source.GIVEN, source.GIVEN_BY_GATE) or source.BY_MASK in features.zoneout
    alone = features == Features(noise=features.noise, zoneout=features.zoneout) != PLAIN
    drawn = alone and not given and not cell.inputs
    return Size(units, *counts, apart, element, gate, *ahead, *masks, exact, own, *scales, features.lengths, drawn)


class Numbers(NamedTuple):
    """What a kernel of a layer is compiled from."""

    kind: str
    """ "forward" or "backward"."""
    cell: Graph
    units: int
    dtype: torch.dtype
    tile: Tile | Spread
    flag: bool
    """Of the forward kernel, whether it saves for backward; of the backward kernel, whether there is a bias."""
    features: Features = PLAIN
    carried: bool = False
    """It computes a part of the steps: what the launch before left, and what it leaves, is two addresses a state."""


def kernels(wanted: Sequence[Numbers], chip: Chip, index: int) -> list[Kernel]:
    """The kernels on a device, from the store or compiled."""
    keys = [(*numbers, index) for numbers in wanted]
    absent = [(key, numbers) for key, numbers in zip(keys, wanted, strict=True) if not is_loaded(key)]
    found = codes([numbers for _, numbers in absent], chip) if absent else []  # what is compiled is so side by side
    where = chip, index
    make = {key: partial(_load, numbers, *code, *where) for (key, numbers), code in zip(absent, found, strict=True)}
    return [loaded(key, make.get(key)) for key in keys]


def _load(numbers: Numbers, name: str, machine_code: bytes, chip: Chip, index: int) -> Kernel:
    kind, cell, tile, features = numbers.kind, numbers.cell, numbers.tile, numbers.features
    vectors, states = max(1, len(cell.vectors)), len(cell.states)
    together = isinstance(tile, Spread)
    count = {"forward": 15 + 2 * vectors + 2 * states, "backward": 18 + 2 * vectors + 3 * states}[kind]
    count += {"forward": 4, "backward": 2}[kind] * staged(cell)  # means, and operands of products in the step
    count += 2 * states * numbers.carried
    fields = f"{count}Q"
    if source.has_options(cell, features):
        fields += options.layout(states, len(cell.inputs))
    if isinstance(tile, Spread):
        fields += f"{4 + PLACES * tile.sided}Q"
    shared = shared_bytes(kind, cell, tile, chip.architecture)
    # Spread over all multiprocessors, behind the kernel that makes weights float16, LSTM 512x128 in TF32 took 109.0 us
    # forward where it began early and 106.7 where not: its blocks may then lie where those of the other end first.
    early = chip.early and not (together and tile.halves)
    return Kernel(machine_code, name, index, 32 * tile.warps, shared, tile.cluster, fields, together, early=early)


def shared_bytes(kind: str, cell: Graph, tile: Tile | Spread, architecture: str) -> int:
    """Shared memory of a block of a kernel for an architecture, with what weights take on their way."""
    most = _MOST_SHARED if kind == "backward" and architecture in _ROOMY else _LEAST_SHARED
    operands = tile.resident * tile.warps
    if isinstance(tile, Tile):
        operands *= tile.planes * (len(cell.recurrent) if kind == "forward" else 1)
    return max(tile.shared, min(most, tile.shared + max(operands, _LEAST_OPERANDS) * 512))


def _on_device(
    key: tuple[Hashable, ...], code: Callable[[], tuple[str, bytes]], chip: Chip, index: int, layout: str,
    threads: int = 256, shared: int = 0,
) -> Kernel:  # fmt: skip
    """A kernel without clusters on a device: the first who asks for it makes its `code`, name and machine code."""

    def make() -> Kernel:
        name, machine_code = code()
        return Kernel(machine_code, name, index, threads, shared, 1, layout, early=chip.early)

    return loaded((*key, index), make)


_ADDING = "14Q64s"  # the argument of kernels/sums.cu


def adding(dtype: torch.dtype, chip: Chip, index: int) -> Kernel:
    """The kernel that adds up the gradients of biases and vectors, on a device."""
    threads = beside.ADDED * beside.ADDERS
    return _on_device(("adding", dtype), partial(adding_code, dtype, chip), chip, index, _ADDING, threads, 4 * threads)


def adding_code(dtype: torch.dtype, chip: Chip) -> tuple[str, bytes]:
    """Its name and machine code, from the store or compiled; needs no GPU."""
    name = beside.adding_name(dtype)
    return name, store.kernel(beside.adding(dtype), name, chip.architecture)


def norming(kind: str, norm: beside.Norm, chip: Chip, index: int) -> Kernel:
    """A kernel of the layer norm of the input projection, on a device."""
    layout = f"{ {'forward': 6 + 2 * norm.gates, 'backward': 8 + norm.gates}[kind] }Q"
    block = norm.block(kind)
    threads, code = block.threads * block.groups, partial(norming_code, kind, norm, chip)
    return _on_device(("norm", kind, norm), code, chip, index, layout, threads, block.shared)


def norming_code(kind: str, norm: beside.Norm, chip: Chip) -> tuple[str, bytes]:
    """Its name and machine code, from the store or compiled; needs no GPU."""
    return norm.name(kind), store.kernel(beside.norming(kind, norm), norm.name(kind), chip.architecture)


_COPYING = "7Q"  # the argument of kernels/rows.cu


def row_copier(word: int, chip: Chip, index: int) -> Kernel:
    """The kernel that copies rows in words of so many bytes, on a device."""
    return _on_device(("rows", word), partial(row_copier_code, word, chip), chip, index, _COPYING)


def row_copier_code(word: int, chip: Chip) -> tuple[str, bytes]:
    """Its name and machine code, from the store or compiled; needs no GPU."""
    name = f"copy_rows_{word}"
    return name, store.kernel(beside.row_copier(word), name, chip.architecture)


_SPLITTING = "10Q"  # the argument of kernels/split.cu


def splitter(chip: Chip, index: int) -> Kernel:
    """The kernel that makes of float32 what three products of TF32 take, on a device."""
    return _on_device(("split",), partial(splitter_code, chip), chip, index, _SPLITTING)


def splitter_code(chip: Chip) -> tuple[str, bytes]:
    """Its name and machine code, from the store or compiled; needs no GPU."""
    name = "split_float32"
    return name, store.kernel(beside.splitter(), name, chip.architecture)


_FILLING = "2Q"  # the argument of kernels/fill.cu


def filler(chip: Chip, index: int) -> Kernel:
    """The kernel that fills the words through which blocks exchange, on a device."""
    return _on_device(("fill",), partial(filler_code, chip), chip, index, _FILLING)


def filler_code(chip: Chip) -> tuple[str, bytes]:
    """Its name and machine code, from the store or compiled; needs no GPU."""
    name = "fill_with_ones"
    return name, store.kernel(beside.filler(), name, chip.architecture)


_HALVING = "6Q"  # the argument of kernels/halve.cu


def halver(made: beside.Halving, chip: Chip, index: int) -> Kernel:
    """A kernel that makes float16 of recurrent weights, on a device."""
    code = partial(halver_code, made, chip)
    return _on_device(("halve", made), code, chip, index, _HALVING, made.threads, made.shared)


def halver_code(made: beside.Halving, chip: Chip) -> tuple[str, bytes]:
    """Its name and machine code, from the store or compiled; needs no GPU."""
    return made.name, store.kernel(beside.halver(made), made.name, chip.architecture)


def halving(numbers: Numbers) -> beside.Halving | None:
    """How the weights of a kernel become float16 before it; None where it takes them as they are."""
    return beside.halving(numbers.kind, len(numbers.cell.recurrent), numbers.units, numbers.tile)


def fills(numbers: Numbers) -> bool:
    """Whether a kernel's blocks exchange through words that are filled before it, by no kernel that halves weights."""
    return isinstance(numbers.tile, Spread) and halving(numbers) is None


def codes(wanted: Sequence[Numbers], chip: Chip) -> list[tuple[str, bytes]]:
    """Name and machine code of each kernel, from the store or compiled; needs no GPU."""
    given = []
    for kind, cell, units, dtype, tile, flag, features, carried in wanted:
        write = source.forward if kind == "forward" else source.backward
        text = write(cell, units, dtype, tile, flag, features, carried)
        given.append((text, source.kernel_name(kind, cell, units, dtype, tile), chip.architecture, flags(tile)))
    return [(one[1], code) for one, code in zip(given, store.kernels(given), strict=True)]
