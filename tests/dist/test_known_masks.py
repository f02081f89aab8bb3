"""Losses of what masks of sizes and masks in buffers pick (SimCLR, RealNVP), on ranks that have some of the rows."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.masks_of_sizes import MODELS, batch
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, planned


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    model = MODELS[name]()
    return Subject(name, "train", capture(model, batch()), model.state_dict())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("simclr", "searched"),
        ("simclr_with_labels", "ddp"),
        ("of_features", "random 0"),
        ("halves", "tp"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in MODELS
            for how in ("ddp", "zero3", "tp", "random 1", "random 2")
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    who = subject(name)
    made = planned(who, (2,), how)
    report = verify(
        case_of(who.captured, made, who.weights, dict(zip(("one", "other"), batch(), strict=True))), ranks=living(2)
    )
    assert report.ok, (report.first, report.worst)
