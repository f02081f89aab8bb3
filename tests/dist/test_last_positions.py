"""Models that read one position of each sample, `logits[arange(b), last]`: reward models and classifiers over
decoders."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from autopar.capture import capture
from autopar.frontend import inputs_for
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


@cache
def subject() -> tuple[Subject, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES, num_labels=3, pad_token_id=0))
    inputs = inputs_for(model, batch=8, seq=6)[1]
    inputs["input_ids"][1, 4:] = inputs["input_ids"][2, 2:] = 0  # their last positions are not that of the sequence
    captured = capture(model, (), inputs)
    return Subject("classifier", "train", captured, model.state_dict()), {
        name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize(
    "how",
    [
        "1f1b",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("tp_sp", "zero3", "cp", "random 0", "random 1", "zbv_zero_bubble")
        ),
    ],
)
def test_equals_one_device(how: str) -> None:
    who, inputs = subject()
    places = 2 if how.startswith("zbv") else 1
    made = (
        by_stages(who, (1,), "single", 2, 4, how, places)
        if how in ("1f1b", "zbv_zero_bubble")
        else planned(who, (2,), how)
    )
    report = verify(case_of(who.captured, made, who.weights, inputs), ranks=living(2))
    assert report.ok, (report.first, report.worst)
