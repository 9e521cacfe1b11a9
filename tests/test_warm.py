"""`whorl warm`: kernels compiled ahead of time are those that a call on that GPU would ask for."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import whorl
from emulation import CHIP, emulated
from whorl import settings
from whorl.commands import main
from whorl.engines.cuda import aligned, split, store
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.persistent import warm

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
        "gru_forward_24", "gru_backward_24", "add_up", "gru_forward_40", "gru_backward_40",
    ]  # fmt: skip
    assert last == f"5 kernels for a GPU of compute capability 9.0 are in {folder.parent}"
    assert len(list(folder.glob("*.cubin"))) == len(list(folder.glob("*.cu"))) == 5
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
        (["--units", "0", *H200], "--units: '0': write a whole number of 1 or more"),
        (["--units", "8", "-3", *H200], "--units: '-3': write a whole number of 1 or more"),
        (["--units", "8", "--inputs", "0", *H200], "--inputs: '0': write a whole number of 1 or more"),
        (["--units", "8", "--layers", "0", *H200], "--layers: '0': write a whole number of 1 or more"),
    ],
)
def test_what_cannot_be_compiled_says_why(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):  # what argparse refuses ends there
        assert main(["warm", "lstm", *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("inference", [False, True], ids=["training", "inference"])
@pytest.mark.parametrize("least", [1, 1 << 29], ids=["rows are copied", "rows lie as they are"])
def test_a_call_asks_for_what_is_compiled_and_no_more(
    least: int, inference: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "LEAST", least)
    words = "gru --units 21 --inputs 7 --layers 2 --batch 3 --time 4 --bidirectional".split()
    assert main(["warm", *words, *["--inference"] * inference, *H200]) == 0
    *names, _ = capsys.readouterr().out.splitlines()
    layer, asked = whorl.GRU(7, 21, 2, bidirectional=True, engine="persistent"), set()
    with emulated(tmp_path) as patch:
        real = store.kernels
        patch.setattr(store, "kernels", lambda wanted: asked.update(one[1] for one in wanted) or real(wanted))
        with torch.set_grad_enabled(not inference):
            y, _ = layer.to(torch.bfloat16)(torch.randn(4, 3, 7, dtype=torch.bfloat16))
        if not inference:
            y.float().sum().backward()
    assert asked == {*names}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("allowed, wanted", [("ieee", True), ("tf32", False)])
def test_true_float32_asks_for_the_kernel_that_splits(
    allowed: str, wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "LEAST", 1)
    monkeypatch.setattr(split, "TALL", 0)
    monkeypatch.setattr(split, "WIDER", 0)
    with emulated(tmp_path, tf32=allowed == "tf32") as patch:
        asked: set[str] = set()
        real = store.kernels
        patch.setattr(store, "kernels", lambda wanted: asked.update(one[1] for one in wanted) or real(wanted))
        layer = whorl.GRU(7, 8, engine="persistent")
        x = torch.randn(4, 3, 7)
        layer(x)[0].sum().backward()
        assert ("split_float32" in asked) == wanted
        named = warm(layer.plan(x).problem, CHIP)
        assert {*named} == asked


@pytest.mark.parametrize("units, sided", [(1024, True), (128, False)])
def test_what_measures_sides_is_compiled_where_blocks_take_places_by_them(
    units: int, sided: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["warm", "lstm", "--units", str(units), "--batch", "32", "--inference", *H200]) == 0
    assert ("round_trips" in capsys.readouterr().out.splitlines()) == sided
