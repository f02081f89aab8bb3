"""The costs of the Problem's nets and nodes: seconds of the reshards of each value, and bytes per device that are kept
because of a value or an operator.

A *link* says which value and which of its readers a net stands for. What the backward keeps is decided in
`problem.saved`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.layout import NO_GRAD, Layout
from autopar.problem.at_rest import Resting
from autopar.problem.cluster_members import Choice, Member
from autopar.problem.clusters import Cluster
from autopar.problem.graph import HOLDERS, Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import MovedWeight, Prices
from autopar.problem.saved import Kept, NetKey
from autopar.problem.types import Net, Use
from autopar.rules.experts import INSIDE

COPIES, AS_MADE = "copies", "as made"
"""The bytes that a net may count: of copies that its reshards make, and of the value itself where a reader takes it in
the layout in which it is made."""


@dataclass(eq=False)
class Link:
    """One net without its costs: the value `ref`, and its `readers` as (op, number of the operand; -1 for a port of a
    run of blocks).

    `count` is how often per step it is read, `kind` how: "edge" (by operators), "feed" (into a run of blocks) or
    "carry" (from block to block). `producer` is the number of the cluster that makes it. `rows` are the layouts in
    which that may make it, `columns` those that readers may ask for; `row` [choices of the producer] and the columns of
    `uses` index them. `counts` says which bytes it counts. With `moves` False it has no reshards, only bytes
    (problem.kept_bytes).
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
    counts: tuple[str, ...] = (COPIES, AS_MADE)
    moves: bool = True

    @cached_property
    def key(self) -> NetKey:
        """Its key in `problem.saved.Kept`."""
        reader = self.readers[0][0]
        return NetKey(self.ref, reader.scope if self.kind == "edge" else reader.name, self.kind)

    @cached_property
    def weight(self) -> bool:
        """Whether the value is a weight."""
        return self.program.is_weight(self.ref)

    @cached_property
    def ahead(self) -> bool:
        """Whether its gathers are prefetched in the forward (runtime.prefetch), and the scatters of its gradient run in
        the background (runtime.gradsync)."""
        return self.weight and not self.opening

    @property
    def again_ahead(self) -> bool:
        """Whether its gathers in the backward can begin before their use: some operator's backward runs before that of
        its reader, or the gather begins with the backward."""
        return self.weight and self.kind != "feed"

    @cached_property
    def opening(self) -> bool:
        """Whether the value is the first weight that the forward reads, of those read before all blocks: its gather
        comes before any compute, and the scatter of its gradient after all, so that both are exposed."""
        first = self.kind == "feed" or any(op.name == self.program.first_read for op, _ in self.readers)
        return first and any(self.before_blocks)

    @cached_property
    def before_blocks(self) -> Sequence[bool]:
        """For each reader, whether it reads a weight outside of blocks, and before all blocks. A weight that is fed to
        blocks counts as such: compute waits for it before the first block, and its gradient is complete after the
        backward of all blocks."""
        blocks = [name for run in self.program.runs.values() for name in run.ports]
        if not self.weight or not blocks or self.readers[0][0].scope:
            return (self.weight and self.kind == "feed",) * len(self.readers)
        order = self.program.order
        return [order[op.name] < min(order[name] for name in blocks) for op, _ in self.readers]

    @property
    def last_share(self) -> float:
        """For a weight of a run of n blocks, 1 / n: the share of its gradients that comes from the block whose backward
        is last; 0 for other values."""
        scope = self.readers[0][0].scope
        return 1.0 / self.program.runs[scope].count if self.weight and scope else 0.0

    @cached_property
    def size_bytes(self) -> float:
        """Bytes of the whole value."""
        return self.program.bytes_of(self.ref)

    @cached_property
    def by_algorithm(self) -> np.ndarray:
        """bool [rows]: whether a runtime algorithm makes the value under all choices that lead to that row."""
        member = self.members[next(m for m, op in enumerate(self.cluster.members) if op.name == self.ref[0])]
        found = np.ones(len(self.rows), bool)
        np.logical_and.at(found, self.row, np.array(member.runs)[member.at])
        return found

    def asked_by(self, wanted: Callable[[Op, int], bool]) -> set[int]:
        """The columns that may be asked for, under any choice, by those readers whose (op, operand) is `wanted`."""
        return {
            column
            for (op, operand), use in zip(self.readers, self.uses, strict=True)
            if operand >= 0 and wanted(op, operand)
            for column in use.column.tolist()
        }


def links_of(program: Program, clusters: Sequence[Cluster], members: Sequence[Sequence[Member]]) -> list[Link]:
    """One link for each value and each scope whose operators read it from another cluster, for each value that is fed
    into a run of blocks, and for each that is carried from block to block. `members` are those of `clusters`."""
    makes = _Links(program, clusters, members)
    home, ops = makes.home, program.ops
    found: list[Link] = []
    for ref, readers in program.readers.items():
        outside = [(op, i) for op, i in readers if home[op.name][0] != home[ref[0]][0]]
        for scope in dict.fromkeys(op.scope for op, _ in outside):
            group = [(op, i) for op, i in outside if op.scope == scope]
            found.append(makes.link(ref, group, group[0][0].count, "edge"))
    for run in program.runs.values():
        outer = ops[run.ports[0]].count // run.count
        for port, feed in zip(run.ports, run.feeds, strict=True):
            found.append(makes.link(feed, [(ops[port], -1)], outer, "feed"))
        for port, ref in zip(run.ports, run.carried, strict=False):
            if run.count > 1:
                found.append(makes.link(ref, [(ops[port], -1)], outer * (run.count - 1), "carry"))
    return found


