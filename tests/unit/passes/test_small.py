"""Single passes on small modules: the form that comes out, and that values and gradients stay."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.nn import functional as F

from passes import facts
from tests.helpers.export import B, S, targets
from tests.helpers.small_graphs import data, normalized


def no_grad_region(m, x, y):
    h = x @ m.w
    with torch.no_grad():
        scale = h.abs().sum() + 1
    return h / scale


def test_no_grad_region_is_detached():
    gm = normalized(no_grad_region, data(4, 6))
    assert targets(gm).count("aten.detach.default") == 1


def test_grad_inside_no_grad_flows_like_in_the_model():
    def function(m, x, y):
        with torch.no_grad():
            h = x @ m.w
            with torch.enable_grad():
                g = x @ m.w
            h = h + 1
        return h * g

    normalized(function, data(4, 6))


MATMULS = {
    "linear": lambda m, x, y: F.linear(x, m.w, m.w[0]),
    "addmm": lambda m, x, y: torch.addmm(m.w[0], x.view(-1, 6), m.w, beta=0.5, alpha=2.0).view(x.shape),
    "mm_t": lambda m, x, y: torch.mm(x.view(-1, 6), m.w.t()).view(x.shape),
    "baddbmm": lambda m, x, y: torch.baddbmm(x, x, m.w.expand(x.shape[0], 6, 6), beta=2),
    "mlp": lambda m, x, y: F.linear(F.relu(F.linear(x.reshape(-1, 6), m.w, m.w[0])), m.w).view(x.shape[0], -1, 6),
}


@pytest.mark.parametrize("name", MATMULS)
def test_matmuls_lose_flattening(name):
    gm = normalized(MATMULS[name], data(4, 5, 6), dims={"x": {0: B, 1: S}} if name != "baddbmm" else None)
    found = targets(gm)
    assert not [item for item in found if item in ("aten.addmm.default", "aten.baddbmm.default", "aten.mm.default")]
    assert "aten.reshape.default" not in found


PAIRS_OF_ROWS = {
    "linear": lambda m, x, y: (lambda rows: F.linear(rows, rows))(x.reshape(-1, 6) * 2),
    "matmul": lambda m, x, y: (lambda rows: F.log_softmax(rows @ rows.T, 0))(
        F.normalize(x @ m.w, dim=-1).flatten(0, 1)
    ),
}


@pytest.mark.parametrize("name", PAIRS_OF_ROWS)
def test_products_of_all_pairs_of_flattened_rows_stay_flattened(name):
    gm = normalized(PAIRS_OF_ROWS[name], data(4, 5, 6), dims={"x": {0: B, 1: S}})
    assert "aten.linear.default" in targets(gm)


FLATTENED_EMPTY = {
    "flattened to no columns": lambda m, x, y: F.linear(x, m.w).sum() + x.new_zeros(3, 0, 6).flatten(1).sum(),
    "heads without width": lambda m, x, y: x.new_zeros(4, 3, 0, 6).reshape(0, 18).sum() + (x @ m.w).sum(),
    "rows without width": lambda m, x, y: F.relu(x[..., :0].reshape(20, 0)).reshape(4, 5, 0).sum() + (x @ m.w).sum(),
}


@pytest.mark.parametrize("name", FLATTENED_EMPTY)
def test_what_is_empty_is_not_flattened_elsewhere(name):
    normalized(FLATTENED_EMPTY[name], data(4, 5, 6))


def test_batch_and_sequence_stay_apart_where_there_is_one_head():
    """Rows of one head, flattened for a product and back to other sizes than before: without the dim of heads."""
    gm = normalized(
        lambda m, x, y: F.linear(x.unsqueeze(2).reshape(-1, 6), m.w).view(x.shape),
        data(4, 5, 6),
        dims={"x": {0: B, 1: S}},
    )
    assert all(
        size.is_Atom
        for node in gm.graph.nodes
        if facts.is_tensor(node)
        for size in map(sympy.sympify, facts.shape(node))
    )


def test_convolution_bias_is_added_apart():
    gm = normalized(lambda m, x, y: F.conv2d(x, m.w.view(6, 6, 1, 1), m.w[0]), data(2, 6, 3, 3))
    convolution = next(node for node in gm.graph.nodes if "conv2d" in str(node.target))
    assert convolution.args[2] is None


SPLITS = {
    "chunk": lambda m, x, y: sum(part * i for i, part in enumerate((x @ m.w).chunk(3, -1))),
    "split": lambda m, x, y: sum(part * i for i, part in enumerate((x @ m.w).split(2, -1))),
    "sizes": lambda m, x, y: [part.sum() for part in (x @ m.w).split([1, 5], -1)],
    "unbind": lambda m, x, y: sum(part * i for i, part in enumerate((x @ m.w).view(-1, 3, 2).unbind(1))),
    "slices": lambda m, x, y: (lambda h: (h[..., :2].sum(), h[..., 2:-1].sum(), h[..., -1:].sum()))(x @ m.w),
}


@pytest.mark.parametrize("name", SPLITS)
def test_cuts_become_one_split(name):
    found = targets(normalized(SPLITS[name], data(4, 6)))
    assert found.count("aten.split_with_sizes.default") == 1
    assert not set(found) & {"aten.chunk.default", "aten.split.Tensor", "aten.unbind.int", "aten.slice.Tensor"}


def test_slices_that_leave_something_out_stay():
    found = targets(normalized(lambda m, x, y: (lambda h: (h[:, :2], h[:, 3:]))(x @ m.w), data(4, 6)))
    assert found.count("aten.slice.Tensor") == 2


def test_all_dims_turned_are_a_permutation():
    assert targets(normalized(lambda m, x, y: (x @ m.w).T, data(4, 6))) == [
        "aten.matmul.default",
        "aten.permute.default",
    ]


def test_broadcasts_are_expands_of_what_is_smaller():
    loss = normalized(lambda m, x, y: F.mse_loss(x @ m.w, y), data(4, 6), data(4, 6), dims={"x": {0: B}, "y": {0: B}})
    assert not {"aten.broadcast_tensors.default", "aten.expand.default"} & set(targets(loss))
    smaller = normalized(
        lambda m, x, y: torch.cat(torch.broadcast_tensors(x @ m.w, y)),
        data(1, 6),
        data(4, 6),
        dims={"x": {}, "y": {0: B}},
    )
    assert targets(smaller).count("aten.expand.default") == 1


def test_noops_go():
    def function(m, x, y):
        h = F.dropout((x @ m.w).contiguous().clone(), 0.0).to(torch.float64)[:, :, 0:]
        return h.view(h.shape).expand(-1, -1, -1).transpose(1, 1) + 0

    assert targets(normalized(function, data(4, 5, 6))) == ["aten.matmul.default"]


def test_means_are_sums():
    gm = normalized(lambda m, x, y: (x @ m.w).mean((0, 1)) + x.mean(), data(4, 5, 6), dims={"x": {0: B, 1: S}})
    assert not [name for name in targets(gm) if "mean" in name]


LABELS = torch.tensor([[1, 2, -100], [0, 5, 3], [-100, -100, 4], [2, 2, 2]])
CROSS_ENTROPIES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smooth": {"label_smoothing": 0.1},
    "ignore": {"ignore_index": 2},
}


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_cross_entropy(name):
    options = CROSS_ENTROPIES[name]
    labels = LABELS.clamp(min=0) if name == "ignore" else LABELS

    def function(m, x, y):
        return F.cross_entropy((x @ m.w).view(-1, 6), y.view(-1), **options)

    gm = normalized(
        function,
        data(4, 3, 6),
        labels,
        dims={"x": {0: B, 1: S}, "y": {0: B, 1: S}} if name in ("mean", "ignore") else None,
    )
    if name != "none":
        assert "aten.reshape.default" not in targets(gm)
    assert "aten.cross_entropy_loss.default" not in targets(gm)


def test_cross_entropy_of_images_and_nll():
    labels = torch.randint(0, 6, (2, 3, 3))
    normalized(lambda m, x, y: F.cross_entropy(x * m.w.sum(), y), data(2, 6, 3, 3), labels)
    gm = normalized(lambda m, x, y: F.nll_loss(F.log_softmax(x @ m.w, -1), y), data(4, 6), LABELS[:, 0])
    assert "aten.log_softmax.int" not in targets(gm)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits])
def test_mean_losses_are_sums_over_numbers(loss):
    gm = normalized(lambda m, x, y: loss(x @ m.w, y), data(4, 6), data(4, 6).sigmoid(), dims={"x": {0: B}, "y": {0: B}})
    assert targets(gm)[-1] == "aten.div.Tensor"


def test_cross_entropy_with_class_weights_is_over_their_sum():
    gm = normalized(lambda m, x, y: F.cross_entropy(x @ m.w, y, weight=m.w[0].abs().detach()), data(4, 6), LABELS[:, 0])
    assert "aten.cross_entropy_loss.default" not in targets(gm) and "weigh_valid" in str(gm.graph)


def attends(repeated=(True, True), each=3, **named):
    def function(m, x, y):
        q, k = x, x[:, ::each]
        k, v = (
            t[:, :, None].expand(2, 2, each, 5, 6).reshape(2, 2 * each, 5, 6) if wide else x
            for t, wide in zip((k, k @ m.w), repeated, strict=True)
        )
        return F.scaled_dot_product_attention(q @ m.w, k, v, **named)

    return function


def interleaved(m, x, y):
    k, v = ((x[:, ::3] @ w).repeat_interleave(3, dim=1) for w in (m.w, m.w.T))
    return F.scaled_dot_product_attention(x, k, v, is_causal=True)


@pytest.mark.parametrize("function", [attends(is_causal=True), interleaved], ids=["expanded", "interleaved"])
def test_repeated_key_heads_become_groups(function):
    gm = normalized(function, data(2, 6, 5, 6))
    assert "aten.expand.default" not in targets(gm)
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function" and "scaled_dot" in str(n.target)]
    assert node.kwargs["enable_gqa"] and node.args[1].meta["val"].shape[1] == node.args[2].meta["val"].shape[1] == 2


@pytest.mark.parametrize(
    "function",
    [
        attends(repeated=(True, False)),
        attends(attn_mask=torch.randn(5, 5, dtype=torch.float64)),
    ],
    ids=["values of their own", "a mask"],
)
def test_repeated_heads_stay_where_groups_would_not_do_or_no_fused_kernel_takes_them(function):
    gm = normalized(function, data(2, 6, 5, 6))
    (node,) = [n for n in gm.graph.nodes if n.op == "call_function" and "scaled_dot" in str(n.target)]
    assert not node.kwargs.get("enable_gqa") and node.args[1].meta["val"].shape[1] == 6


def test_copies_of_a_dim_of_size_one_are_expanded():
    gm = normalized(
        lambda m, x, y: m.w[:1].unsqueeze(0).repeat(x.shape[0], 2, 1) * x.repeat(1, 2, 1),
        data(4, 1, 6),
        dims={"x": {0: B}},
    )
    assert targets(gm).count("aten.repeat.default") == 0
    assert targets(normalized(lambda m, x, y: x.repeat(2, 1) @ m.w, data(4, 6))).count("aten.repeat.default") == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: F.linear(x.unflatten(-1, (3, 2)).permute(1, 0, 2, 3).reshape(-1, 6), m.w).reshape(
            x.shape[1], x.shape[0], 6
        ),
        lambda m, x, y: F.linear(
            x.unflatten(-1, (3, 2)).transpose(1, 2).flatten(0, 1).transpose(0, 1).reshape(-1, 6), m.w
        ).reshape(x.shape[1], x.shape[0], 6),
    ],
    ids=["heads", "samples by heads"],
)
def test_heads_and_samples_that_are_flattened_in_one_step(function):
    """As torch.nn.MultiheadAttention does before its last map."""
    gm = normalized(function, data(4, 5, 6), dims={"x": {0: B, 1: S}})
    (product,) = [n for n in gm.graph.nodes if "linear" in str(n.target)]
    assert len(product.meta["val"].shape) == 3


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x, y: m.w.repeat_interleave(2, 0)[:5] @ x.mT,
        lambda m, x, y: x.repeat_interleave(2, -2, output_size=2 * x.shape[1]) @ m.w,
        lambda m, x, y: x.repeat_interleave(3, 0) @ m.w,
        lambda m, x, y: x.repeat_interleave(2) * m.w.sum(),
    ],
    ids=["rows", "given size", "samples", "flat"],
)
def test_repeated_indices_are_expanded(function):
    gm = normalized(function, data(4, 5, 6), dims={"x": {0: B, 1: S}})
    assert not [name for name in targets(gm) if "repeat" in name] and targets(gm).count("aten.expand.default") == 1


def test_sizes_of_another_tensor_are_an_expansion():
    gm = normalized(
        lambda m, x, y: (x @ m.w).sum(-1, keepdim=True).expand_as(x) * x, data(4, 5, 6), dims={"x": {0: B, 1: S}}
    )
    assert "aten.expand_as.default" not in targets(gm)


@pytest.mark.parametrize(
    "back",
    [
        lambda flat, x: flat.unflatten(0, (x.shape[0], x.shape[1])),
        lambda flat, x: flat.unflatten(0, (x.shape[0], -1)),
        lambda flat, x: flat.unflatten(0, (-1, x.shape[1])),
        lambda flat, x: flat.mT.unflatten(-1, x.shape[:2]).permute(1, 2, 0),
        lambda flat, x: flat.reshape_as(x),
        lambda flat, x: flat.view_as(x),
    ],
    ids=["all sizes", "samples", "positions", "last", "reshape as", "view as"],
)
def test_samples_and_positions_are_one_dim_and_two_again(back):
    gm = normalized(lambda m, x, y: back(x.flatten(0, 1) @ m.w, x) * x, data(4, 5, 6), dims={"x": {0: B, 1: S}})
    assert not {"aten.unflatten.int", "aten.reshape_as.default", "aten.view_as.default"} & set(targets(gm))


def test_copies_for_each_sample_are_expanded():
    gm = normalized(
        lambda m, x, y: (m.w.reshape(2, 3, 6).repeat(x.size(0), 1, 1).reshape(-1, 6, 6) @ x.mT).sum(),
        data(4, 5, 6),
        dims={"x": {0: B, 1: S}},
    )
    assert "aten.repeat.default" not in targets(gm) and targets(gm).count("aten.expand.default") == 1


def test_every_concatenation_is_a_cat():
    gm = normalized(
        lambda m, x, y: torch.concat((x @ m.w, x), -1) + torch.concatenate((x, x), -1), data(4, 6), dims={"x": {0: B}}
    )
    assert targets(gm).count("aten.cat.default") == 2


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda m, x, y: x.unsqueeze(1).squeeze() @ m.w, ["aten.squeeze.dims"]),
        (lambda m, x, y: (x @ m.w).squeeze(0), []),
        (lambda m, x, y: (x @ m.w)[:, None].cumsum(1).squeeze(1), ["aten.squeeze.dim"]),
        (lambda m, x, y: (x @ m.w)[:, None].squeeze(1), []),
        (lambda m, x, y: (x @ m.w)[:, None].squeeze((0, 1)), ["aten.squeeze.dims"]),
    ],
    ids=["all", "of samples", "one", "put there", "samples too"],
)
def test_dims_that_go_are_named(function, wanted):
    """A rank that has one sample must not lose the dim of samples."""
    gm = normalized(function, data(4, 6), dims={"x": {0: B}})
    squeezed = [node for node in gm.graph.nodes if str(node.target).startswith("aten.squeeze.")]
    assert [str(node.target) for node in squeezed] == wanted
    assert all(node.args[1] in (1, [1]) for node in squeezed)
