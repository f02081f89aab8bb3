"""Models that read one position of each sample, `logits[arange(b), last]`: reward models and classifiers over
decoders."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Scores(nn.Module):
    """The head of such a classifier, over as little as a pipeline needs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(99, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.score = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        h = self.words(input_ids)
        for layer in self.layers:
            h = h + layer(h).tanh()
        batch, length = input_ids.shape
        last = (torch.arange(length, device=h.device) * (input_ids != 0)).argmax(-1)
        return F.cross_entropy(self.score(h)[torch.arange(batch, device=h.device), last], labels)


@cache
def subject(name: str) -> tuple[Subject, dict[str, Any]]:
    torch.manual_seed(0)
    if name == "scores":
        model: nn.Module = Scores()
        inputs: dict[str, Any] = {"input_ids": torch.randint(1, 99, (8, 6)), "labels": torch.randint(3, (8,))}
    else:
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(**SIZES, num_labels=3, pad_token_id=0)
        model = transformers.LlamaForSequenceClassification(config)
        inputs = inputs_for(model, batch=8, seq=6)[1]
    inputs["input_ids"][1, 4:] = inputs["input_ids"][2, 2:] = 0  # their last positions are not that of the sequence
    captured = capture(model, (), inputs)
    return Subject(name, "train", captured, model.state_dict()), {
        name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("scores", "1f1b"),
        *(
            pytest.param("llama", how, marks=pytest.mark.slow)
            for how in ("tp_sp", "zero3", "cp", "random 0", "random 1", "1f1b", "zbv_zero_bubble")
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    who, inputs = subject(name)
    places = 2 if how.startswith("zbv") else 1
    made = (
        by_stages(who, (1,), "single", 2, 4, how, places)
        if how in ("1f1b", "zbv_zero_bubble")
        else planned(who, (2,), how)
    )
    report = verify(case_of(who.captured, made, who.weights, inputs), ranks=living(2))
    assert report.ok, (report.first, report.worst)
