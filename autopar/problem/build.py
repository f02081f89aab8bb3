"""Program + mesh + prices -> Problem, and back.

    clusters of Ops become nodes; a node's choices are its joint options, one per axis (product over the axes);
    a value with readers outside its cluster becomes a net; parameters are clusters that never move.

`Model.decode` turns a solution's choice back into one option per Op and axis: the index space of the solver never leaves
this package.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.layout import NO_GRAD, Layout, cutters, fits
from autopar.problem.branches import Branches, coordinate_of
from autopar.problem.clusters import Cluster, Joint
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.lanes import in_lanes, whole
from autopar.problem.prices import Pair, Prices, pair
from autopar.problem.resting import Resting, one_cadence
from autopar.problem.saved import HOLDERS, Kept, Way, kept
from autopar.problem.types import Net, Node, Problem, Use
from autopar.rules.algorithms import agree
from autopar.rules.experts import INSIDE
from autopar.rules.language import Option
from autopar.rules.language import Use as TensorUse

Choice = tuple[Joint, ...]  # one joint option per axis
Decisions = dict[str, tuple[Option, ...]]  # op name -> option per axis


@dataclass(eq=False)
class Model:
    """A Problem with the way back to the graph."""

    problem: Problem
    clusters: list[Cluster]
    choices: list[list[Choice]]

    def decode(self, choice: Sequence[int]) -> Decisions:
        """One option per Op and axis."""
        found: Decisions = {}
        for cluster, options, index in zip(self.clusters, self.choices, choice, strict=True):
            for member, op in enumerate(cluster.members):
                found[op.name] = tuple(joint.options[member] for joint in options[index])
        return found


@dataclass(eq=False, slots=True)
class _Link:
    """One net before it has numbers: a value, who reads it, how often per step, and how: an edge, a feed, a carry."""

    ref: Ref
    readers: list[tuple[Op, int]]
    count: int
    kind: str = "edge"

    @property
    def way(self) -> Way:
        """Its name in `problem.saved`."""
        reader = self.readers[0][0]
        return Way(self.ref, reader.scope if self.kind == "edge" else reader.name, self.kind)


def build(program: Program, clusters: list[Cluster], joints: Sequence[Sequence[Sequence[Joint]]], prices: Prices,
          memory_limit_bytes: float, name: str = "", branches: Branches | None = None) -> Model:
    """The Problem of one mesh. `joints[axis][cluster]` are the options of a cluster on an axis; `branches` may work side by side.

    Raises InfeasibleError when predicates and sizes leave some cluster without a choice.
    """
    choices = [_choices(c, per_axis, prices) for c, *per_axis in zip(clusters, *joints, strict=True)]
    scopes = {scope: i for i, scope in enumerate(dict.fromkeys(c.scope for c in clusters))}
    keeps = kept(clusters, program)
    nodes = tuple(_node(c, options, keeps.own.get(i, ()), program, prices, scopes[c.scope])
                  for i, (c, options) in enumerate(zip(clusters, choices, strict=True)))
    branches = branches or Branches()
    nodes, lanes = in_lanes(nodes, clusters, choices, branches)
    home = {op.name: (i, m) for i, c in enumerate(clusters) for m, op in enumerate(c.members)}
    nets = tuple(_net(link, program, home, clusters, choices, keeps, prices, scopes) for link in _links(program, home))
    nets = tuple(whole(net, clusters, choices, branches) for net in nets)
    return Model(Problem(nodes, nets, len(scopes), memory_limit_bytes, name, lanes), clusters, choices)


def _choices(cluster: Cluster, per_axis: Sequence[Sequence[Joint]], prices: Prices) -> list[Choice]:
    found = [combo for combo in itertools.product(*per_axis) if _placements(combo) < 2 and fits_together(cluster, combo, prices.sizes)]
    if not found:
        op = cluster.root
        raise InfeasibleError(f"{op.name} ({op.target} at {op.where}) has no option left on a mesh of {prices.sizes}: the recipe's "
                              f"predicates or the sizes {[t.sizes for t in op.tensors]} exclude all of them")
    return found


def _placements(combo: Choice) -> int:
    """On how many axes a choice is an operator placement."""
    return sum(coordinate_of(joint.options[-1]) is not None for joint in combo)


def fits_together(cluster: Cluster, combo: Choice, sizes: tuple[int, ...]) -> bool:
    """Whether all axes together can cut every tensor (dims cut by several axes divide evenly) and run every algorithm."""
    if len(combo) == 1:
        return True
    for member, op in enumerate(cluster.members):
        options = [joint.options[member] for joint in combo]
        if op.role == "param" and not _can_rest(op, options, sizes):
            return False
        if op.role == "op" and not agree(options):
            return False
        for index, tensor in enumerate(op.tensors):
            layout = tuple((*j.options[member].ins, *j.options[member].outs)[index].value for j in combo)
            for dim in range(len(tensor.shape)):
                if len(cutters(layout, dim)) > 1 and not fits(tensor.sizes, layout, sizes, (dim,)):
                    return False
    return True


def _can_rest(op: Op, options: Sequence[Option], sizes: tuple[int, ...]) -> bool:
    """Whether a parameter can be cut at rest as all axes together say (dims that several cut divide evenly)."""
    lies, shape = Resting.of(options), op.call.outs[0].sizes
    crowded = [dim for dim in range(len(shape)) if len(cutters(lies.rest, dim)) > 1]
    return one_cadence(options) and (not lies.gathered or fits(shape, lies.rest, sizes, crowded))


def _node(cluster: Cluster, options: list[Choice], own: Sequence[Ref], program: Program, prices: Prices, group: int) -> Node:
    labels = tuple(",".join(joint.options[-1].factor or "-" for joint in combo) for combo in options)
    seconds, hide, memory, update = (np.zeros(len(options)) for _ in range(4))
    place = {op.name: m for m, op in enumerate(cluster.members)}
    for i, combo in enumerate(options):
        for member, op in enumerate(cluster.members):
            chosen = tuple(joint.options[member] for joint in combo)
            seconds[i] += prices.op_s(op, chosen)
            hide[i] += prices.hide_s(op, chosen)
            if op.role in HOLDERS:
                memory[i] += prices.rest_bytes(op, chosen)
                update[i] += prices.update_s(op, chosen)
            elif op.extra_bytes or op.copies or op.target in INSIDE or any(option.run for option in chosen):
                memory[i] += prices.extra_bytes(op, chosen)
        for name, output in own:
            size = program.bytes_of((name, output))
            memory[i] += prices.local_bytes(size, _lies(combo, place[name], output)) * program.ops[name].count
    return Node(cluster.name, labels, seconds + update, memory, hide, group)


def _lies(combo: Choice, member: int, output: int) -> Layout:
    """How an output of a member lies under one choice."""
    return tuple(joint.options[member].outs[output].value for joint in combo)


def _links(program: Program, home: Mapping[str, tuple[int, int]]) -> list[_Link]:
    """All nets: reads inside a scope, first values and carried values of runs, and reads of a run's result."""
    found: list[_Link] = []
    for ref, readers in program.readers().items():
        outside = [(op, i) for op, i in readers if home[op.name][0] != home[ref[0]][0]]
        for scope in dict.fromkeys(op.scope for op, _ in outside):
            group = [(op, i) for op, i in outside if op.scope == scope]
            found.append(_Link(ref, group, group[0][0].count))
    ops = program.ops
    for run in program.runs.values():
        outer = ops[run.ports[0]].count // run.count
        for port, feed in zip(run.ports, run.feeds, strict=True):
            found.append(_Link(feed, [(ops[port], -1)], outer, "feed"))
        for port, ref in zip(run.ports, run.carried, strict=False):
            if run.count > 1:
                found.append(_Link(ref, [(ops[port], -1)], outer * (run.count - 1), "carry"))
    return found


