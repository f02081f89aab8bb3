"""The predicted peak against every allocation that torch's profiler sees on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.compiled import Compiled
from autopar.memory import Place, memory_of, predict
from autopar.memory.place import SUMS, UPDATE
from autopar.plan import Plan
from autopar.problem.graph import Program
from autopar.problem.read_graph import read
from models import gpt
from tests.helpers.peak import beside_state, is_counted, update_on_rank
from tests.helpers.peak_modules import (
    ALIKE,
    APART,
    HEADS,
    SQUARES,
    TAKING,
    Attending,
    Loss,
    Normed,
    Recurrent,
    Scaled,
    Squared,
    Taking,
    Widened,
)
from tests.helpers.ranks import living
from tests.helpers.remat import rematerialised
from tests.helpers.tiny import TINY
from tests.helpers.verify import Sizes, Subject, by_recipe, by_stages, planned, subject

BATCH, SEQ = 64, 64  # activations are a hundred times the weights
FAST = [("gpt", "zero1"), ("mlp", "ddp")]
SLOW = [
    (name, recipe)
    for name in TINY
    for recipe in ("ddp", "zero1", "zero3", "tp_sp", "megatron")
    if (name, recipe) not in FAST
]


def bundled(who: Subject, made: Plan) -> Bundle:
    """What is emitted of a plan."""
    return Bundle(made, emit(who.captured.gm, made, Names.of(who.captured)), who.captured.constants)


def at_size(who: Subject) -> Program:
    """The graph at BATCH and SEQ."""
    hints = who.captured.hints | {n: size for n, size in (("b", BATCH), ("s", SEQ)) if n in who.captured.hints}
    return read(who.captured.gm, hints, training=who.mode == "train", device="cpu")


def compared(who: Subject, made: Plan, within: float) -> tuple[tuple[Place, ...], list[int]]:
    """The peak of a step as predicted for each place and as counted: the places, and bytes on each rank."""
    bundle, places = bundled(who, made), predict(at_size(who), made).places
    return places, is_counted(places, bundle, who.weights, who.batch(BATCH, SEQ), within)


def peaks(made: Compiled, model: nn.Module, inputs: Sequence[Tensor], within: float) -> tuple[Place, list[int]]:
    """The same of a compiled model of one place, at the sizes of its inputs."""
    places = made.memory().places
    batch = dict(zip(made.captured.input_names, inputs, strict=True))
    return places[0], is_counted(places, made.bundle, model.state_dict(), batch, within)


@pytest.mark.parametrize(("name", "recipe"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_the_peak_of_a_step_is_counted(name: str, recipe: str) -> None:
    """An update takes two more of the largest parameter, and one of the parameter before, in the order of the model
    (Phi-3 reads its weights in another one)."""
    who = subject(name)
    made = by_recipe(who, (2,), recipe)
    (place,), (step_bytes, *_) = compared(who, made, 0.1)
    assert step_bytes > 50_000
    update_bytes, *_ = living(2).run(update_on_rank, bundled(who, made), dict(who.weights), who.batch(BATCH, SEQ))
    assert beside_state(place, UPDATE) == pytest.approx(update_bytes, rel=0.01)


@pytest.mark.parametrize("recipe", ["zero1", "zero2"])
def test_whole_gradients_of_microbatches_are_gone_in_the_update(recipe: str) -> None:
    """Those of ZeRO-1 add up over microbatches until they are scattered, once per step."""
    who = subject("gpt")
    made = by_stages(who, (2,), recipe, 1, 2, "gpipe")
    (place,) = predict(at_size(who), made).places
    assert (place.rest.get("whole gradients", 0.0) > 0) == (recipe == "zero1")
    update_bytes, *_ = living(2).run(update_on_rank, bundled(who, made), dict(who.weights), who.batch(BATCH, SEQ))
    assert beside_state(place, UPDATE) == pytest.approx(update_bytes, rel=0.01)


@pytest.mark.slow
def test_on_an_axis_of_one_device_layouts_are_views() -> None:
    """That of queries, keys and values as a part of a sum is changed back behind the views of each: they look at one
    tensor all the while, which is kept whole."""
    who = subject("hf-neox")
    made = planned(who, (1,), "single")
    assert any("P" in use for node in made.nodes.values() for use in node.ins)
    compared(who, made, 0.01)


@pytest.mark.parametrize(
    ("recipe", "batch"),
    [("single", 4), ("ddp", 4), ("ddp", 2), ("megatron", 4), ("single", 256), ("zero1", 256), ("zero3", 256)],
)
def test_gradients_in_mixed_precision_are_there_in_both_dtypes(recipe: str, batch: int) -> None:
    """Of a table that is used twice, too, larger than all else: where few samples leave nothing beside it, and where
    many do."""
    torch.manual_seed(0)
    model, args = gpt.build(gpt.Config(vocab=4096, positions=16, layers=2, heads=4, hidden=128), batch, 16)
    ranks = 1 if recipe == "single" else 2
    made = autopar.compile(model, f"cpu:1x{ranks}", args, precision="bf16", recipe=recipe, time_limit_s=10.0)
    peaks(made, model, args, 0.1)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_peak_of_a_loss_over_split_classes_is_counted(precision: str) -> None:
    """What it keeps are the logits, in their own dtype, and not their exponentials in float32."""
    torch.manual_seed(0)
    model, args = gpt.build(gpt.Config(vocab=4096, positions=16, layers=1, heads=4, hidden=64), 128, 16)
    made = autopar.compile(model, "cpu:1x2", args, precision=precision, recipe="megatron", time_limit_s=10.0)
    assert "cross_entropy" in str(made.plan.nodes["cross_entropy_sum"].runs)
    peaks(made, model, args, 0.03)


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero2"])
def test_whole_gradients_that_are_scattered_do_not_stay(recipe: str) -> None:
    """Of ZeRO-1 and 2 those of two buckets are there at once, while the backward of 12 layers of 16 MiB goes on: beside
    the half of each that rests. What gloo has summed one of them in may be there for a little longer, by when its
    thread runs."""
    model, x = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))), torch.randn(4, 2048)
    made = autopar.compile(Loss(model), "cpu:1x2", (x,), recipe=recipe, time_limit_s=5.0)
    place, (step_bytes, *_) = peaks(made, Loss(model), (x,), 0.15)
    assert recipe == "ddp" or step_bytes < (12 / 2 + 12) * 4 * 2048 * 2048
    assert recipe != "ddp" or beside_state(place, SUMS) == pytest.approx(step_bytes, rel=0.01), (
        "a bucket has all of the layer that makes it full"
    )


@pytest.mark.parametrize(("name", "precision"), [*((name, "float32") for name in ALIKE), ("layers", "bf16")])
def test_gloo_sums_whole_gradients_of_gathered_weights_in_copies(name: str, precision: str) -> None:
    """In the dtype in which weights rest. Of weights under ZeRO-3 that are alike, whether a block each or not: what
    gloo has of the first ones is there while the last one is copied. What it has gathered into may be there for a
    little longer, by when its thread runs."""
    build, drawn = ALIKE[name]
    model, x = Loss(build()), drawn()
    made = autopar.compile(model, "cpu:1x2", (x,), recipe="zero3", precision=precision, time_limit_s=5.0)
    peaks(made, model, (x,), 0.15)


@pytest.mark.parametrize(
    ("recipe", "precision"), [("zero1", "float32"), ("zero1", "bf16"), ("ddp", "bf16"), ("zero3", "bf16")]
)
def test_of_few_gradients_a_bucket_is_sent_when_all_are_there(recipe: str, precision: str) -> None:
    """What its scatter brings is there from then on, when nothing of the backward's operators is any more. Gradients of
    gathered weights are scattered one by one, while they are there in both dtypes."""
    model, x = Loss(nn.Sequential(*(nn.Linear(256, 256) for _ in range(5)))), torch.randn(256, 256)
    made = autopar.compile(model, "cpu:1x2", (x,), recipe=recipe, precision=precision, time_limit_s=5.0)
    peaks(made, model, (x,), 0.01)


def _of_rows(build: Callable[[], nn.Module], precision: str | None = None, rows: int = 2048) -> None:
    """The peak of a step on so many rows of one device, beside what rests, is what the allocator counts."""
    torch.manual_seed(0)
    model, x = build(), torch.randn(rows, 128)
    made = autopar.compile(model, "cpu:1x1", (x,), recipe="single", precision=precision, time_limit_s=5.0)
    peaks(made, model, (x,), 0.05)


@pytest.mark.parametrize("name", SQUARES)
def test_the_peak_of_squares_is_counted(name: str) -> None:
    _of_rows(lambda: Squared(name))


@pytest.mark.parametrize("count", [1, 4])
def test_inputs_that_are_cast_are_there_in_both_dtypes(count: int) -> None:
    """What is given is in float32, and its copy in 16 bits takes as much as each of what is made of it."""
    _of_rows(lambda: Scaled(count), "bf16")


@pytest.mark.parametrize("name", TAKING)
def test_the_peak_of_what_operators_take_is_counted(name: str) -> None:
    _of_rows(lambda: Taking(name))


@pytest.mark.parametrize(
    ("norm", "count", "precision"),
    [
        ("rms", 1, "float32"),
        ("rms", 4, "bf16"),
        ("layer", 1, "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("rms", 1, "bf16"), ("rms", 4, "float32"), ("layer", 4, "float32"))
        ),
    ],
)
def test_the_peak_of_norms_is_counted(norm: str, count: int, precision: str) -> None:
    """A CPU runs RMSNorm as plain operators, each of which takes memory."""
    _of_rows(lambda: Normed(norm, count), precision)


def test_gradients_of_blocks_come_as_what_blocks_keep_goes() -> None:
    """All of both are never there at once."""
    _of_rows(lambda: Widened(8), rows=256)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("heads", "megatron"),
        ("heads", "ulysses"),
        ("torch's layers", "ddp"),
        ("torch's layers", "tp_sp"),
    ],
)
def test_the_peak_of_attention_whose_heads_are_joined_is_counted(name: str, recipe: str) -> None:
    """Joining heads is a copy where they, or their queries, come from other ranks, of which the next product keeps all;
    of heads that a rank has made itself it is none. torch's layers copy queries, keys and values before."""
    build, drawn = HEADS[name]
    model, x = Loss(build()), drawn()
    made = autopar.compile(model, "cpu:1x2", (x,), recipe=recipe, time_limit_s=5.0)
    peaks(made, model, (x,), 0.03)


