"""Expressions to C: statements for the marked place of a kernel, split into stages at each mean and product.

Within a stage every unit is on its own.  Between two stages the kernel computes the stage's collectives: a mean over
the units, a product with the recurrent weights, or its transpose.  Values are named by their leaf (`x.i` is `x_i`),
temporaries `t0`, `t1`, ..., results of collectives too.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from whorl.cells.expr import COLLECTIVES, Expr, topological


class Value(NamedTuple):
    """A C variable that a stage reads or writes: of type `real`, or a `bool` where it is a condition."""

    name: str
    condition: bool = False


class Collective(NamedTuple):
    """What a kernel computes between two stages.

    `result` is the "mean" or "variance" of the operands, or the gate's "product" or "pull".
    """

    kind: str
    result: str
    operands: tuple[str, ...]
    gate: str = ""


@dataclass(frozen=True)
class Stage:
    """C statements that turn `reads` into `writes`, unit by unit, and the collectives that follow them."""

    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    lines: tuple[str, ...]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Target:
    """One language that expressions are printed in: a column of the table of spellings."""

    column: int
    literal: str
    largest: float
    """What is larger is infinite."""
    infinity: str
    nan: str
    functions: frozenset[str] = frozenset()
    """Operations that it has as functions of their own names, in place of what the column says."""

    def spelling(self, op: str) -> str:
        return f"{op}({{0}})" if op in self.functions else SPELLINGS[op][self.column]

    def number(self, value: float) -> str:
        if math.isnan(value):
            return self.nan
        text = self.infinity if abs(value) > self.largest else self.literal.format(abs(value))
        return f"(-{text})" if math.copysign(1.0, value) < 0 else text


HOST = Target(0, "real({!r})", sys.float_info.max, "real(__builtin_huge_val())", 'real(__builtin_nan(""))')
"""C++17 with <cmath>; `real` is float or double."""
CUDA = Target(1, "{!r}f", 3.4028234663852886e38, "__int_as_float(0x7f800000)", "__int_as_float(0x7fffffff)")
"""CUDA C++ as NVRTC takes it without headers; `real` is float, and `logistic` is what a kernel makes of the sigmoid."""

# {0}, {1} and {2} are names or numbers, so a spelling may repeat them.  A NaN goes through each, as in torch.
SPELLINGS: dict[str, tuple[str, str]] = {
    "add": ("{0} + {1}",) * 2,
    "sub": ("{0} - {1}",) * 2,
    "mul": ("{0} * {1}",) * 2,
    "div": ("{0} / {1}",) * 2,
    "neg": ("-{0}",) * 2,
    "pow": ("std::pow({0}, {1})", "powf({0}, {1})"),
    "lt": ("{0} < {1}",) * 2,
    "le": ("{0} <= {1}",) * 2,
    "eq": ("{0} == {1}",) * 2,
    "ne": ("{0} != {1}",) * 2,
    "and": ("{0} && {1}",) * 2,
    "or": ("{0} || {1}",) * 2,
    "not": ("!{0}",) * 2,
    "where": ("{0} ? {1} : {2}",) * 2,
    "minimum": ("{0} < {1} || {0} != {0} ? {0} : {1}",) * 2,
    "maximum": ("{0} > {1} || {0} != {0} ? {0} : {1}",) * 2,
    "clip": ("{0} < {1} ? {1} : {0} > {2} ? {2} : {0}",) * 2,
    "abs": ("std::fabs({0})", "fabsf({0})"),
    "sqrt": ("std::sqrt({0})", "sqrtf({0})"),
    "rsqrt": ("real(1) / std::sqrt({0})", "rsqrtf({0})"),
    "exp": ("std::exp({0})", "expf({0})"),
    "expm1": ("std::expm1({0})", "expm1f({0})"),
    "log": ("std::log({0})", "logf({0})"),
    "log1p": ("std::log1p({0})", "log1pf({0})"),
    "erf": ("std::erf({0})", "erff({0})"),
    "sin": ("std::sin({0})", "sinf({0})"),
    "cos": ("std::cos({0})", "cosf({0})"),
    "sigmoid": ("real(1) / (real(1) + std::exp(-{0}))", "logistic({0})"),
    "tanh": ("std::tanh({0})", "tanhf({0})"),
    "relu": ("{0} < real(0) ? real(0) : {0}", "{0} < 0.f ? 0.f : {0}"),
    "softplus": ("{0} > real(20) ? {0} : std::log1p(std::exp({0}))", "softplus({0})"),
}


def stages(outputs: Mapping[str, Expr], target: Target, again: frozenset[str] = frozenset()) -> list[Stage]:
    """The statements that compute `outputs`, each written to the variable of its name, in as few stages as can be.

    Args:
        outputs: an expression for each name; a dot in a name becomes an underscore.
        target: `HOST` or `CUDA`.
        again: digests of values that each stage computes for itself, where others are handed from stage to stage;
            what a collective reads is handed to it in any case.
    """
    order = topological(outputs.values())
    again -= {arg.digest for node in order if node.op in COLLECTIVES for arg in node.args if isinstance(arg, Expr)}
    level = _levels(order)
    name: dict[str, str] = {}
    for node in order:
        if node.op == "var":
            name[node.digest] = identifier(node.args[0])
        elif node.op == "const":
            name[node.digest] = target.number(node.args[0])
        else:
            name[node.digest] = f"t{len(name)}"
    assert {*name.values()}.isdisjoint(map(identifier, outputs)), (
        f"a leaf or temporary has one of these names: {[*outputs]}"
    )
    count = 1 + max((level[node.digest] for node in order), default=0)
    computed = [_computed(index, outputs, order, level, again) for index in range(count)]
    return [_stage(index, outputs, order, level, name, computed, again, target) for index in range(count)]


def identifier(name: str) -> str:
    """The C name of a leaf, an output or a cell: what C has not becomes an underscore, and one comes before a digit."""
    made = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{made}" if made[:1].isdigit() else made


def _levels(order: list[Expr]) -> dict[str, int]:
    """For each node the stage in which it is known: one more than its operands' for a collective."""
    level: dict[str, int] = {}
    for node in order:
        below = max((level[arg.digest] for arg in node.args if isinstance(arg, Expr)), default=0)
        level[node.digest] = below + (node.op in COLLECTIVES)
    return level


