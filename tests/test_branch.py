"""Products of a small layer's backward as a second branch of a captured CUDA graph."""

import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import emulation
import whorl
from comparison import in_a_graph
from emulation import emulated
from thinned import thinned
from whorl.engines.cuda import aligned, grid, layers, persistent, plain, prepare, products
from whorl.engines.cuda import branch as branches
from whorl.engines.cuda import options as options_of_calls
from whorl.engines.cuda.tiling import Chip, Tile

LAYERS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "LSTM": ("LSTM", {}, ()),
    "GRU, two layers, both directions": ("GRU", dict(num_layers=2, bidirectional=True), ()),
    "no bias": ("RNN", dict(bias=False), ()),
    "given masks held over all steps": ("LSTM", dict(recurrent_dropout=0.3, recurrent_dropout_mode="shared"), (1,)),
    "given masks by gate": ("GRU", dict(recurrent_dropout=0.3), (3,)),
    "reset before the product, no bias": ("GRU", dict(reset_after=False, bias=False), ()),
    "reset before the product, given masks by gate": ("GRU", dict(reset_after=False, recurrent_dropout=0.3), (3,)),
    "reset before the product, masks by step that are drawn": (
        "GRU",
        dict(reset_after=False, recurrent_dropout=0.3, recurrent_dropout_mode="step"),
        (),
    ),
    "layer norm inside the step": ("LSTM", dict(layer_norm="r c"), ()),
    "x behind masks that are drawn": ("LSTM", dict(input_dropout=0.3), ()),
}
"""Class, options, and of given masks [.., batch, units] what is before that."""


def gradients(name: str, layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
    shape, given = LAYERS[name][2], {}
    if shape:
        leading = shape if shape != (1,) else ()
        numbers = torch.arange(1, 1 + layer.hidden_size, device=x.device, dtype=x.dtype)
        mask = numbers.expand(*leading, x.shape[1], -1) % 3
        given = dict(dropout_masks={"recurrent_dropout": mask.contiguous()})
    torch.manual_seed(5)
    y = layer(x, **given)[0]
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]


WITH_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "zoneout": ("LSTM", dict(zoneout=0.2)),
    "masks by gate that are drawn": ("GRU", dict(recurrent_dropout=0.3)),
    "the same, reset before the product": ("GRU", dict(recurrent_dropout=0.3, reset_after=False)),
    "masks of each step, two layers, both directions": (
        "LSTM", dict(recurrent_dropout=0.3, recurrent_dropout_mode="step", num_layers=2, bidirectional=True)
    ),
}  # fmt: skip
"""Class and options of layers that draw; where the states of all steps are wanted, `Layers` runs them."""


