"""Engine `persistent`: all steps of a layer in one launch, with the recurrent weights on the chip."""

import bisect
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from whorl.cells import library
from whorl.cells.cell import Graph
from whorl.cells.expr import topological
from whorl.engines import taped
from whorl.engines.base import Continue, Engine, Grads
from whorl.engines.cuda import aligned, asked, cudnn, grid, projected_inside, sides, source, split
from whorl.engines.cuda.compile import missing
from whorl.engines.cuda.layers import Layers, exact, largest, layers
from whorl.engines.cuda.marked import Marked, is_marked, masks_of
from whorl.engines.cuda.norms import MOST_ROWS, inside, norm_of, normed
from whorl.engines.cuda.options import expected
from whorl.engines.cuda.overlapped import Overlapped, described, overlaps, part_of
from whorl.engines.cuda.plain import Plain, is_plain
from whorl.engines.cuda.prepare import (
    Numbers,
    adding_code,
    codes,
    filler_code,
    fills,
    halver_code,
    halving,
    norming_code,
    row_copier_code,
    shared_bytes,
    size_of,
    splitter_code,
)
from whorl.engines.cuda.projected import Projected
from whorl.engines.cuda.projected_inside import ProjectedInside, with_product
from whorl.engines.cuda.source import Features
from whorl.engines.cuda.spreading import Spread
from whorl.engines.cuda.staged import have_gradients, spreadable, staged
from whorl.engines.cuda.tiling import Chip
from whorl.engines.native import CuDNN
from whorl.errors import UnsupportedError
from whorl.problem import VIRTUAL, Call, Device, Outcome, Plan, Problem
from whorl.weights import kinds


