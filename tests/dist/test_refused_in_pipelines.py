"""What a pipeline has no way for is refused, on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.pipeline import units
from autopar.plan import Plan
from autopar.verify.step import RankCase
from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import living, on_ranks
from tests.helpers.verify import by_stages, planner_of, subject


def _fed() -> tuple[str, str]:
    made, (x, y) = compiled("1f1b")
    assert torch.equal(made.train_step(x.float(), y), made.train_step(x.float().double(), y))
    return said(lambda: made.train_step(x.long(), y)), said(lambda: made(x, y > 0))


def test_inputs_of_stages_in_another_dtype() -> None:
    """Narrower ones are cast. A place waited for ever for a tensor of other bytes than came."""
    for of_x, of_y in on_ranks(2, _fed):
        assert "input 'x' is torch.int64 and was planned as torch.float64: what a model does by" in of_x
        assert "input 'y' is torch.bool and was planned as torch.float64" in of_y


def _staged() -> tuple[str, ...]:
    made, batch = compiled("1f1b")
    loss = made(*batch)
    with torch.no_grad():
        assert not made(*batch).requires_grad
    return said(loss.backward), said((loss.detach() + made(*batch)).backward)


def test_a_backward_of_the_forward_of_a_pipeline() -> None:
    for wrong in on_ranks(2, _staged):
        assert all("the forward of a pipeline keeps nothing for a backward: call train_step" in text for text in wrong)


def _gathers_on_one_place() -> Plan:
    """All blocks on a place that gathers leaves, the head on one that has none to gather."""
    who = subject("hf-llama")
    head = max(i for i, unit in enumerate(units(planner_of(who, (2,)).program)) if unit.instance >= 0) + 1
    cut, whole = (by_stages(who, (2,), recipe, 2, 2, "1f1b", 1, [head]) for recipe in ("zero1", "ddp"))
    late = {name for name in cut.nodes if "lm_head" in name or "model_norm" in name}
    return replace(cut, nodes={name: (whole if name in late else cut).nodes[name] for name in cut.nodes})


def _wrong_and_right(source: str, rank_case: RankCase) -> tuple[list[float], str]:
    module = rank_case.build(source)
    wrong = module.shard_batch(**{name: value[:6] for name, value in rank_case.batch.items()})
    right, losses = module.shard_batch(**rank_case.batch), list[float]()
    losses.append(float(module.train_step(*right)))
    refused = said(lambda: module.train_step(*wrong))
    losses.append(float(module.train_step(*right)))
    return losses, refused


def test_a_step_follows_a_batch_that_does_not_divide() -> None:
    """It was refused behind the gathers of leaves. Places have run as many as they have buckets of these by then, and
    ranks that fail after unlike numbers of collectives begin no further step."""
    case = subject("hf-llama").case(_gathers_on_one_place())
    for (before, behind), refused in living(4).run(_wrong_and_right, case.source(), case.rank_case):
        assert before == behind and "dim 0 of size 3 on this rank does not divide into 2 microbatches" in refused
