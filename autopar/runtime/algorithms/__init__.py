"""Operators whose split form is not the plain operator on shards: one file per algorithm, named as in autopar.rules.

All take `axes`, the mesh axes that split the operator, major first.
"""

from autopar.runtime.algorithms.causal_rows import causal_rows
from autopar.runtime.algorithms.dropout import dropout
from autopar.runtime.algorithms.experts_on_ranks import experts_on_ranks
from autopar.runtime.algorithms.halo import halo
from autopar.runtime.algorithms.own_groups import own_groups
from autopar.runtime.algorithms.own_heads import own_heads
from autopar.runtime.algorithms.placed import placed
from autopar.runtime.algorithms.ring_attention import ring_attention
from autopar.runtime.algorithms.seeded import seeded
from autopar.runtime.algorithms.tiled import tiled_embedding, tiled_linear, tiled_matmul
from autopar.runtime.algorithms.vocab_bag import vocab_bag
from autopar.runtime.algorithms.vocab_cross_entropy import vocab_cross_entropy_sum
from autopar.runtime.algorithms.vocab_embedding import vocab_embedding
from autopar.runtime.rng import in_training

__all__ = [
    "causal_rows",
    "dropout",
    "experts_on_ranks",
    "halo",
    "in_training",
    "own_groups",
    "own_heads",
    "placed",
    "ring_attention",
    "seeded",
    "tiled_embedding",
    "tiled_linear",
    "tiled_matmul",
    "vocab_bag",
    "vocab_cross_entropy_sum",
    "vocab_embedding",
]
