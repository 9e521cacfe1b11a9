"""`whorl tune`: measure on this GPU which tile of a kernel is fastest for a layer, and keep it."""

import argparse

import torch

from whorl.commands.warm import CELLS, DTYPES, count, own_gpu
from whorl.engines.cuda.grid import described
from whorl.engines.cuda.prepare import shared_bytes
from whorl.engines.cuda.tuning import tune
from whorl.errors import InputError, KernelError
from whorl.plan import decide
from whorl.problem import Device, Form, Problem
from whorl.settings import settings


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the arguments."""
    text = "Measure on this GPU which tile of a CUDA kernel is fastest for a layer, and keep it (WHORL_CACHE)."
    parser = commands.add_parser("tune", help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("cell", choices=CELLS, help="the layer's cell")
    parser.add_argument("--units", type=count, nargs="+", required=True, help="its units; several tune several")
    parser.add_argument("--batch", type=count, nargs="+", default=[32], help="sequences side by side (32)")
    parser.add_argument(
        "--time", type=count, default=100, help="steps that are measured, the choice holds for any (100)"
    )
    which = "bfloat16 unless given; tf32 is what float32 is by torch's own default"
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"], help=which)
    parser.add_argument("--bidirectional", action="store_true", help="both directions")
    parser.add_argument("--inference", action="store_true", help="the forward kernel alone")


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print what was found."""
    gpu = own_gpu("run `whorl tune` on the machine whose GPU it is to measure")
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in arguments.dtype:
        for units in arguments.units:
            for batch in arguments.batch:
                form = Form(CELLS[arguments.cell].graph, units, units, directions=1 + arguments.bidirectional)
                where = Device(
                    "cuda",
                    gpu.name,
                    gpu.chip.capability,
                    tf32=dtype == "tf32",
                    multiprocessors=gpu.chip.multiprocessors,
                )
                problem = Problem(form, where, DTYPES[dtype], arguments.time, batch, gradient=not arguments.inference)
                print(f"{arguments.cell}, {units} units, batch {batch}, {dtype}, {arguments.time} steps on {gpu.name}")
                try:
                    for choice in tune(decide(problem, "persistent"), device):
                        first, best = next(iter(choice.times)), choice.best
                        shared = {
                            tile: shared_bytes(choice.kind, form.cell, tile, gpu.chip.architecture)
                            for tile in (first, best)
                        }
                        told = {tile: described(tile, shared[tile], form.directions) for tile in shared}
                        print(f"  {choice.kind:8} {choice.times[first]:8.1f} us as estimated, {told[first]}")
                        if best != first:
                            print(f"  {'':8} {choice.times[best]:8.1f} us at best, {told[best]}")
                except KernelError as error:
                    raise InputError(str(error)) from error
    print(f"what is fastest is kept in {settings.cache}")
    return 0
