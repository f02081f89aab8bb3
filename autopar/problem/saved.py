"""What the backward keeps of the forward, and which node or net of the Problem counts its bytes: each storage once,
however many views of it are kept.

Autograd keeps storages, not tensors: a view keeps all of the storage that it is a view of, and a value that several
operators keep is one storage. So every kept tensor is traced back through views to the value that allocates the storage
(its *owner*), across clusters too. Its bytes are counted by

    made in the cluster that keeps it             the node of that cluster (`Kept.own`)
    read from another cluster, with a reshard     the net, for the copy that the reshard makes (`Kept.reads`)
    read from another cluster, without one        the net, for the owner (`Kept.counted`): one net where several bring
                                                  it; none where the node of the owner's cluster counts it anyway, or
                                                  where it comes into that cluster as a view itself
    the only kept view of its owner               the net to the one operator that keeps it, for the owner or for the
                                                  copy of the view (`Kept.behind`)
    asked for in several layouts                  further nets that count bytes alone (problem.kept_bytes)

A block that is run again (problem.rerun) keeps the results that its plan keeps, as if their readers saved them, and one
tensor per instance for each of its ports (`Kept.given`).

A port of a block has one tensor per instance. The net from the port to its readers counts all of them, unless the owner
of what is fed or carried is counted anyway; then the nets that feed and carry count a copy where they make one. Where a
view is fed (a mask expanded to all samples), its owner, which may be smaller, is counted. A value made in a block and
kept by an operator behind the run is there once, from the last instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.problem.clusters import Cluster
from autopar.problem.graph import HOLDERS, Op, Program, Ref
from autopar.problem.rerun import Rerun
from autopar.problem.view_ops import makes_view

Edge = tuple[str, int]  # (op name, operand)


@dataclass(frozen=True, slots=True)
class NetKey:
    """Key of a net: the value `ref`, its `reader` (a scope, or the name of the port that is fed) and its `kind` (edge,
    feed, carry)."""

    ref: Ref
    reader: str
    kind: str = "edge"


@dataclass(eq=False)
class Kept:
    """What the backward of a program keeps, and what counts it.

    home      op -> the index of its cluster
    own       index of a cluster -> the owners that it makes and keeps
    reads     operands read from another cluster that are kept
    counted   owner -> the net that counts it; `last`: the same for a value of a block that only operators behind
              the run keep
    ports     port of a block -> the net to its readers, where these keep it
    charges   net -> (value, number of tensors; 0: the `count` of the net) that it counts where it has no reshard
    behind    net of a view -> the owner, made in another cluster, that it counts where it has no reshard
    keepers   owner -> the number of kept operands that are views of it
    moved     nets that count the copy of what they feed or carry where they have a reshard
    given     index of a cluster -> (port, number of tensors) that it counts, of blocks that are run again
    reruns    scope of each run of blocks that is run again -> what of it is
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
        """Whether what `op` keeps apart from tensors of the graph (masks, statistics) stays until the backward: not
        where `op` runs again."""
        return op.scope not in self.reruns or op.name in self.reruns[op.scope].kept

    def held(self, ref: Ref) -> bool:
        """Whether the bytes of owner `ref` are counted by a node: it rests, or its own cluster keeps it."""
        return self.program.ops[ref[0]].role in HOLDERS or ref in self.own.get(self.home[ref[0]], ())

    def owner(self, ref: Ref) -> Ref:
        """The value that allocates the storage of `ref`, traced across clusters."""
        while (before := _viewed(self.program.ops[ref[0]])) is not None:
            ref = before
        return ref


def kept(clusters: Sequence[Cluster], program: Program, reruns: Mapping[str, Rerun] | None = None) -> Kept:
    """What the operators of all `clusters` keep, each storage once. `reruns`: the runs of blocks that are run again, by
    scope."""
    home = {op.name: index for index, cluster in enumerate(clusters) for op in cluster.members}
    found = Kept(program, home, reruns=reruns or {})
    for op in program.ops.values():
        found.keepers.update(
            found.owner(op.operands[index]) for index in _kept_tensors(op, found) if index < len(op.operands)
        )
    for op in program.ops.values():
        for index in _kept_tensors(op, found):
            if index >= len(op.operands):
                _note_kept(found, (op.name, index - len(op.operands)))
            elif home[op.operands[index][0]] == home[op.name]:
                _note_kept(found, op.operands[index])
            else:
                _note_read(found, (op.name, index))
    for owner, net in found.counted.items():
        _charge(found, owner, net, 0)
    for owner, net in found.last.items():
        if owner not in found.counted:
            _charge(found, owner, net, 0)
    for port, net in found.ports.items():
        _charge_port(found, port, net)
    for scope in found.reruns:
        for port in program.runs[scope].ports:
            _charge_port(found, port, None)
    return found


