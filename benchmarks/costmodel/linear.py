"""Matmuls with a weight, with or without adapters, and norms."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter beside it: [..., d] -> [..., n]."""

    def __init__(self, wide, narrow, bias, rank):
        super().__init__(wide, narrow, bias=bias)
        self.adapter = nn.Sequential(nn.Linear(wide, rank, bias=False), nn.Linear(rank, narrow, bias=False))

    def forward(self, x):
        return super().forward(x) + self.adapter(x)


class BiasApart(nn.Linear):
    """A linear layer whose bias an operator behind it adds: [..., d] -> [..., n]. It is taken off, negated: what is
    added the passes make one kernel of."""

    def forward(self, x):
        return F.linear(x, self.weight) - self.bias


def linear(config, name, wide, narrow):
    """The layer of a block that is called `name`."""
    if name in config.adapted:
        return Adapted(wide, narrow, config.bias, config.adapters)
    return BiasApart(wide, narrow) if config.bias and config.bias_apart else nn.Linear(wide, narrow, bias=config.bias)


class RMSNorm(nn.RMSNorm):
    """One operator, or, `in_parts`, those of torch before it had a kernel for it (pytorch/pytorch#153666), which run in
    32 bits: [..., d] -> the same."""

    def __init__(self, width, in_parts):
        super().__init__(width)
        self.in_parts = in_parts

    def forward(self, x):
        if not self.in_parts:
            return super().forward(x)
        wide = x.float()
        squares = wide.pow(2).sum(-1, keepdim=True) / x.shape[-1]  # of a mean the passes would make the kernel
        return (wide * torch.rsqrt(squares + 1e-5)).to(x.dtype) * self.weight


def norm(config, width=None):
    """The norm of a row, or of one of another width."""
    width = width or config.hidden
    return RMSNorm(width, config.norm_in_parts) if config.rms else nn.LayerNorm(width)
