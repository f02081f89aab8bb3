"""What one mesh axis is for: each role is a predicate over (op, option), made for the number of ranks on the axis.

A recipe is a tuple of roles. The search itself has roles that leave most open (`Free`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.problem.at_rest import EACH, is_gathered
from autopar.problem.clusters import Allow
from autopar.problem.graph import HOLDERS, Op, Program
from autopar.problem.options import splits_samples
from autopar.recipes import attention
from autopar.recipes.kinds import ATTRIBUTE, PARAMETER, PARTIAL, REPLICATE, SAMPLE, cuts_sequence, kind
from autopar.rules import rule_for
from autopar.rules.language import Option, parse
from passes import edit, facts, ops

aten = torch.ops.aten
Role = Callable[[int], Allow]

STACKS = (aten.bmm.default, aten.einsum.default, aten.matmul.default, ops.experts, ops.grouped_matmul)
"""Contractions whose weight may be a stack of matrices, one per expert."""

OVER_VOCABULARY = (aten.embedding.default, ops.bag, ops.cross_entropy_sum)

LOCAL = ("", "own_heads")
"""What tensor parallelism by hand does with operators: shards of them, and the key heads of a rank's query heads."""

_NO_OPERATORS = (*HOLDERS, "output", "loss", "mutation")


@dataclass(frozen=True)
class Free:
    """A role of the search.

    by_sample    operators split over samples only, parameters rest as they like
    each         gradients of weights that are gathered once per step may also be scattered after every microbatch
                 (ZeRO-2), not only once per step (ZeRO-1)
    """

    by_sample: bool = False
    each: bool = False

    def __call__(self, ways: int) -> Allow:
        def allow(op: Op, option: Option) -> bool:
            if op.role == "param" and option.run == EACH and not self.each:
                return False
            return not self.by_sample or op.of_weights or _samples(op, option, ways)

        return allow


anything = Free()
"""No restriction. Of one microbatch it does not matter when gradients are scattered."""

samples = Free(by_sample=True)
"""What the slowest axis of three is for."""


def scattering(used: Sequence[Role]) -> tuple[Role, ...]:
    """`used`, where roles of the search may also scatter gradients after every microbatch (`Free.each`)."""
    return tuple(replace(role, each=True) if isinstance(role, Free) else role for role in used)


def gathers(role: Role) -> bool:
    """Whether a role gathers weights where they are used, those that are too large for that in tiles."""
    return role is zero3 or isinstance(role, Free)


def nothing(ways: int) -> Allow:
    """Every rank does everything."""
    return lambda op, option: not option.split


def data(ways: int) -> Allow:
    """Data parallel: work splits over samples, parameters rest whole."""
    return lambda op, option: _samples(op, option, ways) and not (op.role == "param" and option.split)


def zero3(ways: int) -> Allow:
    """ZeRO-3: work splits over samples, every parameter that is long enough rests cut along some dim."""

    def allow(op: Op, option: Option) -> bool:
        if op.role == "param":
            return not is_gathered(option) and (option.split or max(op.call.outs[0].sizes, default=1) < ways)
        return op.of_weights or _samples(op, option, ways)

    return allow


def zero1(ways: int) -> Allow:
    """ZeRO-1: work splits over samples; every parameter that is long enough is gathered once per step, and so is the
    sum of its gradient scattered."""
    return _gathered_once(ways, "")


def zero2(ways: int) -> Allow:
    """ZeRO-2: as ZeRO-1, with gradients scattered after every microbatch."""
    return _gathered_once(ways, EACH)


def _gathered_once(ways: int, run: str) -> Allow:
    def allow(op: Op, option: Option) -> bool:
        if op.role != "param":
            return op.of_weights or _samples(op, option, ways)
        if ways < 2 or not op.call.outs[0].grad or max(op.call.outs[0].sizes, default=1) < ways:
            return not option.split
        return is_gathered(option) and option.run == run

    return allow


def check_roles(recipe: str, given: object) -> None:
    """Raise PlanError unless the row called `recipe` has one role or more."""
    if not isinstance(given, tuple) or not given or not all(map(callable, given)):
        raise PlanError(
            f"recipe {recipe}: roles are {given!r}, wanted a tuple of functions, one for each mesh axis, as "
            "(autopar.recipes.roles.data,)"
        )


