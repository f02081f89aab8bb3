"""What is done without gradients: its results have none, and what it only looks at keeps its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from passes import NORMALIZE
from tests.unit.passes.test_small import Fn, data, normalized

ITSELF: dict[str, Callable[[Tensor], Tensor]] = {
    "to its dtype": lambda h: h.to(torch.float64), "type_as": lambda h: h.type_as(h), "double": lambda h: h.double(), "contiguous": lambda h: h.contiguous(),
    "dropout": lambda h: F.dropout(h, 0.0), "twice": lambda h: h.double().contiguous(),
}
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "cast": lambda h: h.float(), "copy": lambda h: h.to(h.dtype, copy=True), "view": lambda h: h.view(-1, 6), "of columns": lambda h: h.t().contiguous().t(), "half": lambda h: h * 0.5,
}


@pytest.mark.parametrize("name", [*ITSELF, *OTHER])
def test_a_tensor_that_is_looked_at_without_gradients_keeps_its_own(name: str) -> None:
    """`logits.float()` of float32 logits gives `logits`: a region that counts right answers so took the gradient of all that comes behind it."""
    def function(m: Fn, x: Tensor, y: None) -> Tensor:
        h = x @ m.w
        with torch.no_grad():
            seen = {**ITSELF, **OTHER}[name](h)
            right = (seen.argmax(-1) == 1).sum()
        return h * right + h * seen

    normalized(function, data(4, 6), passes=NORMALIZE)
