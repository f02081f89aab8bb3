"""Clusters: groups of Ops that are decided together, so that the problem has few nodes.

An Op that only passes elements on (pointwise, views, casts) has no layout wishes of its own: moving a reshard from its
output to its input costs the same. Where everything that reads it is in one cluster it joins that cluster; an operator
that needs some dim whole (a norm, a softmax, a sum) joins only clusters without a contraction, because a reshard between
the two is exactly what sequence parallelism does. Contractions always stand alone with what leads into them.

A cluster's options on one axis (`Joint`) are the joins of its members' options over equal uses on the inner edges:
no reshard happens inside a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.layout import NO_GRAD, dim_of, is_shard
from autopar.problem.graph import Op, Program, Ref
from autopar.rules.language import Option, Use
from autopar.rules.tiles import tiles

Allow = Callable[[Op, Option], bool]
Table = Mapping[str, Sequence[Option]]  # op name -> options on one axis


@dataclass(eq=False, slots=True)
class Cluster:
    """Ops decided together; `members` in execution order, the last one (the root) is what others read.

    For a parameter's cluster the parameter is the first member and the casts that follow it come after. All inputs are
    one cluster, so that they are all cut the same way and a rank has one local batch.
    """

    name: str
    members: list[Op]
    anchor: bool  # contains a contraction: nothing that needs whole dims may join

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
    """Group the Ops of a program; `table` holds their options on an axis of any size (its shape of splits decides)."""
    readers = program.readers
    pinned = {ref for run in program.runs.values() for ref in (*run.feeds, *run.carried)}
    home: dict[str, Cluster] = {}
    for op in reversed(list(program.ops.values())):
        cluster = _target(op, readers, pinned, home, table)
        if cluster is None and op.role == "input":
            cluster = next((c for c in home.values() if c.root.role == "input"), None)
        if cluster is None:
            kind = op.role != "op" or _is_anchor(op, table[op.name])
            cluster = Cluster(op.name, [], anchor=kind)
        cluster.members.insert(0, op)
        home[op.name] = cluster
    _follow_parameters(program, pinned, home, table)
    found: dict[str, Cluster] = {}
    for op in program.ops.values():
        found.setdefault(home[op.name].name, home[op.name])
    return list(found.values())


def _target(op: Op, readers: Mapping[Ref, Sequence[tuple[Op, int]]], pinned: set[Ref], home: Mapping[str, Cluster],
            table: Table) -> Cluster | None:
    """The cluster that `op` joins, or None when it starts one."""
    if op.role != "op" or all(op.weight) or _is_anchor(op, table[op.name]):
        return None
    refs = [(op.name, i) for i in range(len(op.call.outs))]
    if any(ref in pinned for ref in refs):
        return None
    homes = {home[reader.name].name: home[reader.name] for ref in refs for reader, _ in readers.get(ref, ())}
    if len(homes) != 1:
        return None
    (cluster,) = homes.values()
    if cluster.root.role != "op" or cluster.scope != op.scope or (_sums(table[op.name]) and not _hands_on(refs, cluster, readers, table)):
        return None
    return cluster if not cluster.anchor or passes_through(op, table[op.name]) else None


def _follow_parameters(program: Program, pinned: set[Ref], home: dict[str, Cluster], table: Table) -> None:
    """Turns and casts of one parameter join it: they are done on the shard, before it is gathered."""
    for name in program.following:
        op = program.ops[name]
        source = home[op.operands[0][0]]
        assert op.operands[0] not in pinned and passes_through(op, table[name]), f"{name} is no turn of a parameter"
        if len(home[name].members) == 1:
            source.members.append(op)
            home[name] = source


def passes_through(op: Op, options: Sequence[Option]) -> bool:
    """Whether every dim of every tensor of `op` can be cut without an algorithm, and no cut leaves a partial result."""
    split = [o for o in options if o.split and not o.run]
    if any(u.value.startswith("P") for o in split for u in o.outs):
        return False
    for index, tensor in enumerate(op.tensors):
        cut = {dim_of(use.value) for o in split if is_shard((use := (*o.ins, *o.outs)[index]).value)}
        if any(size != 1 and dim not in cut for dim, size in enumerate(tensor.sizes)):
            return False
    return True


def _sums(options: Sequence[Option]) -> bool:
    """Whether a cut of what is summed leaves a partial result."""
    return any(use.value == "P" for option in options if option.split for use in option.outs)


def _hands_on(refs: Sequence[Ref], cluster: Cluster, readers: Mapping[Ref, Sequence[tuple[Op, int]]], table: Table) -> bool:
    """Whether a part of a sum goes through all of `cluster` that reads it, and nothing larger has to be a part for it: else it would have to be summed inside, or what
    is summed be whole."""
    for reader, position in (read for ref in refs for read in readers.get(ref, ())):
        if not any(_takes(reader, position, option) for option in table[reader.name]):
            return False
        if reader is not cluster.root and not _hands_on([(reader.name, i) for i in range(len(reader.call.outs))], cluster, readers, table):
            return False
    return True


def _takes(op: Op, position: int, option: Option) -> bool:
    """Whether under `option` that operand is a part of a sum as the results are, and no other one but those of its size."""
    shapes = [tensor.shape for tensor in op.call.ins]
    return option.ins[position].value == "P" and all(use.value == "P" for use in option.outs) and all(
        use.value != "P" or shape == shapes[position] for use, shape in zip(option.ins, shapes, strict=True))


def _is_anchor(op: Op, options: Sequence[Option]) -> bool:
    if passes_through(op, options):
        return False
    if any(o.run for o in options) or sum(not w for w in op.weight) > 1:
        return True
    return _sums(options) and not any(o.factor == "P" for o in options)


def join(cluster: Cluster, table: Table, allow: Allow) -> list[Joint]:
    """The options of a cluster on one axis: one option per member such that no inner edge needs a reshard."""
    members = cluster.members
    if members[0].role == "input":
        return _join_inputs(members, table, allow)
    inner = {op.name: i for i, op in enumerate(members)}
    # operators that can do nothing of what the recipe wants are replicated, as by hand
    found = _joins(members, table, allow, inner) or _joins(members, table, lambda op, o: allow(op, o) or not o.split, inner)
    return _distinct(cluster, found, inner)


def _joins(members: Sequence[Op], table: Table, allow: Allow, inner: Mapping[str, int]) -> list[Joint]:
    partial: list[dict[int, Option]] = [{}]
    order = range(len(members)) if members[0].role == "param" else reversed(range(len(members)))
    for index in order:
        op = members[index]
        partial = [{**chosen, index: option} for chosen in partial for option in table[op.name] if allow(op, option)
                   and _agrees(op, index, option, chosen, members, inner)]
    return [Joint(tuple(chosen[i] for i in range(len(members)))) for chosen in partial]


def _join_inputs(members: Sequence[Op], table: Table, allow: Allow) -> list[Joint]:
    """All inputs cut along the batch (those that have one), or none."""
    joints = []
    for factor in dict.fromkeys(option.factor for op in members for option in table[op.name]):
        picked = [next((o for o in table[op.name] if o.factor == factor), table[op.name][0]) for op in members]
        if all(allow(op, option) for op, option in zip(members, picked, strict=True)):
            joints.append(Joint(tuple(picked)))
    return joints


def _agrees(op: Op, index: int, option: Option, chosen: Mapping[int, Option], members: Sequence[Op],
            inner: Mapping[str, int]) -> bool:
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
    """Whether a value needs no reshard between the two, forward or backward."""
    return producer.value == reader.value and (producer.grad == reader.grad or NO_GRAD in (producer.grad, reader.grad))


def _distinct(cluster: Cluster, joints: Sequence[Joint], inner: Mapping[str, int]) -> list[Joint]:
    """One joint per outer signature: the one that splits the most work."""
    best: dict[tuple[object, ...], tuple[int, Joint]] = {}
    for joint in joints:
        outer = tuple(use for op, option in zip(cluster.members, joint.options, strict=True)
                      for ref, use in zip(op.operands, option.ins, strict=op.role == "op") if ref[0] not in inner)
        key = (outer, joint.options[-1].outs, tuple(option.run for option in joint.options if tiles(option.run) > 1))
        work = sum(option.split for option in joint.options)
        if key not in best or work > best[key][0]:
            best[key] = (work, joint)
    return [joint for _, joint in best.values()]
