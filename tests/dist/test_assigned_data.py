"""`parameter.data = value`, which a DTensor ignores, is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.dist.test_refused import compiled, said
from tests.helpers.ranks import on_ranks


def _data(recipe: str) -> tuple[bool, list[str]]:
    """One rank: whether a weight is as it was behind an assignment to its `data`; what is said of that in a step, in
    both state dicts, and where nothing was assigned."""
    module, batch = compiled(recipe)
    weight = next(module.parameters())
    before = weight.detach().full_tensor().clone()  # type: ignore[attr-defined]  # a DTensor
    messages = []
    for look in (partial(module.train_step, *batch), module.state_dict, module.full_state_dict):
        weight.data = weight.detach() * 2
        messages += [said(look), said(look)]  # told once
    ignored = torch.equal(weight.detach().full_tensor(), before)  # type: ignore[attr-defined]
    weight.data.copy_(weight.detach() * 2)
    weight.data += weight.data
    messages.append(said(look))
    return ignored and torch.equal(weight.detach().full_tensor(), before * 4), messages  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", ["zero3", "ddp", "1f1b"])
def test_data_of_parameters_is_changed_in_place_only(recipe: str) -> None:
    """Averages of weights that are put in place by assignment left the weights as they were, in silence. When this
    fails because they are no longer, torch heeds assignments too: say so in docs/training.md."""
    for alike, (step, none, state, none_2, full, *others) in on_ranks(2, _data, recipe):
        assert alike and not none + none_2 + "".join(others)
        assert all(".data = value was written. A parameter is a DTensor" in text for text in (step, state, full))
