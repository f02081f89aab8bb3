"""CTC losses cut by samples, and in pipelines by microbatches, whose targets are picked of padded labels."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned
from tests.unit.passes.test_alignments import Heard, inputs


@cache
def heard() -> Subject:
    torch.manual_seed(0)
    model = Heard("line")
    return Subject("heard", "train", capture(model, tuple(inputs(scattered=True).values())), model.state_dict())


@pytest.mark.parametrize(("sizes", "how"), [((2,), "searched"), ((4,), "zero3"), ((2, 2), "random 1")])
def test_samples_are_cut(sizes, how):
    who = heard()
    made = planned(who, sizes, how)
    assert "S" in next(node for name, node in made.nodes.items() if "ctc_each" in name).outs[0] or how.startswith(
        "random"
    )
    report = verify(case_of(who.captured, made, who.weights, inputs(scattered=True)), ranks=living(math.prod(sizes)))
    assert report.ok, report


def test_microbatches_have_samples_of_their_own():
    who = heard()
    report = verify(
        case_of(who.captured, by_stages(who, (1,), "single", 2, 2, "1f1b"), who.weights, inputs(scattered=True)),
        ranks=living(2),
    )
    assert report.ok, report
