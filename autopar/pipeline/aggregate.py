"""The seconds of each piece in each pass: its work, and its part of the exposed communication.

Exposed communication is found per *scope*, which is a run of blocks, or all operators outside of blocks ("") together:
all background collectives of a scope overlap all of its work (pipeline.work.shown_s). The share that is exposed is the
same for all pieces of a scope. Where this is known to be wrong it is corrected:

    after the blocks  gathers of a stage overlap its last blocks
    no blocks         a piece overlaps no more than itself and the one before it
    program order     of a step of one stage, and of a stage that a pipeline may have, see pipeline.clock
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.buckets import BUCKET_BYTES
from autopar.pipeline.clock import Timeline
from autopar.pipeline.stops import AHEAD
from autopar.pipeline.work import BACKWARD, FORWARD, PASSES, Did, Pass, exposed_share, shown_s
from autopar.problem.graph import Program


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The work of all pieces, by name, of `program`. `apart`: they are in different stages of a pipeline. `at_once`: a
    backward follows its forward, of the only microbatch, and begins with the gathers of its first block. `line` has the
    collectives in program order."""

    program: Program
    did: Mapping[str, Did]
    line: Timeline
    apart: bool
    at_once: bool

    def seconds(self, contention: float) -> dict[str, list[float]]:
        """By piece, the seconds of each pass, where background collectives take `contention` of the compute units."""
        scopes = self._scopes()
        exposed = {scope: [exposed_share(total, contention) for total in totals] for scope, totals in scopes.items()}
        if self.apart and "" in scopes:
            exposed[""][FORWARD] = self._exposed_after_blocks(scopes, exposed[""][FORWARD], contention)
        found = self._seconds(exposed)
        if self.apart:
            if not self.program.runs:
                self._without_blocks(found, contention)
            return found
        for way in (FORWARD, BACKWARD):
            follows_forward = way == BACKWARD and self.at_once
            more_s = self.line.more_s(
                scopes,
                {scope: each[way] for scope, each in exposed.items()},
                way,
                contention,
                gathers_first=follows_forward,
            )
            shares_s = {name: self._moved_s(name, way, own_s[way], more_s) for name, own_s in found.items()}
            for name, own_s in found.items():
                own_s[way] += more_s * shares_s[name] / (sum(shares_s.values()) or 1.0)
        return found

    def all_exposed_s(self) -> dict[str, list[float]]:
        """By piece, the seconds of each pass where collectives and compute share cores, so that nothing overlaps."""
        return self._seconds({scope: [1.0 for _ in PASSES] for scope in self._scopes()})

    def _scope(self, name: str) -> str:
        """The scope of a piece."""
        return name if name in self.program.runs else ""

    def _scopes(self) -> dict[str, list[Pass]]:
        """By scope, the passes over all of its pieces."""
        scopes: dict[str, list[Pass]] = {}
        for name, did in self.did.items():
            for total, part in zip(
                scopes.setdefault(self._scope(name), [Pass() for _ in PASSES]), did.passes, strict=True
            ):
                total.add(part)
        return scopes

    def _seconds(self, exposed: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """By piece, the seconds of each pass with the share `exposed`, by scope and pass, of its background
        collectives."""
        return {
            name: [
                part.work_s + share * part.background_s
                for part, share in zip(did.passes, exposed[self._scope(name)], strict=True)
            ]
            for name, did in self.did.items()
        }

    def _without_blocks(self, found: dict[str, list[float]], contention: float) -> None:
        """Raise the seconds of pieces of a model without blocks. Which pieces will share a stage is not known yet. So
        the background collectives of a piece overlap at most its own compute, and no more than all pieces before it
        compute: during that its gathers begin and the scatters of the others go on."""
        before_s = [0.0] * len(PASSES)
        for name, did in self.did.items():
            for way, part in enumerate(did.passes):
                own = Pass()
                own.add(part)
                own.compute_s = min(part.compute_s, before_s[way])
                found[name][way] = max(found[name][way], part.work_s + shown_s(own, contention))
                before_s[way] += part.compute_s

    def _moved_s(self, name: str, way: int, own_s: float, more_s: float) -> float:
        """What the share of a piece, priced at `own_s`, in the seconds `more_s` goes by: its collectives that compute
        need not wait for; if `more_s` is negative, what its price has of these."""
        part = self.did[name].passes[way]
        if more_s < 0.0:
            return max(0.0, own_s - part.work_s) + part.after.moving_s + part.in_order.all_s
        return part.background_s + part.after.all_s

    def _exposed_after_blocks(self, scopes: Mapping[str, Sequence[Pass]], share: float, contention: float) -> float:
        """The exposed share of the gathers of a stage for operators after its blocks; `share` where there are no
        blocks. These gathers begin with the last block, or a few blocks earlier (runtime.prefetch), and overlap the
        compute of those blocks that the blocks' own collectives do not overlap."""
        outside, last = (
            scopes[""][FORWARD],
            next((scope for scope in reversed(self.program.runs) if scope in scopes), None),
        )
        if last is None or not outside.background_s:
            return share
        blocks, count = scopes[last][FORWARD], self.program.runs[last].count
        block_bytes = sum(sent.nbytes for stop in self.line.stops.of(last, AHEAD) for _, sent in stop.takes)
        reached = min(count, math.ceil(BUCKET_BYTES / max(1.0, block_bytes)))
        hidden_s = min(outside.background_s, max(0.0, blocks.work_s - blocks.background_s) * reached / count)
        return 1.0 - (1.0 - contention) * hidden_s / outside.background_s
