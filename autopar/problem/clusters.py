"""Clusters: groups of Ops that share one choice, so that the Problem has few nodes.

An elementwise Op (pointwise, view, cast) can take any layout, and a reshard costs the same before it as after it. So it
joins the cluster of its readers where they are all in one. An operator that needs some dim whole (a norm, a softmax, a
sum) joins only clusters without a contraction: a reshard between the two is what sequence parallelism does, and must
stay possible. A contraction starts a cluster of its own, which operators that lead into it may join.
Nothing joins the cluster of readers that put it together with itself (`z @ z.T`, `z[:, None] - z`, all pairs of
samples): one of the two is cut where the other is whole.

The options of a cluster on one axis (`Joint`) are the combinations of its members' options that agree on all edges
inside the cluster, where there is never a reshard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.layout import NO_GRAD, dim_of, is_shard
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op, Program, Ref
from autopar.rules.language import Option, Use
from autopar.rules.tiles import tiles

UNSQUEEZE = torch.ops.aten.unsqueeze.default
Allow = Callable[[Op, Option], bool]
Table = Mapping[str, Sequence[Option]]  # op name -> options on one axis


@dataclass(eq=False, slots=True)
class Cluster:
    """Ops that share one choice: `members` in execution order, of which the last (the root) makes what other clusters
    read.

    In the cluster of a parameter that is the first member, followed by its casts and transposes. All inputs are one
    cluster, so that all are split along the same axes and a rank has one local batch.
    """

    name: str
    members: list[Op]
    anchor: bool  # contains a contraction, or is no operator: nothing that needs whole dims may join

    @property
    def root(self) -> Op:
        return self.members[-1]

    @property
    def scope(self) -> str:
        return self.root.scope


@dataclass(frozen=True, slots=True)
class Joint:
    """One option of a cluster on one axis: an option per member, in member order."""

    options: tuple[Option, ...]


def build(program: Program, table: Table) -> list[Cluster]:
    """The clusters of a program in execution order. `table`: the options of each Op on one axis, of any size, since
    only their uses count."""
    home: dict[str, Cluster] = {}
    for op in reversed(list(program.ops.values())):
        cluster = _target(op, program, home, table)
        if cluster is None and op.role == "input":
            cluster = next((c for c in home.values() if c.root.role == "input"), None)
        if cluster is None:
            cluster = Cluster(op.name, [], anchor=op.role != "op" or _is_anchor(op, table[op.name]))
        cluster.members.insert(0, op)
        home[op.name] = cluster
    _follow_parameters(program, home, table)
    found: dict[str, Cluster] = {}
    for op in program.ops.values():
        found.setdefault(home[op.name].name, home[op.name])
    return list(found.values())


def _target(op: Op, program: Program, home: Mapping[str, Cluster], table: Table) -> Cluster | None:
    """The cluster that `op` joins, or None when it starts one."""
    if op.role != "op" or all(op.weight) or _is_anchor(op, table[op.name]):
        return None
    readers, refs = program.readers, [(op.name, i) for i in range(len(op.call.outs))]
    if any(ref in program.given_on for ref in refs):
        return None
    homes = {home[reader.name].name: home[reader.name] for ref in refs for reader, _ in readers.get(ref, ())}
    if len(homes) != 1:
        return None
    (cluster,) = homes.values()
    if _paired([read for ref in refs for read in readers.get(ref, ())], table):
        return None
    if (
        cluster.root.role != "op"
        or cluster.scope != op.scope
        or (_sums(table[op.name]) and not _hands_on_partial_sums(refs, cluster, readers, table))
    ):
        return None
    return cluster if not cluster.anchor or passes_through(op, table[op.name]) else None


def _paired(reads: Sequence[tuple[Op, int]], table: Table) -> bool:
    """Whether a value, read by `reads` (with the number of the operand), is put together with itself: by an operator
    that is not elementwise and takes it twice (a product), or with a new dim at two places (`x[:, None] - x`)."""
    places = {
        op.call.args[1] % len(op.call.outs[0].shape) if op.target is UNSQUEEZE else 0
        for op, number in reads
        if op.role == "op" and (op.target is UNSQUEEZE or op.call.outs[0].shape[1:] == op.call.ins[number].shape)
    }
    times = Counter(op for op, _ in reads)
    return len(places) > 1 or any(n > 1 and not passes_through(op, table[op.name]) for op, n in times.items())


def _follow_parameters(program: Program, home: dict[str, Cluster], table: Table) -> None:
    """Let transposes and casts of one parameter (Program.following) join its cluster: they run on the shard, before the
    gather."""
    for name in program.following:
        op = program.ops[name]
        source = home[op.operands[0][0]]
        assert passes_through(op, table[name]), f"{name} is no turn of a parameter"
        if len(home[name].members) == 1:
            source.members.append(op)
            home[name] = source


def passes_through(op: Op, options: Sequence[Option]) -> bool:
    """Whether `op` is elementwise as its options tell: every dim of every tensor can be split without a runtime
    algorithm, and no split leaves a partial sum."""
    split = [o for o in options if o.split and not o.run]
    if any(u.value.startswith("P") for o in split for u in o.outs):
        return False
    for index, tensor in enumerate(op.tensors):
        cut = {dim_of(use.value) for o in split if is_shard((use := (*o.ins, *o.outs)[index]).value)}
        if any(size != 1 and dim not in cut for dim, size in enumerate(tensor.sizes)):
            return False
    return True


def _sums(options: Sequence[Option]) -> bool:
    """Whether some split leaves a partial sum."""
    return any(use.value == "P" for option in options if option.split for use in option.outs)


def _hands_on_partial_sums(
    refs: Sequence[Ref], cluster: Cluster, readers: Mapping[Ref, Sequence[tuple[Op, int]]], table: Table
) -> bool:
    """Whether all members of `cluster` that read the values `refs`, directly or not, can take partial sums and leave
    partial sums, so that no all-reduce is needed inside the cluster."""
    for reader, position in (read for ref in refs for read in readers.get(ref, ())):
        if not any(_takes_partial_sum(reader, position, option) for option in table[reader.name]):
            return False
        if reader is not cluster.root and not _hands_on_partial_sums(
            [(reader.name, i) for i in range(len(reader.call.outs))], cluster, readers, table
        ):
            return False
    return True


def _takes_partial_sum(op: Op, position: int, option: Option) -> bool:
    """Whether under `option` operand number `position` and all results are partial sums, and no operand of other sizes
    is."""
    shapes = [tensor.shape for tensor in op.call.ins]
    return (
        option.ins[position].value == "P"
        and all(use.value == "P" for use in option.outs)
        and all(use.value != "P" or shape == shapes[position] for use, shape in zip(option.ins, shapes, strict=True))
    )


def _is_anchor(op: Op, options: Sequence[Option]) -> bool:
    """Whether `op` starts a cluster: it uses a runtime algorithm, combines several activations, or leaves partial sums
    and takes none (a contraction)."""
    if passes_through(op, options):
        return False
    if any(o.run for o in options) or sum(not w for w in op.weight) > 1:
        return True
    return _sums(options) and not any(o.factor == "P" for o in options)


def join(cluster: Cluster, table: Table, allow: Allow) -> list[Joint]:
    """The options of a cluster on one axis, of those that `allow` admits: one option per member such that no edge
    inside needs a reshard. Where there are none, members without an admitted option are replicated."""
    members = cluster.members
    if members[0].role == "input":
        return _join_inputs(members, table, allow)
    inner = {op.name: i for i, op in enumerate(members)}
    # operators that have no option which the recipe wants are replicated
    found = _joins(members, table, allow, inner) or _joins(
        members, table, lambda op, o: allow(op, o) or not o.split, inner
    )
    return _distinct(cluster, found, inner)


def _joins(members: Sequence[Op], table: Table, allow: Allow, inner: Mapping[str, int]) -> list[Joint]:
    """All agreeing combinations of admitted options, extended member by member. `inner`: name of a member -> its
    position."""
    partial: list[dict[int, Option]] = [{}]
    order = range(len(members)) if members[0].role == "param" else reversed(range(len(members)))
    for index in order:
        op = members[index]
        partial = [
            {**chosen, index: option}
            for chosen in partial
            for option in table[op.name]
            if allow(op, option) and _agrees(op, option, chosen, members, inner)
        ]
    return [Joint(tuple(chosen[i] for i in range(len(members)))) for chosen in partial]


def _join_inputs(members: Sequence[Op], table: Table, allow: Allow) -> list[Joint]:
    """For each factor: all inputs split along it, those that lack it replicated."""
    joints = []
    for factor in dict.fromkeys(option.factor for op in members for option in table[op.name]):
        picked = [next((o for o in table[op.name] if o.factor == factor), table[op.name][0]) for op in members]
        if all(allow(op, option) for op, option in zip(members, picked, strict=True)):
            joints.append(Joint(tuple(picked)))
    return joints


def _agrees(
    op: Op, option: Option, chosen: Mapping[int, Option], members: Sequence[Op], inner: Mapping[str, int]
) -> bool:
    """Whether `option` of `op` needs no reshard on any edge to or from the members that are
    `chosen`."""
    for position, ref in enumerate(op.operands):
        other = chosen.get(inner.get(ref[0], -1))
        if other is not None and not same(other.outs[ref[1]], option.ins[position]):
            return False
    for other_index, other in chosen.items():
        for position, ref in enumerate(members[other_index].operands):
            if ref[0] == op.name and not same(option.outs[ref[1]], other.ins[position]):
                return False
    return True


def same(producer: Use, reader: Use) -> bool:
    """Whether there is no reshard between the two uses of a value on one axis, forward or backward."""
    return producer.value == reader.value and (producer.grad == reader.grad or NO_GRAD in (producer.grad, reader.grad))


def _distinct(cluster: Cluster, joints: Sequence[Joint], inner: Mapping[str, int]) -> list[Joint]:
    """Of the joints with the same uses at the border of the cluster, and the same tiles and scatters of gradients
    inside, the one that splits most members."""
    best: dict[tuple[object, ...], tuple[int, Joint]] = {}
    for joint in joints:
        outer = tuple(
            use
            for op, option in zip(cluster.members, joint.options, strict=True)
            for ref, use in zip(op.operands, option.ins, strict=op.role == "op")
            if ref[0] not in inner
        )
        runs = tuple(option.run for option in joint.options if option.run == EACH or tiles(option.run) > 1)
        key = (outer, joint.options[-1].outs, runs)
        work = sum(option.split for option in joint.options)
        if key not in best or work > best[key][0]:
            best[key] = (work, joint)
    return [joint for _, joint in best.values()]
