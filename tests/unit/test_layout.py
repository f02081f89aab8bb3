"""Layouts: their text, their pieces, and that the steps really lead where they say, by moving arrays between simulated
ranks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import LayoutError
from autopar.layout import (
    absent,
    consistent,
    crowded,
    cutters,
    dim_of,
    divisible,
    even,
    fits,
    fraction,
    is_shard,
    local_shape,
    most_elements,
    parse,
    pieces,
    placed_on,
    sections_of,
    shard,
    show,
    steps,
)

SHAPE = (8, 12, 5)
ENTRIES = ("R", "S0", "S1", "S1/3", "S1/1:2", "P", "O0", "O1")
MESHES = ((2,), (4,), (2, 2), (2, 3), (2, 2, 2))


def take(whole: np.ndarray, layout: tuple[str, ...], sizes: tuple[int, ...], coord: tuple[int, ...]) -> np.ndarray:
    """The part of `whole` at `coord`, partial entries ignored."""
    for dim in range(whole.ndim):
        cut = pieces(whole.shape[dim], layout, dim, sizes, coord) or [(0, 0)]
        whole = np.concatenate([np.take(whole, range(lo, hi), axis=dim) for lo, hi in cut], axis=dim)
    return whole


def lay(
    whole: np.ndarray, layout: tuple[str, ...], sizes: tuple[int, ...], seed: int = 0
) -> dict[tuple[int, ...], np.ndarray]:
    """Every rank's array; along a partial axis the parts are random and sum to the value."""
    rng = np.random.default_rng(seed)
    coords = list(itertools.product(*map(range, sizes)))
    parts = dict.fromkeys(coords, whole)
    for axis, entry in enumerate(layout):
        if entry == "P":
            for coord in [c for c in coords if c[axis] == 0]:
                line = [(*coord[:axis], i, *coord[axis + 1 :]) for i in range(sizes[axis])]
                noise = [rng.standard_normal(whole.shape) for _ in line[1:]]
                rest = parts[coord] - sum(noise) if noise else parts[coord]
                parts.update(zip(line, [rest, *noise], strict=True))
    # ranks that differ only on non-partial axes must hold the same value: copy from their representative
    plain = [a for a, e in enumerate(layout) if e != "P"]
    return {c: take(parts[tuple(0 if a in plain else i for a, i in enumerate(c))], layout, sizes, c) for c in coords}


