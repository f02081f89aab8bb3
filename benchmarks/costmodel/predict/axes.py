"""The mesh axes of one place of a given configuration with their roles, which restrict the layouts; and the operators
that are run again in the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autopar.problem.clusters import Allow
from autopar.problem.graph import ATTENTION, Op, Program
from autopar.problem.kernels import multiplies
from autopar.problem.remat import levels
from autopar.problem.rerun import keepable, rerun
from autopar.problem.traffic import NORMS, POINTWISE
from autopar.recipes import roles, sequence
from autopar.recipes.kinds import PARTIAL, REPLICATE, cuts_sequence, kind
from autopar.recipes.roles import Role
from autopar.rules.language import Option
from benchmarks.costmodel.predict.setup import Setup
from passes import facts, ops

RESTS: dict[int, Role] = {0: roles.data, 1: roles.zero1, 2: roles.zero2, 3: roles.zero3}
"""The role of a data-parallel axis, by the stage of ZeRO."""


@dataclass(frozen=True)
class Axis:
    """An axis of `ways` ranks with its role. `name` is the field of Setup that splits the work of a block over it (ep,
    cp or tp); empty for data parallelism."""

    ways: int
    role: Role
    name: str = ""


def axes(setup: Setup) -> list[Axis]:
    """The axes of a place with more than one rank, outermost first: replicas of shards (HSDP), data, experts, context,
    tensor. Parameters and optimizer state that ZeRO shards over data-parallel ranks are sharded over those of experts
    and context too, since all of these have the same dense parameters."""
    rests = RESTS[setup.zero]
    found = [
        Axis(setup.replicas, roles.data),
        Axis(setup.dp // setup.replicas // setup.expert_ways, rests),
        Axis(setup.expert_ways, resting(roles.experts, rests), "ep"),
        Axis(setup.cp, resting(context_role(setup), rests), "cp"),
        Axis(setup.tp, tensor_role(setup), "tp"),
    ]
    return [axis for axis in found if axis.ways > 1] or [Axis(1, roles.nothing)]


@cache
def resting(role: Role, rests: Role) -> Role:
    """A role by which operators are split as by `role`, while parameters, except those of experts, are sharded as by
    `rests`. Cached, so that equal arguments give the same role, whose options are found once."""
    if rests is roles.data:
        return role

    def mixed(ways: int) -> Allow:
        works, lies = role(ways), rests(ways)

        def allow(op: Op, option: Option) -> bool:
            if op.role == "param" and not stacked(op):
                return lies(op, option)
            return op.of_weights or works(op, option)

        return allow

    return mixed


def tensor_role(setup: Setup) -> Role:
    """The role of the tensor-parallel axis of a configuration."""
    role = tensor_sequence if setup.sequence_parallel else tensor
    return beside_experts(role) if setup.whole_experts else role


def context_role(setup: Setup) -> Role:
    """The role of the context-parallel axis of a configuration. Its ranks have the same weights, as data-parallel ones
    have, whose gradients are summed once per step."""
    role = sequence.context if setup.zero else whole_weights(sequence.context)
    return beside_experts(role) if setup.experts_over_context else role


@cache
def whole_weights(role: Role) -> Role:
    """`role` for operators; parameters are whole."""

    def mixed(ways: int) -> Allow:
        works, whole = role(ways), roles.nothing(ways)
        return lambda op, option: (whole if op.role == "param" else works)(op, option)

    return mixed


@cache
def beside_experts(role: Role) -> Role:
    """`role` for all operators except those of experts, which are split by expert and not along their width."""

    def mixed(ways: int) -> Allow:
        works, apart = role(ways), roles.experts(ways)
        return lambda op, option: (apart if of_experts(op) else works)(op, option)

    return mixed


def of_experts(op: Op) -> bool:
    """Whether an op is a stack of weights of experts, depends on one alone (a cast), or computes with one."""
    return bool(roles.stacks_of(op)) or ((op.role == "param" or op.of_weights) and stacked(op))


def tensor(ways: int) -> Allow:
    """Tensor parallelism as in Megatron: embedding and loss split along the vocabulary, the residual stream
    replicated."""
    allowed = roles.megatron(ways)
    return lambda op, option: (
        allowed(op, option) and (not between_blocks(op) or kind(op, option) in (REPLICATE, PARTIAL))
    )


def tensor_sequence(ways: int) -> Allow:
    """Tensor parallelism with Megatron's sequence parallelism: as `tensor`, the residual stream split along the
    sequence."""
    by_vocabulary, by_sequence = roles.megatron(ways), roles.tensor_sequence(ways)

    def allow(op: Op, option: Option) -> bool:
        allowed = (by_vocabulary if roles.over_vocabulary(op) else by_sequence)(op, option)
        return allowed and (
            not between_blocks(op) or cuts_sequence(op, option) or kind(op, option) in (REPLICATE, PARTIAL)
        )

    return allow


def between_blocks(op: Op) -> bool:
    """Whether an op makes the residual stream, or something pointwise of it: a port or pointwise operator with a result
    [batch, symbolic sequence, width of some norm]."""
    made = op.call.outs[0] if op.call.outs else None
    if (
        made is None
        or len(made.shape) != 3
        or isinstance(made.shape[1], int)
        or not (op.role == "port" or op.target in ROWS)
    ):
        return False
    return made.sizes[2] in _widths(op.node.graph)


ROWS = (*POINTWISE, torch.ops.aten.dropout.default)
"""Operators that compute each element of their result from one element of each operand."""

_WIDTHS: WeakKeyDictionary[fx.Graph, frozenset[int]] = WeakKeyDictionary()


def _widths(graph: fx.Graph) -> frozenset[int]:
    """The sizes of the last dim of all norms of a graph."""
    if graph not in _WIDTHS:
        _WIDTHS[graph] = frozenset(int(facts.shape(node)[-1]) for node in graph.nodes if node.target in NORMS)
    return _WIDTHS[graph]


def stacked(op: Op) -> bool:
    """Whether a parameter is a stack of matrices, one per expert: of three dims."""
    return len(op.call.outs[0].sizes) == 3


def scores(op: Op) -> bool:
    """Whether an operator has a tensor of attention scores: four dims, of which the last two are the sequence."""
    return any(
        len(t.sizes) == 4 and not isinstance(t.shape[-1], int) and t.sizes[-1] == t.sizes[-2] for t in op.tensors
    )


def in_attention(op: Op) -> bool:
    """Whether an operator belongs to attention without its projections, as one fused kernel or several."""
    return op.target is ATTENTION or scores(op)


def in_mlp(program: Program, routed: bool) -> Callable[[Op], bool]:
    """A predicate: whether an operator belongs to the feed-forward layer of a block without experts, or (`routed`) of a
    block with experts, shared experts included. Told by the module path, which has `mlp` in it."""
    with_experts = {op.scope for op in program.ops.values() if op.target is ops.experts}
    word = "mlp" if routed else ".mlp"
    return lambda op: word in f".{op.node.meta.get('module', '')}" and (op.scope in with_experts) == routed


def kept_operators(program: Program) -> frozenset[str]:
    """The operators that are kept where recomputation is by operator (torchtitan's "op"): attention, and the first,
    third, ... matmul with a weight of each block."""
    matmuls: dict[str, int] = {}
    kept = {op.name for op in program.ops.values() if op.role == "op" and in_attention(op)}
    for op in program.ops.values():
        if op.role == "op" and multiplies(op) and any(op.weight):
            matmuls[op.scope] = matmuls.get(op.scope, 0) + 1
            kept |= {op.name} if matmuls[op.scope] % 2 else set()
    return frozenset(kept)


PARTS: dict[str, Callable[[Program], Callable[[Op], bool]]] = {
    "attention": lambda program: in_attention,
    "mlp": lambda program: in_mlp(program, routed=False),
    "experts": lambda program: in_mlp(program, routed=True),
    "operators": lambda program: partial(_runs_again, kept_operators(program)),
}
"""By name (setup.PARTS): a predicate of the operators of that part of a block, which can be run again without the
rest."""


def _runs_again(kept: frozenset[str], op: Op) -> bool:
    return op.name not in kept


def rerun_levels(program: Program, setup: Setup) -> dict[str, tuple[str, ...]]:
    """Scope of each run of blocks -> the operators whose results are kept when its blocks run again: none (`full`), or
    all that can be kept but those of `parts` (`selective`). Empty where no block runs again."""
    if setup.recompute == "none":
        return {}
    if setup.recompute == "full":
        return levels(program, "full")
    again = [PARTS[part](program) for part in setup.parts]
    kept = [op.name for op in program.ops.values() if op.scope and keepable(op) and not any(part(op) for part in again)]
    return {
        scope: tuple(name for name in about.order if name in about.kept)
        for scope in program.runs
        for about in [rerun(program, scope, kept)]
    }
