"""Sizes and kinds of the transformers that published training runs train."""

from dataclasses import dataclass, replace

from benchmarks.costmodel.predict import Layers


@dataclass(frozen=True)
class Latent:
    """Attention whose queries (none: 0), keys and values come from narrow vectors of a token
    (https://arxiv.org/abs/2405.04434, section 2.1): the widths of these, and of a head its parts without and with
    positions, and its value. The defaults are those of the models that have it (https://arxiv.org/abs/2412.19437,
    section 4.2)."""

    queries: int = 1536
    values: int = 512
    plain: int = 128
    rotary: int = 64
    value: int = 128

    @property
    def width(self):
        """Of a query and of a key."""
        return self.plain + self.rotary


@dataclass(frozen=True)
class Config:
    """Sizes and kinds; the defaults are GPT-2 small.

    `norm_in_parts`: RMS norms are operators one by one. `bias_apart`: biases are added behind the matmuls. `gated`:
    silu(gate) * up instead of gelu(up). `rotary`: positions by rotation, else learned. `fused_attention`: one operator,
    else scores, softmax and their product one by one, `fused_softmax`: scale and mask in the kernel of the softmax.
    `window` > 0: every second block, the first one too, attends to so many tokens only. `packed` > 0: sequences are
    packed with samples of so many tokens, and none attends to another's. `latent`: attention is that. `experts` > 0:
    each token meets `top_k` of them, each `expert_ffn` wide, and `shared` columns of experts that all tokens meet; not
    in the first `dense` blocks. `ahead`: one more block and head predict the token behind the next
    (https://arxiv.org/abs/2412.19437, section 2.2). `adapters` > 0: low-rank adapters so wide beside the matmuls of
    each block that `adapted` names (https://arxiv.org/abs/2106.09685), which alone are trained.
    """

    vocab: int = 50257
    positions: int = 1024
    layers: int = 12
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    hidden: int = 768
    ffn: int = 3072
    rms: bool = False
    norm_in_parts: bool = False
    gated: bool = False
    squared_relu: bool = False
    bias: bool = True
    bias_apart: bool = False
    rotary: bool = False
    tied: bool = True
    dropout: float = 0.0
    fused_attention: bool = True
    fused_softmax: bool = False
    window: int = 0
    packed: int = 0
    latent: Latent | None = None
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared: int = 0
    dense: int = 0
    ahead: bool = False
    adapters: int = 0
    adapted: tuple[str, ...] = ()

    def kind(self, layer):
        """What block number `layer` is: whether it has experts, and whether it attends to a window."""
        return bool(self.experts) and layer >= self.dense, bool(self.window) and layer % 2 == 0

    def short(self):
        """The same with as few blocks as show all kinds that it has: a repeated block is priced by itself."""
        leading = CAPTURED * bool(self.layer_kinds.leading)
        return replace(self, layers=leading + CAPTURED * self.layer_kinds.period, dense=leading)

    @property
    def layer_kinds(self):
        """Its layers as a prediction takes them from the blocks of `short`."""
        return Layers(self.layers, self.dense if self.experts else 0, 2 if self.window else 1)


CAPTURED = 3
"""Blocks of each kind in a captured graph: they are alike."""
