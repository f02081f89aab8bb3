"""Plans that were edited: each edit of a plan file is refused with a message, or gives another plan of the same model
that simulates and emits."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import frontend
from autopar.capture import Captured
from autopar.capture.precision import capture_in, resting
from autopar.cli.rebuild import Source, as_source, met
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.memory import memory_of
from autopar.plan import Plan
from autopar.simulate import simulate
from tests.helpers.captures import captured_once
from tests.helpers.tiny import TINY

GPT = TINY["gpt"]
PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one stage": (GPT, "cpu:1x4", {"recipe": "tp_sp"}),
    "pipeline": (GPT, "cpu:1x4", {"recipe": "1f1b", "mesh": (2,)}),
    "remat": (GPT, "cpu:1x2", {"recipe": "ddp", "remat": "selective"}),
    "mixed precision": (GPT, "cpu:1x2", {"recipe": "zero1", "precision": "bf16"}),
    "offload": (GPT, "h100:1x2", {"recipe": "zero_offload"}),
    "inference": (GPT, "h100:1x2", {"recipe": "tp", "mode": "inference"}),
    "two axes": (TINY["hf-llama"], "cpu:1x4", {"recipe": "tp_zero3", "mesh": (2, 2)}),
}
EDITS = 60
# what is told of a plan and decides nothing
TOLD = ("predicted", "notes", "strategy", "alternatives", "seed", "model", "source")


@cache
def _captured(model: str, mode: str, precision: str, batch: int, seq: int, seed: int) -> Captured:
    training = mode == "train"
    loaded = frontend.load(
        model, batch=batch, seq=seq, dtype=resting(precision, mode), train=training, labels=training, seed=seed
    )
    return capture_in(loaded.model, loaded.args, loaded.kwargs, precision=precision, mode=mode)[0]


@cache
def planned(name: str) -> str:
    """The text of one of PLANS."""
    model, cluster, options = PLANS[name]
    precision, mode = options.get("precision", "float32"), options.get("mode", "train")
    training = mode == "train"
    loaded = frontend.load(model, batch=8, seq=32, train=training, labels=training, dtype=resting(precision, mode))
    with captured_once((__name__, model, precision, mode)):
        made = autopar.compile(
            loaded.model,
            cluster,
            (loaded.args, loaded.kwargs),
            time_limit_s=10,
            source=as_source(Source(model, 8, 32)),
            **options,
        )
    return made.plan.to_json()


def used(text: str) -> tuple[Plan, str]:
    """A plan file as the commands use it: the plan and what it emits."""
    plan = Plan.from_json(text)
    source = Source.of(plan, Path("plan.json"))
    captured = met(
        plan, source, _captured(source.model, plan.mode, plan.precision, source.batch, source.seq, source.seed)
    )
    simulate(captured.gm, plan)
    memory_of(captured.gm, plan)
    return plan, emit(captured.gm, plan, Names.of(captured)).partition("import torch")[2]


def paths(data: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where all values of a plan are."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*here, key)
        yield from paths(value, (*here, key))


def bent(value: Any, like: list[Any], dice: random.Random) -> Any:
    """Another value in its place."""
    others: list[Any] = [
        None,
        "zzz",
        "",
        [],
        {},
        -1,
        0,
        3,
        99,
        float("nan"),
        10**12,
        True,
        "4",
        *dice.sample(like, min(4, len(like))),
    ]
    if isinstance(value, (int, float)):
        others += [value + 1, value - 1, value * 2, -value, str(value)]
    if isinstance(value, str):
        others += [
            value + "0",
            value.replace("|", ""),
            value.replace("S0", "S9"),
            value.replace("R", "S0/999999999999"),
            value.replace("S0", "S\u00b2"),
        ]
    if isinstance(value, list):
        others += [value[::-1], value[1:], [*value, *value], [*value, *value[:1]]]
    if isinstance(value, dict):
        others += [dict(list(value.items())[1:]), {**value, "zz": 1}]
    return dice.choice(others)


def edited(text: str, dice: random.Random) -> tuple[tuple[Any, ...], Any, str]:
    """A single edit of a plan: where, the new value, and the text."""
    data = json.loads(text)
    every = list(paths(data))
    where = dice.choice([p for p in every if p[0] == (first := dice.choice(list(data)))] or [(first,)])
    inner, last = data, where[-1]
    for key in where[:-1]:
        inner = inner[key]
    alike = [p for p in every if len(p) == len(where) and p[0] == where[0] and (p[2:3] == where[2:3] or len(p) < 3)]
    inner[last] = bent(inner[last], [at(json.loads(text), p) for p in alike[:40]], dice)
    return where, copy.deepcopy(inner[last]), json.dumps(data)


def at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


@pytest.mark.parametrize("name", PLANS)
def test_an_edited_plan_is_refused_or_is_another_plan_of_the_model(name: str) -> None:
    text, dice, refused = planned(name), random.Random(7), 0
    _, body = used(text)
    for _ in range(EDITS):
        where, value, changed = edited(text, dice)
        try:
            _, found = used(changed)
        except AutoparError as error:
            assert str(error), where
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{where} = {value!r} ends in {type(error).__name__}: {error}") from error
        if where[0] in TOLD or json.loads(changed) == json.loads(text):
            assert found == body, where
    assert refused > EDITS / 3


SIMPLE = (
    ("microbatches", 0),
    ("microbatches", None),
    ("microbatches", "4"),
    ("microbatches", float("nan")),
    ("microbatches", 16),
    ("microbatches", 7),
    ("stages", []),
    ("schedule", "interleaved"),
    ("schedule", "none"),
    ("schedule", "1F1B"),
    ("precision", "zzz"),
    ("graph_hash", None),
    ("hints", None),
    ("hints", {}),
    ("hints", {"b": -8, "s": 32}),
    ("hints", {"b": 16, "s": 32}),
    ("source", None),
    ("optimizer", "lion"),
    ("mode", "zzz"),
    ("axes", ["a", "a"]),
    ("microbatches", 1),
)


@pytest.mark.parametrize(("field", "value"), SIMPLE)
def test_a_field_that_is_wrong_is_named(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=field if field != "source" else "source") as refused:
        used(json.dumps({**json.loads(planned("pipeline")), field: value}))
    assert "wanted" in str(refused.value) or "plan the model again" in str(refused.value)


NESTED = [
    ("pipeline", ("stages", 0, "place"), None),
    ("pipeline", ("stages", 1, "place"), 7),
    ("pipeline", ("stages", 0, "place"), -1),
    ("pipeline", ("stages", 1, "nodes", 0), "nobody"),
    ("pipeline", ("stages", 0, "blocks", "blocks_0"), [0, 99]),
    ("pipeline", ("stages", 0, "again"), {"blocks_0": 99}),
    ("pipeline", ("predicted", "step_s"), float("nan")),
    ("pipeline", ("cluster", "device", "units"), "many"),
    # a total
    ("pipeline", ("nodes", "count_valid", "micro", 0), "S0"),
    ("pipeline", ("nodes", "count_valid", "micro", 0), "P"),
    ("one stage", ("stages", 0, "place"), 1),
    ("one stage", ("microbatches",), 2),
    ("remat", ("remat", "blocks_0", 0), "nobody"),
    ("remat", ("remat",), {"nobody": []}),
    *(
        ("one stage", ("nodes", "linear_default_4", what, 0), value)
        for what, value in (
            ("ins", "S9"),
            ("ins", "zz"),
            ("ins", "S7|S7"),
            ("ins", "R,R|R,R"),
            ("ins", "S0/999999999999|S0"),
            ("ins", "S\u00b2|R"),
            ("kinds", "zz"),
            ("kinds", "sample"),
            ("factors", "zz"),
            ("runs", "zz"),
            ("runs", "tiles0"),
            ("runs", "tiles-1"),
            ("runs", "tiles3"),
        )
    ),
]


@pytest.mark.parametrize(("name", "path", "value"), NESTED)
def test_what_is_wrong_inside_is_named(name: str, path: tuple[Any, ...], value: Any) -> None:
    data = json.loads(planned(name))
    if path[1:2] == ("linear_default_4",):
        path = (
            path[0],
            next(name for name, node in data["nodes"].items() if node["ins"] and "/" not in name),
            *path[2:],
        )
    at(data, path[:-1])[path[-1]] = value
    with pytest.raises(PlanError, match=path[0]):
        used(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda stages: stages * 2,
        lambda stages: stages[::-1],
        lambda stages: stages[:1],
        lambda stages: [{**stages[0], "nodes": stages[1]["nodes"]}, {**stages[1], "nodes": stages[0]["nodes"]}],
    ],
)
def test_stages_are_the_pieces_of_the_graph_in_order(change: Any) -> None:
    data = json.loads(planned("pipeline"))
    with pytest.raises(PlanError, match=r"stages|places"):
        used(json.dumps({**data, "stages": change(data["stages"])}))


def test_hosts_have_room_for_what_is_offloaded_of_a_training_step() -> None:
    data = json.loads(planned("offload"))
    used(json.dumps(data))
    data["cluster"]["device"]["host_memory_bytes"] = 1000.0
    with pytest.raises(InfeasibleError, match=r"the plan needs .* of the host for each device, 1000 B are there"):
        used(json.dumps(data))
    with pytest.raises(PlanError, match="offload is 'optimizer'; wanted '': in inference"):
        used(json.dumps({**json.loads(planned("inference")), "offload": "optimizer"}))


def test_microbatches_for_the_schedule_and_a_device_with_room() -> None:
    data = json.loads(planned("pipeline"))
    with pytest.raises(InfeasibleError, match=r"place 0 needs .* usable"):
        used(
            json.dumps(
                {
                    **data,
                    "cluster": {**data["cluster"], "device": {**data["cluster"]["device"], "memory_bytes": 1 << 20}},
                }
            )
        )
    again = used(json.dumps({**data, "microbatches": 4}))[0]
    assert again.microbatches == 4  # another plan of the same model: it has the same values in every microbatch


@pytest.mark.parametrize("name", PLANS)
def test_a_node_that_is_gone_is_named(name: str) -> None:
    data = json.loads(planned(name))
    gone = next(iter(data["nodes"]))
    with pytest.raises(PlanError, match=f"without {gone}"):
        used(json.dumps({**data, "nodes": {n: node for n, node in data["nodes"].items() if n != gone}}))
