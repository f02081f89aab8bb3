"""Every recipe and what the search chooses, on local ranks against one device, in float64: the worst error of each.

    python -m benchmarks.verify [--quick] [--models hf-gpt2 mlp ...] [--meshes 4 2x2 2x2x2]

Columns: the worst relative difference of any output, gradient, parameter after an AdamW step or buffer (tolerance 1e-9), the
collectives that one rank ran, how many of them differ from the priced ones (0 is right), and the seconds that it took. `searched`,
`few`, `thrifty` and `random` plans are explained in tests/helpers/verify.py. --quick: one mesh per model and fewer plans.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings

from tabulate import tabulate

from autopar.errors import AutoparError
from autopar.recipes import RECIPES
from autopar.verify import verify
from tests.helpers.tiny import TINY
from tests.helpers.verify import Sizes, batch_for, planned, subject

EXTRA = ("searched", "few", "thrifty", "random 0")
QUICK = ("searched", "random 0")


def one(name: str, sizes: Sizes, how: str) -> dict[str, object]:
    """One row of the table."""
    start = time.perf_counter()
    row: dict[str, object] = {"model": name, "plan": how, "mesh": "x".join(map(str, sizes))}
    who = subject(name)
    try:
        report = verify(who.case(planned(who, sizes, how), batch_for(how)))
    except AutoparError as error:
        return row | {"ok": "NO", "first": str(error).strip().splitlines()[-1][:80]}
    values = [r.error for r in report.rows if r.kind != "collectives"]
    wrong = sum(r.error for r in report.rows if r.kind == "collectives")
    return row | {"ok": "yes" if report.ok else "NO", "worst error": f"{max(values):.1e}", "collectives": report.collectives,
                  "not as priced": int(wrong), "seconds": f"{time.perf_counter() - start:.1f}", "first": report.first}


def jobs(models: list[str], meshes: list[Sizes], quick: bool) -> list[tuple[str, Sizes, str]]:
    """What to run."""
    found = []
    for number, name in enumerate(models):
        for sizes in meshes if not quick else [meshes[number % len(meshes)]]:
            recipes = [r.name for r in RECIPES.values() if len(r.roles) == len(sizes)]
            plans = [recipes[number % len(recipes)], *QUICK] if quick and recipes else [*recipes, *(QUICK if quick else EXTRA)]
            found += [(name, sizes, how) for how in plans]
    return found


def main() -> int:
    """Print the table; the exit code is 0 when every row is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(TINY), choices=list(TINY))
    parser.add_argument("--meshes", nargs="+", default=["4", "2x2", "2x2x2"])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    todo = jobs(options.models, [tuple(map(int, mesh.split("x"))) for mesh in options.meshes], options.quick)
    rows = []
    for number, job in enumerate(todo):
        print(f"\r{number + 1}/{len(todo)} {' '.join(map(str, job))}".ljust(60), end="", file=sys.stderr, flush=True)
        rows.append(one(*job))
    print(file=sys.stderr)
    print(tabulate(rows, headers="keys", disable_numparse=True))
    bad = [row for row in rows if row["ok"] != "yes"]
    print(f"\n{len(rows) - len(bad)} of {len(rows)} within 1e-9 of one device, collectives as priced")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
