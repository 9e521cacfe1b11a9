"""The suite `seeds`: figures as files, the two programs over the batch size, and the page with everything on it."""

import html
import json
import os
import re
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import whorl
from test_bench_report import FRAME, NARROW, Tags, browse, needs_browser
from whorl.bench import collection, seeds
from whorl.bench.crossover import PASSES, Contender, Point, contenders, measure
from whorl.bench.figures import Figures, Plot
from whorl.bench.suite import TITLE, crossovers, figures_of
from whorl.bench.tables import Table
from whorl.bench.timing import Effort, Spread
from whorl.commands import main
from whorl.errors import InputError

CPU = torch.device("cpu")
QUICK = Effort(1, 0.001)
ROOT = Path(__file__).parents[1]


def made(program: str = "one", date: str = "2026-11-21T00:00:00Z", lines: int = 3) -> Figures:
    """Figures with everything in them that a page has to show."""
    plots = (
        Plot(
            "Times <of> calls",
            "batch",
            "ms & more",
            {f"line {k}": tuple((2.0**n, (k + 1) * 0.013 * (n + 1)) for n in range(13)) for k in range(lines)},
            logarithmic=True,
        ),
        Plot("Reward", "steps", "reward", {"whorl": tuple((1e4 * n, n - 3.0) for n in range(100))}),
    )
    table = Table(
        "What <it> takes", ("batch", *(f"a long column {k}" for k in range(9))), ((*"0123456789",),) * 4, ("a note",)
    )
    machine = {"device": "cuda", "gpu": "A <fast> GPU", "driver": "1.2"}
    commit = {"hash": 40 * "a", "dirty": False}
    return Figures(
        program, f"Program {program}", ("How to <read> it.",), "whorl bench --suite seeds", date, machine,
        {"torch": "2"}, commit, (table, table), plots, {"said": "several\nlines"}, {"speed": 1.5},
    )  # fmt: skip


def test_figures_come_back_from_their_file(tmp_path: Path) -> None:
    made().save(tmp_path / "one.json")
    assert Figures.load(tmp_path / "one.json") == made()
    assert made().where() == "A <fast> GPU, driver 1.2; torch 2; 2026-11-21T00:00:00Z; commit aaaaaaaaaaaa"


