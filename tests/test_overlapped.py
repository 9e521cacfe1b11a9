"""Layers beside each other: each computes a chunk of steps while the one below computes the next."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import whorl
from anew import made_anew
from comparison import flat, in_a_graph, weighted
from emulation import CHIP, emulated
from test_emulated import assert_right
from thinned import thinned
from whorl.cells import library
from whorl.engines.cuda import grid, layers, overlapped, prepare, products, spreading, store, tiling
from whorl.engines.cuda.overlapped import Chunk, Overlapped, Streams
from whorl.engines.cuda.persistent import Persistent, warm
from whorl.engines.cuda.plain import Plain
from whorl.engines.cuda.prepare import size_of
from whorl.engines.cuda.tiling import Chip
from whorl.problem import Form, Problem

TIME, BATCH, INPUTS, UNITS = 5, 9, 6, 20
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
FORMS: dict[str, dict[str, Any]] = {
    "two layers": dict(num_layers=2),
    "three layers, no bias": dict(num_layers=3, bias=False),
    "dropout between": dict(num_layers=3, dropout=0.5),
    "odd units": dict(num_layers=2, hidden_size=17),
}


def in_chunks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Passes of every stack of layers go by so many chunks."""
    monkeypatch.setattr(overlapped, "_chunks", lambda *given: min(count, given[4]))


def ran() -> list[type]:
    return [type(made) for _, made in layers._prepared.values()]


def outcome(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, tf32: bool = False, initial: bool = False,
    of_x: bool = True, last: bool = False, **form: Any,
) -> list[Tensor]:  # fmt: skip
    """Outputs, and the gradients of all that has one; `last`: of the final states alone."""
    torch.manual_seed(0)
    arguments = dict(hidden_size=UNITS) | form
    layer = getattr(whorl, kind)(INPUTS, engine="persistent", **arguments).to(dtype)
    rows, units = layer.num_layers, layer.hidden_size
    x = torch.randn(TIME, BATCH, INPUTS).to(dtype).requires_grad_(of_x)
    states = [torch.randn(rows, BATCH, units).to(dtype).requires_grad_() for _ in layer._widths] * initial
    hx = (tuple(states) if len(states) > 1 else states[0]) if states else None
    with emulated(folder, tf32):
        torch.manual_seed(5)  # of dropout
        outputs = flat(layer(x, hx))
        wanted = [*([x] if of_x else []), *states, *layer.parameters()]
        found = [one.detach() for one in outputs]
        found += torch.autograd.grad(weighted(outputs[1:] if last else outputs), wanted)
    return found


def close(got: list[Tensor], wanted: list[Tensor]) -> None:
    """To a few units in the last place of float32: bias' gradients are added up chunk by chunk."""
    for one, other in zip(got, wanted, strict=True):
        bound = 4e-7 if one.dtype == torch.float32 else 2 * torch.finfo(one.dtype).eps
        assert (one.double() - other.double()).norm() <= bound * other.double().norm()