def _computed(
    index: int, outputs: Mapping[str, Expr], order: list[Expr], level: dict[str, int], again: frozenset[str]
) -> list[Expr]:
    """What a stage computes: what is known from it on, and what it needs of `again`."""
    own = [node for node in order if node.op not in COLLECTIVES and node.op not in ("var", "const")]
    wanted = {node.digest for node in own if level[node.digest] == index and node.digest not in again}
    wanted |= {node.digest for node in outputs.values() if level[node.digest] == index}
    for node in reversed(own):
        if node.digest in wanted:
            wanted |= again.intersection(arg.digest for arg in node.args if isinstance(arg, Expr))
    return [node for node in own if node.digest in wanted]


def _stage(
    index: int,
    outputs: Mapping[str, Expr],
    order: list[Expr],
    level: dict[str, int],
    name: dict[str, str],
    every: list[list[Expr]],
    again: frozenset[str],
    target: Target,
) -> Stage:
    computed = every[index]
    made = {node.digest for node in computed}
    used: dict[str, Expr] = {}  # what this stage needs and does not compute
    lines = []
    for node in computed:
        for arg in node.args:
            if arg.digest not in made and arg.op != "const":
                used[arg.digest] = arg
        kind = "bool" if node.is_condition else "real"
        arguments = [name[arg.digest] for arg in node.args]
        spelling = target.spelling(node.op).format(*arguments)
        lines.append(f"const {kind} {name[node.digest]} = {spelling};")

    writes: dict[str, Value] = {}
    later = [node for node in order if level[node.digest] > index and node.op in COLLECTIVES]
    later += [node for stage in every[index + 1 :] for node in stage]
    read_later = {arg.digest for node in later for arg in node.args if isinstance(arg, Expr)} - again
    for node in computed:  # temporaries that a later stage, or a collective, reads
        if node.digest in read_later:
            writes[name[node.digest]] = Value(name[node.digest], node.is_condition)
    collectives = []
    for node in order:
        if node.op in COLLECTIVES and level[node.digest] == index + 1:
            operands = []
            for operand in (arg for arg in node.args if isinstance(arg, Expr)):
                operands.append(name[operand.digest])
                if operand.op == "const":  # a kernel is given variables, never numbers
                    operands[-1] = f"{name[node.digest]}_{len(operands)}"
                    lines.append(f"const real {operands[-1]} = {name[operand.digest]};")
                    writes[operands[-1]] = Value(operands[-1])
            gate = node.args[0] if node.op in ("product", "pull") else ""
            collectives.append(Collective(node.op, name[node.digest], tuple(operands), gate))
    for output, node in outputs.items():
        if level[node.digest] == index:
            if node.digest not in made and node.op != "const":
                used[node.digest] = node
            lines.append(f"const real {identifier(output)} = {name[node.digest]};")
            writes[identifier(output)] = Value(identifier(output))
    reads = tuple(Value(name[digest], node.is_condition) for digest, node in used.items())
    return Stage(reads, tuple(writes.values()), tuple(lines), tuple(collectives))


def host_source(name: str, outputs: Mapping[str, Expr], real: str = "double") -> tuple[str, list[Stage]]:
    """C++ with one function for each stage, `NAME_0`, `NAME_1`, ..., and the stages.

    A function takes the number of units, then one array of units for each value that the stage reads, then one for
    each that it writes; conditions travel as 0 and 1.
    """
    made = stages(outputs, HOST)
    return "\n".join([f"#include <cmath>\nusing real = {real};", *_functions(identifier(name), made)]), made


def _functions(name: str, made: list[Stage]) -> list[str]:
    texts = []
    for index, stage in enumerate(made):
        loads = [
            f"const bool {v.name} = reads[{i}][u] != 0;" if v.condition else f"const real {v.name} = reads[{i}][u];"
            for i, v in enumerate(stage.reads)
        ]
        stores = [f"writes[{i}][u] = {v.name};" for i, v in enumerate(stage.writes)]
        body = "\n    ".join([*loads, *stage.lines, *stores])
        texts.append(
            f'extern "C" void {name}_{index}(long units, const real* const* reads, real* const* writes) {{\n'
            f"  for (long u = 0; u < units; ++u) {{\n    {body}\n  }}\n}}"
        )
    return texts
