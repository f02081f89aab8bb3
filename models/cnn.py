"""A convolutional network with large dense layers, after AlexNet: the case for one weird trick.

Most of the time is in the convolutions, which have few weights; most of the weights are in the dense layers, which
take little time. So the first want to be split by sample and the second by parameter (Krizhevsky 2014,
https://arxiv.org/abs/1404.5997).
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Conv:
    """One convolution: output channels, kernel, stride, padding, and whether a 3x3 max pool of stride 2 follows."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 0
    pool: bool = False


ALEXNET = (
    Conv(64, 11, stride=4, padding=2, pool=True),
    Conv(192, 5, padding=2, pool=True),
    Conv(384, 3, padding=1),
    Conv(256, 3, padding=1),
    Conv(256, 3, padding=1, pool=True),
)
TINY = (Conv(8, 5, stride=2, padding=2, pool=True), Conv(16, 3, padding=1), Conv(16, 3, padding=1, pool=True))


class ConvLayer(nn.Module):
    """Convolution, ReLU and perhaps a pool: [b, c, h, w] -> [b, c', h', w']."""

    def __init__(self, channels, conv):
        super().__init__()
        self.conv = nn.Conv2d(channels, conv.channels, conv.kernel, conv.stride, conv.padding)
        self.pool = conv.pool

    def forward(self, x):
        x = F.relu(self.conv(x))
        return F.max_pool2d(x, 3, 2) if self.pool else x


class DenseLayer(nn.Module):
    """Dropout, linear and ReLU: [b, d_in] -> [b, d_out]."""

    def __init__(self, d_in, d_out, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(d_in, d_out)

    def forward(self, x):
        return F.relu(self.linear(self.dropout(x)))


class CNN(nn.Module):
    """Convolutions, two dense layers and a classifier for square images."""

    def __init__(self, convs, image, hidden, classes, dropout):
        super().__init__()
        channels = [3, *(conv.channels for conv in convs)]
        self.convs = nn.ModuleList(ConvLayer(c, conv) for c, conv in zip(channels, convs, strict=False))
        features = channels[-1] * side_after(convs, image) ** 2
        self.dense = nn.ModuleList([DenseLayer(features, hidden, dropout), DenseLayer(hidden, hidden, dropout)])
        self.head = nn.Linear(hidden, classes)

    def forward(self, images, targets):
        """(mean cross-entropy, logits [b, classes]) of images [b, 3, h, w] against class ids [b]."""
        x = images
        for conv in self.convs:
            x = conv(x)
        x = x.flatten(1)
        for dense in self.dense:
            x = dense(x)
        logits = self.head(x)
        return F.cross_entropy(logits, targets), logits


def side_after(convs, side):
    """Height (= width) in pixels of what the convolutions leave of a square image."""
    for conv in convs:
        side = (side + 2 * conv.padding - conv.kernel) // conv.stride + 1
        if conv.pool:
            side = (side - 3) // 2 + 1
    return side


def build(convs, image, hidden, classes, dropout, batch):
    """The model and one batch for it."""
    inputs = torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))
    return CNN(convs, image, hidden, classes, dropout), inputs


def tiny(batch=8):
    """3 convolutions on 32x32 images, for tests."""
    return build(TINY, 32, 64, 10, 0.0, batch)


def alexnet(batch=128):
    """AlexNet for ImageNet: 61 M parameters, 96 % of them in the dense layers."""
    return build(ALEXNET, 224, 4096, 1000, 0.5, batch)
