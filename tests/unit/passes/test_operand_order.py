"""Copies of operands that products of several dims make and autograd keeps, against what it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes import ANNOTATE, NORMALIZE, edit, run
from passes.operand_order import ORDERED
from tests.helpers.export import export_graph

Make = Callable[[Tensor, Tensor], Tensor]


class Product(nn.Module):
    """A product of what comes in, with a weight added, and another weight."""

    def __init__(self, make: Make, weight: Tensor, like: Tensor) -> None:
        super().__init__()
        self.make = make
        self.added, self.weight = nn.Parameter(torch.randn_like(like)), nn.Parameter(weight)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.added, self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.make(*self.operands(x))


def einsum(equation: str) -> Make:
    return lambda x, w: torch.einsum(equation, x, w)


PLAIN, TURNED = torch.randn(2, 4, 3, 5), torch.randn(4, 2, 3, 5).transpose(0, 1)
CASES: list[tuple[Make, Tensor, tuple[int, ...], tuple[int, ...]]] = [
    (einsum("becd,edh->bech"), PLAIN, (4, 5, 6), (0,)),  # slots of one expert are not beside each other in all samples
    (einsum("becd,edh->bech"), TURNED, (4, 5, 6), ()),  # where experts come first in memory they are
    (einsum("becd,be->bcd"), PLAIN, (2, 4), ()),
    (einsum("becd,dh->bech"), PLAIN, (5, 6), ()),
    (einsum("becd,hdc->beh"), PLAIN, (6, 5, 3), (1,)),  # two dims that are summed, in another order in the weight
    (einsum("becd,becd->becd"), PLAIN, (2, 4, 3, 5), ()),
    (torch.matmul, PLAIN, (2, 4, 5, 6), ()),
    (torch.matmul, TURNED, (2, 4, 5, 6), (0,)),  # heads that come from the middle of the memory, as in attention
    (F.linear, PLAIN, (6, 5), ()),
    (F.linear, TURNED, (6, 5), (0,)),
]


@pytest.mark.parametrize(("make", "x", "weight", "copies"), CASES)
def test_operands_in_another_order_are_kept_as_copies(
    make: Make, x: Tensor, weight: tuple[int, ...], copies: tuple[int, ...]
) -> None:
    model = Product(make, torch.randn(weight), x)
    *_, product = (node for node in edit.calls(run(export_graph(model, (x,)), (*NORMALIZE, *ANNOTATE)), *ORDERED))
    assert product.meta["saved"].copies == copies

    operands = model.operands(x)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = make(*operands)
    own = sum(held.pop(operands[i].untyped_storage().data_ptr()) for i in product.meta["saved"].positions)
    assert own + sum(held.values()) == sum(tensor.nbytes for tensor in operands)
    assert sum(held.values()) == sum(operands[i].nbytes for i in copies)
    assert result.requires_grad
