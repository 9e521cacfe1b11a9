"""The command line: what it prints, and the exit status of good input, bad input and Ctrl-C."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch

import whorl
from whorl.__main__ import main as run_module
from whorl.commands import doctor, main, train
from whorl.diagnosis import probe
from whorl.text.checkpoint import load
from whorl.text.options import PRESETS
from whorl.text.program import METRICS, Program
from whorl.text.sampling import sample
from whorl.text.training import Trainer

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
    assert lines["metrics"].endswith(str(tmp_path / "run" / METRICS))
    assert "curve.png" in lines["curve"] or "pip install" in lines["curve"]
    assert len([line for line in out.splitlines() if line.startswith("kernel")]) == 2  # before, and with its reasons
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


@pytest.mark.usefixtures("no_compiler")
def test_words_are_told_in_perplexity(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = tmp_path / "valid"
    held_out.write_bytes(b"the quick red fox\n" * 5)
    given = ["--tokens", "words", "--valid", str(held_out), "--test", str(text), "--cell", "gru", "--tied", *SMALL]
    given += ["--option", "zoneout=0.1", "--option", "layer_norm=x", "--embedding", "8", "--out", str(tmp_path / "run")]
    assert main(["train", str(text), *given]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "250 words in 1 file to train on, 25 held out" in lines["text"]
    assert "6 words; 20.00% of the held-out ones are <unk>" in lines["vocabulary"]
    assert "GRU, 1 x 8 units" in lines["model"]
    assert "validation perplexity " in lines["step 3"]
    assert "over 24 of the 25 held-out words" in lines["validation"]
    assert "over 249 of 250 words" in lines["test"]
    kernel = next(line for line in out.splitlines() if line.startswith("kernel"))
    assert "reference, a loop over time in Python: not persistent: the tensors are on cpu" in kernel


def test_a_preset_can_be_taken_in_part(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "small", dict(kind="characters", units=12, epochs=40))
    assert main(["train", str(text), "--preset", "small", *SMALL[2:], "--out", str(tmp_path / "run")]) == 0
    assert "LSTM, 1 x 12 units" in capsys.readouterr().out
    checkpoint = load(tmp_path / "run/checkpoint-3")
    assert checkpoint.vocabulary.kind == "characters"
    assert (checkpoint.recipe.steps, checkpoint.recipe.epochs) == (3, None)


def test_a_run_is_resumed_by_its_folder(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    main(["train", str(text), "--out", run, *SMALL])
    finished = capsys.readouterr().out.splitlines()
    assert main(["train", "--resume", run, "--sample", "20"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert f"resumed     {run}/checkpoint-3, after 3 steps" in out
    assert out[out.index("sample") :] == finished[finished.index("sample") :]
    assert main(["train", str(text), "--resume", run, "--device", "cpu"]) == 0


@pytest.fixture
def trained(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    main(["train", str(text), "--out", str(tmp_path / "run"), *SMALL])
    capsys.readouterr()
    return tmp_path / "run"


def test_a_trained_model_writes(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(*words: str) -> str:
        assert main(["generate", str(trained), *words]) == 0
        return capsys.readouterr().out

    text = write("--prompt", "the", "--length", "30", "--seed", "3")
    assert text.startswith("the")
    assert write("--prompt", "the", "--length", "30", "--seed", "3") == text
    assert write("--prompt", "the", "--length", "30", "--seed", "4") != text
    assert write("--prompt", "the", "--length", "30", "--temperature", "0") == write(
        *("--prompt", "the", "--length", "30", "--top-k", "1")
    )
    assert write("--prompt", "the", "--length", "0") == "the\n"
    model = load(trained / "checkpoint-3", training=False).model()
    expected = bytes(sample(model, torch.tensor([10]), 600).tolist()).decode(errors="replace")
    assert write() == expected + "\n"
    assert main(["generate", str(trained / "checkpoint-3"), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == expected + "\n"


def test_what_generate_writes_cannot_command_the_terminal(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", str(trained), "--prompt", "a\x1b]0;title\x07\rb\tc\nd", "--length", "0"]
    main(words)
    assert capsys.readouterr().out == "a\x1b]0;title\x07\rb\tc\nd\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    main(words)
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffd\ufffdb\tc\nd\n"


BAD = [
    (["missing"], "missing does not exist"),
    (["empty"], "empty is empty"),
    (["folder"], "folder has no text among its 0 files"),
    (["binary", "--tokens", "characters"], "binary is not text (a zero byte at 0)"),
    (["latin1", "--tokens", "words"], "latin1 is not UTF-8 (at byte 3)"),
    (["huge"], "huge has 5.0 GiB, more than the 1 that fit"),
    (["/dev/null"], "/dev/null is neither a file nor a folder"),
    (["text", "--valid", "missing"], "missing does not exist"),
    (["text", "--test", "empty"], "empty is empty"),
    (["text", "--tokens", "syllables"], "argument --tokens: invalid choice: 'syllables'"),
    (["text", "--vocabulary", "5"], "vocabulary is 5, but tokens are bytes"),
    (["text", "--preset", "imaginary"], "argument --preset: invalid choice: 'imaginary'"),
    (["text", "--cell", "transformer"], "argument --cell: invalid choice: 'transformer'"),
    (["text", "--dropout", "2"], "dropout is 2.0"),
    (["text", "--tied"], "write --embedding 256"),
    (["text", "--engine", "steam"], "engine is 'steam'"),
    (["text", *SMALL, "--engine", "cudnn"], "the engine 'cudnn' cannot run"),
    (["text", "--option", "zoneout"], "argument --option: 'zoneout' is no NAME=VALUE"),
    (["text", "--option", "zoneout=lots"], "zoneout is 'lots': write a probability"),
    (["text", "--option", "magic=1"], "magic is no option of the layers here"),
    (["text", "--option", "bidirectional=true"], "a language model reads forward only"),
    (["text", "--accumulate", "5"], "64 rows do not make 5 equal parts"),
    (["text", "--units", "9999999"], "GiB to train"),
    (["text", "--schedule", "decay"], "the schedule decay needs a factor"),
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
    (["text", *SMALL, "--out", "locked"], "locked cannot be written to"),
    (["--resume", "missing"], "cannot read the run folder missing: No such file"),
    (["--resume", "text"], "cannot read the run folder text: Not a directory"),
    (["--resume", "folder"], "folder holds no checkpoint"),
    (["--resume", "full/checkpoint-1"], "full/checkpoint-1 is a checkpoint: give the run folder, full"),
    (["--resume", "full", "--units", "8"], "leave units out"),
    (["--resume", "full", "--preset", "shakespeare"], "leave preset out"),
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
    Path("full/checkpoint-1").mkdir()
    Path("full/checkpoint-1/config.json").touch()
    Path("binary").write_bytes(b"\0\1")
    Path("latin1").write_bytes(b"caf\xe9")
    Path("locked").mkdir()
    with open("huge", "wb") as file:
        file.truncate(5 << 30)
    writable = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked" and writable(path, mode))
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


def spoil_nothing(run: Path) -> None:
    """A folder as it was."""


def of_another_version(run: Path) -> None:
    config = json.loads((run / "checkpoint-3/config.json").read_text())
    (run / "checkpoint-3/config.json").write_text(json.dumps(config | {"version": 99}))


def truncated(run: Path) -> None:
    path = run / "checkpoint-3/model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def hostile(run: Path) -> None:
    path = run / "checkpoint-3/model.safetensors"
    path.write_bytes(pickle.dumps(Trap()))
    config = json.loads((run / "checkpoint-3/config.json").read_text())
    config["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (run / "checkpoint-3/config.json").write_text(json.dumps(config))


def commanding(run: Path) -> None:
    config = json.loads((run / "checkpoint-3/config.json").read_text())
    config["source"]["path"] = "\x1b]0;title\x07"
    (run / "checkpoint-3/config.json").write_text(json.dumps(config))


def incomplete(run: Path) -> None:
    (run / "checkpoint-3/training.safetensors").unlink()


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("sprung",)


SPOILT = [
    (of_another_version, [], "has version 99, and this whorl reads version 2"),
    (truncated, [], "is damaged: model.safetensors is not what was saved"),
    (hostile, [], "is damaged: "),
    (incomplete, [], "holds no checkpoint: training.safetensors is missing"),
    (spoil_nothing, ["--device", "toaster"], "device is 'toaster'"),
]
ELSEWHERE = [(commanding, [], "whorl train: \ufffd]0;title\ufffd does not exist")]
ASKED = [
    (spoil_nothing, ["--temperature", "-1"], "temperature is -1.0"),
    (spoil_nothing, ["--top-k", "0"], "top_k is 0"),
    (spoil_nothing, ["--length", "-5"], "length is -5"),
    (spoil_nothing, ["--prompt", ""], "prompt is empty"),
    (spoil_nothing, ["--seed", "many"], "argument --seed: invalid int value"),
]


@pytest.mark.parametrize(
    ("spoil", "words", "message"),
    [(spoil, [*command, *words], message) for command in (["train", "--resume"], ["generate"])
     for spoil, words, message in SPOILT + (ASKED if command == ["generate"] else ELSEWHERE)],
)  # fmt: skip
def test_a_spoilt_run_is_one_line_and_status_2(
    spoil: Callable[[Path], None],
    words: list[str],
    message: str,
    trained: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(trained)
    spoil(trained)
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    place = 2 if words[0] == "train" else 1
    try:
        status = main([*words[:place], str(trained), *words[place:]])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before
    assert not Path("sprung").exists()


@pytest.mark.parametrize("wrong", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")])
def test_too_little_memory_is_one_line(
    wrong: Exception, text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(options: object) -> None:
        raise wrong

    monkeypatch.setattr(train, "Program", refuse)
    assert main(["train", str(text)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "out of memory" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["doctor", "--tempo", "3"], "whorl doctor: unrecognized arguments: --tempo 3 (whorl doctor --help"),
        (["bench", "--batches", "1,a"], "--batches: '1,a': write whole numbers with commas between them"),
    ],
)
def test_an_unknown_command_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.skipif(os.name == "nt", reason="Windows sends Ctrl-C to the whole console")
def test_ctrl_c_saves_and_says_how_to_go_on(text: Path, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    process = whorl_process("train", str(text), "--out", run, *SMALL[:-4], "--minutes", "5")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("kernel"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    (folder,) = (path for path in Path(run).iterdir() if path.is_dir())
    checkpoint = load(folder)
    assert 0 < checkpoint.progress.step
    assert f"stopped after {checkpoint.progress.step:,} steps; the model is saved in {folder}" in out
    assert f"go on with: whorl train --resume {run}" in out


def test_sigterm_saves_as_ctrl_c_does(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer.advance

    def ended(trainer: Trainer) -> torch.Tensor:
        loss = advance(trainer)
        if trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return loss

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Trainer, "advance", ended)
    assert main(["train", str(text), "--out", str(tmp_path / "run"), *SMALL]) == 128 + signal.SIGTERM
    assert "stopped after 2 steps" in capsys.readouterr().out
    assert load(tmp_path / "run/checkpoint-2").progress.step == 2
    assert signal.getsignal(signal.SIGTERM) is before


def printed_to(output: IO[str], words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit status of a command line whose output goes there."""
    monkeypatch.setattr(sys, "argv", ["whorl", *words])
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit) as end:
        run_module()
    monkeypatch.undo()
    output.close()
    return end.value.code


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_an_output_that_takes_no_more_is_one_line(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in (["generate", str(trained), "--length", "5"], ["train", "--resume", str(trained)]):
        assert printed_to(os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"), words, monkeypatch) == 2
        assert capsys.readouterr().err == "whorl: cannot write the output: No space left on device\n"


def test_a_reader_that_leaves_early_is_no_error(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    assert printed_to(os.fdopen(writing, "w"), ["generate", str(trained), "--length", "5"], monkeypatch) == 0
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    "command, instead", [("warm", "`whorl warm` compiles for another"), ("tune", "run `whorl tune` on")]
)
def test_without_a_gpu_each_command_speaks_of_itself(
    command: str, instead: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([command, "lstm", "--units", "8"]) == 2
    assert f"sees no NVIDIA GPU here: {instead}" in capsys.readouterr().err
