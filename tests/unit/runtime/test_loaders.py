"""What ranks with loaders of their own load and cut is what they would be given of the global batch."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.runtime.batch import cut_batch
from autopar.runtime.loaders import loaded, loading_axes, share

DIMS = {"ids": ("b", "s"), "labels": ("b", "s"), "mask": ("s", "s")}
ENTRIES = st.sampled_from(["R", "S0", "S1"])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_parts_of_parts_are_parts_of_the_batch(sizes, data):
    inputs = {name: ",".join(data.draw(ENTRIES) for _ in sizes) for name in DIMS}
    batch, seq = math.prod(sizes) * 2, math.prod(sizes)
    whole = [
        torch.arange(a * b).reshape(a, b) + 1000 * number
        for number, (a, b) in enumerate(((batch, seq), (batch, seq), (seq, seq)))
    ]
    axes, seen = loading_axes(inputs, DIMS), set()
    for coord in itertools.product(*map(range, sizes)):
        mesh = SimpleNamespace(sizes=tuple(sizes), coord=coord, device=torch.device("cpu"))
        ways, number = share(axes, mesh)
        seen.add(number)
        mine = [
            value.chunk(ways)[number] if "b" in DIMS[name] else value for name, value in zip(DIMS, whole, strict=True)
        ]
        for part, wanted in zip(
            cut_batch(loaded(inputs, DIMS), mine, mesh), cut_batch(inputs, whole, mesh), strict=True
        ):
            assert torch.equal(part, wanted)
    assert seen == set(range(math.prod(sizes[axis] for axis in axes)))


@pytest.mark.parametrize(
    "ids, labels, axes",
    [
        ("S0,S0", "S0,S0", (0, 1)),
        ("S0,S1", "S0,R", (0,)),
        ("S0,S0", "S0,R", (0,)),
        ("R,S0", "R,S0", (1,)),
        ("S0,R", "R,R", ()),
        ("S0,R", "R,S0", ()),
        ("S0/2,R", "S0/2,R", ()),
    ],
)
def test_axes_that_cut_the_samples_of_all_inputs_first(ids, labels, axes):
    assert loading_axes({"ids": ids, "labels": labels, "mask": "R,S0"}, DIMS) == axes


def test_a_batch_that_is_part_of_the_program_is_loaded_whole():
    assert loading_axes({"ids": "S0"}, {"ids": (8, "s")}) == () == loading_axes({}, {})