class Recorder:
    """A branch that notes what is done."""

    stream, as_torch = 5, "its stream"

    def __init__(self, free: bool) -> None:
        self.free, self.done = free, list[str]()

    def fork(self) -> bool:
        self.done.append("fork")
        return self.free

    def meet(self) -> None:
        self.done.append("meet")

    def space(self) -> Tensor:
        self.done.append("space")
        return torch.empty(0)

    def handle(self, dtype: torch.dtype, space: Tensor) -> int:
        return 9

    def join(self) -> None:
        self.done.append("join")

    def launches(self, whole: bool = False) -> type[emulation.Kernel]:
        """A kernel that notes its launches, by its whole name or the first word of it."""
        done = self.done

        class Kernel(emulation.Kernel):
            def __call__(self, stream: int, *given: Any) -> None:
                done.append(f"{self.name if whole else self.name.split('_')[0]} on {stream}")
                super().__call__(stream, *given)

        return Kernel


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("capturing, free", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_weights_get_their_gradients_on_the_branch(
    name: str, capturing: bool, free: bool, folder: Path
) -> None:
    kind, options, _ = LAYERS[name]
    layer = getattr(whorl, kind)(5, 8, engine="persistent", **options)
    x, note = torch.randn(3, 2, 5, requires_grad=True), Recorder(free)
    with emulated(folder):
        wanted = gradients(name, layer, x)

    with emulated(folder) as patch:
        patch.setattr(plain, "branch_of", lambda index: note)
        for module in (prepare, options_of_calls):
            patch.setattr(module, "Kernel", note.launches())
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing)
        library = products.cublas()
        multiply = library.cublasGemmEx
        library.cublasGemmEx = lambda handle, *given: (
            note.done.append(f"product by {handle}") or multiply(handle, *given)
        )
        got = gradients(name, layer, x)
    assert all(map(torch.equal, got, wanted))
    forked, count, optional = capturing and free, getattr(layer, "num_layers", 1), "mask" in name
    assert note.done.count("join") == forked * (count + optional)  # forward forks where it may have something to draw
    assert any(one.endswith("by 9") for one in note.done) == forked
    assert ("add on 5" in note.done) == (forked and layer.bias)
    behind = [one for one in note.done if one.startswith("masked")]
    assert bool(behind) == ("by gate" in name or "x behind" in name)
    if "by gate" in name:
        assert all(one.endswith("on 5") == forked for one in behind)
        if forked:  # what forward left is masked beside the loop over time, which is launched first and needs room
            begun = len(note.done) - note.done[::-1].index("fork")
            loop, first, *rest = note.done[begun : note.done.index("meet", begun)]
            assert not loop.endswith("on 5")
            assert all(one == "masked on 5" for one in (first, *rest))
    if "by step" in name:  # forward beside the product with x, and what it drew is there for backward
        assert [one.endswith("on 5") for one in note.done if one.startswith("draw")] == [forked]
    met = [place for place, one in enumerate(note.done) if one == "meet"]
    assert [note.done[place + 1] for place in met] == ["space"] * (forked * count)
    open_ = False
    for one in note.done:
        assert open_ or not one.endswith(("by 9", "on 5"))
        open_ = one != "join" and (open_ or (one == "fork" and forked))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("capturing, free", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_with_options_too(name: str, capturing: bool, free: bool, folder: Path) -> None:
    kind, options = WITH_OPTIONS[name]
    layer = getattr(whorl, kind)(5, 16, engine="persistent", **options)
    x, note, on = torch.randn(3, 2, 5, requires_grad=True), Recorder(free), ["main"]

    def passes() -> list[Tensor]:
        torch.manual_seed(3)
        y = layer(x, return_states=True)[0]
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

    @contextmanager
    def stream(its: str) -> Iterator[None]:
        on.append(its)
        yield
        on.pop()

    class Kernel(emulation.Kernel):
        def __call__(self, stream: int, *given: Any) -> None:
            assert (stream == note.stream) == (on[-1] == note.as_torch)
            note.done.append(f"{self.name.split('_')[0]} on {on[-1]}")
            super().__call__(stream, *given)

    with emulated(folder):
        wanted = passes()
    with emulated(folder) as patch:
        patch.setattr(layers, "branch_of", lambda index, beside: note)
        patch.setattr(prepare, "Kernel", Kernel)
        patch.setattr(torch.cuda, "stream", stream)
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing)
        for module in (aligned, layers):
            patch.setattr(module, "product", noting(module.product, note.done, on))
        got = passes()
    assert all(map(torch.equal, got, wanted))
    forked = capturing and free
    assert note.done.count("join") == forked * layer.num_layers
    assert (f"product on {note.as_torch}" in note.done) == forked
    assert (f"add on {note.as_torch}" in note.done) == (forked and layer.bias)
    back = [one for one in note.done if one != "product on main"]
    assert all(not one.endswith(note.as_torch) or "fork" in back[: back.index(one)] for one in back)
    assert not any(one.startswith(layer.mode.lower()) and one.endswith(note.as_torch) for one in note.done)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    "norm, large, spread",
    [(False, False, False), (True, False, False), (False, True, False), (True, True, False), (False, False, True)],
    ids=["", "layer norm", "large", "large, layer norm", "blocks exchange through L2"],
)
def test_what_reads_no_gradient_is_beside_the_loop(norm: bool, large: bool, spread: bool, folder: Path) -> None:
    """x without what does not count, where products are not divided too: of large layers, and behind a norm.

    Beside a loop whose blocks begin when all of them can, which would wait for it, it is on the loop's own stream, in
    memory that is not the loop's.
    """
    layer = whorl.LSTM(5, 8, 2, engine="persistent", layer_norm=norm)
    x, mask = torch.randn(3, 2, 5, requires_grad=True), torch.tensor([[1, 1], [1, 0], [0, 1]]).bool()
    note, own, spaces = Recorder(True), layers._BESIDE, list[weakref.ref[Tensor]]()

    def prepared(*given: Any) -> grid.Prepared:
        note.done.append("prepared")
        made, space = prepare_one(*given), torch.empty(1)
        spaces.append(weakref.ref(space))
        return made._replace(space=space)

    def passes() -> list[Tensor]:
        y = layer(x, mask=mask)[0]
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

    class Kernel(emulation.Kernel):
        def __call__(self, stream: int, *given: Any) -> None:
            kind = "backward" if "_backward_" in self.name else self.name.split("_")[0]
            kind += " behind" * self.name.endswith("_behind")
            assert not kind.endswith("behind") or spaces[-1]() is not None, "the loop's memory was given back"
            note.done.append(f"{kind} on {stream}")
            super().__call__(stream, *given)

    with emulated(folder):
        wanted = passes()
    with emulated(folder) as patch:
        patch.setattr(layers, "_BESIDE", 0 if large else own)
        patch.setattr(plain, "branch_of", lambda index: note)
        prepare_one = grid.Grid.prepared
        patch.setattr(grid.Grid, "prepared", prepared)
        if spread:  # every tile is one of blocks that exchange through L2, as its backward asks
            patch.setattr(plain, "Spread", Tile)
        for module in (prepare, options_of_calls):
            patch.setattr(module, "Kernel", Kernel)
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
        got = passes()
    assert all(map(torch.equal, got, wanted))
    loops = [place for place, one in enumerate(note.done) if one.startswith("backward")]
    # behind the loop, which needs room: else a graph begins with x
    *before, _, behind = note.done[loops[0] - 2 : loops[0] + 2]
    assert before == ["prepared", "fork"]  # nor does it fill the GPU before weights are float16
    if not norm and not large:  # forward's kernel alone waits for the branch
        assert note.done.index("prepared") < note.done.index("join")
    assert behind.startswith("cleaned")
    assert (behind == "cleaned on 5") != spread
    assert behind.startswith("cleaned behind") == spread
    assert note.done.count("cleaned on 5") == (not spread)
    assert ("meet" in note.done) == (not norm and not large)
    assert any(one in ("meet", "join") for one in note.done[loops[0] : loops[1]])


