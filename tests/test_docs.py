"""What the documentation shows is what happens: the code in README.md and docs/, and every example in a docstring."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import runpy
from pathlib import Path

import pytest
import torch

import whorl

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
MODULES = ["whorl", *(module.name for module in pkgutil.walk_packages(whorl.__path__, "whorl."))]
CODE_THEN_OUTPUT = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_does_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks run from top to bottom, as a reader would type them; a `text` block below one is what it prints."""
    text = page.read_text(encoding="utf-8")
    if "import whorl.keras" in text:
        pytest.importorskip("keras")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": page.stem}
    for block in CODE_THEN_OUTPUT.finditer(text):
        line = text.count("\n", 0, block.start(1))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * line + block[1], page, "exec"), names)  # a traceback then shows the page's lines
        if block[2] is not None and torch.backends.mkldnn.is_available():  # what `explain` prints depends on it
            assert printed.getvalue() == block[2], f"{page.name}, line {line}, prints something else"


def test_the_page_of_options_is_what_the_code_says() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "options_page.py"))
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == tool["page"](), "write it anew: python tools/options_page.py"


def test_the_readme_has_code_and_output() -> None:
    blocks = CODE_THEN_OUTPUT.findall(PAGES[0].read_text(encoding="utf-8"))
    assert any(code for code, _ in blocks)
    assert any(output for _, output in blocks)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    if name.startswith("whorl.keras"):
        pytest.importorskip("keras")
    if name in ("whorl.keras.callback", "whorl.keras.calls", "whorl.keras.on_jax", "whorl.keras.xla"):
        pytest.importorskip("jax")
    public = {name: getattr(whorl, name) for name in whorl.__all__}
    result = doctest.testmod(
        importlib.import_module(name),
        extraglobs={"torch": torch, "whorl": whorl, **public},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert result.failed == 0, "see the output above for each example that gave something else"
