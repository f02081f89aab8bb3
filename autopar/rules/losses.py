"""Losses. A sum over samples leaves a partial sum; a mean must stay whole (passes write means as sum over number)."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import given, line, overloads, rank_of, replicated, rule
from autopar.rules.language import Call
from autopar.rules.rule import Rule
from passes import ops

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # the reduction argument of ATen losses

ELEMENTWISE = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
    poisson_nll_loss smooth_l1_loss soft_margin_loss"""

OF_ROWS = "cosine_embedding_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss"


def elementwise(call: Call) -> str:
    """One term per element, then no reduction, a sum, or a mean."""
    reduction = given(call)["reduction"]
    if reduction == NONE:
        return rule(["..." for _ in call.ins], ["..."])
    ranks = [len(t.shape) for t in call.ins]
    if reduction == MEAN or any(t.shape != call.ins[0].shape for t in call.ins):
        return replicated(call)
    return rule([line(r) for r in ranks], [""])


def classes(call: Call) -> str:
    """`logits [n, v, ...]` against labels `[n, ...]`: classes are whole; samples split except under a mean."""
    reduction, rank = given(call)["reduction"], rank_of(call)
    if reduction == MEAN or len(call.ins) > 2 or len(call.ins[1].shape) != rank - 1 or rank < 2:
        return replicated(call)
    labels = " ".join(f"d{d}" for d in range(rank) if d != 1)
    return rule([line(rank, {1: "v!"}), labels], [labels if reduction == NONE else ""])


def of_rows(call: Call) -> str:
    """One term per row of matrices, and of what has one number for each row; rows are whole."""
    reduction = given(call)["reduction"]
    if reduction == MEAN or given(call).get("weight") is not None or any(len(t.shape) > 2 or t.shape[:1] != call.ins[0].shape[:1] for t in call.ins) or rank_of(call) != 2:
        return replicated(call)
    return rule(["n d!" if len(t.shape) == 2 else "n" for t in call.ins], ["n" if reduction == NONE else ""])


RULES: dict[Any, Rule] = {
    **{op: Rule(elementwise) for op in overloads(ELEMENTWISE)},
    **{op: Rule(of_rows) for op in overloads(OF_ROWS)},
    aten.cross_entropy_loss.default: Rule(classes),
    aten.nll_loss.default: Rule(classes),
    aten.nll_loss_nd.default: Rule(classes),
    ops.count_valid: Rule("... -> "),
    ops.cross_entropy_each: Rule("... v!, ... -> ..."),
    ops.cross_entropy_sum: Rule("... v@cross_entropy, ... -> "),
}
