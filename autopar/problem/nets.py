"""Links: what the nets of a Problem stand for. A value and its readers, the seconds of its reshards, and the bytes that are kept because of it.

Also the bytes of nodes: what operators keep by themselves. Both ask `problem.saved` what the backward keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.layout import NO_GRAD, Layout
from autopar.problem.at_rest import Resting
from autopar.problem.cluster_members import Choice, Member
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import Prices
from autopar.problem.saved import HOLDERS, Kept, NetKey
from autopar.problem.types import Net, Use
from autopar.rules.experts import INSIDE

COPIES, LYING = "copies", "lying"
"""Which bytes a net counts: the copies that its reshards make, and the value itself where a reader takes it in the layout that it is made in."""

Home = Mapping[str, tuple[int, int]]  # op name -> (its cluster, its place among the members)


@dataclass(eq=False)
class Link:
    """One net without its prices: a value and its readers.

    `count` is how often per step it is read, `kind` how: "edge" (by operators), "feed" (into a run of blocks) or "carry" (from block to block).
    `rows` are the layouts in which its producer may make it, `columns` those that readers may ask for; `row` and the columns of `uses` index
    them by choice. `counts` says which bytes it counts. A link that does not `moves` has no reshards, only bytes (problem.kept_bytes).
    """

    program: Program
    ref: Ref
    readers: list[tuple[Op, int]]
    count: int
    kind: str
    producer: int
    cluster: Cluster
    members: Sequence[Member]  # of the cluster that makes it
    rows: list[LayoutPair]
    row: np.ndarray
    columns: list[LayoutPair]
    uses: tuple[Use, ...]
    counts: tuple[str, ...] = (COPIES, LYING)
    moves: bool = True

    @cached_property
    def way(self) -> NetKey:
        """Its name in `problem.saved`."""
        reader = self.readers[0][0]
        return NetKey(self.ref, reader.scope if self.kind == "edge" else reader.name, self.kind)

    @cached_property
    def weight(self) -> bool:
        """Whether the value is a weight."""
        return self.program.is_weight(self.ref)

    @cached_property
    def ahead(self) -> bool:
        """Whether its gathers can begin before their use and its gradient's scatters be waited for later (runtime.prefetch, runtime.gradsync)."""
        return self.weight and not self.opening

    @property
    def again_ahead(self) -> bool:
        """Whether its gathers in the backward can begin before their use: some operator's backward runs before that of its reader, or the gather
        begins with the backward."""
        return self.weight and self.kind != "feed"

    @cached_property
    def opening(self) -> bool:
        """Whether the value is the first weight that a forward reads (of those that `leads`): when it is gathered, nothing computes yet, and when its
        gradient comes, nothing computes any more, so that neither can hide."""
        first = self.kind == "feed" or any(op.name == self.program.first_read for op, _ in self.readers)
        return first and any(self.leads)

    @cached_property
    def leads(self) -> Sequence[bool]:
        """For each reader, whether the value is a weight outside of blocks that is read before all blocks. A weight that is fed to blocks counts as
        one: it is waited for before the first block, and its gradient comes after the last backward of a block."""
        blocks = [name for run in self.program.runs.values() for name in run.ports]
        if not self.weight or not blocks or self.readers[0][0].scope:
            return (self.weight and self.kind == "feed",) * len(self.readers)
        order = self.program.order
        return [order[op.name] < min(order[name] for name in blocks) for op, _ in self.readers]

    @property
    def last(self) -> float:
        """For a weight of a run of blocks: the share of its gradients that comes from the block whose backward is last; 0 for other values."""
        scope = self.readers[0][0].scope
        return 1.0 / self.program.runs[scope].count if self.weight and scope else 0.0

    @cached_property
    def size_bytes(self) -> float:
        """Bytes of the whole value."""
        return self.program.bytes_of(self.ref)

    @cached_property
    def runs(self) -> np.ndarray:
        """For each row, whether the value is the result of a runtime algorithm under all choices that lead to that row."""
        member = self.members[next(m for m, op in enumerate(self.cluster.members) if op.name == self.ref[0])]
        found = np.ones(len(self.rows), bool)
        np.logical_and.at(found, self.row, np.array(member.runs)[member.at])
        return found

    def asked_by(self, wanted: Callable[[Op, int], bool]) -> set[int]:
        """The columns that readers may ask for, under any choice, counting those readers whose (op, operand) is `wanted`."""
        return {column for (op, operand), use in zip(self.readers, self.uses, strict=True) if operand >= 0 and wanted(op, operand)
                for column in use.column.tolist()}


