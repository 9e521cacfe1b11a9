"""The numbers of the kernels for layers that one cluster cannot hold: pure functions, measured reasons beside them.

The regime of this page: blocks that exchange through L2 own some rows of the batch together, and hold all recurrent
weights of a layer and direction in their registers and shared memory.  All blocks of a launch run at once, one on each
multiprocessor; a batch of more rows than they can own takes several launches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product

from whorl.engines.cuda.staged import by_rounds, means_alone, pass_of, spreadable, steps
from whorl.engines.cuda.tiling import Chip, Size, registers

PERIOD = 8


def buffers(element: int) -> int:
    """That values of so many bytes pass through, as in exchange.cu."""
    return 4 * PERIOD if element == 2 else 2


@dataclass(frozen=True)
class Spread:
    """The numbers of one kernel; the `.cu` file says what each means."""

    slice: int
    """Units of a block."""
    sources: int
    """Forward: blocks that own the same rows.  Backward: such blocks are `sources` x `gathered`."""
    gathered: int
    """Backward: blocks whose gradients of gates one block multiplies; 1 in forward."""
    tiles: int
    """Groups of 8 sequences that are computed together."""
    subs: int
    """Times that a block does so at each step."""
    warps: int
    resident: int
    """Operands of 16 x 16 weights that stay in registers, of each warp."""
    shared: int
    groups: int = 0
    """Forward: groups of warps, each with strips of 16 rows of the product of its own; its warps share the depth."""
    depths: int = 0
    """Forward: steps of 8 words of depth of one warp."""
    wide: bool = False
    """Four warps multiply together, by instructions that read states, and weights past `resident`, from shared
    memory; on compute capability 9.0 alone."""
    parts: int = 1
    """In which a part of the sequences' words arrive."""
    beside: bool = False
    """Forward: the product of a part of the units runs while the next part is on its way."""
    lull: int = 0
    """Cycles before a block asks for all that others give, or for all of a part; 0: it asks for some, and for the rest
    when they came."""
    sided: bool = False
    """Its blocks take places among those that are on the same side of L2 (sides.py)."""
    chunk: int = 0
    """Backward: strips of 16 units whose sums a warp holds at once."""
    exact: bool = False
    """As in `Size`."""
    halves: bool = False
    """float32 enters products, and travels between blocks, as float16, scaled."""
    by_step: bool = False
    """Forward: a sequence's states of a block have a scale anew at each step, which travels behind them."""
    collected: bool = False
    """One block takes what means are made of from all, and gives them to all; else each takes from all."""
    aside: bool = False
    """What no step changes of a unit, and sums over the steps, stay in shared memory and leave registers to weights."""
    whole: bool = False
    """A block has the cell of whole sequences, one of each, and other blocks none of it."""

    cluster = 1

    @property
    def blocks(self) -> int:
        """That own the same rows."""
        return self.sources * self.gathered

    @property
    def of_sequences(self) -> bool:
        """Whether a block has the cell of whole sequences, each of which then has a row of the sums backward."""
        return self.whole

    @property
    def early(self) -> bool:
        """Whether what is known early comes first, backward (`staged.Pass.early`)."""
        return self.whole

    @property
    def planes(self) -> int:
        """Of what enters a product."""
        return 2 if self.halves and self.exact else 1

    @property
    def rows(self) -> int:
        """That these own."""
        return 8 * self.tiles * self.subs

    def at_once(self, chip: Chip) -> int:
        """Groups of rows, in one direction or both, that run at once."""
        return chip.multiprocessors // self.blocks


def scaled(size: Size, kind: str) -> bool:
    """Whether a kernel of a kind multiplies float32 as float16, scaled: as two, forward, where products are exact."""
    if size.exact:
        return kind == "forward" and size.contained
    return size.halves and (kind == "backward" or size.contained or size.staged is None)


def by_step(size: Size, kind: str) -> bool:
    """Whether such a kernel finds the scale of states anew at each step: they may be of any size."""
    return kind == "forward" and not size.contained and scaled(size, kind)


def operand(size: Size, kind: str) -> int:
    """Bytes of what enters a product."""
    return 2 if scaled(size, kind) else size.element


