"""Results files: written whole, gone on with, merged with their like; and the command that writes them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import whorl
from whorl.bench import measurement, program, results
from whorl.bench.cases import Case
from whorl.bench.machine import commit, describe, find_device, missing_mode
from whorl.bench.program import Options, Program
from whorl.bench.results import Header, Results, merge
from whorl.commands import main
from whorl.errors import InputError

TINY = "lstm-1x2x3x4-fp32,gru-2x1x2x3-fp32,gru-1x1x1x1-tf32"
LEAST = ["--seconds", "0.000001", "--rivals", "torch"]
SOURCE = str(Path(whorl.__file__).parents[1])


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def bench(*words: str) -> int:
    return main(["bench", *words])


def measured(out: str = "a.json", cases: str = TINY) -> Path:
    assert bench("--cases", cases, *LEAST, "--out", out) == 0
    return Path(out)


def test_a_file_is_read_as_it_was_written() -> None:
    path = measured()
    read = Results.load(path)
    assert list(read.measured) == ["gru-1x1x1x1-tf32", "gru-2x1x2x3-fp32", "lstm-1x2x3x4-fp32"]
    assert read.to_json() == path.read_text()
    data = json.loads(path.read_text())
    assert data["machine"] == describe(find_device("cpu"))
    assert data["commit"] == commit()
    assert data["cases"][0]["reason"] == missing_mode(
        replace(read.measured["gru-1x1x1x1-tf32"].case), find_device("cpu")
    )
    outcome = data["cases"][1]["passes"]["train"]["torch"]
    assert outcome["wall"]["low"] <= outcome["wall"]["median"] <= outcome["wall"]["high"]
    assert 0 <= outcome["error"] <= outcome["bound"]


def test_the_same_command_goes_on_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    path = measured()
    text = path.read_text()
    capsys.readouterr()
    measured()
    assert path.read_text() == text, "everything was measured already"
    out = capsys.readouterr().out
    assert "cases       3, of which 3 are measured" in out
    assert "GRU, train: wall milliseconds" in out
    measured(cases=f"{TINY},lstm-1x1x1x2-fp32")
    assert path.read_text().startswith(text[: text.rindex("}}")])
    assert list(Results.load(path).measured)[-1] == "lstm-1x1x1x2-fp32"


def test_results_come_as_they_are_measured_and_an_interruption_loses_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []
    plain = program.measure

    def interrupted(case: Case, *rest: object) -> object:
        calls.append(case.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(case, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(program, "measure", interrupted)
    words = ["--cases", TINY, *LEAST, "--out", "a.json"]
    assert bench(*words) == 130
    out, err = capsys.readouterr()
    assert "the same command with --out a.json goes on after the 1 cases measured" in out
    assert err == "whorl bench: interrupted\n"
    assert len(Results.load(Path("a.json")).measured) == 1
    assert bench(*words) == 0
    assert calls == ["gru-1x1x1x1-tf32", "gru-2x1x2x3-fp32", "gru-2x1x2x3-fp32", "lstm-1x2x3x4-fp32"]
    assert sorted(os.listdir()) == ["a.html", "a.json"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_killed_process_leaves_whole_files() -> None:
    cases = ",".join(f"lstm-1x1x1x{units}-fp32" for units in range(1, 300))
    words = ["bench", "--cases", cases, *LEAST, "--out", "a.json"]
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "whorl", *words], env=environment, stdout=subprocess.DEVNULL)
    path, seen = Path("a.json"), 0
    while seen < 5:
        assert process.poll() is None
        time.sleep(0.01)
        seen = len(Results.load(path).measured) if path.exists() else 0  # never half a file
    process.send_signal(signal.SIGKILL)
    process.wait()
    after = Results.load(path)
    assert len(after.measured) >= seen
    assert (
        Program(Options(cases.split(","), rivals=("torch",), seconds=1e-6, out=path)).left[0].name not in after.measured
    )


@pytest.mark.parametrize("place, name", [(results.os, "fsync"), (Path, "replace")])
def test_a_disk_that_refuses_leaves_the_file_as_it_was(
    place: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = measured()
    text = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, name, full)
    with pytest.raises(InputError, match=r"cannot write a.json: No space left on device"):
        Results.load(path).save(path)
    assert path.read_text() == text
    assert sorted(os.listdir()) == ["a.html", "a.json"]


def test_shards_merge_to_the_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for index in (1, 2):
        assert bench("--cases", TINY, *LEAST, "--shard", f"{index}/2", "--out", f"{index}.json") == 0
    assert bench("merge", "1.json", "2.json", "--out", "all.json") == 0
    merged = Results.load(Path("all.json"))
    assert set(merged.measured) == set(TINY.split(","))
    assert merged.of("gru")[0].case.name < merged.of("gru")[1].case.name
    capsys.readouterr()
    assert bench("show", "all.json") == 0
    out = capsys.readouterr().out
    assert "1x2x3x4 fp32" in out
    assert "2x1x2x3 fp32" in out
    assert Path("all.html").exists()


def test_a_new_file_is_made_under_runs_each_time() -> None:
    for _ in range(2):
        assert bench("--cases", "gru-1x1x1x1-tf32", *LEAST) == 0
    assert bench("--cases", "gru-1x1x1x1-tf32", *LEAST, "--shard", "1/2") == 0
    assert sorted(path.name for path in Path("runs").glob("*.json")) == [
        "bench-1-of-2.json",
        "bench-2.json",
        "bench.json",
    ]


def test_a_page_is_made_and_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    measured()
    Path("notes.md").write_text("## What it means\n\nNothing.\n")
    words = ["page", "a.json", "--notes", "notes.md", "--out", "docs/results.md"]
    assert bench(*words) == 0
    page = Path("docs/results.md").read_text()
    assert "whorl bench page a.json --notes notes.md --out docs/results.md" in page
    assert "[a.json](../a.json)" in page
    cases = ",".join(sorted(TINY.split(",")))
    assert f"OMP_NUM_THREADS=1 whorl bench --device cpu --cases {cases} --engine auto --rivals torch --seconds" in page
    assert page.endswith("Nothing.\n")
    assert "| 1x2x3x4 fp32 |" in page
    assert bench(*words) == 0
    assert Path("docs/results.md").read_text() == page


def test_wrong_numbers_of_whorls_are_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measurement, "_may_be_timed", lambda contender, *_: contender.rival)
    assert bench("--cases", TINY, *LEAST, "--out", "a.json") == 1
    out = capsys.readouterr().out
    assert "wrong       numbers of gru-2x1x2x3-fp32 whorl\n" in out
    assert "wrong numbers: " in out


BAD = [
    (["--cases", "lstm,4x4"], "case '4x4' is none of the 160 cases"),
    (["--quick", "--cases", "1x64x100x2048"], "none of the 24 quick cases"),
    (["--rivals", "keras"], "rival is 'keras': write one of torch, torch-graphed"),
    (["--engine", "warp"], "engine is 'warp': write one of 'auto'"),
    (["--device", "cuda:99"], "device is 'cuda:99'"),
    (["--device", "toaster"], "device is 'toaster'"),
    (["--shard", "4/3"], "shard is '4/3': write i/n with i from 1 to n"),
    (["--seconds", "0"], "seconds is 0.0"),
    (["--seconds", "nan"], "seconds is nan"),
    (["--seconds", "soon"], "argument --seconds: invalid float value: 'soon'"),
    (["--out", "table.csv"], "give a name that ends in .json"),
    (["--out", "folder.json"], "cannot read folder.json: Is a directory"),
    (["--out", "mine/a.json"], "cannot write mine/a.json: mine: File exists"),
    (["--out", "mine.json"], "mine.json holds no results of `whorl bench`"),
    (["--out", "empty.json"], "empty.json holds no results of `whorl bench`: it is no JSON"),
    (["--out", "page.json"], "page.html was not written by `whorl bench`"),
    (["--out", "good.json"], "good.json is of another measurement (machine: device is 'cuda' there and 'cpu' here)"),
    (["--quik"], "unrecognized arguments: --quik"),
    (["merge", "good.json", "other.json", "--out", "new.json"], "differ in machine: gpu is 'B' there and 'A' here"),
    (["merge", "good.json", "older.json", "--out", "new.json"], "differ in commit: hash is 'b' there and 'a' here"),
    (
        ["merge", "good.json", "good.json", "--out", "new.json"],
        "good.json has lstm-1x1x1x1-fp32, as a file before it has",
    ),
    (["merge", "good.json", "--out", "mine.json"], "mine.json is already there"),
    (["merge", "good.json", "missing.json", "--out", "new.json"], "cannot read missing.json: No such file"),
    (["merge", "good.json"], "the following arguments are required: --out"),
    (["--quick", "merge", "good.json", "--out", "new.json"], "--quick before merge has no effect"),
    (["show", "mine.json"], "mine.json holds no results"),
    (["page", "good.json", "--out", "mine"], "mine was not written by `whorl bench`"),
    (["page", "good.json", "--notes", "missing.md", "--out", "new.md"], "cannot read missing.md"),
]


def good(path: str, **parts: dict[str, object]) -> None:
    header = {
        "machine": {"device": "cuda", "gpu": "A"}, "versions": {"torch": "1"}, "commit": {"hash": "a"},
        "settings": {"contenders": {"whorl": "ours"}},
    }  # fmt: skip
    case = {"case": "lstm-1x1x1x1-fp32", "date": "now", "passes": {"train": {"whorl": {"reason": "none"}}}}
    Path(path).write_text(json.dumps({"format": "whorl bench", "version": 1, **header, "cases": [case], **parts}))


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_status_2_and_changes_nothing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good("good.json")
    good("other.json", machine={"device": "cuda", "gpu": "B"})
    good("older.json", commit={"hash": "b"})
    Path("mine").write_text("keep")
    Path("mine.json").write_text('{"keep": 1}')
    Path("empty.json").touch()
    Path("page.html").write_text("keep")
    Path("folder.json").mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    try:
        status: object = bench(*words)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("whorl")
    assert message in err
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before


def hostile() -> dict[str, object]:
    outcome: dict[str, object] = {
        "wall": {"median": 1.0, "low": 1.0, "high": 1.0, "calls": 3},
        "error": 0.1,
        "bound": 1.0,
    }
    return outcome


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"cases": 7},
        {"cases": [[]]},
        {"cases": [{"case": "lstm-1x1x1x1-fp99", "date": "x"}]},
        {"cases": [{"case": "lstm-1x1x1x1-fp32", "date": "\x1b[2J"}]},
        {"machine": {"gpu": "\x1b]0;mine\x07"}},
        {"machine": "A"},
        {"settings": {}},
        {"settings": {"contenders": ["whorl"]}},
        {"settings": {"contenders": {"whorl": 3}}},
        {"outcome": {"wall": {"median": -1, "low": 1.0, "high": 1.0, "calls": 3}}},
        {"outcome": {"wall": {"median": 1e999, "low": 1.0, "high": 1.0, "calls": 3}}},
        {"outcome": {"wall": {"median": "1", "low": 1.0, "high": 1.0, "calls": 3}}},
        {"outcome": {"wall": {"median": 1}}},
        {"outcome": {"error": float("nan")}},
        {"outcome": {"memory": True}},
        {"outcome": {"reason": 7}},
        {"outcome": {"colour": "red"}},
        {"outcome": []},
    ],
    ids=str,
)
def test_a_hostile_file_is_refused_in_one_line(change: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    if "outcome" in change:
        case = {"case": "lstm-1x1x1x1-fp32", "date": "now", "passes": {"train": {"whorl": change["outcome"]}}}
        change = {"cases": [case]}
    good("a.json", **change)  # type: ignore[arg-type]
    assert bench("show", "a.json") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.isprintable() or err[:-1].isprintable()
    assert os.listdir() == ["a.json"]


def test_a_deep_file_is_refused() -> None:
    Path("a.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="it is no JSON"):
        Results.load(Path("a.json"))


def test_the_difference_names_what_is_missing_too() -> None:
    one, other = (Header({"device": "cpu"} | more, {}, {}, {}) for more in ({}, {"gpu": "A"}))
    assert one.difference(other) == "machine: gpu is None there and 'A' here"
    assert other.difference(one) == "machine: gpu is 'A' there and None here"
    assert one.difference(one) is None
    with pytest.raises(InputError, match="cannot read"):
        merge([Path("none.json")])


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_source_and_says_whether_it_was_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *settings, *words], check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "whorl"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git("init", "-q")
    assert commit(package) == {"hash": "unknown", "dirty": False}, "a repository that does not hold it"
    git("add", "-A")
    git("commit", "-qm", "one")
    assert commit(package) == {"hash": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "results.json").write_text("{}")
    assert commit(package)["dirty"] is False, "results are no source"
    (package / "new.py").write_text("")
    assert commit(package)["dirty"] is True
