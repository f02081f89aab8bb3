"""Images in texts: how many tokens of a vision-language model stand for one image, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import fake_mode
from autopar.errors import CaptureError
from autopar.frontend.draw import PASS_THEM
from autopar.text import first_line

FEATURES = "get_image_features"  # what models that put images into texts have, as those that match both
TOKEN = "image_token_id"
FIRST = 1  # the place of the first image token: behind that of the beginning of a text


def puts_images_into_texts(model: nn.Module, accepted: Mapping[str, object]) -> bool:
    """Whether `model`, whose forward takes `accepted`, replaces tokens of texts by features of images."""
    config: Any = model.config
    wanted = {"input_ids", "pixel_values", "labels"}
    return _maker(model) is not None and isinstance(getattr(config, TOKEN, None), int) and wanted <= set(accepted)


def _maker(model: Any) -> Any:
    """What makes features of images, of the model or of the one that it has its head on; None where neither does."""
    return getattr(model, FEATURES, None) or getattr(model.base_model, FEATURES, None)


def tokens_of_an_image(model: nn.Module, pixels: Tensor) -> int:
    """How many rows of features `model` makes of each image of `pixels [b, ...]`: it is asked, with sizes only.

    Raises CaptureError where it wants more than pixels.
    """
    given = torch.empty_like(pixels, device=next(model.parameters()).device)
    with torch.no_grad(), fake_mode():
        try:
            found: Any = _maker(model)(given)
            made: Any = found if isinstance(found, (Tensor, list, tuple)) else found.pooler_output
            rows = sum(one.numel() // one.shape[-1] for one in (made if isinstance(made, (list, tuple)) else [made]))
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise CaptureError(
                f"inputs for {type(model).__name__} cannot be made: {FEATURES} does not work on pixels of "
                f"{tuple(pixels.shape)} alone ({first_line(error)}); {PASS_THEM}"
            ) from error
    return rows // pixels.shape[0]


def with_images(ids: Tensor, token: int, count: int, model: str) -> Tensor:
    """Token ids [b, s] with `count` image tokens in each sample, and none elsewhere. Raises CaptureError where a sample
    is too short for them."""
    if ids.shape[1] <= FIRST + count:
        raise CaptureError(
            f"{model} puts {count} tokens of an image into each text, got a sequence of {ids.shape[1]}: use one of at "
            f"least {FIRST + count + 1}"
        )
    if ids.is_meta:
        return ids
    text = ids.where(ids != token, token - 1 if token else token + 1)
    text[:, FIRST : FIRST + count] = token
    return text
