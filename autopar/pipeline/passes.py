"""What each piece of a program does in each pass over it, under a solution: compute, collectives that compute waits for, and collectives behind it.

    forward    operators and changes of layout; gathers of weights begin ahead (runtime.prefetch)
    backward   the same again, gathers for it included; gradients of gathered weights are scattered behind it (autopar.deferred_waits)
    inputs     of a backward that is taken apart: all but what is for weights
    weights    the rest of it; autograd brings gradients to where they rest then, and waits (runtime.stepping)
    both       the two at once, as schedules that take backwards apart have it at times

A weight's gradient is summed in buckets (runtime.gradsync): after every microbatch behind the backward, or once per step. The seconds of all
passes, with nothing hidden, are those of the Problem but for the starts that buckets save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

from autopar.cost.comm import link_shares
from autopar.layout import BUCKET_BYTES, NO_GRAD, Layout, fraction
from autopar.pipeline.clock import Timeline
from autopar.pipeline.once_per_step import Sums
from autopar.pipeline.pass_ends import LAST, Sent, Stop, Sum, ends_s
from autopar.pipeline.units import homes, units
from autopar.pipeline.work import BACKWARD, BOTH, FORWARD, INPUTS, PASSES, WEIGHTS, Did, Pass, shown_s, shows
from autopar.problem.build import Model
from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op, Program
from autopar.problem.hiding import Load, Loads, split
from autopar.problem.leaf_gathers import in_a_row, share_ahead
from autopar.problem.nets import Link
from autopar.problem.op_algorithms import Wait
from autopar.problem.pairs import Pair, synced
from autopar.problem.prices import Prices
from autopar.problem.step_shares import ForwardPrices
from autopar.problem.types import Net
from autopar.rules.language import Option


class Passes:
    """Of all pieces of `program` under the solution `choice` of `model`; `forward` are prices on the same mesh. `apart` as pipeline.costs
    has it; `late`: sums that go once per step wait for its end."""

    def __init__(self, program: Program, model: Model, choice: Sequence[int], forward: ForwardPrices, *, apart: bool, late: bool) -> None:
        self.program, self.model, self.choice, self.forward = program, model, choice, forward
        self.apart, self.late = apart, late
        self._held: dict[tuple[str, int], None] = {}
        self.prices: Prices = model.prices
        self.line = Timeline(program)
        self.stops = self.line.stops
        self.pieces = units(program)
        self.home = homes(program, self.pieces)
        self.did: dict[str, Did] = {name: Did() for name in dict.fromkeys(u.name for u in self.pieces)}
        for index, cluster in enumerate(model.clusters):
            self._node(index, cluster)
        for link, net in zip(model.links, model.problem.nets, strict=True):
            for column, name in self.readings(link, net) if link.moves else ():
                self._net(link, net, column, name)

    def readings(self, link: Link, net: Net) -> list[tuple[int, str]]:
        """The distinct columns that the readers of a net ask for, with the piece of the first reader, or with each that is another one."""
        each = self.apart and link.weight and not link.cluster.scope
        found: dict[tuple[int, str], tuple[int, str]] = {}
        for use in net.uses:
            column, place = int(use.column[self.choice[use.node]]), self.home[self.model.clusters[use.node].root.name]
            found.setdefault((column, place if each else ""), (column, place))
        return list(found.values())

    def seconds(self, contention: float, shared: bool) -> dict[str, list[float]]:
        """Seconds of each piece in each pass; what shows of collectives behind work is found for each scope, and belongs to who brings them.
        `shared`: what moves and what computes share cores, so that nothing hides."""
        scopes: dict[str, list[Pass]] = {}
        for name, did in self.did.items():
            for total, part in zip(scopes.setdefault(name if name in self.program.runs else "", [Pass() for _ in PASSES]), did.passes, strict=True):
                total.add(part)
        shares = {scope: [shows(total, contention, shared) for total in totals] for scope, totals in scopes.items()}
        if not self.late and not shared:
            self._begins(scopes, shares, contention)
        if self.apart and not shared and "" in scopes:
            shares[""][FORWARD] = self._fetched(scopes, shares[""][FORWARD], contention)
        found = {name: [part.work_s + shown * part.background_s for part, shown in zip(did.passes, shares[name if name in self.program.runs else ""], strict=True)]
                 for name, did in self.did.items()}
        if self.apart and not shared and not self.program.runs:
            self._alone(found, contention)
        for way in (FORWARD, BACKWARD) if not self.apart and not shared else ():
            more_s = self.line.more_s(scopes, {scope: each[way] for scope, each in shares.items()}, way, contention, gathers_first=way == BACKWARD and not self.late)
            for name, own_s in found.items():
                own_s[way] += more_s * self._moved_s(name, way) / (sum(self._moved_s(other, way) for other in found) or 1.0)
        return found

    def _alone(self, found: dict[str, list[float]], contention: float) -> None:
        """Of a model without blocks the stages are cut from its own operators, and what one of them moves hides under none on other places: under as much as it computes itself at
        most, and as those in front of it do, behind which gathers begin and scatters go on."""
        before_s = [0.0] * len(PASSES)
        for name, did in self.did.items():
            for way, part in enumerate(did.passes):
                own = Pass()
                own.add(part)
                own.compute_s = min(part.compute_s, before_s[way])
                found[name][way] = max(found[name][way], part.work_s + shown_s(own, contention))
                before_s[way] += part.compute_s

    def _moved_s(self, name: str, way: int) -> float:
        """Seconds of what a piece of the model itself moves behind its work."""
        part = self.did[name].passes[way]
        return 0.0 if name in self.program.runs else part.background_s + part.after.all_s

    def _begins(self, scopes: Mapping[str, Sequence[Pass]], shares: Mapping[str, list[float]], contention: float) -> None:
        """A backward that follows its forward begins with the gathers of the block whose backward is the first one (runtime.regather): they hide under
        what the model computes in front of it."""
        first = next((scope for scope in reversed(self.program.runs) if scope in scopes and scopes[scope][BACKWARD].ahead.moving_s), None)
        if first is None or "" not in scopes:
            return
        own, top = scopes[first][BACKWARD], scopes[""][BACKWARD]
        share = 1.0 / self.program.runs[first].count
        left, more = Pass(), Pass()
        for made, part in ((left, own), (more, top)):
            made.add(part)
        left.ahead = Loads(load.times(1.0 - share) for load in own.ahead.moving())
        more.ahead.add([load.times(share) for load in own.ahead.moving()])
        took_s = shown_s(left, contention) + shown_s(more, contention) - shown_s(top, contention)
        shares[first][BACKWARD] = min(shares[first][BACKWARD], took_s / own.background_s)

    def _fetched(self, scopes: Mapping[str, Sequence[Pass]], share: float, contention: float) -> float:
        """The share that shows of what a stage gathers behind its blocks: it begins with the last of them, or a few before (runtime.prefetch), and hides under what these
        leave; `share` where there are no blocks."""
        own, last = scopes[""][FORWARD], next((scope for scope in reversed(self.program.runs) if scope in scopes), None)
        if last is None or not own.background_s:
            return share
        block, count = scopes[last][FORWARD], self.program.runs[last].count
        nbytes = sum(sent.nbytes for stop in self.stops.of(last, back=False) for _, sent in stop.takes)
        reached = min(count, math.ceil(BUCKET_BYTES / max(1.0, nbytes)))
        hidden_s = min(own.background_s, max(0.0, block.work_s - block.background_s) * reached / count)
        return 1.0 - (1.0 - contention) * hidden_s / own.background_s

    def ends_s(self, scope: str, blocks: int) -> tuple[float, float, float]:
        """Seconds that the forward of a stage that begins with so many blocks of `scope` takes longer than all of them, the backward of one that ends
        with them, and the backward of one that begins with them."""
        ahead, back = (self.stops.of(scope, back=way) for way in (False, True))
        passes = (ahead, back if self.model.plain is None else [*ahead, *back])
        (begin_s, _), (first_s, last_s) = (ends_s(stops, blocks, self.prices.contention) if any(stop.takes or stop.sends for stop in stops) else (0.0, 0.0) for stops in passes)
        return begin_s, first_s, last_s

    def _node(self, index: int, cluster: Cluster) -> None:
        node, c, combo = self.model.problem.nodes[index], self.choice[index], self.model.choices[index][self.choice[index]]
        left_s, ahead_s, inside = float(node.cost_s[c]), 0.0, list[tuple[Load, float]]()
        for member, op in enumerate(cluster.members):
            options: tuple[Option, ...] = tuple([joint.options[member] for joint in combo])
            if op.role == "param":  # steps of the optimizer are of no pass
                left_s -= self.model.update_s(index, c)
                continue
            if op.free and not any(option.run for option in options):
                continue
            forward_s, both_s = self.forward.op_s(op, options), self.prices.op_s(op, options)
            left_s, ahead_s = left_s - both_s, ahead_s + forward_s
            if not any(option.run for option in options):
                self._works(self.home[op.name], forward_s, both_s - forward_s, op.weights_share)
                self._stops(op, forward_s, both_s - forward_s)
                continue
            waits = self.prices.waits(op, options)
            ahead, back = ([self._load(wait) for wait in way] for way in waits)
            self._inside(op, waits)
            alone_s, alone_back_s = forward_s - op.count * _sum_s(ahead), both_s - forward_s - op.count * _sum_s(back)
            self._works(self.home[op.name], alone_s, alone_back_s, op.weights_share)
            self._stops(op, alone_s, alone_back_s)
            self._waits(self.home[op.name], ahead, back, op.weights_share, op.count)
            inside += [(load, op.count) for load in ahead]
        self._again(self.home[cluster.root.name], max(0.0, left_s), ahead_s, inside)

    def _stops(self, op: Op, forward_s: float, back_s: float) -> None:
        """Compute of an operator where it stands."""
        if self._asks(op):
            for seconds, back in ((forward_s, False), (back_s, True)):
                self.stops.at(op, back=back).compute_s = seconds / (self.program.runs[op.scope].count if op.scope else 1)

    def _asks(self, op: Op) -> bool:
        """Whether it is asked where an operator stands: stages ask what is where in a block (`ends_s`, `_fetched`), a model in one piece and stages without blocks where its own operators are (`line`)."""
        return op.scope in self.program.runs if self.by_block else not op.scope

    @property
    def by_block(self) -> bool:
        """Whether stages are made of blocks."""
        return self.apart and bool(self.program.runs)

    def _inside(self, op: Op, waits: Sequence[Sequence[Wait]]) -> None:
        """Collectives inside an operator, where it stands in its block."""
        for way, back in zip(waits, (False, True), strict=True) if self._asks(op) else ():
            stop = self.stops.at(op, back=back)
            stop.waits += [(LAST, self._load(wait)) for wait in way if not wait.last]
            stop.behind += [self._load(wait) for wait in way if wait.last]

    def _reads(self, link: Link, net: Net, column: int) -> list[tuple[Op, int]]:
        """Who reads a value as `column` has it where that is asked (`_asks`), in order, each with the number of the operand; what is fed to a block is its first one."""
        return [(op, max(operand, 0)) for (op, operand), use in zip(link.readers, net.uses, strict=True)
                if self._asks(op) and int(use.column[self.choice[use.node]]) == column]

    def _load(self, wait: Wait) -> Load:
        """A collective inside an operator."""
        return Load(wait.axis, wait.seconds, link_shares(wait.kind, wait.nbytes, self.prices.mesh.axes[wait.axis]), wait.kind)

    def _waits(self, name: str, ahead: Sequence[Load], back: Sequence[Load], weights: float, count: float) -> None:
        """Collectives inside an operator that compute waits for; a backward that is taken apart has them as it has the operator."""
        for way, loads, share in ((FORWARD, ahead, 1.0), (BACKWARD, back, 1.0), (INPUTS, back, 1 - weights), (WEIGHTS, back, weights), (BOTH, back, 1.0)):
            self.did[name].passes[way].wait(loads, count * share)

    def _again(self, name: str, again_s: float, ahead_s: float, inside: Sequence[tuple[Load, float]]) -> None:
        """What of a forward of `ahead_s` runs again in the backward, the collectives inside it in proportion."""
        share = min(1.0, again_s / ahead_s) if ahead_s > 0 else 0.0
        self._works(name, 0.0, again_s - share * sum(count * load.seconds for load, count in inside), 0.0)
        for load, count in inside if share > 0 else ():
            self._waits(name, (), [load], 0.0, share * count)

    def _works(self, name: str, forward_s: float, back_s: float, weights: float) -> None:
        """Compute of a piece; the share `weights` of its backward is for weights."""
        for way, seconds in ((FORWARD, forward_s), (BACKWARD, back_s), (INPUTS, (1 - weights) * back_s), (WEIGHTS, weights * back_s), (BOTH, back_s)):
            self.did[name].passes[way].compute_s += seconds

    def _net(self, link: Link, net: Net, column: int, name: str) -> None:
        row, did = net.row[self.choice[net.producer]], self.did[name]
        made, asked, cost_s = link.rows[row], link.columns[column], float(net.cost_s[row, column])
        reads = self._reads(link, net, column) if made.value != asked.value or made.back != asked.back else []
        if link.weight:
            self._weight(link, made, asked, cost_s, name, reads)
            return
        ahead = self.prices.routes.loads(made.value, asked.value, link.size_bytes)
        did.passes[FORWARD].wait(ahead, link.count)
        back = self.prices.routes.loads(asked.back, made.back, link.size_bytes)
        left_s = cost_s - link.count * _sum_s(ahead)
        for op, operand in reads[:1]:
            self.stops.at(op, back=False).waits += [(operand, load) for load in split(ahead)[1]]
            self.stops.at(op, back=True).behind += split(back)[1]
        loads = back if _sum_s(back) > 0 else ahead
        if left_s > 0 and (whole_s := _sum_s(loads)) > 0:
            for way in (BACKWARD, INPUTS, BOTH):
                did.passes[way].wait(loads, left_s / whole_s)

    def _takes(self, read: tuple[Op, int], gathered: Sent, way: Sequence[Load], *, back: bool) -> None:
        """A weight that an operator takes where that is asked."""
        op, operand = read
        self._copies(op, way, back=back).takes.append((operand, gathered))

    def _copies(self, op: Op, way: Sequence[Load], *, back: bool) -> Stop:
        """What is known of an operator, with the copies of a way of the model itself."""
        stop = self.stops.at(op, back=back)
        stop.compute_s += 0.0 if self.by_block else _sum_s(split(way)[0])
        return stop

    def _opening(self, link: Link, name: str) -> bool:
        """Whether nothing computes while a weight that the piece `name` reads is gathered (Link.opening); of pieces that are `apart` all that is read in front of blocks."""
        return any(leads and self.home[op.name] == name for (op, _), leads in zip(link.readers, link.leads, strict=True)) if self.apart else link.opening

    def _weight(self, link: Link, made: Pair, asked: Pair, cost_s: float, name: str, reads: Sequence[tuple[Op, int]]) -> None:
        """The gather of a weight, and its gradient back."""
        routes, count, did, opening = self.prices.routes, link.count, self.did[name], self._opening(link, name)
        grad_bytes = self.prices.gradient_bytes(self.program.ops[link.ref[0]], link.size_bytes)
        ahead = routes.loads(made.value, asked.value, link.size_bytes)
        plain_s = float(self.prices.table_s([made], [asked], link.size_bytes, weight=True, grad_bytes=grad_bytes)[0, 0]) * count
        gathers = any(load.kind == "all_gather" for load in ahead)
        again = max(0.0, cost_s - plain_s) / _sum_s(ahead) if _sum_s(ahead) > 0 else 0.0
        if self.apart and not link.readers[0][0].scope:  # each stage gathers again what its own readers need
            again *= any(op.needs_again(operand) for op, operand in link.readers if operand >= 0 and self.home[op.name] == name)
        first = self.by_block and not link.readers[0][0].scope  # nothing of a stage's backward runs before it
        for way, times, begun in ((FORWARD, count, not opening), *((way, again, link.again_ahead and not first) for way in (BACKWARD, INPUTS, BOTH))):
            (did.passes[way].hide if gathers and begun else did.passes[way].wait)(ahead, times)
            if gathers and times:
                self.line.gathers_bytes[self._place(link)[0], way].append(link.size_bytes * fraction(asked.value, self.prices.sizes))
        if gathers and reads:
            gathered = Sent(split(ahead)[1], link.size_bytes * fraction(asked.value, self.prices.sizes))
            if opening:
                self.stops.at(reads[0][0], back=False).opens.append((reads[0][1], gathered))
            else:
                self._takes(reads[0], gathered, ahead, back=False)
            for read in [read for read in reads if read[0].needs_again(read[1])][-1:] if again and link.again_ahead else ():
                self._takes(read, gathered, ahead, back=True)
        if NO_GRAD in made.grad or NO_GRAD in asked.grad:
            return
        leaf = self._leaf(link, made, asked)
        back = routes.loads(asked.back, leaf, grad_bytes)
        last = link.last if gathers and not opening and not self.apart else 0.0  # of stages `ends_s` has it
        sent = Sent(split(back)[1], grad_bytes * fraction(asked.value, self.prices.sizes), routes.held_bytes(asked.back, leaf, grad_bytes))
        if gathers and reads and not opening:
            self._copies(reads[0][0], back, back=True).sends.append(sent)
        if gathers and not opening:
            did.passes[BACKWARD].hide(back, count, last)
        else:
            did.passes[BACKWARD].wait(back, count)
        for way in (WEIGHTS, BOTH):
            did.passes[way].wait(back, count)
        of = link.ref[0], id(did) if self.apart else 0
        if of not in self._held:  # readers share the leaf and the sum of its gradient
            self._held[of] = None
            # sums begin when gradients have come to their leaf: one block later for each collective
            self._summed(link, made, leaf, grad_bytes, did, 1.0 if opening else min(1.0, last * len(sent.way)), sent if gathers and sent.way and not opening else None)

    def _summed(self, link: Link, made: Pair, leaf: Layout, grad_bytes: float, did: Did, last: float, first: Sent | None) -> None:
        """What a weight takes once per step, or after every microbatch, in buckets; the share `last` when the backward is done. `first`: what scatters a gradient to its leaf."""
        routes, count = self.prices.routes, link.count
        together = self._summed_bytes.get((made.each, *routes.kinds(leaf, made.back)), 0.0)
        sums = routes.loads(leaf, made.back, grad_bytes, self.prices.grad_bucket_bytes(link.size_bytes, grad_bytes, together))
        local, moving = split(sums)
        bucket = min(1.0, BUCKET_BYTES / max(1.0, together))
        # the last bucket is half full on average; another collective begins one bucket later
        hidden = [max(0.0, 1.0 - max(last, (number + 0.5) * bucket)) if bucket < 1.0 else 0.0 for number in range(len(moving))]
        if self.late:  # of places that may have less than a bucket
            moves = tuple([(load.kind, self.prices.mesh.axes[load.axis], load.seconds) for load in moving])
            ratio = grad_bytes / link.size_bytes if link.size_bytes else 0.0
            (did.each if made.each else did.sums).append(Sums(routes.kinds(leaf, made.back), (ratio * self._leaf_bytes(link, made),), ratio * min(self.prices.bucket_bytes, together), moves,
                                                              sum(load.seconds * share for load, share in zip(moving, hidden, strict=True))))
        if made.each or not self.late:
            self.line.add_sum(self._place(link), Sum((made.each, *routes.kinds(leaf, made.back)), Sent(moving, self._leaf_bytes(link, made), routes.held_bytes(leaf, made.back, grad_bytes)), first), count, hidden)
            for way in (BACKWARD, WEIGHTS, BOTH):
                did.passes[way].after.add(local, count)
                for load, share in zip(moving, hidden, strict=True):
                    did.passes[way].after.add([load], count * (1.0 - share))
                    did.passes[way].behind.add([load], count * share)
                    did.passes[way].lag_s += count * share * load.seconds * bucket
        else:
            did.once.add(sums, count)
        if made.value != made.back:
            gathered = routes.loads(made.back, made.value, link.size_bytes, min(self.prices.bucket_bytes, self._gathered_bytes.get(link.ref, 0.0)))
            if self.late:
                did.once.add(gathered, count)
            else:
                local, moving = split(gathered)
                ahead = self._filled_ahead.get(link.cluster.scope, 0.0) if all(load.kind == "all_gather" for load in moving) else 0.0
                did.passes[FORWARD].after.add(local, count)
                did.passes[FORWARD].after.add(moving, count * (1 - ahead))
                did.passes[FORWARD].ahead.add(moving, count * ahead)

    def _place(self, link: Link) -> tuple[str, str]:
        """Where a weight is read first: in the blocks of which scope, or in none, and by whom."""
        first = min((op.name for op, _ in link.readers), key=lambda name: self.program.order[name])
        piece = self.home[first]
        return piece if piece in self.program.runs else "", first

    def _leaf(self, link: Link, made: Pair, asked: Pair) -> Layout:
        """How the gradient of the leaf lies before it is summed: partial where all that read the weight, on any place, leave it so."""
        others = self._asked[link.ref]
        if len(others) == 1:
            return synced(made, asked)
        each = [synced(made, other) for other in others]
        return tuple(entries[0] if all(entry == entries[0] for entry in entries) else own
                     for own, *entries in zip(made.back, *each, strict=True))

    @cached_property
    def _asked(self) -> Mapping[tuple[str, int], list[Pair]]:
        """Of each weight, how all its readers want it."""
        found: dict[tuple[str, int], dict[Pair, None]] = {}
        for link in self.model.links:
            if link.weight:
                found.setdefault(link.ref, {}).update(dict.fromkeys(link.columns[int(use.column[self.choice[use.node]])] for use in link.uses))
        return {ref: list(pairs) for ref, pairs in found.items()}

    @cached_property
    def _filled_ahead(self) -> Mapping[str, float]:
        """By scope of blocks: the share of the leaves that are gathered once per step whose buckets are on their way before the block begins
        (runtime.leaves). What the model itself reads is waited for before it runs."""
        leaves: dict[str, list[float]] = {}
        for link in self._weights:
            made, scope = link.rows[link.row[self.choice[link.producer]]], link.cluster.scope
            if scope and made.value != made.back:
                leaves.setdefault(scope, []).append(link.size_bytes * fraction(made.value, self.prices.sizes))
        return {scope: share_ahead(each, in_a_row(self.program, scope)) for scope, each in leaves.items()}

    @cached_property
    def _summed_bytes(self) -> Mapping[tuple[object, ...], float]:
        """Bytes on a rank of all leaves whose gradients travel in the same buckets (runtime.gradsync): by whether that is after every microbatch and by the steps of their way."""
        found = dict[tuple[object, ...], float]()
        for link in self._weights:
            made = link.rows[link.row[self.choice[link.producer]]]
            key = made.each, *self.prices.routes.kinds(self._leaf(link, made, self._asked[link.ref][0]), made.back)
            found[key] = found.get(key, 0.0) + link.count * self._leaf_bytes(link, made)
        return found

    @cached_property
    def _gathered_bytes(self) -> Mapping[tuple[str, int], float]:
        """Of each weight, bytes on a rank of the leaves that are gathered together with its own (runtime.leaves): of those that are read one after the other and take the
        same collectives; of all blocks, where that is all of a block. Others move by themselves."""
        together: dict[str, list[tuple[object, list[Link], float]]] = {}
        for link in sorted(self._weights, key=lambda link: self.program.order[link.readers[0][0].name]):
            made = link.rows[link.row[self.choice[link.producer]]]
            kinds, here = self.prices.routes.kinds(made.back, made.value), together.setdefault(link.cluster.scope, [])
            if kinds and all(kind == "all_gather" for kind, _ in kinds):
                _, links, before = here.pop() if here and here[-1][0] == kinds else (None, [], 0.0)
                here.append((kinds, [*links, link], before + self._leaf_bytes(link, made)))
        return {link.ref: nbytes * (link.count if len(here) == 1 else 1) for here in together.values() for _, links, nbytes in here for link in links}

    def _leaf_bytes(self, link: Link, made: Pair) -> float:
        """Bytes on a rank of the leaf of one instance of a weight."""
        return link.size_bytes * fraction(made.value, self.prices.sizes)

    @property
    def _weights(self) -> list[Link]:
        """The first link of each weight."""
        return [self.model.links[index] for index in self.model.weights.values()]


def _sum_s(loads: Sequence[Load]) -> float:
    return sum(load.seconds for load in loads)
