"""The report of a suite: every table and plot that its programs have measured, on one page that loads nothing."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from xml.etree.ElementTree import Element

from whorl.bench.figures import Figures, Plot
from whorl.bench.plots import element, line_plot
from whorl.bench.report import MARK, document, swatch, table_element
from whorl.bench.results import refuse_others, write
from whorl.errors import InputError

SEEDS = Path("benchmarks/results/seeds")
"""Where the figures of the suite lie in a checkout of whorl."""


def gather(folder: Path) -> list[Figures]:
    """The figures in a folder's JSON files; those of one program stand together, of GPUs first, then newest first.

    Raises:
        InputError: no such file, or one that holds no figures.
    """
    found = [Figures.load(path) for path in sorted(folder.glob("*.json"))]
    if not found:
        raise InputError(f"{folder} has no figures: run a program of the suite with --figures {folder / 'NAME.json'}.")
    newest = sorted(found, key=lambda figures: figures.date, reverse=True)
    return sorted(newest, key=lambda figures: (figures.program, figures.machine.get("device") == "cpu"))


def save_collection(path: Path, title: str, collected: Sequence[Figures]) -> None:
    """Write the page, over one of `whorl bench` at most.

    Raises:
        InputError: another file is there, or the disk refuses.
    """
    refuse_others(path, MARK)
    write(path, html(title, collected))


_MARK = "<!-- written by `whorl bench --suite seeds --report`: what is typed into it is lost -->\n"


def save_markdown(path: Path, title: str, collected: Sequence[Figures]) -> None:
    """Write the tables as a page of Markdown, over one of `whorl bench` at most.

    Raises:
        InputError: another file is there, or the disk refuses.
    """
    refuse_others(path, _MARK)
    write(path, markdown(title, collected))


def markdown(title: str, collected: Sequence[Figures]) -> str:
    """The tables of the page, without its plots."""
    parts = [f"{_MARK}# {title}"]
    for group in _programs(collected):
        parts += [f"## {group[0].title}"]
        for figures in group:
            name = figures.machine.get("gpu") or figures.machine.get("cpu")
            parts += [f"### {name}", f"{figures.where()}.", f"```\n{figures.command}\n```", *figures.text]
            parts += [f"**{table.title}**\n\n{table.markdown()}" for table in figures.tables]
    return "\n\n".join(parts) + "\n"


def html(title: str, collected: Sequence[Figures]) -> str:
    """The page as the text of one HTML file."""
    groups = _programs(collected)
    places = (element("li", element("a", group[0].title, href=f"#{group[0].program}")) for group in groups)
    body = element("body", element("h1", title), element("nav", element("ul", *places)))
    for group in groups:
        body.append(element("h2", group[0].title, id=group[0].program))
        for figures in group:
            body.extend(_section(figures))
    return document(title, body)


def _programs(collected: Sequence[Figures]) -> list[list[Figures]]:
    return [list(group) for _, group in groupby(collected, key=lambda figures: figures.program)]


def _section(figures: Figures) -> Iterator[Element]:
    yield element("h3", str(figures.machine.get("gpu") or figures.machine.get("cpu")))
    yield element("p", figures.where() + ".", class_="note")
    for text in figures.text:
        yield element("p", text)
    yield element("div", *map(_figure, figures.plots), class_="plots")
    for table in figures.tables:
        yield element("p", table.title + ".")
        yield table_element(table.columns, table.rows)
        for note in table.notes:
            yield element("p", note, class_="note")
    facts = {"command": figures.command, **figures.machine, "commit": str(figures.commit.get("hash"))}
    rows = (element("tr", element("th", key, scope="row"), element("td", str(value))) for key, value in facts.items())
    repeat = element("table", *rows, class_="facts")
    yield element("details", element("summary", "Where this was measured, and how to repeat it"), repeat)
    for summary, text in figures.details.items():
        yield element("details", element("summary", summary), element("pre", text))


def _figure(plot: Plot) -> Element:
    names = (element("li", swatch(kind), f" {name}") for kind, name in enumerate(plot.lines))
    drawing = line_plot(plot.title, plot.x, plot.y, plot.lines, plot.logarithmic)
    return element("figure", element("figcaption", plot.title), drawing, element("ul", *names, class_="legend"))
