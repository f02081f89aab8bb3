"""What the backward keeps of the forward: each storage once, however many operators keep a view of it.

Autograd keeps storages, not tensors: a view keeps all of what it looks at, and a value that several operators keep is one value.
So every kept tensor is followed back through views to the value that owns the bytes (its *owner*), across clusters too:

    made inside the cluster that keeps it      the cluster's node counts it (`Kept.own`)
    comes in from another cluster, moved       the net counts the copy that the reshard makes (`Kept.reads`)
    comes in as it lies                        the net counts the owner (`Kept.counted`): one net where several bring it, none where
                                               its cluster keeps it anyway or only looks at what comes in there
    is a view that one operator alone keeps    the net to that operator counts the owner, or the copy of the view (`Kept.behind`)
    where readers ask for several layouts      nets beside it count the bytes alone (problem.kept_bytes)

A block that is run again (problem.rerun) keeps nothing of that but what its plan keeps, as if readers saved it, and one tensor per instance
for each of its placeholders (`Kept.given`).

What a placeholder of a block is given is one tensor per instance: the net to its readers counts it, unless who made it is counted
anyway; then what is fed and carried counts only where it is moved on the way. So it is where a view is fed (a mask for every sample): its
owner, which may be smaller, is counted where it lies as it is. Of a value made in a block and kept by what follows the
run only the last instance is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.rerun import Rerun
from autopar.problem.view_ops import looks

aten = torch.ops.aten
HOLDERS = ("param", "buffer", "constant", "input")
"""Roles of values that are in memory for the whole step, whoever keeps them."""

Edge = tuple[str, int]  # (op name, operand)


@dataclass(frozen=True, slots=True)
class NetKey:
    """A net as `Kept` names it: value, who reads it (a scope, or the port that is fed) and how (edge, feed, carry)."""

    ref: Ref
    reader: str
    kind: str = "edge"


@dataclass(eq=False)
class Kept:
    """What is kept of a program.

    `own`      owners by the cluster (its index) that makes and keeps them
    `reads`    edges between clusters at which kept values come in
    `counted`  owner -> the net that counts it; `last` the same where only what follows a run of blocks keeps it
    `ports`    placeholder of a block -> the net to its readers, where they keep it
    `charges`  net -> what it counts where it moves nothing: (value, how many tensors; 0: as many as the net has)
    `behind`   net of a view -> the owner, made in another cluster, that it counts where it moves nothing
    `keepers`  owner -> how many operands are views of it that are kept
    `moved`    nets that count what they feed or carry where they move it
    `given`    placeholders of blocks that are run again, by cluster: (value, how many tensors)
    """

    program: Program
    home: dict[str, int]
    own: dict[int, list[Ref]] = field(default_factory=dict)
    reads: dict[Edge, None] = field(default_factory=dict)
    counted: dict[Ref, NetKey] = field(default_factory=dict)
    last: dict[Ref, NetKey] = field(default_factory=dict)
    ports: dict[str, NetKey] = field(default_factory=dict)
    charges: dict[NetKey, list[tuple[Ref, int]]] = field(default_factory=dict)
    behind: dict[NetKey, Ref] = field(default_factory=dict)
    keepers: Counter[Ref] = field(default_factory=Counter)
    moved: dict[NetKey, None] = field(default_factory=dict)
    given: dict[int, list[tuple[Ref, int]]] = field(default_factory=dict)
    reruns: Mapping[str, Rerun] = field(default_factory=dict)

    def beside(self, op: Op) -> bool:
        """Whether what the backward of `op` keeps beside tensors of the graph stays until then: not where it is run again."""
        return op.scope not in self.reruns or op.name in self.reruns[op.scope].kept

    def held(self, ref: Ref) -> bool:
        """Whether the bytes of owner `ref` are counted anyway: at rest, or by the cluster that makes it."""
        return self.program.ops[ref[0]].role in HOLDERS or ref in self.own.get(self.home[ref[0]], ())

    def root(self, ref: Ref) -> Ref:
        """The owner of `ref`, across clusters."""
        while (before := _looked_at(self.program.ops[ref[0]])) is not None:
            ref = before
        return ref


def kept(clusters: Sequence[Cluster], program: Program, reruns: Mapping[str, Rerun] | None = None) -> Kept:
    """What the operators of all clusters keep, each storage once, in program order; `reruns` are the scopes that are run again."""
    home = {op.name: index for index, cluster in enumerate(clusters) for op in cluster.members}
    found = Kept(program, home, reruns=reruns or {})
    for op in program.ops.values():
        found.keepers.update(found.root(op.operands[index]) for index in _stays(op, found) if index < len(op.operands))
    for op in program.ops.values():
        for index in _stays(op, found):
            if index >= len(op.operands):
                _keep(found, (op.name, index - len(op.operands)))
            elif home[op.operands[index][0]] == home[op.name]:
                _keep(found, op.operands[index])
            else:
                _come_in(found, (op.name, index))
    for owner, way in found.counted.items():
        _charge(found, owner, way, 0)
    for owner, way in found.last.items():
        if owner not in found.counted:
            _charge(found, owner, way, 0)
    for port, way in found.ports.items():
        _given(found, port, way)
    for scope in found.reruns:
        for port in program.runs[scope].ports:
            _given(found, port, None)
    return found


def _stays(op: Op, found: Kept) -> list[int]:
    """The tensors of `op` (operands, then results) that are there from its forward to its backward."""
    about = found.reruns.get(op.scope)
    if about is None:
        return list(op.saves)
    made = [i for i in op.saves if i >= len(op.operands)] if op.name in about.kept else []
    return [i for i, ref in enumerate(op.operands) if (op.name, i) in about.reads and ref[0] in about.kept] + made


def _keep(found: Kept, ref: Ref) -> None:
    """Note a value that its own cluster keeps."""
    owner, edge = _inside(found, ref)
    if edge is not None:
        _come_in(found, edge)
    elif not found.held(owner):
        found.own.setdefault(found.home[owner[0]], []).append(owner)


def _come_in(found: Kept, edge: Edge) -> None:
    """Note a value that comes in from another cluster and is kept."""
    if edge in found.reads:
        return
    found.reads[edge] = None
    reader = found.program.ops[edge[0]]
    way = NetKey(reader.operands[edge[1]], reader.scope)
    owner, before = _inside(found, way.ref)
    producer = found.program.ops[owner[0]]
    if before is not None and _alone(found, way):
        found.behind[way] = found.root(way.ref)
    elif before is not None:
        _come_in(found, before)
    elif producer.role == "port":
        found.ports.setdefault(producer.name, way)
    else:
        (found.counted if producer.scope == reader.scope else found.last).setdefault(owner, way)


def _alone(found: Kept, way: NetKey) -> bool:
    """Whether a net brings the one view that is kept of what an operator of the same scope makes."""
    root = found.root(way.ref)
    maker = found.program.ops[root[0]]
    return found.keepers[root] == 1 and maker.role == "op" and maker.scope == way.reader and not found.held(root)


def _charge(found: Kept, ref: Ref, way: NetKey, count: int) -> None:
    if not found.held(ref):
        found.charges.setdefault(way, []).append((ref, count))


def _given(found: Kept, port: str, way: NetKey | None) -> None:
    """Share out what a port is given: to the net to its readers (without one to the port itself), or to the nets that bring what is
    counted where it is made."""
    op = found.program.ops[port]
    run = found.program.runs[op.scope]
    index, outer = run.ports.index(port), op.count // run.count

    def charge(count: int) -> None:
        if way is None:
            found.given.setdefault(found.home[port], []).append(((port, 0), count))
        else:
            _charge(found, (port, 0), way, count)

    fed = found.root(run.feeds[index])
    if found.held(fed) or fed in found.counted:
        found.moved[NetKey(run.feeds[index], port, "feed")] = None
    elif fed != run.feeds[index]:
        _looked(found, NetKey(run.feeds[index], port, "feed"), outer)
    else:
        charge(outer)
        found.counted[fed] = way or NetKey((port, 0), port)
    if index >= len(run.carried) or run.count < 2:
        return
    carried = found.root(run.carried[index])
    if found.held(carried) or carried in found.counted:
        found.moved[NetKey(run.carried[index], port, "carry")] = None
    elif carried != (port, 0):
        charge(outer * (run.count - 1))


def _looked(found: Kept, feed: NetKey, count: int) -> None:
    """Count the owner of what is fed, as an expanded mask is smaller than what it looks like; where that is moved on the way, the copy."""
    found.moved[feed], way = None, feed
    owner, before = _inside(found, feed.ref)
    while before is not None:
        found.reads[before] = None
        reader = found.program.ops[before[0]]
        way = NetKey(reader.operands[before[1]], reader.scope)
        owner, before = _inside(found, way.ref)
    _charge(found, owner, way, count)
    found.counted[owner] = way


def _inside(found: Kept, ref: Ref) -> tuple[Ref, Edge | None]:
    """The owner of a value within its cluster, and where it comes in if it is not made there."""
    here = found.home[ref[0]]
    while (before := _looked_at(found.program.ops[ref[0]])) is not None:
        if found.home[before[0]] != here:
            return ref, (ref[0], 0)
        ref = before
    return ref, None


def _looked_at(op: Op) -> Ref | None:
    """What the results of `op` are views of, None where they have memory of their own."""
    return op.operands[0] if looks(op) else None
