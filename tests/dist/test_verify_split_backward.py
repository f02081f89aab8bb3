"""A verification says so where only the split backward of a zero-bubble schedule is wrong."""

from __future__ import annotations

import re

import pytest

from tests.helpers.verify import by_stages, subject

# split, this backward runs once for the gradient of its input and once more for that of its weight
OPERATOR = """
class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.runs = getattr(ctx, "runs", 0) + 1
        return grad @ weight, ctx.runs * grad.flatten(0, 1).t() @ x.flatten(0, 1)


class Block"""


def _planted(source: str) -> str:
    changed = re.sub(
        r'F\.linear\((\w+), self\.w\["mlp\.up\.weight"\], (.*)\)',
        r'Counted.apply(\1, self.w["mlp.up.weight"]) + \2',
        source.replace("\nclass Block", OPERATOR, 1),
    )
    assert changed.count("Counted") == 2, source
    return changed


@pytest.mark.parametrize(
    ("schedule", "first"),
    [
        (
            "zbv_zero_bubble",
            "no operator: zbv_zero_bubble splits the backward of a stage, and wrong is the part for its weights (first "
            "that of blocks.0.mlp.up.weight); every gradient is right where the backward runs as a whole",
        ),
        ("interleaved_1f1b", ""),
    ],
)
def test_an_error_of_a_split_backward_alone_is_named(schedule: str, first: str) -> None:
    who = subject("gpt")
    report = who.verified(by_stages(who, (1,), "single", 2, 4, schedule, 2), mutate=_planted)
    assert report.ok == (not first)
    assert report.first == first
