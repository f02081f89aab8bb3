"""The optimizer's step of weights that several pieces read: pieces are priced as if each were on a place of its own (pipeline.costs), but a place
has such a weight once, though each of its stages sums a gradient of its own (runtime.pipeline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.pipeline.units import homes, units
from autopar.problem.build import Model


@dataclass(frozen=True, slots=True)
class Update:
    """The optimizer's step of one weight: its `seconds`, which the prices of all `pieces` have."""

    pieces: Mapping[str, None]
    seconds: float

    def too_many_s(self, place: Sequence[str]) -> float:
        """Seconds that the prices of the pieces of one place have too many."""
        return self.seconds * max(0, sum(name in self.pieces for name in place) - 1)


def shared_updates(once: Model, choice: Sequence[int]) -> list[Update]:
    """Those of weights of the model itself that several pieces outside of blocks read; `once` says what a step costs once, `choice` is a solution of it."""
    program = once.links[0].program
    shared = [op for op in program.ops.values() if op.role == "param" and not op.scope and len(program.readers.get((op.name, 0), ())) > 1]
    home, at = homes(program, units(program)) if shared else {}, {cluster.members[0].name: index for index, cluster in enumerate(once.clusters)}
    found = []
    for op in shared:
        pieces = {home[reader.name]: None for reader, _ in program.readers[op.name, 0]}
        alone = {name: None for name in pieces if name not in program.runs}
        found.append(Update(alone, once.update_s(at[op.name], choice[at[op.name]])))
    return [update for update in found if len(update.pieces) > 1]
