"""Functions with backwards of their own on ranks: weights and samples cut, and in pipelines."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.own_functions import KEPT, Calling, batch
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    model = Calling(KEPT[name])
    return Subject(name, "train", capture(model, batch()), model.state_dict())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("straight through", "tp"),
        ("signs", "tp"),
        ("signs", "random 1"),
        ("reversed", "zero3"),
        ("halves", "random 0"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in KEPT
            for how in ("searched", "random 2", "random 3", "tp_sp")
        ),
        ("signs", "1f1b"),
        ("halves", "zbv_zero_bubble"),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    who = subject(name)
    if how in ("1f1b", "zbv_zero_bubble"):
        made = by_stages(who, (2,), "tp", 2, 4, how, 2 if how.startswith("zbv") else 1)
    else:
        made = planned(who, (2,), how)
    report = verify(
        case_of(who.captured, made, who.weights, dict(zip(("x", "y"), batch(), strict=True))), ranks=living(made.ranks)
    )
    assert report.ok, (report.first, report.worst)
