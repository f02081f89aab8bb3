"""Leaves are never stale: random lives of modules under ZeRO, with whatever users do to parameters between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor

from autopar._torch import local_of
from autopar.errors import RunError
from autopar.layout import Step, steps
from autopar.plan import Plan
from autopar.prefetching import due
from autopar.recipes import roles
from autopar.runtime import coalesced
from autopar.runtime import leaves as leaves_module
from autopar.runtime.gradient_buckets import sync_steps
from autopar.runtime.gradsync import GradSync
from autopar.runtime.leaves import Leaves, Reader, owners
from autopar.runtime.params import Held
from autopar.verify.reference import Results, trainable
from autopar.verify.step import RankCase, step
from passes.interpret import Interpret
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_recipe, by_roles, by_stages, planned, subject
from tests.helpers.zero_plans import ROLES, offloaded

Act = Callable[[], float]


def life(
    params: Mapping[str, Tensor], train: Act, evaluate: Act, clip: Callable[[], object], load: Callable[[float], object]
) -> list[float]:
    """What users do, in an order in which every leaf would be stale if anything were remembered; all losses on the
    way."""
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2)
    losses = []

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses.append(train())
    step()
    losses += [evaluate(), train(), train()]
    clip()
    step()
    with torch.no_grad():
        for p in params.values():
            p.mul_(1.01)
    losses += [evaluate(), evaluate()]
    for p in params.values():
        p.data.sub_(0.001)  # no version counter shows it
    losses += [evaluate(), train()]
    step()
    load(0.9)
    losses += [evaluate(), train()]
    step()
    return [*losses, evaluate()]


@cache
def alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The life of the plain graph on one device."""
    who = subject(name)
    case = who.case(by_recipe(who, (4,), "ddp"))
    names = trainable(case.gm)
    held = {n: w.detach().clone().requires_grad_(n in names) for n, w in {**case.weights, **case.constants}.items()}
    params = {n: held[n] for n in names}

    def loss() -> Tensor:
        outputs = Interpret(case.gm, held).run_named(case.batch)
        return next(v for v, about in zip(outputs, case.gm.meta["outputs"], strict=True) if about["kind"] == "loss")

    def train() -> float:
        value = loss()
        value.backward()
        return float(value.detach())

    def load(factor: float) -> None:
        for n, p in params.items():
            p.data.copy_(case.weights[n] * factor)

    losses = life(
        params,
        train,
        lambda: float(loss().detach()),
        lambda: torch.nn.utils.clip_grad_norm_(params.values(), 1e-2),
        load,
    )
    return losses, {n: p.detach() for n, p in params.items()}


def lived(source: str, rank_case: RankCase) -> tuple[list[float], dict[str, Tensor]]:
    """The same on one rank."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)

    def evaluate() -> float:
        with torch.no_grad():
            return float(module(*batch)["loss"])

    def load(factor: float) -> None:
        module.load_state_dict(
            {
                n: w * factor if w.is_floating_point() else w
                for n, w in rank_case.weights.items()
                if n in module.state_dict()
            }
        )

    losses = life(
        dict(module.named_parameters()),
        lambda: float(module.train_step(*batch)),
        evaluate,
        lambda: module.clip_grad_norm_(1e-2),
        load,
    )
    return losses, {n: local for n, local in module.full_state_dict().items() if n in dict(module.named_parameters())}


LIVES: dict[str, Callable[[Subject], Plan]] = {
    "zero1": lambda who: by_recipe(who, (4,), "zero1"),
    "zero1 x tp": lambda who: by_roles(who, *ROLES["zero1 x tp"], "zero1 x tp"),
    "zero1 x zero1": lambda who: by_roles(who, *ROLES["zero1 x zero1"], "zero1 x zero1"),
    "zero3 x zero3": lambda who: by_roles(who, (2, 2), (roles.zero3, roles.zero3), "zero3 x zero3"),
    # gathers and scatters over both axes, per microbatch
    "1f1b of zero3 x zero2": lambda who: by_stages(who, (2, 2), (roles.zero3, roles.zero2), 2, 2, "1f1b"),
    "1f1b": lambda who: by_stages(who, (2,), "zero1", 2, 4, "1f1b"),
    "zero_offload": lambda who: offloaded(who, (4,)),
    "optimizer_offload": lambda who: offloaded(who, (4,), "optimizer_offload"),
    "1f1b zero2": lambda who: by_stages(who, (2,), "zero2", 2, 4, "1f1b"),
    "1f1b zero2 on the host": lambda who: replace(by_stages(who, (2,), "zero2", 2, 4, "1f1b"), offload="parameters"),
    "zbv with optimizer state on the host": lambda who: replace(
        by_stages(who, (2,), "zero1", 2, 4, "zbv_zero_bubble", 2), offload="optimizer"
    ),
}
LONG = ("zero1 x tp", "zero3 x zero3", "1f1b of zero3 x zero2")  # their parts are in others


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.slow) if plan in LONG else plan for plan in LIVES]
)
def test_a_leaf_is_never_stale(plan: str) -> None:
    who = subject("hf-gpt2")
    made = LIVES[plan](who)
    case = who.case(made)
    losses, params = alone("hf-gpt2")
    seen: dict[str, None] = {}
    for got, state in living(made.ranks).run(lived, case.source(), case.rank_case):
        assert got == pytest.approx(losses, rel=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(value, params[name], rtol=0, atol=1e-9)
            seen[name] = None
    assert set(seen) == set(params)


def _two_forwards(source: str, rank_case: RankCase) -> tuple[float, str]:
    """One rank: the gradient of two forwards at once against twice that of one, and what a backward says whose weights
    have changed."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)
    (module(*batch)["loss"] + module(*batch)["loss"]).backward()
    both = {n: local_of(p.grad).clone() for n, p in module.named_parameters() if p.grad is not None}
    for p in module.parameters():
        p.grad = None
    old = module(*batch)["loss"]
    old.backward(retain_graph=True)
    gap = max(
        float((both[n] - 2 * local_of(p.grad)).abs().max())
        for n, p in module.named_parameters()
        if p.grad is not None and p.numel()
    )
    torch.optim.AdamW(module.parameters(), lr=1e-2).step()
    module(*batch)
    try:
        old.backward()
    except RunError as error:
        return gap, str(error)
    return gap, ""


