"""reshard on real ranks: every pair of layouts, forward and gradient, against cutting the whole tensor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.layout import consistent, cutters, is_partial, sections_of, show, steps
from autopar.runtime import Mesh, count, reshard
from autopar.runtime.collectives import broadcast
from autopar.runtime.cuts import own
from tests.helpers.ranks import on_new_ranks, on_ranks

SHAPES = [(4, 8), (5, 3), (3, 1), (12, 6), (2, 7, 4)]


def _layouts(axes, shape, sizes):
    entries = ["R", "P", "O1", "S0", "S1", "S0/3", "S1/4:1:1", f"S{len(shape) - 1}"]
    for layout in itertools.product(dict.fromkeys(entries), repeat=axes):
        if consistent(layout) and all(_sections_fit(layout, dim, size, sizes) for dim, size in enumerate(shape)):
            yield layout


def _sections_fit(layout, dim, size, sizes):
    axes = cutters(layout, dim)
    sections = sections_of(layout[axes[0]]) if axes else (1,)
    if len(sections) == 1:
        return True
    ways = math.prod(sizes[a] for a in axes)
    return size % sum(sections) == 0 and all((w * size // sum(sections)) % ways == 0 for w in sections)


def _held(whole, layout, mesh):
    """This rank's part; partial sums are the whole on coordinate 1 plus noise that cancels over the axis."""
    noise = torch.zeros_like(whole)
    for axis, entry in enumerate(layout):
        if is_partial(entry):
            n, c = mesh.sizes[axis], mesh.coord[axis]
            whole = whole if c == n - 1 else torch.zeros_like(whole)
            noise = noise + (axis + 2) * (2 * c - n + 1) * (mesh.coord[1 - axis] + 1 if _partner(layout, axis) else 1)
    return own(whole + noise, tuple("R" if is_partial(e) else e for e in layout), mesh.sizes, mesh.coord)


def _partner(layout, axis):
    return len(layout) == 2 and is_partial(layout[1 - axis])


def _total(local, layout, mesh):
    """Complete the partial sums of a local tensor, by plain torch.distributed."""
    for axis, entry in enumerate(layout):
        if is_partial(entry):
            local = local.clone()
            dist.all_reduce(local, group=mesh.group(axis))
    return tuple("R" if is_partial(e) else e for e in layout), local


def _equals(local, layout, whole, mesh, what):
    cut, local = _total(local, layout, mesh)
    wanted = own(whole, cut, mesh.sizes, mesh.coord)
    assert torch.equal(local, wanted), (what, local, wanted)


def _pairs(sizes, shape, every):
    mesh = Mesh(sizes, tuple("xyz"[: len(sizes)]), "cpu")
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    pull = whole.flip(0) * 3 + 1
    done = 0
    layouts = list(enumerate(_layouts(len(sizes), shape, sizes)))
    for (i, src), (j, dst) in itertools.product(layouts, repeat=2):
        if (i + j + SHAPES.index(shape)) % every:
            continue
        dual = {"P": "R", "R": "P"}
        back = tuple(tuple(dual.get(e, e) for e in layout) for layout in (dst, src))
        x = _held(whole, src, mesh).contiguous().requires_grad_()
        with count() as seen:
            y = reshard(
                x, f"{show(src)} -> {show(dst)}", grad=f"{show(back[0])} -> {show(back[1])}", shape=shape, mesh=mesh
            )
            _equals(y.detach(), dst, whole, mesh, (src, dst))
            y.backward(_held(pull, back[0], mesh))
        _equals(x.grad, back[1], pull, mesh, ("grad", src, dst))
        wanted = [(s.kind, s.axis) for s in (*steps(src, dst, sizes), *steps(*back, sizes))]
        assert [(c.kind, c.axis) for c in seen] == wanted
        done += 1
    return done


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("sizes", "every"), [((2,), 1), ((4,), 1), ((2, 2), 5), pytest.param((2, 2), 1, marks=pytest.mark.slow)]
)
def test_all_pairs_of_layouts(sizes, shape, every):
    """On two axes the fast tests take a fifth of the pairs: each layout is left and reached, by other pairs in other
    shapes."""
    done = on_ranks(math.prod(sizes), _pairs, sizes, shape, every)
    assert done[0] > 10


DTYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bfloat16, torch.float16, torch.float32, torch.complex64),
)


def _dtypes():
    mesh = Mesh((4,), ("x",), "cpu")
    for dtype in DTYPES:
        whole = torch.arange(15).reshape(5, 3) % 2
        whole = whole.to(dtype)
        part = own(whole, ("S0",), mesh.sizes, mesh.coord)
        mine = whole if mesh.coord == (2,) else torch.zeros_like(whole)
        for x, way, wanted in (
            (part, "S0 -> R", whole),
            (part, "S0 -> S1", own(whole, ("S1",), mesh.sizes, mesh.coord)),
            (mine, "P -> R", whole),
            (mine, "P -> S0", part),
        ):
            got = reshard(x, way, grad=None, shape=(5, 3), mesh=mesh)
            assert got.dtype == dtype and torch.equal(got.to(torch.complex64), wanted.to(torch.complex64)), (dtype, way)
        assert torch.equal(broadcast(mine, 2, 0, mesh).to(torch.complex64), whole.to(torch.complex64)), dtype
    for dtype in (torch.int8, torch.int16, torch.int32):  # sums wrap
        most = torch.full((4,), torch.iinfo(dtype).max, dtype=dtype)
        assert reshard(most, "P -> R", grad=None, shape=(4,), mesh=mesh).tolist() == [-4] * 4
        assert reshard(most, "P -> S0", grad=None, shape=(4,), mesh=mesh).tolist() == [-4]
    values = torch.tensor([float(mesh.coord[0]), -1.0 - mesh.coord[0]])
    assert reshard(values, "Pmax -> R", grad=None, shape=(2,), mesh=mesh).tolist() == [3, -1]
    assert reshard(values, "Pmin -> R", grad=None, shape=(2,), mesh=mesh).tolist() == [0, -4]
    assert reshard(torch.tensor(2.0), "P -> R", grad=None, shape=(), mesh=mesh) == 8


def test_every_dtype_and_reduction():
    on_ranks(4, _dtypes)


def _wrong():
    mesh = Mesh((2,), ("x",), "cpu")
    with pytest.raises(RunError, match=r"shape \(3, 3\), wanted \(2, 3\)"):
        reshard(torch.ones(3, 3), "S0 -> R", grad=None, shape=(4, 3), mesh=mesh)
    with pytest.raises(RunError, match="got 2, wanted 3"):
        Mesh((3,), ("x",), "cpu").coord  # noqa: B018


def test_wrong_shapes_and_wrong_number_of_ranks_are_errors():
    on_ranks(2, _wrong)


def _bytes():
    mesh = Mesh((2, 2), ("x", "y"), "cpu")
    with count() as seen:
        reshard(torch.ones(2, 8), "S0,P -> R,S1", grad=None, shape=(4, 8), mesh=mesh, name="w")
    return [str(c) for c in seen]


def test_counted_bytes_are_what_one_group_holds():
    assert on_ranks(4, _bytes)[0] == ["reduce_scatter axis 1 64 B w", "all_gather axis 0 64 B w"]


def _compiled():
    mesh = Mesh((2,), ("x",), "cpu")

    def f(x, n):
        y = reshard(x * 2, "S0 -> R", grad="P -> S0", shape=(n, 3), mesh=mesh)
        return reshard(y.sin(), "R -> S1", grad="S1 -> R", shape=(n, 3), mesh=mesh)

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for n in (5, 7, 8):
        whole = torch.arange(3.0 * n, dtype=torch.float64).reshape(n, 3)
        results = []
        for call in (f, compiled):
            x = own(whole, ("S0",), mesh.sizes, mesh.coord).clone().requires_grad_()
            with count() as seen:
                y = call(x, n)
                y.square().sum().backward()
            results.append((y.detach(), x.grad, [str(c) for c in seen]))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2]


def test_compiled_code_runs_and_counts_the_same_steps():
    on_new_ranks(2, _compiled, timeout_s=120)
