"""Prices against simulations."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.simulate import simulate
from benchmarks import simulated
from tests.helpers.apart import in_parts
from tests.helpers.remat import rematerialised
from tests.helpers.verify import by_stages, subject


def test_a_plan_whose_blocks_are_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    who = subject("gpt")
    made = rematerialised(who, by_stages(who, (1,), "single", 2, 2, "1f1b"), "full")
    ((scope, (first, _)),) = made.stages[1].blocks.items()
    parted = in_parts(made, {scope: {"later": first}})
    monkeypatch.setattr(simulated, "captured_of", lambda case: who.captured)
    monkeypatch.setattr(simulated, "plans", lambda *args: iter([("1f1b", parted)]))
    (row,) = simulated.rows(simulated.CASES[0], ["1f1b"], 1.0, Counter())
    assert row.simulated_s == pytest.approx(simulate(who.captured.gm, made).step_s, rel=1e-3)
