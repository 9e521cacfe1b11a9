"""The report: one HTML file with everything in it, tables and plots; it runs no script and loads nothing."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from whorl.bench.cases import CELLS, PASSES, PRECISIONS
from whorl.bench.plots import KINDS, Point, dot_plot, element, marker
from whorl.bench.results import Measured, Results, refuse_others, write
from whorl.bench.tables import Table, clock, described, number, reading, times

MARK = "<!doctype html>\n<!-- written by `whorl bench` -->\n"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LIGHT = ("#2563eb", "#c2410c", "#047857", "#7c3aed", "#be185d", "#0e7490", "#854d0e", "#4d7c0f")
_DARK = ("#7aa7ff", "#fb923c", "#34d399", "#b69cff", "#f472b6", "#22d3ee", "#facc15", "#a3e635")
_STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif; }
body { color: var(--ink); background: var(--paper); }
h1, h2, h3 { line-height: 1.2; margin: 2rem 0 .5rem; }
h1 { margin-top: .5rem; }
p, li, td { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.wide th, .wide td { white-space: nowrap; }
.facts td { text-align: left; }
.note { color: var(--faint); font-size: .8rem; margin: .3rem 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 1rem 0 0; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--ink); }
.label { text-anchor: end; }
.tick { text-anchor: middle; fill: var(--faint); }
.grid { stroke: var(--line); }
.row { stroke: var(--line); stroke-dasharray: 1 3; }
.legend { list-style: none; padding: 0; }
.line { fill: none; }
.name { text-anchor: start; fill: var(--faint); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; }
.legend svg { width: 16px; display: inline; vertical-align: -2px; }
details { margin: 1rem 0; }
summary { cursor: pointer; }
"""


def save_report(path: Path, results: Results) -> None:
    """Write the report, over one of `whorl bench` at most.

    Raises:
        InputError: another file is there, or the disk refuses.
    """
    refuse_others(path, MARK)
    write(path, html(results))


def html(results: Results) -> str:
    """The report as the text of one HTML file."""
    machine = results.header.machine
    title = f"whorl bench: {machine.get('gpu') or machine.get('cpu')}"
    body = element("body", element("h1", title), *_preface(results))
    tables = iter(times(results))
    for cell in CELLS:
        measured = results.of(cell)
        if measured:
            body.append(element("h2", cell.upper()))
            for which in PASSES:
                body.extend(_section(results, measured, which, next(tables)))
    if not results.measured:
        body.append(element("p", "No case is measured yet."))
    return document(title, body)


