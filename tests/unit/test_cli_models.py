"""Models of one's own on the command line: their rules, and arguments that hold several inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import autopar

NET = """
import torch
from torch import nn


@torch.library.custom_op("autopar_test_rules::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


doubled.register_autograd(lambda context, gradient: 2 * gradient)
RULES = {torch.ops.autopar_test_rules.doubled: "b d -> b d"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(doubled(self.up(x))).square().mean()


def net(batch=8):
    return Net(), (torch.randn(batch, 64),)
"""


OWN = """
import torch

ROWS = {torch.ops.autopar_test_rules.doubled: "b d! -> b d"}
LIST = ["b d -> b d"]
WRONG = {torch.ops.autopar_test_rules.doubled: "b d => b d"}
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize(("rules", "kind"), [("net.py", "attribute"), ("own.py:ROWS", "replicate")])
def test_rules_of_a_file(net: Path, rules: str, kind: str) -> None:
    """The model's own file or another one; what asks for options later has the same rules."""
    done = autopar(
        "plan", "net.py:net", "--cluster", "cpu:1x2", "--recipe", "tp", "--rules", rules, "-o", "plan.json", cwd=net
    )
    assert done.returncode == 0 and "no sharding rule" not in done.stdout and "were not used" not in done.stdout, (
        done.stderr
    )
    plan = json.loads((net / "plan.json").read_text())
    assert plan["source"]["rules"] == rules and plan["nodes"]["doubled"]["kinds"] == [kind]
    why = json.loads(autopar("explain", "plan.json", "--node", "doubled", "--json", "-", cwd=net).stdout)[
        "alternatives"
    ]
    assert any(row["result"].startswith("S1") for row in why) == (kind == "attribute") and any(
        row["result"].startswith("S0") for row in why
    )
    assert autopar("verify", "plan.json", "--batch", "12", cwd=net).returncode == 0  # makes the model three times
    assert (
        autopar("emit", "plan.json", "-o", "out", cwd=net).returncode == 0
        and "doubled.default': 'net'})" in (net / "out" / "sharded.py").read_text()
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("nowhere.py", "rules 'nowhere.py': no Python file nowhere.py"),
        ("net", "wanted path/to/file.py, which has a dict RULES"),
        ("own.py", "own.py has no RULES; wanted a dict"),
        ("own.py:LIST", "own.py has LIST, but it is list; wanted a dict"),
        ("own.py:WRONG", "rule 'b d => b d' must have exactly one '->'"),
    ],
)
def test_what_is_no_file_of_rules_is_refused(net: Path, rules: str, said: str) -> None:
    done = autopar("plan", "net.py:net", "--cluster", "cpu:1x2", "--rules", rules, "-o", "plan.json", cwd=net)
    assert (
        done.returncode == 1
        and said in done.stderr
        and "Traceback" not in done.stderr
        and not (net / "plan.json").exists()
    )


def test_memory_takes_rules(net: Path) -> None:
    whole, cut = (
        json.loads(
            autopar(
                "memory",
                "net.py:net",
                "--cluster",
                "cpu:1x2",
                "--recipe",
                "ddp",
                "--batch",
                "512",
                *more,
                "--json",
                "-",
                cwd=net,
            ).stdout
        )["rows"][-1]["prediction"]["peak_bytes"]
        for more in ((), ("--rules", "net.py"))
    )
    assert cut < whole


GIVEN = """
import torch
from torch import nn


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch):
        return (self.layer(batch["x"]) - batch["y"]).square().mean()


class Between(Nested):
    def forward(self, x, scale, y, squared=True, z=None):
        return (self.layer(x) * scale - y).square().mean()


def inputs(batch):
    return torch.randn(batch, 8), torch.randn(batch, 8)


def nested(batch=8):
    return Nested(), (dict(zip("xy", inputs(batch))),)


def between(batch=8):
    x, y = inputs(batch)
    return Between(), (x, 2.0, y), {"squared": True, "z": None}
"""


HALF = """

class Half(Nested):
    def __init__(self):
        super().__init__()
        self.layer.bfloat16()
        self.norm = nn.LayerNorm(8)

    def forward(self, x, scale, y):
        x = self.layer(x.to(self.layer.weight.dtype)).float()
        return (self.norm(x) * scale - y).square().mean()


def half(batch=8):
    x, y = inputs(batch)
    return Half(), (x, 2.0, y)
"""


@pytest.mark.parametrize("model", ["nested", "between"])
def test_arguments_that_hold_several_inputs_or_none(tmp_path: Path, model: str) -> None:
    """Tensors in a dict ended in a KeyError; behind a number the next input was taken to be that number."""
    (tmp_path / "given.py").write_text(GIVEN)
    assert (
        autopar(
            "plan", f"given.py:{model}", "--cluster", "cpu:1x2", "--recipe", "ddp", "-o", "plan.json", cwd=tmp_path
        ).returncode
        == 0
    )
    done = autopar("verify", "plan.json", "--batch", "6", cwd=tmp_path)
    assert done.returncode == 0 and "\nmodel " in done.stdout, done.stdout + done.stderr
    ran = autopar("run", "plan.json", "--steps", "1", "--json", "-", cwd=tmp_path)
    assert ran.returncode == 0 and json.loads(ran.stdout)["steps"][0]["loss"] < 10.0, ran.stderr


def test_a_factory_says_in_what_dtype_its_model_is(tmp_path: Path) -> None:
    """Models in bfloat16 were planned in float32, without a word, and those in two dtypes in one of them."""
    (tmp_path / "given.py").write_text(GIVEN + HALF)
    ask = ("given.py:half", "--cluster", "cpu:1x2", "--recipe", "ddp", "--json", "-")
    fits = json.loads(autopar("memory", *ask, cwd=tmp_path).stdout)
    assert autopar("plan", *ask[:-2], "-o", "plan.json", cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "plan.json").read_text())["precision"] == fits["precision"] == "bfloat16"
    ran = autopar("run", "plan.json", "--steps", "1", "--json", "-", cwd=tmp_path)
    assert ran.returncode == 0 and json.loads(ran.stdout)["steps"][0]["loss"] < 10.0, ran.stderr
    asked = autopar("plan", *ask, "--precision", "float32", "-o", "plan.json", cwd=tmp_path)
    assert asked.returncode == 0 and json.loads((tmp_path / "plan.json").read_text())["precision"] == "float32"
