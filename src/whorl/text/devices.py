"""The device that a model runs on: which one is meant, what it is, and whether a model fits on it."""

import os

import torch

from whorl.errors import InputError
from whorl.text.model import Architecture, LanguageModel

COPIES, BYTES = 4, 4  # of each parameter: itself, its gradient and AdamW's two averages, in float32


def find(name: str) -> torch.device:
    """The device of this name; "auto": the GPU where torch sees one, else the CPU.

    Raises:
        InputError: torch does not see it.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu" or (name == "mps" and torch.backends.mps.is_available()):
        return torch.device(name)
    kind, _, index = name.partition(":")
    if kind == "cuda" and (index or "0").isdecimal() and int(index or "0") < torch.cuda.device_count():
        return torch.device(name)
    raise InputError(f"device is {name!r}, which torch does not see: write auto or cpu; `whorl doctor` says why.")


def describe(device: torch.device) -> str:
    """The GPU's name, or the device with its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device} with {threads} thread{'s' * (threads != 1)}"


def check_memory(architecture: Architecture, device: torch.device) -> None:
    """Look whether a model can be trained on a device: to allocate what is not there may end the process.

    Raises:
        InputError: its weights, gradients and averages are larger than the device's memory.
    """
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in LanguageModel(architecture).parameters())
    need = count * COPIES * BYTES
    if device.type == "cuda":
        have = torch.cuda.mem_get_info(device)[1]
    elif hasattr(os, "sysconf"):
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if need > have:
        raise InputError(
            f"the model has {count:,} parameters, which take {need / 2**30:.1f} GiB to train, and {device} has "
            f"{have / 2**30:.1f}: make --units, --embedding or --layers smaller."
        )
