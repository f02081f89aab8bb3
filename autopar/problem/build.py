"""Builds the Problem of one mesh from a Program and prices, and decodes its solutions. Called by the planner
and by autopar.joint.

    clusters of Ops become nodes; a node's choices are its joint options, one per axis (product over the axes);
    a value with readers outside its cluster becomes a net; parameters are clusters that never move.

`Model.decode` turns a solution's choice back into one option per Op and axis: the index space of the solver never
leaves this package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.layout import crowded, dim_of, fits, is_shard
from autopar.problem.at_rest import Resting, one_cadence
from autopar.problem.branches import Branches, coordinate_of
from autopar.problem.cluster_members import Choice, Member, members_of
from autopar.problem.clusters import Cluster, Joint
from autopar.problem.graph import HOLDERS, Op, Program, Ref
from autopar.problem.kept_bytes import counted
from autopar.problem.lanes import in_lanes, whole
from autopar.problem.nets import Link, bytes_alone, links_of, net_bytes, node_bytes, passing_bytes, shown, step_s
from autopar.problem.prices import Prices
from autopar.problem.saved import Kept, kept
from autopar.problem.types import Net, Node, Problem
from autopar.rules.algorithms import agree
from autopar.rules.language import Option

Decisions = dict[str, tuple[Option, ...]]  # op name -> option per axis


@dataclass(eq=False)
class Model:
    """A Problem with what its nodes and nets stand for in the graph: `clusters` with their `choices` and `members`, and
    the `links` of the nets, in order. `plain`: the same Problem without rematerialisation, where `problem` has some."""

    problem: Problem
    clusters: list[Cluster]
    choices: list[list[Choice]]
    members: list[list[Member]]
    links: list[Link]
    prices: Prices
    plain: Problem | None = None

    @property
    def shared(self) -> int:
        """The number of nets (the first ones) that do not depend on rematerialisation."""
        return len((self.plain or self.problem).nets)

    @cached_property
    def weights(self) -> dict[Ref, int]:
        """The number of the first net of each weight; a weight that is both read outside of blocks and fed to blocks
        has several."""
        found: dict[Ref, int] = {}
        for index, link in enumerate(self.links):
            if link.weight:
                found.setdefault(link.ref, index)
        return found

    @property
    def plainly(self) -> Model:
        """The same without rematerialisation."""
        return (
            self
            if self.plain is None
            else replace(self, problem=self.plain, links=self.links[: self.shared], plain=None)
        )

    def with_limit(self, limit_bytes: float) -> Model:
        """The same with another memory limit."""
        return (
            self
            if limit_bytes == self.problem.memory_limit_bytes
            else replace(self, problem=self.problem.with_limit(limit_bytes))
        )

    def called(self, name: str, limit_bytes: float) -> Model:
        """The same with another name and another memory limit."""
        plain = None if self.plain is None else self.plain.with_limit(limit_bytes, name)
        return replace(self, problem=self.problem.with_limit(limit_bytes, name), plain=plain)

    def without(self, barred: Mapping[int, np.ndarray]) -> Model:
        """The same, in which choices that are `barred` (bool [choices], by cluster) cost infinitely many seconds."""
        nodes = tuple(
            replace(node, cost_s=np.where(barred[index], np.inf, node.cost_s)) if index in barred else node
            for index, node in enumerate(self.problem.nodes)
        )
        return replace(self, problem=replace(self.problem, nodes=nodes)) if barred else self

    def update_s(self, index: int, choice: int) -> float:
        """The part of `cost_s` of cluster `index` under `choice` that is the update of a parameter: the optimizer's
        step, or the accumulation of gradients. 0 for clusters without a parameter."""
        op = self.clusters[index].members[0]
        return (
            self.prices.update_s(op, tuple([joint.options[0] for joint in self.choices[index][choice]]))
            if op.role == "param"
            else 0.0
        )

    @cached_property
    def updates_s(self) -> list[np.ndarray]:
        """`update_s` of all choices of each cluster."""
        return [
            first.each(self.prices.update_s) if first.op.role == "param" else np.zeros(len(first.at))
            for first, *_ in self.members
        ]

    def decode(self, choice: Sequence[int]) -> Decisions:
        """One option per Op and axis."""
        found: Decisions = {}
        for cluster, options, index in zip(self.clusters, self.choices, choice, strict=True):
            for member, op in enumerate(cluster.members):
                found[op.name] = tuple(joint.options[member] for joint in options[index])
        return found


@dataclass(eq=False)
class Frame:
    """A Problem without its prices: the choices of each cluster on a mesh, and the values that clusters read of each
    other."""

    program: Program
    clusters: list[Cluster]
    choices: list[list[Choice]]
    members: list[list[Member]]
    links: list[Link]
    keeps: Kept
    branches: Branches

    @staticmethod
    def of(
        program: Program,
        clusters: list[Cluster],
        joints: Sequence[Sequence[Sequence[Joint]]],
        sizes: tuple[int, ...],
        branches: Branches | None = None,
    ) -> Frame:
        """`joints[axis][cluster]` are the options of a cluster on an axis, `sizes` the ranks of each; `branches` may
        work side by side.

        Raises InfeasibleError when predicates and sizes leave some cluster without a choice.
        """
        choices = [_choices(c, per_axis, sizes) for c, *per_axis in zip(clusters, *joints, strict=True)]
        members = [members_of(cluster, options) for cluster, options in zip(clusters, choices, strict=True)]
        keeps = kept(clusters, program)
        return Frame(
            program,
            clusters,
            choices,
            members,
            counted(links_of(program, clusters, members), keeps),
            keeps,
            branches or Branches(),
        )

    def priced(self, prices: Prices, memory_limit_bytes: float, name: str = "") -> Model:
        """The Problem with the numbers of `prices`."""
        clusters, choices = self.clusters, self.choices
        scopes = {scope: i for i, scope in enumerate(dict.fromkeys(c.scope for c in clusters))}
        nodes = tuple(_node(self, index, prices, scopes[cluster.scope]) for index, cluster in enumerate(clusters))
        nodes, lanes = in_lanes(nodes, clusters, choices, self.branches)
        nets = tuple(
            whole(
                _net(link, self.keeps, prices, scopes[clusters[link.producer].scope]), clusters, choices, self.branches
            )
            if link.moves
            else bytes_alone(link, self.keeps, prices)
            for link in self.links
        )
        return Model(
            Problem(nodes, nets, len(scopes), memory_limit_bytes, name, lanes),
            clusters,
            choices,
            self.members,
            self.links,
            prices,
        )


def rested(model: Model, prices: Prices) -> Model:
    """`model` with the memory and the updates of parameters as `prices` has them, which are for the same mesh and other
    settings of offloading; all else is unchanged."""
    program = model.links[0].program
    keeps = kept(model.clusters, program)
    frame = Frame(program, model.clusters, model.choices, model.members, model.links, keeps, Branches())
    nodes = {
        index: _node(frame, index, prices, node.group)
        for index, (cluster, node) in enumerate(zip(model.clusters, model.problem.nodes, strict=True))
        if cluster.members[0].role == "param"
    }

    def with_parameters(problem: Problem) -> Problem:
        return replace(
            problem,
            nodes=tuple(
                replace(node, cost_s=nodes[i].cost_s, memory_bytes=nodes[i].memory_bytes) if i in nodes else node
                for i, node in enumerate(problem.nodes)
            ),
        )

    return replace(
        model,
        problem=with_parameters(model.problem),
        plain=None if model.plain is None else with_parameters(model.plain),
        prices=prices,
    )


def build(
    program: Program,
    clusters: list[Cluster],
    joints: Sequence[Sequence[Sequence[Joint]]],
    prices: Prices,
    memory_limit_bytes: float,
    name: str = "",
    branches: Branches | None = None,
) -> Model:
    """The Problem of one mesh; arguments as `Frame.of` and `Frame.priced` have them.

    Raises InfeasibleError when predicates and sizes leave some cluster without a choice.
    """
    return Frame.of(program, clusters, joints, prices.sizes, branches).priced(prices, memory_limit_bytes, name)


def _choices(cluster: Cluster, per_axis: Sequence[Sequence[Joint]], sizes: tuple[int, ...]) -> list[Choice]:
    """The combinations of joint options, one per axis, that a cluster can have on a mesh of these sizes. Raises
    InfeasibleError where there are none."""
    found = [
        combo
        for combo, fits_anyway in zip(itertools.product(*per_axis), _surely_fit(cluster, per_axis), strict=True)
        if _placements(combo) < 2 and (fits_anyway or fits_together(cluster, combo, sizes))
    ]
    if not found:
        op = cluster.root
        raise InfeasibleError(
            f"{op.name} ({op.target} at {op.where}) has no option left on a mesh of {sizes}: the recipe's "
            f"predicates or the sizes {[t.sizes for t in op.tensors]} exclude all of them"
        )
    return found


def _surely_fit(cluster: Cluster, per_axis: Sequence[Sequence[Joint]]) -> list[bool]:
    """For every combination of joint options, one per axis, whether `fits_together` need not be asked, since the answer
    is yes: none of them uses a runtime algorithm, and no two axes cut the same dim of a tensor. Always False for
    clusters with a parameter."""
    if any(op.role == "param" for op in cluster.members) or not all(per_axis):
        return [False] * math.prod(map(len, per_axis))
    cuts = [np.array([_cut_dims(joint) for joint in joints]) for joints in per_axis]
    runs = [np.array([any(option.run for option in joint.options) for joint in joints]) for joints in per_axis]
    shape, axes = tuple(map(len, per_axis)), range(len(per_axis))
    surely = np.ones(shape, bool)
    for a in axes:
        surely &= ~np.expand_dims(runs[a], [other for other in axes if other != a])
        for b in range(a):
            same_dim = ((cuts[a][None] == cuts[b][:, None]) & (cuts[a] >= 0)[None]).any(-1)  # [of b, of a]
            surely &= ~np.expand_dims(same_dim, [other for other in axes if other not in (a, b)])
    return [bool(each) for each in surely.ravel()]


def _cut_dims(joint: Joint) -> list[int]:
    """For each tensor of each member, the dim that the joint option cuts; -1 for none."""
    return [
        dim_of(use.value) if is_shard(use.value) else -1
        for option in joint.options
        for use in (*option.ins, *option.outs)
    ]


def _placements(combo: Choice) -> int:
    """On how many axes a choice is an operator placement."""
    return sum(coordinate_of(joint.options[-1]) is not None for joint in combo)


def fits_together(cluster: Cluster, combo: Choice, sizes: tuple[int, ...]) -> bool:
    """Whether all axes together can cut every tensor (dims cut by several axes divide evenly) and run every
    algorithm."""
    if len(combo) == 1:
        return True
    for member, op in enumerate(cluster.members):
        options = [joint.options[member] for joint in combo]
        if op.role == "param" and not _can_rest(op, options, sizes):
            return False
        if op.role == "op" and not agree(options):
            return False
        uses = [(*option.ins, *option.outs) for option in options]
        for index, tensor in enumerate(op.tensors):
            layout = tuple([each[index].value for each in uses])
            shared = crowded(layout)
            if shared and not fits(tensor.sizes, layout, sizes, shared):
                return False
    return True


def _can_rest(op: Op, options: Sequence[Option], sizes: tuple[int, ...]) -> bool:
    """Whether a parameter can be cut at rest as all axes together say (dims that several cut divide evenly)."""
    lies, shape = Resting.of(options), op.call.outs[0].sizes
    return one_cadence(options) and (not lies.gathered or fits(shape, lies.rest, sizes, crowded(lies.rest)))


def _labels(options: Sequence[Choice]) -> tuple[str, ...]:
    """The name of each choice: the factor that its last member splits on each axis, - for none."""
    return tuple([",".join([joint.options[-1].factor or "-" for joint in combo]) for combo in options])


def _node(frame: Frame, index: int, prices: Prices, group: int) -> Node:
    """The node of cluster number `index`, in overlap group `group`: seconds and bytes of each choice."""
    members, labels = frame.members[index], _labels(frame.choices[index])
    seconds, hide = (np.zeros(len(labels)) for _ in range(2))
    for member in members:
        op = member.op
        if op.role in HOLDERS:
            seconds += member.each(prices.update_s)
        elif not op.free or any(member.runs):
            wanted = member.runs if op.free else None
            work_s, under_s = member.both(prices.work_s, wanted)
            seconds += work_s
            hide += under_s
    held, live = node_bytes(index, members, frame.keeps, prices), passing_bytes(members, prices)
    nbytes = held if live is None else held + live
    return Node(frame.clusters[index].name, labels, seconds, nbytes, hide, group, live_bytes=live)


def _net(link: Link, keeps: Kept, prices: Prices, group: int) -> Net:
    """The net of a link: seconds and bytes of each pair of a row and a column."""
    again, first = (
        link.asked_by(lambda op, i: op.needs_again(i)),
        link.asked_by(lambda op, i: op.needs_again(i, first=True)),
    )
    cost = step_s(link, prices, again, first)
    name = f"{link.ref[0]}:{link.ref[1]}"
    if prices.late and prices.overlap == 0.0:
        return Net(name, link.producer, link.row, link.uses, cost, np.zeros_like(cost))
    times = prices.again(link.rows, link.columns, [c in again for c in range(len(link.columns))])
    return Net(
        name,
        link.producer,
        link.row,
        link.uses,
        cost,
        np.zeros_like(cost) if prices.late else net_bytes(link, keeps, prices, again),
        group if link.weight else -1,
        shown(link, prices, cost, times),
    )
