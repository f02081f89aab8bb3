"""A loss whose value jumps where two models are equal: what is told of the differences."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, planned


class Policy(nn.Module):
    """A policy and its reference of equal weights, and how often the policy prefers what was chosen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64, bias=False))
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
        gains = [self.gain(ids) for ids in (chosen, rejected)]
        margin = gains[0] - gains[1]
        return {"loss": -F.logsigmoid(margin).mean(), "accuracy": (margin > 0).float().mean()}

    def gain(self, ids: Tensor) -> Tensor:
        """How much likelier the policy makes them than the reference does."""
        own, other = (
            F.log_softmax(model(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None]).sum((1, 2))
            for model in (self.policy, self.reference)
        )
        return own - other.detach()


def test_a_tie_is_named() -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {name: torch.randint(0, 64, (8, 12), generator=generator) for name in ("chosen", "rejected")}
    model = Policy()
    captured = capture(model, (), batch)
    who = Subject("policy", "train", captured, model.state_dict())
    case = case_of(captured, planned(who, (2,), "tp"), who.weights, batch)
    rounded = replace(case, mutate=lambda source: re.sub(r"gt = (\w+) > ", r"gt = (\1 + 1e-15) > ", source))
    report = verify(rounded, ranks=living(2))
    assert [row.name for row in report.rows if not row.ok] == ["accuracy"]
    assert report.first.startswith("gt (value): 8 elements of what gt reads are at its jump"), report.first
