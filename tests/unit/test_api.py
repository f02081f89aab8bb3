"""`autopar.compile` without ranks: options, a user's own operator with and without a rule, what is saved."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.problem.read_graph import laid_out
from autopar.verify import case_of, verify


@torch.library.custom_op("autopar_test::shifted_relu", mutates_args=())
def shifted_relu(x: torch.Tensor, shift: float) -> torch.Tensor:
    """relu(x) + shift, opaque to everybody."""
    return x.relu() + shift


@shifted_relu.register_fake
def _(x, shift):
    return torch.empty_like(x)


shifted_relu.register_autograd(
    lambda ctx, grad: (grad * (ctx.saved_tensors[0] > 0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


@torch.library.custom_op("autopar_test::over_all", mutates_args=())
def over_all(x: torch.Tensor) -> torch.Tensor:
    """x minus the mean of everything: no part of it can be computed alone."""
    return x - x.mean()


@over_all.register_fake
def _(x):
    return torch.empty_like(x)


over_all.register_autograd(lambda ctx, grad: grad - grad.mean())
ROOT = Path(__file__).parents[2]
WHOLE = torch.ops.autopar_test.over_all.default
OP = torch.ops.autopar_test.shifted_relu.default


class Model(nn.Module):
    """A linear layer, the user's operator, a loss."""

    def __init__(self, whole=False):
        super().__init__()
        self.whole = whole
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, y):
        h = self.up(x)
        h = over_all(h) if self.whole else shifted_relu(h, 0.5)
        return ((self.down(h) - y) ** 2).mean()


def planned(whole=False, **options):
    torch.manual_seed(0)
    model, batch = Model(whole), (torch.randn(8, 8), torch.randn(8, 8))
    compiled = autopar.compile(model, "cpu:1x2", batch, **options)
    case = case_of(
        compiled.captured,
        compiled.plan,
        model.state_dict(),
        dict(zip(compiled.captured.input_names, batch, strict=True)),
    )
    return compiled, verify(case)


def node(compiled, target=OP):
    (name,) = [n.name for n in compiled.captured.gm.graph.nodes if n.target is target]
    return compiled.plan.nodes[name]


def test_an_operator_with_a_users_rule_is_split_and_exact():
    compiled, report = planned(rules={OP: "b d -> b d"}, recipe="ddp")
    assert report.ok, report.worst
    assert node(compiled).factors == ("b",)
    assert not any("shifted_relu" in note for note in compiled.plan.notes)


def test_an_operator_gets_a_derived_rule_where_that_is_asked_for_and_it_is_said_once():
    compiled, report = planned(recipe="ddp", rules={OP: "derive"})
    assert report.ok, report.worst
    assert node(compiled).kinds == ("sample",)
    (note,) = [note for note in compiled.plan.notes if "shifted_relu" in note]
    assert "test_api.py:" in note and "derived: it held in trials on random tensors, which is no proof" in note


def test_an_operator_without_a_rule_is_whole_and_exact_and_it_is_said_how_to_give_it_one():
    compiled, report = planned(recipe="ddp")
    assert report.ok, report.worst
    assert set(node(compiled).kinds) == {"replicate"}
    (note,) = [note for note in compiled.plan.notes if "shifted_relu" in note]
    assert (
        "test_api.py:" in note
        and "rules={op: 'b d -> b d'}" in note
        and '"derive"' in note
        and "docs/writing-rules.md" in note
    )


def test_microbatches_of_an_operator_without_a_rule_are_refused_with_what_to_do():
    with pytest.raises(autopar.InfeasibleError, match=r"with rules= give autopar_test\.shifted_relu\.default a rule"):
        planned(recipe="1f1b")


