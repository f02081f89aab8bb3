"""What a user gets for bad input: what is wrong, where, got and wanted; and nothing half-written."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.bundle import Bundle
from autopar.errors import AutoparError, CaptureError, ClusterError, InfeasibleError, PlanError, RuleError
from autopar.plan import Plan
from autopar.problem.types import Problem, Solution
from autopar.search import SEARCHES
from models import mlp
from tests.helpers.captures import captured_once


def compile(cluster="cpu:1x2", **options):
    """A plan of a small model, which is captured once for all that ask for the same graph."""
    model, batch = mlp.tiny()
    graph = [repr(options.get(name)) for name in ("loss_fn", "mode", "precision", "dynamic_shapes")]
    with captured_once((__name__, *graph)):
        return autopar.compile(model, cluster, batch, **options)


WRONG = {
    "mode": ({"mode": "trian"}, PlanError, r"mode is 'trian', wanted train or inference"),
    "recipe": ({"recipe": "ttp"}, PlanError, r"unknown recipe 'ttp'; known are .*tp"),
    "search": ({"search": "ilpp"}, PlanError, r"unknown search 'ilpp'; known are .*ilp"),
    "exhaustive": (
        {"search": "exhaustive", "mesh": (2, 2), "cluster": "cpu:1x4"},
        PlanError,
        r"search on 2x2: exhaustive search over .* combinations of .*, at most 2,000,000 .* search='ilp'",
    ),
    "mesh": ({"mesh": (3,)}, PlanError, r"mesh 3 has 3 ranks, cpu:1x2 has 2 devices; wanted axes that multiply to 2"),
    "recipe of experts": (
        {"recipe": "ep"},
        PlanError,
        r"recipe ep needs experts .*the graph of the model has none: use another recipe",
    ),
    "mesh of a recipe": (
        {"mesh": (2,), "recipe": "tp_zero3"},
        PlanError,
        r"recipe tp_zero3 needs a mesh of 2 axes, got \(2,\)",
    ),
    "cluster": ({"cluster": "cpu:1xtwo"}, ClusterError, r"cpu:1xtwo"),
    "device": ({"cluster": "gpu9000:1x2"}, ClusterError, r"gpu9000"),
    "near recipe": ({"recipe": "DPP"}, PlanError, r"unknown recipe 'DPP'; known are .* \(near: .*ddp"),
    "size beside inputs": (
        {"batch": 64},
        PlanError,
        r"batch is 64 \(int\); wanted no size beside example_inputs: theirs are planned for",
    ),
    "recipe as a list": (
        {"recipe": ["tp"]},
        PlanError,
        r"recipe is \['tp'\] \(list\); wanted the name of one strategy",
    ),
    "search as an object": (
        {"search": object()},
        PlanError,
        r"search is <object .*; wanted one of exhaustive, .* or a function",
    ),
    "search that gives nothing": (
        {"search": lambda problem, **options: None},
        PlanError,
        r"the search gave None for .*; wanted a Solution",
    ),
    "mesh of floats": (
        {"mesh": (2.0,)},
        PlanError,
        r"mesh is \(2.0,\) \(tuple\); wanted the sizes of the mesh axes, whole numbers of at least 1",
    ),
    "mesh without an order": ({"mesh": {2, 1}}, PlanError, r"mesh is \{1, 2\} \(set\); wanted the sizes"),
    "mesh of a tensor": ({"mesh": torch.tensor(2)}, PlanError, r"mesh is tensor\(2\) \(Tensor\); wanted the sizes"),
    "mesh as text": ({"mesh": "two"}, PlanError, r"mesh is 'two'; wanted the sizes"),
    "mesh below 1": ({"mesh": (-1, -2)}, PlanError, r"mesh is \(-1, -2\) \(tuple\); wanted the sizes"),
    "precision": (
        {"precision": 16},
        PlanError,
        r"precision is 16 \(int\); wanted 'bf16', 'fp16', or a floating dtype of torch",
    ),
    "no precision": ({"precision": ""}, PlanError, r"precision '' is neither mixed precision"),
    "dtype": ({"precision": torch.int64}, PlanError, r"precision 'int64' is neither mixed precision"),
    "cluster of devices": (
        {"cluster": ["cuda:0", "cuda:1"]},
        ClusterError,
        r"cluster is \['cuda:0', 'cuda:1'\] \(list\); wanted a Cluster, or the name of one: .*'h100:1x2'",
    ),
    "a device": (
        {"cluster": torch.device("cpu")},
        ClusterError,
        r"cluster is device\(type='cpu'\) \(device\); wanted a Cluster",
    ),
    "loss by name": (
        {"loss_fn": "mse"},
        PlanError,
        r"loss_fn is 'mse'; wanted a function of outputs and targets, .*near: mse_loss",
    ),
    "class of a loss": (
        {"loss_fn": nn.MSELoss},
        PlanError,
        r"loss_fn is the class MSELoss; wanted .*make one of it, MSELoss\(\)",
    ),
    "no time": ({"time_limit_s": 0}, PlanError, r"time_limit_s is 0 \(int\); wanted seconds, a number above 0"),
    "time that is no number": ({"time_limit_s": math.nan}, PlanError, r"time_limit_s is nan \(float\); wanted seconds"),
    "time as text": ({"time_limit_s": "5"}, PlanError, r"time_limit_s is '5'; wanted seconds"),
    "no time at all": ({"time_limit_s": None}, PlanError, r"time_limit_s is None; wanted seconds"),
    "batch": ({"batch": 0}, PlanError, r"batch is 0 \(int\); wanted a whole number of at least 1"),
    "batch as text": ({"batch": "4"}, PlanError, r"batch is '4'; wanted a whole number"),
    "seq": ({"seq": math.nan}, PlanError, r"seq is nan \(float\); wanted a whole number"),
    "seed": ({"seed": 1.5}, PlanError, r"seed is 1.5 \(float\); wanted a whole number of at least 0"),
    "seed that no plan file may say": (
        {"seed": 1 << 70},
        PlanError,
        r"seed is 1180591620717411303424 \(int\); wanted a whole number of at most",
    ),
    "optimizer": (
        {"optimizer": torch.optim.AdamW},
        PlanError,
        r"optimizer is the class AdamW; wanted the name of one .*: sgd, sgd-momentum, adam, adamw; the optimizer "
        r"itself is made of",
    ),
    "no optimizer": ({"optimizer": None}, PlanError, r"optimizer is None; wanted the name of one"),
    "remat": ({"remat": True}, PlanError, r"remat is True \(bool\); wanted 'auto', 'none'"),
    "pareto": ({"pareto": "no"}, PlanError, r"pareto is 'no'; wanted True or False"),
    "prove": ({"prove": 0}, PlanError, r"prove is 0 \(int\); wanted True or False"),
    "progress": ({"progress": 3}, PlanError, r"progress is 3 \(int\); wanted a function of one text"),
    "source": ({"source": 3}, PlanError, r"source is 3 \(int\); wanted a dict"),
    "source that no file can say": (
        {"source": {"model": object()}},
        PlanError,
        r"source goes into plan.json, and Object of type object is not JSON serializable: wanted a dict of text",
    ),
    "source that JSON lacks": (
        {"source": {"loss": math.nan}},
        PlanError,
        r"source goes into plan.json, and Out of range float values are not JSON compliant",
    ),
    "rules as a list": (
        {"rules": ["b d -> b d"]},
        RuleError,
        r"rules is \['b d -> b d'\] \(list\); wanted a dict of operators and rule strings",
    ),
    "rule of a name": (
        {"rules": {"aten::gelu": "b d -> b d"}},
        RuleError,
        r"rules= has the key 'aten::gelu', a str, wanted an operator: torch.ops.mylib.scale.default, ",
    ),
    "rules": (
        {"rules": {torch.ops.aten.relu.default: 3}},
        AutoparError,
        r"rule for aten.relu.default is int, wanted a rule string",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_options_that_do_not_exist(name):
    options, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        compile(**options)


MODELS = {
    "class": (nn.Linear, r"model is the class Linear; wanted an nn.Module: make one of it, Linear\(...\)"),
    "function": (F.relu, r"model is <function relu .*; wanted an nn.Module: call it"),
    "text": ("hf:x", r"model is 'hf:x'; wanted an nn.Module: make the model first"),
    "nothing": (None, r"model is None; wanted an nn.Module"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_none(name):
    model, text = MODELS[name]
    with pytest.raises(CaptureError, match=text):
        autopar.compile(model, "cpu:1x2", mlp.tiny()[1])


def test_inputs_that_are_none():
    model, batch = mlp.tiny()
    for wrong in (5, "abc"):
        with pytest.raises(CaptureError, match=rf"example_inputs is {wrong!r}.*; wanted a tuple of positional inputs"):
            autopar.compile(model, "cpu:1x2", wrong)
    for wrong in ({0: batch[0]}, (batch[:1], {0: batch[1]})):
        with pytest.raises(CaptureError, match=r"a dict of named ones, or .tuple, dict., whose names are text"):
            autopar.compile(model, "cpu:1x2", wrong)
    with pytest.raises(
        CaptureError, match=r"example_inputs have no elements \(shapes \(0, .*give a batch of the size that a step has"
    ):
        autopar.compile(model, "cpu:1x2", tuple(value[:0] for value in batch))
    with pytest.raises(PlanError, match=r"folder is 3 \(int\); wanted the path of a folder"):
        autopar.load(3)


def test_a_size_and_a_dtype_are_what_their_names_are():
    wanted = compile(mesh=(2,), recipe="ddp", precision="bfloat16").plan
    assert all(compile(mesh=mesh, recipe="ddp", precision=torch.bfloat16).plan == wanted for mesh in (2, "2", [2]))
    assert compile(recipe="ddp", time_limit_s=10**400).plan == compile(recipe="ddp", time_limit_s=math.inf).plan


@pytest.mark.parametrize(
    ("mode", "smaller"),
    [("train", ", a smaller batch, or an optimizer with less state"), ("inference", " or a smaller batch")],
)
def test_a_model_that_fits_nowhere_names_the_shortfall_and_the_largest_tensors(mode, smaller):
    with torch.device("meta"):
        model, batch = mlp.build(1024, 65536, 12, 100, 64)
    with pytest.raises(
        InfeasibleError,
        match=r"(?s)no plan fits .*over the limit.*five largest tensors: layers.0.linear.weight ... "
        r"layers.11.linear.weight \(12 alike, 16 GiB each\) 192 GiB.*use more or larger devices"
        rf"{smaller}$",
    ):
        autopar.compile(model, "l4:1x2", batch, recipe="tp", mode=mode)


def test_a_mesh_of_another_size_than_the_cluster():
    with pytest.raises(PlanError, match=r"mesh 2x3 has 6 ranks, cpu:1x2 has 2 devices; wanted axes that multiply to 2"):
        compile(mesh=(2, 3))


@pytest.fixture(scope="module")
def compiled():
    return compile(recipe="ddp")


def test_a_plan_for_another_model(compiled):
    plan = compiled.plan
    plan.check(plan.graph_hash, plan.nodes)
    with pytest.raises(
        PlanError,
        match=r"plan for MLP is for another graph.*1 now.*gone: .*new: other.*hash .* planned, 123 now.*again",
    ):
        plan.check("123", ["other"])
    with pytest.raises(PlanError, match="the same nodes with other sizes, arguments or numbers of blocks"):
        plan.check("123", plan.nodes)


def never(*args: object, **options: object) -> None:
    raise AssertionError("the model is captured")


@pytest.mark.parametrize("name", ["recipe", "search", "remat", "optimizer"])
def test_unknown_names_are_refused_before_the_model_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture takes minutes for large models."""
    monkeypatch.setattr("autopar.capture.precision.capture_in", never)
    with pytest.raises(PlanError, match=r"unknown .*'nonsense'; known are|'nonsense' is unknown; known: "):
        compile(**{name: "nonsense"})


