"""What strategies by hand do with attention: heads are cut, and with too few key heads their projections may be
whole."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.layout import dim_of, is_shard
from autopar.problem.graph import ATTENTION, Op
from autopar.rules.language import Option
from passes import edit, facts, ops

aten = torch.ops.aten
QUERY, KEY, VALUE = "query", "key", "value"
CONTRACTIONS = (
    ATTENTION,
    aten.linear.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.einsum.default,
    ops.affine,
)


def by_heads(op: Op, ways: int) -> bool:
    """Whether `op` is an attention whose query heads can be cut `ways` ways."""
    return op.target is ATTENTION and _divide(op.call.ins[0].sizes, ways)


def cuts_heads(op: Op, option: Option) -> bool:
    """Whether `option` of an attention cuts its query heads."""
    value = option.ins[0].value
    return is_shard(value) and dim_of(value) == len(op.call.ins[0].shape) - 3


def makes_few_heads(node: fx.Node, ways: int) -> bool:
    """Whether all that is made of `node` are keys and values with too few heads for `ways` ranks, of attentions whose
    query heads are enough."""
    made, todo = {node}, [node]
    while todo:
        value = todo.pop()
        attentions = [user for user in value.users if user.target is ATTENTION]
        others = [user for user in value.users if user.target is not ATTENTION]
        if not value.users or not all(_few(user, value, ways) for user in attentions) or not all(map(_passes, others)):
            return False
        todo += [user for user in others if user not in made]
        made.update(others)
    return True


def _few(attention: fx.Node, node: fx.Node, ways: int) -> bool:
    """Whether `node` is key or value of `attention`, with too few heads for `ways` ranks, for which its queries have
    enough."""
    given = edit.args_of(attention)
    enough = _divide(facts.shape(given[QUERY]), ways) and given[QUERY] is not node
    return enough and node in (given[KEY], given[VALUE]) and not _divide(facts.shape(node), ways)


def _passes(node: fx.Node) -> bool:
    """Whether `node` hands its operands on without a contraction."""
    return node.target is operator.getitem or (node.op == "call_function" and node.target not in CONTRACTIONS)


def _divide(shape: tuple[facts.Size, ...], ways: int) -> bool:
    return len(shape) > 2 and isinstance(shape[-3], int) and shape[-3] % ways == 0
