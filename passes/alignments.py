"""CTC losses as one loss per sample, with targets [samples, length].

torch also accepts the concatenated targets of all samples, which models select by a mask: such a tensor cannot be split
by samples.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from passes import edit, facts, ops
from passes.tables import MEAN, NONE

aten = torch.ops.aten


def alignments(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops with values, one spelling of casts.
    does: CTC losses of batches become `ops.ctc_each`; a mean is then over each sample's targets, and over samples.
           Concatenated targets that a mask selects from a matrix become the first ones of its rows.
    gives: losses that can be split by samples. Losses with concatenated targets of any other origin stay as they
           are."""
    return edit.rewrite(gm, {aten.ctc_loss.Tensor: _by_samples})


def _by_samples(node: fx.Node) -> fx.Node | None:
    """A CTC loss of a batch as `ops.ctc_each` with its mean or sum; None (the call stays) where targets are in a line
    that cannot be read by samples."""
    given, call = edit.args_of(node), partial(edit.call, node)
    targets = _rows(node, given["targets"], given["target_lengths"])
    if facts.rank(given["log_probs"]) != 3 or targets is None:
        return None
    lengths = given["target_lengths"]
    options = given["blank"], given["zero_infinity"]
    each = call(ops.ctc_each, given["log_probs"], targets, given["input_lengths"], lengths, *options)
    if given["reduction"] == NONE:
        return each
    if given["reduction"] == MEAN:
        counts = edit.cast(call(aten.clamp_min.default, lengths, 1), facts.dtype(each), like=node)
        return call(aten.mean.default, call(aten.div.Tensor, each, counts))
    return call(aten.sum.default, each)


def _rows(node: fx.Node, targets: fx.Node, lengths: fx.Node) -> fx.Node | None:
    """`targets` as a row for each sample, [b, s]: as they are, or where each row of a mask picks as many as `lengths`
    says of a matrix, with those in front."""
    if facts.rank(targets) == 2:
        return targets
    if (picked := edit.call_of(targets, aten.masked_select.default)) is None:
        return None
    labels, mask = picked.args
    assert isinstance(labels, fx.Node) and isinstance(mask, fx.Node)
    if facts.shape(labels) != facts.shape(mask) or facts.rank(labels) != 2 or not _counts(lengths, mask):
        return None
    order = edit.call(
        node, aten.argsort.stable, edit.cast(mask, torch.int32, like=node), stable=True, dim=1, descending=True
    )
    return edit.call(node, aten.gather.default, labels, 1, order)


def _counts(lengths: Any, mask: Any) -> bool:
    """Whether `lengths` is how many places each row of a mask has."""
    while (cast := edit.call_of(lengths, aten.to.dtype)) is not None and not facts.is_float(cast):
        lengths = cast.args[0]
    counted = edit.call_of(lengths, aten.sum.dim_IntList)
    return counted is not None and counted.args[0] is mask and counted.args[1] in ([1], [-1])
