"""A file imports only what stands before it, so the line that a call takes can be read in one direction."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

# The rooms of the package. "whorl" is the package's own __init__: what stands after it, `import whorl` never loads.
ROOMS = "errors settings compiler cells problem weights noise engines plan run compiled functional options".split()
ROOMS += (
    "arguments recurrence stepper layer modules steps adoption explanation diagnosis whorl keras text bench".split()
)
ROOMS += ["commands", "__main__"]
INSIDE = {  # the order within a room; in a room that has none here, the files may import each other
    "cells": ["expr", "torch_functions", "graphs", "early", "cell", "wrappers", "library", "intervals", "lower"],
    "engines": ["base", "reference", "native", "loops", "factors", "segments", "host", "tape", "taped", "cuda", "cpu"],
}


def violations(package: Path) -> Iterator[str]:
    """One line for each file under `package` without a place in the order, and for each import that goes against it."""
    files = {_module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    places = {module: _place(module) for module in files}
    for module, path in files.items():
        where, here = path.relative_to(package.parent).as_posix(), places[module]
        if here is None:
            yield f"{where}: has no place in the order, give it one in tests/test_import_order.py"
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"), where)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside_functions = {inner for function in functions for inner in ast.walk(function)}
        for node in ast.walk(tree):
            for imported in _imports(node, module, files):
                there = places.get(imported)
                if node in inside_functions:
                    yield f"{where}:{node.lineno}: imports {imported} inside a function"
                elif there is None or there > here or imported == module:
                    yield f"{where}:{node.lineno}: imports {imported}, which does not stand before it"


def _imports(node: ast.AST, module: str, files: dict[str, Path]) -> set[str]:
    """The modules of the package that an import statement names; the package itself for a name that is no module."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        base = [node.module] if node.module else []
        if node.level:
            parents = module.split(".") + ["__init__"] * (files[module].name == "__init__.py")
            base = parents[: -node.level] + base
        prefix = ".".join(base)
        names = {f"{prefix}.{alias.name}" if f"{prefix}.{alias.name}" in files else prefix for alias in node.names}
    else:
        return set()
    root = module.split(".")[0]
    return {name for name in names if name.split(".")[0] == root}


def _place(module: str) -> tuple[int, int] | None:
    room, *rest = module.split(".")[1:] or ["whorl"]
    order = INSIDE.get(room, rest[:1])
    if room not in ROOMS or (rest and rest[0] not in order):
        return None
    within = order.index(rest[0]) if rest else len(order)  # the room's own __init__ stands last in it
    return ROOMS.index(room), within if room in INSIDE else 0


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_file_imports_only_what_stands_before_it() -> None:
    package = Path(__file__).parents[1] / "src" / "whorl"
    assert list(violations(package)) == []


SOUND = {
    "__init__.py": "from . import plan, run\nfrom .functional import call",
    "errors.py": "",
    "cells/__init__.py": "from .expr import Expr\nfrom .cell import Cell",
    "cells/expr.py": "from ..errors import SlowError",
    "cells/cell.py": "import math\nfrom .expr import Expr",
    "plan.py": "import torch\nfrom .cells import Cell\nfrom whorl.cells.cell import Cell",
    "run.py": "from .plan import plan\ndef run():\n    import torch",
    "functional.py": "from . import run\nfrom whorl import plan",
    "text/__init__.py": "from .data import read",
    "text/data.py": "import whorl\nfrom .model import Model",
    "text/model.py": "from whorl import functional",
}


@pytest.fixture
def sound_package(tmp_path: Path) -> Path:
    for name, source in SOUND.items():
        path = tmp_path / "whorl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return tmp_path / "whorl"


def test_a_package_in_order_passes(sound_package: Path) -> None:
    assert list(violations(sound_package)) == []


@pytest.mark.parametrize(
    "name, source, found",
    [
        ("plan.py", "from whorl import run", ":1: imports whorl.run, which does not stand before it"),
        ("plan.py", "from .run import run", ":1: imports whorl.run, which does not stand before it"),
        ("plan.py", "from whorl.run import run", ":1: imports whorl.run, which does not stand before it"),
        ("plan.py", "import torch, whorl.run", ":1: imports whorl.run, which does not stand before it"),
        ("plan.py", "import whorl", ":1: imports whorl, which does not stand before it"),
        ("plan.py", "from whorl import plans", ":1: imports whorl, which does not stand before it"),
        ("plan.py", "import whorl.gone", ":1: imports whorl.gone, which does not stand before it"),
        ("plan.py", "if True:\n    from . import run", ":2: imports whorl.run, which does not stand before it"),
        ("run.py", "def run():\n    from .plan import plan", ":2: imports whorl.plan inside a function"),
        ("cells/expr.py", "from .cell import Cell", ":1: imports whorl.cells.cell, which does not stand before it"),
        ("cells/expr.py", "from . import cell", ":1: imports whorl.cells.cell, which does not stand before it"),
        ("cells/expr.py", "from . import Cell", ":1: imports whorl.cells, which does not stand before it"),
        ("cells/expr.py", "from ..plan import plan", ":1: imports whorl.plan, which does not stand before it"),
        ("cells/__init__.py", "from ..plan import plan", ":1: imports whorl.plan, which does not stand before it"),
        ("__init__.py", "from .text import data", ":1: imports whorl.text.data, which does not stand before it"),
        ("helpers.py", "", ": has no place in the order, give it one in tests/test_import_order.py"),
        ("cells/helpers.py", "", ": has no place in the order, give it one in tests/test_import_order.py"),
    ],
)
def test_an_import_against_the_order_is_found(sound_package: Path, name: str, source: str, found: str) -> None:
    (sound_package / name).write_text(source, encoding="utf-8")
    assert list(violations(sound_package)) == [f"whorl/{name}{found}"]
