"""Plans as JSON: what is written is read back the same, byte for byte; anything else is refused by name, and never
half-written."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cli.console import writable
from autopar.errors import PlanError
from autopar.plan import SCHEMA, Alternative, NodePlan, Plan, Predicted, Stage, write_atomic
from autopar.plan_schema import KINDS

TEXT = st.text(max_size=8)
TEXTS = st.lists(TEXT, max_size=3).map(tuple)
SIZES = st.lists(st.integers(1, 8), max_size=3).map(tuple)
SECONDS = st.floats(0, 1e6, allow_nan=False)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | SECONDS | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans whose fields agree; they are of no graph."""
    mesh = draw(SIZES)
    entries = st.lists(
        st.sampled_from(["R", "P", "Pmax", "S0", "S3", "S1/3", "S2/4:1:1", "O1"]),
        min_size=len(mesh),
        max_size=len(mesh),
    ).map(",".join)
    pairs = st.lists(st.builds("{}|{}".format, entries, entries | st.just(",".join("-" * len(mesh)))), max_size=3).map(
        tuple
    )
    each = st.lists(TEXT, min_size=len(mesh), max_size=len(mesh)).map(tuple)
    kinds = st.lists(st.sampled_from(KINDS), min_size=len(mesh), max_size=len(mesh)).map(tuple)
    microbatches, places = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    micro = st.lists(st.sampled_from(["R", "S0", "P"]), min_size=3, max_size=3)
    found = draw(st.dictionaries(TEXT, st.builds(NodePlan, pairs, pairs, each, kinds, each), max_size=3))
    nodes = {
        name: replace(node, micro=tuple(draw(micro)[: len(node.outs)]) if microbatches > 1 else ())
        for name, node in found.items()
    }
    blocks = st.dictionaries(TEXT, st.tuples(st.integers(0, 9), st.integers(10, 19)), max_size=2)
    predicted = draw(st.builds(Predicted, *[SECONDS] * 6))
    return draw(
        st.builds(
            Plan,
            model=TEXT,
            graph_hash=TEXT,
            mode=st.sampled_from(["train", "inference"]),
            precision=st.sampled_from(["float32", "bf16", "float16"]),
            optimizer=st.sampled_from(["sgd", "adamw"]),
            hints=st.dictionaries(TEXT, st.integers(1, 99).map(lambda n: n * microbatches), max_size=2),
            cluster=st.dictionaries(TEXT, JSON, max_size=2),
            axes=st.just(tuple(f"x{i}" for i in range(len(mesh)))),
            mesh=st.just(mesh),
            strategy=TEXT,
            seed=st.integers(0, 99),
            nodes=st.just(nodes),
            predicted=st.just(replace(predicted, places_bytes=draw(st.sampled_from([(), (1.0,) * places])))),
            alternatives=st.lists(
                st.builds(Alternative, TEXT, SIZES, st.none() | SECONDS, st.none() | SECONDS, TEXT, TEXT), max_size=2
            ).map(tuple),
            stages=st.tuples(*(st.builds(Stage, TEXTS, blocks, st.just(place)) for place in range(places))),
            schedule=TEXT,
            microbatches=st.just(microbatches),
            totals=TEXTS,
            source=st.dictionaries(TEXT, JSON, max_size=2),
            notes=TEXTS,
        )
    )


@given(plans())
@settings(max_examples=150, deadline=None)
def test_a_plan_is_read_back_as_it_was_and_written_as_the_same_bytes(plan: Plan) -> None:
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert list(again.nodes) == list(plan.nodes) and list(again.hints) == list(plan.hints)  # orders mean something


PLAN = Plan(
    "m",
    "abc",
    "train",
    "float32",
    "adamw",
    {"b": 8},
    {"name": "cpu"},
    ("rank",),
    (2,),
    "tp",
    0,
    {"x": NodePlan((), ("S0|-",), ("b",), ("sample",), ("",))},
    Predicted(1, 2, 3, 4, 5, 0.5),
    (Alternative("ddp", (2,), None, None, "big"),),
)


