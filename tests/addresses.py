"""A plugin of pytest: kernels on the host are compiled with AddressSanitizer, and in one of them a fault is planted.

Tensors are memory of malloc's, which the sanitizer, where it is loaded first, surrounds by what nobody may touch.
"""

import os
from typing import Any

import emulation

os.environ.pop("LD_PRELOAD", None)  # it is loaded here; with it the compiler takes 1.7 times as long
emulation.FLAGS = (
    *emulation.FLAGS,
    "-fsanitize=address",
    "--param",
    "asan-stack=0",
    "-g1",
)  # a fiber has its own stack

RIGHT, _, WRONG = os.environ.get("WHORL_TEST_PLANTED", "").partition(" -> ")
on_host = emulation.on_host


def planted(source: str) -> Any:
    return on_host(source.replace(RIGHT, WRONG) if RIGHT else source)


emulation.on_host = planted