def test_graphs_of_unchanged_weights_stay_good_and_others_say_so() -> None:
    who = subject("hf-gpt2")
    case = who.case(by_recipe(who, (4,), "zero1"))
    for gap, words in living(4).run(_two_forwards, case.source(), case.rank_case):
        assert gap < 1e-12
        assert "modified by an in-place operation between forward and backward" in words


def _in_buckets(limit: int, source: str, rank_case: RankCase, wanted: Results) -> float:
    """One rank: the largest difference of a step whose buckets of leaves and of gradients have about `limit` bytes. It
    checks what the buckets of leaves hold, and whenever some are filled, which of their collectives have begun."""
    seen, numbers, filled, finish = dict[int, Leaves](), dict[int, int](), [0], Leaves.finish

    syncs, fill = list[GradSync](), GradSync.fill

    def filled_sync(sync: GradSync, held: Sequence[Held], bucket_bytes: int) -> None:
        syncs.append(sync)
        fill(sync, held, bucket_bytes)

    def numbered(blocks: Iterable[Reader]) -> dict[int, int]:
        numbers.update(owners(blocks))
        return numbers

    def checked(leaves: Leaves, index: int) -> None:
        before = leaves.done
        finish(leaves, index)
        seen[id(leaves)] = leaves
        filled[0] += leaves.done - before
        assert leaves.done == max(before, index + 1)
        _check_begun(leaves)

    with (
        mock.patch.object(GradSync.__init__, "__defaults__", (limit,)),
        mock.patch.object(Leaves.__init__, "__defaults__", (limit,)),
        mock.patch.object(Leaves, "finish", checked),
        mock.patch.object(leaves_module, "owners", numbered),
        mock.patch.object(GradSync, "fill", filled_sync),
        mock.patch.object(coalesced, "start_all_gather", wraps=coalesced.start_all_gather) as gathers,
    ):
        gaps, _ = step(source, rank_case, wanted)
    (leaves,) = seen.values()
    _check_gradient_buckets(syncs[0], limit)
    _check_buckets(leaves, numbers, limit)
    passes, rest = divmod(filled[0], len(leaves.buckets))
    assert passes >= 3 and not rest  # two steps and an evaluation
    assert gathers.call_count == passes * sum(bucket.legs for bucket in leaves.buckets)
    return max(gaps.values())


def _by_stages(source: str, rank_case: RankCase, wanted: Results) -> tuple[float, list[list[int]]]:
    """One rank: the largest difference of a step of a pipeline, whose buckets of leaves begin when they are due; and
    for each of its stages the numbers of its buckets."""
    finish = Leaves.finish

    def checked(leaves: Leaves, index: int) -> None:
        finish(leaves, index)
        _check_begun(leaves)

    with mock.patch.object(Leaves.__init__, "__defaults__", (1024,)), mock.patch.object(Leaves, "finish", checked):
        module = rank_case.build(source)
        gaps, _ = step(source, rank_case, wanted)
    where = {id(part.w): stage.index for stage in module.stages for part in (stage, *stage._blocks())}
    tables = [[id(table) for held in bucket.members for table, _ in held.readers] for bucket in module._leaves.buckets]
    of = [{where[table] for table in each} for each in tables]
    return max(gaps.values()), [[n for n, here in enumerate(of) if stage.index in here] for stage in module.stages]


