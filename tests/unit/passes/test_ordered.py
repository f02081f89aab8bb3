"""Copies of operands that products of several dims make and autograd keeps, against what it holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from passes import ANNOTATE, NORMALIZE, edit, run
from tests.helpers.export import export_graph

aten = torch.ops.aten


class Product(nn.Module):
    """The product of what comes in, with a weight added, and another weight."""

    def __init__(self, equation: str, weight: tuple[int, ...], like: Tensor) -> None:
        super().__init__()
        self.equation = equation
        self.added, self.weight = nn.Parameter(torch.randn_like(like)), nn.Parameter(torch.randn(weight))

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.added, self.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, self.operands(x))


@pytest.mark.parametrize(("equation", "weight", "turned", "copies"), [
    ("becd,edh->bech", (4, 5, 6), False, (0,)),  # slots of one expert are not beside each other in all samples
    ("becd,edh->bech", (4, 5, 6), True, ()),  # where experts come first in memory they are
    ("becd,be->bcd", (2, 4), False, ()),
    ("becd,dh->bech", (5, 6), False, ()),
    ("becd,hdc->beh", (6, 5, 3), False, (1,)),  # two dims that are summed, in another order in the weight
    ("becd,becd->becd", (2, 4, 3, 5), False, ()),
])  # fmt: skip
def test_operands_in_another_order_are_kept_as_copies(equation: str, weight: tuple[int, ...], turned: bool, copies: tuple[int, ...]) -> None:
    x = torch.randn(4, 2, 3, 5).transpose(0, 1) if turned else torch.randn(2, 4, 3, 5)
    model = Product(equation, weight, x)
    (product,) = edit.calls(run(export_graph(model, (x,)), (*NORMALIZE, *ANNOTATE)), aten.einsum.default)
    assert product.meta["saved"].copies == copies

    operands = model.operands(x)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = torch.einsum(equation, operands)
    own = sum(held.pop(operands[i].untyped_storage().data_ptr()) for i in product.meta["saved"].positions)
    assert own + sum(held.values()) == sum(tensor.nbytes for tensor in operands)
    assert sum(held.values()) == sum(operands[i].nbytes for i in copies)
    assert result.requires_grad
