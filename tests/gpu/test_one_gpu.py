"""Everything that the command line does with a GPU, on one: plan for `here`, run, profile, verify, calibrate; and what
a step holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import autopar
from autopar.calibrate import calibrate
from autopar.cli.app import app
from autopar.cluster import Cluster
from autopar.runtime import launch
from models import gpt
from tests.gpu.marks import gpu

pytestmark = gpu

WORKSPACES = 2 * 32 << 20
"""Bytes that cuBLAS and cuBLASLt take for themselves on an H100."""

MODEL = f"{Path(gpt.__file__).resolve()}:small"


def done(*arguments: str) -> str:
    """What a command that works prints."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan for one device of this machine."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    cluster = str(Cluster.parse("here").to_dict()["name"])
    done(
        "plan",
        MODEL,
        "--cluster",
        f"{cluster}:1x1",
        "--batch",
        "4",
        "--seq",
        "256",
        "--precision",
        "bf16",
        "-o",
        str(path),
    )
    return str(path)


def test_it_runs(plan: str, tmp_path: Path) -> None:
    done("run", plan, "--steps", "3", "--json", str(tmp_path / "r.json"))
    steps = json.loads((tmp_path / "r.json").read_text())["steps"]
    assert steps[2]["loss"] < steps[0]["loss"] and steps[2]["step_s"] < 1


def test_it_is_verified_there(plan: str) -> None:
    assert "all values are within the tolerance" in done(
        "verify", plan, "--device", "cuda", "--batch", "2", "--seq", "16"
    )


def test_what_is_predicted_is_measured(plan: str, tmp_path: Path) -> None:
    done("profile", plan, "--steps", "2", "--json", str(tmp_path / "p.json"), "-o", str(tmp_path / "c.toml"))
    data = json.loads((tmp_path / "p.json").read_text())
    assert not [row["name"] for row in data["rows"] if row["measured_s"] <= 0 < row["predicted_s"] - 1e-5]
    assert 0 < sum(row["measured_s"] for row in data["rows"]) <= 1.05 * data["profiled_s"]
    assert Cluster.parse(tmp_path / "c.toml").device.kind == "cuda"


def test_a_calibration_is_near_the_preset() -> None:
    found = calibrate("cuda", 1, seconds=10.0)
    device, preset = found.cluster.device, Cluster.parse("here").device
    assert device.sources["achievable"].startswith("measured") and not found.fits.rejected
    assert device.achievable_bandwidth * device.memory_bandwidth_bytes_s == pytest.approx(
        preset.achievable_bandwidth * preset.memory_bandwidth_bytes_s, rel=0.4
    )
    assert device.best_share("bfloat16") == pytest.approx(preset.best_share("bfloat16"), rel=0.3)
    assert 1e-6 < device.launch_s < 3e-5


def _peak(
    bundle: autopar.bundle.Bundle, weights: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]
) -> tuple[int, int]:
    """Bytes at the peak of a second step, and behind it."""
    module = bundle.build(weights)
    inputs, optimizer = module.shard_batch(**batch), torch.optim.AdamW(module.parameters())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        module.train_step(*inputs)
        optimizer.step()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


@pytest.mark.parametrize("precision", ["bf16", "float32"])
def test_a_step_holds_what_is_predicted(precision: str) -> None:
    model, batch = gpt.build(gpt.Config(vocab=8192, positions=512, layers=4, heads=8, hidden=1024), 16, 512)
    made = autopar.compile(model, "h100:1x1", batch, precision=precision)
    assert made.captured is not None
    inputs = dict(zip(made.captured.input_names, batch, strict=True))
    place = made.memory().places[0]
    peak, rest = launch(_peak, 1, made.bundle, dict(model.state_dict()), inputs, device_type="cuda")[0]
    assert (
        0.97 * place.rest_bytes < rest < 1.03 * place.rest_bytes + WORKSPACES
        and 0.95 * place.peak_bytes < peak < 1.05 * place.peak_bytes + WORKSPACES
    )


def _seen() -> tuple[str, str]:
    return torch.distributed.get_backend(), torch.cuda.get_device_name()


def test_ranks_share_what_there_is() -> None:
    torch.cuda.is_available()  # whoever has asked cannot fork ranks that use it
    count = torch.cuda.device_count()
    assert launch(_seen, count, device_type="cuda")[0][0] == "nccl"
    assert {backend for backend, _ in launch(_seen, count + 1, device_type="cuda")} == {"gloo"}
