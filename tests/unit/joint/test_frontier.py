"""Step time against memory: no plan of the frontier is beaten, and each fits what it was planned for."""

from __future__ import annotations

import itertools

from autopar.cluster import Cluster
from autopar.joint.frontier import frontier
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import subject


def test_less_memory_takes_longer() -> None:
    who = subject("hf-gpt2")
    request = Request(Cluster.parse("cpu:1x4"), Settings("train"), time_limit_s=4.0)
    plans = frontier(who.captured.gm, {**who.captured.hints, "b": 8}, request, model=who.name, graph_hash=who.captured.graph_hash)
    assert len(plans) > 2
    for fast, small in itertools.pairwise(plans):
        assert fast.predicted.step_s <= small.predicted.step_s
        assert fast.predicted.memory_bytes > small.predicted.memory_bytes
    assert all(plan.cluster == plans[0].cluster and Plan.from_json(plan.to_json()) == plan for plan in plans)
    report = who.verified(plans[-1])
    assert report.ok, [row for row in report.rows if not row.ok][:4]