@given(st.sampled_from([f.name for f in fields(Plan)]))
def test_a_missing_key_is_named(key: str) -> None:
    data = json.loads(PLAN.to_json())
    del data[key]
    wanted = r"plan has schema None" if key == "schema" else rf"plan lacks \['{key}'\] and has unknown \[\]"
    with pytest.raises(PlanError, match=wanted):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("extra",), 1, r"unknown \['extra'\]"),
        (
            ("schema",),
            SCHEMA + 1,
            rf"schema {SCHEMA + 1}, this version of autopar reads {SCHEMA}; plan the model again",
        ),
        (("schema",), str(SCHEMA), rf"schema '{SCHEMA}'"),
        (("nodes",), [], "malformed"),
        (("nodes", "x"), {"ins": []}, "malformed.*missing"),
        (("nodes", "x", "more"), [], "malformed.*more"),
        (("predicted",), {"step_s": 1}, "malformed.*missing"),
        (("predicted", "speed"), 1, "malformed.*speed"),
        (("predicted", "step_s"), 10**400, r"malformed: predicted.step_s is 1000.*\.\.\.; wanted a number"),
        (("stages",), [{"nodes": []}], "malformed.*blocks"),
        (("mesh",), 4, "malformed"),
        (("alternatives",), [{"name": "ddp"}], "malformed.*mesh"),
    ],
)
def test_a_plan_that_is_bent_is_refused(path: tuple[str, ...], value: Any, said: str) -> None:
    data = json.loads(PLAN.to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(PlanError, match=f"(?s){said}"):
        Plan.from_json(json.dumps(data))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_key_that_is_there_twice_is_named_with_both_values(data: st.DataObject) -> None:
    """Of every object of the file, also where both values are alike: a reader of the file cannot know which one
    counts."""
    plan = json.loads(PLAN.to_json())
    inner, path = plan, ""
    while True:
        key = data.draw(st.sampled_from(list(inner)))
        path = f"{path}.{key}" if path else key
        if not (isinstance(inner[key], dict) and inner[key] and data.draw(st.booleans())):
            break
        inner = inner[key]
    other = data.draw(st.just(inner[key]) | JSON)
    inner["twice"] = other
    text = json.dumps(plan).replace('"twice":', f"{json.dumps(key)}:")
    with pytest.raises(
        PlanError, match=rf"(?s)^plan is malformed: {re.escape(path)} is there 2 times, as .*; wanted each key once$"
    ):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("depth", "opened", "closed"), [(80, "[", "]"), (400, '{"a":', "}"), (900, "[", "]"), (10**5, "[", "]")]
)
def test_what_is_nested_too_deep_is_refused(depth: int, opened: str, closed: str) -> None:
    """Not by Python's recursion limit, here or where the plan is written again."""
    text = PLAN.to_json().replace('"source": {}', f'"source": {{"a": {opened * depth}1{closed * depth}}}')
    with pytest.raises(PlanError, match=r"source.* levels deep; wanted at most|no JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize("kind", ["tpu", "", "CPU", None])
def test_a_plan_is_only_for_kinds_of_devices_that_there_are(kind: Any) -> None:
    made = replace(PLAN, cluster={"name": "one", "device": {"kind": "cuda"}})
    assert made.on("cpu").device_kind == "cpu" and made.on("cuda") == made
    with pytest.raises(PlanError, match=rf"^kind is {kind!r}; wanted one of 'cuda', 'cpu'$"):
        made.on(kind)


@given(st.text(max_size=30))
def test_any_text_is_a_plan_or_a_plan_error(text: str) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(text)


def test_derived_numbers() -> None:
    assert PLAN.ranks == 2 and Predicted(3, 0, 0, 0, 0, 2).gap == 0.5 and Predicted(3, 0, 0, 0, 0).gap == float("inf")


def test_a_file_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN

    def full(*_: object) -> None:
        raise OSError(28, "disk full")

    monkeypatch.setattr("autopar.plan.os.replace", full)
    with pytest.raises(PlanError, match=rf"^cannot write {path}: disk full; name another file$"):
        write_atomic(path, "half")
    assert Plan.load(path) == PLAN and [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """Of root, `--json /dev/null` made a file of the machine's own /dev/null."""
    kept, link, pipe = tmp_path / "deep" / "plan.json", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(kept)
    write_atomic(link, "new")
    assert link.is_symlink() and kept.read_text() == "new"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(Path(str(writable("--json", pipe))), "told")
    assert pipe.is_fifo() and os.read(reader, 9) == b"told"
    os.close(reader)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ((Stage(),), "a, whole; b, keeping 2 results"),
        ((Stage(again={"a": 2}),), "a (the first 2), whole; b, keeping 2 results"),
        ((Stage(again={"a": 0, "b": 0}),), ""),
        ((Stage(blocks={"a": (0, 3)}), Stage(blocks={"a": (3, 6), "b": (0, 9)})), "a, whole; b, keeping 2 results"),
        (
            tuple(Stage(blocks={"a": (n, n + 1)}, again={"a": int(n < 2)}) for n in range(64)),
            "a (the first 1 of stages 0, 1), whole; b, keeping 2 results",
        ),
        (
            (
                Stage(blocks={"a": (0, 3)}),
                *(Stage(blocks={"b": (n, n + 1)}, again={"b": int(n == 1)}) for n in range(3)),
                Stage(blocks={"b": (3, 9)}),
            ),
            "a, whole; b (all of stage 4, the first 1 of stage 2), keeping 2 results",
        ),
        (tuple(Stage(blocks={"b": (n, n + 1)}, again={"b": 0, "a": 0}) for n in range(3)), ""),
    ],
)
def test_what_is_run_again_is_said_by_stages(stages: tuple[Stage, ...], said: str) -> None:
    assert replace(PLAN, stages=stages, remat={"a": (), "b": ("x", "y")}).run_again == said
