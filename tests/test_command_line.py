"""The whole way by the command line on a tiny model: plan, explain, emit, run, verify, and plans that are refused."""

from __future__ import annotations

import json
import re
import subprocess
from inspect import signature
from pathlib import Path

import pytest

from autopar.cli.app import app
from autopar.plan import Plan
from tests.helpers.apart import in_parts
from tests.helpers.command import ROOT, autopar


def done(*arguments: str, fresh: bool = False) -> subprocess.CompletedProcess[str]:
    result = autopar(*arguments, fresh=fresh)
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor-parallel plan of the tiny MLP on four CPU ranks."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made = done("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x4", "--recipe", "tp", "-o", str(path), "--json", "-")
    report = json.loads(made.stdout)
    assert report["strategy"] == "tp" and report["mesh"] == [4] and report["predicted"]["step_s"] > 0
    assert {weight["name"] for weight in report["weights"]} >= {"head.weight", "linear.weight"}
    return path


def test_the_same_question_gives_the_same_bytes(plan: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    shown = done("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x4", "--recipe", "tp", "-o", str(again), fresh=True)
    assert again.read_bytes() == plan.read_bytes()
    assert "MLP on cpu:1x4, train" in shown.stdout and "weights of layers.0" in shown.stdout


def test_explain(plan: Path) -> None:
    shown = done("explain", str(plan))
    assert (
        "nodes that cost most" in shown.stdout
        and "reshards that cost most" in shown.stdout
        and "one microbatch" not in shown.stdout
    )
    found = json.loads(done("explain", str(plan), "--node", "head.weight", "--json", "-").stdout)
    assert sum(row["chosen"] for row in found["alternatives"]) == 1 and {
        row["result"] for row in found["alternatives"]
    } >= {"R, gradient R", "S0, gradient S0", "R, gradient S0"}
    refused = autopar("explain", str(plan), "--node", "tail.weight")
    assert refused.returncode == 1 and "no node 'tail.weight'; nodes are" in refused.stderr


def test_emit(plan: Path, tmp_path: Path) -> None:
    done("emit", str(plan), "-o", str(tmp_path / "out"), fresh=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "constants.pt",
        "plan.json",
        "sharded.py",
    ]
    compile((tmp_path / "out" / "sharded.py").read_text(), "sharded.py", "exec")


def test_simulate(plan: Path, tmp_path: Path) -> None:
    shown = done("simulate", str(plan), "--trace", str(tmp_path / "trace.json"))
    assert (
        "MFU" in shown.stdout
        and re.search(r"samples +\d{4,} per second and device", shown.stdout)  # 10580 was 1.058e+04
        and "exposed communication" in shown.stdout
        and json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    )
    found = json.loads(done("simulate", str(plan), "--json", "-").stdout)
    assert found["step_s"] > 0 and found["peak_bytes"] > 0 and len(found["places"]) == 1
    refused = autopar("simulate", str(plan), "--trace", str(plan / "inside" / "trace.json"))
    assert refused.returncode == 1 and "cannot write the trace to" in refused.stderr


def test_run(plan: Path, tmp_path: Path) -> None:
    shown = done("run", str(plan), "--steps", "2", "--json", str(tmp_path / "run.json"), fresh=True)
    steps = json.loads((tmp_path / "run.json").read_text())["steps"]
    assert shown.stdout.count("loss") == 2 and len(steps) == 2
    assert steps[1]["loss"] < steps[0]["loss"]  # the same batch twice


ROW = re.compile(r"^\| `([\w -]+)` \| (`.*?`) \|", re.MULTILINE)
FIELDS = dict(ROW.findall((ROOT / "docs" / "cli.md").read_text().partition("## JSON")[2]))
"""The fields that docs/cli.md gives to the JSON of each command."""

JSON_OF = {
    "plan": ("plan", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "--recipe", "tp"),
    "explain": ("explain", "PLAN"),
    "explain --node": ("explain", "PLAN", "--node", "head.weight"),
    "diff": ("diff", "PLAN", "PLAN"),
    "run": ("run", "PLAN", "--steps", "1"),
    "verify": ("verify", "PLAN"),
    "simulate": ("simulate", "PLAN"),
    "memory MODEL": ("memory", "models/mlp.py:tiny", "--cluster", "cpu:1x2", "--recipe", "tp"),
    "memory PLAN": ("memory", "PLAN"),
    "profile": ("profile", "PLAN", "--steps", "1"),
    "calibrate": ("calibrate", "--device", "cpu", "--ranks", "1", "--seconds", "1", "-o", "CLUSTER"),
    "recipes": ("recipes",),
    "clusters": ("clusters",),
}
SLOW = ("run", "verify", "profile", "calibrate")


def test_the_docs_have_the_json_of_all_commands() -> None:
    taking = {
        command.callback.__name__
        for command in app.registered_commands
        if "json" in signature(command.callback).parameters
    }
    assert {name.split()[0] for name in FIELDS} == taking and FIELDS.keys() == JSON_OF.keys()


@pytest.mark.parametrize("of", [pytest.param(of, marks=pytest.mark.slow) if of in SLOW else of for of in JSON_OF])
def test_json_has_the_fields_of_the_docs(plan: Path, tmp_path: Path, of: str) -> None:
    given = {"PLAN": str(plan), "CLUSTER": str(tmp_path / "ours.toml")}
    found = json.loads(done(*(given.get(each, each) for each in JSON_OF[of]), "--json", "-").stdout)
    for each in found if isinstance(found, list) else [found]:
        assert sorted(each) == sorted(FIELDS[of].strip("`").split("`, `"))


def test_run_with_another_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done(
        "plan",
        "models/mlp.py:tiny",
        "--cluster",
        "cpu:1x2",
        "--recipe",
        "zero1",
        "--optimizer",
        "sgd-momentum",
        "-o",
        str(path),
    )
    steps = json.loads(done("run", str(path), "--steps", "2", "--json", "-").stdout)["steps"]
    assert steps[1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("more", [(), ("--batch", "12")])
def test_verify(plan: Path, more: tuple[str, ...]) -> None:
    report = json.loads(done("verify", str(plan), "--json", "-", *more).stdout)
    assert report["ok"] and {row["kind"] for row in report["rows"]} >= {"loss", "gradient", "parameter", "collectives"}


def test_verify_fails_beyond_the_tolerance(plan: Path) -> None:
    result = autopar("verify", str(plan), "--dtype", "float32", "--tolerance", "0")
    assert result.returncode == 1 and "WRONG" in result.stdout and "first node that differs" in result.stdout


def test_a_plan_for_another_graph_is_refused(plan: Path, tmp_path: Path) -> None:
    data = json.loads(plan.read_text())
    data["source"]["model"] = "models/gpt.py:tiny"
    (tmp_path / "other.json").write_text(json.dumps(data))
    result = autopar("emit", str(tmp_path / "other.json"), "-o", str(tmp_path / "out"))
    assert (
        result.returncode == 1
        and "is for another graph than models/gpt.py:tiny" in result.stderr
        and "new: " in result.stderr
    )
    assert not (tmp_path / "out").exists()


def test_a_plan_made_in_python_is_refused(plan: Path, tmp_path: Path) -> None:
    data = json.loads(plan.read_text()) | {"source": {}}
    (tmp_path / "bare.json").write_text(json.dumps(data))
    result = autopar("run", str(tmp_path / "bare.json"))
    assert result.returncode == 1 and "does not say which model it is for" in result.stderr


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=pytest.mark.slow)
        for model in (("models/mlp.py:tiny",), ("hf:models/hf/tiny/gpt2.json", "--seq", "16"))
    ],
)
def test_a_plan_whose_blocks_are_in_parts(tmp_path: Path, model: tuple[str, ...]) -> None:
    """What every command that captures the model again makes of it: the same as of the plan before."""
    whole, path = tmp_path / "whole.json", tmp_path / "parts.json"
    done("plan", *model, "--cluster", "cpu:1x2", "--recipe", "1f1b", "-o", str(whole))
    made = Plan.load(whole)
    (scope,) = {scope for stage in made.stages for scope in stage.blocks}
    in_parts(made, {scope: {"later": 1}}).save(path)
    found = [json.loads(done("simulate", str(where), "--json", "-").stdout) for where in (whole, path)]
    assert found[1]["step_s"] == pytest.approx(found[0]["step_s"], rel=1e-3) and found[1][
        "peak_bytes"
    ] == pytest.approx(found[0]["peak_bytes"])
    assert (
        "later/" in (explained := done("explain", str(path)).stdout)
        and f"one microbatch of {made.microbatches} through all stages" in explained
    )
    said = json.loads(done("explain", str(path), "--json", "-").stdout)
    assert said["prices_of"] == "microbatch" and said["microbatches"] == made.microbatches
    done("memory", str(path))
    done("emit", str(path), "-o", str(tmp_path / "out"))
    emitted = (tmp_path / "out" / "sharded.py").read_text()
    assert emitted.count("(Block):") == 1 and "RUNS = {'later': (" in emitted  # both parts do the same
    assert "all values are within the tolerance" in done("verify", str(path)).stdout
    broken = path.read_text().replace('"later": 1', '"later": 7')
    path.write_text(broken)
    refused = autopar("simulate", str(path))
    assert refused.returncode == 1 and "has 2 instances and cannot be parted in front of [7]" in refused.stderr
