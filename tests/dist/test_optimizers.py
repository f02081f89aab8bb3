"""Optimizers of torch on emitted modules step as on one device, and so do hooks of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor, Partial

from autopar.errors import RunError
from autopar.plan import Plan
from autopar.runtime import GradScaler
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_chance, by_recipe, by_stages, subject

STEPS = 3


class Lamb(optim.Optimizer):
    """As users write it: branches on norms of single parameters, which they keep, and a step without a closure."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["second"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                update = state["first"] / (state["second"].sqrt() + 1e-3)
                weight, length = p.norm(), update.pow(2).sum().sqrt()
                state["trust"] = 1.0 if weight == 0 or length == 0 else weight / length
                p.add_(update * state["trust"], alpha=-group["lr"])


MADE: dict[str, Callable[[Iterable[nn.Parameter]], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD of lists": lambda p: optim.SGD(p, 1e-2, momentum=0.9, foreach=True),
    "Adam": lambda p: optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW of lists": lambda p: optim.AdamW(p, 1e-2, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, 1e-2, fused=True),
    "AdamW fused": lambda p: optim.AdamW(p, 1e-2, fused=True),
    "Adamax": lambda p: optim.Adamax(p, 1e-2),
    "NAdam": lambda p: optim.NAdam(p, 1e-2),
    "RAdam": lambda p: optim.RAdam(p, 1e-2),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "Adadelta": lambda p: optim.Adadelta(p, 1e-1),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3, centered=True, momentum=0.5),
    "ASGD": lambda p: optim.ASGD(p, 1e-2),
    "Muon": lambda p: optim.Muon([x for x in p if x.ndim == 2], 1e-2),
    "LAMB of one's own": Lamb,
}
REFUSED: dict[str, tuple[Callable[[Iterable[nn.Parameter]], optim.Optimizer], str]] = {
    "Adafactor": (lambda p: optim.Adafactor(p, 1e-2), "a sum, norm or maximum of which each rank has a part"),
    "Rprop": (lambda p: optim.Rprop(p, 1e-3), "in-place operations that require placement changes are not supported"),
    "SGD fused": (lambda p: optim.SGD(p, 1e-2, fused=True), "does not have a sharding strategy registered"),
    "Adagrad fused": (lambda p: optim.Adagrad(p, 1e-2, fused=True), "does not have a sharding strategy registered"),
}
PLANS: dict[str, Callable[[Subject], Plan]] = {
    "zero3": lambda who: by_recipe(who, (2,), "zero3"),
    "zero1": lambda who: by_recipe(who, (2,), "zero1"),
    "megatron": lambda who: by_recipe(who, (2,), "megatron"),
    "pp ddp": lambda who: by_stages(who, (2,), "ddp", 2, 2, "1f1b"),
    "pp megatron": lambda who: by_stages(who, (2,), "megatron", 2, 2, "1f1b"),
    "random": lambda who: by_chance(who, (2, 2), 1),
    "1f1b": lambda who: by_stages(who, (1,), "single", 2, 2, "1f1b"),
    "gathered and read": lambda who: by_chance(who, (2,), 9),
}


