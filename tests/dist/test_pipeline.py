"""Pipelines on local ranks against one device, in float64: every schedule, tied weights, values that skip stages,
totals over microbatches, sharded and tensor-parallel stages; and the traps of torch's schedules that they come near."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import PlanError
from autopar.pipeline import SCHEDULES
from autopar.recipes import roles
from autopar.verify import Report
from tests.helpers.verify import Sizes, by_stages, right, subject

# model, mesh of a place, recipe, places, microbatches, schedule, stages per place
FAST: list[tuple[str, Sizes, str, int, int, str, int]] = [
    ("hf-gpt2", (1,), "single", 2, 4, "gpipe", 1),  # tied weights on the first and the last place
    ("hf-gpt2", (2,), "tp", 2, 4, "1f1b", 1),
    # both copies of the tied weight on one place; ZeRO-3 with a split backward
    ("hf-gpt2", (2,), "zero3", 2, 4, "zbv_zero_bubble", 2),
    # the encoder's result skips stages; weights beside what is received
    ("hf-t5", (1,), "single", 2, 4, "interleaved_zero_bubble", 2),
    ("hf-t5", (1,), "single", 2, 4, "dualpipev", 2),
    ("hf-vit", (2,), "ddp", 2, 4, "zbv_zero_bubble", 2),  # gradients that autograd passes on as they are
    ("hf-resnet", (1,), "single", 2, 1, "naive", 1),  # buffers, one microbatch
    ("hf-llama-2kv", (2,), "zero3", 2, 2, "interleaved_1f1b", 2),
    ("hf-bert", (1,), "single", 4, 8, "1f1b", 1),
    ("gpt", (2,), "tp_sp", 2, 2, "looped_bfs", 2),
    ("hf-mixtral", (1,), "single", 1, 4, "gpipe", 1),  # microbatches alone: gradient accumulation
    # gradients of gathered weights wait in their leaves, parts of a sum, while others move
    ("gpt", (2, 2), "hsdp", 1, 2, "gpipe", 1),
    ("hf-bert", (1,), "single", 4, 2, "gpipe", 1),  # fewer microbatches than places
    ("hf-bert", (1,), "single", 4, 2, "zbv_zero_bubble", 2),
    # sums of gradients begin stage by stage
    ("hf-gpt2", (2,), "zero1", 2, 4, "interleaved_1f1b", 2),
    ("gpt", (2,), "ddp", 2, 4, "1f1b", 1),
]
LOOPED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
MODELS = ("hf-gpt2", "hf-llama-deep", "hf-t5", "hf-vit", "hf-bert")
# one sample a rank and microbatch at most: eight samples
SLOW = [
    ("hf-llama4", (1,), "single", 2, 2, "1f1b", 1),
    ("hf-gpt-oss", (1,), "single", 2, 4, "1f1b", 1),
    *(("hf-bert", (1,), "single", 4, 2, name, 2) for name in LOOPED),
    *(
        (model, mesh, recipe, places, places * virtual, schedule, virtual)
        for model in MODELS
        for mesh, recipe in (((1,), "single"), ((2,), "zero3"), ((2,), "tp"))
        for places in (2, 4)
        for schedule in SCHEDULES
        if schedule != "naive"
        for virtual in (SCHEDULES[schedule].virtual or 2,)
        if not (places == 4 and (mesh != (1,) or (schedule in ("zbv_zero_bubble", "dualpipev") and model == "hf-vit")))
    ),
]


@pytest.mark.parametrize(("model", "mesh", "recipe", "places", "microbatches", "schedule", "virtual"), FAST)
def test_every_schedule(
    model: str, mesh: Sizes, recipe: str, places: int, microbatches: int, schedule: str, virtual: int
) -> None:
    who = subject(model)
    report = who.verified(by_stages(who, mesh, recipe, places, microbatches, schedule, virtual))
    right(report)
    _same_bytes(report, places)


def test_the_fast_cases_have_every_schedule() -> None:
    assert {case[5] for case in FAST} == set(SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "recipe", "places", "microbatches", "schedule", "virtual"), SLOW)
def test_the_full_matrix(
    model: str, mesh: Sizes, recipe: str, places: int, microbatches: int, schedule: str, virtual: int
) -> None:
    who = subject(model)
    right(who.verified(by_stages(who, mesh, recipe, places, microbatches, schedule, virtual)))


def test_other_sizes_than_planned_on_the_same_module() -> None:
    who = subject("hf-gpt2")
    made = by_stages(who, (2,), "ddp", 2, 2, "1f1b")
    right(who.verified(made, 12, 5))
    right(who.verified(made, 4, 9))


@pytest.mark.parametrize("cut", [2, 3, 5, 7, 8])
def test_a_cut_can_be_anywhere(cut: int) -> None:
    who = subject("hf-t5")
    right(who.verified(by_stages(who, (1,), "single", 2, 2, "1f1b", bounds=[cut * 3])))


@pytest.mark.parametrize(
    ("mesh", "recipe", "places", "microbatches", "schedule", "virtual"),
    [
        ((2,), "tp", 2, 2, "1f1b", 1),
        ((2,), "ddp", 1, 4, "gpipe", 1),  # microbatches alone: less is alive at a time
        ((1,), "single", 2, 1, "naive", 1),
        *(((1,), "single", 2, 4, name, 2) for name in ("looped_bfs", "zbv_zero_bubble")),
    ],
)
def test_inference_goes_forward_only(
    mesh: Sizes, recipe: str, places: int, microbatches: int, schedule: str, virtual: int
) -> None:
    who = subject("gpt", "inference")
    report = who.verified(by_stages(who, mesh, recipe, places, microbatches, schedule, virtual))
    assert report.ok and {row.kind for row in report.rows} == {"output", "collectives", "tables"}
    _same_bytes(report, places)


def _same_bytes(report: Report, places: int) -> None:
    """Collectives of microbatches, transfers between places both ways, and sums of what several places hold."""
    wanted = {f"place {place}, bytes: run = priced" if places > 1 else "bytes: run = priced" for place in range(places)}
    assert {row.name for row in report.rows if "bytes" in row.name} == wanted, report.worst


@pytest.mark.slow
def test_bytes_inside_operators_are_those_of_microbatches() -> None:
    """Tokens go to experts on other ranks."""
    who = subject("hf-mixtral")
    _same_bytes(who.verified(by_stages(who, (2,), "ep", 2, 2, "1f1b")), 2)


def test_collectives_of_totals_move_the_whole_batch() -> None:
    """Labels are cut over ranks, and gathered: once for the number of labels that count, and then for each
    microbatch."""
    who = subject("hf-gpt2")
    made = by_stages(who, (2,), "tp", 2, 2, "1f1b")
    made = replace(made, nodes={**made.nodes, "labels": replace(made.nodes["labels"], outs=("S0|-",))})
    report = who.verified(made)
    right(report)
    _same_bytes(report, 2)


@pytest.mark.parametrize(
    ("model", "microbatches", "schedule", "places", "virtual", "words"),
    [
        # statistics of the batch
        ("hf-resnet", 2, "1f1b", 2, 1, "so 2 microbatches would not compute what the batch computes"),
        ("moe", 2, "1f1b", 2, 1, "would not compute what the batch computes"),  # a balance loss over the batch
        ("gpt", 4, "naive", 2, 1, "schedule naive runs one microbatch, got 4"),
        ("hf-bert", 16, "1f1b", 2, 1, "a batch of 8 does not divide into 16 microbatches"),
        ("hf-bert", 3, "1f1b", 2, 1, "a batch of 8 does not divide into 3 microbatches"),
        ("gpt", 2, "1f1b", 2, 2, "schedule 1f1b on 2 groups of ranks needs 2 stages, got 4"),
        ("gpt", 2, "zigzag", 2, 1, "unknown schedule 'zigzag'"),
    ],
)
def test_what_cannot_be_is_refused(
    model: str, microbatches: int, schedule: str, places: int, virtual: int, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        by_stages(subject(model), (1,), "single", places, microbatches, schedule, virtual)


def test_more_stages_than_pieces_are_refused() -> None:
    with pytest.raises(PlanError, match="every stage needs at least one"):
        by_stages(subject("mlp"), (1,), "single", 40, 1, "gpipe")


@pytest.mark.parametrize(
    ("mesh", "ids", "labels"), [((2,), "S0", "R"), ((2, 2), "S0,S0", "R,S0"), ((2, 2), "R,R", "S0,R")]
)
def test_inputs_that_are_cut_over_different_ranks_are_cut_into_the_same_microbatches(
    mesh: Sizes, ids: str, labels: str
) -> None:
    """Samples of a microbatch are not next to each other in an input that a rank has more of."""
    who = subject("hf-gpt2")
    made = by_stages(who, mesh, [roles.data] * len(mesh), 2, 2, "1f1b")
    laid = {"input_ids": ids, "labels": labels}
    made = replace(
        made,
        nodes={
            name: replace(node, outs=(f"{laid[name]}|{','.join('-' * len(mesh))}",)) if name in laid else node
            for name, node in made.nodes.items()
        },
    )
    right(who.verified(made))


@pytest.mark.parametrize(("model", "places"), [("gpt", 1), pytest.param("hf-llama", 2, marks=pytest.mark.slow)])
def test_a_result_that_is_cut_over_more_ranks_than_the_batch_comes_in_order(model: str, places: int) -> None:
    """Logits cut by samples over both axes, the inputs over one."""
    who = subject(model)
    made = by_stages(who, (2, 2), (roles.zero3, roles.tensor), places, 2, "1f1b" if places > 1 else "gpipe")
    source = who.case(made).source()
    assert f"'{who.captured.input_names[0]}': 'S0,R'" in source and '"S0,S0", (b // 2, s, 257)' in source
    right(who.verified(made))
