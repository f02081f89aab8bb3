"""The cost of each piece of a program under a solution: seconds of its passes (pipeline.passes), and bytes.

Bytes come from two Problems (problem.step_shares): `micro` has what happens in each microbatch, `once` what happens
once per step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.pipeline.clock import Line
from autopar.pipeline.once_per_step import merged
from autopar.pipeline.passes import Passes
from autopar.pipeline.stops import AGAIN, AHEAD, BACK, in_few
from autopar.pipeline.stretches import Cost
from autopar.pipeline.work import BACKWARD, BOTH, FORWARD, INPUTS, WEIGHTS, Did, Pass, shown_s
from autopar.problem.build import Model
from autopar.problem.graph import Op, Program
from autopar.problem.pairs import LayoutPair
from autopar.problem.step_shares import ForwardPrices


@dataclass(eq=False)
class _Held:
    """Running sums for one piece (all blocks of a run): bytes and `adds` as in stretches.Cost, and seconds of the
    optimizer's step."""

    update_s: float = 0.0
    kept_bytes: float = 0.0
    halfway_bytes: float = 0.0
    rest_bytes: float = 0.0
    live_bytes: float = 0.0
    adds: dict[str, float] = field(default_factory=dict)


def costs(
    program: Program, micro: Model, once: Model, choice: Sequence[int], forward: ForwardPrices, *, apart: bool = True
) -> list[Cost]:
    """The cost of every unit of `program`, in order. `choice` solves both models; `forward` are prices of a forward
    alone on the same mesh.

    Operators that every stage may repeat (units.free_ops) count with their first reader. `apart`: pieces that read the
    same weight are in different stages, each of which has a copy, gathers it, adds and sums its gradient and steps the
    optimizer, and what overlaps sums depends on the stage (once_per_step.Summing); otherwise it is the backward of the
    last microbatch.
    """
    did = Passes(program, micro, choice, forward, apart=apart, sums_at_end=True)
    longer_s = {} if apart else _longer_s(did, forward)  # before gradients that add up make all backwards longer
    held = {name: _Held() for name in did.did}
    for index in range(len(micro.problem.nodes)):
        _hold_node(held, did, once, index)
    _hold_nets(held, did, micro, choice)
    seconds = _seconds(did)
    count = {run.scope: run.count for run in program.runs.values()}
    overlaps = apart and micro.prices.overlap > 0.0
    contention = micro.prices.contention if micro.prices.overlap > 0.0 else 1.0
    lines = {name: _line(did, name) for name in did.did if overlaps}
    each = {
        name: replace(
            _per_instance(held[name], seconds[name], did.did[name], count.get(name, 1), contention, longer_s.get(name)),
            block=overlaps and name in count,
            contention=contention,
            adds=(*held[name].adds.items(),) if apart else (),
            line=lines.get(name),
            work_s=_work_s(did.did[name], count.get(name, 1)),
            beside_s=_beside_s(did, name, contention) / count.get(name, 1) if overlaps else 0.0,
        )
        for name in dict.fromkeys(unit.name for unit in did.pieces)
    }
    return [each[unit.name] for unit in did.pieces]


def _hold_node(held: Mapping[str, _Held], did: Passes, once: Model, index: int) -> None:
    """Add what node number `index` holds under the solution of `did` to the pieces that hold it: bytes of a microbatch
    and at rest, and of a parameter the seconds of its update and of adding up its gradient."""
    program, micro, c = did.program, did.model, did.choice[index]
    cluster, node, at_rest = micro.clusters[index], micro.problem.nodes[index], once.problem.nodes[index]
    op, here = cluster.members[0], held[did.home[cluster.root.name]]
    live = 0.0 if node.live_bytes is None else float(node.live_bytes[c])
    here.live_bytes += live
    here.kept_bytes += float(node.memory_bytes[c]) - live
    here.halfway_bytes += halfway_bytes(program, micro, index, c)
    holders = _holders(program, op, did.home)
    for number, name in enumerate(holders):
        held[name].rest_bytes += float(at_rest.memory_bytes[c])
        if op.role == "param" and (did.apart or not number):
            held[name].update_s += once.update_s(index, c)
            for way in (BACKWARD, WEIGHTS, BOTH):
                did.did[name].passes[way].adding_s += micro.update_s(index, c)
            if len(holders) > 1:
                held[name].adds[op.name] = micro.update_s(index, c)


def _hold_nets(held: Mapping[str, _Held], did: Passes, micro: Model, choice: Sequence[int]) -> None:
    """Add the bytes of copies that reshards make, and of gathered weights, to the pieces that read them."""
    for link, net in zip(micro.links, micro.problem.nets, strict=True):
        row = net.row[choice[net.producer]]
        for column, name in did.readings(link, net):
            nbytes = float(net.memory_bytes[row, column])
            live = 0.0 if net.live_bytes is None else float(net.live_bytes[row, column])
            live = nbytes if net.group >= 0 else live  # a gathered weight is there while its block runs
            held[name].live_bytes += live
            held[name].kept_bytes += nbytes - live


def _line(did: Passes, name: str) -> Line:
    """The operators of a piece, or of one of its blocks, with their collectives."""
    stops, order = did.stops, did.program.order
    if name in did.program.runs:
        backward = (*stops.of(name, AGAIN), *stops.of(name, BACK))
        return Line((*stops.of(name, AHEAD),), backward, block=True, leaves=(*did.line.leaves(name),))
    ahead, back = (
        [stop for op, stop in sorted(stops.named("", way).items(), key=lambda at: order[at[0]]) if did.home[op] == name]
        for way in (AHEAD, BACK)
    )
    leaves = [leaf for leaf in did.line.leaves("") if did.home[leaf.reader] == name]
    return Line((*in_few(ahead),), (*in_few(back[::-1]),), block=False, leaves=(*leaves,))


