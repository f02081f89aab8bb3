"""The time of a search."""

from __future__ import annotations

import math
import time

import pytest

from autopar.timer import Timer


def test_a_timer_that_runs() -> None:
    timer = Timer(60.0)
    assert not timer.late and not timer.skips() and not timer.hurried
    assert 59.0 < timer.left_s <= 60.0
    assert 29.0 < timer.halfway - time.monotonic() <= 30.0


def test_a_timer_that_is_late_remembers_what_it_skipped() -> None:
    timer = Timer(0.0)
    assert timer.late and not timer.hurried
    assert timer.skips() and timer.hurried
    assert timer.note.startswith("time was up (0 s) before")


def test_what_has_begun_may_go_on_for_a_while() -> None:
    timer = Timer(60.0)
    timer.ends_at = time.monotonic() - 3.0
    assert not timer.skips(begun=True) and not timer.hurried and timer.skips() and timer.hurried
    timer.ends_at -= 4.0
    assert timer.skips(begun=True)
    assert not Timer(math.inf).skips(begun=True) and not Timer(math.inf).skips()


def test_a_hurried_plan_says_so_once() -> None:
    timer = Timer(0.0)
    assert timer.noted(["a"]) == ("a",)
    timer.skips()
    assert timer.noted(["a"]) == timer.noted(timer.noted(["a"])) == ("a", timer.note)


def test_what_ends_a_search_has_its_grace_from_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    timer = Timer(10.0)
    soon, now[0] = timer.grace(), 110.9
    assert not soon() and not timer.hurried
    late, now[0] = timer.grace(), 111.5
    assert soon() and timer.hurried and not late()
    now[0] = 112.0
    assert late()
