"""Rows that are split by how often each number is there: pieces that are joined again are operators on all rows."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.errors import CaptureError
from passes import facts, ops
from tests.helpers.export import run_graph
from tests.helpers.pieces import PIECES, D, E, Split


def inputs(batch, alike=False):
    return (
        torch.randn(batch, 1 if alike else 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(batch))
        .expand(batch, 6, D)
        .contiguous()
    )


@pytest.mark.parametrize("case", PIECES)
def test_pieces_are_a_layer_of_experts(case):
    torch.manual_seed(0)
    model = PIECES[case]().double()
    captured = capture(model, (inputs(4),))
    layers = [node for node in captured.gm.graph.nodes if node.target is ops.experts]
    assert len(layers) == 1 and [facts.rank(node) for node in layers[0].args[:3]] == [3, 3, 3]
    assert (
        not captured.evaluation.why
        and not captured.evaluation.differs
        and not any("branches" in note for note in captured.notes)
    )
    for x in (inputs(3), inputs(2, alike=True)):  # experts that nobody chose have no rows
        wanted, (got, *_) = model(x), run_graph(captured.gm, model, {"x": x})
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(
            *(torch.autograd.grad(loss, list(model.parameters())) for loss in (got, wanted)), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_sizes_of_others_are_no_experts():
    """The pieces are products of all rows all the same; which rows go where is what it was."""
    torch.manual_seed(0)
    model, x = (
        Split(sizes=lambda chosen, scores: torch.bincount(chosen.flatten(), minlength=E).flip(0).tolist()).double(),
        inputs(4),
    )
    captured = capture(model, (x,))
    targets = [node.target for node in captured.gm.graph.nodes]
    assert ops.experts not in targets and targets.count(ops.grouped_matmul) == 2
    torch.testing.assert_close(run_graph(captured.gm, model, {"x": x})[0], model(x), rtol=1e-10, atol=1e-10)


OTHERS = {
    "more dims": {"rows": lambda rows: torch.stack((rows, rows * 2.0), 1)},
    "another operator": {"other": True},
    "in another order": {"joined": lambda made: made[::-1]},
    "one left out": {"joined": lambda made: [made[0], made[0], *made[2:]]},
    "each by its own mean": {"joined": lambda made: [each - each.mean(0) for each in made]},
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_pieces_are_refused_with_the_line(what):
    with pytest.raises(CaptureError, match=r"pieces\.py:\d+\): the size u1 depends on what tensors hold"):
        capture(Split(**OTHERS[what]), (inputs(4).float(),))
