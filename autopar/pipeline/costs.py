"""What each piece of a program costs under a solution: the prices of the two Problems of `problem.shares`, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.pipeline.balance import Cost
from autopar.pipeline.units import homes, units
from autopar.problem.build import Model
from autopar.problem.graph import Op, Program
from autopar.problem.shares import ForwardPrices
from autopar.problem.types import Net, Problem


@dataclass(eq=False)
class _Sum:
    """Costs of one piece, added up; a block's are those of all its instances."""

    micro_s: float = 0.0
    forward_s: float = 0.0
    once_s: float = 0.0
    kept_bytes: float = 0.0
    rest_bytes: float = 0.0
    live_bytes: float = 0.0
    parts: dict[str, None] = field(default_factory=dict)


def costs(program: Program, micro: Model, once: Model, choice: Sequence[int], forward: ForwardPrices, *,
          apart: bool = True) -> list[Cost]:
    """The cost of every unit of `program`, in order, where `choice` is a solution of both models; `forward` are prices on the same mesh.

    What is free to repeat counts where it is first read. `apart`: pieces that read the same weight are in different stages, each of which
    has a copy, gathers it, sums its gradient and steps the optimizer. Collectives that hide under compute are shown for each scope as
    Problem.evaluate shows them.
    """
    pieces = units(program)
    home = homes(program, pieces)
    sums: dict[str, _Sum] = {name: _Sum() for name in dict.fromkeys(u.name for u in pieces)}
    exposed = _exposed(micro.problem, choice)
    for index, (a, b) in enumerate(zip(micro.problem.nodes, once.problem.nodes, strict=True)):
        here, c = sums[home[micro.clusters[index].root.name]], choice[index]
        here.micro_s += float(a.cost_s[c])
        options = micro.choices[index][c]
        here.forward_s += sum(forward.op_s(op, tuple(joint.options[m] for joint in options)) for m, op in enumerate(micro.clusters[index].members))
        live = 0.0 if a.live_bytes is None else float(a.live_bytes[c])
        here.live_bytes += live
        here.kept_bytes += float(a.memory_bytes[c]) - live
        for number, name in enumerate(_holders(program, micro.clusters[index].root, home)):
            sums[name].rest_bytes += float(b.memory_bytes[c])
            sums[name].once_s += float(b.cost_s[c]) if apart or not number else 0.0
    for link, net, late in zip(micro.links, micro.problem.nets, once.problem.nets, strict=True):
        row = net.row[choice[net.producer]]
        several = apart and net.group >= 0 and not micro.clusters[net.producer].scope
        for column, name in _readings(net, choice, [home[micro.clusters[use.node].root.name] for use in net.uses], each=several):
            here = sums[name]
            share = exposed.get(net.group, 1.0)
            here.micro_s += float(net.shown_s[row, column]) + share * float(net.hideable_s[row, column])
            one_way = float(forward.table_s([link.rows[row]], [link.columns[column]], link.size_bytes)[0, 0]) * link.count
            here.forward_s += one_way if net.group < 0 else one_way * (net.contention + (1 - net.contention) * share)
            here.once_s += float(late.cost_s[row, column])
            live = 0.0 if net.live_bytes is None else float(net.live_bytes[row, column])
            live = float(net.memory_bytes[row, column]) if net.group >= 0 else live
            here.live_bytes += live
            here.kept_bytes += float(net.memory_bytes[row, column]) - live
    count = {run.scope: run.count for run in program.runs.values()}
    return [_per_instance(sums[unit.name], count.get(unit.name, 1)) for unit in pieces]


def _per_instance(total: _Sum, count: int) -> Cost:
    return Cost(total.micro_s / count, total.once_s / count, total.kept_bytes / count, total.rest_bytes / count, total.live_bytes,
                total.forward_s / count)


def _holders(program: Program, op: Op, home: Mapping[str, str]) -> list[str]:
    """The pieces that hold what rests: for a parameter all that read it, each on its own place at worst."""
    if op.role != "param" or op.scope:
        return [home[op.name]]
    names = [home[reader.name] for reader, _ in program.readers().get((op.name, 0), ())]
    return list(dict.fromkeys(names)) or [home[op.name]]


def _readings(net: Net, choice: Sequence[int], places: Sequence[str], *, each: bool) -> list[tuple[int, str]]:
    """The distinct columns that the readers of a net ask for, with the piece of the first reader, or of `each` that is another one."""
    found: dict[tuple[int, str], tuple[int, str]] = {}
    for use, place in zip(net.uses, places, strict=True):
        column = int(use.column[choice[use.node]])
        found.setdefault((column, place if each else ""), (column, place))
    return list(found.values())


def _columns(net: Net, choice: Sequence[int]) -> dict[int, int]:
    """The distinct columns that the readers of a net ask for, with the first reader of each."""
    found: dict[int, int] = {}
    for use in net.uses:
        found.setdefault(int(use.column[choice[use.node]]), use.node)
    return found


def _exposed(problem: Problem, choice: Sequence[int]) -> dict[int, float]:
    """For each overlap group the share of its collectives that does not hide."""
    hide = [0.0] * problem.groups
    comm = [0.0] * problem.groups
    for node, c in zip(problem.nodes, choice, strict=True):
        if node.group >= 0:
            hide[node.group] += float(node.hide_s[c])
    for net in problem.nets:
        if net.group >= 0:
            row = net.row[choice[net.producer]]
            comm[net.group] += sum(float(net.hideable_s[row, column]) for column in _columns(net, choice))
    return {g: max(0.0, comm[g] - hide[g]) / comm[g] if comm[g] > 0 else 1.0 for g in range(problem.groups)}
