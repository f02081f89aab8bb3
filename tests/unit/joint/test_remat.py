"""Pipelines whose blocks are run again because they were asked for so."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.joint import plan
from autopar.memory import predict
from autopar.problem.read_graph import read
from autopar.request import Request
from tests.helpers.planned import graph


@pytest.mark.parametrize("level", ["selective", "full"])
def test_a_pipeline_with_blocks_that_are_run_again_takes_longer(level: str) -> None:
    cluster, hints = Cluster.parse("cpu:1x4"), {"b": 2048}
    again, plain = (
        plan(graph(), hints, Request(cluster, recipe="1f1b", remat=remat), model="stack", graph_hash="0" * 64)
        for remat in (level, "none")
    )
    assert again.pipelined and again.remat.keys() == {"layers_0"} and not plain.remat
    assert again.predicted.step_s > plain.predicted.step_s
    if level == "full":  # of this block a kept product is as large as what its relu would keep
        held, before = (
            predict(read(graph(), hints, training=True, device="cpu"), made).places[0].phases["backward"]
            for made in (again, plain)
        )
        assert held < before
