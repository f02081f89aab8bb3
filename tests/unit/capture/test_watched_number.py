"""A watched number passes for an int until something is done with it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from autopar.capture.watched_number import ReadError, Watched

READS = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "mod": lambda x: x % 2,
    "compare": lambda x: x < 3,
    "equal": lambda x: x == 3,
    "index": lambda x: [0, 1, 2, 3][x],
    "float": float,
    "int": int,
    "bool": bool,
    "hash": lambda x: {x: 1},
    "text": lambda x: f"{x}",
    "repr": repr,
    "range": range,
    "floor": math.floor,
    "tensor": lambda x: torch.ones(2) * x,
    "slice": lambda x: torch.ones(5)[:x],
    "power": lambda x: 2**x,
}


@pytest.mark.parametrize("name", READS)
def test_reading_is_noticed(name):
    with pytest.raises(ReadError, match="the place was read"):
        READS[name](Watched(3, "the place was read"))


def test_handing_on_is_not_reading():
    number = Watched(3, "the place was read")
    assert isinstance(number, int)
    assert number is not None
    assert copy.deepcopy({"at": number})["at"] is number