def test_what_calls_operators_that_are_not_registered_says_what_registers_them(tmp_path):
    compiled, _ = planned(recipe="ddp")
    assert f"registered({{'autopar_test.shifted_relu.default': {__name__!r}}})" in compiled.source
    alone = subprocess.run(
        [sys.executable, compiled.save(tmp_path / "plan") / "sharded.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (
        "calls operator autopar_test.shifted_relu.default, which nothing has registered in this process: import "
        "tests.unit.test_api, which registers it" in alone.stderr
    )


def test_rules_may_name_all_overloads_or_the_function_and_unused_ones_are_said():
    for key in (torch.ops.autopar_test.shifted_relu, shifted_relu):
        compiled, _ = planned(recipe="ddp", rules={key: "b d -> b d", WHOLE: "b! d! -> b d"})
        assert node(compiled).factors == ("b",)
        (note,) = [note for note in compiled.plan.notes if "rules for" in note]
        assert "rules for autopar_test.over_all were not used" in note


def test_an_operator_that_no_rule_fits_is_whole_and_exact_and_said_once():
    compiled, report = planned(recipe="ddp", whole=True, rules={WHOLE: "derive"})
    assert report.ok, report.worst
    assert set(node(compiled, WHOLE).kinds) == {"replicate"}
    (note,) = [note for note in compiled.plan.notes if "over_all" in note]
    assert "test_api.py:" in note and "rules=" in note and "none held in trials" in note


def test_verify_finds_a_wrong_rule_and_what_is_wrong():
    torch.manual_seed(0)
    batch = torch.randn(8, 8), torch.randn(8, 8)
    right, wrong = (
        autopar.compile(Model(whole=True), "cpu:1x2", batch, recipe="ddp", rules={over_all: rule})
        for rule in ("b! d! -> b d", "b d -> b d")
    )
    report = right.verify(*batch)
    assert report.ok and str(report).startswith(
        f"all {len(report.rows)} values are within their tolerance on mesh (2,)"
    )
    report = wrong.verify(batch[0], y=batch[1])
    assert (
        not report.ok
        and "over_all" in report.first
        and "values are wrong on mesh (2,)" in str(report)
        and f"first node that differs: {report.first}" in str(report)
    )


def test_the_mesh_of_a_pipeline_has_its_places(tmp_path):
    """Two ranks in two stages were `on mesh (1,)`."""
    compiled, report = planned(rules={OP: "b d -> b d"}, recipe="gpipe")
    assert compiled.plan.mesh == (1,) and "gpipe on mesh (2, 1)" in repr(compiled)
    assert report.ok and "on mesh (2, 1)" in str(report), report
    assert "on cpu | mesh 2 places x (" in compiled.source
    assert "for cpu:1x2, mesh 2x1, gpipe" in (compiled.save(tmp_path / "saved") / "README.md").read_text()


class Held(nn.Module):
    """A model whose argument holds its inputs."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        return self.model(batch["x"], batch["y"])


def test_verify_takes_arguments_as_the_model_does():
    batch = {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    report = autopar.compile(Held(), "cpu:1x2", (batch,), recipe="ddp").verify(batch)
    assert report.ok, report


class Spelled(nn.Module):
    """A model whose arguments differ in the size of a letter."""

    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, X, x):
        return self.model(X, x)


def test_arguments_are_called_as_the_model_calls_them():
    batch = {"X": torch.randn(8, 8), "x": torch.randn(8, 8)}
    compiled = autopar.compile(Spelled(), "cpu:1x2", batch, recipe="ddp")
    for report in (
        compiled.verify(**batch),
        compiled.verify(batch["X"], x=batch["x"]),
        compiled.verify(*batch.values()),
    ):
        assert report.ok, report


class Named(nn.Module):
    """Its inputs have names of Python's, of operators, of sizes and of what emitted files import."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input, add, linear_default, b, F, reshard):
        return self.down(self.up(input) * b + add + linear_default) * F + reshard


def test_inputs_may_have_any_name():
    wide, narrow = torch.randn(16, 16), torch.randn(16, 8)
    batch = (narrow, wide, wide, wide, narrow, narrow)
    compiled = autopar.compile(Named(), "cpu:1x2", (*batch, narrow), recipe="tp", loss_fn=nn.functional.mse_loss)
    report = compiled.verify(*batch, narrow)
    assert report.ok, report
    assert all(
        f"'{name}': " in compiled.source for name in ("input", "add", "linear_default", "b", "reshard", "target")
    )
    names = [
        list(laid_out(each.captured.gm, each.captured.hints, training=True))
        for each in (copy.deepcopy(compiled), compiled)
    ]
    assert names[0] == names[1] == list(compiled.plan.nodes)


def test_verify_says_what_it_lacks(tmp_path):
    batch = torch.randn(8, 8), torch.randn(8, 8)
    compiled = autopar.compile(Model(), "cpu:1x2", batch, recipe="ddp")
    with pytest.raises(autopar.RunError, match="missing inputs y"):
        compiled.verify(batch[0])
    with pytest.raises(
        autopar.RunError, match=r"input 'x' is of sizes \(8, 3\), wanted a tensor of sizes \(b, 8\), where b is 8"
    ):
        compiled.verify(batch[0][:, :3], batch[1])
    with pytest.raises(
        autopar.RunError, match=r"input 'y' is of sizes \(4, 8\), wanted a tensor of sizes \(b, 8\), where b is 8"
    ):
        compiled.verify(batch[0], batch[1][:4])
    with pytest.raises(autopar.PlanError, match="without the graph that it was made for, which verify works on"):
        autopar.load(compiled.save(tmp_path / "plan")).verify(*batch)
    with torch.device("meta"):
        model = Model()
    with pytest.raises(autopar.PlanError, match="no weights to compare with"):
        autopar.compile(model, "cpu:1x2", batch, recipe="ddp").verify(*batch)


def test_the_plan_is_plain_data():
    compiled, _ = planned(recipe="ddp")
    assert json.loads(compiled.plan.to_json())["strategy"] == "ddp"
    assert autopar.Plan.from_json(compiled.plan.to_json()) == compiled.plan
    assert "ddp on mesh" in repr(compiled)


def by_weights():
    return autopar.compile(Model(), "cpu:1x4", (torch.zeros(16, 8), torch.zeros(16, 8)), recipe="tp")


@pytest.fixture(scope="module")
def compiled() -> autopar.Compiled:
    """The model cut by weights; nothing of it is changed."""
    return by_weights()


def test_threads_plan_one_after_the_other(compiled: autopar.Compiled) -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(by_weights().plan)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [compiled.plan] * 3


def test_plans_made_in_inference_mode_are_those_made_outside(compiled: autopar.Compiled) -> None:
    with torch.inference_mode():
        inside = by_weights()
        assert inside.plan == compiled.plan and inside.memory().peak_bytes == compiled.memory().peak_bytes


def test_a_compiled_model_is_copied_and_not_pickled(compiled: autopar.Compiled, tmp_path: Path) -> None:
    for made in (copy.copy(compiled), copy.deepcopy(compiled)):
        assert (
            made is not compiled
            and made.plan == compiled.plan
            and made.memory().peak_bytes == compiled.memory().peak_bytes
        )
    for dump in (pickle.dumps, lambda each: torch.save(each, tmp_path / "model.pt")):
        with pytest.raises(autopar.PlanError, match=r"not pickled.*save\(folder\).*autopar.load\(folder\)"):
            dump(compiled)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("cuda", "cluster and precision= of compile"),
        ("compile", r"module.compile_blocks\(\)"),
        ("no_sync", "loss_weight=1 / k"),
        ("generate", "a second plan"),
        ("named_modules", "module.named_modules is that of this rank's nn.Module"),
        ("configure_optimizers", r"type\(model\).configure_optimizers\(compiled, ...\)"),
    ],
)
def test_what_a_compiled_model_lacks_has_something_instead(compiled: autopar.Compiled, name: str, instead: str) -> None:
    assert not hasattr(compiled, name)
    with pytest.raises(AttributeError, match=rf"a compiled model has no attribute '{name}'; .*{instead}"):
        getattr(compiled, name)


