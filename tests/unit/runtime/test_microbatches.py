"""What each microbatch gets of what a rank is given, and what becomes of its results: against the whole batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import RunError
from autopar.layout import dim_of, parse, ways_of
from autopar.runtime import pipeline
from autopar.runtime.cuts import own
from autopar.runtime.outputs import Spread
from autopar.runtime.pipeline import Pipeline, PipelinedModule

COUNT = 3
CASES: dict[str, tuple[tuple[int, ...], Mapping[str, str]]] = {
    "one rank": ((1,), {"x": "S0", "y": "S1"}),
    "alike": ((2,), {"x": "S0", "y": "S1"}),
    "one whole": ((2,), {"x": "S0", "y": "R"}),
    "none": ((2,), {"x": "R", "y": "S0"}),
    "over one axis or two": ((2, 2), {"x": "S0,S0", "y": "R,S1"}),
    "over other axes": ((2, 3), {"x": "S0,R", "y": "R,S1"}),
}
"""Mesh, and the layouts of two inputs: x has the samples in its first dim, y in its second one."""
MICRO = {"x": "S0", "y": "S1", "0": "S0", "1": "S1", "2": "P", "3": "R"}


def made(sizes: tuple[int, ...], layouts: Mapping[str, str], count: int = COUNT) -> Any:
    kind = type(
        "Made",
        (PipelinedModule,),
        {
            "PIPELINE": Pipeline("Schedule1F1B", False, count, (0, 1)),
            "INPUTS": layouts,
            "MICRO": MICRO,
            "MESH": SimpleNamespace(sizes=sizes),
        },
    )
    return object.__new__(kind)


def coordinates(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


def batch(pieces: int) -> dict[str, Tensor]:
    n = 2 * COUNT * pieces
    return {"x": torch.arange(n * 5).view(n, 5), "y": torch.arange(n * 6).view(6, n)}


def of_microbatch(value: Tensor, dim: int, number: int, pieces: int) -> Tensor:
    """The whole of a microbatch: the same part of every piece of the batch."""
    return torch.cat([piece.chunk(COUNT, dim)[number] for piece in value.chunk(pieces, dim)], dim)


@pytest.mark.parametrize(("sizes", "layouts"), CASES.values(), ids=list(CASES))
def test_a_microbatch_has_the_same_samples_of_every_input(sizes: tuple[int, ...], layouts: Mapping[str, str]) -> None:
    module = made(sizes, layouts)
    pieces = math.lcm(*(ways_of(parse(layout), dim_of(MICRO[name]), sizes) for name, layout in layouts.items()))
    for (name, whole), coord in itertools.product(batch(pieces).items(), coordinates(sizes)):
        layout, dim = parse(layouts[name]), dim_of(MICRO[name])
        parts = module._cut(name, own(whole, layout, sizes, coord))
        assert len(parts) == COUNT
        for number, part in enumerate(parts):
            assert torch.equal(part, own(of_microbatch(whole, dim, number, pieces), layout, sizes, coord)), (
                name,
                coord,
                number,
            )


@pytest.mark.parametrize("size", [0, 2, 4, 5, 7])
@pytest.mark.parametrize(
    ("layouts", "runs"), [({"x": "S0", "y": "S1"}, 1), ({"x": "R", "y": "S1"}, 2)], ids=["alike", "one whole"]
)
def test_what_does_not_divide_into_microbatches_is_refused(layouts: Mapping[str, str], runs: int, size: int) -> None:
    said = (
        f"input 'x': dim 0 of size {size} on this rank does not divide into 3 "
        f"microbatches{' of 2 parts' if runs > 1 else ''}; use a multiple of {3 * runs}"
    )
    with pytest.raises(RunError, match=said):
        made((2,), layouts)._cut("x", torch.zeros(size, 5))
    assert [len(part) for part in made((2,), layouts)._cut("x", torch.zeros(6, 5))] == [2] * 3
    assert [len(part) for part in made((2,), layouts, count=1)._cut("x", torch.zeros(size, 5))] == [size]


@pytest.mark.parametrize("result", ["S0,S0", "S0,R", "R,S0", "R,R", "S1,S0", "R,S1"])
@pytest.mark.parametrize(
    ("sizes", "layouts"),
    [case for case in CASES.values() if len(case[0]) == 2],
    ids=[name for name, case in CASES.items() if len(case[0]) == 2],
)
def test_results_are_put_together_in_the_order_of_the_batch(
    sizes: tuple[int, ...], layouts: Mapping[str, str], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever cuts them, where that is over more ranks than the inputs are, too: they lie then as what is said of
    them."""
    module = made(sizes, layouts)
    pieces = module._pieces()
    whole = torch.arange(2 * COUNT * pieces * sizes[0] * sizes[1] * 6).view(-1, 6)
    wholes = [of_microbatch(whole, 0, number, pieces) for number in range(COUNT)]
    for coord in coordinates(sizes):
        given = [own(each, parse(result), sizes, coord) for each in wholes]
        known = {id(value): each for value, each in zip(given, wholes, strict=True)}
        monkeypatch.setattr(
            pipeline,
            "relayout",
            lambda value, src, dst, *_, known=known, coord=coord: own(known[id(value)], dst, sizes, coord),
        )
        value, spread = module._joined(
            0,
            [(part, Spread(parse(result), tuple(each.shape))) for part, each in zip(given, wholes, strict=True)],
        )
        assert spread.shape == whole.shape and torch.equal(value, own(whole, spread.layout, sizes, coord)), coord
        assert spread.layout == parse(result) or pieces % ways_of(parse(result), 0, sizes)
        assert all(entry == asked or asked == "S0" for entry, asked in zip(spread.layout, parse(result), strict=True))
        assert torch.equal(module._joined(0, [(each, None) for each in wholes])[0], whole)


def test_parts_of_sums_are_added_and_what_is_the_same_is_taken_once() -> None:
    module, parts = made((2,), {"x": "S0", "y": "S1"}), [(torch.full((2, 2), float(10**n)), None) for n in range(COUNT)]
    assert torch.equal(module._joined(2, parts)[0], torch.full((2, 2), 111.0)) and torch.equal(
        module._joined(3, parts)[0], torch.ones(2, 2)
    )
    assert module._joined(2, None) == (None, None)
    # torch adds whole numbers in int64
    assert module._joined(2, [(torch.ones(2, dtype=torch.int32), None)] * COUNT)[0].dtype == torch.int32
