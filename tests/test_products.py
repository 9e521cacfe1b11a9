"""Products of whole matrices by cuBLAS: any layout, any dtype, and the precision asked for, not torch's switch.

Behind those, large products of true float32 as three of TF32: the kernel that splits, and what cuBLAS is given.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import whorl
from comparison import assert_agrees, draw, error, make
from cubins import cubin
from emulation import CHIP, _matrix, emulated
from test_machine_code import listed, nvdisasm
from whorl.bench.baseline import to_tf32
from whorl.engines.cuda import aligned, beside, layers, products, split
from whorl.engines.cuda.aligned import Copied, Products
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.plain import Plain
from whorl.engines.cuda.products import Product, better_together, each_product, handle, laid, product
from whorl.engines.cuda.split import Split
from whorl.engines.cuda.tiling import Chip

gpu = pytest.mark.gpu
EPS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAYOUTS = {
    "plain": lambda rows, columns: torch.randn(rows, columns),
    "turned": lambda rows, columns: torch.randn(columns, rows).t(),
    "a part of rows": lambda rows, columns: torch.randn(rows, columns + 5)[:, 3 : 3 + columns],
    "a part of columns, turned": lambda rows, columns: torch.randn(columns, rows + 3)[:, 1 : 1 + rows].t(),
    "every second": lambda rows, columns: torch.randn(rows, 2 * columns)[:, ::2],
    "the same row": lambda rows, columns: torch.randn(1, columns).expand(rows, columns),
}


def drawn(layout: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """On the GPU as it lies on the CPU; the storage goes with it."""
    made = LAYOUTS[layout](rows, columns)
    whole = made.as_strided((made.untyped_storage().nbytes() // 4,), (1,), 0).to("cuda", dtype)
    return whole.as_strided(made.shape, made.stride(), made.storage_offset())


@gpu
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("b", LAYOUTS)
@pytest.mark.parametrize("a", LAYOUTS)
def test_a_product_is_right_however_matrices_lie(a: str, b: str, dtype: torch.dtype) -> None:
    for rows, depth, columns in [(33, 20, 47), (1, 9, 5), (7, 1, 3), (4, 6, 1), (1, 1, 1)]:
        left, right = drawn(a, rows, depth, dtype), drawn(b, depth, columns, dtype)
        true = left.double() @ right.double()
        assert error(product(left, right), true) <= EPS[dtype]
        room = torch.full((rows, columns + 4), 2.0, device="cuda", dtype=dtype)
        product(left, right, room.narrow(1, 1, columns))
        assert error(room[:, 1:-3], true) <= EPS[dtype]
        product(left, right, room.narrow(1, 1, columns), add=True)
        assert error(room[:, 1:-3], 2 * true) <= 2 * EPS[dtype]
        assert (room[:, :1] == 2).all()
        assert (room[:, -3:] == 2).all()
        wide = product(left, right, wide=True)
        assert wide.dtype == torch.float32
        assert error(wide, true) <= EPS[torch.float32]


def test_a_graphs_products_write_to_a_workspace_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's is that of the stream which captures it, on which calls go on while the graph is replayed on another."""
    given: list[tuple[int, int, int]] = []
    monkeypatch.setattr(products, "_spaces", {})
    with emulated(folder) as patch:
        products.cublas().cublasSetWorkspace_v2 = lambda *place: given.append(place) or 0
        handle(torch.bfloat16)
        assert not given
        patch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
        for made in (3, 4, 3):  # of two threads
            patch.setattr(torch._C, "_cuda_getCurrentBlasHandle", lambda made=made: made)
            assert handle(torch.bfloat16) == made
            assert given[-1] == (made, products._spaces[made].data_ptr(), 32 << 20)
    assert [one for one, *_ in given] == [3, 4, 3]
    assert given[1][1] != given[2][1]
    assert len(products._spaces) == 2