def forward(
    size: Size, units: int, tiles: int, subs: int, warps: int, groups: int, limit: int, resident: int | None = None,
    parts: int = 1, wide: bool = False, spilled: int = 0, collected: bool | None = None, aside: bool = False,
) -> Spread | None:  # fmt: skip
    """The forward kernel's numbers for blocks of so many units, if they fit.

    Args:
        units: of a block, even.
        limit: bytes of shared memory of a block.
        resident: operands in registers; None takes as many as registers allow, and `spilled` more.
        parts, wide, collected, aside: as in `Spread`; collected None decides.
    """
    halves, anew = scaled(size, "forward"), by_step(size, "forward")
    planes = 1 + (halves and size.exact)
    if anew and units & (units - 1):  # threads of one warp find the scale of a sequence's states
        return None
    blocks, splits, rows, words = -(-size.units // units), warps // groups, 8 * tiles, 4 // operand(size, "forward")
    rounds = _rounds(size, "forward")
    whole = 16 if rounds else 8  # else a strip of the product's rows would have more than one gate, or more than two
    if ((size.bits or size.masks) and units % whole) or (wide and rounds):
        return None
    (strips, share), depths = _strips(size, units, groups), -(-size.units // (8 * words * splits))
    own = -(-rows // min(rows, 32 * warps // (units // 2)))
    across, down = -(-size.units // (128 * words)), -(-rows // warps) * planes
    # Of exact products, which end in runs, it takes longer: LSTM with 1,500 units at batch 20 43.2 us a step of both
    # layers where 40.4 (one H200).  With lengths or a reset the compiler spills 9 to 18 words for it.
    beside = wide and size.bare
    arriving = 4 * (down * splits * -(-depths // (16 * parts)) if beside else -(-down * across // parts))
    pair = size.gate // 2  # registers of two neighbours
    sums = share * tiles * 4 * (2 if share * tiles < 4 else 1) + 4 * tiles * (not wide)
    if planes > 1:
        sums = share * tiles * 12
    late = planes > 1 and subs > 1  # a part's input is read while its own product is computed
    after = own * (2 * _results(size) + 2 * size.gates + 4 * size.states)
    live = max(sums + arriving * (beside and parts > 1), arriving + (after if subs > 1 or rounds else 0), after)
    live += (1 if late else subs + 1) * own * size.gates * pair
    live += 2 * subs * own * size.states + subs * own * size.ahead + (not aside) * 2 * (_results(size) + size.vectors)
    live += _FORWARD_TWO[wide] + 24 * (tiles - 1) * (not wide) if planes > 1 else _extra(size, _FORWARD_EXTRA, tiles)
    live += 8 * tiles * (size.bits or bool(size.masks)) + _inside(size, "forward")
    live += 16 * (anew and wide and parts == 1)  # else 29 words of LSTM with 1,500 units at batch 20 are spilled
    if rounds:  # else the compiler spills a few words, in true float32 a hundred
        live += (8 if operand(size, "forward") == 2 else 4) if own == 1 else 4 * (not halves)
    if size.exact and subs > 1 and not halves:
        live += 12  # else the compiler spills 300 words of GRU, 1,024 units at batch 128
    if aside and own > 1:  # what a thread reads again for each of its sequences brings nothing
        return None
    fits = (registers(warps) - live) // 4 + spilled
    resident = min(planes * share * depths, max(0, fits)) if resident is None else resident
    states = splits * depths * 2 * (planes * rows * 4 + 4) if wide else planes * rows * (splits * depths * 8 + 4)
    partial = splits * rows * (strips * 16 + 4)
    sole = not rounds and words == 2 and share * 16 == units and units % 16 == 0  # each warp has rows of one gate
    deep = 8 // tiles // 2 * 2  # depths whose bits lie in a word
    masks = size.bits * splits * subs * 32 * (groups * -(-depths // deep) if sole else depths * tiles)
    scales = (warps * share * 16 + rows * subs * (1 + anew)) * halves + anew * rows * _behind(blocks) // 2
    fixed = aside * (_results(size) + size.gates + size.vectors) * units
    together = min(4, strips) if wide and planes > 1 and groups == 4 else 4  # strips of four warps in shared memory
    streamed = warps * (planes * share * depths - resident) * 32 * together
    shared = 4 * (streamed + states + partial + masks + scales + fixed)
    if shared > limit:
        return None
    made = (units, blocks, 1, tiles, subs, warps, resident, shared, groups, depths, wide, parts, beside)
    at_once = subs == planes == 1 and size.staged is None and operand(size, "forward") == 2
    # with scales that travel a train step of 1,024 units at batch 32 took 1,144 us, without a lull 1,080
    at_once = at_once and arriving <= _MOST_AT_ONCE[wide] and not anew
    cycles = _LULL_MANY[size.element] if tiles > 2 else _LULL_PARTS if parts > 1 else _LULL[wide]
    lull = cycles * at_once
    # with options other registers would be spilled; with TF32 products, 1,024 units at batch 128, a step would have 10
    # instructions for what is
    sided = lull > 0 and size.bare and (tiles < 3 or size.element == 2)
    # layer norm of r and c, train steps of 100 (one H200): 1,024 units at batch 8 821 us and by sides 796, at 32 1,016
    # and 985, at 64 1,244 and 1,238, but 32 sequences a tile at 128 2,245 and 2,256; 768 at 32 892 and 865
    sided = sided or (_has_means(size) and size.element == 2 and blocks <= _OF_A_SIDE // (2 if tiles < 3 else 4))
    return Spread(
        *made, lull=lull, sided=sided, exact=size.exact, halves=halves, by_step=anew, aside=aside,
        collected=_collected(size, "forward", units, tiles, subs, collected),
    )  # fmt: skip


def backward(
    size: Size, units: int, gathered: int, tiles: int, subs: int, warps: int, limit: int, resident: int | None = None,
    parts: int = 1, wide: bool = False, spilled: int = 0, collected: bool | None = None, aside: bool = False,
) -> Spread | None:  # fmt: skip
    """The backward kernel's numbers for blocks of so many units that multiply the gradients of `gathered` blocks."""
    sources, rounds = -(-size.units // (units * gathered)), _rounds(size, "backward")
    halves, depth = scaled(size, "backward"), 32 // operand(size, "backward")  # elements of 8 words
    if gathered * size.recurrent * units % depth or ((size.bits or size.masks or rounds) and units % depth):
        return None
    if wide and rounds:
        return None
    if halves and units & (units - 1):  # a block's gradients of a sequence have a scale, found by threads of one warp
        return None
    rows, strips, depths = 8 * tiles, -(-size.units // (16 * gathered)), gathered * size.recurrent * units // depth
    share = -(-strips // warps)
    chunk = share if wide else min(2, share)
    at_once = 32 * warps // (units // 2)  # sequences of which all threads compute the cell
    computed = rows * next((n for n in range(subs, 1, -1) if gathered > 1 and subs % n == 0 and n * rows <= at_once), 1)
    step = min(computed, at_once)
    own, turns = -(-computed // step), subs * rows // computed
    summed = size.gates + size.apart + size.vectors
    pair = size.gate // 2
    item = (size.gates + size.apart) * pair + size.element + 2 * (size.states - 1)
    scales = gathered * halves
    across = -(-(gathered * size.recurrent * units // depth * 2 + _behind(scales) // 4) // 32)
    arriving = 4 * -(-(-(-rows // warps) * across) // parts) if gathered > 1 else 0
    sums = chunk * tiles * 4 * (2 if chunk * tiles < 4 and not wide else 1) + 4 * tiles * (not wide)
    sums += arriving if subs > 1 else 0
    before = max(2 * min(sources, 32), 2 * size.gates + 4 * _results(size) + 4 * size.states)
    live = max(sums, before, arriving) + turns * own * (item + 2 * size.states)
    # aside: what compiles without spills (LSTM with layer norm of r and c)
    live += 32 * (units < 32 or (halves and tiles * subs > 1)) if aside else 2 * (summed + size.vectors)
    # and 8 fewer, but with five gates 16 words are spilled so: in bfloat16 1,024 units at batch 32 464 us and 442, 768
    # 428 and 409; in float16, which was not timed, 4 or 8 words are spilled with some units, two at each step
    live -= 8 * (aside and units == 32 and tiles == subs == 1 and size.element == 2 and size.recurrent < 5)
    live += turns * own * -(-size.back // 2)
    live += _extra(size, _BACKWARD_EXTRA, tiles)
    live += 2 * share * halves - 16 * wide
    live += (8 if wide else 6) * chunk * tiles * (size.bits or bool(size.masks)) + _inside(size, "backward")
    if aside and own > 1:
        return None
    fits = (registers(warps) - live) // 4 + spilled
    if not (wide or size.staged) and tiles == subs == 1 and warps == 8 and operand(size, "backward") == 2:
        fits = max(fits, min(38 if halves else 40, fits + _more(size, gathered)))
    resident = min(share * depths, max(0, fits)) if resident is None else resident
    if wide:
        gradients = (depths * 2 + _behind(scales) // 4) * (rows * 4 + 4)
    else:
        slots, each = 1, depths * 8
        if size.staged is not None and rounds:  # one gate after another
            slots, each = max(1, steps(size.staged).leaves), gathered * units // depth * 8
        gradients = rows * ((slots * (each + _behind(scales)) + 3) // 8 * 8 + 4)
    words = warps * (share * depths - resident) * 128 + 2 * gradients
    words += size.bits * strips * subs * tiles * 32
    words += aside * (-(-size.vectors // 2) * 2 * units + -(-summed // 2) * 2 * step * units)
    shared = 4 * max(words, step * summed * units)
    if shared > limit:
        return None
    made = (units, sources, gathered, tiles, subs, warps, resident, shared)
    at_once = gathered > 1 and subs == 1 and size.staged is None and operand(size, "backward") == 2
    lull = _LULL_BACK * (at_once and arriving <= _MOST_AT_ONCE[wide and tiles < 3])
    nearby = _has_means(size) or (subs == 1 and (tiles == 1 or wide))
    sided = lull > 0 or (nearby and not size.exact and sources * gathered <= _OF_A_SIDE)
    one = _collected(size, "backward", units, tiles, subs, collected)
    return Spread(
        *made, wide=wide, parts=parts, lull=lull, sided=sided, chunk=chunk, exact=size.exact,
        halves=halves, collected=one, aside=aside,
    )  # fmt: skip


def whole(size: Size, units: int, tiles: int, limit: int, resident: int | None = None) -> Spread | None:
    """The numbers of kernels/spread_whole_forward.cu, if the step can go so and they fit; arguments as in `forward`.

    Without options and products inside the step, in two bytes, where a thread has two units of a sequence at most.
    """
    blocks, warps = -(-size.units // units), 8
    fitting = units % 8 == 0 and 8 * tiles <= blocks and size.units <= 64 * warps
    if not fitting or not means_alone(size, "forward") or size.element != 2:
        return None
    strips, rows = units // 8 * -(-size.recurrent // 2), 8 * tiles
    groups = 4 if strips <= 4 else 8
    share, depths = -(-strips // groups), -(-size.units // (16 * (warps // groups)))
    if resident is None:
        live = _WHOLE + 4 * share * tiles * (2 if share * tiles < 4 else 1)
        resident = min(share * depths, max(0, registers(warps) - live) // 4)
    states = warps // groups * depths * 2 * (rows * 4 + 4)
    means = 2 * steps(size.staged).forward.whole_words(warps)
    shared = 4 * (warps * (share * depths - resident) * 128 + states + means)
    if shared > limit:
        return None
    return Spread(
        units, blocks, 1, tiles, 1, warps, resident, shared, groups, depths, wide=True, lull=_LULL_WHOLE,
        sided=blocks <= _OF_A_SIDE // 4, whole=True,
    )  # fmt: skip


def whole_back(
    size: Size, units: int, gathered: int, tiles: int, limit: int, resident: int | None = None
) -> Spread | None:  # fmt: skip
    """The numbers of kernels/spread_whole_backward.cu, if they fit and the step can go so; arguments of `backward`."""
    sources, warps = -(-size.units // (units * gathered)), 8
    fitting = gathered * units % 16 == 0 and 8 * tiles <= sources * gathered <= 64 * warps // units
    if not fitting or not means_alone(size, "backward") or size.element != 2:
        return None
    own = pass_of(steps(size.staged), "backward", True)
    if any(one.moments for one in own.reductions):
        return None
    strips, depths, rows = -(-size.units // (16 * gathered)), size.recurrent * gathered * units // 16, 8 * tiles
    share = -(-strips // warps)
    if resident is None:
        live = _WHOLE + 4 * share * tiles * (2 if share * tiles < 4 else 1)
        live += 20 * (max(map(own.packs, range(own.stages))) > 2)  # layer_norm_lstm: else 3 words are spilled
        resident = min(share * depths, max(0, registers(warps) - live) // 4)
    summed = size.gates + size.apart + size.vectors
    aside = (2 * size.vectors + 4 * -(-summed // 2)) * 32 * warps
    gradients = depths * 2 * (rows * 4 + 4)
    shared = 4 * (warps * (share * depths - resident) * 128 + 2 * gradients + own.whole_words(warps) + aside)
    if shared > limit:
        return None
    return Spread(
        units, sources, gathered, tiles, 1, warps, resident, shared, wide=True, lull=_LULL_BACK, chunk=share,
        sided=sources * gathered <= _OF_A_SIDE, whole=True,
    )  # fmt: skip


_OF_A_SIDE = 66
"""Blocks that own the same rows for which a side of an H200's L2 has room.  Backward where none waits for a lull, train
steps of 100 in microseconds, by their numbers and by sides, each in one run: LSTM in bfloat16 with 512 units at batch
128 561 and 556, dropout by step 623 and 614, GRU 497 and 484, TF32 products 973 and 958; 640 at 64 655 and 636, 768 at
64 755 and 735, 384 at 128 432 and 429, 320 at 128 and 256 at 256 as before.  Layer norm of r and c, whose means pass
through L2 too, 512 at 128 954 and 940 (by sides forward too 920), TF32 1,376 and 1,356 (but forward then 29 more),
1,024 at 64 1,272 and 1,249, at 128 2,325 and 2,251 (forward alike), TF32 3,968 and 3,875.  Where several parts of rows
or two tiles of one warp come in turns it brought nothing or less: 512 at 256 1,018 and 1,029, 1,024 at 128 1,543 and
1,550, by step 1,608 and 1,640, GRU with 768 at 128 1,098 and 1,113 (H200s, 2026-11-29).
Exact products were not timed."""
_LULL, _LULL_PARTS, _LULL_MANY, _LULL_BACK = {False: 200, True: 220}, 160, {2: 500, 4: 150}, 100
"""Cycles forward since a block has given its states, where one warp multiplies and where four do, where those of up
to 16 sequences come in parts, and of more than 16 at a time, by bytes; of four bytes since their outputs were written:
LSTM with 1,024 units at batch 128 took 4.38 to 4.41 us a step of saving so, and 4.95 where 500 cycles began with what
was given (two H200s).  Backward since what a step leaves is written.  In us a step, LSTM, inference (H200): 512 units
at batch 128 1.39, with 200 cycles 1.41, with 260 1.46; and where lanes went on alone (exchange.cu) 1,024 at 32 1.74,
with 300 1.77, 768 at 16 1.11, with 350 1.18, 1,024 at 128 with TF32 products 3.82, with 300 3.95.

Words arrive some 280 cycles after they were sent from the same side of L2, and an answer takes as long as they did."""
_WHOLE = 127  # registers of addresses and of the cell itself
_LULL_WHOLE = 150
"""Cycles before a block asks for its sequence's results: with 80, 150 and 220 100 steps of 512 units at batch 128 took
within 3 us of each other."""
_MOST_AT_ONCE = {False: 16, True: 32}
"""Registers of a thread for what it asks for at once, at most: the second forward where four warps multiply, backward
there up to 16 sequences (LSTM with 1,024 units at batch 64 3.84 us a step without a lull and 3.54 with one, GRU 3.37
and 2.99, at batch 32 with TF32 products 3.84 and 3.42; H200)."""


def _collected(size: Size, kind: str, units: int, tiles: int, subs: int, asked: bool | None) -> bool:
    """Whether one block makes the means of a sequence for all, each of at most one sequence."""
    if size.staged is None or 8 * tiles * subs > -(-size.units // units):
        return False
    return _taken(size, kind, units, tiles) > 12 if asked is None else asked


def _taken(size: Size, kind: str, units: int, tiles: int) -> float:
    """KB that a block takes from blocks of so many units in one exchange of means, without `collected`."""
    return 8 * tiles * -(-size.units // units) * max(_given(size, kind)) / 256


def _rounds(size: Size, kind: str) -> int:
    """Products inside the step."""
    return 0 if size.staged is None else len(getattr(steps(size.staged), kind).rounds)


def _results(size: Size) -> int:
    """Of the recurrent weights in a step: several of a gate whose weights are in several products."""
    return size.recurrent if size.staged is None or not size.staged.products else len(steps(size.staged).links)


def _strips(size: Size, units: int, groups: int) -> tuple[int, int]:
    """Of 16 rows of the product, forward, and how many of them a warp has."""
    if size.staged is None or not _rounds(size, "forward"):
        strips = -(-size.recurrent * units // 16)
        return strips, -(-strips // groups)
    share = sum(-(-len(gates) * units // (16 * groups)) for gates in by_rounds(steps(size.staged)).values())
    return share * groups, share


def _behind(scales: int) -> int:
    """Words of so many scales behind a sequence's gradients: whole pieces of 16 bytes."""
    return -(-scales // 4) * 4


_FORWARD_EXTRA, _BACKWARD_EXTRA = 60, 72  # registers of addresses and of the cell itself: what compiles without spills
_FORWARD_TWO = {False: 88, True: 60}
"""The same of what is multiplied as two float16, by one warp and by four together, which load none of the states."""


def _more(size: Size, gathered: int) -> int:
    """Operands that stay in registers beyond those that the estimate leaves, backward, where one warp multiplies.

    Nothing is spilled, but a word of a peephole LSTM with TF32 products and every option.  On an H200 a step of LSTM
    with 512 units at batch 128 took 3.00 us and takes 2.83, GRU 2.77 (in a cluster) and 2.44, with TF32 products 3.53
    (in a cluster) and 3.12, 3.08 (in a cluster) and 2.75, over 40 steps.  With options it was not timed by itself, but
    for dropout by step in two bytes: a train step of 100 with 512 units at batch 128 took 611 us with 34 operands, 607
    with 36 to 38, 605 with 39 (2026-11-29); masks that are held would spill a word of those.
    """
    if size.drawn and size.back >= _BY_STEP and size.element == 2 and gathered == 1:
        return 9
    if gathered > 1:
        return (4 + 2 * (size.element == 4)) * size.bare
    return (6 if size.bare else 2 if size.bits or size.masks else 4) + 2 * (size.element == 4)


_BY_STEP = 18
"""Registers backward that options take where dropout by step is among what is drawn; masks that are held take fewer."""


def _extra(size: Size, base: int, tiles: int) -> int:
    """Of four bytes more, and where each operand is split into two."""
    if base == _FORWARD_EXTRA:
        return base + (12 + 4 * (tiles - 1)) * size.exact
    return base + 8 * (size.element == 4) + (16 + 4 * (tiles - 1)) * size.exact


def _inside(size: Size, kind: str) -> int:
    """Registers of what means between the stages of a step take: what compiles with few spills."""
    if size.staged is None:
        return 0
    made = steps(size.staged)
    if kind == "forward":
        return 2 * made.forward.kept + 2 * len(made.forward.reductions)
    return made.backward.kept


def _given(size: Size, kind: str) -> list[int]:
    """Words that a block gives of a sequence after each stage, as spread_means.cu has them."""
    if size.staged is None:
        return [0]
    own = steps(size.staged).forward if kind == "forward" else steps(size.staged).backward
    numbers = [own.numbers(stage) for stage in range(own.stages)]
    return [4 * -(-count // 4) if count > 2 else 2 * (count > 0) for count in numbers]


def _has_means(size: Size) -> bool:
    """Whether the step has means."""
    return any(any(_given(size, kind)) for kind in ("forward", "backward"))


def _means(size: Size, tile: Spread, kind: str) -> int:
    """Words of a sequence of what means are made of, as spread_means.cu lays them out."""
    members = -(-size.units // tile.slice) + tile.collected
    return sum(-(-members * words // 4) * 4 for words in _given(size, kind))


def words(size: Size, tile: Spread, batch: int, directions: int, kind: str) -> int:
    """Words of 4 bytes of L2 through which the blocks of a launch exchange."""
    if tile.whole and kind == "backward":
        ring = buffers(size.element) * tile.sources * size.recurrent * tile.gathered * tile.slice // 2
        sums = 2 * tile.sources * tile.gathered * -(-size.units // (16 * tile.gathered)) * 16
        return directions * batch * (ring + sums)
    if tile.whole:
        ring = buffers(size.element) * -(-size.units // 8) * 4
        results = 2 * tile.warps // tile.groups * -(-size.recurrent // 2) * tile.blocks * tile.slice * 2
        return directions * batch * (ring + results)
    means, width = 2 * directions * batch * _means(size, tile, kind), 2 if tile.halves else size.element
    rounds = _rounds(size, kind)
    if kind == "forward":
        ring = buffers(width) * (tile.planes * -(-size.units * width // 16) * 4 + _behind(tile.blocks * tile.by_step))
        return (1 + rounds) * directions * batch * ring + means
    slots, gates = 1, size.recurrent
    if size.staged is not None and rounds:
        slots, gates = steps(size.staged).leaves + rounds, 1
    ring = tile.gathered * gates * tile.slice * width // 4 + _behind(tile.gathered * tile.halves)
    ring *= tile.sources * slots * buffers(width) * (tile.gathered > 1)
    return directions * batch * (ring + (1 + rounds) * 2 * tile.sources * tile.blocks * tile.slice) + means


def candidates(size: Size, chip: Chip, kind: str) -> Iterator[Spread]:
    """Every tile of a kind ("forward" or "backward") that fits the chip, of those worth a look."""
    least = -(-size.units // max(1, chip.multiprocessors))
    if least > 64 or (size.staged is not None and not spreadable(size.staged)):  # more than any block holds
        return
    found: Iterator[Spread | None]
    yield from _whole_candidates(size, chip, kind)
    width = operand(size, kind)
    # in two bytes one part fits; in four, blocks of half the units take longer than some operands that are spilled (of
    # layer norm, 1,024 units at batch 128, the compiler spills 6 words of the 48 that it seems to have too few)
    ways = [(parts, 0) for parts in ((1, 2, 4) if width == 4 else (1, 2) if size.staged else (1,))]
    if size.staged and width == 4:
        ways += [(4, spilled) for spilled in (2, 4, 8)]
    shapes: tuple[tuple[int, int], ...] = _SHAPES
    if _rounds(size, kind):  # 32 sequences at a time: parts that are taken in turn wait for each product
        shapes, ways = (*_SHAPES, (4, 1)), [*ways, (4, 0)] if width == 2 else ways
    if width < size.element:
        ways += [(1, spilled) for spilled in ((2, 4, 8, 12) if size.staged else (2, 4, 8))]
    places = (True, False) if size.staged else (False,)  # with means between the stages registers are short
    if kind == "backward":
        smallest = () if width == 2 else {max(8, -(-least // 4) * 4), 24}
        for units, (tiles, subs) in product(_of(size, {16, 32, 48, 64, *smallest}), shapes):
            counts = (1, 2, 4, 8, 12, 16) if units % 16 == 0 else range(1, 17)
            for gathered, warps in product(counts if units >= least else (), (8, 12)):
                if gathered == 1 or gathered * units < 2 * size.units:
                    given = size, units, gathered, tiles, subs, warps, chip.shared
                    found = (
                        backward(*given, parts=parts, spilled=spilled, aside=aside)
                        for aside, (parts, spilled) in product(places, ways)
                    )
                    yield from _first(found, chip)
        if not _four_warps(size, chip, kind):
            return
        for units, gathered, (tiles, subs) in product((16, 32), (2, 4, 8, 12, 16), _WIDE_BACK):
            if units >= least and gathered * units < 2 * size.units:
                given = size, units, gathered, tiles, subs, 8, chip.shared
                found = (
                    backward(*given, parts=parts, wide=True, spilled=spilled, aside=aside)
                    for aside, (parts, spilled) in product(places, _wide_ways_back(size, tiles, subs))
                )
                yield from _first(found, chip)
        return
    slices = {max(8, -(-least // 4) * 4), *(units for units in (8, 12, 16, 24, 32, 48, 64) if units >= least)}
    if size.exact and scaled(size, kind):
        two = list(_two(size, chip, sorted(slices)))  # past the most units of these TF32 has room for some more
        yield from two or candidates(size._replace(contained=False), chip, kind)
        return
    for units, (tiles, subs), groups in product(_of(size, slices), shapes, (1, 2, 4)):
        given = size, units, tiles, subs, 8, groups, chip.shared
        # masks by gate: one launch is worth a few words that are spilled: of LSTM, 1,024 units at batch 128, the
        # compiler spills 6, and in two groups of warps 70
        more = [(1, 6)] if size.bits and size.element == 2 and groups == 4 else []
        found = (
            forward(*given, parts=parts, spilled=spilled, aside=aside)
            for aside, (parts, spilled) in product(places, ways + more)
        )
        yield from _first(found, chip)
        if _in_parts(size) and (tiles, subs) == (2, 4) and groups == 1:
            yield from _first(iter([forward(*given, parts=2, spilled=_OF_PARTS[width < size.element])]), chip)
    if not _four_warps(size, chip, kind):
        return
    for units, shape in product(_of(size, slices), _WIDE_SHAPES):
        given = size, units, *shape, 8, 4 if size.recurrent * units <= 64 else 8, chip.shared
        found = (
            forward(*given, parts=parts, wide=True, spilled=spilled, aside=aside)
            for aside, (parts, spilled) in product(places, _wide_ways(size, units, shape))
        )
        yield from _first(found, chip)


def _whole_candidates(size: Size, chip: Chip, kind: str) -> Iterator[Spread]:
    """Those whose blocks have whole sequences, of shapes that were timed.

    LSTM with layer norm of r and c, 512 units at batch 128, 100 steps (one H200 each): forward in 32 blocks of 16 units
    and 32 sequences 383 us, in 16 of 32 and 16 280; backward in 8 x 2 blocks 373 us, in 4 x 4 346, 2 x 8 do not fit.
    """
    if not _four_warps(size, chip, kind):
        return
    for units, tiles in product((32, 24, 40), (1, 2)):
        if kind == "forward":
            yield from _first(iter([whole(size, units, tiles, chip.shared)]), chip)
        else:
            yield from _first(iter([whole_back(size, units, 4, tiles, chip.shared)]), chip)


def _two(size: Size, chip: Chip, slices: Sequence[int]) -> Iterator[Spread]:
    """Forward, of what is multiplied as two float16."""
    for units, (tiles, subs), groups, parts in product(slices, _SHAPES, (1, 2, 4), (1, 2, 4)):
        if subs == 1:  # of several parts the compiler spills 60 to 250 words
            yield from _first(iter([forward(size, units, tiles, subs, 8, groups, chip.shared, parts=parts)]), chip)
    if not _four_warps(size, chip, "forward"):
        return
    for units, (tiles, subs), parts in product(slices, _WIDE_SHAPES + _WIDE_TWO, (1, 2, 4)):
        given = size, units, tiles, subs, 8, 4 if size.recurrent * units <= 64 else 8, chip.shared
        # LSTM with 1,500 units at batch 20: 10 words are spilled of 8 operands that there seem to be too many
        found = (forward(*given, parts=parts, wide=True, spilled=spilled) for spilled in (0, 2, 4, 6, 8))
        yield from _first(found, chip)


def _four_warps(size: Size, chip: Chip, kind: str) -> bool:
    """Whether four warps may multiply together: forward not by gate, where each gate has states of its own."""
    of_all = not size.masks and (kind == "backward" or not size.bits) and (size.staged is None or size.element == 2)
    of_all = of_all and not _rounds(size, kind)  # which multiplies few gates at a time
    return chip.capability == (9, 0) and operand(size, kind) == 2 and of_all


def _in_parts(size: Size) -> bool:
    """Whether four times 16 sequences forward may arrive in two parts each: measured was GRU with 2,048 units."""
    return size.bare and size.recurrent == 3 and size.units > 1536


def _wide_ways(size: Size, units: int, shape: tuple[int, int]) -> Sequence[tuple[int, int]]:
    """Parts in which states arrive forward, and operands that are spilled."""
    if size.staged:
        return (1, 0), (2, 0), (4, 7)  # means of 32 sequences at once are worth operands that are spilled
    scaled = operand(size, "forward") < size.element
    if size.bare and shape == (4, 1):
        return _WIDE_QUARTERS_SCALED if scaled else _WIDE_QUARTERS[size.recurrent > 3]
    if size.bare and shape == (3, 1) and size.units > 1024 and not scaled:
        return _WIDE_THIRDS
    if size.bare and shape == (2, 1) and size.recurrent * units > 64 and not scaled:
        return [(min(4, -(-size.units // 256)), 0)]  # a part is 16 bytes of each lane for a row
    more: tuple[int, ...] = _WIDE_MORE if size.ahead or size.gate > size.element else ()
    more += _WIDE_SCALED.get((units, *shape), ()) if scaled else ()
    return [(1, 0), (2, 0), *((2, spilled) for spilled in more)]


def _wide_ways_back(size: Size, tiles: int, subs: int) -> Sequence[tuple[int, int]]:
    """Parts in which gradients arrive, and operands that are spilled."""
    bare = size.bare and scaled(size, "backward") and (tiles, subs) in ((3, 1), (4, 2))
    return _WIDE_WAYS_BARE if bare else _WIDE_WAYS


def _of(size: Size, slices: set[int]) -> list[int]:
    """Those with which a size may be cut: for means the threads of a warp have whole sequences."""
    return sorted(units for units in slices if not _has_means(size) or units & (units - 1) == 0)


def _first(found: Iterator[Spread | None], chip: Chip) -> Iterator[Spread]:
    yield from islice((tile for tile in found if tile is not None and tile.blocks <= chip.multiprocessors), 1)


_SHAPES = ((1, 1), (2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (1, 4), (2, 3), (2, 4), (1, 6), (1, 8))
_WIDE_BACK = ((2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (2, 4))  # with 8 columns they bring nothing
_WIDE_WAYS = ((1, 0), (2, 0), (4, 0), (4, 2), (4, 4))  # parts, and operands that are spilled
_WIDE_WAYS_BARE = ((1, 0), (2, 0), (4, 0), (2, 7), (4, 2), (4, 4))
"""LSTM with TF32 products, 2,048 units at batch 64, of which 15 words are read again, took 12.2 us a step in two
parts of what arrives, and 12.9 in four, of which 2 are (H200)."""
_WIDE_MORE = (1, 2, 3, 4)
"""Operands that stay in registers where options take some and the plain layer's tile would not fit: more than are
counted, of which the compiler spills few or none.  LSTM in bfloat16, 1,024 units at batch 128, then has 32 sequences at
a time with zoneout, dropout, a mask or a clip too, and 1,340 to 1,500 instructions of a warp a step, where 16 in turn
take 1,970 to 2,190 and the plain layer 1,385."""
_WIDE_SCALED = {(32, 4, 1): (5, 6, 7, 8), (16, 2, 2): (4,)}
"""The same with TF32 products, by units of a block, sequences and their parts. Of 32 sequences at a time and 32 units
a block the plain layer, of which nothing is spilled, took 491 us over 100 steps where 16 in turn took 538, and with
zoneout, of which 5 words are, 545 and 637; a train step with a mask (7 words) 2,790 and 2,905. LSTM with 2,048 units at
batch 64, of which nothing is, took 12.7 us a step in two parts of 16 sequences, and 18.6 in four of 8 (H200)."""
_OF_PARTS = {False: 2, True: 0}
"""Operands that are spilled where `_in_parts` says so, by whether products are TF32's: GRU with 2,048 units at batch 64
took 1,358 us over 100 steps in one part in float16 and 1,236 so, with two operands less or more 1,265 and 1,275; in
bfloat16 1,249 and 1,242, with TF32 products 1,671 and 1,599 (H200)."""
_WIDE_QUARTERS = {False: [(4, -2)], True: [(4, 2), (4, 0)]}
_WIDE_QUARTERS_SCALED = [(4, 2), (4, 5), (4, 6)]
"""Of 32 sequences the product of a quarter of the units runs while the next quarter is on its way. With 1,024 units at
batch 128 a step took LSTM 4.09 us, in halves 4.06, where all had to be there 4.17; GRU 3.72, 3.81 and 3.92.  GRU with
two operands less than are counted in registers, of which none is spilled, takes 3.36 and saved 3.38 us; with as many 6
words are, where lanes go on alone (exchange.cu), and it took 3.30 and 3.57 (H200)."""
_WIDE_THIRDS = [(3, -1)]
"""Of 24 sequences and more than 1,024 units each third is few enough registers for a lull: with 1,500 units at batch 20
a step took LSTM 3.12 us, saved 3.12, all there without one 3.28 and 3.23; GRU, which would spill a word with an operand
more in registers, 3.02 and 3.06, it was 3.21 and 3.18.  With TF32 products 3.29, but saved 3.54 where 3.48 (H200)."""
_WIDE_SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (1, 4))
_WIDE_TWO = ((1, 2), (1, 3), (1, 6), (2, 3), (2, 4))  # of states in two planes fewer are held at a time


def fits(size: Size, chip: Chip, kind: str) -> bool:
    """Whether any tile of a kind fits."""
    return bool(_fitting(size, chip, kind))


def choose(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> Spread | None:
    """The tile of a kind that takes the least time by the estimate below; None where none fits."""
    found = _fitting(size, chip, kind)
    return min(found, key=lambda tile: _time(size, chip, batch, directions, kind, tile), default=None)


def likely(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> list[Spread]:
    """Every tile of a kind that fits, the one that is estimated to be the fastest first."""
    found = _fitting(size, chip, kind) if operand(size, kind) == 2 else ()
    return sorted(found, key=lambda tile: _time(size, chip, batch, directions, kind, tile))


def step_time(size: Size, chip: Chip, batch: int, directions: int, kind: str) -> float:
    """Microseconds that a step of the chosen tile takes, estimated; all launches of a batch together."""
    tile = choose(size, chip, batch, directions, kind)
    assert tile is not None, "asked for what fits"
    many = kind == "forward" and size.element == 2 and tile.tiles == 2 and tile.blocks > 120
    return _time(size, chip, batch, directions, kind, tile) * (_MANY if many else 1.0)


_MANY = 0.82
"""Of the estimate, forward in two bytes in blocks nearly as many as multiprocessors, of 16 sequences at a time: with
2,048 units at batch 64 LSTM took 12.1 us a step where 14.9 were estimated, GRU 10.0 and 12.4.  100 steps of that LSTM
took 1,643 us with cuDNN, in bfloat16, and 1,431 with these kernels, in float16, on one H200 (2026-11-22)."""


@lru_cache(maxsize=1024)
def _fitting(size: Size, chip: Chip, kind: str) -> tuple[Spread, ...]:
    return tuple(candidates(size, chip, kind))


def launches(chip: Chip, batch: int, directions: int, tile: Spread) -> int:
    """How many launches a batch takes, one after another."""
    at_once, parts = tile.at_once(chip), -(-batch // tile.rows)
    beside = min(directions, at_once)
    return -(-directions // beside) * -(-parts // (at_once // beside))


def _time(size: Size, chip: Chip, batch: int, directions: int, kind: str, tile: Spread) -> float:
    """Microseconds of a step, estimated, times the number of launches.

    Fitted to LSTM in bfloat16 on an H200, 1024 units at batch 32 and 128 and 1500 at batch 20: it is within a tenth of
    all but one of 10 tiles forward and 13 backward.  In thousands of cycles a step's products take the tensor cores
    and shared memory (of a multiprocessor); in KB come what a block reads and, forward, what all blocks read of the
    same lines.

    What four warps multiply together takes as long for 8 columns as for 16; all blocks of a launch read L2 at once, 4.4
    MB in a microsecond.  That is within an eighth of 18 of 21 tiles of LSTM and GRU, from 512 to 2,048 units.

    With TF32 products, as float16, it is within an eighth for LSTM and GRU with 512 to 1,500 units; LSTM with 2,048 at
    batch 64 took 17.4 us instead of 15.0, and 23.0 instead of 16.9 with weights that are spilled.

    Backward it is fitted to LSTM, with options and without, and GRU in bfloat16, 186 tiles of 128 to 2,048 units at
    batch 1 to 512, with what a launch takes over 60 steps: within 10 percent in the square mean, and of TF32 as scaled
    float16 within 12 of 132 tiles.  A thread that computes two sequences one after the other takes 1.8 us more.

    Exact products as two float16 are fitted to LSTM and GRU on an H200, 1024 units at batch 32 and 128, 1500 at 20, 768
    at 16 and 512 at 128: of four warps within 7 percent in the square mean, 47 tiles, of one warp each 5, 13 tiles.

    In four bytes it is fitted to LSTM with TF32 products, 1024 units at batch 32 and 128 and 1500 at batch 20, 9 tiles
    forward and 11 backward: within a fifth but for one of each.  Exact products take about twice that.
    """
    count = launches(chip, batch, directions, tile)
    if tile.whole:
        base, more = _WHOLE_TIME[kind]
        return count * (base + more * size.units / 512 + 0.05 * (tile.tiles - 1))
    exchanges = count * _inside_time(size, kind, tile)
    if tile.by_step:
        exchanges += count * tile.subs * (_ANEW[0] + _ANEW[1] * 8 * tile.tiles * size.units / 512)
    return _plain_time(size, chip, batch, directions, kind, tile) + exchanges


_WHOLE_TIME = {"forward": (2.3, 1.05), "backward": (2.8, 0.65)}
"""Microseconds of a step where blocks have whole sequences, and what 512 units add, as others are estimated: forward a
quarter more than measured, like clusters there.  LSTM with layer norm of r and c in bfloat16, 100 steps on H200s
(2026-11-29), forward and backward, and what ran before: 512 units at batch 128 274 us and 334 (345, 405), at 96 275 and
337 (265, 402), 384 at 128 252 and 318 (328, 355), at 96 246 and 310 (192, 269), 320 at 128 256 and 323 (198, 355)."""
_ANEW = 0.15, 0.0165
"""Microseconds of a step that scales anew at each step take, and for each KB of states that a block takes: LSTM with
softplus and TF32 products, 100 steps on an H100 (2026-11-26), beside the plain one in the same tile: 1,024 units at
batch 32 2.79 and 2.23 us, at 128 6.42 and 5.17, 1,500 at 20 5.61 and 3.59, 512 at 128 2.84 and 2.42."""


def _inside_time(size: Size, kind: str, tile: Spread) -> float:
    """Of the exchanges inside a step: of means, and of products."""
    if size.staged is None:
        return 0.0
    own = steps(size.staged).forward if kind == "forward" else steps(size.staged).backward
    products, means = len(own.rounds), len({made.stage for made in own.reductions})
    taken = products * _product_time(kind, tile, operand(size, kind)) if products else 0.0
    least, each, collected = _EXCHANGE[kind]
    if tile.collected:
        return taken + means * tile.subs * (2.4 if kind == "backward" and tile.subs > 1 else collected)
    more = 0.2 * (tile.tiles - 1) * (kind == "forward" and not tile.wide)
    if kind == "forward" and tile.wide and (tile.slice, tile.blocks, tile.tiles) == (32, 16, 2):
        # 512 units at batch 128: a train step of 100 960 us, in 8 blocks, of 3.92 us a step as estimated, 978
        more -= 0.25
    return taken + means * tile.subs * (least + each * _taken(size, kind, tile.slice, tile.tiles) + more)


def _product_time(kind: str, tile: Spread, width: int) -> float:
    """What the exchange of a product inside the step adds to its multiplications, which a plain step has too.

    Of GRU with the reset before the product, 40 steps on an H100, 512 to 2,048 units at batch 32 to 128 in bfloat16 and
    with TF32 products, the tile that is estimated to be the fastest was so, or within a twentieth of it, of 4 to 19
    forward and of 4 to 17 backward.  Forward, parts of the sequences that are taken in turn do not overlap: 1,024 units
    at batch 128 in bfloat16 6.7 us with 32 sequences at a time and 9.1 with twice 16, 12.9 with four times 8.  Backward
    it grows with the sums that come back, in KB: 11.0, 15.1 and 26.7 us where 8, 4 and 2 blocks are gathered.
    """
    if kind == "forward":
        each = 1.9 if tile.subs > 1 and width == 2 else 1.35
        return each * tile.subs + 0.35 * tile.subs * (tile.tiles - 1)
    sums = 8 * tile.tiles * 4 * tile.sources * tile.slice / 1024
    if tile.gathered == 1:
        return tile.subs * (1.05 + 0.05 * sums)
    at_once = max(1, 32 * tile.warps // (tile.slice // 2 * 8 * tile.tiles))
    return 1.05 * tile.subs - (-tile.subs // at_once) * max(0.9 + 0.1 * sums, 0.27 * sums - 1)


_EXCHANGE = {"forward": (0.8, 0.12, 1.95), "backward": (1.05, 0.065, 1.9)}
"""Microseconds of one exchange of means, with what it makes a step compute more: where each block takes from all, and
for each KB of that; where one block collects.  LSTM with layer norm of r and c in bfloat16 on an H200, of one and the
other, a step: 1,500 units at batch 20, forward 9.4 and 7.4, backward 10.9 and 6.5; 1,024 at 128 9.4 and 10.5, 15.4 and
14.4 (two parts in turn; with TF32 products 23.2, and 20.2 in two launches of one part); 1,024 at 32 backward 5.0 and
5.1.  With 512 at 128, where a block takes 0.5 KB and 2 KB, 3.9 and 4.6.  1,024 at 128 took 7.2 forward where a thread
has two sequences, whose means travel at once, and 9.5 where a block takes two parts in turn."""


def _plain_time(size: Size, chip: Chip, batch: int, directions: int, kind: str, tile: Spread) -> float:
    rows, strips, planes = 8 * tile.tiles, -(-size.recurrent * tile.slice // 16), tile.planes
    width = 2 if tile.halves else size.element
    if kind == "forward":
        splits, share = tile.warps // tile.groups, -(-strips // tile.groups)
        states = planes * rows * size.units * width
        shared = (
            tile.warps * (planes * share * tile.depths - tile.resident) * 512
            + (tile.groups + 1 if width == 2 else 1) * states
        )
        shared += 2 * splits * rows * strips * 64
        products = share * tile.depths * tile.tiles * tile.warps / 4
        if tile.wide:
            at_once = min(tile.at_once(chip), directions * -(-batch // tile.rows))
            read, count = at_once * tile.blocks * states / 2**20, launches(chip, batch, directions, tile)
            if planes > 1:
                part = 0.0202 * products / tile.tiles + 0.0096 * products + 0.051 * read
                part += 0.4 * (tile.parts - 1) if tile.tiles == 1 else 0.84 * (tile.parts > 2)
                slow = 1.25 if tile.tiles > 3 and tile.parts < 4 else 1.0  # 6.28 us with 512 units at batch 128
                return count * max(LEAST[kind], (0.7 + tile.subs * part) * slow) + _BEGIN * (count - 1)
            part = 0.0037 * products / tile.tiles + 0.0013 * products + 0.225 * read
            part += 0.4 * (tile.parts - 1) * (not tile.beside)
            few = tile.lull > 0 and (tile.slice, tile.tiles) == (16, 2) and tile.blocks > 48 and size.recurrent > 3
            few = few and count == 1 and batch * directions > 16
            # 896 and 1,024 units at batch 32 1.90 and 1.86 us, with TF32 products 2.02: 2.49 and 2.75 estimated
            return count * (1.45 + tile.subs * part) * (0.7 if few else 1.0)
        if size.bits or size.masks:  # a strip is multiplied for each of its gates; given masks are read at each step
            products *= 1 if tile.slice % 16 == 0 else 2
            states += size.masks * rows * size.units * 4
        if width == 4:
            part = 1.81 + 0.31e-3 * shared / 128 + 0.04e-3 * tile.blocks * states / 1024 + 4.2 * (1 - 1 / tile.parts)
            taken = tile.subs * part * (2.1 if size.exact else 1)
            return launches(chip, batch, directions, tile) * (taken + _BEGIN) - _BEGIN
        products *= 2 * planes - 1
        again = 0.4 * (tile.parts - 1) * (planes - 1)
        if _in_parts(size):
            again = 0.12 * (tile.parts - 1)  # so that as much is left to cuDNN as was measured in one part
        part = 0.54e-3 * products + 0.67e-3 * shared / 128 + (0.0091 + 0.000166 * tile.blocks) * states / 1024
        part += 0.4 * (tile.tiles - 1) * (planes - 1)  # GRU with 512 units at batch 128 took 3.66 us
        even = tile.groups == 2 and strips % 2 == 0 and tile.resident == share * tile.depths
        if planes == 1 and tile.tiles == 2 and tile.blocks > 48 and even:
            part -= 0.35  # LSTM at batch 32 took 2.13 us with 896 units, 2.11 with 1,024, TF32 2.25 and 2.27
        if tile.subs > 3 and tile.blocks > 64:  # 2,048 units at batch 64 took 17.9 us, GRU 11.1
            part *= 0.75
        if size.optional and (tile.slice, tile.tiles, tile.groups) == (32, 2, 2):
            part += 0.02  # 512 units at batch 128: lengths 2.28 us, of four groups 2.13, a mask 2.31 and 2.14
        return launches(chip, batch, directions, tile) * (0.88 + tile.subs * (0.2 + part + again))
    strips, depths = (
        -(-size.units // (16 * tile.gathered)),
        tile.gathered * size.recurrent * tile.slice // (32 // width),
    )
    share = -(-strips // tile.warps)
    shared = tile.warps * (share * depths - tile.resident) * 512
    shared += tile.warps * rows * depths * 32 * -(-share // tile.chunk)
    if width == 4:
        part = 0.64e-3 * shared / 128 + 0.078 * tile.sources
        taken = (1.66 + tile.subs * part) * (2.0 if size.exact else 1)
        return launches(chip, batch, directions, tile) * (taken + _BEGIN) - _BEGIN
    products = share * depths * tile.tiles * tile.warps / 4
    if tile.wide:
        part = 0.0095 * products / tile.tiles + 0.0015 * products
        part += 1.8 * (-(-rows // (32 * tile.warps // (tile.slice // 2))) - 1)
        part += 2.5e-3 * share * tile.tiles * tile.warps * size.recurrent * size.bits
        if tile.halves:  # masks by gate, TF32, 1,024 units at batch 128: 9.9 us in four parts, another tile in one 9.4
            part += 0.1 * (tile.parts - 1) * size.bits
    else:
        part = 4.5e-3 * products + 0.32e-3 * shared / 128
        part += 1.4e-3 * share * tile.tiles * tile.warps * tile.gathered * size.recurrent * size.bits
        many = tile.slice == 48 or (tile.slice == 64 and tile.tiles > 1)
        if size.bare and size.recurrent > 2 and tile.gathered > 1 and many:
            # LSTM with 768 units at batch 64 took 4.7 and 4.8 us where 3.7 and 3.8 were estimated, GRU 3.7 to 4.1 and
            # 3.1 to 3.3; with 512 at 256 5.2 and 6.4, and 4.6, GRU 5.8 and 3.8
            part *= 1.3
    part += 0.06 * rows * 4 * tile.sources * tile.slice / 1024
    part += 0.017 * rows * depths * 32 / 1024
    taken = 0.6 + 0.8 * (tile.gathered > 1) + 0.04 * tile.sources + tile.subs * part
    blocks = tile.slice, tile.sources, tile.gathered
    if size.element == 2 and size.staged is None and not size.many and blocks == (32, 8, 1):
        # 256 units at batch 64 and 128: LSTM 1.69 and 1.72 us where 1.62 were estimated, GRU 1.66 and 1.64 where 1.56
        # were; in 4 blocks of 64 units 1.54 and 1.51 where 1.68, 1.43 and 1.45 where 1.57 were.  With layer norm of r
        # and c, whose kernel differs, a train step of 100 took 541 us in 8 blocks and 581 in 4, and with all options at
        # once a step of LSTM 1.86 and 1.94.
        taken += 0.15
    if size.optional and size.many and size.element == 2 and blocks == (16, 8, 4):
        taken += 0.15  # 512 units at batch 32 2.42 us, in half as many blocks 2.30
    if tile.halves:
        taken = 1.18 * taken + 0.55 * (tile.gathered > 1)
    if size.bare and tile.wide and tile.rows == 16 and (tile.slice, tile.gathered) == (16, 8) and size.recurrent > 2:
        # 640 to 1,024 units at batch 32: LSTM 2.74 to 2.93 us where 2.97 to 3.27 were estimated, with TF32 products
        # 3.41 to 3.95 and 4.06 to 4.41, GRU with 1,024 2.72 and 3.00
        taken *= 0.97 if tile.halves else 0.9
    if tile.halves and tile.wide and blocks == (32, 8, 4) and tile.subs == 2 and size.recurrent > 3 and not size.staged:
        # LSTM with 1,024 units at batch 128 7.87 us where 9.26 were estimated, and 8.37 the next; 100 steps of training
        # with one of nine options 2.6 to 5 percent less than with the next, with masks by gate 90 of 3,383 us less
        taken *= 0.85 if size.bits else 0.9
    if size.bare and size.recurrent > 3:
        if size.element == 2 and not tile.wide and (tile.slice, tile.gathered) == (16, 4) and tile.sources > 8:
            taken += 0.2  # 650 units at batch 20 2.83 us, 768 at 16 2.76, where 2.61 and 2.68 were estimated
        if tile.halves and not tile.wide and blocks == (64, 4, 1) and tile.tiles == 2:
            taken += 0.15  # 256 units at batch 512 3.76 us, in two parts of 8 sequences 3.62
    return launches(chip, batch, directions, tile) * taken


LEAST = {"forward": 1.08, "backward": 0.65}
"""Microseconds of a step in two bytes that the estimate above never falls below."""
_BEGIN = 1.0  # a launch loads its weights anew: 30 us as this was fitted, over 30 steps
