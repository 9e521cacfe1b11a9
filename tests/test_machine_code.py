"""What the compiler made of the kernels, read from machine code without a GPU: nothing is spilled, nothing fenced."""

import importlib.util
import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

import cubins
import whorl
from cells_for_tests import CELLS
from cubins import cubin
from thinned import thinned
from whorl.cells import library
from whorl.engines.cuda import beside, grid, source, spreading, staging, tiling
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.overlapped import part_of
from whorl.engines.cuda.prepare import flags, size_of
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.tiling import Chip, Tile
from whorl.problem import Form

H200 = Chip((9, 0), 132)
CASES = [
    ("lstm", 512, 128, "bfloat16"), ("lstm", 128, 32, "float16"), ("gru", 512, 128, "bfloat16"),
    ("lstm", 509, 9, "bfloat16"), ("lstm", 512, 32, "tf32"), ("gru", 512, 128, "tf32"), ("rnn_relu", 640, 8, "tf32"),
    ("lstm", 512, 32, "float32"), ("gru", 512, 128, "float32"), ("lstm", 128, 128, "float32"),
]  # fmt: skip


def nvdisasm() -> str | None:
    """NVIDIA's disassembler, from its own package."""
    spec = importlib.util.find_spec("nvidia")
    roots = map(Path, (spec.submodule_search_locations or ()) if spec else ())
    return next((str(path) for root in roots for path in sorted(root.glob("**/bin/nvdisasm*"))), None)


needs_tools = pytest.mark.skipif(
    missing() is not None or nvdisasm() is None,
    reason="pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-nvdisasm",
)


def listing(
    kind: str, name: str, units: int, batch: int, precision: str, path: Path, change: tuple[str, str] = ("", "")
) -> list[str]:
    """The instructions of the tile that would run, with something changed in the source."""
    cell, exact = CELLS[name].graph, precision == "float32"
    dtype = getattr(torch, precision.replace("tf32", "float32"))
    tile = tiling.choose(size_of(cell, units, dtype.itemsize, exact=exact), H200, batch, 1, kind)
    assert tile is not None
    text = (source.forward if kind == "forward" else source.backward)(cell, units, dtype, tile, True)
    assert change[0] in text
    return disassembled(text.replace(*change), tile, path)


def disassembled(text: str, tile: Tile | Spread, path: Path) -> list[str]:
    return listed(cubin(text, "kernel", "sm_90a", flags(tile)), path)


def listed(code: bytes, path: Path) -> list[str]:
    tool = nvdisasm()
    assert tool is not None
    return cubins.listed(code, tool, path)


def time_loop(lines: list[str]) -> list[str]:
    """The loop around the products and what is written of them: what a wait repeats may lie behind it.

    Warps that compute the cell alone have a loop of their own.
    """
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"\.(L_x_\d+):", line.strip()))}
    ends = [(at, re.search(r"BRA.*`\(\.(L_x_\d+)\)", line)) for at, line in enumerate(lines)]
    loops = [(labels[found[1]], at + 1) for at, found in ends if found and labels.get(found[1], at) < at]

    def smallest(*words: str) -> list[str]:
        whole = [lines[a:b] for a, b in loops if all(any(w in line for line in lines[a:b]) for w in words)]
        whole = [found for found in whole if not any("UCGABAR" in line for line in found)]  # that is before and after
        return min(whole, key=len, default=[])

    product = "HGMMA" if any("HGMMA" in line for line in lines) else "HMMA"  # of four warps together, or of one
    return smallest(product, "STG") or smallest(product) + smallest("STG", "STAS")


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name, units, batch, precision", CASES)
def test_nothing_is_spilled_or_fenced_in_the_time_loop(
    name: str, units: int, batch: int, precision: str, kind: str, tmp_path: Path
) -> None:
    lines = listing(kind, name, units, batch, precision, tmp_path / "kernel.cubin")
    loop = time_loop(lines)
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []
    assert [line for line in loop if re.search(r"\b(MEMBAR|ERRBAR|CCTL\.IVALL)\b", line)] == []


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name, units, layers, batch, dtype", [
    ("lstm", 128, 2, 32, torch.bfloat16), ("gru", 128, 4, 32, torch.float32), ("lstm", 256, 4, 32, torch.bfloat16),
    ("lstm", 768, 2, 16, torch.bfloat16), ("gru", 650, 2, 20, torch.float32),
])  # fmt: skip
def test_kernels_of_a_part_of_the_steps_spill_no_more(
    name: str, units: int, layers: int, batch: int, dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    """On the part of a chip that each of several layers has beside the others."""
    cell = CELLS[name].graph
    tile = grid.estimated(size_of(cell, units, dtype.itemsize), part_of(H200, layers), batch, 1, kind)
    assert tile is not None
    write = source.forward if kind == "forward" else source.backward
    tile = grid.beside(tile)
    whole, part = (write(cell, units, dtype, tile, True, carried=carried) for carried in (False, True))
    found = []
    for text in (whole, part):
        loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
        found.append(sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in loop))
    assert found[1] <= found[0]


