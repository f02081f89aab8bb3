"""Buckets: what is packed into one buffer and what travels by itself comes out as each tensor alone would."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch
from torch import Tensor

from autopar.layout import local_shape, parse, steps
from autopar.runtime import Mesh, coalesced
from autopar.runtime.coalesced import Together
from autopar.runtime.cuts import own
from autopar.runtime.moves import relayout
from tests.helpers.ranks import on_ranks

SIZES = (2, 2)
WAYS = [
    ("S0,R", "R,R"),
    ("S1,R", "R,R"),
    ("S0,S0", "R,R"),
    ("S1,S0", "R,R"),
    ("P,R", "S0,R"),
    ("P,R", "S1,R"),
    ("P,P", "S0,S0"),
    ("P,P", "S1,R"),
    ("P,P", "R,R"),
]
SHAPES = [(4, 4), (8, 2), (5, 3), (1, 6), (12, 10), (3, 4, 6)]
ITEM_BYTES = 8


def _part(shape: tuple[int, ...], layout: str, seed: int, mesh: Mesh) -> Tensor:
    """This rank's part of a tensor, whole numbers in float64: partial sums differ by rank, copies do not."""
    entries = parse(layout)
    partial = [axis for axis, entry in enumerate(entries) if entry == "P"]
    seed = 1000 * seed + sum(10**axis * mesh.coord[axis] for axis in partial)
    whole = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()
    rest = tuple("R" if entry == "P" else entry for entry in entries)
    return own(whole, rest, mesh.sizes, mesh.coord).clone()


def _moved(limit_bytes: int) -> None:
    mesh = Mesh(SIZES, ("x", "y"), "cpu")
    draw = random.Random(limit_bytes)
    for source, target in WAYS:
        shapes = draw.choices(SHAPES, k=draw.randint(1, 4))
        src, dst = parse(source), parse(target)
        parts = [_part(shape, source, seed, mesh) for seed, shape in enumerate(shapes)]
        kept = [part.clone() for part in parts]
        wanted = [relayout(part, src, dst, shape, mesh) for part, shape in zip(parts, shapes, strict=True)]
        ways, names = [steps(src, dst, SIZES)] * len(shapes), list(map(str, range(len(shapes))))
        gathers = all(step.kind == "all_gather" for step in ways[0])
        into = [torch.empty(local_shape(shape, dst, SIZES, mesh.coord), dtype=torch.float64) for shape in shapes]
        for out in ((), into) if gathers else ((),):
            bucket = Together(ways, parts, shapes, mesh, names, out, limit_bytes)
            found = bucket.finish()
            for one, two, part, before in zip(found, wanted, parts, kept, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=0)
                torch.testing.assert_close(part, before, rtol=0, atol=0)  # nothing is summed in place
            for one, two in zip(out, wanted, strict=False):
                torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize("limit_bytes", [1, 20 * ITEM_BYTES, 1000 * ITEM_BYTES], ids=["alone", "both", "packed"])
def test_each_comes_out_as_it_would_alone(limit_bytes: int) -> None:
    """Of even and uneven shapes, along any dim, over one and two axes."""
    on_ranks(4, _moved, limit_bytes)


def _started(limit_bytes: int) -> None:
    """How many collectives start for two small tensors and one large one."""
    mesh = Mesh(SIZES, ("x", "y"), "cpu")
    shapes = [(4, 4), (4, 2), (64, 4)]
    way = steps(parse("P,R"), parse("S0,R"), SIZES)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Together(
            [way] * 3, [torch.ones(shape) for shape in shapes], shapes, mesh, ["a", "b", "c"], (), limit_bytes
        ).finish()
    names = [event.name for event in profile.events()]
    started = sum("c10d::_reduce_scatter_base_" in name or "c10d::reduce_scatter" in name for name in names)
    packed = sum(event.name == "aten::cat" for event in profile.events())
    assert (started, packed) == {512: (2, 1), 1024: (2, 1), 10_000: (1, 1), 1: (3, 0)}[limit_bytes]


@pytest.mark.parametrize("limit_bytes", [1, 512, 1024, 10_000])  # the large one has 1024, and 512 once it is cut
def test_what_is_large_is_not_packed(limit_bytes: int) -> None:
    on_ranks(4, _started, limit_bytes)


def _whole_size(limit_bytes: int, packs: bool) -> None:
    """What is gathered over two axes is large by what it is in the end."""
    mesh = Mesh(SIZES, ("x", "y"), "cpu")
    shapes = [(4, 4), (64, 4)]
    parts = [torch.ones(local_shape(shape, parse("S0,S0"), SIZES, mesh.coord)) for shape in shapes]
    with mock.patch.object(coalesced, "start_all_gather", wraps=coalesced.start_all_gather) as together:
        way = steps(parse("S0,S0"), parse("R,R"), SIZES)
        Together([way] * 2, parts, shapes, mesh, ["a", "b"], (), limit_bytes).finish()
    (first, *_) = [call.args[0].numel() for call in together.call_args_list]
    assert first == sum(part.numel() for part in parts) if packs else first == parts[0].numel()


@pytest.mark.parametrize(("limit_bytes", "packs"), [(1024, False), (1025, True)])
def test_what_is_large_in_the_end_is_not_packed(limit_bytes: int, packs: bool) -> None:
    on_ranks(4, _whole_size, limit_bytes, packs)


def _waiting(source: str, target: str, later: list[tuple[bool, bool, int]]) -> None:
    """Before each `go_on` and after the last: whether a collective is yet to begin, whether `go_on` is to be called,
    and the elements that the running collective takes, whole on the axis."""
    mesh = Mesh(SIZES, ("x", "y"), "cpu")
    shape = (8, 4)
    part = torch.ones(local_shape(shape, parse(source), SIZES, mesh.coord), dtype=torch.float64)
    bucket = Together([steps(parse(source), parse(target), SIZES)] * 2, [part] * 2, [shape] * 2, mesh, ["a", "b"])
    seen = [(bucket.more, bucket.later, bucket.nbytes // ITEM_BYTES)]
    while bucket.later:
        assert bucket.go_on() is bucket.later
        seen.append((bucket.more, bucket.later, bucket.nbytes // ITEM_BYTES))
    assert seen == later
    assert len(bucket.finish()) == 2


@pytest.mark.parametrize(
    ("source", "target", "later"),
    [
        ("P,R", "R,R", [(False, False, 64)]),
        ("P,R", "S0,R", [(False, True, 64), (False, False, 64)]),  # its input is freed by one more
        ("P,P", "S0,S0", [(True, True, 64), (False, True, 32), (False, False, 32)]),
        ("S0,R", "R,R", [(False, False, 32)]),
        ("S0,S0", "R,R", [(True, True, 16), (False, False, 32)]),
    ],
)
def test_what_is_yet_to_begin_or_to_be_freed_is_known(source: str, target: str, later: object) -> None:
    on_ranks(4, _waiting, source, target, later)
