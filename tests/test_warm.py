"""`whorl warm`: kernels compiled ahead of time are those that a call on that GPU would ask for."""

from contextlib import suppress
from pathlib import Path

import pytest

from whorl import settings
from whorl.commands import main
from whorl.engines.cuda import store
from whorl.engines.cuda.compile import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
H200 = ["--gpu", "9.0:132"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    settings.cache = tmp_path / "cache"
    return tmp_path / "cache" / "cuda"


def test_what_is_compiled_lies_in_the_store_and_is_not_compiled_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["warm", "gru", "--units", "24", "40", "--batch", "8", "--dtype", "float16", *H200]
    assert main(words) == 0
    *names, last = capsys.readouterr().out.splitlines()
    assert [name.split("_float16")[0] for name in names] == [
        "gru_forward_24", "gru_backward_24", "gru_forward_40", "gru_backward_40",
    ]  # fmt: skip
    assert last == f"4 kernels for a GPU of compute capability 9.0 are in {folder.parent}"
    assert len(list(folder.glob("*.cubin"))) == len(list(folder.glob("*.cu"))) == 4
    monkeypatch.setattr(store, "cubin", lambda *_: pytest.fail("compiled again"))
    assert main(words) == 0


def test_inference_needs_the_forward_kernel_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "rnn_tanh", "--units", "8", "--inference", "--no-bias", "--bidirectional", *H200]) == 0
    names = capsys.readouterr().out.splitlines()
    assert len(names) == 2
    assert names[0].startswith("rnn_tanh_forward_8_bfloat16")


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--units", "3000", *H200], "3000 units of lstm in bfloat16 do not fit the 132 multiprocessors"),
        (
            ["--units", "8", "--gpu", "7.5:40"],
            "the GPU has compute capability 7.5, these kernels are made for 8.0 to 9.0",
        ),
        (["--units", "8", "--gpu", "hopper"], "'hopper': write compute capability and multiprocessors, as in 9.0:132"),
        (["--units", "8", "--gpu", "9.0:0"], "'9.0:0': write compute capability"),
    ],
)
def test_what_cannot_be_compiled_says_why(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # what argparse refuses ends there
        assert main(["warm", "lstm", *words]) == 2
    assert complaint in capsys.readouterr().err
