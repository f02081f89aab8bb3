"""What becomes of a shape whose fastest answer, as the glance has it, does not fit when its memory is walked."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import pricing as module
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import Found, lay
from autopar.joint.timetables import Kind
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import subject

SHAPE = Shape(2, (1,), 4)
KINDS = (Kind("1f1b"), Kind("interleaved_1f1b", 2), Kind("zbv_zero_bubble", 2))


def glanced() -> tuple[Pricing, Found]:
    who = subject("hf-gpt2")
    context = SearchContext(who.captured.gm, {**who.captured.hints, "b": 64}, Request(Cluster.parse("h100:1x2"), Settings("train")))
    pricing = Pricing(context, replace(SEARCH, kinds=KINDS))
    return pricing, pricing.glance(SHAPE, math.inf)


def test_the_next_best_of_the_glance_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pricing, found = glanced()
    others = [way for way in pricing.laid[SHAPE] if way.table != found.table]
    assert others, "the glance lays out more than one"
    tried: list[str] = []

    def fits(*args: Any, whole: bool = False) -> Found:
        table = args[3]
        if whole:
            tried.append(table.kind.schedule)
        if whole and table == found.table:
            raise InfeasibleError("a peak that no glance sees")
        return lay(*args, whole=whole)

    monkeypatch.setattr(module, "lay", fits)
    exact = pricing.exact(found)
    second = min(others, key=lambda way: way.step_s)
    assert exact is not None and exact.table == second.table
    assert tried[0] == found.table.kind.schedule and second.step_s >= found.step_s
    assert all(exact.step_s <= way.step_s * 1.05 for way in others if way.table != exact.table), "what was not tried promised no more"


def test_nothing_else_is_laid_out_where_the_fastest_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pricing, found = glanced()
    tables = []

    def seen(*args: Any, whole: bool = False) -> Found:
        tables.append(args[3])
        return lay(*args, whole=whole)

    monkeypatch.setattr(module, "lay", seen)
    exact = pricing.exact(found)
    assert exact is not None and exact.step_s == pytest.approx(found.step_s, rel=0.01)
    assert {table.kind for table in tables} == {found.table.kind}
