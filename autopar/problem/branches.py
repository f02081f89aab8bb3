"""Independent branches: parts of a program that may work side by side, each on one coordinate of a mesh axis (`O(c)`).

A branch is everything that flows into the rest of the program through one cluster alone: a subtree of the
post-dominator tree. Two branches under the same join with no path between them are independent. Offered are branches
with two or more dense operators (one alone is better split), in the top-level graph or as whole runs of blocks; a
*region* is a set of such branches.

A branch is placed whole or not at all. Inside it values lie on its coordinate (`O1|O1`); what comes in from outside is
there on all ranks and gets partial gradients (`R|P`), so that all branches share one sum of them; weights that only one
branch reads may rest on its coordinate alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import networkx as nx

from autopar.layout import NO_GRAD
from autopar.problem.clusters import Cluster
from autopar.problem.graph import HOLDERS, Op, Program, Ref
from autopar.rules.language import Option, Tensor, Use

LEAST_DENSE = 2  # dense operators that a branch must have
_EXIT = -1  # in the graph of clusters: what every cluster leads to


@dataclass(frozen=True, slots=True)
class Branch:
    """The `index`th largest branch of region `region`."""

    region: int
    index: int


@dataclass(eq=False)
class Branches:
    """The branch of every Op that belongs to one, weights that only it reads included."""

    of: dict[str, Branch] = field(default_factory=dict)

    def options(self, op: Op, ways: int) -> list[Option]:
        """The placements of `op` on an axis of `ways` ranks, `O(0)` first. All coordinates are equivalent, so the
        largest branch is offered the first one only, the next branch the first two, and so on."""
        branch = self.of.get(op.name)
        if branch is None or ways < 2:
            return []
        return [self._option(op, branch, c) for c in range(min(ways, branch.index + 1))]

    def beside(self, name: str) -> int:
        """How many branches may work side by side where the Op `name` is: 1 where it is in none."""
        branch = self.of.get(name)
        return 1 if branch is None else self._counts[branch.region]

    @cached_property
    def _counts(self) -> Counter[int]:
        """The number of branches of each region."""
        return Counter(branch.region for branch in set(self.of.values()))

    def _option(self, op: Op, branch: Branch, coordinate: int) -> Option:
        """`op`, an operator of `branch`, on one coordinate: operands from inside of the branch are there, those from
        outside are on all ranks and get partial gradients."""
        entry = f"O{coordinate}"

        def use(tensor: Tensor, value: str, grad: str) -> Use:
            return Use(value, grad if tensor.grad and op.graded else NO_GRAD)

        if op.role == "port":
            ins = tuple(use(t, entry, entry) for t in op.call.ins)
        else:
            ins = tuple(
                use(t, entry, entry) if self.of.get(ref[0]) == branch else use(t, "R", "P")
                for ref, t in zip(op.operands, op.call.ins, strict=op.role == "op")
            )
        return Option(f"O({coordinate})", ins, tuple(use(t, entry, entry) for t in op.call.outs))


def coordinate_of(option: Option) -> int | None:
    """The coordinate that a placement names, None for any other option."""
    return int(option.factor[2:-1]) if option.factor.startswith("O(") else None


def find(program: Program, clusters: Sequence[Cluster]) -> Branches:
    """The independent branches of a program whose Ops are grouped into `clusters`."""
    graph = _graph(program, clusters)
    inner: dict[int, int] = nx.immediate_dominators(graph.reverse(copy=False), _EXIT)
    under: dict[int, list[int]] = {}
    for index in range(len(clusters)):  # program order: every rank finds the same
        if index in inner:
            under.setdefault(inner[index], []).append(index)
    found = Branches()
    pending, regions = [_EXIT], 0
    while pending:
        join = pending.pop()
        heads = under.get(join, [])
        chosen = (
            _independent(program, graph, clusters, heads, under) if join == _EXIT or clusters[join].scope == "" else []
        )
        if len(chosen) > 1:
            for index, members in enumerate(chosen):
                found.of.update({op.name: Branch(regions, index) for m in members for op in clusters[m].members})
            regions += 1
        pending += [h for h in reversed(heads) if not any(h in members for members in chosen) or len(chosen) < 2]
    _weights(found, program, clusters)
    return found


def _graph(program: Program, clusters: Sequence[Cluster]) -> nx.DiGraph:
    """The graph of clusters that compute: an edge where one reads a value of another, and from each that none reads to
    the node _EXIT. Clusters of values at rest (parameters, buffers, inputs) are left out."""
    home = {op.name: i for i, c in enumerate(clusters) for op in c.members}
    moving = [i for i, c in enumerate(clusters) if c.members[0].role not in HOLDERS]
    graph = nx.DiGraph()
    graph.add_nodes_from([*moving, _EXIT])
    reads = [(ref, op.name) for op in program.ops.values() for ref in op.operands]
    reads += [(feed, port) for run in program.runs.values() for port, feed in zip(run.ports, run.feeds, strict=True)]
    for ref, name in reads:
        source, target = home[ref[0]], home[name]
        if source != target and source in graph and target in graph:
            graph.add_edge(source, target)
    graph.add_edges_from([(i, _EXIT) for i in moving if not graph.out_degree(i)])
    return graph


def _independent(
    program: Program,
    graph: nx.DiGraph,
    clusters: Sequence[Cluster],
    heads: Sequence[int],
    under: Mapping[int, Sequence[int]],
) -> list[list[int]]:
    """The branches whose last clusters are `heads`, largest first, that can be placed and have no path between them.
    `under`: the children of each cluster in the post-dominator tree."""
    branches = [(h, members) for h in heads if _placeable(members := _subtree(h, under), clusters, program)]
    branches.sort(key=lambda b: (-_work(b[1], clusters), b[0]))
    chosen: list[list[int]] = []
    taken: list[int] = []
    for head, members in branches:
        reached = nx.descendants(graph, head)
        if not any(t in reached or head in nx.descendants(graph, t) for t in taken):
            chosen.append(members)
            taken.append(head)
    return chosen


def _subtree(head: int, under: Mapping[int, Sequence[int]]) -> list[int]:
    """All clusters under `head` in the post-dominator tree, itself included."""
    found, pending = [], [head]
    while pending:
        index = pending.pop()
        found.append(index)
        pending += under.get(index, [])
    return sorted(found)


def _placeable(members: Sequence[int], clusters: Sequence[Cluster], program: Program) -> bool:
    """Whether all of a branch can be placed: dense enough, no scalars, whole runs of blocks. A run may not start at a
    value from outside that gets a gradient: its first block would sum it alone, and the branches would wait for each
    other there."""
    ops = [op for m in members for op in clusters[m].members]
    if any(op.role not in ("op", "port") or not all(t.shape for t in op.call.outs) for op in ops):
        return False
    scopes = dict.fromkeys(op.scope for op in ops if op.scope)
    if any(c.scope in scopes and c.members[0].role not in HOLDERS and i not in members for i, c in enumerate(clusters)):
        return False  # half of a block
    names = dict.fromkeys(op.name for op in ops)
    for run in (program.runs[scope] for scope in scopes):
        if any(ref[0] not in names and program.ops[ref[0]].call.outs[ref[1]].grad for ref in run.feeds):
            return False
    return sum(op.count for op in ops if op.flops > 0 and any(op.weight)) >= LEAST_DENSE


def _work(members: Sequence[int], clusters: Sequence[Cluster]) -> float:
    """FLOPs and bytes together: only the order of branches follows from it."""
    return sum((op.flops + op.bytes) * op.count for m in members for op in clusters[m].members)


def _weights(found: Branches, program: Program, clusters: Sequence[Cluster]) -> None:
    """Adds the parameters that one branch alone reads, and their casts."""
    readers: dict[Ref, list[tuple[Op, int]]] = program.readers
    for cluster in clusters:
        if cluster.members[0].role != "param" or not all(op.call.outs[0].shape for op in cluster.members):
            continue
        own = [op.name for op in cluster.members]
        reading = [found.of.get(r.name) for name in own for r, _ in readers.get((name, 0), []) if r.name not in own]
        if reading and reading[0] is not None and all(b == reading[0] for b in reading):
            found.of.update(dict.fromkeys(own, reading[0]))