BY_SAMPLE: tuple[Role, ...] = (data, zero3, zero1, zero2, samples)
"""Roles that divide the batch by the size of their axis."""


def experts(ways: int) -> Allow:
    """Expert parallel: each rank has some of the experts, and tokens go to them; all else is data parallel, parameters
    whole. Rows that are sorted by expert for grouped matmuls are on all ranks."""
    sorted_rows: dict[fx.Graph, list[facts.Size]] = {}

    def rows_of_groups(op: Op) -> bool:
        graph = op.node.graph
        if graph not in sorted_rows:
            sorted_rows[graph] = [
                facts.shape(edit.tensor_operands(n)[0])[0] for n in graph.nodes if n.target is ops.grouped_matmul
            ]
        return any(tensor.shape[:1] == (size,) for tensor in op.call.outs for size in sorted_rows[graph])

    def allow(op: Op, option: Option) -> bool:
        if op.role == "param":
            return (
                _cuts_first(option, -1) if _is_stack(op.node) and op.call.outs[0].sizes[0] >= ways else not option.split
            )
        if op.of_weights:
            return True
        stacks = stacks_of(op)
        if stacks and op.tensors[stacks[0]].sizes[0] >= ways:
            return option.run in ("", "expert_dispatch", "own_groups") and all(_cuts_first(option, i) for i in stacks)
        if not option.split and rows_of_groups(op):
            return True
        return _samples(op, option, ways) or (
            _beside_stack(op.node) and kind(op, option) == ATTRIBUTE and not cuts_sequence(op, option)
        )

    return allow


def stacks_of(op: Op) -> list[int]:
    """The tensors of a contraction, by number, that are stacks of matrices, one per expert."""
    return (
        [i for i, weight in enumerate(op.weight) if weight and len(op.tensors[i].shape) == 3]
        if op.target in STACKS
        else []
    )


def tensor(ways: int) -> Allow:
    """Tensor parallel: work splits over weights and heads; every rank sees the whole batch and sequence."""

    def allow(op: Op, option: Option) -> bool:
        return (
            _model(op, option, ways) and option.run in LOCAL and not (op.role != "param" and cuts_sequence(op, option))
        )

    return allow


def tensor_sequence(ways: int) -> Allow:
    """Tensor parallel, and sequence parallel between the contractions: every norm of tokens splits the sequence."""

    def allow(op: Op, option: Option) -> bool:
        if _norm_of_tokens(op, ways):
            return cuts_sequence(op, option)
        return _model(op, option, ways) and option.run in LOCAL

    return allow


def megatron(ways: int) -> Allow:
    """Tensor parallel with vocabulary-parallel embedding and loss."""

    def allow(op: Op, option: Option) -> bool:
        if over_vocabulary(op) and op.role == "op" and _vocabulary_size(op) >= ways * 8:
            return bool(option.run)
        return _model(op, option, ways) and not (op.role != "param" and cuts_sequence(op, option))

    return allow


def convolutions_by_sample(ways: int) -> Allow:
    """Krizhevsky's "one weird trick": convolutions split samples, dense layers split parameters."""

    def allow(op: Op, option: Option) -> bool:
        if op.role == "param":
            return not is_gathered(option) and (len(op.call.outs[0].shape) != 4 or not option.split)
        if any(len(t.shape) == 4 for t in op.tensors):
            return op.role != "op" or kind(op, option) in (SAMPLE, REPLICATE, PARTIAL)
        if any(op.weight) and op.flops > 0:
            return kind(op, option) in (PARAMETER, REPLICATE)
        return True

    return allow


def has_experts(program: Program) -> bool:
    """Whether some parameter is a stack of experts, or experts that are parameters of their own are stacked where they
    are used."""
    return bool(expert_counts(program))