DRAWS: dict[str, tuple[dict[str, Any], dict[str, Tensor], list[str]]] = {
    "by gate": (dict(recurrent_dropout=0.3), {}, ["draw_masks"]),
    "shared": (dict(recurrent_dropout=0.3, recurrent_dropout_mode="shared"), {}, ["draw_masks"]),
    "of x": (dict(input_dropout=0.3), {}, ["draw_masks"]),
    "by step": (dict(recurrent_dropout=0.3, recurrent_dropout_mode="step"), {}, ["draw_bits_step"]),
    "lengths, zoneout": (
        dict(zoneout=0.3), {"lengths": torch.tensor([2, 3, 0, 1, 3, 3, 2, 1, 3])},
        ["draw_bits_zoneout01_of_2", "order_by_length"],
    ),
    "lengths": ({}, {"lengths": torch.tensor([2, 3, 0, 1, 3, 3, 2, 1, 3])}, ["order_by_length"]),
}  # fmt: skip
"""Options and marks of a call, and the kernels that draw and sort for it."""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name, large, few", thinned(2, list(DRAWS), [False, True], [True, False]))
def test_what_is_drawn_and_sorted_once(
    name: str, large: bool, few: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward leaves it to backward, but for bits of many steps; and makes it beside the product, but for bits of a
    large layer, and masks of x, which the product reads."""
    options, marks, once = DRAWS[name]
    layer = whorl.LSTM(5, 8, engine="persistent", **options)
    x, note = torch.randn(3, 9, 5, requires_grad=True), Recorder(True)
    monkeypatch.setattr(Chip, "resident", lambda *_: 2)  # forward and backward may deal sequences to other clusters

    def passes() -> list[Tensor]:
        torch.manual_seed(5)
        y = layer(x, **marks)[0]
        note.done.append("backward")
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

    with emulated(folder) as patch:
        patch.setattr(persistent, "is_marked", lambda problem: False)
        wanted = passes()  # by `Layers`, which draws and sorts in each pass
    note.done.clear()
    with emulated(folder) as patch:
        patch.setattr(layers, "_BESIDE", 0 if large else layers._BESIDE)
        patch.setattr(options_of_calls, "_SHARED", options_of_calls._SHARED if few else 0)
        patch.setattr(plain, "branch_of", lambda index: note)
        patch.setattr(options_of_calls, "Kernel", note.launches(whole=True))
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
        got = passes()
    assert all(map(torch.equal, got, wanted))
    between = note.done.index("backward")
    passed = note.done[:between], note.done[between:]
    made = [[one for one in part if one.startswith(("draw", "order"))] for part in passed]
    bits = any(one.startswith("draw_bits") for one in once)
    beside = name != "of x" and not (large and bits)
    assert sorted(made[0]) == [f"{one} on {5 if beside else 0}" for one in once]
    assert made[1] == [f"{one} on 0" for one in once if one.startswith("draw_bits") and not few]
    assert ("fork" in note.done[:between]) == (beside or not large)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("mode, count", [("shared", 2), ("step", 2), ("gate", 3), (None, 2)])
def test_gates_beside_each_other_are_multiplied_at_once(mode: str | None, count: int, folder: Path) -> None:
    """r and z of GRU with the reset before the product: n's is inside the step, and masks by gate are apart."""
    options = {} if mode is None else dict(recurrent_dropout=0.3, recurrent_dropout_mode=mode)
    layer = whorl.GRU(5, 8, engine="persistent", reset_after=False, bias=False, **options)
    x, wide = torch.randn(3, 2, 5, requires_grad=True), list[int]()
    with emulated(folder):
        library = products.cublas()
        multiply = library.cublasGemmEx
        library.cublasGemmEx = lambda *given: wide.append(given[4].value) or multiply(*given)
        y = layer(x)[0].sum()
        wide.clear()
        y.backward()
    assert len(wide) == 2 + count  # with those of x and of its weights


def noting(product: Callable[..., Tensor], done: list[str], on: list[str]) -> Callable[..., Tensor]:
    """A product that says on which stream it is."""

    def noted(*given: Any, **more: Any) -> Tensor:
        done.append(f"product on {on[-1]}")
        return product(*given, **more)

    return noted


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_gradients_that_a_norm_reads_stay_where_they_are(folder: Path) -> None:
    layer, x = whorl.LSTM(5, 16, engine="persistent", layer_norm=True), torch.randn(3, 2, 5)
    with emulated(folder) as patch:
        note = Recorder(True)
        for module in (layers, plain):
            patch.setattr(module, "branch_of", lambda *where: note)
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
        layer(x)[0].sum().backward()
        layer(x, return_states=True)[0].sum().backward()
        assert {type(made) for _, made in layers._prepared.values()} == {plain.Plain, layers.Layers}
    assert note.done == []


@pytest.fixture
def made(folder: Path) -> Iterator[list[int]]:
    """Gets the device of each branch that is asked for, on a chip that has one."""
    found: list[int] = []
    with emulated(folder) as patch:
        patch.setattr(plain, "branch_of", found.append)
        yield found


def train(time: int = 3, inputs: int = 5) -> None:
    layer = whorl.LSTM(inputs, 8, engine="persistent")
    gradients("LSTM", layer, torch.randn(time, 2, inputs, requires_grad=True))


def test_a_small_layer_has_one(made: list[int]) -> None:
    train()
    assert made == [0]


@pytest.mark.parametrize("most, count", [(3 * 2 * 32 * 8, 0), (3 * 2 * 32 * 8 + 1, 1)])
def test_a_large_layer_gains_nothing(most: int, count: int, made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_BESIDE", most)
    train()
    assert len(made) == count


def test_a_gradient_that_torch_clears_is_made_on_its_stream(made: list[int]) -> None:
    train(time=1)
    assert not made


def test_products_of_copies_are_made_on_torchs_stream(made: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "LEAST", 1)
    train(inputs=5)
    assert not made
    train(inputs=8)
    assert made


def test_there_is_none_where_torch_gives_cublas_another_workspace(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    train()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert not layers.leaves_room(SimpleNamespace(), Chip((8, 0), 108))  # type: ignore[arg-type]
    assert not made


def test_what_cublas_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a workspace of its own two products at once would write to the same."""
    refusals = dict(cublasSetStream_v2=0, cublasSetWorkspace_v2=7)
    library = SimpleNamespace(**{name: lambda *given, name=name: refusals[name] for name in refusals})
    for module in (branches, products):
        monkeypatch.setattr(module, "cublas", lambda: library)
    monkeypatch.setattr(branches, "handle", lambda dtype: 1)
    one = object.__new__(branches.Branch)
    one.stream = 5
    with pytest.raises(whorl.KernelError, match=r"a workspace of its own in a CUDA graph \(7\)"):
        one.handle(torch.float32, torch.empty(1))
    refusals["cublasSetStream_v2"] = 8
    with pytest.raises(whorl.KernelError, match=r"a stream of its own in a CUDA graph \(8\)"):
        one.handle(torch.float32, torch.empty(1))


def test_a_branch_that_another_capture_has_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it still is in a capture, it goes on only from the stream that it was forked from."""
    busy, now = [0], SimpleNamespace(cuda_stream=1, record_event=lambda: "event", wait_event=lambda event: None)

    def asked(stream: Any, status: Any) -> int:
        status._obj.value = busy[0]
        return 0

    monkeypatch.setattr(branches, "driver", lambda: SimpleNamespace(cuStreamIsCapturing=asked))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: now)
    one = object.__new__(branches.Branch)
    one.stream, one._index, one._of, one._lock = 7, 0, 0, threading.Lock()
    one.as_torch = SimpleNamespace(wait_event=lambda event: None, record_event=lambda: "event")
    assert one.fork()
    busy[0] = 1
    assert one.fork()
    now.cuda_stream = 2
    assert not one.fork()
    busy[0] = 0
    assert one.fork()


def test_each_stream_has_branches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits on one stream, for a peer perhaps, holds up nobody on another; but they are not without end."""
    monkeypatch.setattr(branches, "Branch", lambda index: object())
    monkeypatch.setattr(branches, "_branches", {})
    monkeypatch.setattr(branches, "_MOST", 3)
    found = [branches.branch_of(0, stream, number) for stream, number in ((5, 1), (5, 2), (6, 1))]
    assert len(set(map(id, found))) == 3
    assert found[1] is branches.branch_of(0, 5, 2)
    assert branches.branch_of(0, 7, 1) is None


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["persistent", "stepwise", "reference"])
@pytest.mark.parametrize("options", [{}, dict(input_dropout=0.2), dict(layer_norm=True), dict(proj_size=32)])
def test_graphs_of_calls_with_lengths_and_what_is_drawn(engine: str, options: dict[str, Any]) -> None:
    """Of calls that are planned in the graph too."""
    layer = whorl.LSTM(64, 64, device="cuda", engine=engine, zoneout=0.2, recurrent_dropout=0.2, **options)
    x = torch.randn(9, 16, 64, device="cuda", requires_grad=True)
    lengths = torch.arange(1, 17, device="cuda").clamp(max=9)

    def passes() -> list[Tensor]:
        layer.plan(x, lengths=lengths)
        y = layer(x, lengths=lengths)[0]
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

    graph, captured = in_a_graph(passes)
    for _ in range(2):
        torch.manual_seed(7)
        wanted = passes()
        torch.manual_seed(7)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "tf32", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_graphs_give_what_calls_do(name: str, precision: str) -> None:
    """Captured one after the other and replayed in turns; in a graph products run beside each other."""
    kind, options, _ = LAYERS[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        both = [getattr(whorl, kind)(96, units, device="cuda", dtype=dtype, **options) for units in (128, 64)]
        x = torch.randn(30, 32, 96, device="cuda", dtype=dtype, requires_grad=True)
        wanted = [gradients(name, layer, x) for layer in both]
        graphs = [in_a_graph(lambda layer=layer: gradients(name, layer, x)) for layer in both]
        for _ in range(3):
            for (graph, captured), eager in zip(graphs, wanted, strict=True):
                for tensor in captured:
                    tensor.fill_(torch.nan)
                torch.manual_seed(5)  # a graph has not what was seeded as it was captured
                graph.replay()
                torch.cuda.synchronize()
                assert all(map(torch.equal, captured, eager))


@pytest.mark.gpu
@pytest.mark.parametrize("states", [False, True], ids=["", "states of all steps"])
@pytest.mark.parametrize("precision", ["bf16", "tf32", "float32"])
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_graphs_of_layers_with_options_are_right(name: str, precision: str, states: bool) -> None:
    """What is drawn is so anew at each replay, from torch's generator: the same as calls from the same seed draw."""
    kind, options = WITH_OPTIONS[name]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        layer = getattr(whorl, kind)(96, 64, device="cuda", dtype=dtype, engine="persistent", **options)
        x = torch.randn(30, 32, 96, device="cuda", dtype=dtype, requires_grad=True)

        def passes() -> list[Tensor]:
            y = layer(x, return_states=states)[0]
            return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

        graph, captured = in_a_graph(passes)
        for _ in range(3):
            torch.manual_seed(7)
            wanted = passes()
            for tensor in captured:
                tensor.fill_(torch.nan)
            torch.manual_seed(7)
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, captured, wanted))


