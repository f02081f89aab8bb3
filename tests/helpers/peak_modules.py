"""Modules of which the peak is counted."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tables(nn.Module):
    """The sum of the rows of three tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(4096, 128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([table(x) for table in self.tables]).sum(0)


ALIKE = {
    "tables": (Tables, lambda: torch.randint(4096, (64,))),
    "layers": (
        lambda: nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(5))),
        lambda: torch.randn(4, 512),
    ),
}
SQUARES = {"square": torch.square, "a power": lambda h: h.pow(2)}


class Loss(nn.Module):
    """The mean of what a model makes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).mean()


class Squared(nn.Module):
    """A loss of squares: what their backward takes for itself is most of the peak."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.square = nn.Linear(128, 128), SQUARES[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.square(self.first(x)).mean()


class Scaled(nn.Module):
    """Vectors that scale rows: no products, for which a CPU without 16-bit instructions takes more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(128)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = (x * scale).relu()
        return x.sum()


TAKING = {
    "a divergence": lambda p, q, x: F.kl_div(p.log_softmax(-1), q.softmax(-1), reduction="batchmean"),
    "logits of two classes": lambda p, q, x: F.binary_cross_entropy_with_logits(p, x.sigmoid()) + q.mean(),
    "reductions": lambda p, q, x: (p.logsumexp(-1) * q.amax(-1)).mean(),
    "a power": lambda p, q, x: torch.pow(p.abs() + 1, q).mean(),
    "an angle": lambda p, q, x: torch.atan2(p, q).sum(-1).mean(),
    "complex numbers": lambda p, q, x: torch.complex(p, q).abs().mean(),
    "real parts": lambda p, q, x: torch.fft.fft(p).real.relu().mean() + q.mean(),
    "a correlation": lambda p, q, x: (
        torch.fft.irfft(torch.fft.rfft(p) * torch.fft.rfft(q).conj(), n=128).square().mean()
    ),
    "dropout": lambda p, q, x: F.dropout(p, 0.1).mean() + q.mean(),
}


class Taking(nn.Module):
    """A loss whose operators take more for themselves than they keep."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(128, 128), nn.Linear(128, 128), TAKING[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.first(x), self.second(x), x)


class Normed(nn.Module):
    """Norms between products, whose gradient is that of a mean: one number."""

    def __init__(self, norm: str, count: int) -> None:
        super().__init__()
        layer = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}[norm]
        self.layers = nn.Sequential(nn.Linear(128, 128), *(layer(128) for _ in range(count)), nn.Linear(128, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


class Widened(nn.Module):
    """Blocks whose weights take about as much as what they keep."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(count)) for sizes in ((128, 512), (512, 128))
        )

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return x.square().mean()


class Attending(nn.Module):
    """Attention that a CPU runs as plain products: some of it is dropped, or its mask has a gradient."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.dropped, self.parts, self.mask = dropped, nn.Linear(128, 3 * 128), nn.Parameter(torch.zeros(128, 128))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).view(-1, 128, 3, 8, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value, self.mask, self.dropped).mean()


class Heads(nn.Module):
    """Attention whose heads are joined. `sloped`: with a bias for distances that is learned."""

    def __init__(self, *, causal: bool = False, sloped: bool = False) -> None:
        super().__init__()
        self.causal, self.slopes = causal, nn.Parameter(torch.ones(4, 1, 1)) if sloped else None
        self.parts, self.out = nn.Linear(128, 3 * 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x).view(*x.shape[:2], 3, 4, 32).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        bias = None if self.slopes is None else -self.slopes * (place[:, None] - place).abs()
        made = F.scaled_dot_product_attention(query, key, value, bias, is_causal=self.causal)
        return self.out(made.transpose(1, 2).reshape(x.shape))


HEADS = {
    "heads": (Heads, lambda: torch.randn(16, 128, 128)),
    "causal heads": (lambda: Heads(causal=True), lambda: torch.randn(16, 128, 128)),
    "sloped heads": (lambda: Heads(sloped=True), lambda: torch.randn(16, 128, 128)),
    "torch's layers": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True),
            3,
            enable_nested_tensor=False,
        ),
        lambda: torch.randn(64, 32, 64),
    ),
}
"""Models of attention, with inputs."""


class Recurrent(nn.Module):
    """The mean of what a recurrent network gives."""

    def __init__(self, name: str, layers: int, both: bool) -> None:
        super().__init__()
        self.network = getattr(nn, name)(64, 64, layers, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.unflatten(1, (2, 64)).repeat(1, 4, 1))[0].mean()


class Rectified(nn.Module):
    """The sum of what layers make whose results are as large as what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


APART = {
    "large activations": (Rectified, lambda: torch.randn(2048, 128)),
    "large weights": (
        lambda: Loss(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))),
        lambda: torch.randn(64, 512),
    ),
}
"""Models whose backward is taken apart, with inputs."""
