"""Means of losses as sums over the number of terms: the same value, and nothing else where the terms are not those of
the first operand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from passes import NORMALIZE, edit, facts, ops, run
from passes.losses import LOSSES, MEANS
from tests.helpers.export import B, assert_same, check_values, export_graph, run_graph, targets

D = 3
FORMS = {
    "binary_cross_entropy": lambda x, y, c: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "binary_cross_entropy_with_logits": lambda x, y, c: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    ),
    "cosine_embedding_loss": lambda x, y, c: F.cosine_embedding_loss(x, y, x.sign()[:, 0].detach(), margin=0.2),
    "hinge_embedding_loss": lambda x, y, c: F.hinge_embedding_loss(x, y.sign()),
    "huber_loss": lambda x, y, c: F.huber_loss(x, y, delta=0.4),
    "kl_div": lambda x, y, c: F.kl_div(x.log_softmax(-1), y.log_softmax(-1), log_target=True),
    "l1_loss": lambda x, y, c: F.l1_loss(x, y),
    "margin_ranking_loss": lambda x, y, c: F.margin_ranking_loss(x, y, y.sign()),
    "mse_loss": lambda x, y, c: F.mse_loss(x, y),
    "multi_margin_loss": lambda x, y, c: F.multi_margin_loss(x, c),
    "multilabel_margin_loss": lambda x, y, c: F.multilabel_margin_loss(x, torch.stack([c, c * 0 - 1, c * 0 - 1], 1)),
    "poisson_nll_loss": lambda x, y, c: F.poisson_nll_loss(x, y.abs(), full=True),
    "smooth_l1_loss": lambda x, y, c: F.smooth_l1_loss(x, y, beta=0.3),
    "soft_margin_loss": lambda x, y, c: F.soft_margin_loss(x, y.sign()),
    "triplet_margin_loss": lambda x, y, c: F.triplet_margin_loss(x, y, x.flip(1) * 2, swap=True),
}


class Loss(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.loss, self.map = loss, nn.Linear(D, D, dtype=torch.float64)

    def forward(self, x, y, c):
        return self.loss(self.map(x), y, c)


def normalized(loss):
    torch.manual_seed(0)
    model = Loss(loss)
    inputs = {
        "x": torch.randn(4, D, dtype=torch.float64),
        "y": torch.randn(4, D, dtype=torch.float64),
        "c": torch.tensor([0, 2, 1, 0]),
    }
    gm = run(export_graph(model, (), inputs, {name: {0: B} for name in inputs}), NORMALIZE)
    check_values(gm)
    assert_same(gm, model, inputs, 1e-10)
    return gm


def test_every_loss_has_a_form():
    assert {str(target).split(".")[1] for target in MEANS} == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_a_mean_is_a_sum_over_the_number_of_terms(name):
    gm = normalized(FORMS[name])
    (loss,) = [node for node in gm.graph.nodes if node.target in MEANS]
    (user,) = loss.users
    assert str(loss.target).split(".")[1] == name and user.target is torch.ops.aten.div.Tensor
    assert 2 in loss.args


@pytest.mark.parametrize("name", FORMS)
def test_sums_stay(name):
    """`reduction="sum"` of the same operands."""
    reduced = getattr(F, name)

    def summed(*args, **kwargs):
        return reduced(*args, **{**kwargs, "reduction": "sum"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, name, summed)
        gm = normalized(FORMS[name])
    assert sum(node.target in MEANS for node in gm.graph.nodes) == 1 and "aten.div.Tensor" not in targets(gm)


def test_a_mean_over_more_terms_than_the_first_operand_has_stays():
    gm = normalized(lambda x, y, c: torch.ops.aten.huber_loss(x[:, :1], y))
    assert sum(node.target in MEANS for node in gm.graph.nodes) == 1 and "aten.div.Tensor" not in targets(gm)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, c: F.cross_entropy(x, c, reduction="none"),
        lambda x, c: F.nll_loss(x.log_softmax(-1), c, reduction="none"),
        lambda x, c: F.cross_entropy(x, c, x.new_ones(D), reduction="none"),
        lambda x, c: F.nll_loss(x, c, reduction="none"),
    ],
)
def test_losses_of_each_row_have_a_row_each(loss):
    """On meta, where models are captured, and torch takes one of their arguments for another."""
    gm = capture(
        nn.Linear(D, D),
        (torch.zeros(4, D), torch.zeros(4, dtype=torch.long)),
        loss_fn=lambda x, c: (loss(x, c)[:, None] * x).sum(),
    ).gm
    assert list(gm.meta["symbols"]) == ["b"]
    each = next(node for node in gm.graph.nodes if "cross_entropy" in node.name or "nll_loss" in node.name)
    assert str(facts.shape(each)) == "(b,)"


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y, way: F.hinge_embedding_loss(x, y.sign(), reduction=way),
        lambda x, y, way: F.margin_ranking_loss(x, y, y.sign(), 0.1, reduction=way),
    ],
)
@pytest.mark.parametrize("way", ["mean", "sum"])
def test_losses_that_torch_takes_by_words_are_captured(loss, way):
    gm = capture(nn.Linear(D, D), (torch.zeros(4, D), torch.zeros(4, D)), loss_fn=lambda x, y: loss(x, y, way)).gm
    assert list(gm.meta["symbols"]) == ["b"] and sum(node.target in MEANS for node in gm.graph.nodes) == 1
    assert ("aten.div.Tensor" in targets(gm)) is (way == "mean")


SHARES = torch.linspace(0.2, 2, D, dtype=torch.float64)
ENTROPIES = {
    "weights": lambda x, y, c, way: F.cross_entropy(x, c, SHARES, ignore_index=2, reduction=way),
    "weights and smoothing": lambda x, y, c, way: F.cross_entropy(
        x, c, SHARES, ignore_index=2, label_smoothing=0.2, reduction=way
    ),
    "of images": lambda x, y, c, way: F.cross_entropy(
        x[:, :, None] * y[:, None], c[:, None].expand(-1, D), SHARES, ignore_index=2, reduction=way
    ),
    "nll": lambda x, y, c, way: F.nll_loss(x - 1, c, ignore_index=2, reduction=way),
    "nll with weights": lambda x, y, c, way: F.nll_loss(x - 1, c, SHARES, ignore_index=2, reduction=way),
    "nll of a log-softmax": lambda x, y, c, way: F.nll_loss(x.log_softmax(1), c, SHARES, reduction=way),
    "probabilities": lambda x, y, c, way: F.cross_entropy(x, y.softmax(-1), reduction=way),
    "probabilities with weights": lambda x, y, c, way: F.cross_entropy(
        x, y.softmax(-1), SHARES, label_smoothing=0.2, reduction=way
    ),
    "probabilities of images": lambda x, y, c, way: F.cross_entropy(
        x[:, :, None] * y[:, None], y[:, :, None].expand(-1, -1, D), SHARES, reduction=way
    ),
}


@pytest.mark.parametrize("way", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ENTROPIES)
def test_no_entropy_is_a_mean_of_its_own(name, way):
    gm = normalized(lambda x, y, c: ENTROPIES[name](x, y, c, way))
    kept = [edit.args_of(node)["reduction"] for node in gm.graph.nodes if node.target in LOSSES]
    assert all(reduction != 1 for reduction in kept) and not any(
        node.target is torch.ops.aten.cross_entropy_loss.default for node in gm.graph.nodes
    )


def narrow(loss, dtype):
    """The graph of a loss of a model on meta in `dtype`, and the dtype that torch gives the loss."""
    with torch.device("meta"):
        model = Loss(loss).to(dtype)
        inputs = {
            "x": torch.randn(4, D, dtype=dtype),
            "y": torch.randn(4, D, dtype=dtype),
            "c": torch.zeros(4, dtype=torch.long),
        }
    gm = export_graph(model, (), inputs, {name: {0: B} for name in inputs})
    wanted = facts.dtype(edit.results(gm)[0])
    return run(gm, NORMALIZE), wanted


NARROW = {
    **FORMS,
    **{
        name: lambda x, y, c, loss=loss: loss(x, y, c, "mean")
        for name, loss in ENTROPIES.items()
        if name in ("nll", "probabilities")
    },
    "classes": lambda x, y, c: F.cross_entropy(x, c),
    "classes with weights": lambda x, y, c: F.cross_entropy(x, c, x.new_ones(D)),
    "nll with weights": lambda x, y, c: F.nll_loss(x - 1, c, x.new_ones(D)),
    "nll of a wider log-softmax": lambda x, y, c: F.nll_loss(x.log_softmax(-1, dtype=torch.float32), c),
    "nll of a log-softmax": lambda x, y, c: F.nll_loss(x.log_softmax(-1), c),
    "nll of a wider log-softmax with weights": lambda x, y, c: F.nll_loss(
        x.log_softmax(-1, dtype=torch.float32), c, x.new_ones(D).float()
    ),
}
ADDED = {
    *MEANS,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.sum.default,
    ops.cross_entropy_sum,
    ops.count_valid,
    ops.weigh_valid,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
# its form has numbers in float64
@pytest.mark.parametrize("name", [name for name in NARROW if name != "binary_cross_entropy_with_logits"])
def test_means_of_narrow_terms_are_of_the_dtype_that_they_have_on_one_device(name, dtype):
    """What is added up in float16, or counted, may leave its range where the mean does not."""
    gm, wanted = narrow(NARROW[name], dtype)
    assert facts.dtype(edit.results(gm)[0]) == wanted
    summed = [node for node in gm.graph.nodes if node.target in ADDED and facts.shape(node) == ()]
    assert summed and (dtype != torch.float16 or {facts.dtype(node) for node in summed} == {torch.float32})


@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        lambda x, target: F.cross_entropy(x, target.argmax(-1)),
        lambda x, target: F.nll_loss(x.log_softmax(-1), target.argmax(-1)),
        lambda x, target: F.cross_entropy(x, target.softmax(-1)),
    ],
)
def test_means_of_more_terms_than_float16_counts(loss):
    torch.manual_seed(0)
    x, y = torch.randn(70_000, 8).half(), torch.randn(70_000, 8).half()
    model = nn.Linear(8, 8)
    gm = capture(model.half(), (x, y), loss_fn=loss).gm
    weights = {name: value.detach().float() for name, value in model.named_parameters()}
    wanted = loss(F.linear(x.float(), weights["weight"], weights["bias"]), y.float())
    (found,) = [
        value
        for value, about in zip(run_graph(gm, model, {"input": x, "target": y}), gm.meta["outputs"], strict=True)
        if about["kind"] == "loss"
    ]
    found.backward()
    assert float(found.detach()) == pytest.approx(float(wanted), rel=2e-3) and 0 < float(
        model.weight.grad.norm()
    ) < float("inf")


def test_all_labels_ignored():
    """torch divides nothing by nothing."""
    gm = normalized(
        lambda x, y, c: (
            F.cross_entropy(x, c * 0, SHARES, ignore_index=0, reduction="sum")
            + F.cross_entropy(x, c * 0, SHARES, ignore_index=0).nan_to_num(7.0)
        )
    )
    assert "weigh_valid" in str(gm.graph)


def test_one_label_with_weights_of_classes():
    """Weights were indexed by the label as by a number that no graph knows."""
    assert "weigh_valid" in str(normalized(lambda x, y, c: F.cross_entropy(x[0], c[0], SHARES)).graph)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: 1.0 - torch.linalg.slogdet(x.mT @ x)[1],
        lambda x: x.flatten().max(0).values + 2.0,
        lambda x: torch.std_mean(x, dim=(0, 1))[0],
        lambda x: x.aminmax().max,
    ],
)
def test_a_loss_may_be_one_of_several_results(loss):
    """Numbers are looked for on the way to it, and an operator of several results has no sizes of its own."""
    gm = capture(nn.Linear(D, D), (torch.zeros(4, D),), loss_fn=loss).gm
    assert facts.shape(edit.results(gm)[0]) == ()