def _work_s(did: Did, count: int) -> tuple[float, float]:
    """Seconds of the work of a piece (of `count` alike ones) in its forward and in its backward: without all that the
    stops of its Line have in the background."""
    forward_s, backward_s = (part.work_s - part.in_order.all_s - part.after.moving_s for part in did.passes[:2])
    return forward_s / count, backward_s / count


def _seconds(did: Passes) -> dict[str, list[float]]:
    """By piece, the seconds of each pass of one of several microbatches."""
    prices = did.model.prices
    return did.seconds(prices.contention, shared=prices.overlap == 0.0, at_once=False)


def _longer_s(did: Passes, forward: ForwardPrices) -> dict[str, tuple[float, float]]:
    """By piece, the seconds by which the forward of the first microbatch takes longer than others, which `did` has, and
    the backward of the last one: leaves are gathered beside that forward (runtime.leaves), gradients are summed beside
    that backward (runtime.gradsync.GradSync.summing)."""
    ends = _seconds(Passes(did.program, did.model, did.choice, forward, apart=False, sums_at_end=False))
    return {
        name: (max(0.0, ends[name][FORWARD] - own_s[FORWARD]), max(0.0, ends[name][BACKWARD] - own_s[BACKWARD]))
        for name, own_s in _seconds(did).items()
    }


def _beside_s(did: Passes, name: str, contention: float) -> float:
    """Seconds by which the whole backward of a piece takes longer beside its sums of gradients once per step: all of
    these where other collectives of their axes are queued behind them, which it waits for."""
    here, axes = did.did[name], did.model.prices.mesh.axes
    back, summed = here.passes[BACKWARD], {axis for one in here.sums for _, axis, _ in one.moves}
    if any(axes[load.axis] in summed for load in (*back.ahead.moving(), *back.behind.moving())):
        return here.summed.all_s
    beside = Pass()
    beside.add(back)
    beside.behind.add(here.summed.moving())
    return here.summed.local_s + shown_s(beside, contention) - shown_s(back, contention)


def _each_s(did: Did, seconds: Sequence[float]) -> tuple[float, float, float]:
    """Exposed seconds of the sums after a microbatch of a piece: in the backward, in its part for weights, and in both
    parts at once."""
    all_s, behind_s = sum(one.seconds for one in did.each), sum(one.behind_s for one in did.each)
    backward_s, weights_s, both_s = (
        all_s - behind_s * _overlapped(did.passes[way], seconds[way]) for way in (BACKWARD, WEIGHTS, BOTH)
    )
    return backward_s, weights_s, both_s


def _overlapped(part: Pass, took_s: float) -> float:
    """The share of a piece's background collectives that is overlapped, where its pass takes `took_s`."""
    return max(0.0, 1.0 - (took_s - part.work_s) / part.background_s) if part.background_s else 0.0


def _per_instance(
    held: _Held,
    seconds: Sequence[float],
    did: Did,
    count: int,
    contention: float,
    longer_s: tuple[float, float] | None,
) -> Cost:
    """The Cost of one of the `count` instances of a piece, without the fields that `costs` adds. `seconds`: of each
    pass over all instances; `longer_s`: of `_longer_s` (None: pieces are apart)."""
    apart = longer_s is None
    leaves_s, summed_s = longer_s or (did.leaves.local_s if contention < 1.0 else did.leaves_s(contention), 0.0)
    once_s = held.update_s + summed_s
    return Cost(
        (seconds[FORWARD] + seconds[BACKWARD]) / count,
        once_s / count,
        held.kept_bytes / count,
        held.halfway_bytes / count,
        held.rest_bytes / count,
        held.live_bytes,
        seconds[FORWARD] / count,
        seconds[INPUTS] / count,
        seconds[WEIGHTS] / count,
        seconds[BOTH] / count,
        update_s=held.update_s / count,
        leaves_s=leaves_s / count,
        sums=merged(did.sums) if apart else (),
        summed_s=did.summed_s(contention) / count if apart else 0.0,
        copies_s=did.copies_s / count if apart else 0.0,
        each=merged(did.each),
        each_s=_each_s(did, seconds),
    )


def halfway_bytes(program: Program, micro: Model, index: int, c: int) -> float:
    """Bytes of the gradients that are kept between the two parts of a split backward: those of the results of operators
    with weights, each once."""
    found = 0.0
    for member, op in enumerate(micro.clusters[index].members):
        if op.name in program.waiting:
            options = [joint.options[member] for joint in micro.choices[index][c]]
            for i, out in enumerate(op.call.outs):
                made = LayoutPair.of_uses(tuple([option.outs[i] for option in options]))
                found += (
                    op.count * micro.prices.local_bytes(math.prod(out.sizes) * out.itemsize, made.back)
                    if out.grad
                    else 0.0
                )
    return found


def _holders(program: Program, op: Op, home: Mapping[str, str]) -> list[str]:
    """The pieces that hold a parameter and its state: all that read it, as each may be on a place of its own."""
    if op.role != "param" or op.scope:
        return [home[op.name]]
    names = [home[reader.name] for reader, _ in program.readers.get((op.name, 0), ())]
    return list(dict.fromkeys(names)) or [home[op.name]]
