"""The seconds of pipeline.passes for every choice of every node, and every pair of choices of every net, as tables of
additive quantities.

A bound over all solutions, and the change by each possible move of a local search, are then sums and maxima over
tables. The quantities, in seconds per pass and scope (a run of blocks, or all that is outside of blocks):

    SHOWN     compute, collectives that compute waits for, and collectives after the last compute: all that is not in
              the background
    COMPUTE   the part of SHOWN that background collectives overlap and slow down
    WAITED    the part of SHOWN that is collectives which background collectives overlap
    INPUTS    the compute of a backward that is not for the gradients of weights

and for each mesh axis:

    AHEAD     background gathers that begin before their block does
    BEHIND    other background collectives
    LEAF      gathers of leaves once per step, as if all of them were prefetched
    WAITS     the part of WAITED on this axis
    LINKS     (only if `linked`) the seconds in WAITED, and those in the background, each times the share of the axis's
              link that the collective takes

For a solution, the entries of its choices add up to at most what pipeline.passes finds. They add up to less where

    * sums of gradients overlap: tables assume buckets as if all weights were in the same ones;
    * a weight has several readers: its gradients are left out, as what they share depends on all of their choices. So
      are the additions of its gradients to those of earlier microbatches, if readers are in several scopes;
    * leaves are not prefetched: LEAF assumes that those of the first block are, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.buckets import BUCKET_BYTES
from autopar.cost.comm import COLLECTIVES, fastest_ways, link_shares
from autopar.layout import fraction
from autopar.problem.build import Model
from autopar.problem.cluster_members import Member, Way
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Program, Ref
from autopar.problem.layout_pairs import Between
from autopar.problem.net_seconds import NetSeconds, add_to, over
from autopar.problem.nets import Link
from autopar.problem.pass_quantities import COMPUTE, INPUTS, PLAIN, SHOWN, WAITED, Quantities
from autopar.problem.routes import RouteTable
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Net, Node

FORWARD, BACKWARD = PASSES = range(2)


@dataclass(frozen=True, eq=False)
class Table:
    """`each` [2 passes, choices, quantities] of a node, or [2 passes, rows, columns, quantities] of a net, whose
    seconds belong to `scope`."""

    scope: str
    each: np.ndarray

    @cached_property
    def takes(self) -> bool:
        """Whether any choice takes anything."""
        return bool(self.each.any())


@dataclass(eq=False)
class PassTables(Quantities):
    """The tables of `model`.

    forward        prices of a forward alone on the same mesh
    sums_at_end    sums and gathers of leaves that happen once per step belong to no pass, and are left out
    between        the nets, by number, between pieces that may have layouts of their own, as on different places of
                   a pipeline (None: no pieces have). Such nets cost nothing here, but for those that are `carried`.
                   Background collectives outside of blocks cost nothing either, because compute of another piece on
                   the same place may overlap them
    linked         whether the tables have LINKS, for bounds
    """

    model: Model
    forward: ForwardPrices
    sums_at_end: bool
    between: frozenset[int] | None = None
    linked: bool = False

    @property
    def link(self) -> list[str]:
        """For each axis, the level of the cluster whose link its large collectives use most."""
        return self.model.prices.routes.busiest_level

    @cached_property
    def plain(self) -> Mapping[str, bool]:
        """For each level in `link`, whether the collectives of its axes use the links of this level only."""
        found = dict.fromkeys(self.link, True)
        for axis, level in zip(self.model.prices.mesh.axes, self.link, strict=True):
            ways = [way for kind in COLLECTIVES for way in fastest_ways(kind, axis)] if axis.size > 1 else []
            if any(part.span.level.name != level for way in ways for part in way):
                found[level] = False
        return found

    @property
    def scopes(self) -> list[str]:
        """The scopes: "" for all that is outside of blocks, and the runs of blocks."""
        return ["", *self.program.runs]

    @cached_property
    def nodes(self) -> list[Table]:
        """The table of each node. That of a parameter has only the addition of gradients over microbatches."""
        return [
            self._node(*each)
            for each in zip(
                self.model.clusters, self.model.members, self.model.problem.nodes, self.model.updates_s, strict=True
            )
        ]

    @property
    def program(self) -> Program:
        """What the tables are of."""
        return self.model.links[0].program

    @cached_property
    def nets(self) -> list[Table]:
        """The table of each net."""
        found = [self._net(link, net) for link, net in zip(self.model.links, self.model.problem.nets, strict=True)]
        for index, table in enumerate(found if self.between is not None else ()):
            if index in self.carried:
                continue
            if self.between is not None and index in self.between:
                table.each[:] = 0.0
            elif not table.scope:
                table.each[..., PLAIN : self.waits(0)] = 0.0
                if self.linked:
                    table.each[..., self.links_behind(0) :] = 0.0
        return found

    @cached_property
    def carried(self) -> Mapping[int, int]:
        """Of the nets `between` pieces those from block to block, by number: how many blocks there are."""
        return {
            index: self.program.runs[link.readers[0][0].scope].count
            for index, link in enumerate(self.model.links)
            if link.kind == "carry" and index in (self.between or ())
        }

    def _node(self, cluster: Cluster, members: Sequence[Member], node: Node, update_s: np.ndarray) -> Table:
        """The table of a node. `update_s` [choices] is the part of its cost that is the optimizer's step."""
        cost_s = np.where(np.isfinite(node.cost_s), node.cost_s - update_s, 0.0)
        found = np.zeros((2, len(cost_s), self.width))
        if cluster.root.role == "param":
            scopes = self._reading(cluster)
            if self.sums_at_end and len(scopes) == 1:
                found[BACKWARD, :, SHOWN] = found[BACKWARD, :, COMPUTE] = update_s
            return Table(scopes[0], found)
        ahead_s = np.zeros(len(cost_s))
        for member in members:
            if member.op.role == "param":
                continue  # the optimizer's step belongs to no pass
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
        return Table(self.program.scope_of(cluster.scope), found)

    def _reading(self, cluster: Cluster) -> list[str]:
        """The scopes in which the gradients of a parameter may be added up: those of its readers."""
        readers = self.program.readers.get((cluster.root.name, 0), ())
        return list(dict.fromkeys(self.program.scope_of(cluster.scope or reader.scope) for reader, _ in readers)) or [
            ""
        ]

    def _inside(self, member: Member, way: Way) -> np.ndarray:
        """[2 passes, quantities]: the collectives inside an operator that compute waits for."""
        found = np.zeros((2, self.width))
        for passed, waits in zip(PASSES, self.model.prices.waits(member.op, way), strict=True):
            for wait in waits:
                found[passed, WAITED] += member.op.count * wait.seconds
                found[passed, self.waits(wait.axis)] += member.op.count * wait.seconds
                if self.linked:
                    shares = link_shares(wait.kind, wait.nbytes, self.model.prices.mesh.axes[wait.axis])
                    found[passed, self.links_waited(wait.axis)] += (
                        member.op.count * wait.seconds * shares.get(self.link[wait.axis], 0.0)
                    )
        return found

    def _net(self, link: Link, net: Net) -> Table:
        """The table of a net."""
        prices, found = self.model.prices, np.zeros((2, *net.cost_s.shape, self.width))
        scope = self.program.scope_of(link.readers[0][0].scope)
        if not link.moves:
            return Table(scope, found)
        here, cost_s = (
            prices.routes.between(link.rows, link.columns),
            np.where(np.isfinite(net.cost_s), net.cost_s, 0.0),
        )
        ahead = self._moved(here.forward, link.size_bytes)
        if link.weight:
            self._add_weight(link, here, cost_s, ahead, found)
        else:
            self._add_waited(found[FORWARD], ahead, float(link.count))
            left_s, back = np.maximum(0.0, cost_s - link.count * ahead.all_s), self._moved(here.back, link.size_bytes)
            again = (left_s > 0) & (back.all_s <= 0)
            self._add_waited(found[BACKWARD], back, over(left_s, back.all_s))
            if again.any():
                self._add_waited(found[BACKWARD], ahead, np.where(again, over(left_s, ahead.all_s), 0.0))
        found[:, ~np.isfinite(net.cost_s)] = 0.0
        return Table(scope, found)

    def _add_weight(self, link: Link, here: Between, cost_s: np.ndarray, ahead: NetSeconds, found: np.ndarray) -> None:
        """Add the gathers of a weight, the scatter of its gradient to the leaf, and the sum over ranks, by the rules of
        pipeline.passes."""
        prices = self.model.prices
        grad_bytes = prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes)
        plain_s = (
            prices.table_s(link.rows, link.columns, link.size_bytes, weight=True, grad_bytes=grad_bytes) * link.count
        )
        again = over(np.maximum(cost_s - plain_s, 0.0), ahead.all_s)
        moved = prices.routes.gathers(here.forward)
        gathers = moved & (link.ahead or self.hides_all)
        for passed, times, begun in (
            (FORWARD, np.full(cost_s.shape, float(link.count)), gathers),
            (BACKWARD, again, moved & link.again_ahead),
        ):
            self._add_background(found[passed], ahead, np.where(begun, times, 0.0))
            self._add_waited(found[passed], ahead, np.where(begun, 0.0, times))
        if self.shared[link.ref]:
            return
        graded = here.graded * float(link.count)
        back = self._moved(here.read, grad_bytes)
        last = 0.0 if self.hides_all else link.last_share
        self._add_background(found[BACKWARD], back, np.where(gathers, graded, 0.0), last)
        self._add_waited(found[BACKWARD], back, np.where(gathers, 0.0, graded))
        sums = self._moved(here.summed, grad_bytes, prices.grad_bucket_bytes(link.size_bytes, grad_bytes))
        self._add_buckets(
            found[BACKWARD],
            sums,
            np.where(here.each | (not self.sums_at_end), graded, 0.0),
            self.behind(0),
            self._hidden(link, gathers),
        )
        if not self.sums_at_end:
            leaf = self._moved(here.leaf, link.size_bytes, prices.bucket_bytes)
            # what the model itself reads is waited for before it runs
            inside = bool(link.cluster.scope) or self.hides_all
            self._add_buckets(found[FORWARD], leaf, graded, self.leaf(0), np.full((2, *graded.shape), float(inside)))

    def gathered(self, link: Link) -> np.ndarray:
        """[rows] bytes of the leaf of one block, 0 where it is not gathered once per step."""
        sizes = self.model.prices.sizes
        return np.array(
            [link.size_bytes * fraction(made.value, sizes) * (made.value != made.back) for made in link.rows]
        )

    @cached_property
    def of_blocks(self) -> Mapping[str, list[int]]:
        """By scope of blocks, the first net of each of its weights, in the order in which buckets are filled."""
        return {
            scope: [index for index in self.model.weights.values() if self.model.links[index].cluster.scope == scope]
            for scope in self.program.runs
        }

    @cached_property
    def shared(self) -> Mapping[Ref, bool]:
        """Of each weight, whether several operators read it."""
        found: dict[Ref, int] = {}
        for link in self.model.links:
            if link.weight:
                found[link.ref] = found.get(link.ref, 0) + len(link.uses)
        return {ref: count > 1 for ref, count in found.items()}

    @property
    def hides_all(self) -> bool:
        """Whether all collectives that may overlap any compute are in the background, as the least price of a step of
        one stage has them (pipeline.work.least_s). Descents by such tables end higher."""
        return self.linked and not self.sums_at_end

    def _hidden(self, link: Link, gathers: np.ndarray) -> np.ndarray:
        """[2, rows, columns]: the most of the sum of a weight's gradient that can be in the background, as a share: of
        its first collective, and of later ones.

        The last bucket, half full on average, is exposed, and one more for later collectives. Its share of all
        gradients is least if all weights, not sharded, are in buckets of one kind.
        """
        if self.hides_all:
            return np.ones((2, *gathers.shape))
        bucket = BUCKET_BYTES / max(1.0, self._gradients_bytes)
        if bucket >= 1.0 or link.opening:
            return np.zeros((2, *gathers.shape))
        return np.stack([np.full(gathers.shape, 1.0 - min(1.0, buckets * bucket)) for buckets in (0.5, 1.5)])

    @cached_property
    def _gradients_bytes(self) -> float:
        """Bytes of the gradients of all weights, not sharded, in the dtypes in which they are summed."""
        weights = map(self.model.links.__getitem__, self.model.weights.values())
        return sum(
            self.model.prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes) * link.count
            for link in weights
        )

    def _moved(self, table: RouteTable, size_bytes: float, bucket_bytes: float = 0.0) -> NetSeconds:
        return NetSeconds(
            self.model.prices.routes.seconds_by_axis(table, size_bytes, bucket_bytes), table.at, self.axes
        )

    def _add_waited(self, found: np.ndarray, moved: NetSeconds, times: np.ndarray | float) -> None:
        """Add collectives that compute waits for, and their local copies, `times` times."""
        each = np.zeros((len(moved.each), self.width))
        each[:, COMPUTE], each[:, WAITED] = moved.local_s, moved.by_axis[:, :2].sum((1, 2))
        each[:, SHOWN] = each[:, COMPUTE] + each[:, WAITED]
        each[:, self.waits(0) : self.waits(self.axes)] = moved.by_axis[:, :2].sum(1)
        if self.linked:
            each[:, self.links_waited(0) : self.links_behind(0)] = moved.linked_s[:, 0]
        add_to(found, each, moved.at, times)

    def _add_background(self, found: np.ndarray, moved: NetSeconds, times: np.ndarray, last: float = 0.0) -> None:
        """Add chains of background collectives and their local copies, `times` times. Of the share `last`, all but the
        first collective come after the last compute."""
        each = np.zeros((len(moved.each), self.width))
        each[:, COMPUTE] = moved.local_s
        each[:, SHOWN] = moved.local_s + last * moved.by_axis[:, 2:4].sum((1, 2))
        each[:, PLAIN : PLAIN + 2 * self.axes] = (moved.by_axis[:, :2] - last * moved.by_axis[:, 2:4]).reshape(
            len(each), -1
        )
        if self.linked:
            each[:, self.links_behind(0) :] = moved.linked_s[:, 0] - last * moved.linked_s[:, 1]
        add_to(found, each, moved.at, times)

    def _add_buckets(
        self, found: np.ndarray, moved: NetSeconds, times: np.ndarray, first: int, hidden: np.ndarray
    ) -> None:
        """Add collectives in buckets, `times` times: of the first collective of each chain the share hidden[0] [rows,
        columns], of later ones hidden[1], in the background, as the quantities by axis from `first` on. The rest comes
        after the last compute. Local copies are work."""
        all_s, next_s = (moved.by_axis[:, at : at + 2].sum(1) for at in (0, 2))
        for share, moving_s, linked_s in (
            (hidden[0], all_s - next_s, moved.linked_s[:, 0] - moved.linked_s[:, 1]),
            (hidden[1], next_s, moved.linked_s[:, 1]),
        ):
            exposed, background = (np.zeros((len(moved.each), self.width)) for _ in range(2))
            exposed[:, SHOWN] = moving_s.sum(1)
            background[:, first : first + self.axes] = moving_s
            if self.linked:
                background[:, self.links_behind(0) :] = linked_s
            add_to(found, exposed, moved.at, times * (1.0 - share))
            add_to(found, background, moved.at, times * share)
        copies = np.zeros((len(moved.each), self.width))
        copies[:, COMPUTE] = copies[:, SHOWN] = moved.local_s
        add_to(found, copies, moved.at, times)
