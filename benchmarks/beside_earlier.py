"""How results of `whorl bench` compare with what another program read on an H200 the day before, as Markdown.

python benchmarks/beside_earlier.py benchmarks/results/h200.json
"""

import json
import statistics
import sys
from pathlib import Path

from whorl.bench.results import Results
from whorl.bench.tables import number

NEAR = 0.15


def main(path: str) -> None:
    """Print how many figures are within 15 percent, and every figure beside its earlier one, in microseconds."""
    results = Results.load(Path(path))
    earlier = json.loads((Path(__file__).parent / "earlier_h200.json").read_text())
    columns = [tuple(column.split(", ")) for column in earlier["columns"]]
    ratios: dict[tuple[str, ...], list[float]] = {column: [] for column in columns}
    rows = []
    for name, before in earlier["cases"].items():
        cells = []
        for column, microseconds in zip(columns, before, strict=True):
            now = 1e3 * results.measured[name].passes[column[0]][column[1]].gpu.median
            ratios[column].append(now / microseconds)
            near = abs(now / microseconds - 1) <= NEAR
            cells.append(f"{microseconds} → {number(now)}" if near else f"{microseconds} → **{number(now)}**")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    print("| | figures | within 15 percent | median ratio | smallest | largest |\n|---|---:|---:|---:|---:|---:|")
    for column, found in ratios.items():
        near = sum(abs(ratio - 1) <= NEAR for ratio in found)
        ends = f"{statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f}"
        print(f"| {', '.join(column)} | {len(found)} | {near} | {ends} |")
    title = "Every figure, earlier → now, in microseconds; bold where more than 15 percent apart"
    print(f"\n<details>\n<summary>{title}</summary>\n")
    print(f"| case | {' | '.join(earlier['columns'])} |\n|---|{'---:|' * len(columns)}")
    print("\n".join(rows))
    print("\n</details>")


if __name__ == "__main__":
    main(*sys.argv[1:])
