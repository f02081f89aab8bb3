"""A two-tower recommender: independent branches of unequal size, so that operators may run side by side."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class TowerConfig:
    """Rows of each embedding table, the width of an embedding, and the widths of the dense layers."""

    tables: tuple[int, ...]
    embedding: int
    widths: tuple[int, ...]


class Dense(nn.Module):
    """Linear and ReLU: [b, d_in] -> [b, d_out]."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.linear = nn.Linear(d_in, d_out)

    def forward(self, x):
        return F.relu(self.linear(x))


class Tower(nn.Module):
    """Ids [b, tables] -> a vector [b, out]."""

    def __init__(self, config, out):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, config.embedding) for rows in config.tables)
        widths = (len(config.tables) * config.embedding, *config.widths)
        self.layers = nn.ModuleList(Dense(i, o) for i, o in zip(widths, config.widths, strict=False))
        self.head = nn.Linear(widths[-1], out)

    def forward(self, ids):
        x = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recommender(nn.Module):
    """A user and an item tower; the score is their scaled inner product."""

    def __init__(self, user, item, out):
        super().__init__()
        self.user, self.item = Tower(user, out), Tower(item, out)
        self.scale = out**-0.5

    def forward(self, user_ids, item_ids, clicked):
        """Mean logistic loss of the scores [b] against clicked [b] (0 or 1)."""
        score = (self.user(user_ids) * self.item(item_ids)).sum(1) * self.scale
        return (F.softplus(score) - score * clicked).mean()


def build(user, item, out, batch):
    """The model and one batch for it."""
    ids = [torch.stack([torch.randint(rows, (batch,)) for rows in tower.tables], dim=1) for tower in (user, item)]
    return Recommender(user, item, out), (*ids, torch.randint(2, (batch,)).float())


def tiny(batch=8):
    """Towers of 2 and 1 layers of 64, for tests."""
    return build(TowerConfig((97, 32, 16), 16, (64, 64)), TowerConfig((64, 16), 16, (64,)), 32, batch)


def large(batch=512):
    """A user tower of twice the width of the item tower, and tables of 2.4 M rows: 0.5 G parameters."""
    user = TowerConfig((1_000_000, 100_000, 10_000, 1_000), 128, (8192, 8192, 8192))
    item = TowerConfig((1_000_000, 250_000, 1_000), 128, (4096, 4096))
    return build(user, item, 256, batch)