def _net(link: _Link, program: Program, home: Mapping[str, tuple[int, int]], clusters: list[Cluster],
         choices: list[list[Choice]], keeps: Kept, prices: Prices, scopes: Mapping[str, int]) -> Net:
    ref = link.ref
    producer, member = home[ref[0]]
    rows, row = _distinct([_row(tuple(j.options[member].outs[ref[1]] for j in combo), clusters[producer], combo) for combo in choices[producer]])
    columns: dict[Pair, int] = {}
    uses = []
    again: set[int] = set()  # columns that the backward needs, as the emitter finds them
    first: set[int] = set()  # those that the backward of the first block of a run needs
    saved: set[int] = set()  # columns whose bytes stay until the backward
    for op, operand in link.readers:
        index, position = home[op.name]
        asked = [pair(tuple(_asked(j.options[position], operand) for j in combo)) for combo in choices[index]]
        column = np.array([columns.setdefault(p, len(columns)) for p in asked])
        uses.append(Use(index, column))
        if operand >= 0 and op.needs_again(operand):
            again.update(column.tolist())
        if operand >= 0 and op.needs_again(operand, first=True):
            first.update(column.tolist())
        if (op.name, operand) in keeps.reads:
            saved.update(column.tolist())
    weight = program.is_weight(ref)
    size = program.bytes_of(ref)
    cost = _step_s(link, program, rows, list(columns), prices, again, first)
    fresh, held = prices.made_bytes(rows, list(columns), size)
    if weight:
        # a gathered weight lives only while its block runs, so it counts once, not once per block; one that is not gathered again stays
        memory = held * np.where([c in saved and c not in again for c in range(len(columns))], link.count, 1)
    else:
        stays = np.array([link.way in keeps.moved or c in saved for c in range(len(columns))])
        lies = _owned(link, rows, clusters[producer], choices[producer], row, keeps, prices)
        memory = stays * np.where(fresh, held * link.count, lies[:, None])
    group = scopes[clusters[producer].scope] if weight else -1
    return Net(f"{ref[0]}:{ref[1]}", producer, row, tuple(uses), cost, memory, group, prices.contention if weight else 0.0)


