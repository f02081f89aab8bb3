"""An emitted file, written by hand: a small transformer on a mesh (dp, tp), and the plain model that it stands for.

It has what real files have: data parallelism with bucketed gradients (dp), vocabulary-parallel embedding and loss over
a tied table of 257 rows, a fused q, k, v projection cut by sections, column and row parallel products, a weight that is
sharded on dp at rest and gathered again in the backward (ZeRO-3), norms with sequence-parallel gradients, a buffer.
"""

# ruff: noqa: RUF012 -- emitted code states its tables as plain class attributes
from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.runtime import Block, Mesh, Param, ShardedModule, gather, reshard
from autopar.runtime.algorithms import vocab_cross_entropy_sum, vocab_embedding

VOCAB, WIDTH, HEADS, LAYERS = 257, 16, 4, 3


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 32, bias=False)
        self.down = nn.Linear(32, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(h)))


class Plain(nn.Module):
    """The model on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(LAYERS))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((1,), 1.5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.wte(ids) * self.scale
        for layer in self.layers:
            h = layer(h)
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def sharded(sizes: tuple[int, int] = (2, 2)) -> type[ShardedModule]:
    """The emitted model for a mesh of `sizes` (dp, tp)."""
    MESH = Mesh(sizes, ("dp", "tp"), "cpu")
    dp, tp = sizes
    heads = HEADS // tp

    class Layer(Block):
        PARAMS = {
            "norm.weight": Param((WIDTH,), "float32", "R,R", sync=(0, 1)),
            "norm.bias": Param((WIDTH,), "float32", "R,R", sync=(0, 1)),
            "qkv.weight": Param((3 * WIDTH, WIDTH), "float32", "R,S0/3", sync=(0,)),
            "qkv.bias": Param((3 * WIDTH,), "float32", "R,S0/3", sync=(0,)),
            "out.weight": Param((WIDTH, WIDTH), "float32", "R,S1", sync=(0,)),
            "up.weight": Param((32, WIDTH), "float32", "S1,S0"),
            "down.weight": Param((WIDTH, 32), "float32", "S0,S1"),
        }

        def forward(self, h, *, b, s):
            w = self.w
            shape = (b, s, WIDTH)
            # S0,S1: sequence parallel
            x = F.layer_norm(h, (WIDTH,), w["norm.weight"], w["norm.bias"])
            x = reshard(x, "S0,S1 -> S0,R", grad="S0,P -> S0,S1", shape=shape, mesh=MESH)
            qkv = F.linear(x, w["qkv.weight"], w["qkv.bias"])
            q, k, v = (
                t.reshape(b // dp, s, heads, WIDTH // HEADS).transpose(1, 2) for t in qkv.split((WIDTH // tp,) * 3, -1)
            )
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b // dp, s, WIDTH // tp)
            x = F.linear(x, w["out.weight"])
            h = h + reshard(x, "S0,P -> S0,S1", grad="S0,S1 -> S0,R", shape=shape, mesh=MESH)
            up = gather(
                w["up.weight"], "S1,S0 -> R,S0", grad="P,S0 -> S1,S0", shape=(32, WIDTH), mesh=MESH, name="up.weight"
            )
            down = gather(
                w["down.weight"],
                "S0,S1 -> R,S1",
                grad="P,S1 -> S0,S1",
                shape=(WIDTH, 32),
                mesh=MESH,
                name="down.weight",
            )
            x = reshard(h, "S0,S1 -> S0,R", grad="S0,P -> S0,S1", shape=shape, mesh=MESH)
            x = F.linear(F.gelu(F.linear(x, up)), down)
            return h + reshard(x, "S0,P -> S0,S1", grad="S0,S1 -> S0,R", shape=shape, mesh=MESH)

    class Model(ShardedModule):
        INPUTS = {"ids": "S0,R", "labels": "S0,R"}
        OUTPUTS = (("loss", "loss"), ("output", "logits"))
        ALIASES = {"head.weight": "wte.weight"}
        PARAMS = {
            "wte.weight": Param((VOCAB, WIDTH), "float32", "R,S0", sync=(0,)),
            "unused": Param((3,), "float32", "R,R", sync=(0, 1)),
        }
        BUFFERS = {"scale": Param((1,), "float32", "R,R")}
        RUNS = {"layers": (Layer, [f"layers.{i}" for i in range(LAYERS)])}

        def forward(self, ids, labels):
            b, s = ids.shape[0] * dp, ids.shape[1]
            h = vocab_embedding(ids, self.w["wte.weight"], vocab=VOCAB, axes=(1,), mesh=MESH) * self.b["scale"]
            h = reshard(h, "S0,P -> S0,S1", grad="S0,S1 -> S0,R", shape=(b, s, WIDTH), mesh=MESH)
            for block in self.runs["layers"]:
                h = block(h, b=b, s=s)
            h = reshard(h, "S0,S1 -> S0,R", grad="S0,P -> S0,S1", shape=(b, s, WIDTH), mesh=MESH)
            logits = F.linear(h, self.w["wte.weight"])
            loss = vocab_cross_entropy_sum(logits, labels, -100, 0.0, vocab=VOCAB, axes=(1,), mesh=MESH)
            count = (labels != -100).sum(dtype=loss.dtype)
            loss = reshard(loss, "P,P -> R,R", grad="R,R -> R,R", shape=(), mesh=MESH)
            count = reshard(count, "P,R -> R,R", grad=None, shape=(), mesh=MESH)
            return loss / count, self.spread(logits, "S0,S2", (b, s, VOCAB))

    Model.MESH = MESH
    return Model


def batch(rows: int = 4, length: int = 6) -> tuple[Tensor, Tensor]:
    """Global ids and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels[0, :4] = -100
    return ids, labels
