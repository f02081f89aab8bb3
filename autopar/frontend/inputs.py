"""Inputs for a Hugging Face model, from its config and the signature of its forward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.frontend import images

IGNORED = -100  # the label that cross-entropy skips, torch's and Hugging Face's default
IMAGE_SIDE = 224  # pixels, where the config (ResNet's, for one) does not say: the size ImageNet models are trained on
IMAGE_CHANNELS = 3  # where the config does not say: red, green, blue
PASS_THEM = "pass example_inputs to compile, or name a factory that gives (model, args)"

# What the labels are, by how the class name ends (Hugging Face's own convention for heads).
LABELS = {
    "LMHeadModel": "token ids",
    "ForCausalLM": "token ids",
    "ForMaskedLM": "token ids",
    "ForConditionalGeneration": "token ids",
    "ForTokenClassification": "token classes",
    "ForSequenceClassification": "classes",
    "ForImageClassification": "classes",
}
HEADS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
"""Where transformers lists models whose labels are token ids, also those whose names do not say it (MarianMTModel)."""
POSITIONS = ("max_position_embeddings", "max_target_positions")  # what configs call the number of positions of text
MARKS = ("token_type_ids", "mm_token_type_ids")  # which tokens are those of images, where models want to be told
MATCHES = "return_loss"  # what CLIP and its kin take for labels: each sample's text belongs to its image
Inputs = tuple[tuple[object, ...], dict[str, object]]


@dataclass(frozen=True)
class _Maker:
    """Draws inputs for one model: b samples of s tokens."""

    config: Any
    b: int
    s: int
    device: torch.device
    generator: torch.Generator

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform in [0, high), int64; on meta only the shape."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.int64, device=self.device)
        return torch.randint(high, shape, generator=self.generator).to(self.device)

    def tokens(self) -> Tensor:
        """Token ids [b, s]."""
        return self.integers(_number(of_text(self.config), "vocab_size"), self.b, self.s)

    def pixels(self) -> Tensor:
        """Images [b, channels, height, width], float32."""
        config = getattr(self.config, "vision_config", self.config)
        side = getattr(config, "image_size", None) or IMAGE_SIDE
        height, width = side if isinstance(side, Iterable) else (side, side)
        return self.normal(self.b, getattr(config, "num_channels", None) or IMAGE_CHANNELS, height, width)

    def features(self) -> Tensor:
        """Spectra [b, mel bins, frames] of sound as long as the encoder's positions, two frames each, float32."""
        return self.normal(self.b, _number(self.config, "num_mel_bins"), 2 * _number(self.config, "max_source_positions"))

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed, float32; on meta only the shape."""
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self.generator).to(self.device)

    def labels(self, kind: str) -> Tensor:
        """Labels of one of the kinds in LABELS; those of tokens have ignored places, unevenly over the batch."""
        if kind == "classes":
            return self.integers(self.config.num_labels, self.b)
        labels = self.tokens() if kind == "token ids" else self.integers(self.config.num_labels, self.b, self.s)
        if self.device.type != "meta":
            for row, ignored in enumerate(ignored_places(self.b, self.s)):
                labels[row, :ignored] = IGNORED
        return labels

    def decoder_ids(self, labels: object) -> Tensor:
        """Decoder input ids [b, s]: the labels shifted right behind the start token, or any ids without labels."""
        if not isinstance(labels, Tensor):
            return self.tokens()
        start, pad = _number(self.config, "decoder_start_token_id"), _number(self.config, "pad_token_id")
        shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
        return shifted.where(shifted != IGNORED, pad)


MAIN: dict[str, Callable[[_Maker], Tensor]] = {"input_ids": _Maker.tokens, "pixel_values": _Maker.pixels, "input_features": _Maker.features}
"""What models read, by the name of the argument."""


def _number(config: Any, name: str) -> int:
    """A number that a config says. Raises CaptureError if it does not."""
    value = getattr(config, name, None)
    if isinstance(value, int):
        return value
    raise CaptureError(f"inputs need {name}, which the config lacks ({type(config).__name__}, got {value!r}): set it, or {PASS_THEM}")


def ignored_places(batch: int, seq: int) -> list[int]:
    """How many leading labels of each row are ignored: 1, 2, 3, 0, 1, ... but never a whole row."""
    return [min((row + 1) % 4, seq - 1) for row in range(batch)]


def inputs_for(
    model: nn.Module,
    *,
    batch: int,
    seq: int,
    device: torch.device | str | None = None,
    seed: int = 0,
    labels: bool = True,
) -> Inputs:
    """(args, kwargs) for a Hugging Face model: ids [batch, seq], pixels, both (of models that match them, or put images into texts), or spectra of sound; decoder ids,
    and labels that match its head.

    `device` None is the model's own. On "meta" the values mean nothing; elsewhere they follow from `seed`. There is no
    attention mask: no position is padding. With `labels` the loss is the model's first output. Raises CaptureError
    for any other kind of model, for inputs that cannot be made from a config, and for `seq` beyond the positions.
    """
    if not is_hugging_face(model):
        raise CaptureError(
            f"inputs for {type(model).__name__} cannot be made: it is no Hugging Face model; {PASS_THEM}"
        )
    config: Any = model.config
    device = torch.device(device or next(model.parameters()).device)
    make = _Maker(config, batch, seq, device, torch.Generator().manual_seed(seed))
    accepted = inspect.signature(model.forward).parameters
    kwargs: dict[str, object] = {}
    for name in main_inputs(model, accepted):
        made: Tensor = MAIN[name](make)
        kwargs[name] = made.to(next(model.parameters()).dtype) if made.is_floating_point() else made
    if "input_ids" in kwargs or config.is_encoder_decoder:
        check_positions(model, seq)
    if images.puts_images_into_texts(model, accepted):
        kwargs |= texts_with_images(model, kwargs, accepted)
    if labels and MATCHES in accepted:
        kwargs[MATCHES] = True
    elif labels:
        kwargs["labels"] = make.labels(label_kind(model, accepted))
    shifts = "labels" in kwargs and getattr(config, "decoder_start_token_id", None) is None  # as mBART does, whose decoder starts with the last token of each sample
    if config.is_encoder_decoder and "decoder_input_ids" in accepted and not shifts:
        kwargs["decoder_input_ids"] = make.decoder_ids(kwargs.get("labels"))
    if _takes("use_cache", accepted, config) and getattr(of_text(config), "use_cache", False):
        kwargs["use_cache"] = False
    return (), kwargs


def _takes(name: str, accepted: Mapping[str, inspect.Parameter], config: Any) -> bool:
    """Whether a forward has an argument `name`, or hands all that it does not know on to the part that reads text."""
    hands_on = of_text(config) is not config and any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values())
    return name in accepted or hands_on


def texts_with_images(model: Any, made: Mapping[str, Any], accepted: Mapping[str, object]) -> dict[str, object]:
    """Token ids with image tokens as many as `model` makes features of the pixels that are `made`, and what says which are such tokens."""
    count = images.tokens_of_an_image(model, made["pixel_values"])
    ids = images.with_images(made["input_ids"], model.config.image_token_id, count, type(model).__name__)
    marks = {name: (ids == model.config.image_token_id).long() for name in MARKS if name in accepted}
    return {"input_ids": ids, **marks}


def main_inputs(model: Any, accepted: Mapping[str, object]) -> list[str]:
    """Which of MAIN a model reads. Raises CaptureError where that is not known: of a model that reads several, unless it matches them or puts
    images into texts."""
    known = [name for name in MAIN if name in accepted]
    if images.puts_images_into_texts(model, accepted):
        return ["input_ids", "pixel_values"]  # sound may come with them, and need not
    if known == [model.main_input_name] or (len(known) > 1 and MATCHES in accepted):
        return known
    raise CaptureError(
        f"inputs for {type(model).__name__} cannot be made from its config: its forward takes {', '.join(accepted)}, and only one of "
        f"{', '.join(MAIN)}, or several with {MATCHES} or image tokens, are known; {PASS_THEM}"
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Whether it is a transformers model; never imports transformers."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def label_kind(model: nn.Module, accepted: Mapping[str, object]) -> str:
    """What the labels of a model are, a value of LABELS. Raises CaptureError for a model without a known loss."""
    name = type(model).__name__
    kind = next((kind for suffix, kind in LABELS.items() if name.endswith(suffix)), None) or ("token ids" if _is_listed(name) else None)
    if kind is not None and "labels" in accepted:
        return kind
    raise CaptureError(
        f"labels for {name} cannot be made: wanted a class named *{', *'.join(LABELS)} whose forward takes labels. Ask "
        f"for no labels and give the loss as loss_fn=, or {PASS_THEM}"
    )


def _is_listed(name: str) -> bool:
    """Whether transformers lists a class under HEADS."""
    transformers: Any = sys.modules["transformers"]
    return any(name in getattr(transformers.models.auto.modeling_auto, head).values() for head in HEADS)


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a Hugging Face model's config allows, in tokens; None if it sets no bound.

    Export needs it as the upper end of the sequence dim where positions are a slice of a buffer, as in BERT.
    """
    config: Any = getattr(model, "config", None)
    each = [getattr(of_text(config), name, None) for name in POSITIONS]
    return min((allowed for allowed in each if isinstance(allowed, int) and allowed > 0), default=None)


def of_text(config: Any) -> Any:
    """The config of what reads text."""
    return getattr(config, "text_config", None) or config


def check_positions(model: nn.Module, seq: int) -> None:
    """Raise CaptureError if a sequence is longer than the positions that the config allows."""
    allowed = max_positions(model)
    if allowed is not None and allowed < seq:
        raise CaptureError(
            f"{type(model).__name__} has {allowed} positions, got a sequence of {seq}: use a shorter one, or raise "
            f"{' or '.join(POSITIONS)} in the config"
        )
