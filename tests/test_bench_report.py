"""What is made of results: tables, the page, and the report, which a browser opens without a script or the network."""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from whorl.bench import report
from whorl.bench.cases import PASSES, PRECISIONS, Case
from whorl.bench.history import history
from whorl.bench.page import page
from whorl.bench.results import Header, Measured, Outcome, Results
from whorl.bench.tables import number, times
from whorl.bench.timing import Spread
from whorl.errors import InputError

ROOT = Path(__file__).parents[1]
NAMES = ("whorl", "whorl-graphed", "torch", "torch-graphed", "torch-cells")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
NARROW = 400


def outcome(milliseconds: float, **others: object) -> Outcome:
    spread = Spread(milliseconds, 0.9 * milliseconds, 1.2 * milliseconds, 9)
    wall = replace(spread, median=1.1 * milliseconds)
    values = dict(gpu=spread, wall=wall, memory=3 << 20, error=1e-4, bound=1e-3, tensor="y") | others
    return Outcome(**values)  # type: ignore[arg-type]


def made(device: str = "cuda") -> Results:
    """Results of two cells and two sizes, with everything in them that a table has to say."""
    contenders = {name: f"what {name} is" for name in NAMES}
    machine = (
        {"device": device, "gpu": "A <fast> & good GPU"} if device == "cuda" else {"device": device, "cpu": "A CPU"}
    )
    header = Header(
        machine, {"torch": "2"}, {"hash": "abc", "dirty": True}, {"contenders": contenders, "seconds": 0.05}
    )
    results = Results(header)
    for cell in ("gru", "lstm"):
        for position, shape in enumerate(["1x128x200x1024", "3x128x30x512"]):
            for precision in PRECISIONS:
                case = Case.of(f"{cell}-{shape}-{precision}")
                assert case is not None
                if precision == "tf32":
                    results.measured[case.name] = Measured(case, "2026", "no such <mode>")
                    continue
                times = {name: outcome(10.0**position * (1 + k), engine="fastest") for k, name in enumerate(NAMES)}
                times["torch-graphed"] = Outcome("cannot be captured: it <waits> | stops")
                if position:
                    times["torch"] = outcome(7.0, error=0.5)
                    times["torch-cells"] = Outcome(
                        reason="wrong numbers: y is off by 1", error=1.0, bound=0.1, tensor="y"
                    )
                results.measured[case.name] = Measured(case, "2026", None, {which: dict(times) for which in PASSES})
    return results


def test_a_table_says_times_ratios_engines_and_what_is_missing() -> None:
    tables = {table.title.partition(":")[0]: table for table in times(made())}
    assert list(tables) == [f"{cell}, {which}" for cell in ("LSTM", "GRU") for which in PASSES]
    table = tables["LSTM, train"]
    assert "GPU milliseconds a call (microseconds an example)" in table.title
    assert table.columns[1:] == ("whorl", "whorl-graphed", "torch", "torch-cells", "torch / whorl", "whorl ran")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == [f"{s} {p}" for s in ("1x128x200x1024", "3x128x30x512") for p in ("fp32", "bf16", "fp16")]
    assert rows["1x128x200x1024 bf16"] == (
        "1.00 (7.81)",
        "2.00 (15.6)",
        "3.00 (23.4)",
        "5.00 (39.1)",
        "3.00",
        "fastest",
    )
    assert rows["3x128x30x512 fp32"] == ("10.0 (78.1)", "20.0 (156)", "7.00 (54.7)*", "n/a [a]", "0.70", "fastest")
    assert table.notes[0] == "tf32: n/a, no such <mode>"
    assert table.notes[1] == "[a] wrong numbers: y is off by 1"
    assert "outside the error rule" in table.notes[2]
    assert [line.rstrip() for line in table.text().splitlines()] == table.text().splitlines()
    assert "wall milliseconds" in next(times(made("cpu"))).title


def test_a_case_without_a_row_is_named_or_its_precision() -> None:
    results = made()
    results.measured = {name: entry for name, entry in results.measured.items() if entry.case.cell == "lstm"}
    for shape, label in (("1x128x200x1024", "1x128x200x1024 bf16"), ("3x128x30x512", "bf16")):
        name = f"lstm-{shape}-bf16"
        results.measured[name] = replace(results.measured[name], reason="too large", passes={})
        assert set(next(times(results)).notes[:2]) == {f"{label}: n/a, too large", "tf32: n/a, no such <mode>"}


