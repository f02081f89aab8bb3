"""A profile on real ranks: everything that is predicted is measured, and a refitted cluster explains it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli.app import app
from autopar.cluster import Cluster
from autopar.errors import ClusterError


@pytest.mark.parametrize("recipe", [pytest.param("megatron", marks=pytest.mark.slow), "zero3"])
def test_what_is_predicted_is_measured(recipe: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, cluster, trace = tmp_path / "plan.json", tmp_path / "c.toml", tmp_path / "t.json"
    ran = CliRunner().invoke(
        app,
        ["plan", "models/gpt.py:tiny", "--cluster", "cpu:1x2", "--seq", "16", "--recipe", recipe, "-o", str(plan)],
        catch_exceptions=False,
    )
    assert ran.exit_code == 0
    arguments = [
        "profile",
        str(plan),
        "--steps",
        "1",
        "--json",
        str(tmp_path / "p.json"),
        "-o",
        str(cluster),
        "--trace",
        str(trace),
    ]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert not capfd.readouterr().err  # lines of torch's profiler, from every rank
    assert ran.exit_code == 0 and "measured / predicted" in ran.stdout and "refitted cluster written" in ran.stdout
    data = json.loads((tmp_path / "p.json").read_text())
    rows = data["rows"]
    assert {row["what"] for row in rows} >= {"operator", "collective", "optimizer"}
    unmeasured = [row["name"] for row in rows if row["measured_s"] <= 0 < row["predicted_s"]]
    unpredicted = [
        row["name"]
        for row in rows
        if row["predicted_s"] <= 0 < row["measured_s"] and row["what"] in ("collective", "gradients")
    ]
    assert not unmeasured and not unpredicted
    assert 0 < sum(row["measured_s"] for row in rows) <= 1.05 * data["profiled_s"]
    off = [abs(row["measured_s"] - row["predicted_s"]) for row in rows]
    assert off == sorted(off, reverse=True)
    assert Cluster.parse(cluster).device.sources["peak_flops"].startswith("refitted")
    assert any("autopar op " in event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"])


@pytest.mark.parametrize(
    "cluster, said",
    [
        (
            "h100:1x2",
            "devices of kind cuda, and here the plan runs on cpu ranks, which tell nothing of a H100 SXM 80GB",
        ),
        ("h100:1x2+l4:1x2", "has parts of 2 kinds, and a profile tells of one rank"),
    ],
)
def test_ranks_that_tell_nothing_of_a_cluster_are_refused_before_they_run(
    cluster: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, refitted = tmp_path / "plan.json", tmp_path / "c.toml"
    ran = CliRunner().invoke(
        app,
        ["plan", "models/mlp.py:tiny", "--cluster", cluster, "--recipe", "ddp", "-o", str(plan)],
        catch_exceptions=False,
    )
    assert ran.exit_code == 0
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("autopar.cli.profiling.profile", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ClusterError, match=said):
        CliRunner().invoke(app, ["profile", str(plan), "-o", str(refitted)], catch_exceptions=False)
    assert not refitted.exists()


def test_a_plan_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": 1}')
    from autopar.errors import PlanError

    with pytest.raises(PlanError, match="schema 1"):
        CliRunner().invoke(app, ["profile", str(tmp_path / "plan.json")], catch_exceptions=False)