def _kept_tensors(op: Op, found: Kept) -> list[int]:
    """The numbers of the tensors of `op` (operands, then results) that are kept from its forward to its backward."""
    again = found.reruns.get(op.scope)
    if again is None:
        return list(op.saves)
    made = [i for i in op.saves if i >= len(op.operands)] if op.name in again.kept else []
    return [i for i, ref in enumerate(op.operands) if (op.name, i) in again.reads and ref[0] in again.kept] + made


def _note_kept(found: Kept, ref: Ref) -> None:
    """Record that an operator of the cluster that makes `ref` keeps it."""
    owner, edge = _owner_in_cluster(found, ref)
    if edge is not None:
        _note_read(found, edge)
    elif not found.held(owner):
        found.own.setdefault(found.home[owner[0]], []).append(owner)


def _note_read(found: Kept, edge: Edge) -> None:
    """Record that an operator keeps an operand that it reads from another cluster."""
    if edge in found.reads:
        return
    found.reads[edge] = None
    net = _net_of(found, edge)
    owner, before = _owner_in_cluster(found, net.ref)
    producer = found.program.ops[owner[0]]
    if before is not None and _is_only_view(found, net):
        found.behind[net] = found.owner(net.ref)
    elif before is not None:
        _note_read(found, before)
    elif producer.role == "port":
        found.ports.setdefault(producer.name, net)
    else:
        (found.counted if producer.scope == net.reader else found.last).setdefault(owner, net)


def _is_only_view(found: Kept, net: NetKey) -> bool:
    """Whether a net brings a view, the only one that is kept, of what an operator of the same scope makes."""
    owner = found.owner(net.ref)
    maker = found.program.ops[owner[0]]
    return found.keepers[owner] == 1 and maker.role == "op" and maker.scope == net.reader and not found.held(owner)


def _charge(found: Kept, ref: Ref, net: NetKey, count: int) -> None:
    """Let a net count `count` tensors of `ref`, unless a node counts it."""
    if not found.held(ref):
        found.charges.setdefault(net, []).append((ref, count))


def _charge_port(found: Kept, port: str, net: NetKey | None) -> None:
    """Let `net`, from a port to its readers (None: the node of the port), count what the port gets; or the nets that
    feed and carry it, where the owner of that is counted anyway."""
    op = found.program.ops[port]
    run = found.program.runs[op.scope]
    index, outer = run.ports.index(port), op.count // run.count

    def charge(count: int) -> None:
        if net is None:
            found.given.setdefault(found.home[port], []).append(((port, 0), count))
        else:
            _charge(found, (port, 0), net, count)

    fed = found.owner(run.feeds[index])
    if found.held(fed) or fed in found.counted:
        found.moved[NetKey(run.feeds[index], port, "feed")] = None
    elif fed != run.feeds[index]:
        _charge_fed_view(found, NetKey(run.feeds[index], port, "feed"), outer)
    else:
        charge(outer)
        found.counted[fed] = net or NetKey((port, 0), port)
    if index >= len(run.carried) or run.count < 2:
        return
    carried = found.owner(run.carried[index])
    if found.held(carried) or carried in found.counted:
        found.moved[NetKey(run.carried[index], port, "carry")] = None
    elif carried != (port, 0):
        charge(outer * (run.count - 1))


def _charge_fed_view(found: Kept, feed: NetKey, count: int) -> None:
    """Let the net `feed`, which feeds a view, count the owner, which may be smaller (an expanded mask); or the copy,
    where there is a reshard on the way."""
    found.moved[feed], net = None, feed
    owner, before = _owner_in_cluster(found, feed.ref)
    while before is not None:
        found.reads[before] = None
        net = _net_of(found, before)
        owner, before = _owner_in_cluster(found, net.ref)
    _charge(found, owner, net, count)
    found.counted[owner] = net


def _net_of(found: Kept, edge: Edge) -> NetKey:
    """The net of the operand at `edge`."""
    reader = found.program.ops[edge[0]]
    return NetKey(reader.operands[edge[1]], reader.scope)


def _owner_in_cluster(found: Kept, ref: Ref) -> tuple[Ref, Edge | None]:
    """A value traced back through views as far as its own cluster goes, and the operand at which it comes into that
    cluster; None where it is made there."""
    here = found.home[ref[0]]
    while (before := _viewed(found.program.ops[ref[0]])) is not None:
        if found.home[before[0]] != here:
            return ref, (ref[0], 0)
        ref = before
    return ref, None


def _viewed(op: Op) -> Ref | None:
    """The operand that the results of `op` are views of; None where they have storages of their own."""
    return op.operands[0] if makes_view(op) else None
