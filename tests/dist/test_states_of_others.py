"""An optimizer whose state is another rank's part is refused."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import on_ranks


def _loaded(recipe: str) -> tuple[str, str]:
    """What is said of a step with the state that this rank saved, and with that of rank 0."""
    made, batch = compiled(recipe)
    optimizer, file = torch.optim.AdamW(made.parameters(), 1e-2), io.BytesIO()
    made.train_step(*batch)
    optimizer.step()
    torch.save(optimizer.state_dict(), file)
    first = [file.getvalue()]
    dist.broadcast_object_list(first, 0)
    found = []
    for saved in (file.getvalue(), first[0]):
        optimizer.load_state_dict(torch.load(io.BytesIO(saved), weights_only=False))
        found.append(said(optimizer.step))
    return found[0], found[1]


@pytest.mark.parametrize("recipe", ["zero3", "ddp"])
def test_state_of_an_optimizer_from_another_rank(recipe: str) -> None:
    (own, same), (other, wrong) = on_ranks(2, _loaded, recipe)
    assert not own + same + other
    assert ("this AdamW is the part of another rank" in wrong) == (recipe == "zero3")
