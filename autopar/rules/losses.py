"""Losses. A sum over samples leaves a partial sum. A mean is replicated here: passes rewrite means as a sum over a
count."""

from __future__ import annotations

from typing import Any

import torch

from autopar.rules.arguments import given, line, overloads, rank_of, replicated, rule
from autopar.rules.language import Call
from autopar.rules.rule import Rule
from passes import ops
from passes.tables import MEAN, NONE

aten = torch.ops.aten


ELEMENTWISE = """binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss
    poisson_nll_loss smooth_l1_loss soft_margin_loss"""

OF_ROWS = "cosine_embedding_loss multi_margin_loss multilabel_margin_loss triplet_margin_loss"


def elementwise(call: Call) -> str:
    """One term per element of operands that broadcast against each other; then no reduction, a sum, or a mean
    (replicated)."""
    reduction = given(call)["reduction"]
    if reduction == MEAN:
        return replicated(call)
    return rule(["..." for _ in call.ins], ["..." if reduction == NONE else ""])


def classes(call: Call) -> str:
    """`logits [n, v, ...]` and labels `[n, ...]`: classes and their weights are whole; samples and positions split,
    except for a mean."""
    reduction, rank = given(call)["reduction"], rank_of(call)
    if reduction == MEAN or len(call.ins[1].shape) != rank - 1 or rank < 2:
        return replicated(call)
    labels = " ".join(f"d{d}" for d in range(rank) if d != 1)
    return rule([line(rank, {1: "v!"}), labels, *("v!" for _ in call.ins[2:])], [labels if reduction == NONE else ""])


def of_rows(call: Call) -> str:
    """One term per row of `[n, d]` operands (or `[d]`) and `[n]` operands; rows are whole, and so are weights of
    classes."""
    reduction, weight, rank = given(call)["reduction"], given(call).get("weight"), rank_of(call)
    wide = [t for t in call.ins if len(t.shape) == rank]
    numbers = [t for t in call.ins if len(t.shape) != rank and t is not weight]
    if (
        reduction == MEAN
        or rank < 2
        or any(t.shape[-1:] != call.ins[0].shape[-1:] for t in wide)
        or any(t.shape != call.ins[0].shape[:-1] for t in numbers)
    ):
        return replicated(call)
    ins = ["d!" if t is weight else "... d!" if len(t.shape) == rank else "..." for t in call.ins]
    return rule(ins, ["..." if reduction == NONE else ""])


def entropies(call: Call) -> str:
    """`logits [..., v]` and labels `[...]`, with or without weights of classes: a term per position."""
    return rule(["... v!", "...", *("v!" for _ in call.ins[2:])], ["..."])


def entropy(call: Call) -> str:
    """The sum of `entropies`. Without weights the classes split too, by the algorithm `cross_entropy`."""
    weights = call.ins[2:]
    return rule(["... v!" if weights else "... v@cross_entropy", "...", *("v!" for _ in weights)], [""])


RULES: dict[Any, Rule] = {
    **{op: Rule(elementwise) for op in overloads(ELEMENTWISE)},
    **{op: Rule(of_rows) for op in overloads(OF_ROWS)},
    aten.cross_entropy_loss.default: Rule(classes),
    aten.nll_loss.default: Rule(classes),
    aten.nll_loss_nd.default: Rule(classes),
    ops.count_valid: Rule("... -> "),
    ops.ctc_each: Rule("t! b c!, b s!, b, b -> b"),
    ops.cross_entropy_each: Rule(entropies),
    ops.cross_entropy_sum: Rule(entropy),
    ops.weigh_valid: Rule("..., v! -> "),
}
