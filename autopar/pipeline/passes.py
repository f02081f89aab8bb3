"""What each piece of a program does in each pass under a solution: its compute, the collectives that compute waits for,
and those in the background.

The passes of one microbatch (pipeline.work):

    forward    operators and reshards; gathers of weights are prefetched (runtime.prefetch)
    backward   the same in reverse, and what runs again with its gathers; gradients of gathered weights are scattered in
               the background (autopar.deferred_waits)
    inputs     of a backward that is split in two: all of it that is not for the gradients of weights
    weights    the other part; autograd brings gradients to where they rest then, and waits for it (runtime.stepping)
    both       the two parts at once, as some schedules have them

A weight's gradient is summed over ranks in buckets (runtime.gradsync): after every microbatch, in the background of the
backward, or once per step. With nothing overlapped the seconds of all passes are those of the Problem, less what
buckets save in the start of collectives.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from autopar.buckets import BUCKET_BYTES
from autopar.cluster import MeshAxis
from autopar.layout import NO_GRAD, Layout, fraction
from autopar.pipeline.aggregate import Aggregate
from autopar.pipeline.once_per_step import Sums
from autopar.pipeline.op_passes import OpPasses, sum_s
from autopar.pipeline.stops import AGAIN, AHEAD, BACK, Sent, Stop, Sum
from autopar.pipeline.weight_buckets import WeightBuckets
from autopar.pipeline.work import BACKWARD, BOTH, FORWARD, INPUTS, WEIGHTS, Did
from autopar.problem.build import Model
from autopar.problem.graph import Op, Program
from autopar.problem.hiding import Load, split
from autopar.problem.nets import Link
from autopar.problem.pairs import LayoutPair
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Net


class _Read(NamedTuple):
    """A net as one piece reads it.

    made      the layouts in which its producer makes it
    asked     the layouts in which these readers want it
    cost_s    seconds per step in the Problem
    name      the piece
    at        these readers, each with the number of its operand
    """

    link: Link
    made: LayoutPair
    asked: LayoutPair
    cost_s: float
    name: str
    at: list[tuple[Op, int]]


class Passes(OpPasses):
    """The passes of all pieces of `program` under the solution `choice` of `model`.

    `forward`: prices on the same mesh of a forward alone. `apart`: pieces that read the same weight are in different
    stages, each with a copy (pipeline.costs). `sums_at_end`: sums that happen once per step wait for its end and belong
    to no pass, as with several microbatches; otherwise they belong to the backward.
    """

    def __init__(
        self,
        program: Program,
        model: Model,
        choice: Sequence[int],
        forward: ForwardPrices,
        *,
        apart: bool,
        sums_at_end: bool,
    ) -> None:
        super().__init__(program, model, choice, forward, apart=apart)
        self.sums_at_end, self.line.gathers = sums_at_end, not sums_at_end
        self._summed: dict[tuple[str, int], None] = {}  # weights whose sum is counted already
        self.buckets = WeightBuckets(program, model, choice)
        for link, net in zip(model.links, model.problem.nets, strict=True):
            for column, name in self.readings(link, net) if link.moves else ():
                self._add_net(link, net, column, name)

    def readings(self, link: Link, net: Net) -> list[tuple[int, str]]:
        """The distinct columns of a net that its readers ask for, each with the piece of its first reader. A weight
        outside of blocks that pieces in different stages read is read by each of them."""
        each = self._by_piece(link)
        found: dict[tuple[int, str], tuple[int, str]] = {}
        for (op, _), use in zip(link.readers, net.uses, strict=True):
            column, place = use.asks[self.choice[use.node]], self.home[op.name]
            found.setdefault((column, place if each else ""), (column, place))
        return list(found.values())

    def _by_piece(self, link: Link) -> bool:
        """Whether each piece that reads a value has a copy of it: a weight outside of blocks, of pieces in different
        stages."""
        return self.apart and link.weight and not link.cluster.scope

    def seconds(self, contention: float, *, shared: bool, at_once: bool) -> dict[str, list[float]]:
        """By piece, the seconds of each pass, exposed communication included. Background collectives take `contention`
        of the compute units. `shared`: they and compute share cores, so that nothing overlaps. `at_once`: as Aggregate
        has it."""
        total = Aggregate(self.program, self.did, self.line, self.apart, at_once)
        return total.all_exposed_s() if shared else total.seconds(contention)

    def _add_net(self, link: Link, net: Net, column: int, name: str) -> None:
        """Add the reshards of a net from where it is made to the `column` that the piece `name` reads."""
        row = net.row[self.choice[net.producer]]
        made, asked = link.rows[row], link.columns[column]
        # what is fed to a block is its first operand
        at = [
            (op, max(operand, 0))
            for (op, operand), use in zip(link.readers, net.uses, strict=True)
            if use.asks[self.choice[use.node]] == column and (self.home[op.name] == name or not self._by_piece(link))
        ]
        moves = made.value != asked.value or made.back != asked.back
        read = _Read(link, made, asked, float(net.cost_s[row, column]), name, at if moves else [])
        if link.weight:
            self._add_weight(read)
        else:
            self._add_activation(read)

    def _shared_key(self, read: _Read) -> Hashable:
        """The key of the gathers and scatters that the pieces of a stage share which read a weight in the same layouts
        (Sent.key)."""
        return (read.link.ref, read.asked) if self._by_piece(read.link) else None

    def _add_activation(self, read: _Read) -> None:
        """Add the reshards of an activation and of its gradient, which compute waits for. What its cost in the Problem
        has beyond those runs again."""
        link, did = read.link, self.did[read.name]
        ahead = self.prices.routes.loads(read.made.value, read.asked.value, link.size_bytes)
        did.passes[FORWARD].wait(ahead, link.count)
        back = self.prices.routes.loads(read.asked.back, read.made.back, link.size_bytes)
        left_s = read.cost_s - link.count * sum_s(ahead)
        for op, operand in read.at[:1]:
            self._record_activation(op, operand, (ahead, back), link.count, left_s)
        loads = back if sum_s(back) > 0 else ahead
        if left_s > 0 and (whole_s := sum_s(loads)) > 0:
            for way in (BACKWARD, INPUTS, BOTH):
                did.passes[way].wait(loads, left_s / whole_s)

    def _record_activation(
        self, op: Op, operand: int, moved: tuple[Sequence[Load], Sequence[Load]], count: float, left_s: float
    ) -> None:
        """Record what the reshard of an operand does in the forward and in the backward, `count` times per step.
        `left_s`: seconds per step that it is charged with in the backward."""
        (ahead, back), blocks, (ahead_s, back_s) = moved, self.line.blocks(op.scope), map(sum_s, moved)
        each = count / blocks
        self.stops.at(op, AHEAD).waits += [(operand, load.times(each)) for load in ahead]
        charged = min(1.0, max(0.0, left_s) / (count * back_s)) if back_s > 0 else 0.0  # 0 where no gradient is wanted
        self.stops.at(op, BACK).last += [load.times(charged * each) for load in back]
        again_s = left_s - count * back_s  # of what runs again
        if op.scope and again_s > 0 < ahead_s:
            self.stops.at(op, AGAIN).waits += [(operand, load.times(again_s / ahead_s / blocks)) for load in ahead]

    def _each(self, link: Link, op: Op) -> float:
        """How often a net's reshards run for one instance of its reader `op`: once, or, of what is fed to a run of
        blocks, once for all of them."""
        return link.count / self.line.blocks(op.scope)

    def _record_copies(self, op: Op, loads: Sequence[Load], way: int) -> Stop:
        """The Stop of an operator, to which the local copies of a gather or scatter are added."""
        stop = self.stops.at(op, way)
        stop.compute_s += sum_s(split(loads)[0])
        return stop

    def _opening(self, read: _Read) -> bool:
        """Whether nothing computes yet while a weight is gathered: for what reads the first one (Link.opening); of
        pieces that are `apart`, all that are read before blocks (Link.before_blocks)."""
        link = read.link
        if self.apart:
            return any(
                leads and self.home[op.name] == read.name
                for (op, _), leads in zip(link.readers, link.before_blocks, strict=True)
            )
        first = link.kind == "feed" or any(op.name == self.program.first_read for op, _ in read.at)
        return link.opening and first

    def _add_weight(self, read: _Read) -> None:
        """Add the gathers of a weight, the way of its gradient to its leaf, and the sum of that over ranks."""
        link, routes = read.link, self.prices.routes
        ahead = routes.loads(read.made.value, read.asked.value, link.size_bytes)
        gathers, opening = any(load.kind == "all_gather" for load in ahead), self._opening(read)
        self._add_gathers(read, ahead, gathers=gathers, opening=opening)
        if NO_GRAD not in read.made.grad and NO_GRAD not in read.asked.grad:
            self._add_gradient(read, gathers=gathers, opening=opening)

    def _add_gathers(self, read: _Read, ahead: Sequence[Load], *, gathers: bool, opening: bool) -> None:
        """Add the reshard `ahead` of a weight in the forward, and where it runs again also in the backward."""
        link, did, grad_bytes = read.link, self.did[read.name], self._grad_bytes(read.link)
        once_s = (
            float(
                self.prices.table_s([read.made], [read.asked], link.size_bytes, weight=True, grad_bytes=grad_bytes)[
                    0, 0
                ]
            )
            * link.count
        )
        again = max(0.0, read.cost_s - once_s) / sum_s(ahead) if sum_s(ahead) > 0 else 0.0  # how often per step
        if self.apart and not link.readers[0][0].scope:  # each stage gathers again what its own readers need
            again *= any(
                op.needs_again(operand)
                for op, operand in link.readers
                if operand >= 0 and self.home[op.name] == read.name
            )
        first = self.by_block and not link.readers[0][0].scope  # nothing of a stage's backward runs before it
        used_bytes = link.size_bytes * fraction(read.asked.value, self.prices.sizes)
        for way, times, prefetched in (
            (FORWARD, link.count, not opening),
            *((way, again, link.again_ahead and not first) for way in (BACKWARD, INPUTS, BOTH)),
        ):
            (did.passes[way].hide if gathers and prefetched else did.passes[way].wait)(ahead, times)
        if not gathers or not read.at:
            return
        reader, operand = read.at[0]
        _, moving = split(ahead)
        gathered = Sent(moving, used_bytes, key=self._shared_key(read)).times(self._each(link, reader))
        self._record_copies(reader, ahead, AHEAD).takes.append((operand, gathered))
        did.passes[FORWARD].in_order.add(moving, link.count * opening)
        needing = [at for at in read.at if at[0].needs_again(at[1])][-1:]  # the last reader's backward comes first
        if needing and self.stops.named(reader.scope, AGAIN):  # what runs again of a block gathers it for the backward
            needing, way = read.at[:1], AGAIN
        else:
            way = BACK
        for reader, operand in needing if again and link.again_ahead else ():
            self._record_copies(reader, ahead, way).takes.append((operand, gathered))
            did.passes[BACKWARD].in_order.add(moving, again * first)

    def _add_gradient(self, read: _Read, *, gathers: bool, opening: bool) -> None:
        """Add the scatter of a weight's gradient to the layout of its leaf, and the sum over ranks, which all readers
        of the weight share."""
        link, did, routes, grad_bytes = read.link, self.did[read.name], self.prices.routes, self._grad_bytes(read.link)
        leaf = self.buckets.leaf(link, read.made, read.asked)
        back = routes.loads(read.asked.back, leaf, grad_bytes)
        last = link.last_share if gathers and not opening and not self.apart else 0.0  # of stages program order has it
        sent = Sent(
            split(back)[1],
            grad_bytes * fraction(read.asked.value, self.prices.sizes),
            routes.held_bytes(read.asked.back, leaf, grad_bytes),
            operand=read.at[0][1] if read.at else 0,
            key=self._shared_key(read),
        )
        if gathers and not opening:
            did.passes[BACKWARD].hide(back, link.count, last)
        else:
            did.passes[BACKWARD].wait(back, link.count)
        if gathers and read.at:
            did.passes[BACKWARD].in_order.add(sent.way, link.count * opening)
            sends = self._record_copies(read.at[0][0], back, BACK).sends
            sent = sent.times(self._each(link, read.at[0][0]))  # the sum behind it knows it by identity
            sends.append(sent)
            sends.sort(key=lambda one: -one.operand)
        for way in (WEIGHTS, BOTH):
            did.passes[way].wait(back, link.count)
        weight = link.ref[0], id(did) if self.apart else 0
        if weight not in self._summed:
            self._summed[weight] = None
            # sums begin when gradients have come to their leaf: one block later for each collective of the scatter
            exposed = 1.0 if opening else min(1.0, last * len(sent.way))
            self._add_sum(read, leaf, exposed, sent if gathers and sent.way else None)

    def _add_sum(self, read: _Read, leaf: Layout, exposed: float, first: Sent | None) -> None:
        """Add the sum of a weight's gradient over ranks, in buckets, and the gather of its leaf where that happens once
        per step.

        `leaf`: the layout of the gradient before the sum. `exposed`: the share of the sum that comes after the last
        compute, at least. `first`: the scatter that brings the gradient to `leaf`, None where there is none.
        """
        link, made, did, routes = read.link, read.made, self.did[read.name], self.prices.routes
        grad_bytes = self._grad_bytes(link)
        together_bytes = self.buckets.summed_bytes(made, leaf)
        full_bytes = self.prices.grad_bucket_bytes(link.size_bytes, grad_bytes, together_bytes)
        sums = routes.loads(leaf, made.back, grad_bytes, full_bytes)
        local, moving = split(sums)
        ratio = grad_bytes / link.size_bytes if link.size_bytes else 0.0
        bucket = min(1.0, BUCKET_BYTES / max(1.0, ratio * together_bytes))  # one bucket's share of all gradients
        hidden = _hidden_shares(len(moving), bucket, exposed)
        kinds, own_bytes = routes.kinds(leaf, made.back), ratio * self.buckets.leaf_bytes(link, made)
        if self.sums_at_end:  # places may have less than a full bucket (once_per_step)
            behind_s = sum(load.seconds * share for load, share in zip(moving, hidden, strict=True))
            moves = tuple([(load.kind, self.prices.mesh.axes[load.axis], load.seconds) for load in moving])
            copies_s = 0.0 if made.each else sum_s(local) + sum_s(split(self._leaf_loads(link, made))[0])
            (did.each if made.each else did.sums).append(
                Sums(kinds, (own_bytes,), full_bytes, moves, behind_s, copies_s)
            )
        if made.each or not self.sums_at_end:
            sent = Sent(
                sums,
                own_bytes,
                routes.held_bytes(leaf, made.back, grad_bytes),
                self._axes(moving),
                read.at[0][1] if read.at else 0,
                link.ref if self._by_piece(link) else None,
            )
            self.line.add_sum(self._first_reader(link, read.name), Sum((made.each, *kinds), sent, first), link.count)
            for way in (BACKWARD, WEIGHTS, BOTH):
                did.passes[way].wait(local, link.count)
                for load, share in zip(moving, hidden, strict=True):
                    did.passes[way].after.add([load], link.count * (1.0 - share))
                    did.passes[way].behind.add([load], link.count * share)
                    did.passes[way].lag_s += link.count * share * load.seconds * bucket
        else:
            did.summed.add(sums, link.count)
        if made.value != made.back:
            self._add_leaf(link, made, did, read.name)

    def _add_leaf(self, link: Link, made: LayoutPair, did: Did, piece: str) -> None:
        """Add the gather of a weight's leaf for a piece, once per step: in the forward, or in the first one of
        several."""
        gathered = self._leaf_loads(link, made)
        local, moving = split(gathered)
        kinds = self.prices.routes.kinds(made.back, made.value)
        gathers = all(kind == "all_gather" for kind, _ in kinds)  # else each is moved by itself, where it is needed
        self.line.add_leaf(
            self._first_reader(link, piece),
            Sent(gathered, self.buckets.leaf_bytes(link, made), (), self._axes(moving)),
            kinds,
            ahead=gathers,
        )
        if self.sums_at_end:
            did.leaves.add(gathered, link.count)
            return
        ahead = self.buckets.share_ahead.get(link.cluster.scope, 0.0) if gathers else 0.0
        did.passes[FORWARD].wait(local, link.count)
        did.passes[FORWARD].after.add(moving, link.count * (1 - ahead))
        did.passes[FORWARD].ahead.add(moving, link.count * ahead)

    def _leaf_loads(self, link: Link, made: LayoutPair) -> Sequence[Load]:
        """The gather of a weight's leaf, with the copies around it."""
        bucket_bytes = min(self.prices.bucket_bytes, self.buckets.gathered_bytes(link))
        return self.prices.routes.loads(made.back, made.value, link.size_bytes, bucket_bytes)

    def _axes(self, loads: Sequence[Load]) -> list[MeshAxis]:
        """The mesh axis of each of some collectives."""
        return [self.prices.mesh.axes[load.axis] for load in loads]

    def _grad_bytes(self, link: Link) -> float:
        """Bytes of the whole gradient of a weight."""
        return self.prices.gradient_bytes(self.program.ops[link.ref[0]], link.size_bytes)

    def _first_reader(self, link: Link, piece: str) -> str:
        """The operator of `piece` that reads a weight first; of all pieces, where these share it."""
        readers = [op.name for op, _ in link.readers if not self._by_piece(link) or self.home[op.name] == piece]
        return min(readers, key=self.program.order.__getitem__)


def _hidden_shares(collectives: int, bucket: float, exposed: float) -> list[float]:
    """Of each of the successive `collectives` of a sum in buckets, the share that can overlap the backward. `bucket`:
    one bucket's share of all gradients; with one bucket (1.0) nothing overlaps. `exposed`: the share that comes after
    the last compute, at least. The last bucket is half full on average, and each further collective begins one bucket
    later."""
    if bucket >= 1.0:
        return [0.0] * collectives
    return [max(0.0, 1.0 - max(exposed, (number + 0.5) * bucket)) for number in range(collectives)]
