"""A multi-layer perceptron classifier: the smallest model with a choice between data and tensor parallelism."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    """Linear and GELU: [b, d_in] -> [b, d_out]."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.linear = nn.Linear(d_in, d_out)

    def forward(self, x):
        return F.gelu(self.linear(x))


class MLP(nn.Module):
    """`depth` hidden layers of one width between `features` inputs and `classes` outputs."""

    def __init__(self, features, hidden, depth, classes):
        super().__init__()
        self.embed = Layer(features, hidden)
        self.layers = nn.ModuleList(Layer(hidden, hidden) for _ in range(depth))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x, targets):
        """Mean cross-entropy of x [b, features] against class ids [b]."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), targets)


def build(features, hidden, depth, classes, batch):
    """The model and one batch for it."""
    return MLP(features, hidden, depth, classes), (torch.randn(batch, features), torch.randint(classes, (batch,)))


def tiny(batch=8):
    """2 layers of 64, for tests."""
    return build(32, 64, 2, 10, batch)


def wide(batch=16):
    """8 layers of 8192 on few samples: 0.6 G parameters and almost no activations."""
    return build(1024, 8192, 8, 1000, batch)


def giant(batch=64):
    """2 layers of 81920: one of them has 25 GiB of weights, and with gradients and Adam's state 100."""
    return build(4096, 81920, 2, 1000, batch)
