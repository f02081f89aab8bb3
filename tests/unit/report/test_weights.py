"""How weights lie and are used, for strategies whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

import autopar
from autopar.problem.read_graph import read
from autopar.report.weights import titles, weights
from tests.helpers.planned import Stack, planned
from tests.helpers.verify import by_recipe, subject

BLOCK = ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")


def words(recipe: str, mesh: tuple[int, ...] | None = None) -> dict[str, tuple[str, ...]]:
    made = planned(recipe, mesh)
    return {weight.name: weight.uses for weight in weights(made.program, made.plan)}


def test_all_weights_are_listed_once() -> None:
    made = planned("ddp")
    assert [w.name for w in weights(made.program, made.plan) if w.scope] == list(BLOCK)
    assert {w.name for w in weights(made.program, made.plan) if not w.scope} == {"head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-t5", "mlp"])
def test_all_names_of_the_model_are_given_once(name: str) -> None:
    """Those of buffers aside: a state dict has a tied weight by each of its names, a graph by one."""
    who = subject(name)
    found = [
        original
        for weight in weights(read(who.captured.gm, who.captured.hints, training=True), by_recipe(who, (2,), "zero3"))
        for original in weight.originals
    ]
    assert len(set(found)) == len(found) and set(found) <= set(who.weights)
    assert {who.weights[original].data_ptr() for original in found} == {
        tensor.data_ptr() for tensor in who.weights.values() if tensor.is_floating_point()
    }


@pytest.mark.parametrize(("recipe", "word"), [("ddp", "replicated"), ("zero3", "gathered")])
def test_data_parallel(recipe: str, word: str) -> None:
    assert set(words(recipe).values()) == {(word,)}


def test_tensor_parallel_is_column_then_row() -> None:
    found = words("tp")
    assert found["up.weight"] == found["up.bias"] == ("column",)
    assert found["down.weight"] == ("row",)
    assert found["norm.weight"] == ("replicated",)


@pytest.mark.parametrize(("recipe", "word"), [("zero3", "gathered"), ("ddp", "replicated"), ("ep", "column")])
def test_turned_weights_are_used_as_their_result_is(recipe: str, word: str) -> None:
    who = subject("hf-mixtral")
    program = read(who.captured.gm, {"b": 8, "s": 16}, training=True)
    turned = {program.ops[name].fqn for name in program.following.values()}
    found = {
        weight.name: weight.uses for weight in weights(program, by_recipe(who, (2,), recipe)) if weight.name in turned
    }
    assert found and set(found.values()) == {(word,)}


def test_two_axes() -> None:
    found = words("hsdp")
    assert found["up.weight"] == ("replicated", "gathered")


@pytest.mark.parametrize(("recipe", "ways"), [("ddp", 1), ("zero3", 4)])
def test_bytes_per_device(recipe: str, ways: int) -> None:
    made = planned(recipe)
    for weight in weights(made.program, made.plan):
        assert weight.count == (4 if weight.scope else 1)
        assert weight.local_bytes == math.prod(weight.shape) * 4 * weight.count / ways


@pytest.mark.parametrize("recipe", ["zero1", "zero3", "1f1b", "pp_zero1", "interleaved"])
def test_bytes_per_device_are_those_at_rest_on_the_fullest_place(recipe: str) -> None:
    """As memory counts the float32 masters, of which weights in bfloat16 are copies; of a pipeline, those of a place's
    own blocks."""
    example = (torch.zeros(64, 64), torch.zeros(64, 8))
    compiled = autopar.compile(Stack(64), "h100:1x4", example, precision="bf16", recipe=recipe)
    program = read(compiled.captured.gm, compiled.plan.hints, training=True)
    places = [
        {entry.node: entry.nbytes for entry in place.entries if entry.kind == "master"}
        for place in compiled.memory().places
    ]
    for weight in weights(program, compiled.plan):
        named = f"{weight.scope}: {weight.name}" if weight.scope else weight.name
        assert weight.dtype == "float32"
        assert weight.local_bytes == max(place.get(named, 0.0) for place in places) > 0


def test_titles_name_the_instances() -> None:
    assert list(titles(planned("ddp").program).values()) == ["outside of the blocks", "of layers.0 ... 3"]
