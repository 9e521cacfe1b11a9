"""`whorl warm`: compile the CUDA kernels of a layer ahead of time, on any machine."""

import argparse
import re
from typing import NamedTuple

import torch

from whorl.cells import library
from whorl.engines import taped
from whorl.engines.cuda import asked
from whorl.engines.cuda.persistent import warm
from whorl.engines.cuda.tiling import Chip
from whorl.errors import InputError, KernelError
from whorl.problem import Device, Form, Problem
from whorl.settings import settings

CELLS = {
    "lstm": library.lstm,
    "gru": library.gru,
    "rnn_tanh": library.rnn_tanh,
    "rnn_relu": library.rnn_relu,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "tf32": torch.float32, "float32": torch.float32}


class Gpu(NamedTuple):
    """A GPU to compile for."""

    name: str
    chip: Chip


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Compile the CUDA kernels of a layer ahead of time into the folder of compiled kernels (WHORL_CACHE)."
    parser = commands.add_parser("warm", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("cell", choices=CELLS, help="the layer's cell")
    parser.add_argument("--units", type=count, nargs="+", required=True, help="its units; several compile several")
    parser.add_argument("--inputs", type=count, help="features of the input; as many as units unless given")
    parser.add_argument("--layers", type=count, default=1, help="layers on each other (1)")
    parser.add_argument("--batch", type=count, nargs="+", default=[32], help="sequences side by side (32)")
    copied = "steps: where there are many, odd widths are copied for cuBLAS, by a kernel of its own (100)"
    parser.add_argument("--time", type=count, default=100, help=copied)
    which = "bfloat16 unless given; tf32 is what float32 is by torch's own default"
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"], help=which)
    parser.add_argument("--bidirectional", action="store_true", help="both directions")
    parser.add_argument("--no-bias", action="store_true", help="a layer without bias")
    parser.add_argument("--inference", action="store_true", help="the forward kernel alone, which saves nothing")
    parser.add_argument(
        "--gpu",
        type=_gpu,
        help="compute capability and multiprocessors of the GPU, as in 9.0:132; this machine's own unless given",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compile, and print the name of each kernel."""
    gpu = arguments.gpu or own_gpu("`whorl warm` compiles for another with --gpu 9.0:132")
    cores = gpu.chip.multiprocessors
    devices = {
        dtype: Device("cuda", gpu.name, gpu.chip.capability, tf32=dtype == "tf32", multiprocessors=cores)
        for dtype in arguments.dtype
    }
    problems = [
        Problem(
            form=Form(CELLS[arguments.cell].graph, arguments.inputs or units, units, layers=arguments.layers,
                      directions=1 + arguments.bidirectional, bias=not arguments.no_bias),
            device=devices[dtype], dtype=DTYPES[dtype], time=arguments.time, batch=batch,
            gradient=not arguments.inference,
        )
        for units in arguments.units for batch in arguments.batch for dtype in arguments.dtype
    ]  # fmt: skip
    try:
        names = dict.fromkeys(name for problem in problems for name in warm(problem, gpu.chip))
    except KernelError as error:
        raise InputError(str(error)) from error
    for name in names:
        print(name)
    print(f"{len(names)} kernels for {gpu.name} are in {settings.cache}")
    if torch.version.cuda is not None:
        fault = taped.finish() or asked.fault()
        print(f"calls go through Python: {fault}" if fault else "calls are compiled")
    return 0


def count(text: str) -> int:
    """A number of 1 or more, of the command line."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number of 1 or more")
    return int(text)


def _gpu(text: str) -> Gpu:
    found = re.fullmatch(r"(\d+)\.(\d):(\d+)", text)
    if found is None or int(found[3]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write compute capability and multiprocessors, as in 9.0:132")
    major, minor, multiprocessors = map(int, found.groups())
    return Gpu(f"a GPU of compute capability {major}.{minor}", Chip((major, minor), multiprocessors))


def own_gpu(remedy: str) -> Gpu:
    """The GPU that torch uses.

    Args:
        remedy: what to do where there is none, for the error.

    Raises:
        InputError: it sees none.
    """
    if not torch.cuda.is_available():
        raise InputError(f"torch sees no NVIDIA GPU here: {remedy}.")
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(seen.name, Chip((seen.major, seen.minor), seen.multi_processor_count))
