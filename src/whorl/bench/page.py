"""The page of results: Markdown made from results files, and nothing typed into it by hand but its notes."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from whorl.bench.cases import GRID, QUICK
from whorl.bench.history import history
from whorl.bench.results import Results, refuse_others, write
from whorl.bench.tables import Table, described, is_whorl, reading, times
from whorl.errors import InputError

_MARK = """# Results

This page is written by `whorl bench page` from results files"""
_HEAD = f"""{_MARK}; what is typed into it is lost. [bench](bench.md) says how the figures are measured.

```
%s
```
"""


def save_page(paths: Sequence[Path], notes: Path | None, out: Path) -> None:
    """Write the page, over one of `whorl bench` at most.

    Raises:
        InputError: a file that is no results or cannot be read, another file in the page's place, or the disk refuses.
    """
    refuse_others(out, _MARK)
    write(out, page(paths, notes, out))


def page(paths: Sequence[Path], notes: Path | None, out: Path) -> str:
    """The page as Markdown: the sizes of 2017 then and now, a section for each file, and the notes at the end.

    Args:
        out: where the page will be; its own command stands at its top.

    Raises:
        InputError: a file that is no results, or cannot be read.
    """
    words = ["whorl", "bench", "page", *map(str, paths), *(["--notes", str(notes)] if notes else []), "--out", str(out)]
    loaded = [Results.load(path) for path in paths]
    parts = [_HEAD % shlex.join(words)]
    then_and_now = history(loaded)
    if then_and_now is not None:
        parts.append(f"## 2017 and now\n\n{then_and_now.title}.\n\n{then_and_now.markdown()}\n")
    parts += [_section(path, results, out) for path, results in zip(paths, loaded, strict=True)]
    return "\n".join(parts + ([_read(notes)] if notes is not None else []))


def _section(path: Path, results: Results, out: Path) -> str:
    header = results.header
    machine = header.machine
    dates = sorted(entry.date for entry in results.measured.values()) or ["never"]
    facts = "; ".join(f"{key} {value}" for part in (machine, header.versions) for key, value in part.items())
    changed = " with changes" if header.commit.get("dirty") else ""
    link = Path(os.path.relpath(path, out.parent)).as_posix()
    lines = [
        f"## {machine.get('gpu') or machine.get('cpu')}: {path.stem}",
        f"{len(dates)} cases, {dates[0]} to {dates[-1]}, commit `{header.commit.get('hash')}`{changed}. {facts}.",
        f"All figures, with quartiles, wall time, memory and errors: [{path.name}]({link}). To repeat them:",
        f"```\n{_command(results)}\n```",
        *reading(results),
        "\n".join(f"- `{name}`: {text}" for name, text in described(results).items()),
        *(_folded(table) for table in times(results)),
    ]
    return "\n\n".join(lines) + "\n"


def _command(results: Results) -> str:
    """What measures the same again."""
    settings, machine = results.header.settings, results.header.machine
    names, cases = list(settings["contenders"]), list(results.measured)
    own = [name for name in names if is_whorl(name) and not name.endswith("-graphed")]
    words = ["whorl", "bench", "--device", str(machine.get("device"))]
    if set(cases) == {case.name for case in QUICK}:
        words.append("--quick")
    elif set(cases) != {case.name for case in GRID}:
        words += ["--cases", ",".join(cases)]
    words += ["--engine", ",".join(name.partition("-")[2] or "auto" for name in own)]
    words += ["--rivals", ",".join(name for name in names if not is_whorl(name)) or "none"]
    threads = f"OMP_NUM_THREADS={machine.get('threads')} " if machine.get("device") == "cpu" else ""
    return threads + shlex.join([*words, "--seconds", str(settings.get("seconds"))])


def _folded(table: Table) -> str:
    opened = " open" if ", train:" in table.title else ""
    return f"<details{opened}>\n<summary>{table.title}</summary>\n\n{table.markdown()}\n\n</details>"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}.") from error
