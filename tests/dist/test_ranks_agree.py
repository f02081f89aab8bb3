"""What ranks must agree on: weights, parts of the batch, and the state of the process."""

from __future__ import annotations

import contextlib
import warnings
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autopar
from autopar._torch import local_of
from autopar.errors import RunError
from autopar.runtime import failures
from autopar.runtime.collectives import start_all_reduce, start_reduce_scatter
from tests.dist.test_api import model_and_batch, train
from tests.helpers.ranks import on_new_ranks, on_ranks


def _unseeded(cluster, recipe):
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.register_buffer("flags", torch.rand(3) > 0.5)
    model.register_buffer("fixed", torch.rand(4), persistent=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = autopar.compile(
            model, cluster, (torch.ones(8, 8), torch.ones(8, 4)), loss_fn=F.mse_loss, recipe=recipe
        )
        first = compiled.full_state_dict()
    assert (
        compiled.train() is compiled
        and compiled.eval().train_step(*compiled.shard_batch(torch.ones(8, 8), torch.ones(8, 4))) > 0
    )
    compiled.zero_grad()
    assert all(parameter.grad is None for parameter in compiled.parameters()) and dict(compiled.named_buffers())
    return first, dict(model.state_dict()), [str(one.message) for one in said if "rank 0" in str(one.message)]


@pytest.mark.parametrize("recipe", ["ddp", "zero3"])
def test_ranks_without_a_seed_have_the_weights_of_rank_0(recipe):
    (first, made, said), *others = on_ranks(2, _unseeded, "cpu:1x2", recipe)
    for name, value in first.items():
        assert torch.equal(value, made[name])
        for state, mine, _ in others:
            assert torch.equal(state[name], value)
            assert name in (
                "1.num_batches_tracked",
                "1.running_mean",
                "1.running_var",
                "1.weight",
                "1.bias",
                "flags",
            ) or not torch.equal(mine[name], value)
    assert len(said) == 1 and "Seed all ranks alike" in said[0] and not any(told for *_, told in others)


def test_ranks_with_a_seed_keep_their_weights():
    with mock.patch("autopar.runtime.rank0_weights._broadcast", side_effect=AssertionError("nothing is sent")):
        on_new_ranks(2, train, "cpu:1x2", {"recipe": "ddp"}, "sgd", 1)


def _own_data(cluster, recipe):
    model, batch = model_and_batch()
    compiled = autopar.compile(model, cluster, batch, recipe=recipe)
    local = compiled.shard_batch(
        *(tensor + torch.distributed.get_rank() if tensor.is_floating_point() else tensor for tensor in batch)
    )
    try:
        compiled.train_step(*local)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("tp", "ranks 0 and 1 have the same part of the batch"),
        ("naive_mp", "ranks 0 and 1 have the same part of the batch"),
        ("ddp", ""),
    ],
)
def test_ranks_that_work_on_one_batch_have_the_same(recipe, why):
    for said in on_ranks(2, _own_data, "cpu:1x2", recipe):
        assert why in said and bool(why) == bool(said)


def _own_dtype():
    """What a rank says of the first step, and of the third, where rank 1 has floats of another dtype."""
    failures.LOOK_S = 0.1
    model, batch = model_and_batch()
    compiled = autopar.compile(model, "cpu:1x2", batch, recipe="ddp")
    right, found = compiled.shard_batch(*batch), []
    wrong = [one.float() if dist.get_rank() and one.is_floating_point() else one for one in right]
    for given in (wrong, right, wrong):
        try:
            compiled.train_step(*given)
        except RunError as error:
            found.append(str(error))
    return found


def test_inputs_of_other_dtypes_on_a_rank_are_refused():
    for said in on_new_ranks(2, _own_dtype):
        assert len(said) == 2
        assert all("input 'x' is torch.float32 on rank 1 and torch.float64 on rank 0" in each for each in said)


