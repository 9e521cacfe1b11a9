"""The same grid in 2017 and now: microseconds an example on a GTX Titan X, as published, beside measured results."""

from collections.abc import Sequence

from whorl.bench.cases import Case
from whorl.bench.results import Outcome, Results
from whorl.bench.tables import NOT_AVAILABLE, Table, number

SOURCE = "https://github.com/MaximumEntropy/cudnn_rnn_theano_benchmarks"
TITAN = "GTX Titan X"
SHOWN = ("fp32", "tf32", "bf16")
_PASSES = ("train", "forward")
# (layers, batch, time, units) -> microseconds an example, (train, forward) of each: Theano's own LSTM, the LSTM and the
# GRU of cuDNN 5.1.05 with CUDA 8.0; float32.
PUBLISHED = {
    (1, 32, 30, 128): ((204.5, 57.1), (118.8, 59.5), (117.4, 57.6)),
    (1, 32, 30, 512): ((530.9, 148.1), (223.2, 102.4), (184.6, 77.6)),
    (1, 32, 30, 1024): ((1102.0, 294.0), (601.8, 161.1), (394.8, 136.2)),
    (1, 128, 30, 128): ((200.8, 52.8), (33.4, 15.0), (32.2, 14.4)),
    (1, 128, 30, 512): ((491.0, 138.2), (100.8, 31.7), (83.3, 26.5)),
    (1, 128, 30, 1024): ((1000.1, 291.8), (221.2, 69.0), (181.3, 59.1)),
    (3, 128, 30, 512): ((778.3, 418.3), (244.9, 70.2), (197.1, 55.7)),
    (3, 128, 30, 1024): ((1592.8, 882.7), (820.6, 256.8), (639.5, 195.2)),
    (3, 128, 200, 512): ((2196.6, 1168.1), (1539.5, 485.9), (1253.8, 386.4)),
    (3, 128, 200, 1024): ((5711.1, 3427.9), (5342.5, 1692.1), (4163.4, 1274.5)),
}


def history(measured: Sequence[Results]) -> Table | None:
    """What was published, beside what the results of GPUs have; None where they have none of these sizes.

    Of several results the first that has a case is shown.
    """
    there = [results for results in measured if results.header.machine.get("device") == "cuda"]
    found = {name: entry for results in reversed(there) for name, entry in results.measured.items()}
    on = {name: str(results.header.machine["gpu"]) for results in reversed(there) for name in results.measured}
    rows, gpus = [], set[str]()
    for cell in ("lstm", "gru"):
        for index, which in enumerate(_PASSES):
            for shape, (theano, lstm, gru) in PUBLISHED.items():
                cases = [Case(cell, *shape, precision) for precision in SHOWN]
                passes = [found[case.name].passes.get(which, {}) if case.name in found else {} for case in cases]
                if not any(passes):
                    continue
                then = (str(theano[index]), str(lstm[index])) if cell == "lstm" else ("", str(gru[index]))
                gpus |= {on[case.name] for case in cases if case.name in found}
                now = [_example(outcomes, name, shape[1]) for name in ("torch", "whorl") for outcomes in passes]
                ran = {str(outcomes["whorl"].engine) for outcomes in passes if "whorl" in outcomes}
                rows.append((f"{cell.upper()} {cases[0].shape}, {which}", *then, *now, ", ".join(sorted(ran))))
    if not rows:
        return None
    columns = [f"{name} {precision}" for name in ("torch.nn (cuDNN)", "whorl") for precision in SHOWN]
    return Table(
        f"Microseconds an example, 2017 on a {TITAN} and now on {' and '.join(sorted(gpus))}",
        ("layers x batch x time x units", f"Theano, {TITAN} 2017", f"cuDNN 5.1, {TITAN} 2017", *columns, "whorl ran"),
        tuple(rows),
        (
            f"2017: float32, as published at {SOURCE}: wall time over 1,000 calls in a row. Now: the time that the GPU "
            "takes, replayed from a CUDA graph, where launches cost nothing; in brackets as the host launches it, call "
            f"after call, which most of these sizes wait for. {NOT_AVAILABLE}: not measured.",
        ),
    )


def _example(outcomes: dict[str, Outcome], name: str, batch: int) -> str:
    """Microseconds an example, graphed and, in brackets, eager."""
    texts = []
    for each in (f"{name}-graphed", name):
        time = outcomes[each].time if each in outcomes else None
        texts.append(NOT_AVAILABLE if time is None else number(1e3 * time.median / batch))
    return f"{texts[0]} ({texts[1]})"
