"""Tables of rows: bags of them, of one length and of several, and gradients scaled by how often a row comes."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.verify import case_of, graph_rows, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

ROWS, WIDTH, BATCH = 40, 8, 8
TABLES = {
    "sums": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum", padding_idx=3),
    "means": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean"),
    "maxima": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="max"),
    "sparse": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True),
    "weighted": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum"),
    "several lengths": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean"),
    "scaled": lambda: nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True),
    "scaled bags": lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum", scale_grad_by_freq=True),
}


class Recommender(nn.Module):
    """What a table says of some numbers, between maps."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.table, self.inner, self.out = (
            name,
            TABLES[name](),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, 1),
        )

    def forward(self, numbers: Tensor, gates: Tensor, starts: Tensor) -> Tensor:
        settings = {"per_sample_weights": gates} if self.name == "weighted" else {}
        numbers, settings = (
            (numbers.reshape(-1), {"offsets": starts}) if self.name == "several lengths" else (numbers, settings)
        )
        found = self.table(numbers, **settings)
        return self.out(self.inner(found.sum(1) if self.name == "scaled" else found).relu()).square().mean()


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    starts = torch.tensor([0, 1, 7, 7, 12, 20, 21, 30])
    return {
        "numbers": torch.randint(0, ROWS // 4, (BATCH, 4), generator=generator),
        "gates": torch.rand(BATCH, 4, generator=generator),
        "starts": starts,
    }


@cache
def subject(name: str) -> Subject:
    torch.manual_seed(0)
    model = Recommender(name)
    captured = capture(model, (), inputs())
    rows, notes = graph_rows(model, captured, (), inputs(), training=True)
    assert not notes and all(row.ok for row in rows), rows
    return Subject(name, "train", captured, model.state_dict())


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("sums", "megatron"),
        ("weighted", "1f1b"),
        ("scaled", "zero3"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in TABLES
            for how in ("megatron", "tp", "zero3", "random 0", "random 1", "1f1b")
            if how != "1f1b" or name not in ("several lengths", "scaled", "scaled bags")
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    who = subject(name)
    made = by_stages(who, (1,), "single", 2, 4, how) if how == "1f1b" else planned(who, (2,), how)
    assert (name, how) != ("sums", "megatron") or any("bag" in node.runs for node in made.nodes.values())
    report = verify(case_of(who.captured, made, who.weights, inputs()), ranks=living(2))
    assert report.ok, (report.first, report.worst)


def test_a_row_that_wrongly_trains_is_found_where_no_sample_of_the_batch_has_it() -> None:
    """The second batch has it. A drawn batch seldom does, and nothing else tells."""
    who = subject("sums")
    batch = inputs() | {"numbers": inputs()["numbers"].clamp(min=4)}
    case = case_of(who.captured, planned(who, (2,), "zero3"), who.weights, batch)
    wrong = replace(case, mutate=lambda source: re.sub(r"(bag\(.*'sum', )3\)", r"\1-1)", source))
    assert wrong.source() != case.source(), case.source()
    report = verify(wrong, ranks=living(2))
    assert report.first.startswith("none in the first step: "), (report.first, report.worst)
    assert verify(case, ranks=living(2)).ok
