"""`verify`: the emitted module on local ranks against one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autopar.bundle import Bundle
from autopar.errors import RunError
from autopar.pipeline import SCHEDULES
from autopar.runtime import Ranks, launch
from autopar.runtime.count import Counted
from autopar.verify.case import Case
from autopar.verify.collectives import describe, differences, priced, ran
from autopar.verify.compare import scale
from autopar.verify.probe import first_difference, unsplit
from autopar.verify.reference import Results
from autopar.verify.report import Report, Row
from autopar.verify.second_step import NOT_FINITE, SECOND, second_wrong
from autopar.verify.step import merged, step
from autopar.verify.tables import differing
from autopar.verify.ties import explained
from autopar.verify.volume import Uneven, comparable, not_compared, priced_bytes, ran_bytes

BEHIND = {
    "gradient": "a parameter's gradient is missing, or reduced wrongly, after its last use ({})",
    "loss": "the {} is put together wrongly behind the last operator",
    "output": "output {} is put together wrongly behind the last operator",
    "buffer": "buffer {} is given its new value wrongly behind the last operator",
    "parameter": "parameter {} is updated wrongly",
}
"""The diagnosis where every operator's value and gradient are right, by the kind of the wrong row; the most specific
kind first."""
SPLIT = (
    "{} splits the backward of a stage, and wrong is the part for its weights (first that of {}); every gradient is "
    "right where the backward runs as a whole"
)
"""The diagnosis where gradients are right without the split of the backward."""


def verify(
    case: Case, *, tolerance: float = 1e-9, reference: Results | None = None, ranks: Ranks | None = None
) -> Report:
    """Run `case` on one device and on the plan's ranks, and compare everything. See the package docstring.

    Who verifies several plans of one model gives the `reference` (`case.reference()`) and living `ranks` (as many as
    the plan has), so that neither is made again. Raises RunError when a rank fails.
    """
    wanted = case.reference() if reference is None else reference
    source = case.source()
    results = _on_ranks(case, ranks, step, source, case.rank_case, wanted)
    gaps = merged([gaps for gaps, _ in results], wanted, everywhere=case.plan.places == 1)
    rows = {key: _row(*key, gap / scale(wanted[key[0]][key[1]]), tolerance) for key, gap in gaps.items()}
    first, later = ([row for (kind, _), row in rows.items() if (kind in SECOND) is after] for after in (False, True))
    if not all(row.ok for row in first):
        later = []  # errors of a wrong first step propagate to all later results
    inner = case.plan.ranks // case.plan.places
    seen = {place: results[place * inner][1] for place in range(case.plan.places)}  # the first rank of each place
    uneven: Uneven = {}
    first += [row for place in seen for row in _collectives(case, seen[place], place, uneven)]
    first.append(_tables(case, source))
    notes = (
        *case.notes,
        *([not_compared(uneven, case.plan)] if uneven else []),
        *([NOT_FINITE] if case.later and "second output" not in wanted else []),
    )
    report = Report((*first, *later), case.plan.grid, collectives=sum(map(len, seen.values())), notes=notes)
    if wrong := [row for row in first if not row.ok]:
        return replace(report, first=_first(case, tolerance, ranks, wrong, wanted))
    return report if report.ok else replace(report, first=second_wrong(key for key, row in rows.items() if not row.ok))


def _on_ranks(case: Case, ranks: Ranks | None, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(*args)` on `ranks`, or on ranks of its own, which share the memory of `args` with this process."""
    return (
        launch(fn, case.plan.ranks, *args, device_type=case.plan.device_kind) if ranks is None else ranks.run(fn, *args)
    )


def _row(kind: str, name: str, error: float, tolerance: float) -> Row:
    of, when, _ = SECOND.get(kind, (kind, "", ""))
    return Row(name, "loss" if of == "output" and name == "loss" else of, error, tolerance, when)


def _collectives(case: Case, seen: list[Counted], place: int, uneven: Uneven) -> list[Row]:
    """The rows that compare the collectives that ran on a place, and their bytes, with those that are priced. Kinds
    whose bytes cannot be compared are added to `uneven`."""
    program, found = case.edges
    compared = [("collectives", priced(program, case.plan, found, place), ran(seen))]
    paid, without = priced_bytes(program, case.plan, found, place)
    if (even := comparable(paid, without)) or not paid:
        compared.append(("bytes", even, comparable(ran_bytes(seen), without)))
    for kind, value in without.items():
        uneven.setdefault(kind, value)
    where = f"place {place}, " if case.plan.places > 1 else ""
    return [
        Row(
            f"{where}{what}: {describe(wanted, got) or 'run = priced'}",
            "collectives",
            float(differences(wanted, got)),
            0.0,
        )
        for what, wanted, got in compared
    ]


def _tables(case: Case, source: str) -> Row:
    """The row that compares what the emitted model says of itself with the captured one."""
    found = differing(case, Bundle(case.plan, source).namespace()["Model"])
    return Row("; ".join(found) or "emitted = captured", "tables", float(len(found)), 0.0)


def _first(case: Case, tolerance: float, ranks: Ranks | None, wrong: Sequence[Row], wanted: Results) -> str:
    """Run both sides again with sums of every value recorded, and name the first node that differs; where none does,
    the diagnosis of the `wrong` rows."""
    kinds = {row.kind: row.name for row in reversed(wrong)}
    if kinds.keys() <= {"collectives", "tables"}:
        return f"no value: {'; '.join(kinds.values())}"
    recorded = case.recorded()
    try:
        found = str(
            _on_ranks(case, ranks, first_difference, case.source(probes=True), case.rank_case, recorded, tolerance)[0]
        )
    except RunError as error:  # as where ranks wait for each other: the rows are told all the same
        return f"no operator: ranks failed in the search for it ({str(error).strip().splitlines()[-1]})"
    if not found and kinds.keys() <= {"gradient", "parameter"} and _only_split(case, tolerance, ranks, wanted):
        return f"no operator: {SPLIT.format(case.plan.schedule, kinds['gradient'])}"
    if found:
        return found + explained(found, case.gm, case.ties(tolerance))
    return next(f"no operator: {said.format(kinds[kind])}" for kind, said in BEHIND.items() if kind in kinds)


def _only_split(case: Case, tolerance: float, ranks: Ranks | None, wanted: Results) -> bool:
    """Whether the schedule splits backwards, and all gradients are right without the split."""
    if len(case.plan.stages) < 2 or not SCHEDULES[case.plan.schedule].splits_backward:
        return False
    gaps = merged(_on_ranks(case, ranks, unsplit, case.source(), case.rank_case, wanted), wanted, everywhere=False)
    return all(
        gaps["gradient", name] <= tolerance * scale(whole)
        for name, whole in wanted["gradient"].items()
        if ("gradient", name) in gaps
    )
