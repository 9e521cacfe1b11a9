"""What the compiler made of the kernels that the benchmark's grid and its options take on an H200; needs no GPU.

    PYTHONPATH=tests python tools/machine_code.py write 13.0.jsonl           # by the NVRTC that is installed: minutes
    PYTHONPATH=tests python tools/machine_code.py write 13.0.jsonl "^gru .* bf16 backward"
    PYTHONPATH=tests python tools/machine_code.py compare 13.0.jsonl 13.5.jsonl

`write` counts what the loop over time has of each kind of instruction. `compare` prints the kernels whose loop has
spills, or which two compilers made differently: votes, waits or fences in one alone, or a tenth more instructions.

Another NVRTC than the installed: `pip download --no-deps nvidia-cuda-nvrtc==13.0.*`, unzip it, and set LD_PRELOAD to
its libnvrtc.so.13 and LD_LIBRARY_PATH to the folder of that.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cells_for_tests import CELLS
from test_machine_code import H200, disassembled, time_loop
from whorl.bench.cases import GRID, PRECISIONS
from whorl.cells import library, wrappers
from whorl.cells.cell import Graph
from whorl.engines.cuda import grid, source
from whorl.engines.cuda.prepare import Numbers, size_of
from whorl.engines.cuda.source import PLAIN, Features

COUNTED = {
    "spills": r"\b(LDL|STL)\b", "votes": r"\bVOTE\b", "waits": r"\bWARPSYNC\b", "branches": r"\bBSSY\b",
    "fences": r"\b(MEMBAR|ERRBAR|CCTL\.IVALL)\b", "products": r"\bH?G?MMA\b", "instructions": r"^/\*[0-9a-f]{4,}\*/",
}  # fmt: skip
NORM = wrappers.layer_norm(library.make_lstm(layer_norm=True).graph, ("r",))[0]  # that of x is outside the loop
OPTIONS = {  # by the names that they have on a layer or a call
    "lengths": Features(lengths=True, order=True),
    "packed": Features(lengths=True, order=True, packed=True),
    "mask": Features(mask=True),
    "reset": Features(reset=True),
    "reset_to": Features(reset=True, reset_to=True),
    "recurrent_dropout": Features(noise=source.BY_GATE),
    "recurrent_dropout, shared": Features(noise=source.HELD),
    "recurrent_dropout, step": Features(noise=source.DRAWN),
    "recurrent_dropout, given": Features(noise=source.GIVEN_BY_GATE),
    "zoneout": Features(zoneout=(source.AT_RANDOM,)),
    "zoneout, in eval mode": Features(zoneout=(source.BY_SHARE,)),
    "return_states": Features(sequences=True),
    "most": Features(mask=True, reset=True, noise=source.BY_GATE, zoneout=(source.AT_RANDOM,)),
}


def cases() -> Iterator[tuple[str, Graph, int, int, str, Features]]:
    """Name, cell, units, batch, precision and options."""
    for name in ("lstm", "gru", "rnn_tanh"):
        for units, batch in sorted({(case.units, case.batch) for case in GRID}):
            for precision in PRECISIONS:
                yield name, CELLS[name].graph, units, batch, precision, PLAIN
    for units, batch in ((512, 128), (512, 32), (256, 32), (256, 128), (650, 20), (1024, 32), (1500, 20)):
        for precision in ("bf16", "tf32"):
            yield "layer norm of r and c", NORM, units, batch, precision, PLAIN
    for name in ("gru_before", "layer_norm_lstm", "four_states"):
        yield name, CELLS[name].graph, 512, 128, "bf16", PLAIN
    for name in ("lstm", "gru"):
        for units, batch in ((512, 128), (1024, 128)):
            for option, of in OPTIONS.items():
                each = of._replace(zoneout=of.zoneout * len(CELLS[name].graph.states))
                yield f"{name}, {option},", CELLS[name].graph, units, batch, "bf16", each


def kernels(pattern: str) -> Iterator[tuple[str, Numbers]]:
    """The forward and the backward kernel of each case that the pattern describes."""
    for name, graph, units, batch, precision, of in cases():
        dtype = PRECISIONS[precision]
        for kind in ("forward", "backward"):
            case = f"{name} {units} x {batch} {precision} {kind}"
            if re.search(pattern, case):
                size = size_of(graph, units, dtype.itemsize, of, exact=precision == "fp32")
                tile = grid.estimated(size, H200, batch, 1, kind)
                assert tile is not None, f"no tile of {case}"
                yield case, Numbers(kind, graph, units, dtype, tile, True, of)


def counted(lines: Sequence[str]) -> dict[str, int]:
    """Instructions of each kind in the loop over time."""
    loop = [line.strip() for line in time_loop([*lines])]
    return {name: sum(bool(re.search(what, line)) for line in loop) for name, what in COUNTED.items()}


def write(path: str, pattern: str = "") -> None:
    """A line for each case; several may have the same kernel."""
    made: dict[str, dict[str, int]] = {}
    with open(path, "w") as file, tempfile.TemporaryDirectory() as folder:
        for case, (kind, graph, units, dtype, tile, *more) in kernels(pattern):
            text = (source.forward if kind == "forward" else source.backward)(graph, units, dtype, tile, *more)
            key = hashlib.sha256(text.encode()).hexdigest()
            if key not in made:
                made[key] = counted(disassembled(text, tile, Path(folder) / "kernel.cubin"))
            about = {"case": case, "kernel": source.kernel_name(kind, graph, units, dtype, tile), **made[key]}
            print(json.dumps(about), file=file, flush=True)


def differences(files: Sequence[Mapping[str, Mapping[str, int]]]) -> Iterator[str]:
    """What is to be read of kernels by their cases, as several compilers made them."""
    for case in files[0]:
        rows = [file[case] for file in files if case in file]
        counts = {name: [row[name] for row in rows] for name in COUNTED}
        shown = [name for name in ("votes", "waits", "fences") if min(counts[name]) == 0 < max(counts[name])]
        shown += ["spills"] * any(counts["spills"])
        shown += ["instructions"] * (max(counts["instructions"]) > 1.1 * min(counts["instructions"]))
        if shown:
            said = (f"{name} {' '.join(map(str, counts[name]))}" for name in shown)
            yield f"{case} ({rows[0]['kernel']}): {', '.join(said)}"


def compare(*paths: str) -> None:
    """Prints the differences of what was written with several compilers."""
    rows = [[json.loads(line) for line in Path(path).read_text().splitlines()] for path in paths]
    print(*differences([{row["case"]: row for row in file} for file in rows]), sep="\n")


if __name__ == "__main__":
    {"write": write, "compare": compare}[sys.argv[1]](*sys.argv[2:])
