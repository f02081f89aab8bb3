"""Views that are changed in place, written back into what they are views of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from passes import NORMALIZE
from tests.helpers.export import B, targets
from tests.helpers.small_graphs import Fn, data, normalized


def _filled(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    h.diagonal(0, 1, 2).fill_(2.0)
    return h * x


def _scaled(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    h.diagonal(1, -2, -1).mul_(x[..., 0, :5])
    return h.square()


def _of_another_view(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    h[:, 1:].diagonal(-1, 2, 1).add_(1.0)
    return h.transpose(1, 2)[:, 2:] * 2 + h.sum()


def _complex(m: Fn, x: Tensor, y: None) -> Tensor:
    h = torch.complex(x @ m.w, x)
    h.diagonal(1, 2, 1).mul_(h[:, 0, 1:] * 2)
    return torch.view_as_real(h)


@pytest.mark.parametrize("function", [_filled, _scaled, _of_another_view, _complex])
def test_a_diagonal_is_written_back(function: Callable[[Fn, Tensor, None], Tensor]) -> None:
    gm = normalized(function, data(4, 6, 6), dims={"x": {0: B}}, passes=NORMALIZE)
    assert targets(gm).count("aten.diagonal_scatter.default") == 1


def test_a_diagonal_that_is_filled_is_a_mask() -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        alike, tall = (x @ m.w) @ x.t(), x * 2
        alike.fill_diagonal_(-5.0)
        return alike.softmax(-1).sum() * tall.fill_diagonal_(7)

    gm = normalized(function, data(8, 6), passes=NORMALIZE)
    assert targets(gm).count("aten.masked_fill.Scalar") == 2


def _first_is_seen(m: Fn, x: Tensor, y: None) -> Tensor:
    """A mask as numbers is no view of the truth values."""
    there = x[..., 0] > 0
    mask = there.to(x.dtype)
    mask[:, 0] = 1
    return (x @ m.w) * mask.unsqueeze(-1) + there.sum()


def _as_it_is(m: Fn, x: Tensor, y: None) -> Tensor:
    """A cast that changes nothing is a view."""
    h = x @ m.w
    h.to(x.dtype).mul_(2)
    h.type_as(x)[:, 1] = 0.5
    return h


def _copied(m: Fn, x: Tensor, y: None) -> Tensor:
    h = x @ m.w
    g = h.to(x.dtype, copy=True)
    g[:, 0] = 3
    return h + g


@pytest.mark.parametrize("function", [_first_is_seen, _as_it_is, _copied])
def test_what_is_cast_is_a_copy_where_its_dtype_changes(function: Callable[[Fn, Tensor, None], Tensor]) -> None:
    normalized(function, data(4, 5, 6))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda v: v[0],
    "last of rows": lambda v: v[..., -1],
    "but one": lambda v: v[1:],
    "turned": lambda v: v.transpose(0, -1),
    "in front": lambda v: v.unsqueeze(0),
    "line": lambda v: v.view(-1) if v.is_contiguous() else v,
    "as it is": lambda v: v.to(v.dtype),
    "part": lambda v: v.narrow(-1, 1, v.shape[-1] - 1),
    "end": lambda v: v.narrow(0, -1, 1),
    "permuted": lambda v: v.permute(*reversed(range(v.dim()))),
    "moved": lambda v: v.movedim(0, -1),
    "in two": lambda v: v.unflatten(-1, (-1, 1)),
    "no ones": lambda v: v.squeeze(),
    "flat": lambda v: v.flatten(),
    "reshaped": lambda v: v.reshape(-1, v.shape[0]),
    "packed": lambda v: v.contiguous(),
    "swapped": lambda v: v.swapaxes(0, -1),
    "three dims": torch.atleast_3d,
}
CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul_": lambda v, x: v.mul_(2),
    "add_": lambda v, x: v.add_(x.sum()),
    "clamp_": lambda v, x: v.clamp_(min=0.1),
    "fill": lambda v, x: v.fill_(0.5),
    "both": lambda v, x: v.sub_(1).div_(3),
}
STEPS = st.lists(
    st.tuples(st.sampled_from([*sorted(VIEWS), *sorted(CHANGES)]), st.integers(0, 3)), min_size=2, max_size=7
)


def _written(steps: list[tuple[str, int]], kept: int) -> Callable[[Fn, Tensor, None], Tensor]:
    """Each step sees or changes one of the newest views; the first tensor and one view are read behind the last."""

    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        seen = [x @ m.w]
        for name, number in steps:
            one = seen[-1 - number % min(2, len(seen))]
            if name in CHANGES:
                CHANGES[name](one, x)
            elif one.dim():
                seen.append(VIEWS[name](one))
        return seen[0] * x + (seen[kept % len(seen)] * 2).sum() + m.w.sum()

    return function


@settings(max_examples=25, deadline=None, derandomize=True)
@given(STEPS, st.integers(0, 7))
def test_what_is_seen_after_any_writes_is_what_torch_has(steps: list[tuple[str, int]], kept: int) -> None:
    """Or it is refused."""
    try:
        normalized(_written(steps, kept), data(3, 6))
    except ValueError as error:
        assert "work on a copy" in str(error)


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_is_written_back_and_no_copy_is(name: str) -> None:
    """Of rows and of columns: what is a view of the ones may be a copy of the others."""

    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h, g = x @ m.w, (x @ m.w).transpose(0, 1)
        for whole in (h, g):
            VIEWS[name](whole).mul_(whole.sum().detach() + 2)
        return h + g.transpose(0, 1).tanh()

    normalized(function, data(3, 6))


def test_a_view_that_is_changed_twice_is_written_back_twice() -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x @ m.w
        h[1:, 2].clamp_(min=0.0).sqrt_()
        rows = m.seen[2:]
        rows.add_(x.detach().sum(0)[2:])
        rows.mul_(0.5)
        return h * m.seen

    gm = normalized(function, data(4, 6))
    assert (
        targets(gm).count("aten.select_scatter.default") == 2 and targets(gm).count("aten.slice_scatter.default") == 4
    )


DROPS_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "all kept": lambda h: F.dropout(h, 0.0),
    "evaluated": lambda h: F.dropout(h, 0.5, training=False),
    "features": lambda h: F.dropout1d(h, 0.5, training=False),
    "alpha": lambda h: F.alpha_dropout(h, 0.5, training=False),
    "alpha of features": lambda h: F.feature_alpha_dropout(h, 0.5, training=False),
}


@pytest.mark.parametrize("name", DROPS_NOTHING)
def test_what_a_dropout_gives_that_drops_nothing_is_what_it_got(name: str) -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x @ m.w
        DROPS_NOTHING[name](h)[0].mul_(2)
        return h * x

    assert not [target for target in targets(normalized(function, data(4, 6))) if "dropout" in target]


UNSAID: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum": lambda h: torch.einsum("ij->ji", h),
    "grid": lambda h: torch.meshgrid(h[0], h[1], indexing="ij")[0][:, 0],
    "chunk": lambda h: torch.unsafe_chunk(h, 2)[0],
    "product": lambda h: torch.cartesian_prod(h[0]),
}


def test_tensors_that_change_their_size_in_place_are_refused() -> None:
    """Their functional twin does not fit: torch's error of expand ended capture."""

    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        return (x.detach() + 1).resize_(2, 4) * m.w.sum()

    with pytest.raises(ValueError, match=r"resize_\.default changes the size of a tensor in place"):
        normalized(function, data(3, 6))


@torch.library.custom_op("autopar_test_inplace::doubled", mutates_args=("x",))
def doubled(x: Tensor) -> None:
    x.mul_(2)


def test_operators_of_ones_own_that_change_their_operand_are_refused() -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x.clone()
        doubled(h)
        return h * m.w.sum()

    with pytest.raises(ValueError, match=r"doubled.default changes x beside what it gives, and has no functional twin"):
        normalized(function, data(3, 6))


@pytest.mark.parametrize("name", UNSAID)
def test_views_of_operators_that_do_not_say_so_are_seen(name: str) -> None:
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x @ m.w
        UNSAID[name](h).mul_(2)
        return h * x

    with pytest.raises(ValueError, match=r"(also sees and uses later|cannot write it back): work on a copy"):
        normalized(function, data(4, 6))