@pytest.mark.parametrize(("name", "within"), [("heads", 0.01), ("causal heads", 0.01), ("sloped heads", 0.1)])
def test_the_peak_of_a_ring_of_attention_is_counted(name: str, within: float) -> None:
    """Joining heads is no copy: results lie in memory as queries do. Scores are not kept, though a CPU keeps them where
    a bias has a gradient."""
    build, drawn = HEADS[name]
    model, x = Loss(build()), drawn()
    made = autopar.compile(
        model, "cpu:1x2", (x,), recipe="cp", dynamic_shapes=(({0: "b", 1: "s"},), {}), time_limit_s=5.0
    )
    assert "ring" in made.plan.nodes["scaled_dot_product_attention"].runs
    peaks(made, model, (x,), within)


@pytest.mark.parametrize(("dropped", "precision"), [(0.1, "float32"), (0.1, "bf16"), (0.0, "bf16"), (0.0, "float32")])
def test_the_peak_of_attention_as_products_is_counted(dropped: float, precision: str) -> None:
    """In float32, whatever it is given."""
    _of_rows(lambda: Attending(dropped), precision)


@pytest.mark.parametrize(
    ("name", "layers", "both"),
    [
        ("LSTM", 1, False),
        ("LSTM", 2, True),
        ("GRU", 2, False),
        ("RNN", 1, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("LSTM", 1, True), ("LSTM", 2, False), ("GRU", 1, True), ("RNN", 2, False))
        ),
    ],
)
def test_the_peak_of_recurrent_networks_is_counted(name: str, layers: int, both: bool) -> None:
    """Gates of all positions are there at once, beside what is kept."""
    _of_rows(lambda: Recurrent(name, layers, both), rows=256)