def test_errors_inside_of_properties_are_their_own(compiled: autopar.Compiled) -> None:
    broken = copy.copy(compiled)
    broken.bundle = None
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'plan'"):
        broken.plan  # noqa: B018


def test_a_plan_for_devices_that_are_not_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was torch's "Cannot access accelerator device when none is available"."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    planned = autopar.compile(Model(), "h100:1x2", (torch.zeros(16, 8), torch.zeros(16, 8)), recipe="tp")
    with pytest.raises(autopar.RunError, match=r"is for cuda devices, and torch finds none here.*`autopar run`"):
        planned.parameters()


@pytest.mark.parametrize("name", ["compile", "diff", "load"])
def test_docstrings_name_every_argument_and_error(name: str) -> None:
    function = getattr(autopar, name)
    said = inspect.getdoc(function) or ""
    assert "Raises" in said
    if name == "compile":
        # of its tables: one argument or more, and what is said of them
        rows = re.findall(r"^ +((?:\w+, )*\w+)  +\S", said, re.MULTILINE)
        named = {name for row in rows for name in row.split(", ")} | set(re.findall(r"`(\w+)", said))
        assert [argument for argument in inspect.signature(function).parameters if argument not in named] == []


@pytest.mark.parametrize("name", [name for name in autopar.__all__ if isinstance(getattr(autopar, name), type)])
def test_public_classes_and_what_they_have_are_described(name: str) -> None:
    kind = getattr(autopar, name)
    own = {
        name: getattr(kind, name)
        for name, member in vars(kind).items()
        if not name.startswith("_") and (callable(getattr(kind, name)) or hasattr(member, "__get__"))
    }
    assert (
        kind.__doc__
        and [
            name
            for name, member in own.items()
            if isinstance(member, property | functools.cached_property) or callable(member)
            if not member.__doc__
        ]
        == []
    )