@pytest.mark.parametrize(
    "words, command",
    [
        ("/home/me/whorl/examples/imdb.py data --figures /tmp/a.json --bf16", "python examples/imdb.py data --bf16"),
        ("imdb.py /home/me/data/imdb.npz --length 200", "python imdb.py data/imdb.npz --length 200"),
        ("/usr/lib/whorl/__main__.py bench --out /tmp/a --suite seeds", "whorl bench --suite seeds"),
        ("/usr/bin/whorl bench --batches '1, 2'", "whorl bench --batches '1, 2'"),
    ],
)
def test_the_command_is_told_without_paths_of_the_machine(
    words: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", shlex.split(words))
    assert Figures.now(CPU, "a", "A").command == command


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data.update(version=2), "holds no figures of version 1"),
        (lambda data: data.update(format="whorl bench"), "holds no figures of version 1"),
        (lambda data: data.pop("tables"), "can be read"),
        (lambda data: data.update(more=1), "can be read"),
        (lambda data: data["tables"][0]["rows"].append(["1"]), "1 cells under 10 columns"),
        (lambda data: data["plots"][0].update(lines={"a": [[1, "x"]]}), "can be read"),
    ],
)
def test_a_file_that_holds_no_figures_is_refused(change: object, message: str, tmp_path: Path) -> None:
    made().save(tmp_path / "one.json")
    data = json.loads((tmp_path / "one.json").read_text())
    change(data)  # type: ignore[operator]
    (tmp_path / "one.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=message):
        Figures.load(tmp_path / "one.json")


def test_figures_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no figures: run a program"):
        collection.gather(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        Figures.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="it is no JSON"):
        collection.gather(tmp_path)


def test_figures_of_one_program_stand_together_newest_first(tmp_path: Path) -> None:
    for number, (program, day) in enumerate([("two", "1"), ("one", "1"), ("two", "2")]):
        made(program, day).save(tmp_path / f"{number}.json")
    found = collection.gather(tmp_path)
    assert [(figures.program, figures.date) for figures in found] == [("one", "1"), ("two", "2"), ("two", "1")]
    assert collection.html("All", found).count("<h2 ") == 2
    assert collection.html("All", found).count("<h3>") == 3


# --- the programs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", seeds.PROGRAMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_programs_are_measured_on_a_cpu(name: str, batch: int) -> None:
    program, chosen = seeds.PROGRAMS[name], contenders(["cpu"], [])
    points = {point.contender: point for point in measure(program, batch, chosen, QUICK, CPU)}
    absent = "torch.nn, CPU" if program.activation is not None else "loop, CPU"
    for one, point in points.items():
        assert (point.batch, set(point.times)) == (batch, set() if one == absent else set(PASSES))
        assert (point.reason is None) == (one != absent)
    assert "lstm" in str(points["whorl, CPU"].explanation)
    assert points["whorl, CPU"].engines["train"]


class Swapped(seeds.Loop):
    """The candidate and the output gate in each other's place."""

    def forward(self, x, hx=None):
        with torch.no_grad():
            for weight in self.parameters():
                i, f, g, o = weight.clone().chunk(4)
                weight.copy_(torch.cat([i, f, o, g]))
        return super().forward(x, hx)


class Straight(torch.autograd.Function):
    """LeakyReLU whose gradient is 1 everywhere."""

    @staticmethod
    def forward(ctx, x):
        return torch.nn.functional.leaky_relu(x, 0.05)

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    "fault", [Swapped, lambda inputs, units, activation: seeds.Loop(inputs, units, Straight.apply)]
)
def test_wrong_numbers_are_not_timed(fault: seeds.Recurrent) -> None:
    (point,) = measure(seeds.AUTOENCODER, 2, [Contender("wrong", "", fault, "cpu")], QUICK, CPU)
    assert point.times == {}
    assert "wrong numbers" in str(point.reason)


def test_the_loop_is_the_layer_that_it_stands_for() -> None:
    for activation in (None, torch.nn.LeakyReLU(0.05)):
        loop = seeds.Loop(5, 7, activation).double()
        layer = whorl.LSTM(5, 7, batch_first=True, activation=activation, engine="reference", dtype=torch.float64)
        layer.load_state_dict(loop.state_dict())
        x = torch.randn(3, 11, 5, dtype=torch.float64)
        torch.testing.assert_close(loop(x)[0], layer(x)[0], rtol=1e-12, atol=1e-12)


def spread(milliseconds: float) -> Spread:
    return Spread(milliseconds, milliseconds, milliseconds, 1)


def test_the_crossover_is_where_the_gpu_stays_ahead() -> None:
    times = {
        "whorl, CPU": (1, 2, 4, 8),
        "a": (2, 1, 5, 5),
        "b": (0.5, 0.5, 0.5, 0.5),
        "c": (9, 9, 9, 9),
        "d": (3, 1, 1, 1),
    }
    points = {
        (name, 2**index): Point(name, 2**index, {which: spread(ms) for which in PASSES})
        for name, row in times.items()
        for index, ms in enumerate(row)
    }
    found = crossovers(list(times), [1, 2, 4, 8], points)
    assert found == {"a": 8, "b": 1, "c": None, "d": 2}


def test_rivals_are_measured_on_the_gpu_where_there_is_one() -> None:
    names = [contender.name for contender in contenders(["cpu", "cuda"], ["bf16", "fp32"])]
    assert names[:2] == ["whorl, CPU", "whorl, bf16"]
    assert names[2:6] == ["whorl, bf16, graph", "torch.nn, bf16", "torch.nn, bf16, graph", "loop, bf16"]
    assert len(names) == 1 + 2 * 5


