"""What the backward keeps of the forward: each storage once, however many operators keep a view of it.

Autograd keeps storages, not tensors: a view keeps all of what it looks at, and a value that several operators keep is one value.
So every kept tensor is followed back through views to the value that owns the bytes (its *owner*), across clusters too:

    made inside the cluster that keeps it      the cluster's node counts it (`Kept.own`)
    comes in from another cluster, moved       the net counts the copy that the reshard makes (`Kept.reads`)
    comes in as it lies                        the net counts the owner (`Kept.counted`): one net where several bring it, none where
                                               its cluster keeps it anyway or only looks at what comes in there

What a placeholder of a block is given is one tensor per instance: the net to its readers counts it, unless who made it is counted
anyway; then what is fed and carried counts only where it is moved on the way. Of a value made in a block and kept by what follows the
run only the last instance is there.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.problem.clusters import Cluster
from autopar.problem.graph import Op, Program, Ref
from passes import facts
from passes.annotate_memory import is_view

aten = torch.ops.aten
HOLDERS = ("param", "buffer", "constant", "input")
"""Roles of values that are in memory for the whole step, whoever keeps them."""

Edge = tuple[str, int]  # (op name, operand)


@dataclass(frozen=True, slots=True)
class Way:
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
    `moved`    nets that count what they feed or carry where they move it
    """

    program: Program
    home: dict[str, int]
    own: dict[int, list[Ref]] = field(default_factory=dict)
    reads: dict[Edge, None] = field(default_factory=dict)
    counted: dict[Ref, Way] = field(default_factory=dict)
    last: dict[Ref, Way] = field(default_factory=dict)
    ports: dict[str, Way] = field(default_factory=dict)
    charges: dict[Way, list[tuple[Ref, int]]] = field(default_factory=dict)
    moved: dict[Way, None] = field(default_factory=dict)

    def held(self, ref: Ref) -> bool:
        """Whether the bytes of owner `ref` are counted anyway: at rest, or by the cluster that makes it."""
        return self.program.ops[ref[0]].role in HOLDERS or ref in self.own.get(self.home[ref[0]], ())

    def root(self, ref: Ref) -> Ref:
        """The owner of `ref`, across clusters."""
        while (before := _looked_at(self.program.ops[ref[0]])) is not None:
            ref = before
        return ref


def kept(clusters: Sequence[Cluster], program: Program) -> Kept:
    """What the operators of all clusters keep, each storage once, in program order."""
    home = {op.name: index for index, cluster in enumerate(clusters) for op in cluster.members}
    found = Kept(program, home)
    for op in program.ops.values():
        for index in op.saves:
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
    return found


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
    way = Way(reader.operands[edge[1]], reader.scope)
    owner, before = _inside(found, way.ref)
    producer = found.program.ops[owner[0]]
    if before is not None:
        _come_in(found, before)
    elif producer.role == "port":
        found.ports.setdefault(producer.name, way)
    else:
        (found.counted if producer.scope == reader.scope else found.last).setdefault(owner, way)


def _charge(found: Kept, ref: Ref, way: Way, count: int) -> None:
    if not found.held(ref):
        found.charges.setdefault(way, []).append((ref, count))


def _given(found: Kept, port: str, way: Way) -> None:
    """Share out what a port is given: to the net to its readers, or to the nets that bring what is counted where it is made."""
    op = found.program.ops[port]
    run = found.program.runs[op.scope]
    index, outer = run.ports.index(port), op.count // run.count
    fed = found.root(run.feeds[index])
    if found.held(fed) or fed in found.counted:
        found.moved[Way(run.feeds[index], port, "feed")] = None
    else:
        _charge(found, (port, 0), way, outer)
        found.counted[fed] = way
    if index >= len(run.carried) or run.count < 2:
        return
    carried = found.root(run.carried[index])
    if found.held(carried) or carried in found.counted:
        found.moved[Way(run.carried[index], port, "carry")] = None
    elif carried != (port, 0):
        _charge(found, (port, 0), way, outer * (run.count - 1))


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


def looks(op: Op) -> bool:
    """Whether the results of `op` are views of its first operand."""
    return op.role == "op" and bool(op.operands) and op.node.target is not operator.getitem and (is_view(op.node) or _joins_heads(op.node))


def _joins_heads(node: fx.Node) -> bool:
    """Whether `node` joins the heads of an attention's result without a copy.

    The fused kernels write their result in the order of the query's memory (`empty_like`), which graphs traced without a
    device do not show: for a query laid out [b, s, h, d] the transposed result is contiguous.
    """
    turned = node.args[0] if node.target is aten.reshape.default else None
    made = turned.args[0] if isinstance(turned, fx.Node) and turned.target is aten.transpose.int else None
    if not isinstance(made, fx.Node) or made.target is not aten.scaled_dot_product_attention.default:
        return False
    (query,) = facts.tensors(made.args[0]) if isinstance(made.args[0], fx.Node) else (None,)
    head, row = query.stride()[1:3] if query is not None and query.dim() == 4 else (0, 0)
    return isinstance(head, int) and isinstance(row, int) and head < row
