"""The lines of a stage in several loops, for a processor.

Functions beside each other have more numbers than a processor has registers, and each unit's wait for each other: in
three loops the LSTM's step takes 0.82 times as long as in one (2 cores of an Intel Xeon with AVX-512, GCC 12).
"""

import re
from collections.abc import Mapping, Sequence

_LINE = re.compile(r"const \w+ (\w+) = (.*);")
_FUNCTION = re.compile(r"([\w:]+)\(\w+\)")
_SLOW = re.compile(r"(?<!real)(?<!fabs)\(| / ")


def loops(loads: Mapping[str, str], lines: Sequence[str], stores: Mapping[str, str]) -> list[list[str]]:
    """The bodies of loops over the units that do, one after the other, what one with all lines would.

    Functions whose values are kept have a loop for each kind and number of functions that they wait for, but the last
    of these: it is in the last loop, with all else.  Later loops read what was kept, and compute quick lines again.

    Args:
        loads: the line that reads each value, by its name.
        lines: what is computed, each value after those that it is made of.
        stores: the line that writes each value, by its name; what is kept are `keep_0`, `keep_1`, ...
    """
    made = {found[1]: found[2] for found in map(_LINE.fullmatch, lines) if found}
    assert len(made) == len(lines), f"every line makes a value: {lines}"
    parts = {name: re.findall(r"\w+", right) for name, right in made.items()}
    kept = {right: name for name, right in made.items() if name.startswith("keep_")}
    after: dict[str, int] = {}
    kinds: dict[tuple[int, str], list[str]] = {}
    for name, right in made.items():
        after[name] = max((after[part] for part in parts[name] if part in made), default=0)
        if name in kept and (found := _FUNCTION.fullmatch(right)):
            kinds.setdefault((after[name], found[1]), []).append(name)
            after[name] += 1
    groups = [[kept[name] for name in kinds[key]] for key in sorted(kinds, key=lambda key: key[0])][:-1]
    groups.append([name for name in stores if all(name not in group for group in groups)])

    known: dict[str, str] = {}  # what earlier loops kept
    bodies: list[list[str]] = []
    computed: list[str] = []
    for group in groups:
        needed, pending = set(), list(group)
        while pending:
            name = pending.pop()
            if name not in needed:
                needed.add(name)
                pending += [] if name in known else parts.get(name, [])
        read = [line for name, line in (*loads.items(), *known.items()) if name in needed]
        own = {name: line for name, line in zip(made, lines, strict=True) if name in needed and name not in known}
        bodies.append([*read, *own.values(), *(stores[name] for name in group)])
        computed += own
        known |= {made[name]: f"const real {made[name]} = w_{name}[u];" for name in group if name in made}
    by_unit = {*loads}  # a number of the whole row is computed once for each loop, whatever it takes
    for name in made:
        by_unit |= {name} if by_unit.intersection(parts[name]) else set()
    if any(_SLOW.search(made[name]) for name in by_unit.intersection(made) if computed.count(name) > 1):
        return [[*loads.values(), *lines, *stores.values()]]
    return bodies


def summing(body: Sequence[str], means: Mapping[str, str]) -> list[str]:
    """A loop over the units that sums some of its values beside what else it does, lane by lane.

    The sums of a row do not wait for one another, and what they are of is neither written nor read again: the step
    backward of an LSTM with layer norm takes 0.8 times as long (32 and 64 units, one core of an AMD EPYC of family 25).

    Args:
        body: the lines of a unit `u`, which add to `sum_NAME[lane]`.
        means: for each NAME where its mean goes, if nobody shares the row.
    """
    lines = [f"    {line}" for line in ("const int64_t u = begin + lane;", *body)]
    return [
        f"real {', '.join(f'sum_{name}[WIDE] = {{}}' for name in means)};",
        "const word nothing = word(team.members - 1);",
        "int64_t begin = first;",
        "for (; begin + WIDE <= last; begin += WIDE) {",
        "  EACH_ALONE",
        "  for (int64_t lane = 0; lane < WIDE; ++lane) {",
        *lines,
        "  }",
        "}",
        "for (int64_t lane = 0; lane < last - begin; ++lane) {",
        *lines,
        "}",
        *(f"if constexpr (ALONE) {to} = total_of(sum_{name}) / real(units);" for name, to in means.items()),
    ]
