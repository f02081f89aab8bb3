"""Collectives of operators outside of blocks, priced in program order: by how much a pass is longer than its aggregate price says.

The aggregate price of a pass (pipeline.passes) overlaps all of its background collectives with all of its compute. In program order
less may overlap: a gather can only run between the gather before it and its use, and the sum of a gradient only after that gradient.

    forward    a gather begins with the gather before it (runtime.prefetch); gathers after a run of blocks begin with its last blocks
    backward   the same in reverse order; the scatter of a gradient to the layout of its leaf is waited for when enough bytes are
               queued behind it (autopar.deferred_waits); then the gradient is summed over ranks in buckets (runtime.gradsync)

Blocks are priced in aggregate also here (pass_clock.BlockRun).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.pipeline.pass_clock import BlockRun, Clock, Prefetched
from autopar.pipeline.pass_ends import Stop, Stops, Sum
from autopar.pipeline.work import BACKWARD, Pass, least_s
from autopar.problem.graph import Program


@dataclass(eq=False)
class _GradientSums:
    """How the aggregate price counts the sums of gradients of one scope: `exposed_s` seconds after all compute, `background_s` seconds by axis.
    `of_block` are the sums of one block, as the clock runs them."""

    exposed_s: float = 0.0
    background_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    of_block: list[Sum] = field(default_factory=list)


class Timeline:
    """The collectives of a program by operator, and the seconds that program order adds to each pass."""

    def __init__(self, program: Program) -> None:
        self.program, self.stops = program, Stops(program)
        self.gathers_bytes: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # by scope and pass: of each weight of a block
        self._sums: defaultdict[str, _GradientSums] = defaultdict(_GradientSums)

    def add_sum(self, reader: tuple[str, str], gradient: Sum, count: float, hidden: Sequence[float]) -> None:
        """Note the sum of a weight's gradient.

        `reader`: scope of blocks ("" for none) and operator that read the weight first. `count`: instances in all blocks.
        `hidden`: of each collective the share that the aggregate price puts in the background.
        """
        scope, name = reader
        sums, per_block = self._sums[scope], count / (self.program.runs[scope].count if scope else 1)
        for load, share in zip(gradient.sent.way, hidden, strict=True):
            sums.exposed_s += count * (1.0 - share) * load.seconds
            sums.background_s[load.axis] += count * share * load.seconds
        if scope:
            sums.of_block.append(gradient.times(per_block))
        else:
            self.stops.at(self.program.ops[name], back=True).sums.append(gradient)

    def more_s(self, scopes: Mapping[str, Sequence[Pass]], exposed: Mapping[str, float], way: int, contention: float, *, gathers_first: bool) -> float:
        """Seconds that program order adds to the aggregate price of the pass `way`.

        `scopes`: by scope ("" for what is outside of blocks) the aggregate passes; `exposed`: the share of their background collectives
        that the aggregate price exposes. `gathers_first`: the first gathers begin with the pass, as in a backward right after its forward.

        Never negative where there are blocks. Without blocks every operator is known, so that the time in program order is the price, even where it is
        less than the aggregate one; it is not below the price with all collectives overlapped by all compute.
        """
        backward, nothing = way == BACKWARD, _GradientSums()
        sums = {scope: self._sums[scope] if backward else nothing for scope in scopes}
        runs = {scope: BlockRun.of(passes[way], self.program.runs[scope].count, self.gathers_bytes[scope, way], sums[scope].of_block,
                                   sums[scope].exposed_s, sums[scope].background_s, contention)
                for scope, passes in scopes.items() if scope}
        exposed_s = self._exposed_s(runs, contention, backward=backward, gathers_first=gathers_first)
        outside_s = scopes[""][way].work_s - sums[""].exposed_s - self._opening_s(backward=backward) if "" in scopes else 0.0
        ordered_s = outside_s + exposed_s + sum(run.seconds for run in runs.values())
        aggregate_s = sum(passes[way].work_s + exposed[scope] * passes[way].background_s for scope, passes in scopes.items())
        least = aggregate_s if runs else sum(least_s(passes[way], contention) for passes in scopes.values())
        return max(ordered_s, least) - aggregate_s

    def _opening_s(self, *, backward: bool) -> float:
        """Seconds of gathers before any compute. The aggregate price counts them as work; the clock counts them as exposed."""
        return sum(load.seconds for stop in self.stops.named("", back=backward).values() for _, sent in stop.opens for load in sent.way)

    def _exposed_s(self, runs: Mapping[str, BlockRun], contention: float, *, backward: bool, gathers_first: bool) -> float:
        """Seconds in which the pass, in program order, waits for gathers and gradients, or computes slower because of them."""
        at_ports = {self.program.runs[scope].ports[0]: run for scope, run in runs.items()}
        items: dict[str, Stop | BlockRun] = {**self.stops.named("", back=backward), **at_ports}
        order = [items[name] for name in sorted(items, key=lambda name: self.program.order[name], reverse=backward)]
        return _ordered_s(order, contention, blocks=bool(runs), gathers_first=gathers_first)


def waits_s(stops: Sequence[Stop], contention: float) -> float:
    """Exposed seconds of a pass over a pipeline stage that has no blocks: its operators `stops` in the order in which they run."""
    return _ordered_s(stops, contention, blocks=False, gathers_first=False)


def _ordered_s(order: Sequence[Stop | BlockRun], contention: float, *, blocks: bool, gathers_first: bool) -> float:
    """Exposed seconds of the items of a pass, run in that order."""
    clock = Clock([gather for item in order for gather in _gathers(item)], contention, blocks=blocks)
    if gathers_first:
        clock.begin_gathers(1)
    for item in order:
        clock.wait_for_gathers(len(_gathers(item)), item.early_s if isinstance(item, BlockRun) else 0.0)
        if isinstance(item, BlockRun):
            clock.run_blocks(item)
        else:
            clock.run_operator(item)
    return clock.exposed_s()


def _gathers(item: BlockRun | Stop) -> list[Prefetched]:
    """The gathers that an item waits for before it runs."""
    return item.prefetched if isinstance(item, BlockRun) else [(sent, ()) for _, sent in (*item.opens, *item.takes)]
