"""Clipping by the global norm on ranks and over pipeline stages equals torch's on one device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import Watch, local_of, pytree
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.verify.reference import train_step
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_chance, by_recipe, by_stages, subject

NORM = 1e-3


KINDS = (2.0, 1.0, 3.5, math.inf)
"""Norms that are compared."""


def _clipped(source: str, rank_case: RankCase) -> dict[float, tuple[float, dict[str, Tensor]]]:
    """One rank: by kind of norm the norm, and what it holds whole of its gradients afterwards."""
    found, module = dict[float, tuple[float, dict[str, Tensor]]](), rank_case.build(source)
    module.train_step(*module.shard_batch(**rank_case.batch))
    own = [local_of(p.grad) for p in module.parameters() if p.grad is not None]
    before = [grad.clone() for grad in own]
    for kind in KINDS:
        for grad, was in zip(own, before, strict=True):
            grad.copy_(was)
        with Watch(_of_local_tensors):
            norm = module.clip_grad_norm_(NORM, norm_type=kind, error_if_nonfinite=True)  # which a finite one is not
        found[kind] = float(norm), {name: grad for name, grad in module.full_grads().items() if grad is not None}
    return found


def _of_local_tensors(operator: object, args: tuple[object, ...], *_: object) -> None:
    """DTensor decides about each of a list of gradients, and anew for every list: that takes longer than the step."""
    assert not any(isinstance(each, DTensor) for each in pytree.tree_leaves(args)), operator


def _not_finite(source: str, rank_case: RankCase, kind: float) -> tuple[str, float, bool]:
    """One rank: where one element of one gradient is nan on the last rank, what is said, the norm, and whether
    gradients were as they are when that was said."""
    module = rank_case.build(source)
    module.train_step(*module.shard_batch(**rank_case.batch))
    own = [local_of(p.grad) for p in module.parameters() if p.grad is not None and local_of(p).numel()]
    if dist.get_rank() == dist.get_world_size() - 1:
        own[-1].view(-1)[-1] = math.nan
    before = [grad.clone() for grad in own]
    with pytest.raises(RunError) as said:
        module.clip_grad_norm_(NORM, kind, error_if_nonfinite=True)
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(own, before, strict=True))
    return str(said.value), float(module.clip_grad_norm_(NORM, kind)), same


FLAT: dict[str, Callable[[Subject], Plan]] = {
    "tp": lambda who: by_recipe(who, (2,), "tp"),
    "zero3": lambda who: by_recipe(who, (4,), "zero3"),
    "hsdp": lambda who: by_recipe(who, (2, 2), "hsdp"),
    "random": lambda who: by_chance(who, (2, 2), 1),
}
STAGED: dict[str, Callable[[Subject], Plan]] = {
    "1f1b": lambda who: by_stages(who, (2,), "tp", 2, 2, "1f1b"),
    "zbv": lambda who: by_stages(who, (1,), "single", 2, 4, "zbv_zero_bubble", 2),
}


@pytest.mark.parametrize("plan", FLAT)
def test_the_norm_is_that_of_one_device(plan: str) -> None:
    _right(FLAT[plan])


@pytest.mark.parametrize("plan", STAGED)
def test_the_norm_over_stages_is_that_of_one_device(plan: str) -> None:
    _right(STAGED[plan])


def _right(plan: Callable[[Subject], Plan]) -> None:
    who = subject("hf-gpt2")  # tied: both ends of the pipeline hold the table
    made = plan(who)
    case = who.case(made)
    wanted = train_step(case.gm, {**case.weights, **case.constants}, case.batch, training=True)["gradient"]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in wanted.values()]
    results = living(made.ranks).run(_clipped, case.source(), case.rank_case)
    for kind in KINDS:
        for p, g in zip(params, wanted.values(), strict=True):
            p.grad = g.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(params, NORM, kind))
        expected = {name: p.grad for name, p in zip(wanted, params, strict=True)}
        seen: dict[str, None] = {}
        for got, grads in (found[kind] for found in results):
            assert got == pytest.approx(norm, rel=1e-12)
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-9, atol=1e-15)
                seen[name] = None
        assert set(seen) == set(expected)


@pytest.mark.parametrize(("plan", "kind"), [("zero3", math.inf), ("zbv", math.inf), ("zbv", 2.0)])
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(plan: str, kind: float) -> None:
    who = subject("hf-gpt2")
    made = {**FLAT, **STAGED}[plan](who)
    case = who.case(made)
    for said, norm, same in living(made.ranks).run(_not_finite, case.source(), case.rank_case, kind):
        assert "the norm of all gradients is nan, and error_if_nonfinite was asked for: no gradient was scaled" in said
        assert math.isnan(norm) and same


def _by_torch(source: str, rank_case: RankCase) -> tuple[str, bool]:
    """One rank: what is said of torch's function, and whether gradients were as they are when that was said."""
    module = rank_case.build(source)
    module.train_step(*module.shard_batch(**rank_case.batch))
    own = [local_of(p.grad) for p in module.parameters() if p.grad is not None]
    before = [grad.clone() for grad in own]
    with pytest.raises(RunError) as said:
        torch.nn.utils.clip_grad_norm_(module.parameters(), NORM)
    torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], NORM)  # of another model
    return str(said.value), all(torch.equal(a, b) for a, b in zip(own, before, strict=True))


@pytest.mark.parametrize("plan", STAGED)
def test_torchs_function_is_refused_in_pipelines(plan: str) -> None:
    """Each place scaled its gradients by the norm of its own parameters, in silence."""
    who = subject("hf-gpt2")
    made = STAGED[plan](who)
    case = who.case(made)
    for said, same in living(made.ranks).run(_by_torch, case.source(), case.rank_case):
        assert "in a pipeline a rank has those of its own place alone" in said and same


UNKNOWN = (0, -1.0, math.nan, "2", None)
"""What is no kind of norm."""


def _unknown(source: str, rank_case: RankCase) -> list[str]:
    """One rank: what is said of each."""
    module, said = rank_case.build(source), []
    for kind in UNKNOWN:
        with pytest.raises(RunError) as error:
            module.clip_grad_norm_(NORM, norm_type=kind)  # type: ignore[arg-type]
        said.append(str(error.value))
    return said


def test_other_norms_are_refused() -> None:
    who = subject("hf-gpt2")
    case = who.case(by_recipe(who, (1,), "single"))
    for kind, said in zip(UNKNOWN, living(1).run(_unknown, case.source(), case.rank_case)[0], strict=True):
        assert f"norm_type is {kind!r}; wanted a number above 0, or math.inf" in said