def links_of(program: Program, clusters: Sequence[Cluster], members: Sequence[Sequence[Member]]) -> list[Link]:
    """All nets: reads inside a scope, first values and carried values of runs, and reads of a run's result. `members` are those of the clusters."""
    home = {op.name: (i, m) for i, c in enumerate(clusters) for m, op in enumerate(c.members)}
    found: list[Link] = []

    def add(ref: Ref, readers: list[tuple[Op, int]], count: int, kind: str = "edge") -> None:
        found.append(_link(program, home, clusters, members, ref, readers, count, kind))

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


def _link(program: Program, home: Home, clusters: Sequence[Cluster], members: Sequence[Sequence[Member]], ref: Ref,
          readers: list[tuple[Op, int]], count: int, kind: str) -> Link:
    producer, member = home[ref[0]]
    made = members[producer][member]
    rows, row = _rows(made, ref[1], members[producer][0])
    columns: dict[LayoutPair, int] = {}
    uses = []
    for op, operand in readers:
        index, position = home[op.name]
        reader = members[index][position]
        # a port (operand -1) takes its value as it passes it on
        asked = [columns.setdefault(LayoutPair.of_uses(tuple([option.ins[max(operand, 0)] for option in way])), len(columns)) for way in reader.ways]
        uses.append(Use(index, np.array(asked)[reader.at]))
    return Link(program, ref, readers, count, kind, producer, clusters[producer], members[producer], rows, row, list(columns), tuple(uses))


def _rows(made: Member, output: int, first: Member) -> tuple[list[LayoutPair], np.ndarray]:
    """The layouts in which a value may be made, and the index of each choice among them. For parameters these differ also by when the gradient is
    scattered, which the `first` member of the cluster says."""
    ways = [LayoutPair.of_uses(tuple([option.outs[output] for option in way])) for way in made.ways]
    if first.op.role != "param":
        return _distinct(ways, made.at)
    each = [Resting.of(way).each for way in first.ways]
    return _distinct([ways[i]._replace(each=each[j]) for i, j in zip(made.at.tolist(), first.at.tolist(), strict=True)], np.arange(len(made.at)))


def _distinct(pairs: Sequence[LayoutPair], at: np.ndarray) -> tuple[list[LayoutPair], np.ndarray]:
    """The distinct `pairs`, and `at`, which indexes `pairs`, as an index of these."""
    found: dict[LayoutPair, int] = {}
    index = np.array([found.setdefault(p, len(found)) for p in pairs])
    return list(found), index[at]


def step_s(link: Link, prices: Prices, again: set[int], first: set[int]) -> np.ndarray:
    """Seconds per step of the reshards of a net, [rows, columns].

    A weight is gathered a second time, for the backward, for the columns `again`; in the first block of a run, for the columns `first` only,
    since values that enter it may have no gradient.
    """
    late = link.program.ops[link.ref[0]].late

    def once_s(columns: Sequence[LayoutPair], twice: set[int]) -> np.ndarray:
        return prices.table_s(link.rows, columns, link.size_bytes, again=[link.weight and c in twice for c in range(len(columns))], weight=link.weight,
                              grad_bytes=prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes) if link.weight else None)

    found = once_s(link.columns, again) * link.count
    if late or (link.weight and again != first):
        spared = once_s(link.columns, again) - once_s([LayoutPair(c.value, (NO_GRAD,)) for c in link.columns] if late else link.columns, first)
        found -= np.where(np.isfinite(found), spared, 0.0) * link.program.first_runs(link.ref)
    return found


def shown(link: Link, prices: Prices, cost_s: np.ndarray, times: np.ndarray) -> np.ndarray | float:
    """The share of the cost of a net's reshards that is exposed whatever there is to hide under (Net.shown), [rows, columns].

    Weights, gathered `times` times per step, move in the background, unless nothing computes before they are needed (`opening`). The cost of
    other nets belongs to no group, so that their share does not matter (0).
    """
    if not link.weight:
        return 0.0
    if link.opening:
        return 1.0
    grad_bytes = prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes)
    scope = link.readers[0][0].scope
    return prices.shown(link.rows, link.columns, link.size_bytes, cost_s / link.count, times, grad_bytes,
                        link.program.weights_bytes.get(scope, 0.0), link.last, link.ahead)


