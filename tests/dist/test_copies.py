"""Copies of emitted modules: teachers, references and averages of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, optim
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from autopar.runtime import Mesh, Param, ShardedModule
from autopar.verify.step import RankCase
from tests.helpers.ranks import living, on_ranks
from tests.helpers.verify import by_recipe, by_stages, subject

RATE, DECAY = 0.1, 0.5


def _copied(source: str, rank_case: RankCase) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """One rank: losses of a module, of its copy, of both when the copy has stepped; weights of both."""
    module = rank_case.build(source)
    module.extra = {"of": ["the user"]}  # type: ignore[assignment]  # whatever users put there
    batch = module.shard_batch(**rank_case.batch)
    optimizer = optim.SGD(module.parameters(), RATE)
    losses = [module.train_step(*batch)]
    optimizer.zero_grad()
    for last_first in (True, False):  # a module that is copied with its optimizer
        twin, steps = copy.deepcopy((module.eval(), optimizer)[:: -1 if last_first else 1])[:: -1 if last_first else 1]
        assert [id(p) for p in steps.param_groups[0]["params"]] == [id(p) for p in twin.parameters()]
    assert not twin.training and twin.extra == module.extra and twin.extra is not module.extra
    assert twin.rng_state() == module.rng_state() and module.rng_state()["step"] == 1 and twin.rng is not module.rng
    assert list(twin.state_dict()) == list(module.state_dict()) and len(list(twin.parameters())) == len(
        list(module.parameters())
    )
    assert all(parameter.grad is None for parameter in twin.parameters())
    twin.train()
    losses.append(twin.train_step(*batch))
    steps.step()
    module.train()
    losses += [module.train_step(*batch), twin.train_step(*batch)]
    return [float(loss) for loss in losses], module.full_state_dict(), twin.full_state_dict()


def _averaged(source: str, rank_case: RankCase) -> tuple[dict[str, Tensor], dict[str, Tensor], float, float]:
    """One rank: the weights of a moving average, and what they should be; the loss that it has, and that of a module
    with these weights."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)
    average, optimizer = (
        AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
        optim.SGD(module.parameters(), RATE),
    )
    wanted: dict[str, Tensor] = {}
    for _ in range(3):
        module.train_step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(module)
        now = module.full_state_dict()
        wanted = {
            name: DECAY * wanted[name] + (1 - DECAY) * value if name in wanted and value.is_floating_point() else value
            for name, value in now.items()
        }
    loss = average.module.train_step(*batch)
    return (
        average.module.full_state_dict(),
        wanted,
        float(loss),
        float(module.load_full(wanted, strict=False).train_step(*batch)),
    )


PLANS = {
    "zero3": lambda who: by_recipe(who, (2,), "zero3"),
    "zero1": lambda who: by_recipe(who, (2,), "zero1"),
    "megatron": lambda who: by_recipe(who, (2,), "megatron"),
    "1f1b": lambda who: by_stages(who, (1,), "single", 2, 2, "1f1b"),
}


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("hf-gpt2", "1f1b"),
        *(pytest.param(name, plan, marks=pytest.mark.slow) for name in ("hf-gpt2", "hf-t5") for plan in PLANS),
    ],
)
def test_a_copy_is_a_module_of_its_own(name: str, plan: str) -> None:
    who = subject(name)
    made = PLANS[plan](who)
    case = who.case(made)
    for (first, same, again, stepped), mine, theirs in living(made.ranks).run(_copied, case.source(), case.rank_case):
        assert first == pytest.approx(same, rel=1e-12) == pytest.approx(again, rel=1e-12) and stepped < 0.99 * first
        assert all(
            torch.equal(value, who.weights[name].to(value.dtype)) for name, value in mine.items() if name in who.weights
        )
        assert any(not torch.equal(value, mine[name]) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("hf-gpt2", "megatron"),
        ("hf-t5", "1f1b"),
        *(pytest.param(name, plan, marks=pytest.mark.slow) for name in ("hf-gpt2", "hf-t5") for plan in PLANS),
    ],
)
def test_averages_of_weights(name: str, plan: str) -> None:
    who = subject(name)
    made = PLANS[plan](who)
    case = who.case(made)
    for got, wanted, loss, right in living(made.ranks).run(_averaged, case.source(), case.rank_case):
        for parameter, value in got.items():
            torch.testing.assert_close(value, wanted[parameter], rtol=1e-12, atol=1e-12)
        assert loss == pytest.approx(right, rel=1e-12)


class Held(ShardedModule):
    """A weight and a buffer."""

    MESH = Mesh((2,), ("dp",), "cpu")
    PARAMS = {"weight": Param((4, 3), "float64", "S0")}  # noqa: RUF012  as emitted code states it
    BUFFERS = {"mean": Param((4,), "float64", "R")}  # noqa: RUF012


def _with_buffers() -> None:
    """One rank: torch refuses lists of parameters and buffers; one by one, averages are what they should be."""
    before, after = (
        {"weight": torch.full((4, 3), x, dtype=torch.float64), "mean": torch.full((4,), -x, dtype=torch.float64)}
        for x in (1.0, 3.0)
    )
    module = Held().load_full(before)
    averages = [
        AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True),
        AveragedModel(module, avg_fn=get_ema_avg_fn(DECAY), use_buffers=True),
    ]
    for average in averages:
        average.update_parameters(module)
    module.load_full(after)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        averages[0].update_parameters(module)
    averages[1].update_parameters(module)
    for name, value in averages[1].module.full_state_dict().items():
        torch.testing.assert_close(value, DECAY * before[name] + (1 - DECAY) * after[name])


def test_averages_of_buffers() -> None:
    """When this fails, torch averages lists of DTensors and plain tensors together: say so in docs/training.md."""
    on_ranks(2, _with_buffers)