def gather(
    parts: dict[tuple[int, ...], np.ndarray], layout: tuple[str, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> np.ndarray:
    """The whole value of laid out parts; checks that replicas agree."""
    whole = np.zeros(shape)
    for coord, part in parts.items():
        if any(i for i, e in zip(coord, layout, strict=True) if e == "R"):
            twin = tuple(0 if e == "R" else i for i, e in zip(coord, layout, strict=True))
            assert np.allclose(part, parts[twin]), f"replicas {coord} and {twin} differ under {show(layout)}"
            continue
        if absent(layout, coord):
            assert part.shape == local_shape(shape, layout, sizes, coord) and part.size == 0
            continue
        index = [
            np.concatenate([np.arange(lo, hi) for lo, hi in pieces(n, layout, d, sizes, coord)])
            for d, n in enumerate(shape)
        ]
        whole[np.ix_(*index)] += part
    return whole


def run(step, parts, sizes, shape):
    """One step on all ranks: only what the group along the step's axis holds may be used."""
    after = {}
    for coord in parts:
        line = [(*coord[: step.axis], i, *coord[step.axis + 1 :]) for i in range(sizes[step.axis])]
        sub = {c: parts[c] for c in line}
        after[coord] = move(step, sub, coord, sizes, shape)
    return after


def move(step, line, coord, sizes, shape):
    """What `coord` holds after the step, from the parts of its group."""
    axis, n = step.axis, sizes[step.axis]
    src, dst = step.before[axis], step.after[axis]
    zero = (*coord[:axis], 0, *coord[axis + 1 :])
    if step.kind == "mask":
        source = int(src[1:]) if src[0] == "O" else 0
        return line[coord] if coord[axis] == source else np.zeros(local_shape(shape, step.after, sizes, coord))
    if dst[0] == "O":
        return line[coord] if coord[axis] == int(dst[1:]) else np.zeros(local_shape(shape, step.after, sizes, coord))
    if step.kind == "broadcast":
        return line[(*coord[:axis], int(src[1:]), *coord[axis + 1 :])]
    others = tuple("R" if a == axis else e for a, e in enumerate(step.before))
    if src == "P":
        group = sum(line.values())
    elif src == "R":
        group = line[coord]
    else:  # put the pieces of the group together, in the coordinates of what the other axes leave
        dim = cutters(step.before, int(src[1:].split("/")[0]))
        dim_index = int(src[1:].split("/")[0])
        outer = pieces(shape[dim_index], others, dim_index, sizes, zero)
        positions = {p: k for k, p in enumerate(itertools.chain.from_iterable(range(lo, hi) for lo, hi in outer))}
        template = list(line[coord].shape)
        template[dim_index] = len(positions)
        group = np.zeros(template)
        for c, part in line.items():
            own = itertools.chain.from_iterable(
                range(lo, hi) for lo, hi in pieces(shape[dim_index], step.before, dim_index, sizes, c)
            )
            index = [np.arange(m) for m in template]
            index[dim_index] = np.array([positions[p] for p in own], dtype=int)
            group[np.ix_(*index)] = part
        assert dim[-1] == axis
    if dst == "R":
        return group
    dim_index = int(dst[1:].split("/")[0])
    outer = pieces(shape[dim_index], others, dim_index, sizes, coord)
    positions = {p: k for k, p in enumerate(itertools.chain.from_iterable(range(lo, hi) for lo, hi in outer))}
    own = itertools.chain.from_iterable(
        range(lo, hi) for lo, hi in pieces(shape[dim_index], step.after, dim_index, sizes, coord)
    )
    assert n > 1
    return np.take(group, [positions[p] for p in own], axis=dim_index)


@st.composite
def changes(draw):
    sizes = draw(st.sampled_from(MESHES))
    layouts = [tuple(draw(st.sampled_from(ENTRIES)) for _ in sizes) for _ in range(2)]
    return sizes, *layouts


@settings(max_examples=300, deadline=None)
@given(changes())
def test_steps_lead_from_source_to_target(change):
    sizes, src, dst = change
    if not (consistent(src) and consistent(dst) and _even(src, sizes) and _even(dst, sizes)):
        return
    whole = np.random.default_rng(1).standard_normal((8, 36 if math.prod(sizes) % 3 == 0 else 24, 5))
    parts = lay(whole, src, sizes)
    path = steps(src, dst, sizes)
    here = src
    for step in path:
        assert step.before == here
        parts = run(step, parts, sizes, whole.shape)
        here = step.after
    assert here == dst
    assert np.allclose(gather(parts, dst, sizes, whole.shape), whole)


def _even(layout, sizes):
    shape = (8, 36 if math.prod(sizes) % 3 == 0 else 24, 5)
    return fits(shape, layout, sizes, even_dims=range(3))


@pytest.mark.parametrize(
    "src, dst, kinds",
    [
        ("R,S1", "S1,S1", ["all_gather", "slice", "slice"]),
        ("S1,S1", "R,S1", ["all_gather", "all_gather", "slice"]),
        ("S0,S1", "S0,S2", ["all_to_all"]),
        ("P,P", "S0,S0", ["reduce_scatter", "reduce_scatter"]),
        ("R,P", "R,S0", ["reduce_scatter"]),
        ("R,R", "P,R", ["mask"]),
        ("S0,R", "S0,R", []),
        ("R,O3", "R,R", ["broadcast"]),
        ("O1,R", "P,R", ["mask"]),
        ("P,R", "O1,R", ["all_reduce", "slice"]),
        ("R,S1", "O1,S1", ["slice"]),
        ("O0,R", "O1,R", ["broadcast", "slice"]),
        # what a rank keeps of its own counts: over two ranks it receives half, over eight 7/8
        ("S0,R,R", "S1,S0,S1", ["all_to_all", "slice", "slice"]),
    ],
)
def test_known_paths(src, dst, kinds):
    sizes = (4, 8) if src.count(",") == 1 else (2, 4, 8)
    assert [s.kind for s in steps(parse(src), parse(dst), sizes)] == kinds


def test_steps_do_not_depend_on_the_order_of_questions():
    before = steps(parse("P,S0"), parse("R,R"), (2, 4))
    steps.cache_clear()
    assert steps(parse("P,S0"), parse("R,R"), (2, 4)) == before


def test_placed_values_are_whole_on_one_coordinate_and_empty_elsewhere():
    assert [local_shape((6, 4), ("O1", "S1"), (3, 2), (c, 0)) for c in range(3)] == [(0, 2), (6, 2), (0, 2)]
    assert placed_on("O12") == 12
    with pytest.raises(LayoutError, match="names no coordinate"):
        placed_on("S1")


@given(st.lists(st.sampled_from([*ENTRIES, "Pmax", "S2"]), min_size=0, max_size=3))
def test_text_round_trip(entries):
    assert parse(show(tuple(entries))) == tuple(entries)


@pytest.mark.parametrize("text", ["X", "S", "S0/1", "S0/", "S0/2:0", "S-1", "R,,R", "Q0", "O", "O-1"])
def test_nonsense_is_refused(text):
    with pytest.raises(LayoutError):
        parse(text)


@given(st.integers(1, 40), st.sampled_from(MESHES))
def test_chunks_cover_every_dim_once(size, sizes):
    layout = ("S0",) * len(sizes)
    got = [
        i
        for c in itertools.product(*map(range, sizes))
        for lo, hi in pieces(size, layout, 0, sizes, c)
        for i in range(lo, hi)
    ]
    assert got == list(range(size))


def test_chunks_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for size, ways in itertools.product(range(1, 20), range(1, 6)):
        wanted = [len(c) for c in torch.arange(size).chunk(ways)]
        got = [local_shape((size,), ("S0",), (ways,), (i,))[0] for i in range(ways)]
        assert got == wanted + [0] * (ways - len(wanted))


def test_sections():
    assert shard(2, (64, 64, 64)) == "S2/3"
    assert shard(0, (5120, 1280, 1280)) == "S0/4:1:1"
    assert pieces(12, ("S0/3",), 0, (2,), (1,)) == [(2, 4), (6, 8), (10, 12)]
    assert not fits((12,), ("S0/3",), (3,)) and fits((12,), ("S0/3",), (4,))
    assert fraction(("S0/3", "R"), (4, 2)) == 0.25
    assert not fits((8,), ("S0", "S0/2"), (2, 2)) and fits((8,), ("S0/2", "S0/2"), (2, 2))
    with pytest.raises(LayoutError, match="dim 0 of size 7 has no sections"):
        pieces(7, ("S0/2",), 0, (2,), (0,))


@given(
    st.tuples(st.integers(0, 24), st.integers(0, 24)),
    st.lists(st.sampled_from(("R", "S0", "S1", "S0/4", "S1/1:2")), min_size=2, max_size=2),
    st.sampled_from(((2, 2), (2, 3), (4, 2))),
)
def test_a_cut_is_even_where_all_ranks_have_as_much(
    shape: tuple[int, int], entries: list[str], sizes: tuple[int, ...]
) -> None:
    layout = tuple(entries)
    if not consistent(layout) or shape[0] % 4 or shape[1] % 3:
        return  # no such sections
    held = {local_shape(shape, layout, sizes, coord) for coord in itertools.product(*map(range, sizes))}
    assert even(shape, layout, sizes) == (len(held) == 1)


def received(path, sizes):
    """Shares of the tensor that a rank receives on the way, by the textbook: rings, and equal parts."""

    def held(layout):
        return math.prod(1 / n for e, n in zip(layout, sizes, strict=True) if e[0] == "S")

    of_kind = {
        "all_gather": lambda a, b, n: b - a,
        "reduce_scatter": lambda a, b, n: a - b,
        "all_reduce": lambda a, b, n: 2 * a * (n - 1) / n,
        "all_to_all": lambda a, b, n: a - a / n,
        "broadcast": lambda a, b, n: a - a / n,
        "slice": lambda a, b, n: 0,
        "mask": lambda a, b, n: 0,
    }
    return sum(of_kind[s.kind](held(s.before), held(s.after), sizes[s.axis]) for s in path if sizes[s.axis] > 1)


@settings(max_examples=200, deadline=None)
@given(changes(), st.randoms(use_true_random=False))
def test_no_way_round_receives_less(change, rng):
    """Up to what a step costs more, so that fewer steps are taken of those that receive alike."""
    sizes, src, dst = change
    between = tuple(rng.choice(("R", a, b)) for a, b in zip(src, dst, strict=True))
    if all(map(consistent, (src, dst, between))):
        round_about = (*steps(src, between, sizes), *steps(between, dst, sizes))
        assert received(steps(src, dst, sizes), sizes) <= received(round_about, sizes) + 2e-4 * len(round_about)


@given(
    st.tuples(st.integers(1, 13), st.integers(1, 13)),
    st.lists(st.sampled_from(("R", "S0", "S1", "S2", "S0/2", "S1/1:2")), min_size=2, max_size=2),
    st.sampled_from(((2, 2), (2, 3), (4, 1))),
    st.sampled_from(((), (0,), (0, 1))),
)
def test_a_layout_fits_where_sections_and_even_dims_are_cut_equally(shape, entries, sizes, even_dims):
    layout = tuple(entries)

    def cut(dim):
        """What each rank has of each section."""
        return {
            tuple(hi - lo for lo, hi in pieces(shape[dim], layout, dim, sizes, coord))
            for coord in itertools.product(*map(range, sizes))
        }

    def fine(dim):
        axes = cutters(layout, dim)
        if not axes:
            return True
        sections = sections_of(layout[axes[0]])
        if shape[dim] < math.prod(sizes[a] for a in axes) or (len(sections) > 1 and shape[dim] % sum(sections)):
            return False
        return len(cut(dim)) == 1 if len(sections) > 1 or dim in even_dims else True

    if not consistent(layout):
        assert not fits(shape, layout, sizes, even_dims)
        return
    there = all(dim_of(e) < 2 for e in layout if is_shard(e))
    assert fits(shape, layout, sizes, even_dims) == (there and all(map(fine, range(2))))


@given(
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.lists(st.sampled_from(("R", "S0", "S1", "P", "O1")), min_size=2, max_size=2),
    st.sampled_from(MESHES[2:4]),
)
def test_the_most_elements_are_those_of_the_fullest_rank(shape, entries, sizes):
    layout = tuple(entries)
    assert most_elements(shape, layout, sizes) == max(
        math.prod(local_shape(shape, layout, sizes, coord)) for coord in itertools.product(*map(range, sizes))
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
def test_sections_of_an_entry_are_in_proportion_to_those_given(given_sizes):
    kept = [size for size in given_sizes if size]
    found = sections_of(parse(shard(1, given_sizes))[0])
    assert [size * sum(found) for size in kept] == [weight * sum(kept) for weight in found]


@given(st.integers(1, 60), st.integers(1, 9))
def test_divisible_names_the_multiples_next_to_a_size(size, ways):
    below = [n for n in range(1, size + 1) if n % ways == 0]
    above = next(n for n in itertools.count(size) if n % ways == 0)
    assert divisible(size, ways) == (f"{below[-1]} or {above}" if below else str(above))


def test_crowded_dims_are_those_of_several_axes():
    assert [crowded(parse(text)) for text in ("R,P", "S0,S1", "S1,R,S1", "S1,S0,S1,S0,S2")] == [(), (), (1,), (0, 1)]


@pytest.mark.parametrize(
    "src, dst, message",
    [
        ("R", "R,R", "do not belong to a mesh of 2 axes"),
        ("S0/2,S0", "R,R", "different sections"),
        ("R,R", "S0/2,S0", "different sections"),
    ],
)
def test_no_steps_between_layouts_that_are_none_of_the_mesh(src, dst, message):
    with pytest.raises(LayoutError, match=message):
        steps(parse(src), parse(dst), (2, 2))
