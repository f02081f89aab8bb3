"""The time of a search."""

from __future__ import annotations

import math
import time

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
