"""Predictions beside measurements, and the tables of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from autopar.memory import Prediction as Held
from benchmarks.costmodel.metrics import kendall, mean, regret, relative_error
from benchmarks.costmodel.predict import Prediction
from benchmarks.costmodel.rows import KINDS, Peak, Row

BEYOND = 0.35
"""Errors over this are listed one by one."""


@dataclass(frozen=True)
class Result:
    """One row with its prediction; `held` is that of the memory of each place, None where none was published (or it
    cannot be told)."""

    row: Row
    prediction: Prediction
    held: Held | None = None

    @property
    def error(self) -> float:
        """Relative error of the step time, NaN where none was published."""
        return relative_error(self.prediction.step_s, self.row.step_s) if self.row.step_s else math.nan

    @property
    def peaks(self) -> list[tuple[Peak, float]]:
        """Each published peak with the bytes that are predicted for it."""
        if self.held is None:
            return []
        return [
            (peak, (self.held.fullest if peak.place is None else self.held.places[peak.place]).peak_bytes)
            for peak in self.row.peaks
        ]


def groups(results: Sequence[Result]) -> list[list[Result]]:
    """Rows that differ in the configuration alone, two or more together."""
    found: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for result in results:
        if result.row.group and result.row.step_s:
            found[result.row.source, *result.row.group].append(result)
    return [group for group in found.values() if len(group) > 1]


def summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One line per source, complete rows and others apart."""
    lines = []
    for source, complete in dict.fromkeys((r.row.source, r.row.complete) for r in results):
        mine = [r for r in results if (r.row.source, r.row.complete) == (source, complete)]
        timed = [r for r in mine if not math.isnan(r.error)]
        together = groups(mine)
        pairs = [([r.prediction.step_s for r in group], [r.row.step_s or 0.0 for r in group]) for group in together]
        every = ([r.prediction.step_s for r in timed], [r.row.step_s or 0.0 for r in timed])
        lines.append(
            {
                "source": source,
                "complete": "yes" if complete else "no",
                "rows": len(mine),
                "MAE %": 100 * mean([abs(r.error) for r in timed]),
                "bias %": 100 * mean([r.error for r in timed]),
                f"> {100 * BEYOND:.0f} %": sum(abs(r.error) > BEYOND for r in timed),
                "tau, all": kendall(*every),
                "groups": len(together),
                "tau in groups": mean([kendall(*pair) for pair in pairs]),
                "regret %": 100 * mean([regret(*pair) for pair in pairs]),
            }
        )
    return lines


def memory_summary(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One line per source and kind of peak, and one for all of a kind; complete rows and others apart."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in results:
        for peak, predicted in result.peaks:
            for source in (result.row.source, "all"):
                found[peak.kind, source, "yes" if result.row.complete else "no"].append(
                    relative_error(predicted, peak.nbytes)
                )
    order = sorted(found, key=lambda key: (KINDS.index(key[0]), key[1] == "all"))
    return [
        {
            "counted": kind,
            "source": source,
            "complete": complete,
            "peaks": len(errors),
            "MAE %": 100 * mean([abs(e) for e in errors]),
            "bias %": 100 * mean(errors),
            "worst %": 100 * max(errors, key=abs),
        }
        for kind, source, complete in order
        for errors in [found[kind, source, complete]]
    ]


def memory_text(results: Sequence[Result]) -> str:
    """The table of peaks; empty where none was published."""
    lines = [{key: _shown(value) for key, value in line.items()} for line in memory_summary(results)]
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True)


def summary_text(results: Sequence[Result]) -> str:
    """The table by source; columns that no source has are left out."""
    lines = summary(results)
    known = [key for key in lines[0] if any(not _missing(line[key]) for line in lines)] if lines else []
    shown = [{key: _shown(line[key]) for key in known} for line in lines]
    return tabulate(shown, headers="keys", tablefmt="github", disable_numparse=True)


def _missing(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _shown(value: object) -> str:
    if _missing(value):
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def worst_text(results: Sequence[Result], count: int) -> str:
    """The `count` rows with the largest errors of the step, and all beyond `BEYOND` of complete rows, with what is
    known about them."""
    timed = sorted((r for r in results if not math.isnan(r.error)), key=lambda r: -abs(r.error))
    chosen = [r for i, r in enumerate(timed) if i < count or (abs(r.error) > BEYOND and r.row.complete)]
    lines = [
        {
            "row": r.row.name,
            "source": r.row.source,
            "configuration": configuration(r.row),
            "measured s": r.row.step_s,
            "predicted s": r.prediction.step_s,
            "error %": 100 * r.error,
            "remarks": "; ".join(r.row.remarks)[:120],
        }
        for r in chosen
    ]
    return tabulate(lines, headers="keys", tablefmt="github", floatfmt=".3g")


def configuration(row: Row) -> str:
    """A row's sizes in a few words."""
    s, m = row.setup, row.model
    return (
        f"{m.layers}x{m.hidden} s{s.seq} tp{s.tp} cp{s.cp} pp{s.pp}x{s.vpp} ep{s.ep} dp{s.dp} zero{s.zero} "
        f"mb{s.micro_batch}x{s.microbatches} {s.recompute} {s.software.matmul or row.precision} {row.cluster.name}"
    )


def explained(result: Result) -> str:
    """The parts of one prediction."""
    lines = [f"{result.row.name}: {configuration(result.row)}"]
    lines += [
        f"  {name.removesuffix('_s'):<10} {1e3 * value:10.2f} ms {100 * value / result.prediction.step_s:5.1f} %"
        for name, value in vars(result.prediction).items()
    ]
    measured = f", measured {1e3 * result.row.step_s:.2f} ms ({100 * result.error:+.1f} %)" if result.row.step_s else ""
    return "\n".join(
        [*lines, f"  step       {1e3 * result.prediction.step_s:10.2f} ms{measured}", *map(_peak_text, result.peaks)]
    )


def _peak_text(pair: tuple[Peak, float]) -> str:
    peak, predicted = pair
    where = "the fullest place" if peak.place is None else f"place {peak.place}"
    return (
        f"  memory     {predicted / 2**30:10.2f} GiB on {where}, measured {peak.nbytes / 2**30:.2f} GiB {peak.kind} "
        f"({100 * relative_error(predicted, peak.nbytes):+.1f} %)"
    )


def as_json(results: Sequence[Result], refused: Sequence[str]) -> dict[str, Any]:
    """All numbers, JSON types only."""
    rows = [
        {
            "row": r.row.name,
            "source": r.row.source,
            "complete": r.row.complete,
            "measured_s": r.row.step_s,
            "predicted_s": r.prediction.step_s,
            "parts": dict(vars(r.prediction)),
            "peaks": [
                {"place": peak.place, "kind": peak.kind, "measured_bytes": peak.nbytes, "predicted_bytes": predicted}
                for peak, predicted in r.peaks
            ],
        }
        for r in results
    ]
    return {
        "summary": [{key: None if _missing(v) else v for key, v in line.items()} for line in summary(results)],
        "memory": memory_summary(results),
        "rows": rows,
        "refused": list(refused),
    }
