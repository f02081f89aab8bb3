"""Tiny models with divided blocks, and pipelines of them that the search cuts inside of blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autopar.cluster import Cluster
from autopar.cluster.mixed import join
from autopar.joint.inside import cut_inside
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import Found
from autopar.problem.settings import Settings
from autopar.request import Request
from passes.divide_block import points
from passes.fold_repeats import body_of, is_folded
from passes.part_runs import divided_at
from tests.helpers.verify import Subject, splitting, subject

DEEP = "hf-llama-deep"  # of four blocks


def divided(name: str, point: int = -1) -> Subject:
    """A tiny model, the last block of each run of which is divided at its point of that number."""
    who = subject(name, batch=16)
    blocks = {
        str(node.target): {int(node.meta["repeat"]) - 1: list(points(body_of(node)))[point]}
        for node in who.captured.gm.graph.nodes
        if is_folded(node)
    }
    captured = who.captured.parted(divided_at(who.captured.gm, blocks))
    return replace(who, captured=captured, cases={}, references={})


@cache
def context(places: int, *, mixed: bool = False) -> SearchContext:
    """The search of DEEP on so many slow devices, whose links and launches cost next to nothing; `mixed`: one of them,
    a part of its own, is half as fast again."""
    base = splitting(places)
    one = replace(base.device, launch_s=1e-9, alone=1.0)
    cluster = Cluster(base.name, base.levels, one)
    if mixed:
        fast = replace(one, name="fast", peak_flops={dtype: 1.5 * rate for dtype, rate in one.peak_flops.items()})
        own = splitting(1)
        cluster = join([Cluster("fast", own.levels, fast), replace(splitting(places - 1), device=one)])
    captured = subject(DEEP, batch=16).captured
    return SearchContext(captured.gm, captured.hints, Request(cluster, Settings("train"), time_limit_s=30.0))


@cache
def found(places: int, schedule: str, *, mixed: bool = False) -> tuple[Found, Found]:
    """DEEP on so many places of one device under a schedule: cut between blocks, and inside of them."""
    here, shape = context(places, mixed=mixed), Shape(places, (1,), 8)
    pricing = Pricing(here, SEARCH)
    tables = [table for table in pricing.tables(shape) if table.kind.schedule == schedule]
    between = pricing.price(shape, tables[:1], "none", exact=True)
    return between, cut_inside(here, between)
