"""Bytes of the backward and of fused chains, counted by hand for small models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.problem.graph import Op
from autopar.problem.read_graph import read
from autopar.problem.traffic import by_rows
from autopar.rules.language import Call, Tensor
from tests.helpers.moved import Moved

B, S, D = 4, 8, 16
SIZE = B * S * D * 4


class Chain(nn.Module):
    """A residual: twice(gelu(x w)) + x w, whose sum feeds a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.norm(F.gelu(h) * 2.0 + h).sum()


def ops() -> dict[str, Op]:
    with torch.device("meta"):
        model, x = Chain(), torch.empty(B, S, D)
    program = read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True)
    return {getattr(op.target, "__name__", "").partition(".")[0]: op for op in program.ops.values() if op.role == "op"}


def test_a_chain_ends_in_a_norm_and_moves_only_what_comes_in_and_goes_out() -> None:
    found = ops()
    gelu, double, add, norm = (found[name] for name in ("gelu", "mul", "add", "layer_norm"))
    assert [op.leads for op in (gelu, double, add, norm)] == [False, False, False, True]
    parameters = 2 * D * 4
    whole = sum(op.bytes for op in (gelu, double, add, norm))
    assert whole == 9 * SIZE + parameters  # 2 + 2 + 3 + 2 passes
    assert sum(op.fused_bytes for op in (gelu, double, add, norm)) == 3 * SIZE + parameters  # h twice, the result


def test_sums_pass_gradients_on_and_values_read_twice_add_them_up() -> None:
    found = ops()
    assert found["add"].backward_bytes == 0
    # gradient in, h, gradient out; the sum of h's two gradients
    assert found["gelu"].backward_bytes == 3 * SIZE + 3 * SIZE
    weight = D * D * 4
    # gradient in, x kept, the weight's gradient; x needs none
    assert found["linear"].backward_bytes == SIZE + SIZE + weight


def test_fusing_never_moves_more() -> None:
    for op in ops().values():
        assert 0 <= op.fused_bytes <= op.bytes and 0 <= op.fused_backward_bytes <= op.backward_bytes


class Head(nn.Module):
    """Embeddings, a bias, and the cross-entropy of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bias = nn.Embedding(V, D), nn.Parameter(torch.empty(D))
        self.out = nn.Linear(D, V, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.table(ids) + self.bias).flatten(0, 1), labels.flatten())


V = 32


def head() -> dict[str, Op]:
    with torch.device("meta"):
        model, ids = Head(), torch.empty(B, S, dtype=torch.int64)
    program = read(capture(model, (ids, ids)).gm, {"b": B, "s": S}, training=True)
    return {
        str(getattr(op.target, "__name__", "")).partition(".")[0]: op for op in program.ops.values() if op.role == "op"
    }


def test_a_loss_writes_log_probabilities_and_a_gradient_of_theirs() -> None:
    loss, logits, labels = head()["cross_entropy_sum"], B * S * V * 4, B * S * 8
    # read and written; what the loss itself has is a number
    assert loss.bytes == pytest.approx(2 * logits + labels, abs=16)
    # zeros written, read with the log-probabilities, the gradient written
    assert loss.backward_bytes == pytest.approx(4 * logits + labels, abs=16)
    assert loss.fused_bytes == pytest.approx(logits + labels, abs=16) and loss.fused_backward_bytes == pytest.approx(
        2 * logits + labels, abs=16
    )


class Biased(nn.Module):
    """A product with a bias, whose result one operator reads."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], trained: bool = True) -> None:
        super().__init__()
        self.first, self.between = nn.Linear(D, D), between
        self.first.bias.requires_grad_(trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.first(x)).sum()


def product(between: Callable[[torch.Tensor], torch.Tensor] = F.gelu, *, trained: bool = True) -> Op:
    with torch.device("meta"):
        model, x = Biased(between, trained), torch.empty(B, S, D)
    (found,) = [
        op for op in read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True).ops.values() if "linear" in op.name
    ]
    return found


def test_a_bias_is_added_on_the_way_out_and_its_gradient_is_a_sum_by_itself() -> None:
    weight, bias = D * D * 4, D * 4
    found = product()
    assert found.bytes == found.fused_bytes == 2 * SIZE + weight + bias
    assert found.backward_bytes == 2 * SIZE + weight  # as without it
    assert found.bias_bytes == SIZE + bias
    assert product(trained=False).bias_bytes == 0.0


def test_the_gradient_of_a_bias_is_summed_where_a_fused_kernel_makes_what_it_sums() -> None:
    assert product(F.gelu).fused_bias_bytes == 0.0
    # gradients that are there, or that a norm or a product makes
    for apart in (lambda h: h + h.detach(), lambda h: h.softmax(-1), lambda h: h @ h.mT):
        assert product(apart).fused_bias_bytes == SIZE + D * 4


@pytest.mark.parametrize(
    ("x", "weight", "bias", "share"),
    [
        (True, True, True, 0.5),
        (True, False, True, 0.0),
        (False, True, True, 1.0),
        (False, False, True, 1.0),
        (True, True, False, 0.5),
    ],
)
def test_a_bias_takes_no_share_of_a_backward_but_what_is_its_alone(
    x: bool, weight: bool, bias: bool, share: float
) -> None:
    tensors = Tensor((B, D), x), Tensor((D, D), weight), Tensor((D,), bias)
    call = Call(torch.ops.aten.linear.default, tensors, {}, (Tensor((B, D)),))
    found = Op("linear", "", None, "op", call, (), weight=(False, True, True))  # type: ignore[arg-type]
    assert (found.weights_share, found.weighs) == (share, weight or bias)