def test_leaves_of_stages_are_gathered_one_stage_after_the_other() -> None:
    """Each place has two stages, of which the last one of all has no leaves. Each began its first buckets with the
    step: those of the second one were in front of the rest of the first one's."""
    who = subject("gpt")
    case = who.case(by_stages(who, (2,), "zero1", 2, 4, "interleaved_1f1b", 2))
    gaps, buckets = zip(*living(4).run(_by_stages, case.source(), case.rank_case, case.reference()), strict=True)
    assert max(gaps) < 1e-9
    assert [bool(second) for _, second in buckets] == [True, True, False, False]
    assert all(max(first) < min(second) for first, second in buckets[:2])


def _check_begun(leaves: Leaves) -> None:
    """Exactly the collectives that are due have begun."""
    legs = [bucket.legs for bucket in leaves.buckets]
    begun = [0] * len(legs)
    for done in range(leaves.done + 1):
        for number in due(legs, leaves.until, begun, done):
            begun[number] += 1
    assert [bucket.begun for bucket in leaves.buckets] == begun
    running = [number >= leaves.done and count > 0 for number, count in enumerate(begun)]
    assert [bucket.moved is not None for bucket in leaves.buckets] == running
    for bucket in leaves.buckets:
        if bucket.moved is not None:
            assert len(bucket.moved._left) == bucket.legs - bucket.begun


def _gathers(way: Sequence[Step]) -> list[int]:
    """The axes of the collectives that fill a leaf; none where it is moved by itself."""
    return [step.axis for step in way] if all(step.kind == "all_gather" for step in way) else []


def _check_buckets(leaves: Leaves, numbers: Mapping[int, int], limit: int) -> None:
    """Every leaf of its own is in one bucket, in the order of first use. A bucket ends where it is full, where
    other collectives follow, and in front of the leaves of another block where it is half full or the model's
    own; nowhere else. `numbers` are those of blocks, by the id of their table."""
    mesh = leaves.mesh
    members = [held for bucket in leaves.buckets for held in bucket.members]
    readers = [min(numbers.get(id(table), -1) for table, _ in held.readers) for held in members]
    ways = [_gathers(steps(held.info.entries, held.info.leaf_entries, mesh.sizes)) for held in members]
    assert len({held.name for held in members}) == len(members) > 0 and all(held.info.apart for held in members)
    assert readers == sorted(readers)
    for bucket in leaves.buckets:
        assert bucket.legs == len(ways[members.index(bucket.members[0])])
    ends = {sum(len(bucket.members) for bucket in leaves.buckets[: n + 1]) for n in range(len(leaves.buckets))}
    size = 0
    for at, held in enumerate(members[:-1]):
        size += held.leaf_bytes(mesh)
        other = ways[at] != ways[at + 1]
        block = readers[at] != readers[at + 1] and (2 * size >= limit or readers[at] < 0)
        assert (at + 1 in ends) == (size >= limit or other or block), (at, size)
        size = 0 if at + 1 in ends else size


def _check_gradient_buckets(sync: GradSync, limit: int) -> None:
    """No gradient is in two buckets; those of a bucket take the same collectives, and of such buckets all but the last
    are full, by their last gradient."""
    sizes: dict[object, list[int]] = {}
    for bucket in sync.buckets:
        each = [held.gradient_bytes(sync.mesh) for held in bucket.members]
        kinds = {(sync_steps(held, sync.mesh), held.local.dtype, held.info.each) for held in bucket.members}
        moves = {(tuple((s.kind, s.axis) for s in way), dtype, often) for way, dtype, often in kinds}
        assert len(moves) == 1 and sum(each[:-1]) < limit
        sizes.setdefault(moves.pop(), []).append(sum(each))
    assert all(full >= limit for filled in sizes.values() for full in filled[:-1])
    members = [held.name for bucket in sync.buckets for held in bucket.members]
    assert len(set(members)) == len(members) > 0


BUCKETS = [  # the plan, and the bytes of a bucket
    ("zero1 x zero1", 1),  # a leaf each
    ("zero1 x zero1", 1024),  # what several leaves have together
    ("zero1 x zero1", 600_000),  # those of a block are more than half of it
    ("random 0", 3072),  # leaves of their own and others, over one axis, both, or by other steps
]


@pytest.mark.parametrize(("how", "limit"), BUCKETS)
def test_leaves_are_right_and_begin_when_due_in_buckets_of_any_size(how: str, limit: int) -> None:
    who = subject("gpt")
    case = who.case(by_roles(who, *ROLES[how], how) if how in ROLES else planned(who, (2, 2), how))
    gaps = living(4).run(_in_buckets, limit, case.source(), case.rank_case, case.reference())
    assert max(gaps) < 1e-9
