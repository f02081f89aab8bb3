"""What the labels of a Hugging Face model are, by the name of its class."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.frontend.draw import PASS_THEM, Draw, number

IGNORED = -100  # the label that cross-entropy skips, torch's and Hugging Face's default
HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
"""Where transformers lists models whose labels are token ids, also those whose names do not say it (MarianMTModel)."""

Made = dict[str, Tensor]
Maker = Callable[[Draw], Made]


def labels_for(model: nn.Module, accepted: Mapping[str, object], draw: Draw) -> Made:
    """The labels of `model`, whose forward takes `accepted`, by argument. Raises CaptureError for a model without a
    known loss."""
    name = type(model).__name__
    maker = next((maker for suffix, maker in LABELS.items() if name.endswith(suffix)), None) or (
        _token_ids if _is_listed(name) else None
    )
    made = maker(draw) if maker is not None else {}
    if made and made.keys() <= accepted.keys():
        return made
    raise CaptureError(
        f"labels for {name} cannot be made: wanted a class named *{', *'.join(LABELS)} whose forward takes "
        f"{' and '.join(made) or 'labels'}. To train it, {PASS_THEM}, where args hold what its loss takes (in Python "
        'the loss may be loss_fn= of compile instead); without a loss, plan for inference: mode="inference", --mode '
        "inference"
    )


def _token_ids(draw: Draw) -> Made:
    return {"labels": _with_ignored(draw.tokens())}


def _token_classes(draw: Draw) -> Made:
    return {"labels": _with_ignored(draw.integers(draw.config.num_labels, draw.b, draw.s))}


def _classes(draw: Draw) -> Made:
    """A class of each sample; where the config says so, numbers, or which of all classes it has."""
    many, kind = draw.config.num_labels, getattr(draw.config, "problem_type", None)
    if kind == "regression":
        return {"labels": draw.normal(draw.b, *([many] if many > 1 else []))}
    if kind == "multi_label_classification":
        return {"labels": draw.normal(draw.b, many).gt(0).float()}
    return {"labels": draw.integers(many, draw.b)}


def _pixel_classes(draw: Draw) -> Made:
    return {"labels": draw.integers(draw.config.num_labels, draw.b, *draw.sides())}


def _places(draw: Draw) -> Made:
    """Where the answer begins and ends."""
    return {name: draw.integers(draw.s, draw.b) for name in ("start_positions", "end_positions")}


def _transcripts(draw: Draw) -> Made:
    """What is said: half as many tokens as there are frames of sound, so that any can be told apart, and none of them
    the blank, which is padding."""
    blank = number(draw.config, "pad_token_id")
    others = draw.integers(number(draw.config, "vocab_size") - 1, draw.b, max(1, draw.s // 2))
    return {"labels": others + (others >= blank)}


LABELS: dict[str, Maker] = {
    "LMHeadModel": _token_ids,
    "ForCausalLM": _token_ids,
    "ForMaskedLM": _token_ids,
    "ForConditionalGeneration": _token_ids,
    "ForTokenClassification": _token_classes,
    "ForSequenceClassification": _classes,
    "ForImageClassification": _classes,
    "ForVideoClassification": _classes,
    "ForAudioClassification": _classes,
    "ForSemanticSegmentation": _pixel_classes,
    "ForQuestionAnswering": _places,
    "ForCTC": _transcripts,
}
"""By how the class name ends: Hugging Face's own convention for heads (its sound classifiers are named
ForSequenceClassification)."""


def _with_ignored(labels: Tensor) -> Tensor:
    """Labels [b, s] of tokens, some places of which are ignored, unevenly over the batch."""
    if not labels.is_meta:
        for row, ignored in enumerate(ignored_places(*labels.shape)):
            labels[row, :ignored] = IGNORED
    return labels


def ignored_places(batch: int, seq: int) -> list[int]:
    """How many leading labels of each row are ignored: 1, 2, 3, 0, 1, ... but never a whole row."""
    return [min((row + 1) % 4, seq - 1) for row in range(batch)]


def _is_listed(name: str) -> bool:
    """Whether transformers lists a class under HEADS."""
    transformers: Any = sys.modules["transformers"]
    return any(name in getattr(transformers.models.auto.modeling_auto, head).values() for head in HEADS)
