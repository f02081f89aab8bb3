"""The cost model against published measurements.

    python benchmarks/cost_model.py [--data DIR] [--json OUT] [--only SOURCE] [--explain ROW] [--worst 20] [--half
    fit|held] [--times]

Every file of the known formats in the folder is read, the step of each row's *given* configuration predicted with the
prices that plans are made with, and its memory by the walk that plans are accepted by. Error, rank correlation, regret
and the worst rows are printed by source, errors of peaks by source and by what was counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError
from benchmarks.costmodel.data import load
from benchmarks.costmodel.halves import in_half
from benchmarks.costmodel.predictions import Predictor
from benchmarks.costmodel.results import Result, as_json, explained, memory_text, summary_text, worst_text
from benchmarks.costmodel.rows import Loaded, Row

T = TypeVar("T")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def predicted(loaded: Loaded, *, memory: bool) -> list[Result]:
    """A result for each row that can be priced; the others are added to what was refused, and so is memory that cannot
    be told."""
    predictor, found = Predictor(), []

    def told(row: Row, what: Callable[[Row], T]) -> T | None:
        try:
            return what(row)
        except AutoparError as error:
            loaded.refused.append(f"{row.name}: {type(error).__name__} {' '.join(str(error).split())[:200]}")
            return None

    for stated in loaded.rows:
        row = (memory and told(stated, predictor.settled)) or stated
        step = told(row, predictor.predict)
        if step is not None:
            found.append(Result(row, step, told(row, predictor.held) if row.peaks and memory else None))
    return found


def main() -> int:
    """Read, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of measurements (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--only", help="sources whose name contains this")
    parser.add_argument("--explain", metavar="ROW", help="the parts of one row's prediction")
    parser.add_argument("--worst", type=int, default=20, help="how many of the worst rows to list")
    parser.add_argument(
        "--times", action="store_true", help="no memory, which is most of the work where it was published"
    )
    parser.add_argument(
        "--half", choices=("fit", "held"), help="only the half that constants were fitted on, or the other"
    )
    given = parser.parse_args()
    if given.json and not given.json.parent.is_dir():
        parser.error(f"--json: there is no folder {given.json.parent}")
    start = time.monotonic()
    try:
        loaded = load(given.data)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    sources = sorted({row.source for row in loaded.rows})
    loaded.rows = [
        row
        for row in loaded.rows
        if (given.only or "") in row.source
        and (given.half is None or in_half(row) == given.half)
        and given.explain in (None, row.name)
    ]
    if not loaded.rows and not given.explain:
        print(f"no row of {given.data} is asked for; sources are {', '.join(sources)}", file=sys.stderr)
        return 2
    results = predicted(loaded, memory=not given.times)
    if given.explain:
        print("\n\n".join(map(explained, results)) or f"no row {given.explain}")
        return 0 if results else 2
    print(summary_text(results), memory_text(results), worst_text(results, given.worst), sep="\n\n")
    print(f"\n{len(results)} rows in {time.monotonic() - start:.0f} s; {len(loaded.refused)} lines refused:")
    for why, count in Counter(line.partition(": ")[2][:110] for line in loaded.refused).most_common():
        print(f"  {count:4}  {why}")
    if given.json:
        given.json.write_text(json.dumps(as_json(results, loaded.refused), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
