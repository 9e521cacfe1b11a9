"""The sources of the kernels beside the time loop: draws, masks, the norm of x, sums, copies, float16 of weights."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from whorl.cells.wrappers import EPS
from whorl.engines.cuda.kernel_text import kernel, table, text_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Tile

Writer = Callable[[], str]
"""What gives a source."""


def draw() -> str:
    """The source of the kernel that draws whole masks."""
    return kernel("draw.cu", ["#define KERNEL draw_masks", text_of("noise.cu")])


def draw_bits(states: int, zones: Sequence[int], noise: bool) -> str:
    """The source of the kernel that draws what is new at each step.

    Args:
        states: of the cell.
        zones: the states whose zoneout is drawn.
        noise: whether what enters the recurrent product is.
    """
    words = [
        f"#define KERNEL {draw_bits_name(states, zones, noise)}",
        f"constexpr int STATES = {states}, ZONES = {len(zones)}, NOISE = {int(noise)};",
        table("zoned", (state in zones for state in range(4)), "whether a state's zoneout is drawn"),
        text_of("noise.cu"),
    ]
    return kernel("draw_bits.cu", words)


def draw_bits_name(states: int, zones: Sequence[int], noise: bool) -> str:
    """Its name in a profiler."""
    zoneout = f"zoneout{''.join(map(str, zones))}_of_{states}"
    return "_".join(["draw_bits", *[zoneout] * bool(zones), *["step"] * noise])


def order() -> str:
    """The source of the kernel that sorts sequences by their lengths."""
    return kernel("order.cu", ["#define KERNEL order_by_length"])


def masked(name: str, dtype: torch.dtype, vector: int, by_masks: bool, behind: bool) -> str:
    """The source of the kernel that puts whole tensors behind masks, so many elements in a thread.

    Args:
        by_masks: whether there are such; without, what does not count becomes zero.
        behind: it runs beside the launch before it, and ends after that.
    """
    numbers = f"constexpr int UNITS = 1, VECTOR = {vector}, MASKED = {int(by_masks)}, BEHIND = {int(behind)};"
    words = [*_of_elements(name, dtype), numbers, text_of("ptx.cu")]
    return kernel("masked.cu", words)


def _of_elements(
    name: str, dtype: torch.dtype, forward: bool = False, wide: bool = False, halves: bool = False, exact: bool = False
) -> list[str]:
    """What kernels/ptx.cu has to know in a kernel that multiplies no matrices."""
    return [
        f"#define KERNEL {name}",
        f"#define ELEMENT_BYTES {dtype.itemsize}",
        f"#define BFLOAT16 {int(dtype == torch.bfloat16)}",
        f"#define FORWARD {int(forward)}",
        f"#define WIDE_GATES {int(wide)}",
        f"#define EXACT {int(exact)}",
        f"#define HALVES {int(halves)}",
        "#define CLUSTER 1",
    ]


class Norm(NamedTuple):
    """The layer norm of a layer's input projection, in a kernel of its own."""

    gates: int
    units: int
    dtype: torch.dtype
    wide: bool
    """What comes to the time loop is float32."""
    biased: bool
    counted: int | None = None
    """The first units of each gate, which mean and variance are over, the others being padding; None: all."""

    @property
    def word(self) -> int:
        """Neighbouring columns that a thread reads at once."""
        return next(word for word in (4, 2, 1) if self.gates * self.units % word == 0)

    def block(self, kind: str) -> "Block":
        """How the threads of the "forward" or "backward" kernel are laid out."""
        each = range(8 if kind == "backward" or self._whole else 12, 33, 4)
        made = [self._block(kind, columns) for columns in each if self._threads(columns) <= 1024]
        found = [*(one for one in made if one.ahead), *(one for one in made if one.spare >= 0)]
        return found[0] if found else max(made, key=lambda one: one.spare)

    def name(self, kind: str) -> str:
        """In a profiler."""
        of = "" if self.counted is None else f"_of_{self.counted}"
        return f"norm_{kind}_{self.gates}x{self.units}{of}_{str(self.dtype).removeprefix('torch.')}"

    @property
    def _whole(self) -> bool:
        """Whether an element takes a register, not half of one."""
        return self.dtype.itemsize == 4 or self.word == 1

    def _threads(self, columns: int) -> int:
        """Of a row, where one has so many columns."""
        return 32 * -(-self.gates * self.units // (columns * 32))

    def _block(self, kind: str, columns: int) -> "Block":
        """Where a thread has so many columns of a row."""
        threads, element = self._threads(columns), 1.0 if self._whole else 0.5
        # registers: beside columns; of a column what is computed, its part of the vectors, its part of the next row
        beside, own, vectors, row = 22, 1, 3 * element, 1.0
        if kind == "backward":
            beside, own, vectors, row = 28, 5, 2 * element, 1 + element
        groups, resident = 1, max(1, min(16, 1024 // threads))
        if kind == "backward":
            needed, resident = beside + columns * (own + vectors + row), 1
            groups = max([1, *(count for count in range(2, 16) if _registers(count * threads) >= needed)])
        spare = int(_registers(threads * groups * resident) - beside - columns * (own + vectors))
        ahead = columns <= 16 and columns * row <= spare
        shared = 4 * groups * (threads // 4 + (groups > 1) * (2 + self.biased) * self.gates * self.units)
        return Block(threads, groups, resident, spare, ahead, shared)


def _registers(threads: int) -> int:
    """Of a thread where so many share a multiprocessor, each quarter of which has as many warps as the others."""
    return min(255, 65536 // (128 * -(-threads // 128)) // 8 * 8)


class Block(NamedTuple):
    """Of a kernel of kernels/norms.cu."""

    threads: int
    """Of a row."""
    groups: int
    """Rows that a block takes at once: backward as many as a multiprocessor can, for each block leaves sums; at most as
    many as there are barriers beside that of all threads."""
    resident: int
    """Blocks that a multiprocessor can hold."""
    spare: int
    """Registers of a thread beside those of one row; fewer than none are spilled."""
    ahead: bool
    """The next row is in such registers."""
    shared: int
    """Bytes of shared memory: two numbers of each warp, four times, and the sums of several rows."""


def norming(kind: str, norm: Norm) -> str:
    """The source of a kernel that normalises the input projection ("forward"), or of its gradient ("backward")."""
    block = norm.block(kind)
    numbers = {
        "UNITS": norm.units, "GATES": norm.gates, "COUNTED": norm.units if norm.counted is None else norm.counted,
        "WORD": norm.word, "THREADS": block.threads, "GROUPS": block.groups, "RESIDENT": block.resident,
        "BIASED": int(norm.biased), "AHEAD": int(block.ahead),
    }  # fmt: skip
    words = [
        *_of_elements(norm.name(kind), norm.dtype, kind == "forward", norm.wide),
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        f"constexpr float EPS = {EPS}f;",
        text_of("ptx.cu"),
    ]
    return kernel("norms.cu", words)


ADDED, ADDERS = 32, 8
"""Sums that a block of the kernel below makes, and threads that make one of them together."""


def adding(dtype: torch.dtype) -> str:
    """The source of the kernel that adds up the gradients of biases and vectors."""
    words = ["#define KERNEL " + adding_name(dtype), f"#define ELEMENT_BYTES {dtype.itemsize}"]
    words.append(f"#define BFLOAT16 {int(dtype == torch.bfloat16)}")
    words.append(f"constexpr int COLUMNS = {ADDED}, PARTS = {ADDERS};")
    return kernel("sums.cu", words)


def adding_name(dtype: torch.dtype) -> str:
    """Its name in a profiler."""
    return f"add_up_{str(dtype).removeprefix('torch.')}"


_WORDS = {2: "short", 4: "int", 8: "long long"}


def row_copier(word: int) -> str:
    """The source of the kernel that copies rows in words of so many bytes."""
    words = [f"#define KERNEL copy_rows_{word}", f"typedef unsigned {_WORDS[word]} Word;"]
    return kernel("rows.cu", words)


def splitter() -> str:
    """The source of the kernel that makes of float32 what three products of TF32 take."""
    return kernel("split.cu", ["#define KERNEL split_float32"])


def filler() -> str:
    """The source of the kernel that fills the words through which blocks exchange."""
    return kernel("fill.cu", ["#define KERNEL fill_with_ones"])


class Halving(NamedTuple):
    """How a kernel of its own makes float16 of a layer's recurrent weights in float32."""

    recurrent: int
    """Gates."""
    units: int
    exact: bool
    """In two planes."""
    apart: bool
    """The second has a power of two of its own, as where blocks exchange through L2."""
    range: int
    """Backward, of how many units the gates' rows have a scale together, in each column; 0: each row has one."""

    @property
    def name(self) -> str:
        """In a profiler."""
        planes = "_in_two" * self.exact + "_spread" * self.apart
        return f"halve_{self.recurrent}x{self.units}{planes}{f'_by_{self.range}' if self.range else ''}"

    @property
    def threads(self) -> int:
        """Of a block."""
        return 256 if self.range else 128

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block: the largest of 16 columns that each warp found."""
        return 64 * self.threads // 32 if self.range else 0

    @property
    def blocks(self) -> int:
        """For each direction."""
        if self.range:
            return -(-self.units // 16) * -(-self.units // self.range)
        return -(-self.recurrent * self.units // (self.threads // 32))

    @property
    def size(self) -> int:
        """Bytes of what is made for each direction, up to whole 16."""
        rows, pitch = self.recurrent * self.units, -(-self.units // 8) * 16
        scales = -(-self.units // self.range) * self.units if self.range else rows
        return rows * pitch * (1 + self.exact) + -(-scales // 4) * 16


def halving(kind: str, recurrent: int, units: int, tile: Tile | Spread) -> Halving | None:
    """For a kernel of so many recurrent gates and units with a tile; None where it takes the weights themselves."""
    if not tile.halves or not recurrent:
        return None
    together = tile.gathered * tile.slice if isinstance(tile, Spread) else tile.slice
    apart = tile.exact and isinstance(tile, Spread)
    return Halving(recurrent, units, tile.exact, apart, together if kind == "backward" else 0)


def halver(made: Halving) -> str:
    """The source of that kernel."""
    words = [
        *_of_elements(made.name, torch.float32, not made.range, halves=True, exact=made.exact),
        f"#define SPREAD {int(made.apart)}",
        f"constexpr int UNITS = {made.units}, RECURRENT = {made.recurrent}, RANGE = {made.range or made.units};",
        f"constexpr int THREADS = {made.threads};",
        text_of("ptx.cu"),
    ]
    return kernel("halve.cu", words)
