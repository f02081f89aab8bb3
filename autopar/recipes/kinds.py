"""What kind of split an option is, in FlexFlow's words (SOAP) and in those of the recipes."""

from __future__ import annotations

from autopar.layout import dim_of, is_shard
from autopar.problem.graph import Op
from autopar.rules.language import Option
from autopar.rules.tiles import tiles, weight_at

SAMPLE, OPERATOR, ATTRIBUTE, PARAMETER, REPLICATE, PARTIAL = (
    "sample",
    "operator",
    "attribute",
    "parameter",
    "replicate",
    "partial",
)


def kind(op: Op, option: Option) -> str:
    """sample, attribute, parameter, operator; replicate where nothing is cut; partial where a sum passes through.

    A split is of the *parameter* kind when a weight is cut with it, of the *sample* kind when the batch is, otherwise
    of the *attribute* kind (sequence, heads, height, width).
    """
    if option.factor.startswith("O("):
        return OPERATOR
    if not option.split:
        return PARTIAL if option.factor.startswith("P") else REPLICATE
    cut = _cut(option)
    if tiles(option.run) > 1:  # of the weight every rank uses all
        cut.pop(weight_at(option.run), None)
    if any(
        is_weight and index in cut and cut[index] not in op.batch[index] for index, is_weight in enumerate(op.weight)
    ):
        return PARAMETER  # a weight repeated for every sample (a class token) is cut by samples
    if any(dim in op.batch[index] for index, dim in cut.items()):
        return SAMPLE
    return ATTRIBUTE


def cuts_sequence(op: Op, option: Option) -> bool:
    """Whether the option cuts a dim of symbolic size other than the batch: the sequence."""
    cut = _cut(option)
    return any(not isinstance(op.tensors[i].shape[d], int) and d not in op.batch[i] for i, d in cut.items())


def _cut(option: Option) -> dict[int, int]:
    """Tensor index (operands, then outputs) -> the dim that is cut."""
    return {i: dim_of(u.value) for i, u in enumerate((*option.ins, *option.outs)) if is_shard(u.value)}