class Persistent(Engine):
    name = "persistent"
    summary = "whorl's CUDA kernels, all steps in one launch and the recurrent weights on the chip"

    def obstacles(self, problem: Problem) -> list[str]:
        found = projected_inside.obstacles(problem)
        problem = with_product(problem)
        norm, problem = normed(problem), inside(problem)
        form, device = problem.form, problem.device
        cell = form.cell
        if device.kind != "cuda":
            return [f"the tensors are on {device.kind}, whorl's CUDA kernels run on cuda"]
        if not (8, 0) <= device.capability <= (9, 0):
            made_for = "these kernels are made for 8.0 to 9.0"
            found.append(f"the GPU has compute capability {_dotted(device.capability)}, {made_for}")
        found += [reason] if (reason := missing()) is not None else []
        if problem.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            found.append(f"the dtype is {problem.precision}, these kernels take float16, bfloat16 and float32")
        if problem.batch == 0:
            found.append("the batch is 0, these kernels take 1 or more")
        if norm and (rows := problem.time * problem.batch) > MOST_ROWS:
            found.append(f"x has {rows} rows, the kernel of its layer norm takes {MOST_ROWS} or fewer")
        if problem.virtual:
            found.append(VIRTUAL)
        features = expected(problem)
        of_masks = features.noise_gradient and features.noise in (source.HELD, source.GIVEN)
        if of_masks and not (cell.projection or have_gradients(cell)):
            what = f"what enters a product inside the step of {cell.name} has no gradient"
            found.append(f"{what}, these kernels then make none of masks of recurrent dropout")
        if form.units == 1 and any(node.op == "mean" for node in topological(cell.outputs)):
            found.append(f"the step of {cell.name} has means over 1 unit, these kernels take 2 units or more there")
        if not found and not fits(problem):
            most = most_units(problem)
            what = f"{form.units} units of {cell.name} in {problem.precision}"
            what += ", with options," * source.has_options(cell, features)
            together = "one cluster" if device.capability >= (9, 0) else "one block"
            spread = not staged(cell) or spreadable(cell)
            room = f"the {device.multiprocessors} multiprocessors" if spread else together
            found.append(f"{what} do not fit {room}, at most {most} do")
        return found

    def slower(self, problem: Problem) -> list[str]:
        """Where clusters come in rounds, or a step through L2 takes long; and GPUs that no kernel ran on yet.

        By estimates of a step, ours of the kernels alone.  An H200 ran calls of 32 steps in a CUDA graph, in bfloat16
        and in float32 with TF32 and without, up to 2,048 units and batch 1,024.  Where ours is more than 0.8
        (inference) or 0.75 (training) of cuDNN's, cuDNN took 0.45 to 1.17 times as long as we did, in 20
        measurements; where it is less, 0.99 to 4.07 times, in 82.  With fewer units, and below batch 64,
        cuDNN was never the faster.  But LSTM of 1,500 units with TF32 took 15 us a step at batch 20, and cuDNN 16.
        Without TF32, where products of whole matrices take most of the time, ours was 0.79 (inference) and 0.43
        (training) of cuDNN's where we took 1.20 and 0.98 times as long, 0.45 and 0.28 where we took 0.79 and 0.80, and
        with float32 as two float16 0.24 and 0.25 where LSTM took 0.62 and 0.78: 1,024 units at batch 128, 30 steps.
        With a projection, in two bytes, calls of 30 to 100 steps took cuDNN 1.3 to 6.3 times as long in 22 of 24 cases
        of 128 to 2,048 units, and 0.7 times in the two that the same rule leaves to it, 2,048 units at batch 128.
        In two bytes of more than 1,536 units, where products of whole matrices take more of the time (2,048 in
        bfloat16, 30 steps): at batch 64 cuDNN took 1.10 to 1.28 times as long, ours 0.50 to 0.61 of its estimate, at 96
        to 192 0.85 to 0.99 in training (0.59 and more) and 0.68 to 0.94 in inference (0.79 and more).
        """
        form = problem.form
        if problem.device.capability < (9, 0):
            return [f"it never ran on a GPU of compute capability {_dotted(problem.device.capability)}"]
        few = problem.batch < 64 and (problem.dtype.itemsize == 2 or problem.tf32 or form.units <= 1024)
        if form.units < 512 or few or CuDNN().obstacles(problem):
            return []
        plain = form.cell == library.lstm.graph and not form.projection
        wide = problem.dtype.itemsize == 2 and form.units > 1536
        if problem.dtype == torch.float16 and problem.batch <= 128 and plain and not wide:
            return []  # there its LSTM took 1.5 times the time whatever the rows
        # cuDNN takes the plain cells alone
        cell = with_product(problem).form.cell
        size = size_of(cell, form.units, problem.dtype.itemsize, exact=exact(problem))
        kinds = ("forward", "backward") if problem.gradient else ("forward",)
        own = sum(grid.step_time(size, _chip(problem.device), problem.batch, form.directions, kind) for kind in kinds)
        rival, shares = cudnn.step_time(problem), _TRAINING if problem.gradient else _INFERENCE
        share = shares["wide" if wide else "exact" if exact(problem) else "rounded"]
        if own <= share * rival:
            return []
        what = f"{'training' if problem.gradient else 'inference'} of {form.units} units at batch {problem.batch}"
        times = f"is estimated at {own:.0f} us a step, and cuDNN, with all products, at {rival:.0f}"
        return [f"{what} {times}: without those of whole matrices, {share:.0%} of that is the limit"]

    def numbers(self, problem: Problem) -> list[str]:
        lines = []
        if why := projected_inside.reason(problem):
            lines.append(f"the projection: a product inside each step, because of {why}")
        problem = with_product(problem)
        if normed(problem):
            lines.append("the layer norm of x: by a kernel of its own, for all steps before the first")
        whole, problem = problem, inside(problem)
        form, features, chip = problem.form, expected(problem), _chip(problem.device)
        size = size_of(form.cell, form.units, problem.dtype.itemsize, features, exact(problem))
        for kind in ("forward", "backward")[: 1 + problem.gradient]:
            where = (size, chip, problem.batch, form.directions, kind)
            tile = grid.choose(*where)
            assert tile is not None, "the obstacles say that it fits"
            how = "" if tile == grid.estimated(*where) else ", as `whorl tune` measured"
            reason = grid.closer(tile, size, chip, kind)
            shared = shared_bytes(kind, form.cell, tile, chip.architecture)
            text = grid.described(tile, shared, form.directions)
            lines.append(f"{kind}: {text}{how}{'; ' * bool(reason)}{reason}")
            if halving(Numbers(kind, form.cell, form.units, problem.dtype, tile, False, features)) is not None:
                lines[-1] += "; its weights become float16 in a kernel of its own before it"
            beside = described(whole, chip, kind)
            lines[-1] += f"; {beside}" * bool(beside)
        fault = taped.fault() or (asked.fault() if torch.version.cuda else "")
        if fault and (is_plain(whole) or is_marked(whole)):
            lines.append(f"calls go through Python: {fault}")
        return lines

    def at_once(self, plan: Plan, call: Call, by_python: Continue) -> Sequence[Tensor]:
        number = self.number(plan, call, by_python)
        return () if number < 0 else taped.run(number, call)

    def number(self, plan: Plan, call: Call, by_python: Continue, wait: bool = False) -> int:
        made = _way(plan, call.x.device, call)
        if not isinstance(made, Plain) or torch._C._cuda_getDevice() != made.index or not made.by_tape(call):
            return -1
        if asked.fault() or not (taped.ready() or (wait and not taped.finish())):
            return -1
        if made.number < 0:
            made.number = _number(plan, made, call, call.x.device, by_python)
        return made.number

    def forward(self, plan: Plan, call: Call) -> Outcome:
        made = _way(plan, call.x.device, call)
        if torch._C._cuda_getDevice() == made.index:
            return made.forward(call)
        with torch.cuda.device(made.index):  # cuBLAS and the driver work on the current one
            return made.forward(call)

    def backward(self, plan: Plan, call: Call, y: Tensor, saved: Sequence[Tensor], grads: Grads) -> Grads:
        made = _way(plan, call.x.device, call)
        if torch._C._cuda_getDevice() == made.index:
            return made.backward(call, y, saved, grads)
        with torch.cuda.device(made.index):
            return made.backward(call, y, saved, grads)