SMALL = {
    "filler": beside.filler, "order": beside.order, "draw": beside.draw, "splitter": beside.splitter,
    "adding": partial(beside.adding, torch.bfloat16), "row_copier": partial(beside.row_copier, 8),
    "draw_bits": partial(beside.draw_bits, 2, [0, 1], True),
    "masked": partial(beside.masked, "masked", torch.float16, 8, True, False),
    **{f"norming {kind}": partial(beside.norming, kind, beside.Norm(4, 96, torch.float32, True, True))
       for kind in ("forward", "backward")},
    "halver": partial(beside.halver, beside.Halving(4, 96, False, True, 0)),
}  # fmt: skip
"""Sources of kernels around those of layers."""


def before_the_wait(lines: list[str]) -> list[str]:
    """What a kernel reads and writes in memory before it waits for the launch ahead of it."""
    (waits,) = [at for at, line in enumerate(lines) if "ACQBULK" in line]
    return [line for line in lines[:waits] if re.search(r"\b(LDG|LDGSTS|STG|ATOM|ATOMG|RED|UBLKCP)\b", line)]


@needs_tools
@pytest.mark.parametrize("name", SMALL)
def test_a_small_kernel_waits_for_the_launch_before(name: str, tmp_path: Path) -> None:
    text = SMALL[name]()
    (kernel,) = re.findall(r"#define KERNEL (\w+)", text)
    assert before_the_wait(listed(cubin(text, kernel, "sm_90a"), tmp_path / "kernel.cubin")) == []


@needs_tools
def test_masks_beside_a_loop_wait_for_it_when_all_is_written(tmp_path: Path) -> None:
    text = beside.masked("masked", torch.bfloat16, 8, True, True)
    lines = listed(cubin(text, "masked", "sm_90a"), tmp_path / "kernel.cubin")
    (wait,) = (at for at, line in enumerate(lines) if "ACQBULK" in line)
    (lets,) = (at for at, line in enumerate(lines) if "PREEXIT" in line)
    memory = [at for at, line in enumerate(lines) if re.search(r"\b(LDG|STG)\b", line)]
    assert memory
    assert lets < min(memory) <= max(memory) < wait


@needs_tools
@pytest.mark.parametrize("option", ["mask", "lengths", "gate", "step", "plain"])
def test_a_loop_lets_masks_begin_beside_it_once_what_was_before_has_ended(option: str, tmp_path: Path) -> None:
    lines = chosen_with(option, "backward", 512, 128, tmp_path)
    lets = [at for at, line in enumerate(lines) if "PREEXIT" in line]
    assert len(lets) == (option in ("mask", "lengths", "gate"))
    assert all(at > next(place for place, line in enumerate(lines) if "ACQBULK" in line) for at in lets)


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name, units, batch", [("lstm", 128, 32), ("lstm", 1024, 32)])
def test_a_layers_kernel_waits_for_the_launch_before(
    name: str, units: int, batch: int, kind: str, tmp_path: Path
) -> None:
    cell = CELLS[name].graph
    tile = grid.choose(size_of(cell, units, 2), H200, batch, 1, kind)
    assert tile is not None
    write = source.forward if kind == "forward" else source.backward
    lines = disassembled(write(cell, units, torch.bfloat16, tile, True), tile, tmp_path / "kernel.cubin")
    assert before_the_wait(lines) == []


@needs_tools
@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
@pytest.mark.parametrize("name, units, batch", [("lstm", 1024, 128), ("lstm", 1500, 20), ("gru", 2048, 64)])
def test_nothing_is_spilled_backward_where_blocks_exchange(
    name: str, units: int, batch: int, precision: str, tmp_path: Path
) -> None:
    cell, dtype = CELLS[name].graph, torch.bfloat16 if precision == "bfloat16" else torch.float32
    tile = spreading.choose(size_of(cell, units, dtype.itemsize), H200, batch, 1, "backward")
    assert tile is not None
    loop = time_loop(disassembled(source.backward(cell, units, dtype, tile, True), tile, tmp_path / "kernel.cubin"))
    assert any("HGMMA" in line for line in loop)
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []


