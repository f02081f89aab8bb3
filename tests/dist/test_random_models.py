"""Random models under random plans, on local ranks against one device: whatever is made of operators, and however it is
cut, the numbers and the number of collectives are right."""

from __future__ import annotations

import pytest

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.random_models import Drawn, batch, tame
from tests.helpers.ranks import living
from tests.helpers.verify import Sizes, Subject, by_chance

FAST = 2


@pytest.mark.parametrize(
    "seed", [*range(FAST), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FAST, 120))]
)
def test_any_model_under_any_plan(seed: int) -> None:
    model, inputs = Drawn(seed), batch(seed)
    if not tame(model, *inputs):
        assert seed >= FAST, "draw another one: its gradients explode"
        return
    captured = capture(model, inputs)
    who = Subject(f"drawn {seed}", "train", captured, model.state_dict())
    meshes: tuple[Sizes, ...] = ((2,), (2, 2)) if seed % 3 else ((4,), (2, 2, 2))
    for sizes in meshes:
        made = by_chance(who, sizes, seed)
        report = verify(
            case_of(captured, made, model.state_dict(), dict(zip(captured.input_names, inputs, strict=True))),
            ranks=living(made.ranks),
        )
        wrong = [row for row in report.rows if not row.ok]
        assert report.ok, f"{sizes}: first wrong: {report.first}; {wrong[:4]}\n{model}"
