"""The closed formulas of the search against the simulation, of plans as users make them: within 3 % (docs/simulate.md
says what differs)."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import autopar
from autopar import frontend, joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.compiled import Compiled
from autopar.errors import PlanError
from autopar.joint.choice import staged
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import Space
from autopar.joint.timetables import Kind
from autopar.onestage import finish
from autopar.pipeline.schedules import SCHEDULES
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.search import SEARCHES
from autopar.simulate import simulate
from tests.helpers.planned import BATCH, graph
from tests.helpers.tiny import TINY

CLOSE = 0.03


def _planned(recipe: str) -> Plan:
    return joint.plan(
        graph(),
        {"b": BATCH},
        Request(Cluster.parse("cpu:1x4"), recipe=recipe, time_limit_s=10.0),
        model="stack",
        graph_hash="0" * 64,
    )


@pytest.mark.parametrize(
    "recipe",
    ["ddp", "zero1", "zero3", "hsdp", "tp", "tp_zero3", "naive_mp", "gpipe", "1f1b", "interleaved", "zero_bubble"],
)
def test_small_stacks_on_a_cpu(recipe: str) -> None:
    made = _planned(recipe)
    assert simulate(graph(), made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


@pytest.mark.parametrize("recipe", ["zero3", "tp_sp"])
def test_gradients_in_mixed_precision_have_the_bytes_that_they_rest_in(recipe: str) -> None:
    loaded = frontend.load(TINY["gpt"], batch=8, seq=16, device="cpu", train=True, labels=True)
    compiled = autopar.compile(
        loaded.model,
        "cpu:1x4",
        (tuple(loaded.args), dict(loaded.kwargs)),
        precision="bf16",
        recipe=recipe,
        time_limit_s=10.0,
    )
    found = compiled.simulate()
    assert found.step_s == pytest.approx(compiled.plan.predicted.step_s, rel=CLOSE)
    with pytest.raises(PlanError, match="was loaded without the graph that it was made for"):
        Compiled(compiled.bundle).simulate()
    if recipe == "zero3":  # no sums in buckets
        assert found.step_s == pytest.approx(compiled.plan.predicted.step_s, rel=1e-9)


@cache
def _gpt2(seq: int, batch: int, dtype: torch.dtype) -> Captured:
    loaded = frontend.load(
        "hf:models/hf/gpt2.json", batch=batch, seq=seq, device="meta", dtype=dtype, train=True, labels=True
    )
    return capture(loaded.model, loaded.args, loaded.kwargs, mode="train")


CPU, GPUS = ("cpu:1x4", 8, 128, "float32"), ("h100:1x8", 64, 1024, "bfloat16")
EVERYWHERE = ("megatron", "tp", "naive_mp", "gpipe", "1f1b", "interleaved", "zero_bubble")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        *((recipe, where) for where in (CPU, GPUS) for recipe in EVERYWHERE),
        ("ddp", GPUS),
        ("zero3", GPUS),
        ("3d", GPUS),
    ],
)
def test_gpt2(recipe: str, where: tuple[str, int, int, str]) -> None:
    cluster, batch, seq, precision = where
    captured = _gpt2(seq, batch, getattr(torch, precision))
    request = Request(Cluster.parse(cluster), Settings(precision=precision), recipe=recipe, time_limit_s=10.0)
    made = joint.plan(captured.gm, captured.hints, request, model="gpt2", graph_hash=captured.graph_hash)
    assert simulate(captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


@cache
def _llama() -> Captured:
    """Eight blocks of a Llama 2048 wide, sequences of 2048."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=2048,
                intermediate_size=5632,
                num_hidden_layers=8,
                num_attention_heads=16,
                num_key_value_heads=8,
                vocab_size=32000,
                use_cache=False,
                dtype=torch.bfloat16,
            )
        )
        model = model.to(torch.bfloat16)
        ids = torch.zeros(64, 2048, dtype=torch.long)
    return capture(model, (), {"input_ids": ids, "labels": ids}, mode="train")


@pytest.mark.parametrize(
    ("recipe", "where", "batch"),
    [
        ("zero3", "h100:1x8", 32),
        ("hsdp", "h100:2x8", 64),
        ("hsdp", "h100:2x8", 16),
        ("zero1", "h100:1x8", 8),
        pytest.param("ddp", "h100:1x8", 32, marks=pytest.mark.slow),
        ("tp_zero3", "h100:2x8", 16),
        pytest.param("tp_zero3", "h100:2x8", 64, marks=pytest.mark.slow),
    ],
)
def test_gathers_ahead_hide_as_priced(recipe: str, where: str, batch: int) -> None:
    """On GPUs, where the gathers of weights and the scatters of gradients hide under compute."""
    captured = _llama()
    request = Request(Cluster.parse(where), Settings(precision="bf16"), recipe=recipe, time_limit_s=10.0)
    made = joint.plan(
        captured.gm, {**captured.hints, "b": batch}, request, model="llama", graph_hash=captured.graph_hash
    )
    found = simulate(captured.gm, made)
    assert found.step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)
    assert found.places[0].hidden_s > 0.02 * found.step_s


@pytest.mark.parametrize(
    ("used", "batch", "hidden"), [((roles.zero3, roles.zero3), 128, 0.85), ((roles.zero1, roles.zero1), 128, 0.7)]
)
def test_both_collectives_over_two_axes_hide_as_priced(used: tuple[roles.Role, ...], batch: int, hidden: float) -> None:
    captured, mesh = _llama(), (2, 8)
    planner = Planner.of(
        captured.gm,
        {**captured.hints, "b": batch},
        Request(Cluster.parse("h100:2x8"), Settings(precision="bf16"), mesh=mesh),
    )
    best = planner.candidate(mesh, used, "two axes", lambda problem: SEARCHES["ilp"](problem, time_limit_s=10.0))
    made = finish(planner, best, 0.0, [], {"model": "llama", "graph_hash": captured.graph_hash})
    found = simulate(captured.gm, made)
    assert found.step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)
    place = found.places[0]
    assert place.hidden_s > hidden * (place.hidden_s + place.exposed_s)


MESHES = {1: (4,), 2: (2, 2)}
BY_SCHEDULE = {"zero1": (roles.zero1,), "zero3": (roles.zero3,), "tp_zero3": (roles.zero3, roles.tensor_sequence)}


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        ("zbv_zero_bubble", "zero3"),
        ("dualpipev", "tp_zero3"),
        ("1f1b", "zero1"),
        ("1f1b", "tp_zero3"),
        pytest.param("interleaved_zero_bubble", "zero3", marks=pytest.mark.slow),
    ],
)
def test_backwards_that_are_taken_apart_hide_what_the_runtime_hides(schedule: str, name: str) -> None:
    """Gathers ahead hide in both parts of a pipeline's backward; gradients that autograd scatters do not where it is
    taken apart."""
    captured, used = _llama(), BY_SCHEDULE[name]
    context = SearchContext(
        captured.gm,
        {**captured.hints, "b": 16},
        Request(
            Cluster.parse("h100:1x8"),
            Settings(precision="bf16"),
            recipe="1f1b",
            mesh=MESHES[len(used)],
            time_limit_s=10.0,
        ),
    )
    known = {len(used): used}
    space = Space(
        schedule, lambda mesh: known.get(len(mesh)), (Kind(schedule, SCHEDULES[schedule].virtual or 2),), len(used)
    )
    made = staged(context, [space], None, {"model": "llama", "graph_hash": captured.graph_hash})
    assert made.places == 2
    assert simulate(captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)