def _number(plan: Plan, made: Plain, call: Call, device: torch.device, by_python: Continue) -> int:
    """By which C++ knows the tapes of a plan that is ready on a device."""

    like = Call(call.x.new_empty(0), (), (), noise=tuple([mask.new_empty((0,) * mask.dim()) for mask in call.noise]))

    def on(index: int) -> int:
        there = torch.device("cuda", index)
        with torch.cuda.device(there):
            own = _way(plan, there, like)
            assert isinstance(own, Plain), "as it is on the device for which it was planned"
            return _number(plan, own, like, there, by_python)

    where = asked.gpu(made.index, -1 if device.type == "cpu" else made.index)
    form = plan.problem.form
    weights = len(kinds(form)) * form.layers * form.directions
    return taped.add(plan, made.written(), where, [False] * weights, by_python, on)


def _way(plan: Plan, device: torch.device, call: Call) -> Layers | Projected:
    """What runs a call on a device, made ready once."""
    made = layers(plan, device, lambda own, on: _made(own, on, call))
    return made.of(call) if isinstance(made, Plain) else made


def _made(plan: Plan, device: torch.device, call: Call) -> Layers | Projected:
    if plan.problem.form.projection:
        within = projected_inside.reason(plan.problem)
        return ProjectedInside(plan, device) if within else Projected(plan, device, _loops)
    problem = plan.problem
    return Marked(plan, device, masks_of(problem.form, call)) if is_marked(problem) else _loops(plan, device)


def _loops(plan: Plan, device: torch.device) -> Layers:
    problem = plan.problem
    if not is_plain(problem):
        return Layers(plan, device)
    kinds = ("forward", "backward")[: 1 + problem.gradient]
    beside = any(overlaps(problem, _chip(problem.device), kind) for kind in kinds)
    return (Overlapped if beside else Plain)(plan, device)