@pytest.mark.parametrize("layers", [2, 4])
def test_the_update_has_one_more_of_the_parameter_before(layers: int) -> None:
    """Of alike ones three; blocks that are alike are one run, of layers without biases."""
    model, x = Loss(nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))), torch.randn(4, 256)
    made = autopar.compile(model, "cpu:1x1", (x,), recipe="single", time_limit_s=5.0)
    place, _ = peaks(made, model, (x,), 0.05)
    batch = {made.captured.input_names[0]: x}
    (update_bytes,) = living(1).run(update_on_rank, made.bundle, model.state_dict(), batch)
    assert beside_state(place, UPDATE) == pytest.approx(update_bytes, rel=0.01) == (layers + 3) * 4 * 256 * 256


@pytest.mark.parametrize(("name", "recipe", "level"), [("hf-gpt2", "ddp", "full"), ("hf-llama", "zero3", "selective")])
def test_the_peak_of_blocks_that_are_run_again_is_counted(name: str, recipe: str, level: str) -> None:
    who = subject(name)
    compared(who, rematerialised(who, by_recipe(who, (2,), recipe), level), 0.1)


@pytest.mark.parametrize("level", ["full", "selective"])
def test_the_inputs_of_blocks_that_are_run_again_go_with_their_backward(level: str) -> None:
    """Blocks whose weights take more than what they are given: gradients come in the place of inputs. The walk takes
    the first block for one whose input has a gradient."""
    torch.manual_seed(0)
    model, x = Widened(8), torch.randn(512, 128)
    who = Subject("widened", "train", capture(model, (x,)), model.state_dict())
    made = rematerialised(who, planned(who, (1,), "single"), level)
    bundle = bundled(who, made)
    is_counted(memory_of(who.captured.gm, made).places, bundle, who.weights, {who.captured.input_names[0]: x}, 0.05)