def test_figures_name_times_engines_and_what_is_missing() -> None:
    program, chosen = seeds.CLASSIFIER, contenders(["cpu"], []) + contenders(["cuda"], ["bf16"])
    points = {}
    for position, contender in enumerate(chosen):
        for batch in (1, 64):
            engine = {"train": "persistent", "predict": "cudnn"} if contender.name.startswith("whorl") else {}
            said = f"lstm; 100 steps, batch {batch}; float32" if engine else None
            point = Point(contender.name, batch, {w: spread(1.0 + position) for w in PASSES}, engine, said)
            points[contender.name, batch] = (
                replace(point, times={}, reason="no") if contender.name == "loop, CPU" else point
            )
    figures = figures_of(program, chosen, points, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tables = {table.title.partition(":")[0]: table for table in figures.tables}
    assert tables["Train"].columns[1:4] == ("whorl, CPU", "torch.nn, CPU", "whorl, bf16")
    assert tables["Train"].rows[1][:3] == ("64", "1.00", "2.00")
    assert "loop, CPU: n/a, no." in figures.text
    engines = next(table for table in figures.tables if "explain" in table.title)
    assert engines.rows[0][1] == "persistent; cudnn"
    epochs = tables["612,235 windows, batch 64"].rows
    assert (epochs[0][2], epochs[5][2]) == ("3755", "9.57")
    assert figures.details["whorl.explain, whorl, CPU, batch 1, 64"] == "lstm; 100 steps, batch 1; float32"
    assert set(figures.plots[0].lines) == set(tables["Train"].columns[1:])


def test_the_command_measures_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out", tmp_path / "page.html"
    command = ["bench", "--suite", "seeds", "--programs", "autoencoder", "--batches", "2,1", "--device", "cpu"]
    assert main([*command, "--seconds", "0.001", "--out", str(out)]) == 0
    assert sorted(os.listdir(out)) == ["autoencoder.json", "report.html"]
    assert "Train: milliseconds a batch" in capsys.readouterr().out
    assert main(["bench", "--suite", "seeds", "--report", "--results", str(out), "--out", str(page)]) == 0
    assert page.read_text() == (out / "report.html").read_text()
    assert main(["bench", "--suite", "seeds", "--report", "--results", str(out), "--out", str(tmp_path / "a.md")]) == 0
    text = (tmp_path / "a.md").read_text()
    assert text.count("\n## ") == text.count("\n### ") == 1
    assert "**Train: milliseconds a batch**\n\n| batch | whorl, CPU | loop, CPU |\n" in text


@pytest.mark.parametrize(
    "words, message",
    [
        ("--suite seeds --quick", "--quick with --suite seeds has no effect"),
        ("--suite seeds --report --batches 1", "--batches with --report has no effect"),
        ("--suite seeds --results here", "--results without --report has no effect"),
        ("--report", "--report without --suite seeds has no effect"),
        ("--suite seeds --programs none", "program is 'none': write one of autoencoder"),
        ("--suite seeds --precisions fp8", "precision is 'fp8'"),
        ("--suite seeds --batches 0,1", "write numbers from 1 on"),
        ("--suite seeds --report --results none", "none has no figures"),
        ("--suite seeds show a.json", "--suite before show has no effect"),
    ],
)
def test_options_without_effect_or_sense_are_refused(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir(tmp_path) == []


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_one_file_with_every_table_and_plot_and_no_way_out() -> None:
    text = collection.html("All", [made("one"), made("two")])
    tags = Tags(text)
    names = [tag for tag, _ in tags.tags]
    assert tags.open == []
    assert names.count("figure") == 4
    assert names.count("table") == 2 * (2 + 1)
    assert names.count("pre") == 2
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(names)
    assert [key for _, given in tags.tags for key in given if key in ("src", "srcset", "style")] == []
    there = [f"#{given['id']}" for tag, given in tags.tags if tag == "h2"]
    assert [given["href"] for _, given in tags.tags if "href" in given] == there == ["#one", "#two"]
    assert "url(" not in text
    for shown in ("A <fast> GPU", "driver 1.2", "commit aaaaaaaaaaaa", "2026-11-21T00:00:00Z", "How to <read> it."):
        assert html.escape(shown, quote=False) in text
    assert "<fast>" not in text


@needs_browser
def test_a_browser_opens_the_page_of_the_suite_without_an_error_or_a_request(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    collection.save_collection(path, "All", [made("one"), made("two")])
    dom, console, asked = browse(path, tmp_path)
    assert (console, asked, dom.count("<figure>"), dom.count("<h2 ")) == ([], [], 4, 2)


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_the_suite_is_readable_at_400_pixels(dark: bool, tmp_path: Path) -> None:
    source = json.dumps(collection.html("All", [made("one"), made("two", lines=8)])).replace("</", "<\\/")
    frame = FRAME.replace("WIDTH", str(NARROW)).replace("SEEN", "table, figure > svg").replace("SOURCE", source)
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom, console, _ = browse(tmp_path / "frame.html", tmp_path, *flags)
    found = json.loads(html.unescape(dom[dom.index("[[{") + 2 : dom.index("}]]") + 1]))
    assert console == []
    assert found["inner"] == NARROW
    assert found["scroll"] <= NARROW
    assert (found["seen"].count("svg"), found["seen"].count("table")) == (4, 6)
    assert found["smallest"] >= 9
    brightness = [sum(map(int, re.findall(r"\d+", found[key])[:3])) for key in ("paper", "ink")]
    assert (brightness[0] < brightness[1]) == dark


# --- the committed figures --------------------------------------------------------------------------------------------


def test_the_page_of_programs_is_what_the_committed_figures_say() -> None:
    collected = collection.gather(ROOT / collection.SEEDS)
    written = (ROOT / "docs" / "programs_results.md").read_text(encoding="utf-8")
    anew = "write it anew: whorl bench --suite seeds --report --out docs/programs_results.md"
    assert written == collection.markdown(TITLE, collected), anew


def test_the_figures_of_the_grid_and_of_the_treebank_are_those_of_their_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = runpy.run_path(str(ROOT / "benchmarks" / "seeds_figures.py"))
    results, there = ROOT / "benchmarks" / "results", Figures.load(ROOT / collection.SEEDS / "penn_treebank.json")
    given = ["--commit", there.commit["hash"], "--date", there.date, "--driver", there.machine["driver"]]
    grid = f"grid {results / 'h200-persistent.json'} {results / 'h200.json'}"
    for words in (grid, f"ptb {' '.join(map(str, (results / 'ptb').glob('*.jsonl')))}"):
        monkeypatch.setattr(sys, "argv", ["seeds_figures.py", *words.split(), *given, "--out", str(tmp_path)])
        tool["main"]()
    for name in ("grid.json", "penn_treebank.json"):
        assert (tmp_path / name).read_text() == (ROOT / collection.SEEDS / name).read_text(), (
            "benchmarks/seeds_figures.py"
        )


@needs_browser
def test_a_browser_shows_every_committed_table_and_plot_and_asks_for_nothing(tmp_path: Path) -> None:
    collected = collection.gather(ROOT / collection.SEEDS)
    collection.save_collection(tmp_path / "page.html", TITLE, collected)
    dom, console, asked = browse(tmp_path / "page.html", tmp_path)
    assert (console, asked) == ([], [])
    assert dom.count("<figure>") == sum(len(figures.plots) for figures in collected)
    assert dom.count("<table") == sum(1 + len(figures.tables) for figures in collected)
    programs = {figures.program for figures in collected}
    assert programs >= {"autoencoder", "classifier", "forecast", "grid", "imdb", "penn_treebank", "recurrent_ppo"}
    for figures in collected:
        assert html.escape(figures.where(), quote=False) in dom
        assert all(html.escape(table.title, quote=False) in dom for table in figures.tables)
