"""Emitted programs on local ranks against one device, in float64: outputs, loss, every gradient, every parameter after
an AdamW step, and every collective against its price. The full matrix is marked slow."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from autopar.errors import RunError
from autopar.problem.read_graph import read
from autopar.recipes import RECIPES
from autopar.verify import verify
from tests.helpers.matrix import EXPERTS, MESHES, Entry, entries
from tests.helpers.ranks import living
from tests.helpers.tiny import TINY
from tests.helpers.verify import Sizes, by_recipe, kinds, planned, right, subject

FAST: list[tuple[str, Sizes, str]] = [
    ("hf-gpt2", (4,), "megatron"),
    ("hf-llama", (4,), "tp_sp"),
    ("hf-llama-2kv", (2, 2), "tp_zero3"),
    ("hf-bert", (4,), "zero3"),
    ("hf-t5", (2, 2), "hsdp"),
    ("hf-vit", (4,), "tp"),
    ("hf-neox", (2,), "tp_sp"),
    ("hf-bloom", (4,), "megatron"),
    ("mlp", (2,), "single"),
    ("cnn", (4,), "one_weird_trick"),
    ("recommender", (4,), "tp"),
    ("moe", (2, 2), "hsdp"),
    ("hf-mixtral", (4,), "ep"),
    ("hf-t5", (2,), "cp"),
    ("hf-gpt2", (4,), "ulysses"),
    ("gpt", (2,), "zero1"),
    ("hf-phi3", (4,), "zero2"),
    ("gpt", (2, 2), "searched"),
    ("mlp", (2, 2, 2), "searched"),
    ("hf-gpt2", (4,), "few"),
    ("gpt", (2, 2), "thrifty"),
    ("hf-gpt2", (2, 2, 2), "random 0"),
    ("hf-llama", (2, 2), "random 1"),
    ("moe", (4,), "random 4"),
    ("hf-resnet", (2, 2), "spatial"),
    ("hf-clip", (2,), "ddp"),
    ("hf-whisper", (2,), "ddp"),
    ("hf-gpt-oss", (4,), "ep"),
    ("hf-llama4", (2,), "ddp"),
]
SLOW = [entry for entry in entries() if entry.batch is not None or (entry.model, entry.mesh, entry.how) not in FAST]


@pytest.mark.parametrize("entry", [Entry(*entry) for entry in FAST], ids=str)
def test_every_recipe_every_model(entry: Entry) -> None:
    right(entry.run())


def test_the_searched_plans_mix_kinds_of_splits() -> None:
    for name, sizes, how in FAST:
        if how == "searched":
            assert len(kinds(planned(subject(name), sizes, how))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("entry", SLOW, ids=str)
def test_the_full_matrix(entry: Entry) -> None:
    right(entry.run())


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_the_full_matrix_has_recipes_of_experts_where_there_are_some(name: str) -> None:
    captured = subject(name).captured
    program = read(captured.gm, captured.hints, training=True, device="cpu")
    assert (not RECIPES["ep"].lacking(program)) == (name in EXPERTS)


def test_the_fast_matrix_covers_everything() -> None:
    assert {name for name, *_ in FAST} == set(TINY)
    assert {how for *_, how in FAST} >= set(RECIPES)
    assert {sizes for _, sizes, _ in FAST} >= {(2,), *MESHES}


@pytest.mark.parametrize("later", [True, False])
def test_a_case_says_whether_what_follows_the_first_step_is_compared(later: bool) -> None:
    who = subject("mlp")
    case = replace(who.case(planned(who, (2,), "ddp")), later=later)
    report = verify(case, ranks=living(2))
    assert report.ok and not any("first step alone" in note for note in report.notes)
    assert any(row.when for row in report.rows) == later


# batch and sequence that were not planned for; 11 over 4 ranks is uneven, 3 over 4 leaves one rank empty
OTHER_SIZES = [
    ("hf-gpt2", (4,), "ddp", 12, 5),
    ("hf-llama-2kv", (4,), "tp_sp", 8, 3),
    ("gpt", (4,), "random 0", 4, 11),
    ("gpt", (4,), "cp", 4, 11),
    ("hf-mixtral", (2, 2), "random 1", 12, 5),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("gpt", (4,), "tp_sp", 4, 11),
            ("hf-llama-2kv", (4,), "cp", 8, 3),
            ("hf-bert", (4,), "cp", 4, 11),
            ("gpt", (4,), "ulysses", 4, 11),
            ("hf-gpt2", (4,), "megatron", 2, 7),
        )
    ),
]


@pytest.mark.parametrize(("name", "sizes", "how", "batch", "seq"), OTHER_SIZES)
def test_other_sizes_than_planned(name: str, sizes: Sizes, how: str, batch: int, seq: int) -> None:
    who = subject(name)
    right(who.verified(planned(who, sizes, how), batch, seq))


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        ("gpt", (4,), "megatron"),
        ("hf-resnet", (2,), "ddp"),
        pytest.param("hf-gpt2", (4,), "megatron", marks=pytest.mark.slow),
        pytest.param("hf-t5", (2, 2), "random 0", marks=pytest.mark.slow),
    ],
)
def test_inference(name: str, sizes: Sizes, how: str) -> None:
    who = subject(name, "inference")
    report = who.verified(planned(who, sizes, how))
    assert report.ok, (report.first, report.worst)
    assert {row.kind for row in report.rows} <= {"output", "buffer", "collectives", "tables"}
    assert {"output", "collectives", "tables"} <= {row.kind for row in report.rows}


def test_a_wrong_table_is_found() -> None:
    """No value of a step shows that the state dict has another order."""
    who = subject("mlp")
    reverse = partial(re.sub, r"ORDER = (\(.*\))\n", r"ORDER = tuple(reversed(\1))\n")
    report = who.verified(by_recipe(who, (2,), "ddp"), mutate=reverse, later=False)
    assert [row.kind for row in report.rows if not row.ok] == ["tables"] and report.value_error < 1e-9
    assert report.first.startswith("no value: ORDER says "), report.first


def test_bytes_are_compared_where_cuts_are_even() -> None:
    who = subject("mlp")
    even = who.verified(planned(who, (2,), "zero3"))
    assert any(row.name == "bytes: run = priced" for row in even.rows)
    assert not any("not compared" in note for note in even.notes)
    uneven = who.verified(planned(who, (4,), "zero3"))  # 10 rows over 4 ranks
    (note,) = [note for note in uneven.notes if "not compared" in note]
    assert (
        note.startswith("bytes of all_gather on rank, reduce_scatter on rank are not compared")
        and "head.weight of sizes (10, 64) is not cut evenly" in note
    )
    assert any(row.name == "bytes: run = priced" for row in uneven.rows)  # of what else runs: the sum of the loss


def test_a_batch_that_an_inner_operator_cannot_cut_is_an_error_that_names_it() -> None:
    """BLOOM merges batch and heads; whole inputs let any batch in."""
    who = subject("hf-bloom")
    made = planned(who, (2, 2), "random 3")
    assert made.nodes["input_ids"].outs[0].startswith("R,R")
    with pytest.raises(
        RunError,
        match=r"b = 7 does not divide by the 2 ranks that cut it on Mesh\(.*which transformer_h_0/reshape\S* at "
        r"transformer\.h\.0\.self_attention \(.*\.py:\d+\) needs.*use 6 or 8",
    ):
        who.verified(made, 7)
    right(who.verified(made, 4))
