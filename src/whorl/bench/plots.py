"""Plots as inline SVG, drawn with the page's own colours: one row for each size, one mark for each contender."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from whorl.bench.tables import number

WIDTH, LABELS, ROW, TOP, BOTTOM, MARGIN = 400, 118, 18, 8, 24, 12
APART = 2.2  # between the marks of a row, so that equal times stay apart
_MARKED = 40  # a line with more points has no marks on them
KINDS = 8  # as many contenders have colours and shapes of their own


@dataclass(frozen=True)
class Point:
    """One mark: which row, which contender, and milliseconds: the median between two quartiles."""

    row: str
    name: str
    median: float
    low: float
    high: float


def element(tag: str, *inside: "Element | str", **attributes: str | float) -> Element:
    """An element with what stands in it; `class_` for class, `_` for `-` in a name."""
    made = Element(tag, {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items()})
    for part in inside:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + part
        else:
            made.text = (made.text or "") + part
    return made


def dot_plot(title: str, rows: Sequence[str], names: Sequence[str], points: Sequence[Point]) -> Element:
    """Milliseconds on a logarithmic axis."""
    height = TOP + ROW * len(rows) + BOTTOM
    low, high = min(point.low for point in points), max(point.high for point in points)
    first, last = math.floor(math.log10(low)), max(math.ceil(math.log10(high)), math.floor(math.log10(low)) + 1)
    place = _axis(first, last)
    drawn = [element("title", title)]
    for decade in range(first, last + 1):
        for digit in (1, 2, 5) if last - first <= 2 else (1,):
            value = digit * 10.0**decade
            if decade < last or digit == 1:
                at = f"{place(value):.1f}"
                drawn.append(element("line", x1=at, x2=at, y1=TOP, y2=height - BOTTOM, class_="grid"))
                drawn.append(element("text", f"{value:g}", x=at, y=height - 8, class_="tick"))
    for index, row in enumerate(rows):
        y = TOP + ROW * (index + 0.5)
        drawn.append(element("line", x1=LABELS, x2=WIDTH - MARGIN, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="row"))
        drawn.append(element("text", row, x=LABELS - 6, y=f"{y + 4:.1f}", class_="label"))
    for point in points:
        kind = names.index(point.name) % KINDS
        y = TOP + ROW * (rows.index(point.row) + 0.5) + APART * (names.index(point.name) - (len(names) - 1) / 2)
        x = place(point.median)
        tip = element("title", f"{point.name}, {point.row}: {number(point.median)} ms")
        spread = element(
            "line", x1=f"{place(point.low):.1f}", x2=f"{place(point.high):.1f}", y1=f"{y:.1f}", y2=f"{y:.1f}"
        )
        drawn.append(element("g", tip, spread, marker(kind, x, y), class_=f"kind{kind}"))
    return element(
        "svg", *drawn, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title, xmlns="http://www.w3.org/2000/svg"
    )


def line_plot(
    title: str, x: str, y: str, lines: Mapping[str, Sequence[tuple[float, float]]], logarithmic: bool
) -> Element:
    """Lines through points, each in the colour and with the mark of its place in `lines`."""
    width, height, left, right, bottom, top = WIDTH, 260, 46, WIDTH - 2 * MARGIN, 36, 20
    points = [point for line in lines.values() for point in line]
    across = _Axis.of([point[0] for point in points], logarithmic, left, right)
    up = _Axis.of([point[1] for point in points], logarithmic, height - bottom, top)
    drawn = [element("title", title)]
    for value in across.ticks():
        at = across.place(value)
        drawn.append(element("line", x1=at, x2=at, y1=top, y2=height - bottom, class_="grid"))
        drawn.append(element("text", f"{value:g}", x=at, y=height - bottom + 14, class_="tick"))
    for value in up.ticks():
        at = up.place(value)
        drawn.append(element("line", x1=left, x2=right, y1=at, y2=at, class_="grid"))
        drawn.append(element("text", f"{value:g}", x=left - 4, y=at + 4, class_="label"))
    drawn.append(element("text", y, x=4, y=12, class_="name"))
    drawn.append(element("text", x, x=width - MARGIN, y=height - 6, class_="label"))
    for index, (name, line) in enumerate(lines.items()):
        kind = index % KINDS
        places = [(across.place(a), up.place(b)) for a, b in line]
        inside = [element("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in places), class_="line")]
        if len(line) <= _MARKED:
            for (a, b), place in zip(line, places, strict=True):
                tip = element("title", f"{name}, {x} {a:g}: {number(b)} {y}")
                inside.append(element("g", tip, marker(kind, *place)))
        drawn.append(element("g", *inside, class_=f"kind{kind}"))
    return element(
        "svg", *drawn, viewBox=f"0 0 {width} {height}", role="img", aria_label=title, xmlns="http://www.w3.org/2000/svg"
    )


@dataclass(frozen=True)
class _Axis:
    """From values to places in the drawing, with the values that get a tick."""

    first: float
    last: float
    logarithmic: bool
    start: float
    end: float
    step: float = 1.0

    @staticmethod
    def of(values: Sequence[float], logarithmic: bool, start: float, end: float) -> "_Axis":
        if logarithmic:
            least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
            return _Axis(least, max(most, least + 1), True, start, end)
        low, high = min(0.0, *values), max(values)
        rough = ((high - low) or 1.0) / 5
        decade = 10.0 ** math.floor(math.log10(rough))
        step = next(decade * digit for digit in (1, 2, 5, 10) if decade * digit >= rough)
        first = math.floor(low / step) * step
        return _Axis(first, max(math.ceil(high / step) * step, first + step), False, start, end, step)

    def place(self, value: float) -> float:
        along = (math.log10(value) if self.logarithmic else value) - self.first
        return round(self.start + (self.end - self.start) * along / (self.last - self.first), 1)

    def ticks(self) -> list[float]:
        count = round((self.last - self.first) / self.step)
        marks = [self.first + index * self.step for index in range(count + 1)]
        return [10.0**mark for mark in marks] if self.logarithmic else marks


def marker(kind: int, x: float, y: float) -> Element:
    """The shape of a contender: filled for the first four, hollow for the next four."""
    r = 3.6
    shapes = [
        [(x + r * math.cos(math.pi * k / 8), y + r * math.sin(math.pi * k / 8)) for k in range(16)],
        [(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)],
        [(x, y - 1.3 * r), (x + 1.2 * r, y + 0.9 * r), (x - 1.2 * r, y + 0.9 * r)],
        [(x, y - 1.3 * r), (x + 1.3 * r, y), (x, y + 1.3 * r), (x - 1.3 * r, y)],
    ]
    corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in shapes[kind % 4])
    return element("polygon", points=corners, class_="hollow" if kind >= 4 else "solid")


def _axis(first: int, last: int) -> Callable[[float], float]:
    scale = (WIDTH - MARGIN - LABELS - 12) / (last - first)
    return lambda value: LABELS + 8 + scale * (math.log10(value) - first)
