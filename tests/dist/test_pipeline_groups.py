"""All ranks make their process groups in one order, whatever each of them holds."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.runtime import PipelinedModule
from autopar.runtime.mesh import Mesh
from autopar.verify.step import RankCase
from tests.helpers.ranks import on_new_ranks
from tests.helpers.verify import by_stages, subject


def _groups_of(source: str, rank_case: RankCase) -> tuple[int, str, list[str]]:
    """One rank: how many weights it holds, the name of its own group in the mesh of its place, and those of places with
    copies of one weight."""
    module = rank_case.build(source)
    assert isinstance(module, PipelinedModule)
    group = module.MESH.group(0)
    assert group is not None
    return (
        len(module.declared()),
        group.group_name,
        [shared.group.group_name for shared in module._shared if shared.mine],
    )


def test_a_place_that_holds_nothing_makes_the_groups_of_the_mesh_as_the_others_do() -> None:
    """Its own group had the name of that of two other places, who now and then took its address for each other's, and
    waited for ever."""
    who = subject("hf-gpt2")
    case = who.case(by_stages(who, (1,), "single", 4, 1, "naive"))
    held, own, shared = zip(*on_new_ranks(4, _groups_of, case.source(), case.rank_case), strict=True)
    assert not all(held) and any(shared), "the case is one of a place without weights, and of a weight on two places"
    together = {name for names in shared for name in names}
    assert len(set(own)) == 4 and not together & set(own), (own, shared)
    assert len(together) == 1 and sum(map(len, shared)) == 2, shared


def _some_places(_: None) -> tuple[str, float]:
    """One rank: two places have a group of their own before the last one has asked for its mesh."""
    mesh, rank = Mesh((1,), ("one",), places=4), dist.get_rank()
    if rank < 3:
        mesh.meet()
    group, total = mesh.places_group((0, 2)), torch.tensor([float(rank)])
    if rank in (0, 2):
        dist.all_reduce(total, group=group)
    own = mesh.group(0)
    assert own is not None
    return own.group_name, float(total)


def test_a_group_of_some_places_is_made_after_those_of_the_mesh() -> None:
    own, totals = zip(*on_new_ranks(4, _some_places, None), strict=True)
    assert len(set(own)) == 4 and totals == (2.0, 1.0, 2.0, 3.0)


def _parted(source: str, rank_case: RankCase) -> str:
    """One rank: what is said of a first step when the last place's copy of a weight was set to other values."""
    module = rank_case.build(source)
    assert isinstance(module, PipelinedModule)
    (shared,) = module._shared
    if dist.get_rank():
        module._held[shared.names[0]].local.add_(1.0)
    try:
        module.train_step(*module.shard_batch(**rank_case.batch))
    except RunError as error:
        return str(error)
    return ""


def test_copies_of_a_weight_on_several_places_are_compared_before_the_first_step() -> None:
    """Those of ranks of one place alone were: set differently on each place they would get the same gradients, and
    never become alike."""
    case = subject("hf-gpt2").case(by_stages(subject("hf-gpt2"), (1,), "single", 2, 4, "1f1b"))
    said = on_new_ranks(2, _parted, case.source(), case.rank_case)
    assert all(
        "copies of one tensor are not the same on all ranks that have one: transformer.wte.weight" in each
        for each in said
    ), said
