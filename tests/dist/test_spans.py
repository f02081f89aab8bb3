"""Models whose sizes have conditions, on ranks: at the planned length, at another one that they are for, and at one
that they are not for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.errors import RunError
from autopar.verify import case_of, verify
from tests.helpers import chunked
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

LENGTH, OTHER, WRONG = 24, 40, 20


@cache
def subject(ends: bool) -> Subject:
    torch.manual_seed(0)
    model = chunked.Model(ends)
    return Subject("chunked", "train", capture(model, (), chunked.inputs(4, LENGTH)), model.state_dict())


def case(how: str, length: int, ends: bool = False) -> Any:
    who = subject(ends)
    made = by_stages(who, (1,), "single", 2, 2, how) if how == "1f1b" else planned(who, (2,), how)
    return case_of(who.captured, made, who.weights, chunked.inputs(4, length))


@pytest.mark.parametrize(
    ("how", "length", "ends"),
    [
        ("1f1b", LENGTH, False),
        *(
            pytest.param(how, length, ends, marks=pytest.mark.slow)
            for how in ("tp", "tp_sp", "zero3", "cp", "1f1b", "random 0", "random 1", "random 2")
            for length in (LENGTH, OTHER)
            for ends in (False, True)
        ),
    ],
)
def test_equals_one_device(how: str, length: int, ends: bool) -> None:
    report = verify(case(how, length, ends), ranks=living(2))
    assert report.ok, (report.first, report.worst)


def test_lengths_that_the_program_is_not_for_are_refused() -> None:
    with pytest.raises(
        RunError,
        match=r"dim 1 has 20 entries on this rank, wanted a multiple of 8: with another s the model "
        r"does something else",
    ):
        verify(case("zero3", WRONG), ranks=living(2))