def _stepped(source: str, rank_case: RankCase, name: str) -> dict[str, Tensor]:
    """One rank: the whole parameters after some steps of an optimizer."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)
    optimizer = MADE[name](list(module.parameters()))
    # Muon rounds so much that whose sums come first shows
    with mock.patch.object(Tensor, "bfloat16", lambda self: self):
        for _ in range(STEPS):
            module.train_step(*batch)
            optimizer.step()
            optimizer.zero_grad()
    return module.full_state_dict()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("mlp", "zero3"),
        ("mlp", "random"),
        *(
            pytest.param(name, plan, marks=pytest.mark.slow)
            for name in ("gpt", "hf-gpt2", "hf-t5")
            for plan in ("zero3", "zero1", "random", "1f1b")
        ),
    ],
)
def test_optimizers_step_as_on_one_device(name: str, plan: str) -> None:
    who = subject(name)
    alone, made = who.case(by_recipe(who, (1,), "single")), PLANS[plan](who)
    case = who.case(made)
    for optimizer in MADE:  # a job for each: all of them take longer than ranks have for one
        (right,) = living(1).run(_stepped, alone.source(), alone.rank_case, optimizer)
        for found in living(made.ranks).run(_stepped, case.source(), case.rank_case, optimizer):
            for parameter, value in found.items():
                torch.testing.assert_close(
                    value,
                    right[parameter],
                    rtol=1e-9,
                    atol=1e-9,
                    msg=lambda text, o=optimizer, p=parameter: f"{o}, {p}: {text}",
                )


def _refused(source: str, rank_case: RankCase, name: str) -> str:
    module = rank_case.build(source)
    module.train_step(*module.shard_batch(**rank_case.batch))
    try:
        REFUSED[name][0](list(module.parameters())).step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_step_on_shards_says_so(name: str) -> None:
    """When this fails, torch can: say so in docs/training.md, and of what is fused in autopar/optimizers.py."""
    who = subject("gpt")
    case = who.case(by_recipe(who, (2,), "zero3"))
    for said in living(2).run(_refused, case.source(), case.rank_case, name):
        assert REFUSED[name][1] in said


def _plain(source: str, rank_case: RankCase) -> dict[str, Tensor]:
    """One rank: what `_hooked` comes to."""
    module = rank_case.build(source)
    optimizer = optim.SGD(module.parameters(), 0.05)
    for _ in range(STEPS):
        module.train_step(*module.shard_batch(**rank_case.batch))
        optimizer.step()
        optimizer.zero_grad()
    return module.full_state_dict()


def _hooked(source: str, rank_case: RankCase) -> dict[str, Tensor]:
    """One rank: each parameter steps as soon as its gradient, which a hook halves, is there."""
    module = rank_case.build(source)
    steps = {parameter: optim.SGD([parameter], 0.1) for parameter in module.parameters()}

    def step(parameter: Tensor) -> None:
        steps[parameter].step()  # type: ignore[index]  # one of the parameters
        steps[parameter].zero_grad()  # type: ignore[index]

    for parameter in module.parameters():
        parameter.register_hook(lambda grad: grad * 0.5)
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(STEPS):
        module.train_step(*module.shard_batch(**rank_case.batch))
    assert all(parameter.grad is None for parameter in module.parameters())
    return module.full_state_dict()


@pytest.mark.parametrize("plan", ["zero3", "zero1", "random", "gathered and read"])
def test_hooks_of_gradients_are_called(plan: str) -> None:
    """With "gathered and read" the gradient of a tied weight has two parts, one of which autograd accumulates."""
    who = subject("gpt")
    alone, made = who.case(by_recipe(who, (1,), "single")), PLANS[plan](who)
    case = who.case(made)
    if plan == "gathered and read":
        assert {("gather(" in line) for line in case.source().splitlines() if 'self.w["tokens.weight"]' in line} == {
            True,
            False,
        }
    (wanted,) = living(1).run(_plain, alone.source(), alone.rank_case)
    for got in living(made.ranks).run(_hooked, case.source(), case.rank_case):
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)


def _centred(source: str, rank_case: RankCase) -> tuple[dict[str, Tensor | None], list[str]]:
    """One rank: gradients of two steps, of which the first is less its mean (Yong et al. 2020), as DTensor computes it;
    and those that it has laid otherwise."""
    module, moved = rank_case.build(source), []
    batch = module.shard_batch(**rank_case.batch)
    module.train_step(*batch)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.grad = parameter.grad - parameter.grad.mean(dim=tuple(range(1, parameter.ndim)), keepdim=True)
            moved += [name] if getattr(parameter.grad, "placements", ()) != getattr(parameter, "placements", ()) else []
    centred = module.full_grads()
    module.train_step(*batch)
    return {**{f"{name}, centred": grad for name, grad in centred.items()}, **module.full_grads()}, moved


def _summed(source: str, rank_case: RankCase) -> Tensor:
    """One rank: the gradient of its first parameter in two steps, the first one's a part of a sum on each rank."""
    module = rank_case.build(source)
    module.train_step(*module.shard_batch(**rank_case.batch))
    name, parameter = next(
        (name, p)
        for name, p in module.named_parameters()
        if isinstance(p, DTensor) and all(x.is_replicate() for x in p.placements)
    )
    whole = parameter.grad.to_local()
    parameter.grad = DTensor.from_local(
        whole / parameter.device_mesh.size(), parameter.device_mesh, [Partial()] * parameter.device_mesh.ndim
    )
    module.train_step(*module.shard_batch(**rank_case.batch))
    found = module.full_grads()[name]
    assert found is not None
    return found / whole