def expert_counts(program: Program) -> frozenset[int]:
    """How many experts there are, for each such stack."""
    stacks = (
        op.node if op.role == "param" else edit.tensor_operands(op.node)[ops.UP]
        for op in program.ops.values()
        if (op.role == "param" and _is_stack(op.node)) or op.target is ops.experts
    )
    return frozenset(facts.shape(stack)[0] for stack in stacks)


def _is_stack(node: fx.Node) -> bool:
    """Whether `node` is three-dimensional and, views and casts aside, read by contractions that take stacks, or as the
    experts' biases are."""
    rank = facts.rank(node)
    if rank not in (2, 3):
        return False
    return any(
        (user.target in STACKS if rank == 3 else user.target is ops.experts and node in user.args[ops.BIAS :])
        or (len(edit.tensor_operands(user)) == 1 and facts.is_tensor(user) and _is_stack(user))
        for user in node.users
        if user.op == "call_function"
    )


def _beside_stack(node: fx.Node) -> bool:
    """Whether `node` feeds or reads a contraction with a stack: between two of them values are cut by experts too."""
    return any(
        other.target in STACKS and any(map(_rests_in_stack, edit.tensor_operands(other)))
        for other in (*node.all_input_nodes, *node.users)
    )


def _rests_in_stack(node: fx.Node) -> bool:
    """Whether `node` is a stack of experts, or a view or cast of one."""
    while node.op == "call_function" and len(operands := edit.tensor_operands(node)) == 1:
        node = operands[0]
    return node.op == "placeholder" and node.meta.get("role") == "param" and _is_stack(node)


def _cuts_first(option: Option, index: int) -> bool:
    """Whether the option cuts dim 0 of tensor `index` (operands, then outputs), and not in sections."""
    return (*option.ins, *option.outs)[index].value == "S0"


def _samples(op: Op, option: Option, ways: int) -> bool:
    if splits_samples(op, ways):
        return option.split
    if op.role in _NO_OPERATORS:
        return True
    batch = any(t.sizes[d] % ways == 0 for t, dims in zip(op.tensors, op.batch, strict=True) for d in dims)
    if batch:  # a sum may pass through (a reduction's views), but no weight is masked to make one
        return kind(op, option) == SAMPLE or option.factor == "P"
    return kind(op, option) in (REPLICATE, PARTIAL)


def _model(op: Op, option: Option, ways: int) -> bool:
    if op.role == "input":
        return not option.split
    if op.role == "param":
        return not is_gathered(option)
    if op.target is ops.experts and option.run:  # every rank has a slice of each expert, as of every other weight
        return False
    if attention.by_heads(op, ways):
        return attention.cuts_heads(op, option)
    if not op.head and _dense(op, ways):
        return kind(op, option) == PARAMETER or (not option.split and attention.makes_few_heads(op.node, ways))
    return op.role in _NO_OPERATORS or kind(op, option) in (PARAMETER, ATTRIBUTE, REPLICATE, PARTIAL)


def _dense(op: Op, ways: int) -> bool:
    """Whether `op` is a contraction with a weight that can be cut."""
    return op.flops > 0 and any(
        weight and len(t.shape) >= 2 and any(n % ways == 0 for n in t.sizes)
        for weight, t in zip(op.weight, op.call.ins, strict=True)
    )


def _norm_of_tokens(op: Op, ways: int) -> bool:
    """Whether `op` is a norm (or the root that makes one) over [batch, sequence, features] with a sequence that can be
    cut."""
    if op.role != "op" or not getattr(op.target, "__name__", "").startswith(("layer_norm", "rms_norm", "rsqrt")):
        return False
    tensor = op.call.ins[0]
    return (
        len(tensor.shape) == 3
        and not isinstance(tensor.shape[1], int)
        and 1 not in op.batch[0]
        and tensor.sizes[1] % ways == 0
    )


def over_vocabulary(op: Op) -> bool:
    """Whether `op` looks up rows of a table or takes a loss over classes, and can do so with the rows or the classes
    cut."""
    rule = rule_for(op.target, op.rules) if op.target in OVER_VOCABULARY else None
    return rule is not None and bool(parse(rule.text(op.call)).runs)


def _vocabulary_size(op: Op) -> int:
    return max(op.call.ins[0].sizes)
