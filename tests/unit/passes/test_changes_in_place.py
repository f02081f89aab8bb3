"""What is changed in place, or written to a given tensor, is a new value."""

from __future__ import annotations

import pytest
import torch

from passes import NORMALIZE, run
from tests.helpers.export import B, export_graph, targets
from tests.helpers.small_graphs import Fn, data, normalized

INPLACE = {
    "plain": lambda m, x, y: (x @ m.w).add_(1).mul_(2),
    "powers of tensors": lambda m, x, y: (x @ m.w).abs_().pow_(x.square().mean()),
    "floors": lambda m, x, y: (x @ m.w).detach().floor_divide_(x.square().sum() + 1) + x @ m.w,
    "all drawn": lambda m, x, y: x @ m.w * torch.zeros_like(x @ m.w).bernoulli_(1.0),
    "mask": lambda m, x, y: (x @ m.w).masked_fill_(x > 0, 3.0),
    "index_put": lambda m, x, y: (x @ m.w).clone().index_put_([torch.tensor([0, 2])], x[:2].clone()),
    "div": lambda m, x, y: (lambda h: h.div_(h.sum(-1, keepdim=True).detach()))(x @ m.w + 20.0),
}


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_ops(name):
    normalized(INPLACE[name], data(4, 6))


def test_parts_of_expanded_dims_are_what_was_expanded():
    def function(m, x, y):
        one = m.seen.unsqueeze(0).expand(x.shape[0], -1)
        return x @ m.w + one[:1] + one[1:2] + one[:, 2:4].sum() + one[-3:].sum(0)

    gm = normalized(function, data(4, 6))
    sliced = [node for node in gm.graph.nodes if str(node.target) == "aten.slice.Tensor"]
    assert [node.args[1] for node in sliced] == [1]


def test_writes_into_slices_are_scattered():
    def function(m, x, y):
        h = (x @ m.w).clone()
        h[:, 1:] = h[:, :-1].clone()
        h[..., 0] = 7
        return h

    gm = normalized(function, data(4, 6))
    assert any("scatter" in name for name in targets(gm))


def test_changed_buffer_is_an_output():
    def function(m, x, y):
        m.seen.add_(x.sum(0))
        return (x @ m.w) * m.seen

    gm = normalized(function, data(4, 6))
    assert [entry for entry in gm.meta["outputs"] if entry["kind"] == "mutation"] == [
        {"name": "seen", "kind": "mutation", "target": "seen"}
    ]


def test_shared_memory_is_refused_with_its_place():
    def function(m, x, y):
        h = (x @ m.w).clone()
        other = h.unfold(0, 2, 1)
        h.add_(1)
        return h + other.sum()

    with pytest.raises(ValueError, match=r"small_graphs\.py:\d+.*clone") as caught:
        run(export_graph(Fn(function), (data(6, 6),)), NORMALIZE)
    assert "in pass inplace" in caught.value.__notes__[0]


def _of_the_whole(m, x, y):
    h = (x @ m.w).clone()
    other, rows = h.t(), h[1:]
    h.add_(1).mul_(x)
    return h + other + rows.sum()


def _of_another_part(m, x, y):
    h = x @ m.w
    left, right = h[:, :3], h[:, 3:]
    left *= 2
    right += left
    return torch.cat((left, right, h[:, 1:2]), 1)


def _of_a_part_of_it(m, x, y):
    h = x @ m.w
    part = h.t()[1:]
    row, spread = part[0], part[1:2].expand(4, 6)
    old = row * 1
    part.mul_(3)
    part[0] = 0.5
    row[1:].sub_(1)
    return h * x + (old * row).sum() + spread.sum() * 2


def _of_a_buffer(m, x, y):
    tail = m.seen[2:]
    m.seen.add_(x.detach().sum(0))
    tail.mul_(2)
    return x @ m.w * m.seen + tail.sum()


