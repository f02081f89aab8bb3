"""What every choice and every change of layout of a Problem takes in each pass: the seconds of pipeline.passes as tables over all choices, so
that a bound can be found over all of them.

    SHOWN     compute, and collectives that compute waits for, or that run when the rest is done
    COMPUTE   the part of it under which collectives hide
    WAITED    the part of it that is collectives: others run beside them
    INPUTS    the compute in the backward of operators that is not for weights
    AHEAD     of each mesh axis: gathers that begin in the background with their block
    BEHIND    of each mesh axis: other collectives in the background
    LEAF      of each mesh axis: gathers of leaves once per step, of which some begin ahead, those that are not in the first few buckets of a block when the rest is done
    WAITS     of each mesh axis: its part of WAITED
    LINKS     of each mesh axis: seconds of WAITED, and then of all in the background, by the share that they take of the axis's link (only where asked for)
    LATE      of each mesh axis: what of LEAF is not ahead, and `leaves_s` more (problem.leaf_gathers; with LINKS)

Of a solution the entries add up to no more than what pipeline.passes finds for it. They are the same but for: sums of gradients in the background, which hide as if all
weights that may rest alike did; the gradients of a weight that several operators read, which are left out because these share what they can, as is adding them up where some
are in blocks. LEAF is no more than what shows of it only with all of it ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.cost.comm import COLLECTIVES, fastest_ways, link_shares
from autopar.layout import BUCKET_BYTES, fraction
from autopar.problem.build import Model
from autopar.problem.cluster_members import Member, Way
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Ref
from autopar.problem.layout_pairs import Between
from autopar.problem.leaf_gathers import Leaves, in_a_row
from autopar.problem.net_seconds import NetSeconds, add_to, over
from autopar.problem.nets import Link
from autopar.problem.paths import Ways
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Net, Node

FORWARD, BACKWARD = PASSES = range(2)
SHOWN, COMPUTE, WAITED, INPUTS = range(4)
PLAIN = 4
"""How many quantities there are beside those of each axis."""


@dataclass(frozen=True, eq=False)
class Table:
    """[2 passes, ..., quantities]: what one node takes under each choice, or one net between each row and column, in the passes of `scope`."""

    scope: str
    each: np.ndarray


@dataclass(eq=False)
class PassTables:
    """The tables of `model`; `forward` are prices on the same mesh. `late`: sums that go once per step, and leaves that are gathered then, are left out.
    `between`: nets, by number, between pieces that may be laid out each in its own way, as on places of a pipeline; they take nothing, and neither does what is in
    the background outside of blocks, because some of these may hide what others bring. `linked`: with LINKS and LATE."""

    model: Model
    forward: ForwardPrices
    late: bool
    between: frozenset[int] | None = None
    linked: bool = False

    @property
    def axes(self) -> int:
        """How many mesh axes there are."""
        return len(self.model.prices.sizes)

    @property
    def width(self) -> int:
        """How many quantities a table has."""
        return PLAIN + 4 * self.axes + 3 * self.axes * self.linked

    def ahead(self, axis: int) -> int:
        """The quantity AHEAD of an axis."""
        return PLAIN + axis

    def behind(self, axis: int) -> int:
        """The quantity BEHIND of an axis."""
        return PLAIN + self.axes + axis

    def waits(self, axis: int) -> int:
        """The quantity WAITS of an axis."""
        return PLAIN + 3 * self.axes + axis

    def leaf(self, axis: int) -> int:
        """The quantity LEAF of an axis."""
        return PLAIN + 2 * self.axes + axis

    def links_waited(self, axis: int) -> int:
        """The quantity LINKS of an axis, of what is waited for; that of the background is so many axes behind it."""
        assert self.linked, "nobody asked for shares of links"
        return self.waits(self.axes) + axis

    def links_behind(self, axis: int) -> int:
        """The quantity LINKS of an axis, of what is in the background."""
        return self.links_waited(axis) + self.axes

    def late_leaf(self, axis: int) -> int:
        """The quantity LATE of an axis."""
        return self.links_behind(axis) + self.axes

    @property
    def link(self) -> list[str]:
        """Of each axis the level of the cluster whose link large collectives take most of."""
        return self.model.prices.routes.link

    @cached_property
    def plain(self) -> Mapping[str, bool]:
        """Of each level of `link`, whether no collective of the axes that take most of it takes any other level's."""
        axes = {level: [axis for axis, own in zip(self.model.prices.mesh.axes, self.link, strict=True) if own == level and axis.size > 1] for level in self.link}
        return {level: all(part.span.level.name == level for axis in own for kind in COLLECTIVES for way in fastest_ways(kind, axis) for part in way)
                for level, own in axes.items()}

    def background_s(self, quantities: np.ndarray) -> float:
        """Seconds of all that may hide."""
        return float(quantities[PLAIN:self.waits(0)].sum())

    @property
    def scopes(self) -> list[str]:
        """Those that have passes of their own: runs of blocks, and all that is outside of them."""
        return ["", *self.model.links[0].program.runs]

    @cached_property
    def nodes(self) -> list[Table]:
        """Of each node; of a parameter nothing but gradients that are added up."""
        return [self._node(*each) for each in zip(self.model.clusters, self.model.members, self.model.problem.nodes, self.updates_s, strict=True)]

    @cached_property
    def updates_s(self) -> list[np.ndarray]:
        """Of each node the seconds of its parameter's own (Model.update_s), by choice."""
        return [self.model.updates_s(index) for index in range(len(self.model.problem.nodes))]

    @cached_property
    def nets(self) -> list[Table]:
        """Of each net."""
        found = self._made
        if self.linked and not self.late:
            self._late()
        for index, table in enumerate(found if self.between is not None else ()):
            if self.between is not None and index in self.between:
                table.each[:] = 0.0
            elif not table.scope:
                table.each[..., PLAIN:self.waits(0)] = 0.0
                if self.linked:
                    table.each[..., self.links_behind(0):self.late_leaf(0)] = 0.0
        return found

    @cached_property
    def _made(self) -> list[Table]:
        """Of each net by itself."""
        return [self._net(link, net) for link, net in zip(self.model.links, self.model.problem.nets, strict=True)]

    def _scope(self, scope: str) -> str:
        return scope if scope in self.model.links[0].program.runs else ""

    def _node(self, cluster: Cluster, members: Sequence[Member], node: Node, update_s: np.ndarray) -> Table:
        cost_s = np.where(np.isfinite(node.cost_s), node.cost_s - update_s, 0.0)
        found = np.zeros((2, len(cost_s), self.width))
        if cluster.root.role == "param":
            scopes = self._reading(cluster)
            if self.late and len(scopes) == 1:
                found[BACKWARD, :, SHOWN] = found[BACKWARD, :, COMPUTE] = update_s
            return Table(scopes[0], found)
        ahead_s = np.zeros(len(cost_s))
        for member in members:
            if member.op.role == "param":
                continue  # what is made of a parameter is computed in passes, the parameter's own step is not
            wanted = member.runs if member.op.free else None
            own_s = member.each(self.forward.op_s, wanted)
            back_s = member.each(self.model.prices.op_s, wanted) - own_s
            ahead_s += own_s
            if any(member.runs):
                inside = np.array([self._inside(member, way) for way in member.ways]).transpose(1, 0, 2)[:, member.at]
                found, back_s = found + inside, back_s - inside[BACKWARD, :, WAITED]
            found[BACKWARD, :, INPUTS] += (1.0 - member.op.weights_share) * np.maximum(back_s, 0.0)
        for way, seconds in ((FORWARD, ahead_s), (BACKWARD, cost_s - ahead_s)):
            found[way, :, SHOWN] = seconds
            found[way, :, COMPUTE] = seconds - found[way, :, WAITED]
        return Table(self._scope(cluster.scope), found)

    def _reading(self, cluster: Cluster) -> list[str]:
        """Where the gradients of a parameter may be added up: with those that read it."""
        readers = self.model.links[0].program.readers.get((cluster.root.name, 0), ())
        return list(dict.fromkeys(self._scope(cluster.scope or reader.scope) for reader, _ in readers)) or [""]

    def _inside(self, member: Member, way: Way) -> np.ndarray:
        """[2, quantities]: the collectives inside an operator that compute waits for."""
        found = np.zeros((2, self.width))
        for passed, waits in zip(PASSES, self.model.prices.waits(member.op, way), strict=True):
            for wait in waits:
                found[passed, WAITED] += member.op.count * wait.seconds
                found[passed, self.waits(wait.axis)] += member.op.count * wait.seconds
                if self.linked:
                    shares = link_shares(wait.kind, wait.nbytes, self.model.prices.mesh.axes[wait.axis])
                    found[passed, self.links_waited(wait.axis)] += member.op.count * wait.seconds * shares.get(self.link[wait.axis], 0.0)
        return found

    def _net(self, link: Link, net: Net) -> Table:
        prices, found = self.model.prices, np.zeros((2, *net.cost_s.shape, self.width))
        scope = self._scope(link.readers[0][0].scope)
        if not link.moves:
            return Table(scope, found)
        here, cost_s = prices.routes.between(link.rows, link.columns), np.where(np.isfinite(net.cost_s), net.cost_s, 0.0)
        ahead = self._moved(here.forward, link.size_bytes)
        if link.weight:
            self._weight(link, here, cost_s, ahead, found)
        else:
            self._waits(found[FORWARD], ahead, float(link.count))
            left_s, back = np.maximum(0.0, cost_s - link.count * ahead.all_s), self._moved(here.back, link.size_bytes)
            again = (left_s > 0) & (back.all_s <= 0)
            self._waits(found[BACKWARD], back, over(left_s, back.all_s))
            if again.any():
                self._waits(found[BACKWARD], ahead, np.where(again, over(left_s, ahead.all_s), 0.0))
        found[:, ~np.isfinite(net.cost_s)] = 0.0
        return Table(scope, found)

    def _weight(self, link: Link, here: Between, cost_s: np.ndarray, ahead: NetSeconds, found: np.ndarray) -> None:
        """As pipeline.passes has it: gathers of a weight, and its gradient back."""
        prices = self.model.prices
        grad_bytes = prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes)
        plain_s = prices.table_s(link.rows, link.columns, link.size_bytes, weight=True, grad_bytes=grad_bytes) * link.count
        again = over(np.maximum(cost_s - plain_s, 0.0), ahead.all_s)
        moved = prices.routes.gathers(here.forward)
        gathers = moved & link.ahead
        for passed, times, begun in ((FORWARD, np.full(cost_s.shape, float(link.count)), gathers), (BACKWARD, again, moved & link.again_ahead)):
            self._hides(found[passed], ahead, np.where(begun, times, 0.0))
            self._waits(found[passed], ahead, np.where(begun, 0.0, times))
        if self.shared[link.ref]:
            return
        graded = here.graded * float(link.count)
        back = self._moved(here.read, grad_bytes)
        self._hides(found[BACKWARD], back, np.where(gathers, graded, 0.0), link.last)
        self._waits(found[BACKWARD], back, np.where(gathers, 0.0, graded))
        sums = self._moved(here.summed, grad_bytes, prices.grad_bucket_bytes(link.size_bytes, grad_bytes))
        self._after(found[BACKWARD], sums, np.where(here.each | (not self.late), graded, 0.0), self.behind(0), self._hidden(link))
        if not self.late:
            leaf = self._moved(here.leaf, link.size_bytes, prices.bucket_bytes)
            inside = bool(link.cluster.scope)  # what the model itself reads is waited for before it runs
            self._after(found[FORWARD], leaf, graded, self.leaf(0), np.full((2, len(link.rows)), float(inside)))

    def gathered(self, link: Link) -> np.ndarray:
        """Of each row, bytes of the leaf of one block that is gathered once per step."""
        sizes = self.model.prices.sizes
        return np.array([link.size_bytes * fraction(made.value, sizes) * (made.value != made.back) for made in link.rows])

    @property
    def leaves_s(self) -> Mapping[str, np.ndarray]:
        """By scope of blocks that have leaves, and by axis: so much less than all entries of LATE together is late."""
        return {scope: leaves.most_s for scope, leaves in self._leaves.items()}

    @cached_property
    def _leaves(self) -> Mapping[str, Leaves]:
        """By scope of the blocks in which any are gathered once per step."""
        found = {}
        for scope, own in self.of_blocks.items():
            seconds = [self._made[index].each[FORWARD, ..., self.leaf(0):self.leaf(0) + self.axes] for index in own]
            if any(each.any() for each in seconds):
                found[scope] = Leaves([self.gathered(self.model.links[index]) for index in own], seconds, in_a_row(self.model.links[0].program, scope))
        return found

    @cached_property
    def of_blocks(self) -> Mapping[str, list[int]]:
        """By scope of blocks the first nets of its weights, in the order in which buckets are filled (pipeline.passes)."""
        return {scope: [index for index in self.model.weights.values() if self.model.links[index].cluster.scope == scope] for scope in self.model.links[0].program.runs}

    def _late(self) -> None:
        """Fills LATE in; of a weight that several operators read it is nothing."""
        for scope, leaves in self._leaves.items():
            for number, index in enumerate(self.of_blocks[scope]):
                if not self.shared[self.model.links[index].ref]:
                    self._made[index].each[FORWARD, ..., self.late_leaf(0):] = leaves.late_s(number)

    @cached_property
    def shared(self) -> Mapping[Ref, bool]:
        """Of each weight, whether several operators read it."""
        found: dict[Ref, int] = {}
        for link in self.model.links:
            if link.weight:
                found[link.ref] = found.get(link.ref, 0) + len(link.uses)
        return {ref: count > 1 for ref, count in found.items()}

    def _hidden(self, link: Link) -> np.ndarray:
        """[2, rows]: the share of the sums of a weight's gradient that can run in the background, of the first collective and of the next ones: at most where all weights, whole,
        are in the same buckets."""
        bucket = BUCKET_BYTES / max(1.0, self._weights_bytes)
        hidden = np.maximum(0.0, 1.0 - bucket * np.array((0.5, 1.5))) if bucket < 1.0 and not link.opening else np.zeros(2)
        return np.repeat(hidden[:, None], len(link.rows), 1)

    @cached_property
    def _weights_bytes(self) -> float:
        """Bytes of all weights."""
        return sum(link.size_bytes * link.count for link in map(self.model.links.__getitem__, self.model.weights.values()))

    def _moved(self, ways: Ways, size_bytes: float, bucket_bytes: float = 0.0) -> NetSeconds:
        return NetSeconds(self.model.prices.routes.moved(ways, size_bytes, bucket_bytes), ways.at, self.axes)

    def _waits(self, found: np.ndarray, moved: NetSeconds, times: np.ndarray | float) -> None:
        """Collectives that compute waits for."""
        each = np.zeros((len(moved.each), self.width))
        each[:, COMPUTE], each[:, WAITED] = moved.local_s, moved.by_axis[:, :2].sum((1, 2))
        each[:, SHOWN] = each[:, COMPUTE] + each[:, WAITED]
        each[:, self.waits(0):self.waits(self.axes)] = moved.by_axis[:, :2].sum(1)
        if self.linked:
            each[:, self.links_waited(0):self.links_behind(0)] = moved.linked_s[:, 0]
        add_to(found, each, moved.at, times)

    def _hides(self, found: np.ndarray, moved: NetSeconds, times: np.ndarray, last: float = 0.0) -> None:
        """A way whose collectives run in the background; of the share `last` all but the first when the rest is done."""
        each = np.zeros((len(moved.each), self.width))
        each[:, COMPUTE] = moved.local_s
        each[:, SHOWN] = moved.local_s + last * moved.by_axis[:, 2:4].sum((1, 2))
        each[:, PLAIN:PLAIN + 2 * self.axes] = (moved.by_axis[:, :2] - last * moved.by_axis[:, 2:4]).reshape(len(each), -1)
        if self.linked:
            each[:, self.links_behind(0):self.late_leaf(0)] = moved.linked_s[:, 0] - last * moved.linked_s[:, 1]
        add_to(found, each, moved.at, times)

    def _after(self, found: np.ndarray, moved: NetSeconds, times: np.ndarray, first: int, hidden: np.ndarray) -> None:
        """Collectives in buckets, of which the shares `hidden` [2, rows] run in the background, in the quantities from `first` on, of the first one of a way and of the next
        ones; copies, and all else, when the rest is done."""
        all_s, next_s = (moved.by_axis[:, at:at + 2].sum(1) for at in (0, 2))
        for under, moving_s, linked_s in ((hidden[0], all_s - next_s, moved.linked_s[:, 0] - moved.linked_s[:, 1]), (hidden[1], next_s, moved.linked_s[:, 1])):
            shown, behind = (np.zeros((len(moved.each), self.width)) for _ in range(2))
            shown[:, SHOWN] = moving_s.sum(1)
            behind[:, first:first + self.axes] = moving_s
            if self.linked:
                behind[:, self.links_behind(0):self.late_leaf(0)] = linked_s
            add_to(found, shown, moved.at, times * (1.0 - under)[:, None])
            add_to(found, behind, moved.at, times * under[:, None])
        copies = np.zeros((len(moved.each), self.width))
        copies[:, SHOWN] = moved.local_s
        add_to(found, copies, moved.at, times)
