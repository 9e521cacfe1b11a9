"""What Python and C++ of engine `cpu` both name: fields of structures, and arguments of functions, in one order."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from whorl import compiler
from whorl.engines.cpu import generate, sweep

KINDS = {"int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "chance": ctypes.c_uint64, "double": ctypes.c_double}
XLA = Path(sweep.__file__).parents[2] / "keras" / "xla.cpp"
MOST = 4
"""States of a cell, at most."""


def fields_of(struct: str, text: str) -> dict[str, str]:
    """The C++ type of each member of a structure, by name: "*" of what is an address; functions are none."""
    body = text.split(f"struct {struct} {{", 1)[1].split("\n};", 1)[0]
    body = re.sub(r"//[^\n]*", "", body)
    body = re.split(r"\n  \w[\w ]* \w+\([^;]*\{", body, maxsplit=1)[0]
    found = {}
    for line in filter(None, map(str.strip, body.split(";"))):
        first, *others = re.split(r",\s*", re.sub(r"\s+", " ", line))
        kind, name = re.fullmatch(r"(.*?[ *])(\w+(?:\[\w+\])?)", first).groups()  # type: ignore[union-attr]
        for one in (name, *others):
            bare, count = re.fullmatch(r"\*?(\w+)(\[\w+\])?", one).groups()  # type: ignore[union-attr]
            address = "*" in kind or one.startswith("*")
            found[bare] = ("*" if address else kind.strip()) + (count or "")
    return found


def described(kind: Any) -> str:
    """The C++ of a type of ctypes, as `fields_of` has it; those of the same size and meaning are one."""
    if isinstance(kind, type) and issubclass(kind, ctypes.Array):
        return f"{described(kind._type_)}[MOST_STATES]" if kind._length_ == MOST else f"of {kind._length_}"
    if issubclass(kind, ctypes.Structure):
        return kind.__name__.strip("_")
    return "*" if kind is ctypes.c_void_p else kind.__name__


def plainly(kind: str) -> str:
    """A C++ type by the name of ctypes' one."""
    bare, bracket, count = kind.partition("[")
    return (KINDS[bare].__name__ if bare in KINDS else bare) + bracket + count


@pytest.mark.parametrize("struct, ours", [
    ("Zoneout", sweep._Zoneout), ("Sweep", sweep.Sweep), ("StepLayer", sweep.StepLayer),
])  # fmt: skip
def test_structures_have_the_same_fields(struct: str, ours: Any) -> None:
    theirs = {name: plainly(kind) for name, kind in fields_of(struct, generate.sweep()).items()}
    assert list(theirs.items()) == [(name, described(kind)) for name, kind in ours._fields_]


def test_what_a_plain_call_is_told_is_in_the_order_of_the_kernel() -> None:
    """Words of eight bytes, name by name; four of each state's."""
    theirs = fields_of("Plain", generate.sweep())
    named = [name + ":4" * kind.endswith("[MOST_STATES]") for name, kind in theirs.items()]
    assert named == [*sweep.OF_BOTH.split(), *sweep.OF_BACKWARD.split()]
    assert {kind.partition("[")[0] for kind in theirs.values()} == {"*", "int64_t", "uint64_t"}


def test_an_operation_of_xla_is_told_the_same_numbers() -> None:
    pytest.importorskip("keras")
    pytest.importorskip("jax")
    from whorl.keras.xla import Numbers

    theirs = fields_of("Numbers", XLA.read_text(encoding="utf-8"))
    assert tuple(theirs) == Numbers._fields
    assert set(theirs.values()) == {"int64_t"}


@pytest.mark.skipif(not compiler.found(), reason=f"no C++ compiler: {compiler.remedy()}")
def test_functions_take_the_same_arguments() -> None:
    """Those that C++ defines are those that Python calls."""
    library, seen = sweep._loop(torch.float32), set()
    for name, arguments in re.findall(r"^(?:int64_t|void|bool) whorl_(\w+)\(([^)]*)\) \{", generate.sweep(), re.M):
        function = getattr(library, f"whorl_{name}")
        theirs = [one.strip() for one in arguments.split(",") if one.strip()]
        kinds = ["*" if "*" in one else KINDS[one.split()[0]] for one in theirs]
        ours = [kind if kind in KINDS.values() else "*" for kind in function.argtypes or ()]
        assert ours == kinds, name
        seen.add(name)
    assert seen >= {*sweep.Kernel._fields[3:]}