def _swapped(m, x, y):
    h = x @ m.w
    h[0], h[1] = h[1], h[0]  # both rows are the second one: the first was written when it was read
    return h


def _without_gradients(m, x, y):
    h = (x @ m.w).clone()
    seen = h.detach()[0]
    h.mul_(2)
    return h * seen


@pytest.mark.parametrize(
    "function", [_of_the_whole, _of_another_part, _of_a_part_of_it, _of_a_buffer, _swapped, _without_gradients]
)
def test_other_views_see_the_change(function):
    normalized(function, data(6, 6))


@pytest.mark.parametrize("change", [lambda h: h.detach().mul_(2), lambda h: torch.no_grad()(h.mul_)(2)])
def test_a_change_without_gradients_that_another_view_sees_is_refused(change):
    def function(m, x, y):
        h = x @ m.w
        other = h.t()
        change(h)
        return x + other

    with pytest.raises(ValueError, match="without gradients, and gradients of it flow later"):
        normalized(function, data(6, 6))


def test_input_changed_in_place_is_refused():
    with pytest.raises(ValueError, match="input x"):
        run(export_graph(Fn(lambda m, x, y: x.add_(1) @ m.w), (data(4, 6),)), NORMALIZE)


def test_a_view_that_is_changed_in_place_and_whose_base_nobody_uses():
    """MobileNet's dropout_ on the flattened result of its pooling."""
    gm = normalized(lambda m, x, y: (x @ m.w).view(2, 12).mul_(2).sum(-1), data(4, 6))
    assert not [name for name in targets(gm) if name.endswith("mul_.Tensor")]


def test_what_is_written_to_a_given_tensor_is_its_new_value():
    def function(m, x, y):
        given = x > 1
        return torch.where(torch.gt(x, 0, out=given), x @ m.w, x) + given * x

    gm = normalized(function, data(4, 6), dims={"x": {0: B}})
    assert not [name for name in targets(gm) if "out" in name]


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: x.pow_(2),
        lambda x, y: x.pow_(y),
        lambda x, y: x.float_power_(2),
        lambda x, y: x.floor_divide_(y),
        lambda x, y: x.ldexp_(y),
        lambda x, y: x.mul_(2),
        lambda x, y: x.__ipow__(2),
    ],
)
def test_what_changes_in_place_has_its_twin_by_what_it_takes(change):
    gm = normalized(
        lambda m, x, y: change((x @ m.w).detach().abs() + 1, y.abs() + 1) * (x @ m.w),
        data(4, 6),
        data(4, 6),
        dims={"x": {0: B}, "y": {0: B}},
    )
    assert not [name for name in targets(gm) if name.split(".")[1].endswith("_")]


@pytest.mark.parametrize("turn", [lambda v: v.t_(), lambda v: v.transpose_(0, 1), lambda v: v.swapaxes_(0, 1)])
def test_what_is_turned_in_place_leaves_the_memory_that_it_is_of(turn):
    def function(m, x, y):
        h = m.w * 2
        seen = h.view(6, 6)
        turn(seen)
        return x @ seen + x @ h

    normalized(function, data(4, 6), dims={"x": {0: B}})


def test_what_is_made_in_a_given_tensor_is_its_new_value():
    def function(m, x, y):
        h = x @ m.w
        return h @ torch.eye(6, out=torch.empty_like(m.w)) + torch.arange(6, out=h.new_empty(6))

    gm = normalized(function, data(4, 6), dims={"x": {0: B}})
    assert not [name for name in targets(gm) if "out" in name]


def test_what_is_written_over_all_of_a_tensor_is_that():
    def function(m, x, y):
        h = torch.zeros_like(x)
        for i in range(x.shape[1]):
            h[:, i] = x[:, i] @ m.w * (i + 1)
        return h

    gm = normalized(function, data(4, 3, 6), dims={"x": {0: B}})
    assert targets(gm).count("aten.select_scatter.default") == 3 and "aten.slice_scatter.default" not in targets(gm)
