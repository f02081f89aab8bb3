"""Emitted programs on GPUs equal one device in float64: loss, gradients, parameters after an optimizer step,
collectives as priced. Ranks share a GPU where there are fewer. One worker runs a model's cases, another another's:
`pytest -n 8 -m gpu tests/gpu`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from autopar.runtime.launch import Ranks
from autopar.verify import verify
from tests.gpu.marks import gpu
from tests.helpers.verify import Sizes, batch_for, planned, right, subject
from tests.helpers.zero_plans import offloaded

pytestmark = gpu

CASES: list[tuple[str, Sizes, str]] = [
    ("hf-gpt2", (1,), "single"),
    ("hf-gpt2", (4,), "megatron"),
    ("hf-llama", (4,), "tp_sp"),
    ("hf-llama-2kv", (2, 2), "tp_zero3"),
    ("hf-bert", (4,), "zero3"),
    ("hf-t5", (2, 2), "hsdp"),
    ("hf-vit", (4,), "tp"),
    ("cnn", (4,), "one_weird_trick"),
    ("recommender", (4,), "tp"),
    ("moe", (4,), "random 4"),
    ("hf-mixtral", (4,), "ep"),
    ("hf-llama", (2,), "cp"),
    ("hf-gpt2", (4,), "ulysses"),
    ("gpt", (2,), "zero1"),
    ("hf-phi3", (4,), "zero2"),
    ("gpt", (2, 2), "searched"),
    ("hf-llama", (2, 2), "random 1"),
    ("hf-resnet", (2, 2), "spatial"),
    ("hf-gpt-oss", (4,), "ep"),
    ("hf-gpt2", (2,), "ddp"),
    ("gpt", (2,), "zero_offload"),
    ("gpt", (2,), "optimizer_offload"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[int, Ranks]]:
    """Living ranks on GPUs, by how many."""
    made = {count: Ranks(count, device_type="cuda", timeout_s=120.0) for count in (1, 2, 4)}
    yield made
    for each in made.values():
        each.stop()


@pytest.mark.parametrize(("name", "sizes", "how"), CASES, ids=lambda value: str(value).replace(", ", "x"))
def test_a_program_on_gpus_equals_one_device(name: str, sizes: Sizes, how: str, ranks: dict[int, Ranks]) -> None:
    who = subject(name)
    made = (offloaded(who, sizes, how) if "offload" in how else planned(who, sizes, how)).on("cuda")
    case = who.case(made, batch_for(how))
    assert '"cuda"' in case.source()
    right(verify(dataclasses.replace(case, plan=made), ranks=ranks[made.ranks]))