@needs_compiler
@pytest.mark.parametrize("cell, form, count", thinned(3, [
    ("LSTM", torch.bfloat16, False), ("GRU", torch.float16, False), ("GRU", torch.float32, True),
    ("LSTM", torch.float32, False), ("RNN", torch.bfloat16, False),
], FORMS, [2, 3, TIME]))  # fmt: skip
def test_chunks_give_what_all_steps_at_once_do(
    cell: tuple[str, torch.dtype, bool], form: str, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States between chunks are float32: with the tile of all steps outputs of two bytes are the same to the bit."""
    kind, dtype, tf32 = cell
    if tf32:  # a product of the host that is made in parts has other bits
        monkeypatch.setattr(products, "_LONGEST", 1 << 30)
    given = dict(kind=kind, folder=folder, dtype=dtype, tf32=tf32, initial=count != 3, **FORMS[form])
    in_chunks(monkeypatch, 1)
    wanted = outcome(**given)
    in_chunks(monkeypatch, count)
    got = outcome(**given)
    if dtype.itemsize == 2:
        assert all(map(torch.equal, got[:2], wanted[:2]))
    close(got, wanted)


@needs_compiler
def test_layers_run_beside_each_other_only_where_chunks_say_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[type]] = []
    layer, x = whorl.LSTM(INPUTS, UNITS, num_layers=2, engine="persistent"), torch.randn(TIME, BATCH, INPUTS)
    for count in (1, 2):
        in_chunks(monkeypatch, count)
        with emulated(folder):
            layer(x)
            found.append(ran())
    assert found == [[Plain], [Overlapped]]


@needs_compiler
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("dtype, tf32", [(torch.bfloat16, False), (torch.float32, True)])
def test_chunks_of_blocks_that_exchange_through_l2(
    kind: str, dtype: torch.dtype, tf32: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(*where: Any) -> Any:
        tile = spreading.choose(*where)
        assert tile is not None
        return tile

    monkeypatch.setattr(grid, "choose", choose)
    given = dict(kind=kind, folder=folder, dtype=dtype, tf32=tf32, initial=True, num_layers=2, hidden_size=48)
    in_chunks(monkeypatch, 1)
    wanted = outcome(**given)
    in_chunks(monkeypatch, 2)
    close(outcome(**given), wanted)


@needs_compiler
@pytest.mark.parametrize("given", [dict(of_x=False), dict(last=True), dict(last=True, initial=True)])
def test_what_has_no_gradient_and_what_alone_has_one(
    given: dict[str, bool], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks(monkeypatch, 1)
    wanted = outcome("GRU", folder, num_layers=2, **given)
    in_chunks(monkeypatch, 2)
    close(outcome("GRU", folder, num_layers=2, **given), wanted)


@needs_compiler
@pytest.mark.parametrize("kind, dtype", [("LSTM", torch.bfloat16), ("GRU", torch.float16), ("GRU", torch.float32)])
def test_chunks_follow_the_error_rule(
    kind: str, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks(monkeypatch, 3)
    layer = getattr(whorl, kind)(INPUTS, 33, num_layers=3).to(dtype)
    assert_right(layer, torch.randn(7, BATCH, INPUTS).to(dtype), dtype, folder)


@needs_compiler
def test_inference_keeps_the_inputs_of_all_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, every second layer has the same room."""
    layer, x = whorl.LSTM(INPUTS, UNITS, num_layers=4, engine="persistent"), torch.randn(TIME, BATCH, INPUTS)
    made = []
    for count in (1, 2):
        in_chunks(monkeypatch, count)
        with emulated(folder), torch.no_grad():
            made.append(flat(layer(x)))
    close(made[1], made[0])


class Log:
    """Streams that note, of each launch, the launches that are over before it may begin."""

    def __init__(self, count: int) -> None:
        self.behind: list[set[int]] = [set() for _ in range(count)]
        self.launches: list[tuple[str, int, frozenset[int]]] = []
        self.now, self.joined = 0, 0

    def launch(self, name: str) -> None:
        stream = self.now
        self.launches.append((name, stream, frozenset(self.behind[stream])))
        self.behind[stream].add(len(self.launches) - 1)


@needs_compiler
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_each_chunk_waits_for_what_it_reads(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunk before it of the same layer, that of the layer which gives its input, and nothing further on."""
    count, parts = 3, 3
    log = Log(count)

    class Stream(emulation.Stream):
        def record_event(self) -> Any:
            return set(log.behind[self.cuda_stream])

        def wait_event(self, event: Any) -> None:
            log.behind[self.cuda_stream] |= event

    class Noting(emulation.Streams):
        def __init__(self, index: int, count: int) -> None:
            self._made = [Stream(number) for number in range(count)]

    class Kernel(emulation.Kernel):
        def __call__(self, stream: int, *given: Any) -> None:
            assert stream == log.now
            log.launch(self.name)
            super().__call__(stream, *given)

    in_chunks(monkeypatch, parts)
    layer = getattr(whorl, kind)(INPUTS, UNITS, num_layers=count, engine="persistent")
    x = torch.randn(6, BATCH, INPUTS, requires_grad=True)
    with emulated(folder) as patch:
        patch.setattr(overlapped, "Streams", Noting)
        patch.setattr(prepare, "Kernel", Kernel)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(log, "now", stream.cuda_stream))
        y = layer(x)[0]
        log.now = 0
        ahead = list(log.launches)
        log.launches.clear()
        for behind in log.behind:
            behind.clear()
        torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    for name, launches in {"forward": ahead, "backward": log.launches}.items():
        ours = [one for one, (its, _, _) in enumerate(launches) if f"_{name}_" in its]
        assert len(ours) == count * parts
        for place, at in enumerate(ours):
            chunk, layer_of = divmod(place, count)
            stream, before = launches[at][1:]
            assert stream == layer_of
            known = {divmod(ours.index(one), count) for one in before if one in ours}
            wanted = {(chunk - 1, layer_of)} if chunk else set()
            wanted |= {(chunk, layer_of - 1)} if layer_of else set()
            assert wanted <= known
            assert not any(other > chunk for other, _ in known)
            assert not any(its > layer_of for _, its in known)  # else nothing would run beside anything


MAIN = SimpleNamespace(cuda_stream=7)


class Branches:
    """Two, beside a stream, that note what is done; what the second does is given."""

    def __init__(self, second: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        made = {number: self._made(number, fork) for number, fork in ((1, lambda: True), (2, second))}
        monkeypatch.setattr(overlapped, "branch_of", lambda index, beside, number: made[number])
        monkeypatch.setattr(torch.cuda, "current_stream", lambda index: MAIN)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: self.done.append(f"to {stream.cuda_stream}"))

    def _made(self, number: int, fork: Callable[[], bool]) -> SimpleNamespace:
        return SimpleNamespace(
            as_torch=f"stream {number}",
            fork=lambda: self.done.append(f"fork {number}") or fork(),
            join=lambda: self.done.append(f"join {number}"),
        )


def fail() -> bool:
    raise whorl.KernelError("no")


def test_streams_end_where_an_error_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream left in a capture would break the graph, and one left current would be so for all that follows."""
    branches, found = Branches(lambda: True, monkeypatch), []

    def begin() -> None:
        with Streams(0, 3).begin() as streams:
            found.append(streams)
            fail()

    with pytest.raises(whorl.KernelError, match="no"):
        begin()
    assert found == [[MAIN, "stream 1", "stream 2"]]
    assert branches.done == ["fork 1", "fork 2", "to 7", "join 1", "join 2"]


def test_a_stream_that_does_not_begin_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = Branches(fail, monkeypatch)
    with pytest.raises(whorl.KernelError, match="no"), Streams(0, 3).begin():
        pass
    assert branches.done == ["fork 1", "fork 2", "to 7", "join 1"]


def test_layers_run_one_by_one_where_their_streams_are_in_another_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = Branches(lambda: False, monkeypatch)
    with Streams(0, 3).begin() as streams:
        assert streams is None
    assert branches.done == ["fork 1", "fork 2", "to 7", "join 1"]


@needs_compiler
def test_a_call_within_another_capture_is_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(emulation.Streams):
        @contextmanager
        def begin(self) -> Iterator[None]:
            yield None

    in_chunks(monkeypatch, 1)
    wanted = outcome("LSTM", folder, num_layers=2)
    in_chunks(monkeypatch, 2)
    monkeypatch.setattr(emulation, "Streams", Busy)
    assert all(map(torch.equal, outcome("LSTM", folder, num_layers=2), wanted))


def stack(cell: Any, shape: tuple[int, ...], directions: int = 1) -> Problem:
    """Layers x batch x time x units, in bfloat16."""
    count, batch, time, units = shape
    form = Form(cell.graph, units, units, layers=count, directions=directions)
    return Problem(form=form, device=emulation.H200, dtype=torch.bfloat16, time=time, batch=batch, gradient=True)


@pytest.mark.parametrize("cell, shape, ahead, back", [
    (library.lstm, (2, 32, 100, 128), True, True),  # a graph took 0.82 of the time forward and in training
    (library.gru, (4, 32, 100, 128), True, True),  # 0.75 and 0.67
    (library.lstm, (4, 32, 100, 256), True, True),  # 0.87 and 0.83
    (library.lstm, (2, 16, 1024, 768), True, True),  # 0.74 and 0.66
    (library.lstm, (2, 20, 35, 650), False, True),  # forward in two chunks 1.11, backward 0.85
    (library.lstm, (3, 128, 200, 512), False, False),  # 1.39 and 1.08
    (library.lstm, (3, 128, 200, 1024), False, False),
    (library.lstm, (2, 64, 100, 256), False, False),  # 1.06 and 1.09
    (library.lstm, (1, 32, 100, 128), False, False),
    (library.lstm, (200, 32, 100, 128), False, False),  # of whose layers none would have a multiprocessor
    (library.lstm, (2, 32, 1, 128), False, False),
])  # fmt: skip
def test_which_stacks_gain(cell: Any, shape: tuple[int, ...], ahead: bool, back: bool) -> None:
    problem = stack(cell, shape)
    found = [len(overlapped.chunks(problem, CHIP, kind, eager=False)) > 1 for kind in ("forward", "backward")]
    assert found == [ahead, back]
    told = [bool(overlapped.described(problem, CHIP, kind)) for kind in ("forward", "backward")]
    assert told == found


def test_not_in_two_directions_nor_before_9_0() -> None:
    assert len(overlapped.chunks(stack(library.lstm, (2, 32, 100, 128), directions=2), CHIP, "forward", False)) == 1
    assert len(overlapped.chunks(stack(library.lstm, (2, 32, 100, 128)), Chip((8, 0), 108), "forward", False)) == 1


def test_only_clusters_that_all_run_at_once() -> None:
    """Of four layers each has 33 multiprocessors, enough for two clusters of 16 blocks, but seven run at once."""
    share = overlapped.part_of(CHIP, 4)
    tile = next(
        one for one in tiling.likely(size_of(library.gru.graph, 512, 2), share, 16, 1, "forward") if one.cluster == 16
    )
    assert tiling.parts(share, 32, 1, tile, "forward") == 2
    assert not overlapped._fit(tile, CHIP, 32, 4, "forward")
    assert overlapped._fit(tile, CHIP, 32, 2, "forward")
    assert not overlapped._fit(tile, Chip((9, 0), 24), 8, 2, "forward")  # 12 for each
    assert all(len(overlapped.chunks(stack(library.lstm, (2, 32, 100, 128)), Chip((9, 0), few), "forward", False)) == 1
               for few in (1, 2, 3))  # fmt: skip


@pytest.mark.parametrize("options, beside", [({}, True), (dict(projection=64), False), (dict(batch=64), False)])
def test_what_is_told_and_compiled_is_what_runs(options: dict[str, int], beside: bool, folder: Path) -> None:
    batch = options.get("batch", 32)
    form = Form(library.lstm.graph, 256, 256, layers=4 if beside or "projection" in options else 2,
                projection=options.get("projection", 0))  # fmt: skip
    problem = Problem(form=form, device=emulation.H200, dtype=torch.bfloat16, time=100, batch=batch, gradient=True)
    with emulated(folder) as patch:
        lines = Persistent().numbers(problem)
        names: list[str] = []
        patch.setattr(store, "kernels", lambda wanted: names.extend(one[1] for one in wanted) or [b""] * len(wanted))
        patch.setattr(store, "kernel", lambda *given: b"")
        warm(problem, CHIP)
    told = [
        line for line in lines if "layers beside each other, in chunks of 20 steps in a CUDA graph, one by one" in line
    ]
    assert len(told) == 2 * beside
    assert sum(name.startswith("lstm") for name in names) == 2 + 2 * beside
    assert all("; then a cluster of 4 blocks for up to " in line for line in told)


@pytest.mark.parametrize("time", range(2, 70, 3))
@pytest.mark.parametrize("count", [2, 3, 7, 64])
def test_chunks_are_all_steps_once(time: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks(monkeypatch, count)
    found = overlapped.chunks(stack(library.lstm, (2, 32, time, 128)), CHIP, "forward", False)
    assert [step for chunk in found for step in range(chunk.first, chunk.first + chunk.steps)] == list(range(time))
    assert min(chunk.steps for chunk in found) > 0
    assert len({chunk.steps for chunk in found}) <= 2


def test_an_eager_call_has_no_more_chunks_than_the_host_launches() -> None:
    short, long = (stack(library.gru, (4, 32, time, 128)) for time in (100, 4000))
    assert len(overlapped.chunks(short, CHIP, "forward", eager=True)) == 1
    assert len(overlapped.chunks(long, CHIP, "forward", eager=True)) > 1


def test_a_chunk_of_a_tensor() -> None:
    assert torch.equal(Chunk(2, 3).of(torch.arange(8)), torch.tensor([2, 3, 4]))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "float32"])
@pytest.mark.parametrize("kind, shape", [
    ("LSTM", (2, 32, 100, 128)), ("GRU", (4, 32, 60, 96)), ("LSTM", (2, 16, 300, 768)), ("GRU", (2, 20, 35, 650)),
    ("RNN", (3, 8, 200, 64)),
])  # fmt: skip
def test_graphs_and_calls_in_chunks_are_right(
    kind: str, shape: tuple[int, ...], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by no more than twice what one by one is, and 4 eps; the same bits at each replay, and in calls at once."""
    count, batch, time, units = shape
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    made_anew(monkeypatch)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        layer = getattr(whorl, kind)(units, units, num_layers=count, device="cuda", dtype=dtype)
        exact = getattr(whorl, kind)(
            units, units, num_layers=count, device="cuda", dtype=torch.float64, engine="reference"
        )
        exact.load_state_dict(layer.state_dict())
        x = torch.randn(time, batch, units, device="cuda", dtype=dtype)

        def gradients(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
            x = x.detach().requires_grad_()
            y = layer(x)[0]
            return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

        truth = gradients(exact, x.double())
        in_chunks(monkeypatch, 1)
        bounds = [float((a.double() - b).norm()) for a, b in zip(gradients(layer, x), truth, strict=True)]
        layers._prepared.clear()
        in_chunks(monkeypatch, 3)
        eager = gradients(layer, x)
        assert Overlapped in ran()
        eps = 4 * (2.0**-11 if precision == "tf32" else torch.finfo(dtype).eps)
        for got, want, bound in zip(eager, truth, bounds, strict=True):
            assert float((got.double() - want).norm()) <= 2 * bound + eps * float(want.norm())
        graph, captured = in_a_graph(lambda: gradients(layer, x))
        for _ in range(3):
            for tensor in captured:
                tensor.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, captured, eager))
        again: list[list[Tensor]] = []

        def beside() -> None:
            with (
                torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"),
                torch.cuda.stream(torch.cuda.Stream()),
            ):
                again.append(gradients(layer, x))
                torch.cuda.current_stream().synchronize()

        torch.cuda.synchronize()
        threads = [threading.Thread(target=beside) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(5):  # beside these
            graph.replay()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, eager))
        assert len(again) == 3
        assert all(all(map(torch.equal, one, eager)) for one in again)
