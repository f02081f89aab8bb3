"""What a pipeline has no way for is refused, on every rank."""

from __future__ import annotations

import torch

from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import on_ranks


def _fed() -> tuple[str, str]:
    made, (x, y) = compiled("1f1b")
    assert torch.equal(made.train_step(x.float(), y), made.train_step(x.float().double(), y))
    return said(lambda: made.train_step(x.long(), y)), said(lambda: made(x, y > 0))


def test_inputs_of_stages_in_another_dtype() -> None:
    """Narrower ones are cast. A place waited for ever for a tensor of other bytes than came."""
    for of_x, of_y in on_ranks(2, _fed):
        assert "input 'x' is torch.int64 and was planned as torch.float64: what a model does by" in of_x
        assert "input 'y' is torch.bool and was planned as torch.float64" in of_y


def _staged() -> tuple[str, ...]:
    made, batch = compiled("1f1b")
    loss = made(*batch)
    with torch.no_grad():
        assert not made(*batch).requires_grad
    return said(loss.backward), said((loss.detach() + made(*batch)).backward)


def test_a_backward_of_the_forward_of_a_pipeline() -> None:
    for wrong in on_ranks(2, _staged):
        assert all("the forward of a pipeline keeps nothing for a backward: call train_step" in text for text in wrong)
