"""Inputs for a Hugging Face model, from its config and the signature of its forward."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.frontend import images
from autopar.frontend.draw import MAIN, PASS_THEM, Draw, number, of_text
from autopar.frontend.labels import IGNORED, labels_for

POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")
"""What configs call the number of positions of text."""
TABLE = ".position_embeddings"  # what the table of positions is called that has a row of padding
MARKS = ("token_type_ids", "mm_token_type_ids")  # which tokens are those of images, where models want to be told
MATCHES = "return_loss"  # what CLIP and its kin take for labels: each sample's text belongs to its image
Inputs = tuple[tuple[object, ...], dict[str, object]]


def inputs_for(
    model: nn.Module,
    *,
    batch: int,
    seq: int,
    device: torch.device | str | None = None,
    seed: int = 0,
    labels: bool = True,
) -> Inputs:
    """(args, kwargs) for a Hugging Face model: ids [batch, seq], pixels, both (of models that match them, or put images
    into texts), or sound; decoder ids, and labels that match its head.

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
    draw = Draw(config, batch, seq, device, torch.Generator().manual_seed(seed))
    accepted = inspect.signature(model.forward).parameters
    kwargs: dict[str, object] = {}
    for name in main_inputs(model, accepted):
        made: Tensor = MAIN[name](draw)
        kwargs[name] = made.to(next(model.parameters()).dtype) if made.is_floating_point() else made
    if "input_ids" in kwargs or config.is_encoder_decoder:
        check_positions(model, seq)
    if images.puts_images_into_texts(model, accepted):
        kwargs |= texts_with_images(model, kwargs, accepted)
    if labels and MATCHES in accepted:
        kwargs[MATCHES] = True
    elif labels:
        kwargs |= labels_for(model, accepted, draw)
    # as mBART does, whose decoder starts with the last token of each sample
    shifts = "labels" in kwargs and getattr(config, "decoder_start_token_id", None) is None
    if config.is_encoder_decoder and "decoder_input_ids" in accepted and not shifts:
        kwargs["decoder_input_ids"] = _decoder_ids(draw, kwargs.get("labels"))
    if _takes("use_cache", accepted, config) and getattr(of_text(config), "use_cache", False):
        kwargs["use_cache"] = False
    return (), kwargs


def _decoder_ids(draw: Draw, labels: object) -> Tensor:
    """Decoder input ids [b, s]: the labels shifted right behind the start token, or any ids where labels are not
    tokens."""
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return draw.tokens()
    start, pad = number(draw.config, "decoder_start_token_id"), number(draw.config, "pad_token_id")
    shifted = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1)
    return shifted.where(shifted != IGNORED, pad)


def _takes(name: str, accepted: Mapping[str, inspect.Parameter], config: Any) -> bool:
    """Whether a forward has an argument `name`, or hands all that it does not know on to the part that reads text."""
    hands_on = of_text(config) is not config and any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values()
    )
    return name in accepted or hands_on


def texts_with_images(model: Any, made: Mapping[str, Any], accepted: Mapping[str, object]) -> dict[str, object]:
    """Token ids with image tokens as many as `model` makes features of the pixels that are `made`, and what says which
    are such tokens."""
    count = images.tokens_of_an_image(model, made["pixel_values"])
    ids = images.with_images(made["input_ids"], model.config.image_token_id, count, type(model).__name__)
    marks = {name: (ids == model.config.image_token_id).long() for name in MARKS if name in accepted}
    return {"input_ids": ids, **marks}


def main_inputs(model: Any, accepted: Mapping[str, object]) -> list[str]:
    """Which of MAIN a model reads. Raises CaptureError where that is not known: of a model that reads several, unless
    it matches them or puts images into texts."""
    known = [name for name in MAIN if name in accepted]
    if images.puts_images_into_texts(model, accepted):
        return ["input_ids", "pixel_values"]  # sound may come with them, and need not
    if known == [model.main_input_name] or (len(known) > 1 and MATCHES in accepted):
        return known
    raise CaptureError(
        f"inputs for {type(model).__name__} cannot be made from its config: its forward takes {', '.join(accepted)}, "
        f"and only one of {', '.join(MAIN)}, or several with {MATCHES} or image tokens, are known; {PASS_THEM}"
    )


def is_hugging_face(model: nn.Module) -> bool:
    """Whether it is a transformers model; never imports transformers."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a Hugging Face model's config allows, in tokens; None if it sets no bound.

    Export needs it as the upper end of the sequence dim where positions are a slice of a buffer, as in BERT. Models of
    RoBERTa's kin count from behind the row of padding: 512 tokens of 514 positions.
    """
    config: Any = getattr(model, "config", None)
    each = [getattr(of_text(config), name, None) for name in POSITIONS]
    each += [
        table.num_embeddings - table.padding_idx - 1
        for name, table in model.named_modules()
        if name.endswith(TABLE) and isinstance(table, nn.Embedding) and table.padding_idx is not None
    ]
    return min((allowed for allowed in each if isinstance(allowed, int) and allowed > 0), default=None)


def check_positions(model: nn.Module, seq: int) -> None:
    """Raise CaptureError if a sequence is longer than the positions that the config allows."""
    allowed = max_positions(model)
    if allowed is not None and allowed < seq:
        raise CaptureError(
            f"{type(model).__name__} has {allowed} positions, got a sequence of {seq}: use a shorter one, or raise "
            f"{' or '.join(POSITIONS)} in the config"
        )