@needs_tools
@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
@pytest.mark.parametrize(
    "name, units, batch, kind",
    [
        ("lstm", 512, 128, "backward"),
        ("gru", 512, 128, "backward"),
        ("lstm", 384, 128, "backward"),
        ("gru", 256, 256, "backward"),
        ("gru", 1024, 128, "forward"),
        ("gru", 512, 32, "forward"),
    ],
)
def test_nothing_is_spilled_where_plain_layers_have_more_weights_in_registers(
    name: str, units: int, batch: int, kind: str, precision: str, tmp_path: Path
) -> None:
    cell, dtype = CELLS[name].graph, torch.bfloat16 if precision == "bfloat16" else torch.float32
    tile = grid.estimated(size_of(cell, units, dtype.itemsize), H200, batch, 1, kind)
    assert tile is not None
    text = (source.forward if kind == "forward" else source.backward)(cell, units, dtype, tile, True)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert [line for line in loop if re.search(r"(LDL|STL)", line)] == []


@needs_tools
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_masks_by_gate_add_no_product(name: str, kind: str, tmp_path: Path) -> None:
    cell, features = CELLS[name].graph, source.Features(noise=source.BY_GATE)
    tile = grid.estimated(size_of(cell, 512, 2, features), H200, 128, 1, kind)
    assert tile is not None
    text = (source.forward if kind == "forward" else source.backward)(cell, 512, torch.bfloat16, tile, True, features)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []
    rows, depth = len(cell.recurrent) * tile.slice, 512
    if kind == "backward":
        rows, depth = depth, rows
    products = rows // 16 * (depth // 16) * (tile.rows // 8)
    multiply = tile.warps - (tile.slice // 16 * tile.pointwise if isinstance(tile, Tile) else 0)
    assert sum("HMMA" in line for line in loop) == products // multiply


@needs_tools
@pytest.mark.parametrize("batch", [32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_four_warps_multiply_behind_masks_by_gate(dtype: torch.dtype, batch: int, tmp_path: Path) -> None:
    """Backward, as many products as without masks, those of a gate begun before the last one's are awaited."""
    cell, features = CELLS["lstm"].graph, source.Features(noise=source.BY_GATE)
    tile = grid.estimated(size_of(cell, 1024, dtype.itemsize, features), H200, batch, 1, "backward")
    assert isinstance(tile, Spread)
    assert tile.wide
    text = source.backward(cell, 1024, dtype, tile, True, features)
    lines = disassembled(text, tile, tmp_path / "kernel.cubin")
    assert [line for line in lines if re.search(r"\b(LDL|STL)\b", line)] == []
    depth = tile.gathered * len(cell.recurrent) * tile.slice // 16
    products = [line for line in lines if "HGMMA" in line]
    assert len(products) == tile.subs * -(-1024 // (16 * tile.gathered * tile.warps)) * depth
    assert sum("gsb0" in line for line in products) == tile.subs * len(cell.recurrent)
    assert sum("DEPBAR.LE gsb0, 0x1" in line for line in lines) == tile.subs * (len(cell.recurrent) - 1)


@needs_tools
@pytest.mark.parametrize("units, reads", [(512, 32), (1024, 172)])
def test_masks_of_one_gate_are_read_for_some_tiles_at_once(units: int, reads: int, tmp_path: Path) -> None:
    lines = chosen_with("gate", "forward", units, 128, tmp_path)
    loop = time_loop(lines)
    assert sum("LDS" in line for line in loop) <= reads  # 60 and 287 with a word for each tile
    # before the loop, too, one look at memory brings what eight tiles of a depth take
    before = lines[: next(at for at in range(len(lines)) if lines[at : at + len(loop)] == loop)]
    runs = re.findall(
        "L+", "".join("L" if "LDG" in line else "B" * ("BRA" in line or "BAR" in line) for line in before)
    )
    assert max(map(len, runs)) >= 16


@needs_tools
def test_masks_by_gate_take_one_launch_forward(tmp_path: Path) -> None:
    """As without them; it costs a few words that are read back in each step."""
    cell, features = CELLS["lstm"].graph, source.Features(noise=source.BY_GATE)
    tile = grid.estimated(size_of(cell, 1024, 2, features), H200, 128, 1, "forward")
    assert isinstance(tile, Spread)
    assert spreading.launches(H200, 128, 1, tile) == 1
    text = source.forward(cell, 1024, torch.bfloat16, tile, True, features)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert len([line for line in loop if re.search(r"\b(LDL|STL)\b", line)]) <= 6


@needs_tools
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_one_comparison_tells_whether_words_have_come(name: str, tmp_path: Path) -> None:
    """One for each word took LSTM with 1,024 units at batch 32 from 1.75 to 1.84 us a step, GRU from 1.46 to 1.55."""
    cell = CELLS[name].graph
    tile = grid.estimated(size_of(cell, 1024, 2), H200, 32, 1, "forward")
    assert isinstance(tile, Spread)
    pieces = -(-8 * tile.tiles // tile.warps) * -(-1024 // 256)  # of 16 bytes, of a lane
    text = source.forward(cell, 1024, torch.bfloat16, tile, False)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    compared = [line for line in loop if re.search(r"\bISETP\S* .*-0x1,", line)]  # with NOTHING
    assert 1 <= len(compared) <= pieces + 4  # of all, and of each that is to be asked for again


@needs_tools
@pytest.mark.parametrize("units, batch", [(1024, 128), (2048, 64)])
def test_tf32_products_of_four_warps_spill_nothing(units: int, batch: int, tmp_path: Path) -> None:
    """Of layers that no cluster holds; where their blocks exchange, fences are few and meant."""
    cell = CELLS["lstm"].graph
    tile = grid.estimated(size_of(cell, units, 4), H200, batch, 1, "forward")
    assert isinstance(tile, Spread)
    assert tile.wide
    assert tile.halves
    text = source.forward(cell, units, torch.float32, tile, True)
    lines = disassembled(text, tile, tmp_path / "kernel.cubin")
    assert any("HGMMA" in line for line in lines)
    assert [line for line in lines if re.search(r"\b(LDL|STL)\b", line)] == []


@needs_tools
@pytest.mark.parametrize("units, batch, most", [(512, 128, 0), (1024, 32, 0), (1024, 128, 8), (1500, 20, 0)])
def test_states_of_any_size_spill_little_where_blocks_exchange(
    units: int, batch: int, most: int, tmp_path: Path
) -> None:
    """LSTM with softplus, in the plain layer's tiles, whose weights fill shared memory at batch 128."""
    cell = Form.from_json(whorl.LSTM(4, units, activation="softplus")._form).cell
    tile, plain = (
        spreading.choose(size_of(c, units, 4), H200, batch, 1, "forward") for c in (cell, library.lstm.graph)
    )
    assert tile is not None
    assert plain is not None
    assert tile.by_step
    assert (tile.slice, tile.tiles, tile.subs, tile.parts) == (plain.slice, plain.tiles, plain.subs, plain.parts)
    loop = time_loop(
        disassembled(source.forward(cell, units, torch.float32, tile, True), tile, tmp_path / "kernel.cubin")
    )
    assert any("REDUX" in line for line in loop)
    assert len([line for line in loop if re.search(r"\b(LDL|STL)\b", line)]) <= most


@needs_tools
@pytest.mark.parametrize("units, batch", [(512, 32), (512, 64), (256, 128), (256, 32)])
def test_a_cluster_sends_no_more_where_states_are_of_any_size(units: int, batch: int, tmp_path: Path) -> None:
    """LSTM with softplus beside a plain one in the same tile: as many words go to other blocks."""
    unbounded, plain = (
        Form.from_json(whorl.LSTM(4, units, activation=activation)._form).cell for activation in ("softplus", "tanh")
    )
    chosen, counts = grid.choose(size_of(unbounded, units, 4), H200, batch, 1, "forward"), []
    assert isinstance(chosen, Tile)
    for cell in (unbounded, plain):
        shape = chosen.cluster, chosen.tiles, chosen.splits, H200.shared
        tile = tiling.forward(size_of(cell, units, 4), *shape, subs=chosen.subs, pointwise=chosen.pointwise)
        assert tile is not None
        assert (tile.halves, tile.by_step) == (True, cell is unbounded)
        lines = disassembled(source.forward(cell, units, torch.float32, tile, True), tile, tmp_path / "kernel.cubin")
        counts.append(sum("STAS" in line for line in lines))
    assert counts[0] == counts[1] > 0


@needs_tools
@pytest.mark.parametrize("name, units, batch", [("lstm", 1024, 128), ("lstm", 1024, 32), ("gru", 1024, 32)])
def test_exact_products_of_four_warps_are_all_there_and_run_beside_each_other(
    name: str, units: int, batch: int, tmp_path: Path
) -> None:
    """Where sums overlap or begin undefined, the compiler waits after each product, or leaves some out."""
    cell = CELLS[name].graph
    tile = grid.estimated(size_of(cell, units, 4, exact=True), H200, batch, 1, "forward")
    assert isinstance(tile, Spread)
    assert tile.wide
    assert tile.planes == 2
    text = source.forward(cell, units, torch.float32, tile, True)
    lines = disassembled(text, tile, tmp_path / "kernel.cubin")
    loop = time_loop(lines)
    assert [line for line in lines if re.search(r"\b(LDL|STL)\b", line)] == []
    assert sum("HGMMA" in line for line in loop) == 2 * tile.depths * tile.subs
    assert sum("WARPGROUP.DEPBAR" in line for line in loop) == -(-tile.depths // 4) * tile.subs


@needs_tools
@pytest.mark.parametrize(
    "kind, units, batch, features",
    [
        ("forward", 512, 128, source.Features(lengths=True, order=True)),
        ("backward", 512, 128, source.Features(lengths=True, order=True)),
        ("backward", 512, 128, source.Features(noise=source.BY_GATE)),
        ("forward", 1024, 32, source.Features(mask=True, reset=True, noise=source.DRAWN)),
        ("backward", 1024, 32, source.Features(mask=True, reset=True, noise=source.DRAWN)),
    ],
)
def test_tf32_with_options_is_multiplied_as_float16_and_spills_nothing_in_the_time_loop(
    kind: str, units: int, batch: int, features: source.Features, tmp_path: Path
) -> None:
    cell = CELLS["lstm"].graph
    tile = grid.estimated(size_of(cell, units, 4, features), H200, batch, 1, kind)
    assert tile is not None
    assert tile.halves
    text = (source.forward if kind == "forward" else source.backward)(cell, units, torch.float32, tile, True, features)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert [line for line in loop if re.search(r"\b(LDL|STL)\b", line)] == []


@needs_tools
@pytest.mark.parametrize(
    "features",
    [
        source.Features(zoneout=(source.AT_RANDOM, source.AT_RANDOM)),
        source.Features(noise=source.DRAWN),
        source.Features(noise=source.HELD),
        source.Features(lengths=True, order=True),
        source.Features(mask=True),
    ],
)
def test_with_an_option_four_warps_have_the_plain_layers_tile_and_spill_nothing(
    features: source.Features, tmp_path: Path
) -> None:
    """In half as many sequences at a time a step is half as many instructions more."""
    cell = CELLS["lstm"].graph
    tile = grid.estimated(size_of(cell, 1024, 2, features), H200, 128, 1, "forward")
    plain = grid.estimated(size_of(cell, 1024, 2), H200, 128, 1, "forward")
    assert isinstance(tile, Spread)
    assert isinstance(plain, Spread)
    assert (tile.slice, tile.tiles, tile.subs, tile.wide) == (plain.slice, plain.tiles, plain.subs, plain.wide)
    text = source.forward(cell, 1024, torch.bfloat16, tile, True, features)
    lines = disassembled(text, tile, tmp_path / "kernel.cubin")
    assert any("HGMMA" in line for line in lines)
    assert [line for line in lines if re.search(r"\b(LDL|STL)\b", line)] == []


ONE_OPTION = {
    "plain": source.PLAIN,
    "lengths": source.Features(lengths=True, order=True),
    "mask": source.Features(mask=True),
    "reset": source.Features(reset=True),
    "zoneout": source.Features(zoneout=(source.AT_RANDOM, source.AT_RANDOM)),
    "step": source.Features(noise=source.DRAWN),
    "gate": source.Features(noise=source.BY_GATE),
}


def chosen_with(option: str, kind: str, units: int, batch: int, path: Path) -> list[str]:
    """The kernel of an LSTM in bfloat16 with an option that is chosen for a batch, as instructions."""
    cell, features = CELLS["lstm"].graph, ONE_OPTION[option]
    tile = grid.choose(size_of(cell, units, 2, features), H200, batch, 1, kind)
    assert tile is not None
    write = source.forward if kind == "forward" else source.backward
    return disassembled(write(cell, units, torch.bfloat16, tile, True, features), tile, path / "kernel.cubin")


def loop_with(option: str, kind: str, units: int, dtype: torch.dtype, path: Path) -> list[str]:
    """The time loop of an LSTM with an option, in clusters, as instructions; forward at batch 128, backward at 32."""
    cell, features, batch = CELLS["lstm"].graph, ONE_OPTION[option], 128 if kind == "forward" else 32
    tile = tiling.choose(size_of(cell, units, dtype.itemsize, features), H200, batch, 1, kind)
    assert tile is not None
    text = (source.forward if kind == "forward" else source.backward)(cell, units, dtype, tile, True, features)
    return [line for line in time_loop(disassembled(text, tile, path)) if re.match(r"\s*/\*", line)]


def places(loop: list[str], word: str) -> list[int]:
    """Where instructions stand in a loop."""
    return [at for at, line in enumerate(loop) if re.search(rf"\b{word}\b", line)]


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("option", ONE_OPTION)
def test_no_state_waits_behind_the_input_of_the_next_step(option: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """All blocks wait for what is sent, which stands in one queue with the loads of its warp.

    In two bytes they are asked for before a step waits for its states, else once its own are sent.
    """
    loop = loop_with(option, "forward", 256, dtype, tmp_path / "kernel.cubin")
    asked = places(loop, "LDG")
    if dtype == torch.bfloat16:
        assert max(asked) < min(places(loop, r"SYNCS\.PHASECHK\S+"))
    else:
        assert max(places(loop, "STAS")) < min(asked)
    for at in asked:  # a move waits for the load
        found = re.search(r"LDG\.E\S* R(\d+),", loop[at])
        assert found
        assert not any(re.search(rf"MOV\S* R\d+, (RZ, RZ, )?R{found[1]} ;", line) for line in loop[at + 1 : at + 15])


@needs_tools
@pytest.mark.parametrize(
    "units, dtype, resident, most",
    [(640, torch.bfloat16, 12, (0, 0)), (896, torch.bfloat16, 33, (0, 0)), (1024, torch.bfloat16, 33, (0, 0)),
     (1024, torch.float16, 33, (0, 0)), (640, torch.float16, 12, (4, 0)), (896, torch.float16, 33, (4, 2))],
)  # fmt: skip
def test_backward_steps_with_means_where_blocks_exchange_spill_little(
    units: int, dtype: torch.dtype, resident: int, most: tuple[int, int], tmp_path: Path
) -> None:
    """Layer norm of r and c at batch 32, with as many operands in registers as compile so: in all, and at each step."""
    cell = Form.from_json(whorl.LSTM(4, units, layer_norm="r c")._form).cell
    tile = grid.choose(size_of(cell, units, 2), H200, 32, 1, "backward")
    assert isinstance(tile, Spread)
    assert tile.resident == resident
    lines = disassembled(source.backward(cell, units, dtype, tile, True), tile, tmp_path / "kernel.cubin")
    found = [sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in part) for part in (lines, time_loop(lines))]
    assert all(count <= limit for count, limit in zip(found, most, strict=True))


@needs_tools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cell", ["layer_norm_lstm", "gru_before"])
def test_steps_of_several_stages_ask_for_x_while_the_first_travels(
    cell: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Where they multiply in two bytes before they wait for what the last stage sends to make the next step's state."""
    graph = CELLS[cell].graph
    every = staging.likely(graph, size_of(graph, 256, dtype.itemsize), H200, 32, 1, "forward")
    tile = next(tile for tile in every if not tile.of_sequences)
    text = source.forward(graph, 256, dtype, tile, True)
    loop = [line for line in time_loop(disassembled(text, tile, tmp_path / "kernel.cubin")) if "/*" in line]
    asked, waits, sent = places(loop, "LDG"), places(loop, r"SYNCS\.PHASECHK\S+"), places(loop, "STAS")
    early = dtype == torch.bfloat16 or tile.halves
    assert (max(asked) < max(waits)) == early
    assert (max(asked) < max(sent)) == early


@needs_tools
@pytest.mark.parametrize(
    "option, units, dtype",
    thinned(2, ["zoneout", "step", "mask", "reset"], [256, 512], [torch.bfloat16, torch.float32]),
)
def test_forward_asks_for_marks_and_what_was_drawn_beside_x(
    option: str, units: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """What reads x waits for them too: asked for behind the stores they took a step up to half as long again."""
    loop = loop_with(option, "forward", units, dtype, tmp_path / "kernel.cubin")
    stored, wanted = places(loop, "STG"), places(loop, r"LDG\.E\.U(8|16)")
    inputs = places(loop, r"LDG\.E\.64" if dtype == torch.float32 else r"LDG\.E(?!\.)")
    assert wanted
    for at in wanted:
        nearest = min(inputs, key=lambda place: abs(place - at))
        assert not any(min(at, nearest) < place < max(at, nearest) for place in stored)


@needs_tools
@pytest.mark.parametrize(
    "option, units, dtype", thinned(2, ["mask", "reset"], [256, 512], [torch.bfloat16, torch.float32])
)
def test_backward_asks_for_marks_with_the_input(option: str, units: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """What needs no gradient is computed of the input while sums travel: it would wait for a mark on its way."""
    loop = loop_with(option, "backward", units, dtype, tmp_path / "kernel.cubin")
    marks, product = places(loop, "LDG.E.U8"), min(places(loop, r"HMMA\.\S+"))
    assert len(marks) == 1
    assert marks[0] < product
    # it is not used before x, either, as it is moved out of the way of the next one
    inputs = [line for line in loop[:product] if re.search(r"LDG\.E(\.64)? ", line)]
    (mark, *_), *gates = (re.findall(r" R(\d+),", line) for line in [loop[marks[0]], *inputs])
    used = [
        min(at for at in places(loop, f"R{one}") if "LDG" not in loop[at]) for one in (mark, *(g[0] for g in gates))
    ]
    assert min(used[1:]) < used[0]


@needs_tools
@pytest.mark.parametrize("option", ["shared", "zoneout", "step", "gate"])
def test_dropout_leaves_backward_its_weights_in_registers(option: str, tmp_path: Path) -> None:
    """A step reads from shared memory what registers do not hold, by every warp at once."""
    cell, features = CELLS["lstm"].graph, {**ONE_OPTION, "shared": source.Features(noise=source.HELD)}[option]
    tile = grid.estimated(size_of(cell, 512, 2, features), H200, 32, 1, "backward")
    assert isinstance(tile, tiling.Tile)
    assert tile.resident >= (32 if option == "zoneout" else 30)
    text = source.backward(cell, 512, torch.bfloat16, tile, True, features)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert not places(loop, "LDL")
    assert not places(loop, "STL")


@needs_tools
@pytest.mark.parametrize("units", [256, 512])
@pytest.mark.parametrize("option", ["zoneout", "step"])
def test_backward_asks_for_what_was_drawn_before_its_product(option: str, units: int, tmp_path: Path) -> None:
    loop = loop_with(option, "backward", units, torch.bfloat16, tmp_path / "kernel.cubin")
    drawn = places(loop, "LDG.E.U16")
    assert len(drawn) == 1
    assert max(drawn) < min(places(loop, "HMMA.16816.F32.BF16"))


@needs_tools
@pytest.mark.parametrize("option", ONE_OPTION)
def test_backward_knows_where_the_next_steps_input_lies(option: str, tmp_path: Path) -> None:
    """Of a block with 16 units two warps compute the cell: for constant memory they would wait before their product."""
    cell, features = CELLS["lstm"].graph, ONE_OPTION[option]
    tile = grid.estimated(size_of(cell, 256, 2, features), H200, 32, 1, "backward")
    assert isinstance(tile, tiling.Tile)
    assert (tile.slice, tile.tiles) == (16, 1)
    text = source.backward(cell, 256, torch.bfloat16, tile, True, features)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    product = min(places(loop, "HMMA.16816.F32.BF16"))
    begin = max(at for at in places(loop, "BAR.SYNC.DEFER_BLOCKING") if at < product)
    assert not any(begin < at < product for at in places(loop, r"LDC(\.64)?"))


@needs_tools
@pytest.mark.parametrize(  # in clusters, and where blocks exchange
    "option, units, kind", thinned(2, ["zoneout", "step"], [256, 512, 1024], ["backward", "forward"])
)
def test_what_was_drawn_is_on_its_way_to_the_cache_steps_ahead(
    option: str, units: int, kind: str, tmp_path: Path
) -> None:
    """Else a step waits for memory: what passes through the cache meanwhile is several times what was drawn."""

    cell = CELLS["lstm"].graph

    def chosen(name: str) -> tiling.Tile | Spread:
        # at batch 128 the plain layer of 512 units is spread forward, others are in clusters
        batch = 112 if (units, kind) == (512, "forward") else 128
        tile = grid.estimated(size_of(cell, units, 2, ONE_OPTION[name]), H200, batch, 1, kind)
        assert tile is not None
        return tile

    def asked(name: str) -> int:
        features, tile = ONE_OPTION[name], chosen(name)
        write = source.forward if kind == "forward" else source.backward
        text = write(cell, units, torch.bfloat16, tile, True, features)
        return len(places(time_loop(disassembled(text, tile, tmp_path / name)), r"CCTL\.E\.PF2"))

    if option == "zoneout" and kind == "backward" and isinstance(chosen(option), Spread):  # which was no faster so
        assert asked(option) == asked("plain")
    else:
        assert type(chosen(option)) is type(chosen("plain"))
        spared = option == "step" and kind == "backward"  # the state before a step, which forward saves as it entered
        assert asked(option) + spared > asked("plain")


@needs_tools
@pytest.mark.parametrize("units, batch", [(256, 32), (512, 32), (256, 128), (1024, 32)])  # in clusters, and spread
@pytest.mark.parametrize("option", ["plain", "zoneout", "mask", "reset"])
def test_backward_moves_nothing_that_it_has_just_asked_for(option: str, units: int, batch: int, tmp_path: Path) -> None:
    """A move waits for the load: that of the state before a step, in the midst of a product, or that of a mark."""
    cell, features = CELLS["lstm"].graph, ONE_OPTION[option]
    tile = grid.estimated(size_of(cell, units, 2, features), H200, batch, 1, "backward")
    assert tile is not None
    loop = time_loop(
        disassembled(source.backward(cell, units, torch.bfloat16, tile, True, features), tile, tmp_path / "k")
    )
    asked = [at for at, line in enumerate(loop) if re.search(r"LDG\.E(\.64|\.U8)? ", line)]
    assert any("LDG.E.U8" in loop[at] for at in asked) == (option in ("mask", "reset"))
    for at in asked:
        found = re.search(r"LDG\.E(\.64|\.U8)? R(\d+),", loop[at])
        assert found
        for register in range(int(found[2]), int(found[2]) + 1 + (found[1] == ".64")):
            after = [*loop[at + 1 :], *loop[:at]][:12]
            assert not any(re.search(rf"MOV\S* R\d+, (RZ, RZ, )?R{register} ;", line) for line in after)


@needs_tools
@pytest.mark.parametrize("units, items", [(256, 1), (512, 3)])
@pytest.mark.parametrize(
    "option, kind, most",
    [("zoneout", "forward", 24), ("step", "forward", 30), ("gate", "forward", 180), ("zoneout", "backward", 36)],
)
def test_an_option_costs_a_step_few_instructions(
    option: str, kind: str, most: int, units: int, items: int, tmp_path: Path
) -> None:
    """Of each item forward: where a pair's bits lie is not computed anew at each step.

    But for addresses in the blocks of a cluster, which the compiler makes in one way or another, and what moves them.
    """
    sending = re.compile(r"\b(STAS|U?PRMT|U?MOV|IMAD\.(U32|MOV\S*))\b")
    loops = (loop_with(name, kind, units, torch.bfloat16, tmp_path / name) for name in ("plain", option))
    plain, mine = ([line for line in loop if not sending.search(line)] for loop in loops)
    assert len(mine) - len(plain) <= most * (items if kind == "forward" else 1)


@needs_tools
@pytest.mark.parametrize("units, dtype", [(256, torch.bfloat16), (256, torch.float32), (128, torch.bfloat16)])
def test_lengths_are_counted_behind_the_product(units: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """In front of it all of the block would wait for a vote."""
    cell, features = CELLS["lstm"].graph, ONE_OPTION["lengths"]
    tile = tiling.choose(size_of(cell, units, dtype.itemsize, features), H200, 32, 1, "forward")
    assert tile is not None
    assert tile.pointwise
    text = source.forward(cell, units, dtype, tile, True, features)
    loop = time_loop(disassembled(text, tile, tmp_path / "kernel.cubin"))
    assert min(places(loop, "VOTE")) > max(places(loop, "HMMA"))


@needs_tools
def test_a_fence_in_the_time_loop_is_found(tmp_path: Path) -> None:
    wider = ("mbarrier.try_wait.parity.shared", "mbarrier.try_wait.parity.acquire.cluster.shared")
    loop = time_loop(listing("forward", "lstm", 512, 32, "bfloat16", tmp_path / "kernel.cubin", wider))
    assert any("CCTL.IVALL" in line for line in loop)


@needs_tools
def test_the_tool_reads_what_two_compilers_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "machine_code.py"))
    path = tmp_path / "one.jsonl"
    tool["write"](str(path), "^lstm 128 x 32 bf16 forward")
    (line,) = path.read_text().splitlines()
    assert re.search(r'"spills": 0, .*"fences": 0, "products": [1-9]', line)
    (tmp_path / "other.jsonl").write_text(line.replace('"fences": 0', '"fences": 2'))
    tool["compare"](str(path), str(tmp_path / "other.jsonl"))
    assert capsys.readouterr().out == "lstm 128 x 32 bf16 forward (lstm_forward_128_bfloat16_8x8): fences 0 2\n"