_INFERENCE = {"rounded": 0.8, "wide": 0.7, "exact": 0.6}
_TRAINING = {"rounded": 0.75, "wide": 0.58, "exact": 0.42}
"""Of what cuDNN takes, with rounded products, in two bytes of many units, and with exact ones: the rest is for products
of whole matrices."""


def warm(problem: Problem, chip: Chip) -> list[str]:
    """Compile what a problem needs on a chip into the store: the names of its kernels, which need no GPU.

    Raises:
        UnsupportedError: this engine cannot run the problem; the message has every reason.
    """
    reasons = Persistent().obstacles(problem)
    if reasons:
        raise UnsupportedError("\n  ".join([f"the engine 'persistent' cannot run {problem}:", *reasons]))
    problem = with_product(problem)
    norm = norm_of(problem.form, problem.dtype) if normed(problem) else None
    whole, problem = problem, inside(problem)
    form, features = problem.form, expected(problem)
    size, wanted = size_of(form.cell, form.units, problem.dtype.itemsize, features, exact(problem)), []
    for kind, flag in [("forward", problem.gradient)] + [("backward", form.bias)] * problem.gradient:
        tile = grid.choose(size, chip, problem.batch, form.directions, kind)
        assert tile is not None, "the obstacles say that it fits"
        wanted.append(Numbers(kind, form.cell, form.units, problem.dtype, tile, flag, features))
        if overlaps(whole, chip, kind):
            tile = grid.choose(size, part_of(chip, form.layers), problem.batch, form.directions, kind)
            assert tile is not None, "layers that run beside each other fit"
            wanted.append(wanted[-1]._replace(tile=grid.beside(tile), carried=True))
    made = codes(wanted, chip)
    made += [halver_code(one, chip) for one in map(halving, wanted) if one is not None]
    if any(map(fills, wanted)):
        made.append(filler_code(chip))
    if any(isinstance(one.tile, Spread) and one.tile.sided for one in wanted):
        made.append(sides.code(chip))
    if norm is not None:
        made += [norming_code(kind, norm, chip) for kind in ("forward", "backward")[: 1 + problem.gradient]]
    if problem.gradient and (form.bias or form.cell.vectors or norm is not None):
        made.append(adding_code(problem.dtype, chip))
    if split.needed(exact(problem), largest(problem)[1], chip):
        made.append(splitter_code(chip))
    copied = aligned.words(problem.dtype.itemsize, *largest(problem))
    return [name for name, _ in [*made, *(row_copier_code(word, chip) for word in copied)]]


def fits(problem: Problem) -> bool:
    """Whether kernels for such a problem fit its device."""
    problem = inside(with_product(problem))
    width = problem.dtype.itemsize, exact(problem)
    return _fits(problem.form.cell, problem.form.units, width, _chip(problem.device), expected(problem))


def most_units(problem: Problem) -> int:
    """The most units with which kernels for such a problem fit its device."""
    problem = inside(with_product(problem))
    width = problem.dtype.itemsize, exact(problem)
    return _most_units(problem.form.cell, width, _chip(problem.device), expected(problem))


@lru_cache(maxsize=8192)
def _fits(cell: Graph, units: int, width: tuple[int, bool], chip: Chip, features: Features) -> bool:
    size = size_of(cell, units, width[0], features, width[1])
    return all(grid.fits(size, chip, kind) for kind in ("forward", "backward"))


@lru_cache(maxsize=256)
def _most_units(cell: Graph, width: tuple[int, bool], chip: Chip, features: Features) -> int:
    """The most units, of multiples of 16, for which both kernels fit: those fit that are fewer."""

    def full(count: int) -> bool:
        return not _fits(cell, 16 * count, width, chip, features)

    end = 1
    while not full(end):
        end *= 2
    return 16 * (bisect.bisect_left(range(end), True, lo=1, key=full) - 1)


def _chip(device: Device) -> Chip:
    return Chip(device.capability, device.multiprocessors)


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
