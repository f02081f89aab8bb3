"""Every recipe and what the search chooses, and every pipeline, on local ranks against one device, in float64: the
worst error of each.

    python -m benchmarks.verify [--quick] [--models hf-gpt2 mlp ...] [--meshes 4 2x2 2x2x2]
    python -m benchmarks.verify --pipelines [--quick] [--models hf-gpt2 hf-t5 ...]

Columns: the worst relative difference of any output, gradient, parameter after an AdamW step or buffer (tolerance
1e-9), the collectives that one rank ran, how many of them differ from the priced ones (0 is right), and the seconds
that it took, planning included. `searched`, `few`, `thrifty` and `random` plans are explained in
tests/helpers/verify.py, the matrix in tests/helpers/matrix.py; b and s are the sizes of the batch where they are not
those that were planned. --quick: every 13th. With --pipelines every schedule on 2 and 4 places, and places with meshes,
with nothing, some and all of the blocks run again; one row per model and shape.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

from tabulate import tabulate

from autopar.errors import AutoparError
from tests.helpers.matrix import PIPED, Entry, Piped, entries, pipelines
from tests.helpers.tiny import TINY


def one(entry: Entry | Piped) -> dict[str, object]:
    """One row of the table."""
    start = time.perf_counter()
    row: dict[str, object] = {"what": str(entry)}
    try:
        report = entry.run()
    except AutoparError as error:
        return row | {"ok": "NO", "first": str(error).strip().splitlines()[-1][:80]}
    wrong = sum(r.error for r in report.rows if r.kind == "collectives")
    return row | {
        "ok": "yes" if report.ok else "NO",
        "worst error": report.value_error,
        "collectives": report.collectives,
        "not as priced": int(wrong),
        "seconds": time.perf_counter() - start,
        "first": report.first,
    }


def together(todo: Sequence[Entry | Piped], rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """One row per model and shape of a pipeline, and a row for each case that is wrong."""
    groups: dict[tuple[str, str], list[dict[str, object]]] = {}
    for entry, row in zip(todo, rows, strict=True):
        assert isinstance(entry, Piped), "only pipelines have shapes"
        groups.setdefault((entry.model, entry.shape), []).append(row)
    found = []
    for (model, shape), mine in groups.items():
        right = [row for row in mine if row["ok"] == "yes"]
        found.append(
            {
                "what": f"{model}, {shape}",
                "cases": len(mine),
                "right": len(right),
                "worst error": max((figure(row, "worst error") for row in mine), default=0.0),
                "collectives": sum(int(figure(row, "collectives")) for row in mine),
                "not as priced": sum(int(figure(row, "not as priced")) for row in mine),
                "seconds": sum(figure(row, "seconds") for row in mine),
            }
        )
        found += [{"what": row["what"], "first": row["first"]} for row in mine if row["ok"] != "yes"]
    return found


def figure(row: dict[str, object], column: str) -> float:
    """A figure of a row, 0 where it has none."""
    return float(str(row.get(column, 0)))


def main() -> int:
    """Print the table; the exit code is 0 when every row is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[], choices=list(dict.fromkeys((*TINY, *PIPED))))
    parser.add_argument("--meshes", nargs="+", default=["4", "2x2", "2x2x2"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--pipelines", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    meshes = tuple(tuple(map(int, mesh.split("x"))) for mesh in options.meshes)
    todo: Sequence[Entry | Piped] = (
        pipelines(tuple(options.models or PIPED))
        if options.pipelines
        else entries(tuple(options.models or TINY), meshes)
    )
    todo = todo[::13] if options.quick else todo
    rows = []
    for number, entry in enumerate(todo):
        rows.append(one(entry))
        print(f"{number + 1}/{len(todo)} {entry}: {rows[-1]}", file=sys.stderr, flush=True)
    print(
        tabulate(
            together(todo, rows) if options.pipelines else rows,
            headers="keys",
            floatfmt=("", "", "", ".1e", "", "", ".1f") if options.pipelines else ("", "", ".1e", "", "", ".1f"),
        )
    )
    right = [row for row in rows if row["ok"] == "yes"]
    worst = max((figure(row, "worst error") for row in rows), default=float("nan"))
    print(
        f"\n{len(right)} of {len(rows)} within 1e-9 of one device, collectives as priced; worst error {worst:.1e}; "
        f"{sum(figure(row, 'seconds') for row in rows):.0f} s"
    )
    return 1 if len(right) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