def differing(recipe, who):
    """What a rank says of a step before which rank `who` alone changed a weight."""
    torch.manual_seed(0)
    model, batch = model_and_batch()
    compiled = autopar.compile(model, "cpu:1x2", batch, recipe=recipe)
    local, said = compiled.shard_batch(*batch), ""
    with torch.no_grad():
        weight = next(iter(compiled.parameters()))
        if torch.distributed.get_rank() == who:
            local_of(weight).add_(1.0)
    try:
        compiled.train_step(*local)
    except RunError as error:
        said = str(error)
    return said


@pytest.mark.parametrize("recipe, copies", [("ddp", True), ("zero3", False)])
def test_copies_of_a_weight_that_differ_are_refused(recipe, copies):
    for said in on_ranks(2, differing, recipe, 1):
        assert ("copies of one tensor are not the same" in said) is copies


def _failing(recipe, goes_on):
    """What a rank says of each of three steps, of which the second has a batch of a wrong size on rank 1; that rank
    skips it and goes on, or stops."""
    failures.LOOK_S = 0.1
    torch.manual_seed(0)
    model, batch = model_and_batch()
    compiled, said = autopar.compile(model, "cpu:1x2", batch, recipe=recipe), []
    local = compiled.shard_batch(*batch)
    for number in range(3):
        given = (local[0][:, :-1], *local[1:]) if number == 1 and dist.get_rank() else local
        try:
            compiled.train_step(*given)
            said.append("")
        except RunError as error:
            said.append(str(error))
            if not goes_on:
                return said
    return said


@pytest.mark.parametrize("recipe", ["ddp", "zero3", "naive_mp"])
def test_a_rank_that_fails_before_its_step_tells_the_others_why(recipe):
    other, failed = on_new_ranks(2, _failing, recipe, False)
    assert failed[1].startswith("input 'x'") and not failed[0] and not other[0]
    assert f"collective: rank 1 failed: RunError: {failed[1]}" in other[1]


def test_ranks_in_different_steps_are_refused():
    for rank, said in enumerate(on_new_ranks(2, _failing, "tp", True)):
        assert "steps begun is 3 on rank 1 and 2 on rank 0" in said[2 if rank else 1]


def _notes():
    """What each rank knows of the failures of others: after one that it alone did not have, in the next step, and after
    one that all had."""
    found, rank = [], dist.get_rank()

    def look():
        dist.barrier()
        found.append(failures.of_others())
        dist.barrier()

    with failures.step():  # notes of failures in earlier tests on these ranks do not count any more
        pass
    dist.barrier()
    with pytest.raises(ValueError) if rank else contextlib.nullcontext(), failures.step():
        if rank:
            raise ValueError("of rank 1")
    look()
    with failures.step():
        look()
    with pytest.raises(ValueError), failures.step():
        raise ValueError("of all")
    look()
    return found


def test_a_failure_counts_until_the_next_step_of_its_rank_and_where_it_is_not_that_of_all():
    assert on_ranks(2, _notes) == [["rank 1 failed: ValueError: of rank 1", "", ""], ["", "", ""]]


def _failing_together(error, apart):
    """What a rank says behind a step in which all fail, rank 1 after more collectives where they are `apart`."""
    with contextlib.suppress(ValueError, KeyboardInterrupt), failures.step():
        for _ in range(1 + (apart and dist.get_rank())):
            failures.talks()
        raise error
    for _ in range(dist.get_rank()):
        failures.talks()  # outside of a step
    try:
        with failures.step():
            return ""
    except RunError as said:
        return str(said)


@pytest.mark.parametrize(
    ("error", "apart", "refused"), [(ValueError(), 0, False), (ValueError(), 1, True), (KeyboardInterrupt(), 0, True)]
)
def test_a_step_begins_after_one_in_which_all_ranks_failed_at_the_same_place(error, apart, refused):
    for said in on_new_ranks(2, _failing_together, error, apart):
        assert said.startswith("a step failed before this one, and not on all ranks alike") is refused


