"""Binding inputs, and telling whether the ranks' parts are parts of one batch."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import RunError
from autopar.layout import local_shape, ways_of
from autopar.runtime.batch import bind, check_shapes, check_sizes, cut_batch
from autopar.runtime.mesh import Mesh

INPUTS = {"ids": "S0", "labels": "S0"}


def test_arguments_are_bound_by_position_and_name():
    assert bind(INPUTS, [1], {"labels": 2}) == bind(INPUTS, [], {"labels": 2, "ids": 1}) == [1, 2]


X, Y = torch.zeros(2), torch.ones(2)
FIXED = {"scale": (1, 2.0), "cache": (3, None)}  # of f(ids, scale, labels, cache)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([X, 2.0, Y, None], {}),
        ([X, 2.0, Y], {}),
        ([X, Y], {}),
        ([X, Y], {"cache": None, "scale": 2.0}),
        ([X, 2.0], {"labels": Y}),
        ([], {"labels": Y, "ids": X}),
    ],
)
def test_what_is_part_of_the_program_may_be_given_again(args, kwargs):
    ids, labels = bind(INPUTS, args, kwargs, FIXED)
    assert ids is X and labels is Y


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([X, 3.0, Y], {}, "argument 'scale' is 3.0, and the plan was made with scale=2.0"),
        ([X, Y], {"cache": True}, "argument 'cache' is True, and the plan was made with cache=None"),
        (
            [X, Y],
            {"scale": torch.ones(3)},
            "argument 'scale' is a tensor of shape (3,), and the plan was made with scale=2.0",
        ),
    ],
)
def test_another_value_of_what_is_part_of_the_program_is_refused(args, kwargs, message):
    with pytest.raises(RunError) as caught:
        bind(INPUTS, args, kwargs, FIXED)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([1, 2, 3], {}, "got 3 inputs, wanted at most 2: ids, labels"),
        ([1], {"ids": 2}, "'ids' is given twice"),
        ([1], {"mask": 2}, "'mask' is not an input that was planned; the plan's inputs are ids, labels"),
        ([1], {}, "missing inputs labels"),
        ([1], {}, r"targets too. A forward without labels is another program: a second plan"),
        ([(1, 2)], {}, r"All of them came as one tuple: pass \*batch in place of batch"),
        ([{"ids": 1, "labels": 2}], {}, r"came as one dict: pass \*\*batch in place of batch"),
    ],
)
def test_wrong_arguments_are_named(args, kwargs, message):
    with pytest.raises(RunError, match=message):
        bind(INPUTS, args, kwargs)


class Pair(NamedTuple):
    ids: Any
    labels: Any


@dataclass
class Record:
    ids: Any
    labels: Any = None
    more: Any = None


BY_KEY = {"batch": {"ids": "ids", "labels": "labels"}, "scale": "scale", "opts": ("cache", ())}
PASSED = {"scale": 2.0, "opts": [None, {}]}


@pytest.mark.parametrize(
    "batch", [{"labels": Y, "ids": X}, Pair(X, Y), Record(X, Y), {"ids": X, "labels": Y, "more": ()}]
)
def test_arguments_that_hold_several_inputs_are_bound_by_key_or_attribute(batch):
    for args, kwargs in (
        ([batch], {}),
        ([], {"batch": batch}),
        ([batch, 2.0], {}),
        ([batch], PASSED),
        ([batch, 2.0, (None, ())], {}),
        ([], {**PASSED, "batch": batch}),
        ([], {**PASSED, "ids": X, "labels": Y}),
    ):
        ids, labels = bind(INPUTS, args, kwargs, FIXED, BY_KEY)
        assert ids is X and labels is Y


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ([{"ids": X}], {}, "argument batch is a dict with ids, and the plan was made with ids, labels"),
        (
            [{"ids": X, "labels": Y, "mask": X}],
            {},
            "argument batch is a dict with ids, labels, mask, and the plan was made with ids, labels",
        ),
        ([Record(X, Y, X)], {}, "argument batch is a Record with ids, labels, more, and"),
        ([(X, Y)], {}, "argument batch is a tuple with 0, 1, and the plan was made with ids, labels"),
        (
            [{"ids": X, "labels": [Y]}],
            {},
            "argument batch.labels is a list, and the plan has one input for it, 'labels'",
        ),
        ([X], {"opts": (None, ())}, "argument batch is a Tensor without parts, and the plan was made with ids, labels"),
        ([Pair(X, Y)], {"opts": (True, ())}, "argument 'cache' is True, and the plan was made with cache=None"),
        (
            [Pair(X, Y)],
            {"opts": (None, [X])},
            "argument opts.1 is a list with 0, and the plan was made with nothing in it",
        ),
        ([Pair(X, Y)], {"ids": X}, "input 'ids' is given twice"),
        ([Pair(X, Y), 2.0, (None, ()), X], {}, "got 4 arguments, wanted at most 3: batch, scale, opts"),
        ([Pair(X, Y)], {"masks": [X]}, "'masks' is not an input that was planned"),
    ],
)
def test_arguments_that_hold_other_inputs_than_planned_are_refused(args, kwargs, message):
    with pytest.raises(RunError) as caught:
        bind(INPUTS, args, kwargs, FIXED, BY_KEY)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        ("R,R", (4, 16, 8), ""),
        ("R,R", (9, 64, 8), ""),
        ("S0,R", (2, 16, 8), ""),
        ("S1,R", (4, 32, 8), ""),
        ("R,S2", (4, 16, 4), ""),
        ("S1,S2", (4, 4, 4), ""),
        ("S1,R", (4, 6, 8), ""),
        ("R,R", (4, 65, 8), "dim 1 has 65 entries on this rank, wanted at most 64: that is the greatest s"),
        (
            "R,R",
            (4, 4, 8),
            "dim 1 has 4 entries on this rank, wanted at least 8: with a smaller s the model does something else",
        ),
        ("S1,R", (4, 2, 8), "wanted at least 8, of which 4 are this rank's"),
        ("R,R", (4, 18, 8), "dim 1 has 18 entries on this rank, wanted a multiple of 4: with another s"),
        ("S1,R", (4, 7, 8), "wanted a multiple of 4, cut 2 ways"),
        ("S1,R", (4, 33, 8), "wanted at most 64, of which 32 are this rank's"),
        ("R,R", (4, 16, 7), "dim 2 has 7 entries on this rank, wanted 8: it is part of the emitted program"),
        ("R,S2", (4, 16, 8), "wanted 8, of which 4 are this rank's"),
        ("R,R", (4, 16), "a tensor of 2 dims, wanted a tensor of sizes (b, s, 8)"),
    ],
)
def test_sizes_that_the_program_is_not_for_are_refused(layout, shape, message):
    mesh = SimpleNamespace(sizes=(2, 2), coord=(0, 1))
    with nullcontext() if not message else pytest.raises(RunError) as caught:
        check_sizes({"x": layout}, {"x": ("b", "s", 8)}, {"s": (8, 64, 4)}, [torch.empty(shape)], mesh)
    assert not message or message in str(caught.value)


TOGETHER = {"x": ("b", 8), "y": ("b",), "mask": ("s", "s")}


@pytest.mark.parametrize(
    ("layouts", "shapes", "message"),
    [
        (("S0,R", "R,R", "R,R"), ((4, 8), (8,), (6, 6)), ""),
        (("S0,S0", "R,S0", "R,S1"), ((2, 8), (4,), (6, 3)), ""),
        (
            ("S0,R", "S0,R", "R,R"),
            ((4, 8), (1,), (6, 6)),
            "dim 0 of input 'y' is 2, dim 0 of input 'x' is 8: both are b",
        ),
        (
            ("S0,R", "R,R", "R,R"),
            ((4, 8), (4,), (6, 6)),
            "dim 0 of input 'y' is 4, dim 0 of input 'x' is 8: both are b",
        ),
        (
            ("S0,R", "S0,R", "R,S0"),
            ((1, 8), (1,), (1, 6)),
            "dim 1 of input 'mask' is 6, dim 0 of input 'mask' is 2: both are s",
        ),
    ],
)
def test_sizes_that_are_one_of_the_program_are_compared(layouts, shapes, message):
    mesh = SimpleNamespace(sizes=(2, 2), coord=(0, 1))
    with nullcontext() if not message else pytest.raises(RunError) as caught:
        check_sizes(
            dict(zip(TOGETHER, layouts, strict=True)), TOGETHER, {}, [torch.empty(shape) for shape in shapes], mesh
        )
    assert not message or message in str(caught.value)


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.data(),
)
def test_parts_of_one_tensor_fit_where_they_are_equal_and_no_others_do(sizes, shape, data):
    """From a part follows the size of the whole: parts of a tensor that does not divide say different ones."""
    layout = tuple(data.draw(st.sampled_from(["R", *(f"S{d}" for d in range(len(shape)))])) for _ in sizes)
    shapes = [local_shape(shape, layout, sizes, coord) for coord in itertools.product(*map(range, sizes))]
    wholes = [tuple(size * ways_of(layout, dim, sizes) for dim, size in enumerate(part)) for part in shapes]
    last = shapes[-1]
    others = (None, (*last, 1), (last[0] + sum(shape) + 9, *last[1:]))
    for parts, right in (
        (shapes, len({*wholes}) == 1),
        *(([*shapes[:-1], other], False) for other in others if len(shapes) > 1),
    ):
        with nullcontext() if right else pytest.raises(RunError, match="the ranks' parts do not fit together"):
            check_shapes(
                {"x": ",".join(layout)},
                [[part] for part in parts],
                SimpleNamespace(sizes=sizes, ranks=len(shapes), places=1),
            )


def test_a_mesh_of_one_takes_the_whole_batch():
    x = torch.arange(3)
    assert torch.equal(cut_batch({"x": "S0"}, [x], Mesh((1,), ("x",), "cpu"))[0], x)
    assert cut_batch({"flag": "R"}, [True], Mesh((1,), ("x",), "cpu")) == [True]