@pytest.mark.gpu
def test_a_graph_has_two_branches() -> None:
    layer = whorl.GRU(128, 128, device="cuda")
    x = torch.randn(30, 32, 128, device="cuda", requires_grad=True)
    graph, _ = in_a_graph(lambda: gradients("LSTM", layer, x))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        graph.replay()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    assert any(after[0] < before[1] and "gemm" in after[2] for before, after in pairwise(spans))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "tf32", "float32"])
@pytest.mark.parametrize("kind, shape", [("GRU", (2, 20, 35, 650)), ("LSTM", (2, 32, 100, 128))])
def test_a_graph_is_replayed_beside_calls_on_the_stream_that_captured_it(
    kind: str, shape: tuple[int, ...], precision: str
) -> None:
    """torch has one workspace of cuBLAS for a stream, which both would write to, and hands out streams in turns."""
    count, batch, time, units = shape
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"):
        layer = getattr(whorl, kind)(units, units, num_layers=count, device="cuda", dtype=dtype)
        x = torch.randn(time, batch, units, device="cuda", dtype=dtype, requires_grad=True)

        def step() -> list[Tensor]:
            y = layer(x)[0]
            return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            wanted = step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=side):
            captured = step()
        graph.replay()
        alone = [one.clone() for one in captured]  # layers beside each other may have other bits than one by one
        for _ in range(30):
            for _ in range(5):
                graph.replay()
            with torch.cuda.stream(side):
                calls = [step() for _ in range(3)]
            torch.cuda.synchronize()
            assert all(map(torch.equal, captured, alone))
            assert all(all(map(torch.equal, one, wanted)) for one in calls)