def test_results_of_a_search_that_was_added_to_the_table_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound above the step's own time would be a gap of 0 that nothing proves."""

    def bold(problem: Problem, **options: Any) -> Solution:
        return replace(SEARCHES["greedy"](problem, **options), bound_s=1.0)

    monkeypatch.setitem(SEARCHES, "bold", bold)
    with pytest.raises(PlanError, match=r"the search gave a bound of 1.0 s and a choice that takes .* s for "):
        compile(search="bold")


def test_another_schema_and_files_that_are_no_plan(compiled, tmp_path):
    later = dataclasses.replace(compiled.plan, schema=99).to_json()
    for text, wanted in [
        (later, "schema 99, this version of autopar reads"),
        ("nonsense", "no JSON"),
        ("[]", "schema 'list'"),
        (compiled.plan.to_json().replace('"mesh"', '"mash"', 1), r"lacks \['mesh'\] and has unknown \['mash'\]"),
    ]:
        with pytest.raises(PlanError, match=wanted):
            Plan.from_json(text)
    with pytest.raises(PlanError, match=r"cannot read plan .*none.json"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"is no saved plan: plan.json, sharded.py, constants.pt missing"):
        autopar.load(tmp_path)
    (tmp_path / "plan.json").write_text(compiled.plan.to_json())
    assert Plan.load(tmp_path) == compiled.plan  # a folder stands for the plan in it
    with pytest.raises(PlanError, match=r"plan.json is a file, and what is loaded is a folder .* `autopar emit PLAN"):
        autopar.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda plan: autopar.diff(plan, "plan.json"), r"new is a str; wanted a Plan"),
        (lambda plan: autopar.diff(None, plan), r"old is a NoneType; wanted a Plan"),
        (lambda plan: Plan.load(3), r"path is 3 \(int\); wanted the name of a plan file"),
        (lambda plan: plan.save(None), r"path is None \(NoneType\); wanted the name of a plan file"),
        (lambda plan: Plan.from_json({"model": "x"}), r"not a plan: wanted the text of one, got a dict"),
    ],
)
def test_what_is_no_plan_and_no_path_is_said(compiled, ask, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ask(compiled.plan)


def test_a_folder_that_is_no_plan_is_not_replaced(compiled, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(PlanError, match="exists and is no saved plan"):
        compiled.save(tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_nothing_half_written_is_left(compiled, tmp_path):
    broken = Bundle(compiled.plan, compiled.source, {"x": lambda: 0})  # cannot be written to constants.pt
    with pytest.raises(AttributeError):
        broken.save(tmp_path / "plan")
    assert list(tmp_path.iterdir()) == []
    compiled.save(tmp_path / "plan")
    with pytest.raises(AttributeError):
        broken.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan" / "plan.json") == compiled.plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_saved_twice_is_the_same_bytes(compiled, tmp_path):
    first = compiled.save(tmp_path / "a")
    second = compile(recipe="ddp").save(tmp_path / "b")
    for name in ("plan.json", "sharded.py"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_too_much_for_the_exhaustive_search_is_refused_before_recipes_are_priced() -> None:
    told: list[str] = []
    with pytest.raises(PlanError, match="combinations"):
        compile("cpu:1x4", search="exhaustive", progress=told.append)
    assert not [what for what in told if what.startswith("recipe")]
