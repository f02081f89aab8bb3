"""Draws tensors of the sizes that a Hugging Face config says: token ids, images, spectra, sound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import CaptureError

IMAGE_SIDE = 224  # pixels, where the config (ResNet's, for one) does not say: the size ImageNet models are trained on
IMAGE_CHANNELS = 3  # where the config does not say: red, green, blue
FRAMES = ("num_frames", "frames_per_clip")  # what configs call the number of images of a video
PASS_THEM = "pass example_inputs to compile, or name a factory that gives (model, args) on the command line"


@dataclass(frozen=True)
class Draw:
    """Draws inputs for one model: b samples of s tokens. On meta they have shapes only."""

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

    def normal(self, *shape: int) -> Tensor:
        """Normally distributed, float32; on meta only the shape."""
        if self.device.type == "meta":
            return torch.empty(shape, device=self.device)
        return torch.randn(shape, generator=self.generator).to(self.device)

    def tokens(self) -> Tensor:
        """Token ids [b, s]."""
        return self.integers(number(of_text(self.config), "vocab_size"), self.b, self.s)

    def pixels(self) -> Tensor:
        """Images [b, channels, height, width], or videos [b, frames, channels, height, width] where the config says how
        many frames, float32."""
        frames = [many for name in FRAMES if isinstance(many := getattr(self.config, name, None), int)]
        channels = getattr(of_images(self.config), "num_channels", None) or IMAGE_CHANNELS
        return self.normal(self.b, *frames[:1], channels, *self.sides())

    def sides(self) -> tuple[int, int]:
        """Height and width of images, pixels."""
        side = getattr(of_images(self.config), "image_size", None) or IMAGE_SIDE
        height, width = side if isinstance(side, Iterable) else (side, side)
        return height, width

    def features(self) -> Tensor:
        """Spectra of sound, float32: [b, mel bins, frames] as long as the encoder's positions, two frames each
        (Whisper's), or [b, s, features] where the config says how many features each frame has (wav2vec2-BERT's)."""
        if hasattr(self.config, "feature_projection_input_dim"):
            return self.normal(self.b, self.s, number(self.config, "feature_projection_input_dim"))
        return self.normal(self.b, number(self.config, "num_mel_bins"), 2 * number(self.config, "max_source_positions"))

    def sound(self) -> Tensor:
        """Sound, float32: samples [b, n], so many that the convolutions of the config (wav2vec2's and its kin) make s
        frames of them; spectra [b, frames, mel bins] where it says how long these are."""
        config = self.config
        if not hasattr(config, "conv_stride"):
            return self.normal(self.b, number(config, "max_length"), number(config, "num_mel_bins"))
        samples = self.s
        for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
            samples = (samples - 1) * stride + kernel
        return self.normal(self.b, samples)


MAIN: dict[str, Callable[[Draw], Tensor]] = {
    "input_ids": Draw.tokens,
    "pixel_values": Draw.pixels,
    "pixel_values_videos": Draw.pixels,
    "input_features": Draw.features,
    "input_values": Draw.sound,
}
"""What models read, by the name of the argument."""


def number(config: Any, name: str) -> int:
    """A number that a config says. Raises CaptureError if it does not."""
    value = getattr(config, name, None)
    if isinstance(value, int):
        return value
    raise CaptureError(
        f"inputs need {name}, which the config lacks ({type(config).__name__}, got {value!r}): set it, or {PASS_THEM}"
    )


def of_text(config: Any) -> Any:
    """The config of what reads text."""
    return getattr(config, "text_config", None) or config


def of_images(config: Any) -> Any:
    """The config of what sees images."""
    return getattr(config, "vision_config", None) or config