@pytest.mark.parametrize("plan", ["megatron", pytest.param("pp megatron", marks=pytest.mark.slow)])
def test_gradients_that_are_laid_otherwise_by_users_add_up(plan: str) -> None:
    """Shapes of parts did not fit then."""
    who = subject("gpt")
    alone, made = who.case(by_recipe(who, (1,), "single")), PLANS[plan](who)
    case = who.case(made)
    ((wanted, _),) = living(1).run(_centred, alone.source(), alone.rank_case)
    for got, moved in living(made.ranks).run(_centred, case.source(), case.rank_case):
        assert moved
        for name, grad in got.items():
            torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "plan"), [("gpt", "megatron"), pytest.param("hf-gpt2", "pp ddp", marks=pytest.mark.slow)]
)
def test_a_gradient_that_is_a_sum_over_ranks_adds_up(name: str, plan: str) -> None:
    """A whole gradient was added to the part of each rank. With "pp ddp" it is that of a table at both ends of a
    pipeline."""
    who = subject(name)
    made = PLANS[plan](who)
    case = who.case(made)
    for twice in living(made.ranks).run(_summed, case.source(), case.rank_case):
        torch.testing.assert_close(twice, torch.full_like(twice, 2.0), rtol=1e-9, atol=0.0)


def _hooked_pipeline(source: str, rank_case: RankCase) -> str:
    module = rank_case.build(source)
    next(iter(module.parameters())).register_post_accumulate_grad_hook(lambda _: None)
    try:
        module.train_step(*module.shard_batch(**rank_case.batch))
    except RunError as error:
        return str(error)
    return ""


def test_hooks_of_gradients_are_refused_in_pipelines() -> None:
    who = subject("gpt")
    case = who.case(PLANS["1f1b"](who))
    for said in living(2).run(_hooked_pipeline, case.source(), case.rank_case):
        assert "has a hook for its gradient" in said


def _apart(source: str, rank_case: RankCase) -> tuple[list[int], dict[str, Tensor]]:
    """One rank: an optimizer for each of the first and the last parameter, saved, loaded and under a scaler; of how
    many it has state in each, and the weights."""
    module, scaler = rank_case.build(source), GradScaler("cpu")
    ends = next(iter(rank_case.weights)), list(rank_case.weights)[-1]

    def made() -> list[optim.Optimizer]:
        return [
            optim.Adam([{"params": [p for name, p in module.named_parameters() if name == end]}], 1e-2) for end in ends
        ]

    optimizers = made()
    for _ in range(STEPS):
        module.train_step(*module.shard_batch(**rank_case.batch), scaler=scaler)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        module.zero_grad()
        saved, optimizers = [module.optimizer_state_dict(one) for one in optimizers], made()
        for optimizer, state in zip(optimizers, saved, strict=True):
            module.load_optimizer_state_dict(optimizer, state)
    return [len(one.state) for one in optimizers], module.full_state_dict()


def test_an_optimizer_of_which_a_place_has_nothing_steps_where_it_has() -> None:
    who = subject("mlp")
    alone, made = who.case(by_recipe(who, (1,), "single")), PLANS["1f1b"](who)
    case = who.case(made)
    ((_, wanted),) = living(1).run(_apart, alone.source(), alone.rank_case)
    (first, weights), (second, _) = living(2).run(_apart, case.source(), case.rank_case)
    assert sorted((first, second)) == [[0, 1], [1, 0]]
    for name, value in weights.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-9, atol=1e-12)
