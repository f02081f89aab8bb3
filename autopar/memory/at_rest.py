"""What one rank of a place holds throughout a step: parameters with gradients and optimizer state, buffers, inputs.
Called by memory.place."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from autopar.cost.memory import ParameterBytes, itemsize, parameter_bytes, rests_in
from autopar.cost.memory import host_bytes as host_bytes_of
from autopar.memory.shares import Shares, named
from autopar.memory.types import Entry
from autopar.pipeline.stage_views import View
from autopar.problem.at_rest import EACH
from autopar.problem.graph import Op

ALWAYS, WHOLE = "the whole step", "whole gradients"


def instances(shares: Shares, views: Sequence[View]) -> dict[str, int]:
    """How many tensors of each parameter, buffer, constant and input the stages of a place hold: for those of a block
    one per instance of the block; for others one, however many stages read it."""
    found: dict[str, int] = {}
    blocks = Counter[str]()
    for view in views:
        blocks.update({scope: stop - first for scope, (first, stop) in view.blocks.items()})
    for op in shares.program.ops.values():
        if op.scope:
            found[op.name] = blocks[op.scope]
        else:
            found[op.name] = int(op.role == "input" or any(op.name in view.held for view in views))
    return found


def sends_gradient(op: Op, views: Sequence[View]) -> bool:
    """Whether any of the stages of a place that hold a parameter sends a gradient into it. Of those that only read it
    for a value without one, the gradient is nothing but what other places send."""
    return any(view.grades(op) for view in views)


def resting(shares: Shares, views: Sequence[View]) -> Iterator[Entry]:
    """The entries of parameters with their gradients and optimizer state, of buffers and of inputs. Whole gradients
    that microbatches add up, and that are scattered at the end of the step, are entries of their own."""
    counts = instances(shares, views)
    for op in shares.program.ops.values():
        count = counts[op.name]
        if not count:
            continue
        if op.role == "input":
            yield from _of_input(shares, op, count)
        elif op.role in ("buffer", "constant"):
            nbytes = float(elements(shares, op) * op.out_dtypes[0].itemsize * count)
            yield Entry("buffers", named(op), op.where, nbytes, count, ALWAYS, ALWAYS)
        elif op.role == "param":
            held = asdict(_of_parameter(shares, op, count, 1.0 - _hosted(shares, views)))
            if held["gradients"] and sends_gradient(op, views):
                held[WHOLE] = _whole_bytes(shares, op, count)
            for kind, nbytes in held.items():
                if nbytes:
                    yield Entry(kind, named(op), op.where, nbytes, count, ALWAYS, ALWAYS)


def _of_input(shares: Shares, op: Op, count: int) -> Iterator[Entry]:
    """An input, and in a pipeline its copy in the dtype of the computation."""
    nbytes = float(elements(shares, op) * _rest_itemsize(shares, op))
    yield Entry("inputs", named(op), op.where, nbytes, count, ALWAYS, ALWAYS)
    if shares.plan.pipelined and (cast := cast_bytes(shares, op)):
        yield Entry("pipeline buffers", named(op), op.where, cast, count, ALWAYS, ALWAYS)


def _of_parameter(shares: Shares, op: Op, count: int, on_device: float) -> ParameterBytes:
    """Bytes of `count` tensors of a parameter on this rank: weights at rest and gathered, gradients, optimizer state
    and master weights. `on_device` is the share of the last two that is not in host memory."""
    plan, habits = shares.plan, shares.habits
    lies, leaf = shares.lies((op.name, 0)), elements(shares, op)
    shard = shares.elements(op.call.outs[0].sizes, lies.rest)
    held = parameter_bytes(
        shard * count,
        str(op.out_dtypes[0]).removeprefix("torch."),
        precision=plan.precision,
        optimizer=plan.optimizer,
        training=plan.mode == "train" and op.call.outs[0].grad,
        leaf=leaf * count if lies.gathered else None,
        offload=plan.offload,
    )
    if habits.standing and held.gradients:
        numel = leaf * count if _adds_up(shares, op) else shard * count
        held = replace(held, gradients=float(numel * (habits.gradient_bytes or _rest_itemsize(shares, op))))
    if habits.moment_bytes is not None:
        held = replace(held, optimizer=held.optimizer * habits.moment_bytes / _rest_itemsize(shares, op))
    graded = held.gradients or (habits.flat and op.scope in shares.trained)
    if habits.sums_last and plan.microbatches > 1 and graded and not lies.gathered:
        read = shares.read((op.name, 0))
        whole = float(read * count * op.out_dtypes[0].itemsize) if read > shard else held.gradients
        held = replace(held, gradients=whole)
    return replace(
        held,
        weights=0.0 if habits.hosts_weights else held.weights * shares.resting((op.name, 0)),
        gradients=0.0 if habits.spends else held.gradients,
        optimizer=held.optimizer * on_device,
        master=held.master * on_device,
    )


def _whole_bytes(shares: Shares, op: Op, count: int) -> float:
    """Bytes of the whole gradients of `count` tensors of a parameter which several microbatches add up; 0 where they
    are in standing buffers."""
    if not _adds_up(shares, op) or shares.habits.standing or shares.plan.microbatches == 1:
        return 0.0
    return float(elements(shares, op) * count * _rest_itemsize(shares, op))


def _adds_up(shares: Shares, op: Op) -> bool:
    """Whether the gradient of a parameter is whole until it is scattered, once per step."""
    return bool(shares.lies((op.name, 0)).gathered) and EACH not in shares.plan.nodes[op.name].runs


def _rest_itemsize(shares: Shares, op: Op) -> int:
    """Bytes of one element of a parameter or input at rest."""
    return itemsize(rests_in(str(op.out_dtypes[0]), shares.plan.precision))


def host_bytes(shares: Shares, views: Sequence[View]) -> float:
    """Bytes in host memory for this rank: what the plan keeps there of the parameters of the place's stages."""
    plan, counts = shares.plan, instances(shares, views)
    if not plan.offload:
        return 0.0
    return sum(
        host_bytes_of(
            shares.elements(op.call.outs[0].sizes, shares.lies((op.name, 0)).rest) * counts[op.name],
            str(op.out_dtypes[0]).removeprefix("torch."),
            plan.precision,
            plan.optimizer,
            plan.offload,
        )
        for op in shares.program.ops.values()
        if op.role == "param" and op.call.outs[0].grad
    )


