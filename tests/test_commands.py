"""The command line: what it prints, and the exit status of good input, bad input and Ctrl-C."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import whorl
from whorl.commands import doctor, main, train
from whorl.diagnosis import probe
from whorl.text.checkpoint import load
from whorl.text.program import Program

SMALL = ["--units", "8", "--embedding", "4", "--batch", "4", "--time", "8", "--steps", "3", "--sample", "20"]
SOURCE = str(Path(whorl.__file__).parents[1])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_bytes(b"the quick brown fox\n" * 50)
    return tmp_path / "text"


def whorl_process(*words: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "whorl", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_train_says_what_came_of_it(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "950 bytes in 1 file to train on, 50 at the end of each held out" in lines["text"]
    assert "LSTM, 1 x 8 units" in lines["model"]
    assert "bits per character" in lines["step 3"]
    score = load(tmp_path / "run/checkpoint-3")
    assert score.progress.step == 3
    assert "bits per character (each byte counts as one), over 49 of the 50 held-out characters" in lines["validation"]
    assert lines["checkpoint"].endswith(str(tmp_path / "run/checkpoint-3"))
    assert "lstm, 4 inputs, 8 units; 8 steps, batch 4" in out  # explain's text


def test_progress_is_live_on_a_terminal(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *SMALL]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "step 3 " in out
    assert "0:00:00 left" in out


def test_what_the_model_writes_cannot_command_the_terminal(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Program.outcome
    monkeypatch.setattr(Program, "outcome", lambda self: replace(outcome(self), sample="a\x1b]0;title\x07\rb\n[red]c"))
    main(["train", str(text), "--out", str(tmp_path / "run"), *SMALL])
    out = capsys.readouterr().out
    assert "  | a\ufffd]0;title\ufffd\ufffdb\n  | [red]c\n" in out


BAD = [
    (["missing"], "missing does not exist"),
    (["empty"], "empty is empty"),
    (["folder"], "folder has no text among its 0 files"),
    (["binary", "--tokens", "characters"], "binary is not text (a zero byte at 0)"),
    (["text", "--tokens", "words"], "argument --tokens: invalid choice: 'words'"),
    (["text", "--units", "0"], "units is 0"),
    (["text", "--units", "many"], "argument --units: invalid int value: 'many'"),
    (["text", "--batch", "900"], "make --batch"),
    (["text", "--steps", "-1"], "steps is -1"),
    (["text", "--minutes", "nan"], "minutes is nan"),
    (["text", "--sample", "-1"], "sample is -1"),
    (["text", "--device", "toaster"], "device is 'toaster'"),
    (["text", "--device", "cuda:99"], "device is 'cuda:99'"),
    (["text", *SMALL, "--out", "text/run"], "cannot make the run folder text/run: Not a directory"),
    (["text", *SMALL, "--out", "full"], "full is not empty"),
    (["text", "--unit", "8"], "unrecognized arguments: --unit 8"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_status_2(
    words: list[str],
    message: str,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(text.parent)
    Path("empty").touch()
    Path("folder").mkdir()
    Path("full").mkdir()
    Path("full/mine").write_text("keep")
    Path("binary").write_bytes(b"\0\1")
    before = sorted(Path().rglob("*"))
    try:
        status = main(["train", *words])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert status == 2
    assert err.count("\n") == 1
    assert err.startswith("whorl")
    assert message in err
    assert out == ""
    assert sorted(Path().rglob("*")) == before
    assert Path("full/mine").read_text() == "keep"


@pytest.mark.parametrize(("words", "message"), [([], "required: COMMAND"), (["dance"], "invalid choice: 'dance'")])
def test_an_unknown_command_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


def test_minutes_alone_leave_the_steps_open() -> None:
    arguments = dict.fromkeys(("path", "steps", "out")) | {"minutes": 2.0}
    for key, value in (("tokens", "bytes"), ("units", 8), ("layers", 1), ("embedding", 4), ("batch", 4), ("time", 8)):
        arguments[key] = value
    arguments |= {"learning_rate": 0.1, "seed": 0, "device": "cpu", "precision": "fp32", "sample": 0}
    assert train._options(train.argparse.Namespace(**arguments)).recipe.steps is None
    assert train._options(train.argparse.Namespace(**arguments | {"minutes": None})).recipe.steps == train.RECIPE.steps


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to the whole console")
def test_ctrl_c_saves_and_says_so(text: Path, tmp_path: Path) -> None:
    process = whorl_process("train", str(text), "--out", str(tmp_path / "run"), *SMALL[:-4], "--minutes", "5")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("kernel"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    (folder,) = (tmp_path / "run").iterdir()
    checkpoint = load(folder)
    assert 0 < checkpoint.progress.step
    assert f"stopped after {checkpoint.progress.step:,} steps; the model is saved in {folder}" in out


def test_a_stream_of_few_characters_is_no_error(text: Path, tmp_path: Path) -> None:
    text.write_text("\u03b1\u03b2\u03b3" * 999)
    words = ["train", str(text), "--tokens", "characters", "--out", str(tmp_path / "run"), *SMALL]
    process = whorl_process(*words, PYTHONIOENCODING="ascii")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "\n  | ???" in out


def test_the_module_is_the_command() -> None:
    process = whorl_process("--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"whorl {whorl.__version__}\n", "")


@pytest.mark.parametrize(
    ("change", "status", "line"),
    [
        ({}, 0, "ok   Python        3.11.7"),
        ({"python": (3, 9, 1)}, 1, "fix  Python        3.9.1: install Python 3.10 or newer"),
        ({"compiler": None, "platform": "linux"}, 0, "fix  C++ compiler  none found"),
    ],
)
def test_doctor_prints_a_line_for_each_finding(
    change: dict[str, object],
    status: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = replace(probe(), **{"python": (3, 11, 7)} | change)
    monkeypatch.setattr(doctor, "probe", lambda: machine)
    assert main(["doctor"]) == status
    out = capsys.readouterr().out
    assert [row for row in out.splitlines() if row.startswith(line)]
    assert len(out.splitlines()) == len(doctor.diagnose(machine))
