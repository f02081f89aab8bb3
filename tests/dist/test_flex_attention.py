"""Models that call flex_attention, on ranks: masks of every kind, changed scores, weights read in them."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from autopar.capture import capture
from autopar.verify import case_of, graph_rows, verify
from tests.helpers.flexible import ATTENTIONS, MASKS, reader
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

PLANS = ("searched", "zero3", "ulysses", "random 0", "random 1", "1f1b")


@cache
def subject(mask: str, attention: str, groups: int) -> Subject:
    model, inputs = reader(mask, attention, groups)
    captured = capture(model, inputs)
    rows, notes = graph_rows(model, captured, [x[:6] for x in inputs], {}, training=True)
    assert not notes and all(row.ok for row in rows), rows
    assert captured.evaluation.why == "" and not captured.evaluation.differs, captured.evaluation
    return Subject(f"{mask}, {attention}", "train", captured, model.state_dict())


@pytest.mark.parametrize(
    ("mask", "attention", "groups", "how"),
    [
        ("documents", "plain", 2, "random 0"),
        ("seen", "sinks", 4, "random 1"),
        ("causal", "bias", 2, "1f1b"),
        *(
            pytest.param(mask, attention, 2 + 2 * (number % 2), PLANS[number % len(PLANS)], marks=pytest.mark.slow)
            for number, (mask, attention) in enumerate(product(MASKS, ATTENTIONS))
        ),
    ],
)
def test_equals_one_device(mask: str, attention: str, groups: int, how: str) -> None:
    who, (_, inputs) = subject(mask, attention, groups), reader(mask, attention, groups)
    made = (
        by_stages(who, (1,), "single", 2, 4, how, 1)
        if how == "1f1b"
        else planned(who, (2, 2) if how.startswith(("random", "searched")) else (4,), how)
    )
    report = verify(
        case_of(who.captured, made, who.weights, dict(zip(who.captured.input_names, inputs, strict=True))),
        ranks=living(made.ranks),
    )
    assert report.ok, (report.first, report.worst)