class Normed(nn.Module):
    """An RMSNorm of what a product makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(D, D, bias=False), nn.RMSNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).sum()


@pytest.mark.parametrize(("device", "forward", "backward"), [("cuda", 2, 5), ("cpu", 7, 23)])
def test_a_norm_without_a_kernel_on_cpus_is_many_passes_there(device: str, forward: int, backward: int) -> None:
    with torch.device("meta"):
        model, x = Normed(), torch.empty(B, S, D)
    program = read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True, device=device)
    (norm,) = [op for op in program.ops.values() if "rms_norm" in op.name]
    small = 4 * SIZE / D  # weights, and a number for each row
    assert norm.bytes == pytest.approx(forward * SIZE, abs=small)
    assert norm.backward_bytes == pytest.approx(backward * SIZE, abs=small)
    assert norm.fused_bytes == pytest.approx(2 * SIZE, abs=small)


class Dropping(nn.Module):
    """Dropout behind a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.first(x), 0.1).sum()


@pytest.mark.parametrize(
    ("device", "drawn", "more"),
    [("cuda", 5, 0), ("cpu", 2, 4)],  # on a CPU the mask is cast, multiplied and scaled, each read and written
)
def test_dropout_draws_a_mask_by_itself(device: str, drawn: int, more: int) -> None:
    with torch.device("meta"):
        model, x = Dropping(), torch.empty(B, S, D)
    program = read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True, device=device)
    (found,) = [op for op in program.ops.values() if "dropout" in op.name]
    mask = B * S * D
    assert found.bytes == (2 + more) * SIZE + drawn * mask and found.fused_bytes == 2 * SIZE
    assert found.backward_bytes == (1 + more) * SIZE + mask  # each gradient is the same number


def test_the_gradient_of_a_table_begins_as_zeros_of_its_size() -> None:
    ids = B * S * 8
    assert head()["embedding"].backward_bytes == 3 * SIZE + V * D * 4 + ids


class Heads(nn.Module):
    """Attention of heads side by side in one product, whose results are joined again."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.first, self.turned = nn.Linear(D, 3 * D, bias=False), turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.first(x).split(D, dim=-1))
        lies_by_heads = torch.cat([-q[..., D // 4 :], q[..., : D // 4]], -1)
        return (
            F.scaled_dot_product_attention(q if self.turned else lies_by_heads, k, v).transpose(1, 2).flatten(2).sum()
        )


def heads(turned: bool = True) -> list[Op]:
    with torch.device("meta"):
        model, x = Heads(turned), torch.empty(B, S, D)
    return [op for op in read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True).ops.values() if op.role == "op"]


def test_gradients_of_pieces_are_put_together() -> None:
    (found,) = [op for op in heads() if op.target is torch.ops.aten.split_with_sizes.default]
    assert (found.bytes, found.backward_bytes, found.fused_backward_bytes) == (0.0, 2 * 3 * SIZE, 0.0)


@pytest.mark.parametrize("turned", [True, False])
def test_heads_are_joined_without_a_copy_where_kernels_write_them_as_the_query_lies(turned: bool) -> None:
    *_, joined = [op for op in heads(turned) if op.target is torch.ops.aten.reshape.default]
    assert joined.bytes == (0.0 if turned else 2 * SIZE)


def test_what_goes_by_rows_are_norms_and_losses_and_no_sums_of_gradients() -> None:
    norm, loss = ops()["layer_norm"], head()["cross_entropy_sum"]
    assert norm.rows_bytes == (norm.bytes, norm.backward_bytes)
    assert loss.rows_bytes == (loss.bytes, 0.0)
    first, *_ = [op for op in twice().values() if op.target is torch.ops.aten.layer_norm.default]
    assert first.backward_bytes - first.rows_bytes[1] == 3 * SIZE


class Twice(nn.Module):
    """A norm of what is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return (self.norm(h) + h).sum()


def twice() -> dict[str, Op]:
    with torch.device("meta"):
        model, x = Twice(), torch.empty(B, S, D)
    return dict(read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True).ops)


def test_which_kernels_do_not_go_straight_through() -> None:
    assert by_rows(head()["add"]) and not by_rows(head()["linear"]) and not by_rows(head()["cross_entropy_sum"])
    found = ops()
    assert by_rows(found["layer_norm"]) and not any(by_rows(found[name]) for name in ("gelu", "mul", "add"))


class Reads(nn.Module):
    """A block that reads what all blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D, bias=False)

    def forward(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.layer(h) * memory)


class Decoder(nn.Module):
    """Blocks that read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.memory = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.blocks = nn.ModuleList(Reads() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, memory = self.first(x), self.memory(x)
        for block in self.blocks:
            h = block(h, memory)
        return F.silu(h).sum()


def test_gradients_of_what_all_blocks_read_are_added_up_from_block_to_block() -> None:
    """As an encoder's result that each block of a decoder attends to."""
    with torch.device("meta"):
        model, x = Decoder(), torch.empty(B, S, D)
        made = model(x)
        with Moved() as backward:
            torch.autograd.grad(made, list(model.parameters()))
    program = read(capture(model, (x,)).gm, {"b": B, "s": S}, training=True)
    assert program.runs
    weights = 7 * 4 * D * D
    assert sum(op.count * op.backward_bytes for op in program.ops.values()) == pytest.approx(
        backward.nbytes, abs=2 * weights
    )
