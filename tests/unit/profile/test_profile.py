"""From what each rank recorded to the profile of a plan."""

from __future__ import annotations

import sys

import pytest

from autopar.codegen.tables import Names
from autopar.profile import Case, profile
from autopar.profile.record import Recorded
from tests.helpers.verify import by_stages, subject


def test_a_step_and_its_rows_are_of_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are means over the ranks of the first place: where the second rank took longer, rows do not add up to more
    than the step."""
    recorded = [
        Recorded(2.0, seconds, {("optimizer",): share * seconds})
        for seconds, share in ((1.0, 0.5), (3.0, 0.9), (9.0, 0.1), (9.0, 0.1))
    ]
    monkeypatch.setattr(sys.modules[profile.__module__], "launch", lambda *_, **__: recorded)
    who = subject("mlp")
    made = by_stages(who, (2,), "ddp", 2, 2, "1f1b")
    captured = who.captured
    found = profile(Case(captured.gm, made, Names.of(captured), captured.constants, who.weights, who.batch()), 1)
    measured = {(row.place, row.what): row.measured_s for row in found.rows if row.measured_s}
    assert measured == {(0, "optimizer"): pytest.approx(1.6), (1, "optimizer"): pytest.approx(0.9)}
    assert (found.step_s, found.profiled_s) == (2.0, 2.0)
    assert found.rest_s == pytest.approx(0.4)
