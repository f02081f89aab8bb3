"""What a Problem's nets stand for: a value and who reads it; the seconds of its changes of layout, and the bytes that it keeps.

The same for nodes: bytes that operators keep by themselves. Both ask `problem.saved` what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.layout import NO_GRAD, Layout
from autopar.problem.clusters import Cluster, Joint
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import Pair, pair
from autopar.problem.prices import Prices
from autopar.problem.resting import Resting
from autopar.problem.saved import HOLDERS, Kept, Way
from autopar.problem.types import Use
from autopar.rules.experts import INSIDE
from autopar.rules.language import Option
from autopar.rules.language import Use as TensorUse
from autopar.rules.tiles import tiled

Choice = tuple[Joint, ...]  # one joint option per axis
Home = Mapping[str, tuple[int, int]]  # op name -> (its cluster, its place among the members)


@dataclass(eq=False)
class Link:
    """One net before it has numbers: a value, who reads it, how often per step, and how: an edge, a feed, a carry. `rows` are the ways
    in which its producer lays it, `columns` those in which readers want it; `row` and the columns of `uses` are by choice."""

    program: Program
    ref: Ref
    readers: list[tuple[Op, int]]
    count: int
    kind: str
    producer: int
    cluster: Cluster
    options: Sequence[Choice]  # of the producer
    rows: list[Pair]
    row: np.ndarray
    columns: list[Pair]
    uses: tuple[Use, ...]

    @cached_property
    def way(self) -> Way:
        """Its name in `problem.saved`."""
        reader = self.readers[0][0]
        return Way(self.ref, reader.scope if self.kind == "edge" else reader.name, self.kind)

    @cached_property
    def weight(self) -> bool:
        """Whether the value is a weight."""
        return self.program.is_weight(self.ref)

    @cached_property
    def ahead(self) -> bool:
        """Whether a gather can begin ahead and a gradient be scattered behind: of a parameter itself, not of what was turned or cast first, which is made
        where it is used (runtime.ahead)."""
        return self.weight and self.program.ops[self.ref[0]].role == "param" and not self.opening

    @cached_property
    def opening(self) -> bool:
        """Whether the value is a weight of the model itself that something in front of all blocks reads: it is gathered when nothing computes yet,
        and its gradient is there when nothing computes any more."""
        blocks = [name for run in self.program.runs.values() for name in run.ports]
        if not self.weight or not blocks or self.readers[0][0].scope:
            return False
        order = {name: i for i, name in enumerate(self.program.ops)}
        return any(order[op.name] < min(order[name] for name in blocks) for op, _ in self.readers)

    @cached_property
    def size_bytes(self) -> float:
        """Bytes of the whole value."""
        return self.program.bytes_of(self.ref)

    def asked_by(self, wanted: Callable[[Op, int], bool]) -> set[int]:
        """The columns that the readers ask for of which (op, operand) is `wanted`, under any choice."""
        return {column for (op, operand), use in zip(self.readers, self.uses, strict=True) if operand >= 0 and wanted(op, operand)
                for column in use.column.tolist()}


def links_of(program: Program, clusters: Sequence[Cluster], choices: Sequence[Sequence[Choice]]) -> list[Link]:
    """All nets: reads inside a scope, first values and carried values of runs, and reads of a run's result."""
    home = {op.name: (i, m) for i, c in enumerate(clusters) for m, op in enumerate(c.members)}
    found: list[Link] = []

    def add(ref: Ref, readers: list[tuple[Op, int]], count: int, kind: str = "edge") -> None:
        found.append(_link(program, home, clusters, choices, ref, readers, count, kind))

    for ref, readers in program.readers.items():
        outside = [(op, i) for op, i in readers if home[op.name][0] != home[ref[0]][0]]
        for scope in dict.fromkeys(op.scope for op, _ in outside):
            group = [(op, i) for op, i in outside if op.scope == scope]
            add(ref, group, group[0][0].count)
    ops = program.ops
    for run in program.runs.values():
        outer = ops[run.ports[0]].count // run.count
        for port, feed in zip(run.ports, run.feeds, strict=True):
            add(feed, [(ops[port], -1)], outer, "feed")
        for port, ref in zip(run.ports, run.carried, strict=False):
            if run.count > 1:
                add(ref, [(ops[port], -1)], outer * (run.count - 1), "carry")
    return found


def _link(program: Program, home: Home, clusters: Sequence[Cluster], choices: Sequence[Sequence[Choice]], ref: Ref,
          readers: list[tuple[Op, int]], count: int, kind: str) -> Link:
    producer, member = home[ref[0]]
    rows, row = _distinct([_row(tuple(j.options[member].outs[ref[1]] for j in combo), clusters[producer], combo) for combo in choices[producer]])
    columns: dict[Pair, int] = {}
    uses = []
    for op, operand in readers:
        index, position = home[op.name]
        asked = [pair(tuple(_asked(j.options[position], operand) for j in combo)) for combo in choices[index]]
        uses.append(Use(index, np.array([columns.setdefault(p, len(columns)) for p in asked])))
    return Link(program, ref, readers, count, kind, producer, clusters[producer], choices[producer], rows, row, list(columns), tuple(uses))


def _row(uses: tuple[TensorUse, ...], cluster: Cluster, combo: Choice) -> Pair:
    """How a value lies where it is made; of a parameter also when its gradient is scattered."""
    made = pair(uses)
    return made if cluster.members[0].role != "param" else made._replace(each=Resting.of([j.options[0] for j in combo]).each)