def _step_s(link: _Link, program: Program, rows: Sequence[Pair], columns: Sequence[Pair], prices: Prices, again: set[int],
            first: set[int]) -> np.ndarray:
    """Seconds per step of the reshards of a net; a weight is gathered again for the columns `again`, in the first block of a run of
    blocks for the columns `first`, and a value may have no gradient there."""
    weight, size = program.is_weight(link.ref), program.bytes_of(link.ref)
    late = program.ops[link.ref[0]].late

    def once_s(columns: Sequence[Pair], twice: set[int]) -> np.ndarray:
        return prices.table_s(rows, columns, size, again=[weight and c in twice for c in range(len(columns))], weight=weight)

    found = once_s(columns, again) * link.count
    if late or (weight and again != first):
        spared = once_s(columns, again) - once_s([Pair(c.value, (NO_GRAD,)) for c in columns] if late else columns, first)
        found -= np.where(np.isfinite(found), spared, 0.0) * program.first_runs(link.ref)
    return found


def _owned(link: _Link, rows: Sequence[Pair], producer: Cluster, options: list[Choice], row: np.ndarray, keeps: Kept,
           prices: Prices) -> np.ndarray:
    """Bytes per device of what the net holds where nothing moves, for each of its rows: the owners that it counts."""
    member = {op.name: m for m, op in enumerate(producer.members)}
    found = np.zeros(len(rows))
    for owner, count in keeps.charges.get(link.way, ()):
        size = keeps.program.bytes_of(owner) * (count or link.count)
        if owner == link.ref:
            found += [prices.local_bytes(size, row.value) for row in rows]
        else:  # a view may lie alike where its owner does not: the most that the owner can be
            shares = [prices.local_bytes(size, _lies(combo, member[owner[0]], owner[1])) for combo in options]
            np.maximum.at(most := np.zeros(len(rows)), row, shares)
            found += most
    return found


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
