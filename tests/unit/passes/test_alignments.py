"""CTC losses: one for each sample, of rows of targets, however the model has put these together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from passes import NORMALIZE, ops, run
from tests.helpers.export import B, assert_same, check_values, export_graph, targets

T, C, S = 8, 6, 3
FORMS = ("rows", "line", "line, lengths cast")


class Heard(nn.Module):
    """Scores of steps against the labels that are no padding, 0; blanks are 5."""

    def __init__(self, form: str = "rows", reduction: str = "mean", zero_infinity: bool = False) -> None:
        super().__init__()
        self.form, self.options, self.map = (
            form,
            {"reduction": reduction, "zero_infinity": zero_infinity},
            nn.Linear(4, C, dtype=torch.float64),
        )

    def forward(self, x, labels):
        scores, there = self.map(x).log_softmax(-1).transpose(0, 1), labels != 0
        wanted = labels if self.form == "rows" else labels.masked_select(there)
        lengths = there.sum(1).to(torch.int32).long() if "cast" in self.form else there.sum(-1)
        steps = torch.full((x.shape[0],), T, dtype=torch.long)
        loss = F.ctc_loss(scores, wanted, steps, lengths, blank=C - 1, **self.options)
        return loss.square().sum() if loss.dim() else loss


class Elsewhere(Heard):
    """As many labels as someone else says."""

    def forward(self, x, labels, lengths):
        scores = self.map(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(
            scores,
            labels.masked_select(labels != 0),
            torch.full((x.shape[0],), T, dtype=torch.long),
            lengths,
            blank=C - 1,
        )


def inputs(*, scattered: bool = False):
    labels = (
        torch.tensor([[1, 2, 3], [2, 2, 0], [4, 0, 0], [0, 0, 0]])
        if not scattered
        else torch.tensor([[1, 2, 3], [2, 0, 2], [0, 0, 4], [0, 1, 1]])
    )
    return {
        "x": torch.randn(4, T, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        "labels": labels,
    }


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_there_is_a_loss_for_each_sample(form, reduction, zero_infinity):
    torch.manual_seed(0)
    model, given = Heard(form, reduction, zero_infinity), inputs(scattered=form != "rows")
    gm = run(export_graph(model, (), given, {"x": {0: B}, "labels": {0: B}}), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, given, 1e-10)
    assert len(gm.graph.find_nodes(op="call_function", target=ops.ctc_each)) == 1 and not {
        "aten.ctc_loss.Tensor",
        "aten.masked_select.default",
    } & set(targets(gm))


def test_targets_whose_lengths_say_otherwise_are_refused():
    with pytest.raises(CaptureError, match="masked_select has a size that depends on the values of a tensor"):
        capture(Elsewhere(), (*inputs().values(), torch.tensor([3, 2, 1, 0])))
