"""What every choice and every change of layout of a Problem takes in each pass: the seconds of pipeline.passes as tables over all choices, so
that a bound can be found over all of them.

    SHOWN     compute, and collectives that compute waits for, or that run when the rest is done
    COMPUTE   the part of it under which collectives hide
    WAITED    the part of it that is collectives: others run beside them
    INPUTS    the compute in the backward of operators that is not for weights
    AHEAD     of each mesh axis: gathers that begin in the background with their block
    BEHIND    of each mesh axis: other collectives in the background
    COUNT     of each mesh axis: how many collectives compute waits for

Of a solution the entries add up to no more than what pipeline.passes finds for it. They are the same but for: sums of gradients in the background, which hide as if all
weights were in their buckets; leaves that are gathered once per step, all of them ahead; the gradients of a weight that several operators read,
which are left out because these share what they can, as is adding them up where some are in blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopar.layout import BUCKET_BYTES
from autopar.problem.between import Between
from autopar.problem.build import Model
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Ref
from autopar.problem.hiding import LOCAL_AXIS, Load, split
from autopar.problem.members import Member, Way
from autopar.problem.nets import Link
from autopar.problem.paths import Ways
from autopar.problem.shares import ForwardPrices
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
class Passing:
    """The tables of `model`; `forward` are prices on the same mesh. `late`: sums that go once per step, and leaves that are gathered then, are left out.
    `between`: nets, by number, between pieces that may be laid out each in its own way, as on places of a pipeline; they take nothing, and neither does what is in
    the background outside of blocks, because some of these may hide what others bring."""

    model: Model
    forward: ForwardPrices
    late: bool
    between: frozenset[int] | None = None

    @property
    def axes(self) -> int:
        """How many mesh axes there are."""
        return len(self.model.prices.sizes)

    @property
    def width(self) -> int:
        """How many quantities a table has."""
        return PLAIN + 3 * self.axes

    def ahead(self, axis: int) -> int:
        """The quantity AHEAD of an axis."""
        return PLAIN + axis

    def behind(self, axis: int) -> int:
        """The quantity BEHIND of an axis."""
        return PLAIN + self.axes + axis

    def count(self, axis: int) -> int:
        """The quantity COUNT of an axis."""
        return PLAIN + 2 * self.axes + axis

    def background_s(self, quantities: np.ndarray) -> float:
        """Seconds of all that may hide."""
        return float(quantities[PLAIN:PLAIN + 2 * self.axes].sum())

    @property
    def scopes(self) -> list[str]:
        """Those that have passes of their own: runs of blocks, and all that is outside of them."""
        return ["", *self.model.links[0].program.runs]

    @cached_property
    def nodes(self) -> list[Table]:
        """Of each node; of a parameter nothing but gradients that are added up."""
        return [self._node(*each) for each in zip(self.model.clusters, self.model.members, self.model.problem.nodes, self._updates, strict=True)]

    @cached_property
    def _updates(self) -> list[np.ndarray]:
        """Of each node the seconds of its parameter's own (Model.update_s), by choice."""
        return [np.array([self.model.update_s(index, choice) for choice in range(len(node.cost_s))]) for index, node in enumerate(self.model.problem.nodes)]

    @cached_property
    def nets(self) -> list[Table]:
        """Of each net."""
        found = [self._net(link, net) for link, net in zip(self.model.links, self.model.problem.nets, strict=True)]
        for index, table in enumerate(found if self.between is not None else ()):
            if self.between is not None and index in self.between:
                table.each[:] = 0.0
            elif not table.scope:
                table.each[..., PLAIN:PLAIN + 2 * self.axes] = 0.0
        return found

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
                found[passed, self.count(wait.axis)] += member.op.count
        return found

    def _net(self, link: Link, net: Net) -> Table:
        prices, found = self.model.prices, np.zeros((2, *net.cost_s.shape, self.width))
        here, cost_s = prices.routes.between(link.rows, link.columns), np.where(np.isfinite(net.cost_s), net.cost_s, 0.0)
        ahead = self._moved(here.forward, link.size_bytes)
        if link.weight:
            self._weight(link, here, cost_s, ahead, found)
        else:
            self._waits(found[FORWARD], ahead, float(link.count))
            left_s, back = cost_s - link.count * _all_s(ahead), self._moved(here.back, link.size_bytes)
            loads = np.where((_all_s(back) > 0)[..., None], back, ahead)
            self._waits(found[BACKWARD], loads, _over(np.maximum(left_s, 0.0), _all_s(loads)))
        found[:, ~np.isfinite(net.cost_s)] = 0.0
        return Table(self._scope(link.readers[0][0].scope), found)

    def _weight(self, link: Link, here: Between, cost_s: np.ndarray, ahead: np.ndarray, found: np.ndarray) -> None:
        """As pipeline.passes has it: gathers of a weight, and its gradient back."""
        prices = self.model.prices
        grad_bytes = prices.gradient_bytes(link.program.ops[link.ref[0]], link.size_bytes)
        plain_s = prices.table_s(link.rows, link.columns, link.size_bytes, weight=True, grad_bytes=grad_bytes) * link.count
        again = _over(np.maximum(cost_s - plain_s, 0.0), _all_s(ahead))
        gathers = prices.routes.gathers(here.forward) & link.ahead
        for passed, times in ((FORWARD, np.full(cost_s.shape, float(link.count))), (BACKWARD, again)):
            self._hides(found[passed], ahead, np.where(gathers, times, 0.0))
            self._waits(found[passed], ahead, np.where(gathers, 0.0, times))
        if self.shared[link.ref]:
            return
        graded = here.graded * float(link.count)
        back = self._moved(here.read, grad_bytes)
        self._hides(found[BACKWARD], back, np.where(gathers, graded, 0.0), link.last)
        self._waits(found[BACKWARD], back, np.where(gathers, 0.0, graded))
        sums = self._moved(here.summed, grad_bytes, prices.bucket_bytes * grad_bytes / link.size_bytes)
        self._after(found[BACKWARD], sums, np.where(here.each | (not self.late), graded, 0.0), self.behind(0), self._hidden(link))
        if not self.late:
            leaf = self._moved(here.leaf, link.size_bytes, prices.bucket_bytes)
            self._after(found[FORWARD], np.broadcast_to(leaf, ahead.shape), graded, self.ahead(0), 1.0)

    @cached_property
    def shared(self) -> Mapping[Ref, bool]:
        """Of each weight, whether several operators read it."""
        found: dict[Ref, int] = {}
        for link in self.model.links:
            if link.weight:
                found[link.ref] = found.get(link.ref, 0) + len(link.uses)
        return {ref: count > 1 for ref, count in found.items()}

    def _hidden(self, link: Link) -> float:
        """The share of the sums of a weight's gradient that can run in the background: at most that of all weights there are, in buckets."""
        inside = bool(link.cluster.scope)
        most = sum(other.size_bytes * other.count for other in self.model.links if other.weight and bool(other.cluster.scope) == inside)
        return 0.0 if link.opening or most <= BUCKET_BYTES else 1.0 - BUCKET_BYTES / 2 / most

    def _moved(self, ways: Ways, size_bytes: float, bucket_bytes: float = 0.0) -> np.ndarray:
        """[..., 1 + 5 axes]: of each way the seconds of local copies; by axis those of gathers, of other collectives, both but for the first
        collective of the way; and how many there are."""
        return self.model.prices.routes.table(ways, size_bytes, bucket_bytes, self._of_loads)

    def _of_loads(self, loads: Sequence[Load]) -> list[float]:
        found = np.zeros((5, self.axes))
        for number, load in enumerate(split(loads)[1]):
            gathers = load.kind == "all_gather"
            found[0 if gathers else 1, load.axis] += load.seconds
            found[2 if gathers else 3, load.axis] += load.seconds * bool(number)
            found[4, load.axis] += 1
        return [sum(load.seconds for load in loads if load.axis == LOCAL_AXIS), *found.ravel()]

    def _by_axis(self, moved: np.ndarray) -> np.ndarray:
        return moved[..., 1:].reshape(*moved.shape[:-1], 5, self.axes)

    def _waits(self, found: np.ndarray, moved: np.ndarray, times: np.ndarray | float) -> None:
        """Collectives that compute waits for."""
        local_s, by_axis = moved[..., 0], self._by_axis(moved)
        waited_s = by_axis[..., :2, :].sum((-1, -2))
        found[..., SHOWN] += times * (local_s + waited_s)
        found[..., COMPUTE] += times * local_s
        found[..., WAITED] += times * waited_s
        found[..., PLAIN + 2 * self.axes:] += np.asarray(times)[..., None] * by_axis[..., 4, :]

    def _hides(self, found: np.ndarray, moved: np.ndarray, times: np.ndarray, last: float = 0.0) -> None:
        """A way whose collectives run in the background; of the share `last` all but the first when the rest is done."""
        local_s, by_axis = moved[..., 0], self._by_axis(moved)
        found[..., SHOWN] += times * (local_s + last * by_axis[..., 2:4, :].sum((-1, -2)))
        found[..., COMPUTE] += times * local_s
        hidden = by_axis[..., :2, :] - last * by_axis[..., 2:4, :]
        found[..., PLAIN:PLAIN + 2 * self.axes] += times[..., None] * hidden.reshape(*hidden.shape[:-2], -1)

    def _after(self, found: np.ndarray, moved: np.ndarray, times: np.ndarray, first: int, hidden: float) -> None:
        """Collectives in buckets, of which the share `hidden` runs in the background, in the quantities from `first` on; copies, and all else, when the
        rest is done."""
        local_s, moving_s = moved[..., 0], self._by_axis(moved)[..., :2, :].sum(-2)
        found[..., SHOWN] += times * (local_s + (1.0 - hidden) * moving_s.sum(-1))
        found[..., first:first + self.axes] += times[..., None] * hidden * moving_s


def _all_s(moved: np.ndarray) -> np.ndarray:
    """Seconds of a whole way."""
    axes = (moved.shape[-1] - 1) // 5
    return np.asarray(moved[..., :1 + 2 * axes].sum(-1))


def _over(seconds: np.ndarray, whole_s: np.ndarray) -> np.ndarray:
    """How often a way is gone in so many seconds; never where it takes none."""
    return np.divide(seconds, whole_s, out=np.zeros_like(seconds), where=whole_s > 0)