def _asked(option: Option, operand: int) -> TensorUse:
    return option.ins[max(operand, 0)]  # a port (operand -1) takes its value as it passes it on


def _distinct(pairs: Sequence[Pair]) -> tuple[list[Pair], np.ndarray]:
    found: dict[Pair, int] = {}
    index = np.array([found.setdefault(p, len(found)) for p in pairs])
    return list(found), index


def step_s(link: Link, prices: Prices, again: set[int], first: set[int]) -> np.ndarray:
    """Seconds per step of the reshards of a net, [rows, columns]; a weight is gathered again for the columns `again`, in the first block
    of a run of blocks for the columns `first`, and a value may have no gradient there."""
    late = link.program.ops[link.ref[0]].late

    def once_s(columns: Sequence[Pair], twice: set[int]) -> np.ndarray:
        return prices.table_s(link.rows, columns, link.size_bytes, again=[link.weight and c in twice for c in range(len(columns))], weight=link.weight,
                              grad_bytes=prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes) if link.weight else None)

    found = once_s(link.columns, again) * link.count
    if late or (link.weight and again != first):
        spared = once_s(link.columns, again) - once_s([Pair(c.value, (NO_GRAD,)) for c in link.columns] if late else link.columns, first)
        found -= np.where(np.isfinite(found), spared, 0.0) * link.program.first_runs(link.ref)
    return found


def shown(link: Link, prices: Prices, cost_s: np.ndarray, times: np.ndarray) -> np.ndarray | float:
    """The share that shows of what the reshards of a net cost, [rows, columns]: of weights, gathered so many `times`, in the background; all of the
    others and of weights whose block nothing runs before."""
    if not link.weight:
        return 0.0
    if link.opening:
        return 1.0
    grad_bytes = prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes)
    return prices.shown(link.rows, link.columns, link.size_bytes, cost_s / link.count, times, grad_bytes,
                        link.program.weights_bytes.get(link.readers[0][0].scope, 0.0), link.ahead)


def net_bytes(link: Link, keeps: Kept, prices: Prices, again: set[int]) -> np.ndarray:
    """Bytes per device of the copies that reshards of a net make and the backward keeps, or of what lies as it is and the net counts."""
    saved = link.asked_by(lambda op, operand: (op.name, operand) in keeps.reads)
    fresh, held = prices.made_bytes(link.rows, link.columns, link.size_bytes)
    if link.weight:
        # a gathered weight lives only while its block and the one before it run (runtime.ahead), so it counts twice, not once per block; one that
        # is not gathered again stays
        alive = 2 if link.readers[0][0].scope and link.count > 1 else 1
        return held * np.where([c in saved and c not in again for c in range(len(link.columns))], link.count, alive)
    stays = np.array([link.way in keeps.moved or c in saved for c in range(len(link.columns))])
    return stays * np.where(fresh, held * link.count, _owned(link, keeps, prices)[:, None])


def _owned(link: Link, keeps: Kept, prices: Prices) -> np.ndarray:
    """Bytes per device of what the net holds where nothing moves, for each of its rows: the owners that it counts."""
    member = {op.name: m for m, op in enumerate(link.cluster.members)}
    found = np.zeros(len(link.rows))
    for owner, count in keeps.charges.get(link.way, ()):
        size = link.program.bytes_of(owner) * (count or link.count)
        if owner == link.ref:
            found += [prices.local_bytes(size, row.value) for row in link.rows]
        else:  # a view may lie alike where its owner does not: the most that the owner can be
            shares = [prices.local_bytes(size, lies(combo, member[owner[0]], owner[1])) for combo in link.options]
            np.maximum.at(most := np.zeros(len(link.rows)), link.row, shares)
            found += most
    return found


def node_bytes(index: int, cluster: Cluster, options: Sequence[Choice], keeps: Kept, prices: Prices) -> np.ndarray:
    """Bytes per device that cluster number `index` holds under each choice: what rests, and what its operators keep by themselves."""
    program, found = keeps.program, np.zeros(len(options))
    place = {op.name: m for m, op in enumerate(cluster.members)}
    own = [(ref, program.ops[ref[0]].count) for ref in keeps.own.get(index, ())] + keeps.given.get(index, [])
    for i, combo in enumerate(options):
        for member, op in enumerate(cluster.members):
            chosen = tuple(joint.options[member] for joint in combo)
            if op.role in HOLDERS:
                found[i] += prices.rest_bytes(op, chosen)
            elif keeps.beside(op) and (op.extra_bytes or op.copies or op.target in INSIDE or any(option.run for option in chosen)):
                found[i] += prices.extra_bytes(op, chosen)
        for (name, output), count in own:
            found[i] += prices.local_bytes(program.bytes_of((name, output)), lies(combo, place[name], output)) * count
    return found


def passing_bytes(cluster: Cluster, options: Sequence[Choice], prices: Prices) -> np.ndarray | None:
    """Bytes per device that operators of a cluster have of weights while they run only, under each choice; None where that is nothing."""
    found = np.zeros(len(options))
    for i, combo in enumerate(options):
        for member, op in enumerate(cluster.members):
            chosen = tuple(joint.options[member] for joint in combo)
            if tiled(chosen) > 1:
                found[i] += prices.passing_bytes(op, chosen)
    return found if found.any() else None


def lies(combo: Choice, member: int, output: int) -> Layout:
    """How an output of a member lies under one choice."""
    return tuple(joint.options[member].outs[output].value for joint in combo)
