"""Ranks that shut torch.distributed down and start it again, as elastic trainers do: what is made then trains as
before, and what was made before says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime import Mesh
from autopar.verify.step import RankCase
from tests.helpers.ranks import on_new_ranks
from tests.helpers.verify import by_recipe, by_stages, subject


def _started_again(source: str, rank_case: RankCase, store: str) -> tuple[list[float], str]:
    """One rank: losses and norms of gradients before and behind another start, and what a module of before it says."""
    said, old = list[float](), ""
    for start in range(2):
        module = rank_case.build(source)
        batch = module.shard_batch(**rank_case.batch)
        said += [float(module.train_step(*batch)), float(module.clip_grad_norm_(1.0))]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if not start:
            dist.destroy_process_group()
            with pytest.raises(RunError, match="is not initialised"):
                module.train_step(*batch)
            dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
            with pytest.raises(RunError) as caught:
                module.train_step(*batch)
            old = str(caught.value)
    return said, old


@pytest.mark.parametrize("plan", ["zero3", pytest.param("1f1b", marks=pytest.mark.slow)])
def test_ranks_that_start_again(plan: str, tmp_path: Path) -> None:
    """The groups of the first start were kept, and torch ended the next model with 'Group is not registered'."""
    who = subject("hf-gpt2")
    made = by_stages(who, (1,), "single", 2, 2, "1f1b") if plan == "1f1b" else by_recipe(who, (2,), plan)
    case = who.case(made)
    for (loss, norm, *again), old in on_new_ranks(
        2, _started_again, case.source(), case.rank_case, str(tmp_path / "store")
    ):
        assert again == pytest.approx([loss, norm], rel=1e-12)
        assert "torch.distributed was shut down and started again since this module was made" in old


def _started_late(store: str) -> str:
    """One of two ranks: what the mesh of one rank, which was met before torch.distributed was started, says then."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # or one is gone while the other still connects
    dist.destroy_process_group()
    mesh = Mesh((1,), ("alone",), "cpu")
    assert mesh.meet() is None
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    with pytest.raises(RunError) as caught:
        mesh.meet()
    return str(caught.value)


def test_a_plan_of_one_rank_is_refused_on_two_that_start_late(tmp_path: Path) -> None:
    """What was found before the start was kept: each of the ranks trained a model of its own, without a word."""
    for said in on_new_ranks(2, _started_late, str(tmp_path / "store")):
        assert said.startswith("wrong number of ranks: got 2, wanted 1")