STAGES: list[tuple[str, Sizes, str, int, int, str, int]] = [
    ("hf-gpt2", (1,), "single", 2, 4, "1f1b", 1),
    ("hf-gpt2", (1,), "single", 2, 4, "gpipe", 1),
    ("hf-gpt2", (1,), "single", 2, 1, "naive", 1),
    ("hf-t5", (1,), "single", 2, 4, "1f1b", 1),
    ("hf-llama", (2,), "zero3", 2, 4, "1f1b", 1),
    ("hf-gpt2", (1,), "single", 2, 8, "interleaved_1f1b", 2),
    ("hf-llama", (1,), "single", 2, 8, "looped_bfs", 2),
    ("hf-llama", (1,), "single", 2, 8, "interleaved_zero_bubble", 2),
    ("hf-gpt2", (1,), "single", 2, 8, "zbv_zero_bubble", 2),
    ("hf-llama", (1,), "single", 2, 8, "dualpipev", 2),
    ("gpt", (1,), "single", 2, 8, "interleaved_zero_bubble", 2),
    ("hf-vit", (1,), "single", 2, 8, "interleaved_zero_bubble", 2),
]


@pytest.mark.parametrize(("name", "mesh", "recipe", "places", "microbatches", "schedule", "virtual"), STAGES)
def test_the_peak_of_each_place_of_a_pipeline_is_counted(
    name: str, mesh: Sizes, recipe: str, places: int, microbatches: int, schedule: str, virtual: int
) -> None:
    who = subject(name)
    compared(who, by_stages(who, mesh, recipe, places, microbatches, schedule, virtual), 0.07)


@pytest.mark.parametrize(("places", "microbatches", "virtual"), [(1, 8, 1), (2, 8, 1), (2, 1, 1), (2, 8, 2)])
def test_the_peak_of_inference_in_microbatches_is_counted(places: int, microbatches: int, virtual: int) -> None:
    """What a place gives and sends of each stays until its last forward has ended, and then all outputs come to it."""
    who, schedule = subject("gpt", "inference"), "gpipe" if virtual == 1 else "looped_bfs"
    compared(who, by_stages(who, (1,), "single", places, microbatches, schedule, virtual), 0.07)


@cache
def _taken_apart(name: str) -> tuple[Subject, Tensor]:
    """A model of APART and its input."""
    build, drawn = APART[name]
    model, x = build(), drawn()
    return Subject(name, "train", capture(model, (x,)), model.state_dict()), x


@pytest.mark.parametrize(
    ("name", "level", "schedule"),
    [
        ("large activations", "none", "zbv_zero_bubble"),
        ("large activations", "none", "dualpipev"),
        ("large activations", "full", "zbv_zero_bubble"),
        ("large weights", "none", "zbv_zero_bubble"),
    ],
)
def test_the_peak_of_a_backward_with_two_actions_is_counted(name: str, level: str, schedule: str) -> None:
    """Taken apart, all that is kept is there until its part for inputs ends, and the part for weights has gradients of
    two layers at once beside those that add up. DualPipeV takes only some of them apart, and sends what the first of
    two actions that overlap makes when both have ended. Blocks that are run again are not taken apart: what a
    microbatch keeps goes with the first action."""
    who, x = _taken_apart(name)
    made = rematerialised(who, by_stages(who, (1,), "single", 2, 4, schedule, 2), level)
    bundle = bundled(who, made)
    is_counted(memory_of(who.captured.gm, made).places, bundle, who.weights, {who.captured.input_names[0]: x}, 0.05)


def test_what_scatters_of_each_microbatch_bring_is_there_beside_the_sums() -> None:
    """ZeRO-2 in a pipeline: until the backward ends, when it is added to the gradients of the microbatches before."""
    who, x = _taken_apart("large weights")
    made = by_stages(who, (2,), "zero2", 2, 4, "1f1b")
    bundle = bundled(who, made)
    is_counted(memory_of(who.captured.gm, made).places, bundle, who.weights, {who.captured.input_names[0]: x}, 0.05)
