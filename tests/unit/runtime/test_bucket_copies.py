"""The copies that buckets make, in bytes, against their price."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar._torch import TorchDispatchMode
from autopar.buckets import BUCKET_BYTES, travels_alone
from autopar.cluster import Cluster
from autopar.layout import local_shape, parse, steps
from autopar.problem import routes as routes_module
from autopar.problem.hiding import LOCAL_AXIS
from autopar.problem.routes import Routes
from autopar.runtime import coalesced, moves

SHAPES = [(8, 16), (16, 4), (4, 4)]
VIEWS = ("aten::new_empty", "aten::empty_like")


class _Written(TorchDispatchMode):
    """Adds up the bytes that copies write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::cat", "aten::stack", "aten::clone"):
            self.nbytes += found.nbytes
        elif func._schema.name not in VIEWS:
            assert all(a.alias_info is not None for a in func._schema.returns), f"{func} is no view: is it a copy?"
        return found


def _without_ranks(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    """Collectives give memory of the right shape at once."""

    def gather(x: Any, axis: int, mesh: Any, out: Any = None, *, behind: bool) -> Any:
        into = x.new_empty(sizes[axis] * x.shape[0], *x.shape[1:]) if out is None else out
        return lambda: into.view(sizes[axis], *x.shape)

    for module in (coalesced, moves):
        monkeypatch.setattr(module, "start_all_gather", gather)
        monkeypatch.setattr(module, "start_reduce_scatter", lambda x, axis, mesh, behind: lambda: x[0])
    monkeypatch.setattr(coalesced.dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda *_: None))


@pytest.mark.parametrize("limit_bytes", [1, BUCKET_BYTES], ids=["by themselves", "packed"])
@pytest.mark.parametrize(
    ("rest", "leaf"), [("S0", "R"), ("S1", "R"), ("S0/2", "R"), ("S0,S0", "R,R"), ("S1,S0", "R,R"), ("S0,S1", "S0,R")]
)
@pytest.mark.parametrize("way", ["leaves", "gradients", "summed"])
def test_buckets_copy_what_is_priced(
    monkeypatch: pytest.MonkeyPatch, way: str, rest: str, leaf: str, limit_bytes: int
) -> None:
    """Each byte that is written into a buffer, out of it and into leaves is read and written at the memory's
    bandwidth."""
    layouts = {
        "leaves": (parse(rest), parse(leaf)),
        "gradients": (tuple("P" if e == "R" else e for e in parse(leaf)), parse(rest)),
        "summed": (("P",) * len(parse(rest)), ("R",) * len(parse(rest))),
    }
    source, target = layouts[way]
    sizes = (2,) * len(source)
    _without_ranks(monkeypatch, sizes)
    mesh: Any = SimpleNamespace(sizes=sizes, coord=(0,) * len(sizes), group=lambda *_, **__: None)
    given, into = (
        [torch.zeros(local_shape(shape, layout, sizes, mesh.coord)) for shape in SHAPES] for layout in (source, target)
    )
    with _Written() as written:
        coalesced.Together(
            [steps(source, target, sizes)] * 3,
            given,
            SHAPES,
            mesh,
            ["a", "b", "c"],
            into if way == "leaves" else (),
            limit_bytes,
        ).finish()
    cluster = Cluster.parse(f"cpu:1x{math.prod(sizes)}")
    device = replace(
        cluster.device, launch_s=0.0, cache_bytes=0, memory_bandwidth_bytes_s=1e9, achievable_bandwidth=1.0
    )
    monkeypatch.setattr(routes_module, "travels_alone", partial(travels_alone, limit_bytes=limit_bytes))
    routes = Routes(replace(cluster, device=device).mesh(sizes))
    loads = routes.loads(source, target, sum(4.0 * math.prod(shape) for shape in SHAPES), 1.0)
    copies_s = sum(load.seconds for load in loads if load.axis == LOCAL_AXIS)
    assert 1e9 * copies_s == pytest.approx(2 * written.nbytes, rel=1e-9)