def net_bytes(link: Link, keeps: Kept, prices: Prices, again: set[int]) -> np.ndarray:
    """Bytes per device of the copies that reshards of a net make and the backward keeps, or of what lies as it is and the net counts."""
    saved = link.asked_by(lambda op, operand: (op.name, operand) in keeps.reads)
    fresh, held = prices.made_bytes(link.rows, link.columns, link.size_bytes)
    if link.weight:
        # a gathered weight lives while its block and the one before it run (runtime.prefetch), so it counts twice and not once per block; intermediate
        # results of its chain of gathers live one block longer; a weight that is not gathered again for the backward stays, once per block
        alive = 2 if link.readers[0][0].scope and link.count > 1 else 1
        halfway = (alive + 1 if alive > 1 else 1) * prices.halfway_bytes(link.rows, link.columns, link.size_bytes)
        return halfway + held * np.where([c in saved and c not in again for c in range(len(link.columns))], link.count, alive)
    stays = np.array([link.way in keeps.moved or c in saved for c in range(len(link.columns))])
    copies = held * link.count if COPIES in link.counts else 0.0
    return stays * np.where(fresh, copies, _owned(link, keeps, prices)[:, None] if LYING in link.counts else 0.0)


def bytes_alone(link: Link, keeps: Kept, prices: Prices) -> Net:
    """The net of a link that moves nothing."""
    nothing = np.zeros((len(link.rows), len(link.columns)))
    held = nothing if prices.late else net_bytes(link, keeps, prices, set())
    return Net(f"{link.ref[0]}:{link.ref[1]} {' and '.join(link.counts)}", link.producer, link.row, link.uses, nothing, held)


def _owned(link: Link, keeps: Kept, prices: Prices) -> np.ndarray:
    """Bytes per device that the net counts where its reader takes the value as it is made, for each row: those of the owners (problem.saved)."""
    place = {op.name: m for m, op in enumerate(link.cluster.members)}
    found = np.zeros(len(link.rows))
    for owner, count in keeps.charges.get(link.way, ()):
        size = link.program.bytes_of(owner) * (count or link.count)
        if owner == link.ref:
            found += [prices.local_bytes(size, row.value) for row in link.rows]
        else:  # views with the same layout may have owners with different ones: count the largest
            own = link.members[place[owner[0]]]
            shares = np.array([prices.local_bytes(size, layout) for layout in own.lying(owner[1])])[own.at]
            np.maximum.at(most := np.zeros(len(link.rows)), link.row, shares)
            found += most
    if link.way in keeps.behind:
        size = link.program.bytes_of(keeps.behind[link.way]) * link.count
        found += [prices.local_bytes(size, row.value) for row in link.rows]
    return found


def node_bytes(index: int, members: Sequence[Member], keeps: Kept, prices: Prices) -> np.ndarray:
    """Bytes per device that cluster number `index`, of these members, holds under each choice: parameters and their state, and what its operators
    keep by themselves."""
    program, found = keeps.program, np.zeros(len(members[0].at))
    named = {member.op.name: member for member in members}
    own = [(ref, program.ops[ref[0]].count) for ref in keeps.own.get(index, ())] + keeps.given.get(index, [])
    for member in members:
        op = member.op
        if op.role in HOLDERS:
            found += member.each(prices.rest_bytes)
        elif keeps.beside(op):
            always = bool(op.extra_bytes or op.copies or op.target in INSIDE)
            wanted = [(always or run) and stays for run, stays in zip(member.runs, _stays(member, keeps), strict=True)]
            if any(wanted):
                found += member.each(prices.extra_bytes, wanted)
    for (name, output), count in own:
        size, member = program.bytes_of((name, output)), named[name]
        each = zip(member.lying(output), _stays(member, keeps), strict=True)
        found += np.array([prices.local_bytes(size, layout) * count * stays for layout, stays in each])[member.at]
    return found


def _stays(member: Member, keeps: Kept) -> list[bool]:
    """For each way of a member whose results are kept, whether they do stay: in a block that is run again, operators that use a runtime algorithm
    run again too, so theirs do not."""
    return [not run or member.op.scope not in keeps.reruns for run in member.runs]


def passing_bytes(members: Sequence[Member], prices: Prices) -> np.ndarray | None:
    """Bytes per device of weights that exist only while operators of a cluster run (gathered in tiles), under each choice; None where there are none."""
    found = [member.each(prices.passing_bytes, member.tiles) for member in members if any(member.tiles)]
    total = np.sum(found, axis=0) if found else np.zeros(1)
    return total if total.any() else None


def lies(combo: Choice, member: int, output: int) -> Layout:
    """The layout of an output of a member under one choice."""
    return tuple(joint.options[member].outs[output].value for joint in combo)