def _hosted(shares: Shares, views: Sequence[View]) -> float:
    """The share of master weights and optimizer state of the place's stages that is in host memory."""
    hosted = shares.habits.hosted
    return sum(hosted[view.index] for view in views) / len(views) if hosted else 0.0


def elements(shares: Shares, op: Op) -> int:
    """The number of elements of a parameter's leaf, of a buffer or of an input on this rank."""
    return shares.elements(op.call.outs[0].sizes, shares.lies((op.name, 0)).value)


def cast_bytes(shares: Shares, op: Op) -> float:
    """Bytes of an input's copy in the dtype of the computation, where that is not the one in which it is given (mixed
    precision; runtime/batch.py: as_computed)."""
    computed = str(op.out_dtypes[0])
    return (
        float(elements(shares, op) * itemsize(computed))
        if itemsize(rests_in(computed, shares.plan.precision)) != itemsize(computed)
        else 0.0
    )


def largest_state(shares: Shares, views: Sequence[View]) -> float:
    """Bytes of the largest trained parameter's shard on this rank: the temporary memory of an optimizer that updates
    one parameter at a time."""
    return max(_trained(shares, views), default=0.0)


def roots_bytes(shares: Shares, views: Sequence[View]) -> float:
    """Temporary bytes of torch's Adam where it updates one parameter at a time, at most: the square root of a second
    moment and the denominator made from it, and the denominator of the parameter before, which is freed only when it is
    replaced."""
    return max(
        (before + 2 * nbytes for before, nbytes in itertools.pairwise((0.0, *_trained(shares, views)))), default=0.0
    )


def _trained(shares: Shares, views: Sequence[View]) -> Iterator[float]:
    """Bytes of trained parameters' shards in the order of the model, in which optimizers step them. Those of a run of
    blocks are listed twice, because the first one of a block follows the last one of the block before."""
    counts = instances(shares, views)
    held = [op for op in shares.program.ops.values() if op.role == "param" and op.call.outs[0].grad and counts[op.name]]
    for _, block in itertools.groupby(sorted(held, key=lambda op: op.node.meta["number"]), key=lambda op: op.scope):
        sizes = [
            (
                float(
                    shares.elements(op.call.outs[0].sizes, shares.lies((op.name, 0)).rest)
                    * itemsize(rests_in(str(op.out_dtypes[0]), shares.plan.precision))
                ),
                counts[op.name] > 1,
            )
            for op in block
        ]
        yield from (nbytes for nbytes, _ in sizes)
        yield from (nbytes for nbytes, several in sizes if several)


def workspace(shares: Shares) -> Iterator[Entry]:
    """Memory that libraries allocate once (cuBLAS)."""
    if shares.habits.workspace_bytes:
        yield Entry("buffers", "workspace", "", shares.habits.workspace_bytes, 1, ALWAYS, ALWAYS)


def by_kind(entries: Sequence[Entry]) -> Mapping[str, float]:
    """Bytes of entries by what they are for."""
    found: dict[str, float] = {}
    for entry in entries:
        found[entry.kind] = found.get(entry.kind, 0.0) + entry.nbytes
    return found
