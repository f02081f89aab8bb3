"""Gradients add up over several steps, those of weights on several places too."""

from __future__ import annotations

from torch import Tensor

from autopar.verify.step import Light
from tests.helpers.ranks import living
from tests.helpers.verify import by_stages, subject


def _accumulated(source: str, light: Light) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One rank: whole gradients after one step, and after two more without clearing them."""
    module = light.build(source)
    batch = module.shard_batch(**light.batch)
    module.train_step(*batch)
    first = {name: grad.clone() for name, grad in module.full_grads().items() if grad is not None}
    module.train_step(*batch)
    module.train_step(*batch)
    return first, {name: grad for name, grad in module.full_grads().items() if grad is not None}


def test_three_steps_give_three_times_the_gradient() -> None:
    who = subject("hf-gpt2")  # the table is on the first and on the last place
    case = who.case(by_stages(who, (1,), "single", 2, 2, "1f1b"))
    results = living(2).run(_accumulated, case.source(), case.light)
    for first, last in results:
        assert "transformer.wte.weight" in first
        for name, grad in first.items():
            error = float((last[name] - 3 * grad).abs().max())
            assert error <= 1e-12 * max(1.0, float(grad.abs().max())), (name, error)
