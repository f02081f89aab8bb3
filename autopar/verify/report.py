"""What a verification found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. `kind` is output, loss, gradient, parameter, buffer, collectives, tables (what the emitted model
    says of itself), or model (its graph against it); `error` is the largest absolute difference relative to max(1,
    largest absolute value), for collectives the number (or the bytes) that differ, for tables their number. `when` is
    empty in the first step."""

    name: str
    kind: str
    error: float
    tolerance: float
    when: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # a NaN is not

    @property
    def title(self) -> str:
        """What is compared, and when."""
        return f"{self.name}, {self.when}" if self.when else self.name


@dataclass(frozen=True, slots=True)
class Report:
    """All comparisons. `mesh` has the places of a pipeline in front. `first` names the first wrong node, or says what
    else is wrong where all nodes of the first step are right; empty where nothing is. `collectives` is the number that
    one rank of each place ran in the step, summed over places. `notes` say what is not compared (dropout)."""

    rows: tuple[Row, ...]
    mesh: tuple[int, ...]
    first: str = ""
    collectives: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every value is within its tolerance (an empty report is not)."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def worst(self) -> Row:
        """The comparison that is farthest beyond, or nearest to, its tolerance."""
        return max(self.rows, key=lambda row: (not row.ok, row.error))

    @property
    def value_error(self) -> float:
        """The largest error of any value: of all comparisons but those of collectives and tables."""
        return max((row.error for row in self.rows if row.kind not in ("collectives", "tables")), default=0.0)

    def __str__(self) -> str:
        """One line: how many values are wrong, the largest difference, and the first wrong node."""
        if not self.rows:
            return "nothing was compared"
        wrong, worst = [row for row in self.rows if not row.ok], self.worst
        said = (
            f"{len(wrong)} of {len(self.rows)} values are wrong"
            if wrong
            else f"all {len(self.rows)} values are within their tolerance"
        )
        first = f"; first node that differs: {self.first}" if self.first else ""
        return (
            f"{said} on mesh {self.mesh}: the largest difference is {worst.error:.2g} of {worst.kind} {worst.title}, "
            f"tolerance {worst.tolerance:.2g}{first}"
        )

    def to_json(self) -> str:
        """Every tensor's error as JSON."""
        data = {
            "ok": self.ok,
            "mesh": list(self.mesh),
            "first": self.first,
            "collectives": self.collectives,
            "notes": list(self.notes),
            "rows": [asdict(row) | {"ok": row.ok} for row in self.rows],
        }
        return json.dumps(data, indent=1) + "\n"
