"""An optimizer whose state is another rank's part is refused, and that of a replica is taken."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

import autopar
from tests.dist.test_refused import ROWS, WIDTH, Model, said
from tests.helpers.ranks import on_ranks


def _loaded(recipe: str) -> list[str]:
    """What is said of a step with the state that each rank saved, by rank."""
    torch.manual_seed(0)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    made = autopar.compile(
        Model(hidden=WIDTH), f"cpu:1x{dist.get_world_size()}", batch, recipe=recipe, time_limit_s=5.0
    )
    optimizer, file = torch.optim.AdamW(made.parameters(), 1e-2), io.BytesIO()
    made.train_step(*made.shard_batch(*batch))
    optimizer.step()
    torch.save(optimizer.state_dict(), file)
    saved = [b""] * dist.get_world_size()
    dist.all_gather_object(saved, file.getvalue())
    found = []
    for each in saved:
        optimizer.load_state_dict(torch.load(io.BytesIO(each), weights_only=False))
        found.append(said(optimizer.step))
    return found


@pytest.mark.parametrize(
    ("recipe", "taken"),
    [
        ("ddp", [{0, 1}, {0, 1}]),
        ("zero3", [{0}, {1}]),
        ("1f1b", [{0}, {1}]),  # as many parameters of the same shapes, of another layer
        ("hsdp", [{0, 2}, {1, 3}, {0, 2}, {1, 3}]),
    ],
)
def test_state_of_an_optimizer_from_another_rank(recipe: str, taken: list[set[int]]) -> None:
    for messages, own in zip(on_ranks(len(taken), _loaded, recipe), taken, strict=True):
        for rank, message in enumerate(messages):
            assert message.startswith(f"the state of this AdamW is the part of another rank, {rank}") != (rank in own)