@pytest.mark.parametrize("major, asked, size", [
    (9, None, 32 << 20), (8, None, 8320 << 10), (9, ":16:8", 128 << 10), (9, ":4096:2:16:8", 8320 << 10),
    (9, ":0:0", 0),
])  # fmt: skip
def test_a_workspace_is_as_large_as_torchs(
    major: int, asked: str | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else cuBLAS might choose another kernel in a graph, whose results have other bits."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(major=major))
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", asked)
    assert products.workspace.__wrapped__(0).shape == (size,)


@gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_float32_is_as_precise_as_asked_whatever_torchs_switch_of_products_says(allowed: bool) -> None:
    a, b = torch.randn(2, 300, 300, device="cuda")
    true, before = a.double() @ b.double(), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    assert error(product(a, b), true) < 1e-6
    assert 1e-5 < error(product(a, b, tf32=True), true) < 1e-3
    assert error(a @ b, true) < (1e-3 if allowed else 1e-6)
    assert (error(a @ b, true) > 1e-5) == allowed
    torch.backends.cuda.matmul.allow_tf32 = before


@gpu
def test_a_long_sum_of_float32_is_as_precise_as_a_short_one() -> None:
    a, b = torch.randn(25_600, 4096, device="cuda"), torch.randn(25_600, 1024, device="cuda")
    assert error(product(a.t(), b), a.double().t() @ b.double()) < 1.2e-6
    a, b = torch.randn(5817, 413, device="cuda"), torch.randn(413, 4, device="cuda")
    assert error(product(a, b), a.double() @ b.double()) < 2e-7


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
def test_a_long_sum_of_float32_is_made_of_parts(
    turned: tuple[int, int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (torch.randn(*shape) for shape in ((6, 2500), (2500, 7)))
    a, b = (one.t().contiguous().t() if way else one for one, way in zip((a, b), turned, strict=True))
    (a, a_turned, a_step), (b, b_turned, b_step) = laid(a), laid(b)
    assert (a_turned, b_turned) == turned
    with emulated(folder):
        depths, library = [], products.cublas()
        multiply = library.cublasGemmEx
        library.cublasGemmEx = lambda *given: depths.append(given[5].value) or multiply(*given)
        narrow = [125] * 20
        for large, high, shallow, tf32, wanted in (
            (41, 9, 2500, False, [1250, 1250]), (42, 9, 2500, False, [2500]), (0, 0, 2500, True, [2500]),
            (42, 6, 2500, False, narrow), (42, 7, 2500, False, [2500]), (42, 6, 2499, False, [2500]),
            (41, 6, 2500, False, [1250, 1250]),
        ):  # fmt: skip
            monkeypatch.setattr(products, "_LARGE", large)
            monkeypatch.setattr(products, "_HIGH", high)
            monkeypatch.setattr(products, "_SHALLOW", shallow)
            depths.clear()
            made = torch.full((6, 7), 3.0)
            ready = Product(torch.float32, (6, 2500, 7), turned, (a_step, b_step, 7), tf32)
            for add in (False, True):
                ready(handle(torch.float32), a.data_ptr(), b.data_ptr(), made.data_ptr(), add)
            assert depths == wanted * 2
            assert error(made, 2 * a.double() @ b.double()) < (1e-3 if tf32 else 1e-5)  # every part, at its place


def several(count: int, rows: int, depth: int, columns: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Parts of rows, turned, as gates lie beside each other; whole matrices; and room for what is made of them."""
    parts = torch.randn(depth, count * rows + 2).to(device, dtype)[:, 1:-1].unflatten(1, (count, rows)).permute(1, 2, 0)
    whole = torch.randn(count, depth, columns).to(device, dtype)
    return [parts, whole, torch.full((count, rows, columns), 3.0, device=device, dtype=dtype)]


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_several_products_in_one_launch(dtype: torch.dtype, folder: Path) -> None:
    a, b, made = several(3, 5, 6, 7, dtype, "cpu")
    with emulated(folder):
        each_product(a, b, made)
    assert error(made, a.double() @ b.double()) <= EPS[dtype]


@pytest.mark.parametrize(
    "gates, units, rows, element, together",
    [
        (4, 128, 3200, 4, False), (4, 256, 3200, 4, True), (4, 256, 12800, 4, False), (4, 512, 12800, 4, False),
        (4, 1024, 12800, 4, True), (3, 128, 960, 4, True), (3, 256, 3200, 4, False), (3, 512, 3200, 4, True),
        (3, 1024, 12800, 4, False), (4, 256, 12800, 2, True),
    ],
)  # fmt: skip
def test_several_products_are_one_launch_where_that_was_faster(
    gates: int, units: int, rows: int, element: int, together: bool
) -> None:
    assert better_together(gates, units, rows, element) is together


@gpu
@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("count, rows, depth, columns", [(1, 1, 1, 1), (3, 5, 6, 7), (4, 256, 1000, 256)])
def test_several_products_in_one_launch_on_a_gpu(
    count: int, rows: int, depth: int, columns: int, dtype: torch.dtype
) -> None:
    a, b, made = several(count, rows, depth, columns, dtype, "cuda")
    each_product(a, b, made)
    assert error(made, a.double() @ b.double()) <= EPS[dtype]


host = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
LAST = 2.0**-23
TURNED = [(0, 0), (0, 1), (1, 0), (1, 1)]
SIZES = [(33, 20, 48), (64, 37, 23), (5, 7, 10), (1, 1, 1), (130, 64, 4), (3, 256, 9)]


@pytest.fixture
def multiplied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """The sizes that cuBLAS was given; groups are of 8 numbers, and every product is worth it and goes in pieces."""
    monkeypatch.setattr(split, "LEAST", 0)
    monkeypatch.setattr(split, "TALL", 0)
    monkeypatch.setattr(split, "WIDER", 0)
    monkeypatch.setattr(split, "_FEWEST", 16)
    monkeypatch.setattr(split, "DEEPEST", 8)
    monkeypatch.setattr(split, "ROOM", 6000)
    monkeypatch.setattr(aligned, "LEAST", 0)
    torch.use_deterministic_algorithms(True)  # memory is full of NaN before it is written
    found: list[tuple[int, int, int]] = []
    with emulated(folder):
        library = products.cublas()
        real = library.cublasGemmEx

        def multiply(handle: int, *given: Any) -> int:
            b_turned, a_turned, columns, rows, depth, _, b, kind, b_step, a, _, a_step, *_, how, _ = (
                getattr(one, "value", one) for one in given
            )
            if how == products._TF32:
                found.append((rows, depth, columns))
                for at, turned, high, wide, step in (
                    (a, a_turned, rows, depth, a_step), (b, b_turned, depth, columns, b_step),
                ):  # fmt: skip
                    part = _matrix(at, kind, *((wide, high) if turned else (high, wide)), step)
                    assert torch.equal(to_tf32(part).nan_to_num(), part.nan_to_num())
                    assert at % 16 == step % 4 == 0
            return real(handle, *given)

        monkeypatch.setattr(library, "cublasGemmEx", multiply)
        yield found
    torch.use_deterministic_algorithms(False)


def of_parts(exact: bool = True, sizes: tuple[int, ...] = (1,)) -> Products:
    return Products(CHIP, 0, 4, sizes, 1, exact)


def turn(matrix: Tensor, turned: int) -> Tensor:
    """The same numbers, in the first columns of wider rows, or (`turned`) the other way round."""
    matrix = matrix.t() if turned else matrix
    made = torch.cat([matrix, torch.full((len(matrix), 3), torch.nan)], 1)[:, : matrix.shape[1]]
    return made.t() if turned else made


def lengthened(a: Tensor, b: Tensor, turned: tuple[int, int], add: bool = False) -> Tensor:
    """a @ b between other columns, which stay."""
    out = torch.full((a.shape[0], b.shape[1] + 5), 2.0)
    of_parts()(turn(a, turned[0]), turn(b, turned[1]), out[:, 1 : 1 + b.shape[1]], add)
    assert (out[:, :1] == 2).all()
    assert (out[:, 1 + b.shape[1] :] == 2).all()
    return out[:, 1 : 1 + b.shape[1]]


@host
@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_three_products_of_tf32_are_the_product_in_float32(
    sizes: tuple[int, int, int], turned: tuple[int, int], multiplied: list
) -> None:
    rows, depth, columns = sizes
    a, b = torch.randn(rows, depth), torch.randn(depth, columns)
    true = a.double() @ b.double()
    allowed = 2 * error(a @ b, true) + 4 * LAST
    assert error(lengthened(a, b, turned), true) <= allowed
    whole = columns % 4 == 0 and not (turned[0] and rows % 4)
    deepest = max(deep for _, deep, _ in multiplied)
    assert sum(high * deep * wide for high, deep, wide in multiplied) >= 3 * rows * depth * columns
    assert deepest <= 3 * 8
    count = len(multiplied)
    assert error(lengthened(a, b, turned, add=True), true + 2) <= allowed + LAST
    assert len(multiplied) == (2 * count if whole else count)  # what is added to something is not copied


@host
def test_tf32_itself_and_two_of_the_three_would_be_seen(multiplied: list) -> None:
    a, b = torch.randn(40, 64), torch.randn(64, 48)
    true, high = a.double() @ b.double(), [to_tf32(a), to_tf32(b)]
    assert error(high[0] @ high[1], true) > 1e-4
    assert error(a @ high[1], true) > 1e-4
    assert error(of_parts()(a, b), true) < 3e-7


@host
@pytest.mark.parametrize("turned", TURNED, ids=str)
def test_their_sums_of_more_than_2048_are_made_of_parts(
    turned: tuple[int, int], multiplied: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "DEEPEST", 256)
    monkeypatch.setattr(split, "ROOM", 96 << 10)
    a, b = torch.randn(12, 2500), torch.randn(2500, 8)
    true = a.double() @ b.double()
    assert error(lengthened(a, b, turned), true) <= 2 * error(a @ b, true) + 4 * LAST
    assert [deep for _, deep, _ in multiplied] == [3 * 252] * 10  # of 250, and zeros


@host
@pytest.mark.parametrize("of_a, of_b", [(1e-30, 1.0), (1e30, 1e-30), (1e17, 1e18), (1e-20, 1e-18), (1e-38, 1e20)])
def test_they_take_numbers_of_any_size(of_a: float, of_b: float, multiplied: list) -> None:
    a = torch.randn(40, 64) * of_a * 2.0 ** torch.randint(-3, 4, (40, 1))
    b = torch.randn(64, 48) * of_b * 2.0 ** torch.randint(-3, 4, (1, 48))
    far = (of_parts()(a, b).double() - a.double() @ b.double()).abs()
    ordinary = a.double().abs() @ b.double().abs()
    least = 2.0**-137 * (b.double().abs().sum(0) + a.double().abs().sum(1, keepdim=True)) + 64 * 2.0**-149
    assert (far <= 2.0**-21 * ordinary + least).all()


@host
def test_each_number_is_its_two_parts(multiplied: list) -> None:
    """Times one: ends of ranges, halves of a last place, and what would be rounded to infinity."""
    most = torch.finfo(torch.float32).max
    values = [0.0, -0.0, 1.0, 1 + 2**-11, 1 - 2**-12, -1 - 3 * 2**-12, 1 + LAST, most, -most, 2.0**-126, 2.0**-100 / 3]
    given = torch.tensor([values, values[::-1]])
    made = of_parts()(given, torch.eye(len(values)))
    far = (made.double() - given.double()).abs() / given.double().abs().clamp(min=2.0**-149)
    assert (far <= torch.where(given.abs() == most, 2.0**-22, 2.0**-23)).all()
    assert torch.equal(made[0, :7], given[0, :7])


@host
@pytest.mark.parametrize("turned", TURNED, ids=str)
def test_what_is_not_finite_stays_what_it_is(turned: tuple[int, int], multiplied: list) -> None:
    inf = torch.inf
    some = torch.tensor([inf, -inf, torch.nan, torch.nan, 0.0, 1.0, -1.0, 1 + 2.0**-12, -1 - LAST, 3e18])
    some.view(torch.int32)[3] = 0x7F800001  # in the first 10 bits of its mantissa it is infinite
    a, b = torch.ones(len(some), 9), torch.ones(9, len(some))
    a[:, 4], b[4] = some, some
    wanted = a @ b
    made = lengthened(a, b, turned)
    assert torch.equal(made.isnan(), wanted.isnan())
    assert torch.equal(made.isinf() * made.sign(), wanted.isinf() * wanted.sign())
    assert wanted[wanted.isinf()].numel() == 24
    a[:, 4] = torch.randn(len(some))
    a[2, 1], b[4], b[1, 3] = inf, torch.randn(len(some)), -inf
    a[3, 4], b[4, 5] = 1e30, 1e30
    assert torch.equal(lengthened(a, b, turned).isfinite(), (a @ b).isfinite())


@host
@pytest.mark.parametrize("sizes", [(1, 6), (5, 6)])
@pytest.mark.parametrize("cell, form", [("LSTM", {}), ("GRU", dict(num_layers=2, bidirectional=True))], ids=str)
def test_a_layer_of_true_float32(cell: str, form: dict[str, Any], sizes: tuple[int, int], multiplied: list) -> None:
    torch.manual_seed(1)
    layer = make(whorl, cell, 7, 10, dtype=torch.float32, engine="persistent", **form)
    assert_agrees(layer, *draw(cell, "time first", 4, sizes[0], 7, True, layer))
    ((_, ran),) = layers._prepared.values()
    assert type(ran) is Plain
    assert multiplied
    multiplied.clear()
    mask = torch.ones(4, sizes[0], dtype=torch.bool)  # not by addresses
    (y, _), (again, _) = layer(torch.ones(4, sizes[0], 7)), layer(torch.ones(4, sizes[0], 7), mask=mask)
    torch.testing.assert_close(y, again)
    assert multiplied


@host
def test_tf32_is_not_split(multiplied: list) -> None:
    ready = of_parts().ready(torch.float32, (4, 8, 4), (0, 0), (8, 4, 4), tf32=True)
    assert isinstance(ready, Product)
    assert isinstance(of_parts(exact=False).ready(torch.float32, (4, 8, 4), (0, 0), (8, 4, 4)), Product)


def test_parts_have_room_that_does_not_grow_with_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cublas", lambda: SimpleNamespace(cublasGemmEx=None))
    for sizes in (
        (3840, 1024, 4096),
        (25_600, 512, 2048),
        (1 << 20, 2048, 4096),
        (4096, 1 << 20, 1024),
        (2048, 700, 100_000),
    ):
        for turned in TURNED:
            rows, depth, columns = sizes
            steps = rows if turned[0] else depth, depth if turned[1] else columns, columns
            made = Split(sizes, turned, steps, (rows, columns), lambda *_: None, 0)  # type: ignore[arg-type]
            assert 0.5 * split.ROOM <= made._room.shape[0] <= 1.1 * split.ROOM


@pytest.mark.skipif(missing() is not None, reason=f"{missing()}")
def test_the_kernel_that_splits_compiles_for_every_chip_that_takes_it(tmp_path: Path) -> None:
    for major, minor in split._FAST:
        code = cubin(beside.splitter(), "split", Chip((major, minor), 132).architecture)
        assert b"split_float32" in code
        if nvdisasm():
            lines = listed(code, tmp_path / "split.cubin")
            assert not any(re.search(r"\b(LDL|STL)\b", line) for line in lines)  # nothing is spilled
            assert sum("STG.E.128" in line for line in lines) == 3


@pytest.mark.parametrize(
    "exact, most, capability, wanted",
    [(True, split.LEAST, (9, 0), True), (True, split.LEAST, (8, 0), True), (True, split.LEAST, (8, 9), False),
     (False, split.LEAST, (9, 0), False), (True, split.LEAST - 1, (9, 0), False)],
)  # fmt: skip
def test_where_three_products_are_needed(exact: bool, most: int, capability: tuple[int, int], wanted: bool) -> None:
    assert split.needed(exact, most, Chip(capability, 132)) == wanted


@pytest.mark.parametrize(
    "sizes, wanted",
    [
        ((3840, 1024, 4096), True), ((3840, 1024, 3072), True), ((3840, 512, 2048), True), ((25_600, 256, 1024), True),
        ((25_600, 128, 512), True), ((25_600, 128, 384), True), ((12_400, 168, 504), False),
        ((700, 1500, 6000), False), ((1024, 512, 2048), False), ((256, 1024, 4096), False),
        ((3840, 4096, 1024), False), ((4096, 3840, 1024), False), ((6000, 700, 1500), False),
        ((4096, 256, 1024), False),
        ((25_600, 1024, 256), False), ((1024, 25_600, 256), False),
    ],
)  # fmt: skip
def test_what_is_worth_three_products(sizes: tuple[int, int, int], wanted: bool) -> None:
    """Which took less time on an H200, with sums of 128 (rows, depth, columns)."""
    assert split.worth(*sizes) == wanted


@gpu
@pytest.mark.parametrize("turned", TURNED, ids=str)
@pytest.mark.parametrize(
    "sizes", [(3840, 1024, 4096), (2501, 501, 1603), (1500, 1501, 1203), (4096, 3840, 1024), (600, 5000, 3001)], ids=str
)
def test_a_large_product_on_a_gpu(sizes: tuple[int, int, int], turned: tuple[int, int]) -> None:
    rows, depth, columns = sizes
    own = torch.cuda.get_device_properties(0)
    chip = Chip((own.major, own.minor), own.multi_processor_count)
    a, b = (torch.randn(shape, device="cuda") for shape in ((rows, depth), (depth, columns)))
    a, b = (one.t().contiguous().t() if way else one for one, way in zip((a, b), turned, strict=True))
    true = a.double() @ b.double()
    made = Products(chip, 0, 4, sizes, rows * depth * columns, True)
    ready = made.ready(torch.float32, sizes, turned, tuple(products.laid(one)[2] for one in (a, b)) + (columns,))
    of_parts = isinstance(ready._aligned if isinstance(ready, Copied) else ready, Split)
    assert of_parts == (chip.capability in split._FAST and split.worth(*sizes))
    allowed = 2 * error(products.product(a, b), true) + 4 * LAST
    out = made(a, b)
    assert error(out, true) <= allowed
    assert torch.equal(made(a, b), out)
    assert error(made(a, b, out, add=True), 2 * true) <= allowed
