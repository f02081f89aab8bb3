"""Two kinds of devices: what the search says of a step is what the simulation says, stage by stage on its own device;
and no place computes with the prices of another."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autopar import joint
from autopar.cluster import Cluster
from autopar.cost.comm import collective_s
from autopar.decisions import local_share
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.report.reshards import prices_of, reshards
from autopar.report.tables import overview
from autopar.request import Request
from autopar.simulate import simulate
from autopar.simulate.stages import Stages
from tests.helpers.kinds import two_kinds
from tests.helpers.planned import BATCH, graph
from tests.helpers.verify import subject

CLOSE = 0.03


def _planned(cluster: Cluster, recipe: str, mesh: tuple[int, ...] | None = None) -> Plan:
    request = Request(cluster, recipe=recipe, mesh=mesh, time_limit_s=10.0)
    return joint.plan(graph(), {"b": BATCH}, request, model="stack", graph_hash="0" * 64)


@pytest.mark.parametrize("recipe", ["zero3", "tp", "naive_mp", "gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(
    "cluster", [two_kinds("cpu:1x2", 2.0), Cluster.parse("cpu:2x1+cpu:1x2")], ids=["two kinds", "unequal nodes"]
)
def test_the_search_says_what_the_simulation_says(cluster: Cluster, recipe: str) -> None:
    made = _planned(cluster, recipe)
    found = simulate(graph(), made)
    assert found.step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)
    if made.places > 1:
        assert [place.peak_bytes for place in found.places] == pytest.approx(list(made.predicted.places_bytes))


@pytest.mark.parametrize(
    ("recipe", "where", "mesh"), [("1f1b", "h100:1x1+a100-80:1x1", (1,)), ("pp_zero1", "h100:1x4+l4:1x4", None)]
)
def test_gpus_of_two_kinds(recipe: str, where: str, mesh: tuple[int, ...] | None) -> None:
    who = subject("hf-gpt2")
    hints = {**who.captured.hints, "b": 64, "s": 512}
    made = joint.plan(
        who.captured.gm,
        hints,
        Request(Cluster.parse(where), Settings(precision="bf16"), recipe=recipe, mesh=mesh, time_limit_s=10.0),
        model="gpt2",
        graph_hash=who.captured.graph_hash,
    )
    assert simulate(who.captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


def test_a_stage_takes_the_time_of_its_own_device() -> None:
    """Of alike blocks: one on the slow place takes twice as long as one on the fast, forward and backward; the
    optimizer too."""
    stages = Stages.of(graph(), _planned(two_kinds("cpu:1x2", 2.0), "1f1b", (2,)))
    assert stages.places.homes == (0, 1)
    work = {}
    for stage, at in enumerate(stages.plan.stages):
        count = sum(stop - first for first, stop in at.blocks.values())
        turns = [turn for turn in stages.turns[stage] if turn.instance >= 0]
        compute = [
            piece.seconds
            for turn in turns
            for way in (turn.item.forward, turn.item.backward)
            for piece in way
            if piece.kind == "compute"
        ]
        work[stages.places.device(at.place).name] = sum(compute) / count
    assert work["slow"] == pytest.approx(2 * work["CPU core"])
    assert stages.send_s(0) == sum(_sent_s(stages))


def _sent_s(stages: Stages) -> list[float]:
    """Over the network between the parts, not over the links within one."""
    link = stages.places.axis((0, 1))
    assert [span.level.bandwidth_bytes_s for span in link.spans] == [1.25e9]
    return [
        collective_s("send", local_share(stages.plan, ref) * stages.program.bytes_of(ref), link)
        for ref in stages.views[0].sends
    ]


def test_reports_tell_of_each_place() -> None:
    made = _planned(two_kinds("cpu:1x2", 2.0), "pp_zero3", (2,))
    console = Console(width=160, file=io.StringIO())
    console.print(overview(made))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "places" in text and "CPU core" in text and "slow" in text and "of what each place has" in text
    assert prices_of(made, 0).device.name != prices_of(made, 1).device.name
    program = Stages.of(graph(), made).program
    assert sum(row.step_s for row in reshards(program, made)) > 0
