"""LSTMCell, GRUCell and RNNCell: torch.nn's states and gradients for one step, and a layer's for many."""

import pytest
import torch
from torch import Tensor

import whorl
from comparison import CELLS, assert_exact, flat, make, results, twin, weighted

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
ENGINES = ["reference", "auto"]


def _states(cell: str, *shape: int) -> Tensor | tuple[Tensor, Tensor]:
    h, c = torch.randn(2, *shape, dtype=torch.float64)
    return (h, c) if cell == "LSTM" else h


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("initial", [False, True], ids=["zeros", "initial"])
@pytest.mark.parametrize("batch", [(), (0,), (1,), (3,)], ids=["unbatched", "batch 0", "batch 1", "batch 3"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", [(1, 1), (5, 11), (33, 2)], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_equals_torch(
    cell: str, sizes: tuple[int, int], bias: bool, batch: tuple[int, ...], initial: bool, engine: str
) -> None:
    layer = make(whorl, f"{cell}Cell", *sizes, bias=bias, dtype=torch.float64, engine=engine)
    x = torch.randn(*batch, sizes[0], dtype=torch.float64)
    hx = _states(cell, *batch, sizes[1]) if initial else None
    assert_exact(results(layer, x, hx), results(twin(layer), x, hx))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_of_a_cell_is_a_layer_of_one_step(cell: str, dtype: torch.dtype, bias: bool) -> None:
    """Bit for bit, so that what test_layers shows of each dtype and engine holds for the cells."""
    one = make(whorl, f"{cell}Cell", 5, 11, bias=bias, dtype=dtype)
    layer = make(whorl, cell, 5, 11, bias=bias, dtype=dtype)
    layer.load_state_dict({f"{name}_l0": weight for name, weight in one.state_dict().items()})
    x, hx = torch.randn(3, 5, dtype=torch.float64), _states(cell, 3, 11)
    lifted = tuple(state[None] for state in hx) if cell == "LSTM" else hx[None]
    of_cell = results(one, x, hx)
    of_layer = results(layer, x[None], lifted, loss=lambda outputs: weighted([out[0] for out in outputs[1:]]))
    assert one.plan(x.to(dtype)).engine == layer.plan(x[None].to(dtype)).engine
    finals = [name for name in of_layer if name.startswith("output")][1:]
    renamed = {name: of_layer[name] for name in of_layer if not name.startswith("output")}
    renamed = {f"output {index}": of_layer[name] for index, name in enumerate(finals)} | renamed
    assert len(renamed) == len(of_cell)
    for (name, got), expected in zip(of_cell.items(), renamed.values(), strict=True):
        assert torch.equal(got, expected.view_as(got)), name


@pytest.mark.parametrize("cell", CELLS)
def test_a_loop_of_steps_is_torchs_layer(cell: str) -> None:
    """Gradients through many steps, as streaming and decoding code has them."""
    one = make(whorl, f"{cell}Cell", 5, 11, dtype=torch.float64)
    layer = make(torch.nn, cell, 5, 11, dtype=torch.float64)
    layer.load_state_dict({f"{name}_l0": weight for name, weight in one.state_dict().items()})
    x = torch.randn(13, 3, 5, dtype=torch.float64)

    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, weight in one.named_parameters():
                self.register_parameter(f"{name}_l0", weight)

        def forward(self, x: Tensor) -> tuple:
            state, outs = None, []
            for step in x:
                state = one(step, state)
                outs.append(flat(state)[0])
            return torch.stack(outs), *[final[None] for final in flat(state)]

    assert_exact(results(Loop(), x), results(layer, x))


@pytest.mark.usefixtures("no_compiler")
def test_a_cell_of_one_step_is_never_slow() -> None:
    with whorl.settings(slow="error"):
        whorl.GRUCell(5, 7)(torch.randn(3, 5))
    assert whorl.GRUCell(5, 7).plan(torch.randn(3, 5)).engine == "reference"
    assert whorl.LSTMCell(5, 7).plan(torch.randn(3, 5)).engine == "onednn"


def test_a_cell_follows_its_engine() -> None:
    one, x = whorl.LSTMCell(5, 7), torch.randn(3, 5)
    one.engine = "reference"
    assert one.plan(x).engine == "reference"
    one.engine = "cudnn"
    with pytest.raises(whorl.UnsupportedError, match="the tensors are on cpu, cuDNN runs on cuda"):
        one(x)