class _Links:
    """Makes links of values of `program`, whose `clusters` have these `members`."""

    def __init__(self, program: Program, clusters: Sequence[Cluster], members: Sequence[Sequence[Member]]) -> None:
        self.program, self.clusters, self.members = program, clusters, members
        # op -> its cluster, and its place among the members
        self.home = {op.name: (i, m) for i, c in enumerate(clusters) for m, op in enumerate(c.members)}

    def link(self, ref: Ref, readers: list[tuple[Op, int]], count: int, kind: str) -> Link:
        """The link of the value `ref` with `readers`."""
        producer, member = self.home[ref[0]]
        members = self.members[producer]
        rows, row = _rows(members[member], ref[1], members[0])
        columns: dict[LayoutPair, int] = {}
        uses = tuple([self._use(op, operand, columns) for op, operand in readers])
        cluster = self.clusters[producer]
        return Link(self.program, ref, readers, count, kind, producer, cluster, members, rows, row, list(columns), uses)

    def _use(self, op: Op, operand: int, columns: dict[LayoutPair, int]) -> Use:
        """What a reader asks for, as indices of `columns`, which it adds to."""
        index, position = self.home[op.name]
        reader = self.members[index][position]
        # a port (operand -1) has one layout, as what it takes and as what it gives
        asked = [
            columns.setdefault(LayoutPair.of_uses(tuple([option.ins[max(operand, 0)] for option in way])), len(columns))
            for way in reader.ways
        ]
        return Use(index, np.array(asked)[reader.at])


def _rows(made: Member, output: int, first: Member) -> tuple[list[LayoutPair], np.ndarray]:
    """The layouts in which a value may be made, and for each choice the index of its layouts. Those of a parameter also
    say when its gradient is scattered, which the option of the `first` member of the cluster, the parameter itself,
    tells."""
    ways = [LayoutPair.of_uses(tuple([option.outs[output] for option in way])) for way in made.ways]
    if first.op.role != "param":
        return _distinct(ways, made.at)
    each = [Resting.of(way).each for way in first.ways]
    return _distinct(
        [ways[i]._replace(each=each[j]) for i, j in zip(made.at.tolist(), first.at.tolist(), strict=True)],
        np.arange(len(made.at)),
    )


def _distinct(pairs: Sequence[LayoutPair], at: np.ndarray) -> tuple[list[LayoutPair], np.ndarray]:
    """The distinct `pairs`, and `at`, which indexes `pairs`, as an index of the distinct ones."""
    found: dict[LayoutPair, int] = {}
    index = np.array([found.setdefault(p, len(found)) for p in pairs])
    return list(found), index[at]


def step_s(link: Link, prices: Prices, again: set[int], first: set[int]) -> np.ndarray:
    """Seconds per step of the reshards of a net, [rows, columns].

    Columns in `again` gather a weight once more for the backward. In the first block of a run only those in `first` do,
    because what enters that block may have no gradient; what it saves is subtracted, for each time that it runs.
    """
    late = link.program.ops[link.ref[0]].late

    def once_s(columns: Sequence[LayoutPair], twice: set[int]) -> np.ndarray:
        return prices.table_s(
            link.rows,
            columns,
            link.size_bytes,
            again=[link.weight and c in twice for c in range(len(columns))],
            weight=link.weight,
            grad_bytes=prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes) if link.weight else None,
        )

    each_s = once_s(link.columns, again)
    found = each_s * link.count
    if late or (link.weight and again != first):
        saved_s = each_s - once_s(
            [LayoutPair(c.value, (NO_GRAD,)) for c in link.columns] if late else link.columns, first
        )
        found -= np.where(np.isfinite(found), saved_s, 0.0) * link.program.first_runs(link.ref)
    return found


def shown(link: Link, prices: Prices, cost_s: np.ndarray, times: np.ndarray) -> np.ndarray | float:
    """The share of the cost of a net's reshards that is exposed however much compute there is to overlap (Net.shown),
    [rows, columns].

    `cost_s` [rows, columns] are its seconds per step, `times` [rows, columns] says how often a weight is gathered per
    run of its reader. Weights move in the background, but for the first one (`Link.opening`). Nets of other values are
    in no overlap group, so that their share has no effect (0).
    """
    if not link.weight:
        return 0.0
    if link.opening:
        return 1.0
    weight = MovedWeight(
        link.size_bytes,
        prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes),
        link.last_share,
        link.ahead,
    )
    return prices.shown(link.rows, link.columns, weight, cost_s / link.count, times)