def document(title: str, body: Element) -> str:
    """A page with the style of all reports, whose policy refuses scripts and everything from elsewhere."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", _style()),
    )
    return MARK + tostring(element("html", head, body, lang="en"), encoding="unicode", method="html") + "\n"


def _style() -> str:
    """The style sheet; the colours of contenders are the same in the legend and the plots."""

    def colours(ink: str, paper: str, faint: str, line: str, kinds: Sequence[str]) -> str:
        named = {"ink": ink, "paper": paper, "faint": faint, "line": line}
        named |= {f"kind{kind}": value for kind, value in enumerate(kinds)}
        return ":root { " + " ".join(f"--{name}: {value};" for name, value in named.items()) + " }"

    light = colours("#1a1a1a", "#fff", "#6b7280", "#d4d4d8", _LIGHT)
    dark = colours("#e5e5e5", "#161616", "#9ca3af", "#3f3f46", _DARK)
    rules = [":root { color-scheme: light dark; }", light, f"@media (prefers-color-scheme: dark) {{ {dark} }}"]
    for kind in range(KINDS):
        rules.append(f".kind{kind} {{ stroke: var(--kind{kind}); stroke-width: 1.5; }}")
        rules.append(f".kind{kind} .solid {{ fill: var(--kind{kind}); }} .kind{kind} .hollow {{ fill: var(--paper); }}")
    return "\n".join([*rules, _STYLE])


def _preface(results: Results) -> Iterator[Element]:
    header = results.header
    dates = sorted(entry.date for entry in results.measured.values())
    changed = ", with changes that are in no commit" if header.commit.get("dirty") else ""
    facts = {
        **header.machine,
        **header.versions,
        "commit": f"{header.commit.get('hash')}{changed}",
        "measured": f"{dates[0]} to {dates[-1]}" if dates else "",
        "effort": f"{header.settings.get('turns')} turns, {header.settings.get('seconds')} s of calls each in all",
    }
    rows = (element("tr", element("th", key, scope="row"), element("td", str(value))) for key, value in facts.items())
    yield element("table", *rows, class_="facts")
    for text in reading(results):
        yield element("p", text)
    legend = enumerate(described(results).items())
    yield element(
        "ul", *(element("li", swatch(kind), f" {name}: {text}") for kind, (name, text) in legend), class_="legend"
    )


def swatch(index: int) -> Element:
    """The mark of a line or contender, as its plot has it."""
    kind = index % KINDS
    return element(
        "svg", element("g", marker(kind, 8, 8), class_=f"kind{kind}"), viewBox="0 0 16 16", aria_hidden="true"
    )


def _section(results: Results, measured: Sequence[Measured], which: str, table: Table) -> Iterator[Element]:
    names = list(results.header.settings["contenders"])
    yield element("h3", f"{measured[0].case.cell.upper()}, {which}")
    plots = [_plot(measured, which, precision, names, clock(results)) for precision in PRECISIONS]
    yield element("div", *(plot for plot in plots if plot is not None), class_="plots")
    yield element("p", table.title + ".")
    yield table_element(table.columns, table.rows)
    for note in table.notes:
        yield element("p", note, class_="note")
    inside = table_element(*_all_figures(measured, which))
    yield element("details", element("summary", "All figures of this pass"), inside)


def _plot(measured: Sequence[Measured], which: str, precision: str, names: list[str], time: str) -> Element | None:
    points = [
        Point(entry.case.shape, name, outcome.time.median, outcome.time.low, outcome.time.high)
        for entry in measured
        if entry.case.precision == precision
        for name, outcome in entry.passes.get(which, {}).items()
        if outcome.time is not None
    ]
    if not points:
        return None
    rows = list(dict.fromkeys(point.row for point in points))
    title = f"{measured[0].case.cell.upper()}, {which}, {precision}: {time} milliseconds a call"
    return element("figure", element("figcaption", title), dot_plot(title, rows, names, points))


def table_element(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Element:
    """A table that scrolls sideways by itself where it is wider than the page."""
    head = element("thead", element("tr", *(element("th", column, scope="col") for column in columns)))
    body = element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows))
    return element("div", element("table", head, body), class_="wide", tabindex="0")


def _all_figures(measured: Sequence[Measured], which: str) -> tuple[list[str], list[list[str]]]:
    columns = ["case", "contender", "engine", "GPU ms", "quartiles", "wall ms", "quartiles", "calls", "us an example"]
    columns += ["peak MiB", "error", "allowed", "of", "not available because"]
    rows = []
    for entry in measured:
        if entry.reason is not None:
            rows.append([entry.case.name, *[""] * (len(columns) - 2), entry.reason])
        for name, outcome in entry.passes.get(which, {}).items():
            row = [entry.case.name, name, outcome.engine or ""]
            for spread in (outcome.gpu, outcome.wall):
                row += [number(spread.median), f"{number(spread.low)} to {number(spread.high)}"] if spread else ["", ""]
            time = outcome.time
            row += [str(time.calls), number(1e3 * time.median / entry.case.batch)] if time else ["", ""]
            row.append("" if outcome.memory is None else f"{outcome.memory / 2**20:.1f}")
            row += ["" if value is None else f"{value:.2g}" for value in (outcome.error, outcome.bound)]
            rows.append([*row, outcome.tensor or "", outcome.reason or ""])
    return columns, rows
