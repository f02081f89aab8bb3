"""Bytes that derivatives of several kernels move, against the kernels that torch runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.problem.graph import Op
from autopar.problem.read_graph import read
from passes import ops
from tests.helpers.moved import Moved

aten = torch.ops.aten
B, D = 64, 256
WHOLE = B * D * 4
SMALL = 5 * WHOLE / B  # what has a number for each row or column

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Derived(nn.Module):
    """`body` of two products and a parameter of one row, each with a gradient; its own gradient is in memory."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(D, D, bias=False) for _ in range(2))
        self.row, self.body = nn.Parameter(torch.empty(D)), body

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.body(self.first(x), self.second(x), self.row)).sum()


def _ran(body: Body, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that the kernels of `body` move, forward and backward."""
    given = [torch.empty(*sizes, device="meta", dtype=dtype, requires_grad=True) for sizes in ((B, D), (B, D), (D,))]
    with Moved() as forward:
        made = body(*given)  # type: ignore[arg-type]
    gradient = torch.empty(made.shape, device="meta", dtype=made.dtype)
    with Moved() as backward:
        torch.autograd.grad(made, given, gradient, allow_unused=True)
    return forward.nbytes, backward.nbytes


def _priced(body: Body, dtype: torch.dtype, device: str = "cpu") -> list[Op]:
    """The operators of `body`."""
    with torch.device("meta"):
        model, x = Derived(body).to(dtype), torch.empty(B, D, dtype=dtype)
    program = read(capture(model, (x,)).gm, {"b": B}, training=True, device=device)
    outside = (aten.linear.default, aten.silu.default)
    *found, _ = [op for op in program.ops.values() if op.role == "op" and op.target not in outside]
    return found  # but the sum


BODIES: dict[str, Body] = {
    "abs": lambda x, y, row: x.abs(),
    "added product": lambda x, y, row: torch.addcmul(x, y, y),
    "added product with a row": lambda x, y, row: torch.addcmul(x, row, y),
    "added quotient": lambda x, y, row: torch.addcdiv(x, y, row),
    "added quotient of a row": lambda x, y, row: torch.addcdiv(x, row, y),
    "angle": lambda x, y, row: torch.atan2(x, y),
    "angle with a row": lambda x, y, row: torch.atan2(row, x),
    "angle of which one is fixed": lambda x, y, row: torch.atan2(x, row.detach()),
    "arccosine": lambda x, y, row: x.acos(),
    "arcsine": lambda x, y, row: x.asin(),
    "arctangent": lambda x, y, row: x.atan(),
    "area cosine": lambda x, y, row: x.acosh(),
    "area sine": lambda x, y, row: x.asinh(),
    "area tangent": lambda x, y, row: x.atanh(),
    "clamp": lambda x, y, row: x.clamp(0, 1),
    "clamp from below": lambda x, y, row: x.clamp_min(0),
    "logits": lambda x, y, row: F.binary_cross_entropy_with_logits(x, y.detach(), reduction="none"),
    "divergence": lambda x, y, row: F.kl_div(x, y.detach(), reduction="sum"),
    "distances": lambda x, y, row: F.l1_loss(x, y.detach(), reduction="sum"),
    "distances of rows": lambda x, y, row: torch.cdist(x, y),
    "distances to fixed rows": lambda x, y, row: torch.cdist(x, y.detach()),
    "entropy": lambda x, y, row: torch.special.entr(x),
    "erfc": lambda x, y, row: x.erfc(),
    "erfinv": lambda x, y, row: x.erfinv(),
    "expm1": lambda x, y, row: x.expm1(),
    "gamma": lambda x, y, row: x.lgamma(),
    "gamma's derivative": lambda x, y, row: x.digamma(),
    "hypotenuse": lambda x, y, row: torch.hypot(x, y),
    "hypotenuse with a row": lambda x, y, row: torch.hypot(x, row),
    "joined": lambda x, y, row: torch.cat([x, y], 1),
    "stacked": lambda x, y, row: torch.stack([x, y], 1),
    "largest of a row": lambda x, y, row: x.amax(1),
    "larger": lambda x, y, row: torch.maximum(x, y),
    "larger number": lambda x, y, row: torch.fmax(x, y),
    "larger number than a row": lambda x, y, row: torch.fmax(x, row),
    "smaller number of a row": lambda x, y, row: torch.fmin(row, x),
    "smaller than a row": lambda x, y, row: torch.minimum(x, row),
    "logarithm": lambda x, y, row: x.log2(),
    "between": lambda x, y, row: torch.lerp(x, y, 0.3),
    "between by a row": lambda x, y, row: torch.lerp(x, y, row),
    "between a row and others": lambda x, y, row: torch.lerp(row, x, y),
    "logarithms of sums": lambda x, y, row: x.logcumsumexp(1),
    "numbers": lambda x, y, row: x.nan_to_num(),
    "normalized": lambda x, y, row: F.normalize(x, dim=1),
    "prelu": lambda x, y, row: F.prelu(x, row),
    "factors": lambda x, y, row: x.prod(1),
    "deviation": lambda x, y, row: x.std(1),
    "sum of rows": lambda x, y, row: x.sum(1),
    "sum of products": lambda x, y, row: (x * y).sum(1),
    "sum of squares, and rows": lambda x, y, row: (x * x).sum(1) + x.sum(1),
    "copied in another order": lambda x, y, row: x.view(B, 2, -1).transpose(1, 2).reshape(B, -1),
    "maxima": lambda x, y, row: F.max_pool2d(x.view(B, 1, 16, -1), 2),
    "similarity": lambda x, y, row: F.cosine_similarity(x, y, dim=1),
    "similarity to what is fixed": lambda x, y, row: F.cosine_similarity(x, y.detach(), dim=1),
    "cos": lambda x, y, row: x.cos(),
    "cumsum": lambda x, y, row: x.cumsum(1),
    "erf": lambda x, y, row: x.erf(),
    "norm": lambda x, y, row: torch.linalg.vector_norm(x, dim=1),
    "log1p": lambda x, y, row: x.log1p(),
    "logarithm of a sum": lambda x, y, row: torch.logaddexp(x, y),
    "logarithm of a sum with a row": lambda x, y, row: torch.logaddexp2(x, row),
    "logsumexp": lambda x, y, row: x.logsumexp(1),
    "powers of two": lambda x, y, row: x.exp2(),
    "powers of a number": lambda x, y, row: 3.0**x,
    "tensor of powers": lambda x, y, row: x**y,
    "tensor of powers that are fixed": lambda x, y, row: x ** y.detach(),
    "power": lambda x, y, row: x**3,
    "product with a logarithm": lambda x, y, row: torch.xlogy(x, y),
    "product with a row's logarithm": lambda x, y, row: torch.xlogy(x, row),
    "product of a row with a logarithm": lambda x, y, row: torch.special.xlog1py(row, x),
    "reciprocal": lambda x, y, row: x.reciprocal(),
    "from a number": lambda x, y, row: 1 - x,
    "remainder": lambda x, y, row: torch.remainder(x, y),
    "remainder by a row": lambda x, y, row: torch.fmod(x, row),
    "rsqrt": lambda x, y, row: x.rsqrt(),
    "sin": lambda x, y, row: x.sin(),
    "sinc": lambda x, y, row: x.sinc(),
    "sinh": lambda x, y, row: x.sinh(),
    "cosh": lambda x, y, row: x.cosh(),
    "sign of another": lambda x, y, row: torch.copysign(x, y.detach()),
    "times powers of two": lambda x, y, row: torch.ldexp(x, y),
    "times powers of two of a row": lambda x, y, row: torch.ldexp(x, row),
    "sqrt": lambda x, y, row: x.sqrt(),
    "square": lambda x, y, row: x.square(),
    "var": lambda x, y, row: x.var(1),
    "tan": lambda x, y, row: x.tan(),
    "tanh": lambda x, y, row: x.tanh(),
    "product": lambda x, y, row: x * y,
    "outer product": lambda x, y, row: torch.outer(row, row),
    "pairs": lambda x, y, row: F.pairwise_distance(x, y),
    "pairs of which one is fixed": lambda x, y, row: F.pairwise_distance(x, y.detach()),
    "events": lambda x, y, row: F.poisson_nll_loss(x, y.detach(), reduction="sum"),
    "hinges": lambda x, y, row: F.hinge_embedding_loss(x, y.detach(), reduction="sum"),
    "ranks": lambda x, y, row: F.margin_ranking_loss(x, y.detach(), y.detach(), reduction="sum"),
    "triplets": lambda x, y, row: F.triplet_margin_loss(x, y, y.detach(), reduction="sum"),
    "mean and variance": lambda x, y, row: torch.var_mean(x, 1)[0],
    "product with a row": lambda x, y, row: row * x,
    "product of which one is fixed": lambda x, y, row: x * row.detach(),
    "quotient": lambda x, y, row: x / y,
    "quotient by a row": lambda x, y, row: x / row,
    "difference": lambda x, y, row: x - y,
    "difference from a row": lambda x, y, row: x - row,
    "sum with a row": lambda x, y, row: x.tanh() + row,
    "choice": lambda x, y, row: torch.where(row.detach() > 0, x, y),
    "choice of a row": lambda x, y, row: torch.where(row.detach() > 0, row, y),
    "slice": lambda x, y, row: x[:, 1:],
    "select": lambda x, y, row: x[:, 0],
    "diagonal": lambda x, y, row: x.diagonal(),
    "expanded": lambda x, y, row: row.expand(B, D).tanh(),
}


@pytest.mark.parametrize("name", BODIES)
def test_kernels_move_what_is_priced(name: str) -> None:
    moved = _ran(BODIES[name], torch.float32)
    found = _priced(BODIES[name], torch.float32)
    assert (sum(op.bytes for op in found), sum(op.backward_bytes for op in found)) == pytest.approx(moved, abs=SMALL)
    assert all(op.fused_backward_bytes <= op.backward_bytes for op in found)


@pytest.mark.parametrize("both", [False, True])
def test_losses_of_angles_have_two_norms(both: bool) -> None:
    """And a dozen numbers for each row."""

    def body(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return F.cosine_embedding_loss(x, y if both else y.detach(), row.detach()[:B], reduction="sum")

    found = _priced(body, torch.float32)
    assert (sum(op.bytes for op in found), sum(op.backward_bytes for op in found)) == pytest.approx(
        _ran(body, torch.float32), abs=3 * SMALL
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_norms_without_a_kernel_are_plain_operators(weighted: bool, dtype: torch.dtype) -> None:
    """Of narrow numbers in float32, with casts."""

    def body(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), row if weighted else None)

    (found,) = _priced(body, dtype)
    assert (found.bytes, found.backward_bytes) == pytest.approx(_ran(body, dtype), abs=2 * SMALL)


@pytest.mark.parametrize("cast", [torch.float32, None])
def test_a_softmax_in_a_wider_dtype_casts_first(cast: torch.dtype | None) -> None:
    def body(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return x.softmax(1, dtype=cast)

    (found,) = _priced(body, torch.bfloat16)
    assert (found.bytes, found.backward_bytes) == pytest.approx(_ran(body, torch.bfloat16), abs=SMALL)
    assert (found.fused_bytes, found.fused_backward_bytes) == (
        (WHOLE * 1.5, WHOLE * 2.5) if cast else (WHOLE, 1.5 * WHOLE)
    )


@pytest.mark.parametrize(
    ("dtype", "device", "cast"), [(torch.float16, "cuda", 0), (torch.float16, "cpu", 2), (torch.bfloat16, "cuda", 2)]
)
def test_gpus_read_float16_as_it_is(dtype: torch.dtype, device: str, cast: int) -> None:
    (found,) = _priced(lambda x, y, row: x.softmax(1, dtype=torch.float32), dtype, device)
    assert found.bytes == (1.5 + cast) * WHOLE


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y, row: x.gather(1, torch.zeros(B, 1, dtype=torch.int64, device=x.device)),
        lambda x, y, row: x[:1, torch.arange(2, device=x.device)],
    ],
    ids=["gather", "index"],
)
def test_gradients_of_what_is_looked_up_begin_as_zeros(body: Body) -> None:
    """What is looked up, here next to nothing, is added to them; the table itself is not read."""
    assert max(op.backward_bytes for op in _priced(body, torch.float32)) == pytest.approx(WHOLE, abs=SMALL)


def test_what_is_expanded_is_read_where_it_is() -> None:
    def body(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
        return x.unsqueeze(1).expand(B, 3, D).reshape(B, -1)

    assert sum(op.bytes for op in _priced(body, torch.float32)) == _ran(body, torch.float32)[0] == 4 * WHOLE


def _heads(x: Tensor) -> Tensor:
    return x.view(4, 16, 8, 32)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y, row: _heads(x).transpose(1, 2) @ _heads(y).permute(0, 2, 3, 1),
        lambda x, y, row: torch.einsum("bqhd,bkhd->bhqk", _heads(x), _heads(y)),
        lambda x, y, row: _heads(x).transpose(1, 2) @ _heads(y)[:1].permute(0, 2, 3, 1),
        lambda x, y, row: x.view(4, 16, D) @ y.view(4, D, 16),
    ],
    ids=["heads", "einsum", "broadcast", "as they are"],
)
def test_products_copy_what_does_not_lie_as_they_read_it(body: Body) -> None:
    assert sum(op.bytes for op in _priced(body, torch.float32)) == pytest.approx(
        _ran(body, torch.float32)[0], abs=SMALL
    )
    assert max(op.bytes - op.fused_bytes for op in _priced(body, torch.float32)) in (0, 4 * WHOLE)


class Grouped(nn.Module):
    """Rows in groups, each times the matrix of its group."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.first, self.weights = nn.Linear(D, D, bias=False), nn.Parameter(torch.empty(groups, D, 2 * D))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        made: Tensor = torch.ops.transformers.grouped_mm_fallback(self.first(x), self.weights, ends)
        return made.sum()


@pytest.mark.parametrize("groups", [2, 32])
def test_gradients_of_groups_are_joined_once(groups: int) -> None:
    """They are not added up group by group, each at the size of all."""
    pytest.importorskip("transformers.integrations.moe")
    with torch.device("meta"):
        model, x, ends = Grouped(groups), torch.empty(B, D), torch.zeros(groups, dtype=torch.int32)
    program = read(capture(model, (x, ends)).gm, {"b": B}, training=True)
    (found,) = [op for op in program.ops.values() if op.target is ops.grouped_matmul]
    rows, weights = torch.zeros(B, D, requires_grad=True), torch.zeros(groups, D, 2 * D, requires_grad=True)
    with Moved() as forward:
        made = ops.grouped_matmul(rows, weights, torch.arange(1, groups + 1) * (B // groups))
    gradient = torch.zeros_like(made)
    with Moved() as backward:
        torch.autograd.grad(made, (rows, weights), gradient)
    assert (found.bytes, found.backward_bytes) == pytest.approx((forward.nbytes, backward.nbytes), abs=SMALL)


def test_gradients_of_every_other_column_are_joined_once() -> None:
    """A product moves three halves for each factor; then both gradients, as those of any two halves."""
    for columns in (ops.pairs, ops.halves):
        x = torch.empty(B, D, device="meta", requires_grad=True)
        made = columns(lambda first, second: first * second)(x)
        gradient = torch.empty(made.shape, device="meta")
        with Moved() as backward:
            torch.autograd.grad(made, x, gradient)
        assert backward.nbytes == 3 * WHOLE + 2 * WHOLE
