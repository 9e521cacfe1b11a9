"""What cuDNN takes on an H200, as far as it decides which of two engines is the faster."""

import torch

from whorl.cells import library
from whorl.engines.cuda import split
from whorl.engines.cuda.stepwise import Stepwise
from whorl.engines.native import CuDNN
from whorl.problem import Problem

_TERMS = {
    (2, False): (5.2, 0.45, 0.0108), (2, True): (13.8, 0.76, 0.0349),
    (4, False): (7.4, 0.45, 0.0150), (4, True): (26.8, 1.7, 0.0682),
    (8, False): (7.0, 4.1, 0.076), (8, True): (5.0, 9.2, 0.322),
}  # fmt: skip
"""By bytes of an element (8: float32 without TF32) and whether it trains."""
_TWO = 1.55  # times, of both directions: 1.49 to 1.64 were measured
_ODD = 2.6  # times, of units that are no multiple of 8: 1,500 in bfloat16 took 2.3 to 3.0 times


def step_time(problem: Problem) -> float:
    """Microseconds of a step of one layer, with its share of the products of whole matrices.

    Fitted to LSTM and GRU on one H200 (driver 580.159.04, cuDNN 9.19, torch 2.11, 2026-11-21), a call of 32 steps in a
    CUDA graph: to 7 percent in the mean, in bfloat16 512 to 2,048 units at batch 1 to 1,024, with TF32 512 units at
    batch 128 to 512.  Without TF32 to calls of 30 to 200 steps, 512 to 2,048 units at batch 20 to 128, one to three
    layers (2026-11-22): to 13 percent in the mean; LSTM of 1,500 units at batch 20 took 48 and 69 us, 49 estimated.
    """
    width = problem.dtype.itemsize * (1 + (problem.dtype == torch.float32 and not problem.tf32))
    least, of_weights, of_rows = _TERMS[width, problem.gradient]
    units = problem.form.units
    step = least + of_weights * (units / 512) ** 2 + of_rows * problem.batch * (units / 512) ** 1.5
    step *= _TWO if problem.form.directions == 2 else 1.0
    return step * (_ODD if units % 8 and width == 2 else 1.0)


class CuDNNBesideStepwise(CuDNN):
    """cuDNN, but for what engine `stepwise` does in less time."""

    def slower(self, problem: Problem) -> list[str]:
        """In true float32, of more units than one launch holds.

        The products with x of `stepwise` are made on tensor cores (split.py), which is most of what it gains.  With
        2,048 units at batch 64, 100 steps as CUDA graphs, it took of cuDNN's time in inference and training LSTM 0.88
        and 0.87, GRU 0.81 and 0.82 (H200, 2026-11-28).  An earlier text, whose kernels took 2.6 us a step longer
        forward and 3.9 backward, and which up to 2,048 units made some products in four sums, since left out, took over
        40 steps of both with 1,600 to 3,072 units at batch 32 to 128 0.70 to 0.97 and 0.78 to 0.99; at batch 256 0.84
        to 1.00 and 0.93 to 1.05, at 1 1.07 and 1.11, in two directions 1.04 and 1.01, and where x has few columns, 256,
        LSTM 1.03 and 0.89.  Not where torch's products of matrices are of TF32, which those of each step then are.
        """
        form, gates = problem.form, len(problem.form.cell.gates)
        device = problem.device
        if problem.dtype != torch.float32 or problem.tf32 or device.tf32_products or device.capability != (9, 0):
            return []
        plain = form.cell in (library.lstm.graph, library.gru.graph) and not form.projection and form.directions == 1
        if not plain or problem.packed or not 1600 <= form.units <= 3072 or not 32 <= problem.batch <= 128:
            return []
        rows, inputs = problem.time * problem.batch, [form.layer_inputs(layer) for layer in range(form.layers)]
        if not all(2 * of >= form.units and split.worth(rows, of, gates * form.units) for of in inputs):
            return []
        if Stepwise().obstacles(problem):
            return []
        what = f"{'training' if problem.gradient else 'inference'} of {form.units} units at batch {problem.batch}"
        return [f"{what} in float32 takes less time step by step, with products of x on tensor cores"]