@pytest.mark.parametrize(
    "value, text", [(123456, "123456"), (99.96, "100."), (1.0, "1.00"), (0.05, "0.0500"), (0.00012345, "0.000123")]
)
def test_numbers_are_three_digits_without_an_exponent(value: float, text: str) -> None:
    assert number(value) == text.rstrip(".")
    assert "e" not in number(value)


class Tags(HTMLParser):
    """Every tag with its attributes, and whether each that was opened was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_file_with_every_figure_and_no_way_out() -> None:
    results = made()
    text = report.html(results)
    tags = Tags(text)
    assert tags.open == []
    names = [tag for tag, _ in tags.tags]
    assert names.count("figure") == 2 * len(PASSES) * 3  # the precisions that there are
    assert names.count("svg") == names.count("figure") + len(NAMES)
    assert not {"script", "link", "img", "iframe", "object", "image", "use", "a"} & set(names)
    outside = [
        value for _, given in tags.tags for key, value in given.items() if key in ("src", "href", "srcset", "style")
    ]
    assert outside == []
    assert "url(" not in text
    assert "@import" not in text
    for figure in ("1.00 (7.81)", "3.0", "1.10", "fastest", "wrong numbers: y is off by 1", "0.0001", "0.001"):
        assert f">{figure}<" in text
    assert "A <fast>" not in text
    assert html.escape("A <fast> & good GPU") in text


def test_results_without_a_case_make_a_report() -> None:
    assert "No case is measured yet" in report.html(Results(made().header))


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    report.save_report(path, Results(made().header))
    report.save_report(path, made())
    assert "LSTM, train" in path.read_text()
    path.write_text("<!doctype html>mine")
    with pytest.raises(InputError, match="was not written by"):
        report.save_report(path, made())
    assert path.read_text() == "<!doctype html>mine"
    assert os.listdir(tmp_path) == ["a.html"]


def test_the_page_shows_the_committed_results_and_is_what_its_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = Path("docs/results.md")
    text = out.read_text(encoding="utf-8")
    command = re.search(r"^whorl bench page (.*)$", text, re.MULTILINE)
    assert command is not None
    *files, _, notes, _, into = command[1].split(" ")
    assert Path(into) == out
    assert text == page([Path(file) for file in files], Path(notes), out)
    assert {Path(file) for file in files} == set(Path("benchmarks/results").glob("*.json"))


def test_the_history_has_what_was_published_beside_what_is_measured() -> None:
    table = history([made()])
    assert table is not None
    assert {len(row) for row in table.rows} == {len(table.columns)}
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(rows) == {f"{cell} 3x128x30x512, {which}" for cell in ("LSTM", "GRU") for which in ("train", "forward")}
    lstm, gru = rows["LSTM 3x128x30x512, train"], rows["GRU 3x128x30x512, forward"]
    assert (lstm["Theano, GTX Titan X 2017"], lstm["cuDNN 5.1, GTX Titan X 2017"]) == ("778.3", "244.9")
    assert (gru["Theano, GTX Titan X 2017"], gru["cuDNN 5.1, GTX Titan X 2017"]) == ("", "55.7")
    # 10 ms times 1 for whorl and 2 for whorl-graphed, 7 for torch, over 128 examples
    assert lstm["whorl bf16"] == "156 (78.1)"
    assert lstm["torch.nn (cuDNN) bf16"] == "n/a (54.7)"
    assert lstm["whorl tf32"] == "n/a (n/a)"
    assert lstm["whorl ran"] == "fastest"
    assert "A <fast> & good GPU" in table.title
    assert history([made("cpu")]) is None


def test_the_history_shows_the_first_results_that_have_a_case() -> None:
    newer = made()
    for entry in newer.measured.values():
        for outcomes in entry.passes.values():
            outcomes["whorl-graphed"] = outcome(0.128)
    rows = {row[0]: row for row in history([newer, made()]).rows}
    assert rows["LSTM 3x128x30x512, train"][8] == "1.00 (78.1)"
    newer.header.machine["gpu"] = "Another GPU"
    table = history([made(), newer])
    assert {row[0]: row for row in table.rows}["LSTM 3x128x30x512, train"][8] == "156 (78.1)"
    assert "Another GPU" not in table.title  # none of its figures is shown


# A page at an unchanging width is measured from outside: in a frame of another page, which runs a script of its own.
FRAME = """<!doctype html><body style="margin:0"><iframe id="f" width="WIDTH" height="900" style="border:0"></iframe>
<script>
const frame = document.getElementById("f");
frame.onload = () => {
  const page = frame.contentDocument, style = frame.contentWindow.getComputedStyle(page.body);
  for (const details of page.querySelectorAll("details")) details.open = true;
  const seen = [...page.querySelectorAll("SEEN")].filter(one => one.getBoundingClientRect().height > 0);
  document.body.insertAdjacentText("beforeend", "[[" + JSON.stringify({
    inner: page.documentElement.clientWidth, scroll: page.documentElement.scrollWidth,
    seen: seen.map(one => one.tagName.toLowerCase()), paper: style.backgroundColor, ink: style.color,
    smallest: Math.min(...[...page.querySelectorAll("figure svg text, td")].map(
      one => one.ownerSVGElement ? one.getBoundingClientRect().height / 1.2
        : parseFloat(frame.contentWindow.getComputedStyle(one).fontSize))),
  }) + "]]");
};
frame.srcdoc = SOURCE;
</script>"""


def browse(path: Path, folder: Path, *flags: str) -> tuple[str, list[str], list[str]]:
    """What the DOM is after loading a file, what the console said, and which addresses the page asked for."""
    assert BROWSER is not None
    log = folder / "net.json"
    switches = "headless disable-gpu hide-scrollbars no-first-run disable-extensions disable-sync dump-dom"
    switches += " disable-background-networking disable-component-update enable-logging=stderr virtual-time-budget=5000"
    command = [BROWSER, *(f"--{switch}" for switch in switches.split()), *flags, path.as_uri()]
    command += [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND"]  # what the browser itself asks for goes nowhere
    command += ["--no-sandbox"]  # which some containers have none of; the file is our own
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, errors="replace")
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    requests = re.findall(r'"initiator":"([^"]*)".*?"url":"([^"]*)"', log.read_text(encoding="utf-8", errors="replace"))
    own = [url for initiator, url in requests if initiator != "not an origin"]  # those of the browser itself
    return done.stdout, console, own


needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"no browser on the PATH: none of {', '.join(BROWSERS)}")


@needs_browser
def test_a_browser_opens_the_report_without_an_error_or_a_request(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    report.save_report(path, made())
    dom, console, asked = browse(path, tmp_path)
    assert (console, asked) == ([], [])
    assert dom.count("<figure>") == 18
    path.write_text(
        path.read_text().replace("<h1>", '<img src="http://127.0.0.1:9/x.png"><script>boom</script><h1>', 1)
    )
    _, console, asked = browse(path, tmp_path)
    assert len(console) == 2, "the report's own policy refuses what it does not bring"
    assert asked == []
    path.write_text(re.sub("<meta http-equiv[^>]*>", "", path.read_text()))
    _, console, asked = browse(path, tmp_path)
    assert console
    assert asked, "this test would see a request"


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_is_readable_at_400_pixels(dark: bool, tmp_path: Path) -> None:
    source = json.dumps(report.html(made())).replace("</", "<\\/")
    frame = FRAME.replace("WIDTH", str(NARROW)).replace("SEEN", "table, figure svg").replace("SOURCE", source)
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom, console, _ = browse(tmp_path / "frame.html", tmp_path, *flags)
    assert console == []
    found = json.loads(html.unescape(dom[dom.index("[[{") + 2 : dom.index("}]]") + 1]))
    assert found["inner"] == NARROW
    assert found["scroll"] <= NARROW
    assert found["seen"].count("svg") == 18
    assert found["seen"].count("table") == 1 + 2 * 2 * len(PASSES)
    assert found["smallest"] >= 9  # pixels
    brightness = [sum(map(int, re.findall(r"\d+", found[key])[:3])) for key in ("paper", "ink")]
    assert (brightness[0] < brightness[1]) == dark