def net_bytes(link: Link, keeps: Kept, prices: Prices, again: set[int]) -> np.ndarray:
    """Bytes per device that a net counts, [rows, columns]: of copies that its reshards make and the backward keeps, and
    where there is no copy, of the value as it is made.

    Columns in `again` gather a weight once more for the backward, so that they keep no copy of it.
    """
    saved = link.asked_by(lambda op, operand: (op.name, operand) in keeps.reads)
    fresh, held = prices.made_bytes(link.rows, link.columns, link.size_bytes)
    if link.weight:
        # a gathered weight lives while its block and the one before it run (runtime.prefetch): two copies at a time,
        # however many blocks there are. Intermediate results of a chain of gathers live one block longer. A weight that
        # is not gathered again for the backward stays, once per block
        alive = 2 if link.readers[0][0].scope and link.count > 1 else 1
        halfway = (alive + 1 if alive > 1 else 1) * prices.halfway_bytes(link.rows, link.columns, link.size_bytes)
        return halfway + held * np.where(
            [c in saved and c not in again for c in range(len(link.columns))], link.count, alive
        )
    is_kept = np.array([link.key in keeps.moved or c in saved for c in range(len(link.columns))])
    copies = held * link.count if COPIES in link.counts else 0.0
    return is_kept * np.where(fresh, copies, _owned(link, keeps, prices)[:, None] if AS_MADE in link.counts else 0.0)


def bytes_alone(link: Link, keeps: Kept, prices: Prices) -> Net:
    """The net of a link without reshards: no seconds, only bytes."""
    nothing = np.zeros((len(link.rows), len(link.columns)))
    held = nothing if prices.late else net_bytes(link, keeps, prices, set())
    return Net(
        f"{link.ref[0]}:{link.ref[1]} {' and '.join(link.counts)}", link.producer, link.row, link.uses, nothing, held
    )


def _owned(link: Link, keeps: Kept, prices: Prices) -> np.ndarray:
    """[rows]: bytes per device that the net counts where its reader takes the value as it is made: those of the
    storages that it is charged with (`Kept.charges`, `Kept.behind`)."""
    place = {op.name: m for m, op in enumerate(link.cluster.members)}
    found = np.zeros(len(link.rows))
    for owner, count in keeps.charges.get(link.key, ()):
        size = link.program.bytes_of(owner) * (count or link.count)
        if owner == link.ref:
            found += [prices.local_bytes(size, row.value) for row in link.rows]
        else:  # views with the same layout may have owners with different ones: count the largest
            maker = link.members[place[owner[0]]]
            held = np.array([prices.local_bytes(size, layout) for layout in maker.lying(owner[1])])[maker.at]
            np.maximum.at(most := np.zeros(len(link.rows)), link.row, held)
            found += most
    if link.key in keeps.behind:
        size = link.program.bytes_of(keeps.behind[link.key]) * link.count
        found += [prices.local_bytes(size, row.value) for row in link.rows]
    return found


def node_bytes(index: int, members: Sequence[Member], keeps: Kept, prices: Prices) -> np.ndarray:
    """[choices]: bytes per device that cluster number `index`, of these members, holds: parameters, gradients and
    optimizer state, other values at rest, and what its operators keep for the backward and no net counts."""
    program, found = keeps.program, np.zeros(len(members[0].at))
    named = {member.op.name: member for member in members}
    own = [(ref, program.ops[ref[0]].count) for ref in keeps.own.get(index, ())] + keeps.given.get(index, [])
    for member in members:
        op = member.op
        if op.role in HOLDERS:
            found += member.each(prices.rest_bytes)
        elif keeps.beside(op):
            always = bool(op.extra_bytes or op.copies or op.target in INSIDE)
            wanted = [
                (always or run) and is_kept for run, is_kept in zip(member.runs, _stays(member, keeps), strict=True)
            ]
            if any(wanted):
                found += member.each(prices.extra_bytes, wanted)
    for (name, output), count in own:
        size, member = program.bytes_of((name, output)), named[name]
        each = zip(member.lying(output), _stays(member, keeps), strict=True)
        found += np.array([prices.local_bytes(size, layout) * count * is_kept for layout, is_kept in each])[member.at]
    return found


def _stays(member: Member, keeps: Kept) -> list[bool]:
    """For each way of a member whose results the plan keeps, whether they stay until the backward. In a block that is
    run again, operators that use a runtime algorithm always run again, so that their results do not."""
    return [not run or member.op.scope not in keeps.reruns for run in member.runs]


def passing_bytes(members: Sequence[Member], prices: Prices) -> np.ndarray | None:
    """[choices]: bytes per device of gathered tiles of weights, which exist only while an operator of the cluster runs;
    None where no choice has any."""
    found = [member.each(prices.passing_bytes, member.tiles) for member in members if any(member.tiles)]
    total = np.sum(found, axis=0) if found else np.zeros(1)
    return total if total.any() else None


def output_layout(combo: Choice, member: int, output: int) -> Layout:
    """The layout of output number `output` of member number `member` under one choice."""
    return tuple(joint.options[member].outs[output].value for joint in combo)
