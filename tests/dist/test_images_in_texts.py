"""Vision-language models: features of images in the places of image tokens, cut by samples, by weights, and in
pipelines."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.capture import capture
from autopar.errors import RunError
from autopar.frontend import inputs_for
from autopar.verify import case_of, graph_rows, verify
from passes import ops
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "head_dim": 8,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
BATCH, SEQ = 4, 24


def _paligemma(transformers: Any) -> Any:
    return transformers.PaliGemmaForConditionalGeneration(
        transformers.PaliGemmaConfig(
            text_config={**TEXT, "model_type": "gemma"},
            vision_config={**VISION, "projection_dim": 32},
            projection_dim=32,
            image_token_index=98,
        )
    )


def _gemma3(transformers: Any) -> Any:
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config={**TEXT, "sliding_window": 8},
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=98,
            boi_token_index=96,
            eoi_token_index=97,
        )
    )


def _llava(transformers: Any) -> Any:
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**VISION, "model_type": "clip_vision_model"},
            image_token_index=98,
        )
    )


MODELS = {"paligemma": _paligemma, "gemma3": _gemma3, "llava": _llava}


@cache
def subject(name: str) -> tuple[Subject, dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = MODELS[name](transformers)
    inputs = inputs_for(model, batch=BATCH, seq=SEQ)[1]
    captured = capture(model, (), inputs)
    rows, notes = graph_rows(model, captured, (), inputs, training=True)
    assert not notes and all(row.ok for row in rows), rows
    assert captured.gm.graph.find_nodes(op="call_function", target=ops.fill_rows) and list(captured.hints) == ["b", "s"]
    return Subject(name, "train", captured, model.state_dict()), inputs


def case(name: str, how: str, change: Any = None) -> Any:
    who, inputs = subject(name)
    tensors = {key: value for key, value in inputs.items() if isinstance(value, Tensor)}
    made = by_stages(who, (1,), "single", 2, 4, how) if how == "1f1b" else planned(who, (2,), how)
    return case_of(who.captured, made, who.weights, change(tensors) if change else tensors)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("paligemma", "1f1b"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in MODELS
            for how in ("tp_sp", "zero3", "1f1b", "random 0", "random 1", "random 2")
        ),
    ],
)
def test_equals_one_device(name: str, how: str) -> None:
    report = verify(case(name, how), ranks=living(2))
    assert report.ok, (report.first, report.worst)


def _moved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """One image token more in the first sample, one less in the last: as many in all."""
    ids = inputs["input_ids"].clone()
    ids[0, -1], ids[-1, 1] = 98, 1
    return {**inputs, "input_ids": ids}


def test_samples_with_more_places_than_features_are_refused_where_samples_are_cut() -> None:
    with pytest.raises(RunError, match=r"places for as many rows.*image tokens in each part"):
        verify(case("paligemma", "zero3", _moved), ranks=living(2))