def _of_another_plan(folders):
    """What a rank says that has loaded a plan of its own."""
    compiled = autopar.load(folders[dist.get_rank()])
    with pytest.raises(RunError) as said:
        compiled.parameters()
    return str(said.value)


def test_ranks_with_different_plans_are_refused(tmp_path):
    model, batch = model_and_batch()
    recipes = ("ddp", "tp")
    folders = [autopar.compile(model, "cpu:1x2", batch, recipe=one).save(tmp_path / one) for one in recipes]
    for said in on_ranks(2, _of_another_plan, folders):
        assert (
            "ranks have different programs: rank 0 ddp on mesh (2,) of" in said and "rank 1 tp on mesh (2,) of" in said
        )


def _planted(backward, real, *given, **sizes):
    """A forward that ends in an error, or whose backward does."""
    made = real(*given, **sizes)
    if backward:
        loss = made[-1] if isinstance(made[-1], torch.Tensor) else made[-1][-1]
        loss.register_hook(lambda _: made[0].planted)
        return made
    raise ValueError("planted")


def _failing_inside(recipe, backward):
    """What a rank says of each of three steps, where rank 1 fails in the middle of the second, and all go on."""
    failures.LOOK_S = 0.1
    torch.manual_seed(0)
    model, batch = model_and_batch()
    compiled, said = autopar.compile(model, "cpu:1x2", batch, recipe=recipe), []
    local, module = compiled.shard_batch(*batch), compiled.module
    scope = getattr(module, "stages", [module])[-1]
    for number in range(3):
        given = partial(_planted, backward, scope.forward)
        planted = dist.get_rank() and number == 1
        with mock.patch.object(scope, "forward", given) if planted else contextlib.nullcontext():
            try:
                compiled.train_step(*local)
                said.append("")
            except (RunError, ValueError, AttributeError) as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("recipe", "backward", "why"),
    [("zero3", False, "ValueError: planted"), ("1f1b", False, "ValueError: planted"), ("1f1b", True, "AttributeError")],
)
def test_a_rank_that_fails_in_its_step_tells_the_others_why_and_all_refuse_the_next(recipe, backward, why):
    """Places of a pipeline waited for each other until the timeout of their group, and ranks that went on for what is
    still under way."""
    other, failed = on_new_ranks(2, _failing_inside, recipe, backward)
    assert not failed[0] and not other[0]
    assert other[1].startswith("waiting for") and f"rank 1 failed: {why}" in other[1]
    for said in (other, failed):
        assert said[2].startswith("a step failed before this one, and not on all ranks alike")


def _waiting(seconds):
    """What rank 0 says of a sum to which the other rank does not come."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    if dist.get_rank():
        return ""
    mesh = SimpleNamespace(sizes=(2,), group=lambda axis, behind: group)
    try:
        return str(start_all_reduce(torch.ones(3), 0, mesh)())
    except RunError as error:
        return str(error)


def test_a_rank_that_waits_for_one_that_failed_says_so():
    waiting, _ = on_new_ranks(2, _waiting, 0.5)
    assert waiting.startswith("waiting for the other ranks in a collective failed (")


def _scattering():
    """What rank 0 says of a reduce-scatter whose other rank has closed its connections."""
    group = dist.new_group()
    dist.barrier(group)
    if dist.get_rank():
        dist.destroy_process_group(group)
        return ""
    mesh = SimpleNamespace(sizes=(2,), group=lambda axis, behind: group)
    try:
        return str(start_reduce_scatter(torch.ones(2, 3), 0, mesh)())
    except RunError as error:
        return str(error)


def test_a_rank_that_waits_in_a_reduce_scatter_for_one_that_is_gone_says_so():
    """gloo's never says that it is completed: the rank asked again and again."""
    waiting, _ = on_new_ranks(2, _scattering)
    assert waiting.startswith("waiting for the other ranks in a collective failed (")
    assert "Look for the rank that failed first" in waiting
