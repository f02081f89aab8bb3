"""Every recipe and what the search chooses, on local ranks against one device, in float64: the worst error of each.

    python -m benchmarks.verify [--quick] [--models hf-gpt2 mlp ...] [--meshes 4 2x2 2x2x2]

Columns: the worst relative difference of any output, gradient, parameter after an AdamW step or buffer (tolerance 1e-9), the
collectives that one rank ran, how many of them differ from the priced ones (0 is right), and the seconds that it took, planning
included. `searched`, `few`, `thrifty` and `random` plans are explained in tests/helpers/verify.py, the matrix in
tests/helpers/matrix.py; b and s are the sizes of the batch where they are not those that were planned. --quick: every 13th.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

from tabulate import tabulate

from autopar.errors import AutoparError
from tests.helpers.matrix import Entry, entries
from tests.helpers.tiny import TINY


def one(entry: Entry) -> dict[str, object]:
    """One row of the table."""
    start = time.perf_counter()
    row: dict[str, object] = {"what": str(entry)}
    try:
        report = entry.run()
    except AutoparError as error:
        return row | {"ok": "NO", "first": str(error).strip().splitlines()[-1][:80]}
    values = [r.error for r in report.rows if r.kind != "collectives"]
    wrong = sum(r.error for r in report.rows if r.kind == "collectives")
    return row | {"ok": "yes" if report.ok else "NO", "worst error": max(values), "collectives": report.collectives,
                  "not as priced": int(wrong), "seconds": time.perf_counter() - start, "first": report.first}


def main() -> int:
    """Print the table; the exit code is 0 when every row is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TINY), choices=list(TINY))
    parser.add_argument("--meshes", nargs="+", default=["4", "2x2", "2x2x2"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    todo = entries(tuple(options.models), tuple(tuple(map(int, mesh.split("x"))) for mesh in options.meshes))
    todo = todo[::13] if options.quick else todo
    rows = []
    for number, entry in enumerate(todo):
        rows.append(one(entry))
        print(f"{number + 1}/{len(todo)} {entry}: {rows[-1]}", file=sys.stderr, flush=True)
    print(tabulate(rows, headers="keys", floatfmt=("", "", ".1e", "", "", ".1f")))
    right = [row for row in rows if row["ok"] == "yes"]
    worst = max((float(str(row["worst error"])) for row in rows if "worst error" in row), default=float("nan"))
    print(f"\n{len(right)} of {len(rows)} within 1e-9 of one device, collectives as priced; worst error {worst:.1e}; "
          f"{sum(float(str(row.get('seconds', 0))) for row in rows):.0f} s")
    return 1 if len(right) < len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
